"""The rules of the house, each a function from one source file to what breaks the rule in it.

Sources are parsed, never imported, so a file that cannot be imported yet is checked all the same.
`tests/unit/test_layout.py` applies the rules to the tree and each rule to a small bad snippet.
"""

import ast
import re
import sys

from tests.layout_source import Source, iter_imports

PACKAGE = "modeling_k3"

#: The flat files of the model from the config up; a file imports only files above it.
ORDER = (
    "versions supported systems class_maps byte_sizes config_layout config_checks configuration_k3 precision situ mlp "
    "mxfp4 tensor_files tensor_writer expert_shelf residency expert_pages kda_slab kda_chunk kda_exact kda_ops "
    "kda_check kda_verdicts kda_fla kda_paths kda_guard fused_kernel norms attn_res_fla attn_res rollback cache_layers "
    "cache static_cache packing short_conv kda attention_span mla_forms mla gradient_memory expert_groups experts "
    "low_bits latent_moe checkpoint hub_files dense_bits stored_bits weight_report block_borders placement load_plan "
    "loading quantizer saving vocabulary tokenizer_modes markup call_arguments tool_results chat markup_reader "
    "chat_reader chat_tokens tokenization_k3 hub_source hub_facts hub_card hub_upload hub_code model_saving "
    "persistence expert_memory outputs masks call_masks head_checks fingerprint prefix_files prefix_cache cache_choice "
    "signals generation decoder_layer initialization modeling_k3 classification registration"
).split()
#: Folders with tools. The last two stand at the top of the tree and are mapped into the package by setup.cfg.
TOOLS = "demo adapters training planning readiness terminal configuration conversion".split()
REQUIRED = {"torch", "transformers", "safetensors", "huggingface_hub", "tokenizers"}
OPTIONAL = {"fla", "peft", "bitsandbytes", "accelerate", "triton", "hqq"}
MAX_FILE_LINES = 319
MAX_FUNCTION_LINES = 64
#: Hooks whose meaning torch or transformers documents.
OVERRIDES = frozenset(
    "forward backward setup_context extra_repr reset_parameters get_input_embeddings set_input_embeddings "
    "get_output_embeddings set_output_embeddings".split()
)

_PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"}
# What the hub's file finder takes for an import, wherever it stands.
_LOOKS_LIKE_IMPORT = re.compile(r"^\s*(from\s+\.\S+\s+import|import\s+\.\S+\s*$)", re.MULTILINE)
# Bracketed first letters keep these lines from matching themselves.
_FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:[w]ork|[r]oot)/"),
    "an unencrypted address": re.compile(r"[h]ttp://"),
    "a registry address": re.compile(
        r"[p]ypi\.org|[p]ythonhosted\.org|[d]ownload\.pytorch\.org|[n]pmjs\.org|[a]naconda\.org|[d]eb\.debian\.org"
        r"|--(?:extra-)?[i]ndex-url|--[f]ind-links"
    ),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def known_place(source: Source) -> list[str]:
    """A flat file has its place in the order of dependency."""
    if source.stem in ORDER:
        return []
    return [source.finding(1, "has no place in ORDER (tests/layout_rules.py): a file imports only files above it")]


def allowed_packages(source: Source) -> list[str]:
    """A model file imports the standard library and the packages every user has; optional ones are another rule."""
    known = sys.stdlib_module_names | REQUIRED | OPTIONAL | {PACKAGE}
    return [
        source.finding(found.line, f"`{found}`: beside the standard library a model file imports {sorted(REQUIRED)}")
        for found in iter_imports(source.tree)
        if found.level == 0 and found.top not in known
    ]


def siblings_by_name(source: Source) -> list[str]:
    """Siblings are imported as `from .name import X`: the hub's file finder follows nothing else."""
    return [
        source.finding(found.line, f"`{found}`: write `from .name import X` with a flat sibling's name")
        for found in iter_imports(source.tree)
        if found.level and (found.level > 1 or not found.module or "." in found.module or "*" in found.names)
    ]


def only_files_above(source: Source) -> list[str]:
    """A file imports only files above it in the order of dependency."""
    above = ORDER[: ORDER.index(source.stem)] if source.stem in ORDER else ORDER
    return [
        source.finding(found.line, f"`{found}`: {found.module!r} does not stand above {source.stem!r} in ORDER")
        for found in iter_imports(source.tree)
        if found.level == 1 and found.module and found.module not in above
    ]


def no_tools(source: Source) -> list[str]:
    """The model imports no tool, and nothing of itself by its absolute name."""
    findings = []
    for found in iter_imports(source.tree):
        if found.level and found.top in {*TOOLS, "cli"}:
            findings.append(source.finding(found.line, f"`{found}`: the model imports no tool"))
        if found.level == 0 and found.top == PACKAGE:
            findings.append(source.finding(found.line, f"`{found}`: write `from .name import X` with a sibling's name"))
    return findings


def optional_inside_try(source: Source) -> list[str]:
    """Optional packages are imported inside try/except ImportError only."""
    return [
        source.finding(found.line, f"`{found}`: {found.top} is optional; import it inside try/except ImportError")
        for found in iter_imports(source.tree)
        if found.level == 0 and found.top in OPTIONAL and not found.guarded
    ]


def no_import_lines_in_strings(source: Source) -> list[str]:
    """No line of a string begins like a sibling import: the hub's file finder would look for that file."""
    real = {node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)}
    lines = [source.text.count("\n", 0, match.start(1)) + 1 for match in _LOOKS_LIKE_IMPORT.finditer(source.text)]
    return [
        source.finding(line, "a line of a string begins like `from .x import`: put something before it")
        for line in lines
        if line not in real
    ]


def tools_import_absolutely(source: Source) -> list[str]:
    """A tool reaches the model as `modeling_k3`, and only its own folder by a dot."""
    own = 0 if source.name == f"{PACKAGE}/cli.py" else 1
    findings = []
    for found in iter_imports(source.tree):
        if found.level > own:
            findings.append(source.finding(found.line, f"`{found}`: import {PACKAGE} absolutely"))
        if found.level == 0 and found.top in {"configuration", "conversion"}:
            findings.append(source.finding(found.line, f"`{found}`: its name is {PACKAGE}.{found.top}"))
    return findings


def public_names_only(source: Source) -> list[str]:
    """An example imports what a user may rely on: the package, a tool folder, no private name."""
    public = {PACKAGE, *(f"{PACKAGE}.{tool}" for tool in TOOLS)}
    findings = []
    for found in iter_imports(source.tree):
        is_ours = found.level > 0 or found.top in {PACKAGE, "configuration", "conversion", "tests", "benchmarks"}
        is_private = any(name.startswith("_") for name in found.names)
        if is_ours and (found.module not in public or found.level > 0 or is_private):
            findings.append(source.finding(found.line, f"`{found}`: examples import public names of {PACKAGE} only"))
    return findings


def short_file(source: Source) -> list[str]:
    """A file stays readable in one sitting."""
    count = len(source.text.splitlines())
    if count <= MAX_FILE_LINES:
        return []
    return [source.finding(count, f"{count} lines; the most is {MAX_FILE_LINES}: split it")]


def short_functions(source: Source) -> list[str]:
    """A function, without its docstring, fits on a screen."""
    findings = []
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            docstring = _docstring_node(node)
            spared = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
            count = (node.end_lineno or node.lineno) - node.lineno + 1 - spared
            if count > MAX_FUNCTION_LINES:
                message = f"{node.name} has {count} lines; the most is {MAX_FUNCTION_LINES}"
                findings.append(source.finding(node.lineno, message))
    return findings


def _docstring_node(node: Function) -> ast.Expr | None:
    first = node.body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return first if is_text else None


def has_docstrings(source: Source) -> list[str]:
    """Whatever is public explains itself: module-level functions, classes and their methods."""
    findings = []
    for node in source.tree.body:
        public = [node] if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") else []
        if public and isinstance(node, ast.ClassDef):
            public += [child for child in node.body if isinstance(child, Function) and _is_public_method(child)]
        for child in public:
            if not ast.get_docstring(child):
                findings.append(source.finding(child.lineno, f"{child.name} is public and has no docstring"))
    return findings


def _is_public_method(node: Function) -> bool:
    """Accessors that complete a property and overloads share the docstring of their first form."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return not (node.name.startswith("_") or node.name in OVERRIDES or decorators & {"override", "overload", "setter"})


def has_type_hints(source: Source) -> list[str]:
    """Every parameter and every result has a type, in private functions too."""
    methods = {
        child: "staticmethod" not in {ast.unparse(decorator) for decorator in child.decorator_list}
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, Function)
    }
    findings = []
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            parameters = [*node.args.posonlyargs, *node.args.args]
            parameters = parameters[1:] if methods.get(node, False) else parameters
            rest = [extra for extra in (node.args.vararg, node.args.kwarg) if extra is not None]
            bare = [each.arg for each in (*parameters, *node.args.kwonlyargs, *rest) if each.annotation is None]
            if bare:
                findings.append(source.finding(node.lineno, f"{node.name}: no type for {', '.join(bare)}"))
            if node.returns is None:
                findings.append(source.finding(node.lineno, f"{node.name}: no type for what it returns"))
    return findings


def declared_config_fields(source: Source) -> list[str]:
    """The config declares its fields, so nobody asks whether one is there or makes up a default."""
    findings = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            owner = ast.unparse(node.args[0])
            # A loop over declared names, without a default, is how validation reads fields.
            is_loop = len(node.args) == 2 and not isinstance(node.args[1], ast.Constant)
            if owner.rpartition(".")[2] == "config" and not is_loop:
                findings.append(source.finding(node.lineno, f"`{ast.unparse(node)}`: read the declared field"))
    return findings


def safe_loading(source: Source) -> list[str]:
    """Nothing that can run a stranger's code: no pickle, no `torch.load`, no remote code."""
    findings = []
    for found in iter_imports(source.tree):
        if found.top in _PICKLES or (found.module == "torch" and "load" in found.names):
            findings.append(source.finding(found.line, f"`{found}`: unpickling can run code; use safetensors or JSON"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            findings.append(source.finding(node.lineno, "`torch.load` can run code; use safetensors"))
        pairs: list[tuple[str | None, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            pairs = list(zip(keys, node.values, strict=True))
        if any(key == "trust_remote_code" and ast.unparse(value) == "True" for key, value in pairs):
            findings.append(source.finding(node.lineno, "`trust_remote_code=True` runs a stranger's code"))
    return findings


def clean_text(source: Source) -> list[str]:
    """No text names one machine's folders, a registry, or an unencrypted address."""
    return [
        source.finding(number, f"{what}: {match.group()!r}")
        for number, line in enumerate(source.text.splitlines(), start=1)
        for what, pattern in _FORBIDDEN_TEXT.items()
        for match in pattern.finditer(line)
    ]

"""The tree keeps the rules of the house, and each rule catches what it is there for."""

import inspect
from collections.abc import Callable
from configparser import ConfigParser
from functools import cache

import pytest

from tests import layout_rules as rules
from tests.layout_source import ROOT, Source, is_text, tracked_files

Rule = Callable[[Source], list[str]]

_FILES = tracked_files()
_PYTHON = [name for name in _FILES if name.endswith(".py")]
_FLAT = [name for name in _PYTHON if name.startswith("modeling_k3/") and name.count("/") == 1]
_MODEL = [name for name in _FLAT if name not in ("modeling_k3/__init__.py", "modeling_k3/cli.py")]
_SHIPPED = [name for name in _PYTHON if name.startswith(("modeling_k3/", "configuration/", "conversion/"))]
_TOOLS = [name for name in _SHIPPED if name not in _MODEL and name != "modeling_k3/__init__.py"]
_EXAMPLES = [name for name in _PYTHON if name.startswith("examples/")]
_OURS = _SHIPPED + _EXAMPLES + [name for name in _PYTHON if name.startswith("benchmarks/")]
# The licence is quoted to the letter, addresses and all.
_TEXTS = [name for name in _FILES if name != "LICENSE" and is_text(name)]


def over(names: list[str]) -> pytest.MarkDecorator:
    """Run a test once for each file."""
    return pytest.mark.parametrize("name", names)


read = cache(Source.read)


def check(rule: Rule, name: str) -> None:
    """Fail with one line `file:line: message` for each finding."""
    findings = rule(read(name))
    assert not findings, "\n" + "\n".join([rule.__doc__ or "", *findings])


@over(_MODEL)
def test_model_file_has_a_place_in_the_order(name: str) -> None:
    check(rules.known_place, name)


@over(_MODEL)
def test_model_file_imports_only_required_packages(name: str) -> None:
    check(rules.allowed_packages, name)


@over(_MODEL)
def test_model_file_imports_siblings_by_name(name: str) -> None:
    check(rules.siblings_by_name, name)


@over(_MODEL)
def test_model_file_imports_only_files_above(name: str) -> None:
    check(rules.only_files_above, name)


@over(_MODEL)
def test_model_file_imports_no_tool(name: str) -> None:
    check(rules.no_tools, name)


@over([*_MODEL, *(name for name in _FLAT if name.endswith("__init__.py"))])
def test_optional_packages_are_inside_try(name: str) -> None:
    check(rules.optional_inside_try, name)


@over(_MODEL)
def test_no_string_looks_like_an_import(name: str) -> None:
    check(rules.no_import_lines_in_strings, name)


@over(_TOOLS)
def test_tool_imports_the_model_absolutely(name: str) -> None:
    check(rules.tools_import_absolutely, name)


@over(_EXAMPLES)
def test_example_imports_public_names_only(name: str) -> None:
    check(rules.public_names_only, name)


@over(_PYTHON)
def test_file_is_short(name: str) -> None:
    check(rules.short_file, name)


@over(_PYTHON)
def test_functions_are_short(name: str) -> None:
    check(rules.short_functions, name)


@over(_OURS)
def test_what_is_public_has_a_docstring(name: str) -> None:
    check(rules.has_docstrings, name)


@over(_PYTHON)
def test_signatures_have_type_hints(name: str) -> None:
    check(rules.has_type_hints, name)


@over(_OURS)
def test_config_fields_are_declared(name: str) -> None:
    check(rules.declared_config_fields, name)


@over(_OURS)
def test_nothing_unpickles_or_runs_remote_code(name: str) -> None:
    check(rules.safe_loading, name)


@over(_TEXTS)
def test_text_names_no_machine_and_no_registry(name: str) -> None:
    check(rules.clean_text, name)


def _setup() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


#: Listed so that their files go into the wheel; nothing is imported from them.
_DATA_ONLY = {"modeling_k3.pico"}


def _packages() -> dict[str, str]:
    """Map every listed package to its folder below the root."""
    options = _setup()["options"]
    folders = dict(line.replace(" ", "").split("=") for line in options["package_dir"].strip().splitlines())
    listed = options["packages"].split()
    return {name: folders.get(name, name.replace(".", "/")) for name in listed}


def test_every_package_folder_is_listed_in_setup_cfg() -> None:
    folders = {name.rpartition("/")[0] for name in _SHIPPED if name.endswith("/__init__.py")}
    missing = sorted(folders - set(_packages().values()))
    assert not missing, f"setup.cfg: `packages` lacks {missing}; they would be absent from the wheel"


def test_every_listed_package_is_a_folder_with_init() -> None:
    code = {name: ROOT / folder for name, folder in _packages().items() if name not in _DATA_ONLY}
    empty = [name for name, folder in code.items() if not (folder / "__init__.py").is_file()]
    assert not empty, f"setup.cfg: `packages` lists {empty}, which have no __init__.py"
    for folder in (ROOT / _packages()[name] for name in _DATA_ONLY):
        assert any(folder.iterdir()) and not list(folder.rglob("*.py"))


def test_every_tool_folder_is_known_to_the_rules() -> None:
    folders = {name.split("/")[1] for name in _SHIPPED if name.startswith("modeling_k3/") and name.count("/") > 1}
    unknown = sorted(folders - set(rules.TOOLS))
    assert not unknown, f"tests/layout_rules.py: TOOLS lacks {unknown}"


_KDA = "modeling_k3/kda.py"
_TOOL = "modeling_k3/training/lr.py"
_LONG = "def f() -> None:\n" + "    pass\n" * 64
_SIBLING_LINE = "from .norms " + "import RMSNorm"

BAD: list[tuple[Rule, str, str, int]] = [
    (rules.known_place, "modeling_k3/helpers.py", "", 1),
    (rules.allowed_packages, _KDA, "import os\nimport numpy as np", 2),
    (rules.allowed_packages, _KDA, "def f() -> None:\n    from einops import rearrange", 2),
    (rules.siblings_by_name, _KDA, "from . import norms", 1),
    (rules.siblings_by_name, _KDA, "from .training.muon import Muon", 1),
    (rules.siblings_by_name, _KDA, "from .norms import *", 1),
    (rules.only_files_above, _KDA, "\nfrom .modeling_k3 import K3Model", 2),
    (rules.only_files_above, _KDA, "from .kda import itself", 1),
    (rules.only_files_above, _KDA, "from .unheard_of import X", 1),
    (rules.no_tools, _KDA, "from .training import pack", 1),
    (rules.no_tools, _KDA, "import modeling_k3.norms", 1),
    (rules.no_tools, _KDA, "from modeling_k3.situ import situ", 1),
    (rules.no_tools, _KDA, "try:\n    from modeling_k3.cli import main\nexcept ImportError:\n    main = None", 2),
    (rules.optional_inside_try, _KDA, "from fla.ops.kda import chunk_kda", 1),
    (rules.optional_inside_try, _KDA, "try:\n    pass\nexcept ImportError:\n    import peft", 4),
    (rules.no_import_lines_in_strings, _KDA, f'"""Usage:\n\n    {_SIBLING_LINE}\n"""', 3),
    (rules.tools_import_absolutely, _TOOL, "from ..kda import KimiDeltaAttention", 1),
    (rules.tools_import_absolutely, "modeling_k3/cli.py", "from .kda import KimiDeltaAttention", 1),
    (rules.tools_import_absolutely, _TOOL, "from configuration import preset_path", 1),
    (rules.public_names_only, "examples/chat.py", "from modeling_k3.kda import KimiDeltaAttention", 1),
    (rules.public_names_only, "examples/chat.py", "from modeling_k3 import _secret", 1),
    (rules.public_names_only, "examples/chat.py", "import tests.tolerances", 1),
    (rules.short_file, _KDA, "\n" * 320, 320),
    (rules.short_functions, _KDA, "\n" + _LONG, 2),
    (rules.has_docstrings, _KDA, "def f() -> None: ...", 1),
    (rules.has_docstrings, _KDA, "class A: ...", 1),
    (rules.has_docstrings, _KDA, 'class A:\n    """A."""\n    def f(self) -> None: ...', 3),
    (rules.has_type_hints, _KDA, "def f(x) -> None: ...", 1),
    (rules.has_type_hints, _KDA, "def _f(x: int): ...", 1),
    (rules.has_type_hints, _KDA, "class A:\n    def f(self, *, x=1, **rest) -> None: ...", 2),
    (rules.has_type_hints, _KDA, "class A:\n    @staticmethod\n    def f(x) -> None: ...", 3),
    (rules.declared_config_fields, _KDA, 'x = getattr(config, "hidden_size", 1)', 1),
    (rules.declared_config_fields, _KDA, 'x = getattr(self.config, "hidden_size")', 1),
    (rules.declared_config_fields, _KDA, "x = getattr(config, name, None)", 1),
    (rules.safe_loading, _KDA, "import pickle", 1),
    (rules.safe_loading, _KDA, "from torch import load", 1),
    (rules.safe_loading, _KDA, "import torch\nx = torch.load(path, weights_only=True)", 2),
    (rules.safe_loading, _KDA, "m = AutoModel.from_pretrained(path, trust_remote_code=True)", 1),
    (rules.safe_loading, _KDA, 'options = {"trust_remote_code": True}', 1),
    (rules.clean_text, "README.md", "see\n/wor" + "k/shared", 2),
    (rules.clean_text, "README.md", "htt" + "p://example.org", 1),
    (rules.clean_text, "setup.cfg", "pip install --index" + "-url https://somewhere", 1),
]

GOOD: list[tuple[Rule, str, str]] = [
    (
        rules.allowed_packages,
        _KDA,
        "import math\nimport torch.nn as nn\nfrom transformers.utils import logging",
    ),
    (rules.only_files_above, _KDA, _SIBLING_LINE),
    (rules.no_tools, _KDA, "from .situ " + "import situ"),
    (rules.optional_inside_try, _KDA, "try:\n    import fla\nexcept (ImportError, RuntimeError):\n    fla = None"),
    (rules.no_import_lines_in_strings, _KDA, f'"""Not `{_SIBLING_LINE}`."""\n{_SIBLING_LINE}'),
    (rules.tools_import_absolutely, _TOOL, "from .packing import pack\nfrom modeling_k3.kda import KimiDeltaAttention"),
    (rules.public_names_only, "examples/chat.py", "import torch\nfrom modeling_k3 import K3Config"),
    (rules.public_names_only, "examples/chat.py", "from modeling_k3.configuration import preset_path"),
    (rules.short_functions, _KDA, _LONG.replace("\n", '\n    """Two\n    lines."""\n', 1).removesuffix("    pass\n")),
    (rules.has_docstrings, _KDA, "def _f() -> None: ...\nclass _A:\n    def f(self) -> None: ..."),
    (rules.has_docstrings, _KDA, 'class A:\n    """A."""\n    def forward(self) -> None: ...'),
    (rules.has_type_hints, _KDA, "class A:\n    @classmethod\n    def f(cls, x: int, *rest: int) -> None: ..."),
    (rules.declared_config_fields, _KDA, "for name in NAMES:\n    print(getattr(config, name))"),
    (rules.safe_loading, _KDA, "import torch\ntorch.nn.Module().load_state_dict({})"),
    (rules.clean_text, "README.md", "https://arxiv.org/abs/2510.26692 and frame/work/x"),
]


@pytest.mark.parametrize(("rule", "name", "text", "line"), BAD)
def test_rule_finds_the_bad_line(rule: Rule, name: str, text: str, line: int) -> None:
    findings = rule(Source(name, text))
    assert findings, f"{rule.__name__} overlooks:\n{text}"
    assert all(finding.startswith(f"{name}:{line}: ") for finding in findings), findings


@pytest.mark.parametrize(("rule", "name", "text"), GOOD)
def test_rule_lets_good_code_pass(rule: Rule, name: str, text: str) -> None:
    assert rule(Source(name, text)) == []


def test_every_rule_has_a_bad_example() -> None:
    functions = inspect.getmembers(rules, inspect.isfunction)
    known = {rule for name, rule in functions if rule.__module__ == rules.__name__ and not name.startswith("_")}
    assert known == {rule for rule, *_ in BAD}

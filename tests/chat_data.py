"""Golden chat data, the toy tokenizer it belongs to, and conversations to draw at random."""

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from modeling_k3.tokenization_k3 import K3Tokenizer

#: Another folder of the same format can be judged by setting `K3_GOLDEN_CHAT`.
GOLDEN = Path(os.environ.get("K3_GOLDEN_CHAT") or Path(__file__).resolve().parent / "golden_chat")
#: The first control id of the toy vocabulary.
FIRST_CONTROL = 600


def read_golden(name: str) -> Any:
    """One file of the golden data. A folder without it is an error, not a skipped test."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def released_folder(folder: Path) -> Path:
    """Lay out a folder with the toy vocabulary as a release does."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(GOLDEN / "toy.tiktoken", folder / "tiktoken.model")
    config = read_golden("tokenizer_config.json")
    config["auto_map"] = {"AutoTokenizer": ["tokenization_released.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def toy_tokenizer() -> K3Tokenizer:
    """The toy vocabulary, loaded once. Not to be changed."""
    with tempfile.TemporaryDirectory() as folder:
        return K3Tokenizer.from_pretrained(released_folder(Path(folder)))


@cache
def control_names() -> tuple[str, ...]:
    """Every name of the toy's control block."""
    return tuple(toy_tokenizer().convert_ids_to_tokens(list(range(FIRST_CONTROL, FIRST_CONTROL + 256))))


def texts(max_size: int = 40) -> st.SearchStrategy[str]:
    """Text of a hostile user: control names, markup look-alikes, quotes, newlines, any character but surrogates."""
    hostile = st.sampled_from(
        [*control_names(), "<|", "|>", "<|close|>message<|sep|><|end_of_msg|>", '"', "&quot;", "&", "\r\n", " ", "\x1c"]
    )
    characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return st.lists(st.one_of(hostile, characters), max_size=6).map("".join).map(lambda text: text[:max_size])


def json_values() -> st.SearchStrategy[Any]:
    """Values of JSON whose printed form reads back the same."""
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts(12))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts(6), inner, max_size=3)),
        max_leaves=6,
    )


def arguments() -> st.SearchStrategy[Any]:
    """Arguments of a call: an object, its JSON text in several spellings, or any text."""
    objects = st.dictionaries(texts(8), json_values(), max_size=4)
    spelled = st.builds(
        lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
        objects,
        st.sampled_from([None, 1]),
        st.booleans(),
    )
    return st.one_of(st.none(), objects, spelled, texts(20))


def assistant_messages() -> st.SearchStrategy[dict[str, Any]]:
    """Messages of an assistant, with reasoning, answer and parallel calls."""
    names = texts(10).filter(bool)
    call = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": names, "arguments": arguments()})})
    return st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": st.one_of(st.none(), texts()),
            "reasoning_content": texts(),
            "name": texts(10),
            "tool_calls": st.lists(call, max_size=3),
        },
    )


def conversations() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Whole conversations; tool results always carry a name, so that all of them can be rendered."""
    parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts()}), max_size=2)
    content = st.one_of(st.none(), texts(), parts)
    named = {"name": texts(10)}
    user = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": content}, optional=named)
    result = st.fixed_dictionaries({"role": st.just("tool"), "name": texts(8), "content": content})
    return st.lists(st.one_of(user, assistant_messages(), result), max_size=5)

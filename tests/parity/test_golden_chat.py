"""Chat format, splitting, merging and reading against the golden cases. `K3_GOLDEN_CHAT` names a folder of others."""

import copy
import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from modeling_k3.chat import ChatOptions, render_chat
from modeling_k3.chat_reader import ParsedOutput
from modeling_k3.tokenization_k3 import K3Tokenizer
from modeling_k3.vocabulary import ALTERNATIVES
from tests.chat_data import FIRST_CONTROL, read_golden, toy_tokenizer

_CASES = read_golden("cases.json")
_PARSE = read_golden("parse.json")
_SPLIT = read_golden("pretokeniser.json")

TOKENIZER = toy_tokenizer()
Encode = Callable[[str, bool], list[int]]

#: Every way to ids: the fast path, a call, and a batch.
ENCODERS: dict[str, Encode] = {
    "encode": lambda text, allow: TOKENIZER.encode(text, split_special_tokens=not allow),
    "call": lambda text, allow: TOKENIZER(text, split_special_tokens=not allow)["input_ids"],
    "batch": lambda text, allow: TOKENIZER(["x", text], split_special_tokens=not allow)["input_ids"][1],
}
each_encoder = pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)


def by(key: str, cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """One test for each case."""
    return pytest.mark.parametrize("case", cases, ids=[re.sub(r"\W+", "_", case[key])[:60] for case in cases])


def _options(case: dict[str, Any]) -> dict[str, Any]:
    """The options of a case. The renderer has no default effort, the template call has."""
    given = dict(case["input"]["options"])
    return given if case["entry"] == "template" else {"thinking_effort": None, **given}


def _is_batch(case: dict[str, Any]) -> bool:
    messages = case["input"]["messages"]
    return bool(messages) and isinstance(messages[0], list)


_RENDERED = [case for case in _CASES if "rendered" in case and case.get("feature") != "images"]
_REFUSED = [case for case in _CASES if "error" in case or case.get("feature") == "images"]


@by("name", _RENDERED)
def test_segments_text_and_ids(case: dict[str, Any]) -> None:
    given = copy.deepcopy(case["input"])
    options, tools = _options(case), given["tools"]
    conversations = given["messages"] if _is_batch(case) else [given["messages"]]
    explicit = {"thinking_effort": "max", **options} if case["entry"] == "template" else options
    chats = [render_chat(messages, tools, ChatOptions(**explicit)) for messages in conversations]
    segments = [[segment._asdict() for segment in chat.segments] for chat in chats]
    ranges = [[list(span) for span in chat.assistant] for chat in chats]
    assert segments == (case["segments"] if _is_batch(case) else [case["segments"]])
    assert ranges == (case["assistant_segments"] if _is_batch(case) else [case["assistant_segments"]])
    rendered = TOKENIZER.apply_chat_template(given["messages"], tools=tools, tokenize=False, **options)
    ids = TOKENIZER.apply_chat_template(given["messages"], tools=tools, return_dict=False, **options)
    assert rendered == case["rendered"]
    assert ids == case["ids"]
    assert given == case["input"], "the input was modified"


@by("name", _RENDERED)
def test_ids_say_the_text_and_count_the_controls(case: dict[str, Any]) -> None:
    rows = list(zip(case["ids"], case["rendered"], case["segments"], strict=True)) if _is_batch(case) else None
    for ids, text, segments in rows or [(case["ids"], case["rendered"], case["segments"])]:
        assert TOKENIZER.decode(ids) == text
        assert sum(index >= FIRST_CONTROL for index in ids) == sum(each["allow_special"] for each in segments)


@by("name", _REFUSED)
def test_refused_with_the_suggested_error(case: dict[str, Any]) -> None:
    kind = {"ValueError": ValueError, "TypeError": TypeError}[case.get("error", {}).get("type", "ValueError")]
    given = copy.deepcopy(case["input"])
    with pytest.raises(kind):
        TOKENIZER.apply_chat_template(given["messages"], tools=given["tools"], **_options(case))
    assert given == case["input"]


@by("name", [case for case in _CASES if "right_padded_ids" in case])
def test_padded_batch(case: dict[str, Any]) -> None:
    given = case["input"]
    for side in ("right", "left"):
        out = TOKENIZER.apply_chat_template(
            given["messages"],
            tools=given["tools"],
            padding=True,
            tokenizer_kwargs={"padding_side": side},
            **_options(case),
        )
        if side == "right":
            assert out["input_ids"] == case["right_padded_ids"]
            assert out["attention_mask"] == case["attention_mask"]
        for ids, mask, wanted in zip(out["input_ids"], out["attention_mask"], case["ids"], strict=True):
            assert [index for index, seen in zip(ids, mask, strict=True) if seen] == wanted


def _as_expected(output: ParsedOutput) -> dict[str, Any]:
    return {**vars(output), "tool_calls": [call._asdict() for call in output.tool_calls]}


@by("name", _PARSE)
def test_reading_whole_and_streamed(case: dict[str, Any]) -> None:
    assert _as_expected(TOKENIZER.parse_output(case["ids"], case["start"])) == case["expect"]
    reader = TOKENIZER.output_reader(case["start"])
    events = [event for index in case["ids"] for event in reader.feed([index])]
    assert _as_expected(reader.finish()) == case["expect"]
    for kind, field in (("reasoning", "reasoning"), ("content", "content")):
        assert "".join(event.text for event in events if event.kind == kind) == case["expect"][field]


@by("name", _PARSE)
def test_reading_any_prefix_never_fails(case: dict[str, Any]) -> None:
    for length in range(len(case["ids"])):
        output = TOKENIZER.parse_output(case["ids"][:length], case["start"])
        assert case["expect"]["reasoning"].startswith(output.reasoning) or not case["expect"]["well_formed"]


@by("name", [case for case in _RENDERED if not _is_batch(case)])
def test_what_was_read_renders_the_same(case: dict[str, Any]) -> None:
    thinking = case["input"]["options"].get("thinking", True)
    for begin, end in case["assistant_segments"]:
        ids = [
            i
            for each in case["segments"][begin:end]
            for i in TOKENIZER.encode_text(each["text"], each["allow_special"])
        ]
        # The opening tag of the message is not part of the range.
        output = TOKENIZER.parse_output(ids, "message")
        again = render_chat([output.message()], None, ChatOptions(add_generation_prompt=False, thinking=thinking))
        first, last = again.assistant[0]
        text = "".join(segment.text for segment in again.segments[first:last])
        assert output.well_formed
        assert text == "".join(each["text"] for each in case["segments"][begin:end])


def test_the_pattern_is_the_released_one() -> None:
    assert list(ALTERNATIVES) == _SPLIT["pattern_alternatives"]


@each_encoder
def test_strings(encode: Encode) -> None:
    for case in _SPLIT["strings"]:
        assert encode(case["text"], False) == case["ids"], case["about"]


def test_pieces() -> None:
    split = TOKENIZER.backend_tokenizer.pre_tokenizer
    for case in _SPLIT["strings"]:
        spans = [span for _, span in split.pre_tokenize_str(case["text"])]
        assert [case["text"][begin:end] for begin, end in spans] == case["pieces"], case["about"]


@each_encoder
@by("about", _SPLIT["long_runs"])
def test_long_runs(case: dict[str, Any], encode: Encode) -> None:
    text = "".join(part * times for part, times in case["text_parts"])
    for allow_special in (False, True):
        ids = encode(text, allow_special)
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        assert (len(ids), digest) == (case["count"], case["sha256_of_ids_as_comma_joined_decimals"])


@each_encoder
def test_modes(encode: Encode) -> None:
    for case in _SPLIT["modes"]:
        assert encode(case["text"], False) == case["ids_as_text"], case["about"]
        assert encode(case["text"], True) == case["ids_as_control"], case["about"]


def test_decoding() -> None:
    for case in _SPLIT["decode"]:
        assert TOKENIZER.decode(case["ids"]) == case["text"], case["about"]
        assert b"".join(map(TOKENIZER.token_bytes, case["ids"])).decode("utf-8", "replace") == case["text"]


@each_encoder
def test_surrogates(encode: Encode) -> None:
    for case in _SPLIT["surrogates"]:
        assert encode(case["text"], False) == encode(case["text"], True) == case["ids"]
        assert TOKENIZER.decode(case["ids"]) == case["decoded"]


def test_the_tokenizer_is_the_class_of_the_package() -> None:
    assert type(TOKENIZER) is K3Tokenizer

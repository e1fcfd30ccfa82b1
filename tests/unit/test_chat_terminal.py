"""The terminal chat where things go wrong, what it lets through to the screen, and the example's tool."""

import json
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from modeling_k3 import K3ForCausalLM
from modeling_k3.chat_reader import Event, ParsedCall
from modeling_k3.terminal.screen import Screen
from modeling_k3.terminal.session import ChatSession, ChatSettings
from modeling_k3.terminal.tools import load_tools
from tests.chat_data import toy_tokenizer
from tests.chat_loop import talk
from tests.layout_source import ROOT
from tests.models import tiny_config

_END = "<|close|>message<|sep|><|end_of_msg|>"
_ANSWER = f"<|close|>think<|sep|><|open|>response<|sep|>fine<|close|>response<|sep|>{_END}"
_CALL = (
    "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    f'<|open|>call tool="get_weather" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>{_END}'
)
_FAILURE = RuntimeError("out of memory\nwith more lines\nthat nobody needs")


def scripted(*outputs: str | RuntimeError) -> ChatSession:
    """A conversation with a model that writes what it is told, or fails in the middle."""
    model = K3ForCausalLM(tiny_config(layers="KM", hidden_size=32, vocab_size=856))
    waiting = iter(outputs)

    def generate(batch: torch.Tensor, *, streamer: Any, **_: Any) -> None:
        output = next(waiting)
        streamer.put(batch)
        text = "half" if isinstance(output, RuntimeError) else output
        streamer.put(torch.tensor(toy_tokenizer().encode_text(text, allow_special=True)))
        if isinstance(output, RuntimeError):
            raise output

    model.generate = generate
    return ChatSession(model, toy_tokenizer(), ChatSettings(effort=None))


def test_a_failed_answer_drops_its_message_and_the_chat_goes_on() -> None:
    session = scripted(_ANSWER, _FAILURE, _ANSWER)
    shown = talk(session, ["one", "two", "two"])
    assert [line for line in shown.splitlines() if "no answer" in line] == [
        "no answer, your message was dropped: out of memory"
    ]
    assert "nobody needs" not in shown
    assert [(each["role"], each["content"]) for each in session.messages] == [
        ("user", "one"),
        ("assistant", "fine"),
        ("user", "two"),
        ("assistant", "fine"),
    ]
    assert session.cached_tokens == 0


def test_a_failure_without_words_is_named() -> None:
    assert "dropped: RuntimeError" in talk(scripted(RuntimeError()), ["hi"])


def test_a_failure_after_a_tool_call_drops_the_whole_round() -> None:
    session = scripted(_ANSWER, _CALL, _FAILURE, _ANSWER)
    talk(session, ["one", "weather?"], load_tools("stub"))
    assert [each["role"] for each in session.messages] == ["user", "assistant"]
    session.user("again")
    prompt = toy_tokenizer().apply_chat_template(
        session.messages, session.tools, return_dict=False, thinking_effort=None
    )
    assert session.prompt() == prompt
    assert session.reply(lambda event: None).output.content == "fine"


@pytest.mark.parametrize("code", [0x1B, 0x9B, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
def test_nothing_that_steers_the_terminal_is_let_through(code: int) -> None:
    console = Console(width=100, color_system=None, highlight=False)
    screen = Screen(console)
    with console.capture() as captured:
        screen.show(Event("content", f"a{chr(code)}b"))
        screen.show(Event("tool_call", call=ParsedCall("f", chr(code))))
        screen.error(chr(code))
    shown = captured.get()
    assert chr(code) not in shown
    if code > 0x2000:
        assert f"a\\u{code:04x}b" in shown and shown.count(f"\\u{code:04x}") == 3


def test_the_tool_of_the_example_takes_what_the_model_writes() -> None:
    result_of: Callable[[str, str], str] = runpy.run_path(str(ROOT / "examples" / "chat.py"))["result_of"]
    assert result_of("get_weather", '{"city":"Rome"}') == "21 degrees and clear in Rome"
    for text in ("", "Rome", "[1]", '"Rome"', "null", '{"city":', "[" * 99_999):
        assert result_of("get_weather", text) == "error: the arguments must be a JSON object"
    assert "city" in result_of("get_weather", "{}") and "town" in result_of("get_weather", '{"town":"Rome"}')
    assert result_of("other", "{}") == "error: there is no tool other"


def test_the_example_answers_calls_by_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "chat.py"))
    tokenizer, outputs = toy_tokenizer(), iter((_CALL, _ANSWER))
    seen: list[list[dict[str, Any]]] = []

    class Model:
        def eval(self) -> "Model":
            return self

        def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            new = tokenizer.encode_text(next(outputs), allow_special=True)
            return torch.cat([input_ids, torch.tensor([new])], dim=1)

    class Recorder:
        def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
            seen.append(json.loads(json.dumps(messages)))
            return tokenizer.apply_chat_template(messages, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    monkeypatch.setattr(example["AutoTokenizer"], "from_pretrained", lambda folder: Recorder())
    monkeypatch.setattr(example["AutoModelForCausalLM"], "from_pretrained", lambda folder, dtype: Model())
    example["main"](["folder", "Weather?"])
    question, call, result = seen[1]
    assert (question["role"], call["role"], result["role"]) == ("user", "assistant", "tool")
    assert result["tool_call_id"] == call["tool_calls"][0]["id"] and result["name"] == "get_weather"
    assert result["content"].startswith("error: get_weather()")

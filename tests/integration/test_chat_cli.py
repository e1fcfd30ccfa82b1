"""`k3 chat`: turns over one cache, streaming, commands, tools; and the command itself."""

import functools
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from modeling_k3 import K3ForCausalLM
from modeling_k3.chat_reader import ParsedCall
from modeling_k3.cli import app
from modeling_k3.demo import UserError
from modeling_k3.terminal.session import ChatSession, ChatSettings
from modeling_k3.terminal.start import load, sampling
from modeling_k3.terminal.tools import load_tools
from tests import chat_loop
from tests.chat_data import toy_tokenizer
from tests.layout_source import ROOT
from tests.models import randomize, tiny_config

talk = functools.partial(chat_loop.talk, with_styles=True)

TOKENIZER = toy_tokenizer()
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
SIZE = {"layers": "KM", "hidden_size": 32, "vocab_size": 856, "eos_token_id": 601, "pad_token_id": 855}


def answer(reasoning: str, content: str) -> str:
    return f"{reasoning}<|close|>think<|sep|><|open|>response<|sep|>{content}{END}"


class Scripted(K3ForCausalLM):
    """Computes as every model does, but writes what it is told."""

    def tell(self, *outputs: str) -> "Scripted":
        """Outputs to come; they go on in one another if none of them ends."""
        self.script = [index for text in outputs for index in TOKENIZER.encode(text, split_special_tokens=False)]
        self.seen: list[int] = []
        return self

    @functools.wraps(K3ForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.seen.append(ids.shape[1])
        out.logits[:, -1] = torch.full_like(out.logits[:, -1], -1e9)
        out.logits[:, -1, self.script.pop(0)] = 0
        return out


@pytest.fixture
def scripted() -> Scripted:
    model = Scripted(tiny_config(**SIZE, bos_token_id=600))
    randomize(model)
    return model.eval()


@pytest.fixture
def session(scripted: Scripted) -> ChatSession:
    return ChatSession(scripted, TOKENIZER, ChatSettings(effort=None, max_new_tokens=400, sampling=sampling(0, None)))


def rendered(session: ChatSession, **options: Any) -> list[int]:
    return TOKENIZER.apply_chat_template(session.messages, return_dict=False, thinking_effort=None, **options)


def test_turns_share_one_cache(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell(answer("They greet.", "Hi 😀"), answer("", "好"), answer("x", "y"))
    reused = 0
    for text in ("Hello", "<|end_of_msg|>", "again"):
        session.user(text)
        prompt = rendered(session)
        assert session.prompt() == prompt
        scripted.seen.clear()
        turn = session.reply(lambda event: None)
        assert turn.reused_tokens == reused and turn.prompt_tokens == len(prompt)
        assert scripted.seen[0] == len(prompt) - reused and set(scripted.seen[1:]) == {1}
        reused = turn.prompt_tokens + turn.new_tokens - 1
        assert session.cached_tokens == reused
    assert [each.get("reasoning_content") for each in session.messages if each["role"] == "assistant"] == [
        "They greet.",
        None,
        "x",
    ]


def test_the_cache_says_what_a_fresh_prompt_says(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell(answer("a", "b"))
    session.user("one")
    session.reply(lambda event: None)
    session.user("two")
    ids, cache = torch.tensor([session.prompt()]), session._cache
    new = ids[:, session.cached_tokens :]
    with torch.inference_mode():
        continued = K3ForCausalLM.forward(scripted, new, attention_mask=torch.ones_like(ids), cache=cache).logits[:, -1]
        whole = K3ForCausalLM.forward(scripted, ids).logits[:, -1]
    assert torch.allclose(continued, whole, atol=1e-4)


def test_an_answer_that_was_cut_is_closed_and_goes_on_in_the_cache(session: ChatSession, scripted: Scripted) -> None:
    half = "ok<|close|>think<|sep|><|open|>response<|sep|>half an ans"
    for script, limit, reasoning, content in (
        (answer("think ", "x"), len(TOKENIZER.encode("think ")), "think ", ""),
        (half, len(TOKENIZER.encode(half, split_special_tokens=False)), "ok", "half an ans"),
    ):
        session.reset()
        scripted.tell(script)
        session.settings.max_new_tokens = limit
        session.user("hi")
        turn = session.reply(lambda event: None)
        assert not turn.output.complete
        assert (turn.output.reasoning, turn.output.content) == (reasoning, content)
        session.user("next")
        assert session.prompt() == rendered(session)
        scripted.tell(answer("", ""))
        session.settings.max_new_tokens = 400
        assert session.reply(lambda event: None).reused_tokens == turn.prompt_tokens + limit - 1


def test_a_malformed_answer_is_rendered_afresh(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell("no channel was closed<|end_of_msg|>", answer("", "ok"))
    session.user("hi")
    assert not session.reply(lambda event: None).output.well_formed
    session.user("next")
    assert session.prompt() == rendered(session)
    assert session.reply(lambda event: None).output.content == "ok"


@pytest.mark.parametrize("end", ["<|end_of_msg|>", "[EOS]"])
def test_both_ends_stop_and_nothing_after_them_is_returned(session: ChatSession, scripted: Scripted, end: str) -> None:
    scripted.tell(answer("a", "b").replace("<|end_of_msg|>", end), '<|open|>message role="user"<|sep|>invented')
    session.user("hi")
    turn = session.reply(lambda event: None)
    assert turn.output.complete and (turn.output.reasoning, turn.output.content) == ("a", "b")
    assert TOKENIZER.decode(scripted.script).endswith("invented"), "generation went on"


def test_stopping_keeps_what_was_written(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell(answer("a long thought", "x"))
    shown: list[str] = []
    session.user("hi")
    turn = session.reply(lambda event: shown.append(event.text), lambda: len(shown) >= 4)
    assert session.messages[-1]["reasoning_content"] == turn.output.reasoning == "".join(shown)
    assert len(shown) in (4, 5) and turn.output.open == "think"
    session.user("next")
    assert session.prompt() == rendered(session)


def test_other_options_start_over_and_an_error_changes_nothing(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell(answer("a", "b"), f"c{END}")
    session.user("hi")
    session.reply(lambda event: None)
    session.configure(ChatSettings(thinking=False, max_new_tokens=400, sampling=sampling(0, None)))
    session.user("more")
    assert session.cached_tokens == 0 and session.prompt() == rendered(session, thinking=False)
    assert session.reply(lambda event: None).output.content == "c"
    held, count = session.cached_tokens, len(session.messages)
    session.messages.append({"role": "tool", "content": "answers nothing"})
    with pytest.raises(ValueError, match="no name"):
        session.reply(lambda event: None)
    assert session.cached_tokens == held and len(session.messages) == count + 1


def test_reasoning_is_dimmed_and_control_characters_are_shown(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell(answer("why", "so \x1b[31m"))
    shown = talk(session, ["hi", "", "/exit", "never read"])
    assert "\x1b[2mw\x1b[0m" in shown and "so" in shown.replace("\x1b[0m", "").replace("\n", "")
    assert "␛" in shown and "\x1b[31m" not in shown
    assert "0 from the cache" in shown


def test_commands(session: ChatSession, scripted: Scripted) -> None:
    shown = talk(
        session,
        [
            "/help",
            "/effort low",
            "/effort medium",
            "/think off",
            "/think maybe",
            "/system Be brief.",
            "/system",
            "/bogus",
            "/tools stub",
            "/tools none",
            "/tools missing.json",
            "/status",
            "/reset",
        ],
    )
    for wanted in ("/effort low|high", "effort: low", "'medium' is not allowed; allowed: low, high, max, none"):
        assert wanted in shown
    for wanted in (
        "thinking: off",
        "'maybe' is not allowed",
        "needs a text",
        "no command /bogus",
        "tools: 1",
        "missing",
    ):
        assert wanted in shown
    assert "thinking off, effort low, at most 400 tokens a turn, 0 tools, 1 messages, 0 tokens in the cache" in shown
    assert session.messages == []


def test_lines_that_go_on_and_slashes(session: ChatSession, scripted: Scripted) -> None:
    scripted.tell(answer("", "a"), answer("", "b"))
    talk(session, ["one\\", "two", "//slash"])
    assert [each["content"] for each in session.messages if each["role"] == "user"] == ["one\ntwo", "/slash"]


CALL = (
    "look<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def test_tools_are_answered_by_the_stub_or_by_the_user(
    session: ChatSession, scripted: Scripted, tmp_path: Path
) -> None:
    scripted.tell(CALL, answer("", "21 degrees"))
    shown = talk(session, ["weather?"], load_tools("stub"))
    assert (
        '→ get_weather({"city":"Rome"})' in shown
        and "made up by the stub" in shown
        and "21 degrees" in shown.replace("\x1b[0m", "")
    )
    assert [each["role"] for each in session.messages] == ["user", "assistant", "tool", "assistant"]
    session.reset()
    (tmp_path / "tools.json").write_text(json.dumps(list(load_tools("stub").declarations)))
    scripted.tell(CALL, answer("", "hot"))
    talk(session, ["weather?", "40"], load_tools(str(tmp_path / "tools.json")))
    assert session.messages[2]["content"] == "40"
    assert "no tool" in load_tools("stub").answer(ParsedCall("other", "{}"), lambda call: "")
    for bad in ("{}", "nonsense"):
        (tmp_path / "tools.json").write_text(bad)
        with pytest.raises(UserError, match="tools"):
            load_tools(str(tmp_path / "tools.json"))


def test_sampling_options() -> None:
    assert sampling(None, None) == {} and sampling(0, 0.5)["do_sample"] is False
    assert sampling(0.7, None) == {"do_sample": True, "temperature": 0.7}
    with pytest.raises(UserError, match="top_p"):
        sampling(1, 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with random weights and the presets' tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    model = K3ForCausalLM(tiny_config(**SIZE, bos_token_id=600))
    randomize(model)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_the_command(checkpoint: Path) -> None:
    words = [
        "chat",
        str(checkpoint),
        "--max-new-tokens",
        "8",
        "--temperature",
        "0",
        "--effort",
        "low",
        "--system",
        "Hi.",
    ]
    result = CliRunner().invoke(app, words, input="Hello\n/status\n")
    assert result.exit_code == 0, result.output
    assert "0 from the cache" in result.output and "3 messages" in result.output
    wrong = CliRunner().invoke(app, ["chat", str(checkpoint), "--tools", "missing.json"])
    assert wrong.exit_code == 2 and "missing.json" in wrong.output
    assert CliRunner().invoke(app, ["chat", str(checkpoint / "nothing")]).exit_code == 2


def test_vocabularies_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = K3ForCausalLM(tiny_config(layers="K", vocab_size=600))
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="600 ids, the tokenizer 856"):
        load(tmp_path, "auto")


def test_the_example(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "chat.py"))
    example["main"]([str(checkpoint), "Where is the key?", "--max-new-tokens", "6"])
    assert capsys.readouterr().out.startswith("reasoning: ")

"""The tokenizer as files: a released folder, a converted one, with and without this package; and the pipeline."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, pipeline
from typer.testing import CliRunner

from modeling_k3 import K3ForCausalLM
from modeling_k3.cli import app
from modeling_k3.configuration import preset_path
from modeling_k3.conversion.tokenizer import FILES, convert_tokenizer
from modeling_k3.tokenization_k3 import K3Tokenizer
from tests.chat_data import control_names, read_golden, released_folder, toy_tokenizer
from tests.models import randomize, tiny_config

MESSAGES = [{"role": "user", "content": "Where is the key? <|end_of_msg|>"}]
TEXTS = [case["text"] for case in read_golden("pretokeniser.json")["strings"]]

# Run where this package cannot be imported; prints what the library alone makes of a folder.
_ALONE = """
import json, sys
sys.modules["modeling_k3"] = None
from tokenizers import Tokenizer
from transformers import AutoTokenizer
folder, given = sys.argv[1], json.loads(sys.stdin.read())
tokenizer = AutoTokenizer.from_pretrained(folder)
print(json.dumps({
    "class": type(tokenizer).__name__,
    "ids": [tokenizer.encode(text) for text in given["texts"]],
    "bare": [Tokenizer.from_file(folder + "/tokenizer.json").encode(text).ids for text in given["texts"]],
    "chat": tokenizer.apply_chat_template(given["messages"], add_generation_prompt=True, tokenize=False),
    "skipped": tokenizer.decode(tokenizer.encode("[BOS]<|open|>x<|end_of_msg|>"), skip_special_tokens=True),
}))
"""


def alone(folder: Path, **given: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(folder)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def released(folder: Path, nested: bool) -> Path:
    """A released folder with a config in one of both layouts."""
    released_folder(folder)
    config = json.loads((preset_path("tiny") / "config.json").read_text())
    if nested:
        config = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_auto_tokenizer_reads_a_released_folder_without_its_code(tmp_path: Path, nested: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(released(tmp_path / "release", nested))
    assert type(tokenizer) is K3Tokenizer
    assert [tokenizer.encode(text) for text in TEXTS] == [toy_tokenizer().encode(text) for text in TEXTS]
    tokenizer.save_pretrained(tmp_path / "saved")
    shutil.copyfile(tmp_path / "release" / "config.json", tmp_path / "saved" / "config.json")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert type(again) is K3Tokenizer
    assert again.apply_chat_template(MESSAGES) == toy_tokenizer().apply_chat_template(MESSAGES)


def test_another_model_of_the_family_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = released_folder(tmp_path)
    config = read_golden("tokenizer_config.json")
    config["added_tokens_decoder"] = {"600": config["added_tokens_decoder"]["600"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="not Kimi K3's"):
        AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_converted_folder_needs_no_code(tmp_path: Path, is_plain: bool) -> None:
    source, out = released(tmp_path / "release", nested=False), tmp_path / "out"
    report = convert_tokenizer(source, out, is_plain=is_plain)
    assert (report["base_tokens"], report["control_tokens"]) == (600, 256)
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    texts = [*TEXTS, "".join(control_names()), "b" + "a" * 60_000]
    found = alone(out, texts=texts, messages=MESSAGES)
    assert found["class"] == "TokenizersBackend"
    wanted = [toy_tokenizer().encode(text, split_special_tokens=False) for text in texts]
    assert found["ids"] == found["bare"] == wanted
    assert found["chat"] == toy_tokenizer().apply_chat_template(MESSAGES, tokenize=False)
    assert found["skipped"] == "<|open|>x"
    loaded = K3Tokenizer.from_pretrained(out)
    assert loaded.encode("<|open|>") == toy_tokenizer().encode("<|open|>")


def test_a_conversion_overwrites_nothing_and_names_what_is_missing(tmp_path: Path) -> None:
    source, out = released_folder(tmp_path / "release"), tmp_path / "out"
    convert_tokenizer(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(FileExistsError, match=r"tokenizer\.json"):
        convert_tokenizer(source, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.model"):
        convert_tokenizer(out, tmp_path / "other")
    (source / "tiktoken.model").write_text("IQ== 0\n")
    with pytest.raises(ValueError, match="every single byte"):
        convert_tokenizer(source, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_the_convert_command(tmp_path: Path) -> None:
    source = released_folder(tmp_path / "release")
    done = CliRunner().invoke(app, ["convert", "tokenizer", str(source), str(tmp_path / "out")])
    assert done.exit_code == 0 and "600 base tokens" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    again = CliRunner().invoke(app, ["convert", "tokenizer", str(source), str(tmp_path / "out")])
    assert again.exit_code == 2 and "already" in again.output


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with random weights, and the toy tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    size = {"layers": "KM", "hidden_size": 32, "vocab_size": 856, "bos_token_id": 600, "pad_token_id": 855}
    model = K3ForCausalLM(tiny_config(**size, eos_token_id=[602, 601]))
    randomize(model)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def test_pipeline_takes_messages_and_returns_one(model_folder: Path) -> None:
    generate = pipeline("text-generation", model=str(model_folder))
    assert type(generate.tokenizer) is K3Tokenizer
    (out,) = generate(MESSAGES, max_new_tokens=12, do_sample=False)
    *given, message = out["generated_text"]
    assert given == MESSAGES and message["role"] == "assistant" and set(message) <= {
        "role", "content", "reasoning_content", "tool_calls"
    }  # fmt: skip
    ids = generate(MESSAGES, max_new_tokens=12, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    prompt = toy_tokenizer().apply_chat_template(MESSAGES)["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert message == toy_tokenizer().parse_response(toy_tokenizer().decode(ids[len(prompt) :]), prefix=prompt)
    batch = generate([MESSAGES, [*MESSAGES, message, *MESSAGES]], max_new_tokens=4, do_sample=False, batch_size=2)
    assert len(batch) == 2
    (text,) = generate("Where", max_new_tokens=4, do_sample=False)
    assert text["generated_text"].startswith("Where")

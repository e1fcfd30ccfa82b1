"""The status page claims no more than what can be looked up: its words, its files, its commands, its refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from modeling_k3 import K3ForCausalLM
from tests.models import tiny_config

ROOT = Path(__file__).parents[2]
STATUS = (ROOT / "docs" / "status.md").read_text()
CARD = (ROOT / "model_card.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in STATUS.splitlines()
    if line.startswith("| ") and not line.startswith(("| system", "| feature"))
]


def evidence(text: str) -> list[str]:
    """What in a cell proves something: paths of tests and benchmarks, make targets."""
    return re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py|make [a-z-]+)`", text)


def is_there(name: str) -> bool:
    """Whether a file or a make target exists."""
    if name.startswith("make "):
        return re.search(rf"^{name.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    return (ROOT / name).is_file()


def test_three_words_only() -> None:
    assert len(ROWS) > 25 and {row[1] for row in ROWS} == {"GA", "loadable", "absent"}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_claim_names_what_exists(row: list[str]) -> None:
    found = evidence(row[2])
    assert not [name for name in found if not is_there(name)]
    if row[1] == "GA":
        assert found, f"{row[0]}: GA needs a test or a command"


def test_no_gpu_is_verified_without_its_check() -> None:
    for name, status, proof in ROWS:
        is_gpu = re.search(r"\bGPUs?\b|CUDA|MPS", name)
        ran = re.search(r"gpu-check` ran on .+, \d{4}-\d\d-\d\d", proof)
        assert not (is_gpu and status == "GA" and not ran), name


def test_attention_that_needs_a_gpu_says_so_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises((ValueError, ImportError), match=r"(?i)flash"):
            K3ForCausalLM._from_config(tiny_config(), attn_implementation=name)
    assert K3ForCausalLM._from_config(tiny_config(), attn_implementation="flex_attention") is not None


def test_every_system_has_a_line() -> None:
    for name in ("Linux, CPU", "macOS, CPU", "macOS, MPS", "Windows"):
        assert any(row[0] == name for row in ROWS), name
    assert "kernelized decomposed attention" in STATUS


def test_figures_on_the_card_name_commands_that_exist() -> None:
    table = CARD.split("## Measured")[1]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12 and re.search(r"\d+ November 2026|\d{4}-\d\d-\d\d", table)
    for what, _, command in rows:
        files = re.findall(r"(?:benchmarks|tests)/[\w/.]+", command)
        assert files or "k3 " in command, what
        assert not [name for name in files if not (ROOT / name).exists()], what


def test_figures_of_kda_precision_and_pico_are_the_measured_ones() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "kda" / "results.json").read_text())["results"]
    kda = {(row["contender"], row["backward"]): row for row in rows if (row["length"], row["heads"]) == (4096, 8)}
    ours = [kda["chunk", way] for way in (False, True)]
    slow, kept = (
        [kda[name, row["backward"]]["milliseconds"] / row["milliseconds"] for row in ours]
        for name in ("native", "native, memory kept")
    )
    runs = json.loads((results / "precision.json").read_text())["runs"]
    half = runs["bfloat16"]
    pico = json.loads((ROOT / "examples" / "pico" / "report.json").read_text())["bits_per_byte"]
    for figure in (
        f"| {100 * ours[0]['share_of_matmul']:.0f} %*; {slow[0]:.0f}, {slow[1]:.0f} (with an allocator that keeps "
        f"memory {kept[0]:.0f}, {kept[1]:.0f})*",
        f"pico, {runs['float32']['tokens']:,} tokens",
        f"bfloat16 {half['forced_kl']:.1e} nats ({100 * half['forced_top1']:.2f} % same",
        f"float32 {runs['float32']['forced_kl']:.1e} |",
        f"{pico['after']:.3f} bits per byte (gzip -9: {pico['references']['gzip -9']:.2f}, ",
        f"xz: {pico['references']['lzma']:.2f}) |",
    ):
        assert figure.replace("e-0", "e-") in CARD, figure


def test_figures_on_the_card_are_the_measured_ones() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    decode = {
        row["contender"]: row["milliseconds"]
        for row in results["cache"]["rows"]
        if row["part"] == "decode" and row["context"] == 32768
    }
    load = {name: found["load_s"] for name, found in results["load"]["results"].items()}
    lora = {name: found["peak_over_checkpoint"] for name, found in results["lora"]["contenders"].items()}
    plan = results["full_size_plan"]
    whole, forward = results["full_size_load"]["load"], results["full_size"]["forward"]
    quantile, sign, slow = (
        results["balance"]["results"][name] for name in ("quantile", "sign, rate 0.01", "sign, rate 0.001")
    )
    assert slow["first_step_at_goal"] is None
    step, ratios = results["train_step"]["results"], results["train_step"]["ratios"]
    kimi, own = (ratios[name] for name in ("ours, Kimi Linear / native, Kimi Linear", "ours / native"))
    worst = {name: 100 * error for name, error in results["memory"]["worst_error"].items()}
    off = {mode: worst[f"{mode}, process"] for mode in ("train", "infer")}
    off["tensors"] = max(error for name, error in worst.items() if "tensors" in name)
    cold = [f"{row['step_s_expected']:.2f}, {row['step_s']:.2f}" for row in results["offload"]["cold"].values()]
    for figure in (
        f"{decode['absorbed']:.0f}; {decode['expanded']:.0f}; {decode['transformers Kimi Linear']:,.0f} ms",
        f"{load['mapped']:.1f}, {load['packed']:.1f}, {load['dense']:.0f}; {load['transformers']:.0f} s",
        "; ".join(f"{lora[n]:.2f}" for n in ("packed LoRA", "default environment", "QLoRA", "bf16 LoRA")),
        *(f"`{name}`" for name in results["lora"]["environment"]),
        f"{whole['load_s']:.1f} s, {whole['peak_grown_resident_bytes'] / 1e9:.2f} GB",
        f"{forward['forward_s']:,.0f} s*, {forward['peak_grown_anonymous_bytes'] / 1e9:.2f} GB",
        f"{plan['load_s']:.1f} s; {plan['held_bytes'] / 1e9:.1f} GB; {sorted(plan['step_s'])[1]:.0f} s |",
        f"within {off['tensors']:.0f} %; {off['train']:.0f} %; {off['infer']:.0f} % |",
        f"| {cold[0]}; {cold[1]}; {results['offload']['warm']['mapped_over_packed']:.2f} |",
        "| "
        + "; ".join(f"{way['first_step_at_goal']}, {way['steps_to_goal']}" for way in (quantile, sign))
        + "; never",
        f"never ({slow['last_before_shift']:.2f} times at the end) |",
        f"{kimi['ratio']:.1f}*; {own['ratio']:.1f}*; {step['ours']['tokens_per_second']:.0f}* |",
        *(
            f"(goal {each['goal']:.0f}: {'' if each['ratio'] >= each['goal'] else 'not '}reached)"
            for each in (kimi, own)
        ),
        f"configuration of {step['ours, Kimi Linear']['parameters'] / 1e6:.0f} million",
        f"shape of {step['ours']['parameters'] / 1e6:.0f} million",
        f"same widths, {step['native']['parameters'] / 1e6:.0f} million",
        " / ".join(f"{run['cost_of_packing']:+.4f}" for run in reversed(results["qat"]["runs"])),
        f"{results['tokenizer']['texts']['standard library']['k3_s']:.2f} s",
    ):
        assert figure in CARD, figure


def test_figures_on_the_page_about_training_are_the_measured_ones() -> None:
    page, results = " ".join((ROOT / "docs" / "training.md").read_text().split()), ROOT / "benchmarks" / "results"
    attn_res, lora, balance = (json.loads((results / f"{n}.json").read_text()) for n in ("attn_res", "lora", "balance"))
    low, high, higher, lost = (attn_res["runs"][rate] for rate in ("0.003", "0.03", "0.3", "1.0"))
    gentle = [runs for rate, runs in attn_res["runs"].items() if float(rate) <= 0.3]
    rises = [max(runs[name]["worst_rise"] for runs in gentle) for name in ("AttnRes", "plain residuals")]
    peaks = {name: found["peak_over_checkpoint"] for name, found in lora["contenders"].items()}
    ours, plain = attn_res["saved_bytes_by_depth"].values()

    def pair(runs: dict, figure: Callable[[dict], str]) -> str:
        return " against ".join(figure(runs[name]) for name in ("AttnRes", "plain residuals"))

    for figure in (
        *("(" + pair(runs, lambda run: f"{run['held_out_bits']:.2f}") for runs in (low, high)),
        f"at most {rises[0]:.2f} and {rises[1]:.2f} bits",
        f"lost ({lost['AttnRes']['held_out_bits']:.1f} bits",
        *(pair(runs, lambda run: f"{max(run['gradient_norms']):,.0f}") for runs in (high, higher)),
        f"{ours['8'] / plain['8'] - 1:.0%} more than plain residuals at 8 layers".replace("%", " %"),
        f"{ours['32'] / plain['32'] - 1:.0%} at 32".replace("%", " %"),
        f"{peaks['default environment']:.2f} times the checkpoint",
        f"this brings it to {peaks['packed LoRA']:.2f} (and bfloat16 experts to {peaks['bf16 LoRA']:.2f})",
        f"peaks at {peaks['QLoRA']:.2f} with the same adapter",
        " ".join(f"{name}={value}" for name, value in lora["environment"].items()),
        f"after {balance['results']['quantile']['steps_to_goal']} step, the sign rule after "
        f"{balance['results']['sign, rate 0.01']['first_step_at_goal']} at rate 0.01",
    ):
        assert figure in page, figure

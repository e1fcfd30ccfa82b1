"""Experts in bits of HQQ: how far from the matrix, how many bytes, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch

from modeling_k3 import K3ForCausalLM
from modeling_k3.low_bits import BITS, quantize_experts
from modeling_k3.planning.components import low_bit_bytes, weight_bytes
from modeling_k3.planning.shape import read_shape
from tests.checkpoints import read_directory, released
from tests.models import build, tiny_config, token_ids

pytest.importorskip("hqq")

EXPERT = re.compile(r"experts\.\d+\.w[123]")
#: Relative error for Gaussian weights with one scale and one zero for 64 of them.
ERROR = {8: 0.006, 4: 0.1, 3: 0.2, 2: 0.5}
IDS = token_ids(2, 9)


@pytest.mark.parametrize("bits", BITS)
def test_matrices_are_rounded_into_the_bytes_that_are_said(bits: int) -> None:
    model, plain = build(tiny_config()), build(tiny_config())
    quantize_experts(model, bits)
    taken = numbers = 0
    for name, module in plain.named_modules():
        if not hasattr(module, "use_storage"):
            continue
        low = model.get_submodule(name)
        for stack, (n, rows, columns) in module.stack_shapes().items():
            for expert in (0, n - 1):
                exact, found = (m.matrix(expert, stack, torch.float32) for m in (module, low))
                error = (found - exact).norm() / exact.norm()
                assert ERROR[bits] / 3 < error < ERROR[bits], (name, error)
            taken += n * low_bit_bytes(rows * columns, bits)
            numbers += n * rows * columns
    assert model.bytes_by_dtype()[f"hqq{bits}"] == taken
    # Ten times 3 bits fill an int32, and the last of a small matrix is mostly padding.
    assert (
        bits < 8 * taken / numbers < bits + 1.2 and 8 * low_bit_bytes(3584 * 3072, bits) < (bits + 0.71) * 3584 * 3072
    )
    assert model.num_parameters() == plain.num_parameters()
    before, after = plain(IDS).logits, model(IDS).logits
    assert after.isfinite().all() and not torch.equal(before, after)


def test_small_weights_keep_their_size() -> None:
    """The library alone takes weights below 1e-4 for zeros."""
    model, plain = build(tiny_config()), build(tiny_config())
    for each in (model, plain):
        each.model.layers[1].block_sparse_moe.experts.down_proj.data *= 1e-6
    quantize_experts(model, 8)
    found, exact = (m.model.layers[1].block_sparse_moe.experts.matrix(0, "down_proj", torch.float32)
                    for m in (model, plain))  # fmt: skip
    assert (found - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("storage", ["packed", "mapped", "dense"])
def test_every_form_of_a_release_can_be_the_source(storage: str) -> None:
    models = [K3ForCausalLM.from_pretrained(released(), expert_storage=each) for each in (storage, "packed")]
    for model in models:
        quantize_experts(model, 4)
    assert torch.equal(*(model(IDS).logits for model in models))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source", ["built", "released"])
def test_saved_and_read_again(source: str, bits: int, tmp_path: Path) -> None:
    model = build(tiny_config()) if source == "built" else K3ForCausalLM.from_pretrained(released())
    quantize_experts(model, bits)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(IDS).logits
    for folder in ("first", "second"):
        model.save_pretrained(tmp_path / folder, max_shard_size="100KB")
        model = K3ForCausalLM.from_pretrained(tmp_path / folder)
        found = model.state_dict()
        assert found.keys() == before.keys()
        assert all(tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
                   for name, tensor in found.items())  # fmt: skip
        assert torch.equal(model(IDS).logits, expected)
        assert not [name for name in read_directory(tmp_path / folder) if EXPERT.search(name)]
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    block = config.get("quantization_config") or config["text_config"]["quantization_config"]
    assert block["experts"] == {"bits": bits, "group": 64} and block["quant_method"] == "k3_mxfp4"
    with pytest.raises(ValueError, match="allowed are experts as they are loaded"):
        quantize_experts(model, bits)


def test_what_does_not_fit_a_save_in_few_bits(tmp_path: Path) -> None:
    model = build(tiny_config())
    quantize_experts(model, 3)
    model.save_pretrained(tmp_path)
    for storage in ("packed", "mapped", "dense"):
        with pytest.raises(ValueError, match=rf"expert_storage='{storage}', but the experts are stored in bits of HQQ"):
            K3ForCausalLM.from_pretrained(tmp_path, expert_storage=storage)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, message in (
        ({"bits": 2, "group": 64}, "of another shape"),
        ({"bits": 5, "group": 64}, "quantization_config.experts="),
        ({"bits": 3}, "quantization_config.experts="),
        (None, "unknown"),
    ):
        config["quantization_config"]["experts"] = wrong
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            K3ForCausalLM.from_pretrained(tmp_path)


def test_beside_a_dense_part_in_eight_bits(tmp_path: Path) -> None:
    bnb = pytest.importorskip("transformers").BitsAndBytesConfig
    pytest.importorskip("bitsandbytes")
    build(tiny_config()).save_pretrained(tmp_path / "plain")
    model = K3ForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=bnb(load_in_8bit=True), expert_storage="dense"
    )
    quantize_experts(model, 3)
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "both")
    again = K3ForCausalLM.from_pretrained(tmp_path / "both")
    assert torch.equal(again(IDS).logits, expected) and again.bytes_by_dtype() == model.bytes_by_dtype()


def test_refusals() -> None:
    model = build(tiny_config())
    with pytest.raises(ValueError, match=r"bits=5; allowed are \[8, 4, 3, 2\]"):
        quantize_experts(model, 5)
    with pytest.raises(ValueError, match="group=388"):
        quantize_experts(model, 4, group=48 * 8 + 4)
    with pytest.raises(ValueError, match="no routed experts"):
        quantize_experts(build(tiny_config(num_experts=None)), 4)
    quantize_experts(model, 4)
    with pytest.raises(ValueError, match="allowed are experts as they are loaded"):
        quantize_experts(model, 3)
    with pytest.raises(ValueError, match="load the checkpoint again"):
        model.model.layers[1].block_sparse_moe.experts.use_storage("dense")


@pytest.mark.parametrize("bits", BITS)
def test_the_plan_counts_the_bytes_there_are(bits: int) -> None:
    model = build(tiny_config()).to(torch.bfloat16)
    quantize_experts(model, bits)
    predicted = weight_bytes(read_shape(model.config), 2, experts=f"hqq{bits}")
    assert predicted["routed experts"] == model.bytes_by_dtype()[f"hqq{bits}"]
    assert sum(predicted.values()) == sum(model.bytes_by_dtype().values())

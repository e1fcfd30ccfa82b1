"""A seeded random checkpoint in the released layout, with golden logits beside it: a test file for other projects.

Every tensor is drawn from its own name and the seed, so a checkpoint of any size is written one tensor at a time, and
one layer of it can be made without the others. Weights are scaled so that every part of the network matters.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.byte_sizes import parse_size
from modeling_k3.checkpoint import EXPERT, TEXT_PREFIX, canonical
from modeling_k3.conversion.convert import EXPERTS, with_experts, wrapped
from modeling_k3.conversion.job import Job, run_job
from modeling_k3.conversion.verify import float32_memory
from modeling_k3.load_plan import Layout
from modeling_k3.mxfp4 import GROUP
from modeling_k3.placement import available_memory
from modeling_k3.precision import KEEP_IN_FP32
from modeling_k3.saving import released_items
from modeling_k3.tensor_files import DTYPES
from modeling_k3.tensor_writer import Item, split_items, write_shard

GOLDEN = "golden.safetensors"


def make_tiny(
    target: Path, config: K3Config, *, progress: Callable[[int, int], None] | None = None, **options: Any
) -> Path:
    """Write a random checkpoint; the same arguments give the same bytes.

    Args:
        target: the folder that will appear.
        config: of the model; a flat one is wrapped.
        progress: see `run_job`.
        options: see `plan_tiny`.

    Returns:
        `target`.

    Raises:
        ValueError: see `plan_tiny`.
        FileExistsError, OSError: see `run_job`.
    """
    return run_job(plan_tiny(target, config, **options), progress)


def plan_tiny(
    target: Path,
    config: K3Config,
    *,
    seed: int = 0,
    experts: str = "mxfp4",
    tokens: int = 16,
    max_shard_size: int | str = "5GB",
) -> Job:
    """Plan a random checkpoint without writing anything.

    Args:
        target: the folder that will appear.
        config: of the model; a flat one is wrapped.
        seed: of weights and golden input.
        experts: "mxfp4" or "bf16".
        tokens: length of the golden prompt, for which `golden.safetensors` gets `input_ids` [1, T], `logits`
            [1, T, V] and `layers.<i>.router_indices` [1, T, R], computed in float32; 0 for none.
        max_shard_size: of one file.

    Raises:
        ValueError: an unknown number format, widths that MXFP4 cannot pack, or a model whose golden logits do not fit
            in memory.
    """
    if experts not in EXPERTS:
        raise ValueError(f"experts={experts!r} is unknown; allowed are {list(EXPERTS)}")
    released = with_experts(wrapped(config), experts)
    items = [_seeded(item, seed, config.kda_num_heads) for item in checkpoint_items(config, experts)]
    needed = float32_memory((canonical(item.name), item.shape) for item in items)
    room = available_memory()
    if tokens and needed > room:
        raise ValueError(
            f"tokens={tokens}: golden logits need {needed:,} bytes of memory, in float32 with the experts left in "
            f"their files, and {room:,} bytes are available; allowed is tokens=0"
        )
    golden = {GOLDEN: lambda path: write_golden(path.parent, seed, tokens)}
    return Job(
        target=Path(target).resolve(),
        shards=split_items(items, parse_size(max_shard_size, "max_shard_size")),
        texts={"config.json": json.dumps(released, indent=2) + "\n"},
        identity={"seed": seed, "tokens": tokens},
        made=golden if tokens else {},
        digits=6,
    )


def checkpoint_items(config: K3Config, experts: str) -> list[Item]:
    """Every tensor of a released checkpoint of this model, by name, number format and shape; without values.

    Args:
        config: of the model.
        experts: "mxfp4" or "bf16".
    """
    with torch.device("meta"):
        model = K3ForCausalLM(config)
    if experts == "mxfp4":
        for module in model.modules():
            if hasattr(module, "use_storage"):
                module.use_storage("packed")
    # As in the release, where 96 heads are stored as 128.
    length = (config.kda_num_heads // 64 + 1) * 64
    padded = {canonical(name): (length,) for name in model.state_dict() if name.endswith(".A_log")}
    found = released_items(model, model.state_dict(), Layout(prefix=TEXT_PREFIX, padded=padded), {})
    return sorted((_stored(item) for item in found), key=lambda item: _order(item.name))


def _stored(item: Item) -> Item:
    """Number formats as released: bytes, float32 for the fp32 list, bfloat16."""
    if item.dtype == "U8":
        return item
    is_wide = any(part in KEEP_IN_FP32 for part in item.name.split("."))
    return Item(item.name, "F32" if is_wide else "BF16", item.shape, item.make)


def _order(name: str) -> list[tuple[int, str]]:
    """Layer by layer, expert by expert."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _seeded(item: Item, seed: int, heads: int) -> Item:
    def make() -> Tensor:
        values = random_tensor(item, seed)
        if item.name.endswith(".A_log"):
            values[heads:] = 0
        return values

    return Item(item.name, item.dtype, item.shape, make)


def random_tensor(item: Item, seed: int) -> Tensor:
    """The values of one tensor, a function of its name and the seed."""
    # torch looks at 32 bits of a seed only.
    generator = torch.Generator().manual_seed(crc32(f"{seed} {item.name}".encode()))
    name = canonical(item.name)
    expert = EXPERT.fullmatch(name)
    if item.dtype == "U8" and expert is not None and expert[4] == "weight_packed":
        codes = torch.randint(0, 256, item.shape, dtype=torch.uint8, generator=generator)
        # One code of 6 or 7 in every group: the form that an encoder would have written.
        codes[..., :: GROUP // 2] |= 6
        return codes
    if item.dtype == "U8":
        # Elements drawn evenly have a root mean square of 2.9.
        spread = 1.5 / (2.9 * math.sqrt(item.shape[-1] * GROUP))
        byte = 127 + round(math.log2(spread))
        return torch.randint(byte - 1, byte + 2, item.shape, dtype=torch.uint8, generator=generator)
    noise = torch.randn(item.shape, generator=generator)
    return _scaled(name, noise).to(DTYPES[item.dtype])


def _scaled(name: str, noise: Tensor) -> Tensor:
    """Turn standard normal noise into plausible values of the parameter `name`."""
    owner, leaf = name.rsplit(".", 2)[-2:]
    if leaf == "A_log":
        return 0.5 * noise
    if leaf == "dt_bias":
        return noise - 3.0
    if leaf == "e_score_correction_bias":
        return 0.05 * noise
    if leaf == "weight" and "norm" in owner:
        return 1.0 + 0.2 * noise
    if owner.endswith("_res_proj"):
        return 0.3 * noise
    if "conv1d" in owner:
        return 0.5 * noise
    if owner == "embed_tokens":
        return noise
    return 1.5 * noise / math.sqrt(noise.shape[-1])


@torch.no_grad()
def write_golden(folder: Path, seed: int, tokens: int) -> None:
    """Run the checkpoint in `folder` in float32 and write what came out beside it."""
    model = K3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, expert_storage="mapped", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)
    chosen: dict[str, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        if layer.is_sparse:
            layer.block_sparse_moe.gate.register_forward_hook(_keep(chosen, f"layers.{index}.router_indices"))
    logits = model(ids).logits
    tensors = {"input_ids": ids, "logits": logits, **{name: value.unsqueeze(0) for name, value in chosen.items()}}
    write_shard(folder / GOLDEN, [Item.of(name, tensor.contiguous()) for name, tensor in tensors.items()])


def _keep(chosen: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen[name] = output[2].sort(-1).values.to(torch.int32)

    return hook

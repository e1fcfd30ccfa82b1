"""A whole model on a device: attention by every implementation, packed and mapped experts, generation, training steps.

Each part is tried by itself: one that raises is a row that says so, and the others go on. The model has random weights
and the sizes of a preset; routes are those of the reference, for a flipped near-tie would say nothing about a kernel.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling_k3 import K3Config, K3ForCausalLM
from modeling_k3.configuration import preset_path
from modeling_k3.conversion.tiny import make_tiny
from modeling_k3.readiness.operators import MISSING, REFUSED, VERIFIED, OperatorReport
from modeling_k3.readiness.routes import force_routes, record_routes

#: Relative error of logits: two orders of the same sums, through all layers of a small model.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
#: Implementations of attention over the tokens, and the number format in which each is tried.
ATTENTIONS = {"sdpa": torch.float32, "flex_attention": torch.float32}
ATTENTIONS |= {"flash_attention_2": torch.bfloat16, "flash_attention_3": torch.bfloat16}
_TOKENS, _NEW_TOKENS, _STEPS = 160, 16, 6


class ModelCheck:
    """The parts to try, on one device.

    Args:
        device: as torch names it.
        folder: where the model with random weights is written.
        preset: its sizes.
        tokens: in a row of the training step.
    """

    def __init__(self, device: str, folder: Path, preset: str = "small", tokens: int = 1024) -> None:
        self.device, self.folder, self.tokens = device, folder / "model", tokens
        config = K3Config.from_pretrained(preset_path(preset))
        if not self.folder.is_dir():
            make_tiny(self.folder, config, tokens=0)
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, config.vocab_size, (2, max(_TOKENS, tokens)), generator=generator).to(device)

    def reports(self) -> Iterator[OperatorReport]:
        """Yield a report for each part; none of them raises."""
        parts: list[tuple[str, str, Callable[[], tuple[float, str]]]] = [
            ("model: packed experts", "MXFP4", self.packed_experts),
            ("model: mapped experts", "a budget", self.mapped_experts),
            ("model: generation", "cache", self.generation),
            ("model: training", "KDA chunk", lambda: self.training("chunk")),
            # A part of its own: what is chosen by itself has to work.
            ("model: training, auto", "KDA auto", lambda: self.training("auto")),
            *(("model: attention", name, lambda name=name: self.attention(name)) for name in ATTENTIONS),
        ]
        for operator, implementation, part in parts:
            yield attempt(operator, implementation, part)

    def load(self, **options: Any) -> K3ForCausalLM:
        """The model on the device, in float32 unless told otherwise."""
        options = {"dtype": torch.float32, "device_map": {"": self.device}, **options}
        return K3ForCausalLM.from_pretrained(self.folder, **options).eval()

    def compare(self, reference: K3ForCausalLM, model: K3ForCausalLM | None, switch: Callable[[], None]) -> float:
        """Relative error of logits after `switch`, of `model` or of the reference itself, with the routes of before."""
        ids = self.ids[:, :_TOKENS]
        # The second row is shorter, and padded on the left.
        mask = torch.ones_like(ids)
        mask[1, : _TOKENS // 4] = 0
        with record_routes(reference) as routes:
            expected = reference(ids, attention_mask=mask, use_cache=False).logits[mask == 1]
        switch()
        model = reference if model is None else model
        with force_routes(model, routes):
            found = model(ids, attention_mask=mask, use_cache=False).logits[mask == 1]
        return check((found.double() - expected.double()).norm() / expected.double().norm(), LIMITS[model.dtype])

    @torch.no_grad()
    def attention(self, name: str) -> tuple[float, str]:
        """Against eager attention in the same number format."""
        dtype = ATTENTIONS[name]
        model = self.load(dtype=dtype, attn_implementation="eager")
        error = self.compare(model, None, lambda: model.set_attn_implementation(name))
        took = self.milliseconds(lambda: model(self.ids[:, :_TOKENS], use_cache=False))
        return error, f"{_name(dtype)}, two rows of {_TOKENS} tokens: {took:.1f} ms"

    @torch.no_grad()
    def packed_experts(self) -> tuple[float, str]:
        """Products over packed weights against the same weights expanded."""
        model = self.load()
        error = self.compare(self.load(dequantize=True), model, lambda: None)
        took = self.milliseconds(lambda: model(self.ids[:, :_TOKENS], use_cache=False))
        return error, f"two rows of {_TOKENS} tokens: {took:.1f} ms"

    @torch.no_grad()
    def mapped_experts(self) -> tuple[float, str]:
        """Experts read from the files, a few at a time, against all of them in memory."""
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        model = self.load(expert_memory=max(size // 4, 2**20))
        error = self.compare(self.load(), model, lambda: None)
        took = self.milliseconds(lambda: model(self.ids[:, :_TOKENS], use_cache=False), turns=2)
        stats = model.expert_residency.stats()
        return error, f"two rows of {_TOKENS} tokens: {took:.1f} ms, {stats['bytes_read']:,} bytes read"

    @torch.no_grad()
    def generation(self) -> tuple[float, str]:
        """Greedy decoding with a cache against the logits of the whole text at once."""
        model = self.load()
        start = time.perf_counter()
        found = model.generate(
            self.ids[:, :32], max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, use_cache=True,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
        rate = _NEW_TOKENS * len(found.sequences) / (time.perf_counter() - start)
        expected = model(found.sequences, use_cache=False).logits[:, 31:-1].double()
        written = torch.stack(found.logits, dim=1).double()
        error = check((written - expected).norm() / expected.norm(), LIMITS[torch.float32])
        return error, f"{rate:.1f} tokens a second, two rows, warm-up included"

    def training(self, path: str) -> tuple[None, str]:
        """Steps of AdamW in bfloat16 on the same rows: the loss is finite and falls."""
        # Optimizer and gradients in the parameters' own format, which is that of the cheapest training.
        model = self.load(dtype=torch.bfloat16, dequantize=True).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids, losses = self.ids[:, : self.tokens], []

        def step() -> None:
            loss = model(ids, labels=ids, use_cache=False, kda_implementation=path).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        took = self.milliseconds(step, turns=_STEPS - 1)
        if not (losses[-1] < losses[0]):
            raise ArithmeticError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {_STEPS} steps")
        rate = ids.numel() / took * 1e3
        return None, f"{took:.1f} ms, {rate:,.0f} tokens a second, loss {losses[0]:.3f} to {losses[-1]:.3f}"

    def milliseconds(self, work: Callable[[], Any], turns: int = 5) -> float:
        """The median of some turns after a first one."""
        seconds = []
        for _ in range(turns + 1):
            start = time.perf_counter()
            work()
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:]) * 1e3


def attempt(operator: str, implementation: str, part: Callable[[], tuple[float | None, str]]) -> OperatorReport:
    """Try a part: a missing package is `MISSING`, whatever else it raises is `REFUSED`, with the first line of it."""
    version = f"torch {torch.__version__}"
    try:
        error, words = part()
    except Exception as problem:
        status = MISSING if isinstance(problem, ImportError) else REFUSED
        line = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        return OperatorReport(operator, implementation, version, status, line[:200])
    finally:
        # After some errors the device is of no more use, and says so at every call.
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
    return OperatorReport(operator, implementation, version, VERIFIED, words, error)


def check(error: Tensor, limit: float) -> float:
    """The error, if it is within its limit.

    Raises:
        ArithmeticError: it is not, or no number.
    """
    if not (error.item() <= limit):
        raise ArithmeticError(f"logits are off by {error.item():.1e} of their size, allowed {limit:.0e}")
    return error.item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

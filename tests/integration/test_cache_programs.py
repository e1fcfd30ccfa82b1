"""Random programs of cache operations: after every step the cache continues as if everything had been recomputed.

A program is a list of steps, each an operation and three numbers that say which tokens, rows or lengths; numbers are
taken modulo what is possible, so every list is a program. Beside the cache the test keeps what it stands for, the
tokens and which of them are real, and computes from that alone. The models are float64: a wrong token shows as 1e-3
at least, rounding as 1e-13, and no router decision hangs on it.
"""

import os
import pickle
import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modeling_k3 import K3Cache, K3StaticCache, PrefixCache
from tests.models import build, tiny_config
from tests.tolerances import bound

#: Programs per model; more from the environment.
PROGRAMS = int(os.environ.get("K3_CACHE_PROGRAMS", "80"))
MODELS = {
    "hybrid": {"layers": "KMK"},
    "release order": {"layers": "KKMM", "num_experts": None},
    "KDA only": {"layers": "KK", "num_experts": None},
    "MLA only": {"layers": "MM", "num_experts": None},
}
LONGEST, MOST_ROWS, BLOCK, VOCABULARY = 48, 4, 4, 157


class Step(NamedTuple):
    """One operation with its numbers."""

    name: str
    a: int
    b: int
    c: int


class Program:
    """A cache under test and what it stands for."""

    def __init__(
        self, model: Any, attention: str, limit: float = bound("f64_paths_max_abs"), is_static: bool = False
    ) -> None:
        self.model, self.limit = model, limit
        model.set_attn_implementation(attention)
        self.prefixes = PrefixCache(block_size=BLOCK, max_bytes=40_000)
        # Room for what `fail` tries beyond the longest.
        self.cache = K3StaticCache(model.config, LONGEST + 2) if is_static else K3Cache(model.config)
        self.ids, self.real = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.bool)
        self.saved: list[tuple[K3Cache, Tensor, Tensor]] = []

    def run(self, step: Step) -> None:
        """Apply one step to both sides and compare."""
        getattr(self, step.name)(step)
        assert self.cache.get_seq_length() == self.ids.shape[1]
        assert {layer.get_seq_length() for layer in self.cache.layers} == {self.ids.shape[1]}
        held = self.cache.held_batch_size
        # A log that has just begun shares its state with the layer, and both count.
        assert self.cache.nbytes()["total"] >= held_bytes(self.cache)
        assert held is None if self.ids.shape[1] == 0 else held == self.ids.shape[0]

    # -- tokens ---------------------------------------------------------------------------------------------------

    def forward(self, step: Step, length: int, real: Tensor) -> None:
        """Read more tokens and compare their logits with a computation from scratch."""
        generator = torch.Generator().manual_seed(step.c)
        new = torch.randint(0, VOCABULARY, (len(self.ids), length), generator=generator)
        self.ids, self.real = torch.cat([self.ids, new], 1), torch.cat([self.real, real], 1)
        inputs: dict[str, Any] = {"input_ids": new}
        if step.c % 3 == 0:
            embeds = self.model.get_input_embeddings()(new)
            # Whatever stands at padding has no influence.
            inputs = {"inputs_embeds": embeds.masked_fill(~real[..., None], float("inf"))}
        with torch.no_grad():
            logits = self.model(**inputs, attention_mask=self.mask(step.b, length), cache=self.cache).logits
        self.compare(logits, length, real)

    def compare(self, logits: Tensor, length: int, real: Tensor) -> None:
        """Each row alone, its padding taken out, no cache."""
        for row in range(len(self.ids)):
            if not real[row].any():
                continue
            with torch.no_grad():
                whole = self.model(self.ids[row : row + 1, self.real[row]], use_cache=False).logits[0]
            expected = whole[-int(real[row].sum()) :]
            assert (logits[row, real[row]] - expected).abs().max() < self.limit
        assert logits.isfinite().all()

    def mask(self, choice: int, length: int) -> Tensor | None:
        """One of the ways to write down the same padding."""
        if self.real.all() and choice % 2:
            return None
        if choice % 5 == 4:
            total = self.real.shape[1]
            rule = torch.arange(total) <= torch.arange(total - length, total)[:, None]
            rule = (rule & self.real[:, None])[:, None]
            return rule if choice % 4 else torch.zeros(rule.shape).masked_fill(~rule, float("-inf"))
        return self.real.to([torch.int64, torch.bool, torch.float32][choice % 3])

    def read(self, step: Step) -> None:
        """A piece without padding."""
        length = min(1 + step.a % 7, LONGEST - self.ids.shape[1])
        if length > 0:
            self.forward(step, length, torch.ones(len(self.ids), length, dtype=torch.bool))

    def read_long(self, step: Step) -> None:
        """A piece that the chunk form of KDA evaluates."""
        self.read(Step(step.name, 6, step.b, step.c))
        length = min(17 + step.a % 9, LONGEST - self.ids.shape[1])
        if length > 0:
            self.forward(step, length, torch.ones(len(self.ids), length, dtype=torch.bool))

    def decode(self, step: Step) -> None:
        """Single tokens."""
        for index in range(1 + step.a % 3):
            if self.ids.shape[1] < LONGEST:
                one = torch.ones(len(self.ids), 1, dtype=torch.bool)
                self.forward(Step("decode", step.a, step.b, step.c + index), 1, one)

    def read_padded(self, step: Step) -> None:
        """A piece with padding anywhere, also whole rows of it."""
        length = min(1 + step.a % 6, LONGEST - self.ids.shape[1])
        if length > 0:
            generator = torch.Generator().manual_seed(step.b)
            real = torch.rand(len(self.ids), length, generator=generator) < 0.6
            self.forward(step, length, real)

    # -- the cache ------------------------------------------------------------------------------------------------

    def record(self, step: Step) -> None:
        """From now on tokens can be taken back, a few or all that come."""
        self.cache.keep_log(LONGEST if step.b % 3 == 0 else 1 + step.a % 6)

    def crop(self, step: Step) -> None:
        """Take tokens back, or be refused."""
        seen = self.ids.shape[1]
        # Few, many, all.
        count = [step.a % 8, step.a % 8, step.a % (seen + 2), seen][step.b % 4]
        if count > self.cache.rollback_limit:
            with pytest.raises(ValueError, match="crop"):
                self.cache.crop(-count)
            return
        self.cache.crop(-count)
        self.ids, self.real = self.ids[:, : seen - count], self.real[:, : seen - count]
        if count == seen:
            # Nothing is left, not even the number of rows.
            rows = 1 + step.c % 3
            self.ids = torch.zeros(rows, 0, dtype=torch.long)
            self.real = torch.zeros(rows, 0, dtype=torch.bool)

    def rows(self, rows: list[int], change: Callable[[], None]) -> None:
        """Rows move in both."""
        if self.ids.shape[1]:
            change()
            self.ids, self.real = self.ids[rows], self.real[rows]

    def reorder(self, step: Step) -> None:
        """As beam search does."""
        order = [(step.a * i + step.b) % len(self.ids) for i in range(len(self.ids))]
        self.rows(order, lambda: self.cache.reorder_cache(torch.tensor(order)))

    def select(self, step: Step) -> None:
        """Drop a row, by number or by mask."""
        keep = [i for i in range(len(self.ids)) if i != step.a % len(self.ids)] or [0]
        index = torch.tensor(keep)
        if step.b % 2:
            index = torch.zeros(len(self.ids), dtype=torch.bool).index_fill(0, index, True)
        self.rows(keep, lambda: self.cache.batch_select_indices(index))

    def repeat(self, step: Step) -> None:
        """Repeat every row."""
        if 2 * len(self.ids) <= MOST_ROWS:
            rows = [i for i in range(len(self.ids)) for _ in range(2)]
            self.rows(rows, lambda: self.cache.batch_repeat_interleave(2))

    def keep_copy(self, step: Step) -> None:
        """Put a copy aside."""
        copy = deepcopy(self.cache) if step.a % 2 else pickle.loads(pickle.dumps(self.cache))
        self.saved.append((copy, self.ids, self.real))

    def go_back(self, step: Step) -> None:
        """Continue from a copy made earlier, and put the present aside."""
        if self.saved:
            here = (self.cache, self.ids, self.real)
            self.cache, self.ids, self.real = self.saved.pop(step.a % len(self.saved))
            self.saved.append(here)

    def move(self, step: Step) -> None:
        """Offload and bring back."""
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()
        assert self.cache.to("cpu") is self.cache

    def fail(self, step: Step) -> None:
        """Calls that are refused, or break half-way, leave no trace."""
        new = torch.zeros(len(self.ids), 2, dtype=torch.long)
        with pytest.raises(ValueError), torch.no_grad():
            self.model(new, attention_mask=torch.ones(len(self.ids), self.ids.shape[1] + 3), cache=self.cache)
        layer = self.model.model.layers[-1]
        handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("as if")))
        try:
            with pytest.raises(MemoryError), torch.no_grad():
                self.model(new, attention_mask=torch.cat([self.real, new.bool() | True], 1), cache=self.cache)
        finally:
            handle.remove()

    def restart(self, step: Step) -> None:
        """Begin again with known beginnings: whatever prefix is known comes from the prefix cache."""
        self.cache.reset()
        length = 2 + step.a % 15
        generator = torch.Generator().manual_seed(step.b % 3)
        self.ids = torch.randint(0, VOCABULARY, (1 + step.c % 2, length), generator=generator)
        self.real = torch.ones_like(self.ids, dtype=torch.bool)
        with torch.no_grad():
            self.prefixes.bind(self.model)
            start, keys = self.prefixes.fill(self.cache, self.ids)
            while start < length:
                stop = min((start // BLOCK + 1) * BLOCK, length)
                logits = self.model(self.ids[:, start:stop], cache=self.cache).logits
                if stop % BLOCK == 0:
                    self.prefixes.store(self.cache, self.ids, keys, stop)
                count, start = stop - start, stop
        self.compare(logits, count, self.real[:, -count:])


def held_bytes(cache: K3Cache) -> int:
    """Bytes of all memory behind the tensors that a cache holds for its layers."""
    held: list[Tensor | None] = []
    for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):
        if not is_linear:
            held += [layer.keys, layer.values, *(layer._reserve or ())] if layer.get_seq_length() else []
            continue
        held += [*(layer.windows or []), layer.state]
        if layer.log is not None:
            held += [*(layer.log.windows or []), layer.log.state, *(x for piece in layer.log.pieces for x in piece)]
    storages = [x.untyped_storage() for x in held if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


OPERATIONS = (
    "read read_long decode decode read_padded record crop crop reorder select repeat keep_copy go_back move fail "
    "restart"
).split()
STEPS = st.lists(st.builds(Step, st.sampled_from(OPERATIONS), *[st.integers(0, 59)] * 3), min_size=3, max_size=12)


@cache
def model_named(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """One of the models."""
    return build(tiny_config(**MODELS[name]), dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=PROGRAMS, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(steps=STEPS, attention=st.sampled_from(["eager", "sdpa"]), is_static=st.booleans())
def test_any_program_equals_recomputation(name: str, steps: list[Step], attention: str, is_static: bool) -> None:
    program = Program(model_named(name), attention, is_static=is_static)
    for step in steps:
        program.run(step)
    # Whatever it did, it can go on.
    program.run(Step("decode", 2, 1, 1))


@pytest.mark.parametrize("name", MODELS)
def test_programs_that_nobody_has_seen(name: str) -> None:
    """The same with other programs each time, and in float32 where no router decision hangs on rounding."""
    seed = int(os.environ.get("K3_CACHE_SEED", random.SystemRandom().randrange(2**32)))
    draw = random.Random(seed)
    for number in range(max(1, PROGRAMS // 4)):
        dtype = torch.float64 if MODELS[name].get("num_experts", 8) else draw.choice([torch.float64, torch.float32])
        limit = bound("f64_paths_max_abs") if dtype == torch.float64 else 10 * bound("unit_model_fp32_max_abs")
        program = Program(model_named(name, dtype), draw.choice(["eager", "sdpa"]), limit, draw.random() < 0.5)
        names = draw.choices(OPERATIONS, k=draw.randint(3, 12))
        steps = [Step(each, *(draw.randrange(60) for _ in range(3))) for each in names]
        try:
            for step in [*steps, Step("decode", 2, 1, 1)]:
                program.run(step)
        except Exception as error:
            raise AssertionError(f"K3_CACHE_SEED={seed}, program {number}, {dtype}: {steps}") from error


def test_the_comparison_sees_a_single_wrong_number() -> None:
    """The proof that these comparisons can fail: one state, one latent, one window that is off."""
    for place in ("state", "window", "latent"):
        program = Program(model_named("hybrid"), "sdpa")
        program.run(Step("read", 5, 1, 1))
        layers = program.cache.layers
        damaged = {"state": layers[0].state, "window": layers[0].windows[0], "latent": layers[1].keys}[place]
        damaged[0].view(-1)[-1] += 0.1
        with pytest.raises(AssertionError):
            program.run(Step("decode", 0, 1, 1))

"""The training loop: a budget of seconds or steps, a live held-out figure, and a state that is never lost."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from modeling_k3.training.balancing import RouterBalancer
from modeling_k3.training.optimizers import MuonAdamW, build_optimizer
from modeling_k3.training.qat import fake_quantized_experts
from modeling_k3.training.schedule import rate_at, set_progress

from . import UserError
from .corpus import Corpus
from .measure import bits_per_id, sample_windows
from .state import load_state, read_progress, save_state


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides what comes out, besides model and text. A run can only be resumed with equal settings.

    Args:
        seconds: training time, held-out looks and saving included; the schedule follows the share of it that is spent.
        max_steps: if given, this many steps instead: the run is then reproducible to the bit on one machine.
        batch_size, sequence_length: ids per step are their product.
        lr, muon_lr: peak rates of AdamW and Muon; without a `muon_lr` everything is AdamW's.
        weight_decay: decoupled, for matrices only.
        warmup, floor: share of the run spent on the rise; share of the peak rate left at the end.
        clip: largest norm of the gradient.
        balance_memory: share of the routers' biases that one step keeps, see `RouterBalancer`.
        looks: how often the held-out sample is measured over the whole run.
        look_windows: its size in windows of 512 bytes.
        save_seconds: a state is written at least this often.
        qat: train the routed experts on the MXFP4 grid, for an export without loss.
        seed: start values and order of the data.
    """

    seconds: float = 120.0
    max_steps: int | None = None
    batch_size: int = 8
    sequence_length: int = 256
    lr: float = 4e-3
    muon_lr: float | None = 6e-3
    weight_decay: float = 0.1
    warmup: float = 0.03
    floor: float = 0.02
    clip: float = 1.0
    balance_memory: float = 0.0
    looks: int = 16
    look_windows: int = 32
    save_seconds: float = 10.0
    qat: bool = False
    seed: int = 0


@dataclass
class Tick:
    """What a display is told after every step."""

    step: int
    elapsed: float
    share: float
    train_bits: float
    held_out_bits: float | None
    tokens_per_second: float


class Interrupted(Exception):
    """The run was asked to stop and has saved its state."""

    def __init__(self, step: int, elapsed: float) -> None:
        super().__init__(f"stopped after step {step}")
        self.step, self.elapsed = step, elapsed


class Windows:
    """Training windows in an order that depends on the seed and the position alone: all a resumed run needs to know.

    Every pass over the text visits each window once, in new order and with a new offset.
    """

    def __init__(self, stream: Tensor, length: int, seed: int) -> None:
        self.stream, self.length, self.seed = stream, length, seed
        self.count = (len(stream) - 1) // length - 1
        if self.count < 1:
            raise UserError(f"too little text to train on: {len(stream)} bytes for windows of {length}")
        self._pass: tuple[int, int, Tensor] | None = None

    def batch(self, position: int, size: int) -> Tensor:
        """Ids [size, length] of the windows from `position` on, counted from the start of the run."""
        return torch.stack([self._window(i) for i in range(position, position + size)]).long()

    def _window(self, position: int) -> Tensor:
        number, index = divmod(position, self.count)
        if self._pass is None or self._pass[0] != number:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            offset = int(torch.randint(self.length, (), generator=generator))
            self._pass = (number, offset, torch.randperm(self.count, generator=generator))
        _, offset, order = self._pass
        start = offset + int(order[index]) * self.length
        return self.stream[start : start + self.length]


class StopRequest:
    """Inside `with`, Ctrl-C and termination are noted instead of raised; a second Ctrl-C raises at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:
                # Handlers can only be set in the main thread; elsewhere the caller must stop the run.
                break
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(
    model: PreTrainedModel,
    corpus: Corpus,
    settings: TrainSettings,
    root: Path,
    *,
    identity: dict[str, str],
    first_look: Callable[[], float],
    watch: Callable[[Tick], None] = lambda tick: None,
) -> dict[str, Any]:
    """Train until the budget is spent, from the latest state in `root` if there is one.

    Args:
        model: freshly initialised, or of the same shape as the saved one.
        corpus: the text.
        settings: see there.
        root: folder of the training states.
        identity: hashes of what else must be the same to resume, by what it is ("text", "model").
        first_look: held-out bits per byte of the untrained model; called only at the very start.
        watch: told about every step.

    Returns:
        The progress record: `step`, `elapsed`, `finished`, `before`, `curve` and what identifies the run.

    Raises:
        Interrupted: after saving, when a signal asked for it.
        UserError: the saved state belongs to other settings or other text.
    """
    optimizer = build_optimizer(model, lr=settings.lr, muon_lr=settings.muon_lr, weight_decay=settings.weight_decay)
    with fake_quantized_experts(model) if settings.qat else nullcontext():
        progress = read_progress(root)
        if progress is None:
            progress = {
                "step": 0,
                "elapsed": 0.0,
                "finished": False,
                "before": first_look(),
                "settings": asdict(settings),
                "identity": identity,
                "curve": {"train": [], "held_out": []},
            }
            save_state(root, model, optimizer, progress)
        else:
            require_same_run(progress, settings, identity)
            load_state(root, model, optimizer)
        if not progress["finished"]:
            _Loop(model, corpus, settings, root, optimizer, progress, watch).run()
    return progress


def require_same_run(progress: dict[str, Any], settings: TrainSettings, identity: dict[str, str]) -> None:
    """Refuse to continue a run with something else than it was begun with.

    Raises:
        UserError: naming what differs.
    """
    now, then = asdict(settings), progress["settings"]
    differing = [f"{name} was {then.get(name)}, is {now[name]}" for name in now if then.get(name) != now[name]]
    differing += [
        f"the {what} is not the same" for what in identity if progress["identity"].get(what) != identity[what]
    ]
    if differing:
        raise UserError(
            f"the run in this folder was begun differently ({'; '.join(differing)}). Give the options it was begun "
            f"with, another --out, or --fresh to start over."
        )


class _Loop:
    """State of a running training: what `train` would otherwise hand from function to function."""

    def __init__(
        self,
        model: PreTrainedModel,
        corpus: Corpus,
        settings: TrainSettings,
        root: Path,
        optimizer: MuonAdamW,
        progress: dict[str, Any],
        watch: Callable[[Tick], None],
    ) -> None:
        self.model, self.settings, self.root, self.optimizer = model, settings, root, optimizer
        self.progress, self.watch = progress, watch
        self.windows = Windows(corpus.train, settings.sequence_length, settings.seed)
        self.sample = sample_windows(corpus.held_out, settings.look_windows)
        self.balancer = RouterBalancer(model, memory=settings.balance_memory)

    def run(self) -> None:
        """Step until the budget is spent or someone asks to stop; save in both cases."""
        model, settings, progress, curve = self.model, self.settings, self.progress, self.progress["curve"]
        model.train()
        began = time.perf_counter() - progress["elapsed"]
        saved_at = progress["elapsed"]
        with StopRequest() as stop:
            while (share := self.share()) < 1 and not stop.asked:
                step_began = time.perf_counter()
                bits = self.step(share)
                took = time.perf_counter() - step_began
                progress["step"] += 1
                curve["train"].append([round(time.perf_counter() - began, 3), progress["step"], round(bits, 4)])
                look = None
                if self.share(time.perf_counter() - began) * settings.looks >= len(curve["held_out"]) + 1:
                    look = bits_per_id(model, self.sample)
                    curve["held_out"].append([round(time.perf_counter() - began, 3), progress["step"], round(look, 4)])
                progress["elapsed"] = time.perf_counter() - began
                if progress["elapsed"] - saved_at > settings.save_seconds:
                    save_state(self.root, model, self.optimizer, progress)
                    saved_at = progress["elapsed"]
                rate = settings.batch_size * settings.sequence_length / took
                self.watch(Tick(progress["step"], progress["elapsed"], min(self.share(), 1.0), bits, look, rate))
            progress["finished"] = self.share() >= 1
            save_state(self.root, model, self.optimizer, progress)
        self.balancer.close()
        if not progress["finished"]:
            raise Interrupted(progress["step"], progress["elapsed"])

    def share(self, elapsed: float | None = None) -> float:
        """How much of the budget is spent, 0 to 1 or a little more."""
        if self.settings.max_steps is not None:
            return self.progress["step"] / self.settings.max_steps
        return (self.progress["elapsed"] if elapsed is None else elapsed) / self.settings.seconds

    def step(self, share: float) -> float:
        """One update. Returns the mean bits per id of the batch before it."""
        settings = self.settings
        set_progress(self.optimizer, rate_at(share, warmup=settings.warmup, floor=settings.floor))
        ids = self.windows.batch(self.progress["step"] * settings.batch_size, settings.batch_size)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.balancer.step()
        return loss.item() / math.log(2)

"""Which mapped experts are in memory: a budget in bytes, reading ahead on a thread, least recently used out first.

    limit = budget - what the caches of the model's calls hold          one owner: experts give way to latents

A layer announces the experts it is about to use. Those that are not resident are read in the order of use by a
background thread, two on their way at a time, while the layer computes; behind them the experts that the next layer's
router would choose from what this layer's router saw. Read means: in the system's page cache, in which the experts'
maps look. Given up means: out of the maps and out of the page cache. Views therefore never dangle: what is used without
being resident is read by the system on the spot, and nothing decided here can change a number.
"""

import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

from transformers.utils import logging

from .expert_shelf import ExpertShelf, Item, Key, Pages, decrease

logger = logging.get_logger(__name__)
# Guesses are read while so many of the latest are right; otherwise one layer's in so many, to see whether they are now.
_ENOUGH_LUCK, _LATEST, _TRIAL = 0.5, 64, 31
_COUNTS = ("hits", "misses", "guesses", "guesses_used", "evictions", "bytes_read")


Guess = Callable[[], Iterable[Item]]


class ExpertResidency:
    """The experts of a model that are in memory, and the thread that reads them. Several threads may use it.

    Args:
        budget: bytes for resident experts and the caches of calls together.
        largest: bytes of the largest expert. Two are always granted: one at work and one on its way.

    Raises:
        ValueError: a budget below two experts.
    """

    def __init__(self, budget: int, largest: int) -> None:
        if budget < 2 * largest:
            raise ValueError(f"expert_memory={budget} bytes; allowed are {2 * largest}, which is two experts, and more")
        self.budget, self._largest = budget, largest
        #: layer -> router and pages of the next one, for guessing.
        self.following: dict[int, tuple[Any, Pages]] = {}
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        # Its thread ends with it.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="k3-experts")
        self._is_reading, self._turn = False, 0
        self._shelf = ExpertShelf()
        self._queue: deque[Item] = deque()
        self._guess: Guess | None = None
        self._guesses: deque[Item] = deque()
        self._guessed: set[Key] = set()
        self._luck, self._tried = 1.0, 0
        self._awaited: Counter[Key] = Counter()
        self._failed: dict[Key | None, BaseException] = {}
        self._caches: WeakSet[Any] = WeakSet()
        self._for_caches, self._has_warned = 0, False
        self.reset_stats()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertResidency":
        # The copy of a model reads the same bytes of the same files.
        return self

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return ExpertResidency, (self.budget, self._largest)

    # -- what a layer calls ---------------------------------------------------------------------------------------

    def announce(self, pages: Pages, experts: Iterable[int], guess: Guess | None = None) -> None:
        """Say which experts of a layer this thread uses next, in this order. What it announced before is used up.

        Args:
            pages: the layer's.
            experts: numbers.
            guess: called on the background thread once these are read; what may be used after them.

        Raises:
            BaseException: what reading failed with since the last call.
        """
        if os.getpid() != self._process:
            # A fork has the lock and the names of the threads, and no thread.
            self._start()
        for_caches = sum(cache.nbytes()["total"] for cache in list(self._caches))
        with self._changed:
            if self._failed:
                raise self._failed.popitem()[1]
            self._for_caches = for_caches
            self._shelf.forget_ended_threads()
            mine = self._shelf.announced.setdefault(threading.get_ident(), OrderedDict())
            self._shelf.release(mine)
            self._turn, self._tried = self._turn + 1, (self._tried + (guess is not None)) % _TRIAL
            is_tried = self._luck >= _ENOUGH_LUCK or not self._tried
            self._guess, self._guesses = guess if is_tried else None, deque()
            for item in (Item(pages, expert) for expert in experts):
                self._shelf.announce(mine, item)
                self._count(item)
            dropped = self._make_room(0)
            self._read()
        _drop(dropped)
        if self.budget - for_caches < 2 * self._largest and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"caches hold {for_caches} bytes of expert_memory={self.budget}; experts need {2 * self._largest}"
            )

    def wait(self, pages: Pages, expert: int) -> None:
        """Return once an expert is in memory that this thread announced; at once if it did not.

        Raises:
            BaseException: what reading it failed with.
        """
        mine, key = self._shelf.announced.get(threading.get_ident()), (pages.layer, expert)
        if not mine or key not in mine or os.getpid() != self._process:
            return
        with self._changed:
            item = mine[key]
            self._shelf.release(mine, until=key)
            self._read()
            if self._shelf.is_ready(item):
                return
            start = time.perf_counter()
            self._awaited[key] += 1
            try:
                while not self._shelf.is_ready(item):
                    if key in self._failed:
                        raise self._failed.pop(key)
                    if not self._shelf.is_held(item) and item not in self._queue:
                        self._queue.appendleft(item)
                    self._read()
                    self._changed.wait()
            finally:
                decrease(self._awaited, key)
                self._counts["seconds_stalled"] += time.perf_counter() - start

    def share_with(self, cache: Any) -> None:
        """Count what a cache holds, as long as it exists, against the budget."""
        self._caches.add(cache)

    # -- what it did ----------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Bytes that experts may hold now."""
        return max(self.budget - self._for_caches, 2 * self._largest)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the experts that are in memory or on their way."""
        return self._shelf.nbytes

    def stats(self) -> dict[str, int | float]:
        """What happened since the last `reset_stats`.

        Returns:
            `hits` and `misses`: announced experts that were in memory or on their way, and that were not; `guesses`
            and `guesses_used`: experts read on a guess, and those that were announced next; `evictions`;
            `bytes_read`; `seconds_reading` of the background thread; `seconds_stalled` that layers waited for it;
            `peak_bytes`: the most that was resident. And of now: `budget_bytes`, `cache_bytes`, `limit_bytes`,
            `resident_bytes`.
        """
        with self._changed:
            return {
                **self._counts,
                "budget_bytes": self.budget,
                "cache_bytes": self._for_caches,
                "limit_bytes": self.limit,
                "resident_bytes": self.resident_bytes,
            }

    def reset_stats(self) -> None:
        """Count from zero."""
        with self._changed:
            self._counts: dict[str, int | float] = dict.fromkeys(_COUNTS, 0)
            self._counts |= {"seconds_reading": 0.0, "seconds_stalled": 0.0, "peak_bytes": self.resident_bytes}

    def forget(self) -> None:
        """Give up all experts, between two calls of the model."""
        with self._changed:
            for mine in self._shelf.announced.values():
                self._shelf.release(mine)
            dropped = self._make_room(self.limit)
        _drop(dropped)

    # -- under the lock -------------------------------------------------------------------------------------------

    def _count(self, item: Item) -> None:
        """Hit or miss of an announced expert; what is missing is queued."""
        if self._shelf.is_held(item):
            self._counts["hits"] += 1
            self._settle(item, was_right=True)
            self._shelf.touch(item)
        else:
            self._counts["misses"] += 1
            self._queue.append(item)

    def _settle(self, item: Item, was_right: bool) -> None:
        """If it was read on a guess, learn from it."""
        if item.key in self._guessed:
            self._guessed.remove(item.key)
            self._counts["guesses_used"] += was_right
            self._luck += (was_right - self._luck) / _LATEST

    def _make_room(self, nbytes: int, awaited: Item | None = None) -> list[Item]:
        """Give up experts until `nbytes` more fit, as far as that goes; where one is awaited, also what is needed."""
        dropped = []
        while self.resident_bytes + nbytes > self.limit:
            victim = self._shelf.oldest() or (self._shelf.needed_last() if awaited else None)
            if victim is None:
                break
            self._shelf.remove(victim)
            self._settle(victim, was_right=False)
            self._counts["evictions"] += 1
            dropped.append(victim)
        return dropped

    def _next(self) -> tuple[Item | None, list[Item]]:
        """The next expert to read, with room made for it, and what was given up."""
        self._queue = deque(
            item for item in self._queue if item.key in self._shelf.needed and not self._shelf.is_held(item)
        )
        while self._guesses and self._shelf.is_held(self._guesses[0]):
            self._guesses.popleft()
        awaited = next((item for item in self._queue if item.key in self._awaited), None)
        source = self._queue or self._guesses
        if not source:
            return None, []
        item = awaited or source[0]
        dropped = self._make_room(item.nbytes, awaited)
        if self.resident_bytes + item.nbytes > self.limit:
            return None, dropped
        source.remove(item)
        self._shelf.put(item)
        self._counts["peak_bytes"] = max(self._counts["peak_bytes"], self.resident_bytes)
        if source is self._guesses:
            self._counts["guesses"] += 1
            self._guessed.add(item.key)
        return item, dropped

    def _read(self) -> None:
        """Wake the background thread if there is something to do."""
        if not self._is_reading and (self._queue or self._guesses or self._guess):
            self._pool.submit(self._work)
            self._is_reading = True

    # -- on the background thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """Read until nothing is left or no room is left."""
        ahead: Item | None = None
        while True:
            with self._changed:
                item, dropped = self._next()
                guess, turn = (self._guess, self._turn) if item is ahead is None else (None, 0)
                self._guess = None if guess else self._guess
                self._is_reading = bool(item or ahead or guess)
                is_done = not self._is_reading
            self._attempt(None, lambda gone=dropped: _drop(gone))
            if is_done:
                return
            if guess:
                self._attempt(None, lambda ask=guess, asked=turn: self._take_guesses(ask(), asked))
            if item:
                self._attempt(item, lambda new=item: new.pages.advise(new.expert))
            if ahead:
                self._attempt(ahead, lambda old=ahead: self._load(old))
            ahead = item

    def _attempt(self, item: Item | None, step: Callable[[], None]) -> None:
        """Do a step; what goes wrong is raised in the thread that waits for the expert, or announces next."""
        try:
            step()
        except BaseException as error:
            with self._changed:
                self._failed[item and item.key] = error
                if item and self._shelf.is_held(item):
                    self._shelf.remove(item)
                self._changed.notify_all()

    def _take_guesses(self, found: Iterable[Item], turn: int) -> None:
        with self._changed:
            if turn == self._turn:
                self._guesses.extend(found)

    def _load(self, item: Item) -> None:
        if not self._shelf.is_held(item):
            return
        start = time.perf_counter()
        item.pages.load(item.expert)
        with self._changed:
            self._shelf.mark_ready(item)
            self._counts["bytes_read"] += item.nbytes
            self._counts["seconds_reading"] += time.perf_counter() - start
            self._changed.notify_all()


def _drop(items: Iterable[Item]) -> None:
    """Outside of the lock: the system takes its time."""
    for item in items:
        item.pages.drop(item.expert)

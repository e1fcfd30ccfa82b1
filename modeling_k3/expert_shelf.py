"""What a residency keeps the books of: the experts in memory, who needs them, and which of them go first."""

import threading
from collections import Counter, OrderedDict, defaultdict
from typing import NamedTuple, Protocol

Key = tuple[int, int]


class Pages(Protocol):
    """What is asked of the experts of one layer."""

    layer: int

    def expert_nbytes(self, expert: int) -> int:
        """Bytes of one expert."""

    def advise(self, expert: int) -> None:
        """Start reading one expert, and return."""

    def load(self, expert: int) -> None:
        """Read one expert."""

    def drop(self, expert: int) -> None:
        """Take one expert out of memory."""


class Item(NamedTuple):
    """One expert of one layer."""

    pages: Pages
    expert: int

    @property
    def key(self) -> Key:
        """The same experts of a copy of the model are the same bytes."""
        return self.pages.layer, self.expert

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.pages.expert_nbytes(self.expert)


class ExpertShelf:
    """Experts in memory by layer, least recently used first, and what threads have announced. Not locked.

    Which one goes: the least recently used of the layer that holds the most bytes. Layers take turns, so that one row
    for all of them would give up each layer's experts just before the next token comes to them.
    """

    def __init__(self) -> None:
        # layer -> expert -> the expert, and whether it has been read.
        self._held: defaultdict[int, OrderedDict[int, tuple[Item, bool]]] = defaultdict(OrderedDict)
        self._bytes: Counter[int] = Counter()
        # thread -> what it announced and has not used up; how many threads need an expert.
        self.announced: dict[int, OrderedDict[Key, Item]] = {}
        self.needed: Counter[Key] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of the experts that are in memory or on their way."""
        return self._bytes.total()

    def is_held(self, item: Item) -> bool:
        """Whether it is in memory or on its way."""
        return item.expert in self._held[item.pages.layer]

    def is_ready(self, item: Item) -> bool:
        """Whether it is in memory."""
        return self._held[item.pages.layer].get(item.expert, (item, False))[1]

    def put(self, item: Item) -> None:
        """Count an expert that is on its way."""
        self._held[item.pages.layer][item.expert] = (item, False)
        self._bytes[item.pages.layer] += item.nbytes

    def mark_ready(self, item: Item) -> None:
        """It has arrived."""
        self._held[item.pages.layer][item.expert] = (item, True)

    def touch(self, item: Item) -> None:
        """It is used."""
        self._held[item.pages.layer].move_to_end(item.expert)

    def remove(self, item: Item) -> None:
        """It is given up."""
        del self._held[item.pages.layer][item.expert]
        self._bytes[item.pages.layer] -= item.nbytes

    def oldest(self) -> Item | None:
        """The expert to give up first among those that nobody needs."""
        for layer, _ in self._bytes.most_common():
            for item, is_ready in self._held[layer].values():
                if is_ready and item.key not in self.needed:
                    return item
        return None

    def needed_last(self) -> Item | None:
        """The expert in memory that is needed last."""
        for mine in self.announced.values():
            for item in reversed(mine.values()):
                if self.is_ready(item):
                    return item
        return None

    def announce(self, mine: OrderedDict[Key, Item], item: Item) -> None:
        """A thread needs an expert after those it needs already."""
        mine[item.key] = item
        self.needed[item.key] += 1

    def release(self, mine: OrderedDict[Key, Item], until: Key | None = None) -> None:
        """Take what a thread announced for used up, as far as the expert `until`."""
        while mine and next(iter(mine)) != until:
            decrease(self.needed, mine.popitem(last=False)[0])

    def forget_ended_threads(self) -> None:
        """Release what threads needed that are no more."""
        if len(self.announced) > 1:
            alive = {thread.ident for thread in threading.enumerate()}
            for ident in self.announced.keys() - alive:
                self.release(self.announced.pop(ident))


def decrease(counter: Counter[Key], key: Key) -> None:
    """Count down, to no entry at zero."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]

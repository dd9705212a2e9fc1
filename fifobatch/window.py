"""How much may be under way, and how far the order of delivery may drift from the plan.

Pure counting: no lock, no process, no clock. Used by one thread at a time, the one that iterates (`completion`
holds a lock around it); only `Window.may_go` is asked by others.
"""

import heapq
import re
from collections import deque
from operator import index
from typing import Any, Generic, TypeVar

from fifobatch.errors import FifobatchError

__all__ = ["Window"]

Item = TypeVar("Item")


class Window(Generic[Item]):
    """Counts the batches submitted and not yet yielded, and says which one to deliver next.

    Chunks are numbered from 0. Those of a plan have no gaps and are submitted in that order; those of a stream's lanes
    end each at a number of its own (`end`), and with ``max_skew`` they too are submitted in order. So the lowest
    undelivered one is always under way or here: whatever is held back waits for a batch that will come, and nothing
    deadlocks.

    Example:
        >>> window = Window(3, max_skew=1)
        >>> [window.submit() for _ in range(3)]
        [0, 1, 2]
        >>> window.complete(2, "c"), window.ready  # two places too early
        (None, False)
        >>> window.complete(1, "b"), window.deliver()
        (None, (1, 'b'))
        >>> window.complete(0, "a"), window.deliver(), window.deliver()
        (None, (0, 'a'), (2, 'c'))

    Args:
        size: Batches that may be under way at once, at least 1.
        max_skew: How many places a batch may overtake an earlier one. None: completion order; 0: plan order.
        max_bytes: Bytes that may be under way at once, or a text such as ``"512MiB"``. Those still loading are taken to
            be as large as the largest so far. One batch is always allowed, and only one while no size is known.

    Raises:
        TypeError: ``size`` or ``max_skew`` is not an int, or ``max_bytes`` neither an int nor a text.
        ValueError: ``size`` or ``max_bytes`` is below 1, or ``max_skew`` below 0, or ``max_bytes`` says no size.
    """

    def __init__(self, size: int, max_skew: int | None = None, max_bytes: int | str | None = None) -> None:
        self.size = check_count("window", size, 1)
        self.max_skew = None if max_skew is None else check_count("max_skew", max_skew, 0)
        self.max_bytes = None if max_bytes is None else check_bytes("max_bytes", max_bytes)
        self.submitted = 0
        self.delivered = 0
        self._void = 0  # submitted, but there was no such batch
        self._loading: set[int] = set()
        self._low = 0  # every chunk below this number was delivered, or will not come
        self._top = 0  # every chunk submitted is below this number
        self._above: set[int] = set()  # the numbers delivered at or above _low
        self._ends: dict[int, tuple[int, int]] = {}  # by lane: the number that is the first not to come, and the step
        self._ready: deque[tuple[int, Item]] = deque()  # may be delivered, in order of completion
        self._held: list[tuple[int, Item]] = []  # a heap: completed, but too early
        self._completed: set[int] = set()  # and not yet delivered
        self._bytes: dict[int, int] = {}  # of these, where known
        self._largest: int | None = None

    @property
    def under_way(self) -> int:
        """Batches submitted and not yet delivered; those held back count."""
        return self.submitted - self.delivered - self._void

    @property
    def full(self) -> bool:
        """Whether nothing more may be submitted now."""
        return self.under_way >= self.size or (self.under_way > 0 and self._too_large)

    @property
    def _too_large(self) -> bool:
        """Whether one more batch might be too many bytes."""
        if self.max_bytes is None:
            return False
        if self._largest is None:
            return True
        loading = self.under_way - len(self._bytes)
        return sum(self._bytes.values()) + (loading + 1) * self._largest > self.max_bytes

    @property
    def ready(self) -> bool:
        """Whether `deliver` has something to deliver."""
        return bool(self._ready)

    @property
    def next(self) -> Item:
        """What `deliver` would take."""
        return self._ready[0][1]

    def submit(self, number: int | None = None) -> int:
        """Count one more batch as under way, and return its number: the next one if it is not given."""
        assert not self.full, "submitted more than the window holds"
        number = self.submitted if number is None else number
        self.submitted += 1
        self._loading.add(number)
        self._top = max(self._top, number + 1)
        if self._ends:
            self._advance()  # over the numbers of lanes that have ended, which nobody submits any more
        return number

    def complete(self, number: int, item: Item, size: int | None = 0) -> None:
        """Note that batch ``number`` has arrived, as ``item`` of ``size`` bytes; None: it counts as one still loading.

        Raises:
            FifobatchError: It had arrived before, or was never submitted.
        """
        if number not in self._loading:
            raise FifobatchError(f"internal error, please report it: batch {number} came twice, or unasked ({self!r})")
        self._loading.remove(number)
        self._completed.add(number)
        if size is not None:
            self._bytes[number] = size
            self._largest = max(size, self._largest or 0)
        if self.may_go(number):
            self._ready.append((number, item))
        else:
            heapq.heappush(self._held, (number, item))

    def cancel(self, number: int) -> None:
        """Note that there is no batch ``number``, which was submitted: it is no longer under way."""
        self._loading.remove(number)
        self._void += 1

    def end(self, number: int, step: int) -> None:
        """Note that a lane ends: neither batch ``number`` nor any that follows it in steps of ``step`` will come."""
        before, _ = self._ends.get(number % step, (number, step))
        self._ends[number % step] = min(number, before), step
        self._advance()

    def deliver(self) -> tuple[int, Item]:
        """Take the next batch to deliver: the first completed of those that ``max_skew`` lets go.

        Those that it held back follow in plan order, as soon as they may go.

        Raises:
            IndexError: Nothing is `ready`.
        """
        number, item = self._ready.popleft()
        self.delivered += 1
        self._completed.remove(number)
        self._bytes.pop(number, None)
        if self.max_skew is not None:
            self._above.add(number)
            self._advance()
        return number, item

    def _advance(self) -> None:
        while self._low < self._top and (self._low in self._above or self._will_not_come(self._low)):
            self._above.discard(self._low)
            self._low += 1
        while self._held and self.may_go(self._held[0][0]):
            self._ready.append(heapq.heappop(self._held))

    def _will_not_come(self, number: int) -> bool:
        return any(number >= first and number % step == first % step for first, step in self._ends.values())

    def check(self) -> None:
        """Check the ledger at the end: every batch submitted was delivered, once.

        Raises:
            FifobatchError: It was not.
        """
        if self.under_way or self._loading or self._completed:
            raise FifobatchError(f"internal error, please report it: not every batch was delivered ({self!r})")

    def __repr__(self) -> str:
        return (
            f"<Window: {self.submitted} submitted, {self.delivered} delivered; loading {sorted(self._loading)}, "
            f"loaded {sorted(self._completed)}>"
        )

    def may_go(self, number: int) -> bool:
        """Whether batch ``number`` may be delivered once it is complete. Any thread may ask: a yes holds for ever."""
        # When q is delivered, every batch planned at q - max_skew - 1 or before has been delivered. _low only grows.
        return self.max_skew is None or number - self._low <= self.max_skew


def check_count(name: str, value: Any, least: int) -> int:
    """Return ``value``, an integer (NumPy's are fine) of at least ``least``.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is below ``least``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give an int of at least {least}") from None
    if number < least:
        raise ValueError(f"{name}={number} is below {least}; give an int of at least {least}")
    return number


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def check_bytes(name: str, value: int | str) -> int:
    """Return ``value`` in bytes: a number, or a text such as ``"512MiB"``, ``"1.5 GB"``; units as in IEC 80000-13.

    Example:
        >>> check_bytes("max_bytes", "512MiB"), check_bytes("max_bytes", "1.5 GB")
        (536870912, 1500000000)

    Raises:
        TypeError: It is neither an integer nor a text.
        ValueError: It is below 1, or the text says no size.
    """
    if not isinstance(value, str):
        return check_count(name, value, 1)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", value.upper())
    if match is None:
        raise ValueError(f'{name}={value!r} is no size; give bytes, or a text such as "512MiB" or "2GB"')
    return check_count(name, int(float(match[1]) * UNITS[match[2]]), 1)

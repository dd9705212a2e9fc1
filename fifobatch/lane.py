"""One lane of a stream: an iterator of an ``IterableDataset``, read batch by batch.

Runs where the lane is loaded: in a worker process that has this lane only, or, without workers, in the consumer's
thread. A lane can be asked for any batch again: it then starts its iterator afresh and skips what comes before. So a
lane whose process has died goes on where it was, if the stream is the same each time.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.utils.data

from fifobatch.arena import Room
from fifobatch.attempt import SETTING_UP, Again, Attempt, Later
from fifobatch.fetch import ABANDONED, Payload, collated

__all__ = ["Lane", "Share", "WatchedInfo"]


class Share(NamedTuple):
    """What a lane has read.

    Attributes:
        data: The batch; None if there are no samples.
        samples: How many are in it.
        is_last: Whether the lane is over: no batch of it follows.
        is_split: Whether the dataset has looked at its worker info, or the lane takes a share of its own.
    """

    data: Any
    samples: int
    is_last: bool
    is_split: bool


class WatchedInfo(torch.utils.data._utils.worker.WorkerInfo):
    """A lane's worker info, which notes whether anybody looks at it.

    Attributes:
        was_read: Whether somebody has.
    """

    was_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers", "seed", "dataset"):
            object.__setattr__(self, "was_read", True)
        return super().__getattribute__(name)


class Lane:
    """The iterator of one lane, in one epoch.

    Args:
        plan: Dataset and functions.
        number: The lane's number.
        seed: Seeds everything for batch ``k`` of the lane.
        split: Asked whether the dataset has looked at its worker info.
    """

    def __init__(
        self, plan: Payload, number: int, seed: Callable[[int], object], is_split: Callable[[], bool] = lambda: True
    ) -> None:
        assert plan.stream is not None
        self._plan = plan
        self._stream = plan.stream
        self._number = number
        self._seed = seed
        self._is_split = is_split
        self._source: Iterator[Any] | None = None  # what the dataset returned
        self._iterator: Iterator[Any] | None = None  # the lane's share of it
        self._next = 0  # the batch that the iterator comes to next
        self._over: int | None = None  # the batch with which the lane has ended
        self._again: int | None = None  # the batch that is to be tried again, before any that follows it
        self._sent_back: set[int] = set()  # those that came before it all the same

    def load(self, batch: int, attempt: Attempt, room: Room | None = None) -> Any:
        """Return batch ``batch`` of the lane as a `Share`; `ABANDONED` if nobody wants it any more.

        Raises:
            Again: It is to be tried again.
            Later: It comes too early: an earlier one is to be tried again.
            Located: From whatever the user's code raises. If that was the iterator, the lane is over.
        """
        if self._again is not None and batch > self._again and batch not in self._sent_back:
            self._sent_back.add(batch)  # once, so that nothing goes round for ever
            raise Later
        self._again = None
        try:
            return self._load(batch, attempt, room)
        except Again:
            self.close()
            self._over, self._again = None, batch
            self._sent_back.clear()
            raise

    def _load(self, batch: int, attempt: Attempt, room: Room | None) -> Any:
        if self._over is not None and batch > self._over:
            return self._share(None, 0, True)
        if self._iterator is None or self._next > batch:
            self._start(attempt)
        while self._next < batch:
            samples = self._read(attempt)
            if samples is ABANDONED:
                return ABANDONED
            if self._over is not None:
                return self._share(None, 0, True)
            attempt.restart()
        first = self._next * self.size
        samples = self._read(attempt)
        if samples is ABANDONED:
            return ABANDONED
        count = len(samples)
        if not count or (self._stream.drop_last and count < self.size):
            return self._share(None, 0, True)
        data = collated(
            self._plan,
            samples if self._plan.collates else samples[0],
            range(first, first + count),
            attempt,
            lambda: f"batch {attempt.number} (items {first} to {first + count - 1} of {self})",
            room,
        )
        return self._share(data, count, self._over is not None)

    def _share(self, data: Any, count: int, is_last: bool) -> Share:
        return Share(data, count, is_last, self._stream.stride or self._is_split())

    @property
    def size(self) -> int:
        """Samples a batch."""
        return self._stream.batch_size or 1

    def _start(self, attempt: Attempt) -> None:
        self.close()
        self._next, self._over = 0, None
        attempt.at(SETTING_UP)
        self._seed(0)
        try:
            self._source = iter(self._plan.dataset)
        except BaseException as error:  # whatever it is, it gets its place and goes on
            self._over = -1
            attempt.fail((0,), error, f"iter(dataset), {self}; this lane is over")
            return
        self._iterator = self._source
        if self._stream.stride:
            self._iterator = itertools.islice(self._source, self._number, None, self._plan.num_workers)

    def _read(self, attempt: Attempt) -> Any:
        """Return the samples of the next batch; fewer if the lane ends."""
        samples: list[Any] = []
        position = self._next * self.size
        if self._next:
            self._seed(self._next)
        while len(samples) < self.size and self._iterator is not None:
            if attempt.at(position + len(samples)):
                self.close()
                return ABANDONED
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._end()
            except BaseException as error:  # likewise
                self._end()
                where = f"item {position + len(samples)} of {self}, batch {attempt.number}; this lane is over"
                attempt.fail((len(samples),), error, where)
        self._next += 1
        return samples

    def _end(self) -> None:
        self._source = self._iterator = None
        self._over = self._next

    @property
    def is_over(self) -> bool:
        """Whether no batch of it follows."""
        return self._over is not None

    def close(self) -> None:
        """Close the iterator: a generator's ``finally`` runs now. Idempotent."""
        source, self._source, self._iterator = self._source, None, None
        close = getattr(source, "close", None)
        if close is not None:
            close()

    def __str__(self) -> str:
        return f"lane {self._number} of {self._plan.num_workers}" if self._plan.num_workers else "the stream"

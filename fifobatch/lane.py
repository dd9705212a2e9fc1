"""One lane of a stream: an iterator of an ``IterableDataset``, read batch by batch.

Runs where the lane is loaded: in a worker process that has this lane only, or, without workers, in the consumer's
thread. A lane can be asked for any batch again: it then starts its iterator afresh and skips what comes before. So a
lane whose process has died goes on where it was, if the stream is the same each time. What ``collate_fn`` has failed on
is kept, and needs no second reading.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import IterDataPipe, graph_settings
from torch.utils.data.graph import traverse_dps

from fifobatch.arena import Room
from fifobatch.attempt import SETTING_UP, Again, Attempt, Later
from fifobatch.errors import PlanError
from fifobatch.fetch import ABANDONED, Payload, collated, random_state, seed_all

__all__ = ["Lane", "Share", "WatchedInfo"]


class Share(NamedTuple):
    """What a lane has read.

    Attributes:
        data: The batch; None if there are no samples.
        indices: The positions of its samples: in the lane, or, with a stride, in the stream.
        is_last: Whether the lane is over: no batch of it follows.
        has_looked: Whether the dataset has looked at its worker info.
    """

    data: Any
    indices: range
    is_last: bool
    has_looked: bool

    @property
    def plain(self) -> tuple[Any, tuple[int, int, int], bool, bool]:
        """The same without a ``range``, which takes as long to pickle as a small batch."""
        return self.data, (self.indices.start, self.indices.stop, self.indices.step), self.is_last, self.has_looked


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

    Random numbers are seeded for each batch. With a stride, of which all lanes read the same, for each item of the
    stream instead: so they agree on which item is whose, also if the stream is shuffled.

    Args:
        plan: Dataset and functions.
        number: The lane's number.
        seed: Returns the seed of batch ``number`` of all, or of an item of the stream.
        has_looked: Asked whether the dataset has looked at its worker info.
    """

    def __init__(
        self, plan: Payload, number: int, seed: Callable[[int], int], has_looked: Callable[[], bool] = lambda: True
    ) -> None:
        assert plan.stream is not None
        self._plan = plan
        self._stream = plan.stream
        self._number = number
        self._count = max(1, plan.num_workers)
        self._seed = seed
        self._has_looked = has_looked
        self._shards = False  # whether it is a data pipe that was told to yield a share
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # the batch that the iterator comes to next
        self._items = 0  # with a stride: the item of the stream likewise
        self._over: int | None = None  # the batch with which the lane has ended
        self._again: int | None = None  # the batch that is to be tried again, before any that follows it
        self._sent_back: set[int] = set()  # those that came before it all the same
        self._failed: tuple[int, BaseException] | None = None  # the item that failed, while that is tried again
        self._kept: dict[int, tuple[list[Any], Callable[[], None]]] = {}  # samples and random state, for collate_fn

    def load(self, batch: int, attempt: Attempt, room: Room | None = None, delivered: int = 0) -> Any:
        """Return batch ``batch`` of the lane as a `Share`; `ABANDONED` if nobody wants it any more.

        Args:
            batch: Which one.
            attempt: Which try it is.
            room: Where torch's default collate_fn makes its tensors.
            delivered: How many batches the lane is known to have, from before its process died.

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
            return self._load(batch, attempt, room, delivered)
        except Again:
            if batch not in self._kept:
                self.close()
                self._over, self._again = None, batch
                self._sent_back.clear()
            raise

    def _load(self, batch: int, attempt: Attempt, room: Room | None, delivered: int) -> Any:
        if batch in self._kept:
            samples, restore = self._kept.pop(batch)
            restore()
            return self._collate(batch, samples, attempt, room)
        if self._over is not None and batch > self._over:
            return self._nothing()
        if self._iterator is None or self._next > batch:
            self._start(attempt)
        while self._next < batch:
            samples = self._read(attempt)
            if samples is ABANDONED:
                return ABANDONED
            if self._over is not None:
                self._check_end(len(samples), delivered, attempt)
                return self._nothing()
            attempt.restart()
        samples = self._read(attempt)
        if samples is ABANDONED:
            return ABANDONED
        if not samples or (self._stream.drop_last and len(samples) < self.size):
            return self._nothing()
        return self._collate(batch, samples, attempt, room)

    def _nothing(self) -> Share:
        return Share(None, range(0), True, self._has_looked() or self._shards)

    def _collate(self, batch: int, samples: list[Any], attempt: Attempt, room: Room | None) -> Share:
        first, count = batch * self.size, len(samples)
        indices = range(first, first + count)
        if self._stream.stride:
            indices = range(self._count * first + self._number, self._count * (first + count), self._count)
        # A list of our own: collate_fn may change the one that it gets before it fails.
        keeps = attempt.attempt <= attempt.policy.retries
        kept = (list(samples), random_state()) if keeps else None
        try:
            data = collated(
                self._plan,
                samples if self._plan.collates else samples[0],
                indices,
                attempt,
                lambda: f"batch {attempt.number} (items {indices[0]} to {indices[-1]} of {self._whole})",
                room,
            )
        except Again:
            if kept is not None:
                self._kept[batch] = kept
            raise
        is_last = self._over is not None and batch >= self._over
        return Share(data, indices, is_last, self._has_looked() or self._shards)

    def _check_end(self, rest: int, delivered: int, attempt: Attempt) -> None:
        """Check that the stream, which was started again, has not ended before what was delivered."""
        assert self._over is not None
        found = self._over + (rest == self.size or (rest > 0 and not self._stream.drop_last))
        if found < delivered:
            items = self._over * self.size + rest
            error = PlanError(
                f"the stream was started again, and has ended after {items} items, though {delivered} batches of "
                f"{self.size} had come of it: what was left is lost. Let iter(dataset) yield the same each time"
            )
            attempt.fail((items,), error, f"{self}, batch {attempt.number}; this lane is over")

    @property
    def size(self) -> int:
        """Samples a batch."""
        return self._stream.batch_size or 1

    def _start(self, attempt: Attempt) -> None:
        self.close()
        self._next, self._items, self._over = 0, 0, None
        attempt.at(SETTING_UP)
        seed_all(self._seed(0 if self._stream.stride else self._number))
        try:
            if isinstance(self._plan.dataset, IterDataPipe):
                self._set_pipe(self._plan.dataset)
            self._iterator = iter(self._plan.dataset)
        except BaseException as error:  # whatever it is, it gets its place and goes on
            self._over = -1
            attempt.fail((0,), error, f"iter(dataset), {self}; this lane is over")

    def _set_pipe(self, pipe: Any) -> None:
        """Do to a data pipe what torch's loader does to it in a worker."""
        graph_settings.apply_random_seed(pipe, torch.Generator().manual_seed(self._seed(0)))
        if self._plan.num_workers and not self._stream.stride:
            graph_settings.apply_sharding(pipe, self._count, self._number)
            pipes = graph_settings.get_all_graph_pipes(traverse_dps(pipe))
            self._shards = any(hasattr(part, "apply_sharding") for part in pipes)

    def _read(self, attempt: Attempt) -> Any:
        """Return the samples of the next batch; fewer if the lane ends."""
        samples: list[Any] = []
        position = self._next * self.size
        if self._next and not self._stream.stride:
            seed_all(self._seed(self._next * self._count + self._number))
        while len(samples) < self.size and self._iterator is not None:
            is_own = not self._stream.stride or self._items % self._count == self._number
            item = self._items if self._stream.stride else position + len(samples)
            if attempt.at(item):
                self.close()
                return ABANDONED
            if self._stream.stride:
                seed_all(self._seed(item))
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._end()
                if self._failed is not None:
                    (failed, error), self._failed = self._failed, None
                    where = f"item {failed} of {self._whole}, batch {attempt.number}; this lane is over: started again"
                    self._fail(failed, error, f"{where}, it has ended before item {item}", attempt)
            except BaseException as error:  # likewise
                self._end()
                where = f"item {item} of {self._whole}, batch {attempt.number}; this lane is over"
                self._fail(item, error, where, attempt)
            else:
                self._items += 1
                if is_own:
                    samples.append(sample)
                if self._failed is not None and item >= self._failed[0]:
                    self._failed = None
        self._next += 1
        return samples

    def _fail(self, item: int, error: BaseException, where: str, attempt: Attempt) -> None:
        try:
            attempt.fail((item,), error, where)
        except Again:
            self._failed = item, error
            raise

    def _end(self) -> None:
        self._iterator = None
        self._over = self._next

    @property
    def is_over(self) -> bool:
        """Whether no batch of it follows."""
        return self._over is not None

    def close(self) -> None:
        """Close the iterator: a generator's ``finally`` runs now. Idempotent."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if close is not None:
            close()

    @property
    def _whole(self) -> str:
        """What items are counted in."""
        return f"the stream, read by {self}" if self._stream.stride and self._plan.num_workers else str(self)

    def __str__(self) -> str:
        return f"lane {self._number} of {self._plan.num_workers}" if self._plan.num_workers else "the stream"

"""What to load: a dataset and its samplers become a lazy stream of chunks.

Runs in the parent process, in the thread that iterates. Pure: no processes, no tensors made; an infinite sampler is
read one chunk at a time, and a sequential plan over 10**9 samples costs nothing to begin.
"""

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper

from fifobatch.errors import PlanError, raisable

__all__ = ["Batch", "BatchPlan", "Chunk", "Failure", "Items", "Passing", "StreamChunk"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The promise of one batch.

    Attributes:
        number: Position in the plan, from 0.
        indices: What the sampler yielded, untouched: a list of indices, or a single one where ``batch_size=None``.
        seed: 64-bit seed for ``random``, NumPy and torch while this chunk is loaded.
        seeds: Instead, if they are given: one for each index, and one for ``collate_fn``.
    """

    number: int
    indices: Any
    seed: int
    seeds: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)

    @property
    def sent(self) -> Any:
        """What whoever loads it is sent of it."""
        return self.indices


@dataclass(frozen=True, slots=True)
class Items:
    """What is sent instead of indices where the samples were read already.

    Attributes:
        positions: Theirs in the stream.
        samples: What was read: a list, or a single sample where ``batch_size=None``.
    """

    positions: range
    samples: Any

    def __str__(self) -> str:
        first, last = self.positions[0], self.positions[-1]
        return f"item {first} of the stream" if first == last else f"items {first} to {last} of the stream"


@dataclass(frozen=True, slots=True)
class StreamChunk(Chunk):
    """A chunk of an ``IterableDataset`` that was read where the plan is: its ``indices`` are positions in the stream.

    Attributes:
        items: What was read: a list, or a single item where ``batch_size=None``.
    """

    items: Any

    @property
    def sent(self) -> Items:
        """What whoever loads it is sent of it."""
        first, count = (self.indices[0], len(self.indices)) if isinstance(self.indices, list) else (self.indices, 1)
        return Items(range(first, first + count), self.items)


class Passing:
    """The dataset of such chunks, in workers: nothing is read of it there."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[T_co]):
    """A loaded chunk.

    Attributes:
        number: Position in the plan, from 0.
        indices: The indices that were loaded, so that predictions can be written back where they belong.
        data: What ``collate_fn`` returned.
    """

    number: int
    indices: Any
    data: T_co


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that was left out, as ``on_error="skip"`` asks.

    Attributes:
        index: The sample's index.
        chunk: The number of the chunk that it belonged to.
        error: What went wrong; its notes say where.
        attempts: How often its chunk was tried.
    """

    index: Any
    chunk: int
    error: Exception
    attempts: int

    def __repr__(self) -> str:
        try:
            error = repr(self.error)
        except Exception as inner:  # the user's __repr__, of one entry of a list that is printed
            error = f"<{type(self.error).__name__}, and its repr raises {type(inner).__name__}>"
        return f"Failure(index={self.index!r}, chunk={self.chunk}, error={error}, attempts={self.attempts})"


def chunk_seed(seed: int, epoch: int, number: int) -> int:
    """Return the 64-bit seed of chunk ``number``: a hash, so that neighbouring chunks have unrelated seeds.

    Source: BLAKE2b (RFC 7693); unlike ``numpy.random.SeedSequence`` it needs no NumPy and takes 1 us.
    """
    words = struct.pack("<QQq", seed % 2**64, epoch % 2**64, number)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


class BatchPlan(Iterable[Chunk]):
    """Turn a dataset into chunks of indices, lazily.

    Iterating twice gives the same chunks, as long as the samplers passed in do.

    Example:
        >>> plan = BatchPlan(range(5), batch_size=2)
        >>> [chunk.indices for chunk in plan]
        [[0, 1], [2, 3], [4]]
        >>> len(plan)
        3
        >>> shuffled = BatchPlan(range(5), batch_size=2, shuffle=True, seed=1)
        >>> [chunk.indices for chunk in shuffled] == [chunk.indices for chunk in shuffled]
        True

    Args:
        dataset: A map-style dataset: anything with ``__getitem__``, and ``__len__`` where no sampler is given. Or an
            ``IterableDataset``: then ``iter`` reads its samples, in this process, and its chunks carry them.
        batch_size: Samples a chunk; None loads single samples, uncollated.
        shuffle: Draw the indices in random order, from ``seed`` and ``epoch``.
        sampler: Iterable of indices, instead of ``shuffle``.
        batch_sampler: Iterable of lists of indices, instead of all the four before.
        drop_last: Leave out the last chunk if it is not full.
        collate_fn: Makes a batch of a list of samples; torch's ``default_collate`` if None.
        seed: Base of every chunk's seed, and of ``shuffle``.
        epoch: Mixed into every chunk's seed, and into ``shuffle``.

    Raises:
        PlanError: ``seed`` or ``epoch`` is no int.
        ValueError: A combination of arguments that torch's ``DataLoader`` refuses, in its words.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        for name, value in (("seed", seed), ("epoch", epoch)):
            if not isinstance(value, int):
                raise PlanError(f"{name}={value!r} is a {type(value).__name__}; give an int")
        self._shuffles = (batch_size, drop_last) if shuffle else None
        # torch checks the arguments and builds the samplers; nothing else of this loader is used.
        torch_loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
        )
        self._fill(torch_loader, seed, epoch)

    @classmethod
    def of_loader(cls, loader: DataLoader[Any], seed: int, epoch: int) -> "BatchPlan":
        """Return the plan of one epoch of ``loader``, over the samplers that torch built for it."""
        plan = cls.__new__(cls)
        plan._shuffles = None  # torch's own sampler does
        plan._fill(loader, seed, epoch)
        return plan

    def _fill(self, loader: DataLoader[Any], seed: int, epoch: int) -> None:
        self.dataset = loader.dataset
        if isinstance(loader.dataset, _DataPipeSerializationWrapper):  # torch pickles data pipes in a way of its own
            self.dataset = loader.dataset._datapipe  # type: ignore[attr-defined]
        self.collate_fn: Callable[[Any], Any] = loader.collate_fn
        self.collates = loader.batch_sampler is not None  # False: single samples, as ``batch_size=None`` asks
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self.index_sampler: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks, one at a time, as the sampler (or the stream) yields their indices."""
        if self.is_stream:
            return self._read()
        index_sampler = self.index_sampler
        if self._shuffles is not None:
            index_sampler = self._shuffled(*self._shuffles)
        return (
            Chunk(number, _kept(indices) if self.collates else indices, chunk_seed(self.seed, self.epoch, number))
            for number, indices in enumerate(index_sampler)
        )

    def _read(self) -> Iterator[Chunk]:
        size = self.batch_size or 1
        try:
            items = iter(self.dataset)
        except Exception as error:
            error = raisable(error, "In fifobatch, iter(dataset); the stream is over.")
            raise error
        try:
            for number in itertools.count():
                read = _read_batch(items, number, size)
                if read and not (self.drop_last and len(read) < size):
                    seed, first = chunk_seed(self.seed, self.epoch, number), number * size
                    if self.collates:
                        yield StreamChunk(number, list(range(first, first + len(read))), seed, read)
                    else:
                        yield StreamChunk(number, first, seed, read[0])
                if len(read) < size:  # it has said that it is over; some streams begin again when they are asked again
                    return
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _shuffled(self, batch_size: int | None, drop_last: bool) -> Iterable[Any]:
        # A sampler an iteration, so that two at once do not draw from one generator. Chunk numbers start at 0; the
        # number before that is free for the shuffle.
        generator = torch.Generator().manual_seed(chunk_seed(self.seed, self.epoch, -1))
        sampler = RandomSampler(self.dataset, generator=generator)  # type: ignore[arg-type]  # as torch's loader
        return sampler if batch_size is None else BatchSampler(sampler, batch_size, drop_last)

    def __len__(self) -> int:
        """Return the number of chunks, as the sampler (or the stream) states it.

        Raises:
            TypeError: The sampler has no length.
        """
        if self.is_stream:
            samples, size = len(self.dataset), self.batch_size or 1  # type: ignore[arg-type]  # likewise
            return samples // size if self.drop_last else -(-samples // size)
        return len(self.index_sampler)  # type: ignore[arg-type]  # TypeError where it has none, as torch's loader


def _read_batch(items: Iterator[Any], number: int, size: int) -> list[Any]:
    """Read batch ``number`` of a stream; fewer than ``size`` items if it ends."""
    read: list[Any] = []
    try:
        while len(read) < size:
            read.append(next(items))
    except StopIteration:
        pass
    except Exception as error:
        where = f"item {number * size + len(read)} of the stream, batch {number}; the stream is over"
        error = raisable(error, f"In fifobatch, {where}.")
        raise error
    return read


def _kept(indices: Any) -> Any:
    """Return a batch's indices as they are now: a sampler may use one list again and again, or yield an iterator."""
    if isinstance(indices, torch.Tensor):
        return indices.clone()
    if isinstance(indices, (list, Set, Iterator)):
        return list(indices)
    return indices

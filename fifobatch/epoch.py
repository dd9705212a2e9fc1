"""One epoch of a `FifoLoader`. Runs in the consumer's thread.

`LoaderIterator` is what ``iter(loader)`` returns, around what does the work: `Completions` where workers load, or
`InProcess`, which loads here.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from fifobatch.completion import Completions
from fifobatch.errors import ClosedError, SampleError
from fifobatch.executor import BatchExecutor
from fifobatch.fetch import Located, Payload, fetch, seeds
from fifobatch.plan import Batch, BatchPlan, Chunk
from fifobatch.progress import Progress
from fifobatch.trace import Record, Span, Statistics, Trace

__all__ = ["InProcess", "LoaderIterator", "pinning"]


def pinning() -> Callable[[Batch[Any]], Batch[Any]]:
    """Return what copies a batch into pinned memory, of this thread's device also where another thread calls it."""
    device = torch.accelerator.current_device_index()

    def pin(batch: Batch[Any]) -> Batch[Any]:
        torch.accelerator.set_device_index(device)
        return dataclasses.replace(batch, data=torch_pin_memory(batch.data))  # type: ignore[no-untyped-call]

    return pin


class LoaderIterator(Iterator[Any]):
    """One epoch of a `FifoLoader`: moves the progress bar, around what does the work.

    Args:
        batches: What does the work.
        length: Batches that the loader expects; None if unknown.
        progress: The bar to move.
        executor: Whose workers end with this iterator, if any do.
    """

    def __init__(
        self,
        batches: "Completions | InProcess",
        length: int | None,
        progress: Progress | None,
        executor: BatchExecutor | None,
    ) -> None:
        self._batches = batches
        self._length = length
        self._progress = progress
        self._executor = executor

    def __next__(self) -> Any:
        """Return the next batch to complete.

        Raises:
            ChunkTimeoutError: None completed within the loader's ``timeout``; the iterator can be used on.
            ClosedError: The iterator was closed.
            Exception: What the user's code raised for this batch, with a note that names the sample; the other batches
                still come.
            StopIteration: Every batch was yielded.
        """
        try:
            batch = next(self._batches)
            if self._progress is not None:
                self._progress.update(self._batches.under_way, self._batches.trace.seconds_waited)
            return batch
        except StopIteration:
            self._end()
            raise
        except BaseException:
            if self._progress is not None:
                self._progress.close()
            raise
        finally:
            del self  # an error's traceback holds this frame, and would keep the iterator and its workers

    def __len__(self) -> int:
        """Return how many batches the loader expects.

        Raises:
            TypeError: The sampler has no length.
        """
        if self._length is None:
            raise TypeError("the loader's sampler has no length")
        return self._length

    def statistics(self) -> Statistics:
        """Return where this epoch's time went so far."""
        return self._batches.trace.statistics()

    def timeline(self) -> tuple[Span, ...]:
        """Return when each chunk was submitted, started, loaded and delivered: the last 4,096, a span each."""
        return self._batches.trace.timeline()

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._executor is not None:
            self._executor.close()

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        self._batches.close()
        self._end()


class InProcess(Iterator[Any]):
    """Load each chunk when it is asked for, in this process, with the contents that workers would give.

    ``random``, NumPy and torch are left as they were found.

    Args:
        plan: What to load.
        select: What to yield of a batch.
    """

    under_way = 0

    def __init__(self, plan: BatchPlan, select: Callable[[Batch[Any]], Any]) -> None:
        self.trace = Trace(Trace())
        self._select = select
        chunks = iter(plan)
        # Begin now: what the sampler draws belongs to the moment of iter().
        self._chunks = itertools.chain(list(itertools.islice(chunks, 1)), chunks)
        self._payload = Payload(plan.dataset, plan.collate_fn, plan.collates, None, 0)
        self._closed = False
        self.trace.started()

    def __next__(self) -> Any:
        """Load the next chunk.

        Raises:
            ClosedError: The iterator was closed.
            Exception: What the user's code raised, with a note that names the sample.
        """
        if self._closed:
            raise ClosedError("this iterator was closed; start a new one with iter(loader)")
        requested = time.perf_counter()
        try:
            chunk = next(self._chunks)
        except BaseException:
            self.trace.wait(requested)
            self.trace.end()
            raise
        record = Record(chunk.number)
        self.trace.submit(record)
        try:
            batch = self._select(self._load(chunk, record))
        except BaseException as error:
            self.trace.hand_over(record, type(error).__name__)
            raise
        else:
            self.trace.hand_over(record)
            return batch
        finally:
            self.trace.deliver(record, requested)

    def _load(self, chunk: Chunk, record: Record) -> Batch[Any]:
        started = time.perf_counter()
        try:
            with seeds(chunk.seed):
                return Batch(chunk.number, chunk.indices, fetch(self._payload, chunk.indices, chunk.number))
        except Located as wrapped:
            error, where = wrapped.error, f"In fifobatch, {wrapped}."
        finally:
            self.trace.arrive(record, None, started, time.perf_counter(), 0)
        if isinstance(error, (StopIteration, StopAsyncIteration)):  # would end the loop without a word
            raise SampleError(f"{type(error).__name__}: {error}\n{where}") from error
        error.add_note(where)
        raise error

    def close(self) -> None:
        """Load no more. Idempotent."""
        self._closed = True
        self.trace.end()

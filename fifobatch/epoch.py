"""One epoch of a `FifoLoader`. Runs in the consumer's thread.

`LoaderIterator` is what ``iter(loader)`` returns, around what does the work: `Completions` where workers load, or
`InProcess`, which loads here.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fifobatch.asynchronous import AsyncBatches
from fifobatch.attempt import NO_POLICY, Again, Attempt, Located, Policy, brief
from fifobatch.completion import Completions
from fifobatch.errors import ClosedError, SampleError
from fifobatch.executor import BatchExecutor
from fifobatch.fetch import NOTHING, Payload, fetch, seeds
from fifobatch.measures import Span, Statistics
from fifobatch.plan import Batch, BatchPlan, Chunk, Failure
from fifobatch.progress import Progress
from fifobatch.trace import Record, Trace

__all__ = ["InProcess", "LoaderIterator"]


class LoaderIterator(Iterator[Any]):
    """One epoch of a `FifoLoader`: moves the progress bar, around what does the work.

    Args:
        batches: What does the work.
        length: Batches that the loader expects; None if unknown.
        progress: The bar to move.
        executor: Whose workers end with this iterator, if any do.

    Attributes:
        quiet: Whether somebody else calls `warn_of_failures` at the end.
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
        self._warned = False
        self.quiet = False

    def __aiter__(self) -> AsyncBatches:
        """Iterate in an event loop, which is not blocked. A task that is cancelled meanwhile closes this."""
        return AsyncBatches(lambda: self)

    def __next__(self) -> Any:
        """Return the next batch to complete.

        Raises:
            ChunkTimeoutError: A chunk ran for longer than the loader's ``timeout``; the other batches still come.
            ClosedError: The iterator was closed.
            Exception: What the user's code raised for this batch, with a note that names the sample; the other batches
                still come.
            WorkerDiedError: A chunk kills its worker process again and again; the other batches still come.
            StopIteration: Every batch was yielded.
        """
        try:
            batch = next(self._batches)
            if self._progress is not None:
                self._progress.update(self._batches.under_way, self._batches.trace.seconds_waited)
            return batch
        except StopIteration:
            if self._progress is not None:
                self._progress.close()
            if self._executor is not None:
                self._executor.shutdown(wait=False)  # not close(): targets handed out may still be loading
            if not self.quiet:
                self.warn_of_failures()
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

    @property
    def failures(self) -> list[Failure]:
        """The samples left out of this epoch's batches so far, as ``on_error="skip"`` asks."""
        return list(self._batches.trace.failures)

    def statistics(self) -> Statistics:
        """Return where this epoch's time went so far."""
        return self._batches.trace.statistics()

    def timeline(self) -> tuple[Span, ...]:
        """Return when each chunk was submitted, started, loaded and delivered: the last 4,096, a span each."""
        return self._batches.trace.timeline()

    def warn_of_failures(self) -> None:
        """Warn of the samples that were left out, at the line of the caller's caller; once."""
        failures = self._batches.trace.failures
        if failures and not self._warned:
            self._warned = True
            first = failures[0]
            error = f"{type(first.error).__name__}: {first.error}"
            warnings.warn(
                f"left out of this epoch: {len(failures)} {'sample' if len(failures) == 1 else 'samples'} that failed; "
                f"see loader.failures. The first, dataset[{brief(first.index)}]: {error[:200]}",
                stacklevel=3,
            )

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        self._batches.close()
        if self._progress is not None:
            self._progress.close()
        if self._executor is not None:
            self._executor.close()


class InProcess(Iterator[Any]):
    """Load each chunk when it is asked for, in this process, with the contents that workers would give.

    ``random``, NumPy and torch are left as they were found.

    Args:
        plan: What to load.
        select: What to yield of a batch.
        policy: What becomes of chunks that fail.
    """

    under_way = 0

    def __init__(self, plan: BatchPlan, select: Callable[[Batch[Any]], Any], policy: Policy = NO_POLICY) -> None:
        self.trace = Trace(Trace())
        self._select = select
        chunks = iter(plan)
        # Begin now: what the sampler draws belongs to the moment of iter().
        self._chunks = itertools.chain(list(itertools.islice(chunks, 1)), chunks)
        self._payload = Payload(plan.dataset, plan.collate_fn, plan.collates, None, 0, policy)
        self._closed = False
        self.left_out: list[int] = []  # positions, of the chunk that was loaded last
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
        while True:
            try:
                chunk = next(self._chunks)
            except BaseException:
                self.trace.wait(requested)
                self.trace.end()
                raise
            record = Record(chunk.number)
            self.trace.submit(record)
            try:
                loaded = self._load(chunk, record)
                batch = None if loaded is None else self._select(loaded)
            except BaseException as error:
                self.trace.hand_over(record, type(error).__name__)
                raise
            else:
                failed = type(self.trace.failures[-1].error).__name__ if loaded is None else None
                self.trace.hand_over(record, failed)
                if loaded is not None:
                    return batch
            finally:
                self.trace.deliver(record, requested)

    def _load(self, chunk: Chunk, record: Record) -> Batch[Any] | None:
        """Return the chunk's batch; None if every sample of it was left out."""
        for number in itertools.count(1):
            started = time.perf_counter()
            attempt = Attempt(chunk.number, self._payload.policy, number)
            try:
                with seeds(chunk.seed):
                    data = fetch(self._payload, chunk.indices, attempt)
            except Again:
                self.trace.again(died=False)
            except Located as located:
                raise _raisable(located) from located.error.__cause__
            else:
                kept = self._note_failures(chunk, attempt)
                return None if data is NOTHING else Batch(chunk.number, kept, data)
            finally:
                self.trace.arrive(record, None, started, time.perf_counter(), 0)
        raise AssertionError

    def _note_failures(self, chunk: Chunk, attempt: Attempt) -> Any:
        """Note what an attempt has left out, and return the indices of the rest."""
        self.left_out = []
        if not attempt.failed:
            return chunk.indices
        indices = list(chunk.indices) if self._payload.collates else [chunk.indices]
        errors: dict[int, Exception] = {}
        for positions, located in attempt.failed:
            error = _raisable(located)
            errors |= {
                position: error
                for position in (range(len(indices)) if positions is None else positions)
                if position not in errors
            }
        self.trace.failures += [
            Failure(indices[position], chunk.number, errors[position], attempt.attempt) for position in sorted(errors)
        ]
        self.left_out = sorted(errors)
        kept = [index for position, index in enumerate(indices) if position not in errors]
        return kept if self._payload.collates else chunk.indices

    def close(self) -> None:
        """Load no more. Idempotent."""
        self._closed = True
        self.trace.end()


def _raisable(located: Located) -> Any:
    """Return what the user's code raised, with a note that says where; in another class if it would end a loop."""
    error, where = located.error, f"In fifobatch, {located}."
    if isinstance(error, (StopIteration, StopAsyncIteration)):  # would end the loop without a word
        failure = SampleError(f"{type(error).__name__}: {error}\n{where}")
        failure.__cause__ = error
        return failure
    error.add_note(where)
    return error

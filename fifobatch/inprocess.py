"""An epoch without workers: each chunk is loaded when it is asked for. Runs in the consumer's thread."""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from fifobatch.attempt import NO_POLICY, Again, Attempt, Located, Policy, brief
from fifobatch.errors import ClosedError, raisable
from fifobatch.fetch import NOTHING, Payload, StreamOptions, fetch, seeds
from fifobatch.lane import Lane
from fifobatch.plan import Batch, BatchPlan, Chunk, Failure, chunk_seed
from fifobatch.trace import Record, Trace

__all__ = ["InProcess"]

VOID = object()  # instead of a batch: the stream was over


class InProcess(Iterator[Any]):
    """Load each chunk when it is asked for, in this process, with the contents that workers would give.

    ``random``, NumPy and torch are left as they were found.

    Args:
        plan: What to load.
        select: What to yield of a batch.
        policy: What becomes of chunks that fail.
        stride: Whether a stream is seeded item by item, as the lanes of a stride are.
    """

    under_way = 0

    def __init__(
        self,
        plan: BatchPlan,
        select: Callable[[Batch[Any]], Any],
        policy: Policy = NO_POLICY,
        stride: bool = False,
    ) -> None:
        self.trace = Trace(Trace())
        self._select = select
        stream = StreamOptions(plan.batch_size, plan.drop_last, stride) if plan.is_stream else None
        self._payload = Payload(plan.dataset, plan.collate_fn, plan.collates, None, 0, policy, stream)

        def seed(number: int) -> int:
            return chunk_seed(plan.seed, plan.epoch, number)

        self._lane = Lane(self._payload, 0, seed) if plan.is_stream else None
        chunks = (Chunk(number, None, seed(number)) for number in itertools.count()) if plan.is_stream else iter(plan)
        # Begin now: what the sampler draws belongs to the moment of iter().
        self._chunks: Iterator[Chunk] = itertools.chain(list(itertools.islice(chunks, 1)), chunks)
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
            loaded: Any = None
            try:
                loaded = self._load(chunk, record)
                batch = self._select(loaded) if isinstance(loaded, Batch) else None
            except BaseException as error:
                self.trace.hand_over(record, type(error).__name__)
                raise
            else:
                if loaded is VOID:
                    self.trace.void(record)
                    continue
                self.trace.hand_over(record, None if loaded else type(self.trace.failures[-1].error).__name__)
                if loaded:
                    return batch
            finally:
                if loaded is not VOID:
                    self.trace.deliver(record, requested)

    def _load(self, chunk: Chunk, record: Record) -> Any:
        """Return the chunk's batch; None if every sample of it was left out, `VOID` if there is none."""
        for number in itertools.count(1):
            started = time.perf_counter()
            attempt = Attempt(chunk.number, self._payload.policy, number, seeds=chunk.seeds, seed=chunk.seed)
            try:
                with seeds(chunk.seed):
                    if self._lane is not None:
                        return self._of_stream(self._lane, chunk, attempt)
                    data = fetch(self._payload, chunk.indices, attempt)
            except Again:
                self.trace.again(died=False)
            except Located as located:
                if self._lane is not None and self._lane.is_over:
                    self._chunks = iter(())
                raise _raisable(located) from located.error.__cause__
            else:
                indices = list(chunk.indices) if self._payload.collates else [chunk.indices]
                kept = self._note_failures(chunk, attempt, indices)
                batch = Batch(chunk.number, kept if self._payload.collates else chunk.indices, data)
                return None if data is NOTHING else batch
            finally:
                self.trace.arrive(record, None, started, time.perf_counter(), 0)
        raise AssertionError

    def _of_stream(self, lane: Lane, chunk: Chunk, attempt: Attempt) -> Any:
        share = lane.load(chunk.number, attempt)
        if share.is_last:
            self._chunks = iter(())
        for items, located in attempt.failed:
            error = _raisable(located)
            self.trace.failures += [
                Failure(item, chunk.number, error, attempt.attempt)
                for item in (share.indices if items is None else items)
            ]
            if items is not None:
                text = f"the IterableDataset has raised {brief(error)}: what follows is left out of this epoch, too"
                warnings.warn(text, stacklevel=5)
        if not share.indices or share.data is NOTHING:
            return None if attempt.failed else VOID
        return Batch(chunk.number, list(share.indices) if self._payload.collates else share.indices[0], share.data)

    def _note_failures(self, chunk: Chunk, attempt: Attempt, indices: list[Any]) -> list[Any]:
        """Note what an attempt has left out, and return the indices of the rest."""
        self.left_out = []
        if not attempt.failed:
            return indices
        errors: dict[int, Exception] = {}
        for positions, located in attempt.failed:
            error = _raisable(located)
            for position in range(len(indices)) if positions is None else positions:
                errors.setdefault(position, error)
        self.trace.failures += [
            Failure(indices[position], chunk.number, errors[position], attempt.attempt) for position in sorted(errors)
        ]
        self.left_out = sorted(errors)
        return [index for position, index in enumerate(indices) if position not in errors]

    def close(self) -> None:
        """Load no more; a stream's generator is closed. Idempotent."""
        self._closed = True
        if self._lane is not None:
            self._lane.close()
        self.trace.end()


def _raisable(located: Located) -> Any:
    """Return what the user's code raised, with a note that says where."""
    error = located.error
    return raisable(error, f"In fifobatch, {located}.") if isinstance(error, Exception) else error

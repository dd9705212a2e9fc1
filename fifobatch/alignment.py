"""How the chunks of two halves belong together; and, where there are no workers, pairs loaded here.

`Alignment` is pure; `InProcessPairs` runs in the consumer's thread.
"""

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from operator import index as as_int
from typing import Any, NamedTuple

from fifobatch.attempt import NO_POLICY, Policy, brief
from fifobatch.device import Prepare
from fifobatch.errors import ChunkTimeoutError, PlanError, WorkerDiedError
from fifobatch.inprocess import InProcess
from fifobatch.plan import Batch, BatchPlan, Chunk, Failure, chunk_seed
from fifobatch.trace import Record

__all__ = ["Alignment", "InProcessPairs", "both_failed", "say_half"]

TARGET_STREAM = -2  # of a chunk's seed


class Alignment(NamedTuple):
    """How a target's chunk follows from its input's.

    Attributes:
        collates: Whether a chunk's indices are a list.
        shares: Whether both have the same seeds, each sample its own: so whatever one draws, or does not because it is
            left out, changes nothing for the others.
        lengths: Those of inputs and targets, where target indices wrap around.
    """

    collates: bool
    shares: bool
    lengths: tuple[int, int] | None

    def halves(self, chunk: Chunk) -> tuple[Chunk, Chunk]:
        """Return the input's chunk, and the target's."""
        indices, seed = chunk.indices, chunk.seed
        if self.shares:
            count = len(list(indices)) if self.collates else 1
            seeds = (*(chunk_seed(seed, 0, position) for position in range(count)), seed)
            chunk = dataclasses.replace(chunk, seeds=seeds)
        else:
            seed = chunk_seed(seed, 0, TARGET_STREAM)
        if self.lengths is not None:
            indices = [self._wrap(index) for index in indices] if self.collates else self._wrap(indices)
        return chunk, dataclasses.replace(chunk, indices=indices, seed=seed)

    def _wrap(self, index: Any) -> int:
        assert self.lengths is not None
        inputs, targets = self.lengths
        try:
            number = as_int(index)
        except TypeError:
            raise PlanError(
                f"cycle_targets=True, but the sampler yielded {index!r}, a {type(index).__name__}: only whole numbers "
                "wrap around. Leave out cycle_targets, or give a sampler of ints"
            ) from None
        return (number + inputs if number < 0 else number) % targets

    def without(self, chunk: Chunk, left_out: Iterable[int]) -> Chunk | None:
        """Return what is left of a chunk without these positions; None if nothing is."""
        lost = set(left_out)
        rest = [index for position, index in enumerate(chunk.indices) if position not in lost] if self.collates else []
        seeds = chunk.seeds and tuple(seed for position, seed in enumerate(chunk.seeds) if position not in lost)
        return dataclasses.replace(chunk, indices=rest, seeds=seeds) if rest else None


def say_half(error: Exception, half: str, number: int | None = None) -> Exception:
    """Return ``error`` with a note that says of which half it is: of pair ``number``, or of all.

    A message of ours that names a sample says so itself: it could be a sample of either dataset.
    """
    note = f"It is of the {half}s of a PairedLoader." if number is None else f"It is the {half} of pair {number}."
    if note not in getattr(error, "__notes__", ()):  # several samples may have one error
        error.add_note(note)
        if number is not None and isinstance(error, ChunkTimeoutError | WorkerDiedError):
            error.args = (f"{half} of pair {number}: {error}",)
    return error


def both_failed(inputs: Failure, target: Failure) -> None:
    """Say of a sample that is left out that both halves of it have failed: it is one sample."""
    inputs.error.add_note(f"Its target has failed, too: {brief(target.error)}.")


class InProcessPairs(InProcess):
    """Load pairs when they are asked for, in this process: targets are done when they are handed out.

    Args:
        plan: What to load of the inputs.
        targets: What to load of the targets.
        alignment: How the targets' chunks follow from the inputs'.
        zips: Whether to yield both halves as batches.
        select: What to yield of a pair.
        policy: What becomes of chunks that fail.
        prepare: Done to the batches of either half.
    """

    def __init__(
        self,
        plan: BatchPlan,
        targets: BatchPlan,
        alignment: Alignment,
        zips: bool,
        select: Callable[[Batch[Any]], Any],
        policy: Policy = NO_POLICY,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__(plan, select, policy)
        targets.index_sampler = ()  # the chunks come from the inputs'
        self._targets = InProcess(targets, _same, policy if zips else policy._replace(skip=False))
        self._alignment = alignment
        self._zips = zips
        self._prepare = prepare or _same
        self.trace.beside = self._targets.trace

    def _load(self, chunk: Chunk, record: Record) -> Batch[Any] | None:
        if self._zips:
            return self._load_both(chunk, record)
        chunk, target_chunk = self._alignment.halves(chunk)
        batch = self._load_input(chunk, record)
        if batch is None:
            return None
        if self.left_out:
            rest = self._alignment.without(target_chunk, self.left_out)
            assert rest is not None
            target_chunk = rest
        target: Future[Any] = Future()
        try:
            loaded = self._load_target(target_chunk, record, {})
            assert loaded is not None
            target.set_result(loaded.data)
        except Exception as error:  # what the user's code raises for the target is its future's
            target.set_exception(error)
        try:
            return dataclasses.replace(batch, data=(batch.data, target))
        finally:
            del batch, target  # an error's traceback holds this frame

    def _load_both(self, chunk: Chunk, record: Record) -> Batch[Any] | None:
        rest: Chunk | None
        target_rest: Chunk | None
        rest, target_rest = self._alignment.halves(chunk)
        halves: list[Batch[Any] | None] = [None, None]
        while rest is not None and target_rest is not None:
            lost: list[set[int]] = [set(), set()]
            failed: dict[int, Failure] = {}  # inputs, by position
            if halves[0] is None:
                known = len(self.trace.failures)
                halves[0] = self._load_input(rest, record)
                failed = dict(zip(self.left_out, self.trace.failures[known:]))
                lost[0] = set(self.left_out)
            if halves[1] is None:
                halves[1] = self._load_target(target_rest, record, failed)
                lost[1] = set(self._targets.left_out)
            if not (lost[0] or lost[1]):
                assert halves[0] is not None
                assert halves[1] is not None
                return Batch(chunk.number, rest.indices, (halves[0].data, halves[1].data))
            rest, target_rest = (self._alignment.without(each, lost[0] | lost[1]) for each in (rest, target_rest))
            halves = [half if each == lost[0] | lost[1] else None for half, each in zip(halves, lost)]
        return None

    def _load_input(self, chunk: Chunk, record: Record) -> Batch[Any] | None:
        known = len(self.trace.failures)
        try:
            batch = super()._load(chunk, record)
            return batch and self._prepare(batch)
        except Exception as error:
            say_half(error, "input", chunk.number)
            raise
        finally:
            for failure in self.trace.failures[known:]:
                say_half(failure.error, "input", chunk.number)

    def _load_target(self, chunk: Chunk, pair: Record, failed_inputs: dict[int, Failure]) -> Batch[Any] | None:
        trace, record = self._targets.trace, Record(chunk.number)
        known = len(trace.failures)
        trace.submit(record)
        self.trace.expect(pair, record)
        failed = None
        try:
            batch = self._targets._load(chunk, record)
            return batch and self._prepare(batch)
        except Exception as error:
            failed = type(error).__name__
            say_half(error, "target", chunk.number)
            raise
        finally:
            for position, failure in zip(self._targets.left_out, trace.failures[known:]):
                say_half(failure.error, "target", chunk.number)
                if position in failed_inputs:
                    both_failed(failed_inputs[position], failure)
                else:
                    self.trace.failures.append(failure)
            trace.hand_over(record, failed)
            trace.deliver(record)
            if failed is not None:
                self.trace.join(pair, record)


def _same(batch: Batch[Any]) -> Batch[Any]:
    return batch

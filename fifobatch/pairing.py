"""How the halves of a pair are loaded, each as a task of its own; the machinery under `PairedLoader`.

::

    chunk --> input task -----> done: the pair is complete, and goes to the consumer, who has a `Target` with it
          `-> target task ----> done: that `Target` is, handed out or not

Runs in the parent process. Pairs are submitted and handed out in the consumer's thread; what follows from a task that
is done runs in the pool's thread, as a done callback, or in the preparing thread. No lock is needed: where both halves
count, one's callback is added by the other's. A future keeps its callbacks, so none of them may hold, by any way, the
future that it is given.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from fifobatch.alignment import Alignment, both_failed, say_half
from fifobatch.device import NO_TRANSFER, Prepare, Transfer
from fifobatch.errors import ClosedError
from fifobatch.flight import Run
from fifobatch.futures import BatchFuture, make_preparer, prepare_first
from fifobatch.plan import Batch, Chunk, Failure
from fifobatch.target import Target
from fifobatch.trace import Record

__all__ = ["Pairing"]


def _take_over(
    target: "weakref.ref[Target]", pairing: "Pairing", pair: Record, then: "_Then", future: BatchFuture
) -> None:
    wanted = target()
    if wanted is None:
        if not future.cancelled():
            pairing.note_arrival(pair, future)  # loaded all the same
    elif future.cancelled():
        wanted.arrive(future)
    else:
        then(wanted.arrive, future)


_Then = Callable[[Callable[[BatchFuture], object], BatchFuture], object]


def _after(prepare: Prepare | None, preparer: Executor) -> _Then:
    """Return what calls with a future that is done, after something was done to its batch, if it is to be."""
    return _call if prepare is None else partial(prepare_first, preparer, prepare)


def _call(call: Callable[[BatchFuture], object], future: BatchFuture) -> None:
    call(future)


class _Pair(BatchFuture):
    """The future of a pair; its batch's data are the input's and a `Target`, or both halves'."""

    size: int | None = 0

    @property
    def nbytes(self) -> int | None:
        return self.size


class Pairing:
    """Loads pairs: the `Loading` of `Completions`.

    Args:
        inputs: Submits the inputs.
        targets: Submits the targets.
        alignment: How their chunks follow from the inputs'.
        zips: Whether a pair is complete with both halves, not with its input.
        transfer: What is done to the batches of either half, in a thread of its own. Here the targets are staged,
            those that were handed out; inputs are by `Completions`.

    Attributes:
        stage: Does to targets, when they are handed out, what is to be done then, and calls.
        closed: Whether the loader was.
    """

    def __init__(
        self, inputs: Run, targets: Run, alignment: Alignment, zips: bool, transfer: Transfer = NO_TRANSFER
    ) -> None:
        self._inputs = inputs
        self._targets = targets
        self._alignment = alignment
        self._zips = zips
        preparer = make_preparer()  # no thread before it has something to do
        self._then = _after(transfer.prepare, preparer)
        self.stage = _after(transfer.stage, preparer)
        self._largest: int | None = None  # target, in bytes
        self._handed_out: dict[int, weakref.ref[Target]] = {}  # and not done
        self._over = False
        self.closed = False
        self._end_targets = weakref.finalize(self, targets.end)
        self._end_targets.atexit = False

    # -- consumer's thread

    def submit(self, chunk: Chunk) -> BatchFuture:
        """Start loading a pair: its input first."""
        halves = self._alignment.halves(chunk)
        futures = self._inputs.submit(halves[0]), self._targets.submit(halves[1])
        pair = _Pair(chunk)
        pair.record = futures[0].record
        if self._zips:
            self._join(pair, halves, futures)
        else:
            call = partial(self._input_done, pair, halves[1], self._target(pair, futures[1]))
            futures[0].add_done_callback(partial(self._then, call))
        return pair

    def hand_out(self, target: Target) -> Callable[[], object]:
        """Note that a target is wanted, whatever becomes of the iterator; return what says that it no longer is."""
        number = target.record.number
        self._handed_out[number] = weakref.ref(target)
        return partial(self._let_go, number)

    def waited(self, record: Record, requested: float) -> None:
        """Note that the consumer waited for a target, instead of in ``next()``."""
        self._inputs.trace.wait(requested)
        record.requested, record.delivered = requested, time.perf_counter()

    # -- the thread that closes the loader

    def close(self) -> None:
        """Give up what is under way, and the targets that were handed out, too."""
        self.closed = True  # before the look at what is handed out: `Target.hand_out` does both the other way round
        self.end()
        self._end_targets()
        for ref in list(self._handed_out.values()):
            target = ref()
            if target is not None:
                target.give_up()

    # -- any thread, without a lock: finalizers call these

    def end(self) -> None:
        """Give up what is under way, but for targets that were handed out."""
        self._inputs.end()
        self._over = True  # before the look at what is handed out: `_let_go` does both the other way round
        if not self._handed_out:
            self._end_targets()

    def _let_go(self, number: int) -> None:
        self._handed_out.pop(number, None)
        if self._over and not self._handed_out:
            self._end_targets()

    # -- pool's or preparing thread

    def note_arrival(self, pair: Record, target: BatchFuture) -> None:
        """Note that a target has come: for its trace, it is delivered; for the inputs', it is a part of its pair."""
        self._targets.trace.hand_over(target.record, target.error_name)
        self._targets.trace.deliver(target.record)
        self._inputs.trace.join(pair, target.record)
        self._largest = max(self._largest or 0, target.record.bytes)

    def _target(self, pair: _Pair, future: BatchFuture) -> Target:
        target = Target(self, pair.record, future)
        self._inputs.trace.expect(pair.record, future.record)
        future.add_done_callback(partial(_take_over, weakref.ref(target), self, pair.record, self._then))
        return target

    def _input_done(self, pair: _Pair, chunk: Chunk, target: Target, future: BatchFuture) -> None:
        """Complete a pair, or give its target up; a failed sample is left out of both."""
        _note_failures(pair, future, "input", {})
        error = None if future.cancelled() else future.exception()
        rest = self._alignment.without(chunk, future.left_out) if future.left_out else chunk
        if future.cancelled() or error is not None or rest is None:
            target.cancel()
            pair.is_empty = rest is None
            _settle(pair, future, "input")
            return
        if rest is not chunk:
            target.cancel()
            try:
                target = self._target(pair, self._targets.submit(rest, later=True))
            except ClosedError:  # by another thread
                pair.settle_cancelled()
                return
        half = target.record.bytes if target.record.loaded is not None else self._largest  # of one to come, a guess
        pair.size = None if half is None else future.record.bytes + half
        batch = future.result()
        pair.set_result(dataclasses.replace(batch, data=(batch.data, target)))

    def _join(self, pair: _Pair, halves: tuple[Chunk, Chunk], futures: tuple[BatchFuture, BatchFuture]) -> None:
        """Complete a pair when both halves are done."""

        def input_done(future: BatchFuture) -> None:
            call = partial(self._both_done, pair, halves, _bare(future))
            target.add_done_callback(partial(self._then, call))

        target = futures[1]
        futures[0].add_done_callback(partial(self._then, input_done))

    def _both_done(self, pair: _Pair, halves: tuple[Chunk, Chunk], input: BatchFuture, target: BatchFuture) -> None:
        pair.record = input.record
        for future, half in ((input, "input"), (target, "target")):
            _note_failures(pair, future, half, dict(zip(input.left_out, input.failures)))
            if future.cancelled() or future.exception() is not None:
                _settle(pair, future, half)
                return
        lost = {*input.left_out, *target.left_out}
        if not lost:
            self._inputs.trace.expect(pair.record, target.record)
            self.note_arrival(pair.record, target)
            pair.size = input.record.bytes + target.record.bytes
            pair.set_result(Batch(pair.chunk.number, halves[0].indices, (input.result().data, target.result().data)))
            return
        rests = [self._alignment.without(chunk, lost) for chunk in halves]
        again = []
        for future, rest, run in zip((input, target), rests, (self._inputs, self._targets)):
            if rest is None:
                pair.is_empty = True
                _settle(pair, future, "")
                return
            try:
                is_rest = len(future.left_out) == len(lost)
                if future is input and not is_rest:
                    run.trace.void(future.record)  # a pair counts once
                again.append(_bare(future, is_rest=True) if is_rest else run.submit(rest, later=True))
            except ClosedError:  # by another thread
                pair.settle_cancelled()
                return
        assert rests[0] is not None
        assert rests[1] is not None
        self._join(pair, (rests[0], rests[1]), (again[0], again[1]))


def _note_failures(pair: _Pair, future: BatchFuture, half: str, failed_inputs: dict[int, Failure]) -> None:
    for position, failure in zip(future.left_out, future.failures):
        say_half(failure.error, half, pair.chunk.number)
        if half == "target" and position in failed_inputs:
            both_failed(failed_inputs[position], failure)
        else:
            pair.failures.append(failure)


def _settle(pair: BatchFuture, future: BatchFuture, half: str) -> None:
    """Complete ``pair`` as ``future``, which is done, was completed."""
    if future.cancelled():
        pair.settle_cancelled()
        return
    error = future.exception()
    if error is None:
        pair.set_result(future.result())
    else:
        pair.set_exception(say_half(error, half, pair.chunk.number) if half and isinstance(error, Exception) else error)


def _bare(future: BatchFuture, *, is_rest: bool = False) -> BatchFuture:
    """Return a copy of a future that is done, without its callbacks; ``is_rest``: nothing of it is to be left out."""
    bare = BatchFuture(future.chunk)
    bare.record = future.record
    if not is_rest:
        bare.failures, bare.left_out = future.failures, future.left_out
    _settle(bare, future, "")
    return bare

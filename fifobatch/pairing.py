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
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from fifobatch.alignment import Alignment, both_failed, say_half
from fifobatch.completion import BatchFuture, Completing, check_may_wait, make_preparer, prepare_first
from fifobatch.device import Prepare, arrived
from fifobatch.errors import ClosedError
from fifobatch.flight import Run
from fifobatch.plan import Batch, Chunk, Failure
from fifobatch.trace import Record

__all__ = ["Pairing", "Target", "hand_out"]

CLOSED = "its loader was closed"


class Target(Future[Any]):
    """A future of the target batch of a pair: of the very same indices as the input batch beside it.

    Once handed out it is loaded, also if its iterator is dropped. Only ``close()`` of the loader and dropping the
    future itself end that.
    """

    def __init__(self, pairing: "Pairing", pair: Record, batch: BatchFuture) -> None:
        super().__init__()
        self._pairing = pairing
        self._pair = pair
        self._batch: BatchFuture | None = batch
        self.record = batch.record
        self._asked_to_cancel = False
        self._executor: Completing | None = None
        self._let_go: Callable[[], object] | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Return the target batch, waiting for it.

        Raises:
            CancelledError: It was cancelled.
            ClosedError: Its loader was closed.
            FifobatchError: It is not done, and this is called in a done callback, in a thread that completes targets.
            TimeoutError: It did not come within ``timeout`` seconds.
            Exception: What the user's code raised for it, as `FifoLoader` raises it.
        """
        if self.done():
            return arrived(super().result())
        self._check_may_wait()
        requested = time.perf_counter()
        try:
            return arrived(super().result(timeout))
        finally:
            # The consumer waits here instead of in next(), and so it is shown.
            self._pairing.waited(self.record, requested)
            del self  # an error's traceback holds this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that it is done with, waiting for it; None if it is done with a batch.

        Raises:
            CancelledError, FifobatchError, TimeoutError: As `result`.
        """
        self._check_may_wait()
        return super().exception(timeout)

    def _check_may_wait(self) -> None:
        executor = self._executor
        if executor is not None and not self.done():
            check_may_wait(executor)

    def cancel(self) -> bool:
        """Cancel, if no worker has it yet."""
        batch, self._asked_to_cancel = self._batch, True
        return self.cancelled() or (batch is not None and batch.cancel())

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Have ``fn`` called with this future when it is done.

        It is called in the thread that completes all batches and targets of its loader (or here and now, if it is
        done), so be brief: meanwhile none comes. Waiting there for another is a `FifobatchError`.
        """
        super().add_done_callback(fn)
        batch = self._batch
        if batch is not None:
            batch.add_done_callback(partial(_keep, self))  # also if the caller drops it

    def hand_out(self, executor: Completing) -> None:
        """Note that somebody wants it, until it is done or dropped; and keep the executor alive until then."""
        self._let_go = finalizer = weakref.finalize(self, self._pairing.hand_out(self))
        finalizer.atexit = False
        self._executor = executor
        if self.done():  # perhaps just now
            self._release()
        elif self._pairing.closed:  # likewise
            self.give_up()

    def give_up(self) -> None:
        """Be done with a `ClosedError`, unless it is done: whatever its worker is at, nobody waits for that."""
        with suppress(InvalidStateError):  # it has come meanwhile, in the pool's thread
            self.set_exception(ClosedError(f"the target of pair {self.record.number} is not loaded: {CLOSED}"))
        self._release()

    def _release(self) -> None:
        self._batch = self._executor = None
        if self._let_go is not None:
            self._let_go()

    def complete(self, future: BatchFuture) -> None:
        """Take over what its task has come to."""
        number = future.chunk.number
        if not future.cancelled():
            self._pairing.note_arrival(self._pair, future)
        with suppress(InvalidStateError):  # it was given up meanwhile, in the thread that closes the loader
            if future.cancelled() and self._asked_to_cancel:
                if super().cancel():
                    self.set_running_or_notify_cancel()
            elif future.cancelled():
                self.set_exception(ClosedError(f"the target of pair {number} is not loaded: {CLOSED}"))
            else:
                error = future.exception()
                if isinstance(error, Exception):
                    self.set_exception(say_half(error, "target", number))
                else:
                    self.set_result(future.result().data)
        self._release()


def hand_out(select: Callable[[Batch[Any]], Any], executor: Completing, batch: Batch[Any]) -> Any:
    """Return what to yield of a pair; from now on its target is wanted, and keeps the executor until it is done."""
    batch.data[1].hand_out(executor)
    return select(batch)


def _keep(target: Target, future: "Future[Any]") -> None:
    """Do nothing: a done callback that keeps the target alive."""


def _take_over(
    target: "weakref.ref[Target]", pairing: "Pairing", pair: Record, then: "_Then", future: BatchFuture
) -> None:
    wanted = target()
    if wanted is None:
        if not future.cancelled():
            pairing.note_arrival(pair, future)  # loaded all the same
    elif future.cancelled():
        wanted.complete(future)
    else:
        then(wanted.complete, future)


class _Then:
    """Calls with a future that is done, after its batch was prepared if it is to be."""

    def __init__(self, prepare: Prepare | None) -> None:
        self._prepare = prepare
        self._preparer = None if prepare is None else make_preparer()

    def __call__(self, call: Callable[[BatchFuture], object], future: BatchFuture) -> None:
        if self._prepare is None or self._preparer is None:
            call(future)
        else:
            prepare_first(self._preparer, self._prepare, call, future)


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
        prepare: Done to the batches of either half, in a thread of its own.
    """

    def __init__(
        self, inputs: Run, targets: Run, alignment: Alignment, zips: bool, prepare: Prepare | None = None
    ) -> None:
        self._inputs = inputs
        self._targets = targets
        self._alignment = alignment
        self._zips = zips
        self._then = _Then(prepare)
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

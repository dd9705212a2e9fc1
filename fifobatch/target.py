"""The future of a pair's target, and what is so once somebody has it.

Runs in the consumer's thread, but for what follows when its task is done: that, as a done callback, runs in the pool's
thread or in the preparing thread.
"""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from fifobatch.alignment import say_half
from fifobatch.device import arrived
from fifobatch.errors import ClosedError
from fifobatch.exits import end_daemon_thread
from fifobatch.futures import BatchFuture, Completing, check_may_wait
from fifobatch.plan import Batch
from fifobatch.trace import Record

__all__ = ["Target", "hand_out"]

CLOSED = "its loader was closed"


class Wanting(Protocol):
    """Who loads the targets of one iteration.

    Attributes:
        closed: Whether the loader was.
    """

    closed: bool

    @property
    def stage(self) -> Callable[[Callable[[BatchFuture], object], BatchFuture], object]:
        """Does what is to be done to the batch of a target that is handed out, and then calls with its future."""

    def hand_out(self, target: "Target") -> Callable[[], object]:
        """Note that a target is wanted, whatever becomes of the iterator; return what says that it no longer is."""

    def waited(self, record: Record, requested: float) -> None:
        """Note that the consumer waited for a target, instead of in ``next()``."""

    def note_arrival(self, pair: Record, target: BatchFuture) -> None:
        """Note that a target has come."""


class Target(Future[Any]):
    """A future of the target batch of a pair: of the very same indices as the input batch beside it.

    Once handed out it is loaded, also if its iterator is dropped. Only ``close()`` of the loader and dropping the
    future itself end that.
    """

    def __init__(self, pairing: Wanting, pair: Record, batch: BatchFuture) -> None:
        super().__init__()
        self._pairing = pairing
        self._pair = pair
        self._batch: BatchFuture | None = batch
        self.record = batch.record
        self._asked_to_cancel = False
        self._executor: Completing | None = None
        self._let_go: Callable[[], object] | None = None
        self._lock = threading.Lock()  # for these two
        self._is_wanted = False
        self._complete: BatchFuture | None = None  # it has come, but nobody wants it yet

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
        except ClosedError:
            end_daemon_thread()
            raise
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
        with self._lock:
            self._is_wanted = True
            batch, self._complete = self._complete, None
        if batch is not None:
            self._pairing.stage(self.complete, batch)
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

    def arrive(self, future: BatchFuture) -> None:
        """Take over what its task has come to, once it is wanted: not before that is it staged."""
        if not future.cancelled():
            self._pairing.note_arrival(self._pair, future)
        if future.cancelled():
            self.complete(future)
            return
        with self._lock:
            is_wanted = self._is_wanted
            if not is_wanted:
                self._complete = future
        if is_wanted:
            self._pairing.stage(self.complete, future)

    def complete(self, future: BatchFuture) -> None:
        """Be done with what its task has come to."""
        number = future.chunk.number
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

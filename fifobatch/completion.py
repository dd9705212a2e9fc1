"""The as-completed iterator: refill, wait, deliver, abandon.

Runs in the consumer's thread; only futures' done callbacks, which put them into a queue, run in others.

::

    chunks --> submit(chunk) -> Future          while the window has room
                   |  done callback
                   v
    completed queue (SimpleQueue, in order of completion)
                   |  wait
                   v
    window: may it be delivered yet? --> Batch

Several threads may share one iterator: a lock gives each batch to one of them.
"""

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol

from fifobatch.errors import ClosedError, noted
from fifobatch.exits import end_daemon_thread
from fifobatch.futures import (
    BatchFuture,
    Completed,
    Completing,
    OneAhead,
    check_may_wait,
    make_preparer,
    prepare_first,
    weakly,
)
from fifobatch.plan import Batch, Chunk
from fifobatch.streams import Lanes
from fifobatch.trace import Trace
from fifobatch.window import Window

__all__ = ["Completions", "Loading"]


class Loading(Protocol):
    """Who loads the chunks of one iteration."""

    def submit(self, chunk: Chunk) -> BatchFuture:
        """Start loading ``chunk``."""

    def end(self) -> None:
        """Give up what is under way. Also called by the garbage collector, so it takes no lock."""


class Completions(Iterator[Any]):
    """Iterate batches as they complete.

    Filling the window begins at once, in the constructor. An error in the plan's own sampler waits until everything
    that was submitted before has been delivered.

    Args:
        chunks: What to load, in plan order; or the lanes of a stream.
        loading: Who loads it; None if there are no chunks.
        window: How much may be under way, and in which order it comes.
        select: What to yield of a batch.
        trace: Where to note what happens; it has begun.
        executor: Kept alive as long as the iterator: when nobody refers to it, it ends.
        prepare: Done to each batch when it is complete, in a thread of its own.
        stage: Done in that thread to the batch that is next, while the consumer has the one before it.
        stacklevel: Of what there is to warn of in a stream, from ``next()``.
        failed: What reading the first chunk has raised; there are none then.
    """

    def __init__(
        self,
        chunks: Iterator[Chunk] | Lanes,
        loading: Loading | None,
        window: Window[BatchFuture],
        select: Callable[[Batch[Any]], Any],
        trace: Trace,
        executor: Completing,
        prepare: Callable[[Batch[Any]], Batch[Any]] | None = None,
        stage: Callable[[Batch[Any]], Batch[Any]] | None = None,
        stacklevel: int = 1,
        failed: Exception | None = None,
    ) -> None:
        self._stacklevel = stacklevel
        self._executor = executor
        self._lanes = chunks if isinstance(chunks, Lanes) else None
        self._take: Callable[[], Chunk | None] | None = None  # None: nothing more is to be submitted
        if loading is not None:
            self._take = chunks.take if isinstance(chunks, Lanes) else partial(next, chunks, None)
        self._loading = loading
        self._window = window
        self._select = select
        self.trace = trace
        self._completed = Completed()
        self._waiting = False
        self._put: Callable[[Any], object] = weakly(self._completed.put)
        self._ahead: OneAhead | None = None
        if prepare is not None or stage is not None:
            # Its thread ends with the last reference to it: this iterator's, or that of a batch still to come.
            preparer = make_preparer()
            if stage is not None:
                self._ahead = OneAhead(stage, preparer, window, self._completed)
                self._put = weakly(self._ahead.arrive)
            if prepare is not None:
                self._put = partial(prepare_first, preparer, prepare, self._put)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._plan_error = None if failed is None else failed.with_traceback(_outside(failed))
        self._closed = False
        self._end: Callable[[], object] = trace.end
        if loading is not None:
            self._end = finalizer = weakref.finalize(self, loading.end)
            finalizer.atexit = False
        try:
            self._refill()
        except BaseException:
            self._end()
            raise
        trace.started()

    @property
    def under_way(self) -> int:
        """Batches submitted and not yet yielded."""
        return self._window.under_way

    def __next__(self) -> Any:
        """Return the next batch to complete.

        Raises:
            ClosedError: The iterator was closed, or belongs to another process.
            Exception: What the user's code raised for this batch; the other batches still come.
            FifobatchError: It is called in a done callback, in a thread that completes batches.
            StopIteration: Every batch of the plan was yielded.
            SystemExit: This is a daemon thread, and the interpreter is exiting.
        """
        check_may_wait(self._executor)  # before the lock: who holds it may wait for this thread
        with self._lock:
            requested = time.perf_counter()
            self._waiting = False
            try:
                future = self._next_future()
            except (Exception, StopIteration):
                self.trace.wait(requested)
                raise
            except BaseException:  # an interrupt, such as Ctrl-C
                if not self._waiting:  # it may have lost a batch that was just taken
                    self.close()
                self.trace.wait(requested)
                raise
        try:
            if future.cancelled():  # not caught: user code may raise CancelledError, too
                raise ClosedError(f"chunk {future.chunk.number} was cancelled: the executor was shut down")
            return self._select(future.result())
        except ClosedError:
            end_daemon_thread()
            raise
        finally:
            self.trace.deliver(future.record, requested)
            del self, future  # an error's traceback holds this frame

    def _next_future(self) -> BatchFuture:
        while True:
            self._check_open()
            while not self._window.ready:
                if not self._window.under_way:
                    self._end()
                    self._raise_end()
                self._receive()
                self._check_open()
            # Before the batch is taken: a warning may be an error, and then the batch still comes.
            while self._lanes is not None and self._lanes.warnings:
                warnings.warn(self._lanes.warnings.pop(0), stacklevel=self._stacklevel + 1)
            _, future = self._window.deliver()
            self.trace.hand_over(future.record, future.error_name)
            self.trace.failures += future.failures
            self._refill()
            if not future.is_empty:
                return future if self._ahead is None else self._staged(self._ahead, future)
            self.trace.deliver(future.record)

    def _staged(self, ahead: OneAhead, future: BatchFuture) -> BatchFuture:
        """Return a batch as staged, and begin with the next one, if it is there; if not, it begins as it comes."""
        staged = ahead.take(future)
        while self._completed:
            self._receive()
        if self._window.ready:
            ahead.offer(self._window.next)
        return staged.result()

    def _raise_end(self) -> NoReturn:
        error, self._plan_error = self._plan_error, None
        try:
            if error is None:
                self._window.check()
                raise StopIteration
            if isinstance(error, ClosedError):
                end_daemon_thread()
            raise error
        finally:
            del self, error  # the traceback holds this frame

    def _receive(self) -> None:
        """Take one completed future from the queue, waiting for it."""
        self._waiting = True
        self._completed.wait()
        self._waiting = False
        future = self._completed.take()
        if future is None:  # close() woke us up
            return
        number = future.chunk.number
        if not future.is_void:
            self._window.complete(number, future, future.nbytes)
        if self._lanes is not None:
            self._lanes.landed(number, future.is_last, future.has_looked)
            if future.is_cut:
                self._lanes.cut(number, future.failures[-1].error)
            if future.is_last:
                first, step = number if future.is_void else number + self._lanes.count, self._lanes.count
                self._window.end(first, step)
            if future.is_void:
                self._window.cancel(number)
                self.trace.void(future.record)
            del future
            self._refill()  # each lane is to have something to do

    def _refill(self) -> None:
        while self._take is not None and self._loading is not None and not self._window.full:
            chunk = None
            try:
                chunk = self._take()
                if chunk is None:
                    return
                future = self._loading.submit(chunk)
            except Exception as error:  # the user's sampler, or a pool that takes no more: first deliver what is here
                if chunk is not None:
                    error = noted(error, f"From chunk {chunk.number} on, nothing of this plan is loaded.")
                # Without its first frame, this one, which would keep the iterator alive.
                self._take, self._plan_error = None, error.with_traceback(_outside(error))
                return
            self._window.submit(chunk.number)
            future.add_done_callback(self._put)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this iterator was closed; start a new one with iter(loader)")
        if os.getpid() != self._pid:
            raise ClosedError("this iterator belongs to the parent process; make a loader of your own after a fork")

    def close(self) -> None:
        """Give up what is under way. Idempotent; may be called from any thread."""
        if not self._closed:
            self._closed = True
            self._take = None
            self._end()
            self._completed.put(None)


def _outside(error: Exception) -> TracebackType | None:
    return error.__traceback__ and error.__traceback__.tb_next

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
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol

from fifobatch.errors import ClosedError, FifobatchError, noted
from fifobatch.plan import Batch, Chunk, Failure
from fifobatch.streams import Lanes
from fifobatch.trace import Record, Trace
from fifobatch.window import Window

__all__ = ["BatchFuture", "Completions", "Loading", "check_may_wait", "make_preparer", "prepare_first"]


class BatchFuture(Future[Batch[Any]]):
    """The future of one batch.

    Attributes:
        chunk: What it loads.
        record: When it was submitted, loaded, delivered.
        failures: The samples that were left out.
        left_out: Their positions in the chunk.
        is_empty: Whether that was all of them: there is nothing to deliver.
        is_void: Whether there is no such batch, as its lane of a stream was over before.
        is_last: Whether its lane is over with it.
        is_cut: Whether that is so because the stream has raised an error, which was left out.
        has_looked: Whether the stream's dataset has looked at its worker info there; None if there was nothing to see.
    """

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk
        self.record = Record(chunk.number)
        self.failures: list[Failure] = []
        self.is_empty = self.is_void = self.is_last = self.is_cut = False
        self.has_looked: bool | None = None
        self.left_out: tuple[int, ...] = ()
        self.inner: Future[Any] | None = None  # the pool's

    def cancel(self) -> bool:
        """Cancel, if no worker has it yet. Once the pool has queued it for a worker, it cannot be cancelled."""
        # The pool's future decides; when it is cancelled, its done callback settles this one (and drops it).
        inner = self.inner
        return inner is not None and inner.cancel()

    @property
    def nbytes(self) -> int | None:
        """The size of its batch, as the window counts it; None if it is not known yet."""
        return self.record.bytes

    @property
    def error_name(self) -> str | None:
        """The class of the error that it is done with, if it is."""
        error: BaseException | None = CancelledError() if self.cancelled() else self.exception()
        if self.is_empty:
            error = self.failures[0].error
        return None if error is None else type(error).__name__

    def settle_cancelled(self) -> None:
        """Mark as cancelled: its chunk will not be loaded."""
        super().cancel()
        self.set_running_or_notify_cancel()


class Completing(Protocol):
    """Who completes the futures."""

    @property
    def completes_here(self) -> bool:
        """Whether that happens in this thread."""


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
        prepare: Done to each batch before it is delivered, in a thread of its own.
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
        self._completed: queue.SimpleQueue[BatchFuture | None] = queue.SimpleQueue()
        self._put: Callable[[Any], object] = partial(_put, weakref.ref(self._completed))
        if prepare is not None:
            # Its thread ends with the last reference to it: this iterator's, or that of a batch still to come.
            preparer = make_preparer()
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
        """
        check_may_wait(self._executor)  # before the lock: who holds it may wait for this thread
        with self._lock:
            requested = time.perf_counter()
            try:
                future = self._next_future()
            except (Exception, StopIteration):
                self.trace.wait(requested)
                raise
            except BaseException:  # an interrupt: what is under way has lost its consumer
                self.close()
                raise
        try:
            if future.cancelled():  # not caught: user code may raise CancelledError, too
                raise ClosedError(f"chunk {future.chunk.number} was cancelled: the executor was shut down")
            return self._select(future.result())
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
                return future
            self.trace.deliver(future.record)

    def _raise_end(self) -> NoReturn:
        error, self._plan_error = self._plan_error, None
        try:
            if error is None:
                self._window.check()
                raise StopIteration
            raise error
        finally:
            del self, error  # the traceback holds this frame

    def _receive(self) -> None:
        """Take one completed future from the queue, waiting for it."""
        future = self._completed.get()
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


_preparing = threading.local()


def make_preparer() -> ThreadPoolExecutor:
    """Return a thread that prepares batches."""
    return ThreadPoolExecutor(1, "fifobatch-prepare", setattr, (_preparing, "here", True))


def check_may_wait(executor: Completing) -> None:
    """Check that this thread may wait for a batch.

    Raises:
        FifobatchError: It is one of those that complete them, in a done callback.
    """
    if executor.completes_here or getattr(_preparing, "here", False):
        raise FifobatchError(
            "called in a done callback, in the thread that would complete it: that would wait for ever. Let the "
            "callback put what it has into a queue, and wait in a thread of your own"
        )


def prepare_first(
    preparer: Executor,
    prepare: Callable[[Batch[Any]], Batch[Any]],
    put: Callable[[BatchFuture], object],
    future: BatchFuture,
) -> None:
    """Have a batch prepared in the preparer's thread, and then ``put``; a done callback."""
    arguments = [(prepare, put, future)]
    try:
        preparer.submit(_prepare, arguments)
    except RuntimeError:  # the main thread has ended, and concurrent.futures with it; somebody else still iterates
        _prepare(arguments)


def _prepare(arguments: list[tuple[Any, Any, BatchFuture]]) -> None:
    # An error's traceback holds the frames of this thread, and with them what they hold. So that the batch's error does
    # not keep its iterator, and this thread for ever: the list that concurrent.futures has is emptied, and so are ours.
    prepare, put, future = arguments.pop()
    if not future.cancelled() and future.exception() is None and not (future.is_empty or future.is_void):
        future = _prepared(prepare, future)
    try:
        put(future)
    finally:
        del prepare, put, future


def _prepared(prepare: Callable[[Batch[Any]], Batch[Any]], future: BatchFuture) -> BatchFuture:
    prepared = BatchFuture(future.chunk)
    prepared.record, prepared.failures, prepared.left_out = future.record, future.failures, future.left_out
    prepared.is_last, prepared.is_cut, prepared.has_looked = future.is_last, future.is_cut, future.has_looked
    try:
        prepared.set_result(prepare(future.result()))
    except Exception as error:  # what the user's own pin_memory() raises, or no memory: this batch's error
        prepared.set_exception(error)
    try:
        return prepared
    finally:
        del prepare, future, prepared


def _put(completed: "weakref.ref[queue.SimpleQueue[Any]]", future: "Future[Batch[Any]]") -> None:
    # Not the queue's own put: a future keeps its callbacks, and batches that nobody fetches would live in a cycle.
    to = completed()
    if to is not None:
        to.put(future)


def _outside(error: Exception) -> TracebackType | None:
    return error.__traceback__ and error.__traceback__.tb_next

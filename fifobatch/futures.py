"""The future of a batch, and what is done to the batch between its completion and its delivery.

::

    future of a worker's batch
        |  prepare: into pinned memory; each batch, when it is complete
        v
    completed queue
        |  stage: to the device; only the batch that is next, while the consumer has the one before it
        v
    future of the batch to deliver

Futures are completed in the pool's thread. Preparing and staging run in a thread of the iterator's own; its consumer
only waits for it.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from fifobatch.errors import FifobatchError
from fifobatch.plan import Batch, Chunk, Failure
from fifobatch.trace import Record
from fifobatch.window import Window

__all__ = [
    "BatchFuture",
    "Completed",
    "Completing",
    "OneAhead",
    "check_may_wait",
    "make_preparer",
    "prepare_first",
    "weakly",
]


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


def _has_batch(future: BatchFuture) -> bool:
    return not future.cancelled() and future.exception() is None and not (future.is_empty or future.is_void)


def _prepare(arguments: list[tuple[Any, Any, BatchFuture]]) -> None:
    # An error's traceback holds the frames of this thread, and with them what they hold. So that the batch's error does
    # not keep its iterator, and this thread for ever: the list that concurrent.futures has is emptied, and so are ours.
    prepare, put, future = arguments.pop()
    if _has_batch(future):
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


class Completed:
    """The completed queue, for one reader at a time: an interrupt while it waits takes nothing from it.

    A ``SimpleQueue`` has given its item away if a signal's handler raises just as ``get()`` returns. So here an item is
    taken after the waiting, which is for something else: one too many or too few of that does no harm.
    """

    def __init__(self) -> None:
        self._items: deque[BatchFuture | None] = deque()
        self._filled: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, item: BatchFuture | None) -> None:
        """Add an item."""
        self._items.append(item)
        self._filled.put(None)

    def wait(self) -> None:
        """Wait until there is an item."""
        while not self._items:
            self._filled.get()

    def take(self) -> BatchFuture | None:
        """Take the oldest item."""
        if not self._filled.empty():  # there is but one reader
            self._filled.get()
        return self._items.popleft()

    def __bool__(self) -> bool:
        return bool(self._items)


class OneAhead:
    """Stages the batch that is next while the consumer has the one before it, and no more than that.

    Args:
        stage: Done to each batch before it is delivered, such as its copy to a device.
        preparer: The thread that does it.
        window: Says which batch may go.
        completed: Where batches that are complete are put; used only here while there is something to stage.
    """

    def __init__(
        self,
        stage: Callable[[Batch[Any]], Batch[Any]],
        preparer: Executor,
        window: Window[BatchFuture],
        completed: Completed,
    ) -> None:
        self._stage = stage
        self._preparer = preparer
        self._window = window
        self._completed = completed
        self._lock = threading.Lock()
        self._ahead: tuple[int, Future[BatchFuture]] | None = None

    def arrive(self, future: BatchFuture) -> None:
        """Put a batch into the queue, and begin to stage it if it may be the next; in the thread that completed it."""
        # One step, as `take` is one: either the consumer, who then looks into the queue, finds this batch there, or
        # nothing is ahead any more. Otherwise both might leave it to the other.
        with self._lock:
            self._completed.put(future)
            if self._window.may_go(future.chunk.number):  # what may go once may always go
                self._begin(future)

    def offer(self, future: BatchFuture) -> None:
        """Begin to stage a batch, unless one is ahead already; in the consumer's thread."""
        with self._lock:
            self._begin(future)

    def take(self, future: BatchFuture) -> "Future[BatchFuture]":
        """Return the future of a batch's future as staged; it is no longer ahead."""
        number = future.chunk.number
        with self._lock:
            if self._ahead is None or self._ahead[0] != number:
                return self._staged(future)
            (_, staged), self._ahead = self._ahead, None
            return staged

    def _begin(self, future: BatchFuture) -> None:
        if self._ahead is None and _has_batch(future):
            self._ahead = future.chunk.number, self._staged(future)

    def _staged(self, future: BatchFuture) -> "Future[BatchFuture]":
        staged: Future[BatchFuture] = Future()
        prepare_first(self._preparer, self._stage, staged.set_result, future)
        return staged


def weakly(method: Callable[[BatchFuture], object]) -> Callable[[BatchFuture], object]:
    """Return a done callback that calls ``method`` as long as its object lives.

    A future keeps its callbacks, so with the method itself batches that nobody fetches would live in a cycle.
    """
    return partial(_call, weakref.WeakMethod(method))


def _call(method: "weakref.WeakMethod[Callable[[BatchFuture], object]]", future: BatchFuture) -> None:
    call = method()
    if call is not None:
        call(future)

"""loky's pool as it is used here: where its processes come from, and how calls and results are written.

Runs in the parent, in the thread that submits and in loky's manager thread; `ResultQueue.put` runs in the workers. Five
things are done differently here, by overriding or reading what loky keeps private (so its version is bounded in
``setup.cfg``):

- calls are written to the pipe by the thread that submits, without waking up loky's manager thread and its feeder, and
  calls and results are pickled by pickle (`LokyPool.submit`, `CallQueue`, `ResultQueue`);
- processes start when there is work for one more, instead of all at the first task: two chunks start two workers, even
  if eight are allowed and nobody knows how many chunks will come (`LokyPool`);
- they come from the fork server (`WorkerProcess`);
- at interpreter exit loky neither waits for their tasks nor ends them (`LokyPool`);
- the moment that loky notices a death is told, before it kills the others (`Flags`).
"""

import copy
import fcntl
import pickle
import queue
import select
import threading
import weakref
from collections.abc import Callable, Set
from concurrent.futures import Future
from multiprocessing import process
from multiprocessing.process import BaseProcess
from typing import Any

import loky.backend.queues
import loky.process_executor
from loky.backend.context import LokyContext

from fifobatch.semaphore import Semaphore
from fifobatch.server import ServedPopen

__all__ = ["Context", "LokyPool", "WorkerProcess"]

# Tasks on their way to the workers beyond two a worker; loky's own is 1. They cannot be cancelled, but an abandoned one
# sees that on the board and answers at once. With 16 and more, tiny batches cost a sixth less processor time here.
QUEUED_CALLS = 16


class WorkerProcess(BaseProcess):
    """One worker.

    Attributes:
        number: Its id: below the number of workers, and unique among those alive.
        modules: The installed modules that its fork server should have.
    """

    _start_method = None  # leaves the worker's default as it is
    _popen: ServedPopen | None

    def __init__(self, number: int, modules: frozenset[str], **kwargs: Any) -> None:
        kwargs.pop("env", None)  # loky's: here the environment comes with the plan
        super().__init__(name=f"fifobatch-worker-{number}", **kwargs)
        self.number = number
        self.modules = modules

    def start(self) -> None:
        """Start it, unknown to multiprocessing.

        At a process's end multiprocessing joins its children before anything of ours runs; in its own child processes,
        even before an error is printed: one that holds an iterator would never be seen.
        """
        super().start()
        process._children.discard(self)  # type: ignore[attr-defined]

    @staticmethod
    def _Popen(process_obj: "WorkerProcess") -> ServedPopen:
        return ServedPopen(process_obj)


class Context(LokyContext):  # type: ignore[misc]  # loky has no types
    """Where loky gets its processes and locks from: the locks have no name, so nothing has to keep track of them."""

    Lock = Semaphore
    BoundedSemaphore = Semaphore

    def __init__(self, first_number: int, modules: Set[str]) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        self._first_number = first_number
        self._modules = modules

    def Process(self, **kwargs: Any) -> WorkerProcess:
        """Return a worker with the lowest free number, yet to be started."""
        number = self._first_number
        while number in self.workers and self.workers[number].exitcode is None:
            number += 1
        self.workers[number] = WorkerProcess(number, frozenset(self._modules), **kwargs)
        return self.workers[number]


class CallQueue(loky.process_executor._SafeQueue):  # type: ignore[misc]
    """loky's queue of calls, without the thread that pickles them and writes them to the pipe.

    Ours are short, and the pipe has room for as many as the queue may hold. So whoever has a call writes it itself,
    which saves each batch a change of threads and loky's pickler, together a tenth of a millisecond.
    """

    def __init__(self, max_size: int, **kwargs: Any) -> None:
        super().__init__(max_size=max_size, **kwargs)
        try:
            room = fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, max_size * select.PIPE_BUF)
        except OSError:  # more than this user may have
            room = 0
        self._direct = room >= max_size * select.PIPE_BUF

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Write ``obj`` to the pipe.

        Raises:
            queue.Full: There are enough.
        """
        if not self._direct:
            super().put(obj, block, timeout)
            return
        if not self._sem.acquire(block, timeout):
            raise queue.Full
        data = pickle.dumps(obj, 5)
        with self._wlock:
            self._writer.send_bytes(data)

    def close(self) -> None:
        """Put no more."""
        super().close()
        if self._direct:  # else its thread does
            self._writer.close()


class ResultQueue(loky.backend.queues.SimpleQueue):  # type: ignore[misc]
    """loky's queue of results, without its pickler, which takes long to find nothing to do: ours are tuples."""

    def put(self, obj: Any) -> None:
        """Write ``obj`` to the pipe."""
        try:
            data = pickle.dumps(obj, 5)
        except Exception:  # not of ours: what loky's worker has to say itself
            super().put(obj)
            return
        with self._wlock:
            self._writer.send_bytes(data)


class Flags(loky.process_executor._ExecutorFlags):  # type: ignore[misc]
    """loky's note of a pool's state."""

    on_broken: Callable[[], object]

    def flag_as_broken(self, broken: Any) -> None:
        """Note that the pool takes no more tasks; loky's first step when it sees that a worker has died."""
        first = self.broken is None
        super().flag_as_broken(broken)
        if first:
            self.on_broken()


class Manager(loky.process_executor._ExecutorManagerThread):  # type: ignore[misc]
    """loky's manager thread: it writes the calls that found no room in the pipe when they were submitted."""

    def __init__(self, executor: "LokyPool") -> None:
        super().__init__(executor)
        self.daemon = True
        # Without loky's callback, which fails while the interpreter is taken down. Pools are ended, not dropped.
        self.executor_reference = weakref.ref(executor)
        self._writing = threading.Lock()

    def add_call_item_to_queue(self) -> None:
        """Write calls to the pipe while it has room; in this thread, and in those that submit."""
        with self._writing:  # between looking for room and taking it
            super().add_call_item_to_queue()


class LokyPool(loky.process_executor.ProcessPoolExecutor):  # type: ignore[misc]
    """loky's pool, starting its processes one by one as they are needed."""

    def __init__(self, max_workers: int, on_broken: Callable[[], object], **kwargs: Any) -> None:
        super().__init__(max_workers, **kwargs)
        self._flags = Flags(self._shutdown_lock)
        self._flags.on_broken = on_broken
        self._size = max_workers
        self._max_workers = 0  # how many loky is to have now

    def _setup_queues(self, job_reducers: Any, result_reducers: Any, queue_size: int | None = None) -> None:
        size = 2 * self._max_workers + QUEUED_CALLS
        self._result_queue = ResultQueue(reducers=result_reducers, ctx=self._context)
        self._call_queue = CallQueue(
            size,
            pending_work_items=self._pending_work_items,
            running_work_items=self._running_work_items,
            thread_wakeup=self._executor_manager_thread_wakeup,
            shutdown_lock=self._shutdown_lock,
            executor_flags=self._flags,
            reducers=job_reducers,
            ctx=self._context,
        )
        self._call_queue._ignore_epipe = True  # as loky has it

    def _start_executor_manager_thread(self) -> None:
        # A daemon, and unknown to loky's exit hook: else exiting would wait for running tasks, and what the user reads
        # in an exit function of its own would not be loaded any more. `engine` ends the pools.
        if self._executor_manager_thread is None:
            self._executor_manager_thread: Any = Manager(self)
            self._executor_manager_thread.start()

    def submit(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Have a worker call ``fn(*args)``, as loky does, but write the call in this thread.

        loky wakes up its manager thread to do it. That costs a tenth of the parent's time for each batch, and a fifth
        with a stream, whose lanes have a manager each.

        Raises:
            BrokenExecutor: A worker has died.
            RuntimeError: The pool was shut down.
        """
        future: Future[Any] = Future()
        with self._shutdown_lock:  # nor can the manager, without it, give up what it has
            if self._flags.broken is not None:
                raise copy.copy(self._flags.broken)  # a traceback that grew with each would keep its callers
            if self._flags.shutdown:
                raise loky.process_executor.ShutdownExecutorError("cannot schedule new futures after shutdown")
            work_id: int = self._queue_count
            self._queue_count: int = work_id + 1
            self._pending_work_items[work_id] = loky.process_executor._WorkItem(future, fn, args, {})
            self._work_ids.put(work_id)
            self._ensure_executor_running()
            self._executor_manager_thread.add_call_item_to_queue()
        return future

    def _ensure_executor_running(self) -> None:
        before = len(self._processes)
        self._max_workers = max(self._max_workers, min(self._size, len(self._pending_work_items)))
        super()._ensure_executor_running()
        if len(self._processes) > before:
            # 1. submit() woke the manager thread up; 2. it may have gone to sleep again, watching only the processes of
            # then; 3. were a new one to die now, nobody would notice. So wake it up again (submit holds the lock).
            self._executor_manager_thread_wakeup.wakeup()

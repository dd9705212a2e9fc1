"""Worker processes: a loky pool whose processes come from the fork server. The only module that imports loky's pool.

Runs in the parent: `WorkerPool.submit` in the thread that iterates, done callbacks in loky's manager thread.

loky is used for what it does well: queues, sentinels, and telling every future when a worker dies. Four things are
done differently here, by overriding or reading what loky keeps private (so its version is bounded in ``setup.cfg``):

- calls are written to the pipe by loky's manager thread, without one more thread, and calls and results are pickled by
  pickle (`_CallQueue`, `_ResultQueue`);
- processes start when there is work for one more, instead of all at the first task: two chunks start two workers, even
  if eight are allowed and nobody knows how many chunks will come;
- `WorkerPool.kill` kills the processes that it knows; loky's own way needs psutil, or runs ``pgrep``;
- at interpreter exit, pools are killed *before* loky waits for their running tasks.
"""

import contextlib
import fcntl
import os
import pickle
import queue
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from multiprocessing import connection, process, reduction
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import loky.backend.queues
import loky.process_executor
from loky.backend.context import LokyContext

from fifobatch.packages import installed_modules
from fifobatch.semaphore import Semaphore
from fifobatch.server import ServedPopen, after_fork_in_child

__all__ = ["WorkerPool", "WorkerProcess", "at_exit", "cpu_count", "loky_pool"]

Result = TypeVar("Result")

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


class _Context(LokyContext):  # type: ignore[misc]  # loky has no types
    """Where loky gets its processes and locks from: the locks have no name, so nothing has to keep track of them."""

    Lock = Semaphore
    BoundedSemaphore = Semaphore

    def __init__(self) -> None:
        self.modules: frozenset[str] = frozenset()
        self.workers: dict[int, WorkerProcess] = {}

    def Process(self, **kwargs: Any) -> WorkerProcess:
        number = 0
        while number in self.workers and self.workers[number].exitcode is None:
            number += 1
        self.workers[number] = WorkerProcess(number, self.modules, **kwargs)
        return self.workers[number]


class _CallQueue(loky.process_executor._SafeQueue):  # type: ignore[misc]
    """loky's queue of calls, without the thread that pickles them and writes them to the pipe.

    Ours are short, and the pipe has room for as many as the queue may hold. So the manager thread writes them itself,
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


class _ResultQueue(loky.backend.queues.SimpleQueue):  # type: ignore[misc]
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


class _LokyPool(loky.process_executor.ProcessPoolExecutor):  # type: ignore[misc]
    """loky's pool, starting its processes one by one as they are needed."""

    def __init__(self, max_workers: int, **kwargs: Any) -> None:
        super().__init__(max_workers, **kwargs)
        self._size = max_workers
        self._max_workers = 0  # how many loky is to have now

    def _setup_queues(self, job_reducers: Any, result_reducers: Any, queue_size: int | None = None) -> None:
        size = 2 * self._max_workers + QUEUED_CALLS
        self._result_queue = _ResultQueue(reducers=result_reducers, ctx=self._context)
        self._call_queue = _CallQueue(
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

    def _ensure_executor_running(self) -> None:
        before = len(self._processes)
        self._max_workers = max(self._max_workers, min(self._size, len(self._pending_work_items)))
        super()._ensure_executor_running()
        if len(self._processes) > before:
            # 1. submit() woke the manager thread up; 2. it may have gone to sleep again, watching only the processes of
            # then; 3. were a new one to die now, nobody would notice. So wake it up again (submit holds the lock).
            self._executor_manager_thread_wakeup.wakeup()


class _Inherited:
    """A descriptor that arrives in the worker as its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.fd),)


def _detach(wrapper: Any) -> int:
    fd: int = wrapper.detach()
    return fd


class WorkerPool:
    """Up to ``max_workers`` processes that run functions.

    Args:
        max_workers: The most processes that it has at once.
        initializer: Called in each worker before its first task, with the worker's copies of the descriptors.
        fds: Descriptors that each worker inherits.
    """

    def __init__(self, max_workers: int, initializer: Callable[..., None], fds: tuple[int, ...]) -> None:
        self._max_workers = max_workers
        self._initializer = initializer
        self._fds = fds
        self._context = _Context()
        self._loky: _LokyPool | None = None  # made at the first task
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.killed: Exception | None = None  # with which error, if it was
        self._manager: threading.Thread | None = None
        _pools.add(self)

    def _start(self) -> _LokyPool:
        with self._lock:
            if self._loky is None:
                self._loky = _LokyPool(
                    self._max_workers,
                    context=self._context,
                    timeout=None,  # idle workers stay: their copy of the dataset is worth more than their memory
                    initializer=self._initializer,
                    initargs=tuple(_Inherited(fd) for fd in self._fds),
                )
            return self._loky

    def expect_modules(self, modules: Iterable[str]) -> None:
        """Have the workers that are still to come forked from a server with those of ``modules`` that are installed."""
        self._context.modules |= installed_modules(modules)

    def submit(self, fn: Callable[..., Result], *args: Any) -> "Future[Result]":
        """Run ``fn(*args)`` in a worker.

        Raises:
            BrokenExecutor: A worker has died.
            FifobatchError: The fork server cannot be started.
            RuntimeError: The pool was shut down, or the interpreter is exiting.
        """
        pool = self._start()
        future: Future[Result] = pool.submit(fn, *args)
        self._manager = pool._executor_manager_thread
        _register_exit_hook()
        return future

    @property
    def usable(self) -> bool:
        """Whether no worker has died and nobody has killed them."""
        return self.killed is None and (self._loky is None or self._loky._flags.broken is None)

    def dead_workers(self) -> list[str]:
        """Say which workers ended, and how.

        To be read at once when the first future breaks: a little later loky kills the others.
        """
        workers = list(self._context.workers.values())
        return [
            _describe(worker.pid, worker.exitcode) for worker in workers if worker.pid and worker.exitcode is not None
        ]

    def shutdown(self) -> None:
        """Let the workers end when their tasks are done. It does not wait for that."""
        if self._loky is not None and self.killed is None and os.getpid() == self._pid:
            self._loky.shutdown(wait=False)

    def join(self, timeout: float | None) -> bool:
        """Wait until all has ended after `shutdown` or `kill`; return whether it has.

        Args:
            timeout: Seconds; None for ever.
        """
        if self._manager is not None:
            self._manager.join(timeout)
        return self._manager is None or not self._manager.is_alive()

    def kill(self, error: Exception) -> None:
        """Kill the workers now, and wait for them; unfinished futures get ``error``."""
        self.killed = error
        pool = self._loky
        if pool is None or os.getpid() != self._pid:
            return
        pool._flags.flag_as_broken(error)
        # 1. The manager thread may be waking up from a sentinel, to kill what it finds in this dict in its own way;
        # 2. an empty dict leaves it nothing. Its lock is None once loky was shut down.
        pool._processes.clear()
        for worker in list(self._context.workers.values()):
            if worker.pid and worker.exitcode in (None, 255):  # 255: its fork server was killed, so nobody knows
                _end(worker.pid)
                worker.join()
        with pool._shutdown_lock:
            if pool._executor_manager_thread_wakeup is not None:
                pool._executor_manager_thread_wakeup.wakeup()


def _end(pid: int) -> None:
    """Kill a process and wait until it has ended, and with it all writing to shared memory.

    Its sentinel would not tell: that closes with its fork server, too.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an old kernel, a sandbox, or too many files open
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        connection.wait([fd])
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _describe(pid: int, exit_code: int) -> str:
    if exit_code == 255:  # its fork server is gone, so nobody could tell
        return f"pid {pid}"
    if exit_code >= 0:
        return f"pid {pid} ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"pid {pid} was killed by {name}{hint}"


def cpu_count() -> int:
    """Return the number of cores that this process may use: affinity and cgroups count."""
    return int(loky.cpu_count())


def loky_pool(max_workers: int) -> Executor:
    """Return a pool of loky's own: for systems without a fork server of ours."""
    pool: Executor = loky.process_executor.ProcessPoolExecutor(max_workers)
    return pool


_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()
_inherited_pools: list[Any] = []
_exit_hooks: list[Callable[[], None]] = []
_exit_hook_registered = False


def at_exit(hook: Callable[[], None]) -> None:
    """Have ``hook`` called at interpreter exit, before loky and threading wait for what still runs."""
    _exit_hooks.append(hook)


def _register_exit_hook() -> None:
    # loky registers its own hook at its first task, and hooks run in reverse order: so ours comes after that.
    global _exit_hook_registered
    if not _exit_hook_registered:
        _exit_hook_registered = True
        threading._register_atexit(_run_exit_hooks)  # type: ignore[attr-defined]


def _run_exit_hooks() -> None:
    for hook in _exit_hooks:
        hook()


def _forget_pools() -> None:
    # In a child of os.fork() the pools are the parent's. Keep loky's objects alive, as their finalizers take locks that
    # may be held for ever here. Keep loky's and multiprocessing's exit hooks from waking and joining what is not ours.
    for pool in list(_pools):
        _inherited_pools.append(pool._loky)
        if pool._manager is not None:
            loky.process_executor._threads_wakeups.pop(pool._manager, None)
        for worker in pool._context.workers.values():
            if worker._popen is not None and worker._popen.finalizer.still_active():  # None while it is being started
                os.close(worker._popen.lifeline)  # it is to see when the parent ends, not when this child does
    _pools.clear()


after_fork_in_child(_forget_pools)

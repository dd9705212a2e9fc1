"""Worker processes. With `processes`, the only modules that import loky's pool.

Runs in the parent: `WorkerPool.submit` in the thread that iterates, done callbacks in loky's manager thread.

loky is used for what it does well: queues, sentinels, and telling every future when a worker dies; `processes` says how
its pool differs from loky's own. And `WorkerPool.kill` kills the processes that it knows; loky's own way needs psutil,
or runs ``pgrep``.
"""

import contextlib
import copy
import os
import signal
import threading
import weakref
from collections.abc import Callable, Set
from concurrent.futures import Executor, Future
from functools import partial
from multiprocessing import connection, reduction
from typing import Any, NamedTuple, TypeVar

import loky.process_executor

from fifobatch.exits import after_fork_in_child
from fifobatch.processes import Context, LokyPool

__all__ = ["Death", "WorkerPool", "cpu_count", "loky_pool"]

Result = TypeVar("Result")


class _Inherited:
    """A descriptor that arrives in the worker as its own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.fd),)


def _detach(wrapper: Any) -> int:
    fd: int = wrapper.detach()
    return fd


class Death(NamedTuple):
    """A worker that has ended.

    Attributes:
        number: The worker's.
        pid: Its process id.
        how: What is known of its end, in words.
    """

    number: int
    pid: int
    how: str


class WorkerPool:
    """Up to ``max_workers`` processes that run functions.

    Args:
        max_workers: The most processes that it has at once.
        initializer: Called in each worker before its first task, with the worker's copies of the descriptors.
        fds: Descriptors that each worker inherits.
        on_broken: Called when a worker has died, in loky's manager thread (or when the pool is killed).
        first_number: The number of its first worker.
        modules: The installed modules that the fork server of workers still to come should have.

    Attributes:
        deaths: Which workers have died, filled before ``on_broken`` is called; those that were killed here or by loky
            afterwards are not among them.
        killed: With which error it was killed, if it was.
    """

    def __init__(
        self,
        max_workers: int,
        initializer: Callable[..., None],
        fds: tuple[int, ...],
        on_broken: Callable[[], object],
        first_number: int = 0,
        modules: Set[str] = frozenset(),
    ) -> None:
        self._arguments = max_workers, initializer, fds, on_broken, first_number, modules
        self.max_workers = max_workers
        self._initializer = initializer
        self._fds = fds
        self._on_broken = on_broken
        self._context = Context(first_number, modules)
        self._loky: LokyPool | None = None  # made at the first task
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.deaths: list[Death] = []
        self.killed: Exception | None = None
        self._manager: threading.Thread | None = None
        _pools.add(self)

    def renewed(self, max_workers: int | None = None, first_number: int | None = None) -> "WorkerPool":
        """Return a new pool like this one, or of another size or with other numbers; it starts with its first task."""
        size, initializer, fds, on_broken, first, modules = self._arguments
        number = first if first_number is None else first_number
        return WorkerPool(max_workers or size, initializer, fds, on_broken, number, modules)

    def _start(self) -> LokyPool:
        with self._lock:
            if self.killed is not None:
                raise copy.copy(self.killed)  # a traceback that grew with each would keep its callers
            if self._loky is None:
                self._loky = LokyPool(
                    self.max_workers,
                    partial(_note_deaths, self._context, self.deaths, self._on_broken),
                    context=self._context,
                    timeout=None,  # idle workers stay: their copy of the dataset is worth more than their memory
                    initializer=self._initializer,
                    initargs=tuple(_Inherited(fd) for fd in self._fds),
                )
            return self._loky

    def submit(self, fn: Callable[..., Result], *args: Any) -> "Future[Result]":
        """Run ``fn(*args)`` in a worker.

        Raises:
            BrokenExecutor: A worker has died.
            Exception: What it was killed with.
            FifobatchError: The fork server cannot be started.
            RuntimeError: The pool was shut down, or the interpreter is exiting.
        """
        pool = self._start()
        future: Future[Result] = pool.submit(fn, *args)
        self._manager = pool._executor_manager_thread
        return future

    @property
    def manager(self) -> threading.Thread | None:
        """The thread in which its futures are completed, loky's; None before the first task."""
        return self._manager

    @property
    def started(self) -> bool:
        """Whether it has had a task."""
        return self._loky is not None

    @property
    def numbers(self) -> dict[int, int]:
        """The pids of its workers, by their numbers, those that have ended included."""
        return {number: worker.pid or 0 for number, worker in list(self._context.workers.items())}

    @property
    def usable(self) -> bool:
        """Whether no worker has died and nobody has killed them."""
        return self.killed is None and (self._loky is None or self._loky._flags.broken is None)

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
            if self._manager.is_alive():
                return False
        # To loky, a worker whose fork server was killed has ended: it was told nothing, and waits for tasks.
        for worker in list(self._context.workers.values()):
            if worker.pid and worker.exitcode == 255:
                _end(worker.pid)
        return True

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


def _note_deaths(context: Context, deaths: list[Death], on_broken: Callable[[], object]) -> None:
    """Say which workers have ended, and how. A little later loky kills the others, and nobody could tell."""
    for number, worker in list(context.workers.items()):
        if worker.pid and worker.exitcode is not None and not (worker.exitcode == 255 and _lives(worker.pid)):
            deaths.append(Death(number, worker.pid, _describe(worker.pid, worker.exitcode)))
    on_broken()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
    if exit_code == 255:  # or its fork server is gone, and nobody could tell
        return f"pid {pid} ended"
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


def _forget_pools() -> None:
    # In a child of os.fork() the pools are the parent's. Keep loky's objects alive, as their finalizers take locks that
    # may be held for ever here.
    for pool in list(_pools):
        _inherited_pools.append(pool._loky)
        for worker in pool._context.workers.values():
            if worker._popen is not None and worker._popen.finalizer.still_active():  # None while it is being started
                os.close(worker._popen.lifeline)  # it is to see when the parent ends, not when this child does
    _pools.clear()


after_fork_in_child(_forget_pools)

"""What a loader's arguments have to be, beyond what torch checks. Runs in the thread that makes the loader."""

import functools
import multiprocessing
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from fifobatch.executor import BatchExecutor
from fifobatch.pool import cpu_count

__all__ = ["check_functions", "check_timeout", "may_have_children", "shared_executor", "warn_of_many_workers"]


@functools.cache
def _warn_daemonic() -> None:
    warnings.warn("a daemonic process may not have child processes: fifobatch loads in this process", stacklevel=5)


def may_have_children() -> bool:
    """Whether this process may have child processes; warn once if not."""
    daemonic = multiprocessing.current_process().daemon
    if daemonic:
        _warn_daemonic()
    return not daemonic


def shared_executor(
    executor: BatchExecutor | Executor, num_workers: int | None, worker_init_fn: Callable[[int], None] | None
) -> BatchExecutor:
    """Return ``executor`` for use by several loaders.

    Raises:
        TypeError: It is no executor.
        ValueError: It does not go with the other arguments.
    """
    if num_workers == 0:
        raise ValueError(f"num_workers=0 loads in this process, and executor={executor!r} elsewhere; give one of them")
    shared = executor if isinstance(executor, BatchExecutor) else BatchExecutor(executor=executor)
    if worker_init_fn is not None and not shared.has_own_workers:
        raise ValueError(f"worker_init_fn={worker_init_fn!r} cannot run in the workers of executor={executor!r}")
    return shared


def check_functions(**functions: Any) -> None:
    """Raise TypeError if one of them is neither None nor callable."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a function or leave it out")


def check_timeout(timeout: float, num_workers: int, shared: BatchExecutor | None) -> None:
    """Raise ValueError if a loader cannot keep its ``timeout``: nobody can be killed, or it is no number of seconds."""
    if not timeout <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout={timeout!r}: give seconds, or 0 for ever")
    if timeout > 0 and num_workers == 0:
        raise ValueError(f"timeout={timeout} needs worker processes: loading in this process cannot time out")
    if timeout > 0 and shared is not None and not shared.has_own_workers:
        raise ValueError(f"timeout={timeout} needs fifobatch's own workers: those of an executor passed in go on")


def warn_of_many_workers(num_workers: int, stacklevel: int) -> None:
    """Warn above two workers a core (torch warns above one; loading is often waiting)."""
    cores = cpu_count()
    if num_workers > 2 * cores:
        warnings.warn(
            f"num_workers={num_workers} is more than two a core: this process may use {cores}. Try "
            f"num_workers={2 * cores} or fewer, unless your samples mostly wait",
            stacklevel=stacklevel,
        )

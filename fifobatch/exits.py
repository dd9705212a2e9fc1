"""What is to be done when this process ends, or forks. Runs in whatever process imports it, in its main thread."""

import atexit
import os
import threading
from collections.abc import Callable
from multiprocessing import process

__all__ = ["after_fork_in_child", "at_exit", "end_daemon_thread", "end_with_main_thread"]

_exiting = threading.Event()
_registered: set[tuple[int, Callable[[], object]]] = set()


def after_fork_in_child(hook: Callable[[], object]) -> None:
    """Have ``hook`` called in each child of ``os.fork()``, where there is such a thing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=hook)


def at_exit(hook: Callable[[], object]) -> None:
    """Have ``hook`` called at interpreter exit, after what the user registered: call this when importing.

    multiprocessing's children call no such hooks: see `end_with_main_thread`.
    """
    atexit.register(_exit, hook)


def end_daemon_thread() -> None:
    """At interpreter exit, end this thread without a word if it is a daemon's: what it waited for will not come.

    Raises:
        SystemExit: It is. ``threading`` prints every other error.
    """
    if _exiting.is_set() and threading.current_thread().daemon:
        raise SystemExit


def _exit(hook: Callable[[], object]) -> None:
    _exiting.set()
    hook()


def end_with_main_thread(hook: Callable[[], object]) -> None:
    """In a child process of multiprocessing, have ``hook`` called when its main thread has ended. Idempotent."""
    if process.parent_process() is not None and (os.getpid(), hook) not in _registered:
        _registered.add((os.getpid(), hook))
        threading._register_atexit(hook)  # type: ignore[attr-defined]

"""What is to be done when this process ends, or forks. Runs in whatever process imports it, in its main thread."""

import atexit
import os
import threading
from collections.abc import Callable
from multiprocessing import process

__all__ = ["after_fork_in_child", "at_exit", "end_with_main_thread"]

_registered: set[tuple[int, Callable[[], object]]] = set()


def after_fork_in_child(hook: Callable[[], object]) -> None:
    """Have ``hook`` called in each child of ``os.fork()``, where there is such a thing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=hook)


def at_exit(hook: Callable[[], object]) -> None:
    """Have ``hook`` called at interpreter exit, after what the user registered: call this when importing.

    multiprocessing's children call no such hooks: see `end_with_main_thread`.
    """
    atexit.register(hook)


def end_with_main_thread(hook: Callable[[], object]) -> None:
    """In a child process of multiprocessing, have ``hook`` called when its main thread has ended. Idempotent."""
    if process.parent_process() is not None and (os.getpid(), hook) not in _registered:
        _registered.add((os.getpid(), hook))
        threading._register_atexit(hook)  # type: ignore[attr-defined]

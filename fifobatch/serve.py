"""What runs in a fork server, in its only thread: import, say how it went, then fork.

Only `read_report` runs in the parent, which reads there what `serve` says.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from multiprocessing import forkserver

__all__ = ["leave_to_parent", "read_report", "serve"]


def serve(listener_fd: int, alive_fd: int, report_fd: int, modules: list[str]) -> None:
    """Import ``modules``, say how it went, then fork a process for each request until ``alive_fd`` closes.

    Runs in the server process and never returns.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave_to_parent)
    if sys.stderr is None:  # the parent has closed it; loky's workers want it for faulthandler
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with open(report_fd, "w") as lines:

        def say(kind: str, value: object) -> None:
            try:
                print(json.dumps([kind, value]), file=lines, flush=True)
            except BrokenPipeError:  # the parent is gone
                os._exit(0)

        for name in modules:
            say("importing", name)
            try:
                importlib.import_module(name)
            except BaseException:  # SystemExit too: whatever the module raises, the worker will meet and report it
                pass
            if harm := _harm():
                say("spoiled", harm)
                break
        say("loaded", list(sys.modules))
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):
            stream.flush()  # what a module has printed would be printed again by each child
    # The children share these objects' pages as long as their collector leaves them alone.
    gc.collect()
    gc.freeze()
    try:
        forkserver.main(listener_fd, alive_fd, [])
    finally:
        os._exit(0)  # finalizing torch takes its time, and nothing here is worth it


def _harm() -> str:
    if len(os.listdir("/proc/self/task")) > 1:
        return "starts a thread, which a forked process would lack"
    if sys.modules["torch"].cuda.is_initialized():
        return "initialises CUDA, which a forked process cannot use"
    return ""


def leave_to_parent(signum: int, frame: object) -> None:
    """Handle a signal by doing nothing: Ctrl-C, and SIGTERM to the whole group, are the parent's to handle.

    A handler rather than SIG_IGN, which programs that a dataset starts would inherit.
    """


def read_report(fd: int) -> tuple[list[str] | None, str, str]:
    """Read what a starting server says of itself.

    Returns:
        Its modules, or None if it died; the module that it imported last; what that one did to it.
    """
    loaded, importing, spoiled = None, "", ""
    with open(fd) as lines:
        for line in lines:
            kind, value = json.loads(line)
            if kind == "importing":
                importing = value
            elif kind == "spoiled":
                spoiled = value
            else:
                loaded = value
    return loaded, importing, spoiled

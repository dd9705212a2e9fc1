"""The fork server: a warm process, with torch imported, that worker processes are forked from.

::

    parent process                          base server                       grown server
    servers.fork(process, modules) ------>  torch, NumPy, fifobatch  -fork->  + the installed packages that
        |                                                                       the dataset's pickle names
        `-- asks the one that has the modules to fork a worker  ------------------>  -fork->  worker

- The *base* server is a fresh interpreter (nothing is forked from the user's process, so its threads, locks and CUDA
  state are safe). It imports torch once, whatever the number of workers.
- A dataset whose pickle names installed packages gets a *grown* server: a fork of the one before that imports them,
  once. Never the user's own files, which may be edited between two cells. A package that fails, exits or starts threads
  there is left to the workers themselves, and named once in a warning; the base server is out of its reach.
- They serve as long as somebody holds a `lease`, and leave `LINGER_SECONDS` after the last one ended: the next loader
  finds them warm. They also leave when the parent dies, since they watch a pipe that it holds.

Protocol and child side are the standard library's (``multiprocessing.forkserver.main``); its start is not, because that
has the working directory first on its path, dies of a preloaded module that raises, keeps the environment of
its first start, and raises ``ChildProcessError`` after ``os.fork()``. Its address is not either: the socket's
file is unlinked as soon as the parent holds it open, so nobody else can reach it and nothing is left on disk.

All this runs in the parent, under `_Servers`' lock; what runs in the servers is in `serve`.
"""

import contextlib
import functools
import io
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from multiprocessing import forkserver, process, reduction, resource_tracker, util
from multiprocessing.context import set_spawning_popen
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from fifobatch.errors import FifobatchError
from fifobatch.exits import after_fork_in_child, at_exit, end_with_main_thread
from fifobatch.packages import install_path
from fifobatch.serve import read_report, serve

__all__ = ["ServedPopen", "available", "servers"]

ATTEMPTS = 5  # to start a server that is killed, until that is an error
LINGER_SECONDS = 2.0  # long enough for one loader after another, short enough not to be found after the work

# Linux only: macOS's frameworks do not survive a fork, and Windows has none.
available = sys.platform == "linux" and reduction.HAVE_SEND_HANDLE
if reduction.HAVE_SEND_HANDLE:
    from multiprocessing.popen_forkserver import Popen
else:
    Popen = object  # type: ignore[assignment,misc]  # nothing is started this way


class Forked(NamedTuple):
    """A process forked by a server, as its parent sees it.

    Attributes:
        pid: Its process id.
        sentinel: Becomes readable when it ends: its exit code.
        lifeline: Write end of its pipe; it sees it close when this process is gone.
    """

    pid: int
    sentinel: int
    lifeline: int


class ServedPopen(Popen):
    """How a multiprocessing ``Process`` is started here: by asking a fork server."""

    method = "fifobatch"
    _fds: list[int]  # what the child inherits

    def _launch(self, process_obj: Any) -> None:
        fds, data = _pickle_process(self, process_obj)
        self._follow(servers.fork(fds, data, process_obj.modules))

    def _follow(self, forked: Forked) -> None:
        self.pid, self.sentinel, self.lifeline = forked
        fds = (forked.lifeline, forked.sentinel)
        self.finalizer = util.Finalize(self, util.close_fds, fds)  # type: ignore[attr-defined]  # missing in typeshed


def _pickle_process(popen: ServedPopen, process_obj: Any) -> tuple[list[int], memoryview]:
    buffer = io.BytesIO()
    # Without init_main_from_*: scripts need no main guard. Without sys_path and dir: the worker takes them from the
    # plan's context.
    preparation = {"name": process_obj.name, "authkey": process.current_process().authkey, "sys_argv": sys.argv}
    set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        set_spawning_popen(None)
    return popen._fds, buffer.getbuffer()


class _Server:
    """One running server, as the parent sees it.

    Args:
        door: Descriptor of the unlinked socket file to connect to.
        alive: Write end of the pipe whose closing tells the server to leave.
        kill: Ends the process and waits for it.
        modules: The modules that it has imported.
    """

    def __init__(self, door: int, alive: int, kill: Callable[[], object], modules: Collection[str]) -> None:
        self._door = door
        self._alive = alive
        self._kill = kill
        self.modules = frozenset(modules)

    def fork(self, fds: list[int], data: memoryview) -> Forked:
        """Fork a process that inherits ``fds`` and runs the process object pickled in ``data``.

        Raises:
            ConnectionError, EOFError: The server is dead.
            OSError: There are too many files open.
        """
        with _Pipe() as status, _Pipe() as lifeline:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"/proc/self/fd/{self._door}")
                tracker = resource_tracker._resource_tracker.getfd()
                assert tracker is not None
                reduction.sendfds(client, [lifeline.reader, status.writer, self._alive, tracker, *fds])
            # Without our own copies of the child's ends, what follows fails instead of waiting when the child dies.
            status.close_writer()
            lifeline.close_reader()
            with open(os.dup(lifeline.writer), "wb") as stream:
                stream.write(data)
            pid = forkserver.read_signed(status.reader)
            return Forked(pid, status.detach_reader(), lifeline.detach_writer())

    def stop(self) -> None:
        """End the server, and wait until it is gone. Workers that it forked live on."""
        self._kill()
        self.drop()

    def drop(self) -> None:
        """Close this process's descriptors of it: in a forked child, which must not disturb it."""
        os.close(self._door)
        os.close(self._alive)


class _Pipe:
    """Both ends of a pipe; those not detached are closed at the end of a ``with`` block."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def __enter__(self) -> "_Pipe":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_reader()
        self.close_writer()

    def detach_reader(self) -> int:
        reader, self.reader = self.reader, -1
        return reader

    def detach_writer(self) -> int:
        writer, self.writer = self.writer, -1
        return writer

    def close_reader(self) -> None:
        if self.reader >= 0:
            os.close(self.detach_reader())

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.detach_writer())


class _Servers:
    """The servers of this process: the base, and those grown from it, each from the one before."""

    def __init__(self) -> None:
        self._reset()
        after_fork_in_child(self._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # held while a server starts or forks
        self._chain: list[_Server] = []
        self._refused: set[str] = set()  # modules that a server cannot have; kept, so that each is tried once
        self._leases: queue.SimpleQueue[int] = queue.SimpleQueue()  # +1 and -1
        self._keeper: threading.Thread | None = None
        self._popen: subprocess.Popen[bytes] | None = None  # the base server's

    def _forget(self) -> None:
        # In a child of os.fork() the lock may be held by a thread that is not there, and the servers are the parent's.
        chain, popen = self._chain, self._popen
        self._reset()
        for server in chain:
            server.drop()
        if popen is not None:
            popen.returncode = 0  # not ours to wait for: no ResourceWarning

    def lease(self) -> Callable[[], None]:
        """Keep the servers warm until the returned function is called, once.

        It may be called from a finalizer, in any thread and inside any lock: all it does is a `SimpleQueue.put`.
        """
        end_with_main_thread(self.stop)
        with self._lock:
            self._leases.put(1)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="fifobatch-server-keeper", daemon=True)
                self._keeper.start()
        return functools.partial(self._leases.put, -1)

    def _keep(self) -> None:
        """Count leases; stop the servers a little after the last one ended (in a thread of its own)."""
        held = 0
        while True:
            try:
                held += self._leases.get(timeout=None if held else LINGER_SECONDS)
            except queue.Empty:
                # A lease made meanwhile is in the queue already, or waits for the lock and then starts a new keeper.
                with self._lock:
                    if self._leases.empty():
                        self._keeper = None
                        self._stop()
                        return

    def stop(self) -> None:
        """End the servers now; the next fork starts new ones."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        while self._chain:
            self._chain.pop().stop()

    def fork(self, fds: list[int], data: memoryview, modules: Collection[str]) -> Forked:
        """Fork a process from a server that has the given modules imported; starts what is missing.

        Args:
            fds: Descriptors that the process inherits.
            data: Preparation data and process object, pickled one after the other.
            modules: Names of installed modules; see `packages`.

        Raises:
            FifobatchError: No server can be started.
        """
        with self._lock:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return self._server_with(modules).fork(fds, data)
                except (ConnectionError, EOFError) as error:
                    # It was killed: start afresh. Any other error leaves it be, as others' workers need it.
                    self._stop()
                    if attempt == ATTEMPTS:
                        raise FifobatchError(f"the fork server was killed {ATTEMPTS} times ({error})") from error
        raise AssertionError

    def _server_with(self, modules: Collection[str]) -> _Server:
        if not self._chain:
            self._chain.append(self._start())
        while True:
            missing = {name for name in modules if not {name, _package(name)} & self._refused}
            missing -= self._chain[-1].modules
            if not missing:
                return self._chain[-1]
            server = self._grow(self._chain[-1], sorted(missing))
            if server is not None:
                self._chain.append(server)

    def _start(self) -> _Server:
        """Start the base server: a fresh interpreter."""
        # OpenBLAS and OpenMP would start threads at import, and threads do not survive a fork. loky would retire
        # workers whose memory grew: mapped datasets and caches are legitimate here.
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "LOKY_MAX_MEMORY_LEAK_SIZE": str(2**62),
        }
        modules = ["numpy"] if "numpy" in sys.modules else []
        with _Pipe() as report, _Pipe() as alive, _listener() as (listener, door):
            fds = (listener.fileno(), alive.reader, report.writer)
            code = (
                # Ctrl-C is the parent's to handle, also while torch is imported there.
                "import signal; signal.signal(signal.SIGINT, lambda *_: None); "
                # The parent has seen this one when it imported torch itself.
                "import warnings; warnings.filterwarnings('ignore', 'Failed to initialize NumPy'); "
                f"import sys; sys.path[:] = {install_path()!r}; "
                f"from fifobatch.serve import serve; serve(*{fds}, {modules!r})"
            )
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
            self._popen = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env=environment,
                cwd="/",
            )
            popen = self._popen
            report.close_writer()
            try:
                loaded, _, _ = read_report(report.detach_reader())
            except BaseException:  # an interrupt, while torch is imported
                popen.kill()
                popen.wait()
                raise
            if loaded is None and popen.wait() < 0:
                raise ConnectionResetError(f"killed by signal {-popen.returncode} while it was starting")
            if loaded is None:
                raise FifobatchError(
                    f"the fork server could not start (exit code {popen.returncode}); "
                    "its traceback is on stderr. The workers would not start either: mend that first"
                )

            def kill() -> None:
                popen.kill()
                popen.wait()

            return _Server(os.dup(door), alive.detach_writer(), kill, loaded)

    def _grow(self, server: _Server, missing: list[str]) -> _Server | None:
        """Fork a server off ``server`` that imports ``missing``; None if one of them was refused."""
        with _Pipe() as report, _Pipe() as alive, _listener() as (listener, door):
            fds = [listener.fileno(), alive.reader, report.writer]
            popen = ServedPopen.__new__(ServedPopen)
            popen.returncode, popen._fds = None, fds
            _, data = _pickle_process(popen, _GrownServer(missing))
            popen._follow(server.fork(fds, data))
            report.close_writer()
            loaded, importing, spoiled = read_report(report.detach_reader())

            def kill() -> None:
                try:
                    os.kill(popen.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                popen.wait()

            if loaded is not None and not spoiled:
                self._refused.update(set(missing) - set(loaded))  # those that raised: the worker's to report
                return _Server(os.dup(door), alive.detach_writer(), kill, loaded)
            kill()
            # Of a package that starts a thread each module does so.
            self._refused.update([_package(importing)] if importing else missing)
            warnings.warn(
                f"importing {importing} {spoiled or 'ends the process'}, so each fifobatch worker imports it by itself",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


class _GrownServer(process.BaseProcess):
    """The process object of a grown server; never `start`ed, only pickled."""

    _start_method = None  # leaves the child's default as it is

    def __init__(self, modules: list[str]) -> None:
        super().__init__(name="fifobatch-server")
        self._modules = modules

    def run(self) -> None:
        """Serve (in the child)."""
        listener, alive, report = forkserver.get_inherited_fds()  # type: ignore[misc]  # not None: it was forked there
        serve(listener, alive, report, self._modules)


def _package(module: str) -> str:
    return module.partition(".")[0]


servers = _Servers()
at_exit(servers.stop)  # before anything is imported that registers a hook which needs them


class _listener:
    """A listening socket, and a descriptor of its file by which it can be reached after the file is unlinked."""

    def __enter__(self) -> tuple[socket.socket, int]:
        with contextlib.ExitStack() as undo, TemporaryDirectory(prefix="fifobatch-") as path:
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX))
            folder = os.open(path, os.O_PATH)
            undo.callback(os.close, folder)
            door = f"/proc/self/fd/{folder}/door"  # the folder's own name may be too long for a socket
            self._socket.bind(door)
            self._door = os.open(door, os.O_PATH)
            self._socket.listen()
            undo.pop_all()
            os.close(folder)
        return self._socket, self._door

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()
        os.close(self._door)

"""Fixtures for tests that start processes: scripts of their own, waiting without sleeping, and a check for leaks."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from probes import TIMEOUT, Gate

from fifobatch import FifoLoader
from fifobatch.server import servers

_MARK = "FIFOBATCH_TEST_SCRIPT"
_passed = pytest.StashKey[bool]()


class Finished(NamedTuple):
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


class Script:
    """Text that runs as a program of its own, in a process group of its own.

    Its processes are found by a mark in their environment, also those that have lost their parents.
    """

    def __init__(
        self, folder: Path, source: str, how: str, modules: dict[str, str], environment: dict[str, str]
    ) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        folder.mkdir()
        for name, text in {"script": source, **modules}.items():
            (folder / f"{name}.py").write_text(text)
        arguments, stdin = {
            "file": (["script.py"], ""),
            "module": (["-m", "script"], ""),
            "command": (["-c", source], ""),
            "stdin": (["-"], source),
        }[how]
        (folder / "stdin").write_text(stdin)
        path = [str(Path(__file__).parent), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (
            open(folder / "stdin") as standard_input,
            open(folder / "stdout", "w") as standard_output,
            open(folder / "stderr", "w") as standard_error,
        ):
            self._popen = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path), _MARK: self._mark} | environment,
                stdin=standard_input,
                stdout=standard_output,
                stderr=standard_error,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """Return the pids of all its processes, resource trackers included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                pass
        return found

    def interrupt(self) -> None:
        """SIGINT the script itself."""
        self._popen.send_signal(signal.SIGINT)

    def interrupt_all(self) -> None:
        """Do what Ctrl-C in a terminal does: SIGINT the whole process group."""
        os.killpg(self._popen.pid, signal.SIGINT)

    def interrupt_others(self) -> None:
        """SIGINT its processes, but for the script itself."""
        for pid in self.processes():
            if pid != self._popen.pid:
                os.kill(pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM the script itself."""
        self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL the script itself."""
        self._popen.kill()

    def finish(self) -> Finished:
        """Wait for its end, and that it leaves no process."""
        returncode = self._popen.wait(TIMEOUT)
        await_end(self.processes())
        return Finished(returncode, *((self._folder / name).read_text() for name in ("stdout", "stderr")))

    def clean_up(self) -> None:
        """Kill what is left of it, but for resource trackers, which then tidy up and leave."""
        for pid in self.processes():
            try:
                if not any("resource_tracker" in word for word in psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                pass
        self._popen.wait()
        await_end(self.processes())


def await_end(pids: list[int], timeout: float = 10.0) -> None:
    """Wait for processes to end, whosever children they are; a zombie has ended."""
    waiting = {}
    for pid in pids:
        try:
            waiting[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            pass
    try:
        left = dict(waiting)
        while left:
            ended = connection.wait(left, timeout)
            assert ended, f"still there after {timeout:g} s: {[_describe(pid) for pid in left.values()]}"
            for fd in ended:
                del left[fd]  # type: ignore[arg-type]
    finally:
        for fd in waiting:
            os.close(fd)


def _describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{pid}, which ended now"


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Return ``start(source, how="file", modules={}, **environment) -> Script``.

    ``how`` may be module, command or stdin, too; ``modules`` are further files to write, by name.
    """
    scripts: list[Script] = []

    def start(source: str, how: str = "file", modules: dict[str, str] | None = None, **environment: str) -> Script:
        script = Script(tmp_path / f"script{len(scripts)}", source, how, modules or {}, environment)
        scripts.append(script)
        return script

    yield start
    for script in scripts:
        script.clean_up()


@pytest.fixture
def run_script(start_script: Callable[..., Script]) -> Callable[..., Finished]:
    """Return ``run(...) -> Finished``, with ``start``'s arguments. A hang or a process that is left is a failure."""
    return lambda *args, **kwargs: start_script(*args, **kwargs).finish()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate that the test opens."""
    gate = Gate.make(tmp_path)
    yield gate
    gate.close()


@pytest.fixture(scope="module", autouse=True)
def _warm_server() -> Iterator[None]:
    """Have one fork server for all tests: starting one imports torch. A module that tests the server overrides this."""
    end = servers.lease()
    yield
    end()


# -- leaks ------------------------------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Let the collector look at what tests make, and not at all of torch each time that one calls it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


def supervisors() -> set[threading.Thread]:
    """Return the threads of executors that have not ended."""
    return {thread for thread in threading.enumerate() if thread.name == "fifobatch-supervisor"}


def await_supervisors(known: set[threading.Thread]) -> None:
    """Wait until executors have ended, but for those that were ``known`` before."""
    if supervisors() - known:
        gc.collect()
    for thread in supervisors() - known:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "an executor that nobody refers to has not ended"


def _arenas(process: int | str = "self") -> int:
    """Count a process's descriptors of arenas: a worker has one, a server none."""
    folder, count = f"/proc/{process}/fd", 0
    for fd in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            count += os.readlink(f"{folder}/{fd}").startswith("/memfd:fifobatch")
        except FileNotFoundError:  # closed meanwhile
            pass
    return count


def _descendants(process: int | str = "self") -> Iterator[int]:
    """Yield the pids of its children and theirs, without a look at every process of the machine as psutil takes."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        for pid in map(int, pids):
            yield pid
            yield from _descendants(pid)


def _workers() -> set[int]:
    return {pid for pid in _descendants() if _arenas(pid)}


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that what the test started has ended: supervisors, worker processes, arenas."""
    known, arenas, workers = supervisors(), _arenas(), _workers()
    yield
    if not request.node.stash.get(_passed, False):
        return  # the traceback keeps its objects alive
    await_supervisors(known)
    await_end(list(_workers() - workers))
    if _arenas() > arenas:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("fifobatch-prepare"):  # it may be at its last batch
                thread.join(10.0)
        gc.collect()
    assert _arenas() <= arenas, "an arena is left"


def footprint() -> Counter[str]:
    """Return what this process has: children, descriptors, mappings of arenas, and what lies in /dev/shm."""
    # Other programs' come and go.
    names = [
        name for name in os.listdir("/dev/shm") if not re.match("sem.loky-|torch_", name) or f"{os.getpid()}" in name
    ]
    found = Counter(f"shared memory {name}" for name in names)
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        found["descriptor of " + re.sub(r"\d+", "", target)] += 1
    with open("/proc/self/maps") as maps:
        found["mapping of an arena"] = sum("memfd:fifobatch" in line for line in maps)
    for child in psutil.Process().children(recursive=True):
        found[f"child {child.pid}"] += 1
    return found


@pytest.fixture(scope="module")
def warm_server() -> Iterator[None]:
    """Have one fork server for all tests of a module, started."""
    end = servers.lease()
    assert [batch.tolist() for batch in FifoLoader([7], num_workers=1)] == [[7]]
    yield
    end()


@pytest.fixture
def nothing_left(warm_server: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that after the test this process has no more than before, beside the warm fork server."""
    known = supervisors()
    before = footprint()
    yield
    if request.node.stash.get(_passed, False):
        await_supervisors(known)
        gc.collect()
        assert not (more := footprint() - before), more

"""The fork server, and what surrounds the workers that come from it. Packages here are hostile, processes get killed.

Tests of this module share one warm server where they can: starting one imports torch.
"""

import contextlib
import errno
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Finished, Script, await_end, await_supervisors, supervisors
from probes import TIMEOUT, Calls, Gate, load, load_inside, pass_gate, processes, surroundings

from fifobatch import ClosedError, FifoLoader, server
from fifobatch import pool as pool_module
from fifobatch.pool import WorkerPool
from fifobatch.server import servers

RunScript = Callable[..., Finished]
StartScript = Callable[..., Script]
WriteModule = Callable[[Path, str, str], Any]

# Set by a test after the server has started: the workers and the test's own process have it, the server has not.
OUTSIDE = "FIFOBATCH_TEST_OUTSIDE"


@pytest.fixture(scope="module", autouse=True)
def _warm_server() -> None:
    """Override the lease that other modules' tests have."""


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Have a folder of installed packages, and a server that knows it and stays warm between tests."""
    folder = tmp_path_factory.mktemp("environment") / "site-packages"
    folder.mkdir()
    servers.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(server, "LINGER_SECONDS", 600.0)
        yield folder
    servers.stop()


@pytest.fixture
def write_module() -> Iterator[WriteModule]:
    """Return ``write(folder, name, source)``: writes a module, and imports it here."""
    names = []

    def write(folder: Path, name: str, source: str) -> Any:
        (folder / f"{name}.py").write_text(source)
        names.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def chain() -> list[int]:
    """Return the pids of the fork servers that a new worker comes from, the base last. Starts them if need be."""
    [sample] = load(Calls(1, processes))
    return list(sample[1 : sample.index(os.getpid())])


def test_the_server_stays_while_an_iterated_loader_is_there_and_leaves_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LINGER_SECONDS", 0.05)
    dropped, closed = (FifoLoader(Calls(1, processes), num_workers=1, collate_fn=list) for _ in range(2))
    [[sample]] = dropped
    assert list(closed)
    base = psutil.Process(sample[sample.index(os.getpid()) - 1])
    closed.close()
    with pytest.raises(psutil.TimeoutExpired):
        base.wait(timeout=1.0)
    del dropped
    await_end([base.pid])


HARM = {
    "raises": "raise RuntimeError('not here')",
    "leaves": "sys.exit('not here')",
    "dies": "os._exit(3)",
    "starts_a_thread": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "starts_a_thread_and_raises": (
        "threading.Thread(target=threading.Event().wait, daemon=True).start(); raise RuntimeError('not here')"
    ),
    "is_killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("name", HARM)
def test_a_package_that_does_harm_in_the_server(
    name: str, site: Path, write_module: WriteModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = chain()
    monkeypatch.setenv(OUTSIDE, "1")
    bad = write_module(
        site,
        f"package_that_{name}",
        f"""
import os, signal, sys, threading
if {OUTSIDE!r} not in os.environ:
    {HARM[name]}
IMPORTED_BY = os.getpid()
def sample(index, other):
    return index, os.getpid(), IMPORTED_BY, other.IMPORTED_BY
""",
    )
    good = write_module(site, f"zebra_beside_{name}", "import os; IMPORTED_BY = os.getpid()")  # comes after the bad one
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = load(Calls(4, bad.sample, good))
        after = chain()
        assert len(load(Calls(4, bad.sample, good))) == 4
    assert [index for index, *_ in sorted(samples)] == [0, 1, 2, 3]
    assert all(bad_pid == worker for _, worker, bad_pid, _ in samples)  # left to the workers
    assert {good_pid for *_, good_pid in samples} == {after[0]}
    assert all(warning.category is RuntimeWarning and bad.__name__ in str(warning.message) for warning in caught)
    assert len(caught) <= 1
    # The same base server, and one grown from it that has no thread.
    assert after[1:] == before
    assert psutil.Process(after[0]).num_threads() == 1


def test_an_installed_package_is_imported_once_for_all_workers(
    site: Path, write_module: WriteModule, tmp_path: Path, gate: Gate
) -> None:
    log = tmp_path / "imports"
    source = f"""
import os
with open({str(log)!r}, "a") as log:
    print(__name__, os.getpid(), file=log)
class Mark: pass
"""
    first = write_module(site, "package_first", source)
    second = write_module(site, "package_second", source)
    log.unlink()  # those were our own imports

    before = chain()
    iterator = iter(FifoLoader(Calls(4, pass_gate, gate, first.Mark), num_workers=4, collate_fn=list))
    workers = set(gate.arrivals(4))
    assert len(workers) == 4
    gate.open(4)
    assert {pid for [pid] in iterator} == workers
    grown = chain()
    assert grown[1:] == before
    assert log.read_text().split() == ["package_first", str(grown[0])]

    load(Calls(4, processes, second.Mark, first.Mark), num_workers=4)
    assert chain()[1:] == grown
    assert log.read_text().split()[2:] == ["package_second", str(chain()[0])]


def test_the_users_own_files_are_imported_by_each_worker_as_they_are_now(
    write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os; IMPORTED_BY = os.getpid()\ndef sample(index): return {}, IMPORTED_BY, os.getpid()"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    own = write_module(tmp_path, "own_module", source.format("'old'"))
    assert all(text == "old" and by == worker for text, by, worker in load(Calls(4, own.sample)))
    (tmp_path / "own_module.py").write_text(source.format("'edited'"))  # of another length: no stale bytecode
    assert all(text == "edited" and by == worker for text, by, worker in load(Calls(4, own.sample)))


@pytest.mark.parametrize("which", ["grown", "base"])
def test_a_server_that_was_killed_between_two_loaders(which: str, site: Path, write_module: WriteModule) -> None:
    mark = write_module(site, f"package_before_{which}", "class Mark: pass").Mark
    load(Calls(1, processes, mark))
    grown, *_, base = chain()
    assert grown != base
    killed = grown if which == "grown" else base
    os.kill(killed, signal.SIGKILL)
    await_end([killed])
    other = write_module(site, f"package_after_{which}", "class Mark: pass").Mark
    for samples in (load(Calls(4, processes, mark)), load(Calls(4, processes, mark, other))):
        assert len(samples) == 4
        assert not any(killed in sample for sample in samples)
    servers.stop()  # a grown server does not need the base: end both


def test_servers_that_are_killed_while_the_iteration_goes_on(gate: Gate) -> None:
    pids = chain()
    iterator = iter(FifoLoader(Calls(6, pass_gate, gate), num_workers=2, collate_fn=list, timeout=TIMEOUT))
    workers = gate.arrivals(2)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    gate.open(100)  # more than samples: a worker may pass and end before its answer counts, then it is loaded again
    assert len(list(iterator)) == 6
    await_end(workers)
    assert len(load(Calls(4, processes))) == 4


def test_killed_workers_have_ended_though_their_server_is_gone() -> None:
    pool = WorkerPool(2, dict, (), lambda: None)
    futures = [pool.submit(signal.pause) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        ends = []
        for worker in pool._context.workers.values():
            ends.append(os.pidfd_open(worker.pid))
            stack.callback(os.close, ends[-1])
        assert len(ends) == 2
        servers.stop()
        pool.kill(ClosedError("the test's"))
        assert len(connection.wait(ends, timeout=0)) == 2  # they can write to no slot any more
    for future in futures:
        assert isinstance(future.exception(TIMEOUT), Exception)
    assert pool.join(TIMEOUT)


@pytest.mark.parametrize("who", ["we", "somebody"])
def test_a_pool_whose_workers_were_killed_keeps_nobody_who_submits(who: str) -> None:
    pool = WorkerPool(1, dict, (), lambda: None)
    pid = pool.submit(os.getpid).result(TIMEOUT)
    future = pool.submit(signal.pause)
    if who == "we":
        pool.kill(ClosedError("the test's"))
    else:
        os.kill(pid, signal.SIGKILL)
    assert isinstance(future.exception(TIMEOUT), Exception)

    def submit() -> weakref.ref[Any]:
        mine = Calls(0, str)
        try:
            pool.submit(os.getpid)
        except (ClosedError, BrokenExecutor):
            return weakref.ref(mine)
        raise AssertionError("it takes tasks")

    gc.collect()
    gc.disable()
    try:
        assert submit()() is None
    finally:
        gc.enable()
    pool.kill(ClosedError("the test's"))
    assert pool.join(TIMEOUT)


def test_workers_end_at_shutdown_though_their_server_is_gone(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pool = WorkerPool(1, dict, (), lambda: None)
    future = pool.submit(os.open, str(fifo), os.O_RDONLY)  # which waits for a writer

    def end_server_then_pool(_: object) -> None:
        # In the manager thread, which so sees the shutdown before it sees that the worker's sentinel is closed.
        servers.stop()
        pool.shutdown()

    future.add_done_callback(end_server_then_pool)
    with open(fifo, "wb"):
        future.result(TIMEOUT)
    assert pool.join(TIMEOUT)
    await_end(list(pool.numbers.values()), timeout=0)


def _refuse(*args: Any) -> Any:
    raise PermissionError(errno.EPERM, "not in this sandbox")


@pytest.mark.parametrize("pidfd", ["is there", "is missing", "is refused"])
def test_killing_with_and_without_a_pidfd(pidfd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        end = os.pidfd_open(child.pid)
        if pidfd == "is missing":
            monkeypatch.delattr(os, "pidfd_open")
        elif pidfd == "is refused":
            monkeypatch.setattr(os, "pidfd_open", _refuse)
        pool_module._end(child.pid)
        assert connection.wait([end], timeout=0 if pidfd == "is there" else TIMEOUT)
        assert child.wait() == -signal.SIGKILL
        pool_module._end(child.pid)  # nobody is there any more
        os.close(end)


def test_sys_path_directory_and_environment_are_those_of_iter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "FIFOBATCH_TEST_VARIABLE"
    seen = set()
    with FifoLoader(
        Calls(4, surroundings, variable), num_workers=2, persistent_workers=True, collate_fn=list
    ) as loader:
        for name in ("one", "two", None):
            folder = tmp_path / str(name)
            folder.mkdir()
            monkeypatch.chdir(folder)
            monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
            if name is None:
                monkeypatch.delenv(variable)
            else:
                monkeypatch.setenv(variable, name)
            environment = dict(os.environ)
            samples = [sample for [sample] in loader]
            assert {sample[1:] for sample in samples} == {(str(folder), name, str(folder))}
            seen |= {sample[0] for sample in samples}
            assert dict(os.environ) == environment
    assert len(seen) <= 2  # the same workers all along


def test_what_the_server_needs_in_its_environment_is_not_the_workers() -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LOKY_MAX_MEMORY_LEAK_SIZE")
    for name in names:
        assert {sample[2] for sample in load(Calls(2, surroundings, name))} == {os.environ.get(name)}


def test_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert len(load(Calls(4, processes))) == 4


def test_nothing_is_left_on_disk_and_nobody_else_can_reach_the_server(
    site: Path, write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain()
    folder = tmp_path / ("deep" * 30)  # a socket's address has 108 bytes
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    load(Calls(4, processes, write_module(site, "package_for_a_new_socket", "class Mark: pass").Mark))
    assert len(chain()) > 1
    assert list(folder.iterdir()) == []


def test_descriptors_and_shared_memory_do_not_grow(gate: Gate) -> None:
    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/dev/shm/")

    def one_epoch(persistent: bool) -> None:
        with FifoLoader(range(8), num_workers=2, persistent_workers=persistent) as loader:
            next(iter(loader))
            assert len(list(loader)) == 8
        await_supervisors(known)

    known = supervisors()
    one_epoch(True)
    before = count()
    for persistent in (True, False) * 3:
        one_epoch(persistent)
    assert count() == before


# -- processes that are not the main one ------------------------------------------------------------------------------


def _load_and_send(writer: Any) -> None:
    writer.send((load_inside(0), len(psutil.Process().children())))


def test_a_daemonic_process_loads_by_itself_and_warns_once() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        process = multiprocessing.get_context("fork").Process(target=_load_and_send, args=(writer,), daemon=True)
        process.start()
        assert reader.poll(TIMEOUT)
        (samples, caught), children = reader.recv()
        process.join()
    assert {sample[0] for sample in samples} == {process.pid}
    assert len(samples) == 8
    assert len(caught) == 1
    assert "daemonic" in caught[0]
    assert children == 0


def test_a_worker_of_torchs_own_loader_loads_by_itself() -> None:
    loader = torch.utils.data.DataLoader(
        Calls(1, load_inside), num_workers=1, collate_fn=list, multiprocessing_context="fork"
    )
    [[(samples, caught)]] = loader
    assert len(samples) == 8
    assert {sample[1] for sample in samples} == {os.getpid()}  # its parent
    assert len(caught) == 1


def test_a_loader_inside_a_worker_leaves_no_grandchild() -> None:
    known = {os.getpid(), *chain()}
    [(samples, caught)] = load(Calls(1, load_inside))
    assert caught == []
    assert len(samples) == 8
    pids = {pid for sample in samples for pid in sample[: sample.index(os.getpid())]} - known
    assert len(pids) >= 3  # our worker, its server, a worker of that
    await_end(list(pids))


AFTER_FORK = """
import gc, os, sys
from fifobatch import ClosedError, FifoLoader

def epoch(loader):
    return sorted(number for batch in loader for number in batch.tolist())

loader = FifoLoader(range(40), batch_size=2, num_workers=2, window=4)
persistent = FifoLoader(range(5), num_workers=2, persistent_workers=True)
assert epoch(persistent) == list(range(5))
iterator = iter(loader)
seen = next(iterator).tolist()
pid = os.fork()
if pid == 0:
    try:
        next(iterator)
    except ClosedError:
        pass
    else:
        os._exit(1)
    assert epoch(FifoLoader(range(6), num_workers=2)) == list(range(6))  # one of its own
    assert epoch(loader) == list(range(40))  # the inherited ones, anew
    assert epoch(persistent) == list(range(5))
    del iterator
    gc.collect()
    sys.exit(7)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert sorted(seen + epoch(iterator)) == list(range(40))
assert epoch(persistent) == list(range(5))
print("done")
"""


def test_fork_while_an_iterator_is_alive(run_script: RunScript) -> None:
    assert run_script(AFTER_FORK) == (0, "done\n", "")


@pytest.mark.slow
def test_fork_before_the_first_loader_and_no_word_at_the_childs_exit(run_script: RunScript) -> None:
    source = """
import os, sys, warnings
warnings.simplefilter("always")
from fifobatch import FifoLoader
if os.fork() == 0:
    iterator = iter(FifoLoader(range(40), num_workers=2))
    next(iterator)
    sys.exit(0)
_, status = os.wait()
print(status)
"""
    assert run_script(source) == (0, "0\n", "")


def test_nothing_starts_before_there_is_something_to_load(run_script: RunScript) -> None:
    source = """
import threading
import psutil
from fifobatch import BatchExecutor, BatchPlan, FifoLoader

def started():
    return psutil.Process().children(), threading.enumerate() == [threading.main_thread()]

print("import", *started())
loader = FifoLoader(range(10), num_workers=2, persistent_workers=True)
len(loader)
print("loader", *started())
executor = BatchExecutor(2)
print("executor", *started())
print(list(FifoLoader([], num_workers=2)), list(executor.as_completed(BatchPlan([]))))
print("empty", *started())
"""
    quiet = "import [] True\nloader [] True\nexecutor [] True\n[] []\nempty [] True\n"
    assert run_script(source) == (0, quiet, "")


@pytest.mark.parametrize(
    "how", ["command", pytest.param("stdin", marks=pytest.mark.slow), pytest.param("module", marks=pytest.mark.slow)]
)
def test_no_main_guard_and_files_that_are_named_like_ours(how: str, run_script: RunScript, tmp_path: Path) -> None:
    # The server never looks into the user's folder, and the workers have these modules already.
    for name in ("torch", "numpy", "loky", "cloudpickle", "tqdm", "psutil", "fifobatch"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name} was imported')")
    source = """
import os, sys
from fifobatch import FifoLoader
print("main")
os.chdir(os.environ["FOLDER"])
sys.path.insert(0, "")

class Squares:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return square(index)

def square(number):
    return number**2

print(sorted(batch.item() for batch in FifoLoader(Squares(), num_workers=2)))
"""
    assert run_script(source, how, FOLDER=str(tmp_path)) == (0, "main\n[0, 1, 4, 9]\n", "")


def test_sigkill_of_the_parent_ends_all_its_processes(start_script: StartScript, gate: Gate) -> None:
    source = """
import sys
from probes import Calls, Gate, pass_gate
from fifobatch import FifoLoader
for _ in FifoLoader(Calls(4, pass_gate, Gate(sys.argv[1])), num_workers=2):
    pass
""".replace("sys.argv[1]", repr(gate.folder))
    script = start_script(source)
    workers = gate.arrivals(2)  # and they never pass
    processes = script.processes()
    assert set(workers) < set(processes)
    script.kill()
    await_end(processes)


@pytest.mark.slow
def test_sigkill_of_the_parent_ends_its_workers_though_a_forked_child_lives_on(
    start_script: StartScript, gate: Gate
) -> None:
    source = f"""
import os
from probes import Calls, Gate, pass_gate
from fifobatch import FifoLoader
gate = Gate({gate.folder!r})
iterator = iter(FifoLoader(Calls(4, pass_gate, gate), num_workers=2))
if os.fork() == 0:
    gate.arrive(0)
    gate.wait()
    os._exit(0)
next(iterator)
"""
    script = start_script(source)
    workers = [pid for pid in gate.arrivals(3) if pid]
    script.kill()
    await_end(workers)


@pytest.mark.slow
def test_without_standard_streams(run_script: RunScript, tmp_path: Path) -> None:
    inner = f"""
from fifobatch import FifoLoader
batches = sorted(batch.item() for batch in FifoLoader(range(4), num_workers=2))
with open({str(tmp_path / "result")!r}, "w") as file:
    file.write(repr(batches))
"""
    source = f"""
import os, sys
for fd in (0, 1, 2):
    os.close(fd)
os.execv(sys.executable, [sys.executable, "-c", {inner!r}])
"""
    assert run_script(source) == (0, "", "")
    assert (tmp_path / "result").read_text() == "[0, 1, 2, 3]"


def test_where_there_is_no_fork_server(run_script: RunScript) -> None:
    source = """
import os
import fifobatch.server
from fifobatch import FifoLoader
from probes import Calls, processes

if __name__ == "__main__":
    fifobatch.server.available = False
    loader = FifoLoader(Calls(6, processes), num_workers=1, persistent_workers=True, collate_fn=list)
    for _ in range(2):
        samples = [sample for [sample] in loader]
        print(len(samples), {sample[1] for sample in samples} == {os.getpid()})
"""
    assert run_script(source) == (0, "6 True\n6 True\n", "")


CHILD = """
import multiprocessing, sys
from fifobatch import FifoLoader

class Squares:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return 1 // (index - self.bad) and index**2 if index == self.bad else index**2

def main(bad):
    dataset = Squares()
    dataset.bad = bad
    loader = FifoLoader(dataset, batch_size=4, num_workers=1)
    print(sorted(value for batch in loader for value in batch.tolist()), flush=True)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        for bad in (-1, 5):
            child = multiprocessing.get_context(method).Process(target=main, args=(bad,))
            child.start()
            child.join(60)
            print(method, bad, child.exitcode, flush=True)
            child.kill()
"""


@pytest.mark.slow
def test_in_a_child_of_multiprocessing_the_scripts_classes_load_and_an_error_is_seen(run_script: RunScript) -> None:
    returncode, stdout, stderr = run_script(CHILD)
    squares = str([index**2 for index in range(8)])
    expected = [line for method in ("fork", "spawn") for line in (squares, f"{method} -1 0", f"{method} 5 1")]
    assert stdout.splitlines() == expected
    assert returncode == 0
    assert stderr.count("ZeroDivisionError: integer division or modulo by zero\nIn fifobatch worker") == 2

"""Every place where code of the user's runs, and every way in which it can end: what is seen, delivered, and left.

The table has a row for each place and a column for each way. Not in it:

- *send* and *sent* (while a worker sends its answer, and just afterwards) x an exception: no code of the user's runs
  there. Only from outside can anything happen then;
- *unpack* (in the parent) x a death or a hang: that is the user's program itself;
- *preload* x a hang: as an import that hangs in the program, it lasts until Ctrl-C.

All of it must hold without psutil, too, which loky and fifobatch use where it is there:

    PYTHONPATH=$PWD/tests/without_psutil python -m pytest tests/test_crashes.py
"""

import contextlib
import importlib
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loky.process_executor
import pytest
from conftest import supervisors
from probes import Calls, Gate, load
from traps import check_contents, drain, make_loader

from fifobatch import (
    ChunkTimeoutError,
    ClosedError,
    FifoLoader,
    SampleError,
    WorkerDiedError,
    supervisor,
)
from fifobatch.server import servers

# Set after the server has started: the workers and the test's own process have it, the server has not.
OUTSIDE = "FIFOBATCH_TEST_OUTSIDE"

RAISES = ["raise", "unpicklable", "sys.exit"]
DEATHS = {
    "_exit(0)": "ended with exit code 0",
    "_exit(1)": "ended with exit code 1",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGKILL": "was killed by SIGKILL (out of memory?)",
}
TIMEOUT = 1.0  # of a chunk; others take a thousandth of that


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    """Return what an epoch holds if nothing happens."""
    loader: FifoLoader[Any] = make_loader("nowhere", "", num_workers=0)  # with contents as of workers
    return drain(loader.batches())[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Have a folder of installed packages, and a server that knows it."""
    folder = tmp_path_factory.mktemp("environment") / "site-packages"
    folder.mkdir()
    servers.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield folder


@pytest.fixture(scope="module")
def warm_server(site: Path) -> Iterator[None]:
    """Have one fork server for all."""
    end = servers.lease()
    load(Calls(1, abs))
    yield
    end()
    servers.stop()


def uses_psutil(index: int) -> bool:
    return bool(loky.process_executor._USE_PSUTIL)


def test_the_workers_have_psutil_or_not_as_this_process_has(warm_server: None) -> None:
    assert load(Calls(2, uses_psutil)) == [loky.process_executor._USE_PSUTIL] * 2


# -- the table --------------------------------------------------------------------------------------------------------

# What is said of the place, where something is raised; and where the process ends or hangs.
RAISED_AT = {
    "unpickle": r"unpickling the dataset\.",
    "init": r"worker_init_fn\([01]\)\.",
    "sample": r"loading dataset\[4\], chunk 1 \(indices \[3, 4, 5\]\); attempt 1, after ",
    "list": r"dataset.__getitems__\(\[3, 4, 5\]\), chunk 1; attempt 1, after ",
    "collate": r"collate_fn, chunk 1 \(indices \[3, 4, 5\]\); attempt 1, after ",
    "pack": r"packing the batch of chunk 1 \(indices \[3, 4, 5\]\); attempt 1, after ",
    "unpack": r"In the parent, unpickling the batch of chunk 1 \(indices \[3, 4, 5\]\)\.",
}
DIED_AT = {
    "unpickle": "unpickling the dataset, or worker_init_fn,",
    "init": "unpickling the dataset, or worker_init_fn,",
    "sample": "dataset[4]",
    "list": "dataset[4]",  # in quarantine they are loaded one by one
    "collate": "collate_fn",
    "pack": "packing the batch",
    "send": "packing the batch",
}
HUNG_AT = DIED_AT | {"list": "dataset.__getitems__"}
ALL = [0, 1, 2, 3]


@pytest.mark.parametrize("how", RAISES)
@pytest.mark.parametrize("where", RAISED_AT)
def test_what_is_raised(where: str, how: str, undisturbed: dict[int, Any], nothing_left: None) -> None:
    loader = make_loader(where, how)
    batches, errors = drain(loader.batches())
    lost = ALL if where in ("unpickle", "init") else [1]
    check_contents(batches, undisturbed, [number for number in ALL if number not in lost])
    assert len(errors) == len(lost)
    for error in errors:
        assert type(error) is (ValueError if how == "raise" else SampleError)
        name = {"raise": "", "unpicklable": "traps.Unpicklable: ", "sys.exit": "SystemExit: "}[how]
        assert str(error) == name + ("3" if how == "sys.exit" else "on purpose")
        [note] = error.__notes__
        assert re.search(RAISED_AT[where], note) and "in misbehave" in note
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed) == (4 - len(lost), len(lost))
    assert (statistics.retries, statistics.reloads, statistics.under_way) == (0, 0, 0)


@pytest.mark.parametrize("how", DEATHS)
@pytest.mark.parametrize("where", DIED_AT)
def test_what_ends_the_process(where: str, how: str, undisturbed: dict[int, Any], nothing_left: None) -> None:
    whole = where in ("unpickle", "init")
    loader = make_loader(where, how, **({"batch_size": 6} if whole else {}))
    batches, errors = drain(loader.batches())
    check_contents(batches, undisturbed, [] if whole else [0, 2, 3])
    indices = {0: list(range(6)), 1: list(range(6, 12))} if whole else {1: [3, 4, 5]}
    for number, error in zip(indices, sorted(errors, key=lambda error: str(error).partition("chunk")[2]), strict=True):
        assert type(error) is WorkerDiedError
        assert re.search(
            f"^{re.escape(DIED_AT[where])} ended its worker process 3 times: pid [0-9]+ {re.escape(DEATHS[how])} "
            f"\\(chunk {number}, indices {re.escape(str(indices[number]))}\\)$",
            str(error),
        )
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed) == (len(batches), len(errors))
    assert statistics.retries == statistics.under_way == 0
    assert statistics.reloads >= 2


@pytest.mark.parametrize("how", DEATHS)
def test_what_ends_the_process_when_its_answer_is_sent(
    how: str, undisturbed: dict[int, Any], nothing_left: None
) -> None:
    batches, errors = drain(make_loader("sent", how).batches())
    check_contents(batches, undisturbed, ALL)  # once
    assert errors == []


@pytest.mark.parametrize("where", ["sample", "list", "collate", "pack"])
def test_what_hangs_is_killed(where: str, undisturbed: dict[int, Any], nothing_left: None) -> None:
    loader = make_loader(where, "hang", timeout=TIMEOUT)
    batches, [error] = drain(loader.batches())
    check_contents(batches, undisturbed, [0, 2, 3])
    assert type(error) is ChunkTimeoutError
    assert str(error) == (f"{HUNG_AT[where]} is not done within timeout=1 seconds (chunk 1, indices [3, 4, 5])")
    [note] = error.__notes__
    first, header, *stack = note.splitlines()
    assert re.search(
        rf"^In fifobatch worker \d+, {re.escape(HUNG_AT[where])}, chunk 1; attempt 1, after [\d.]+ s\.$", first
    )
    assert header == "Stack of the worker:"
    assert any("in misbehave" in line for line in stack) and "in _leave_with_parent" not in note
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed, statistics.retries, statistics.under_way) == (3, 1, 0, 0)


@pytest.mark.parametrize("leave", ["close", "drop"])
@pytest.mark.parametrize("where", ["unpickle", "init", "send", "sent"])
def test_what_hangs_and_is_not_a_chunks_time_ends_with_the_iteration(
    where: str, leave: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.01)
    loader = make_loader(where, "hang", gate, timeout=1e-9 if where in ("unpickle", "init") else TIMEOUT)
    iterator = loader.batches()
    assert len(set(gate.arrivals(2 if where in ("unpickle", "init") else 1))) >= 1
    board = iterator._batches._executor._engine.board
    if where in ("unpickle", "init"):
        assert [board.read(number).since for number in (0, 1)] == [0, 0]
    del board
    if leave == "close":
        loader.close()
        with pytest.raises(ClosedError):
            next(iterator)
    else:
        del iterator


@pytest.mark.parametrize("how", [*RAISES, *DEATHS])
def test_what_a_package_does_to_the_server(
    how: str, site: Path, warm_server: None, undisturbed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OUTSIDE, "1")
    name = f"package_{''.join(filter(str.isalnum, how))}"
    source = f"""
import os, sys
if {OUTSIDE!r} not in os.environ:
    sys.path.append({str(Path(__file__).parent)!r})
    import traps
    traps.misbehave({how!r})
def collate(samples):
    return list(samples)
"""
    (site / f"{name}.py").write_text(source)
    importlib.invalidate_caches()
    package = importlib.import_module(name)
    known = supervisors()
    loader = FifoLoader(range(12), batch_size=3, num_workers=2, collate_fn=package.collate)
    dies = how in DEATHS
    with pytest.warns(RuntimeWarning, match=f"importing {name} ends the process") if dies else contextlib.nullcontext():
        batches, errors = drain(loader.batches())
    assert {number: batch.data for number, batch in batches.items()} == {
        number: list(range(3 * number, 3 * number + 3)) for number in ALL
    }
    assert errors == []
    with warnings.catch_warnings(action="error"):  # once
        assert Counter(map(tuple, loader)) == Counter(map(tuple, (batch.data for batch in batches.values())))
    loader.close()
    assert supervisors() >= known


class SlowToDescribe(Exception):
    def __str__(self) -> str:
        return str(signal.pause())


class Describing:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise SlowToDescribe
        return index


def test_an_error_that_hangs_when_it_is_described_is_over_its_time(nothing_left: None) -> None:
    batches, [error] = drain(FifoLoader(Describing(), num_workers=2, timeout=TIMEOUT).batches())
    assert sorted(batches) == [0, 2]
    assert type(error) is ChunkTimeoutError
    assert str(error).startswith("dataset[1] is not done within timeout=1 seconds")


def test_a_server_that_is_killed_while_it_starts_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            if len(started) < 3:
                self.kill()

    servers.stop()
    monkeypatch.setattr("fifobatch.server.subprocess.Popen", Killed)
    assert sorted(batch.item() for batch in FifoLoader(range(3), num_workers=1)) == [0, 1, 2]
    assert len(started) == 3

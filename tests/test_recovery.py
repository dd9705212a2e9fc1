"""What is loaded again, left out or tried again after workers have died, hung or failed."""

import faulthandler
import itertools
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy
import pytest
import torch
from conftest import await_end
from probes import TIMEOUT, Calls, Gate, ancestors, processes
from traps import check_contents, drain, make_loader

from fifobatch import BatchExecutor, BatchPlan, ChunkTimeoutError, FifoLoader, SampleError, WorkerDiedError
from fifobatch import pool as pool_module
from fifobatch import processes as processes_module
from fifobatch.flight import FRUITLESS_STARTS
from fifobatch.server import servers


@pytest.fixture(autouse=True)
def _checked(request: pytest.FixtureRequest) -> None:
    """Have `nothing_left` for all but those that leave other fork servers than they found."""
    if "new_servers" not in request.fixturenames:
        request.getfixturevalue("nothing_left")


@pytest.fixture
def new_servers(warm_server: None) -> None:
    """Say that a test kills fork servers."""


ALL = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    """Return what an epoch holds if nothing happens."""
    return drain(make_loader("nowhere", "", num_workers=0).batches())[0]


def failures(loader: FifoLoader[Any]) -> list[tuple[Any, int, type, int]]:
    return [(failure.index, failure.chunk, type(failure.error), failure.attempts) for failure in loader.failures]


def drain_warned(loader: FifoLoader[Any]) -> tuple[dict[int, Any], list[Exception], list[str]]:
    """Drain an epoch; return what was warned of, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches, errors = drain(loader.batches())
    return batches, errors, [str(warning.message) for warning in caught]


# -- left out ---------------------------------------------------------------------------------------------------------

ERRORS = {
    "raise": ValueError,
    "unpicklable": SampleError,
    "sys.exit": SampleError,
    "_exit(0)": WorkerDiedError,
    "SIGKILL": WorkerDiedError,
    "hang": ChunkTimeoutError,
}


@pytest.mark.parametrize(
    ("where", "how"),
    [
        *itertools.product(["sample", "list", "collate", "pack"], ERRORS),
        *itertools.product(["unpack"], ["raise", "unpicklable", "sys.exit"]),
        *itertools.product(["send"], ["_exit(0)", "SIGKILL"]),
    ],
)
def test_what_fails_is_left_out(where: str, how: str, undisturbed: dict[int, Any]) -> None:
    loader = make_loader(where, how, on_error="skip", timeout=1.0 if how == "hang" else 0)
    batches, errors, warned = drain_warned(loader)
    assert errors == []
    attempts = 3 if ERRORS[how] is WorkerDiedError else 2 if (where, how) == ("list", "hang") else 1
    if where in ("sample", "list"):
        assert failures(loader) == [(4, 1, ERRORS[how], attempts)]
        assert batches[1].indices == batches[1].data[0] == [3, 5]
        # What sample 5 draws depends on how much was drawn before it.
        assert torch.equal(batches.pop(1).data[1][0], undisturbed[1].data[1][0])
    else:
        assert failures(loader) == [(index, 1, ERRORS[how], attempts) for index in (3, 4, 5)]
    check_contents(batches, undisturbed, [0, 2, 3])
    count = len(loader.failures)
    [text] = warned
    assert text.startswith(f"left out of this epoch: {count} sample{'s' if count > 1 else ''} that failed; ")
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed) == ((4, 0) if count == 1 else (3, 1))
    assert statistics.under_way == 0


@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
@pytest.mark.parametrize("where", ["unpickle", "init"])
def test_what_cannot_even_be_set_up_is_no_sample_to_leave_out(where: str, how: str) -> None:
    loader = make_loader(where, how, batch_size=12, on_error="skip")
    batches, errors, warned = drain_warned(loader)
    assert (batches, [type(error) for error in errors], warned) == ({}, [ERRORS[how]], [])


# -- tried again ------------------------------------------------------------------------------------------------------


def draw(index: int, folder: str, failing: dict[int, int], how: str) -> tuple[int, float, float]:
    """Draw random numbers; fail at some samples, as often as said, whichever worker it is."""
    drawn = random.random(), float(torch.rand(()))
    with open(f"{folder}/{index}", "ab") as tries:
        tries.write(b".")
    if os.path.getsize(f"{folder}/{index}") <= failing.get(index, 0):
        faulthandler.disable()
        if how == "hang":
            threading.Event().wait()
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(f"try {os.path.getsize(f'{folder}/{index}')}")
    return index, *drawn


def draws(folder: Path, failing: dict[int, int], how: str, **arguments: Any) -> FifoLoader[Any]:
    arguments = {"num_workers": 2, "generator": torch.Generator().manual_seed(3), "shuffle": True} | arguments
    return FifoLoader(Calls(12, draw, str(folder), failing, how), batch_size=3, collate_fn=list, **arguments)


@pytest.fixture
def drawn(tmp_path: Path) -> Any:
    """Return what an undisturbed epoch draws."""
    (tmp_path / "undisturbed").mkdir()
    return list(draws(tmp_path / "undisturbed", {}, "", num_workers=0))


@pytest.mark.parametrize(("how", "retries"), [("raise", 2), ("hang", 1), ("SIGKILL", 0)])
def test_another_attempt_has_the_same_random_numbers(how: str, retries: int, tmp_path: Path, drawn: Any) -> None:
    failing = {1: 1, 8: 2} if how == "raise" else {8: 1}
    loader = draws(tmp_path, failing, how, retries=retries, timeout=1.0 if how == "hang" else 0, in_order=True)
    assert list(loader) == drawn
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed) == (4, 0)
    assert statistics.retries == (0 if how == "SIGKILL" else sum(failing.values()))


@pytest.mark.parametrize(
    ("retry_on", "tried"), [(OSError, 3), ((KeyError, OSError), 3), (KeyError, 1), (ChunkTimeoutError, 1)]
)
def test_the_last_error_is_the_datasets_own(retry_on: Any, tried: int, tmp_path: Path) -> None:
    loader = draws(tmp_path, {4: 99}, "raise", retries=2, retry_on=retry_on)
    batches, [error] = drain(loader.batches())
    assert len(batches) == 3
    assert type(error) is OSError and str(error) == f"try {tried}"
    [note] = error.__notes__
    assert f"; attempt {tried}, after " in note and "loading dataset[4], chunk " in note
    assert loader.statistics().retries == tried - 1
    assert loader.failures == []


@pytest.mark.parametrize(("how", "error"), [("raise", OSError), ("hang", ChunkTimeoutError)])
def test_left_out_after_the_retries(how: str, error: type, tmp_path: Path) -> None:
    loader = draws(
        tmp_path, {4: 99}, how, retries=2, on_error="skip", shuffle=False, timeout=0.5 if how == "hang" else 0
    )
    batches, errors, warned = drain_warned(loader)
    assert (errors, len(warned), loader.statistics().retries) == (
        [],
        1,
        3 if how == "hang" else 2,
    )  # once more, without it
    assert failures(loader) == [(4, 1, error, 3)]
    assert [[index for index, *_ in batches[number].data] for number in ALL] == [
        [0, 1, 2],
        [3, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]


# -- killed from outside ----------------------------------------------------------------------------------------------


def pause(index: int, gate: Gate, open_from: int = 0) -> tuple[int, float, float]:
    """Draw, arrive and wait, but for the samples from some one on."""
    drawn = random.random(), float(torch.rand(()))
    if index < open_from:
        gate.arrive(os.getpid())
        gate.wait()
    return index, *drawn


def paused(gate: Gate, count: int = 8, **arguments: Any) -> FifoLoader[Any]:
    """Return a loader whose first ``count`` samples wait at the gate."""
    arguments = {"num_workers": 2, "generator": torch.Generator().manual_seed(3)} | arguments
    return FifoLoader(Calls(24, pause, gate, count), batch_size=2, collate_fn=list, **arguments)


def undisturbed_paused(gate: Gate, **arguments: Any) -> list[Any]:
    return list(paused(gate, 0, num_workers=0, **arguments))


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await_end(list(pids))


def workers_of(loader: FifoLoader[Any]) -> list[int]:
    assert loader._own is not None
    return sorted(loader._own._engine.crew.workers.numbers.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(None)])
def test_idle_workers_that_are_killed(which: slice) -> None:
    with FifoLoader(Calls(8, processes), num_workers=2, collate_fn=list, persistent_workers=True) as loader:
        for _ in range(3):
            assert len(list(loader)) == 8
            kill(*workers_of(loader)[which])
        assert len(list(loader)) == 8
        assert loader.statistics().failed == 0


def test_a_worker_that_is_killed_while_it_receives_its_task() -> None:
    with FifoLoader(Calls(8, processes), num_workers=2, collate_fn=list, persistent_workers=True) as loader:
        assert len(list(loader)) == 8
        pids = workers_of(loader)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        iterator = iter(loader)  # the tasks are in the pipe, and nobody takes them
        kill(pids[0])
        samples = list(iterator)
        assert len(samples) == 8
        assert not {sample[0] for [sample] in samples} & set(pids)


@pytest.mark.parametrize("count", [1, FRUITLESS_STARTS - 1, 1000])
def test_workers_that_are_killed_while_they_start(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, forked = servers.fork, []

    def fork_and_kill(*args: Any) -> Any:
        worker = fork(*args)
        forked.append(worker.pid)
        if len(forked) <= count:
            os.kill(worker.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(servers, "fork", fork_and_kill)
    with FifoLoader(Calls(4, abs), num_workers=1, collate_fn=list, persistent_workers=True) as loader:
        batches, errors = drain(loader.batches())
        if count < 1000:
            assert sorted(batches) == ALL and errors == []
        else:
            assert {type(error) for error in errors} == {WorkerDiedError} and batches == {}
            assert len(errors) == 4
            assert f"{FRUITLESS_STARTS} times, all workers died: pid " in str(errors[0])
            assert "was killed by SIGKILL" in str(errors[0])
            monkeypatch.undo()
            assert len(list(loader)) == 4


@pytest.mark.parametrize("then", ["goes on", "kill a worker"])
@pytest.mark.parametrize("which", ["base", "grown", "both"])
def test_a_fork_server_that_is_killed_in_the_middle_of_an_epoch(
    which: str, then: str, gate: Gate, new_servers: None
) -> None:
    dataset = Calls(24, pause, gate, 2)
    if which != "base":
        dataset = Calls(24, pause, gate, 2, pluggy.HookspecMarker)
        dataset.function = pause_beside
    loader: FifoLoader[Any] = FifoLoader(
        dataset, num_workers=2, collate_fn=list, generator=torch.Generator().manual_seed(1), in_order=True
    )
    iterator = iter(loader)
    pids = gate.arrivals(2)
    chain = servers_of(pids[0])
    assert len(chain) >= (1 if which == "base" else 2)
    kill(*{"base": chain[-1:], "grown": chain[:1], "both": chain}[which])
    if then == "kill a worker":
        kill(pids[0])
        gate.arrivals(2)
    gate.open(4)
    samples = [sample for [sample] in iterator]
    assert [sample[0] for sample in samples] == list(range(24))
    expected = FifoLoader(
        Calls(24, pause, gate), num_workers=0, collate_fn=list, generator=torch.Generator().manual_seed(1)
    )
    assert samples == [sample for [sample] in expected]


def pause_beside(index: int, gate: Gate, open_from: int, package: Any) -> tuple[int, float, float]:
    return pause(index, gate, open_from)


def servers_of(pid: int) -> list[int]:
    """Return the fork servers that a worker comes from, the base last."""
    parents = ancestors(pid)
    return parents[: parents.index(os.getpid())]


@pytest.mark.parametrize("order", [{}, {"in_order": True}, {"max_skew": 0}, {"max_skew": 2}])
@pytest.mark.parametrize("killed", [1, 2])
def test_contents_and_order_after_deaths(killed: int, order: Any, gate: Gate) -> None:
    expected = undisturbed_paused(gate, shuffle=True)
    loader = paused(gate, 24, shuffle=True, **order)
    iterator = loader.batches()
    for _ in range(2):
        kill(*gate.arrivals(2)[:killed])
    gate.open(1000)
    batches = list(iterator)
    numbers = [batch.number for batch in batches]
    assert sorted(numbers) == list(range(12))
    assert [batch.data for batch in sorted(batches, key=lambda batch: batch.number)] == expected
    skew = loader.max_skew if loader.max_skew is not None else 0 if loader.in_order else 12
    for place, number in enumerate(numbers):
        assert set(range(number - skew)) <= set(numbers[:place])
    assert loader.statistics().reloads > 0


def test_a_stopped_worker_is_over_its_time_without_a_stack(gate: Gate) -> None:
    loader = paused(gate, 1, timeout=1.0)
    iterator = loader.batches()
    [pid] = gate.arrivals(1)
    os.kill(pid, signal.SIGSTOP)
    batches, [error] = drain(iterator)
    assert sorted(batches) == list(range(1, 12))
    assert type(error) is ChunkTimeoutError and "dataset[0] is not done" in str(error)
    assert error.__notes__[0].endswith("Stack of the worker:\n  (none: the process did not run)")
    await_end([pid])


def test_a_consumer_that_waits_for_a_future_while_the_worker_dies(gate: Gate) -> None:
    with BatchExecutor(max_workers=2) as executor:
        plan = BatchPlan(Calls(6, pause, gate, 2), batch_size=2)
        futures = [executor.submit(plan, chunk) for chunk in plan]
        [pid] = gate.arrivals(1)
        waiting = threading.Event()

        def kill_it() -> None:
            waiting.wait(TIMEOUT)
            kill(pid)
            gate.open(10)

        thread = threading.Thread(target=kill_it)
        thread.start()
        waiting.set()
        assert futures[0].result(TIMEOUT).indices == [0, 1]
        thread.join()
        assert [future.result(TIMEOUT).indices for future in futures] == [[0, 1], [2, 3], [4, 5]]


def fatal(index: int, killers: tuple[int, ...], gate: Gate | None = None) -> int:
    if index in killers:
        faulthandler.disable()
        os._exit(9)
    return index


def test_futures_of_chunks_that_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    with BatchExecutor(max_workers=2) as executor:
        plan = BatchPlan(Calls(9, fatal, (4,)), batch_size=3)
        futures = [executor.submit(plan, chunk) for chunk in plan]
        with pytest.raises(WorkerDiedError, match=r"dataset\[4\] ended .* exit code 9 \(chunk 1"):
            futures[1].result(TIMEOUT)
        assert [futures[number].result(TIMEOUT).data.tolist() for number in (0, 2)] == [[0, 1, 2], [6, 7, 8]]
        batches = executor.as_completed(BatchPlan(range(4), batch_size=2))
        assert sorted(batch.tolist() for batch in batches) == [[0, 1], [2, 3]]


class Lists(Calls):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("cls", [Calls, Lists])
def test_two_killers_in_one_batch_are_both_found(cls: Any) -> None:
    loader: FifoLoader[Any] = FifoLoader(
        cls(12, fatal, (5, 7)), batch_size=6, num_workers=2, collate_fn=list, on_error="skip"
    )
    batches, errors, _ = drain_warned(loader)
    assert {number: batch.data for number, batch in batches.items()} == {0: [0, 1, 2, 3, 4], 1: [6, 8, 9, 10, 11]}
    assert errors == []
    assert sorted(failures(loader)) == [(5, 0, WorkerDiedError, 3), (7, 1, WorkerDiedError, 3)]
    loader = FifoLoader(cls(6, fatal, (1, 4)), batch_size=6, num_workers=2, collate_fn=list, on_error="skip")
    batches, errors, _ = drain_warned(loader)
    assert (batches[0].data, batches[0].indices, errors) == ([0, 2, 3, 5], [0, 2, 3, 5], [])
    assert [(index, error) for index, _, error, _ in failures(loader)] == [(1, WorkerDiedError), (4, WorkerDiedError)]


@pytest.mark.parametrize("cls", [Calls, Lists])
def test_every_sample_kills(cls: Any) -> None:
    dataset = cls(4, fatal, (0, 1, 2, 3))
    arguments: Any = {"batch_size": 2, "num_workers": 2, "collate_fn": list, "persistent_workers": True}
    with FifoLoader(dataset, on_error="skip", **arguments) as loader:
        batches, errors, [text] = drain_warned(loader)
        assert (batches, errors) == ({}, [])
        assert [(index, error) for index, _, error, _ in sorted(failures(loader))] == [
            (index, WorkerDiedError) for index in range(4)
        ]
        assert "4 samples" in text
        assert loader.statistics().failed == 2
    with FifoLoader(dataset, **arguments) as loader:
        batches, errors = drain(loader.batches())
        assert (batches, [type(error) for error in errors]) == ({}, [WorkerDiedError] * 2)
        dataset.args = ((),)
        assert sorted(loader) == [[0, 1], [2, 3]]  # with the workers of now


def test_loaders_that_share_an_executor_when_one_of_them_kills() -> None:
    with BatchExecutor(max_workers=2) as executor:
        good: FifoLoader[Any] = FifoLoader(range(40), batch_size=2, executor=executor)
        bad: FifoLoader[Any] = FifoLoader(Calls(4, fatal, (1,)), batch_size=2, executor=executor)
        of_good, of_bad = good.batches(), bad.batches()
        batches, errors = drain(of_bad)
        assert [batch.indices for batch in batches.values()] == [[2, 3]]
        assert [type(error) for error in errors] == [WorkerDiedError]
        batches, errors = drain(of_good)
        assert sorted(batches) == list(range(20)) and errors == []
        assert sum(len(batch) for batch in good) == 40


def test_a_slot_is_not_used_again_before_its_writer_has_ended(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, may_end = threading.Event(), threading.Event()
    end: Callable[[int], None] = pool_module._end

    def end_late(pid: int) -> None:
        ending.set()
        assert may_end.wait(TIMEOUT)
        end(pid)

    monkeypatch.setattr(pool_module, "_end", end_late)
    monkeypatch.setattr(processes_module.Manager, "kill_workers", lambda manager, reason: None)  # it may be the first
    with BatchExecutor(max_workers=2) as executor:
        engine = executor._engine
        plan = BatchPlan(Calls(12, write_on, gate), batch_size=1)
        chunks = list(plan)
        futures = [executor.submit(plan, chunk) for chunk in chunks[:2]]
        pids = gate.arrivals(2)
        kill(pids[0])
        assert ending.wait(TIMEOUT)  # the other one lives, and is about to write
        lost = {flight.slot for flight in engine.flights.values()}
        assert None not in lost and len(lost) == 2
        futures += [executor.submit(plan, chunk) for chunk in chunks[2:]]
        taken = {flight.slot for flight in engine.flights.values()} - lost
        assert len(taken) == 10
        gate.open(1)
        assert gate.arrivals(1) == [pids[1]]  # it has made its batch, though nobody wants it
        may_end.set()
        gate.open(100)
        for number, future in enumerate(futures):
            assert torch.equal(future.result(TIMEOUT).data, torch.full((1, 5000), float(number)))
        await_end(pids)
    del future


def write_on(index: int, gate: Gate) -> torch.Tensor:
    if index < 2:
        gate.arrive(os.getpid())
        gate.wait()
        gate.arrive(os.getpid())
    return torch.full((5000,), float(index))

"""Long rows of misfortunes, workers killed and iterators left half way: nothing is lost, nothing piles up."""

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import psutil
import pytest
from conftest import _workers, await_supervisors, footprint
from probes import TIMEOUT, Calls
from traps import tiny

from fifobatch import FifoLoader, supervisor

SAMPLES = 5000


def epoch(arrived: threading.Event) -> tuple[float, list[Any]]:
    loader: FifoLoader[Any] = FifoLoader(Calls(SAMPLES, tiny), num_workers=4, collate_fn=list)
    found: list[Any] = []
    began = time.perf_counter()
    for [sample] in loader:
        found.append(sample)
        arrived.set()
    seconds = time.perf_counter() - began
    return seconds, found


@pytest.mark.slow
def test_a_storm_of_kills(warm_server: None, capsys: pytest.CaptureFixture[str]) -> None:
    # A fork server that is about to become a worker may be hit, too, and have a successor: conftest's own check is that
    # no worker and no arena is left.
    over, arrived, kills = threading.Event(), threading.Event(), []
    quiet, found = epoch(arrived)
    assert sorted(found) == list(range(SAMPLES))

    def storm() -> None:
        # Where starting takes longer than 0.3 s, as the machine is busy, nothing would ever come: one batch has to.
        while not over.wait(0.3) and arrived.wait(TIMEOUT):
            arrived.clear()
            workers = list(_workers())
            if workers:
                pid = random.choice(workers)
                try:
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)
                except ProcessLookupError:  # it has ended meanwhile
                    pass

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        stormy, found = epoch(arrived)
    finally:
        over.set()
        arrived.set()
        thread.join()
    with capsys.disabled():
        print(
            f"\n{len(kills)} kills: {stormy:.1f} s instead of {quiet:.1f} s, "
            f"{(stormy - quiet) / max(1, len(kills)):.3f} s lost a kill"
        )
    assert len(kills) >= 3
    assert Counter(found) == Counter(range(SAMPLES))


def fail_late(index: int) -> int:
    if index == 5:
        raise ValueError(index)
    return index


def break_off(loader: FifoLoader[Any]) -> None:
    for _ in loader:
        break


def delete(loader: FifoLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator)
    del iterator


def fail(loader: FifoLoader[Any]) -> None:
    try:
        for _ in loader:
            raise KeyError
    except KeyError:
        pass


def fail_in_worker(loader: FifoLoader[Any]) -> None:
    loader.dataset.function = fail_late  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="5"):
        list(loader)


def close(loader: FifoLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    iterator.close()  # type: ignore[attr-defined]


def only_first(loader: FifoLoader[Any]) -> None:
    next(iter(loader))


def not_even_first(loader: FifoLoader[Any]) -> None:
    iter(loader)


WAYS = [break_off, delete, fail, fail_in_worker, close, only_first, not_even_first]


def abandon(count: int, shared: FifoLoader[Any]) -> Counter[str]:
    """Leave iterators half way; return what this process has when all has ended."""
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        if number % 3:
            way(shared)
            shared.dataset.function = abs  # type: ignore[attr-defined]
        else:
            way(FifoLoader(Calls(8, abs), num_workers=2))
    assert len(list(shared)) == 8
    gc.collect()
    await_supervisors({shared._own._engine._supervisor})  # type: ignore[arg-type,union-attr]
    gc.collect()
    found = footprint()
    found["threads"] = threading.active_count()
    return found


@pytest.mark.slow
def test_hundreds_of_abandoned_iterators(
    warm_server: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 60.0)  # what ends by a kill would be seen
    process = psutil.Process()
    with FifoLoader(Calls(8, abs), num_workers=2, persistent_workers=True) as shared:
        before = abandon(100, shared)
        resident = process.memory_info().rss
        after = abandon(400, shared)
        grown = process.memory_info().rss - resident
    with capsys.disabled():
        print(f"\n{grown / 2**20:.1f} MiB more after 400 iterators")
    # The persistent loader's workers are the same as before, unless it was closed; it has as many.
    ignoring = {key for key in before | after if key.startswith("child ")}
    assert {key: count for key, count in (after - before).items() if key not in ignoring} == {}
    assert sum(after[key] for key in ignoring) <= sum(before[key] for key in ignoring)
    assert grown < 16 * 2**20

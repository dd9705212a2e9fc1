"""What is done to a batch between its completion and its delivery: prepared, and one ahead staged."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from probes import Inline, whole

from fifobatch import Batch, BatchExecutor, BatchPlan, ClosedError, FifoLoader, PairedLoader, completion, pairing
from fifobatch.device import Transfer
from fifobatch.testing import ManualExecutor
from fifobatch.window import Window

PATIENCE = 60.0  # seconds until a test that waits for an event gives up


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "make_preparer", Inline)
    monkeypatch.setattr(pairing, "make_preparer", Inline)


class Stage:
    """Notes the number of each batch, and makes its data a text."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, batch: Batch[Any]) -> Batch[Any]:
        self.numbers.append(batch.number)
        return dataclasses.replace(batch, data=f"staged {batch.number}")


def test_what_is_staged_for_an_iterator_that_was_dropped_goes_with_it(inline):
    stage, manual = Stage(), ManualExecutor()
    refs: list[weakref.ref[Any]] = []

    def note(batch: Batch[Any]) -> Batch[Any]:
        data = torch.zeros(3)
        refs.append(weakref.ref(data))
        return dataclasses.replace(stage(batch), data=data)

    gc.collect()
    gc.disable()
    try:
        with BatchExecutor(executor=manual) as executor:
            batches = executor.iterate(BatchPlan(range(6)), Window(4), whole, stage=note)
            manual.complete(1)
            manual.complete(0)
            assert stage.numbers == [1]
            assert refs[0]() is not None
            del batches
            assert refs[0]() is None
    finally:
        gc.enable()


def test_staging_is_done_while_the_consumer_has_the_batch_before():
    manual, threads = ManualExecutor(), []
    begun, go_on = [threading.Event() for _ in range(4)], threading.Event()

    def stage(batch: Batch[Any]) -> Batch[Any]:
        threads.append(threading.current_thread().name)
        begun[batch.number].set()
        assert batch.number == 0 or go_on.wait(PATIENCE)
        return batch

    with BatchExecutor(executor=manual) as executor:
        batches = executor.iterate(BatchPlan(range(4)), Window(4), whole, stage=stage)
        for number in range(3):
            manual.complete(number)
        assert next(batches).number == 0
        assert begun[1].wait(PATIENCE)  # and it does not end before go_on: next() has not waited for it
        assert not begun[2].is_set()
        go_on.set()
        assert next(batches).number == 1
        assert begun[2].wait(PATIENCE)
        assert next(batches).number == 2
        manual.complete(3)  # nothing is ahead: it begins at once
        assert begun[3].wait(PATIENCE)
        assert next(batches).number == 3
    assert all(name.startswith("fifobatch-prepare") for name in threads)
    assert threading.current_thread().name not in threads


def test_an_error_of_staging_is_that_batchs(inline):
    def stage(batch: Batch[Any]) -> Batch[Any]:
        if batch.number == 1:
            raise MemoryError("the device is full")
        return batch

    manual = ManualExecutor()
    with BatchExecutor(executor=manual) as executor:
        batches = executor.iterate(BatchPlan(range(3)), Window(3), whole, stage=stage)
        for number in range(3):
            manual.complete(number)
        assert next(batches).number == 0
        with pytest.raises(MemoryError, match="the device is full"):
            next(batches)
        assert [batch.number for batch in batches] == [2]


# -- pairs ------------------------------------------------------------------------------------------------------------


class Movable:
    """One sample that says where it is; `moved` has all that were moved."""

    moved: list[str] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def to(self, device: torch.device) -> "Movable":
        self.moved.append(self.name)
        return Movable(f"{self.name} on {device}")


def first(samples: list[Any]) -> Any:
    return samples[0]


@pytest.fixture
def pairs(inline: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ManualExecutor, PairedLoader]]:
    monkeypatch.setattr(Movable, "moved", [])
    manual = ManualExecutor()
    halves = [[Movable(f"{half}{number}") for number in range(3)] for half in ("input ", "target ")]
    with closing(BatchExecutor(executor=manual)) as executor:
        yield manual, PairedLoader(*halves, collate_fn=first, executor=executor, window=3, device="meta")


def test_targets_are_staged_when_they_are_handed_out(pairs):
    manual, loader = pairs
    batches = iter(loader)
    for number in range(6):  # the calls are input 0, target 0, input 1 and so on
        manual.complete(number)
    assert Movable.moved == ["input 0"]
    x, target = next(batches)
    assert x.name == "input 0 on meta"
    assert Movable.moved == ["input 0", "input 1", "target 0"]
    assert target.done()
    assert target.result().name == "target 0 on meta"
    x, target = next(batches)
    assert (x.name, target.result().name) == ("input 1 on meta", "target 1 on meta")
    assert Movable.moved == ["input 0", "input 1", "target 0", "input 2", "target 1"]


def test_a_target_that_comes_after_it_was_handed_out_is_staged_then(pairs):
    manual, loader = pairs
    batches = iter(loader)
    manual.complete(2)
    x, target = next(batches)
    assert Movable.moved == ["input 1"]
    assert not target.done()
    manual.complete(3)
    assert target.done()
    assert (x.name, target.result().name) == ("input 1 on meta", "target 1 on meta")
    assert Movable.moved == ["input 1", "target 1"]


def test_both_halves_of_zipped_pairs_are_staged_together(pairs):
    manual, loader = pairs
    batches = loader.zipped()
    for number in (5, 4, 2, 1, 3, 0):
        manual.complete(number)
    assert Movable.moved == ["input 2", "target 2"]
    assert [(x.name, y.name) for x, y in batches] == [(f"input {n} on meta", f"target {n} on meta") for n in (2, 1, 0)]


def test_a_target_whose_loader_is_closed_before_it_has_come_is_closed(inline):
    manual = ManualExecutor()
    with closing(BatchExecutor(executor=manual)) as executor:
        loader = PairedLoader(range(2), range(2), executor=executor, window=2, device="meta")
        batches = iter(loader)
        manual.complete(0)
        _, target = next(batches)
        loader.close()
        with pytest.raises(ClosedError, match="its loader was closed"):
            target.result()


class Counted:
    """Counts those that are on the device and not yet dropped by the test."""

    there = 0
    most = 0

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def to(self, device: torch.device) -> "Counted":
        Counted.there += 1
        Counted.most = max(Counted.most, Counted.there)
        return self


@pytest.mark.parametrize("options", [{}, {"in_order": True}, {"max_skew": 3}], ids=str)
def test_few_are_on_the_device_however_many_are_complete(options, monkeypatch):
    monkeypatch.setattr(Counted, "there", 0)
    monkeypatch.setattr(Counted, "most", 0)
    loader = FifoLoader(
        range(120), batch_size=2, collate_fn=Counted, num_workers=2, window=16, device="meta", **options
    )
    seen: list[int] = []
    for batch in loader:
        seen += batch.samples
        Counted.there -= 1
    assert sorted(seen) == list(range(120))
    # The one in hand and the next; one more if it came just as the first was taken, and another was to go before it.
    assert Counted.most <= 3


def test_what_a_loader_asks_for_is_pinned_when_complete_and_copied_when_next():
    assert Transfer.of(False, torch.device("meta")).prepare is None
    assert Transfer.of(False, torch.device("meta")).stage is not None
    assert Transfer.of(False, None) == (None, None, None)

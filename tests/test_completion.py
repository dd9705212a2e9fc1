"""The as-completed iterator, over executors that the test completes by hand, so that no clock decides the order."""

import concurrent.futures
import gc
import itertools
import multiprocessing
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import Announcing, Inline, whole
from torch.utils.data import DataLoader

from fifobatch import (
    Batch,
    BatchExecutor,
    BatchPlan,
    ClosedError,
    FifoLoader,
    PlanError,
    SampleError,
    WorkerDiedError,
    completion,
)
from fifobatch.completion import Completions
from fifobatch.fetch import seeds
from fifobatch.futures import Completed
from fifobatch.testing import ManualExecutor
from fifobatch.window import Window

PATIENCE = 60.0  # seconds until a test that waits for an event gives up: a hang becomes a failure, nothing is timed


class Busy(ManualExecutor):
    """Its calls run from the beginning, so they cannot be cancelled; the test says when they are done."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = super().submit(fn, *args, **kwargs)
        future.set_running_or_notify_cancel()
        return future

    def _begin(self, number: int) -> "Future[Any]":
        return self.calls[number]


class Raising:
    """A dataset of numbers, some of which raise."""

    def __init__(self, errors: dict[int, BaseException], length: int = 4) -> None:
        self.errors = errors
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.errors:
            raise self.errors[index]
        return index


@contextmanager
def no_collector() -> Iterator[None]:
    """Whatever is freed inside is freed by its reference count."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def manual() -> ManualExecutor:
    return ManualExecutor()


@pytest.fixture
def executor(manual: ManualExecutor) -> Iterator[BatchExecutor]:
    executor = BatchExecutor(executor=manual)
    yield executor
    executor.shutdown(cancel_futures=True)


def cancelled_event(future: "Future[Any]") -> threading.Event:
    event = threading.Event()
    future.add_done_callback(lambda future: event.set() if future.cancelled() else None)
    return event


def numbers(batches: Iterator[Any]) -> list[int]:
    return [batch.number for batch in batches]


# -- order -------------------------------------------------------------------------------------------------------------


class Model:
    """What `max_skew` promises, said again as simply as can be."""

    def __init__(self, max_skew: int | None) -> None:
        self.max_skew = max_skew
        self.delivered: list[int] = []
        self.ready: list[int] = []
        self.held: set[int] = set()

    def complete(self, number: int) -> None:
        self.held.add(number)
        self._release()

    def deliver(self) -> int:
        self.delivered.append(self.ready.pop(0))
        self._release()
        return self.delivered[-1]

    def _release(self) -> None:
        low = next(number for number in itertools.count() if number not in self.delivered)
        for number in sorted(self.held):
            if self.max_skew is None or number - low <= self.max_skew:
                self.held.remove(number)
                self.ready.append(number)


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(map(str, order)))
def test_batches_come_in_the_order_of_completion_that_max_skew_lets_through(order):
    for window, max_skew in itertools.product([1, 2, 3, 4], [None, 0, 1, 2]):
        manual = ManualExecutor()
        with BatchExecutor(executor=manual) as executor:
            check_order(executor, manual, order, window, max_skew)


def check_order(
    executor: BatchExecutor, manual: ManualExecutor, order: tuple[int, ...], window: int, max_skew: int | None
) -> None:
    plan = BatchPlan(torch.arange(8) * 10, batch_size=2)
    batches = executor.iterate(plan, Window(window, max_skew), whole)
    model = Model(max_skew)
    waiting = list(order)
    while waiting:
        assert len(manual.calls) == min(4, len(model.delivered) + window)
        assert batches.under_way == len(manual.calls) - len(model.delivered)
        number = next(number for number in waiting if number < len(manual.calls))
        waiting.remove(number)
        manual.complete(number)
        model.complete(number)
        while model.ready:
            batch = next(batches)
            assert batch.number == model.deliver()
            assert batch.indices == [2 * batch.number, 2 * batch.number + 1]
            assert batch.data.tolist() == [10 * index for index in batch.indices]
    assert sorted(model.delivered) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


@given(
    total=st.integers(0, 20),
    window=st.integers(1, 8),
    max_skew=st.one_of(st.none(), st.integers(0, 8)),
    failing=st.sets(st.integers(0, 19), max_size=3),
    stages=st.booleans(),
    order=st.integers(0, 2**32).map(random.Random),
)
@settings(deadline=None, max_examples=120)
def test_whatever_the_order_each_chunk_comes_once_within_the_bounds_and_nothing_deadlocks(
    total, window, max_skew, failing, stages, order
):
    manual = ManualExecutor()
    staged: list[int] = []

    def stage(batch: Batch[Any]) -> Batch[Any]:
        staged.append(batch.number)
        return batch

    completed: list[int] = []
    delivered: list[int] = []
    failed: set[int] = set()
    with closing(BatchExecutor(executor=manual)) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "make_preparer", Inline)  # what is to be staged is staged at once
        plan = BatchPlan(Raising({index: KeyError(index) for index in failing}, total), batch_size=None)
        batches = executor.iterate(plan, Window(window, max_skew), whole, stage=stage if stages else None)
        while len(delivered) < total:
            low = next(number for number in itertools.count() if number not in delivered)
            may_go = [n for n in completed if n not in delivered and (max_skew is None or n - low <= max_skew)]
            assert manual.pending or may_go, "deadlock"
            ahead = [number for number in staged if number not in delivered]
            assert len(ahead) <= 1, "the next batch is staged, as soon as it is there, and no other"
            assert {*ahead} <= {*may_go}
            assert not stages or failing or len(ahead) == min(1, len(may_go))
            if not may_go or (manual.pending and order.random() < 0.5):
                completed.append(order.choice(manual.pending))
                manual.complete(completed[-1])
                continue
            try:
                batch = next(batches)
                delivered.append(batch.number)
                assert batch == Batch(delivered[-1], delivered[-1], delivered[-1])
                assert not stages or failing or ahead == [batch.number]
            except KeyError as error:
                delivered.append(error.args[0])
                failed.add(error.args[0])
            assert delivered[-1] in may_go
            assert max_skew is not None or delivered == completed[: len(delivered)]
            assert batches.under_way <= window
            assert len(manual.calls) == min(total, len(delivered) + window)
        assert list(batches) == []
    assert sorted(delivered) == list(range(total))
    assert failed == failing & {*range(total)}
    assert sorted(staged) == [number for number in range(total) if stages and number not in failing]
    assert max_skew != 0 or delivered == list(range(total))


def test_an_empty_plan_ends_at_once_and_submits_nothing(executor, manual):
    assert list(executor.as_completed(BatchPlan([]))) == []
    assert manual.calls == []


def test_loading_begins_before_the_first_next(executor, manual):
    batches = executor.as_completed(BatchPlan(range(9)), window=3)
    assert len(manual.calls) == 3
    batches.close()


def test_the_window_stays_full_while_one_batch_is_late(executor, manual):
    batches = executor.as_completed(BatchPlan(range(100)), window=3)
    for number in range(1, 50):
        manual.complete(number)
        assert next(batches).tolist() == [number]
        assert len(manual.pending) == min(3, 100 - number)
    batches.close()


def test_an_endless_sampler_is_read_only_as_far_as_the_window_goes(executor, manual):
    pulled = []

    def sampler() -> Iterator[int]:
        for index in itertools.count():
            pulled.append(index)
            yield index % 5

    batches = executor.as_completed(BatchPlan(range(5), batch_size=2, sampler=sampler()), window=3)
    for number in range(6):
        manual.complete(number)
        next(batches)
        assert len(pulled) == 2 * (number + 1 + 3)
    batches.close()


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "3"])
def test_a_window_that_cannot_be_is_refused_before_anything_is_submitted(executor, manual, window):
    with pytest.raises((TypeError, ValueError), match=f"window={window!r}.*int of at least 1"):
        executor.as_completed(BatchPlan(range(3)), window=window)
    assert manual.calls == []


def test_two_iterators_on_one_executor_do_not_mix(executor, manual):
    first = executor.as_completed(BatchPlan(["a", "b"], batch_size=None), window=2)
    second = executor.as_completed(BatchPlan(["x", "y"], batch_size=None), window=2)
    for call in (3, 1, 0, 2):
        manual.complete(call)
    assert [next(second), next(first), next(second), next(first)] == ["y", "b", "x", "a"]
    assert list(first) == list(second) == []


def test_two_iterators_over_one_plan_each_get_everything(executor, manual):
    plan = BatchPlan(range(4), batch_size=None, shuffle=True)
    first, second = executor.as_completed(plan, window=4), executor.as_completed(plan, window=4)
    for call in range(8):
        manual.complete(call)
    assert list(first) == list(second) == [chunk.indices for chunk in plan]


def test_closing_one_iterator_leaves_the_other_alone(executor, manual):
    first = executor.as_completed(BatchPlan(range(4), batch_size=None), window=2)
    second = executor.as_completed(BatchPlan(range(4), batch_size=None), window=2)
    closed = [cancelled_event(call) for call in manual.calls[:2]]
    first.close()
    assert all(event.wait(PATIENCE) for event in closed)
    for call in (2, 3, 4, 5):
        manual.complete(call)
        assert next(second) == call - 2
    assert list(second) == []


# -- errors ------------------------------------------------------------------------------------------------------------


def test_one_chunks_error_is_raised_once_and_the_others_still_come(executor, manual):
    plan = BatchPlan(Raising({3: KeyError("no such image")}, 6), batch_size=2)
    batches = executor.as_completed(plan, window=3)
    for number in (2, 1, 0):
        manual.complete(number)
    assert next(batches).tolist() == [4, 5]
    with pytest.raises(KeyError, match="no such image") as caught:
        next(batches)
    assert next(batches).tolist() == [0, 1]
    assert list(batches) == []
    note = "\n".join(caught.value.__notes__)
    assert "loading dataset[3], chunk 1 (indices [2, 3])" in note
    assert "__getitem__" in note  # its traceback


def test_every_chunk_may_fail(executor, manual):
    errors = {index: ValueError(f"number {index}") for index in range(4)}
    batches = executor.as_completed(BatchPlan(Raising(errors)), window=2)
    for number in range(4):
        manual.complete(number)
        with pytest.raises(ValueError, match=f"^number {number}"):
            next(batches)
    assert list(batches) == []


def test_an_error_of_collate_fn_says_so(executor, manual):
    def collate_fn(samples: list[Any]) -> Any:
        raise ZeroDivisionError("collating")

    batches = executor.as_completed(BatchPlan(range(2), batch_size=2, collate_fn=collate_fn))
    manual.complete(0)
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches)
    assert "collate_fn, chunk 0 (indices [0, 1])" in caught.value.__notes__[-1]


class OwnStop(StopIteration):
    pass


@pytest.mark.parametrize(
    "error",
    [
        StopIteration("end"),
        OwnStop("end"),
        StopAsyncIteration("end"),
        SystemExit(0),
        SystemExit("end"),
        KeyboardInterrupt("end"),
        GeneratorExit("end"),
        BaseException("end"),
        BaseExceptionGroup("end", [SystemExit(0)]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("culprit", ["dataset", "collate_fn"])
def test_what_would_end_a_loop_or_a_script_without_a_word_is_a_sample_error(executor, manual, error, culprit):
    def collate_fn(samples: list[Any]) -> Any:
        if samples == [1] and culprit == "collate_fn":
            raise error
        return samples

    plan = BatchPlan(Raising({1: error} if culprit == "dataset" else {}, 3), collate_fn=collate_fn)
    batches = executor.as_completed(plan, window=3)
    for number in range(3):
        manual.complete(number)
    assert list(next(batches)) == [0]
    with pytest.raises(SampleError, match=type(error).__name__) as caught:
        next(batches)
    assert "chunk 1" in caught.value.__notes__[-1]
    assert list(next(batches)) == [2]
    assert list(batches) == []


@pytest.mark.parametrize(
    "cls",
    [
        TimeoutError,
        CancelledError,
        BrokenPipeError,
        EOFError,
        BrokenExecutor,
        queue.Empty,
        RuntimeError,
        ClosedError,
        WorkerDiedError,
    ],
)
def test_a_datasets_own_error_is_never_taken_for_one_of_ours(executor, manual, cls):
    batches = executor.as_completed(BatchPlan(Raising({0: cls("from the dataset")}, 2)), window=1)
    manual.complete(0)
    with pytest.raises(cls, match=r"^from the dataset") as caught:
        next(batches)
    assert type(caught.value) is cls
    assert "dataset[0]" in caught.value.__notes__[-1]
    manual.complete(1)
    assert next(batches).tolist() == [1]


def test_a_worker_that_dies_fails_its_chunk_and_what_is_complete_still_comes(executor, manual):
    batches = executor.as_completed(BatchPlan(range(5)), window=3)
    manual.complete(1)
    manual.fail(0, BrokenExecutor("a process was killed."))
    manual.complete(2)
    assert next(batches).tolist() == [1]
    with pytest.raises(WorkerDiedError, match=r"was killed\. Chunk 0 \(indices \[0\]\) was under way") as caught:
        next(batches)
    assert isinstance(caught.value, BrokenExecutor)
    assert isinstance(caught.value.__cause__, BrokenExecutor)
    assert next(batches).tolist() == [2]
    with pytest.raises(WorkerDiedError, match="make a new executor"):  # the rest of the plan cannot be loaded
        next(batches)
    assert list(batches) == []
    assert len(manual.calls) == 3
    assert not executor.usable


def test_each_chunk_of_a_broken_executor_has_an_error_of_its_own(executor, manual):
    batches = executor.as_completed(BatchPlan(range(2)), window=2)
    shared = BrokenExecutor("gone")
    manual.fail(0, shared)
    manual.fail(1, shared)
    errors = []
    for _ in range(2):
        with pytest.raises(WorkerDiedError) as caught:
            next(batches)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert list(batches) == []


@pytest.mark.parametrize("error", [OSError("no such host"), RuntimeError("no memory"), ValueError("what?")], ids=repr)
def test_any_other_error_of_the_executor_is_the_chunks_error(executor, manual, error):
    batches = executor.as_completed(BatchPlan(range(2)), window=1)
    manual.fail(0, error)
    with pytest.raises(type(error), match=str(error)) as caught:
        next(batches)
    assert "In the executor, on chunk 0 (indices [0])" in caught.value.__notes__[-1]
    manual.complete(1)
    assert next(batches).tolist() == [1]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(0), StopIteration()], ids=repr)
def test_an_executor_that_fails_a_call_with_such_an_error_does_not_end_the_script_either(executor, manual, error):
    batches = executor.as_completed(BatchPlan(range(1)), window=1)
    manual.fail(0, error)
    with pytest.raises(SampleError, match=type(error).__name__):
        next(batches)


def test_an_executor_that_takes_no_more_is_an_error_after_what_it_took(executor, manual):
    batches = executor.as_completed(BatchPlan(range(3), batch_size=None), window=1)
    manual.complete(0)
    manual.shutdown()
    assert next(batches) == 0
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        next(batches)
    assert list(batches) == []


# -- a sampler that raises ---------------------------------------------------------------------------------------------


def broken_sampler(good: int, make_error: Callable[[], BaseException]) -> Iterator[int]:
    yield from range(good)
    raise make_error()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("max_skew", [None, 0])
def test_a_samplers_error_comes_after_everything_that_was_submitted_then_the_end(executor, manual, window, max_skew):
    plan = BatchPlan(range(9), batch_size=None, sampler=broken_sampler(3, lambda: LookupError("lost the file list")))
    batches = executor.iterate(plan, Window(window, max_skew), attrgetter("data"))
    loaded = []
    for _ in range(3):
        manual.complete(manual.pending[0])
        loaded.append(next(batches))
    assert loaded == [0, 1, 2]
    with pytest.raises(LookupError, match="lost the file list"):
        next(batches)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


def test_a_sampler_that_raises_at_once_raises_before_anything_is_submitted(executor, manual):
    with pytest.raises(LookupError):
        executor.as_completed(BatchPlan(range(9), sampler=broken_sampler(0, LookupError)))
    assert manual.calls == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_sampler_passes_at_once_and_closes_the_iterator(executor, manual, error):
    plan = BatchPlan(range(9), batch_size=None, sampler=broken_sampler(2, error))
    batches = executor.as_completed(plan, window=2)
    pending = cancelled_event(manual.calls[1])
    manual.complete(0)
    with pytest.raises(error):
        next(batches)
    assert pending.wait(PATIENCE)
    with pytest.raises(ClosedError):
        next(batches)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError], ids=lambda cls: cls.__name__)
def test_an_interrupt_of_the_waiting_loses_nothing(executor, manual, monkeypatch, error):
    class Interrupted(Completed):
        """Whenever nothing is there, a batch comes, and an interrupt just as it does."""

        def wait(self) -> None:
            if not self:
                manual.complete(manual.pending[0])
                self._filled.get()
                raise error
            super().wait()

    monkeypatch.setattr(completion, "Completed", Interrupted)
    batches = executor.as_completed(BatchPlan(range(6), batch_size=None), window=2)
    seen: list[int] = []
    for _ in range(6):
        with pytest.raises(error):
            next(batches)
        seen.append(next(batches))
    assert seen == list(range(6))
    assert list(batches) == []


def test_an_interrupt_in_the_sampler_passes_at_once_also_before_the_first_batch(executor, manual):
    with pytest.raises(KeyboardInterrupt):
        executor.as_completed(BatchPlan(range(9), sampler=broken_sampler(1, KeyboardInterrupt)), window=2)
    assert cancelled_event(manual.calls[0]).wait(PATIENCE)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_in_the_middle_cancels_what_has_not_begun(executor, manual):
    batches = executor.as_completed(BatchPlan(range(9)), window=3)
    manual.complete(1)
    next(batches)
    pending = [cancelled_event(manual.calls[number]) for number in manual.pending]
    assert len(pending) == 3
    for _ in range(2):
        batches.close()
    assert all(event.wait(PATIENCE) for event in pending)
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"start a new one with iter\(loader\)"):
            next(batches)
    assert len(manual.calls) == 4
    again = executor.as_completed(BatchPlan(range(1)))
    manual.complete(4)
    assert [batch.tolist() for batch in again] == [[0]]


def test_close_with_complete_batches_discards_them(executor, manual):
    batches = executor.as_completed(BatchPlan(range(2)), window=2)
    manual.complete(0)
    manual.complete(1)
    batches.close()
    with pytest.raises(ClosedError):
        next(batches)


def test_what_was_running_when_the_iterator_closed_is_discarded_when_it_completes():
    busy = Busy()
    executor = BatchExecutor(executor=busy)
    made: list[weakref.ref[torch.Tensor]] = []

    def collate_fn(samples: list[int]) -> torch.Tensor:
        batch = torch.tensor(samples)
        made.append(weakref.ref(batch))
        return batch

    batches = executor.as_completed(BatchPlan(Raising({3: ValueError()}), collate_fn=collate_fn), window=4)
    busy.complete(1)
    next(batches)
    batches.close()
    with no_collector():
        for number in (3, 0, 2):  # one fails; one is loaded
            busy.complete(number)
        busy.calls.clear()
        assert [ref() for ref in made] == [None] * 3
    executor.shutdown()
    assert not executor.usable


def test_close_from_another_thread_wakes_a_waiting_next(monkeypatch):
    waiting = threading.Event()

    class Telling(Completed):
        def wait(self) -> None:
            waiting.set()
            super().wait()

    monkeypatch.setattr(completion, "Completed", Telling)
    busy = Busy()  # nothing completes, not even by being cancelled
    executor = BatchExecutor(executor=busy)
    batches = executor.iterate(BatchPlan(range(3)), Window(2), whole)
    with ThreadPoolExecutor(2) as threads:
        waiters = [threads.submit(next, batches) for _ in range(2)]  # one waits for a batch, one for the lock
        assert waiting.wait(PATIENCE)
        batches.close()
        for waiter in waiters:
            assert isinstance(waiter.exception(PATIENCE), ClosedError)
    busy.complete(0)
    busy.complete(1)


def test_a_consumer_that_raises_gives_up_what_is_under_way(executor, manual):
    pending = []

    def consume() -> None:
        batches = executor.as_completed(BatchPlan(range(9)), window=2)
        manual.complete(0)
        pending.append(cancelled_event(manual.calls[1]))
        for _ in batches:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    gc.collect()  # pytest's own traceback held the frame
    assert pending[0].wait(PATIENCE)


def test_break_gives_up_what_is_under_way(executor, manual):
    def consume() -> threading.Event:
        batches = executor.as_completed(BatchPlan(range(9)), window=2)
        pending = cancelled_event(manual.calls[1])
        manual.complete(0)
        for _ in batches:
            break
        return pending

    assert consume().wait(PATIENCE)


def test_a_submitted_chunk_can_be_cancelled_until_it_runs(executor, manual):
    plan = BatchPlan(range(2), batch_size=None)
    first, second = (executor.submit(plan, chunk) for chunk in plan)
    assert first.cancel()
    assert first.cancelled()
    assert manual.calls[0].cancelled()
    with pytest.raises(CancelledError):
        first.result()
    manual.complete(1)
    assert not second.cancel()
    assert second.result() == Batch(1, 1, 1)
    assert second.chunk.number == 1


def test_submitted_chunks_are_futures_as_the_standard_library_has_them(executor, manual):
    plan = BatchPlan(range(4), batch_size=2)
    futures = [executor.submit(plan, chunk) for chunk in plan]
    manual.complete(1)
    done, pending = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED, timeout=PATIENCE)
    assert (done, pending) == ({futures[1]}, {futures[0]})
    manual.complete(0)
    completed = list(concurrent.futures.as_completed(futures, timeout=PATIENCE))
    assert {future.chunk.number: future.result().data.tolist() for future in completed} == {0: [0, 1], 1: [2, 3]}


def test_shutting_the_executor_down_is_a_closed_error_for_what_was_cancelled(executor, manual):
    batches = executor.as_completed(BatchPlan(range(9), batch_size=None), window=3)
    manual.complete(1)
    executor.shutdown(cancel_futures=True)
    assert next(batches) == 1
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"chunk \d was cancelled"):
            next(batches)
    with pytest.raises(ClosedError, match="after shutdown"):
        next(batches)
    assert list(batches) == []
    with pytest.raises(ClosedError):
        executor.as_completed(BatchPlan(range(9)))


def test_shutting_the_executor_down_does_not_shut_down_what_was_passed_in(executor, manual):
    executor.shutdown()
    assert manual.submit(int) is manual.calls[0]


def test_an_iterator_in_a_forked_child_is_closed(executor, monkeypatch):
    batches = executor.iterate(BatchPlan(range(3)), Window(2), whole)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ClosedError, match="parent process"):
            next(batches)
    batches.close()


# -- who keeps what alive ----------------------------------------------------------------------------------------------


def test_a_yielded_batch_is_freed_the_moment_its_consumer_drops_it(executor, manual):
    batches = executor.as_completed(BatchPlan(range(9)), window=3)
    with no_collector():
        for number in range(5):
            manual.complete(number)
            batch = next(batches)
            ref = weakref.ref(batch)
            manual.calls[number] = Future()  # the test's own reference
            del batch
            assert ref() is None
    batches.close()


def test_a_submitted_chunks_batch_is_freed_with_its_future(executor, manual):
    plan = BatchPlan(range(1))
    with no_collector():
        future = executor.submit(plan, next(iter(plan)))
        manual.complete(0)
        ref = weakref.ref(future.result().data)
        manual.calls.clear()
        assert ref() is not None
        del future
        assert ref() is None


def test_the_last_batch_is_freed_while_the_finished_iterator_lives():
    with BatchExecutor(executor=Inline()) as executor, no_collector():
        batches = executor.as_completed(BatchPlan(range(3)), window=2)
        refs = []
        for batch in batches:
            refs.append(weakref.ref(batch))
            del batch
        assert [ref() for ref in refs] == [None] * 3
        assert list(batches) == []


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_an_abandoned_iterator_is_collected_at_once_and_gives_up_what_is_under_way(executor, manual, taken):
    with no_collector():
        batches = executor.as_completed(BatchPlan(range(9)), window=3)
        for number in range(taken):
            manual.complete(number)
            next(batches)
        pending = [cancelled_event(manual.calls[number]) for number in manual.pending]
        ref = weakref.ref(batches)
        del batches
        assert ref() is None
    assert len(pending) == 3
    assert all(event.wait(PATIENCE) for event in pending)


def test_an_iterator_is_collected_at_once_also_after_a_samples_error(executor, manual):
    batches = executor.as_completed(BatchPlan(Raising({0: ValueError()})), window=1)
    manual.complete(0)
    with no_collector():
        ref = weakref.ref(batches)
        try:
            next(batches)
        except ValueError:
            pass
        del batches
        assert ref() is None


def test_an_error_that_is_kept_does_not_keep_the_iterator(executor, manual):
    batches = executor.as_completed(BatchPlan(Raising({0: ValueError("kept")})), window=1)
    manual.complete(0)
    with no_collector():
        ref = weakref.ref(batches)
        kept = None
        try:
            next(batches)
        except ValueError as error:
            kept = error
        del batches
        assert ref() is None
        assert str(kept) == "kept"


@pytest.mark.parametrize("taken", ["before its error was raised", "after its error was raised"])
def test_an_iterator_whose_sampler_failed_is_collected_at_once(taken):
    with BatchExecutor(executor=Inline()) as executor, no_collector():
        plan = BatchPlan(range(9), sampler=broken_sampler(1, LookupError))
        batches = executor.as_completed(plan, window=2)
        ref = weakref.ref(batches)
        next(batches)
        if taken.startswith("after"):
            try:
                next(batches)
            except LookupError:
                pass
        del batches
        assert ref() is None


def test_an_iterator_keeps_the_executor_that_it_came_from(manual):
    executor = BatchExecutor(executor=manual)
    handle = weakref.ref(executor)
    batches = executor.as_completed(BatchPlan(range(2), batch_size=None), window=1)
    with no_collector():
        del executor
        assert handle() is not None
        for number in range(2):
            manual.complete(number)
            assert next(batches) == number
        del batches
        assert handle() is None


def test_a_loaders_iterator_keeps_the_executor_that_the_loader_was_given(manual):
    executor = BatchExecutor(executor=manual)
    handle = weakref.ref(executor)
    batches = iter(FifoLoader(range(2), batch_size=None, executor=executor, window=1))
    del executor
    gc.collect()
    assert handle() is not None
    for number in range(2):
        manual.complete(number)
        assert next(batches) == number


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_skew", [None, 0, 3])
def test_an_iterator_shared_by_several_threads_gives_each_batch_to_one_of_them(max_skew):
    total = 300
    with ThreadPoolExecutor(3) as pool, BatchExecutor(executor=pool) as executor, ThreadPoolExecutor(4) as consumers:
        plan = BatchPlan(Raising({50: KeyError("one of them")}, total), batch_size=None)
        batches = executor.iterate(plan, Window(7, max_skew), attrgetter("data"))

        def consume() -> list[Any]:
            taken: list[Any] = []
            while True:
                try:
                    taken.append(next(batches))
                except KeyError as error:
                    taken.append(error)
                except StopIteration:
                    return taken

        consuming = [consumers.submit(consume) for _ in range(4)]
        taken = [item for consumer in consuming for item in consumer.result(PATIENCE)]
    assert sum(isinstance(item, KeyError) for item in taken) == 1
    assert sorted(item for item in taken if isinstance(item, int)) == sorted({*range(total)} - {50})


def test_several_threads_may_each_iterate_on_one_executor():
    with ThreadPoolExecutor(3) as pool, BatchExecutor(executor=pool) as executor, ThreadPoolExecutor(4) as consumers:

        def consume(start: int) -> list[int]:
            return sorted(executor.as_completed(BatchPlan(range(start, start + 50), batch_size=None), window=5))

        consuming = [consumers.submit(consume, start) for start in (0, 100, 200, 300)]
        for start, consumer in zip((0, 100, 200, 300), consuming):
            assert consumer.result(PATIENCE) == list(range(start, start + 50))


# -- other executors ---------------------------------------------------------------------------------------------------


def test_threads_load_what_torch_loads():
    dataset = [{"x": torch.full((3,), float(index)), "name": f"image {index}"} for index in range(20)]
    with ThreadPoolExecutor(4) as pool, BatchExecutor(executor=pool) as executor:
        assert executor.max_workers == 4
        assert not executor.has_own_workers
        plan = BatchPlan(dataset, batch_size=3)
        batches = executor.iterate(plan, Window(4, max_skew=0), attrgetter("data"))
        for ours, theirs in zip(batches, DataLoader(dataset, batch_size=3), strict=True):
            assert torch.equal(ours["x"], theirs["x"])
            assert ours["name"] == theirs["name"]


def test_threads_share_the_dataset_itself():
    seen = set()

    class Telling:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            seen.add(id(self))
            return index

        def __reduce__(self) -> Any:
            raise AssertionError("pickled")

    dataset = Telling()
    with ThreadPoolExecutor(2) as pool, BatchExecutor(executor=pool) as executor:
        assert sorted(executor.as_completed(BatchPlan(dataset, batch_size=None))) == list(range(8))
    assert seen == {id(dataset)}


def test_a_loader_loads_on_an_executor_that_it_was_given_and_leaves_it_open():
    dataset = torch.arange(20)
    with ThreadPoolExecutor(2) as pool:
        loader = FifoLoader(dataset, batch_size=3, executor=pool)
        assert loader.num_workers == 2
        for _ in range(2):
            loaded = [batch.tolist() for batch in loader]
            assert sorted(loaded) == [batch.tolist() for batch in DataLoader(dataset, batch_size=3)]
        loader.close()
        assert pool.submit(int).result(PATIENCE) == 0


def test_a_loader_yields_in_the_order_in_which_its_executor_completes(manual):
    loader = FifoLoader(range(4), batch_size=None, executor=manual, window=3)
    batches = loader.batches()
    for call in (2, 0, 3, 1):
        manual.complete(call)
        assert next(batches).number == call
    assert list(batches) == []


def test_two_loaders_share_one_executor(executor, manual):
    first = FifoLoader(["a", "b"], batch_size=None, executor=executor)
    second = FifoLoader(["x", "y"], batch_size=None, executor=executor)
    loading = [iter(first), iter(second)]
    for call in (1, 3, 2, 0):
        manual.complete(call)
    assert [list(batches) for batches in loading] == [["b", "a"], ["y", "x"]]


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Announcing]:
    """An executor whose calls run as in another process, which knows no plan."""
    monkeypatch.setattr("fifobatch.elsewhere.plans_here", {})
    monkeypatch.setattr("fifobatch.elsewhere._plans_elsewhere", {})
    with seeds(0):  # such a process seeds itself for each chunk
        yield Announcing()


def test_a_process_that_does_not_know_the_plan_is_sent_it_once(far_away):
    with BatchExecutor(executor=far_away) as executor:
        batches = executor.as_completed(BatchPlan([10, 11, 12], batch_size=None), window=1)
        for call in (0, 1, 2, 3):  # call 0 answers that it does not know, so call 1 has the plan with it
            assert far_away.submitted.get(timeout=PATIENCE) == call
            far_away.complete(call)
            if call:
                assert next(batches) == 9 + call
        assert list(batches) == []
    assert far_away.pending == []


def test_a_dataset_that_cannot_be_sent_is_a_plan_error_that_names_the_part(far_away):
    dataset = Raising({})
    dataset.lock = threading.Lock()
    with BatchExecutor(executor=far_away) as executor:
        batches = executor.iterate(BatchPlan(dataset), Window(1), whole)
        for _ in range(4):
            far_away.complete(far_away.submitted.get(timeout=PATIENCE))
            with pytest.raises(PlanError, match=r"cannot send Raising .* dataset\.lock is a _thread\.lock"):
                next(batches)
        assert list(batches) == []


def test_the_standard_librarys_processes_will_do():
    class Squares:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == 4:
                raise LookupError("no fours")
            return index**2, os.getpid()

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool, BatchExecutor(executor=pool) as executor:
        plan = BatchPlan(Squares(), batch_size=None)
        batches = executor.iterate(plan, Window(2, max_skew=0), attrgetter("data"))
        loaded = [next(batches) for _ in range(4)]
        with pytest.raises(LookupError, match="no fours") as caught:
            next(batches)
        loaded += batches
    assert "dataset[4], chunk 4" in caught.value.__notes__[-1]
    assert [square for square, _ in loaded] == [0, 1, 4, 9, 25]
    assert os.getpid() not in {pid for _, pid in loaded}


def test_completions_is_an_iterator_of_its_own(executor):
    batches = executor.as_completed(BatchPlan([]))
    assert isinstance(batches, Completions)
    assert iter(batches) is batches

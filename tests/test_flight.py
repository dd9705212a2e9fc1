"""What becomes of a chunk whose worker died or was over its time: the rules, without processes."""

from typing import Any

import pytest

from fifobatch.attempt import COLLATING, LISTING, PACKING, SETTING_UP, Policy
from fifobatch.board import START
from fifobatch.errors import ChunkTimeoutError, WorkerDiedError
from fifobatch.flight import FRUITLESS_STARTS, Flight, Run
from fifobatch.futures import BatchFuture
from fifobatch.plan import Batch, Chunk, StreamChunk
from fifobatch.trace import Trace

STEPS = [START, SETTING_UP, LISTING, COLLATING, PACKING, 0, 2]


def make_flight(indices: Any = (10, 11, 12), collates: bool = True, **policy: Any) -> Flight:
    indices = list(indices) if collates else indices
    any_: Any = None
    run = Run(any_, any_, 0, 0, Policy(**policy), collates, None, 0, 0, Trace(), any_, any_)
    return Flight(run, BatchFuture(Chunk(7, indices, 0)))


def failures(flight: Flight) -> list[tuple[Any, int, str, int]]:
    return [
        (failure.index, failure.chunk, type(failure.error).__name__, failure.attempts)
        for failure in flight.future.failures
    ]


def test_a_chunk_of_a_stream_is_told_by_its_positions() -> None:
    flight = make_flight()
    flight.future.chunk = StreamChunk(7, [10, 11, 12], 0, ["a", "b", "c"])
    error = flight.died(COLLATING, "") or flight.died(COLLATING, "") or flight.died(COLLATING, "pid 3 fell")
    assert str(error) == (
        "collate_fn ended its worker process 3 times: pid 3 fell (batch 7, items 10 to 12 of the stream)"
    )


# -- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("step", [step for step in STEPS if step != START])
def test_the_first_death_is_not_the_chunks_fault_but_it_goes_into_quarantine(step: int, skip: bool) -> None:
    flight = make_flight(skip=skip)
    assert flight.died(step, "") is None
    assert flight.suspect and flight.singly
    assert flight.attempt == 1 and flight.left_out == {}


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (SETTING_UP, "unpickling the dataset, or worker_init_fn,"),
        (LISTING, "dataset.__getitems__"),
        (COLLATING, "collate_fn"),
        (PACKING, "packing the batch"),
        (0, "dataset[10]"),
        (2, "dataset[12]"),
    ],
)
def test_two_deaths_in_quarantine_at_one_step_convict_it(step: int, place: str) -> None:
    flight = make_flight()
    assert flight.died(PACKING, "pid 1 fell") is None
    assert flight.died(step, "pid 2 fell") is None
    error = flight.died(step, "pid 3 fell")
    assert type(error) is WorkerDiedError
    assert str(error) == (f"{place} ended its worker process 3 times: pid 3 fell (chunk 7, indices [10, 11, 12])")


def test_deaths_at_different_steps_do_not_add_up() -> None:
    flight = make_flight()
    for step in (0, 0, 1, 2, COLLATING, PACKING, SETTING_UP):
        assert flight.died(step, "") is None
    assert isinstance(flight.died(1, ""), WorkerDiedError)


@pytest.mark.parametrize(("retries", "deaths"), [(0, 2), (1, 2), (2, 2), (5, 5)])
def test_as_many_deaths_in_quarantine_as_there_are_retries(retries: int, deaths: int) -> None:
    flight = make_flight(retries=retries)
    results = [flight.died(0, "") for _ in range(deaths + 1)]
    assert results[:-1] == [None] * deaths
    assert isinstance(results[-1], WorkerDiedError)
    assert f" {deaths + 1} times: " in str(results[-1])


@pytest.mark.parametrize("skip", [False, True])
def test_a_worker_that_does_not_start_in_quarantine_convicts_only_after_several_times(skip: bool) -> None:
    flight = make_flight(skip=skip)
    assert flight.died(0, "") is None
    results = [flight.died(START, "pid 1 fell") for _ in range(FRUITLESS_STARTS)]
    assert results[:-1] == [None] * (FRUITLESS_STARTS - 1)
    assert isinstance(results[-1], WorkerDiedError)
    assert str(results[-1]).startswith(f"starting ended its worker process {FRUITLESS_STARTS} times: pid 1 fell (")


def test_where_others_were_set_up_setting_up_is_not_what_kills() -> None:
    flight = make_flight()
    flight.run.has_loaded = True
    for _ in range(20):
        assert flight.died(SETTING_UP, "") is None
        assert not flight.suspect and not flight.singly


def test_nor_is_it_in_quarantine_but_for_several_times() -> None:
    flight = make_flight()
    flight.run.has_loaded = True
    assert flight.died(0, "") is None
    results = [flight.died(SETTING_UP, "") for _ in range(FRUITLESS_STARTS)]
    assert results[:-1] == [None] * (FRUITLESS_STARTS - 1)
    assert isinstance(results[-1], WorkerDiedError)


def test_skipping_leaves_the_sample_out_and_goes_on_with_the_rest() -> None:
    flight = make_flight(skip=True)
    assert [flight.died(1, "") for _ in range(3)] == [None] * 3
    assert list(flight.left_out) == [1]
    batch = flight.without([], "data")
    assert batch == Batch(7, [10, 12], "data")
    assert failures(flight) == [(11, 7, "WorkerDiedError", 3)]
    assert not flight.future.is_empty


def test_skipping_finds_one_after_the_other_until_nothing_is_left() -> None:
    flight = make_flight(skip=True)
    assert [flight.died(1, "") for _ in range(3)] == [None] * 3
    assert [flight.died(0, "") for _ in range(2)] == [None] * 2
    assert sorted(flight.left_out) == [0, 1]
    assert flight.died(2, "") is None
    batch = flight.died(2, "")
    assert isinstance(batch, Batch) and batch.indices == [] and batch.data is None
    assert failures(flight) == [
        (10, 7, "WorkerDiedError", 5),
        (11, 7, "WorkerDiedError", 3),
        (12, 7, "WorkerDiedError", 7),
    ]
    assert flight.future.is_empty


@pytest.mark.parametrize("step", [COLLATING, PACKING])
def test_skipping_what_ends_after_loading_leaves_all_out(step: int) -> None:
    flight = make_flight(skip=True)
    assert [flight.died(step, "") for _ in range(2)] == [None] * 2
    assert isinstance(flight.died(step, ""), Batch)
    assert failures(flight) == [(index, 7, "WorkerDiedError", 3) for index in (10, 11, 12)]
    assert flight.future.is_empty


def test_setting_up_is_nothing_to_skip() -> None:
    flight = make_flight(skip=True)
    assert [flight.died(SETTING_UP, "") for _ in range(2)] == [None] * 2
    assert isinstance(flight.died(SETTING_UP, ""), WorkerDiedError)
    assert failures(flight) == []


@pytest.mark.parametrize("skip", [False, True])
def test_a_single_sample(skip: bool) -> None:
    flight = make_flight("a key", collates=False, skip=skip)
    results = [flight.died(0, "") for _ in range(3)]
    assert results[:2] == [None, None]
    if skip:
        assert results[2] == Batch(7, "a key", None)
        assert failures(flight) == [("a key", 7, "WorkerDiedError", 3)]
        assert flight.future.is_empty
    else:
        assert str(results[2]).startswith("dataset['a key'] ended its worker process 3 times")


# -- deadlines --------------------------------------------------------------------------------------------------------

STACK = """\
Thread 0x1 (most recent call first):
  File "x.py", line 7 in wait
  File "x.py", line 3 in __getitem__
  File "fetch.py", line 1 in load
  File "loky.py", line 1 in run
\nThread 0x2 (most recent call first):
  File "worker.py", line 1 in _leave_with_parent"""


def test_over_its_time() -> None:
    flight = make_flight(timeout=1.5)
    error = flight.timed_out(1, 4711, 1.6, STACK)
    assert type(error) is ChunkTimeoutError
    assert str(error) == ("dataset[11] is not done within timeout=1.5 seconds (chunk 7, indices [10, 11, 12])")
    [note] = error.__notes__
    assert note.startswith(
        "In fifobatch worker 4711, dataset[11], chunk 7; attempt 1, after 1.6 s.\nStack of the worker:\n"
    )
    assert "in __getitem__" in note
    assert "in load" not in note and "in run" not in note and "_leave_with_parent" not in note
    assert not flight.suspect


def test_without_a_stack() -> None:
    error = make_flight(timeout=1.5).timed_out(1, 4711, 1.6, "")
    assert isinstance(error, ChunkTimeoutError)
    assert error.__notes__[0].endswith("Stack of the worker:\n  (none: the process did not run)")


@pytest.mark.parametrize(
    ("retry_on", "tried"),
    [(Exception, 3), ((OSError, ChunkTimeoutError), 3), (TimeoutError, 3), (ValueError, 1), (WorkerDiedError, 1)],
)
def test_over_its_time_it_is_tried_again_if_that_is_asked_for(retry_on: Any, tried: int) -> None:
    flight = make_flight(timeout=1.0, retries=2, retry_on=retry_on)
    results = [flight.timed_out(0, 1, 1.1, "") for _ in range(tried)]
    assert results[:-1] == [None] * (tried - 1)
    error = results[-1]
    assert isinstance(error, ChunkTimeoutError)
    assert f"attempt {tried}, after" in error.__notes__[0]


def test_skipping_what_is_over_its_time() -> None:
    flight = make_flight(timeout=1.0, skip=True)
    assert flight.timed_out(0, 1, 1.1, "") is None
    assert flight.timed_out(2, 1, 1.1, "") is None
    assert flight.without([], "data") == Batch(7, [11], "data")
    assert failures(flight) == [(10, 7, "ChunkTimeoutError", 1), (12, 7, "ChunkTimeoutError", 2)]


def test_skipping_a_list_that_is_over_its_time_loads_its_samples_one_by_one() -> None:
    flight = make_flight(timeout=1.0, skip=True)
    assert flight.timed_out(LISTING, 1, 1.1, "") is None
    assert flight.singly and not flight.left_out


def test_deaths_and_deadlines_are_counted_together() -> None:
    flight = make_flight(timeout=1.0, skip=True)
    assert [flight.died(0, "") for _ in range(3)] == [None] * 3
    assert flight.timed_out(1, 1, 1.1, "") is None
    flight.without([((2,), ValueError())], None)
    assert failures(flight) == [
        (10, 7, "WorkerDiedError", 3),
        (11, 7, "ChunkTimeoutError", 4),
        (12, 7, "ValueError", 5),
    ]
    assert flight.future.is_empty


# -- what was left out ------------------------------------------------------------------------------------------------


def test_the_first_error_of_a_sample_is_the_one_that_counts() -> None:
    flight = make_flight(skip=True)
    first, second = ValueError(), KeyError()
    batch = flight.without([((1,), first), (None, second)], None)
    assert batch == Batch(7, [], None)
    assert [failure.error for failure in flight.future.failures] == [second, first, second]
    assert [failure.attempts for failure in flight.future.failures] == [1, 1, 1]


def test_failures_are_in_the_order_of_the_batch() -> None:
    flight = make_flight(skip=True)
    assert flight.without([((2,), ValueError()), ((0,), ValueError())], "data").indices == [11]
    assert [failure.index for failure in flight.future.failures] == [10, 12]

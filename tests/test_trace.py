"""What is noted of each chunk, and what is made of it."""

import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from probes import Gate

from fifobatch import BatchExecutor, BatchPlan, ClosedError, FifoLoader, Span, Statistics
from fifobatch.measures import RING
from fifobatch.testing import ManualExecutor
from fifobatch.trace import Record, Trace

Clock = Callable[[float], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the clock at 0; the function returned moves it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def set_clock(seconds: float) -> None:
        now[0] = seconds

    return set_clock


class Slow:
    """Loading sample i takes i seconds, of a clock that is moved by hand."""

    def __init__(self, set_clock: Clock) -> None:
        self.set_clock = set_clock

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.set_clock(time.perf_counter() + index)
        if index == 7:
            raise ValueError("seven")
        return index


def balanced(statistics: Statistics) -> bool:
    parts = (statistics.delivered, statistics.failed, statistics.abandoned, statistics.under_way)
    return statistics.submitted == sum(parts) and min(parts) >= 0


def test_every_station_of_a_chunk_is_noted(set_clock: Clock):
    manual = ManualExecutor()
    loader = FifoLoader(Slow(set_clock), batch_size=2, executor=manual, num_workers=2, window=3)
    set_clock(10.0)
    batches = iter(loader)
    set_clock(20.0)
    manual.complete(1)  # 2 + 3 seconds
    set_clock(30.0)
    next(batches)
    assert loader.timeline() == (
        Span(0, None, 10.0, None, None, None, None, 0, None),
        Span(1, 0, 10.0, 20.0, 25.0, 30.0, 30.0, 16, None),
        Span(2, None, 10.0, None, None, None, None, 0, None),
        Span(3, None, 30.0, None, None, None, None, 0, None),
    )
    assert loader.timeline() == batches.timeline()
    assert math.isnan(loader.timeline()[0].load_seconds)
    assert loader.timeline()[1].load_seconds == 5.0


def test_statistics_add_up(set_clock: Clock):
    manual = ManualExecutor()
    executor = BatchExecutor(max_workers=None, executor=manual)
    loader = FifoLoader(Slow(set_clock), batch_size=2, executor=executor, num_workers=2, window=4)
    assert loader.statistics() == executor.statistics() == Trace().statistics()
    set_clock(100.0)
    batches = iter(loader)
    assert loader.statistics().under_way == loader.statistics().peak_under_way == 4
    for number in (1, 0, 2, 3):  # 5, 1, 9 and 13 seconds, the last an error
        manual.complete(number)
    set_clock(200.0)
    assert [next(batches).tolist() for _ in range(3)] == [[2, 3], [0, 1], [4, 5]]
    with pytest.raises(ValueError, match="seven"):
        next(batches)
    assert loader.statistics().under_way == 0
    set_clock(250.0)
    assert list(batches) == []
    set_clock(300.0)  # the epoch has ended
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.delivered, statistics.failed) == (4, 3, 1)
    assert statistics.seconds == 150.0
    assert statistics.seconds_to_first == 100.0
    assert statistics.seconds_waited == statistics.waited_share == 0.0
    assert not statistics.loader_bound
    assert statistics.load_p50 == 5.0  # of 1, 5 and 9: what failed does not count
    assert statistics.load_p95 == pytest.approx(8.6)
    assert batches.statistics() == statistics
    assert executor.statistics().delivered == 3
    assert loader.timeline()[3].error == "ValueError"
    executor.shutdown()


@pytest.mark.parametrize(("compute", "bound"), [(0.0, True), (6.0, True), (8.0, False)])
def test_the_loader_is_the_bottleneck_if_the_consumer_waits_for_a_tenth_of_the_time(
    set_clock: Clock, compute: float, bound: bool
):
    trace = Trace(Trace())
    trace.started()
    now = 0.0
    for number in range(4):
        trace.submit(record := Record(number))
        requested, now = now, now + (100.0 if number == 0 else 1.0)  # the first does not tell
        set_clock(now)
        trace.arrive(record, 0, requested, now, 5)
        trace.hand_over(record)
        trace.deliver(record, requested)
        now += compute
        set_clock(now)
    trace.end()
    statistics = trace.statistics()
    assert statistics.loader_bound is bound
    assert statistics.seconds_waited == 103.0
    assert statistics.seconds == 103.0 + 4 * compute
    assert statistics.bytes == 20
    assert statistics.peak_bytes == 5


def test_a_clock_of_another_machine_gives_durations_only(set_clock: Clock):
    trace = Trace()
    set_clock(50.0)
    trace.submit(record := Record(0))
    set_clock(60.0)
    trace.arrive(record, "there", 1_000.0, 1_002.0, 0)
    (span,) = trace.timeline()
    assert (span.started, span.loaded) == (58.0, 60.0)


def test_workers_elsewhere_are_numbered_as_they_appear(set_clock: Clock):
    trace = Trace(Trace())
    for worker in (("host", 7), ("host", 3), ("host", 7)):
        trace.submit(record := Record(0))
        trace.arrive(record, worker, 0.0, 0.0, 0)
    assert [span.worker for span in trace.timeline()] == [0, 1, 0]


def test_the_ring_is_bounded_and_the_sums_are_not():
    trace = Trace()
    for number in range(RING + 10):
        trace.submit(record := Record(number))
        trace.arrive(record, 0, record.submitted, time.perf_counter(), 1)
        trace.hand_over(record)
        trace.deliver(record)
    assert [span.number for span in trace.timeline()] == list(range(10, RING + 10))
    assert trace.statistics().delivered == trace.statistics().bytes == RING + 10


def test_what_is_left_of_an_iterator_is_abandoned():
    manual = ManualExecutor()
    executor = BatchExecutor(executor=manual)
    loader = FifoLoader(range(40), batch_size=2, executor=executor, num_workers=2, window=4)
    for _ in range(2):
        first = len(manual.calls)
        batches = iter(loader)
        manual.complete(first)
        next(batches)
        manual.complete(first + 1)  # arrives, and nobody takes it
        assert executor.statistics().under_way == 4
        del batches
        assert loader.statistics().under_way == 0
        assert loader.statistics().abandoned == 4
        assert executor.statistics().under_way == 0
        assert balanced(loader.statistics())
        assert balanced(executor.statistics())
    assert executor.statistics().abandoned == 8
    assert executor.statistics().delivered == 2


def test_a_batch_delivered_while_another_thread_closes_is_counted_once():
    root = Trace()
    trace = Trace(root)
    trace.submit(record := Record(0))
    trace.end()
    assert root.statistics().abandoned == 1
    trace.hand_over(record)
    trace.deliver(record, record.submitted)
    for statistics in (trace.statistics(), root.statistics()):
        assert (statistics.delivered, statistics.abandoned) == (1, 0)


def test_what_is_submitted_while_another_thread_closes_is_abandoned():
    root = Trace()
    trace = Trace(root)
    trace.submit(Record(0))
    trace.end()
    assert root.statistics().abandoned == 1
    trace.submit(Record(1))
    for statistics in (trace.statistics(), root.statistics()):
        assert (statistics.abandoned, statistics.under_way) == (2, 0)


def test_a_closed_iteration_loads_no_more():
    manual = ManualExecutor()
    executor = BatchExecutor(executor=manual)
    closing: list[Any] = []

    class Sampler:
        def __iter__(self):
            yield from range(4)
            closing.pop().close()  # as another thread would, while this one refills the window
            yield from range(4)

    loader = FifoLoader(range(10), sampler=Sampler(), executor=executor, num_workers=1, window=3)
    batches = iter(loader)
    closing.append(batches)
    manual.complete(0)
    next(batches)
    manual.complete(1)
    next(batches)
    assert len(manual.calls) == 4
    assert executor.statistics().under_way == 0
    assert balanced(executor.statistics())


def test_an_interrupt_before_the_first_batch_leaves_sound_figures():
    class Sampler:
        def __iter__(self):
            yield 0
            raise KeyboardInterrupt

    executor = BatchExecutor(executor=ManualExecutor())
    with pytest.raises(KeyboardInterrupt):
        iter(FifoLoader(range(10), sampler=Sampler(), executor=executor, num_workers=1, window=3))
    statistics = executor.statistics()
    assert statistics.seconds >= 0
    assert (statistics.abandoned, statistics.under_way) == (1, 0)
    assert "-" not in str(statistics)


def test_the_start_is_part_of_an_executors_time(set_clock: Clock):
    executor = BatchExecutor(executor=ManualExecutor())
    set_clock(5.0)
    root = executor._engine.trace
    trace = Trace(root)
    set_clock(7.0)
    trace.submit(Record(0))
    trace.started()
    statistics = executor.statistics()
    assert statistics.seconds == statistics.seconds_starting == statistics.seconds_waited == 2.0


def test_chunks_submitted_one_by_one_are_delivered_when_they_are_done():
    manual = ManualExecutor()
    executor = BatchExecutor(executor=manual)
    plan = BatchPlan(range(6), batch_size=2)
    futures = [executor.submit(plan, chunk) for chunk in plan]
    manual.complete(1)
    manual.fail(2, OSError("lost"))
    assert (executor.statistics().delivered, executor.statistics().failed) == (1, 1)
    assert futures[0].cancel()
    assert executor.statistics().failed == 2
    assert [span.error for span in executor.timeline()] == ["CancelledError", None, "OSError"]
    assert all(span.requested is None and span.seconds_waited == 0.0 for span in executor.timeline())
    assert balanced(executor.statistics())


def test_waiting_in_vain_is_waiting(set_clock: Clock):
    trace = Trace(Trace())
    trace.submit(Record(0))
    set_clock(3.0)
    trace.wait(1.0)
    assert trace.statistics().seconds_waited == 2.0


def test_a_trace_keeps_no_batch_and_no_iterator():
    class Samples:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.zeros(3)

    with ThreadPoolExecutor(1) as threads:
        loader = FifoLoader(Samples(), executor=threads, num_workers=1)
        batches = iter(loader)
        kept = [weakref.ref(batches), weakref.ref(next(batches))]
        del batches
    assert [reference() for reference in kept] == [None, None]
    assert loader.statistics().delivered == 1


def test_in_process_the_spans_lie_one_behind_the_other(set_clock: Clock):
    loader = FifoLoader(Slow(set_clock), batch_size=2, num_workers=0)
    batches = iter(loader)
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(ValueError, match="seven"):
        next(batches)
    spans = loader.timeline()
    assert [(span.worker, span.started, span.loaded, span.delivered) for span in spans] == [
        (None, 0.0, 1.0, 1.0),
        (None, 1.0, 6.0, 6.0),
        (None, 6.0, 15.0, 15.0),
        (None, 15.0, 28.0, 28.0),
    ]
    statistics = loader.statistics()
    assert statistics.seconds_waited == statistics.seconds == 28.0
    assert (statistics.delivered, statistics.failed) == (3, 1)
    batches.close()
    with pytest.raises(ClosedError):
        next(batches)


class Busy:
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((1000,), index)


def test_a_real_run_agrees_with_itself():
    with FifoLoader(Busy(), batch_size=2, num_workers=2, persistent_workers=True) as loader:
        for _ in range(2):
            batches = iter(loader)
            count = sum(1 for _ in batches)
            statistics, spans = loader.statistics(), loader.timeline()
            assert count == statistics.delivered == len(spans) == 30
            assert [span.number for span in spans] == list(range(30))
            assert {span.worker for span in spans} <= {0, 1}
            for span in spans:
                assert span.submitted <= span.started <= span.loaded <= span.delivered
                assert span.requested <= span.delivered
                assert span.bytes > 2 * 8000
            for worker in (0, 1):
                lane = sorted((span.started, span.loaded) for span in spans if span.worker == worker)
                assert all(before[1] <= after[0] for before, after in pairwise(lane)), (
                    "one worker loads one chunk at a time"
                )
            waits = sorted((span.requested, span.delivered) for span in spans)
            assert all(before[1] <= after[0] for before, after in pairwise(waits)), "one consumer waits once at a time"
            assert statistics.bytes == sum(span.bytes for span in spans)
            assert 0 < statistics.peak_bytes <= 4 * max(span.bytes for span in spans)
            assert statistics.peak_under_way == 4
            parts = statistics.seconds_starting + sum(span.seconds_waited for span in spans)
            assert parts <= statistics.seconds_waited <= statistics.seconds
            assert statistics.load_p50 <= statistics.load_p95 <= statistics.load_p99


def test_several_consumers_and_iterators_are_added_up_in_the_executor():
    with BatchExecutor(2) as executor:
        loaders = [FifoLoader(Busy(), batch_size=5, executor=executor) for _ in range(2)]
        threads = [threading.Thread(target=list, args=(loader,)) for loader in loaders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert executor.statistics().delivered == 24
        assert executor.statistics().bytes == sum(loader.statistics().bytes for loader in loaders)
        assert balanced(executor.statistics())


def test_a_closed_loader_still_tells_of_its_last_epoch(gate: Gate):
    loader = FifoLoader(range(4), batch_size=2, num_workers=1)
    assert len(list(loader)) == 2
    loader.close()
    assert loader.statistics().delivered == 2


def test_statistics_say_it_in_words():
    def words(**changes: Any) -> str:
        fields = dict.fromkeys(Statistics.__dataclass_fields__, 0) | {
            "submitted": 4,
            "delivered": 4,
            "seconds": 10.0,
            "seconds_waited": 6.0,
            "seconds_to_first": 0.25,
            "loader_bound": True,
            "load_p50": 0.002,
            "load_p95": 0.5,
            "load_p99": 2.0,
        }
        return str(Statistics(**(fields | changes)))

    assert words() == (
        "4 batches in 10.00 s. The consumer waited 6.00 s of it (60%), the first batch came after 250 ms.\n"
        "The loader was the bottleneck: more workers or faster samples would shorten the epoch.\n"
        "Loading a batch took 2 ms (median), 500 ms (p95), 2.00 s (p99)."
    )
    assert "was not the bottleneck" in words(loader_bound=False)
    assert "was the bottleneck: more workers" in words(seconds_to_first=6.0)  # it was a slow batch
    assert "persistent_workers=True" in words(seconds_to_first=6.0, seconds_to_load=5.5)
    assert "Its consumers waited 25.00 s, added up" in words(seconds_waited=25.0)
    assert "1 batch in 10.00 s, 2 failed, 1 abandoned" in words(delivered=1, failed=2, abandoned=1)
    assert words(retries=2).endswith("(p99).\nTried again after an error or a timeout: 2.")
    assert words(reloads=1).endswith("(p99).\nLoaded again after a worker's end: 1.")
    assert words(retries=1, reloads=2000).splitlines()[3:] == [
        "Tried again after an error or a timeout: 1. Loaded again after a worker's end: 2,000."
    ]
    nothing = words(delivered=0, under_way=4, load_p50=math.nan)
    assert nothing.startswith("0 batches in 10.00 s, 4 under way.")
    assert "nan" not in nothing
    assert "bottleneck" not in nothing
    assert str(Trace().statistics()) == "Nothing was loaded yet."


def test_a_loader_shows_itself_in_one_line_and_in_a_table():
    loader = FifoLoader(range(6), batch_size=2, num_workers=0, shuffle=True, collate_fn=lambda samples: "<b>")
    assert repr(loader) == (
        "<FifoLoader(range of 6, batch_size=2, num_workers=0, window=1, sampler=RandomSampler, collate_fn=<lambda>): "
        "not iterated yet>"
    )
    assert len(list(loader)) == 3
    assert "last epoch 3 batches in " in repr(loader)
    assert "\n" not in repr(loader)
    table = loader._repr_html_()
    assert "<td style='text-align:left;white-space:pre-line'>&lt;lambda&gt;</td>" in table
    assert "bottleneck" in table


def test_a_loader_shows_what_becomes_of_errors_where_that_is_not_the_default():
    loader = FifoLoader(range(6), num_workers=1, timeout=2.5, retries=2, retry_on=(OSError, KeyError), on_error="skip")
    assert repr(loader) == (
        "<FifoLoader(range of 6, batch_size=1, num_workers=1, window=2, timeout=2.5, retries=2, "
        "retry_on=(OSError, KeyError), on_error='skip'): not iterated yet>"
    )
    table = loader._repr_html_()
    for name, value in {"timeout": "2.5", "retries": "2", "retry_on": "(OSError, KeyError)"}.items():
        assert f">{name}</th><td style='text-align:left;white-space:pre-line'>{value}</td>" in table
    assert ">on_error</th><td style='text-align:left;white-space:pre-line'>&#x27;skip&#x27;</td>" in table
    assert "retry_on=TimeoutError" in repr(FifoLoader(range(6), num_workers=1, retry_on=TimeoutError))


def test_a_loader_shows_itself_whatever_the_dataset_does():
    class Rude:
        def __len__(self):
            raise RuntimeError("no length")

        def __getitem__(self, index):
            return index

        def __repr__(self):
            raise RuntimeError("no repr")

    assert repr(FifoLoader(Rude(), sampler=[1], num_workers=0)).startswith("<FifoLoader(Rude, batch_size=1")
    assert repr(FifoLoader(range(4), batch_sampler=[[0]], num_workers=0)).startswith(
        "<FifoLoader(range of 4, batch_size=None"
    )
    assert repr(FifoLoader.__new__(FifoLoader)).startswith("<fifobatch.loader.FifoLoader object")

"""IterableDatasets: lanes in completion order, who reads what, how they end, and what becomes of faults."""

import gc
import inspect
import itertools
import os
import random
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import await_supervisors, supervisors
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import (
    TIMEOUT,
    Blind,
    Gate,
    Once,
    Range,
    Sized,
    Stream,
    drain,
    drawn,
    failing,
    failing_at_once,
    for_ever,
    hanging,
    held_back,
    large,
    noting,
    of_lengths,
    seeds_own,
    slow,
    take_share,
    telling_its_end,
    who,
    with_pids,
    without_a,
)
from torch.utils.data import DataLoader, IterableDataset

from fifobatch import (
    BatchExecutor,
    BatchPlan,
    ChunkTimeoutError,
    ClosedError,
    FifoLoader,
    PlanError,
    SampleError,
    WorkerDiedError,
)
from fifobatch.attempt import Again, Attempt, Later, Located, Policy
from fifobatch.fetch import Payload, StreamOptions
from fifobatch.inprocess import InProcess
from fifobatch.lane import Lane
from fifobatch.measures import Statistics
from fifobatch.streams import Lanes
from fifobatch.window import Window


def flat(batches: Any) -> list[Any]:
    return sorted(sample for batch in batches for sample in (batch if isinstance(batch, list) else batch.tolist()))


def balances(statistics: Statistics) -> bool:
    return statistics.submitted == sum(
        (statistics.delivered, statistics.failed, statistics.abandoned, statistics.under_way)
    )


def told(error: Exception) -> str:
    return "".join([str(error), *getattr(error, "__notes__", [])])


def by_hand(lengths: tuple[int, ...], batch_size: int, drop_last: bool) -> dict[int, tuple[list[int], list[int]]]:
    """Return what lanes of these lengths make: number, then positions in the lane, and items."""
    batches = {}
    for lane, length in enumerate(lengths):
        for k in range(length // batch_size if drop_last else -(-length // batch_size)):
            positions = list(range(k * batch_size, min((k + 1) * batch_size, length)))
            batches[k * len(lengths) + lane] = positions, [100 * lane + position for position in positions]
    return batches


# -- in completion order ----------------------------------------------------------------------------------------------


def test_the_seeds_script_has_all_fast_batches_before_the_second_slow_one(gate: Gate) -> None:
    iterator = iter(FifoLoader(Stream(seeds_own, 20, gate), num_workers=2, batch_size=2))
    assert [next(iterator).tolist() for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert gate.arrivals(1) == [11]  # all the while, the first slow sample was waiting
    gate.open(9)
    assert [batch.tolist() for batch in iterator] == [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19]]


def test_a_lane_has_at_most_prefetch_factor_requests_and_all_of_them_the_window(gate: Gate) -> None:
    iterator = FifoLoader(Stream(held_back, 6, gate), num_workers=2, prefetch_factor=2).batches()
    assert [span.number for span in iterator.timeline()] == [0, 1, 2, 3]
    assert [next(iterator).number for _ in range(6)] == [0, 2, 4, 6, 8, 10]
    under_way = [span.number for span in iterator.timeline() if span.delivered is None]
    assert [number for number in under_way if number % 2] == [1, 3]
    statistics = iterator.statistics()
    assert statistics.peak_under_way == 4
    assert balances(statistics)
    gate.open(6)
    assert [batch.number for batch in iterator] == [1, 3, 5, 7, 9, 11]
    assert iterator.statistics().peak_under_way == 4


def test_an_exhausted_lane_leaves_its_place_to_others(gate: Gate) -> None:
    dataset = Stream(held_back, 9, gate, 0)
    iterator = FifoLoader(dataset, num_workers=2, prefetch_factor=3, window=3).batches()
    assert {span.number for span in iterator.timeline()} == {0, 1, 2}
    window, known = iterator._batches._window, threading.Semaphore(0)  # type: ignore[union-attr]

    def cancel(number: int) -> None:
        Window.cancel(window, number)
        known.release()

    window.cancel = cancel  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(next, iterator)
        for _ in range(2):  # batches 0 and 2 do not exist, as the waiting consumer hears
            assert known.acquire(timeout=TIMEOUT)
        gate.open(1)
        assert first.result(TIMEOUT).number == 1
    assert {span.number for span in iterator.timeline() if span.delivered is None} == {3, 5, 7}
    gate.open(8)
    assert [batch.number for batch in iterator] == [3, 5, 7, 9, 11, 13, 15, 17]


@pytest.mark.parametrize(
    ("lengths", "batch_size", "drop_last"),
    [
        ((7, 3), 2, False),
        ((7, 3), 2, True),
        ((0, 5), 2, False),
        ((4, 0, 1), 1, False),
        ((2, 2), 5, True),
        ((0, 0), 2, False),
        ((5,), 2, False),
    ],
)
@pytest.mark.parametrize("in_order", [False, True])
def test_each_batch_comes_once_with_its_number_and_its_positions(
    lengths: tuple[int, ...], batch_size: int, drop_last: bool, in_order: bool
) -> None:
    loader = FifoLoader(
        Stream(of_lengths, *lengths),
        batch_size=batch_size,
        drop_last=drop_last,
        num_workers=len(lengths),
        in_order=in_order,
    )
    batches = list(loader.batches())
    found = {batch.number: (batch.indices, batch.data.tolist()) for batch in batches}
    assert found == by_hand(lengths, batch_size, drop_last)
    assert len(batches) == len(found)
    if in_order:
        assert list(found) == sorted(found)
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.under_way, statistics.abandoned) == (len(found), 0, 0)
    assert len(loader.timeline()) == len(found)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
@pytest.mark.parametrize("lengths", [(7, 2, 5), (1, 6), (0, 3, 3)])
def test_in_order_is_torchs_own_order(lengths: tuple[int, ...]) -> None:
    arguments = {"batch_size": 2, "num_workers": len(lengths)}
    of_torch = DataLoader(Stream(of_lengths, *lengths), **arguments, multiprocessing_context="fork")
    ours = FifoLoader(Stream(of_lengths, *lengths), **arguments, in_order=True)
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in of_torch]


def test_max_skew_bounds_how_far_a_lane_runs_ahead(gate: Gate) -> None:
    iterator = FifoLoader(Stream(held_back, 6, gate), num_workers=2, max_skew=3, prefetch_factor=4).batches()
    delivered = [next(iterator).number for _ in range(3)]
    assert delivered == [0, 2, 4]  # 6 would overtake 1 by more than three places
    gate.open(6)
    delivered += [batch.number for batch in iterator]
    assert sorted(delivered) == list(range(12))
    for place, number in enumerate(delivered):
        assert set(range(number - 3)) <= set(delivered[:place])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_single_samples_and_a_collate_fn(num_workers: int) -> None:
    loader = FifoLoader(Stream(of_lengths, 3, 2), batch_size=None, num_workers=num_workers)
    assert sorted(loader) == ([0, 1, 2, 100, 101] if num_workers else [0, 1, 2])
    (first,) = (batch for batch in loader.batches() if batch.number == 0)
    assert (first.indices, first.data) == (0, 0)
    loader = FifoLoader(Stream(of_lengths, 3, 2), batch_size=2, num_workers=num_workers, collate_fn=sum)
    assert sorted(loader) == ([1, 2, 201] if num_workers else [1, 2])


def test_an_endless_stream_ends_with_break() -> None:
    loader = FifoLoader(Stream(for_ever), batch_size=2, num_workers=2)
    seen = []
    for batch in loader.batches():
        seen.append(batch.number)
        if len(seen) == 20:
            break
    assert len(set(seen)) == 20
    statistics = loader.statistics()
    del batch
    assert balances(statistics)
    assert statistics.delivered == 20


def test_the_order_within_a_lane_is_the_streams() -> None:
    for window in (1, 3, None):
        loader = FifoLoader(Stream(of_lengths, 5, 9, 0), num_workers=3, window=window)
        seen = [int(sample) for batch in loader for sample in batch]
        for lane, length in enumerate((5, 9, 0)):
            assert [item for item in seen if item // 100 == lane] == [100 * lane + k for k in range(length)]
        assert loader.statistics().peak_under_way <= (window or 6)


def test_max_bytes_bounds_streams_too() -> None:
    loader = FifoLoader(Stream(large, 6, 10_000), num_workers=2, max_bytes=25_000)
    assert sorted(int(batch[0, 0]) for batch in loader) == list(range(12))
    assert loader.statistics().peak_under_way <= 2
    assert loader.statistics().peak_bytes <= 25_000


# -- epochs and ends --------------------------------------------------------------------------------------------------


def test_persistent_workers_live_on_and_see_a_changed_dataset() -> None:
    dataset = Stream(with_pids, 3)
    with FifoLoader(dataset, num_workers=2, persistent_workers=True, collate_fn=list) as loader:
        first, second = ({pid for [(_, pid)] in loader} for _ in range(2))
        assert first == second
        assert len(first) == 2
        assert os.getpid() not in first
        dataset.args = (5,)
        third = [sample for [sample] in loader]
        assert Counter(lane for lane, _ in third) == {0: 5, 1: 5}
        assert {pid for _, pid in third} == first


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", ["break", "end", "close", "iterator closed"])
def test_generators_are_closed(how: str, persistent: bool, gate: Gate) -> None:
    dataset = Stream(telling_its_end, 4 if how == "end" else 10**6, gate)
    loader = FifoLoader(dataset, num_workers=2, persistent_workers=persistent, in_order=True)
    for _ in range(2 if persistent and how != "close" else 1):
        iterator = iter(loader)
        if how == "end":
            assert len(list(iterator)) == 8
        else:
            for _ in range(4):
                next(iterator)
        if how == "close":
            loader.close()
        elif how == "iterator closed":
            iterator.close()
        del iterator
        assert sorted(gate.arrivals(2)) == [0, 1]
    loader.close()


@pytest.mark.parametrize("how", ["break", "end", "close"])
def test_the_generator_is_closed_without_workers(how: str, gate: Gate) -> None:
    iterator = iter(FifoLoader(Stream(telling_its_end, 3, gate), num_workers=0))
    next(iterator)
    if how == "end":
        assert len(list(iterator)) == 2
    elif how == "close":
        iterator.close()
        with pytest.raises(ClosedError):
            next(iterator)
    else:
        del iterator
    assert gate.arrivals(1) == [0]


def test_the_generator_is_closed_where_the_parent_reads(gate: Gate) -> None:
    iterator = iter(FifoLoader(Stream(telling_its_end, 1000, gate), num_workers=1, split="parent"))
    next(iterator)
    iterator.close()
    assert gate.arrivals(1) == [0]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_iter_is_called_once_a_lane_and_epoch(num_workers: int, persistent: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    persistent = persistent and num_workers > 0
    with FifoLoader(
        Stream(noting, str(log), 7), batch_size=2, num_workers=num_workers, persistent_workers=persistent
    ) as loader:
        for epoch in range(1, 3):
            assert len(list(loader)) == 4 * max(1, num_workers)
            lanes = Counter(log.read_text().splitlines())
            assert lanes == {f"iter {lane}": epoch for lane in range(max(1, num_workers))}


def test_the_length_is_the_datasets_and_a_wrong_one_is_told_once_an_epoch() -> None:
    def numbers(length: int) -> range:
        return range(9)

    class Lying(Blind, Sized):
        pass

    loader = FifoLoader(Lying(numbers, 4), batch_size=2, num_workers=1)
    assert len(loader) == len(iter(loader)) == 2
    assert len(FifoLoader(Lying(numbers, 5), batch_size=2, num_workers=3)) == 3
    assert len(FifoLoader(Lying(numbers, 5), batch_size=2, num_workers=3, drop_last=True)) == 2
    assert len(FifoLoader(Lying(numbers, 5), batch_size=None)) == 5
    for num_workers in (0, 1):
        loader = FifoLoader(Lying(numbers, 4), batch_size=2, num_workers=num_workers)
        for _ in range(2):
            with pytest.warns(UserWarning, match="2 batches, but there are more") as caught:
                assert flat(loader) == list(range(9))
            assert len(caught) == 1
            assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches, errors = drain(iter(loader))
        assert sorted(item for batch in batches for item in batch.tolist()) == list(range(9))
        assert [type(error) for error in errors] == [UserWarning]
    with pytest.raises(TypeError):
        len(FifoLoader(Stream(of_lengths, 1)))
    with pytest.raises(TypeError):
        len(iter(FifoLoader(Stream(of_lengths, 1), num_workers=0)))


class Rounded(Sized):
    """Its lanes' rests make more batches than its length says, as torch's would."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(info.id, self.args[0], info.num_workers))


def test_a_rest_in_each_lane_is_no_wrong_length() -> None:
    loader = FifoLoader(Rounded(range, 22), batch_size=5, num_workers=3)
    assert len(loader) == 5
    assert flat(loader) == list(range(22))  # six batches, and no warning


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, True)])
def test_an_iterator_that_is_used_up_is_told(num_workers: int, persistent: bool) -> None:
    with FifoLoader(Once(6), batch_size=2, num_workers=num_workers, persistent_workers=persistent) as loader:
        assert flat(loader) == list(range(6))
        for _ in range(2):
            with pytest.warns(UserWarning, match="this epoch was empty, and an earlier one was not") as caught:
                assert list(loader) == []
            assert caught[0].filename == __file__


def test_an_epoch_of_which_only_an_error_came_is_not_told_to_be_empty() -> None:
    for num_workers in (0, 1):
        loader = FifoLoader(Stream(failing, 2, (-1, 0)), num_workers=num_workers, persistent_workers=bool(num_workers))
        assert flat(loader) == [0, 1]
        loader.dataset.args = (2, (0, 0))
        batches, errors = drain(iter(loader))
        assert batches == []
        assert [str(error) for error in errors] == ["cannot read 0"]


def test_a_stream_that_is_empty_from_the_start_is_not_told() -> None:
    loader = FifoLoader(Stream(of_lengths, 0, 0), num_workers=2)
    for _ in range(2):
        assert list(loader) == []


def test_abandoned_iterators_and_closed_loaders_leave_nothing() -> None:
    known = supervisors()
    loader = FifoLoader(Stream(for_ever), num_workers=2)
    iterators = [iter(loader) for _ in range(3)]
    for iterator in iterators:
        next(iterator)
    loader.close()
    for iterator in iterators:
        with pytest.raises(ClosedError):
            next(iterator)
    del iterators, iterator
    iterator = iter(loader)
    next(iterator)
    del iterator, loader
    gc.collect()
    await_supervisors(known)


# -- who gets what ----------------------------------------------------------------------------------------------------


def test_get_worker_info_is_right_in_each_lane() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = FifoLoader(Stream(who), num_workers=3, collate_fn=list, generator=generator)
    base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(5)).item())
    assert sorted(sample for [sample] in loader) == [(lane, 3, base + lane, True) for lane in range(3)]


def test_worker_init_fn_may_split_the_dataset() -> None:
    with FifoLoader(
        Range(10), batch_size=2, num_workers=3, worker_init_fn=take_share, persistent_workers=True
    ) as loader:
        for _ in range(2):
            assert flat(loader) == list(range(10))


@pytest.mark.parametrize(("split", "warned"), [("auto", 1), ("none", 0)])
def test_a_stream_that_nobody_splits_comes_once_a_worker(split: str, warned: int) -> None:
    loader = FifoLoader(Blind(range, 4), num_workers=2, split=split)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = []
            for batch in loader:
                got += batch.tolist()
            line = inspect.currentframe().f_lineno - 2
        assert sorted(got) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(caught) == warned
        for warning in caught:
            assert "split='stride'" in str(warning.message)
            assert (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.parametrize(
    ("dataset", "num_workers"), [(Blind(range, 4), 1), (Blind(range, 0), 2), (Stream(of_lengths, 3, 3), 2)]
)
def test_there_is_no_warning_where_nothing_is_repeated(dataset: Stream, num_workers: int) -> None:
    assert len(flat(FifoLoader(dataset, num_workers=num_workers))) in (4, 0, 6)


def test_where_the_warning_is_an_error_no_batch_is_lost() -> None:
    batches, errors = drain(iter(FifoLoader(Blind(range, 4), num_workers=2)))
    assert [type(error) for error in errors] == [UserWarning]
    assert flat(batches) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_split_stream_does_not_hide_one_that_is_not_on_the_same_workers() -> None:
    with BatchExecutor(2) as executor:
        assert flat(FifoLoader(Stream(of_lengths, 2, 2), executor=executor)) == [0, 1, 100, 101]
        with pytest.warns(UserWarning, match="every worker reads the whole IterableDataset"):
            assert len(list(FifoLoader(Blind(range, 2), executor=executor))) == 4
        with pytest.warns(UserWarning, match="every worker reads") as caught:
            for _ in executor.as_completed(BatchPlan(Blind(range, 2))):
                pass
        assert caught[0].filename == __file__


def test_stride_keeps_every_nth_sample() -> None:
    loader = FifoLoader(Blind(range, 11), batch_size=2, num_workers=3, split="stride")
    found = {batch.number: (batch.indices, batch.data.tolist()) for batch in loader.batches()}
    assert found == {
        number: (items, items)
        for number, items in {0: [0, 3], 1: [1, 4], 2: [2, 5], 3: [6, 9], 4: [7, 10], 5: [8]}.items()
    }
    assert flat(FifoLoader(Blind(range, 11), num_workers=0, split="stride")) == list(range(11))


def shuffled(length: int) -> Iterator[int]:
    items = list(range(length))
    random.shuffle(items)
    for item in items:
        if random.random() < 0.5:  # draws while it reads, and others draw in between
            yield item


def test_with_a_stride_all_lanes_read_the_same_also_if_it_is_random() -> None:
    def draws(samples: list[int]) -> list[int]:
        random.random(), torch.rand(1)
        return samples

    found = {}
    for num_workers in (0, 1, 2, 3):
        loader = FifoLoader(
            Blind(shuffled, 20),
            num_workers=num_workers,
            split="stride",
            collate_fn=draws,
            batch_size=2,
            generator=torch.Generator().manual_seed(5),
        )
        batches = list(loader.batches())
        items = {index: item for batch in batches for index, item in zip(batch.indices, batch.data)}
        found[num_workers] = [items[index] for index in range(len(items))]
        assert len(set(found[num_workers])) == len(found[num_workers])
    assert found[0] == found[1] == found[2] == found[3]
    assert 2 < len(found[1]) < 20


def test_a_stride_over_a_stream_that_splits_itself_is_told_once() -> None:
    loader = FifoLoader(Stream(of_lengths, 4, 4), num_workers=2, split="stride", persistent_workers=True)
    with pytest.warns(UserWarning, match="split='stride' keeps a share again") as caught:
        assert sorted(map(int, loader)) == [0, 2, 101, 103]
    assert [warning.filename for warning in caught] == [__file__]
    loader = FifoLoader(Blind(range, 4), num_workers=2, split="stride")
    assert sorted(map(int, loader)) == [0, 1, 2, 3]  # without a warning


def test_errors_under_a_stride_name_the_item_of_the_stream() -> None:
    for item in (2, 3):  # for one lane its own, for the other not
        dataset = Blind(failing, 0, 2, 6, (0, item))
        loader = FifoLoader(dataset, num_workers=2, split="stride", on_error="skip")
        with pytest.warns(UserWarning, match=f"cannot read {item}"):
            list(loader)
        assert {failure.index for failure in loader.failures} == {item}
        _, errors = drain(iter(FifoLoader(dataset, num_workers=2, split="stride")))
        assert all(f"item {item} of the stream, read by lane" in "".join(error.__notes__) for error in errors)
        assert len(errors) == 2


def test_data_pipes_are_sharded_and_shuffled_as_torch_does() -> None:
    def same(item: int) -> int:  # which torch's own way of pickling pipes does not take
        return item

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.data.datapipes.iter import IterableWrapper

        pipe = IterableWrapper(list(range(20))).map(same).shuffle().sharding_filter()
    for options in ({}, {"split": "stride"}, {"split": "none"}, {"num_workers": 0}, {"persistent_workers": True}):
        options = {"num_workers": 2, "batch_size": 4, **options}
        loader = FifoLoader(pipe, **options, in_order=True, generator=torch.Generator().manual_seed(2))
        epochs = [[item for batch in loader for item in batch.tolist()] for _ in range(2)]
        assert [sorted(epoch) for epoch in epochs] == 2 * [list(range(20))], options
        assert epochs[0] != epochs[1]
    unsharded = IterableWrapper([1, 2]).filter(int.__bool__)  # without a length
    with pytest.warns(UserWarning, match="every worker reads the whole"):
        assert flat(FifoLoader(unsharded, num_workers=2)) == [1, 1, 2, 2]


def test_the_parent_reads_and_workers_collate() -> None:
    def where(samples: list[int]) -> tuple[int, list[int]]:
        return os.getpid(), samples

    loader = FifoLoader(Blind(range, 11), batch_size=2, num_workers=2, split="parent", collate_fn=where)
    batches = list(loader.batches())
    assert {batch.number: batch.indices for batch in batches} == {
        number: list(range(2 * number, min(2 * number + 2, 11))) for number in range(6)
    }
    assert all(batch.data[1] == batch.indices for batch in batches)
    assert os.getpid() not in {batch.data[0] for batch in batches}
    ordered = FifoLoader(Blind(range, 11), batch_size=2, num_workers=2, split="parent", in_order=True, drop_last=True)
    assert [batch.tolist() for batch in ordered] == [[k, k + 1] for k in range(0, 10, 2)]


class BeginningAgain(IterableDataset[int]):
    """Its own iterator, which begins again when it is asked for more after its end."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == 6:
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.position


@pytest.mark.parametrize(("batch_size", "drop_last"), [(2, False), (4, False), (4, True), (7, False), (None, False)])
def test_a_stream_that_is_over_is_not_asked_again(batch_size: int | None, drop_last: bool) -> None:
    arguments: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    expected = [torch.as_tensor(batch).tolist() for batch in DataLoader(BeginningAgain(), **arguments)]
    with ThreadPoolExecutor(2) as threads:
        for where in (
            {"num_workers": 0},
            {"num_workers": 1},
            {"num_workers": 1, "split": "parent"},
            {"executor": threads},
        ):
            loader = FifoLoader(BeginningAgain(), **arguments, **where, in_order=True)
            batches = itertools.islice(loader, len(expected) + 1)
            assert [torch.as_tensor(batch).tolist() for batch in batches] == expected, where
    chunks = itertools.islice(BatchPlan(BeginningAgain(), **arguments), len(expected) + 1)
    assert [chunk.items for chunk in chunks] == expected


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split='half': give one of 'auto', 'none', 'stride', 'parent'"):
        FifoLoader(Blind(range, 3), split="half")


@pytest.mark.parametrize("split", ["auto", "none", "stride", "parent"])
def test_on_threads_this_process_reads(split: str) -> None:
    with ThreadPoolExecutor(3) as threads:
        loader = FifoLoader(Stream(of_lengths, 7), batch_size=2, executor=threads, split=split)
        assert flat(loader) == list(range(7))
        assert flat(BatchExecutor(executor=threads).as_completed(BatchPlan(Blind(range, 7), batch_size=2))) == list(
            range(7)
        )


def test_a_stream_that_cannot_be_pickled_names_what_is_in_the_way() -> None:
    dataset = Stream(of_lengths, 3, 3)
    with open(os.devnull) as dataset.handle, pytest.raises(PlanError, match="handle"):
        iter(FifoLoader(dataset, num_workers=2))


def test_as_completed_takes_streams_and_shares_workers_with_map_style_plans() -> None:
    with BatchExecutor(2) as executor:
        for window in (1, 3, None):
            plan = BatchPlan(Stream(of_lengths, 5, 3), batch_size=2)
            assert flat(executor.as_completed(plan, window=window)) == [0, 1, 2, 3, 4, 100, 101, 102]
        stream = iter(FifoLoader(Stream(of_lengths, 5, 3), executor=executor))
        chunks = iter(FifoLoader(range(8), executor=executor))
        both = [int(next(iterator)) for _ in range(8) for iterator in (stream, chunks)]
        assert sorted(both[::2]) == [0, 1, 2, 3, 4, 100, 101, 102]
        assert sorted(both[1::2]) == list(range(8))
        assert list(stream) == list(chunks) == []
        plan = BatchPlan(Stream(of_lengths, 5), batch_size=2)
        assert sorted(executor.submit(plan, chunk).result().data.tolist() for chunk in plan) == [[0, 1], [2, 3], [4]]
        assert balances(executor.statistics())


@pytest.mark.parametrize("persistent", [False, True])
def test_two_iterators_of_one_loader_at_once(persistent: bool) -> None:
    with FifoLoader(Stream(of_lengths, 4, 4), num_workers=2, persistent_workers=persistent) as loader:
        first, second = iter(loader), iter(loader)
        pairs = [(int(next(first)), int(next(second))) for _ in range(8)]
        for each in zip(*pairs):
            assert sorted(each) == [0, 1, 2, 3, 100, 101, 102, 103]
        assert list(first) == list(second) == []


def test_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="no accelerator") if not torch.accelerator.is_available() else pytest.warns():
        assert flat(FifoLoader(Stream(of_lengths, 3, 0), num_workers=2, pin_memory=True)) == [0, 1, 2]
    # As where there is one, but for the copy: what comes goes through the thread that pins.
    monkeypatch.setattr(FifoLoader, "_pins", lambda loader: True)
    monkeypatch.setattr("fifobatch.device._pinning", lambda: lambda batch: batch)
    loader = FifoLoader(Stream(of_lengths, 5, 2), batch_size=2, num_workers=2, in_order=True)
    assert [batch.tolist() for batch in loader] == [[0, 1], [100, 101], [2, 3], [4]]


# -- faults -----------------------------------------------------------------------------------------------------------


def contents(dataset: Stream, num_workers: int, **arguments: Any) -> dict[int, Any]:
    generator = torch.Generator().manual_seed(3)
    loader = FifoLoader(
        dataset, batch_size=2, num_workers=num_workers, collate_fn=list, generator=generator, **arguments
    )
    return {batch.number: batch.data for batch in loader.batches()}


def test_random_numbers_are_the_same_whatever_happens(tmp_path: Path) -> None:
    expected = contents(Stream(drawn, 7), 2)
    assert len({sample for batch in expected.values() for sample in batch}) == 14
    assert contents(Stream(drawn, 7), 2, window=1) == expected
    for item in (0, 5, 6):
        assert contents(Stream(drawn, 7, str(tmp_path / f"killed{item}"), (1, item)), 2) == expected
    alone = contents(Stream(drawn, 7), 1)
    assert contents(Stream(drawn, 7), 0) == alone


def test_a_lane_that_is_killed_goes_on_where_it_was(gate: Gate) -> None:
    loader = FifoLoader(Stream(with_pids, 40), num_workers=2, collate_fn=list, in_order=True)
    iterator = iter(loader)
    first = [next(iterator)[0] for _ in range(4)]
    os.kill(next(pid for lane, pid in first if lane == 1), signal.SIGKILL)
    rest = [sample for [sample] in iterator]
    assert Counter(lane for lane, _ in first + rest) == {0: 40, 1: 40}
    assert len({pid for lane, pid in first + rest if lane == 0}) == 1  # the other lane was let alone
    assert balances(loader.statistics())


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_lane_that_always_dies_is_named_and_others_go_on(on_error: str) -> None:
    loader = FifoLoader(Stream(drawn, 6, "", (1, 3)), batch_size=2, num_workers=2, on_error=on_error)
    batches, errors = drain(loader.batches())
    assert sorted(batch.number for batch in batches) == [0, 1, 2, 4]
    (error,) = errors
    assert isinstance(error, WorkerDiedError)
    for part in ("item 3 of lane 1", "3 times", "SIGKILL", "batch 3", "this lane is over"):
        assert part in str(error)
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.delivered, statistics.failed) == (5, 4, 1)
    assert statistics.reloads >= 2


def test_a_lane_that_hangs_is_over_after_its_timeout_and_others_go_on(gate: Gate) -> None:
    loader = FifoLoader(Stream(hanging, 6, gate, (1, 3)), batch_size=2, num_workers=2, timeout=1, window=2)
    batches, errors = drain(loader.batches())
    assert sorted(batch.number for batch in batches) == [0, 1, 2, 4]
    (error,) = errors
    assert isinstance(error, ChunkTimeoutError)
    assert "item 3 of lane 1" in str(error)
    assert "in hanging" in error.__notes__[0]


def test_what_a_lane_skips_has_the_time_of_a_batch_each(tmp_path: Path) -> None:
    dataset = Stream(slow, 12, 0.2, str(tmp_path / "killed"), 11)
    loader = FifoLoader(dataset, num_workers=1, timeout=1.5, in_order=True)
    assert [int(batch) for batch in loader] == list(range(12))  # skipping takes 2.2 s


def test_an_exception_in_the_stream_ends_its_lane() -> None:
    loader = FifoLoader(Stream(failing, 6, (1, 3)), batch_size=2, num_workers=2)
    batches, errors = drain(loader.batches())
    assert sorted(batch.number for batch in batches) == [0, 1, 2, 4]
    (error,) = errors
    assert isinstance(error, OSError)
    assert str(error) == "cannot read 3"
    assert "item 3 of lane 1 of 2, batch 3; this lane is over" in "".join(error.__notes__)
    assert (loader.statistics().delivered, loader.statistics().failed) == (4, 1)


def test_an_exception_in_collate_fn_is_that_batchs_only() -> None:
    loader = FifoLoader(Stream(of_lengths, 6, 6), batch_size=2, num_workers=2, collate_fn=partial(without_a, 102, ""))
    batches, errors = drain(loader.batches())
    assert sorted(batch.number for batch in batches) == [0, 1, 2, 4, 5]
    (error,) = errors
    assert str(error) == "no such batch"
    assert "batch 3 (items 2 to 3 of lane 1 of 2)" in "".join(error.__notes__)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_fails_once_is_tried_again(num_workers: int, tmp_path: Path) -> None:
    lengths = (8, 8)[: max(1, num_workers)]
    expected = by_hand(lengths, 2, False)
    for number, (dataset, collate_fn) in enumerate(
        [
            (Stream(failing, 8, (0, 3), str(tmp_path / "a")), list),
            (Stream(failing_at_once, 8, str(tmp_path / "b")), list),
            (Stream(of_lengths, *lengths), partial(without_a, 2, str(tmp_path / "c"))),
        ]
    ):
        loader = FifoLoader(
            dataset,
            batch_size=2,
            num_workers=num_workers,
            prefetch_factor=num_workers + 1 if num_workers else None,
            retries=1,
            retry_on=(OSError, ValueError),
            collate_fn=collate_fn,
        )
        found = {batch.number: (batch.indices, batch.data) for batch in loader.batches()}
        assert found == expected, number
        assert loader.statistics().retries == 1


def test_what_goes_on_failing_is_an_error_after_the_retries() -> None:
    for dataset in (Stream(failing, 6, (0, 3)), Stream(failing_at_once, 6)):
        loader = FifoLoader(dataset, batch_size=2, num_workers=2, retries=2)
        batches, errors = drain(loader.batches())
        assert {1, 3, 5} <= {batch.number for batch in batches}
        (error,) = errors
        assert "attempt 3" in "".join(error.__notes__)
        assert "lane 0 of 2" in "".join(error.__notes__)
        assert loader.statistics().retries == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_fail_are_left_out(num_workers: int) -> None:
    other = [[100, 101], [102, 103], [104, 105]] if num_workers else []
    for drop_last in (False, True):
        loader = FifoLoader(
            Stream(failing, 6, (0, 3)), batch_size=2, num_workers=num_workers, on_error="skip", drop_last=drop_last
        )
        with pytest.warns(UserWarning, match="left out of this epoch") as caught:
            batches = sorted(batch.tolist() for batch in loader)
        told, counted = (str(warning.message) for warning in caught)
        assert "has raised OSError('cannot read 3')" in told and "left out of this epoch, too" in told
        assert counted.startswith("left out of this epoch: 1 sample")
        assert {warning.filename for warning in caught} == {__file__}
        assert batches == [[0, 1], *([] if drop_last else [[2]]), *other]
        (failure,) = loader.failures
        assert (failure.index, type(failure.error)) == (3, OSError)
        assert balances(loader.statistics())
    loader = FifoLoader(Stream(failing_at_once, 6), batch_size=2, num_workers=num_workers, on_error="skip")
    with pytest.warns(UserWarning, match=r"left out of this epoch(: 1 sample|, too)"):
        assert sorted(batch.tolist() for batch in loader) == other
    assert [(failure.index, failure.chunk) for failure in loader.failures] == [(0, 0)]
    statistics = loader.statistics()  # of a batch of which nothing is left, there is no error either
    assert (statistics.submitted, statistics.delivered, statistics.failed) == (len(other) + 1, len(other), 1)
    loader = FifoLoader(
        Stream(of_lengths, 5, 4),
        batch_size=2,
        num_workers=num_workers,
        on_error="skip",
        collate_fn=partial(without_a, 2, ""),
    )
    with pytest.warns(UserWarning, match="left out of this epoch: 2 samples"):
        assert flat(loader) == [0, 1, 4, *([100, 101, 102, 103] if num_workers else [])]
    assert [failure.index for failure in loader.failures] == [2, 3]


def test_an_exception_where_the_parent_reads_comes_after_what_was_read_before() -> None:
    loader = FifoLoader(Stream(failing, 6, (0, 5)), batch_size=2, num_workers=2, split="parent")
    batches, errors = drain(iter(loader))
    assert sorted(batch.tolist() for batch in batches) == [[0, 1], [2, 3]]
    assert [str(error) for error in errors] == ["cannot read 5"]
    assert errors[0].__notes__ == ["In fifobatch, item 5 of the stream, batch 2; the stream is over."]


@pytest.mark.parametrize(("error", "raised"), [(OSError, OSError), (StopIteration, SampleError)])
def test_an_exception_in_iter_comes_from_next_whoever_reads(error: type[Exception], raised: type[Exception]) -> None:
    def fails() -> Iterator[int]:
        raise error

    with ThreadPoolExecutor(1) as threads:
        for where in (
            {"num_workers": 0},
            {"num_workers": 1},
            {"num_workers": 1, "split": "parent"},
            {"executor": threads},
        ):
            batches, errors = drain(iter(FifoLoader(Blind(fails), **where)))
            assert batches == []
            assert [type(each) for each in errors] == [raised], where
            assert "iter(dataset)" in told(errors[0])


@pytest.mark.parametrize("split", ["auto", "parent"])
def test_a_stream_that_raises_what_would_end_a_loop_in_silence(split: str) -> None:
    class Silent(Range):
        def __next__(self) -> int:
            raise StopAsyncIteration

        def __iter__(self) -> Iterator[int]:
            return self

    batches, errors = drain(iter(FifoLoader(Silent(3), num_workers=1, split=split)))
    assert batches == []
    assert [type(error) for error in errors] == [SampleError]
    assert "item 0 of" in told(errors[0])


@pytest.mark.parametrize("on_threads", [False, True])
def test_what_fails_where_the_parent_has_read_is_told_by_its_positions(on_threads: bool) -> None:
    def uneven() -> Iterator[torch.Tensor]:
        return (torch.full((2 if item == 5 else 1,), 7.0) for item in range(8))

    def unsendable(sample: Any) -> Any:
        return threading.Lock() if len(sample) == 2 else sample

    with ThreadPoolExecutor(1) as threads:
        where: dict[str, Any] = {"executor": threads} if on_threads else {"num_workers": 1, "split": "parent"}
        batches, errors = drain(iter(FifoLoader(Blind(uneven), batch_size=2, **where)))
        assert len(batches) == 3
        (error,) = errors
        assert "collate_fn, batch 2 (items 4 to 5 of the stream): sample is a Tensor of shape (1,) at [4]; " in told(
            error
        )
        assert "a Tensor of shape (2,) at [5]" in told(error)
        if not on_threads:  # where nothing is packed
            batches, errors = drain(iter(FifoLoader(Blind(uneven), batch_size=None, collate_fn=unsendable, **where)))
            assert len(batches) == 7
            (error,) = errors
            assert "packing batch 5 (item 5 of the stream)" in told(error)


def with_locks(*at: int) -> Iterator[Any]:
    """Yield ten items, of which some cannot be pickled."""
    return (threading.Lock() if item in at else item for item in range(10))


def test_a_sample_that_cannot_be_pickled_is_its_batchs_error_only() -> None:
    loader = FifoLoader(Blind(with_locks, 4, 9), batch_size=2, num_workers=1, split="parent", collate_fn=list)
    batches, errors = drain(loader.batches())
    assert sorted(batch.data for batch in batches) == [[0, 1], [2, 3], [6, 7]]
    assert [type(error) for error in errors] == [TypeError, TypeError]
    assert "pickling item 4, batch 2 (items 4 to 5 of the stream)" in told(errors[0])
    assert "pickling item 9, batch 4 (items 8 to 9 of the stream)" in told(errors[1])
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.delivered, statistics.failed) == (5, 3, 2)
    loader = FifoLoader(Blind(with_locks, 4), batch_size=None, num_workers=1, split="parent")
    batches, errors = drain(iter(loader))
    assert sorted(batches) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert [type(error) for error in errors] == [TypeError]


@pytest.mark.parametrize("batch_size", [2, None])
def test_samples_that_cannot_be_pickled_are_left_out(batch_size: int | None) -> None:
    loader = FifoLoader(
        Blind(with_locks, 0, 6, 7), batch_size=batch_size, num_workers=1, split="parent", on_error="skip"
    )
    with pytest.warns(UserWarning, match="left out of this epoch: 3 samples that failed; .*index 0: TypeError"):
        batches = list(loader.batches())
    positions = [(batch.number, batch.indices, torch.as_tensor(batch.data).tolist()) for batch in batches]
    if batch_size is None:
        assert sorted(positions) == [(item, item, item) for item in (1, 2, 3, 4, 5, 8, 9)]
    else:
        each = [[1], [2, 3], [4, 5], [8, 9]]
        assert sorted(positions) == [(items[0] // 2, items, items) for items in each]
    assert [(failure.index, failure.chunk) for failure in loader.failures] == [
        (item, item // (batch_size or 1)) for item in (0, 6, 7)
    ]
    assert balances(loader.statistics())


class OnceAlone:
    """Can be pickled, but not together with others of its kind."""

    together = 0

    def __reduce__(self) -> Any:
        OnceAlone.together += 1
        if OnceAlone.together == 2:
            raise OSError("twice")
        return OnceAlone, ()


def test_where_nothing_alone_is_to_blame_the_batch_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> list[Any]:
        return [OnceAlone(), OnceAlone()]

    monkeypatch.setattr(OnceAlone, "together", 0)
    loader = FifoLoader(Blind(both), batch_size=2, num_workers=1, split="parent", collate_fn=list, on_error="skip")
    with pytest.warns(UserWarning, match="left out of this epoch: 2 samples that failed; .*index 0: OSError: twice"):
        assert list(loader) == []
    assert [failure.index for failure in loader.failures] == [0, 1]


def test_worker_init_fn_that_fails_is_the_end_of_its_lane() -> None:
    def fails(worker: int) -> None:
        if worker == 0:
            raise RuntimeError("no licence")

    for options in ({}, {"in_order": True}, {"on_error": "skip"}, {"retries": 2}):
        loader = FifoLoader(Stream(of_lengths, 2, 2), num_workers=2, worker_init_fn=fails, prefetch_factor=3, **options)
        batches, errors = drain(iter(loader))
        assert sorted(map(int, batches)) == [100, 101]
        (error,) = errors
        assert str(error) == "no licence"
        assert "worker_init_fn(0)" in "".join(error.__notes__)
        assert "lane of the stream from batch 0 on; this lane is over" in "".join(error.__notes__)


def test_statistics_balance_at_every_moment() -> None:
    with FifoLoader(Stream(of_lengths, 9, 4, 0), num_workers=3, persistent_workers=True, batch_size=2) as loader:
        for stop in (3, 100):
            iterator = iter(loader)
            for number, _ in enumerate(iterator, 1):
                statistics = iterator.statistics()
                assert balances(statistics)
                assert statistics.delivered == number
                assert statistics.under_way <= 6
                if number == stop:
                    break
            iterator.close()
            assert balances(iterator.statistics())
        statistics = loader.statistics()
        assert (statistics.submitted, statistics.delivered, statistics.under_way) == (7, 7, 0)
        assert statistics.bytes == sum(span.bytes for span in loader.timeline())
        assert {span.worker for span in loader.timeline()} == {0, 1}


# -- counting ---------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    size=st.integers(1, 12),
    per_lane=st.integers(1, 4),
    max_skew=st.none() | st.integers(0, 6),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=300)
def test_whatever_the_lanes_each_batch_comes_once_within_the_bounds_and_nothing_deadlocks(
    lengths: list[int], size: int, per_lane: int, max_skew: int | None, order: random.Random
) -> None:
    count = len(lengths)
    window: Window[int] = Window(size, max_skew)
    lanes = Lanes(count, per_lane, max_skew is not None, 1, 0)
    queues: list[list[int]] = [[] for _ in lengths]  # a lane answers in the order in which it was asked
    tells = [order.random() < 0.5 for _ in lengths]  # whether its last batch says that it is the last
    delivered: list[int] = []
    completed: list[int] = []
    submitted: list[int] = []

    def refill() -> None:
        while not window.full:
            chunk = lanes.take()
            if chunk is None:
                return
            window.submit(chunk.number)
            submitted.append(chunk.number)
            queues[chunk.number % count].append(chunk.number)
            assert len(queues[chunk.number % count]) <= per_lane
            assert chunk.indices is None

    def answer(lane: int) -> None:
        number = queues[lane].pop(0)
        k = number // count
        is_void = k >= lengths[lane]
        is_last = is_void or (tells[lane] and k == lengths[lane] - 1)
        if not is_void:
            window.complete(number, number)
            completed.append(number)
        lanes.landed(number, is_last, True)
        if is_last:
            window.end(number if is_void else number + count, count)
        if is_void:
            window.cancel(number)
        refill()

    refill()
    while window.under_way:
        assert window.under_way <= size
        choices = [("answer", lane) for lane, queue in enumerate(queues) if queue]
        if window.ready:
            choices.append(("deliver", 0))
        assert choices, "deadlock"
        action, lane = order.choice(choices)
        if action == "answer":
            answer(lane)
        else:
            number, item = window.deliver()
            assert number == item
            delivered.append(number)
            if max_skew is not None:
                expected = {n for n in range(number - max_skew) if n // count < lengths[n % count]}
                assert expected <= set(delivered)
            refill()
    window.check()
    assert sorted(delivered) == sorted(k * count + lane for lane, length in enumerate(lengths) for k in range(length))
    assert len(set(submitted)) == len(submitted)
    if max_skew is None:
        assert delivered == completed
    else:
        assert submitted == sorted(submitted)
    if max_skew == 0:
        assert delivered == sorted(delivered)


def test_lanes_are_asked_in_turn_and_seeds_do_not_repeat() -> None:
    lanes = Lanes(2, 2, False, 7, 0)
    chunks = [lanes.take() for _ in range(5)]
    assert [chunk and chunk.number for chunk in chunks] == [0, 1, 2, 3, None]
    lanes.landed(1, False, True)
    assert lanes.take().number == 5  # type: ignore[union-attr]  # the lane that has fewer waiting
    lanes.landed(0, True, True)
    lanes.landed(2, True, True)
    assert lanes.take() is None
    lanes.landed(3, False, True)
    assert lanes.take().number == 7  # type: ignore[union-attr]
    assert len({chunk.seed for chunk in chunks if chunk}) == 4


def test_lanes_repeat_when_two_of_them_were_not_split() -> None:
    lanes = Lanes(3, 1, False, 0, 0)
    for lane, (has_looked, told) in enumerate([(False, 0), (True, 0), (False, 1)]):
        lanes.landed(lane, False, has_looked)
        assert len(lanes.warnings) == told
    lanes.landed(1, False, False)
    assert len(lanes.warnings) == 1


def test_what_was_voided_is_no_longer_under_way() -> None:
    window: Window[int] = Window(2, max_skew=0)
    window.submit(0)
    window.submit(1)
    window.end(0, 2)
    window.cancel(0)
    assert (window.under_way, window.full, window.ready) == (1, False, False)
    window.complete(1, 1)
    assert window.deliver() == (1, 1)
    window.check()


# -- a lane, without processes ----------------------------------------------------------------------------------------


class Closable:
    """A source that counts how often it was iterated, and whether it was closed."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.iterations = self.closed = 0
        self.errors: dict[int, Exception] = {}  # raised once

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        try:
            for position, item in enumerate(self.items):
                if position in self.errors:
                    raise self.errors.pop(position)
                yield item
        finally:
            self.closed += 1


def a_lane(source: Any, seeds: list[int] | None = None, policy: Policy = Policy(), **options: Any) -> Lane:
    stream = StreamOptions(**{"batch_size": 2, "drop_last": False, "stride": False, **options})
    payload = Payload(source, list, stream.batch_size is not None, None, 2, policy, stream)
    if stream.batch_size is None:
        payload = payload._replace(collate_fn=lambda sample: sample)

    def seed(number: int) -> int:
        if seeds is not None:
            seeds.append(number)
        return number

    return Lane(payload, 1, seed)


def load(lane: Lane, batch: int, attempt: int = 1, policy: Policy = Policy(), delivered: int = 0) -> Any:
    return lane.load(batch, Attempt(batch * 2 + 1, policy, attempt), None, delivered)


NOTHING_MORE = (None, range(0), True)


def test_a_lane_reads_on_and_seeds_each_batch() -> None:
    source, seeds = Closable([*"abcde"]), []
    lane = a_lane(source, seeds)
    assert [load(lane, batch)[:3] for batch in range(5)] == [
        (["a", "b"], range(2), False),
        (["c", "d"], range(2, 4), False),
        (["e"], range(4, 5), True),
        NOTHING_MORE,
        NOTHING_MORE,
    ]
    assert lane.is_over
    assert seeds == [1, 3, 5]  # the numbers of lane 1 of 2
    assert (source.iterations, source.closed) == (1, 1)


def test_a_lane_that_is_asked_for_a_later_or_an_earlier_batch_skips() -> None:
    source, seeds = Closable([*"abcdef"]), []
    lane = a_lane(source, seeds)
    assert load(lane, 2).data == ["e", "f"]
    assert seeds == [1, 3, 5]
    assert load(lane, 1).data == ["c", "d"]  # it starts again
    assert source.iterations == source.closed + 1 == 2
    assert load(lane, 7)[:3] == NOTHING_MORE
    assert source.closed == 2


def test_a_lane_leaves_out_a_last_batch_that_is_not_full() -> None:
    lane = a_lane(Closable([*"abc"]), drop_last=True)
    assert [load(lane, batch)[:3] for batch in range(2)] == [(["a", "b"], range(2), False), NOTHING_MORE]


def test_a_lane_of_single_samples_and_one_that_strides() -> None:
    lane = a_lane(Closable([*"ab"]), batch_size=None)
    assert [load(lane, batch)[:2] for batch in range(3)] == [("a", range(1)), ("b", range(1, 2)), NOTHING_MORE[:2]]
    seeds: list[int] = []
    lane = a_lane(Closable([*"abcdefg"]), seeds, stride=True)
    shares = [load(lane, batch)[:2] for batch in range(3)]
    assert shares == [(["b", "d"], range(1, 5, 2)), (["f"], range(5, 7, 2)), NOTHING_MORE[:2]]
    assert [*shares[0][1], *shares[1][1]] == [1, 3, 5]
    assert seeds == [0, 0, 1, 2, 3, 4, 5, 6, 7]  # of the stream's items, and first for iter()


def test_a_lane_is_closed_once() -> None:
    source = Closable([*"abcd"])
    lane = a_lane(source)
    lane.close()
    assert source.iterations == 0
    load(lane, 0)
    lane.close()
    lane.close()
    assert source.closed == 1


def test_a_lane_that_is_to_be_tried_again_sends_back_what_follows_once() -> None:
    policy = Policy(retries=1)
    source = Closable([*"abcdef"])
    source.errors = {2: OSError("once")}
    lane = a_lane(source, policy=policy)
    assert load(lane, 0, policy=policy).data == ["a", "b"]
    with pytest.raises(Again):
        load(lane, 1, policy=policy)
    assert not lane.is_over
    with pytest.raises(Later):
        load(lane, 2, policy=policy)
    assert load(lane, 1, 2, policy).data == ["c", "d"]
    assert load(lane, 2, policy=policy).data == ["e", "f"]
    assert source.iterations == 2

    source.errors = {2: OSError("once more")}
    lane = a_lane(source, policy=policy)
    with pytest.raises(Again):
        load(lane, 1, policy=policy)
    with pytest.raises(Later):
        load(lane, 2, policy=policy)
    assert load(lane, 2, policy=policy).data == ["e", "f"]  # the other has not come: nothing goes round for ever


def test_a_lane_keeps_the_samples_that_collate_fn_has_failed_on() -> None:
    policy = Policy(retries=2)
    source, fails, drawn = Closable([*"abcd"]), [2, 1], []

    def collate(samples: list[str]) -> str:
        drawn.append((random.random(), torch.rand(1).item(), np.random.rand()))
        text = "".join(samples)
        if fails and text == "ab":
            samples.clear()
            raise OSError(fails.pop())
        return text

    lane = a_lane(source, policy=policy)
    lane._plan = lane._plan._replace(collate_fn=collate)
    with pytest.raises(Again):
        load(lane, 0, policy=policy)
    assert load(lane, 1, policy=policy)[:3] == ("cd", range(2, 4), False)  # it need not wait for the other
    with pytest.raises(Again):
        load(lane, 0, 2, policy)
    assert load(lane, 0, 3, policy)[:3] == ("ab", range(2), False)
    assert load(lane, 2, policy=policy)[:3] == NOTHING_MORE
    assert source.iterations == 1
    assert drawn[0] == drawn[2] == drawn[3] != drawn[1]


def test_a_stream_that_cannot_be_started_again_is_the_error_that_it_was() -> None:
    policy = Policy(retries=1)
    for first in (0, 1):
        source = Closable([*"abcdef"])
        source.errors = {2 * first + 1: OSError("broken")}
        lane = a_lane(Stored(iter(source)), policy=policy)
        if first:
            load(lane, 0, policy=policy)
        with pytest.raises(Again):
            load(lane, first, policy=policy)
        with pytest.raises(Located, match="this lane is over: started again, it has ended before item 0") as caught:
            load(lane, first, 2, policy)
        assert str(caught.value.error) == "broken"
        assert f"item {2 * first + 1} of lane 1 of 2" in str(caught.value)
        assert lane.is_over


@pytest.mark.parametrize(
    ("drop_last", "length", "is_error"),
    [(False, 3, True), (True, 4, True), (True, 5, True), (False, 5, False), (True, 6, False)],
)
def test_a_stream_that_has_become_shorter_has_lost_something(drop_last: bool, length: int, is_error: bool) -> None:
    lane = a_lane(Closable([*"abcdef"][:length]), drop_last=drop_last)
    if is_error:
        with pytest.raises(Located) as caught:
            load(lane, 3, delivered=3)
        assert f"has ended after {length} items, though 3 batches of 2 had come" in str(caught.value.error)
        assert lane.is_over
    else:
        assert load(lane, 3, delivered=3)[:3] == NOTHING_MORE


class Stored:
    """A stream over an iterator that it has."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def test_a_lane_is_over_after_an_error_of_the_stream_but_not_of_collate_fn() -> None:
    source = Closable([*"abcdef"])
    source.errors = {3: OSError("broken")}
    lane = a_lane(source)
    load(lane, 0)
    with pytest.raises(Located, match="item 3 of lane 1 of 2, batch 3; this lane is over"):
        load(lane, 1)
    assert lane.is_over
    assert load(lane, 2)[:3] == NOTHING_MORE

    lane = a_lane(Closable([1, 2, 3, 4]))
    lane._plan = lane._plan._replace(collate_fn=lambda samples: samples if 2 in samples else 1 / 0)
    load(lane, 0)
    with pytest.raises(Located, match=r"collate_fn, batch 3 \(items 2 to 3 of lane 1 of 2\)"):
        load(lane, 1)
    assert load(lane, 2)[:3] == NOTHING_MORE


# -- without workers --------------------------------------------------------------------------------------------------


def test_in_process_leaves_the_random_state_alone_and_counts() -> None:
    before = random.getstate()
    plan = BatchPlan(Stream(drawn, 5), batch_size=2, collate_fn=list, seed=4)
    batches = [list(InProcess(plan, lambda batch: batch)) for _ in range(2)]
    assert batches[0] == batches[1]
    assert [(batch.number, batch.indices) for batch in batches[0]] == [(0, [0, 1]), (1, [2, 3]), (2, [4])]
    assert random.getstate() == before
    iterator = InProcess(BatchPlan(Blind(range, 4), batch_size=2), lambda batch: batch)
    assert [batch.indices for batch in iterator] == [[0, 1], [2, 3]]
    assert (iterator.trace.statistics().submitted, iterator.trace.statistics().delivered) == (2, 2)
    assert len(iterator.trace.timeline()) == 2


def test_in_process_an_error_of_the_stream_is_the_end_and_one_of_collate_fn_is_not() -> None:
    batches, errors = drain(iter(FifoLoader(Stream(failing, 6, (0, 3)), batch_size=2, num_workers=0)))
    assert [batch.tolist() for batch in batches] == [[0, 1]]
    assert "item 3 of the stream" in "".join(errors[0].__notes__)
    loader = FifoLoader(Blind(range, 6), batch_size=2, num_workers=0, collate_fn=partial(without_a, 2, ""))
    batches, errors = drain(iter(loader))
    assert batches == [[0, 1], [4, 5]]
    assert len(errors) == 1


def test_an_endless_stream_without_workers() -> None:
    loader = FifoLoader(Stream(for_ever), num_workers=0, batch_size=3)
    assert [batch.tolist() for batch in itertools.islice(loader, 2)] == [[0, 1, 2], [3, 4, 5]]

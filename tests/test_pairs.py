"""`PairedLoader`: two datasets, one plan. Alignment is checked by what the halves hold, never by seeding two alike."""

import concurrent.futures
import contextlib
import copy
import gc
import os
import queue
import random
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import TIMEOUT, Announcing, Calls
from torch.utils.data import DataLoader, IterableDataset

from fifobatch import (
    BatchExecutor,
    ChunkTimeoutError,
    ClosedError,
    FifobatchError,
    FifoLoader,
    PairedLoader,
    PlanError,
    SampleError,
    WorkerDiedError,
)

pytestmark = pytest.mark.filterwarnings("ignore:num_workers=.* is more than two a core")  # so that 2 cores are enough

WORKERS = pytest.mark.parametrize("num_workers", [0, 3])


@pytest.fixture
def manual() -> Iterator[Announcing]:
    manual = Announcing()
    yield manual
    manual.shutdown(cancel_futures=True)


class Numbers:
    """``index + offset``, but for what is bad."""

    def __init__(self, length: int, offset: int = 0, bad: tuple[int, ...] = ()) -> None:
        self.length = length
        self.offset = offset
        self.bad = bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise KeyError(index)
        return index + self.offset


def check(pairs: Any, offset: int = 100) -> list[int]:
    """Check that both halves of every pair hold the same samples; return these, sorted."""
    seen: list[int] = []
    for x, target in pairs:
        y = target.result() if isinstance(target, Future) else target
        assert (y - offset).tolist() == x.tolist()
        seen += x.tolist()
    return sorted(seen)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Ignore the warning of samples that were left out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="left out of this epoch")
        yield


# -- order ------------------------------------------------------------------------------------------------------------


def test_of_each_pair_the_input_is_submitted_first_and_a_pair_counts_once(manual):
    batches = PairedLoader(Numbers(6), Numbers(6, 100), batch_size=2, window=2, executor=manual).batches()
    assert manual.pending == [0, 1, 2, 3]
    for number in (2, 0, 3, 1):
        manual.complete(number)
    pair = next(batches)
    assert (pair.number, pair.indices, pair.data[0].tolist(), pair.data[1].result().tolist()) == (
        1,
        [2, 3],
        [2, 3],
        [102, 103],
    )
    assert manual.pending == [4, 5]
    batches.close()


def test_a_pair_is_complete_with_its_input_and_its_target_when_that_comes(manual):
    pairs = iter(PairedLoader(Numbers(4), Numbers(4, 100), batch_size=2, window=2, executor=manual))
    manual.complete(3)  # a target without its input is not a pair
    manual.complete(0)
    x, target = next(pairs)
    assert x.tolist() == [0, 1]
    assert not target.done()
    with pytest.raises(concurrent.futures.TimeoutError):
        target.result(timeout=0)
    done = []
    target.add_done_callback(done.append)
    manual.complete(1)
    assert done == [target]
    assert target.result().tolist() == [100, 101]
    manual.complete(2)
    x, target = next(pairs)
    assert target.done()
    assert target.result().tolist() == [102, 103]
    assert next(pairs, None) is None


def test_max_skew_holds_for_pairs(manual):
    pairs = PairedLoader(Numbers(3), Numbers(3, 100), window=3, in_order=True, executor=manual).batches()
    for number in (4, 2, 0):
        manual.complete(number)
    assert [pair.number for pair in pairs] == [0, 1, 2]


def test_zipped_waits_for_both_halves(manual):
    pairs = PairedLoader(Numbers(2), Numbers(2, 100), window=2, executor=manual).zipped()
    for number in (0, 3, 2, 1):
        manual.complete(number)
    assert [(x.item(), y.item()) for x, y in pairs] == [(1, 101), (0, 100)]


def hold_back(index: int, gate: Any) -> int:
    gate.wait()
    return index


def wait_there(index: int, gate: Any) -> int:
    gate.arrive()
    return hold_back(index, gate)


def test_the_model_computes_while_the_target_loads(gate):
    pairs = list(PairedLoader(Numbers(2), Calls(2, hold_back, gate), num_workers=3))
    assert not any(target.done() for _, target in pairs)  # here the model computes
    gate.open(2)
    assert check(pairs, 0) == [0, 1]


def test_max_bytes_counts_both_halves(manual):
    arguments = {"batch_size": 1, "window": 10, "executor": manual}
    zeros = Calls(10, lambda index: torch.zeros(1000, dtype=torch.uint8))
    pairs = iter(PairedLoader(zeros, zeros, max_bytes=4000, **arguments))
    assert len(manual.calls) == 2
    manual.complete(1)
    manual.complete(0)
    next(pairs)
    assert len(manual.calls) == 6  # two pairs of 2,000 bytes
    pairs.close()


def test_the_first_size_of_both_halves_is_awaited_before_more_pairs_are_under_way(manual):
    arguments = {"batch_size": 1, "window": 10, "executor": manual, "max_bytes": 4000}
    large = Calls(10, lambda index: torch.zeros(1000, dtype=torch.uint8))
    pairs = iter(PairedLoader(Calls(10, lambda index: torch.zeros(1)), large, **arguments))
    for number in (0, 2):  # the inputs
        assert len(manual.calls) == number + 2
        manual.complete(number)
        next(pairs)
    manual.complete(1)  # a target: so from the next pair on it is known what a pair takes
    manual.complete(4)
    next(pairs)
    assert len(manual.calls) == 12  # three pairs of 1,004 bytes
    pairs.close()


@pytest.mark.parametrize("zips", [False, True])
def test_statistics_count_the_bytes_of_both_halves(manual, zips):
    halves = (Calls(2, lambda index, size=size: torch.zeros(size, dtype=torch.uint8)) for size in (10, 1000))
    loader = PairedLoader(*halves, window=2, executor=manual)
    pairs = loader.zipped() if zips else iter(loader)
    for number in (1, 0, 2, 3):  # all before the first is delivered
        manual.complete(number)
    assert len(list(pairs)) == 2
    assert (loader.statistics().bytes, loader.statistics().peak_bytes) == (2020, 2020)


def test_a_target_that_comes_after_its_pair_does_not_wait_to_be_delivered(manual):
    zeros = Calls(1, lambda index: torch.zeros(1000, dtype=torch.uint8))
    loader = PairedLoader(zeros, zeros, executor=manual)
    pairs = iter(loader)
    manual.complete(0)
    next(pairs)
    manual.complete(1)
    assert (loader.statistics().bytes, loader.statistics().peak_bytes) == (2000, 1000)


# -- contents ---------------------------------------------------------------------------------------------------------


@WORKERS
def test_halves_are_aligned_whatever_the_order(num_workers):
    loader = PairedLoader(Numbers(50), Numbers(50, 100), batch_size=4, shuffle=True, num_workers=num_workers)
    assert check(loader) == check(loader.zipped()) == list(range(50))
    assert len(loader) == len(iter(loader)) == 13


@WORKERS
def test_both_may_be_the_same_object(num_workers):
    numbers = Numbers(6)
    assert check(PairedLoader(numbers, numbers, batch_size=2, num_workers=num_workers), 0) == list(range(6))


def draw(index: int) -> torch.Tensor:
    return torch.tensor([index, random.getrandbits(30), np.random.randint(1 << 30), int(torch.randint(1 << 30, ()))])


def drawn(**arguments: Any) -> dict[int, Any]:
    generator = torch.Generator().manual_seed(5)
    loader = PairedLoader(
        Calls(12, draw), Calls(12, draw), batch_size=4, shuffle=True, generator=generator, **arguments
    )
    return {
        pair.number: (pair.indices, pair.data[0].tolist(), pair.data[1].result().tolist()) for pair in loader.batches()
    }


def test_contents_do_not_depend_on_workers_and_the_halves_draw_differently():
    expected = drawn(num_workers=0)
    assert drawn(num_workers=3) == drawn(num_workers=1, window=1) == expected
    for _, x, y in expected.values():
        assert [row[0] for row in x] == [row[0] for row in y]
        assert x != y


@WORKERS
def test_halves_that_share_their_randomness_draw_alike(num_workers):
    for _, x, y in drawn(num_workers=num_workers, share_randomness=True).values():
        assert x == y


def draw_and(index: int, and_then: Callable[[int], object]) -> torch.Tensor:
    drawn = draw(index)
    and_then(index)
    return drawn


def fail_at_2(index: int) -> None:
    if index == 2:
        raise OSError("truncated file")


def die_at_2(index: int) -> None:
    if index == 2:
        die()


def draw_more(index: int) -> None:
    torch.randn(index), random.random(), np.random.rand(index)


def keep(index: int) -> None:
    pass


def fail_once(index: int, path: Any) -> None:
    if index == 2 and not path.exists():
        path.touch()
        raise OSError("a flaky disk")


@WORKERS
@pytest.mark.parametrize("zips", [False, True])
@pytest.mark.parametrize("what", [fail_at_2, draw_more])
@pytest.mark.parametrize("half", [0, 1])
def test_each_sample_draws_alike_whatever_the_others_do(num_workers, zips, what, half):
    halves = [Calls(6, draw_and, what if number == half else keep) for number in (0, 1)]
    loader = PairedLoader(*halves, batch_size=4, share_randomness=True, on_error="skip", num_workers=num_workers)
    seen = []
    with silenced():
        for x, y in loader.zipped() if zips else loader:
            if not zips and isinstance(y.exception(), OSError):
                continue
            y = y if zips else y.result()
            assert x.tolist() == y.tolist()
            seen += x[:, 1].tolist()
    assert (
        len(set(seen)) == len(seen) == (2 if (what, half, zips) == (fail_at_2, 1, False) else 6 - (what is fail_at_2))
    )


def test_samples_draw_alike_when_one_kills_its_worker():
    for halves in ((die_at_2, keep), (keep, die_at_2)):
        inputs, targets = (Calls(4, draw_and, what) for what in halves)
        loader = PairedLoader(
            inputs, targets, batch_size=4, share_randomness=True, on_error="skip", num_workers=1, window=1
        )
        with silenced():
            [(x, y)] = loader.zipped()
        assert x[:, 0].tolist() == [0, 1, 3]
        assert x.tolist() == y.tolist()


@WORKERS
def test_samples_draw_alike_when_one_half_is_tried_again(num_workers, tmp_path):
    flaky = Calls(4, draw_and, partial(fail_once, path=tmp_path / "failed"))
    arguments = {"batch_size": 4, "share_randomness": True, "retries": 1, "num_workers": num_workers}
    loader = PairedLoader(flaky, Calls(4, draw), **arguments)
    [(x, target)] = loader
    assert x.tolist() == target.result().tolist()
    assert loader.statistics().retries == 1


class Drawn:
    """A dataset that loads several at once, and draws more for some than for others."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        samples = []
        for index in indices:
            samples.append(draw(index))
            draw_more(self.more)
        return samples


def draw_for_batch(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*samples, draw(0)])


@WORKERS
def test_getitems_and_collate_fn_draw_alike(num_workers):
    arguments = {"batch_size": 3, "collate_fn": draw_for_batch, "num_workers": num_workers}
    for x, target in PairedLoader(Drawn(0), Drawn(3), share_randomness=True, **arguments):
        assert x.tolist() == target.result().tolist()


@WORKERS
def test_shorter_targets_start_again_if_asked_to(num_workers):
    loader = PairedLoader(Numbers(7), Numbers(3), batch_size=2, cycle_targets=True, num_workers=num_workers)
    pairs = [pair for x, y in loader.zipped() for pair in zip(x.tolist(), y.tolist())]
    assert sorted(pairs) == [(index, index % 3) for index in range(7)]
    assert [batch.data[1].result().tolist() for batch in loader.batches() if batch.indices == [2, 3]] == [[2, 0]]


def test_indices_that_do_not_wrap_around_are_an_error():
    letters = {"a": 1, "b": 2}
    loader = PairedLoader(letters, letters, sampler=["a", "b"], cycle_targets=True, num_workers=0)
    with pytest.raises(PlanError, match="the sampler yielded 'a', a str"):
        next(iter(loader))
    assert check(PairedLoader(letters, letters, sampler=["a", "b"], num_workers=0), 0) == [1, 2]


def test_single_samples_are_paired_too():
    pairs = PairedLoader(Numbers(3), Numbers(3, 100), batch_size=None, num_workers=1)
    assert sorted((x, target.result()) for x, target in pairs) == [(0, 100), (1, 101), (2, 102)]


def test_the_epoch_reaches_both_datasets():
    class Epochs(Numbers):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    inputs, targets = Epochs(2), Epochs(2)
    PairedLoader(inputs, targets, num_workers=0).set_epoch(3)
    assert (inputs.epoch, targets.epoch) == (3, 3)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_unequal_lengths_are_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"inputs=Numbers\(...\) has 40 samples and targets=range\(...\) has 39"):
        PairedLoader(Numbers(40), range(39))
    with pytest.raises(PlanError, match=r"targets=list.* is empty"):
        PairedLoader(Numbers(40), [], cycle_targets=True)


def test_streams_are_refused_with_advice():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(PlanError, match=r"targets=Stream.*Zip the two streams inside one IterableDataset"):
        PairedLoader(Numbers(3), Stream())
    with pytest.raises(PlanError, match="inputs=Stream"):
        PairedLoader(Stream(), Stream())
    with pytest.raises(PlanError, match=r"inputs=generator\(...\) has no __getitem__"):
        PairedLoader((index for index in range(3)), Numbers(3))


def test_arguments_are_those_of_the_loader():
    with pytest.raises(TypeError, match=r"PairedLoader\(\) got an unexpected keyword argument 'batchsize'"):
        PairedLoader(Numbers(3), Numbers(3), batchsize=2)
    with pytest.raises(TypeError, match=r"PairedLoader\(\) takes no split="):
        PairedLoader(Numbers(3), Numbers(3), split="stride")
    with pytest.warns(UserWarning, match="num_workers=1000 is more than two a core") as caught:
        PairedLoader(Numbers(3), Numbers(3), num_workers=1000)
    assert caught[0].filename == __file__


def test_what_cannot_be_pickled_says_of_which_half():
    class Locked(Numbers):
        def __init__(self) -> None:
            super().__init__(2)
            self.lock = threading.Lock()

    for halves, word in (((Locked(), Numbers(2)), "inputs"), ((Numbers(2), Locked()), "targets")):
        with pytest.raises(PlanError, match=r"dataset\.lock") as caught:
            iter(PairedLoader(*halves, num_workers=1))
        assert caught.value.__notes__ == [f"It is of the {word} of a PairedLoader."]


# -- failures ---------------------------------------------------------------------------------------------------------


@WORKERS
def test_errors_say_which_half(num_workers):
    pairs = iter(PairedLoader(Numbers(2, bad=(0,)), Numbers(2, 100), num_workers=num_workers))
    errors = []
    for _ in range(2):
        try:
            x, _target = next(pairs)
        except KeyError as error:
            errors.append(error)
    assert x.item() == 1
    assert "dataset[0]" in errors[0].__notes__[0]
    assert errors[0].__notes__[-1] == "It is the input of pair 0."
    assert next(pairs, None) is None

    for x, target in PairedLoader(Numbers(2), Numbers(2, bad=(0,)), num_workers=num_workers):
        if x.item():
            assert target.result().item() == 1
            continue
        for _ in range(2):
            with pytest.raises(KeyError) as caught:
                target.result()
            assert caught.value.__notes__[-1] == "It is the target of pair 0."

    with pytest.raises(KeyError):
        list(PairedLoader(Numbers(2), Numbers(2, bad=(0,)), num_workers=num_workers).zipped())


@WORKERS
def test_an_input_that_is_skipped_is_left_out_of_its_target(num_workers):
    halves = Numbers(20, bad=(3, 7, 8, 9, 10, 11)), Numbers(20, 100, bad=(3, 13))
    loader = PairedLoader(*halves, batch_size=4, on_error="skip", num_workers=num_workers)
    seen: list[int] = []
    with silenced():
        for pair in loader.batches():
            x, target = pair.data
            assert x.tolist() == pair.indices
            if 13 in pair.indices:
                with pytest.raises(KeyError):
                    target.result()
            else:
                assert (target.result() - 100).tolist() == pair.indices
            seen += pair.indices
    assert sorted(seen) == [index for index in range(20) if index not in halves[0].bad]
    assert {failure.index for failure in loader.failures} == set(halves[0].bad)
    assert all(failure.error.__notes__[-1].startswith("It is the input of pair") for failure in loader.failures)


@WORKERS
def test_zipped_leaves_a_sample_out_of_both(num_workers):
    halves = Numbers(20, bad=(3, 7, 8, 9)), Numbers(20, 100, bad=(3, 6, 10, 11, 13))
    loader = PairedLoader(*halves, batch_size=4, on_error="skip", num_workers=num_workers)
    with silenced():
        assert check(loader.zipped()) == [0, 1, 2, 4, 5, 12, *range(14, 20)]
        assert {failure.index for failure in loader.failures} == {*halves[0].bad, *halves[1].bad}


@WORKERS
def test_a_sample_that_fails_in_both_halves_is_one(num_workers):
    halves = Numbers(4, bad=(0, 1)), Numbers(4, 100, bad=(1, 3))
    loader = PairedLoader(*halves, batch_size=4, on_error="skip", num_workers=num_workers)
    with pytest.warns(UserWarning, match="left out of this epoch: 3 samples"):
        assert check(loader.zipped()) == [2]
    assert sorted(failure.index for failure in loader.failures) == [0, 1, 3]
    [both] = [failure for failure in loader.failures if failure.index == 1]
    assert both.error.__notes__[-2:] == ["It is the input of pair 0.", "Its target has failed, too: KeyError(1)."]


def test_a_target_that_is_done_is_loaded_again_without_what_its_input_lost(manual):
    loader = PairedLoader(Numbers(2, bad=(1,)), Numbers(2, 100), batch_size=2, executor=manual, on_error="skip")
    pairs = iter(loader)
    assert [manual.await_call(), manual.await_call()] == [0, 1]
    manual.complete(1)
    manual.complete(0)
    x, target = next(pairs)
    assert x.tolist() == [0]
    assert not target.done()
    manual.complete(manual.await_call())
    assert target.result().tolist() == [100]
    with pytest.warns(UserWarning, match="left out of this epoch: 1 sample"):
        assert next(pairs, None) is None


def test_a_target_still_queued_is_cancelled_if_its_input_fails(manual):
    pairs = iter(PairedLoader(Numbers(1, bad=(0,)), Numbers(1), executor=manual))
    manual.complete(0)
    assert manual.calls[1].cancelled()
    with pytest.raises(KeyError):
        next(pairs)


@pytest.mark.parametrize("zips", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    bad=st.sets(st.integers(0, 11), max_size=4),
    bad_targets=st.sets(st.integers(0, 11), max_size=4),
    in_process=st.booleans(),
)
def test_alignment_holds_whatever_fails(zips, length, batch_size, bad, bad_targets, in_process):
    halves = Numbers(length, bad=tuple(bad)), Numbers(length, 100, bad=tuple(bad_targets))
    seen: list[int] = []
    with ThreadPoolExecutor(3) as threads, silenced():
        where = {"num_workers": 0} if in_process else {"executor": threads}
        loader = PairedLoader(*halves, batch_size=batch_size, shuffle=True, on_error="skip", **where)
        if zips:
            assert check(loader.zipped()) == [index for index in range(length) if index not in bad | bad_targets]
            return
        for x, target in loader:
            seen += x.tolist()
            if bad_targets.isdisjoint(x.tolist()):
                assert (target.result() - 100).tolist() == x.tolist()
            else:
                assert isinstance(target.exception(), KeyError)
    assert sorted(seen) == [index for index in range(length) if index not in bad]


class Once:
    """A dataset in which some samples do something, the first time that they are loaded."""

    def __init__(self, folder: Any, what: Callable[[], None], indices: tuple[int, ...], offset: int = 0) -> None:
        self.folder = folder
        self.what = what
        self.indices = indices
        self.offset = offset

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        path = self.folder / f"{self.offset}-{index}"
        if index in self.indices and not path.exists():
            path.touch()
            self.what()
        return index + self.offset


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError("a flaky disk")


@pytest.mark.parametrize("half", [0, 1])
def test_alignment_holds_when_workers_die(tmp_path, half):
    halves = [Once(tmp_path, die, (2, 17) if half == number else (), 100 * number) for number in (0, 1)]
    loader = PairedLoader(*halves, batch_size=4, shuffle=True, num_workers=2)
    assert check(loader) == list(range(24))


@WORKERS
def test_alignment_holds_with_retries(tmp_path, num_workers):
    halves = Once(tmp_path, fail, (2, 17)), Once(tmp_path, fail, (2, 4, 9), 100)
    assert check(PairedLoader(*halves, batch_size=4, retries=3, num_workers=num_workers)) == list(range(24))


def test_a_consumer_that_waits_for_a_target_gets_it_though_its_worker_dies(gate):
    def pid(index: int) -> int:
        gate.arrive(os.getpid())
        gate.wait()
        return index

    x, target = next(iter(PairedLoader(Numbers(1), Calls(1, pid), num_workers=2)))
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    consumer = threading.Thread(target=lambda: results.put(target.result()))
    consumer.start()
    os.kill(gate.arrivals(1)[0], signal.SIGKILL)
    gate.open(2)
    assert results.get(timeout=TIMEOUT).tolist() == x.tolist()
    consumer.join()


def test_a_target_that_kills_is_named():
    _, target = next(iter(PairedLoader(Numbers(1), Calls(1, lambda index: die()), num_workers=1)))
    with pytest.raises(WorkerDiedError, match=r"^target of pair 0: dataset\[0\] ended its worker") as caught:
        target.result()
    assert caught.value.__notes__[-1] == "It is the target of pair 0."


def test_a_sample_that_hangs_is_named_with_its_half(gate):
    hanging = Calls(1, hold_back, gate)
    _, target = next(iter(PairedLoader(Numbers(1), hanging, num_workers=1, timeout=0.1)))
    with pytest.raises(ChunkTimeoutError, match=r"^target of pair 0: dataset\[0\] is not done"):
        target.result(TIMEOUT)
    with pytest.raises(ChunkTimeoutError, match=r"^input of pair 0: dataset\[0\] is not done"):
        next(iter(PairedLoader(hanging, Numbers(1), num_workers=1, timeout=0.1)))


def test_what_would_end_a_loop_comes_as_an_error_of_the_target():
    def stop(index: int) -> int:
        raise StopIteration(index)

    for num_workers in (0, 1):
        _, target = next(iter(PairedLoader(Numbers(1), Calls(1, stop), num_workers=num_workers)))
        with pytest.raises(SampleError):
            target.result()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_target_in_hand_is_loaded_though_its_iterator_is_gone(gate):
    x, target = next(iter(PairedLoader(Numbers(8), Calls(8, hold_back, gate), batch_size=2, num_workers=2)))
    gate.open(8)
    assert target.result(TIMEOUT).tolist() == x.tolist()


def test_targets_may_be_taken_after_the_epoch():
    pairs = list(PairedLoader(Numbers(40), Numbers(40, 100), batch_size=2, num_workers=2))
    assert check(pairs) == list(range(40))


def test_what_was_not_handed_out_is_cancelled_when_the_last_target_in_hand_is_done(manual):
    pairs = iter(PairedLoader(Numbers(8), Numbers(8, 100), window=3, executor=manual))
    manual.complete(0)
    _, target = next(pairs)
    rest = [threading.Event() for _ in manual.calls[2:]]
    for event, call in zip(rest, manual.calls[2:]):
        call.add_done_callback(lambda call, event=event: call.cancelled() and event.set())
    pairs.close()
    for event in rest[::2]:  # inputs, at once
        assert event.wait(TIMEOUT)
    manual.complete(1)
    assert target.result().tolist() == [100]
    for event in rest:
        assert event.wait(TIMEOUT)


def test_dropping_a_target_in_hand_gives_it_up(manual):
    pairs = iter(PairedLoader(Numbers(8), Numbers(8, 100), window=3, executor=manual))
    manual.complete(0)
    _, target = next(pairs)
    cancelled = threading.Event()
    manual.calls[1].add_done_callback(lambda call: call.cancelled() and cancelled.set())
    del pairs
    assert not cancelled.is_set()
    del target
    assert cancelled.wait(TIMEOUT)


def test_a_target_with_a_callback_may_be_dropped(manual):
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pairs = iter(PairedLoader(Numbers(1), Numbers(1, 100), executor=manual))
    manual.complete(0)
    next(pairs)[1].add_done_callback(lambda target: results.put(target.result().tolist()))
    gc.collect()
    manual.complete(1)
    assert results.get(timeout=TIMEOUT) == [100]
    assert next(pairs, None) is None


def test_a_target_can_be_cancelled_while_nobody_loads_it(manual):
    pairs = iter(PairedLoader(Numbers(1), Numbers(1), executor=manual))
    manual.complete(0)
    _, target = next(pairs)
    assert target.cancel()
    assert target.cancelled()
    with pytest.raises(CancelledError):
        target.result()
    assert next(pairs, None) is None


@pytest.mark.parametrize(
    ("how", "persistent"),
    [("kept", False), ("dropped", False), ("dropped", True), ("exhausted", False), ("with", True)],
)
def test_closing_the_loader_ends_targets_in_hand(gate, how, persistent):
    loader = PairedLoader(Numbers(2), Calls(2, wait_there, gate), num_workers=2, persistent_workers=persistent)
    pairs = iter(loader)
    _, target = next(pairs)
    if how == "exhausted":
        assert len(list(pairs)) == 1
    if how != "kept":
        del pairs
    gate.arrivals(1)  # it hangs
    if how == "with":
        with loader:
            pass
    else:
        loader.close()
    assert target.done()
    with pytest.raises(ClosedError, match="its loader was closed"):
        target.result()
    if how == "kept":
        with pytest.raises(ClosedError):
            next(pairs)
    gate.open(2)


@pytest.mark.parametrize("device", [None, "meta"])  # with a device, a thread of its own completes them
def test_waiting_in_a_done_callback_is_an_error_and_no_hang(gate, device):
    loader = PairedLoader(Numbers(2), Calls(2, hold_back, gate), num_workers=2, window=2, in_order=True, device=device)
    pairs = iter(loader)
    (_, first), (_, second) = next(pairs), next(pairs)
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def wait(done: Future[Any]) -> None:
        done.result()
        other = second if done is first else first
        for call in (lambda: next(pairs), other.result, other.exception):
            try:
                call()
            except (FifobatchError, StopIteration) as error:
                errors.put(error)

    first.add_done_callback(wait)
    second.add_done_callback(wait)
    gate.open(1)
    for _ in range(3):
        assert "called in a done callback, in the thread that would complete it" in str(errors.get(timeout=TIMEOUT))
    gate.open(1)
    concurrent.futures.wait([first, second], TIMEOUT)
    assert first.done()
    assert second.done()
    assert next(pairs, None) is None


def test_closing_the_loader_ends_targets_in_hand_though_it_shares_its_workers(gate):
    with BatchExecutor(max_workers=2) as executor:
        loader = PairedLoader(Numbers(4), Calls(4, wait_there, gate), executor=executor)
        for _, target in loader:
            break
        called = threading.Event()
        target.add_done_callback(lambda target: called.set())
        loader.close()
        assert called.is_set()
        assert isinstance(target.exception(), ClosedError)
        gate.open(4)
        assert sorted(batch.item() for batch in FifoLoader(Numbers(4), executor=executor)) == list(range(4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nobody_but_the_consumer_keeps_a_half(num_workers):
    floats = Calls(6, lambda index: torch.full((1000,), float(index)))
    loader = PairedLoader(floats, floats, batch_size=2, num_workers=num_workers)
    gc.collect()
    gc.disable()  # the last reference has to do
    try:
        for zips in (False, True):
            for x, y in loader.zipped() if zips else loader:
                gone = [threading.Event(), threading.Event()]
                y = y if zips else y.result()
                refs = [weakref.ref(x, lambda _: gone[0].set()), weakref.ref(y, lambda _: gone[1].set())]
                x = y = None
                assert gone[0].wait(30)  # the pool's thread may still be about to let go of it
                assert gone[1].wait(30)
                del refs
    finally:
        gc.enable()


def test_workers_may_be_kept_or_shared():
    with PairedLoader(Numbers(8), Numbers(8, 100), num_workers=2, persistent_workers=True) as loader:
        assert check(loader) == check(loader) == check(loader.zipped()) == list(range(8))
        next(iter(loader))
        assert check(copy.copy(loader)) == list(range(8))
        assert check(loader) == list(range(8))
    with BatchExecutor(max_workers=2) as executor:
        loaders = [PairedLoader(Numbers(8), Numbers(8, 100), executor=executor) for _ in range(2)]
        for (x, target), (z, other) in zip(*loaders):
            assert (target.result() - x == 100).all()
            assert (other.result() - z == 100).all()
        assert sorted(batch.item() for batch in FifoLoader(Numbers(8), executor=executor)) == list(range(8))


# -- what is told of it -----------------------------------------------------------------------------------------------


@WORKERS
def test_statistics_count_pairs_and_the_timeline_shows_both_halves(num_workers):
    loader = PairedLoader(Numbers(8), Numbers(8, 100), batch_size=2, num_workers=num_workers)
    assert check(loader) == list(range(8))
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.delivered, statistics.failed, statistics.under_way) == (4, 4, 0, 0)
    spans = loader.timeline()
    assert sorted(span.number for span in spans) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(span.loaded is not None and span.delivered is not None for span in spans)
    assert "PairedLoader(Numbers of 8, targets=Numbers of 8, batch_size=2" in repr(loader)
    assert "<th style='text-align:left'>targets</th>" in loader._repr_html_()


@WORKERS
def test_a_pair_has_failed_if_its_target_has_whether_or_not_it_is_asked_for(num_workers):
    loader = PairedLoader(Numbers(4), Numbers(4, bad=(1, 3)), num_workers=num_workers)
    targets = [target for _, target in loader]
    concurrent.futures.wait(targets, TIMEOUT)
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.delivered, statistics.failed, statistics.under_way) == (4, 2, 2, 0)
    assert "2 failed" in str(statistics)


def test_a_target_that_failed_without_the_sample_that_its_input_lost_has_not_failed(manual):
    halves = Numbers(2, bad=(1,)), Numbers(2, 100, bad=(1,))
    loader = PairedLoader(*halves, batch_size=2, executor=manual, on_error="skip")
    pairs = iter(loader)
    assert [manual.await_call(), manual.await_call()] == [0, 1]
    manual.complete(1)
    manual.complete(0)
    _, target = next(pairs)
    manual.complete(manual.await_call())
    assert target.result().tolist() == [100]
    assert (loader.statistics().delivered, loader.statistics().failed) == (1, 0)


@WORKERS
def test_a_pair_counts_once_though_both_halves_lose_a_sample(num_workers):
    halves = Numbers(8, bad=(1, 2)), Numbers(8, 100, bad=(1, 3, 4))
    loader = PairedLoader(*halves, batch_size=4, on_error="skip", num_workers=num_workers)
    with silenced():
        assert check(loader.zipped()) == [0, 5, 6, 7]
    statistics = loader.statistics()
    assert (statistics.submitted, statistics.delivered, statistics.failed, statistics.abandoned) == (2, 2, 0, 0)


def test_waiting_for_a_target_is_waiting(gate):
    loader = PairedLoader(Numbers(1), Calls(1, hold_back, gate), num_workers=2)
    pairs = iter(loader)
    _, target = next(pairs)
    before = loader.statistics().seconds_waited
    with pytest.raises(concurrent.futures.TimeoutError):
        target.result(timeout=0.01)
    assert loader.statistics().seconds_waited >= before + 0.01
    gate.open(1)
    assert next(pairs, None) is None
    target.result()


def test_progress_counts_pairs(capsys):
    loader = PairedLoader(Numbers(4), Numbers(4, 100), num_workers=1, progress={"mininterval": 0})
    assert check(loader) == list(range(4))
    assert "4/4" in capsys.readouterr().err


# -- the two methods that are usual without it -------------------------------------------------------------------------


class Photographs:
    """Vectors, and beside them what a model is to make of them."""

    def __init__(self, weights: torch.Tensor | None = None) -> None:
        self.weights = weights

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        vector = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return vector if self.weights is None else vector @ self.weights


INPUTS, TARGETS = Photographs(), Photographs(torch.arange(8.0).reshape(4, 2))


def train(step: Callable[[Callable[[Any, Any], None]], None]) -> list[float]:
    """Train a model for an epoch; return the losses."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def learn(x: torch.Tensor, get_target: Callable[[], torch.Tensor]) -> None:
        prediction = model(x)
        loss = torch.nn.functional.mse_loss(prediction, get_target())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    step(learn)
    return losses


def seeded() -> dict[str, Any]:
    return {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(42)}


def aligned(learn: Callable[[Any, Any], None]) -> None:
    """The plain loop: two loaders, seeded alike, side by side."""
    for x, y in zip(DataLoader(INPUTS, **seeded()), DataLoader(TARGETS, **seeded())):
        learn(x, lambda: y)


def prefetched_by_hand(learn: Callable[[Any, Any], None]) -> None:
    """Method 1 of the question: take the next target while the model computes."""
    targets = iter(DataLoader(TARGETS, **seeded()))
    target = next(targets)
    for x in DataLoader(INPUTS, **seeded()):
        learn(x, lambda: target)
        target = next(targets, target)


def paired(learn: Callable[[Any, Any], None]) -> None:
    """What method 1 becomes."""
    for x, target in PairedLoader(INPUTS, TARGETS, in_order=True, num_workers=2, **seeded()):
        learn(x, target.result)


def both_in_advance(learn: Callable[[Any, Any], None]) -> None:
    """Method 2: both batches are taken before they are needed; the window does that."""
    for x, y in PairedLoader(INPUTS, TARGETS, in_order=True, num_workers=2, **seeded()).zipped():
        learn(x, lambda: y)


def test_the_losses_are_those_of_two_loaders_seeded_alike():
    expected = train(aligned)
    assert len(expected) == 6
    assert train(prefetched_by_hand) == train(paired) == train(both_in_advance) == expected


def test_two_loaders_seeded_alike_lose_their_alignment_and_a_pair_does_not():
    def restarted(learn: Callable[[Any, Any], None]) -> None:
        """Method 1 with a shorter target dataset: it is shuffled again where it starts again."""
        targets = DataLoader(Numbers(12), **seeded())
        iterator = iter(targets)
        for x in DataLoader(Numbers(24), **seeded()):
            try:
                y = next(iterator)
            except StopIteration:
                iterator = iter(targets)
                y = next(iterator)
            learn(x, y)

    pairs: list[Any] = []
    restarted(lambda x, y: pairs.append((x % 12).tolist() == y.tolist()))
    assert not all(pairs)
    for x, target in PairedLoader(Numbers(24), Numbers(12), cycle_targets=True, num_workers=2, **seeded()):
        assert target.result().tolist() == (x % 12).tolist()

"""Retries and skipping where no worker of ours is: on others' executors, completed by hand, and in this process."""

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from probes import Announcing, Calls, drain

from fifobatch import FifoLoader, PlanError


class Flaky:
    """Raises at some samples, as often as said."""

    def __init__(self, length: int = 4, **errors: list[BaseException]) -> None:
        self.length = length
        self.errors = {int(key[1:]): list(each) for key, each in errors.items()}
        self.tried: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.tried.append(index)
        if self.errors.get(index):
            error = self.errors[index].pop(0)
            raise type(error)(*error.args)  # a new one: one that is kept would keep the test's frame
        return index


def failures(loader: FifoLoader[Any]) -> list[tuple[Any, int, type, int]]:
    return [(failure.index, failure.chunk, type(failure.error), failure.attempts) for failure in loader.failures]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_empty_batch_is_an_error_that_says_so(num_workers: int, on_error: str) -> None:
    arguments: dict[str, Any] = {"batch_sampler": [[1], [], [2]], "num_workers": num_workers, "on_error": on_error}
    batches, errors = drain(iter(FifoLoader(range(3), **arguments)))
    assert [batch.tolist() for batch in batches] == [[1], [2]]
    [error] = errors
    assert isinstance(error, PlanError)
    assert "the batch sampler has yielded an empty batch" in str(error)
    assert "collate_fn, chunk 1 (indices [])" in error.__notes__[0]
    assert drain(iter(FifoLoader(range(3), collate_fn=list, **arguments))) == ([[1], [], [2]], [])


def test_a_chunk_that_fails_is_tried_again_later_and_the_others_come_meanwhile() -> None:
    manual = Announcing()
    flaky = Flaky(s0=[OSError("first"), OSError("second")])
    loader: FifoLoader[Any] = FifoLoader(flaky, batch_size=2, executor=manual, window=2, retries=2)
    iterator = iter(loader)
    assert [manual.await_call(), manual.await_call()] == [0, 1]
    manual.complete(0)
    again = manual.await_call()
    manual.complete(1)
    assert next(iterator).tolist() == [2, 3]
    manual.complete(again)
    manual.complete(manual.await_call())
    assert next(iterator).tolist() == [0, 1]
    assert list(iterator) == []
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed, statistics.retries, statistics.reloads) == (2, 0, 2, 0)
    assert loader.failures == []


def test_the_last_error_is_the_datasets_own_and_says_which_attempt_it_was() -> None:
    manual = Announcing()
    errors = [OSError("first"), OSError("second"), OSError("third")]
    loader: FifoLoader[Any] = FifoLoader(Flaky(2, s1=errors), batch_size=2, executor=manual, retries=2)
    iterator = iter(loader)
    for _ in range(3):
        manual.complete(manual.await_call())
    with pytest.raises(OSError, match="third") as caught:
        next(iterator)
    [note] = caught.value.__notes__
    assert "loading dataset[1], chunk 0 (indices [0, 1]); attempt 3, after " in note
    assert list(iterator) == []
    assert (loader.statistics().retries, loader.statistics().failed) == (2, 1)


@pytest.mark.parametrize(
    ("retry_on", "error"),
    [(OSError, ValueError), ((OSError, KeyError), ValueError), (Exception, KeyboardInterrupt)],
)
def test_other_errors_are_not_tried_again(retry_on: Any, error: type[BaseException]) -> None:
    manual = Announcing()
    loader: FifoLoader[Any] = FifoLoader(Flaky(1, s0=[error("x")]), executor=manual, retries=2, retry_on=retry_on)
    iterator = iter(loader)
    manual.complete(manual.await_call())
    with pytest.raises(Exception, match=r"x|KeyboardInterrupt") as caught:
        next(iterator)
    assert "attempt 1, after" in caught.value.__notes__[0]
    assert len(manual.calls) == 1 and loader.statistics().retries == 0


def test_what_fails_is_left_out_and_warned_of_once() -> None:
    manual = Announcing()
    flaky = Flaky(6, s1=[ValueError("x")], s2=[KeyError("y")], s3=[KeyError("z")])
    loader: FifoLoader[Any] = FifoLoader(flaky, batch_size=2, executor=manual, window=3, on_error="skip")
    iterator = loader.batches()
    for _ in range(3):
        manual.complete(manual.await_call())
    found = [next(iterator), next(iterator)]
    assert [(batch.number, batch.indices, batch.data.tolist()) for batch in found] == [
        (0, [0], [0]),
        (2, [4, 5], [4, 5]),
    ]
    with pytest.warns(UserWarning, match=r"this epoch: 3 samples that failed; .*index 1: ValueError: x"):
        assert list(iterator) == []
    assert list(iterator) == []  # without a further warning
    assert failures(loader) == [(1, 0, ValueError, 1), (2, 1, KeyError, 1), (3, 1, KeyError, 1)]
    statistics = loader.statistics()
    assert (statistics.delivered, statistics.failed, statistics.under_way) == (2, 1, 0)


def test_left_out_only_after_the_retries() -> None:
    manual = Announcing()
    flaky = Flaky(3, s0=[OSError()], s1=[OSError()], s2=[ValueError()])
    loader: FifoLoader[Any] = FifoLoader(
        flaky, batch_size=3, executor=manual, retries=2, retry_on=OSError, on_error="skip"
    )
    iterator = loader.batches()
    for _ in range(3):  # at the third, sample 2 fails
        manual.complete(manual.await_call())
    assert next(iterator).indices == [0, 1]
    with pytest.warns(UserWarning, match="1 sample that failed"):
        assert list(iterator) == []
    assert failures(loader) == [(2, 0, ValueError, 3)]
    assert loader.statistics().retries == 2


def broken_collate(samples: list[Any]) -> Any:
    raise ArithmeticError("no batch")


def test_a_collate_function_that_fails_leaves_the_whole_batch_out() -> None:
    manual = Announcing()
    loader: FifoLoader[Any] = FifoLoader(
        Flaky(s0=[ValueError()]), batch_size=2, executor=manual, window=2, on_error="skip", collate_fn=broken_collate
    )
    iterator = iter(loader)
    for _ in range(2):
        manual.complete(manual.await_call())
    with pytest.warns(UserWarning, match="4 samples that failed"):
        assert list(iterator) == []
    assert failures(loader) == [
        (0, 0, ValueError, 1),
        (1, 0, ArithmeticError, 1),
        (2, 1, ArithmeticError, 1),
        (3, 1, ArithmeticError, 1),
    ]


def test_a_chunk_that_is_to_be_tried_again_ends_with_its_iterator() -> None:
    manual = Announcing()
    loader: FifoLoader[Any] = FifoLoader(Flaky(2, s0=[OSError()] * 9), executor=manual, window=2, retries=9)
    iterator = iter(loader)
    calls = [manual.await_call(), manual.await_call()]
    iterator.close()
    for number in calls:
        if not manual.calls[number].cancelled():
            manual.complete(number)
    assert len(manual.calls) == 2
    assert loader.statistics().retries == 0


def test_an_executor_that_takes_no_more_when_a_chunk_is_to_be_tried_again() -> None:
    manual = Announcing()
    loader: FifoLoader[Any] = FifoLoader(Flaky(1, s0=[OSError()]), executor=manual, retries=1)
    iterator = iter(loader)
    number = manual.await_call()
    manual.shutdown()
    manual.complete(number)
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(iterator)


def test_on_threads() -> None:
    flaky = Flaky(40, **{f"s{index}": [OSError()] * (index % 3) for index in range(40)})
    with ThreadPoolExecutor(4) as threads:
        loader: FifoLoader[Any] = FifoLoader(flaky, batch_size=4, executor=threads, retries=8)
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(40))
    assert loader.statistics().retries == sum(index % 3 for index in range(40))


# -- in this process --------------------------------------------------------------------------------------------------


def draw(index: int, failing: dict[int, int]) -> tuple[int, float, float]:
    drawn = random.random(), float(torch.rand(()))
    if failing.get(index):
        failing[index] -= 1
        raise OSError("not yet")
    return index, *drawn


def draws(failing: dict[int, int], **arguments: Any) -> Any:
    loader: FifoLoader[Any] = FifoLoader(
        Calls(6, draw, failing),
        batch_size=3,
        num_workers=0,
        collate_fn=list,
        generator=torch.Generator().manual_seed(3),
        **arguments,
    )
    return loader, list(loader)


def test_another_attempt_has_the_same_random_numbers() -> None:
    _, expected = draws({})
    loader, found = draws({1: 2, 3: 1}, retries=2)
    assert found == expected
    statistics = loader.statistics()
    assert (statistics.retries, statistics.delivered, statistics.failed) == (3, 2, 0)


def test_the_last_error_in_this_process() -> None:
    loader: FifoLoader[Any] = FifoLoader(Calls(1, draw, {0: 9}), num_workers=0, retries=1)
    with pytest.raises(OSError, match="not yet") as caught:
        list(loader)
    assert "loading dataset[0], chunk 0 (indices [0]); attempt 2, after " in caught.value.__notes__[0]


def test_skipping_in_this_process() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader, found = draws({0: 9, 3: 9, 4: 9, 5: 9}, on_error="skip", retries=1)
    assert [[index for index, *_ in batch] for batch in found] == [[1, 2]]
    assert failures(loader) == [(index, index // 3, OSError, 2) for index in (0, 3, 4, 5)]
    assert len(caught) == 1 and "4 samples" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert loader.statistics().retries == 2


class DrawingLists:
    """A dataset that loads lists; each sample is a random number. Some raise, always or, the last one, once."""

    def __init__(self, always: set[int], raised: bool) -> None:
        self.always = always
        self.raised = raised

    def __len__(self) -> int:
        return 6

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self.load(index) for index in indices]

    def load(self, index: int) -> tuple[int, float]:
        if index in self.always or (index == 5 and not self.raised):
            self.raised = True
            raise OSError("not to be had")
        return index, torch.rand(()).item()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_loaded_one_by_one_after_its_list_has_failed_has_the_same_random_numbers(num_workers: int) -> None:
    def load(always: set[int], raised: bool) -> dict[int, float]:
        loader: FifoLoader[Any] = FifoLoader(
            DrawingLists(always, raised),
            batch_size=3,
            num_workers=num_workers,
            collate_fn=list,
            on_error="skip",
            generator=torch.Generator().manual_seed(3),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "left out of this epoch")
            return dict(sample for batch in loader for sample in batch)

    expected = load(set(), True)
    assert load({2}, True) == {index: expected[index] for index in (0, 1, 3, 4, 5)}
    assert load(set(), False) == expected  # what raised once has not raised again

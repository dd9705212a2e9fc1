"""How much may be under way, and how far the order may drift: `Window`, by example and by property."""

import itertools
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fifobatch.window import Window, check_bytes, check_count

ORDERS = list(itertools.permutations(range(4)))


def fill(window: Window[Any]) -> list[int]:
    numbers = []
    while not window.full:
        numbers.append(window.submit())
    return numbers


def drain(window: Window[Any]) -> list[int]:
    numbers = []
    while window.ready:
        numbers.append(window.deliver()[0])
    return numbers


def deliveries(completions: tuple[int, ...], size: int, max_skew: int | None) -> list[int]:
    """Complete as ``completions`` says, each as soon as it was submitted; deliver all that may go at each step."""
    window: Window[int] = Window(size, max_skew)
    waiting, delivered = list(completions), []
    submitted = 0
    while waiting:
        while not window.full and submitted < len(completions):
            submitted = window.submit() + 1
        number = next(number for number in waiting if number < submitted)
        waiting.remove(number)
        window.complete(number, number)
        delivered += drain(window)
    return delivered


# -- by example --------------------------------------------------------------------------------------------------------


def test_chunks_are_numbered_in_the_order_of_submission():
    assert fill(Window(3)) == [0, 1, 2]


def test_the_window_counts_what_was_submitted_and_not_yet_delivered():
    window: Window[str] = Window(2)
    assert (window.under_way, window.full) == (0, False)
    window.submit()
    assert (window.under_way, window.full) == (1, False)
    window.submit()
    assert (window.under_way, window.full) == (2, True)
    window.complete(1, "b")
    assert (window.under_way, window.full) == (2, True)  # completed, but nobody has it yet
    assert window.deliver() == (1, "b")
    assert (window.under_way, window.full) == (1, False)


def test_what_is_held_back_counts_as_under_way():
    window: Window[str] = Window(3, max_skew=0)
    fill(window)
    window.complete(2, "c")
    window.complete(1, "b")
    assert not window.ready
    assert window.under_way == 3
    assert window.full


def test_nothing_is_ready_before_something_completed():
    window: Window[str] = Window(2)
    fill(window)
    assert not window.ready
    with pytest.raises(IndexError):
        window.deliver()


def test_more_than_the_window_holds_is_not_submitted():
    window: Window[str] = Window(1)
    window.submit()
    with pytest.raises(AssertionError):
        window.submit()


def test_an_item_is_delivered_as_the_object_it_is():
    window: Window[object] = Window(1)
    item = object()
    window.complete(window.submit(), item)
    assert window.deliver()[1] is item


def test_items_are_never_compared():
    class Incomparable:
        __lt__ = __eq__ = None  # type: ignore[assignment]
        __hash__ = object.__hash__

    window: Window[Incomparable] = Window(4, max_skew=0)
    fill(window)
    for number in (3, 1, 2, 0):
        window.complete(number, Incomparable())
    assert drain(window) == [0, 1, 2, 3]


def test_without_a_limit_the_order_is_that_of_completion():
    for completions in ORDERS:
        assert deliveries(completions, 4, None) == list(completions)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_max_skew_0_is_plan_order(size):
    for completions in ORDERS:
        assert deliveries(completions, size, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize("max_skew", [3, 4, 100])
def test_a_max_skew_that_cannot_bind_is_completion_order(max_skew):
    for completions in ORDERS:
        assert deliveries(completions, 4, max_skew) == list(completions)


@pytest.mark.parametrize(
    ("completions", "delivered"),
    [
        ((0, 1, 2, 3), [0, 1, 2, 3]),
        ((1, 0, 3, 2), [1, 0, 3, 2]),
        ((2, 1, 0, 3), [1, 0, 2, 3]),  # 2 may go only when 0 has gone
        ((3, 2, 1, 0), [1, 0, 2, 3]),  # held-back batches go in plan order
        ((3, 0, 2, 1), [0, 2, 1, 3]),
    ],
)
def test_max_skew_1_lets_a_batch_overtake_by_one_place(completions, delivered):
    assert deliveries(completions, 4, 1) == delivered


def test_what_was_held_back_goes_before_what_completes_later():
    window: Window[int] = Window(6, max_skew=2)
    fill(window)
    for number in (4, 3, 1, 2, 0):
        window.complete(number, number)
    assert [window.deliver()[0] for _ in range(3)] == [1, 2, 0]  # and now 3, 4 and 5 may go
    window.complete(5, 5)
    assert drain(window) == [3, 4, 5]


def test_a_window_of_1_is_plan_order():
    assert deliveries((3, 2, 1, 0), 1, None) == [0, 1, 2, 3]


# -- by property -------------------------------------------------------------------------------------------------------


@given(
    total=st.integers(0, 40),
    size=st.integers(1, 12),
    max_skew=st.one_of(st.none(), st.integers(0, 12)),
    order=st.integers(0, 2**32).map(random.Random),
)
@settings(deadline=None, max_examples=250)
def test_whatever_the_order_each_chunk_comes_once_within_the_bounds_and_nothing_deadlocks(total, size, max_skew, order):
    window: Window[str] = Window(size, max_skew)
    loading: list[int] = []
    delivered: list[int] = []
    completed_order: list[int] = []
    while len(delivered) < total:
        # Everything submitted has completed: then there must be something to deliver, or room to submit.
        choices = []
        if not window.full and window.submitted < total:
            choices.append("submit")
        if loading:
            choices.append("complete")
        if window.ready:
            choices.append("deliver")
        assert choices, f"deadlock: {window.under_way} under way, {delivered} delivered"
        if not loading and window.submitted > len(delivered):
            assert window.ready
        action = order.choice(choices)
        if action == "submit":
            number = window.submit()
            assert number == window.submitted - 1
            loading.append(number)
        elif action == "complete":
            number = loading.pop(order.randrange(len(loading)))
            completed_order.append(number)
            window.complete(number, f"item {number}")
        else:
            number, item = window.deliver()
            assert item == f"item {number}"
            delivered.append(number)
            if window.max_skew is not None:
                assert set(range(number - window.max_skew)) <= set(delivered)
        assert 0 <= window.under_way <= window.size
        assert window.under_way == window.submitted - len(delivered)
        assert window.delivered == len(delivered)
        assert window.full == (window.under_way == window.size)
    assert sorted(delivered) == list(range(total))
    assert not window.ready
    assert window.under_way == 0
    if window.max_skew is None:
        assert delivered == completed_order
    if window.max_skew == 0 or window.size == 1:
        assert delivered == list(range(total))


@given(completions=st.permutations(range(10)), size=st.integers(1, 10), max_skew=st.integers(0, 10))
@settings(deadline=None, max_examples=100)
def test_a_batch_is_held_back_only_as_long_as_max_skew_asks(completions, size, max_skew):
    window: Window[int] = Window(size, max_skew)
    waiting, delivered, arrived = list(completions), set(), set()
    while waiting or window.ready:
        while not window.full and window.submitted < 10:
            window.submit()
        if waiting:
            number = next((number for number in waiting if number < window.submitted), None)
            if number is not None:
                waiting.remove(number)
                window.complete(number, number)
                arrived.add(number)
        low = next(number for number in itertools.count() if number not in delivered)
        may_go = {number for number in arrived - delivered if number - low <= max_skew}
        assert window.ready == bool(may_go)
        if window.ready:
            delivered.add(window.deliver()[0])
    assert delivered == set(range(10))


def test_a_long_run_keeps_no_trace_of_what_was_delivered():
    window: Window[None] = Window(8, max_skew=4)
    fill(window)
    for _ in range(1_000):
        for number in sorted(range(window.delivered, window.submitted), reverse=True):
            window.complete(number, None)
        drain(window)
        fill(window)
    assert not window._above
    assert not window._held


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, np.int64(0)])
def test_a_window_below_1_is_refused(size):
    with pytest.raises(ValueError, match=rf"^window={size} .*int of at least 1$"):
        Window(size)


@pytest.mark.parametrize("max_skew", [-1, np.int64(-1)])
def test_a_max_skew_below_0_is_refused(max_skew):
    with pytest.raises(ValueError, match=r"^max_skew=-1 .*int of at least 0$"):
        Window(1, max_skew)


NOT_INTEGERS = [1.5, 1.0, True, False, "3", [3], Decimal(3), np.float64(3), np.bool_(True)]


@pytest.mark.parametrize("value", [*NOT_INTEGERS, None], ids=repr)
def test_a_window_that_is_no_int_is_refused(value):
    with pytest.raises(TypeError) as caught:
        Window(value)
    for part in ("window=", repr(value), type(value).__name__, "int of at least 1"):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_a_max_skew_that_is_no_int_is_refused(value):
    with pytest.raises(TypeError) as caught:
        Window(1, value)
    for part in ("max_skew=", repr(value), type(value).__name__, "int of at least 0"):
        assert part in str(caught.value)


def test_a_refusal_shows_no_error_of_our_own_before_it():
    with pytest.raises(TypeError) as caught:
        Window("3")  # type: ignore[arg-type]
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("three", [3, np.int8(3), np.uint64(3), np.int64(3), torch.tensor(3)], ids=repr)
def test_whatever_is_an_integer_is_accepted_and_becomes_an_int(three):
    window: Window[None] = Window(three, three)
    assert (window.size, window.max_skew) == (3, 3)
    assert type(window.size) is int
    assert type(window.max_skew) is int


def test_check_count_returns_the_int():
    assert check_count("epoch", np.int16(7), 0) == 7


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 120),
)
def test_bytes_under_way_stay_within_max_bytes(steps: list[tuple[int, int]], size: int, max_bytes: int):
    """Whatever completes when: known bytes and guesses stay within the limit, but for one batch that is alone."""
    window: Window[int] = Window(size, max_bytes=max_bytes)
    loading: list[int] = []
    here: dict[int, int] = {}
    seen: list[int] = []
    for choice, nbytes in steps:
        while not window.full:
            alone = window.under_way == 0
            loading.append(window.submit())
            if not alone:
                assert seen, "while no size is known, there is one batch only"
                assert sum(here.values()) + max(seen) * len(loading) <= max_bytes
        assert window.under_way > 0, "one batch is always allowed"
        if loading:
            number = loading.pop(choice % len(loading))
            here[number] = nbytes
            seen.append(nbytes)
            window.complete(number, number, nbytes)
        if window.ready and (choice or not loading):
            del here[window.deliver()[0]]


def test_without_max_bytes_sizes_do_not_count():
    window: Window[int] = Window(3)
    assert fill(window) == [0, 1, 2]
    window.complete(0, 0, 10**12)
    assert window.deliver() == (0, 0)
    assert fill(window) == [3]


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("2GB", 2 * 10**9), ("1.5 gib", 3 * 2**29), (" 7 ", 7), ("4k", 4000), ("1TiB", 2**40), (9, 9)],
)
def test_sizes_are_numbers_or_texts_with_a_unit(text: int | str, size: int):
    assert check_bytes("max_bytes", text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1GB", "1e9", "12 parsecs", "1,000", "0", 0, -5])
def test_what_is_no_size_is_refused(text: int | str):
    with pytest.raises(ValueError, match="max_bytes="):
        check_bytes("max_bytes", text)


@pytest.mark.parametrize("value", [1.5, True, b"1GB", [1]])
def test_what_is_neither_a_number_nor_a_text_is_refused(value: Any):
    with pytest.raises(TypeError, match="max_bytes="):
        check_bytes("max_bytes", value)

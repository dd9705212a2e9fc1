"""What to load: `BatchPlan` is lazy, reproducible, and leaves the indices as the sampler made them."""

import dataclasses
import gc
import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, SubsetRandomSampler

from fifobatch import Batch, BatchPlan, Chunk
from fifobatch.plan import chunk_seed


class Counting:
    """An endless sampler that counts what was pulled from it."""

    def __init__(self) -> None:
        self.pulled = 0

    def __iter__(self) -> Iterator[int]:
        for index in itertools.count():
            self.pulled += 1
            yield index % 10


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def indices(plan: BatchPlan) -> list[Any]:
    return [chunk.indices for chunk in plan]


# -- lazy --------------------------------------------------------------------------------------------------------------


def test_an_endless_sampler_is_read_one_chunk_at_a_time():
    sampler = Counting()
    chunks = iter(BatchPlan(range(10), batch_size=4, sampler=sampler))
    assert sampler.pulled == 0
    for number in range(5):
        assert next(chunks).number == number
        assert sampler.pulled == 4 * (number + 1)


def test_an_endless_batch_sampler_is_read_one_chunk_at_a_time():
    sampler = Counting()
    plan = BatchPlan(range(10), batch_sampler=([index, index] for index in sampler))
    assert [chunk.indices for chunk in itertools.islice(plan, 3)] == [[0, 0], [1, 1], [2, 2]]
    assert sampler.pulled == 3


def test_a_sequential_plan_over_a_billion_samples_takes_constant_memory():
    gc.collect()
    tracemalloc.start()
    try:
        plan = BatchPlan(range(10**9), batch_size=10)
        for chunk in itertools.islice(plan, 2_000):
            assert chunk.indices[0] == 10 * chunk.number
        assert len(plan) == 10**8
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000, f"{peak} bytes"


def test_making_a_plan_and_its_iterator_reads_no_sample():
    class Unreadable:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise AssertionError("a plan must not load")

    assert indices(BatchPlan(Unreadable(), batch_size=2)) == [[0, 1], [2, 3]]


# -- the indices -------------------------------------------------------------------------------------------------------

AS_MADE = [
    3,
    np.int64(3),
    torch.tensor(3),
    "image-0003",
    (1, "left"),
    None,
    slice(0, 8),
    np.arange(3),
    frozenset({1}),
]


@pytest.mark.parametrize("index", AS_MADE, ids=lambda index: type(index).__name__)
@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_an_index_stays_the_very_object_that_the_sampler_made(index, batch_size):
    (chunk,) = BatchPlan({}, batch_size=batch_size, sampler=[index] * (batch_size or 1))
    made = [chunk.indices] if batch_size is None else chunk.indices
    assert len(made) == (batch_size or 1)
    assert all(one is index for one in made)


@pytest.mark.parametrize("index", AS_MADE, ids=lambda index: type(index).__name__)
def test_a_batch_samplers_item_is_kept_as_it_was(index):
    (chunk,) = BatchPlan({}, batch_sampler=[index])
    if isinstance(index, torch.Tensor):  # the sampler may write into its own again
        assert chunk.indices is not index
        assert torch.equal(chunk.indices, index)
    elif isinstance(index, frozenset):  # its order would not survive the way to the worker
        assert chunk.indices == list(index)
    else:
        assert chunk.indices is index


def test_chunks_are_numbered_from_0_without_gaps():
    assert [chunk.number for chunk in BatchPlan(range(10), batch_size=3)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [[0, 1], [2, 3], [4]]), (True, [[0, 1], [2, 3]])])
def test_drop_last_leaves_out_the_last_chunk_if_it_is_not_full(drop_last, expected):
    plan = BatchPlan(range(5), batch_size=2, drop_last=drop_last)
    assert indices(plan) == expected
    assert len(plan) == len(expected)


def test_batch_size_none_gives_single_indices_and_asks_for_no_collation():
    plan = BatchPlan(range(3), batch_size=None)
    assert indices(plan) == [0, 1, 2]
    assert len(plan) == 3
    assert not plan.collates


@pytest.mark.parametrize("plan", [BatchPlan(range(3)), BatchPlan(range(3), batch_sampler=[[0, 1], [2]])])
def test_every_other_plan_asks_for_collation(plan):
    assert plan.collates


def test_a_plan_over_nothing_has_no_chunks():
    plan = BatchPlan([], batch_size=2)
    assert list(plan) == []
    assert len(plan) == 0


@given(
    samples=st.integers(0, 40),
    batch_size=st.one_of(st.none(), st.integers(1, 9)),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(-(2**70), 2**70),
)
@settings(deadline=None, max_examples=100)
def test_each_index_is_planned_once_whatever_the_arguments(samples, batch_size, shuffle, drop_last, seed):
    drop_last = drop_last and batch_size is not None
    shuffle = shuffle and samples > 0  # torch refuses to shuffle nothing
    plan = BatchPlan(range(samples), batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    chunks = list(plan)
    assert len(chunks) == len(plan)
    flat = [index for chunk in chunks for index in ([chunk.indices] if batch_size is None else chunk.indices)]
    assert len(set(flat)) == len(flat)
    assert len(flat) == (samples // batch_size * batch_size if drop_last else samples)
    assert set(flat) <= set(range(samples))
    assert shuffle or flat == list(range(len(flat)))


def test_the_chunks_are_those_of_torchs_loader():
    arguments: dict[str, Any] = {"batch_size": 3, "sampler": [5, 1, 4, 4, 0], "drop_last": False}
    ours = [torch.tensor(chunk) for chunk in indices(BatchPlan(range(6), **arguments))]
    theirs = list(DataLoader(range(6), **arguments))
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs) == len(BatchPlan(range(6), **arguments))


# -- shuffle -----------------------------------------------------------------------------------------------------------


def shuffled(**arguments: Any) -> list[Any]:
    return indices(BatchPlan(range(100), batch_size=10, shuffle=True, **arguments))


def test_shuffle_is_the_same_for_the_same_seed_and_epoch():
    assert shuffled(seed=7, epoch=3) == shuffled(seed=7, epoch=3)


def test_shuffle_differs_for_every_seed_and_every_epoch():
    orders = [shuffled(seed=seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
    orders.append(indices(BatchPlan(range(100), batch_size=10)))
    assert len({str(order) for order in orders}) == 26


def test_shuffle_is_not_what_any_chunk_would_draw():
    for chunk in BatchPlan(range(100), batch_size=10, shuffle=True, seed=7):
        drawn = torch.randperm(100, generator=torch.Generator().manual_seed(chunk.seed)).tolist()
        assert drawn != list(itertools.chain(*shuffled(seed=7)))


def test_shuffle_leaves_the_global_random_state_alone():
    before = torch.default_generator.get_state()
    shuffled()
    assert torch.equal(torch.default_generator.get_state(), before)


def test_shuffle_does_not_depend_on_the_global_random_state():
    torch.manual_seed(1)
    first = shuffled()
    torch.manual_seed(2)
    assert shuffled() == first


@pytest.mark.parametrize("shuffle", [False, True])
def test_iterating_twice_gives_the_same_chunks(shuffle):
    plan = BatchPlan(range(20), batch_size=3, shuffle=shuffle, seed=1)
    assert list(plan) == list(plan)


def test_leaving_an_iteration_half_way_does_not_change_the_next():
    plan = BatchPlan(range(20), batch_size=3, shuffle=True, seed=1)
    expected = list(plan)
    next(iter(plan))
    assert list(plan) == expected


def test_two_iterations_at_once_give_the_same_chunks():
    plan = BatchPlan(range(20), batch_size=3, shuffle=True, seed=1)
    for first, second in zip(plan, plan):
        assert first == second


def test_iterating_twice_asks_the_given_sampler_twice():
    plan = BatchPlan(range(50), batch_size=50, sampler=SubsetRandomSampler(range(50)))
    assert indices(plan) != indices(plan)


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_chunk_seeds_are_distinct_over_seeds_epochs_and_numbers():
    edges = [*range(15), 2**31, 2**32, 2**32 + 1, 2**63 - 1]
    grid = list(itertools.product([*edges, -1, -(2**63)], edges, [*edges, -1]))
    assert len({chunk_seed(*place) for place in grid}) == len(grid)


def test_chunk_seeds_are_64_bits_and_well_mixed():
    count = 10_000
    seeds = [chunk_seed(0, 0, number) for number in range(count)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    for bit in range(64):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert abs(ones - count / 2) < 300, f"bit {bit} is set in {ones} of {count} seeds"  # six standard deviations


def test_neighbouring_chunks_differ_in_about_half_of_their_seeds_bits():
    for place in itertools.product((0, 1, 2**40), (0, 1), (0, 1, 500)):
        seed, epoch, number = place
        for neighbour in ((seed + 1, epoch, number), (seed, epoch + 1, number), (seed, epoch, number + 1)):
            different = (chunk_seed(*place) ^ chunk_seed(*neighbour)).bit_count()
            assert 8 <= different <= 56, f"{place} and {neighbour}: {different} of 64 bits"


def test_chunk_seeds_are_pinned():
    # A change would change what every user's random augmentation draws.
    assert [chunk_seed(0, 0, 0), chunk_seed(1, 2, 3)] == [2891389769238885931, 13041116711478803063]


def test_a_chunks_seed_is_that_of_its_number_whatever_it_holds():
    expected = [chunk_seed(5, 2, number) for number in range(4)]
    for plan in (
        BatchPlan(range(4), seed=5, epoch=2),
        BatchPlan(range(4), batch_size=None, seed=5, epoch=2),
        BatchPlan(range(40), batch_size=10, shuffle=True, seed=5, epoch=2),
        BatchPlan({}, sampler="abcd", seed=5, epoch=2),
        BatchPlan({}, batch_sampler=[None] * 4, seed=5, epoch=2),
    ):
        assert [chunk.seed for chunk in plan] == expected


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 2**100])
def test_any_integer_is_a_seed(seed):
    (chunk,) = BatchPlan([0], shuffle=True, seed=seed)
    torch.Generator().manual_seed(chunk.seed)


# -- length ------------------------------------------------------------------------------------------------------------


def test_len_is_the_number_of_chunks():
    assert len(BatchPlan(range(10), batch_size=3)) == 4
    assert len(BatchPlan(range(10), batch_sampler=[[1], [2]])) == 2
    assert len(BatchPlan(range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, True))) == 2


@pytest.mark.parametrize("batch_size", [None, 4])
def test_len_of_a_plan_over_a_sampler_without_length_is_a_type_error(batch_size):
    plan = BatchPlan(range(10), batch_size=batch_size, sampler=Counting())
    with pytest.raises(TypeError, match="has no len"):
        len(plan)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": True, "sampler": [0]},
        {"batch_size": 2, "batch_sampler": [[0]]},
        {"shuffle": True, "batch_sampler": [[0]]},
        {"sampler": [0], "batch_sampler": [[0]]},
        {"drop_last": True, "batch_sampler": [[0]]},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"drop_last": "yes"},
        {"dataset": [], "shuffle": True},
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused_in_torchs_words(arguments):
    arguments = {"dataset": range(10), **arguments}
    with pytest.raises(ValueError) as theirs:
        DataLoader(**arguments)
    with pytest.raises(ValueError) as ours:
        BatchPlan(**arguments)
    assert str(ours.value) == str(theirs.value)


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [Chunk(0, [1, 2], 3), Batch(0, [1, 2], "data")], ids=["chunk", "batch"])
def test_chunks_and_batches_are_frozen(record):
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)
    with pytest.raises((AttributeError, TypeError)):
        record.anything_else = 1
    assert not hasattr(record, "__dict__")


def test_a_plan_keeps_the_dataset_and_the_collate_fn_as_they_are():
    dataset, collate_fn = [1, 2], list
    plan = BatchPlan(dataset, collate_fn=collate_fn)
    assert plan.dataset is dataset
    assert plan.collate_fn is collate_fn


def test_a_loaders_plan_goes_over_the_loaders_own_samplers():
    loader = DataLoader(range(5), batch_size=2, sampler=[4, 3, 2, 1, 0])
    plan = BatchPlan.of_loader(loader, seed=9, epoch=1)
    assert list(plan) == [
        Chunk(0, [4, 3], chunk_seed(9, 1, 0)),
        Chunk(1, [2, 1], chunk_seed(9, 1, 1)),
        Chunk(2, [0], chunk_seed(9, 1, 2)),
    ]
    assert plan.index_sampler is loader.batch_sampler

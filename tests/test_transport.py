"""Slots in one memory file: what is packed comes out as it was, memory is used again, and given back when asked."""

import gc
import os
import pickle
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fifobatch.pickling import Pickled, dumps, loads
from fifobatch.transport import ALIGNMENT, BOARD_BYTES, COMPARE_BYTES, PIPE_BYTES, SLOT_STRIDE, Arena, Board, Parcel

PIPE_BUF = 4096  # Linux writes as many bytes to a pipe at once


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()  # pytest keeps the object a little longer


def used(arena: Arena) -> int:
    """Bytes of memory that the arena takes."""
    return os.fstat(arena.fd).st_blocks * 512


def memfds() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:fifobatch")
        except FileNotFoundError:  # listdir's own
            pass
    return count


def blocks(*sizes: int, data: bytes = b"pickle") -> Pickled:
    """Return a pickle with buffers of these sizes, each with content of its own."""
    contents = [random.Random(f"{position} {size}").randbytes(size) for position, size in enumerate(sizes)]
    return Pickled(data, [memoryview(content) for content in contents])


def unpacked(arena: Arena, parcel: Parcel) -> tuple[bytes, list[bytes]]:
    data, buffers = arena.unpack(parcel)
    return bytes(data), [bytes(buffer) for buffer in buffers]


def content(pickled: Pickled) -> tuple[bytes, list[bytes]]:
    return pickled.data, [bytes(buffer) for buffer in pickled.buffers]


# -- there and back ----------------------------------------------------------------------------------------------------


def test_a_small_pickle_travels_in_the_parcel(arena):
    slot = arena.take()
    pickled = dumps({"label": 3})
    parcel = arena.pack(pickled, slot)
    assert parcel == Parcel(slot, 0, pickled.data)
    assert used(arena) == 0
    data, buffers = arena.unpack(parcel)
    assert loads(data, buffers) == {"label": 3}


def test_what_is_too_long_for_the_pipe_travels_in_the_slot(arena):
    for size, inline in ((PIPE_BYTES, True), (PIPE_BYTES + 1, False)):
        pickled = blocks(data=bytes(size))
        parcel = arena.pack(pickled, arena.take())
        assert (parcel.blocks == 0) == inline
        assert bool(parcel.inline) == inline
        assert unpacked(arena, parcel) == content(pickled)


def test_what_has_buffers_travels_in_the_slot_however_small(arena):
    parcel = arena.pack(blocks(1), 1)
    assert parcel == Parcel(1, 2)
    assert unpacked(arena, parcel) == content(blocks(1))


@pytest.mark.parametrize("size", [0, 1, PIPE_BYTES, 100_000])
@pytest.mark.parametrize("buffers", [[], [1000], [1000] * 500])
def test_no_parcel_is_too_long_to_cross_the_pipe_in_one_piece(arena, size, buffers):
    parcel = arena.pack(blocks(*buffers, data=bytes(size)), 2**26 - 1)
    assert len(pickle.dumps(parcel)) < PIPE_BUF - 1024


@pytest.mark.parametrize("sizes", [[1], [0], [0, 0, 7], [63, 64, 65], [4095, 4096, 4097], [1_000_000, 3], [513] * 1000])
def test_blocks_of_any_size_and_number_come_out_as_they_were(arena, sizes):
    pickled = blocks(*sizes)
    parcel = arena.pack(pickled, arena.take())
    assert parcel.blocks == len(sizes) + 1
    assert unpacked(arena, parcel) == content(pickled)


def test_an_empty_pickle_comes_out_empty(arena):
    for pickled in (blocks(data=b""), blocks(5, data=b"")):
        assert unpacked(arena, arena.pack(pickled, arena.take())) == content(pickled)


def test_what_comes_out_is_writable_and_a_copy(arena):
    parcel = arena.pack(blocks(1000), arena.take())
    first = arena.unpack(parcel)[1][0]
    first[:] = bytes(1000)
    assert unpacked(arena, parcel) == content(blocks(1000))


def test_blocks_are_aligned(arena):
    arena.pack(blocks(1, 1, data=b"x" * 70), 1)
    written = os.pread(arena.fd, 10 * ALIGNMENT, SLOT_STRIDE)
    assert written[:24] == b"".join(size.to_bytes(8, "little") for size in (70, 1, 1))
    assert written[ALIGNMENT : ALIGNMENT + 70] == b"x" * 70
    for place, block in zip((3, 4), blocks(1, 1).buffers):
        assert written[place * ALIGNMENT : place * ALIGNMENT + 1] == block


def test_the_highest_slot_that_the_docstring_promises_can_be_written(arena):
    slot = 2**26 - 1
    assert unpacked(arena, arena.pack(blocks(10_000), slot)) == content(blocks(10_000))


def test_a_slot_that_ends_early_is_an_error(arena):
    parcel = arena.pack(blocks(100_000), 1)
    os.ftruncate(arena.fd, SLOT_STRIDE + 50_000)
    with pytest.raises(EOFError, match=r"ends \d+ bytes early"):
        arena.unpack(parcel)


def test_a_worker_reads_and_writes_the_same_slots_through_its_own_descriptor(arena):
    worker = Arena(os.dup(arena.fd))
    assert unpacked(worker, arena.pack(blocks(1000), 1)) == content(blocks(1000))
    assert unpacked(arena, worker.pack(blocks(2000), 2)) == content(blocks(2000))


def leaves() -> st.SearchStrategy[Any]:
    numbers = st.integers(0, 2**32).map(np.random.default_rng)
    shapes = st.lists(st.integers(0, 20), max_size=3)
    arrays = st.builds(
        lambda rng, shape, dtype: (rng.random(shape) * 100).astype(dtype),
        numbers,
        shapes,
        st.sampled_from(["f8", "f4", "i4", "u1", "?", "c16", "U3"]),
    )
    tensors = st.builds(
        lambda rng, shape, dtype, last, step: torch.tensor(rng.random([*shape, last]) * 100).to(dtype).mT[..., ::step],
        numbers,
        shapes.filter(bool),
        st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
        st.integers(0, 20),
        st.integers(1, 2),
    )
    return st.one_of(arrays, tensors, st.integers(), st.text(max_size=20), st.binary(max_size=3000), st.none())


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(
    nest=st.recursive(
        leaves(),
        lambda parts: st.one_of(
            st.lists(parts, max_size=4),
            st.tuples(parts, parts),
            st.dictionaries(st.text(max_size=5), parts, max_size=4),
        ),
        max_leaves=8,
    )
)
@settings(deadline=None, max_examples=40)
def test_whatever_nest_of_arrays_and_tensors_survives(nest):
    arena = Arena()
    slot = arena.take()
    pickled = dumps(nest)
    parcel = arena.pack(pickled, slot)
    assert arena.holds(parcel, pickled)
    data, buffers = arena.unpack(parcel)
    arena.pack(blocks(100_000), slot)  # the slot is written again
    assert same(loads(data, buffers), nest)


# -- slots -------------------------------------------------------------------------------------------------------------


def test_slots_are_numbered_from_1_as_0_is_the_board(arena):
    assert [arena.take() for _ in range(3)] == [1, 2, 3]


def test_a_slot_that_was_given_back_is_taken_before_a_new_one(arena):
    assert [arena.take() for _ in range(3)] == [1, 2, 3]
    arena.give_back(2)
    assert arena.take() == 2
    assert arena.take() == 4


def test_as_many_slots_are_made_as_are_in_use_at_once(arena):
    order = random.Random(0)
    taken: list[int] = []
    for _ in range(1000):
        if len(taken) == 5:
            arena.give_back(taken.pop(order.randrange(5)))
        taken.append(arena.take())
        assert len(set(taken)) == len(taken)
    assert max(taken) <= 5


def test_a_slot_is_written_again_without_a_trace_of_before(arena):
    for sizes in ([5000, 5000], [10], [3] * 100, [20_000]):
        slot = arena.take()
        assert slot == 1
        parcel = arena.pack(blocks(*sizes), slot)
        assert unpacked(arena, parcel) == content(blocks(*sizes))
        arena.give_back(slot)


def test_slots_do_not_touch_each_other_or_the_board(arena):
    board = Board(arena)
    board[7] = True
    parcels = [arena.pack(blocks(size), arena.take()) for size in (1000, 100_000, 3)]
    arena.give_back(1, release_memory=True)
    arena.take()
    arena.pack(blocks(300_000), 1)
    assert [unpacked(arena, parcel) for parcel in parcels[1:]] == [content(blocks(100_000)), content(blocks(3))]
    assert board[7]


def test_several_threads_take_slots_of_their_own(arena):
    begin = threading.Barrier(4)

    def work() -> list[int]:
        begin.wait(60)
        mine = []
        for round_ in range(300):
            mine.append(arena.take())
            if round_ % 3 == 0:
                arena.give_back(mine.pop())
        return mine

    with ThreadPoolExecutor(4) as threads:
        taken = [slot for worker in [threads.submit(work) for _ in range(4)] for slot in worker.result(60)]
    assert len(set(taken)) == len(taken) == 800
    assert max(taken) <= 804


def test_give_back_takes_no_lock(arena):
    # A finalizer may call it in a thread that is inside `take`.
    slot = arena.take()
    with arena._lock:
        arena.give_back(slot)
    assert arena.take() == slot


# -- memory ------------------------------------------------------------------------------------------------------------


def test_an_arena_takes_no_memory_until_it_is_written(arena):
    for _ in range(100):
        arena.take()
    assert used(arena) == 0
    arena.pack(blocks(1_000_000), 50)
    assert 1_000_000 <= used(arena) < 1_100_000


def test_a_slot_that_is_written_again_takes_no_more_memory(arena):
    for _ in range(20):
        slot = arena.take()
        arena.pack(blocks(1_000_000), slot)
        arena.give_back(slot)
    assert used(arena) < 1_100_000


def test_memory_stays_for_the_next_batch_unless_it_is_released(arena):
    slot = arena.take()
    arena.pack(blocks(1_000_000), slot)
    arena.give_back(slot)
    assert arena.take() == slot
    assert used(arena) >= 1_000_000


def test_released_memory_goes_back_to_the_system_at_the_next_take(arena):
    for size in (1_000_000, 5_000, 3_000_000):
        slot = arena.take()
        arena.pack(blocks(size), slot)
        assert used(arena) >= size
        arena.give_back(slot, release_memory=True)
        assert arena.take() == slot
        assert used(arena) == 0
        arena.give_back(slot)


def test_releasing_one_slot_leaves_the_memory_of_the_others(arena):
    first, second, third = (arena.take() for _ in range(3))
    parcels = [arena.pack(blocks(1_000_000), slot) for slot in (first, third)]
    before = used(arena)
    arena.give_back(second, release_memory=True)  # nothing was ever written there
    assert arena.take() == second
    assert used(arena) == before
    arena.give_back(first, release_memory=True)
    arena.take()
    assert 1_000_000 <= used(arena) < 1_100_000
    assert unpacked(arena, parcels[1]) == content(blocks(1_000_000))


def test_a_shorter_parcel_in_a_slot_does_not_keep_the_rest_from_being_released(arena):
    slot = arena.take()
    arena.pack(blocks(1_000_000), slot)
    arena.pack(blocks(10), slot)
    arena.give_back(slot, release_memory=True)
    arena.take()
    assert used(arena) == 0


def test_a_released_slot_can_be_used_again(arena):
    slot = arena.take()
    arena.pack(blocks(100_000), slot)
    arena.give_back(slot, release_memory=True)
    assert arena.take() == slot
    assert unpacked(arena, arena.pack(blocks(50_000), slot)) == content(blocks(50_000))


# -- holds -------------------------------------------------------------------------------------------------------------


def test_a_parcel_holds_what_was_packed(arena):
    for pickled in (blocks(), blocks(1000), blocks(1, 0, 3), blocks(data=bytes(5000)), blocks(3 * COMPARE_BYTES + 1)):
        parcel = arena.pack(pickled, arena.take())
        assert arena.holds(parcel, pickled)


@pytest.mark.parametrize(
    "other",
    [
        blocks(1000, 2000, data=b"Pickle"),
        blocks(1000, 2000, data=b"pickle "),
        blocks(1000),
        blocks(1000, 2000, 3000),
        blocks(2000, 1000),
        blocks(1000, 2001),
        Pickled(b"pickle", [*blocks(1000).buffers, memoryview(bytes(2000))]),
        blocks(),
        blocks(data=bytes(5000)),
    ],
)
def test_a_parcel_holds_nothing_else(arena, other):
    parcel = arena.pack(blocks(1000, 2000), arena.take())
    assert not arena.holds(parcel, other)
    parcel = arena.pack(other, arena.take())
    assert not arena.holds(parcel, blocks(1000, 2000))


@pytest.mark.parametrize("place", [0, COMPARE_BYTES - 1, COMPARE_BYTES, 2 * COMPARE_BYTES + 4])
def test_one_changed_byte_is_noticed_wherever_it_is(arena, place):
    changed = bytearray(2 * COMPARE_BYTES + 5)
    parcel = arena.pack(Pickled(b"", [memoryview(changed)]), arena.take())
    changed[place] = 1
    assert not arena.holds(parcel, Pickled(b"", [memoryview(changed)]))


def test_an_inline_parcel_holds_only_an_equal_pickle(arena):
    parcel = arena.pack(blocks(), 1)
    assert not arena.holds(parcel, blocks(data=b"other"))
    assert not arena.holds(parcel, blocks(5))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_closed_when_the_arena_is_collected():
    before = memfds()
    arena = Arena()
    assert memfds() == before + 1
    gc.disable()
    try:
        del arena
        assert memfds() == before
    finally:
        gc.enable()


def test_the_file_is_closed_by_close_once():
    before = memfds()
    arena = Arena()
    arena.close()
    assert memfds() == before
    arena.close()
    del arena


def test_the_file_is_not_inherited_by_programs_that_this_process_starts(arena):
    assert not os.get_inheritable(arena.fd)


def test_the_file_has_no_name_in_the_file_system(arena):
    assert os.fstat(arena.fd).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:fifobatch")


# -- the board ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(arena: Arena) -> Iterator[Board]:
    board = Board(arena)
    yield board
    board._flags.close()


def test_no_flag_is_set_at_first(flags):
    assert not any(flags[run] for run in range(BOARD_BYTES))


def test_a_flag_is_set_and_reset_alone(flags):
    for run in (0, 1, BOARD_BYTES - 1):
        flags[run] = True
        assert [other for other in range(BOARD_BYTES) if flags[other]] == [run]
        flags[run] = False
        assert flags[run] is False


def test_there_is_no_flag_beyond_the_board(flags):
    with pytest.raises(IndexError):
        flags[BOARD_BYTES] = True


def test_a_worker_sees_the_flag_that_the_parent_sets(arena, flags):
    worker = Board(Arena(os.dup(arena.fd)))
    assert not worker[3]
    flags[3] = True
    assert worker[3] is True


def test_the_board_outlives_the_descriptor(arena, flags):
    arena.close()
    flags[3] = True
    assert flags[3]

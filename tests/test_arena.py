"""The memory file: slots that are lent and come back, places that are shared, and errors where there is no memory."""

import ctypes
import errno
import gc
import itertools
import mmap
import os
import random
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fifobatch import arena as module
from fifobatch.arena import ALIGNMENT, ANNEXES, MADV_POPULATE_WRITE, SLOT_BYTES, Arena, Place, Room

PAGE = mmap.PAGESIZE
TURN_DOWN = "turn down batch_size, window, or the number of workers"


def used(arena: Arena) -> int:
    """Return how many bytes of memory the file takes."""
    return os.fstat(arena.fd).st_blocks * 512


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(f"{size} {seed}").randbytes(size)


def fill(arena: Arena, slot: int, *sizes: int) -> list[Place]:
    room = Room(arena, slot)
    return [room.put(memoryview(content(size, slot))) for size in sizes]


def free(arena: Arena) -> list[int]:
    return sorted([*arena._free, *arena._bare])


def small_slots(monkeypatch: pytest.MonkeyPatch, slots: int = 4) -> None:
    """Make slots of 64 KiB, few of them in the mapping, and annexes that are mapped from 8 KiB."""
    size = 2**16
    for name, value in {
        "SLOT_BYTES": size,
        "SLOTS": slots,
        "MAPPED": slots * size,
        "MAP_BYTES": 2**13,
        "_Slot": ctypes.c_char * size,
    }.items():
        monkeypatch.setattr(module, name, value)


def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "_map_slots", lambda arena: None)


def in_child(function: Callable[[], object]) -> str:
    """Return what ``function`` returns in a child of os.fork(), as text; the exception where it raises one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


# -- taking and giving back --------------------------------------------------------------------------------------------


def test_slots_are_numbered_from_1_as_0_is_the_board() -> None:
    arena = Arena()
    assert [arena.take() for _ in range(3)] == [1, 2, 3]


def test_the_slot_that_was_used_last_is_taken_first() -> None:
    arena = Arena()
    arena.spare = 3
    for slot in [arena.take() for _ in range(3)]:
        arena.give_back(slot)
    assert [arena.take() for _ in range(4)] == [3, 2, 1, 4]


def test_a_slot_that_has_its_pages_is_taken_before_one_that_has_not() -> None:
    arena = Arena()
    arena.spare = 2
    slots = [arena.take() for _ in range(3)]
    for slot in slots:
        fill(arena, slot, 100_000)
    for slot in slots:
        arena.give_back(slot)
    before = used(arena)
    assert before >= 200_000
    for slot in (arena.take(), arena.take()):
        fill(arena, slot, 100_000)
    assert used(arena) == before
    assert arena.take() in slots


def test_as_many_slots_are_made_as_are_in_use_at_once() -> None:
    arena, order = Arena(), random.Random(0)
    taken: list[int] = []
    for _ in range(1000):
        if len(taken) == 5:
            arena.give_back(taken.pop(order.randrange(5)))
        taken.append(arena.take())
        assert len(set(taken)) == len(taken)
    assert max(taken) <= 5


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_only_spare_free_slots_keep_their_pages(spare: int) -> None:
    arena = Arena()
    arena.spare = spare
    slots = [arena.take() for _ in range(6)]
    for slot in slots:
        fill(arena, slot, 1_000_000)
    for slot in slots:
        arena.give_back(slot)
    assert spare * 1_000_000 <= used(arena) < (spare + 0.1) * 1_000_000 + 1
    assert free(arena) == slots


def test_a_slot_beyond_the_mapping_and_an_annex_give_their_pages_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    small_slots(monkeypatch, slots=2)
    arena = Arena()
    arena.spare = 0
    for slot, places in ((1, 2), (2, 1)):  # slot 1 lies in the mapping, and has an annex; slot 2 is all annex
        assert arena.take() == slot
        where = fill(arena, slot, *[50_000] * places)
        assert where[-1][0] >= ANNEXES
    before = used(arena)
    views = [arena.lend(1, [(module.SLOT_BYTES, 50_000), (ANNEXES + module.ANNEX_BYTES, 50_000)])]
    views.append(arena.lend(2, [(ANNEXES + 2 * module.ANNEX_BYTES, 50_000)]))
    assert used(arena) == before >= 150_000
    views.clear()
    assert free(arena) == [1, 2]
    assert used(arena) == 0


def test_an_arena_takes_no_memory_until_it_is_written() -> None:
    arena = Arena()
    for _ in range(100):
        arena.take()
    assert used(arena) == 0
    fill(arena, 50, 1_000_000)
    assert 1_000_000 <= used(arena) < 1_100_000


def test_a_slot_that_is_written_again_takes_no_more_memory() -> None:
    arena = Arena()
    for _ in range(20):
        slot = arena.take()
        views = arena.lend(slot, fill(arena, slot, 1_000_000))
        del views
    assert used(arena) < 1_100_000


def test_threads_take_slots_of_their_own() -> None:
    arena = Arena()
    arena.spare = 2  # so that some go one way, and some the other
    begin = threading.Barrier(4)
    owner: dict[int, int] = {}

    def work(number: int) -> None:
        begin.wait(60)
        mine: list[int] = []
        for round_ in range(1000):
            mine.append(arena.take())
            assert owner.setdefault(mine[-1], number) == number
            if round_ % 5 > 1 or len(mine) > 5:
                del owner[mine[0]]
                arena.give_back(mine.pop(0))
        for slot in mine:
            del owner[slot]
            arena.give_back(slot)

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work, number) for number in range(4)]:
            future.result(60)
    total = next(arena._numbers) - 1
    assert free(arena) == list(range(1, total + 1))
    assert total <= 4 * 7


def test_a_slot_that_comes_back_while_the_arena_is_closed_keeps_no_pages() -> None:
    arena = Arena()
    arena.spare = 1
    slot = arena.take()
    fill(arena, slot, 100_000)

    class Free(type(arena._free)):  # type: ignore[misc]
        def append(self, slot: int) -> None:
            arena.close()  # the supervisor does, at this very moment
            super().append(slot)

    arena._free = Free()
    arena.give_back(slot)
    assert used(arena) == 0
    assert free(arena) == [slot]
    del arena._free


# -- lending -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[pytest.MonkeyPatch], tuple[int, list[int]]]] = {
    # Slots before it, and the sizes of the blocks in it.
    "in the mapping": lambda monkeypatch: (0, [20_000, 700, 20_000]),
    "with blocks in the annex": lambda monkeypatch: small_slots(monkeypatch) or (0, [20_000, 700, 50_000, 800, 60_000]),
    "all in the annex": lambda monkeypatch: small_slots(monkeypatch) or (4, [20_000, 700, 20_000]),
    "one big block": lambda monkeypatch: small_slots(monkeypatch) or (0, [100_000]),
    "without a mapping": lambda monkeypatch: (
        unmapped(monkeypatch) or small_slots(monkeypatch) or (0, [20_000, 700, 20_000])
    ),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    return LAYOUTS[request.param](monkeypatch)


def lent(layout: tuple[int, list[int]]) -> tuple[Arena, int, list[memoryview]]:
    before, sizes = layout
    arena = Arena()
    for _ in range(before):
        arena.take()
    slot = arena.take()
    return arena, slot, arena.lend(slot, fill(arena, slot, *sizes))


def test_what_is_lent_is_what_was_written_and_can_be_written(layout: tuple[int, list[int]]) -> None:
    _arena, slot, blocks = lent(layout)
    assert [bytes(block) for block in blocks] == [content(size, slot) for size in layout[1]]
    for block in blocks:
        assert not block.readonly
        block[:] = bytes(block.nbytes)
        block[0] = 1
    assert [sum(block) for block in blocks] == [1] * len(blocks)


def test_a_slot_comes_back_when_the_last_of_its_blocks_dies(layout: tuple[int, list[int]]) -> None:
    for order in range(3):
        arena, slot, blocks = lent(layout)
        big = [block for block in blocks if block.nbytes >= 2**13]  # what is smaller may be a copy
        del blocks
        random.Random(order).shuffle(big)
        while big:
            assert free(arena) == []
            big.pop()
        assert free(arena) == [slot]


DERIVED: dict[str, Callable[[memoryview], Any]] = {
    "view": memoryview,
    "slice": lambda block: block[10_000:10_001],
    "cast": lambda block: block[:8000].cast("d"),
    "tensor": lambda block: torch.frombuffer(block, dtype=torch.uint8),
    "slice of a view of a tensor": lambda block: (
        torch.frombuffer(block, dtype=torch.float32).view(-1, 4).transpose(0, 1)[1, ::2]
    ),
    "storage": lambda block: torch.frombuffer(block, dtype=torch.uint8).untyped_storage(),
    "array": lambda block: np.frombuffer(block, dtype="f4"),
    "array over a tensor": lambda block: torch.frombuffer(block, dtype=torch.int16).numpy()[::3],
    "tensor over an array": lambda block: torch.from_numpy(np.frombuffer(block, dtype="f4"))[5:],
    "detached tensor": lambda block: torch.frombuffer(block, dtype=torch.uint8).detach()[None].expand(3, -1),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_whatever_is_derived_from_a_block_keeps_the_slot(kind: str, layout: tuple[int, list[int]]) -> None:
    arena, slot, blocks = lent(layout)
    derived = DERIVED[kind](blocks[0])
    blocks.clear()
    assert free(arena) == []
    assert arena.take() != slot
    del derived
    assert free(arena) == [slot]


def test_what_has_no_blocks_comes_back_at_once() -> None:
    arena = Arena()
    assert arena.lend(arena.take(), []) == []
    assert free(arena) == [1]


def test_a_slot_whose_blocks_are_copies_comes_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    small_slots(monkeypatch)
    unmapped(monkeypatch)
    arena = Arena()
    blocks = arena.lend(1, fill(arena, 1, 1000, 2000))
    assert free(arena) == [1]
    fill(arena, 1, 3000)  # the next batch
    assert [bytes(block) for block in blocks] == [content(1000, 1), content(2000, 1)]


def test_a_slot_that_cannot_be_lent_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    small_slots(monkeypatch)
    arena = Arena()
    slot = arena.take()
    places = fill(arena, slot, 60_000, 60_000, 6000)  # in the slot; in the annex, mapped; and there, copied

    def fail(*args: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="no memory"):
            arena.lend(slot, places)
    assert free(arena) == [slot]


def test_where_a_block_cannot_be_mapped_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    small_slots(monkeypatch)
    arena = Arena()
    places = fill(arena, arena.take(), 50_000, 60_000)
    refuse_mappings(monkeypatch)
    blocks = arena.lend(1, places)
    assert [bytes(block) for block in blocks] == [content(50_000, 1), content(60_000, 1)]
    assert free(arena) == []
    del blocks
    assert free(arena) == [1]


def refuse_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "no address space")

    monkeypatch.setattr(mmap, "mmap", refuse)


def test_without_address_space_there_is_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        refuse_mappings(patch)
        arena = Arena()
    assert arena._mapping is None
    views = arena.lend(1, fill(arena, 1, 1000))
    assert bytes(views[0]) == content(1000, 1)


@pytest.mark.parametrize("mapped", ["parent", "worker"])
def test_a_parent_and_a_worker_understand_each_other_though_one_has_no_mapping(
    mapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_slots(monkeypatch)
    with monkeypatch.context() as patch:
        if mapped == "worker":
            unmapped(patch)
        parent = Arena()
    with monkeypatch.context() as patch:
        if mapped == "parent":
            unmapped(patch)
        worker = Arena(os.dup(parent.fd))
    parent.spare = 0
    for _ in range(6):  # beyond the mapping
        parent.take()
    for slot in range(1, 7):
        worker.expect(slot, parent.size(slot))
        room = Room(worker, slot)
        block = room.allocate(9_000)
        assert (block is None) == (mapped == "parent" or slot >= 4)
        where = [room.put(memoryview(content(size, slot))) for size in (10_000, 700, 80_000)]
        blocks = parent.lend(slot, where)
        assert [bytes(block) for block in blocks] == [content(size, slot) for size in (10_000, 700, 80_000)]
        assert slot not in free(parent)
        del blocks, block, room
        assert slot in free(parent)
    assert used(parent) == 0


def test_kept_batches_need_no_more_descriptors_and_mappings_than_one() -> None:
    def count() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("/memfd:fifobatch" in line for line in maps)

    gc.collect()  # other tests' arenas
    arena, kept = Arena(), []
    for number in range(10_000):
        slot = arena.take()
        room = Room(arena, slot)
        kept.append(arena.lend(slot, [room.put(memoryview(number.to_bytes(8, "little") * 100)) for _ in range(2)]))
        if number == 0:
            after_one = count()
    assert count() == after_one
    for number, blocks in enumerate(kept):
        assert [bytes(block[:8]) for block in blocks] == [number.to_bytes(8, "little")] * 2
    kept.clear()
    del blocks
    assert free(arena) == list(range(1, 10_001))
    assert used(arena) <= PAGE


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_gives_all_free_pages_back_and_others_when_they_come_back() -> None:
    arena = Arena()
    arena.spare = 9
    kept = []
    for slot in [arena.take() for _ in range(4)]:
        kept.append(arena.lend(slot, fill(arena, slot, 1_000_000)))
    del kept[2:]
    assert used(arena) >= 4_000_000
    arena.close()
    assert 2_000_000 <= used(arena) < 2_100_000
    assert [bytes(blocks[0]) for blocks in kept] == [content(1_000_000, slot) for slot in (1, 2)]
    kept.pop()
    assert 1_000_000 <= used(arena) < 1_100_000
    kept.pop()
    assert used(arena) == 0
    arena.close()


def open_files() -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("/memfd:fifobatch") for link in links)


def test_the_file_is_closed_when_the_arena_and_the_last_of_what_it_lent_are_gone() -> None:
    before = open_files()
    gc.disable()
    try:
        arena = Arena()
        assert open_files() > before
        slot = arena.take()
        blocks = arena.lend(slot, fill(arena, slot, 10_000))
        alive = weakref.ref(arena)
        del arena
        assert open_files() > before
        tensor = torch.frombuffer(blocks[0], dtype=torch.uint8)[5:]
        del blocks
        assert bytes(tensor.numpy()) == content(10_000, slot)[5:]
        del tensor
        assert alive() is None
        assert open_files() == before
    finally:
        gc.enable()


def test_the_file_is_not_inherited_by_programs_that_this_process_starts() -> None:
    assert not os.get_inheritable(Arena().fd)


def test_the_file_has_no_name_in_the_file_system() -> None:
    arena = Arena()
    assert os.fstat(arena.fd).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{arena.fd}").startswith("/memfd:fifobatch")


@forks
def test_what_dies_in_a_forked_child_changes_nothing_for_the_parent() -> None:
    arena = Arena()
    arena.spare = 0
    blocks = arena.lend(arena.take(), fill(arena, 1, 100_000))
    reserved = arena.reserve(10_000)
    arena.write(memoryview(content(10_000)), reserved[0])
    before = used(arena)

    def child() -> object:
        seen = bytes(blocks[0]) == content(100_000, 1)
        blocks.clear()
        arena.give_back(2)
        arena.close()
        arena.punch(reserved)
        return seen

    assert in_child(child) == "True"
    assert used(arena) == before
    assert bytes(blocks[0]) == content(100_000, 1)
    assert arena.read((reserved[0], 10_000)) == content(10_000)
    blocks.clear()
    assert arena.take() == 1


@pytest.mark.parametrize("spare", [0, 1])
def test_what_is_lent_may_die_inside_any_lock(spare: int) -> None:
    arena = Arena()
    arena.spare = spare
    blocks = arena.lend(arena.take(), fill(arena, 1, 100_000))
    with arena._shipping:
        blocks.clear()
    assert free(arena) == [1]


# -- shared places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [True, False])
def test_readers_of_a_place_see_nothing_of_each_others_changes(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    room = Room(arena, None, 100_000)
    places = [room.put(memoryview(content(size))) for size in (5000, 1, 70_000)]
    if not mapped:
        refuse_mappings(monkeypatch)
    one, other = arena.private(places, int), arena.private(places, int)
    for blocks in (one, other):
        assert [bytes(block) for block in blocks] == [content(size) for size in (5000, 1, 70_000)]
    for block in one:
        block[:] = bytes(block.nbytes)
    assert [bytes(block) for block in other] == [content(size) for size in (5000, 1, 70_000)]
    assert [arena.read(place) for place in places] == [content(size) for size in (5000, 1, 70_000)]
    assert not any(map(any, one))


def test_readers_of_a_place_share_its_memory_until_they_write() -> None:
    arena = Arena()
    place = Room(arena, None, 8_000_000).put(memoryview(content(8_000_000)))
    before = used(arena)
    readers = [arena.private([place], int)[0] for _ in range(3)]
    assert all(sum(reader[::PAGE]) for reader in readers)
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    starts = [index for index, line in enumerate(lines) if "/memfd:fifobatch" in line and " rw-p " in line]
    figures = [dict(line.split(":", 1) for line in lines[start + 1 : start + 10]) for start in starts]
    assert len(figures) == 3 or len(figures) == 1  # the kernel may show neighbours as one
    assert sum(int(figure["Anonymous"].split()[0]) for figure in figures if "Anonymous" in figure) == 0
    assert used(arena) == before


def test_no_places_are_read_as_no_blocks() -> None:
    gone: list[int] = []
    assert Arena().private([], lambda: gone.append(1)) == []
    assert gone == [1]


@pytest.mark.parametrize("mapped", [True, False])
def test_what_is_shared_is_known_to_be_in_use_until_the_last_view_is_gone(
    mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena()
    room = Room(arena, None, 100_000)
    places = [room.put(memoryview(content(size))) for size in (5000, 70_000)]
    if not mapped:
        refuse_mappings(monkeypatch)
    gone: list[int] = []
    one, other = arena.private(places, lambda: gone.append(1))
    assert gone == ([] if mapped else [1])  # a copy needs no place
    del one
    view = other[10:20]
    del other
    assert gone == ([] if mapped else [1])
    del view
    assert gone == [1]


def test_threads_reserve_places_that_do_not_overlap() -> None:
    arena, begin = Arena(), threading.Barrier(4)

    def work(seed: int) -> list[Place]:
        sizes = random.Random(seed)
        begin.wait(60)
        asked = [sizes.randrange(1, 20_000) for _ in range(2000)]
        given = [arena.reserve(size) for size in asked]
        assert all(size >= least for (_, size), least in zip(given, asked))
        return given

    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(work, seed) for seed in range(4)]
        places = sorted(place for future in futures for place in future.result(60))
    assert all(offset % PAGE == 0 for offset, _ in places)
    assert all(offset + size <= following for (offset, size), (following, _) in itertools.pairwise(places))


# -- writing in place --------------------------------------------------------------------------------------------------


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Return the calls of madvise that populate; an OSError in it at the end is raised instead, once."""
    calls: list[Any] = []

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            if option == MADV_POPULATE_WRITE:
                if calls and isinstance(calls[-1], OSError):
                    raise calls.pop()
                calls.append(args)
            super().madvise(option, *args)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    return calls


def test_memory_of_a_slot_has_its_pages_before_it_is_written(advice: list[tuple[int, ...]]) -> None:
    arena = Arena()
    block = arena.near(3, 100, 100_000)
    assert block is not None
    assert used(arena) >= 100_000
    before = used(arena)
    block[:] = content(99_900)
    assert used(arena) == before
    assert arena.read((3 * SLOT_BYTES + 100, 99_900)) == content(99_900)
    assert advice == [(3 * SLOT_BYTES, 100_000)]


def test_only_pages_that_are_not_there_yet_are_asked_for(advice: list[tuple[int, ...]]) -> None:
    arena = Arena()
    for end in (100_000, 50_000, 100_000, 200_000):
        arena.near(1, 0, end)
    begin = 100_000 - 100_000 % PAGE
    assert advice == [(SLOT_BYTES, 100_000), (SLOT_BYTES + begin, 200_000 - begin)]


def test_a_worker_asks_again_for_pages_that_the_parent_gave_back() -> None:
    parent = Arena()
    parent.spare = 1
    worker = Arena(os.dup(parent.fd))

    def batch(slot: int) -> list[memoryview]:
        worker.expect(slot, parent.size(slot))
        room = Room(worker, slot)
        block = room.allocate(1_000_000)
        assert block is not None
        assert used(parent) >= 1_000_000
        block[:] = content(1_000_000, slot)
        return parent.lend(slot, [room.put(block)])

    for spare in (1, 0, 0, 1, 1):
        parent.spare = spare
        blocks = batch(parent.take())
        assert bytes(blocks[0]) == content(1_000_000, 1)
        del blocks
        assert (used(parent) == 0) == (spare == 0)
        assert parent.size(1) == (0 if spare == 0 else 1_000_000)


def test_another_worker_may_write_where_one_has_written_before() -> None:
    parent = Arena()
    workers = [Arena(os.dup(parent.fd)) for _ in range(2)]
    for round_, number in enumerate((0, 1, 0, 0, 1)):
        slot = parent.take()
        worker = workers[number]
        worker.expect(slot, parent.size(slot))
        room = Room(worker, slot)
        block = room.allocate(50_000 * (round_ + 1))
        assert block is not None
        block[:] = content(block.nbytes, round_)
        blocks = parent.lend(slot, [room.put(block)])
        assert bytes(blocks[0]) == content(50_000 * (round_ + 1), round_)
        del blocks


@pytest.mark.parametrize("slot_and_end", [(4, 100), (1, 2**16 + 1)])
def test_there_is_nothing_to_write_in_beyond_the_mapping_or_the_slot(
    slot_and_end: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_slots(monkeypatch)
    slot, end = slot_and_end
    assert Arena().near(slot, 0, end) is None
    assert Arena().near(3, 0, 2**16) is not None


def test_an_older_kernel_allocates_the_pages_instead(advice: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    advice.append(OSError(errno.EINVAL, "Invalid argument"))
    block = arena.near(1, 0, 1_000_000)
    assert block is not None
    assert used(arena) >= 1_000_000
    block[:] = content(1_000_000)
    assert arena.read((SLOT_BYTES, 1_000_000)) == content(1_000_000)


# -- rooms -------------------------------------------------------------------------------------------------------------


def test_what_is_put_lies_aligned_one_behind_the_other() -> None:
    arena = Arena()
    places = fill(arena, 2, 1, 64, 65, 100)
    assert places == [
        (2 * SLOT_BYTES, 1),
        (2 * SLOT_BYTES + ALIGNMENT, 64),
        (2 * SLOT_BYTES + 2 * ALIGNMENT, 65),
        (2 * SLOT_BYTES + 4 * ALIGNMENT, 100),
    ]


def test_what_was_made_in_the_room_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    written: list[int] = []
    monkeypatch.setattr(Arena, "write", lambda self, block, offset: written.append(block.nbytes))
    room = Room(arena, 1)
    blocks = [room.allocate(1000), room.allocate(2000)]
    assert [room.put(block) for block in blocks if block is not None] == [(SLOT_BYTES, 1000), (SLOT_BYTES + 1024, 2000)]
    assert written == []


def test_a_part_of_what_was_made_in_the_room_is_put_by_itself() -> None:
    arena = Arena()
    room = Room(arena, 1)
    block = room.allocate(1000)
    assert block is not None
    block[:] = content(1000)
    for part in (block[:500], block[100:]):
        place = room.put(part)
        assert place[0] >= SLOT_BYTES + 1000
        assert arena.read(place) == bytes(part)


def test_what_is_put_twice_lies_in_two_places() -> None:
    room = Room(Arena(), 1)
    block = room.allocate(1000)
    assert block is not None
    assert room.put(block)[0] != room.put(block)[0]


def test_places_of_two_rooms_never_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Also where big blocks are put, and odd ones: what is reserved for a dataset must hold it.
    monkeypatch.setattr(module, "MAP_BYTES", 2**13)
    arena = Arena()
    sizes = [[2**13 + 1] * count for count in (1, 2, 3, 40)] + [[700], [5000], [1, 2**13 + 1, 65] * 20]
    places: list[Place] = []
    for blocks in sizes:
        room = Room(arena, None, sum(blocks) + 2 * ALIGNMENT * len(blocks))
        places += [room.put(memoryview(content(size, size))) for size in blocks]
    assert [arena.read(place) for place in places] == [content(size, size) for _, size in places]
    assert all(offset + size <= following for (offset, size), (following, _) in itertools.pairwise(places))


def test_all_that_is_put_in_a_reserved_place_lies_in_it() -> None:
    arena = Arena()
    room = Room(arena, None, 3 * 700 + 3 * 2 * ALIGNMENT)
    places = [room.put(memoryview(content(700, number))) for number in range(3)]
    offset, size = room.reserved
    assert all(offset <= start and start + length <= offset + size for start, length in places)
    arena.punch(room.reserved)
    assert used(arena) == 0


def test_there_is_no_memory_to_make_something_in_outside_slots() -> None:
    assert Room(Arena(), None, 1000).allocate(100) is None


# -- no memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
@pytest.mark.parametrize("slot", [1, None])
def test_where_there_is_no_memory_to_write_the_error_names_the_size(
    slot: int | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    room = Room(Arena(), slot, 10_000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(
            OSError, match=rf"no shared memory for 1,234 bytes \({os.strerror(number)}\): {TURN_DOWN}"
        ) as (caught):
            room.put(memoryview(bytes(1234)))
    assert caught.value.errno == number


def test_where_there_are_no_pages_the_error_names_the_size(advice: list[Any]) -> None:
    room = Room(Arena(), 1)
    advice.append(OSError(errno.ENOMEM, "Cannot allocate memory"))
    with pytest.raises(
        OSError, match=rf"no shared memory for 20,000,000 bytes \(Cannot allocate memory\): {TURN_DOWN}"
    ):
        room.allocate(20_000_000)


def test_where_an_older_kernel_has_no_pages_the_error_names_the_size(
    advice: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    room = Room(Arena(), 1)
    advice.append(OSError(errno.EINVAL, "Invalid argument"))
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match=rf"no shared memory for 2,000 bytes \(No space left on device\): {TURN_DOWN}"):
        room.allocate(2000)


@forks
@pytest.mark.parametrize("limit", [2**20, SLOT_BYTES + 50_000])
def test_a_limit_on_files_is_an_error_that_names_the_size(limit: int) -> None:
    arena = Arena()

    def child() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return Room(Arena(arena.fd), 1).put(memoryview(bytes(100_000)))

    said = in_child(child)
    assert said.startswith("OSError(27, ")
    assert "no shared memory for 100,000 bytes (File too large)" in said
    assert TURN_DOWN in said


@forks
def test_a_limit_on_address_space_leaves_an_arena_without_a_mapping() -> None:
    def child() -> object:
        resource.setrlimit(resource.RLIMIT_AS, (2**40, resource.getrlimit(resource.RLIMIT_AS)[1]))
        arena = Arena()
        blocks = arena.lend(arena.take(), fill(arena, 1, 1000, 20_000_000))
        return arena._mapping, [bytes(block) == content(block.nbytes, 1) for block in blocks]

    assert in_child(child) == "(None, [True, True])"


# -- comparing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, module.COMPARE_BYTES - 1, module.COMPARE_BYTES, 2 * module.COMPARE_BYTES + 4])
def test_one_changed_byte_is_noticed_wherever_it_is(place: int) -> None:
    arena = Arena()
    block = bytearray(2 * module.COMPARE_BYTES + 5)
    where = Room(arena, 1).put(memoryview(block))
    assert arena.holds(where, memoryview(block))
    assert not arena.holds(where, memoryview(block)[1:])
    block[place] = 1
    assert not arena.holds(where, memoryview(block))

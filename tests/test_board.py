"""The board: what parent and workers tell each other in shared memory."""

import os
import time

import pytest

from fifobatch import board as module
from fifobatch.arena import Arena, Room
from fifobatch.board import FLAGS, RECORD_BYTES, START, Board, Record

# -- flags -------------------------------------------------------------------------------------------------------------


def test_a_flag_is_set_and_reset_alone() -> None:
    flags = Board(Arena())
    assert not any(flags[run] for run in range(FLAGS))
    for run in (0, 1, FLAGS - 1):
        flags[run] = True
        assert [other for other in range(FLAGS) if flags[other]] == [run]
        flags[run] = False
        assert flags[run] is False


def test_there_is_no_flag_beyond_the_board() -> None:
    with pytest.raises(IndexError):
        Board(Arena())[FLAGS] = True


def test_a_worker_sees_the_flag_that_the_parent_sets() -> None:
    arena = Arena()
    flags, worker = Board(arena), Board(Arena(os.dup(arena.fd)))
    assert not worker[3]
    flags[3] = True
    assert worker[3] is True


def test_the_board_is_not_touched_by_slots_and_outlives_the_arena() -> None:
    arena = Arena()
    arena.spare = 0
    flags = Board(arena)
    flags[3] = True
    slot = arena.take()
    Room(arena, slot).put(memoryview(bytes(100_000)))
    arena.give_back(slot)
    arena.close()
    del arena
    assert [run for run in range(FLAGS) if flags[run]] == [3]


# -- records -----------------------------------------------------------------------------------------------------------


def seen_by_worker(arena: Arena, number: int) -> Record:
    return Record(Board(Arena(os.dup(arena.fd))), number)


def test_a_worker_says_where_it_is_and_the_parent_reads_it() -> None:
    arena = Arena()
    board, record = Board(arena), seen_by_worker(arena, 3)
    assert board.read(3) == (0, 0, 0.0)
    record.begin(17, -1)
    assert board.read(3) == (17, -1, 0.0)
    before = time.perf_counter()
    record.run()
    record.at(5)
    key, step, since = board.read(3)
    assert (key, step) == (17, 5)
    assert before <= since <= time.perf_counter()
    record.rest()
    assert board.read(3) == (17, 5, 0.0)  # which chunk it was on stays: it may die while it sends the answer
    assert board.read(2) == board.read(4) == (0, 0, 0.0)
    board.clear(3)
    assert board.read(3) == (0, START, 0.0)


def test_a_record_that_is_being_written_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    board, reads = Board(Arena()), []

    class Torn:
        """Reads two times what a worker is about to change."""

        def unpack_from(self, memory: object, start: int) -> tuple[int, int, float]:
            reads.append(start)
            return 1, 2, float(min(len(reads), 3))

    monkeypatch.setattr(module, "_RECORD", Torn())
    assert board.read(1) == (1, 2, 3.0)
    assert reads == [FLAGS + RECORD_BYTES] * 4


def test_a_stack_is_written_at_its_place_and_forgotten() -> None:
    arena = Arena()
    board = Board(arena)
    assert board.stack(1) == ""
    fds = {}
    for number in (1, 2):
        record = seen_by_worker(arena, number)
        fds[number] = record.open_stack()
        record.rewind(fds[number])
        os.write(fds[number], f"the long stack of {number}".encode())
    assert [board.stack(number) for number in (0, 1, 2)] == ["", "the long stack of 1", "the long stack of 2"]
    board.clear(1)
    record = seen_by_worker(arena, 1)
    record.rewind(fds[1])
    os.write(fds[1], b"short")
    assert [board.stack(number) for number in (1, 2)] == ["short", "the long stack of 2"]
    for fd in fds.values():
        os.close(fd)


@pytest.mark.parametrize("number", [0, 1, 4095])
def test_a_record_touches_no_other_and_no_flag(number: int) -> None:
    arena = Arena()
    board = Board(arena)
    record = seen_by_worker(arena, number)
    record.begin(2**63 - 1, -(2**63))
    record.run()
    assert not any(board[run] for run in range(FLAGS))
    assert [other for other in range(4096) if board.read(other).key] == [number]


def test_a_worker_says_what_it_has_mapped() -> None:
    arena = Arena()
    board, record = Board(arena), seen_by_worker(arena, 2)
    first, again, other = record.hold(7), record.hold(7), record.hold(2**63)
    assert board.holds(2, 7) and board.holds(2, 2**63)
    assert not board.holds(2, 8) and not board.holds(1, 7)
    first()
    assert board.holds(2, 7)
    again()
    assert not board.holds(2, 7) and board.holds(2, 2**63)
    if not (child := os.fork()):
        other()  # a copy of it is gone, in a child
        os._exit(0)
    os.waitpid(child, 0)
    assert board.holds(2, 2**63)
    board.clear(2)
    assert not board.holds(2, 2**63)


def test_what_a_worker_has_mapped_has_an_end() -> None:
    record = seen_by_worker(Arena(), 2)
    let_go = [record.hold(token) for token in range(1, 513)]
    with pytest.raises(OSError, match="512 datasets mapped"):
        record.hold(513)
    let_go[100]()
    record.hold(513)

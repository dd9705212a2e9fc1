"""What parent and workers tell each other without a message, on a board in shared memory.

::

    0       a flag a run: whether it was abandoned            the parent writes, workers read
    4 KiB   a record a worker: which chunk it is on, at       the worker writes, the parent reads:
            which step of it, and since when                  when the worker has died, or may be over its time
    2 MiB   a page a worker: which shipments it has mapped    likewise: their memory is not given back before
    18 MiB  a stack a worker: its Python stack, written       likewise: when it was killed for that
            when its chunk is over its time

It lies in the place of the arena's slot 0. In the parent, consumer's and supervisor's threads use it (also finalizers
do: setting a byte takes no lock), in a worker its only working thread.
"""

import errno
import mmap
import os
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fifobatch.arena import SLOT_BYTES, Arena

__all__ = ["FLAGS", "START", "Board", "Entry", "Record"]

FLAGS = 4096
RECORD_BYTES = 64
WORKERS = 2**12
HELD, HELD_BYTES = 2**21, 2**12  # the tokens of 512 shipments
STACKS, STACK_BYTES = HELD + WORKERS * HELD_BYTES, 2**15  # faulthandler writes at most 100 frames a thread
assert FLAGS + WORKERS * RECORD_BYTES <= HELD
assert STACKS + WORKERS * STACK_BYTES <= SLOT_BYTES

START = -5  # the step of a worker that has not begun with a chunk; `fetch` has the others

_RECORD = struct.Struct("<qqd")
_STEP = struct.Struct("<q")
_TIME = struct.Struct("<d")
_TOKEN = struct.Struct("<Q")


class Entry(NamedTuple):
    """What a worker last said of itself.

    Attributes:
        key: The chunk that it is on, or was on last: `Flight`'s key; 0 for none.
        step: The position of the sample that it was loading, or a negative number: one of `fetch`'s.
        since: When the chunk began to run (``time.perf_counter``); 0 while it is not running.
    """

    key: int
    step: int
    since: float


class Board:
    """The board, as the parent sees it; and a worker, as far as the flags go.

    Args:
        arena: Where it lies.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.memory = mmap.mmap(arena.fd, STACKS, mmap.MAP_SHARED)
        self._free_flags = list(range(1, FLAGS))

    def __getitem__(self, run: int) -> bool:
        if run >= FLAGS:
            raise IndexError(run)
        return self.memory[run] != 0

    def __setitem__(self, run: int, abandoned: bool) -> None:
        if run >= FLAGS:
            raise IndexError(run)
        self.memory[run] = abandoned

    def take_flag(self) -> int:
        """Return a flag for a run, in the parent; 0, which is never set, if there is none left."""
        return self._free_flags.pop() if self._free_flags else 0

    def give_back(self, flag: int) -> None:
        """Lower a flag that no task can read any more, for the next run."""
        if flag:
            self[flag] = False
            self._free_flags.append(flag)

    def read(self, worker: int) -> Entry:
        """Return what worker number ``worker`` last said."""
        start = FLAGS + worker % WORKERS * RECORD_BYTES
        while True:
            entry = Entry(*_RECORD.unpack_from(self.memory, start))
            # 1. A worker that lives may be writing its next chunk's key; 2. we would read the time of the one before.
            if entry == _RECORD.unpack_from(self.memory, start):
                return entry

    def holds(self, worker: int, token: int) -> bool:
        """Whether worker number ``worker`` may have a shipment mapped."""
        start = HELD + worker % WORKERS * HELD_BYTES
        return (token,) in _TOKEN.iter_unpack(self.memory[start : start + HELD_BYTES])

    def clear(self, worker: int) -> None:
        """Forget what worker number ``worker`` said; it is dead, or not started."""
        self.arena.punch((HELD + worker % WORKERS * HELD_BYTES, HELD_BYTES))
        _RECORD.pack_into(self.memory, FLAGS + worker % WORKERS * RECORD_BYTES, 0, START, 0.0)
        self.arena.punch(_stack(worker))

    def stack(self, worker: int) -> str:
        """Return the Python stack that a worker over its time has written, if it has."""
        return self.arena.read(_stack(worker)).partition(b"\0")[0].decode(errors="replace")


class Record:
    """A worker's own record.

    Args:
        board: Where it is.
        worker: The worker's number.
    """

    def __init__(self, board: Board, worker: int) -> None:
        self._memory = board.memory
        self._arena = board.arena
        self._start = FLAGS + worker % WORKERS * RECORD_BYTES
        self._held_start = HELD + worker % WORKERS * HELD_BYTES
        self._stack_start = _stack(worker)[0]

    def begin(self, key: int, step: int) -> None:
        """Say which chunk is next, and that it does not run yet."""
        _RECORD.pack_into(self._memory, self._start, key, step, 0.0)

    def at(self, step: int) -> None:
        """Say where in the chunk this worker is."""
        _STEP.pack_into(self._memory, self._start + 8, step)

    def run(self) -> None:
        """Say that the chunk runs from now on."""
        _TIME.pack_into(self._memory, self._start + 16, time.perf_counter())

    def rest(self) -> None:
        """Say that it has run. Which one it was stays: this worker may yet die while it sends the answer."""
        _TIME.pack_into(self._memory, self._start + 16, 0.0)

    def hold(self, token: int) -> Callable[[], None]:
        """Say that this worker is about to map a shipment; return what says that it has it no more, in any thread.

        Raises:
            OSError: It has too many.
        """
        for place in range(self._held_start, self._held_start + HELD_BYTES, _TOKEN.size):
            if _TOKEN.unpack_from(self._memory, place) == (0,):
                _TOKEN.pack_into(self._memory, place, token)
                return partial(_let_go, os.getpid(), self._memory, place)
        raise OSError(errno.ENOMEM, "this worker has 512 datasets mapped, which something keeps alive")

    def open_stack(self) -> int:
        """Return a descriptor to write this worker's stack to, with a position of its own."""
        return os.open(f"/proc/self/fd/{self._arena.fd}", os.O_RDWR)

    def rewind(self, fd: int) -> None:
        """Have what is written to ``fd`` next begin where this worker's stack has its place."""
        os.lseek(fd, self._stack_start, os.SEEK_SET)


def _let_go(pid: int, memory: mmap.mmap, place: int) -> None:
    if pid == os.getpid():  # in a child that the user's code has forked, a copy of it is gone
        _TOKEN.pack_into(memory, place, 0)


def _stack(worker: int) -> tuple[int, int]:
    return STACKS + worker % WORKERS * STACK_BYTES, STACK_BYTES

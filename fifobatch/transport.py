"""How batches and datasets travel: through shared slots, so that only a few bytes cross the pool's pipe.

An `Arena` is one anonymous memory file (memfd) that the parent makes and the workers inherit. It is sparse: slots lie
at fixed offsets, far enough apart that none needs to grow, and only what was written takes memory. It has no name, so a
killed process leaves nothing behind, and the size of /dev/shm does not matter.

::

    parent                                        worker
    slot = arena.take()      -- slot number -->   parcel = pack(batch, slot)     write
    unpack(parcel) -> batch  <-- parcel --------                                 read, then arena.give_back(slot)
    discard(parcel)                                                              nobody wants it: only give back

Nothing longer than `PIPE_BYTES` crosses the pipe: a worker that is killed half way through a longer message would leave
the pool's reader waiting for the rest for ever.

A slot is written by one worker at a time and read after that worker's parcel has arrived. It is given back only then,
or
never: a worker that was given up may still be writing, and the whole arena goes when its pool is gone.

The first page is a board of flags, one a run: the parent sets it to say that a run was abandoned, and workers look
before each sample.
"""

import mmap
import os
import struct
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

from fifobatch.pickling import Pickled

__all__ = ["Arena", "Board", "Parcel"]

PIPE_BYTES = 2048  # PIPE_BUF is 4096 on Linux; half of it leaves room for the pool's own wrapping
SLOT_STRIDE = 2**36  # 64 GiB: more than any batch. 2**26 of them fit in a memfd, whose size is a signed 64-bit number.
ALIGNMENT = 64  # bytes; a cache line, and what torch's own allocator gives
COMPARE_BYTES = 2**20
BOARD_BYTES = 4096


class Parcel(NamedTuple):
    """A packed object: the thing that crosses the pipe, to be unpacked or discarded.

    Attributes:
        slot: The slot that the object lies in.
        blocks: How many blocks it has there: the pickle and its buffers; 0 if it is all in ``inline``.
        inline: The whole pickle, where it is small.
    """

    slot: int
    blocks: int
    inline: bytes = b""


class Arena:
    """Slots in one memory file. The parent makes it; a worker opens the inherited descriptor.

    Args:
        fd: The descriptor that a worker inherited; None makes a new file.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("fifobatch", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, BOARD_BYTES)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False  # the system closes it
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._taken = 0
        self._returned: deque[tuple[int, bool]] = deque()

    def take(self) -> int:
        """Return the number of a slot that nobody uses: a used one, whose pages are there already, if there is one."""
        with self._lock:
            while self._returned:
                slot, release_memory = self._returned.popleft()
                if release_memory:
                    self._punch(slot)
                self._free.append(slot)
            if self._free:
                return self._free.pop()
            self._taken += 1
            return self._taken

    def give_back(self, slot: int, *, release_memory: bool = False) -> None:
        """Let ``slot`` be used again; ``release_memory`` gives its pages back to the system at the next `take`.

        It takes no lock: a finalizer may call it, in any thread and inside any lock.
        """
        self._returned.append((slot, release_memory))

    def close(self) -> None:
        """Close the file. Its memory is gone when the last worker has left."""
        self._close()

    def pack(self, pickled: Pickled, slot: int) -> Parcel:
        """Write a pickle and its buffers into ``slot``.

        Raises:
            OSError: There is no memory for it.
        """
        if not pickled.buffers and len(pickled.data) <= PIPE_BYTES:
            return Parcel(slot, 0, pickled.data)
        blocks = [memoryview(pickled.data), *pickled.buffers]
        sizes = [block.nbytes for block in blocks]
        table = struct.pack(f"<{len(sizes)}Q", *sizes)
        _write(self.fd, memoryview(table), slot * SLOT_STRIDE)
        for block, offset in zip(blocks, _offsets(slot, sizes)):
            _write(self.fd, block, offset)
        return Parcel(slot, len(blocks))

    def unpack(self, parcel: Parcel) -> tuple[bytes | bytearray, list[Any]]:
        """Copy a parcel's pickle and buffers out of its slot."""
        if not parcel.blocks:
            return parcel.inline, []
        sizes = self._sizes(parcel)
        data, *buffers = (_read(self.fd, size, offset) for size, offset in zip(sizes, _offsets(parcel.slot, sizes)))
        return data, buffers

    def holds(self, parcel: Parcel, pickled: Pickled) -> bool:
        """Whether ``parcel`` holds just these bytes, compared at memcmp's speed."""
        blocks = [memoryview(pickled.data), *pickled.buffers]
        if not parcel.blocks:
            return len(blocks) == 1 and parcel.inline == pickled.data
        sizes = [block.nbytes for block in blocks]
        return sizes == self._sizes(parcel) and all(
            _same(self.fd, block, offset) for block, offset in zip(blocks, _offsets(parcel.slot, sizes))
        )

    def _sizes(self, parcel: Parcel) -> list[int]:
        table = os.pread(self.fd, 8 * parcel.blocks, parcel.slot * SLOT_STRIDE)
        return list(struct.unpack(f"<{parcel.blocks}Q", table))

    def _punch(self, slot: int) -> None:
        start = slot * SLOT_STRIDE
        try:
            end = os.lseek(self.fd, start, os.SEEK_DATA)
            end = os.lseek(self.fd, end, os.SEEK_HOLE)
        except OSError:  # ENXIO: nothing was written here or after
            return
        if start < end <= start + SLOT_STRIDE:
            with mmap.mmap(self.fd, end - start, mmap.MAP_SHARED, offset=start) as mapping:
                mapping.madvise(mmap.MADV_REMOVE)


class Board:
    """One flag a run, in the arena's first page: whether the run was abandoned.

    The parent sets flags (also from a finalizer: setting a byte takes no lock), workers read them.

    Args:
        arena: The arena whose first page it is.
    """

    def __init__(self, arena: Arena) -> None:
        self._flags = mmap.mmap(arena.fd, BOARD_BYTES, mmap.MAP_SHARED)

    def __getitem__(self, run: int) -> bool:
        return self._flags[run] != 0

    def __setitem__(self, run: int, abandoned: bool) -> None:
        self._flags[run] = abandoned


def _offsets(slot: int, sizes: list[int]) -> list[int]:
    """Where the blocks of these sizes lie: aligned, behind the table of their sizes."""
    offset = slot * SLOT_STRIDE + 8 * len(sizes)
    offsets = []
    for size in sizes:
        offset = (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        offsets.append(offset)
        offset += size
    return offsets


def _write(fd: int, block: memoryview, offset: int) -> None:
    while block.nbytes:  # one call writes at most 2 GiB
        written = os.pwrite(fd, block, offset)
        block, offset = block[written:], offset + written


def _read(fd: int, size: int, offset: int) -> bytearray:
    block = bytearray(size)
    view = memoryview(block)
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise EOFError(f"a slot ends {len(view)} bytes early")
        view, offset = view[count:], offset + count
    return block


def _same(fd: int, block: memoryview, offset: int) -> bool:
    for start in range(0, block.nbytes, COMPARE_BYTES):
        part = bytes(block[start : start + COMPARE_BYTES])  # bytes compare by memcmp, memoryviews item by item
        if os.pread(fd, len(part), offset + start) != part:
            return False
    return True

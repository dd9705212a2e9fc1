"""The memory that batches and datasets travel in: one anonymous memory file, and one mapping of it a side.

The parent makes the file (memfd), the workers inherit its descriptor. It is sparse: everything has its place at a fixed
offset, far from the next, and only what was written takes memory. It has no name, so a killed process leaves nothing
behind, nobody else can open it, and the size of /dev/shm does not matter.

::

    0        the `board`, in the place of slot 0
    1..      slots, SLOT_BYTES apart: the first SLOTS of them lie in the mapping, whatever the number of batches kept
    ANNEXES  an annex a slot, ANNEX_BYTES apart, for what does not fit in the slot, or where there is no mapping
    SHIPPED  datasets, one behind the other, each place used once

A slot is taken by the parent, written by one worker at a time, and lent to the tensors of one batch. When the last of
them is gone, it is given back and taken again, its pages being there already. It is given back at once where nobody
will read it, and never where its writer may still be writing: then all goes with the file.

Lent slots come back in whatever thread and at whatever moment a tensor dies, inside any lock. So slots are kept without
one, in deques, whose operations are atomic.
"""

import ctypes
import errno
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fifobatch.readers import Readers

__all__ = ["ALIGNMENT", "SLOT_BYTES", "Arena", "Place", "Room"]

SLOT_BYTES = 2**28  # 256 MiB, and 2**14 of them are 4 TiB of address space: it has room for 31 such mappings
SLOTS = 2**14
MAPPED = SLOT_BYTES * SLOTS
ANNEXES, ANNEX_BYTES = 2**42, 2**40
SHIPPED = 2**62
FILE_BYTES = 2**63 - mmap.PAGESIZE
ALIGNMENT = 64  # bytes; a cache line, and what torch's own allocator gives
MAP_BYTES = 2**24  # outside the mapping, what is smaller is copied: a mapping of its own costs a descriptor
COMPARE_BYTES = 2**20

MADV_POPULATE_WRITE = 23  # Linux 5.14; <linux/mman.h>
FALLOC_FL_KEEP_SIZE_PUNCH_HOLE = 3  # <linux/falloc.h>
MAP_NORESERVE = 0x4000  # <asm-generic/mman-common.h>

Place = tuple[int, int]  # offset in the file, and size, in bytes

_Slot = ctypes.c_char * SLOT_BYTES
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """The memory file, seen from one process.

    Args:
        fd: The descriptor that a worker inherited; None makes a new file.

    Attributes:
        fd: The file's descriptor.
        spare: How many free slots keep their pages; those of further ones go back to the system.

    Raises:
        OSError: The system gives no memory file.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("fifobatch", os.MFD_CLOEXEC) if fd is None else fd
        finalizer = weakref.finalize(self, os.close, self.fd)
        finalizer.atexit = False  # the system closes it
        if fd is None:
            os.ftruncate(self.fd, FILE_BYTES)
        self.spare = 1
        self._pid = os.getpid()
        self._mapping = self._map_slots()
        self._numbers = itertools.count(1)
        self._shipped = SHIPPED
        self._shipping = threading.Lock()
        self._free: deque[int] = deque()  # with their pages
        self._bare: deque[int] = deque()
        self._sizes: dict[int, int] = {}  # bytes of a slot whose pages are there
        self._annexed: set[int] = set()
        self._readers = Readers()

    def _map_slots(self) -> mmap.mmap | None:
        """Map all slots at once; None where there is no address space for that (RLIMIT_AS, many arenas)."""
        try:
            mapping = mmap.mmap(self.fd, MAPPED)
        except OSError:
            return None
        mapping.madvise(mmap.MADV_DONTDUMP)
        return mapping

    # -- slots, in the parent

    def take(self) -> int:
        """Return the number of a slot that nobody uses: the one used last, if there is one."""
        for slot in self._readers.ended():
            self.give_back(slot)
        for slots in (self._free, self._bare):
            try:
                return slots.pop()
            except IndexError:  # none, or another thread was quicker
                pass
        return next(self._numbers)

    def give_back(self, slot: int) -> None:
        """Let ``slot`` be used again, and keep its pages for that, unless there are enough free ones."""
        self._free.append(slot)
        self._trim()

    def lend(self, slot: int, places: list[Place]) -> list[memoryview]:
        """Return the writable contents of ``places``. When nobody refers to them any more, ``slot`` is given back.

        Raises:
            OSError: There is no memory.
        """
        try:
            owners, blocks = self._lent(slot, places)
        except BaseException:
            self.give_back(slot)
            raise
        if owners:
            self._readers.add(slot)
        users = deque(range(len(owners) - 1))
        for owner in owners:
            weakref.finalize(owner, self._returned, slot, users).atexit = False
        if not owners:
            self.give_back(slot)
        return blocks

    def _lent(self, slot: int, places: list[Place]) -> tuple[list[Any], list[memoryview]]:
        """Return what owns the memory of ``places``, and views of it; the owners live as long as the views."""
        owners: list[Any] = []
        blocks = []
        start = slot * SLOT_BYTES
        whole = None
        for offset, size in places:
            if self._mapping is not None and offset < MAPPED:
                if whole is None:
                    owners.append(_Slot.from_buffer(self._mapping, start))
                    whole = memoryview(owners[-1]).cast("B")
                blocks.append(whole[offset - start : offset - start + size])
                self._sizes[slot] = max(self._sizes.get(slot, 0), offset - start + size)
                continue
            if offset >= ANNEXES:
                self._annexed.add(slot)
            block = self._map_block(offset, size) if size >= MAP_BYTES else None
            if block is None:
                try:
                    blocks.append(memoryview(self.read((offset, size))))
                except MemoryError as error:  # address space ends (RLIMIT_AS)
                    raise _no_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), size) from error
            else:
                owners.append(block.obj)
                blocks.append(block)
        return owners, blocks

    def _returned(self, slot: int, users: deque[int]) -> None:
        """Note that one of the owners of a lent slot is gone; the last one finds ``users`` empty."""
        try:
            users.pop()
        except IndexError:
            # In a child of os.fork() a copy of it has died, which is nothing to the parent.
            if self._pid == os.getpid() and self._readers.remove(slot):
                self.give_back(slot)

    def size(self, slot: int) -> int:
        """Return how many bytes of a slot, from its start, have their pages already."""
        return self._sizes.get(slot, 0)

    def close(self) -> None:
        """Give the pages of all free slots back to the system, and of others when they come back."""
        self.spare = 0
        self._trim()

    def _trim(self) -> None:
        """Release free slots until there are ``spare``; several threads may do so, and others take and give back."""
        while len(self._free) > self.spare:
            try:
                self._release(self._free.popleft())
            except IndexError:  # another thread was quicker
                pass

    def _release(self, slot: int) -> None:
        self._sizes.pop(slot, None)
        if slot < SLOTS:
            self.punch((slot * SLOT_BYTES, SLOT_BYTES))
        if slot >= SLOTS or self._mapping is None or slot in self._annexed:
            self._annexed.discard(slot)
            self.punch((ANNEXES + slot * ANNEX_BYTES, ANNEX_BYTES))
        self._bare.append(slot)

    # -- anything, on both sides

    def reserve(self, size: int) -> Place:
        """Return a place of whole pages, at least ``size`` bytes, that was never used and will not be used again."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._shipping:
            offset = self._shipped
            self._shipped += size
        return offset, size

    def punch(self, place: Place) -> None:
        """Give the pages of ``place`` back to the system: those that lie in it as a whole."""
        if self._pid == os.getpid():
            offset, size = (ctypes.c_longlong(number) for number in place)
            _libc.fallocate(self.fd, FALLOC_FL_KEEP_SIZE_PUNCH_HOLE, offset, size)

    def write(self, block: memoryview, offset: int) -> None:
        """Write ``block`` at ``offset``.

        Raises:
            OSError: There is no memory for it.
        """
        while block.nbytes:  # one call writes at most 2 GiB
            written = os.pwrite(self.fd, block, offset)
            block, offset = block[written:], offset + written

    def read(self, place: Place) -> bytearray:
        """Return a copy of ``place``."""
        offset, size = place
        block = bytearray(size)
        view = memoryview(block)
        while view:
            count = os.preadv(self.fd, [view], offset)
            view, offset = view[count:], offset + count
        return block

    def holds(self, place: Place, block: memoryview) -> bool:
        """Whether ``place`` holds just these bytes, compared at memcmp's speed."""
        offset, size = place
        if size != block.nbytes:
            return False
        for start in range(0, size, COMPARE_BYTES):
            part = bytes(block[start : start + COMPARE_BYTES])  # bytes compare by memcmp, memoryviews item by item
            if os.pread(self.fd, len(part), offset + start) != part:
                return False
        return True

    def private(self, places: list[Place], on_unmapped: Callable[[], object]) -> list[memoryview]:
        """Return the contents of ``places``, shared with all that read them; what is written is this process's own.

        Args:
            places: Theirs; they lie together.
            on_unmapped: Called when nobody refers to the contents any more: punched pages would read as zeros.
        """
        if not places:
            on_unmapped()
            return []
        first = min(offset for offset, _ in places)
        last = max(offset + size for offset, size in places)
        first -= first % mmap.PAGESIZE
        flags, protection = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            mapped = mmap.mmap(self.fd, last - first, flags=flags, prot=protection, offset=first)
        except OSError:  # no address space (RLIMIT_AS)
            mapping = memoryview(self.read((first, last - first)))
            on_unmapped()
        else:
            mapping = memoryview(mapped)
            weakref.finalize(mapped, on_unmapped).atexit = False
        return [mapping[offset - first : offset - first + size] for offset, size in places]

    def _map_block(self, offset: int, size: int) -> memoryview | None:
        before = offset % mmap.PAGESIZE
        try:
            mapping = mmap.mmap(self.fd, size + before, offset=offset - before)
        except OSError:  # no address space, no descriptor
            return None
        return memoryview(mapping)[before:]

    def near(self, slot: int, start: int, end: int) -> memoryview | None:
        """Return this part of a slot for writing in place, with all its pages there; None if that cannot be.

        Raises:
            OSError: There is no memory for it.
        """
        if self._mapping is None or slot >= SLOTS or end > SLOT_BYTES:
            return None
        ready = self._sizes.get(slot, 0)
        if end > ready:
            ready -= ready % mmap.PAGESIZE
            try:
                self._mapping.madvise(MADV_POPULATE_WRITE, slot * SLOT_BYTES + ready, end - ready)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                os.posix_fallocate(self.fd, slot * SLOT_BYTES + ready, end - ready)  # an older kernel
            self._sizes[slot] = end
        return memoryview(_Slot.from_buffer(self._mapping, slot * SLOT_BYTES)).cast("B")[start:end]

    def expect(self, slot: int, size: int) -> None:
        """Note how many bytes of a slot have their pages, as the parent knows it: it may have given them back."""
        self._sizes[slot] = min(self._sizes.get(slot, 0), size)


class Room:
    """Places in the file for one object: in a slot and its annex, or in a reserved place.

    Args:
        arena: The file.
        slot: The slot to write to; None for a reserved place.
        size: How much to reserve.

    Attributes:
        reserved: The place that was reserved: all that is put lies in it.
    """

    def __init__(self, arena: Arena, slot: int | None, size: int = 0) -> None:
        self.arena = arena
        self.slot = slot
        self._end = 0  # in the slot
        self.reserved = arena.reserve(size) if slot is None else (0, 0)
        self._far = self.reserved[0] if slot is None else ANNEXES + slot * ANNEX_BYTES
        self._placed: dict[int, Place] = {}  # by address

    def allocate(self, size: int) -> memoryview | None:
        """Return memory of the slot's own, to make something in that needs no copy then; None if there is none.

        Raises:
            OSError: There is no memory.
        """
        if self.slot is None:
            return None
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        try:
            block = self.arena.near(self.slot, start, start + size)
        except OSError as error:
            raise _no_memory(error, size) from error
        if block is not None:
            self._end = start + size
            self._placed[_address(block)] = (self.slot * SLOT_BYTES + start, size)
        return block

    def put_together(self, blocks: Sequence[memoryview]) -> list[Place]:
        """Put several blocks; where they overlap in memory, they overlap in the file, too, so that views stay views.

        Raises:
            OSError: There is no memory.
        """
        spans = sorted((_address(block), block.nbytes, at) for at, block in enumerate(blocks) if not block.readonly)
        places: dict[int, Place] = {}
        while spans:
            first, size, at = spans.pop(0)
            together, last = [(first, size, at)], first + size
            while spans and spans[0][0] < last:
                together.append(spans.pop(0))
                last = max(last, sum(together[-1][:2]))
            offset, _ = self.put(memoryview((ctypes.c_char * (last - first)).from_address(first)).cast("B"))
            places |= {each: (offset + start - first, length) for start, length, each in together}
        return [places[at] if at in places else self.put(block) for at, block in enumerate(blocks)]

    def put(self, block: memoryview) -> Place:
        """Return where ``block`` lies now: it is copied, unless it is what `allocate` returned.

        Raises:
            OSError: There is no memory.
        """
        place = (
            None if block.readonly else self._placed.pop(_address(block), None)
        )  # once: who puts it again gets a copy
        if place is not None and place[1] == block.nbytes:
            return place
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        if self.slot is not None and self.slot < SLOTS and start + block.nbytes <= SLOT_BYTES:
            offset = self.slot * SLOT_BYTES + start
            self._end = start + block.nbytes
        else:
            offset = -(-self._far // ALIGNMENT) * ALIGNMENT
            self._far = offset + block.nbytes
        try:
            self.arena.write(block, offset)
        except OSError as error:
            raise _no_memory(error, block.nbytes) from error
        return offset, block.nbytes


def _no_memory(error: OSError, size: int) -> OSError:
    return OSError(
        error.errno,
        f"no shared memory for {size:,} bytes ({os.strerror(error.errno or 0)}): turn down batch_size, window, or the "
        "number of workers",
    )


def _address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block)) if block.nbytes else 0

"""How a pickle and its buffers travel: as a parcel that says where in the arena they lie.

::

    parent                                          worker
    slot = arena.take()   -- slot number -->        room = Room(arena, slot)
                                                    pack(dumps(batch), room)    write
    unpack(arena, slot, parcel)   <-- parcel --                                 read in place, the slot is lent
    arena.give_back(slot)                                                       nobody wants it: the discard twin

What the parent sends goes the same way: indices in the slot of their chunk, datasets in a place of their own.

Nothing longer than `PIPE_BYTES` crosses the pool's pipe: a worker that is killed half way through a longer message
would leave the pool's reader waiting for the rest for ever.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from fifobatch.arena import Arena, Place, Room
from fifobatch.pickling import Pickled

__all__ = ["TASK_BYTES", "Parcel", "holds", "pack", "places", "read", "unpack", "unpack_private"]

PIPE_BYTES = 2048  # PIPE_BUF is 4096 on Linux; half of it leaves room for the pool's own wrapping
TASK_BYTES = PIPE_BYTES // 3  # for each of a task's parcels: the payload, the context, the indices


class Parcel(NamedTuple):
    """A packed object: the thing that crosses the pipe, to be unpacked or discarded.

    Attributes:
        pickle: The pickle, where it is small.
        table: The places of the blocks, packed: the pickle, if it is not here, and its buffers.
        indirect: Whether ``table`` is the place of the table, as there are very many blocks.
    """

    pickle: bytes = b""
    table: bytes = b""
    indirect: bool = False


def pack(pickled: Pickled, room: Room, inline: int = PIPE_BYTES) -> Parcel:
    """Put a pickle and its buffers into ``room``, but for what is small enough for the pipe.

    Args:
        pickled: What to put there.
        room: Where to.
        inline: The most bytes to leave in the parcel.

    Raises:
        OSError: There is no memory for it.
    """
    # A dataset's views of one tensor stay that; of a batch, each tensor gets memory of its own.
    shared = room.slot is None
    table = _packed(room.put_together(pickled.buffers) if shared else [room.put(block) for block in pickled.buffers])
    if len(pickled.data) + len(table) <= inline:
        return Parcel(pickled.data, table)
    table = _packed([room.put(memoryview(pickled.data))]) + table
    if len(table) <= inline:
        return Parcel(b"", table)
    return Parcel(b"", _packed([room.put(memoryview(table))]), True)


def places(arena: Arena, parcel: Parcel) -> list[Place]:
    """Return where the blocks of a parcel lie."""
    table: bytes | bytearray = parcel.table
    if parcel.indirect:
        table = arena.read(_unpacked(table)[0])
    return _unpacked(table)


def unpack(arena: Arena, slot: int, parcel: Parcel) -> tuple[bytes | memoryview, list[memoryview]]:
    """Return a parcel's pickle and buffers, in place; ``slot`` is given back when nothing refers to them any more.

    Raises:
        OSError: There is no memory.
    """
    try:
        where = places(arena, parcel)
    except BaseException:
        arena.give_back(slot)
        raise
    return _split(parcel, arena.lend(slot, where))


def read(arena: Arena, parcel: Parcel) -> tuple[bytes | memoryview, list[memoryview]]:
    """Return copies of a parcel's pickle and buffers."""
    return _split(parcel, [memoryview(arena.read(place)) for place in places(arena, parcel)])


def unpack_private(
    arena: Arena, parcel: Parcel, on_unmapped: Callable[[], object]
) -> tuple[bytes | memoryview, list[memoryview]]:
    """Return a parcel's pickle and buffers, shared with other readers; what is written to them is our own.

    Args:
        arena: Where they lie.
        parcel: Says where.
        on_unmapped: Called, in any thread, when nobody refers to them any more. Their memory may not go back before.
    """
    return _split(parcel, arena.private(places(arena, parcel), on_unmapped))


def holds(arena: Arena, parcel: Parcel, pickled: Pickled) -> bool:
    """Whether ``parcel`` holds just these bytes."""
    blocks = [*([] if parcel.pickle else [memoryview(pickled.data)]), *pickled.buffers]
    where = places(arena, parcel)
    return (
        parcel.pickle in (b"", pickled.data)
        and len(where) == len(blocks)
        and all(arena.holds(place, block) for place, block in zip(where, blocks))
    )


def _split(parcel: Parcel, blocks: list[memoryview]) -> tuple[bytes | memoryview, list[memoryview]]:
    return (parcel.pickle, blocks) if parcel.pickle else (blocks[0], blocks[1:])


def _packed(where: list[Place]) -> bytes:
    return struct.pack(f"<{2 * len(where)}Q", *(number for place in where for number in place))


def _unpacked(table: bytes | bytearray) -> list[Place]:
    return list(struct.iter_unpack("<2Q", table))

"""Which slots are being read: here, and in children that this process forked meanwhile.

Runs in the parent, in whatever thread lends a slot, drops a batch or forks.

A batch is memory that parent and forked children share. When the parent has dropped its batch, a child may still be
reading its own copy of it, and the slot must not be written again. So at each ``os.fork()`` with slots lent out, the
child inherits one end of a pipe. The other end tells the parent when the child has ended, or is another program.
"""

import os
import threading
import weakref
from collections import deque
from multiprocessing import connection
from multiprocessing.connection import Connection

__all__ = ["Readers"]


class Readers:
    """The slots that one arena has lent out."""

    def __init__(self) -> None:
        self._here: dict[int, None] = {}
        self._children: list[tuple[Connection, frozenset[int]]] = []  # a pipe, and what the child may be reading
        self._parked: deque[int] = deque()  # read by children only
        with _forking:
            _all.add(self)

    def add(self, slot: int) -> None:
        """Note that ``slot`` is lent to objects of this process."""
        self._here[slot] = None

    def remove(self, slot: int) -> bool:
        """Note that no object of this process reads ``slot``; return whether nobody does. Takes no lock."""
        self._here.pop(slot, None)
        free = not any(slot in slots for _, slots in self._children)
        if not free:
            self._parked.append(slot)
        return free

    def ended(self) -> list[int]:
        """Return the slots that were read by children only, and now by nobody."""
        if not self._children:
            return []
        ended = connection.wait([pipe for pipe, _ in self._children], 0)
        self._children = [child for child in self._children if child[0] not in ended]
        # What is parked while this goes on, by a finalizer, waits for the next time.
        parked = [self._parked.popleft() for _ in range(len(self._parked))]
        return [slot for slot in parked if self.remove(slot)]


_forking = threading.Lock()  # held from before a fork until after it
_all: "weakref.WeakSet[Readers]" = weakref.WeakSet()
_pipes: list[tuple[Readers, frozenset[int], int, int]] = []


def _before_fork() -> None:
    _forking.acquire()
    for readers in _all:
        lent = frozenset(readers._here.copy())
        if lent:
            _pipes.append((readers, lent, *os.pipe()))


def _after_fork_in_parent() -> None:
    for readers, lent, reader, writer in _pipes:
        os.close(writer)
        readers._children = [*readers._children, (Connection(reader, writable=False), lent)]
    _pipes.clear()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking
    for _, _, reader, _ in _pipes:
        os.close(reader)  # and keep the other end, until this process ends
    _pipes.clear()
    _all.clear()
    _forking = threading.Lock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

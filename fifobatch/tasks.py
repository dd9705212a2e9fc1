"""What is sent to a worker, and what comes back.

`Context` and `Task` are made in the parent, in the thread that iterates or in the supervisor's, and read in a worker.
"""

import importlib
import os
import pickle
import sys
from collections.abc import Hashable
from typing import Any, NamedTuple

from fifobatch import filters
from fifobatch.filters import Filter
from fifobatch.transport import Parcel

__all__ = ["Answer", "Context", "Task"]


class Context(NamedTuple):
    """What surrounds the parent at the moment of ``iter()``, and holds in the worker while it loads."""

    path: list[str]
    directory: str | None
    environment: dict[str, str]
    filters: list[Filter]

    @classmethod
    def now(cls) -> "Context":
        """Return this process's own."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # it was deleted
            directory = None
        return cls(list(sys.path), directory, dict(os.environ), filters.current())

    def apply(self) -> None:
        """Make it this process's own."""
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        if self.directory is not None and os.path.isdir(self.directory):
            os.chdir(self.directory)
        importlib.invalidate_caches()
        filters.install(self.filters)


class Task(NamedTuple):
    """One chunk to load, on a pool of ours. All of it is small; ``indices`` lie in the slot where they are not.

    Attributes:
        payload_token: Names the `Payload`.
        payload: Its parcel.
        context_token: Names the `Context`.
        context: Its parcel.
        alive: Tokens still in use: copies of others are dropped.
        run: The run's flag on the board.
        base_seed: The epoch's base seed, for ``get_worker_info().seed``.
        number: The chunk's number.
        seed: The chunk's seed.
        indices: The parcel of the chunk's indices, of the positions of those that are left out, and of their seeds.
        slot: Where the batch goes.
        slot_size: How many bytes of the slot have their pages already.
        key: Names the chunk on the board.
        attempt: Which try it is, from 1.
        singly: Whether to load one sample at a time, to find out which one it is that kills.
        stream: Names the iteration over a stream, of which this worker is one lane; 0 where chunks say what to load.
        epoch: The epoch's number.
        delivered: How many batches of the lane have come.
    """

    payload_token: int
    payload: Parcel
    context_token: int
    context: Parcel
    alive: tuple[int, ...]
    run: int
    base_seed: int
    number: int
    seed: int
    indices: Parcel
    slot: int
    slot_size: int
    key: int
    attempt: int
    singly: bool
    stream: int
    epoch: int
    delivered: int

    def to_bytes(self) -> bytes:
        """Pickle it without naming classes: 2 us instead of 14, or 50 with cloudpickle."""
        return pickle.dumps([tuple(field) if isinstance(field, Parcel) else field for field in self], 5)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Task":
        """Undo `to_bytes`."""
        task = cls(*pickle.loads(data))
        parcels = (Parcel(*task.payload), Parcel(*task.context), Parcel(*task.indices))
        return task._replace(payload=parcels[0], context=parcels[1], indices=parcels[2])


# What comes back of a task, as a kind and a body:
#
#     batch       the batch
#     partial     (what is left of it, what was left out)
#     share       of a stream: (a `lane.Share`, plain; what was left out)
#     error       its Report
#     last error  likewise, of a stream whose lane is over with it
#     again       None: it failed, and is to be tried again
#     later       None: of a stream, likewise, as another batch of its lane is to be tried again before it
#     abandoned   None
#     unknown     None: only the plan's token was sent, to an executor that is not ours; send the plan, too
#
# From pools of ours bodies are parcels, as plain tuples. The third part are arguments of `Trace.arrive`: who loaded it,
# from when to when, and the size of what was packed.
Mark = tuple[Hashable, float, float, int]
Answer = tuple[str, Any, Mark]

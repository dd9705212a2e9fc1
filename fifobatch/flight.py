"""What is under way: a run is one iteration over a plan, a flight one chunk of it.

Plain records of the parent process, which the consumer's, the pool's and the supervisor's thread share.
"""

import itertools
from collections.abc import Callable

from fifobatch.completion import BatchFuture
from fifobatch.plan import Chunk
from fifobatch.shipping import Shipment
from fifobatch.trace import Trace

__all__ = ["Flight", "Run"]

_keys = itertools.count()


class Run:
    """One iteration over a plan: what is abandoned together.

    Args:
        payload: The plan's shipment.
        context: The shipment of the surroundings.
        base_seed: The epoch's base seed.
        flag: Its place on the board; 0 is never set, for chunks submitted one by one.
        trace: Where to note what happens.
        submit: Starts loading a chunk of it.
        abandon: Gives up what is still under way of it, without a lock.
    """

    def __init__(
        self,
        payload: Shipment,
        context: Shipment,
        base_seed: int,
        flag: int,
        trace: Trace,
        submit: "Callable[[Run, Chunk], BatchFuture]",
        abandon: "Callable[[Run], None]",
    ) -> None:
        self.payload = payload
        self.context = context
        self.base_seed = base_seed
        self.flag = flag
        self.trace = trace
        self.over = False
        self._submit = submit
        self._abandon = abandon

    def submit(self, chunk: Chunk) -> BatchFuture:
        """Start loading ``chunk``."""
        return self._submit(self, chunk)

    def end(self) -> None:
        """Give up what is still under way, if anything is. Takes no lock: finalizers call it."""
        if not self.over:
            self.over = True
            self.trace.end()
            self._abandon(self)


class Flight:
    """A chunk under way.

    The done callback of the pool's future knows only its key, so that an executor that keeps its futures keeps no
    batch.

    Args:
        run: The iteration that it belongs to.
        future: Ours, to be completed.
        slot: Where the batch will come; None if there is none, or if it is not to be given back when the flight lands.
    """

    def __init__(self, run: Run, future: BatchFuture, slot: int | None) -> None:
        self.key = next(_keys)
        self.run = run
        self.future = future
        self.slot = slot

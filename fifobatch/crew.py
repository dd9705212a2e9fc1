"""The pools of one executor, and which of them loads what. In the parent: consumers add lanes, a supervisor renews."""

from collections.abc import Callable, Set

from fifobatch.flight import Flight
from fifobatch.pool import WorkerPool
from fifobatch.worker import initialize

__all__ = ["Crew"]


class Crew:
    """The worker processes of one executor; none is started before it has something to load.

    Args:
        max_workers: The most workers.
        arena_fd: The descriptor of the arena, which each inherits.
        on_broken: Called when a pool has broken.
        modules: The installed modules that workers should have.

    Attributes:
        workers: The pool that loads chunks.
        quarantine: One process more, for chunks that a worker has died on.
        lanes: Of streams, by number: a process each.
    """

    def __init__(self, max_workers: int, arena_fd: int, on_broken: Callable[[], object], modules: Set[str]) -> None:
        self.workers = WorkerPool(max_workers, initialize, (arena_fd,), on_broken, 0, modules)
        self.quarantine = self.workers.renewed(1, max_workers)
        self.lanes: dict[int, WorkerPool] = {}

    @property
    def pools(self) -> list[WorkerPool]:
        """All of them."""
        return [self.workers, self.quarantine, *list(self.lanes.values())]

    def pool_for(self, flight: Flight) -> WorkerPool:
        """Return the pool that is to load a chunk."""
        if not flight.run.lanes:
            return self.quarantine if flight.suspect else self.workers
        if flight.lane not in self.lanes:  # setdefault: two threads may come here at once
            first_number = self.workers.max_workers + 1 + flight.lane
            self.lanes.setdefault(flight.lane, self.workers.renewed(1, first_number))
        return self.lanes[flight.lane]

    def renew(self, pool: WorkerPool) -> None:
        """Put a new pool into the place of one that has ended."""
        if pool is self.workers:
            self.workers = pool.renewed()
        elif pool is self.quarantine:
            self.quarantine = pool.renewed()
        else:
            for lane in [lane for lane, own in list(self.lanes.items()) if own is pool]:
                self.lanes[lane] = pool.renewed()  # the dict stays: another thread may be adding a lane

"""What `BatchExecutor` is a handle of: chunks under way, and the pools that load them.

Three parties in the parent process, beside the worker processes:

- The *consumer's thread* publishes a plan (pickles the dataset once) and submits chunks.
- The *pool's thread* (loky's manager) calls `Engine._arrived` when a task is done: unpack, give the slot back, complete
  our future. It never calls the user's code beyond unpickling, as loky's own futures would. By way of the supervisor
  each batch would cost one thread switch more.
- The *supervisor*, one thread an executor, does what neither may; see `supervisor`.

`BatchExecutor` is a handle: when the last reference to it goes, its finalizer tells the supervisor to end the pool. So
the `Engine`, which the supervisor's thread keeps alive, must not refer to it.
"""

import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from functools import partial
from typing import Any

from fifobatch import server
from fifobatch.answers import explain, opened
from fifobatch.arena import Arena, Room
from fifobatch.board import Board
from fifobatch.crew import Crew
from fifobatch.elsewhere import load_elsewhere
from fifobatch.errors import ClosedError, WorkerDiedError
from fifobatch.exits import after_fork_in_child, at_exit, end_with_main_thread
from fifobatch.fetch import Payload
from fifobatch.flight import Flight, Run
from fifobatch.futures import BatchFuture
from fifobatch.pickling import Pickled
from fifobatch.plan import Batch, Chunk
from fifobatch.pool import WorkerPool
from fifobatch.shipping import Shipments
from fifobatch.tasks import Answer, Context, Task
from fifobatch.trace import Trace
from fifobatch.transport import TASK_BYTES, pack
from fifobatch.worker import load

__all__ = ["BROKEN", "CANCEL", "EXIT", "FINISH", "GIVE_UP", "LANDED", "Engine"]

# Messages of the supervisor's inbox, beside a Run that ended, and a Flight that is to be launched again.
BROKEN, LANDED, WATCH = "a pool is broken", "a flight has landed", "chunks have deadlines"
FINISH, CANCEL, GIVE_UP, EXIT = "finish", "cancel", "give up", "exit"


class Engine:
    """The state that consumer, pool and supervisor share, under one lock; see the module's docstring.

    Args:
        max_workers: The most worker processes.
        executor: Who loads instead of workers of ours.
        arena: The memory that batches travel in; None with ``executor``.
        supervise: Runs in the supervisor's thread.
    """

    def __init__(
        self,
        max_workers: int,
        executor: Executor | None,
        arena: Arena | None,
        supervise: "Callable[[Engine], None]",
    ) -> None:
        self.pid = os.getpid()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.arena = arena
        self.board = None if arena is None else Board(arena)
        self.trace = Trace()
        self.flights: dict[int, Flight] = {}
        self.lock = threading.Lock()
        self.exiting = False
        self.wakes_at = math.inf  # when the supervisor looks for chunks that are over their time
        self.answers = 0  # that workers of the pool have given
        self._elsewhere = executor
        self._closed = False
        self._broken: str | None = None  # how an executor that is not ours has ended
        self._supervise = supervise
        self._supervisor: threading.Thread | None = None
        self._end_lease: Callable[[], None] | None = None
        modules: set[str] = set()
        tell = partial(self.inbox.put, BROKEN)
        self.crew = None if arena is None else Crew(max_workers, arena.fd, tell, modules)
        self._shipments = Shipments(arena, modules)
        _engines.add(self)

    @property
    def pools(self) -> list[WorkerPool]:
        """Those of ours; none where another executor loads."""
        return [] if self.crew is None else self.crew.pools

    @property
    def usable(self) -> bool:
        """Whether it takes more chunks."""
        return self._broken is None and not self._closed and self.pid == os.getpid()

    @property
    def completes_here(self) -> bool:
        """Whether this is a thread in which futures are completed: whoever waits for one in it waits for ever."""
        thread = threading.current_thread()
        return thread is self._supervisor or any(thread is pool.manager for pool in self.pools)

    # -- consumer's thread

    def start_run(
        self, payload: Payload, base_seed: int, window: int, trace: Trace | None = None, epoch: int = 0
    ) -> Run:
        """Publish a plan as it is now.

        Args:
            payload: What the workers need of it.
            base_seed: The epoch's base seed.
            window: How much will be under way at once: so many free slots keep their pages.
            trace: The iteration's; None for chunks submitted one by one, which are delivered when they are done.
            epoch: The epoch's number.

        Raises:
            ClosedError: The executor was shut down.
            PlanError: It cannot be pickled.
        """
        self._check_open()
        self.release()
        shipment = self._shipments.publish(payload)
        context = self._shipments.publish(Context.now())
        if self.arena is not None:
            self.arena.spare = max(self.arena.spare, window)
        with self.lock:
            flag = self.board.take_flag() if trace is not None and self.board is not None else 0
        return Run(
            payload=shipment,
            context=context,
            base_seed=base_seed,
            flag=flag,
            policy=payload.policy,
            collates=payload.collates,
            stream=payload.stream,
            lanes=payload.num_workers if payload.stream is not None else 0,
            epoch=epoch,
            trace=trace or self.trace,
            submit=self.submit,
            abandon=self._abandon,
        )

    def release(self) -> None:
        """Give back the memory of datasets that nobody uses any more."""
        board, crew = self.board, self.crew
        if board is not None and crew is not None:
            numbers = [number for pool in crew.pools for number in pool.numbers]
            self._shipments.release(lambda token: any(board.holds(number, token) for number in numbers))

    def _check_open(self) -> None:
        if self._closed or self.pid != os.getpid():
            raise ClosedError("cannot load after shutdown (or in a child of os.fork); make a new executor or loader")

    def submit(self, run: Run, chunk: Chunk, later: bool = False) -> BatchFuture:
        """Start loading one chunk; ``later`` has the supervisor launch it, as done callbacks must not.

        Raises:
            ClosedError: The executor was shut down.
            OSError: There is no memory for its indices.
            WorkerDiedError: An executor that is not ours has broken.
        """
        flight = Flight(run, BatchFuture(chunk))
        with self.lock:
            self._check_open()
            if self._broken is not None:
                raise WorkerDiedError(f"{self._broken} Earlier chunks were reported; make a new executor to go on")
            if run.over:
                raise ClosedError("its iterator was closed")
            self._start_supervisor()
            self.flights[flight.key] = flight
        try:
            if not later:
                self.launch(flight)
        except BaseException as error:
            self._land(flight)
            if isinstance(error, BrokenExecutor):
                raise self._explain(chunk, error) from error
            raise
        run.trace.submit(flight.future.record)
        if later:
            self.inbox.put(flight)
        timeout = run.policy.timeout
        if timeout is not None and time.perf_counter() + timeout < self.wakes_at:
            self.inbox.put(WATCH)
        return flight.future

    def _abandon(self, run: Run) -> None:
        """Give a run up; from any thread, also from a finalizer."""
        if self.pid == os.getpid():
            self.raise_flag(run)
            self.inbox.put(run)

    def raise_flag(self, run: Run) -> None:
        """Tell the workers that a run was abandoned."""
        if run.flag and self.board is not None:
            self.board[run.flag] = True

    def _start_supervisor(self) -> None:
        if self._supervisor is None:
            if self.crew is not None:
                self._end_lease = server.servers.lease()
            end_with_main_thread(_end_engines)
            self._supervisor = threading.Thread(
                target=self._supervise, args=(self,), name="fifobatch-supervisor", daemon=True
            )
            self._supervisor.start()

    def shutdown(self, message: str) -> threading.Thread | None:
        """Take no more chunks; return the supervisor, which ends when the pool has ended."""
        with self.lock:
            self._closed = True
            supervisor = self._supervisor
        self.inbox.put(message)
        return supervisor

    # -- consumer's or supervisor's thread

    def launch(self, flight: Flight, payload: bytes | None = None) -> None:
        """Have a chunk loaded: for the first time, or again.

        Args:
            flight: The chunk.
            payload: For an executor that is not ours: the pickled plan, if it asked for it.

        Raises:
            BrokenExecutor, RuntimeError: An executor that is not ours takes no more.
            OSError: There is no memory for its indices.
        """
        run, chunk, future = flight.run, flight.future.chunk, flight.future
        if flight.is_of_ended_lane:  # asked for when its consumer did not know that yet
            self.settle(flight, flight.void())
            return
        flight.lost = False
        if self.arena is None or self.crew is None:
            assert self._elsewhere is not None
            body = (chunk.number, chunk.sent, chunk.seed, chunk.seeds)
            arguments = (run.payload.token, payload, self._shipments.alive, body, flight.attempt)
            inner = self._elsewhere.submit(load_elsewhere, *arguments)
        else:
            pickled = flight.pickled()
            if not isinstance(pickled, Pickled):
                self.settle(flight, pickled)
                return
            pool = flight.pool = self.crew.pool_for(flight)
            flight.slot = self.arena.take()
            task = Task(
                payload_token=run.payload.token,
                payload=run.payload.parcel,
                context_token=run.context.token,
                context=run.context.parcel,
                alive=self._shipments.alive,
                run=run.flag,
                base_seed=run.base_seed,
                number=chunk.number,
                seed=chunk.seed,
                indices=pack(pickled, Room(self.arena, flight.slot), TASK_BYTES),
                slot=flight.slot,
                slot_size=self.arena.size(flight.slot),
                key=flight.key,
                attempt=flight.attempt,
                singly=flight.singly,
                stream=run.key if run.lanes else 0,
                epoch=run.epoch,
                delivered=run.delivered[flight.lane] if run.lanes else 0,
            )
            try:
                inner = pool.submit(load, task.to_bytes())
            except (BrokenExecutor, ClosedError):  # the supervisor will replace the pool, and launch it again
                flight.lost = True
                self.inbox.put(BROKEN)
                return
            except BaseException:
                # The pool may have queued the task all the same (an interrupt, a server that does not start), so its
                # slot is not used again.
                flight.slot = None
                raise
        future.inner = inner
        inner.add_done_callback(partial(self._arrived, flight.key))

    # -- pool's thread

    def _arrived(self, key: int, inner: Future[Answer]) -> None:
        """Complete the future of a chunk whose task is done. A done callback: what it raised would be lost."""
        flight = self.flights[key]
        if inner.cancelled():
            self.settle(flight, None)
            return
        error = inner.exception()  # not raised: the traceback would keep the frames below, in a manual executor
        if error is not None:  # whatever the pool says of a task that did not run to its end
            if isinstance(error, BrokenExecutor | ClosedError) and flight.pool is not None:
                flight.future.inner = None
                flight.lost = True  # and its slot may still be written: all this is the supervisor's
                self.inbox.put(BROKEN)
            else:
                flight.slot = None
                self.settle(flight, self._explain(flight.future.chunk, error))
            return
        kind, body, mark = inner.result()
        self.answers += 1
        if kind in ("unknown", "again", "later"):
            if kind == "again" and not flight.run.over:
                flight.attempt += 1
                flight.run.trace.again(died=False)
            self.give_back(flight)
            self.inbox.put(flight)
            return
        result: Batch[Any] | Exception | None = None
        if kind != "abandoned" and not flight.run.over:
            flight.run.has_loaded = flight.run.has_loaded or kind != "error"
            flight.run.trace.arrive(flight.future.record, *mark)
            result = opened(self.arena, flight, kind, body)
        self.settle(flight, result)

    # -- any of them

    def give_back(self, flight: Flight) -> None:
        """Let the flight's slot be used again: nobody writes to it any more."""
        if self.arena and flight.slot is not None:
            self.arena.give_back(flight.slot)
            flight.slot = None

    def _land(self, flight: Flight) -> None:
        flight.future.inner = None  # a cycle through its done callback, which would keep the batch alive
        with self.lock:
            self.flights.pop(flight.key, None)
            closed = self._closed
        self.give_back(flight)
        if closed or flight.run.over or flight.suspect:
            self.inbox.put(LANDED)

    def settle(self, flight: Flight, result: Batch[Any] | Exception | None) -> None:
        """Complete its future; None: its chunk is not loaded, as nobody wants it."""
        self._land(flight)
        future = flight.future
        if flight.run.trace is self.trace:  # no iterator delivers it
            error = None if isinstance(result, Batch) else type(result or CancelledError()).__name__
            self.trace.hand_over(future.record, error)
            self.trace.deliver(future.record)
        if result is None:
            future.settle_cancelled()
        elif future.set_running_or_notify_cancel():
            if isinstance(result, Batch):
                future.set_result(result)
            else:
                future.set_exception(result)

    def _explain(self, chunk: Chunk, error: BaseException) -> Exception:
        with self.lock:
            if self._broken is None and isinstance(error, BrokenExecutor):
                self._broken = f"A worker process died: {str(error).rstrip('.')}."
        return explain(chunk, error, self._broken or "")

    def free_flags(self, ended: list[Run]) -> list[Run]:
        """Use a run's flag again when none of its tasks can read it any more; return the runs still waiting."""
        with self.lock:
            busy = {flight.run for flight in self.flights.values()}
            for run in ended:
                if run not in busy and self.board is not None:
                    self.board.give_back(run.flag)
        return [run for run in ended if run in busy]

    def kill(self) -> None:
        """Kill the workers now; from any thread."""
        self.exiting = True
        for pool in self.pools:
            pool.kill(ClosedError("its worker was killed at the executor's end"))

    def close(self) -> None:
        """Give the memory back, and the fork servers; the pools have ended."""
        self._shipments.close()
        if self.arena is not None:
            self.arena.close()
        if self._end_lease is not None:
            self._end_lease()


_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _end_engines() -> None:
    """At interpreter exit: nobody waits for a long sample."""
    for engine in list(_engines):
        supervisor = engine.shutdown(EXIT)
        if supervisor is not None and engine.crew is not None:
            engine.kill()  # the supervisor may be waiting for the workers to end
            supervisor.join()


at_exit(_end_engines)
after_fork_in_child(_engines.clear)

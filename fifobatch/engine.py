"""What `BatchExecutor` is a handle of: chunks under way, the pool, and the supervisor.

Three parties in the parent process, beside the worker processes:

- The *consumer's thread* publishes a plan (pickles the dataset once) and submits chunks.
- The *pool's thread* (loky's manager) calls `Engine._arrived` when a task is done: unpack, give the slot back, complete
  our future. It never calls the user's code beyond unpickling, as loky's own futures would. By way of the supervisor
  each batch would cost one thread switch more.
- The *supervisor*, one thread an executor, does what neither may: it cancels what was abandoned, sends payloads again,
  ends the pool, and kills workers that do not end by themselves. It sleeps on its inbox, with a timeout only while a
  deadline runs. Finalizers, which may run in any thread and inside any lock, only put messages into that inbox.

`BatchExecutor` is a handle: when the last reference to it goes, its finalizer tells the supervisor to end the pool. So
the `Engine`, which the supervisor's thread keeps alive, must not refer to it.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from functools import partial
from typing import Any

import cloudpickle

from fifobatch import server
from fifobatch.arena import BOARD_BYTES, Arena, Board, Room
from fifobatch.completion import BatchFuture
from fifobatch.errors import ClosedError, WorkerDiedError
from fifobatch.fetch import Payload, brief
from fifobatch.flight import Flight, Run
from fifobatch.pickling import loads, rebuild, report
from fifobatch.plan import Batch, Chunk
from fifobatch.pool import WorkerPool, at_exit
from fifobatch.shipping import Shipments, cannot_send, pickle_indices
from fifobatch.trace import Trace
from fifobatch.transport import TASK_BYTES, Parcel, pack, unpack
from fifobatch.worker import Answer, Context, Task, initialize, load, load_elsewhere

__all__ = ["CANCEL", "EXIT", "FINISH", "GIVE_UP", "Engine"]

# How long an abandoned worker may finish its sample (and the file that the user's code may be writing) before it is
# killed. torch's DataLoader gives its workers as long (MP_STATUS_CHECK_INTERVAL).
GRACE_SECONDS = 5.0


# Messages of the supervisor's inbox, beside a Run that ended and a Flight whose payload must be sent again.
_LANDED, FINISH, CANCEL, GIVE_UP, EXIT = "landed", "finish", "cancel", "give up", "exit"


class Engine:
    """The state that consumer, pool and supervisor share, under one lock; see the module's docstring."""

    def __init__(self, max_workers: int, executor: Executor | None, arena: Arena | None) -> None:
        self.pid = os.getpid()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.arena = arena
        self.pool: WorkerPool | None = None
        self.trace = Trace()
        self._elsewhere = executor
        self._lock = threading.Lock()
        self._flights: dict[int, Flight] = {}
        self._flags: list[int] = []
        self._closed = False
        self._broken: str | None = None
        self._supervisor: threading.Thread | None = None
        self._end_lease: Callable[[], None] | None = None
        if arena is not None:
            self._board = Board(arena)
            self._flags = list(range(1, BOARD_BYTES))
            self.pool = WorkerPool(max_workers, initialize, (arena.fd,))
        self._shipments = Shipments(self.arena, None if self.pool is None else self.pool.expect_modules)
        _engines.add(self)

    @property
    def usable(self) -> bool:
        """Whether it takes more chunks."""
        sound = self._broken is None and (self.pool is None or self.pool.usable)
        return sound and not self._closed and self.pid == os.getpid()

    # -- consumer's thread

    def start_run(self, payload: Payload, base_seed: int, window: int, trace: Trace | None = None) -> Run:
        """Publish a plan as it is now.

        Args:
            payload: What the workers need of it.
            base_seed: The epoch's base seed.
            window: How much will be under way at once: so many free slots keep their pages.
            trace: The iteration's; None for chunks submitted one by one, which are delivered when they are done.

        Raises:
            ClosedError: The executor was shut down.
            PlanError: It cannot be pickled.
        """
        self._check_open()
        shipment = self._shipments.publish(payload)
        context = self._shipments.publish(Context.now())
        if self.arena is not None:
            self.arena.spare = max(self.arena.spare, window)
        with self._lock:
            flag = self._flags.pop() if trace is not None and self._flags else 0
        return Run(shipment, context, base_seed, flag, trace or self.trace, self.submit, self._abandon)

    def _check_open(self) -> None:
        if self._closed or self.pid != os.getpid():
            raise ClosedError("cannot load after shutdown (or in a child of os.fork); make a new executor or loader")

    def submit(self, run: Run, chunk: Chunk) -> BatchFuture:
        """Start loading one chunk.

        Raises:
            ClosedError: The executor was shut down.
            WorkerDiedError: A worker of this pool has died.
        """
        future = BatchFuture(chunk)
        try:
            indices = pickle_indices(chunk.indices) if self.arena is not None else None
        except Exception as error:  # whatever pickling the user's indices raises
            error.add_note(f"In fifobatch, pickling the indices of chunk {chunk.number}: {brief(chunk.indices)}.")
            raise
        with self._lock:
            self._check_open()
            if self._broken is not None:
                raise WorkerDiedError(f"{self._broken} Earlier chunks were reported; make a new executor to go on")
            if run.over:
                raise ClosedError("its iterator was closed")
            self._start_supervisor()
            flight = Flight(run, future, None if self.arena is None else self.arena.take())
            self._flights[flight.key] = flight
        parcel = None
        try:
            if self.arena is not None and flight.slot is not None and indices is not None:
                parcel = pack(indices, Room(self.arena, flight.slot), TASK_BYTES)
            future.inner = self._start(flight, parcel)
        except BaseException as error:
            # The pool may have queued the task all the same (an interrupt, a server that does not start), so its slot
            # is not used again; but if there was no memory for the indices, nobody else knows of it.
            if parcel is not None:
                flight.slot = None
            self._land(flight)
            if isinstance(error, BrokenExecutor):
                raise self._explain(chunk, error) from error
            raise
        run.trace.submit(future.record)
        future.inner.add_done_callback(partial(self._arrived, flight.key))
        return future

    def _start(self, flight: Flight, indices: Parcel | None, payload: bytes | None = None) -> Future[Answer]:
        run, chunk = flight.run, flight.future.chunk
        alive = self._shipments.alive
        if self.arena is None or self.pool is None or indices is None or flight.slot is None:
            assert self._elsewhere is not None
            body = (chunk.number, chunk.indices, chunk.seed)
            return self._elsewhere.submit(load_elsewhere, run.payload.token, payload, alive, body)
        task = Task(
            payload_token=run.payload.token,
            payload=run.payload.parcel,
            context_token=run.context.token,
            context=run.context.parcel,
            alive=alive,
            run=run.flag,
            base_seed=run.base_seed,
            number=chunk.number,
            seed=chunk.seed,
            indices=indices,
            slot=flight.slot,
            slot_size=self.arena.size(flight.slot),
        )
        return self.pool.submit(load, task.to_bytes())

    def _abandon(self, run: Run) -> None:
        """Give a run up; from any thread, also from a finalizer."""
        if self.pid == os.getpid():
            self._raise_flag(run)
            self.inbox.put(run)

    def _raise_flag(self, run: Run) -> None:
        """Tell the workers that a run was abandoned."""
        if run.flag:
            self._board[run.flag] = True

    def _start_supervisor(self) -> None:
        if self._supervisor is None:
            if self.pool is not None:
                self._end_lease = server.servers.lease()
            self._supervisor = threading.Thread(target=self._supervise, name="fifobatch-supervisor", daemon=True)
            self._supervisor.start()

    def shutdown(self, message: str) -> threading.Thread | None:
        """Take no more chunks; return the supervisor, which ends when the pool has ended."""
        with self._lock:
            self._closed = True
            supervisor = self._supervisor
        self.inbox.put(message)
        return supervisor

    # -- pool's thread

    def _arrived(self, key: int, inner: Future[Answer]) -> None:
        """Complete the future of a chunk whose task is done. A done callback: what it raised would be lost."""
        flight = self._flights[key]
        future = flight.future
        if inner.cancelled():
            self._land(flight)
            self._settle(flight, None)
            return
        error = inner.exception()  # not raised: the traceback would keep the frames below, in a manual executor
        if error is not None:  # whatever the pool says of a task that did not run to its end
            flight.slot = None  # the worker may still be writing
            self._land(flight)
            self._settle(flight, self._explain(future.chunk, error))
            return
        kind, body, mark = inner.result()
        if kind == "unknown":
            self.inbox.put(flight)
            return
        result: Batch[Any] | Exception | None = None
        if kind != "abandoned" and not flight.run.over:
            flight.run.trace.arrive(future.record, *mark)
            result = self._open(flight, kind, body)
        self._land(flight)
        self._settle(flight, result)

    def _open(self, flight: Flight, kind: str, body: Any) -> Batch[Any] | Exception:
        chunk = flight.future.chunk
        try:
            if self.arena and flight.slot is not None:
                slot, flight.slot = flight.slot, None  # the batch gives it back
                body = loads(*unpack(self.arena, slot, Parcel(*body)))
            return rebuild(body) if kind == "error" else Batch(chunk.number, chunk.indices, body)
        except BaseException as error:  # what unpickling the user's objects raises is this batch's error
            where = f"In the parent, unpickling the batch of chunk {chunk.number} (indices {brief(chunk.indices)})."
            return rebuild(report(error, where))

    def _land(self, flight: Flight) -> None:
        flight.future.inner = None  # a cycle through its done callback, which would keep the batch alive
        with self._lock:
            self._flights.pop(flight.key, None)
            closed = self._closed
        if self.arena and flight.slot is not None:
            self.arena.give_back(flight.slot)
        if closed or flight.run.over:
            self.inbox.put(_LANDED)

    def _settle(self, flight: Flight, result: Batch[Any] | Exception | None) -> None:
        """Complete the future; None: its chunk is not loaded, as nobody wants it."""
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
        if self.pool is not None and self.pool.killed is not None:
            error = self.pool.killed  # loky would say that its workers have died
        if isinstance(error, ClosedError):
            return ClosedError(f"chunk {chunk.number} was not loaded: {error}")
        if not isinstance(error, BrokenExecutor):
            return rebuild(report(error, f"In the executor, on chunk {chunk.number} (indices {brief(chunk.indices)})."))
        with self._lock:
            if self._broken is None:
                dead = self.pool.dead_workers() if self.pool is not None else []
                self._broken = f"A worker process died: {', '.join(dead) or str(error).rstrip('.')}."
        died = WorkerDiedError(
            f"{self._broken} Chunk {chunk.number} (indices {brief(chunk.indices)}) was under way and is not loaded"
        )
        died.__cause__ = error
        return died

    # -- supervisor's thread

    def _supervise(self) -> None:
        ending, deadline = False, None
        ended_runs: list[Run] = []
        while not (ending and not self._flights):
            try:
                message = self.inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                message = EXIT
            if isinstance(message, Run):
                ended_runs.append(message)
                self._cancel(message, give_up=True)
            elif isinstance(message, Flight):
                self._send_again(message)
            elif message in (FINISH, CANCEL, GIVE_UP):
                ending = True
                if message == GIVE_UP:
                    deadline = time.monotonic() + GRACE_SECONDS
                if message != FINISH:
                    self._cancel(None, give_up=message == GIVE_UP)
            elif message == EXIT:
                ending, deadline = True, None
                self.kill()
            del message
            ended_runs = self._free_flags(ended_runs)
        if self.pool is not None:
            self.pool.shutdown()
            if not self.pool.join(GRACE_SECONDS):  # a thread of the user's keeps a worker from ending
                self.kill()
                self.pool.join(None)
        if self.arena is not None:
            self.arena.close()
        if self._end_lease is not None:
            self._end_lease()

    def _cancel(self, run: Run | None, give_up: bool) -> None:
        """Cancel what no worker has begun, of one run or of all; ``give_up`` also stops the rest at the next sample."""
        with self._lock:
            flights = [flight for flight in self._flights.values() if run is None or flight.run is run]
        for flight in flights:
            if give_up:
                flight.run.over = True
                self._raise_flag(flight.run)
            flight.future.cancel()

    def _free_flags(self, ended: list[Run]) -> list[Run]:
        """Use a run's flag again when none of its tasks can read it any more; return the runs still waiting."""
        with self._lock:
            busy = {flight.run for flight in self._flights.values()}
            for run in ended:
                if run not in busy and run.flag:
                    self._board[run.flag] = False
                    self._flags.append(run.flag)
        return [run for run in ended if run in busy]

    def _send_again(self, flight: Flight) -> None:
        try:
            flight.future.inner = self._start(flight, None, cloudpickle.dumps(flight.run.payload.content))
        except Exception as error:  # the user's pickling, or an executor that takes no more: this chunk's error
            self._land(flight)
            self._settle(flight, cannot_send(flight.run.payload.content, error))
        else:
            flight.future.inner.add_done_callback(partial(self._arrived, flight.key))

    def kill(self) -> None:
        """Kill the workers now; from any thread."""
        if self.pool is not None:
            self.pool.kill(ClosedError("its worker was killed at the executor's end"))


_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def _end_engines() -> None:
    """At interpreter exit: nobody waits for a long sample."""
    for engine in list(_engines):
        supervisor = engine.shutdown(EXIT)
        if supervisor is not None and engine.pool is not None:
            engine.kill()  # the supervisor may be waiting for the workers to end
            supervisor.join()


at_exit(_end_engines)
server.after_fork_in_child(_engines.clear)

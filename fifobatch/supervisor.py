"""The supervisor: one thread an executor, in the parent process, that does what neither consumer nor pool may.

- *Deaths.* A pool breaks as a whole when one worker dies. The supervisor kills the rest of it, waits until none can
  write any more, makes a new pool, and launches again what was under way. The chunk that a dead worker was on goes into
  quarantine: a process of its own, sample by sample, one chunk after the other. `Flight.died` has the rules.
- *Deadlines.* A chunk that runs for longer than its ``timeout`` has its worker killed, and is treated likewise.
- *Retries*, and plans that another executor's workers ask for.
- *Ends.* It cancels what was abandoned, ends the pools, and kills workers that do not end by themselves.

It sleeps on its inbox, with a timeout only while a deadline runs. Finalizers, which may run in any thread and inside
any lock, only put messages into that inbox. Were all this done in ``next()``, a consumer that waits elsewhere (for
another future, in an ``await``) would wait for ever.
"""

import contextlib
import math
import queue
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cloudpickle

from fifobatch.attempt import named
from fifobatch.board import START
from fifobatch.engine import BROKEN, CANCEL, EXIT, FINISH, GIVE_UP, Engine
from fifobatch.errors import ClosedError, FifobatchError, WorkerDiedError
from fifobatch.flight import FRUITLESS_STARTS, Flight, Run
from fifobatch.plan import Batch
from fifobatch.pool import WorkerPool
from fifobatch.shipping import cannot_send
from fifobatch.worker import close_stream

__all__ = ["supervise"]

# How long an abandoned worker may finish its sample (and the file that the user's code may be writing) before it is
# killed. torch's DataLoader gives its workers as long (MP_STATUS_CHECK_INTERVAL).
GRACE_SECONDS = 5.0

# How long after its deadline a worker is killed: it writes its Python stack first.
STACK_SECONDS = 0.1


def supervise(engine: Engine) -> None:
    """Run in the supervisor's thread, until the executor has ended."""
    _Supervisor(engine).run()


class _Running(NamedTuple):
    """A chunk that has a deadline and runs: where, and for how long."""

    flight: Flight
    pool: WorkerPool
    number: int
    pid: int
    step: int
    seconds: float


class _Supervisor:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._suspects: deque[Flight] = deque()  # waiting for quarantine
        self._confined: Flight | None = None  # in quarantine
        self._fruitless = 0  # times that the pool has broken without one answer, one after the other
        self._answers = 0
        self._retired: list[WorkerPool] = []  # that are ending

    def run(self) -> None:
        engine = self._engine
        ending, end_by = False, math.inf
        ended_runs: list[Run] = []
        while not (ending and not engine.flights):
            engine.wakes_at = math.inf  # a chunk that is submitted from here on wakes us up, if need be
            engine.wakes_at = wake = min(end_by, self._next_deadline())
            try:
                message = engine.inbox.get(timeout=None if wake == math.inf else max(0.0, wake - time.perf_counter()))
            except queue.Empty:
                message = EXIT if time.perf_counter() >= end_by else None
            if isinstance(message, Run):
                ended_runs.append(message)
                self._cancel(message, give_up=True)
                self._close_stream(message)
            elif isinstance(message, Flight):
                self._try_again(message)
            elif message == BROKEN:
                self._recover()
            elif message in (FINISH, CANCEL, GIVE_UP):
                ending = True
                if message == GIVE_UP:
                    end_by = time.perf_counter() + GRACE_SECONDS
                if message != FINISH:
                    self._cancel(None, give_up=message == GIVE_UP)
            elif message == EXIT:
                ending, end_by = True, math.inf
                engine.kill()
                self._recover()
            del message
            self._end_overdue()
            self._quarantine_next()
            ended_runs = engine.free_flags(ended_runs)
            engine.release()
        for pool in self._retired + engine.pools:
            pool.shutdown()
            if engine.exiting or not pool.join(GRACE_SECONDS):  # a thread of the user's keeps a worker from ending
                pool.kill(ClosedError("its worker was killed at the executor's end"))
                pool.join(None)
        engine.close()

    def _flights(self) -> list[Flight]:
        with self._engine.lock:
            return list(self._engine.flights.values())

    def _cancel(self, run: Run | None, give_up: bool) -> None:
        """Cancel what no worker has begun, of one run or of all; ``give_up`` also stops the rest at the next sample."""
        for flight in self._flights():
            if run is None or flight.run is run:
                if give_up:
                    flight.run.over = True
                    self._engine.raise_flag(flight.run)
                flight.future.cancel()
        for flight in [flight for flight in self._suspects if flight.run.over]:
            self._suspects.remove(flight)
            self._engine.settle(flight, None)

    def _close_stream(self, run: Run) -> None:
        """Have the lanes close their iterators: a generator's ``finally`` runs."""
        for pool in list(self._engine.crew.lanes.values()) if self._engine.crew and run.lanes else []:
            if pool.started and pool.usable:
                # It has died, or the interpreter is exiting, or a warning of the fork server's is an error.
                with contextlib.suppress(Exception):
                    pool.submit(close_stream, run.key)

    def _try_again(self, flight: Flight) -> None:
        """Launch a chunk that has failed, or whose plan an executor that is not ours has asked for."""
        payload = None
        try:
            if self._engine.arena is None:
                payload = cloudpickle.dumps(flight.run.payload.content)
        except Exception as error:  # the user's pickling: this chunk's error
            self._engine.settle(flight, cannot_send(flight.run.payload.content, error))
        else:
            self._launch(flight, payload)

    def _launch(self, flight: Flight, payload: bytes | None = None) -> None:
        if flight.run.over:
            self._engine.settle(flight, None)
            return
        try:
            self._engine.launch(flight, payload)
        except Exception as error:  # an executor that takes no more, a server that does not start, no memory
            chunk = flight.future.chunk
            error.add_note(f"In fifobatch, launching {named(chunk.number, chunk.sent)} again.")
            self._engine.settle(flight, error)

    # -- deaths

    def _recover(self) -> None:
        """Replace the pools that have broken, and launch again what they had."""
        engine = self._engine
        for pool in engine.pools:
            if not pool.usable:
                self._replace(pool, [])
        # 1. A chunk may have been submitted just when its pool broke; 2. it is lost only after the pool was replaced.
        for flight in self._flights():
            if flight.lost and flight.pool not in engine.pools and flight not in self._suspects:
                self._launch_lost(flight)

    def _replace(self, pool: WorkerPool, overdue: list[_Running]) -> None:
        """End what is left of a pool, and launch again what it had, on a new one.

        Args:
            pool: Ours, broken or with workers to be killed.
            overdue: The chunks that are over their time, where they are.
        """
        engine, board, crew = self._engine, self._engine.board, self._engine.crew
        assert board is not None
        assert crew is not None
        if pool.killed is None:
            pool.kill(WorkerDiedError("another worker has died"))
        pool.join(None)  # now no worker writes any more, and every future of the pool is done
        lost = {flight.key: flight for flight in self._flights() if flight.pool is pool and flight.lost}
        deaths = [(death, board.read(death.number)) for death in pool.deaths]
        stacks = [board.stack(running.number) for running in overdue]
        for number in pool.numbers:
            board.clear(number)
        if engine.exiting:
            self._settle_all(lost.values(), ClosedError, "the executor has ended")
            return
        is_main = pool is crew.workers
        crew.renew(pool)
        guilty = False
        for death, entry in deaths:
            flight = lost.pop(entry.key, None)
            if flight is not None:
                result = flight.died(entry.step, death.how)
                guilty |= flight.suspect or result is not None
                self._go_on(flight, result, died=True)
        for running, stack in zip(overdue, stacks):
            flight = lost.pop(running.flight.key, None)
            if flight is not None:  # else it was done at the last moment
                guilty = True
                result = flight.timed_out(running.step, running.pid, running.seconds, stack)
                self._go_on(flight, result, died=False)
        how = "; ".join(death.how for death in pool.deaths) or "its fork server was killed"
        if is_main:
            self._fruitless = 0 if guilty or engine.answers > self._answers else self._fruitless + 1
            self._answers = engine.answers
            if self._fruitless >= FRUITLESS_STARTS:
                self._fruitless = 0
                self._settle_all(lost.values(), WorkerDiedError, f"{FRUITLESS_STARTS} times, all workers died: {how}")
                return
        for flight in lost.values():
            if is_main or guilty:
                self._launch_lost(flight)
            else:
                self._go_on(flight, flight.died(START, how), died=True)

    def _settle_all(self, flights: Iterable[Flight], cls: type[FifobatchError], why: str) -> None:
        for flight in flights:
            self._engine.give_back(flight)
            chunk = flight.future.chunk
            where = f"{named(chunk.number, chunk.sent)} was not loaded"
            self._engine.settle(flight, None if flight.run.over else cls(f"{where}: {why}"))

    def _launch_lost(self, flight: Flight) -> None:
        self._go_on(flight, None, died=True)

    def _go_on(self, flight: Flight, result: "Batch[Any] | Exception | None", *, died: bool) -> None:
        """Complete a chunk whose worker was killed, with ``result``, or launch it again, if that is None."""
        self._engine.give_back(flight)
        if result is not None and not flight.run.over:
            self._engine.settle(flight, result)
            return
        if flight.is_of_ended_lane:
            self._engine.settle(flight, flight.void())
            return
        flight.run.trace.again(died=died)
        if flight.suspect and flight is not self._confined:
            self._suspects.append(flight)
        else:
            self._launch(flight)

    def _quarantine_next(self) -> None:
        """Give the next suspect to the quarantine, if that is free; end its process when there is none."""
        engine, crew = self._engine, self._engine.crew
        if self._confined is not None and self._confined.key not in engine.flights:
            self._confined = None
        if self._confined is not None or crew is None:
            return
        if self._suspects:
            self._confined = self._suspects.popleft()
            self._launch(self._confined)
        elif crew.quarantine.started:
            retired = crew.quarantine
            crew.renew(retired)
            retired.shutdown()
            self._retired = [pool for pool in self._retired if not pool.join(0)] + [retired]

    # -- deadlines

    def _running(self) -> Iterator[_Running]:
        """Yield the chunks that run and have a deadline."""
        engine, now = self._engine, time.perf_counter()
        with_deadline = {flight.key: flight for flight in self._flights() if flight.run.policy.timeout is not None}
        if with_deadline and engine.board is not None:
            for pool in engine.pools:
                for number, pid in pool.numbers.items():
                    key, step, since = engine.board.read(number)
                    flight = with_deadline.get(key)
                    if since and flight is not None and flight.pool is pool:
                        yield _Running(flight, pool, number, pid, step, now - since)

    def _next_deadline(self) -> float:
        """Return when the next chunk may be over its time, if none is done before."""
        seconds = {running.flight: running.seconds for running in self._running()}
        timeouts = ((flight, flight.run.policy.timeout) for flight in self._flights())
        left = (timeout - seconds.get(flight, 0.0) for flight, timeout in timeouts if timeout is not None)
        return time.perf_counter() + min(left, default=math.inf) + STACK_SECONDS

    def _end_overdue(self) -> None:
        """Kill the workers of chunks that are over their time."""
        overdue: dict[WorkerPool, list[_Running]] = {}
        for running in self._running():
            timeout = running.flight.run.policy.timeout
            if timeout is not None and running.seconds >= timeout + STACK_SECONDS:
                overdue.setdefault(running.pool, []).append(running)
        for pool, each in overdue.items():
            if pool.usable:
                pool.kill(WorkerDiedError("a chunk was over its time"))
            self._replace(pool, each)

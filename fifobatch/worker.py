"""All that runs in a worker process, in its only working thread: find the dataset, seed, load, collate, pack.

::

    load(task)                        one call a chunk, from the pool
        -> _Worker.plan(task)         the dataset's copy in this process, unpickled at its first chunk
        -> seed_all(chunk.seed)       random, NumPy and torch
        -> fetch(plan, indices)       dataset[i] for each index, then collate_fn: torch's default stacks into the slot
        -> pack(dumps(batch), room)   the rest into the slot; only the parcel goes back through the pipe

At each step the worker's record on the board says where it is, for the parent to read if the worker dies or hangs.

Nothing that the user's code raises leaves `load` as an exception: the pool would break on what it cannot unpickle.
Errors leave as a packed `Report`.
"""

import contextlib
import faulthandler
import importlib
import os
import pickle
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator
from multiprocessing import connection, current_process, parent_process
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data._utils import worker as _torch_worker

from fifobatch import filters
from fifobatch.arena import Arena, Room
from fifobatch.attempt import PACKING, SETTING_UP, Again, Attempt, Located, brief
from fifobatch.board import Board, Record
from fifobatch.fetch import ABANDONED, NOTHING, Payload, fetch, seed_all, size_of
from fifobatch.filters import Filter
from fifobatch.pickling import Pickled, Report, dumps, loads_sent, report
from fifobatch.serve import leave_to_parent
from fifobatch.transport import Parcel, pack, read, unpack_private

__all__ = ["Answer", "Context", "Task", "initialize", "load", "load_elsewhere"]


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
        indices: The parcel of the chunk's indices, and of the positions of those that are left out.
        slot: Where the batch goes.
        slot_size: How many bytes of the slot have their pages already.
        key: Names the chunk on the board.
        attempt: Which try it is, from 1.
        singly: Whether to load one sample at a time, to find out which one it is that kills.
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

    def to_bytes(self) -> bytes:
        """Pickle it without naming classes: 2 us instead of 14, or 50 with cloudpickle."""
        return pickle.dumps([tuple(field) if isinstance(field, Parcel) else field for field in self], 5)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Task":
        """Undo `to_bytes`."""
        task = cls(*pickle.loads(data))
        parcels = (Parcel(*task.payload), Parcel(*task.context), Parcel(*task.indices))
        return task._replace(payload=parcels[0], context=parcels[1], indices=parcels[2])


# What comes back of a task: ("batch", it), ("partial", (what is left of it, what was left out)), ("error", its Report),
# ("again", None), ("abandoned", None) or, where only the token was sent, ("unknown", None): send the payload too. From
# pools of ours, these are parcels, as plain tuples. The third part are arguments of `Trace.arrive`: who loaded it, from
# when to when, and the size of what was packed.
Mark = tuple[Hashable, float, float, int]
Answer = tuple[str, Any, Mark]


class _Worker:
    """The state of this worker process."""

    def __init__(self, number: int, arena: Arena) -> None:
        self.number = number
        self.pid = os.getpid()
        self.arena = arena
        self.board = Board(arena)
        self.record = Record(self.board, number)
        self.stack = self.record.open_stack()
        self.payloads: dict[int, Payload] = {}
        self.context: int | None = None

    def plan(self, task: Task) -> Payload:
        """Return this process's copy of the task's plan, in the context that the plan was made in."""
        for token in [token for token in self.payloads if token not in task.alive]:
            del self.payloads[token]
        if task.context_token != self.context:
            context: Context = loads_sent(*read(self.arena, task.context))
            context.apply()
            self.context = task.context_token
        token = task.payload_token
        payload = self.payloads.get(token)
        if payload is None:
            payload = self.payloads[token] = self._install(task)
        self._introduce(payload, task)
        return payload

    def _install(self, task: Task) -> Payload:
        try:
            payload: Payload = loads_sent(*unpack_private(self.arena, task.payload))
        except BaseException as error:  # whatever the user's __setstate__ raises gets its place and goes on
            raise Located("unpickling the dataset", error) from None
        if payload.worker_init_fn is not None:
            self._introduce(payload, task)
            seed_all(task.base_seed + self.number)  # as torch seeds a worker, for recipes that read initial_seed()
            try:
                payload.worker_init_fn(self.number)
            except BaseException as error:  # likewise
                raise Located(f"worker_init_fn({self.number})", error) from None
        return payload

    def _introduce(self, payload: Payload, task: Task) -> None:
        _torch_worker._worker_info = _torch_worker.WorkerInfo(
            id=self.number % payload.num_workers,  # one in quarantine stands in for another
            num_workers=payload.num_workers,
            seed=task.base_seed + self.number,
            dataset=payload.dataset,
        )


_worker: _Worker | None = None


def initialize(arena_fd: int) -> None:
    """Make this process a worker: the pool's initializer.

    Args:
        arena_fd: The arena's descriptor, inherited.
    """
    global _worker
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave_to_parent)
    torch.set_num_threads(1)
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # there may be no stdout, or one of somebody else's
    if reconfigure is not None:
        reconfigure(line_buffering=True)  # what a dataset prints is there, even if the worker is killed
    number: int = current_process().number  # type: ignore[attr-defined]  # see processes.WorkerProcess
    _worker = _Worker(number, Arena(arena_fd))
    threading.Thread(target=_leave_with_parent, name="fifobatch-parent-watch", daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)  # the parent was killed: nobody is left to answer to


def _end_if_forked(worker: _Worker, error: BaseException | None) -> None:
    """End this process if the user's code has forked it from a worker and it has come out of that code: it is none."""
    if os.getpid() == worker.pid:
        return
    if isinstance(error, Located):
        error = error.error
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Attempt(Attempt):
    """A try in a worker process of ours: its record on the board says where it is."""

    def __init__(self, worker: _Worker, task: Task, plan: Payload, left_out: tuple[int, ...]) -> None:
        super().__init__(task.number, plan.policy, task.attempt, left_out, task.singly)
        self._worker = worker
        self._run = task.run

    def at(self, step: int) -> bool:
        self._worker.record.at(step)
        return self._worker.board[self._run]

    def recovers(self, error: BaseException) -> bool:
        _end_if_forked(self._worker, error)
        # Unlike in the parent, an interrupt or an exit is the dataset's own here.
        return super().recovers(error) or self.policy.skip


@contextlib.contextmanager
def _running(worker: _Worker, timeout: float | None) -> Iterator[None]:
    """Say that the chunk runs. When it is over its time, this process writes its stack, and its parent kills it."""
    worker.record.run()
    if timeout is not None:
        worker.record.rewind(worker.stack)
        faulthandler.dump_traceback_later(max(timeout, 1e-6), file=worker.stack)  # less is refused
    try:
        yield
    finally:
        if timeout is not None:
            faulthandler.cancel_dump_traceback_later()
        worker.record.rest()


def load(data: bytes) -> Answer:
    """Load the chunk of one pickled `Task`, in a worker process of ours."""
    worker = _worker
    assert worker is not None
    started = time.perf_counter()
    task = Task.from_bytes(data)
    worker.record.begin(task.key, SETTING_UP)
    where = f"preparing chunk {task.number}"
    worker.arena.expect(task.slot, task.slot_size)
    room = Room(worker.arena, task.slot)

    def answer(kind: str, pickled: Pickled | None = None) -> Answer:
        body = None if pickled is None else tuple(pack(pickled, room))
        size = 0 if pickled is None else pickled.nbytes
        return kind, body, (worker.number, started, time.perf_counter(), size)

    try:
        if worker.board[task.run]:
            return answer("abandoned")
        plan = worker.plan(task)
        indices, left_out = loads_sent(*read(worker.arena, task.indices))
        attempt = _Attempt(worker, task, plan, left_out)
        with _running(worker, plan.policy.timeout):
            seed_all(task.seed)
            batch = fetch(plan, indices, attempt, room)
            _end_if_forked(worker, None)
            if batch is ABANDONED:
                return answer("abandoned")
            attempt.at(PACKING)
            where = f"packing the batch of chunk {task.number} (indices {brief(indices)})"
            try:
                if batch is not NOTHING and not attempt.failed:
                    return answer("batch", dumps(batch, to_parent=True))
            except BaseException as error:  # whatever pickling the user's objects raises, or no memory
                attempt.fail(None, error, where)
                batch = NOTHING
            left_out = [(positions, _report(located, where)) for positions, located in attempt.failed]
            return answer("partial", dumps((None if batch is NOTHING else batch, left_out), to_parent=True))
    except Again:
        return answer("again")
    except BaseException as error:  # the process boundary: what the user's code raises must not break the pool
        _end_if_forked(worker, error)
        told = _report(error, where)
        try:
            return answer("error", dumps(told))
        except OSError:  # no memory even for that: what goes through the pipe has to do
            return answer("error", dumps(told._replace(pickled=None, text=told.text[:400], note=told.note[:400])))


# Plans of this very process, by token: an executor that stays in the process (threads) needs no copy.
plans_here: dict[int, Payload] = {}
_plans_elsewhere: dict[int, Payload] = {}


def load_elsewhere(
    token: int, payload: bytes | None, alive: tuple[int, ...], chunk: tuple[int, Any, int], attempt_number: int
) -> Answer:
    """Load one chunk on an executor that is not ours: threads, Dask, MPI; its own transport carries the batch.

    Threads share one random state, so there the chunk's seed is not applied.

    Args:
        token: Names the plan.
        payload: The pickled `Payload`, sent again when a worker answered that it does not know the plan.
        alive: Tokens still in use: copies of others are dropped.
        chunk: Number, indices and seed.
        attempt_number: Which try it is, from 1.
    """
    started = time.perf_counter()
    number, indices, seed = chunk
    where = f"preparing chunk {number}"

    def answer(kind: str, body: Any, size: int = 0) -> Answer:
        who = (platform.node(), os.getpid(), threading.get_ident())
        return kind, body, (who, started, time.perf_counter(), size)

    try:
        plan = plans_here.get(token)
        if plan is None:
            for old in [old for old in _plans_elsewhere if old not in alive]:
                _plans_elsewhere.pop(old, None)
            if token not in _plans_elsewhere:
                if payload is None:
                    return answer("unknown", None)
                where = "unpickling the dataset"
                _plans_elsewhere[token] = loads_sent(payload)
            plan = _plans_elsewhere[token]
            seed_all(seed)
        attempt = Attempt(number, plan.policy, attempt_number)
        batch = fetch(plan, indices, attempt)
        if batch is not NOTHING and not attempt.failed:
            return answer("batch", batch, size_of(batch))
        left_out = [(positions, _report(located, where)) for positions, located in attempt.failed]
        rest = None if batch is NOTHING else batch
        return answer("partial", (rest, left_out), size_of(rest))
    except Again:
        return answer("again", None)
    except BaseException as error:  # the process boundary, as in `load`
        return answer("error", _report(error, where))


def _report(error: BaseException, where: str) -> Report:
    if isinstance(error, Located):
        error, where = error.error, str(error)
    return report(error, f"In fifobatch worker {os.getpid()}, {where}.")

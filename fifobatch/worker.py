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
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing import connection, current_process, parent_process
from typing import Any

import torch
import torch.utils.data
from torch.utils.data._utils import worker as _torch_worker

from fifobatch.arena import Arena, Room
from fifobatch.attempt import PACKING, SETTING_UP, Again, Attempt, Later, Located, batch_named
from fifobatch.board import Board, Record
from fifobatch.fetch import ABANDONED, NOTHING, Payload, fetch, seed_all
from fifobatch.lane import Lane, Share, WatchedInfo
from fifobatch.pickling import Pickled, Report, dumps, loads_sent, report
from fifobatch.plan import chunk_seed
from fifobatch.serve import leave_to_parent
from fifobatch.tasks import Answer, Context, Task
from fifobatch.transport import pack, read, unpack_private

__all__ = [
    "close_stream",
    "initialize",
    "load",
    "located_report",
    "reports",
]


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
        self.lanes: dict[int, Lane] = {}  # by stream
        self.over = 0  # the stream whose lane could not be set up here
        self.looked: set[int] = set()  # the payloads whose code has looked at a lane's worker info
        self.info: tuple[int, WatchedInfo] | None = None  # what it looks at now, and the payload's token

    def plan(self, task: Task) -> Payload:
        """Return this process's copy of the task's plan, in the context that the plan was made in."""
        for token in [token for token in self.payloads if token not in task.alive]:
            del self.payloads[token]
            self.looked.discard(token)
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

    def lane(self, plan: Payload, task: Task) -> Lane:
        """Return this process's lane of the task's stream."""
        if task.stream not in self.lanes:
            number = task.number % plan.num_workers

            seed = partial(chunk_seed, task.base_seed, task.epoch)
            self.lanes[task.stream] = Lane(plan, number, seed, partial(self._has_looked, task.payload_token))
        return self.lanes[task.stream]

    def close_lane(self, stream: int) -> None:
        """Close the iterator of a stream's lane, if this process has it."""
        lane = self.lanes.pop(stream, None)
        if lane is not None:
            try:
                lane.close()
            except BaseException:  # the user's `finally`: nobody waits for this lane any more, so it is told to stderr
                traceback.print_exc()

    def _install(self, task: Task) -> Payload:
        try:
            payload: Payload = loads_sent(
                *unpack_private(self.arena, task.payload, self.record.hold(task.payload_token))
            )
        except BaseException as error:  # whatever the user's __setstate__ raises gets its place and goes on
            raise Located("unpickling the dataset", error) from None
        if payload.worker_init_fn is not None:
            self._introduce(payload, task)
            number = self._id(payload, task)
            seed_all(task.base_seed + number)  # as torch seeds a worker, for recipes that read initial_seed()
            try:
                payload.worker_init_fn(number)
            except BaseException as error:  # likewise
                raise Located(f"worker_init_fn({number})", error) from None
        return payload

    def _introduce(self, payload: Payload, task: Task) -> None:
        number = self._id(payload, task)
        arguments = (number, payload.num_workers, task.base_seed + number, payload.dataset)
        if not task.stream:
            _torch_worker._worker_info = _torch_worker.WorkerInfo(*arguments)
            return
        self._has_looked(task.payload_token)
        info = _torch_worker._worker_info = WatchedInfo(*arguments)
        self.info = task.payload_token, info

    def _has_looked(self, payload_token: int) -> bool:
        """Return whether a payload's code has ever looked at its worker info in this process."""
        if self.info is not None and self.info[1].was_read:
            self.looked.add(self.info[0])
        return payload_token in self.looked

    def _id(self, payload: Payload, task: Task) -> int:
        """Return the id that datasets see: the lane's, or the worker's; one in quarantine stands in for another."""
        return (task.number if task.stream else self.number) % payload.num_workers


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

    def __init__(
        self, worker: _Worker, task: Task, plan: Payload, left_out: tuple[int, ...], seeds: tuple[int, ...] | None
    ) -> None:
        super().__init__(task.number, plan.policy, task.attempt, left_out, task.singly, seeds, task.seed)
        self._worker = worker
        self._run = task.run

    def restart(self) -> None:
        _run(self._worker, self.policy.timeout)

    def at(self, step: int) -> bool:
        self._worker.record.at(step)
        return self._worker.board[self._run]

    def recovers(self, error: BaseException) -> bool:
        _end_if_forked(self._worker, error)
        # Unlike in the parent, an interrupt or an exit is the dataset's own here.
        return super().recovers(error) or self.policy.skip


def _run(worker: _Worker, timeout: float | None) -> None:
    worker.record.run()
    if timeout is not None:
        worker.record.rewind(worker.stack)
        faulthandler.dump_traceback_later(max(timeout, 1e-6), file=worker.stack)  # less is refused


@contextlib.contextmanager
def _running(worker: _Worker, timeout: float | None) -> Iterator[None]:
    """Say that the chunk runs. When it is over its time, this process writes its stack, and its parent kills it."""
    _run(worker, timeout)
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
    worker.arena.expect(task.slot, task.slot_size)
    room = Room(worker.arena, task.slot)

    def answer(kind: str, pickled: Pickled | None = None) -> Answer:
        body = None if pickled is None else tuple(pack(pickled, room))
        size = 0 if pickled is None else pickled.nbytes
        number = task.number % plan.num_workers if plan is not None and task.stream else worker.number
        return kind, body, (number, started, time.perf_counter(), size)

    def failed(error: BaseException) -> Answer:
        _end_if_forked(worker, error)
        if plan is None and task.stream:  # without its dataset the lane is over
            if worker.over == task.stream:
                return answer("share", dumps((Share(None, range(0), True, True).plain, [])))
            worker.over = task.stream
        where = f"packing {batch_named(task.number, indices)}"
        told = located_report(error, f"preparing chunk {task.number}" if kind is None else where)
        if plan is None and task.stream:
            lost = f"It was to read a lane of the stream from batch {task.number} on; this lane is over."
            told = told._replace(note=f"{told.note}\n{lost}")
        what = "last error" if plan is None and task.stream else "error"
        try:
            return answer(what, dumps(told))
        except OSError:  # no memory even for that: what goes through the pipe has to do
            return answer(what, dumps(told._replace(pickled=None, text=told.text[:400], note=told.note[:400])))

    kind = plan = indices = None
    try:
        if worker.board[task.run]:
            worker.close_lane(task.stream)
            return answer("abandoned")
        plan = worker.plan(task)
        indices, left_out, seeds = loads_sent(*read(worker.arena, task.indices))
        attempt = _Attempt(worker, task, plan, left_out, seeds)
        with _running(worker, plan.policy.timeout):
            try:
                if task.stream:
                    kind, pickled = _load_share(worker, task, plan, attempt, room)
                else:
                    kind, pickled = _load_chunk(worker, task, plan, attempt, indices, room)
                return answer(kind, pickled)
            except Again:
                return answer("again")
            except Later:
                return answer("later")
            except BaseException as error:  # as below; here, as describing the user's errors takes its time, too
                return failed(error)
    except BaseException as error:  # the process boundary: what the user's code raises must not break the pool
        return failed(error)


def _load_chunk(
    worker: _Worker, task: Task, plan: Payload, attempt: Attempt, indices: Any, room: Room
) -> tuple[str, Pickled | None]:
    """Return kind and contents of the answer."""
    seed_all(task.seed)
    batch = fetch(plan, indices, attempt, room)
    _end_if_forked(worker, None)
    if batch is ABANDONED:
        return "abandoned", None
    attempt.at(PACKING)
    if batch is not NOTHING and not attempt.failed:
        try:
            return "batch", dumps(batch, to_parent=True)
        except BaseException as error:  # whatever pickling the user's objects raises gets its place and goes on
            attempt.fail(None, error, f"packing {batch_named(task.number, indices)}")
            batch = NOTHING
    return "partial", dumps((None if batch is NOTHING else batch, reports(attempt)), to_parent=True)


def _load_share(worker: _Worker, task: Task, plan: Payload, attempt: Attempt, room: Room) -> tuple[str, Pickled | None]:
    """As `_load_chunk`, of a stream."""
    lane = worker.lane(plan, task)
    try:
        share = lane.load(task.number // plan.num_workers, attempt, room, task.delivered)
    except Located as error:
        _end_if_forked(worker, error)
        return "last error" if lane.is_over else "error", dumps(located_report(error, ""))
    _end_if_forked(worker, None)
    if share is ABANDONED:
        return "abandoned", None
    attempt.at(PACKING)
    if share.data is NOTHING:
        share = share._replace(data=None)
    try:
        return "share", dumps((share.plain, reports(attempt)), to_parent=True)
    except BaseException as error:  # as above
        attempt.fail(None, error, f"packing batch {task.number} of {lane}")
        return "share", dumps((share._replace(data=None).plain, reports(attempt)), to_parent=True)


def close_stream(stream: int) -> None:
    """Close this process's lane of a stream, in a worker process of ours: a generator's ``finally`` runs."""
    assert _worker is not None
    _worker.close_lane(stream)


def reports(attempt: Attempt) -> list[tuple[tuple[int, ...] | None, Report]]:
    """Return as plain data what an attempt has left out."""
    return [(positions, located_report(located, "")) for positions, located in attempt.failed]


def located_report(error: BaseException, where: str) -> Report:
    """Return an error as plain data, with its place: its own, or else ``where``."""
    if isinstance(error, Located):
        error, where = error.error, str(error)
    return report(error, f"In fifobatch worker {os.getpid()}, {where}.")

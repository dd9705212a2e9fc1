"""All that runs in a worker process, in its only working thread: find the dataset, seed, load, collate, pack.

::

    load(task)                        one call a chunk, from the pool
        -> _Worker.plan(task)         the dataset's copy in this process, unpickled at its first chunk
        -> seeds(chunk.seed)          random, NumPy and torch
        -> fetch(plan, indices)       dataset[i] for each index, then collate_fn
        -> arena.pack(batch, slot)    into shared memory; only the parcel goes back through the pipe

Nothing that the user's code raises leaves `load` as an exception: the pool would break on what it cannot unpickle.
Errors leave as a packed `Report`.

`fetch` and `seeds` also run in the parent, where there are no workers (``num_workers=0``).
"""

import importlib
import os
import pickle
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, current_process, parent_process
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data._utils import worker as _torch_worker
from torch.utils.data._utils.collate import default_collate

from fifobatch.pickling import Pickled, Report, dumps, loads_sent, report
from fifobatch.serve import leave_to_parent
from fifobatch.transport import Arena, Board, Parcel

__all__ = ["Answer", "Context", "Located", "Payload", "Task", "fetch", "initialize", "load", "load_elsewhere", "seeds"]


class Payload(NamedTuple):
    """What a worker needs of a plan, shipped once: it becomes the worker's own copy."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    collates: bool
    worker_init_fn: Callable[[int], None] | None
    num_workers: int


class Context(NamedTuple):
    """What surrounds the parent at the moment of ``iter()``, and holds in the worker while it loads."""

    path: list[str]
    directory: str | None
    environment: dict[str, str]

    @classmethod
    def now(cls) -> "Context":
        """Return this process's own."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # it was deleted
            directory = None
        return cls(list(sys.path), directory, dict(os.environ))

    def apply(self) -> None:
        """Make it this process's own."""
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        if self.directory is not None and os.path.isdir(self.directory):
            os.chdir(self.directory)
        importlib.invalidate_caches()


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
        indices: The chunk's indices, pickled: their parcel.
        slot: Where the batch goes.
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

    def to_bytes(self) -> bytes:
        """Pickle it without naming classes: 2 us instead of 14, or 50 with cloudpickle."""
        return pickle.dumps([tuple(field) if isinstance(field, Parcel) else field for field in self], 5)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Task":
        """Undo `to_bytes`."""
        task = cls(*pickle.loads(data))
        parcels = (Parcel(*task.payload), Parcel(*task.context), Parcel(*task.indices))
        return task._replace(payload=parcels[0], context=parcels[1], indices=parcels[2])


# What comes back of a task: ("batch", it), ("error", its Report), ("abandoned", None) or, where only the token was
# sent, ("unknown", None): send the payload too. From pools of ours, batch and report are parcels, as plain tuples. The
# third part are arguments of `Trace.arrive`: who loaded it, from when to when, and the size of what was packed.
Mark = tuple[Hashable, float, float, int]
Answer = tuple[str, Any, Mark]


class _Worker:
    """The state of this worker process."""

    def __init__(self, number: int, arena: Arena) -> None:
        self.number = number
        self.arena = arena
        self.board = Board(arena)
        self.payloads: dict[int, Payload] = {}
        self.context: int | None = None

    def plan(self, task: Task) -> Payload:
        """Return this process's copy of the task's plan, in the context that the plan was made in."""
        for token in [token for token in self.payloads if token not in task.alive]:
            del self.payloads[token]
        if task.context_token != self.context:
            context: Context = loads_sent(*self.arena.unpack(task.context))
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
            payload: Payload = loads_sent(*self.arena.unpack(task.payload))
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
            id=self.number,
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
    number: int = current_process().number  # type: ignore[attr-defined]  # see pool.WorkerProcess
    _worker = _Worker(number, Arena(arena_fd))
    threading.Thread(target=_leave_with_parent, name="fifobatch-parent-watch", daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)  # the parent was killed: nobody is left to answer to


def load(data: bytes) -> Answer:
    """Load the chunk of one pickled `Task`, in a worker process of ours."""
    worker = _worker
    assert worker is not None
    started = time.perf_counter()
    task = Task.from_bytes(data)
    where = f"preparing chunk {task.number}"

    def answer(kind: str, pickled: Pickled | None) -> Answer:
        body = None if pickled is None else tuple(worker.arena.pack(pickled, task.slot))
        size = 0 if pickled is None else pickled.nbytes
        return kind, body, (worker.number, started, time.perf_counter(), size)

    try:
        if worker.board[task.run]:
            return answer("abandoned", None)
        plan = worker.plan(task)
        indices = loads_sent(*worker.arena.unpack(task.indices))
        seed_all(task.seed)
        batch = fetch(plan, indices, task.number, lambda: worker.board[task.run])
        if batch is ABANDONED:
            return answer("abandoned", None)
        where = f"packing the batch of chunk {task.number} (indices {brief(indices)})"
        return answer("batch", dumps(batch, classes_by_id=True))
    except BaseException as error:  # the process boundary: what the user's code raises must not break the pool
        return answer("error", dumps(_report(error, where)))


# Plans of this very process, by token: an executor that stays in the process (threads) needs no copy.
plans_here: dict[int, Payload] = {}
_plans_elsewhere: dict[int, Payload] = {}


def load_elsewhere(token: int, payload: bytes | None, alive: tuple[int, ...], chunk: tuple[int, Any, int]) -> Answer:
    """Load one chunk on an executor that is not ours: threads, Dask, MPI; its own transport carries the batch.

    Threads share one random state, so there the chunk's seed is not applied.

    Args:
        token: Names the plan.
        payload: The pickled `Payload`, sent again when a worker answered that it does not know the plan.
        alive: Tokens still in use: copies of others are dropped.
        chunk: Number, indices and seed.
    """
    started = time.perf_counter()
    number, indices, seed = chunk
    where = f"preparing chunk {number}"

    def answer(kind: str, body: Any) -> Answer:
        who = (platform.node(), os.getpid(), threading.get_ident())
        return kind, body, (who, started, time.perf_counter(), 0)

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
        return answer("batch", fetch(plan, indices, number))
    except BaseException as error:  # the process boundary, as in `load`
        return answer("error", _report(error, where))


# -- also in the parent, where there are no workers --------------------------------------------------------------------

ABANDONED = object()


class Located(Exception):
    """Says where the user's code failed, and carries what it raised.

    Attributes:
        error: What it raised.
    """

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(where)
        self.error = error


def fetch(plan: Payload, indices: Any, number: int, abandoned: Callable[[], bool] = lambda: False) -> Any:
    """Return the collated batch of one chunk; `ABANDONED` if nobody wants it any more.

    Raises:
        Located: From whatever the user's code raises.
    """
    dataset = plan.dataset
    doing = f"reading the indices {brief(indices)} of chunk {number}"
    try:
        if not plan.collates:
            doing = f"loading dataset[{brief(indices)}], chunk {number}"
            samples = dataset[indices]
        elif _fetches_lists(type(dataset)):
            doing = f"dataset.__getitems__({brief(indices)}), chunk {number}"
            samples = dataset.__getitems__(indices)
            if len(samples) != len(indices):
                raise ValueError(
                    f"{type(dataset).__name__}.__getitems__ returned {len(samples)} samples for {len(indices)} indices"
                )
        else:
            samples = []
            for index in indices:
                if abandoned():
                    return ABANDONED
                doing = f"loading dataset[{brief(index)}], chunk {number} (indices {brief(indices)})"
                samples.append(dataset[index])
        doing = f"collate_fn, chunk {number} (indices {brief(indices)})"
        return _collate(plan, samples)
    except BaseException as error:  # whatever it is, it gets its place and goes on
        raise Located(doing, error) from None


def _collate(plan: Payload, samples: Any) -> Any:
    if plan.collate_fn is not default_collate or _torch_worker._worker_info is None:
        return plan.collate_fn(samples)
    # In a worker, torch's default_collate stacks into fresh shared memory of torch's own. Ours is ready already.
    info, _torch_worker._worker_info = _torch_worker._worker_info, None
    try:
        return plan.collate_fn(samples)
    finally:
        _torch_worker._worker_info = info


def _fetches_lists(cls: type) -> bool:
    """Whether ``__getitems__`` is to be used: there, not None, and not below an overridden ``__getitem__``.

    Looked up on the class: a wrapper that forwards every attribute has no ``__getitems__`` of its own, and a subclass
    of ``Subset`` that overrides ``__getitem__`` means it.
    """
    for base in cls.__mro__:
        if "__getitems__" in vars(base):
            return callable(vars(base)["__getitems__"])
        if "__getitem__" in vars(base):
            return False
    return False


def _report(error: BaseException, where: str) -> Report:
    if isinstance(error, Located):
        error, where = error.error, str(error)
    return report(error, f"In fifobatch worker {os.getpid()}, {where}.")


def brief(indices: object) -> str:
    """Return ``indices`` as text for a message, at most 100 characters of it."""
    try:
        text = repr(indices)
    except Exception as error:  # the user's __repr__, inside an error message
        text = f"<{type(indices).__name__}, and its repr raises {type(error).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


def seed_all(seed: int) -> None:
    """Seed ``random``, NumPy (if it is imported) and torch's CPU generator with 64 bits.

    ``torch.default_generator`` instead of ``torch.manual_seed``: 2 us instead of 250.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed % 2**64)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])


@contextmanager
def seeds(seed: int) -> Iterator[None]:
    """Seed as a worker would, and put this process's own random state back afterwards."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

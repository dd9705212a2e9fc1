"""What tests have workers do: gates that hold samples back, and datasets that say where they ran.

Workers and scripts import this file by name; it is nobody's installed package, so no fork server ever imports it.
"""

import itertools
import os
import queue
import random
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fifobatch import Batch, FifoLoader
from fifobatch.testing import ManualExecutor

TIMEOUT = 60.0  # for what must happen at all; a hang, not a measurement


class Gate:
    """Two named pipes: samples say that they have arrived, and wait until the test lets them through.

    The process that makes it with ``Gate.make`` is the one that opens it; when that one ends, everybody passes.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._arrived = self._opened = -1

    @classmethod
    def make(cls, folder: Path) -> "Gate":
        """Make the pipes in ``folder`` and hold them open."""
        gate = cls(str(folder))
        for name in ("arrived", "opened"):
            os.mkfifo(folder / name)
        gate._arrived, gate._opened = (os.open(folder / name, os.O_RDWR) for name in ("arrived", "opened"))
        return gate

    def __reduce__(self) -> Any:
        return Gate, (self.folder,)

    def arrive(self, what: int = 0) -> None:
        """Say that the caller is here (in a worker or script)."""
        fd = os.open(f"{self.folder}/arrived", os.O_WRONLY)
        os.write(fd, what.to_bytes(8, "little"))
        os.close(fd)

    def wait(self) -> None:
        """Wait until the test opens the gate for one more (in a worker or script)."""
        fd = os.open(f"{self.folder}/opened", os.O_RDONLY)
        os.read(fd, 1)
        os.close(fd)

    def arrivals(self, count: int) -> list[int]:
        """Wait for ``count`` arrivals; return what they said (in the test)."""
        found = []
        while len(found) < count:
            ready, _, _ = select.select([self._arrived], [], [], TIMEOUT)
            assert ready, f"{len(found)} of {count} arrived within {TIMEOUT:g} s"
            found.append(int.from_bytes(os.read(self._arrived, 8), "little"))
        return found

    def open(self, count: int) -> None:
        """Let ``count`` through (in the test)."""
        os.write(self._opened, b"." * count)

    def close(self) -> None:
        """Let everybody through who waits (in the test)."""
        for fd in (self._arrived, self._opened):
            os.close(fd)


class Calls:
    """A dataset whose samples are ``function(index, *args)``."""

    def __init__(self, length: int, function: Callable[..., Any], *args: Any) -> None:
        self.length = length
        self.function = function
        self.args = args

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.function(index, *self.args)


class Inline(Executor):
    """An executor that runs each call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def whole(batch: Batch[Any]) -> Batch[Any]:
    """Select all of a batch."""
    return batch


def processes(index: int, *others: object) -> tuple[int, ...]:
    """Return the pids of the worker and of the fork servers that it comes from, the base last."""
    return (os.getpid(), *ancestors(os.getpid()))


def ancestors(pid: int) -> list[int]:
    """Return the pids of a process's parent, of that one's parent, and so on."""
    pids: list[int] = []
    while pid > 1:  # not psutil's `parents()`, which ends where the clock was set between two starts
        pid = psutil.Process(pid).ppid()
        pids.append(pid)
    return pids


def pass_gate(index: int, gate: Gate, *others: object) -> int:
    """Arrive, wait, and return the worker's pid."""
    gate.arrive(os.getpid())
    gate.wait()
    return os.getpid()


def surroundings(index: int, variable: str) -> tuple[int, str, str | None, str]:
    """Return pid, working directory, an environment variable and the first entry of ``sys.path``."""
    return os.getpid(), os.getcwd(), os.environ.get(variable), sys.path[0]


def named_semaphores(index: int = 0) -> list[str]:
    """Return the files of the named semaphores that this process uses."""
    with open("/proc/self/maps") as maps:
        return [line.split()[-1] for line in maps if "/dev/shm/sem." in line]


def load(dataset: Any, num_workers: int = 2, **arguments: Any) -> list[Any]:
    """Load an epoch; return its samples as they are."""
    loader = FifoLoader(dataset, num_workers=num_workers, collate_fn=list, **arguments)
    return [sample for [sample] in loader]


def load_inside(index: int) -> tuple[list[tuple[int, ...]], list[str]]:
    """Load in a loader of the calling process, twice; return where it was loaded, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = [*load(Calls(4, processes)), *load(Calls(4, processes))]
    return samples, [str(warning.message) for warning in caught]


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """An iterable dataset that gives lane ``i`` of ``n`` the items of ``function(i, n, *args)``."""

    def __init__(self, function: Callable[..., Iterable[Any]], *args: Any) -> None:
        self.function = function
        self.args = args

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        lane, lanes = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(self.function(lane, lanes, *self.args))


class Blind(Stream):
    """One that never looks at its worker info: each lane reads all of ``function(*args)``."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.function(*self.args))


class Sized(Stream):
    """One that says how long it is: as the first argument says."""

    def __len__(self) -> int:
        length: int = self.args[0]
        return length


def note(path: str, *what: object) -> None:
    """Append a line to a file that all processes share."""
    with open(path, "a") as log:
        log.write(" ".join(map(str, what)) + "\n")


def first_time(path: str) -> bool:
    """Whether this is the first call with ``path``, in any process."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def of_lengths(lane: int, lanes: int, *lengths: int) -> Iterator[int]:
    """Yield ``lengths[lane]`` items: 100 * lane, 100 * lane + 1, ..."""
    yield from range(100 * lane, 100 * lane + lengths[lane])


def seeds_own(lane: int, lanes: int, end: int, gate: Gate) -> Iterator[int]:
    """The seed's own stream: contiguous shares, of which what is above 10 is slow: it waits at the gate."""
    per_lane = -(-end // lanes)
    for item in range(lane * per_lane, min((lane + 1) * per_lane, end)):
        if item > 10:
            gate.arrive(item)
            gate.wait()
        yield item


def held_back(lane: int, lanes: int, length: int, gate: Gate, others: int | None = None) -> Iterator[int]:
    """Yield 100 * lane and so on; lane 1 waits at the gate before each item. Others may have another length."""
    for item in range(100 * lane, 100 * lane + (length if lane == 1 or others is None else others)):
        if lane == 1:
            gate.wait()
        yield item


def for_ever(lane: int, lanes: int) -> Iterator[int]:
    """Yield every ``lanes``-th number."""
    return itertools.count(lane, lanes)


def with_pids(lane: int, lanes: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield lane and pid, ``length`` times."""
    for _ in range(length):
        yield lane, os.getpid()


def telling_its_end(lane: int, lanes: int, length: int, gate: Gate) -> Iterator[int]:
    """Arrive at the gate, as the lane, when the generator is closed or ends."""
    try:
        yield from range(length)
    finally:
        gate.arrive(lane)


def who(lane: int, lanes: int) -> Iterator[tuple[int, ...]]:
    """Yield id, number of workers, seed, and whether the info's dataset is a Stream."""
    info = get_worker_info()
    yield info.id, info.num_workers, info.seed, isinstance(info.dataset, Stream)


def noting(lane: int, lanes: int, path: str, length: int) -> Iterator[int]:
    """Note each iteration in a file."""
    note(path, "iter", lane)
    return iter(range(100 * lane, 100 * lane + length))


def drawn(lane: int, lanes: int, length: int, path: str = "", at: tuple[int, int] = (-1, 0)) -> Iterator[Any]:
    """Yield random numbers; item ``at[1]`` of lane ``at[0]`` kills its process, once if there is a ``path``."""
    for item in range(length):
        if (lane, item) == at and (not path or first_time(path)):
            os.kill(os.getpid(), signal.SIGKILL)
        yield random.random(), float(torch.rand(())), float(numpy.random.rand())


def hanging(lane: int, lanes: int, length: int, gate: Gate, at: tuple[int, int]) -> Iterator[int]:
    """Yield 100 * lane and so on; at one item it waits at the gate."""
    for item in range(length):
        if (lane, item) == at:
            gate.wait()
        yield 100 * lane + item


def failing(lane: int, lanes: int, length: int, at: tuple[int, int], path: str = "") -> Iterator[int]:
    """Yield 100 * lane and so on; raise at one item, once if there is a ``path``."""
    for item in range(length):
        if (lane, item) == at and (not path or first_time(path)):
            raise OSError(f"cannot read {item}")
        yield 100 * lane + item


def failing_at_once(lane: int, lanes: int, length: int, path: str = "") -> Iterator[int]:
    """Raise in lane 0's ``iter``, once if there is a ``path``."""
    if lane == 0 and (not path or first_time(path)):
        raise OSError("cannot open it")
    return iter(range(100 * lane, 100 * lane + length))


def without_a(number: int, path: str, samples: list[Any]) -> list[Any]:
    """Collate; raise for a batch that holds ``number``, once if there is a ``path``."""
    if number in samples and (not path or first_time(path)):
        raise ValueError("no such batch")
    return samples


def slow(lane: int, lanes: int, length: int, seconds: float, path: str, at: int) -> Iterator[int]:
    """Take ``seconds`` an item; kill the process once, at one item."""
    for item in range(length):
        if item == at and first_time(path):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        yield item


def large(lane: int, lanes: int, length: int, size: int) -> Iterator[torch.Tensor]:
    """Yield tensors of ``size`` bytes."""
    for item in range(length):
        yield torch.full((size,), lane * length + item, dtype=torch.uint8)


class Range(IterableDataset[int]):
    """Numbers, of which a `take_share` leaves each lane its own; it does not look at its worker info itself."""

    def __init__(self, length: int) -> None:
        self.numbers = range(length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def take_share(worker: int) -> None:
    """A worker_init_fn that splits the dataset of its worker."""
    info = get_worker_info()
    assert info.id == worker
    info.dataset.numbers = info.dataset.numbers[info.id :: info.num_workers]


class Once(IterableDataset[int]):
    """One that can be iterated only once."""

    def __init__(self, length: int) -> None:
        self.numbers = iter(range(length))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


class Announcing(ManualExecutor):
    """Tells the test of each call that was submitted, in whichever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = super().submit(fn, *args, **kwargs)
        self.submitted.put(len(self.calls) - 1)
        return future

    def await_call(self) -> int:
        """Return the number of the next call, when it has come."""
        return self.submitted.get(timeout=TIMEOUT)


def drain(iterator: Iterator[Any]) -> tuple[list[Any], list[Exception]]:
    """Return what an iterator yields, and what it raises on its way."""
    batches: list[Any] = []
    errors: list[Exception] = []
    while True:
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error)

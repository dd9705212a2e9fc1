"""What tests have workers do: gates that hold samples back, and datasets that say where they ran.

Workers and scripts import this file by name; it is nobody's installed package, so no fork server ever imports it.
"""

import os
import select
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fifobatch import FifoLoader

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


def processes(index: int, *others: object) -> tuple[int, ...]:
    """Return the pids of the worker and of the fork servers that it comes from, the base last."""
    return (os.getpid(), *(parent.pid for parent in psutil.Process().parents()))


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

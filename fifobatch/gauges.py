"""What the benchmark reads from the system: memory, descriptors, the end of processes.

Runs in its child interpreters. MB are 1e6 bytes.
"""

import multiprocessing
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "await_end",
    "private_megabytes",
    "program_seconds",
    "resources",
    "shared_megabytes",
    "tree_megabytes",
]


def program_seconds(code: str) -> float:
    """Return how long ``python -c code`` takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def await_end(pids: Iterable[int]) -> None:
    """Wait until these processes have ended, and this one's own children."""
    for child in multiprocessing.active_children():
        child.join()
    if sys.platform == "linux":  # our workers are the fork server's children, unknown to multiprocessing
        for pid in pids:
            try:
                ended = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            select.select([ended], [], [])
            os.close(ended)


def private_megabytes(pid: int) -> float:
    """Return the memory of a process that it shares with none."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def shared_megabytes() -> float:
    """Return the shared memory of the machine: of memory files, and of /dev/shm."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) * 1024 / 1e6


def resources() -> tuple[float, int]:
    """Return this process's resident memory in MB, and its descriptors, mappings and threads together."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    lines = len(Path("/proc/self/maps").read_text().splitlines())
    return resident, lines + len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))


def tree_megabytes() -> float:
    """Return the proportional memory of this process and all below it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    tree = {os.getpid()}
    for _ in parents:
        tree |= {pid for pid, parent in parents.items() if parent in tree}
    total = 0.0
    for pid in tree:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6
    return total

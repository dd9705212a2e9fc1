"""What ``python -m fifobatch bench`` measures: each workload is a function whose docstring says what it asks, and how.

Runs in the child interpreters that `bench` starts, in their main thread; the datasets run in the loaders' workers. This
module is imported by its name in all of them, so that torch's ``spawn`` finds the datasets, too.

- A *warm* workload has one interpreter. Every contender's workers are started by an epoch that is not timed; then the
  contenders load one epoch after another, round 1: A B C, round 2: B C A, and so on. Time runs from ``iter()``. They
  are in `warm`, and the one that loads pairs from two datasets in `overlap`.
- A *fresh* workload has an interpreter for each contender and round, in the same rotation. Time runs from the
  construction of the loader, if the workload does not say otherwise. They are here.

With ``--quick`` there are fewer samples, and two workers instead of eight in what is fresh.

All contenders load the same batches of the same dataset with as many workers, keep their workers between epochs where
they can, and have default settings otherwise.
"""

import importlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fifobatch import BatchExecutor, FifoLoader, PlanError
from fifobatch.arguments import describe, find, find_dataset
from fifobatch.contenders import FIFOBATCH, IDEAL, WORKERS, Measured, make_loader, measure_epochs
from fifobatch.gauges import (
    await_end,
    private_megabytes,
    program_seconds,
    resources,
    shared_megabytes,
    tree_megabytes,
)
from fifobatch.overlap import PAIRED
from fifobatch.warm import WARM, Slices

__all__ = ["FRESH", "answer", "own"]

PACKAGE_SECONDS = 1.0
PACKAGE = "fifobatch_bench_package"


class Pids:
    """Samples that say which process loaded them, after a moment that gives every worker its turn."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return os.getpid()


def cold(contender: str, num_workers: int, torch_seconds: float) -> list[Measured]:
    """First batch of a program: how long does it wait for its workers?

    8 workers. From the construction of the loader until the first batch, after torch, fifobatch and the dataset's
    module have been imported, which every contender needs alike. The ideal is what ``import torch`` took in the same
    interpreter, by the clock in it: workers that are not forked from the program cannot be there sooner.
    ``python -c "import torch"`` as a program, without what a bare interpreter takes, is shown, too. It takes longer,
    because torch needs its time to exit.
    """
    if contender == IDEAL:
        program = program_seconds("import torch") - program_seconds("pass")
        return [Measured("cold: import torch, program", "s", IDEAL, program)]
    measured = [Measured("cold: first batch", "s", contender, _first_batch(contender, Pids(128, 0.0), num_workers))]
    if contender == FIFOBATCH:
        measured.append(Measured("cold: first batch", "s", IDEAL, torch_seconds))
    return measured


def package(contender: str, num_workers: int, torch_seconds: float) -> list[Measured]:
    """The same with a package that takes 1 s to import: how often is it?

    The dataset's class comes from an installed package: one in a temporary ``site-packages`` that sleeps for a second
    when it is imported. Measured as `cold`, after the program has imported it. The ideal is torch's import and that
    second: each once.
    """
    figure = "package: first batch"
    ideal = [Measured(figure, "s", IDEAL, torch_seconds + PACKAGE_SECONDS)] if contender == FIFOBATCH else []
    with TemporaryDirectory() as folder:
        home = Path(folder, "site-packages", PACKAGE)
        home.mkdir(parents=True)
        lines = [
            "import time",
            "from fifobatch.workloads import Pids",
            f"time.sleep({PACKAGE_SECONDS})",
            "class Packaged(Pids): pass",
        ]
        Path(home, "__init__.py").write_text("\n".join(lines))
        sys.path.append(str(home.parent))
        dataset = importlib.import_module(PACKAGE).Packaged(128, 0.0)
        return [Measured(figure, "s", contender, _first_batch(contender, dataset, num_workers)), *ideal]


def second(contender: str, num_workers: int, _: float) -> list[Measured]:
    """First batch of a program's second loader: what does one more cost?

    8 workers. From the construction of the second loader until its first batch. The first loader has loaded an epoch,
    nothing refers to it any more, and its worker processes have ended: they are waited for. The second follows at once;
    two seconds later our fork server would have left, and its start would be cold again.
    """
    await_end(_pids(make_loader(contender, Pids(256, 0.01), batch_size=1, num_workers=num_workers)))
    return [Measured("second: first batch", "s", contender, _first_batch(contender, Pids(128, 0.0), num_workers))]


def memory(contender: str, num_workers: int, _: float) -> list[Measured]:
    """Private memory of a worker: what does one more cost?

    8 workers. ``Private_Clean`` and ``Private_Dirty`` of ``/proc/PID/smaps_rollup``, after an epoch of a dataset that
    holds nothing; the median of the workers. Pages that several processes share, such as torch's code, are in neither.
    """
    if sys.platform != "linux":
        return []
    loader = make_loader(contender, Pids(256, 0.01), batch_size=1, num_workers=num_workers)
    pids = _pids(loader)  # its workers stay as long as the loader does
    return [Measured("memory: private, a worker", "MB", contender, statistics.median(map(private_megabytes, pids)))]


def bounded(contender: str, num_workers: int, _: float) -> list[Measured]:
    """A slow loop: how much memory is under way, and does any stay?

    4 workers, images as in `transport`, 8 batches under way (that is ``prefetch_factor=2`` in torch's loader too). The
    shared memory of the whole machine (``Shmem`` of ``/proc/meminfo``) is read at each of 50 batches, for each of
    which the loop takes 20 ms; the peak counts from what it was before. The ideal is the 8, the one in the loop's hand
    and the next. Then the loop runs on, and what the program has after 2,000 batches (400 of torch's, which takes long)
    is set against what it had after 200: resident memory, and descriptors, mappings and threads together.
    """
    if sys.platform != "linux":
        return []
    quick = num_workers < WORKERS
    early, late = (20, 60) if quick else (200, 2000 if contender == FIFOBATCH else 400)
    before, peak, counts = shared_megabytes(), 0.0, {}
    loader = make_loader(contender, Slices(late * 32, 3, 224, 224), batch_size=32, num_workers=4)
    for number, _batch in enumerate(loader, 1):
        if number <= 50:
            time.sleep(0.02)
            peak = max(peak, shared_megabytes() - before)
        if number in (early, late):
            counts[number] = resources()
    (memory_early, count_early), (memory_late, count_late) = counts[early], counts[late]
    return [
        Measured("bounded: peak shared", "MB", contender, peak),
        Measured("bounded: peak shared", "MB", IDEAL, 10 * 32 * 3 * 224 * 224 * 4 / 1e6),
        Measured("bounded: growth, resident", "MB", contender, memory_late - memory_early),
        Measured("bounded: growth, handles", "count", contender, count_late - count_early),
    ]


def in_memory(contender: str, num_workers: int, _: float) -> list[Measured]:
    """A dataset of 1 GiB in memory: is it copied for each worker?

    8 workers, a `TensorDataset`, shuffled. How much the program and all its workers have more (``Pss``, in which a page
    that n processes share counts as an n-th in each) in the middle of the epoch than before the loader was made, the
    dataset being there already; and the time to the first batch. Ours has warm workers, of an executor that has loaded
    something else: that is what an executor is for, and torch has nothing like it. So torch's figures have the start of
    its workers in them.
    """
    if sys.platform != "linux":
        return []
    dataset = TensorDataset(torch.rand(2**18 if num_workers == WORKERS else 2**15, 1024))
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "shuffle": True}
    if contender == FIFOBATCH:
        options["executor"] = executor = BatchExecutor(num_workers)
        _pids(FifoLoader(Pids(256, 0.01), executor=executor))
    before = tree_megabytes()
    start = time.perf_counter()
    batches = iter(make_loader(contender, dataset, batch_size=64, num_workers=num_workers, **options))
    next(batches)
    seconds = time.perf_counter() - start
    for _batch in itertools.islice(batches, len(dataset) // 128):
        pass
    return [
        Measured("in memory: growth", "MB", contender, tree_megabytes() - before),
        Measured("in memory: first batch", "s", contender, seconds),
    ]


class Numbered(Pids):
    """The same, and which sample it is."""

    def __getitem__(self, index: int) -> Any:
        return index, super().__getitem__(index)


def recovery(contender: str, num_workers: int, _: float) -> list[Measured]:
    """A worker is killed: how long until the next batch?

    2 workers, which are warm; samples of 1 ms, four a batch. In each of 10 epochs, when both workers have delivered,
    one of them, drawn at random, gets a SIGKILL. From then until the first batch from a process that was not there
    before: what had been loaded, or was by the other worker at the last moment, does not count. The median of the 10.
    Every sample has to come once. torch's loader has no such time: it raises a RuntimeError when a worker dies.
    """
    if sys.platform != "linux":
        return []
    draw = random.Random(0)
    loader = make_loader(contender, Numbered(400, 0.001), batch_size=4, num_workers=2)
    seconds = [_recovery_seconds(loader, draw) for _kill in range(3 if num_workers < WORKERS else 10)]
    return [Measured("recovery: next batch", "s", contender, statistics.median(seconds))]


def _recovery_seconds(loader: Iterable[Any], draw: random.Random) -> float:
    workers: set[int] = set()
    came: list[int] = []
    killed = seconds = 0.0
    for indices, pids in loader:
        came += indices.tolist()
        pid = int(pids[0])
        if killed:
            if not seconds and pid not in workers:
                seconds = time.perf_counter() - killed
            continue
        workers.add(pid)
        if len(workers) == 2 and len(came) >= 80:
            killed = time.perf_counter()
            os.kill(draw.choice(sorted(workers)), signal.SIGKILL)
    if sorted(came) != list(range(400)):
        raise RuntimeError(f"{len(came)} samples came, {len({*came})} of 400, after a worker was killed")
    if not seconds:
        raise RuntimeError("no worker was killed: only one has loaded" if not killed else "no other worker has loaded")
    return seconds


def _first_batch(contender: str, dataset: Any, num_workers: int) -> float:
    start = time.perf_counter()
    iterator = iter(make_loader(contender, dataset, batch_size=4, num_workers=num_workers))
    next(iterator)
    return time.perf_counter() - start


def _pids(loader: Iterable[Any]) -> set[int]:
    return {pid for batch in loader for pid in batch.tolist()}


def own(contender: str, name: str, collate_fn: str | None, **options: Any) -> list[Measured]:
    """Your dataset: the time to its first batch, and an epoch with warm workers.

    The first batch is timed from the construction of the loader in a fresh interpreter, after the dataset is made. Then
    that epoch is finished, and the next one timed.
    """
    dataset = find_dataset(name)
    options["batch_size"] = min(options["batch_size"], len(dataset))  # as numbers go, torch has a limit
    options["collate_fn"] = find(collate_fn) if collate_fn else None
    options["generator"] = torch.Generator().manual_seed(0)  # the same order for all
    start = time.perf_counter()
    loader = make_loader(contender, dataset, **options)
    iterator = iter(loader)
    next(iterator)
    first = time.perf_counter() - start
    for _ in iterator:
        pass
    del iterator
    start = time.perf_counter()
    batches = sum(1 for _ in loader)
    seconds = time.perf_counter() - start
    return [
        Measured("first batch", "s", contender, first),
        Measured("epoch, warm workers", "s", contender, seconds),
        Measured("the same, as a rate", "batches/s", contender, batches / seconds),
    ]


FRESH = {
    "cold": cold,
    "package": package,
    "second": second,
    "memory": memory,
    "bounded": bounded,
    "in_memory": in_memory,
    "recovery": recovery,
}


def answer(request: str, torch_seconds: float) -> None:
    """Measure what `bench` asks for, and print the answer for it on stdout: both are JSON."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the user's dataset prints is not the answer
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores
    warnings.filterwarnings("ignore", "num_workers=.* is more than two a core", UserWarning)
    try:
        measured = _answer(torch_seconds, **json.loads(request))
        reply: dict[str, Any] = {"measured": measured}
    except Exception as error:  # the process boundary
        reply = {"error": "; ".join(describe(error).split("\n")), "status": 2 if isinstance(error, PlanError) else 1}
    with stdout:
        json.dump(reply, stdout)


def _answer(
    torch_seconds: float, workload: str, contenders: list[str], rounds: int, quick: bool, options: dict[str, Any]
) -> list[Measured]:
    if workload in WARM:
        return measure_epochs(WARM[workload](quick), contenders, rounds)
    if workload in PAIRED:
        return PAIRED[workload](contenders, rounds, quick)
    (contender,) = contenders
    if workload in FRESH:
        return FRESH[workload](contender, 2 if quick else WORKERS, torch_seconds)
    return own(contender, **options)

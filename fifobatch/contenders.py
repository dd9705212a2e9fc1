"""The loaders that ``python -m fifobatch bench`` compares, and how they take turns. Runs in its child interpreters.

The other libraries are imported by name, where they are used: nothing else needs them.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fifobatch import FifoLoader, PairedLoader

__all__ = [
    "FIFOBATCH",
    "IDEAL",
    "ORDERS",
    "PEERS",
    "STARTS",
    "TWO_LOADERS",
    "WORKERS",
    "Epoch",
    "Measured",
    "installed_peers",
    "make_loader",
    "make_pairs",
    "measure_epochs",
    "rotated",
]

T = TypeVar("T")

WORKERS = 8  # unless a workload says otherwise

FIFOBATCH = "fifobatch"
ORDERS = ["torch in_order=True", "torch in_order=False"]
STARTS = [f"torch {method}" for method in ("fork", "spawn") if method in multiprocessing.get_all_start_methods()]
TWO_LOADERS = ["torch by hand", "torch zip"]  # what torch has for pairs
PEERS = ["joblib", "torchdata", "spdl"]
IDEAL = "ideal"  # measured as if it were a contender

TORCH_OPTIONS: dict[str, dict[str, Any]] = {
    "torch in_order=True": {"in_order": True},
    "torch in_order=False": {"in_order": False},
    "torch fork": {"multiprocessing_context": "fork"},
    "torch spawn": {"multiprocessing_context": "spawn"},
}


def installed_peers() -> list[str]:
    """Return those of `PEERS` that can be imported."""
    return [name for name in PEERS if find_spec(name) is not None]


def make_loader(contender: str, dataset: Any, *, batch_size: int, num_workers: int, **options: Any) -> Iterable[Any]:
    """Return what yields the batches of ``dataset``, an epoch at each ``iter()``.

    Workers stay from one epoch to the next, but for torchdata.nodes and SPDL: theirs start at each, and that is in
    their figures.

    Args:
        contender: Whose loader.
        dataset: Its samples.
        batch_size: Samples a batch.
        num_workers: Worker processes.
        options: Further arguments of torch's `DataLoader`, which the other libraries do not take.
    """
    if contender == FIFOBATCH:
        options |= {} if "executor" in options else {"persistent_workers": True}
        return FifoLoader(dataset, batch_size=batch_size, num_workers=num_workers, **options)
    if contender in TORCH_OPTIONS:
        options |= TORCH_OPTIONS[contender]
        return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, persistent_workers=True, **options)
    loader: Iterable[Any]
    if contender == "spdl":
        get_loader = import_module("spdl.dataloader").get_pytorch_dataloader
        loader = get_loader(dataset, batch_size, num_workers=num_workers, in_order=False)
        return loader
    chunks = [range(len(dataset))[first : first + batch_size] for first in range(0, len(dataset), batch_size)]
    load = partial(_load, dataset)
    if contender == "joblib":
        return _Joblib(load, chunks, num_workers)
    nodes = import_module("torchdata.nodes")
    source = nodes.IterableWrapper(chunks)
    loader = nodes.Loader(nodes.ParallelMapper(source, load, num_workers, in_order=False, method="process"))
    return loader


def _load(dataset: Any, indices: range) -> Any:
    return default_collate([dataset[index] for index in indices])


class _Joblib:
    """An epoch is one call of `joblib.Parallel`; its loky workers stay from call to call."""

    def __init__(self, load: Callable[[range], Any], chunks: list[range], num_workers: int) -> None:
        self._load = load
        self._chunks = chunks
        self._num_workers = num_workers

    def __iter__(self) -> Iterator[Any]:
        joblib = import_module("joblib")
        parallel = joblib.Parallel(n_jobs=self._num_workers, return_as="generator_unordered")
        batches: Iterator[Any] = parallel(joblib.delayed(self._load)(chunk) for chunk in self._chunks)
        return batches


def make_pairs(contender: str, inputs: Any, targets: Any, *, batch_size: int, num_workers: int) -> Iterable[Any]:
    """Return what yields each input batch with its target batch or a future of it, an epoch at each ``iter()``.

    Workers stay from one epoch to the next.

    Args:
        contender: `FIFOBATCH`, or one of `TWO_LOADERS`.
        inputs: The samples of the inputs.
        targets: Those of the targets.
        batch_size: Samples a batch.
        num_workers: Worker processes in all, an even number: of torch's two loaders, each has half of them.
    """
    if contender == FIFOBATCH:
        return PairedLoader(inputs, targets, batch_size=batch_size, num_workers=num_workers, persistent_workers=True)
    loaders = [
        DataLoader(dataset, batch_size=batch_size, num_workers=num_workers // 2, persistent_workers=True)
        for dataset in (inputs, targets)
    ]
    return (_ByHand if contender == "torch by hand" else _Zip)(*loaders)


class _Zip:
    """Both batches of a pair, when both are there."""

    def __init__(self, inputs: Iterable[Any], targets: Iterable[Any]) -> None:
        self._inputs = inputs
        self._targets = targets

    def __iter__(self) -> Iterator[Any]:
        return zip(self._inputs, self._targets)


class _ByHand(_Zip):
    """The target batch is fetched in a thread, while the loop is busy with the input batch."""

    def __iter__(self) -> Iterator[Any]:
        targets = iter(self._targets)  # its workers begin now
        with ThreadPoolExecutor(1) as thread:
            for batch in self._inputs:
                yield batch, thread.submit(next, targets)


# -- measuring


class Measured(NamedTuple):
    """One value of one contender, in one round."""

    figure: str
    unit: str
    contender: str
    value: float


@dataclass(frozen=True)
class Epoch:
    """What is loaded for one figure, again and again, with warm workers.

    Attributes:
        figure: What the figure is called.
        unit: ``s``, or of a rate: what comes in a second.
        dataset: Its samples.
        batch_size: Samples a batch; the dataset has a multiple of it.
        num_workers: Worker processes.
        amount: How much of the unit a batch is; None to measure the seconds of an epoch.
        consume: What the loop does with a batch.
        ideal: The best possible value, if it is known.
        schedule: When each batch had better come, in seconds; then it is measured when they do.
    """

    figure: str
    unit: str
    dataset: Any
    batch_size: int
    num_workers: int
    amount: float | None = None
    consume: Callable[[Any], object] = id
    ideal: float | None = None
    schedule: Sequence[float] = ()

    def measured(self, contender: str, seconds: float, arrivals: Sequence[float]) -> list[Measured]:
        """Return what there is to say of an epoch that took so long, and of when its batches came."""
        if self.schedule:
            late = statistics.median(came / best for came, best in zip(arrivals, self.schedule, strict=True))
            return [
                Measured(f"{self.figure}: k-th batch", "ideal's", contender, late),
                Measured(f"{self.figure}: last batch", "s", contender, arrivals[-1]),
            ]
        value = seconds if self.amount is None else self.amount * len(arrivals) / seconds
        return [Measured(self.figure, self.unit, contender, value)]


def rotated(contenders: Sequence[T], number: int) -> list[T]:
    """Return the contenders in the order of a round: each is first in turn."""
    place = number % len(contenders)
    return [*contenders[place:], *contenders[:place]]


def measure_epochs(epochs: Iterable[Epoch], contenders: Sequence[str], rounds: int) -> list[Measured]:
    """Measure a warm workload: an epoch of each contender that is not counted, then one a round.

    Streams are not for the other libraries.

    Raises:
        RuntimeError: A contender yielded too few batches.
    """
    torch.set_num_threads(1)  # what the loop does with a batch shall not fight with the workers for the cores
    measured = []
    for epoch in epochs:
        if epoch.ideal is not None:
            measured.append(Measured(epoch.figure, epoch.unit, IDEAL, epoch.ideal))
        if epoch.schedule:
            measured += epoch.measured(IDEAL, epoch.schedule[-1], epoch.schedule)
        able = [name for name in contenders if name not in PEERS or not isinstance(epoch.dataset, IterableDataset)]
        loaders = {
            contender: make_loader(contender, epoch.dataset, batch_size=epoch.batch_size, num_workers=epoch.num_workers)
            for contender in able
        }
        # torch's first: its workers are forked from here, where the others will have threads.
        for contender in sorted(able, key=lambda contender: contender not in ORDERS):
            _measure(epoch, contender, loaders[contender])
        for number in range(rounds):
            for contender in rotated(able, number):
                measured += _measure(epoch, contender, loaders[contender])
    return measured


def _measure(epoch: Epoch, contender: str, loader: Iterable[Any]) -> list[Measured]:
    arrivals = []
    start = time.perf_counter()
    try:
        for batch in loader:
            arrivals.append(time.perf_counter() - start)
            epoch.consume(batch)
        seconds = time.perf_counter() - start
        if len(arrivals) * epoch.batch_size != len(epoch.dataset):
            raise RuntimeError(f"{len(arrivals)} batches came instead of {len(epoch.dataset) // epoch.batch_size}")
    except Exception as error:
        error.add_note(f"In {epoch.figure}, with {contender}.")
        raise
    return epoch.measured(contender, seconds, arrivals)

"""The warm workloads of ``python -m fifobatch bench``: what its contenders load, one epoch after another.

Runs in the child interpreters that `bench` starts, in their main thread; the datasets run in the loaders' workers.
`workloads` says how it is measured.
"""

import functools
import heapq
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from fifobatch.contenders import WORKERS, Epoch

__all__ = ["WARM", "Slices", "lane_schedule", "list_schedule"]

SLOW_SECONDS, FAST_SECONDS, SLOW_SHARE = 0.06, 0.002, 0.1
LANE_SECONDS = 0.008, 0.016, 0.032, 0.064  # a sample


class Skewed:
    """Samples that sleep; a tenth of them, spread at random but always the same, 30 times as long as the others."""

    def __init__(self, length: int) -> None:
        slow = set(random.Random(0).sample(range(length), round(SLOW_SHARE * length)))
        self.seconds = [SLOW_SECONDS if index in slow else FAST_SECONDS for index in range(length)]

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds[index])
        return index


def list_schedule(seconds: Iterable[float], workers: int) -> float:
    """Return when the last of these tasks ends if each in turn goes to the worker that is free first."""
    free = [0.0] * workers
    for duration in seconds:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def skew(quick: bool) -> list[Epoch]:
    """An epoch with 10 % slow samples: how much do they hold up?

    8 workers, 1,200 samples, four a batch. The loop does nothing with them, so an epoch's seconds are the makespan.
    Samples sleep: the number of cores does not matter, nor does what a loader costs, unless it keeps a worker waiting.
    The ideal is list scheduling: each batch, in the order of the plan, goes to the worker that is free first, at no
    cost.
    """
    dataset, size = Skewed(240 if quick else 1200), 4
    batches = [sum(dataset.seconds[first : first + size]) for first in range(0, len(dataset), size)]
    return [Epoch("skew: epoch", "s", dataset, size, WORKERS, ideal=list_schedule(batches, WORKERS))]


class Integers(IterableDataset[int]):
    """A ``range`` as a stream: each worker has every n-th."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        share = get_worker_info()
        assert share is not None
        return iter(range(share.id, self.length, share.num_workers))


class Lanes(Integers):
    """The same, with samples that sleep; in each share twice as long as in the one before."""

    def __iter__(self) -> Iterator[int]:
        share = get_worker_info()
        assert share is not None
        for number in super().__iter__():
            time.sleep(LANE_SECONDS[share.id])
            yield number


def lane_schedule(seconds: Iterable[float], batches: int) -> list[float]:
    """Return when the k-th batch is there if each lane has so many, and makes one after another without a pause.

    Args:
        seconds: What a batch takes in each lane.
        batches: How many each lane has.
    """
    return sorted(each * count for each in seconds for count in range(1, batches + 1))


def streams(quick: bool) -> list[Epoch]:
    """Four lanes of unequal speed: when does the k-th batch come?

    4 workers, 12 batches of four samples in each; a batch takes 32, 64, 128 and 256 ms, by worker. Samples sleep, as in
    `skew`, and nothing is done with the batches. The ideal is that each worker makes one batch after another, from
    ``iter()`` on, at no cost, and that each batch comes when it is made. For every k, the time until k batches had come
    is divided by the ideal's: the figure of an epoch is the median over k. The last batch is that of the slowest
    worker, which no loader can help.
    """
    size, batches = 4, 4 if quick else 12
    schedule = lane_schedule([size * each for each in LANE_SECONDS], batches)
    return [Epoch("streams", "s", Lanes(len(schedule) * size), size, len(LANE_SECONDS), schedule=schedule)]


@functools.cache
def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(64, *shape)


class Slices:
    """Samples that cost next to nothing: slices of one random tensor, which each worker makes at its first sample."""

    def __init__(self, length: int, *shape: int) -> None:
        self.length = length
        self.shape = shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return _noise(self.shape)[index % 64]


class Records(Slices):
    """Samples that are a dict of six tensors."""

    def __getitem__(self, index: int) -> Any:
        return {key: _noise(self.shape)[(index + number) % 64] for number, key in enumerate("abcdef")}


def _read(batch: Any) -> None:
    for tensor in batch.values() if isinstance(batch, Mapping) else [batch]:
        tensor.sum()


def transport(quick: bool) -> list[Epoch]:
    """Bytes a second: how fast do finished batches reach the loop?

    2 workers. Samples are slices of a random tensor that each worker has, so all that a worker does for a batch is
    `default_collate`: one copy, and the one that torch itself makes. Batches are of 32 samples: images of 3x224x224
    float32 (19 MB a batch), once dropped unread and once read, 1 MiB batches, and dicts of six 2 MiB tensors; these
    two are read. *Read* is ``sum()`` of every tensor, by one thread, which touches every byte: a loader that only maps
    memory pays for its pages there. GB are 1e9 bytes.
    """
    size, scale = 32, 8 if quick else 1
    images, small = Slices(80 // scale * size, 3, 224, 224), Slices(500 // scale * size, 8192)
    records = Records(60 // scale * size, 16384)
    gigabytes = {"images": size * 3 * 224 * 224 * 4 / 1e9, "small": size * 8192 * 4 / 1e9}
    return [
        Epoch("transport: images unread", "GB/s", images, size, 2, gigabytes["images"]),
        Epoch("transport: images read", "GB/s", images, size, 2, gigabytes["images"], _read),
        Epoch("transport: 1 MiB batches", "GB/s", small, size, 2, gigabytes["small"], _read),
        Epoch("transport: dicts of six", "GB/s", records, size, 2, 12 * gigabytes["small"], _read),
    ]


def tiny(quick: bool) -> list[Epoch]:
    """Batches of 16 integers a second: what does a batch cost by itself?

    2 workers. The dataset is a ``range``, so the workers have nothing to do but `default_collate`; then it is the same
    numbers as a stream, of which each worker reads its half.
    """
    length = 16 * (300 if quick else 2000)
    return [
        Epoch("tiny: 16 integers", "batches/s", range(length), 16, 2, 1),
        Epoch("tiny: 16 from a stream", "batches/s", Integers(length), 16, 2, 1),
    ]


WARM = {"skew": skew, "streams": streams, "transport": transport, "tiny": tiny}

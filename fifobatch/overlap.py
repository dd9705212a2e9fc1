"""The workload of pairs of ``python -m fifobatch bench``: how well loading targets overlaps with computing.

Runs in a child interpreter that `bench` starts, in its main thread; the datasets run in the loaders' workers. It is
warm, as those of `warm` are, but loads from two datasets, and its loop computes.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from fifobatch.contenders import IDEAL, TWO_LOADERS, Measured, make_pairs, rotated

__all__ = ["PAIRED", "product"]

STEP_SECONDS = 0.04  # of the model, and of a sample
NUM_WORKERS, BATCH_SIZE = 4, 2  # a pair is four samples, so all workers together load one in the time of a step


class Half:
    """Samples that sleep: the inputs, or the targets."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(STEP_SECONDS)
        return index


def product(seconds: float) -> Callable[[], object]:
    """Return a matrix product that takes about so long here.

    Its size is found by processor time, so that what else runs on the machine hardly counts.
    """
    size = 512
    for _ in range(2):  # larger ones may be faster than the first one says
        step = partial(torch.mm, torch.rand(size, size), torch.rand(size, size))
        size = round(size * (seconds / statistics.median(_thread_seconds(step) for _ in range(20))) ** (1 / 3))
    return partial(torch.mm, torch.rand(size, size), torch.rand(size, size))


def _thread_seconds(step: Callable[[], object]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def overlap(contenders: Sequence[str], rounds: int, quick: bool) -> list[Measured]:
    """Pairs from two datasets: do targets load while the model computes?

    4 workers in all, of torch's two loaders 2 each; 100 pairs of batches, two samples in each half. A sample sleeps for
    40 ms, so 4 workers load a pair in 40 ms, and that is what the model's step with it takes, too: nothing may wait for
    long, and an epoch that first loads and then computes takes twice the time. The step sleeps, or is a matrix product
    of the size that takes 40 ms here, in one thread, to leave the other cores to the workers. After it the loop needs
    the target. torch's contenders: *by hand*, in which a thread fetches the target during the step, and ``zip`` of both
    loaders.

    The ideal is what the longer of loading and computing takes: 40 ms a pair, or as many steps without any loading,
    which take their turn in each round as if they were a contender. An epoch's seconds are divided by the ideal's of
    its round. The first pair, which takes a worker 80 ms, is in them: it alone costs every contender 2 %.
    """
    torch.set_num_threads(1)
    pairs = 10 if quick else 100
    inputs, targets = Half(pairs * BATCH_SIZE), Half(pairs * BATCH_SIZE)
    loaders = {
        contender: make_pairs(contender, inputs, targets, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)
        for contender in contenders
    }
    # torch's first: its workers are forked from here, where ours will have threads.
    for contender in sorted(contenders, key=lambda contender: contender not in TWO_LOADERS):
        _epoch_seconds(contender, loaders[contender], int, inputs)
    loaders[IDEAL] = [(batch, batch) for batch in torch.arange(len(inputs)).view(pairs, BATCH_SIZE)]
    measured = []
    steps: dict[str, Callable[[], object]] = {
        "sleeping step": partial(time.sleep, STEP_SECONDS),
        "matrix product": product(STEP_SECONDS),
    }
    for name, step in steps.items():
        figure = f"overlap: {name}"
        for number in range(rounds):
            seconds = {
                contender: _epoch_seconds(contender, loaders[contender], step, inputs)
                for contender in rotated([*loaders], number)
            }
            best = max(pairs * STEP_SECONDS, seconds.pop(IDEAL))
            measured += [Measured(figure, "ideal's", contender, seconds[contender] / best) for contender in contenders]
        measured.append(Measured(figure, "ideal's", IDEAL, 1.0))
    return measured


def _epoch_seconds(contender: str, pairs: Iterable[Any], step: Callable[[], object], samples: Half) -> float:
    came: list[tuple[int, int]] = []
    start = time.perf_counter()
    for batch, target in pairs:
        step()
        loaded = target.result() if isinstance(target, Future) else target
        came += zip(batch.tolist(), loaded.tolist())
    seconds = time.perf_counter() - start
    if sorted(came) != [(index, index) for index in range(len(samples))]:
        raise RuntimeError(f"the pairs of {contender} are not those of the datasets: {came}")
    return seconds


PAIRED = {"overlap": overlap}

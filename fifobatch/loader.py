"""`FifoLoader`: torch's `DataLoader`, with batches in completion order. Runs in the consumer's thread.

torch checks the arguments and builds the samplers; what is replaced is the iterator. At each ``iter()``:

1. draw the epoch's base seed, as torch does, and make the epoch's `BatchPlan`;
2. take the executor: the one passed in, the loader's own (``persistent_workers``), or one for this iterator only;
3. let `BatchExecutor.iterate` fill the window, and wrap what comes: pinned memory, progress bar.

Without workers, or where this process may not have children, `_InProcess` loads in this process instead.
"""

import functools
import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from fifobatch import server
from fifobatch.completion import BatchFuture, Completions
from fifobatch.errors import ClosedError, PlanError
from fifobatch.executor import BatchExecutor
from fifobatch.pickling import rebuild, report
from fifobatch.plan import Batch, BatchPlan, Chunk, refuse_iterable
from fifobatch.pool import cpu_count
from fifobatch.progress import Progress
from fifobatch.window import Window, check_count
from fifobatch.worker import Payload, fetch, located, seeds

__all__ = ["FifoLoader", "LoaderIterator"]

T_co = TypeVar("T_co", covariant=True)


class FifoLoader(DataLoader[T_co]):
    """Load batches in worker processes, and yield each as soon as it is complete: first completed, first out.

    Takes every argument of `torch.utils.data.DataLoader`, in the same order and with the same meaning, but for these:

    Example:
        >>> from fifobatch import FifoLoader
        >>> loader = FifoLoader(range(6), batch_size=2, num_workers=2)
        >>> sorted(batch.tolist() for batch in loader)
        [[0, 1], [2, 3], [4, 5]]

    Args:
        num_workers: None, the default, is the number of cores that this process may use. 0 loads in this process.
        timeout: Seconds to wait for the next batch before `ChunkTimeoutError`; 0 waits for ever.
        multiprocessing_context: Refused: workers come from fifobatch's own fork server.
        in_order: True yields in plan order, as ``max_skew=0``. False is the default.
        max_skew: How many places a batch may overtake an earlier one; None for no limit.
        window: Batches that may be under way at once, that is, submitted and not yet yielded, whatever the consumer does;
            ``prefetch_factor * num_workers`` if None. It may be smaller than ``num_workers``.
        progress: Show a tqdm bar; a dict gives tqdm's arguments.
        executor: A `BatchExecutor` to share with other loaders, or any `concurrent.futures.Executor`, instead of workers of
            this loader's own. It is not shut down here.

    Raises:
        PlanError: ``dataset`` is an ``IterableDataset``, or ``multiprocessing_context`` is given.
        TypeError, ValueError: An argument or combination that cannot be; where torch checks it, in torch's words.
    """

    def __init__(
        self,
        dataset: Dataset[T_co] | Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = False,
        max_skew: int | None = None,
        window: int | None = None,
        progress: bool | Mapping[str, Any] = False,
        executor: BatchExecutor | Executor | None = None,
    ) -> None:
        refuse_iterable(dataset)
        if multiprocessing_context is not None:
            raise PlanError(
                f"multiprocessing_context={multiprocessing_context!r}: fifobatch's workers come from a fork server of its "
                "own; leave it out, or give executor= to load elsewhere"
            )
        if in_order and max_skew not in (None, 0):
            raise ValueError(f"in_order=True and max_skew={max_skew} contradict each other; give one of them")
        if executor is not None:
            executor = _check_executor(executor, worker_init_fn, persistent_workers)
        if num_workers is None:
            num_workers = cpu_count() if executor is None else executor.max_workers
        num_workers = check_count("num_workers", num_workers, 0) if num_workers != -1 else num_workers
        if timeout > 0 and num_workers == 0:
            raise ValueError(f"timeout={timeout} needs worker processes: without any, nothing can be timed out")
        self.max_skew = max_skew
        self.window = window
        self.progress = progress
        self.executor = executor
        self._own_executor: BatchExecutor | None = None
        self._end_lease: Callable[[], None] | None = None
        self._epoch = 0
        self._closed = False
        self._warned: set[str] = set()
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._make_window()  # so that a wrong window or max_skew is refused here

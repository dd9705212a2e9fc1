"""`FifoLoader`: torch's `DataLoader`, with batches in completion order. Runs in the consumer's thread.

torch checks the arguments and builds the samplers; what is replaced is the iterator. At each ``iter()``:

1. draw the epoch's base seed, as torch does, and make the epoch's `BatchPlan`;
2. take the executor: the one passed in, the loader's own (``persistent_workers``), or one for this iterator only;
3. let `BatchExecutor.iterate` fill the window, and wrap what comes: pinned memory, progress bar.

Without workers, or where this process may not have children, `InProcess` loads in this process instead.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fifobatch import checks, server, summary
from fifobatch.asynchronous import AsyncBatches
from fifobatch.attempt import Policy
from fifobatch.completion import Completions
from fifobatch.device import Transfer, check_device
from fifobatch.epoch import LoaderIterator
from fifobatch.errors import PlanError
from fifobatch.executor import BatchExecutor
from fifobatch.inprocess import InProcess
from fifobatch.measures import Span, Statistics
from fifobatch.plan import Batch, BatchPlan, Failure
from fifobatch.pool import cpu_count
from fifobatch.progress import Progress, check_options
from fifobatch.streams import SPLITS
from fifobatch.trace import Trace
from fifobatch.window import Window, check_count

__all__ = ["FifoLoader"]

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
        timeout: Seconds that a chunk may run in its worker, from its first sample to the packed batch: neither starting
            nor queueing nor the consumer count. Then that worker is killed, and `ChunkTimeoutError` shows where it
            hung. 0 is for ever.
        multiprocessing_context: Refused: workers come from fifobatch's own fork server.
        in_order: True yields in plan order, as ``max_skew=0``. False is the default.
        max_skew: How many places a batch may overtake an earlier one; None for no limit.
        window: Batches that may be under way at once, that is, submitted and not yet yielded, whatever the consumer
            does; ``prefetch_factor * num_workers`` if None. It may be smaller than ``num_workers``.
        max_bytes: Bytes of batches that may be under way at once, such as ``512 * 2**20`` or ``"512MiB"``: nothing
            more is submitted while it might pass that, going by the largest batch seen. One batch is always allowed,
            and only one until the first has come. None for no limit but ``window``.
        retries: How often a chunk that fails is tried again, with the same seed, before that is an error.
        retry_on: The exceptions after which it is tried again: a class or a tuple of classes, `ChunkTimeoutError` too.
        on_error: ``"raise"`` raises a chunk's error from ``next()``; the other batches still come. ``"skip"`` leaves
            samples that fail (or kill or stop their worker) out of their batch, notes them in `failures`, and warns of
            them at the end of the epoch.
        progress: Show a tqdm bar; a dict gives tqdm's arguments.
        executor: A `BatchExecutor` to share with other loaders, or any `concurrent.futures.Executor`, instead of
            workers of this loader's own. It is not shut down here.
        split: Who reads what of an ``IterableDataset``. ``"none"``: each worker reads what the dataset yields there, as
            in torch; it has to be a share, by ``get_worker_info()``. ``"auto"`` does the same, and warns if the dataset
            never looks there. ``"stride"``: each of n workers reads all, and keeps every n-th sample. ``"parent"``:
            this process reads, and workers collate (so it is on other executors).
        device: Where batches arrive, such as ``"cuda"``: tensors, however nested, and objects that have a ``to``. They
            are copied in a thread and on a stream of their own: the next one while you have the one before it.

    Raises:
        PlanError: ``multiprocessing_context`` is given, or torch sees no such ``device``.
        TypeError, ValueError: An argument or combination that cannot be; where torch checks it, in torch's words.
    """

    _frames = 0  # between this class's __init__ and the user's line

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
        max_bytes: int | str | None = None,
        retries: int = 0,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = Exception,
        on_error: str = "raise",
        progress: bool | Mapping[str, Any] = False,
        executor: BatchExecutor | Executor | None = None,
        split: str = "auto",
        device: torch.device | str | int | None = None,
    ) -> None:
        if multiprocessing_context is not None:
            raise PlanError(
                f"multiprocessing_context={multiprocessing_context!r}: fifobatch's workers come from a fork server of "
                "its own; leave it out, or give executor= to load elsewhere"
            )
        if in_order and max_skew not in (None, 0):
            raise ValueError(f"in_order=True and max_skew={max_skew} contradict each other; give one of them")
        shared = None if executor is None else checks.shared_executor(executor, num_workers, worker_init_fn)
        if num_workers is None:
            num_workers = cpu_count() if shared is None else shared.max_workers
        num_workers = check_count("num_workers", num_workers, 0)
        checks.check_functions(collate_fn=collate_fn, worker_init_fn=worker_init_fn)
        check_options(progress)
        checks.check_timeout(timeout, num_workers, shared)
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: give one of {', '.join(map(repr, SPLITS))}")
        Policy.of(retries, retry_on, on_error, timeout)
        self.retries = retries
        self.retry_on = retry_on
        self.on_error = on_error
        self.max_skew = max_skew
        self.window = window
        self.max_bytes = max_bytes
        self.progress = progress
        self.executor = executor
        self.split = split
        self.device = device
        self._device = check_device(device)
        self._shared = shared
        self._epoch = 0
        self._warned_pinning = False
        self._had_batches = False
        self._trace = Trace()
        self._start_afresh()
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
        self._make_window()  # refuses a wrong window, max_skew or max_bytes here

    def _start_afresh(self) -> None:
        self._own: BatchExecutor | None = None  # persistent_workers' executor
        self._end_lease: Callable[[], object] | None = None
        self._iterators: weakref.WeakSet[LoaderIterator] = weakref.WeakSet()

    # -- iterating

    def __iter__(self) -> "LoaderIterator":  # type: ignore[override]  # torch's iterator class is private to it
        """Start an epoch: loading begins now and fills the window.

        The dataset, ``sys.path``, the working directory and the environment are taken as they are now.

        Raises:
            PlanError: The dataset, ``collate_fn`` or ``worker_init_fn`` cannot be pickled; the message names the part.
        """
        return self._iterate(attrgetter("data"))

    def __aiter__(self) -> AsyncBatches:
        """Start an epoch for ``async for``: like `__iter__`, but nothing of it, the start included, blocks the loop."""
        return AsyncBatches(self.__iter__)

    def batches(self) -> "LoaderIterator":
        """Iterate like the loader itself, but yield `Batch` objects, which know their indices.

        Example:
            >>> from fifobatch import FifoLoader
            >>> loader = FifoLoader(range(4), batch_size=2, num_workers=2)
            >>> {batch.number: (batch.indices, batch.data.tolist()) for batch in loader.batches()} == {
            ...     0: ([0, 1], [0, 1]), 1: ([2, 3], [2, 3])}
            True

        Raises:
            PlanError: As `__iter__`.
        """
        return self._iterate(_whole)

    @property
    def failures(self) -> list[Failure]:
        """The samples left out of the epoch that was started last, as ``on_error="skip"`` asks.

        Example:
            >>> import warnings
            >>> from fifobatch import FifoLoader
            >>> inverses = {0: 1.0, 2: 0.5}
            >>> loader = FifoLoader(inverses, sampler=range(3), batch_size=3, num_workers=1, on_error="skip")
            >>> with warnings.catch_warnings(action="ignore"):
            ...     print(*loader)
            tensor([1.0000, 0.5000], dtype=torch.float64)
            >>> [(failure.index, failure.chunk, type(failure.error)) for failure in loader.failures]
            [(1, 0, <class 'KeyError'>)]
        """
        return list(self._trace.failures)

    def statistics(self) -> Statistics:
        """Return where the time went, of the epoch that was started last; see `Statistics`.

        Example:
            >>> from fifobatch import FifoLoader
            >>> loader = FifoLoader(range(4), batch_size=2, num_workers=2)
            >>> print(loader.statistics())
            Nothing was loaded yet.
        """
        return self._trace.statistics()

    def timeline(self) -> tuple[Span, ...]:
        """Return when each chunk was submitted, started, loaded and delivered, of the epoch that was started last.

        A span a chunk, of the last 4,096. ``print(format_timeline(loader.timeline()))`` and ``plot_timeline`` draw it.
        """
        return self._trace.timeline()

    def _iterate(self, select: Callable[[Batch[Any]], Any]) -> "LoaderIterator":
        # As torch draws it: before the sampler draws, and whether or not anything is shuffled. With persistent_workers
        # torch draws at the first epoch only; here epochs do not depend on where they are loaded.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        plan = BatchPlan.of_loader(self, seed, self._epoch)
        self._had_batches |= plan.is_stream and self._trace.delivered > 0
        progress = Progress.of(self.progress, self._length())
        try:
            batches, executor = self._load(plan, select)
        except BaseException:
            if progress is not None:
                progress.close()
            raise
        ends = None if executor in (self._shared, self._own) else executor
        length = self._length()
        most = length + max(0, self.num_workers - 1) if plan.is_stream and length is not None else None  # a rest each
        iterator = LoaderIterator(batches, length, progress, ends, most, self._had_batches)
        self._trace = batches.trace
        self._iterators.add(iterator)
        return iterator

    def _load(
        self, plan: BatchPlan, select: Callable[[Batch[Any]], Any]
    ) -> "tuple[Completions | InProcess, BatchExecutor | None]":
        transfer = Transfer.of(self._pins(), self._device)
        if self.num_workers == 0 or (self._shared is None and not checks.may_have_children()):
            return self._load_here(plan, select, transfer), None
        executor = self._executor()
        batches = self._load_there(executor, plan, select, transfer)
        if self._end_lease is None and executor.has_own_workers and batches.under_way:
            # The fork server stays warm as long as this loader may want it again.
            self._end_lease = finalizer = weakref.finalize(self, server.servers.lease())
            finalizer.atexit = False
        return batches, executor

    def _load_here(self, plan: BatchPlan, select: Callable[[Batch[Any]], Any], transfer: Transfer) -> InProcess:
        return InProcess(plan, transfer.all_before(select), self._policy, self.split == "stride")

    def _load_there(
        self, executor: BatchExecutor, plan: BatchPlan, select: Callable[[Batch[Any]], Any], transfer: Transfer
    ) -> Completions:
        return executor.iterate(
            plan,
            self._make_window(),
            transfer.before(select),
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            policy=self._policy,
            prepare=transfer.prepare,
            stage=transfer.stage,
            owner=self,
            split=self.split,
            prefetch_factor=self.prefetch_factor,
            stacklevel=3,
        )

    @property
    def _policy(self) -> Policy:
        return Policy.of(self.retries, self.retry_on, self.on_error, self.timeout)

    def _executor(self) -> BatchExecutor:
        if self._shared is not None:
            return self._shared
        if not self.persistent_workers:
            return BatchExecutor(self.num_workers)
        if self._own is not None and (self._own.max_workers != self.num_workers or not self._own.usable):
            self._own.close()
            self._own = None
        if self._own is None:
            self._own = BatchExecutor(self.num_workers)
        return self._own

    def _make_window(self) -> Window[Any]:
        size = self.window
        if size is None:
            size = max(1, (self.prefetch_factor or 0) * self.num_workers)
        return Window(size, 0 if self.in_order else self.max_skew, self.max_bytes)

    def _length(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # the sampler has no length
            return None

    def _pins(self) -> bool:
        if not self.pin_memory:
            return False
        available = torch.accelerator.is_available()
        if not available and not self._warned_pinning:
            self._warned_pinning = True
            warnings.warn("pin_memory=True, but there is no accelerator: memory is not pinned", stacklevel=4)
        return available

    # -- torch's own

    def check_worker_number_rationality(self) -> None:
        """Warn above two workers a core (torch warns above one; loading is often waiting)."""
        if self._shared is None:
            checks.warn_of_many_workers(self.num_workers, stacklevel=5 + self._frames)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch's number to the sampler, the batch sampler and the dataset, if they want to know it.

        It also enters the seeds of the chunks. Call it before ``iter()``.
        """
        self._epoch = check_count("epoch", epoch, 0)
        batch_sampler = self.batch_sampler
        targets = (self.sampler, batch_sampler, getattr(batch_sampler, "sampler", None), self.dataset)
        for target in {id(target): target for target in targets}.values():
            if callable(getattr(type(target), "set_epoch", None)):
                target.set_epoch(epoch)  # type: ignore[union-attr]

    # -- the end

    def close(self) -> None:
        """End the workers and every iterator of this loader, now. Idempotent; iterating again starts new ones."""
        for iterator in list(self._iterators):
            iterator.close()
        if self._own is not None:
            self._own.close()
        if self._end_lease is not None:
            self._end_lease()
        self._start_afresh()

    def __enter__(self) -> "FifoLoader[T_co]":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- how it shows itself

    def __repr__(self) -> str:
        if not self._DataLoader__initialized:  # type: ignore[attr-defined]  # torch's, False until it has checked all
            return object.__repr__(self)
        return summary.line(self, self._make_window().size, self.statistics())

    def _repr_html_(self) -> str:
        return summary.html_table(self, self._make_window().size, self.statistics())

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        # A copy has workers and a trace of its own.
        own = ("_own", "_end_lease", "_iterators", "_trace")
        return {key: value for key, value in vars(self).items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._trace = Trace()
        self._start_afresh()


def _whole(batch: Batch[Any]) -> Batch[Any]:
    return batch

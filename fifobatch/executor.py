"""`BatchExecutor`: who loads the chunks, in `concurrent.futures`' words.

Runs in the parent process, in the thread that calls; what goes on behind it is `engine`'s.
"""

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from multiprocessing import current_process
from operator import attrgetter
from typing import Any

from fifobatch import server
from fifobatch.arena import Arena
from fifobatch.attempt import NO_POLICY, Policy
from fifobatch.completion import Completions, Loading
from fifobatch.engine import CANCEL, FINISH, GIVE_UP, Engine
from fifobatch.errors import PlanError
from fifobatch.fetch import Payload, StreamOptions
from fifobatch.flight import Run
from fifobatch.futures import BatchFuture
from fifobatch.measures import Span, Statistics
from fifobatch.plan import Batch, BatchPlan, Chunk, Passing
from fifobatch.pool import cpu_count, loky_pool
from fifobatch.streams import Lanes
from fifobatch.supervisor import supervise
from fifobatch.trace import Trace
from fifobatch.window import Window, check_count

__all__ = ["BatchExecutor"]


class BatchExecutor:
    """Load chunks in worker processes, in `concurrent.futures`' words.

    Example:
        >>> from fifobatch import BatchExecutor, BatchPlan
        >>> with BatchExecutor(max_workers=2) as executor:
        ...     plan = BatchPlan(range(6), batch_size=2)
        ...     sorted(batch.tolist() for batch in executor.as_completed(plan))
        [[0, 1], [2, 3], [4, 5]]

    Given as ``executor=`` to several loaders, they share its workers. Worker processes start when there is work for
    them.

    Args:
        max_workers: The most worker processes; None for the number of cores that this process may use.
        executor: Any other `concurrent.futures.Executor` that is to load instead (threads, Dask, MPI). It is not shut
            down here. Its own transport carries the batches; datasets see no ``get_worker_info()`` there, and on
            threads, which share one random state, chunk seeds are not applied.
        worker_init_fn: Called with the worker's id, once for each copy of a dataset that a worker gets.

    Raises:
        TypeError: ``executor`` is not an Executor, or ``max_workers`` not an int.
        ValueError: ``max_workers`` is below 1, or does not go with ``executor``.
        PlanError: This process is daemonic and may not have children.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        executor: Executor | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._owned: Executor | None = None
        if executor is not None:
            if not isinstance(executor, Executor):
                raise TypeError(f"executor={executor!r} is not a concurrent.futures.Executor")
            for name, value in (("max_workers", max_workers), ("worker_init_fn", worker_init_fn)):
                if value is not None:
                    raise ValueError(f"{name}={value!r} belongs to workers of our own; leave it out with executor=")
        elif current_process().daemon:
            raise PlanError(
                "BatchExecutor() in a daemonic process, which may not have child processes; "
                "give it executor=ThreadPoolExecutor(...), or use FifoLoader with num_workers=0"
            )
        if max_workers is None:
            max_workers = getattr(executor, "_max_workers", None) or cpu_count()
        self.max_workers = check_count("max_workers", max_workers, 1)
        self.worker_init_fn = worker_init_fn
        arena = _make_arena() if executor is None else None
        if executor is None and arena is None:
            executor = self._owned = loky_pool(self.max_workers)
            # At exit too: loky's objects print errors if they are taken down with the interpreter.
            weakref.finalize(self, self._owned.shutdown, wait=False)
        self._engine = Engine(self.max_workers, executor, arena, supervise)
        self._runs: weakref.WeakKeyDictionary[BatchPlan, Run] = weakref.WeakKeyDictionary()
        self._latest: weakref.WeakKeyDictionary[object, Run] = weakref.WeakKeyDictionary()
        self._finalizer = weakref.finalize(self, self._engine.inbox.put, GIVE_UP)
        self._finalizer.atexit = False

    @property
    def has_own_workers(self) -> bool:
        """Whether it loads in worker processes of its own, not on an executor passed in."""
        return self._engine.crew is not None

    @property
    def completes_here(self) -> bool:
        """Whether this is one of its own threads, which call futures' done callbacks and must not wait for others."""
        return self._engine.completes_here

    @property
    def usable(self) -> bool:
        """Whether it takes more chunks: it was not shut down, and no executor passed in has broken."""
        return self._engine.usable

    def submit(self, plan: BatchPlan, chunk: Chunk) -> "Future[Batch[Any]]":
        """Start loading one chunk of ``plan``; its future's ``chunk`` says which.

        Done callbacks of the future run in the thread that completes all of them, so be brief there.

        The dataset is sent to the workers as it is at the first chunk of the plan.

        Raises:
            ClosedError: The executor was shut down.
            PlanError: The plan cannot be pickled.
            WorkerDiedError: An executor passed in has broken.
        """
        run = self._runs.get(plan)
        if run is None:
            run = self._runs[plan] = self._engine.start_run(self._payload(plan), plan.seed, 2 * self.max_workers)
        return run.submit(chunk)

    def as_completed(self, plan: BatchPlan, *, window: int | None = None) -> Iterator[Any]:
        """Yield the batches (not futures of them) of ``plan`` as they complete.

        Args:
            plan: What to load. Its dataset is sent to the workers as it is now.
            window: Batches that may be under way at once, that is, submitted and not yet yielded; ``2 * max_workers``
                if None. Loading begins now and fills the window, however slow the consumer.

        Raises:
            ClosedError: The executor was shut down.
            PlanError: The plan cannot be pickled.
            TypeError, ValueError: ``window`` is not an int of at least 1.
        """
        counted: Window[BatchFuture] = Window(2 * self.max_workers if window is None else window)
        return self.iterate(plan, counted, attrgetter("data"))

    def iterate(
        self,
        plan: BatchPlan,
        window: Window[BatchFuture],
        select: Callable[[Batch[Any]], Any],
        *,
        num_workers: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        policy: Policy = NO_POLICY,
        prepare: Callable[[Batch[Any]], Batch[Any]] | None = None,
        stage: Callable[[Batch[Any]], Batch[Any]] | None = None,
        owner: object = None,
        split: str = "auto",
        prefetch_factor: int | None = None,
        stacklevel: int = 2,
        pair: "Callable[[Run], Loading] | None" = None,
    ) -> Completions:
        """Do what `as_completed` does, with a window of any kind; the engine under `FifoLoader`.

        Args:
            plan: What to load.
            window: How much may be under way, and in which order it comes.
            select: What to yield of a batch.
            num_workers: What ``get_worker_info()`` says; ``max_workers`` if None.
            worker_init_fn: The executor's own if None.
            policy: What becomes of chunks that fail.
            prepare: Done to each batch when it is complete, in a thread of its own.
            stage: Done in that thread to the batch that is next, while the consumer has the one before it.
            owner: Whoever will iterate the same dataset again (``plan`` if None): what was shipped for it stays shipped
                as long as it lives, so that workers keep their copy if nothing has changed.
            split: Who reads what of an ``IterableDataset``; see `FifoLoader`.
            prefetch_factor: How many batches may be asked for at once of each lane of it; by ``window`` if None.
            stacklevel: Of what there is to warn of in a stream.
            pair: Makes what loads pairs of what loads the plan.

        Raises:
            ClosedError, PlanError: As `as_completed`.
        """
        trace = self.new_trace()
        if plan.is_stream and split != "parent" and self.has_own_workers:
            count = num_workers or self.max_workers
            stream = StreamOptions(plan.batch_size, plan.drop_last, split == "stride")
            payload = self._payload(plan, count, worker_init_fn, policy)._replace(dataset=plan.dataset, stream=stream)
            of_lanes = self._engine.start_run(payload, plan.seed, window.size, trace, plan.epoch)
            self._latest[plan if owner is None else owner] = of_lanes
            per_lane = prefetch_factor or -(-window.size // count)
            lanes = Lanes(count, per_lane, window.max_skew is not None, plan.seed, plan.epoch, split)
            return Completions(lanes, of_lanes, window, select, trace, self, prepare, stage, stacklevel)
        chunks = iter(plan)
        first: list[Chunk] = []
        failed: Exception | None = None
        try:
            first = list(itertools.islice(chunks, 1))  # a plan without chunks pickles and starts nothing
        except Exception as error:  # what a stream raises comes from next(), as with lanes
            if not plan.is_stream:
                raise
            failed = error
        loading: Loading | None = None
        if first:
            loading = run = self.start_run(
                plan,
                window.size,
                trace,
                num_workers=num_workers,
                worker_init_fn=worker_init_fn,
                policy=policy,
                owner=plan if owner is None else owner,
            )
            if pair is not None:
                loading = pair(run)
        chunks = itertools.chain(first, chunks)
        return Completions(chunks, loading, window, select, trace, self, prepare, stage, failed=failed)

    def new_trace(self) -> Trace:
        """Return the trace of one iteration, which counts for this executor, too."""
        return Trace(self._engine.trace)

    def start_run(
        self,
        plan: BatchPlan,
        window: int,
        trace: Trace,
        *,
        num_workers: int | None,
        worker_init_fn: Callable[[int], None] | None,
        policy: Policy,
        owner: object,
    ) -> Run:
        """Ship a plan as it is now, and return what submits chunks of it. Arguments as of `iterate`.

        Raises:
            ClosedError, PlanError: As `as_completed`.
        """
        payload = self._payload(plan, num_workers, worker_init_fn, policy)
        run = self._latest[owner] = self._engine.start_run(payload, plan.seed, window, trace)
        return run

    def statistics(self) -> Statistics:
        """Return the sums over everything that was loaded here, for all iterators and `submit`.

        Chunks given to `submit` are delivered when their future is done.
        """
        return self._engine.trace.statistics()

    def timeline(self) -> tuple[Span, ...]:
        """Return when each chunk was submitted, started, loaded and delivered: the last 4,096, a span each."""
        return self._engine.trace.timeline()

    def _payload(
        self,
        plan: BatchPlan,
        num_workers: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        policy: Policy = NO_POLICY,
    ) -> Payload:
        return Payload(
            dataset=Passing() if plan.is_stream else plan.dataset,
            collate_fn=plan.collate_fn,
            collates=plan.collates,
            worker_init_fn=worker_init_fn or self.worker_init_fn,
            num_workers=num_workers or self.max_workers,
            policy=policy,
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more chunks, and end the workers when those under way are done. Idempotent.

        Args:
            wait: Return only when the workers have ended.
            cancel_futures: Cancel the chunks that no worker has begun.
        """
        supervisor = self._engine.shutdown(CANCEL if cancel_futures else FINISH)
        if wait and supervisor is not None and supervisor is not threading.current_thread():
            supervisor.join()
        if self._owned is not None:
            self._owned.shutdown(wait=wait)

    def close(self) -> None:
        """Give up what is under way and end the workers, without waiting for it. Idempotent."""
        self._engine.shutdown(GIVE_UP)
        if self._owned is not None:
            self._owned.shutdown(wait=False)

    def __enter__(self) -> "BatchExecutor":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown(wait=True)


def _make_arena() -> Arena | None:
    """Return the memory that batches travel in; None where they have to go through loky's pipes."""
    if not server.available:
        return None
    try:
        return Arena()
    except OSError as error:  # a limit on the size of files (ulimit -f), or on descriptors
        warnings.warn(
            f"no shared memory file can be made ({error}): batches go through pipes, which is slower. See `ulimit -a`",
            stacklevel=4,
        )
        return None

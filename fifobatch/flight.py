"""What is under way: a run is one iteration over a plan, a flight one chunk of it.

Records of the parent process, which the consumer's, the pool's and the supervisor's thread share; and the rules by
which a chunk whose worker died or hung is loaded again, without a sample, or not at all.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fifobatch.attempt import COLLATING, LISTING, PACKING, SETTING_UP, Policy, brief, named
from fifobatch.board import START
from fifobatch.errors import ChunkTimeoutError, WorkerDiedError
from fifobatch.fetch import StreamOptions
from fifobatch.futures import BatchFuture
from fifobatch.pickling import Pickled, dumps, rebuild, report
from fifobatch.plan import Batch, Chunk, Failure, Items, StreamChunk
from fifobatch.pool import WorkerPool
from fifobatch.shipping import Shipment, pickle_task
from fifobatch.trace import Trace

__all__ = ["FRUITLESS_STARTS", "Flight", "Run"]

# How often workers may die before they begin with anything, one after the other, until that is an error.
FRUITLESS_STARTS = 5

_keys = itertools.count(1)


class Run:
    """One iteration over a plan: what is abandoned together.

    Args:
        payload: The plan's shipment.
        context: The shipment of the surroundings.
        base_seed: The epoch's base seed.
        flag: Its place on the board; 0 is never set, for chunks submitted one by one.
        policy: What becomes of chunks that fail.
        collates: Whether a chunk's indices are a list.
        stream: How lanes make batches of a stream; None where chunks say what to load.
        lanes: How many lanes there are; 0 likewise.
        epoch: The epoch's number.
        trace: Where to note what happens.
        submit: Starts loading a chunk of it.
        abandon: Gives up what is still under way of it, without a lock.

    Attributes:
        over: Whether nobody wants what is still under way of it.
        has_loaded: Whether a worker has loaded a chunk of it: so setting up does not kill workers.
    """

    def __init__(
        self,
        payload: Shipment,
        context: Shipment,
        base_seed: int,
        flag: int,
        policy: Policy,
        collates: bool,
        stream: StreamOptions | None,
        lanes: int,
        epoch: int,
        trace: Trace,
        submit: "Callable[[Run, Chunk, bool], BatchFuture]",
        abandon: "Callable[[Run], None]",
    ) -> None:
        self.payload = payload
        self.context = context
        self.base_seed = base_seed
        self.flag = flag
        self.policy = policy
        self.collates = collates
        self.stream = stream
        self.lanes = lanes
        self.epoch = epoch
        self.key = next(_keys)
        self.ended_lanes: set[int] = set()  # that have killed their process
        self.delivered: Counter[int] = Counter()  # batches that have come, by lane
        self.trace = trace
        self.over = False
        self.has_loaded = False
        self._submit = submit
        self._abandon = abandon

    def submit(self, chunk: Chunk, later: bool = False) -> BatchFuture:
        """Start loading ``chunk``; ``later`` is for done callbacks."""
        return self._submit(self, chunk, later)

    def end(self) -> None:
        """Give up what is still under way, if anything is. Takes no lock: finalizers call it."""
        if not self.over:
            self.over = True
            self.trace.end()
            self._abandon(self)


class Flight:
    """A chunk under way.

    The done callback of the pool's future knows only its key, so that an executor that keeps its futures keeps no
    batch.

    Args:
        run: The iteration that it belongs to.
        future: Ours, to be completed.

    Attributes:
        key: Names it, also on the board.
        slot: Where the batch will come; None if there is none, or if it is not to be given back when the flight lands.
        pool: The pool that it was given to.
        lost: Whether that pool has broken; the supervisor sees to it.
        attempt: Which try this is, from 1; those that a worker died on do not count.
        suspect: Whether a worker has died on it: it is loaded in quarantine.
        singly: Whether it is loaded one sample at a time.
        left_out: The samples to leave out, by position.
    """

    def __init__(self, run: Run, future: BatchFuture) -> None:
        self.key = next(_keys)
        self.run = run
        self.future = future
        self.slot: int | None = None
        self.pool: WorkerPool | None = None
        self.lost = False
        self.attempt = 1
        self.suspect = False
        self.singly = False
        self.left_out: dict[int, Failure] = {}
        self._sent = future.chunk.sent
        self._deaths: Counter[int] = Counter()  # in quarantine, by step
        self._died = 0

    def pickled(self) -> "Pickled | Batch[Any] | Exception":
        """Return what is sent of it to a worker; or, if that cannot be pickled, what to complete its future with."""
        try:
            return pickle_task(self._sent, tuple(self.left_out), self.future.chunk.seeds)
        except Exception as error:  # whatever the user's own pickling raises: this chunk's error
            chunk = named(self.future.chunk.number, self.future.chunk.sent)
            whole = rebuild(report(error, f"In fifobatch, pickling {chunk}."))
        is_read = isinstance(self._sent, Items)
        samples = self._sent.samples if is_read else self._sent
        samples = list(samples) if self.run.collates else [samples]
        failed: dict[int, Exception] = {}
        for position, sample in enumerate(samples):
            try:
                dumps(sample)
            except Exception as its_own:  # likewise
                what = "item" if is_read else "index"
                where = f"{what} {brief(self._indices[position])}, {chunk}"
                failed[position] = rebuild(report(its_own, f"In fifobatch, pickling {where}."))
        if not self.run.policy.skip:
            return next(iter(failed.values()), whole)
        if not failed:
            return self.without([(None, whole)], None)
        for position, failure in failed.items():
            self.left_out[position] = self._failure(position, failure, self.attempt + self._died)
            samples[position] = None
        if len(self.left_out) == len(samples):
            return self.without([], None)
        self._sent = Items(self._sent.positions, samples) if is_read else samples
        return self.pickled()

    # -- what becomes of it: None for another try, else what to complete its future with

    def died(self, step: int, how: str) -> "Batch[Any] | Exception | None":
        """Note that its worker has died.

        A worker that dies outside quarantine may have been killed by anything: so the chunk is tried in quarantine, and
        convicted when it has killed there twice at the same step (or as often as there are ``retries``). One that had
        not begun is no suspect, if others of its iteration were set up and loaded well.

        Args:
            step: The step that the worker was at.
            how: Which worker, and how it ended.
        """
        self._died += step != START
        if self.run.lanes:
            return self._lane_died(step, how)
        innocent = step == START or (step == SETTING_UP and self.run.has_loaded)
        if not self.suspect:
            self.suspect = self.singly = not innocent
            return None
        self._deaths[step] += 1
        if self._deaths[step] < (FRUITLESS_STARTS if innocent else max(2, self.run.policy.retries)):
            return None
        times = self._deaths.pop(step) + (step != START)
        error = WorkerDiedError(f"{self._describe(step)} ended its worker process {times} times: {how} ({self._chunk})")
        return self._cannot(step, error, self.attempt - 1 + self._died)

    def _lane_died(self, step: int, how: str) -> Exception | None:
        """As `died`, of a stream: its lane starts again and skips what was delivered; it cannot skip what kills it."""
        self._deaths[step] += 1
        if self._deaths[step] < (FRUITLESS_STARTS if step == START else max(3, 1 + self.run.policy.retries)):
            return None
        return self._end_lane(
            WorkerDiedError(
                f"{self._describe(step)} ended its worker process {self._deaths[step]} times: {how} ({self._chunk})"
            )
        )

    def _end_lane(self, error: Exception) -> Exception:
        self.future.is_last = True
        self.run.ended_lanes.add(self.lane)
        return error

    def void(self) -> Batch[Any]:
        """Return what to complete it with if there is no such batch, as its lane was over before."""
        self.future.is_void = self.future.is_last = True
        return Batch(self.future.chunk.number, None, None)

    @property
    def is_of_ended_lane(self) -> bool:
        """Whether its lane has killed its process, or was over its time, too often."""
        return bool(self.run.lanes) and self.lane in self.run.ended_lanes

    @property
    def lane(self) -> int:
        """The lane of the stream that it is a batch of."""
        return self.future.chunk.number % self.run.lanes

    def timed_out(self, step: int, pid: int, seconds: float, stack: str) -> "Batch[Any] | Exception | None":
        """Note that it was over its time, and its worker was killed for it.

        Args:
            step: The step that the worker was at.
            pid: The worker's.
            seconds: How long it has run.
            stack: The worker's Python stack; empty if it could not be had.
        """
        policy = self.run.policy
        error = ChunkTimeoutError(
            f"{self._describe(step)} is not done within timeout={policy.timeout:g} seconds ({self._chunk})"
        )
        # Neither our thread nor what has called the user's code is of interest.
        threads = [thread for thread in stack.split("\n\n") if "in _leave_with_parent" not in thread]
        stack = "\n".join(threads).partition(" in load\n")[0].strip() or "(none: the process did not run)"
        error.add_note(
            f"In fifobatch worker {pid}, {self._describe(step)}, chunk {self.future.chunk.number}; "
            f"attempt {self.attempt}, after {seconds:.3g} s.\nStack of the worker:\n"
            + "\n".join(f"  {line}" for line in stack.splitlines())
        )
        self.attempt += 1
        if self.attempt - 1 <= policy.retries and issubclass(ChunkTimeoutError, policy.retry_on):
            return None
        return self._cannot(step, error, self.attempt - 1 + self._died)

    def _cannot(self, step: int, error: Exception, attempts: int) -> "Batch[Any] | Exception | None":
        """Return what becomes of it if this step cannot be done."""
        if self.run.lanes:
            return self._end_lane(error)
        if not self.run.policy.skip or step in (START, SETTING_UP):
            return error
        if step == LISTING:
            self.singly = True
            return None
        if step in (COLLATING, PACKING):
            return self.without([(None, error)], None, attempts)
        self.left_out[step] = self._failure(step, error, attempts)
        return None if len(self.left_out) < len(self._indices) else self.without([], None, attempts)

    def of_lane(
        self,
        share: tuple[Any, tuple[int, int, int], bool, bool],
        failed: Iterable[tuple[tuple[int, ...] | None, Exception]],
    ) -> Batch[Any]:
        """Return the batch of a stream.

        Args:
            share: What the worker says: a `lane.Share`, plain.
            failed: The items that were left out (None for those of the batch), and their errors. A single one is of the
                stream itself, and the last.
        """
        data, bounds, is_last, has_looked = share
        indices = range(*bounds)
        number, future = self.future.chunk.number, self.future
        if indices:
            self.run.delivered[self.lane] = max(self.run.delivered[self.lane], number // self.run.lanes + 1)
        for items, error in failed:
            future.failures += [
                Failure(item, number, error, self.attempt + self._died)
                for item in (indices if items is None else items)
            ]
            future.is_cut |= items is not None
        future.is_last, future.has_looked = is_last, has_looked if indices else None
        future.is_empty = bool(future.failures) and data is None
        future.is_void = not indices and not future.failures
        return Batch(number, list(indices) if self.run.collates or not indices else indices[0], data)

    def without(
        self, failed: Iterable[tuple[tuple[int, ...] | None, Exception]], data: Any, attempts: int | None = None
    ) -> Batch[Any]:
        """Return its batch without the samples that were left out.

        Args:
            failed: Positions of samples that failed (None for all that have not failed before), and their errors.
            data: What is left.
            attempts: How often it was tried; None if the last try is the present one.
        """
        attempts = attempts or self.attempt + self._died
        failures = dict(self.left_out)
        indices = self._indices
        for positions, error in failed:
            for position in range(len(indices)) if positions is None else positions:
                failures.setdefault(position, self._failure(position, error, attempts))
        self.future.failures = [failures[position] for position in sorted(failures)]
        self.future.left_out = tuple(sorted(failures))
        kept = [index for position, index in enumerate(indices) if position not in failures]
        self.future.is_empty = not kept
        chunk = self.future.chunk
        return Batch(chunk.number, kept if self.run.collates else chunk.indices, data)

    def _failure(self, position: int, error: Exception, attempts: int) -> Failure:
        return Failure(self._indices[position], self.future.chunk.number, error, attempts)

    @property
    def _indices(self) -> list[Any]:
        indices = self.future.chunk.indices
        return list(indices) if self.run.collates else [indices]

    @property
    def _chunk(self) -> str:
        if self.run.lanes:
            return f"batch {self.future.chunk.number}, of lane {self.lane}; this lane is over"
        chunk = self.future.chunk
        if isinstance(chunk, StreamChunk):
            return f"batch {chunk.number}, {chunk.sent}"
        return f"chunk {chunk.number}, indices {brief(chunk.indices)}"

    def _describe(self, step: int) -> str:
        if step >= 0 and self.run.lanes:
            whole = "the stream, read by lane" if self.run.stream is not None and self.run.stream.stride else "lane"
            return f"item {step} of {whole} {self.lane}"
        if step >= 0:
            return f"dataset[{brief(self._indices[step])}]"
        return {
            START: "starting",
            SETTING_UP: "unpickling the dataset, or worker_init_fn,",
            LISTING: "dataset.__getitems__",
            COLLATING: "collate_fn",
            PACKING: "packing the batch",
        }[step]

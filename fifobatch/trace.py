"""What happened when: one record a chunk, always on, and the statistics made of them.

Runs in the parent process: `Trace.arrive` in the pool's thread, the rest in the consumer's. A worker only reads the
clock twice a chunk: ``time.perf_counter``, which all processes of a machine share.

Each iteration has a trace of its own, below that of its executor, which sees all of them. It costs some microseconds a
batch. Records are kept of the last `RING` chunks; what is counted and summed is so from the beginning.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Hashable
from operator import attrgetter

from fifobatch.measures import RING, Span, Statistics
from fifobatch.plan import Failure

__all__ = ["Record", "Trace"]

BOUND_SHARE = 0.1


class Record:
    """A `Span` in the making.

    Args:
        number: The chunk's number.
    """

    __slots__ = (
        "bytes",
        "delivered",
        "error",
        "half",
        "half_bytes",
        "half_failed",
        "handed_over",
        "loaded",
        "number",
        "requested",
        "started",
        "submitted",
        "worker",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: int | None = None
        self.submitted = time.perf_counter()
        self.started: float | None = None
        self.loaded: float | None = None
        self.requested: float | None = None
        self.delivered: float | None = None
        self.bytes = 0
        self.error: str | None = None
        self.handed_over = False
        # Of a pair: the other half, its bytes until the pair is handed over, and whether it has failed before that.
        self.half: Record | None = None
        self.half_bytes = 0
        self.half_failed = False


class Trace:
    """What happened in one iteration, or, without a parent, in one executor.

    Args:
        parent: The executor's trace.

    Attributes:
        failures: The samples that were left out.
        seconds_waited: What the consumer has spent inside ``iter()`` and ``next()``.
        beside: Another iteration's, which the timeline shows, too.
    """

    def __init__(self, parent: "Trace | None" = None) -> None:
        self._chain: tuple[Trace, ...] = (self,) if parent is None else (self, parent)
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock
        self._began: float | None = None if parent is None else time.perf_counter()
        if parent is not None and parent._began is None:
            parent._began = self._began
        self._ended: float | None = None
        self._last = 0.0
        self._records: deque[Record] = deque(maxlen=RING)
        self._workers: dict[Hashable, int] = {}
        self._given_up: deque[Trace] = deque()  # iterations that ended, and are not settled yet
        self._settled = False
        self._submitted = self._delivered = self._failed = self._abandoned = self._peak_under_way = 0
        self._bytes = self._bytes_waiting = self._peak_bytes = 0
        self._seconds_starting = self._waited_to_first = 0.0
        self._first: Record | None = None  # to be delivered
        self._retries = self._reloads = 0
        self.failures: list[Failure] = []
        self.seconds_waited = 0.0
        self.beside: Trace | None = None

    # -- what happens

    def started(self) -> None:
        """Note that ``iter()`` is about to return."""
        assert self._began is not None
        now = time.perf_counter()
        with self._lock:
            for trace in self._chain:
                trace._seconds_starting += now - self._began
        self.wait(self._began)

    def submit(self, record: Record) -> None:
        """Note that a chunk was submitted."""
        with self._lock:
            for trace in self._chain:
                if trace._began is None:
                    trace._began = record.submitted
                trace._settle()
                trace._records.append(record)
                trace._submitted += 1
                if self._settled and trace is not self:  # closed by another thread meanwhile
                    trace._abandoned += 1
                trace._peak_under_way = max(trace._peak_under_way, trace._under_way)

    def void(self, record: Record) -> None:
        """Note that there was nothing to load for a chunk that was submitted: its lane of a stream was over."""
        with self._lock:
            for trace in self._chain:
                trace._bytes -= record.bytes
                if self._ended is None:
                    trace._bytes_waiting -= record.bytes
                trace._submitted -= 1
                if record in trace._records:
                    trace._records.remove(record)

    def again(self, *, died: bool) -> None:
        """Note that a chunk is loaded again: after it failed, or because its worker died."""
        with self._lock:
            for trace in self._chain:
                trace._retries += not died
                trace._reloads += died

    def arrive(self, record: Record, worker: Hashable, started: float, loaded: float, size: int) -> None:
        """Note that a chunk was loaded, well or not.

        Args:
            record: The chunk's.
            worker: Names the worker.
            started: When it began with the chunk, by its own clock.
            loaded: When it was done, likewise.
            size: The packed batch's, in bytes.
        """
        now = time.perf_counter()
        if not record.submitted <= started <= loaded <= now:  # another machine's clock: only the duration is of use
            started, loaded = max(record.submitted, now - max(0.0, loaded - started)), now
        with self._lock:
            workers = self._chain[-1]._workers
            record.worker = (
                worker if worker is None or isinstance(worker, int) else workers.setdefault(worker, len(workers))
            )
            record.started, record.loaded, record.bytes = started, loaded, size
            for trace in self._chain:
                if self._ended is None:
                    trace._bytes_waiting += size
                trace._bytes += size
                trace._peak_bytes = max(trace._peak_bytes, trace._bytes_waiting)

    def hand_over(self, record: Record, error: str | None = None) -> None:
        """Note that a chunk is about to be delivered: it is no longer under way.

        Args:
            record: The chunk's.
            error: The class of what comes instead of its batch, or because of which none of it is left.
        """
        with self._lock:
            record.error, record.handed_over = error, True
            for trace in self._chain:
                if self._ended is None:
                    trace._bytes_waiting -= record.bytes + record.half_bytes
                if self._settled and trace is not self:  # closed by another thread, and then delivered all the same
                    trace._abandoned -= 1
                if error is None and not (record.half_failed and trace is self):
                    trace._delivered += 1
                else:
                    trace._failed += 1

    def expect(self, record: Record, half: Record) -> None:
        """Note which is the other half of a pair: instead of another one, if that was of a sample that is left out."""
        with self._lock:
            for trace in self._chain:
                if self._ended is None:
                    trace._bytes_waiting -= record.half_bytes
            record.half, record.half_bytes, record.half_failed = half, 0, False

    def join(self, record: Record, half: Record) -> None:
        """Note that the other half of a pair has come: here they count as one, in the executor's trace as two.

        Args:
            record: The pair's.
            half: The other half's. In its own trace it was handed over, so that no byte counts twice.
        """
        with self._lock:
            self._bytes += half.bytes
            if record.half is not half:
                return
            if not record.handed_over:
                record.half_bytes, record.half_failed = half.bytes, half.error is not None
                for trace in self._chain:
                    if self._ended is None:
                        trace._bytes_waiting += half.bytes
                    trace._peak_bytes = max(trace._peak_bytes, trace._bytes_waiting)
            elif half.error is not None and record.error is None:
                self._delivered -= 1
                self._failed += 1

    def deliver(self, record: Record, requested: float | None = None) -> None:
        """Note that the consumer has a chunk's batch, or its error.

        Args:
            record: The chunk's.
            requested: When ``next()`` was called, if it was.
        """
        now = time.perf_counter()
        with self._lock:
            record.requested, record.delivered = requested, now
            for trace in self._chain:
                trace._last = now
                if requested is not None:
                    trace.seconds_waited += now - requested
                if trace._first is None and record.error is None:
                    trace._first, trace._waited_to_first = record, trace.seconds_waited

    def wait(self, since: float) -> None:
        """Note that the consumer waited from ``since`` until now, and got no batch."""
        now = time.perf_counter()
        with self._lock:
            for trace in self._chain:
                trace._last = now
                trace.seconds_waited += now - since

    def end(self) -> None:
        """Note that nobody will be delivered anything any more. Takes no lock: finalizers call it. Idempotent."""
        if self._ended is None:
            self._ended = time.perf_counter()
            for parent in self._chain[1:]:
                parent._given_up.append(self)

    def _settle(self) -> None:
        """Take off what iterations that ended left undelivered."""
        while self._given_up:
            trace = self._given_up.popleft()
            self._abandoned += trace._submitted - trace._delivered - trace._failed
            self._bytes_waiting -= trace._bytes_waiting
            trace._settled = True

    # -- what was seen

    @property
    def delivered(self) -> int:
        """Batches delivered so far."""
        return self._delivered

    @property
    def _under_way(self) -> int:
        return self._submitted - self._delivered - self._failed - self._abandoned

    def timeline(self) -> tuple[Span, ...]:
        """Return a span a chunk, in order of submission, of the last `RING` chunks."""
        with self._lock:
            records = list(self._records)
            if self.beside is not None:
                records = sorted([*records, *self.beside._records], key=attrgetter("submitted"))
            return tuple(
                Span(
                    number=record.number,
                    worker=record.worker,
                    submitted=record.submitted,
                    started=record.started,
                    loaded=record.loaded,
                    requested=record.requested,
                    delivered=record.delivered,
                    bytes=record.bytes,
                    error=record.error,
                )
                for record in records
            )

    def statistics(self) -> Statistics:
        """Return the sums so far."""
        with self._lock:
            self._settle()
            p50, p95, p99 = _quantiles(
                [
                    record.loaded - record.started
                    for record in self._records
                    if record.started is not None and record.loaded is not None and record.error is None
                ]
            )
            under_way, abandoned = self._under_way, self._abandoned
            if self._ended is not None:
                under_way, abandoned = 0, under_way
            began = self._began
            end = time.perf_counter() if under_way else max(self._ended or 0.0, self._last, began or 0.0)
            seconds = 0.0 if began is None else end - began
            to_load = to_first = math.nan
            if began is not None and self._first is not None and self._first.delivered is not None:
                to_first = self._first.delivered - began
                to_load = to_first if self._first.started is None else self._first.started - began
            # The time after the first batch tells. Where there was only one, all of it has to.
            waited, share_of = self.seconds_waited - self._waited_to_first, seconds - to_first
            if self._delivered < 2:
                waited, share_of = self.seconds_waited, seconds
            return Statistics(
                submitted=self._submitted,
                delivered=self._delivered,
                failed=self._failed,
                retries=self._retries,
                reloads=self._reloads,
                abandoned=abandoned,
                under_way=under_way,
                peak_under_way=self._peak_under_way,
                bytes=self._bytes,
                peak_bytes=self._peak_bytes,
                seconds=seconds,
                seconds_starting=self._seconds_starting,
                seconds_to_load=to_load,
                seconds_to_first=to_first,
                seconds_waited=self.seconds_waited,
                loader_bound=self._delivered > 0 and waited >= BOUND_SHARE * share_of,
                load_p50=p50,
                load_p95=p95,
                load_p99=p99,
            )


def _quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """Return the 50th, 95th and 99th percentile, interpolated linearly as NumPy does by default."""
    if not seconds:
        return math.nan, math.nan, math.nan
    cuts = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=100, method="inclusive")
    return cuts[49], cuts[94], cuts[98]

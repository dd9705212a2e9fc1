"""What is said about an iteration: `Span`, one chunk's way, and `Statistics`, the sums.

Plain records, made by `trace` in the parent process.
"""

import math
from dataclasses import dataclass

__all__ = ["RING", "Span", "Statistics"]

RING = 4096  # chunks; about 300 bytes each


@dataclass(frozen=True, slots=True)
class Span:
    """When a chunk went through each station. Times are seconds of ``time.perf_counter``; None: not there yet.

    Attributes:
        number: The chunk's number: its position in the plan, from 0.
        worker: The worker that loaded it: its id as in ``get_worker_info()``, or, on other executors, numbered in order
            of appearance; None for this process, or where nobody knows.
        submitted: When it was submitted.
        started: When the worker began with it.
        loaded: When the worker was done with it: loaded, collated and packed.
        requested: When ``next()`` was called that was answered with it. None if nobody called ``next()`` for it, as
            after `BatchExecutor.submit`.
        delivered: When that ``next()`` returned it (or raised its error), or when its future was done.
        bytes: The size of its batch as packed, pickle and buffers; on other executors, where nothing is packed, that of
            its tensors and arrays; 0 without workers.
        error: The class of the error that came instead of the batch, or because of which none of it was left.
    """

    number: int
    worker: int | None
    submitted: float
    started: float | None
    loaded: float | None
    requested: float | None
    delivered: float | None
    bytes: int
    error: str | None

    @property
    def load_seconds(self) -> float:
        """How long it took to load; ``nan`` if it was not loaded."""
        return math.nan if self.started is None or self.loaded is None else self.loaded - self.started

    @property
    def seconds_waited(self) -> float:
        """How long the consumer waited for it, inside ``next()``."""
        return 0.0 if self.requested is None or self.delivered is None else self.delivered - self.requested


@dataclass(frozen=True, slots=True)
class Statistics:
    """Where an epoch's time went, and what is under way. ``print`` it for a verdict in words.

    ``submitted == delivered + failed + abandoned + under_way`` holds at any moment.

    Example:
        >>> from fifobatch import FifoLoader
        >>> loader = FifoLoader(range(6), batch_size=2, num_workers=2)
        >>> for batch in loader:
        ...     pass
        >>> statistics = loader.statistics()
        >>> statistics.delivered, statistics.failed, statistics.under_way
        (3, 0, 0)

    Attributes:
        submitted: Chunks submitted.
        delivered: Batches delivered to the consumer.
        failed: Chunks of which no batch came: their error was raised, or ``on_error="skip"`` has left nothing of them.
            A pair of a `PairedLoader` has failed if either half has: from then on, so perhaps after its input was
            delivered, and whether or not anybody asks for the target.
        retries: How often a chunk was tried again, after it failed or was over its time.
        reloads: How often a chunk was loaded again because a worker process died or was killed over its time: its own
            or another, which ends the whole pool.
        abandoned: Chunks that nobody waits for any more, as the iterator was closed or dropped.
        under_way: Chunks submitted, and neither delivered nor failed nor abandoned.
        peak_under_way: The most that were under way at once.
        bytes: The size of all batches loaded, as packed; both halves of pairs.
        peak_bytes: The most bytes loaded and not yet delivered; of pairs, those of both halves until the pair is
            delivered.
        seconds: From ``iter()`` to the end of the epoch, or to now while it goes on; for an executor from its first
            chunk on.
        seconds_starting: Of these, inside ``iter()``: pickling the dataset, starting workers.
        seconds_to_load: Of these, until a worker began with the batch that was delivered first; ``nan`` if none was.
        seconds_to_first: Of these, until the first batch was delivered; ``nan`` if none was.
        seconds_waited: Of these, those that the consumer spent inside ``iter()`` and ``next()``. For an executor it is
            the sum over its iterators, which may be more than ``seconds`` where several wait at once.
        loader_bound: Whether the loader was the bottleneck: after the first batch, the consumer waited for at least a
            tenth of the time.
        load_p50: The median of the load times, in seconds, of the last `RING` chunks; ``nan`` if none was loaded.
        load_p95: Their 95th percentile.
        load_p99: Their 99th percentile.
    """

    submitted: int
    delivered: int
    failed: int
    retries: int
    reloads: int
    abandoned: int
    under_way: int
    peak_under_way: int
    bytes: int
    peak_bytes: int
    seconds: float
    seconds_starting: float
    seconds_to_load: float
    seconds_to_first: float
    seconds_waited: float
    loader_bound: bool
    load_p50: float
    load_p95: float
    load_p99: float

    @property
    def waited_share(self) -> float:
        """The share of the time that the consumer waited, from 0 to 1."""
        return min(1.0, self.seconds_waited / self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        if not self.submitted:
            return "Nothing was loaded yet."
        counts = f"{self.delivered:,} {'batch' if self.delivered == 1 else 'batches'} in {_seconds(self.seconds)}"
        for count, what in ((self.failed, "failed"), (self.abandoned, "abandoned"), (self.under_way, "under way")):
            counts += f", {count:,} {what}" if count else ""
        waited = f"The consumer waited {_seconds(self.seconds_waited)} of it ({self.waited_share:.0%})"
        if self.seconds_waited > 1.001 * self.seconds:
            waited = f"Its consumers waited {_seconds(self.seconds_waited)}, added up"
        lines = [
            f"{counts}. {waited}"
            + (f", the first batch came after {_seconds(self.seconds_to_first)}." if self.delivered else ".")
        ]
        if self.delivered:
            lines.append(self._verdict())
        if not math.isnan(self.load_p50):
            quantiles = (
                f"{_seconds(self.load_p50)} (median), {_seconds(self.load_p95)} (p95), {_seconds(self.load_p99)} (p99)"
            )
            lines.append(f"Loading a batch took {quantiles}.")
        again = [
            f"{what}: {count:,}."
            for count, what in (
                (self.retries, "Tried again after an error or a timeout"),
                (self.reloads, "Loaded again after a worker's end"),
            )
            if count
        ]
        if again:
            lines.append(" ".join(again))
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not self.loader_bound:
            return "The loader was not the bottleneck: faster loading would hardly shorten the epoch."
        if self.seconds_to_load > self.seconds / 2:
            return (
                "The start was the bottleneck, before the first sample: keep the workers, with persistent_workers=True "
                "or a BatchExecutor."
            )
        return "The loader was the bottleneck: more workers or faster samples would shorten the epoch."


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.995 else f"{1000 * seconds:.3g} ms"

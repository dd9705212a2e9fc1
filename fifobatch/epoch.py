"""One epoch of a `FifoLoader`. Runs in the consumer's thread.

`LoaderIterator` is what ``iter(loader)`` returns, around what does the work: `Completions` where workers load, or
`InProcess`, which loads here.
"""

import warnings
from collections.abc import Iterator
from typing import Any

from fifobatch.asynchronous import AsyncBatches
from fifobatch.attempt import brief
from fifobatch.completion import Completions
from fifobatch.executor import BatchExecutor
from fifobatch.inprocess import InProcess
from fifobatch.measures import Span, Statistics
from fifobatch.plan import Failure
from fifobatch.progress import Progress

__all__ = ["LoaderIterator"]


class LoaderIterator(Iterator[Any]):
    """One epoch of a `FifoLoader`: moves the progress bar, around what does the work.

    Args:
        batches: What does the work.
        length: Batches that the loader expects; None if unknown.
        progress: The bar to move.
        executor: Whose workers end with this iterator, if any do.
        most: Batches above which a stream has yielded more than it said; None if it said nothing.
        had_batches: Whether an earlier epoch had some, so that it is worth a warning if this one has none.

    Attributes:
        quiet: Whether somebody else calls `warn_at_end`.
    """

    def __init__(
        self,
        batches: Completions | InProcess,
        length: int | None,
        progress: Progress | None,
        executor: BatchExecutor | None,
        most: int | None = None,
        had_batches: bool = False,
    ) -> None:
        self._batches = batches
        self._length = length
        self._progress = progress
        self._executor = executor
        self._most = most
        self._had_batches = had_batches
        self._yielded = 0
        self._kept: list[Any] = []  # a batch that is still to be yielded
        self._warned = False
        self.quiet = False

    def __aiter__(self) -> AsyncBatches:
        """Iterate in an event loop, which is not blocked. A task that is cancelled meanwhile closes this."""
        return AsyncBatches(lambda: self)

    def __next__(self) -> Any:
        """Return the next batch to complete.

        Raises:
            ChunkTimeoutError: A chunk ran for longer than the loader's ``timeout``; the other batches still come.
            ClosedError: The iterator was closed.
            Exception: What the user's code raised for this batch, with a note that names the sample; the other batches
                still come.
            WorkerDiedError: A chunk kills its worker process again and again; the other batches still come.
            StopIteration: Every batch was yielded.
        """
        try:
            if self._kept:
                return self._kept.pop()
            batch = next(self._batches)
            if self._progress is not None:
                self._progress.update(self._batches.under_way, self._batches.trace.seconds_waited)
            self._yielded += 1
            if self._most is not None and self._yielded > self._most:
                self._most = None
                self._kept.append(batch)  # the warning may be an error: then the batch still comes
                warnings.warn(
                    f"the IterableDataset's __len__ says that there are {self._length} batches, but there are more. "
                    "All of them come; mend __len__, or let each worker yield a share of the samples",
                    stacklevel=2,
                )
                self._kept.clear()
            return batch
        except StopIteration:
            if self._progress is not None:
                self._progress.close()
            if self._executor is not None:
                self._executor.shutdown(wait=False)  # not close(): targets handed out may still be loading
            if not self.quiet:
                self.warn_at_end()
            raise
        except BaseException:
            if self._progress is not None:
                self._progress.close()
            raise
        finally:
            del self  # an error's traceback holds this frame, and would keep the iterator and its workers

    def __len__(self) -> int:
        """Return how many batches the loader expects.

        Raises:
            TypeError: The sampler has no length.
        """
        if self._length is None:
            raise TypeError("the loader's sampler has no length")
        return self._length

    @property
    def failures(self) -> list[Failure]:
        """The samples left out of this epoch's batches so far, as ``on_error="skip"`` asks."""
        return list(self._batches.trace.failures)

    def statistics(self) -> Statistics:
        """Return where this epoch's time went so far."""
        return self._batches.trace.statistics()

    def timeline(self) -> tuple[Span, ...]:
        """Return when each chunk was submitted, started, loaded and delivered: the last 4,096, a span each."""
        return self._batches.trace.timeline()

    def warn_at_end(self) -> None:
        """Warn of what was odd in this epoch, at the line of the caller's caller; once."""
        failures, had_batches, self._had_batches = self._batches.trace.failures, self._had_batches, False
        if had_batches and not (self._yielded or failures or self.statistics().failed):
            warnings.warn(
                "this epoch was empty, and an earlier one was not: the IterableDataset can be iterated only once. Let "
                "its __iter__ return a new iterator each time",
                stacklevel=3,
            )
        if failures and not self._warned:
            self._warned = True
            first = failures[0]
            error = f"{type(first.error).__name__}: {first.error}"
            warnings.warn(
                f"left out of this epoch: {len(failures)} {'sample' if len(failures) == 1 else 'samples'} that failed; "
                f"see loader.failures. The first, index {brief(first.index)}: {error[:200]}",
                stacklevel=3,
            )

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        self._batches.close()
        if self._progress is not None:
            self._progress.close()
        if self._executor is not None:
            self._executor.close()

"""One epoch of a `FifoLoader`. Runs in the consumer's thread.

`LoaderIterator` is what ``iter(loader)`` returns, around what does the work: `Completions` where workers load, or
`InProcess`, which loads here.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from fifobatch.attempt import brief
from fifobatch.completion import Completions
from fifobatch.executor import BatchExecutor
from fifobatch.inprocess import InProcess
from fifobatch.measures import Span, Statistics
from fifobatch.plan import Batch, Failure
from fifobatch.progress import Progress

__all__ = ["LoaderIterator", "pinning"]


def pinning() -> Callable[[Batch[Any]], Batch[Any]]:
    """Return what copies a batch into pinned memory, of this thread's device also where another thread calls it."""
    device = torch.accelerator.current_device_index()

    def pin(batch: Batch[Any]) -> Batch[Any]:
        torch.accelerator.set_device_index(device)
        return dataclasses.replace(batch, data=torch_pin_memory(batch.data))  # type: ignore[no-untyped-call]

    return pin


class LoaderIterator(Iterator[Any]):
    """One epoch of a `FifoLoader`: moves the progress bar, around what does the work.

    Args:
        batches: What does the work.
        length: Batches that the loader expects; None if unknown.
        progress: The bar to move.
        executor: Whose workers end with this iterator, if any do.
        most: Batches above which a stream has yielded more than it said; None if it said nothing.
        had_batches: Whether an earlier epoch had some, so that it is worth a warning if this one has none.
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
        self._warned = False

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
            batch = next(self._batches)
            if self._progress is not None:
                self._progress.update(self._batches.under_way, self._batches.trace.seconds_waited)
            self._yielded += 1
            if self._most is not None and self._yielded > self._most:
                self._most = None
                warnings.warn(
                    f"the IterableDataset's __len__ says that there are {self._length} batches, but there are more. "
                    "All of them come; mend __len__, or let each worker yield a share of the samples",
                    stacklevel=2,
                )
            return batch
        except StopIteration:
            self._end()
            self._warn_at_end()
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

    def _warn_at_end(self) -> None:
        failures, had_batches, self._had_batches = self._batches.trace.failures, self._had_batches, False
        if had_batches and not self._yielded and not failures:
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

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._executor is not None:
            self._executor.close()

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        self._batches.close()
        self._end()

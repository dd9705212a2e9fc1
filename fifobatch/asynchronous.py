"""``async for`` over a loader.

What blocks (starting an epoch, waiting for a batch) runs in a thread of the iterator's own, one thing after another; so
the event loop never waits, and iterators that wait do not take threads from each other, as they would in the loop's own
executor. The rest runs in the event loop's thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from fifobatch.errors import ClosedError

__all__ = ["AsyncBatches"]

_END = object()  # StopIteration cannot be raised into a future


class _Epoch(Protocol):
    quiet: bool

    def __next__(self) -> Any: ...

    def close(self) -> None: ...

    def warn_at_end(self) -> None: ...


class AsyncBatches(AsyncIterator[Any]):
    """One epoch of a loader, for ``async for``. A task that is cancelled while it waits here closes it.

    With ``device="cuda"``, batches are ready for the device's default stream, which is that of the thread.

    Args:
        start: Starts the epoch; called in the thread, when the first batch is asked for.
    """

    def __init__(self, start: Callable[[], _Epoch]) -> None:
        self._start: Callable[[], _Epoch] | None = start
        self._epoch: _Epoch | None = None
        self._closed = False
        self._why = "this iterator was closed; start a new one with aiter(loader)"
        # It ends with this iterator, or, if it waits for a batch then, when that comes.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fifobatch-async")

    async def __anext__(self) -> Any:
        """Return the next batch to complete.

        Raises:
            ClosedError: The iterator was closed.
            Exception: What the loader's own iterator raises; the other batches still come.
            StopAsyncIteration: Every batch was yielded.
        """
        try:
            batch = await asyncio.get_running_loop().run_in_executor(self._thread, self._advance)
            if batch is not _END:
                return batch
            if self._epoch is not None:
                self._epoch.warn_at_end()
            raise StopAsyncIteration
        except asyncio.CancelledError:
            if not self._closed:
                self._why = (
                    "a wait for a batch was cancelled (asyncio.wait_for does so at its timeout), which closes the "
                    "iterator; start a new one with aiter(loader), or wait for asyncio.shield(task) with a timeout"
                )
            self.close()
            raise
        finally:
            del self  # an error's traceback holds this frame, and would keep the iterator and its workers

    async def aclose(self) -> None:
        """Do what `close` does, for ``contextlib.aclosing``."""
        self.close()

    def close(self) -> None:
        """Give up what is under way. Idempotent."""
        self._closed = True  # before the look at the epoch; the thread does both the other way round
        if self._epoch is not None:
            self._epoch.close()

    def _advance(self) -> Any:
        try:
            self._check_open()
            if self._epoch is None and self._start is not None:
                start, self._start = self._start, None
                self._epoch = start()
                self._epoch.quiet = True
                self._check_open()  # it may have been closed meanwhile
            if self._epoch is None:  # it could not be started
                return _END
            return next(self._epoch)
        except StopIteration:
            return _END
        finally:
            del self  # likewise

    def _check_open(self) -> None:
        if self._closed:
            if self._epoch is not None:
                self._epoch.close()
            raise ClosedError(self._why)

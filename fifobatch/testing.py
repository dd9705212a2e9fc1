"""For tests, yours and ours: complete batches by hand, in any order, without processes or clocks.

Everything here runs in the thread that calls it.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["ManualExecutor"]


class ManualExecutor(Executor):
    """An executor that runs a call when the test says so.

    Example:
        >>> from fifobatch import BatchExecutor, BatchPlan
        >>> from fifobatch.testing import ManualExecutor
        >>> manual = ManualExecutor()
        >>> batches = BatchExecutor(executor=manual).as_completed(BatchPlan(range(6), batch_size=2), window=3)
        >>> manual.complete(2), manual.complete(0), manual.complete(1)
        (None, None, None)
        >>> [batch.tolist() for batch in batches]
        [[4, 5], [0, 1], [2, 3]]

    Attributes:
        calls: The future of every call submitted so far, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []
        self._work: list[Callable[[], Any]] = []
        self._shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Note a call; nothing runs yet.

        Raises:
            RuntimeError: The executor was shut down.
        """
        if self._shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self.calls.append(future)
        self._work.append(lambda: fn(*args, **kwargs))
        return future

    @property
    def pending(self) -> list[int]:
        """The numbers of the calls that are not done."""
        return [number for number, future in enumerate(self.calls) if not future.done()]

    def complete(self, number: int) -> None:
        """Run call ``number`` (from 0, in order of submission) now, and complete its future.

        Raises:
            ValueError: It is done already.
        """
        future = self._begin(number)
        try:
            result = self._work[number]()
        except BaseException as error:  # as every executor: what the call raises is its future's
            future.set_exception(error)
        else:
            future.set_result(result)

    def fail(self, number: int, error: BaseException) -> None:
        """Complete call ``number`` with an error of the executor's own, such as ``BrokenExecutor``; nothing runs.

        Raises:
            ValueError: It is done already.
        """
        self._begin(number).set_exception(error)

    def _begin(self, number: int) -> "Future[Any]":
        future = self.calls[number]
        if future.done() or not future.set_running_or_notify_cancel():
            raise ValueError(f"call {number} is done or cancelled; pending: {self.pending}")
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; ``cancel_futures`` cancels those not done."""
        self._shut_down = True
        if cancel_futures:
            for number in self.pending:
                self.calls[number].cancel()

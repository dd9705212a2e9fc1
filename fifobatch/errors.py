"""What can go wrong, by whose fault it is.

::

    FifobatchError (RuntimeError)
    |-- SampleError                           your dataset failed, and its own error could not be raised here
    |-- WorkerDiedError (BrokenExecutor)      a chunk kills its worker process, again and again
    |-- ChunkTimeoutError (TimeoutError)      a chunk was not done within ``timeout`` seconds
    |-- PlanError (ValueError)                what you asked for cannot be planned or sent to a worker
    `-- ClosedError                           you closed it, then used it

What ``dataset[i]``, ``collate_fn`` or ``worker_init_fn`` raise is raised again as what it is, with a note that
names the index, the chunk and the worker. Only what would end a loop or a script without a word
(``StopIteration``, ``SystemExit``, ``KeyboardInterrupt``, ...) and what cannot be rebuilt arrives as ``SampleError``.

These classes are raised in the parent process, in the thread that iterates or calls ``result()``.
"""

from concurrent.futures import BrokenExecutor

__all__ = [
    "ChunkTimeoutError",
    "ClosedError",
    "FifobatchError",
    "PlanError",
    "SampleError",
    "WorkerDiedError",
    "noted",
    "raisable",
]


class FifobatchError(RuntimeError):
    """Base of every error that fifobatch itself raises."""


class SampleError(FifobatchError):
    """User code failed in a worker, and its own error cannot be raised here.

    The message holds the type and text of the original error; a note holds its traceback.
    """


class WorkerDiedError(FifobatchError, BrokenExecutor):
    """A chunk ended its worker process whenever it was tried (out of memory, a crash in C code, an exit).

    The message names the sample, and has the signal or exit code. A worker that is killed once is no error: what it had
    is loaded again.
    """


class ChunkTimeoutError(FifobatchError, TimeoutError):
    """A chunk ran for longer than the loader's ``timeout``, in seconds. A note has the Python stack where it hung."""


class PlanError(FifobatchError, ValueError):
    """What is asked for cannot be planned, sent to a worker, or started again. The message says what to change."""


class ClosedError(FifobatchError):
    """The loader, executor or iterator was closed (or the interpreter is exiting), then used."""


def noted(error: Exception, note: str) -> Exception:
    """Return ``error`` with a note; or, if it takes none, as a frozen dataclass, a `SampleError` in its place."""
    try:
        error.add_note(note)
    except Exception:  # the user's __setattr__ or add_note: an error must not hide an error
        in_its_place = SampleError(f"{type(error).__name__}, which takes no notes")
        in_its_place.__cause__ = error
        in_its_place.add_note(note)
        return in_its_place
    return error


def raisable(error: Exception, note: str) -> Exception:
    """Return ``error`` with a note; or, if it would end a loop without a word, a `SampleError` in its place."""
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        in_its_place = SampleError(f"{type(error).__name__}: {error}\n{note}")
        in_its_place.__cause__ = error
        return in_its_place
    return noted(error, note)

"""One try at one chunk: where it is, and what becomes of an error.

Runs where the chunk is loaded: in a worker process, or, without workers, in the consumer's thread.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fifobatch.plan import Items
from fifobatch.window import check_count

__all__ = [
    "COLLATING",
    "LISTING",
    "NO_POLICY",
    "PACKING",
    "SETTING_UP",
    "Again",
    "Attempt",
    "Later",
    "Located",
    "Policy",
    "batch_named",
    "brief",
    "named",
]

# Steps of a chunk, beside the positions of its samples.
SETTING_UP, LISTING, COLLATING, PACKING = -1, -2, -3, -4


class Policy(NamedTuple):
    """What becomes of chunks that fail.

    Attributes:
        retries: How often a failing chunk is tried again.
        retry_on: The exceptions after which it is.
        skip: Whether samples that fail for good are left out of their batch, instead of the batch failing.
        timeout: Seconds that a chunk may run; None for ever.
    """

    retries: int = 0
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = Exception
    skip: bool = False
    timeout: float | None = None

    @classmethod
    def of(cls, retries: Any, retry_on: Any, on_error: Any, timeout: Any) -> "Policy":
        """Return the policy that a loader's arguments ask for.

        Raises:
            TypeError: ``retries`` is not an int, or ``retry_on`` neither an exception class nor a tuple of them.
            ValueError: ``retries`` is negative, or ``on_error`` neither ``"raise"`` nor ``"skip"``.
        """
        classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
        if not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
            raise TypeError(f"retry_on={retry_on!r} is neither an exception class nor a tuple of them")
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={on_error!r}: give "raise" or "skip"')
        return cls(check_count("retries", retries, 0), retry_on, on_error == "skip", timeout or None)


NO_POLICY = Policy()


class Located(Exception):
    """Says where the user's code failed, and carries what it raised.

    Attributes:
        error: What it raised.
    """

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(where)
        self.error = error


class Again(Exception):
    """The chunk has failed and is to be tried again."""


class Later(Exception):
    """Another batch of the lane is to be tried again before this one."""


class Attempt:
    """One try at one chunk: notes where it is, and decides what becomes of an error.

    Args:
        number: The chunk's number.
        policy: What becomes of chunks that fail.
        attempt: Which try it is, from 1.
        left_out: Positions of samples not to load, as they kill or stop the process.
        singly: Load one sample at a time, also where the dataset would load several at once.
        seeds: One for each sample, and one for ``collate_fn``; None where the chunk is seeded as a whole.
        seed: The chunk's, with which the caller has seeded this process; None where it has not.

    Attributes:
        failed: What was left out: the samples' positions (None for all that are not in ``left_out``), and the error.
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        attempt: int = 1,
        left_out: Collection[int] = (),
        singly: bool = False,
        seeds: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        self.number = number
        self.policy = policy
        self.attempt = attempt
        self.left_out = left_out
        self.singly = singly or seeds is not None
        self.seeds = seeds
        self.seed = seed
        self.failed: list[tuple[tuple[int, ...] | None, Located]] = []
        self._began = time.perf_counter()

    def at(self, step: int) -> bool:
        """Note the next step; return whether the chunk was abandoned."""
        return False

    def restart(self) -> None:
        """Note that the time of the chunk runs from now on."""

    def recovers(self, error: BaseException) -> bool:
        """Whether the samples that raised ``error`` are to be left out.

        Raises:
            Again: The chunk is to be tried again instead.
        """
        if self.attempt <= self.policy.retries and isinstance(error, self.policy.retry_on):
            raise Again from error
        return self.policy.skip and isinstance(error, Exception)

    def fail(self, positions: tuple[int, ...] | None, error: BaseException, where: str) -> None:
        """Leave samples out, or raise.

        Args:
            positions: The samples'; None for all.
            error: What the user's code raised.
            where: What it was doing.

        Raises:
            Again: The chunk is to be tried again.
            Located: The batch fails.
        """
        if not self.recovers(error):
            raise self.located(error, where) from None  # held by no variable: its traceback holds this frame
        self.failed.append((positions, self.located(error, where)))

    def located(self, error: BaseException, where: str) -> Located:
        """Return ``error`` with its place: texts are made for errors only."""
        seconds = time.perf_counter() - self._began
        return Located(f"{where}; attempt {self.attempt}, after {seconds:.3g} s", error)


def brief(indices: object) -> str:
    """Return ``indices`` as text for a message, at most 100 characters of it."""
    try:
        text = repr(indices)
    except Exception as error:  # the user's __repr__, inside an error message
        text = f"<{type(indices).__name__}, and its repr raises {type(error).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


def named(number: int, sent: object) -> str:
    """Return a chunk in words, for a message.

    Args:
        number: Its number.
        sent: Its `Chunk.sent`.
    """
    return f"batch {number} ({sent})" if isinstance(sent, Items) else f"chunk {number} (indices {brief(sent)})"


def batch_named(number: int, sent: object) -> str:
    """Return a chunk's batch in words, likewise."""
    name = named(number, sent)
    return name if isinstance(sent, Items) else f"the batch of {name}"

"""The progress bar. Runs in the consumer's thread, once a yielded batch; tqdm draws it, on stderr."""

import io
import time
import weakref
from collections.abc import Mapping
from typing import Any

import tqdm.std
from tqdm.auto import tqdm as auto_tqdm

__all__ = ["Progress", "check_options"]


class Progress:
    """A tqdm bar that counts yielded batches, and shows how many are under way and how long the consumer waited.

    The bar is closed by `close`, or when this object is collected.

    Args:
        total: Batches that will come; None if unknown.
        options: tqdm's arguments, which take precedence.
    """

    def __init__(self, total: int | None, options: Mapping[str, Any]) -> None:
        self._bar = auto_tqdm(**{"total": total, "unit": "batch", "dynamic_ncols": True, **options})
        self._started = time.perf_counter()
        self.close = weakref.finalize(self, self._bar.close)

    @classmethod
    def of(cls, progress: bool | Mapping[str, Any], total: int | None) -> "Progress | None":
        """Return the bar that a loader's ``progress`` asks for."""
        if progress is False:
            return None
        return cls(total, progress if isinstance(progress, Mapping) else {})

    def update(self, under_way: int, seconds_waited: float) -> None:
        """Count one more yielded batch.

        Args:
            under_way: Batches submitted and not yet yielded.
            seconds_waited: How long the consumer has waited for batches so far.
        """
        share = seconds_waited / max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{under_way} under way, waited {share:.0%}", refresh=False)
        self._bar.update()


def check_options(progress: Any) -> None:
    """Raise unless ``progress`` is True, False or a dict of arguments that tqdm takes.

    Raises:
        TypeError: It is not.
    """
    if isinstance(progress, bool):
        return
    if not isinstance(progress, Mapping):
        raise TypeError(f"progress={progress!r} is a {type(progress).__name__}; give True, False or a dict for tqdm")
    options = {**progress, "file": io.StringIO(), "disable": False}
    options.pop("display", None)  # the notebook bar's own
    try:
        tqdm.std.tqdm(**options).close()
    except (KeyError, TypeError, ValueError) as error:
        raise TypeError(f"progress={progress!r}: tqdm does not take that: {error}") from error

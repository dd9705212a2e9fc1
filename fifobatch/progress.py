"""The progress bar. Runs in the consumer's thread, once a yielded batch; tqdm draws it, on stderr."""

import time
import weakref
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

__all__ = ["Progress"]


class Progress:
    """A tqdm bar that counts yielded batches, and shows how many are under way and how long the consumer waited.

    The bar is closed by `close`, or when this object is collected.

    Args:
        total: Batches that will come; None if unknown.
        options: tqdm's arguments, which take precedence.
    """

    def __init__(self, total: int | None, options: Mapping[str, Any]) -> None:
        self._bar = tqdm(**{"total": total, "unit": "batch", "dynamic_ncols": True, **options})
        self._started = time.perf_counter()
        self.close = weakref.finalize(self, self._bar.close)

    def update(self, under_way: int, seconds_waited: float) -> None:
        """Count one more yielded batch.

        Args:
            under_way: Batches submitted and not yet yielded.
            seconds_waited: How long the consumer has waited for batches so far.
        """
        share = seconds_waited / max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{under_way} under way, waited {share:.0%}", refresh=False)
        self._bar.update()

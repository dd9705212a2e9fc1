"""Who is asked for the next batch of a stream: the lanes of an ``IterableDataset``, each with its iterator.

Pure counting in the parent process, in the thread that iterates; `lane` is what reads.

::

    lane 0:  batches 0, n, 2n, ...          each lane is asked for its next batch as long as at most
    lane 1:  batches 1, n + 1, 2n + 1, ...  ``per_lane`` of its requests wait; where the order matters,
    ...                                     in the order of the numbers (torch's round robin)
"""

from fifobatch.attempt import brief
from fifobatch.plan import Chunk, chunk_seed

__all__ = ["SPLITS", "Lanes"]

SPLITS = ("auto", "none", "stride", "parent")  # see `FifoLoader`

REPEATS = (
    "every worker reads the whole IterableDataset, as it has not looked at torch.utils.data.get_worker_info(): its "
    "samples come once a worker. Let its __iter__ yield a share of them; or give split='stride' (each worker keeps a "
    "share of what it reads), split='parent' (this process reads), or split='none' if that is what you want"
)

SPLITS_TWICE = (
    "the IterableDataset looks at torch.utils.data.get_worker_info(), so it seems to yield a share to each worker, of "
    "which split='stride' keeps a share again: then samples are lost. Leave split= out"
)


class Lanes:
    """The lanes of one epoch.

    Args:
        count: How many there are.
        per_lane: How many requests may wait in each.
        in_order: Whether batches have to be asked for in the order of their numbers.
        seed: The epoch's base seed.
        epoch: The epoch's number.
        split: Who reads what; see `FifoLoader`.

    Attributes:
        warnings: What there is to warn of, and has not been.
    """

    def __init__(self, count: int, per_lane: int, in_order: bool, seed: int, epoch: int, split: str = "auto") -> None:
        self.count = count
        self._per_lane = per_lane
        self._in_order = in_order
        self._seed = seed
        self._epoch = epoch
        self._asked = [0] * count
        self._waiting = [0] * count
        self._live = set(range(count))
        self._split = split
        self._looked: set[int] = set()
        self._unlooked: set[int] = set()
        self.warnings: list[str] = []

    def take(self) -> Chunk | None:
        """Return the next batch to ask for; None if there is none now."""
        if self._in_order:
            lane = min(self._live, key=self._next_number, default=None)
        else:
            lane = min(self._live, key=lambda lane: (self._waiting[lane], self._next_number(lane)), default=None)
        if lane is None or self._waiting[lane] >= self._per_lane:
            return None
        number = self._next_number(lane)
        self._asked[lane] += 1
        self._waiting[lane] += 1
        return Chunk(number, None, chunk_seed(self._seed, self._epoch, number))

    def _next_number(self, lane: int) -> int:
        return self._asked[lane] * self.count + lane

    def landed(self, number: int, is_last: bool, has_looked: bool | None) -> None:
        """Note that a request was answered.

        Args:
            number: The batch's.
            is_last: Whether its lane is over.
            has_looked: Whether the dataset has looked at its worker info there; None if nobody knows.
        """
        lane = number % self.count
        self._waiting[lane] -= 1
        if is_last:
            self._live.discard(lane)
        lanes = self._looked if has_looked else self._unlooked
        if has_looked is None or lane in lanes:
            return
        lanes.add(lane)
        if self._split == "auto" and len(self._unlooked) == 2 and not has_looked:
            self.warnings.append(REPEATS)
        if self._split == "stride" and self.count > 1 and len(self._looked) == 1 and has_looked:
            self.warnings.append(SPLITS_TWICE)

    def cut(self, number: int, error: Exception) -> None:
        """Note that a lane is over before its end, as the stream has raised an error there, which is left out."""
        self.warnings.append(
            f"the IterableDataset has raised {brief(error)} in worker {number % self.count} of {self.count}: what that "
            "worker had still to read is left out of this epoch, too"
        )

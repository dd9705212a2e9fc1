"""Who is asked for the next batch of a stream: the lanes of an ``IterableDataset``, each with its iterator.

Pure counting in the parent process, in the thread that iterates; `lane` is what reads.

::

    lane 0:  batches 0, n, 2n, ...          each lane is asked for its next batch as long as at most
    lane 1:  batches 1, n + 1, 2n + 1, ...  ``per_lane`` of its requests wait; where the order matters,
    ...                                     in the order of the numbers (torch's round robin)
"""

from fifobatch.plan import Chunk, chunk_seed

__all__ = ["REPEATS", "SPLITS", "Lanes"]

SPLITS = ("auto", "none", "stride", "parent")  # see `FifoLoader`

REPEATS = (
    "every worker reads the whole IterableDataset, as it has not looked at torch.utils.data.get_worker_info(): its "
    "samples come once a worker. Let its __iter__ yield a share of them; or give split='stride' (each worker keeps a "
    "share of what it reads), split='parent' (this process reads), or split='none' if that is what you want"
)


class Lanes:
    """The lanes of one epoch.

    Args:
        count: How many there are.
        per_lane: How many requests may wait in each.
        in_order: Whether batches have to be asked for in the order of their numbers.
        seed: The epoch's base seed.
        epoch: The epoch's number.
    """

    def __init__(self, count: int, per_lane: int, in_order: bool, seed: int, epoch: int) -> None:
        self.count = count
        self._per_lane = per_lane
        self._in_order = in_order
        self._seed = seed
        self._epoch = epoch
        self._asked = [0] * count
        self._waiting = [0] * count
        self._live = set(range(count))
        self._unsplit: set[int] = set()

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

    @property
    def repeats(self) -> bool:
        """Whether several lanes seem to read the same: the dataset has not looked at its worker info in any of them."""
        return len(self._unsplit) > 1

    def landed(self, number: int, is_last: bool, is_split: bool) -> None:
        """Note that a request was answered.

        Args:
            number: The batch's.
            is_last: Whether its lane is over.
            is_split: Whether the dataset has looked at its worker info there.
        """
        lane = number % self.count
        self._waiting[lane] -= 1
        if is_last:
            self._live.discard(lane)
        if not is_split:
            self._unsplit.add(lane)

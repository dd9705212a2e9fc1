"""`PairedLoader`: two datasets, one plan. Runs in the consumer's thread; how pairs are loaded is `pairing`'s.

It is a `FifoLoader` over the inputs, which has the plan; for each of its chunks the target's is made from it. So the
halves are aligned by construction: there is no second sampler whose seed would have to agree.
"""

import copy
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from fifobatch.alignment import Alignment, InProcessPairs, say_half
from fifobatch.completion import Completions
from fifobatch.device import Transfer
from fifobatch.epoch import LoaderIterator
from fifobatch.errors import PlanError
from fifobatch.executor import BatchExecutor
from fifobatch.flight import Run
from fifobatch.inprocess import InProcess
from fifobatch.loader import FifoLoader
from fifobatch.pairing import Pairing
from fifobatch.plan import Batch, BatchPlan
from fifobatch.target import hand_out

__all__ = ["PairedLoader"]

_both = attrgetter("data")  # what `zipped` yields; its identity says so


class PairedLoader(FifoLoader[Any]):
    """Load two aligned datasets by one plan, and yield each input batch with a future of its target batch.

    The target loads while the model computes. A pair is yielded as soon as its input is there; its target is a
    `concurrent.futures.Future` of the batch of the very same indices, whatever the order, and whatever workers do.

    Example:
        >>> from fifobatch import PairedLoader
        >>> squares = {index: index * index for index in range(6)}
        >>> loader = PairedLoader(range(6), squares, batch_size=2, num_workers=2, in_order=True)
        >>> for x, target in loader:
        ...     y = target.result()  # after the model's forward pass
        ...     print(x.tolist(), y.tolist())
        [0, 1] [0, 1]
        [2, 3] [4, 9]
        [4, 5] [16, 25]

    Of each pair the input is submitted first. A pair counts once: in ``window``, ``max_skew``, ``max_bytes``, progress
    and statistics; the timeline shows both halves. ``batches()`` yields `Batch` objects whose data are such pairs.

    A target that was yielded is loaded, also if the iterator is dropped, until its future is dropped, too, or `close`
    ends it with a `ClosedError`. Without workers, targets are done when they are yielded.

    With ``on_error="skip"`` an input sample that fails is left out of its target, too. A target that fails, with what
    ``retries`` could do, raises from ``target.result()``: the input was handed out already, and nothing is shortened on
    one side only. `zipped` leaves a sample that fails in either half out of both.

    Args:
        inputs: The dataset that is planned over.
        targets: The dataset of the targets: any, also the same one.
        cycle_targets: Whether the indices of targets wrap around where there are fewer of them than inputs. Of more
            targets than inputs, those beyond are not loaded.
        share_randomness: Whether both halves of a pair are seeded alike, so that random crops and flips of both agree:
            before each sample, so its draws agree from its start on, as far as both halves make the same, whatever
            other samples draw and whichever are left out; and before ``collate_fn``. ``__getitems__`` is then called
            with one index at a time. On threads (``executor=ThreadPoolExecutor(...)``) nothing is seeded.
        arguments: Those of `FifoLoader`, by name, for both halves.

    Raises:
        PlanError: The datasets have different lengths, or one has no indices, as an ``IterableDataset``.
        TypeError, ValueError: As `FifoLoader`; there is no ``split``.
    """

    _frames = 1

    def __init__(
        self,
        inputs: Dataset[Any] | Any,
        targets: Dataset[Any] | Any,
        *,
        cycle_targets: bool = False,
        share_randomness: bool = False,
        **arguments: Any,
    ) -> None:
        _check_arguments(arguments)
        for name, dataset in (("inputs", inputs), ("targets", targets)):
            _check_dataset(name, dataset)
        self.targets = targets
        self.cycle_targets = cycle_targets
        self.share_randomness = share_randomness
        self._targets_owner = _Owner()
        self._lengths = _check_lengths(inputs, targets, cycle_targets)
        super().__init__(inputs, **arguments)

    def zipped(self) -> LoaderIterator:
        """Iterate like the loader itself, but yield both halves as batches, when both are there.

        Example:
            >>> from fifobatch import PairedLoader
            >>> loader = PairedLoader(range(4), range(10, 14), batch_size=2, num_workers=2)
            >>> sorted((x.tolist(), y.tolist()) for x, y in loader.zipped())
            [([0, 1], [10, 11]), ([2, 3], [12, 13])]

        Raises:
            PlanError: As `FifoLoader`.
        """
        return self._iterate(_both)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch's number to the sampler, the batch sampler and both datasets, if they want to know it."""
        super().set_epoch(epoch)
        if self.targets is not self.dataset and callable(getattr(type(self.targets), "set_epoch", None)):
            self.targets.set_epoch(epoch)  # type: ignore[union-attr]

    def close(self) -> None:
        """End the workers and every iterator of this loader, and what was handed out and is not loaded. Idempotent."""
        pairings = list(self._pairings)
        super().close()
        for pairing in pairings:
            pairing.close()

    # -- in place of `FifoLoader`'s own

    def _start_afresh(self) -> None:
        super()._start_afresh()
        # Also those of iterators that were dropped: a target keeps its own.
        self._pairings: weakref.WeakSet[Pairing] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_pairings"}

    def _halves(self, plan: BatchPlan) -> tuple[BatchPlan, Alignment]:
        targets = copy.copy(plan)
        targets.dataset = self.targets
        return targets, Alignment(plan.collates, self.share_randomness, self._lengths if self.cycle_targets else None)

    def _load_here(
        self,
        plan: BatchPlan,
        select: Callable[[Batch[Any]], Any],
        transfer: Transfer,
    ) -> InProcess:
        return InProcessPairs(plan, *self._halves(plan), select is _both, select, self._policy, transfer.at_once)

    def _load_there(
        self,
        executor: BatchExecutor,
        plan: BatchPlan,
        select: Callable[[Batch[Any]], Any],
        transfer: Transfer,
    ) -> Completions:
        def pair(inputs: Run) -> Pairing:
            targets, alignment = self._halves(plan)
            trace = inputs.trace.beside = executor.new_trace()
            try:
                run = executor.start_run(
                    targets,
                    2 * window.size,
                    trace,
                    num_workers=self.num_workers,
                    worker_init_fn=self.worker_init_fn,
                    policy=self._policy if zips else self._policy._replace(skip=False),
                    owner=self._targets_owner,
                )
            except PlanError as error:
                raise say_half(error, "target") from error.__cause__
            pairing = Pairing(inputs, run, alignment, zips, transfer)
            self._pairings.add(pairing)
            return pairing

        window, zips = self._make_window(), select is _both
        try:
            return executor.iterate(
                plan,
                window,
                transfer.before(select if zips else partial(hand_out, select, executor)),
                num_workers=self.num_workers,
                worker_init_fn=self.worker_init_fn,
                policy=self._policy,
                stage=transfer.stage,
                owner=self,
                pair=pair,
            )
        except PlanError as error:
            if not getattr(error, "__notes__", None):
                say_half(error, "input")
            raise


class _Owner:
    """Stands for the targets' half of a loader, which may be the same dataset as its inputs."""


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Check that these are arguments of `FifoLoader` that go with pairs.

    Raises:
        TypeError: They are not.
    """
    known = {*inspect.signature(FifoLoader.__init__).parameters} - {"self", "dataset"}
    for name in arguments:
        if name == "split":
            raise TypeError("PairedLoader() takes no split=: it is about streams, which have no indices to align by")
        if name not in known:
            raise TypeError(f"PairedLoader() got an unexpected keyword argument {name!r}")


def _check_dataset(name: str, dataset: Any) -> None:
    """Check that a dataset is one with indices.

    Raises:
        PlanError: It is not.
    """
    cls = type(dataset)
    if isinstance(dataset, IterableDataset):
        raise PlanError(
            f"{name}={cls.__name__}(...) is an IterableDataset, which has no indices to align by. Zip the two streams "
            "inside one IterableDataset that yields (input, target), or give datasets with __getitem__ and __len__"
        )
    if not (hasattr(cls, "__getitem__") or hasattr(cls, "__getitems__")):
        raise PlanError(f"{name}={cls.__name__}(...) has no __getitem__: give a dataset, or a list of the samples")


def _check_lengths(inputs: Any, targets: Any, cycle_targets: bool) -> tuple[int, int] | None:
    """Return both lengths; None if one has none, so that only the sampler knows what its indices are.

    Raises:
        PlanError: They do not go together.
    """
    lengths = []
    for name, dataset in (("inputs", inputs), ("targets", targets)):
        try:
            lengths.append(len(dataset))
        except TypeError:
            if cycle_targets:
                raise PlanError(
                    f"cycle_targets=True, but {name}={type(dataset).__name__}(...) has no length to wrap around at; "
                    "give it a __len__"
                ) from None
            return None
    if cycle_targets and not lengths[1] and lengths[0]:
        raise PlanError(f"cycle_targets=True, but targets={type(targets).__name__}(...) is empty")
    if lengths[0] != lengths[1] and not cycle_targets:
        raise PlanError(
            f"inputs={type(inputs).__name__}(...) has {lengths[0]:,} samples and targets={type(targets).__name__}(...) "
            f"has {lengths[1]:,}: they are not aligned. Give torch.utils.data.Subset(...) of the longer one, or "
            "cycle_targets=True, which starts shorter targets again"
        )
    return lengths[0], lengths[1]

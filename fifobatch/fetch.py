"""One chunk from the dataset: seed, ``dataset[i]`` for each index, collate.

Runs in a worker process, or, where there are no workers (``num_workers=0``), in the consumer's thread.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate, default_collate_fn_map

from fifobatch.arena import Room
from fifobatch.attempt import COLLATING, LISTING, NO_POLICY, Attempt, Policy, brief, named
from fifobatch.errors import PlanError
from fifobatch.pickling import IN_BAND_BYTES
from fifobatch.plan import Items

__all__ = [
    "ABANDONED",
    "NOTHING",
    "Payload",
    "StreamOptions",
    "collated",
    "fetch",
    "random_state",
    "seed_all",
    "seeds",
    "size_of",
]


class StreamOptions(NamedTuple):
    """How a lane makes batches of an ``IterableDataset``.

    Attributes:
        batch_size: Samples a batch; None for single samples, uncollated.
        drop_last: Whether a last batch that is not full is left out.
        stride: Whether each of n lanes keeps every n-th sample only.
    """

    batch_size: int | None
    drop_last: bool
    stride: bool


class Payload(NamedTuple):
    """What a worker needs of a plan, shipped once: it becomes the worker's own copy."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    collates: bool
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    policy: Policy = NO_POLICY
    stream: StreamOptions | None = None


ABANDONED = object()  # instead of a batch: nobody wants it any more
NOTHING = object()  # instead of a batch: every sample was left out


def fetch(plan: Payload, indices: Any, attempt: Attempt, room: Room | None = None) -> Any:
    """Return the collated batch of one chunk; `ABANDONED` or `NOTHING` if there is none.

    Args:
        plan: Dataset and functions.
        indices: The chunk's; or `Items`, which need only be collated.
        attempt: Which try it is.
        room: Where torch's default collate_fn makes its tensors, so that they need not be copied there.

    Raises:
        Again: It is to be tried again.
        Located: From whatever the user's code raises.
    """
    if isinstance(indices, Items):
        samples, loaded = _take_read(indices, plan.collates, attempt)
    elif not plan.collates:
        samples, loaded = _load_single(plan.dataset, indices, attempt), indices
    elif _fetches_lists(type(plan.dataset)) and not attempt.singly:
        samples, loaded = _load_list(plan.dataset, indices, attempt)
    else:
        samples, loaded = _load_each(plan.dataset, indices, attempt)
    if samples is ABANDONED or samples is NOTHING:
        return samples
    sent = indices if isinstance(indices, Items) else loaded
    return collated(plan, samples, loaded, attempt, lambda: named(attempt.number, sent), room)


def collated(
    plan: Payload, samples: Any, indices: Any, attempt: Attempt, chunk: Callable[[], str], room: Room | None
) -> Any:
    """Return what ``collate_fn`` makes of ``samples``; `NOTHING` if it fails and they are left out.

    Args:
        plan: Has the function.
        samples: A list of samples, or a single one where nothing is collated.
        indices: Their indices.
        attempt: Which try it is.
        chunk: Says in words which chunk it is.
        room: Where torch's default collate_fn makes its tensors.

    Raises:
        Again: It is to be tried again.
        Located: From whatever it raises.
    """
    attempt.at(COLLATING)
    _seed(attempt, -1)
    try:
        return _collate(plan, samples, room)
    except BaseException as error:  # whatever it is, it gets its place and goes on
        where = f"collate_fn, {chunk()}{_unequal(samples, indices)}"
        if plan.collates and len(samples) == 0:  # so there is none to leave out
            attempt.recovers(error)
            raise attempt.located(error, where) from None
        attempt.fail(None, error, where)
        return NOTHING


def _take_read(items: Items, collates: bool, attempt: Attempt) -> tuple[Any, Any]:
    kept = [position for position in range(len(items.positions)) if position not in attempt.left_out]
    if not kept:
        return NOTHING, kept
    samples = [items.samples[position] for position in kept] if collates else items.samples
    return samples, [items.positions[position] for position in kept]


def _load_single(dataset: Any, index: Any, attempt: Attempt) -> Any:
    attempt.at(0)
    if 0 in attempt.left_out:
        return NOTHING
    _seed(attempt, 0)
    try:
        return dataset[index]
    except BaseException as error:  # likewise
        attempt.fail((0,), error, f"loading dataset[{brief(index)}], chunk {attempt.number}")
        return NOTHING


def _load_list(dataset: Any, indices: Any, attempt: Attempt) -> tuple[Any, Any]:
    attempt.at(LISTING)
    if attempt.left_out:
        indices = [index for position, index in enumerate(indices) if position not in attempt.left_out]
        if not indices:
            return NOTHING, indices
    try:
        samples = dataset.__getitems__(indices)
        if len(samples) != len(indices):
            cls = type(dataset).__name__
            raise ValueError(f"{cls}.__getitems__ returned {len(samples)} samples for {len(indices)} indices")
    except BaseException as error:  # likewise
        if not attempt.recovers(error):
            where = f"dataset.__getitems__({brief(indices)}), chunk {attempt.number}"
            raise attempt.located(error, where) from None
    else:
        return samples, indices
    if attempt.seed is not None:
        seed_all(attempt.seed)  # what was drawn so far is drawn again
    return _load_each(dataset, indices, attempt)  # to find out which of them fail


def _load_each(dataset: Any, indices: Any, attempt: Attempt) -> tuple[Any, Any]:
    try:
        each = list(indices)
    except BaseException as error:  # likewise
        attempt.fail(None, error, f"reading the indices {brief(indices)} of chunk {attempt.number}")
        return NOTHING, indices
    of_list = _fetches_lists(type(dataset))
    samples: list[Any] = []
    loaded: list[Any] = []
    for position, index in enumerate(each):
        if position in attempt.left_out:
            continue
        if attempt.at(position):
            return ABANDONED, each
        _seed(attempt, position)
        try:
            samples.append(_only(dataset.__getitems__([index])) if of_list else dataset[index])
        except BaseException as error:  # likewise
            where = f"loading dataset[{brief(index)}], chunk {attempt.number} (indices {brief(indices)})"
            attempt.fail((position,), error, where)
        else:
            loaded.append(index)
    return (samples, loaded) if samples or not each else (NOTHING, each)


def _seed(attempt: Attempt, position: int) -> None:
    """Seed a sample, or ``collate_fn`` (-1), where each has a seed of its own."""
    if attempt.seeds is not None:
        seed_all(attempt.seeds[position])


def _only(samples: Any) -> Any:
    [sample] = samples
    return sample


def _collate(plan: Payload, samples: Any, room: Room | None) -> Any:
    if plan.collates and plan.collate_fn is default_collate and len(samples) == 0:
        raise PlanError(
            "the batch sampler has yielded an empty batch, of which torch's default collate_fn makes nothing. Leave it "
            "out there, or give a collate_fn that takes an empty list"
        )
    if plan.collate_fn is not default_collate or room is None:
        return plan.collate_fn(samples)
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: partial(_stack, room)})


def _stack(room: Room, tensors: Any, *, collate_fn_map: Any = None) -> Any:
    """Stack tensors as torch's default does, in the slot if they are plain."""
    first = tensors[0]
    plain = all(
        type(tensor) is torch.Tensor
        and tensor.dtype is first.dtype
        and tensor.shape == first.shape
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        for tensor in tensors
    )
    size = len(tensors) * first.nbytes if plain else 0
    block = room.allocate(size) if size > IN_BAND_BYTES else None
    if block is not None:
        out = torch.frombuffer(block, dtype=first.dtype).view(len(tensors), *first.shape)
        return torch.stack(tensors, 0, out=out)
    # In a worker, torch's own stacks into fresh shared memory of torch's. Ours is ready already.
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    finally:
        torch_worker._worker_info = info


def _fetches_lists(cls: type) -> bool:
    """Whether ``__getitems__`` is to be used: there, not None, and not below an overridden ``__getitem__``.

    Looked up on the class: a wrapper that forwards every attribute has no ``__getitems__`` of its own, and a subclass
    of ``Subset`` that overrides ``__getitem__`` means it.
    """
    for base in cls.__mro__:
        if "__getitems__" in vars(base):
            return callable(vars(base)["__getitems__"])
        if "__getitem__" in vars(base):
            return False
    return False


def _unequal(samples: Any, indices: Any) -> str:
    """Say which samples have which shape, at the first place where they differ; empty if they do not."""
    try:
        path, shapes = _first_difference(list(samples), "sample")
        by_shape: dict[str, list[Any]] = {}
        for shape, index in zip(shapes, indices):
            by_shape.setdefault(shape, []).append(index)
    except Exception:  # the user's own containers, inside an error message
        return ""
    groups = "; ".join(f"{shape} at {brief(group)}" for shape, group in by_shape.items())
    return f": {path} is {groups}" if len(by_shape) > 1 else ""


def _first_difference(samples: list[Any], path: str) -> tuple[str, list[str]]:
    """Return the path of the first part in which samples differ in kind, length or shape, and what each has there."""
    first = samples[0]
    parts: Iterable[Any] = ()
    if all(isinstance(sample, Mapping) and sample.keys() == first.keys() for sample in samples):
        parts = first.keys()
    elif all(isinstance(sample, (list, tuple)) and len(sample) == len(first) for sample in samples):
        parts = range(len(first))
    for part in parts:
        where, shapes = _first_difference([sample[part] for sample in samples], f"{path}[{part!r}]")
        if len(set(shapes)) > 1:
            return where, shapes
    return path, [_shape(sample) for sample in samples]


def _shape(sample: Any) -> str:
    kind = type(sample).__name__
    if hasattr(sample, "shape"):
        return f"a {kind} of shape {tuple(sample.shape)}"
    if isinstance(sample, Mapping):
        return f"a {kind} with keys {brief(sorted(map(str, sample)))}"
    return f"a {kind} of length {len(sample)}" if isinstance(sample, (list, tuple)) else f"a {kind}"


def size_of(data: Any) -> int:
    """Return how many bytes the tensors, arrays and texts have that lie in a batch's lists, tuples and mappings."""
    if isinstance(data, Mapping):
        return sum(map(size_of, data.values()))
    if isinstance(data, (list, tuple)):
        return sum(map(size_of, data))
    size = len(data) if isinstance(data, (str, bytes, bytearray)) else getattr(data, "nbytes", 0)
    return size if isinstance(size, int) else 0


def seed_all(seed: int) -> None:
    """Seed ``random``, NumPy (if it is imported) and torch's CPU generator with 64 bits.

    ``torch.default_generator`` instead of ``torch.manual_seed``: 2 us instead of 250.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed % 2**64)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])


@contextmanager
def seeds(seed: int) -> Iterator[None]:
    """Seed as a worker would, and put this process's own random state back afterwards."""
    restore = random_state()
    seed_all(seed)
    try:
        yield
    finally:
        restore()


def random_state() -> Callable[[], None]:
    """Return what puts the random state back that there is now."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return restore

"""One chunk from the dataset: seed, ``dataset[i]`` for each index, collate.

Runs in a worker process, or, where there are no workers (``num_workers=0``), in the consumer's thread.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate, default_collate_fn_map

from fifobatch.arena import Room
from fifobatch.pickling import IN_BAND_BYTES

__all__ = ["ABANDONED", "Located", "Payload", "brief", "fetch", "seed_all", "seeds", "size_of"]


class Payload(NamedTuple):
    """What a worker needs of a plan, shipped once: it becomes the worker's own copy."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    collates: bool
    worker_init_fn: Callable[[int], None] | None
    num_workers: int


ABANDONED = object()


class Located(Exception):
    """Says where the user's code failed, and carries what it raised.

    Attributes:
        error: What it raised.
    """

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(where)
        self.error = error


def fetch(
    plan: Payload,
    indices: Any,
    number: int,
    abandoned: Callable[[], bool] = lambda: False,
    room: Room | None = None,
) -> Any:
    """Return the collated batch of one chunk; `ABANDONED` if nobody wants it any more.

    Args:
        plan: Dataset and functions.
        indices: The chunk's.
        number: The chunk's.
        abandoned: Asked before each sample.
        room: Where torch's default collate_fn makes its tensors, so that they need not be copied there.

    Raises:
        Located: From whatever the user's code raises.
    """
    dataset = plan.dataset
    step = "reading the indices"
    current: Any = indices
    try:
        if not plan.collates:
            step = "loading dataset[...]"
            samples = dataset[indices]
        elif _fetches_lists(type(dataset)):
            step = "dataset.__getitems__"
            samples = dataset.__getitems__(indices)
            if len(samples) != len(indices):
                raise ValueError(
                    f"{type(dataset).__name__}.__getitems__ returned {len(samples)} samples for {len(indices)} indices"
                )
        else:
            samples = []
            step = "loading dataset[...]"
            for index in indices:
                if abandoned():
                    return ABANDONED
                current = index
                samples.append(dataset[index])
        step = "collate_fn"
        return _collate(plan, samples, room)
    except BaseException as error:  # whatever it is, it gets its place and goes on
        raise Located(_place(step, current, indices, number), error) from None


def _place(step: str, current: Any, indices: Any, number: int) -> str:
    """Say where a chunk was; texts are made for errors only."""
    chunk = f"chunk {number}"
    match step:
        case "reading the indices":
            return f"reading the indices {brief(indices)} of {chunk}"
        case "dataset.__getitems__":
            return f"dataset.__getitems__({brief(indices)}), {chunk}"
        case "loading dataset[...]" if current is indices:
            return f"loading dataset[{brief(indices)}], {chunk}"
        case "loading dataset[...]":
            return f"loading dataset[{brief(current)}], {chunk} (indices {brief(indices)})"
        case _:
            return f"collate_fn, {chunk} (indices {brief(indices)})"


def _collate(plan: Payload, samples: Any, room: Room | None) -> Any:
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


def size_of(data: Any) -> int:
    """Return how many bytes the tensors, arrays and texts have that lie in a batch's lists, tuples and mappings."""
    if isinstance(data, Mapping):
        return sum(map(size_of, data.values()))
    if isinstance(data, (list, tuple)):
        return sum(map(size_of, data))
    size = len(data) if isinstance(data, (str, bytes, bytearray)) else getattr(data, "nbytes", 0)
    return size if isinstance(size, int) else 0


def brief(indices: object) -> str:
    """Return ``indices`` as text for a message, at most 100 characters of it."""
    try:
        text = repr(indices)
    except Exception as error:  # the user's __repr__, inside an error message
        text = f"<{type(indices).__name__}, and its repr raises {type(error).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


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
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

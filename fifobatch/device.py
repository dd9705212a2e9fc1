"""Batches on their way to an accelerator: pinned memory, and the copy to a device.

`Transfer.prepare` runs in the preparing thread, as batches complete; `Transfer.stage` there, too, for the batch that is
next; `Transfer.arrive` in the thread that takes them.

On CUDA a batch is copied on a stream of its own beside the consumer's, as torch's notes on CUDA semantics ask for: the
copy's end is an event that the consumer's stream waits for, and each tensor is recorded on that stream, so that its
memory is used again only after what the consumer has launched. A copy from pageable memory has read its source when it
returns, and torch keeps pinned sources itself; so a slot may be given back at once.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory

from fifobatch.errors import PlanError
from fifobatch.plan import Batch

__all__ = ["NO_TRANSFER", "OnDevice", "Prepare", "Transfer", "arrived", "check_device", "mapped"]

Prepare = Callable[[Batch[Any]], Batch[Any]]


class Transfer(NamedTuple):
    """What is done to each batch.

    Attributes:
        prepare: When it is complete: into pinned memory.
        stage: Then, when it is the next to be delivered: to the device.
        arrive: To what was staged, when somebody takes it.
    """

    prepare: Prepare | None = None
    stage: Prepare | None = None
    arrive: Prepare | None = None

    @classmethod
    def of(cls, pins: bool, device: torch.device | None) -> "Transfer":
        """Return what a loader's arguments ask for, of this thread's device also where another thread does it."""
        pin = _pinning() if pins else None
        if device is None:
            return cls(pin)
        if device.type != "cuda":
            return cls(pin, _of_data(partial(mapped, lambda item: item.to(device))))
        if device == torch.device("cuda"):  # whichever is this thread's
            device = torch.device("cuda", torch.cuda.current_device())
        return cls(pin, _of_data(SideStream(device)), _of_data(arrived))

    @property
    def at_once(self) -> Prepare | None:
        """All of it, one after the other."""
        steps = [step for step in self if step is not None]
        return reduce(_after, steps) if steps else None

    def before(self, select: Callable[[Batch[Any]], Any]) -> Callable[[Batch[Any]], Any]:
        """Return what selects of a batch that was staged."""
        return select if self.arrive is None else _after(self.arrive, select)

    def all_before(self, select: Callable[[Batch[Any]], Any]) -> Callable[[Batch[Any]], Any]:
        """Return what selects of a batch to which nothing was done yet."""
        return select if self.at_once is None else _after(self.at_once, select)


NO_TRANSFER = Transfer()


def check_device(device: Any) -> torch.device | None:
    """Return the device to copy to; None where nothing is to be copied, as workers' batches are on the CPU.

    Raises:
        PlanError: There is no such device.
    """
    if device is None:
        return None
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        text = str(error).partition("\n")[0]
        raise PlanError(f'device={device!r} names no device ({text}); give "cuda", "cuda:1" or "cpu"') from None
    if checked.type in ("cpu", "meta"):
        return None if checked.type == "cpu" else checked
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != checked.type:
        there = "only the CPU" if accelerator is None else f'"{accelerator.type}"'
        raise PlanError(
            f'device="{checked}", but torch {torch.__version__} sees {there} here. Install a build of torch for that '
            'device, and its driver; or leave out device=, or give device="cpu"'
        )
    count = torch.accelerator.device_count()
    if checked.index is not None and checked.index >= count:
        raise PlanError(f'device="{checked}", but there are {count} such devices; give a number below that')
    return checked


class OnDevice:
    """What a batch has become on its stream: its data, and the event after which they are there."""

    def __init__(self, data: Any, device: torch.device, event: torch.cuda.Event) -> None:
        self._data = data
        self._device = device
        self._event = event
        self._opaque = True  # whether some of it may be still to be copied

    def take(self) -> Any:
        """Return the data, for use on this thread's current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)

        def use(item: Any) -> Any:
            if hasattr(item, "record_stream"):
                item.record_stream(stream)
                return item
            return item.to(self._device) if self._opaque else item

        self._data = mapped(use, self._data)
        self._opaque = False
        return self._data


class SideStream:
    """Copies to a CUDA device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, data: Any) -> OnDevice:
        """Begin to copy. What cannot be told which stream uses it is copied when it is taken."""
        with torch.cuda.stream(self._stream):
            data = mapped(
                lambda item: item.to(self._device, non_blocking=True) if hasattr(item, "record_stream") else item, data
            )
            return OnDevice(data, self._device, self._stream.record_event())


def arrived(data: Any) -> Any:
    """Return a batch's data as they are to be used in this thread."""
    return data.take() if isinstance(data, OnDevice) else data


def mapped(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a copy of ``data`` with ``function`` of everything in it that has a method ``to``.

    Lists, tuples, mappings and dataclasses are looked into, however nested; what has nothing to change is not copied.
    """
    if callable(getattr(data, "to", None)) and not isinstance(data, type):
        return function(data)
    if isinstance(data, Mapping):
        values = {key: mapped(function, value) for key, value in data.items()}
        if all(values[key] is value for key, value in data.items()):
            return data
        if isinstance(data, MutableMapping):
            clone: Any = copy.copy(data)  # a subclass may have attributes of its own
            clone.update(values)
            return clone
        return values
    if isinstance(data, (list, tuple)):
        items = [mapped(function, item) for item in data]
        if all(item is old for item, old in zip(items, data)):
            return data
        if isinstance(data, list):
            clone = copy.copy(data)
            clone[:] = items
            return clone
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {field.name: getattr(data, field.name, None) for field in dataclasses.fields(data)}
        changed = {name: mapped(function, value) for name, value in fields.items()}
        if all(changed[name] is value for name, value in fields.items()):
            return data
        clone = copy.copy(data)
        for name, value in changed.items():
            object.__setattr__(clone, name, value)  # it may be frozen
        return clone
    return data


def _of_data(function: Callable[[Any], Any]) -> Prepare:
    return lambda batch: dataclasses.replace(batch, data=function(batch.data))


def _after(first: Prepare, then: Callable[[Batch[Any]], Any]) -> Callable[[Batch[Any]], Any]:
    return lambda batch: then(first(batch))


def _pinning() -> Prepare:
    device = torch.accelerator.current_device_index()

    def pin(data: Any) -> Any:
        torch.accelerator.set_device_index(device)
        return torch_pin_memory(data)  # type: ignore[no-untyped-call]

    return _of_data(pin)

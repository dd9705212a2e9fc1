"""What tests have go wrong: datasets that raise, end their process or hang, at a place to choose.

Workers import this file anew after each death, so it imports little.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from probes import Gate

from fifobatch import FifoLoader, processes


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("on purpose", threading.Lock())

    def __str__(self) -> str:
        return "on purpose"


def misbehave(how: str, gate: Gate | None = None) -> None:
    """End what the caller does, in one of the ways."""
    faulthandler.disable()  # the dump of a death on purpose is of no use to anybody
    if how == "raise":
        raise ValueError("on purpose")
    if how == "unpicklable":
        raise Unpicklable
    if how == "sys.exit":
        sys.exit(3)
    if how.startswith("_exit"):
        os._exit(int(how[6]))
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if gate is not None:
        gate.arrive(os.getpid())
    threading.Event().wait()


class Reduced:
    """A part of a batch that becomes 0 on its way, if nothing happens while it is packed or unpacked."""

    def __init__(self, where: str, how: str) -> None:
        self.where = where
        self.how = how

    def __reduce__(self) -> Any:
        if self.where == "pack":
            misbehave(self.how)
        return unpack_reduced, (self.how,)


def unpack_reduced(how: str) -> int:
    misbehave(how)
    return 0


class Trap:
    """A dataset that misbehaves at one place: at sample 4 of 12, where it is one of a sample or batch."""

    def __init__(self, where: str, how: str, gate: Gate | None = None) -> None:
        self.where = where
        self.how = how
        self.gate = gate
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.spring("unpickle")

    def spring(self, where: str) -> None:
        if where == self.where and os.getpid() != self.home:
            misbehave(self.how, self.gate)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            self.spring("sample")
            _sending.append(self)
        return index, torch.rand(500)

    def collate(self, samples: list[Any]) -> Any:
        numbers = [number for number, _ in samples]
        extra = 0
        if 4 in numbers:
            self.spring("collate")
            extra = Reduced(self.where, self.how) if self.where in ("pack", "unpack") else 0
        return numbers, torch.stack([tensor for _, tensor in samples]), extra

    def init(self, worker: int) -> None:
        self.spring("init")
        if self.where in ("send", "sent"):
            processes.ResultQueue.put = send_and_spring  # in this worker


class ListTrap(Trap):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 4 in indices:
            self.spring("list")
        return [self[index] for index in indices]


_sending: list[Trap] = []  # in a worker: what to spring at the next answer
_put = processes.ResultQueue.put


def send_and_spring(queue: Any, answer: Any) -> None:
    for trap in _sending:
        trap.spring("send")
    _put(queue, answer)
    for trap in _sending:
        trap.spring("sent")
    _sending.clear()


def make_loader(where: str, how: str, gate: Gate | None = None, **arguments: Any) -> FifoLoader[Any]:
    dataset = (ListTrap if where == "list" else Trap)(where, how, gate)
    arguments = {"batch_size": 3, "num_workers": 2, "generator": torch.Generator().manual_seed(5)} | arguments
    return FifoLoader(dataset, collate_fn=dataset.collate, worker_init_fn=dataset.init, **arguments)


def drain(iterator: Iterator[Any]) -> tuple[dict[int, Any], list[Exception]]:
    """Return the epoch's batches, by number, and its errors."""
    batches: dict[int, Any] = {}
    errors: list[Exception] = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error.with_traceback(None))
            assert len(errors) <= 12
        else:
            assert batch.number not in batches, "delivered twice"
            batches[batch.number] = batch


def check_contents(batches: dict[int, Any], expected: dict[int, Any], numbers: list[int]) -> None:
    assert sorted(batches) == numbers
    for number in numbers:
        assert batches[number].indices == batches[number].data[0] == expected[number].indices
        assert torch.equal(batches[number].data[1], expected[number].data[1])


def tiny(index: int) -> int:
    """Return ``index``, a little later."""
    time.sleep(0.001)
    return index

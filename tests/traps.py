"""What tests have go wrong: datasets that raise, end their process or hang, at a place to choose.

Workers import this file anew after each death, so it imports little.
"""

import faulthandler
import os
import signal
import sys
import threading
from typing import Any

import torch
from probes import Gate

from fifobatch import processes


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

"""Batches on a device. There is no accelerator here: "meta" stands for one, and fakes for CUDA's streams."""

import dataclasses
import threading
from collections import OrderedDict, defaultdict, namedtuple
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from fifobatch import FifoLoader, PairedLoader, PlanError
from fifobatch.device import NO_TRANSFER, OnDevice, SideStream, Transfer, arrived, check_device, mapped

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Graph:
    """What graph libraries have: an object with a ``to`` of its own."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.thread = threading.current_thread().name

    def to(self, device: torch.device) -> "Graph":
        return Graph(str(device))


def to_meta(data: Any) -> Any:
    return mapped(lambda item: item.to("meta"), data)


# -- what is looked into ----------------------------------------------------------------------------------------------


def test_any_nesting_is_looked_into_and_keeps_its_classes():
    zeros = torch.zeros(2)
    counts: Any = defaultdict(int, a=zeros)
    data = {
        "list": [zeros, (zeros, "text")],
        "named": Pair(zeros, None),
        "sample": Sample(zeros, "cat"),
        "ordered": OrderedDict(z=zeros),
        "default": counts,
        "proxy": MappingProxyType({"p": zeros}),
        "graph": Graph(),
        "array": np.zeros(2),
    }
    moved = to_meta(data)
    assert moved["list"][0].is_meta
    assert moved["list"][1][0].is_meta
    assert moved["list"][1][1] == "text"
    assert moved["named"] == Pair(moved["named"].x, None)
    assert moved["named"].x.is_meta
    assert moved["sample"].image.is_meta
    assert moved["sample"].name == "cat"
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["ordered"]["z"].is_meta
    assert moved["default"]["nothing yet"] == 0
    assert moved["default"]["a"].is_meta
    assert moved["proxy"]["p"].is_meta
    assert moved["graph"].device == "meta"
    assert moved["array"] is data["array"]
    assert not data["list"][0].is_meta
    assert not counts["a"].is_meta


@pytest.mark.parametrize("data", [[1, "a"], {"a": (1, 2)}, Pair(1, 2), None, range(3), torch.Tensor, Sample])
def test_what_has_nothing_to_move_is_not_copied(data):
    assert to_meta(data) is data


# -- loaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_arrive_on_the_device(num_workers):
    loader = FifoLoader([{"x": torch.zeros(3), "name": "a"}] * 4, batch_size=2, num_workers=num_workers, device="meta")
    assert [(batch["x"].device.type, batch["name"]) for batch in loader] == [("meta", ["a", "a"])] * 2
    assert "device='meta'" in repr(loader)

    pairs = PairedLoader([torch.zeros(2)] * 4, [Pair(torch.zeros(1), 1)] * 4, num_workers=num_workers, device="meta")
    for x, target in pairs:
        assert x.is_meta
        assert target.result().x.is_meta
    assert all(x.is_meta and y.x.is_meta for x, y in pairs.zipped())


def test_the_copy_is_made_in_a_thread_of_its_own():
    def graphs(samples: list[int]) -> Graph:
        return Graph()

    for batch in FifoLoader(range(4), batch_size=2, collate_fn=graphs, num_workers=1, device="meta"):
        assert batch.device == "meta"
        assert batch.thread.startswith("fifobatch-prepare")


def test_on_the_cpu_it_costs_nothing():
    for device in ("cpu", torch.device("cpu"), None):
        loader = FifoLoader(range(4), num_workers=1, device=device)
        assert Transfer.of(False, loader._device) == NO_TRANSFER


def test_what_cannot_be_copied_is_that_batchs_error():
    class Immovable:
        def __init__(self, samples: list[int]) -> None:
            self.samples = samples

        def to(self, device: torch.device) -> "Immovable":
            if 1 in self.samples:
                raise ValueError("no room for a one")
            return self

    batches = iter(FifoLoader(range(2), collate_fn=Immovable, num_workers=1, device="meta"))
    seen: list[Any] = []
    for _ in range(2):
        try:
            seen.append(next(batches).samples)
        except ValueError as error:
            seen.append(str(error))
    assert sorted(map(str, seen)) == ["[0]", "no room for a one"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", torch.device("cuda"), 0])
def test_a_device_that_is_not_there_is_an_error_that_says_what_to_do(device):
    with pytest.raises(PlanError, match=r"sees only the CPU here\. Install a build of torch|names no device"):
        FifoLoader(range(4), device=device)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5])
def test_what_names_no_device_is_an_error(device):
    with pytest.raises(PlanError, match=f"device={device!r} names no device"):
        FifoLoader(range(4), device=device)


def test_a_device_beyond_the_last_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert check_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(PlanError, match="there are 2 such devices"):
        check_device("cuda:2")
    with pytest.raises(PlanError, match='sees "cuda" here'):
        check_device("mps")


# -- streams ----------------------------------------------------------------------------------------------------------


class Stream:
    """A CUDA stream that says what was done on it."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told

    def record_event(self) -> str:
        self.told.append(f"event on {self.name}")
        return "event"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")


class Blob(Graph):
    """What says which stream uses it, as tensors do."""

    told: list[str] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> "Blob":
        self.told.append(f"copy, non_blocking={non_blocking}")
        return Blob()

    def record_stream(self, stream: Stream) -> None:
        self.told.append(f"used on {stream.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put fakes in place of CUDA's streams; return what is done on them."""
    told: list[str] = []
    monkeypatch.setattr(Blob, "told", told)

    @contextmanager
    def stream(on: Stream) -> Any:
        told.append(f"on {on.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", told))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current", told))
    return told


def test_the_consumers_stream_waits_for_the_copy_and_is_recorded(told):
    copied = SideStream(torch.device("meta"))({"blob": Blob(), "text": "a"})
    assert isinstance(copied, OnDevice)
    assert told == ["on side:", "copy, non_blocking=True", "event on side"]
    told.clear()
    assert isinstance(arrived(copied)["blob"], Blob)
    assert told == ["current waits for event", "used on current"]


def test_what_cannot_be_recorded_is_copied_when_it_is_taken(told):
    copied = SideStream(torch.device("meta"))((Graph(), 1))
    graph, one = arrived(copied)
    assert (graph.device, one) == ("meta", 1)
    assert arrived(copied)[0] is graph


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pairs_arrive_where_they_are_taken(told, monkeypatch, num_workers):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pairs = PairedLoader(range(2), range(2), collate_fn=lambda samples: Blob(), num_workers=num_workers)
    pairs._device = torch.device("cuda")
    for x, target in pairs:
        assert isinstance(x, Blob)
        assert isinstance(target.result(), Blob)
    assert told.count("used on current") == 4
    assert all(isinstance(x, Blob) and isinstance(y, Blob) for x, y in pairs.zipped())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_on_a_gpu(pin_memory):
    samples = torch.arange(2_000_000.0).reshape(20, 100_000)
    loader = PairedLoader(samples, samples, batch_size=2, num_workers=2, pin_memory=pin_memory, device="cuda")
    for x, target in loader:
        assert x.is_cuda
        assert torch.equal(x * 2, target.result() * 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert sum(x.sum(dtype=torch.float64).item() for x, y in loader.zipped()) == samples.sum(dtype=torch.float64)

"""How a pickle and its buffers travel: little by the pipe, the rest in a slot, and nothing is copied twice."""

import collections
import contextlib
import copy
import dataclasses
import errno
import gc
import os
import pickle
import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from fifobatch import arena as arena_module
from fifobatch.arena import ALIGNMENT, Arena, Room
from fifobatch.attempt import NO_POLICY, Attempt
from fifobatch.fetch import Payload, _stack, fetch
from fifobatch.pickling import IN_BAND_BYTES, Pickled, dumps, loads
from fifobatch.transport import PIPE_BYTES, Parcel, holds, pack, places, read, unpack, unpack_private

PIPE_BUF = 4096  # Linux writes as many bytes to a pipe at once
IN_TABLE = PIPE_BYTES // 16  # so many blocks fit in a parcel's table


def blocks(*sizes: int, data: bytes = b"pickle") -> Pickled:
    """Return a pickle with buffers of these sizes, each with content of its own."""
    contents = [random.Random(f"{position} {size}").randbytes(size) for position, size in enumerate(sizes)]
    return Pickled(data, [memoryview(content) for content in contents])


def content(split: tuple[bytes | memoryview, list[memoryview]]) -> tuple[bytes, list[bytes]]:
    return bytes(split[0]), [bytes(block) for block in split[1]]


def of(pickled: Pickled) -> tuple[bytes, list[bytes]]:
    return content((pickled.data, pickled.buffers))


def free(arena: Arena) -> list[int]:
    return sorted([*arena._free, *arena._bare])


def travel(arena: Arena, obj: object) -> Any:
    """Send ``obj`` as a worker would, and return what the parent makes of it."""
    slot = arena.take()
    return loads(*unpack(arena, slot, pack(dumps(obj), Room(arena, slot))))


@pytest.fixture
def quietly() -> Iterator[None]:
    """Let torch say what it likes of its own experimental and deprecated kinds of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- parcels -----------------------------------------------------------------------------------------------------------

CASES = {
    "a small pickle": blocks(),
    "the pickle of an empty tensor": dumps(torch.zeros(3, 0)),
    "as much as crosses the pipe": blocks(data=bytes(PIPE_BYTES)),
    "a byte too much for the pipe": blocks(data=bytes(PIPE_BYTES - 1) + b"."),
    "a pickle in the slot": blocks(data=random.Random(0).randbytes(100_000)),
    "one buffer": blocks(1),
    "odd buffers": blocks(63, 64, 65, 4095, 4096, 4097),
    "empty buffers": blocks(0, 7, 0),
    "big buffers": blocks(1_000_000, 3, 2_000_000),
    "pickle and buffers": blocks(5000, 600, data=bytes(10_000)),
    "as many buffers as the table has places for": blocks(*[513] * (IN_TABLE - 1), data=bytes(20)),
    "all places and a pickle": blocks(*[513] * IN_TABLE),
    "a buffer more than the table has places for": blocks(*[513] * (IN_TABLE + 1)),
    "very many buffers": blocks(*[513] * 3000, data=bytes(5000)),
}


@pytest.fixture(params=CASES)
def pickled(request: pytest.FixtureRequest) -> Pickled:
    return CASES[request.param]


def test_what_is_packed_is_lent_read_and_mapped_as_it_was(pickled: Pickled) -> None:
    parent = Arena()
    worker = Arena(os.dup(parent.fd))
    slot = parent.take()
    parcel = pack(pickled, Room(worker, slot))
    assert content(read(parent, parcel)) == of(pickled)
    assert content(unpack_private(parent, parcel, int)) == of(pickled)
    assert holds(parent, parcel, pickled)
    lent = unpack(parent, slot, parcel)
    assert content(lent) == of(pickled)
    assert (free(parent) == [slot]) == (not parcel.table)
    del lent
    assert free(parent) == [slot]


def test_what_is_shipped_can_be_read_by_several(pickled: Pickled) -> None:
    arena = Arena()
    parcel = pack(pickled, Room(arena, None, pickled.nbytes + 2 * ALIGNMENT * len(pickled.buffers)))
    for _ in range(2):
        data, buffers = unpack_private(arena, parcel, int)
        assert content((data, buffers)) == of(pickled)
        for block in buffers:
            block[:] = bytes(block.nbytes)
    assert holds(arena, parcel, pickled)


def test_whatever_is_packed_crosses_the_pipe_in_one_piece(pickled: Pickled) -> None:
    room = Room(Arena(), 2**20)
    answer = ("abandoned", tuple(pack(pickled, room)), (10, 1.5, 2.5, 2**60))
    assert len(pickle.dumps(answer)) <= PIPE_BUF - 1024


@given(size=st.integers(1, 2 * PIPE_BYTES), count=st.integers(0, 2 * IN_TABLE))
@settings(deadline=None, max_examples=40)
def test_what_crosses_the_pipe_is_bounded_and_nothing_is_lost(size: int, count: int) -> None:
    arena = Arena()
    pickled = blocks(*[IN_BAND_BYTES + 1] * count, data=bytes(size))
    parcel = pack(pickled, Room(arena, 1))
    assert len(parcel.pickle) + len(parcel.table) <= PIPE_BYTES
    assert content(read(arena, parcel)) == of(pickled)


def test_what_is_small_needs_no_slot() -> None:
    arena = Arena()
    parcel = pack(dumps({"label": 3}), Room(arena, arena.take()))
    assert parcel == Parcel(dumps({"label": 3}).data)
    assert os.fstat(arena.fd).st_blocks == 0
    assert loads(*unpack(arena, 1, parcel)) == {"label": 3}
    assert free(arena) == [1]


def test_blocks_are_aligned(pickled: Pickled) -> None:
    arena = Arena()
    slot = arena.take()
    parcel = pack(pickled, Room(arena, slot))
    assert all(offset % ALIGNMENT == 0 for offset, _ in places(arena, parcel))
    for block in unpack(arena, slot, parcel)[1]:
        assert not block.nbytes or torch.frombuffer(block, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0


def test_a_parcel_whose_table_cannot_be_read_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    arena = Arena()
    slot = arena.take()
    parcel = pack(CASES["very many buffers"], Room(arena, slot))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="no memory"):
            unpack(arena, slot, parcel)
    assert free(arena) == [slot]


OTHERS = {
    "other pickle": blocks(1000, 2000, data=b"Pickle"),
    "longer pickle": blocks(1000, 2000, data=b"pickle "),
    "fewer": blocks(1000),
    "more": blocks(1000, 2000, 3000),
    "other order": blocks(2000, 1000),
    "longer": blocks(1000, 2001),
    "other content": Pickled(b"pickle", [*blocks(1000).buffers, memoryview(bytes(2000))]),
    "none": blocks(),
    "long pickle": blocks(data=bytes(5000)),
    "many": blocks(*[1000] * 200),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_parcel_holds_nothing_else(other: str) -> None:
    arena = Arena()
    assert not holds(arena, pack(blocks(1000, 2000), Room(arena, 1)), OTHERS[other])
    assert not holds(arena, pack(OTHERS[other], Room(arena, 2)), blocks(1000, 2000))


# -- nothing is copied twice -------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of what is written to arenas."""
    sizes: list[int] = []
    write = Arena.write

    def spy(arena: Arena, block: memoryview, offset: int) -> None:
        sizes.append(block.nbytes)
        write(arena, block, offset)

    monkeypatch.setattr(Arena, "write", spy)
    return sizes


def test_what_is_stacked_in_the_slot_is_not_written_again(written: list[int]) -> None:
    arena = Arena()
    slot = arena.take()
    room = Room(arena, slot)
    samples = [torch.randn(3, 40, 50) for _ in range(4)]
    stacked = _stack(room, samples)
    parcel = pack(dumps(stacked), room)
    assert written == []
    arrived = loads(*unpack(arena, slot, parcel))
    assert arrived.data_ptr() == stacked.data_ptr()
    assert torch.equal(arrived, torch.stack(samples))


class Samples:
    """Samples as they come: images, labels, arrays, and words."""

    def __getitem__(self, index: int) -> Any:
        rng = np.random.default_rng(index)
        return {
            "image": torch.from_numpy(rng.random((3, 20, 30))),
            "pair": (torch.full((200,), index), np.full(300, index, "f4")),
            "label": index,
            "small": torch.tensor([index]),
            "word": str(index),
        }


def collated(room: Room | None) -> Any:
    return fetch(Payload(Samples(), default_collate, True, None, 1), list(range(6)), Attempt(0, NO_POLICY), room)


def test_a_default_collate_makes_its_tensors_in_the_slot(written: list[int]) -> None:
    arena = Arena()
    slot = arena.take()
    room = Room(arena, slot)
    batch = collated(room)
    parcel = pack(dumps(batch), room)
    assert sum(written) <= 2 * PIPE_BYTES  # the pickle, if anything
    arrived = loads(*unpack(arena, slot, parcel))
    assert_same(arrived, batch)
    assert_same(arrived, collated(None))
    for tensor in (arrived["image"], arrived["pair"][0], arrived["pair"][1]):
        assert tensor.data_ptr() % ALIGNMENT == 0


def test_what_does_not_fit_in_the_slot_is_collated_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "near", lambda *args: None)
    arena = Arena()
    room = Room(arena, 1)
    batch = collated(room)
    assert_same(loads(*read(arena, pack(dumps(batch), room))), batch)


UNLIKE = {
    "other shapes": [torch.zeros(200), torch.zeros(201)],
    "sparse": [torch.eye(30).to_sparse() for _ in range(2)],
    "one that requires grad": [torch.zeros(200), torch.zeros(200, requires_grad=True)],
    "conjugated": [torch.full((200,), 1 + 2j).conj() for _ in range(2)],
    "negated": [torch.full((200,), 1 + 2j).conj().imag for _ in range(2)],
    "other dtypes": [torch.zeros(200), torch.zeros(200, dtype=torch.float64)],
    "a parameter": [torch.nn.Parameter(torch.zeros(200)) for _ in range(2)],
    "small": [torch.zeros(3) for _ in range(2)],
    "zero-size": [torch.zeros(0, 3) for _ in range(2)],
    "transposed": [torch.randn(30, 20).T for _ in range(2)],
    "expanded": [torch.randn(30, 1).expand(30, 20) for _ in range(2)],
    "0-dim": [torch.tensor(1.5) for _ in range(2)],
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_stacking_in_the_slot_is_what_torch_does(kind: str) -> None:
    tensors = UNLIKE[kind]
    outcomes = []
    for room in (None, Room(Arena(), 1)):
        try:
            outcomes.append(default_collate(tensors) if room is None else _stack(room, tensors))
        except RuntimeError as error:
            outcomes.append(str(error))
    torchs, ours = outcomes
    assert type(ours) is type(torchs)
    if isinstance(torchs, str):
        assert ours == torchs
    else:
        assert ours.dtype is torchs.dtype
        assert ours.requires_grad == torchs.requires_grad
        assert torch.equal(ours.to_dense(), torchs.to_dense())


def test_a_tensor_that_a_batch_has_twice_arrives_as_one_and_views_of_it_apart() -> None:
    arena = Arena()
    slot = arena.take()
    room = Room(arena, slot)
    stacked = _stack(room, [torch.zeros(1000) for _ in range(3)])
    batch = {"a": stacked, "b": stacked, "view": stacked.view(-1), "part": stacked[:, :500]}
    arrived = loads(*unpack(arena, slot, pack(dumps(batch), room)))
    assert arrived["a"] is arrived["b"]
    arrived["a"].fill_(1)
    assert not arrived["view"].any()
    assert not arrived["part"].any()


def test_a_slice_of_a_big_tensor_ships_only_the_slice(written: list[int]) -> None:
    arena = Arena()
    big = torch.arange(10_000_000)
    for part in (big[5000:6000], big.view(10, -1)[:, 7][:, None].expand(10, 100), torch.from_numpy(big.numpy()[:1000])):
        written.clear()
        arrived = travel(arena, part)
        assert torch.equal(arrived, part)
        assert sum(written) == 8000
        assert arrived.untyped_storage().nbytes() == 8000


# -- whatever it is ----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any


class Custom:
    def __init__(self, part: Any) -> None:
        self.part = part


DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
]
NUMPY_DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "U3", "M8[s]"]


def tensors() -> st.SearchStrategy[torch.Tensor]:
    def make(seed: int, dtype: torch.dtype, shape: list[int], layout: str) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        gap = layout in ("every other", "offset")
        size = [*shape[:-1], 2 * shape[-1] + 1] if shape and gap else shape
        raw = rng.integers(0, 2 if dtype is torch.bool else 256, (*size, dtype.itemsize), "u1")
        tensor = torch.from_numpy(raw).view(dtype).view(size) if raw.size else torch.empty(size, dtype=dtype)
        if layout == "every other":
            return tensor[..., ::2] if shape else tensor
        if layout == "offset":
            return tensor[..., 1:] if shape else tensor
        if layout == "transposed":
            return tensor.permute([*reversed(range(tensor.dim()))])
        if layout == "expanded":
            return tensor[..., None].expand(*tensor.shape, 3)
        if layout == "channels last" and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    layouts = ["contiguous", "every other", "offset", "transposed", "expanded", "channels last"]
    # Of any dimension, also with big ones: what is at most 512 bytes travels inside the pickle.
    shapes = st.one_of(
        st.lists(st.integers(0, 30), max_size=3), st.lists(st.integers(1, 6), min_size=4, max_size=4), st.just([1000])
    )
    return st.builds(make, st.integers(0, 2**32), st.sampled_from(DTYPES), shapes, st.sampled_from(layouts))


def arrays() -> st.SearchStrategy[Any]:
    def make(seed: int, dtype: str, shape: list[int], order: str) -> Any:
        count = int(np.prod(shape))
        rng = np.random.default_rng(seed)
        kind = np.dtype(dtype).kind
        values = rng.integers(0, 2 if kind == "b" else 100, count)
        array = values.astype("i8").astype(dtype) if kind == "M" else values.astype(dtype)
        array = np.asarray(array.reshape(shape), order="F" if order == "F" else "C")
        if order == "::2" and array.ndim:
            array = array[::2]
        return array

    shapes = st.lists(st.integers(0, 20), max_size=3)
    return st.builds(
        make, st.integers(0, 2**32), st.sampled_from(NUMPY_DTYPES), shapes, st.sampled_from(["C", "F", "::2"])
    )


def nests() -> st.SearchStrategy[Any]:
    leaves = st.one_of(tensors(), tensors(), arrays(), st.integers(), st.text(max_size=9), st.binary(max_size=3000))

    def grow(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(parts, max_size=4),
            st.tuples(parts, parts),
            st.dictionaries(st.text(max_size=5), parts, max_size=4),
            st.builds(collections.OrderedDict, st.dictionaries(st.integers(), parts, max_size=2)),
            st.builds(Pair, parts, parts),
            st.builds(Record, parts, parts),
            st.builds(Custom, parts),
        )

    return st.recursive(leaves, grow, max_leaves=10)


def raw(tensor: torch.Tensor) -> bytes:
    """Return what the tensor shows, whatever its dtype."""
    return bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


def gapless(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def parts(obj: Any) -> list[Any]:
    if isinstance(obj, dict):
        return [*obj.keys(), *obj.values()]
    if isinstance(obj, (list, tuple)):
        return list(obj)
    return list(vars(obj).values()) if isinstance(obj, (Record, Custom)) else []


def leaves_of(obj: Any) -> Iterator[Any]:
    if isinstance(obj, (torch.Tensor, np.ndarray)):
        yield obj
    else:
        for part in parts(obj):
            yield from leaves_of(part)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.stride() == other.stride() or not gapless(other)
        assert raw(one) == raw(other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
        assert one.flags.writeable
    elif isinstance(one, (dict, list, tuple, Record, Custom)):
        assert len(parts(one)) == len(parts(other))
        for part, its in zip(parts(one), parts(other)):
            assert_same(part, its)
    else:
        assert one == other


def overwrite(leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        leaf.untyped_storage().fill_(1)
    else:
        leaf[...] = np.ones((), "u1").astype(leaf.dtype) if leaf.dtype.kind != "M" else 1


@pytest.mark.usefixtures("quietly")
def test_any_nest_of_tensors_and_arrays_equals_itself_after_the_trip() -> None:
    arena = Arena()

    @given(nest=nests())
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    def check(nest: Any) -> None:
        before = copy.deepcopy(nest)
        arrived = travel(arena, nest)
        assert_same(arrived, nest)
        # Each has a storage of its own: what is written to one is seen in no other, and not in what was sent.
        leaves, sent = list(leaves_of(arrived)), list(leaves_of(before))
        for position, leaf in enumerate(leaves):
            overwrite(leaf)
            for one, other in zip(leaves[position + 1 :], sent[position + 1 :]):
                assert_same(one, other)
        assert_same(nest, before)

    check()
    gc.collect()
    assert free(arena) == list(range(1, next(arena._numbers)))


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_of_any_dtype_are_stacked_in_the_slot_as_torch_stacks_them(dtype: torch.dtype) -> None:
    content = [torch.randint(0, 2, (40, 50)).to(dtype) for _ in range(3)]
    try:
        expected = torch.stack(content)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            _stack(Room(Arena(), 1), content)
    else:
        assert_same(_stack(Room(Arena(), 1), content), expected)


def quantized() -> torch.Tensor:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this torch has no quantized tensors")
    return torch.quantize_per_tensor(torch.randn(40, 50), 0.1, 10, torch.quint8)


class Tagged(torch.Tensor):
    pass


SPECIAL = {
    "sparse": lambda: torch.randn(40, 50).relu().to_sparse(),
    "sparse, with places that are there twice": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "sparse, requires grad": lambda: torch.randn(40, 50).relu().to_sparse().requires_grad_(),
    "hybrid": lambda: torch.randn(40, 50).relu().to_sparse(1),
    "csr": lambda: torch.randn(40, 50).relu().to_sparse_csr(),
    "csc": lambda: torch.randn(40, 50).relu().to_sparse_csc(),
    "bsr": lambda: torch.randn(40, 50).relu().to_sparse_bsr((2, 5)),
    "bsc": lambda: torch.randn(40, 50).relu().to_sparse_bsc((2, 5)),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.randn(20, 30), torch.randn(10, 30)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(20, 30), torch.randn(10, 30)], layout=torch.jagged),
    "subclass": lambda: torch.randn(40, 50).as_subclass(Tagged),
    "parameter": lambda: torch.nn.Parameter(torch.randn(40, 50)),
    "requires grad": lambda: torch.randn(40, 50, requires_grad=True),
    "conjugated": lambda: torch.randn(40, 50, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(40, 50, dtype=torch.complex64).conj().imag,
    "module": lambda: torch.nn.Linear(30, 40).weight,
}


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_not_plain_arrives_equal(kind: str) -> None:
    arena = Arena()
    tensor = SPECIAL[kind]()
    arrived = travel(arena, [tensor, torch.ones(1000)])[0]
    assert type(arrived) is type(tensor)
    assert arrived.dtype is tensor.dtype
    assert arrived.layout is tensor.layout
    assert arrived.requires_grad == tensor.requires_grad
    assert arrived.is_leaf
    if tensor.is_nested:
        assert all(torch.equal(one, other) for one, other in zip(arrived.unbind(), tensor.unbind()))
    elif tensor.layout is torch.strided:
        assert torch.equal(arrived, tensor)
    else:
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
        assert arrived.layout is not torch.sparse_coo or arrived.is_coalesced() == tensor.is_coalesced()
    del arrived
    gc.collect()
    assert free(arena) == [1]


# -- failing -----------------------------------------------------------------------------------------------------------


class Spoilt:
    """Cannot be pickled, or not unpickled."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __getstate__(self) -> Any:
        if self.when == "dump":
            raise ValueError("not to be sent")
        return {"when": self.when}

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not to be made")


@pytest.mark.parametrize("after", [0, 1])
def test_a_batch_that_cannot_be_unpickled_gives_its_slot_back(after: int) -> None:
    arena = Arena()
    nest = [torch.ones(1000), torch.ones(1000)]
    nest.insert(2 * after, Spoilt("load"))  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):
        travel(arena, nest)
    assert free(arena) == [1]


def test_what_follows_a_batch_that_could_not_be_written_is_written_in_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    slot = arena.take()
    room = Room(arena, slot)
    pwrite = os.pwrite

    def fail(fd: int, block: memoryview, offset: int) -> int:
        if len(block) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, block, offset)

    monkeypatch.setattr(arena_module.os, "pwrite", fail)
    with pytest.raises(OSError, match="no shared memory for 200,000 bytes"):
        pack(blocks(1000, 200_000), room)
    error = blocks(5000)
    assert content(unpack(arena, slot, pack(error, room))) == of(error)
    assert free(arena) == [slot]

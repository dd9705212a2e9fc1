"""What crosses between processes arrives as it was: tensors, arrays, nests, classes and errors."""

import collections
import contextlib
import dataclasses
import datetime
import decimal
import functools
import gc
import io
import itertools
import pickle
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cloudpickle import cloudpickle
from hypothesis import given, settings
from hypothesis import strategies as st

from fifobatch import SampleError
from fifobatch.pickling import (
    IN_BAND_BYTES,
    Pickled,
    dumps,
    find_culprit,
    loads,
    loads_sent,
    rebuild,
    report,
    sent_classes,
)


def load(pickled: Pickled) -> Any:
    """Load as a process does that copied everything out of a slot."""
    return loads(bytearray(pickled.data), [bytearray(buffer) for buffer in pickled.buffers])


def travel(obj: Any) -> Any:
    return load(dumps(obj))


def raw(tensor: torch.Tensor) -> bytes:
    """Return what the tensor shows, whatever its dtype."""
    return bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


def sizes(obj: Any) -> tuple[int, list[int]]:
    pickled = dumps(obj)
    return len(pickled.data), [buffer.nbytes for buffer in pickled.buffers]


@pytest.fixture
def quietly() -> Iterator[None]:
    """Let torch say what it likes of its own experimental and deprecated kinds of tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- tensors -----------------------------------------------------------------------------------------------------------

DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def test_the_dtypes_include_the_unusual_ones():
    unusual = {torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex32}
    assert unusual | {torch.uint16, torch.uint32, torch.uint64} <= set(DTYPES)


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in QUANTIZED], ids=str)
def test_a_tensor_of_any_dtype_arrives_equal(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    for shape in ((), (1,), (3, 4), (40, 50), (0,), (3, 0, 2)):
        count = int(np.prod(shape))
        content = bytearray(random.Random(count).randbytes(count * size)) if dtype != torch.bool else bytearray(count)
        flat = torch.frombuffer(content, dtype=torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        arrived = travel(tensor)
        assert arrived.dtype is dtype
        assert arrived.shape == tensor.shape
        assert arrived.stride() == tensor.stride()
        assert bytes(arrived.untyped_storage()) == bytes(content)


def four_dimensional() -> torch.Tensor:
    return torch.arange(2 * 3 * 16 * 16, dtype=torch.float32).reshape(2, 3, 16, 16)


LAYOUTS = {
    "contiguous": lambda x: x,
    "0-dim": lambda x: x[0, 0, 0, 1],
    "zero-size": lambda x: x[:, :0],
    "transposed": lambda x: x.transpose(1, 3),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "channels last, slice": lambda x: x.to(memory_format=torch.channels_last)[:, 1:],
    "every other": lambda x: x[:, :, ::2],
    "last column": lambda x: x[..., -1],
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3),
    "expanded": lambda x: x[:1, :1].expand(4, 5, 16, 16),
    "expanded scalar": lambda x: x[0, 0, 0, 3].expand(10, 20),
    "new axes": lambda x: x[None, :, None],
    "offset": lambda x: x.flatten()[7:],
    "overlapping": lambda x: x.flatten().unfold(0, 10, 1),
    "axis of length 1 with a stride of its own": lambda x: x[:1].as_strided((1, 3), (1000, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_any_layout_arrives_equal_and_independent(layout):
    tensor = LAYOUTS[layout](four_dimensional())
    before = tensor.clone()
    sent = travel(tensor)
    assert type(sent) is torch.Tensor
    assert torch.equal(sent, tensor)
    sent.untyped_storage().fill_(7)
    assert torch.equal(tensor, before)
    arrived = load(dumps(tensor, to_parent=True))
    assert type(arrived) is torch.Tensor
    assert torch.equal(arrived, tensor)
    assert arrived.dtype is tensor.dtype
    arrived.add_(1)
    assert torch.equal(tensor, before)
    assert torch.equal(arrived, before + 1)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last", "0-dim", "new axes", "zero-size"])
def test_a_tensor_without_gaps_keeps_its_strides(layout):
    tensor = LAYOUTS[layout](four_dimensional())
    assert travel(tensor).stride() == tensor.stride()


def test_channels_last_stays_channels_last():
    tensor = four_dimensional().to(memory_format=torch.channels_last)
    assert travel(tensor).is_contiguous(memory_format=torch.channels_last)


@given(shape=st.lists(st.integers(0, 5), max_size=4), order=st.integers(0, 2**32).map(random.Random))
@settings(deadline=None, max_examples=100)
def test_whatever_view_of_a_tensor_arrives_equal(shape, order):
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
    for _ in range(order.randrange(4)):
        axis = order.randrange(tensor.dim()) if tensor.dim() else 0
        view = order.choice(["permute", "slice", "select", "unsqueeze", "expand", "flip"])
        if view == "permute":
            tensor = tensor.permute(order.sample(range(tensor.dim()), tensor.dim()))
        elif view == "slice" and tensor.dim():
            start, step = order.randrange(3), order.randrange(1, 3)
            tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
        elif view == "select" and tensor.dim() and tensor.shape[axis]:
            tensor = tensor.select(axis, order.randrange(tensor.shape[axis]))
        elif view == "unsqueeze":
            tensor = tensor.unsqueeze(axis)
        elif view == "expand":
            tensor = tensor.expand(order.randrange(1, 4), *tensor.shape)
        elif view == "flip" and tensor.dim():
            tensor = tensor.flip(axis)
    arrived = travel(tensor)
    assert arrived.dtype is torch.int16
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_a_big_tensor_leaves_the_pickle_and_is_not_copied():
    tensor = torch.arange(1000)
    pickled = dumps({"x": tensor})
    assert len(pickled.data) < 300
    (buffer,) = pickled.buffers
    assert np.frombuffer(buffer, np.uint8).ctypes.data == tensor.data_ptr()
    assert not buffer.readonly


def test_a_small_tensor_stays_in_the_pickle():
    assert sizes(torch.zeros(IN_BAND_BYTES, dtype=torch.uint8))[1] == []
    assert sizes(torch.zeros(IN_BAND_BYTES + 1, dtype=torch.uint8))[1] == [IN_BAND_BYTES + 1]


@pytest.mark.parametrize(
    "cut",
    [
        lambda big: big[100:1100],
        lambda big: big.view(1000, 1000)[5],
        lambda big: big.view(1000, 1000)[:, 5],
        lambda big: big.view(1000, 1000)[3:13, 200:300],
        lambda big: big[::1000],
        lambda big: big.view(1000, 1000).t()[7],
    ],
)
def test_of_a_big_tensor_only_the_slice_is_shipped(cut):
    part = cut(torch.arange(1_000_000, dtype=torch.float32))
    data, buffers = sizes(part)
    assert (data < 300, buffers) == (True, [4000])
    arrived = travel(part)
    assert arrived.untyped_storage().nbytes() == 4000
    assert torch.equal(arrived, part)


def test_of_a_big_tensor_only_the_slice_is_shipped_also_where_it_is_small():
    data, buffers = sizes(torch.zeros(1_000_000)[10:20])
    assert data < 300
    assert buffers == []


def test_a_leaf_that_requires_grad_arrives_as_one():
    part = torch.zeros(1_000_000)[:1000].requires_grad_()
    data, buffers = sizes(part)
    assert data + sum(buffers) < 4500
    arrived = travel(part)
    assert arrived.requires_grad
    assert arrived.is_leaf


def test_a_tensor_with_a_graph_is_refused():
    with pytest.raises(RuntimeError, match=r"requires_grad .* detach\(\)"):
        dumps([torch.zeros(10, requires_grad=True) * 2])


@pytest.fixture
def mapped(tmp_path: Path) -> np.memmap:
    array = np.memmap(tmp_path / "file", np.float32, "w+", shape=(100, 1000))
    array[:] = np.arange(100_000).reshape(100, 1000)
    array.flush()
    return array


@pytest.mark.parametrize("mode", ["r", "r+", "w+"])
def test_a_mapped_file_goes_to_the_workers_by_its_path(mapped: np.memmap, mode: str):
    array = mapped if mode == "w+" else np.memmap(mapped.filename, np.float32, mode, shape=mapped.shape)
    for part in (array, array[7:20], array[3], array.T):
        data, buffers = sizes(part)
        assert data + sum(buffers) < 1000
        arrived = travel(part)
        assert type(arrived) is np.memmap
        assert arrived.mode == ("r" if mode == "r" else "r+")
        assert np.array_equal(arrived, part)
    assert mapped[99, 999] == 99_999  # and it was not emptied


def test_what_of_a_mapped_file_is_not_in_the_file_goes_by_value(mapped: np.memmap):
    changed = np.memmap(mapped.filename, np.float32, "c", shape=mapped.shape)
    changed[0] = -1
    Path(mapped.filename).unlink()
    for part in (changed, mapped[5], mapped[:, 3]):
        assert np.array_equal(travel(part), part)


def test_what_a_worker_read_from_a_mapped_file_comes_back_as_read(mapped: np.memmap):
    assert dumps(mapped[5], to_parent=True).nbytes > 4000


def test_of_a_big_array_only_the_slice_is_shipped():
    big = np.arange(1_000_000, dtype=np.float32)
    for part in (big[100:1100], big[::1000], big.reshape(1000, 1000)[:, 5]):
        data, buffers = sizes(part)
        assert data + sum(buffers) < 4400
        assert np.array_equal(travel(part), part)


def test_a_tensor_that_occurs_twice_arrives_as_one():
    tensor = torch.zeros(1000)
    arrived = travel({"a": tensor, "b": [tensor]})
    assert arrived["a"] is arrived["b"][0]
    assert len(dumps([tensor, tensor]).buffers) == 1


def test_views_of_one_storage_arrive_as_tensors_of_their_own():
    tensor = torch.zeros(1000)
    whole, part = travel([tensor, tensor[:200]])
    whole.fill_(1)
    assert part.sum() == 0


def test_each_tensor_arrives_writable_over_the_very_buffer():
    for size in (10, 1000):
        arrived = travel(torch.zeros(size))
        arrived += 1
        arrived.resize_(size // 2)
        assert arrived.sum() == size // 2
    pickled = dumps(torch.zeros(1000))
    block = bytearray(pickled.buffers[0])
    loads(pickled.data, [block]).fill_(1)
    assert block[:4] == np.float32(1).tobytes()


# -- tensors that are not plain ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 1000])
def test_requires_grad_arrives(size):
    arrived = travel(torch.ones(size, requires_grad=True))
    assert arrived.requires_grad
    assert arrived.is_leaf
    assert torch.equal(arrived, torch.ones(size))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_arrives_as_one(requires_grad):
    arrived = travel(torch.nn.Parameter(torch.ones(1000), requires_grad))
    assert type(arrived) is torch.nn.Parameter
    assert arrived.requires_grad == requires_grad
    assert torch.equal(arrived, torch.ones(1000))


def test_a_module_arrives_with_its_weights():
    module = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    arrived = travel(module)
    assert all(torch.equal(arrived.state_dict()[name], value) for name, value in module.state_dict().items())
    assert [type(parameter) for parameter in arrived.parameters()] == [torch.nn.Parameter] * 4


def test_attributes_of_a_tensor_arrive():
    tensor = torch.ones(1000)
    tensor.label = "cat"
    arrived = travel(tensor)
    assert arrived.label == "cat"
    assert torch.equal(arrived, tensor)


class Mask(torch.Tensor):
    """A tensor subclass, as torchvision's tv_tensors are."""


@pytest.mark.parametrize("size", [3, 1000])
def test_a_tensor_subclass_arrives_as_one(size):
    arrived = travel(torch.arange(size).as_subclass(Mask))
    assert type(arrived) is Mask
    assert arrived.as_subclass(torch.Tensor).tolist() == list(range(size))


def test_conjugate_and_negative_views_arrive():
    tensor = torch.complex(torch.arange(100.0), torch.arange(100.0))
    assert torch.equal(travel(tensor.conj()), tensor.conj())
    assert torch.equal(travel(tensor.conj().imag), tensor.conj().imag)
    single = tensor[5:6].conj().imag
    assert single.is_contiguous()
    assert travel(single).tolist() == [-5.0]


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_sparse_tensors_arrive(layout):
    dense = torch.diag(torch.arange(40.0))
    blocks = {"blocksize": (2, 2)} if "_bs" in layout else {}
    tensor = dense.to_sparse(layout=getattr(torch, layout), **blocks)
    arrived = travel({"x": tensor})["x"]
    assert arrived.layout is tensor.layout
    assert torch.equal(arrived.to_dense(), dense)


@pytest.mark.usefixtures("quietly")
def test_nested_tensors_arrive():
    tensor = torch.nested.nested_tensor([torch.ones(200), torch.zeros(300)])
    arrived = travel(tensor)
    assert arrived.is_nested
    assert [part.tolist() for part in arrived.unbind()] == [part.tolist() for part in tensor.unbind()]


@pytest.mark.usefixtures("quietly")
def test_quantized_tensors_arrive():
    tensor = torch.quantize_per_tensor(torch.arange(100.0), 0.5, 10, torch.qint8)
    arrived = travel(tensor)
    assert (arrived.dtype, arrived.q_scale(), arrived.q_zero_point()) == (torch.qint8, 0.5, 10)
    assert torch.equal(arrived.dequantize(), tensor.dequantize())


def test_meta_tensors_arrive():
    arrived = travel(torch.empty(3, 4, device="meta"))
    assert (arrived.device.type, arrived.shape) == ("meta", (3, 4))


def test_packed_sequences_arrive():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(300), torch.ones(200)])
    arrived = travel(packed)
    assert torch.equal(arrived.data, packed.data)
    assert arrived.batch_sizes.tolist() == packed.batch_sizes.tolist()


@pytest.mark.parametrize(
    ("obj", "shares"),
    [
        (torch.ones(1000), False),
        (torch.ones(1000).share_memory_(), True),
        ([torch.ones(3).share_memory_(), torch.ones(3)], True),
        (torch.nn.Parameter(torch.ones(3)).share_memory_(), True),
        (torch.nn.Linear(3, 4).share_memory(), True),
        ("no tensor", False),
    ],
    ids=["plain", "shared", "in a list", "parameter", "module", "none"],
)
def test_tensors_in_shared_memory_are_noted(obj, shares):
    assert dumps(obj).shares_memory == shares


# -- arrays ------------------------------------------------------------------------------------------------------------

ARRAYS = {
    "float64": np.arange(1000.0),
    "bool": np.ones(1000, bool),
    "complex": np.ones(1000, complex),
    "float16": np.ones(1000, np.float16),
    "text": np.array(["ab", "c"] * 300),
    "bytes": np.array([b"ab", b"c"] * 600),
    "datetime64": np.array(["2024-01-01", "NaT"], "datetime64[D]"),
    "record": np.zeros(100, [("a", "i4"), ("b", "f8", 2)]),
    "objects": np.array([1, "two", None, (3,)], object),
    "big endian": np.arange(1000, dtype=">i4"),
    "0-dim": np.array(3.0),
    "zero-size": np.zeros((3, 0, 2)),
    "Fortran": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
    "strided": np.arange(2000.0)[::2],
    "reversed": np.arange(1000.0)[::-1],
    "transposed": np.arange(600.0).reshape(20, 30).T,
    "broadcast": np.broadcast_to(np.arange(30.0), (40, 30)),
    "small": np.arange(3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_arrives_equal(name):
    array = ARRAYS[name]
    arrived = travel(array)
    assert type(arrived) is np.ndarray
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    np.testing.assert_array_equal(arrived, array)


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "broadcast"])
def test_an_array_arrives_writable_and_independent(name):
    array = ARRAYS[name]
    before = array.copy()
    arrived = travel([array])[0]
    assert arrived.flags.writeable
    arrived[...] = np.zeros_like(arrived)
    np.testing.assert_array_equal(array, before)


def test_numpy_scalars_masked_arrays_and_memory_maps_arrive(tmp_path):
    assert travel(np.float32(1.5)) == np.float32(1.5)
    assert type(travel(np.int16(3))) is np.int16
    masked = np.ma.masked_array(np.arange(1000), np.arange(1000) % 2 == 0)
    assert travel(masked).sum() == masked.sum()
    mapped = np.memmap(tmp_path / "file", np.uint8, "w+", shape=2000)
    mapped[:] = 7
    assert np.array_equal(travel(mapped), mapped)


# -- nests and the rest ------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: torch.Tensor
    label: Any


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    boxes: list[np.ndarray[Any, Any]]
    meta: dict[str, Any]


def test_nests_arrive_with_their_types():
    sample = Sample(
        image=torch.rand(3, 20, 20),
        boxes=[np.arange(4), np.zeros((0, 4))],
        meta={
            "pair": Pair(torch.ones(500), (1, "two")),
            "ordered": collections.OrderedDict(b=1, a=2),
            "default": collections.defaultdict(list, {1: [torch.zeros(3)]}),
            "counter": collections.Counter("abca"),
            "deque": collections.deque([1, 2], maxlen=5),
            "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
            "amount": decimal.Decimal("1.50"),
            "path": Path("/tmp/x"),
            "set": frozenset({1, 2}),
            "bytes": bytes(2000),
            "bytearray": bytearray(2000),
            "none": None,
        },
    )
    arrived = travel(sample)
    assert type(arrived) is Sample
    assert torch.equal(arrived.image, sample.image)
    assert arrived.boxes[1].shape == (0, 4)
    pair, expected = arrived.meta.pop("pair"), sample.meta.pop("pair")
    assert type(pair) is Pair
    assert torch.equal(pair.image, expected.image)
    assert pair.label == expected.label
    assert arrived.meta.pop("default")[1][0].tolist() == sample.meta.pop("default")[1][0].tolist()
    assert arrived.meta == sample.meta
    assert {key: type(value) for key, value in arrived.meta.items()} == {k: type(v) for k, v in sample.meta.items()}


def test_a_nest_that_contains_itself_arrives():
    nest: list[Any] = [torch.zeros(1000)]
    nest.append(nest)
    arrived = travel(nest)
    assert arrived[1] is arrived


def test_functions_and_classes_without_a_module_arrive():
    offset = torch.arange(1000)

    class Shift:
        def __call__(self, x: int) -> Any:
            return offset + x

    assert torch.equal(travel(Shift())(5), offset + 5)
    assert travel(lambda x: offset[x])(7) == 7


def test_the_modules_that_unpickling_imports_are_noted():
    assert "fractions" not in dumps([1, "two"]).modules
    assert "fractions" in dumps(__import__("fractions").Fraction(1, 2)).modules
    assert "numpy" in {name.partition(".")[0] for name in dumps(np.zeros(3)).modules}
    assert "json" in dumps(lambda x: __import__("json") and json_module.dumps(x)).modules


json_module = __import__("json")


def test_dumps_keeps_nothing_alive():
    tensor, array = torch.zeros(1000), np.zeros(1000)
    refs = [weakref.ref(tensor), weakref.ref(array)]
    gc.disable()
    try:
        pickled = dumps([tensor, array])
        del tensor, array
        assert all(ref() is not None for ref in refs)  # its buffers are theirs
        del pickled
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


# -- classes that travelled --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forgetting(cls: type) -> Iterator[None]:
    """Be another process for a while, one that does not have ``cls``."""
    class_id = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls]
    del cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[class_id]
    try:
        yield
    finally:
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[class_id] = cls


def make_class() -> type:
    class Label:
        def __init__(self, text: str) -> None:
            self.text = text

    return Label


def test_an_object_comes_back_as_one_of_the_senders_own_class():
    Label = make_class()
    sent = dumps(Label("cat"))
    assert Label in sent_classes()
    with forgetting(Label):
        copy = loads_sent(sent.data)
        assert type(copy) is not Label
        copy.text = "dog"
        back = dumps([copy], to_parent=True)
        assert b"__init__" not in back.data  # named, not sent
    (arrived,) = loads(back.data)
    assert type(arrived) is Label
    assert arrived.text == "dog"


def test_a_class_that_is_gone_is_an_error_that_names_it():
    Label = make_class()
    sent = dumps(Label("cat"))
    with forgetting(Label):
        back = dumps(loads_sent(sent.data), to_parent=True)
    with forgetting(Label), pytest.raises(pickle.UnpicklingError, match="Label is gone"):
        loads(back.data)


def test_a_class_that_did_not_come_with_a_dataset_is_sent_itself():
    Label = make_class()
    assert b"__init__" in dumps(Label("cat"), to_parent=True).data


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda file: file, lambda file: [file], lambda file: lambda: file])
@pytest.mark.parametrize("mode", ["r", "w", "a"])
def test_an_open_text_file_is_refused_by_name(tmp_path, mode, wrap):
    path = tmp_path / "names.txt"
    path.write_text("a secret of a gigabyte")
    with open(path, mode) as file, pytest.raises(TypeError, match=r"cannot pickle the open file '.*names\.txt'"):
        dumps(wrap(file))


def test_a_text_file_without_a_name_is_refused_all_the_same():
    with pytest.raises(TypeError, match="cannot pickle the open file"):
        dumps(io.TextIOWrapper(io.BytesIO(b"text")))


def test_a_binary_file_is_refused(tmp_path):
    with open(tmp_path / "data", "wb") as file, pytest.raises(TypeError, match="cannot pickle"):
        dumps(file)


def test_the_standard_streams_and_text_in_memory_are_not_refused(capsys):
    with capsys.disabled():
        assert travel(sys.stdout) is sys.stdout
        assert travel(sys.stderr) is sys.stderr
    assert travel(io.StringIO("text")).getvalue() == "text"


# -- the culprit -------------------------------------------------------------------------------------------------------

LOCK = threading.Lock()


class Bag:
    """Takes any attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None: ...


def closure(value: Any) -> Any:
    return lambda: value


def uses_global() -> Any:
    def collate_fn() -> Any:
        return LOCK

    return collate_fn


CULPRITS = {
    "": LOCK,
    ".lock": Bag(ok=1, lock=LOCK),
    ".transform.lock": Bag(ok=[1], transform=Bag(size=3, lock=LOCK)),
    "[2]": [0, 1, LOCK],
    "[1][0]": (0, (LOCK,)),
    "['a b']": {"ok": 1, "a b": LOCK},
    "[3].files[0]": {3: Bag(files=[LOCK])},
    "<closure value>": closure(LOCK),
    "<closure value>['x']": closure({"x": LOCK}),
    "<global LOCK>": uses_global(),
    ".__self__.lock": Bag(lock=LOCK).method,
    ".call<closure value>.lock": Bag(call=closure(Bag(lock=LOCK))),
}


@pytest.mark.parametrize("path", CULPRITS)
def test_the_culprit_is_named_by_its_path(path):
    with pytest.raises(TypeError):
        dumps(CULPRITS[path])
    name, culprit = find_culprit(CULPRITS[path], "dataset")
    assert name == "dataset" + path
    assert culprit is LOCK


def test_the_culprit_is_the_innermost_part_that_can_be_named():
    class Refuses:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    part = Refuses()
    assert find_culprit(Bag(a=[Bag(b=part)]), "dataset") == ("dataset.a[0].b", part)


def test_the_culprit_is_found_in_a_nest_that_contains_itself():
    bag = Bag(ok=1)
    bag.me = bag
    bag.friends = [bag, LOCK]
    assert find_culprit(bag, "dataset") == ("dataset.friends[1]", LOCK)


def test_the_culprit_is_found_beside_a_variable_that_has_no_value_yet():
    def make() -> Any:
        def collate_fn() -> Any:
            return later, lock

        lock = LOCK
        if not lock:
            later = None
        return collate_fn

    assert find_culprit(make(), "collate_fn") == ("collate_fn<closure lock>", LOCK)


def test_an_object_that_forwards_every_attribute_is_its_own_culprit():
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no connection for {name}")

        def __reduce__(self) -> Any:
            raise RuntimeError("no connection")

    proxy = Proxy()
    assert find_culprit([proxy], "dataset") == ("dataset[0]", proxy)


# -- errors ------------------------------------------------------------------------------------------------------------


def cross(error: BaseException, where: str = "In fifobatch worker 7, loading dataset[3].") -> Exception:
    """Raise ``error`` there, and return what is to be raised here."""
    try:
        raise error
    except BaseException as raised:
        told = report(raised, where)
    assert pickle.loads(pickle.dumps(told)) == told
    assert all(type(part) in (str, bytes, type(None)) for part in told)
    return rebuild(told)


class NeedsArguments(Exception):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path} is broken in line {line}")
        self.path = path
        self.line = line


class NeedsKeywords(Exception):
    fmt = "no connection: {error}"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(self.fmt.format(**kwargs))
        self.kwargs = kwargs


class MakesItsText(Exception):
    def __init__(self, code: Any) -> None:
        super().__init__(f"HTTP error {code}")
        self.code = code


class OwnOSError(OSError):
    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP error {code}")
        self.code = code


class OwnFileError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "missing", path)
        self.path = path


class OwnImportError(ImportError):
    def __init__(self, what: str) -> None:
        super().__init__(f"no {what}", name=what, path="there")


class Hint:
    def hint(self) -> str:
        return "look there"


class WithMixin(Hint, ValueError):
    def __init__(self, text: str, line: int) -> None:
        super().__init__(f"{text} in line {line}")


class KeepsArguments:
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first = args[0]


class WithInitMixin(KeepsArguments, ValueError):
    pass


@dataclasses.dataclass
class AsDataclass(Exception):
    code: int
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class OverridesStr(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class HoldsALock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class CannotBePickled(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


class CannotBeUnpickled(Exception):
    def __reduce__(self) -> Any:
        return int, ("not a number",)


class UnpicklesAsSomethingElse(Exception):
    def __reduce__(self) -> Any:
        return str, ("just text",)


class FailsToInitAgain(Exception):
    made = 0

    def __init__(self, text: str) -> None:
        super().__init__(text)
        type(self).made += 1
        if type(self).made > 1:
            raise KeyError("error")


class Both(LookupError, OSError):
    pass


def local_error() -> Exception:
    class LocalError(ValueError):
        pass

    return LocalError("local")


ERRORS = [
    ValueError("plain"),
    ValueError(),
    ValueError("two", "arguments"),
    ZeroDivisionError("division by zero"),
    KeyError("no such key"),
    IndexError("list index out of range"),
    FileNotFoundError(2, "No such file or directory", "cat.jpg"),
    OSError(28, "No space left on device"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    AttributeError("no attribute", name="x", obj=None),
    ImportError("no module", name="x", path="y"),
    TimeoutError("slow"),
    EOFError("short"),
    MemoryError("big"),
    RecursionError("deep"),
    AssertionError(),
    torch.OutOfMemoryError("none left"),
    np.linalg.LinAlgError("singular"),
    NeedsArguments("a.jpg", 3),
    NeedsKeywords(error="dns"),
    MakesItsText(404),
    OwnOSError(404),
    OwnFileError("cat.jpg"),
    OwnImportError("codec"),
    WithMixin("bad", 3),
    WithInitMixin("bad"),
    AsDataclass(5, "bad"),
    OverridesStr(5),
    HoldsALock("locked"),
    CannotBePickled("boom"),
    CannotBeUnpickled("boom"),
    UnpicklesAsSomethingElse("boom"),
    FailsToInitAgain("boom"),
    Both("both"),
    local_error(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_raised_again_as_what_it_is(error):
    arrived = cross(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    note = arrived.__notes__[-1]
    assert note.startswith("In fifobatch worker 7, loading dataset[3].\nTraceback in the worker:\n")
    assert "    raise error" in note
    assert type(error).__name__ in note


def test_what_an_error_knows_arrives_with_it():
    assert cross(NeedsArguments("a.jpg", 3)).__dict__.items() >= {"path": "a.jpg", "line": 3}.items()
    assert cross(NeedsKeywords(error="dns")).kwargs == {"error": "dns"}
    assert cross(MakesItsText(404)).code == 404
    assert cross(OverridesStr(5)).code == 5
    missing = cross(FileNotFoundError(2, "No such file or directory", "cat.jpg"))
    assert (missing.errno, missing.strerror, missing.filename) == (2, "No such file or directory", "cat.jpg")
    assert cross(OSError(28, "No space left on device")).errno == 28
    assert cross(OwnOSError(404)).code == 404
    own = cross(OwnFileError("cat.jpg"))
    assert (own.errno, own.filename, own.path) == (2, "cat.jpg", "cat.jpg")
    unknown = cross(OwnImportError("codec"))
    assert (unknown.name, unknown.path) == ("codec", "there")
    assert cross(WithMixin("bad", 3)).hint() == "look there"
    assert cross(WithInitMixin("bad")).first == "bad"
    assert cross(AsDataclass(5, "bad")).code == 5


def test_tensors_that_an_error_holds_arrive_with_it():
    error = ValueError("not finite")
    error.batch = torch.arange(1000)
    assert torch.equal(cross(error).batch, torch.arange(1000))


def test_a_key_errors_text_stays_one_line():
    arrived = cross(KeyError("no such key"))
    assert str(arrived) == "'no such key'"
    assert "\n" not in str(arrived)
    assert "\\n" not in "".join(arrived.__notes__)


def test_notes_stay_before_ours():
    error = ValueError("plain")
    error.add_note("while reading cat.jpg")
    first, second = cross(error).__notes__
    assert first == "while reading cat.jpg"
    assert second.startswith("In fifobatch worker 7")


def test_a_cause_is_shown_in_the_note():
    error = ValueError("second")
    error.__cause__ = KeyError("first")
    note = cross(error).__notes__[-1]
    assert "KeyError: 'first'" in note
    assert "direct cause" in note


def test_an_exception_group_arrives_with_its_parts():
    arrived = cross(ExceptionGroup("several", [ValueError("one"), ExceptionGroup("inner", [KeyError("two")])]))
    assert type(arrived) is ExceptionGroup
    assert str(arrived) == "several (2 sub-exceptions)"
    first, inner = arrived.exceptions
    assert (type(first), str(first)) == (ValueError, "one")
    assert [type(part) for part in inner.exceptions] == [KeyError]


def test_an_exception_group_with_a_part_that_cannot_be_rebuilt_shows_it_all_the_same():
    arrived = cross(ExceptionGroup("several", [CannotBePickled("one")]))
    assert type(arrived) in (ExceptionGroup, SampleError)
    assert "several (1 sub-exception)" in str(arrived)
    assert "CannotBePickled: one" in arrived.__notes__[-1]


def test_an_error_whose_text_raises_does_not_hide_where_it_happened():
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise AttributeError("not set up")

    arrived = cross(Unspeakable())
    assert type(arrived) in (Unspeakable, SampleError)
    note = arrived.__notes__[-1]
    assert note.startswith("In fifobatch worker 7")
    assert "Unspeakable" in note
    assert "its text raises AttributeError" in note


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StopIteration("end"), "StopIteration: end"),
        (StopIteration(), "StopIteration"),
        (StopAsyncIteration("end"), "StopAsyncIteration: end"),
        (SystemExit(0), "SystemExit: 0"),
        (SystemExit(), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (BaseExceptionGroup("several", [SystemExit(1)]), "BaseExceptionGroup: several (1 sub-exception)"),
    ],
    ids=repr,
)
def test_what_would_end_a_loop_or_a_script_without_a_word_becomes_a_sample_error(error, text):
    arrived = cross(error)
    assert type(arrived) is SampleError
    assert str(arrived) == text
    assert "    raise error" in arrived.__notes__[-1]


class OwnStop(StopIteration):
    pass


class NotAnException(BaseException):
    pass


@pytest.mark.parametrize("cls", [OwnStop, NotAnException])
def test_so_do_errors_derived_from_them(cls):
    arrived = cross(cls("end"))
    assert type(arrived) is SampleError
    assert str(arrived) == f"{cls.__module__}.{cls.__name__}: end"


class Stubborn(Exception):
    def __new__(cls, *args: Any) -> "Stubborn":
        if args != ("here", "only"):
            raise TypeError("made only where it happens")
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        super().__init__("stubborn")


def test_what_cannot_be_rebuilt_is_a_sample_error_with_its_name_and_text():
    arrived = cross(Stubborn("here", "only"))
    assert type(arrived) is SampleError
    assert str(arrived) == f"{__name__}.Stubborn: stubborn"
    assert "    raise error" in arrived.__notes__[-1]


class Vanishing(Exception):
    pass


def test_an_error_whose_class_is_not_here_is_a_sample_error_that_says_so(monkeypatch):
    told = report(Vanishing("there"), "In fifobatch worker 7.")
    assert type(rebuild(told)) is Vanishing
    monkeypatch.delattr(sys.modules[__name__], "Vanishing")
    arrived = rebuild(told)
    assert type(arrived) is SampleError
    assert str(arrived) == f"{__name__}.Vanishing: there"
    assert "could not be rebuilt here" in arrived.__notes__[-1]


def test_an_error_of_a_class_that_came_with_the_dataset_is_the_senders_own():
    LocalError = type(local_error())
    sent = dumps(LocalError)
    with forgetting(LocalError):
        told = report(loads_sent(sent.data)("there"), "In fifobatch worker 7.")
    arrived = rebuild(told)
    assert type(arrived) is LocalError
    assert str(arrived) == "there"


def test_the_same_report_makes_a_new_error_each_time():
    told = report(ValueError("plain"), "In fifobatch worker 7.")
    first, second = rebuild(told), rebuild(told)
    assert first is not second
    assert first.__notes__ == second.__notes__


def test_a_report_holds_no_frames():
    class Canary:
        pass

    def fail() -> weakref.ref[Canary]:
        canary = Canary()
        try:
            raise ValueError("plain")
        except ValueError as error:
            told.append(report(error, "here"))
        return weakref.ref(canary)

    told: list[Any] = []
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_partials_and_methods_arrive():
    add = functools.partial(np.add, np.arange(1000))
    assert travel(add)(1)[-1] == 1000
    assert isinstance(travel(Bag(x=1).method), types.MethodType)
    assert list(travel(itertools.islice(range(10), 3))) == [0, 1, 2]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attributes, and so no notes."""

    key: int


class Quitter(Exception):
    """Ends the process that makes it anew."""

    def __reduce__(self) -> Any:
        return sys.exit, (77,)


def test_an_error_that_takes_no_notes_has_one_in_its_place_that_does() -> None:
    error = rebuild(report(Frozen(3), "there"))
    assert type(error) is SampleError
    assert error.__notes__[0].startswith("there")
    assert "Frozen" in str(error)


def test_an_error_whose_rebuilding_exits_is_told_of() -> None:
    told = report(Quitter("text"), "there")
    error = rebuild(told)
    assert type(error) in (SampleError, Quitter)
    assert "text" in str(error)
    told = told._replace(pickled=pickle.dumps((cloudpickle.dumps(Quitter()), [])))
    error = rebuild(told)
    assert type(error) is SampleError
    assert "text" in str(error)
    assert "could not be rebuilt here: SystemExit(77)" in error.__notes__[0]

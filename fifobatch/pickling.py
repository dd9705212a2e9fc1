"""What crosses between processes, as bytes: datasets, batches and errors.

`dumps` and `loads` run on both sides: datasets are dumped in the parent and loaded in a worker, batches the other way
round. `report` runs in a worker, `rebuild` in the parent, both next to the user's code that failed.

cloudpickle carries what ``__main__`` and notebook cells define. Buffers (NumPy arrays, plain CPU tensors) stay out of
band, so that `transport` can move them without another copy.
"""

import contextlib
import ctypes
import functools
import io
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import torch
from cloudpickle import cloudpickle as _cloudpickle

from fifobatch.errors import SampleError, noted

__all__ = ["Pickled", "Report", "dumps", "find_culprit", "loads", "loads_sent", "rebuild", "report", "sent_classes"]

IN_BAND_BYTES = 512  # a smaller buffer costs less inside the pickle than as a block of its own

# Ids (cloudpickle's) of the classes that came with a dataset. A worker names them by id when it sends them back, so
# that the parent finds its own class again: isinstance and except hold, and nothing of the parent's is redefined.
_received: set[str] = set()


@dataclass
class Pickled:
    """A pickle and its out-of-band buffers.

    Attributes:
        data: The pickle itself (protocol 5).
        buffers: Its out-of-band buffers, in order; valid as long as the pickled object is alive and unchanged.
        modules: Names of the modules that unpickling it will import.
        shares_memory: Whether it holds tensors in shared memory, which arrive as copies.
    """

    data: bytes
    buffers: list[memoryview]
    modules: set[str] = field(default_factory=set)
    shares_memory: bool = False

    @property
    def nbytes(self) -> int:
        """The size of all of it."""
        return len(self.data) + sum(buffer.nbytes for buffer in self.buffers)


def dumps(obj: object, *, to_parent: bool = False) -> Pickled:
    """Pickle anything that cloudpickle can, with big buffers out of band.

    Args:
        obj: What to pickle.
        to_parent: Whether it goes back to where the dataset came from. Classes that came with that are named by id
            then, and memory-mapped files (``numpy.memmap``) are read now. To the worker they go by their path.

    Raises:
        Exception: Whatever the object's own pickling raises; ``TypeError`` for an open file.
    """
    main = sys.modules.get("__mp_main__")
    if main is not None and main.__name__ == "__mp_main__":
        # In a child that multiprocessing has spawned, this is the user's script: no worker can import it.
        cloudpickle.register_pickle_by_value(main)
    file = io.BytesIO()
    pickler = _Pickler(file, to_parent)
    pickler.dump(obj)
    return Pickled(file.getvalue(), pickler.blocks, pickler.modules, pickler.shares_memory)


def loads(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Unpickle what `dumps` made; the objects are built over ``buffers``, which must be writable."""
    return pickle.loads(data, buffers=buffers)


def loads_sent(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Unpickle in a worker what the parent sent, and remember the classes that came with it."""
    if isinstance(data, bytes) and b"cloudpickle" not in data:  # such as indices
        return loads(data, buffers)
    before = set(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID)
    result = loads(data, buffers)
    _received.update(set(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID) - before)
    return result


def sent_classes() -> list[type]:
    """Return the classes that were pickled by value, for the sender to keep alive until they have come back."""
    with _cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        return list(_cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(self, file: io.BytesIO, to_parent: bool) -> None:
        blocks: list[memoryview] = []

        def take(buffer: pickle.PickleBuffer) -> bool:
            # Not a method: a cycle through self would keep what was pickled alive until the collector comes.
            block = buffer.raw()
            if block.nbytes > IN_BAND_BYTES:
                blocks.append(block)
            return block.nbytes <= IN_BAND_BYTES

        super().__init__(file, protocol=5, buffer_callback=take)
        self.blocks = blocks
        self.modules: set[str] = set()
        self.shares_memory = False
        self._to_parent = to_parent

    def reducer_override(self, obj: Any) -> Any:
        """Take plain tensors out of band, and note what unpickling will import (called by pickle's C code)."""
        if type(obj) is torch.Tensor:
            return self._reduce_tensor(obj)
        if (
            obj is _tensor or type(obj) is torch.dtype
        ):  # in every batch, and cloudpickle takes long to find nothing to do
            return NotImplemented
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(obj) is numpy.memmap and not self._to_parent:
            return _reduce_memmap(obj)
        is_class = isinstance(obj, type)
        if is_class and self._to_parent:
            class_id = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if class_id in _received:
                return _class_by_id, (class_id, obj.__qualname__)
        if isinstance(obj, types.ModuleType):
            self.modules.add(obj.__name__)
        elif is_class or isinstance(obj, types.FunctionType):
            self.modules.add(obj.__module__ or "builtins")
        elif isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read the whole file into the pickle.
            raise TypeError(f"cannot pickle the open file {getattr(obj, 'name', 'without a name')!r}")
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        layout = tensor.layout
        plain = (
            (layout is torch.strided or layout is torch.sparse_coo or layout in _COMPRESSED)
            and tensor.device.type == "cpu"
            and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
            and not tensor.__dict__
        )
        if not plain:
            return NotImplemented  # torch's own pickling
        if tensor.requires_grad:
            if not tensor.is_leaf:
                raise RuntimeError(
                    "cannot pickle a tensor that requires_grad and is not a leaf: its graph stays behind. Call "
                    "detach() on it, in __getitem__ or collate_fn"
                )
            return _requiring_grad, (tensor.detach(),)
        if layout is not torch.strided:
            return _reduce_sparse(tensor)
        self.shares_memory = self.shares_memory or tensor.is_shared()  # type: ignore[no-untyped-call]
        flat = tensor
        if not tensor.is_contiguous():
            flat = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
            if not flat.is_contiguous():  # a slice, or expanded: ship what it shows, not what it is cut from
                extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
                if self._to_parent or extent > 2 * tensor.numel():
                    tensor = flat = tensor.contiguous()
                else:  # of a dataset, so that what shares memory goes on sharing it
                    flat = tensor.as_strided((extent,), (1,))
        if tensor.numel() == 0:
            return _empty, (tensor.dtype, tuple(tensor.shape), tensor.stride())
        block = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
        block._tensor = tensor  # type: ignore[attr-defined]  # the block does not own its memory
        return _tensor, (pickle.PickleBuffer(block), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _reduce_memmap(array: Any) -> Any:
    """Have a memory-mapped file opened again where it is unpickled, as joblib does; else its array's own pickling.

    Changes of a copy-on-write map are in no file, and a slice with gaps is smaller than what it is cut from.
    """
    whole = array
    while type(whole.base) is type(array):
        whole = whole.base
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    if not contiguous or array.mode == "c" or not array.size or not os.path.isfile(whole.filename or ""):
        return NotImplemented
    offset = whole.offset + array.ctypes.data - whole.ctypes.data
    mode = "r" if array.mode == "r" else "r+"  # not "w+", which would empty the file
    order = "C" if array.flags.c_contiguous else "F"
    return type(array), (whole.filename, array.dtype, mode, offset, array.shape, order)


# torch's own pickling of sparse tensors keeps all that it has unpickled alive, until the next torch.load.
_COMPRESSED: dict[torch.layout, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def _reduce_sparse(tensor: torch.Tensor) -> Any:
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        return _sparse, (tensor._indices(), tensor._values(), shape, tensor.is_coalesced())
    compressed, plain = _COMPRESSED[tensor.layout]
    return _sparse_compressed, (tensor.layout, compressed(tensor), plain(tensor), tensor.values(), shape)


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)


def _sparse_compressed(layout: torch.layout, *parts: Any) -> torch.Tensor:
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(buffer, dtype=dtype)
    return flat if shape == (len(flat),) else flat.as_strided(shape, stride)


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _empty(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _class_by_id(class_id: str, name: str) -> type:
    found: type | None = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(class_id)
    if found is None:
        raise pickle.UnpicklingError(f"class {name} is gone in this process: keep it alive while its objects travel")
    return found


# -- errors ----------------------------------------------------------------------------------------------------------


class Report(NamedTuple):
    """An exception as plain data, made in the worker.

    Attributes:
        pickled: The exception, pickled, or None where that is impossible.
        name: Name of its class, with the module.
        text: Its message.
        note: What the reader needs: dataset index, chunk, worker and its traceback.
    """

    pickled: bytes | None
    name: str
    text: str
    note: str


def report(error: BaseException, where: str) -> Report:
    """Turn ``error`` into plain data; never raises.

    Args:
        error: What the user's code raised.
        where: What it was doing: the note's first line.
    """
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"
    try:
        text = str(error)
        lines = "".join(traceback.format_exception(cls, error, error.__traceback__))
    except BaseException as inner:  # the user's __str__, at the process boundary: an error must not hide an error
        text = lines = f"<{name}, and its text raises {type(inner).__name__}>"
    traced = "Traceback in the worker:" if where.startswith("In fifobatch worker") else "Traceback:"
    note = f"{where}\n{traced}\n" + "".join(f"  {line}\n" for line in lines.splitlines())
    return Report(_pickle_error(error), name, text, note.rstrip())


def _pickle_error(error: BaseException) -> bytes | None:
    cls = type(error)
    built_in = _built_in(cls)
    _, args, *state = built_in.__reduce__(error)  # OSError's file name is no arg, ImportError's module no attribute
    forms: list[object] = [error, (cls, args, state[0] if state else {}), (cls, args, {})]
    if isinstance(cls.__init__, types.FunctionType) and cls.__reduce__ is built_in.__reduce__:
        # Unpickling would call the user's __init__ with the args that it made itself: another text, or a TypeError.
        forms = forms[1:]
    for form in forms:
        try:
            pickled = dumps(form, to_parent=True)
            data = pickle.dumps((pickled.data, [bytes(block) for block in pickled.buffers]))
            loaded = _load_error(data)
            if type(loaded) is cls and _text(loaded) == _text(error):  # what pickles need not unpickle, so try
                return data
        except BaseException:  # the user's __reduce__ or __init__, at the process boundary: try the next form
            continue
    return None


def _built_in(cls: Any) -> Any:
    """Return the class of Python's own, or of an extension's, that an exception class is derived from."""
    exceptions = (base for base in cls.__mro__ if issubclass(base, BaseException))
    return next(e for e in exceptions if not any(isinstance(f, types.FunctionType) for f in (e.__init__, e.__reduce__)))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as inner:  # the user's __str__: two errors that both fail so are alike
        return repr(type(inner))


def _load_error(data: bytes) -> Any:
    body, blocks = pickle.loads(data)
    loaded = loads(body, [bytearray(block) for block in blocks])
    if isinstance(loaded, tuple):
        cls, args, state = loaded
        loaded = cls.__new__(cls, *args)
        _built_in(cls).__init__(loaded, *args)
        BaseException.__setstate__(loaded, state)
    return loaded


def rebuild(report: Report) -> Exception:
    """Make the exception to raise in the parent: the user's own where that can be, else a `SampleError`."""
    error: Any = None
    if report.pickled is not None:
        try:
            error = _load_error(report.pickled)
        except BaseException as inner:  # the user's __setstate__ or __init__, at the process boundary
            report = report._replace(note=f"{report.note}\n(it could not be rebuilt here: {inner!r})")
    # StopIteration would end a for loop, SystemExit the script, without a word.
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        error = SampleError(f"{report.name}: {report.text}" if report.text else report.name)
    return noted(error, report.note)


# -- what cannot be pickled -------------------------------------------------------------------------------------------


def find_culprit(obj: object, name: str) -> tuple[str, object]:
    """Find the innermost part of ``obj`` that cannot be pickled, after `dumps` failed.

    Args:
        obj: What cannot be pickled.
        name: What to call it.

    Returns:
        The path to the part, such as ``"dataset.transform.lock"``, and the part itself.
    """
    seen: set[int] = set()
    found = True
    while found:
        found = False
        seen.add(id(obj))
        for label, part in _parts(obj):
            if id(part) not in seen and not _pickles(part):
                name, obj, found = name + label, part, True
                break
    return name, obj


def _pickles(obj: object) -> bool:
    try:
        dumps(obj)
    except Exception:  # whatever the user's __reduce__ raises: the question is only whether
        return False
    return True


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{position}]", value) for position, value in enumerate(obj))
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or ()):
            with contextlib.suppress(ValueError):  # a variable without a value yet
                yield f"<closure {name}>", cell.cell_contents
        globals_ = obj.__globals__
        yield from ((f"<global {name}>", globals_[name]) for name in obj.__code__.co_names if name in globals_)
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{position}]", value) for position, value in enumerate(obj.args))
        yield from ((f".keywords[{key!r}]", value) for key, value in obj.keywords.items())
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif not isinstance(obj, type):
        yield from ((f".{key}", value) for key, value in getattr(obj, "__dict__", {}).items())

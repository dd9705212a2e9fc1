"""The public surface: what it is, that it says what it is, and that importing it does nothing."""

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fifobatch
from fifobatch import errors

MODULES = [
    importlib.import_module("fifobatch" if path.stem == "__init__" else f"fifobatch.{path.stem}")
    for path in sorted(Path(fifobatch.__file__).parent.glob("*.py"))
]
ERRORS = {
    "FifobatchError": {RuntimeError},
    "SampleError": {errors.FifobatchError},
    "WorkerDiedError": {errors.FifobatchError, BrokenExecutor},
    "ChunkTimeoutError": {errors.FifobatchError, TimeoutError},
    "PlanError": {errors.FifobatchError, ValueError},
    "ClosedError": {errors.FifobatchError},
}


def public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def members(cls: type) -> dict[str, Any]:
    """Return the public methods and properties that a class defines itself."""
    return {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod)))
    }


def test_the_surface_is_this():
    assert fifobatch.__all__ == [
        "Batch",
        "BatchExecutor",
        "BatchPlan",
        "Chunk",
        "ChunkTimeoutError",
        "ClosedError",
        "Failure",
        "FifoLoader",
        "FifobatchError",
        "PairedLoader",
        "PlanError",
        "SampleError",
        "Span",
        "Statistics",
        "WorkerDiedError",
        "format_timeline",
        "plot_timeline",
    ]


def rank(export: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each sorted; as ruff has it."""
    return (0 if export.isupper() else 1 if export[0].isupper() else 2), export


def test_all_is_sorted_and_everything_in_it_is_there():
    for module in MODULES:
        assert list(module.__all__) == sorted(set(module.__all__), key=rank), module.__name__
        assert all(hasattr(module, export) for export in module.__all__), module.__name__


def test_every_public_name_has_a_docstring_of_its_own():
    for module in MODULES:
        for export, value in public(module).items():
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue  # a constant
            assert value.__doc__, f"{module.__name__}.{export}"
            first = value.__doc__.splitlines()[0].strip()
            assert first.endswith((".", ":")), f"{module.__name__}.{export}: its first line is a sentence: {first!r}"
            for name, member in members(value).items() if inspect.isclass(value) else []:
                assert member.__doc__, f"{module.__name__}.{export}.{name}"


def test_every_public_name_is_defined_where_it_is_public():
    for module in set(MODULES) - {fifobatch}:
        for export, value in public(module).items():
            if inspect.isclass(value) or inspect.isroutine(value):
                assert value.__module__ == module.__name__, export


def test_a_star_import_gives_just_the_surface():
    namespace: dict[str, Any] = {}
    exec("from fifobatch import *", namespace)
    assert sorted(namespace.keys() - {"__builtins__"}) == fifobatch.__all__


def test_every_error_is_public():
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert classes <= set(fifobatch.__all__)
    assert classes == set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_an_errors_bases_are_as_promised(name):
    assert set(getattr(errors, name).__bases__) == ERRORS[name]


def test_the_errors_bases_are_as_documented():
    documented = dict(re.findall(r"^    (?:\|-- |`-- )?(\w+Error)(?: \((\w+)\))?", errors.__doc__ or "", re.MULTILINE))
    assert documented.keys() == ERRORS.keys()
    for name, bases in ERRORS.items():
        others = {base.__name__ for base in bases} - {"FifobatchError"}
        assert others == {documented[name]} - {""}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_can_be_made_caught_and_pickled_as_what_it_is(name):
    error = pickle.loads(pickle.dumps(getattr(fifobatch, name)("what happened")))
    assert type(error) is getattr(fifobatch, name)
    assert str(error) == "what happened"
    assert isinstance(error, fifobatch.FifobatchError)
    assert isinstance(error, RuntimeError)


def test_the_version_is_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fifobatch.__version__)


def test_importing_starts_nothing_and_says_nothing():
    code = (
        "import threading, multiprocessing, os, fifobatch, fifobatch.testing\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert multiprocessing.active_children() == []\n"
        "with open(f'/proc/self/task/{os.getpid()}/children') as children:\n"
        "    assert children.read() == ''\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""What the command line's arguments name, and errors as one line. Runs in the process of ``python -m fifobatch``."""

import argparse
import importlib
import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

__all__ = ["PROGRAM", "Parser", "count", "describe", "find", "find_dataset", "named", "writable"]

PROGRAM = "python -m fifobatch"


def describe(error: BaseException) -> str:
    """Return an error as one line, and what fifobatch notes of it, such as the sample, as another."""
    lines = str(error).splitlines()
    lines = lines if len(lines) < 3 else [lines[0], "...", lines[-1]]  # torch's texts hold a traceback
    notes = [note.partition("\n")[0] for note in getattr(error, "__notes__", ())]
    text = " ".join(" ".join(lines).split())
    return "\n".join([f"{type(error).__name__}: {text}".removesuffix(": "), *notes])


def find(name: str) -> Any:
    """Return what ``MODULE:NAME`` names."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise argparse.ArgumentTypeError(f"{name!r} is not MODULE:NAME, such as tasks:make")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise argparse.ArgumentTypeError(f"cannot get {name!r}: {describe(error)}") from error


def find_dataset(name: str) -> Any:
    """Return the dataset that ``MODULE:FACTORY`` makes or is."""
    dataset = find(name)
    try:
        if callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__getitem__")):
            dataset = dataset()
        cls = type(dataset)
        if issubclass(cls, IterableDataset) or not (hasattr(cls, "__getitem__") and hasattr(cls, "__len__")):
            problem = "has no __getitem__ and __len__"
        else:
            problem = "" if len(dataset) else "is empty"
    except (Exception, SystemExit) as error:  # whatever the user's dataset raises
        raise argparse.ArgumentTypeError(f"{name!r} fails: {describe(error)}") from error
    if problem:
        raise argparse.ArgumentTypeError(f"{name!r} is no map-style dataset: its {cls.__name__} {problem}")
    return dataset


def named(get: Callable[[str], Any]) -> Callable[[str], str]:
    """Return what checks that ``get`` finds something of a name, and returns the name: another process will get it."""

    def check(name: str) -> str:
        get(name)
        return name

    return check


def writable(path: str) -> str:
    """Return the path of a file that can be written; if it was not there, it is not now."""
    existed = os.path.lexists(path)
    try:
        open(path, "a").close()
        if not existed:
            os.unlink(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot write {path!r}: {describe(error)}") from error
    return path


def count(text: str) -> int:
    """Return a number that is at least 1."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")

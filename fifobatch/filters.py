"""Warning filters as plain data: read in the parent at each ``iter()``, installed in the workers.

Categories travel by name. So nothing is imported for them, those of notebooks and of modules that the workers cannot
import do no harm, and equal filters have equal pickles.

`current` runs in the parent, in the thread that iterates; `install` in a worker, in its only working thread.
"""

import builtins
import functools
import re
import warnings
from typing import Any

__all__ = ["Filter", "current", "install"]

Pattern = str | tuple[str, int] | None  # what is matched: whole, or an expression and its flags
Filter = tuple[str, Pattern, tuple[str, str], Pattern, int]

_installed: list[Filter] | None = None


def current() -> list[Filter]:
    """Return the filters that hold here and now, without those that are no plain data."""
    # Python 3.14 can have them in a context of their own.
    filters = getattr(warnings, "_get_filters", lambda: warnings.filters)()
    return [plain for entry in list(filters) if (plain := _plain(entry)) is not None]


def install(filters: list[Filter]) -> None:
    """Have just these hold, unless they were the last that were installed.

    Installing has Python forget which warnings it has shown, and undoes what ``worker_init_fn`` has changed.
    """
    global _installed
    if filters != _installed:
        _installed = filters
        warnings.resetwarnings()  # has it forget
        warnings.filters[:] = [_entry(plain) for plain in filters]  # type: ignore[index]  # a list, whatever typeshed says


def _plain(entry: Any) -> Filter | None:
    try:
        action, message, category, module, line = entry
        return (
            str(action),
            _plain_pattern(message),
            (category.__module__, category.__qualname__),
            _plain_pattern(module),
            line,
        )
    except (AttributeError, TypeError, ValueError):  # somebody has written into the list himself
        return None


def _plain_pattern(pattern: Any) -> Pattern:
    if pattern is None or type(pattern) is str:
        return pattern
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern.pattern, pattern.flags
    raise TypeError


def _entry(plain: Filter) -> Any:
    action, message, category, module, line = plain
    return action, _pattern(message), _category(*category), _pattern(module), line


def _pattern(pattern: Pattern) -> "str | re.Pattern[str] | None":
    return re.compile(*pattern) if isinstance(pattern, tuple) else pattern


@functools.cache
def _category(module: str, name: str) -> type:
    builtin = getattr(builtins, name, None) if module == "builtins" else None
    return builtin if isinstance(builtin, type) else _Named(name, (Warning,), {"__module__": module})


class _Named(type):
    """The type of stand-ins for categories: each has the subclasses of the class whose name it has."""

    def __subclasscheck__(cls, other: type) -> bool:
        name = (cls.__module__, cls.__qualname__)
        return any((base.__module__, base.__qualname__) == name for base in other.__mro__)

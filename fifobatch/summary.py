"""How a loader shows itself: a line in a terminal, a table in a notebook. Runs in the thread that asks for it."""

from collections.abc import Mapping
from html import escape
from typing import Any

from fifobatch.fetch import brief
from fifobatch.trace import Statistics

__all__ = ["describe_dataset", "html_table", "line"]


def describe_dataset(dataset: object) -> str:
    """Return a dataset's class, and its length if it has one."""
    name = type(dataset).__name__
    try:
        return f"{name} of {len(dataset):,}"  # type: ignore[arg-type]
    except Exception:  # the user's __len__, of something that is only being shown
        return name


def _shown(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return brief(value)
    return getattr(value, "__name__", type(value).__name__)


def line(name: str, dataset: object, arguments: Mapping[str, Any], statistics: Statistics) -> str:
    """Return one line: the class, what it loads, the arguments that are not the defaults, and the last epoch."""
    parts = [describe_dataset(dataset), *(f"{argument}={_shown(value)}" for argument, value in arguments.items())]
    return f"<{name}({', '.join(parts)}): {_epoch(statistics)}>"


def _epoch(statistics: Statistics) -> str:
    if not statistics.submitted:
        return "not iterated yet"
    seconds = f"{statistics.seconds:.2f} s, waited {statistics.waited_share:.0%} of it"
    return f"last epoch {statistics.delivered:,} of {statistics.submitted:,} batches in {seconds}"


def html_table(name: str, dataset: object, arguments: Mapping[str, Any], statistics: Statistics) -> str:
    """Return an HTML table of the same, with a line on whether the loader was the bottleneck."""
    rows = {"dataset": describe_dataset(dataset)} | {key: _shown(value) for key, value in arguments.items()}
    rows["last epoch"] = str(statistics)
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(key)}</th>"
        f"<td style='text-align:left;white-space:pre-line'>{escape(value)}</td></tr>"
        for key, value in rows.items()
    )
    return f"<table><caption style='text-align:left'>{escape(name)}</caption><tbody>{cells}</tbody></table>"

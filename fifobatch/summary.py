"""How a loader shows itself: a line in a terminal, a table in a notebook. Runs in the thread that asks for it."""

from html import escape
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler, default_collate, default_convert

from fifobatch.attempt import brief
from fifobatch.measures import Statistics

__all__ = ["describe_dataset", "html_table", "line"]

# Shown where they are not the default.
FLAGS = (
    "pin_memory",
    "drop_last",
    "timeout",
    "persistent_workers",
    "in_order",
    "progress",
    "cycle_targets",
    "share_randomness",
)
OPTIONS = ("worker_init_fn", "generator", "max_skew", "max_bytes", "executor", "device")
ERRORS = {"retries": 0, "retry_on": Exception, "on_error": "raise"}


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
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return getattr(value, "__name__", type(value).__name__)


def _arguments(loader: DataLoader[Any], window: int) -> dict[str, str]:
    """Return the arguments worth showing: the main ones, and those that are not the defaults."""
    arguments = {"batch_size": loader.batch_size, "num_workers": loader.num_workers, "window": window}
    shown = {"targets": describe_dataset(loader.targets)} if hasattr(loader, "targets") else {}
    shown |= {name: _shown(value) for name, value in arguments.items()}
    if loader.batch_size is None and loader.batch_sampler is not None:
        shown["batch_sampler"] = _shown(loader.batch_sampler)
    elif not isinstance(loader.sampler, SequentialSampler):
        shown["sampler"] = _shown(loader.sampler)
    collates = default_convert if loader.batch_sampler is None else default_collate
    defaults: dict[str, Any] = {"collate_fn": collates} | dict.fromkeys(FLAGS, False) | dict.fromkeys(OPTIONS) | ERRORS
    for name, default in defaults.items():
        value = getattr(loader, name, default)  # some are a `PairedLoader`'s only
        if value != default:
            shown[name] = _shown(value)
    return shown


def line(loader: DataLoader[Any], window: int, statistics: Statistics) -> str:
    """Return one line: the class, what it loads, how, and the last epoch."""
    arguments = (f"{name}={value}" for name, value in _arguments(loader, window).items())
    return (
        f"<{type(loader).__name__}({', '.join([describe_dataset(loader.dataset), *arguments])}): {_epoch(statistics)}>"
    )


def _epoch(statistics: Statistics) -> str:
    if not statistics.submitted:
        return "not iterated yet"
    seconds = f"{statistics.seconds:.2f} s, waited {statistics.waited_share:.0%} of it"
    failed = f", {statistics.failed:,} failed" if statistics.failed else ""
    return f"last epoch {statistics.delivered:,} batches{failed} in {seconds}"


def html_table(loader: DataLoader[Any], window: int, statistics: Statistics) -> str:
    """Return an HTML table of the same, with a line on whether the loader was the bottleneck."""
    rows = {"dataset": describe_dataset(loader.dataset)} | _arguments(loader, window) | {"last epoch": str(statistics)}
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(key)}</th>"
        f"<td style='text-align:left;white-space:pre-line'>{escape(value)}</td></tr>"
        for key, value in rows.items()
    )
    caption = escape(type(loader).__name__)
    return f"<table><caption style='text-align:left'>{caption}</caption><tbody>{cells}</tbody></table>"

"""``python -m fifobatch bench``: one table, fifobatch beside torch's `DataLoader`.

Runs in the main thread of a process that loads nothing itself: it asks child interpreters, one after another, for what
`workloads` measures, so that no workload disturbs the next::

    run: _plan -> _ask   --_Request, JSON-->   child interpreter: workloads.answer
                         <--Measured, JSON--
         -> Figure (what was measured of one thing, of all contenders) -> format_table, --json
"""

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from os import killpg
from typing import Any, NamedTuple

import torch

from fifobatch import __version__
from fifobatch.arguments import PROGRAM
from fifobatch.contenders import (
    FIFOBATCH,
    IDEAL,
    ORDERS,
    PEERS,
    STARTS,
    TWO_LOADERS,
    Measured,
    installed_peers,
    rotated,
)
from fifobatch.overlap import PAIRED
from fifobatch.pool import cpu_count
from fifobatch.warm import WARM
from fifobatch.workloads import FRESH

__all__ = ["DATASET_OPTIONS", "WORKLOADS", "Figure", "describe_workloads", "format_table", "run"]

DATASET_OPTIONS = ["batch_size", "num_workers", "shuffle", "collate_fn"]  # those of --dataset
WORKLOADS = [*WARM, *PAIRED, *FRESH]
WITH_IDEAL = {"cold"}  # which has a figure of its own for the ideal
ALONE = {"recovery"}  # what torch has nothing like
ONCE = {"package", "memory", "bounded", "in_memory"}  # they take long and hardly vary
LINUX_ONLY = {"memory", "bounded", "in_memory", "recovery"}
GRACE_SECONDS = 5  # for a child that is interrupted to end its workers, before all of them are killed

# The first thing that every child does is import torch, and see how long that takes. It runs no file of its own, so
# that nothing of it is imported again where torch spawns a worker.
CHILD = """
import os, signal, sys, time

def interrupt(*_):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what loaders have to say when they are interrupted
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    start = time.perf_counter()
    import torch
    seconds = time.perf_counter() - start
    from fifobatch.workloads import answer
    answer(sys.argv[1], seconds)
except KeyboardInterrupt:
    sys.exit(130)
"""


class _Request(NamedTuple):
    """What a child is to measure; ``options`` are those of the user's dataset."""

    workload: str
    contenders: list[str]
    rounds: int
    quick: bool
    options: dict[str, Any]

    @property
    def title(self) -> str:
        return f"--dataset {self.options['name']}" if self.options else self.workload


class _WorkloadError(Exception):
    """A child failed; ``status`` is the program's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Figure:
    """A row of the table.

    Attributes:
        name: What is measured.
        unit: Its unit; seconds, bytes and multiples of the ideal had better be few, and what comes in a second, much.
        values: Those of each contender, a round each.
    """

    name: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)

    @property
    def medians(self) -> dict[str, float]:
        """The contenders' medians over the rounds."""
        return {contender: statistics.median(values) for contender, values in self.values.items()}

    @property
    def to_ideal(self) -> float | None:
        """Our median over the ideal's, or None."""
        medians = self.medians
        return medians[FIFOBATCH] / medians[IDEAL] if medians.keys() >= {FIFOBATCH, IDEAL} else None

    @property
    def to_torch(self) -> float | None:
        """How many times better we are than the best of torch; below 1, worse."""
        medians = self.medians
        theirs = [value for contender, value in medians.items() if contender in [*ORDERS, *STARTS, *TWO_LOADERS]]
        if FIFOBATCH not in medians or not theirs:
            return None
        few = not self.unit.endswith("/s")
        best = min(theirs) if few else max(theirs)
        if best <= 0 or medians[FIFOBATCH] <= 0:  # a growth of nothing
            return None
        return best / medians[FIFOBATCH] if few else medians[FIFOBATCH] / best

    def verdict(self) -> str:
        """Return `to_torch` in words, such as ``1.80x faster``."""
        if self.to_torch is None:
            return "torch raises" if self.name.partition(":")[0] in ALONE else ""
        ratio = max(self.to_torch, 1 / self.to_torch)
        if f"{ratio:.2f}" == "1.00":
            return "equal"
        better, worse = ("faster", "slower") if self.unit.endswith("s") else ("less", "more")
        return f"{_number(ratio)}x {better if self.to_torch > 1 else worse}"


def describe_workloads() -> str:
    """Return a line for each workload: what its docstring says first."""
    functions: dict[str, Callable[..., Any]] = {**WARM, **PAIRED, **FRESH}
    first_lines = {name: (function.__doc__ or "").partition("\n")[0] for name, function in functions.items()}
    return "\n".join(f"  {name:10}{line}" for name, line in first_lines.items())


def run(args: argparse.Namespace) -> int:
    """Do ``python -m fifobatch bench``; return the exit status."""
    requests = list(_plan(args))
    # End the children then, as after Ctrl-C.
    handlers = {signum: signal.signal(signum, _exit) for signum in (signal.SIGTERM, signal.SIGHUP)}
    measured: list[Measured] = []
    try:
        for before, request in zip([None, *requests], requests):
            if before is None or before.title != request.title:
                print(f"{request.title} ...", file=sys.stderr, flush=True)
            measured += _ask(request)
    except _WorkloadError as error:
        print(f"{PROGRAM} bench: error: {error}", file=sys.stderr)
        return error.status
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    figures = _figures(measured)
    facts = {
        "fifobatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": cpu_count(),
    }
    title = "fifobatch {fifobatch}, torch {torch}, Python {python}, {cores} cores".format_map(facts)
    print(f"{title}{', --quick' if args.quick else ''}; medians")
    options = requests[0].options
    if options:
        shuffled = ", shuffled" if args.shuffle else ""
        print(f"{args.dataset}: batch size {args.batch_size:,}, workers {args.num_workers:,}{shuffled}")
    print(f"\n{format_table(figures)}", flush=True)
    unmeasured = [name for name in WORKLOADS if name in LINUX_ONLY & {request.workload for request in requests}]
    if unmeasured and sys.platform != "linux":
        print(f"    measured on Linux only: {', '.join(unmeasured)}")
    missing = [name for name in PEERS if name not in installed_peers()] if args.peers else []
    if missing:
        print(f"    not installed, so not measured: {', '.join(missing)}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            rows = [_row(figure) for figure in figures]
            json.dump({"facts": facts, "quick": args.quick, "dataset": options, "figures": rows}, file, indent=2)
    return 0


def _exit(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def _plan(args: argparse.Namespace) -> Iterator[_Request]:
    """Yield what to ask for: of a warm workload, or of pairs, all at once, of a fresh one each contender a round."""
    options, names = {}, [name for name in WORKLOADS if not args.only or name in args.only]
    if args.dataset:
        options, names = {name: getattr(args, name) for name in DATASET_OPTIONS} | {"name": args.dataset}, ["own"]
    for name in names:
        if name in WARM or name in PAIRED:
            others = TWO_LOADERS if name in PAIRED else [*ORDERS, *(installed_peers() if args.peers else [])]
            contenders = [FIFOBATCH, *others]
            yield _Request(name, contenders, 2 if args.quick else 5, args.quick, options)
            continue
        theirs = ORDERS if args.dataset else [] if name in ALONE else STARTS
        contenders = [FIFOBATCH, *theirs] + [IDEAL] * (name in WITH_IDEAL)
        for number in range(1 if args.quick or name in ONCE else 3):
            for contender in rotated(contenders, number):
                yield _Request(name, [contender], 1, args.quick, options)


def _ask(request: _Request) -> list[Measured]:
    """Have a child interpreter measure.

    Raises:
        _WorkloadError: It failed.
    """
    command = [sys.executable, "-c", CHILD, json.dumps(request._asdict())]
    # A process group of its own: Ctrl-C is for this process alone, which then sees to it that all of the child's end.
    # Until it can, Ctrl-C waits, here and (by the mask that it inherits) in the child, which first sets its handler.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    with child:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            answer, _ = child.communicate()
        except BaseException:
            child.send_signal(signal.SIGINT)
            try:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    killpg(child.pid, signal.SIGKILL)
            raise
    where = request.title if len(request.contenders) > 1 else f"{request.title}, {request.contenders[0]}"
    try:
        reply = json.loads(answer)
    except ValueError:
        raise _WorkloadError(f"{where}: the process ended with status {child.returncode}", 1) from None
    if "error" in reply:
        raise _WorkloadError(f"{where}: {reply['error']}", reply["status"])
    return [Measured(*each) for each in reply["measured"]]


def _figures(measured: Iterable[Measured]) -> list[Figure]:
    figures: dict[str, Figure] = {}
    for each in measured:
        figure = figures.setdefault(each.figure, Figure(each.figure, each.unit))
        figure.values.setdefault(each.contender, []).append(each.value)
    return list(figures.values())


def _row(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "rounds": figure.values,
        "medians": figure.medians,
        "to_ideal": figure.to_ideal,
        "to_torch": figure.to_torch,
    }


# -- the table


def format_table(figures: Sequence[Figure]) -> str:
    """Return the figures as text, indented as a code block: loading, pairs, start and memory, and other libraries."""
    loading = [figure for figure in figures if figure.values.keys() & {*ORDERS}]
    paired = [figure for figure in figures if figure.values.keys() & {*TWO_LOADERS}]
    starting = [figure for figure in figures if figure not in [*loading, *paired]]
    others = [figure for figure in loading if figure.values.keys() & {*PEERS}]
    blocks = [
        _block("loading", ORDERS, loading, against_torch=True),
        _block("pairs", TWO_LOADERS, paired, against_torch=True),
        _block("start and memory", STARTS, starting, against_torch=True),
        _block("other libraries", [peer for peer in PEERS if any(peer in figure.values for figure in others)], others),
    ]
    return "\n\n".join(filter(None, blocks))


def _block(title: str, others: Sequence[str], figures: Sequence[Figure], against_torch: bool = False) -> str:
    if not figures:
        return ""
    contenders = [FIFOBATCH, *others]
    heads = [[title], [""], *(contender.replace("=", " =").split(" ") for contender in contenders)]
    if against_torch:
        heads += [[IDEAL], ["ours to", "ideal"], ["ours to", "best torch"]]
    rows = [list(row) for row in zip_longest(*heads, fillvalue="")]
    for figure in figures:
        row = [figure.name, figure.unit, *(_number(figure.medians.get(contender)) for contender in contenders)]
        if against_torch:
            row += [_number(figure.medians.get(IDEAL)), _number(figure.to_ideal), figure.verdict()]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, unit, *cells in rows:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[2:]))
        lines.append(f"    {name:{widths[0]}}  {unit:{widths[1]}}{numbers}".rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

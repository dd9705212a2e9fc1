"""``python -m fifobatch``: completion order beside torch's order, on a small example or on your own dataset.

Runs in the main thread of a process of its own; `Example` and `stamped` run in the workers of both loaders.

Both loaders load the same batches, for a loop that does nothing else. `FifoLoader` goes first: what its run leaves in
the system's file cache is to torch's advantage.
"""

import argparse
import importlib
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate
from tqdm import tqdm  # tqdm.auto would start a second iterator, with workers of its own

from fifobatch import BatchExecutor, FifoLoader, PlanError, __version__
from fifobatch.pool import cpu_count

__all__ = ["main"]

PROGRAM = "python -m fifobatch"
SLOW_SECONDS = 0.2
AXIS = 19  # characters of the time axis
EDGE = 6  # lines at either end of a long timeline
ASCII = str.maketrans("●■─…", "o#-~")

ABOUT = """\
Show which batch comes when: torch's DataLoader beside fifobatch's FifoLoader.
Without a command: a small example, in which slow batches hold back fast ones."""

ABOUT_RUN = f"""\
Load your dataset once with each loader, and show which batch comes when.

Example: with this in tasks.py, in the current directory,

  def make():
      return torchvision.datasets.ImageFolder("photos", transform)

  {PROGRAM} run tasks:make --batch-size 32 --num-workers 8 --shuffle"""

Batches = Iterator[tuple[int | None, Any]]  # their numbers in the plan, where they are known, and their data


class UsageError(Exception):
    """What the command line asks for cannot be done."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


class Example:
    """Samples 0 to 19; those above 10 are slow."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        """Load one sample."""
        if index > 10:
            time.sleep(SLOW_SECONDS)
        return index


def stamped(samples: list[Any]) -> tuple[float, Any]:
    """Collate, and say when that was done, by the clock that all processes share."""
    batch = default_collate(samples)
    return time.perf_counter(), batch


class Arrival(NamedTuple):
    """A batch as it came; seconds since its loader was made: when it came, and when it had been loaded."""

    seconds: float
    loaded: float
    label: str
    mark: str


class Record(NamedTuple):
    """What one loader did."""

    name: str
    startup: float
    arrivals: list[Arrival]

    def after(self, share: float) -> float:
        """Return when this share of the batches had come."""
        return self.arrivals[max(1, math.ceil(share * len(self.arrivals))) - 1].seconds


def load_fifo(workers: int, quiet: bool | None, **options: Any) -> Batches:
    """Load with `FifoLoader`."""
    with closing(BatchExecutor(workers)) as executor:
        bar = {"desc": "FifoLoader", "disable": quiet, "leave": False}
        for batch in FifoLoader[Any](**options, executor=executor, progress=bar).batches():
            yield batch.number, batch.data
        executor.shutdown()  # wait for the workers' end: torch's shall have the machine for themselves


def load_torch(in_order: bool, workers: int, quiet: bool | None, **options: Any) -> Batches:
    """Load with torch's `DataLoader`."""
    loader = DataLoader[Any](**options, num_workers=workers, in_order=in_order)
    for number, data in enumerate(tqdm(loader, "torch DataLoader", unit="batch", disable=quiet, leave=False)):
        yield (number if in_order else None), data


def compare(
    workers: int,
    in_order: bool,
    look: Callable[[int | None, Any], tuple[float, str, str]],
    quiet: bool | None = None,
    **options: Any,
) -> list[Record]:
    """Load the same batches with both loaders; return torch's record, then ours.

    Args:
        workers: Their number.
        in_order: What torch's loader is given; True is its default.
        look: Takes a batch's number and its data; returns when it was loaded, its label and its mark.
        quiet: Whether to show no progress; None: where stderr is no terminal.
        options: What both loaders are given: the dataset and the batches.
    """
    torch_name = "torch DataLoader" if in_order else "torch in_order=False"
    loaders: dict[str, Callable[..., Batches]] = {"FifoLoader": load_fifo, torch_name: partial(load_torch, in_order)}
    records = []
    for name, load in loaders.items():
        start = time.perf_counter()
        # One sample, which is the dataset itself: loads nothing, but starts and imports what loading needs.
        first = load(1, True, dataset=[options["dataset"]], collate_fn=len)
        startup = [time.perf_counter() - start for _ in first][0]
        arrivals = []
        start = time.perf_counter()
        for number, data in load(workers, quiet, **options):
            now = time.perf_counter()
            loaded, label, mark = look(number, data)
            arrivals.append(Arrival(now - start, min(now, loaded) - start, label, mark))
        records.append(Record(name, startup, arrivals))
    return records[::-1]


def show(text: str) -> None:
    """Print, in ASCII where stdout has no more."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        text = text.translate(ASCII).encode("ascii", "backslashreplace").decode()
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def show_records(records: list[Record], legend: str, figures: dict[str, Callable[[Record], float]]) -> None:
    """Show the batches as they came, a line each, and then the figures, the loaders side by side."""
    end = max(record.after(1) for record in records)
    columns = []
    for record in records:
        lines = [record.name, f"     s 0{end:{AXIS - 1}.2f} batch"]
        for arrival in record.arrivals:
            loaded, came = (int((AXIS - 1) * seconds / end) for seconds in (arrival.loaded, arrival.seconds))
            bar = " " * loaded + "─" * (came - loaded) + arrival.mark
            lines.append(f"{arrival.seconds:6.2f} {bar:{AXIS}} {arrival.label}")
        if len(record.arrivals) > 2 * EDGE + 1:
            lines[2 + EDGE : -EDGE] = [f"       … {len(record.arrivals) - 2 * EDGE:,} more"]
        columns.append(lines)
    for left, right in zip(*columns):
        show(f"{left:40}{right}".rstrip())
    show(f"\n{legend}\n\n{'seconds until':37}" + "".join(f"{record.name:>21}" for record in records))
    figures = {"first batch": lambda record: record.after(0)} | figures
    figures |= {"all batches": lambda record: record.after(1), "(start-up, before all that)": lambda r: r.startup}
    for label, figure in figures.items():
        show(f"{label:37}" + "".join(f"{figure(record):21.2f}" for record in records))


def show_example(in_order: bool) -> None:
    """Do ``python -m fifobatch``."""
    # What torch's two workers get where each has half of the data: [0, 1], [10, 11], [2, 3], ...
    batches = [[first, first + 1] for pair in zip(range(0, 10, 2), range(10, 20, 2)) for first in pair]
    show(
        f"20 samples, two a batch, two workers. Samples 11 to 19 are slow: {SLOW_SECONDS} s each.\n"
        "The batches are planned in the order [0, 1], [10, 11], [2, 3], [12, 13], ...\n"
    )

    def look(_: int | None, data: tuple[float, torch.Tensor]) -> tuple[float, str, str]:
        loaded, samples = data
        return loaded, str(samples.tolist()), "■" if samples.max() > 10 else "●"

    records = compare(2, in_order, look, True, dataset=Example(), batch_sampler=batches, collate_fn=stamped)
    show_records(
        records,
        "● a fast batch comes   ■ a slow batch comes   ── it is loaded, but held back",
        {"last fast batch": lambda record: max(a.seconds for a in record.arrivals if a.mark == "●")},
    )


def show_run(args: argparse.Namespace) -> None:
    """Do ``python -m fifobatch run``."""
    length = len(args.dataset)
    order: Sequence[int] = range(length)
    if args.shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(0)).tolist()
    size = min(args.batch_size, length)
    batches = [list(order[first : first + size]) for first in range(0, length, size)][: args.batches]
    workers = min(args.num_workers, len(batches))
    show(
        f"{type(args.dataset).__name__}, {length:,} samples: {len(batches):,} batches of {size:,}, {workers} workers\n"
    )

    def look(number: int | None, _: object) -> tuple[float, str, str]:
        return math.inf, "" if number is None else f"{number:,}", "●"

    options = {"dataset": args.dataset, "batch_sampler": batches, "collate_fn": args.collate_fn}
    records = compare(workers, not args.out_of_order, look, **options)
    middle = {"half of the batches": lambda record: record.after(0.5), "90 % of them": lambda record: record.after(0.9)}
    show_records(records, "● a batch comes", middle)


def find(name: str) -> Any:
    """Return what ``MODULE:NAME`` names.

    Raises:
        ArgumentTypeError: There is no such thing, or the module raises.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise argparse.ArgumentTypeError(f"{name!r} is not MODULE:NAME, such as tasks:make")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise argparse.ArgumentTypeError(describe(error)) from error


def find_dataset(name: str) -> Any:
    """Return the dataset that ``MODULE:FACTORY`` makes or is.

    Raises:
        ArgumentTypeError: It is not a map-style dataset, or is empty, or making it raises.
    """
    dataset = find(name)
    try:
        if isinstance(dataset, type) or not hasattr(dataset, "__getitem__"):
            dataset = dataset()
        cls = type(dataset)
        map_style = hasattr(cls, "__getitem__") and hasattr(cls, "__len__") and not issubclass(cls, IterableDataset)
        problem = "" if map_style and len(dataset) else "is empty" if map_style else "needs __getitem__ and __len__"
    except (Exception, SystemExit) as error:  # whatever the user's dataset raises
        raise argparse.ArgumentTypeError(f"{name} failed: {describe(error)}") from error
    if problem:
        raise argparse.ArgumentTypeError(f"the {cls.__name__} of {name} {problem}")
    return dataset


def count(text: str) -> int:
    """Return a number that is at least 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def describe(error: BaseException) -> str:
    """Return an error in one line: its text, cut, and where it was raised or what fifobatch notes of it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2:
        lines = [lines[0], "...", lines[-1]]
    notes = [note.partition("\n")[0] for note in getattr(error, "__notes__", ())]
    if not notes:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        frames = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
        notes = [f"({frame.filename}, line {frame.lineno})" for frame in frames[-1:]]
    return " ".join(" ".join([f"{type(error).__name__}:", *lines, *notes]).split())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments.

    Raises:
        UsageError: They are wrong.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(PROGRAM, description=ABOUT, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fifobatch {__version__}")
    run = parser.add_subparsers(dest="command", metavar="run").add_parser(
        "run", help="compare them on your own dataset", description=ABOUT_RUN, formatter_class=raw, allow_abbrev=False
    )
    run.add_argument(
        "dataset", type=find_dataset, metavar="MODULE:FACTORY", help="a function that returns a dataset, or a dataset"
    )
    run.add_argument("--batch-size", type=count, default=1, metavar="N", help="samples a batch (1)")
    run.add_argument(
        "--num-workers", type=count, default=cpu_count(), metavar="N", help="worker processes (%(default)s)"
    )
    run.add_argument("--shuffle", action="store_true", help="load in random order, the same for both loaders")
    run.add_argument("--batches", type=count, metavar="N", help="load the first N batches only")
    run.add_argument("--collate-fn", type=find, metavar="MODULE:NAME", help="makes a batch of a list of samples")
    for each, default in ((parser, False), (run, argparse.SUPPRESS)):
        each.add_argument("--out-of-order", action="store_true", default=default, help="give torch in_order=False")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 2 for a wrong use of it, 1 where loading failed."""
    try:
        args = parse(argv)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores
            show_run(args) if args.command else show_example(not args.out_of_order)
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # the process boundary
        message = str(error) if isinstance(error, UsageError) else describe(error)
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | PlanError) else 1


if __name__ == "__main__":
    sys.exit(main())

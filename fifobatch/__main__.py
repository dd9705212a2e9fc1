"""``python -m fifobatch``: completion order beside torch's order, on a small example or on your own dataset.

Runs in the main thread of a process of its own; `Example` and `stamped` run in the workers of both loaders.

Both loaders load the same batches, for a loop that does nothing with them. `FifoLoader` goes first: it names a sample
that fails, and what it leaves in the system's file cache is to torch's advantage.
"""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from tqdm import tqdm  # tqdm.auto's would call iter() twice, and torch would start twice the workers

from fifobatch import BatchExecutor, FifoLoader, PlanError, __version__, bench
from fifobatch.arguments import PROGRAM, Parser, count, describe, find, find_dataset, named, writable
from fifobatch.contenders import PEERS
from fifobatch.pool import cpu_count

__all__ = ["main"]

SLOW_SECONDS = 0.2
AXIS = 19  # characters of the time axis
EDGE = 6  # lines at either end of a long timeline
ASCII = str.maketrans("●■─…", "o#-~")

ABOUT = """\
Show which batch comes when: torch's DataLoader beside fifobatch's FifoLoader.
Without a command: a small example, in which slow batches hold back fast ones."""

ABOUT_RUN = f"""\
Load your dataset once with each loader, and show which batch comes when.

Example, with this in tasks.py in the current directory:

  def make():
      return torchvision.datasets.ImageFolder("photos", transform)

  {PROGRAM} run tasks:make --batch-size 32 --num-workers 8 --shuffle"""

ABOUT_BENCH = f"""\
Measure fifobatch beside torch's DataLoader: one table, medians over rounds in
which the loaders take turns. The machine should have nothing else to do.

{bench.describe_workloads()}

Or your own dataset, with the options of run:

  {PROGRAM} bench --dataset tasks:make --batch-size 32"""

Batches = Iterator[tuple[int | None, Any]]  # number in the plan, where that is known, and data
Look = Callable[[int | None, Any], tuple[float, str, str]]  # from these: when it was loaded, its label and its mark


class Example(IterableDataset[int]):
    """The samples from ``start`` to ``end``, of which each worker reads a stretch; those above 10 are slow."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        """Load this worker's samples."""
        worker = get_worker_info()
        assert worker is not None
        length = math.ceil((self.end - self.start) / worker.num_workers)
        first = self.start + worker.id * length
        for number in range(first, min(first + length, self.end)):
            if number > 10:
                time.sleep(SLOW_SECONDS)
            yield number


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


def compare(workers: int, in_order: bool, quiet: bool | None, look: Look, **options: Any) -> list[Record]:
    """Load with both loaders; return torch's record, then ours."""
    torch_name = "torch DataLoader" if in_order else "torch in_order=False"
    loaders: dict[str, Callable[..., Batches]] = {"FifoLoader": load_fifo, torch_name: partial(load_torch, in_order)}
    # A batch of no samples starts and imports what loading needs. Where there is a __getitems__, which may not bear
    # that: a dataset of one sample, the dataset itself. A stream has at least one.
    if isinstance(options["dataset"], IterableDataset):
        nothing = options | {"dataset": Example(0, 1)}
    else:
        nothing = options | {"batch_sampler": [[]], "collate_fn": len}
    if hasattr(options["dataset"], "__getitems__"):
        nothing |= {"dataset": [options["dataset"]], "batch_sampler": [[0]]}
    records = []
    for name, load in loaders.items():
        start = time.perf_counter()
        (startup,) = [time.perf_counter() - start for _ in load(1, True, **nothing)]
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
    print(text, flush=True)


def show_records(records: list[Record], legend: str, figures: dict[str, Callable[[Record], float]]) -> None:
    """Show the batches as they came, a line each, and then the figures, the loaders side by side."""
    end = max(record.after(1) for record in records)
    columns = []
    for record in records:
        lines = [record.name, f"     s 0{end:{AXIS - 1}.2f} batch"]
        for arrival in record.arrivals:
            came, held = (AXIS - 1) * arrival.seconds / end, (AXIS - 1) * (arrival.seconds - arrival.loaded) / end
            bar = ("─" * round(held) + arrival.mark).rjust(int(came) + 1)
            lines.append(f"{arrival.seconds:6.2f} {bar:{AXIS}} {arrival.label}")
        if len(record.arrivals) > 2 * EDGE + 1:
            lines[2 + EDGE : -EDGE] = [f"       … {len(record.arrivals) - 2 * EDGE:,} more"]
        columns.append(lines)
    for left, right in zip(*columns):
        show(f"{left:40}{right}".rstrip())
    show(f"\n{legend}\n\n{'seconds until':37}" + "".join(f"{record.name:>21}" for record in records))
    figures = {"the first batch": lambda record: record.after(0), **figures}
    figures["the last batch"] = lambda record: record.after(1)
    figures["start-up, once, not in these times"] = attrgetter("startup")
    for label, figure in figures.items():
        show(f"{label:37}" + "".join(f"{figure(record):21.2f}" for record in records))


def show_example(in_order: bool) -> None:
    """Do ``python -m fifobatch``."""

    def look(_: int | None, data: tuple[float, torch.Tensor]) -> tuple[float, str, str]:
        loaded, samples = data
        return loaded, str(samples.tolist()), "■" if samples.max() > 10 else "●"

    show(
        "A stream of 20 samples, two a batch: worker 0 reads 0 to 9, worker 1 10 to 19.\n"
        f"Samples 11 to 19 are slow: {SLOW_SECONDS} s each.\n"
        "Loading them with either loader, which takes a few seconds ...\n"
    )
    show_records(
        compare(2, in_order, True, look, dataset=Example(0, 20), batch_size=2, collate_fn=stamped),
        "● fast batch   ■ slow batch   ── loaded already, but held back\n"
        "Look at the fast ones: in order, all but the first wait for a slow one.",
        {"the last fast batch": lambda record: max(a.seconds for a in record.arrivals if a.mark == "●")},
    )
    show("\nNext: --out-of-order (torch's in_order=False), or run --help (your dataset).")


def show_run(args: argparse.Namespace) -> None:
    """Do ``python -m fifobatch run``."""
    length = len(args.dataset)
    order: Sequence[int] = range(length)
    if args.shuffle:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(0)).tolist()
    size = min(args.batch_size, length)
    batches = [list(order[first : first + size]) for first in range(0, length, size)[: args.batches]]
    workers = min(args.num_workers, len(batches))

    def look(number: int | None, _: object) -> tuple[float, str, str]:
        return math.inf, "" if number is None else f"{number:,}", "●"

    sizes = f"{length:,} samples, batch size {size:,}, batches {len(batches):,}, workers {workers:,}"
    show(f"{type(args.dataset).__name__}: {sizes}. Loading ...\n")
    options = {"dataset": args.dataset, "batch_sampler": batches, "collate_fn": args.collate_fn}
    show_records(
        compare(workers, not args.out_of_order, None, look, **options),
        "● a batch comes; its number is its place in the plan, from 0",
        {"half of the batches": lambda record: record.after(0.5), "90 % of them": lambda record: record.after(0.9)},
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    options: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(PROGRAM, description=ABOUT, **options)
    parser.add_argument("--version", action="version", version=f"fifobatch {__version__}")
    commands = parser.add_subparsers(title="command", dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help="load your own dataset; see run --help", description=ABOUT_RUN, **options)
    dataset_help = "your dataset, or a function that makes it"
    run.add_argument("dataset", type=find_dataset, metavar="MODULE:FACTORY", help=dataset_help)
    run.add_argument("--batches", type=count, metavar="N", help="load the first N batches only")
    benchmark = commands.add_parser("bench", help="measure it; see bench --help", description=ABOUT_BENCH, **options)
    add = benchmark.add_argument
    add("--only", action="append", choices=bench.WORKLOADS, metavar="NAME", help="this workload; may be repeated")
    add("--quick", action="store_true", help="fewer rounds, samples and workers: to see that it works")
    add("--peers", action="store_true", help=f"add those installed of {', '.join(PEERS)}")
    add("--json", type=writable, metavar="FILE", help="write every single figure there, too")
    add("--dataset", type=named(find_dataset), metavar="MODULE:FACTORY", help=dataset_help)
    for each, get in ((run, find), (benchmark, named(find))):
        add = each.add_argument
        add("--batch-size", type=count, default=1, metavar="N", help="samples a batch (default: 1)")
        add(
            "--num-workers",
            type=count,
            default=cpu_count(),
            metavar="N",
            help="worker processes (default: %(default)s)",
        )
        add("--shuffle", action="store_true", help="load in random order, the same for all loaders")
        add("--collate-fn", type=get, metavar="MODULE:NAME", help="makes a batch of a list of samples")
    for each, default in ((parser, False), (run, argparse.SUPPRESS)):
        each.add_argument("--out-of-order", action="store_true", default=default, help="give torch in_order=False")
    args = parser.parse_args(argv)
    if args.command == "bench":
        if args.dataset and (args.only or args.peers):
            benchmark.error("--dataset is a workload of its own; leave out --only and --peers, or --dataset")
        of_dataset = [name for name in bench.DATASET_OPTIONS if getattr(args, name) != benchmark.get_default(name)]
        if of_dataset and not args.dataset:
            benchmark.error(f"--{of_dataset[0].replace('_', '-')} needs --dataset MODULE:FACTORY")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. On an error of use, argparse exits with 2."""
    try:
        args = parse(argv)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more workers than cores
            if args.command == "bench":
                return bench.run(args)
            show_run(args) if args.command else show_example(not args.out_of_order)
        return 0
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # the process boundary
        print(f"{PROGRAM}: error: {describe(error)}", file=sys.stderr)
        return 2 if isinstance(error, PlanError) else 1


if __name__ == "__main__":
    sys.exit(main())

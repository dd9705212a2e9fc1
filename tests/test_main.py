import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fifobatch import __version__
from fifobatch.__main__ import Arrival, Example, Record, load_fifo, main, show, show_records
from fifobatch.arguments import describe

# Python 3.12 and later warn where torch's DataLoader forks beside any thread.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

TASKS = """
import signal
import sys
import threading

import torch
from torch.utils.data import Dataset, IterableDataset

class Squares:
    def __init__(self, length=40):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return index ** 2

class Bad(Squares):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("no sample\\n\\nto be\\nhad")
        return index

class Locked(Squares):
    def __init__(self):
        self.length, self.lock = 4, threading.Lock()

class Lists(Squares):
    def __getitems__(self, indices):
        return [torch.full((2,), index) for index in indices[:1] or 1 / 0 for index in indices]

class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])

class Unsized(Dataset):
    def __getitem__(self, index):
        return index

def make():
    return Squares()

def endless():
    return range(10**12)

def add(samples):
    assert isinstance(samples, list)
    return sum(samples)

def fails():
    raise KeyError("no photos\\nhere")

def leaves():
    sys.exit("bye")

def needs(argument):
    pass

def interrupted():
    signal.raise_signal(signal.SIGINT)

class Negative(Squares):
    def __len__(self):
        return -1

ready = Squares(3)
empty = []
number = 5
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    (tmp_path / "fifobatch_tasks.py").write_text(TASKS)
    (tmp_path / "fifobatch_wrong.py").write_text("def make(:\n")
    (tmp_path / "fifobatch_leaves.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "fifobatch_tasks"
    sys.modules.pop("fifobatch_tasks", None)


def columns(text):
    """The batches of either column, as (seconds, bar, label)."""
    row = re.compile(r"\s*(\d+\.\d\d) (.{19}) ?(.*)")
    rows = [line for line in text.splitlines() if row.fullmatch(line[:40]) and row.fullmatch(line[40:].ljust(27))]
    found = [[row.fullmatch(part).groups() for part in (line[:40], line[40:].ljust(27))] for line in rows]
    return [[(float(seconds), bar, label.strip()) for seconds, bar, label in column] for column in zip(*found)]


def figures(text):
    return {
        match[1].strip(): (float(match[2]), float(match[3]))
        for match in re.finditer(r"^(\S.{36}) +(\d+\.\d\d) +(\d+\.\d\d)$", text, re.MULTILINE)
    }


FAST = "[0, 1]", "[2, 3]", "[4, 5]", "[6, 7]", "[8, 9]"


def test_the_example():
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "fifobatch"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) < 80

    torch_came, fifo_came = columns(done.stdout)
    plan = [[first, first + 1] for fast in range(0, 10, 2) for first in (fast, fast + 10)]
    assert [label for _, _, label in torch_came] == [str(batch) for batch in plan]
    order = [label for _, _, label in fifo_came]
    assert [label for label in order if label in FAST] == [*FAST]
    assert [label for label in order if label not in FAST] == [str(batch) for batch in plan[1::2]]
    for column in torch_came, fifo_came:
        assert [seconds for seconds, _, _ in column] == sorted(seconds for seconds, _, _ in column)
        for _, bar, label in column:
            assert bar.strip()[-1] == ("●" if label in FAST else "■")

    found = figures(done.stdout)
    assert found["the first batch"] == (torch_came[0][0], fifo_came[0][0])
    assert found["the last batch"] == (torch_came[-1][0], fifo_came[-1][0])
    # In order, [8, 9] comes after [16, 17], whose worker has slept for 0.2 + 3 * 0.4 s by then; then for 0.4 s more.
    assert found["the last fast batch"][0] >= 1.4
    assert found["the last batch"][0] >= 1.8


class Held(Example):
    """The example, but what is slow waits until it is let through."""

    def __init__(self, gate):
        super().__init__(0, 20)
        self.gate = gate

    def __iter__(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fifobatch.__main__.time", SimpleNamespace(sleep=lambda seconds: self.gate.wait()))
            yield from super().__iter__()


def test_the_fast_batches_of_the_example_wait_for_no_slow_one(gate):
    came = []
    for _, samples in load_fifo(2, True, dataset=Held(gate), batch_size=2, collate_fn=list):
        came.append(samples)
        if samples == [8, 9]:  # nothing above 10 has been let through yet
            gate.open(9)
    assert came[:5] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert came[5:] == [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19]]


def test_the_example_with_torchs_own_completion_order(capsys):
    assert main(["--out-of-order"]) == 0
    out = capsys.readouterr().out
    assert "torch in_order=False" in out
    for column in columns(out):
        assert [label for _, _, label in column if label in FAST] == [*FAST]


def test_run_shows_a_long_timeline_in_few_lines(tasks, capsys):
    assert main(["run", f"{tasks}:make", "--batch-size", "2", "--num-workers", "2", "--shuffle"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no terminal, no progress bar
    assert "Squares: 40 samples, batch size 2, batches 20, workers 2. Loading" in out
    assert len(re.findall(r"… 8 more", out)) == 2
    torch_came, fifo_came = columns(out)
    assert [label for _, _, label in torch_came] == [str(number) for number in (*range(6), *range(14, 20))]
    assert len(fifo_came) == len({label for _, _, label in fifo_came}) == 12
    found = figures(out)
    assert list(found) == [
        "the first batch",
        "half of the batches",
        "90 % of them",
        "the last batch",
        "start-up, once, not in these times",
    ]
    for loader in 0, 1:
        times = [found[label][loader] for label in list(found)[:4]]
        assert times == sorted(times)


def test_run_limits_batches_and_workers_and_leaves_torch_its_own_order(tasks, capsys):
    arguments = ["--num-workers", "99", "--batches", "3", "--batch-size", "9" * 30, "--collate-fn", f"{tasks}:add"]
    assert main(["run", f"{tasks}:ready", "--out-of-order", *arguments]) == 0
    out = capsys.readouterr().out
    assert "Squares: 3 samples, batch size 3, batches 1, workers 1. Loading" in out
    assert "torch in_order=False" in out
    assert [[label for _, _, label in column] for column in columns(out)] == [[""], ["0"]]


def test_run_loads_a_little_of_a_huge_dataset(tasks, capsys):
    assert main(["run", f"{tasks}:endless", "--batches", "2"]) == 0
    assert "range: 1,000,000,000,000 samples, batch size 1, batches 2, " in capsys.readouterr().out


def test_run_bears_a_getitems_that_wants_at_least_one_index(tasks, capsys):
    assert main(["run", f"{tasks}:Lists", "--batches", "2", "--num-workers", "1"]) == 0
    assert capsys.readouterr().err == ""


def test_a_failing_sample_is_named(tasks, capsys):
    assert main(["run", f"{tasks}:Bad", "--batch-size", "4", "--num-workers", "1"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "python -m fifobatch: error: ValueError: no sample ... had"
    assert re.fullmatch(
        r"In fifobatch worker \d+, loading dataset\[5\], chunk 1 \(indices \[4, 5, 6, 7\]\); attempt 1, after .* s\.",
        second,
    )


def test_an_error_from_torchs_worker_is_cut_to_a_line():
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback:\nValueError: no\n"
    assert (
        describe(ValueError(text)) == "ValueError: Caught ValueError in DataLoader worker process 0. ... ValueError: no"
    )
    assert describe(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_what_cannot_be_sent_is_an_error_of_use(tasks, capsys):
    assert main(["run", f"{tasks}:Locked"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "PlanError: cannot send Locked to the worker processes: dataset.lock is a" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: MODULE:FACTORY"),
        (["tasks"], "'tasks' is not MODULE:NAME, such as tasks:make"),
        ([":make"], "':make' is not MODULE:NAME"),
        (["tasks:"], "'tasks:' is not MODULE:NAME"),
        (["fifobatch_nowhere:make"], "ModuleNotFoundError: No module named 'fifobatch_nowhere'"),
        ([".relative:make"], "cannot get '.relative:make': TypeError"),
        (["fifobatch_wrong:make"], "SyntaxError"),
        (["fifobatch_leaves:make"], "cannot get 'fifobatch_leaves:make': SystemExit: 0"),
        (["fifobatch_tasks:nothing"], "module 'fifobatch_tasks' has no attribute 'nothing'"),
        (["fifobatch_tasks:make.more"], "'function' object has no attribute 'more'"),
        (["fifobatch_tasks:fails"], "'fifobatch_tasks:fails' fails: KeyError: 'no photos\\nhere'"),
        (["fifobatch_tasks:leaves"], "'fifobatch_tasks:leaves' fails: SystemExit: bye"),
        (["fifobatch_tasks:needs"], "TypeError: needs() missing 1 required positional argument: 'argument'"),
        (["fifobatch_tasks:Negative"], "'fifobatch_tasks:Negative' fails: ValueError: __len__() should return >= 0"),
        (["fifobatch_tasks:Stream"], "is no map-style dataset: its Stream has no __getitem__ and __len__"),
        (["fifobatch_tasks:Unsized"], "is no map-style dataset: its Unsized has no __getitem__ and __len__"),
        (["fifobatch_tasks:number"], "is no map-style dataset: its int has no __getitem__ and __len__"),
        (["fifobatch_tasks:empty"], "is no map-style dataset: its list is empty"),
        (["fifobatch_tasks:make", "--collate-fn", "fifobatch_tasks:x"], "argument --collate-fn: cannot get"),
        (["fifobatch_tasks:make", "--batch-size", "0"], "argument --batch-size: '0' is not a whole number from 1 up"),
        (["fifobatch_tasks:make", "--num-workers", "-1"], "argument --num-workers: '-1' is not a whole number"),
        (["fifobatch_tasks:make", "--batches", "1.5"], "argument --batches: '1.5' is not a whole number"),
        (["fifobatch_tasks:make", "--batch-size", ""], "argument --batch-size: '' is not a whole number"),
        (["fifobatch_tasks:make", "--batch-size", "9" * 5000], "argument --batch-size: invalid count value"),
        (["fifobatch_tasks:make", "--shuf"], "unrecognized arguments: --shuf"),
    ],
)
def test_errors_of_use_are_one_line_and_status_2(tasks, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(["run", *arguments])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("python -m fifobatch")
    assert message in line


def test_an_unknown_command_is_an_error_of_use(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["walk"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "invalid choice: 'walk'" in line


def test_an_interrupt_exits_with_130(tasks, capsys):
    assert main(["run", f"{tasks}:interrupted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_fits_and_has_an_example(capsys, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    out = capsys.readouterr().out
    assert "run" in out
    assert max(map(len, out.splitlines())) < 80
    assert ("python -m fifobatch run tasks:make" in out) == ("run" in arguments)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fifobatch {__version__}\n"


RECORDS = [
    Record(
        "torch DataLoader",
        0.5,
        [Arrival(0.0, 0.0, "[0]", "●"), Arrival(1.0, 1.0, "[1]", "■"), Arrival(2.0, 1.0, "[2]", "●")],
    ),
    Record(
        "FifoLoader", 2.5, [Arrival(0.0, 0.0, "[0]", "●"), Arrival(0.5, 0.5, "[2]", "●"), Arrival(1.0, 1.0, "[1]", "■")]
    ),
]
SHOWN = """\
torch DataLoader                        FifoLoader
     s 0              2.00 batch             s 0              2.00 batch
  0.00 ●                   [0]            0.00 ●                   [0]
  1.00          ■          [1]            0.50     ●               [2]
  2.00          ─────────● [2]            1.00          ■          [1]

legend

seconds until                             torch DataLoader           FifoLoader
the first batch                                       0.00                 0.00
the last batch                                        2.00                 1.00
start-up, once, not in these times                    0.50                 2.50
"""


def test_the_picture(capsys):
    show_records(RECORDS, "legend", {})
    assert capsys.readouterr().out == SHOWN


def test_the_picture_in_ascii(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", file)
    show_records(RECORDS, "…legend é", {})
    text = file.buffer.getvalue().decode("ascii")
    assert text == SHOWN.translate(str.maketrans("●■─", "o#-")).replace("legend", "~legend \\xe9")


def test_nobody_reads_on(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr("fifobatch.__main__.show_example", lambda in_order: show("text"))
        assert main([]) == 1
        show("more text")  # as Python's own flush at exit

"""The benchmark: that it measures and shows what it says. How fast anything is, is not tested."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fifobatch.__main__ import main
from fifobatch.bench import CHILD, WORKLOADS, Figure, format_table
from fifobatch.contenders import TWO_LOADERS, Epoch, make_pairs, measure_epochs, rotated
from fifobatch.overlap import PAIRED, overlap, product
from fifobatch.warm import LANE_SECONDS, WARM, lane_schedule, list_schedule
from fifobatch.workloads import FRESH

TASKS = """
class Squares:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        print("squaring")
        return index ** 2

class Locked(Squares):
    def __init__(self):
        import threading
        self.lock = threading.Lock()

def add(samples):
    assert isinstance(samples, list)
    return sum(samples)
"""


@pytest.fixture(autouse=True)
def tasks(tmp_path, monkeypatch):
    """A module named tasks, for this process and its children, in the working directory."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    yield
    sys.modules.pop("tasks", None)


@pytest.mark.parametrize(
    ("seconds", "workers", "makespan"),
    [
        ([], 2, 0),
        ([1, 2, 3], 1, 6),
        ([1, 2, 3], 8, 3),
        ([3, 1, 1, 1], 2, 3),  # three short ones beside the long one
        ([1, 1, 1, 3], 2, 4),  # in the order of the plan, though the long one first would be better
        ([2, 1, 2, 2], 2, 4),
        ([5, 1, 1, 1, 5], 3, 6),
    ],
)
def test_the_ideal_gives_each_batch_to_the_worker_that_is_free_first(seconds, workers, makespan):
    assert list_schedule(seconds, workers) == makespan


@pytest.mark.parametrize(("quick", "batches"), [(True, 60), (False, 300)])
def test_a_tenth_of_the_skewed_samples_is_slow_and_always_the_same(quick, batches):
    (epoch,), (again,) = WARM["skew"](quick), WARM["skew"](quick)
    seconds = epoch.dataset.seconds
    assert len(seconds) == batches * epoch.batch_size
    assert seconds == again.dataset.seconds
    assert sorted(set(seconds)) == [0.002, 0.06]
    assert seconds.count(0.06) == len(seconds) // 10
    assert sum(seconds) / 8 <= epoch.ideal == again.ideal


def test_the_ideal_of_lanes_makes_one_batch_after_another_in_each():
    assert lane_schedule([1, 2], 3) == [1, 2, 2, 3, 4, 6]
    assert lane_schedule([1], 0) == []


@pytest.mark.parametrize("quick", [True, False])
def test_the_lanes_have_as_many_batches_each_and_twice_the_time_of_the_one_before(quick):
    (epoch,) = WARM["streams"](quick)
    assert len(epoch.dataset) == len(epoch.schedule) * epoch.batch_size
    assert len(epoch.schedule) % epoch.num_workers == 0
    assert [each / LANE_SECONDS[0] for each in LANE_SECONDS] == [1, 2, 4, 8]
    assert epoch.schedule[0] == pytest.approx(epoch.batch_size * LANE_SECONDS[0])
    assert epoch.schedule[-1] == pytest.approx(len(epoch.dataset) / epoch.num_workers * LANE_SECONDS[-1])


def test_when_batches_came_is_set_against_when_they_had_better_come():
    epoch = Epoch("lanes", "s", range(3), 1, 2, schedule=[1.0, 2.0, 4.0])
    kth, last = epoch.measured("fifobatch", 9.0, [1.5, 2.2, 8.0])
    assert kth == ("lanes: k-th batch", "ideal's", "fifobatch", 1.5)  # the median of 1.5, 1.1 and 2
    assert last == ("lanes: last batch", "s", "fifobatch", 8.0)
    assert [each.value for each in epoch.measured("ideal", 4.0, epoch.schedule)] == [1, 4]


class Streamed(IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(range(4 * get_worker_info().id, 4 * get_worker_info().id + 4))


def test_streams_are_not_for_the_other_libraries(monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    stream = Epoch("numbers", "batches/s", Streamed(), 2, 2, 1)
    measured = measure_epochs([stream], ["fifobatch", "joblib"], 2)
    assert [(each.figure, each.contender) for each in measured] == [("numbers", "fifobatch")] * 2


def test_contenders_are_first_in_turn():
    assert [rotated("ABC", number) for number in range(4)] == [[*"ABC"], [*"BCA"], [*"CAB"], [*"ABC"]]


def test_a_loader_that_loses_batches_is_no_contender(monkeypatch):
    monkeypatch.setattr("fifobatch.contenders.make_loader", lambda *args, **kwargs: [1, 2])
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    with pytest.raises(RuntimeError, match="2 batches came instead of 3") as raised:
        measure_epochs([Epoch("tiny", "s", range(12), 4, 2)], ["spdl"], 1)
    assert raised.value.__notes__ == ["In tiny, with spdl."]


class Clock:
    """Stands for `time` where nothing takes any, but to sleep."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fifobatch.overlap.time", clock)
    monkeypatch.setattr("fifobatch.overlap.product", lambda seconds: lambda: clock.sleep(2 * seconds))
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    return clock


class Wait(Future):
    def __init__(self, clock, seconds, batch):
        super().__init__()
        self.set_result(batch)
        self.wait = lambda: clock.sleep(seconds)

    def result(self, timeout=None):
        self.wait()
        return super().result(timeout)


def test_what_an_epoch_takes_is_divided_by_the_longer_of_loading_and_computing(clock, monkeypatch):
    made = []

    def pairs(contender, inputs, targets, *, batch_size, num_workers):
        made.append((contender, num_workers, len(inputs) // batch_size, len(targets) // batch_size))

        class Pairs:
            def __iter__(self):
                for batch in torch.arange(len(inputs)).split(batch_size):
                    if contender == "torch zip":
                        clock.sleep(0.04)
                        yield batch, batch
                    else:
                        yield batch, Wait(clock, 0.02 if contender == "torch by hand" else 0, batch)

        return Pairs()

    monkeypatch.setattr("fifobatch.overlap.make_pairs", pairs)
    contenders = ["fifobatch", "torch by hand", "torch zip"]
    sleeping, computing = {}, {}
    for figure, unit, contender, value in overlap(contenders, 2, True):
        assert unit == "ideal's"
        values = {"overlap: sleeping step": sleeping, "overlap: matrix product": computing}[figure]
        values.setdefault(contender, []).append(value)
    assert made == [(contender, 4, 10, 10) for contender in contenders]
    ratios = {"fifobatch": [1, 1], "torch by hand": [1.5, 1.5], "torch zip": [2, 2], "ideal": [1]}
    assert sleeping == {contender: pytest.approx(values) for contender, values in ratios.items()}
    # Its steps of 80 ms are what takes longer, not loading.
    ratios = {"fifobatch": [1, 1], "torch by hand": [1.25, 1.25], "torch zip": [1.5, 1.5], "ideal": [1]}
    assert computing == {contender: pytest.approx(values) for contender, values in ratios.items()}


@pytest.mark.parametrize("lost", [slice(1, None), slice(None, None, -1)])
def test_pairs_that_are_lost_or_not_aligned_are_no_contender(clock, monkeypatch, lost):
    def pairs(contender, inputs, targets, *, batch_size, num_workers):
        batches = torch.arange(len(inputs)).split(batch_size)
        return list(zip(batches, batches[lost]))

    monkeypatch.setattr("fifobatch.overlap.make_pairs", pairs)
    with pytest.raises(RuntimeError, match=r"the pairs of torch zip are not those of the datasets"):
        overlap(["torch zip"], 1, True)


def test_by_hand_the_target_is_fetched_in_a_thread(monkeypatch):
    gate = threading.Event()

    def targets():
        gate.wait()
        yield from [3, 4]

    monkeypatch.setattr("fifobatch.contenders.DataLoader", lambda batches, **options: batches)
    pairs = iter(make_pairs("torch by hand", [1, 2], targets(), batch_size=1, num_workers=2))
    batch, target = next(pairs)
    assert (batch, target.done()) == (1, False)
    gate.set()
    assert target.result() == 3
    assert [(batch, target.result()) for batch, target in pairs] == [(2, 4)]


@pytest.mark.parametrize(("contender", "each"), [("fifobatch", [4]), ("torch by hand", [2, 2]), ("torch zip", [2, 2])])
def test_each_way_to_pairs_has_as_many_workers_in_all(contender, each):
    pairs = make_pairs(contender, [1, 2], [3, 4], batch_size=1, num_workers=4)
    loaders = [pairs] if contender == "fifobatch" else [pairs._inputs, pairs._targets]
    assert [loader.num_workers for loader in loaders] == each
    assert all(loader.persistent_workers for loader in loaders)


def test_a_product_is_as_large_as_it_may_take_long(monkeypatch):
    clock = Clock()
    clock.thread_time = clock.perf_counter
    monkeypatch.setattr("fifobatch.overlap.time", clock)
    monkeypatch.setattr("torch.mm", lambda a, b: clock.sleep(1e-9 * len(a) * a.shape[1] * b.shape[1]))
    step = product(0.008)
    before = clock.now
    step()
    assert clock.now - before == pytest.approx(0.008, rel=0.01)


def test_overlap_measures_torch_s_ways_and_ours(capfd, tmp_path):
    assert main(["bench", "--only", "overlap", "--quick", "--json", "figures.json"]) == 0
    out = capfd.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert [figure["name"] for figure in figures] == ["overlap: sleeping step", "overlap: matrix product"]
    for figure in figures:
        rounds = figure["rounds"]
        assert {name: len(values) for name, values in rounds.items()} == {
            **dict.fromkeys(["fifobatch", *TWO_LOADERS], 2),
            "ideal": 1,
        }
        assert figure["to_ideal"] == pytest.approx(figure["medians"]["fifobatch"])
        theirs = min(figure["medians"][name] for name in TWO_LOADERS)
        assert figure["to_torch"] == pytest.approx(theirs / figure["medians"]["fifobatch"])
        assert f"    {figure['name']:23}  ideal's " in out


def figure(unit, ours, theirs, ideal=None):
    values = {"fifobatch": ours, "torch in_order=True": theirs[:3], "torch in_order=False": theirs[3:]}
    return Figure("made up", unit, values | ({"ideal": [ideal]} if ideal else {}))


@pytest.mark.parametrize(
    ("unit", "ours", "theirs", "to_torch", "verdict"),
    [
        ("s", [1.0, 9.0, 2.0], [4.0, 4.0, 4.0, 3.0], 1.5, "1.50x faster"),  # medians against the best of torch
        ("s", [3.0], [1.0, 1.0, 1.0, 2.0], 1 / 3, "3.00x slower"),
        ("ideal's", [1.1], [2.2, 2.2, 2.2, 3.0], 2, "2.00x faster"),
        ("GB/s", [3.0], [1.0, 1.0, 1.0, 2.0], 1.5, "1.50x faster"),
        ("batches/s", [100.0], [1.0, 1.0, 1.0, 2000.0], 0.05, "20.0x slower"),
        ("MB", [10.0], [500.0, 500.0, 500.0, 5000.0], 50, "50.0x less"),
        ("MB", [30.0], [20.0, 20.0, 20.0, 20.0], 2 / 3, "1.50x more"),
        ("s", [1.0], [1.001, 1.001, 1.001, 2.0], 1.001, "equal"),
    ],
)
def test_a_ratio_says_which_way_is_good(unit, ours, theirs, to_torch, verdict):
    made_up = figure(unit, ours, theirs)
    assert made_up.to_torch == pytest.approx(to_torch)
    assert made_up.verdict() == verdict


class Deadly(list):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_where_torch_raises_the_table_says_so():
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(DataLoader(Deadly([0]), num_workers=1, multiprocessing_context="fork"))
    row = format_table([Figure("recovery: next batch", "s", {"fifobatch": [0.2]})]).splitlines()[-1]
    assert row.split("  ")[-1] == "torch raises"


def test_without_torch_or_without_us_there_is_no_ratio():
    assert Figure("cold", "s", {"ideal": [1.0]}).verdict() == ""
    assert Figure("skew", "s", {"fifobatch": [1.0]}).to_torch is None
    assert Figure("skew", "s", {"fifobatch": [1.0]}).to_ideal is None


TABLE = """\
    loading             fifobatch     torch     torch  ideal  ours to       ours to
                                   in_order  in_order           ideal    best torch
                                      =True    =False
    made up  s               1.05      2.00      1.26   1.00     1.05  1.20x faster
    made up  batches/s      1,500     1,000      10.0      -        -  1.50x faster

    pairs           fifobatch  torch  torch  ideal  ours to       ours to
                                  by    zip           ideal    best torch
                                hand
    step   ideal's       1.04   1.25   1.10   1.00     1.04  1.06x faster

    start and memory     fifobatch  torch  torch  ideal  ours to       ours to
                                     fork  spawn           ideal    best torch
    first batch       s       2.00   0.10   16.0   1.60     1.25  20.0x slower
      import torch    s          -      -      -   2.00        -

    other libraries             fifobatch  joblib
    made up          batches/s      1,500   3,000"""


def test_the_table():
    rates = figure("batches/s", [1500.0], [1000.0, 1000.0, 1000.0, 10.0])
    rates.values["joblib"] = [3000.0]
    starts = {"fifobatch": [2.0], "torch fork": [0.1], "torch spawn": [16.0], "ideal": [1.6]}
    figures = [
        figure("s", [1.05], [2.0, 2.0, 2.0, 1.26], ideal=1.0),
        rates,
        Figure("first batch", "s", starts),
        Figure("  import torch", "s", {"ideal": [2.0]}),
        Figure("step", "ideal's", dict(zip(["fifobatch", *TWO_LOADERS, "ideal"], [[1.04], [1.25], [1.1], [1.0]]))),
    ]
    assert format_table(figures) == TABLE


def test_the_table_fits_a_page():
    values = {"fifobatch": [1500.0], "torch in_order=True": [900.0], "torch in_order=False": [8.0], "ideal": [99.9]}
    epochs = [epoch for workload in WARM.values() for epoch in workload(True)]
    measured = [each for epoch in epochs for each in epoch.measured("fifobatch", 1.0, epoch.schedule or [1.0])]
    figures = [Figure(each.figure, each.unit, values) for each in measured]
    assert max(map(len, format_table(figures).splitlines())) <= 100


def test_every_workload_says_what_it_asks_how_and_why(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) < 80
    for name, workload in {**WARM, **PAIRED, **FRESH}.items():
        first, empty, *more = workload.__doc__.splitlines()
        assert first.endswith("?") and not empty and len(more) > 1
        assert f"  {name:10}{first}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "foo"], "argument --only: invalid choice: 'foo' (choose from "),
        (["--dataset", "fifobatch_nowhere:make"], "argument --dataset: cannot get 'fifobatch_nowhere:make'"),
        (["--dataset", "os:getpid"], "argument --dataset: 'os:getpid' is no map-style dataset"),
        (["--dataset", "os:environ", "--collate-fn", "os:x"], "argument --collate-fn: cannot get 'os:x'"),
        (["--dataset", "os:environ", "--peers"], "leave out --only and --peers, or --dataset"),
        (["--dataset", "os:environ", "--only", "tiny"], "leave out --only and --peers, or --dataset"),
        (["--batch-size", "8"], "--batch-size needs --dataset MODULE:FACTORY"),
        (["--shuffle"], "--shuffle needs --dataset MODULE:FACTORY"),
        (["--json", "/nowhere/at/all"], "argument --json: cannot write '/nowhere/at/all': FileNotFoundError"),
        (["--json", "/"], "argument --json: cannot write '/': IsADirectoryError"),
    ],
)
def test_errors_of_use_are_one_line_before_anything_starts(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("fifobatch.bench._ask", None)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("python -m fifobatch bench: error: ")
    assert message in err


def test_what_cannot_be_sent_is_an_error_of_use(capsys):
    assert main(["bench", "--dataset", "tasks:Locked", "--quick"]) == 2
    out, err = capsys.readouterr()
    progress, error = err.splitlines()
    assert (out, progress) == ("", "--dataset tasks:Locked ...")
    assert error.startswith(
        "python -m fifobatch bench: error: --dataset tasks:Locked, fifobatch: PlanError: cannot send Locked to the "
        "worker processes: dataset.lock is a "
    )


def test_a_workload_that_fails_is_named_in_one_line(capsys, monkeypatch):
    reply = json.dumps({"error": "ValueError: no In fifobatch worker 7, loading dataset[5]", "status": 1})
    monkeypatch.setattr("fifobatch.bench.CHILD", f"print({reply!r})")
    assert main(["bench", "--only", "tiny"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "tiny ...",
        "python -m fifobatch bench: error: tiny: ValueError: no In fifobatch worker 7, loading dataset[5]",
    ]


def test_a_child_that_dies_is_named_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("fifobatch.bench.CHILD", "import os; os.kill(os.getpid(), 9)")
    assert main(["bench", "--only", "memory"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "memory ...",
        "python -m fifobatch bench: error: memory, fifobatch: the process ended with status -9",
    ]


def test_a_bench_that_fails_leaves_no_file_and_the_file_that_was_there(tmp_path, monkeypatch):
    (tmp_path / "before.json").write_text("before")
    monkeypatch.setattr("fifobatch.bench.CHILD", "raise SystemExit(1)")
    for name in ("new.json", "before.json"):
        assert main(["bench", "--only", "tiny", "--json", name]) == 1
    assert not (tmp_path / "new.json").exists()
    assert (tmp_path / "before.json").read_text() == "before"


def test_what_is_skipped_is_said(capsys, monkeypatch):
    monkeypatch.setattr("fifobatch.bench.installed_peers", lambda: ["torchdata"])
    asked = []
    monkeypatch.setattr("fifobatch.bench._ask", lambda request: asked.append(request) or [])
    assert main(["bench", "--peers"]) == 0
    assert "not installed, so not measured: joblib, spdl" in capsys.readouterr().out
    contenders = {request.workload: {*request.contenders} for request in asked}
    assert list(contenders) == WORKLOADS
    assert {name for name, found in contenders.items() if "torchdata" in found} == {*WARM}


def test_what_is_written_is_what_is_shown(capfd, tmp_path):
    assert main(["bench", "--only", "tiny", "--quick", "--json", "figures.json"]) == 0
    out, err = capfd.readouterr()
    assert err == "tiny ...\n"
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["facts"].keys() == {"fifobatch", "torch", "python", "cores"}
    assert written["quick"] is True
    tiny, stream = written["figures"]
    assert stream["rounds"].keys() == tiny["rounds"].keys()
    contenders = ["fifobatch", "torch in_order=True", "torch in_order=False"]
    assert list(tiny["rounds"]) == list(tiny["medians"]) == contenders
    for contender, values in tiny["rounds"].items():
        assert len(values) == 2
        assert tiny["medians"][contender] == pytest.approx(sum(values) / 2)
    (row,) = re.findall(r"^    tiny: 16 integers +batches/s +(.*)$", out, re.MULTILINE)
    shown = row.split()
    assert [float(cell.replace(",", "")) for cell in shown[:3]] == pytest.approx(
        list(tiny["medians"].values()), abs=0.5
    )
    assert shown[3:5] == ["-", "-"]
    assert ("faster" in row) == (tiny["to_torch"] > 1) or "equal" in row
    assert str(tmp_path) not in json.dumps(written)


def test_your_own_dataset_goes_through_the_same_table(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("fifobatch.bench.ORDERS", ["torch in_order=True"])  # one child less
    options = ["--batch-size", "5", "--num-workers", "2", "--collate-fn", "tasks:add", "--shuffle", "--quick"]
    assert main(["bench", "--dataset", "tasks:Squares", *options, "--json", "figures.json"]) == 0
    out, err = capfd.readouterr()
    assert err.splitlines()[0] == "--dataset tasks:Squares ..."  # and what the dataset prints
    assert "tasks:Squares: batch size 5, workers 2, shuffled" in out
    first, epoch, rate = json.loads((tmp_path / "figures.json").read_text())["figures"]
    for each in first, epoch, rate:
        assert list(each["medians"]) == ["fifobatch", "torch in_order=True"]
        assert f"    {each['name']:19}  {each['unit']:9}" in out
    for contender, seconds in epoch["medians"].items():
        assert rate["medians"][contender] == pytest.approx(3 / seconds)


def test_a_batch_may_be_larger_than_the_dataset_and_than_any_index(capfd, monkeypatch):
    monkeypatch.setattr("fifobatch.bench.ORDERS", [])
    arguments = ["bench", "--dataset", "tasks:Squares", "--batch-size", "9" * 30, "--num-workers", "1", "--quick"]
    assert main(arguments) == 0
    assert "epoch, warm workers" in capfd.readouterr().out


def test_recovery_kills_one_worker_after_another(capfd, tmp_path):
    assert main(["bench", "--only", "recovery", "--quick", "--json", "figures.json"]) == 0
    (row,) = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert (row["name"], list(row["rounds"]), row["to_torch"]) == ("recovery: next batch", ["fifobatch"], None)
    assert row["medians"]["fifobatch"] > 0
    assert capfd.readouterr().out.endswith("torch raises\n")


STUCK = """
from probes import Gate

class Stuck(list):
    def __getitem__(self, index):
        Gate({folder!r}).arrive()
        Gate({folder!r}).wait()

stuck = Stuck([1, 2])
"""


def test_an_interrupt_leaves_no_process(start_script, gate):
    arguments = ["bench", "--dataset", "stuck:stuck", "--num-workers", "2"]
    source = f"import sys\nfrom fifobatch.__main__ import main\nsys.exit(main({arguments}))"
    script = start_script(source, modules={"stuck": STUCK.format(folder=gate.folder)})
    gate.arrivals(2)
    script.interrupt()
    assert script.finish() == (130, "", "--dataset stuck:stuck ...\ninterrupted\n")


def test_an_interrupt_while_a_child_starts_ends_it_without_a_word():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        child = subprocess.Popen([sys.executable, "-c", CHILD, "{}"], stderr=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with child:
        child.send_signal(signal.SIGINT)  # its interpreter has hardly begun
        _, err = child.communicate()
    assert (child.returncode, err) == (130, b"")


@pytest.mark.parametrize("quick", [True, False])
def test_every_epoch_is_of_full_batches(quick):
    for workload in WARM.values():
        for epoch in workload(quick):
            assert len(epoch.dataset) % epoch.batch_size == 0, epoch.figure
            assert len(epoch.dataset) >= 4 * epoch.batch_size

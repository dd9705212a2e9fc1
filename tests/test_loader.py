"""`FifoLoader` on real worker processes. Samples are held back by gates, never by the clock."""

import copy
import gc
import os
import pickle
import random
import signal
import threading
import warnings
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import await_end
from probes import TIMEOUT, Calls, Gate, drain
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, get_worker_info

from fifobatch import (
    Batch,
    BatchExecutor,
    BatchPlan,
    ClosedError,
    FifobatchError,
    FifoLoader,
    PlanError,
    SampleError,
)
from fifobatch.pool import cpu_count
from fifobatch.testing import ManualExecutor

pytestmark = pytest.mark.filterwarnings("ignore:num_workers=.* is more than two a core")  # so that 2 cores are enough


def numbers(loader):
    return sorted(int(value) for batch in loader for value in batch)


def hold_back_first(index, gate):
    if index == 0:
        gate.wait()
    return index


# -- completion order and window --------------------------------------------------------------------------------------


def test_a_slow_batch_comes_last_and_holds_up_nobody(gate):
    batches = iter(FifoLoader(Calls(40, hold_back_first, gate), batch_size=4, num_workers=2, window=3))
    others = [next(batches).tolist() for _ in range(9)]
    assert [0, 1, 2, 3] not in others
    gate.open(1)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3]]


def log(index, path):
    with open(path, "a") as lines:
        lines.write(".")
    return index


@pytest.mark.parametrize("window", [1, 3])
def test_no_more_than_the_window_is_under_way_however_slow_the_consumer(tmp_path, window):
    path = tmp_path / "started"
    for yielded, _ in enumerate(FifoLoader(Calls(30, log, path), num_workers=6, window=window), start=1):
        assert path.stat().st_size <= yielded + window
    assert path.stat().st_size == 30


def test_a_window_of_one_is_one_at_a_time(gate):
    batches = iter(
        FifoLoader(Calls(6, lambda index: (gate.arrive(index), gate.wait(), index)[2]), num_workers=6, window=1)
    )
    for index in range(6):
        assert gate.arrivals(1) == [index]
        gate.open(1)
        assert next(batches).tolist() == [index]


def test_in_order_is_plan_order(gate):
    batches = iter(FifoLoader(Calls(12, hold_back_first, gate), num_workers=3, window=4, in_order=True))
    gate.open(1)
    assert [batch.item() for batch in batches] == list(range(12))


def test_max_skew_bounds_how_far_a_batch_may_overtake(gate):
    batches = iter(FifoLoader(Calls(12, hold_back_first, gate), num_workers=2, window=8, max_skew=2))
    assert {next(batches).item() for _ in range(2)} == {1, 2}
    gate.open(1)
    order = [1, 2, *(batch.item() for batch in batches)]
    assert order[2] == 0
    assert sorted(order) == list(range(12))


def test_nobody_but_the_consumer_keeps_a_batch():
    loader = FifoLoader(Calls(6, lambda index: torch.full((1000,), float(index))), batch_size=2, num_workers=2)
    gc.collect()
    gc.disable()  # the last reference has to do
    try:
        for batch in loader.batches():
            gone = threading.Event()
            _ = weakref.ref(batch.data, lambda _, gone=gone: gone.set())
            batch = None
            assert gone.wait(30)  # the pool's thread may still be about to let go of it
    finally:
        gc.enable()


def test_workers_start_only_as_there_is_work():
    seen = FifoLoader(Calls(2, lambda index: os.getpid()), num_workers=8, persistent_workers=True)
    numbers(seen)
    assert len(seen._own._engine.crew.workers._context.workers) <= 2
    seen.close()


# -- contents ---------------------------------------------------------------------------------------------------------


def draw(index):
    return torch.tensor([index, random.getrandbits(30), np.random.randint(1 << 30), int(torch.randint(1 << 30, ()))])


def drawn(**arguments):
    loader = FifoLoader(
        Calls(24, draw), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5), **arguments
    )
    return [{batch.number: (batch.indices, batch.data.tolist()) for batch in loader.batches()} for _ in range(2)]


def test_contents_do_not_depend_on_workers_nor_window():
    expected = drawn(num_workers=0)
    assert expected[0] != expected[1]
    for arguments in (
        {"num_workers": 1},
        {"num_workers": 3, "window": 2},
        {"num_workers": 16, "persistent_workers": True},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 16 workers are many here
            assert drawn(**arguments) == expected, arguments
    rows = [tuple(row[1:]) for epoch in expected for _, data in epoch.values() for row in data]
    assert len(set(rows)) == len(rows) == 48


def test_loading_in_process_leaves_the_random_state_as_it_was():
    def state():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    loader = FifoLoader(Calls(4, draw), num_workers=0, generator=torch.Generator())
    before = state()
    batches = iter(loader)
    next(batches)
    assert state() == before
    list(batches)
    assert state() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_seed_shuffles_as_torch_does(num_workers):
    def order(loader_class, **arguments):
        torch.manual_seed(3)
        batches = iter(loader_class(range(20), batch_size=4, shuffle=True, **arguments))
        torch.rand(7)  # what is drawn after iter() must not matter
        return [batch.tolist() for batch in batches]

    ours = order(FifoLoader, num_workers=num_workers, in_order=True)
    torch.manual_seed(3)
    theirs = [batch.tolist() for batch in DataLoader(range(20), batch_size=4, shuffle=True)]
    assert ours == theirs


def test_epochs_differ_and_set_epoch_enters_the_seeds():
    def epoch(number):
        loader = FifoLoader(Calls(4, draw), num_workers=2, generator=torch.Generator().manual_seed(1))
        loader.set_epoch(number)
        return sorted(batch.tolist() for batch in loader)

    assert epoch(0) == epoch(0) != epoch(1)


def test_set_epoch_reaches_samplers_and_dataset():
    class Told:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    class ToldSampler(Told):
        def __iter__(self):
            return iter([self.epoch])

        def __len__(self):
            return 1

    class ToldCalls(Told, Calls):
        pass

    dataset = ToldCalls(9, int)
    loader = FifoLoader(dataset, sampler=ToldSampler(), num_workers=1)
    loader.set_epoch(7)
    assert (numbers(loader), dataset.epoch) == ([7], 7)

    inner = ToldSampler()
    loader = FifoLoader(dataset, batch_sampler=BatchSampler(inner, 2, False), num_workers=0)
    loader.set_epoch(4)
    assert numbers(loader) == [4]


def test_torchs_arguments_mean_what_they_mean_there():
    assert numbers(FifoLoader(range(10), batch_size=3, drop_last=True, num_workers=2)) == list(range(9))
    assert numbers(FifoLoader(range(10), sampler=[3, 1], num_workers=2)) == [1, 3]
    single = FifoLoader(Calls(3, lambda index: np.full(2, index)), batch_size=None, num_workers=2)
    assert sorted(sample.tolist() for sample in single) == [[0, 0], [1, 1], [2, 2]]
    assert sorted(FifoLoader(range(4), batch_size=2, num_workers=1, collate_fn=tuple)) == [(0, 1), (2, 3)]

    bulk = Calls(10, lambda indices: torch.tensor(indices) * 10)
    loader = FifoLoader(
        bulk, batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 4, False), num_workers=2
    )
    assert numbers(loader) == list(range(0, 100, 10))


def test_none_is_a_batch_like_any_other():
    assert list(FifoLoader(range(4), batch_size=2, num_workers=1, collate_fn=lambda samples: None)) == [None, None]


class Whole(Calls):
    def __getitems__(self, indices):
        return [index + 100 for index in indices]


class Short(Calls):
    def __getitems__(self, indices):
        return [0]


class Overridden(Whole):
    def __getitem__(self, index):
        return -index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_getitems_is_used_where_the_class_has_it(num_workers):
    assert numbers(FifoLoader(Whole(4, int), batch_size=2, num_workers=num_workers)) == [100, 101, 102, 103]
    subset = Subset(Whole(4, int), [1, 3])
    assert numbers(FifoLoader(subset, batch_size=2, num_workers=num_workers)) == [101, 103]
    assert numbers(FifoLoader(Overridden(3, int), batch_size=3, num_workers=num_workers)) == [-2, -1, 0]
    with pytest.raises(ValueError, match=r"Short\.__getitems__ returned 1 samples for 2 indices"):
        list(FifoLoader(Short(4, int), batch_size=2, num_workers=num_workers))


class Reusing:
    """Yields one list again and again, then a set, then an iterator."""

    def __iter__(self):
        batch = [0, 0]
        for first in range(0, 8, 2):
            batch[:] = [first, first + 1]
            yield batch
        yield {8, 9}
        yield iter((10, 11))


@pytest.mark.parametrize("arguments", [{"num_workers": 0}, {"num_workers": 2}, {"executor": ThreadPoolExecutor(1)}])
def test_indices_are_kept_as_the_sampler_meant_them(arguments):
    loader = FifoLoader(range(12), batch_sampler=Reusing(), **arguments)
    for batch in loader.batches():
        assert batch.data.tolist() == list(batch.indices)
        assert batch.data.tolist() == [2 * batch.number, 2 * batch.number + 1]


def test_batches_know_their_indices():
    loader = FifoLoader(range(7), batch_size=3, num_workers=2)
    batches = sorted(loader.batches(), key=lambda batch: batch.number)
    assert [(batch.number, batch.indices, batch.data.tolist()) for batch in batches] == [
        (0, [0, 1, 2], [0, 1, 2]),
        (1, [3, 4, 5], [3, 4, 5]),
        (2, [6], [6]),
    ]
    assert all(isinstance(batch, Batch) for batch in batches)


def test_classes_come_back_as_the_same_classes():
    class Local(dict):
        tag = None

    def collate(samples):
        batch = Local(samples=samples)
        batch.tag = "mine"
        return batch

    method = Local.__dict__.get("__module__")
    [batch] = FifoLoader(range(2), batch_size=2, num_workers=1, collate_fn=collate)
    assert type(batch) is Local
    assert (batch.tag, dict(batch)) == ("mine", {"samples": [0, 1]})
    assert Local.__dict__.get("__module__") is method  # nor was our class redefined by what came back


# -- the dataset travels ----------------------------------------------------------------------------------------------


class Counted(Calls):
    """Counts how often it is pickled here, and unpickled anywhere."""

    pickled = 0

    def __getstate__(self):
        Counted.pickled += 1
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open(self.args[0], "a") as lines:
            lines.write(f"{os.getpid()}\n")


def first_of(index, path):
    return index


def test_a_thousand_chunks_ship_the_dataset_once(tmp_path):
    Counted.pickled = 0
    dataset = Counted(1000, first_of, str(tmp_path / "log"))
    assert numbers(FifoLoader(dataset, num_workers=4)) == list(range(1000))
    assert Counted.pickled == 1
    pids = (tmp_path / "log").read_text().split()
    assert len(pids) == len(set(pids)) <= 4


def test_persistent_workers_get_a_changed_dataset_and_keep_an_unchanged_one(tmp_path):
    path = tmp_path / "log"
    dataset = Counted(6, first_of, str(path))
    loader = FifoLoader(dataset, num_workers=1, persistent_workers=True)
    for _ in range(3):
        assert numbers(loader) == list(range(6))
    assert len(path.read_text().split()) == 1
    dataset.length = 8
    assert numbers(loader) == list(range(8))
    assert len(path.read_text().split()) == 2
    assert len(set(path.read_text().split())) == 1  # it is the same worker
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_changed_dataset_is_seen_at_the_next_iter(persistent):
    data = np.arange(100_000)
    dataset = Calls(3, lambda index: int(data[index]))
    with FifoLoader(dataset, num_workers=2, persistent_workers=persistent) as loader:
        assert numbers(loader) == [0, 1, 2]
        data[1] = 70
        assert numbers(loader) == [0, 2, 70]


class Recursive:
    def __init__(self):
        self.parts = {"handles": [1, threading.Lock()]}

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


def test_what_cannot_be_pickled_is_named_and_nothing_starts(tmp_path):
    children = psutil.Process().children(recursive=True)
    loader = FifoLoader(Recursive(), num_workers=2)
    with pytest.raises(PlanError, match=r"dataset\.parts\['handles'\]\[1\] is a _thread\.lock .* num_workers=0"):
        iter(loader)
    with open(tmp_path / "text", "w+") as file:
        with pytest.raises(PlanError, match=r"collate_fn<closure file> is a _io\.TextIOWrapper"):
            iter(FifoLoader(range(4), num_workers=2, collate_fn=lambda samples: file))
    assert psutil.Process().children(recursive=True) == children


def test_shared_memory_in_a_dataset_is_warned_of():
    shared = torch.arange(1000).share_memory_()
    with pytest.warns(UserWarning, match="share_memory_"):
        assert numbers(FifoLoader(Calls(2, lambda index: shared[index]), num_workers=1)) == [0, 1]


# -- worker info and worker_init_fn -----------------------------------------------------------------------------------


def info(index):
    worker = get_worker_info()
    return worker.id, worker.num_workers, worker.seed, worker.dataset.length, torch.get_num_threads()


def test_worker_info_answers_as_in_torch():
    loader = FifoLoader(Calls(30, info), num_workers=3, collate_fn=list)
    rows = {sample for [sample] in loader}
    assert {row[0] for row in rows} <= {0, 1, 2}
    assert {(row[1], row[3], row[4]) for row in rows} == {(3, 30, 1)}
    assert len({row[2] - row[0] for row in rows}) == 1  # base seed plus id
    assert get_worker_info() is None
    assert [
        worker for [worker] in FifoLoader(range(1), num_workers=0, collate_fn=lambda samples: [get_worker_info()])
    ] == [None]


def test_worker_init_fn_runs_once_a_worker_on_its_own_dataset():
    def prepare(worker_id):
        worker = get_worker_info()
        assert worker.id == worker_id
        assert torch.initial_seed() == worker.seed % 2**64
        worker.dataset.calls = getattr(worker.dataset, "calls", 0) + 1
        torch.set_num_threads(3)

    def look(index):
        return get_worker_info().dataset.calls, torch.get_num_threads()

    loader = FifoLoader(
        Calls(20, look), num_workers=2, worker_init_fn=prepare, collate_fn=list, persistent_workers=True
    )
    with loader:
        assert {sample for _ in range(2) for [sample] in loader} == {(1, 3)}


def test_what_worker_init_fn_raises_reaches_the_user():
    def fail(worker_id):
        raise LookupError(f"no GPU for worker {worker_id}")

    with pytest.raises(LookupError, match="no GPU for worker 0") as caught:
        list(FifoLoader(range(1), num_workers=1, worker_init_fn=fail))
    assert "worker_init_fn" in caught.value.__notes__[0]


# -- errors -----------------------------------------------------------------------------------------------------------


class Mine(Exception):
    def __init__(self, code, *, detail):
        super().__init__(code)
        self.detail = detail


def fail_at_five(index, make):
    if index == 5:
        raise make()
    return index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_the_users_own_and_names_the_sample(num_workers):
    loader = FifoLoader(Calls(8, fail_at_five, lambda: Mine(3, detail="why")), batch_size=2, num_workers=num_workers)
    batches, got, errors = iter(loader), [], []
    while True:
        try:
            got += next(batches).tolist()
        except StopIteration:
            break
        except Mine as error:
            errors.append(error)
    assert sorted(got) == [0, 1, 2, 3, 6, 7]  # the others still come
    [error] = errors
    assert (error.args, error.detail) == ((3,), "why")
    assert "loading dataset[5], chunk 2 (indices [4, 5])" in error.__notes__[0]
    if num_workers:
        assert "in fail_at_five" in error.__notes__[0]


def test_an_index_that_cannot_be_pickled_is_its_chunks_error_only():
    odd = threading.Lock()
    loader = FifoLoader(range(6), batch_sampler=[[0, 1], [2, odd], [4, 5]], num_workers=1)
    batches, errors = drain(iter(loader))
    assert sorted(batch.tolist() for batch in batches) == [[0, 1], [4, 5]]
    assert [type(error) for error in errors] == [TypeError]
    assert f"pickling index {odd!r}, chunk 1 (indices [2, {odd!r}])" in errors[0].__notes__[0]
    loader.on_error = "skip"
    with pytest.warns(UserWarning, match="left out of this epoch: 1 sample"):
        assert sorted(batch.tolist() for batch in loader) == [[0, 1], [2], [4, 5]]
    assert [failure.index for failure in loader.failures] == [odd]
    with BatchExecutor(1) as executor:
        plan = BatchPlan(range(6), sampler=[odd])
        futures = [executor.submit(plan, chunk) for chunk in plan]
        assert [type(future.exception()) for future in futures] == [TypeError]
        assert executor.statistics().failed == executor.statistics().submitted == 1


ERRORS = [IndexError(5), KeyError("name"), TimeoutError("disk"), CancelledError("mine"), OSError(5, "I/O", "file")]


@pytest.mark.parametrize("error", ERRORS)
def test_common_errors_arrive_as_they_are(error):
    with pytest.raises(type(error)) as caught:
        list(FifoLoader(Calls(8, fail_at_five, lambda: error), num_workers=1))
    assert caught.value.args == error.args


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_nothing_ends_the_epoch_or_the_script_without_a_word(kind):
    with pytest.raises(SampleError, match=kind.__name__):
        list(FifoLoader(Calls(8, fail_at_five, lambda: kind(0)), num_workers=1))


class Poison:
    def __reduce__(self):
        return int, ("not a number",)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


@pytest.mark.parametrize(("thing", "error"), [(Poison, "invalid literal"), (Unpicklable, "not this one")])
def test_a_batch_that_does_not_pickle_or_unpickle_is_its_own_error(thing, error):
    loader = FifoLoader(Calls(3, lambda index: thing() if index == 1 else index), num_workers=1, collate_fn=list)
    batches, got, errors = iter(loader), [], []
    for _ in range(3):
        try:
            got += next(batches)
        except (ValueError, TypeError) as caught:
            errors.append(str(caught))
    assert sorted(got) == [0, 2]
    assert len(errors) == 1
    assert error in errors[0]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0)])
def test_a_worker_that_dies_once_is_no_error_and_the_next_epoch_works(tmp_path, end, persistent):
    def die_once(index):
        if index == 5 and not os.path.exists(tmp_path / "died"):
            open(tmp_path / "died", "w").close()
            end()
        return index

    with FifoLoader(Calls(8, die_once), num_workers=2, persistent_workers=persistent) as loader:
        assert numbers(loader) == list(range(8))
        assert os.path.exists(tmp_path / "died")
        assert loader.statistics().reloads >= 1
        assert loader.statistics().delivered == 8
        assert numbers(loader) == list(range(8))
        assert loader.statistics().reloads == 0


def test_a_worker_that_dies_idle_is_not_missed():
    with FifoLoader(Calls(4, lambda index: os.getpid()), num_workers=1, persistent_workers=True) as loader:
        [pid] = set(numbers(loader))
        os.kill(pid, signal.SIGKILL)
        await_end([pid])
        assert pid not in numbers(loader)


# -- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_two_iterators_of_one_loader_are_independent(persistent):
    with FifoLoader(range(12), batch_size=2, num_workers=2, persistent_workers=persistent) as loader:
        first, second = iter(loader), iter(loader)
        got = [next(first), next(second), *first], [*second]
        assert numbers(got[0][:1] + got[0][2:]) == list(range(12))
        assert numbers(got[0][1:2] + got[1]) == list(range(12))


def test_one_executor_serves_several_loaders():
    def calls(offset):
        return Calls(10, lambda index: index + offset)

    with BatchExecutor(2) as executor:
        loaders = [FifoLoader(calls(offset), batch_size=3, executor=executor) for offset in (0, 100, 200)]
        for _ in range(2):
            together = [numbers(batch for batch in loader) for loader in loaders]
            assert together == [[offset + index for index in range(10)] for offset in (0, 100, 200)]
        interleaved = zip(*loaders)
        assert sum(len(batch) for row in interleaved for batch in row) == 30
        workers = executor._engine.crew.workers._context.workers
        assert len(workers) <= 2


def test_loaders_in_threads():
    results = {}

    def work(offset):
        results[offset] = numbers(FifoLoader(Calls(10, lambda index: index + offset), batch_size=2, num_workers=1))

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {offset: [offset + index for index in range(10)] for offset in (0, 100, 200)}


# -- the end ----------------------------------------------------------------------------------------------------------


def worker_pids(loader):
    return [worker.pid for worker in loader._own._engine.crew.workers._context.workers.values()]


@pytest.mark.parametrize("end", ["close", "with", "del"])
def test_persistent_workers_end_with_their_loader(end):
    loader = FifoLoader(range(4), num_workers=2, persistent_workers=True)
    numbers(loader)
    pids = worker_pids(loader)
    assert pids
    if end == "close":
        loader.close()
    elif end == "with":
        with loader:
            pass
    else:
        del loader
    await_end(pids)


def test_break_stops_the_work_and_the_loader_goes_on(gate):
    dataset = Calls(100, lambda index: (gate.arrive(index), index)[1])
    with FifoLoader(dataset, num_workers=2, window=8, persistent_workers=True) as loader:
        for _ in loader:
            break
        assert numbers(loader) == list(range(100))


def test_a_closed_loader_starts_anew_and_its_old_iterator_says_so():
    loader = FifoLoader(range(8), num_workers=2)
    old = iter(loader)
    next(old)
    loader.close()
    loader.close()
    with pytest.raises(ClosedError, match="closed"):
        next(old)
    assert numbers(loader) == list(range(8))


def test_an_exhausted_iterator_stays_exhausted():
    batches = iter(FifoLoader(range(2), num_workers=1))
    list(batches)
    assert list(batches) == []


def test_a_copy_has_workers_of_its_own():
    with FifoLoader(range(4), num_workers=1, persistent_workers=True) as loader:
        numbers(loader)
        for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            assert numbers(other) == list(range(4))
            assert worker_pids(other) != worker_pids(loader)
            other.close()


def test_abandoned_iterators_leave_nothing():
    loader = FifoLoader(range(100), num_workers=2)
    for _ in range(5):
        next(iter(loader))
    gc.collect()
    descriptors = psutil.Process().num_fds()
    for _ in range(10):
        next(iter(loader))
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "fifobatch-supervisor":
            thread.join()
    assert psutil.Process().num_fds() <= descriptors + 3


# -- arguments --------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


BAD = [
    ({"window": 0}, ValueError, r"window=0 is below 1"),
    ({"window": 1.5}, TypeError, r"window=1\.5 is a float"),
    ({"max_skew": -1}, ValueError, r"max_skew=-1 is below 0"),
    ({"max_skew": 2, "in_order": True}, ValueError, r"in_order=True and max_skew=2"),
    ({"num_workers": -1}, ValueError, r"num_workers"),
    ({"num_workers": "2"}, TypeError, r"num_workers='2'"),
    ({"num_workers": 1.0}, TypeError, r"num_workers=1\.0"),
    ({"num_workers": 0, "prefetch_factor": 2}, ValueError, r"prefetch_factor"),
    ({"num_workers": 0, "persistent_workers": True}, ValueError, r"persistent_workers"),
    ({"num_workers": 0, "timeout": 3}, ValueError, r"timeout=3 needs worker processes"),
    ({"timeout": -1}, ValueError, r"timeout"),
    ({"timeout": float("nan")}, ValueError, r"timeout=nan"),
    ({"timeout": float("inf")}, ValueError, r"timeout=inf"),
    ({"multiprocessing_context": "fork"}, PlanError, r"multiprocessing_context='fork'"),
    ({"executor": 4}, TypeError, r"executor=4"),
    ({"progress": "yes"}, TypeError, r"progress='yes'"),
    ({"progress": {"colour": "red", "nonsense": 1}}, TypeError, r"nonsense"),
    ({"batch_size": 0}, ValueError, r"batch_size"),
    ({"shuffle": True, "sampler": [1]}, ValueError, r"sampler option is mutually exclusive with shuffle"),
    ({"batch_sampler": [[1]], "batch_size": 2}, ValueError, r"batch_sampler option is mutually exclusive"),
    ({"collate_fn": 3}, TypeError, r"collate_fn=3"),
    ({"worker_init_fn": 3}, TypeError, r"worker_init_fn=3"),
]


@pytest.mark.parametrize(("arguments", "error", "says"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_arguments_are_refused_at_construction(arguments, error, says):
    children = psutil.Process().children(recursive=True)
    with pytest.raises(error, match=says):
        FifoLoader(range(4), **arguments)
    assert psutil.Process().children(recursive=True) == children


def test_it_is_a_torch_loader_with_torchs_attributes():
    arguments = {"batch_size": 3, "num_workers": 2, "drop_last": True, "prefetch_factor": 3, "in_order": False}
    ours, theirs = FifoLoader(range(8), **arguments), DataLoader(range(8), **arguments)
    assert isinstance(ours, DataLoader)
    for name, value in vars(theirs).items():
        if not name.startswith("_") and name not in ("sampler", "batch_sampler", "collate_fn"):
            assert getattr(ours, name) == value, name
    assert len(ours) == len(theirs) == 2
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        ours.batch_size = 4


def test_an_attribute_that_may_be_set_takes_effect():
    loader = FifoLoader(range(4), num_workers=2)
    loader.num_workers = 0
    assert [batch.item() for batch in loader] == [0, 1, 2, 3]
    loader.window = 0
    loader.num_workers = 1
    with pytest.raises(ValueError, match="window=0"):
        iter(loader)


def test_the_default_is_a_worker_for_each_core_that_this_process_may_use():
    assert FifoLoader(range(4)).num_workers == cpu_count() <= len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(5) as threads:
        assert FifoLoader(range(4), executor=threads).num_workers == 5


def test_many_workers_are_warned_of_at_the_users_line():
    with pytest.warns(UserWarning, match="num_workers=1000 is more than two a core") as caught:
        FifoLoader(range(4), num_workers=1000)
    assert caught[0].filename == __file__


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_without_an_accelerator_warns_once():
    loader = FifoLoader(range(4), num_workers=1, pin_memory=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert numbers(loader) == numbers(loader) == [0, 1, 2, 3]
    assert len(caught) == 1


def test_every_error_is_one_of_ours_too():
    assert issubclass(PlanError, FifobatchError)


def test_a_gate_reaches_the_workers(gate):
    """The tests above lean on it."""
    assert isinstance(pickle.loads(pickle.dumps(gate)), Gate)


class Pinnable:
    """A batch with a pin_memory of its own, which torch calls."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.thread: str | None = None

    def pin_memory(self) -> "Pinnable":
        if 3 in self.numbers:
            raise ValueError("cannot pin a three")
        pinned = Pinnable(self.numbers)
        pinned.thread = threading.current_thread().name
        return pinned


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there is an accelerator, the third of its kind; return what it is told."""
    told: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", told.append)
    return told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_cannot_be_pinned_is_that_batchs_error(num_workers: int, accelerated: list[int]):
    loader = FifoLoader(range(8), batch_size=2, collate_fn=Pinnable, num_workers=num_workers, pin_memory=True)
    batches = iter(loader)
    pinned, errors = [], []
    for _ in range(4):
        try:
            pinned.append(next(batches))
        except ValueError as error:
            errors.append(str(error))
    assert list(batches) == []
    assert errors == ["cannot pin a three"]
    assert sorted(batch.numbers for batch in pinned) == [[0, 1], [4, 5], [6, 7]]
    for batch in pinned:
        assert (batch.thread == threading.current_thread().name) == (num_workers == 0)
    assert accelerated == [2] * 4  # the pinning thread uses the device of the thread that made the iterator
    assert loader.statistics().failed == 1


def test_the_thread_that_pins_ends_with_its_iterator(accelerated: list[int]):
    loader = FifoLoader(range(8), batch_size=2, collate_fn=Pinnable, num_workers=1, pin_memory=True)
    batches = iter(loader)
    next(batches)
    (thread,) = (thread for thread in threading.enumerate() if thread.name.startswith("fifobatch-prepare"))
    del batches
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_an_error_of_pinning_does_not_keep_the_thread(accelerated: list[int]):
    gc.disable()
    try:
        loader = FifoLoader(range(8), batch_size=4, collate_fn=Pinnable, num_workers=1, pin_memory=True, in_order=True)
        batches = iter(loader)
        with pytest.raises(ValueError, match="cannot pin a three"):
            next(batches)
        (thread,) = (thread for thread in threading.enumerate() if thread.name.startswith("fifobatch-prepare"))
        del batches
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_max_bytes_bounds_what_is_under_way():
    manual = ManualExecutor()
    samples = [torch.zeros(100 * (1 + (index == 5)), dtype=torch.uint8) for index in range(20)]
    loader = FifoLoader(samples, batch_size=1, executor=manual, num_workers=2, window=5, max_bytes=450)
    batches = iter(loader)
    assert len(manual.calls) == 1, "until the first has come, nobody knows how large they are"
    manual.complete(0)
    next(batches)
    assert manual.pending == [1, 2, 3, 4]
    for number in (1, 2, 3):
        manual.complete(number)
        next(batches)
    assert manual.pending == [4, 5, 6, 7]
    manual.complete(5)  # of 200 bytes: the others may be, too
    next(batches)
    assert manual.pending == [4, 6, 7]
    manual.complete(4)
    next(batches)
    assert manual.pending == [6, 7]
    manual.complete(6)
    next(batches)
    assert manual.pending == [7, 8]
    assert loader.statistics().peak_bytes == 200


def test_max_bytes_smaller_than_any_batch_loads_them_one_by_one():
    with FifoLoader(range(40), batch_size=10, num_workers=2, max_bytes=1) as loader:
        assert sorted(batch.sum().item() for batch in loader) == [45, 145, 245, 345]
        assert loader.statistics().peak_under_way == 1


@pytest.mark.parametrize("max_bytes", ["lots", 0, -1, 1.5])
def test_max_bytes_that_is_no_size_is_refused_at_once(max_bytes: Any):
    with pytest.raises((TypeError, ValueError), match="max_bytes="):
        FifoLoader(range(4), max_bytes=max_bytes)

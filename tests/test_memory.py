"""The memory of batches and datasets, on real workers: where it lies, who sees it, and when it goes back."""

import collections
import ctypes
import errno
import gc
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import Finished
from probes import Calls, Gate, drain
from torch.utils.data import TensorDataset

from fifobatch import BatchExecutor, BatchPlan, FifoLoader, WorkerDiedError
from fifobatch.arena import ALIGNMENT, MAPPED, Arena

pytestmark = pytest.mark.filterwarnings("ignore:num_workers=.* is more than two a core")  # so that 2 cores are enough


BOARD = 6 * mmap.PAGESIZE  # the pages of it that two workers touch
SMALL = 200_000  # for the board, what was shipped, and what is not a whole page


def arena_of(owner: Any) -> Arena:
    """Return the arena of an executor, or of a loader with persistent workers."""
    executor = owner._own if isinstance(owner, FifoLoader) else owner
    return executor._engine.arena


def used(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def free(arena: Arena) -> list[int]:
    return sorted([*arena._free, *arena._bare])


def taken(arena: Arena) -> int:
    """Return how many slots were ever made; makes one more."""
    return next(arena._numbers) - 1


def image(index: int, size: int = 100_000) -> torch.Tensor:
    return torch.full((size,), index, dtype=torch.int64)


def labelled(index: int) -> dict[str, Any]:
    return {"x": torch.full((3, 20, 30), float(index)), "y": np.full(300, index), "index": index}


def loader(dataset: Any, **arguments: Any) -> FifoLoader[Any]:
    return FifoLoader(dataset, **{"num_workers": 2, "persistent_workers": True, **arguments})


# -- batches -----------------------------------------------------------------------------------------------------------


def test_batches_lie_in_the_arena_aligned() -> None:
    with loader(Calls(40, labelled), batch_size=4) as batches:
        for batch in batches:
            mapping = arena_of(batches)._mapping
            assert mapping is not None
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            for tensor in (batch["x"], batch["y"]):
                assert start <= tensor.data_ptr() < start + MAPPED
                assert tensor.data_ptr() % ALIGNMENT == 0
                assert tensor.flatten(1).double().mean(1).tolist() == batch["index"].tolist()
        del batch, tensor, mapping


def test_kept_batches_keep_their_contents_while_hundreds_more_are_loaded() -> None:
    kept, changed, views = [], [], []
    with loader(Calls(1200, image, 5000), batch_size=4) as batches:
        for number, batch in enumerate(batches.batches()):
            indices, data = batch.indices, batch.data
            if number % 10 == 0:
                kept.append((indices, data))
            elif number % 10 == 1:
                changed.append(data.neg_().sub_(1))
            elif number % 10 == 2:
                views.append((indices[2], data.view(-1)[12_000:12_010], data[2].numpy()[:100:7]))
            else:
                assert data[:, 0].tolist() == indices
                data.fill_(-77)  # the slot's next batch does not show it
        del batch, data
        assert len(kept) == len(changed) == len(views) == 30
        for indices, data in kept:
            assert torch.equal(data, torch.tensor(indices)[:, None].expand(4, 5000))
        for data in changed:
            assert torch.equal(data, data[:, :1].expand(4, 5000))
            assert bool((data < 0).all())
        for index, tensor, array in views:
            assert tensor.tolist() == [index] * 10
            assert array.tolist() == [index] * 15


def test_kept_batches_stay_readable_when_the_loader_is_closed_and_gone() -> None:
    batches = loader(Calls(80, image), batch_size=4)
    iterator = batches.batches()
    kept = [next(iterator) for _ in range(8)]
    arena = arena_of(batches)
    batches.close()
    del batches, iterator
    gc.collect()
    for batch in kept:
        assert torch.equal(batch.data, torch.tensor(batch.indices)[:, None].expand(4, 100_000))
        batch.data.add_(1)
    sizes = []
    while kept:
        kept.pop()
        del batch
        sizes.append(used(arena))
        batch = None
    assert sizes == sorted(sizes, reverse=True)


def test_memory_is_bounded_by_the_window() -> None:
    window, size = 3, 4 * 800_000
    with loader(Calls(200, image), batch_size=4, window=window) as batches:
        for batch in batches:
            assert used(arena_of(batches)) <= (window + 2) * size + SMALL
            batch.add_(1)
        del batch
        assert size <= used(arena_of(batches)) <= window * size + SMALL  # ready for the next epoch


def test_memory_of_batches_that_were_kept_goes_back_when_they_are_let_go() -> None:
    window, size = 3, 4 * 800_000
    with loader(Calls(200, image), batch_size=4, window=window) as batches:
        kept = []
        for number, batch in enumerate(batches):
            if 10 <= number < 30:
                kept.append(batch)
            if number == 29:
                assert used(arena_of(batches)) >= 20 * size
                kept.clear()
            if number >= 30:  # under way, free, in our hands
                assert used(arena_of(batches)) <= (2 * window + 2) * size + SMALL
        del batch
        assert used(arena_of(batches)) <= (window + 2) * size + SMALL


def test_close_gives_the_memory_back_though_somebody_looks_at_the_arena() -> None:
    with BatchExecutor(2) as executor:
        assert len(list(executor.as_completed(BatchPlan(Calls(20, image), batch_size=2)))) == 10
        arena = arena_of(executor)
    assert used(arena) <= BOARD


def test_what_was_shipped_goes_back_when_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with BatchExecutor(2) as executor:
        arena = arena_of(executor)
        for epoch in range(4):  # each time another dataset and other surroundings
            monkeypatch.setenv("FIFOBATCH_TEST_EPOCH", f"{epoch}" * 3000)
            plan = BatchPlan(TensorDataset(torch.full((1001, 7), float(epoch))), batch_size=500)
            assert sum(float(x.sum()) for [x] in executor.as_completed(plan)) == 7007 * epoch
            del plan
    gc.collect()
    assert used(arena) <= BOARD


class Remembering:
    """Keeps what it was sent in a global of this process, and tells what became of what earlier ones have kept."""

    kept: list[torch.Tensor] = []

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((300_000,), float(value))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        if not any(each is self.tensor for each in self.kept):
            self.kept.append(self.tensor)
        return [float(each.mean()) for each in self.kept]


def test_what_lives_on_of_a_dataset_in_a_worker_keeps_its_contents() -> None:
    with BatchExecutor(1) as executor:
        arena = arena_of(executor)
        for epoch in range(1, 5):
            loader = FifoLoader(Remembering(epoch), executor=executor, collate_fn=list, batch_size=1)
            for [means] in loader:
                assert means == [float(each) for each in range(1, epoch + 1)]
            del loader
        gc.collect()
        assert used(arena) >= 4 * 1_200_000
    gc.collect()
    assert used(arena) <= BOARD


def test_what_no_worker_has_mapped_any_more_goes_back_while_they_live_on() -> None:
    with BatchExecutor(1) as executor:
        arena = arena_of(executor)
        for epoch in range(6):
            plan = BatchPlan(TensorDataset(torch.full((1000, 1000), float(epoch))), batch_size=500)
            assert sum(float(x.sum()) for [x] in executor.as_completed(plan)) == 1_000_000 * epoch
            del plan
            gc.collect()
            assert used(arena) <= 2 * 4_000_000 + 4 * 2_000_000 + SMALL  # this one's and the last one's, and slots


def stacked_arrays(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.stack([np.full(1000, sample) for sample in samples]), "small": np.array(samples), "which": samples}


def test_arrays_of_a_custom_collate_fn_are_writable_and_the_batchs_own() -> None:
    with loader(range(200), batch_size=4, collate_fn=stacked_arrays) as batches:
        kept = []
        for batch in batches:
            assert batch["x"][:, 0].tolist() == batch["small"].tolist() == batch["which"]
            batch["x"] += 1000
            batch["small"] *= 2
            kept.append(batch)
        for batch in kept:
            assert (batch["x"] == np.array(batch["which"])[:, None] + 1000).all()
            assert batch["small"].tolist() == [2 * value for value in batch["which"]]


def very_many(index: int) -> list[torch.Tensor]:
    return [torch.full((100,), index * 1000 + number) for number in range(300)]


def test_batches_of_very_many_tensors_and_ones_without_any_arrive() -> None:
    with loader(Calls(12, very_many), batch_size=2) as batches:
        for batch in batches.batches():
            assert len(batch.data) == 300
            for number, tensor in enumerate(batch.data):
                assert tensor[:, 0].tolist() == [index * 1000 + number for index in batch.indices]
    with loader(["a word", "another"], batch_size=1) as words:
        assert sorted(words) == [["a word"], ["another"]]


# -- datasets ----------------------------------------------------------------------------------------------------------


class InMemory:
    """A tensor of which the first samples wait until each worker has one of them; samples say who read them."""

    def __init__(self, tensor: torch.Tensor, gate: Gate) -> None:
        self.tensor = tensor
        self.gate = gate

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index < 4:
            self.gate.arrive(os.getpid())
            self.gate.wait()
        return os.getpid(), int(self.tensor.count_nonzero())


def anonymous(pid: int) -> int:
    """Return how much memory of a process is its own and no file's, or a file's that it has changed."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_a_dataset_in_memory_is_not_copied_for_each_worker(gate: Gate) -> None:
    def load(size: int) -> dict[int, int]:
        tensor = torch.ones(size, dtype=torch.uint8)
        epoch = FifoLoader(InMemory(tensor, gate), num_workers=4, executor=executor, collate_fn=list, window=16)
        iterator = iter(epoch)
        pids = set(gate.arrivals(4))
        gate.open(4)
        samples = [sample for [sample] in iterator]
        assert {total for _, total in samples} == {size}
        assert {pid for pid, _ in samples} == pids
        assert len(pids) == 4
        return {pid: anonymous(pid) for pid in pids}

    with BatchExecutor(4) as executor:
        before, after = load(1000), load(64_000_000)
        assert before.keys() == after.keys()
        growth = sum(after.values()) - sum(before.values())
        assert growth < 32_000_000


class Scribbler:
    """Writes into its own tensors, and tells how often it has done so in this process."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1_000_000)
        self.array = np.zeros(1_000_000, "u1")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        self.tensor[index * 20_000] = 1
        self.array[index] = 1
        return os.getpid(), int(self.tensor.sum()), int(self.array.sum())


def test_what_a_worker_writes_to_its_dataset_is_seen_by_nobody_else() -> None:
    dataset = Scribbler()
    with loader(dataset, batch_size=1, collate_fn=list, in_order=True, num_workers=3) as batches:
        seen: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for [(pid, *counts)] in batches:
            seen[pid].append(tuple(counts))
        assert sum(map(len, seen.values())) == 40
        for counts in seen.values():
            assert counts == [(number, number) for number in range(1, len(counts) + 1)]
        assert not dataset.tensor.any()
        assert not dataset.array.any()
        again = [sample for [sample] in batches]  # the workers have their copies still
        assert max(count for _, count, _ in again) <= 40


def test_odd_datasets_of_big_tensors_arrive_whole() -> None:
    # The surroundings are shipped right behind them.
    tensors = [torch.full((1, 2**24 + 1), number, dtype=torch.uint8) for number in range(4)]
    with loader(TensorDataset(*tensors), batch_size=1) as batches:
        [batch] = batches
        for number, tensor in enumerate(batch):
            assert bool((tensor == number).all())


# -- no memory ---------------------------------------------------------------------------------------------------------


def refuse_long_writes(worker: int) -> None:
    pwrite = os.pwrite

    def write(fd: int, block: memoryview, offset: int) -> int:
        if len(block) > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, block, offset)

    os.pwrite = write  # type: ignore[assignment]


def long_if_3(index: int) -> torch.Tensor:
    return torch.full((200_000 if index == 3 else 2000,), index, dtype=torch.uint8)


def limit_if_3(index: int) -> torch.Tensor:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if index == 3 else hard, hard))
    return torch.full((200_000 if index == 3 else 2000,), index, dtype=torch.uint8)


NO_MEMORY: dict[str, tuple[Callable[[int], Any], Callable[[int], None] | None, str]] = {
    "refused": (long_if_3, refuse_long_writes, "No space left on device"),
    "limited": (limit_if_3, None, "File too large"),
}


@pytest.mark.parametrize("how", NO_MEMORY)
def test_a_batch_without_memory_is_an_error_that_says_so_and_the_others_come(how: str) -> None:
    function, worker_init_fn, reason = NO_MEMORY[how]
    with loader(Calls(12, function), batch_size=None, worker_init_fn=worker_init_fn) as batches:
        data, [error] = drain(iter(batches))
        assert sorted(int(tensor[0]) for tensor in data) == [index for index in range(12) if index != 3]
        message = f"no shared memory for 200,000 bytes ({reason}): turn down batch_size, window, or the number of work"
        assert message in str(error)
        assert "packing the batch of chunk 3 (indices 3)" in error.__notes__[0]
        if how == "refused":
            assert isinstance(error, OSError)
            assert error.errno == errno.ENOSPC
        arena = arena_of(batches)
        del data, error
        gc.collect()
        assert free(arena) == list(range(1, taken(arena) + 1))
        del arena


# -- no slot is lost ---------------------------------------------------------------------------------------------------


class Bomb:
    """Goes off when it is packed in the worker, or unpacked in the parent."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.tensor = torch.ones(10_000)

    def __getstate__(self) -> Any:
        if self.how == "raises when packed":
            raise ValueError("boom")
        if self.how == "exits when packed":
            raise SystemExit(3)
        if self.how == "is killed when packed":
            os.kill(os.getpid(), signal.SIGKILL)
        return vars(self)

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        if self.how == "raises when unpacked":
            raise ValueError("boom")


def explosive(index: int, how: str) -> Any:
    if index % 5 != 3:
        return torch.full((10_000,), index)
    if how == "raises when loaded":
        raise ValueError("boom")
    if how == "has no memory":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        return Restore(hard)
    return [torch.ones(10_000), Bomb(how), torch.ones(10_000)]


class Restore:
    """A batch for which there is no memory. The limit is lifted when what was to be packed of it is gone."""

    def __init__(self, hard: int) -> None:
        self.array = np.ones(10_000)
        weakref.finalize(self.array, resource.setrlimit, resource.RLIMIT_FSIZE, (hard, hard))


CRASHES = ["raises when loaded", "raises when packed", "exits when packed", "raises when unpacked", "has no memory"]


@pytest.mark.parametrize("how", CRASHES)
def test_no_slot_is_lost_where_a_batch(how: str) -> None:
    with BatchExecutor(2) as executor:
        plan = BatchPlan(Calls(60, explosive, how), batch_size=1, collate_fn=one)
        data, errors = drain(executor.as_completed(plan))
        assert len(data) == 48
        assert len(errors) == 12
        arena = arena_of(executor)
        assert sum(tensor[0].item() for tensor in data) == sum(index for index in range(60) if index % 5 != 3)
        data.clear()
        errors.clear()
        gc.collect()
        assert free(arena) == list(range(1, taken(arena) + 1))
        del arena


def one(samples: list[Any]) -> Any:
    [sample] = samples
    return sample


def test_where_a_worker_is_killed_while_it_packs_only_slots_under_way_stay_out() -> None:
    window = 4
    with BatchExecutor(2) as executor:
        arena = arena_of(executor)
        safe = BatchPlan(Calls(60, explosive, "never"), batch_size=1, collate_fn=kept_if_tensor)
        assert len(list(executor.as_completed(safe, window=window))) == 60
        assert free(arena) == list(range(1, taken(arena) + 1))
        plan = BatchPlan(Calls(60, explosive, "is killed when packed"), batch_size=1, collate_fn=one)
        data, errors = drain(executor.as_completed(plan, window=window))
        assert errors
        assert all(isinstance(error, WorkerDiedError) for error in errors)
        data.clear()
        errors.clear()
        gc.collect()
        made = taken(arena)
        assert len(free(arena)) >= made - 1 - window  # one was made by counting
        del arena


def kept_if_tensor(samples: list[Any]) -> Any:
    [sample] = samples
    return sample if isinstance(sample, torch.Tensor) else None


def test_no_slot_is_lost_when_iterators_are_abandoned() -> None:
    with BatchExecutor(2) as executor:
        arena = arena_of(executor)
        gc.disable()  # nor is it held until the collector comes
        try:
            for _ in range(5):
                iterator = executor.as_completed(BatchPlan(Calls(40, image, 5000), batch_size=2), window=6)
                next(iterator)
                del iterator
            assert len(list(executor.as_completed(BatchPlan(Calls(40, image, 5000), batch_size=2)))) == 20
            executor.shutdown()
            assert free(arena) == list(range(1, taken(arena) + 1))
        finally:
            gc.enable()
    gc.collect()
    assert used(arena) <= BOARD


def test_no_slot_is_lost_where_indices_find_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with BatchExecutor(1) as executor:
        arena = arena_of(executor)
        plan = BatchPlan(range(5000), batch_size=2500)
        assert len(list(executor.as_completed(plan))) == 2
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            with pytest.raises(OSError, match=r"no shared memory for \S+ bytes .*: turn down batch_size"):
                next(executor.as_completed(plan))
        gc.collect()
        assert len(list(executor.as_completed(plan))) == 2
        assert free(arena) == list(range(1, taken(arena) + 1))
        del arena


# -- without /dev/shm --------------------------------------------------------------------------------------------------

SMALL_SHM = """
import os, signal, subprocess, sys

def load():
    import torch
    from fifobatch import FifoLoader
    from probes import Calls

    def image(index):
        return torch.full((1_000_000,), index)

    size = os.statvfs("/dev/shm")
    assert size.f_blocks * size.f_frsize == 2**20
    loader = FifoLoader(Calls(16, image), batch_size=2, num_workers=2)
    kept = list(loader.batches())
    assert all(batch.data[:, -1].tolist() == batch.indices for batch in kept)
    iterator = iter(loader)
    next(iterator)
    print("loaded", len(kept), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def look():
    import psutil
    from conftest import await_end

    print(subprocess.run([sys.executable, __file__, "load"]).returncode)
    mark = os.environ["FIFOBATCH_TEST_SCRIPT"]
    await_end([
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("FIFOBATCH_TEST_SCRIPT") == mark and process.pid != os.getpid()
    ])
    print(os.listdir("/dev/shm"))

if len(sys.argv) == 1:
    inside = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {os.path.abspath(__file__)} look"
    os.execvp("unshare", ["unshare", "-m", "sh", "-c", inside])
{"load": load, "look": look}[sys.argv[1]]()
"""


def private_mounts() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_dev_shm_of_1_mib_is_enough_and_a_killed_parent_leaves_nothing_there(
    run_script: Callable[..., Finished],
) -> None:
    if not private_mounts():
        pytest.skip("needs root, and unshare")
    finished = run_script(SMALL_SHM)
    assert finished.stdout.splitlines() == ["loaded 8", "-9", "[]"], finished.stderr


# -- more than 4 GiB ---------------------------------------------------------------------------------------------------


def huge(index: int) -> torch.Tensor:
    tensor = torch.zeros(4_400_000_000, dtype=torch.uint8)
    tensor[:: 2**20] = index + 1
    tensor[-1] = 77
    return tensor


@pytest.mark.slow
def test_a_batch_of_more_than_4_gib_arrives() -> None:
    if psutil.virtual_memory().available < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    with loader(Calls(1, huge), batch_size=None, num_workers=1) as batches:
        [batch] = batches
        assert batch.nbytes == 4_400_000_000
        assert bool((batch[: -(2**20) : 2**20] == 1).all())
        assert int(batch[-1]) == 77
        assert int(batch[1]) == 0
        del batch


class Views:
    """A scratch buffer of each kind, which a sample writes to, and views of it, which it reads."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(8, 2000)
        self.rows, self.every_other, self.array = self.tensor[2:], self.tensor[::2], self.tensor.numpy()
        self.source = np.zeros((8, 2000))
        self.part, self.over = self.source[2:], torch.from_numpy(self.source)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        self.tensor[3:5] = self.source[3] = index
        views = [self.rows[1, 7], self.every_other[2, 7], self.array[3, 7], self.part[1, 7], self.over[3, 7]]
        return [float(view) for view in views]


def test_what_shares_memory_in_a_dataset_shares_it_in_the_worker() -> None:
    dataset = Views()
    with FifoLoader(dataset, batch_size=None, num_workers=2) as loader:
        assert sorted(loader) == [[float(index)] * 5 for index in range(6)]
    assert not dataset.tensor.any()


def test_views_of_a_dataset_are_shipped_once() -> None:
    big = torch.zeros(1000, 1000)
    windows = [big[first:] for first in range(50)] + [torch.zeros(1, 100).expand(100_000, 100)]
    with FifoLoader(windows, batch_size=None, sampler=[0, 49], num_workers=1, persistent_workers=True) as loader:
        assert [len(window) for window in loader] == [1000, 951]
        arena = loader._own._engine.arena
        assert os.fstat(arena.fd).st_blocks * 512 < 4 * big.nbytes  # the dataset, and slots of two batches


class Forking:
    """Each sample forks a child, which leaves this code in one way or another."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        pid = os.fork()
        if not pid:
            if index == 1:
                raise ValueError("in the child")
            if index == 2:
                return 7
            sys.exit(index)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_that_a_sample_forks_does_not_become_a_worker() -> None:
    with FifoLoader(Forking(), batch_size=None, num_workers=1) as loader:
        assert list(loader) == [0, 1, 0, 3]

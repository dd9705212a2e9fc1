"""The semaphore that loky's queues and workers use: what `multiprocessing`'s does, without a name."""

import errno
import os
import pickle
import select
import threading
from typing import Any

import pytest
from probes import TIMEOUT

from fifobatch.processes import WorkerProcess
from fifobatch.semaphore import Semaphore


def test_it_counts() -> None:
    semaphore = Semaphore(2)
    assert semaphore.acquire() and semaphore.acquire(timeout=TIMEOUT)
    assert semaphore._semlock._is_zero()
    assert not semaphore.acquire(False)
    assert not semaphore.acquire(block=False, timeout=TIMEOUT)
    semaphore.release()
    assert not semaphore._semlock._is_zero()
    assert semaphore.acquire(False)


def test_a_with_block_has_it() -> None:
    lock = Semaphore()
    with lock:
        assert not lock.acquire(False)
    assert lock.acquire(False)


@pytest.mark.parametrize("timeout", [0, -1.0, 0.01])
def test_what_nobody_releases_times_out(timeout: float) -> None:
    assert not Semaphore(0).acquire(timeout=timeout)


def _refuse() -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("files", ["enough files", "too many files open"])
@pytest.mark.parametrize("timeout", [None, TIMEOUT])
def test_each_release_lets_one_through(files: str, timeout: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if files == "too many files open":
        monkeypatch.setattr(select, "epoll", _refuse)
    semaphore, through = Semaphore(0), Semaphore(0)

    def pass_it() -> None:
        if semaphore.acquire(timeout=timeout):
            through.release()

    threads = [threading.Thread(target=pass_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert not through.acquire(False)
        semaphore.release()
        assert through.acquire(timeout=TIMEOUT)
    for thread in threads:
        thread.join(TIMEOUT)
    assert semaphore._is_zero() and through._is_zero()


def test_it_is_the_same_one_in_a_process_that_is_started_with_it() -> None:
    semaphore = Semaphore(0)
    waiting = WorkerProcess(0, frozenset(), target=semaphore.acquire)
    waiting.start()
    WorkerProcess(1, frozenset(), target=semaphore.release).start()
    waiting.join(TIMEOUT)
    assert waiting.exitcode == 0

    releasing = WorkerProcess(0, frozenset(), target=semaphore.release)
    releasing.start()
    assert semaphore.acquire(timeout=TIMEOUT)
    releasing.join(TIMEOUT)
    assert releasing.exitcode == 0


def test_it_cannot_be_pickled_at_any_other_time() -> None:
    with pytest.raises(RuntimeError, match="should only be shared"):
        pickle.dumps(Semaphore())


def test_its_descriptors_are_closed_with_it() -> None:
    before = os.listdir("/proc/self/fd")
    semaphore = Semaphore(0)
    semaphore.acquire(timeout=0.001)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    del semaphore
    assert os.listdir("/proc/self/fd") == before

"""A semaphore between processes that has no name: a counter in the kernel that they inherit as a descriptor.

multiprocessing's own are files in /dev/shm. Where that is missing or full they cannot be made; and they are registered
with its resource tracker, which speaks of leaks when a program is killed. This one goes with the last process that has
it.

Runs in the parent, in whichever thread asks loky for something and in loky's manager thread, and in the workers.
"""

import os
import select
import time
import weakref
from multiprocessing import reduction
from multiprocessing.context import assert_spawning
from typing import Any

__all__ = ["Semaphore"]


class Semaphore:
    """A counting semaphore; with a value of 1, a lock that anybody may release. Made on Linux only.

    It can be pickled while a process is started, and then is the same one there.

    Args:
        value: How often it can be acquired before it has to be released.

    Raises:
        OSError: There are too many files open.
    """

    def __init__(self, value: int = 1) -> None:
        self._own(os.eventfd(value, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def _own(self, fd: int) -> None:
        self._fd = fd
        self._sleepers: select.epoll | None = None  # made by the first who has to wait
        weakref.finalize(self, os.close, fd).atexit = False  # at exit it may still be in use

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take one, and return whether there was one.

        Args:
            block: Wait for it.
            timeout: How many seconds at most; None for ever.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if not block or (left is not None and left <= 0):
                    return False
                self._wait(left)
            else:
                return True

    def _wait(self, timeout: float | None) -> None:
        # Exclusive: a release wakes one process. Otherwise all idle workers would wake up for each task, to find that
        # one of them has it: with eight, that was three times the context switches. 1. A process may be about to wait
        # when another one releases; 2. then its epoll has noted that, and it does not go to sleep. Two threads may make
        # an epoll each: both do.
        sleepers = self._sleepers
        try:
            if sleepers is None:
                sleepers = select.epoll()
                sleepers.register(self._fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                self._sleepers = sleepers
        except OSError:  # there are too many files open
            self._poll(timeout)
        else:
            sleepers.poll(timeout)

    def _poll(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def release(self) -> None:
        """Give one back."""
        os.eventfd_write(self._fd, 1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    @property
    def _semlock(self) -> "Semaphore":
        """What multiprocessing's queues ask for more than a semaphore tells."""
        return self

    def _is_zero(self) -> bool:
        return not self._poll(0)

    def __reduce__(self) -> Any:
        assert_spawning(self)
        return _inherit, (reduction.DupFd(self._fd),)


def _inherit(wrapper: Any) -> Semaphore:
    semaphore = Semaphore.__new__(Semaphore)
    fd = wrapper.detach()
    os.set_inheritable(fd, False)
    semaphore._own(fd)
    return semaphore

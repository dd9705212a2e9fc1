"""``async for`` over loaders: the event loop is never blocked, and what is cancelled leaves nothing."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from probes import TIMEOUT, Calls

from fifobatch import ClosedError, FifoLoader, PairedLoader, PlanError
from fifobatch.testing import ManualExecutor

pytestmark = pytest.mark.filterwarnings("ignore:num_workers=.* is more than two a core")  # so that 2 cores are enough


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine in an event loop that complains of nothing, and never for ever."""

    async def bounded() -> Any:
        return await asyncio.wait_for(main(), TIMEOUT)

    return asyncio.run(bounded())


class Manual(ManualExecutor):
    """Tells the event loop when calls were submitted."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.submitted = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(*args, **kwargs)
        if len(self.calls) == self.count:
            self.loop.call_soon_threadsafe(self.submitted.set)
        return future


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_of_each_kind(num_workers):
    async def main() -> None:
        loader = FifoLoader(range(10), batch_size=4, num_workers=num_workers)
        assert sorted([batch.tolist() async for batch in loader]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert sorted([batch.number async for batch in loader.batches()]) == [0, 1, 2]

        pairs = PairedLoader(range(10), range(100, 110), batch_size=4, shuffle=True, num_workers=num_workers)
        seen = 0
        async for x, target in pairs:
            y = await asyncio.wrap_future(target)
            assert (y - x).tolist() == [100] * len(x)
            seen += len(x)
        assert seen == 10
        assert sorted([len(x) async for x, y in pairs.zipped()]) == [2, 4, 4]

    run(main)


def test_the_loop_goes_on_while_a_batch_loads_and_the_first_to_complete_comes_first():
    async def main() -> None:
        manual = Manual(3)
        batches = aiter(FifoLoader(range(3), window=3, executor=manual))
        waiting = asyncio.create_task(anext(batches))
        await manual.submitted.wait()
        assert not waiting.done()
        manual.complete(2)
        assert (await waiting).item() == 2
        for number in (0, 1):
            manual.complete(number)
        assert [batch.item() async for batch in batches] == [0, 1]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    run(main)


def test_the_loop_goes_on_while_an_epoch_starts():
    started, go_on = threading.Event(), threading.Event()

    def indices() -> Iterator[int]:
        started.set()
        assert go_on.wait(TIMEOUT)
        yield 0

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            return indices()

    async def main() -> None:
        task = asyncio.create_task(anext(aiter(FifoLoader(range(1), sampler=Sampler(), num_workers=1))))
        await asyncio.to_thread(started.wait)
        go_on.set()  # only a loop that is not blocked comes here
        assert (await task).item() == 0

    run(main)


def test_errors_come_and_the_other_batches_too():
    async def main() -> None:
        batches = aiter(FifoLoader(Calls(3, lambda index: 1 // (index - 1) + 5), num_workers=1))
        seen: list[Any] = []
        while True:
            try:
                seen.append((await anext(batches)).item())
            except ZeroDivisionError as error:
                seen.append(error.__notes__[0].partition(",")[2][:19])
            except StopAsyncIteration:
                break
        assert seen == [4, " loading dataset[1]", 6]

    run(main)


def test_what_cannot_start_is_an_error_once():
    async def main() -> None:
        batches = aiter(FifoLoader([threading.Lock()], num_workers=1))
        with pytest.raises(PlanError):
            await anext(batches)
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    run(main)


def test_cancelling_closes_the_iterator():
    async def main() -> None:
        manual = Manual(2)
        iterator = iter(FifoLoader(range(8), window=2, executor=manual))
        waiting = asyncio.create_task(anext(aiter(iterator)))
        await manual.submitted.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(ClosedError):
            next(iterator)

    run(main)


def test_after_a_timeout_the_error_says_that_it_has_closed_the_epoch():
    async def main() -> None:
        batches = aiter(FifoLoader(range(8), window=2, executor=Manual(2)))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(batches), 0.01)
        for _ in range(2):
            with pytest.raises(ClosedError, match=r"a wait for a batch was cancelled .* closes the iterator"):
                await anext(batches)

    run(main)


def test_it_can_be_closed_by_a_with_block():
    async def main() -> None:
        async with contextlib.aclosing(aiter(FifoLoader(range(8), num_workers=2))) as batches:
            async for _ in batches:
                break
        with pytest.raises(ClosedError, match="this iterator was closed"):
            await anext(batches)

    run(main)


def test_what_is_closed_before_it_starts_loads_nothing():
    async def main() -> None:
        batches = aiter(FifoLoader(range(8), num_workers=1))
        batches.close()
        with pytest.raises(ClosedError):
            await anext(batches)

    run(main)


def test_a_target_is_awaited_though_its_worker_dies(gate):
    def die_once(index: int) -> int:
        gate.arrive(os.getpid())
        gate.wait()
        return index

    async def main() -> None:
        loader = PairedLoader(range(1), Calls(1, die_once), num_workers=2)
        async for x, target in loader:
            waiting = asyncio.wrap_future(target)
            [pid] = await asyncio.to_thread(gate.arrivals, 1)
            os.kill(pid, signal.SIGKILL)
            gate.open(2)
            assert (await waiting).tolist() == x.tolist()

    run(main)


def test_cancelling_an_awaited_target_cancels_it():
    async def main() -> None:
        manual = Manual(2)
        pairs = aiter(PairedLoader(range(1), range(1), executor=manual))
        waiting = asyncio.create_task(anext(pairs))
        await manual.submitted.wait()
        manual.complete(0)
        _, target = await waiting
        wrapped = asyncio.wrap_future(target)
        wrapped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wrapped
        await asyncio.sleep(0)  # asyncio tells the target in a callback
        assert manual.calls[1].cancelled()
        assert [pair async for pair in pairs] == []

    run(main)


def test_what_was_left_out_is_warned_of_at_the_users_line():
    async def main() -> None:
        loader = FifoLoader(Calls(2, lambda index: 1 // index), batch_size=2, num_workers=1, on_error="skip")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [batch.tolist() async for batch in loader] == [[1]]
        assert [(warning.filename, "1 sample" in str(warning.message)) for warning in caught] == [(__file__, True)]

    run(main)


def test_ten_loaders_in_one_loop_one_cancelled_half_way(gate):
    """As a server would: iterated at once, more of them than the loop's own executor has threads on two cores."""

    def hold_back(index: int) -> int:
        if index == 3:
            gate.arrive()
            gate.wait()
        return index

    async def consume(loader: FifoLoader[Any]) -> int:
        return sum([len(batch) async for batch in loader])

    async def main() -> None:
        stuck = asyncio.create_task(consume(FifoLoader(Calls(6, hold_back), num_workers=1)))
        others = [asyncio.create_task(consume(FifoLoader(range(20), batch_size=3, num_workers=1))) for _ in range(9)]
        await asyncio.to_thread(gate.arrivals, 1)
        stuck.cancel()
        assert await asyncio.gather(*others) == [20] * 9
        with pytest.raises(asyncio.CancelledError):
            await stuck
        gate.open(1)

    run(main)
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("fifobatch-async")]
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_leaving_the_loop_early_leaves_nothing():
    async def main() -> None:
        async for _ in FifoLoader(range(20), num_workers=2):
            break

    run(main)

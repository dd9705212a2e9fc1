"""What becomes of a worker's answer: the batch, or the error to raise.

Runs in the parent, in the pool's thread.
"""

from concurrent.futures import BrokenExecutor
from typing import Any

from fifobatch.arena import Arena
from fifobatch.attempt import batch_named, named
from fifobatch.errors import WorkerDiedError
from fifobatch.flight import Flight
from fifobatch.pickling import loads, rebuild, report
from fifobatch.plan import Batch, Chunk
from fifobatch.transport import Parcel, unpack

__all__ = ["explain", "opened"]


def opened(arena: Arena | None, flight: Flight, kind: str, body: Any) -> Batch[Any] | Exception:
    """Return what to complete the flight's future with.

    Args:
        arena: Where the parcel's contents lie, if ``body`` is a parcel.
        flight: The chunk; its slot is lent to the batch.
        kind: The answer's, see `worker.Answer`.
        body: The answer's.
    """
    chunk = flight.future.chunk
    try:
        if arena is not None and flight.slot is not None:
            slot, flight.slot = flight.slot, None  # the batch gives it back
            body = loads(*unpack(arena, slot, Parcel(*body)))
        if kind in ("error", "last error"):
            flight.future.is_last = kind == "last error"
            return rebuild(body)
        if kind == "batch" and not flight.left_out:
            return Batch(chunk.number, chunk.indices, body)
        data, failed = (body, []) if kind == "batch" else body
        failures = [(positions, rebuild(told)) for positions, told in failed]
        return flight.of_lane(data, failures) if kind == "share" else flight.without(failures, data)
    except BaseException as error:  # what unpickling the user's objects raises is this batch's error
        where = f"In the parent, unpickling {batch_named(chunk.number, chunk.sent)}."
        failure = rebuild(report(error, where))
        skip = flight.run.policy.skip and not flight.run.lanes
        return flight.without([(None, failure)], None) if skip else failure


def explain(chunk: Chunk, error: BaseException, broken: str) -> Exception:
    """Return what the user is told of an error of the executor itself.

    Args:
        chunk: What was under way.
        error: The error.
        broken: What is known of the executor's end, if that is what it is.
    """
    where = named(chunk.number, chunk.sent)
    if not isinstance(error, BrokenExecutor):
        return rebuild(report(error, f"In the executor, on {where}."))
    died = WorkerDiedError(f"{broken} {where[0].upper()}{where[1:]} was under way and is not loaded")
    died.__cause__ = error
    return died

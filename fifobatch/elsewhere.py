"""What runs on an executor that is not ours: threads, Dask, MPI.

Runs in whatever process and thread that executor has; its own transport carries plan, indices and batch.
"""

import os
import platform
import threading
import time
from typing import Any

from fifobatch.attempt import Again, Attempt
from fifobatch.fetch import NOTHING, Payload, fetch, seed_all, size_of
from fifobatch.pickling import loads_sent
from fifobatch.tasks import Answer
from fifobatch.worker import located_report, reports

__all__ = ["load_elsewhere", "plans_here"]

# Plans of this very process, by token: an executor that stays in the process (threads) needs no copy.
plans_here: dict[int, Payload] = {}
_plans_elsewhere: dict[int, Payload] = {}


def load_elsewhere(
    token: int,
    payload: bytes | None,
    alive: tuple[int, ...],
    chunk: tuple[int, Any, int, tuple[int, ...] | None],
    attempt_number: int,
) -> Answer:
    """Load one chunk on an executor that is not ours: threads, Dask, MPI; its own transport carries the batch.

    Threads share one random state, so there the chunk's seeds are not applied.

    Args:
        token: Names the plan.
        payload: The pickled `Payload`, sent again when a worker answered that it does not know the plan.
        alive: Tokens still in use: copies of others are dropped.
        chunk: Number, indices, seed and seeds.
        attempt_number: Which try it is, from 1.
    """
    started = time.perf_counter()
    number, indices, seed, seeds = chunk
    where = f"preparing chunk {number}"

    def answer(kind: str, body: Any, size: int = 0) -> Answer:
        who = (platform.node(), os.getpid(), threading.get_ident())
        return kind, body, (who, started, time.perf_counter(), size)

    try:
        plan = plans_here.get(token)
        if plan is not None:
            seeds = None
        else:
            for old in [old for old in _plans_elsewhere if old not in alive]:
                _plans_elsewhere.pop(old, None)
            if token not in _plans_elsewhere:
                if payload is None:
                    return answer("unknown", None)
                where = "unpickling the dataset"
                _plans_elsewhere[token] = loads_sent(payload)
            plan = _plans_elsewhere[token]
            seed_all(seed)
        attempt = Attempt(number, plan.policy, attempt_number, seeds=seeds)
        batch = fetch(plan, indices, attempt)
        if batch is not NOTHING and not attempt.failed:
            return answer("batch", batch, size_of(batch))
        rest = None if batch is NOTHING else batch
        return answer("partial", (rest, reports(attempt)), size_of(rest))
    except Again:
        return answer("again", None)
    except BaseException as error:  # the process boundary, as in `load`
        return answer("error", located_report(error, where))

"""What workers need, shipped once: the dataset with its functions, and the surroundings.

Runs in the parent, in the thread that publishes a plan.
"""

import itertools
import pickle
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from fifobatch.arena import ALIGNMENT, Arena, Place, Room
from fifobatch.elsewhere import plans_here
from fifobatch.errors import PlanError
from fifobatch.fetch import Payload
from fifobatch.packages import installed_modules
from fifobatch.pickling import Pickled, dumps, find_culprit, sent_classes
from fifobatch.tasks import Context
from fifobatch.transport import TASK_BYTES, Parcel, holds, pack

__all__ = ["Shipment", "Shipments", "cannot_send", "pickle_task"]

_tokens = itertools.count(1)


class Shipment:
    """Something that workers need, published once: a plan's payload, or a context.

    It stays published as long as somebody refers to it.

    Args:
        content: What they need.
        arena: Where it goes; None keeps it here.
        pickled: What goes there.
        drop: Called with its token and place when nobody refers to it any more.
    """

    def __init__(
        self,
        content: Payload | Context,
        arena: Arena | None,
        pickled: Pickled | None,
        drop: Callable[[int, Place], None],
    ) -> None:
        self.token = next(_tokens)
        self.content = content
        self.parcel = Parcel()
        self._classes: list[type] = []
        if arena is None or pickled is None:
            if isinstance(content, Payload):
                plans_here[self.token] = content
            weakref.finalize(self, plans_here.pop, self.token, None).atexit = False
            return
        room = Room(arena, None, pickled.nbytes + 2 * ALIGNMENT * len(pickled.buffers))
        # Also where there is no memory for all of it.
        weakref.finalize(self, drop, self.token, room.reserved).atexit = False
        self.parcel = pack(pickled, room, TASK_BYTES)
        self._classes = sent_classes()  # what comes back names them by id


class Shipments:
    """What was shipped by one executor and is still in use.

    Args:
        arena: Where to; None keeps the content here, for executors that are not ours.
        modules: The installed modules that workers are going to import are added to it.

    Attributes:
        alive: The tokens of those in use, as of the last one published: workers drop their copies of others.
    """

    def __init__(self, arena: Arena | None, modules: set[str]) -> None:
        self.alive: tuple[int, ...] = ()
        self._arena = arena
        self._modules = modules
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, Place]] = deque()
        self._is_over = False
        self._published: weakref.WeakValueDictionary[int, Shipment] = weakref.WeakValueDictionary()

    def _drop(self, token: int, place: Place) -> None:
        """Note that nobody refers to it any more; from a finalizer, so without a lock."""
        if self._is_over and self._arena is not None:
            self._arena.punch(place)
        else:
            self._dropped.append((token, place))

    def close(self) -> None:
        """Give back all that nobody refers to, now and later: no worker is there any more."""
        self._is_over = True
        self.release(lambda token: False)

    def release(self, is_held: Callable[[int], bool]) -> None:
        """Give back the memory of what nobody refers to, and no worker has mapped.

        Workers drop what is dropped here with their next task. But something of it may live on there, such as an array
        in a global of the dataset's module, and would read as zeros.

        Args:
            is_held: Says of a token whether a worker has it mapped.
        """
        for _ in range(len(self._dropped)):
            try:
                token, place = self._dropped.popleft()
            except IndexError:  # another thread was quicker
                return
            if self._arena is not None and not is_held(token):
                self._arena.punch(place)
            else:
                self._dropped.append((token, place))

    def publish(self, content: Payload | Context) -> Shipment:
        """Ship ``content``, unless the workers have just these bytes already.

        Raises:
            OSError: There is no memory for it.
            PlanError: It cannot be pickled.
        """
        if self._arena is None:
            shipment = Shipment(content, None, None, self._drop)
        else:
            try:
                pickled = dumps(content)
            except Exception as error:  # whatever the user's own pickling raises
                raise cannot_send(content, error) from error
            with self._lock:
                published = list(self._published.values())
            for shipment in published:
                if type(shipment.content) is type(content) and holds(self._arena, shipment.parcel, pickled):
                    return shipment
            # Hugging Face's streams keep their epoch's number in such a tensor, for workers that live on. Here the
            # dataset is sent to these again.
            if pickled.shares_memory and "datasets.iterable_dataset" not in pickled.modules:
                warnings.warn(
                    "the dataset holds tensors in shared memory (share_memory_()); the workers get copies of them",
                    stacklevel=2,
                )
            self._modules |= installed_modules(pickled.modules)
            shipment = Shipment(content, self._arena, pickled, self._drop)
        with self._lock:
            self._published[shipment.token] = shipment
            self.alive = tuple(self._published)
        return shipment


def pickle_task(sent: Any, left_out: tuple[int, ...], seeds: tuple[int, ...] | None) -> Pickled:
    """Pickle what is sent of a chunk, whatever it is; which positions of it are not to be loaded; and the seeds.

    Raises:
        Exception: What pickling the user's objects raises.
    """
    if sent is None or (type(sent) is list and all(type(index) is int for index in sent)):
        # cloudpickle takes ten times longer to find nothing to do
        return Pickled(pickle.dumps((sent, left_out, seeds), 5), [])
    return dumps((sent, left_out, seeds))


def cannot_send(payload: Any, error: Exception) -> PlanError:
    """Say which part of a plan cannot be pickled, and what to do."""
    path, culprit = "plan", payload
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        part = getattr(payload, name)
        try:
            dumps(part)
        except Exception:  # whatever the user's own pickling raises: the question is only which part it is
            path, culprit = find_culprit(part, name)
            break
    kind = type(culprit)
    return PlanError(
        f"cannot send {type(payload.dataset).__name__} to the worker processes: {path} is a {kind.__module__}."
        f"{kind.__qualname__} ({type(error).__name__}: {error}). Open or create it where it is used, in __getitem__ or "
        "worker_init_fn; or leave it out in __getstate__; or load in this process with num_workers=0"
    )

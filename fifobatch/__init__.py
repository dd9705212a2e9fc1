"""First completed, first out: a batch that is ready never waits behind one that is not.

::

           parent process                                 |        worker process (one of max_workers)
 Dataset + Sampler                                        |
   -> BatchPlan        yields Chunk(number, indices, seed)|
   -> Window           how many may be under way          |
   -> BatchExecutor    submit(plan, chunk) -> Future ---->|  worker.load: find the dataset, seed, dataset[i], collate
                                                          |  pack: the batch into a shared slot -> Parcel
   <- unpack: tensors over the slot, no copy          <---|
   <- completed queue  (in order of completion)           |
 for batch in FifoLoader                                  |
   <- the slot goes back when its last tensor is gone     |

- ``FifoLoader`` is torch's ``DataLoader`` over it; ``BatchExecutor`` is the same as a `concurrent.futures` library
  call.
- ``PairedLoader`` is two datasets over one plan, each half of a pair a task of its own.
- ``trace`` notes when each chunk went through these stations; ``timeline`` draws it.
- Each module's docstring says which process and which thread runs it.
- Importing this starts nothing.
"""

from fifobatch.errors import ChunkTimeoutError, ClosedError, FifobatchError, PlanError, SampleError, WorkerDiedError
from fifobatch.executor import BatchExecutor
from fifobatch.loader import FifoLoader
from fifobatch.measures import Span, Statistics
from fifobatch.pairs import PairedLoader
from fifobatch.plan import Batch, BatchPlan, Chunk, Failure
from fifobatch.timeline import format_timeline, plot_timeline

__all__ = [
    "Batch",
    "BatchExecutor",
    "BatchPlan",
    "Chunk",
    "ChunkTimeoutError",
    "ClosedError",
    "Failure",
    "FifoLoader",
    "FifobatchError",
    "PairedLoader",
    "PlanError",
    "SampleError",
    "Span",
    "Statistics",
    "WorkerDiedError",
    "format_timeline",
    "plot_timeline",
]

__version__ = "0.1.0"

"""How programs end: the exit code, nothing on stderr that is not the user's own, soon, and without a process left."""

import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from conftest import Finished, Script
from probes import Gate

HEAD = """
import atexit, gc, sys, threading, time
from pathlib import Path
from fifobatch import BatchExecutor, BatchPlan, ClosedError, FifoLoader, PairedLoader
from probes import Calls, Gate, pass_gate

def leave():
    print(time.monotonic(), flush=True)  # the exit begins

def load(**arguments):
    return FifoLoader(range(200), batch_size=4, num_workers=2, **arguments)

def block():
    "Return an iterator whose samples wait for ever."
    gate = Gate.make(Path())
    iterator = iter(FifoLoader(Calls(8, pass_gate, gate), num_workers=2))
    gate.arrivals(2)
    return iterator
"""

# Less than what a worker gets to finish its sample when an iterator is given up.
SOON = 4.5


class Tail(NamedTuple):
    """How a program goes on and ends."""

    source: str
    returncode: int = 0
    last_line: str = ""  # of the only traceback, if there is one


TAILS = {
    # Half-used iterators in a global and in a reference cycle, one who reads from it at exit, and workers that wait.
    "held iterators": Tail("""
persistent = load(persistent_workers=True)
assert len(list(persistent)) == 50
class Holder: pass
holder = Holder()
holder.itself, holder.iterator = holder, iter(load())
iterator = iter(load())
next(iterator), next(holder.iterator)
atexit.register(lambda: next(iterator, None))
del holder
leave()
"""),
    "error in the loop": Tail(
        """
for batch in load(persistent_workers=True):
    leave()
    raise ValueError("the user's own")
""",
        1,
        "ValueError: the user's own",
    ),
    "sample that blocks": Tail("iterator = block(); leave()"),
}
SLOW_TAILS = {
    "sys.exit in the loop": Tail("for batch in load(): leave(); sys.exit(3)", 3),
    "finished epoch": Tail("assert len(list(load())) == 50; leave()"),
    "iterators in every state": Tail("""
never_asked = iter(load())
dropped = iter(load())
next(dropped)
del dropped
for batch in load():
    break
for pair in zip(load(), load(persistent_workers=True)):
    break
half_used = load(persistent_workers=True)
for _ in range(2):
    iterator = iter(half_used)
    next(iterator)
leave()
"""),
    "error in a sample": Tail(
        """
def fail(index):
    leave()
    raise ValueError("the sample's own")
list(FifoLoader(Calls(4, fail), num_workers=2))
""",
        1,
        "  ValueError: the sample's own",  # the last line of the note: the traceback in the worker
    ),
    "sample that blocks, in a loop that fails": Tail(
        """
iterator = block()
leave()
raise ValueError("the user's own")
""",
        1,
        "ValueError: the user's own",
    ),
    "loop in a daemon thread": Tail("""
iterator = block()
threading.Thread(target=next, args=[iterator], daemon=True).start()
leave()
"""),
    "target in a daemon thread": Tail("""
pairs = PairedLoader(Calls(8, str), Calls(8, pass_gate, Gate.make(Path())), batch_size=1, num_workers=2)
_, target = next(iter(pairs))
threading.Thread(target=target.result, daemon=True).start()
leave()
"""),
    "futures of an executor": Tail("""
gate = Gate.make(Path())
plan = BatchPlan(Calls(8, pass_gate, gate))
executor = BatchExecutor(2)
futures = [executor.submit(plan, chunk) for chunk in plan]
gate.arrivals(2)
leave()
"""),
}


@pytest.mark.parametrize(
    "name", [*TAILS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TAILS)], ids=lambda name: name
)
def test_exit(name: str, run_script: Callable[..., Finished]) -> None:
    tail = (TAILS | SLOW_TAILS)[name]
    finished = run_script(HEAD + tail.source)
    ended = time.monotonic()
    _check(finished, tail.returncode, tail.last_line)
    assert ended - float(finished.stdout.split()[-1]) < SOON


def _check(finished: Finished, returncode: int, last_line: str) -> None:
    lines = finished.stderr.splitlines()
    if last_line:
        assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", last_line), finished.stderr
        # Once, and no second one from an exit handler or another process.
        assert sum(line.startswith("Traceback (most") for line in lines) == 1, finished.stderr
        assert "Exception ignored" not in finished.stderr
    else:
        assert lines == []
    assert finished.returncode == returncode


WAITING = """
from probes import Calls, Gate, pass_gate
from fifobatch import FifoLoader
for batch in FifoLoader(Calls(8, pass_gate, Gate({!r})), num_workers=2):
    pass
"""


@pytest.mark.parametrize("whom", ["everybody", pytest.param("the script", marks=pytest.mark.slow)])
def test_ctrl_c_while_the_loop_waits(whom: str, start_script: Callable[..., Script], gate: Gate) -> None:
    script = start_script(WAITING.format(gate.folder))
    gate.arrivals(2)
    if whom == "everybody":  # as a terminal does
        script.interrupt_all()
    else:
        script.interrupt()
    interrupted = time.monotonic()
    finished = script.finish()
    assert time.monotonic() - interrupted < SOON
    _check(finished, -signal.SIGINT, "KeyboardInterrupt")


def test_ctrl_c_while_the_server_starts(start_script: Callable[..., Script], gate: Gate) -> None:
    # Python imports this by itself; in the server it holds up the import of torch.
    customize = f"""
import sys
if "fifobatch.serve" in sys.orig_argv[-1]:
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                with open({gate.folder + "/arrived"!r}, "wb") as arrived:
                    arrived.write(bytes(8))
                with open({gate.folder + "/opened"!r}, "rb") as opened:
                    opened.read(1)
    sys.meta_path.insert(0, Finder())
"""
    script = start_script(WAITING.format(gate.folder), modules={"sitecustomize": customize})
    gate.arrivals(1)
    script.interrupt_others()  # a signal to all of them reaches the server first, say
    gate.open(1)
    gate.arrivals(2)
    script.interrupt_all()
    _check(script.finish(), -signal.SIGINT, "KeyboardInterrupt")


ENDS = {
    "os._exit": ("os._exit(3)", 3),
    "SIGTERM": ("signal.pause()", -signal.SIGTERM),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.mark.parametrize("how", ENDS)
def test_no_word_of_leaks_however_it_ends(how: str, start_script: Callable[..., Script], gate: Gate) -> None:
    end, returncode = ENDS[how]
    script = start_script(f"""
import os, signal
from multiprocessing import resource_tracker
from fifobatch import FifoLoader
from probes import Calls, Gate, named_semaphores

tracker = resource_tracker._resource_tracker
send = tracker._send
def tell(*what):
    print("registered:", *what, flush=True)
    send(*what)
tracker._send = tell
iterator = iter(FifoLoader(Calls(64, named_semaphores), num_workers=2, collate_fn=list))
print(next(iterator), named_semaphores(), flush=True)
Gate({gate.folder!r}).arrive()
{end}
""")
    gate.arrivals(1)
    if how == "SIGTERM":
        script.terminate()
    finished = script.finish()
    assert finished == (returncode, "[[]] []\n", "")


def test_what_is_read_when_the_main_thread_has_ended(run_script: Callable[..., Finished]) -> None:
    source = """
def read(who, iterator):
    print(who, sum(1 for _ in iterator), flush=True)

loader = load(persistent_workers=True)
iterator, other = iter(loader), iter(loader)
next(iterator), next(other)
atexit.register(read, "exit function", iterator)
threading.Thread(target=read, args=("thread", other)).start()
"""
    finished = run_script(HEAD + source)
    assert finished == (0, "thread 49\nexit function 49\n", "")


def test_threads_may_load_pairs_and_have_batches_prepared_when_the_main_thread_has_ended(
    run_script: Callable[..., Finished],
) -> None:
    source = """
from fifobatch import PairedLoader

def read():
    threading.main_thread().join()
    print({batch.device.type for batch in load(device="meta")})
    pairs = list(PairedLoader(range(8), range(8), num_workers=2, device="meta"))
    print([target.result().device.type for x, target in pairs] == ["meta"] * 8)

threading.Thread(target=read).start()
"""
    assert run_script(HEAD + source) == (0, "{'meta'}\nTrue\n", "")


def test_in_a_child_of_multiprocessing_loading_ends_with_the_main_thread(run_script: Callable[..., Finished]) -> None:
    source = """
import multiprocessing

def main():
    iterator = block()
    def read():
        try:
            next(iterator)
        except ClosedError:
            print("closed", flush=True)
    threading.Thread(target=read).start()

child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
print(child.exitcode)
"""
    assert run_script(HEAD + source) == (0, "closed\n0\n", "")

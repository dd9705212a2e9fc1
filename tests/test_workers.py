"""What workers inherit and tell: warning filters, prints and logs; and others' pools beside ours."""

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Finished
from probes import Calls, load

from fifobatch import FifoLoader, filters
from fifobatch.worker import Context

RunScript = Callable[..., Finished]

# -- warnings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_filters() -> Iterator[None]:
    """Have no filters but those that the test adds, and keep what it does to itself."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


class OwnWarning(UserWarning):
    """Of a module that workers can import."""

    class Nested(UserWarning):
        pass


def test_filters_are_the_same_after_the_trip(own_filters: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_installed", None)
    warnings.filterwarnings("ignore", message="(?i)a MESSAGE", module=r"a\.module", lineno=7)
    warnings.filterwarnings("error", category=DeprecationWarning)
    warnings.simplefilter("once", OwnWarning)
    warnings.filters.append(("default", "whole", UserWarning, "__main__", 0))  # as the interpreter's own are
    before, plain = list(warnings.filters), filters.current()
    warnings.resetwarnings()
    filters.install(plain)
    assert filters.current() == plain
    # Only a category that is not built in is another object.
    assert [(*entry[:2], *entry[3:]) for entry in warnings.filters] == [(*entry[:2], *entry[3:]) for entry in before]
    for (*_, category, _, _), (*_, original, _, _) in zip(warnings.filters, before):
        assert category is original or original is OwnWarning


def test_a_category_is_found_by_its_name() -> None:
    class Below(OwnWarning.Nested):
        pass

    for original in (OwnWarning, OwnWarning.Nested):
        category = filters._category(original.__module__, original.__qualname__)
        assert issubclass(original, category)
        assert issubclass(Below, category) == issubclass(Below, original)
        assert not issubclass(UserWarning, category)


class Matcher:
    """No regular expression of the standard library's."""

    def match(self, text: str) -> bool:
        return True


@pytest.mark.parametrize(
    "entry",
    [
        ("ignore", Matcher(), Warning, None, 0),
        ("ignore", re.compile(b"bytes"), Warning, None, 0),
        ("ignore", None, "no class", None, 0),
        ("ignore", None),
        None,
    ],
)
def test_a_filter_that_cannot_travel_is_left_out(entry: Any, own_filters: None) -> None:
    warnings.simplefilter("ignore")
    warnings.filters.append(entry)
    assert filters.current() == [("ignore", None, ("builtins", "Warning"), None, 0)]


def test_unchanged_surroundings_have_the_same_pickle(own_filters: None) -> None:
    from fifobatch.pickling import dumps

    warnings.filterwarnings("ignore", message="a message")
    warnings.simplefilter("error", OwnWarning)
    before = dumps(Context.now())
    with warnings.catch_warnings():
        assert dumps(Context.now()).data == before.data
        warnings.simplefilter("ignore")
        assert dumps(Context.now()).data != before.data
    assert dumps(Context.now()).data == before.data
    assert not any(name.partition(".")[0] == __name__ for name in before.modules)


def warn(index: int, text: str = "noisy", category: type[Warning] = UserWarning) -> int:
    warnings.warn(f"{text} {index}", category, stacklevel=2)
    return index


def test_the_filters_of_each_iter_hold_in_the_workers(own_filters: None) -> None:
    def outcome() -> Any:
        try:
            return sorted(sample for [sample] in loader)
        except UserWarning as error:
            return str(error)

    warnings.simplefilter("ignore")
    with FifoLoader(Calls(4, warn), num_workers=1, collate_fn=list, persistent_workers=True) as loader:
        assert outcome() == [0, 1, 2, 3]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="noisy 2")
            assert outcome() == "noisy 2"
        assert outcome() == [0, 1, 2, 3]
        warnings.simplefilter("error", OwnWarning)
        assert outcome() == [0, 1, 2, 3]
    for category in (OwnWarning, OwnWarning.Nested):
        warnings.resetwarnings()
        warnings.simplefilter("error", category)
        with pytest.raises(category, match="noisy"):
            load(Calls(4, warn, "noisy", category))


WARNING = """
import os, warnings
from fifobatch import FifoLoader
from probes import Calls, load

class OwnWarning(UserWarning): pass
category = OwnWarning
def noisy(index):
    warnings.warn("noisy thing", category)
    return index
{}
"""

SILENT = """
import types
module = types.ModuleType("not_to_be_had")
module.Gone = type("Gone", (UserWarning,), {"__module__": "not_to_be_had"})

for filters in (
    [("ignore",)],
    [("ignore", "noisy")],
    [("ignore", "", OwnWarning)],
    [("error", "", module.Gone), ("ignore", "", OwnWarning)],  # though a category is not to be had in the workers
):
    with warnings.catch_warnings():
        for each in filters:
            warnings.filterwarnings(*each)
        for _ in range(2):
            print(len(load(Calls(8, noisy))))
"""


def test_what_the_script_silences_is_silent_in_the_workers(run_script: RunScript) -> None:
    assert run_script(WARNING.format(SILENT)) == (0, "8\n" * 8, "")


def test_what_is_shown_once_is_shown_once_by_each_worker(run_script: RunScript) -> None:
    finished = run_script(
        WARNING.format("""
loader = FifoLoader(Calls(16, noisy), num_workers=2, persistent_workers=True)
for epoch in range(3):
    os.environ["EPOCH"] = str(epoch)  # what else changes for the workers does not have them forget
    assert len(list(loader)) == 16
""")
    )
    assert finished.returncode == 0
    lines = [line for line in finished.stderr.splitlines() if "OwnWarning: noisy thing" in line]
    assert 1 <= len(lines) <= 2, finished.stderr


def test_under_w_error_a_warning_is_the_batchs_error(run_script: RunScript) -> None:
    finished = run_script(
        WARNING.format("""
iterator = iter(FifoLoader(Calls(4, noisy), num_workers=2))
for _ in range(4):
    try:
        next(iterator)
    except OwnWarning as error:
        print(error)
print(list(iterator))
"""),
        PYTHONWARNINGS="error",
    )
    assert finished == (0, "noisy thing\n" * 4 + "[]\n", "")


# -- prints and logs --------------------------------------------------------------------------------------------------


def test_prints_appear_each_once_even_if_the_worker_is_killed(run_script: RunScript) -> None:
    finished = run_script(
        """
import os, signal
from fifobatch import FifoLoader, WorkerDiedError
from probes import Calls

def tell(index):
    print("sample", index)
    if index == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return index

assert len(list(FifoLoader(Calls(7, tell), num_workers=2))) == 7
print("between", flush=True)
try:
    for batch in FifoLoader(Calls(8, tell), num_workers=1):
        pass
except WorkerDiedError:
    pass
""",
        PYTHONUNBUFFERED="",
    )
    first, second = finished.stdout.split("between\n")
    assert sorted(first.splitlines()) == [f"sample {index}" for index in range(7)]
    assert second.splitlines() == [f"sample {index}" for index in [*range(8), 7, 7]]  # tried three times
    assert (finished.returncode, finished.stderr) == (0, "")


def test_what_an_installed_package_prints_when_it_is_imported_is_not_repeated_by_each_worker(
    run_script: RunScript, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "talkative.py").write_text("print('imported')\ndef same(index): return index\n")
    finished = run_script(
        f"""
import sys
sys.path.insert(0, {str(site)!r})
import talkative
from probes import Calls, load
assert len(load(Calls(8, talkative.same), num_workers=4)) == 8
""",
        PYTHONUNBUFFERED="",
    )
    assert finished == (0, "imported\n" * 2, "")  # here, and in the server


# -- others' pools, and others' packages ------------------------------------------------------------------------------


def test_lokys_reusable_executor_is_not_disturbed(run_script: RunScript) -> None:
    finished = run_script(
        """
import os
from loky import get_reusable_executor
from fifobatch import FifoLoader
from probes import Calls, processes

environment = dict(os.environ)

def pids():
    executor = get_reusable_executor(max_workers=2)
    assert list(executor.map(abs, range(-8, 0))) == list(range(8, 0, -1))
    return set(executor._processes)

before = pids()
with FifoLoader(Calls(8, processes), num_workers=2, collate_fn=list) as loader:
    iterator = iter(loader)
    next(iterator)
    assert pids() == before
    ours = {sample[0] for [sample] in iterator}
    assert not ours & before
    iterator = iter(loader)
    next(iterator)
    loader.close()
assert pids() == before
list(FifoLoader(Calls(8, processes), num_workers=2, collate_fn=list))
assert pids() == before
assert dict(os.environ) == environment
get_reusable_executor().shutdown()
print(len(before))
"""
    )
    assert finished == (0, "2\n", "")


def test_without_psutil(run_script: RunScript, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"  # so that the fork server looks there, too
    site.mkdir()
    (site / "psutil.py").write_text("raise ImportError('psutil is not there')")
    finished = run_script(
        f"""
import sys
sys.path.insert(0, {str(site)!r})
sys.modules["psutil"] = None
from fifobatch import FifoLoader, WorkerDiedError

class Dataset:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        try:
            import psutil
        except ImportError:
            return index
        raise AssertionError(psutil.__file__)

loader = FifoLoader(Dataset(), num_workers=2, persistent_workers=True)
for epoch in range(2):
    assert len(list(loader)) == 8
next(iter(loader))
loader.close()

class Deadly(Dataset):
    def __getitem__(self, index):
        import os
        os._exit(3)
try:
    list(FifoLoader(Deadly(), num_workers=2))
except WorkerDiedError as error:
    print("exit code 3" in str(error))
"""
    )
    assert finished == (0, "True\n", "")

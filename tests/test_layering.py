"""The shape of the source: which module may import which, and what must not be in any."""

import ast
import configparser
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import fifobatch

PACKAGE = Path(fifobatch.__file__).parent

# The data flow: each module imports only from those before it.
ORDER = [
    "errors",
    "exits",
    "plan",
    "window",
    "measures",
    "trace",
    "pickling",
    "readers",
    "arena",
    "board",
    "transport",
    "attempt",
    "fetch",
    "serve",
    "filters",
    "lane",
    "tasks",
    "worker",
    "elsewhere",
    "packages",
    "shipping",
    "server",
    "semaphore",
    "processes",
    "pool",
    "streams",
    "futures",
    "completion",
    "flight",
    "answers",
    "crew",
    "engine",
    "supervisor",
    "executor",
    "checks",
    "progress",
    "inprocess",
    "asynchronous",
    "device",
    "epoch",
    "alignment",
    "target",
    "pairing",
    "summary",
    "loader",
    "pairs",
    "timeline",
    "testing",
    "arguments",
    "__init__",
    "contenders",
    "gauges",
    "warm",
    "overlap",
    "workloads",
    "bench",
    "__main__",
]
MAX_LINES = 400

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def source(module: str) -> str:
    return (PACKAGE / f"{module}.py").read_text()


def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


def imports(module: str) -> Iterator[str]:
    """Yield the full names of what a module imports anywhere, also inside functions."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py, line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of_ours(module: str) -> set[str]:
    """Return the modules of ours that a module imports; ``__init__`` for the package itself."""
    ours = set()
    for name in imports(module):
        top, _, rest = name.partition(".")
        if top == "fifobatch":
            part = rest.partition(".")[0]
            ours.add(part if part in MODULES else "__init__")
    return ours


def places(module: str, found: Callable[[ast.AST], bool]) -> list[str]:
    return [f"{module}.py:{getattr(node, 'lineno', 0)}" for node in ast.walk(tree(module)) if found(node)]


def test_every_module_has_its_place_in_the_order():
    assert sorted(ORDER) == MODULES


def test_there_are_no_packages_below():
    assert [path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_a_module_imports_only_from_those_before_it():
    upward = {module: imports_of_ours(module) - {*ORDER[: ORDER.index(module)]} for module in MODULES}
    assert {module: names for module, names in upward.items() if names} == {}


def test_only_the_command_line_and_its_benchmark_import_the_package_itself():
    importers = {module for module in MODULES if "__init__" in imports_of_ours(module)}
    assert importers <= {"contenders", "workloads", "bench", "__main__"}


def test_what_tests_use_imports_nothing_of_ours():
    assert imports_of_ours("testing") == set()


def test_the_plan_and_the_window_know_of_no_processes():
    assert imports_of_ours("plan") == {"errors"}
    assert imports_of_ours("window") == {"errors"}
    for module in ("plan", "window"):
        tops = {name.partition(".")[0] for name in imports(module)}
        assert tops.isdisjoint({"multiprocessing", "concurrent", "threading", "subprocess", "queue", "loky", "time"})


def test_only_the_pool_imports_loky():
    for module in MODULES:
        of_loky = {name.rpartition(".")[0] for name in imports(module) if name.partition(".")[0] == "loky"}
        if module == "worker":
            assert of_loky <= {"loky.backend.resource_tracker"}
        elif module not in ("processes", "pool"):
            assert of_loky == set(), module


def test_nothing_sleeps():
    def sleeps(node: ast.AST) -> bool:
        return getattr(node, "attr", None) == "sleep" or (isinstance(node, ast.alias) and node.name == "sleep")

    # The datasets of the demonstration and of the benchmark are slow on purpose.
    slow = {"__main__", "overlap", "warm", "workloads"}
    assert [place for module in MODULES if module not in slow for place in places(module, sleeps)] == []


def test_nothing_has_a_finalizer_method():
    def finalizes(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef) and node.name == "__del__"

    assert [place for module in MODULES for place in places(module, finalizes)] == [], "use weakref.finalize"


def test_a_module_can_be_held_in_the_head():
    lines = {module: source(module).count("\n") for module in MODULES}
    assert {module: count for module, count in lines.items() if count > MAX_LINES} == {}


def test_a_module_says_what_it_is():
    for module in MODULES:
        docstring = ast.get_docstring(tree(module))
        assert docstring, module
        assert docstring.splitlines()[0][-1] in ".:", f"{module}: its first line is a sentence"


def test_a_module_is_named_after_what_it_does():
    assert {"utils", "util", "helpers", "common", "misc", "base", "core", "types"}.isdisjoint(MODULES)


def test_whatever_is_caught_broadly_is_raised_again_or_has_a_reason():
    for module in MODULES:
        tokens = tokenize.generate_tokens(io.StringIO(source(module)).readline)
        commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}

        def without_reason(node: ast.AST) -> bool:
            if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
                return False
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else set()
            broad = node.type is None or not caught.isdisjoint({"Exception", "BaseException"})
            return broad and node.lineno not in commented

        assert places(module, without_reason) == [], "why catch everything?"


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
    setup = configparser.ConfigParser()
    assert setup.read(PACKAGE.parent / "setup.cfg")
    assert "py.typed" in setup["options.package_data"]["fifobatch"].split()
    assert setup["options"]["packages"].split() == ["fifobatch"]

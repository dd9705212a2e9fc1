"""Everything that the README shows runs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from fifobatch import FifoLoader, errors

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Each example as a script of its own would be, one after another in one interpreter: torch's import is slow."""
    folder = tmp_path_factory.mktemp("readme")
    runner = "import sys\nfor number, text in enumerate(eval(sys.stdin.read())):\n"
    runner += "    exec(compile(text, f'example {number}', 'exec'), {'__name__': '__main__'})\n"
    runner += "    print('ran', number, flush=True)\n"
    return subprocess.run(
        [sys.executable, "-c", runner], input=repr(EXAMPLES), cwd=folder, capture_output=True, text=True, timeout=180
    )


def test_the_examples_run_as_scripts(script):
    assert script.returncode == 0, script.stderr
    assert re.findall(r"^ran (\d+)$", script.stdout, re.MULTILINE) == [str(number) for number in range(len(EXAMPLES))]
    assert len(EXAMPLES) >= 5


def test_what_is_printed_looks_like_what_is_shown(script):
    shown = re.search(r"^8 batches in .*?(?=\n```)", README, re.DOTALL | re.MULTILINE)[0]
    figures = re.compile(r"[\d.]+( m?s|%)")
    lines = figures.sub("N", script.stdout).splitlines()
    assert [line for line in figures.sub("N", shown).splitlines() if line not in lines] == []


def test_the_failures_that_are_shown_are_those_that_are_printed(script):
    shown = re.findall(r"^dataset\[.*", README, re.MULTILINE)
    assert len(shown) == 3
    assert sorted(re.findall(r"^dataset\[.*", script.stdout, re.MULTILINE)) == sorted(shown)


def test_the_arguments_that_are_explained_have_these_defaults():
    explained = dict(re.findall(r"^\| `(\w+)=(.*?)` \|", README, re.MULTILINE))
    parameters = inspect.signature(FifoLoader).parameters
    assert {name: eval(default) for name, default in explained.items()} == {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in inspect.signature(DataLoader).parameters
    }


def test_the_progress_bar_the_log_and_a_warning_are_all_that_goes_to_stderr(script):
    lines = [line for line in re.split(r"[\r\n]", script.stderr) if line.strip()]
    log = [line for line in lines if line.startswith("INFO")]
    (warning,) = [line for line in lines if "Warning: " in line]
    assert "UserWarning: left out of this epoch: 3 samples that failed; see loader.failures. " in warning
    bar = [line for line in lines if line not in [*log, warning]]
    assert bar
    assert all("batch" in line for line in bar), script.stderr
    assert "8/8" in bar[-1]

    records = [re.fullmatch(r"INFO from numbers, worker [01]: loading (\d)", line) for line in log]
    assert sorted(record[1] for record in records) == [str(index) for index in range(8)]


def test_the_table_of_errors_is_the_one_of_the_code():
    table = re.search(r"^FifobatchError \(RuntimeError\)\n(.*?)```", README, re.DOTALL | re.MULTILINE)[1]
    names = re.findall(r"-- (\w+)", table)
    assert sorted([*names, "FifobatchError"]) == [
        name for name in errors.__all__ if isinstance(getattr(errors, name), type)
    ]

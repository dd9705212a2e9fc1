"""The notebooks run from the first cell to the last, and their saved outputs are of what they show.

``python tests/test_notebooks.py`` runs them and saves what they show.
"""

import asyncio
import json
import os
import re
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from conftest import await_end
from nbclient import NotebookClient
from traitlets.config import Config

SECONDS = 240  # that a notebook may take
MARK = "FIFOBATCH_TEST_NOTEBOOK"
WIDGETS = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def run(path: Path, folder: Path) -> Any:
    """Run a copy of the notebook in ``folder``, and wait until every process of its kernel has ended.

    The kernel is this interpreter, whatever "python3" is elsewhere, and untouched by the user's own IPython profile.
    """
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    work, mark = folder / "work", uuid.uuid4().hex
    work.mkdir()
    config = Config()
    config.KernelSpecManager.kernel_dirs = [str(folder / "kernels")]
    config.KernelManager.connection_file = str(folder / "kernel.json")
    config.KernelManager.transport = "ipc"
    notebook = read(path)
    end = time.monotonic() + SECONDS
    client = NotebookClient(
        notebook,
        config=config,
        timeout_func=lambda cell: max(1, end - time.monotonic()),
        coalesce_streams=True,
        record_timing=False,
    )
    environment = os.environ | {"IPYTHONDIR": str(folder / "ipython"), MARK: mark}
    environment.pop("MPLBACKEND", None)
    asyncio.run(client.async_execute(cwd=str(work), env=environment))
    await_end(marked(mark))
    return tidy(notebook)


def marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            pass
    return found


def tidy(notebook: Any) -> Any:
    """Leave what is worth saving: progress bars as the text they end with, and no metadata of this machine."""
    widgets = notebook.metadata.get("widgets", {}).get(WIDGETS, {"state": {}})["state"]
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(VIEW, None)
            if view is not None:
                output.data["text/plain"] = bar_text(widgets, view["model_id"])
    return notebook


def bar_text(widgets: dict[str, Any], model: str) -> str:
    """Return tqdm's bar as it ended: an HBox of a text, the bar itself and a text."""
    parts = [widgets[child.removeprefix("IPY_MODEL_")]["state"] for child in widgets[model]["state"]["children"]]
    left, bar, right = parts
    blocks = "█" * round(20 * bar["value"] / bar["max"])
    text = f"{left['value']}|{blocks:20}|{right['value']}"
    return text.replace("\u2007", " ").replace("&lt;", "<")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook: Any) -> list[list[object]]:
    """Return what kinds of output each code cell has."""
    return [
        [output.get("name") or sorted(output.get("data", {})) or output.output_type for output in cell.outputs]
        for cell in code_cells(notebook)
    ]


def texts(notebook: Any) -> list[str]:
    """Return all text in the notebook; pictures are not text."""
    found = [json.dumps(notebook.metadata)]
    for cell in notebook.cells:
        found += [cell.source, json.dumps(cell.metadata)]
        for output in cell.get("outputs", []):
            data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
            found.append(json.dumps(output | {"data": data}))
    return found


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each_notebook
def test_runs_and_shows_what_is_saved(path: Path, tmp_path: Path) -> None:
    assert kinds(run(path, tmp_path)) == kinds(read(path))


@each_notebook
def test_saved_outputs_are_of_one_whole_run(path: Path) -> None:
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)


@each_notebook
def test_saved_outputs_have_no_errors_or_warnings(path: Path) -> None:
    kinds_saved = [kind for cell in kinds(read(path)) for kind in cell]
    assert "error" not in kinds_saved and "stderr" not in kinds_saved


@each_notebook
def test_saved_outputs_are_to_look_at_anywhere(path: Path) -> None:
    notebook = read(path)
    assert notebook == tidy(read(path)), "a widget, or metadata: run python tests/test_notebooks.py"


@each_notebook
def test_nothing_of_the_machine_is_saved(path: Path) -> None:
    machine = re.compile(r"/(work|tmp|root|home|Users|usr|opt|var|mnt)\b|site-packages|\b[A-Z]:\\\\", re.ASCII)
    assert [match for text in texts(read(path)) for match in machine.findall(text)] == []


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as directory:
            nbformat.write(run(notebook_path, Path(directory)), notebook_path)

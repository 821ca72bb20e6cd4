"""Progress bars and pictures in a real notebook: an executed one, with a kernel of its own."""

from pathlib import Path
from typing import Any

import pytest

REASON = "no {0} here: make test-peers installs it"
nbclient = pytest.importorskip("nbclient", reason=REASON.format("nbclient"))
nbformat = pytest.importorskip("nbformat", reason=REASON.format("nbformat"))
for name in ("ipykernel", "ipywidgets"):
    pytest.importorskip(name, reason=REASON.format(name))

SECONDS = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
BEGIN = """
import ckpt, torch
from tqdm.auto import tqdm

state = {f"w{at}": torch.ones(1000) for at in range(5)}
"""
CALL = """
with tqdm(total=20_000, unit="B", unit_scale=True) as bar:
    {}
bar.n
"""
CALLS = {
    "save": 'ckpt.save("a", state, progress=bar.update)',
    "background save": 'ckpt.save("b", state, progress=bar.update, blocking=False).wait()',
    "load": 'ckpt.load("a", state, progress=bar.update)',
    "conversion": 'ckpt.convert("a", "c.safetensors", progress=bar.update)',
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of a notebook's cells, by their names."""
    sources = {"begin": BEGIN}
    sources |= {title: CALL.format(call) for title, call in CALLS.items()}
    sources["handle"] = 'ckpt.save("d", state, blocking=False)'
    sources["checkpoint"] = 'ckpt.open("a")'
    cells = [nbformat.v4.new_code_cell(source) for source in sources.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    folder: Path = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()  # raises the error of a cell
    return {title: cell.outputs for title, cell in zip(sources, notebook.cells, strict=True)}


@pytest.mark.parametrize("call", CALLS)
def test_a_bar_in_a_cell_counts_to_the_end(executed: dict[str, Any], call: str) -> None:
    outputs = executed[call]
    assert [out for out in outputs if WIDGET in out.get("data", {})], outputs
    assert not [out for out in outputs if out.output_type in ("stream", "error")], outputs
    assert outputs[-1].data["text/plain"] == "20000"


@pytest.mark.parametrize("cell", ["handle", "checkpoint"])
def test_a_handle_and_a_checkpoint_are_shown_as_html(executed: dict[str, Any], cell: str) -> None:
    (output,) = executed[cell]
    assert output.data["text/html"].strip()

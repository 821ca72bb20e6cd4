"""The boxes in the page of `ckpt inspect --html`, and the reads of another job, against Python."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.layout import Box, Layout, Mesh, Replicate, Shape, Shard
from tools.page import boxes_of

LayoutsOf = Callable[[Shape], st.SearchStrategy[Layout]]
SCRIPT = Path(__file__).parents[2] / "tools" / "page" / "layout.js"
PROGRAM = """
const layout = require(process.argv[1]);
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("line", (line) => {
  const { boxes, box, job } = JSON.parse(line), shared = {};
  const pieces = boxes.flatMap(([lo, hi, ranks]) =>
    ranks.map((rank) => ({ rank, box: { lo, hi } })));
  const add = (piece, elements) => { shared[piece.rank] = (shared[piece.rank] || 0) + elements; };
  layout.overlaps(layout.indexed(pieces), box, add);
  const found = layout.jobPieces(job.shape, job.ranks, job.dim)
    .map((one) => [one.rank, one.box.lo, one.box.hi]);
  console.log(JSON.stringify({ shared, job: found }));
});
"""
Ask = Callable[[object], dict[str, object]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Asks a process of node that has the script."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run the page's JavaScript")
    command = [node, "-e", PROGRAM, str(SCRIPT)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def answer(question: object) -> dict[str, object]:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            found: dict[str, object] = json.loads(stdout.readline())
            return found

        yield answer
        stdin.close()
        process.wait(10)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_overlaps_and_the_pieces_of_a_job_are_those_of_python(
    ask: Ask, shapes: st.SearchStrategy[Shape], layouts_of: LayoutsOf, data: st.DataObject
) -> None:
    _check(ask, data.draw(shapes.flatmap(layouts_of)), data)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(data=st.data())
def test_thousands_of_layouts_are_those_of_python(
    ask: Ask, shapes: st.SearchStrategy[Shape], layouts_of: LayoutsOf, data: st.DataObject
) -> None:
    _check(ask, data.draw(shapes.flatmap(layouts_of)), data)


def _check(ask: Ask, layout: Layout, data: st.DataObject) -> None:
    lo = tuple(data.draw(st.integers(0, size)) for size in layout.shape)
    hi = tuple(data.draw(st.integers(a, b)) for a, b in zip(lo, layout.shape, strict=True))
    ranks, dim = data.draw(st.integers(1, 9)), data.draw(st.none() | st.integers(0, 3))
    job = {"shape": layout.shape, "ranks": ranks, "dim": dim}
    boxes = boxes_of(layout)
    found = ask({"boxes": boxes, "box": {"lo": lo, "hi": hi}, "job": job})
    box, shared = Box(lo, hi), dict[str, int]()
    for rank in layout.mesh.ranks():
        for piece in layout.pieces(rank):
            if both := (piece.box & box).numel:
                shared[str(rank)] = shared.get(str(rank), 0) + both
    assert found["shared"] == shared
    assert sorted([rank, lo, hi] for lo, hi, ranks in boxes for rank in ranks) == sorted(
        [rank, list(piece.box.lo), list(piece.box.hi)]
        for rank in layout.mesh.ranks()
        for piece in layout.pieces(rank)
    )
    is_cut = dim is not None and dim < len(layout.shape)
    placement = Shard(dim) if is_cut and dim is not None else Replicate()
    target = Layout(layout.shape, Mesh.grid(("job",), (ranks,)), (placement,))
    assert found["job"] == [
        [rank, list(piece.box.lo), list(piece.box.hi)]
        for rank in range(ranks)
        for piece in target.pieces(rank)
    ]

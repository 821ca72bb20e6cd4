"""The layout algebra of the page of `ckpt inspect --html`, against that of Python."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.layout import Box, Layout, Shape
from tools.page.described import mesh_json, placement_json

LayoutsOf = Callable[[Shape], st.SearchStrategy[Layout]]
SCRIPT = Path(__file__).parents[2] / "tools" / "page" / "layout.js"
PROGRAM = """
const layout = require(process.argv[1]);
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("line", (line) => {
  const { stored, box } = JSON.parse(line);
  const pieces = layout.pieces(stored), shared = {};
  const add = (piece, elements) => { shared[piece.rank] = (shared[piece.rank] || 0) + elements; };
  layout.overlaps(layout.indexed(pieces), box, add);
  const told = pieces.map((one) => [one.rank, one.box.lo, one.box.hi]);
  console.log(JSON.stringify({ pieces: told, shared }));
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


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_and_overlaps_are_those_of_python(
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
    box = Box(lo, hi)
    placements = [placement_json(each) for each in layout.placements]
    stored = {"shape": layout.shape, "mesh": mesh_json(layout.mesh), "placements": placements}
    found = ask({"stored": stored, "box": {"lo": lo, "hi": hi}})
    expected: list[list[object]] = []
    shared: dict[str, int] = {}
    for rank in sorted(layout.mesh.ranks()):
        for piece in layout.pieces(rank):
            expected.append([rank, list(piece.box.lo), list(piece.box.hi)])
            both = (piece.box & box).numel
            if both:
                shared[str(rank)] = shared.get(str(rank), 0) + both
    assert found["pieces"] == expected
    assert found["shared"] == shared

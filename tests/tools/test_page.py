"""The pages of `ckpt inspect --html` and `ckpt diff --html`: their data, and their safety."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt
from formats.catalog import Catalog, FileRecord, TensorRecord, TensorRef
from formats.dtypes import dtype_named
from sharding.layout import Layout, Mesh, Shard
from tests.formats.test_matrix import SOURCES, tensors
from tools.exit_codes import ExitCode
from tools.page import describe, page


class Reading(HTMLParser):
    """The texts of script elements, and whatever would reach for a network or run from a tag."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.data, self.wrong, self._in = [], "", [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self._in = tag if tag != "script" else found.get("type", "script")
        self.wrong += [(tag, name) for name in found if name == "src" or name.startswith("on")]
        self.wrong += [(tag, "link")] if tag in ("link", "img", "iframe", "base", "form") else []

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "application/json":
            self.data += data
        elif self._in == "script":
            self.scripts.append(data)


def data_of(path):
    return json.loads(Reading(Path(path).read_text()).data)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    state = {"model": {"a.w": torch.randn(6, 4), "b": torch.ones(3)}, "step": 3, "lr": 0.1}
    ckpt.save(tmp_path / "step-3", state, metadata={"by": "a test"})
    return tmp_path / "step-3"


def test_the_data_of_a_page_is_that_of_the_checkpoint(run, saved, tmp_path):
    ended = run("inspect", saved, "--html", tmp_path / "out.html")
    assert (ended.code, ended.out) == (ExitCode.FINE, f"{tmp_path}/out.html\n")
    data = data_of(tmp_path / "out.html")
    names = {name: (dtype, shape, nbytes) for name, dtype, shape, nbytes, _ in data["tensors"]}
    assert names == {"model.a.w": ("F32", [6, 4], 96), "model.b": ("F32", [3], 12)}
    assert data["values"] == [["step", "3"], ["lr", "0.1"]]
    assert data["metadata"]["by"] == "a test"
    assert [row[3] for row in data["files"]] == [None, 0]
    assert sum(row[1] for row in data["files"]) == sum(f.stat().st_size for f in saved.iterdir())


@pytest.mark.parametrize("source", SOURCES)
def test_every_readable_format_has_pages_with_all_its_tensors(run, source, tmp_path):
    name, write = SOURCES[source]
    write(tmp_path / name)
    assert run("inspect", tmp_path / name, "--html", tmp_path / "out.html").code == ExitCode.FINE
    rows = {row[0]: (row[2], row[3]) for row in data_of(tmp_path / "out.html")["tensors"]}
    wanted = {key: (list(each.shape), each.nbytes) for key, each in tensors().items()}
    assert rows == wanted
    ended = run("diff", tmp_path / name, tmp_path / name, "--html", tmp_path / "diff.html")
    assert ended.code == ExitCode.FINE
    assert run("plan", tmp_path / name, "--world-size", "3").code == ExitCode.FINE


def test_pieces_of_a_format_without_layouts_are_listed_with_their_bytes(run, tmp_path):
    save_file({"w": torch.arange(4.0), "v": torch.zeros(2, 2)}, tmp_path / "m.safetensors")
    run("inspect", tmp_path / "m.safetensors", "--html", tmp_path / "out.html")
    data = data_of(tmp_path / "out.html")
    raw = (tmp_path / "m.safetensors").read_bytes()
    ((file, at, lo, hi),) = next(row[4] for row in data["tensors"] if row[0] == "w")
    assert (file, lo, hi) == (0, [0], [4])
    assert torch.frombuffer(bytearray(raw[at : at + 16]), dtype=torch.float32).tolist() == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]


def test_pieces_above_the_limit_are_counted_and_not_listed(tmp_path):
    save_file({"w": torch.arange(4.0), "v": torch.zeros(2)}, tmp_path / "m.safetensors")
    with ckpt.opening.sources.open_source(tmp_path / "m.safetensors") as source:
        data = describe(source.url, source.catalog, [], shown_pieces=1)
    assert [len(row[4]) for row in data["tensors"]] == [1, 0]
    assert data["pieces_left_out"] == 1
    ckpt.save(tmp_path / "a", {"w": torch.arange(4.0), "v": torch.zeros(2)})
    with ckpt.opening.sources.open_source(tmp_path / "a") as source:
        data = describe(source.url, source.catalog, [], shown_pieces=1)
    assert [len(boxes) for _, boxes in data["layouts"]] == [1, 0]
    assert (data["layouts"][0][0], data["pieces_left_out"]) == ("whole on rank 0", 1)


def test_a_chain_of_incremental_saves_is_followed(run, tmp_path):
    state = {"w": torch.zeros(1000), "step": 0}
    ckpt.save(tmp_path / "a", state)
    ckpt.save(tmp_path / "b", {**state, "step": 1}, base=tmp_path / "a")
    ckpt.save(tmp_path / "c", {**state, "step": 2}, base=tmp_path / "b")
    run("inspect", tmp_path / "c", "--html", tmp_path / "out.html")
    assert data_of(tmp_path / "out.html")["chain"] == ["a"]


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a\u2028b",
    "@DATA@",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_never_becomes_markup(run, tmp_path, name):
    ckpt.save(tmp_path / "a", {name: torch.ones(2), "text": name}, metadata={name: name})
    run("inspect", tmp_path / "a", "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    found = Reading(text)
    assert found.wrong == []
    assert len(found.scripts) == 2
    assert data_of(tmp_path / "out.html")["tensors"][0][0] == name
    assert "alert(1)" not in "".join(found.scripts)


def test_the_page_runs_its_own_scripts_alone(run, saved, tmp_path):
    run("inspect", saved, "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http:" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)


@pytest.mark.thorough
def test_the_page_of_1024_ranks_has_each_layout_once():
    mesh, kind = Mesh.grid(("dp",), (1024,)), dtype_named("BF16", "w")
    tensors = {
        f"layers.{at}.w": TensorRecord(
            f"layers.{at}.w", (4096, 64), kind, [], Layout((4096, 64), mesh, (Shard(0),))
        )
        for at in range(2000)
    }
    files = tuple(FileRecord(f"{7:016x}-{rank:05d}.safetensors", 9) for rank in range(1024))
    tree = {name: TensorRef(name) for name in tensors}
    data = describe("s3://run/step", Catalog("ckpt", tensors, tree, files), [])
    boxes = [[[4 * rank, 0], [4 * rank + 4, 64], [rank]] for rank in range(1024)]
    assert data["layouts"] == [["dp:1024=S(0)", boxes]]
    assert data["files"][1023][3] == 1023
    assert len(page(data)) < 400_000


def test_a_page_of_differences_has_them_with_histograms(run, tmp_path):
    ckpt.save(tmp_path / "a", {"w": torch.zeros(6), "x": torch.ones(1), "step": 1})
    w = torch.tensor([0.0, 0.002, 0.0031, -0.5, float("nan"), -0.0])
    ckpt.save(tmp_path / "b", {"w": w, "y": torch.ones(1), "step": 2})
    ended = run("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "out.html")
    assert ended.code == ExitCode.DIFFERENT
    told = data_of(tmp_path / "out.html")["differences"]
    assert (told["only_a"], told["only_b"]) == (["x"], ["y"])
    (changed,) = told["tensors"]
    assert changed["histogram"] == [["0", 1], ["1e-3", 2], ["1e-1", 1], ["inf", 1]]
    assert changed["max_abs"] == changed["largest"] == "inf"
    assert [value["name"] for value in told["values"]] == ["step"]


def test_a_page_shows_small_differences_with_the_digits_of_the_terminal(run, tmp_path):
    ckpt.save(tmp_path / "a", {"w": torch.zeros(2)})
    ckpt.save(tmp_path / "b", {"w": torch.tensor([4e-4, 1e-13])})
    ended = run("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "out.html")
    assert "the largest difference is 0.0004 (" in ended.out
    (changed,) = data_of(tmp_path / "out.html")["differences"]["tensors"]
    assert changed["largest"] == "0.0004"


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_a_page_replaces_a_page_and_no_other_file(run, saved, tmp_path, command):
    out, checkpoints = tmp_path / "out.html", [saved] * (1 if command == "inspect" else 2)
    out.touch()  # as mktemp does
    for _ in range(2):
        assert run(command, *checkpoints, "--html", out).code == ExitCode.FINE
        assert data_of(out)["url"] == str(saved)
    manifest = saved / "manifest.json"
    before = manifest.read_bytes()
    ended = run(command, *checkpoints, "--html", manifest)
    assert (ended.code, ended.out) == (ExitCode.EXISTS, "")
    assert f"{manifest} is no page, and was not overwritten" in ended.err
    assert manifest.read_bytes() == before
    for place in (saved, f"{saved}/", ""):
        assert run(command, *checkpoints, "--html", place).code == ExitCode.USAGE


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_page_replaces_neither_a_pipe_nor_a_broken_link(run, saved, tmp_path, make):
    make(tmp_path / "out.html")
    assert run("inspect", saved, "--html", tmp_path / "out.html").code == ExitCode.EXISTS
    assert not (tmp_path / "out.html").is_file()


def test_a_page_of_a_path_that_is_no_text_is_written(run, saved, tmp_path):
    saved.rename(tmp_path / "odd\udcff")
    ended = run("inspect", tmp_path / "odd\udcff", "--html", tmp_path / "out.html")
    assert ended.code == ExitCode.FINE
    assert r"<title>odd\udcff<" in (tmp_path / "out.html").read_text()


def test_a_page_is_of_the_whole_checkpoint(run, saved, tmp_path):
    for more in (["model"], ["--json"]):
        ended = run("inspect", saved, *more, "--html", tmp_path / "out.html")
        assert ended.code == ExitCode.USAGE
        assert "--html shows the whole checkpoint" in ended.err
    assert not (tmp_path / "out.html").exists()

"""What a user meets first: argument order, option words, reprs, arrays, checkpoints left open."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import ckpt
from ckpt import arguments
from ckpt.converting.target_formats import Format
from ckpt.match.match_builder import Casting
from ckpt.saving.background import SaveHandle
from ckpt.stores.store import Store
from sharding.kind import Kind

ROOT = Path(ckpt.__file__).parent.parent
HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with a name that would be HTML and a command of the terminal."""
    state = {"w": torch.arange(6.0).reshape(2, 3), HOSTILE: torch.ones(2, dtype=torch.bfloat16)}
    ckpt.save(tmp_path / "c", state)
    return tmp_path / "c"


@pytest.mark.parametrize(("call", "torch_name"), [(ckpt.save, "save"), (ckpt.load, "load")])
def test_arguments_in_torch_s_order_are_told_the_right_call(
    call: Callable[..., Any], torch_name: str, tmp_path: Path
) -> None:
    with pytest.raises(ckpt.ArgumentTypeError) as raised:
        call({"step": 1}, tmp_path / "c")
    place = repr(str(tmp_path / "c"))
    assert str(raised.value) == (
        f"ckpt.{torch_name} takes the place first, torch.{torch_name} the state: call "
        f"ckpt.{torch_name}({place}, state), not ckpt.{torch_name}(state, {place})"
    )
    assert isinstance(raised.value, TypeError)
    assert not (tmp_path / "c").exists()


def test_a_place_that_is_none_is_an_error_that_names_its_type() -> None:
    with pytest.raises(ckpt.ArgumentTypeError, match="the first argument is a bytes"):
        ckpt.save(b"c", {"step": 1})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (arguments.FormatName, [one.value for one in Format]),
        (arguments.KindName, [one.value for one in Kind]),
        (arguments.CastingRule, [one.value for one in Casting]),
    ],
)
def test_the_words_of_an_option_are_those_that_are_understood(
    words: Any, values: list[str]
) -> None:
    assert list(get_args(words)) == values


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (ckpt.save, "staging"),
        (ckpt.save, "when_busy"),
        (ckpt.save, "replicas"),
        (ckpt.save, "compress"),
        (ckpt.load, "replicas"),
        (ckpt.load, "casting"),
        (ckpt.load, "dtype"),
        (ckpt.load, "verify"),
        (ckpt.state_dict.convert, "to"),
        (ckpt.convert, "to"),
        (ckpt.convert, "kind"),
        (ckpt.convert, "dtype"),
    ],
)
def test_another_word_for_an_option_is_an_error_that_quotes_it(
    call: Callable[..., Any], option: str, saved: Path
) -> None:
    given: dict[str, Any] = {option: "sideways"}
    if call is ckpt.save and option == "staging":
        given["blocking"] = False
    if call is ckpt.convert and option == "kind":
        given["world_size"] = 2
    first: tuple[Any, ...] = (f"{saved}-2", {})
    if call is ckpt.convert:
        first = (str(saved), f"{saved}-2")
    elif call is ckpt.state_dict.convert:
        first = ({},)
    with pytest.raises(ckpt.ArgumentError, match="sideways"):
        call(*first, **given)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("include", 1),
        ("include", ["w", re.compile("w")]),
        ("exclude", b"w"),
        ("rename", "w=v"),
        ("rename", {"w": None}),
        ("rename", {1: "w"}),
        ("rename", lambda name: None),
        ("fallback", None),
        ("fallback", 3),
        ("fallback", ["a", 3]),
        ("dtype", "float16"),
    ],
    ids=str,
)
def test_an_option_of_another_type_is_an_error_that_quotes_it(
    option: str, value: Any, saved: Path
) -> None:
    target: dict[str, Any] = {"w": None}
    call = partial(ckpt.read, saved) if option == "dtype" else partial(ckpt.load, saved, target)
    with pytest.raises(ckpt.ArgumentTypeError, match=option):
        call(**{option: value})
    assert target == {"w": None}


def test_every_public_module_names_what_is_public() -> None:
    """The modules of `ckpt` that `ckpt.__init__` takes names from, and those a user imports."""
    tree = ast.parse((ROOT / "ckpt" / "__init__.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported -= {"__future__", "typing", "ckpt"}
    public = {"ckpt.state_dict", "sharding.composable", "sharding.wrap", "sharding.comm_hooks"}
    public |= {"sharding.sharded_grad_scaler", "sharding.policies", "sharding.errors"}
    for module in sorted((imported | public) - {"ckpt.installation", "sharding.supported"}):
        source = (ROOT / (str(module).replace(".", "/") + ".py")).read_text()
        assert re.search(r"^__all__ = \[", source, re.MULTILINE), module


def test_numpy_takes_a_handle_as_an_array(saved: Path) -> None:
    with ckpt.open(saved) as checkpoint:
        array = np.asarray(checkpoint["w"])
        assert array.dtype == np.float32
        assert array.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert np.asarray(checkpoint["w"], dtype=np.int64).dtype == np.int64
        with pytest.raises(ckpt.ArgumentTypeError, match="numpy has no bfloat16; cast the tensor"):
            np.asarray(checkpoint[HOSTILE])
        with pytest.raises(ckpt.ArgumentError, match="reading makes a copy"):
            checkpoint["w"].__array__(copy=False)


def test_a_repr_says_what_is_there_and_shows_no_control_characters(saved: Path) -> None:
    with ckpt.open(saved) as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint {saved}: ckpt, 2 tensors, 28 B>"
        assert repr(checkpoint["w"]) == "TensorHandle('w', shape=(2, 3), dtype=float32)"
        assert "\x1b" not in repr(checkpoint[HOSTILE])
    assert repr(checkpoint) == "<Checkpoint closed: ckpt, 2 tensors, 28 B>"


def test_a_notebook_shows_hostile_names_as_text(saved: Path) -> None:
    with ckpt.open(saved) as checkpoint:
        for shown in (checkpoint, checkpoint[HOSTILE]):
            html = shown._repr_html_()
            assert "<script>" not in html
            assert "\x1b" not in html
            assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in html
        assert "<td>w</td><td>float32</td><td>[2, 3]</td><td>24 B</td>" in checkpoint._repr_html_()


def test_a_notebook_shows_the_first_tensors_of_many(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "c", {f"w{number}": torch.ones(1) for number in range(60)})
    with ckpt.open(tmp_path / "c") as checkpoint:
        html = checkpoint._repr_html_()
    assert html.count("<tr>") == 51
    assert html.endswith("</table>and 10 more")


def test_a_save_handle_shows_how_far_it_is() -> None:
    handle = SaveHandle(f"memory://me:secret@run/{HOSTILE}", 2000, 0.0)
    shown = "memory://***@run/<script>alert(1)</script>\\x1b[2J"
    assert repr(handle) == f"<SaveHandle of {shown}: in flight>"
    handle.follow(lambda: 500)
    html = handle._repr_html_()
    assert "<script>" not in html
    assert html.endswith("<progress value=500 max=2000></progress> 500 B of 2.00 kB")
    handle.mark_finished(None)
    assert repr(handle) == f"<SaveHandle of {shown}: done>"


LEFT_OPEN = """
import atexit, gc, os, sys

def still_open():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    found = [os.readlink(link) for link in links if os.path.islink(link)]
    print([link for link in found if link.endswith(".safetensors")])

atexit.register(still_open)  # called after whatever is registered later
import ckpt
gc.disable()

class Node: ...

cycle = Node()
cycle.itself, cycle.handle = cycle, ckpt.open(sys.argv[1])["w"]
kept = ckpt.open(sys.argv[1])
print(float(kept["w"][0, 1]), float(cycle.handle[0, 2]))
del cycle
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
@pytest.mark.thorough
def test_a_checkpoint_left_open_is_closed_when_the_interpreter_ends_without_a_word(
    saved: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", LEFT_OPEN, str(saved)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("1.0 2.0\n[]\n", "")


def test_a_checkpoint_that_nobody_refers_to_is_closed(saved: Path) -> None:
    checkpoint = ckpt.open(saved)
    close = checkpoint._close
    assert close.alive
    del checkpoint
    assert not close.alive


def test_what_stands_before_a_store_answers_only_for_what_a_store_has() -> None:
    """Else a renamed method of stores passes by it in silence."""
    fronts = {
        "ckpt.removing.gc": ("_Seen", {"of"}),
        "ckpt.opening.sources": ("_ReplacementGuard", set()),
        "formats.storage": ("MadeFiles", {"in_place", "server_path"}),
    }
    for module, (name, others) in fronts.items():
        own = vars(getattr(importlib.import_module(module), name))
        unknown = {each for each in own if not each.startswith("_")} - others - {*dir(Store)}
        assert not unknown, (module, unknown)

"""docs/dcp.md: its tables name everything that torch has, and all is as they say."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import ckpt
import ckpt.dcp as dcp

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the tables are of torch 2.13"
)
TEXT = (Path(__file__).parents[2] / "docs" / "dcp.md").read_text()
PACKAGE = torch_dcp.__name__


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of a table's rows."""
    part = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield cells


def named(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


NAMES = {name: row[1] for row in rows("Names") for name in named(row[0])}
MODULES = {name: row[1] for row in rows("Modules") for name in named(row[0])}
ARGUMENTS = {(named(row[0])[0], named(row[1])[0]): row[2] for row in rows("Arguments")}


def public(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_every_name_of_torch_is_in_the_table_and_is_what_it_says() -> None:
    assert NAMES.keys() == public(torch_dcp).keys() | {"CkptStorageReader", "CkptStorageWriter"}
    for name, value in public(torch_dcp).items():
        is_torch_s = getattr(dcp, name) is value
        assert NAMES[name] == ("same" if is_torch_s else "better"), name
    assert set(dcp.__all__) <= NAMES.keys()


def test_every_module_of_torch_with_names_is_in_the_table_and_is_what_it_says() -> None:
    folder = Path(torch_dcp.__file__).parent  # type: ignore[arg-type]
    found = {path.stem for path in folder.glob("[a-z]*.py")}
    modules = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in found}
    assert MODULES.keys() == {name for name in found if getattr(modules[name], "__all__", [])}
    for name, verdict in MODULES.items():
        theirs, ours = modules[name], importlib.import_module(f"ckpt.dcp.{name}")
        assert getattr(dcp, name) is ours
        equal = [getattr(ours, each) is getattr(theirs, each) for each in theirs.__all__]
        assert verdict == ("same" if all(equal) else "better"), name


def test_modules_that_torch_keeps_private_are_attributes() -> None:
    theirs = {name for name, value in vars(torch_dcp).items() if isinstance(value, ModuleType)}
    for name in theirs:
        assert isinstance(getattr(dcp, name), ModuleType)
    logger: Any = importlib.import_module("ckpt.dcp.logger")
    assert logger._dcp_logger is torch_dcp.logger._dcp_logger


def test_private_names_of_torch_s_modules_are_found_as_well(tmp_path: Path) -> None:
    for name in MODULES:
        theirs, ours = (importlib.import_module(f"{p}.{name}") for p in (PACKAGE, "ckpt.dcp"))
        private = {each for each in vars(theirs) if re.match("_[a-zA-Z]", each)}
        assert not (lacking := {each for each in private if not hasattr(ours, each)}), lacking
    dcp.save({"a": {"w": torch.ones(2), "n": 3}, "b": 1}, checkpoint_id=tmp_path)
    loading: Any = importlib.import_module("ckpt.dcp.state_dict_loader")
    with pytest.warns(UserWarning, match="single process"):
        found = loading._load_state_dict_from_keys({"a"}, checkpoint_id=tmp_path)
    assert torch.equal(found["a"].pop("w"), torch.ones(2))
    assert found == {"a": {"n": 3}}


def test_every_argument_of_torch_is_in_the_table_and_is_taken() -> None:
    kinds = {name for name, _ in ARGUMENTS}
    own = {name for name, verdict in NAMES.items() if verdict == "better"} - {
        "CkptStorageReader",
        "CkptStorageWriter",
    }
    assert kinds == own
    for name in kinds:
        theirs = inspect.signature(getattr(torch_dcp, name)).parameters
        assert [argument for kind, argument in ARGUMENTS if kind == name] == [*theirs], name
        ours = inspect.signature(getattr(dcp, name)).parameters
        assert [*ours] == [*theirs], name
        assert [each.kind for each in ours.values()] == [each.kind for each in theirs.values()]


REFUSED = {
    ("save", "use_collectives"): lambda: dcp.save({}, checkpoint_id="x", use_collectives=False),
    ("async_save", "use_collectives"): lambda: dcp.async_save(
        {}, checkpoint_id="x", use_collectives=False
    ),
    ("save_state_dict", "coordinator_rank"): lambda: dcp.save_state_dict(
        {}, dcp.FileSystemWriter("x"), coordinator_rank=1
    ),
    ("load_state_dict", "coordinator_rank"): lambda: dcp.load_state_dict(
        {}, dcp.FileSystemReader("x"), coordinator_rank=1
    ),
    ("FileSystemWriter", "_extensions"): lambda: dcp.FileSystemWriter("x", _extensions=[object()]),
    ("FileSystemReader", "_extension_registry"): lambda: dcp.FileSystemReader("x", object()),
}


@pytest.mark.filterwarnings("ignore:(save|load)_state_dict is deprecated")
def test_every_refused_argument_is_an_error_that_names_it() -> None:
    assert REFUSED.keys() == {key for key, verdict in ARGUMENTS.items() if verdict == "refused"}
    for (_, argument), call in REFUSED.items():
        with pytest.raises(ckpt.ArgumentError, match=argument):
            call()
    assert not Path("x").exists()


def test_deprecated_functions_do_what_the_new_ones_do(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    with pytest.warns(FutureWarning, match="call save instead"):
        dcp.save_state_dict({"w": torch.ones(2)}, dcp.FileSystemWriter(tmp_path))
    with pytest.warns(FutureWarning, match="call load instead"):
        dcp.load_state_dict(state, dcp.FileSystemReader(tmp_path))
    assert torch.equal(state["w"], torch.ones(2))


def test_a_call_without_a_place_or_with_no_dict_says_so() -> None:
    with pytest.raises(ckpt.ArgumentError, match="no checkpoint_id and no storage_writer"):
        dcp.save({})
    with pytest.raises(ckpt.ArgumentError, match="no checkpoint_id and no storage_reader"):
        dcp.load({})
    with pytest.raises(ckpt.ArgumentError, match="pass one, or checkpoint_id="):
        dcp.save({}, storage_writer=dcp.CkptStorageWriter())
    with pytest.raises(ckpt.ArgumentTypeError, match="state_dict is a list; give a dict"):
        dcp.save([], checkpoint_id="x")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="nor has torch's"):
        dcp.nothing  # noqa: B018


@pytest.mark.parametrize("module", ["hf_storage", "quantized_hf_storage"])
def test_a_module_that_a_version_of_torch_lacks_can_be_imported_and_says_so(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = importlib.import_module(f"ckpt.dcp.{module}")
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.{module}", None)
    assert not hasattr(ours, "__path__")  # `from ckpt.dcp.hf_storage import ...` asks for it
    with pytest.raises(AttributeError, match="this version of torch has no Unknown: "):
        _ = ours.Unknown

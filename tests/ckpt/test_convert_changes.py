"""A conversion chooses, renames, casts and reshapes on the way, plans, and reads back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.converting import convert as converting
from ckpt.errors import CorruptError, ExistsError, UnsupportedError
from sharding.errors import ArgumentError

PLACES = {
    "ckpt": "c",
    "safetensors": "c.safetensors",
    "hf": "hf",
    "torch": "c.pt",
    "dcp": "dcp",
    "gguf": "c.gguf",
    "npz": "c.npz",
}


def training_state() -> dict[str, Any]:
    embed = torch.arange(12.0).reshape(4, 3)
    return {
        "model": {
            "embed.weight": embed,
            "norm.weight": torch.full((3,), 0.1),
            "head.weight": embed,
            "w.0": torch.arange(6.0).reshape(2, 3),
            "w.1": torch.arange(6.0).reshape(2, 3) + 6,
        },
        "optim": {
            "state": {"embed.weight": {"exp_avg": torch.ones(4, 3)}},
            "param_groups": [{"lr": 1}],
        },
        "step": 3,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "run", training_state())
    return tmp_path / "run"


STACK = """
[[rule]]
from = "w.{row}"
to = "w"
rearrange = "i j -> j row i"
"""


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    (tmp_path / "stack.toml").write_text(STACK)
    return tmp_path / "stack.toml"


@pytest.mark.parametrize("to", PLACES)
def test_every_format_takes_changed_tensors_and_is_read_back(
    saved: Path, mapping: Path, tmp_path: Path, to: Any
) -> None:
    target = tmp_path / PLACES[to]
    report = ckpt.convert(
        saved,
        target,
        to=to,
        part="model",
        mapping=mapping,
        rename={"*.weight": "net.*"},
        verify=True,
    )
    has_ties = to not in ("gguf", "npz")
    assert report.tensors == (3 if has_ties else 4)
    found: Any = ckpt.open(target)
    ties = {"net.head": "net.embed"} if has_ties else {}
    assert set(found) == {"net.embed", "net.norm", "w", "net.head"}
    state = training_state()["model"]
    stacked = torch.stack([state["w.0"], state["w.1"]]).permute(2, 0, 1)
    assert torch.equal(found["w"][...], stacked)
    assert found.catalog.aliases == ties
    back = tmp_path / "back"
    inverse = ckpt.read_mapping(mapping).inverse()
    ckpt.convert(target, back, mapping=inverse, rename={"net.*": "*.weight"}, verify=True)
    assert ckpt.diff(saved, back, select="model").equal


def test_a_conversion_in_memory_order_reads_the_same(saved: Path, tmp_path: Path) -> None:
    ckpt.convert(saved, tmp_path / "a.pt", select="optim")
    ckpt.convert(saved, tmp_path / "b.pt", part="optimizer")
    assert ckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt").equal
    assert list(ckpt.open(tmp_path / "b.pt")) == ["state.embed.weight.exp_avg"]


def test_the_one_model_in_a_top_entry_is_the_model(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": []}
    state = {"app": {"model": {"w": torch.ones(1)}, "optim": optimizer}}  # DCP's own recipe
    torch.save(state, tmp_path / "s.pt")
    ckpt.convert(tmp_path / "s.pt", tmp_path / "m.safetensors", part="model")
    assert list(ckpt.open(tmp_path / "m.safetensors")) == ["w"]


@pytest.mark.parametrize(
    ("state", "part", "said"),
    [
        (
            {"net": {"w": torch.ones(1)}, "o": {"state": {}, "param_groups": []}},
            "model",
            "has none of them; name its model with select=; its top entries are net, o",
        ),
        (
            {
                "app": {"model": {"w": torch.ones(1)}, "o": {"state": {}, "param_groups": []}},
                "ema": {"model": {"w": torch.ones(1)}},
            },
            "model",
            "name its model with select=app.model; its top entries are app, ema",
        ),
        (
            {"models": [{"w": torch.ones(1)}, {"w": torch.ones(1)}]},
            "model",
            "it has 2 models; name one with select='models.0'; its top entries are models",
        ),
        (
            {"model": {"w": torch.ones(1)}},
            "optimizer",
            "the checkpoint has none; name it with select=",
        ),
        (
            {"o": [{"state": {}, "param_groups": []}, {"state": {}, "param_groups": []}]},
            "optimizer",
            "the checkpoint has 2 optimizers: o.0, o.1",
        ),
    ],
)
def test_a_part_without_one_place_is_an_error(
    state: dict[str, Any], part: Any, said: str, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "s.pt")
    with pytest.raises(ArgumentError) as raised:
        ckpt.convert(tmp_path / "s.pt", tmp_path / "out", part=part)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("state", "beside"),
    [
        (training_state(), ("optim", "step")),
        (
            {
                "models": [training_state()["model"]],
                "optimizers": [training_state()["optim"]],
            },
            ("optimizers",),
        ),
        (
            {
                "rng": {"cpu": torch.ones(2)},
                "loss": torch.tensor(0.5),
                "state_dict": training_state()["model"],
                "optim": training_state()["optim"],
            },
            ("loss", "optim", "rng"),
        ),
        ({"app": {"model": training_state()["model"], "step": 3}}, ("app.step",)),
        ({"net": training_state()["model"], "step": 3}, ("step",)),
    ],
)
def test_a_hugging_face_folder_gets_the_model_beside_an_optimizer(
    state: dict[str, Any], beside: tuple[str, ...], tmp_path: Path
) -> None:
    ckpt.save(tmp_path / "run", state)
    report = ckpt.convert(tmp_path / "run", tmp_path / "hf", to="hf", verify=True)
    assert sorted(report.beside) == sorted(beside)
    assert set(ckpt.open(tmp_path / "hf")) == set(training_state()["model"])


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}}, "model, ema"),
        ({"ema": torch.ones(2), "state_dict": {"w": torch.ones(2)}}, "ema, state_dict"),
        ({"models": [{"w": torch.ones(2)}, {"w": torch.ones(2)}]}, r"models\.0, models\.1"),
        (
            {"app": {"model": {"w": torch.ones(2)}, "d": {"w": torch.ones(2)}}},
            r"app\.model, app\.d",
        ),
    ],
    ids=str,
)
def test_two_entries_that_may_be_the_model_are_an_error_with_the_option(
    state: dict[str, Any], named: str, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "s.pt")
    with pytest.raises(ArgumentError, match=rf"hold weights \({named}\).* name it with select='"):
        ckpt.convert(tmp_path / "s.pt", tmp_path / "hf", to="hf")
    assert not (tmp_path / "hf").exists()
    assert ckpt.convert(tmp_path / "s.pt", tmp_path / "hf", to="hf", select="").tensors == 2


def test_who_names_tensors_or_everything_gets_them_in_a_hugging_face_folder(
    saved: Path, tmp_path: Path
) -> None:
    whole = ckpt.convert(saved, tmp_path / "c.safetensors")
    assert (whole.tensors, whole.beside, whole.prefix) == (5, (), "model")
    report = ckpt.convert(saved, tmp_path / "a", to="hf", select="")
    assert (report.tensors, report.beside, report.prefix) == (5, (), "")
    ckpt.save(tmp_path / "nest", {"model": {"w": torch.ones(2)}, "layers": [torch.ones(1)]})
    ckpt.convert(tmp_path / "nest", tmp_path / "d", to="hf", select="")
    assert ckpt.convert(tmp_path / "nest", tmp_path / "d.pt").prefix == ""
    assert set(ckpt.open(tmp_path / "d")) == {"model.w", "layers.0"}
    ckpt.convert(saved, tmp_path / "b", to="hf", include="model.w*", rename={"model": "net"})
    assert set(ckpt.open(tmp_path / "b")) == {"net.w.0", "net.w.1"}


def test_a_checkpoint_without_an_optimizer_is_all_model(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    ckpt.convert(tmp_path / "m.safetensors", tmp_path / "out", part="model")
    assert list(ckpt.open(tmp_path / "out")) == ["w"]


def test_the_changes_come_in_one_order(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    report = ckpt.convert(
        saved,
        target,
        select="model",
        include=["*.weight", "w.0"],
        exclude=r"/norm\..*/",
        rename={"w.0": "first", "embed": "e"},
        prefix="net",
        dtype={"net.e.*": "float16", "*": "bfloat16"},
    )
    found = load_file(target)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "net.e.weight": torch.float16,
        "net.first": torch.bfloat16,
    }
    assert report.plan is not None
    assert {one.name: one.sources for one in report.plan.tensors} == {
        "net.e.weight": ("model.embed.weight",),
        "net.first": ("model.w.0",),
        "net.head.weight": ("model.head.weight",),
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rename": {"modle": "m"}}, "rename: 'modle' matches no name; there are model"),
        ({"rename": {"a.*": "m"}}, "'a.*' cannot become 'm'"),
        ({"rename": {"step": "model.w.0"}}, "model.w.0 and step both get the name model.w.0"),
        ({"dtype": {"*.bias": "float32"}}, "dtype: '*.bias' matches no name"),
        ({"dtype": {"*": "int8"}}, "cannot be cast to 'int8'"),
        (
            {"dtype": torch.float16},
            "cast to torch.float16; give dtype= as one of the names",
        ),
        ({"dtype": {"*": torch.float16}}, "cannot be cast to torch.float16; give dtype="),
        ({"parameters": {"heads": 4}}, "parameters={'heads': 4}: no mapping has parameters"),
        (
            {"mapping": "llama-hf-torchtitan", "parameters": {"head": 4}},
            "parameters={'head': 4}: the mappings have half, heads, kv_heads, two",
        ),
        (
            {"mapping": "llama-hf-torchtitan", "parameters": {"heads": 0}},
            "heads is 0; give a number of at least 1",
        ),
        ({"include": "/(/"}, "'/(/' is no regular expression"),
        ({"part": "modle"}, "part is 'modle'; it can be 'model' or 'optimizer'"),
        ({"part": "model", "select": "model"}, "give one of the two"),
        ({"mapping": "nothing.toml"}, "nothing.toml: no mapping file"),
        ({"mapping": "llama-hf-megatron"}, "has no rule for model.embed.weight, model.head.weight"),
    ],
)
def test_a_change_without_a_meaning_is_an_error_and_writes_nothing(
    saved: Path, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError) as raised:
        ckpt.convert(saved, tmp_path / "out", **arguments)
    assert said in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", PLACES)
def test_a_dry_run_has_the_plan_and_writes_nothing(saved: Path, tmp_path: Path, to: Any) -> None:
    target = tmp_path / PLACES[to]
    there = set(tmp_path.iterdir())
    planned = ckpt.convert(saved, target, to=to, part="model", dtype="float16", dry_run=True)
    assert set(tmp_path.iterdir()) == there
    assert ckpt.convert(saved, target, to=to, part="model", dtype="float16") == planned
    plan = planned.plan
    assert plan is not None
    ties = {"head.weight": "embed.weight"} if to not in ("gguf", "npz") else {}
    assert (plan.read_bytes, plan.written_bytes) == (4 * 27, 2 * (27 if ties else 39))
    assert {one.name: one.tied_to for one in plan.tensors if one.tied_to} == ties
    with pytest.raises(ExistsError):
        ckpt.convert(saved, target, to=to, part="model", dry_run=True)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_result_that_differs_from_its_source_is_found(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    """The disk changes a byte after the result is written."""
    target = tmp_path / "m.safetensors"
    real = converting.open_source

    @contextmanager
    def damaging(url: Any, options: Any = None) -> Iterator[Any]:
        if url == str(target):
            data = bytearray(target.read_bytes())
            data[-1] ^= 1
            target.write_bytes(data)
        with real(url, options) as opened:
            yield opened

    monkeypatch.setattr(converting, "open_source", damaging)
    with pytest.raises(
        CorruptError, match="element 5 has other bytes when the result is read back"
    ):
        ckpt.convert(saved, target, part="model", dtype=dtype, verify=True)


def test_a_comparison_changes_the_names_of_a(saved: Path, mapping: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.pt"
    ckpt.convert(saved, target, part="model", mapping=mapping, rename={"*.weight": "net.*"})
    changes: dict[str, Any] = {
        "mapping": mapping,
        "rename": {"*.weight": "net.*"},
        "select": "model",
    }
    found = ckpt.diff(saved, target, **changes)
    assert found.equal
    assert found.equal_tensors == ("net.embed", "net.norm", "w")
    assert ckpt.diff(saved, target, select="model").only_b == (
        "net.embed",
        "net.norm",
        "w",
        "net.head",
    )
    with pytest.raises(ArgumentError, match=r"neither .* has anything below 'nothing'"):
        ckpt.diff(
            saved, target, **changes | {"select": "nothing", "mapping": (), "rename": {"*": "*"}}
        )


def test_tied_names_get_one_dtype(tmp_path: Path) -> None:
    shared = torch.ones(3)
    ckpt.save(tmp_path / "a", {"embed": shared, "head": shared, "norm": torch.ones(2)})
    with pytest.raises(ArgumentError, match="head is tied to embed, and dtype= makes it bfloat16"):
        ckpt.convert(tmp_path / "a", tmp_path / "b", dtype={"head": "bfloat16"})
    assert not (tmp_path / "b").exists()
    wanted: dict[str, Any] = {"embed": "bfloat16", "norm": None, "*": "float16"}
    ckpt.convert(tmp_path / "a", tmp_path / "b", dtype=wanted)
    found = ckpt.read(tmp_path / "b")
    assert found["head"] is found["embed"]
    assert (found["head"].dtype, found["norm"].dtype) == (torch.bfloat16, torch.float32)
    ckpt.convert(tmp_path / "a", tmp_path / "c", dtype={"head": "bfloat16"}, exclude="embed")
    assert ckpt.read(tmp_path / "c")["head"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("stored", "dtype", "value"),
    [
        ("float32", "float16", -65520.0),
        ("float64", "float32", 1e39),
        ("float32", "bfloat16", 3.4e38),
    ],
)
def test_a_number_beyond_the_range_of_its_new_dtype_is_an_error(
    tmp_path: Path, stored: str, dtype: Any, value: float
) -> None:
    tensor = torch.tensor([1.0, float("inf"), float("nan"), value], dtype=getattr(torch, stored))
    ckpt.save(tmp_path / "a", {"mask": tensor, "fits": tensor[:3].clone()})
    with pytest.raises(UnsupportedError, match=f"mask: .* is beyond the range of {dtype}"):
        ckpt.convert(tmp_path / "a", tmp_path / "b", dtype=dtype)
    assert not (tmp_path / "b").exists()
    ckpt.convert(tmp_path / "a", tmp_path / "b", dtype={"mask": None, "*": dtype})
    found = ckpt.read(tmp_path / "b")
    assert str(found["fits"].dtype) == f"torch.{dtype}"
    assert found["fits"].isinf().tolist() == [False, True, False]
    assert torch.equal(found["mask"].nan_to_num(), tensor.nan_to_num())


@pytest.mark.parametrize(
    ("name", "fits", "beyond"),
    [
        ("float8_e4m3fn", 464.0, [465.0, -1e30, float("inf")]),
        ("float8_e5m2", 61430.0, [61440.0, -1e30]),
        ("float8_e4m3fnuz", 247.0, [248.0, -1e30, float("-inf")]),
        ("float8_e5m2fnuz", 61430.0, [61440.0, -1e30, float("inf")]),
    ],
)
def test_8_bit_floats_get_no_number_beyond_their_range(
    tmp_path: Path, name: Any, fits: float, beyond: list[float]
) -> None:
    dtype = getattr(torch, name)
    for number, value in enumerate(beyond):
        stored = tmp_path / str(number)
        ckpt.save(
            stored, {"s": torch.tensor([fits, float("nan"), -fits]), "w": torch.tensor([1, value])}
        )
        with pytest.raises(
            UnsupportedError, match=f"w: its element .* the range of {name}; .* by a"
        ):
            ckpt.convert(stored, tmp_path / "b", dtype=name)
        with pytest.raises(
            UnsupportedError, match=f"w: its element .* the range of {name}; .* leave"
        ):
            ckpt.read(stored, dtype=dtype)
    most = torch.finfo(dtype).max
    ckpt.convert(stored, tmp_path / "b", dtype={"w": None, "*": name})
    found: Any = ckpt.read(tmp_path / "b")["s"]
    again: Any = ckpt.read(stored, include="s", dtype=dtype)
    assert found.float().nan_to_num(0).tolist() == [most, 0, -most]
    assert torch.equal(again["s"].view(torch.uint8), found.view(torch.uint8))

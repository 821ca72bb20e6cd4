"""Checkpoints that older versions wrote are opened, value for value (see tests/compat/make.py)."""

import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import pytest
import torch
from torch import nn

import ckpt

KEPT = Path(__file__).parents[1] / "compat"
VERSION_1, VERSION_2 = KEPT / "v1", KEPT / "v2"
EVERY = [f"{path.parent.name}/{path.name}" for path in sorted(KEPT.glob("v*/*"))]


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1/8, 2/8, ..."""
    return (torch.arange(math.prod(shape)) / 8).reshape(shape).to(dtype)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_checkpoint_of_version_1_has_the_values_it_was_saved_with(codec: str) -> None:
    state: Any = ckpt.read(VERSION_1 / codec)
    model = state["model"]
    assert list(model) == ["embed", "head", "wide", "norm", "large"]
    assert model["head"] is model["embed"]
    for name, shape in {"embed": (5, 4), "wide": (2, 3), "norm": (4,)}.items():
        assert model[name].shape == shape
        assert (model[name] == 1.5).all()
    assert model["norm"].dtype == torch.bfloat16
    assert torch.equal(model["large"], ramp(258, 256))

    assert list(state["optim"]["state"]) == ["embed", "wide", "norm"]
    for number, (name, entries) in enumerate(state["optim"]["state"].items()):
        assert entries["step"] == 1
        assert torch.equal(entries["exp_avg"], torch.full_like(model[name], number + 0.25))
        assert not entries["exp_avg_sq"].any()
    (group,) = state["optim"]["param_groups"]
    assert group["params"] == ["embed", "wide", "norm"]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.9, 0.999), 0.01)

    types = state["types"]
    for name in ("float64", "float32", "float16", "bfloat16", "complex64", "complex128"):
        assert torch.equal(types[name], ramp(3, dtype=getattr(torch, name))), name
    for name in ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"):
        assert types[name].dtype == getattr(torch, name)
        assert types[name].tolist() == [0, 1, 2], name
    assert types["bool"].tolist() == [False, True, True]
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        assert types[name].dtype == getattr(torch, name)
        assert types[name].float().tolist() == [0.5, 1.0, 2.0], name
    assert torch.equal(types["scalar"], torch.tensor(7))
    assert types["empty"].shape == (0, 3)

    values = state["values"]
    assert (values["step"], values["big"], values["nothing"]) == (100, 2**70, None)
    assert repr(values["floats"]) == "[0.1, inf, -inf, -0.0]"
    assert values["truth"] == (True, False)
    assert (values["text"], values["bytes"]) == ("é\n", b"\x00\xff")
    assert (values["complex"], values["dtype"]) == (1 - 2j, torch.bfloat16)
    assert values["numbered"] == {1: "one", None: "none"}
    assert values["like a tag"] == {"$tensor": 1}


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_checkpoint_of_version_1_tells_how_it_was_divided(codec: str) -> None:
    with ckpt.open(VERSION_1 / codec) as checkpoint:
        assert checkpoint.metadata["run"] == "compat"
        assert checkpoint.metadata["world_size"] == "2"
        assert str(checkpoint["model.embed"].layout) == "dp:2=S(0)"
        assert str(checkpoint["model.large"].layout) == "world:2=split"
        assert checkpoint["model.large"][257, 253:].tolist() == [8255.625, 8255.75, 8255.875]


class Model(nn.Module):
    """The same names, nothing sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(5, 4))
        self.head = self.embed
        self.wide = nn.Parameter(torch.zeros(2, 3))
        self.norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("large", torch.zeros(258, 256))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_training_goes_on_from_a_checkpoint_of_version_1(codec: str) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt.load(
        VERSION_1 / codec,
        {"model": model, "optim": optimizer},
        exclude=["types.*", "values.*"],
    )
    assert (model.wide == 1.5).all()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (optimizer.state[model.wide]["exp_avg"] == 1.25).all()


@pytest.mark.parametrize("kept", EVERY)
def test_every_kept_checkpoint_is_sound_and_can_be_converted(kept: str, tmp_path: Path) -> None:
    report = ckpt.verify(KEPT / kept)
    assert report.sound
    assert report.notes == ()
    ckpt.convert(KEPT / kept, tmp_path / "now")
    assert ckpt.diff(KEPT / kept, tmp_path / "now").equal


def test_there_is_a_checkpoint_of_every_version() -> None:
    versions = {name: b'"version":' + name[1:].encode() + b"," for name in ("v1", "v2", "v3")}
    for name, text in versions.items():
        heads = [path.read_bytes()[:80] for path in KEPT.glob(f"{name}/*/manifest.json")]
        assert any(text in head for head in heads), name
    assert {path.name for path in KEPT.glob("v*")} == set(versions)


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_of_version_3_has_the_values_it_was_saved_with(step: int) -> None:
    state: Any = ckpt.read(KEPT / "v3" / f"typed-{step}")
    assert torch.equal(state["w"], ramp(40, 9))
    assert state["step"] == step
    values = state["values"]
    zone = timezone(timedelta(hours=-5, minutes=-30), "here")
    assert values["sets"] == [{3, "a", (1, None)}, frozenset({1.5, b"x"}), {frozenset()}]
    assert [type(each) for each in values["sets"]] == [set, frozenset, set]
    assert repr(values["queues"]) == "[deque([1, {'a': {2}}]), deque([1], maxlen=3)]"
    assert repr(values["bytes"]) == r"bytearray(b'a\x00')"
    assert repr(values["bounds"]) == "(range(1, 9, 2), slice(None, 3, None), Ellipsis)"
    assert values["paths"] == [Path("/a/b"), PurePosixPath("c"), PureWindowsPath("d:/e")]
    moment = datetime(2024, 2, 29, 1, 2, 3, 4, zone, fold=1)
    assert repr(values["moments"]) == repr([moment, datetime(1, 1, 1)])
    days = [date(2024, 2, 29), time(1, 2, 3, 4, timezone.utc), timedelta(-1, 2, 3), zone]
    assert repr(values["days"]) == repr(days)
    assert repr(values["numbers"]) == repr([Decimal("1.10"), Fraction(-1, 3), UUID(int=7)])
    assert values["devices"] == [torch.device("cpu"), torch.device("cuda", 1)]
    with ckpt.open(KEPT / "v3" / f"typed-{step}") as checkpoint:
        assert list(checkpoint.catalog.bases) == ["typed-1"] * (step - 1)


CHAINS = ("raw", "zstd", "delta")


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_of_version_2_has_the_values_it_was_saved_with(chain: str, step: int) -> None:
    state: Any = ckpt.read(VERSION_2 / f"{chain}-{step}")
    assert list(state) == ["frozen", "long", "near", "step"]
    assert torch.equal(state["frozen"], ramp(40, 9))
    assert torch.equal(state["long"][:-1], ramp(400, 100)[:-1])
    assert (state["long"][-1] == step).all()
    near = ramp(900).bfloat16()
    near[:50] += step
    assert torch.equal(state["near"], near)
    assert state["step"] == step
    with ckpt.open(VERSION_2 / f"{chain}-{step}") as checkpoint:
        assert str(checkpoint["long"].layout) == "dp:2=S(0)"
        assert checkpoint["long"][399, 98:].tolist() == [step, step]
        assert checkpoint["long"][398, 99:].tolist() == [39899 / 8]


@pytest.mark.parametrize("chain", CHAINS)
def test_a_checkpoint_of_version_2_refers_to_where_the_bytes_lie(chain: str) -> None:
    first, second, third = ([], [f"{chain}-1"], [f"{chain}-1"])
    for step, bases in ((1, first), (2, second), (3, third)):
        with ckpt.open(VERSION_2 / f"{chain}-{step}") as checkpoint:
            assert list(checkpoint.catalog.bases) == bases
    text = b"".join(path.read_bytes() for path in (VERSION_2 / f"{chain}-3").glob("*.safetensors"))
    assert b"__borrowed__" in text
    assert (b"__deltas__" in text) == (chain == "delta")


@pytest.mark.parametrize("chain", CHAINS)
def test_training_goes_on_from_a_checkpoint_of_version_2(chain: str) -> None:
    target = {
        "frozen": torch.zeros(40, 9),
        "long": torch.zeros(400, 100),
        "near": torch.zeros(900, dtype=torch.bfloat16),
        "step": 0,
    }
    ckpt.load(VERSION_2 / f"{chain}-3", target)
    assert torch.equal(target["frozen"], ramp(40, 9))  # type: ignore[arg-type]
    assert target["step"] == 3

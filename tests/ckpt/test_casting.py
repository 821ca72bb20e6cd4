"""Which dtypes may become which when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt
from ckpt.errors import UnsupportedError
from ckpt.state.memory import CHECKED_ELEMENTS, copy_in_range
from formats.dtypes import DTYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real discards"),
]

FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex128", "complex64", "complex32")
WIDER = {
    *(("int8", wider) for wider in ("int16", "int32", "int64")),
    *(("int16", wider) for wider in ("int32", "int64")),
    ("int32", "int64"),
    *(("uint8", wider) for wider in ("uint16", "uint32", "uint64", "int16", "int32", "int64")),
    *(("uint16", wider) for wider in ("uint32", "uint64", "int32", "int64")),
    *(("uint32", wider) for wider in ("uint64", "int64")),
}
HERE = tuple(dtype.torch_name for dtype in DTYPES if hasattr(torch, dtype.torch_name))
"""An old torch lacks some: 2.6 has no float8_e8m0fnu and no float4_e2m1fn_x2."""
SMALL = tuple(name for name in HERE if name.startswith("float8"))
ALLOWED = {
    *((source, target) for source in (*FLOATS, *SMALL) for target in FLOATS),
    *((source, target) for source in COMPLEX for target in COMPLEX),
    *WIDER,
    *((name, name) for name in HERE),
}
PACKED = "float4_e2m1fn_x2"


def ones(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    nbytes = torch.empty((), dtype=dtype).element_size()
    if name == PACKED or name.startswith("float8"):
        return torch.full((2 * nbytes,), 0x38, dtype=torch.uint8).view(dtype)
    return torch.ones(2, dtype=torch.int8).to(dtype)


def through_a_file(
    folder: Path, source: dict[str, Any], target: dict[str, Any], **how: str
) -> None:
    if not (folder / "manifest.json").exists():
        ckpt.save(folder, source)
    ckpt.load(folder, target, **how)  # type: ignore[arg-type]


def in_memory(folder: Path, source: dict[str, Any], target: dict[str, Any], **how: str) -> None:
    ckpt.state_dict.load(source, target, **how)  # type: ignore[arg-type]


WAYS = {"ckpt.load": through_a_file, "ckpt.state_dict.load": in_memory}


@pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("wanted", HERE)
def test_a_dtype_of_the_target_takes_only_what_it_can_hold(
    tmp_path: Path, load: Callable[..., None], wanted: str
) -> None:
    source = {name: ones(name) for name in HERE}
    refused = {name for name in HERE if (name, wanted) not in ALLOWED}
    target = {name: torch.zeros_like(ones(wanted)) for name in HERE}
    with pytest.raises(ckpt.MismatchError) as caught:
        load(tmp_path, source, target, dtype="target")
    assert {one.name for one in caught.value.differences} == refused
    assert not any(tensor.view(torch.uint8).any() for tensor in target.values())
    assert "casting='unsafe'" in str(caught.value) or wanted == PACKED
    fitting = {name: target[name] for name in HERE if name not in refused}
    load(
        tmp_path,
        {name: source[name] for name in fitting},
        fitting,
        dtype="target",
        **({"exclude": sorted(refused)} if load is through_a_file else {}),
    )
    for name, tensor in fitting.items():
        assert torch.equal(
            tensor.view(torch.uint8), source[name].to(tensor.dtype).view(torch.uint8)
        )


@pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)
def test_an_unsafe_cast_is_made_where_it_is_asked_for_by_name(
    tmp_path: Path, load: Callable[..., None]
) -> None:
    source = {
        "float": torch.tensor([1.75, -2.5]),
        "long": torch.tensor([2**40 + 3]),
        "wave": torch.tensor([1 + 2j]),
        "flag": torch.tensor([True, False]),
    }
    target = {
        "float": torch.zeros(2, dtype=torch.int32),
        "long": torch.zeros(1, dtype=torch.int16),
        "wave": torch.zeros(1),
        "flag": torch.zeros(2),
    }
    load(tmp_path, source, target, dtype="target", casting="unsafe")
    assert [tensor.tolist() for tensor in target.values()] == [[1, -2], [3], [1.0], [1.0, 0.0]]


@pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dtype": "target", "casting": "safe"}, "casting is one of same_kind, unsafe, not 'safe'"),
        ({"casting": "unsafe"}, "pass dtype='target' as well"),
        ({"dtype": "float32"}, "dtype is 'target' or None"),
    ],
)
def test_a_casting_that_is_none_is_an_error(
    tmp_path: Path, load: Callable[..., None], how: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load(tmp_path, {"w": torch.ones(1)}, {"w": torch.zeros(1)}, **how)


def test_a_module_in_half_precision_refuses_integers_for_its_weights(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"weight": torch.ones(2, 2, dtype=torch.int64), "bias": torch.ones(2)})
    module = nn.Linear(2, 2).half()
    with pytest.raises(ckpt.MismatchError, match="weight: the checkpoint has dtype int64"):
        ckpt.load(tmp_path, module, dtype="target")


def test_an_array_of_numpy_is_cast_by_the_same_rule(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": np.arange(3.0)})
    array = np.zeros(3, np.float32)
    ckpt.load(tmp_path, {"a": array}, dtype="target")
    assert array.tolist() == [0, 1, 2]
    with pytest.raises(ckpt.MismatchError, match="the target has int64"):
        ckpt.load(tmp_path, {"a": np.zeros(3, np.int64)}, dtype="target")


@pytest.mark.parametrize("load", [through_a_file, in_memory])
@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (1e5, "float32", "float16"),
        (-1e300, "float64", "float32"),
        (3.4e38, "float32", "bfloat16"),
        (1e30, "bfloat16", "float16"),
        (1e300j, "complex128", "complex64"),
    ],
)
def test_a_number_beyond_the_range_of_the_target_is_an_error_unless_all_casts_are_allowed(
    tmp_path: Path, load: Callable[..., None], value: complex, source: str, target: str
) -> None:
    saved = torch.zeros(3, dtype=getattr(torch, source))
    saved[1] = value
    wanted = getattr(torch, target)
    with pytest.raises(ckpt.CkptError, match=f"w: its element .* beyond the range of {target}"):
        load(tmp_path / "c", {"w": saved}, {"w": torch.zeros(3, dtype=wanted)}, dtype="target")
    cast = {"w": torch.zeros(3, dtype=wanted)}
    load(tmp_path / "c", {"w": saved}, cast, dtype="target", casting="unsafe")
    assert torch.equal(cast["w"], saved.to(wanted))


def test_infinity_and_nan_are_cast_as_they_are(tmp_path: Path) -> None:
    saved = torch.tensor([float("inf"), -float("inf"), float("nan"), 65504.0])
    ckpt.save(tmp_path / "c", {"w": saved})
    target = torch.zeros(4, dtype=torch.float16)
    ckpt.load(tmp_path / "c", {"w": target}, dtype="target")
    assert torch.equal(target[:2], saved[:2].half())
    assert bool(target[2].isnan())
    assert target[3] == 65504.0


@pytest.mark.skipif(PACKED not in HERE, reason="torch lacks the dtype")
@pytest.mark.parametrize("how", [{}, {"dtype": "target"}])
def test_packed_floats_fill_a_strided_target_of_their_dtype(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    codes = torch.arange(12, dtype=torch.uint8).view(4, 3)
    ckpt.save(tmp_path, {"w": codes.view(getattr(torch, PACKED))})
    filled = torch.zeros(3, 4, dtype=torch.uint8)
    ckpt.load(tmp_path, {"w": filled.view(getattr(torch, PACKED)).t()}, **how)
    assert torch.equal(filled.t(), codes)


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [0, CHECKED_ELEMENTS, 2 * CHECKED_ELEMENTS - 1])
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_number_out_of_range_is_found_in_each_part_of_a_tensor(
    lost: int, is_strided: bool
) -> None:
    source = torch.zeros(2 * CHECKED_ELEMENTS)
    target = torch.ones(len(source), dtype=torch.float16)
    into = target.view(2, -1).t() if is_strided else target
    copy_in_range("w", source.view(into.shape), into, "load it elsewhere")
    assert not target.any()
    source[lost] = -1e5
    with pytest.raises(UnsupportedError, match="its element -100000 is beyond the range of"):
        copy_in_range("w", source.view(into.shape), into, "load it elsewhere")


def test_a_save_stores_floats_in_another_dtype_and_leaves_the_state(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("ids", torch.arange(3))
    model.register_buffer("turned", torch.randn(3, 2).double().T)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ckpt.save(tmp_path / "all", {"model": model, "lr": 0.1}, dtype=torch.bfloat16)
    found: Any = ckpt.read(tmp_path / "all")
    assert found["lr"] == 0.1
    for name, tensor in before.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert found["model"][name].dtype == wanted.dtype
        assert found["model"][name].equal(wanted)
        assert model.state_dict()[name].equal(tensor)
    state = {"model": model, "optim": optim}
    with pytest.raises(ckpt.ArgumentError, match=r"counts of steps; leave it out.*'model.\*'"):
        ckpt.save(tmp_path / "some", state, dtype="bfloat16")
    ckpt.save(tmp_path / "some", state, dtype={"*.weight": "float64", "model.*": "float16"})
    found = ckpt.read(tmp_path / "some")
    assert found["model"]["weight"].dtype == torch.float64
    assert found["model"]["bias"].dtype == torch.float16
    assert found["optim"]["state"]["bias"]["step"].dtype == torch.float32


def test_a_save_refuses_a_dtype_that_loses_a_number_or_has_no_meaning(tmp_path: Path) -> None:
    tied = torch.ones(2)
    state = {"a": torch.tensor([1.0, 1e6]), "b": tied, "c": tied}
    cases: list[tuple[Any, type[Exception], str]] = [
        ("float16", UnsupportedError, "a: its element 1e\\+06 is beyond the range of float16"),
        ("int8", ckpt.ArgumentError, "cannot be cast to 'int8'"),
        ({"x.*": "bfloat16"}, ckpt.ArgumentError, "'x.\\*' matches no name"),
        ({"b": "bfloat16"}, ckpt.ArgumentError, "c and b are one tensor, and get two dtypes"),
    ]
    for dtype, error, told in cases:
        with pytest.raises(error, match=told):
            ckpt.save(tmp_path / "a", state, dtype=dtype)
        assert not (tmp_path / "a").exists()


def save_cast(folder: str) -> list[str]:
    """Ranks with parts of a tensor, names of their own, and different dtypes."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    part = DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Shard(0)])
    state = {"w": part, f"stage{rank}": torch.ones(2)}
    ckpt.save(f"{folder}/a", state, dtype={"w": "bfloat16", "stage1": "float16"})
    try:
        ckpt.save(f"{folder}/b", state, dtype="bfloat16" if rank else None)
    except ckpt.StateError as error:
        return [str(error)]
    return []


def test_all_ranks_save_in_one_dtype_each_name_of_any_rank(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    told = clusters(2).run(save_cast, str(tmp_path))
    assert all("different arguments" in text for texts in told for text in texts)
    assert [len(texts) for texts in told] == [1, 1]
    found: Any = ckpt.read(tmp_path / "a")
    assert found["w"].equal(torch.tensor([1.0] * 3 + [2.0] * 3).bfloat16())
    assert (found["stage0"].dtype, found["stage1"].dtype) == (torch.float32, torch.float16)

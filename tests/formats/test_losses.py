"""Sources by targets: each weight is in the target for an independent reader, or named as lost.

The readers are torch.load, safetensors, numpy and DCP, never ours. A source holds the tensors that
torch says it holds. `test_matrix.py` has the same for a training without odd values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ckpt
from ckpt.arguments import FormatName
from formats.errors import UnsupportedError

Weights = dict[str, torch.Tensor]
TARGETS = tuple(name for name in get_args(FormatName) if name != "gguf")
"""gguf holds few dtypes, and refuses the others by name: tests/formats/test_gguf.py.
tests/peers/test_gguf.py has the same table for it, beside its own library."""


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


class Parts:
    """An object whose tensors are deeper than its attributes."""

    def __init__(self) -> None:
        self.held = {"deep": [torch.ones(3)]}


def plain(path: Path) -> Weights:
    torch.save(net().state_dict(), path)
    return dict(net().state_dict())


def tied(path: Path) -> Weights:
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": weight, "b": weight}, path)
    return {"a": weight, "b": weight}


def dtypes(path: Path) -> Weights:
    names = ("float64", "bfloat16", "float8_e4m3fn", "float8_e5m2fnuz", "complex64", "uint16")
    state = {name: torch.arange(8).to(getattr(torch, name)).reshape(2, 4) for name in names}
    torch.save(state, path)
    return state


def complex_128(path: Path) -> Weights:
    state = {"w": torch.ones(3, dtype=torch.complex128), "v": torch.ones(2)}
    torch.save(state, path)
    return state


def conjugate(path: Path) -> Weights:
    state = {"w": torch.tensor([1 + 2j, 3 - 1j]).conj(), "v": torch.ones(2)}
    torch.save(state, path)
    return state


def negative(path: Path) -> Weights:
    state = {"w": torch.tensor([1 + 2j]).conj().imag, "v": torch.ones(2)}
    assert state["w"].is_neg()
    torch.save(state, path)
    return state


def meta(path: Path) -> Weights:
    state = {"w": torch.ones(2, device="meta"), "v": torch.ones(2)}
    torch.save(state, path)
    return state


def odd_keys(path: Path) -> Weights:
    state = {"by_dtype": {torch.float32: torch.ones(2)}, "v": torch.ones(2)}
    torch.save(state, path)
    return {"by_dtype": torch.ones(2), "v": torch.ones(2)}


def in_an_object(path: Path) -> Weights:
    torch.save({"parts": Parts(), "v": torch.ones(2)}, path)
    return {"parts": torch.ones(3), "v": torch.ones(2)}


def big_endian(path: Path) -> Weights:
    torch.save({"w": np.arange(3, dtype=">f4"), "v": torch.ones(2)}, path)
    return {"w": torch.arange(3.0), "v": torch.ones(2)}


def sparse(path: Path) -> Weights:
    state = {"w": torch.eye(3).to_sparse(), "v": torch.ones(2)}
    torch.save(state, path)
    return state


def quantised(path: Path) -> Weights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
        torch.save({"w": weight, "v": torch.ones(2)}, path)
    return {"w": weight, "v": torch.ones(2)}


def beside_the_model(path: Path) -> Weights:
    state = {"state_dict": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}}
    torch.save({**state, "pytorch-lightning_version": "2.6"}, path)
    return {"state_dict.w": torch.ones(2), "ema.w": torch.zeros(2)}


SOURCES: dict[str, Callable[[Path], Weights]] = {
    made.__name__: made
    for made in (
        *(plain, tied, dtypes, complex_128, conjugate, negative, meta, odd_keys, in_an_object),
        *(big_endian, sparse, quantised, beside_the_model),
    )
}


def flat(nest: Any, path: str = "") -> Weights:
    """The tensors of a nest by their names."""
    if isinstance(nest, torch.Tensor):
        return {path: nest}
    items: Any = nest.items() if isinstance(nest, dict) else ()
    if isinstance(nest, list | tuple):
        items = enumerate(nest)
    found: Weights = {}
    for key, item in items:
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def independent(place: Path, to: str) -> Weights:
    """The tensors of a result, by a reader that is not ours."""
    if to == "torch":
        return flat(torch.load(place, weights_only=True))
    if to == "safetensors":
        return safetensors.torch.load_file(place)
    if to == "hf":
        return safetensors.torch.load_file(place / "model.safetensors")
    if to == "npz":
        with np.load(place) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    if to == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(place, place.with_suffix(".pt"))
        return flat(torch.load(place.with_suffix(".pt"), weights_only=True))
    return flat(ckpt.read(place))  # ckpt's own format has one reader


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return bytes(whole.view(torch.uint8).numpy())

    is_like = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
    return is_like and not one.is_quantized and bits(one) == bits(other)


def refusal_of(source: Path, target: Path, to: FormatName) -> str:
    """The message of a conversion's error, after which nothing is there; empty without one."""
    try:
        ckpt.convert(source, target, to=to)
    except UnsupportedError as error:
        assert not target.exists()
        return str(error)
    return ""


@pytest.mark.wide
@pytest.mark.costly
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_weight_is_in_the_target_or_named_by_an_error_before_a_byte_is_written(
    source: str, to: FormatName, tmp_path: Path
) -> None:
    expected = SOURCES[source](tmp_path / "a.pt")
    target = tmp_path / "out"
    said = refusal_of(tmp_path / "a.pt", target, to)
    if "numpy has no" in said:
        return
    report = ckpt.convert(tmp_path / "a.pt", target, to=to, allow_loss=True, overwrite=True)
    assert bool(report.lost) == bool(said)
    assert all(line in said for line in report.lost)
    lost = {line.partition(" ")[0] for line in report.lost}
    parts = () if to in ("safetensors", "hf", "npz") else ("sparse", "quantised")
    if source in parts:  # the parts are all there, and so are the numbers beside them
        assert not lost
        return
    is_state = to in ("torch", "ckpt", "dcp")
    place = "state_dict." if source == "beside_the_model" and not is_state else ""
    there = independent(target, to)
    if to in ("safetensors", "hf"):
        tied_names = ckpt.open(target).catalog.aliases
        assert set(report.tied) == set(tied_names)
        there |= {alias: there[name] for alias, name in tied_names.items()}
    for name, tensor in expected.items():
        short = name.removeprefix(place)
        kept = short in there and not tensor.is_meta and same(there[short], tensor)
        assert kept != (name in lost), (name, lost, list(there))


def test_what_a_caller_leaves_out_by_name_is_no_loss(tmp_path: Path) -> None:
    conjugate(tmp_path / "a.pt")
    with pytest.raises(
        UnsupportedError, match=r"1 of its weights would be lost: w is torch.Tensor"
    ):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    report = ckpt.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", exclude="w")
    assert (report.lost, report.tensors) == ((), 1)


def save_divided(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements = {"partial": Partial(), "replicate": Replicate(), "shard": Shard(0)}
    for name, placement in placements.items():
        local = torch.ones(2 if name == "shard" else 4, 3)
        value = DTensor.from_local(local, mesh, [placement], run_check=False)
        if dist.get_rank() == 0:
            torch.save({"w": nn.Parameter(value)}, f"{folder}/{name}.pt")


def test_a_dtensor_of_one_rank_is_a_tensor_only_if_the_rank_has_all_of_its_values(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    clusters(2).run(save_divided, str(tmp_path))
    for name in ("partial", "shard"):  # a summand, and some rows
        source = tmp_path / f"{name}.pt"
        with pytest.raises(UnsupportedError, match=r"weights would be lost: w\._spec"):
            ckpt.convert(source, tmp_path / "lost.safetensors")
        with pytest.raises(ckpt.MismatchError):
            ckpt.load(source, {"w": torch.zeros(4, 3)})
    assert torch.equal(ckpt.read(tmp_path / "replicate.pt")["w"], torch.ones(4, 3))


def test_an_object_that_repeats_tensors_of_the_state_hides_none(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "schedule": schedule}
    torch.save(state, tmp_path / "a.pt")
    report = ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (report.lost, report.left_out) == ((), ("schedule",))


def test_the_weights_of_a_frozen_program_are_its_constants(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.freeze(torch.jit.script(net().eval())).save(str(tmp_path / "a.pt"))
    ckpt.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    found = safetensors.torch.load_file(tmp_path / "b.safetensors")
    wanted = sorted(tensor.tolist() for tensor in net().state_dict().values() if tensor.ndim == 2)
    assert sorted(tensor.tolist() for tensor in found.values() if tensor.ndim == 2) == wanted
    assert {name.rpartition(".")[0] for name in found} == {"CONSTANTS"}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_packed_weights_of_a_quantised_program_are_read(
    is_frozen: bool, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(net().eval(), {nn.Linear})
        program = torch.jit.script(model)
        (torch.jit.freeze(program) if is_frozen else program).save(str(tmp_path / "a.pt"))
    whole = flat(ckpt.read(tmp_path / "a.pt"))
    assert sum(name.endswith("int_repr") for name in whole) == 2
    with pytest.raises(UnsupportedError, match="is quantised, and its scale and zero point"):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt")


def test_a_checkpoint_without_tensors_is_not_called_sound_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.verify import Options, run

    torch.save({"step": 3}, tmp_path / "a.pt")
    run(Options([str(tmp_path / "a.pt")], verbose=False, quiet=False, as_json=False))
    assert "sound, but it has no tensors" in capsys.readouterr().out

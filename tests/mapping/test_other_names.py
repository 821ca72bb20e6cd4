"""A folder of Hugging Face fills a module whose names differ, if other names fit wholly."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import ckpt
from ckpt.mapping.other_names import _heads, _Recorder
from formats.catalog import TensorRecord
from formats.dtypes import BY_NAME
from tests.mapping.catalogs import Elements, numbered, read, stored


def nest(**entries: torch.Tensor) -> nn.Module:
    """A module with buffers of these names, whose dots are written as two underscores."""
    top = nn.Module()
    for name, tensor in entries.items():
        *path, last = name.split("__")
        place = top
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_buffer(last, torch.zeros_like(tensor))
    return top


def folder(path: Path, model_type: str = "own", **entries: torch.Tensor) -> Path:
    """A folder of Hugging Face with these tensors."""
    path.mkdir(exist_ok=True)
    named = {name.replace("__", "."): tensor for name, tensor in entries.items()}
    save_file(named, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * 3.0).reshape(count, 3)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"base__w": rows(2), "base__h__b": rows(3)}, ("w", "h__b")),
        ({"w": rows(2), "h__b": rows(3)}, ("base__w", "base__h__b")),
        ({"w": rows(2), "head__b": rows(3)}, ("base__w", "head__b")),
    ],
    ids=["less", "more", "of some"],
)
def test_names_that_fit_but_for_a_prefix_are_loaded_and_the_log_names_it(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    there: dict[str, torch.Tensor],
    here: tuple[str, ...],
) -> None:
    given = dict(zip(here, there.values(), strict=True))
    target = nest(**given)
    with caplog.at_level(logging.INFO, "ckpt.load"):
        ckpt.load(folder(tmp_path, **there), target)
    for name, tensor in given.items():
        assert torch.equal(target.state_dict()[name.replace("__", ".")], tensor)
    assert "is loaded by the names by rename={" in caplog.text


def test_a_module_that_is_the_one_entry_of_a_dict_is_filled_too(tmp_path: Path) -> None:
    source = folder(tmp_path / "a", w=rows(2), h__b=rows(3))
    for names in (("w", "h__b"), ("base__w", "base__h__b")):
        target = nest(**dict(zip(names, (rows(2), rows(3)), strict=True)))
        ckpt.load(source, {"net": target})
        assert [tensor.tolist() for tensor in target.state_dict().values()] == [
            rows(2).tolist(),
            rows(3).tolist(),
        ]
    stacked = nest(**STACKED)
    ckpt.load(folder(tmp_path / "b", "qwen3_moe", **experts(2)), {"net": stacked})
    assert stacked.state_dict()["model.layers.0.mlp.experts.down_proj"].any()
    with pytest.raises(ckpt.MismatchError):
        ckpt.load(source, {"net": nest(w=rows(2), h__b=rows(3)), "step": 1})


def load_on_ranks(source: Path, alike: bool) -> bool:
    """Whether a rank's target was filled; rank 1 may have one more name."""
    more = {} if alike or dist.get_rank() == 0 else {"other": rows(1)}
    target = nest(w=rows(2), **more)
    with suppress(ckpt.MismatchError, ckpt.RankError):
        ckpt.load(source, target)
    return torch.equal(target.state_dict()["w"], rows(2) + 1)


def test_ranks_take_other_names_together_or_not_at_all(clusters: Callable, tmp_path: Path) -> None:
    source = folder(tmp_path, base__w=rows(2) + 1)
    assert clusters(2).run(load_on_ranks, source, True) == [True, True]
    assert clusters(2).run(load_on_ranks, source, False) == [False, False]


@pytest.mark.parametrize(
    "target",
    [
        nest(w=rows(2), other=rows(1)),
        nest(w=rows(3), h__b=rows(3)),
        nest(w=rows(2)),
    ],
    ids=["one missing", "another shape", "one more"],
)
def test_names_that_do_not_fit_wholly_are_an_error_and_nothing_changes(
    tmp_path: Path, target: nn.Module
) -> None:
    source = folder(tmp_path, base__w=rows(2) + 1, base__h__b=rows(3))
    with pytest.raises(ckpt.MismatchError, match=r"base\.w: is in the checkpoint") as error:
        ckpt.load(source, target)
    assert not any(tensor.any() for tensor in target.state_dict().values())
    assert "Fewer differ" not in str(error.value)


def test_the_modules_of_sentence_transformers_are_one_model(tmp_path: Path) -> None:
    source = folder(tmp_path / "st", w=rows(2) + 1, h__b=rows(3))
    modules = [("0", ""), ("1", "1_Pooling"), ("2", "2_Dense")]
    listed = [{"idx": n, "name": name, "path": path} for n, (name, path) in enumerate(modules)]
    (source / "modules.json").write_text(json.dumps(listed))
    dense = folder(source / "2_Dense", linear__weight=rows(2) + 5, linear__bias=rows(1))
    (dense / "config.json").write_text("{}")
    target = nest(
        **{"0__model__w": rows(2), "0__model__h__b": torch.zeros(3, 3)},
        **{"2__linear__weight": rows(2), "2__linear__bias": torch.zeros(1, 3)},
    )
    ckpt.load(source, target)
    found = target.state_dict()
    assert torch.equal(found["0.model.w"], rows(2) + 1)
    assert torch.equal(found["0.model.h.b"], rows(3))
    assert torch.equal(found["2.linear.weight"], rows(2) + 5)
    with pytest.raises(ckpt.MismatchError):
        ckpt.load(source, nest(**{"0__model__w": rows(2), "2__linear__weight": rows(2)}))


AT = "model__layers__0__mlp__experts"
STACKED = {f"{AT}__gate_up_proj": torch.zeros(2, 4, 3), f"{AT}__down_proj": torch.zeros(2, 2, 3)}


def experts(count: int) -> dict[str, torch.Tensor]:
    names = [
        f"{AT}__{expert}__{part}_proj__weight"
        for expert in range(count)
        for part in ("gate", "up", "down")
    ]
    return {name: rows(2) + 10 * number for number, name in enumerate(names)}


def test_the_model_type_chooses_a_mapping_that_ships(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at = "model__layers__0__mlp__experts"
    target = nest(
        **{f"{at}__gate_up_proj": torch.zeros(2, 4, 3), f"{at}__down_proj": torch.zeros(2, 2, 3)}
    )
    with caplog.at_level(logging.INFO, "ckpt.load"):
        ckpt.load(folder(tmp_path / "a", "qwen3_moe", **experts(2)), target)
    assert "is loaded by mapping='qwenmoe-hf-stacked'" in caplog.text
    given = list(experts(2).values())
    gate_up, down = target.state_dict().values()
    assert torch.equal(gate_up[1], torch.cat(given[3:5]))
    assert torch.equal(down, torch.stack([given[2], given[5]]))
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(folder(tmp_path / "b", **experts(2)), target)
    assert "mapping" not in str(error.value)


def test_a_mapping_that_does_not_fit_wholly_is_named_in_the_error(tmp_path: Path) -> None:
    at = "model__layers__0__mlp__experts"
    target = nest(
        **{
            f"{at}__gate_up_proj": torch.zeros(2, 4, 3),
            f"{at}__down_proj": torch.zeros(2, 2, 3),
            "head": rows(1),
        }
    )
    source = folder(tmp_path, "qwen3_moe", **experts(2))
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(source, target)
    assert "Fewer differ if ckpt.load gets mapping='qwenmoe-hf-stacked'." in str(error.value)
    ckpt.load(source, target, mapping="qwenmoe-hf-stacked", exclude="head")
    assert target.state_dict()["model.layers.0.mlp.experts.down_proj"].any()


def test_a_file_of_a_training_is_loaded_by_the_advice_of_its_error(tmp_path: Path) -> None:
    given, target = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0]}]}
    state = {"state_dict": given.state_dict(), "epoch": 3, "arch": "x", "optimizer": optimizer}
    torch.save(state, tmp_path / "train.pth.tar")
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(tmp_path / "train.pth.tar", target)
    advice = str(error.value).rpartition("call ckpt.load with ")[2]
    assert advice == "rename={'state_dict': ''} and exclude=['arch', 'epoch', 'optimizer.*']"
    ckpt.load(
        tmp_path / "train.pth.tar",
        target,
        rename={"state_dict": ""},
        exclude=["arch", "epoch", "optimizer.*"],
    )
    assert torch.equal(target.weight, given.weight)


def test_advice_excludes_no_name_that_the_target_has(tmp_path: Path) -> None:
    torch.save({"app": {"net": {"w": rows(2)}}, "net": {"x": rows(1)}}, tmp_path / "a.pt")
    target = {"net": {"w": torch.zeros(2, 3)}}
    with pytest.raises(ckpt.MismatchError, match=r"=\{'app': ''\} and exclude=\['net.x'\]$"):
        ckpt.load(tmp_path / "a.pt", target)
    ckpt.load(tmp_path / "a.pt", target, rename={"app": ""}, exclude=["net.x"])
    assert torch.equal(target["net"]["w"], rows(2))


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "stack": lambda a, b: torch.stack([a, b], 1),
    "cat": lambda a, b: torch.cat([a, b], -1),
    "transpose": lambda a, b: a.transpose(0, 2).contiguous(),
    "permute": lambda a, b: a.permute(2, 0, -2),
    "chunk": lambda a, b: torch.chunk(a, 2, dim=1)[1],
    "split": lambda a, b: torch.split(b, [1, 3], dim=1)[1],
    "pairs": lambda a, b: a.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6),
    "one": lambda a, b: torch.split(a, 1)[0].squeeze(0).unsqueeze(-1).reshape(3, 8),
    "interleave": lambda a, b: torch.stack([a, b], 2).flatten(1, 2).clone(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_tensors_without_memory_become_views(name: str) -> None:
    elements: Elements = {}
    arrays = [numbered(2, 4, 6), numbered(2, 4, 6, start=100)]
    records = [stored(f"t{at}", array, elements) for at, array in enumerate(arrays)]
    with _Recorder() as recorder:
        made = OPERATIONS[name](*map(recorder.tensor, records))
        view, dtype = recorder.of(made)
    found = read(TensorRecord("w", view.shape, dtype, view), elements)
    wanted = OPERATIONS[name](*map(torch.from_numpy, arrays)).numpy()
    assert dtype == BY_NAME["I64"]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "compute", [lambda a: a + 1, lambda a: a.to(torch.float32), lambda a: a[:, ::2]]
)
def test_an_operation_that_computes_has_no_view(compute: Callable) -> None:
    with _Recorder() as recorder:
        made = compute(recorder.tensor(stored("w", numbered(2, 4), {})))
        with pytest.raises(KeyError):
            recorder.of(made)


def test_an_operation_in_place_is_refused() -> None:
    with _Recorder() as recorder:
        tensor = recorder.tensor(stored("w", numbered(2, 4), {}))
        with pytest.raises(ValueError, match=r"add_\.Tensor changes values"):
            tensor.add_(1)


def test_a_head_is_a_module_that_the_target_lacks_outside_of_its_layers() -> None:
    own = ["bert.encoder.0.q.weight", "bert.embeddings.word.weight", "lm_head.weight"]
    names = {
        "bert.pooler.dense.weight": True,
        "cls.seq.bias": True,
        "bert.encoder.1.q.weight": False,  # one more layer
        "bert.encoder.0.q.bias": False,  # of a module that the target has
        "lm_head.lora_A.weight": False,  # a part of one
        "bert.encoder.scale": False,
        "scale": False,
    }
    found = {*_heads(((name, name) for name in names), own)}
    assert found == {name for name, is_head in names.items() if is_head}

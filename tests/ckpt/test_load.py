"""What a load changes, what it leaves alone, and what it says when the two sides do not fit."""

import copy
import gc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from formats.errors import CorruptError
from tests.garbage import collect_garbage


def saved(folder: Path) -> dict[str, Any]:
    """A checkpoint of a few tensors and values; returns its state."""
    generator = torch.Generator().manual_seed(0)
    state = {
        "model": {
            "w": torch.randn(4, 3, generator=generator),
            "b": torch.randn(3, generator=generator),
            "n": torch.tensor(7),
        },
        "names": ["x", "y"],
        "step": 100,
        "config": {"lr": 0.1, "betas": (0.9, 0.99)},
    }
    ckpt.save(folder, state)
    return state


def blank() -> dict[str, Any]:
    """A target for `saved`."""
    return {
        "model": {"w": torch.zeros(4, 3), "b": torch.zeros(3), "n": torch.tensor(0)},
        "names": [],
        "step": 0,
        "config": {"lr": 0.0, "betas": (0.0, 0.0)},
    }


def test_tensors_are_filled_where_they_lie_and_containers_updated(tmp_path: Path) -> None:
    state, target = saved(tmp_path), blank()
    parts = {"model": target["model"], "names": target["names"], "config": target["config"]}
    places = {name: tensor.data_ptr() for name, tensor in target["model"].items()}
    loaded = ckpt.load(tmp_path, target)
    assert loaded is target
    assert all(loaded[key] is part for key, part in parts.items())
    for name, tensor in loaded["model"].items():
        assert torch.equal(tensor, state["model"][name])
        assert tensor.data_ptr() == places[name]
    assert {k: v for k, v in loaded.items() if k != "model"} == {
        k: v for k, v in state.items() if k != "model"
    }


def test_all_differences_are_listed_before_anything_is_touched(tmp_path: Path) -> None:
    saved(tmp_path)
    target = blank()
    target["model"]["extra"] = torch.zeros(2)
    target["model"]["w"] = torch.zeros(4, 2)
    target["model"]["n"] = torch.tensor(0.0)
    target["names"] = torch.zeros(2)
    target["step"] = torch.zeros(())
    del target["config"]["lr"]
    before = copy.deepcopy(target)
    with pytest.raises(ckpt.MismatchError, match="was not touched") as error:
        ckpt.load(tmp_path, target)
    assert {(d.name, d.problem) for d in error.value.differences} == {
        ("model.extra", "missing"),
        ("model.w", "shape"),
        ("model.n", "dtype"),
        ("names", "structure"),
        ("step", "structure"),
        ("config.lr", "unexpected"),
    }
    assert "the checkpoint has shape (4, 3), the target has (4, 2)" in str(error.value)
    assert "the checkpoint has dtype int64, the target has float32" in str(error.value)
    assert str(error.value).count("or with strict=False") == 1
    assert repr(target) == repr(before)


def test_a_dtype_that_strict_cannot_skip_gets_no_such_advice(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"n": torch.tensor(1)})
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(tmp_path, {"n": torch.tensor(0.5)})
    assert "strict=False" not in str(error.value)


def test_a_mismatch_names_the_argument_that_helps(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "nest", {"model": {"w": torch.ones(2), "b": torch.ones(2)}, "step": 1})
    ckpt.save(tmp_path / "bare", {"w": torch.ones(2), "b": torch.ones(2)})
    target = {"w": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(ckpt.MismatchError, match=r"=\{'model': ''\} and exclude=\['step'\]$"):
        ckpt.load(tmp_path / "nest", target)
    with pytest.raises(ckpt.MismatchError, match=r"with include= and patterns"):
        ckpt.load(tmp_path / "nest", target, rename={"model": ""})
    ckpt.load(tmp_path / "nest", target, rename={"model": ""}, include=["w", "b"])
    with pytest.raises(ckpt.MismatchError, match=r"with rename=\{'': 'model'\}$"):
        ckpt.load(tmp_path / "bare", {"model": target})
    ckpt.load(tmp_path / "bare", {"model": target}, rename={"": "model"})


@pytest.mark.parametrize("strict", [True, False])
def test_a_prefix_of_most_names_is_named_and_nothing_is_no_load(
    tmp_path: Path, strict: bool
) -> None:
    ckpt.save(tmp_path, {"app": {"model": {"w": torch.ones(2), "b": torch.ones(2)}}})
    target = {"model": {"w": torch.zeros(2), "b": torch.zeros(2)}, "new": torch.zeros(1)}
    head = "does not fit the target" if strict else "has nothing for the target"
    with pytest.raises(ckpt.MismatchError, match=head) as error:
        ckpt.load(tmp_path, target, strict=strict)
    advice = "2 of these names are in the checkpoint: call ckpt.load with rename={'app': ''}"
    assert str(error.value).endswith(advice)
    ckpt.load(tmp_path, target, rename={"app": ""}, exclude="new")
    assert target["model"]["w"].tolist() == [1.0, 1.0]  # type: ignore[call-overload]


def test_a_part_with_another_name_is_named_with_the_rename_that_loads_it(tmp_path: Path) -> None:
    def state(name: str) -> dict[str, Any]:
        model = nn.Sequential(OrderedDict({"inner": nn.Linear(2, 2), name: nn.Linear(2, 2)}))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer}

    ckpt.save(tmp_path / "run", state("fc"))
    with pytest.raises(ckpt.MismatchError) as error:
        ckpt.load(tmp_path / "run", state("out"))
    advice = "under another name: call ckpt.load with rename={'model.fc': 'model.out'}"
    assert str(error.value).endswith(advice)
    ckpt.load(tmp_path / "run", state("out"), rename={"model.fc": "model.out"})
    ckpt.save(tmp_path / "two", {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}})
    with pytest.raises(ckpt.MismatchError, match="rename= if names have changed"):  # which one?
        ckpt.load(tmp_path / "two", {"c": {"w": torch.ones(2)}})


def test_a_long_list_of_differences_is_cut_short_but_kept_whole(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": 1})
    with pytest.raises(ckpt.MismatchError, match=r"and 44 more \(missing\)") as error:
        ckpt.load(tmp_path, {str(index): torch.zeros(1) for index in range(50)})
    assert len(error.value.differences) == 51


def test_strict_false_skips_what_does_not_fit_with_a_warning(tmp_path: Path) -> None:
    state, target = saved(tmp_path), blank()
    target["model"]["extra"] = torch.full((2,), 5.0)
    target["model"]["w"] = torch.full((4, 2), 5.0)
    del target["step"]
    with pytest.warns(ckpt.SkippedWarning, match="strict=False skips 3: model.w"):
        ckpt.load(tmp_path, target, strict=False)
    assert torch.equal(target["model"]["b"], state["model"]["b"])
    assert target["model"]["extra"].tolist() == [5.0, 5.0]
    assert (target["model"]["w"] == 5).all()
    assert "step" not in target


def test_a_warning_of_skipped_entries_has_all_of_them_and_says_how_many_it_shows(
    tmp_path: Path,
) -> None:
    ckpt.save(tmp_path, {"a": 1, "0": torch.ones(1)})
    target = {str(index): torch.zeros(1) for index in range(51)}
    with pytest.warns(ckpt.SkippedWarning, match=r"skips 51: .*; and 48 more$") as caught:
        ckpt.load(tmp_path, target, strict=False)
    [warning] = caught
    assert isinstance(warning.message, ckpt.SkippedWarning)
    assert {"0", *(one.name for one in warning.message.differences)} == {"a", *target}


def test_strict_false_does_not_hide_another_dtype_or_structure(tmp_path: Path) -> None:
    saved(tmp_path)
    target = blank()
    target["model"]["b"] = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ckpt.MismatchError, match=r"model\.b"):
        ckpt.load(tmp_path, target, strict=False)


@pytest.mark.parametrize(
    "rename",
    [
        {"model": "net"},
        {"model.": "net."},
        {"model.w": "net.w", "model.b": "net.b", "model.n": "net.n"},
        lambda name: name.replace("model.", "net."),
    ],
    ids=["prefix", "dotted prefix", "names", "function"],
)
def test_names_are_changed_by_a_mapping_or_a_function(tmp_path: Path, rename: Any) -> None:
    state, target = saved(tmp_path), blank()
    target["net"] = target.pop("model")
    ckpt.load(tmp_path, target, rename=rename)
    assert torch.equal(target["net"]["w"], state["model"]["w"])
    assert target["config"] == state["config"]


def test_a_prefix_is_put_before_every_name_or_taken_away(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    ckpt.save(tmp_path / "bare", model)
    ckpt.save(tmp_path / "deep", {"a": {"model": model}})
    target = {"model": nn.Linear(3, 2)}
    ckpt.load(tmp_path / "bare", target, rename={"": "model"})
    assert torch.equal(target["model"].weight, model.weight)
    bare = ckpt.load(tmp_path / "deep", nn.Linear(3, 2), rename={"a.model": ""})
    assert torch.equal(bare.weight, model.weight)


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ckpt.StateError, match=r"two entries of the checkpoint .* 'model\.w'"):
        ckpt.load(tmp_path, blank(), rename={"model.b": "model.w"})


def test_only_what_is_included_and_not_excluded_is_loaded(tmp_path: Path) -> None:
    state = saved(tmp_path)
    target = ckpt.load(tmp_path, blank(), include=["model.*", "step"], exclude="model.b")
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    assert torch.equal(target["model"]["b"], torch.zeros(3))
    assert target["step"] == 100
    assert target["names"] == []
    assert target["config"] == {"lr": 0.0, "betas": (0.0, 0.0)}


def test_what_is_left_out_may_be_missing_or_differ(tmp_path: Path) -> None:
    saved(tmp_path)
    target = blank()
    target["model"]["b"] = torch.zeros(99)
    target["model"]["new"] = torch.zeros(1)
    target["optim"] = torch.optim.Adam(nn.Linear(2, 2).parameters())
    ckpt.load(tmp_path, target, include="model.w")
    ckpt.load(tmp_path, target, exclude=["model.b", "model.new", "optim.*"])
    assert target["step"] == 100


def test_an_object_that_is_left_out_is_left_alone(tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 2).parameters()), 5)
    schedule.last_epoch = 3
    ckpt.save(tmp_path, {"schedule": schedule, "step": 1})
    schedule.last_epoch = 9
    for choice in ({"include": "step"}, {"exclude": "schedule.*"}):
        ckpt.load(tmp_path, {"schedule": schedule, "step": 0}, **choice)
        assert schedule.last_epoch == 9
    ckpt.load(tmp_path, {"schedule": schedule, "step": 0})
    assert schedule.last_epoch == 3


def test_dtype_target_casts_into_the_target_s_memory(tmp_path: Path) -> None:
    state, target = saved(tmp_path), blank()
    target["model"]["w"] = target["model"]["w"].to(torch.bfloat16)
    place = target["model"]["w"].data_ptr()
    ckpt.load(tmp_path, target, dtype="target")
    assert torch.equal(target["model"]["w"], state["model"]["w"].to(torch.bfloat16))
    assert target["model"]["w"].data_ptr() == place
    assert target["model"]["n"].item() == 7
    with pytest.raises(ValueError, match="dtype is 'target' or None, not 'float32'"):
        ckpt.load(tmp_path, target, dtype="float32")


def test_none_and_an_empty_dict_take_what_was_saved(tmp_path: Path) -> None:
    state = saved(tmp_path)
    target: dict[str, Any] = {"model": {}, "names": None, "step": None, "config": {}}
    model = target["model"]
    ckpt.load(tmp_path, target)
    assert target["model"] is model
    assert torch.equal(model["w"], state["model"]["w"])
    assert target["names"] == ["x", "y"]
    assert target["config"] == state["config"]
    assert torch.equal(ckpt.load(tmp_path, {})["model"]["b"], state["model"]["b"])


def test_tuples_and_lists_with_tensors_are_filled(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"l": [torch.ones(2), {"a": torch.ones(1)}], "t": (torch.ones(3), 5)})
    first, inner, third = torch.zeros(2), torch.zeros(1), torch.zeros(3)
    target = ckpt.load(tmp_path, {"l": [first, {"a": inner}], "t": (third, 0)})
    assert target["l"][0] is first
    assert target["t"][0] is third
    assert target["t"][1] == 5
    assert [tensor.sum().item() for tensor in (first, inner, third)] == [2, 1, 3]


class Hooked(nn.Module):
    """A module whose state dict has another form than its parameters, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.history = torch.zeros(0)
        self.calls = 0
        self._register_load_state_dict_pre_hook(self._before_load)

    def _before_load(self, state: dict[str, Any], prefix: str, *rest: object) -> None:
        self.calls += 1

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history, "calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]


def test_load_hooks_run_and_extra_state_of_any_size_is_given_back(tmp_path: Path) -> None:
    model = nn.Sequential(Hooked(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    model[0].history = torch.arange(5)
    ckpt.save(tmp_path, {"model": model})
    target = nn.Sequential(Hooked(), nn.Linear(4, 2))
    place = target[0].weight.data_ptr()
    ckpt.load(tmp_path, {"model": target})
    assert target[0].weight.tolist() == [3.0] * 4
    assert target[0].weight.data_ptr() == place
    assert target[0].history.tolist() == [0, 1, 2, 3, 4]
    assert target[0].calls == 1
    assert torch.equal(target[1].weight, model[1].weight)


def test_a_module_keeps_extra_state_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"weight": torch.ones(4)})
    target = Hooked()
    target.history = torch.arange(3)
    with pytest.raises(ckpt.MismatchError, match="_extra_state"):
        ckpt.load(tmp_path, target)
    with pytest.warns(UserWarning, match="_extra_state"):
        ckpt.load(tmp_path, target, strict=False)
    assert target.history.tolist() == [0, 1, 2]
    assert target.weight.tolist() == [1.0] * 4


def test_a_bare_module_with_buffers_is_a_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(5, 3))
    ckpt.save(tmp_path, model)
    target = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert ckpt.load(tmp_path, target) is target
    for name, tensor in model.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    assert target[1].num_batches_tracked == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when dynamo is imported
def test_a_compiled_module_has_the_names_of_its_module(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    ckpt.save(tmp_path, {"model": torch.compile(model, backend="eager")})
    with ckpt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["model.weight", "model.bias"]
    target = nn.Linear(3, 2)
    ckpt.load(tmp_path, {"model": torch.compile(target, backend="eager")})
    assert torch.equal(target.weight, model.weight)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # torch's own
@pytest.mark.parametrize("kind", ["step", "cosine", "lambda", "plateau", "sequence"])
def test_schedules_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    schedulers = torch.optim.lr_scheduler

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
        choices = {
            "step": lambda: schedulers.StepLR(optimizer, 2),
            "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 10),
            "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0),
            "sequence": lambda: schedulers.SequentialLR(
                optimizer,
                [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)],
                [3],
            ),
        }
        return optimizer, choices[kind]()

    def advance(optimizer: torch.optim.Optimizer, schedule: Any) -> list[float]:
        rates = []
        for _ in range(4):
            optimizer.step()
            schedule.step(1.0) if kind == "plateau" else schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, schedule = make()
    advance(optimizer, schedule)
    ckpt.save(tmp_path, {"optim": optimizer, "schedule": schedule})
    expected = advance(optimizer, schedule)
    fresh, again = make()
    ckpt.load(tmp_path, {"optim": fresh, "schedule": again})
    assert advance(fresh, again) == expected


def filled_from_disk(folder: Path, w: torch.Tensor) -> None:
    ckpt.save(folder, {"w": torch.full(w.shape, 3.0)})
    ckpt.load(folder, {"w": w})


def cast_from_disk(folder: Path, w: torch.Tensor) -> None:
    ckpt.save(folder, {"w": torch.full(w.shape, 3.0, dtype=torch.float64)})
    ckpt.load(folder, {"w": w}, dtype="target")


def filled_from_memory(folder: Path, w: torch.Tensor) -> None:
    ckpt.state_dict.load({"w": torch.full(w.shape, 3.0)}, {"w": w})


@pytest.mark.parametrize("fill", [filled_from_disk, cast_from_disk, filled_from_memory])
def test_a_backward_pass_that_needs_what_was_there_before_a_load_is_an_error(
    tmp_path: Path, fill: Any
) -> None:
    w = torch.ones(6, 8, requires_grad=True)
    squares = (w * w).sum()
    fill(tmp_path, w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    (w * w).sum().backward()
    assert w.grad is not None
    assert (w.grad == 6).all()


def backward_after_a_load(folder: str) -> str:
    """What the backward pass of a sharded tensor says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ckpt.save(folder, {"w": distribute_tensor(torch.full((6, 8), 3.0), mesh, [Shard(0)])})
    w = distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)]).requires_grad_()
    squares = (w * w).sum()
    ckpt.load(folder, {"w": w})
    try:
        squares.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_so_it_is_with_sharded_parameters(clusters: Any, tmp_path: Path) -> None:
    for said in clusters(2).run(backward_after_a_load, str(tmp_path)):
        assert "modified by an inplace operation" in said


@pytest.mark.parametrize("fill", [filled_from_disk, cast_from_disk])
def test_tensors_of_inference_mode_are_filled(tmp_path: Path, fill: Any) -> None:
    with torch.inference_mode():
        w = torch.zeros(6, 8)
        fill(tmp_path, w)
        other = torch.zeros(6, 8)
    fill(tmp_path / "outside", other)
    assert (w == 3).all()
    assert (other == 3).all()


def test_a_load_that_is_refused_does_not_count_as_a_change(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"w": torch.ones(6, 8), "b": torch.ones(2)})
    w = torch.ones(6, 8, requires_grad=True)
    squares = (w * w).sum()
    with pytest.raises(ckpt.MismatchError):
        ckpt.load(tmp_path, {"w": w, "b": torch.zeros(3)})
    squares.backward()


def test_a_module_on_the_meta_device_is_refused_by_name(tmp_path: Path) -> None:
    ckpt.save(tmp_path, nn.Linear(2, 2))
    with pytest.raises(
        ckpt.MismatchError, match=r"weight: is on the meta device.*persistent=False"
    ):
        ckpt.load(tmp_path, nn.Linear(2, 2, device="meta"))


def test_damage_found_while_reading_names_what_may_be_half_loaded(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"a": torch.ones(50), "b": torch.ones(50)})
    (shard,) = tmp_path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-60] ^= 1  # in b: 400 bytes of data and 40 of table end the file
    shard.write_bytes(data)
    with pytest.raises(ckpt.DamagedLoadError, match=f"{shard.name}: b: bytes") as error:
        ckpt.load(tmp_path, {"a": torch.zeros(50), "b": torch.zeros(50)})
    assert error.value.touched == ("a", "b")
    assert isinstance(error.value, CorruptError)
    loaded = ckpt.load(tmp_path, {"a": torch.zeros(50), "b": torch.zeros(50)}, verify=False)
    assert loaded["a"].sum() == 50


@pytest.mark.parametrize("content", [{}, {"notes.txt": b"hello"}, {"a.safetensors": b""}])
def test_a_place_without_a_checkpoint_is_an_error_that_says_so(
    tmp_path: Path, content: dict[str, bytes]
) -> None:
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    expected = ckpt.NotACheckpointError if "a.safetensors" not in content else ckpt.FormatError
    with pytest.raises(expected, match=next(iter(content), "the folder is empty")):
        ckpt.load(tmp_path, {})
    with pytest.raises(ckpt.NotACheckpointError):
        ckpt.load(tmp_path / "nowhere", {})


@pytest.mark.parametrize("reads", [False, True])
def test_python_searches_no_objects_of_a_plan_for_garbage(tmp_path: Path, reads: bool) -> None:
    state = {str(number): torch.ones(1) for number in range(1_000)}
    ckpt.save(tmp_path, state)
    searched: list[int] = []

    def note(phase: str, _: object) -> None:
        if phase == "start":
            searched.append(len(gc.get_objects(generation=0)))

    for _ in range(2):  # the first call imports modules
        collect_garbage()
        searched.clear()
        gc.callbacks.append(note)
        try:
            ckpt.read(tmp_path) if reads else ckpt.load(tmp_path, state)
        finally:
            gc.callbacks.remove(note)
    assert sum(searched) < 5 * len(state)

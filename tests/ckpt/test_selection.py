"""A pattern, or a key of `rename=`, that names nothing is an error in every verb that takes one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt

pytestmark = pytest.mark.filterwarnings("ignore:.*strict=False skips")


def state(value: float) -> dict[str, Any]:
    """A small model and an optimizer of it that keeps no state."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), 0.1), "step": int(value)}


CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"include": "weigth*"}, "include: 'weigth*' matches no name; there are"),
    ({"include": ["model.*", "stepp"]}, "include: 'stepp' matches no name; there are step;"),
    ({"include": "model"}, "include: 'model' matches no name; there are model,"),
    ({"exclude": ["step", "modle.*"]}, "exclude: 'modle.*' matches no name; there are model"),
    ({"include": "step", "exclude": "st*"}, "names are excluded by 'st*'"),
    ({"include": []}, "include is an empty list"),
]
RENAMES: list[tuple[dict[str, Any], str]] = [
    ({"rename": {"modle": "net"}}, "rename: 'modle' matches no name; there are model"),
    ({"rename": {"mod": "net"}}, "rename: 'mod' matches no name; there are model"),
    ({"rename": {"": "", "model.weigth": "w"}}, "rename: 'model.weigth' matches no name"),
]


def loading(folder: Path, choice: dict[str, Any]) -> object:
    target = state(0.0)
    try:
        return ckpt.load(folder / "a", target, strict=False, **choice)
    finally:
        assert target["step"] == 0
        assert (target["model"].weight == 0).all()


def loading_from_memory(folder: Path, choice: dict[str, Any]) -> object:
    return ckpt.state_dict.load(state(1.0), state(0.0), strict=False, **choice)


def reading(folder: Path, choice: dict[str, Any]) -> object:
    return ckpt.read(folder / "a", **choice)


def converting(folder: Path, choice: dict[str, Any]) -> object:
    try:
        return ckpt.convert(folder / "a", folder / "made", **choice)
    finally:
        assert not (folder / "made").exists()


def comparing(folder: Path, choice: dict[str, Any]) -> object:
    return ckpt.diff(folder / "a", folder / "b", **choice)


@pytest.mark.parametrize(
    "verb", [loading, loading_from_memory, reading, converting, comparing], ids=lambda v: v.__name__
)
def test_a_selection_that_matches_nothing_is_an_error(tmp_path: Path, verb: Any) -> None:
    ckpt.save(tmp_path / "a", state(1.0))
    ckpt.save(tmp_path / "b", state(1.0))
    renames = RENAMES if "loading" in verb.__name__ else []
    for choice, said in CHOICES + renames:
        with pytest.raises(ValueError) as error:
            verb(tmp_path, choice)
        assert said in str(error.value), choice


@pytest.mark.parametrize(
    "choice",
    [
        {"exclude": ["optim.*", "model.lora"]},  # a name of the target alone
        {"exclude": ["optim.*", "model.lora", "model.bias"]},  # and one of the checkpoint
        {"include": ["model.weight", "step"], "exclude": "model.w?ight"},
        {"exclude": ["optim.state.lora*", "model.lora"]},  # state of a parameter that has none
        {"exclude": ["model.lora", "sched.*", "optim.*"]},  # whatever an object may have
    ],
)
def test_a_pattern_may_name_what_the_target_or_the_checkpoint_alone_has(
    tmp_path: Path, choice: dict[str, Any]
) -> None:
    ckpt.save(tmp_path, state(1.0))
    target = state(0.0)
    target["model"].register_parameter("lora", nn.Parameter(torch.zeros(2)))
    target["optim"].add_param_group({"params": [target["model"].lora]})
    target["sched"] = torch.optim.lr_scheduler.StepLR(target["optim"], 5)
    ckpt.load(tmp_path, target, strict=False, **choice)
    assert target["step"] == 1


def test_a_rename_of_a_parameter_without_state_is_used(tmp_path: Path) -> None:
    ckpt.save(tmp_path, state(1.0))
    target = state(0.0)
    keys = {"model.weight": "model.w", "optim.state.weight": "optim.state.w"}
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(2, 2)))
    model.register_parameter("bias", nn.Parameter(torch.zeros(2)))
    target = {"model": model, "optim": torch.optim.SGD(model.parameters(), 0.5), "step": 0}
    ckpt.load(tmp_path, target, rename=keys)
    assert (model.w == 1).all()
    assert target["optim"].param_groups[0]["lr"] == 0.1


def load_a_stage(folder: str, choice: dict[str, Any], other: dict[str, Any]) -> str:
    """What rank 0, or each, says of a load in which each has a stage of a model."""
    rank = dist.get_rank()
    target = {f"stage{rank}": torch.zeros(2), f"new{rank}": torch.zeros(2), "step": 0}
    try:
        ckpt.load(folder, target, strict=False, **(other if rank else choice))
    except ckpt.MismatchError as error:
        assert (target[f"stage{rank}"] == 0).all()
        return str(error)
    return str(target["step"])


@pytest.mark.parametrize(
    ("choice", "other", "said"),
    [
        ({"exclude": "new1"}, {"exclude": "new1"}, "1"),
        ({"exclude": ["new1", "new0"]}, {}, "1"),
        ({"exclude": "stage1"}, {"exclude": "stage0"}, "1"),
        ({"include": ["new1", "step"]}, {"include": ["new0", "step"]}, "1"),
        ({"include": "new1"}, {"include": "new1"}, "0"),
        ({"exclude": "nwe1"}, {"exclude": "nwe1"}, "exclude: 'nwe1' matches no name; there are "),
        ({"exclude": "new1"}, {"exclude": "nwe*"}, "exclude: 'nwe*' matches no name; there are "),
        ({"include": "s*", "exclude": "st*"}, {}, "all the included names are excluded by 'st*'"),
    ],
)
def test_ranks_agree_on_a_pattern_that_no_rank_has_a_name_for(
    clusters: Callable, tmp_path: Path, choice: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    ckpt.save(tmp_path, {"stage0": torch.ones(2), "stage1": torch.ones(2), "step": 1})
    found = clusters(2).run(load_a_stage, str(tmp_path), choice, other)
    assert all(said in one for one in found), found


def stepped(value: float) -> dict[str, Any]:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), betas=(value / 4, 0.75))
    model(torch.ones(1, 2) * value).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def test_one_entry_of_an_optimizer_s_state_may_be_left_out(tmp_path: Path) -> None:
    saved, target = stepped(1.0), stepped(2.0)
    ckpt.save(tmp_path, saved)
    own = target["optim"].state[target["model"].weight]["exp_avg"].clone()
    ckpt.load(tmp_path, target, exclude="optim.state.*.exp_avg")
    had = saved["optim"].state[saved["model"].weight]
    state = target["optim"].state[target["model"].weight]
    assert torch.equal(state["exp_avg"], own)
    assert torch.equal(state["exp_avg_sq"], had["exp_avg_sq"])
    assert target["optim"].param_groups[0]["betas"] == (0.25, 0.75)


@pytest.mark.parametrize(
    "choice",
    [{"exclude": "optim.param_groups"}, {"include": ["model.*", "optim.state.*"]}],
    ids=str,
)
def test_groups_that_are_not_selected_keep_their_options(
    tmp_path: Path, choice: dict[str, Any]
) -> None:
    saved, target = stepped(1.0), stepped(2.0)
    ckpt.save(tmp_path, saved)
    ckpt.load(tmp_path, target, **choice)
    had = saved["optim"].state[saved["model"].weight]
    state = target["optim"].state[target["model"].weight]
    assert torch.equal(state["exp_avg"], had["exp_avg"])
    assert target["optim"].param_groups[0]["betas"] == (0.5, 0.75)


def test_groups_alone_may_be_selected(tmp_path: Path) -> None:
    saved, target = stepped(1.0), stepped(2.0)
    own = target["optim"].state[target["model"].weight]["exp_avg"].clone()
    ckpt.save(tmp_path, saved)
    ckpt.load(tmp_path, target, include="optim.param_groups")
    assert torch.equal(target["optim"].state[target["model"].weight]["exp_avg"], own)
    assert target["optim"].param_groups[0]["betas"] == (0.25, 0.75)


def test_other_groups_than_were_saved_are_fine_if_they_are_not_selected(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    two = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.5, momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    two.step()
    ckpt.save(tmp_path, {"m": model, "o": two})
    one = torch.optim.SGD(model.parameters(), lr=0.25)
    target = {"m": model, "o": one}
    with pytest.raises(ckpt.MismatchError, match="groups"):
        ckpt.load(tmp_path, target)
    ckpt.load(tmp_path, target, exclude="o.param_groups")
    assert one.param_groups[0]["lr"] == 0.25
    had = two.state[model.weight]["momentum_buffer"]
    assert torch.equal(one.state[model.weight]["momentum_buffer"], had)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=str)
def test_an_optimizer_may_lie_elsewhere_in_the_target(
    tmp_path: Path, rate: Any, has_state: bool
) -> None:
    def made(lr: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.5)
        if has_state:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return {"m": model, "o": optimizer}

    ckpt.save(tmp_path, made(rate))
    places: list[tuple[dict[str, str], Callable[[Any], object]]] = [
        ({"": "x"}, lambda state: {"x": state}),
        ({"o": "p.q"}, lambda state: {"m": state["m"], "p": {"q": state["o"]}}),
    ]
    for rename, placed in places:
        fresh = made(0.25)
        ckpt.load(tmp_path, placed(fresh), rename=rename)
        assert float(fresh["o"].param_groups[0]["lr"]) == 0.5
        assert len(fresh["o"].state) == 2 * has_state


def test_one_option_of_a_group_with_tensors_may_be_left_out(tmp_path: Path) -> None:
    def made(value: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        rate = torch.tensor(value)
        return {"m": model, "o": torch.optim.Adam(model.parameters(), rate, (value, 0.5))}

    ckpt.save(tmp_path, made(0.25))
    target = made(0.75)
    ckpt.load(tmp_path, target, exclude="o.param_groups.0.lr")
    [group] = target["o"].param_groups
    assert (float(group["lr"]), group["betas"]) == (0.75, (0.25, 0.5))


def test_another_entry_of_an_optimizer_stays_if_it_is_not_selected(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        seen: object = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict.pop("seen")
            super().load_state_dict(state_dict)

    def made(seen: int) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = Counting(model.parameters(), lr=seen / 8)
        optimizer.seen = seen
        return {"m": model, "o": optimizer}

    ckpt.save(tmp_path, made(1))
    target = made(2)
    ckpt.load(tmp_path, target, exclude="o.seen")
    assert (target["o"].seen, target["o"].param_groups[0]["lr"]) == (2, 1 / 8)
    ckpt.load(tmp_path, target)
    assert target["o"].seen == 1


def test_a_module_of_which_nothing_is_selected_is_not_loaded(tmp_path: Path) -> None:
    class Halves(nn.Linear):
        def load_state_dict(self, state_dict: Mapping[str, Any], *more: Any, **options: Any) -> Any:
            halves = {name: value / 2 for name, value in state_dict.items()}
            return super().load_state_dict(halves, *more, **options)

    model = Halves(1, 1)
    before = model.weight.item()
    ckpt.save(tmp_path, {"m": model, "n": 1})
    assert ckpt.load(tmp_path, {"m": model, "n": 2}, include="n")["n"] == 1
    assert model.weight.item() == before
    ckpt.load(tmp_path, {"m": model, "n": 2})
    assert model.weight.item() == before / 2


def test_a_place_takes_what_is_selected_of_what_was_saved(tmp_path: Path) -> None:
    tensors = [torch.ones(1), torch.zeros(2)]
    ckpt.save(tmp_path, {"a": {"x": 1, "y": [2, {"z": 3}]}, "b": {"list": tensors}, "c": 5})
    found: Any = ckpt.load(tmp_path, {"all": None}, rename={"": "all"}, include=["all.b.list.1"])
    assert list(found["all"]) == ["b"]
    into: Any = ckpt.load(tmp_path, {}, include=["a.y", "b.list.1"])
    assert into["a"] == {"y": [2, {"z": 3}]}
    assert into["b"]["list"][0] is None
    assert torch.equal(into["b"]["list"][1], tensors[1])
    assert "c" not in into

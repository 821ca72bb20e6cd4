"""Modules are saved and loaded as torch does: the entries of `state_dict()`, by clean names.

The oracle is torch: `state_dict()` and `load_state_dict()` of the module itself.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
import sharding
from tests.garbage import collect_garbage
from tests.old_torch import runs_fsdp2

Make = Callable[[], nn.Module]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for wrappers that need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stored(place: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint's module `m` by name."""
    found = ckpt.read(place)
    assert isinstance(found, dict)
    return dict(found["m"])


class Marked(nn.Linear):
    """A layer with a buffer, one that is not saved, and one that is None."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mark", torch.rand(2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)
        self.register_buffer("nothing", None)


class Holder(nn.Module):
    """A user's own class, with children of the names that wrappers use, and a parameter."""

    def __init__(self, child: str) -> None:
        super().__init__()
        self.add_module(child, Marked())
        self.weight = nn.Parameter(torch.rand(2, 2))
        self.register_buffer("mark", torch.rand(3))


def grown(module: nn.Module) -> nn.Module:
    """The module, which gets a buffer, a parameter and a child of its own."""
    module.register_buffer("ema", torch.rand(2))
    module.register_parameter("scale", nn.Parameter(torch.rand(3)))
    module.add_module("head", nn.Linear(2, 1))
    return module


def compiled(module: nn.Module) -> nn.Module:
    """The module in the wrapper of torch.compile."""
    found: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return found


def ddp(module: nn.Module) -> nn.Module:
    """The module in DistributedDataParallel, over the ranks of this test."""
    return nn.parallel.DistributedDataParallel(module)


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compiled": (compiled, "_orig_mod."),
    "DDP": (ddp, "module."),
    "DataParallel": (nn.DataParallel, "module."),
    "compiled DDP": (lambda inner: compiled(ddp(inner)), "_orig_mod.module."),
    "DDP of a compiled one": (lambda inner: ddp(compiled(inner)), "module._orig_mod."),
    "checkpointed": (checkpoint_wrapper, "_checkpoint_wrapped_module."),
}
"""The wrapping functions, and the parts of names that they add."""


def same(one: nn.Module, other: nn.Module) -> None:
    """Both modules have the same state dict."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_entries_of_a_wrapper_itself_are_saved_and_loaded(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    torch.manual_seed(0)
    wrap, part = WRAPPERS[kind]

    def make() -> nn.Module:
        # the hooks of activation checkpointing move all entries of the wrapper into its module
        made = wrap(Marked()) if kind == "checkpointed" else grown(wrap(Marked()))
        return nn.Sequential(made, nn.Linear(1, 1)) if nested else made

    saved, target = make(), make()
    ckpt.save(tmp_path / "a", {"m": saved})
    names = [key.replace(part, "") for key in saved.state_dict()]
    assert list(stored(tmp_path / "a")) == names
    ckpt.load(tmp_path / "a", {"m": target})
    same(saved, target)
    ckpt.state_dict.load({"m": make()}, {"m": saved})
    ckpt.load(tmp_path / "a", {"m": saved})
    same(saved, target)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("child", ["_orig_mod", "module", "_fsdp_wrapped_module", "a_orig_mod"])
def test_a_childs_name_alone_makes_no_wrapper(tmp_path: Path, child: str, nested: bool) -> None:
    torch.manual_seed(0)
    saved, target = Holder(child), Holder(child)
    if nested:
        saved, target = nn.Sequential(saved), nn.Sequential(target)  # type: ignore[assignment]
    ckpt.save(tmp_path / "a", {"m": saved})
    assert list(stored(tmp_path / "a")) == list(saved.state_dict())
    ckpt.load(tmp_path / "a", {"m": target})
    same(saved, target)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["compiled", "DDP", "DataParallel", "compiled DDP"])
def test_a_wrappers_entry_of_the_name_of_an_inner_one_is_an_error(
    tmp_path: Path, kind: str
) -> None:
    wrap, part = WRAPPERS[kind]
    module = nn.Sequential(wrap(Marked()))
    ckpt.save(tmp_path / "a", {"m": module})
    module[0]._buffers["mark"] = torch.rand(2)  # a compiled one refuses it in register_buffer
    both = rf"'0\.mark' and '0\.{part}mark'.*the name '0\.mark'"
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(ckpt.CkptError, match=both):
            call(tmp_path / "b" if call is ckpt.save else tmp_path / "a", {"m": module})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_an_optimizer_of_a_wrappers_own_parameters_resumes(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    wrap, _ = WRAPPERS[kind]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(wrap(Marked()) if kind == "checkpointed" else grown(wrap(Marked())))
        return model, torch.optim.Adam(model.parameters())

    model, optim = make()
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optim.step()
    ckpt.save(tmp_path / "a", {"m": model, "o": optim})
    fresh, other = make()
    ckpt.load(tmp_path / "a", {"m": fresh, "o": other})
    same(model, fresh)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optim.state[one]["exp_avg"], other.state[two]["exp_avg"])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["compiled", "DDP", "DataParallel", "compiled DDP"])
def test_a_module_is_loaded_from_and_into_a_wrapped_one(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    wrap, _ = WRAPPERS[kind]
    plain, inner = nn.Sequential(Marked()), Marked()
    wrapped = nn.Sequential(wrap(inner))
    ckpt.save(tmp_path / "a", {"m": plain})
    ckpt.load(tmp_path / "a", {"m": wrapped})
    same(plain, nn.Sequential(inner))
    again = nn.Sequential(Marked())
    ckpt.save(tmp_path / "b", {"m": wrapped})
    ckpt.load(tmp_path / "b", {"m": again})
    same(plain, again)


def sharded_with_own_entries(folder: Path, ours: bool, original: bool) -> set[str]:
    torch.manual_seed(0)
    outer = sharding.FullyShardedDataParallel if ours else FullyShardedDataParallel
    device = {} if ours else {"device_id": torch.device("cpu")}

    def make() -> nn.Module:
        made = outer(compiled(Marked()), use_orig_params=original, **device)
        made.register_buffer("ema", torch.rand(2))
        return made

    saved, target = make(), make()
    ckpt.save(folder, {"m": saved})
    ckpt.load(folder, {"m": target})
    mine, theirs = (
        [*module.parameters(), module.ema, module.get_buffer(inner)]
        for module in (saved, target)
        for inner in [next(name for name, _ in module.named_buffers() if name.endswith("mark"))]
    )
    assert all(map(torch.equal, mine, theirs))
    return set(stored(folder))


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_entries_of_a_sharded_wrapper_itself_are_saved_and_loaded(
    clusters: Callable[[int], Any], tmp_path: Path, ours: bool, original: bool
) -> None:
    for names in clusters(2).run(sharded_with_own_entries, tmp_path / "a", ours, original):
        assert names == {"weight", "bias", "mark", "ema"}


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


KINDS: dict[str, Make] = {
    "no entry": nn.ReLU,
    "buffers not saved, and None": Marked,
    "ties": tied,
    "a module in two places": lambda: nn.Sequential(*[Marked()] * 2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "batch norm": lambda: nn.BatchNorm1d(2),
    "a script": lambda: torch.jit.script(Marked()),
    "a trace": lambda: torch.jit.trace(Marked(), torch.rand(1, 2)),
    "a script in a wrapper": lambda: nn.DataParallel(torch.jit.script(Marked())),
    "an average": lambda: torch.optim.swa_utils.AveragedModel(Marked()),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_module_has_the_names_and_tensors_of_its_state_dict(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    saved, target = KINDS[kind](), KINDS[kind]()
    ckpt.save(tmp_path / "a", {"m": saved})
    before, found = saved.state_dict(), stored(tmp_path / "a")
    part = "module." if isinstance(saved, nn.DataParallel) else ""
    assert list(found) == [name.removeprefix(part) for name in before]
    assert all(map(torch.equal, found.values(), before.values()))
    ckpt.load(tmp_path / "a", {"m": target})
    same(saved, target)


Hook = Callable[[nn.Module, dict[str, Any], str, dict[str, Any]], None]


def adds(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    state[f"{prefix}extra"] = torch.ones(2)


def adds_value(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    state[f"{prefix}extra"] = 3


def drops(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    del state[f"{prefix}bias"]


def hooked(hook: Hook) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(hook)
    return module


def forgiving() -> nn.Module:
    """A layer whose state dict lacks its bias, and whose hook forgives that."""
    module = hooked(drops)
    module.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
    return module


class SavesMore(nn.Linear):
    """A layer that saves a tensor which is no buffer, and does not take it back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.rand(3)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}scale"] = self.scale


class TakesMore(SavesMore):
    """The layer that takes it back, too."""

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.scale = state.pop(f"{prefix}scale").clone()
        super()._load_from_state_dict(state, prefix, *more)


class Counting(nn.Linear):
    """A layer that counts its loads."""

    loads = 0

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.loads += 1
        super()._load_from_state_dict(*arguments)


class Transposed(nn.Linear):
    """A layer that saves its weight in the other order."""

    def __init__(self) -> None:
        super().__init__(2, 3)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}weight"] = self.weight.t().contiguous()

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *more)


class Refusing(nn.Linear):
    """A layer whose load reports a name: in `missing_keys`, `unexpected_keys` or `error_msgs`."""

    def __init__(self, at: int, name: str) -> None:
        super().__init__(2, 2)
        self.at, self.name = at, name

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        super()._load_from_state_dict(state, prefix, *more)
        more[self.at].append(prefix + self.name)


class Filtered(nn.Linear):
    """A layer whose own state dict lacks the bias."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        return {key: value for key, value in state.items() if key != "bias"}


class Completed(Filtered):
    """The layer, whose own load forgives that."""

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({**state, "bias": self.bias}, strict, assign)


class GetsExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}


class SetsExtra(nn.Linear):
    def set_extra_state(self, state: object) -> None:
        pass


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyConv1d(2, 1))


def run_before() -> nn.Module:
    """The modules that `lazy` becomes."""
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 1))


def observer(runs: bool) -> nn.Module:
    found = torch.ao.quantization.PerChannelMinMaxObserver()
    if runs:
        found(torch.rand(3, 2))
    return found


def trained_for_quantisation(runs: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(module.train(), inplace=True)
    if runs:
        module(torch.rand(4, 2))
    return module


def linear() -> nn.Module:
    return nn.Linear(2, 2)


LOADS: dict[str, tuple[Make, Make]] = {
    "a hook that drops, all is there": (linear, lambda: hooked(drops)),
    "a hook that forgives": (forgiving, forgiving),
    "a tensor of its own": (TakesMore, TakesMore),
    "another order": (Transposed, Transposed),
    "a count of loads": (lambda: Counting(2, 2), lambda: Counting(2, 2)),
    "its own state dict and load": (lambda: Completed(2, 2), lambda: Completed(2, 2)),
    "lazy layers": (run_before, lazy),
    "lazy layers in a wrapper": (
        lambda: nn.DataParallel(run_before()),
        lambda: nn.DataParallel(lazy()),
    ),
    "an observer that has run": (lambda: observer(True), lambda: observer(False)),
    "training for quantisation": (
        lambda: trained_for_quantisation(True),
        lambda: trained_for_quantisation(False),
    ),
    "a script": (linear, lambda: torch.jit.script(linear())),
}
"""A saved module and a target that torch's `load_state_dict` fills."""
REFUSED: dict[str, tuple[Make, str, bool]] = {
    "a tensor of a hook": (lambda: hooked(adds), "m.extra", True),
    "a value of a hook": (lambda: hooked(adds_value), "m.extra", True),
    "a hook that drops": (lambda: hooked(drops), "m.bias", True),
    "a tensor that is only saved": (SavesMore, "m.scale", True),
    "its own state dict": (lambda: Filtered(2, 2), "m.bias", True),
    "an extra state that is only saved": (lambda: GetsExtra(2, 2), "m._extra_state", True),
    "an extra state that is only loaded": (lambda: SetsExtra(2, 2), "m._extra_state", True),
    "a key that its own load refuses": (lambda: Refusing(3, "bias"), "m.bias", False),
    "a key that its own load misses": (lambda: Refusing(2, "table"), "m.table", False),
}
"""Modules that torch's strict `load_state_dict` refuses, the name, and whether it shows early."""


@pytest.mark.filterwarnings("ignore:(Lazy modules|.*uant|must run observer)")
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("kind", list(LOADS))
def test_a_module_is_filled_as_by_its_own_load_state_dict(
    tmp_path: Path, kind: str, memory: bool
) -> None:
    torch.manual_seed(0)
    (make, make_target) = LOADS[kind]
    saved, target, expected = make(), make_target(), make_target()
    expected.load_state_dict(saved.state_dict())
    if memory:
        ckpt.state_dict.load({"m": saved}, {"m": target})
    else:
        ckpt.save(tmp_path / "a", {"m": saved})
        ckpt.load(tmp_path / "a", {"m": target})
    same(target, expected)
    assert getattr(target, "loads", 1) == 1


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_name_that_torch_misses_or_refuses_is_a_mismatch(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    make, name, is_early = REFUSED[kind]
    saved, target = make(), make()
    with pytest.raises(RuntimeError, match=name.removeprefix("m.")):
        make().load_state_dict(saved.state_dict())
    ckpt.save(tmp_path / "a", {"m": saved})
    before = [parameter.clone() for parameter in target.parameters()]
    for load in (
        lambda: ckpt.load(tmp_path / "a", {"m": target}),
        lambda: ckpt.state_dict.load({"m": saved}, {"m": target}),
    ):
        with pytest.raises(ckpt.MismatchError, match=name) as raised:
            load()
        assert [one.name for one in raised.value.differences] == [name]
        assert isinstance(raised.value, ckpt.PartialLoadError) != is_early
    assert all(map(torch.equal, target.parameters(), before)) == is_early
    with pytest.warns(ckpt.SkippedWarning) as warned:
        ckpt.load(tmp_path / "a", {"m": target}, strict=False)
    assert [one.name for w in warned for one in w.message.differences] == [name]
    assert torch.equal(target.weight, saved.weight)


def test_an_error_of_a_modules_own_load_is_raised(tmp_path: Path) -> None:
    saved, target = Refusing(4, "bad weather"), Refusing(4, "bad weather")
    ckpt.save(tmp_path / "a", {"m": saved})
    for strict in (True, False):
        with pytest.raises(ckpt.PartialLoadError, match=r"bad weather.*of m\)"):
            ckpt.load(tmp_path / "a", {"m": target}, strict=strict)


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("b", tensor)
    return module


def wrapping() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2)))
    return module


UNFIT: dict[str, tuple[Make, str]] = {
    "a wrapper of tensors": (wrapping, r"m\.weight: .*TwoTensor wraps other tensors"),
    "sparse": (lambda: with_buffer(torch.eye(2).to_sparse()), r"m\.b: .*sparse_coo"),
    "sparse rows": (lambda: with_buffer(torch.eye(2).to_sparse_csr()), r"m\.b: .*sparse_csr"),
    "nested": (
        lambda: with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        r"m\.b: .*nested tensor",
    ),
    "quantised": (
        lambda: with_buffer(torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)),
        r"m\.b: .*qint8",
    ),
    "meta": (lambda: with_buffer(torch.empty(2, 2, device="meta")), r"m\.b: .*meta device"),
    "expanded": (lambda: with_buffer(torch.zeros(2).expand(2, 2)), r"m\.b: .*one address"),
    "functional": (
        lambda: with_buffer(torch._to_functional_tensor(torch.zeros(2, 2))),
        r"m\.b: .*functional tensor",
    ),
    "lazy, of another dtype": (lambda: nn.LazyLinear(2).double(), r"m\.weight: .*float64"),
}
"""Targets that no load fills, and the error."""


@pytest.mark.filterwarnings("ignore:(Lazy modules|Sparse CSR|The PyTorch API of nested|.*uant)")
@pytest.mark.parametrize("kind", list(UNFIT))
def test_a_target_that_cannot_be_filled_is_a_difference_with_its_name(
    tmp_path: Path, kind: str
) -> None:
    make, words = UNFIT[kind]
    target = make()
    has_buffer = "b" in dict(target.named_buffers())
    saved = with_buffer(torch.rand(2, 2)) if has_buffer else nn.Linear(2, 2)
    loose = torch.zeros(2)
    state, into = {"first": torch.ones(2), "m": saved}, {"first": loose, "m": target}
    with ckpt.Checkpointer(tmp_path / "run", every_steps=1) as run:
        run.save(1, state)
    with ckpt.Checkpointer(tmp_path / "run", every_steps=1) as run:
        for load in (
            lambda: ckpt.load(ckpt.latest(tmp_path / "run"), into),
            lambda: ckpt.state_dict.load(state, into),
            lambda: run.restore(into),
        ):
            with pytest.raises(ckpt.MismatchError, match=words):
                load()
    assert not loose.any()


Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained(width: int, steps: int = 1, groups: int = 1) -> Trained:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    lists = [[*model[0].parameters()], [*model[1].parameters()]]
    every = [{"params": one} for one in lists] if groups == 2 else model.parameters()
    optim = torch.optim.AdamW(every, 1e-2)
    for _ in range(steps):
        step(model, optim)
    return model, optim


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    optim.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optim.step()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("first", ["m", "o"])
def test_a_skipped_weight_takes_its_moments_along(
    tmp_path: Path, first: str, steps: int, groups: int
) -> None:
    saved, saved_optim = trained(10, groups=groups)
    ckpt.save(tmp_path / "a", {"m": saved, "o": saved_optim})
    model, optim = trained(12, steps, groups)
    kept = {p: {k: v.clone() for k, v in state.items()} for p, state in optim.state.items()}
    state: dict[str, Any] = {"m": model, "o": optim}
    state = state if first == "m" else {"o": optim, "m": model}
    with pytest.raises(ckpt.MismatchError) as raised:
        ckpt.load(tmp_path / "a", state)
    moments = ("exp_avg", "exp_avg_sq", "step")
    skipped = ("0.weight", "0.bias", "1.weight")
    names = {f"m.{n}" for n in skipped} | {f"o.state.{n}.{e}" for n in skipped for e in moments}
    assert {one.name for one in raised.value.differences} == names
    with pytest.warns(ckpt.SkippedWarning) as warned:
        ckpt.load(tmp_path / "a", state, strict=False)
    [warning] = [w.message for w in warned]
    assert {one.name for one in warning.differences} == names
    assert "strict=False skips 12: m.0.weight" in str(warning)
    for name, parameter in model.named_parameters():
        if name in skipped:
            now, before = optim.state.get(parameter, {}), kept.get(parameter, {})
            assert now.keys() == before.keys()
            assert all(torch.equal(now[key], before[key]) for key in now)
        else:
            assert torch.equal(parameter, saved.get_parameter(name))
            now, there = optim.state[parameter], saved_optim.state[saved.get_parameter(name)]
            assert all(torch.equal(now[key], there[key]) for key in there)
    step(model, optim)


def test_moments_of_another_shape_are_refused_though_their_weights_are_excluded(
    tmp_path: Path,
) -> None:
    model, optim = trained(10)
    ckpt.save(tmp_path / "a", {"m": model, "o": optim})
    model, optim = trained(12)
    with pytest.raises(ckpt.MismatchError, match=r"o\.state\.0\.weight\.exp_avg: is state of m"):
        ckpt.load(tmp_path / "a", {"m": model, "o": optim}, exclude="m.*")
    resized = [f"o.state.{name}.*" for name in ("0.weight", "0.bias", "1.weight")]
    ckpt.load(tmp_path / "a", {"m": model, "o": optim}, exclude=["m.*", *resized])
    step(model, optim)


def test_moments_of_a_weight_that_the_checkpoint_lacks_are_skipped(tmp_path: Path) -> None:
    model, optim = trained(10)
    ckpt.save(tmp_path / "a", {"m": model, "o": optim})
    ckpt.convert(tmp_path / "a", tmp_path / "b", exclude="m.1.*")
    fresh, other = trained(10, steps=0)
    with pytest.warns(ckpt.SkippedWarning) as warned:
        ckpt.load(tmp_path / "b", {"m": fresh, "o": other}, strict=False)
    names = {one.name for w in warned for one in w.message.differences}
    assert {"m.1.weight", "o.state.1.weight.exp_avg", "o.state.1.bias.step"} <= names
    assert [p in other.state for p in fresh.parameters()] == [True, True, False, False]


def resized_and_sharded(folder: Path, original: bool) -> tuple[list[str], bool]:
    def made(width: int) -> Trained:
        torch.manual_seed(width)
        inner = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        model = sharding.FullyShardedDataParallel(inner, use_orig_params=original)
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    model, optim = made(10)
    step(model, optim)
    ckpt.save(folder, {"m": model, "o": optim})
    model, optim = made(12)
    step(model, optim)
    before = [v["exp_avg"].clone() for v in optim.state.values()]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ckpt.SkippedWarning)
        ckpt.load(folder, {"m": model, "o": optim}, strict=False)
    skipped = [w.message for w in warned if isinstance(w.message, ckpt.SkippedWarning)]
    shapes = [v["exp_avg"].shape for v in optim.state.values()]
    step(model, optim)
    names = sorted(one.name for one in skipped[0].differences) if skipped else []
    return names, shapes == [one.shape for one in before]


@pytest.mark.parametrize("original", [False, True])
def test_a_skipped_weight_in_a_flat_parameter_takes_its_moments_along(
    clusters: Callable[[int], Any], tmp_path: Path, original: bool
) -> None:
    (names, fits), (others, also_fits) = clusters(2).run(
        resized_and_sharded, tmp_path / "a", original
    )
    assert fits
    assert also_fits
    assert not others  # rank 0 warns for all
    assert {"m.0.weight", "o.state.0.weight.exp_avg", "o.state.1.weight.exp_avg_sq"} <= {*names}
    assert "o.state.1.bias.exp_avg" not in names


def skipped_on_one_rank(folder: Path) -> list[str]:
    rank = dist.get_rank()
    ckpt.save(folder, {"w": torch.ones(2)})
    target = {"w": torch.zeros(2)} | ({"mine": torch.zeros(2)} if rank == 1 else {})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ckpt.load(folder, target, strict=False)
    return [one.name for w in warned for one in w.message.differences]


def test_a_name_that_is_skipped_on_one_rank_is_told_there(
    clusters: Callable[[int], Any], tmp_path: Path
) -> None:
    assert clusters(2).run(skipped_on_one_rank, tmp_path / "a") == [[], ["mine"]]


def resumed_without_elements(entry_point: str, folder: str) -> bool:
    """Whether a module with parameters of no element is saved and loaded, with its optimizer."""
    from torch.distributed.fsdp import fully_shard as torchs

    module_of = {"torch": torchs, "ours": sharding.fully_shard}[entry_point]
    states: list[dict[str, Any]] = []
    for seed in range(2):
        torch.manual_seed(seed)
        # its second cluster has a Linear of 4 to 0 features, and one of 0 to 10
        model: Any = module_of(nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5, 10]))
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if seed == 0 and entry_point == "ours":  # torch's reduction refuses such parameters
            model(torch.ones(3, 4), torch.tensor([1, 7, 15])).loss.backward()
            optim.step()
        states.append({"model": model, "optim": optim})
    ckpt.save(folder, states[0])
    ckpt.load(folder, states[1])
    first, second = ([p.to_local() for p in s["model"].parameters()] for s in states)
    return all(map(torch.equal, first, second))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("entry_point", ["torch", "ours"])
def test_parameters_without_elements_are_saved_and_loaded_with_their_whole_shape(
    clusters: Callable[[int], Any], tmp_path: Path, ranks: int, entry_point: str
) -> None:
    assert all(clusters(ranks).run(resumed_without_elements, entry_point, str(tmp_path / "c")))
    read = ckpt.read(tmp_path / "c")["model"]
    shapes = [tuple(read[f"tail.1.{index}.weight"].shape) for index in range(2)]
    assert shapes == [(0, 4), (10, 0)]


def test_a_model_that_nobody_needs_any_more_is_freed_after_a_save(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    ckpt.prepare(state)
    ckpt.save(tmp_path / "a", state)
    ckpt.save(tmp_path / "b", state, blocking=False).wait()
    moments = optimizer.state[model[0].weight].values()
    tensors = [*model.state_dict(keep_vars=True).values(), *moments]
    freed: list[Any] = []
    for thing in (model, optimizer, *tensors):
        weakref.finalize(thing, freed.append, None)
    expected = len(tensors) + 2
    del model, optimizer, state, moments, tensors, thing
    collect_garbage()
    assert len(freed) == expected


def moved_after_a_save(folder: str) -> tuple[torch.Size, list[str], int]:
    """A sharded model and its optimizer that change after a save.

    The shape of a moment that is spread otherwise, over the same memory; the dtypes of the model
    when it is cast; how many of its local tensors are freed.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    for name in ("a", "b"):
        ckpt.save(f"{folder}/{name}", state)
    moments = optimizer.state[model[0].weight]
    local = moments["exp_avg"].to_local()
    moments["exp_avg"] = DTensor.from_local(local, mesh, [Shard(1)])
    model.half()
    ckpt.save(f"{folder}/c", state)
    stored: Any = ckpt.read(f"{folder}/c")
    shape = stored["optimizer"]["state"]["0.weight"]["exp_avg"].shape
    dtypes = [str(tensor.dtype) for tensor in stored["model"].values()]
    freed: list[Any] = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        weakref.finalize(parameter._local_tensor, freed.append, None)
    del model, optimizer, state, parameter, moments, local
    gc.collect()
    return shape, dtypes, len(freed)


@runs_fsdp2
def test_a_sharded_model_that_changes_after_a_save_is_stored_as_it_is_then_and_is_freed(
    clusters: Callable, tmp_path: Path
) -> None:
    for shape, dtypes, freed in clusters(2).run(moved_after_a_save, str(tmp_path)):
        assert tuple(shape) == (2, 8)
        assert dtypes == ["torch.float16"] * 4
        assert freed == 4

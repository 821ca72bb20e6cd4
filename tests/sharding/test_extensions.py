"""Parameters that say themselves how they are gathered (E-01 to E-06).

Every function that trains runs the same script with torch's `fully_shard` and with ours, on two
ranks, and compares them bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.old_torch import TORCH_TRAINS_ON_CPU, needs
from tests.selection import thorough

Clusters = Callable[[int], Any]


class Pair(TwoTensor):
    """Two tensors that are gathered one beside the other; it notes how its hooks are called."""

    calls: ClassVar[list[dict[str, Any]]] = []

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: None, size: torch.Size, stride: tuple[int, ...]
    ) -> Pair:
        return Pair(inner["a"], inner["b"], size, stride)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], str]:
        return (self.a, self.b), "metadata"

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: str,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        assert metadata == "metadata"
        a, b = outputs
        Pair.calls.append({"out": out, "a": a, "dtypes": (a.dtype, param_dtype)})
        if out is None:
            pair = type(self)(a, b).to(param_dtype)
            return pair, (pair.a, pair.b)
        assert isinstance(out, Pair)
        for given, inner in ((a, out.a), (b, out.b)):
            assert inner.dtype == param_dtype
            if given.dtype == param_dtype:
                assert given.untyped_storage().data_ptr() == inner.untyped_storage().data_ptr()
            else:
                inner.copy_(given)
        return None


class FullPair(Pair):
    """The same with the long form of the first hook."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[torch.Tensor, ...], str]:
        Pair.calls.append(
            {
                "mesh": (mesh.ndim, mesh.size()),
                "size": outer_size,
                "stride": outer_stride,
                "module": module,
                "policy": mp_policy,
            }
        )
        return (self.a, self.b), "metadata"

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: None, size: torch.Size, stride: tuple[int, ...]
    ) -> FullPair:
        return FullPair(inner["a"], inner["b"], size, stride)


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width, bias=bias)
        self.second = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def network(kind: type[Pair] = Pair, factor: float = 1.0, width: int = 8) -> nn.Sequential:
    """Three MLPs whose weights are pairs; the second tensor of each is a multiple of the first."""
    torch.manual_seed(7)
    model = nn.Sequential(*(MLP(width) for _ in range(3)))
    for layer in linear_layers(model):
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(kind(weight, weight * factor))
    return model


def linear_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers of a model."""
    return (module for module in model.modules() if isinstance(module, nn.Linear))


def libraries() -> dict[str, ModuleType]:
    """Torch's and ours, by name: imported on the ranks only."""
    import torch.distributed.fsdp as oracle

    import sharding.fsdp2 as ours
    import sharding.policies

    ours.MixedPrecisionPolicy = sharding.policies.MixedPrecisionPolicy
    found = {"torch": oracle, "ours": ours}
    if not TORCH_TRAINS_ON_CPU:
        del found["torch"]
    return found


def sharded(library: ModuleType, model: nn.Sequential, **options: Any) -> nn.Sequential:
    """The model, each of its MLPs a unit, and the rest one more."""
    for part in model:
        library.fully_shard(part, **options)
    library.fully_shard(model, **options)
    return model


def parts(tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Copies of both tensors of a pair, or of the one twice; of DTensors, the local ones."""
    if tensor is None:
        return [None]
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    pair = (local.a, local.b) if isinstance(local, TwoTensor) else (local, local)
    return [part.detach().clone() for part in pair]


def chunk_of_mine(tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
    """What this rank has of both tensors of a whole pair."""
    rank = dist.get_rank()
    return [None if t is None else t.chunk(2)[rank] for t in parts(tensor)]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None], what: object) -> None:
    """Assert that two lists of tensors are equal bit for bit."""
    assert len(one) == len(other), what
    for left, right in zip(one, other, strict=True):
        if left is None or right is None:
            assert left is right, what
        else:
            assert left.dtype == right.dtype, what
            assert torch.equal(left, right), (what, left, right)


def my_input(seed: int = 0, width: int = 8) -> torch.Tensor:
    """Another input on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(2, width, generator=generator)


def averaged(model: nn.Module) -> None:
    """Average the gradients of a replica over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad.a)
            dist.all_reduce(parameter.grad.b)
            parameter.grad.detach().div_(2)


def train_beside_a_replica(reshard_after_forward: bool, names: list[str], factor: float) -> None:
    replica = network(factor=factor)
    chosen = {name: library for name, library in libraries().items() if name in names}
    models = {
        name: sharded(library, network(factor=factor), reshard_after_forward=reshard_after_forward)
        for name, library in chosen.items()
    }
    adam = partial(torch.optim.Adam, lr=1e-2, foreach=True)
    optimizers = [adam(m.parameters()) for m in (replica, *models.values())]
    for step in range(5):
        x = my_input()
        loss = replica(x).sum()
        loss.backward()
        averaged(replica)
        for name, model in models.items():
            mine = model(x).sum()
            mine.backward()
            same(parts(mine), parts(loss), (name, step))
            pairs = zip(model.named_parameters(), replica.parameters(), strict=True)
            for (key, parameter), whole in pairs:
                assert isinstance(parameter, DTensor)
                assert type(parameter._local_tensor) is Pair
                same(parts(parameter), chunk_of_mine(whole), (name, step, key))
                same(parts(parameter.grad), chunk_of_mine(whole.grad), (name, step, key))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("reshard_after_forward", [True, thorough(False)])
def test_e01_pairs_train_as_a_replica_and_as_with_torch(
    clusters: Clusters, reshard_after_forward: bool
) -> None:
    clusters(2).run(train_beside_a_replica, reshard_after_forward, ["torch", "ours"], 1.0)


@pytest.mark.thorough
def test_e01_each_tensor_of_a_pair_has_its_own_gradient(clusters: Clusters) -> None:
    # Torch reduces the second tensor's gradient and gives it to both.
    clusters(2).run(train_beside_a_replica, True, ["ours"], -0.5)


def watch_the_hooks() -> None:
    model = sharded(libraries()["ours"], network())
    seen: dict[int, dict[str, Any]] = {}
    for _ in range(2):
        Pair.calls.clear()
        model(my_input()).sum().backward()
        for call in Pair.calls:
            storage = call["a"].untyped_storage()
            if call["out"] is None:
                assert storage._cdata not in seen
                seen[storage._cdata] = call
            else:
                assert storage._cdata in seen
                assert call["out"].a.untyped_storage()._cdata == storage._cdata
                assert seen[storage._cdata].setdefault("whole", call["out"]) is call["out"]
            assert storage.nbytes() == 0
    assert len(seen) == 6
    assert all("whole" in call for call in seen.values())


def test_e01_the_second_hook_fills_the_tensor_it_returned_at_first(clusters: Clusters) -> None:
    clusters(2).run(watch_the_hooks)


def train_from_meta() -> None:
    trained = []
    for library in libraries().values():
        Pair.calls.clear()
        with torch.device("meta"):
            model = network()
        policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        sharded(library, model, mp_policy=policy)
        assert all(p.device.type == "meta" for p in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        for parameter in model.parameters():
            nn.init.trunc_normal_(parameter)
            assert isinstance(parameter, DTensor)
            pair = parameter._local_tensor
            assert isinstance(pair, Pair)
            pair.b.copy_(pair.a)
        trained.append(train(model))
        assert {call["dtypes"] for call in Pair.calls} == {(torch.float32, torch.bfloat16)}
    same(trained[0], trained[-1], "from meta")


def train(model: nn.Module, steps: int = 3, width: int = 8) -> list[torch.Tensor | None]:
    """The losses, gradients and parameters of a few steps."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: list[torch.Tensor | None] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(my_input(step, width)).sum()
        loss.backward()
        found += parts(loss)
        for parameter in model.parameters():
            found += parts(parameter) + parts(parameter.grad)
        optimizer.step()
    return found


@pytest.mark.thorough
def test_e02_a_model_from_meta_trains_with_a_real_cast_in_the_second_hook(
    clusters: Clusters,
) -> None:
    clusters(2).run(train_from_meta)


def pre_in_bfloat16(local: torch.Tensor, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor], None]:
    return (local.to(torch.bfloat16),), None


def post_to_param_dtype(
    outputs: tuple[torch.Tensor],
    metadata: None,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    (gathered,) = outputs
    assert gathered.dtype == torch.bfloat16
    if out is not None:
        out.copy_(gathered)
        return None
    whole = gathered.to(param_dtype)
    return whole, (gathered, whole)


def patch(model: nn.Module) -> int:
    """Set the hooks on the local tensors of all weights; how many."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    for parameter in weights:
        assert isinstance(parameter, DTensor)
        local: Any = parameter._local_tensor
        local.fsdp_pre_all_gather = partial(pre_in_bfloat16, local)
        local.fsdp_post_all_gather = torch.no_grad()(post_to_param_dtype)
    return len(weights)


def train_patched(where: str) -> None:
    trained = []
    for name, library in libraries().items():
        with torch.device("meta"):
            model = nn.Sequential(*(MLP(8, bias=True) for _ in range(3)))
        # To torch's autograd, a hook that copies into `out` changes what forward has saved.
        sharded(library, model, reshard_after_forward=name == "ours")
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.uniform_(parameter)
        if where == "on the local tensor":
            assert patch(model) == 6
        else:
            for parameter in model.parameters():
                other: Any = parameter.to_local()  # type: ignore[attr-defined]
                other.fsdp_pre_all_gather = partial(pre_in_bfloat16, other)
                other.fsdp_post_all_gather = post_to_param_dtype
        trained.append(train(model))
        seen = whole_weight(model)
        rounded = torch.equal(seen, seen.to(torch.bfloat16).float())
        assert rounded == (where == "on the local tensor")
    same(trained[0], trained[-1], where)


def whole_weight(model: nn.Sequential) -> torch.Tensor:
    """The first weight as forward has it."""
    first: Any = model[0]
    first.unshard()
    weight: torch.Tensor = first.first.weight.detach().clone()
    first.reshard()
    return weight


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["on the local tensor", "on what to_local returns"])
def test_e03_hooks_set_on_plain_tensors_after_to_empty(clusters: Clusters, where: str) -> None:
    clusters(2).run(train_patched, where)


def arguments_of_the_long_form() -> None:
    libs = libraries()
    policy = libs["ours"].MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for mesh in (init_device_mesh("cpu", (2,)), hybrid_mesh(1, 2), hybrid_mesh(2, 1)):
        Pair.calls.clear()
        model = network(FullPair)
        sharded(libs["ours"], model, mp_policy=policy, mesh=mesh)
        model(my_input()).sum().backward()
        calls = [call for call in Pair.calls if "module" in call]
        assert [call["module"] for call in calls[:6]] == list(linear_layers(model))
        for call in calls:
            layer = call["module"]
            assert call["size"] == torch.Size((layer.out_features, layer.in_features))
            assert call["stride"] == (layer.in_features, 1)
            assert call["policy"] is policy
            assert call["mesh"] == (1, mesh.size(-1))


def hybrid_mesh(replicas: int, shards: int) -> DeviceMesh:
    """Replicas times shards."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def test_e04_the_long_form_gets_whole_size_stride_module_and_policy(clusters: Clusters) -> None:
    clusters(2).run(arguments_of_the_long_form)


def pairs_on_a_hybrid_mesh() -> None:
    mesh = hybrid_mesh(1, 2)
    trained = [
        train(sharded(library, network(FullPair), mesh=mesh)) for library in libraries().values()
    ]
    same(trained[0], trained[-1], mesh)
    # With one shard, torch gives the second hook one tensor for two.
    replicas = train(sharded(libraries()["ours"], network(FullPair), mesh=hybrid_mesh(2, 1)))
    same(replicas[:: len(replicas) // 3], trained[0][:: len(replicas) // 3], "losses")


@pytest.mark.thorough
def test_e04_pairs_train_as_with_torch_on_a_hybrid_mesh(clusters: Clusters) -> None:
    clusters(2).run(pairs_on_a_hybrid_mesh)


class OnlyPre(TwoTensor):
    """A subclass with only the first hook."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.a, self.b), None


class ThreeArguments(Pair):
    """A subclass whose first hook has neither form."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...]
    ) -> tuple[tuple[torch.Tensor, ...], str]:
        return (self.a, self.b), "metadata"


def one_hook_too_few() -> None:
    both = "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined"
    for library in libraries().values():
        model = network(OnlyPre)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match=both):
            library.fully_shard(model)
        late = nn.Sequential(MLP(8))
        library.fully_shard(late)
        local: Any = late[0].second.weight._local_tensor
        local.fsdp_post_all_gather = post_to_param_dtype
        with pytest.raises(AssertionError, match=both):
            late(my_input())
        model = network(ThreeArguments)
        library.fully_shard(model)
        with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather"):
            model(my_input())


@pytest.mark.thorough
def test_e05_one_hook_without_the_other_is_refused(clusters: Clusters) -> None:
    clusters(2).run(one_hook_too_few)


def state_dict_of_pairs() -> None:
    model = sharded(libraries()["ours"], network())
    for _ in range(2):
        parameters = dict(model.named_parameters())
        state = model.state_dict()
        assert state.keys() == parameters.keys()
        for name, tensor in state.items():
            assert isinstance(tensor, DTensor)
            assert tensor.placements == (Shard(0),)
            pair, mine = tensor._local_tensor, parameters[name]._local_tensor
            assert type(pair) is Pair
            assert pair.a.untyped_storage().data_ptr() == mine.a.untyped_storage().data_ptr()
            assert pair.b.untyped_storage().data_ptr() == mine.b.untyped_storage().data_ptr()
        model(my_input()).sum().backward()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    model.load_state_dict(zeros)
    assert not model(my_input()).a.any()  # type: ignore[attr-defined]


def test_e06_a_state_dict_has_pairs_on_the_memory_of_the_parameters(clusters: Clusters) -> None:
    clusters(2).run(state_dict_of_pairs)


# What is more: shapes, dtypes and neighbours.


class Padded(Pair):
    """A pair that pads its inputs to the rows of the first rank."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], str]:
        padded = []
        for tensor in (self.a, self.b):
            padded.append(tensor.new_full((5 if tensor.shape[1] == 5 else 3, tensor.shape[1]), 9.0))
            padded[-1][: len(tensor)] = tensor
        return tuple(padded), "metadata"

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: None, size: torch.Size, stride: tuple[int, ...]
    ) -> Padded:
        return Padded(inner["a"], inner["b"], size, stride)


def train_unevenly() -> None:
    for kind in (Pair, Padded):
        torch.manual_seed(5)
        replica = MLP(5)
        for layer in linear_layers(replica):
            weight = layer.weight.detach()
            layer.weight = nn.Parameter(kind(weight, weight * 2))
        model = copy.deepcopy(replica)
        libraries()["ours"].fully_shard(model)
        for step in range(2):
            for each in (replica, model):
                each.zero_grad()
            x = my_input(step, 5)
            loss, mine = replica(x).sum(), model(x).sum()
            same(parts(mine), parts(loss), kind)
            loss.backward()
            mine.backward()
            averaged(replica)
            for one, whole in zip(model.parameters(), replica.parameters(), strict=True):
                same(parts(one.grad), chunk_of_mine(whole.grad), kind)


def test_pairs_of_odd_size_train_as_a_replica_padded_or_not(clusters: Clusters) -> None:
    clusters(2).run(train_unevenly)


def shard_the_second_dimension() -> None:
    trained = [
        train(sharded(library, network(), shard_placement_fn=lambda _: Shard(1)))
        for library in libraries().values()
    ]
    same(trained[0], trained[-1], "second dimension")


@pytest.mark.thorough
def test_pairs_train_as_with_torch_when_sharded_on_another_dimension(clusters: Clusters) -> None:
    clusters(2).run(shard_the_second_dimension)


class Quantized(torch.Tensor):
    """Eight-bit integers and a scale for each row; whole, it is a plain tensor."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, data.shape, dtype=torch.float32, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __repr__(self) -> str:
        return f"Quantized({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: None, size: torch.Size, stride: tuple[int, ...]
    ) -> Quantized:
        return Quantized(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        first = args[0]
        if func is aten.new_zeros.default:
            data = first.data_.new_zeros(args[1])
            return Quantized(data, first.scale.new_zeros((args[1][0], 1)))
        if func is aten.copy_.default:
            first.data_.copy_(args[1].data_)
            first.scale.copy_(args[1].scale)
            return first
        if func in (aten.as_strided.default, aten.view.default):
            return Quantized(first.data_.view(args[1]), first.scale)
        out = [func(t, *args[1:], **kwargs) for t in (first.data_, first.scale)]
        if isinstance(out[0], torch.Tensor):
            return Quantized(*out)
        return [Quantized(*each) for each in zip(*out, strict=True)]

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.data_, self.scale), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        data, scale = outputs
        assert (data.dtype, scale.dtype) == (torch.int8, torch.float32)
        assert scale.shape == (len(data), 1)
        whole = (data * scale).to(param_dtype)
        if out is not None:
            out.copy_(whole)
            return None
        return whole, (whole,)


def train_beside_quantized() -> None:
    trained = []
    for name, library in libraries().items():
        torch.manual_seed(3)
        model = nn.Sequential(*(MLP(8, bias=True) for _ in range(2)))
        for layer in linear_layers(model):
            data = torch.randint(-9, 9, layer.weight.shape, dtype=torch.int8)
            scale = torch.rand(len(data), 1)
            layer.weight = nn.Parameter(Quantized(data, scale), requires_grad=False)
        sharded(library, model, reshard_after_forward=name == "ours")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found: list[torch.Tensor | None] = []
        for step in range(3):
            optimizer.zero_grad()
            loss = model(my_input(step)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
            for parameter in model.parameters():
                if parameter.requires_grad:
                    found += parts(parameter)
        trained.append(found)
    same(trained[0], trained[-1], "quantized")


def test_integers_and_scales_are_gathered_beside_plain_parameters(clusters: Clusters) -> None:
    clusters(2).run(train_beside_quantized)


def accumulate() -> None:
    found = []
    for library in libraries().values():
        policy = library.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        model: Any = sharded(library, network(), mp_policy=policy)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            model(my_input(step)).sum().backward()
        model(my_input(3)).sum().backward()
        found.append([part for p in model.parameters() for part in parts(p.grad)])
    same(found[0], found[-1], "accumulated")


@pytest.mark.thorough
def test_gradients_of_pairs_add_up_as_with_torch(clusters: Clusters) -> None:
    clusters(2).run(accumulate)


def tie() -> None:
    replica = network(factor=2.0)
    replica[2].first.weight = replica[0].first.weight  # type: ignore[union-attr]
    model = sharded(libraries()["ours"], copy.deepcopy(replica))
    x = my_input()
    for each in (replica, model):
        each(x).sum().backward()
    averaged(replica)
    for one, whole in zip(model.parameters(), replica.parameters(), strict=True):
        same(parts(one.grad), chunk_of_mine(whole.grad), "tied")


def test_a_pair_tied_across_units_trains_as_in_a_replica(clusters: Clusters) -> None:
    clusters(2).run(tie)


def gather_a_subclass() -> None:
    """The first hook returns a cast of the subclass itself, which decides what is copied of it."""

    def pre(self: TwoTensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return (self.to(torch.bfloat16),), None

    def post(self: TwoTensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        (gathered,) = outputs
        assert type(gathered) is torch.Tensor
        assert gathered.dtype is torch.bfloat16
        if out is None:
            made = gathered.to(dtype)
            return made, (gathered, made)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered)
        return None

    losses = {}
    for name, library in libraries().items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        weight = model[0].weight.detach()
        model[0].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
        library.fully_shard(model)
        local: Any = model[0].weight._local_tensor
        local.fsdp_pre_all_gather = pre.__get__(local)
        local.fsdp_post_all_gather = post.__get__(local)
        losses[name] = []
        for seed in range(2):
            loss = model(my_input(seed)).square().sum()
            loss.backward()
            losses[name].append((loss.item(), model[0].weight.grad.to_local().sum().item()))
    assert losses["ours"] == losses["torch"]


@needs((2, 10), "torch's FSDP2 does not train right on a CPU before")
def test_a_hook_may_give_a_subclass_as_with_torch(clusters: Clusters) -> None:
    clusters(2).run(gather_a_subclass)


def change_what_is_gathered() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    libraries()["ours"].fully_shard(model)
    patch(model)
    model(my_input()).sum().backward()
    local: Any = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local.double(),), None)
    with pytest.raises(RuntimeError, match=r"0\.weight returned .*float64.*bfloat16.*before"):
        model(my_input())
    del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
    with pytest.raises(RuntimeError, match=r"0\.weight was replaced by one without"):
        model(my_input())


def test_what_a_hook_may_not_return_is_refused_by_name(clusters: Clusters) -> None:
    clusters(2).run(change_what_is_gathered)

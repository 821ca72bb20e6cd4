"""Options and wrapping policies: torch's own functions are the oracle, on trees drawn at random."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.fully_sharded_data_parallel as torch_wrapper
import torch.distributed.fsdp.wrap as torch_wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sharding import policies
from sharding import wrap as our_wrap
from sharding.fsdp1.preparation import WrapPlan, auto_wrap, plan_wraps
from sharding.policies import MixedPrecision
from sharding.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.selection import examples


class Wrapper(nn.Module):
    """Stands where a unit would."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def apply_quietly(root: nn.Module, plan: WrapPlan) -> None:
    """Carry out a plan with `Wrapper`, without the warning about modules kept apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        auto_wrap(root, plan, Wrapper)


def tree(shape: Any) -> nn.Module:
    """A module tree from nested lists: an int is a Linear of that many outputs."""
    if isinstance(shape, int):
        return nn.Linear(2, shape, bias=False)
    kind, children = shape
    modules = [tree(child) for child in children]
    if kind == "dict":
        return nn.ModuleDict({f"part{i}": module for i, module in enumerate(modules)})
    if kind == "attention":
        attention = nn.MultiheadAttention(2, 1)
        attention.extra = nn.Sequential(*modules)
        return attention
    return {"list": nn.ModuleList, "sequential": lambda m: nn.Sequential(*m)}[kind](modules)


KINDS = st.sampled_from(["sequential", "sequential", "list", "dict", "attention"])
SHAPES = st.tuples(
    st.just("sequential"),
    st.lists(
        st.recursive(
            st.integers(1, 6),
            lambda inner: st.tuples(KINDS, st.lists(inner, max_size=3)),
            max_leaves=8,
        ),
        max_size=4,
    ),
)
CALLABLE_POLICIES: dict[str, Callable[[Any], Callable[..., bool]]] = {
    "always": lambda m: m.always_wrap_policy,
    "by class": lambda m: m.ModuleWrapPolicy({nn.Linear, nn.ModuleDict}).__call__,
    "transformer": lambda m: partial(
        m.transformer_auto_wrap_policy, transformer_layer_cls={nn.MultiheadAttention}
    ),
    "by function": lambda m: partial(
        m.lambda_auto_wrap_policy, lambda_fn=lambda module: len(list(module.children())) == 2
    ),
    "by size": lambda m: partial(m.size_based_auto_wrap_policy, min_num_params=9),
    "by size, leaves": lambda m: partial(
        m.size_based_auto_wrap_policy,
        min_num_params=4,
        force_leaf_modules={nn.ModuleDict},
        exclude_wrap_modules={nn.Linear},
    ),
    "either": lambda m: partial(
        m._or_policy,
        policies=[
            partial(m.size_based_auto_wrap_policy, min_num_params=15),
            partial(m.lambda_auto_wrap_policy, lambda_fn=lambda x: isinstance(x, nn.ModuleList)),
        ],
    ),
}


def recorded(policy: Callable[..., bool], questions: list[Any]) -> Callable[..., bool]:
    """The policy, writing down what it is asked and what it answers."""

    def ask(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        questions.append((module, recurse, nonwrapped_numel, answer))
        return answer

    return ask


def subtree(*roots: nn.Module) -> set[nn.Module]:
    return {module for root in roots for module in root.modules()}


# --- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policies.__all__)
def test_every_option_has_torchs_fields_defaults_and_members(name: str) -> None:
    ours = getattr(policies, name)
    theirs = getattr(torch_fsdp, name, None) or getattr(torch_wrapper, name)
    if issubclass(ours, Enum):
        assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in theirs]
    else:
        assert [(f.name, f.default) for f in fields(ours)] == [
            (f.name, f.default) for f in fields(theirs)
        ]
        assert ours.__dataclass_params__.frozen == theirs.__dataclass_params__.frozen
        assert [b.__name__ for b in ours.__mro__] == [b.__name__ for b in theirs.__mro__]


def test_an_option_can_be_copied_compared_and_pickled() -> None:
    option = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    assert copy.deepcopy(option) == option == pickle.loads(pickle.dumps(option))
    option.reduce_dtype = torch.float32
    assert option != MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    with pytest.raises(AttributeError):
        option.parm_dtype = torch.float16


# --- Policies asked module by module -------------------------------------------------------------


@settings(max_examples=examples(60))
@given(shape=SHAPES, ignored=st.integers(0, 12))
@pytest.mark.parametrize("name", CALLABLE_POLICIES)
def test_a_callable_policy_is_asked_and_obeyed_as_in_torch(
    name: str, shape: Any, ignored: int
) -> None:
    root = tree(shape)
    below = list(root.modules())[1:]
    ignored_modules = subtree(*below[ignored : ignored + 1])
    ignored_params = {p for module in ignored_modules for p in module.parameters()}
    questions: list[Any] = []
    policy = recorded(CALLABLE_POLICIES[name](our_wrap), questions)
    before = str(root)
    plan = plan_wraps(
        root,
        policy,
        root_kwargs={"device_id": 3},
        ignored_modules=ignored_modules,
        ignored_params=ignored_params,
    )
    assert str(root) == before
    assert all(kwargs == {"device_id": 3} for kwargs in plan.kwargs.values())

    wrapped: list[nn.Module] = []
    torch_questions: list[Any] = []
    torch_wrap._recursive_wrap(
        root,
        recorded(CALLABLE_POLICIES[name](torch_wrap), torch_questions),
        lambda module: wrapped.append(module) or module,
        ignored_modules,
        ignored_params,
        only_wrap_children=True,
    )
    assert list(plan.kwargs) == wrapped
    assert questions == torch_questions


def test_the_defaults_of_the_size_policy_are_attributes_that_can_be_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = partial(size_based_auto_wrap_policy, nonwrapped_numel=100_000_000)
    assert not ask(nn.ModuleList(), False)
    assert not ask(nn.MultiheadAttention(2, 1), True)
    assert ask(nn.MultiheadAttention(2, 1), False)
    assert not size_based_auto_wrap_policy(nn.ReLU(), True, 99_999_999)
    monkeypatch.setattr(size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.ReLU})
    assert ask(nn.ModuleList(), False)
    assert not ask(nn.ReLU(), False)


def test_tied_parameters_are_counted_once_in_what_is_left_to_their_common_parent() -> None:
    root = nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    inner = root[0]
    inner[1].weight = inner[0].weight
    inner.own = nn.Parameter(torch.zeros(5))
    questions: list[Any] = []
    plan_wraps(
        root,
        recorded(
            partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}), questions
        ),
        root_kwargs={},
    )
    assert (inner, False, 5, False) in questions


def test_the_root_is_left_to_the_caller() -> None:
    for policy in (always_wrap_policy, CustomPolicy(lambda module: True)):
        root = nn.Sequential(nn.Linear(2, 2))
        plan = plan_wraps(root, policy, root_kwargs={})
        assert list(plan.kwargs) == [root[0]]
        auto_wrap(root, plan, Wrapper)
        assert isinstance(root[0], Wrapper)


# --- Policies that see the whole tree ------------------------------------------------------------


def torch_order(
    root: nn.Module, policy: Any, ignored: set[nn.Module]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """What torch wraps under a class-based policy, in its order, with its keyword arguments."""
    chosen = policy._run_policy(root, ignored, {"device_id": 3, "forward_prefetch": False})
    wrapped: list[tuple[nn.Module, dict[str, Any]]] = []

    def record(module: nn.Module, **kwargs: Any) -> nn.Module:
        wrapped.append((module, kwargs))
        return module

    torch_wrap._post_order_apply(root, torch_wrap._construct_wrap_fn(root, chosen, record))
    return wrapped


TREE_POLICIES: dict[str, Callable[[Any], Any]] = {
    "by class": lambda m: m.ModuleWrapPolicy([nn.Linear, nn.ModuleDict, nn.Linear]),
    "custom": lambda m: m.CustomPolicy(
        lambda module: (
            {"forward_prefetch": True, "limit_all_gathers": False}
            if isinstance(module, nn.Sequential)
            else isinstance(module, nn.Linear)
        )
    ),
    "custom, empty": lambda m: m.CustomPolicy(lambda module: {}),
}


@settings(max_examples=examples(60))
@given(shape=SHAPES, ignored=st.integers(0, 12))
@pytest.mark.parametrize("name", TREE_POLICIES)
def test_a_tree_policy_wraps_what_it_does_in_torch(name: str, shape: Any, ignored: int) -> None:
    root = tree(shape)
    ignored_modules = subtree(*list(root.modules())[1:][ignored : ignored + 1])
    expected = torch_order(root, TREE_POLICIES[name](torch_wrap), ignored_modules)
    for source in (our_wrap, torch_wrap):  # torch's own policy objects are accepted too
        kwargs = {"device_id": 3, "forward_prefetch": False}
        plan = plan_wraps(
            root,
            TREE_POLICIES[name](source),
            root_kwargs=kwargs,
            ignored_modules=ignored_modules,
        )
        assert list(plan.kwargs.items()) == expected
        assert kwargs == {"device_id": 3, "forward_prefetch": False}


def test_a_custom_policy_that_answers_neither_bool_nor_dict_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="should return False/True or a kwarg dict, but it returned None",
    ):
        plan_wraps(nn.Sequential(nn.ReLU()), CustomPolicy(lambda module: None), root_kwargs={})


def test_a_module_policy_names_its_classes() -> None:
    assert repr(ModuleWrapPolicy({nn.Linear, nn.GELU})) == "ModuleWrapPolicy({GELU, Linear})"


# --- Carrying a plan out -------------------------------------------------------------------------


def test_every_planned_module_is_replaced_by_its_wrapper() -> None:
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleDict({"a": nn.ReLU()}))
    first, linear, relu = root[0], root[0][0], root[1]["a"]
    policy = CustomPolicy(
        lambda m: {"reason": "list"} if m is first else isinstance(m, nn.Linear | nn.ReLU)
    )
    auto_wrap(root, plan_wraps(root, policy, root_kwargs={"reason": "root"}), Wrapper)
    assert (root[0].module, root[0].kwargs) == (first, {"reason": "list"})
    assert (first[0].module, first[0].kwargs) == (linear, {"reason": "root"})
    assert root[1]["a"].module is relu
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(root[0](x), linear(x).relu())


def test_a_shared_module_is_wrapped_once_and_stands_wrapped_in_all_its_places() -> None:
    shared = nn.Linear(2, 2)
    for policy in (always_wrap_policy, ModuleWrapPolicy({nn.Linear})):
        root = nn.Module()
        root.a, root.b = nn.Sequential(shared), nn.ModuleDict({"x": shared, "y": shared})
        auto_wrap(root, plan_wraps(root, policy, root_kwargs={}), Wrapper)
        places = [module for module in root.modules() if isinstance(module, Wrapper)]
        wrappers = [module for module in places if module.module is shared]
        assert len(wrappers) == 1
        a = root.a.module if isinstance(root.a, Wrapper) else root.a
        b = root.b.module if isinstance(root.b, Wrapper) else root.b
        assert [a[0], b["x"], b["y"]] == wrappers * 3


def test_a_wrap_function_without_a_wrapper_leaves_the_tree_as_it_is() -> None:
    root = tree(("sequential", [1, ("list", [2, 3])]))
    modules, seen = list(root.modules()), []
    plan = plan_wraps(root, always_wrap_policy, root_kwargs={"strategy": "x"})
    auto_wrap(root, plan, lambda module, strategy: seen.append((module, strategy)))
    assert list(root.modules()) == modules
    assert seen == [(module, "x") for module in plan.kwargs]


def test_a_module_that_is_wrapped_already_is_refused_by_its_name() -> None:
    root = nn.Sequential(nn.ReLU(), nn.Sequential(Wrapper(nn.ReLU())))
    for policy in (always_wrap_policy, ModuleWrapPolicy({nn.Linear})):
        with pytest.raises(
            ValueError,
            match="FSDP auto wrapping requires modules to not already have "
            r"FSDP applied but found 1\.0 in",
        ):
            plan_wraps(
                root, policy, root_kwargs={}, is_wrapped=lambda module: isinstance(module, Wrapper)
            )


# --- Modules kept apart under mixed precision ----------------------------------------------------


def convolutions() -> nn.Sequential:
    """Two blocks with normalization."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.SyncBatchNorm(3))


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Conv1d}),
        CustomPolicy(lambda module: isinstance(module, nn.Conv1d)),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv1d}),
    ],
    ids=["by class", "custom", "transformer"],
)
def test_batch_norm_is_wrapped_alone_without_mixed_precision(policy: Any) -> None:
    root = convolutions()
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    kwargs = {"mixed_precision": precision, "device_id": 1}
    plan = plan_wraps(root, policy, root_kwargs=kwargs, ignored_modules={root[1][1]})
    assert list(plan.kwargs.items()) == [
        (root[0][0], kwargs),
        (root[0][1], {"mixed_precision": None, "device_id": 1}),
        (root[1][0], kwargs),
        (root[2], {"mixed_precision": None, "device_id": 1}),
    ]
    assert kwargs == {"mixed_precision": precision, "device_id": 1}
    assert plan.kept_apart == (root[0][1], root[1][1], root[2])
    with pytest.warns(
        UserWarning,
        match=r"(?s)Both mixed precision and an auto_wrap_policy were specified to FSDP, .*"
        r"\{<class '.*BatchNorm1d'>, <class '.*SyncBatchNorm'>\}\nThese modules will be wrapped "
        "as separate FSDP instances with mixed precision disabled",
    ):
        auto_wrap(root, plan, Wrapper)


def test_a_custom_policy_cannot_give_batch_norm_mixed_precision_but_the_rest_holds() -> None:
    root = convolutions()
    policy = CustomPolicy(lambda module: {"mixed_precision": "mine", "forward_prefetch": True})
    plan = plan_wraps(root, policy, root_kwargs={"mixed_precision": MixedPrecision()})
    assert plan.kwargs[root[2]] == {"mixed_precision": None, "forward_prefetch": True}
    assert plan.kwargs[root[0]] == {"mixed_precision": "mine", "forward_prefetch": True}


def test_nothing_is_kept_apart_without_mixed_precision_or_without_classes() -> None:
    for precision in (None, MixedPrecision(_module_classes_to_ignore=())):
        root = convolutions()
        kwargs = {"mixed_precision": precision}
        plan = plan_wraps(root, ModuleWrapPolicy({nn.Conv1d}), root_kwargs=kwargs)
        assert plan == WrapPlan({root[0][0]: kwargs, root[1][0]: kwargs})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            auto_wrap(root, plan, Wrapper)


def test_classes_kept_apart_are_found_where_the_policy_does_not_look() -> None:
    attention = nn.MultiheadAttention(4, 1)
    attention.norm = nn.BatchNorm1d(4)
    root = nn.Sequential(attention, nn.Linear(8, 8))
    policy = partial(size_based_auto_wrap_policy, min_num_params=10)
    plan = plan_wraps(root, policy, root_kwargs={"mixed_precision": MixedPrecision()})
    # `out_proj` is big enough, but attention does not call it: it must not become a unit.
    assert list(plan.kwargs) == [attention.norm, root[1]]


def test_what_is_kept_apart_counts_as_wrapped() -> None:
    root = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(20)))
    policy = partial(size_based_auto_wrap_policy, min_num_params=60)
    assert list(plan_wraps(root, policy, root_kwargs={}).kwargs) == [root[0]]
    with_precision = plan_wraps(root, policy, root_kwargs={"mixed_precision": MixedPrecision()})
    assert list(with_precision.kwargs) == [root[0][1]]


def test_what_is_kept_apart_counts_as_wrapped_where_the_policy_does_not_look() -> None:
    root = nn.Sequential(nn.Sequential(nn.ModuleList([nn.BatchNorm1d(20)]), nn.Linear(4, 5)))
    policy = partial(
        size_based_auto_wrap_policy, min_num_params=60, force_leaf_modules={nn.ModuleList}
    )
    assert list(plan_wraps(root, policy, root_kwargs={}).kwargs) == [root[0]]
    with_precision = plan_wraps(root, policy, root_kwargs={"mixed_precision": MixedPrecision()})
    assert list(with_precision.kwargs) == [root[0][0][0]]


@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_kept_apart_computes_in_its_own_dtype_and_answers_in_the_callers(
    given_dtype: torch.dtype,
) -> None:
    root, plain = nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    seen: list[torch.dtype] = []
    root[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    plan = plan_wraps(root, always_wrap_policy, root_kwargs={"mixed_precision": MixedPrecision()})
    apply_quietly(root, plan)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(given_dtype)
    expected = plain(x.float()).to(given_dtype)
    for output in (root(x), root[0](input=x)):
        assert output.dtype is given_dtype
        assert torch.equal(output, expected)
    assert seen == [torch.float32] * 2
    apply_quietly(copy.deepcopy(root), WrapPlan({}))  # the casts can be copied with the module


# --- Wrapping by hand ----------------------------------------------------------------------------


def test_wrap_wraps_only_within_enable_wrap_and_its_own_arguments_count() -> None:
    module = nn.ReLU()
    assert wrap(module, a=1) is module
    with enable_wrap(wrapper_cls=Wrapper, a=0, b=2):
        wrapped = wrap(module, a=1)
        assert isinstance(wrapped, Wrapper)
        assert wrapped.module is module
        assert wrapped.kwargs == {"a": 1, "b": 2}
        assert wrap(module).kwargs == {"a": 0, "b": 2}
    assert wrap(module) is module


def test_enable_wrap_nests_and_ends_with_an_error_too() -> None:
    def fail_inside() -> None:
        with enable_wrap(wrapper_cls=Wrapper, level="inner"):
            assert wrap(nn.ReLU()).kwargs == {"level": "inner"}
            raise KeyError

    with enable_wrap(wrapper_cls=Wrapper, level="outer"):
        with pytest.raises(KeyError):
            fail_inside()
        assert wrap(nn.ReLU()).kwargs == {"level": "outer"}
    assert isinstance(wrap(nn.ReLU()), nn.ReLU)


def test_enable_wrap_holds_in_its_own_thread_only() -> None:
    found: dict[int, Any] = {}
    both_inside = threading.Barrier(2, timeout=60)

    def build(rank: int) -> None:
        with enable_wrap(wrapper_cls=Wrapper, rank=rank):
            both_inside.wait()
            found[rank] = wrap(nn.ReLU()).kwargs
            both_inside.wait()

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: {"rank": 0}, 1: {"rank": 1}}


def test_policies_survive_pickling() -> None:
    for policy in (
        partial(size_based_auto_wrap_policy, min_num_params=3),
        partial(_or_policy, policies=[always_wrap_policy]),
        partial(lambda_auto_wrap_policy, lambda_fn=bool),
    ):
        assert pickle.loads(pickle.dumps(policy))(nn.ReLU(), True, 5)
    assert pickle.loads(pickle.dumps(ModuleWrapPolicy({nn.ReLU})))(nn.ReLU(), False, 0)

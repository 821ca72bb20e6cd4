"""Whatever a forward returns, backward finds its parameters gathered and leaves them freed.

M-25 and M-26 of the behaviours asked of the wrapper class.
"""

from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import sharding
from tests.sharding import models

CPU = torch.device("cpu")


class Two(NamedTuple):
    """Two tensors by name."""

    one: Tensor
    other: Tensor


class Unchanged(nn.Module):
    """Has a layer, and hands back what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, value: Any) -> Any:
        return value


def namedtuples() -> None:
    for api in (torch_fsdp, sharding):
        model = api.FullyShardedDataParallel(Unchanged(), device_id=CPU)
        leaf = torch.ones(3, requires_grad=True)
        found = model(Two(leaf, 2 * leaf))
        assert type(found) is Two
        for tensor in found:
            assert tensor.requires_grad
            assert tensor._backward_hooks
        torch.testing.assert_close(found.other, 2 * torch.ones(3))
        (3 * found.other).sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full((3,), 6.0))


def test_m_25_a_namedtuple_goes_in_and_comes_out_with_hooks_on_each_tensor(
    clusters: Callable,
) -> None:
    clusters(2).run(namedtuples)


Form = tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]
"""How two tensors are put into an output, and how they are taken out of it again."""

FORMS: dict[str, Form] = {
    "namedtuple": (Two, lambda out: (out.one, out.other)),
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, b], lambda out: (out[0], out[1])),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: (out["a"], out["b"])),
    "OrderedDict": (
        lambda a, b: OrderedDict(b=b, a=a),
        lambda out: (out["a"], out["b"]),
    ),
    "nested": (
        lambda a, b: {"x": [a, 1, None], "y": (Two(b, b), {"name": "text"})},
        lambda out: (out["x"][0], out["y"][0].other),
    ),
}


class Inner(nn.Module):
    """Two layers; the output holds the second one's result and its square."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, models.WIDTH)
        self.second = nn.Linear(models.WIDTH, models.WIDTH)
        self.form = form
        self.in_backward: list[Callable[[], None]] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        for callback in self.in_backward:
            hidden.register_hook(lambda _gradient, callback=callback: callback())
        result = self.second(hidden)
        return FORMS[self.form][0](result, result.square())


class Outer(nn.Module):
    """A layer before `Inner`, whose output is handed on as it is."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(models.WIDTH, models.WIDTH)
        self.inner = Inner(form)

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.before(x))


def trained(model: nn.Module, form: str, **keywords: Any) -> None:
    """Two steps on a loss of everything that the output holds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        one, other = FORMS[form][1](model(models.batch(step)))
        (one.mean() + other.mean()).backward()
        keywords.get("after_backward", lambda: None)()
        optimizer.step()


def wrapped_and_trained(api: ModuleType, form: str, use_orig_params: bool) -> dict[str, Tensor]:
    wrapper = api.FullyShardedDataParallel
    keywords = {"device_id": CPU, "use_orig_params": use_orig_params}
    module = Outer(form)
    inner = module.inner
    whole = sum(p.numel() * p.element_size() for p in inner.parameters())
    watch = models.Watch(inner.first, inner.second)
    seen: list[int] = []
    inner.in_backward.append(lambda: seen.append(watch.live_bytes))
    module.inner = wrapper(inner, **keywords)
    model = wrapper(module, **keywords)
    output = model(models.batch(0))
    assert type(output) is type(FORMS[form][0](torch.ones(1), torch.ones(1)))
    assert watch.live_bytes == 0
    del output
    trained(model, form, after_backward=lambda: seen.append(watch.live_bytes))
    assert len(seen) == 4
    assert min(seen[0], seen[2]) >= whole
    assert (seen[1], seen[3]) == (0, 0)
    return models.whole_states(wrapper, model)


def every_form() -> None:
    for form in FORMS:
        replica = Outer(form)
        trained(replica, form, after_backward=lambda it=replica: models.average_gradients(it))
        for api in (torch_fsdp, sharding):
            for use_orig_params in (False, True):
                found = wrapped_and_trained(api, form, use_orig_params)
                models.same(found, models.states(replica), rtol=1e-5, atol=1e-6)


def test_m_26_parameters_are_gathered_for_backward_through_every_form_of_output(
    clusters: Callable,
) -> None:
    clusters(2).run(every_form)

"""The zoo: objects with a `state_dict()` and a `load_state_dict()`, as programs have them.

`ENTRIES` has them by name. `Entry.build(seed)` gives a new object; its values depend on the seed
alone. Two objects of one entry are the source and the target of a cell (tests/oracle/ways.py).
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils
from torch.testing._internal.two_tensor import TwoTensor


@dataclass(frozen=True)
class Entry:
    """An object of the zoo."""

    name: str
    build: Callable[[int], Any]
    wrapped: tuple[str, ...] = ()
    """The parts that wrappers of torch add to names, each to be taken off once."""

    def plain(self, name: str) -> str:
        """A name of `state_dict()` without the wrappers' parts."""
        parts = name.split(".")
        for wrapper in self.wrapped:
            if wrapper in parts:
                parts.remove(wrapper)
        return ".".join(parts)


ENTRIES: dict[str, Entry] = {}


def entry(name: str, *wrapped: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function without arguments; its object is drawn from the seed of the call."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        def build(seed: int) -> Any:
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, of prototypes and old interfaces
                made = make()
            scramble(made, seed)
            return made

        ENTRIES[name] = Entry(name, build, wrapped)
        return make

    return register


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, each once."""
    seen: set[int] = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


@torch.no_grad()
def scramble(module: nn.Module, seed: int) -> None:
    """Draw every number from the seed: no two objects of an entry agree by chance."""
    if not isinstance(module, nn.Module):
        return
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors_of(module):
        is_odd = isinstance(tensor, nn.parameter.UninitializedTensorMixin) or tensor.is_sparse
        if is_odd or tensor.is_meta or tensor.is_quantized or isinstance(tensor, TwoTensor):
            continue
        if tensor.is_inference() or not tensor.numel():
            continue
        drawn = torch.rand(tensor.shape, generator=generator)
        if tensor.dtype == torch.bool:
            drawn = drawn > 0.5
        elif not (tensor.is_floating_point() or tensor.is_complex()):
            drawn = drawn * 100
        if 0 not in tensor.stride() or tensor.numel() == 1:
            tensor.copy_(drawn.to(tensor.dtype))


class Holder(nn.Module):
    """A module with the entries that a test gives it."""

    def __init__(self, **entries: Any) -> None:
        super().__init__()
        for name, value in entries.items():
            if isinstance(value, nn.Module | nn.Parameter):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)


def parameter(*shape: int, **kwargs: Any) -> nn.Parameter:
    """A random parameter."""
    return nn.Parameter(torch.rand(*shape, **kwargs))


# --- modules of torch ------------------------------------------------------------------------

PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without bias": lambda: nn.Linear(4, 3, bias=False),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "convolution": lambda: nn.Conv2d(2, 4, 3),
    "convolution, channels last": lambda: nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),
    "transposed convolution": lambda: nn.ConvTranspose1d(2, 3, 2),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=1),
    "embedding bag": lambda: nn.EmbeddingBag(5, 3),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "gru": lambda: nn.GRU(3, 4),
    "rnn cell": lambda: nn.RNNCell(3, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "batch norm without weights": lambda: nn.BatchNorm1d(3, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm without bias": lambda: nn.LayerNorm(3, bias=False),
    "prelu": lambda: nn.PReLU(3),
    "adaptive softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5, 10]),
    "parameter list": lambda: nn.ParameterList([parameter(2), parameter(3)]),
    "parameter dict": lambda: nn.ParameterDict({"a": parameter(2), "B c": parameter(3)}),
    "module dict": lambda: nn.ModuleDict({"a b": nn.Linear(2, 2), "ü/x": nn.Linear(2, 1)}),
    "module without entries": lambda: nn.Sequential(nn.ReLU(), nn.Identity()),
    "hundred modules": lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(100))),
}
for plain_name, plain_make in PLAIN.items():
    entry(plain_name)(plain_make)


@entry("deep nest")
def _deep() -> nn.Module:
    module: nn.Module = nn.Linear(2, 2)
    for _ in range(30):
        module = nn.Sequential(module)
    return module


# --- dtypes, shapes and memory ---------------------------------------------------------------


@entry("dtypes")
def _dtypes() -> nn.Module:
    numbers = {
        f"of_{str(dtype)[6:]}": torch.rand(3).mul(100).to(dtype)
        for dtype in (
            *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
            *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
            *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
        )
    }
    return Holder(**numbers)


@entry("complex parameter")
def _complex() -> nn.Module:
    return Holder(w=nn.Parameter(torch.rand(3, dtype=torch.complex64)))


@entry("half precision")
def _half() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2).half(), nn.Linear(2, 2).bfloat16())


@entry("empty and scalar")
def _empty() -> nn.Module:
    return Holder(e=parameter(0, 3), s=nn.Parameter(torch.rand(())), b=torch.rand(2, 0))


@entry("strided parameter")
def _strided() -> nn.Module:
    return Holder(w=nn.Parameter(torch.rand(4, 3).t()), part=nn.Parameter(torch.rand(4, 6)[:, ::2]))


@entry("expanded buffer")
def _expanded() -> nn.Module:
    return Holder(b=torch.arange(3.0).expand(2, 3), w=parameter(2))


@entry("buffer of the conjugate bit")
def _conjugate() -> nn.Module:
    return Holder(c=torch.rand(3, dtype=torch.complex64).conj(), n=torch.rand(3) * 1)


@entry("buffer of the negative bit")
def _negative() -> nn.Module:
    return Holder(n=torch.rand(3, dtype=torch.complex64).conj().imag)


@entry("inference tensors")
def _inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 2)


@entry("frozen")
def _frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))


@entry("sparse buffer")
def _sparse() -> nn.Module:
    return Holder(s=torch.eye(3).to_sparse(), w=parameter(2))


@entry("meta device")
def _meta() -> nn.Module:
    return nn.Linear(3, 2, device="meta")


@entry("wrapper subclass")
def _two() -> nn.Module:
    return Holder(w=nn.Parameter(TwoTensor(torch.rand(2, 2), torch.rand(2, 2))))


# --- ties and absent entries -----------------------------------------------------------------


@entry("tied weights")
def _tied() -> nn.Module:
    made = Holder(embed=nn.Embedding(4, 3), head=nn.Linear(3, 4, bias=False))
    made.head.weight = made.embed.weight
    return made


@entry("tied buffers")
def _tied_buffers() -> nn.Module:
    shared = torch.rand(3)
    return Holder(a=Holder(b=shared), c=Holder(b=shared))


@entry("one module twice")
def _twice() -> nn.Module:
    shared = nn.Linear(2, 2)
    return nn.Sequential(shared, nn.ReLU(), shared)


@entry("buffer that views a parameter")
def _view() -> nn.Module:
    weight = parameter(4, 3)
    return Holder(w=weight, rows=weight.detach()[1:3])


@entry("overlapping buffers")
def _overlap() -> nn.Module:
    memory = torch.rand(6)
    return Holder(a=memory[:4], b=memory[2:])


@entry("none and not persistent")
def _none() -> nn.Module:
    made = Holder(w=parameter(2), gone=None)
    made.register_parameter("absent", None)
    made.register_buffer("scratch", torch.rand(2), persistent=False)
    return made


@entry("lazy, never called")
def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


@entry("lazy, called")
def _lazy_called() -> nn.Module:
    made = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    made(torch.rand(2, 4))
    return made


# --- hooks and a module's own ideas ----------------------------------------------------------


class ExtraState(nn.Module):
    """State beside tensors."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.w = parameter(2)
        self.extra = make()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = copy.deepcopy(state)


for extra_name, extra_make in {
    "extra state: dict": lambda: {"seen": int(torch.randint(100, ())), "names": ["a"]},
    "extra state: tensor": lambda: torch.rand(3),
    "extra state: nest with tensor": lambda: {"scale": torch.rand(2), "steps": [1, 2]},
    "extra state: number": lambda: float(torch.rand(())),
    "extra state: none": lambda: None,
}.items():
    entry(extra_name)(lambda make=extra_make: nn.Sequential(ExtraState(make), nn.Linear(2, 2)))  # type: ignore[misc]


def add_key(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    """A state dict hook: one more tensor."""
    state[f"{prefix}norm"] = module.weight.detach().norm()


@entry("hook that adds a key")
def _adds() -> nn.Module:
    made = nn.Linear(3, 2)
    made.register_state_dict_post_hook(add_key)

    def take(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: object) -> None:
        state.pop(f"{prefix}norm", None)

    made.register_load_state_dict_pre_hook(take)
    return nn.Sequential(made)


@entry("hooks that rename")
def _renames() -> nn.Module:
    made = nn.Linear(3, 2)

    def out(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    def back(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: object) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    made.register_state_dict_post_hook(out)
    made.register_load_state_dict_pre_hook(back)
    return nn.Sequential(made)


@entry("hook that casts")
def _casts() -> nn.Module:
    made = nn.Linear(3, 2)

    def out(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].half()

    made.register_state_dict_post_hook(out)
    return nn.Sequential(made)


@entry("hook that drops a key")
def _drops() -> nn.Module:
    made = nn.Linear(3, 2)

    def out(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        del state[f"{prefix}bias"]

    made.register_state_dict_post_hook(out)
    made.register_load_state_dict_post_hook(lambda _module, keys: keys.missing_keys.clear())
    return nn.Sequential(made)


class Transposed(nn.Module):
    """Stores its weight transposed, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(3, 2)

    def _save_to_state_dict(self, into: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        into[f"{prefix}turned"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, _metadata: object, *rest: Any
    ) -> None:
        _strict, missing, _unexpected, _errors = rest
        if f"{prefix}turned" in state:
            with torch.no_grad():
                self.weight.copy_(state[f"{prefix}turned"].t())
        else:
            missing.append(f"{prefix}turned")


entry("own save and load")(lambda: nn.Sequential(Transposed(), nn.Linear(2, 2)))


class Refuses(nn.Linear):
    """Says that its bias is no key of its own."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        rest[3].append(f"{prefix}bias")


entry("own load that finds a key unexpected")(lambda: nn.Sequential(Refuses(2, 2)))


class Complains(nn.Linear):
    """Has an error of its own."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        rest[4].append("this layer was trained with other data")


entry("own load that has an error")(lambda: nn.Sequential(Complains(2, 2)))


class Wants(nn.Linear):
    """Misses a key that no state dict has."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        rest[2].append(f"{prefix}scale")


entry("own load that misses a key")(lambda: nn.Sequential(Wants(2, 2)))


class OwnStateDict(nn.Module):
    """Overrides `state_dict` and `load_state_dict` themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.steps = int(torch.randint(1000, ()))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "steps": self.steps}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        rest = OrderedDict(state_dict)
        self.steps = rest.pop("steps")
        return super().load_state_dict(rest, *args, **kwargs)


entry("own state_dict and load_state_dict")(OwnStateDict)


# --- parametrized and pruned -----------------------------------------------------------------


class Square(nn.Module):
    """A parametrization without an inverse."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Scaled(nn.Module):
    """A parametrization with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(1)
        self.register_buffer("shift", torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def parametrized(*each: Callable[[], nn.Module]) -> nn.Module:
    """A module whose weight has these parametrizations."""
    made = nn.Linear(3, 3)
    for make in each:
        parametrize.register_parametrization(made, "weight", make())
    return nn.Sequential(made)


entry("parametrized")(lambda: parametrized(Square))
entry("parametrized twice")(lambda: parametrized(Square, Scaled))
entry("weight norm")(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))))
entry("weight norm of old")(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))))
entry("spectral norm")(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 2))))
entry("spectral norm of old")(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2))))
entry("pruned")(lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(3, 2), "weight", 0.5)))


@entry("orthogonal")
def _orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3), "weight", "householder"))


# --- wrappers and names that look like theirs ------------------------------------------------


def trunk() -> nn.Module:
    """Something to wrap."""
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def owning(module: nn.Module) -> nn.Module:
    """The wrapper, with entries of its own."""
    module.register_buffer("own_buffer", torch.rand(2))
    module.register_parameter("own_parameter", parameter(2))
    module.add_module("own_module", nn.Linear(2, 1))
    return module


entry("compiled", "_orig_mod")(lambda: torch.compile(trunk()))
entry("compiled child", "_orig_mod")(lambda: nn.Sequential(torch.compile(trunk()), trunk()))
entry("compiled with own entries", "_orig_mod")(lambda: owning(torch.compile(trunk())))
entry("data parallel", "module")(lambda: nn.DataParallel(trunk()))
entry("data parallel with own entries", "module")(lambda: owning(nn.DataParallel(trunk())))
entry("wrapped twice", "_orig_mod", "module")(lambda: torch.compile(nn.DataParallel(trunk())))
entry("checkpointed")(lambda: nn.Sequential(checkpoint_wrapper(trunk()), nn.Linear(2, 2)))
entry("child named _orig_mod")(lambda: Holder(_orig_mod=nn.Linear(2, 2), head=nn.Linear(2, 2)))
entry("child named module")(lambda: Holder(module=nn.Linear(2, 2), head=nn.Linear(2, 2)))
entry("only a child named module")(lambda: Holder(module=nn.Linear(2, 2)))
entry("child named _fsdp_wrapped_module")(lambda: Holder(_fsdp_wrapped_module=nn.Linear(2, 2)))
entry("child named _checkpoint_wrapped_module")(
    lambda: nn.Sequential(Holder(_checkpoint_wrapped_module=nn.Linear(2, 2)))
)
entry("two names that meet")(
    lambda: nn.Sequential(Holder(_orig_mod=nn.Linear(2, 2), weight=parameter(2, 2)))
)


@entry("averaged model")
def _averaged() -> nn.Module:
    return swa_utils.AveragedModel(trunk(), use_buffers=True)


@entry("averaged model beside its model")
def _averaged_pair() -> nn.Module:
    model = trunk()
    return Holder(model=model, average=swa_utils.AveragedModel(model))


# --- quantised, scripted, traced -------------------------------------------------------------


@entry("quantised dynamically")
def _dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2)), {nn.Linear})


@entry("prepared for quantisation")
def _prepared() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 2)).train()
    made.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare_qat(made)
    prepared(torch.rand(2, 3))
    return prepared


@entry("scripted")
def _scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


@entry("traced")
def _traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(3, 2)).eval(), torch.rand(1, 3))


@entry("graph module")
def _graph() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))


# --- versions of a module's state ------------------------------------------------------------


class Renamed(nn.Linear):
    """Takes the names of an older release as well."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for old, new in (("gamma", "weight"), ("beta", "bias")):
            if f"{prefix}{old}" in state:
                state[f"{prefix}{new}"] = state.pop(f"{prefix}{old}")
        super()._load_from_state_dict(state, prefix, *rest)


@entry("names of an older release")
def _older_names() -> nn.Module:
    if torch.initial_seed() == 1:  # the source of a cell; its target is drawn from another seed
        return nn.Sequential(Holder(gamma=parameter(2, 3), beta=parameter(2)), nn.Linear(2, 2))
    return nn.Sequential(Renamed(3, 2), nn.Linear(2, 2))


class Versioned(nn.Module):
    """Version 2 stores half of what version 1 stored; the load of an older state halves it."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(3)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@entry("state of the same version")
def _versioned() -> nn.Module:
    return nn.Sequential(Versioned(), nn.Linear(2, 2))


@entry("state of an older version")
def _older() -> nn.Module:
    made = nn.Sequential(Versioned(), nn.Linear(2, 2))
    if torch.initial_seed() == 1:  # the source of a cell; its target is drawn from another seed
        made[0]._version = 1
    return made

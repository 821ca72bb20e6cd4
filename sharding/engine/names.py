"""Names of the units and parameters of a root: paths in its module, the same on all ranks."""

from __future__ import annotations

from torch import nn

from sharding.engine.param_group import Bucket
from sharding.engine.unit import Unit

WRAPPER = "_fsdp_wrapped_module."
"""What wrapping adds to a path, and a user's names do not have."""


class Names:
    """Paths in the modules of one root unit."""

    def __init__(self, root: Unit) -> None:
        self._paths: dict[nn.Module, str] = {}
        several = len(root.modules) > 1
        for index, module in enumerate(root.modules):
            for path, part in module.named_modules(prefix=f"[{index}]" if several else ""):
                self._paths.setdefault(part, path)

    def parameters(self, bucket: Bucket) -> list[str]:
        """The names of a bucket's parameters, in order."""
        owners = [parameter.owners[0] for parameter in bucket.parameters]
        return [_shown(f"{self._paths.get(owner, '')}.{key}") for owner, key in owners]

    def unit(self, unit: Unit) -> str:
        """The path of a unit's module, or modules; the class of the root itself."""
        paths = [self._paths.get(module, "") for module in unit.modules]
        if not all(paths):
            return f"the root {type(unit.modules[0]).__name__}"
        return "+".join(map(_shown, paths))

    def give(self, unit: Unit) -> None:
        """A unit's buckets have the unit's name, with a parameter's where there are several."""
        name = self.unit(unit)
        for bucket in unit.buckets:
            parameters = self.parameters(bucket)
            own = name if len(unit.buckets) == 1 else f"{name} (with {parameters[0]})"
            bucket.named(own, parameters)


def _shown(path: str) -> str:
    return path.replace(WRAPPER, "").lstrip(".")

"""Names of the units and parameters of a root: paths in its module, the same on all ranks."""

from __future__ import annotations

from torch import nn

from sharding.engine.param_group import ParamGroup
from sharding.engine.unit import Unit

WRAPPER = "_fsdp_wrapped_module."
"""The part of a path that the wrapper adds."""


class Names:
    """Paths in the modules of one root unit."""

    def __init__(self, root: Unit) -> None:
        self._paths: dict[nn.Module, str] = {}
        several = len(root.modules) > 1
        for index, module in enumerate(root.modules):
            for path, part in module.named_modules(prefix=f"[{index}]" if several else ""):
                self._paths.setdefault(part, path)

    def parameters(self, param_group: ParamGroup) -> list[str]:
        """Returns the names of a parameter group's parameters, in order."""
        owners = [parameter.owners[0] for parameter in param_group.parameters]
        return [_shown(f"{self._paths.get(owner, '')}.{key}") for owner, key in owners]

    def unit(self, unit: Unit) -> str:
        """Returns the path of a unit's module, or modules; the class of the root itself."""
        paths = [self._paths.get(module, "") for module in unit.modules]
        if not all(paths):
            return f"the root {type(unit.modules[0]).__name__}"
        return "+".join(map(_shown, paths))

    def give(self, unit: Unit) -> None:
        """Names a unit's groups like the unit; several groups also by a parameter of each."""
        name = self.unit(unit)
        for param_group in unit.param_groups:
            parameters = self.parameters(param_group)
            own = name if len(unit.param_groups) == 1 else f"{name} (with {parameters[0]})"
            param_group.named(own, parameters)


def _shown(path: str) -> str:
    return path.replace(WRAPPER, "").lstrip(".")

"""Lightning: the checkpoints of its Trainer, in ckpt's format.

    Trainer(plugins=[CkptCheckpointIO()])                     # one process, or DDP: rank 0 writes
    Trainer(strategy=CkptDDPStrategy())                       # DDP: the ranks share the writing
    Trainer(strategy=CkptModelParallelStrategy())             # FSDP2 and tensor parallelism
    Trainer(strategy=CkptFSDPStrategy())                      # torch's FSDP1, which needs GPUs

`ModelCheckpoint`, its best ones and `ckpt_path=` work as with Lightning's own files. A path such as
`epoch=0-step=10.ckpt` is the folder of a checkpoint.

Rules:

1. With the strategies, each rank stores its part of the module and its optimizers, by the names of
   the module, so that another number of ranks and another strategy can load them. Rank 0 stores the
   rest of Lightning's checkpoint (loops, callbacks, schedulers), as with Lightning.
2. The plugin stores the dict that Lightning passes to it. Only rank 0 has this dict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import ckpt
from ckpt.errors import ArgumentError, MisuseError
from ckpt.integrations.optional import needs
from ckpt.integrations.removal import remove
from ckpt.transfer.write_job import Compress

with needs("lightning"):
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

if TYPE_CHECKING:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ParallelStrategy as _Strategy
else:
    _Strategy = object

__all__ = [
    "CkptCheckpointIO",
    "CkptDDPStrategy",
    "CkptFSDPStrategy",
    "CkptModelParallelStrategy",
    "CkptStrategyMixin",
]

MODULE, OPTIMIZERS = "state_dict", "optimizer_states"
"""Lightning's names for the states of its module and of its optimizers."""


class CkptCheckpointIO(CheckpointIO):
    """A plugin that writes the dict of a checkpoint on one rank, and reads the dict on each.

    The plugin is for strategies whose rank 0 has the whole state: a single device, and DDP.
    """

    def __init__(self, *, blocking: bool = True, compress: Compress = False) -> None:
        """`blocking` and `compress` are as in `ckpt.save`.

        At most one background save is in flight, and no checkpoint is removed before its end.
        """
        self._blocking = blocking
        self._compress: Compress = compress
        self._handle: ckpt.SaveHandle | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Stores the nest `checkpoint` at `path`, and replaces a checkpoint there.

        Raises StateError, with the key path, for a value that cannot be stored.
        """
        self._settle()
        self._handle = ckpt.save(
            path,
            checkpoint,
            overwrite=True,
            blocking=self._blocking,
            compress=self._compress,
            group="self",
            storage_options=storage_options,
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Returns the nest at `path`: of ckpt's format, or of Lightning's. No pickle is executed.

        `weights_only` has no effect. Raises ArgumentError for a `map_location` that is neither a
        device nor the name of one.
        """
        self._settle()
        if not (map_location is None or isinstance(map_location, str | torch.device)):
            raise ArgumentError(
                f"map_location={map_location!r}: ckpt puts tensors on one device; pass that device"
            )
        found: Any = ckpt.read(path)
        if map_location is None:
            return found  # type: ignore[no-any-return]
        return torch.utils._pytree.tree_map_only(  # type: ignore[no-any-return]
            torch.Tensor, lambda tensor: tensor.to(map_location), found
        )

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint of ckpt, or a file that Lightning wrote."""
        self._settle()
        remove(path)

    def teardown(self) -> None:
        """Returns once the background save has ended."""
        self._settle()

    def _settle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


class CkptStrategyMixin(_Strategy):
    """A mixin before a strategy of Lightning: all ranks save and load their parts.

    class MyStrategy(CkptStrategyMixin, DDPStrategy): ...
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Returns True: optimizers are filled in place, so they must exist before."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns this rank's state dict, without a gather or a copy."""
        return dict(self._module().state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> Any:
        """Returns an empty dict: the optimizer itself is saved."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Stores the module, its optimizers, and the rest of rank 0's dict. All ranks call this.

        Raises MisuseError if a hook has changed the names in `checkpoint["state_dict"]`.
        """
        given, module = checkpoint.pop(MODULE), self._module()
        if set(given) != set(module.state_dict()):
            raise MisuseError(
                "on_save_checkpoint changed the names in checkpoint['state_dict']; this strategy "
                "stores the module itself: leave names out with a hook of its state_dict()"
            )
        state = checkpoint if self.is_global_zero else {}
        if OPTIMIZERS in checkpoint:
            state[OPTIMIZERS] = list(self.optimizers)
        url: Any = self.broadcast(os.fspath(filepath))
        ckpt.save(url, {**state, MODULE: module}, overwrite=True, storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fills the module and its optimizers; returns the rest. All ranks call this."""
        url: Any = self.broadcast(os.fspath(checkpoint_path))
        with ckpt.open(url) as stored:
            tree: Any = stored.values()
        target: dict[str, Any] = dict.fromkeys(tree)
        module = target[MODULE] = self._module()
        unused = None
        if self.optimizers:
            target[OPTIMIZERS] = list(self.optimizers)
        elif OPTIMIZERS in target:
            del target[OPTIMIZERS]
            unused = f"{OPTIMIZERS}.*"
        found = ckpt.load(url, target, exclude=unused, strict=module.strict_loading)
        return {**found, MODULE: {}, OPTIMIZERS: []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has filled the module."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: `load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Removes a checkpoint of ckpt, or a file that Lightning wrote."""
        if self.is_global_zero:
            remove(filepath)

    def _module(self) -> Any:
        if self.lightning_module is None:
            raise MisuseError("this strategy has no module yet: save it in a run of a Trainer")
        return self.lightning_module


class CkptDDPStrategy(CkptStrategyMixin, DDPStrategy):
    """DDP; each rank writes a part of a checkpoint."""


class CkptModelParallelStrategy(CkptStrategyMixin, ModelParallelStrategy):
    """FSDP2 and tensor parallelism; each rank writes and reads its shards."""


class CkptFSDPStrategy(CkptStrategyMixin, FSDPStrategy):
    """Torch's FSDP1; each rank writes and reads its shards."""

"""Lightning: the checkpoints of its Trainer, in ckpt's format.

    Trainer(plugins=[CkptCheckpointIO()])                     # one process, or DDP: rank 0 writes
    Trainer(strategy=CkptDDPStrategy())                       # DDP: the ranks share the writing
    Trainer(strategy=CkptModelParallelStrategy())             # FSDP2 and tensor parallelism
    Trainer(strategy=CkptFSDPStrategy())                      # torch's FSDP1, which needs GPUs

`ModelCheckpoint`, its best ones and `ckpt_path=` work as with Lightning's own files. A path such as
`epoch=0-step=10.ckpt` is the folder of a checkpoint.

Rules:

1. The strategies store the module and its optimizers by the names of the module, each rank its
   part, so that another number of ranks and another strategy can load them. Everything else in
   Lightning's checkpoint (loops, callbacks, schedulers) is that of rank 0, as with Lightning.
2. The plugin stores the dict that Lightning hands to it. Only rank 0 has it.
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
    """A plugin that writes the dict of a checkpoint on one rank, and reads it on each.

    It is for strategies of which rank 0 has the whole state: a single device, and DDP.
    """

    def __init__(self, *, blocking: bool = True, compress: Compress = False) -> None:
        """`blocking` and `compress` are as in `ckpt.save`.

        In the background one save is under way at a time, and no checkpoint is removed before it
        has ended.
        """
        self._blocking = blocking
        self._compress: Compress = compress
        self._handle: ckpt.SaveHandle | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Store the nest `checkpoint` at `path`, which takes the place of one that is there.

        Raises StateError for values that no checkpoint can hold, by their key path.
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
        """The nest at `path`: of ckpt's format, or a file that Lightning wrote. No pickle is run.

        `weights_only` asks for less than that. Raises ArgumentError for a `map_location` that is
        neither a device nor its name.
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
        """Remove a checkpoint of ckpt, or a file that Lightning wrote."""
        self._settle()
        remove(path)

    def teardown(self) -> None:
        """Return when the save in the background has ended."""
        self._settle()

    def _settle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


class CkptStrategyMixin(_Strategy):
    """Stands before a strategy of Lightning, and saves and loads with all of its ranks.

    class MyStrategy(CkptStrategyMixin, DDPStrategy): ...
    """

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: optimizers are filled in place, so that they have to be there."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's state dict, as it lies in memory. Nothing is gathered."""
        return dict(self._module().state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer | LightningOptimizer) -> Any:
        """Nothing: the optimizer itself is saved."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Store the module, its optimizers, and what else rank 0 has. Called by all ranks.

        Raises MisuseError where a hook has changed the names in `checkpoint["state_dict"]`.
        """
        given, module = checkpoint.pop(MODULE), self._module()
        if set(given) != set(module.state_dict()):
            raise MisuseError(
                "on_save_checkpoint changed which names checkpoint['state_dict'] has; this "
                "strategy stores the module itself: leave names out with a hook of its state_dict()"
            )
        state = checkpoint if self.is_global_zero else {}
        if OPTIMIZERS in checkpoint:
            state[OPTIMIZERS] = list(self.optimizers)
        url: Any = self.broadcast(os.fspath(filepath))
        ckpt.save(url, {**state, MODULE: module}, overwrite=True, storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the module and its optimizers; what comes back is the rest. Called by all ranks."""
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
        """Nothing is left to do: `load_checkpoint` has filled the module."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do: `load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of ckpt, or a file that Lightning wrote."""
        if self.is_global_zero:
            remove(filepath)

    def _module(self) -> Any:
        if self.lightning_module is None:
            raise MisuseError("this strategy has no module yet: it is saved in a run of a Trainer")
        return self.lightning_module


class CkptDDPStrategy(CkptStrategyMixin, DDPStrategy):
    """DDP, of whose checkpoints each rank writes a part."""


class CkptModelParallelStrategy(CkptStrategyMixin, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, of whose checkpoints each rank writes and reads its shards."""


class CkptFSDPStrategy(CkptStrategyMixin, FSDPStrategy):
    """Torch's FSDP1, of whose checkpoints each rank writes and reads its shards."""

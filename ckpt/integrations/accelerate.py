"""Accelerate: `save_state` and `load_state` of an Accelerator, in ckpt's format.

    from ckpt.integrations.accelerate import CkptAccelerator as Accelerator

`save_state(folder)` writes one checkpoint, a part by each rank, and `load_state` fills the prepared
objects, on any number of ranks. `ProjectConfiguration`'s automatic names and `total_limit` work as
before.

Rules:

1. A checkpoint holds the objects that `prepare` has returned (models, optimizers, schedulers,
   stateful data loaders), the objects of `register_for_checkpointing`, the scaler, the step of
   gradient accumulation, and the random states of each rank.
2. Automatic names: a checkpoint is removed only after a newer one was committed; a load takes the
   newest committed one; after a load, numbers continue from the loaded checkpoint's.
3. Accelerate itself loads a folder that Accelerate itself wrote.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import ArgumentError, InUseError, MisuseError
from ckpt.integrations import needs
from formats.native.manifest import MANIFEST

with needs("accelerate"):
    import accelerate
    from accelerate.utils import DistributedType

__all__ = ["CkptAccelerator"]

FOREIGN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""Kinds of training whose engines keep checkpoints of their own."""
NUMBERED = re.compile(r"checkpoint_(\d+)")


class CkptAccelerator(accelerate.Accelerator):  # type: ignore[misc] # it ships no types
    """An Accelerator with checkpoints of ckpt."""

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> str:
        """Saves the state of the training; returns the folder or URL. All processes call this.

        `options` are those of `ckpt.save`. With `blocking=False` the checkpoint exists once the
        next save has begun, or after `end_training` or `free_memory`. `safe_serialization` has no
        effect: no value is pickled.

        Raises:
            ArgumentError: no folder was given, and names are not automatic.
            ExistsError: a checkpoint with the next number exists.
            MisuseError: hooks of `save_state` are registered, or another engine trains.
        """
        self._check_can("save")
        self._settle()
        config = self.project_configuration
        is_numbered = config.automatic_checkpoint_naming
        url = self._checkpoint_folder(config.iteration) if is_numbered else output_dir
        if url is None:
            raise ArgumentError("save_state needs a folder, because names are not automatic")
        settings = {"overwrite": not is_numbered, **options}
        self._ckpt_handle = ckpt.save(url, self._state(), **settings)
        config.iteration += 1
        if self._ckpt_handle is None:
            self._thin()
        return os.fspath(url)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Fills the prepared and registered objects. All processes call this, in any number.

        With automatic names and no `input_dir`, loads the newest checkpoint. `options` are those of
        `ckpt.load`. Raises as `ckpt.load` does, and NotACheckpointError without a checkpoint.
        """
        self._settle()
        config = self.project_configuration
        if input_dir is None and config.automatic_checkpoint_naming:
            input_dir = ckpt.latest(self._folder())
        if input_dir is None:
            raise ArgumentError("load_state needs a folder, because names are not automatic")
        input_dir = os.fspath(input_dir)
        if "://" not in input_dir and not os.path.exists(os.path.join(input_dir, MANIFEST)):
            super().load_state(input_dir, load_kwargs, **options)
            return
        self._check_can("load")
        loaded = ckpt.load(input_dir, self._state(), **options)
        self.step = loaded["step"]
        number = NUMBERED.fullmatch(os.path.basename(os.path.normpath(input_dir)))
        if number and config.automatic_checkpoint_naming:
            config.iteration = int(number[1]) + 1

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's, after the save in the background has ended."""
        self._settle()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As Accelerate's, after the save in the background has ended."""
        self._settle()
        super().end_training()

    def _state(self) -> dict[str, Any]:
        """Returns the state of the training for `ckpt.save`, without a gather."""
        state: dict[str, Any] = {
            "models": [_without_ddp(model) for model in self._models],
            "optimizers": [prepared.optimizer for prepared in self._optimizers],
            "schedulers": list(self._schedulers),
            "objects": list(self._custom_objects),
            "step": self.step,
            "rng": ckpt.rng(),
        }
        if self.scaler is not None:
            state["scaler"] = self.scaler
        loaders = [
            prepared
            for prepared in self._dataloaders
            if getattr(prepared, "use_stateful_dataloader", False)
        ]
        if loaders:
            state["loaders"] = [ckpt.per_rank(loader) for loader in loaders]
        return state

    def _check_can(self, verb: str) -> None:
        if self.distributed_type in FOREIGN:
            raise MisuseError(
                f"CkptAccelerator cannot {verb} a training by {self.distributed_type.value}, which "
                "keeps checkpoints of its own: use accelerate.Accelerator"
            )
        hooks = {"save": self._save_model_state_pre_hook, "load": self._load_model_state_pre_hook}
        if hooks[verb]:
            raise MisuseError(
                f"{len(hooks[verb])} hooks of {verb}_state are registered, which expect "
                "the files of Accelerate: remove them, and register the stored objects with "
                "register_for_checkpointing"
            )

    def _folder(self) -> str:
        if self.project_dir is None:
            raise ArgumentError("automatic names need ProjectConfiguration(project_dir=...)")
        return os.path.join(self.project_dir, "checkpoints")

    def _checkpoint_folder(self, number: int) -> str:
        return os.path.join(self._folder(), f"checkpoint_{number}")

    def _settle(self) -> None:
        """Waits for the background save, and removes the checkpoints that its commit replaces."""
        handle, self._ckpt_handle = getattr(self, "_ckpt_handle", None), None
        if handle is not None:
            handle.wait()
            self._thin()

    def _thin(self) -> None:
        """Removes the checkpoints with the lowest automatic numbers beyond `total_limit`.

        One from which another borrows stays until the other is removed.
        """
        config = self.project_configuration
        limit = config.total_limit
        if not (config.automatic_checkpoint_naming and limit and self.is_main_process):
            return
        numbers = sorted(
            int(found[1])
            for name in os.listdir(self._folder())
            if (found := NUMBERED.fullmatch(name))
            and os.path.exists(os.path.join(self._folder(), name, MANIFEST))
        )
        for number in reversed(numbers[:-limit]):  # a checkpoint before its base
            with suppress(InUseError):
                ckpt.delete(self._checkpoint_folder(number))


def _without_ddp(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model

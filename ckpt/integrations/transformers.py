"""Hugging Face's Trainer: its checkpoints in ckpt's format.

    class MyTrainer(CkptTrainerMixin, Trainer): ...
    CkptTrainer(model, TrainingArguments(...), ...)      # the same class, ready-made

`checkpoint-500` is the folder of a checkpoint, and also has `trainer_state.json` and the model's
configuration. `save_total_limit`, `load_best_model_at_end` and `resume_from_checkpoint=` work as
before, and each rank writes and reads a part.

Rules:

1. A checkpoint holds the model, the optimizer, the scheduler, the scaler and the random states of
   each rank. A checkpoint of a PEFT model holds the trained parameters, and the tensors that are
   not parameters of the base model. `save_only_model` leaves everything out but the model.
2. A checkpoint is removed only after a newer one was committed.
3. Methods by which Trainer writes the parts of its own checkpoints are not called: see `REPLACED`.
   A warning names those that a subclass overrides. More files belong in the `on_save` of a
   callback, which Trainer calls after each save.
4. `resume_from_checkpoint=True` takes the newest committed checkpoint. Trainer itself loads a
   folder that Trainer itself wrote.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any
from warnings import warn

from torch import nn

import ckpt
from ckpt.errors import InUseError, MisuseError, NotACheckpointError, SaveFailedWarning
from ckpt.integrations import needs
from ckpt.run.steps import STEP
from formats.native.manifest import MANIFEST

with needs("transformers"):
    from transformers import Trainer
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object

__all__ = ["CkptTrainer", "CkptTrainerMixin"]


REPLACED = (
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)
"""Methods of Trainer that a save by ckpt does not call: its state has these parts."""


class CkptTrainerMixin(_Trainer):
    """A mixin before a Trainer, whose checkpoints become those of ckpt."""

    saves_in_background = False
    """Whether training continues while a checkpoint is written; set it on a class or an instance.

    A checkpoint then exists once the next save begins, or `train` ends.
    """
    _handle: ckpt.SaveHandle | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **more: Any
    ) -> Any:
        """Trains as Trainer does; returns once the last checkpoint is committed."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest() or True
        try:
            result = super().train(resume_from_checkpoint, *args, **more)
        except BaseException:
            self._settle_after_failure()
            raise
        self._settle()
        return result

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.is_deepspeed_enabled or self.args.push_to_hub:
            raise MisuseError(
                "CkptTrainerMixin stores no checkpoints of DeepSpeed, and pushes none to a hub: "
                "use Trainer itself, or push a folder that `ckpt convert` has made"
            )
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._warn_of_overrides()
        run = self._get_output_dir(trial=trial)
        place = self._place(run, self.state.global_step)
        self._settle()
        if self.state.best_global_step:
            best = self._place(run, self.state.best_global_step)
            if best == place or os.path.exists(best):
                self.state.best_model_checkpoint = best
        if self.args.should_save:
            self._write_small_files(place)
        self._handle = ckpt.save(
            place,
            self._state(),
            overwrite=True,
            blocking=not self.saves_in_background,
            metadata={STEP: str(self.state.global_step)},
        )
        self._run = run
        if self._handle is None:
            self._rotate()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._fill(resume_from_checkpoint, {"model": _weights(model or self.model)}, "model")

    def _load_best_model(self) -> None:
        self._settle()
        best = self.state.best_model_checkpoint
        if best is None or not _is_ours(best):
            super()._load_best_model()
            return
        self._fill(best, {"model": _weights(self.model)}, "model")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # the model names the optimizer's parameters
        self._fill(checkpoint, self._state(), "optimizer", "scheduler")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_scaler(checkpoint)
            return
        self._fill(checkpoint, self._state(), "scaler")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        self._fill(checkpoint, self._state(), "rng")

    def _state(self) -> dict[str, Any]:
        """Returns the state of the training for `ckpt.save`, without a gather."""
        state: dict[str, Any] = {"model": _weights(self.model)}
        if self.args.save_only_model:
            return state
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        state["optimizer"] = getattr(self.optimizer, "optimizer", self.optimizer)
        return {**state, "scheduler": self.lr_scheduler, "rng": ckpt.rng()}

    def _fill(self, place: str, state: dict[str, Any], *names: str) -> None:
        """Loads the entries `names` of a state, as far as the checkpoint has them."""
        with ckpt.open(place) as stored:
            tree: Any = stored.values()
        found = [name for name in names if name in tree and name in state]
        if found:
            ckpt.load(place, state, include=[f"{name}.*" for name in found])

    def _write_small_files(self, place: str) -> None:
        """Writes the files that Trainer reads when it resumes, and that a conversion copies."""
        os.makedirs(place, exist_ok=True)
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self._note(type(callback).__name__, callback.state())
        partial = os.path.join(place, f"{TRAINER_STATE_NAME}.part")
        self.state.save_to_json(partial)
        os.replace(partial, os.path.join(place, TRAINER_STATE_NAME))
        owners: list[Any] = [getattr(self.model, "config", None), self.processing_class]
        for owner in owners:
            if hasattr(owner, "save_pretrained"):
                owner.save_pretrained(place)

    def _warn_of_overrides(self) -> None:
        """Warns of a user's methods that are not called (rule 3)."""
        overrides = [
            f"{owner.__name__}.{name}"
            for name in REPLACED
            if (owner := next(cls for cls in type(self).__mro__ if name in vars(cls)))
            is not Trainer
        ]
        if overrides:
            warn(
                f"a save by ckpt does not call {', '.join(overrides)}: the checkpoint has the "
                "state of the model and of the training as it is. If the method writes more files, "
                "write them in on_save() of a TrainerCallback",
                UserWarning,
                stacklevel=4,
            )

    def _note(self, name: str, state: Any) -> None:
        """Stores the state of a callback at the place that Trainer reads."""
        kept: Any = self.state.stateful_callbacks
        if isinstance(kept[name], list):
            kept[name].append(state)
        else:
            kept[name] = state

    def _settle(self) -> None:
        """Waits for the background save, and removes the checkpoints that its commit replaces."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
            self._rotate()

    def _settle_after_failure(self) -> None:
        """As `_settle`, after training has failed: an error of the save is only a warning."""
        try:
            self._settle()
        except Exception as error:
            warn(f"{type(error).__name__}: {error}", SaveFailedWarning, stacklevel=3)

    def _rotate(self) -> None:
        """Removes the oldest checkpoints of ckpt beyond `save_total_limit`."""
        limit = self.args.save_total_limit
        if not self.args.should_save or not limit or limit < 0:
            return
        whole = [place for place in sort_checkpoints(self._run, use_mtime=True) if _is_ours(place)]
        best = self.state.best_model_checkpoint
        stay = {whole[-1], *([os.path.normpath(best)] if best else [])}
        excess = len(whole) - max(limit, len(stay))
        old = [place for place in whole if os.path.normpath(place) not in stay]
        for place in old[: max(excess, 0)]:
            _remove(place)

    def _newest(self) -> str | None:
        try:
            return ckpt.latest(str(self.args.output_dir))
        except NotACheckpointError:
            return None

    def _place(self, run: str, step: int) -> str:
        return os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{step}")


class CkptTrainer(CkptTrainerMixin, Trainer):
    """Trainer with checkpoints of ckpt."""


def _is_ours(place: str) -> bool:
    return os.path.exists(os.path.join(place, MANIFEST))


def _remove(place: str) -> None:
    try:
        ckpt.delete(place)
    except InUseError:
        return
    shutil.rmtree(place, ignore_errors=True)


def _weights(model: Any) -> Any:
    """Returns the model; for a PEFT model, the tensors that differ from its base model's."""
    if not hasattr(model, "peft_config"):
        return model
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        name: item for name, item in model.state_dict(keep_vars=True).items() if name not in frozen
    }

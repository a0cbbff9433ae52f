"""Hugging Face's Trainer on libgemini. It trains what prepare() returned as it is; checkpoints are written here.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import typing

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import libgemini.torch as gm


class GeminiCheckpoints(TrainerCallback):
    """A callback of Trainer that writes its checkpoints by libgemini.torch.save().

    Trainer's own checkpoints copy all weights and states on the host. These do not, and
    train(resume_from_checkpoint=...) goes on from them. They are written as the step or epoch ends, before what it
    logs and evaluates. What needs Trainer's own checkpoints is not for these: save_strategy="best",
    load_best_model_at_end, save_total_limit.
    """

    def save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: typing.Any,
    ) -> None:
        """Writes a checkpoint, if Trainer is about to write one, and has Trainer leave its own out.

        Args:
            args: Trainer's arguments; output_dir is where the checkpoint goes.
            state: Trainer's state, which is saved beside the checkpoint.
            control: Its should_save says whether Trainer would write a checkpoint.
            model: The prepared model.
            optimizer: The prepared optimizer, which Accelerate may have wrapped.
            lr_scheduler: Its state is saved as the checkpoint's extra.

        Raises:
            GeminiError, OSError: As libgemini.torch.save().
        """
        if not control.should_save:
            return
        control.should_save = False
        folder = os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}")
        extra = {"scheduler": lr_scheduler.state_dict()}
        gm.save(folder, model, getattr(optimizer, "optimizer", optimizer), extra=extra)
        state.save_to_json(os.path.join(folder, "trainer_state.json"))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: typing.Any
    ) -> None:
        """Trainer calls it after each step; see save()."""
        self.save(args, state, control, kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: typing.Any
    ) -> None:
        """Trainer calls it after each epoch; see save()."""
        self.save(args, state, control, kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: typing.Any
    ) -> None:
        """Trainer calls it before the first step: if it resumes, loads the checkpoint and the scheduler's state."""
        if state.global_step:  # Trainer has read the weights and its own state from there
            folder = os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}")
            optimizer = kwargs["optimizer"]
            extra = gm.load(folder, kwargs["model"], getattr(optimizer, "optimizer", optimizer))
            kwargs["lr_scheduler"].load_state_dict(extra["scheduler"])

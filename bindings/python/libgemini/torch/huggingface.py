"""Hugging Face's Trainer on libgemini. It trains what prepare() returned as it is; checkpoints are written here.

SPDX-License-Identifier: Apache-2.0
"""

import os

from transformers import TrainerCallback

import libgemini.torch as gm


class GeminiCheckpoints(TrainerCallback):
    """Writes, by libgemini.torch.save(), the checkpoints that Trainer is about to write, which would need all weights
    and states on the host once more; and has train(resume_from_checkpoint=...) go on from them.

    They are written as the step or epoch ends, before what it logs and evaluates. What needs Trainer's own checkpoints
    is
    not for these: save_strategy="best", load_best_model_at_end, save_total_limit."""

    def save(self, args, state, control, model, optimizer, lr_scheduler):
        if not control.should_save:
            return
        control.should_save = False
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        extra = {"scheduler": lr_scheduler.state_dict()}
        gm.save(folder, model, getattr(optimizer, "optimizer", optimizer), extra=extra)
        state.save_to_json(os.path.join(folder, "trainer_state.json"))

    def on_step_end(self, args, state, control, *, model, optimizer, lr_scheduler, **_):
        self.save(args, state, control, model, optimizer, lr_scheduler)

    def on_epoch_end(self, args, state, control, *, model, optimizer, lr_scheduler, **_):
        self.save(args, state, control, model, optimizer, lr_scheduler)

    def on_train_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **_):
        if state.global_step:  # Trainer has read the weights and its own state from there
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            extra = gm.load(folder, model, getattr(optimizer, "optimizer", optimizer))
            lr_scheduler.load_state_dict(extra["scheduler"])

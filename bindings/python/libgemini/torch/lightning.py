"""Lightning on libgemini: Trainer(strategy=GeminiStrategy()), after libgemini.torch.init().

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import typing

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy

import libgemini.torch as gm


class GeminiStrategy(SingleDeviceStrategy, ParallelStrategy):
    """A strategy for the session's device, in one process or in several that torchrun has started.

    It prepares the module and its optimizers instead of moving the module to the device. It begins an iteration for
    each step, as Lightning calls the module's steps and not the module itself.

    Of several processes, each is a Trainer with devices=1. Lightning divides the data among them.
    """

    strategy_name = "gemini"
    # Of this process; in the place of ParallelStrategy's properties.
    global_rank = 0
    local_rank = 0
    node_rank = 0
    world_size = 1
    is_distributed = False  # whether Lightning divides the data

    def __init__(
        self,
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """
        Args:
            accelerator: As of SingleDeviceStrategy.
            checkpoint_io: As of SingleDeviceStrategy.
            precision_plugin: As of SingleDeviceStrategy.

        Raises:
            GeminiError: There is no session: call libgemini.torch.init() first.
        """
        super().__init__(gm.session().device, accelerator, checkpoint_io, precision_plugin)
        self.parallel_devices = [self.root_device]
        self.ranks = gm.session().ranks
        if self.ranks:
            self.global_rank, self.world_size = self.ranks.rank, self.ranks.count
            self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank))
            self.node_rank = int(os.environ.get("GROUP_RANK", "0"))
            self.is_distributed = True

    # ---- several processes. What they tell each other are a few numbers and names.
    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes checkpoints and logs."""
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, typing.Any]:
        """How a DistributedSampler divides the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, *args: typing.Any, **kwargs: typing.Any) -> None:
        """Waits for all processes."""
        if self.ranks:
            self.ranks.meet()

    def broadcast(self, obj: typing.Any, src: int = 0) -> typing.Any:
        """The object of process src."""
        return self.ranks.meet(obj if self.global_rank == src else None)[src] if self.ranks else obj

    def all_gather(
        self, tensor: torch.Tensor, group: typing.Any | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """The tensors of all processes, along a new first dimension. Gradients do not go through it."""
        if not self.ranks:
            return tensor
        return torch.stack(self.ranks.meet(tensor.detach().cpu())).to(tensor.device)

    def reduce(self, tensor: typing.Any, group: typing.Any | None = None, reduce_op: typing.Any = "mean") -> typing.Any:
        """The mean of a tensor over all processes, or with another reduce_op than "mean" and "avg" the sum."""
        if not self.ranks or not isinstance(tensor, torch.Tensor):
            return tensor
        added = self.all_gather(tensor).sum(0)
        mean = reduce_op is None or str(reduce_op).lower().endswith(("mean", "avg"))
        return added / self.world_size if mean else added

    def lightning_module_state_dict(self) -> dict[str, typing.Any]:
        """The module's state. Of several processes, which read it together, the first one gets copies, for a file."""
        state = super().lightning_module_state_dict()
        if not self.ranks:
            return state
        copies = ((name, torch.as_tensor(value).detach().cpu().clone()) for name, value in state.items())
        return {name: value for name, value in copies if self.is_global_zero}

    def model_to_device(self) -> None:
        """Prepares the module."""
        gm.prepare(self._module())

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Prepares the optimizers that the module configures."""
        super().setup_optimizers(trainer)
        self.optimizers = [gm.prepare(self._module(), optimizer)[1] for optimizer in self.optimizers]

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _step(self, step: typing.Callable[..., typing.Any], *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        model = gm.session().model
        assert model is not None  # model_to_device() came before
        with model.forward(args, kwargs):
            return step(*args, **kwargs)

    def training_step(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """The module's, as an iteration."""
        return self._step(super().training_step, *args, **kwargs)

    def validation_step(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """The module's, as an iteration."""
        return self._step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """The module's, as an iteration."""
        return self._step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """The module's, as an iteration."""
        return self._step(super().predict_step, *args, **kwargs)

    def teardown(self) -> None:
        """The module stays where it is."""

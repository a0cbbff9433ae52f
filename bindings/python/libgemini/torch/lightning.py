"""Lightning on libgemini: Trainer(strategy=GeminiStrategy()), after libgemini.torch.init().

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import typing

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

import libgemini.torch as gm


class GeminiStrategy(SingleDeviceStrategy):
    """A strategy for one process and the session's device.

    It prepares the module and its optimizers instead of moving the module to the device. It begins an iteration for
    each step, as Lightning calls the module's steps and not the module itself.
    """

    strategy_name = "gemini"

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

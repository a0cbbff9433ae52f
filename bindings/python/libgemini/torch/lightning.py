"""Lightning on libgemini: Trainer(strategy=GeminiStrategy()), after libgemini.torch.init().

SPDX-License-Identifier: Apache-2.0
"""

from lightning.pytorch.strategies import SingleDeviceStrategy

import libgemini.torch as gm


class GeminiStrategy(SingleDeviceStrategy):
    """Prepares the module, instead of moving it to the device, and its optimizers; begins iterations, as Lightning
    calls the module's steps and not the module."""

    strategy_name = "gemini"

    def __init__(self, **options):
        super().__init__(device=gm.session().device, **options)

    def model_to_device(self):
        gm.prepare(self.lightning_module)

    def setup_optimizers(self, trainer):
        super().setup_optimizers(trainer)
        self.optimizers = [gm.prepare(self.lightning_module, optimizer)[1] for optimizer in self.optimizers]

    def _step(self, step, *args, **kwargs):
        with gm.session().model.forward():
            return step(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        return self._step(super().training_step, *args, **kwargs)

    def validation_step(self, *args, **kwargs):
        return self._step(super().validation_step, *args, **kwargs)

    def test_step(self, *args, **kwargs):
        return self._step(super().test_step, *args, **kwargs)

    def predict_step(self, *args, **kwargs):
        return self._step(super().predict_step, *args, **kwargs)

    def teardown(self):
        """The module stays where it is."""

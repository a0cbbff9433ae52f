"""Lightning: a strategy prepares the module and the optimizer; lines with gm or Gemini are libgemini's.

SPDX-License-Identifier: Apache-2.0
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import libgemini.torch as gm
from libgemini.torch.lightning import GeminiStrategy

gm.init(device_memory="20GiB")
torch.manual_seed(0)
losses = []


class Autoencoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 128))
        self.decoder = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 64))

    def training_step(self, x):
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        losses.append(loss.item())
        return loss

    def validation_step(self, x):
        losses.append(nn.functional.mse_loss(self.decoder(self.encoder(x)), x).item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


model = Autoencoder()
loader = torch.utils.data.DataLoader(torch.randn(24, 64), batch_size=4)
trainer = Trainer(
    strategy=GeminiStrategy(),
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    devices=1,
    logger=False,
)
trainer.fit(model, loader, loader)
print(losses)

"""Hugging Face's Accelerate: prepare() here comes before the accelerator's; lines with gm are libgemini's.

SPDX-License-Identifier: Apache-2.0
"""

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import libgemini.torch as gm

gm.init(device_memory="20GiB")
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=128, n_embd=64, n_layer=4, n_head=4, n_positions=64, use_cache=False, bos_token_id=0, eos_token_id=0
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = gm.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
loader = torch.utils.data.DataLoader(torch.randint(0, 128, (24, 16)), batch_size=2)

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for ids in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(losses)

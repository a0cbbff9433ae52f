"""A loop of one's own, as torchtune's recipes have it: accumulation by tokens, clipping, a schedule, evaluation, and a
checkpoint from which a second run goes on; lines with gm are libgemini's.

SPDX-License-Identifier: Apache-2.0
"""

import math
import os

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import libgemini.torch as gm

EPOCHS, STEPS, ACCUMULATION, BATCH, PADDED = 2, 3, 2, 2, -100
CHECKPOINT = "checkpoint.pt"

gm.init(device_memory="20GiB")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = gm.prepare(model, optimizer)
device = next(model.parameters()).device
total = EPOCHS * STEPS
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / 2) * 0.5 * (1 + math.cos(math.pi * step / (total + 1)))
)

texts = torch.randint(0, 128, (32, 16), generator=torch.Generator().manual_seed(1))
labels = texts.clone()
for row in range(len(labels)):
    labels[row, 9 + row % 7 :] = PADDED  # texts differ in length
held_out = slice(28, 32)


def loss_of(rows):
    """The sum of the losses of all tokens that count, and their number."""
    logits = model(input_ids=texts[rows].to(device)).logits[:, :-1]
    wanted = labels[rows, 1:].to(device)
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PADDED, reduction="sum")
    return loss, (wanted != PADDED).sum()


first, losses = 0, []
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    first = saved["epochs"]
for epoch in range(first, EPOCHS):
    model.train()
    order = torch.randperm(28, generator=torch.Generator().manual_seed(epoch)).split(BATCH)
    for step in range(STEPS):
        loss, tokens = 0.0, 0
        for rows in order[step * ACCUMULATION : (step + 1) * ACCUMULATION]:
            part, count = loss_of(rows)
            part.backward()
            loss, tokens = loss + part.item(), tokens + count.item()
        for param in model.parameters():
            param.grad.mul_(1 / tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss / tokens)
    model.eval()
    with torch.no_grad():
        loss, tokens = loss_of(held_out)
    losses.append((loss / tokens).item())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**saved, "epochs": epoch + 1}, CHECKPOINT)
print(losses)

"""One model, trained by several processes: torchrun --nproc-per-node 2 several_processes.py

Each process takes its rows of the text. Without torchrun it is one process, which takes all of them.

SPDX-License-Identifier: Apache-2.0
"""

import sys

import torch
import torch.distributed
from transformers import LlamaConfig, LlamaForCausalLM

import libgemini.torch as gm

gm.init(device="cpu", device_memory="1MiB", host_memory="64MiB", chunk_size="64KiB")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = gm.prepare(model, optimizer)

rank, ranks = 0, 1
if torch.distributed.is_initialized():
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
text = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
mine = text[rank::ranks]
losses = []
for _ in range(6):
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
mean = torch.stack(losses)
if ranks > 1:
    torch.distributed.all_reduce(mean)
    mean /= ranks
if rank == 0:
    print("losses:", *(f"{loss:.4f}" for loss in mean.tolist()))
if len(sys.argv) > 1:
    gm.save(sys.argv[1], model, optimizer)
gm.close()

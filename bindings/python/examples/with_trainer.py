"""Hugging Face's Trainer: clipping, accumulation, evaluation are its own; lines with gm or Gemini are libgemini's.

SPDX-License-Identifier: Apache-2.0
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import libgemini.torch as gm
from libgemini.torch.huggingface import GeminiCheckpoints

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
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)

texts = torch.randint(0, 128, (32, 16))
data = [{"input_ids": text, "labels": text} for text in texts]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "checkpoints",
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        logging_steps=1,
        report_to=[],
    ),
    train_dataset=data,
    eval_dataset=data[:8],
    callbacks=[GeminiCheckpoints()],
    optimizers=(optimizer, scheduler),
)
trainer.train()
losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]
print(losses)

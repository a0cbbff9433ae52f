"""TRL's SFTTrainer: questions and answers, of which the answers are learned; lines with gm or Gemini are libgemini's.

SPDX-License-Identifier: Apache-2.0
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

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
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = gm.prepare(model, optimizer)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)

words = Tokenizer(WordLevel({"pad": 0, "end": 1, "unknown": 2, **{f"w{i}": i for i in range(3, 128)}}, "unknown"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="end", unk_token="unknown")
texts = torch.randint(3, 128, (32, 12)).tolist()
data = [
    {"prompt": " ".join(f"w{i}" for i in text[:5]), "completion": " ".join(f"w{i}" for i in text[5:])} for text in texts
]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
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
        bf16=False,
        report_to=[],
    ),
    train_dataset=Dataset.from_list(data),
    eval_dataset=Dataset.from_list(data[:8]),
    processing_class=tokenizer,
    callbacks=[GeminiCheckpoints()],
    optimizers=(optimizer, scheduler),
)
trainer.train()
losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]
print(losses)

"""Fine-tunes a model of OPT's architecture, from a safetensors checkpoint, on real text, with checkpoints of its own.

  python3 finetune_opt.py --make /data/opt-1.3b    # once: a checkpoint with random weights to start from
  python3 finetune_opt.py --start /data/opt-1.3b --run /data/run --device-memory 8GiB --resume

With --resume the same command goes on after whatever stopped it, kill -9 included, with the losses it would have had.
To start from trained weights give --start a snapshot of facebook/opt-1.3b in safetensors. The text is that of all files
of a folder (--text), byte by byte.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import os
import pathlib

import torch
from transformers import OPTConfig, OPTForCausalLM

import libgemini.torch as gm

SIZES = {
    "tiny": OPTConfig(
        vocab_size=272,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        ffn_dim=256,
        word_embed_proj_dim=64,
        max_position_embeddings=128,
    ),
    "1.3b": OPTConfig(
        vocab_size=50272,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        ffn_dim=8192,
        word_embed_proj_dim=2048,
        max_position_embeddings=2048,
    ),
}
FIRST_BYTE = 4  # tokens below are special


def new_model(config):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return OPTForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def make(size, folder):
    torch.manual_seed(0)
    with gm.init(device_memory="1GiB"):
        model = new_model(SIZES[size])
    gm.save(folder, gm.prepare(model))


def read_text(folder):
    files = sorted({path.resolve() for path in pathlib.Path(folder).iterdir() if path.is_file()})
    data = b"".join(path.read_bytes() for path in files)
    if not data:
        raise SystemExit(f"there is no text in {folder}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() + FIRST_BYTE


def batch_of(text, step, batch, length):
    """Each step's part of the text, one after another, from the beginning again when it is over."""
    count = batch * length
    at = torch.arange(step * count, (step + 1) * count) % len(text)
    return text[at].view(batch, length)


def repeatable():
    """The same losses in each run: on a GPU some of torch's kernels add in any order otherwise.

    With warn_only=True attention's still do, with a warning.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def finetune(args):
    repeatable()
    torch.manual_seed(1)
    gm.init(
        device=args.device,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        file=args.file,
        file_memory=args.file_memory,
    )
    device = gm.session().device
    text = read_text(args.text)
    going_on = args.resume and os.path.exists(args.run)
    with torch.device("meta"):
        model = new_model(OPTConfig.from_pretrained(args.start))
    gm.load_weights(model, args.run if going_on else args.start)
    if args.recompute:
        model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model, optimizer = gm.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=args.lr))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    first = 0
    if going_on:
        extra = gm.load(args.run, model, optimizer)
        first = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
    for step in range(first, args.steps):
        ids = batch_of(text, step, args.batch, args.length).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step} loss {loss.item():.9g}", flush=True)
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            gm.save(args.run, model, optimizer, extra={"step": step + 1, "scheduler": scheduler.state_dict()})
            print(f"saved after step {step}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", metavar="FOLDER", help="write a checkpoint with random weights and end")
    parser.add_argument("--size", choices=SIZES, default="1.3b", help="of --make")
    parser.add_argument("--start", metavar="FOLDER", help="the checkpoint to begin with")
    parser.add_argument("--run", metavar="FOLDER", help="where checkpoints go: one, the newest")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --run, if there is one")
    parser.add_argument("--text", metavar="FOLDER", default="/usr/share/common-licenses")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--recompute", action="store_true", help="do not keep activations but compute them again")
    parser.add_argument("--device", help="cuda or cpu (the simulated device); default: the GPU, if there is one")
    parser.add_argument("--device-memory", default="8GiB")
    parser.add_argument("--host-memory", default=0)
    parser.add_argument("--file", metavar="FOLDER", help="for what does not fit in memory")
    parser.add_argument("--file-memory", default=0)
    args = parser.parse_args()
    if args.make:
        return make(args.size, args.make)
    if not args.start or not args.run:
        parser.error("give --make, or --start and --run")
    return finetune(args)


if __name__ == "__main__":
    main()

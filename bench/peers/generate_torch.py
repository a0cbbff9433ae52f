"""Generates text by a LLaMA of transformers whose weights do not fit on the GPU: under libgemini.torch, under
Accelerate's offloading, and with all on the GPU, side by side.

  bench/peers/generate_torch.py [--size 7b] [--device-mem 8GiB,4GiB,2GiB] [--system gemini,accelerate,gpu]
                                [--prompt 128] [--batch 1] [--tokens 32] [--cache dynamic,static,gemini,offloaded] ...

Each system and budget runs in a process of its own, one after another. bf16, random weights, the same in each; greedy,
so that all generate the same tokens where their kernels are the same (tokens_hash). Two texts are generated, of which
the second one is timed. bound_seconds is what a token takes at least: the bytes that each token reads and that do not
fit into what torch's own tensors, such as the cache of keys and values, leave of device-mem (torch_bytes: their peak
behind the first token), at the rate of a plain copy from page-locked memory, measured in the same run. With all of
device-mem it would be bound_without_torch_seconds. Where all on the GPU was run, too, times_least in the last rows is
the time in terms of the larger of that one and the bound. Of a mixture of experts each token reads two experts in each
block, others from token to token. Accelerate, which takes seconds for each token, generates --peer-tokens.

caller_seconds is what of a token's time the calling thread did not wait for the device: with that much or less for each
token, it is the device, or the link, that binds.

--policy compares which expert of a mixture leaves the device first; with "all" each pass reads all experts, as
transformers does by itself, and tokens may differ by rounding. --device-mem 30% stands for what all tokens read, 30 %
of the experts, and 1 GiB for torch's tensors on a GPU. expert_hit_share: of the bytes of the experts that a token
reads, those that were not fetched for it; what the prompt fetches counts, too, so it may be below 0.

With --folder the weights are written there once, as safetensors, a file for each block, and each process gets its model
from the folder: gemini by gm.infer(FOLDER), the others by from_pretrained(). What the system has cached of the files is
dropped before. start_seconds is the time from there to the first token, reading_seconds that of reading all bytes of
the files with eight threads and nothing else, times_reading the former in terms of the latter. What fits neither on the
device nor into --host-mem has to be read for each token, at the rate of that reading: files_seconds, and bound_seconds
is the larger of the two. The system keeps in its own memory what it has read, so that these reads are no reads of the
disk on a machine that has memory to spare; with --uncached it is made to forget it all the time from the second text
on. The folder stays when the program ends.

--cache chooses where keys and values are kept; each of several runs in a process of its own. "dynamic" and "static" are
torch's memory; "gemini" is gm.Cache, which the system gemini alone has; "offloaded" is transformers' own, which keeps
them on the host and brings those of each layer for each token, and needs a GPU. Of the last two, the bound counts the
bytes of the cache (cache_bytes, in the middle of the text) among what a token reads, and writes of it as free.

Without arguments it takes about four minutes on a GPU and 30 GiB of host memory; without a GPU, on the simulated
device:

  generate_torch.py --device cpu --size tiny --vocabulary 512 --device-mem 512KiB,256KiB --tokens 8
  generate_torch.py --device cpu --size tiny --vocabulary 512 --device-mem 256KiB --system gemini --batch 4 \\
      --prompt 200 --cache dynamic,gemini
  generate_torch.py --device cpu --size mixtral-tiny --vocabulary 512 --sample --system gemini --tokens 100 \\
      --device-mem 100%,30%,10% --policy lru,frequent,least-stale,all
  generate_torch.py --device cpu --size tiny --vocabulary 512 --device-mem 256KiB --host-mem 2MiB --folder build/tiny
SPDX-License-Identifier: Apache-2.0
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import zlib

import weights

SIZES = {  # width, width of the MLP, blocks, heads, heads of keys and values, experts (two for each token)
    "tiny": (64, 160, 3, 4, 4, 0),
    "125m": (768, 2048, 12, 12, 12, 0),
    "1.3b": (2048, 5504, 24, 16, 16, 0),
    "7b": (4096, 11008, 32, 32, 32, 0),
    "13b": (5120, 13824, 40, 40, 40, 0),
    "70b": (8192, 28672, 80, 64, 8, 0),
    "70b-30": (8192, 28672, 30, 64, 8, 0),  # of its 80 blocks; 52 GB
    "mixtral-tiny": (256, 896, 16, 8, 2, 8),
    "mixtral-8b": (2048, 7168, 16, 16, 4, 8),
    "mixtral": (4096, 14336, 32, 32, 8, 8),
}
SYSTEMS = "gemini", "accelerate", "gpu"
POLICIES = "lru", "frequent", "least-stale", "all"  # which expert leaves first; all: each pass reads all experts
UNCACHED_SECONDS = 0.02  # between two times that --uncached has the system forget
TORCH_BYTES = 1 << 30  # of a GPU, for torch's own tensors, where --device-mem is a share of the experts
CACHES = "dynamic", "static", "gemini", "offloaded"

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--size", default="7b", help="of " + ", ".join(SIZES))
arguments.add_argument(
    "--device-mem",
    "--limit",
    default="8GiB,4GiB,2GiB",
    help="of gemini and accelerate; several with commas; of a mixture also a share of the experts, as 30%%",
)
arguments.add_argument("--system", default=",".join(SYSTEMS), help="of " + ", ".join(SYSTEMS) + "; several with commas")
arguments.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
arguments.add_argument("--batch", type=int, default=1)
arguments.add_argument("--tokens", type=int, default=32, help="that are generated in each text")
arguments.add_argument("--peer-tokens", type=int, default=8, help="likewise by accelerate, at most --tokens")
arguments.add_argument("--vocabulary", type=int, default=32000)
arguments.add_argument("--sample", action="store_true", help="draw tokens, as the greedy ones of random weights repeat")
arguments.add_argument(
    "--cache", default="dynamic", help="of keys and values, of " + ", ".join(CACHES) + "; several with commas"
)
arguments.add_argument(
    "--host-mem", default=None, help="of gemini; left out: the weights, a cache of its own, and 2 GiB"
)
arguments.add_argument("--folder", default=None, help="of the weights, written if it is not there")
arguments.add_argument("--uncached", action="store_true", help="the folder's bytes come from the disk each time")
arguments.add_argument("--reserve", default="1GiB", help="of device-mem, which accelerate leaves to other tensors")
arguments.add_argument("--chunk-size", default="0", help="of gemini, bytes of a chunk; 0: chosen")
arguments.add_argument("--allocator", default="pool", choices=["pool", "process", "torch"], help="of gemini")
arguments.add_argument("--units", default="auto", choices=["auto", "always", "never"], help="of gemini")
arguments.add_argument("--policy", default="lru", help="of gemini, of " + ", ".join(POLICIES) + "; several with commas")
arguments.add_argument("--device", default=None, help="cpu: the simulated device")
arguments.add_argument("--timeline", default=None, help="of gemini, the second text, to this file")
arguments.add_argument("--explain", action="store_true")
arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
options = arguments.parse_args()


def meta_model(torch, transformers):
    """The model without weights."""
    width, inner, blocks, heads, key_heads, experts = SIZES[options.size]
    more = {"num_local_experts": experts, "num_experts_per_tok": 2} if experts else {}
    kind, of = ("MixtralConfig", "MixtralForCausalLM") if experts else ("LlamaConfig", "LlamaForCausalLM")
    config = getattr(transformers, kind)(
        vocab_size=options.vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=max(2048, options.prompt + options.tokens),
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = getattr(transformers, of)(config)
    torch.set_default_dtype(torch.float32)
    return model


def make(torch, transformers):
    """The model, on the CPU."""
    model = meta_model(torch, transformers)
    if SIZES[options.size][-1] and options.policy != "all":
        model.set_experts_implementation("eager")  # one expert after another, so that only those chosen are read
    model.to_empty(device="cpu").requires_grad_(False).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # has a buffer that is computed
    tile = weights.make_tile(torch)
    for number, param in enumerate(model.parameters()):
        weights.fill(tile, number, param)
    return model


def write_folder(folder):
    """Writes the weights and the config."""
    import torch
    import transformers

    model = meta_model(torch, transformers)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    weights.write(torch, folder, model.named_parameters())


def link_rate(torch, device):
    """Bytes a second of a plain copy to the device, from page-locked memory if it is a GPU."""
    cuda = device.type == "cuda"
    source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return source.numel() / statistics.median(seconds[1:])


def keep_uncached(folder):
    """Has the system forget what it has read of the folder, all the time."""
    while True:
        weights.drop_cached(folder)
        time.sleep(UNCACHED_SECONDS)


def main():
    import torch
    import transformers

    import libgemini

    cuda = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    gm = None
    few = min(options.tokens, options.peer_tokens)
    tokens = few if options.system == "accelerate" else options.tokens
    folder, reading = options.folder and pathlib.Path(options.folder), None
    model = meta_model(torch, transformers)
    model_bytes = sum(param.nbytes for param in model.parameters())
    needed = model_bytes - model.model.embed_tokens.weight.nbytes  # a token reads one row of the table
    experts = sum(param.nbytes for name, param in model.named_parameters() if "experts" in name)
    chosen = experts * 2 // max(SIZES[options.size][5], 1)
    if options.device_mem.endswith("%"):
        limit = needed - experts + int(experts * float(options.device_mem[:-1]) / 100) + (TORCH_BYTES if cuda else 0)
    else:
        limit = libgemini.parse_bytes(options.device_mem)
    needed -= experts - chosen
    width, _, blocks, heads, key_heads, _ = SIZES[options.size]
    token_bytes = 2 * blocks * width // heads * key_heads * 2  # keys and values of bf16
    cache_bytes = options.batch * token_bytes * (options.prompt + tokens)
    moves_cache = options.cache in ("gemini", "offloaded")
    # The allocator of the whole process comes before anything uses CUDA: then the link is measured at the end.
    late = options.system == "gemini" and options.allocator == "process" and cuda
    rate = 0.0 if late else link_rate(torch, device)
    if cuda and not late:
        torch.cuda.empty_cache()
    if folder:
        reading, in_files = weights.read(folder)
        weights.drop_cached(folder)
    begin = time.perf_counter()
    if not folder:
        model = make(torch, transformers)
    elif options.system != "gemini":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    made = time.perf_counter()
    if options.system == "gpu":
        model.to(device)
    elif options.system == "accelerate":
        import accelerate

        if cuda:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole))
            room = max(limit - libgemini.parse_bytes(options.reserve), 0)
            budgets = {device.index: room, "cpu": 4 * model_bytes}
            kinds = ["LlamaDecoderLayer", "MixtralDecoderLayer"]
            where = accelerate.infer_auto_device_map(model, max_memory=budgets, no_split_module_classes=kinds)
            model = accelerate.dispatch_model(model, where, main_device=device)
        else:
            accelerate.cpu_offload(model, execution_device=device)
    else:
        import libgemini.torch as gm

        gm.init(
            device_memory=limit,
            host_memory=options.host_mem or model_bytes + (2 << 30) + (cache_bytes if options.cache == "gemini" else 0),
            device=device,
            allocator=options.allocator if cuda else None,
            chunk_size=options.chunk_size,
            units=options.units,
            cache_policy="lru" if options.policy == "all" else options.policy,
        )
        model = gm.infer(folder or model)
    ready = time.perf_counter()
    print(f"made in {made - begin:.1f} s, moved in {ready - made:.1f} s", file=sys.stderr)

    times, waited, departed, between = [], [], [], []

    def token_made(ids, scores, **_):
        queued = time.perf_counter()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        waited.append(times[-1] - queued)
        if late:  # torch counts nothing then; between two tokens, so not what a token takes in passing
            between.append(gm.stats()["nonmodel_bytes"])
        elif cuda and len(times) == 1:
            torch.cuda.reset_peak_memory_stats()
        if gm and len(times) in (2, tokens):
            departed.append(gm.stats()["departures"])
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    ids = torch.randint(
        1, options.vocabulary, (options.batch, options.prompt), generator=torch.Generator().manual_seed(2)
    ).to(device)
    texts = []
    torch.manual_seed(3)
    for text in range(2):
        if gm and text:
            gm.stats_reset()
            if options.timeline:
                gm.session().lib.timeline_start(gm.session().handle, options.timeline.encode())
        if options.uncached and folder and text:
            threading.Thread(target=keep_uncached, args=(folder,), daemon=True).start()
        times.clear()
        waited.clear()
        between.clear()
        departed.clear()
        text_begin = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=options.sample,
            stopping_criteria=transformers.StoppingCriteriaList([token_made]),
            disable_compile=True,
            **({"cache_implementation": options.cache} if options.cache in ("static", "offloaded") else {}),
            **({"past_key_values": gm.Cache(model)} if options.cache == "gemini" else {}),
        )
        seconds = [after - before for before, after in zip(times, times[1:])]
        texts.append(
            {
                "first": times[0] - text_begin,
                "done": times[0],
                "seconds": seconds,
                "caller": statistics.median(after - wait for after, wait in zip(seconds, waited[1:])),
                "departures": departed[-1] - departed[0] if gm else 0,  # behind the second token
            }
        )
    first, second = texts
    value = statistics.median(second["seconds"])
    # The arenas' tensors are no memory of torch's, but Accelerate's are.
    taken = max(between) if late else torch.cuda.max_memory_allocated() if gm and cuda else 0
    needed_weights = needed
    cache_read = options.batch * token_bytes * (options.prompt + tokens // 2)
    needed += cache_read if moves_cache else 0
    missing = max(needed - max(limit - taken, 0), 0) if options.system != "gpu" else 0
    if options.cache == "offloaded":  # which comes as a whole for each token
        missing = cache_read + (max(needed_weights - max(limit - taken, 0), 0) if options.system != "gpu" else 0)
    from_files = 0.0
    if folder and gm and options.host_mem:
        from_files = max(missing - libgemini.parse_bytes(options.host_mem), 0) * reading / in_files
    rate = rate or link_rate(torch, device)
    bound = max(missing / rate, from_files)
    row = {
        "bench": "generate_torch",
        "case": f"{options.system} {options.size}"
        + (f" {options.device_mem}" if options.system != "gpu" else "")
        + (f" {options.policy}" if options.system == "gemini" and experts else "")
        + f" batch {options.batch} prompt {options.prompt}"
        + (f" cache {options.cache}" if options.cache != "dynamic" else "")
        + (" uncached" if options.uncached else ""),
        "value": value,
        "unit": "s",
        "sec_per_token": value,
        "bound_seconds": bound,
        "bound_without_torch_seconds": max(needed - limit, 0) / rate if options.system != "gpu" else 0.0,
        "torch_bytes": taken,
        "caller_seconds": second["caller"],
        "first_token_seconds": second["first"],
        "cold_first_token_seconds": first["first"],
        "departures": second["departures"],
        "departures_first_text": first["departures"],
        "needed_bytes": needed,
        "weight_bytes": model_bytes,
        "cache_bytes": cache_read,
        "missing_bytes": missing,
        "link_bytes_per_s": rate,
        "ready_seconds": round(ready - made, 1),
        "tokens_hash": f"{zlib.crc32(out.cpu().numpy().tobytes()):08x}",
        "first_tokens_hash": f"{zlib.crc32(out[:, : options.prompt + few].cpu().numpy().tobytes()):08x}",
        "seconds": [round(one, 5) for one in second["seconds"]],
    }
    if folder:
        start = row["start_seconds"] = first["done"] - begin
        row.update(reading_seconds=reading, times_reading=start / reading, files_seconds=from_files)
    if bound:
        row.update(against="bound", ratio=bound / value)
    if gm:
        if options.timeline:
            gm.session().lib.timeline_stop(gm.session().handle)
        stats = gm.stats()
        passes = tokens
        fetched = sum(stats["moved_bytes"]["host to device"].values())
        row.update(
            device_budget=stats["budget_bytes"]["device"],
            device_peak=stats["peak_bytes"]["device"],
            nonmodel_peak=stats["nonmodel_peak_bytes"],
            host_peak=stats["peak_bytes"]["host"],
            fetched_bytes_per_token=fetched // passes,
            demand_bytes_per_token=stats["moved_bytes"]["host to device"]["demand"] // passes,
            read_bytes_per_token=sum(stats["moved_bytes"]["file to host"].values()) // passes,
            evicted_bytes_per_token=sum(stats["moved_bytes"]["device to host"].values()) // passes,
            evicted_bytes=sum(stats["moved_bytes"]["device to host"].values()),
            predicted_sec_per_token=stats["predicted_step_ns"] / 1e9,
            stall_seconds_per_token=stats["stall_ns"] / 1e9 / passes,
            # Of the chunks that operators wanted, those that were on the device or on their way.
            hit_share=stats["acquire_hits"] / max(1, stats["acquire_hits"] + stats["acquire_misses"]),
            chunk_bytes=stats["chunk_bytes"],
            **({"expert_hit_share": 1 - fetched / passes / chosen, "expert_bytes": experts} if experts else {}),
            plans=stats["plans"],
        )
        if options.explain:
            print(gm.explain(), file=sys.stderr)
    elif cuda:
        row["device_peak"] = torch.cuda.max_memory_reserved()
    print("ROW " + json.dumps(row), flush=True)
    if gm:
        del model, out, ids
        gm.close(force=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if options.one:
        if options.system == "write":
            write_folder(pathlib.Path(options.folder))
        else:
            main()
        sys.exit(0)
    systems, caches = options.system.replace("torch", "gpu").split(","), options.cache.split(",")
    policies = options.policy.split(",")
    if options.size not in SIZES or not set(systems) <= set(SYSTEMS) or not set(caches) <= set(CACHES):
        print(
            f"generate_torch: {options.size}, {options.system}, {options.cache}: want a size of {', '.join(SIZES)}, "
            f"systems of {', '.join(SYSTEMS)}, caches of {', '.join(CACHES)}",
            file=sys.stderr,
        )
        sys.exit(2)
    if min(options.prompt, options.batch) < 1 or min(options.tokens, options.peer_tokens) < 3:
        print(
            f"generate_torch: prompt {options.prompt}, batch {options.batch}, tokens {options.tokens}, "
            f"{options.peer_tokens}: want at least 1, 1, 3 and 3",
            file=sys.stderr,
        )
        sys.exit(2)
    if not set(policies) <= set(POLICIES):
        print(f"generate_torch: {options.policy}: want policies of {', '.join(POLICIES)}", file=sys.stderr)
        sys.exit(2)
    if not SIZES[options.size][5] and (options.policy != "lru" or "%" in options.device_mem):
        print(f"generate_torch: {options.size} is no mixture: want no policy, no share of experts", file=sys.stderr)
        sys.exit(2)
    if options.folder and SIZES[options.size][-1]:
        print("generate_torch: --folder: mixtures of experts are not read from there", file=sys.stderr)
        sys.exit(2)
    if options.folder and not weights.is_written(pathlib.Path(options.folder)):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", "--system", "write"], check=True)
    failed, rows = False, {}
    limits = options.device_mem.split(",")
    for limit, cache, policy, system in itertools.product(limits, caches, policies, systems):
        key = system, None if system == "gpu" else limit, cache, policy  # all on the GPU has no budget
        if system != "gemini" and (cache == "gemini" or policy != policies[0]) or key in rows:
            continue
        argv = [sys.executable, __file__, *sys.argv[1:], "--one", "--system", system, "--cache", cache]
        argv += ["--device-mem", limit, "--policy", policy if system == "gemini" else "lru"]
        done = subprocess.run(argv, check=False, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        failed |= done.returncode != 0
        for line in done.stdout.splitlines():
            if line.startswith("ROW "):
                rows[key] = json.loads(line[4:])
    # Each run of gemini beside the other systems with the same cache (gm.Cache: with the others' first one), and
    # beside its own first cache.
    for limit, cache, policy in itertools.product(limits, caches, policies):
        ours = rows.get(("gemini", limit, cache, policy))
        beside = {
            system: next((one for one in (cache, *caches) if (system, where, one, policies[0]) in rows), None)
            for system, where in (("accelerate", limit), ("gpu", None))
        }
        compared = [
            (system, None if system == "gpu" else limit, one, policies[0]) for system, one in beside.items() if one
        ]
        compared += [("gemini", limit, one, policy) for one in caches if one != cache and cache == "gemini"]
        for against in compared:
            theirs = rows.get(against)
            if ours and theirs:
                system, _, of, _ = against
                print(
                    "ROW "
                    + json.dumps(
                        {
                            "bench": "generate_torch",
                            "case": ours["case"],
                            "value": ours["value"],
                            "unit": "s",
                            "against": system + (f" cache {of}" if of != cache or system == "gemini" else ""),
                            "ratio": theirs["value"] / ours["value"],
                            "same_tokens": ours["first_tokens_hash"] == theirs["first_tokens_hash"],
                            **(
                                {"times_least": ours["value"] / max(ours["bound_seconds"], theirs["value"])}
                                if system == "gpu"
                                else {}
                            ),
                        }
                    ),
                    flush=True,
                )
    sys.exit(1 if failed else 0)

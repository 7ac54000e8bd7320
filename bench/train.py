"""How long train.py's step takes, against a bare Hugging Face loop on the same samples.

    python bench/train.py [--shape small|tail|heavy|1.5b|smol|smol-float32] [--rounds 5]
                          [--contenders train.py sorted padded]

    train.py  train.build, train.micro_batch and train.optimizer_step, on rows of preprocess.pack
    sorted    the loop that one writes first: samples sorted by length and padded on the right, as
              many as fit row_tokens; HF forward, cross-entropy on all logits, backward, AdamW. It
              has no attention mask, as causal attention does not see what is on the right, no
              clipping, no ratios and no metrics. With bfloat16, autocast over float32 weights
    padded    train.py with --rows padded, as for models with state; only if it is named

Each contender has its own process and the same random weights. The contenders take turns, one
optimizer step a round, on the same samples. (On a GPU, a contender takes all its rounds before the
next one starts, as the models do not fit beside each other.) `of sorted` is the CPU seconds of
`sorted` / those of this contender, median and range over rounds; on a GPU it is of seconds.
tokens/s counts real tokens with prompts, and no padding. Lengths are log-normal, with sigma 0.9 in
`small` and `1.5b`, and 1.6 in `tail` and `heavy`, which is the law of tasks/tail.py.

MFU (on a GPU) = (6 N tokens + 12 layers hidden sum(length^2) / 2) / seconds / 989e12. N is the
number of matrix weights, with the output head once and without the embedding. The second term is
causal attention within each sample; recomputation counts for nothing. 989 TFLOPS is the dense bf16
peak of H100 and H200 SXM.
"""

import functools
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

# Before this folder, as `import train` must not find bench/train.py
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import train
from bench.common import WORK, keep, machine, median_and_range, parser, result_file, table
from plumbing.metrics import Sums
from plumbing.samples import filler, join
from preprocess import BUNDLE_SHARE, advantages, keep_together, pack

logging.set_verbosity_error()
# Samples of one prompt
GROUP = 8
PEAK_FLOPS = 989e12
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# completions: median, sigma, lowest and highest of log-normal lengths; prompts: lowest and highest
# of uniform lengths
SMALL = dict(vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, dtype="float32", row_tokens=1024)
SMALL |= dict(samples=96, completions=(60, 0.9, 4, 512), prompts=(8, 16))
# Qwen2.5-1.5B
WIDE = dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28)
WIDE |= dict(num_attention_heads=12, num_key_value_heads=2, dtype="bfloat16", row_tokens=16384)
WIDE |= dict(samples=128, completions=(600, 0.9, 16, 8192), prompts=(64, 256))
SMOL = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
SMOL |= dict(num_attention_heads=9, num_key_value_heads=3, dtype="bfloat16", row_tokens=1024)
SMOL |= dict(samples=64, completions=(24, 0.3, 4, 48), prompts=(48, 56))
SHAPES = {
    "small": SMALL,
    # The mean length is that of small
    "tail": SMALL | dict(row_tokens=2048, completions=(26, 1.6, 4, 2032)),
    # Rows are longer, so that `sorted` has fewer batches to sort into
    "heavy": SMALL | dict(row_tokens=4096, completions=(26, 1.6, 4, 4080)),
    "1.5b": WIDE,
    "smol": SMOL,
    "smol-float32": SMOL | dict(dtype="float32"),
    # what the preset countup has once it has learned to count
    "countup": SMOL | dict(completions=(50, 0.8, 8, 140), prompts=(76, 84)),
}


# ---- samples and model


def draw(shape, seed):
    """The samples of one step, as preprocess.py has them.

    The policy is nearly uniform, so the engine's logprobs are those of a uniform distribution.
    """
    rng = np.random.default_rng(seed)
    median, sigma, lowest, highest = shape["completions"]
    samples = []
    for _ in range(shape["samples"] // GROUP):
        prompt = rng.integers(*shape["prompts"])
        prompt_tokens = rng.integers(0, shape["vocab_size"], prompt)
        drawn = np.exp(rng.normal(np.log(median), sigma, GROUP)).astype(int)
        rewards = rng.integers(0, 2, GROUP).astype(float)
        for completion, advantage in zip(drawn, advantages(rewards, "loo")):
            length = int(prompt + np.clip(completion, lowest, highest))
            mask = np.arange(length) >= prompt
            sample = filler(length) | dict(outcome=0, num_versions=1, sample_id=len(samples))
            tokens = np.append(prompt_tokens, rng.integers(0, shape["vocab_size"], length - prompt))
            sample |= dict(tokens=tokens, mask=mask)
            sample |= dict(behavior_logprobs=np.where(mask, -np.log(shape["vocab_size"]), 0))
            sample |= dict(versions=np.where(mask, 0, -1), advantage=advantage * mask)
            samples.append(sample)
    return [samples[i] for i in rng.permutation(len(samples))]


def model_config(shape, **changed):
    """The Qwen2Config of a shape."""
    sizes = {k: v for k, v in shape.items() if k.endswith(("_size", "_layers", "_heads"))}
    rope = dict(rope_type="default", rope_theta=1e6)
    knobs = dict(max_position_embeddings=32768, rope_parameters=rope, tie_word_embeddings=True)
    ids = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return Qwen2Config(**sizes | knobs | ids | changed)


def make_model(name):
    """Directory of the shape's model with random weights, made on first use."""
    path = WORK / f"model-{name}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        shape = SHAPES[name]
        model = Qwen2ForCausalLM(model_config(shape)).to(getattr(torch, shape["dtype"]))
        model.save_pretrained(path)
    return path


# ---- contenders: each makes (prepare: samples -> micro-batches, step: micro-batches -> None)


def one_step(model, optimizers, config, device, records):
    """train.py's step on one rank, as train.train does it; returns its metrics."""
    model.zero_grad()
    sums = Sums()
    for record in records:
        loss, metrics, _ = train.micro_batch(model, record, 0, config, device)
        loss.backward()
        sums.add(metrics)
    return train.optimizer_step(model, optimizers, sums, 0, config)


def train_py(shape, path, rows="packed"):
    """The contender train.py, as its main uses it, on one rank; rows: how a row is computed."""
    # Imported here, as bench/gpu.py runs without accelerate
    from plumbing.ranks import Ranks

    knobs = dict(run="bench", model=str(path), dtype=shape["dtype"], rows=rows)
    knobs["checkpointed_layers"] = 99 if CUDA and shape["dtype"] != "float32" else 0
    config = cfg.check(cfg.Config(**knobs))
    device = Ranks(config).device
    model, optimizers = train.build(config, device, 1)

    def prepare(samples):
        samples = sorted(samples, key=lambda s: s["sample_id"])
        if rows == "padded":
            lengths = [len(s["tokens"]) for s in samples]
            chosen = pack(lengths, shape["row_tokens"], [1] * len(samples))
            return [join([samples[i] for i in row]) for row in chosen]
        groups = [samples[i : i + GROUP] for i in range(0, len(samples), GROUP)]
        parts = [x for g in groups for x in keep_together(g, BUNDLE_SHARE * shape["row_tokens"])]
        chosen = pack([tokens for tokens, _ in parts], shape["row_tokens"])
        return [join([sample for i in row for sample in parts[i][1]]) for row in chosen]

    return prepare, functools.partial(one_step, model, optimizers, config, device)


def pad(arrays):
    """Arrays of different lengths -> one tensor, zeros added on the right."""
    width = max(map(len, arrays))
    return torch.from_numpy(np.stack([np.pad(x, (0, width - len(x))) for x in arrays]))


def padded(shape, samples):
    """Samples -> [(input ids [B, T], weight of every token's loss [B, T])]."""
    chosen = [[]]
    for sample in sorted(samples, key=lambda s: len(s["tokens"])):
        # The newest one is the longest, to which all are padded
        if chosen[-1] and (len(chosen[-1]) + 1) * len(sample["tokens"]) > shape["row_tokens"]:
            chosen.append([])
        chosen[-1].append(sample)
    batches = []
    for batch in chosen:
        weights = [s["advantage"] / len(samples) for s in batch]
        batches.append((pad([s["tokens"] for s in batch]), pad(weights).float()))
    return batches


def by_hand(shape, path):
    """The contender sorted. Targets are shifted, as slicing the logits would copy them."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.to(DEVICE).train()
    if CUDA and shape["dtype"] != "float32":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)

    def step(batches):
        optimizer.zero_grad()
        for ids, weight in batches:
            ids = ids.to(DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=shape["dtype"] == "bfloat16"):
                logits = model(ids, use_cache=False).logits  # [B, T, V]
            targets = F.pad(ids[:, 1:], (0, 1)).flatten()
            of_target = F.pad(weight[:, 1:], (0, 1)).flatten().to(DEVICE)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
            (losses * of_target).sum().backward()
        optimizer.step()

    return functools.partial(padded, shape), step


BUILD = {
    "train.py": train_py,
    "sorted": by_hand,
    "padded": functools.partial(train_py, rows="padded"),
}


# ---- measuring


@functools.cache
def contender(name, shape_name):
    """(prepare, step) of a contender in its own process.

    One step warms it up, so that Adam's state exists.
    """
    shape = SHAPES[shape_name]
    prepare, step = BUILD[name](shape, make_model(shape_name))
    step(prepare(draw(shape, 10**6)))
    return prepare, step


def measure(name, shape_name, seed):
    """One step of a contender on the samples of `seed`, in its process."""
    prepare, step = contender(name, shape_name)
    batches = prepare(draw(SHAPES[shape_name], seed))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    cpu = time.process_time()
    step(batches)
    if CUDA:
        torch.cuda.synchronize()
    return dict(
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu,
        micro_batches=len(batches),
        peak_bytes=torch.cuda.max_memory_allocated() if CUDA else 0,
    )


def run(names, shape_name, rounds):
    """{name: [measurement of every round]}."""
    # Imported here, as bench/gpu.py launches nothing
    from plumbing.placement import KEEP_MEMORY

    spawn = multiprocessing.get_context("spawn")
    order = [(name, r) for r in range(rounds) for name in names]
    if CUDA:
        order.sort(key=lambda x: names.index(x[0]))
    # A process starts with its first step
    pools = {name: ProcessPoolExecutor(1, spawn) for name in names}
    results = {name: [] for name in names}
    for name, r in order:
        # The trainer has these variables, which a process reads when it starts
        for key, value in KEEP_MEMORY.items():
            os.environ.pop(key, None)
            if name != "sorted":
                os.environ[key] = value
        results[name].append(pools[name].submit(measure, name, shape_name, r).result())
        if r == rounds - 1:
            pools[name].shutdown()
    return results


def flops(shape, lengths):
    """FLOPs of a training step on samples of these lengths, as in the docstring's MFU."""
    layers = shape["num_hidden_layers"]
    hidden = shape["hidden_size"]
    key_value = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    layer_weights = hidden * (2 * hidden + 2 * key_value + 3 * shape["intermediate_size"])
    matrices = layers * layer_weights + shape["vocab_size"] * hidden
    return 6 * matrices * lengths.sum() + 6 * layers * hidden * (lengths**2.0).sum()


def row_of(name, results, shape, lengths):
    """A line of the table: {column: text}."""
    key = "seconds" if CUDA else "cpu_seconds"
    steps = results[name]
    speed = [n.sum() / s["seconds"] for n, s in zip(lengths, steps)]
    row = {"": name, "tokens/s": f"{np.median(speed):.0f}"}
    ratios = [o[key] / s[key] for o, s in zip(results.get("sorted", []), steps)]
    row["of sorted"] = median_and_range(ratios) if ratios else ""
    row["batches"] = f"{np.mean([s['micro_batches'] for s in steps]):.1f}"
    if CUDA:
        mfu = [flops(shape, n) / s["seconds"] / PEAK_FLOPS for n, s in zip(lengths, steps)]
        row["peak GB"] = f"{max(s['peak_bytes'] for s in steps) / 1e9:.2f}"
        row["MFU"] = f"{np.median(mfu):.3f}"
    return row


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--shape", choices=SHAPES, default="small")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--contenders", nargs="+", choices=BUILD, default=["train.py", "sorted"])
    a = p.parse_args(argv)
    if a.quick:
        a.rounds = 1
    shape = SHAPES[a.shape]
    make_model(a.shape)
    results = run(a.contenders, a.shape, a.rounds)
    lengths = []
    for r in range(a.rounds):
        lengths.append(np.array([len(s["tokens"]) for s in draw(shape, r)]))
    every = np.concatenate(lengths)
    where = torch.cuda.get_device_name() if CUDA else f"{torch.get_num_threads()} CPU threads"
    print(f"{machine()}; {where}")
    print(
        f"{a.shape}, {shape['dtype']}: {a.rounds} rounds of {shape['samples']} samples of "
        f"{every.mean():.0f} tokens on average, {every.max()} at most; "
        f"rows of {shape['row_tokens']}"
    )
    lines = [row_of(name, results, shape, lengths) for name in results]
    table(lines[0], [line.values() for line in lines])
    tokens = [int(n.sum()) for n in lengths]
    raw = dict(machine=f"{machine()}; {where}", shape=shape, tokens=tokens)
    keep(result_file(a, f"train-{a.shape}"), raw | dict(steps=results))


if __name__ == "__main__":
    main()

"""What train.py's step costs, against a bare Hugging Face loop, the same with padding, and TRL, alternating in one run.

    python bench/train.py [--shape toy|small|1.5b] [--rounds 5] [--contenders train.py bare padded sorted trl]

Every contender has its own process and the same random weights, and takes one optimizer step a round, in turn, on the same
samples. `of bare`: median over the rounds of bare's seconds / its seconds; `cpu` (no GPU): the same of the process's CPU seconds,
which neighbours on the machine disturb less, as does OMP_NUM_THREADS=1. On a GPU each takes all its rounds before the next starts,
as the models do not fit beside each other. tokens/s counts real tokens with prompts, no padding. Peak: what the process has beyond
its imports. Queues, generation and weight updates take no part.

    train.py  train.build and train.train_step, on rows of preprocess.pack
    bare      HF forward, cross-entropy on all logits, backward, AdamW, no clipping, on the same rows
    padded    the same, padded on the right in the order samples come, as many as fit row_tokens with their padding
    sorted    padded, the step's samples sorted by length first: the least padding there can be
    trl       GRPOTrainer.training_step (its _compute_loss and backward), its clipping, its own fused AdamW, old logprobs given

TRL, in its favour: beta 0, loss_type grpo, no generation, scoring, logging or checkpointing unless the shape has it for all; as many
samples a micro-batch as fit row_tokens with their padding (its own loop pads a whole generation batch alike). Off a GPU its
head scores prompts too, as train.py's does. It needs `pip install -r bench/requirements.txt`, best in an environment of its own. With
bfloat16, all but train.py (FSDP2) run autocast over float32 weights.

MFU (GPU) = (6 N tokens + 12 layers hidden sum(length^2) / 2) / seconds / 989e12. N: matrix weights with the output head once and
without the embedding; second term: causal attention within each sample; recomputation counts for nothing. 989 TFLOPS: dense bf16
peak of H100 and H200 SXM. Raw numbers: out/bench/train.json.
"""
import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before this folder, whose train.py is not the one meant
import config as cfg
import train
from preprocess import pack, row_record, samples_of
from tasks import _tiny, toy

logging.set_verbosity_error()
warnings.filterwarnings("ignore", "TRL currently supports vLLM")
OUT = cfg.ROOT / "out" / "bench"
GROUP = 8  # samples of one prompt
PEAK_FLOPS = 989e12
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SHAPES = {  # model; tokens of a row; samples of a step; completions: log-normal (median, sigma), clipped to [lowest, highest]; prompts: uniform
    "toy": dict(model=dict(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4),
                dtype="float32", row_tokens=512, samples=128, median=16, sigma=0.9, lowest=2, highest=128, prompt=(4, 16)),
    "small": dict(model=dict(vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
                  dtype="float32", row_tokens=1024, samples=96, median=60, sigma=0.9, lowest=4, highest=512, prompt=(8, 16)),
    "1.5b": dict(model=dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                            rope_parameters=dict(rope_type="default", rope_theta=1e6)),
                 dtype="bfloat16", row_tokens=16384, samples=128, median=600, sigma=0.9, lowest=16, highest=8192, prompt=(64, 256)),
}


def draw(shape, seed):
    """The samples of one step, as preprocess.py has them; the policy is near uniform, and so are the engine's logprobs."""
    rng, samples, vocabulary = np.random.default_rng(seed), [], shape["model"]["vocab_size"]
    for _ in range(shape["samples"] // GROUP):
        prompt = rng.integers(*shape["prompt"])
        lengths = prompt + np.exp(rng.normal(np.log(shape["median"]), shape["sigma"], GROUP)).astype(int).clip(shape["lowest"], shape["highest"])
        n = lengths.sum()
        mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
        rewards = rng.integers(0, 2, GROUP).astype(float)
        samples += samples_of(dict(lengths=lengths, tokens=rng.integers(0, vocabulary, n).astype(np.int32), mask=mask, versions=np.zeros(n, np.int32),
                                   logprobs=np.where(mask, -np.log(vocabulary), 0), rewards=rewards, outcomes=["correct" if r else "wrong" for r in rewards], finished=rewards >= 0, task="toy", index=0),
                              cfg.Config())
    return [samples[i] for i in rng.permutation(len(samples))]


def make_model(name):
    """Directory of the shape's model with random weights, made on first use."""
    path = OUT / f"model-{name}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        shape = SHAPES[name]
        model = Qwen2ForCausalLM(Qwen2Config(**shape["model"], max_position_embeddings=32768, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0))
        model.to(getattr(torch, shape["dtype"])).save_pretrained(path)
    return path


def right_sized(samples, width, capacity):
    """Consecutive samples in batches whose size times width(batch) stays within capacity."""
    batches = [[]]
    for s in samples:
        batches.append([s]) if batches[-1] and (len(batches[-1]) + 1) * width(batches[-1] + [s]) > capacity else batches[-1].append(s)
    return batches


def pad(arrays, left=False):
    """Arrays of different lengths -> one tensor, zeros added on the right, or on the left."""
    width = max(len(a) for a in arrays)
    return torch.from_numpy(np.stack([np.pad(a, (width - len(a), 0) if left else (0, width - len(a))) for a in arrays]))


# ---------------------------------------- contenders: each makes (prepare: samples -> micro-batches, step: micro-batches -> None)

def own(shape, path, device):
    """train.py as its main uses it, on one rank."""
    config = cfg.Config(model=str(path), dtype=shape["dtype"], row_tokens=shape["row_tokens"], gradient_checkpointing=shape["dtype"] != "float32")
    if config.dtype != "float32":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1"), os.environ.setdefault("MASTER_PORT", "0")
        train.dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    model, optimizer = train.build(config, device, 1)

    def prepare(samples):
        return [row_record([samples[i] for i in row]) | dict(run_id="", step=0) for row in pack([len(s["tokens"]) for s in samples], config.row_tokens)]

    def step(records):
        for record in records:
            train.check(record, "bench", config, 0, shape["model"]["vocab_size"])
        train.train_step(model, optimizer, records, 0, config, device)
    return prepare, step


def bare(shape, path, device, padded=False, by_length=False):
    """The loop one writes first: model(...).logits, cross-entropy times advantage, backward, AdamW."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").to(device).train()
    if shape["dtype"] != "float32":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    longest = lambda batch: max(len(s["tokens"]) for s in batch)

    def prepare(samples):
        if not padded:
            rows = [row_record([samples[i] for i in row]) for row in pack([len(s["tokens"]) for s in samples], shape["row_tokens"])]
            return [(dict(input_ids=torch.from_numpy(r["input_ids"])[None], position_ids=torch.from_numpy(r["position_ids"])[None]),
                     torch.from_numpy(r["advantages"] * r["mask"] / len(samples))[None]) for r in rows]
        batches = right_sized(sorted(samples, key=lambda s: len(s["tokens"])) if by_length else samples, longest, shape["row_tokens"])
        return [(dict(input_ids=pad([s["tokens"].astype(np.int64) for s in b]), attention_mask=pad([np.ones(len(s["tokens"]), np.int64) for s in b])),
                 pad([(s["advantage"] * s["mask"] / len(samples)).astype(np.float32) for s in b])) for b in batches]

    def step(batches):
        optimizer.zero_grad()
        for inputs, weight in batches:
            inputs, weight = {k: v.to(device) for k, v in inputs.items()}, weight.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=shape["dtype"] == "bfloat16"):
                logits = model(**inputs, use_cache=False).logits[:, :-1]  # [B, T-1, V]
            (F.cross_entropy(logits.flatten(0, 1).float(), inputs["input_ids"][:, 1:].flatten(), reduction="none") * weight[:, 1:].flatten()).sum().backward()
        optimizer.step()
    return prepare, step


def trl(shape, path, device):
    """TRL's GRPOTrainer without its generation: prepare makes what _generate_and_score_completions would have returned."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Prepared(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            return {k: v.to(self.args.device) for k, v in inputs.items()}

    checkpointing = shape["dtype"] != "float32"
    args = GRPOConfig(str(OUT / "trl"), per_device_train_batch_size=GROUP, num_generations=GROUP, gradient_accumulation_steps=1, learning_rate=1e-6, adam_beta2=0.95,
                      max_grad_norm=1.0, beta=0.0, loss_type="grpo", bf16=shape["dtype"] == "bfloat16", gradient_checkpointing=checkpointing,
                      gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None, use_cpu=device.type == "cpu", report_to="none",
                      max_completion_length=shape["highest"], disable_dropout=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    trainer = Prepared(model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args, train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP),
                       processing_class=_tiny.make_tokenizer([toy]))
    trainer.create_optimizer()
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    prompts = lambda batch: [s["tokens"][~s["mask"]].astype(np.int64) for s in batch]
    completions = lambda batch: [s["tokens"][s["mask"]].astype(np.int64) for s in batch]
    width = lambda batch: max(map(len, prompts(batch))) + max(map(len, completions(batch)))

    def prepare(samples):
        return [dict(prompt_ids=pad(prompts(b), left=True), prompt_mask=pad([np.ones(len(x), np.int64) for x in prompts(b)], left=True),
                     completion_ids=pad(completions(b)), completion_mask=pad([np.ones(len(x), np.int64) for x in completions(b)]),
                     advantages=torch.tensor([s["advantage"] for s in b], dtype=torch.float32),
                     old_per_token_logps=pad([s["logprobs"][s["mask"]].astype(np.float32) for s in b])) for b in right_sized(samples, width, shape["row_tokens"])]

    def step(batches):  # the inner loop of transformers' Trainer
        trainer.current_gradient_accumulation_steps = len(batches)
        for batch in batches:
            trainer.training_step(model, batch, None)
        trainer._clip_grad_norm(model)
        trainer.optimizer.step()
        model.zero_grad()
    return prepare, step


BUILD = {"train.py": own, "bare": bare, "padded": lambda *a: bare(*a, padded=True), "sorted": lambda *a: bare(*a, padded=True, by_length=True), "trl": trl}


# ---------------------------------------- measuring

def resident(key):
    """VmRSS or VmHWM of this process, bytes."""
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024


@functools.cache
def contender(name, shape_name):
    """(prepare, step, bytes this process had before) of a contender in its own process, warmed up by one step, so that Adam's state exists."""
    if name == "trl":
        from trl import GRPOTrainer as _  # so that its import does not count as memory
    before = resident("VmRSS")
    prepare, step = BUILD[name](SHAPES[shape_name], make_model(shape_name), DEVICE)
    step(prepare(draw(SHAPES[shape_name], 10 ** 6)))
    return prepare, step, before


def measure(name, shape_name, seed):
    """One step of a contender on the samples of `seed`, in its process."""
    prepare, step, before = contender(name, shape_name)
    batches = prepare(draw(SHAPES[shape_name], seed))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    start, cpu = time.perf_counter(), time.process_time()
    step(batches)
    if CUDA:
        torch.cuda.synchronize()
    return dict(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu, micro_batches=len(batches),
                peak_bytes=torch.cuda.max_memory_allocated() if CUDA else resident("VmHWM") - before)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shape", choices=SHAPES, default="small")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--contenders", nargs="+", choices=BUILD, default=list(BUILD))
    a = p.parse_args()
    shape = SHAPES[a.shape]
    make_model(a.shape)
    pools = {name: ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) for name in a.contenders}  # a process starts with its first step
    results, failed = {name: [] for name in a.contenders}, {}
    for name, r in ((n, r) for n in a.contenders for r in range(a.rounds)) if CUDA else ((n, r) for r in range(a.rounds) for n in a.contenders):
        try:
            if name not in failed:
                results[name].append(pools[name].submit(measure, name, a.shape, r).result())
        except ImportError as e:
            failed[name] = f"not installed: pip install -r bench/requirements.txt ({e})"
        except torch.OutOfMemoryError:
            failed[name] = "out of memory"
        if name in failed or r == a.rounds - 1:
            pools[name].shutdown()

    m, lengths = shape["model"], [np.array([len(s["tokens"]) for s in draw(shape, r)]) for r in range(a.rounds)]
    layers, hidden, key_value = m["num_hidden_layers"], m["hidden_size"], m["num_key_value_heads"] * m["hidden_size"] // m["num_attention_heads"]
    matrices = layers * hidden * (2 * hidden + 2 * key_value + 3 * m["intermediate_size"]) + m["vocab_size"] * hidden
    n, rows = np.concatenate(lengths), sum(len(pack(k.tolist(), shape["row_tokens"])) for k in lengths)
    print(f"{a.shape}: {matrices / 1e6:.1f}M matrix weights, {shape['dtype']}, {torch.cuda.get_device_name() if CUDA else f'{torch.get_num_threads()} CPU threads'}, {a.rounds} rounds of "
          f"{shape['samples']} samples, lengths median {np.median(n):.0f}, mean {n.mean():.0f}, longest {n.max()}")
    print(f"rows of {shape['row_tokens']} tokens: {len(n) / rows:.1f} samples a row, fill {n.sum() / rows / shape['row_tokens']:.3f}")
    print(f"{'':>10} {'tokens/s':>9} {'of bare':>8} {'(rounds)':>12} {'peak GB':>8} {'batches':>8} {'MFU' if CUDA else 'cpu':>6}")
    for name, steps in results.items():
        if name in failed:
            print(f"{name:>10} {failed[name]}")
            continue
        of_bare = {key: [b[key] / s[key] for b, s in zip(results.get("bare", []), steps)] or [np.nan] for key in ("seconds", "cpu_seconds")}
        span = f"{min(of_bare['seconds']):.2f}-{max(of_bare['seconds']):.2f}"
        speed = np.median([k.sum() / s["seconds"] for k, s in zip(lengths, steps)])
        mfu = [(6 * matrices * k.sum() + 6 * layers * hidden * (k.astype(float) ** 2).sum()) / s["seconds"] / PEAK_FLOPS for k, s in zip(lengths, steps)]
        print(f"{name:>10} {speed:>9.0f} {np.median(of_bare['seconds']):>8.2f} {span:>12} "
              f"{max(s['peak_bytes'] for s in steps) / 1e9:>8.2f} {np.mean([s['micro_batches'] for s in steps]):>8.1f} {np.median(mfu if CUDA else of_bare['cpu_seconds']):>6.3f}")
    raw = dict(shape=a.shape, settings=shape, torch=torch.__version__, threads=torch.get_num_threads(), tokens=[int(k.sum()) for k in lengths], rows=rows, steps=results, failed=failed)
    (OUT / "train.json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()

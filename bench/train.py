"""What train.py's step costs, against a bare Hugging Face loop, the same with padding, and TRL, in turn.

    python bench/train.py [--shape small|tail|heavy|1.5b] [--rounds 5] [--contenders train.py bare padded sorted trl]

Every contender has its own process and the same random weights, and takes one optimizer step a round, in
turn, on the same samples. `of bare`, `of sorted`: median over the rounds of that contender's seconds / its
seconds, and the range; `cpu` (no GPU): the same of the process's CPU seconds, which neighbours on the
machine disturb less, as does OMP_NUM_THREADS=1. On a GPU each takes all its rounds before the next starts,
as the models do not fit beside each other. tokens/s counts real tokens with prompts, no padding. Peak: what
the process has beyond its imports. Queues, generation and weight updates take no part.

    train.py  train.build and train.train_step, on rows of preprocess.pack
    bare      HF forward, cross-entropy on all logits, backward, AdamW, no clipping, on the same rows
    padded    the same, padded on the right in the order samples come, as many as fit row_tokens with their
              padding; no attention mask, as causal attention does not see what is on the right
    sorted    padded, the step's samples sorted by length first
    trl       GRPOTrainer.training_step (its _compute_loss and backward), its clipping, its own fused AdamW, old logprobs given

Lengths are log-normal: of `small` and `1.5b` with sigma 0.9, of `tail` and `heavy` with sigma 1.6, which is the law of
tasks/tail.py, up to as long as a row. How much sorting helps depends on how many batches there are to choose
from: the fewer, the more a batch pads.

TRL, in its favour: beta 0, loss_type grpo, no generation, scoring, logging or checkpointing unless the
shape has it for all; as many samples a micro-batch as fit row_tokens with their padding (its own loop pads
a whole generation batch alike). Off a GPU its head scores prompts, too. It needs
`pip install -r bench/requirements.txt`, best in an environment of its own. With bfloat16, all but train.py
(FSDP2) run autocast over float32 weights.

MFU (GPU) = (6 N tokens + 12 layers hidden sum(length^2) / 2) / seconds / 989e12. N: matrix weights with
the output head once and without the embedding; second term: causal attention within each sample;
recomputation counts for nothing. 989 TFLOPS: dense bf16 peak of H100 and H200 SXM.
"""

import functools
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

# before this folder, whose train.py is not the one meant
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import train
from bench.common import WORK, keep, machine, parser, result_file, table
from plumbing.ranks import Ranks
from plumbing.samples import SAMPLED, join, layout, problem_with
from preprocess import advantages, pack
from tasks import toy
from tools.base_model import make_tokenizer

logging.set_verbosity_error()
warnings.filterwarnings("ignore", "TRL currently supports vLLM")
# samples of one prompt
GROUP = 8
PEAK_FLOPS = 989e12
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# median, sigma, lowest and highest of log-normal completions; lowest and highest of uniform prompts
SMALL = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    dtype="float32",
    row_tokens=1024,
    samples=96,
    completions=(60, 0.9, 4, 512),
    prompts=(8, 16),
)
SHAPES = {
    "small": SMALL,
    # the same mean length
    "tail": SMALL | dict(row_tokens=2048, completions=(26, 1.6, 4, 2032)),
    # longer rows, hence fewer batches to sort into
    "heavy": SMALL | dict(row_tokens=4096, completions=(26, 1.6, 4, 4080)),
    # Qwen2.5-1.5B
    "1.5b": dict(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        dtype="bfloat16",
        row_tokens=16384,
        samples=128,
        completions=(600, 0.9, 16, 8192),
        prompts=(64, 256),
    ),
}
OF_MODEL = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads"
).split()


# ---- samples and model


def draw(shape, seed):
    """The samples of one step, as preprocess.py has them; the policy is near uniform, and so are the engine's logprobs."""
    rng = np.random.default_rng(seed)
    median, sigma, lowest, highest = shape["completions"]
    samples = []
    for _ in range(shape["samples"] // GROUP):
        prompt = rng.integers(*shape["prompts"])
        drawn = np.exp(rng.normal(np.log(median), sigma, GROUP)).astype(int)
        rewards = rng.integers(0, 2, GROUP).astype(float)
        of_group = advantages(rewards, "loo")
        for completion, reward, advantage in zip(drawn, rewards, of_group):
            length = prompt + np.clip(completion, lowest, highest)
            mask = np.arange(length) >= prompt
            sample = dict(
                tokens=rng.integers(0, shape["vocab_size"], length),
                mask=mask,
                behavior_logprobs=np.where(mask, -np.log(shape["vocab_size"]), 0),
                versions=np.where(mask, 0, -1),
                task=0,
                temperature=1.0,
                reward=reward,
                outcome=int(reward == 0),
                finished=True,
                num_versions=1,
                number=len(samples),
                advantage=advantage,
            )
            samples.append(sample)
    return [samples[i] for i in rng.permutation(len(samples))]


def lengths_of(samples):
    return [len(s["tokens"]) for s in samples]


def rows_of(shape, samples):
    """The samples in packed rows."""
    rows = pack(lengths_of(samples), shape["row_tokens"])
    return [[samples[i] for i in row] for row in rows]


def model_config(shape, **changed):
    """The Qwen2Config of a shape."""
    knobs = dict(
        {k: shape[k] for k in OF_MODEL},
        max_position_embeddings=32768,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen2Config(**knobs | changed)


def make_model(name):
    """Directory of the shape's model with random weights, made on first use."""
    path = WORK / f"model-{name}"
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        shape = SHAPES[name]
        model = Qwen2ForCausalLM(model_config(shape)).to(getattr(torch, shape["dtype"]))
        model.save_pretrained(path)
    return path


def load_float32(path):
    """The model as the other contenders have it."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )


def right_sized(samples, width, capacity):
    """Consecutive samples in batches whose size times width(batch) stays within capacity."""
    batches = []
    batch = []
    for sample in samples:
        wider = batch + [sample]
        if batch and len(wider) * width(wider) > capacity:
            batches.append(batch)
            wider = [sample]
        batch = wider
    return batches + [batch]


def pad(arrays, left=False):
    """Arrays of different lengths -> one tensor, zeros added on the right, or on the left."""
    width = max(map(len, arrays))
    padded = []
    for array in arrays:
        missing = width - len(array)
        padded.append(np.pad(array, (missing, 0) if left else (0, missing)))
    return torch.from_numpy(np.stack(padded))


# ---- contenders: each makes (prepare: samples -> micro-batches, step: micro-batches -> None)


def own(shape, path):
    """train.py as its main uses it, on one rank."""
    config = cfg.Config(
        run="bench",
        model=str(path),
        dtype=shape["dtype"],
        row_tokens=shape["row_tokens"],
        gradient_checkpointing=shape["dtype"] != "float32",
    )
    cfg.check(config)
    device = Ranks(config).device
    model, optimizers = train.build(config, device, 1)

    def prepare(samples):
        return [join(row) for row in rows_of(shape, samples)]

    def step(records):
        for record in records:
            assert problem_with(record, SAMPLED, model.config.vocab_size, 1) is None
        train.train_step(model, optimizers, records, 0, config, device)

    return prepare, step


def by_hand(shape, path, prepare):
    """The loop one writes first: model(...).logits, cross-entropy times advantage, backward, AdamW.

    prepare: shape, samples -> [(the model's inputs, weight of every token's loss)], [B, T] each. Targets
    are shifted, as slicing the logits would copy them.
    """
    model = load_float32(path).to(DEVICE).train()
    if shape["dtype"] != "float32":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)

    def step(batches):
        optimizer.zero_grad()
        for inputs, weight in batches:
            inputs = {k: v.to(DEVICE) for k, v in inputs.items()}
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=shape["dtype"] == "bfloat16"):
                logits = model(**inputs, use_cache=False).logits  # [B, T, V]
            targets = F.pad(inputs["input_ids"][:, 1:], (0, 1)).flatten()
            of_target = F.pad(weight[:, 1:], (0, 1)).flatten().to(DEVICE)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
            (losses * of_target).sum().backward()
        optimizer.step()

    return functools.partial(prepare, shape), step


def packed(shape, samples):
    """Rows of preprocess.pack."""
    batches = []
    for row in rows_of(shape, samples):
        record = join(row)
        positions, sequence_ids = layout(record["lengths"])
        weight = record["advantage"][sequence_ids] * record["mask"] / len(samples)
        inputs = dict(input_ids=record["tokens"][None], position_ids=positions[None])
        inputs = {k: torch.from_numpy(v) for k, v in inputs.items()}
        batches.append((inputs, torch.from_numpy(weight)[None]))
    return batches


def padded(shape, samples):
    """In the order they come, as many as fit a row with their padding."""
    batches = []
    for batch in right_sized(samples, lambda b: max(lengths_of(b)), shape["row_tokens"]):
        inputs = dict(input_ids=pad([s["tokens"] for s in batch]))
        weights = [s["advantage"] * s["mask"] / len(samples) for s in batch]
        batches.append((inputs, pad(weights).float()))
    return batches


def padded_by_length(shape, samples):
    """Likewise, sorted first."""
    return padded(shape, sorted(samples, key=lambda s: len(s["tokens"])))


def prompts(batch):
    return [s["tokens"][~s["mask"]] for s in batch]


def completions(batch):
    return [s["tokens"][s["mask"]] for s in batch]


def padded_for_trl(shape, samples):
    """What GRPOTrainer._generate_and_score_completions would have returned."""

    def width(batch):
        return max(map(len, prompts(batch))) + max(map(len, completions(batch)))

    batches = []
    for batch in right_sized(samples, width, shape["row_tokens"]):
        logprobs = [s["behavior_logprobs"][s["mask"]] for s in batch]
        inputs = dict(
            prompt_ids=pad(prompts(batch), left=True),
            prompt_mask=pad([np.ones_like(x) for x in prompts(batch)], left=True),
            completion_ids=pad(completions(batch)),
            completion_mask=pad([np.ones_like(x) for x in completions(batch)]),
            advantages=torch.tensor([s["advantage"] for s in batch], dtype=torch.float32),
            old_per_token_logps=pad(logprobs).float(),
        )
        batches.append(inputs)
    return batches


def trl(shape, path):
    """TRL's GRPOTrainer without its generation."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Prepared(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            return {k: v.to(self.args.device) for k, v in inputs.items()}

    checkpointing = shape["dtype"] != "float32"
    args = GRPOConfig(
        str(WORK / "trl"),
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        gradient_accumulation_steps=1,
        learning_rate=1e-6,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        bf16=checkpointing,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        use_cpu=not CUDA,
        report_to="none",
        max_completion_length=shape["completions"][-1],
        disable_dropout=True,
    )
    trainer = Prepared(
        load_float32(path),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP),
        processing_class=make_tokenizer([toy]),
    )
    trainer.create_optimizer()
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)

    # the inner loop of transformers' Trainer
    def step(batches):
        trainer.current_gradient_accumulation_steps = len(batches)
        for batch in batches:
            trainer.training_step(model, batch, None)
        trainer._clip_grad_norm(model)
        trainer.optimizer.step()
        model.zero_grad()

    return functools.partial(padded_for_trl, shape), step


BUILD = {
    "train.py": own,
    "bare": functools.partial(by_hand, prepare=packed),
    "padded": functools.partial(by_hand, prepare=padded),
    "sorted": functools.partial(by_hand, prepare=padded_by_length),
    "trl": trl,
}


# ---- measuring


def resident(key):
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024


@functools.cache
def contender(name, shape_name):
    """(prepare, step, bytes this process had before) of a contender in its own process, warmed up by one step, so that Adam's state exists."""
    if name == "trl":
        # its import does not count as memory
        import trl  # noqa: F401
    before = resident("VmRSS")
    shape = SHAPES[shape_name]
    prepare, step = BUILD[name](shape, make_model(shape_name))
    step(prepare(draw(shape, 10**6)))
    return prepare, step, before


def measure(name, shape_name, seed):
    """One step of a contender on the samples of `seed`, in its process."""
    prepare, step, before = contender(name, shape_name)
    batches = prepare(draw(SHAPES[shape_name], seed))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    else:
        # VmHWM starts again from VmRSS
        Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    cpu = time.process_time()
    step(batches)
    if CUDA:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resident("VmHWM") - before
    return dict(
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu,
        micro_batches=len(batches),
        peak_bytes=peak,
    )


def run(names, shape_name, rounds):
    """({name: [measurement of every round]}, {name: why it could not be measured})."""
    spawn = multiprocessing.get_context("spawn")
    order = [(name, r) for r in range(rounds) for name in names]
    if CUDA:
        order.sort(key=lambda x: names.index(x[0]))
    # a process starts with its first step
    pools = {name: ProcessPoolExecutor(1, spawn) for name in names}
    results = {name: [] for name in names}
    failed = {}
    for name, r in order:
        if name in failed:
            continue
        try:
            results[name].append(pools[name].submit(measure, name, shape_name, r).result())
        except ImportError as e:
            failed[name] = f"not installed: pip install -r bench/requirements.txt ({e})"
        except torch.OutOfMemoryError:
            failed[name] = "out of memory"
        if name in failed or r == rounds - 1:
            pools[name].shutdown()
    return results, failed


def flops(shape, lengths):
    """Of a training step on samples of these lengths, as in the docstring's MFU."""
    layers = shape["num_hidden_layers"]
    hidden = shape["hidden_size"]
    key_value = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    of_layer = hidden * (2 * hidden + 2 * key_value + 3 * shape["intermediate_size"])
    matrices = layers * of_layer + shape["vocab_size"] * hidden
    return 6 * matrices * lengths.sum() + 6 * layers * hidden * (lengths**2.0).sum()


def against(other, steps, key):
    """Median and range over the rounds of another contender's seconds / these, as words."""
    ratios = [o[key] / s[key] for o, s in zip(other, steps)] or [np.nan]
    return f"{np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def row_of(name, results, shape, lengths):
    """A line of the table: {column: text}. Ratios to a contender that takes no part are nan."""
    steps = results[name]
    speed = [n.sum() / s["seconds"] for n, s in zip(lengths, steps)]
    row = {"": name, "tokens/s": f"{np.median(speed):.0f}"}
    for other in ("bare", "sorted"):
        row[f"of {other}"] = against(results.get(other, []), steps, "seconds")
        if not CUDA:
            row[f"cpu of {other}"] = against(results.get(other, []), steps, "cpu_seconds")
    row["peak GB"] = f"{max(s['peak_bytes'] for s in steps) / 1e9:.2f}"
    row["batches"] = f"{np.mean([s['micro_batches'] for s in steps]):.1f}"
    if CUDA:
        mfu = [flops(shape, n) / s["seconds"] / PEAK_FLOPS for n, s in zip(lengths, steps)]
        row["MFU"] = f"{np.median(mfu):.3f}"
    return row


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--shape", choices=SHAPES, default="small")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--contenders", nargs="+", choices=BUILD, default=list(BUILD))
    a = p.parse_args(argv)
    if a.quick:
        a.rounds = 1
    shape = SHAPES[a.shape]
    make_model(a.shape)
    results, failed = run(a.contenders, a.shape, a.rounds)
    steps = [draw(shape, r) for r in range(a.rounds)]
    lengths = [np.array(lengths_of(samples)) for samples in steps]
    rows = sum(len(rows_of(shape, samples)) for samples in steps)
    every = np.concatenate(lengths)
    where = f"{torch.get_num_threads()} CPU threads"
    if CUDA:
        where = torch.cuda.get_device_name()
    print(f"{machine()}; {where}")
    print(
        f"{a.shape}, {shape['dtype']}: {a.rounds} rounds of {shape['samples']} samples, lengths median "
        f"{np.median(every):.0f}, mean {every.mean():.0f}, longest {every.max()}; rows of "
        f"{shape['row_tokens']} tokens, fill {every.sum() / rows / shape['row_tokens']:.3f}"
    )
    lines = [row_of(name, results, shape, lengths) for name in results if name not in failed]
    if lines:
        table(lines[0], [line.values() for line in lines])
    for name, why in failed.items():
        print(f"{name}: {why}")
    tokens = [int(n.sum()) for n in lengths]
    raw = dict(machine=f"{machine()}; {where}", shape=shape, tokens=tokens, rows=rows)
    keep(result_file(a, f"train-{a.shape}"), raw | dict(steps=results, failed=failed))


if __name__ == "__main__":
    main()

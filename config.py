"""Every knob, in one dataclass; the presets; and the checks that need no hardware.

`bash run.sh toy --steps 50 --dry_run True` checks a configuration and prints what would be started.
Nothing here imports torch: a wrong flag must be reported at once. Deliberately absent: config
files, nesting, interpolation. A preset is a dict below, a new knob is one line in `Config`, and
every process reads the one `out/<run>/config.json`.
"""

import contextlib
import difflib
import importlib
import json
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_type_hints

from plumbing import knobs

ROOT = Path(__file__).resolve().parent


class ConfigError(Exception):
    """A knob that cannot be used; the message is one line that says which and what to do."""


class Bounds(NamedTuple):
    """What a number may be, both ends included. The default: it is finite."""

    least: float = -1e30
    most: float = 1e30


Count = Annotated[int, Bounds(1, 10**9)]
CountOr0 = Annotated[int, Bounds(0, 10**9)]
Positive = Annotated[float, Bounds(1e-12, 1e12)]
NotNegative = Annotated[float, Bounds(0, 1e12)]
Seconds = Annotated[float, Bounds(0.01, 1e8)]


@dataclass
class Config:
    # ---- run

    # name of the run directory under `out`
    run: str = ""
    # where run directories live; shared by all nodes
    out: str = "out"
    # print the placement and every process's exact command, and stop
    dry_run: bool = False
    # start over: an existing run directory of this name is moved aside, never deleted
    fresh: bool = False
    # set by the launcher: an id that tells this run's records from another's; a continued run keeps
    # it
    run_id: str = ""
    # seeds the problem order, the sampling, the shuffling and the tiny base model
    seed: Annotated[int, Bounds(0, 2**31 - 1)] = 0
    # log the same metrics to Weights & Biases
    wandb: Literal["off", "offline", "online"] = "off"

    # ---- task and model

    # name of a file under tasks/, or a mixture of several: maths:0.7,toy:0.3
    task: str = "toy"
    # problems to train on, for tasks that read them: files, directories or data sets of the hub,
    # with commas between them; docs/data.md says what is understood
    train_data: str = ""
    # held-out problems, for tasks that read them, in the same form
    eval_data: str = ""
    # share of a task's problems that may be left out, and counted, because the model cannot take
    # their prompts (too long, or with a token that it lacks); if there are more, the run is refused
    max_left_out: Annotated[float, Bounds(0, 1)] = 0.05
    # HF model directory or hub name; empty: the tiny base model that the task's demonstrations make
    model: str = ""
    # family of that tiny base model, a model type of transformers: qwen2, qwen3_moe, gpt_oss, ...
    family: str = "qwen2"
    # prompts go through the model's chat template; False: raw text, for base models
    chat: bool = False
    # system message of the chat template; prepended to raw prompts
    system_prompt: str = ""
    # the value of enable_thinking for chat templates that know it; auto: the template's own default
    thinking: Literal["auto", "on", "off"] = "auto"
    # compute dtype of engine and trainer; auto: float32 on CPU, bfloat16 on GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # output head in float32 on both sides when dtype is bfloat16: less mismatch, slower head
    head_float32: bool = False

    # ---- batch

    # optimizer steps of the whole run
    steps: Count = 200
    # B: samples per optimizer step, if no attempt fails; a multiple of `attempts`
    batch_size: Count = 256
    # attempts at each problem: the group that advantages are computed over
    attempts: Count = 16
    # the gate: groups are started at most this many steps ahead of the trainer; 0: synchronous.
    # This limits when a group may start: a long sequence may be older when it is trained (see
    # `late`)
    max_lag: CountOr0 = 1
    # 0: pipeline; G > 0: conventional RL, for comparison: generate for G optimizer steps, then
    # train them. max_lag then has no effect on when problems start; --late mask still uses it
    conventional_g: CountOr0 = 0
    # what happens when the trainer is slower than the engines: block: the engines wait;
    # drop_oldest: only the newest groups are kept, enough for two steps (in conventional RL: for a
    # phase of G steps)
    on_full: Literal["block", "drop_oldest"] = "block"
    # tokens that are older than max_lag when they are trained. keep: train them (the paper); mask:
    # leave them out of the loss; wait: train groups in the order of their starts, so that there are
    # fewer such tokens; hold: as wait, and a step begins only when every group that may be started
    # is complete, so that all of its tokens are exactly max_lag versions old, fewer in the first
    # steps of every start (for studies of staleness: engines and trainer take turns; sampling
    # max_lag + 1 steps' worth of groups must take less than stall_timeout)
    late: Literal["keep", "mask", "wait", "hold"] = "keep"
    # groups in which every advantage is 0: train them, or drop and count them
    no_signal: Literal["keep", "drop"] = "keep"

    # ---- generation

    # number of vLLM servers; 0: three of every eight GPUs serve; without GPUs, every node that does
    # not train has one server
    engines: CountOr0 = 0
    # GPUs per engine
    tensor_parallel: Count = 1
    # sequences in progress per engine
    concurrency: Count = 64
    # sampling temperature; the trainer computes its logprobs at the same one
    temperature: Annotated[float, Bounds(0.01, 100)] = 1.0
    # longest completion, tokens; longer ones are cut off
    max_new_tokens: Count = 1024
    # longest prompt + completion the engine accepts, tokens
    max_model_len: Count = 2048
    # KV cache per engine, GB; 0: vLLM decides (GPU); the CPU build needs a number
    kv_cache_gb: Annotated[float, Bounds(0, 1000)] = 0.0
    # share of a GPU's memory that the engine takes; 0: 0.7, or 0.3 on a GPU shared with the trainer
    gpu_memory_utilization: Annotated[float, Bounds(0, 1)] = 0.0
    # vLLM's prefix caching, within one weight version; it pays off for long prompts and many turns
    prefix_caching: Literal["on", "off"] = "off"
    # vLLM's --tool-call-parser and --reasoning-parser, for agents' own clients: hermes, qwen3, ...;
    # empty: for tool calls hermes, or that of gpt-oss for this model; none for reasoning
    tool_parser: str = ""
    reasoning_parser: str = ""
    # run vLLM without CUDA graphs: it starts sooner and samples more slowly
    enforce_eager: bool = False

    # ---- rewards

    # rewards of the outcomes correct, wrong, no_answer, unparsable, for tasks that return outcomes
    reward_finished: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    # the same table for completions cut off at max_new_tokens
    reward_cut_off: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    # time limit of the reward function for one answer, wall-clock seconds
    reward_timeout: Seconds = 5.0
    # time limit of an episode, wall-clock seconds
    episode_timeout: Seconds = 600.0
    # soft penalty: rewards fall by up to 1 over the last so many tokens before max_new_tokens
    overlong_buffer: CountOr0 = 0
    # leave cut off samples out of the loss (they still count as samples)
    overlong_mask: bool = False

    # ---- loss

    # how advantages follow from the rewards of a group, see preprocess.advantages
    advantage: Literal["loo", "mean", "mean_std", "max_rl", "none"] = "loo"
    # policy-gradient loss, see train.policy_loss
    loss: Literal["reinforce", "ppo", "cispo", "gspo", "icepop", "dppo"] = "reinforce"
    # token: each token has its own importance weight; sequence: all tokens of a sequence have the
    # geometric mean of their weights; product: all have the product of their weights, which is the
    # weight of the whole sequence; "": the loss's own choice (config.LOSSES). A sequence is an
    # attempt here, with all its segments
    ratio: Literal["", "token", "sequence", "product"] = ""
    # lower bound of the importance weight; negative: the loss's own bound
    clip_low: float = -1.0
    # upper bound of the importance weight (reinforce: c, ppo: 1 + epsilon); dppo: the largest
    # difference of the token's two probabilities; negative: the loss's own
    clip_high: float = -1.0
    # what the loss is divided by. samples: sum over tokens / samples (the paper); tokens: sum over
    # tokens / tokens; sequence: sum of the sequences' means / samples; "": samples, but sequence
    # with --ratio sequence
    normalizer: Literal["", "samples", "tokens", "sequence"] = ""
    # on-policy distillation from this model, a directory or hub name, which has the same vocabulary
    teacher: str = ""
    # a sampled token's advantage gets this times (log teacher - log mu)
    teacher_coef: NotNegative = 1.0
    # weight of KL(policy || frozen base model) in the loss; above 0 the ranks hold that model, too
    kl_coef: NotNegative = 0.0
    # weight of (log w)^2 of each token in the loss, w its importance weight: holds the policy near
    # the one that sampled the data
    kl_behavior_coef: NotNegative = 0.0
    # bonus on the entropy of each sampled token's distribution
    entropy_coef: NotNegative = 0.0
    # mean |trainer - engine logprob|, nats a token, above which the run ends; it is measured before
    # the first step, after it, and at every 20th update from there on. 0: 1e-3 in float32, 0.2 in
    # bfloat16 (on a CPU it is 0.05 to 0.09; on a GPU it has not been measured yet)
    mismatch_limit: NotNegative = 0.0

    # ---- optimizer

    # peak learning rate (AdamW)
    lr: Positive = 1e-06
    # linear warm-up of the learning rate, steps
    warmup_steps: CountOr0 = 0
    # constant after the warm-up; or linear: the rate is also multiplied by a factor that falls
    # from 1 at the first step to 0.1 at the last one
    lr_schedule: Literal["constant", "linear"] = "constant"
    # multiply the rate of each step by the square root of the effective sample size of its samples
    # (metric ess_sample): steps on data that is far off-policy are small
    lr_by_ess: bool = False
    # decay rates of AdamW's two moments
    betas: Annotated[tuple[float, float], Bounds(0, 0.999999)] = (0.9, 0.95)
    # weight decay of AdamW, of matrices alone
    weight_decay: NotNegative = 0.0
    # the gradient's norm is clipped to this value
    max_grad_norm: Positive = 1.0
    # tokens of a row, which is a micro-batch; with padding, its padding counts, too
    row_tokens: Count = 4096
    # how the trainer computes a row. packed: sequences end to end, with our attention; native: the
    # same with transformers' own attention and kernels; padded: a padded batch; auto: the first of
    # these that computes what transformers does with one sequence at a time, which is measured at
    # the start (plumbing/model.py, tools/model_check.py)
    rows: Literal["auto", "packed", "native", "padded"] = "auto"
    # mixtures of experts: the trainer sends each token to the experts that the engine chose for it;
    # needs engines on GPUs and --prefix_caching on
    replay_routing: bool = False
    # trainer ranks (FSDP2 when more than one); 0: the GPUs that do not serve, or 1 without GPUs
    trainers: CountOr0 = 0
    # number of layers, counted from the first, whose activations are recomputed in the backward
    # pass: less memory; with all layers a step takes some 30% longer
    checkpointed_layers: CountOr0 = 0
    # keep activations for the backward pass in host memory; best with all layers checkpointed
    offload_activations: bool = False
    # compile the trainer's layers and head with torch.compile: less memory traffic, minutes more to
    # start
    compile: bool = False

    # keep AdamW's two moments in 8 bits (torchao): 2 bytes a parameter instead of 8
    adam_8bit: bool = False
    # train adapters of this rank (LoRA) of all linear layers but the head; 0: all of the weights
    lora_rank: CountOr0 = 0
    # adapters are scaled by lora_alpha / lora_rank; their learning rate is ten times --lr
    lora_alpha: Positive = 32.0

    # ---- weight updates

    # False: requests in progress keep the KV cache that older weights computed (the paper); True:
    # it is recomputed at each update
    recompute_kv: bool = False
    # auto: nccl between GPUs; gloo on CPU, and on one shared GPU, where NCCL refuses two ranks
    weight_backend: Literal["auto", "nccl", "gloo"] = "auto"
    # size of one broadcast, MB
    bucket_mb: Count = 256
    # deadline of each call and broadcast of a weight update, seconds
    sync_timeout: Seconds = 60.0

    # ---- evaluation, checkpoints, logs

    # evaluate every so many versions, and always before training and at the end; 0: only then
    eval_every: CountOr0 = 50
    # held-out problems per evaluation, of each set
    eval_problems: CountOr0 = 256
    # attempts at each held-out problem
    eval_attempts: Count = 1
    # sampling temperature of evaluations; 0: greedy
    eval_temperature: Annotated[float, Bounds(0, 100)] = 1.0
    # write a checkpoint every so many steps, and always at the end; 0: only at the end
    save_every: CountOr0 = 100
    # number of checkpoints that are kept; 0: all
    keep_last: CountOr0 = 2
    # number of decoded samples per step in samples.jsonl and report.html, all from rank 0
    samples_logged: CountOr0 = 2
    # keep the data of the last so many steps, until the run is continued, for tools/replay.py; as
    # it starts from a checkpoint, keep no fewer than save_every
    keep_steps: CountOr0 = 0

    # ---- machine

    # engine i listens on port + i, or on the next one that is free
    port: Annotated[int, Bounds(1, 65535)] = 8500
    # set by the launcher: number of nodes
    nnodes: Count = 1
    # set by the launcher: address of node 0
    master_addr: str = ""
    # set by the launcher: port of node 0 where trainer ranks meet
    master_port: CountOr0 = 0
    # deadline for an engine's start, seconds
    start_timeout: Seconds = 900.0
    # longest wait of any stage for another one, seconds. The time in which engines start does not
    # count. A request that takes more than a third of this is sent again, to another engine.
    stall_timeout: Seconds = 1800.0
    # time that a stop leaves the trainer to save, seconds
    stop_timeout: Seconds = 120.0
    # CPU threads per engine, without GPUs; 0: half of the cores, shared out
    engine_threads: CountOr0 = 0
    # CPU threads per trainer rank; 0: the cores the engines leave, shared out
    trainer_threads: CountOr0 = 0

    @property
    def groups_per_step(self) -> int:
        """Groups, all attempts at one problem, that a step trains."""
        return self.batch_size // self.attempts

    @property
    def highest_mismatch(self) -> float:
        """The knob mismatch_limit, or its default by dtype, once that is resolved."""
        return self.mismatch_limit or {"float32": 1e-3, "bfloat16": 0.2}[self.dtype]


# Of each loss: the level of its importance weights (--ratio), and their bounds clip_low and
# clip_high (dppo: the bound of another quantity). train.policy_loss says what it does with them.
LOSSES = {
    "reinforce": ("token", 0.0, 5.0),
    "ppo": ("token", 0.8, 1.2),
    "cispo": ("token", 0.0, 5.0),
    "gspo": ("sequence", 1 - 3e-4, 1 + 4e-4),
    "icepop": ("token", 0.5, 5.0),
    "dppo": ("token", 0.0, 0.2),
}
# Options of vLLM that are refused: with them, tokens would be sampled from another distribution
# than the one that is trained. The names are flags whose dashes are made underscores.
DISTRIBUTION_OPTIONS = {
    "__top_p",
    "__top_k",
    "__min_p",
    "__repetition_penalty",
    "__presence_penalty",
    "__frequency_penalty",
}
# columns of the reward table
OUTCOMES = ("correct", "wrong", "no_answer", "unparsable")

# Tuned on 2 cores. Sequences take longer than a step, so most updates arrive in the middle of some
# sequences.
TOY = dict(
    task="toy",
    steps=270,
    batch_size=448,
    attempts=16,
    concurrency=256,
    max_new_tokens=40,
    max_model_len=128,
    kv_cache_gb=1.0,
    enforce_eager=True,
    row_tokens=512,
    lr=6e-4,
    warmup_steps=5,
    lr_schedule="linear",
    eval_every=54,
    save_every=90,
    max_lag=1,
    start_timeout=300.0,
    stall_timeout=300.0,
)
# A real chat model, which tools/prepare.py makes, on 200 sums of reasoning-gym, a quarter of them
# held out.
SMOL = TOY | dict(
    task="gym",
    train_data="chain_sum/max_terms=2/max_digits=1",
    eval_data="chain_sum/max_terms=2/max_digits=1",
    model=str(ROOT / "out" / "models" / "SmolLM2-135M-Instruct"),
    chat=True,
    dtype="bfloat16",
    steps=40,
    batch_size=64,
    attempts=8,
    # at temperature 1 half of its answers do not end within 24 tokens
    temperature=0.7,
    concurrency=64,
    max_new_tokens=16,
    max_model_len=256,
    prefix_caching="on",
    row_tokens=1024,
    lr=3e-5,
    eval_every=10,
    eval_attempts=4,
    eval_temperature=0.7,
    save_every=20,
)
# The same model on answers of uneven lengths, of 4 to 120 tokens.
COUNTUP = SMOL | dict(
    task="countup",
    train_data="",
    eval_data="",
    max_new_tokens=140,
    eval_every=8,
    eval_problems=64,
    eval_attempts=2,
)
# A number game of up to 13 turns of up to 5 tokens.
GUESS = TOY | dict(
    task="guess",
    steps=60,
    batch_size=256,
    lr=3e-4,
    max_new_tokens=90,
    prefix_caching="on",
    max_model_len=256,
    row_tokens=1024,
    eval_every=20,
)
# Any client of an OpenAI endpoint, see tasks/agent.py; the model is examples/agents/directory.py's.
AGENT = TOY | dict(
    task="agent",
    model=str(ROOT / "out" / "models" / "agent"),
    steps=60,
    batch_size=128,
    max_new_tokens=80,
    max_model_len=200,
    row_tokens=1024,
    eval_every=20,
)
# The paper's headline run (arXiv 2509.19128, section 5), on 8 GPUs of 80 GB or more.
# max_new_tokens, attempts and overlong_buffer are our choice: the paper does not say them.
MATH = dict(
    task="maths",
    train_data="orz57k",
    eval_data="math500,aime24",
    model="Qwen/Qwen2.5-7B",
    steps=1000,
    batch_size=1024,
    attempts=16,
    # At this number of sequences an engine reads their KV caches (2,000 tokens each) in the time in
    # which it reads the weights: 7.6e9 x 2 bytes / (2,000 x 57 kB). More sequences gain little;
    # with fewer, the time goes into reading the weights for few tokens.
    concurrency=128,
    max_new_tokens=8192,
    overlong_buffer=1024,
    max_model_len=10240,
    row_tokens=16384,
    lr=1e-6,
    max_lag=1000000,
    # the only bound on staleness: two steps' worth of the freshest groups
    on_full="drop_oldest",
    checkpointed_layers=1000,
    prefix_caching="on",
    eval_every=50,
    eval_problems=500,
    save_every=50,
    stop_timeout=300.0,
)
# The same task with adapters, sized so that engine and trainer fit together on one GPU of 80 GB, or
# of 24 GB, with 2.5 GB or more left for what tools/memory.py does not know. kv_cache_gb is set,
# because vLLM would measure the free memory while the trainer takes its share. Engines wait for the
# trainer (on_full): on one GPU, sampling takes time from the trainer, and samples that are dropped
# would waste it.
MATH_1X80 = MATH | dict(lora_rank=32, batch_size=256, max_lag=2, on_full="block")
MATH_1X80 |= dict(concurrency=96, kv_cache_gb=10.0)
MATH_1X24 = MATH_1X80 | dict(model="Qwen/Qwen2.5-1.5B", row_tokens=10240)
MATH_1X24 |= dict(concurrency=32, kv_cache_gb=2.0)
PRESETS = {
    # letters in alphabetical order: a tiny model that is made here; minutes on two cores
    "toy": TOY,
    # sums: SmolLM2-135M-Instruct, a real chat model out of a package on PyPI; minutes on two cores
    "smol": SMOL,
    # counting up to a number, with answers of uneven lengths: SmolLM2; ten minutes on two cores
    "countup": COUNTUP,
    # a number game of several turns: a tiny model that is made here
    "guess": GUESS,
    # agents that use a tool through an OpenAI endpoint: a tiny model that is made here
    "agent": AGENT,
    # mathematics, the paper's headline run: Qwen2.5-7B, all weights, 8 GPUs of 80 GB
    "math": MATH,
    # the same with adapters on one GPU of 80 GB
    "math-1x80": MATH_1X80,
    # Qwen2.5-1.5B with adapters on one GPU of 24 GB
    "math-1x24": MATH_1X24,
}
# first arguments of `bash run.sh` that are no presets
COMMANDS = ("serve", "status", "doctor", "setup", "help")


def task_weights(task: str) -> dict[str, float]:
    """Tasks of a run and their shares: "toy" -> {"toy": 1.0}; "maths:3,toy:1" -> {"maths": 0.75,
    "toy": 0.25}.
    """
    weights = {}
    parts = [part.partition(":") for part in task.split(",")]
    with contextlib.suppress(ValueError):
        weights = {name.strip(): float(share or 1) for name, _, share in parts}
    require(
        len(weights) == len(parts) and all(0 < x < 1e30 for x in weights.values()),
        f"--task {task}: write a task, or several different ones with shares above 0, as "
        "maths:0.7,toy:0.3",
    )
    total = sum(weights.values())
    return {name: share / total for name, share in weights.items()}


def load_task(name):
    """The module tasks/<name>.py; ConfigError, one line, if it cannot be imported or is no task."""
    try:
        task = importlib.import_module(f"tasks.{name}")
    # A file may raise anything in its first lines.
    except Exception as e:
        here = sorted(p.stem for p in (ROOT / "tasks").glob("[!_]*.py"))
        guess = difflib.get_close_matches(name, here, 1, 0.7) if name not in here else []
        raise ConfigError(
            f"tasks/{name}.py: {type(e).__name__}: {e}; "
            f"{f'did you mean {guess[0]}? ' if guess else ''}tasks here: {', '.join(here)}"
        ) from None
    is_task = hasattr(task, "problems") and (hasattr(task, "reward") or hasattr(task, "episode"))
    require(
        is_task,
        f"tasks/{name}.py: has no function problems, or neither reward nor episode: "
        "tasks/__init__.py says what a task is",
    )
    return task


def parse(argv: list[str], default: Config | None = None, about: str = "") -> Config:
    """`[preset] --knob value ...` -> Config.

    The flags change the values of the preset or, if it is given, of the Config `default`. about:
    the text with which --help begins. Raises ConfigError, one line, for anything that does not
    parse. `--help [WORD ...]` prints and exits.
    """
    has_name = bool(argv) and not argv[0].startswith("-")
    name = argv[0] if has_name else "toy"
    guess = difflib.get_close_matches(name, [*PRESETS, *COMMANDS], 1, 0.65)
    require(
        name in PRESETS,
        f"unknown preset '{name}': {f'did you mean {guess[0]}? ' if guess else ''}choose from "
        f"{', '.join(PRESETS)}; or one of the commands {', '.join(COMMANDS)}",
    )
    default = default or Config(run=name, **PRESETS[name])
    asks = [position for position, word in enumerate(argv) if word in ("--help", "-h")]
    if asks:
        show_help(argv[asks[0] + 1 :], default, about)
        sys.exit(0)
    for word in argv:
        require(
            word.partition("=")[0].replace("-", "_") not in DISTRIBUTION_OPTIONS,
            f"{word}: sampling from a part of the distribution is not supported: importance "
            "weights would lack the mass that is left out",
        )
    try:
        c = replace(default, **knobs.read(argv[has_name:], knobs.knobs_of(Config)))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    # It is the name of a directory in --out, and must not lead out of there.
    require(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", c.run),
        f"--run {c.run[:120]!r}: a name has up to 100 letters, digits, '.', '-' and '_', the first "
        "one a letter or digit",
    )
    # Paths are relative to the caller's directory; the stages run in that of the repository.
    c.out = os.path.abspath(os.path.expanduser(c.out))
    c.model, c.teacher = (
        os.path.abspath(x) if os.path.isdir(x) else x for x in (c.model, c.teacher)
    )
    c.train_data, c.eval_data = map(_absolute, (c.train_data, c.eval_data))
    return c


def _absolute(names):
    """Make the paths absolute in a text of names with commas between them; other names stay."""
    absolute = []
    for name in names.split(","):
        name = name.strip()
        path, at, part = name, "", ""
        if not os.path.exists(name) and "@" in name:
            path, at, part = name.rpartition("@")
        path = os.path.expanduser(path)
        absolute.append(os.path.abspath(path) + at + part if os.path.exists(path) else name)
    return ",".join(absolute)


def show_help(search_words, default, about):
    """Print what the program is, the presets, and all knobs with their default values; or, with
    search words, the knobs that have all of them. Raises ConfigError if none has.
    """
    # `| head` ends the program without a complaint.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    every = knobs.knobs_of(Config)
    matching = knobs.search(search_words, every)
    nearest = ", ".join(knobs.nearest("_".join(search_words), every, cutoff=0.0))
    require(
        matching,
        f"--help {' '.join(search_words)}: no knob has that in its name or description; the "
        f"nearest names: {nearest}",
    )
    if not search_words:
        print(about or __doc__.splitlines()[0])
        print("\nPresets, the first word of a command line; toy is the default:")
        source = Path(__file__).read_text().partition("\nPRESETS = {")[2].partition("}")[0]
        for name, (_, text) in knobs.comments(source).items():
            print(f"  {name:<10} {text}")
        print("\nKnobs, with their values in this preset; --help WORD ... searches them:\n")
    print(knobs.describe(matching, default))


def require(ok, message):
    """Raise ConfigError unless ok."""
    if not ok:
        raise ConfigError(message)


def check(c: Config) -> Config:
    """What can be checked without looking at hardware or files; fills in the loss's own clip range.

    Raises ConfigError naming the knob and what to do.
    """
    for name, hint in get_type_hints(Config, include_extras=True).items():
        value = getattr(c, name)
        least, most = getattr(hint, "__metadata__", [Bounds()])[0]
        for x in value if isinstance(value, tuple) else [value]:
            require(
                isinstance(x, str) or least <= x <= most,
                f"--{name} {x}: must be from {least:g} to {most:g}",
            )
    require(
        c.loss in LOSSES,
        f"--loss {c.loss}: add its row to LOSSES in config.py: the level of its importance "
        "weights, token or sequence, and their lowest and highest value",
    )
    ratio, low, high = LOSSES[c.loss]
    c.ratio = c.ratio or ratio
    c.normalizer = c.normalizer or ("sequence" if c.ratio == "sequence" else "samples")
    c.clip_low = low if c.clip_low < 0 else c.clip_low
    c.clip_high = high if c.clip_high < 0 else c.clip_high
    relations = {
        "--attempts must be 2 or more for this --advantage, which compares attempts": (
            c.attempts > 1 or c.advantage == "none" or c.teacher
        ),
        "--batch_size must be a multiple of --attempts": c.batch_size % c.attempts == 0,
        "--max_new_tokens must be below --max_model_len": c.max_new_tokens < c.max_model_len,
        "--row_tokens must hold a sample of --max_model_len": c.max_model_len <= c.row_tokens,
        "--overlong_buffer must not exceed --max_new_tokens": c.overlong_buffer <= c.max_new_tokens,
        "--clip_low must be below --clip_high": c.loss == "dppo" or c.clip_low < c.clip_high,
        "--loss dppo bounds a difference of probabilities: --clip_high must be below 1": (
            c.loss != "dppo" or c.clip_high < 1
        ),
        "--teacher needs --temperature 1": not c.teacher or c.temperature == 1,
        "--teacher needs --no_signal keep": not c.teacher or c.no_signal == "keep",
        "--loss reinforce and dppo have no lower bound of weights: leave out --clip_low": (
            c.loss not in ("reinforce", "dppo") or c.clip_low == 0
        ),
        "--ratio product needs a --loss that does not differentiate its weights (reinforce, "
        "cispo, icepop): the terms of a sequence would add up to its length times the gradient": (
            c.ratio != "product" or c.loss in ("reinforce", "cispo", "icepop")
        ),
        "--loss dppo compares the probabilities of tokens: it needs --ratio token": (
            c.loss != "dppo" or c.ratio == "token"
        ),
        "--advantage max_rl divides by the mean reward, so no reward may be negative: it needs "
        "--overlong_buffer 0 and numbers of at least 0 in --reward_finished and --reward_cut_off": (
            c.advantage != "max_rl"
            or (not c.overlong_buffer and min(c.reward_finished + c.reward_cut_off) >= 0)
        ),
        "--late wait and hold need --on_full block": (
            c.late not in ("wait", "hold") or c.on_full == "block"
        ),
        "--late hold is the pipeline's: it needs --conventional_g 0": (
            c.late != "hold" or not c.conventional_g
        ),
        "--replay_routing needs --prefix_caching on": (
            not c.replay_routing or c.prefix_caching == "on"
        ),
    }
    for relation, holds in relations.items():
        names = re.findall(r"--(\w+)", relation)
        values = ", ".join(f"{name} {getattr(c, name)}" for name in names)
        require(holds, f"{relation}; now {values}")
    return c


def from_json(values: dict) -> Config:
    """The Config of these values, which were read from JSON, where tuples are lists."""
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def load(run_dir: str) -> Config:
    """The Config that out/<run>/config.json holds; ConfigError if it is torn, or of another
    version.
    """
    path = Path(run_dir, "config.json")
    try:
        return from_json(json.loads(path.read_text())["config"])
    except (ValueError, TypeError, KeyError) as e:
        raise ConfigError(
            f"{path} cannot be read ({e}): --fresh True moves the run aside and begins anew"
        ) from e

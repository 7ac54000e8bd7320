"""Every knob, in one dataclass; the presets; and the checks that need no hardware.

`bash run.sh toy --steps 50 --dry_run True` checks a configuration and prints what would be started.
Nothing here imports torch: a wrong flag must be reported at once. Deliberately absent: config files,
nesting, interpolation. A preset is a dict below, a new knob is one line in `Config`, and every
process reads the one `out/<run>/config.json`.
"""

import contextlib
import difflib
import io
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

ROOT = Path(__file__).resolve().parent


class ConfigError(Exception):
    """A knob that cannot be used; the message is one line that says which and what to do."""


@dataclass
class Config:
    # ---- run
    run: str = ""  # name of the run directory under `out`
    out: str = "out"  # where run directories live; shared by all nodes
    dry_run: bool = False  # print the placement and every process's exact command, and stop
    fresh: bool = (
        False  # start over: an existing run directory of this name is moved aside, never deleted
    )
    run_id: str = ""  # filled in: tells this run's records from another's; a continued run keeps it
    seed: int = 0  # seeds the problem order, the sampling, the shuffling and the tiny base model
    wandb: Literal["off", "offline", "online"] = "off"  # log the same metrics to Weights & Biases
    # ---- task and model
    task: str = "toy"  # file under tasks/, or a mixture: maths:0.7,countdown:0.3
    train_data: str = ""  # problems to train on, for tasks that read them: data sets or .jsonl / .parquet files, commas between
    eval_data: str = ""  # held-out problems, likewise
    model: str = (
        ""  # HF model directory or hub name; empty: the tiny base model the task's teacher makes
    )
    chat: bool = (
        False  # prompts go through the model's chat template; False: raw text, for base models
    )
    system_prompt: str = ""  # of the chat template; of a raw prompt, its beginning
    thinking: Literal["auto", "on", "off"] = (
        "auto"  # enable_thinking of chat templates that know it
    )
    dtype: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # compute dtype of engine and trainer; auto: float32 on CPU, bfloat16 on GPU
    )
    head_float32: bool = False  # output head in float32 on both sides when dtype is bfloat16: less mismatch, slower head
    # ---- batch
    steps: int = 200  # optimizer steps of the whole run
    batch_size: int = (
        256  # B: samples per optimizer step, if no attempt fails; a multiple of `attempts`
    )
    attempts: int = 16  # rollouts per problem: the group that advantages are computed over
    max_lag: int = 4  # the gate: groups are started at most this many steps ahead of the trainer; 0: synchronous. Bounds starts, not ages: a long sequence may be older when it is trained (see `late`)
    conventional_g: int = (
        0  # 0: pipeline; G > 0: conventional RL, G optimizer steps per generation phase (ablation)
    )
    on_full: Literal["block", "drop_oldest"] = (
        "block"  # trainer slower than actors: stall them, or keep only the freshest groups, two steps' worth
    )
    late: Literal["keep", "mask", "wait"] = (
        "keep"  # tokens older than max_lag: train them (the paper), mask them, or never have any: groups in the order they were started
    )
    no_signal: Literal["keep", "drop"] = (
        "keep"  # groups in which every advantage is 0: train them, or drop and count them
    )
    # ---- generation
    engines: int = 0  # vLLM servers; 0: half of the GPUs / tensor_parallel; without GPUs one on every node that does not train
    tensor_parallel: int = 1  # GPUs per engine
    concurrency: int = 64  # sequences in progress per engine
    temperature: float = 1.0  # of sampling, and of the trainer's logprobs
    max_new_tokens: int = 1024  # longest completion, tokens; longer ones are cut off
    max_model_len: int = 2048  # longest prompt + completion the engine accepts, tokens
    kv_cache_gb: float = (
        0.0  # KV cache per engine, GB; 0: vLLM decides (GPU); the CPU build needs a number
    )
    gpu_memory_utilization: float = 0.0  # share of a GPU's memory the engine takes; 0: 0.7, or 0.3 on a GPU shared with the trainer
    enforce_eager: bool = False  # vLLM without CUDA graphs
    restarts: int = 3  # an engine that died or hangs is started again this often, with back-off
    request_timeout: float = 600.0  # longest wait for one completion, s
    # ---- rewards
    reward_finished: tuple[float, float, float, float] = (
        1.0,
        0.0,
        0.0,
        0.0,
    )  # reward table, for tasks that return outcomes: correct, wrong, no_answer, unparsable
    reward_cut_off: tuple[float, float, float, float] = (
        1.0,
        0.0,
        0.0,
        0.0,
    )  # likewise, of completions cut off at max_new_tokens
    reward_timeout: float = 1.0  # a reward function may take so long for one answer, CPU seconds
    overlong_buffer: int = 0  # soft over-length penalty: the reward falls by up to 1 over the last so many tokens before max_new_tokens; 0: none
    overlong_mask: bool = False  # leave samples that were cut off at max_new_tokens out of the loss (they still count as samples)
    # ---- loss
    advantage: Literal["loo", "mean", "mean_std", "none"] = (
        "loo"  # baseline within a group, see preprocess.advantages
    )
    loss: Literal["reinforce", "ppo", "cispo", "gspo", "icepop"] = (
        "reinforce"  # see train.policy_loss
    )
    clip_low: float = (
        -1.0
    )  # lower bound of the importance weight; negative: the loss's own (config.CLIP)
    clip_high: float = -1.0  # upper bound of it, likewise: c of reinforce, 1 + epsilon of ppo
    normalizer: Literal["samples", "tokens", "sequence"] = (
        "samples"  # sum over tokens / samples of the step (the paper), / its tokens, or each sequence's mean / samples
    )
    kl_coef: float = (
        0.0  # weight of KL(policy || frozen base model); above 0 preprocess also runs that model
    )
    entropy_coef: float = 0.0  # bonus on the entropy of each sampled token's distribution
    # ---- optimizer
    lr: float = 1e-6  # peak learning rate (AdamW)
    warmup_steps: int = 0  # linear warm-up of the learning rate, steps
    lr_schedule: Literal["constant", "linear"] = (
        "constant"  # after warm-up; linear falls to 10% at the last step
    )
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 1.0  # gradient clipping
    row_tokens: int = 4096  # tokens per packed micro-batch row
    trainers: int = 0  # trainer ranks (FSDP2 when more than one); 0: the other half of the GPUs, or 1 without GPUs
    gradient_checkpointing: bool = (
        False  # recompute activations in the backward pass: less memory, ~30% slower
    )
    # ---- weight updates
    recompute_kv: bool = False  # False: requests in progress keep their stale KV cache (the paper); True: recompute it
    weight_backend: Literal["auto", "nccl", "gloo"] = (
        "auto"  # auto: nccl between GPUs; gloo on CPU, and on one shared GPU, where NCCL refuses two ranks
    )
    bucket_mb: int = 256  # size of one broadcast, MB
    verify_weights: int = (
        10  # every so many updates checksums are sent along and compared by every engine; 0: never
    )
    sync_timeout: float = 60.0  # deadline of each call and broadcast of a weight update, s
    # ---- evaluation, checkpoints, logs
    eval_every: int = 50  # evaluate on held-out problems every so many versions (always before training and at the end); 0: only those two
    eval_problems: int = 256  # held-out problems per evaluation, of each set
    eval_attempts: int = 1  # attempts at each of them
    eval_temperature: float = 1.0  # 1: the policy that is trained; 0: greedy
    save_every: int = 100  # checkpoint every so many steps (always at the end); 0: only at the end
    keep_last: int = 2  # checkpoints kept; 0: all
    samples_logged: int = 2  # decoded rollouts per step in samples.jsonl
    # ---- machine
    host: str = "127.0.0.1"  # address engines and the weight group bind to on one node; with several each node has its own
    port: int = 8500  # engine i listens on port + i
    nodes: tuple[str, ...] = ()  # filled in: address of every node
    start_timeout: float = 900.0  # deadline for engines and models to come up, s
    stall_timeout: float = 1800.0  # longest wait of any stage for another, s
    engine_threads: int = (
        0  # CPU threads per engine, without GPUs; 0: half of the cores, shared out
    )
    trainer_threads: int = (
        0  # CPU threads per trainer rank; 0: the cores the engines leave, shared out
    )

    @property
    def groups_per_step(self) -> int:
        """Groups, all attempts at one problem, that a step trains."""
        return self.batch_size // self.attempts


# Bounds [clip_low, clip_high] of the importance weight, by loss; train.policy_loss says what each does with them.
CLIP = {
    "reinforce": (0.0, 5.0),
    "ppo": (0.8, 1.2),
    "cispo": (0.0, 5.0),
    "gspo": (1 - 3e-4, 1 + 4e-4),
    "icepop": (0.5, 5.0),
}
OUTCOMES = ("correct", "wrong", "no_answer", "unparsable")  # columns of the reward table

# Tuned on 2 cores: sequences live longer than a step, so that most updates land in the middle of some.
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
    max_lag=4,
    start_timeout=300.0,
    stall_timeout=300.0,
    request_timeout=120.0,
)
COUNTDOWN = TOY | dict(task="countdown", steps=200, eval_every=50)
# up to 13 turns of up to 5 tokens
GUESS = TOY | dict(
    task="guess",
    steps=60,
    batch_size=256,
    lr=3e-4,
    max_new_tokens=90,
    max_model_len=256,
    row_tokens=1024,
    eval_every=20,
)
# The paper's headline run (arXiv 2509.19128, section 5).
MATH = dict(
    task="maths",
    train_data="orz57k",
    eval_data="math500,aime24",
    model="Qwen/Qwen2.5-7B",
    steps=1000,
    batch_size=1024,
    attempts=16,
    concurrency=64,
    max_new_tokens=8192,
    max_model_len=10240,
    row_tokens=16384,
    lr=1e-6,
    max_lag=1000000,
    gradient_checkpointing=True,
    eval_every=50,
    eval_problems=500,
    save_every=50,
)
PRESETS = {"toy": TOY, "countdown": COUNTDOWN, "guess": GUESS, "math": MATH}


def task_weights(task: str) -> dict[str, float]:
    """Tasks of a run and their shares: "toy" -> {"toy": 1.0}; "maths:3,countdown:1" -> {"maths": 0.75, "countdown": 0.25}."""
    weights = {}
    parts = [part.partition(":") for part in task.split(",")]
    with contextlib.suppress(ValueError):
        weights = {name.strip(): float(share or 1) for name, _, share in parts}
    if len(weights) < len(parts) or min(weights.values()) <= 0:
        raise ConfigError(
            f"--task {task}: write a task, or several different ones with their shares, all above 0: maths:0.7,countdown:0.3"
        )
    total = sum(weights.values())
    return {name: share / total for name, share in weights.items()}


def parse(argv: list[str], gpus: int, default: Config | None = None) -> Config:
    """`[preset] --knob value ...` -> Config; default: where flags start from instead of a preset.

    Raises ConfigError with one line for anything that does not parse.
    """
    import tyro

    argv = list(argv)
    name = "math" if gpus else "toy"
    if argv and not argv[0].startswith("-"):
        name = argv.pop(0)
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}': choose from {', '.join(PRESETS)}")
    _refuse_unknown_flags(argv)
    captured = io.StringIO()
    wants_help = "--help" in argv or "-h" in argv
    try:
        with contextlib.ExitStack() as stack:
            if not wants_help:
                stack.enter_context(contextlib.redirect_stderr(captured))
                stack.enter_context(contextlib.redirect_stdout(captured))
            return tyro.cli(
                Annotated[Config, tyro.conf.FlagConversionOff],
                default=default or Config(run=name, **PRESETS[name]),
                args=argv,
                prog=f"bash run.sh [{'|'.join(PRESETS)}]",
                use_underscores=True,
                description=f"Preset '{name}'. Every knob, with this preset's default:",
            )
    except SystemExit as exit:
        if exit.code == 0:
            raise
        raise ConfigError(_one_line(captured.getvalue())) from None


def _refuse_unknown_flags(argv):
    """tyro's own message is a box of several lines; ours also says what was meant."""
    known = [f.name for f in fields(Config)]
    for arg in argv:
        flag = arg.split("=")[0].removeprefix("--").replace("-", "_")
        if not arg.startswith("--") or flag in known or flag == "help":
            continue
        near = difflib.get_close_matches(flag, known, n=1)
        hint = f": did you mean --{near[0]}?" if near else "; `bash run.sh --help` lists all"
        raise ConfigError(f"unknown flag {arg.split('=')[0]}{hint}")


def _one_line(box: str) -> str:
    """What tyro says in a box, as a line."""
    words = " ".join(re.sub(r"[^\x20-\x7e]|\x1b\[[0-9;]*m|-{3,}", " ", box).split())
    words = re.split(r" Argument helptext| For full helptext", words)[0]
    return words.removeprefix("Value error ").removeprefix("Parsing error ")


def need(ok, message):
    """Raise ConfigError unless ok."""
    if not ok:
        raise ConfigError(message)


AT_LEAST_1 = "steps batch_size attempts concurrency row_tokens max_new_tokens tensor_parallel bucket_mb eval_attempts".split()
NOT_NEGATIVE = (
    "max_lag conventional_g engines trainers eval_every eval_problems save_every keep_last verify_weights restarts "
    "engine_threads trainer_threads overlong_buffer samples_logged"
).split()


def check(c: Config) -> Config:
    """What can be checked without looking at hardware or files; fills in the loss's own clip range.

    Raises ConfigError naming the knob and what to do.
    """
    need(
        re.fullmatch(r"\w[\w.-]*", c.run),
        f"--run {c.run!r}: letters, digits, '.', '-' and '_' only, and no '.' or '-' first",
    )
    for name in AT_LEAST_1:
        need(getattr(c, name) >= 1, f"--{name} {getattr(c, name)}: must be at least 1")
    for name in NOT_NEGATIVE:
        need(getattr(c, name) >= 0, f"--{name} {getattr(c, name)}: must not be negative")
    for name in ("reward_timeout", "temperature"):
        need(getattr(c, name) > 0, f"--{name} {getattr(c, name)}: must be above 0")
    need(
        c.attempts >= 2 or c.advantage == "none",
        f"--attempts {c.attempts}: the '{c.advantage}' baseline needs at least 2 attempts per problem",
    )
    need(
        c.batch_size % c.attempts == 0,
        f"--batch_size {c.batch_size} is not a multiple of --attempts {c.attempts}: a step trains whole groups",
    )
    need(
        c.max_new_tokens < c.max_model_len,
        f"--max_new_tokens {c.max_new_tokens} leaves no room for a prompt in --max_model_len {c.max_model_len}",
    )
    low, high = CLIP[c.loss]
    c.clip_low = low if c.clip_low < 0 else c.clip_low
    c.clip_high = high if c.clip_high < 0 else c.clip_high
    need(
        c.clip_low < c.clip_high,
        f"--clip_low {c.clip_low} is not below --clip_high {c.clip_high}: no weight would be left",
    )
    here = sorted(p.stem for p in (ROOT / "tasks").glob("[!_]*.py"))
    for task in task_weights(c.task):
        near = difflib.get_close_matches(task, here, n=1)
        meant = f", did you mean {near[0]}?" if near else ""
        need(
            task in here,
            f"--task {task}: there is no tasks/{task}.py{meant} Tasks here: {', '.join(here)}",
        )
    return c


def load(run_dir: str) -> Config:
    """The Config that out/<run>/config.json holds."""
    values = json.loads(Path(run_dir, "config.json").read_text())["config"]
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

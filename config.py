"""Every knob, in one dataclass; the presets; what follows from them and from the hardware; and the checks.

`bash run.sh toy --steps 50 --dry_run True` checks a configuration and prints what would be started. Nothing here imports
torch: a wrong flag must be reported at once. Deliberately absent: config files, nesting, interpolation. A preset is a
dict below, a new knob is one line in `Config`, and every process reads the one `out/<run>/config.json`.
"""
import contextlib
import difflib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

ROOT = Path(__file__).resolve().parent


@dataclass
class Config:
    # ---- run
    run: str = ""  # name of the run directory under `out`
    out: str = "out"  # where run directories live; shared by all nodes
    dry_run: bool = False  # print the placement and every process's exact command, and stop
    fresh: bool = False  # start over: an existing run directory of this name is moved aside, never deleted
    run_id: str = ""  # filled in: tells this run's records and messages from another's; a continued run keeps it
    seed: int = 0  # seeds the problem order, the sampling, the shuffling and the toy base model
    wandb: Literal["off", "offline", "online"] = "off"  # log the same metrics to Weights & Biases; offline needs no account
    # ---- task and model
    task: str = "toy"  # file under tasks/, or a mixture: maths:0.7,countdown:0.3
    train_data: str = ""  # problems to train on, for tasks that read them: names of data sets or .jsonl / .parquet files, commas between them
    eval_data: str = ""  # held-out problems, likewise
    model: str = ""  # HF model directory or hub name; empty: the tiny base model the task's teacher makes
    chat: bool = False  # prompts go through the model's chat template; False: raw text, for base models
    system_prompt: str = ""  # of the chat template; of a raw prompt, its beginning
    thinking: Literal["auto", "on", "off"] = "auto"  # enable_thinking of chat templates that know it; auto: the template's own default
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # compute dtype of engine and trainer; auto: float32 on CPU, bfloat16 on GPU
    head_float32: bool = False  # output head in float32 on both sides (vLLM's head_dtype) when dtype is bfloat16: less mismatch, slower head
    # ---- batch
    steps: int = 200  # optimizer steps of the whole run
    batch_size: int = 256  # B: samples per optimizer step; a multiple of `attempts`
    attempts: int = 16  # rollouts per problem, the group that advantages are computed over
    max_lag: int = 4  # the gate: samples may be started up to this many steps ahead of the trainer; 0: synchronous
    conventional_g: int = 0  # 0: pipeline; G > 0: conventional RL, G optimizer steps per generation phase (ablation)
    on_full: Literal["block", "drop_oldest"] = "block"  # trainer slower than actors: stall them, or keep only the freshest samples
    ring: int = 0  # samples preprocess may hold ready before `on_full` applies; 0: two steps' worth
    # ---- generation
    actors: int = 1  # actor processes, each with its share of the problems; one keeps up with all engines as a rule (bench/actor.py)
    engines: int = 0  # vLLM servers; 0: half of the GPUs / tensor_parallel; without GPUs one on every node that does not train
    tensor_parallel: int = 1  # GPUs per engine
    concurrency: int = 64  # sequences in progress per engine
    temperature: float = 1.0  # of sampling, and of the trainer's logprobs
    max_new_tokens: int = 1024  # longest completion, tokens; longer ones are cut off
    max_model_len: int = 2048  # longest prompt + completion the engine accepts, tokens
    kv_cache_gb: float = 0.0  # KV cache per engine, GB; 0: vLLM decides (GPU); the CPU build needs a number
    gpu_memory_utilization: float = 0.0  # share of a GPU's memory the engine takes; 0: 0.7 (an update needs room for a second copy of the weights), 0.3 on a GPU shared with the trainer
    enforce_eager: bool = False  # vLLM without CUDA graphs
    restarts: int = 3  # an engine that died is started again this often, with back-off, before the run is given up
    retries: int = 3  # a failed request is tried again this often, with back-off, before the attempt is given up
    request_timeout: float = 600.0  # longest wait for one completion, s
    # ---- data
    row_tokens: int = 4096  # tokens per packed micro-batch row
    advantage: Literal["loo", "mean", "mean_std", "none"] = "loo"  # baseline within a group, see preprocess.advantages
    no_signal: Literal["keep", "drop"] = "keep"  # groups in which every advantage is 0: train them (they count as samples), or drop and count them
    # ---- rewards
    reward_correct: tuple[float, float] = (1.0, 1.0)  # reward table, for tasks that return outcomes: of a completion that ended by itself, of one that was cut off
    reward_wrong: tuple[float, float] = (0.0, 0.0)  # likewise
    reward_no_answer: tuple[float, float] = (0.0, 0.0)  # likewise
    reward_unparsable: tuple[float, float] = (0.0, 0.0)  # likewise; also for answers that exceed reward_timeout, whatever the task
    reward_timeout: float = 1.0  # a reward function may take so long for one answer, CPU seconds
    reward_workers: int = 0  # processes that compute rewards; 0: as many as CPU cores, at least 2 and at most 16
    # ---- loss and optimizer
    loss: Literal["reinforce", "ppo", "gspo", "icepop"] = "reinforce"  # see train.policy_loss
    clamp: float = 5.0  # reinforce: c of the truncated importance weight min(w, c)
    ppo_low: float = 0.2  # ppo: the ratio is clipped to [1 - ppo_low, 1 + ppo_high]
    ppo_high: float = 0.2  # ppo: see ppo_low
    gspo_low: float = 3e-4  # gspo: the sequence's ratio is clipped to [1 - gspo_low, 1 + gspo_high]
    gspo_high: float = 4e-4  # gspo: see gspo_low
    icepop_low: float = 0.5  # icepop: tokens with a ratio outside [icepop_low, icepop_high] are left out
    icepop_high: float = 5.0  # icepop: see icepop_low
    kl_coef: float = 0.0  # weight of KL(policy || frozen base model); above 0 preprocess also runs that model
    dpo_coef: float = 0.0  # weight of a DPO term on the (best, worst) pair of each group, of whatever lag its tokens are; see train.dpo_loss
    dpo_beta: float = 0.1  # beta of it
    dpo_base: Literal["behavior", "reference"] = "behavior"  # against whose logprobs: the engine's when it sampled, or the frozen base model's
    entropy_coef: float = 0.0  # bonus on the entropy of each sampled token's distribution
    normalizer: Literal["samples", "tokens", "sequence"] = "samples"  # sum over tokens / samples of the step (the paper), / its tokens, or each sequence's mean / samples
    overlong_buffer: int = 0  # soft over-length penalty: the reward falls by up to 1 over the last so many tokens before max_new_tokens; 0: none
    overlong_mask: bool = False  # leave samples that were cut off at max_new_tokens out of the loss (they still count as samples)
    late: Literal["keep", "mask", "wait"] = "keep"  # tokens older than max_lag: train them all the same (the paper), leave them out of the loss, or never have any: take groups in the order they were started
    lags: tuple[int, int] = (0, 1000000)  # tokens of a lag outside are left out of the policy loss, and counted as late: for studies
    lr: float = 1e-6  # peak learning rate (AdamW)
    warmup_steps: int = 0  # linear warm-up of the learning rate, steps
    lr_schedule: Literal["constant", "linear"] = "constant"  # after warm-up; linear falls to 10% at the last step
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    weight_decay: float = 0.0  # AdamW
    max_grad_norm: float = 1.0  # gradient clipping
    trainers: int = 0  # trainer ranks (FSDP2 when more than one); 0: the other half of the GPUs, or 1 without GPUs
    trainer_nodes: int = 0  # nodes that they are on, equally many on each, the first ones; 0: as few as hold them
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, ~30% slower
    # ---- weight updates
    recompute_kv: bool = False  # False: requests in progress keep their stale KV cache (the paper); True: recompute it
    weight_backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl between GPUs; gloo on CPU, and on one shared GPU, where NCCL refuses two ranks
    bucket_mb: int = 256  # size of one broadcast, MB
    background_receive: bool = True  # engines receive while they decode, into a second copy of the weights; False: while paused, without one
    verify_weights: int = 10  # every so many updates checksums are sent along and compared by every engine; 0: never
    sync_timeout: float = 60.0  # deadline of each call and broadcast of a weight update, s
    # ---- evaluation, checkpoints, logs
    eval_every: int = 50  # evaluate on held-out problems every so many versions (always before training and at the end); 0: only those two
    eval_problems: int = 256  # held-out problems per evaluation, of each set
    eval_attempts: int = 1  # attempts at each of them
    eval_temperature: float = 1.0  # 1: the policy that is trained; 0: greedy
    save_every: int = 100  # checkpoint every so many steps (always at the end)
    keep_last: int = 2  # checkpoints kept
    keep_every: int = 0  # of the older ones, those of every so many steps are kept too; 0: none
    samples_logged: int = 2  # decoded rollouts per step in samples.jsonl
    # ---- machine
    host: str = "127.0.0.1"  # address engines and the weight group bind to on one node; with several each node has its own
    port: int = 8500  # engine i listens on port + i
    nodes: tuple[str, ...] = ()  # filled in: address of every node
    urls: tuple[str, ...] = ()  # filled in: where every engine listens
    start_timeout: float = 900.0  # deadline for engines and models to come up, s
    stall_timeout: float = 1800.0  # longest wait of any stage for another, s
    engine_threads: int = 0  # CPU threads per engine, without GPUs; 0: half of the cores, shared out
    trainer_threads: int = 0  # CPU threads per trainer rank; 0: the cores the engines leave, shared out

    @property
    def needs_reference(self):
        """Is the frozen base model asked for the logprobs of what was sampled?"""
        return bool(self.kl_coef or self.dpo_coef and self.dpo_base == "reference")


# Tuned on 2 cores: sequences live longer than a step, so that most updates land in the middle of some.
TOY = dict(task="toy", steps=270, batch_size=448, attempts=16, concurrency=256, max_new_tokens=40, max_model_len=128,
           kv_cache_gb=1.0, enforce_eager=True, row_tokens=512, lr=6e-4, warmup_steps=5, lr_schedule="linear", beta2=0.95,
           eval_every=54, save_every=90, max_lag=4, start_timeout=300.0, stall_timeout=300.0, request_timeout=120.0)
# The paper's headline run (arXiv 2509.19128, section 5).
MATH = dict(task="maths", train_data="orz57k", eval_data="math500,aime24", model="Qwen/Qwen2.5-7B", steps=1000, batch_size=1024, attempts=16, concurrency=64,
            max_new_tokens=8192, max_model_len=10240, row_tokens=16384, lr=1e-6, clamp=5.0, max_lag=1000000,
            gradient_checkpointing=True, eval_every=50, eval_problems=500, save_every=50)
COUNTDOWN = TOY | dict(task="countdown", steps=200, eval_every=50)
GUESS = TOY | dict(task="guess", steps=60, batch_size=256, lr=3e-4, max_new_tokens=90, max_model_len=256, row_tokens=1024, eval_every=20)  # up to 13 turns of up to 5 tokens
PRESETS = {"toy": TOY, "countdown": COUNTDOWN, "guess": GUESS, "math": MATH}


class ConfigError(Exception):
    """A knob that cannot be used; the message is one line that says which and what to do."""


def gpu_count() -> int:
    """GPUs this process may use: CUDA_VISIBLE_DEVICES if set, else what the NVIDIA driver lists; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return len(re.findall(r"^GPU \d+", listing.stdout, re.M)) if listing.returncode == 0 else 0


def task_weights(task: str) -> dict[str, float]:
    """Tasks of a run and their shares: "toy" -> {"toy": 1.0}; "maths:3,countdown:1" -> {"maths": 0.75, "countdown": 0.25}."""
    parts = [part.partition(":") for part in task.split(",")]
    try:
        weights = {name.strip(): float(share or 1) for name, _, share in parts}
    except ValueError:
        weights = {}
    if len(weights) < len(parts) or min(weights.values()) <= 0:
        raise ConfigError(f"--task {task}: write a task, or several different ones with their shares, all above 0: maths:0.7,countdown:0.3")
    return {name: share / sum(weights.values()) for name, share in weights.items()}


def load_problems(c: Config, split: str) -> dict[str, list[dict]]:
    """Problems of every task of the run; split: "train" or "test". Raises ConfigError that names file and line."""
    found, names = {}, c.train_data if split == "train" else c.eval_data
    for task in task_weights(c.task):
        module = importlib.import_module(f"tasks.{task}")
        takes_data = len(inspect.signature(module.problems).parameters) > 2
        try:
            found[task] = list(module.problems(split, c.seed, names) if takes_data else module.problems(split, c.seed))
        except ValueError as e:
            raise ConfigError(f"task {task}: {e}") from None
        if not found[task]:
            raise ConfigError(f"task {task} has no {split} problems")
        for n, p in enumerate(found[task], 1):
            if not isinstance(p, dict) or not isinstance(p.get("prompt"), str) or not p["prompt"]:
                raise ConfigError(f"task {task}, {split} problem {n}: must be a dict with a text under \"prompt\", is {str(p)[:100]}")
            with contextlib.suppress(TypeError, ValueError):
                if json.loads(json.dumps(p)) == p:
                    continue
            raise ConfigError(f"task {task}, {split} problem {n}: must survive JSON, which has no tuples, sets or keys that are not texts, is {str(p)[:100]}")
        sources = {p.get("source", task) for p in found[task]}
        for other in [t for t in found if t != task]:
            if same := sources & {p.get("source", other) for p in found[other]}:
                raise ConfigError(f"tasks {other} and {task} both have problems of a set called {same.pop()}: give one of the files another name")
    return found


def parse(argv: list[str], gpus: int, default: Config | None = None) -> Config:
    """`[preset] --knob value ...` -> Config; default: where flags start from instead of a preset. Raises ConfigError with one line for anything that does not parse."""
    import tyro
    argv = list(argv)
    name = argv.pop(0) if argv and not argv[0].startswith("-") else ("math" if gpus else "toy")
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}': choose from {', '.join(PRESETS)}")
    known = [f.name for f in fields(Config)]
    for arg in argv:  # tyro's own message is a box of several lines
        flag = arg.split("=")[0].removeprefix("--").replace("-", "_")
        if arg.startswith("--") and flag not in known + ["help"]:
            near = difflib.get_close_matches(flag, known, n=1)
            raise ConfigError(f"unknown flag {arg.split('=')[0]}" + (f": did you mean --{near[0]}?" if near else "; `bash run.sh --help` lists all"))
    captured = io.StringIO()
    try:
        with contextlib.nullcontext() if "--help" in argv or "-h" in argv else contextlib.redirect_stderr(captured), \
             contextlib.nullcontext() if "--help" in argv or "-h" in argv else contextlib.redirect_stdout(captured):
            return tyro.cli(Annotated[Config, tyro.conf.FlagConversionOff], default=default or Config(run=name, **PRESETS[name]), args=argv,
                            prog=f"bash run.sh [{'|'.join(PRESETS)}]", use_underscores=True, description=f"Preset '{name}'. Every knob, with this preset's default:")
    except SystemExit as exit:
        if exit.code == 0:
            raise
        words = " ".join(re.sub(r"[^\x20-\x7e]|\x1b\[[0-9;]*m|-{3,}", " ", captured.getvalue()).split())
        raise ConfigError(re.split(r" Argument helptext| For full helptext", words)[0].removeprefix("Value error ").removeprefix("Parsing error ")) from None


def resolve(config: Config, gpus: int, training: bool = True) -> Config:
    """Fill in what follows from the hardware and check what can be checked before anything starts; training: there are trainer ranks too.

    Raises ConfigError naming the knob and what to do.
    """
    def need(ok, message):
        if not ok:
            raise ConfigError(message)

    c = config
    need(re.fullmatch(r"[\w.-]+", c.run), f"--run {c.run!r}: letters, digits, '.', '-' and '_' only")
    for name in ("steps", "batch_size", "attempts", "concurrency", "row_tokens", "max_new_tokens", "tensor_parallel", "bucket_mb", "keep_last", "eval_attempts", "actors"):
        need(getattr(c, name) >= 1, f"--{name} {getattr(c, name)}: must be at least 1")
    for name in ("max_lag", "conventional_g", "engines", "trainers", "trainer_nodes", "retries", "eval_every", "eval_problems", "save_every", "keep_every", "verify_weights", "restarts", "ring", "reward_workers", "engine_threads", "trainer_threads"):
        need(getattr(c, name) >= 0, f"--{name} {getattr(c, name)}: must not be negative")
    need(c.reward_timeout > 0, f"--reward_timeout {c.reward_timeout}: must be above 0")
    need(c.temperature > 0, f"--temperature {c.temperature}: must be above 0")
    need(c.attempts >= 2 or c.advantage == "none", f"--attempts {c.attempts}: the '{c.advantage}' baseline needs at least 2 attempts per problem")
    need(c.batch_size % c.attempts == 0, f"--batch_size {c.batch_size} is not a multiple of --attempts {c.attempts}: a step trains whole groups")
    need(c.max_new_tokens < c.max_model_len, f"--max_new_tokens {c.max_new_tokens} leaves no room for a prompt in --max_model_len {c.max_model_len}")
    c.nodes = c.nodes or (c.host,)
    c.host, n, everywhere = c.nodes[0], len(c.nodes), gpus * len(c.nodes)
    if gpus:
        c.engines = c.engines or max(everywhere // 2 // c.tensor_parallel, 1)
        c.trainers = c.trainers or max(everywhere - c.engines * c.tensor_parallel, 1)
        c.trainer_nodes = c.trainer_nodes or next((m for m in range(1, n + 1) if c.trainers % m == 0 and c.trainers // m <= gpus), 0)
    else:
        c.trainer_nodes, c.trainers = c.trainer_nodes or 1, c.trainers or c.trainer_nodes or 1
        c.engines = c.engines or max(n - c.trainer_nodes, 1)
    need(1 <= c.trainer_nodes <= n and c.trainers % c.trainer_nodes == 0 and (not gpus or c.trainers // c.trainer_nodes <= gpus),
         f"{c.trainers} trainer ranks cannot be shared out equally over {c.trainer_nodes or 'any number'} of {n} nodes" + (f" of {gpus} GPUs" if gpus else "") + ": change --trainers or --trainer_nodes")
    c.trainers *= training
    seats = spread(c, gpus)
    need(len(seats) == c.engines, f"{c.engines} engines x {c.tensor_parallel} GPUs + {c.trainers} trainer ranks need {c.engines * c.tensor_parallel + c.trainers} GPUs, "
         f"{f'{n} nodes have {gpus} each' if n > 1 else f'this machine has {gpus}'}: lower --engines, --tensor_parallel or --trainers")
    c.urls = tuple(f"http://{c.nodes[node]}:{c.port + i}" for i, (node, _) in enumerate(seats))
    if c.weight_backend == "auto":
        c.weight_backend = "nccl" if everywhere > 1 else "gloo"
    c.gpu_memory_utilization = c.gpu_memory_utilization or (0.3 if everywhere == 1 and training else 0.7)
    if c.dtype == "auto":
        c.dtype = "bfloat16" if gpus else "float32"
    phase = max(c.conventional_g, 1) * c.batch_size
    c.ring = c.ring or max(2 * c.batch_size, phase)
    need(c.ring >= phase, f"--ring {c.ring} is less than the {phase} samples of a {'phase' if c.conventional_g else 'step'}: it could never fill")
    c.reward_workers = c.reward_workers or min(max(len(os.sched_getaffinity(0)), 2), 16)
    here = sorted(p.stem for p in (ROOT / "tasks").glob("[!_]*.py"))
    for task in task_weights(c.task):
        near = difflib.get_close_matches(task, here, n=1)
        need(task in here, f"--task {task}: there is no tasks/{task}.py" + (f", did you mean {near[0]}?" if near else "") + f" Tasks here: {', '.join(here)}")
    if not c.model:
        for task in task_weights(c.task):
            need(hasattr(importlib.import_module(f"tasks.{task}"), "teacher"), f"--model is empty and task {task} has no teacher for a tiny base model: give a model directory or hub name")
        c.model = str(ROOT / "out" / "models" / f"{'+'.join(task_weights(c.task))}-seed{c.seed}")
    elif os.sep in c.model and (c.model.startswith((".", "/", "~")) or c.model.count("/") != 1):
        c.model = os.path.expanduser(c.model)
        need(Path(c.model, "config.json").exists(), f"--model {c.model}: no config.json there, so it is not a Hugging Face model directory")
    else:
        local = Path(c.model, "config.json").exists()
        need(local or c.model.count("/") == 1 or cached_on_hub(c.model), f"--model {c.model}: no such directory, and not a hub name like Qwen/Qwen2.5-7B")
    if not c.dry_run:
        check_ports(c, 0)
    return c


def spread(c: Config, gpus: int) -> list[tuple[int, list[int]]]:
    """(node, its GPUs) of every engine that there is room for; gpus: of each node.

    Trainer ranks take the last GPUs of the first `trainer_nodes` nodes. Engines take whole other nodes first, then what is left on
    these; both share the only GPU if there is just one.
    """
    n, m = len(c.nodes), c.trainer_nodes if c.trainers else 0
    order = [*range(m, n), *range(m)]
    if not gpus:
        serving = range(m, n) if m < n else range(n)
        return [(serving[i % len(serving)], []) for i in range(c.engines)]
    taken = c.trainers // m if m and n * gpus > 1 else 0  # on each of the first m nodes
    seats = [(node, list(range(g, g + c.tensor_parallel))) for node in order
             for g in range(0, gpus - (taken if node < m else 0) - c.tensor_parallel + 1, c.tensor_parallel)]
    return seats[:c.engines]


def check_ports(c: Config, node: int) -> None:
    """Raise ConfigError if an engine of this node could not listen on its port."""
    for i, url in enumerate(c.urls):
        host, port = url.removeprefix("http://").rsplit(":", 1)
        if host != c.nodes[node]:
            continue
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((host, int(port)))
            except OSError as e:
                raise ConfigError(f"--port {c.port}: engine {i} cannot listen on {host}:{port} ({e.strerror}); stop what uses it or choose another --port") from None


def cached_on_hub(name: str) -> bool:
    """True if a model of this name is in the local Hugging Face cache."""
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    return (hub / f"models--{name.replace('/', '--')}").exists()


def load(run_dir: str) -> Config:
    """The Config that out/<run>/config.json holds."""
    values = json.loads(Path(run_dir, "config.json").read_text())["config"]
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

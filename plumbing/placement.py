"""What runs where: which node, GPUs, CPU threads and command each process of a run has.

tools/run.py starts what is decided here, plumbing/supervise.py looks after it; what lies in the run directory is
plumbing/rundir.py's. Nothing here imports torch: a wrong flag must be reported at once. Deliberately absent: ssh, a
scheduler.
"""

import contextlib
import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil

import config as cfg
from config import Config, require
from plumbing.supervise import end_with_launcher

MODELS = cfg.ROOT / "out" / "models"
ENGINE_FLAGS = (
    "--logprobs-mode processed_logprobs --generation-config vllm "
    "--worker-extension-cls plumbing.engine.WorkerExtension --middleware plumbing.engine.Contract "
    "--disable-uvicorn-access-log --no-enable-log-requests --disable-log-stats "
    # a prompt is never split between two steps, hence never between two versions
    "--no-enable-chunked-prefill "
    # chat templates and parsers of tool calls, for plumbing/endpoint.py
    "--enable-scale-out --enable-auto-tool-choice"
).split()
ENGINE_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # plumbing/engine.py numbers requests, and random bytes cost more than the rest of a name
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}
# OpenMP's threads wait for each other by spinning; by themselves they sleep only after 10 ms and more, and keep a core
# from who is waited for. So short a time costs nothing on a quiet machine, and with other work on it a step of two
# threads takes no longer than one of one thread, instead of five times as long or worse.
SLEEP_SOON = {"GOMP_SPINCOUNT": "2000"}
QUIET = SLEEP_SOON | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
QUIET |= {"CUDA_VISIBLE_DEVICES": ""}
# freed memory stays with the process: a training step on CPU, whose rows all need the same, takes a tenth
# less than if the system clears each page again (bench/train.py)
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 62), "MALLOC_MMAP_MAX_": "0"}
# on a GPU, whose rows are of many sizes: what one leaves free fits the next
ONE_HEAP = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
NICE = ["nice", "-n", "10"]


# ---- what there is


def gpu_count() -> int:
    """GPUs this process may use: CUDA_VISIBLE_DEVICES if set, else what the NVIDIA driver lists."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(gpu_names(0))
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return len(re.findall(r"^GPU \d+", listing, re.M))


def gpu_names(gpus: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls this node's GPUs: the user's choice is kept."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name for name in chosen if name.strip() not in ("", "-1")]
    return names or list(map(str, range(gpus)))


def which_node() -> tuple[int, int]:
    """(number of this node, number of nodes); run.sh knows the variables that say so."""
    node, n = os.environ.get("NODE_RANK", "0"), os.environ.get("NNODES", "1")
    require(
        node.isdecimal() and n.isdecimal() and int(node) < int(n),
        f"NODE_RANK={node} NNODES={n}: must be this node's number, from 0, and how many there are",
    )
    return int(node), int(n)


def own_address(other: str) -> str:
    """This node's address in the network of another one: NODE_ADDR, or that of the way to it."""
    require(other, "set MASTER_ADDR on every node, to the address of node 0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        # UDP: nothing is sent
        s.connect((other, 1))
        address = os.environ.get("NODE_ADDR") or s.getsockname()[0]
    require(
        other.startswith("127.") or not address.startswith("127."),
        f"{other} is {address} here, which no other node can reach: set NODE_ADDR to this node's address",
    )
    return address


def _network(address):
    """gloo and NCCL meet on this address's interface; by themselves they guess."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [known.address for known in addresses]:
            env = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
            return {k: v for k, v in env.items() if k not in os.environ}
    return {}


# ---- who gets what; gpus: of each node


def spread(c: Config, gpus: int) -> tuple[list, list]:
    """[(node, its GPUs)] of every trainer rank, and of every engine that there is room for.

    Ranks take the first GPUs, engines the others, from the last node on; both share the only GPU if
    there is just one. Without GPUs nodes that train do not serve, if there are others.
    """
    n = c.nnodes
    if not gpus:
        serving = range(c.trainers, n) or range(n)
        engines = [(serving[i % len(serving)], []) for i in range(c.engines)]
        return [(rank % n, []) for rank in range(c.trainers)], engines
    taken = c.trainers if n * gpus > 1 else 0
    engines = []
    for node in reversed(range(n)):
        free = [gpu for gpu in range(gpus) if node * gpus + gpu >= taken]
        for last in range(c.tensor_parallel, len(free) + 1, c.tensor_parallel):
            engines.append((node, free[last - c.tensor_parallel : last]))
    return [(rank // gpus, [rank % gpus]) for rank in range(c.trainers)], engines[: c.engines]


def share_cores(c: Config, gpus: int, node: int) -> tuple[int, int]:
    """CPU threads of each of this node's engines, and of each of its trainer ranks."""
    ranks, engines = ([where for where, _ in part].count(node) for part in spread(c, gpus))
    cores = len(os.sched_getaffinity(0))
    for_engines = cores // 2 if ranks else cores
    per_engine = c.engine_threads or max(for_engines // max(engines, 1), 1)
    left = cores - per_engine * engines
    return per_engine, c.trainer_threads or max(left // max(ranks, 1), 1)


def resolve(config: Config, gpus: int, training: bool = True) -> Config:
    """Check a configuration and fill in what follows from the hardware; returns the same object.

    training: there are trainer ranks, too. Raises ConfigError naming the knob and what to do.
    """
    c = cfg.check(config)
    # an engine or a weight group is open to this machine alone unless one says otherwise
    c.master_addr = c.master_addr or os.environ.get("NODE_ADDR", "127.0.0.1")
    everywhere = gpus * c.nnodes
    if gpus:
        # the paper's 48 of 128, or what is left: with half of them the trainer is the slower side
        left = (everywhere - c.trainers) // c.tensor_parallel
        usual = round(everywhere * 3 / 8 / c.tensor_parallel)
        c.engines = c.engines or max(left if c.trainers else usual, 1)
        c.trainers = c.trainers or max(everywhere - c.engines * c.tensor_parallel, 1)
    else:
        c.trainers = c.trainers or 1
        c.engines = c.engines or max(c.nnodes - c.trainers, 1)
    c.trainers = c.trainers if training else 0
    _, engines = spread(c, gpus)
    require(
        len(engines) == c.engines and (c.trainers <= everywhere or not gpus),
        f"{c.engines} engines x {c.tensor_parallel} GPUs + {c.trainers} trainer ranks do not go into "
        f"{c.nnodes} nodes of {gpus} GPUs: lower --engines, --tensor_parallel or --trainers",
    )
    c.master_port = c.master_port or c.port + c.engines
    if c.weight_backend == "auto":
        c.weight_backend = "nccl" if everywhere > 1 else "gloo"
    if not c.gpu_memory_utilization:
        c.gpu_memory_utilization = 0.3 if everywhere == 1 and training else 0.7
    if c.dtype == "auto":
        c.dtype = "bfloat16" if gpus else "float32"
    c.model = os.path.expanduser(c.model or _tiny_model(c))
    words = "needs torchao, which makes vLLM start more slowly: pip install torchao==0.18.0"
    require(not c.adam_8bit or importlib.util.find_spec("torchao"), f"--adam_8bit {words}")
    for task in cfg.task_weights(c.task) if c.teacher == "self" else ():
        words = "an attempt of several turns cannot be shown to another one"
        has_turns = hasattr(cfg.load_task(task), "episode")
        require(not has_turns, f"--teacher self --task {task}: {words}")
    # each sequence in progress is a connection of the actor's
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return c


def _tiny_model(c):
    tasks = cfg.task_weights(c.task)
    for task in tasks:
        words = f"--model is empty and task {task} has no demonstration for a tiny base model"
        has_any = hasattr(cfg.load_task(task), "demonstration")
        require(has_any, f"{words}: give a model directory or hub name")
    return str(MODELS / f"{'+'.join(tasks)}-seed{c.seed}")


# ---- the processes


def engine_commands(c: Config, gpus: int, node=0, host="") -> list[tuple[str, dict, list[str]]]:
    """(name, extra environment, vLLM's command) of every engine of this node, whose address is `host`."""
    devices = gpu_names(gpus)
    host = host or c.master_addr
    threads, _ = share_cores(c, gpus, node)
    caching = c.prefix_caching == "on"
    engines = []
    for i, (where, own) in enumerate(spread(c, gpus)[1]):
        if where != node:
            continue
        options = {
            "--model": c.model,
            "--served-model-name": "policy",
            "--host": host,
            "--port": c.port + i,
            "--dtype": c.dtype,
            "--seed": c.seed + i,
            "--tensor-parallel-size": c.tensor_parallel,
            "--max-model-len": c.max_model_len,
            "--max-num-seqs": c.concurrency,
            # all that decode take one each: the longest prompt must still fit beside them
            "--max-num-batched-tokens": max(8192, c.max_model_len + c.concurrency),
            "--tool-call-parser": c.tool_parser,
        }
        if c.reasoning_parser:
            options["--reasoning-parser"] = c.reasoning_parser
        if c.head_float32:
            options["--hf-overrides"] = '{"head_dtype": "float32"}'
        if gpus:
            env = {"CUDA_VISIBLE_DEVICES": ",".join(devices[g] for g in own)}
            # the weight group's broadcasts must not queue up behind the engine's own work
            env["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
            options["--gpu-memory-utilization"] = c.gpu_memory_utilization
            if c.kv_cache_gb:
                options["--kv-cache-memory-bytes"] = round(c.kv_cache_gb * 1e9)
        else:
            env = _cpu_build(c, i, threads, options)
        env |= ENGINE_ENV | _network(host) | {"VLLM_HOST_IP": host}
        env["PIPELINE_RUN_DIR"] = str(Path(c.out, c.run).absolute())
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *ENGINE_FLAGS]
        command += [str(word) for option in options.items() for word in option]
        command.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
        if c.enforce_eager:
            command.append("--enforce-eager")
        engines.append((f"engine{i}", env, command))
    return engines


def _cpu_build(c, i, threads, options):
    """Environment of vLLM's CPU build for engine i; adds to its options."""
    kv_cache = max(round(c.kv_cache_gb), 1)
    env = SLEEP_SOON | {"OMP_NUM_THREADS": str(threads)}
    env["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache)
    if c.prefix_caching == "on":
        # beginnings are shared by whole blocks, and the CPU build's are of 128 tokens by default
        options["--block-size"] = 32
    if c.enforce_eager:
        # else inductor compiles the sampler all the same, which takes a C++ compiler and a path without spaces
        env["TORCH_COMPILE_DISABLE"] = "1"
    if c.tensor_parallel == 1:
        # vLLM's scheduler and worker as two processes wait for each other by spinning; on few cores
        # they starve each other (measured: 2 to 30 groups/s, against 43 as one process, which this
        # variable allows on CPU)
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        options["--distributed-executor-backend"] = "uni"
        return env
    # by itself vLLM wants a NUMA node for each worker
    cores = sorted(os.sched_getaffinity(0))
    own = range(i * c.tensor_parallel, (i + 1) * c.tensor_parallel)
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[k % len(cores)]) for k in own)
    return env


def commands(c: Config, gpus: int, node=0, host="") -> list[tuple[str, dict, list[str]]]:
    """(process name, extra environment, command) of every process of this node, as they are started.

    Who gets which GPU: `spread`. Preprocess and the actor, on node 0, need little CPU and float.
    """
    run_dir = str(Path(c.out, c.run))
    host = host or c.master_addr
    names = gpu_names(gpus)
    _, threads = share_cores(c, gpus, node)
    processes = engine_commands(c, gpus, node, host)
    if node == 0:
        processes.append(("actor", QUIET, [sys.executable, "actor.py", run_dir]))
        processes.append(("preprocess", QUIET, [sys.executable, "preprocess.py", run_dir]))
    if not gpus:
        # where they share cores, the trainer goes first: a step that waits for the CPU is lag for everybody
        processes = [(name, env, NICE + command) for name, env, command in processes]
    for rank, (where, own) in enumerate(spread(c, gpus)[0]):
        if where != node:
            continue
        env = QUIET | _network(host) | {"OMP_NUM_THREADS": str(threads)}
        env |= {"CUDA_VISIBLE_DEVICES": names[own[0]]} | ONE_HEAP if gpus else KEEP_MEMORY
        if c.trainers > 1:
            # as torchrun tells its ranks; each sees its own GPU alone
            env |= {"RANK": str(rank), "WORLD_SIZE": str(c.trainers), "LOCAL_RANK": "0"}
            env |= {"MASTER_ADDR": c.master_addr, "MASTER_PORT": str(c.master_port)}
        name = f"train{rank}" if rank else "train"
        processes.append((name, env, [sys.executable, "train.py", run_dir]))
    return processes


def show(processes, commands):
    """A line a process: where it runs; in a dry run also what one would type into a shell."""
    for name, env, command in processes:
        gpus = env.get("CUDA_VISIBLE_DEVICES")
        place = f"GPU {gpus}" if gpus else f"CPU, {env.get('OMP_NUM_THREADS')} threads"
        print(f"  {name:<11} {place}", flush=True)
        if commands:
            variables = [f"{k}={v}" for k, v in env.items()]
            print(f"{name}: {shlex.join(['env', *variables, *command])}", flush=True)


def prepare(c: Config, splits=()) -> None:
    """Have the models made or fetched, and checked together with the problems of these splits, before clocks run and
    before the run directory is touched. Raises ConfigError if anything is wrong, which has been said then.
    """
    command = [sys.executable, "tools/prepare.py"]
    request = json.dumps({"config": asdict(c), "splits": splits})
    # a Ctrl-C is for this process alone, which then ends that one
    options = dict(cwd=cfg.ROOT, env=os.environ | SLEEP_SOON, start_new_session=True)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, preexec_fn=end_with_launcher, **options
    )
    try:
        process.communicate(request)
    finally:
        # with what it has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    require(not process.returncode, "nothing is started, see above")

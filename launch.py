"""run.sh's other half: which nodes there are, what runs where, and whether they are all alive.

    python launch.py LIST toy --knob value ...    checks, agrees with the other nodes, writes config.json and this node's processes to LIST
    python launch.py watch RUN_DIR NODE TOKEN WHY      gives a sign of life every second and looks for those of the others

Every node runs the same command. They meet in out/.nodes/<run>, on a file system that all share: node k writes <k>.json with a
random token, its address and a count that goes up; node 0 waits for those that count, decides, and answers with their tokens in
launch.json. No clock of another node is ever read: a file that stays as it was for 20 s of one's own time is a dead node's. One node
alone does none of this. Deliberately absent: ssh, a scheduler, elasticity: the run stops, the same command continues.
"""
import contextlib
import fcntl
import json
import os
import secrets
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version as package_version
from pathlib import Path

import config as cfg
from config import Config, ConfigError
from queues import notice, noticed

SILENT = 20.0  # seconds without a sign of life after which a node counts as dead
VARIABLES = (("NNODES", "NODE_RANK"), ("GROUP_WORLD_SIZE", "GROUP_RANK"), ("PET_NNODES", "PET_NODE_RANK"),  # ours, torchrun's, its options' and Kubeflow's,
             ("SLURM_STEP_NUM_NODES", "SLURM_NODEID"), ("SLURM_NNODES", "SLURM_NODEID"))  # SLURM's


# ------------------------------------------------------------------------------------------------ nodes

def which_node(env=os.environ) -> tuple[int, int]:
    """(number of this node, number of nodes), from the usual variables; (0, 1) without any."""
    for nodes, rank in VARIABLES:
        if nodes in env and rank in env:
            with contextlib.suppress(ValueError):
                if 0 <= (k := int(env[rank])) < (n := int(env[nodes])):
                    return k, n
            raise ConfigError(f"{nodes}={env[nodes]} {rank}={env[rank]}: must be the number of nodes, and this one's, from 0")
    return 0, 1


def own_address(env=os.environ) -> str:
    """Address of this node that the others can reach: NODE_ADDR, or that of the way to MASTER_ADDR, or the host name's. Raises ConfigError."""
    address, how = env.get("NODE_ADDR", ""), "set NODE_ADDR to this node's address in the network of the nodes"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            if not address and "MASTER_ADDR" in env:
                s.connect((env["MASTER_ADDR"], 1))  # UDP: nothing is sent
                address = s.getsockname()[0]
        address = socket.gethostbyname(address or socket.gethostname())
    except OSError as e:
        raise ConfigError(f"no address of this node ({e}): {how}") from None
    if address.startswith("127."):
        raise ConfigError(f"this node's address would be {address}, which no other node can reach: {how}")
    return address


def interface(address: str) -> str:
    """Name of the network interface that has this IPv4 address; "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(s.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


class Sign:
    """This node's file in out/.nodes/<run>: {token, address, gpus, command, state, beat}; `write` is a sign of life."""

    def __init__(self, folder, node, **values):
        self.folder, self.node, self.path = Path(folder), node, Path(folder, f"{node}.json")
        self.values = dict(beat=0, state="running") | values
        self.seen, self.others = {}, {}  # node -> when its last sign was seen, by this node's own clock; node -> that sign

    def write(self, state=None):
        self.values |= dict(beat=self.values["beat"] + 1, state=state or self.values["state"])
        self.folder.mkdir(parents=True, exist_ok=True)
        notice(self.path, **self.values)

    def look(self, node):
        """Another node's values if it has given a sign of life since the last look, else None. The first look never counts: the file may be old."""
        values, before = noticed(self.folder / f"{node}.json"), self.others.get(node)
        self.others[node] = values
        if before is None or values == before or not values:
            self.seen.setdefault(node, time.monotonic())
            return None
        self.seen[node] = time.monotonic()
        return values

    def claim(self):
        """Raise ConfigError if somebody else is this node of this run already."""
        deadline = time.monotonic() + 3
        while self.path.exists() and time.monotonic() < deadline:
            if other := self.look(self.node):
                raise ConfigError(f"run '{self.folder.name}' is in progress on {other['address']} as node {self.node}, or still stopping: wait for it, or choose another --run name")
            time.sleep(0.3)


def gather(sign, n, timeout):
    """Node 0: wait until all n nodes are there; returns their values. Raises ConfigError if they do not go together."""
    deadline, found = time.monotonic() + timeout, {0: sign.values}
    while len(found) < n:
        if time.monotonic() > deadline:
            raise ConfigError(f"nodes {', '.join(str(k) for k in range(n) if k not in found)} of {n} did not come to {sign.folder} within {timeout:.0f} s: were they started with the same --out, on a file system all share?")
        found |= {k: values for k in range(1, n) if (values := sign.look(k)) and values["state"] == "running"}
        sign.write()
        time.sleep(0.5)
    for k, values in found.items():
        for what in ("command", "gpus"):
            if values[what] != sign.values[what]:
                raise ConfigError(f"node {k} ({values['address']}) has another {what} ({values[what]}) than node 0 ({sign.values[what]}): all must be alike")
    return [found[k] for k in range(n)]


def await_answer(sign, timeout):
    """Other nodes: wait for node 0's word. Raises ConfigError with its reason if it refuses."""
    deadline = time.monotonic() + timeout
    while sign.values["token"] not in (answer := noticed(sign.folder / "launch.json")).get("tokens", []):
        if time.monotonic() > deadline:
            raise ConfigError(f"node 0 did not answer in {sign.folder} within {timeout:.0f} s: was it started with the same --out, on a file system all share?")
        sign.write()
        time.sleep(0.5)
    if answer["error"]:
        raise ConfigError(f"node 0 refused: {answer['error']}")
    return answer["tokens"]


@contextlib.contextmanager
def meeting(sign, n, timeout):
    """Yields the nodes' addresses once all are there, on node 0; elsewhere nothing, once node 0 has done what it does in here. Whoever waits learns of a failure."""
    if not sign:
        yield ()
        return
    sign.claim()
    sign.write()
    signs, error = [], "it was stopped"
    try:
        if sign.node:
            await_answer(sign, timeout)
        else:
            print(f"run.sh: waiting for {n - 1} other nodes in {sign.folder}", flush=True)
            signs = gather(sign, n, timeout)
        yield tuple(x["address"] for x in signs)
        error = ""
    except (ConfigError, OSError) as e:
        error = str(e)
        raise
    finally:
        sign.write(error)
        if not sign.node:
            everybody = signs or [sign.values, *sign.others.values()]
            notice(sign.folder / "launch.json", tokens=[x["token"] for x in everybody if x], error=error)


def watch(run_dir, node, token, why):
    """Sign of life every second until SIGTERM. With SIGUSR1 this node begins to stop: the others are told why, which the file `why` says.

    Exits with 0 when node 0 says that the run is done, with 1 and a line when another node is dead or has stopped.
    """
    told, wake = os.pipe()  # each signal's number, as a byte; blocking them and sigtimedwait would leave them to numpy's threads, which die of them
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for s in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(s, lambda *_: None)
    c, node = cfg.load(run_dir), int(node)
    folder = Path(c.out, ".nodes", c.run)
    tokens = noticed(folder / "launch.json")["tokens"]
    sign = Sign(folder, node, **noticed(folder / f"{node}.json") | dict(token=token))
    names = {k: f"node {k} ({c.nodes[k]})" for k in range(len(tokens)) if k != node}
    stopping, trouble = None, None
    try:
        while trouble is None:
            if noticed(sign.path).get("token") != token:
                sys.exit(f"nodes: {sign.path} is gone or another launcher's: this run stops")
            sign.write()
            for k, name in names.items():
                values = sign.look(k) or sign.others[k]
                if stopping:
                    continue
                if values.get("token") != tokens[k]:
                    trouble = f"{name} was started again: this run stops, start all nodes anew"
                elif values["state"] == "done" and k == 0:
                    trouble = "done"
                elif values["state"] not in ("running", "done"):
                    trouble = values["state"] if values["state"].startswith("node ") else f"{name} has stopped: {values['state']}"  # the first cause
                elif time.monotonic() - sign.seen[k] > SILENT:
                    trouble = f"{name} has given no sign of life for {SILENT:.0f} s: it is dead or cut off"
            if trouble is None and select.select([told], [], [], 1.0)[0]:
                stopping = Path(why).read_text().strip() if Path(why).exists() else "it was killed"
                sign.values["state"] = stopping
                trouble = "done" if signal.SIGTERM in os.read(told, 100) else None
        sign.write(stopping or trouble)
    except OSError as e:
        sys.exit(f"nodes: {folder} cannot be read or written ({e.strerror}): mount it again; the same command continues")
    if trouble != "done":
        sys.exit(f"nodes: {trouble}")


# ------------------------------------------------------------------------------------------------ what runs where

def placement(c: Config, gpus: int, node: int = 0) -> list[tuple[str, dict, list[str]]]:
    """(process name, extra environment, command) of every process of this node, in the order they are started; gpus: of each node.

    Who gets which GPU: config.spread. CPU cores are shared out between a node's engines and trainer ranks; preprocess and the actor, on
    node 0, need little and float.
    """
    run_dir, address = str(Path(c.out, c.run)), c.nodes[node]
    python = sys.executable
    cores = len(os.sched_getaffinity(0))
    engines = {i: own for i, (where, own) in enumerate(cfg.spread(c, gpus)) if where == node}
    ranks = c.trainers // c.trainer_nodes if node < c.trainer_nodes else 0
    per_engine = c.engine_threads or max(cores // (2 if ranks else 1) // max(len(engines), 1), 1)
    per_trainer = c.trainer_threads or max((cores - per_engine * len(engines)) // max(ranks, 1), 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = [d for d in visible.split(",") if d.strip()] if visible else [str(g) for g in range(gpus)]  # the user's choice of GPUs is kept
    wire = {"GLOO_SOCKET_IFNAME": name} if (name := interface(address)) and "GLOO_SOCKET_IFNAME" not in os.environ else {}  # else gloo takes the host name's
    processes = []
    for i, own in engines.items():
        env = wire | dict(VLLM_HOST_IP=address, VLLM_SERVER_DEV_MODE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="INFO", TOKENIZERS_PARALLELISM="false", PIPELINE_RUN_ID=c.run_id)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(device[g] for g in own)
        else:
            env |= dict(OMP_NUM_THREADS=str(per_engine), VLLM_CPU_KVCACHE_SPACE=str(max(round(c.kv_cache_gb), 1)))
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", c.model, "--served-model-name", "policy",
                   "--host", address, "--port", str(c.port + i), "--dtype", c.dtype, "--seed", str(c.seed + i), "--enable-scale-out",
                   "--tensor-parallel-size", str(c.tensor_parallel), "--max-model-len", str(c.max_model_len), "--max-num-seqs", str(c.concurrency),
                   "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--no-enable-prefix-caching",
                   "--weight-transfer-config", '{"backend": "broadcast"}', "--worker-extension-cls", "engine.WorkerExtension", "--middleware", "engine.Guard",
                   "--disable-uvicorn-access-log", "--no-enable-log-requests", "--disable-log-stats",
                   # a prompt is never split between two steps, hence never between two versions
                   "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(8192, c.max_model_len))]
        command += ["--enforce-eager"] if c.enforce_eager else []
        command += ["--hf-overrides", '{"head_dtype": "float32"}'] if c.head_float32 else []
        if not gpus and c.tensor_parallel == 1:
            # vLLM's scheduler and worker as two processes wait for each other by spinning; on few cores they starve each
            # other (measured: 2 to 30 groups/s, against 43 as one process, which this variable allows on CPU).
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            command += ["--distributed-executor-backend", "uni"]
        elif not gpus:  # by itself vLLM wants a NUMA node for each worker
            usable = sorted(os.sched_getaffinity(0))
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(usable[(i * c.tensor_parallel + k) % cores]) for k in range(c.tensor_parallel))
        if gpus:
            command += ["--gpu-memory-utilization", str(c.gpu_memory_utilization)]
            command += ["--kv-cache-memory-bytes", str(round(c.kv_cache_gb * 1e9))] if c.kv_cache_gb else []
        processes.append((f"engine{i}", env, command))
    quiet = dict(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    if node == 0:
        for k in range(c.actors):
            processes.append((f"actor{k if c.actors > 1 else ''}", quiet | dict(CUDA_VISIBLE_DEVICES=""), [python, "actor.py", run_dir, str(k)]))
        reference = device[-1] if gpus and c.needs_reference else ""  # the reference model shares the last GPU, a trainer rank's
        processes.append(("preprocess", quiet | dict(CUDA_VISIBLE_DEVICES=reference), [python, "preprocess.py", run_dir]))
    if ranks:
        env = wire | dict(OMP_NUM_THREADS=str(per_trainer), TOKENIZERS_PARALLELISM="false")
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(device[-ranks:])
        launch = [python, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(c.trainers), "--num_machines", str(c.trainer_nodes), "--machine_rank", str(node),
                  "--main_process_ip", c.nodes[0], "--main_process_port", str(c.port + c.engines), "--dynamo_backend", "no", "--mixed_precision", "no"] if c.trainers > 1 else [python]
        processes.append(("train", env, launch + ["train.py", run_dir]))
    if not gpus:  # where they share cores, the trainer goes first: a step that waits for the CPU is lag for everybody
        processes = [(name, env, command if name == "train" else ["nice", "-n", "10"] + command) for name, env, command in processes]
    return processes


def write(c: Config) -> Path:
    """Write out/<run>/config.json: every knob, package versions, git commit. Returns the run directory."""
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "accelerate", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = package_version(name)
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=cfg.ROOT, capture_output=True, text=True)
    run_dir = Path(c.out, c.run)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"config": asdict(c), "versions": versions, "git": git.stdout.strip()}, indent=1)
    (run_dir / "config.tmp").write_text(text + "\n")
    (run_dir / "config.tmp").replace(run_dir / "config.json")  # a crash leaves a whole one
    return run_dir


def newest_version(run_dir: Path) -> int:
    """Version of the newest checkpoint of a run directory; 0 if it has none."""
    return max((int(p.name[5:]) for p in run_dir.glob("checkpoints/step_*[0-9]")), default=0)


def evaluated(run_dir: Path, version: int) -> bool:
    """Is this version's evaluation, the last thing that a run does, in its curves?"""
    path = run_dir / "metrics.jsonl"
    return path.exists() and any('"eval": ' in line and f'"version": {version},' in line for line in path.read_text().splitlines())


def open_run(c: Config) -> str:
    """Make the run directory ready: continue what was stopped, move aside what is complete or unwanted.

    Returns what was done, one line. Raises ConfigError for a knob that cannot change within a run.
    """
    run_dir = Path(c.out, c.run)
    c.run_id = secrets.token_hex(4)
    if not (run_dir / "config.json").exists():
        return f"new run {run_dir}"
    old = cfg.load(str(run_dir))
    with open(run_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # run.sh and all that it starts hold it: what is left of a killed one may still be saving its work
        except OSError:
            raise ConfigError(f"--run {c.run}: processes of {run_dir} are still at work; those of a run that was killed end within 30 s") from None
    version = newest_version(run_dir)
    complete = version >= old.steps and evaluated(run_dir, version)
    if c.fresh or complete or not version:
        aside = next(p for i in range(1, 10**6) if not (p := run_dir.with_name(f"{c.run}.{i}")).exists())
        run_dir.rename(aside)
        return f"new run {run_dir}; the {'complete' if complete else 'stopped'} one before it is now {aside}"
    changed = [f.name for f in fields(Config) if getattr(old, f.name) != getattr(c, f.name) and f.name not in ("fresh", "out", "run_id", "nodes", "urls", "host")]
    for name in changed:
        if name in ("task", "train_data", "model", "seed", "batch_size", "attempts", "dtype"):
            raise ConfigError(f"--{name} cannot change within a run ({getattr(old, name)} -> {getattr(c, name)}): choose another --run name, or --fresh True")
    c.run_id = old.run_id
    shutil.rmtree(run_dir / "queues", ignore_errors=True)  # what was sampled but not trained is drawn again
    return f"continuing {run_dir} from step {version}" + (f"; changed: {', '.join(changed)}" if changed else "")


def command_line(env, command):
    """As one types it into a shell."""
    return f"env {shlex.join([f'{k}={v}' for k, v in env.items()])} {shlex.join(command)}"


def table(c, node, processes):
    """One line a process: where it runs."""
    for name, env, _ in processes:
        where = f"GPU {env['CUDA_VISIBLE_DEVICES']}" if env.get("CUDA_VISIBLE_DEVICES") else f"CPU, {env.get('OMP_NUM_THREADS', 1)} threads"
        what = c.urls[int(name[6:])].removeprefix("http://") if name.startswith("engine") else f"{c.trainers // c.trainer_nodes} ranks" if name == "train" else ""
        yield (f"node {node}  " if len(c.nodes) > 1 else "") + f"{name:<11} {where:<16} {what}".rstrip()


def prepare(argv, list_file):
    """Check everything, meet the other nodes, write config.json; print what runs where; list this node's processes in `list_file`."""
    gpus, (node, n) = cfg.gpu_count(), which_node()
    c = cfg.parse(argv, gpus)
    if c.dry_run:
        c.nodes = tuple(f"<node {k}>" for k in range(n)) if n > 1 else ()
        cfg.resolve(c, gpus)
        done = "dry run, nothing is started"
    else:
        sign = Sign(Path(c.out, ".nodes", c.run), node, token=secrets.token_hex(8), address=own_address(), gpus=gpus, command=shlex.join(argv)) if n > 1 else None
        with meeting(sign, n, c.start_timeout) as c.nodes:
            if node:
                c, done = cfg.load(str(Path(c.out, c.run))), "as node 0 says"
                cfg.check_ports(c, node)
            else:
                cfg.resolve(c, gpus)
                cfg.load_problems(c, "train"), cfg.load_problems(c, "test")
                done = open_run(c)
                write(c)
    print(f"run.sh: {done} | {c.steps} steps of {c.batch_size} samples | {c.engines} engines, {c.trainers} trainer ranks on {gpus * n or 'no'} GPUs | {c.dtype}", flush=True)
    placed = {k: placement(c, gpus, k) for k in (range(n) if c.dry_run else [node])}
    for k, processes in placed.items():
        print("".join(f"  {line}\n" for line in table(c, k, processes)), end="", flush=True)
    if c.dry_run:
        for k, processes in placed.items():
            print("".join(f"{f'node {k} ' if n > 1 else ''}{name}: {command_line(env, command)}\n" for name, env, command in processes), end="")
        return
    processes, run_dir = placed[node], str(Path(c.out, c.run))
    if Path(c.model).parent == cfg.ROOT / "out" / "models" and not Path(c.model, "config.json").exists():
        processes.insert(0, ("prepare", dict(OMP_NUM_THREADS="1"), [sys.executable, "tasks/_tiny.py", c.task, c.model, str(c.seed)]))
    if n > 1:
        processes.insert(0, ("nodes", {}, [sys.executable, "launch.py", "watch", run_dir, str(node), sign.values["token"], f"{list_file}.why"]))
    Path(list_file).write_text("\n".join([run_dir, str(c.restarts), str(node), *(f"{name}\t{command_line(env, command)}" for name, env, command in processes)]) + "\n")


def main(list_file, argv):
    """Called by run.sh."""
    try:
        prepare(argv, list_file)
    except ConfigError as e:
        sys.exit(f"run.sh: {e}")
    except OSError as e:
        sys.exit(f"run.sh: {e.filename}: {e.strerror}: --out must be a directory one can write to" if e.filename else f"run.sh: {e}")


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(*sys.argv[2:])
    else:
        main(sys.argv[1], sys.argv[2:])

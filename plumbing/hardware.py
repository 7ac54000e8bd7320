"""What this machine, or several alike, holds: GPUs, cores, ports, and who gets which.

`resolve` fills in what a configuration leaves open. Nothing here imports torch: a wrong flag must be
reported at once. Deliberately absent: asking other nodes; what node 0 has, all have.
"""

import ctypes
import importlib
import os
import re
import resource
import shutil
import socket
import subprocess
from pathlib import Path

import config as cfg
from config import Config, require

# mallopt's numbers for them, in malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
# what a process opens beside its connections: libraries, queues, workers, several times over
SPARE_FILES = 256
MODELS = cfg.ROOT / "out" / "models"  # where tools/base_model.py puts the tiny base models of tasks


def gpu_count() -> int:
    """GPUs this process may use: CUDA_VISIBLE_DEVICES if set, else what the NVIDIA driver lists."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(gpu_names(0))
    if not shutil.which("nvidia-smi"):
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    if listing.returncode:
        return 0
    return len(re.findall(r"^GPU \d+", listing.stdout, re.M))


def gpu_memory_gb() -> float:
    """Memory of this machine's smallest GPU, in 1e9 bytes; 0 if the NVIDIA driver does not say."""
    if not shutil.which("nvidia-smi"):
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listing = subprocess.run(command, capture_output=True, text=True)
    mebibytes = re.findall(r"^\d+", listing.stdout, re.M)
    return min(map(int, mebibytes), default=0) * 2**20 / 1e9


def gpu_names(gpus: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls this node's GPUs: the user's choice is kept."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name for name in chosen if name.strip() not in ("", "-1")]
    return names or list(map(str, range(gpus)))


def trainer_nodes(c: Config, gpus: int) -> int:
    """How many nodes, the first ones, have trainer ranks, equally many each: the fewest that hold them.

    gpus: of each node. Without GPUs as many nodes as there are ranks. 0 if the ranks do not go into
    the nodes, or there are none.
    """
    if not c.trainers:
        return 0
    n = len(c.nodes)
    if not gpus:
        several = min(c.trainers, n)
        return several if c.trainers % several == 0 else 1
    for m in range(1, n + 1):
        if c.trainers % m == 0 and c.trainers // m <= gpus:
            return m
    return 0


def spread(c: Config, gpus: int) -> list[tuple[int, list[int]]]:
    """(node, its GPUs) of every engine that there is room for; gpus: of each node.

    Trainer ranks take the last GPUs of the first nodes. Engines take whole other nodes first, then
    what is left on these; both share the only GPU if there is just one.
    """
    n = len(c.nodes)
    m = trainer_nodes(c, gpus)
    if not gpus:
        serving = range(m, n) or range(n)
        return [(serving[i % len(serving)], []) for i in range(c.engines)]
    taken = c.trainers // m if m and n * gpus > 1 else 0
    seats = []
    for node in [*range(m, n), *range(m)]:
        room = gpus - taken if node < m else gpus
        for last in range(c.tensor_parallel, room + 1, c.tensor_parallel):
            own = range(last - c.tensor_parallel, last)
            seats.append((node, list(own)))
    return seats[: c.engines]


def urls(c: Config, gpus: int) -> list[str]:
    """Where every engine of a resolved config listens."""
    places = enumerate(spread(c, gpus), c.port)
    return [f"http://{c.nodes[node]}:{port}" for port, (node, _) in places]


def share_cores(c: Config, gpus: int, node: int) -> tuple[int, int, int]:
    """This node's trainer ranks, and the CPU threads of each of its engines and of each rank."""
    m = trainer_nodes(c, gpus)
    ranks = c.trainers // m if node < m else 0
    engines = [where for where, _ in spread(c, gpus)].count(node)
    cores = len(os.sched_getaffinity(0))
    for_engines = cores // 2 if ranks else cores
    per_engine = c.engine_threads or max(for_engines // max(engines, 1), 1)
    left = cores - per_engine * engines
    per_rank = c.trainer_threads or max(left // max(ranks, 1), 1)
    return ranks, per_engine, per_rank


def resolve(config: Config, gpus: int, training: bool = True) -> Config:
    """Check a configuration and fill in what follows from the hardware; returns the same object.

    gpus: of each node; training: there are trainer ranks, too. Raises ConfigError naming the knob
    and what to do.
    """
    c = cfg.check(config)
    # an engine or a weight group is open to this machine alone unless one says otherwise
    c.nodes = c.nodes or (os.environ.get("NODE_ADDR", "127.0.0.1"),)
    everywhere = gpus * len(c.nodes)
    _share_out(c, gpus, training)
    if c.weight_backend == "auto":
        c.weight_backend = "nccl" if everywhere > 1 else "gloo"
    if not c.gpu_memory_utilization:
        c.gpu_memory_utilization = 0.3 if everywhere == 1 and training else 0.7
    if c.dtype == "auto":
        c.dtype = "bfloat16" if gpus else "float32"
    find_model(c)
    check_open_files(c)
    if not c.dry_run:
        check_ports(c, gpus, 0)
    return c


def _share_out(c, gpus, training):
    """How many engines and trainer ranks; ConfigError if the hardware does not hold them."""
    n = len(c.nodes)
    everywhere = gpus * n
    if gpus:
        half = everywhere // 2
        c.engines = c.engines or max(half // c.tensor_parallel, 1)
        rest = everywhere - c.engines * c.tensor_parallel
        c.trainers = c.trainers or max(rest, 1)
    else:
        c.trainers = c.trainers or 1
        c.engines = c.engines or max(n - trainer_nodes(c, gpus), 1)
    if not training:
        c.trainers = 0
    require(
        trainer_nodes(c, gpus) or not training,
        f"--trainers {c.trainers}: so many ranks cannot be shared out equally over "
        f"{n} nodes of {gpus} GPUs",
    )
    wanted = c.engines * c.tensor_parallel + c.trainers
    have = f"this machine has {gpus}"
    if n > 1:
        have = f"{n} nodes have {gpus} each"
    require(
        len(spread(c, gpus)) == c.engines,
        f"{c.engines} engines x {c.tensor_parallel} GPUs + {c.trainers} trainer ranks need "
        f"{wanted} GPUs, {have}: lower --engines, --tensor_parallel or --trainers",
    )


def is_directory(model: str) -> bool:
    """Is a model a directory that is there, or will be when the run starts?"""
    return Path(model, "config.json").exists() or is_to_be_made(model)


def is_to_be_made(model: str) -> bool:
    """Is it a task's tiny base model that tools/base_model.py has not made yet?"""
    return Path(model).parent == MODELS and not Path(model, "config.json").exists()


def find_model(c: Config) -> None:
    """Fill in the tiny base model's path if no model is given. Raises ConfigError if there is none like it."""
    if not c.model:
        tasks = cfg.task_weights(c.task)
        for task in tasks:
            module = importlib.import_module(f"tasks.{task}")
            require(
                hasattr(module, "teacher"),
                f"--model is empty and task {task} has no teacher for a tiny base model: "
                "give a model directory or hub name",
            )
        name = "+".join(tasks)
        c.model = str(MODELS / f"{name}-seed{c.seed}")
    c.model = os.path.expanduser(c.model)
    if is_directory(c.model):
        return
    is_path = c.model.startswith((".", "/")) or c.model.count("/") > 1
    # out/toi is no hub name where there is an out/
    is_path = is_path or ("/" in c.model and Path(c.model).parent.is_dir())
    require(
        not is_path,
        f"--model {c.model}: no config.json there, so it is not a Hugging Face model directory",
    )
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cached = Path(home, "hub", f"models--{c.model}").expanduser()
    require(
        "/" in c.model or cached.exists(),
        f"--model {c.model}: no such directory, and not a hub name like Qwen/Qwen2.5-7B",
    )


def check_hub(model: str) -> None:
    """Raise ConfigError if a model is neither a directory nor a hub's, on this disk or within reach."""
    if is_directory(model):
        return
    # only here: it takes half a second
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return
        # asked once: a download would try again for half a minute where there is no network
        get_hf_file_metadata(hf_hub_url(model, "config.json"))
    # whatever it is, HTTP's errors or a bad name, the model cannot be had
    except Exception as e:
        reason = " ".join(str(e).split()).split(". ")[0][:200]
        if not isinstance(e, (HfHubHTTPError, ValueError)):
            reason = f"it cannot be reached: {reason}"
        raise cfg.ConfigError(
            f"--model {model}: no such directory, and no model of this name can be had from the hub ({reason})"
        ) from None


def keep_freed_memory() -> None:
    """Memory that this process frees stays with it, for what it allocates next.

    glibc gives it back to the system, which hands it out again page by page, each cleared: of a training
    step on CPU, whose rows all need the same, that is a tenth of the time (bench/train.py).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # other C libraries have none
    if mallopt:
        # -1: never
        mallopt(M_TRIM_THRESHOLD, -1)
        # large blocks are no exception
        mallopt(M_MMAP_MAX, 0)


def raise_open_files() -> int:
    """Let this process open as many files and connections as it may; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def check_open_files(c: Config) -> None:
    """Raise ConfigError if the actor could not keep all engines busy: each sequence is a connection."""
    allowed = raise_open_files()
    require(
        allowed >= c.engines * c.concurrency + SPARE_FILES,
        f"{c.engines} engines x --concurrency {c.concurrency} need as many connections and "
        f"{SPARE_FILES} files, a process may open {allowed} here: raise `ulimit -Hn` or lower --concurrency",
    )


def port_trouble(host: str, port: int) -> str:
    """What keeps a server from listening there; "" if nothing does."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(held_name(host, port))
        except OSError:
            return "another run on this machine is about to"
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            return e.strerror
    return ""


def held_name(host, port):
    """The abstract socket (unix(7)) that stands for a port which a run has, or is about to have."""
    return f"\0pipeline-rl {host}:{port}"


def own_ports(c: Config, gpus: int, node: int) -> dict[int, str]:
    """{port: who listens there} of a node."""
    places = enumerate(spread(c, gpus))
    found = {c.port + i: f"engine {i}" for i, (where, _) in places if where == node}
    if c.trainers > 1 and node == 0:
        found[c.port + c.engines] = "the first trainer rank"
    return found


def check_ports(c: Config, gpus: int, node: int) -> None:
    """Raise ConfigError if somebody of this node could not listen on its port."""
    host = c.nodes[node]
    for port, who in own_ports(c, gpus, node).items():
        trouble = port_trouble(host, port)
        require(
            not trouble,
            f"--port {c.port}: {who} cannot listen on {host}:{port} ({trouble}); "
            f"stop what uses it or choose another, --port {c.port + 100} perhaps",
        )


def hold_ports(c: Config, gpus: int, node: int) -> None:
    """Keep the ports of this node from other runs, until the last process of this one has ended: an
    engine does not listen before it has loaded its model.

    The kernel frees the names by itself. Raises ConfigError if another run has them.
    """
    host = c.nodes[node]
    for port, who in own_ports(c, gpus, node).items():
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(held_name(host, port))
        except OSError:
            raise cfg.ConfigError(
                f"--port {c.port}: {who} cannot have {host}:{port}: another run on this machine is about to "
                "listen there; choose another --port"
            ) from None
        # it lives as long as this process and those that it starts or becomes
        os.set_inheritable(name.detach(), True)

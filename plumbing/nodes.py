"""Several nodes: who is who, the meeting before a run, and word of its end.

    python -m plumbing.nodes host HOST PORT WHY         node 0: says "over" on SIGTERM, for the reason in the file WHY
    python -m plumbing.nodes follow HOST PORT           the others: ends when node 0 says so, or is gone
    python -m plumbing.nodes until_done RUN_DIR RUN_ID  `run.sh serve`: ends when the run is complete

Every node runs the same command. They meet in a torch TCPStore that node 0 hosts at MASTER_ADDR.
Deliberately absent: heartbeats. A node that only serves and dies costs its engines; one that trains
ends the run through torch's own collectives.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from config import ConfigError, require
from plumbing.queues import read_json

# torch is imported where it is used: a wrong flag must be reported at once

# seconds without an answer after which node 0 counts as gone; its process may take as long to come up
SILENT = 30.0
LINGER = 3.0  # seconds for which node 0 still answers after its last word
# ours, torchrun's, its options' and Kubeflow's, SLURM's
VARIABLES = (
    ("NNODES", "NODE_RANK"),
    ("GROUP_WORLD_SIZE", "GROUP_RANK"),
    ("PET_NNODES", "PET_NODE_RANK"),
    ("SLURM_STEP_NUM_NODES", "SLURM_NODEID"),
    ("SLURM_NNODES", "SLURM_NODEID"),
)


def which_node(env=os.environ) -> tuple[int, int]:
    """(number of this node, number of nodes), from the usual variables; (0, 1) without any."""
    for nodes, rank in VARIABLES:
        if nodes in env and rank in env:
            with contextlib.suppress(ValueError):
                if 0 <= int(env[rank]) < int(env[nodes]):
                    return int(env[rank]), int(env[nodes])
            raise ConfigError(
                f"{nodes}={env[nodes]} {rank}={env[rank]}: must be the number of nodes, and this one's, from 0"
            )
    return 0, 1


def own_address(env=os.environ) -> str:
    """Address of this node that the others can reach: NODE_ADDR, or that of the way to MASTER_ADDR.

    Raises ConfigError if neither gives one.
    """
    advice = "set NODE_ADDR to this node's address in the network of the nodes"
    address = env.get("NODE_ADDR", "")
    try:
        if not address and "MASTER_ADDR" in env:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                # UDP: nothing is sent
                s.connect((env["MASTER_ADDR"], 1))
                address = s.getsockname()[0]
        address = socket.gethostbyname(address or socket.gethostname())
    except OSError as e:
        raise ConfigError(f"no address of this node ({e}): {advice}") from None
    if address.startswith("127."):
        raise ConfigError(
            f"this node's address would be {address}, which no other node can reach: {advice}"
        )
    return address


def interface(address: str) -> str:
    """Name of the network interface that has this IPv4 address; "" if none has."""
    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(s, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


# ---- node 0 speaks, the others hear it


def meeting_address(env=os.environ) -> str:
    """Node 0's address at which the others knock: MASTER_ADDR, as far as it is one of this machine.

    Raises ConfigError if there is none that they can reach.
    """
    host = env["MASTER_ADDR"]
    if host.startswith("127."):
        return host
    # an address of its own for other traffic does not count here
    others = {"MASTER_ADDR": host}
    with contextlib.suppress(ConfigError):
        return own_address(others)
    return own_address(env)


def open_store(host, port):
    """Node 0's store. Raises ConfigError if it cannot listen there."""
    from plumbing import transport

    try:
        return transport.open_store(host, int(port), SILENT, server=True)
    except OSError as e:
        raise ConfigError(
            f"{host}:{port}, where the nodes meet (--port - 1): {os.strerror(e.errno)}: is the run in progress, or still stopping?"
        ) from None


def hear(host, port, key, patience, card=None):
    """Value of a key of node 0's store, once it is set. `card` (node, JSON) is shown there meanwhile.

    Raises ConfigError if node 0 has not answered at all for `patience` seconds.
    """
    from plumbing import transport

    store = None
    value = ""
    last_answer = time.monotonic()
    while not value:
        try:
            if store is None:
                # torch's client would wait for a server, deaf to Ctrl-C
                socket.create_connection((host, int(port)), 5).close()
                store = transport.open_store(host, int(port), SILENT)
                if card:
                    store.set(*card)
            # in a thread: a store's calls wait for good if its host is cut off
            if transport.in_thread(store.check, [key]).result(SILENT):
                value = store.get(key).decode()
            last_answer = time.monotonic()
        except (OSError, RuntimeError):
            store = None
        require(
            time.monotonic() < last_answer + patience,
            f"node 0 ({host}:{port}) has not answered for {patience:.0f} s",
        )
        time.sleep(0.5)
    return value


@contextlib.contextmanager
def gathering(n, address, timeout, card):
    """Node 0: the addresses of all n nodes, once they are there. The others wait for the block's end.

    address: (host, port) where they meet. card: {"address", "gpus", "command"} of this node. Raises ConfigError naming who is missing or
    differs. Whatever is raised in the block, the others learn of it.
    """
    store = open_store(*address)
    store.set("node/0", json.dumps(card))
    deadline = time.monotonic() + timeout
    error = "it was stopped"
    print(f"run.sh: waiting for {n - 1} other nodes at {address[0]}:{address[1]}", flush=True)
    missing = range(n)
    try:
        while missing:
            require(
                time.monotonic() < deadline,
                f"nodes {', '.join(map(str, missing))} of {n} did not come within {timeout:.0f} s: "
                "were they started, with this node's MASTER_ADDR and --port?",
            )
            time.sleep(0.2)
            missing = [k for k in missing if not store.check([f"node/{k}"])]
        cards = [json.loads(store.get(f"node/{k}")) for k in range(n)]
        for k, other in enumerate(cards):
            for what in ("command", "gpus"):
                require(
                    other[what] == card[what],
                    f"node {k} ({other['address']}) has another {what} ({other[what]}) than node 0 "
                    f"({card[what]}): all must be alike",
                )
        yield tuple(c["address"] for c in cards)
        error = ""
    except (ConfigError, OSError) as e:
        error = str(e)
        raise
    finally:
        store.set("answer", f"node 0 refused: {error}" if error else "go")
        time.sleep(LINGER)


def join(node, host, port, timeout, card):
    """Other nodes: come to the meeting, and wait for node 0's word. Raises ConfigError with its reason if it refuses."""
    answer = hear(host, port, "answer", timeout, (f"node/{node}", json.dumps(card)))
    require(answer == "go", answer)


# ---- processes of a run


def host(address, port, why):
    """Node 0: until SIGTERM, then say that it is over and why; "done" is a complete run's reason."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    store = open_store(address, port)
    store.set("answer", "the run is in progress; `bash run.sh serve --run NAME` adds engines to it")
    stop.wait()
    store.set("over", Path(why).read_text().strip() or "it was killed")
    time.sleep(LINGER)


def follow(host, port):
    """Other nodes: until node 0 says that the run is done. ConfigError if it stopped or is gone."""
    over = hear(host, port, "over", SILENT)
    require(over == "done", f"node 0 ({host}) has stopped: {over}")


def until_done(run_dir, run_id):
    """`run.sh serve`: until the run is complete. ConfigError if its directory is gone or another run's."""
    while not read_json(Path(run_dir, "queues", "version.json")).get("done"):
        config = read_json(Path(run_dir, "config.json")).get("config", {})
        require(
            config.get("run_id") == run_id, f"{run_dir} is not there any more, or of another run"
        )
        time.sleep(1)


if __name__ == "__main__":
    commands = {"host": host, "follow": follow, "until_done": until_done}
    try:
        commands[sys.argv[1]](*sys.argv[2:])
    except ConfigError as e:
        sys.exit(f"nodes: {e}")

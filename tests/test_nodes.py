"""Runs on several nodes: placement, how nodes find each other, and what becomes of them when one
dies.

Each host is a network namespace with an address and processes of its own; all share one
directory. Processes, sockets and kills are real. The engines are FAKE ones.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import config as cfg
from conftest import ROOT, node_of, resolved, wait_until, with_knobs
from fake_engine import fake_vllm, standing_still
from plumbing import placement, rundir
from plumbing.queues import publish_json, read_json
from plumbing.supervise import Ended
from test_run import leftovers, metrics

KNOBS = ("--port", "8860", "--eval_problems", "32", "--eval_every", "0", "--start_timeout", "280")
KNOBS += ("--rows", "packed")


@pytest.mark.parametrize(
    "env,expected",
    [
        ({}, (0, 1)),
        ({"NNODES": "4", "NODE_RANK": "3"}, (3, 4)),
        ({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "RANK": "9"}, (1, 2)),
        ({"SLURM_NNODES": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}, (1, 2)),
        ({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, (0, 1)),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, (0, 2)),
    ],
)
def test_node_number_is_read_from_the_usual_variables(env, expected, tmp_path):
    assert node_of(env, tmp_path) == expected


def test_wrong_variables_and_addresses_are_refused(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    assert placement.which_node() == (1, 2)
    monkeypatch.setenv("NODE_RANK", "2")
    with pytest.raises(cfg.ConfigError, match="NODE_RANK=2 NNODES=2"):
        placement.which_node()
    with pytest.raises(
        cfg.ConfigError, match="on its way to localhost, is 127.0.0.1, which no other"
    ):
        placement.own_address("localhost")
    assert placement.own_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("NODE_ADDR", "10.1.2.3")
    assert placement.own_address("localhost") == "10.1.2.3"


# Every GPU of a node has an engine.
ALL = "0 1 2 3 4 5 6 7"


@pytest.mark.parametrize(
    "gpus,n,knobs,engines,ranks",
    [
        # One node serves, and one trains.
        (8, 2, "--trainers 8", {1: ALL}, {0: 8}),
        # Three GPUs of eight serve: one node is split, or each one if that is even.
        (8, 3, "", {2: ALL, 1: "7"}, {0: 8, 1: 7}),
        (8, 2, "", {1: "5 6 7", 0: "5 6 7"}, {0: 5, 1: 5}),
        # Three engines of two GPUs have no room on two nodes of three free GPUs each.
        (8, 2, "--tensor_parallel 2", {1: "23 45 67"}, {0: 8, 1: 2}),
        (8, 2, "--trainers 8 --tensor_parallel 2", {1: "01 23 45 67"}, {0: 8}),
        (8, 1, "--trainers 3 --tensor_parallel 2 --engines 2", {0: "34 56"}, {0: 3}),
        (4, 1, "", {0: "2 3"}, {0: 2}),
        # The placement of the paper
        (8, 16, "", dict.fromkeys(range(10, 16), ALL), dict.fromkeys(range(10), 8)),
        (1, 2, "", {1: "0"}, {0: 1}),
        # Engine and trainer share the only GPU.
        (1, 1, "", {0: "0"}, {0: 1}),
        (0, 3, "", {1: "-", 2: "-"}, {0: 1}),
        (0, 2, "--trainers 2", {0: "-"}, {0: 1, 1: 1}),
    ],
)
def test_placement_spreads_ranks_and_engines_over_nodes(gpus, n, knobs, engines, ranks):
    c = cfg.parse(["toy", *knobs.split()])
    c.nnodes = n
    c = placement.resolve(c, gpus)
    placed = {}
    for node, devices in placement.spread(c, gpus)[1]:
        placed.setdefault(node, []).append("".join(map(str, devices)) or "-")
    assert {node: " ".join(names) for node, names in placed.items()} == engines
    assert Counter(node for node, _ in placement.spread(c, gpus)[0]) == ranks
    # No GPU is used twice, unless it is the only one. tests/started/ has the processes.
    processes = [process for part in placement.spread(c, gpus) for process in part]
    gpus_in_use = [(node, device) for node, devices in processes for device in devices]
    assert len(set(gpus_in_use)) == len(gpus_in_use) or n * gpus == 1


# ---- node 0 holds the lock, and has written config.json


@pytest.fixture
def run(tmp_path):
    """The config of a run that nobody has started."""
    c = resolved("toy", "--out", tmp_path, "--model", tmp_path, "--start_timeout", 1)
    rundir.write(c, "process 1 on h, start 0")
    return c


def test_other_nodes_join_the_start_that_holds_the_run(run):
    # An earlier start has left its config.json.
    complaint = "has not started .*/toy within 1 s: does it run, and"
    with pytest.raises(cfg.ConfigError, match=complaint):
        rundir.wait_for_node_0(run)
    [lock], start = rundir.hold(run)
    with pytest.raises(cfg.ConfigError, match="has not started"):
        rundir.wait_for_node_0(run)
    threading.Timer(0.3, lambda: rundir.write(run, start)).start()
    assert rundir.wait_for_node_0(with_knobs(run, start_timeout=900)) == (run, start)
    os.close(lock)


def test_other_nodes_see_whether_node_0_is_done_or_gone(run):
    [lock], start = rundir.hold(run)
    assert not rundir.node_0_is_done(run, start)
    # What belongs to another start does not count.
    with pytest.raises(Ended, match=r"node 0 \(127.0.0.1\) has stopped or is gone"):
        rundir.node_0_is_done(run, "another")
    os.close(lock)
    with pytest.raises(Ended, match="has stopped or is gone"):
        rundir.node_0_is_done(run, start)
    version_file = Path(run.out, run.run, "queues", "version.json")
    version_file.parent.mkdir()
    publish_json(version_file, done=True)
    assert rundir.node_0_is_done(run, start)


# ---- whole runs on several hosts


def sh(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=900)


class Hosts:
    """Network namespaces 10.77.0.1, 10.77.0.2, ... that are joined by a bridge in another one.

    The processes of a host are in a PID namespace of their own. The engines are FAKE, as real ones
    take longer to start.
    """

    def __init__(self, folder):
        self.folder = folder
        self.switch = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
        self.hosts = {}
        self.fake = str(fake_vllm(folder / "fake"))
        self.enter(self.switch, "ip link add br0 type bridge; ip link set br0 up")

    def enter(self, process, script):
        own_namespace = os.readlink("/proc/self/ns/net")
        # The process may not have reached unshare yet.
        wait_until(lambda: os.readlink(f"/proc/{process.pid}/ns/net") != own_namespace)
        sh("nsenter", "-t", process.pid, "-n", "bash", "-ec", script)

    def run(self, k, n, *argv):
        """Boot host k as node k of n of a run."""
        knobs = ("toy", "--out", self.folder, "--run", "n", *KNOBS, *argv)
        return self.boot(k, knobs, NNODES=n, NODE_RANK=k, MASTER_ADDR="10.77.0.1")

    def serve(self, k):
        """Boot host k with an engine for that run."""
        return self.boot(k, ("serve", "--out", self.folder, "--run", "n"))

    def boot(self, k, argv, **environment):
        """Start a host that runs run.sh. Its output goes to <folder>/host<k>.txt."""
        link = f"v{k}"
        environment |= {
            "RUN_MARK": self.folder,
            "PYTHONPATH": self.fake,
            "PIPELINE_PYTHON": sys.executable,
        }
        begin = 'until ip addr | grep -q 10.77.0; do sleep 0.05; done; exec bash run.sh "$@"'
        unshare = ["unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child"]
        host = subprocess.Popen(
            [*unshare, "bash", "-c", begin, "run", *map(str, argv)],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in environment.items()},
            stdout=open(self.folder / f"host{k}.txt", "w"),
            stderr=subprocess.STDOUT,
        )
        self.enter(host, "ip link set lo up")
        # The hardware address is the same at every boot, as the other hosts remember it.
        eth0 = f"name eth0 address 02:00:00:00:00:{k + 1:02x} netns {host.pid}"
        cable = f"ip link add {link} type veth peer {eth0}; ip link set {link} master br0 up"
        self.enter(self.switch, f"ip link del {link} 2> /dev/null || true; {cable}")
        self.enter(host, f"ip link set eth0 up; ip addr add 10.77.0.{k + 1}/24 dev eth0")
        self.hosts[k] = host, link
        return host

    def log_text(self, k):
        return (self.folder / f"host{k}.txt").read_text()

    def everything(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("host*.txt")))

    def wait_until(self, condition, seconds=1200):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.everything()
            assert all(host.poll() is None for host, _ in self.hosts.values()), self.everything()
            time.sleep(0.1)

    def ends(self, *numbers, seconds=900):
        """Wait for the ends of these hosts; return their exit codes."""
        codes = []
        for k in numbers:
            try:
                codes.append(self.hosts[k][0].wait(seconds))
            except subprocess.TimeoutExpired:
                pytest.fail(self.everything())
            self.hosts.pop(k)
        return codes

    def wait_for_engines(self, *numbers):
        """Wait until the engines of exactly these hosts serve the trainer's weights."""
        self.wait_until(lambda: self.serving() == set(numbers))

    def step(self):
        """The number of the newest step in metrics.jsonl."""
        path = self.folder / "n" / "metrics.jsonl"
        return len(metrics(self.folder / "n")[0]) if path.exists() else 0

    def serving(self):
        """Numbers of the hosts whose engines serve the trainer's weights."""
        version = read_json(self.folder / "n" / "queues" / "version.json")
        addresses = re.findall(r"10\.77\.0\.(\d+)", str(version.get("engines")))
        return {int(address) - 1 for address in addresses}

    def stop(self, k):
        """Send SIGTERM to run.sh on this host."""
        host, _ = self.hosts[k]
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)

    def kill(self, k):
        """Kill all processes of a host at once; other hosts see their connections to it closed."""
        host, _ = self.hosts.pop(k)
        host.kill()
        host.wait()

    def cut_off(self, k):
        """Take the power from a host: nothing that it sends arrives, and its processes die."""
        self.enter(self.switch, f"ip link set {self.hosts[k][1]} down")
        self.kill(k)

    def close(self):
        for host, _ in self.hosts.values():
            host.kill()
            host.wait()
        self.switch.kill()
        self.switch.wait()


@pytest.fixture
def hosts(tmp_path):
    for program in ("ip", "nsenter", "unshare"):
        if not shutil.which(program):
            pytest.skip(
                f"hosts are made with `{program}` (iproute2, util-linux), which is not here"
            )
    network = "unshare -n -p -f --mount-proc ip link add v0 type veth peer name v1"
    if subprocess.run(network.split(), capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    with contextlib.closing(Hosts(tmp_path)) as network:
        yield network


def assert_complete(run_dir, steps):
    """Assert that every step of a run is there, and that trainer and engines agreed."""
    lines, evals = metrics(run_dir)
    assert [x["step"] for x in lines] == list(range(1, steps + 1))
    assert max(x["mismatch"] for x in lines if x["mismatch"] is not None) < 1e-3
    assert max(line["version"] for line in evals) == steps


@pytest.mark.slow
def test_engine_hosts_come_and_go_while_the_run_goes_on(hosts, tmp_path):
    argv = ("--batch_size", 64, "--attempts", 8, "--sync_timeout", 10)
    for k in range(3):
        hosts.run(k, 3, *argv, "--steps", 1000)
    hosts.wait_for_engines(1, 2)
    hosts.wait_until(lambda: hosts.step() >= 2)
    assert "node 1 of 3\n  engine0" in hosts.log_text(1)
    assert "node 2 of 3\n  engine1" in hosts.log_text(2)
    # One host joins late.
    hosts.serve(3)
    hosts.wait_for_engines(1, 2, 3)
    # One host loses power.
    hosts.cut_off(2)
    hosts.wait_for_engines(1, 3)
    # One host is stopped.
    hosts.stop(3)
    assert hosts.ends(3) == [143]
    hosts.wait_for_engines(1)
    last_step = hosts.step()
    hosts.wait_until(lambda: hosts.step() > last_step)
    # A node of the run that was gone comes back.
    hosts.run(2, 3, *argv, "--steps", 1000)
    hosts.serve(3)
    hosts.wait_for_engines(1, 2, 3)
    hosts.stop(0)
    assert hosts.ends(0, 1, 2, 3) == [143, 1, 1, 1], hosts.everything()
    for k in (1, 2, 3):
        assert "node 0 (10.77.0.1) has stopped or is gone" in hosts.log_text(k)
    steps = hosts.step() + 10
    # The run's end comes when both engines serve, and not before.
    with standing_still(hosts.fake):
        # This host starts before the run that it serves.
        hosts.serve(3)
        for k in range(2):
            hosts.run(k, 2, *argv, "--steps", steps)
        hosts.wait_until(lambda: "from step_" in hosts.log_text(0))
        hosts.wait_for_engines(1, 3)
    assert hosts.ends(0, 1, 3) == [0, 0, 0], hosts.everything()
    assert "picture" in hosts.log_text(0)
    assert_complete(tmp_path / "n", steps)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_trainer_host_that_dies_ends_the_run_and_the_same_command_continues(hosts, tmp_path):
    argv = ("--batch_size", 64, "--trainers", 2, "--max_lag", 0, "--save_every", 2)
    for k in range(2):
        hosts.run(k, 2, *argv, "--steps", 1000)
    hosts.wait_until(lambda: hosts.step() >= 3)
    hosts.kill(1)
    assert hosts.ends(0) == [1]
    assert "run.sh: train died with exit code" in hosts.log_text(0)
    assert leftovers(tmp_path) == []
    done = hosts.step()
    for k in range(2):
        hosts.run(k, 2, *argv, "--steps", done + 4)
    assert hosts.ends(0, 1) == [0, 0], hosts.everything()
    first = int(re.search(r"continuing .* from step_(\d+)", hosts.log_text(0))[1])
    assert first % 2 == 0 and 2 <= first <= done
    assert (tmp_path / "n" / "logs" / "train1.log").exists()
    assert_complete(tmp_path / "n", done + 4)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_host_that_serves_ends_when_node_0_loses_power(hosts, tmp_path):
    for k in range(2):
        hosts.run(k, 2, "--steps", 1000, "--batch_size", 64)
    hosts.wait_for_engines(1)
    hosts.cut_off(0)
    assert hosts.ends(1) == [1]
    assert "node 0 (10.77.0.1) has stopped or is gone" in hosts.log_text(1)
    assert leftovers(tmp_path) == []

"""Several nodes: who finds whom, what runs where, what becomes of the others when one dies. The hosts are network namespaces with addresses of
their own and one directory that they share; processes, sockets and kills are real."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import actor
import config as cfg
import launch
from conftest import ROOT
from fake_engine import fake_vllm
from test_run import leftovers, metrics

KNOBS = ("--port", "8860", "--eval_problems", "32", "--eval_every", "0", "--start_timeout", "280")


@pytest.mark.parametrize("env,expected", [
    ({}, (0, 1)), ({"NNODES": "4", "NODE_RANK": "3"}, (3, 4)), ({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "RANK": "9"}, (1, 2)),
    ({"SLURM_NNODES": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}, (1, 2)), ({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, (0, 1)),
    ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, (0, 2))])
def test_a_node_knows_itself_by_the_usual_variables(env, expected):
    assert launch.which_node(env) == expected


def test_wrong_variables_and_addresses_are_refused():
    with pytest.raises(cfg.ConfigError, match="NNODES=2 NODE_RANK=2"):
        launch.which_node({"NNODES": "2", "NODE_RANK": "2"})
    with pytest.raises(cfg.ConfigError, match="127.0.0.1, which no other node can reach: set NODE_ADDR"):
        launch.own_address({"MASTER_ADDR": "127.0.0.1"})
    assert launch.own_address({"NODE_ADDR": "10.1.2.3", "MASTER_ADDR": "127.0.0.1"}) == "10.1.2.3"
    assert launch.interface("127.0.0.1") == "lo" and launch.interface("192.0.2.1") == ""


@pytest.mark.parametrize("gpus,nodes,argv,engines,trainers", [
    (8, 2, [], [(1, [g]) for g in range(8)], (8, 1)),  # one node serves, one trains
    (8, 3, [], [(2, [g]) for g in range(8)] + [(n, [g]) for n in (0, 1) for g in (0, 1)], (12, 2)),  # halves: two nodes are split
    (8, 2, ["--trainers", "8", "--trainer_nodes", "2", "--tensor_parallel", "2"], [(n, [g, g + 1]) for n in (0, 1) for g in (0, 2)], (8, 2)),
    (8, 16, ["--trainers", "80", "--engines", "48"], [(n, [g]) for n in range(10, 16) for g in range(8)], (80, 10)),  # the paper's
    (1, 2, [], [(1, [0])], (1, 1)),
    (0, 3, [], [(1, []), (2, [])], (1, 1)),
    (0, 2, ["--trainers", "2", "--trainer_nodes", "2"], [(0, [])], (2, 2))])
def test_placement_over_nodes(gpus, nodes, argv, engines, trainers):
    c = cfg.parse(["toy", "--port", "8786", *argv], gpus)
    c.nodes = ("127.0.0.1", *(f"10.0.0.{k}" for k in range(1, nodes)))
    c = cfg.resolve(c, gpus)
    assert cfg.spread(c, gpus) == engines and (c.trainers, c.trainer_nodes) == trainers
    placed = [launch.placement(c, gpus, k) for k in range(nodes)]
    assert [f"engine{i}" for i in range(len(engines))] == sorted((name for p in placed for name, _, _ in p if name.startswith("engine")), key=lambda x: int(x[6:]))
    assert [{name for name, _, _ in p if not name.startswith("engine")} for p in placed] == [({"actor", "preprocess"} if k == 0 else set()) | ({"train"} if k < trainers[1] else set()) for k in range(nodes)]
    for k, p in enumerate(placed):  # no GPU twice
        used = [g for name, env, _ in p if name != "actor" and name != "preprocess" for g in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
        assert len(used) == len(set(used)) and set(used) <= {str(g) for g in range(gpus)}
        assert all(c.urls[int(name[6:])].startswith(f"http://{c.nodes[k]}:") for name, _, _ in p if name.startswith("engine"))


def test_ranks_that_do_not_go_into_the_nodes_are_refused():
    c = cfg.parse(["toy", "--port", "8786", "--trainers", "9", "--engines", "1"], 8)
    c.nodes = ("127.0.0.1", "10.0.0.1")
    with pytest.raises(cfg.ConfigError, match="9 trainer ranks cannot be shared out equally over any number of 2 nodes of 8 GPUs"):
        cfg.resolve(c, 8)


@pytest.mark.parametrize("actors", [1, 2, 3])
def test_actors_share_every_allowance(actors):
    c = cfg.Config(actors=actors, attempts=4, batch_size=8)
    for samples in range(0, 200, 4):
        assert sum(actor.share(samples, c, k) for k in range(actors)) == samples


def sign(folder, node, command="toy", **values):
    s = launch.Sign(folder, node, token=f"token{node}{time.monotonic_ns()}", address=f"10.0.0.{node}", gpus=0, command=command, **values)
    s.write()
    return s


def alive(s, stop):
    """A node that waits for node 0's answer, in a thread; returns the thread's result, [tokens] or [error]."""
    result = []

    def run():
        try:
            result.append(launch.await_answer(s, 20))
        except cfg.ConfigError as e:
            result.append(str(e))
    threading.Thread(target=run, daemon=True).start()
    return result


def test_nodes_meet_whatever_lies_there_from_before(tmp_path):
    old, me = sign(tmp_path, 1), sign(tmp_path, 0)  # a dead run's file: it gives no sign of life
    launch.notice(tmp_path / "launch.json", tokens=[old.values["token"]], error="an old answer")
    with pytest.raises(cfg.ConfigError, match="nodes 1 of 2 did not come"):
        launch.gather(me, 2, 2)
    new = sign(tmp_path, 1)
    answer = alive(new, None)
    me = sign(tmp_path, 0)
    assert [x["token"] for x in launch.gather(me, 2, 20)] == [me.values["token"], new.values["token"]]
    assert answer == []  # it does not take the old one's
    launch.notice(tmp_path / "launch.json", tokens=[me.values["token"], new.values["token"]], error="")
    while not answer:
        time.sleep(0.1)
    assert answer == [[me.values["token"], new.values["token"]]]


def test_different_commands_and_a_second_launcher_are_refused(tmp_path):
    me, other = sign(tmp_path, 0, command="toy --lr 1"), sign(tmp_path, 1, command="toy --lr 2")
    answer = alive(other, None)
    with pytest.raises(cfg.ConfigError, match=r"node 1 \(10.0.0.1\) has another command \(toy --lr 2\) than node 0"):
        launch.gather(me, 2, 20)
    with pytest.raises(cfg.ConfigError, match="is in progress on 10.0.0.1 as node 1, or still stopping"):
        launch.Sign(tmp_path, 1).claim()
    launch.Sign(tmp_path, 0).claim()  # no sign of life from this one
    launch.notice(tmp_path / "launch.json", tokens=[other.values["token"]], error="no")
    while not answer:
        time.sleep(0.1)
    assert answer == ["node 0 refused: no"]


def test_a_silent_node_is_named_and_a_stopped_one_quoted(tmp_path):
    c = cfg.Config(run="r", out=str(tmp_path), nodes=("10.0.0.0", "10.0.0.1", "10.0.0.2"))
    run_dir, folder = launch.write(c), tmp_path / ".nodes" / "r"

    def start():
        signs = [sign(folder, k) for k in range(3)]
        launch.notice(folder / "launch.json", tokens=[s.values["token"] for s in signs], error="")
        nodes = [subprocess.Popen([sys.executable, "launch.py", "watch", str(run_dir), str(k), signs[k].values["token"], str(tmp_path / f"why{k}")], cwd=ROOT, stderr=subprocess.PIPE, text=True) for k in range(3)]
        while any(launch.noticed(folder / f"{k}.json")["beat"] < 3 for k in range(3)):
            time.sleep(0.1)
        return nodes
    nodes = start()
    nodes[2].kill()
    assert [p.wait(60) for p in nodes[:2]] == [1, 1]
    words = [p.stderr.read() for p in nodes[:2]]
    assert all("nodes: node 2 (10.0.0.2) has given no sign of life for 20 s" in w for w in words)
    # a node that stops says why, and goes on giving signs of life until it is told to end
    nodes = start()
    (tmp_path / "why1").write_text("actor died with exit code 1\n")
    nodes[1].send_signal(signal.SIGUSR1)
    assert nodes[0].wait(30) == 1 and "nodes: node 1 (10.0.0.1) has stopped: actor died with exit code 1" in nodes[0].stderr.read()
    assert nodes[1].poll() is None
    (tmp_path / "why1").write_text("done\n")
    nodes[1].terminate()
    assert nodes[1].wait(30) == 0 and nodes[2].wait(30) == 1
    # the end of node 0 is everybody's
    nodes = start()
    (tmp_path / "why0").write_text("done\n")
    nodes[0].send_signal(signal.SIGUSR1), nodes[0].terminate()  # both at once, as run.sh does when its trainer has ended
    assert [p.wait(30) for p in nodes] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ whole runs on several hosts

def sh(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=30)


class Hosts:
    """Network namespaces 10.77.0.1, 10.77.0.2, ... joined by a bridge in another one. Each host's processes are in a PID namespace of their own."""

    def __init__(self, n, folder):
        self.folder, self.n, self.number = folder, n, 0
        self.switch = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
        self.hosts = {}
        self.enter(self.switch, "ip link add br0 type bridge; ip link set br0 up")

    def enter(self, process, script):
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):  # it has not come to unshare yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sh("nsenter", "-t", process.pid, "-n", "bash", "-ec", script)

    def start(self, k, n, *argv, **environment):
        """Boot host k and let it run run.sh as node k of n. Its words go to <folder>/host<k>.txt."""
        self.number += 1
        link, log = f"v{self.number}", self.folder / f"host{k}.txt"
        environment = os.environ | environment | {"NNODES": str(n), "NODE_RANK": str(k), "MASTER_ADDR": "10.77.0.1", "RUN_MARK": str(self.folder)}
        begin = 'until ip addr | grep -q 10.77.0; do sleep 0.05; done; exec bash run.sh "$@"'
        host = subprocess.Popen(["unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child", "bash", "-c", begin, "run", "toy", "--out", str(self.folder), "--run", "n", *KNOBS, *map(str, argv)],
                                cwd=ROOT, env=environment, stdout=open(log, "w"), stderr=subprocess.STDOUT)
        self.enter(host, "ip link set lo up")
        self.enter(self.switch, f"ip link add {link} type veth peer name eth0 netns {host.pid}; ip link set {link} master br0 up")
        self.enter(host, f"ip link set eth0 up; ip addr add 10.77.0.{k + 1}/24 dev eth0")
        self.hosts[k] = host, link
        return host

    def words(self, k):
        return (self.folder / f"host{k}.txt").read_text()

    def wait_for(self, k, text, seconds=280):
        deadline = time.monotonic() + seconds
        while text not in self.words(k):
            assert time.monotonic() < deadline and self.hosts[k][0].poll() is None, "\n".join(self.words(j) for j in self.hosts)
            time.sleep(0.1)

    def cut_off(self, k):
        """Power loss: nothing it sends arrives any more, and all of it is dead."""
        host, link = self.hosts.pop(k)
        self.enter(self.switch, f"ip link set {link} down")
        host.kill()
        host.wait()

    def close(self):
        for host, _ in self.hosts.values():
            host.kill()
            host.wait()
        self.switch.kill()
        self.switch.wait()


@pytest.fixture
def hosts(tmp_path):
    for what in ("ip", "nsenter", "unshare"):
        if not shutil.which(what):
            pytest.skip(f"hosts are made with `{what}` (iproute2, util-linux), which is not here")
    if subprocess.run(["unshare", "-n", "-p", "-f", "--mount-proc", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    made = Hosts(3, tmp_path)
    with contextlib.closing(made):
        yield made


def test_three_hosts_train_one_dies_and_the_same_command_continues(hosts, tmp_path, base_model):
    argv = ("--steps", 12, "--batch_size", 128, "--save_every", 100)
    for k in range(3):
        hosts.start(k, 3, *argv)
    hosts.wait_for(0, "step 3/12")
    assert "trainer + 2 of 2 engines" in hosts.words(0) and "node 1  engine0" in hosts.words(1) and "node 2  engine1" in hosts.words(2)
    hosts.cut_off(2)
    for k in (0, 1):  # seen within 30 s; then whatever it is doing is saved
        assert hosts.hosts[k][0].wait(90) == 1
        assert "node 2 (10.77.0.3) has given no sign of life" in hosts.words(k)
    version = int(re.search(r"version (\d+) is saved", hosts.words(0))[1])
    assert version >= 3 and (tmp_path / "n" / "checkpoints" / f"step_{version:06d}").exists()
    assert leftovers(tmp_path) == []
    fake = str(fake_vllm(tmp_path / "fake"))  # FAKE engines, to save the real ones' start
    for k in range(3):
        hosts.start(k, 3, *argv, PYTHONPATH=fake)
    assert [hosts.hosts[k][0].wait(400) for k in range(3)] == [0, 0, 0], "\n".join(hosts.words(k) for k in range(3))
    assert f"from step {version}" in hosts.words(0) and "picture" in hosts.words(0)
    steps, _ = metrics(tmp_path / "n")
    assert [x["step"] for x in steps] == list(range(1, 13)) and max(x["mismatch"] for x in steps if x["mismatch"] is not None) < 1e-3
    assert leftovers(tmp_path) == []


def test_trainer_ranks_on_two_hosts(hosts, tmp_path, base_model):
    """With a FAKE engine, to save its start; the real one is in the test above."""
    fake = str(fake_vllm(tmp_path / "fake"))
    for k in range(2):
        hosts.start(k, 2, "--steps", 3, "--batch_size", 64, "--trainers", 2, "--trainer_nodes", 2, "--max_lag", 0, PYTHONPATH=fake)
    assert [hosts.hosts[k][0].wait(280) for k in range(2)] == [0, 0], "\n".join(hosts.words(k) for k in range(2))
    assert [x["samples"] for x in metrics(tmp_path / "n")[0]] == [64, 128, 192]
    assert "accelerate" in (tmp_path / "n" / "logs" / "train.node1.log").read_text()

"""Several nodes: who finds whom, what runs where, what becomes of the others when one dies. The hosts are network namespaces with addresses of
their own and one directory that they share; processes, sockets and kills are real."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import config as cfg
from conftest import ROOT
from fake_engine import fake_vllm
from plumbing import hardware, launch, nodes
from plumbing.queues import read_json
from test_run import leftovers, metrics

KNOBS = ("--port", "8860", "--eval_problems", "32", "--eval_every", "0", "--start_timeout", "280")


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
def test_a_node_knows_itself_by_the_usual_variables(env, expected):
    assert nodes.which_node(env) == expected


def test_wrong_variables_and_addresses_are_refused():
    with pytest.raises(cfg.ConfigError, match="NNODES=2 NODE_RANK=2"):
        nodes.which_node({"NNODES": "2", "NODE_RANK": "2"})
    with pytest.raises(cfg.ConfigError, match="127.0.0.1, which no other node can reach: set NODE"):
        nodes.own_address({"MASTER_ADDR": "127.0.0.1"})
    env = {"NODE_ADDR": "10.1.2.3", "MASTER_ADDR": "127.0.0.1"}
    assert nodes.own_address(env) == "10.1.2.3"
    assert nodes.interface("127.0.0.1") == "lo"
    assert nodes.interface("192.0.2.1") == ""


ALL = "0 1 2 3 4 5 6 7"  # every GPU of a node has an engine


@pytest.mark.parametrize(
    "gpus,n,knobs,engines,trainers",
    [
        # one node serves, one trains
        (8, 2, "", {1: ALL}, (8, 1)),
        # halves: two nodes are split
        (8, 3, "", {2: ALL, 0: "0 1", 1: "0 1"}, (12, 2)),
        # the fewest nodes that hold the ranks, so that few are split
        (8, 2, "--trainers 8 --tensor_parallel 2", {1: "01 23 45 67"}, (8, 1)),
        # the paper's
        (8, 16, "--trainers 80 --engines 48", dict.fromkeys(range(10, 16), ALL), (80, 10)),
        (1, 2, "", {1: "0"}, (1, 1)),
        (0, 3, "", {1: "-", 2: "-"}, (1, 1)),
        (0, 2, "--trainers 2", {0: "-"}, (2, 2)),
    ],
)
def test_placement_over_nodes(gpus, n, knobs, engines, trainers):
    c = cfg.parse(["toy", "--port", "9440", *knobs.split()], gpus)
    c.nodes = ("127.0.0.1", *(f"10.0.0.{k}" for k in range(1, n)))
    c = launch.resolve(c, gpus)
    found = {}
    for node, own in launch.spread(c, gpus):
        found.setdefault(node, []).append("".join(map(str, own)) or "-")
    assert {node: " ".join(words) for node, words in found.items()} == engines
    assert (c.trainers, hardware.trainer_nodes(c, gpus)) == trainers
    urls = launch.urls(c, gpus)
    for k in range(n):
        processes = {name: env for name, env, _ in launch.placement(c, gpus, k)}
        here = [f"engine{i}" for i, url in enumerate(urls) if f"//{c.nodes[k]}:" in url]
        if k == 0:
            here += ["actor", "preprocess"]
        if k < trainers[1]:
            each = trainers[0] // trainers[1]
            here += [
                f"train{rank}" if rank else "train" for rank in range(each * k, each * (k + 1))
            ]
        assert list(processes) == here
        # no GPU twice
        used = ",".join(env.get("CUDA_VISIBLE_DEVICES", "") for env in processes.values())
        used = [g for g in used.split(",") if g]
        assert len(set(used)) == len(used)


def test_ranks_that_do_not_go_into_the_nodes_are_refused():
    c = cfg.parse(["toy", "--port", "9440", "--trainers", "9", "--engines", "1"], 8)
    c.nodes = ("127.0.0.1", "10.0.0.1")
    with pytest.raises(cfg.ConfigError, match="cannot be shared out equally over 2 nodes of 8 GPU"):
        launch.resolve(c, 8)


# ---- the meeting: real launchers on this machine


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Meeting:
    """Launchers that are node k of n, here; their words."""

    def __init__(self, folder, n):
        self.folder = folder
        self.n = n
        self.launchers = {}
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.port = free_port() + 1

    def start(self, k, *argv):
        knobs = ["toy", "--out", self.folder, "--model", self.folder / "model"]
        knobs += ["--port", self.port, *argv]
        env = {"NNODES": self.n, "NODE_RANK": k, "MASTER_ADDR": "127.0.0.1"}
        # loopback's is refused
        env["NODE_ADDR"] = own_address()
        self.launchers[k] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "plumbing.launch",
                *map(str, [self.folder / f"list{k}", *knobs]),
            ],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in env.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def list(self, k):
        """What node k's launcher tells run.sh: (head, {process: command})."""
        lines = (self.folder / f"list{k}").read_text().splitlines()
        return lines[:4], dict(line.split("\t") for line in lines[4:])

    def ends(self):
        """Of every launcher that was started: (exit code, stdout, stderr)."""
        found = {}
        for k, launcher in self.launchers.items():
            out, err = launcher.communicate(timeout=90)
            found[k] = (launcher.returncode, out, err)
        return found


def own_address():
    """An address of this machine other than loopback's; skips without one."""
    try:
        return nodes.own_address({"MASTER_ADDR": "192.0.2.1"})
    except cfg.ConfigError:
        pytest.skip("this machine has only the loopback address")


@pytest.fixture
def meeting(tmp_path):
    made = Meeting(tmp_path, 3)
    yield made
    for p in made.launchers.values():
        p.kill()
        p.communicate()


@pytest.mark.slow
def test_nodes_meet_and_start_as_node_0_says(meeting):
    # in whatever order
    meeting.start(2)
    time.sleep(3)
    meeting.start(0)
    meeting.start(1)
    ends = meeting.ends()
    assert "new run" in ends[0][1]
    for k, expected in enumerate(("actor preprocess train", "engine0", "engine1")):
        code, words, _ = ends[k]
        assert code == 0, ends
        assert ("as node 0 says" in words) == (k > 0)
        head, processes = meeting.list(k)
        assert head[1:3] == [str(k), f".node{k}" if k else ""]
        assert " ".join(processes) == f"nodes {expected}"
        role = "follow" if k else "host"
        assert f"plumbing.nodes {role} 127.0.0.1 {meeting.port - 1}" in processes["nodes"]


@pytest.mark.slow
def test_unlike_commands_are_refused_on_every_node(meeting):
    for k in range(3):
        meeting.start(k, "--lr", "2" if k == 1 else "1")
    for k, (code, _, words) in meeting.ends().items():
        assert code == 1
        assert len(words.splitlines()) == 1
        assert "has another command (toy " in words
        assert ("node 0 refused" in words) == (k > 0)


@pytest.mark.slow
def test_an_error_of_node_0_is_everybodys(meeting):
    for k in range(3):
        meeting.start(k, "--batch_size", "7")
    for code, _, words in meeting.ends().values():
        assert code == 1
        assert "--batch_size 7 is not a multiple" in words


@pytest.mark.slow
def test_missing_nodes_are_named(meeting):
    meeting.start(0, "--start_timeout", "5")
    meeting.start(2, "--start_timeout", "5")
    for code, _, words in meeting.ends().values():
        assert code == 1
        assert "nodes 1 of 3 did not come within 5 s" in words


@pytest.mark.slow
def test_a_missing_node_0_is_named(meeting):
    meeting.start(1, "--start_timeout", "3")
    code, _, words = meeting.ends()[1]
    assert code == 1
    assert "node 0 (127.0.0.1:" in words
    assert "has not answered for 3 s" in words


@pytest.mark.slow
def test_a_second_launcher_of_node_0_is_refused(meeting):
    meeting.start(0)
    time.sleep(6)
    first = meeting.launchers.pop(0)
    meeting.start(0)
    code, _, words = meeting.ends()[0]
    first.kill()
    first.communicate()
    assert code == 1
    assert "(--port - 1): Address already in use: is the run in progress" in words


# ---- word of the end


@pytest.fixture
def spoken(tmp_path):
    """node 0's process, those of two others, and a newcomer's launcher; they are ended."""
    made = []
    port = str(free_port())
    arguments = [
        ["host", "127.0.0.1", port, str(tmp_path / "why")],
        *[["follow", "127.0.0.1", port]] * 2,
    ]
    for words in arguments:
        made.append(
            subprocess.Popen(
                [sys.executable, "-m", "plumbing.nodes", *words],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    yield made, int(port)
    for p in made:
        p.kill()
        p.communicate()


def wait_for_port(port):
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("why,code", [("done", 0), ("actor died with exit code 1", 1)])
def test_node_0_says_that_it_is_over_and_why(spoken, tmp_path, why, code):
    processes, port = spoken
    wait_for_port(port)
    with pytest.raises(cfg.ConfigError, match="the run is in progress; `bash run.sh serve"):
        nodes.join(1, "127.0.0.1", port, 30, {})
    (tmp_path / "why").write_text(why + "\n")
    time.sleep(4)
    assert [p.poll() for p in processes] == [None] * 3
    processes[0].terminate()
    assert [p.wait(30) for p in processes] == [0, code, code]
    if code:
        assert f"nodes: node 0 (127.0.0.1) has stopped: {why}" in processes[1].stderr.read()


@pytest.mark.slow
def test_a_node_0_that_hangs_is_noticed(spoken):
    processes, port = spoken
    wait_for_port(port)
    time.sleep(8)
    processes[0].send_signal(signal.SIGSTOP)
    assert [p.wait(100) for p in processes[1:]] == [1, 1]
    assert "nodes: node 0 (127.0.0.1:" in processes[1].stderr.read()


# ---- whole runs on several hosts


def sh(*command):
    subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=30)


class Hosts:
    """Network namespaces 10.77.0.1, 10.77.0.2, ... joined by a bridge in another one. Each host's processes are in a PID namespace of their own.

    The engines are FAKE ones, to save the real ones' start.
    """

    def __init__(self, folder):
        self.folder = folder
        self.switch = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
        self.hosts = {}
        self.fake = str(fake_vllm(folder / "fake"))
        self.enter(self.switch, "ip link add br0 type bridge; ip link set br0 up")

    def enter(self, process, script):
        deadline = time.monotonic() + 10
        # it has not come to unshare yet
        while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sh("nsenter", "-t", process.pid, "-n", "bash", "-ec", script)

    def run(self, k, n, *argv):
        """Boot host k as node k of n of a run."""
        knobs = ("toy", "--out", self.folder, "--run", "n", *KNOBS, *argv)
        return self.boot(k, knobs, NNODES=n, NODE_RANK=k, MASTER_ADDR="10.77.0.1")

    def serve(self, k):
        """Boot host k with an engine for that run."""
        return self.boot(k, ("serve", "--out", self.folder, "--run", "n"))

    def boot(self, k, argv, **environment):
        """Start a host that runs run.sh. Its words go to <folder>/host<k>.txt."""
        link = f"v{k}"
        environment |= {"RUN_MARK": self.folder, "PYTHONPATH": self.fake}
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
        # the same hardware address at every boot, as the others remember it
        eth0 = f"name eth0 address 02:00:00:00:00:{k + 1:02x} netns {host.pid}"
        cable = f"ip link add {link} type veth peer {eth0}; ip link set {link} master br0 up"
        self.enter(self.switch, f"ip link del {link} 2> /dev/null || true; {cable}")
        self.enter(host, f"ip link set eth0 up; ip addr add 10.77.0.{k + 1}/24 dev eth0")
        self.hosts[k] = host, link
        return host

    def words(self, k):
        return (self.folder / f"host{k}.txt").read_text()

    def everything(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("host*.txt")))

    def wait_until(self, true, seconds=200):
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, self.everything()
            assert all(host.poll() is None for host, _ in self.hosts.values()), self.everything()
            time.sleep(0.1)

    def ends(self, *numbers, seconds=300):
        """Wait for the ends of these hosts; their exit codes."""
        codes = []
        for k in numbers:
            try:
                codes.append(self.hosts[k][0].wait(seconds))
            except subprocess.TimeoutExpired:
                pytest.fail(self.everything())
            self.hosts.pop(k)
        return codes

    def wait_for_engines(self, *numbers):
        """Until exactly these hosts' engines serve the trainer's weights."""
        self.wait_until(lambda: self.serving() == set(numbers))

    def step(self):
        """The newest step in metrics.jsonl."""
        path = self.folder / "n" / "metrics.jsonl"
        return len(metrics(self.folder / "n")[0]) if path.exists() else 0

    def serving(self):
        """Numbers of the hosts whose engines serve the trainer's weights."""
        said = read_json(self.folder / "n" / "queues" / "version.json")
        addresses = re.findall(r"10\.77\.0\.(\d+)", str(said.get("engines")))
        return {int(address) - 1 for address in addresses}

    def stop(self, k):
        """SIGTERM to run.sh there."""
        host, _ = self.hosts[k]
        children = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)

    def kill(self, k):
        """All of its processes die at once; the others' connections to it are closed."""
        host, _ = self.hosts.pop(k)
        host.kill()
        host.wait()

    def cut_off(self, k):
        """Power loss: nothing it sends arrives any more, and all of it is dead."""
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
    for what in ("ip", "nsenter", "unshare"):
        if not shutil.which(what):
            pytest.skip(f"hosts are made with `{what}` (iproute2, util-linux), which is not here")
    network = "unshare -n -p -f --mount-proc ip link add v0 type veth peer name v1"
    if subprocess.run(network.split(), capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    made = Hosts(tmp_path)
    with contextlib.closing(made):
        yield made


def whole(run_dir, steps):
    """Assert that every step of a run is there, and that trainer and engines agreed."""
    lines, evals = metrics(run_dir)
    assert [x["step"] for x in lines] == list(range(1, steps + 1))
    assert max(x["mismatch"] for x in lines if x["mismatch"] is not None) < 1e-3
    assert evals[-1]["version"] == steps


@pytest.mark.slow
def test_engine_hosts_come_and_go_while_the_run_goes_on(hosts, tmp_path):
    argv = ("--batch_size", 64, "--attempts", 8, "--sync_timeout", 10)
    for k in range(3):
        hosts.run(k, 3, *argv, "--steps", 1000)
    hosts.wait_for_engines(1, 2)
    hosts.wait_until(lambda: hosts.step() >= 2)
    assert "node 1 engine0" in hosts.words(1)
    assert "node 2 engine1" in hosts.words(2)
    # one that joins late
    hosts.serve(3)
    hosts.wait_for_engines(1, 2, 3)
    # one that loses power
    hosts.cut_off(2)
    hosts.wait_for_engines(1, 3)
    # one that is stopped
    hosts.stop(3)
    assert hosts.ends(3) == [143]
    hosts.wait_for_engines(1)
    then = hosts.step()
    hosts.wait_until(lambda: hosts.step() > then)
    # one that joins the run after this, too
    hosts.serve(3)
    hosts.wait_for_engines(1, 3)
    hosts.stop(0)
    assert hosts.ends(0, 1) == [143, 1], hosts.everything()
    assert "node 0 (10.77.0.1) has stopped: terminated" in hosts.words(1)
    steps = hosts.step() + 10
    for k in range(2):
        hosts.run(k, 2, *argv, "--steps", steps)
    hosts.wait_until(lambda: "from step" in hosts.words(0))
    hosts.wait_for_engines(1, 3)
    assert hosts.ends(0, 1, 3) == [0, 0, 0], hosts.everything()
    assert "picture" in hosts.words(0)
    whole(tmp_path / "n", steps)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_trainer_host_that_dies_ends_the_run_and_the_same_command_continues(hosts, tmp_path):
    argv = ("--steps", 8, "--batch_size", 64, "--trainers", 2, "--max_lag", 0, "--save_every", 2)
    for k in range(2):
        hosts.run(k, 2, *argv)
    hosts.wait_until(lambda: hosts.step() >= 3)
    hosts.kill(1)
    assert hosts.ends(0, seconds=100) == [1]
    assert "run.sh: train died with exit code" in hosts.words(0)
    assert leftovers(tmp_path) == []
    for k in range(2):
        hosts.run(k, 2, *argv)
    assert hosts.ends(0, 1) == [0, 0], hosts.everything()
    assert re.search(r"continuing .* from step [246] ", hosts.words(0))
    assert (tmp_path / "n" / "logs" / "train1.node1.log").exists()
    whole(tmp_path / "n", 8)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_host_that_serves_ends_when_node_0_loses_power(hosts, tmp_path):
    for k in range(2):
        hosts.run(k, 2, "--steps", 1000, "--batch_size", 64)
    hosts.wait_for_engines(1)
    hosts.cut_off(0)
    assert hosts.ends(1, seconds=150) == [1]
    assert "node 0 (10.77.0.1:8859) has not answered for 30 s" in hosts.words(1)
    assert leftovers(tmp_path) == []

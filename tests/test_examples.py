"""examples/: the commands in these files are run, dry, as their clusters would: who is which node, what would be started."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import yaml

from conftest import ROOT
from plumbing import nodes

DRY = ["--dry_run", "True", "--memory_check", "False"]
GPUS = ",".join(map(str, range(8)))
# run.sh's environment is written down, then it runs
RECORDER = """#!{python}
import json, os, sys
if "run.sh" in sys.argv and "setup" not in sys.argv:
    with open(f"{folder}/run.{{os.getpid()}}.json", "w") as file:
        json.dump(dict(os.environ), file)
os.execv("{bash}", ["bash", *sys.argv[1:]])
"""
# FAKE: SLURM's srun, here; all tasks of a step one after the other
SRUN = """#!{python}
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--kill")]
command = sys.argv[1 + len(options):]
codes = []
for node in os.environ["FAKE_NODES"].split():
    env = os.environ | {{"SLURM_STEP_NUM_NODES": os.environ["SLURM_NNODES"], "SLURM_NODEID": node}}
    codes.append(subprocess.run(command, env=env).returncode)
sys.exit(int(os.environ.get("FAKE_CODE", max(codes, default=0))))
"""
# FAKE: of the nodes n[01-16]; what else it is told is written down
SCONTROL = """#!/bin/sh
echo "$*" >> "{folder}/scontrol.txt"
[ "$1" != show ] || for k in $(seq -w 1 16); do echo "n$k"; done
"""


class Cluster:
    """Programs that stand in for a cluster's, before all others on the PATH."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.env["PATH"] = f"{folder}:{os.environ['PATH']}"
        self.env["CUDA_VISIBLE_DEVICES"] = GPUS
        self.env["PIPELINE_PYTHON"] = sys.executable
        self.bash = shutil.which("bash")
        self.add("bash", RECORDER)

    def add(self, name, text):
        path = self.folder / name
        path.write_text(text.format(folder=self.folder, python=sys.executable, bash=self.bash))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def start(self, words, **env):
        return subprocess.Popen(
            [self.bash, *words],
            cwd=ROOT,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, words, **env):
        """(exit code, what was said)"""
        process = self.start(words, **env)
        said = process.communicate(timeout=100)[0]
        return process.returncode, said

    def runs(self):
        """[((node, number of nodes), MASTER_ADDR)] of every run.sh that has been started."""
        found = []
        for path in sorted(self.folder.glob("run.*.json")):
            env = json.loads(path.read_text())
            found.append((nodes.which_node(env), env["MASTER_ADDR"]))
        return sorted(found)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def placed(said):
    """What a dry run says: (engines, trainer ranks, GPUs), {node: its processes}."""
    total = re.search(r"(\d+) engines, (\d+) trainer ranks on (\d+) GPUs \| bfloat16", said)
    where = {}
    for node, name in re.findall(r"^  node (\d+) (\S+)", said, re.M):
        where.setdefault(int(node), []).append(name)
    return tuple(map(int, total.groups())), where


def named(name, first, last):
    return [f"{name}{k}" if k or name == "engine" else name for k in range(first, last)]


def test_slurm(cluster):
    cluster.add("srun", SRUN)
    cluster.add("scontrol", SCONTROL)
    text = (ROOT / "examples" / "slurm.sh").read_text()
    options = dict(re.findall(r"--([a-z-]+)=(\S+)", "\n".join(re.findall("#SBATCH.*", text))))
    assert options["gpus-per-node"] == "8" and options["ntasks-per-node"] == "1"
    job = {"SLURM_NNODES": options["nodes"], "SLURM_JOB_NODELIST": "n[01-16]", "SLURM_JOB_ID": "7"}
    # the batch script is node 0's, before its step
    job |= {"SLURM_NODEID": "0", "FAKE_NODES": "0 15"}
    code, said = cluster.run(["examples/slurm.sh", *DRY, "--concurrency", "16"], **job)
    assert code == 0, said
    assert cluster.runs() == [((0, 16), "n01"), ((15, 16), "n01")]
    # the same words from both
    assert said.count("dry run, nothing is started") == 2
    total, where = placed(said[: len(said) // 2])
    assert total == (48, 80, 128)
    assert where[0] == ["actor", "preprocess", *named("train", 0, 8)]
    assert where[9] == named("train", 72, 80)
    assert where[10] == named("engine", 0, 8)
    assert where[15] == named("engine", 40, 48)
    # the ranks meet at node 0
    assert "RANK=79 WORLD_SIZE=80 LOCAL_RANK=0 'MASTER_ADDR=<node 0>'" in said


@pytest.mark.parametrize("code,told", [(143, "requeue 7"), (1, "show hostnames n1")])
def test_slurm_starts_a_job_again_whose_time_was_up(cluster, tmp_path, code, told):
    cluster.add("srun", SRUN)
    cluster.add("scontrol", SCONTROL)
    job = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}
    job |= {"FAKE_NODES": "", "FAKE_CODE": str(code)}
    assert cluster.run(["examples/slurm.sh"], **job)[0] == code
    assert (tmp_path / "scontrol.txt").read_text().splitlines()[-1] == told


def test_torchrun(cluster):
    """torch's own, twice on this machine."""
    words = ["examples/torchrun.sh", "2"]
    both = [cluster.start([*words, str(k), "127.0.0.1", "math", *DRY]) for k in range(2)]
    ends = [process.communicate(timeout=100)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert cluster.runs() == [((0, 2), "127.0.0.1"), ((1, 2), "127.0.0.1")]
    for said in ends:
        total, where = placed(said)
        assert total == (8, 8, 16)
        assert where == {
            0: ["actor", "preprocess", *named("train", 0, 8)],
            1: named("engine", 0, 8),
        }


def documents():
    """{kind: document} of examples/kubernetes.yaml."""
    text = (ROOT / "examples" / "kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_kubernetes(cluster):
    found = documents()
    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    n = job["completions"]
    assert job["parallelism"] == n
    # FAKE: a cluster's name service
    cluster.add("getent", "#!/bin/sh\n")
    given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    program, option = container["command"]
    (script,) = container["args"]
    dry = script.rstrip() + " " + " ".join(DRY)
    for index in range(n):
        # the rest Kubernetes fills in
        own = given | {"JOB_COMPLETION_INDEX": str(index), "NODE_ADDR": f"10.0.0.{index}"}
        code, said = cluster.run([option, dry], **own)
        assert program == "bash" and code == 0, said
        total, where = placed(said)
        assert total == (8, 8, 16)
        assert where == {
            0: ["actor", "preprocess", *named("train", 0, 8)],
            1: named("engine", 0, 8),
        }
        assert "/shared/out/math" in said
    # a name of node 0 that the service gives it
    service = found["Service"]
    name = f"{found['Job']['metadata']['name']}-0.{service['metadata']['name']}"
    assert cluster.runs() == [((k, n), name) for k in range(n)]
    assert pod["subdomain"] == service["metadata"]["name"]
    selected = service["spec"]["selector"]["batch.kubernetes.io/job-name"]
    assert selected == found["Job"]["metadata"]["name"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_kubernetes_leaves_the_trainer_time_to_save_and_shares_one_volume():
    from config import MATH

    found = documents()
    pod = found["Job"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > MATH["stop_timeout"]
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [{"claimName": found["PersistentVolumeClaim"]["metadata"]["name"]}]
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    mounted = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"shared": "/shared", "shm": "/dev/shm"}


def test_the_image_has_all_that_run_sh_needs():
    """The image itself has not been built: at least every file that the launcher imports is copied."""
    text = (ROOT / "examples" / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY (.*)", text, re.M))
    for name in ("requirements.txt", "*.py", "run.sh", "plumbing", "tasks", "tools"):
        assert f"{name} " in copied
    assert "NOT BUILT" in text.splitlines()[0]

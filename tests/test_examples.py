"""The scripts of examples/: which nodes they start, and with which node number and address.

The scripts, their bash and torchrun are real. The clusters' programs (srun, scontrol, getent) and
run.sh are FAKE.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from config import MATH
from conftest import ROOT, node_of

# FAKE: a bash that writes down the environment and the arguments of run.sh; the real bash runs all
# other programs
BASH = """#!{python}
import json, os, sys
if "run.sh" in sys.argv:
    if "setup" not in sys.argv:
        with open(f"{folder}/run.{{os.getpid()}}.json", "w") as file:
            json.dump([dict(os.environ), sys.argv[2:]], file)
    sys.exit()
os.execv("{bash}", ["bash", *sys.argv[1:]])
"""
# FAKE: SLURM's srun, which runs all tasks of a step here, one after the other
SRUN = """#!/bin/sh
case "$1" in --kill*) shift ;; esac
for node in $FAKE_NODES; do
    SLURM_STEP_NUM_NODES=$SLURM_NNODES SLURM_NODEID=$node "$@" || exit 9
done
exit $FAKE_CODE
"""
# FAKE: SLURM's scontrol for the nodes n[01-16]; it writes down its arguments
SCONTROL = """#!/bin/sh
echo "$*" >> "{folder}/scontrol.txt"
[ "$1" != show ] || for k in $(seq -w 1 16); do echo "n$k"; done
"""
# The variables from which run.sh learns about nodes
NODE = "NODE_RANK NNODES GROUP_RANK GROUP_WORLD_SIZE SLURM_NODEID SLURM_STEP_NUM_NODES".split()


class Cluster:
    """FAKE programs of a cluster, before all others on the PATH."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.env |= {"PATH": f"{folder}:{os.environ['PATH']}", "PIPELINE_PYTHON": sys.executable}
        self.bash = shutil.which("bash")
        self.add("bash", BASH)

    def add(self, name, text):
        path = self.folder / name
        path.write_text(text.format(folder=self.folder, python=sys.executable, bash=self.bash))
        path.chmod(0o755)

    def start(self, arguments, **env):
        return subprocess.Popen([self.bash, *arguments], cwd=ROOT, env=self.env | env)

    def runs(self):
        """Return ((node, number of nodes), MASTER_ADDR, arguments) of every run.sh."""
        runs = []
        for path in self.folder.glob("run.*.json"):
            env, arguments = json.loads(path.read_text())
            node = node_of({k: v for k, v in env.items() if k in NODE}, self.folder)
            runs.append((node, env["MASTER_ADDR"], " ".join(arguments)))
        return sorted(runs)


SHOW = "show hostnames n[01-16]"


@pytest.mark.parametrize("code,scontrol_call", [(0, SHOW), (1, SHOW), (143, "requeue 7")])
def test_slurm_starts_every_node_and_requeues_at_the_time_limit(tmp_path, code, scontrol_call):
    cluster = Cluster(tmp_path)
    cluster.add("srun", SRUN)
    cluster.add("scontrol", SCONTROL)
    text = (ROOT / "examples" / "slurm.sh").read_text()
    options = dict(re.findall(r"--([a-z-]+)=(\S+)", "\n".join(re.findall("#SBATCH.*", text))))
    assert options["gpus-per-node"] == "8" and options["ntasks-per-node"] == "1"
    job = {"SLURM_NNODES": options["nodes"], "SLURM_JOB_NODELIST": "n[01-16]", "SLURM_JOB_ID": "7"}
    # The batch script runs on node 0, before its step
    job |= {"SLURM_NODEID": "0", "FAKE_NODES": "0 15", "FAKE_CODE": str(code)}
    assert cluster.start(["examples/slurm.sh", "--lr", "1"], **job).wait(60) == code
    arguments = "math --engines 48 --trainers 80 --lr 1"
    assert cluster.runs() == [((0, 16), "n01", arguments), ((15, 16), "n01", arguments)]
    assert (tmp_path / "scontrol.txt").read_text().splitlines()[-1] == scontrol_call


def test_torchrun_starts_run_sh_on_every_node(tmp_path):
    """The real torchrun is started twice on this machine."""
    cluster = Cluster(tmp_path)
    script = ["examples/torchrun.sh", "2"]
    both = [cluster.start([*script, str(k), "127.0.0.1", "math"]) for k in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    assert cluster.runs() == [((k, 2), "127.0.0.1", "math") for k in range(2)]


def test_kubernetes_starts_run_sh_in_every_pod(tmp_path):
    cluster = Cluster(tmp_path)
    text = (ROOT / "examples" / "kubernetes.yaml").read_text()
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    job = documents["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    n = job["completions"]
    assert job["parallelism"] == n
    # FAKE: the name service of a cluster
    cluster.add("getent", "#!/bin/sh\n")
    given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    assert container["command"] == ["bash", "-c"]
    for index in range(n):
        # Kubernetes fills in these variables
        env = given | {"JOB_COMPLETION_INDEX": str(index), "NODE_ADDR": f"10.0.0.{index}"}
        assert cluster.start(["-c", *container["args"]], **env).wait(60) == 0
    # The service gives node 0 this name
    service = documents["Service"]
    job_name = documents["Job"]["metadata"]["name"]
    name = f"{job_name}-0.{service['metadata']['name']}"
    assert cluster.runs() == [((k, n), name, "math --out /shared/out") for k in range(n)]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["batch.kubernetes.io/job-name"] == job_name
    # Kubernetes must leave the trainer time to save
    assert pod["terminationGracePeriodSeconds"] > MATH["stop_timeout"]

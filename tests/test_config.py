"""Every mistake in a command line is one clear line, before anything starts."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time

import pytest

import config as cfg
from conftest import ROOT
from plumbing import hardware, launch
from plumbing.problems import share_beginnings


def resolved(*argv, gpus=0):
    # the default port may be taken by a run
    port = [] if "--port" in argv else ["--port", "9400"]
    return launch.resolve(cfg.parse([*argv, *port], gpus), gpus)


@pytest.mark.parametrize(
    "words,gpus,message",
    [
        ("toy --stepz 3", 0, "unknown flag --stepz: did you mean --steps"),
        ("toy --steps many", 0, "--steps: invalid literal for int"),
        ("toy --loss mse", 0, "--loss"),
        ("chess", 0, "unknown preset 'chess': choose from toy, countdown, guess, math"),
        ("toy --model /no/such/model", 0, "--model /no/such/model: no config.json there"),
        ("toy --model no-such-model", 0, "--model no-such-model: no such directory, and not a hub"),
        ("toy --task chess", 0, "--task chess: there is no tasks/chess.py"),
        ("toy --attempts 9", 0, "not a multiple of --attempts 9"),
        ("toy --attempts 1 --batch_size 4", 0, "needs at least 2 attempts"),
        ("toy --max_new_tokens 128", 0, "leaves no room for a prompt"),
        ("toy --max_lag -1", 0, "--max_lag -1: must not be negative"),
        ("toy --clip_low 6", 0, "--clip_low 6.0 is not below --clip_high 5.0"),
        ("toy --temperature 0", 0, "--temperature 0.0: must be above 0"),
        (
            "toy --engines 3 --tensor_parallel 2 --trainers 4",
            8,
            "need 10 GPUs, this machine has 8",
        ),
    ],
)
def test_mistakes_are_one_line(words, gpus, message):
    with pytest.raises(cfg.ConfigError) as e:
        resolved(*words.split(), gpus=gpus)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


NAMES = [
    ".",
    "..",
    "a/b",
    "/tmp",
    "",
    "-x",
    "--",
    "a\n",
    "a\0b",
    "a b",
    "\u00e9",
    "_a",
    "~",
    "a" * 101,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_a_name_and_no_path(tmp_path, name):
    argv = [f"--run={name}", "--out", str(tmp_path)]
    with pytest.raises(cfg.ConfigError, match="--run .* letters, digits") as e:
        resolved("toy", *argv)
    assert "\n" not in str(e.value)
    with pytest.raises(cfg.ConfigError, match="--run .* letters, digits"):
        launch.serve(argv, tmp_path / "list")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a", "toy.1", "A-b_c.D", "7", "a" * 100])
def test_other_names_are_fine(name):
    assert resolved("toy", "--run", name).run == name


def take(out, barrier, results, done):
    """A start of a run that others start at the same moment."""
    c = cfg.Config(run="toy", out=str(out))
    barrier.wait(60)
    try:
        launch.hold(c)
        results.put("won")
    except cfg.ConfigError as e:
        results.put(str(e))
    done.wait(60)


def test_of_starts_at_the_same_moment_exactly_one_wins(tmp_path):
    fork = multiprocessing.get_context("fork")
    for round_number in range(20):
        barrier, results, done = fork.Barrier(8), fork.SimpleQueue(), fork.Event()
        arguments = (tmp_path, barrier, results, done)
        starts = [fork.Process(target=take, args=arguments) for _ in range(8)]
        for start in starts:
            start.start()
        words = [results.get() for _ in starts]
        done.set()
        for start in starts:
            start.join()
        assert words.count("won") == 1, words
        assert sum("--run toy: held by" in w for w in words) == 7


def test_a_start_holds_its_run_until_what_it_becomes_has_ended(tmp_path):
    """With another program in place of the launcher, which tells when it is there."""
    (tmp_path / "bash").write_text(f"#!/bin/sh\ntouch {tmp_path}/there\nread word\n")
    (tmp_path / "bash").chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    command = [sys.executable, "-m", "plumbing.launch", "-", "toy", "--port", "9400"]
    command += ["--out", str(tmp_path), "--model", str(model)]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
    deadline = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.05)
    before = (tmp_path / "toy" / "config.json").read_text()
    second = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=60)
    assert second.returncode == 1 and f"held by process {first.pid} on " in second.stderr
    assert (tmp_path / "toy" / "config.json").read_text() == before
    first.communicate("end\n", timeout=30)
    assert first.returncode == 0
    launch.hold(cfg.Config(run="toy", out=str(tmp_path)))


def test_too_few_connections_are_named_and_as_many_as_may_be_are_taken():
    """As from a shell whose limit is low."""
    program = """
import resource, sys
sys.path.insert(0, "tests")
from conftest import resolved
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
resolved("toy", "--concurrency", sys.argv[3], "--engines", 2, "--port", 9400)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""

    def limits(*numbers):
        command = [sys.executable, "-c", program, *map(str, numbers)]
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True)

    assert limits(64, 2048, 500).stdout == "2048\n"
    words = limits(64, 1200, 500).stderr
    assert "2 engines x --concurrency 500 need as many connections" in words
    assert "may open 1200 here" in words


def test_a_loss_brings_its_own_clip_range_unless_one_is_given():
    c = resolved("toy", "--loss", "ppo")
    assert (c.clip_low, c.clip_high) == (0.8, 1.2)
    c = resolved("toy", "--loss", "ppo", "--clip_high", "1.28")
    assert (c.clip_low, c.clip_high) == (0.8, 1.28)
    assert resolved("toy").clip_high == 5.0
    # what is written is what is used: a continued run that changes the loss gets that one's range
    assert resolved("toy", "--loss", "icepop").clip_low == 0.5


def test_a_port_in_use_is_named():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(cfg.ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            resolved("toy", "--port", str(port))


def test_a_port_of_a_run_whose_engine_does_not_listen_yet_is_named():
    code = "import sys; from plumbing import hardware; from conftest import resolved; c = resolved(*sys.argv[1:]); "
    code += "hardware.hold_ports(c, 0, 0); print('held', flush=True); sys.stdin.read()"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = ["toy", "--engines", "2", "--trainers", "2", "--port", str(port)]
    command = [sys.executable, "-c", code, *argv]
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": python_path}, **pipes)
    assert other.stdout.readline() == "held\n"
    # nobody listens, and still neither the engines' ports nor the ranks' can be had
    for taken in (port + 1, port + 2):
        words = f"--port {taken}: engine 0 cannot listen on 127.0.0.1:{taken} .another run on this machine"
        with pytest.raises(cfg.ConfigError, match=words):
            resolved("toy", "--port", str(taken))
    # engines that join a run, and choose by themselves, take others
    assert launch.free_ports("127.0.0.1", port, 2) > port + 2
    # the kernel lets go of them when the last process ends
    other.kill()
    other.communicate()
    hardware.hold_ports(resolved(*argv), 0, 0)


@pytest.mark.parametrize("where", [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")])
def test_a_model_that_no_hub_has_is_one_line(tmp_path, where):
    """Nobody listens on port 9: a hub out of reach, which is asked just once."""
    environment = dict([where], HF_HOME=str(tmp_path))
    done = run_sh("toy", "--out", tmp_path / "o", "--model", "some/model", **environment)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "--model some/model: no such directory, and no model of this name" in done.stderr
    assert not (tmp_path / "o" / "toy").exists()


def run_sh(*argv, **environment):
    return subprocess.run(
        ["bash", "run.sh", *map(str, argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_the_launcher_says_it_and_starts_nothing(tmp_path):
    done = run_sh("toy", "--out", tmp_path / "o", "--stepz", 3)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "--stepz" in done.stderr
    assert not (tmp_path / "o").exists()


def test_a_dry_run_shows_every_process_of_every_node_and_starts_nothing(tmp_path):
    argv = ("toy", "--out", tmp_path, "--dry_run", True)
    done = run_sh(*argv, NNODES="2", NODE_RANK="0")
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    for words in (
        "node 1 engine0: env ",
        " -m plumbing.supervise ",
        "--worker-extension-cls plumbing.engine.WorkerExtension --middleware plumbing.engine.Contract",
        "node 0 actor: env ",
        "actor.py ",
        "preprocess.py ",
        "node 0 train: env ",
    ):
        assert words in done.stdout
    assert "VLLM_SERVER_DEV_MODE" not in done.stdout and "weight-transfer" not in done.stdout


def test_serve_shows_what_would_join(tmp_path):
    c = resolved("toy", "--out", str(tmp_path), "--port", "9420")
    launch.open_run(c)
    launch.write(c)
    done = run_sh("serve", "--run", "toy", "--out", tmp_path, "--dry_run", True)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/toy serve-127.0.0.1-9520 http://127.0.0.1:9520 " in done.stdout
    assert "--port 9520" in done.stdout and f"PIPELINE_RUN_DIR={tmp_path}/toy" in done.stdout
    done = run_sh("serve", "--run", "another", "--out", tmp_path)
    assert done.returncode == 1 and "no run in" in done.stderr


@pytest.mark.parametrize(
    "gpus,engines,trainers", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (4, 2, 2), (8, 4, 4)]
)
def test_placement_splits_the_gpus_in_halves(gpus, engines, trainers):
    c = resolved("toy", gpus=gpus)
    assert (c.engines, c.trainers) == (engines, trainers)
    assert c.dtype == ("bfloat16" if gpus else "float32")
    assert c.weight_backend == ("nccl" if gpus > 1 else "gloo")
    processes = launch.placement(c, gpus)
    ranks = ["train", *(f"train{rank}" for rank in range(1, trainers))]
    names = [f"engine{i}" for i in range(engines)] + ["actor", "preprocess", *ranks]
    assert [name for name, _, _ in processes] == names
    if gpus > 1:
        # every GPU once
        visible = [env["CUDA_VISIBLE_DEVICES"] for _, env, _ in processes]
        used = [g for text in visible for g in text.split(",") if g]
        assert sorted(used) == sorted(map(str, range(gpus)))
    if trainers > 1:
        told = [env for name, env, _ in processes if name.startswith("train")]
        assert [env["RANK"] for env in told] == [str(rank) for rank in range(trainers)]
        assert {env["WORLD_SIZE"] for env in told} == {str(trainers)}


@pytest.mark.parametrize(
    "task,prompt,system,shared",
    [
        ("toy", "ba=", "", False),
        ("toy", "b" * 500, "", True),
        ("toy", "ba=", "Be brief. " * 50, True),
        ("guess", "ba=", "", True),
        ("toy,guess", "ba=", "", True),
    ],
)
def test_beginnings_are_shared_where_they_are_long_or_there_are_turns(task, prompt, system, shared):
    c = cfg.Config(task=task, system_prompt=system)
    problems = {name: [{"prompt": prompt}] * 3 for name in cfg.task_weights(task)}
    assert share_beginnings(c, problems) == shared


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("caching", ["auto", "on", "off"])
def test_engines_share_beginnings_only_if_told(caching, gpus):
    c = resolved("toy", "--prefix_caching", caching, "--memory_check", "False", gpus=gpus)
    command = launch.engine_commands(c, gpus)[0][2]
    assert ("--enable-prefix-caching" in command) == (caching == "on")
    assert ("--no-enable-prefix-caching" in command) == (caching != "on")
    assert ("--block-size" in command) == (caching == "on" and not gpus)


def test_the_reference_model_shares_a_trainers_gpu_if_there_is_one():
    for kl_coef, device in (("0", ""), ("0.01", "3")):
        placed = launch.placement(resolved("toy", "--kl_coef", kl_coef, gpus=4), 4)
        env = {name: env for name, env, _ in placed}
        assert env["preprocess"]["CUDA_VISIBLE_DEVICES"] == device


def test_an_evaluation_has_every_gpu_for_engines():
    c = cfg.parse(["toy", "--port", "9400", "--engines", "8"], 8)
    c = launch.resolve(c, 8, training=False)
    devices = [env["CUDA_VISIBLE_DEVICES"] for _, env, _ in launch.engine_commands(c, 8)]
    assert devices == list("01234567")
    assert "train" not in [name for name, _, _ in launch.placement(c, 8)]


def test_presets_and_help_show_every_knob():
    assert cfg.parse([], 0).task == "toy" and cfg.parse([], 8).task == "maths"
    assert cfg.parse(["math"], 0).model == "Qwen/Qwen2.5-7B"
    done = run_sh("--help")
    assert done.returncode == 0
    shown = re.findall(r"^  --(\w+) ", done.stdout, re.M)
    assert shown == [f.name for f in cfg.fields(cfg.Config) if f.name not in ("run_id", "nodes")]
    # in their groups, a line each, with the preset's defaults
    assert "\nloss\n  --advantage loo  " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert "--batch_size 1024 " in run_sh("math", "--help").stdout
    about = run_sh("toy", "--steps", "7", "--help", "lag").stdout
    assert "--max_lag 1\n" in about and "may be older" in about and "--lr" not in about


def test_a_stopped_run_continues_a_complete_one_makes_room_and_fixed_knobs_are_refused(tmp_path):
    argv = ["toy", "--out", str(tmp_path), "--port", "9420"]
    c = resolved(*argv)
    assert "new run" in launch.open_run(c)
    first = c.run_id
    run_dir = launch.write(c)
    assert json.loads((run_dir / "config.json").read_text())["config"]["steps"] == c.steps
    assert cfg.load(str(run_dir)) == c
    (run_dir / "checkpoints" / "step_000130").mkdir(parents=True)
    (run_dir / "queues").mkdir()
    (run_dir / "engines").mkdir()
    again = resolved(*argv, "--lr", "1e-5")
    assert re.search("from step 130; from here on with other knobs .*: lr ", launch.open_run(again))
    assert not (run_dir / "queues").exists()
    assert not (run_dir / "engines").exists()
    assert again.run_id == first
    with pytest.raises(cfg.ConfigError, match="--batch_size cannot change within a run"):
        launch.open_run(resolved(*argv, "--batch_size", "16"))
    # it died before its last evaluation
    (run_dir / "checkpoints" / f"step_{c.steps:06d}").mkdir()
    assert f"from step {c.steps}" in launch.open_run(resolved(*argv))
    # or is it still at that?
    launch.hold(c)
    with pytest.raises(cfg.ConfigError, match=f"--run toy: held by process {os.getpid()} on "):
        launch.hold(resolved(*argv))
    line = {"eval": {"toy": 0.5}, "problems": 8, "version": c.steps, "wall_s": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    # a complete one goes on if there are more steps
    more = resolved(*argv, "--steps", str(c.steps + 30))
    words = f"continuing the complete run .* from step {c.steps}; .*: steps \\({c.steps} -> .*aims at the new end"
    assert re.search(words, launch.open_run(more))
    assert more.run_id == first
    history = [json.loads(x) for x in (run_dir / "continued.jsonl").read_text().splitlines()]
    assert history[0]["changed"] == {"lr": [c.lr, 1e-5]}
    assert history[-1] == {"step": c.steps, "changed": {"steps": [c.steps, c.steps + 30]}}
    # with another loss, too, it is another run
    other = resolved(*argv, "--steps", str(c.steps + 30), "--loss", "ppo")
    assert "complete one before it is now" in launch.open_run(other)
    (tmp_path / "toy.1").rename(run_dir)
    assert "complete one before it is now" in launch.open_run(c)
    assert c.run_id != first
    assert (tmp_path / "toy.1" / "checkpoints").exists()


@pytest.mark.parametrize("git", [None, "exit 7", "kill -9 $$", "not a program"])
def test_no_git_is_no_obstacle(tmp_path, monkeypatch, git):
    if git:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n" if " a " not in git else git)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    c = resolved("toy", "--out", str(tmp_path))
    assert json.loads((launch.write(c) / "config.json").read_text())["git"] == ""

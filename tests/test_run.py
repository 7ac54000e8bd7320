"""Whole runs as a user starts them, judged by the files and processes that they leave behind.

run.sh, its processes, signals and kills are real. The engine is a real vLLM; where only a
restart matters, a FAKE one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_weights import assert_serves, served
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer

import config as cfg
import held_requests
from actor import allowed_groups
from conftest import ROOT
from fake_engine import fake_vllm
from plumbing.problems import load_problems

KEYS = (
    "step version samples tokens wall_s reward success loss grad_norm lr entropy ess kl_behavior "
    "mismatch lag_mean lag_max clip_frac dropped train_tok_s gen_tok_s gen_idle wait_data_s step_s "
    "sync_s gather_s wait_sync_s save_s send_s ready_s pause_s late skipped kl_ref problems drops"
).split()


def command(out, name, port, *knobs):
    """The command of a toy run. --rows packed: its model need not be examined at every start."""
    command_line = f"bash run.sh toy --out {out} --run {name} --port {port} --eval_problems 64"
    return [*command_line.split(), "--rows", "packed", *" ".join(map(str, knobs)).split()]


def leftovers(out):
    """Return the processes whose command line or RUN_MARK has this output directory."""
    processes = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = p.read_bytes().replace(b"\0", b" ").decode()
            environment = p.with_name("environ").read_bytes()
        except OSError:
            continue
        if str(out) in line or f"RUN_MARK={out}".encode() in environment:
            processes.append((p.parent.name, line))
    return processes


def run(out, name, port, *knobs, timeout=1800, **environment):
    return subprocess.run(
        command(out, name, port, *knobs),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"RUN_MARK": str(out)} | environment,
    )


class User:
    """A user who starts a command, and starts it again when it has ended."""

    def __init__(self, out, name, port, *knobs):
        self.out = out
        self.command = command(out, name, port, *knobs)
        self.log = out / "output.txt"
        self.environment = os.environ | {"RUN_MARK": str(out)}

    def take_fake_engines(self, folder):
        """From the next start on the engines are FAKE: real ones take half a minute to start."""
        self.environment["PYTHONPATH"] = str(fake_vllm(folder))

    def start(self, text):
        """Start the command and wait until it has printed this text."""
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, stdout=output, stderr=output, env=self.environment
            )
        self.wait_for(text)

    def wait_for(self, text):
        deadline = time.monotonic() + 1200
        ended = False
        while text not in self.log.read_text():
            if ended or time.monotonic() > deadline:
                # The processes that it has started end with it.
                self.process.kill()
                pytest.fail(self.log.read_text())
            time.sleep(0.02)
            ended = self.process.poll() is not None

    def interrupt(self):
        """Press Ctrl-C, which must leave no process."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(900) == 130
        assert leftovers(self.out) == []


def metrics(run_dir):
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "step" in x], [x for x in lines if "eval" in x]


def balance(run_dir, batch_size, attempts):
    """Assert that the ledger of a run balances at its last checkpoint, whatever happened before.

    Every step is there once, with exactly batch_size / attempts groups. Every finished draw has
    `attempts` samples, each trained or dropped with a reason; no other draw was trained. Return
    {draw: samples} of those trained and of those dropped.
    """
    steps, _ = metrics(run_dir)
    newest = max((run_dir / "checkpoints").glob("step_*[0-9]"))
    state = json.loads((newest / "trainer" / "state.json").read_text())
    trained = Counter()
    dropped = Counter()
    for n, line in enumerate(steps, 1):
        assert line["step"] == line["version"] == n
        assert len(line["problems"]) == batch_size // attempts
        trained.update(line["problems"])
        assert line["samples"] == trained.total()
        for problems in line["drops"].values():
            dropped.update(problems)
        assert line["dropped"] == dropped.total()
    assert [x["wall_s"] for x in steps] == sorted(x["wall_s"] for x in steps)
    assert len(steps) == state["version"] and state["samples"] == trained.total()
    assert state["dropped"] == dropped.total()
    position = state["position"]
    done = [*range(position["next"]), *position["ahead"]]
    assert trained + dropped == {str(i): attempts for i in done}
    return trained, dropped


def test_the_pipeline_end_to_end(tmp_path, base_model):
    # Updates must come in the middle of a sequence, whatever is faster: the engine holds a sequence
    # there until the next update, at every version but the last two. At those the gate has let so
    # few groups start that the trainer would wait for the held one. At the others it has let at
    # least seven more start, of which a step takes four.
    held_versions = range(19)
    knobs = "--steps 20 --batch_size 32 --attempts 8 --row_tokens 256 --save_every 10 --max_lag 1"
    knobs += " --eval_problems 16 --samples_logged 32 --reward_timeout 300 --rows auto"
    environment = held_requests.plugin(tmp_path / "plugin", held_versions)
    done = run(tmp_path, "t", 8710, knobs, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "t"
    steps, evals = metrics(run_dir)
    balance(run_dir, 32, 8)
    assert steps[-1]["samples"] == 20 * 32
    for x in steps:
        assert set(KEYS) <= set(x)
        assert np.isfinite([v for v in x.values() if isinstance(v, (int, float))]).all()
        assert 0 <= x["lag_mean"] <= x["lag_max"] < x["step"]
        assert 0 < x["ess"] <= 1.0001 and 0 <= x["reward"] <= 1 and x["dropped"] == 0
    # At lag 0 the trainer's logprobs are the engine's, apart from float32 rounding.
    mismatch = [x["mismatch"] for x in steps if x["mismatch"] is not None]
    assert steps[0]["mismatch"] is not None and max(mismatch) < 1e-3
    # Weights arrive while sequences are sampled. At least one of two successive versions has a
    # sequence that can be held: the groups of a step are then sampled from beginning to end.
    log = (run_dir / "logs" / "engine0.log").read_text()
    held = [int(version) for version in re.findall(held_requests.LINE, log)]
    assert len(held) >= len(held_versions) // 2
    assert held == sorted(set(held)) and set(held) <= set(held_versions)
    assert sum(x["versions_2"] for x in steps) > 0.2 and max(x["lag_max"] for x in steps) >= 1
    assert {x["version"]: x["problems"] for x in evals} == {0: 16, 20: 16}
    assert "step 20/20 | reward" in done.stdout and "held-out toy" in done.stdout
    assert re.search(r"step 1/20 .* \| mismatch \d\.\de-\d\d \| ", done.stdout)
    samples = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    # Every rollout is there.
    assert [s["step"] for s in samples] == [step for step in range(1, 21) for _ in range(32)]
    config = cfg.load(run_dir)
    problems = load_problems(config, "train")["toy"]
    # (first version, last version) of sequences that updates went into
    updated = []
    for s in samples:
        versions = [version for version, *_ in s["spans"] if version >= 0]
        assert versions == sorted(set(versions))
        if len(versions) > 1:
            updated.append((versions[0], versions[-1]))
        # The versions are older than the step, and the gate had let the group start.
        assert max(versions) < s["step"]
        assert s["sample_id"] // config.attempts < allowed_groups(config, min(versions))
        # At lag 0 the engine's logprobs are the trainer's.
        assert len(s["log_ratios"]) == len(s["behavior_logprobs"])
        if min(versions) == s["step"] - 1:
            assert np.abs(s["log_ratios"]).max() < 1e-3
        assert (s["advantage"] > 0) <= (s["reward"] > 0)
        problem = problems[s["problem"]]
        assert s["prompt"] == problem["prompt"]
        assert s["reward"] == float(s["finished"] and s["completion"] == problem["answer"])
    # A sequence that was held at a version has tokens up to that version, and newer ones.
    for version in held:
        assert any(first <= version < last for first, last in updated)
    assert len(updated) == round(32 * sum(x["versions_2"] for x in steps)) >= len(held)
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        assert [key for key in json.loads(line) if f"`{key}`" not in documented] == []
    assert (run_dir / "report.png").stat().st_size > 10000
    assert json.loads((run_dir / "config.json").read_text())["config"]["steps"] == 20
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"step_000010", "step_000020"}
    assert list((run_dir / "queues" / "batches").rglob("*.safetensors")) == []
    # The launcher may end the actor before the actor prints its last line.
    for line in re.findall(r"^actor: done.*", (run_dir / "logs" / "actor.log").read_text(), re.M):
        assert re.fullmatch(r"actor: done, 80 groups started, (.*, )?\d+ verdicts", line)
    assert leftovers(tmp_path) == []
    # The checkpoint is a Hugging Face model, different from the base model.
    model = run_dir / "checkpoints" / "step_000020"
    trained, base = map(AutoModelForCausalLM.from_pretrained, (model, base_model))
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight)
    tokenizers = map(AutoTokenizer.from_pretrained, (model, base_model))
    ids, expected = (tokenizer("ab=")["input_ids"] for tokenizer in tokenizers)
    assert ids == expected
    # vLLM loads the checkpoint as it is, and its logprobs are Hugging Face's.
    with served(f"toy --run checkpoint --out {tmp_path} --port 8711 --model {model}") as config:
        # Weights that were loaded from disk have version 0.
        assert_serves(config, trained, 0)


@pytest.mark.slow
def test_max_lag_0_is_synchronous_on_two_fsdp_ranks(tmp_path, base_model):
    knobs = "--steps 4 --batch_size 64 --max_lag 0 --trainers 2 --recompute_kv True"
    done = run(tmp_path, "s", 8720, knobs, "--loss ppo --late wait --kl_coef 0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    steps, _ = metrics(tmp_path / "s")
    assert [(x["lag_mean"], x["lag_max"]) for x in steps] == [(0, 0)] * 4
    assert [x["samples"] for x in steps] == [64, 128, 192, 256]
    assert all(x["mismatch"] < 1e-3 and abs(x["ess"] - 1) < 1e-3 for x in steps)
    # The policy starts as the reference model and leaves it.
    assert steps[0]["kl_ref"] < 1e-6 < steps[-1]["kl_ref"]


def test_run_continues_after_kills_and_interrupts(tmp_path, base_model):
    # The run does not come to this number of steps: its last start sets a lower one.
    knobs = "--steps 1000 --batch_size 64 --conventional_g 2 --save_every 2"
    user = User(tmp_path, "k", 8730, knobs)
    run_dir = tmp_path / "k"

    def kill(program):
        """Send kill -9 to a process of this program, but not to those that have started it."""
        processes = [x for x in leftovers(tmp_path) if not re.search("bash|supervise", x[1])]
        victim = next(pid for pid, line in processes if program in line)
        os.kill(int(victim), signal.SIGKILL)

    def last_step():
        """Return the number of the last step, whose work must be saved."""
        step = max(x["step"] for x in metrics(run_dir)[0])
        assert (run_dir / "checkpoints" / f"step_{step:06d}").exists()
        return step

    # After kill -9 the only engine is started again, gets the weights, and the run goes on.
    user.start("step 2/1000")
    kill("vllm.entrypoints")
    user.wait_for("engine0 died with exit code 137, and is started again")
    user.wait_for("step 5/1000")
    # After kill -9 of the actor the run ends, says who died, shows its log and leaves no process.
    kill("actor.py")
    assert user.process.wait(900) == 1
    text = user.log.read_text()
    assert "run.sh: actor died with exit code 137" in text and "run.sh: stopped; the same" in text
    # A notice by bash itself would come between these lines.
    assert "bash -c" not in text
    assert leftovers(tmp_path) == []
    # The same command continues.
    user.take_fake_engines(tmp_path / "fake")
    user.start("[train] step")
    # The trainer saved its work before it was stopped.
    assert int(re.search(r"continuing .* from step_(\d+)", user.log.read_text())[1]) >= 5
    user.interrupt()
    done = last_step()
    assert f"version {done} is saved" in user.log.read_text()
    # The last start goes on to the end of the phase after the next one.
    end = (last_step() // 2 + 2) * 2
    user.command += ["--steps", str(end)]
    user.start("picture")
    assert user.process.wait(900) == 0
    steps, _ = metrics(run_dir)
    # The run was also stopped between steps of a phase that share problems.
    balance(run_dir, 64, 16)
    assert steps[-1]["samples"] == end * 64
    # In conventional RL with G = 2 weights are sent every second step, so that lags are 0 and 1.
    assert all(x["lag_max"] <= (x["step"] - 1) % 2 and x["versions_2"] == 0 for x in steps)
    assert sum(x["sync_s"] > 0 for x in steps) <= end // 2 + 5


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_process_and_loses_no_step(tmp_path, base_model):
    user = User(tmp_path, "k", 8740, "--steps 1000 --batch_size 64 --save_every 2")
    run_dir = tmp_path / "k"
    user.take_fake_engines(tmp_path / "fake")
    user.start("step 3/1000")
    user.process.kill()
    user.process.wait()
    deadline = time.monotonic() + 600
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert leftovers(tmp_path) == []
    # The trainer has saved its work before it ended.
    last = max(x["step"] for x in metrics(run_dir)[0])
    assert (run_dir / "checkpoints" / f"step_{last:06d}").exists()
    user.command += ["--steps", str(last + 2)]
    user.start("picture")
    assert user.process.wait(900) == 0
    balance(run_dir, 64, 16)
    assert metrics(run_dir)[0][-1]["samples"] == (last + 2) * 64


@pytest.mark.slow
def test_smol_fetches_and_trains_a_real_model(tmp_path):
    """`bash run.sh smol` trains in float32 and serves and saves bfloat16."""
    knobs = (
        "--steps 2 --batch_size 16 --attempts 4 --eval_problems 8 --eval_attempts 1 "
        "--max_new_tokens 8"
    )
    command_line = f"bash run.sh smol --out {tmp_path} --run smol --port 8719 {knobs}"
    done = subprocess.run(
        command_line.split(), cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "smol"
    steps, evals = metrics(run_dir)
    assert [line["samples"] for line in steps] == [16, 32]
    assert sorted(line["version"] for line in evals) == [0, 2]
    first = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[1])
    assert 1e-4 < first["mismatch"] < 0.2
    folder = run_dir / "checkpoints" / "step_000002"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    saved = FileSystemReader(folder / "trainer").read_metadata().state_dict_metadata
    tensors = {name: x for name, x in saved.items() if hasattr(x, "size") and len(x.size) > 1}
    assert {x.properties.dtype for x in tensors.values()} == {torch.float32}
    assert any("exp_avg" in name for name in tensors)


@pytest.mark.slow
def test_toy_trains_on_a_machine_without_compiler_home_or_network(tmp_path, base_model):
    """The proxies are dead, there is little shared memory, and paths are relative with umlauts.

    `--late hold --max_lag 2`: step v trains what version max(0, v - 2) has sampled, wholly.
    """
    checkout = tmp_path / "für alle" / "repo"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "out"))
    caller = tmp_path / "caller's"
    shutil.copytree(base_model, caller / "its model")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in "bash dirname nice sh lscpu unshare mount".split():
        (programs / name).symlink_to(shutil.which(name))
    dead_proxy = "http://127.0.0.1:9"
    env = dict(
        PATH=str(programs),
        LANG="C",
        PIPELINE_PYTHON=sys.executable,
        http_proxy=dead_proxy,
        https_proxy=dead_proxy,
        all_proxy=dead_proxy,
    )
    start = 'umask 077; exec bash "$0" toy --model "its model" --out "Läufe" '
    start += "--steps 6 --batch_size 64 --eval_problems 16 --save_every 0 --port 8735 "
    start += "--max_lag 2 --late hold --loss dppo --lr_by_ess True"
    if os.geteuid() == 0:
        start = f"mount -t tmpfs -o size=64k tmpfs /dev/shm; {start}"
    command = ["unshare", "--mount"] * (os.geteuid() == 0) + ["bash", "-c", start]
    command.append(str(checkout / "run.sh"))
    done = subprocess.run(
        command, cwd=caller, env=env, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (caller / "Läufe" / "toy" / "report.html").exists()
    steps, _ = metrics(caller / "Läufe" / "toy")
    lags = [0, 1, 2, 2, 2, 2]
    assert [x["lag_mean"] for x in steps] == [x["lag_max"] for x in steps] == lags
    assert [list(x["by_lag"]) for x in steps] == [["0"], ["1"], *[["2-3"]] * 4]
    assert all(x["versions_2"] == 0 for x in steps)
    # The schedule has come down to a quarter.
    assert steps[-1]["lr"] == pytest.approx(6e-4 / 4 * steps[-1]["ess_sample"] ** 0.5)

"""The whole thing, as a user runs it: real vLLM, real processes, real kills. Asserts what a run leaves behind."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import config as cfg
from conftest import ROOT
from fake_engine import fake_vllm

KEYS = (
    "step version samples tokens wall_s reward success loss grad_norm lr entropy ess kl_behavior mismatch lag_mean lag_max clip_frac dropped "
    "train_tok_s gen_tok_s gen_idle wait_data_s step_s sync_s gather_s wait_sync_s save_s send_s ready_s pause_s late skipped kl_ref by_lag problems drops"
).split()


def command(out, name, port, *knobs):
    return [
        "bash",
        "run.sh",
        "toy",
        "--out",
        str(out),
        "--run",
        name,
        "--port",
        str(port),
        "--eval_problems",
        "64",
        *map(str, knobs),
    ]


def leftovers(out):
    """Processes that still have this output directory in their command line, or the engine of one."""
    found = []
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = p.read_bytes().replace(b"\0", b" ").decode()
            environment = p.with_name("environ").read_bytes()
        except OSError:
            continue
        if str(out) in line or f"RUN_MARK={out}".encode() in environment:
            found.append((p.parent.name, line))
    return found


def run(out, name, port, *knobs, timeout=400):
    return subprocess.run(
        command(out, name, port, *knobs),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"RUN_MARK": str(out)},
    )


def metrics(run_dir):
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "step" in x], [x for x in lines if "eval" in x]


def balance(run_dir, batch_size, attempts):
    """Assert that the ledger of a run balances at its last checkpoint, whatever happened on the way;
    returns {draw: samples} trained, and dropped with a reason.

    Every step once, of exactly batch_size / attempts groups; every draw that is done with has
    `attempts` samples, each trained or dropped with a reason; of no other was anything trained.
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
    done = run(
        tmp_path,
        "t",
        8710,
        "--steps",
        12,
        "--batch_size",
        256,
        "--save_every",
        6,
        "--max_lag",
        3,
        "--late",
        "wait",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "t"
    steps, evals = metrics(run_dir)
    assert [x["step"] for x in steps] == list(range(1, 13)) and all(
        set(KEYS) <= set(x) for x in steps
    )
    assert [x["samples"] for x in steps] == [256 * i for i in range(1, 13)]
    assert all(
        0 <= x["lag_mean"] <= x["lag_max"] <= 3
        and 0 < x["ess"] <= 1.0001
        and 0 <= x["reward"] <= 1
        and x["dropped"] == 0
        for x in steps
    )
    assert all(
        np.isfinite([v for v in x.values() if isinstance(v, (int, float))]).all() for x in steps
    )
    assert all(
        sum(row["tokens"] * int(k) for k, row in x["by_lag"].items())
        == pytest.approx(
            x["lag_mean"] * sum(row["tokens"] for row in x["by_lag"].values()), rel=1e-4
        )
        for x in steps
        if set(x["by_lag"]) <= {"0", "1", "2"}
    )
    # lag-0 tokens: the trainer's logprobs are the engine's, float32 rounding apart
    mismatch = [x["mismatch"] for x in steps if x["mismatch"] is not None]
    assert steps[0]["mismatch"] is not None and max(mismatch) < 1e-3
    # weights really go in while sequences are being sampled
    assert sum(x["versions_2"] for x in steps) > 0.2 and max(x["lag_max"] for x in steps) >= 1
    assert (
        [e["version"] for e in evals][0] == 0
        and evals[-1]["version"] == 12
        and evals[-1]["problems"] == 64
    )
    assert "step 12/12 | reward" in done.stdout and "held-out toy" in done.stdout
    assert re.search(r"step 1/12 .* \| mismatch \d\.\de-\d\d \| ", done.stdout)
    samples = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    # what is shown of rollouts: two a step
    assert [s["step"] for s in samples] == [step for step in range(1, 13) for _ in range(2)]
    from plumbing.problems import load_problems

    problems = load_problems(cfg.load(run_dir), "train")["toy"]
    for s in samples:
        versions = [version for version, _ in s["spans"] if version >= 0]
        # sampled by what was there, and at lag 0 with the trainer's own probabilities
        assert max(versions) < s["step"] <= min(versions) + 4
        assert len(s["log_ratios"]) == len(s["behavior_logprobs"])
        if min(versions) == s["step"] - 1:
            assert np.abs(s["log_ratios"]).max() < 1e-3
        assert (s["advantage"] > 0) <= (s["reward"] > 0)
        problem = problems[s["problem"]]
        assert s["prompt"] == problem["prompt"]
        assert s["reward"] == float(s["finished"] and s["completion"] == problem["answer"])
    assert (run_dir / "report.png").stat().st_size > 10000 and json.loads(
        (run_dir / "config.json").read_text()
    )["config"]["steps"] == 12
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} == {"step_000006", "step_000012"}
    assert list((run_dir / "queues" / "batches").rglob("*.safetensors")) == []
    assert re.search("done, .* requests {}", (run_dir / "logs" / "actor.log").read_text())
    balance(run_dir, 256, 16)
    # the checkpoint is a Hugging Face model, different from the base model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained, base = (
        AutoModelForCausalLM.from_pretrained(p)
        for p in (run_dir / "checkpoints" / "step_000012", base_model)
    )
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight)
    assert (
        AutoTokenizer.from_pretrained(run_dir / "checkpoints" / "step_000012")("ab=")["input_ids"]
        == AutoTokenizer.from_pretrained(base_model)("ab=")["input_ids"]
    )
    assert leftovers(tmp_path) == []
    # and vLLM loads it as it is: its logprobs are Hugging Face's
    from test_weights import assert_serves

    from conftest import resolved
    from plumbing import launch
    from tools.evaluate import start_engines, stop_engines

    model = run_dir / "checkpoints" / "step_000012"
    c = resolved("toy", "--run", "checkpoint", "--out", tmp_path, "--port", 8711, "--model", model)
    launch.write(c)
    engines = start_engines(c)
    try:
        # what was loaded from disk is version 0
        assert_serves(c, trained, 0)
    finally:
        stop_engines(engines)


@pytest.mark.slow
def test_max_lag_0_is_synchronous_on_two_fsdp_ranks(tmp_path, base_model):
    done = run(
        tmp_path,
        "s",
        8720,
        "--steps",
        4,
        "--batch_size",
        64,
        "--max_lag",
        0,
        "--trainers",
        2,
        "--recompute_kv",
        True,
        "--loss",
        "ppo",
        "--late",
        "wait",
        "--kl_coef",
        0.1,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps, _ = metrics(tmp_path / "s")
    assert [(x["lag_mean"], x["lag_max"]) for x in steps] == [(0, 0)] * 4
    assert [x["samples"] for x in steps] == [64, 128, 192, 256]
    assert all(x["mismatch"] < 1e-3 and abs(x["ess"] - 1) < 1e-3 for x in steps)
    assert (
        steps[0]["kl_ref"] < 1e-6 < steps[-1]["kl_ref"]
    )  # the policy starts as the reference model and leaves it


def test_kill_continue_interrupt(tmp_path, base_model):
    knobs = ("--steps", 16, "--batch_size", 64, "--conventional_g", 2, "--save_every", 2)
    log = tmp_path / "out.txt"

    def wait_for(p, text):
        deadline = time.monotonic() + 240
        while text not in log.read_text():
            assert p.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        return p

    def start_and_wait_for(text, **environment):
        with open(log, "w") as f:
            p = subprocess.Popen(
                command(tmp_path, "k", 8730, *knobs),
                cwd=ROOT,
                stdout=f,
                stderr=f,
                env=os.environ | environment | {"RUN_MARK": str(tmp_path)},
            )
        return wait_for(p, text)

    def victim(what, but="bash"):
        found = [
            pid
            for pid, line in leftovers(tmp_path)
            if what in line and "bash" not in line and but not in line
        ]
        return int(found[0])

    # kill -9 of the only engine: it is started again, gets the weights, and the run goes on
    p = start_and_wait_for("step 2/16")
    os.kill(victim("vllm.entrypoints", but="supervise"), signal.SIGKILL)
    wait_for(p, "engine0 died with exit code 137, restart 1 of 3")
    wait_for(p, "step 5/16")
    # kill -9 of the actor: the run ends, says who died, shows its log, leaves no process
    os.kill(victim("actor.py"), signal.SIGKILL)
    assert p.wait(60) == 1
    text = log.read_text()
    assert "run.sh: actor died with exit code 137" in text and "everything is stopped" in text
    # bash's own notice would come between
    assert "bash -c" not in text
    assert leftovers(tmp_path) == []
    # the same command continues; Ctrl-C leaves no process. From here on with a FAKE engine, to save the real one's start
    fake = dict(PYTHONPATH=str(fake_vllm(tmp_path / "fake")))
    p = start_and_wait_for("[train] step", **fake)
    assert (
        int(re.search(r"continuing .* from step (\d+)", log.read_text())[1]) >= 5
    )  # the trainer saved its work before it was stopped
    p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130
    assert leftovers(tmp_path) == []
    # what was done is saved: nothing but the step in progress is done again
    done = max(x["step"] for x in metrics(tmp_path / "k")[0])
    assert (
        tmp_path / "k" / "checkpoints" / f"step_{done:06d}"
    ).exists() and f"version {done} is saved" in log.read_text()
    # kill -9 of the launcher: nothing outlives it, and its work is saved, too
    p = start_and_wait_for(f"step {done + 1}/16", **fake)
    p.kill()
    p.wait()
    deadline = time.monotonic() + 45
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert leftovers(tmp_path) == []
    again = max(x["step"] for x in metrics(tmp_path / "k")[0])
    assert again > done and (tmp_path / "k" / "checkpoints" / f"step_{again:06d}").exists()
    # and once more, to the end
    p = start_and_wait_for("picture", **fake)
    assert p.wait(60) == 0
    steps, evals = metrics(tmp_path / "k")
    assert [x["step"] for x in steps] == list(range(1, 17)) and steps[-1]["samples"] == 16 * 64
    # conventional RL, G = 2: weights go out every second step, so lags within a phase are 0, 1, and never more
    assert all(x["lag_max"] <= (x["step"] - 1) % 2 and x["versions_2"] == 0 for x in steps)
    assert sum(x["sync_s"] > 0 for x in steps) <= 8 + 5
    balance(
        tmp_path / "k", 64, 16
    )  # also of problems that were divided among the steps of a phase, when the run was stopped between them

"""Weights & Biases without a network: what wandb's own reader finds in the files of a run that was stopped and continued."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT
from fake_engine import fake_vllm
from test_run import command, leftovers, metrics

KNOBS = (
    *("--wandb", "offline", "--steps", 10, "--batch_size", 64, "--attempts", 8),
    *("--save_every", 4, "--eval_every", 3, "--lr", 3e-4),
)


class User:
    """Starts the command, with a FAKE engine, and starts it again when it has ended."""

    def __init__(self, out):
        self.out = out
        fake = str(fake_vllm(out / "fake"))
        self.environment = os.environ | {"RUN_MARK": str(out), "PYTHONPATH": fake}

    def run(self, until):
        """Until it has said this, or until its end; then Ctrl-C. Returns the exit code."""
        log = self.out / "words.txt"
        with open(log, "w") as words:
            process = subprocess.Popen(
                command(self.out, "w", 8770, *KNOBS),
                cwd=ROOT,
                stdout=words,
                stderr=words,
                env=self.environment,
            )
        deadline = time.monotonic() + 200
        while until not in log.read_text() and process.poll() is None:
            if time.monotonic() > deadline:
                # what it has started ends with it
                process.kill()
                pytest.fail(log.read_text())
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        return process.wait(60)


def records(folder):
    """{kind: records of that kind} of an offline run, as `wandb leet inspect` reads them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    # offline: the reader reports its own errors to nobody
    environment = os.environ | {"WANDB_MODE": "offline"}
    read = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert read.returncode == 0, read.stderr
    found = {}
    for text in read.stdout.splitlines():
        line = json.loads(text)
        found.setdefault(line["type"], []).append(line[line["type"]])
    return found


def flat(values, prefix=""):
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def rows(histories, key):
    """{version: logged values} of the lines that have this key, the last one of each version."""
    found = {}
    for history in histories:
        values = {k: v for k, v in history["item"].items() if not k.startswith("_")}
        if key in values:
            found[values["version"]] = values
    return found


def same(logged, line):
    expected = flat(line)
    assert logged.keys() == expected.keys()
    for name, value in expected.items():
        # six digits are written to metrics.jsonl
        assert logged[name] == (value if value is None else pytest.approx(value, rel=1e-5)), name


@pytest.mark.slow
def test_a_stopped_and_continued_run_is_one_run_of_wandb(tmp_path, base_model):
    """Half a minute, of two starts."""
    user = User(tmp_path)
    assert user.run(until="step 6/10") == 130
    assert leftovers(tmp_path) == []
    first_life = metrics(tmp_path / "w")[0]
    user.run(until="picture")
    assert leftovers(tmp_path) == []
    steps, evals = metrics(tmp_path / "w")
    assert [x["step"] for x in steps] == list(range(1, 11))
    assert len(first_life) >= 6

    lives = [records(p) for p in sorted((tmp_path / "w" / "wandb").glob("offline-run-*"))]
    assert len(lives) == 2
    config = json.loads((tmp_path / "w" / "config.json").read_text())["config"]
    for life in lives:
        run = life["run"][0]
        assert (run["run_id"], run["resume"]) == (config["run_id"], True)
        assert (run["project"], run["display_name"]) == ("pipeline-rl", "w")
        logged = run["config"]["update"]
        del logged["_wandb"]
        assert logged == config
        # curves over the version, whatever the number of the line
        glob = life["metric"][-1]
        assert (glob["glob_name"], glob["step_metric"]) == ("*", "version")
        assert life["exit"] == [life["exit"][0]]
    histories = [history for life in lives for history in life["history"]]
    logged = rows(histories, "reward")
    assert sorted(logged) == list(range(1, 11))
    for line in steps:
        curves = {k: v for k, v in line.items() if k not in ("problems", "drops")}
        same(logged[line["version"]], curves)
    assert "by_lag.0.ess" in logged[1] and "by_task.toy.reward" in logged[1]
    logged = rows(histories, "eval/toy")
    assert sorted(logged) == [x["version"] for x in evals] == [0, 3, 6, 9, 10]
    for line in evals:
        assert logged[line["version"]]["eval/toy"] == pytest.approx(line["eval"]["toy"], rel=1e-5)
    # the run's secret stays here
    secret = (tmp_path / "w" / "secret").read_bytes().strip()
    for path in (tmp_path / "w" / "wandb").rglob("*"):
        assert path.is_dir() or secret not in path.read_bytes(), path

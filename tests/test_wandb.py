"""--wandb offline: wandb's own reader finds the metrics of a run that was stopped and continued.

The run, its processes and the reader are real. The engines are FAKE, and there is no network.
"""

import json
import os
import subprocess
import sys

import pytest

from test_run import User, leftovers, metrics


def records(folder):
    """{kind: records of that kind} of an offline run, as `wandb leet inspect` reads them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    # offline: the reader reports its own errors to nobody
    environment = os.environ | {"WANDB_MODE": "offline"}
    read = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
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
    lines = [history["item"] for history in histories if key in history["item"]]
    return {x["version"]: {k: v for k, v in x.items() if not k.startswith("_")} for x in lines}


def same(logged, line):
    expected = flat(line)
    assert logged.keys() == expected.keys()
    for name, value in expected.items():
        # six digits are written to metrics.jsonl
        assert logged[name] == (value if value is None else pytest.approx(value, rel=1e-5)), name


@pytest.mark.slow
def test_a_stopped_and_continued_run_is_one_run_of_wandb(tmp_path, base_model):
    """Half a minute, of two starts."""
    knobs = "--wandb offline --steps 10 --batch_size 64 --attempts 8 --save_every 4 --eval_every 3"
    user = User(tmp_path, "w", 8770, knobs, "--lr 3e-4")
    user.take_fake_engines(tmp_path / "fake")
    user.start("step 6/10")
    user.interrupt()
    assert len(metrics(tmp_path / "w")[0]) >= 6
    user.start("picture")
    assert user.process.wait(300) == 0
    assert leftovers(tmp_path) == []
    steps, evals = metrics(tmp_path / "w")
    assert [x["step"] for x in steps] == list(range(1, 11))

    lives = [records(p) for p in sorted((tmp_path / "w" / "wandb").glob("offline-run-*"))]
    assert len(lives) == 2
    config = json.loads((tmp_path / "w" / "config.json").read_text())["config"]
    for life in lives:
        run = life["run"][0]
        assert (run["run_id"], run["resume"]) == (config["run_id"], True)
        assert (run["project"], run["display_name"]) == ("pipeline-rl", "w")
        assert run["config"]["update"] | config == run["config"]["update"]
        # curves over the version, whatever the number of the line
        glob = life["metric"][-1]
        assert (glob["glob_name"], glob["step_metric"]) == ("*", "version")
        assert life["exit"] == [life["exit"][0]]
    histories = [history for life in lives for history in life["history"]]
    logged = rows(histories, "reward")
    assert sorted(logged) == list(range(1, 11))
    for line in steps:
        curves = {k: v for k, v in line.items() if k not in ("problems", "drops", "lengths")}
        same(logged[line["version"]], curves)
    assert "by_task.toy.reward" in logged[1]
    logged = rows(histories, "eval/toy")
    assert sorted(logged) == [x["version"] for x in evals] == [0, 3, 6, 9, 10]
    for line in evals:
        assert logged[line["version"]]["eval/toy"] == pytest.approx(line["eval"]["toy"], rel=1e-5)
    # the run's secret stays here
    secret = (tmp_path / "w" / "secret").read_bytes().strip()
    for path in (tmp_path / "w" / "wandb").rglob("*"):
        assert path.is_dir() or secret not in path.read_bytes(), path

"""Examples of agents with packages that are not this project's, each trained in a real run.

As for a user, the package is installed into an environment of its own. Where there is no package
index the tests are skipped.
"""

import json
import os
import shlex
import subprocess
import sys

import pytest
from test_agents import KNOBS, directory_model  # noqa: F401, a fixture

from conftest import ROOT, jail_problem


def train(folder, example, package, command):
    """Two steps with the agent of an example. Returns the lines of the steps in metrics.jsonl."""
    subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
    install = [f"{folder}/venv/bin/pip", "install", "-q", package]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    if "No matching distribution" in done.stderr:
        pytest.skip(f"pip finds no {package}")
    assert done.returncode == 0, done.stderr[-2000:]
    agent = [f"{folder}/venv/bin/python", f"{ROOT}/examples/agents/{example}"]
    env = os.environ | {"AGENT": shlex.join(agent)}
    command = f"bash run.sh {command} --out {folder} --run a --samples_logged 100".split()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # No attempt has failed.
    assert "unparsable" not in done.stdout, done.stdout
    lines = [json.loads(x) for x in (folder / "a" / "metrics.jsonl").read_text().splitlines()]
    assert max(x["mismatch"] for x in lines if x.get("mismatch") is not None) < 1e-5
    return [x for x in lines if "step" in x]


@pytest.mark.slow
@pytest.mark.parametrize(
    "example, package",
    [("openai_agents.py", "openai-agents==0.24.*"), ("verifiers_env.py", "verifiers==0.4.*")],
)
def test_a_tool_is_called(tmp_path, directory_model, example, package):  # noqa: F811
    steps = train(tmp_path, example, package, f"agent --model {directory_model} {KNOBS}")
    # Turns of one conversation are one segment.
    assert [x["segments"] for x in steps] == [1.0, 1.0]
    assert all(1.4 < x["turns"] <= 4 for x in steps)


@pytest.mark.slow
@pytest.mark.skipif(jail_problem() != "", reason=jail_problem())
def test_mini_swe_agent_runs_commands(tmp_path):
    command = "smol --task agent --dtype float32 --steps 2 --port 9470"
    command += " --batch_size 16 --attempts 4 --eval_problems 2 --eval_attempts 1 --save_every 0"
    command += " --max_new_tokens 120 --max_model_len 512 --concurrency 16"
    steps = train(tmp_path, "mini_swe_agent.py", "mini-swe-agent==2.4.*", command)
    # The agent forgets an answer without a command, so the turn after it begins a new segment.
    assert all(x["segments"] <= x["turns"] <= 3 for x in steps)
    # The model has seen what commands returned.
    samples = (tmp_path / "a" / "samples.jsonl").read_text().splitlines()
    spans = [span for line in samples for span in json.loads(line)["spans"]]
    assert any("<returncode>" in "".join(texts) for version, texts, *_ in spans)

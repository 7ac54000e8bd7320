"""Examples of agents with packages that are not this project's, each trained in a real run.

As for a user, the package is installed into an environment of its own. Where there is no package
index the tests are skipped.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from test_agents import make_model, with_package

from conftest import ROOT, jail_problem


def train(folder, agent, command):
    """Two steps with an agent's command. Returns the lines of the steps in metrics.jsonl."""
    env = os.environ | {"AGENT": shlex.join(agent)}
    command = f"bash run.sh {command} --out {folder} --run a --samples_logged 100".split()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # No attempt has failed.
    assert "unparsable" not in done.stdout, done.stdout
    lines = [json.loads(x) for x in (folder / "a" / "metrics.jsonl").read_text().splitlines()]
    assert max(x["mismatch"] for x in lines if x.get("mismatch") is not None) < 1e-5
    return [x for x in lines if "step" in x]


def texts_of_samples(folder):
    """The texts of all logged samples, [one for each span of each sample]."""
    samples = (folder / "a" / "samples.jsonl").read_text().splitlines()
    spans = [span for line in samples for span in json.loads(line)["spans"]]
    return ["".join(texts) for version, texts, *_ in spans]


@pytest.mark.slow
@pytest.mark.skipif(jail_problem() != "", reason=jail_problem())
def test_mini_swe_agent_runs_commands(tmp_path):
    """Every answer of a tiny model has a command, which runs in mini-swe-agent's own jail."""
    agent = with_package(tmp_path, "mini_swe_agent", "mini-swe-agent==2.4.*")
    if not agent:
        pytest.skip("mini-swe-agent is not to be had")
    make_model(tmp_path / "model", "tests", "bash_blocks", 150)
    command = f"agent --model {tmp_path}/model --steps 2 --batch_size 16 --attempts 4 --port 9470"
    command += " --max_new_tokens 120 --max_model_len 240 --concurrency 16 --save_every 0"
    steps = train(tmp_path, agent, f"{command} --eval_problems 2 --eval_attempts 1")
    # The agent forgets an answer without a command, so the turn after it begins a new segment.
    assert all(1 <= x["segments"] <= x["turns"] <= 3 for x in steps)
    # The model has seen what commands returned, and some files were right.
    assert any("<returncode>0" in text for text in texts_of_samples(tmp_path))
    assert any(x["reward"] > 0 for x in steps)


@pytest.mark.slow
@pytest.mark.skipif(jail_problem() != "", reason=jail_problem())
@pytest.mark.skipif(not shutil.which("npm"), reason="there is no npm")
def test_codex_writes_files(tmp_path):
    """Codex is installed from npm and runs commands of a tiny model in its own sandbox."""
    folder = tmp_path / "npm"
    command = ["npm", "install", "--prefix", str(folder), "@openai/codex@0.171"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if "E404" in done.stderr:
        pytest.skip("@openai/codex is not to be had")
    assert done.returncode == 0, done.stderr[-2000:]
    make_model(tmp_path / "model", "examples/agents", "files", 150)
    # Codex keeps programs of its sandbox in a directory that must not be a temporary one.
    home = ROOT / "out" / "codex"
    variables = [f"PATH={folder}/node_modules/.bin:{os.environ['PATH']}", f"CODEX_HOME={home}"]
    variables.append(f"TMPDIR={tmp_path}")
    agent = ["env", *variables, sys.executable, f"{ROOT}/examples/agents/codex.py"]
    command = f"agent --model {tmp_path}/model --steps 2 --batch_size 16 --attempts 4 --port 9470"
    command += " --max_new_tokens 100 --max_model_len 200 --concurrency 16 --save_every 0"
    steps = train(tmp_path, agent, f"{command} --eval_problems 2 --eval_attempts 1")
    # A call and the answer after it are one segment, and some files were right.
    assert [x["segments"] for x in steps] == [1.0, 1.0]
    assert any(x["turns"] > 1 for x in steps)
    assert any(x["reward"] > 0 for x in steps)

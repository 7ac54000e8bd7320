"""Runs with agents and with a judge, from the command line to the metrics.

All is real: run.sh, vLLM with its chat templates and tool parsers, and the clients. Only the run
that ends because the judge's budget is spent has a FAKE engine.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import requests

from conftest import ROOT, jail_problem
from fake_engine import fake_vllm
from plumbing.placement import ENGINE_ENV

# Of the groups of this seed, which --late wait trains in the order of their draws, each of the four
# agents has at least three.
KNOBS = """
    --steps 2 --batch_size 64 --attempts 8 --max_new_tokens 120 --max_model_len 250 --late wait
    --eval_problems 8 --eval_attempts 1 --samples_logged 100 --save_every 0 --port 9470 --seed 6
    --rows packed
"""


def make_model(path, folder, name, steps):
    """Make a tiny model from the demonstrations of the module `name` in `folder`."""
    program = (
        "import sys, tasks; tasks.__path__.append(sys.argv[2]); from tools import base_model; "
        "base_model.make_model([sys.argv[3]], sys.argv[1], 0, steps=int(sys.argv[4]))"
    )
    command = [sys.executable, "-c", program, str(path), folder, name, str(steps)]
    subprocess.run(command, cwd=ROOT, check=True)


# {agent: the package of PyPI that it needs, and this project does not}
PACKAGES = {"openai_agents": "openai-agents==0.24.*", "verifiers_env": "verifiers==0.4.*"}
AGENTS = ["anthropic_tools", "client_agent", *PACKAGES]


def with_package(folder, example, package):
    """The command of an example in an environment of its own, with a package of PyPI.

    None if there is no package index, or if it does not have the package.
    """
    subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
    command = [f"{folder}/venv/bin/pip", "install", "-q", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if "No matching distribution" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr[-2000:]
    return [f"{folder}/venv/bin/python", f"{ROOT}/examples/agents/{example}.py"]


class AgentsRun(NamedTuple):
    """A run in which the AGENTS have made the attempts."""

    directory: Path
    # the agents that took part
    agents: list
    # what the run printed
    printed: str
    # the lines of metrics.jsonl and of samples.jsonl
    lines: list
    samples: list

    def samples_of(self, agent):
        """The samples of an agent: it makes the attempts at every fourth problem."""
        number = AGENTS.index(agent)
        return [x for x in self.samples if x["problem"] % len(AGENTS) == number]


@pytest.fixture(scope="module")
def agents_run(tmp_path_factory):
    """The AgentsRun of a tiny model that calls the agents' tool.

    If an agent's package is not to be had, the first agent makes its attempts.
    """
    folder = tmp_path_factory.mktemp("agents")
    make_model(folder / "model", "examples/agents", "directory", 250)
    commands = {
        "anthropic_tools": [sys.executable, f"{ROOT}/examples/agents/anthropic_tools.py"],
        "client_agent": [sys.executable, f"{ROOT}/tests/client_agent.py"],
    }
    for example, package in PACKAGES.items():
        commands[example] = with_package(folder / example, example, package)
    agents = [name for name in AGENTS if commands[name]]
    all_commands = [shlex.join(commands[name] or commands["anthropic_tools"]) for name in AGENTS]
    agent = [sys.executable, f"{ROOT}/tests/many_agents.py", *all_commands]
    command = f"bash run.sh agent --model {folder}/model --out {folder} --run a {KNOBS}"
    env = os.environ | {"AGENT": shlex.join(agent)}
    done = subprocess.run(
        command.split(), cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(x) for x in (folder / "a" / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(x) for x in (folder / "a" / "samples.jsonl").read_text().splitlines()]
    return AgentsRun(folder / "a", agents, done.stdout, lines, samples)


def turns_of(sample):
    """The number of the model's turns in a line of samples.jsonl."""
    is_sampled = [version >= 0 for version, *_ in sample["spans"]]
    return sum(now and not before for before, now in zip([False, *is_sampled], is_sampled))


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_agents_are_trained_on_exact_tokens(agents_run, name):
    if name not in agents_run.agents:
        pytest.skip(f"{PACKAGES[name]} is not to be had")
    # No attempt has failed: the assertions of client_agent.py held, too.
    assert "unparsable" not in agents_run.printed, agents_run.printed
    lines = agents_run.lines
    assert max(x["mismatch"] for x in lines if x.get("mismatch") is not None) < 1e-5
    assert len(agents_run.samples) == 128
    for line in [x for x in lines if "step" in x]:
        samples = [x for x in agents_run.samples if x["step"] == line["step"]]
        segments = [x["spans"][-1][2] + 1 for x in samples]
        assert line["segments"] == pytest.approx(np.mean(segments))
        assert line["turns"] == pytest.approx(np.mean([turns_of(x) for x in samples]))
    own = agents_run.samples_of(name)
    assert len(own) >= 24
    if name == "client_agent":
        # Its completion is a segment of its own. Most attempts call the tool, and some call it a
        # second time in the text.
        assert {x["spans"][-1][2] for x in own} == {1}
        assert 2.4 < np.mean([turns_of(x) for x in own]) <= 3
    else:
        # Turns of one conversation are one segment, and most attempts call the tool.
        assert {x["spans"][-1][2] for x in own} == {0}
        assert 1.4 < np.mean([turns_of(x) for x in own]) <= 4


@pytest.mark.slow
def test_openai_client_is_answered_in_every_kind_of_request(agents_run):
    for message in (
        "strict of a client's tool is left",
        "tool_choice of a client is auto",
        "top_p",
    ):
        assert message in agents_run.printed
    own = agents_run.samples_of("client_agent")
    for sample in own:
        texts = ["", ""]
        for version, tokens, segment in sample["spans"]:
            texts[segment] += "".join(tokens)
        assert texts[0].startswith("<user>") and "<" not in texts[1].removesuffix("<eos>")[:3]
        if sample["step"] == 1:
            # The engine's logprobs equal the trainer's in every segment.
            assert np.abs(sample["log_ratios"]).max() < 1e-3
    command = [sys.executable, "tools/show.py", str(agents_run.directory), "--n", "128"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.count("---- segment 2") == len(own)


@pytest.mark.slow
@pytest.mark.skipif(jail_problem() != "", reason=jail_problem())
def test_commands_in_a_shell_are_trained_on_exact_tokens(tmp_path):
    """Every first answer of a tiny model has a command, which runs in a jail."""
    for name, options in [("train", []), ("test", ["--held_out"])]:
        command = [sys.executable, "examples/shell_problems.py", f"{tmp_path}/{name}", *options]
        subprocess.run([*command, "--count", "8"], cwd=ROOT, check=True)
    make_model(tmp_path / "model", "tests", "bash_blocks", 150)
    command = f"bash run.sh agent --model {tmp_path}/model --chat True --out {tmp_path} --run a"
    command += f" --task shell --train_data {tmp_path}/train --eval_data {tmp_path}/test"
    command += " --max_new_tokens 120 --max_model_len 240 --steps 2 --batch_size 16 --attempts 4"
    command += " --eval_problems 4 --eval_attempts 1 --save_every 0 --port 9470 --concurrency 16"
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "unparsable" not in done.stdout, done.stdout
    lines = [json.loads(x) for x in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "step" in x]
    # All turns of an attempt are one segment, and attempts have run commands.
    assert [x["segments"] for x in steps] == [1.0, 1.0]
    assert all(x["by_task"]["shell"]["logged"]["commands"] > 0 for x in steps)
    assert all(x["turns"] > 1 for x in steps)


@pytest.mark.slow
def test_rewards_come_from_a_judge_on_a_second_vllm(tmp_path, base_model):
    """The judge likes answers with an `a`; a run whose JUDGE_BUDGET is spent ends and says so."""
    make_model(tmp_path / "judge", "tests", "grader", 250)
    for split, letters in (("train", "xbaqcf"), ("test", "gbaqci")):
        prompts = [json.dumps(dict(prompt=f"{letters[k:]}{letters[:k]}=")) for k in range(6)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(prompts))
    judge_arguments = (
        f"-m vllm.entrypoints.openai.api_server --model {tmp_path}/judge "
        "--served-model-name judge --port 9480 --max-model-len 200 --dtype float32 --enforce-eager"
    )
    env = os.environ | ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    with open(tmp_path / "judge.log", "w") as log:
        judge = subprocess.Popen(
            [sys.executable, *judge_arguments.split()],
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = "http://127.0.0.1:9480"
    command = (
        f"bash run.sh toy --task judge --model {base_model} --out {tmp_path} --run j --port 9485 "
        "--steps 2 --batch_size 32 --attempts 8 --eval_every 0 --samples_logged 100 --save_every 0 "
        "--rows packed "
        f"--train_data {tmp_path}/train.jsonl --eval_data {tmp_path}/test.jsonl"
    ).split()
    run_options = dict(cwd=ROOT, capture_output=True, text=True, timeout=1800)
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            try:
                requests.get(f"{url}/health", timeout=3)
                break
            except requests.RequestException:
                time.sleep(1)
        env = os.environ | {"JUDGE_URL": f"{url}/v1"}
        done = subprocess.run(command, env=env, **run_options)
        assert done.returncode == 0, done.stdout[-3000:]
        # This run has a FAKE engine: real ones take half a minute to start.
        env |= {"JUDGE_BUDGET": "3", "PYTHONPATH": str(fake_vllm(tmp_path / "fake"))}
        spent = subprocess.run([*command, "--fresh", "True"], env=env, **run_options)
    finally:
        # The signal goes to the whole group, as the worker of vLLM is a process of its own.
        os.killpg(judge.pid, signal.SIGKILL)
        judge.wait()
    # The second start made no step: the first run is still in its place.
    samples = (tmp_path / "j" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(x) for x in samples]
    rewards = [round(x["reward"], 3) for x in samples]
    are_right = [(reward == 0.9) == ("a" in x["completion"]) for reward, x in zip(rewards, samples)]
    assert np.mean(are_right) > 0.9 and set(rewards) == {0.1, 0.9}
    assert spent.returncode and "JUDGE_BUDGET is spent" in spent.stdout

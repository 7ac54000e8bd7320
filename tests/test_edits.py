"""Edits that researchers make, each a patch in tests/edits, most of them of at most 15 lines in at
most two files (by hand: `git apply tests/edits/muon.patch`).

Each is applied to a copy of the repository, where tests/edits/checks.py tests what it does. The
copy and its processes are real; the run with five edits together has FAKE engines.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from forked import run_pytest

from conftest import ROOT
from fake_engine import fake_vllm
from plumbing.checkpoints import last_state
from test_run import metrics

FOLDER = ROOT / "tests" / "edits"
# the edits that need more than 15 lines in 2 files
LIMITS = {"dpo_pairs": (24, 2), "self_teacher": (26, 4), "tree_of_attempts": (32, 1)}
EDITS = sorted(path.stem for path in FOLDER.glob("*.patch"))


def copy_of_the_repository(folder, base_model):
    """Copy the sources to `folder` and link the base model there; return the folder."""
    folder.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for part in ("bench", "plumbing", "tasks", "tools", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    top = [ROOT / name for name in ("run.sh", "pyproject.toml", "requirements.txt")]
    for path in (*ROOT.glob("*.py"), *top):
        shutil.copy(path, folder)
    models = folder / "out" / "models"
    models.mkdir(parents=True)
    (models / base_model.name).symlink_to(base_model)
    return folder


def apply(name, folder):
    """Apply an edit to a copy. If this fails, refresh tests/edits/NAME.patch."""
    # Git must not take a repository above the copy for the one to change
    ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    run_in(folder, ["git", "apply", str(FOLDER / f"{name}.patch")], 300, **ceiling)


def run_in(folder, command, seconds, **environment):
    """Run a command in a copy; AssertionError if it fails."""
    of_the_copy = dict(PYTHONPATH=str(folder), PIPELINE_PYTHON=sys.executable)
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | of_the_copy | environment,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_edit_is_short_and_passes_its_check(name, tmp_path, base_model):
    text = (FOLDER / f"{name}.patch").read_text()
    files = re.findall(r"^\+\+\+ b/(.+)$", text, re.M)
    lines = re.findall(r"^(?:\+(?!\+\+ )|-(?!-- )).*$", text, re.M)
    most_lines, most_files = LIMITS.get(name, (15, 2))
    size = f"{name}: {len(lines)} lines in {files}"
    assert len(lines) <= most_lines and len(files) <= most_files, size
    folder = copy_of_the_repository(tmp_path / "copy", base_model)
    apply(name, folder)
    for ruff in ("ruff format --check", "ruff check"):
        run_in(folder, [sys.executable, "-m", *ruff.split(), *files], 300)
    run_pytest(folder, ["-q", "tests/edits/checks.py", "-k", f"test_{name}"], 900)


NEW_LOSS = """
import config as cfg
from test_train import loss_of
assert cfg.parse(["toy", "--loss", "mine"]).loss == "mine"
_, gradient, clipped = loss_of("mine", [1.0, 7.0], [1.0, 1.0])
assert gradient == [-1.0, -1.0] and clipped == [False, True], (gradient, clipped)
"""


def test_new_loss_takes_the_edits_that_the_readme_lists(tmp_path, base_model):
    """The edits: a branch of policy_loss, a name in Config.loss, a row in config.LOSSES."""
    folder = copy_of_the_repository(tmp_path / "copy", base_model)
    bounds = '    "dppo": ("token", 0.0, 0.2),\n'
    branch = '    elif kind == "mine":\n        loss = -advantages * logprobs\n'
    refusal = "    else:\n        raise"
    for file, old, new in [
        ("config.py", '"dppo"]', '"dppo", "mine"]'),
        ("config.py", bounds, f'{bounds}    "mine": ("token", 0.0, 2.0),\n'),
        ("train.py", refusal, branch + refusal),
    ]:
        text = (folder / file).read_text()
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new))
    path = f"{folder}:{folder}/tests"
    run_in(folder, [sys.executable, "-c", NEW_LOSS], 300, PYTHONPATH=path)


def test_each_edit_has_a_check():
    checks = re.findall(r"^def test_(\w+)", (FOLDER / "checks.py").read_text(), re.M)
    assert len(EDITS) == 15
    for name in EDITS:
        assert any(check.startswith(name) for check in checks), name


@pytest.mark.slow
def test_five_edits_together_train_in_a_run(tmp_path, base_model):
    """The run has FAKE engines and two tasks; the model was not prepared for the second one."""
    folder = copy_of_the_repository(tmp_path / "copy", base_model)
    # No two of these edits change the same lines
    for name in "cispo_by_position curriculum entropy_per_task muon temperature_per_member".split():
        apply(name, folder)
    knobs = (
        f"toy --run edited --port 8980 --model {base_model} --task toy:0.7,tail:0.3 --loss cispo "
        "--steps 5 --batch_size 64 --warmup_steps 1 --eval_problems 16 --save_every 0"
    )
    path = f"{folder}:{fake_vllm(tmp_path / 'fake')}"
    run_in(folder, ["bash", "run.sh", *knobs.split()], 300, PYTHONPATH=path)
    run_dir = folder / "out" / "edited"
    steps, _ = metrics(run_dir)
    assert len(steps) == 5
    for line in steps:
        assert len(line["above_2"]) == 10
        # A step may have no group of one of the tasks
        tokens = {task: x["samples"] * x["tokens"] for task, x in line["by_task"].items()}
        entropy = sum(n * line["entropy_by_task"][task] for task, n in tokens.items())
        assert entropy / sum(tokens.values()) == pytest.approx(line["entropy"], rel=1e-3)
    # Every token of the first step is of version 0
    assert steps[0]["mismatch"] < 1e-5
    rates = last_state(run_dir)["sampler"]["state"]["rates"]
    assert rates and all(0 <= rate <= 1 for rate in rates.values())

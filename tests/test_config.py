"""The command line: values, presets, help, and mistakes, each of which is refused in one line.

Tests of run.sh start it as a real process. No engine or trainer is started.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import get_args, get_type_hints

import pytest

import config as cfg
from conftest import ROOT, resolved
from plumbing import knobs, placement, rundir
from plumbing.queues import publish_json
from tools import run


@pytest.mark.parametrize(
    "arguments,message",
    [
        (
            "toy --stepz 3",
            "--stepz: there is no such knob, did you mean --steps? (bash run.sh --help",
        ),
        (
            "toy --learning_rate 1e-5",
            "--learning_rate: there is no such knob, did you mean --lr or",
        ),
        ("toy --kv-cache 2", "did you mean --kv_cache_gb or --recompute_kv?"),
        ("toy --gpus 2", "did you mean --engines or"),
        ("toy --lr 1e-5 --stepz=3", "--stepz=3: there is no such knob, did you mean --steps?"),
        ("toy -steps 3", "-steps: a knob begins with two dashes, did you mean --steps?"),
        ("toy steps=3", "steps=3: a knob begins with two dashes, did you mean --steps?"),
        ("toy math", "math: unexpected; knobs are written --name VALUE, and a preset comes before"),
        ("toy --lr 1e-4 1e-5", "1e-5: unexpected after --lr, which takes 1 of them"),
        ("toy --lr", "--lr FLOAT: none of 1 values given"),
        ("toy --system_prompt --lr 1", "one that begins with -- is written --system_prompt=VALUE"),
        ("toy --reward_finished 1 0", "--reward_finished FLOAT FLOAT FLOAT FLOAT: 2 of 4 values"),
        ("toy --steps many", "--steps many: must be a whole number"),
        ("toy --steps 1e3", "--steps 1e3: must be a whole number"),
        ("toy --betas 0.9 high", "--betas high: must be a number"),
        (
            "toy --loss ppoo",
            "--loss ppoo: must be reinforce, ppo, cispo, gspo, icepop or dppo, did you mean",
        ),
        ("toy --chat true", "--chat true: must be True or False, did you mean True?"),
        ("chess", "unknown preset 'chess': choose from toy, smol, countup, guess, agent, math"),
        ("stats", "unknown preset 'stats': did you mean status? choose from toy"),
        ("mathz", "unknown preset 'mathz': did you mean math? choose from toy"),
        (
            "toy --task toy,mathz",
            "No module named 'tasks.mathz'; did you mean maths? tasks here: agent",
        ),
        (
            "toy --task chess",
            "No module named 'tasks.chess'; tasks here: agent, countup, guess, gym, judge, maths, "
            "python_tool, shell, tail",
        ),
        (
            "toy --attempts 9",
            "--batch_size must be a multiple of --attempts; the values are --batch_size 448",
        ),
        (
            "toy --attempts 1 --batch_size 4",
            "--attempts must be 2 or more: this --advantage compares the attempts at a problem",
        ),
        ("toy --max_new_tokens 128", "--max_new_tokens must be below --max_model_len"),
        ("toy --row_tokens 100", "--row_tokens must be at least --max_model_len"),
        ("toy --overlong_buffer 41", "--overlong_buffer must not exceed"),
        ("toy --clip_low 0.5", "--loss reinforce and dppo have no lower bound of weights"),
        ("toy --late wait --on_full drop_oldest", "--late wait and hold need --on_full block"),
        (
            "toy --late hold --conventional_g 2",
            "it needs --conventional_g 0; the values are --late hold, --conventional_g 2",
        ),
        ("toy --ratio product --loss ppo", "--ratio product with this --loss would multiply"),
        ("toy --loss dppo --ratio sequence", "the values are --loss dppo, --ratio seq"),
        (
            "toy --loss dppo --clip_high 5",
            "--clip_high must be below 1; the values are --loss dppo, --clip_high 5",
        ),
        ("toy --loss dppo --clip_low 0.1", "--loss reinforce and dppo have no lower bound of"),
        ("toy --advantage max_rl --overlong_buffer 3", "no reward may be negative: it needs"),
        ("toy --advantage max_rl --reward_cut_off 0 -1 0 0", "no reward may be negative"),
        (
            "toy --top_p 0.9",
            "--top_p: tokens must be sampled from the very distribution that is trained",
        ),
        ("toy --repetition-penalty=1.1", "--repetition-penalty=1.1: tokens must be sampled"),
        ("toy --teacher a/b --temperature 0.7", "--teacher needs --temperature 1; the values"),
        ("toy --teacher a/b --no_signal drop", "--teacher needs --no_signal keep; the values"),
        ("toy --adam_8bit True", "--adam_8bit needs torchao"),
        ("toy --clip_low 6", "--clip_low must be below --clip_high; the values are --clip_low 6.0"),
        ("toy --max_lag -1", "--max_lag -1: must be from 0 to 1,000,000,000"),
        ("toy --temperature 0", "--temperature 0.0: must be from 0.01 to 100"),
        ("toy --engines 3 --tensor_parallel 2 --trainers 4", "do not go into 1 nodes of 8 GPUs"),
    ],
)
def test_command_line_mistakes_are_one_line(arguments, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(cfg.ConfigError) as e:
        resolved(*arguments.split(), gpus=8)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("value", ["inf", "nan", "-1e400"])
def test_every_number_is_finite_and_has_bounds(value):
    for name, kind in get_type_hints(cfg.Config).items():
        if kind in (float, tuple[float, float], tuple[float, float, float, float]):
            values = [value] * len(get_args(kind) or [kind])
            with pytest.raises(cfg.ConfigError, match=f"--{name} .*: must be from"):
                resolved("toy", f"--{name}", *values)


@pytest.mark.parametrize("name", [".", "a/b", "", "-x", "a\n", "a b", "\u00e9", "_a", "a" * 101])
def test_run_names_that_are_paths_are_refused(tmp_path, name):
    argv = [f"--run={name}", "--out", str(tmp_path)]
    for start in (lambda: resolved("toy", *argv), lambda: run.serve(argv)):
        with pytest.raises(cfg.ConfigError, match="--run .* letters, digits") as e:
            start()
        assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())
    for valid_name in ("a", "toy.1", "A-b_c.D", "7", "a" * 100):
        assert resolved("toy", "--run", valid_name).run == valid_name


def test_a_loss_brings_its_own_clip_range_unless_one_is_given():
    c = resolved("toy", "--loss", "ppo")
    assert (c.clip_low, c.clip_high) == (0.8, 1.2)
    c = resolved("toy", "--loss", "ppo", "--clip_high", "1.28")
    assert (c.clip_low, c.clip_high) == (0.8, 1.28)
    assert resolved("toy").clip_high == 5.0
    # A continued run that changes the loss gets the range of the new loss.
    assert resolved("toy", "--loss", "icepop").clip_low == 0.5
    assert resolved(*"toy --loss dppo --clip_high 0".split()).clip_high == 0


def call(command_line, **environment):
    """Run a command line in the repository, with this Python, so that nothing is installed."""
    return subprocess.run(
        command_line.split(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        env=os.environ | {"PIPELINE_PYTHON": sys.executable} | environment,
    )


def test_command_line_sets_every_kind_of_value():
    knobs = "--chat True --steps=7 --max-lag 2 --lr 1e-4 --betas 0.5 0.25 --late wait --max_lag 3"
    c = cfg.parse(["toy", *knobs.split(), "--system_prompt=--x = y", "--kl_coef", "-1e-3"])
    assert (c.chat, c.steps, c.max_lag, c.lr, c.betas) == (True, 7, 3, 1e-4, (0.5, 0.25))
    assert (c.late, c.system_prompt, c.kl_coef) == ("wait", "--x = y", -1e-3)
    assert c.batch_size == cfg.TOY["batch_size"]


def test_a_loss_without_a_row_says_what_to_add(monkeypatch):
    monkeypatch.delitem(cfg.LOSSES, "icepop")
    with pytest.raises(cfg.ConfigError, match="--loss icepop: add an entry to LOSSES in config.py"):
        resolved("toy", "--loss", "icepop")


def test_a_field_that_is_no_knob_is_named():
    @dataclass
    class Wrong:
        # A list is no type of a knob.
        names: list[str]

    with pytest.raises(TypeError, match="Wrong.names: a knob is a str, bool, int, float"):
        knobs.knobs_of(Wrong)


def test_launcher_prints_a_mistake_and_starts_nothing(tmp_path):
    done = call(f"bash run.sh toy --out {tmp_path}/o --stepz 3")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "--stepz" in done.stderr
    assert not (tmp_path / "o").exists()


def test_weight_backend_is_nccl_from_two_gpus_on():
    for gpus, backend in ((0, "gloo"), (1, "gloo"), (2, "nccl")):
        assert resolved("toy", gpus=gpus).weight_backend == backend


def test_an_evaluation_has_every_gpu_for_engines():
    c = cfg.parse(["toy", "--engines", "8"])
    c = placement.resolve(c, 8, training=False)
    devices = [env["CUDA_VISIBLE_DEVICES"] for _, env, _ in placement.engine_commands(c, 8)]
    assert devices == list("01234567")
    assert "train" not in [name for name, _, _ in placement.commands(c, 8)]


def shown(text):
    """Return the names of the knobs in a help text."""
    return re.findall(r"^[^a-z]*--(\w+) ", text, re.M)


def test_the_data_of_a_preset_are_used_with_its_task_alone():
    sums = cfg.SMOL["train_data"]
    for words, data in (
        ("smol", (sums, sums)),
        ("smol --task gym --train_data mine", ("mine", sums)),
        ("smol --task maths", ("", "")),
        ("smol --task maths --train_data mine", ("mine", "")),
    ):
        config = cfg.parse(words.split())
        assert (config.train_data, config.eval_data) == data, words


def test_help_shows_commands_presets_and_every_knob_with_the_presets_value():
    assert cfg.parse([]).task == "toy"
    assert cfg.parse(["math"]).model == "Qwen/Qwen2.5-7B"
    done = call("bash run.sh math --help")
    assert done.returncode == 0 and shown(done.stdout) == [f.name for f in fields(cfg.Config)]
    assert re.search(r"samples per optimizer step.*\(default: 1024\)", done.stdout, re.S)
    first, presets, _ = re.split(r"\n(?=Presets|Knobs)", done.stdout)
    assert re.findall(r"^  (\S+) +\S", presets, re.M) == list(cfg.PRESETS)
    for command in cfg.COMMANDS[:-1]:
        assert f"  bash run.sh {command} " in first
    assert call("bash run.sh help").stdout == call("bash run.sh --help").stdout
    doctor_help = call("bash run.sh doctor toy --help")
    assert doctor_help.stdout.startswith("Five minutes")
    assert shown(doctor_help.stdout) == shown(done.stdout)
    assert call("bash run.sh status --help").stdout.startswith("Say what a run is doing")


@pytest.mark.parametrize(
    "search,expected",
    [
        ("lag", ["max_lag", "conventional_g", "on_full", "late"]),
        ("--max-lag", ["max_lag", "conventional_g", "on_full", "late"]),
        ("LEARNING rate", ["lr", "warmup_steps", "lora_alpha"]),
        ("gspo", ["loss"]),
        ("broadcast mb", ["bucket_mb"]),
    ],
)
def test_help_finds_the_knobs_that_have_all_of_the_words(search, expected):
    for command in ("bash run.sh math --help", "bash run.sh help"):
        done = call(f"{command} {search}")
        assert shown(done.stdout) == expected and not done.stderr


def test_help_names_the_nearest_knobs_when_nothing_matches():
    for search in ("zzzq", "lag zzzq"):
        done = call(f"bash run.sh --help {search}")
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith(f"run.sh: --help {search}: no knob has that in its name or")
        nearest_names = done.stderr.partition("nearest names: ")[2].split(", ")
        assert len(nearest_names) == 3
        assert all(name.strip().startswith("--") for name in nearest_names)
    done = call("bash run.sh --help max_lagg")
    assert "the nearest names: --max_lag, " in done.stderr
    done = call("bash run.sh stats --help")
    assert done.returncode == 1 and "did you mean status?" in done.stderr


def test_same_command_continues_a_stopped_run_and_moves_a_complete_one(tmp_path):
    argv = ["toy", "--out", str(tmp_path)]
    c = resolved(*argv)
    assert "new run" in rundir.Opening(c).make()
    first = c.run_id
    run_dir = rundir.write(c)
    assert json.loads((run_dir / "config.json").read_text())["config"]["steps"] == c.steps
    assert cfg.load(str(run_dir)) == c
    (run_dir / "checkpoints" / "step_000130").mkdir(parents=True)
    (run_dir / "queues").mkdir()
    (run_dir / "engines").mkdir()
    continued_run = resolved(*argv, "--lr", "1e-5")
    expected_message = "from step_000130; from here on with other knobs .*: lr "
    assert re.search(expected_message, rundir.Opening(continued_run).make())
    assert not (run_dir / "queues").exists()
    assert not (run_dir / "engines").exists()
    assert continued_run.run_id == first
    refusal = "--batch_size cannot change within a run: .* It is 448 in .*, and 16 now"
    with pytest.raises(cfg.ConfigError, match=refusal):
        rundir.Opening(resolved(*argv, "--batch_size", "16")).make()
    # The run died before its last evaluation.
    (run_dir / "checkpoints" / f"step_{c.steps:06d}").mkdir()
    assert f"from step_{c.steps:06d}" in rundir.Opening(resolved(*argv)).make()
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=c.steps, done=True)
    # A complete run continues if --steps is larger.
    longer_run = resolved(*argv, "--steps", str(c.steps + 30))
    changed_steps = f"steps \\({c.steps} -> {c.steps + 30}"
    expected_message = f"continuing .* from step_{c.steps:06d}; .*: {changed_steps}"
    assert re.search(expected_message, rundir.Opening(longer_run).make())
    assert longer_run.run_id == first
    history = (run_dir / "continued.jsonl").read_text().splitlines()
    assert json.loads(history[0])["changed"] == {"lr": [c.lr, 1e-5]}
    changed = {"steps": [c.steps, c.steps + 30]}
    assert json.loads(history[-1]) == {"step": c.steps, "changed": changed}
    assert f"from step_{c.steps:06d}" in rundir.Opening(resolved(*argv)).make()
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=c.steps, done=True)
    assert "the one before it is now" in rundir.Opening(c).make()
    assert c.run_id != first
    assert (tmp_path / "toy.1" / "checkpoints").exists()


def test_run_directory_is_written_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    c = resolved("toy", "--out", str(tmp_path))
    assert json.loads((rundir.write(c) / "config.json").read_text())["git"] == ""

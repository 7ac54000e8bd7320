"""Runs that are continued: which knobs may change, what is read from a checkpoint; and starts
that fail.

Checkpoints are real, and so is run.sh where a test calls it. No engine is started; ranks, a full
disk and an engine that cannot start are FAKE where a test says so.
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from test_config import call
from transformers import AutoConfig

import config as cfg
import train
from conftest import resolved, with_knobs
from plumbing import checkpoints, placement, rundir, supervise
from plumbing.queues import publish_json
from tools import memory, prepare, run

# Every knob, by what happens to it on a continued run. A change of a "fixed" knob is refused.
# "given" knobs name the start itself and are compared with nothing. All others are in effect from
# there on: processes start anew and read them from out/<run>/config.json. A checkpoint also keeps
# the "optimizer" knobs, and restoring it must not bring back the old values.
KNOBS = dict(
    given="run out dry_run fresh run_id nnodes master_addr master_port",
    fixed="""
    task train_data model family seed batch_size attempts dtype lora_rank lora_alpha adam_8bit
    """,
    optimizer="lr betas weight_decay",
    read="""
    wandb eval_data max_left_out chat system_prompt thinking head_float32 steps max_lag
    conventional_g on_full late no_signal engines tensor_parallel concurrency temperature
    max_new_tokens max_model_len kv_cache_gb gpu_memory_utilization prefix_caching tool_parser
    reasoning_parser enforce_eager engine_flags reward_finished reward_cut_off reward_timeout
    episode_timeout overlong_buffer overlong_mask advantage loss ratio clip_low clip_high
    normalizer teacher teacher_coef kl_coef kl_behavior_coef lr_by_ess entropy_coef mismatch_limit
    warmup_steps
    lr_schedule max_grad_norm row_tokens rows replay_routing trainers checkpointed_layers
    offload_activations compile recompute_kv weight_backend bucket_mb sync_timeout eval_every
    eval_problems eval_attempts eval_temperature save_every keep_last samples_logged keep_steps port
    endpoint_host endpoint_port
    start_timeout stall_timeout stop_timeout engine_threads trainer_threads
    """,
)
KNOBS = {kind: names.split() for kind, names in KNOBS.items()}
CPU = torch.device("cpu")


def another(value):
    """Return a value of a knob that differs from this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (value[0] / 2, *value[1:])
    return value + "x" if isinstance(value, str) else value + 1


def test_table_of_continued_knobs_has_every_knob_once():
    assert sorted(sum(KNOBS.values(), [])) == sorted(field.name for field in fields(cfg.Config))
    assert set(KNOBS["fixed"]) == rundir.FIXED.keys()
    assert set(KNOBS["given"]) == rundir.FILLED_IN | {"run"}


def stopped_run(out, **knobs):
    """Return (Config, directory) of a run that was stopped after step 2."""
    config = with_knobs(resolved("toy", "--out", out, "--run", "r"), **knobs)
    rundir.Opening(config).make()
    run_dir = rundir.write(config)
    (run_dir / "checkpoints" / "step_000002" / "trainer").mkdir(parents=True)
    publish_json(run_dir / "queues.json", version=2)
    (run_dir / "queues").mkdir()
    publish_json(run_dir / "queues" / "version.json", version=2, done=False)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return config, run_dir


def contents(folder):
    """Return {path: digest} of every file below a directory."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_changed_knob_is_in_effect_or_refused_by_name(tmp_path):
    config, run_dir = stopped_run(tmp_path)
    before = contents(tmp_path)
    for name in KNOBS["fixed"]:
        changed = with_knobs(config, **{name: another(getattr(config, name))})
        with pytest.raises(cfg.ConfigError, match=f"^--{name} cannot change within a run: ") as e:
            rundir.Opening(changed)
        # The message has both values
        assert repr(getattr(config, name)) in str(e.value)
        assert repr(getattr(changed, name)) in str(e.value)
    for name in KNOBS["read"] + KNOBS["optimizer"]:
        changed = with_knobs(config, **{name: another(getattr(config, name))})
        opening = rundir.Opening(changed)
        assert opening.changed == {name: (getattr(config, name), getattr(changed, name))}
        assert f"with other knobs (--run NAME for a run of its own): {name} (" in opening.summary
    assert contents(tmp_path) == before
    # The processes will read the new value
    opening.make()
    rundir.write(changed)
    assert asdict(cfg.load(run_dir)) == asdict(changed)
    history = json.loads((run_dir / "continued.jsonl").read_text())
    assert history == {
        "step": 2,
        "changed": {name: [getattr(config, name), getattr(changed, name)]},
    }


def test_the_same_command_continues_with_no_other_knobs(tmp_path):
    """The run knows how its rows are computed; the command line still says auto."""
    config, _ = stopped_run(tmp_path, rows="packed")
    opening = rundir.Opening(with_knobs(config, rows="auto"))
    assert opening.changed == {} and "other knobs" not in opening.summary
    opening = rundir.Opening(with_knobs(config, rows="padded"))
    assert opening.changed == {"rows": ("packed", "padded")}


class OneRank:
    """FAKE ranks: one process without a group."""

    rank = 0
    saving = None


@pytest.fixture
def saved(tmp_path, base_model, monkeypatch):
    """(Config, run directory) with a real checkpoint of version 1, after one optimizer step."""
    config = resolved("toy", "--out", tmp_path, "--run", "r", "--model", base_model)
    run_dir = rundir.write(config)
    policy, optimizers = train.build(config, CPU, 1)
    model = policy.model
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizers[0].step()
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    saver = checkpoints.Saver(config, run_dir, model, optimizers, OneRank, checkpoints.NEW_RUN)
    saver.save(checkpoints.NEW_RUN | {"version": 1})
    saver.finish()
    return config, run_dir


def test_an_optimizers_knobs_are_those_of_the_command_not_of_the_checkpoint(saved):
    config, run_dir = saved
    knobs = {name: another(getattr(config, name)) for name in KNOBS["optimizer"]}
    policy, optimizers = train.build(with_knobs(config, **knobs), CPU, 1)
    model = policy.model
    chosen = [[dict(g, params=None) for g in o.param_groups] for o in optimizers]
    checkpoints.restore(checkpoints.newest(run_dir), model, optimizers)
    restored = [[dict(g, params=None) for g in o.param_groups] for o in optimizers]
    assert restored == chosen
    matrices = restored[0][0]
    assert (matrices["weight_decay"], matrices["betas"]) == (1.0, knobs["betas"])
    # The optimizer's moments are the checkpoint's
    assert all(state["step"] == 1 for state in optimizers[0].state.values())


@pytest.mark.parametrize(
    "error,complaint",
    [
        (OSError(5, "Input/output error"), r"cannot be read now \(OSError: .*it may be sound"),
        (MemoryError("no room"), r"cannot be read now \(MemoryError: no room"),
        (EOFError("torn"), r"is damaged \(EOFError: torn\): remove it"),
        (FileNotFoundError("no part"), r"is damaged \(FileNotFoundError: no part"),
    ],
)
def test_checkpoint_is_called_damaged_only_if_it_could_be_read(
    error, complaint, saved, monkeypatch
):
    config, run_dir = saved
    policy, optimizers = train.build(config, CPU, 1)
    model = policy.model

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(torch.distributed.checkpoint, "load", fail)
    newest = checkpoints.newest(run_dir)
    with pytest.raises(cfg.ConfigError, match=f"{newest} {complaint}"):
        checkpoints.restore(newest, model, optimizers)
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.restore(newest, model, optimizers)


def test_a_checkpoint_of_another_model_is_named_and_not_called_damaged(saved):
    config, run_dir = saved
    policy, optimizers = train.build(with_knobs(config, lora_rank=4), CPU, 1)
    model = policy.model
    complaint = "step_000001 is of another model: .*lora_A has .* here, and is absent there"
    with pytest.raises(cfg.ConfigError, match=complaint):
        checkpoints.restore(checkpoints.newest(run_dir), model, optimizers)


# ---- files beside the weights


STRICT = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]}


def strange_model(base_model, folder):
    """Make a model with files that transformers reads and would not write; return its folder."""
    shutil.copytree(base_model, folder)
    (folder / "generation_config.json").write_text(json.dumps(STRICT))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"temperature": 0.5, "mine": [1]}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "notes.json").write_text('{"license": "mine"}')
    return folder


def test_a_models_own_files_are_copied_as_they_are(tmp_path, base_model, monkeypatch):
    model = strange_model(base_model, tmp_path / "model")
    config = resolved("toy", "--out", tmp_path, "--run", "r", "--model", model)
    run_dir = rundir.write(config)
    policy, optimizers = train.build(config, CPU, 1)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    saver = checkpoints.Saver(
        config, run_dir, policy.model, optimizers, OneRank, checkpoints.NEW_RUN
    )
    # The model's directory may be removed while a run goes on
    contents_before = {path.name: path.read_bytes() for path in model.glob("*.json*")}
    estimate, _ = memory.checkpoint_gb(config)
    shutil.rmtree(model)
    saver.save(checkpoints.NEW_RUN | {"version": 1})
    saver.finish()
    checkpoint = checkpoints.newest(run_dir)
    for name in contents_before.keys() - {"config.json"}:
        assert (checkpoint / name).read_bytes() == contents_before[name], name
    written = json.loads((checkpoint / "config.json").read_text())
    assert written == json.loads(contents_before["config.json"]) | {"dtype": "float32"}
    tensors = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("trainer/*.distcp")]
    assert sum(x.stat().st_size for x in tensors) / 1e9 == pytest.approx(estimate, rel=0.05)
    again = train.load_model(with_knobs(config, model=str(checkpoint)), torch.float32)
    for (name, p), q in zip(policy.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_disk_without_room_for_a_checkpoint_is_refused_before_training(
    tmp_path, base_model, monkeypatch
):
    config = resolved("toy", "--out", tmp_path, "--run", "r", "--model", base_model)
    run_dir = rundir.write(config)
    policy, optimizers = train.build(config, CPU, 1)
    # FAKE: the disk is full
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(cfg.ConfigError, match="room for 3 more, and 0.0 GB are free: make room"):
        checkpoints.Saver(config, run_dir, policy.model, optimizers, OneRank, checkpoints.NEW_RUN)


def test_run_that_keeps_all_checkpoints_needs_room_for_one(
    tmp_path, base_model, monkeypatch, capfd
):
    """The doctor is such a run: it has 10,000 steps and is stopped after a few."""
    knobs = "--steps 10000 --save_every 1 --keep_last 0".split()
    config = resolved("toy", "--out", tmp_path, "--run", "r", "--model", base_model, *knobs)
    run_dir = rundir.write(config)
    policy, optimizers = train.build(config, CPU, 1)
    arguments = (config, run_dir, policy.model, optimizers, OneRank, checkpoints.NEW_RUN)
    # FAKE: a disk with room for 20 checkpoints
    free = round(20 * 1e9 * memory.checkpoint_gb(config)[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, free))
    checkpoints.Saver(*arguments)
    assert (
        "--keep_last 0 keeps all checkpoints: 10000 of 0.0 GB are to come" in capfd.readouterr().out
    )
    # FAKE: a full disk
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(cfg.ConfigError, match="room for 1 more, and 0.0 GB are free"):
        checkpoints.Saver(*arguments)


@pytest.mark.parametrize(
    "steps, save_every, keep_last, version, existing, count",
    [
        (270, 90, 2, 0, 0, 3),
        (270, 90, 2, 90, 1, 2),
        # The last step is not a multiple of save_every
        (100, 90, 2, 0, 0, 2),
        # One checkpoint is written before the oldest one is deleted
        (1000, 50, 2, 0, 0, 3),
        (1000, 50, 2, 500, 2, 1),
        (1000, 50, 1, 500, 2, 1),
        # All are kept
        (1000, 50, 0, 500, 10, 10),
        # Only the last version is saved
        (1000, 0, 2, 0, 0, 1),
        # The run has made its last step
        (270, 90, 0, 270, 3, 0),
    ],
)
def test_number_of_checkpoints_that_need_room(
    steps, save_every, keep_last, version, existing, count
):
    config = cfg.Config(steps=steps, save_every=save_every, keep_last=keep_last)
    assert checkpoints.most_to_come(config, version, existing) == count


# ---- a start that fails


def complete_run(out, base_model):
    """Return (Config, directory) of a run that was trained to its end.

    The next start of this run would move it aside.
    """
    config, run_dir = stopped_run(out, model=str(base_model))
    publish_json(run_dir / "queues" / "version.json", version=config.steps, done=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    return config, run_dir


def bad_models(folder, base_model):
    """Make directories of models that cannot be used."""
    (folder / "empty").mkdir(parents=True)
    shutil.copytree(base_model, folder / "tokenless")
    for path in (folder / "tokenless").glob("tok*"):
        path.unlink()
    shutil.copytree(base_model, folder / "unknown")
    (folder / "unknown" / "config.json").write_text('{"model_type": "no_such_family"}')
    base = json.loads((base_model / "config.json").read_text())
    experts = AutoConfig.for_model("qwen3_moe", architectures=["Qwen3MoeForCausalLM"]).to_dict()
    delta_rule = AutoConfig.for_model(
        "qwen3_next", architectures=["Qwen3NextForCausalLM"]
    ).to_dict()
    for name, values in {
        "quantised": base | {"quantization_config": {"quant_method": "fp8"}},
        "stranger": base | {"architectures": ["StrangerForCausalLM"]},
        "indexer": base | {"index_topk": 64},
        "encoder": AutoConfig.for_model("t5").to_dict(),
        "experts": experts,
        "delta_rule": delta_rule,
    }.items():
        shutil.copytree(base_model, folder / name)
        (folder / name / "config.json").write_text(json.dumps(values))


ROW = '{"question": "a", "answer": "1"}\n'
MATHS = "--task maths --train_data {data} --eval_data {data} --model {base}"
REFUSED = {
    "no such model": ("--model /no/such", "--model /no/such is no directory, and the hub does"),
    "offline": ("--model owner/name", "--model owner/name is no directory, and the hub does not"),
    "no model": ("--model {models}/empty", "has no config.json: name the directory of a model"),
    # transformers reads an empty tokenizer from this directory
    "no tokenizer": ("--model {models}/tokenless", "20000 of 20000 problems .* has 0 tokens"),
    "family": ("--model {models}/unknown", "its configuration or tokenizer cannot be read"),
    "no template": ("--model {base} --chat True", "--chat True: the tokenizer of .* has no chat"),
    "too long": (f"{MATHS} --max_model_len 50", "2 of 2 problems .* tokens, there may be 1 to 49"),
    "surrogate": (MATHS.replace("{data}", "{half}"), "half.jsonl:2: 'question' has half of a char"),
    "parser": (
        "--model {base} --tool_parser nonsense",
        "--tool_parser nonsense: vLLM has .*hermes",
    ),
    "quantised": ("--model {models}/quantised", r"\(qwen2\) is quantised \(fp8\): such weights"),
    "stranger": ("--model {models}/stranger", "vLLM has no code .* \\(StrangerForCausalLM\\)"),
    "indexer": ("--model {models}/indexer", "models with sparse attention cannot be trained"),
    "encoder": ("--model {models}/encoder", r"\(t5\) has an encoder and a decoder"),
    "experts": ("--model {models}/experts --lora_rank 8", "qwen3_moe.* has experts, which are no"),
    "delta rule": ("--model {models}/delta_rule --dtype float32", "add --dtype bfloat16"),
    "positions": ("--model {base} --max_model_len 300 --row_tokens 300", "knows 256 positions"),
    "fixed": ("--model {base} --steps 999 --lora_rank 8", "--lora_rank cannot change within a run"),
}


# These mistakes are tested with a real command, which takes some ten seconds, most of them for
# imports. The others are tested in the process of the tests, which has imported everything.
WITH_COMMAND = ("no such model", "offline", "no template", "quantised")


def call_in_this_process(argv, monkeypatch, capfd):
    """Start a run as `bash run.sh` does, with its preparation in this process, too.

    The start must be refused. Returns a CompletedProcess, as test_config.call does.
    """

    def prepare_here(request):
        monkeypatch.setattr(sys, "stdin", io.StringIO(request))
        try:
            prepare.main()
        except SystemExit as e:
            print(e, file=sys.stderr)
            raise cfg.ConfigError("nothing is started, see above") from None

    monkeypatch.setattr(placement, "_run_prepare", prepare_here)
    monkeypatch.setattr(supervise, "end_at_signals", lambda: None)
    with pytest.raises(SystemExit) as ended:
        run.main(argv)
    printed = capfd.readouterr()
    # Python prints a text that is given to sys.exit, and ends with 1.
    assert isinstance(ended.value.code, str)
    return subprocess.CompletedProcess(argv, 1, printed.out, printed.err + ended.value.code)


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_command_that_is_refused_starts_no_engine_and_leaves_a_complete_run_as_it_is(
    mistake, tmp_path, base_model, monkeypatch, capfd
):
    bad_models(tmp_path / "models", base_model)
    (tmp_path / "data.jsonl").write_text(2 * ROW)
    (tmp_path / "half.jsonl").write_text(ROW + ROW.replace('"a"', '"\\ud800"'))
    complete_run(tmp_path / "out", base_model)
    before = contents(tmp_path)
    knobs, complaint = REFUSED[mistake]
    knobs = knobs.format(
        base=base_model,
        models=tmp_path / "models",
        data=tmp_path / "data.jsonl",
        half=tmp_path / "half.jsonl",
    )
    arguments = f"toy --out {tmp_path}/out --run r {knobs}"
    if mistake in WITH_COMMAND:
        done = call(f"bash run.sh {arguments}", HF_HUB_OFFLINE="1")
    else:
        done = call_in_this_process(arguments.split(), monkeypatch, capfd)
    assert done.returncode == 1
    assert re.search(complaint, done.stderr), done.stdout + done.stderr
    # One line names the cause, and at most one more says that nothing is started
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "[engine0]" not in done.stdout
    locks = [path for path in contents(tmp_path) if path.suffix == ".lock"]
    assert contents(tmp_path).keys() - before.keys() <= set(locks)
    assert {path: x for path, x in contents(tmp_path).items() if path not in locks} == before


def test_results_of_an_evaluation_are_moved_aside_and_not_deleted(tmp_path, base_model):
    """tools/evaluate.py makes a directory of the same form, without steps."""
    config = resolved("toy", "--out", tmp_path, "--run", "base", "--model", base_model)
    run_dir = rundir.write(config)
    assert rundir.Opening(config).aside is None
    (run_dir / "answers.jsonl").write_text("{}\n")
    opening = rundir.Opening(config)
    opening.make()
    assert (tmp_path / "base.1" / "answers.jsonl").exists() and not run_dir.exists()


@pytest.mark.parametrize("case", ["complete", "stopped"])
@pytest.mark.parametrize("failing", ["rundir.write", "placement.show", "supervise.Process"])
def test_a_start_that_fails_before_its_processes_leaves_everything_as_it_was(
    failing, case, tmp_path, base_model, monkeypatch
):
    if case == "complete":
        config, _ = complete_run(tmp_path, base_model)
    else:
        config, _ = stopped_run(tmp_path, model=str(base_model))
    lock = tmp_path / f".{config.run}.lock"
    before = contents(tmp_path)

    def fail(*arguments):
        raise OSError("no space left")

    # FAKE: the preparation, and a full disk or a closed pipe
    monkeypatch.setattr(placement, "prepare", lambda *arguments: None)
    module, _, name = failing.partition(".")
    monkeypatch.setattr(getattr(run, module), name, fail)
    command = f"toy --out {tmp_path} --run {config.run} --model {base_model} --max_lag 7"
    with pytest.raises(OSError, match="no space left"):
        run.train(command.split())
    now = {path: x for path, x in contents(tmp_path).items() if ".failed" not in str(path)}
    # The run's secret is made by the first start and stays.
    assert {path: x for path, x in now.items() if path in before} == before
    assert {path.name for path in now.keys() - before.keys()} <= {lock.name, "secret"}


def test_old_checkpoint_is_discarded_even_if_somebody_else_has_moved_it(tmp_path):
    for name in ("step_000001", "step_000002"):
        (tmp_path / name / "trainer").mkdir(parents=True)
    checkpoints.discard(tmp_path / "step_000001")
    checkpoints.discard(tmp_path / "step_000001")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_a_step_that_was_saved_but_not_announced_is_kept(tmp_path, base_model, capsys):
    """If a run is stopped, the trainer saves a step whose weights no engine has got yet."""
    config, run_dir = stopped_run(tmp_path, model=str(base_model))
    started = with_knobs(config, max_lag=7)
    opening = rundir.Opening(started)
    opening.make()
    rundir.write(started)
    saved = checkpoints.newest(run_dir)
    version = int(saved.name.removeprefix("step_"))
    shutil.copytree(saved, saved.with_name(f"step_{version + 1:06d}"))
    run.run(started, [("actor", {}, ["bash", "-c", "exit 3"])], "start", [1], opening)
    said = capsys.readouterr().out
    assert f"the same command continues from step_{version + 1:06d}" in said
    assert cfg.load(str(run_dir)).max_lag == 7


@pytest.mark.parametrize("case", ["complete", "stopped"])
def test_a_start_that_fails_before_its_first_step_leaves_everything_as_it_was(
    case, tmp_path, base_model, capsys
):
    if case == "complete":
        config, run_dir = complete_run(tmp_path, base_model)
    else:
        config, run_dir = stopped_run(tmp_path, model=str(base_model))
    before = contents(tmp_path)
    started = with_knobs(config, max_lag=7)
    opening = rundir.Opening(started)
    assert ("is now" if case == "complete" else "continuing") in opening.make()
    rundir.write(started)
    assert contents(tmp_path) != before
    # FAKE: an engine that cannot start; the trainer has removed what is newer than its checkpoint
    script = f"echo > {run_dir}/metrics.jsonl; echo 'ValueError: no such flag' >&2; exit 3"
    dies = ["bash", "-c", script]
    for _ in range(2):
        code = run.run(started, [("actor", {}, dies)], "start", [1], opening)
        assert code == 3 or code == 1
        said = capsys.readouterr().out
        assert "stopped before its first step: nothing has changed in" in said
        logs = Path(re.search(r"logs of this start are in (\S+)", said)[1])
        assert "ValueError: no such flag" in (logs / "actor.log").read_text()
        now = {p: x for p, x in contents(tmp_path).items() if logs not in p.parents}
        now = {p: x for p, x in now.items() if ".failed" not in str(p)}
        # The run's secret is made by the first start and stays
        assert now == before
        opening = rundir.Opening(started)
        opening.make()
        rundir.write(started)

"""One whole run of run.sh, measured; compare.py, against_trl.py, cost.py and others share it.

Not a program. A run is {curve, scores}: columns of one number a step, and [[version, score]].

time    The seconds since the engines got the first weights and sampling began: start-up does not
        count. The time that checkpoints take counts for the pipeline, whose engines go on
        meanwhile. It does not count for conventional RL, all of which stands still.
score   The score of a checkpoint of task tail or countup, computed after the run: the probability
        that the model gives exactly the right answer, averaged over up to 250 held-out problems.
        The right answer is known, so nothing is sampled, and evaluations take no engine time, of
        which conventional RL has some to spare while it trains. The reward of the trained samples
        is no yardstick: answers that end first are trained first, and long sequences are the hard
        ones. Other tasks, and runs with --eval_every, have the scores of the run's own evaluations.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import config as cfg
from bench.common import INTERRUPTED, ROOT, WORK, flags, machine, measured, parser, result_file
from plumbing.samples import layout
from preprocess import pack
from tools import base_model
from tools.common import read_metrics
from train import token_logprobs

# All seeds have the base model of seed 0, and differ in problems and sampling: the base models of
# some seeds (1, for one) get nothing right
MODEL = ROOT / "out" / "models" / "tail-seed0"
PROBLEMS = 250
# The model's path is relative, so that kept results are good for every clone
COMMON = dict(task="tail", model=str(MODEL.relative_to(ROOT)), steps=96, batch_size=64, attempts=4)
COMMON |= dict(max_new_tokens=410, max_model_len=416, row_tokens=1024)
COMMON |= dict(lr=1.5e-4, warmup_steps=3, lr_schedule="constant")
COMMON |= dict(eval_problems=1, eval_every=0, save_every=8, keep_last=0)
COMMON |= dict(trainers=1, engines=1, engine_threads=1)
QUICK = dict(steps=12, max_new_tokens=64)
# The tasks whose right answers are known
SCORED = ("tail", "countup")
# As many sequences in progress as a step has samples keep the data fresh
PIPELINE = dict(max_lag=1, trainer_threads=1, concurrency=64)
# A generation phase starts all its sequences at once. With rows this small, a second thread of the
# trainer makes its steps slower
CONVENTIONAL = dict(trainer_threads=1, concurrency=1024)
# The same for the preset countup: the knobs of all runs, and those of conventional RL, whose engine
# has all cores, too. If a phase has more than 256 answers, the others wait for a free slot
CORES = len(os.sched_getaffinity(0))
COUNTUP = dict(steps=24, eval_every=0, eval_problems=1, save_every=4, keep_last=0)
COUNTUP |= dict(trainer_threads=CORES)
COUNTUP_CONVENTIONAL = dict(engine_threads=CORES, concurrency=256)
# Nothing else runs on the machine, so that threads may wait for each other busily.
BUSY_WAIT = {"GOMP_SPINCOUNT": "300000"}
COLUMNS = (
    "samples",
    "sampled_tokens",
    "late",
    "lag_max",
    "lag_mean",
    "ess",
    "wait_data_s",
    "save_s",
    "gen_idle",
)


def conventional(g):
    """Knobs of conventional RL with g steps per generation phase."""
    return CONVENTIONAL | dict(conventional_g=g)


def make_model():
    """The base model of all seeds, made once."""
    base_model.make_model(["tail"], MODEL, 0)


# ---- many runs


def run_parser(doc, seeds, port):
    """The command line of a script that compares whole runs, with these defaults."""
    p = parser(doc)
    p.add_argument("--seeds", type=int, default=seeds, help="how many")
    p.add_argument("--first_seed", type=int, default=0)
    p.add_argument("--port", type=int, default=port)
    p.add_argument("--plot", action="store_true", help="run nothing, show the kept results")
    return p


def run_all(arguments, name, settings, start):
    """Run all of {setting: knobs}; returns ({setting: [run per seed]}, the file that keeps them).

    Runs that earlier calls left in the file are taken as they are. The runs go seed by seed, so
    that they can be compared after an interruption; with --quick there is one seed.
    start(name of the run, knobs) -> run.
    """
    name += "-quick" * arguments.quick
    path = result_file(arguments, name)
    first = arguments.first_seed
    seeds = range(first, first + (1 if arguments.quick else arguments.seeds))
    wanted = {}
    for seed in seeds:
        # The same setting must not always come first or last
        order = random.Random(seed).sample(list(settings), len(settings))
        for setting in order:
            wanted[f"{setting}, seed {seed}"] = settings[setting] | dict(seed=seed)

    def measure(key, knobs):
        # The end of a long name tells it from the others
        run = start(re.sub(r"\W+", "-", f"{name}-{key}")[-80:].strip("-_"), knobs)
        samples_s = run["curve"]["samples"][-1] / run["curve"]["time"][-1]
        print(f"{key}: {samples_s:.0f} samples/s, score {run['scores'][-1][1]:.3f}", flush=True)
        return run

    kept = not arguments.quick or arguments.plot
    results = measured(path, wanted, None if arguments.plot else measure, kept)
    # The seeds that all settings have
    complete = [s for s in seeds if all(f"{setting}, seed {s}" in results for setting in settings)]
    if not complete:
        sys.exit(f"{path} has no seed that has runs of all settings: {', '.join(settings)}")
    print(machine())
    by_setting = {}
    for setting in settings:
        by_setting[setting] = [results[f"{setting}, seed {seed}"] for seed in complete]
    return by_setting, path


# ---- one run


def run_to_its_end(name, knobs, port, preset="toy", root=ROOT, look=None, core=None):
    """Run `bash run.sh <preset> --knob value ...` of a checkout to its end.

    Returns the run directory, out/bench/runs/<name>. look(pid of run.sh), if given, is called some
    ten times a second. core: the number of the only core that the run may use. Raises RuntimeError
    with the last lines of a run that fails.
    """
    run_dir = WORK / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    knobs = knobs | dict(port=port, out=run_dir.parent, run=name)
    log = run_dir.with_suffix(".log")
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*pinned, "bash", "run.sh", preset, *flags(knobs)],
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PIPELINE_PYTHON": sys.executable} | os.environ,
        )
    try:
        while process.poll() is None:
            time.sleep(0.1)
            if INTERRUPTED.is_set():
                raise KeyboardInterrupt
            if look:
                look(process.pid)
    finally:
        # After an interruption of this script, run.sh stops its processes
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    if process.returncode:
        last = "\n".join(log.read_text().splitlines()[-25:])
        raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{last}")
    return run_dir


def one_run(name, knobs, port, preset="toy", root=ROOT):
    """A run of a checkout as {curve, scores}."""
    run_dir = run_to_its_end(name, knobs, port, preset, root)
    steps, evaluations = read_metrics(run_dir, "step", "eval")
    run_scores = []
    for x in evaluations:
        mean_of_sets = np.mean(list(x["eval"].values()))
        run_scores.append([x["version"], float(mean_of_sets)])
    # Read as it is, because another checkout may have other knobs
    config = json.loads((run_dir / "config.json").read_text())["config"]
    # An evaluation of a single problem is no score: such runs are scored from their checkpoints.
    if config["task"] in SCORED and config["eval_problems"] == 1:
        problems = problems_of("test", config)[:PROBLEMS]
        folder = run_dir / "checkpoints"
        run_scores = scores(folder, Path(root, config["model"]), problems, config["temperature"])
    return dict(curve=curve_of(steps, knobs.get("conventional_g", 0)), scores=run_scores)


def curve_of(steps, conventional_g):
    """The columns of a run from its lines of metrics.jsonl; time is that of each step's end."""
    begin = steps[0]["wall_s"] - steps[0]["step_s"]
    curve = {k: [x[k] for x in steps] for k in COLUMNS}
    saved = np.cumsum(curve["save_s"]) if conventional_g else np.zeros(len(steps))
    curve["time"] = [x["wall_s"] - begin - off for x, off in zip(steps, saved.tolist())]
    return curve


def problems_of(split, knobs):
    """The problems of a run's task. knobs: {name: value}, with task, seed and perhaps data."""
    data = knobs.get("eval_data" if split == "test" else "train_data")
    task = cfg.load_task(knobs["task"])
    return task.problems(split, knobs["seed"], *([data] if data else []))


def scores(folder, base_model, problems, temperature=1.0):
    """[[version, score]] of the base model and of a folder's checkpoints; deletes the folder."""
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    models = {0: base_model}
    # Names are step_000008, or checkpoint-8 of TRL
    for path in folder.glob("*[0-9]"):
        models[int(re.search(r"\d+$", path.name)[0])] = path
    version_scores = []
    for version, path in sorted(models.items()):
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="packed"
        )
        version_scores.append([version, success(model, tokenizer, problems, temperature)])
    shutil.rmtree(folder)
    return version_scores


@torch.inference_mode()
def success(model, tokenizer, problems, temperature=1.0):
    """Mean probability that the model answers exactly right and ends there.

    A prompt that is a list of messages goes through the chat template.
    """
    rows = []
    prompts = []
    for problem in problems:
        prompt = problem["prompt"]
        if isinstance(prompt, list):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
            prompt = prompt["input_ids"]
        else:
            prompt = tokenizer(prompt)["input_ids"]
        answer = tokenizer(problem["answer"])["input_ids"]
        rows.append(prompt + answer + [tokenizer.eos_token_id])
        prompts.append(len(prompt))
    total = 0.0
    for packed in pack([len(row) for row in rows], 4096):
        lengths = [len(rows[i]) for i in packed]
        ids = np.concatenate([rows[i] for i in packed])
        positions, sequence_ids = layout(lengths)
        logprobs, _ = token_logprobs(model, ids, positions, temperature)
        answered = positions >= np.array([prompts[i] for i in packed])[sequence_ids]
        of_answers = np.where(answered, logprobs.numpy(), 0.0)
        total += np.exp(np.bincount(sequence_ids, of_answers)).sum()
    return float(total / len(problems))


def scores_of(run):
    """The scores of a run, oldest version first."""
    return np.array([score for _, score in run["scores"]])


def column(run, name):
    """A column of the curve; NaN where a run lacks it: TRL's have only time and samples."""
    return np.array(run["curve"].get(name, [np.nan] * len(run["curve"]["samples"])))


def places(run, name):
    """The values of a column at the versions that have a score; 0 at version 0."""
    values = np.array([0.0, *column(run, name)])
    return values[[version for version, _ in run["scores"]]]

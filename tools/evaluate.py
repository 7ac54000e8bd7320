"""Evaluate a model offline, on held-out problems, through vLLM engines of its own.

    python tools/evaluate.py out/toy --eval_attempts 8
    python tools/evaluate.py out/toy/checkpoints/step_000180
    python tools/evaluate.py Qwen/Qwen2.5-7B-Instruct math --eval_data math500,aime24 \\
        --chat True --eval_temperature 0.6

The first command takes the newest checkpoint of a run, the second one the checkpoint that is named;
both use the run's task and knobs. The third command takes any model, with the knobs of a preset,
which is `toy` if none is named.

The program accepts every knob of config.py. It prints pass@1, pass@k and maj@k with 95% intervals.
It writes every answer to out/eval-<model>/answers.jsonl, and with --keep_steps the tokens of the
answers to queues/rollouts. Each attempt has a seed of its own, so the same command gives the same
numbers on the same machine. Deliberately absent: several nodes, continuing an evaluation that was
stopped.
"""

import asyncio
import dataclasses
import json
import math
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from plumbing import checkpoints, knobs, placement, rundir
from plumbing.alarms import wilson
from plumbing.samples import join
from plumbing.sandbox import shown
from plumbing.supervise import Engine, Process, stop

# ---- engines


def start_engines(config, gpus=0, as_loaded=True):
    """Start the engines of a resolved config and wait until all of them answer.

    Returns a list of supervise.Engine, which the caller must stop with supervise.stop. config.port
    becomes the port of the first engine. as_loaded: the engines generate with the weights that they
    have loaded, as version 0; if it is False, they generate nothing before a trainer has sent them
    weights. Raises RuntimeError or TimeoutError, whose messages name the engines' logs.
    """
    serving_env = {"PIPELINE_SERVE_AS_LOADED": str(int(as_loaded))}
    run_dir = Path(config.out, config.run)
    deadline = time.monotonic() + config.start_timeout
    engines = []
    try:
        for name, env, command in placement.engine_commands(config, gpus):
            engine = Engine(run_dir, name, env | serving_env, command, config.start_timeout)
            engines.append(engine)
            engine.start()
        while not all(engine.has_answered for engine in engines):
            check_alive(engines)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"evaluate: engines gave no answer within {config.start_timeout:.0f} s: see "
                    f"{run_dir}/logs"
                )
            time.sleep(0.5)
    except BaseException:
        stop(engines, 0)
        raise
    config.port = int(engines[0].url.rpartition(":")[2])
    return engines


def check_alive(engines):
    """Raise RuntimeError if an engine has died.

    Answers are the same every time only if no engine is started again.
    """
    for engine in engines:
        # Process.poll comes first, because Engine.poll starts a dead engine again.
        if Process.poll(engine) is not None or engine.poll() is not None or engine.deaths:
            raise RuntimeError(
                f"evaluate: {engine.name} has died, see {engine.log}\n{engine.last_errors()}"
            )


# ---- statistics


def pass_at_k(n, c, k):
    """Return the unbiased estimate of the chance that at least one of k attempts succeeds.

    c of n >= k attempts have succeeded. The estimate is 1 - C(n-c, k) / C(n, k), Chen et al. 2021
    (arXiv 2107.03374) eq. 1. For k = 1 it is c / n, the mean over attempts, avg@n.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers, successes):
    """Return the success, 0 to 1, of the most frequent answer among the attempts at one problem.

    If several answers are tied, it is their mean success. An attempt without an answer (None) has
    no vote; without any votes the success is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most_votes = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most_votes]
    return float(np.mean([successes[answers.index(winner)] for winner in winners]))


def interval(scores):
    """Return (low, high), the 95% interval of the mean of the scores [P], one for each problem.

    It is Wilson's interval if all scores are 0 or 1, else that of the central limit theorem, cut
    off at 0 and 1.
    """
    if set(scores) <= {0, 1}:
        return wilson(np.mean(scores), len(scores))
    mean = np.mean(scores)
    half_width = 1.96 * np.std(scores) / np.sqrt(len(scores))
    return max(mean - half_width, 0.0), min(mean + half_width, 1.0)


def table(answers):
    """Return {metric: (mean, low, high)} of one problem set.

    answers: {problem: its attempts}; an attempt is a line of answers.jsonl.
    """
    successes = [[line["success"] for line in lines] for lines in answers.values()]
    success_counts = list(map(sum, successes))
    n = len(successes[0])
    # {metric: scores [P]}
    scores = {"pass@1" if n == 1 else f"pass@1 = avg@{n}": [c / n for c in success_counts]}
    if n > 1:
        powers_of_two = [k for k in (2, 4, 8, 16, 32, 64, 128, 256) if k < n]
        for k in [*powers_of_two, n]:
            scores[f"pass@{k}"] = [pass_at_k(n, c, k) for c in success_counts]
        votes = [[line["answer"] for line in lines] for lines in answers.values()]
        scores[f"maj@{n}"] = list(map(majority, votes, successes))
    return {metric: (float(np.mean(x)), *interval(x)) for metric, x in scores.items()}


# ---- the evaluation


def configure(argv, gpus):
    """Return the resolved Config of `MODEL [preset] [--knob value ...]`. Raises ConfigError."""
    cfg.require(
        argv and not argv[0].startswith("-"),
        "the first argument must be a model: a run, a checkpoint directory or a hub name",
    )
    path = Path(argv[0])
    if path.exists():
        path = path.absolute()
    if (path / "metrics.jsonl").exists() or (path / "checkpoints").exists():
        path = checkpoints.newest(path)
        cfg.require(path, f"{argv[0]}: this run has no checkpoint yet")
    run_dir = path.parent.parent
    name_parts = path.parts[-2:]
    run_config = None
    if path.parent.name == "checkpoints" and (run_dir / "config.json").exists():
        run_config = cfg.load(run_dir)
        name_parts = (run_dir.name, path.name)
    preset = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else ""
    cfg.require(
        not (run_config and preset),
        f"{preset}: the knobs are those of the run, so no preset can be named; --knob value "
        "changes them",
    )
    c = cfg.parse(argv[1:], run_config)
    name = re.sub(r"[^A-Za-z0-9._-]", "", "-".join(name_parts)).strip(".-")[:90]
    # These knobs come neither from the run nor from a preset, but the command line may set them.
    defaults = dict(
        run=f"eval-{name}",
        engines=gpus // c.tensor_parallel or 1,
        gpu_memory_utilization=0,
        # The run may be in progress and listen at its port, or have been on another machine.
        endpoint_host=cfg.Config.endpoint_host,
        endpoint_port=0,
        # It made the run's base model; the model to evaluate is there.
        family=cfg.Config.family,
    )
    set_knobs = knobs.read(argv[1 + bool(preset) :], knobs.knobs_of(cfg.Config))
    unset_knobs = {knob: x for knob, x in defaults.items() if knob not in set_knobs}
    # The evaluation is on this node alone, wherever the run was, and trains nothing.
    fixed_knobs = dict(
        model=str(path),
        fresh=True,
        trainers=0,
        nnodes=1,
        master_addr="",
        teacher="",
        replay_routing=False,
    )
    c = dataclasses.replace(c, **unset_knobs, **fixed_knobs)
    placement.check_endpoint(c)
    return placement.resolve(c, gpus, training=False)


async def attempt(actor, task, source, number, problem, k):
    """Make attempt k at a problem; returns its line of answers.jsonl.

    Raises RuntimeError if the attempt fails, or if the task's `answer` returns an invalid value.
    """
    sample = await actor.evaluate_attempt(task, number, problem, k)
    if sample is None:
        raise RuntimeError(
            f"evaluate: attempt {k} at problem {number} of {source} failed: see the error above "
            f"and {actor.run_dir}/logs"
        )
    if actor.config.keep_steps:
        actor.rollouts.put(join([sample]))
    # Attempts vote with what the task's `answer` returns, or with their whole text.
    answer = str(sample["completion"]).strip()
    if hasattr(actor.sandbox.tasks[task], "answer"):
        reply = await actor.sandbox.call(task, "answer", problem, sample["completion"])
        answer = reply.get("value")
        # A list may be a reward, and is no vote.
        refused = shown(answer) if isinstance(answer, list) else reply.get("refused")
        if refused:
            raise RuntimeError(
                f"evaluate: tasks/{task}.py: answer returned {refused}; "
                "it must return a number, a text or None"
            )
    return dict(
        source=source,
        problem=number,
        attempt=k,
        prompt=problem["prompt"],
        expected=problem.get("answer"),
        where=problem.get("where"),
        answer=answer,
        completion=sample["completion"],
        success=sample["success"],
        reward=sample["reward"],
        finished=sample["finished"],
        outcome=cfg.OUTCOMES[sample["outcome"]],
        tokens=int(sample["mask"].sum()),
    )


async def all_attempts(actor, engines, out):
    """Make all attempts at all problems, and write each line to the file `out` when it is done.

    Returns {source: {problem: its lines}}. Raises what an attempt raises, and RuntimeError if an
    engine dies. It cannot wait forever, because every request to an engine has a deadline.
    """
    c = actor.config
    await actor.start()
    actor.engines.set_engines([engine.url for engine in engines])
    attempts = [(*problem, k) for problem in actor.held_out() for k in range(c.eval_attempts)]
    pending = {asyncio.create_task(attempt(actor, *arguments)) for arguments in attempts}
    lines = []
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=1)
            check_alive(engines)
            for task in done:
                lines.append(task.result())
                out.write(json.dumps(lines[-1]) + "\n")
                if len(lines) % 100 == 0:
                    print(f"eval: {len(lines)} of {len(attempts)} answers", flush=True)
    finally:
        await actor.close()
    results = {}
    for line in sorted(lines, key=lambda line: (line["problem"], line["attempt"])):
        results.setdefault(line["source"], {}).setdefault(line["problem"], []).append(line)
    return results


def print_results(results):
    """Print the table of all problem sets; returns {source: {metric: (mean, low, high)}}."""
    metrics = {source: table(answers) for source, answers in results.items()}
    print(f"\n{'set':<16}{'problems':>9}  {'metric':<18}{'mean':>7}   95% interval")
    for source, answers in results.items():
        row_start = f"{source:<16}{len(answers):>9}"
        for name, (mean, low, high) in metrics[source].items():
            print(f"{row_start}  {name:<18}{mean:>7.4f}   {low:.4f} to {high:.4f}")
        lines = sum(answers.values(), [])
        outcomes = Counter()
        for line in lines:
            outcomes[line["outcome"] if line["finished"] else f"{line['outcome']}, cut off"] += 1
        tokens = np.mean([line["tokens"] for line in lines])
        print(f"{'':<25}  {dict(outcomes.most_common())}, {tokens:.0f} tokens on average")
    return metrics


def prepare(argv, gpus):
    """Check all that can be checked before engines start, and make the run directory.

    Returns (the actor, the rundir.Opening of the directory). Raises ConfigError.
    """
    c = configure(argv, gpus)
    rundir.hold(c)
    opening = rundir.Opening(c)
    placement.prepare(c, ["test"])
    print(f"eval: {opening.make()} | {c.model}, temperature {c.eval_temperature}", flush=True)
    # This import takes five seconds, so a wrong flag is reported before it.
    from actor import Actor

    return Actor(c, rundir.write(c)), opening


def main(argv):
    """Evaluate `MODEL [preset] [--knob value ...]`.

    Prints the table, and writes answers.jsonl and results.json into out/<run>.
    """
    gpus = placement.gpu_count()
    try:
        for word in ("--help", "-h"):
            if word in argv:
                cfg.parse(argv[argv.index(word) :], about=__doc__)
        actor, opening = prepare(argv, gpus)
    except cfg.ConfigError as e:
        sys.exit(f"evaluate: {e}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    c = actor.config
    engines = []
    try:
        engines = start_engines(c, gpus)
        with open(actor.run_dir / "answers.jsonl", "w") as out:
            results = asyncio.run(all_attempts(actor, engines, out))
    except (RuntimeError, TimeoutError) as e:
        # The engines end before `undo` may move their logs. Its line says where the logs are.
        stop(engines, 0)
        sys.exit(f"{e}\nevaluate: {opening.undo()}")
    finally:
        stop(engines, 0)
    problems = {source: len(answers) for source, answers in results.items()}
    saved = dict(model=c.model, problems=problems, metrics=print_results(results))
    path = actor.run_dir / "results.json"
    path.write_text(json.dumps(saved, indent=1) + "\n")
    print(f"answers in {actor.run_dir}/answers.jsonl, numbers in {path}")


if __name__ == "__main__":
    main(sys.argv[1:])

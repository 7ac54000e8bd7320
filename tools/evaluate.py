"""Offline evaluation: a model on held-out problems, through vLLM engines of its own.

    python tools/evaluate.py out/toy --eval_attempts 8
    python tools/evaluate.py out/toy/checkpoints/step_000180
    python tools/evaluate.py Qwen/Qwen2.5-7B-Instruct --task maths --eval_data math500,aime24 \\
        --chat True --eval_temperature 0.6

The first takes the newest checkpoint of a run, the second the one that is named, both with the
run's task and knobs; the third takes any model.

Takes every knob of config.py. Prints pass@1, pass@k and maj@k with 95% intervals; every answer goes
to out/eval-<model>/answers.jsonl, with --keep_steps its tokens to queues/rollouts. Each attempt has
a seed of its own, so the same command gives the same numbers on the same machine. Deliberately
absent: several nodes, continuing an evaluation that was stopped.
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

import config as cfg  # noqa: E402
from plumbing import checkpoints, placement, rundir  # noqa: E402
from plumbing.samples import join  # noqa: E402
from plumbing.supervise import Engine, Process, stop  # noqa: E402
from tools.common import wilson

# ---- engines


def start_engines(config, gpus=0, as_loaded=True):
    """Start the engines of a resolved config and wait until they answer: [supervise.Engine], to be
    stopped by supervise.stop. config.port becomes the first one's.

    as_loaded: they generate with the weights they have loaded, as version 0; else nothing before a
    trainer has sent them some. Raises RuntimeError or TimeoutError naming their logs.
    """
    own = dict(PIPELINE_SERVE_AS_LOADED=str(int(as_loaded)))
    run_dir = Path(config.out, config.run)
    deadline = time.monotonic() + config.start_timeout
    engines = []
    try:
        for name, env, command in placement.engine_commands(config, gpus):
            engines.append(Engine(run_dir, name, env | own, command, config.start_timeout))
            engines[-1].start()
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
    """RuntimeError if an engine has died: answers are the same every time only if all are there."""
    for engine in engines:
        # first as any process, as a dead engine is started again
        if Process.poll(engine) is not None or engine.poll() is not None or engine.deaths:
            raise RuntimeError(
                f"evaluate: {engine.name} has died, see {engine.log}\n{engine.last_errors()}"
            )


# ---- statistics


def pass_at_k(n, c, k):
    """Chance that at least one of k attempts succeeds, unbiased from c successes in n >= k: 1 -
    C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374) eq. 1. pass_at_k(n, c, 1) = c / n, the mean over attempts,
    avg@n.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers, successes):
    """Success of the most frequent answer of one problem's attempts; that of tied ones on average.
    No answer (None) has no vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return float(np.mean([successes[answers.index(a)] for a in winners])) if winners else 0.0


def interval(scores):
    """95% interval of the mean of one score per problem [P]: Wilson's of 0 and 1, else by the
    central limit theorem.
    """
    if set(scores) <= {0, 1}:
        return wilson(np.mean(scores), len(scores))
    half = 1.96 * np.std(scores) / np.sqrt(len(scores))
    return max(np.mean(scores) - half, 0.0), min(np.mean(scores) + half, 1.0)


def table(answers):
    """{metric: (mean, low, high)} of one problem set; answers: {problem: [attempt, ...]}, lines of
    answers.jsonl.
    """
    successes = [[line["success"] for line in lines] for lines in answers.values()]
    correct = list(map(sum, successes))
    n = len(successes[0])
    scores = {"pass@1" if n == 1 else f"pass@1 = avg@{n}": [c / n for c in correct]}
    for k in [k for k in (2, 4, 8, 16, 32, 64, 128, 256) if k < n] + [n] * (n > 1):
        scores[f"pass@{k}"] = [pass_at_k(n, c, k) for c in correct]
    if n > 1:
        votes = [[line["answer"] for line in lines] for lines in answers.values()]
        scores[f"maj@{n}"] = list(map(majority, votes, successes))
    return {name: (float(np.mean(of)), *interval(of)) for name, of in scores.items()}


# ---- the evaluation


def configure(argv, gpus):
    """`MODEL [--knob value ...]` -> resolved Config. Raises ConfigError."""
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
    names = path.parts[-2:]
    default = None
    if path.parent.name == "checkpoints" and (run_dir / "config.json").exists():
        default = cfg.load(run_dir)
        names = (run_dir.name, path.name)
    c = cfg.parse(argv[1:], default)
    name = re.sub(r"[^A-Za-z0-9._-]", "", "-".join(names)).strip(".-")[:90]
    own = dict(run=f"eval-{name}", engines=gpus // c.tensor_parallel or 1, gpu_memory_utilization=0)
    given = [arg.split("=")[0] for arg in argv]
    own = {knob: value for knob, value in own.items() if f"--{knob}" not in given}
    # on this node alone, wherever the run was
    own |= dict(model=str(path), fresh=True, trainers=0, nnodes=1, master_addr="", teacher="")
    return placement.resolve(dataclasses.replace(c, **own), gpus, training=False)


async def attempt(actor, task, source, number, problem, k):
    """Attempt k at a problem -> its line of answers.jsonl."""
    sample = await actor.evaluate_attempt(task, number, problem, k)
    if sample is None:
        raise RuntimeError(
            f"evaluate: problem {number} of {source} failed every try: see {actor.run_dir}/logs"
        )
    if actor.config.keep_steps:
        actor.rollouts.put(join([sample]))
    # attempts vote by the task's `answer`, or by all of their text
    answer = str(sample["completion"]).strip()
    if hasattr(actor.sandbox.tasks[task], "answer"):
        reply = await actor.sandbox.call(task, "answer", problem, sample["completion"])
        if "refused" in reply:
            raise RuntimeError(
                f"evaluate: tasks/{task}.py: answer returned {reply['refused']}; "
                "it must return a number, a text or None"
            )
        answer = reply.get("value")
    asked = dict(source=source, problem=number, attempt=k, prompt=problem["prompt"])
    asked |= dict(expected=problem.get("answer"), where=problem.get("where"), answer=answer)
    scored = {key: sample[key] for key in ("completion", "success", "reward", "finished")}
    outcome = cfg.OUTCOMES[sample["outcome"]]
    return asked | scored | dict(outcome=outcome, tokens=int(sample["mask"].sum()))


async def all_attempts(actor, engines, out):
    """All attempts at all problems, to `out` as they come -> {source: {problem: [line, ...]}}.

    Raises what one of them raised; RuntimeError if an engine dies. Every request has a deadline.
    """
    c = actor.config
    await actor.start()
    actor.engines.set_engines([engine.url for engine in engines])
    tries = [(problem, k) for problem in actor.held_out() for k in range(c.eval_attempts)]
    pending = {asyncio.create_task(attempt(actor, *problem, k)) for problem, k in tries}
    lines = []
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=1)
            check_alive(engines)
            for task in done:
                lines.append(task.result())
                out.write(json.dumps(lines[-1]) + "\n")
                if len(lines) % 100 == 0:
                    print(f"eval: {len(lines)} of {len(tries)} answers", flush=True)
    finally:
        await actor.close()
    results = {}
    for line in sorted(lines, key=lambda line: (line["problem"], line["attempt"])):
        results.setdefault(line["source"], {}).setdefault(line["problem"], []).append(line)
    return results


def print_results(results):
    """The table; returns its numbers, {source: {metric: (mean, low, high)}}."""
    metrics = {source: table(answers) for source, answers in results.items()}
    print(f"\n{'set':<16}{'problems':>9}  {'metric':<18}{'mean':>7}   95% interval")
    for source, answers in results.items():
        where = f"{source:<16}{len(answers):>9}"
        for name, (mean, low, high) in metrics[source].items():
            print(f"{where}  {name:<18}{mean:>7.4f}   {low:.4f} to {high:.4f}")
        lines = sum(answers.values(), [])
        outcomes = Counter(x["outcome"] + ", cut off" * (not x["finished"]) for x in lines)
        tokens = np.mean([line["tokens"] for line in lines])
        print(f"{'':<25}  {dict(outcomes.most_common())}, {tokens:.0f} tokens on average")
    return metrics


def prepare(argv, gpus):
    """Everything that can be found wrong before engines start: (the actor, the opened directory).
    Raises ConfigError.
    """
    c = configure(argv, gpus)
    rundir.hold(c)
    opening = rundir.Opening(c)
    placement.prepare(c, ["test"])
    print(f"eval: {opening.make()} | {c.model}, temperature {c.eval_temperature}", flush=True)
    # only here, as it takes five seconds: a wrong flag is reported at once
    from actor import Actor

    return Actor(c, rundir.write(c)), opening


def main(argv):
    """`MODEL [--knob value ...]` -> table on stdout; out/<run>/answers.jsonl, results.json."""
    gpus = placement.gpu_count()
    try:
        if "--help" in argv:
            cfg.parse(argv[argv.index("--help") :], about=__doc__)
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
        # what it printed names a log: that stays
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

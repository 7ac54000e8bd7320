"""Offline evaluation: a model on held-out problems, through vLLM engines of its own.

    python tools/evaluate.py out/toy --eval_attempts 8    # its newest checkpoint, with the run's task and knobs; or one of
                                                          # them: out/toy/checkpoints/step_000180
    python tools/evaluate.py Qwen/Qwen2.5-7B-Instruct --task maths --eval_data math500,aime24 --chat True --eval_temperature 0.6

Takes every knob of config.py. Prints pass@1, pass@k and maj@k with 95% intervals; every answer goes to
out/eval-<model>/answers.jsonl. Each attempt has a seed of its own, so the same command gives the same numbers on the
same machine. Deliberately absent: several nodes, continuing an evaluation that was stopped.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg  # noqa: E402
from plumbing import checkpoints, hardware, launch  # noqa: E402

# ---- engines


def start_engines(config, gpus=0, extra=(), as_loaded=True):
    """Start the engines of a resolved config and wait until they are healthy.

    extra: more arguments of vLLM's. as_loaded: they generate with the weights they have loaded, as version 0;
    else nothing before a trainer has sent them some. Returns their processes, each leader of a process group. Raises RuntimeError or TimeoutError naming the log of one that failed.
    """
    modules = [str(cfg.ROOT), os.environ.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "PIPELINE_SERVE_AS_LOADED": str(int(as_loaded)),
    }
    deadline = time.monotonic() + config.start_timeout
    processes = []
    try:
        for name, env, command in launch.engine_commands(config, gpus, 0):
            with open(_logs(config) / f"{name}.log", "w") as log:
                process = subprocess.Popen(
                    [*command, *extra],
                    env=os.environ | env | own,
                    stdout=log,
                    stderr=log,
                    cwd=cfg.ROOT,
                    start_new_session=True,
                )
            processes.append(process)
        for url in launch.urls(config, gpus):
            while not _is_healthy(url):
                check_alive(processes, config)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"evaluate: the engine at {url} was not healthy within "
                        f"{config.start_timeout:.0f} s: see {_logs(config)}"
                    )
                time.sleep(0.5)
    except BaseException:
        stop_engines(processes)
        raise
    return processes


def _logs(config):
    return Path(config.out, config.run, "logs")


def _is_healthy(url):
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.RequestException:
        return False


def check_alive(processes, config):
    """Raise RuntimeError if an engine has ended."""
    for i, process in enumerate(processes):
        code = process.poll()
        if code is not None:
            log = _logs(config) / f"engine{i}.log"
            raise RuntimeError(f"evaluate: engine {i} died with exit code {code}: see {log}")


def stop_engines(processes):
    """End engines and all their children."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- statistics


def pass_at_k(n, c, k):
    """Chance that at least one of k attempts succeeds, unbiased from c successes in n >= k: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374) eq. 1. pass_at_k(n, c, 1) = c / n, the mean over attempts, avg@n.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers, successes):
    """Success of the most frequent answer of one problem's attempts; that of tied ones on average. No answer (None) has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return float(np.mean([successes[answers.index(answer)] for answer in winners]))


def interval(scores, seed=0, rounds=10000):
    """Bootstrap 95% interval of the mean of one score per problem [P]: percentiles over `rounds` resamples of the problems."""
    scores = np.asarray(scores, float)
    problems = len(scores)
    alike = np.full(problems, 1 / problems)
    # how often each problem is drawn, [rounds, P]
    counts = np.random.default_rng(seed).multinomial(problems, alike, size=rounds)
    means = counts @ scores / problems
    return tuple(np.percentile(means, [2.5, 97.5]))


def scores_by_metric(attempts):
    """{metric: [score of each problem]}; attempts: of each problem the lines of answers.jsonl, equally many."""
    n = len(attempts[0])
    correct = [sum(line["success"] for line in lines) for lines in attempts]
    mean = [c / n for c in correct]
    if n == 1:
        return {"pass@1": mean}
    scores = {f"pass@1 = avg@{n}": mean}
    k = 2
    while k < n:
        scores[f"pass@{k}"] = [pass_at_k(n, c, k) for c in correct]
        k *= 2
    scores[f"pass@{n}"] = [pass_at_k(n, c, n) for c in correct]
    votes = []
    for lines in attempts:
        answers = [line["answer"] for line in lines]
        successes = [line["success"] for line in lines]
        votes.append(majority(answers, successes))
    scores[f"maj@{n}"] = votes
    return scores


def table(answers, seed):
    """[(metric, mean, low, high)] of one problem set; answers: {problem: [attempt, ...]}, as in answers.jsonl."""
    rows = []
    for metric, scores in scores_by_metric(list(answers.values())).items():
        low, high = interval(scores, seed)
        rows.append((metric, float(np.mean(scores)), low, high))
    return rows


# ---- the run


def configure(argv, gpus):
    """`MODEL [--knob value ...]` -> resolved Config. Raises ConfigError."""
    cfg.require(
        argv and not argv[0].startswith("-"),
        "the first argument must be a model: a run, a checkpoint directory or a hub name",
    )
    model = argv[0].rstrip("/")
    path = Path(model)
    if (path / "metrics.jsonl").exists() or (path / "checkpoints").exists():
        path = checkpoints.newest(path)
        cfg.require(path, f"{model}: this run has no checkpoint yet")
        model = str(path)
    trained_in = path.parent.parent
    names = path.parts[-2:]
    default = None
    if path.parent.name == "checkpoints" and (trained_in / "config.json").exists():
        default = cfg.load(str(trained_in))
        names = (trained_in.name, path.name)
    c = cfg.parse(argv[1:], gpus, default)
    # on this node alone, wherever the run was
    c.model = model
    c.fresh = True
    c.trainers = 0
    c.nodes = ()
    own = dict(
        run="eval-" + re.sub(r"[^A-Za-z0-9._-]", "", "-".join(names)).strip(".-")[:90],
        engines=gpus // c.tensor_parallel or 1,
        gpu_memory_utilization=0.0,
    )
    given = [arg.split("=")[0] for arg in argv]
    for knob, value in own.items():
        if f"--{knob}" not in given:
            setattr(c, knob, value)
    return launch.resolve(c, gpus, training=False)


async def voted(actor, task, problem, text):
    """What attempts are compared by when they vote, None for no vote: the task's `answer`, or all of the text."""
    if not hasattr(actor.sandbox.tasks[task], "answer"):
        return str(text).strip()
    reply = await actor.sandbox.call(task, "answer", problem, text)
    return reply.get("value")


async def attempt(actor, out, task, source, number, problem, k):
    """Attempt k at a problem -> its line of answers.jsonl."""
    c = actor.config
    sample = await actor.evaluate_attempt(task, number, problem, k)
    if sample is None:
        raise RuntimeError(
            f"evaluate: problem {number} of {source}: the engines failed every try, see {_logs(c)}"
        )
    line = dict(
        source=source,
        problem=number,
        attempt=k,
        prompt=problem["prompt"],
        completion=sample["text"],
        answer=await voted(actor, task, problem, sample["text"]),
        expected=problem.get("answer"),
        where=problem.get("where"),
        success=bool(sample["success"]),
        reward=float(sample["reward"]),
        outcome=cfg.OUTCOMES[sample["outcome"]],
        finished=bool(sample["finished"]),
        tokens=int(sample["mask"].sum()),
    )
    out.write(json.dumps(line) + "\n")
    return line


async def wait_for_all(work, processes, config):
    """Until all tasks are done. Raises what one of them raised; RuntimeError if an engine dies, TimeoutError if they go silent."""
    pending = set(work)
    last_answer = last_line = time.monotonic()
    while pending:
        done, pending = await asyncio.wait(pending, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        check_alive(processes, config)
        now = time.monotonic()
        if done:
            last_answer = now
        if now > last_answer + config.stall_timeout:
            raise TimeoutError(
                f"evaluate: no answer from the engines within {config.stall_timeout:.0f} s: see {_logs(config)}"
            )
        if now > last_line + 10:
            last_line = now
            print(f"eval: {len(work) - len(pending)} of {len(work)} answers", flush=True)


async def all_attempts(actor, processes, urls, out):
    """All attempts at all problems, to `out` as they come -> {source: {problem: [line, ...]}}."""
    await actor.start()
    actor.engines.serve(urls)
    work = []
    for task, source, number, problem in actor.held_out():
        for k in range(actor.config.eval_attempts):
            answer = attempt(actor, out, task, source, number, problem, k)
            work.append(asyncio.create_task(answer))
    try:
        await wait_for_all(work, processes, actor.config)
    finally:
        await actor.close()
    results = {}
    for task in work:
        line = task.result()
        of_source = results.setdefault(line["source"], {})
        of_source.setdefault(line["problem"], []).append(line)
    return results


def print_results(results, seed):
    """The table; returns its numbers, {source: {metric: [mean, low, high]}}."""
    metrics = {}
    print(f"\n{'set':<16}{'problems':>9}  {'metric':<18}{'mean':>7}   95% interval")
    for source, answers in results.items():
        metrics[source] = {}
        for name, mean, low, high in table(answers, seed):
            print(
                f"{source:<16}{len(answers):>9}  {name:<18}{mean:>7.4f}   {low:.4f} to {high:.4f}"
            )
            metrics[source][name] = [mean, low, high]
        lines = [line for attempts in answers.values() for line in attempts]
        outcomes = Counter()
        for line in lines:
            cut_off = "" if line["finished"] else ", cut off"
            outcomes[line["outcome"] + cut_off] += 1
        tokens = np.mean([line["tokens"] for line in lines])
        print(f"{'':<25}  {dict(outcomes.most_common())}, {tokens:.0f} tokens on average")
    return metrics


def prepare(argv, gpus):
    """Everything that can be found wrong before engines start; returns the actor. Raises ConfigError."""
    c = configure(argv, gpus)
    hardware.check_hub(c.model)
    launch.hold(c)
    hardware.hold_ports(c, gpus, 0)
    done = launch.open_run(c)
    # only here, as it takes five seconds: a wrong flag is reported at once
    from actor import Actor

    actor = Actor(c, launch.write(c))
    problems = {}
    counts = Counter()
    for task, source, _, problem in actor.held_out():
        problems.setdefault(task, []).append(problem)
        counts[source] += 1
    actor.prompter.check(problems)
    sets = ", ".join(f"{count} problems of {source}" for source, count in counts.items())
    print(
        f"eval: {done} | {c.model} on {sets}, {c.eval_attempts} attempts each, "
        f"temperature {c.eval_temperature}",
        flush=True,
    )
    return actor


def end(*_):
    sys.exit(143)


def main(argv):
    """`MODEL [--knob value ...]` -> table on stdout; out/<run>/answers.jsonl, results.json."""
    gpus = launch.gpu_count()
    try:
        actor = prepare(argv, gpus)
    except cfg.ConfigError as e:
        sys.exit(f"evaluate: {e}")
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    c = actor.config
    processes = start_engines(c, gpus)
    try:
        with open(actor.run_dir / "answers.jsonl", "w") as out:
            work = all_attempts(actor, processes, launch.urls(c, gpus), out)
            results = asyncio.run(work)
    finally:
        stop_engines(processes)
    saved = dict(
        model=c.model,
        problems={source: len(answers) for source, answers in results.items()},
        attempts=c.eval_attempts,
        metrics=print_results(results, c.seed),
    )
    path = actor.run_dir / "results.json"
    path.write_text(json.dumps(saved, indent=1) + "\n")
    print(f"answers in {actor.run_dir}/answers.jsonl, numbers in {path}")


if __name__ == "__main__":
    main(sys.argv[1:])

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


def start_engines(config, gpus=0, as_loaded=True):
    """Start the engines of a resolved config and wait until they are healthy.

    as_loaded: they generate with the weights they have loaded, as version 0; else nothing before a trainer has sent
    them some. Returns their processes, each leader of a process group. Raises RuntimeError or TimeoutError naming
    the logs.
    """
    modules = filter(None, [str(cfg.ROOT), os.environ.get("PYTHONPATH")])
    own = dict(PYTHONPATH=os.pathsep.join(modules), PIPELINE_SERVE_AS_LOADED=str(int(as_loaded)))
    deadline = time.monotonic() + config.start_timeout
    processes = []
    try:
        for name, env, command in launch.engine_commands(config, gpus, 0):
            with open(_logs(config) / f"{name}.log", "w") as log:
                process = subprocess.Popen(
                    command,
                    env=os.environ | env | own,
                    stdout=log,
                    stderr=log,
                    cwd=cfg.ROOT,
                    start_new_session=True,
                )
            processes.append(process)
        for url in hardware.urls(config, gpus):
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
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return float(np.mean([successes[answers.index(a)] for a in winners])) if winners else 0.0


def interval(scores, seed=0, rounds=10000):
    """Bootstrap 95% interval of the mean of one score per problem [P]: percentiles over `rounds` resamples of the problems."""
    problems = len(scores)
    # how often each problem is drawn, [rounds, P]
    drawn = np.random.default_rng(seed).multinomial(problems, [1 / problems] * problems, rounds)
    return tuple(np.percentile(drawn @ np.asarray(scores, float) / problems, [2.5, 97.5]))


def scores_by_metric(attempts):
    """{metric: [score of each problem]}; attempts: of each problem the lines of answers.jsonl, equally many."""
    n = len(attempts[0])
    successes = [[line["success"] for line in lines] for lines in attempts]
    correct = list(map(sum, successes))
    scores = {f"pass@1 = avg@{n}" if n > 1 else "pass@1": [c / n for c in correct]}
    powers = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    for k in powers + [n] * (n > 1):
        scores[f"pass@{k}"] = [pass_at_k(n, c, k) for c in correct]
    if n > 1:
        answers = [[line["answer"] for line in lines] for lines in attempts]
        scores[f"maj@{n}"] = list(map(majority, answers, successes))
    return scores


def table(answers, seed):
    """{metric: (mean, low, high)} of one problem set; answers: {problem: [attempt, ...]}, as in answers.jsonl."""
    scores = scores_by_metric(list(answers.values()))
    return {name: (float(np.mean(of)), *interval(of, seed)) for name, of in scores.items()}


# ---- the evaluation


def configure(argv, gpus):
    """`MODEL [--knob value ...]` -> resolved Config. Raises ConfigError."""
    cfg.require(
        argv and not argv[0].startswith("-"),
        "the first argument must be a model: a run, a checkpoint directory or a hub name",
    )
    path = Path(argv[0])
    if (path / "metrics.jsonl").exists() or (path / "checkpoints").exists():
        path = checkpoints.newest(path)
        cfg.require(path, f"{argv[0]}: this run has no checkpoint yet")
    run_dir = path.parent.parent
    of_run = path.parent.name == "checkpoints" and (run_dir / "config.json").exists()
    c = cfg.parse(argv[1:], gpus, cfg.load(run_dir) if of_run else None)
    name = f"{run_dir.name}-{path.name}" if of_run else "-".join(path.parts[-2:])
    own = dict(
        run="eval-" + re.sub(r"[^A-Za-z0-9._-]", "", name).strip(".-")[:90],
        engines=gpus // c.tensor_parallel or 1,
        gpu_memory_utilization=0.0,
    )
    given = [arg.split("=")[0] for arg in argv]
    for knob, value in own.items():
        if f"--{knob}" not in given:
            setattr(c, knob, value)
    # on this node alone, wherever the run was
    c.model, c.fresh, c.trainers, c.nodes = str(path), True, 0, ()
    return launch.resolve(c, gpus, training=False)


async def attempt(actor, task, source, number, problem, k):
    """Attempt k at a problem -> its line of answers.jsonl."""
    sample = await actor.evaluate_attempt(task, number, problem, k)
    if sample is None:
        raise RuntimeError(
            f"evaluate: problem {number} of {source}: the engines failed every try, see {_logs(actor.config)}"
        )
    # attempts vote by the task's `answer`, or by all of their text
    answer = str(sample["completion"]).strip()
    if hasattr(actor.sandbox.tasks[task], "answer"):
        reply = await actor.sandbox.call(task, "answer", problem, sample["completion"])
        answer = reply.get("value")
    return dict(
        source=source,
        problem=number,
        attempt=k,
        prompt=problem["prompt"],
        completion=sample["completion"],
        answer=answer,
        expected=problem.get("answer"),
        where=problem.get("where"),
        success=bool(sample["success"]),
        reward=float(sample["reward"]),
        outcome=cfg.OUTCOMES[sample["outcome"]],
        finished=bool(sample["finished"]),
        tokens=int(sample["mask"].sum()),
    )


async def all_attempts(actor, processes, urls, out):
    """All attempts at all problems, to `out` as they come -> {source: {problem: [line, ...]}}.

    Raises what one of them raised; RuntimeError if an engine dies, TimeoutError if there is no answer for long.
    """
    c = actor.config
    await actor.start()
    actor.engines.serve(urls)
    pending = set()
    for problem in actor.held_out():
        for k in range(c.eval_attempts):
            pending.add(asyncio.create_task(attempt(actor, *problem, k)))
    lines = []
    last_answer = last_print = time.monotonic()
    while pending:
        done, pending = await asyncio.wait(pending, timeout=1)
        check_alive(processes, c)
        now = time.monotonic()
        for task in done:
            lines.append(task.result())
            out.write(json.dumps(lines[-1]) + "\n")
            last_answer = now
        if now > last_answer + c.stall_timeout:
            raise TimeoutError(
                f"evaluate: no answer from the engines within {c.stall_timeout:.0f} s: see {_logs(c)}"
            )
        if now > last_print + 10:
            last_print = now
            print(f"eval: {len(lines)} of {len(lines) + len(pending)} answers", flush=True)
    await actor.close()
    results = {}
    for line in sorted(lines, key=lambda line: (line["problem"], line["attempt"])):
        results.setdefault(line["source"], {}).setdefault(line["problem"], []).append(line)
    return results


def print_results(results, seed):
    """The table; returns its numbers, {source: {metric: (mean, low, high)}}."""
    metrics = {source: table(answers, seed) for source, answers in results.items()}
    print(f"\n{'set':<16}{'problems':>9}  {'metric':<18}{'mean':>7}   95% interval")
    for source, answers in results.items():
        for name, (mean, low, high) in metrics[source].items():
            where = f"{source:<16}{len(answers):>9}"
            print(f"{where}  {name:<18}{mean:>7.4f}   {low:.4f} to {high:.4f}")
        lines = sum(answers.values(), [])
        outcomes = Counter(x["outcome"] + ", cut off" * (not x["finished"]) for x in lines)
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
    actor.prompter.check(actor.test_problems)
    counts = Counter(source for _, source, _, _ in actor.held_out())
    sets = ", ".join(f"{count} problems of {source}" for source, count in counts.items())
    print(
        f"eval: {done} | {c.model} on {sets}, {c.eval_attempts} attempts each, "
        f"temperature {c.eval_temperature}",
        flush=True,
    )
    return actor


def main(argv):
    """`MODEL [--knob value ...]` -> table on stdout; out/<run>/answers.jsonl, results.json."""
    gpus = hardware.gpu_count()
    try:
        actor = prepare(argv, gpus)
    except cfg.ConfigError as e:
        sys.exit(f"evaluate: {e}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    c = actor.config
    processes = start_engines(c, gpus)
    try:
        with open(actor.run_dir / "answers.jsonl", "w") as out:
            work = all_attempts(actor, processes, hardware.urls(c, gpus), out)
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

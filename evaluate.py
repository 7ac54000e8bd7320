"""Offline evaluation: a model on held-out problems, through a vLLM server of its own.

    python actor.py --eval out/toy/checkpoints/step_000270 --eval_attempts 8      # task and knobs of the run it is from
    python actor.py --eval Qwen/Qwen2.5-7B-Instruct --task maths --eval_data math500,aime24 --chat True --eval_temperature 0.6

Takes every knob of config.py. Prints pass@1, pass@k and maj@k with 95% intervals; every answer goes to out/eval-<model>/answers.jsonl.
Each attempt has a seed of its own, so the same command gives the same numbers on the same machine.
"""
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import requests

import config as cfg
import launch
from actor import Actor


def start_engines(config, gpus=0, extra=()):
    """Start the engines of a resolved config, wait until they are healthy; returns their processes, each leader of a process group."""
    processes, deadline = [], time.monotonic() + config.start_timeout
    try:
        for name, env, command in launch.placement(config, gpus)[:config.engines]:
            log = open(Path(config.out, config.run, "logs", f"{name}.log"), "w")
            processes.append(subprocess.Popen(command + list(extra), env=os.environ | env | {"PYTHONPATH": str(cfg.ROOT)}, stdout=log, stderr=log, cwd=cfg.ROOT, start_new_session=True))
        for i, process in enumerate(processes):
            while True:
                try:
                    if requests.get(f"{config.urls[i]}/health", timeout=5).ok:
                        break
                except requests.RequestException:
                    pass
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"engine {i} did not start{'' if process.poll() is None else f', exit code {process.poll()}'}: see {config.out}/{config.run}/logs/engine{i}.log")
                time.sleep(0.5)
    except BaseException:
        stop_engines(processes)
        raise
    return processes


def stop_engines(processes):
    """End engines and all their children."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def ready(config, version=0):
    """Tell engines that no trainer serves that the weights they have loaded are `version`; until then they refuse to generate."""
    for url in config.urls:
        requests.post(f"{url}/update_weight_version", json={"new_version": str(version)}, headers={"x-run-id": config.run_id}, timeout=30).raise_for_status()


# ------------------------------------------------------------------------------------------------ statistics

def pass_at_k(n, c, k):
    """Chance that at least one of k attempts succeeds, unbiased from c successes in n >= k: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374) eq. 1. pass_at_k(n, c, 1) = c / n, the mean over attempts, avg@n.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers, successes):
    """Success of the most frequent answer of one problem's attempts; that of tied ones on average. No answer (None) has no vote."""
    votes = Counter(a for a in answers if a is not None)
    most = [a for a in votes if votes[a] == max(votes.values())]
    return float(np.mean([successes[answers.index(a)] for a in most])) if most else 0.0


def interval(scores, seed=0, rounds=10000):
    """Bootstrap 95% interval of the mean of one score per problem [P]: percentiles over `rounds` resamples of the problems."""
    scores = np.asarray(scores, float)
    counts = np.random.default_rng(seed).multinomial(len(scores), np.full(len(scores), 1 / len(scores)), size=rounds)
    return tuple(np.percentile(counts @ scores / len(scores), [2.5, 97.5]))


def table(answers, seed):
    """[(metric, mean, low, high)] of one problem set; answers: {problem: [attempt, ...]}, as in answers.jsonl."""
    n = len(next(iter(answers.values())))
    correct = [sum(x["success"] for x in a) for a in answers.values()]
    scores = {"pass@1" + (f" = avg@{n}" if n > 1 else ""): [c / n for c in correct]}
    scores |= {f"pass@{k}": [pass_at_k(n, c, k) for c in correct] for k in (2 ** i for i in range(1, 20)) if k < n}
    if n > 1:
        scores[f"pass@{n}"] = [pass_at_k(n, c, n) for c in correct]
        scores[f"maj@{n}"] = [majority([x["answer"] for x in a], [x["success"] for x in a]) for a in answers.values()]
    return [(name, float(np.mean(s)), *interval(s, seed)) for name, s in scores.items()]


# ------------------------------------------------------------------------------------------------ the run

async def attempts(actor, engines, out):
    """All attempts at all problems, to `out` as they come; {source: {problem: [attempt, ...]}}."""
    c, work = actor.config, {}
    await actor.judges.start()
    watches = {asyncio.create_task(actor.watch(url)) for url in actor.urls}

    async def one(task, source, index, k, problem):
        r = await actor.rollout(task, problem, c.eval_temperature, seed=hash((c.seed, index, k)) & 0x7fffffff)
        if r is None:
            raise RuntimeError(f"evaluate: problem {index} of {source}: no answer from the engine after {c.retries + 1} tries, see its log")
        known = hasattr(actor.judges.tasks[task], "answer")
        words = (await actor.judges.call(task, "answer", problem, r["text"])).get("value") if known else str(r["text"]).strip()
        line = dict(source=source, problem=index, attempt=k, prompt=problem["prompt"], completion=r["text"], answer=words, expected=problem.get("answer"), where=problem.get("where"),
                    success=bool(r["success"]), reward=r["reward"], outcome=r["outcome"], finished=r["finished"], tokens=int(r["mask"].sum()))
        out.write(json.dumps(line) + "\n")
        return line

    for task, source, index, problem in actor.held_out():
        work.setdefault(source, {})[index] = [asyncio.create_task(one(task, source, index, k, problem)) for k in range(c.eval_attempts)]
    pending = watches | {t for problems in work.values() for tries in problems.values() for t in tries}
    total, said = len(pending - watches), time.monotonic()
    while pending - watches:
        done, pending = await asyncio.wait(pending, timeout=1, return_when=asyncio.FIRST_EXCEPTION)
        for t in done:
            t.result()
        for i, engine in enumerate(engines):
            if engine.poll() is not None:
                raise RuntimeError(f"evaluate: engine {i} died with exit code {engine.poll()}: see {c.out}/{c.run}/logs/engine{i}.log")
        if time.monotonic() > said + 10:
            said = time.monotonic()
            print(f"eval: {total - len(pending - watches)} of {total} answers", flush=True)
    for w in watches:
        w.cancel()
    await asyncio.gather(*watches, return_exceptions=True)
    await actor.close()
    return {source: {i: [t.result() for t in tries] for i, tries in problems.items()} for source, problems in work.items()}


def main(argv):
    """`--eval MODEL [--knob value ...]` -> table on stdout; out/<run>/answers.jsonl, results.json."""
    gpus = cfg.gpu_count()
    try:
        if len(argv) < 2 or argv[1].startswith("-"):
            raise cfg.ConfigError("--eval needs a model: a checkpoint directory or a hub name")
        model = argv[1].rstrip("/")
        origin = Path(model).parent.parent
        default = cfg.load(str(origin)) if Path(model).parent.name == "checkpoints" and (origin / "config.json").exists() else None
        c = cfg.parse(argv[2:], gpus, default)
        c.model, c.fresh, c.trainers, c.trainer_nodes, c.nodes = model, True, 1, 0, ()  # on this node, wherever the run was
        given = {a.split("=")[0] for a in argv}
        if "--run" not in given:
            c.run = "eval-" + "-".join(Path(model).parts[-3::2] if default else Path(model).parts[-2:]).strip("./-")
        if "--host" not in given:
            c.host = cfg.Config.host
        if "--engines" not in given:
            c.engines = gpus // c.tensor_parallel or 1
        if "--gpu_memory_utilization" not in given:
            c.gpu_memory_utilization = 0.0
        c = cfg.resolve(c, gpus, training=False)
        done = launch.open_run(c)
        run_dir = launch.write(c)
        actor = Actor(c, run_dir)
        actor.prompter.check(actor.test)
    except cfg.ConfigError as e:
        sys.exit(f"actor.py: {e}")
    print(f"eval: {done} | {model} on {', '.join(f'{len(p)} problems of {t}' for t, p in actor.test.items())}, at most {c.eval_problems} of each set x {c.eval_attempts} attempts, "
          f"temperature {c.eval_temperature}", flush=True)
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, lambda *_: sys.exit(143))
    engines = start_engines(c, gpus)
    try:
        ready(c)
        actor.serving = actor.urls
        with open(run_dir / "answers.jsonl", "w") as out:
            results = asyncio.run(attempts(actor, engines, out))
    finally:
        stop_engines(engines)
    summary = {}
    print(f"\n{'set':<16}{'problems':>9}  {'metric':<18}{'mean':>7}   95% interval")
    for source, answers in results.items():
        summary[source] = {}
        for name, mean, low, high in table(answers, c.seed):
            print(f"{source:<16}{len(answers):>9}  {name:<18}{mean:>7.4f}   {low:.4f} to {high:.4f}")
            summary[source][name] = [mean, low, high]
        outcomes = Counter(x["outcome"] + ("" if x["finished"] else ", cut off") for a in answers.values() for x in a)
        print(f"{'':<25}  {dict(outcomes.most_common())}, {np.mean([x['tokens'] for a in answers.values() for x in a]):.0f} tokens on average")
    (run_dir / "results.json").write_text(json.dumps(dict(model=model, problems={s: len(a) for s, a in results.items()}, attempts=c.eval_attempts, metrics=summary), indent=1) + "\n")
    print(f"answers in {run_dir}/answers.jsonl, numbers in {run_dir}/results.json")

"""Mathematics answers judged per second by the reward workers, and what hostile ones among them cost the others.

    python bench/rewards.py [--answers 4000] [--rounds 3]

Rounds alternate in one run: answers alone, and with 1% of them replaced by hostile ones of a dozen kinds. Every answer is a completion of
some 2,000 characters with its own final answer: the right one, an equal form, or a wrong one, so that no cache helps.
"""
import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import rewards
from tasks import maths

HOSTILE = ["9**9**9**9", "9^{9^{9^9}}", "10^{10^{100}}", "((9!)!)!", "99999999!", "(x+y+z)^{200}", "\\int_0^1 e^{x^{x^x}} dx", "(x+1)^{99999}", "\\sqrt{" * 25 + "2" + "}" * 25,
           "(1+" * 200, "x_" * 240, "{" * 400 + "1" + "}" * 400, "x^2" * 3500000]


def draw(rng, problems):
    """(problem, completion) with an answer nobody has given before."""
    p, n, d = rng.choice(problems), rng.randint(2, 10 ** 6), rng.randint(2, 999)
    gold, given = rng.choice([(f"{n}", f"{n}"), (f"{n}", f"{n + d}"), (f"\\frac{{{n}}}{{{d}}}", f"{n}/{d}"), (f"{n}", f"{n:,}"), (f"\\frac{{{n}}}{{{d}}}", f"\\frac{{{n + 1}}}{{{d}}}"),
                              (f"{d}\\sqrt{{{n}}}", f"\\sqrt{{{n}}} \\cdot {d}"), (f"({d}, {n})", f"({d},{n})"), (f"{d}x+{n}", f"{n}+{d}x"), (f"{d}\\pi", f"{n}\\pi"), (p["answer"], p["answer"])])
    return p | {"answer": gold}, "We compute step by step. " * 80 + f"Hence \\boxed{{{given}}}."


async def one_round(judges, work):
    """Seconds for all of it, 64 in flight, and the outcomes."""
    outcomes, todo, start = [], iter(work), time.perf_counter()

    async def client():
        for problem, completion in todo:
            outcomes.append((await judges.score("maths", problem, completion, True))["outcome"])
    await asyncio.gather(*(client() for _ in range(64)))
    return time.perf_counter() - start, outcomes


async def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--answers", type=int, default=4000)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--workers", type=int, default=2)
    a = p.parse_args()
    problems = maths.problems("test", 0, str(cfg.ROOT / "tests" / "maths.jsonl"))
    judges, rng = rewards.Judges(cfg.Config(task="maths", reward_workers=a.workers)), random.Random(0)
    await judges.start()
    await one_round(judges, [draw(rng, problems) for _ in range(200)])
    rates = []
    for _ in range(a.rounds):
        clean, mixed = ([draw(rng, problems) for _ in range(a.answers)] for _ in range(2))
        for k, i in enumerate(rng.sample(range(a.answers), a.answers // 100)):
            mixed[i] = mixed[i][0], f"\\boxed{{{HOSTILE[k % len(HOSTILE)]}}}"
        rates.append([a.answers / (await one_round(judges, work))[0] for work in (clean, mixed)])
    alone = []
    for h in HOSTILE:
        seconds, outcome = await one_round(judges, [({"answer": "7"}, f"\\boxed{{{h}}}")])
        alone.append((h[:32], outcome[0], seconds))
    judges.close()
    print(f"{a.workers} workers, limit {judges.config.reward_timeout} CPU s, {a.answers} answers a round\n{'round':>6} {'answers/s':>10} {'1% hostile':>11} {'ratio':>6}")
    for i, (clean, mixed) in enumerate(rates):
        print(f"{i:>6} {clean:>10.0f} {mixed:>11.0f} {mixed / clean:>6.2f}")
    clean, mixed = np.median(rates, axis=0)
    print(f"median {clean:>10.0f} {mixed:>11.0f} {np.median([m / c for c, m in rates]):>6.2f}\n\n{'hostile answer':<34} {'outcome':<11} seconds alone")
    for name, outcome, seconds in alone:
        print(f"{name:<34} {outcome:<11} {seconds:.3f}")


if __name__ == "__main__":
    asyncio.run(main())

"""Mathematics answers judged per second by the reward workers, and what hostile ones among them cost the others.

    python bench/rewards.py [--answers 4000] [--rounds 3]

Rounds alternate in one run: answers alone, and with 1% of them replaced by hostile ones of a dozen kinds.
Every answer is a completion of some 2,000 characters with its own final answer: the right one, an equal
form, or a wrong one, so that no cache helps.
"""

import asyncio
import itertools
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import keep, machine, parser, ratio_table, result_file, table
from plumbing.sandbox import Sandbox  # noqa: E402
from tasks import maths  # noqa: E402

IN_FLIGHT = 64
REASONING = "We compute step by step. " * 80
# the right answer, and the one that is given
FORMS = [
    ("{n}", "{n}"),
    ("{n}", "{wrong}"),
    ("\\frac{{{n}}}{{{d}}}", "{n}/{d}"),
    ("{n}", "{n:,}"),
    ("\\frac{{{n}}}{{{d}}}", "\\frac{{{wrong}}}{{{d}}}"),
    ("{d}\\sqrt{{{n}}}", "\\sqrt{{{n}}} \\cdot {d}"),
    ("({d}, {n})", "({d},{n})"),
    ("{d}x+{n}", "{n}+{d}x"),
    ("{d}\\pi", "{n}\\pi"),
    ("{own}", "{own}"),
]
NESTED = [
    ("\\sqrt{", "2", "}", 25),
    ("(1+", "", "", 200),
    ("x_", "", "", 240),
    ("{", "1", "}", 400),
    ("x^2", "", "", 3500000),
]
HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^9}}",
    "10^{10^{100}}",
    "((9!)!)!",
    "99999999!",
    "(x+y+z)^{200}",
    "(9999!)^{9999}",
    "(x+1)^{99999}",
]


for before, inner, after, depth in NESTED:
    HOSTILE.append(before * depth + inner + after * depth)


def draw(rng, problems):
    """(problem, completion) with an answer nobody has given before."""
    problem = rng.choice(problems)
    gold, given = rng.choice(FORMS)
    values = dict(n=rng.randint(2, 10**6), d=rng.randint(2, 999), own=problem["answer"])
    values["wrong"] = values["n"] + values["d"]
    problem = problem | {"answer": gold.format(**values)}
    answer = boxed(given.format(**values))
    return problem, f"{REASONING}Hence {answer}."


def boxed(answer):
    return f"\\boxed{{{answer}}}"


async def one_round(sandbox, work):
    """Seconds for all of it, 64 in flight, and the outcomes."""
    outcomes = []
    todo = iter(work)

    async def client():
        for problem, completion in todo:
            verdict = await sandbox.score("maths", problem, completion, True)
            outcomes.append(verdict["outcome"])

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - start, outcomes


async def compare(sandbox, answers, rounds):
    """{clean, mixed: answers/s of every round}: alone, and with 1% of them hostile."""
    rng = random.Random(0)
    problems = maths.problems("test", 0, str(cfg.ROOT / "tests" / "maths.jsonl"))
    await one_round(sandbox, [draw(rng, problems) for _ in range(200)])
    rates = dict(clean=[], mixed=[])
    for _ in range(rounds):
        clean = [draw(rng, problems) for _ in range(answers)]
        mixed = [draw(rng, problems) for _ in range(answers)]
        places = rng.sample(range(answers), answers // 100)
        for i, hostile in zip(places, itertools.cycle(HOSTILE)):
            mixed[i] = problems[0], boxed(hostile)
        for name, work in (("clean", clean), ("mixed", mixed)):
            seconds, _ = await one_round(sandbox, work)
            rates[name].append(answers / seconds)
    return rates


async def alone(sandbox):
    """{hostile answer: (seconds, outcome)}, one after the other."""
    found = {}
    for hostile in HOSTILE:
        seconds, outcomes = await one_round(sandbox, [({"answer": "7"}, boxed(hostile))])
        found[hostile[:32]] = seconds, outcomes[0]
    return found


async def measure(arguments):
    """(what `compare` gives, what `alone` gives, how the sandbox is set up)."""
    sandbox = Sandbox(cfg.Config(task="maths"))
    await sandbox.start()
    try:
        rates = await compare(sandbox, arguments.answers, arguments.rounds)
        set_up = f"{sandbox.workers} workers, limit {sandbox.config.reward_timeout} CPU s"
        return rates, await alone(sandbox), set_up
    finally:
        sandbox.close()


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--answers", type=int, default=4000)
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args(argv)
    if a.quick:
        a.answers = 400
        a.rounds = 1
    rates, hostile, set_up = asyncio.run(measure(a))
    print(f"{machine()}; {set_up}, {a.answers} answers a round")
    ratio_table(["round", "answers/s", "1% hostile"], rates["clean"], rates["mixed"])
    print()
    rows = [[name, f"{seconds:.3f}", outcome] for name, (seconds, outcome) in hostile.items()]
    table(["hostile answer", "seconds alone", "outcome"], rows)
    cores = len(os.sched_getaffinity(0))
    found = dict(machine=machine(), cores=cores, answers_s=rates, alone=hostile)
    keep(result_file(a, "rewards"), found)


if __name__ == "__main__":
    main()

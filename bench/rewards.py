"""Mathematics: how often a verdict is wrong, what it costs, and what hostile answers cost the others.

    python bench/rewards.py [--answers 4000] [--rounds 3] [--pairs]

First the pairs of tests/maths_pairs.jsonl, with their verdicts (--pairs: only these, and each wrong one). Then answers in
the sandbox, rounds alternately: alone, and with 1% of them replaced by hostile ones of a dozen kinds. Every answer is a
completion of some 2,000 characters with its own final answer: right, of an equal form, or wrong; no cache helps.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from bench.common import keep, machine, parser, ratio_table, result_file, table  # noqa: E402
from plumbing.sandbox import Sandbox  # noqa: E402
from tasks import maths  # noqa: E402

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
HOSTILE = """
9**9**9**9 9^{9^{9^9}} ((9!)!)! 99999999! (x+y+z)^{200} (9999!)^{9999} 7^{0.49999999}
""".split()
HOSTILE += ["\\sqrt{" * 25 + "2" + "}" * 25, "(1+" * 200, "{" * 400 + "1" + "}" * 400]


def wrong_verdicts():
    """{equal: (how many pairs are, those whose verdict is wrong)} of the pairs that are equal, and of those that are not."""
    found = {True: [0, []], False: [0, []]}
    for line in (cfg.ROOT / "tests" / "maths_pairs.jsonl").open():
        pair = json.loads(line)
        completion = pair.get("completion") or boxed(pair["answer"])
        problem = {"answer": pair["reference"], "prompt": pair.get("problem", "")}
        outcome = maths.reward(problem, completion, True)
        found[pair["equal"]][0] += 1
        if (outcome == "correct") != pair["equal"]:
            found[pair["equal"]][1].append((pair["reference"], completion, outcome))
    return found


def draw(rng, problems):
    """(problem, completion) with an answer nobody has given before."""
    problem = rng.choice(problems)
    gold, given = rng.choice(FORMS)
    values = dict(n=rng.randint(2, 10**6), d=rng.randint(2, 999), own=problem["answer"])
    values["wrong"] = values["n"] + values["d"]
    completion = f"{REASONING}Hence {boxed(given.format(**values))}."
    return problem | {"answer": gold.format(**values)}, completion


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
    await asyncio.gather(*(client() for _ in range(64)))
    return time.perf_counter() - start, outcomes


def cpu_seconds():
    """Of this process and all that it started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(answers, rounds):
    """Everything about the sandbox: start_s, cpu_ms an answer, answers_s {clean, mixed: of every round}, alone {hostile: ...}."""
    start = time.perf_counter()
    sandbox = Sandbox(cfg.Config(task="maths"))
    await sandbox.start()
    rng = random.Random(0)
    problems = maths.problems("test", 0, str(cfg.ROOT / "tests" / "maths.jsonl"))
    await one_round(sandbox, [(problems[0], boxed("1"))])
    found = dict(start_s=time.perf_counter() - start, cpu_ms=[])
    await one_round(sandbox, [draw(rng, problems) for _ in range(200)])
    rates = found["answers_s"] = dict(clean=[], mixed=[])
    for _ in range(rounds):
        clean, mixed = ([draw(rng, problems) for _ in range(answers)] for _ in range(2))
        places = rng.sample(range(answers), answers // 100)
        for i, hostile in zip(places, itertools.cycle(HOSTILE)):
            mixed[i] = problems[0], boxed(hostile)
        before = cpu_seconds()
        rates["clean"].append(answers / (await one_round(sandbox, clean))[0])
        found["cpu_ms"].append((cpu_seconds() - before) / answers * 1000)
        rates["mixed"].append(answers / (await one_round(sandbox, mixed))[0])
    found["alone"] = {}
    for hostile in HOSTILE:
        seconds, outcomes = await one_round(sandbox, [(problems[0], boxed(hostile))])
        found["alone"][hostile[:32]] = seconds, outcomes[0]
    sandbox.close()
    return found


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--answers", type=int, default=4000)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--pairs", action="store_true")
    a = p.parse_args(argv)
    verdicts = wrong_verdicts()
    for equal, words in ((False, "accepted, though wrong"), (True, "missed, though right")):
        count, wrong = verdicts[equal]
        print(f"{words}: {len(wrong)} of {count}, {len(wrong) / count:.1%}")
        if a.pairs:
            table(["reference", "completion", "outcome"], wrong)
    if a.pairs:
        return
    found = asyncio.run(measure(400, 1) if a.quick else measure(a.answers, a.rounds))
    start, cpu = found["start_s"], min(found["cpu_ms"])
    print(f"{machine()}; start {start:.2f} s; {cpu:.1f} ms of CPU an answer")
    ratio_table(["round", "answers/s", "1% hostile"], *found["answers_s"].values())
    rows = [[name, f"{s:.3f}", outcome] for name, (s, outcome) in found["alone"].items()]
    table(["hostile answer", "seconds alone", "outcome"], rows)
    found |= dict(accepted=len(verdicts[False][1]), missed=len(verdicts[True][1]))
    found |= dict(machine=machine(), cores=len(os.sched_getaffinity(0)))
    keep(result_file(a, "rewards"), found)


if __name__ == "__main__":
    main()

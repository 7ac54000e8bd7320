"""How often the verdict of tasks/maths.py is wrong on the pairs of tests/maths_pairs.jsonl.

    python bench/rewards.py

Prints the rates, and the pairs whose verdict is wrong.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import table
from tasks import maths


def wrong_verdicts():
    """{whether the two are equal: (number of such pairs, those with a wrong verdict)}."""
    counts = {True: 0, False: 0}
    wrong = {True: [], False: []}
    for line in (cfg.ROOT / "tests" / "maths_pairs.jsonl").open():
        pair = json.loads(line)
        completion = pair.get("completion") or f"\\boxed{{{pair['answer']}}}"
        problem = {"answer": pair["reference"], "prompt": pair.get("problem", "")}
        outcome = maths.reward(problem, completion, True)
        counts[pair["equal"]] += 1
        if (outcome == "correct") != pair["equal"]:
            wrong[pair["equal"]].append((pair["class"], pair["reference"], completion, outcome))
    return {equal: (counts[equal], wrong[equal]) for equal in counts}


def main():
    verdicts = wrong_verdicts()
    rates = []
    for equal, verdict in ((False, "accepted, though wrong"), (True, "missed, though right")):
        count, wrong = verdicts[equal]
        rates.append((verdict, len(wrong), count, f"{len(wrong) / count:.1%}"))
    table(["verdict", "pairs", "of", "rate"], rates)
    wrong = [row for _, rows in verdicts.values() for row in rows]
    if wrong:
        table(["class", "reference", "completion", "outcome"], wrong)


if __name__ == "__main__":
    main()

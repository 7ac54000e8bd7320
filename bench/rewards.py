"""Mathematics: how often a verdict is wrong, on the pairs of tests/maths_pairs.jsonl, and which.

python bench/rewards.py
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import table
from tasks import maths


def wrong_verdicts():
    """{equal: (how many pairs are, those of them whose verdict is wrong)} for True and False."""
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

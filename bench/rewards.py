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
    """{equal: (how many pairs are, those whose verdict is wrong)} of the pairs that are equal, and of those that are not."""
    found = {True: [0, []], False: [0, []]}
    for line in (cfg.ROOT / "tests" / "maths_pairs.jsonl").open():
        pair = json.loads(line)
        completion = pair.get("completion") or f"\\boxed{{{pair['answer']}}}"
        problem = {"answer": pair["reference"], "prompt": pair.get("problem", "")}
        outcome = maths.reward(problem, completion, True)
        found[pair["equal"]][0] += 1
        if (outcome == "correct") != pair["equal"]:
            found[pair["equal"]][1].append((pair["reference"], completion, outcome))
    return found


def main():
    verdicts = wrong_verdicts()
    for equal, words in ((False, "accepted, though wrong"), (True, "missed, though right")):
        count, wrong = verdicts[equal]
        print(f"{words}: {len(wrong)} of {count}, {len(wrong) / count:.1%}")
        table(["reference", "completion", "outcome"], wrong)


if __name__ == "__main__":
    main()

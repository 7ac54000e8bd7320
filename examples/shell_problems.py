"""Make a directory of small problems for the task shell, in Harbor's layout.

    python examples/shell_problems.py out/shell/train --count 200
    python examples/shell_problems.py out/shell/test --count 40 --held_out
    python -m tasks.shell out/shell/test                    # is each solution graded as right?
    bash run.sh smol --run shell --task shell --train_data out/shell/train \\
        --eval_data out/shell/test --max_new_tokens 96 --max_model_len 512

A problem asks for a new file, a new directory, a copy of a file, another name for it, or its
removal. With --held_out the names of files are made of other words than without it.
"""

import argparse
import random
from pathlib import Path

# the words that names are made of: every other one is for held-out problems
WORDS = (
    "apple bear cloud door east fire glass hill iron jade kite lamp moon nest oak pear queen rose "
    "sand tree"
).split()
# (instruction, files at the beginning, solution, condition of the test); {a}, {b}: two names, {n}:
# a number
KINDS = [
    ("Write the number {n} into the file {a}.", [], "echo {n} > {a}", '"$(cat {a})" = {n}'),
    ("Make a directory with the name {a}.", [], "mkdir {a}", "-d {a}"),
    ("Remove the file {a}.", ["a", "b"], "rm {a}", "! -e {a} -a -e {b}"),
    ("Rename the file {a} to {b}.", ["a"], "mv {a} {b}", '! -e {a} -a "$(cat {b})" = text'),
    ("Copy the file {a} to {b}.", ["a"], "cp {a} {b}", '-e {a} -a "$(cat {b})" = text'),
]
TEST = """cd /app
if [ {} ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""


def make(folder, rng, words):
    """Write one problem into a directory."""
    instruction, files, solution, condition = rng.choice(KINDS)
    a, b = rng.sample([f"{x}_{y}.txt" for x in words for y in words], 2)
    values = dict(a=a, b=b, n=rng.randrange(10, 1000))
    contents = {
        "instruction.md": instruction.format(**values) + "\n",
        "solution/solve.sh": solution.format(**values) + "\n",
        "tests/test.sh": TEST.format(condition.format(**values)),
    }
    contents |= {f"environment/{values[name]}": "text\n" for name in files}
    for name, content in contents.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def main(argv=None):
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder", help="directory of the problems; it must not exist")
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--held_out", action="store_true")
    arguments = p.parse_args(argv)
    Path(arguments.folder).mkdir(parents=True)
    rng = random.Random(arguments.seed)
    words = WORDS[int(arguments.held_out) :: 2]
    for k in range(arguments.count):
        make(Path(arguments.folder, f"{k:04d}"), rng, words)


if __name__ == "__main__":
    main()

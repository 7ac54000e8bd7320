"""Print the latest rollouts of a run, in colour.

    python tools/show.py [out/toy] [--n 5] [--multi]      without a run: the newest one

The tokens of each version have a colour of their own, with |v12> where version 12 took over in the
middle of a sequence. Prompts and the replies of an environment or a tool are grey. The segments of
an agent stand one after the other. --multi: only rollouts that several versions have sampled.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from tools.common import answer_to, find_run, read_rollouts, right_answers

# a terminal's colour codes for the versions in turn
COLOURS = (36, 33, 35, 32, 34, 31)
# the code for tokens that no version sampled
GREY = 90
# the code for marks between tokens
BOLD = 1
# the codes for the first line of a rollout
RIGHT = "1;32"
WRONG = "1;31"


def paint(code, text, colour):
    """Return the text in the colour of this code, if colours are wanted."""
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def harmless(text):
    """Return the text without characters by which a rollout could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c).strip("'") for c in text)


def versions_of(rollout):
    """Return the versions that sampled a rollout, in the order in which they sampled it."""
    return list(dict.fromkeys(version for version, *_ in rollout["spans"] if version >= 0))


def heading(rollout):
    """Return a line with the problem, the reward and the versions of a rollout."""
    versions = versions_of(rollout)
    trained = rollout["step"] - 1
    outcome = rollout["outcome"]
    if not rollout["finished"]:
        outcome += ", cut off"
    return (
        f"step {rollout['step']}, problem {rollout['problem']} of {rollout['task']} | "
        f"reward {rollout['reward']:.2f} {outcome}, advantage {rollout['advantage']:+.2f} | "
        f"versions {' '.join(map(str, versions))}: "
        f"lag {trained - max(versions)} to {trained - min(versions)}"
    )


def show(rollout, answers, colour=True):
    """Return a line of samples.jsonl as text for a terminal. answers: see common.right_answers."""
    text = ""
    last_version = None
    current_segment = 0
    for version, tokens, segment in rollout["spans"]:
        span_text = harmless("".join(tokens))
        if segment != current_segment:
            text += paint(BOLD, f"\n---- segment {segment + 1}\n", colour)
            current_segment = segment
            last_version = None
        if version < 0:
            text += paint(GREY, span_text, colour)
            continue
        if last_version not in (None, version):
            text += paint(BOLD, f"|v{version}>", colour)
        text += paint(COLOURS[version % len(COLOURS)], span_text, colour)
        last_version = version
    code = RIGHT if rollout["outcome"] == "correct" else WRONG
    shown = f"{paint(code, heading(rollout), colour)}\n{text}\n"
    answer = answer_to(rollout, answers)
    return shown if answer is None else f"{shown}answer: {harmless(answer)}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", help="directory or name of a run; default: the newest")
    parser.add_argument("--n", type=int, default=5, help="number of rollouts, the newest ones")
    parser.add_argument(
        "--multi", action="store_true", help="only rollouts that several versions sampled"
    )
    arguments = parser.parse_args()
    # A closed pipe, as in `| head`, is no error.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    path = find_run(arguments.run, "samples.jsonl") / "samples.jsonl"
    answers = right_answers(cfg.load(path.parent))
    colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    with open(path, "rb") as file:
        rollouts = list(read_rollouts(file))
    if arguments.multi:
        rollouts = [rollout for rollout in rollouts if len(versions_of(rollout)) > 1]
    for rollout in rollouts[-arguments.n :]:
        print(show(rollout, answers, colour))


if __name__ == "__main__":
    main()

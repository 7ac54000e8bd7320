"""The latest rollouts of a run, in colour.

    python tools/show.py [out/toy] [--n 5] [--multi]      without a run: the newest

Each version's tokens have a colour of their own, with |v12> where version 12 took over in the middle of the
sequence; prompts, and what an environment or a tool said, are grey. An agent's segments stand one after the other.
--multi: only those that more than one version sampled.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402
from plumbing.problems import load_problems  # noqa: E402
from tools.status import find_run  # noqa: E402

# of a terminal: of the versions in turn, of what nobody sampled, of the first line
COLOURS = (36, 33, 35, 32, 34, 31)
GREY = 90
BOLD = 1
RIGHT, WRONG = "1;32", "1;31"


def read_rollouts(file):
    """The lines of samples.jsonl but for a torn one."""
    for text in file:
        if text.endswith(b"\n"):
            yield json.loads(text)


def right_answers(config):
    """{task: [problem's "answer", or None]} of what is trained on; {} and a line if it cannot be had here."""
    try:
        problems = load_problems(config, "train")
    except (cfg.ConfigError, OSError) as e:
        print(f"(no right answers are shown: {e})", file=sys.stderr)
        return {}
    return {task: [problem.get("answer") for problem in problems[task]] for task in problems}


def answer_to(line, answers):
    """What is right for a rollout's problem, as text; None if that is not known."""
    answer = answers[line["task"]][line["problem"]] if answers else None
    return None if answer is None else str(answer)


def paint(code, text, colour):
    """The text in this colour, if colours are wanted."""
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def harmless(text):
    """A rollout must not drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c).strip("'") for c in text)


def versions_of(line):
    """Versions that sampled a rollout, in the order in which they did."""
    return list(dict.fromkeys(version for version, *_ in line["spans"] if version >= 0))


def heading(line):
    """Problem, reward, versions."""
    versions = versions_of(line)
    trained = line["step"] - 1
    outcome = line["outcome"]
    if not line["finished"]:
        outcome += ", cut off"
    return (
        f"step {line['step']}, problem {line['problem']} of {line['task']} | "
        f"reward {line['reward']:.2f} {outcome}, advantage {line['advantage']:+.2f} | "
        f"versions {' '.join(map(str, versions))}: lag {trained - max(versions)} to {trained - min(versions)}"
    )


def show(line, answers, colour=True):
    """One line of samples.jsonl as text for a terminal; answers: see right_answers."""
    text = ""
    last = None
    current = 0
    for version, tokens, segment in line["spans"]:
        part = harmless("".join(tokens))
        if segment != current:
            text += paint(BOLD, f"\n---- segment {segment + 1}\n", colour)
            current, last = segment, None
        if version < 0:
            text += paint(GREY, part, colour)
            continue
        if last not in (None, version):
            text += paint(BOLD, f"|v{version}>", colour)
        text += paint(COLOURS[version % len(COLOURS)], part, colour)
        last = version
    head = paint(RIGHT if line["outcome"] == "correct" else WRONG, heading(line), colour)
    shown = f"{head}\n{text}\n"
    answer = answer_to(line, answers)
    return shown if answer is None else f"{shown}answer: {harmless(answer)}\n"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run", nargs="?", help="directory or name of a run; default: the newest")
    p.add_argument("--n", type=int, default=5, help="so many, the newest")
    p.add_argument("--multi", action="store_true", help="of several versions only")
    a = p.parse_args()
    # `| head` is no error
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    path = find_run(a.run, "samples.jsonl") / "samples.jsonl"
    answers = right_answers(cfg.load(path.parent))
    colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    with open(path, "rb") as file:
        lines = [x for x in read_rollouts(file) if not a.multi or len(versions_of(x)) > 1]
    for line in lines[-a.n :]:
        print(show(line, answers, colour))


if __name__ == "__main__":
    main()

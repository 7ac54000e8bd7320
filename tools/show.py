"""The latest rollouts of a run, in colour.

    python tools/show.py [out/toy] [--n 5] [--follow] [--multi]      without a run: the newest

Each version's tokens have a colour of their own, with |v12> where version 12 took over in the middle of the
sequence; the prompt and an environment's texts are grey. --multi: only those that more than one version sampled.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.find import run_of  # noqa: E402

# of a terminal: of the versions in turn, of what nobody sampled, of the first line
COLOURS = (36, 33, 35, 32, 34, 31)
GREY = 90
BOLD = 1
RIGHT, WRONG = "1;32", "1;31"


def paint(code, text, colour):
    """The text in this colour, if colours are wanted."""
    if not colour:
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def harmless(text):
    """A rollout must not drive the terminal."""
    shown = ""
    for character in text:
        if not character.isprintable() and character not in "\n\t":
            character = repr(character).strip("'")
        shown += character
    return shown


def versions_of(line):
    """Versions that sampled a rollout, in the order in which they did."""
    return [version for version, _ in line["spans"] if version >= 0]


def heading(line):
    """Problem, reward, versions."""
    versions = versions_of(line)
    sampled = "nothing sampled"
    if versions:
        names = " ".join(map(str, dict.fromkeys(versions)))
        youngest = line["version"] - max(versions)
        oldest = line["version"] - min(versions)
        sampled = f"versions {names}, trainer at {line['version']}: lag {youngest} to {oldest}"
    outcome = line["outcome"]
    if not line["finished"]:
        outcome += ", cut off"
    return (
        f"problem {line['index']} of {line['task']} | "
        f"reward {line['reward']:.2f} {outcome} | {sampled}"
    )


def show(line, colour=True):
    """One line of samples.jsonl as text for a terminal."""
    text = ""
    last = None
    for version, tokens in line["spans"]:
        part = harmless("".join(tokens))
        if version < 0:
            text += paint(GREY, part, colour)
            continue
        if last not in (None, version):
            text += paint(BOLD, f"|v{version}>", colour)
        text += paint(COLOURS[version % len(COLOURS)], part, colour)
        last = version
    head = paint(RIGHT if line["outcome"] == "correct" else WRONG, heading(line), colour)
    shown = f"{head}\n{text}\n"
    if line.get("answer") is not None:
        shown += f"answer: {line['answer']}\n"
    return shown


def wanted(line, multi):
    return not multi or len(set(versions_of(line))) > 1


def follow(file, multi, colour):
    """Show what is added to the file, until Ctrl-C."""
    while True:
        text = file.readline()
        if not text:
            time.sleep(0.5)
            continue
        line = json.loads(text)
        if wanted(line, multi):
            print(show(line, colour), flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run", nargs="?", help="directory or name of a run; default: the newest")
    p.add_argument("--n", type=int, default=5, help="so many, the newest")
    p.add_argument("--follow", action="store_true", help="go on with what is added")
    p.add_argument("--multi", action="store_true", help="of several versions only")
    a = p.parse_args()
    # `| head` is no error
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    path = run_of(a.run, "samples.jsonl") / "samples.jsonl"
    colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    with open(path) as file:
        lines = [json.loads(text) for text in file]
        chosen = [line for line in lines if wanted(line, a.multi)]
        for line in chosen[-a.n :]:
            print(show(line, colour))
        if a.follow:
            follow(file, a.multi, colour)


if __name__ == "__main__":
    main()

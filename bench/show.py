"""The latest rollouts of a run, in colour: `python bench/show.py out/toy [--n 5] [--follow] [--multi]`.

Each version's tokens have a colour of their own, with |v12> where version 12 took over in the middle of the sequence; the prompt and an
environment's texts are grey. --multi: only those that more than one version sampled.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

COLOURS = (36, 33, 35, 32, 34, 31)


def show(line, colour=True):
    """One line of samples.jsonl as text for a terminal."""
    paint = (lambda code, text: f"\x1b[{code}m{text}\x1b[0m") if colour else (lambda code, text: text)
    sampled = [v for v, _ in line["spans"] if v >= 0]
    text, last = "", None
    for v, part in line["spans"]:
        part = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in part)  # a rollout must not drive the terminal
        if v >= 0 and last is not None and v != last:
            text += paint(1, f"|v{v}>")
        text += paint(90 if v < 0 else COLOURS[v % len(COLOURS)], part)
        last = v if v >= 0 else last
    head = f"problem {line['index']} of {line['task']} | reward {line['reward']:.2f} {line['outcome']}{'' if line['finished'] else ', cut off'} | " + (
        f"versions {' '.join(map(str, dict.fromkeys(sampled)))}, trainer at {line['version']}: lag {line['version'] - max(sampled)} to {line['version'] - min(sampled)}" if sampled else "nothing sampled")
    return paint("1;32" if line["outcome"] == "correct" else "1;31", head) + f"\n{text}\n" + (f"answer: {line['answer']}\n" if line.get("answer") is not None else "")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run_dir")
    p.add_argument("--n", type=int, default=5)
    p.add_argument("--follow", action="store_true")
    p.add_argument("--multi", action="store_true")
    a = p.parse_args()
    path = Path(a.run_dir, "samples.jsonl")
    if not path.exists():
        sys.exit(f"show: there is no {path}")
    colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    wanted = lambda line: not a.multi or len({v for v, _ in line["spans"] if v >= 0}) > 1
    with open(path) as file:
        for line in [x for x in map(json.loads, file) if wanted(x)][-a.n:]:
            print(show(line, colour))
        while a.follow:
            text = file.readline()
            if text and wanted(line := json.loads(text)):
                print(show(line, colour), flush=True)
            elif not text:
                time.sleep(0.5)


if __name__ == "__main__":
    main()

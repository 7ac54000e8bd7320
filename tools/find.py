"""Which run is meant: a directory, the name of one under out/, or nothing for the newest."""

import sys
from pathlib import Path

import config as cfg

OUT = cfg.ROOT / "out"


def run_of(wanted=None, file="config.json"):
    """A run's directory; exits with a line if there is none that has this file."""
    if wanted:
        places = [Path(wanted), OUT / wanted]
        for place in places:
            if (place / file).exists():
                return place
        sys.exit(f"{wanted}: there is no {file} in {places[0]}, nor in {places[1]}")
    # an evaluation (tools/evaluate.py) has no trainer
    found = [path.parent for path in OUT.glob(f"*/{file}") if cfg.load(path.parent).trainers]
    if not found:
        sys.exit(f"no run in {OUT} has a {file} yet: name one")
    newest = max(found, key=lambda run_dir: (run_dir / file).stat().st_mtime)
    print(f"(the newest run: {newest})", file=sys.stderr)
    return newest

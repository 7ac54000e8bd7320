"""When do recent tokens teach more than old ones harm (arXiv 2509.19128, section 8)? Age told apart from place.

    python bench/old_tokens.py [--seeds 4] [--first_seed 200] [--quick] [--plot] [--port 8950]

The pipeline with twice as many sequences in progress as bench/compare.py has, and `--max_lag 4`, so that long answers
meet up to some 20 versions. Old tokens are also early tokens of long answers: what only they teach may be bad for that
reason alone. So every choice of tokens by age has a twin that is on-policy (G = 1) and chooses by place, the same share of
all tokens, those farthest from their answers' ends:

    all, recent, old    tokens in the loss: all; of lag up to AGE; of lag above it
    late, early         on-policy: all of lag 0; less than LEFT tokens before the end; LEFT or more

If `early` falls as `old` does, it is place; if it does not, age. The choice is bench/edits/tokens_trained.patch, applied to
a copy of the repository: it is no knob of the project. Runs and scores: bench/runs.py. Intervals: bench/curves.py.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import ROOT, WORK, band, copy_sources, panels, save_figure, table
from bench.compare import row_of, signed
from bench.curves import written
from bench.runs import COMMON, PIPELINE, QUICK, conventional, places, scores_of

PATCH = ROOT / "bench" / "edits" / "tokens_trained.patch"
# steps; and tokens before the end, so many that `early` has the share of all tokens that `old` has (37%)
AGE, LEFT = 4, 46
CROWDED = COMMON | PIPELINE | dict(concurrency=128, max_lag=4)
ON_POLICY = COMMON | conventional(1)
SETTINGS = {
    "all": CROWDED,
    "recent": CROWDED | dict(tokens_trained=f"recent {AGE}"),
    "old": CROWDED | dict(tokens_trained=f"old {AGE}"),
    "on-policy, all": ON_POLICY,
    "on-policy, late": ON_POLICY | dict(tokens_trained=f"late {LEFT}"),
    "on-policy, early": ON_POLICY | dict(tokens_trained=f"early {LEFT}"),
}


def patched_copy():
    """The sources in out/bench/old_tokens, with the patch; returns that folder."""
    folder = copy_sources(WORK / "old_tokens")
    # not as part of the repository around it
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", str(PATCH)], cwd=folder, env=environment, check=True)
    return folder


def say(by_setting):
    """The table; differences are from all tokens of the same kind of run, seed by seed."""
    rows = []
    found = {setting: row_of(of_it) for setting, of_it in by_setting.items()}
    for setting, row in found.items():
        whole = found.get("on-policy, all" if "on-policy" in setting else "all", row)
        trained = [
            1 - sum(run["curve"]["late"]) / sum(run["curve"]["sampled"])
            for run in by_setting[setting]
        ]
        rows.append(
            [
                setting,
                f"{np.mean(trained):.0%}",
                f"{row['begin']:.3f}",
                written(row["end"], ".3f"),
                signed(row["end"] - whole["end"]),
                signed(row["mean score"] - whole["mean score"]),
                f"{row['ESS']:.3f}",
                f"{row['mean']:.1f}, {row['max lag']:.0f}",
            ]
        )
    header = [
        "tokens in the loss",
        "share",
        "begin",
        "end",
        "end - all's",
        "mean - all's",
        "ESS",
        "lag",
    ]
    table(header, rows)


def draw(by_setting, path):
    figure, axes = panels(["pipeline: score against samples", "on-policy: score against samples"])
    for i, (setting, found) in enumerate(by_setting.items()):
        ax = axes[int("on-policy" in setting)]
        band(ax, [(places(run, "samples"), scores_of(run)) for run in found], f"C{i % 3}", setting)
    for ax in axes:
        ax.set_xlabel("samples")
        ax.legend()
    save_figure(figure, path)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=4, port=8950)
    p.set_defaults(first_seed=200)
    a = p.parse_args(argv)
    runs.make_model()
    root = ROOT if a.plot else patched_copy()
    more = QUICK if a.quick else {}
    wanted = {setting: knobs | more for setting, knobs in SETTINGS.items()}
    found, path = runs.run_all(
        a, "old_tokens", wanted, functools.partial(runs.one_run, port=a.port, root=root)
    )
    say(found)
    draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

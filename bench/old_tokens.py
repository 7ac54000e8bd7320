"""Do old tokens harm because of their age, or because of where they stand in an answer?

    python bench/old_tokens.py [--seeds 3] [--quick] [--plot] [--port 8950]

It is a question of section 8 of PipelineRL (arXiv 2509.19128). The pipeline runs with twice as many
sequences in progress as in bench/compare.py and `--max_lag 4`, so that some twenty versions sample
a long answer. Old tokens are also early tokens of long answers. So each choice of tokens by their
age has an on-policy twin (G = 1), which trains as large a share of all tokens, chosen by their
position in the answer. If the twin does as badly, the cause is the position and not the age.

The choice is tests/edits/tokens_trained.patch, applied to a copy of the sources. bench/runs.py says
what a run and its score are.
"""

import functools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import ROOT, WORK, band, panels, patched_copy, table
from bench.compare import interval_text, row_of
from bench.runs import COMMON, PIPELINE, QUICK, conventional, places, scores_of

# the highest lag of a recent token
AGE = 4
# the number of tokens at the end of an answer which the twins tell from the others, so that the
# tokens before them are as large a share of all tokens as old tokens are (37%)
AT_THE_END = 46
CROWDED = COMMON | PIPELINE | dict(concurrency=128, max_lag=4)
ON_POLICY = COMMON | conventional(1)
SETTINGS = {
    "all": CROWDED,
    "recent": CROWDED | dict(tokens_trained=f"recent {AGE}"),
    "old": CROWDED | dict(tokens_trained=f"old {AGE}"),
    "on-policy, all": ON_POLICY,
    "on-policy, end": ON_POLICY | dict(tokens_trained=f"end {AT_THE_END}"),
    "on-policy, beginning": ON_POLICY | dict(tokens_trained=f"beginning {AT_THE_END}"),
}


def share_trained(run):
    """The share of the sampled tokens that were in the loss."""
    late = sum(run["curve"]["late"])
    return 1 - late / (late + sum(run["curve"]["sampled_tokens"]))


def print_table(by_setting):
    """Print a row for each setting; differences are from all tokens of the same kind of run."""
    rows = []
    for setting, setting_runs in by_setting.items():
        first = by_setting["on-policy, all" if "on-policy" in setting else "all"]
        row = row_of(setting_runs, first)
        rows.append(
            [
                setting,
                f"{np.mean([share_trained(run) for run in setting_runs]):.0%}",
                f"{row['begin']:.3f}",
                interval_text(row["end"], ".3f"),
                interval_text(row["difference"], "+.3f"),
                f"{row['ESS']:.3f}",
                f"{row['mean lag']:.1f}, {row['max lag']:.0f}",
            ]
        )
    header = ["tokens in the loss", "share", "begin", "end", "mean score less that of all"]
    table([*header, "ESS", "lag: mean, largest"], rows)


def draw(by_setting, path):
    """Draw the scores of both kinds of run against samples."""
    figure, axes = panels(["pipeline", "on-policy"])
    for i, (setting, setting_runs) in enumerate(by_setting.items()):
        ax = axes[int("on-policy" in setting)]
        curves = [(places(run, "samples"), scores_of(run)) for run in setting_runs]
        band(ax, curves, f"C{i % 3}", setting)
    for ax in axes:
        ax.set_xlabel("samples")
        ax.set_ylabel("held-out score")
        ax.legend()
    figure.savefig(path, dpi=80)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=3, port=8950)
    p.set_defaults(first_seed=200)
    arguments = p.parse_args(argv)
    if not arguments.plot:
        runs.make_model()
    root = ROOT if arguments.plot else patched_copy(WORK / "old_tokens", "tokens_trained")
    changes = QUICK if arguments.quick else {}
    wanted = {setting: knobs | changes for setting, knobs in SETTINGS.items()}
    start = functools.partial(runs.one_run, port=arguments.port, root=root)
    by_setting, path = runs.run_all(arguments, "old_tokens", wanted, start)
    print_table(by_setting)
    draw(by_setting, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""Is the pipeline faster than conventional RL? Same task, model, batch, number of samples and two CPU cores, one run after the other.

    python bench/compare.py [--lengths tail|equal] [--settings pipeline,G=4] [--seeds 3] [--quick] [--plot] [--knob value ...]
    python bench/compare.py --preset math --settings pipeline,G=8,G=32 --steps 192    # 8 GPUs: run.sh divides them

Task `tail`: answers of 5 to 397 tokens, 35 on average, most of them short; `--lengths equal` is the
control, 37 tokens all. Every run is `bash run.sh toy ...` with the real vLLM: pipeline and G = 1, 2, 4,
8, 16 for every seed. What is done is kept in bench/results/compare-<lengths>.json, so the same command
goes on after an interruption. What a run is, its time and its score: bench/runs.py. Other divisions of
the machine are knobs: `--settings G=4 --engines 2`.

learning rate  the same for all: of 1.5e-4 and 3e-4 (6e-4 collapses) the one with which G = 1,
               on-policy, ends with the better score (--settings G=1 --lr 3e-4)
stable         every run ends at most DROP below its best score, and higher than it began
to n%          seconds until the score is n% of the way from where the runs of the stable settings begin
               (on average) to where the best stable conventional setting ends; the pipeline is compared
               with the stable conventional setting that is there first
engine idle    share of its places for sequences that were empty; of conventional RL's 1,024 most always are
trainer waits  for samples; sends: for weights to be on their way; shares of all its time

Speeds mean something on a machine that has nothing else to do.
"""

import functools
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import band, panels, save_figure, table
from bench.runs import COMMON, PIPELINE, QUICK, conventional, places, scores_of

SHARES = (0.5, 0.75, 0.9)
DROP = 0.1
SETTINGS = ("pipeline", "G=1", "G=2", "G=4", "G=8", "G=16")
# of the table: how a mean over seeds is written
FORMATS = {
    "begin": ".3f",
    "score": ".3f",
    "s, all": ".1f",
    "tok/s": ".0f",
    "max lag": ".1f",
    "mean": ".2f",
    "ESS": ".3f",
    "engine idle": ".0%",
    "trainer waits": ".0%",
    "sends": ".0%",
}


# ---- what is made of runs


def time_to(run, level):
    """Seconds until the score first reaches `level`, straight lines between checkpoints; None: never."""
    times = places(run, "time")
    found = scores_of(run)
    reached = np.flatnonzero(found >= level)
    if not len(reached):
        return None
    k = reached[0]
    if k == 0:
        return float(times[0])
    return float(np.interp(level, found[k - 1 : k + 1], times[k - 1 : k + 1]))


def times_to(found, levels):
    """[[seconds of every run] for every level]."""
    return [[time_to(run, level) for run in found] for level in levels]


def stable(runs_of_setting):
    """Did all runs of a setting end no more than DROP below their best, and higher than they began?"""
    for run in runs_of_setting:
        found = scores_of(run)
        if found[-1] < found.max() - DROP or found[-1] <= found[0]:
            return False
    return True


def fixed_scores(by_setting):
    """{setting: [run]} -> the scores that times are compared at, one per share of SHARES: from the
    runs of the stable settings, or of all if none is.
    """
    chosen = {setting: found for setting, found in by_setting.items() if stable(found)}
    begins = []
    ends = {}
    for setting, found in (chosen or by_setting).items():
        curves = [scores_of(run) for run in found]
        begins += [curve[0] for curve in curves]
        ends[setting] = np.mean([curve[-1] for curve in curves])
    if len(ends) > 1:
        ends.pop("pipeline", None)
    begin = np.mean(begins)
    end = max(ends.values())
    return [float(begin + share * (end - begin)) for share in SHARES]


def mean_time(times):
    """Mean over seeds, None if one of them never gets there."""
    return None if None in times else float(np.mean(times))


def figures_of(run):
    """One run's numbers in the table, named as in FORMATS."""
    curve = run["curve"]
    seconds = curve["time"][-1]
    found = scores_of(run)
    return {
        "begin": found[0],
        "score": found[-1],
        "s, all": seconds,
        "tok/s": sum(curve["sampled"]) / seconds,
        "max lag": max(curve["lag_max"]),
        "mean": np.mean(curve["lag_mean"]),
        "ESS": np.mean(curve["ess"]),
        "engine idle": np.mean(curve["gen_idle"]),
        "trainer waits": sum(curve["wait_data_s"]) / seconds,
        "sends": sum(curve["wait_sync_s"]) / seconds,
    }


def summary(by_setting):
    """{setting: [run per seed]} -> dict(scores, rows {setting: row}, ratios).

    row: times, for every score those of every seed, None where it is never reached; stable; the means
    of figures_of. ratios, for every score: (best stable G, its time / the pipeline's, the same seed by
    seed), None if one never gets there.
    """
    levels = fixed_scores(by_setting)
    rows = {setting: row_of(found, levels) for setting, found in by_setting.items()}
    ratios = [ratio(rows, k) for k in range(len(levels))]
    return dict(scores=levels, rows=rows, ratios=ratios)


def row_of(found, levels):
    """A setting's row, as in `summary`."""
    row = {}
    figures = [figures_of(run) for run in found]
    for name in FORMATS:
        row[name] = float(np.mean([of_run[name] for of_run in figures]))
    row["times"] = times_to(found, levels)
    row["stable"] = stable(found)
    return row


def ratio(rows, k):
    """How many times as fast the pipeline is to score k, as in `summary`."""
    others = {}
    for setting, row in rows.items():
        seconds = mean_time(row["times"][k])
        if setting != "pipeline" and row["stable"] and seconds is not None:
            others[setting] = seconds
    if "pipeline" not in rows or not others:
        return None
    ours = rows["pipeline"]["times"][k]
    if None in ours:
        return None
    best = min(others, key=others.get)
    by_seed = [theirs / mine for mine, theirs in zip(ours, rows[best]["times"][k])]
    return best, others[best] / mean_time(ours), by_seed


# ---- what is said of it


def time_cell(times):
    """Times of the seeds as mean (lowest-highest)."""
    if None in times:
        return "-"
    return f"{np.mean(times):.1f} ({min(times):.1f}-{max(times):.1f})"


def say(found):
    """Print the table and the ratios."""
    levels = [f"{y:.3f} ({share:.0%})" for share, y in zip(SHARES, found["scores"])]
    print(f"seconds to a held-out score of {', '.join(levels)}, mean over seeds (lowest-highest)")
    rows = []
    for setting, row in found["rows"].items():
        cells = [setting, *map(time_cell, row["times"]), "yes" if row["stable"] else "no"]
        rows.append(cells + [format(row[name], form) for name, form in FORMATS.items()])
    table(["", *(f"to {share:.0%}" for share in SHARES), "stable", *FORMATS], rows)
    for share, answer in zip(SHARES, found["ratios"]):
        words = "the pipeline, or every stable conventional setting, has runs that never get there"
        if answer is not None:
            best, faster, by_seed = answer
            words = (
                f"the pipeline is {faster:.2f} times as fast as the best stable conventional setting "
                f"({best}); seed by seed {' '.join(f'{x:.2f}' for x in by_seed)}"
            )
        print(f"to {share:.0%}: {words}")


def draw(by_setting, path):
    """The paper's five panels: mean over seeds, and a band from the lowest to the highest."""
    columns = {
        "samples against time": ("time", "samples"),
        "max lag, versions": ("samples", "lag_max"),
        "effective sample size": ("samples", "ess"),
    }
    by_score = ["held-out score against time", "held-out score against samples"]
    figure, axes = panels([*by_score, *columns])
    for i, (setting, found) in enumerate(by_setting.items()):
        color = "k" if setting == "pipeline" else f"C{i}"
        for ax, x in zip(axes, ("time", "samples")):
            band(ax, [(places(run, x), scores_of(run)) for run in found], color, setting)
        for ax, (x, y) in zip(axes[2:], columns.values()):
            band(ax, [(run["curve"][x], run["curve"][y]) for run in found], color, setting)
    for level in fixed_scores(by_setting):
        axes[0].axhline(level, color="C3", linestyle=":")
    for ax, x in zip(axes, ("seconds", "samples", "seconds", "samples", "samples")):
        ax.set_xlabel(x)
    axes[0].legend(loc="lower right")
    save_figure(figure, path)


# ---- runs


def knobs_of(setting, arguments, more):
    """All knobs of a setting's runs; more: {name: value} from the command line."""
    toy = arguments.preset == "toy"
    g = 0 if setting == "pipeline" else int(setting.removeprefix("G="))
    knobs = dict(COMMON) if toy else {}
    if toy:
        knobs |= conventional(g) if g else PIPELINE
    elif g:
        knobs |= dict(conventional_g=g)
    if arguments.lengths == "equal":
        knobs |= dict(train_data="equal", eval_data="equal")
    if arguments.quick:
        knobs |= QUICK
    return knobs | more


def read_arguments(argv):
    """(arguments, settings, {knob: value} for run.sh)."""
    p = runs.run_parser(__doc__, seeds=3, port=8900)
    p.epilog = "Any other flag is a knob of run.sh, for all runs."
    p.add_argument("--lengths", choices=("tail", "equal"), default="tail")
    p.add_argument("--settings", help="pipeline, G=1, G=2 ..., with commas between them")
    p.add_argument("--preset", default="toy", help="another preset, with its task and evaluations")
    arguments, rest = p.parse_known_args(argv)
    names = rest[::2]
    if len(rest) % 2 or not all(name.startswith("--") for name in names):
        p.error(f"{' '.join(rest)}: what --help does not list goes to run.sh, as --knob value")
    settings = ("pipeline", "G=4") if arguments.quick else SETTINGS
    if arguments.settings:
        settings = arguments.settings.split(",")
    for setting in settings:
        if not re.fullmatch("pipeline|G=[1-9][0-9]*", setting):
            p.error(f"--settings {setting}: there are {', '.join(SETTINGS)}, and any other G=n")
    more = {name.removeprefix("--"): value for name, value in zip(names, rest[1::2])}
    return arguments, settings, more


def main(argv=None):
    arguments, settings, more = read_arguments(argv)
    words = ["compare", arguments.preset]
    if arguments.preset == "toy":
        words[1] = arguments.lengths
        runs.make_model()
    words += [f"{name}-{value}" for name, value in more.items()]
    name = "-".join(words).replace("/", "-")
    start = functools.partial(runs.one_run, port=arguments.port, preset=arguments.preset)
    wanted = {setting: knobs_of(setting, arguments, more) for setting in settings}
    found, path = runs.run_all(arguments, name, wanted, start)
    say(summary(found))
    draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

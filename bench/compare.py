"""Is the pipeline faster than conventional RL? Same task, model, batch, number of samples and two CPU cores, one run after the other.

    python bench/compare.py [--lengths tail|equal] [--settings pipeline,G=4] [--seeds 8] [--first_seed 0] [--quick] [--plot] [--knob value ...]
    python bench/compare.py --preset math --settings pipeline,G=8,G=32 --steps 192    # 8 GPUs: run.sh divides them

Task `tail`: answers of 5 to 397 tokens, 35 on average, most of them short; `--lengths equal` is the
control, 37 tokens all. Every run is `bash run.sh toy ...` with the real vLLM: pipeline and G = 1, 2, 4,
8, 16, 32 for every seed, in an order drawn anew for each seed. What is done is kept in
bench/results/compare-<lengths>.json, so the same command goes on after an interruption. What a run is, its
time and its score: bench/runs.py. A knob may be a setting's own: `--settings pipeline,pipeline+late=wait`; any
other flag is a knob of all runs: `--settings G=4 --engines 2`.

learning rate  the same for all: of 1.5e-4 and 3e-4 (6e-4 collapses) the one with which G = 1,
               on-policy, ends with the better score (--settings G=1 --lr 3e-4)
unstable       runs that end more than DROP below their best score, or no higher than they began; a
               setting of which more than a quarter do is left out of what the pipeline is compared with
to n%          seconds until the mean over seeds is n% of the way from where the runs of the stable settings
               begin (on average) to where the best stable conventional setting ends, and 95% of resamples
               of the seeds; of each resample the pipeline is compared with the conventional setting that is
               there first
mean score     over the samples of a run: less noisy than its last score; then its difference from the
               pipeline's, seed by seed
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
from bench import curves, runs
from bench.common import band, panels, save_figure, table
from bench.curves import interval, written
from bench.runs import COMMON, PIPELINE, QUICK, conventional, places, scores_of

SHARES = (0.5, 0.75, 0.9)
DROP = 0.1
# of a setting's runs, so many may be unstable
TOLERATED = 0.25
SETTINGS = ("pipeline", "G=1", "G=2", "G=4", "G=8", "G=16", "G=32")
# the paper's: up to this G a sample teaches as much as on-policy
AS_GOOD = ("G=1", "G=2", "G=4", "G=8")
# of the table: how a mean over seeds is written
FORMATS = {
    "begin": ".3f",
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


def is_unstable(run):
    """Does a run end more than DROP below its best score, or no higher than it began?"""
    found = scores_of(run)
    return found[-1] < found.max() - DROP or found[-1] <= found[0]


def unstable(found):
    """How many of a setting's runs are unstable."""
    return sum(map(is_unstable, found))


def comparable(by_setting):
    """The settings that are stable, or all if none is."""
    chosen = {
        s: found for s, found in by_setting.items() if unstable(found) <= TOLERATED * len(found)
    }
    return chosen or by_setting


def conventional_of(settings):
    """Those of the settings that are conventional RL."""
    return [setting for setting in settings if not setting.startswith("pipeline")]


def fixed_scores(by_setting):
    """{setting: [run]} -> the scores that times are compared at, one per share of SHARES."""
    begins = []
    ends = {}
    for setting, found in comparable(by_setting).items():
        begins += [scores_of(run)[0] for run in found]
        ends[setting] = np.mean([scores_of(run)[-1] for run in found])
    begin = np.mean(begins)
    end = max(ends[setting] for setting in conventional_of(ends) or ends)
    return [float(begin + share * (end - begin)) for share in SHARES]


def figures_of(run):
    """One run's numbers in the table, named as in FORMATS."""
    curve = run["curve"]
    seconds = curve["time"][-1]
    found = scores_of(run)
    return {
        "begin": found[0],
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
    """{setting: [run per seed]} -> dict(scores, rows {setting: row}, ratios, per_sample).

    row: `times`, for every score that of the runs' mean and of resamples; `end`, their mean last score,
    likewise; `mean score`, over samples, likewise; unstable, runs; the means of figures_of. ratios: see
    `ratio`. per_sample: of the pipeline and the best of AS_GOOD, see `per_sample`.
    """
    levels = fixed_scores(by_setting)
    grid, lines = curves.lines(by_setting)
    rows = {}
    for setting, found in by_setting.items():
        row = row_of(found)
        row["times"] = [curves.times_to(grid, lines[setting], level) for level in levels]
        rows[setting] = row
    others = conventional_of(comparable(by_setting))
    by_level = [ratio(rows, others, k) for k in range(len(levels))]
    return dict(scores=levels, rows=rows, ratios=by_level, per_sample=per_sample(rows, others))


def row_of(found):
    """A setting's row, as in `summary`, without times."""
    row = {}
    figures = [figures_of(run) for run in found]
    for name in FORMATS:
        row[name] = float(np.mean([of_run[name] for of_run in figures]))
    row["unstable"] = unstable(found)
    drawn = curves.resamples(len(found))
    row["end"] = np.array([scores_of(run)[-1] for run in found])[drawn].mean(1)
    row["mean score"] = np.array([mean_score(run) for run in found])[drawn].mean(1)
    return row


def mean_score(run):
    """The score, averaged over a run's samples."""
    samples = places(run, "samples")
    return float(np.trapezoid(scores_of(run), samples) / samples[-1])


def ratio(rows, others, k):
    """(conventional setting that is first at score k, how many times as fast the pipeline is, of resamples, too);
    None if nothing can be compared.
    """
    others = {setting: rows[setting]["times"][k] for setting in others}
    if "pipeline" not in rows or not others:
        return None
    best = min(others, key=lambda setting: others[setting][0])
    if np.isinf(others[best][0]):
        return None
    first = np.min(list(others.values()), axis=0)
    return best, curves.ratios(first, rows["pipeline"]["times"][k])


def per_sample(rows, others):
    """{what: (best of AS_GOOD, the pipeline's - its, of resamples, too)} of last and mean score; {} without both."""
    others = [setting for setting in others if setting in AS_GOOD]
    if "pipeline" not in rows or not others:
        return {}
    found = {}
    for what in ("end", "mean score"):
        best = max(others, key=lambda setting: rows[setting][what][0])
        found[what] = best, rows["pipeline"][what] - rows[best][what]
    return found


# ---- what is said of it


def say(found):
    """Print the table, the ratios, and how much a sample teaches."""
    levels = [f"{y:.3f} ({share:.0%})" for share, y in zip(SHARES, found["scores"])]
    print(f"seconds to a held-out score of {', '.join(levels)}: of the mean over seeds (95%)")
    rows = []
    first = found["rows"].get("pipeline") or next(iter(found["rows"].values()))
    for setting, row in found["rows"].items():
        cells = [setting, *(written(times, ".1f") for times in row["times"])]
        cells += [written(row["end"], ".3f"), written(row["mean score"], ".3f")]
        cells += [signed(row["mean score"] - first["mean score"]), row["unstable"]]
        rows.append(cells + [format(row[name], form) for name, form in FORMATS.items()])
    shares = [f"to {share:.0%}" for share in SHARES]
    table(
        ["", *shares, "score at the end", "mean score", "- pipeline's", "unstable", *FORMATS], rows
    )
    for share, answer in zip(SHARES, found["ratios"]):
        words = "there is nothing to compare the pipeline with"
        if answer is not None:
            best, faster = answer
            words = (
                f"the pipeline is {written(faster, '.2f')} times as fast as the best stable "
                f"conventional setting ({best})"
            )
        print(f"to {share:.0%}: {words}")
    for what, (best, difference) in found["per_sample"].items():
        print(
            f"per sample, {what}: the pipeline's is {signed(difference)} from {best}'s, the best of "
            f"{', '.join(AS_GOOD)}"
        )


def signed(values):
    """+0.02 (-0.01 to +0.05)."""
    value, low, high = interval(values)
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


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
    setting, *own = setting.split("+")
    own = dict(pair.split("=") for pair in own)
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
    return knobs | more | own


def read_arguments(argv):
    """(arguments, settings, {knob: value} for run.sh)."""
    p = runs.run_parser(__doc__, seeds=8, port=8900)
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
        if not re.fullmatch(r"(pipeline|G=[1-9][0-9]*)(\+\w+=[^+=]+)*", setting):
            p.error(f"--settings {setting}: pipeline or G=n, and knobs of its own, as G=4+lr=1e-4")
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

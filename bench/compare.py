"""Is the pipeline faster than conventional RL on the same task, model, batch and machine?

    python bench/compare.py [--lengths tail|equal] [--settings pipeline,G=4] [--seeds 8]
                            [--first_seed 0] [--quick] [--plot] [--knob value ...]
    python bench/compare.py --settings pipeline,G=8,G=8+engines=2+trainers=2
    python bench/compare.py --preset countup --settings pipeline,G=4,G=8 --seeds 5
    python bench/compare.py --preset math --settings pipeline,G=8,G=32 --steps 192

The task is `tail`: answers of 5 to 397 tokens, 35 on average, most of them short. `--lengths equal`
is the control, where all answers have 37 tokens. Each run is `bash run.sh toy ...` with the real
vLLM; the order of the settings is drawn anew for each seed. Results are kept in bench/results, in a
file whose name has the lengths or the preset and all knobs that are given, so that the same command
goes on after an interruption, and `--plot` prints and draws what is there. bench/runs.py says what
a run, its time and its score are.

A setting may have knobs of its own (`G=8+lr=3e-4`); any other flag is a knob of all runs. Plain
`G=8` has one engine and one trainer rank of one thread each, which take turns, so that one core at
a time works. `G=8+engines=2+trainers=2` generates with both cores, and then trains with both. With
`--preset countup` (SmolLM2) the trainer has threads for all cores, and so has the engine of
conventional RL. In the pipeline both want the same cores, and the trainer has priority. Threads
wait for each other busily (BUSY_WAIT of bench/runs.py). With `--preset math`, run.sh divides the
GPUs of the machine.

Columns of the table:

    unstable    runs that end more than DROP below their best score, or no higher than they began
    to n%       seconds until the mean over seeds is n% of the way from where runs begin (on
                average) to where the best conventional setting ends; in each resample of the seeds
                the pipeline is compared with the conventional setting that is there first
    mean score  averaged over the samples of a run, less noisy than the last score; then its
                difference from that of the first setting, seed by seed

The last lines compare the runs of each seed alone. They say how many times as fast the pipeline is
as the conventional run that is first at n% of the way from where the runs of this seed begin to
where its best conventional run ends. The mean of these ratios over the seeds is geometric.

Intervals are 95%. A mean over seeds has Student's t. The time at which a mean curve reaches a
score, and the ratio of two such times, have a bootstrap over seeds if there are at least ENOUGH
seeds: with fewer its intervals are too narrow (three seeds' hold the truth in 76% of cases), and
none are given. Speeds mean something only on a machine that has nothing else to do. All runs of a
seed must be made on one machine. Other seeds may be made on faster or slower ones: `alike` takes
this out of the seconds.
"""

import functools
import os
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import band, panels, table
from bench.runs import COMMON, PIPELINE, QUICK, column, conventional, places, scores_of
from tools.report_comparison import paired

# Beyond these shares of the gain the faster runs have ended
SHARES = (0.5, 0.75)
DROP = 0.1
SETTINGS = ("pipeline", "G=1", "G=2", "G=4", "G=8", "G=16", "G=32")
# Points of a curve
POINTS = 1000
RESAMPLES = 2000
ENOUGH = 8
# How the table writes means over seeds
FORMATS = {
    "begin": ".3f",
    "samples/s": ".0f",
    "max lag": ".1f",
    "mean lag": ".2f",
    "ESS": ".3f",
}


# ---- intervals; a setting is a list of runs, one a seed, in the same order in all settings


def student(values):
    """(mean, low, high) of one value a seed; a single one has no interval."""
    mean, interval = paired(np.zeros(len(values)), values)
    return mean, *(interval or (np.nan, np.nan))


def mean_curves(setting_runs):
    """(seconds [POINTS], scores [runs, POINTS]) for as long as all runs of a setting go on."""
    end = min(places(run, "time")[-1] for run in setting_runs)
    grid = np.linspace(0, end, POINTS)
    curves = [np.interp(grid, places(run, "time"), scores_of(run)) for run in setting_runs]
    return grid, np.array(curves)


def resamples(seeds):
    """Seeds drawn with replacement, [1 + RESAMPLES, seeds]; the first row is the seeds as they are,
    and with too few seeds the only one.
    """
    drawn = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    return np.vstack([np.arange(seeds), drawn])[: None if seeds >= ENOUGH else 1]


def crossing(grid, curves, level):
    """Where curves [N, POINTS] first reach a level, [N]; infinity where they never do."""
    reached = curves >= level
    first = grid[reached.argmax(-1)]
    return np.where(reached.any(-1), first, np.inf)


def times_to(setting_runs, level):
    """Seconds until a setting's mean curve reaches a level, [1 + RESAMPLES], the runs first."""
    grid, curves = mean_curves(setting_runs)
    parts = []
    # One part at a time, as all resampled curves at once would be large
    for drawn in np.array_split(resamples(len(setting_runs)), 20):
        parts.append(crossing(grid, curves[drawn].mean(1), level))
    return np.concatenate(parts)


def ratios(theirs, ours):
    """theirs / ours, times of [N]; 0 where ours is infinite, infinity where only theirs is."""
    with np.errstate(invalid="ignore"):
        quotients = theirs / ours
    return np.where(np.isinf(ours), 0.0, quotients)


def bootstrap(values):
    """(value of the runs, low, high) from values as `times_to` and `ratios` return them."""
    if len(values) == 1:
        return float(values[0]), np.nan, np.nan
    # Quantiles are values of resamples: between infinities nothing can be interpolated
    low, high = np.quantile(values[1:], [0.025, 0.975], method="nearest")
    return float(values[0]), float(low), float(high)


def interval_text(interval, form):
    """(1.02, 0.98, 1.06) -> 1.02 (0.98 to 1.06)."""
    value, low, high = interval
    if np.isinf(value):
        return "never"
    if np.isnan(low):
        return format(value, form)
    high = format(high, form) if np.isfinite(high) else "never"
    return f"{value:{form}} ({low:{form}} to {high})"


def alike(by_setting):
    """The same {setting: [run]} with times multiplied, by one number for each seed.

    Then the runs of any seed take as long, in the mean over settings, as those of any other seed.
    Ratios within a seed stay as they are.
    """
    ends = []
    for setting_runs in by_setting.values():
        ends.append([places(run, "time")[-1] for run in setting_runs])
    ends = np.array(ends)
    factors = ends.mean() / ends.mean(0)
    scaled = {setting: [] for setting in by_setting}
    for setting, setting_runs in by_setting.items():
        for run, factor in zip(setting_runs, factors, strict=True):
            curve = run["curve"] | {"time": (factor * column(run, "time")).tolist()}
            scaled[setting].append(run | {"curve": curve})
    return scaled


# ---- figures of runs


def is_unstable(run):
    """Does a run end more than DROP below its best score, or no higher than it began?"""
    run_scores = scores_of(run)
    return run_scores[-1] < run_scores.max() - DROP or run_scores[-1] <= run_scores[0]


def conventional_of(settings):
    """Those of the settings that are conventional RL."""
    return [setting for setting in settings if not setting.startswith("pipeline")]


def fixed_scores(by_setting):
    """The scores at which times are compared, one per share of SHARES, from {setting: [run]}."""
    begins = []
    ends = {}
    for setting, setting_runs in by_setting.items():
        begins += [scores_of(run)[0] for run in setting_runs]
        ends[setting] = np.mean([scores_of(run)[-1] for run in setting_runs])
    begin = np.mean(begins)
    end = max(ends[setting] for setting in conventional_of(ends) or ends)
    return [float(begin + share * (end - begin)) for share in SHARES]


def figures_of(run):
    """One run's numbers in the table, named as in FORMATS."""
    return {
        "begin": scores_of(run)[0],
        "samples/s": column(run, "samples")[-1] / column(run, "time")[-1],
        "max lag": max(column(run, "lag_max")),
        "mean lag": np.mean(column(run, "lag_mean")),
        "ESS": np.mean(column(run, "ess")),
    }


def mean_score(run):
    """The score, averaged over a run's samples."""
    samples = places(run, "samples")
    return float(np.trapezoid(scores_of(run), samples) / samples[-1])


def row_of(setting_runs, first):
    """A setting's row of the table.

    first: the runs of the setting that it is compared with, with the same seeds. The row has the
    means of figures_of and the number of unstable runs, and as (mean, low, high): end, mean score,
    and difference, which is that of the mean scores.
    """
    figures = [figures_of(run) for run in setting_runs]
    row = {name: float(np.mean([run_figures[name] for run_figures in figures])) for name in FORMATS}
    scores = [mean_score(run) for run in setting_runs]
    pairs = zip(scores, first)
    row["difference"] = student([score - mean_score(other) for score, other in pairs])
    row["mean score"] = student(scores)
    row["end"] = student([scores_of(run)[-1] for run in setting_runs])
    row["unstable"] = sum(map(is_unstable, setting_runs))
    return row


def summary(by_setting):
    """{setting: [run per seed]} -> dict(scores, rows {setting: row}, ratios: see `ratio`)."""
    levels = fixed_scores(by_setting)
    first = by_setting.get("pipeline") or next(iter(by_setting.values()))
    rows = {}
    for setting, setting_runs in by_setting.items():
        rows[setting] = row_of(setting_runs, first)
        rows[setting]["times"] = [times_to(setting_runs, level) for level in levels]
    others = conventional_of(by_setting)
    by_level = [ratio(rows, others, k) for k in range(len(levels))]
    return dict(scores=levels, rows=rows, ratios=by_level)


def ratio(rows, others, k):
    """(the conventional setting that is first at score k, how many times as fast the pipeline is).

    The second is an array [1 + RESAMPLES]. Returns None if nothing can be compared: if there is
    no pipeline or no conventional setting, if no conventional setting reaches score k, or if none
    ends above the score at the beginning, so that score k is reached before the first step.
    """
    others = {setting: rows[setting]["times"][k] for setting in others}
    if "pipeline" not in rows or not others:
        return None
    best = min(others, key=lambda setting: others[setting][0])
    if others[best][0] == 0 or np.isinf(others[best][0]):
        return None
    first = np.min(list(others.values()), axis=0)
    return best, ratios(first, rows["pipeline"]["times"][k])


def within_seeds(by_setting):
    """How many times as fast the pipeline is as the fastest conventional run of the same seed.

    Returns an array [shares of SHARES, seeds]. A run that never reaches the score counts as in
    `ratios`; nan stands where `ratio` has nothing to compare.
    """
    by_seed = []
    for k in range(len(by_setting["pipeline"])):
        seed = {setting: [setting_runs[k]] for setting, setting_runs in by_setting.items()}
        answers = summary(seed)["ratios"]
        by_seed.append([bootstrap(x[1])[0] if x is not None else np.nan for x in answers])
    return np.array(by_seed).T


# ---- tables and figures


def say(figures, seeds):
    """Print the table and the ratios."""
    levels = [f"{y:.3f} ({share:.0%})" for share, y in zip(SHARES, figures["scores"])]
    print(f"{seeds} seeds; seconds until their mean has a score of {', '.join(levels)}; 95%")
    rows = []
    for setting, row in figures["rows"].items():
        cells = [setting, *(interval_text(bootstrap(times), ".1f") for times in row["times"])]
        cells += [interval_text(row["end"], ".3f"), interval_text(row["mean score"], ".3f")]
        cells += [interval_text(row["difference"], "+.3f"), row["unstable"]]
        rows.append(cells + [format(row[name], form) for name, form in FORMATS.items()])
    shares = [f"to {share:.0%}" for share in SHARES]
    columns = ["score at the end", "mean score", "less the first's", "unstable"]
    table(["", *shares, *columns, *FORMATS], rows)
    for share, answer in zip(SHARES, figures["ratios"]):
        if answer is None:
            print(f"to {share:.0%}: there is nothing to compare the pipeline with")
            continue
        best, faster = answer
        interval = bootstrap(faster)
        if interval[0] == 0:
            sentence = (
                "the mean of the pipeline does not reach this score before the first of its runs "
                f"ends; that of the best conventional setting ({best}) does"
            )
        else:
            sentence = (
                f"the pipeline is {interval_text(interval, '.2f')} times as fast as the best "
                f"conventional setting ({best})"
            )
        print(f"to {share:.0%}: {sentence}")


def say_seeds(by_share):
    """Print what `within_seeds` returns, and the geometric means over seeds with intervals."""
    for share, faster in zip(SHARES, by_share):
        texts = []
        for value in faster:
            if np.isnan(value):
                texts.append("no conventional run gained")
            else:
                texts.append(f"{value:.2f}" if 0 < value < np.inf else "never")
        line = f"to {share:.0%}, within each seed: {', '.join(texts)}"
        if np.all((faster > 0) & (faster < np.inf)):
            line += f"; mean {interval_text(tuple(np.exp(student(np.log(faster)))), '.2f')}"
        print(line)


def draw(by_setting, path):
    """Draw the mean over seeds of each setting, and a band from the lowest to the highest."""
    figure, axes = panels(["held-out score", "held-out score", "effective sample size"])
    for i, (setting, setting_runs) in enumerate(by_setting.items()):
        color = "k" if setting == "pipeline" else f"C{i}"
        for ax, x in zip(axes, ("time", "samples")):
            band(ax, [(places(run, x), scores_of(run)) for run in setting_runs], color, setting)
        lines = [(column(run, "samples"), column(run, "ess")) for run in setting_runs]
        band(axes[2], lines, color, setting)
    for level in fixed_scores(by_setting):
        axes[0].axhline(level, color="C3", linestyle=":")
    for ax, x in zip(axes, ("seconds", "samples", "samples")):
        ax.set_xlabel(x)
    axes[0].legend(loc="lower right")
    figure.savefig(path, dpi=80)


def report(by_setting, path):
    """Print the table, and draw the figure beside the raw numbers."""
    by_setting = alike(by_setting)
    say(summary(by_setting), len(next(iter(by_setting.values()))))
    if "pipeline" in by_setting and conventional_of(by_setting):
        say_seeds(within_seeds(by_setting))
    draw(by_setting, path.with_suffix(".png"))


# ---- the command line


def knobs_of(setting, arguments, common_knobs):
    """All knobs of a setting's runs; common_knobs: {name: value} from the command line."""
    setting, *pairs = setting.split("+")
    setting_knobs = dict(pair.split("=") for pair in pairs)
    g = 0 if setting == "pipeline" else int(setting.removeprefix("G="))
    knobs = dict(conventional_g=g) if g else {}
    if arguments.preset == "toy":
        knobs = COMMON | (conventional(g) if g else PIPELINE)
    if arguments.preset == "countup":
        knobs = runs.COUNTUP | (runs.COUNTUP_CONVENTIONAL | knobs if g else {})
    if arguments.lengths == "equal":
        knobs |= dict(train_data="equal", eval_data="equal")
    if arguments.quick:
        knobs |= QUICK
    return knobs | common_knobs | setting_knobs


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
        p.error(f"{' '.join(rest)}: a flag that is not in --help must be --knob value")
    settings = ("pipeline", "G=4") if arguments.quick else SETTINGS
    if arguments.settings:
        settings = arguments.settings.split(",")
    for setting in settings:
        if not re.fullmatch(r"(pipeline|G=[1-9][0-9]*)(\+\w+=[^+=]+)*", setting):
            p.error(
                f"--settings {setting}: a setting is pipeline or G=n, perhaps with knobs of its "
                "own as in G=4+lr=1e-4"
            )
    common_knobs = {name.removeprefix("--"): value for name, value in zip(names, rest[1::2])}
    return arguments, settings, common_knobs


def main(argv=None):
    arguments, settings, common_knobs = read_arguments(argv)
    parts = ["compare", arguments.preset]
    if arguments.preset == "toy":
        parts[1] = arguments.lengths
    if arguments.preset == "toy" and not arguments.plot:
        runs.make_model()
    if arguments.preset == "countup":
        os.environ.update(runs.BUSY_WAIT)
    parts += [f"{name}-{value}" for name, value in common_knobs.items()]
    name = "-".join(parts).replace("/", "-")
    start = functools.partial(runs.one_run, port=arguments.port, preset=arguments.preset)
    wanted = {setting: knobs_of(setting, arguments, common_knobs) for setting in settings}
    by_setting, path = runs.run_all(arguments, name, wanted, start)
    report(by_setting, path)


if __name__ == "__main__":
    main()

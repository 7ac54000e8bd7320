"""Score curves of several seeds: their mean, the time it takes to a score, ratios of settings with paired bootstrap.

Not a program. A setting is a list of runs (bench/runs.py), one per seed, in the same order in all settings. Resampling
draws seeds, the same ones for all settings. Intervals are 95%.
"""

import numpy as np

from bench.runs import places, scores_of

POINTS = 1000
RESAMPLES = 2000


def lines(by_setting, column="time"):
    """(grid [POINTS] of the column, {setting: scores [runs, POINTS]}).

    Straight lines between checkpoints; beyond its end a run keeps its last score.
    """
    end = max(places(run, column)[-1] for found in by_setting.values() for run in found)
    grid = np.linspace(0, end, POINTS)
    curves = {}
    for setting, found in by_setting.items():
        own = [np.interp(grid, places(run, column), scores_of(run)) for run in found]
        curves[setting] = np.array(own)
    return grid, curves


def resamples(runs):
    """Seeds drawn with replacement, [1 + RESAMPLES, runs]; the first row is the runs as they are."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(runs, size=(RESAMPLES, runs))
    return np.vstack([np.arange(runs), drawn])


def crossing(grid, curves, level):
    """Where curves [N, POINTS] first reach a level, [N]; infinity where they never do."""
    reached = curves >= level
    first = grid[reached.argmax(-1)]
    return np.where(reached.any(-1), first, np.inf)


def times_to(grid, curves, level):
    """Time at which the mean of curves [runs, POINTS] reaches a level: of the runs, and of every resample, [1 + RESAMPLES]."""
    found = []
    # a part at a time: all resampled curves at once would be large
    for drawn in np.array_split(resamples(len(curves)), 20):
        found.append(crossing(grid, curves[drawn].mean(1), level))
    return np.concatenate(found)


def ratios(theirs, ours):
    """Times of the one / times of the other, [N]; 0 where ours never gets there, infinity where only theirs does not."""
    with np.errstate(invalid="ignore"):
        found = theirs / ours
    return np.where(np.isinf(ours), 0.0, found)


def interval(values):
    """(of the runs, low, high) of [1 + RESAMPLES]."""
    # of whole numbers of resamples: there may be infinities, between which nothing can be taken
    low, high = np.quantile(values[1:], [0.025, 0.975], method="nearest")
    return float(values[0]), float(low), float(high)


def written(values, form):
    """1.02 (0.98-1.06)."""
    value, low, high = interval(values)
    if not np.isfinite(value):
        return "never"
    high = format(high, form) if np.isfinite(high) else "never"
    return f"{value:{form}} ({low:{form}}-{high})"

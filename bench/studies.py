"""What do old tokens do to learning? Short studies on the task `tail`: each a few whole runs (bench/runs.py, real vLLM) and a figure.

    python bench/studies.py kl [--seeds 1] [--steps 96] [--quick] [--plot] [--port 8950]

kl  KL(behaviour || trained policy), k3 estimate over the trained tokens: in-flight updates with stale
    KV cache, with recomputed KV cache, and conventional RL whose max lag is as high (arXiv 2509.19128,
    section 5.1), by step and by lag of the token.

Scores are those of bench/runs.py, at the end the mean of the last 3 checkpoints. What is done is kept in
bench/results/study-<name>.json: the same command goes on. --quick: the last setting alone.
"""

import functools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import band, panels, save_figure, table
from bench.runs import COMMON, PIPELINE, QUICK, conventional, scores_of
from train import LAG_BUCKETS

STUDIES = {
    "kl": {
        "in flight, stale KV": PIPELINE,
        "in flight, recomputed KV": PIPELINE | dict(recompute_kv=True),
        "conventional, G = 12": conventional(12),
    },
}
LAGS = list(LAG_BUCKETS)
# of the curve by step: mean over so many steps
WINDOW = 9


def kl_by_lag(found):
    """{lag: mean KL of its tokens} over the runs of a setting, in order of lag."""
    means = {}
    for lag in LAGS:
        rows = [run["by_lag"][lag] for run in found if lag in run["by_lag"]]
        tokens = sum(n for n, _ in rows)
        if tokens:
            means[lag] = sum(n * kl for n, kl in rows) / tokens
    return means


def mean(found, column):
    """Mean of a column over all steps of the runs of a setting."""
    return np.mean([run["curve"][column] for run in found])


def row_of(setting, found):
    """A line of the table."""
    begin = np.mean([scores_of(run)[0] for run in found])
    ends = [np.mean(scores_of(run)[-3:]) for run in found]
    lag_max = [max(run["curve"]["lag_max"]) for run in found]
    by_lag = kl_by_lag(found)
    return [
        setting,
        f"{begin:.3f}",
        f"{np.mean(ends):.3f} ({min(ends):.3f}-{max(ends):.3f})",
        f"{mean(found, 'ess'):.3f}",
        f"{mean(found, 'lag_mean'):.2f}",
        max(lag_max),
        f"{mean(found, 'kl_behavior'):.1e}",
        *(f"{by_lag[lag]:.1e}" if lag in by_lag else "-" for lag in LAGS),
    ]


def smooth(column):
    """Mean over WINDOW steps, those at the ends repeated."""
    padded = np.pad(column, WINDOW // 2, "edge")
    return np.convolve(padded, np.full(WINDOW, 1 / WINDOW), "valid")


def draw(by_setting, path):
    """Score and KL by step, KL by lag."""
    kl = "KL(behaviour || trained policy), nats per token"
    figure, axes = panels(["held-out score", kl, "the same by lag of the token"])
    for i, (setting, found) in enumerate(by_setting.items()):
        color = f"C{i}"
        band(axes[0], [np.transpose(run["scores"]) for run in found], color, setting)
        by_step = [smooth(run["curve"]["kl_behavior"]) for run in found]
        band(axes[1], [(np.arange(1, len(y) + 1), y) for y in by_step], color, setting)
        by_lag = kl_by_lag(found)
        axes[2].plot([LAGS.index(lag) for lag in by_lag], by_lag.values(), "o-", color=color)
    axes[0].set_xlabel("step")
    axes[1].set(xlabel="step", yscale="log")
    axes[2].set(xlabel="lag, versions", yscale="log", xticks=range(len(LAGS)), xticklabels=LAGS)
    axes[0].legend()
    save_figure(figure, path)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=8950)
    p.add_argument("study", choices=STUDIES)
    p.add_argument("--steps", type=int, default=COMMON["steps"])
    a = p.parse_args(argv)
    common = COMMON | dict(steps=a.steps)
    settings = {setting: common | own for setting, own in STUDIES[a.study].items()}
    if a.quick:
        setting, knobs = settings.popitem()
        settings = {setting: knobs | QUICK}
    runs.make_model()
    start = functools.partial(runs.one_run, port=a.port)
    found, path = runs.run_all(a, f"study-{a.study}", settings, start)
    header = ["", "score at first", "at the end", "ESS", "lag", "max", "KL"]
    table(header + [f"of lag {lag}" for lag in LAGS], [row_of(s, r) for s, r in found.items()])
    draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

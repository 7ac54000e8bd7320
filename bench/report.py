"""Summary and picture of a run: `python bench/report.py out/toy` prints the table run.sh ends with and draws report.png."""
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(run_dir):
    """(step lines, evaluation lines) of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "step" in x], [x for x in lines if "eval" in x]


def draw(run_dir, steps, evals):
    """report.png: reward against time and samples, lag, ESS (whole and by lag), tokens/s, where the time of trainer and updates goes."""
    column = {k: np.array([np.nan if x[k] is None else x[k] for x in steps], float) for k, v in steps[0].items() if not isinstance(v, dict)}
    figure, axes = plt.subplots(2, 4, figsize=(20, 8), constrained_layout=True)
    minutes = column["wall_s"] / 60
    smooth = lambda y: np.convolve(np.pad(y, (4, 4), "edge"), np.ones(9) / 9, "valid") if len(y) > 9 else y
    for ax, x, label in ((axes[0, 0], minutes, "minutes"), (axes[0, 1], column["samples"] / 1000, "thousand samples")):
        ax.plot(x, column["reward"], color="C0", alpha=0.25)
        ax.plot(x, smooth(column["reward"]), color="C0", label="training reward")
        ax.set(xlabel=label, title=f"reward against {label.split()[-1]}", ylim=(min(0, column["reward"].min()), max(1.02, column["reward"].max())))
    samples = np.concatenate([[0], column["samples"]])
    first = steps[0]["version"] - 1
    for task in evals[0]["eval"] if evals else []:
        scores = [e["eval"].get(task, np.nan) for e in evals]
        axes[0, 0].plot([e["wall_s"] / 60 for e in evals], scores, "o-", color="C3", label=f"held-out {task}")
        axes[0, 1].plot([samples[min(e["version"] - first, len(steps))] / 1000 for e in evals], scores, "o-", color="C3", label=f"held-out {task}")
    axes[0, 0].legend(loc="lower right")
    axes[0, 2].plot(column["step"], column["lag_max"], color="C1", alpha=0.6, label="max")
    axes[0, 2].plot(column["step"], column["lag_mean"], color="C0", label="mean")
    axes[0, 2].set(xlabel="step", title="lag of trained tokens, versions", ylim=(0, None))
    axes[0, 2].legend()
    axes[1, 0].plot(column["step"], column["ess"], color="C0")
    axes[1, 0].set(xlabel="step", title="effective sample size", ylim=(min(0.9, column["ess"].min()), 1.005))
    axes[1, 1].plot(column["step"], smooth(column["gen_tok_s"]), label="sampled")
    axes[1, 1].plot(column["step"], smooth(column["train_tok_s"]), label="trained (with prompts)")
    axes[1, 1].set(xlabel="step", title="tokens / s", ylim=(0, None))
    axes[1, 1].legend()
    length = column["tokens"] / column["train_tok_s"]
    parts = [column["wait_data_s"], column["arm_s"] + column["gather_s"] + column["send_s"]]
    parts.append(np.maximum(length - sum(parts), 0))
    axes[1, 2].stackplot(column["step"], [smooth(p) for p in parts], labels=["waiting for data", "sending weights", "training"], alpha=0.8)
    axes[1, 2].set(xlabel="step", title="the trainer's seconds per step", ylim=(0, None))
    axes[1, 2].legend(loc="upper right")
    # by lag: at which lag do the data stop helping? A bucket's ESS against the step, faint where it has few tokens
    for bucket in dict.fromkeys(b for x in steps for b in x["by_lag"]):
        have = [x for x in steps if bucket in x["by_lag"]]
        share = sum(x["by_lag"][bucket]["tokens"] for x in have) / sum(sum(row["tokens"] for row in x["by_lag"].values()) for x in steps)
        axes[0, 3].plot([x["step"] for x in have], smooth(np.array([x["by_lag"][bucket]["ess"] for x in have])), label=f"lag {bucket} ({100 * share:.0f}% of tokens)")
    axes[0, 3].set(xlabel="step", title="effective sample size by lag", ylim=(None, 1.005))
    axes[0, 3].legend(loc="lower left")
    updates = [x for x in steps if x["sync_s"]]
    parts = {"engines getting ready": "arm_s", "gathering": "gather_s", "the wire": "send_s", "engines packing": "wait_s", "engines paused": "pause_s"}
    series = [smooth(np.array([1000 * x[k] for x in updates])) for k in parts.values()]
    axes[1, 3].stackplot([x["step"] for x in updates], series, labels=list(parts), alpha=0.8)
    axes[1, 3].plot([x["step"] for x in updates], smooth(np.array([1000 * x["sync_s"] for x in updates])), color="k", label="all of it")
    axes[1, 3].set(xlabel="step", title="a weight update, ms", ylim=(0, None))
    axes[1, 3].legend(loc="upper right")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.suptitle(str(run_dir))
    figure.savefig(Path(run_dir, "report.png"), dpi=80)


def summary(steps, evals):
    """The numbers a run ends with, as printable lines."""
    wall = steps[-1]["wall_s"]
    mismatch = [x["mismatch"] for x in steps if x["mismatch"] is not None]
    mean = lambda k: float(np.mean([x[k] for x in steps]))
    yield f"steps          {steps[-1]['step']}, {steps[-1]['samples']} samples in {wall / 60:.1f} min"
    for task in [t for t in evals[0]["eval"] if t in evals[-1]["eval"]] if evals else []:
        yield f"held-out {task:<5} {evals[0]['eval'][task]:.3f} (version {evals[0]['version']}) -> {evals[-1]['eval'][task]:.3f} (version {evals[-1]['version']}), {evals[-1]['problems']} problems"
    yield f"reward         {np.mean([x['reward'] for x in steps[:5]]):.3f} -> {np.mean([x['reward'] for x in steps[-5:]]):.3f} (first, last 5 steps)"
    yield f"lag            mean {mean('lag_mean'):.2f}, max {max(x['lag_max'] for x in steps)} versions; ess {mean('ess'):.3f}"
    yield f"versions       {100 * mean('versions_2'):.0f}% of the samples were sampled by two or more, {100 * mean('versions_3'):.1f}% by three or more"
    yield f"tokens/s       {mean('gen_tok_s'):.0f} sampled, {mean('train_tok_s'):.0f} trained"
    yield f"engines paused {100 * sum(x['pause_s'] for x in steps) / wall:.1f}% of the time; trainer waited {100 * sum(x['wait_data_s'] for x in steps) / wall:.0f}% for data, {100 * sum(x['arm_s'] + x['gather_s'] + x['send_s'] for x in steps) / wall:.0f}% sending weights"
    yield f"mismatch       {max(mismatch, default=float('nan')):.1e} nats at most ({len(mismatch)} steps had lag-0 samples); dropped {steps[-1]['dropped']}"


def main(run_dir):
    steps, evals = read(run_dir)
    draw(run_dir, steps, evals)
    print("\n".join(summary(steps, evals)))
    print(f"picture        {Path(run_dir, 'report.png')}")


if __name__ == "__main__":
    main(sys.argv[1])

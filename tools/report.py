"""Summary and picture of a run: prints the table that run.sh ends with and draws report.png.

    python tools/report.py out/toy

Reads metrics.jsonl, also of a run in progress. Deliberately absent: comparisons of runs (bench/compare.py).
"""

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg  # noqa: E402

# label -> key of metrics.jsonl, in the order in which they happen
UPDATE_PARTS = {
    "gathering": "gather_s",
    "the wire": "send_s",
    "engines getting ready": "ready_s",
    "engines paused": "pause_s",
}
# means over steps, and shares of the whole time
MEANS = ("lag_mean", "ess", "versions_2", "versions_3", "gen_tok_s", "train_tok_s")
SHARES = ("pause_s", "wait_data_s", "wait_sync_s")
# times the throughput: a move that brings less is not worth a restart
WORTH = 1.05
# share of the time: if both sides idle for longer, the gate is what holds them back
IDLE = 0.1
SUMMARY = """\
steps          {step}, {samples} samples in {minutes:.1f} min
{held_out}\
reward         {first:.3f} -> {last:.3f} (first, last 5 steps)
lag            mean {lag_mean:.2f}, max {lag_max} versions; ess {ess:.3f}
versions       {versions_2:.0%} of the samples were sampled by two or more, {versions_3:.1%} by three or more
tokens/s       {gen_tok_s:.0f} sampled, {train_tok_s:.0f} trained
engines paused {pause_s:.1%} of the time; trainer waited {wait_data_s:.0%} for data, {wait_sync_s:.0%} sending weights
mismatch       {mismatch:.1e} nats at most ({measured} steps had lag-0 samples); dropped {dropped}
"""
HELD_OUT = """\
held-out {task:<5} {before:.3f} (version {first}) -> {after:.3f} (version {last}), {problems} problems
"""


def lines_with(run_dir, *keys):
    """Of each key, `step`, `eval`, `alarm` or `attribution`, the lines of a run's metrics.jsonl that have it.

    The last line may be torn; it is left out.
    """
    path = Path(run_dir, "metrics.jsonl")
    whole = [text for text in path.read_text().splitlines(True) if text.endswith("\n")]
    lines = [json.loads(text) for text in whole]
    return [[line for line in lines if key in line] for key in keys]


def read(run_dir):
    """(step lines, evaluation lines) of a run."""
    return lines_with(run_dir, "step", "eval")


def attributions(run_dir):
    """{part of the distance: ([version], [KL])} of a run with --attribute_every, see plumbing/attribution.py."""
    found = {}
    [lines] = lines_with(run_dir, "attribution")
    for line in lines:
        for name, part in line["attribution"].items():
            if part:
                versions, values = found.setdefault(name, ([], []))
                versions.append(line["version"])
                values.append(part["kl"])
    return found


def column(lines, key):
    """One value a line, as floats [lines]; null is not a number."""
    return np.array([line[key] for line in lines], dtype=float)


def minutes(lines):
    return column(lines, "wall_s") / 60


def smooth(y):
    """Mean over nine neighbours, at the ends over copies of the last one."""
    if len(y) <= 9:
        return y
    padded = np.pad(y, (4, 4), "edge")
    return np.convolve(padded, np.ones(9) / 9, "valid")


def draw_reward(ax, x, reward, title):
    ax.plot(x, reward, color="C0", alpha=0.25)
    ax.plot(x, smooth(reward), color="C0", label="training reward")
    bottom = min(0, reward.min())
    top = max(1.02, reward.max())
    ax.set(title=title, ylim=(bottom, top))


def draw_rewards(by_time, by_samples, steps, evals):
    """Training reward and held-out scores against the time and against the samples."""
    reward = column(steps, "reward")
    samples = column(steps, "samples") / 1000
    draw_reward(by_time, minutes(steps), reward, "reward against minutes")
    draw_reward(by_samples, samples, reward, "reward against samples")
    by_time.set_xlabel("minutes")
    by_samples.set_xlabel("thousand samples")
    # thousand samples that each version was trained on; before the first step: none
    versions = column(steps, "version")
    trained = dict(zip(versions, samples))
    trained[versions[0] - 1] = 0.0
    for task in tasks_of(evals):
        have = [line for line in evals if task in line["eval"] and line["version"] in trained]
        scores = [line["eval"][task] for line in have]
        at_samples = [trained[line["version"]] for line in have]
        style = dict(
            marker="o",
            color="C3",
            label=f"held-out {task}",
        )
        by_time.plot(minutes(have), scores, **style)
        by_samples.plot(at_samples, scores, **style)
    by_time.legend(loc="lower right")


def tasks_of(evals):
    """Names of what was evaluated first."""
    return list(evals[0]["eval"]) if evals else []


def draw_lag(ax, steps):
    step = column(steps, "step")
    ax.plot(step, column(steps, "lag_max"), color="C1", alpha=0.6, label="max")
    ax.plot(step, column(steps, "lag_mean"), color="C0", label="mean")
    ax.set(title="lag of trained tokens, versions", ylim=(0, None))
    ax.legend()


def draw_ess(ax, steps):
    ess = column(steps, "ess")
    ax.plot(column(steps, "step"), ess, color="C0")
    bottom = min(0.9, ess.min())
    ax.set(title="effective sample size", ylim=(bottom, 1.005))


def draw_ess_by_lag(ax, steps):
    """At which lag do the data stop helping?"""
    points = {}
    for line in steps:
        for bucket, row in line["by_lag"].items():
            point = (line["step"], row["ess"], row["tokens"])
            points.setdefault(bucket, []).append(point)
    curves = {bucket: np.array(rows, float).T for bucket, rows in points.items()}
    total = sum(tokens.sum() for _, _, tokens in curves.values())
    for bucket, (step, ess, tokens) in curves.items():
        share = tokens.sum() / total
        label = f"lag {bucket} ({share:.0%} of tokens)"
        ax.plot(step, smooth(ess), label=label)
    ax.set(title="effective sample size by lag", ylim=(None, 1.005))
    ax.legend(loc="lower left")


def draw_speed(ax, steps):
    step = column(steps, "step")
    ax.plot(step, smooth(column(steps, "gen_tok_s")), label="sampled")
    ax.plot(step, smooth(column(steps, "train_tok_s")), label="trained (with prompts)")
    ax.set(title="tokens / s", ylim=(0, None))
    ax.legend()


def draw_trainer_time(ax, steps):
    """Where the trainer's time goes; it sends weights in the background, but for gathering and waiting."""
    waiting = column(steps, "wait_data_s")
    sending = column(steps, "wait_sync_s")
    rest = column(steps, "step_s") - waiting - sending
    series = [smooth(waiting), smooth(sending), smooth(np.maximum(rest, 0))]
    labels = ["waiting for data", "sending weights", "training"]
    ax.stackplot(column(steps, "step"), series, labels=labels, alpha=0.8)
    ax.set(title="the trainer's seconds per step", ylim=(0, None))
    ax.legend(loc="upper right")


def draw_updates(ax, steps):
    updates = [line for line in steps if line["sync_s"]]
    step = column(updates, "step")
    series = [smooth(1000 * column(updates, key)) for key in UPDATE_PARTS.values()]
    ax.stackplot(step, series, labels=list(UPDATE_PARTS), alpha=0.8)
    ax.plot(step, smooth(1000 * column(updates, "sync_s")), color="k", label="all of it")
    ax.set(title="a weight update, ms", ylim=(0, None))
    ax.legend(loc="upper right")


def draw_attribution(ax, parts):
    """What the distance between behaviour and trained policy is made of."""
    for name, (versions, values) in parts.items():
        ax.plot(versions, values, "o-", label=name)
    ax.set(title="KL(behaviour || trained) and its parts, nats a token", yscale="log")
    ax.legend()


def draw(run_dir, steps, evals):
    """report.png: reward against time and samples, lag, ESS (whole and by lag), tokens/s, where the time of trainer and
    updates goes; with --attribute_every also the parts of the KL.
    """
    parts = attributions(run_dir)
    columns = 5 if parts else 4
    figure, axes = plt.subplots(2, columns, figsize=(5 * columns, 8), constrained_layout=True)
    (by_time, by_samples, lag, by_lag), (ess, speed, trainer_time, updates) = axes[:, :4]
    if parts:
        draw_attribution(axes[0, 4], parts)
        axes[1, 4].set_axis_off()
    draw_rewards(by_time, by_samples, steps, evals)
    draw_lag(lag, steps)
    draw_ess_by_lag(by_lag, steps)
    draw_ess(ess, steps)
    draw_speed(speed, steps)
    draw_trainer_time(trainer_time, steps)
    draw_updates(updates, steps)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        if not ax.get_xlabel():
            ax.set_xlabel("step")
    figure.suptitle(str(run_dir))
    figure.savefig(Path(run_dir, "report.png"), dpi=80)


def score_lines(evals):
    """Of each task that was evaluated first and last, a line of the summary."""
    if not evals:
        return
    first = evals[0]
    last = evals[-1]
    versions = dict(
        first=first["version"],
        last=last["version"],
        problems=last["problems"],
    )
    for task, before in first["eval"].items():
        after = last["eval"].get(task)
        if after is not None:
            yield HELD_OUT.format(task=task, before=before, after=after, **versions)


def summary(steps, evals):
    """The numbers a run ends with, as text."""
    last = steps[-1]
    wall = last["wall_s"]
    reward = column(steps, "reward")
    mismatch = column(steps, "mismatch")
    measured = mismatch[~np.isnan(mismatch)]
    values = dict(
        step=last["step"],
        samples=last["samples"],
        dropped=last["dropped"],
        minutes=wall / 60,
        held_out="".join(score_lines(evals)),
        first=reward[:5].mean(),
        last=reward[-5:].mean(),
        lag_max=max(line["lag_max"] for line in steps),
        measured=len(measured),
        mismatch=max(measured, default=np.nan),
    )
    for key in MEANS:
        values[key] = column(steps, key).mean()
    for key in SHARES:
        values[key] = column(steps, key).sum() / wall
    return SUMMARY.format(**values)


def below_1(share):
    """A share that one minus it can be divided by."""
    return min(max(share, 0.0), 0.99)


def advice(waits, blocked, serving, training, per_engine=1):
    """One line of advice; "" if there is none that would bring 5%.

    waits: share of its time that the trainer waits for data. blocked: share of the engines' places
    that the gate leaves empty, averaged over time. serving, training: GPUs of each; per_engine: GPUs
    of one engine. Both sides' speed is taken as proportional to their GPUs; the slower one decides.
    """
    waits = below_1(waits)
    blocked = below_1(blocked)
    total = serving + training
    # what one GPU would do unhindered, in units of the present throughput of all
    engine_rate = 1 / (1 - blocked) / serving
    trainer_rate = 1 / (1 - waits) / training
    now = min(serving * engine_rate, training * trainer_rate)
    best = serving
    most = now
    for serve in range(per_engine, total, per_engine):
        train = total - serve
        rate = min(serve * engine_rate, train * trainer_rate)
        if rate > most:
            best = serve
            most = rate
    waiting = f"trainer waits {waits:.0%} of the time"
    empty = f"the gate keeps {blocked:.0%} of the engines' places empty"
    if most >= WORTH * now:
        reason = waiting
        way = "from training to serving"
        moved = best - serving
        if moved < 0:
            reason = empty
            way = "from serving to training"
            moved = -moved
        gpus = "GPU" if moved == 1 else "GPUs"
        split = f"({best} serve, {total - best} train)"
        gain = most / now
        return f"{reason}: move {moved} {gpus} {way} {split}, about {gain:.2f} times the throughput"
    if waits > IDLE and blocked > IDLE:
        return f"{waiting} while {empty}: raise --max_lag"
    return ""


def advice_on(config, steps):
    """`advice` on a run's last 50 steps."""
    recent = steps[-50:]
    seconds = column(recent, "step_s").sum()
    return advice(
        column(recent, "wait_data_s").sum() / seconds,
        column(recent, "gen_idle").mean(),
        config.engines * config.tensor_parallel,
        config.trainers,
        config.tensor_parallel,
    )


def main(run_dir):
    steps, evals = read(run_dir)
    if not steps:
        sys.exit(f"report: {run_dir}/metrics.jsonl has no steps yet")
    draw(run_dir, steps, evals)
    print(summary(steps, evals), end="")
    print(f"advice         {advice_on(cfg.load(run_dir), steps) or 'none'}")
    print(f"picture        {Path(run_dir, 'report.png')}")


if __name__ == "__main__":
    main(sys.argv[1])

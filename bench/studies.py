"""What do old tokens do to learning? Three short studies on the task `tail`, each a handful of whole runs (compare.py's, real vLLM) and one figure.

    python bench/studies.py kl|lag|dpo [--seeds 1] [--steps 100] [--quick] [--plot] [--port 8950]

kl    KL(behaviour || trained policy), k3 estimate over the trained tokens, of in-flight updates with stale KV cache, with recomputed KV cache, and of conventional
      RL whose max lag is as high (arXiv 2509.19128, section 5.1): by step, and by lag of the token.
lag   the question that paper leaves open: the same run, in which sequences live longer, with only the tokens of some lags in the policy loss (`--lags`): all up to a
      threshold, which is `--late mask` without closing the gate earlier, or one window alone (Adam makes up for the smaller sums).
dpo   the other one: at high lag, the policy loss, the same with a DPO term on (best, worst) pairs, ten times weaker and as strong as the policy loss, and that term alone

Scores are compare.py's, at the end the mean of the last 3 checkpoints. Runs that are done are kept in out/bench/studies.json, by their knobs: the same command goes on, and studies share
the runs that they have in common. Leaves the figure in out/bench/study-<name>.png. --quick: one seed, few steps, the last setting alone.
"""
import argparse
import json
import re
import time

import numpy as np

from compare import COMMON, CONVENTIONAL, MODEL, PIPELINE, QUICK, ROOT, kept, machine, one_run
from tasks import _tiny

LONG = PIPELINE | dict(concurrency=128)  # twice the sequences in progress: each takes twice as many versions
OLD = PIPELINE | dict(concurrency=256, max_lag=100)  # and the trainer, which is slower than the engine then, has a queue of dozens of steps
DPO = dict(dpo_coef=10.0, dpo_beta=0.1)  # at first its gradient is that of advantages of 10 * 0.1 / 2 for the better and the worse answer
STUDIES = {
    "kl": {"in flight, stale KV": PIPELINE, "in flight, recomputed KV": PIPELINE | dict(recompute_kv=True), "conventional, G = 12": CONVENTIONAL | dict(conventional_g=12)},
    "lag": {"all": LONG, "lag 0-2": LONG | dict(lags=(0, 2)), "lag 0-4": LONG | dict(lags=(0, 4)), "lag 5 and more": LONG | dict(lags=(5, 1000000))},
    "dpo": {"policy loss": OLD, "policy loss + weak DPO": OLD | DPO | dict(dpo_coef=1.0), "policy loss + DPO": OLD | DPO, "DPO alone": OLD | DPO | dict(lags=(1000000, 1000000))},
}


def lag_rows(lines):
    """{bucket: (share of the tokens, mean KL)} over the steps of runs; lines: their metrics."""
    tokens, kl = {}, {}
    for x in lines:
        for bucket, row in x["by_lag"].items():
            tokens[bucket] = tokens.get(bucket, 0) + row["tokens"]
            kl[bucket] = kl.get(bucket, 0.0) + row["tokens"] * row["kl"]
    return {b: (n / sum(tokens.values()), kl[b] / n) for b, n in tokens.items()}


def row_of(runs):
    """One line of the table from a setting's runs."""
    lines = [x for r in runs for x in r["steps"]]
    mean = lambda k: float(np.mean([x[k] for x in lines]))
    ends = [float(np.mean([score for _, score in r["scores"][-3:]])) for r in runs]
    pairs = [x["dpo"] for x in lines if x.get("dpo") is not None]
    return dict(final=float(np.mean(ends)), spread=[min(ends), max(ends)], begin=float(np.mean([r["scores"][0][1] for r in runs])), kl=mean("kl_behavior"), ess=mean("ess"),
                lag_mean=mean("lag_mean"), lag_max=max(x["lag_max"] for x in lines), late=sum(x["late"] for x in lines) / sum(x["late"] + sum(b["tokens"] for b in x["by_lag"].values()) for x in lines),
                dpo=float(np.mean(pairs)) if pairs else None, by_lag=lag_rows(lines))


def words(rows):
    """The table, as printable lines."""
    yield f"{'':<26} {'score at the end':>27} {'ESS':>6} {'KL':>9} {'lag mean':>9} {'max':>4} {'left out':>9} {'DPO':>6}   KL by lag"
    for s, r in rows.items():
        by_lag = "  ".join(f"{b}: {r['by_lag'][b][1]:.1e}" for b in ("0", "1", "2", "3-4", "5-8", "9+") if b in r["by_lag"])
        yield (f"{s:<26} {r['begin']:.3f} -> {r['final']:.3f} ({r['spread'][0]:.3f}-{r['spread'][1]:.3f}) {r['ess']:>6.3f} {r['kl']:>9.1e} {r['lag_mean']:>9.2f} {r['lag_max']:>4} {100 * r['late']:>8.0f}% "
               f"{'-' if r['dpo'] is None else format(r['dpo'], '.3f'):>6}   {by_lag}")


def draw(study, runs, rows, path):
    """Score and KL against the step, mean over seeds; KL by lag, or the scores at the end."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    smooth = lambda y: np.convolve(np.pad(y, (4, 4), "edge"), np.ones(9) / 9, "valid")
    figure, axes = plt.subplots(1, 3, figsize=(20, 5), constrained_layout=True)
    for i, (setting, found) in enumerate(runs.items()):
        n = min(len(r["steps"]) for r in found)
        axes[0].plot([v for v, _ in found[0]["scores"]], np.mean([[y for _, y in r["scores"]] for r in found], 0), color=f"C{i}", label=setting)
        axes[1].plot(np.arange(1, n + 1), np.mean([smooth([x["kl_behavior"] for x in r["steps"][:n]]) for r in found], 0), color=f"C{i}")
        if study == "kl":
            buckets = [b for b in ("0", "1", "2", "3-4", "5-8", "9+") if b in rows[setting]["by_lag"]]
            axes[2].plot(buckets, [rows[setting]["by_lag"][b][1] for b in buckets], "o-", color=f"C{i}", label=setting)
        else:
            axes[2].bar(i, rows[setting]["final"], color=f"C{i}")
            axes[2].errorbar(i, rows[setting]["final"], [[rows[setting]["final"] - rows[setting]["spread"][0]], [rows[setting]["spread"][1] - rows[setting]["final"]]], color="k")
    axes[0].set(title="held-out score", xlabel="step")
    axes[1].set(title="KL(behaviour || trained policy), nats per token", xlabel="step", yscale="log")
    axes[2].set(**dict(title="the same by lag of the token, versions", yscale="log") if study == "kl" else dict(title="score at the end, lowest and highest seed", xticks=[]))
    axes[0].legend()
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("study", choices=STUDIES)
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--quick", action="store_true", help="one seed, few steps, the last setting alone")
    p.add_argument("--plot", action="store_true", help="no runs: table and figure of those that are there")
    p.add_argument("--port", type=int, default=8950)
    a = p.parse_args(argv)
    seeds, name = 1 if a.quick else a.seeds, "-quick" * a.quick
    settings = dict(list(STUDIES[a.study].items())[-1 if a.quick else 0:])
    (file, done), runs = kept(f"studies{name}", fresh=a.quick), {}  # knobs with the seed, as text -> {machine, steps, scores}
    common = COMMON | (QUICK if a.quick else dict(steps=a.steps))
    _tiny.make_model(["tail"], MODEL, 0)
    for seed in range(seeds):
        for s, own in settings.items():
            knobs = common | own
            key = json.dumps(knobs | dict(seed=seed), sort_keys=True)
            if key not in done and not a.plot:
                begun, run = time.time(), re.sub(r"\W+", "-", f"study-{a.study}{name}-{s}-seed{seed}")
                curve = one_run(run, knobs, seed, a.port, file.parent / "study-runs")["curve"]
                lines = [json.loads(x) for x in (file.parent / "study-runs" / run / "metrics.jsonl").read_text().splitlines()]
                keep = ("kl_behavior", "ess", "lag_mean", "lag_max", "late", "dpo", "by_lag")
                done[key] = dict(machine=machine(), steps=[{k: x[k] for k in keep} for x in lines if "step" in x], scores=curve["scores"])
                file.write_text(json.dumps(done))
                print(f"{s}, seed {seed}: score {np.mean([y for _, y in done[key]['scores'][-3:]]):.3f}, {time.time() - begun:.0f} s with start-up", flush=True)
            if key in done:
                runs.setdefault(s, []).append(done[key])
    if not runs:
        p.error(f"{file} has no runs of this study")
    rows = {s: row_of(r) for s, r in runs.items()}
    print("\n".join([machine(), *words(rows)]))
    figure = file.parent / f"study-{a.study}{name}.png"
    draw(a.study, runs, rows, figure)
    print(f"figure {figure.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

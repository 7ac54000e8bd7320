"""Would the pipeline be faster than conventional RL here? The throughput model of PipelineRL (arXiv 2509.19128, Appendix A), for any case.

    python bench/simulate.py [--gpus 128] [--batch 128] [--longest 2048] [--lengths uniform|equal|lognormal|FILE] [--tau 4.92] [--utilisation FILE] [--max_lag 133]

Unit of time: a flash, the least time one token's forward pass can take on one GPU (its FLOPs / peak FLOPS). U(h): share of the peak a GPU reaches
when it generates h sequences at once. tau: flashes a GPU trains a token in. r: tokens per flash, all GPUs together.

    conventional  all GPUs generate the S = batch G sequences of G optimizer steps, then all train: 1 / r = 1 / r_gen + 1 / r_train,
                  r_gen = S mean / sum over l of (h(l) / N) / U(h(l) / N), h(l) the sequences of l tokens or more; r_train = N / tau; max lag G
    pipeline      I GPUs serve, H sequences each, the others train: r = min(U(H) I, (N - I) / tau); max lag ceil(H I longest / (mean batch))

Each max lag limit gets the best G and the best (H, I) within it. Lag is counted as in the paper; train.py would show lags of up to G - 1 under
conventional RL, and its pipeline needs --max_lag of at least H I / batch to keep H I sequences in progress. Without --utilisation U is `fitted`,
which nobody measured: give a CSV of h,utilisation from your own GPU. More than --concurrency sequences on a GPU take turns. Not in the model: prompts,
reads of the KV cache, weight updates. Defaults: the paper's case. Leaves out/bench/simulate.json and simulate.png.
"""
import argparse
import json
from pathlib import Path
from statistics import NormalDist

import numpy as np

WORTH = 1.1  # a smaller speed-up is called not worth it


def fitted(h):
    """U(h), fitted to the paper's figures and no measurement: U(192) = 0.384, and r_gen = 18.3 of its conventional case (G = 133).

    U = top h / (h^3 + knee^3)^(1/3). The exponent is a choice, so that the top (0.645) is what matrix products may reach on an H100; with
    exponents 2 and 6 both figures fit as well, with tops of 0.96 and 0.46. They say nothing about h above 192.
    """
    return 0.645 * h / (h ** 3 + 298.0 ** 3) ** (1 / 3)


def measured(path):
    """A CSV of h,utilisation (header allowed) -> (U, largest h): straight lines between its points and from (0, 0), constant beyond the last."""
    table = np.genfromtxt(path, delimiter=",", ndmin=2)
    table = table[~np.isnan(table).any(1)] if table.size and table.shape[1] == 2 else np.empty((0, 2))
    h, u = table[np.argsort(table[:, 0])].T
    if not len(h) or h[0] <= 0 or u.min() <= 0 or u.max() > 1 or (np.diff(h) == 0).any():
        raise ValueError(f"{path}: every line must be h,utilisation, each h once and above 0, utilisation above 0 and at most 1")
    return (lambda x: np.interp(x, [0, *h], [0, *u])), int(h[-1])


def draw_lengths(kind, longest):
    """Equally likely lengths in tokens, [n]. lognormal: median longest / 8, sigma 1, cut off at longest (1.9% are). Else a file, one length a line."""
    if kind == "uniform":
        return np.arange(1, longest + 1)
    if kind == "equal":
        return np.array([longest])
    if kind == "lognormal":
        normal = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])
        return np.clip(np.rint(longest / 8 * np.exp(normal)), 1, longest).astype(int)
    lengths = np.loadtxt(kind, ndmin=1)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError(f"{kind}: one length a line, 1 or more")
    return np.minimum(lengths, longest or lengths.max()).astype(int)


def survival(lengths):
    """(share [k] of the sequences still running, number [k] of decode steps at which it is so): [1, 3, 3] -> ([2/3, 1], [2, 1])."""
    at_least = 1 - np.searchsorted(np.sort(lengths), np.arange(1, lengths.max() + 1)) / len(lengths)  # [L], l = 1..L
    return np.unique(at_least, return_counts=True)


def conventional(g, gpus, batch, lengths, tau, U):
    """(r_gen, r_train, r) of conventional RL with g optimizer steps per generation phase, tokens per flash."""
    share, steps = survival(lengths)
    h = batch * g * share / gpus
    r_gen, r_train = batch * g * lengths.mean() / np.sum(steps * h / U(h)), gpus / tau
    return r_gen, r_train, 1 / (1 / r_gen + 1 / r_train)


def pipeline(h, i, gpus, batch, lengths, tau, U):
    """(r, max lag) of the pipeline with i of the GPUs serving h sequences each; h and i may be arrays."""
    lag = np.ceil(h * i * lengths.max() / (lengths.mean() * batch) - 1e-9).astype(int)
    return np.minimum(U(h) * i, (gpus - i) / tau), lag


def best(top, gpus, batch, lengths, tau, U, concurrency):
    """One dict per max lag limit 1..top: the fastest conventional G and the fastest pipeline (H, I) within it. H = 0: no pipeline is."""
    h, i = (x.ravel() for x in np.meshgrid(np.arange(1, concurrency + 1), np.arange(1, gpus)))
    r, lag = pipeline(h, i, gpus, batch, lengths, tau, U)
    order = np.lexsort((h, i, -np.rint(1000 * np.log(r)), lag))  # of each lag the fastest first; within 0.1%, the one with the fewest GPUs serving
    firsts = {int(lag[k]): k for k in reversed(order)}
    rows, base, ours = [], (0.0, 0), (0.0, None)
    for limit in range(1, top + 1):
        base = max(base, (conventional(limit, gpus, batch, lengths, tau, U)[2], limit), key=lambda x: x[0])  # the first of equals
        ours = max(ours, (float(r[firsts[limit]]), firsts[limit]) if limit in firsts else ours, key=lambda x: x[0])
        H, I, g = (0, 0, 0) if ours[1] is None else (int(x[ours[1]]) for x in (h, i, lag))
        rows.append(dict(max_lag=limit, G=base[1], conventional=float(base[0]), H=H, I=I, lag=g, pipeline=ours[0], speedup=float(ours[0] / base[0])))
    return rows


def verdict(rows, max_lag, name, gpus, batch, lengths, tau, U, concurrency):
    """What to do, in plain text: the answer at max_lag; where the gain is largest, and which lag gives conventional RL's speed."""
    row, case = rows[max_lag - 1], f"{gpus} GPUs, {name} lengths to {lengths.max()}, batch {batch}, max lag {max_lag}"
    plan = f"serve with {row['I']}, train with {gpus - row['I']}, {row['H']} sequences each"
    if row["lag"] < max_lag:
        plan += f", max lag {row['lag']}"
    if row["speedup"] >= WORTH:
        first = f"{case}: {plan}; {row['speedup']:.2f} times the best conventional at the same max lag (G = {row['G']})."
    else:
        ceiling = gpus / (1 / U(np.arange(1, concurrency + 1)).max() + tau)  # every GPU busy all the time, engines at their best, any lag
        training, each = row["conventional"] * tau / gpus, batch * row["G"] / gpus
        why = ("not even one sequence on one GPU stays within it" if not row["H"] else
               f"conventional RL already reaches {100 * row['conventional'] / ceiling:.0f}% of what these GPUs can do at any lag" if row["conventional"] > 0.85 * ceiling else
               f"too many GPUs for this batch and lag: {each:.1f} sequences each, and training is {100 * training:.0f}% of conventional RL's time" if training < 0.2 else
               f"{gpus} GPUs do not divide well into serving and training")
        found = f"the best pipeline ({plan}) is {row['speedup']:.2f} times the best conventional (G = {row['G']}); " if row["H"] else ""
        first = f"{case}: not worth it for speed: {found}{why}."
    peak = max(rows, key=lambda x: x["speedup"])
    match = next((x["max_lag"] for x in rows if x["pipeline"] >= row["conventional"]), None)
    second = f"Of all max lags up to {len(rows)} the gain is largest at {peak['max_lag']}: {peak['speedup']:.2f} times"
    return f"{first}\n{second}" + (f"; conventional RL's speed at {max_lag} takes the pipeline a max lag of {match}." if match else ".")


def advice(waits, blocked, serving, training, per_engine=1):
    """One line for a run in progress: how many GPUs to move, or that the gate is too tight; "" if neither would bring 5%.

    waits: share of its time that the trainer waits for data. blocked: share of the engines' places that the gate leaves empty, averaged over time.
    serving, training: GPUs of each; per_engine: GPUs per engine. With r the present throughput, unhindered rates per GPU are
    r / ((1 - blocked) serving) and r / ((1 - waits) training): both taken as proportional to the GPUs. Pure; needs no numpy.
    """
    total = serving + training
    waits, blocked = min(max(waits, 0.0), 0.99), min(max(blocked, 0.0), 0.99)
    rate = lambda i: min(i / ((1 - blocked) * serving), (total - i) / ((1 - waits) * training))  # of the present r
    target = max(range(per_engine, total, per_engine), key=lambda i: (rate(i), -abs(i - serving)), default=serving)
    waiting, empty = f"trainer waits {100 * waits:.0f}% of the time", f"the gate keeps {100 * blocked:.0f}% of the engines' places empty"
    n, gain = abs(target - serving), rate(target) / rate(serving)
    if gain >= 1.05:
        what, way = (waiting, "training to serving") if target > serving else (empty, "serving to training")
        return f"{what}: move {n} GPU{'s' * (n > 1)} from {way} ({target} serve, {total - target} train), about {gain:.2f} times the throughput"
    if min(waits, blocked) > 0.1:
        return f"{waiting} while {empty}: raise --max_lag"
    return ""


def draw(rows, max_lag, title, path):
    """Throughput of both methods, and their ratio, against the max lag."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    x = [r["max_lag"] for r in rows]
    for ax, keys in zip(axes, (("pipeline", "conventional"), ("speedup",))):
        for key in keys:
            ax.plot(x, [r[key] for r in rows], label=key)
        ax.axvline(max_lag, color="k", alpha=0.3, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set(xlabel="max lag, optimizer steps", ylim=(0, None))
        ax.grid(alpha=0.3)
    axes[0].set_title("tokens per flash")
    axes[0].legend()
    axes[1].set_title("pipeline / conventional")
    axes[1].axhline(1, color="k", alpha=0.5)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", type=int, default=128, help="N, at least 2")
    p.add_argument("--batch", type=int, default=128, help="B, samples per optimizer step")
    p.add_argument("--longest", type=int, default=0, help="L, tokens; 0: 2048, or the longest in the file; longer ones are cut off")
    p.add_argument("--lengths", default="uniform", help="uniform (1 to L), equal, lognormal, or a file with one length a line")
    p.add_argument("--tau", type=float, default=4.92, help="flashes to train a token; 3 / the trainer's MFU (4.92: 61%%)")
    p.add_argument("--utilisation", default="", help="CSV of h,utilisation; empty: the curve fitted to the paper")
    p.add_argument("--concurrency", type=int, default=0, help="most sequences per serving GPU; 0: 1024, or the table's last h")
    p.add_argument("--max_lag", type=int, default=133, help="the limit the advice is for")
    a = p.parse_args(argv)
    if a.gpus < 2 or min(a.batch, a.max_lag) < 1 or a.tau <= 0 or min(a.longest, a.concurrency) < 0:
        p.error("--gpus must be at least 2, --batch and --max_lag at least 1, --tau above 0, the others not negative")
    named = a.lengths in ("uniform", "equal", "lognormal")
    try:
        lengths = draw_lengths(a.lengths, a.longest or 2048 * named)
        U, last = measured(a.utilisation) if a.utilisation else (fitted, 1024)
    except (OSError, ValueError) as e:
        p.error(str(e))
    name, case = a.lengths if named else Path(a.lengths).name, dict(gpus=a.gpus, batch=a.batch, lengths=lengths, tau=a.tau)
    case["concurrency"] = most = a.concurrency or last
    case["U"] = lambda h: U(np.minimum(h, most))
    rows = best(max(256, a.max_lag), **case)
    text = verdict(rows, a.max_lag, name, **case)
    print(f"N = {a.gpus}, B = {a.batch}, {name} lengths: mean {lengths.mean():.1f}, longest {lengths.max()}; tau {a.tau}; "
          f"U {a.utilisation or 'fitted to the paper, not measured'}; r in tokens per flash")
    print(f"{'max lag':>7} | {'conventional G':>14} {'r':>7} | {'pipeline H':>10} {'I':>5} {'lag':>4} {'r':>7} | speed-up")
    for limit in sorted({2 ** k for k in range(len(rows).bit_length())} | {a.max_lag}):
        r = rows[limit - 1]
        print(f"{limit:>7} | {r['G']:>14} {r['conventional']:>7.4g} | "
              f"{r['H'] or '-':>10} {r['I'] or '-':>5} {r['lag'] or '-':>4} {r['pipeline']:>7.4g} | {r['speedup']:>8.2f}")
    print(f"\n{text}")
    Path("out/bench").mkdir(parents=True, exist_ok=True)
    saved = dict(arguments=vars(a), mean=float(lengths.mean()), longest=int(lengths.max()), rows=rows, advice=text)
    Path("out/bench/simulate.json").write_text(json.dumps(saved, indent=1))
    draw(rows, a.max_lag, text.splitlines()[0].split(":")[0], "out/bench/simulate.png")


if __name__ == "__main__":
    main()

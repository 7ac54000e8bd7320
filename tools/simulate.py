"""Would the pipeline be faster than conventional RL here? The throughput model of PipelineRL (arXiv 2509.19128, Appendix A).

    python tools/simulate.py [--gpus 128] [--batch 128] [--longest 2048] [--lengths uniform|equal|lognormal|FILE]
                             [--tau 4.92] [--utilisation FILE] [--max_lag 132]

Unit of time: a flash, the least time one token's forward pass can take on one GPU (its FLOPs / peak FLOPS). U(h): share
of the peak a GPU reaches when it generates h sequences at once. tau: flashes a GPU trains a token in. r: tokens per
flash, all GPUs together.

    conventional  all GPUs generate the S = batch G sequences of G optimizer steps, then all train:
                  1 / r = 1 / r_gen + 1 / r_train, r_gen = S mean / sum over l of (h(l) / N) / U(h(l) / N),
                  h(l) the sequences of l tokens or more; r_train = N / tau; max lag G - 1
    pipeline      I GPUs serve, H sequences each, the others train: r = min(U(H) I, (N - I) / tau);
                  max lag ceil(H I longest / (mean batch))

Each max lag limit gets the best G and the best (H, I) within it. train.py's pipeline needs --max_lag of at least H I / batch
to keep H I sequences in progress. Without --utilisation U is `fitted`, which nobody measured: give a CSV of h,utilisation,
as bench/utilisation.py writes one for the machine that it runs on. More than --concurrency sequences on a GPU take turns. Defaults: the paper's case. Leaves out/bench/simulate.json and
simulate.png. Deliberately absent: prompts, reads of the KV cache, weight updates.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np

# a smaller speed-up is called not worth it
WORTH = 1.1
KINDS = ("uniform", "equal", "lognormal")
LINE = (
    "{max_lag:>7} | {G:>14} {conventional:>7.4g} | "
    "{H:>10} {I:>5} {lag:>4} {pipeline:>7.4g} | {speedup:>8.2f}"
)
PLAN = "serve with {I}, train with {training}, {H} sequences each"


def fitted(h):
    """U(h), fitted to the paper's figures and no measurement: U(192) = 0.384, and r_gen = 18.3 of its conventional case (G = 133).

    U = top h / (h^3 + knee^3)^(1/3). The exponent is a choice, so that the top (0.645) is what matrix products may reach on
    an H100; with exponents 2 and 6 both figures fit as well, with tops of 0.96 and 0.46. They say nothing about h above 192.
    """
    knee = 298.0
    return 0.645 * h / (h**3 + knee**3) ** (1 / 3)


def measured(path):
    """A CSV of h,utilisation (header allowed) -> (U, largest h).

    U: straight lines between its points and from (0, 0), constant beyond the last. Raises ValueError naming the file.
    """
    table = np.genfromtxt(path, delimiter=",", ndmin=2)
    if table.size == 0 or table.shape[1] != 2:
        table = np.empty((0, 2))
    table = table[~np.isnan(table).any(axis=1)]
    table = table[np.argsort(table[:, 0])]
    h, u = table.T
    if not _usable(h, u):
        raise ValueError(
            f"{path}: every line must be h,utilisation, each h once and above 0, "
            "utilisation above 0 and at most 1"
        )
    curve = partial(np.interp, xp=[0, *h], fp=[0, *u])
    return curve, int(h[-1])


def _usable(h, u):
    """Is this a curve, h in ascending order?"""
    if len(h) == 0 or h[0] <= 0:
        return False
    each_once = np.diff(h).all()
    return each_once and u.min() > 0 and u.max() <= 1


def draw_lengths(kind, longest):
    """Equally likely lengths in tokens, [n]; kind: one of KINDS, or a file, one length a line.

    lognormal: median longest / 8, sigma 1, cut off at longest (1.9% are). Raises ValueError naming the file.
    """
    if kind == "uniform":
        return np.arange(1, longest + 1)
    if kind == "equal":
        return np.array([longest])
    if kind == "lognormal":
        inverse = NormalDist().inv_cdf
        chances = (np.arange(4096) + 0.5) / 4096
        normal = np.array([inverse(p) for p in chances])
        lengths = longest / 8 * np.exp(normal)
        lengths = np.clip(np.rint(lengths), 1, longest)
        return lengths.astype(int)
    lengths = np.loadtxt(kind, ndmin=1)
    if len(lengths) == 0 or lengths.min() < 1:
        raise ValueError(f"{kind}: one length a line, 1 or more")
    most = longest or lengths.max()
    return np.minimum(lengths, most).astype(int)


def survival(lengths):
    """(share [k] of the sequences still running, number [k] of decode steps at which it is so): [1, 3, 3] -> ([2/3, 1], [2, 1])."""
    longest = lengths.max()
    # [L], l = 1..L
    steps = np.arange(1, longest + 1)
    shorter = np.searchsorted(np.sort(lengths), steps)
    share = 1 - shorter / len(lengths)
    return np.unique(share, return_counts=True)


def conventional(G, gpus, batch, lengths, tau, U):
    """(r_gen, r_train, r) of conventional RL with G optimizer steps per generation phase, tokens per flash."""
    samples = batch * G
    share, steps = survival(lengths)
    # sequences on each GPU, [k]
    h = samples * share / gpus
    flashes = np.sum(steps * h / U(h))
    r_gen = samples * lengths.mean() / flashes
    r_train = gpus / tau
    return r_gen, r_train, 1 / (1 / r_gen + 1 / r_train)


def pipeline(H, I, gpus, batch, lengths, tau, U):
    """(r, max lag) of the pipeline with I of the GPUs serving H sequences each; H and I may be arrays."""
    r_gen = U(H) * I
    r_train = (gpus - I) / tau
    r = np.minimum(r_gen, r_train)
    sequences = H * I
    steps_per_sequence = lengths.max() / (lengths.mean() * batch)
    # a lag that is whole but for rounding stays as it is
    lag = np.ceil(sequences * steps_per_sequence - 1e-9)
    return r, lag.astype(int)


def fastest_pipelines(gpus, concurrency, **case):
    """{max lag: (r, H, I)}: of each lag the fastest; within 0.1%, the one with the fewest GPUs serving."""
    most = concurrency + 1
    H, I = np.meshgrid(np.arange(1, most), np.arange(1, gpus))
    H = H.ravel()
    I = I.ravel()
    r, lag = pipeline(H, I, gpus, **case)
    slowness = -np.rint(1000 * np.log(r))
    # the last key is the first to sort by
    order = np.lexsort((H, I, slowness, lag))
    _, first = np.unique(lag[order], return_index=True)
    plans = {}
    for k in order[first]:
        plan = (float(r[k]), int(H[k]), int(I[k]))
        plans[int(lag[k])] = plan
    return plans


def best(top, gpus, concurrency, **case):
    """One dict per max lag limit 1..top: the fastest conventional G and the fastest pipeline (H, I) within it. H = 0: no pipeline is."""
    plans = fastest_pipelines(gpus, concurrency, **case)
    _, _, on_policy = conventional(1, gpus, **case)
    row = dict(G=1, conventional=float(on_policy), H=0, I=0, lag=0, pipeline=0.0)
    rows = []
    for limit in range(1, top + 1):
        _, _, r = conventional(limit + 1, gpus, **case)
        if r > row["conventional"]:
            row |= dict(G=limit + 1, conventional=float(r))
        r, H, I = plans.get(limit, (0.0, 0, 0))
        if r > row["pipeline"]:
            row |= dict(H=H, I=I, lag=limit, pipeline=r)
        speedup = row["pipeline"] / row["conventional"]
        rows.append(dict(max_lag=limit, **row, speedup=speedup))
    return rows


def verdict(rows, max_lag, name, gpus, concurrency, batch, lengths, tau, U):
    """What to do, in plain text: the answer at max_lag; where the gain is largest, and which lag gives conventional RL's speed."""
    row = rows[max_lag - 1]
    case = f"{gpus} GPUs, {name} lengths to {lengths.max()}, batch {batch}, max lag {max_lag}"
    plan = PLAN.format(training=gpus - row["I"], **row)
    times = "{speedup:.2f} times the best conventional".format(**row)
    G = "(G = {G})".format(**row)
    if row["lag"] < max_lag:
        plan += ", max lag {lag}".format(**row)
    if row["speedup"] >= WORTH:
        answer = f"{plan}; {times} at the same max lag {G}."
    else:
        # every GPU busy all the time, engines at their best, any lag
        peak = U(np.arange(1, concurrency + 1)).max()
        ceiling = gpus / (1 / peak + tau)
        why = why_not(row, gpus, batch, tau, ceiling)
        answer = "not worth it for speed: "
        if row["H"]:
            answer += f"the best pipeline ({plan}) is {times} {G}; "
        answer += f"{why}."
    return f"{case}: {answer}\n{outlook(rows, max_lag)}"


def why_not(row, gpus, batch, tau, ceiling):
    """Why the pipeline of this row gains little; ceiling: throughput if every GPU were busy."""
    reached = row["conventional"] / ceiling
    training = row["conventional"] * tau / gpus
    each = batch * row["G"] / gpus
    if row["H"] == 0:
        return "not even one sequence on one GPU stays within it"
    if reached > 0.85:
        return f"conventional RL already reaches {reached:.0%} of what these GPUs can do at any lag"
    if training < 0.2:
        return (
            f"too many GPUs for this batch and lag: {each:.1f} sequences each, "
            f"and training is {training:.0%} of conventional RL's time"
        )
    return f"{gpus} GPUs do not divide well into serving and training"


def outlook(rows, max_lag):
    """The max lag with the largest gain, and the one at which the pipeline has conventional RL's speed at max_lag."""
    speed = rows[max_lag - 1]["conventional"]
    gains = [row["speedup"] for row in rows]
    peak = int(np.argmax(gains))
    text = (
        f"Of all max lags up to {len(rows)} the gain is largest at {peak + 1}: "
        f"{gains[peak]:.2f} times"
    )
    for row in rows:
        if row["pipeline"] >= speed:
            lag = row["max_lag"]
            text += f"; conventional RL's speed at {max_lag} takes the pipeline a max lag of {lag}"
            break
    return text + "."


def draw(rows, max_lag, title, path):
    """Throughput of both methods, and their ratio, against the max lag."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    lags = [row["max_lag"] for row in rows]
    for key in ("pipeline", "conventional"):
        axes[0].plot(lags, [row[key] for row in rows], label=key)
    axes[0].set_title("tokens per flash")
    axes[0].legend()
    axes[1].plot(lags, [row["speedup"] for row in rows])
    axes[1].set_title("pipeline / conventional")
    axes[1].axhline(1, color="k", alpha=0.5)
    for ax in axes:
        ax.axvline(max_lag, color="k", alpha=0.3, linestyle=":")
        ax.set_xscale("log", base=2)
        ax.set(xlabel="max lag, optimizer steps", ylim=(0, None))
        ax.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)


def print_table(rows, max_lag):
    """Rows of the powers of two, and of max_lag."""
    print("max lag | conventional G       r | pipeline H     I  lag       r | speed-up")
    limits = {max_lag}
    power = 1
    while power <= len(rows):
        limits.add(power)
        power *= 2
    for limit in sorted(limits):
        print(LINE.format(**rows[limit - 1]))


def parse(argv):
    """The flags; ends the program with one line if they make no sense."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", type=int, default=128, help="N, at least 2")
    p.add_argument("--batch", type=int, default=128, help="B, samples per optimizer step")
    p.add_argument(
        "--longest",
        type=int,
        default=0,
        help="L, tokens; 0: 2048, or the longest in the file; longer ones are cut off",
    )
    p.add_argument(
        "--lengths",
        default="uniform",
        help="uniform (1 to L), equal, lognormal, or a file with one length a line",
    )
    p.add_argument(
        "--tau",
        type=float,
        default=4.92,
        help="flashes to train a token; 3 / the trainer's MFU (4.92: 61%%)",
    )
    p.add_argument(
        "--utilisation",
        default="",
        help="CSV of h,utilisation; empty: the curve fitted to the paper",
    )
    p.add_argument(
        "--concurrency",
        type=int,
        default=0,
        help="most sequences per serving GPU; 0: 1024, or the table's last h",
    )
    p.add_argument("--max_lag", type=int, default=132, help="the limit the advice is for")
    a = p.parse_args(argv)
    if a.gpus < 2 or min(a.batch, a.max_lag) < 1:
        p.error("--gpus must be at least 2, --batch and --max_lag at least 1")
    if a.tau <= 0 or min(a.longest, a.concurrency) < 0:
        p.error("--tau must be above 0, --longest and --concurrency not negative")
    try:
        longest = a.longest
        if a.lengths in KINDS:
            longest = longest or 2048
        lengths = draw_lengths(a.lengths, longest)
        U, last = fitted, 1024
        if a.utilisation:
            U, last = measured(a.utilisation)
    except (OSError, ValueError) as e:
        p.error(str(e))
    return a, lengths, U, a.concurrency or last


def capped(h, U, most):
    """U of at most so many sequences: the others take turns."""
    return U(np.minimum(h, most))


def main(argv=None):
    a, lengths, U, concurrency = parse(argv)
    name = Path(a.lengths).name
    case = dict(
        gpus=a.gpus,
        batch=a.batch,
        lengths=lengths,
        tau=a.tau,
        U=partial(capped, U=U, most=concurrency),
        concurrency=concurrency,
    )
    rows = best(max(256, a.max_lag), **case)
    text = verdict(rows, a.max_lag, name, **case)
    mean, longest = float(lengths.mean()), int(lengths.max())
    source = a.utilisation or "fitted to the paper, not measured"
    print(
        f"N = {a.gpus}, B = {a.batch}, {name} lengths: mean {mean:.1f}, longest {longest}; "
        f"tau {a.tau}; U {source}; r in tokens per flash"
    )
    print_table(rows, a.max_lag)
    print(f"\n{text}")
    out = Path("out/bench")
    out.mkdir(parents=True, exist_ok=True)
    saved = dict(arguments=vars(a), mean=mean, longest=longest, rows=rows, advice=text)
    (out / "simulate.json").write_text(json.dumps(saved, indent=1))
    draw(rows, a.max_lag, text.partition(":")[0], out / "simulate.png")


if __name__ == "__main__":
    main()

"""Would the pipeline be faster than conventional RL here? The throughput model of PipelineRL (arXiv 2509.19128, Appendix A).

    python tools/simulate.py [--gpus 128] [--batch 128] [--longest 2048] [--lengths uniform|equal|FILE]
                             [--tau 4.92] [--concurrency 1024] [--max_lag 132]

Unit of time: a flash, the least time one token's forward pass can take on one GPU (its FLOPs / peak FLOPS). U(h): share
of the peak a GPU reaches when it generates h sequences at once. tau: flashes a GPU trains a token in. r: tokens per
flash, all GPUs together.

    conventional  all GPUs generate the S = batch G sequences of G optimizer steps, then all train:
                  1 / r = 1 / r_gen + 1 / r_train, r_gen = S mean / sum over l of (h(l) / N) / U(h(l) / N),
                  h(l) the sequences of l tokens or more; r_train = N / tau; max lag G - 1
    pipeline      I GPUs serve, H sequences each, the others train: r = min(U(H) I, (N - I) / tau);
                  max lag ceil(H I longest / (mean batch))

Each max lag limit gets the best G and the best (H, I) within it. train.py's pipeline needs --max_lag of at least H I / batch
to keep H I sequences in progress. U is `fitted`, which nobody measured: put yours in its place. Defaults: the paper's
case. Deliberately absent: prompts, reads of the KV cache, weight updates.
"""

import argparse

import numpy as np

LINE = (
    "{max_lag:>7} | {G:>14} {conventional:>7.4g} | "
    "{H:>10} {I:>5} {lag:>4} {pipeline:>7.4g} | {speedup:>8.2f}"
)


def fitted(h):
    """U(h), fitted to the paper's figures and no measurement: U(192) = 0.384, and r_gen = 18.3 of its conventional case (G = 133).

    U = top h / (h^3 + knee^3)^(1/3). The exponent is a choice, so that the top (0.645) is what matrix products may reach on
    an H100; with exponents 2 and 6 both figures fit as well, with tops of 0.96 and 0.46. They say nothing about h above 192.
    """
    knee = 298.0
    return 0.645 * h / (h**3 + knee**3) ** (1 / 3)


def draw_lengths(kind, longest):
    """Equally likely lengths in tokens, [n]; kind: "uniform", "equal", or a file, one length a line, cut off at longest."""
    if kind == "uniform":
        return np.arange(1, longest + 1)
    if kind == "equal":
        return np.array([longest])
    return np.minimum(np.loadtxt(kind, ndmin=1), longest).astype(int)


def survival(lengths):
    """(share [k] of the sequences still running, number [k] of decode steps at which it is so): [1, 3, 3] -> ([2/3, 1], [2, 1])."""
    # [L], l = 1..L
    steps = np.arange(1, lengths.max() + 1)
    share = 1 - np.searchsorted(np.sort(lengths), steps) / len(lengths)
    return np.unique(share, return_counts=True)


def conventional(G, gpus, batch, lengths, tau, U):
    """(r_gen, r_train, r) of conventional RL with G optimizer steps per generation phase, tokens per flash."""
    samples = batch * G
    share, steps = survival(lengths)
    # sequences on each GPU, [k]
    h = samples * share / gpus
    r_gen = samples * lengths.mean() / np.sum(steps * h / U(h))
    r_train = gpus / tau
    return r_gen, r_train, 1 / (1 / r_gen + 1 / r_train)


def pipeline(H, I, gpus, batch, lengths, tau, U):
    """(r, max lag) of the pipeline with I of the GPUs serving H sequences each; H and I may be arrays."""
    r = np.minimum(U(H) * I, (gpus - I) / tau)
    steps_per_sequence = lengths.max() / (lengths.mean() * batch)
    # a lag that is whole but for rounding stays as it is
    lag = np.ceil(H * I * steps_per_sequence - 1e-9)
    return r, lag.astype(int)


def fastest_pipelines(gpus, concurrency, **case):
    """{max lag: (r, H, I)}: of each lag the fastest; within 0.1%, the one with the fewest GPUs serving."""
    H, I = np.meshgrid(np.arange(1, concurrency + 1), np.arange(1, gpus))
    H, I = H.ravel(), I.ravel()
    r, lag = pipeline(H, I, gpus, **case)
    slowness = -np.rint(1000 * np.log(r))
    # the last key is the first to sort by
    order = np.lexsort((H, I, slowness, lag))
    _, first = np.unique(lag[order], return_index=True)
    return {int(lag[k]): (float(r[k]), int(H[k]), int(I[k])) for k in order[first]}


def best(top, gpus, concurrency, **case):
    """One dict per max lag limit 1..top: the fastest conventional G and the fastest pipeline (H, I) within it. H = 0: no pipeline is."""
    plans = fastest_pipelines(gpus, concurrency, **case)
    on_policy = float(conventional(1, gpus, **case)[2])
    row = dict(G=1, conventional=on_policy, H=0, I=0, lag=0, pipeline=0.0)
    rows = []
    for limit in range(1, top + 1):
        r = float(conventional(limit + 1, gpus, **case)[2])
        if r > row["conventional"]:
            row |= dict(G=limit + 1, conventional=r)
        r, H, I = plans.get(limit, (0.0, 0, 0))
        if r > row["pipeline"]:
            row |= dict(H=H, I=I, lag=limit, pipeline=r)
        rows.append(dict(max_lag=limit, **row, speedup=row["pipeline"] / row["conventional"]))
    return rows


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", type=int, default=128, help="N, at least 2")
    p.add_argument("--batch", type=int, default=128, help="B, samples per optimizer step")
    p.add_argument("--longest", type=int, default=2048, help="L, tokens; longer ones are cut off")
    p.add_argument("--lengths", default="uniform", help="uniform (1 to L), equal, or a file")
    p.add_argument("--tau", type=float, default=4.92, help="3 / the trainer's MFU (4.92: 61%%)")
    p.add_argument("--concurrency", type=int, default=1024, help="most sequences on a serving GPU")
    p.add_argument("--max_lag", type=int, default=132, help="the largest limit that is shown")
    a = p.parse_args(argv)
    if a.gpus < 2 or min(a.batch, a.max_lag, a.longest, a.concurrency) < 1 or a.tau <= 0:
        p.error("--gpus must be at least 2, all others at least 1, --tau above 0")
    case = dict(gpus=a.gpus, batch=a.batch, tau=a.tau, concurrency=a.concurrency)
    case["lengths"] = draw_lengths(a.lengths, a.longest)
    # of more sequences the others take turns
    case["U"] = lambda h: fitted(np.minimum(h, a.concurrency))
    print("max lag | conventional G       r | pipeline H     I  lag       r | speed-up")
    for row in best(a.max_lag, **case):
        limit = row["max_lag"]
        # powers of two, and the last one
        if limit & (limit - 1) == 0 or limit == a.max_lag:
            print(LINE.format(**row))


if __name__ == "__main__":
    main()

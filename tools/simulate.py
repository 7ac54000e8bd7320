"""How fast would it be? A simulation of your run, and the throughput model of the PipelineRL paper.

    python tools/simulate.py out/RUN [out/RUN2 ...] [--like out/OTHER] [--knob value ...]

simulates a run event by event with the speeds that it has had, see tools/simulate_run.py. Without a
run the rest of this text holds: the pipeline against conventional RL, by the paper's model.

    python tools/simulate.py [--gpus 128] [--batch 128] [--longest 2048] [--tau 4.92]
                             [--lengths uniform|equal|FILE] [--concurrency 1024] [--max_lag 132]

The model is the one of Appendix A of arXiv 2509.19128, in the paper's symbols:

    flash   the unit of time: the least time in which one GPU can run the forward pass of one
            token (the FLOPs of the pass / the peak FLOPS of the GPU)
    U(h)    the share of its peak FLOPS that a GPU reaches when it generates h sequences at once
    tau     the flashes in which a GPU trains one token
    N       the number of GPUs
    r       the throughput in tokens per flash, of all GPUs together

Conventional RL with G optimizer steps per generation phase: all GPUs generate S = batch * G
sequences, then all GPUs train on them. h(l) is the number of sequences of l tokens or more.

    1 / r = 1 / r_gen + 1 / r_train
    r_gen = S * mean length / sum over l of (h(l) / N) / U(h(l) / N)
    r_train = N / tau
    max lag = G - 1

The pipeline with I GPUs that serve H sequences each, while the other GPUs train:

    r = min(U(H) * I, (N - I) / tau)
    max lag = ceil(H * I * longest / (mean length * batch))

For each limit on the max lag, the table shows the fastest G and the fastest (H, I) within this
limit. The pipeline of train.py needs a --max_lag of at least H * I / batch to keep H * I sequences
in progress. The defaults are the paper's case. The function U that is used here (`fitted`) is not a
measurement: replace it by a measurement of your own. Deliberately absent: prompts, reads of the KV
cache, weight updates.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LINE = (
    "{max_lag:>7} | {G:>14} {conventional:>7.4g} | "
    "{H:>10} {I:>5} {lag:>4} {pipeline:>7.4g} | {speedup:>8.2f}"
)


def fitted(h):
    """U(h) = top * h / (h^3 + knee^3)^(1/3), fitted to two figures of the paper; not a measurement.

    The two figures are U(192) = 0.384, and r_gen = 18.3 for conventional RL with G = 133. The
    exponent of 3 is a choice: with it the top (0.645) is what matrix products may reach on an
    H100. Exponents of 2 and 6 fit both figures as well, with tops of 0.96 and 0.46. The figures
    say nothing about h above 192.
    """
    knee = 298.0
    return 0.645 * h / (h**3 + knee**3) ** (1 / 3)


def draw_lengths(kind, longest):
    """Return equally likely lengths in tokens, [n], none of them above `longest`.

    kind: "uniform" (from 1 to longest), "equal" (all are longest), or the name of a file with one
    length a line, where longer ones are cut off.
    """
    if kind == "uniform":
        return np.arange(1, longest + 1)
    if kind == "equal":
        return np.array([longest])
    return np.minimum(np.loadtxt(kind, ndmin=1), longest).astype(int)


def survival(lengths):
    """Return (shares [k] of the sequences that still run, decode steps [k] with each share).

    [1, 3, 3] -> ([2/3, 1], [2, 1]): all run for one step, two thirds of them for two more.
    """
    # [L], from 1 to the largest length L
    steps = np.arange(1, lengths.max() + 1)
    share = 1 - np.searchsorted(np.sort(lengths), steps) / len(lengths)
    return np.unique(share, return_counts=True)


def conventional(G, gpus, batch, lengths, tau, U):
    """Return (r_gen, r_train, r) of conventional RL with G optimizer steps per generation phase."""
    samples = batch * G
    share, steps = survival(lengths)
    # number of sequences on each GPU, [k]
    h = samples * share / gpus
    r_gen = samples * lengths.mean() / np.sum(steps * h / U(h))
    r_train = gpus / tau
    return r_gen, r_train, 1 / (1 / r_gen + 1 / r_train)


def pipeline(H, I, gpus, batch, lengths, tau, U):
    """Return (r, max lag) of the pipeline with I GPUs that serve H sequences each.

    H and I may be arrays of the same shape.
    """
    r = np.minimum(U(H) * I, (gpus - I) / tau)
    steps_per_sequence = lengths.max() / (lengths.mean() * batch)
    # A lag that is a whole number but for rounding must not be rounded up to the next one.
    lag = np.ceil(H * I * steps_per_sequence - 1e-9)
    return r, lag.astype(int)


def fastest_pipelines(gpus, concurrency, **case):
    """Return {max lag: (r, H, I)} with the fastest pipeline of each max lag.

    Among pipelines whose r differs by less than about 0.1%, the one with the fewest serving GPUs is
    taken.
    """
    H, I = np.meshgrid(np.arange(1, concurrency + 1), np.arange(1, gpus))
    H = H.ravel()
    I = I.ravel()
    r, lag = pipeline(H, I, gpus, **case)
    slowness = -np.rint(1000 * np.log(r))
    # lexsort sorts by its last key first.
    order = np.lexsort((H, I, slowness, lag))
    _, first = np.unique(lag[order], return_index=True)
    return {int(lag[k]): (float(r[k]), int(H[k]), int(I[k])) for k in order[first]}


def best(max_lag, gpus, concurrency, **case):
    """Return a list with a dict for each limit on the max lag, from 1 to max_lag.

    A dict has the fastest conventional G and the fastest pipeline (H, I) within the limit; its H is
    0 if no pipeline is within the limit.
    """
    pipelines = fastest_pipelines(gpus, concurrency, **case)
    _, _, on_policy = conventional(1, gpus, **case)
    row = dict(G=1, conventional=float(on_policy), H=0, I=0, lag=0, pipeline=0.0)
    rows = []
    for limit in range(1, max_lag + 1):
        _, _, r = conventional(limit + 1, gpus, **case)
        if r > row["conventional"]:
            row.update(G=limit + 1, conventional=float(r))
        r, H, I = pipelines.get(limit, (0.0, 0, 0))
        if r > row["pipeline"]:
            row.update(H=H, I=I, lag=limit, pipeline=r)
        speedup = row["pipeline"] / row["conventional"]
        rows.append(dict(row, max_lag=limit, speedup=speedup))
    return rows


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        # It imports the stages, and with them torch.
        from tools import simulate_run

        simulate_run.main(argv)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=128, help="number of GPUs, at least 2")
    parser.add_argument("--batch", type=int, default=128, help="samples per optimizer step")
    parser.add_argument(
        "--longest", type=int, default=2048, help="tokens at which answers are cut off"
    )
    parser.add_argument(
        "--lengths", default="uniform", help="uniform (1 to --longest), equal, or a file"
    )
    parser.add_argument(
        "--tau", type=float, default=4.92, help="3 / the trainer's MFU (4.92: 61%%)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=1024, help="most sequences on a serving GPU"
    )
    parser.add_argument("--max_lag", type=int, default=132, help="the largest limit in the table")
    arguments = parser.parse_args(argv)
    concurrency = arguments.concurrency
    numbers = (arguments.batch, arguments.max_lag, arguments.longest, concurrency)
    if arguments.gpus < 2 or min(numbers) < 1 or arguments.tau <= 0:
        parser.error("--gpus must be at least 2, all other numbers at least 1, and --tau above 0")
    rows = best(
        arguments.max_lag,
        gpus=arguments.gpus,
        concurrency=concurrency,
        batch=arguments.batch,
        lengths=draw_lengths(arguments.lengths, arguments.longest),
        tau=arguments.tau,
        # A GPU generates at most `concurrency` sequences at once; the others wait for their turn.
        U=lambda h: fitted(np.minimum(h, concurrency)),
    )
    print("max lag | conventional G       r | pipeline H     I  lag       r | speed-up")
    for row in rows:
        limit = row["max_lag"]
        is_power_of_two = limit & (limit - 1) == 0
        if is_power_of_two or limit == arguments.max_lag:
            print(LINE.format(**row))


if __name__ == "__main__":
    main()

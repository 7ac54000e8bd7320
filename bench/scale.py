"""How should 8 to 128 GPUs be split, and what is gained? A simulation with assumed speeds.

    python bench/scale.py [--quick] [--plot]

Nothing here was measured on such a machine. tools/simulate_run.py simulates Qwen2.5-7B on H100s of
80 GB with the speeds that `speeds_of` computes from the figures below. Those of the hardware are
the manufacturer's; what share of them is reached is an assumption, named as such. The trainer's
share (MFU) is the most uncertain one: the tables are computed with two values.

G is the number of optimizer steps of a generation phase of conventional RL, I the number of GPUs of
engines in the pipeline, and H the number of sequences in progress on each of them.

    conventional   all GPUs sample, then all GPUs train. The engines get new weights in the time of
                   an update; beside this, the change from one to the other takes no time, which
                   favours it
    pipeline       I GPUs sample, and the others train; --on_full block, or no limit on the lag and
                   --on_full drop_oldest, as in the preset math

G, I, H and --max_lag are searched; the H of conventional RL is the largest that fits. The mean lag
says how old the trained tokens are. For a few limits on the mean lag, the table compares the
fastest pipeline and the fastest conventional setting that keep it; that of conventional RL is
(G - 1) / 2, or a little less.

The lengths of answers are log-normal (SIGMA, a mean of a quarter of the longest), cut off at the
longest. A step has 1,024 samples, 16 attempts at a problem. H is at most what the KV cache of an
engine has room for. Deliberately absent: evaluations, checkpoints, failures, the growth of answers
in training.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import machine, measured, panels, parser, result_file, table
from tools import simulate_run as sim

# ---- the model: Qwen2.5-7B
PARAMETERS = 7.6e9
# of bfloat16 weights
WEIGHT_BYTES = 2 * PARAMETERS
# of a token in the KV cache: 28 layers, 4 heads of 128, keys and values, 2 bytes each
KV_BYTES = 28 * 4 * 128 * 2 * 2
# FLOPs of attention for a token and each token before it, forward: 28 layers, 28 heads of 128
ATTENTION_FLOPS = 4 * 28 * 28 * 128

# ---- the hardware: H100 SXM
# FLOPs a second in bfloat16, without sparsity
PEAK_FLOPS = 989e12
# bytes a second from the GPU's memory
MEMORY = 3.35e12
# bytes a second between GPUs of a node (NVLink, one direction), and of a GPU's network card (400
# Gbit/s)
NVLINK = 450e9
NETWORK = 50e9
GPUS_A_NODE = 8

# ---- assumptions
# shares of the figures above that are reached by decoding and by communication
MEMORY_SHARE = 0.7
DECODE_FLOPS_SHARE = 0.5
LINK_SHARE = 0.7
# seconds of a decoding step beside the work of the GPU
DECODE_OVERHEAD = 0.002
# the shares of PEAK_FLOPS that the trainer reaches: what an H200 had with 1.5B parameters
# (bench/results/gpu/h200.json), and the goal
MFU = (0.27, 0.45)
# seconds of an optimizer step beside its tokens
TRAIN_STEP = 0.5
# bytes a second at which weights are copied to the memory of the host, while the trainer waits (an
# H200 did 51e9, bench/results/gpu/h200.json), and at which they are sent to the engines
HOST_RATE = 50e9
UPDATE_RATE = 20e9
# the room for the KV cache of an engine, bytes: 0.85 x 80 GB less two copies of the weights
KV_ROOM = 0.85 * 80e9 - 2 * WEIGHT_BYTES - 2e9
# the least number of GPUs that hold the trainer: 16 bytes a parameter, and activations
LEAST_TRAINERS = 3
SAMPLES = 1024
ATTEMPTS = 16
PROMPT = 200
SIGMA = 0.9
# of the normal scores of two lengths at one problem
CORRELATION = 0.5

# ---- the search
LONGEST = (1024, 4096, 16384)
GPUS = (8, 32, 128)
GS = (1, 2, 4, 8, 16)
NO_LIMIT = 1_000_000
MAX_LAGS = (1, 2, 3, 4, 6, 8, NO_LIMIT)
SEQUENCES = (64, 128, 256)
# the split is searched around the one at which engines and trainer are equally fast
AROUND = (0.85, 1.0, 1.2)
# limits on the mean lag: those of G = 4, 8 and 16
LIMITS = (1.5, 3.5, 7.5)
# Steps that are measured. Before them the pipeline fills: at least as many steps as are measured,
# and for as long as two of the longest answers take. Conventional RL must have whole phases.
MEASURED = 16
MOST_STEPS = 400


def lengths_of(longest):
    """The Lengths of answers."""
    # The mean of a log-normal is exp(mu + sigma^2 / 2).
    mu = math.log(longest / 4) - SIGMA**2 / 2
    ranks = (np.arange(sim.QUANTILES) + 0.5) / sim.QUANTILES
    normal = np.array([NormalDist().inv_cdf(rank) for rank in ranks])
    quantiles = np.exp(mu + SIGMA * normal).clip(1, longest)
    return sim.Lengths(np.rint(quantiles).astype(int), CORRELATION)


def context_of(lengths):
    """The mean number of tokens in the KV cache of a sequence in progress."""
    # A longer answer is in progress for longer.
    return PROMPT + (lengths.quantiles**2).mean() / (2 * lengths.quantiles.mean())


def row_tokens_of(lengths, trainers):
    """--row_tokens: as many as fit, but every rank must get a row of each step."""
    longest = int(lengths.quantiles[-1]) + PROMPT
    step = SAMPLES * (lengths.quantiles.mean() + PROMPT / 4)
    return max(longest, min(16384, int(step / trainers)))


def speeds_of(lengths, gpus, row_tokens, mfu):
    """The Speeds of `gpus` H100s."""
    context = context_of(lengths)
    memory = MEMORY * MEMORY_SHARE
    decode_flops = PEAK_FLOPS * DECODE_FLOPS_SHARE
    # Attention over what is before a token, averaged over the tokens of sequences.
    flops = 6 * PARAMETERS + 3 * ATTENTION_FLOPS * context
    compute = flops / (PEAK_FLOPS * mfu)
    return sim.Speeds(
        request=PROMPT * 2 * PARAMETERS / decode_flops,
        decode_base=WEIGHT_BYTES / memory + DECODE_OVERHEAD,
        decode_each=KV_BYTES * context / memory + 2 * PARAMETERS / decode_flops,
        # The traffic between ranks goes on beside the computation.
        train_token=max(compute, traffic_s(gpus) / row_tokens),
        train_step=TRAIN_STEP,
        update=WEIGHT_BYTES / HOST_RATE + WEIGHT_BYTES / UPDATE_RATE,
        gather=WEIGHT_BYTES / HOST_RATE,
        save=0.0,
        prompt_tokens=PROMPT,
    )


def traffic_s(gpus):
    """The seconds of FSDP's traffic for a micro-batch, which goes on beside its computation.

    The weights are gathered twice, in bfloat16, and the gradients are scattered in float32. Between
    nodes the network cards of a node share the traffic.
    """
    rate = NVLINK if gpus <= GPUS_A_NODE else min(NVLINK, GPUS_A_NODE * NETWORK)
    return (2 * WEIGHT_BYTES + 4 * PARAMETERS) / (rate * LINK_SHARE)


@dataclass(frozen=True)
class Split:
    """A way to use the GPUs: `engines` and `trainers` overlap in conventional RL."""

    engines: int
    trainers: int
    sequences: int
    max_lag: int = 0
    g: int = 0


def simulate(split, longest, gpus, mfu):
    """{step_s, lag_mean, lag_max, gen_idle, wait_data} of a split, after the first steps."""
    lengths = lengths_of(longest)
    row_tokens = row_tokens_of(lengths, split.trainers)
    config = cfg.Config(
        run="scale",
        # never reached: the end of a run, where nothing new is started, is not measured
        steps=10 * MOST_STEPS,
        batch_size=SAMPLES,
        attempts=ATTEMPTS,
        row_tokens=row_tokens,
        concurrency=split.sequences,
        engines=split.engines,
        trainers=split.trainers,
        max_lag=split.max_lag,
        on_full="drop_oldest" if split.max_lag == NO_LIMIT else "block",
        conventional_g=split.g,
        eval_every=0,
        eval_problems=0,
        save_every=0,
    )
    speeds = speeds_of(lengths, gpus, row_tokens, mfu)
    filling_s = 2 * longest * speeds.decode_s(split.sequences)
    run = sim.Simulation(config, speeds, lengths)
    filling = MOST_STEPS

    def is_measured():
        nonlocal filling
        if filling == MOST_STEPS and run.now > filling_s and run.version % MEASURED == 0:
            filling = max(run.version, MEASURED)
        return len(run.lines) >= filling + MEASURED

    lines = run.run(is_measured)[filling : filling + MEASURED]
    seconds = sum(line["step_s"] for line in lines)
    means = {name: np.mean([line[name] for line in lines]) for name in ("lag_mean", "gen_idle")}
    return dict(
        step_s=seconds / len(lines),
        wait_data=sum(line["wait_data_s"] for line in lines) / seconds,
        lag_max=max(line["lag_max"] for line in lines),
        **{name: float(mean) for name, mean in means.items()},
    )


def splits_of(longest, gpus, mfu):
    """All splits that are tried, conventional ones first."""
    lengths = lengths_of(longest)
    room = int(KV_ROOM / (KV_BYTES * context_of(lengths)))
    sequences = sorted({min(h, room) for h in SEQUENCES})
    splits = [Split(gpus, gpus, sequences[-1], g=g) for g in GS]
    speeds = speeds_of(lengths, gpus, row_tokens_of(lengths, gpus / 2), mfu)
    mean = lengths.quantiles.mean()
    # the prompt is computed once for the attempts in a row
    train_s = speeds.train_token * (mean + PROMPT / 4)
    for h, max_lag in itertools.product(sequences, MAX_LAGS):
        sample_s = speeds.decode_s(h) * mean / h
        balanced = gpus * sample_s / (sample_s + train_s)
        for engines in sorted({round(balanced * factor) for factor in AROUND}):
            if 1 <= engines <= gpus - LEAST_TRAINERS:
                splits.append(Split(engines, gpus - engines, h, max_lag=max_lag))
    return splits


def measure(key, knobs):
    """All splits of a case, simulated: {results: [[fields of Split, what it does]]}."""
    longest, gpus, mfu = knobs["longest"], knobs["gpus"], knobs["mfu"]
    results = []
    for split in splits_of(longest, gpus, mfu):
        results.append([vars(split), simulate(split, longest, gpus, mfu)])
    print(f"{key}: {len(results)} simulations", flush=True)
    return dict(results=results)


def best_of(results, limit):
    """((Split, figures) of the fastest conventional, of the fastest pipeline) within a mean lag."""
    best = {}
    for fields, figures in results:
        split = Split(**fields)
        is_conventional = split.g > 0
        fastest = best.get(is_conventional, (None, dict(step_s=math.inf)))
        if figures["lag_mean"] <= limit + 0.01 and figures["step_s"] < fastest[1]["step_s"]:
            best[is_conventional] = (split, figures)
    return best[True], best.get(False)


def lag_limit(max_lag):
    """--max_lag, or "drop" if --on_full drop_oldest takes its place."""
    return "drop" if max_lag == NO_LIMIT else f"{max_lag}"


def rows_of_case(longest, gpus, results):
    """The rows of the table for a case."""
    rows = []
    for limit in LIMITS:
        (conventional, its), pipeline = best_of(results, limit)
        row = [f"{longest}", f"{gpus}", f"{limit:g}"]
        row += [f"G = {conventional.g}", f"{its['step_s']:.1f}", f"{its['lag_mean']:.1f}"]
        if pipeline is None:
            rows.append([*row, "none", "", "", "", "", "", ""])
            continue
        split, figures = pipeline
        row += [
            f"{split.engines} + {split.trainers}",
            f"{split.sequences}",
            lag_limit(split.max_lag),
        ]
        row += [f"{figures['step_s']:.1f}", f"{figures['lag_mean']:.1f}", f"{figures['lag_max']}"]
        row.append(f"{its['step_s'] / figures['step_s']:.2f}")
        rows.append(row)
    return rows


def draw(results, path):
    """Draw the speed-up against the number of GPUs, a panel for each MFU."""
    figure, axes = panels([f"the trainer reaches {mfu:.0%} of its peak" for mfu in MFU])
    for ax, mfu in zip(axes, MFU):
        for i, (longest, limit) in enumerate(itertools.product(LONGEST, LIMITS)):
            x = []
            y = []
            for gpus in GPUS:
                case = results.get(key_of(longest, gpus, mfu))
                if case is None:
                    continue
                (_, conventional), pipeline = best_of(case["results"], limit)
                if pipeline is not None:
                    x.append(gpus)
                    y.append(conventional["step_s"] / pipeline[1]["step_s"])
            style = ("o-", "s--", "^:")[i % len(LIMITS)]
            label = f"answers up to {longest}, mean lag up to {limit:g}"
            ax.plot(x, y, style, color=f"C{i // len(LIMITS)}", label=label)
        ax.axhline(1.0, color="gray", linewidth=1)
        ax.set(xscale="log", xlabel="GPUs", ylabel="times as fast as the best conventional G")
        # room for the legend
        ax.set_ylim(bottom=0.4)
        ax.set_xticks(GPUS, [str(gpus) for gpus in GPUS], minor=False)
        ax.minorticks_off()
    axes[0].legend(fontsize=7, loc="lower center")
    figure.savefig(path, dpi=80)


def key_of(longest, gpus, mfu):
    return f"answers up to {longest}, {gpus} GPUs, MFU {mfu:g}"


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--plot", action="store_true", help="simulate nothing, show what is kept")
    arguments = p.parse_args(argv)
    cases = list(itertools.product(MFU, LONGEST, GPUS))
    if arguments.quick:
        cases = [(MFU[0], LONGEST[0], GPUS[0])]
    wanted = {}
    assumed = {k: v for k, v in globals().items() if k.isupper() and isinstance(v, (int, float))}
    for mfu, longest, gpus in cases:
        case = dict(longest=longest, gpus=gpus, mfu=mfu)
        # What was simulated with other assumptions is simulated again.
        wanted[key_of(longest, gpus, mfu)] = case | dict(assumed=assumed)
    path = result_file(arguments, "scale")
    results = measured(path, wanted, None if arguments.plot else measure)
    print(machine())
    for gpus in (8, 128):
        print(f"{gpus} GPUs: the traffic between ranks takes {traffic_s(gpus):.2f} s a micro-batch")
    header = ["answers", "GPUs", "mean lag", "conventional", "s a step", "its lag"]
    header += ["engines + trainers", "sequences", "max_lag", "s a step", "its lag", "oldest"]
    for mfu in MFU:
        rows = []
        for key, case in results.items():
            knobs = wanted[key]
            if knobs["mfu"] == mfu:
                rows += rows_of_case(knobs["longest"], knobs["gpus"], case["results"])
        print(f"\nMFU {mfu:.0%}")
        table([*header, "speed-up"], rows)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

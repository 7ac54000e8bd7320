"""How far engine and trainer are apart in a run, by position, probability and length.

    python bench/mismatch.py out/a out/b ...

The measure is the mean of |log pi - log mu| in nats a token, and the bias is the mean without the
absolute value. Only rollouts in samples.jsonl count whose tokens were all sampled by the version
that trained them (lag 0), such as the 512 of `bash run.sh smol --run a --max_lag 0 --steps 2
--batch_size 256 --samples_logged 256`.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import keep, machine, parser, result_file, table

UPPER_EDGES = {
    "position": (1, 2, 4, 8, 16, 32, 64, np.inf),
    "probability": (0.01, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0),
    "tokens": (4, 8, 16, 32, 64, np.inf),
}


def tokens_of(run_dir):
    """Arrays [N] of all tokens of lag 0: position, probability, tokens (of the whole sequence),
    difference.
    """
    tokens = {name: [] for name in (*UPPER_EDGES, "difference")}
    for line in Path(run_dir, "samples.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        if any(version not in (-1, rollout["step"] - 1) for version, *_ in rollout["spans"]):
            continue
        # --overlong_mask leaves attempts out of the loss; their ratios are null.
        if None in rollout["log_ratios"]:
            continue
        n = len(rollout["log_ratios"])
        tokens["position"] += range(1, n + 1)
        tokens["probability"] += np.exp(rollout["behavior_logprobs"]).tolist()
        tokens["tokens"] += [n] * n
        tokens["difference"] += rollout["log_ratios"]
    return {name: np.array(values) for name, values in tokens.items()}


def means(tokens, name):
    """[(label, tokens, mean |difference|)] in the ranges of one of UPPER_EDGES."""
    rows = []
    for low, high in pairwise((0, *UPPER_EDGES[name])):
        chosen = np.abs(tokens["difference"][(tokens[name] > low) & (tokens[name] <= high)])
        if len(chosen):
            rows.append((f"{high:g}", len(chosen), float(chosen.mean())))
    return rows


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("runs", nargs="+", help="run directories")
    a = p.parse_args(argv)
    results = {}
    for run_dir in a.runs:
        config = cfg.load(run_dir)
        tokens = tokens_of(run_dir)
        difference = tokens["difference"]
        size = np.abs(difference)
        label = f"{run_dir}: {config.dtype}, head_float32 {config.head_float32}"
        figures = [size.mean(), np.quantile(size, 0.99), size.max(), difference.mean()]
        print(f"\n{label}: {len(size)} tokens")
        print("mean, 99%, largest, bias:", *(f"{x:.2g}" for x in figures))
        results[label] = dict(all=[float(x) for x in figures])
        for name in UPPER_EDGES:
            rows = results[label][name] = means(tokens, name)
            table(
                [f"{name} up to", "tokens", "nats"], [(x, n, f"{mean:.2g}") for x, n, mean in rows]
            )
    keep(result_file(a, "mismatch"), dict(machine=machine()) | results)


if __name__ == "__main__":
    main()

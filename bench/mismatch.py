"""How far engine and trainer are apart in a run's dtype, by place, probability and length of what was sampled.

    python bench/mismatch.py out/a out/b ...

Of rollouts in samples.jsonl whose tokens the trained version itself sampled (lag 0), such as 512 of `bash run.sh smol --run a
--max_lag 0 --steps 2 --batch_size 256 --samples_logged 256`: mean |log pi - log mu|, nats a token; bias: without | |.
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
    "place": (1, 2, 4, 8, 16, 32, 64, np.inf),
    "probability": (0.01, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0),
    "tokens": (4, 8, 16, 32, 64, np.inf),
}


def tokens_of(run_dir):
    """{place, probability, tokens (of its sequence), difference: [N]} of all tokens of lag 0."""
    found = {name: [] for name in (*UPPER_EDGES, "difference")}
    for line in Path(run_dir, "samples.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        if any(version not in (-1, rollout["step"] - 1) for version, *_ in rollout["spans"]):
            continue
        n = len(rollout["log_ratios"])
        found["place"] += range(1, n + 1)
        found["probability"] += np.exp(rollout["behavior_logprobs"]).tolist()
        found["tokens"] += [n] * n
        found["difference"] += rollout["log_ratios"]
    return {name: np.array(values) for name, values in found.items()}


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
    found = {}
    for run_dir in a.runs:
        config = cfg.load(run_dir)
        tokens = tokens_of(run_dir)
        d = tokens["difference"]
        label = f"{run_dir}: {config.dtype}, head_float32 {config.head_float32}"
        whole = [np.abs(d).mean(), np.quantile(np.abs(d), 0.99), np.abs(d).max(), d.mean()]
        print(
            f"\n{label}: {len(d)} tokens; mean, 99%, largest, bias:", *(f"{x:.2g}" for x in whole)
        )
        found[label] = dict(all=[float(x) for x in whole])
        for name in UPPER_EDGES:
            rows = found[label][name] = means(tokens, name)
            table(
                [f"{name} up to", "tokens", "nats"], [(x, n, f"{mean:.2g}") for x, n, mean in rows]
            )
    keep(result_file(a, "mismatch"), dict(machine=machine()) | found)


if __name__ == "__main__":
    main()

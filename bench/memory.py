"""Which of the Qwen2.5 models fit how many GPUs of 80 GB, as a table for RESULTS.md.

    python bench/memory.py     # ten minutes on one core; no GPU, no network

`math` with each model, half of the GPUs for training, as tools/memory.py sees it. A cell has the fullest
GPU's GB, and the largest row_tokens that fits the trainers. Deliberately absent: looking for a better
split, or for tensor parallelism, which tools/memory.py does when a run does not fit.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.fake_step import SHAPES
from tools.memory import Placed, resolved

GPUS = (1, 2, 4, 8, 16)
GPU_GB = 80.0


def cell(name, gpus):
    """What the table says of a model on so many GPUs."""
    c = resolved(["math", "--model", f"Qwen/Qwen2.5-{name}"], gpus, GPU_GB)
    placed = Placed(c, gpus, GPU_GB)
    if placed.hopeless():
        return f"no: {placed.static_gb:.0f} GB without activations"
    where, lack = placed.lack
    taken = f"{max(placed.totals.values()):.0f} GB"
    if lack > 0:
        return f"{taken}: no ({where}); rows of {placed.largest_row()}"
    return f"{taken}: rows of {placed.largest_row()}"


def main():
    print("| Qwen2.5 | " + " | ".join(f"{n} GPU" for n in GPUS) + " |")
    print("|---" * (len(GPUS) + 1) + "|")
    for name in SHAPES:
        cells = [cell(name, gpus) for gpus in GPUS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

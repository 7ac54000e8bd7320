"""Which of the Qwen2.5 models fit how many GPUs of 80 GB, as a table for RESULTS.md.

    python bench/memory.py     # six minutes on one core; no GPU, no network

`math` with each model, half of the GPUs for training, as tools/memory.py sees it. A cell has the fullest
GPU's GB, and the largest row_tokens that fits in units of 1024; or the knobs with which it does fit.
Deliberately absent: other presets.
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
    words = ["math", "--model", f"Qwen/Qwen2.5-{name}"]
    placed = Placed(resolved(words, gpus, GPU_GB), gpus, GPU_GB)
    if placed.fits:
        return f"{max(placed.totals.values()):.0f} GB, rows of {placed.largest_row() // 1024}k"
    advice = placed.advice()
    if "--model" in advice:
        return "no"
    return f"no; {advice}"


def main():
    print("| Qwen2.5 | " + " | ".join(f"{n} GPU" for n in GPUS) + " |")
    print("|---" * (len(GPUS) + 1) + "|")
    for name in SHAPES:
        cells = [cell(name, gpus) for gpus in GPUS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

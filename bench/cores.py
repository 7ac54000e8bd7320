"""How many threads should engine and trainer have on a CPU? Short runs of real presets, in turn.

    python bench/cores.py [toy smol countup] [--rounds 3] [--quick] [--plot] [--port 9500]

Three settings are compared: engine and trainer have as many threads as half of the cores each; the
trainer has as many as there are cores; both have. In the last two the system divides the cores, and
where both have work the trainer has priority (the engines run with `nice`).

Columns: the seconds of a step without the first steps, as median and range over rounds; their ratio
to the first setting of the same round; the share of its time in which the trainer waits for data;
the share of the engine's slots that is empty. Nothing else may run on the machine.
"""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import machine, measured, median_and_range, result_file, table
from tools.common import read_metrics
from tools.simulate_run import observed

CORES = len(os.sched_getaffinity(0))
HALF = CORES // 2
COMMON = dict(eval_every=0, eval_problems=1, save_every=0)
PRESETS = {
    "toy": COMMON | dict(steps=60),
    "smol": COMMON | dict(steps=16),
    "countup": COMMON | dict(steps=16),
}
SETTINGS = {
    "a share each": dict(engine_threads=HALF, trainer_threads=CORES - HALF),
    "trainer on all cores": dict(engine_threads=HALF, trainer_threads=CORES),
    "both on all cores": dict(engine_threads=CORES, trainer_threads=CORES),
}


def one_run(key, knobs, port):
    """A run as {quantity: mean over its steps without the first ones}, see simulate_run."""
    knobs = dict(knobs)
    preset = knobs.pop("preset")
    name = f"cores-{key}".replace(" ", "-").replace(",", "")
    run_dir = runs.run_to_its_end(name, knobs, port, preset=preset)
    [steps] = read_metrics(run_dir, "step")
    result = observed(steps)
    print(f"{key}: {result['step_s']:.3f} s a step", flush=True)
    return result


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=9500)
    p.add_argument("presets", nargs="*", default=list(PRESETS), help=f"of {', '.join(PRESETS)}")
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args(argv)
    if unknown := set(a.presets) - PRESETS.keys():
        p.error(f"{sorted(unknown)}: no such preset; there are {list(PRESETS)}")
    if CORES < 2:
        p.error("there is nothing to divide on a machine with one core")
    rounds = 1 if a.quick else a.rounds
    wanted = {}
    for i in range(rounds):
        for preset in a.presets:
            # Every other round has the opposite order.
            for setting in list(SETTINGS)[:: -1 if i % 2 else 1]:
                knobs = PRESETS[preset] | SETTINGS[setting] | dict(preset=preset)
                knobs |= dict(seed=a.first_seed + i) | (dict(steps=10) if a.quick else {})
                wanted[f"{preset}, {setting}, round {i}"] = knobs
    path = result_file(a, "cores")
    measure = None if a.plot else lambda key, knobs: one_run(key, knobs, a.port)
    results = measured(path, wanted, measure, reuse=not a.quick or a.plot)
    print(machine())
    rows = []
    for preset in a.presets:
        first = next(iter(SETTINGS))
        for setting in SETTINGS:
            keys = [
                (f"{preset}, {setting}, round {i}", f"{preset}, {first}, round {i}")
                for i in range(rounds)
            ]
            pairs = [(results[x], results[y]) for x, y in keys if x in results and y in results]
            if not pairs:
                continue
            row = [f"{preset}: {setting}", median_and_range([x["step_s"] for x, _ in pairs])]
            row.append(median_and_range([x["step_s"] / y["step_s"] for x, y in pairs]))
            for name in ("wait_data", "gen_idle"):
                row.append(f"{np.median([x[name] for x, _ in pairs]):.2f}")
            rows.append(row)
    table(["", "s a step", "ratio to the first", "trainer waits", "slots empty"], rows)


if __name__ == "__main__":
    main()

"""Does tools/simulate.py predict runs that it has not seen?

    python bench/simulator.py [toy|tail|countup] [--seeds 1] [--quick] [--plot]

Each setting is a short run of `bash run.sh` with the real vLLM. The speeds of the engine and of the
trainer, and the lengths of answers, are measured in the run `base` alone. With these the simulator
predicts all settings; the row of `base` says how well it fits, the others whether it predicts.

Columns: for each quantity, measured -> simulated, as means over a run without its first steps.
step_s is followed by the error of the simulation; waiting and idle are shares of the time. The last
line has the mean and the largest error of step_s over the settings other than `base`.

Nothing else may run on the machine meanwhile.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from bench import runs
from bench.common import measured, result_file, table
from tools import simulate_run as sim

# One engine and one rank of one thread each: what one of them does takes no time from the other
COMMON = dict(engines=1, trainers=1, engine_threads=1, trainer_threads=1, eval_every=0)
COMMON |= dict(eval_problems=1, save_every=0)
TOY = COMMON | dict(task="toy", steps=60)
TAIL = runs.COMMON | runs.PIPELINE | COMMON | dict(steps=48)
COUNTUP = COMMON | dict(task="countup", steps=20)
SETTINGS = {
    "toy": {
        "base": TOY,
        "max_lag 0": TOY | dict(max_lag=0),
        "max_lag 4": TOY | dict(max_lag=4),
        "64 sequences": TOY | dict(concurrency=64),
        "batches of 112": TOY | dict(batch_size=112, steps=120),
        "4 attempts": TOY | dict(attempts=4),
        "wait": TOY | dict(late="wait"),
        "hold": TOY | dict(late="hold"),
        "G = 1": TOY | dict(conventional_g=1),
        "G = 4": TOY | dict(conventional_g=4),
        "evaluations": TOY | dict(eval_every=6, eval_problems=256),
    },
    "tail": {
        "base": TAIL,
        "max_lag 0": TAIL | dict(max_lag=0),
        "max_lag 4": TAIL | dict(max_lag=4),
        "16 sequences": TAIL | dict(concurrency=16),
        "128 sequences, max_lag 4": TAIL | dict(concurrency=128, max_lag=4),
        "wait": TAIL | dict(late="wait"),
        "G = 1": TAIL | dict(conventional_g=1),
        "G = 8": TAIL | dict(conventional_g=8, concurrency=512),
    },
    "countup": {
        "base": COUNTUP,
        "max_lag 3": COUNTUP | dict(max_lag=3),
        "wait": COUNTUP | dict(late="wait"),
        "G = 4": COUNTUP | dict(conventional_g=4, concurrency=256),
    },
}
# What the simulator reads of a line of metrics.jsonl
KEPT = "tokens sampled_tokens lengths step_s wait_data_s wait_sync_s gather_s sync_s pause_s save_s"
KEPT = [*KEPT.split(), *sim.QUANTITIES[2:]]
# Quantities of the table beside step_s
SHOWN = sim.QUANTITIES[1:]


def one_run(task, key, knobs, port):
    """A run as {config, durations, correlation, lines}, all that the simulator needs."""
    name = f"simulator-{task}-{key}".replace(" ", "-").replace("=", "").replace(",", "")
    preset = "countup" if task == "countup" else "toy"
    run_dir = runs.run_to_its_end(name, knobs, port, preset=preset)
    config, lines, durations, samples = sim.read_run(run_dir)
    kept = []
    for line in lines:
        kept.append({name: line[name] for name in KEPT} | {"problems": {"all": 0}})
        kept[-1]["problems"]["all"] = sum(line["problems"].values())
    print(f"{key}: {sim.observed(lines)['step_s']:.3f} s a step", flush=True)
    return dict(
        config=asdict(config),
        durations=durations,
        correlation=sim.correlation_of_neighbours(samples),
        lines=kept,
    )


def predictions(results):
    """{setting: (measured, simulated)} of the runs {setting: result of one_run}."""
    base = results["base"]
    config = cfg.from_json(base["config"])
    speeds = sim.measure_speeds([(config, base["lines"], base["durations"])])
    lengths = sim.measure_lengths(base["lines"][sim.FILLING :], [])
    lengths.correlation = base["correlation"]
    print(speeds)
    both = {}
    for setting, result in results.items():
        config = cfg.from_json(result["config"])
        both[setting] = (sim.observed(result["lines"]), sim.simulate(config, speeds, lengths))
    return both


def row_of(setting, seen, simulated):
    """The cells of a setting's row."""
    error = simulated["step_s"] / seen["step_s"] - 1
    cells = [setting, f"{seen['step_s']:.3f} -> {simulated['step_s']:.3f}", f"{error:+.1%}"]
    return cells + [f"{seen[name]:.3g} -> {simulated[name]:.3g}" for name in SHOWN]


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=9300)
    p.add_argument("task", nargs="?", default="toy", choices=SETTINGS)
    a = p.parse_args(argv)
    settings = SETTINGS[a.task]
    if a.task == "tail":
        runs.make_model()
    path = result_file(a, f"simulator-{a.task}" + "-quick" * a.quick)
    for seed in range(a.first_seed, a.first_seed + a.seeds):
        wanted = {f"{key}, seed {seed}": knobs | dict(seed=seed) for key, knobs in settings.items()}
        if a.quick:
            wanted = {key: knobs | dict(steps=20) for key, knobs in list(wanted.items())[:2]}
        measure = None if a.plot else lambda key, knobs: one_run(a.task, key, knobs, a.port)
        results = measured(path, wanted, measure, reuse=not a.quick or a.plot)
        results = {key.rpartition(",")[0]: result for key, result in results.items()}
        both = predictions(results)
        header = ["", "step_s", "error", *SHOWN]
        table(header, [row_of(setting, *pair) for setting, pair in both.items()])
        others = [pair for setting, pair in both.items() if setting != "base"]
        errors = [abs(b["step_s"] / a["step_s"] - 1) for a, b in others]
        if errors:
            print(f"error of step_s: mean {np.mean(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()

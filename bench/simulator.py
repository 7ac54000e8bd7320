"""Does tools/simulate.py predict runs that it has not seen?

    python bench/simulator.py [toy|tail|countup] [--seeds 1] [--quick] [--plot]

Each setting is a short run of `bash run.sh` with the real vLLM. The speeds of the engine and of the
trainer are measured in the runs `base` and `half batches`, which differ in the number of tokens of
a step; the lengths of answers are those of `base`. With these the simulator predicts all settings.
The rows of the two runs say how well it fits, the other rows whether it predicts.

Columns: for each quantity, measured -> simulated, as means over a run without its first steps.
step_s is followed by the error of the simulation, and by the error that it has if the lengths of
answers are those of the run itself: runs learn differently, and their answers are not equally long.
waiting and idle are shares of the time. The last lines have the mean and the largest error of
step_s over the settings that were not measured.

The trainer has a core for itself, and all other processes share another core. Without this, two
cores are too few: a step of the toy takes the trainer 0.84 s beside a busy engine, and 0.53 s while
the engine waits, and the simulation knows nothing of cores. Nothing else may run on the machine.
"""

import contextlib
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from bench import runs
from bench.common import measured, result_file, table
from tools import simulate_run as sim

# One engine and one rank of one thread each
COMMON = dict(engines=1, trainers=1, engine_threads=1, trainer_threads=1, eval_every=0)
COMMON |= dict(eval_problems=1, save_every=0)
TOY = COMMON | dict(task="toy", steps=60)
TAIL = runs.COMMON | runs.PIPELINE | COMMON | dict(steps=48)
COUNTUP = COMMON | dict(task="countup", steps=20)


def around(base, half):
    """{setting: knobs} that every task has.

    half: half of the base's batch size.
    """
    return {
        "base": base,
        "half batches": base | dict(batch_size=half),
        "wait": base | dict(late="wait"),
    }


def lags_of(base):
    """{setting: knobs} with other lags than those of the base."""
    return {
        "max_lag 0": base | dict(max_lag=0),
        "max_lag 4": base | dict(max_lag=4),
        "G = 1": base | dict(conventional_g=1),
    }


SETTINGS = {
    "toy": around(TOY, 224)
    | lags_of(TOY)
    | {
        "64 sequences": TOY | dict(concurrency=64),
        "quarter batches": TOY | dict(batch_size=112, steps=120),
        "4 attempts": TOY | dict(attempts=4),
        "hold": TOY | dict(late="hold"),
        "G = 4": TOY | dict(conventional_g=4),
        "evaluations": TOY | dict(eval_every=6, eval_problems=256),
    },
    "tail": around(TAIL, 32)
    | lags_of(TAIL)
    | {
        "16 sequences": TAIL | dict(concurrency=16),
        "128 sequences, max_lag 4": TAIL | dict(concurrency=128, max_lag=4),
        "G = 8": TAIL | dict(conventional_g=8, concurrency=512),
    },
    "countup": around(COUNTUP, 32)
    | {
        "max_lag 3": COUNTUP | dict(max_lag=3),
        "G = 4": COUNTUP | dict(conventional_g=4, concurrency=256),
    },
}
CORES = os.sched_getaffinity(0)
# The settings in which speeds are measured
BASES = ("base", "half batches")
# What the simulator reads of a line of metrics.jsonl
KEPT = "step tokens length_mean lengths problems turns step_s wait_data_s wait_sync_s gather_s"
KEPT = [*KEPT.split(), "sync_s", "save_s", *sim.QUANTITIES[2:]]
# The quantities of the table beside step_s
SHOWN = sim.QUANTITIES[1:]
# Simulated runs with other random numbers, whose means are compared
REPEATS = 5


def pin(launcher):
    """Give the trainer of a run a core for itself, and all other processes another core.

    launcher: the process of run.sh. Threads that are started later inherit the core.
    """
    first, second, *_ = sorted(CORES)
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            core = second if "train.py" in process.cmdline() else first
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def one_run(task, key, knobs, port):
    """A run as {config, durations, correlation, lines}, all that the simulator needs."""
    name = f"simulator-{task}-{key}".replace(" ", "-").replace("=", "").replace(",", "")
    preset = "countup" if task == "countup" else "toy"
    run = sim.read_run(runs.run_to_its_end(name, knobs, port, preset=preset, look=pin))
    print(f"{key}: {sim.observed(run.lines)['step_s']:.3f} s a step", flush=True)
    return dict(
        # Paths of this machine say nothing
        config=asdict(run.config) | dict(model=Path(run.config.model).name, out=""),
        durations=run.durations,
        correlation=sim.correlation_of_neighbours(run.rollouts),
        lines=[{name: line[name] for name in KEPT} for line in run.lines],
    )


def predictions(results, bases):
    """{setting: (measured, simulated, simulated with its own lengths)}.

    results: {setting: what one_run returns}. bases: the settings whose speeds are taken. In
    `simulated`, answers are as long as in the first of them.
    """
    kept = {}
    for setting, result in results.items():
        config = cfg.from_json(result["config"])
        kept[setting] = sim.Run(config, result["lines"], result["durations"], [])
    speeds = sim.measure_speeds([kept[setting] for setting in bases])
    lengths = {}
    for setting, run in kept.items():
        lengths[setting] = sim.measure_lengths(run)
        lengths[setting].correlation = results[setting]["correlation"]
    sim.print_speeds(speeds, lengths[bases[0]])
    predicted = {}
    for setting, run in kept.items():
        with_base, with_own = (
            means_of_repeats(run.config, speeds, lengths[whose]) for whose in (bases[0], setting)
        )
        predicted[setting] = (sim.observed(run.lines), with_base, with_own)
    return predicted


def means_of_repeats(config, speeds, lengths):
    """{quantity: mean over REPEATS simulated runs with other random numbers}."""
    repeats = [sim.simulate(config, speeds, lengths, seed) for seed in range(REPEATS)]
    return {name: np.mean([x[name] for x in repeats]) for name in sim.QUANTITIES}


def error_of(simulated, seen):
    """The relative error of the simulated seconds of a step."""
    return simulated["step_s"] / seen["step_s"] - 1


def row_of(setting, seen, simulated, with_own):
    """The cells of a setting's row."""
    cells = [setting, f"{seen['step_s']:.3f} -> {simulated['step_s']:.3f}"]
    cells += [f"{error_of(simulated, seen):+.1%}", f"{error_of(with_own, seen):+.1%}"]
    return cells + [f"{seen[name]:.3g} -> {simulated[name]:.3g}" for name in SHOWN]


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=1, port=9300)
    p.add_argument("task", nargs="?", default="toy", choices=SETTINGS)
    a = p.parse_args(argv)
    settings = SETTINGS[a.task]
    if len(CORES) < 2 and not a.plot:
        sys.exit("bench/simulator.py: a run needs two cores")
    if a.task == "tail" and not a.plot:
        runs.make_model()
    path = result_file(a, f"simulator-{a.task}" + "-quick" * a.quick)
    for seed in range(a.first_seed, a.first_seed + a.seeds):
        wanted = {f"{key}, seed {seed}": knobs | dict(seed=seed) for key, knobs in settings.items()}
        if a.quick:
            wanted = {key: knobs | dict(steps=20) for key, knobs in list(wanted.items())[:2]}
        measure = None if a.plot else lambda key, knobs: one_run(a.task, key, knobs, a.port)
        results = measured(path, wanted, measure, reuse=not a.quick or a.plot)
        results = {key.rpartition(",")[0]: result for key, result in results.items()}
        bases = [setting for setting in BASES if setting in results]
        if not bases:
            sys.exit(f"{path} has no run `{BASES[0]}` of seed {seed}")
        predicted = predictions(results, bases)
        header = ["", "step_s", "error", "own lengths", *SHOWN]
        table(header, [row_of(setting, *values) for setting, values in predicted.items()])
        others = [values for setting, values in predicted.items() if setting not in BASES]
        for column, whose in ((1, "the base's"), (2, "their own")):
            errors = [abs(error_of(values[column], values[0])) for values in others]
            if errors:
                print(
                    f"error of step_s with {whose} lengths: mean {np.mean(errors):.1%}, largest "
                    f"{max(errors):.1%}"
                )


if __name__ == "__main__":
    main()

"""What the metrics of a run say about its knobs, for `run.sh status` and tools/report.py.

The shares of time in which engines and trainer wait say which of the two is the bottleneck. How
much faster the run would be with other knobs is predicted by a simulation of the run
(tools/simulate_run.py), where that can simulate it.
"""

import statistics

import config as cfg
from tools.common import FILLING, NEWEST, by_lag_means, since_newest_start

# least factor of the throughput for which a restart with other knobs is advised
WORTH = 1.05
# Where tokens of a lag have a higher KL(behaviour || trained), nats a token, data of that age have
# slowed learning (docs/staleness.md); and the least share of such tokens that is worth a word.
STALE_KL = 0.01
STALE_SHARE = 0.1


def better_splits(waits, empty, dropped, serving, training, per_engine=1):
    """Return (gain, [numbers of GPUs for the engines]) of the divisions of the GPUs to be tried.

    The first one is the fastest if speeds are proportional to the number of GPUs, and `gain` says
    how many times as fast as now it is then; the others are its neighbours. Without a division that
    gains 5%, the list is empty.

    waits: the share of its time in which the trainer waits for data. empty: the share of the
    engines' slots that are empty, because no further sequence may be started yet. dropped: the
    share of the samples that are dropped, because the trainer is too slow. serving, training:
    numbers of GPUs. per_engine: the number of GPUs of one engine.
    """
    # The throughput of one GPU that never waits, in units of the run's throughput now.
    engine_speed = 1 / max((1 - empty) * (1 - dropped), 0.01) / serving
    trainer_speed = 1 / max(1 - waits, 0.01) / training
    total = serving + training
    splits = sorted({serving, *range(per_engine, total, per_engine)})
    rates = [min(split * engine_speed, (total - split) * trainer_speed) for split in splits]
    best = rates.index(max(rates))
    gain = rates[best] / rates[splits.index(serving)]
    if gain < WORTH:
        return 1.0, []
    neighbours = splits[max(best - 1, 0) : best] + splits[best + 1 : best + 2]
    return gain, [splits[best], *(split for split in neighbours if split != serving)]


def flags(knobs):
    """Return {knob: value} as flags of a command line."""
    return " ".join(f"--{name} {value}" for name, value in knobs.items())


def throughput_advice(config, steps, run_dir, may_raise_lag):
    """Return a line that says what the bottleneck is and which knobs would be faster, or "".

    steps: lines of metrics.jsonl. may_raise_lag: True if a higher --max_lag would start more
    sequences and do no harm.
    """
    waits = sum(line["wait_data_s"] for line in steps) / sum(line["step_s"] for line in steps)
    empty = statistics.mean(line["gen_idle"] for line in steps)
    dropped = sum(sum(line["drops"].get("buffer_full", {}).values()) for line in steps)
    trained = sum(sum(line["problems"].values()) for line in steps)
    dropped /= max(dropped + trained, 1)
    per_engine = config.tensor_parallel
    serving = config.engines * per_engine
    total = serving + config.trainers
    gain, splits = better_splits(waits, empty, dropped, serving, config.trainers, per_engine)
    why = "engines and trainer wait for each other"
    if splits:
        why = f"the {'engines are' if splits[0] > serving else 'trainer is'} the bottleneck"
    why += (
        f" (trainer waits {waits:.0%}, engine slots {empty:.0%} empty, "
        f"{dropped:.0%} of samples dropped)"
    )
    changes = [dict(engines=gpus // per_engine, trainers=total - gpus) for gpus in splits]
    if min(waits, empty) > 0.1 and may_raise_lag:
        lags = sorted({config.max_lag + 1, 2 * config.max_lag} - {config.max_lag, 0})
        changes += [dict(max_lag=lag) for lag in lags if lag < config.steps]
    if not changes:
        return ""
    # It imports the stages, and with them torch.
    from tools import simulate_run

    try:
        lag, predictions = simulate_run.predict(run_dir, changes)
    except (cfg.ConfigError, TimeoutError, ArithmeticError, LookupError, RuntimeError) as e:
        about = f"perhaps {gain:.2f} times as fast" if splits else "which may be faster"
        return f"{why}: try {flags(changes[0])}, {about} (not simulated: {e})"
    best = max(speedup for speedup, _ in predictions)
    if best < WORTH:
        tried = ", ".join(map(flags, changes))
        return f"{why}, but in a simulation none of these is faster: {tried}"
    # The first one that is nearly as fast as the best: a higher lag than needed would do harm.
    enough = max(best / WORTH, WORTH)
    first = next(k for k, (speedup, _) in enumerate(predictions) if speedup >= enough)
    speedup, new_lag = predictions[first]
    return (
        f"{why}: {flags(changes[first])}, {speedup:.2f} times as fast in a simulation "
        f"(mean lag {lag:.1f} -> {new_lag:.1f})"
    )


def stale_advice(steps):
    """Return a line that says that many tokens are so old that they harm, or "".

    steps: lines of metrics.jsonl. Lag 0 is left out: its KL comes from the mismatch of engines and
    trainer, or from a KV cache that is older than the token.
    """
    means = by_lag_means(steps)
    stale = [lag for lag, of_lag in means.items() if lag != "0" and of_lag["kl"] > STALE_KL]
    tokens = sum(of_lag["tokens"] for of_lag in means.values())
    share = sum(means[lag]["tokens"] for lag in stale) / max(tokens, 1)
    if share < STALE_SHARE:
        return ""
    buckets = ", ".join(f"lag {lag}: {means[lag]['kl']:.3f}" for lag in stale)
    return (
        f"{share:.0%} of the tokens are so old that KL(mu || pi) is above {STALE_KL} nats "
        f"({buckets}), which slows learning: lower --max_lag or --lr, or try --ratio product or "
        "--loss dppo (docs/staleness.md)"
    )


def advice_on(config, steps, run_dir):
    """Return `throughput_advice` and `stale_advice` on a run's newest steps, as one line.

    It is "" before the tenth step of a start. steps: lines of metrics.jsonl. run_dir: the run's
    directory.
    """
    newest = since_newest_start(run_dir, steps)[FILLING:][-NEWEST:]
    if len(newest) < FILLING:
        return ""
    stale = stale_advice(newest)
    # With --late hold and in conventional RL engines and trainer take turns, whatever the lag.
    take_turns = config.late == "hold" or config.conventional_g
    throughput = throughput_advice(config, newest, run_dir, not (stale or take_turns))
    return "; ".join(filter(None, [throughput, stale]))

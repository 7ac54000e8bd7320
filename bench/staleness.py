"""How stale may data be? Whole runs on data that is older and older; see docs/staleness.md.

    python bench/staleness.py lags [--seeds 5] [--jobs 2] [--quick] [--plot] [--port 9000]
    python bench/staleness.py losses | mixed | tail_lags | tail_pipeline
    python bench/staleness.py order | countup_lags | head
    python bench/staleness.py losses --only "dppo, lag 16" "cispo, lag 16"

Each part is a set of settings, PARTS below. Each setting is one run of `bash run.sh` a seed, with
the real vLLM. With --only these settings alone are run; the table has all runs that are kept. They
are kept in bench/results/staleness-<task>.json, which the parts of a task share, so that the same
command goes on after an interruption.

lags           A **pure lag** is `--late hold --max_lag N`: the step that trains version v uses
               samples of which every token was sampled by version max(0, v - N).
losses         The other losses and corrections, at few lags.
mixed          Batches that mix lags (tests/edits/shuffled_window.patch) against batches of one lag
               with the same mean; and without their oldest tokens (tokens_trained.patch).
tail_lags      Pure lags on the task `tail`, whose answers have 5 to 397 tokens, and the losses that
               do best on the toy.
tail_pipeline  The pipeline on `tail`, where updates reach long answers many times, with a stale
               and with a recomputed KV cache.
order          The task `countup` on SmolLM2: groups in the order in which they are complete, or in
               that of their starts.
countup_lags   Pure lags on `countup`, and the losses that do best on the toy.
head           `countup` with the head in float32 and in bfloat16.

In all parts but `tail_pipeline` and `order` engines and trainer take turns, so nothing depends on
who is faster, and `--jobs` runs may share the machine (of `countup` each needs 12 GB of memory).
These two need a machine that has nothing else to do, and `--jobs 1`.

Score: the probability that the model gives exactly the right answer, averaged over held-out
problems (250; 64 of countup), computed from checkpoints (bench/runs.py), at the temperature of the
run. All seeds have the same base model, and differ in problems and sampling.

Columns of the table:

    to n%       thousand samples until the score is n% of the way from where runs begin (on average)
                to where the first setting ends (on average); median over seeds, and the range
    end, mean   the score after the last step, and averaged over the samples of a run
    difference  of the mean score from that of the first setting, seed by seed
    collapsed   runs that end more than DROP below their best score, or no higher than they began
    lag         mean lag of the tokens, and of each sample's oldest token
    ESS, KL     means over the steps after the first N, in which the data has its full age: the
                effective sample sizes of tokens and of whole samples, KL(mu || pi) a token

Intervals are 95%, Student's t over seeds.
"""

import functools
import json
import queue
import re
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench import runs
from bench.common import (
    ROOT,
    WORK,
    band,
    machine,
    measured,
    panels,
    patched_copy,
    result_file,
    table,
)
from bench.compare import interval_text, is_unstable, mean_score, student
from bench.runs import column, places, scores_of
from tasks import countup, tail, toy
from tools import base_model
from tools.common import by_lag_means, lowest_lag, read_metrics

LAGS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
FEW_LAGS = (1, 16, 128)
SHARES = (0.5, 0.75)
TASKS = {"toy": toy, "tail": tail, "countup": countup}
# One core for each run. The learning rate was chosen at lag 0, before any other lag was tried (seed
# 0, 160 steps: 3e-4 goes from 0.17 to 0.68, 6e-4 to 0.27). It stays constant, so that all steps of
# a run count the same.
COMMON = dict(engines=1, trainers=1, engine_threads=1, trainer_threads=1)
COMMON |= dict(eval_every=0, eval_problems=1, keep_last=0, lr_schedule="constant", late="hold")
TOY = COMMON | dict(task="toy", steps=160, batch_size=128, attempts=16, lr=3e-4, save_every=16)
# Before its first step a run of lag 64 samples 65 steps' worth of long answers.
TAIL = runs.COMMON | COMMON | dict(concurrency=64, stall_timeout=3000)
# As many sequences in progress as make some twenty versions sample a long answer
CROWDED = runs.COMMON | runs.PIPELINE | dict(concurrency=128, max_lag=4)
COUNTUP = dict(task="countup", steps=32, save_every=8, keep_last=0, eval_every=0, eval_problems=1)
COUNTUP |= dict(trainer_threads=2)
COUNTUP_HELD = COUNTUP | dict(late="hold")
# Knobs that patches of tests/edits bring
PATCHES = {"shuffled": "shuffled_window", "tokens_trained": "tokens_trained"}
# The losses and corrections beside the three of `lags`, as knobs
LOSSES = {
    "cispo": dict(loss="cispo"),
    "gspo": dict(loss="gspo"),
    "icepop": dict(loss="icepop"),
    "ratio sequence": dict(ratio="sequence"),
    "ratio product": dict(ratio="product"),
    "kl_behavior 0.1": dict(kl_behavior_coef=0.1),
    "lr_by_ess": dict(lr_by_ess=True),
    "max_rl": dict(advantage="max_rl"),
    # all weights are 1
    "no weights": dict(loss="cispo", clip_low=1 - 1e-6, clip_high=1 + 1e-6),
}
LAG_COLUMNS = ("lag_mean", "lag_oldest")
COLUMNS = (
    "samples lag_mean lag_max lag_oldest reward signal entropy loss ess ess_sample kl_behavior "
    "clip_frac grad_norm length_mean length_p90 cut_off"
).split()


def pure(base, lag, **knobs):
    """Knobs of a run whose data has exactly this lag."""
    return base | dict(max_lag=lag) | knobs


def lag_settings(base, lags, losses):
    """{setting: knobs}. At lag 0 all weights are 1, and all of these losses have one gradient."""
    settings = {"lag 0": pure(base, 0)}
    for lag in lags:
        if lag:
            settings |= {f"{loss}, lag {lag}": pure(base, lag, loss=loss) for loss in losses}
    return settings


def loss_settings(base, lags):
    """{setting: knobs} of the other losses, after reinforce."""
    settings = {"lag 0": pure(base, 0)}
    for lag in lags:
        for name, knobs in LOSSES.items():
            settings[f"{name}, lag {lag}"] = pure(base, lag, **knobs)
    return settings


def best_losses(base, lag):
    """{setting: knobs} of what loses least at lag 16 of the toy."""
    return {
        f"dppo, lag {lag}": pure(base, lag, loss="dppo"),
        f"ratio product, lag {lag}": pure(base, lag, ratio="product"),
        f"lr_by_ess, lag {lag}": pure(base, lag, lr_by_ess=True),
    }


def mixed_settings(base, lags):
    """{setting: knobs} of batches with one lag, with many lags of the same mean, and with those of
    the many that are no older than the mean.
    """
    settings = {"lag 0": pure(base, 0)}
    for lag in lags:
        settings[f"reinforce, lag {lag}"] = pure(base, lag, loss="reinforce")
        settings[f"mixed, lag {lag}"] = pure(base, lag, shuffled=True)
        recent = dict(shuffled=True, tokens_trained=f"recent {lag}")
        settings[f"mixed, recent alone, lag {lag}"] = pure(base, lag, **recent)
    return settings


PARTS = {
    "lags": lag_settings(TOY, LAGS, ("reinforce", "ppo", "dppo")),
    "losses": loss_settings(TOY, FEW_LAGS),
    "mixed": mixed_settings(TOY, (16, 64)),
    "tail_lags": lag_settings(TAIL, (1, 4, 8, 16, 64), ("reinforce",)) | best_losses(TAIL, 16),
    "tail_pipeline": {
        "lag 0": pure(TAIL, 0),
        "stale KV, lag 4": CROWDED,
        "recomputed KV, lag 4": CROWDED | dict(recompute_kv=True),
        "stale KV, wait, lag 4": CROWDED | dict(late="wait"),
    },
    "order": {
        "keep, lag 1": COUNTUP,
        "wait, lag 1": COUNTUP | dict(late="wait"),
        "hold, lag 1": COUNTUP | dict(late="hold"),
        "keep, lag 3": COUNTUP | dict(max_lag=3),
        "wait, lag 3": COUNTUP | dict(max_lag=3, late="wait"),
    },
    "countup_lags": lag_settings(COUNTUP_HELD, (1, 4, 16), ("reinforce",))
    | best_losses(COUNTUP_HELD, 16),
    "head": {
        "hold, lag 1": COUNTUP_HELD,
        "hold, head_float32, lag 1": COUNTUP_HELD | dict(head_float32=True),
    },
}
# transformers cannot load two models at the same time in two threads: heads that are tied to the
# embeddings came out random
LOADING = threading.Lock()
QUICK = dict(steps=6, save_every=2, batch_size=32, attempts=4, max_new_tokens=40)


# ---- one run


def model_of(task):
    """The base model of all seeds."""
    if task == "countup":
        return Path(cfg.COUNTUP["model"])
    return ROOT / "out" / "models" / f"{task}-seed0"


def one_run(key, knobs, port, slots, is_pinned):
    """A run as {curve, scores}: columns of one number a step, and [[version, score]].

    slots: the numbers of the cores that are free.
    """
    task = knobs["task"]
    slot = slots.get()
    try:
        name = re.sub(r"\W+", "-", f"staleness-{task}-{key}")[-80:]
        run_dir = runs.run_to_its_end(
            name,
            knobs,
            port + 100 * slot,
            preset="countup" if task == "countup" else "toy",
            root=WORK / "staleness" if PATCHES.keys() & knobs.keys() else ROOT,
            core=slot if is_pinned else None,
        )
    finally:
        slots.put(slot)
    count = 64 if task == "countup" else runs.PROBLEMS
    problems = TASKS[task].problems("test", knobs["seed"])[:count]
    with LOADING:
        temperature = cfg.COUNTUP["temperature"] if task == "countup" else 1.0
        run_scores = runs.scores(run_dir / "checkpoints", model_of(task), problems, temperature)
    [steps] = read_metrics(run_dir, "step")
    curve = {name: [short(line[name]) for line in steps if name in line] for name in COLUMNS}
    if any(len(line["by_lag"]) > 1 for line in steps):
        curve["by_lag"] = [line["by_lag"] for line in steps]
    print(f"{key}: score {run_scores[-1][1]:.3f}", flush=True)
    return dict(curve=curve, scores=run_scores)


def short(value):
    """A number with five digits."""
    return float(f"{value:.5g}")


def setting_of(key):
    """The setting of a kept run, whose key is "<setting>, seed <seed>"."""
    return key.rpartition(", seed")[0]


# ---- the table


def samples_to(run, level):
    """The number of samples after which a run's score reaches a level; infinity if it does not."""
    run_scores, samples = scores_of(run), places(run, "samples")
    reached = np.flatnonzero(run_scores >= level)
    if not len(reached):
        return np.inf
    k = reached[0]
    if k == 0:
        return 0.0
    return float(np.interp(level, run_scores[k - 1 : k + 1], samples[k - 1 : k + 1]))


def aged(run, name, knobs):
    """The mean of a column over the steps in which the data has its full age."""
    values = column(run, name)
    return float(np.mean(values[min(knobs.get("max_lag", 1), len(values) - 1) :]))


def median_text(values):
    """Thousand samples: 12.1 (11.0 to never)."""
    cells = ["never" if np.isinf(v) else f"{v / 1000:.1f}" for v in sorted(values)]
    return f"{cells[len(cells) // 2]} ({cells[0]} to {cells[-1]})"


def print_table(by_setting, settings):
    """Print a row for each setting."""
    name = next(iter(settings))
    if name not in by_setting:
        print(f"no table: there is no run of `{name}`, with which the others are compared")
        return
    first = by_setting[name]
    begin = np.mean([scores_of(run)[0] for run in first])
    end = np.mean([scores_of(run)[-1] for run in first])
    first_means = {run["knobs"]["seed"]: mean_score(run) for run in first}
    levels = [begin + share * (end - begin) for share in SHARES]
    print(f"scores at {SHARES} of the gain: {', '.join(f'{level:.3f}' for level in levels)}")
    rows = []
    for setting, setting_runs in by_setting.items():
        row = [setting, len(setting_runs)]
        row += [median_text([samples_to(run, level) for run in setting_runs]) for level in levels]
        row.append(interval_text(student([scores_of(run)[-1] for run in setting_runs]), ".3f"))
        means = {run["knobs"]["seed"]: mean_score(run) for run in setting_runs}
        row.append(f"{np.mean(list(means.values())):.3f}")
        seeds = means.keys() & first_means.keys()
        differences = [means[seed] - first_means[seed] for seed in sorted(seeds)]
        row.append(interval_text(student(differences), "+.3f") if differences else "")
        row.append(sum(map(is_unstable, setting_runs)))
        lags = [np.mean([np.mean(column(run, x)) for run in setting_runs]) for x in LAG_COLUMNS]
        # Runs whose tokens all have one lag have kept no other.
        row.append(" ".join(f"{lag:.1f}" for lag in lags if np.isfinite(lag)))
        for name, form in (("ess", ".3f"), ("ess_sample", ".2f"), ("kl_behavior", ".1e")):
            values = [aged(run, name, settings[setting]) for run in setting_runs]
            row.append(format(np.mean(values), form))
        rows.append(row)
    header = ["", "seeds", *(f"to {share:.0%}" for share in SHARES), "end", "mean", "difference"]
    table([*header, "collapsed", "lag", "ESS", "of samples", "KL"], rows)


def print_by_lag(by_setting, path):
    """Print what by_lag says of runs whose batches mix lags, beside runs that have one lag.

    If `by_lag` can tell, within one run, which tokens are too old, then the KL of a bucket is that
    of a run that has this lag alone, and it is high where such a run learns less. path: the kept
    results, of which those of the part `lags` are taken.
    """
    of_one_lag = {}
    for key, run in json.loads(path.read_text()).items():
        if match := re.fullmatch(r"(?:reinforce, )?lag (\d+), seed (\d+)", key):
            of_one_lag.setdefault(int(match[1]), {})[int(match[2])] = run
    rows = []
    for setting, setting_runs in by_setting.items():
        steps = [{"by_lag": x} for run in setting_runs for x in run["curve"].get("by_lag", [])]
        means = by_lag_means(steps)
        tokens = sum(of_lag["tokens"] for of_lag in means.values())
        for bucket, of_lag in means.items():
            row = [setting, bucket, f"{of_lag['tokens'] / tokens:.0%}"]
            row += [f"{of_lag['kl']:.4f}", f"{of_lag['ess']:.3f}"]
            # The lowest lag of each bucket is one of LAGS.
            same_lag = of_one_lag.get(lowest_lag(bucket), {})
            kls = [aged(run, "kl_behavior", run["knobs"]) for run in same_lag.values()]
            at_lag_0 = of_one_lag.get(0, {})
            seeds = same_lag.keys() & at_lag_0.keys()
            lost = [mean_score(same_lag[seed]) - mean_score(at_lag_0[seed]) for seed in seeds]
            if lost:
                row += [f"{np.mean(kls):.4f}", interval_text(student(lost), "+.3f")]
            else:
                row += ["", ""]
            rows.append(row)
    header = ["", "lags", "tokens", "KL", "ESS", "KL of that lag alone", "its difference"]
    table(header, rows)


def draw(by_setting, path, curves_of_a_lag):
    """Draw scores against the lag, at the end and on average, and some curves against samples.

    curves_of_a_lag: the curves are those of all settings with the smallest lag above 0; otherwise
    they are those of the first loss with all lags.
    """
    lag_of = {setting: int(setting.split("lag ")[1].split()[0]) for setting in by_setting}
    losses = {}
    for setting in by_setting:
        losses.setdefault(setting.rpartition(", ")[0] or "lag 0", []).append(setting)
    base = losses.pop("lag 0", [])
    shown = base + next(iter(losses.values()), [])
    title = f"{next(iter(losses), '')}, held-out score"
    if curves_of_a_lag:
        smallest = min((lag for lag in lag_of.values() if lag), default=0)
        shown = base + [setting for setting in by_setting if lag_of[setting] == smallest]
        title = f"lag {smallest}, held-out score"
    figure, axes = panels(["held-out score at the end", "mean held-out score", title])
    for i, (loss, names) in enumerate(losses.items()):
        names = base + names
        x = [max(lag_of[name], 0.5) for name in names]
        for ax, value in zip(axes, (lambda run: scores_of(run)[-1], mean_score)):
            y = [[value(run) for run in by_setting[name]] for name in names]
            ax.plot(x, [np.mean(v) for v in y], "o-", color=f"C{i}", label=loss)
            low, high = ([f(v) for v in y] for f in (min, max))
            ax.fill_between(x, low, high, color=f"C{i}", alpha=0.12)
    lags = sorted(set(lag_of.values()))
    for ax in axes[:2]:
        ax.set(xscale="log", xlabel="lag, optimizer steps")
        ax.set_xticks([max(lag, 0.5) for lag in lags], [str(lag) for lag in lags], minor=False)
        ax.minorticks_off()
        ax.legend()
    for i, name in enumerate(shown):
        curves = [(places(run, "samples"), scores_of(run)) for run in by_setting[name]]
        band(axes[2], curves, f"C{i}", name)
    axes[2].set_xlabel("samples")
    axes[2].legend()
    figure.savefig(path, dpi=80)


def draw_runs(by_setting, path):
    """Draw the curve of every run, a panel for each setting, and their mean."""
    figure, axes = panels([f"{setting}: held-out score" for setting in by_setting])
    for ax, setting_runs in zip(np.atleast_1d(axes), by_setting.values()):
        curves = [(places(run, "samples"), scores_of(run)) for run in setting_runs]
        for run, (samples, run_scores) in zip(setting_runs, curves):
            ax.plot(samples, run_scores, "o-", alpha=0.5, label=f"seed {run['knobs']['seed']}")
        ax.plot(curves[0][0], np.mean([y for _, y in curves], axis=0), "k-", lw=3, label="mean")
        ax.set(xlabel="samples", ylim=(0, 1))
        ax.legend()
    figure.savefig(path, dpi=80)


# ---- the command line


def run_missing(arguments, settings, task, path, wanted):
    """Make the runs of `wanted`, {key: knobs}, that are not kept yet; see main."""
    if task != "countup":
        base_model.make_model([task], model_of(task), 0)
    if any(PATCHES.keys() & knobs.keys() for knobs in settings.values()):
        patched_copy(WORK / "staleness", *PATCHES.values())
    slots = queue.SimpleQueue()
    for slot in range(arguments.jobs):
        slots.put(slot)
    is_pinned = arguments.jobs > 1
    measure = functools.partial(one_run, port=arguments.port, slots=slots, is_pinned=is_pinned)
    only = arguments.only or settings
    wanted = {key: knobs for key, knobs in wanted.items() if setting_of(key) in only}
    measured(path, wanted, measure, reuse=not arguments.quick, jobs=arguments.jobs)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=5, port=9000)
    p.add_argument("part", choices=PARTS)
    p.add_argument("--only", nargs="+", help="settings of the part; no others are run")
    p.add_argument("--jobs", type=int, default=2, help="runs at a time, each on a core of its own")
    arguments = p.parse_args(argv)
    settings = PARTS[arguments.part]
    if unknown := set(arguments.only or ()) - settings.keys():
        p.error(f"--only {sorted(unknown)}: no such setting; there are {list(settings)}")
    if arguments.quick:
        arguments.seeds = 1
        settings = {name: knobs | QUICK for name, knobs in settings.items()}
    [task] = {knobs["task"] for knobs in settings.values()}
    first = arguments.first_seed
    wanted = {}
    for seed in range(first, first + arguments.seeds):
        for setting, knobs in settings.items():
            model = model_of(task).relative_to(ROOT)
            wanted[f"{setting}, seed {seed}"] = knobs | dict(model=str(model), seed=seed)
    path = result_file(arguments, f"staleness-{task}")
    if not arguments.plot:
        run_missing(arguments, settings, task, path, wanted)
    results = measured(path, wanted, None)
    print(machine())
    by_setting = {}
    for key, run in results.items():
        by_setting.setdefault(setting_of(key), []).append(run)
    print_table(by_setting, settings)
    if arguments.part == "mixed":
        print_by_lag(by_setting, path)
    picture = path.with_name(f"staleness-{arguments.part}.png")
    if arguments.part == "order":
        draw_runs(by_setting, picture)
        return
    draw(by_setting, picture, curves_of_a_lag=arguments.part not in ("lags", "tail_lags"))


if __name__ == "__main__":
    main()

"""Is the pipeline faster than conventional RL? Both on the same task, model, batch, number of samples and two CPU cores, shown as in the paper's figures.

    python bench/compare.py [--lengths tail|equal] [--settings pipeline,G=4] [--seeds 3] [--quick] [--plot] [--setups] [--port 8900] [--knob value ...]
    python bench/compare.py --preset math --settings pipeline,G=8,G=32 --steps 200      # 8 GPUs: run.sh divides them, scores are the run's own evaluations

Task `tail`: answers of 5 to 397 tokens, 35 on average, most of them short; `--lengths equal` is the control, 37 tokens all. Every run is
`bash run.sh toy ...` with the real vLLM, one at a time: pipeline and G = 1, 2, 4, 8, 16 for every seed. What is done is kept in
out/bench/compare-<lengths>.json, so the same command goes on after an interruption. Conventional RL's phases take turns, so each may have both
cores: `--setups` measures which engines and threads are the fastest for either method. --quick: one seed, pipeline and G = 4, few steps. --plot: no runs.

time       wall_s of metrics.jsonl, from the moment at which sampling for the first step begins: neither start-up nor the base model's evaluation counts
score      of the checkpoints of every 10 steps, afterwards: probability that the policy gives exactly the right answer, mean over 250 held-out problems. The right answer is
           known, so that this is computed and not sampled; evaluations would also take the engines' time, which conventional RL has to spare while it trains. The
           reward of the samples trained is no yardstick: what is done first is trained first, and the long ones in progress are the hard ones
learning rate  the same for all: of 1.5e-4 and 3e-4 (6e-4 collapses) the one with which G = 1, on-policy, ends with the better score (--settings G=1 --lr 3e-4)
stable     every run ends at most DROP below its best score, and higher than it began
to n%      time until the score is n% of the way from where the runs of the stable settings begin (on average) to where the best stable conventional
           setting ends; the pipeline is compared with the stable conventional setting that is there first
cores      CPU seconds of the processes (/proc) / time. tok/core-s: tokens sampled or trained / CPU seconds of engines or trainer; that of engines
           falls when few sequences are in progress, as at the end of a generation phase

Leaves the five panels in out/bench/compare-<lengths>.png. Speeds mean something on a machine that has nothing else to do.
"""
import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, whose train.py is not the one meant
import config as cfg
import train
from preprocess import pack
from tasks import _tiny, tail

SHARES, DROP, PROBLEMS = (0.5, 0.75, 0.9), 0.1, 250
MODEL = ROOT / "out" / "models" / "tail-seed0"  # seeds differ in problems and sampling; some seeds' base models (1, for example) get nothing right
COMMON = dict(task="tail", model=str(MODEL), steps=100, batch_size=64, attempts=4, max_new_tokens=410, max_model_len=416, row_tokens=1024, lr=1.5e-4, warmup_steps=3, lr_schedule="constant",
              eval_problems=1, eval_every=0, save_every=10, keep_last=1000000)
QUICK = dict(steps=12, max_new_tokens=64)
# As many sequences in progress as a step has samples keep the data fresh; a generation phase starts all it can at once.
PIPELINE = dict(max_lag=4, engines=1, engine_threads=1, trainers=1, trainer_threads=1, concurrency=64)
CONVENTIONAL = dict(engines=1, engine_threads=1, trainers=1, trainer_threads=2, concurrency=1024)
SETTINGS = {"pipeline": PIPELINE} | {f"G={g}": CONVENTIONAL | dict(conventional_g=g) for g in (1, 2, 4, 8, 16)}
SETUPS = {f"{name}: {e} x {t} engine + {n} x {u} trainer threads": knobs | dict(engines=e, engine_threads=t, trainers=n, trainer_threads=u, concurrency=places // e)
          for name, knobs, places, divisions in (("pipeline", PIPELINE, 64, ((1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1))),
                                                 *((f"G={g}", CONVENTIONAL | dict(conventional_g=g), 1024, ((1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1), (2, 1, 1, 2))) for g in (1, 4, 8)))
          for e, t, n, u in divisions}


# ------------------------------------------------------------------------------------------------ one run

def machine():
    """Where, when and by which command this is measured, as a line."""
    cpu = next((x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), platform.machine())
    return f"{len(os.sched_getaffinity(0))} cores of {cpu}, torch {version('torch')}, {time.strftime('%Y-%m-%d')}, python {shlex.join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])}"


def kept(name, fresh=False):
    """(out/bench/<name>.json, what earlier runs left in it; fresh: nothing)."""
    file = ROOT / "out" / "bench" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file, json.loads(file.read_text()) if file.exists() and not fresh else {}


def cpu_seconds(session):
    """{process id: (engine | trainer | rest, CPU seconds so far)} of a session's living processes."""
    used = {}
    for p in Path("/proc").glob("[0-9]*"):
        try:
            fields = (p / "stat").read_text().rpartition(")")[2].split()  # from the third field on
            if int(fields[3]) == session:
                line = (p / "cmdline").read_bytes().decode(errors="replace")
                if not line:  # it has ended and waits to be reaped
                    continue
                who = "engine" if "api_server" in line or "VLLM::" in line else "trainer" if "train.py" in line else "rest"
                used[p.name] = who, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            pass
    return used


def one_run(name, knobs, seed, port, out, preset="toy"):
    """`bash run.sh <preset> --knob value ...` -> dict(curve: {key: [one number per step]}, cpu: {engine, trainer, rest: CPU seconds in that time})."""
    flags = [x for k, v in (knobs | dict(seed=seed, port=port, out=str(out), run=name, fresh=True)).items() for x in (f"--{k}", *map(str, v if isinstance(v, tuple) else [v]))]
    process = subprocess.Popen(["bash", "run.sh", preset, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                               env=os.environ | {"PIPELINE_PYTHON": os.environ.get("PIPELINE_PYTHON", sys.executable)})
    words, used, seen, ended = [], {}, [], {}  # output; see cpu_seconds; (time, {who: CPU seconds}); time at which the line of a step came

    def listen():
        for line in process.stdout:
            words.append(line)
            if m := re.search(r"\[train\] step (\d+)/", line):
                ended[int(m[1])] = time.time()
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        while process.poll() is None:
            used |= cpu_seconds(process.pid)  # those that have ended keep their last figure
            seen.append((time.time(), {who: sum(x for w, x in used.values() if w == who) for who in ("engine", "trainer", "rest")}))
            time.sleep(0.5)
    finally:
        if process.poll() is None:  # interrupted: run.sh stops its processes
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    listener.join(10)
    if process.returncode:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{''.join(words[-25:])}")
    lines = [json.loads(x) for x in Path(out, name, "metrics.jsonl").read_text().splitlines()]
    steps, begin = [x for x in lines if "step" in x], next(x["wall_s"] for x in lines if "eval" in x)
    curve = curve_of(steps, begin) | dict(scores=scores(Path(out, name), [[x["version"], float(np.mean([*x["eval"].values()]))] for x in lines if "eval" in x]))
    end = ended[len(steps)]
    spent = lambda who: float(np.diff(np.interp([end - curve["time"][-1], end], [t for t, _ in seen], [x[who] for _, x in seen]))[0])
    return dict(curve=curve, cpu={who: spent(who) for who in ("engine", "trainer", "rest")})


def curve_of(steps, begin):
    """Lines of metrics.jsonl -> columns; time: seconds at each step's end since `begin`, the first evaluation, before which nothing counts."""
    ends = np.array([x["wall_s"] for x in steps])
    curve = {k: [x[k] for x in steps] for k in ("samples", "reward", "lag_max", "lag_mean", "ess", "tokens", "sync_s")}
    waits = [x["wait_data_s"] for x in steps]
    waits[0] = min(waits[0], ends[0] - begin)
    return curve | dict(time=(ends - begin).tolist(), wait_data_s=waits, sampled=[sum(t["tokens"] * t["samples"] for t in x["by_task"].values()) for x in steps])


def success(model, tokenizer, problems):
    """Mean probability that the model, at temperature 1, answers exactly right and ends there."""
    total = 0.0
    texts = [[tokenizer(p[k])["input_ids"] for k in ("prompt", "answer")] for p in problems]
    rows = [(a + b + [tokenizer.eos_token_id], len(a)) for a, b in texts]
    with torch.inference_mode():
        for row in pack([len(ids) for ids, _ in rows], 4096):
            ids, positions = [t for i in row for t in rows[i][0]], [t for i in row for t in range(len(rows[i][0]))]
            parts = train.token_logprobs(model, torch.tensor(ids), torch.tensor(positions), 1.0)[0].split([len(rows[i][0]) for i in row])
            total += sum(float(x[rows[i][1]:].sum().exp()) for i, x in zip(row, parts))
    return total / len(problems)


def scores(run_dir, online):
    """[[version, score]] of the base model and of a run's checkpoints, which go with it; of a task other than tail, the run's own evaluations, `online`."""
    c = cfg.load(run_dir)
    if c.task != "tail":
        return online
    problems, tokenizer = tail.problems("test", c.seed, c.eval_data)[:PROBLEMS], AutoTokenizer.from_pretrained(c.model)
    models = [(0, c.model), *((int(p.name[5:]), p) for p in sorted(run_dir.glob("checkpoints/step_*")))]
    found = [[version, success(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer, problems)] for version, path in models]
    shutil.rmtree(run_dir / "checkpoints")
    return found


# ------------------------------------------------------------------------------------------------ what is made of them

def scored(curve):
    """(versions, times, scores) of the versions that have a score."""
    versions, found = map(np.array, zip(*curve["scores"]))
    return versions, np.array([0.0, *curve["time"]])[versions], found


def time_to(curve, level):
    """Seconds until the score first reaches `level`, straight lines between checkpoints; None: never."""
    _, t, y = scored(curve)
    k = next((k for k, x in enumerate(y) if x >= level), None)
    return None if k is None else float(t[0] if k == 0 else t[k - 1] + (t[k] - t[k - 1]) * (level - y[k - 1]) / (y[k] - y[k - 1]))


def stable(curves):
    """Did all runs of a setting end no more than DROP below their best, and higher than they began?"""
    return all(y[-1] >= y.max() - DROP and y[-1] > y[0] for y in (scored(c)[2] for c in curves))


def fixed_scores(runs):
    """{setting: [run]} -> the scores that times are compared at, one per share of SHARES, from the runs of the stable settings (of all, if there is none)."""
    chosen = {s: [scored(x["curve"])[2] for x in r] for s, r in runs.items() if stable([x["curve"] for x in r])} or {s: [scored(x["curve"])[2] for x in r] for s, r in runs.items()}
    begin = np.mean([y[0] for r in chosen.values() for y in r])
    end = max(np.mean([y[-1] for y in r]) for s, r in chosen.items() if s != "pipeline" or len(chosen) == 1)
    return [float(begin + share * (end - begin)) for share in SHARES]


def row_of(runs, levels):
    """One line of the table from the runs of a setting, one per seed: means; times: of every level those of every seed, None where it is never reached; time: their mean if all are there."""
    mean = lambda f: float(np.mean([f(r["curve"], r["cpu"]) for r in runs]))
    times = [[time_to(r["curve"], level) for r in runs] for level in levels]
    return dict(times=times, time=[None if None in t else float(np.mean(t)) for t in times],
                stable=stable([r["curve"] for r in runs]), begin=mean(lambda c, _: scored(c)[2][0]), final=mean(lambda c, _: scored(c)[2][-1]), reward=mean(lambda c, _: np.mean(c["reward"][-20:])), whole=mean(lambda c, _: c["time"][-1]),
                tokens_s=mean(lambda c, _: sum(c["sampled"]) / c["time"][-1]), lag_max=mean(lambda c, _: max(c["lag_max"])), lag_mean=mean(lambda c, _: np.mean(c["lag_mean"])),
                ess=mean(lambda c, _: np.mean(c["ess"])), waits=mean(lambda c, _: sum(c["wait_data_s"]) / c["time"][-1]), sends=mean(lambda c, _: sum(c["sync_s"]) / c["time"][-1]),
                engine_cores=mean(lambda c, u: u["engine"] / c["time"][-1]), trainer_cores=mean(lambda c, u: u["trainer"] / c["time"][-1]), rest_cores=mean(lambda c, u: u["rest"] / c["time"][-1]),
                engine_tok=mean(lambda c, u: sum(c["sampled"]) / max(u["engine"], 1e-9)), trainer_tok=mean(lambda c, u: sum(c["tokens"]) / max(u["trainer"], 1e-9)))


def summary(runs):
    """{setting: [run per seed]} -> dict(scores, rows, ratios); ratios: for every score (best stable G, its time / the pipeline's, the same seed by seed), None if one never gets there."""
    levels = fixed_scores(runs)
    rows, ratios = {s: row_of(r, levels) for s, r in runs.items()}, []
    for k in range(len(levels)):
        others = {s: row["time"][k] for s, row in rows.items() if s != "pipeline" and row["stable"] and row["time"][k] is not None}
        best, ours = min(others, key=others.get, default=None), rows.get("pipeline", {"time": [None] * len(levels)})["time"][k]
        ratios.append((best, others[best] / ours, [b / a for a, b in zip(rows["pipeline"]["times"][k], rows[best]["times"][k])]) if best and ours else None)
    return dict(scores=levels, rows=rows, ratios=ratios)


def words(found, lengths):
    """The table and what it says, as printable lines."""
    yield f"lengths {lengths}; seconds to a held-out score of " + ", ".join(f"{y:.3f} ({100 * share:.0f}%)" for share, y in zip(SHARES, found["scores"])) + ", mean over seeds (lowest-highest)"
    yield (f"{'':<10}" + "".join(f"{f'to {100 * share:.0f}%':>18}" for share in SHARES) + f" {'held-out score':>16} {'reward':>6} {'stable':>6} {'s, all':>7} {'tok/s':>6} {'lag max':>7} {'mean':>5} {'ESS':>5} | trainer {'waits':>6} {'sends':>6} | "
           f"cores: {'engine':>6} {'trainer':>7} {'rest':>5} | tok/core-s: {'engine':>6} {'trainer':>7}")
    for s, r in found["rows"].items():
        times = "".join(f"{'-' if mean is None else f'{mean:.1f} ({min(t):.1f}-{max(t):.1f})':>18}" for mean, t in zip(r["time"], r["times"]))
        yield (f"{s:<10}{times} {r['begin']:>6.3f} -> {r['final']:>6.3f} {r['reward']:>6.3f} {'yes' if r['stable'] else 'no':>6} {r['whole']:>7.1f} {r['tokens_s']:>6.0f} {r['lag_max']:>7.1f} {r['lag_mean']:>5.2f} {r['ess']:>5.3f} | "
               f"{'':7} {100 * r['waits']:>5.0f}% {100 * r['sends']:>5.0f}% | {'':6} {r['engine_cores']:>6.2f} {r['trainer_cores']:>7.2f} {r['rest_cores']:>5.2f} | {'':11} {r['engine_tok']:>6.0f} {r['trainer_tok']:>7.0f}")
    for share, ratio in zip(SHARES, found["ratios"]):
        yield f"to {100 * share:.0f}%: " + ("the pipeline, or every stable conventional setting, has runs that never get there" if ratio is None else
               f"the pipeline is {ratio[1]:.2f} times as fast as the best stable conventional setting ({ratio[0]}); seed by seed {' '.join(f'{x:.2f}' for x in ratio[2])}")


def draw(runs, lengths, path):
    """The paper's five panels: mean over seeds, and a band from the lowest to the highest."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 5, figsize=(26, 5), constrained_layout=True)
    panels = [("time", "score", "held-out score against time"), ("samples", "score", "held-out score against samples"), ("time", "samples", "samples against time"),
              ("samples", "lag_max", "max lag, versions"), ("samples", "ess", "effective sample size")]
    for ax, (x, y, title) in zip(axes, panels):
        for i, (setting, found) in enumerate(runs.items()):
            curves = [r["curve"] for r in found]
            series = [(scored(c)[2] if y == "score" else c[y]) for c in curves]
            places = [np.array([0, *c[x]])[scored(c)[0]] if y == "score" else c[x] for c in curves]
            grid = np.linspace(max(p[0] for p in places), min(p[-1] for p in places), 200)
            lines = np.array([np.interp(grid, p, line) for p, line in zip(places, series)])
            color = "k" if setting == "pipeline" else plt.cm.viridis(i / len(runs))
            ax.plot(grid, lines.mean(0), color=color, label=setting, linewidth=2.2 if setting == "pipeline" else 1.3)
            ax.fill_between(grid, lines.min(0), lines.max(0), color=color, alpha=0.12)
        ax.set(title=title, xlabel="seconds" if x == "time" else "samples")
        ax.grid(alpha=0.3)
    for y in fixed_scores(runs):
        axes[0].axhline(y, color="C3", linestyle=":")
    axes[0].legend(loc="lower right")
    figure.suptitle(f"pipeline and conventional RL, lengths {lengths}, {max(map(len, runs.values()))} seeds")
    figure.savefig(path, dpi=80)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Any other flag is a knob of run.sh, for all runs.", allow_abbrev=False)
    p.add_argument("--lengths", choices=("tail", "equal"), default="tail")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--settings", default="", help="of " + ", ".join(SETTINGS) + " (or of those of --setups), with commas between them; empty: all")
    p.add_argument("--port", type=int, default=8900)
    p.add_argument("--quick", action="store_true", help="one seed, pipeline and G = 4, few steps")
    p.add_argument("--setups", action="store_true", help="samples/s of every division of engines and threads, one seed, few steps")
    p.add_argument("--plot", action="store_true", help="no runs: table and figure of those that are there")
    p.add_argument("--preset", default="toy", help="another preset of run.sh than the one the study is made of; its task, its evaluations, its division of the machine")
    a, more = p.parse_known_args(argv)
    known = dict(SETUPS if a.setups else SETTINGS)
    known |= {s: CONVENTIONAL | dict(conventional_g=int(s[2:])) for s in a.settings.split(",") if re.fullmatch("G=[1-9][0-9]*", s)}
    names = a.settings.split(",") if a.settings else ["pipeline", "G=4"] if a.quick else list(known)
    if unknown := set(names) - set(known):
        p.error(f"--settings {','.join(unknown)}: there are {', '.join(known)}, and G=n")
    settings = {s: known[s] for s in names}
    seeds, common = 1 if a.quick or a.setups else a.seeds, COMMON | (dict(steps=48) if a.setups else {})
    if a.preset != "toy":
        settings, common = {s: {k: v for k, v in knobs.items() if k == "conventional_g"} for s, knobs in settings.items()}, {}
    if a.lengths == "equal":
        common |= dict(train_data="equal", eval_data="equal")
    if len(more) % 2 or not all(k.startswith("--") for k in more[::2]):
        p.error(f"{' '.join(more)}: what is not listed above goes to run.sh, as --knob value")
    common |= {k.removeprefix("--"): v for k, v in zip(more[::2], more[1::2])}
    name = f"compare-{a.lengths if a.preset == 'toy' else a.preset}" + "".join(f"-{k[2:]}-{v}" for k, v in zip(more[::2], more[1::2])) + "-quick" * a.quick + "-setups" * a.setups
    file, done = kept(name.replace("/", "-"), fresh=a.quick)  # "setting, seed n" -> {knobs, machine, curve, cpu}
    common |= QUICK if a.quick else {}
    if a.preset == "toy":
        _tiny.make_model(["tail"], MODEL, 0)
    todo = [(s, seed) for seed in range(seeds) for s in settings]  # seed by seed: what is there after an interruption can be compared
    for s, seed in todo:
        key, knobs = f"{s}, seed {seed}", common | settings[s]
        if a.plot or done.get(key, {}).get("knobs") == knobs:  # runs with other knobs than today's are done again
            continue
        begun = time.time()
        done[key] = dict(knobs=knobs, machine=machine()) | one_run(re.sub(r"\W+", "-", f"{name}-{s}-seed{seed}"), knobs, seed, a.port, file.parent / "compare-runs", a.preset)
        file.write_text(json.dumps(done))
        curve = done[key]["curve"]
        print(f"{key}: {curve['samples'][-1]} samples in {curve['time'][-1]:.1f} s, {curve['samples'][-1] / curve['time'][-1]:.0f} samples/s, score {scored(curve)[2][-1]:.3f}, "
              f"{time.time() - begun:.0f} s with start-up", flush=True)
    runs = {s: [done[k] for seed in range(seeds) if (k := f"{s}, seed {seed}") in done] for s in settings}
    runs = {s: r for s, r in runs.items() if r}
    if not runs:
        p.error(f"{file} has no runs of these settings")
    if a.setups:
        for s, (run,) in sorted(runs.items(), key=lambda x: x[1][0]["curve"]["time"][-1]):
            print(f"{s:<45} {run['curve']['samples'][-1] / run['curve']['time'][-1]:>7.0f} samples/s")
        return
    found = summary(runs)
    print("\n".join([machine(), *words(found, a.lengths)]))
    draw(runs, a.lengths, file.with_suffix(".png"))
    print(f"figure {file.with_suffix('.png').relative_to(ROOT)}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench/compare.py: terminated; the same command goes on with the runs that are missing"))
    main()

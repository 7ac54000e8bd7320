"""What a run says of itself: metrics.jsonl and the live line, Weights & Biases, its report, its last words."""

import json
import subprocess
import sys
import traceback
from collections import deque
from pathlib import Path

import numpy as np

from config import ROOT

# steps whose pace tells when the run will end
RECENT = 10


def short(value):
    """Floats to six digits, also within dicts."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    return value


def last_words(kind, error, trace):
    """As a stage's sys.excepthook: the error also as a line on the terminal, for logs on a full disk."""
    sys.__excepthook__(kind, error, trace)
    line = " ".join("".join(traceback.format_exception_only(error)).split())
    print(line[:1000], flush=True)


def keep_lines(path, wanted):
    """Drop the lines of a .jsonl file that are not wanted, and a last one that a crash has cut short."""
    kept = []
    for text in path.read_text().splitlines(keepends=True):
        if text.endswith("\n") and wanted(json.loads(text)):
            kept.append(text)
    # all of it is there, or all as it was
    path.with_suffix(".tmp").write_text("".join(kept))
    path.with_suffix(".tmp").replace(path)


def came_before(line, version):
    """Was a line of metrics.jsonl written before the checkpoint of this version?"""
    return line["version"] < version or (line["version"] == version and "step" in line)


class NoWandb:
    """Stands for Weights & Biases where it is off."""

    def log(self, values):
        pass

    def finish(self):
        pass


def open_wandb(config, run_dir):
    """A run of Weights & Biases, or what stands for it."""
    if config.wandb == "off":
        return NoWandb()
    import wandb

    log = wandb.init(
        project="pipeline-rl",
        name=config.run,
        # a run that continues goes on with its curves
        id=config.run_id,
        resume="allow",
        config=vars(config),
        mode=config.wandb,
        dir=run_dir,
    )
    # all is drawn over the version: evaluations come late, a continued run does some steps again,
    # and wandb's own count of lines knows of neither
    log.define_metric("version")
    log.define_metric("*", step_metric="version")
    return log


class Report:
    """Has report.html drawn every `report_every` steps, by a process of its own that nothing waits for."""

    def __init__(self, config, run_dir):
        self.every = config.report_every
        command = [
            "nice",
            "-n",
            "19",
            sys.executable,
            ROOT / "tools" / "report.py",
            run_dir,
            "--quiet",
        ]
        self.command = list(map(str, command))
        self.process = None

    def look(self, version):
        """Is it time, and has the last one ended?"""
        if not self.every or version % self.every:
            return
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL)


class MetricsLog:
    """Appends to out/<run>/metrics.jsonl, on rank 0; version: what a continued run goes on from."""

    def __init__(self, config, run_dir, version, rank=0):
        self.rank = rank
        self.highest_mismatch = config.highest_mismatch
        if rank != 0:
            return
        path = Path(run_dir, "metrics.jsonl")
        if path.exists():
            # a continued run does again what came after the checkpoint
            keep_lines(path, lambda line: came_before(line, version))
        self.file = open(path, "a")
        self.wandb = open_wandb(config, run_dir)
        self.report = Report(config, run_dir)
        self.seconds = deque(maxlen=RECENT)

    def step(self, config, state, metrics, record, times):
        """Write the step's metrics, and one line for the terminal.

        record: the last micro-batch; times: seconds of the step and of its parts.
        """
        self.seconds.append(times["step_s"])
        # the first step waits for the first rollouts
        eta = (config.steps - state["version"]) * np.median(self.seconds)
        line = {"step": state["version"]}
        line |= {k: state[k] for k in ("version", "samples", "wall_s", "dropped", "skipped")}
        line |= metrics | times
        line |= {k: record[k] for k in ("gen_tok_s", "gen_idle", "by_task", "problems", "drops")}
        line["train_tok_s"] = metrics["tokens"] / times["step_s"]
        self._write(line)
        # every problem would be a curve of its own
        self.wandb.log({k: v for k, v in line.items() if k not in ("problems", "drops")})
        self.report.look(state["version"])
        wait = 100 * times["wait_data_s"] / times["step_s"]
        # a step may have no sample of lag 0
        mismatch = "-" if metrics["mismatch"] is None else f"{metrics['mismatch']:.1e}"
        print(
            f"step {state['version']}/{config.steps} | reward {metrics['reward']:.3f} | ess {metrics['ess']:.3f} | "
            f"lag {metrics['lag_mean']:.1f}/{metrics['lag_max']} | mismatch {mismatch} | "
            f"{line['train_tok_s'] / 1000:.1f}k tok/s | wait {wait:.0f}% | empty {line['gen_idle']:.0%} | eta {eta / 60:.1f}m",
            flush=True,
        )

    def alarms(self, version, alarms):
        """Rank 0: say what lasts too long, and write it down."""
        if self.rank != 0:
            return
        for words in alarms:
            print(f"train: ALARM: {words}", flush=True)
            self._write({"alarm": words, "version": version})

    def attribution(self, version, parts):
        """Write down what the distance between behaviour and trained policy is made of."""
        line = {"attribution": parts, "version": version}
        self._write(line)
        self.wandb.log(line)
        known = {name: part for name, part in parts.items() if part}
        said = [f"{name} {part['nats']:.1e} (KL {part['kl']:.1e})" for name, part in known.items()]
        words = " | ".join(said) or "no engine had this version in time"
        print(f"attribution: version {version} | nats a token: {words}", flush=True)
        numerics = parts.get("numerics")
        if numerics and not numerics["nats"] <= self.highest_mismatch:
            words = f"engines and trainer differ by {numerics['nats']:.1e} nats a token at equal weights: see `mismatch`"
            self.alarms(version, [words])

    def evaluations(self, lines, run_start):
        """Write evaluations of the actor; they come late, so that they have no step of their own.

        run_start: time.monotonic() at which the run's clock was 0.
        """
        for line in lines:
            of_run = {k: v for k, v in line.items() if k != "run_id"}
            self._evaluation(of_run | {"wall_s": line["wall_s"] - run_start})

    def _evaluation(self, line):
        self._write(line)
        scores = {f"eval/{name}": score for name, score in line["eval"].items()}
        self.wandb.log(scores | {"version": line["version"]})
        scores = " | ".join(f"{name} {score:.3f}" for name, score in line["eval"].items())
        print(
            f"eval: version {line['version']} | {scores} | {line['problems']} held-out problems",
            flush=True,
        )

    def _write(self, line):
        self.file.write(json.dumps(short(line)) + "\n")
        self.file.flush()

    def close(self):
        self.file.close()
        self.wandb.finish()

"""What a run says of itself: metrics.jsonl and the live line, samples.jsonl, Weights & Biases, its last words."""

import json
import sys
import traceback
from pathlib import Path

import numpy as np

from config import OUTCOMES


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


class MetricsLog:
    """Appends to out/<run>/metrics.jsonl, on rank 0; version: what a continued run goes on from."""

    def __init__(self, config, run_dir, version, rank=0):
        self.rank = rank
        self.highest_mismatch = config.highest_mismatch
        if rank != 0:
            return
        path = Path(run_dir, "metrics.jsonl")
        if path.exists():
            self._keep_history(path, version)
        self.file = open(path, "a")
        self.wandb = open_wandb(config, run_dir)

    def _keep_history(self, path, version):
        """Drop what came after the checkpoint: a continued run does it again."""
        kept = []
        for text in path.read_text().splitlines(keepends=True):
            # a crash may have cut the last one short
            if not text.endswith("\n"):
                continue
            line = json.loads(text)
            if line["version"] < version or (line["version"] == version and "step" in line):
                kept.append(text)
        # all of the curves are there, or all as they were
        path.with_suffix(".tmp").write_text("".join(kept))
        path.with_suffix(".tmp").replace(path)

    def step(self, config, state, metrics, record, times, eta):
        """Write the step's metrics, and one line for the terminal.

        record: the last micro-batch; times: seconds of the step and of its parts; eta: seconds to
        the end of the run.
        """
        line = {"step": state["version"]}
        line |= {k: state[k] for k in ("version", "samples", "wall_s", "dropped", "skipped")}
        line |= metrics | times
        line |= {k: record[k] for k in ("gen_tok_s", "gen_idle", "by_task", "problems", "drops")}
        line["train_tok_s"] = metrics["tokens"] / times["step_s"]
        self._write(line)
        # every problem would be a curve of its own
        self.wandb.log({k: v for k, v in line.items() if k not in ("problems", "drops")})
        wait = 100 * times["wait_data_s"] / times["step_s"]
        # a step may have no sample of lag 0
        mismatch = "-" if metrics["mismatch"] is None else f"{metrics['mismatch']:.1e}"
        print(
            f"step {state['version']}/{config.steps} | reward {metrics['reward']:.3f} | ess {metrics['ess']:.3f} | "
            f"lag {metrics['lag_mean']:.1f}/{metrics['lag_max']} | mismatch {mismatch} | "
            f"{line['train_tok_s'] / 1000:.1f}k tok/s | wait {wait:.0f}% | idle {line['gen_idle']:.0%} | eta {eta / 60:.1f}m",
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


class SamplesLog:
    """Decoded rollouts in out/<run>/samples.jsonl, for people; `python tools/show.py out/<run>`."""

    def __init__(self, config, run_dir, tokenizer):
        self.limit = config.samples_logged
        self.tokenizer = tokenizer
        self.file = open(Path(run_dir, "samples.jsonl"), "a")
        # of this version so many have been written
        self.version = -1
        self.written = 0

    def write(self, version, index, task, problem, sample):
        """Write a sample of draw `index`, unless there are enough of this version."""
        if version != self.version:
            self.version = version
            self.written = 0
        if self.written == self.limit:
            return
        self.written += 1
        versions = sample["versions"]
        sampled = versions[sample["mask"]]
        # the prompt and the environment's texts are spans, too, of version -1
        starts = np.flatnonzero(np.diff(versions, prepend=-2)).tolist()
        spans = []
        for start, end in zip(starts, [*starts[1:], len(versions)]):
            text = self.tokenizer.decode(sample["tokens"][start:end].tolist())
            spans.append([int(versions[start]), text])
        changes = np.flatnonzero(np.diff(sampled, prepend=-1)).tolist()
        line = dict(
            version=version,
            index=index,
            task=task,
            prompt=problem["prompt"],
            completion=sample["text"],
            reward=sample["reward"],
            outcome=OUTCOMES[sample["outcome"]],
            finished=sample["finished"],
            answer=problem.get("answer"),
            # [version, first sampled token of it]
            versions=[[int(sampled[k]), k] for k in changes],
            spans=spans,
        )
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

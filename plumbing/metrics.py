"""The records of a run: metrics.jsonl, the line per step, Weights & Biases, decoded samples.

A metric is declared where it is computed (train.metric_sums), as (function, sum, ...): the sums add
up over micro-batches and ranks, and the function computes the metric from them.
"""

import json
import time
import zlib
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from config import OUTCOMES, task_weights
from plumbing.alarms import Alarms
from plumbing.problems import held_out_scores
from plumbing.queues import read_json
from plumbing.samples import split


def largest(x):
    """The function of a metric whose values are not added up: the largest one counts."""
    return int(x)


# ---- metrics by lag, and by length


def buckets_of(lowest):
    """The names of buckets with these lowest values: [0, 1, 2, 4] -> ["0", "1", "2-3", "4+"]."""
    names = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in zip(lowest, lowest[1:])]
    return [*names, f"{lowest[-1]}+"]


# the lowest lag of each bucket of by_lag: 0, 1, 2-3, 4-7, ..., 128+
LAGS = (0, *(2**k for k in range(8)))
# the lowest length of each bucket of `lengths`: all lengths up to 7, then four in every doubling
LENGTHS = (0, *sorted({round(2 ** (k / 4)) for k in range(81)}))


def lag_buckets(lags):
    """The bucket of LAGS that each lag lies in: [T] -> [T]."""
    return np.maximum(np.searchsorted(LAGS, lags, side="right") - 1, 0)


def reduce_samples(ufunc, values, lengths):
    """Reduce the values [T] of each sample by a ufunc of numpy: lengths [S] -> results [S].

    ufunc: np.add or np.minimum. Every sample has at least one token.
    """
    return ufunc.reduceat(values, np.cumsum(lengths) - lengths)


def oldest_lags(batch, version):
    """The lag of the oldest sampled token of each sample of a micro-batch: [S]."""
    versions = np.where(batch["versions"] >= 0, batch["versions"], version)
    return version - reduce_samples(np.minimum, versions, batch["lengths"])


def sums_by_lag(buckets, mask, loss, kl, log_ratio, w, clipped):
    """The sums over the tokens of each bucket of lags, all [T] -> a list of [number of buckets].

    mask: the tokens that count. The sums are those of `by_lag`.
    """
    columns = (mask, loss, kl, log_ratio, w, w * w, clipped)
    zeros = loss.new_zeros(len(LAGS))
    return [zeros.index_add(0, buckets, (column * mask).to(zeros.dtype)) for column in columns]


def by_lag(ess, tokens, loss, kl, log_ratio, w, w2, clipped):
    """{bucket of lags: {tokens, and the means of the others per token}}, for buckets with tokens.

    ess: the function train.ess; under this name the table has the effective sample size within the
    bucket.
    """
    table = {}
    for i, name in enumerate(buckets_of(LAGS)):
        n = tokens[i]
        if n:
            table[name] = dict(
                tokens=int(n),
                loss=loss[i] / n,
                kl=kl[i] / n,
                log_ratio=log_ratio[i] / n,
                ess=ess(w[i], w2[i], n),
                clip_frac=clipped[i] / n,
            )
    return table


def length_counts(batch):
    """The number of samples of a micro-batch in each bucket of LENGTHS, by their sampled tokens.

    batch: a record of plumbing/samples.py. Its fillers do not count.
    """
    is_sampled = (batch["versions"] >= 0).astype(np.int64)
    sampled = reduce_samples(np.add, is_sampled, batch["lengths"])
    buckets = np.searchsorted(LENGTHS, sampled[batch["outcome"] >= 0], side="right") - 1
    return np.bincount(buckets, minlength=len(LENGTHS))


def lengths_table(counts):
    """{bucket of lengths: number of samples}, for buckets that have samples."""
    return {name: n for name, n in zip(buckets_of(LENGTHS), counts) if n}


def length_p90(counts):
    """Nine tenths of the samples have at most this number of sampled tokens.

    It is the largest length of a bucket of LENGTHS, which from 8 tokens on can be up to a fifth
    more than the exact quantile.
    """
    highest = [following - 1 for following in LENGTHS[1:]] + [LENGTHS[-1]]
    reached = np.cumsum(counts) >= 0.9 * sum(counts)
    return highest[int(reached.argmax())]


class Sums:
    """Adds up the metrics of a step over micro-batches and ranks."""

    def __init__(self):
        self.metrics = {}

    def add(self, metrics):
        """Add the metrics of one micro-batch: {name: (function, tensor, ...)}."""
        for name, (function, *parts) in metrics.items():
            # Sums in float64 stay in float64.
            parts = [x.detach() for x in parts]
            parts = [x if x.dtype == torch.float64 else x.float() for x in parts]
            if name in self.metrics:
                add = torch.maximum if function is largest else torch.add
                parts = [add(x, y) for x, y in zip(parts, self.metrics[name][1])]
            self.metrics[name] = (function, parts)

    def reduce(self):
        """{name: value} over all ranks. Collective.

        There are two collectives for all metrics, one for the sums and one for the maxima; several
        ranks first compare the names in another one. Each of them needs one copy from the device.
        Raises RuntimeError if ranks have different metrics.
        """
        self._check_names()
        values = {}
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            chosen = {}
            for name, (function, parts) in self.metrics.items():
                if (function is largest) == (op == dist.ReduceOp.MAX):
                    chosen[name] = (function, parts)
            parts = [part for _, parts in chosen.values() for part in parts]
            if not parts:
                continue
            numbers = torch.cat([part.double().flatten() for part in parts])
            if dist.is_initialized():
                dist.all_reduce(numbers, op=op)
            reduced = iter(numbers.cpu().split([part.numel() for part in parts]))
            for name, (function, parts) in chosen.items():
                values[name] = function(*(next(reduced).view_as(x).tolist() for x in parts))
        return {name: values[name] for name in self.metrics}

    def _check_names(self):
        """Raise RuntimeError unless all ranks have metrics of the same names and sizes. Collective.

        Otherwise numbers would be added to those of other metrics, or ranks would wait for ever.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1 or not self.metrics:
            return
        sizes = {name: [x.numel() for x in parts] for name, (_, parts) in self.metrics.items()}
        checksum = zlib.crc32(repr(sizes).encode())
        device = next(parts[0].device for _, parts in self.metrics.values() if parts)
        # The largest checksum of all ranks, and the smallest one times -1.
        extremes = torch.tensor([checksum, -checksum], dtype=torch.float64, device=device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.tolist() != [checksum, -checksum]:
            raise RuntimeError(
                "train: the ranks have different metrics; those of this rank and their sizes are "
                f"{sizes}. The function metric_sums of train.py must return the same names, with "
                "the same shapes, in every micro-batch of every rank"
            )


def open_lines(path, version, read=lambda line: None):
    """Open a .jsonl file to append to.

    Lines that were written after the checkpoint of this version are removed: a run that continues
    from it does those steps again. So is a last line that is not whole. read: it is called with
    each line that stays, as a dict, in their order.
    """
    path.touch()
    kept = []
    for line in path.read_text().splitlines(True):
        values = json.loads(line) if line.endswith("\n") else {"step": float("inf")}
        # An evaluation or a mismatch is written after the checkpoint of its version, so its line
        # is treated as one of the next step.
        if values.get("step", values.get("version", 0) + 1) <= version:
            kept.append(line)
            read(values)
    # A crash leaves either the old file or the new one.
    path.with_suffix(".tmp").write_text("".join(kept))
    path.with_suffix(".tmp").replace(path)
    return open(path, "a", buffering=1)


def open_wandb(config, run_dir):
    """A run of Weights & Biases; with `--wandb off`, an object that takes the same calls."""
    if config.wandb == "off":
        return SimpleNamespace(log=lambda values: None, finish=lambda: None)
    import wandb

    log = wandb.init(
        project="pipeline-rl",
        name=config.run,
        id=config.run_id,
        # A run that continues goes on with its curves.
        resume="allow",
        config=vars(config),
        mode=config.wandb,
        dir=run_dir,
    )
    # Every curve is drawn over the version: evaluations come late and a continued run does some
    # steps again, which wandb's own count of lines does not know.
    log.define_metric("version")
    log.define_metric("*", step_metric="version")
    return log


class MetricsLog:
    """Writes the metrics and samples of a run, on rank 0; on other ranks its methods do nothing.

    state: the state from which the run continues (checkpoints.NEW_RUN for a new one).
    """

    def __init__(self, config, run_dir, state, rank):
        self.config = config
        self.rank = rank
        self.run_start = time.monotonic() - state["wall_s"]
        if rank != 0:
            return
        self.tasks = list(task_weights(config.task))
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        self.pace_file = Path(run_dir, "queues", "pace.json")
        # In a continued run the alarms go on from where they stood.
        self.alarms = Alarms()
        self.file = open_lines(Path(run_dir, "metrics.jsonl"), state["version"], self.alarms.read)
        self.samples_file = open_lines(Path(run_dir, "samples.jsonl"), state["version"])
        self.wandb = open_wandb(config, run_dir)
        # the seconds that each of the newest steps took, for the eta
        self.seconds = deque(maxlen=10)
        # the seconds that saving a checkpoint took in this step
        self.save_s = 0.0
        self.step_start = time.monotonic()
        self.samples_left = config.samples_logged

    def print_alarms(self, line):
        """Print the alarms that a line of metrics.jsonl raises."""
        for text in self.alarms.read(line):
            print(f"ALARM: version {line['version']}: {text}", flush=True)

    def wall_s(self):
        """The seconds that the run has taken, without the times when it was stopped."""
        return time.monotonic() - self.run_start

    def step(self, state, metrics, reader, times):
        """Write the step's metrics, and one line for the terminal.

        reader: the plumbing.reader.Reader that has just read the step. times: the seconds of the
        newest weight update (Sender.take_timing).
        """
        if self.rank != 0:
            return
        now = time.monotonic()
        step_s = now - self.step_start
        self.seconds.append(step_s)
        times = times | dict(step_s=step_s, wait_data_s=reader.waited, save_s=self.save_s)
        self.step_start = now
        self.save_s = 0.0
        self.samples_left = self.config.samples_logged
        record = reader.last
        # The median, as the first step waits for the first samples.
        eta = (self.config.steps - state["version"]) * np.median(self.seconds)
        line = {"step": state["version"]}
        line |= {k: state[k] for k in ("version", "samples", "wall_s", "dropped", "skipped")}
        line |= {k: v for k, v in metrics.items() if k != "samples"} | times
        # The actor publishes the engines' pace; it may not have measured one yet.
        pace = read_json(self.pace_file)
        line |= {name: pace.get(name, 0.0) for name in ("gen_tok_s", "gen_idle")}
        line |= {name: record[name] for name in ("by_task", "problems", "drops")}
        line["train_tok_s"] = metrics["tokens"] / step_s
        self._write(line)
        # Every problem would be a curve of its own, and so would every length.
        without = ("problems", "drops", "lengths")
        self.wandb.log({k: v for k, v in line.items() if k not in without})
        # A step may have no sample of lag 0.
        mismatch = "-" if metrics["mismatch"] is None else f"{metrics['mismatch']:.1e}"
        print(
            f"step {state['version']}/{self.config.steps} | "
            f"reward {metrics['reward']:.3f} | ess {metrics['ess']:.3f} | "
            f"lag {metrics['lag_mean']:.1f}/{metrics['lag_max']} | mismatch {mismatch} | "
            f"{line['train_tok_s'] / 1000:.1f}k tok/s | "
            f"wait_data {times['wait_data_s'] / step_s:.0%} | "
            f"gen_idle {line['gen_idle']:.0%} | eta {eta / 60:.1f}m",
            flush=True,
        )
        self.print_alarms(line)

    def mismatch(self, version, measured):
        """Write by how much engines and trainer differ at this version.

        measured: {mismatch, tokens}, or {} if it was not measured.
        """
        if measured:
            self._write(measured | {"version": version})
            self.wandb.log(measured | {"version": version})

    def evaluations(self, records):
        """Write the actor's evaluations; they come late and do not belong to a step.

        The time in a line is that of its arrival: the actor may run on another node, whose clock
        differs from this one.
        """
        for record in records:
            line = {k: v for k, v in record.items() if k != "run_id"}
            line["wall_s"] = self.wall_s()
            self._write(line)
            scores = {f"eval/{name}": score for name, score in line["eval"].items()}
            scores |= {f"eval_reward/{name}": x for name, x in line.get("eval_reward", {}).items()}
            self.wandb.log(scores | {"version": line["version"]})
            print(
                f"eval: version {line['version']} | {held_out_scores(line)} | "
                f"{line['problems']} held-out problems",
                flush=True,
            )
            self.print_alarms(line)

    def samples(self, batch, logprobs, version):
        """Write the first `samples_logged` samples of a step, decoded, to samples.jsonl.

        logprobs [T]: the trainer's, on its device. Only rank 0's micro-batches are written.
        """
        if self.rank != 0 or not self.samples_left:
            return
        log_ratios = logprobs.cpu().numpy() - batch["behavior_logprobs"]
        log_ratios = np.split(log_ratios, np.cumsum(batch["lengths"]))
        for sample, own_ratios in zip(split(batch), log_ratios):
            if sample["outcome"] < 0 or not self.samples_left:
                continue
            self.samples_left -= 1
            tokens = sample["tokens"]
            versions = sample["versions"]
            segment = sample["segment"]
            # The mask also leaves out tokens that were sampled, with --overlong_mask.
            is_sampled = versions >= 0
            first = int(is_sampled.argmax())
            # If several tokens make up one character, each of them is decoded to a mark of its own.
            texts = self.tokenizer.batch_decode(tokens[:, None])
            # The prompt and the environment's texts are spans, too, with version -1.
            starts = np.diff(versions, prepend=-2) | np.diff(segment, prepend=0)
            starts = np.flatnonzero(starts).tolist()
            borders = zip(starts, [*starts[1:], len(texts)])
            line = {"step": version + 1, "task": self.tasks[sample["task"]]}
            line |= {k: sample[k].item() for k in ("sample_id", "problem", "reward")}
            line |= dict(
                outcome=OUTCOMES[sample["outcome"]],
                finished=bool(sample["finished"]),
                prompt=self.tokenizer.decode(tokens[:first]),
                completion=self.tokenizer.decode(tokens[first:], skip_special_tokens=True),
                spans=[[int(versions[a]), texts[a:b], int(segment[a])] for a, b in borders],
            )
            # One number if all tokens have the same.
            advantages = sample["advantage"][is_sampled].astype(float).round(4)
            line["advantage"] = float(advantages.mean())
            if len(set(advantages)) > 1:
                line["advantages"] = advantages.tolist()
            # JSON has no infinities.
            behavior_logprobs = np.nan_to_num(sample["behavior_logprobs"][is_sampled].astype(float))
            line["behavior_logprobs"] = behavior_logprobs.round(4).tolist()
            log_ratios = np.nan_to_num(own_ratios.astype(float)).round(4)
            # Of tokens that are not in the loss the trainer computes no logprob.
            log_ratios = np.where(sample["mask"], log_ratios, None)
            line["log_ratios"] = log_ratios[is_sampled].tolist()
            self.samples_file.write(json.dumps(line) + "\n")

    def _write(self, line):
        self.file.write(json.dumps(line) + "\n")

    def close(self):
        if self.rank == 0:
            self.wandb.finish()

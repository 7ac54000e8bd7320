"""Rollouts for people to look at: some of each step, as the actor sampled them and as the trainer saw them.

samples.jsonl has text, reward and logprobs, from the actor; trained_<rank>.jsonl, of the same samples, the step that
trained them, their advantage and ratios. tools/show.py and report.html join the two by `number`.
"""

import json
from pathlib import Path

import numpy as np

from config import OUTCOMES
from plumbing.log import keep_lines, short


def rounded(values):
    """An array as a list for JSON, to four digits behind the point; None where it is not finite."""
    digits = np.asarray(values, np.float64).round(4).tolist()
    return [value if np.isfinite(value) else None for value in digits]


def is_logged(config, number):
    """Is this sample of the run one of the `samples_logged` of each step that people may look at? The first
    attempts at its problems, then the second ones.
    """
    draw, attempt = divmod(number % config.batch_size, config.attempts)
    return attempt * config.groups_per_step + draw < config.samples_logged


def pieces(tokenizer, tokens):
    """The text of each token [T]; of a character that several make up, the last one has all of it.

    Joined they are the text, except where bytes are no character. A token's own depends on the one before
    it: some tokenizers leave out a first space.
    """
    texts = []
    before = []
    pending = []
    for token in tokens:
        pending.append(token)
        known = tokenizer.decode(before)
        text = tokenizer.decode(before + pending)[len(known) :]
        # bytes of a character that is not complete; more than four are none
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        before = pending
        pending = []
    if pending:
        texts[-1] = tokenizer.decode(pending)
    return texts


class SamplesLog:
    """Decoded rollouts in out/<run>/samples.jsonl, for people: tools/show.py and report.html."""

    def __init__(self, config, run_dir, tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        path = Path(run_dir, "samples.jsonl")
        if path.exists():
            # a last line that a crash has cut short would spoil the next one
            keep_lines(path, lambda line: True)
        self.file = open(path, "a")

    def write(self, version, task, problem, sample):
        """Write a sample, if it is one of those; version: the trainer's when it was done."""
        number = sample["number"]
        if not is_logged(self.config, number):
            return
        versions = sample["versions"]
        mask = sample["mask"]
        texts = pieces(self.tokenizer, sample["tokens"].tolist())
        # the prompt and the environment's texts are spans, too, of version -1
        starts = np.flatnonzero(np.diff(versions, prepend=-2)).tolist()
        spans = []
        for start, end in zip(starts, [*starts[1:], len(versions)]):
            spans.append([int(versions[start]), texts[start:end]])
        line = dict(
            number=number,
            version=version,
            index=number // self.config.attempts,
            task=task,
            prompt=problem["prompt"],
            completion=sample["text"],
            reward=sample["reward"],
            outcome=OUTCOMES[sample["outcome"]],
            finished=sample["finished"],
            answer=problem.get("answer"),
            # [version, text of each of its tokens]
            spans=spans,
            # of each sampled token
            behavior_logprobs=rounded(sample["behavior_logprobs"][mask]),
        )
        self.file.write(json.dumps(short(line)) + "\n")
        self.file.flush()


class TrainedLog:
    """What became of the same rollouts in training: out/<run>/trained_<rank>.jsonl. Made on every trainer rank.

    version: what a continued run goes on from; what came after it is dropped. There may have been more ranks then.
    """

    def __init__(self, config, run_dir, version, rank, world):
        self.config = config
        for path in Path(run_dir).glob("trained_*.jsonl"):
            if int(path.stem.removeprefix("trained_")) % world == rank:
                keep_lines(path, lambda line: line["step"] <= version)
        self.file = open(Path(run_dir, f"trained_{rank}.jsonl"), "a")

    def watch(self, batches, version):
        """The micro-batches that this version trains, passed on."""
        for batch in batches:
            yield batch
            logged = [is_logged(self.config, number) for number in batch["number"].tolist()]
            chosen = np.flatnonzero(logged & (batch["outcome"] >= 0))
            if len(chosen):
                self._write(batch, version, chosen)

    def _write(self, batch, version, chosen):
        ends = np.cumsum(batch["lengths"])
        log_ratios = batch["log_ratios"].cpu().numpy()
        for i in chosen:
            own = slice(ends[i] - batch["lengths"][i], ends[i])
            line = dict(
                number=int(batch["number"][i]),
                step=version + 1,
                advantage=float(batch["advantage"][i]),
                log_ratios=rounded(log_ratios[own][batch["mask"][own]]),
            )
            self.file.write(json.dumps(short(line)) + "\n")
        self.file.flush()

"""The schema of a sample: one attempt at one problem, from the engine's answer to the loss.

A sample is a dict of arrays over its tokens [T] and of scalars, listed here once. Samples travel as
records: per-token fields end to end, per-sample fields as arrays [S], and `lengths` [S]. A group in
queues/rollouts and a micro-batch in queues/batches have the same form. A new field is one line
below; whatever is put into the samples under its name arrives in the trainer's micro-batches.
"""

import numpy as np

TOKEN_FIELDS = {
    # prompt, what was sampled, and what an environment said in between, never re-tokenised
    "tokens": np.int64,
    # was this token sampled (and is it to be trained)?
    "mask": np.bool_,
    # the engine's logprob when it sampled the token; 0 where nothing was sampled
    "logprobs": np.float32,
    # the weights' version that sampled the token; -1 where nothing was sampled
    "versions": np.int64,
    # logprob under the frozen base model, from preprocess.py, only with --kl_coef
    "ref_logprobs": np.float32,
}
SAMPLE_FIELDS = {
    # index of its task in config.task_weights
    "task": np.int16,
    # temperature it was sampled at, and is trained at
    "temperature": np.float32,
    "reward": np.float32,
    # index in config.OUTCOMES; -1: no sample, but a filler that keeps ranks in step
    "outcome": np.int8,
    # it ended by itself, and was not cut off
    "finished": np.bool_,
    # how many versions sampled it
    "num_versions": np.int16,
    # from preprocess.py
    "advantage": np.float32,
}


def join(samples):
    """Samples -> record. Fields that they do not have (yet) are left out."""
    record = {"lengths": np.array([len(s["tokens"]) for s in samples], np.int64)}
    for name, dtype in TOKEN_FIELDS.items():
        if samples and name in samples[0]:
            record[name] = np.concatenate([s[name] for s in samples]).astype(dtype)
    for name, dtype in SAMPLE_FIELDS.items():
        if samples and name in samples[0]:
            record[name] = np.array([s[name] for s in samples], dtype)
    return record


def split(record):
    """Record -> its samples, in order."""
    ends = np.cumsum(record["lengths"])
    samples = []
    for i, (end, length) in enumerate(zip(ends, record["lengths"])):
        sample = {k: record[k][end - length : end] for k in TOKEN_FIELDS if k in record}
        sample |= {k: record[k][i] for k in SAMPLE_FIELDS if k in record}
        samples.append(sample)
    return samples


def layout(lengths):
    """Where each token of a record stands: (position in its sequence [T], number of its sequence [T]).

    [2, 3] -> ([0, 1, 0, 1, 2], [0, 0, 1, 1, 1])
    """
    lengths = np.asarray(lengths)
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - starts[sequence_ids], sequence_ids


def filler():
    """A sample of one token that is no sample: a rank that has no micro-batch left trains it."""
    sample = {name: np.zeros(1, dtype) for name, dtype in TOKEN_FIELDS.items()}
    sample |= {name: dtype(0) for name, dtype in SAMPLE_FIELDS.items()}
    return sample | {"outcome": -1, "temperature": 1.0}


def problem_with(record):
    """What is wrong with a record's values, as words, or None: checked before anything is computed."""
    tokens = int(record["lengths"].sum())
    for name in TOKEN_FIELDS:
        if name in record and len(record[name]) != tokens:
            return f"{name} has {len(record[name])} values for {tokens} tokens"
    for name in SAMPLE_FIELDS:
        if name in record and len(record[name]) != len(record["lengths"]):
            return f"{name} has {len(record[name])} values for {len(record['lengths'])} samples"
    for name in ("logprobs", "ref_logprobs", "reward", "advantage", "temperature"):
        if name in record and not np.isfinite(record[name]).all():
            return f"{name} has values that are not finite"
    return None


class Transcript:
    """The tokens of one attempt: what was sent and what was sampled, never re-tokenised."""

    def __init__(self, prompt):
        self.tokens = list(prompt)
        self.mask = [False] * len(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.versions = [-1] * len(prompt)
        self.sampled = 0

    def add_turn(self, answer):
        """What an engine sampled, as Engines.generate gives it."""
        self.tokens += answer["tokens"]
        self.mask += [True] * len(answer["tokens"])
        self.logprobs += answer["logprobs"]
        self.versions += list(answer["versions"])
        self.sampled += len(answer["tokens"])

    def add_text(self, tokens):
        """What the environment said: not trained."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def fields(self):
        """The per-token fields of plumbing/samples.py, and num_versions."""
        versions = np.array(self.versions)
        mask = np.array(self.mask, bool)
        return dict(
            tokens=np.array(self.tokens),
            mask=mask,
            logprobs=np.array(self.logprobs, np.float32),
            versions=versions,
            num_versions=len(np.unique(versions[mask])),
        )

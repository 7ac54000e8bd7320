"""The schema of a sample: one attempt at one problem, from the engine's answer to the loss.

A sample is a dict of arrays over its tokens [T] and of scalars, listed here once. Samples travel as
records: per-token fields end to end, per-sample fields as arrays [S], and `lengths` [S]. A group in
queues/rollouts and a micro-batch in queues/batches have the same form. A new field is one line
below; whatever is put into the samples under its name arrives in the trainer's micro-batches.
"""

import numpy as np

from config import OUTCOMES

TOKEN_FIELDS = {
    # prompt, what was sampled, and what an environment said in between, never re-tokenised
    "tokens": np.int64,
    # was this token sampled (and is it to be trained)?
    "mask": np.bool_,
    # the engine's logprob when it sampled the token; 0 where nothing was sampled
    "behavior_logprobs": np.float32,
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
    # how many versions sampled it, or computed the KV cache of another attempt that it began from
    "num_versions": np.int16,
    # which one of the run it is: draw * attempts + attempt
    "number": np.int64,
    # from preprocess.py
    "advantage": np.float32,
}


def join(samples):
    """Samples -> record. Fields that they do not have (yet) are left out."""
    lengths = [len(sample["tokens"]) for sample in samples]
    record = {"lengths": np.array(lengths, np.int64)}
    known = samples[0] if samples else {}
    for name, dtype in TOKEN_FIELDS.items():
        if name in known:
            parts = [sample[name] for sample in samples]
            record[name] = np.concatenate(parts).astype(dtype)
    for name, dtype in SAMPLE_FIELDS.items():
        if name in known:
            values = [sample[name] for sample in samples]
            record[name] = np.array(values, dtype)
    return record


def split(record):
    """Record -> its samples, in order."""
    samples = [{} for _ in record["lengths"]]
    borders = np.cumsum(record["lengths"])[:-1]
    for name in TOKEN_FIELDS:
        if name in record:
            parts = np.split(record[name], borders)
            for sample, part in zip(samples, parts):
                sample[name] = part
    for name in SAMPLE_FIELDS:
        if name in record:
            for sample, value in zip(samples, record[name]):
                sample[name] = value
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
    sample = {}
    for name, dtype in TOKEN_FIELDS.items():
        sample[name] = np.zeros(1, dtype)
    for name, dtype in SAMPLE_FIELDS.items():
        sample[name] = dtype(0)
    sample["outcome"] = -1
    sample["temperature"] = 1.0
    return sample


# what every record of samples has; a field that somebody adds is looked at where it is there
SAMPLED = ("tokens", "mask", "behavior_logprobs", "versions")
SAMPLED += ("task", "temperature", "reward", "outcome", "finished", "num_versions", "number")
# tokens of a sample: their sum over a record stays within int64
LONGEST = 1 << 40


def most_bytes(tokens):
    """Size that no record of so many tokens needs, even if each were a sample: their fields, and 16 MB
    for what stands beside them.
    """
    dtypes = [np.int64, *TOKEN_FIELDS.values(), *SAMPLE_FIELDS.values()]
    return tokens * sum(np.dtype(dtype).itemsize for dtype in dtypes) + (1 << 24)


def problem_with(record, needed, vocabulary, tasks):
    """What is wrong with a record's arrays, as words, or None: checked before anything is computed.

    needed: names of fields that must be there if there are samples; vocabulary, tasks: how many
    there are.
    """
    problem = _problem_with_forms(record, needed)
    if problem or not len(record["lengths"]):
        return problem
    return _problem_with_values(record, vocabulary, tasks)


def _problem_with_forms(record, needed):
    """Is there every field, of its type, for every token or sample, and finite?"""
    if not _is_list(record.get("lengths"), np.int64):
        return "lengths is no array [S] of int64"
    lengths = record["lengths"]
    samples = len(lengths)
    shortest = lengths.min(initial=1)
    longest = lengths.max(initial=1)
    if shortest < 1 or longest > LONGEST:
        return f"lengths from {shortest} to {longest}"
    tokens = int(lengths.sum())
    expected = dict.fromkeys(TOKEN_FIELDS, tokens) | dict.fromkeys(SAMPLE_FIELDS, samples)
    for name, dtype in (TOKEN_FIELDS | SAMPLE_FIELDS).items():
        if name not in record:
            if samples and name in needed:
                return f"{name} is missing"
            continue
        values = record[name]
        if not _is_list(values, dtype):
            return f"{name} is no array of {np.dtype(dtype)} with one dimension"
        if len(values) != expected[name]:
            return f"{name} has {len(values)} values for {samples} samples of {tokens} tokens"
        if np.dtype(dtype).kind == "f" and not np.isfinite(values).all():
            return f"{name} has values that are not finite"
        if dtype == np.bool_ and (values.view(np.uint8) > 1).any():
            return f"{name} has values that are neither true nor false"
    return None


def _is_list(values, dtype):
    """Is it an array of one dimension, of this type?"""
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == dtype


def _problem_with_values(record, vocabulary, tasks):
    """Are ids, indices and what is known of sampled tokens possible?"""
    ranges = {
        "tokens": (0, vocabulary - 1),
        "task": (0, tasks - 1),
        "outcome": (-1, len(OUTCOMES) - 1),
        "num_versions": (0, np.iinfo(np.int16).max),
        "number": (0, np.iinfo(np.int64).max),
    }
    for name, (low, high) in ranges.items():
        values = record[name]
        lowest = values.min()
        highest = values.max()
        if lowest < low or highest > high:
            return f"{name} from {lowest} to {highest}, must be from {low} to {high}"
    coldest = record["temperature"].min()
    if coldest <= 0:
        return f"temperature {coldest}"
    mask = record["mask"]
    versions = record["versions"][mask]
    logprobs = record["behavior_logprobs"][mask]
    positions, _ = layout(record["lengths"])
    if mask[positions == 0].any():
        return "the first token of a sample counts as sampled, from nothing"
    if versions.min(initial=0) < 0:
        return "a sampled token has no version"
    if logprobs.max(initial=0) > 0:
        return "a sampled token has a logprob above 0"
    return None


class Transcript:
    """The tokens of one attempt: what was sent and what was sampled, never re-tokenised.

    kv_version: the version whose KV cache it may have begun from; None: it computed its own.
    """

    def __init__(self, prompt, kv_version=None):
        self.kv_versions = [] if kv_version is None else [kv_version]
        self.tokens = list(prompt)
        self.mask = [False] * len(prompt)
        self.behavior_logprobs = [0.0] * len(prompt)
        self.versions = [-1] * len(prompt)
        self.sampled = 0

    def add_turn(self, answer):
        """What an engine sampled, as Engines.generate gives it."""
        self.tokens += answer["tokens"]
        self.mask += [True] * len(answer["tokens"])
        self.behavior_logprobs += answer["behavior_logprobs"]
        self.versions += list(answer["versions"])
        self.sampled += len(answer["tokens"])

    def add_text(self, tokens):
        """What the environment said: not trained."""
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.behavior_logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def fields(self):
        """The per-token fields of plumbing/samples.py, and num_versions."""
        versions = np.array(self.versions)
        mask = np.array(self.mask, bool)
        return dict(
            tokens=np.array(self.tokens),
            mask=mask,
            behavior_logprobs=np.array(self.behavior_logprobs, np.float32),
            versions=versions,
            num_versions=len({*versions[mask].tolist(), *self.kv_versions}),
        )

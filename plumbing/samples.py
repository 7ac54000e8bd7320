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
    # log mu: the engine's logprob when it sampled the token; 0 where nothing was sampled
    "behavior_logprobs": np.float32,
    # log teacher - log mu, of --teacher self; 0 where there is none
    "teacher_log_ratio": np.float32,
    # the weights' version that sampled the token; -1 where nothing was sampled
    "versions": np.int64,
    # which segment of its attempt it stands in, from 0 on: each is a sequence of its own
    "segment": np.int16,
}
SAMPLE_FIELDS = {
    # index of its task in config.task_weights
    "task": np.int16,
    # index of its problem in the task's list of training problems
    "problem": np.int64,
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
    "sample_id": np.int64,
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


def layout(lengths, segment=None):
    """Where each token of a record stands: (position in its sequence [T], number of its sample [T]).

    [2, 3] -> ([0, 1, 0, 1, 2], [0, 0, 1, 1, 1]). segment [T]: a sample's segments are sequences of their own.
    """
    sample_ids = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.diff(sample_ids, prepend=-1) != 0
    if segment is not None:
        begins |= np.diff(segment, prepend=-1) != 0
    starts = np.flatnonzero(begins)
    return np.arange(len(begins)) - starts[np.cumsum(begins) - 1], sample_ids


def share(tokens, lengths):
    """Where each token of packed sequences [T] is computed: how a sequence begins is computed once, if the
    one before it begins so as well. Attempts at one problem have their prompt in common.

    tokens [7, 8, 1, 7, 8, 2], lengths [3, 3] -> [0, 1, 2, 0, 1, 3]. The last token is a sequence's own.
    """
    place = np.arange(len(tokens))
    bounds = [0, *np.cumsum(lengths)]
    for before, start, end in zip(bounds, bounds[1:], bounds[2:]):
        n = min(start - before, end - start - 1)
        differ = np.flatnonzero(tokens[before : before + n] != tokens[start : start + n])
        n = differ[0] if len(differ) else n
        place[start : start + n] = place[before : before + n]
    is_own = place == np.arange(len(tokens))
    return (np.cumsum(is_own) - 1)[place]


def filler():
    """A sample of one token that is no sample: a rank that has no micro-batch left trains it."""
    sample = {name: np.zeros(1, dtype) for name, dtype in TOKEN_FIELDS.items()}
    sample |= {name: dtype(0) for name, dtype in SAMPLE_FIELDS.items()}
    return sample | {"outcome": -1, "temperature": 1.0}


def check_record(record, file, **expected):
    """Raise RuntimeError, by the file's name, if a record is not what the stage before writes.

    expected: what stands beside the arrays and must be so, such as run_id=..., step=3, row=0.
    """
    tokens = record["lengths"].sum()
    problems = [
        f"{name} is {record.get(name)!r}, expected is {value!r}"
        for name, value in expected.items()
        if record.get(name) != value
    ]
    for name in TOKEN_FIELDS:
        n = len(record.get(name, ()))
        if n != tokens:
            problems.append(f"{name} has {n} values for {tokens} tokens")
    if problems:
        raise RuntimeError(f"{file}: {problems[0]}; the same command continues the run")


class Transcript:
    """The tokens of one conversation: what was sent and what was sampled, never re-tokenised."""

    def __init__(self, prompt=()):
        self.tokens = []
        self.behavior_logprobs = []
        self.versions = []
        self.append(prompt)

    def append(self, tokens, behavior_logprobs=None, versions=None):
        """Tokens that an engine sampled, as EngineClient.generate gives them; without versions: a prompt or
        an environment's words, which are not trained.
        """
        n = len(tokens)
        self.tokens += tokens
        self.behavior_logprobs += [0.0] * n if behavior_logprobs is None else behavior_logprobs
        self.versions += [-1] * n if versions is None else list(map(int, versions))

    @property
    def sampled(self):
        """How many tokens were sampled."""
        return sum(version >= 0 for version in self.versions)

    def fields(self):
        """Its per-token fields."""
        versions = np.array(self.versions)
        return dict(
            tokens=np.array(self.tokens),
            mask=versions >= 0,
            behavior_logprobs=np.array(self.behavior_logprobs, np.float32),
            teacher_log_ratio=np.zeros(len(versions), np.float32),
            versions=versions,
            segment=np.zeros(len(versions), np.int16),
        )

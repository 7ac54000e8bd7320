"""The schema of a sample: one attempt at one problem, from the engine's answer to the loss.

A sample is a dict of arrays over its T tokens and of scalars. All its fields are listed here. S
samples travel as one record: the per-token fields of all samples end to end, the per-sample fields
as arrays [S], and `lengths` [S]. A group in queues/rollouts and a micro-batch in queues/batches
both have this form. To add a field, add a line below: values that are put into the samples under
its name then arrive in the trainer's micro-batches.
"""

import numpy as np

TOKEN_FIELDS = {
    # the prompt, the sampled tokens, and an environment's texts between them, never re-tokenised
    "tokens": np.int64,
    # True if the token may be trained: it was sampled, and --overlong_mask does not leave its
    # attempt out. Whether a token was sampled is told by `versions`
    "mask": np.bool_,
    # log mu: the engine's logprob of the token when it sampled it; 0 if it was not sampled
    "behavior_logprobs": np.float32,
    # the version of the weights that sampled the token; -1 if it was not sampled
    "versions": np.int64,
    # the number, from 0 on, of the token's segment in its attempt; each segment is a sequence
    "segment": np.int16,
    # with --replay_routing [T, layers * k]: the k experts that each layer of the engine chose for
    # the token, -1 where this is not known; otherwise [T, 0]
    "experts": np.int16,
    # the number, from 0 on, of the part of the attempt that the token belongs to, -1 if it was not
    # sampled. A part is what has a reward of its own: the attempt, a turn, or a token
    "part": np.int32,
    # the sum of the rewards from the token's part on; 0 if it was not sampled
    "reward_to_go": np.float32,
    # the advantage, which preprocess.py computes; 0 if it was not sampled
    "advantage": np.float32,
}
SAMPLE_FIELDS = {
    # index of its task in config.task_weights
    "task": np.int16,
    # index of its problem in the task's list of training problems
    "problem": np.int64,
    # the temperature at which it was sampled, and is trained
    "temperature": np.float32,
    # the sum of its rewards
    "reward": np.float32,
    # index in config.OUTCOMES; -1: a filler, which completes a round of micro-batches, untrained
    "outcome": np.int8,
    # True if the answer ended by itself, False if it was cut off
    "finished": np.bool_,
    # the number of versions that sampled its tokens, or computed the KV cache that it began from
    "num_versions": np.int16,
    # the sample's number in the run: draw * attempts + attempt
    "sample_id": np.int64,
}
# the fields that preprocess.py adds: a group in queues/rollouts lacks them
ADDED_FIELDS = ("advantage",)


def join(samples):
    """Samples -> record. Fields that the samples do not have yet are left out."""
    lengths = [len(sample["tokens"]) for sample in samples]
    record = {"lengths": np.array(lengths, np.int64)}
    first = samples[0] if samples else {}
    for name, dtype in TOKEN_FIELDS.items():
        if name in first:
            parts = [sample[name] for sample in samples]
            record[name] = np.concatenate(parts).astype(dtype)
    for name, dtype in SAMPLE_FIELDS.items():
        if name in first:
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
    """(position of each token in its sequence [T], number of its sample [T]).

    Lengths [2, 3] -> ([0, 1, 0, 1, 2], [0, 0, 1, 1, 1]). segment [T]: if it is given, each segment
    of a sample is a sequence of its own, whose positions begin at 0.
    """
    sample_ids = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.diff(sample_ids, prepend=-1) != 0
    if segment is not None:
        begins |= np.diff(segment, prepend=-1) != 0
    starts = np.flatnonzero(begins)
    return np.arange(len(begins)) - starts[np.cumsum(begins) - 1], sample_ids


def share(tokens, lengths):
    """For each token of packed sequences [T], the index of the computed token that stands for it.

    The model computes a beginning that two neighbouring sequences share only once. Attempts at one
    problem share their prompt. tokens [7, 8, 1, 7, 8, 2], lengths [3, 3] -> [0, 1, 2, 0, 1, 3]: the
    second sequence uses the computed tokens 0 and 1 of the first one. The last token of a sequence
    is always computed for this sequence alone.
    """
    # for each token, the first token in the row that has the same beginning
    representative = np.arange(len(tokens))
    bounds = [0, *np.cumsum(lengths)]
    for previous, start, end in zip(bounds, bounds[1:], bounds[2:]):
        n = min(start - previous, end - start - 1)
        differ = np.flatnonzero(tokens[previous : previous + n] != tokens[start : start + n])
        n = differ[0] if len(differ) else n
        representative[start : start + n] = representative[previous : previous + n]
    is_computed = representative == np.arange(len(tokens))
    return (np.cumsum(is_computed) - 1)[representative]


def padded_size(samples):
    """The tokens that a padded batch of these samples takes, its padding among them.

    Each segment of a sample is a sequence. Segments of 3, 5 and 1 tokens -> 15.
    """
    lengths = [np.unique(s["segment"], return_counts=True)[1] for s in samples]
    return sum(map(len, lengths)) * max(map(max, lengths))


def filler(length=1):
    """A sample of `length` tokens that adds nothing to the loss: the micro-batch of a rank that has
    no samples left, while other ranks have some.
    """
    sample = {name: np.zeros(length, dtype) for name, dtype in TOKEN_FIELDS.items()}
    sample["experts"] = np.zeros((length, 0), TOKEN_FIELDS["experts"])
    sample |= {name: dtype(0) for name, dtype in SAMPLE_FIELDS.items()}
    return sample | {"outcome": -1, "temperature": 1.0}


def record_faults(record, lacks=(), **expected):
    """Return texts that say in what a record is not as the stage before writes it; [] if it is.

    lacks: fields that it need not have. expected: values that the record must have beside its
    arrays, such as run_id=..., step=3, row=0.
    """
    faults = [
        f"{name} is {record.get(name)!r}, {value!r} was expected"
        for name, value in expected.items()
        if record.get(name) != value
    ]
    lengths = record["lengths"]
    sizes = dict.fromkeys(TOKEN_FIELDS, (lengths.sum(), "tokens"))
    sizes |= dict.fromkeys(SAMPLE_FIELDS, (len(lengths), "samples"))
    for name, (size, unit) in sizes.items():
        n = len(record.get(name, ()))
        if n != size and name not in lacks:
            advice = (
                ""
                if n
                else (
                    ": the actor must set this field or, if preprocess.py adds it, ADDED_FIELDS of "
                    "plumbing/samples.py must name it"
                )
            )
            faults.append(f"{name} has {n} values for {size} {unit}{advice}")
    return faults


def check_record(record, file, lacks=(), **expected):
    """Raise RuntimeError that names the file if `record_faults` finds anything."""
    faults = record_faults(record, lacks, **expected)
    if faults:
        raise RuntimeError(
            f"{file}: {faults[0]}; the same command continues the run. If another version of "
            "this code has written the file, add --fresh True: it moves the run aside, and begins "
            "anew"
        )


class Transcript:
    """The tokens of one conversation, those sent and those sampled. They are never re-tokenised."""

    def __init__(self, prompt=()):
        self.tokens = []
        self.behavior_logprobs = []
        self.versions = []
        # the number of the turn that each token belongs to; -1 if it was not sampled
        self.turn_ids = []
        # [n, layers * k] arrays, for the first tokens of the conversation
        self.experts = []
        self.append(prompt)

    def append(self, tokens, behavior_logprobs=None, versions=None, experts=None, turn=0):
        """Append tokens that an engine sampled, with the values that EngineClient.generate returns.

        Without versions they are a prompt's or an environment's tokens, which are not trained.
        turn: the number of the attempt's turn that sampled them, from 0 on. experts: None, or
        (n, array [N, layers * k]): the experts of the conversation's tokens from number n on, but
        for the last token, which no engine has computed. Experts that are known already are kept,
        as the tokens after them were sampled with these; a gap before n is filled with -1.
        """
        n = len(tokens)
        self.tokens += tokens
        self.behavior_logprobs += [0.0] * n if behavior_logprobs is None else behavior_logprobs
        self.versions += [-1] * n if versions is None else list(map(int, versions))
        self.turn_ids += [-1 if versions is None else turn] * n
        if experts is not None:
            first, rows = experts
            known = self.known_experts
            if known < first:
                self.experts.append(np.full((first - known, rows.shape[1]), -1, np.int16))
            # A view would keep all of the answer in memory.
            self.experts.append(rows[max(known - first, 0) :].copy())

    @property
    def known_experts(self):
        """The number of tokens, counted from the first, whose experts are known."""
        return sum(map(len, self.experts))

    @property
    def sampled(self):
        """The number of sampled tokens."""
        return sum(version >= 0 for version in self.versions)

    def fields(self):
        """The per-token fields of a sample with these tokens, and `turn_ids`, see `credit`."""
        versions = np.array(self.versions)
        known = np.concatenate(self.experts or [np.empty((0, 0))])
        experts = np.full((len(versions), known.shape[1]), -1, np.int16)
        experts[: len(known)] = known
        return dict(
            tokens=np.array(self.tokens),
            mask=versions >= 0,
            behavior_logprobs=np.array(self.behavior_logprobs, np.float32),
            versions=versions,
            segment=np.zeros(len(versions), np.int16),
            experts=experts,
            turn_ids=np.array(self.turn_ids),
        )


def credit(turn_ids, rewards, penalty=0.0):
    """The per-token fields part and reward_to_go of an attempt: {name: [T]}.

    turn_ids [T]: the number of the turn that each token belongs to, -1 if it was not sampled.
    rewards: a number for the attempt, or a list with one for each turn, or with one for each
    sampled token, turn after turn. penalty: a number that is added to the last reward. turn_ids
    [-1, 0, 0, 1], rewards [1, 2] -> part [-1, 0, 0, 1], reward_to_go [0, 3, 3, 2].

    Raises ValueError if there are neither as many rewards as turns nor as many as sampled tokens.
    """
    sampled = np.flatnonzero(turn_ids >= 0)
    # turn after turn, and in each turn token after token
    in_order = sampled[np.argsort(turn_ids[sampled], kind="stable")]
    number_of_turns = len(np.unique(turn_ids[sampled]))
    part = np.full(len(turn_ids), -1)
    if np.ndim(rewards) == 0:
        part[sampled] = 0
    elif len(rewards) == number_of_turns:
        part[sampled] = turn_ids[sampled]
    elif len(rewards) == len(sampled):
        part[in_order] = np.arange(len(sampled))
    else:
        raise ValueError(
            f"{len(rewards)} rewards for an attempt of {number_of_turns} turns and {len(sampled)} "
            "sampled tokens: return one number, or one for each turn, or one for each sampled token"
        )
    to_go = np.cumsum(np.atleast_1d(rewards)[::-1])[::-1] + penalty
    return {"part": part, "reward_to_go": np.where(part >= 0, to_go[part], 0.0)}


def same_kind_of_rewards(samples):
    """Can the rewards of these attempts be compared: are they all of turns, or all of tokens?

    samples: dicts with `part` and `turn_ids` [T]. An attempt with one reward for all its tokens can
    be compared with each kind.
    """
    all_of_turns = all_of_tokens = True
    for sample in samples:
        sampled = sample["part"] >= 0
        parts = sample["part"][sampled]
        if parts.any():
            all_of_turns &= bool(np.all(parts == sample["turn_ids"][sampled]))
            all_of_tokens &= len(np.unique(parts)) == len(parts)
    return all_of_turns or all_of_tokens

"""Stage 2: groups of samples -> advantages -> packed micro-batches for the trainer's ranks.

It reads queues/rollouts (from actor.py) and writes queues/batches/rank_<r> (for train.py). A step
is `groups_per_step` groups, even if some of their attempts have failed. As soon as the samples that
wait fill two micro-batches for each rank, the full ones (`ROW_IS_FULL`) are written, although the
step is not complete. Groups that arrive early wait in a buffer.

Dropped samples are counted by reason. An attempt that is dropped makes its group smaller. Groups
that are dropped whole are announced in queues/dropped.json, so that the actor's gate lets others
start. The last record of a step has the step's ledger: the draws whose samples the step contains,
and the draws that were dropped since the last record of the step before.

To start it alone, on a run directory whose queues/rollouts has records:
`python preprocess.py out/toy`. Deliberately absent: threads.
"""

import random
import signal
import sys
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

import config as cfg
from plumbing.checkpoints import last_state
from plumbing.ledger import Ledger
from plumbing.patience import Patience
from plumbing.queues import Queue, publish_json, read_json
from plumbing.samples import (
    ADDED_FIELDS,
    check_record,
    filler,
    join,
    layout,
    padded_size,
    share,
    split,
)

# Until a step is complete, only rows that are filled to this share of their capacity are put, and
# only in whole rounds. The samples of other rows wait for more samples of the same step.
ROW_IS_FULL = 0.95
# A bundle of several attempts at one problem takes at most this share of a row. Small bundles fill
# the rest of a row better than large ones.
BUNDLE_SHARE = 0.25
# The time to attend to one earlier token, divided by the time of all other work on a token. In
# operations it is 4 D / (24 D^2) = 1 / (6 D), where a layer of hidden size D has 12 D^2 parameters:
# this value is for D = 5000.
ATTENTION_COST = 1 / 30000


def advantages(rewards, kind):
    """The advantages of one group: rewards [G] -> [G].

    loo       r_i - mean of the others (leave-one-out, RLOO)
    mean      r_i - mean
    mean_std  (r_i - mean) / (std + 1e-6) (GRPO)
    max_rl    (r_i - mean) / mean, and 0 where the mean is 0: hard problems weigh more; rewards must
              not be negative (MaxRL, arXiv 2602.02710)
    none      r_i

    A group of one has no baseline: its advantage is 0, except with `none`.
    Rewards [1, 0, 0, 0], loo -> [1, -1/3, -1/3, -1/3].

    Attempts may consist of P parts. A part is what has a reward of its own: a turn or a token, or
    else the whole attempt, and then P = 1. Rewards are [G, P] then, and each one is a reward-to-go
    (samples.credit): the reward of the part and of all later parts of the attempt, added up; NaN if
    the attempt has fewer parts. Each part is compared with the same part of the attempts that have
    it. Raises ValueError if max_rl gets a negative reward.
    """
    r = np.asarray(rewards, dtype=np.float64)
    if kind == "none":
        return r
    # the number of attempts that have the part
    n = (~np.isnan(r)).sum(0)
    mean = np.nansum(r, 0) / n
    centred = r - mean
    if kind == "loo":
        # r_i - mean of the others = n / (n - 1) (r_i - mean)
        return centred * n / np.maximum(n - 1, 1)
    if kind == "mean":
        return centred
    if kind == "mean_std":
        return centred / (np.sqrt(np.nansum(centred**2, 0) / n) + 1e-6)
    if kind == "max_rl":
        if np.nanmin(r) < 0:
            raise ValueError(
                f"--advantage max_rl divides by the mean reward: a reward-to-go of "
                f"{np.nanmin(r):g} is negative; choose another --advantage, or rewards >= 0"
            )
        return centred / np.where(mean > 0, mean, 1.0)
    raise ValueError(
        f"--advantage {kind} has no branch in the function advantages of preprocess.py: add one"
    )


def add_advantages(samples, kind):
    """Add the field `advantage` [T] to each sample of a group, which has at least one sample."""
    parts = 1 + max(int(sample["part"].max()) for sample in samples)
    rewards = np.full((len(samples), parts), np.nan)
    for row, sample in zip(rewards, samples):
        sampled = sample["part"] >= 0
        row[sample["part"][sampled]] = sample["reward_to_go"][sampled]
    for row, sample in zip(advantages(rewards, kind), samples):
        sample["advantage"] = np.where(sample["part"] >= 0, row[sample["part"]], 0.0)


def pack(lengths, capacity, counts=None):
    """Pack items into rows by first-fit decreasing: lengths -> a list of indices for each row.

    Every index is in one row, and no row has more than `capacity` tokens. Lengths [5, 3, 2, 4],
    capacity 7 -> [[0, 2], [3, 1]].

    counts: for rows that are padded only. Item i has counts[i] sequences, the longest of which has
    lengths[i] tokens; every sequence is padded to the length of the longest one of its row. Lengths
    [5, 3, 2, 4], each of 1 sequence, capacity 7 -> [[0], [3], [1, 2]].

    Raises ValueError for an item that cannot fit.
    """
    rows = []
    room = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # the tokens that the item takes in a row of its own, and in each of the rows so far
        size = lengths[i] * (counts[i] if counts else 1)
        sizes = [size] * len(rows)
        if counts:
            # The first item of a row has its longest sequence.
            sizes = [lengths[row[0]] * counts[i] for row in rows]
        if size > capacity:
            raise ValueError(
                f"an attempt of {size} tokens does not fit into a row of {capacity} tokens: raise "
                "--row_tokens"
            )
        row = next((k for k, free in enumerate(room) if free >= sizes[k]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
            sizes.append(size)
        rows[row].append(i)
        room[row] -= sizes[row]
    return rows


def pack_bundles(bundles, config):
    """Pack bundles of `keep_together` into rows: a list of indices for each row."""
    if config.rows != "padded":
        return pack([tokens for tokens, _ in bundles], config.row_tokens)
    # Nothing is shared, so each bundle is one sample.
    sequences = [np.unique(s["segment"], return_counts=True)[1] for _, [s] in bundles]
    longest = [lengths.max() for lengths in sequences]
    return pack(longest, config.row_tokens, [len(lengths) for lengths in sequences])


def computed_tokens(samples):
    """The number of tokens that the trainer computes for samples that lie side by side in a row.

    A beginning that two neighbours share is computed once (samples.share). Samples [7, 8, 1] and
    [7, 8, 2] -> 4: tokens 7, 8 and 1, and then 2 alone.
    """
    tokens = np.concatenate([sample["tokens"] for sample in samples])
    segment = np.concatenate([sample["segment"] for sample in samples])
    positions, _ = layout([len(sample["tokens"]) for sample in samples], segment)
    lengths = np.diff(np.flatnonzero(positions == 0), append=len(positions))
    return int(share(tokens, lengths)[-1]) + 1


def keep_together(samples, max_tokens):
    """Bundle the attempts at one problem: [(number of tokens to compute, samples)], in their order.

    Attempts share their prompt. A bundle goes into one row, where its prompt is computed once. A
    bundle of several attempts has at most `max_tokens` tokens to compute; a longer attempt is a
    bundle by itself. Three attempts a, b, c of a prompt of 8 tokens and 2 sampled tokens each,
    max_tokens 12 -> [(12, [a, b]), (10, [c])].
    """
    bundles = []
    for sample in samples:
        if bundles:
            tokens, bundle = bundles[-1]
            previous = bundle[-1]
            tokens += computed_tokens([previous, sample]) - computed_tokens([previous])
            if tokens <= max_tokens:
                bundles[-1] = (tokens, [*bundle, sample])
                continue
        bundles.append((computed_tokens([sample]), [sample]))
    return bundles


def row_cost(samples, config):
    """The time that a row takes the trainer, in units of one token without attention."""
    lengths = np.array([len(sample["tokens"]) for sample in samples], float)
    tokens = padded_size(samples) if config.rows == "padded" else computed_tokens(samples)
    return tokens + ATTENTION_COST / 2 * (lengths**2).sum()


class Packer:
    """Packs the groups of a step into micro-batches and puts them into the ranks' queues.

    It puts them in rounds: a round is one micro-batch, or row, for each rank.
    """

    def __init__(self, config, queues, ledger, step):
        self.config = config
        self.queues = queues
        self.ledger = ledger
        self.step = step
        # the number of groups of the current step that were added
        self.groups_added = 0
        # bundles of keep_together that wait to be put: [(tokens computed, samples)]
        self.pending = []
        # the number of rounds of the current step that were put
        self.rounds = 0
        # the current step: {task: Counter of samples, reward, tokens and outcomes}, and
        # {task: {name: the values that its episodes logged}}
        self.by_task = {}
        self.logged = {}

    def add(self, group):
        """Add a group to the step, and put full rows; if the step is complete now, put all rows."""
        samples = group["samples"]
        if self.config.rows in ("auto", "packed"):
            self.pending += keep_together(samples, BUNDLE_SHARE * self.config.row_tokens)
        else:
            # Only our attention lets sequences share what is computed.
            self.pending += [(len(sample["tokens"]), [sample]) for sample in samples]
        self.groups_added += 1
        self.ledger.trained[group["draw"]] = len(samples)
        self.ledger.done(group["draw"])
        for sample, logged in zip(samples, group["logged"]):
            self.count(sample, logged)
        complete = self.groups_added == self.config.groups_per_step
        tokens = sum(bundle_tokens for bundle_tokens, _ in self.pending)
        if complete or tokens >= 2 * self.config.row_tokens * len(self.queues):
            self.put_rows(complete)

    def put_rows(self, complete):
        """Pack the pending bundles and put whole rounds of full rows.

        If the step is complete all rows are put, and fillers complete the last round.
        """
        config = self.config
        ranks = len(self.queues)
        # For each row the indices of its bundles in `pending`; `rows` has their samples.
        row_indices = pack_bundles(self.pending, config)
        if not complete:
            full = ROW_IS_FULL * config.row_tokens
            row_indices = [indices for indices in row_indices if self.filled(indices) >= full]
        # The rows of a round should take equally long on every rank.
        row_indices.sort(key=lambda x: row_cost(self.samples_of(x), config), reverse=True)
        if not complete:
            row_indices = row_indices[: len(row_indices) // ranks * ranks]
        rows = [self.samples_of(indices) for indices in row_indices]
        rows += [[filler()]] * (-len(rows) % ranks)
        put = {i for indices in row_indices for i in indices}
        self.pending = [bundle for i, bundle in enumerate(self.pending) if i not in put]
        for first in range(0, len(rows), ranks):
            is_last = complete and first + ranks == len(rows)
            self.put_round(rows[first : first + ranks], is_last)
        if complete:
            self.step += 1
            self.rounds = 0
            self.groups_added = 0
            self.by_task = {}
            self.logged = {}

    def filled(self, indices):
        """The number of tokens of the row of these pending bundles, as `pack` counts them."""
        if self.config.rows == "padded":
            return padded_size(self.samples_of(indices))
        return sum(self.pending[i][0] for i in indices)

    def samples_of(self, indices):
        """The samples of the pending bundles with these indices."""
        return [sample for i in indices for sample in self.pending[i][1]]

    def put_round(self, rows, is_last):
        """Put one row into the queue of each rank; the last round of a step has its ledger."""
        fields = {"run_id": self.config.run_id, "step": self.step}
        fields |= {"row": self.rounds, "last": is_last}
        if is_last:
            fields |= self.ledger.close_step() | {"by_task": self.task_table()}
        for queue, row in zip(self.queues, rows):
            queue.put(join(row) | fields)
        self.rounds += 1

    def count(self, sample, logged):
        """Add a sample, and {name: number} that its episode logged, to its task's sums."""
        task = list(cfg.task_weights(self.config.task))[sample["task"]]
        sums = self.by_task.setdefault(task, Counter())
        sums["samples"] += 1
        sums["reward"] += float(sample["reward"])
        sums["tokens"] += int((sample["versions"] >= 0).sum())
        sums[cfg.OUTCOMES[sample["outcome"]]] += 1
        for name, value in logged.items():
            self.logged.setdefault(task, {}).setdefault(name, []).append(value)

    def task_table(self):
        """{task: {samples, reward, tokens, <outcome>, logged}} of the step.

        samples is their number; the other values are means per sample. logged: {name: mean over the
        samples that logged this name}, if there are any.
        """
        table = {}
        for task, sums in self.by_task.items():
            table[task] = {name: total / sums["samples"] for name, total in sums.items()}
            table[task]["samples"] = sums["samples"]
            if task in self.logged:
                values = self.logged[task].items()
                table[task]["logged"] = {name: float(np.mean(numbers)) for name, numbers in values}
        return table


class GroupBuffer:
    """Groups that wait to be trained, oldest first, with their advantages.

    It takes records from queues/rollouts while it has room; with --on_full drop_oldest it takes
    all of them, and drops its oldest groups. With --late wait and --late hold the groups enter the
    buffer in the order in which they were started, not in that in which they were finished.
    """

    def __init__(self, config, rollouts, ledger, patience):
        self.config = config
        self.rollouts = rollouts
        self.ledger = ledger
        self.groups = deque()
        steps = config.max_lag + 1 if config.late == "hold" else config.conventional_g
        self.room = max(2, steps) * config.groups_per_step
        self.is_ordered = config.late in ("wait", "hold")
        # {draw: record} of the groups that `in_order` cannot pass on yet. None stands for a draw
        # that was trained or dropped before the run was continued
        self.early = dict.fromkeys(ledger.ahead)
        # the draw that is passed on next
        self.next_draw = ledger.next
        self.patience = patience

    def receive(self):
        """Take the records that have arrived.

        Raises TimeoutError if for `stall_timeout` seconds none has arrived and no group is left.
        """
        drop_oldest = self.config.on_full == "drop_oldest"
        while len(self.groups) < self.room or drop_oldest:
            try:
                number, record = self.rollouts.get(0.0)
            except TimeoutError:
                break
            file = self.rollouts.file(number)
            check_record(record, file, lacks=ADDED_FIELDS, run_id=self.config.run_id)
            self.patience.start()
            for arrived in self.in_order(record):
                self.take(arrived)
            if drop_oldest and len(self.groups) > self.room:
                self.drop(self.groups.popleft(), "buffer_full")
            # The groups of two steps may be here that the trainer has not begun yet.
            keep = self.config.keep_steps and self.config.keep_steps + 2
            self.rollouts.ack(number, keep * self.config.groups_per_step)
        if self.groups:
            self.patience.start()
        self.patience.check(f"preprocess: actor.py put no rollouts into {self.rollouts.path}")

    def in_order(self, record):
        """The records that can be passed on, now that this one has arrived."""
        if not self.is_ordered:
            return [record]
        self.early[record["draw"]] = record
        records = []
        while self.next_draw in self.early:
            records.append(self.early.pop(self.next_draw))
            self.next_draw += 1
        return [record for record in records if record is not None]

    def take(self, record):
        """Put a group with its advantages into the buffer, or drop it."""
        config = self.config
        draw = record["draw"]
        samples = split(record)
        if samples:
            try:
                add_advantages(samples, config.advantage)
            except ValueError as e:
                task = list(cfg.task_weights(config.task))[samples[0]["task"]]
                raise cfg.ConfigError(
                    f"tasks/{task}.py: training problem {samples[0]['problem']}: {e}"
                ) from None
        has_signal = any(np.abs(sample["advantage"]).max() > 1e-6 for sample in samples)
        for sample in samples:
            # This is the over-length filtering of DAPO (arXiv 2503.14476) section 3.4.
            if config.overlong_mask and not sample["finished"]:
                sample["mask"] = np.zeros_like(sample["mask"])
        group = {"draw": draw, "samples": samples, "logged": record["logged"]}
        self.ledger.drop(draw, record["failed"], "failed")
        if samples and (config.no_signal == "keep" or has_signal):
            self.groups.append(group)
        else:
            self.drop(group, "no_signal" if samples else "failed")

    def drop(self, group, reason):
        """Note that a whole group will not be trained; the gate then lets another one start."""
        self.ledger.drop(group["draw"], len(group["samples"]), reason)
        self.ledger.done(group["draw"])
        self.ledger.dropped_groups += 1

    def shuffle_phase(self, count, rng):
        """Shuffle the `count` oldest groups, for conventional RL."""
        head = [self.groups.popleft() for _ in range(count)]
        rng.shuffle(head)
        self.groups.extendleft(reversed(head))


class Drops:
    """Announces what was dropped: groups to the actor, samples and reasons to people.

    path: the file that tells the actor how many groups have been dropped so far.
    """

    def __init__(self, ledger, path):
        self.ledger = ledger
        self.path = path
        # the numbers that were announced last
        self.groups = 0
        self.samples = 0

    def __str__(self):
        reasons = [f"{count} {reason}" for reason, count in self.ledger.reasons.items()]
        return ", ".join(reasons) or "none"

    def announce(self):
        """Tell the actor of every dropped group. Print a line when the number of dropped samples
        is at least twice that of the last line.
        """
        if self.ledger.dropped_groups > self.groups:
            self.groups = self.ledger.dropped_groups
            publish_json(self.path, groups=self.groups)
        samples = self.ledger.reasons.total()
        if samples > 0 and samples >= 2 * self.samples:
            self.samples = samples
            print(f"preprocess: samples dropped so far: {self}", flush=True)


def main(run_dir):
    try:
        config = cfg.load(run_dir)
    except cfg.ConfigError as e:
        sys.exit(f"preprocess: {e}")
    queues = Path(run_dir, "queues")
    version_file = queues / "version.json"
    batches = [Queue(queues / "batches" / f"rank_{r}") for r in range(config.trainers)]
    state = last_state(run_dir)
    ledger = Ledger(**state["position"])
    patience = Patience(config, run_dir)
    waiting = GroupBuffer(config, Queue(queues / "rollouts"), ledger, patience)
    packer = Packer(config, batches, ledger, state["version"])
    rng = random.Random(config.seed)
    print(
        f"preprocess: {config.trainers} ranks, rows of {config.row_tokens} tokens, "
        f"from step {packer.step}",
        flush=True,
    )
    drops = Drops(ledger, queues / "dropped.json")
    # A run that is stopped prints its totals, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        emit_steps(config, waiting, packer, drops, rng, version_file)
    # Rewards that the knobs do not allow are reported in one line, without a traceback.
    except cfg.ConfigError as e:
        sys.exit(f"preprocess: {e}")
    finally:
        print(
            f"preprocess: {packer.step} of {config.steps} steps emitted, samples dropped: {drops}",
            flush=True,
        )


def groups_needed(config, packer, left_in_phase):
    """The number of groups that must wait in the buffer before the next one is packed.

    It is 1 in the pipeline, which packs groups as they come, except when a step begins with --late
    hold. left_in_phase: in conventional RL, the number of groups of the current training phase that
    are not packed yet; 0 between phases.
    """
    steps_left = config.steps - packer.step
    g = config.conventional_g
    if config.late == "hold" and not packer.groups_added:
        # A step begins once all groups are complete that the gate lets start: until the trainer
        # makes it, no other group can start, and no weights change.
        return min(config.max_lag + 1, steps_left) * config.groups_per_step
    if g and not left_in_phase:
        # A training phase begins once all of its groups are complete.
        return min(g - packer.step % g, steps_left) * config.groups_per_step
    return 1


def emit_steps(config, waiting, packer, drops, rng, version_file):
    """Receive groups and write their micro-batches, until the last step is complete.

    Whenever enough groups wait, the next one is packed; the packer knows when a step is complete.
    """
    left_in_phase = 0
    while packer.step < config.steps:
        waiting.receive()
        drops.announce()
        # Pack at most the step after the one that the trainer is making. While it is busy, groups
        # wait in the buffer, where newer groups may still replace them.
        needed = groups_needed(config, packer, left_in_phase)
        has_groups = len(waiting.groups) >= needed
        if not has_groups or packer.step > read_json(version_file).get("version", 0) + 1:
            time.sleep(0.005)
            continue
        if config.conventional_g and not left_in_phase:
            left_in_phase = needed
            waiting.shuffle_phase(left_in_phase, rng)
        packer.add(waiting.groups.popleft())
        left_in_phase = max(left_in_phase - 1, 0)


if __name__ == "__main__":
    main(sys.argv[1])

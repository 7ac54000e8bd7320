"""Stage 2: groups of rollouts -> advantages -> packed micro-batches, in rounds of one per trainer rank.

Reads queues/rollouts (from actor.py), writes queues/batches/rank_<r> (for train.py). A step is
`groups_per_step` groups, of as many samples as came back. Micro-batches are put as soon as they
fill. Groups that wait sit in a buffer. What is dropped is counted by reason: single attempts
make their group smaller; whole groups are announced in queues/dropped.json, so that the gate lets
others start. A step's last record is its ledger: the problems it trained, and those dropped since
the step before.

Alone, on a run directory that has rollouts: `python preprocess.py out/toy`. Deliberately absent:
padding, threads.
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
from plumbing.samples import check_record, filler, join, layout, share, split

# a row this full is emitted before its step is complete
FULL = 0.95
# attempts at a problem stay together if they take no more of a row: so that small rests of rows fill up
TOGETHER = 0.25
# attending to one earlier token, in units of all else a token costs: 1 / (12 hidden), hidden size 2500
ATTENTION = 1 / 30000


def advantages(rewards, kind):
    """Advantage of each rollout of one group, rewards [G] -> [G].

    loo: r_i - mean of the others (leave-one-out, RLOO); mean: r_i - mean; mean_std: (r_i - mean) /
    (std + 1e-6) (GRPO); none: r_i. A group of one has no baseline: its advantage is 0, but for none.
    {1, 0, 0, 0} -> loo {1, -1/3, -1/3, -1/3}
    """
    r = np.asarray(rewards, dtype=np.float64)
    if kind == "none":
        return r
    if len(r) < 2:
        return np.zeros_like(r)
    centred = r - r.mean()
    if kind == "loo":
        # r_i - mean of the others = G/(G-1) (r_i - mean)
        return centred * len(r) / (len(r) - 1)
    if kind == "mean":
        return centred
    if kind == "mean_std":
        return centred / (r.std() + 1e-6)
    raise ValueError(f"unknown advantage '{kind}'")


def pack(lengths, capacity):
    """Indices per micro-batch, every index once, none over capacity: first-fit decreasing.

    [5, 3, 2, 4], capacity 7 -> [[0, 2], [3, 1]]. Raises ValueError for a length that cannot fit.
    """
    rows = []
    room = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > capacity:
            raise ValueError(f"sample {i} has {lengths[i]} tokens, a row has {capacity}")
        row = next((k for k, free in enumerate(room) if free >= lengths[i]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def computed(samples):
    """How many tokens the trainer computes for samples that lie side by side: what they begin with in
    common once (plumbing/samples.py).
    """
    tokens, segment = (np.concatenate([s[name] for s in samples]) for name in ("tokens", "segment"))
    positions, _ = layout([len(s["tokens"]) for s in samples], segment)
    lengths = np.diff(np.flatnonzero(positions == 0), append=len(positions))
    return int(share(tokens, lengths)[-1]) + 1


def side_by_side(samples, most):
    """Attempts at one problem -> [(tokens computed, samples)] of those that stay together, which are no
    more than `most` tokens, or one attempt.
    """
    found = []
    for sample in samples:
        if found:
            tokens, together = found[-1]
            before = together[-1]
            more = tokens + computed([before, sample]) - computed([before])
            if more <= most:
                found[-1] = (more, [*together, sample])
                continue
        found.append((computed([sample]), [sample]))
    return found


def cost(samples):
    """How long a row takes the trainer, in tokens without attention."""
    lengths = np.array([len(s["tokens"]) for s in samples], float)
    return computed(samples) + ATTENTION / 2 * (lengths**2).sum()


class Packer:
    """Packs the groups of a step into micro-batches for the ranks' queues, a round (one per rank) at a time."""

    def __init__(self, config, queues, ledger, step):
        self.config = config
        self.queues = queues
        self.ledger = ledger
        self.step = step
        self.groups = 0
        # (tokens, samples) of attempts that stay together
        self.pending = []
        # put so far, of the step
        self.rounds = 0
        # of the step: {task: Counter of samples, reward, tokens and outcomes}
        self.by_task = {}

    def add(self, group):
        """Take one more group of the current step; puts what is full, and everything when the step is
        complete.
        """
        samples = group["samples"]
        self.pending += side_by_side(samples, TOGETHER * self.config.row_tokens)
        self.groups += 1
        self.ledger.trained[group["draw"]] = len(samples)
        self.ledger.done(group["draw"])
        for sample in samples:
            self.count(sample)
        complete = self.groups == self.config.groups_per_step
        tokens = sum(n for n, _ in self.pending)
        if complete or tokens >= 2 * self.config.row_tokens * len(self.queues):
            self.put_rows(complete)

    def put_rows(self, complete):
        """Pack what is pending; put whole rounds of full rows, or all if the step is complete."""
        config = self.config
        sizes = [n for n, _ in self.pending]
        packed = pack(sizes, config.row_tokens)
        if not complete:
            full = FULL * config.row_tokens
            packed = [row for row in packed if sum(sizes[i] for i in row) >= full]
        rows = [[sample for i in row for sample in self.pending[i][1]] for row in packed]
        # the rows of a round should take equally long on every rank
        rows.sort(key=cost, reverse=True)
        ranks = len(self.queues)
        fillers = -len(rows) % ranks
        if complete:
            rows += [[filler()]] * fillers
        else:
            rows = rows[: len(rows) // ranks * ranks]
        sent = {id(s) for row in rows for s in row}
        self.pending = [(n, samples) for n, samples in self.pending if id(samples[0]) not in sent]
        for k, row in enumerate(rows):
            last = complete and k >= len(rows) - ranks
            record = join(row)
            record |= {"run_id": config.run_id, "step": self.step, "last": last}
            record["row"] = self.rounds + k // ranks
            if last and k == len(rows) - ranks:
                of_step = self.ledger.close_step() | {"by_task": self.task_table()}
            if last:
                record |= of_step
            self.queues[k % ranks].put(record)
        self.rounds += len(rows) // ranks
        if complete:
            self.step += 1
            self.rounds = 0
            self.groups = 0
            self.by_task = {}

    def count(self, sample):
        """Add a sample to its task's sums."""
        task = list(cfg.task_weights(self.config.task))[sample["task"]]
        sums = self.by_task.setdefault(task, Counter())
        sums["samples"] += 1
        sums["reward"] += float(sample["reward"])
        sums["tokens"] += int(sample["mask"].sum())
        sums[cfg.OUTCOMES[sample["outcome"]]] += 1

    def task_table(self):
        """{task: {samples, reward, tokens, <outcome>}} of the step: a count, then means per sample."""
        table = {}
        for task, sums in self.by_task.items():
            table[task] = {k: v / sums["samples"] for k, v in sums.items()}
            table[task]["samples"] = sums["samples"]
        return table


class GroupBuffer:
    """Groups that wait to be trained, oldest first, with their advantages.

    Takes everything that has arrived in queues/rollouts, as far as there is room. `late = wait`:
    in the order in which the groups were started, whatever the order in which they were done.
    """

    def __init__(self, config, rollouts, ledger, patience):
        self.config = config
        self.rollouts = rollouts
        self.ledger = ledger
        self.groups = deque()
        self.room = max(2, config.conventional_g) * config.groups_per_step
        # late = wait: groups that came before their turn, by draw; draws that will not come
        self.early = {}
        self.turn = ledger.next
        self.never = set(ledger.ahead)
        self.patience = patience

    def receive(self):
        """Take what has arrived. TimeoutError if nothing has, and nothing is left, for `stall_timeout` seconds."""
        drop_oldest = self.config.on_full == "drop_oldest"
        while len(self.groups) < self.room or drop_oldest:
            try:
                number, record = self.rollouts.get(0.0)
            except TimeoutError:
                break
            check_record(record, self.rollouts.file(number), run_id=self.config.run_id)
            self.patience.start()
            for arrived in self.in_order(record):
                self.take(arrived)
            if drop_oldest and len(self.groups) > self.room:
                self.drop(self.groups.popleft(), "buffer_full")
            keep = self.config.keep_steps and self.config.keep_steps + 2
            self.rollouts.ack(number, keep * self.config.groups_per_step)
        if self.groups:
            self.patience.start()
        self.patience.check(f"preprocess: actor.py put no rollouts into {self.rollouts.path}")

    def in_order(self, record):
        """The records whose turn it is, now that this one is here."""
        if self.config.late != "wait":
            return [record]
        self.early[record["draw"]] = record
        found = []
        while self.turn in self.early or self.turn in self.never:
            if self.turn in self.early:
                found.append(self.early.pop(self.turn))
            self.turn += 1
        return found

    def take(self, record):
        """A group with its advantages into the buffer, or drop it."""
        config = self.config
        draw = record["draw"]
        samples = split(record)
        of_group = advantages(record["reward"], config.advantage) if samples else np.zeros(0)
        for sample, advantage in zip(samples, of_group):
            sample["advantage"] = advantage
            # over-length filtering, DAPO (arXiv 2503.14476) section 3.4
            if config.overlong_mask and not sample["finished"]:
                sample["mask"] = np.zeros_like(sample["mask"])
        group = {"draw": draw, "samples": samples}
        self.ledger.drop(draw, record["failed"], "failed")
        if samples and (config.no_signal == "keep" or np.abs(of_group).max() > 1e-6):
            self.groups.append(group)
        else:
            self.drop(group, "no_signal")

    def drop(self, group, reason):
        """A whole group will not be trained; the gate lets another one start."""
        self.ledger.drop(group["draw"], len(group["samples"]), reason)
        self.ledger.done(group["draw"])
        self.ledger.dropped_groups += 1

    def shuffle_phase(self, groups, rng):
        """Conventional RL: shuffle the oldest so many groups."""
        head = [self.groups.popleft() for _ in range(groups)]
        rng.shuffle(head)
        self.groups.extendleft(reversed(head))


class Drops:
    """Tells the actor, in the file `path`, how many groups are dropped by now, and people how many samples, and why."""

    def __init__(self, ledger, path):
        self.ledger = ledger
        self.path = path
        # what has been told
        self.groups = 0
        self.samples = 0

    def __str__(self):
        reasons = [f"{count} {reason}" for reason, count in self.ledger.reasons.items()]
        return ", ".join(reasons) or "none"

    def announce(self):
        """Tell the actor at once; people the first time, and whenever the samples are twice as many as they know of."""
        if self.ledger.dropped_groups > self.groups:
            self.groups = self.ledger.dropped_groups
            publish_json(self.path, groups=self.groups)
        samples = self.ledger.reasons.total()
        if samples > 0 and samples >= 2 * self.samples:
            self.samples = samples
            print(f"preprocess: samples dropped so far: {self}", flush=True)


def main(run_dir):
    config = cfg.load(run_dir)
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
        f"preprocess: {config.trainers} ranks, rows of {config.row_tokens} tokens, from step {packer.step}",
        flush=True,
    )
    drops = Drops(ledger, queues / "dropped.json")
    # the run is stopped: what is printed last has the totals, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        emit_steps(config, waiting, packer, drops, rng, version_file)
    finally:
        print(
            f"preprocess: {packer.step} of {config.steps} steps emitted, samples dropped: {drops}",
            flush=True,
        )


def emit_steps(config, waiting, packer, drops, rng, version_file):
    """Until the last step is emitted."""
    # groups of the current generation phase that are shuffled (conventional RL only)
    in_phase = 0
    while packer.step < config.steps:
        waiting.receive()
        drops.announce()
        # at most one step ahead of the trainer, so that the buffer decides what it gets
        if not waiting.groups or packer.step > read_json(version_file).get("version", 0) + 1:
            time.sleep(0.005)
            continue
        g = config.conventional_g
        if g and not in_phase:
            steps = min(g - packer.step % g, config.steps - packer.step)
            if len(waiting.groups) < steps * config.groups_per_step:
                time.sleep(0.005)
                continue
            in_phase = steps * config.groups_per_step
            waiting.shuffle_phase(in_phase, rng)
        packer.add(waiting.groups.popleft())
        in_phase = max(in_phase - 1, 0)


if __name__ == "__main__":
    main(sys.argv[1])

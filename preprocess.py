"""Stage 2: groups of rollouts -> advantages -> packed micro-batches, in rounds of one per trainer rank.

Reads queues/rollouts (from actor.py), writes queues/batches/rank_<r> (for train.py). Micro-batches are emitted as soon as
they fill; a step ends when it has exactly `batch_size` samples. Samples that wait sit in a ring buffer; what it or the
packing has to drop, and what the engines failed to give, is counted by reason, and announced in queues/dropped.json so that
the actor's gate can replace it. A step's last record is its ledger: the problems it trained, and those dropped since the step before.

Alone, on a run directory that has rollouts: `python preprocess.py out/toy`. Deliberately absent: padding, threads.
"""
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

import config as cfg
from queues import Queue, notice, noticed

FULL = 0.95  # a row this full is emitted before its step is complete
ATTENTION = 1 / 30000  # attending to one earlier token, in units of all else a token costs: 1 / (12 hidden), for a hidden size of 2500


def advantages(rewards, kind):
    """Advantage of each rollout of one group, rewards [G] -> [G].

    loo: r_i - mean of the others (leave-one-out, RLOO); mean: r_i - mean; mean_std: (r_i - mean) / (std + 1e-6) (GRPO);
    none: r_i. A group of one has no baseline: its advantage is 0, except for none.
    {1, 0, 0, 0} -> loo {1, -1/3, -1/3, -1/3}
    """
    r = np.asarray(rewards, dtype=np.float64)
    if kind == "none":
        return r
    centred = r - r.mean() if len(r) > 1 else np.zeros_like(r)
    if kind == "loo":
        return centred * len(r) / max(len(r) - 1, 1)  # r_i - mean of the others = G/(G-1) (r_i - mean)
    if kind == "mean":
        return centred
    if kind == "mean_std":
        return centred / (r.std() + 1e-6)
    raise ValueError(f"unknown advantage '{kind}'")


def pack(lengths, capacity):
    """Indices per micro-batch, every index once, no micro-batch over capacity: first-fit decreasing.

    [5, 3, 2, 4], capacity 7 -> [[0, 2], [3, 1]]. Raises ValueError for a length that cannot fit.
    """
    rows, room = [], []
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


def samples_of(group, config):
    """One group record of actor.py -> its samples, each a dict of arrays over its tokens [T] and of scalars."""
    ends = np.cumsum(group["lengths"])
    of_group = advantages(group["rewards"], config.advantage)
    signal = len(of_group) < 2 or np.abs(of_group).max() > 1e-6  # a group of one makes up for a lost sample: always taken, or a step might never fill
    order, roles = list(range(len(of_group))), {}
    if config.dpo_coef and len(of_group) and np.ptp(group["rewards"]) > 1e-6:  # the pair goes first, side by side
        order.sort(key=lambda i: {int(np.argmax(group["rewards"])): 0, int(np.argmin(group["rewards"])): 1}.get(i, 2))
        roles = dict(zip(order, ("best", "worst")))
    for i in order:
        span = slice(ends[i] - group["lengths"][i], ends[i])
        kept = group["finished"][i] or not config.overlong_mask  # over-length filtering, DAPO (arXiv 2503.14476) section 3.4
        yield dict(tokens=group["tokens"][span], mask=group["mask"][span] & kept, logprobs=group["logprobs"][span], versions=group["versions"][span],
                   advantage=of_group[i], reward=group["rewards"][i], success=group["outcomes"][i] == "correct", outcome=group["outcomes"][i],
                   task=group["task"], index=group["index"], signal=signal, role=roles.get(i))


def is_pair(a, b):
    """Are these neighbours the best and the worst answer of one group?"""
    return a.get("role") == "best" and b.get("role") == "worst" and a["index"] == b["index"]


def units(samples):
    """What stays together: the best and the worst answer of a group, if they are neighbours, which share a DPO term; every other sample is alone."""
    found = []
    for s in samples:
        found[-1].append(s) if found and is_pair(found[-1][-1], s) else found.append([s])
    return found


class Position:
    """Which problems are done with (trained, or dropped and counted): all below `next`, and those in `ahead`. Of those that were
    begun, {index: samples left}.

    A problem is done with when the last of its samples is. What a run continues from: the others are drawn again, those that were
    begun as far as they are left, so that no sample of a problem is trained in place of one that was trained already.
    """

    def __init__(self, next=0, ahead=(), left=None):
        self.next, self.ahead, self.open = next, set(ahead), Counter()
        self.left = {int(index): n for index, n in (left or {}).items()}  # keys of JSON are strings

    def arrive(self, index, samples):
        """A group is here, for which so many samples were asked."""
        self.open[index] = samples

    def leave(self, index):
        """One sample of problem `index` is trained or dropped."""
        self.open[index] -= 1
        self.left[index] = self.open[index]
        if not self.open[index]:
            del self.open[index], self.left[index]
            self.ahead.add(index)
            while self.next in self.ahead:
                self.ahead.remove(self.next)
                self.next += 1

    def state(self):
        """{next, ahead, left}, as JSON."""
        return dict(next=self.next, ahead=sorted(self.ahead), left=self.left)


def row_record(samples):
    """Pack samples into one micro-batch record; no samples make an empty one (one masked token, so that ranks stay in step)."""
    if not samples:
        none = np.zeros(1, bool)
        samples = [dict(tokens=np.zeros(1, np.int32), mask=none, logprobs=np.zeros(1, np.float32), versions=np.zeros(1, np.int32), advantage=0.0)]
    lengths = [len(s["tokens"]) for s in samples]
    # spans: versions that sampled the sequence; pure: just one, so the engine's logprobs are of one forward pass
    spans = np.array([len(set(s["versions"][s["mask"]].tolist())) for s in samples])
    return dict(
        input_ids=np.concatenate([s["tokens"] for s in samples]).astype(np.int64),
        position_ids=np.concatenate([np.arange(n) for n in lengths]),
        sequence_ids=np.repeat(np.arange(len(samples)), lengths),
        mask=np.concatenate([s["mask"] for s in samples]),
        logprobs=np.concatenate([s["logprobs"] for s in samples]).astype(np.float32),
        versions=np.concatenate([s["versions"] for s in samples]).astype(np.int64),
        advantages=np.repeat([s["advantage"] for s in samples], lengths).astype(np.float32),
        pure=np.repeat(spans == 1, lengths),
        spans=spans,
        rewards=np.array([s["reward"] for s in samples if "reward" in s], np.float32),
        successes=np.array([s["success"] for s in samples if "reward" in s], np.float32),
        pairs=np.array([(i, i + 1) for i, s in enumerate(samples[1:]) if is_pair(samples[i], s)], np.int64).reshape(-1, 2),
        samples=sum("reward" in s for s in samples))


def reference_model(config):
    """Function from a micro-batch record to the logprobs of its tokens [T], float32, under the frozen base model: the trainer's
    own `token_logprobs`, so that packing, temperature and precision are the same.
    """
    import torch  # only here: without a reference this stage needs no torch
    from train import load_model, token_logprobs
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(config, getattr(torch, config.dtype)).to(device).eval()

    @torch.no_grad()
    def logprobs(record):
        return token_logprobs(model, record["input_ids"], record["position_ids"], config.temperature)[0].cpu().numpy()
    return logprobs


class Emitter:
    """Collects the samples of one step and puts packed micro-batches to the ranks' queues, one round at a time."""

    def __init__(self, config, queues, reference=None):
        self.config, self.queues, self.reference = config, queues, reference
        self.step, self.taken, self.pending, self.position = 0, 0, [], Position()
        self.by_task, self.problems, self.drops = {}, Counter(), {}  # of the step: see task_table; samples by problem; likewise by reason, of what was dropped

    def add(self, sample, **extra):
        """Take one more sample of the current step; emits what is full, and everything when the step is complete."""
        self.pending.append(sample)
        self.count(sample)
        self.problems[sample["index"]] += 1
        self.position.leave(sample["index"])
        self.taken += 1
        done = self.taken == self.config.batch_size
        tokens = sum(len(s["tokens"]) for s in self.pending)
        if not done and (tokens < 2 * self.config.row_tokens * len(self.queues) or sample.get("role") == "best"):  # its pair comes next
            return
        room, length = self.config.row_tokens, lambda samples: sum(len(s["tokens"]) for s in samples)
        parts = [part for unit in units(self.pending) for part in ([unit] if length(unit) <= room else [[s] for s in unit])]
        rows = [[s for i in row for s in parts[i]] for row in pack([length(part) for part in parts], room)]
        lengths = [np.array([len(s["tokens"]) for s in row]) for row in rows]
        work = [(n + ATTENTION / 2 * n ** 2).sum() for n in lengths]  # rows of a round should take equally long on every rank
        rows = [rows[k] for k in np.argsort(work)[::-1] if done or lengths[k].sum() >= FULL * self.config.row_tokens]
        ranks = len(self.queues)
        if not done:
            rows = rows[:len(rows) // ranks * ranks]  # whole rounds only
        elif len(rows) % ranks:
            rows += [[]] * (ranks - len(rows) % ranks)
        for k in range(0, len(rows), ranks):
            last = done and k + ranks == len(rows)
            for queue, row in zip(self.queues, rows[k:k + ranks]):
                record = row_record(row)
                if self.reference:
                    record["ref_logprobs"] = self.reference(record)
                of_step = dict(position=self.position.state(), by_task=self.task_table(), problems=self.problems, drops=self.drops) if last else {}
                queue.put(record | dict(run_id=self.config.run_id, step=self.step, last=last, **of_step, **extra), self.config.stall_timeout)
        sent = {id(s) for row in rows for s in row}
        self.pending = [s for s in self.pending if id(s) not in sent]
        if done:
            self.step, self.taken, self.by_task, self.problems, self.drops = self.step + 1, 0, {}, Counter(), {}

    def drop(self, index, reason):
        """A sample of problem `index` will not be trained."""
        self.drops.setdefault(reason, Counter())[index] += 1
        self.position.leave(index)

    def count(self, sample):
        """Add a sample to its task's sums: samples, reward, sampled tokens, and how many had which outcome."""
        sums = self.by_task.setdefault(sample["task"], Counter())
        sums.update({"samples": 1, "reward": float(sample["reward"]), "tokens": int(sample["mask"].sum()), sample["outcome"]: 1})

    def task_table(self):
        """{task: {samples, reward, tokens, <outcome>}} of the step: a count, means per sample, shares of the samples."""
        return {task: {k: v if k == "samples" else v / sums["samples"] for k, v in sums.items()} for task, sums in self.by_task.items()}


def main(run_dir):
    config = cfg.load(run_dir)
    queues = Path(run_dir, "queues")
    rollouts = Queue(queues / "rollouts")
    emitter = Emitter(config, [Queue(queues / "batches" / f"rank_{r}", maxlen=1000) for r in range(config.trainers)],
                      reference_model(config) if config.needs_reference else None)
    ring, dropped, of_actor, pace = deque(), Counter(), Counter(), {}
    reported = 0
    early: dict[int, dict] = {}  # late = wait: groups that came before their turn, by index
    rng = random.Random(config.seed)
    deadline = time.monotonic() + config.start_timeout
    while not (trained := noticed(queues / "version.json")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"preprocess: the trainer announced no version in {queues / 'version.json'} within {config.start_timeout:.0f} s")
        time.sleep(0.05)
    emitter.step, position = trained["version"], Position(**trained["position"])
    emitter.position = position
    print(f"preprocess: {config.trainers} ranks, rows of {config.row_tokens} tokens, from step {emitter.step}", flush=True)
    turn, resumed_ahead = position.next, set(position.ahead)  # late = wait: index of the group that comes next, those that will not come
    phase = 0  # samples of the current generation phase that are shuffled into the ring's head (conventional RL only)
    last_input, next_words = time.monotonic(), 0.0

    def drop(index, reason):
        """Counted, announced, and made up for by the actor that it came from."""
        dropped[reason] += 1
        of_actor[index % config.actors] += 1
        emitter.drop(index, reason)

    while emitter.step < config.steps:
        # In: everything that has arrived, as far as the ring has room.
        while len(ring) < config.ring or config.on_full == "drop_oldest":
            try:
                seq, group = rollouts.get(0.0 if ring else 0.02)
            except TimeoutError:
                break
            if group["run_id"] != config.run_id:
                raise RuntimeError(f"preprocess: record {seq} of {rollouts.path} is of run {group['run_id']}, this is run {config.run_id}: start over with --fresh True")
            last_input, pace[group["index"] % config.actors] = time.monotonic(), (group["gen_tok_s"], group["gen_idle"])
            arrived = [group]
            position.arrive(group["index"], len(group["lengths"]) + group["lost"])
            for _ in range(group["lost"]):
                drop(group["index"], "failed")
            if config.late == "wait":  # in the order in which they were started, whatever the order in which they were done
                early[group["index"]], arrived = group, []
                while turn in early or turn in resumed_ahead:
                    arrived += [early.pop(turn)] if turn in early else []
                    turn += 1
            for sample in (s for g in arrived for s in samples_of(g, config)):
                if config.no_signal == "drop" and not sample["signal"]:
                    drop(sample["index"], "no_signal")
                elif len(sample["tokens"]) > config.row_tokens:
                    drop(sample["index"], "too_long")
                else:
                    ring.append(sample)
            while len(ring) > config.ring and config.on_full == "drop_oldest":
                drop(ring.popleft()["index"], "ring_full")
            rollouts.ack(seq)
        if dropped.total() != reported:
            reported = dropped.total()
            notice(queues / "dropped.json", samples=reported, reasons=dropped, of_actor=of_actor)
            if time.monotonic() > next_words:
                next_words = time.monotonic() + 5
                print(f"preprocess: {reported} samples dropped so far: {dict(dropped)}", flush=True)
        # Out: at most one step ahead of the trainer, so that the ring decides what it gets.
        if emitter.step > noticed(queues / "version.json")["version"] + 1 or not ring:
            if time.monotonic() - last_input > config.stall_timeout:
                raise TimeoutError(f"preprocess: no rollouts in {rollouts.path} for {config.stall_timeout:.0f} s")
            time.sleep(0.005)
            continue
        if config.conventional_g and not phase:
            g = config.conventional_g
            wanted = min(g - emitter.step % g, config.steps - emitter.step) * config.batch_size
            if len(ring) < wanted:
                time.sleep(0.005)
                continue
            head = units([ring.popleft() for _ in range(wanted)])
            rng.shuffle(head)
            ring.extendleft(reversed([s for unit in head for s in unit]))
            phase = wanted
        sample = ring.popleft()
        phase -= bool(phase)
        emitter.add(sample, gen_tok_s=sum(x for x, _ in pace.values()), gen_idle=sum(x for _, x in pace.values()) / len(pace))
    print(f"preprocess: all {config.steps} steps emitted, dropped {dict(dropped)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""A run, simulated event by event with the speeds that real runs have had.

tools/simulate.py has the command line. The simulation has the gate of actor.py, the engines' slots,
groups that wait for their longest attempt, the order of groups and the rows of preprocess.py, the
trainer, weight updates that arrive while sequences are in progress, and evaluations. The lengths of
answers and the speeds are taken from the metrics of real runs. So a prediction holds for the model
of these runs, on the machine that made them.

An engine that has h sequences in progress makes one token for each of them in a + b h seconds. A
trainer rank needs a constant time for a token, and another one for an optimizer step. Attempts at
one problem share the computation of their prompt. Deliberately absent: the time of prompts in the
engines, failed attempts, episodes of several turns, padded rows, the traffic between ranks, engines
that come and go. `SIMULATED` has the knobs that may be changed.
"""

import argparse
import bisect
import heapq
import itertools
import math
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

import config as cfg
from actor import allowed_groups
from plumbing.queues import read_json
from preprocess import ROW_IS_FULL, groups_needed
from tools.common import (
    FILLING,
    NEWEST,
    find_run,
    newest_rollouts,
    read_metrics,
    since_newest_start,
)
from train import updates_engines

# the quantities that are predicted, and compared with those of a real run
QUANTITIES = "step_s wait_data gen_idle gen_tok_s lag_mean lag_oldest lag_max".split()
# the knobs that the simulation understands
SIMULATED = set(
    "steps batch_size attempts max_lag conventional_g late on_full concurrency engines trainers "
    "eval_every eval_problems eval_attempts save_every".split()
)
# the knobs that all runs must share, because speeds and lengths depend on them
SHARED = (
    "task model dtype rows row_tokens max_new_tokens lora_rank tensor_parallel engine_threads "
    "trainer_threads"
).split()
# The number of steps of which `predict` takes means; the seconds that all its simulations may take;
# the largest error of the simulated seconds of a step, as a share, with which it predicts anything.
PREDICTED_STEPS = 30
PREDICTION_LIMIT_S = 20.0
LARGEST_ERROR = 0.25
# keys of a step that earlier versions of this code did not write
MEASURED = {"turns", "lengths", "gather_s", "sync_s", "save_s", "lag_oldest"}
# quantiles of the lengths that are kept
QUANTILES = 1000
# the least number of steps of a run from which anything is measured
LEAST_STEPS = 4 * FILLING
# seconds over which gen_idle and gen_tok_s of metrics.jsonl are means (plumbing/client.py)
PACE_S = 10.0
# An assumption: seconds from the end of a group until preprocess.py has its record.
LATENCY_S = 0.02
# --steps of a simulated run whose end is never reached
ENDLESS = 1_000_000_000


@dataclass
class Speeds:
    """What a machine needs for its work on a model, in seconds where nothing else is said."""

    # a request beside the steps in which its tokens are decoded
    request: float
    # a decoding step with h sequences in progress: decode_base + decode_each * h
    decode_base: float
    decode_each: float
    # a token on one rank of the trainer
    train_token: float
    # an optimizer step beside its tokens
    train_step: float
    # a weight update, until the engines serve it; and the first part of it, in which the trainer
    # waits
    update: float
    gather: float
    # a checkpoint, until the trainer goes on
    save: float
    # the number of tokens of a prompt
    prompt_tokens: float

    def decode_s(self, sequences):
        """The seconds of a decoding step."""
        return self.decode_base + self.decode_each * sequences


@dataclass
class Lengths:
    """The distribution of the number of sampled tokens of an attempt.

    quantiles [QUANTILES]: the lengths in ascending order. correlation: that of two attempts at one
    problem, between their normal scores.
    """

    quantiles: np.ndarray
    correlation: float

    def draw(self, rng, attempts):
        """The lengths of the attempts at one problem, [attempts]."""
        common = math.sqrt(self.correlation) * rng.standard_normal()
        own = math.sqrt(1 - self.correlation) * rng.standard_normal(attempts)
        ranks = [NormalDist().cdf(score) for score in common + own]
        return [int(self.quantiles[int(rank * (QUANTILES - 1e-6))]) for rank in ranks]


# ---- what the metrics of runs say


@dataclass
class Run:
    """What is read of a run: its Config, and since it was last continued its steps (the lines of
    metrics.jsonl), the durations of requests (EngineClient.durations) and its logged rollouts.
    """

    config: cfg.Config
    lines: list
    durations: list
    rollouts: list


def read_run(run_dir):
    """The Run in a directory. Raises ConfigError if nothing can be measured from it."""
    config = cfg.load(run_dir)
    [lines] = read_metrics(run_dir, "step")
    lines = since_newest_start(run_dir, lines)
    cfg.require(
        len(lines) >= LEAST_STEPS,
        f"{run_dir} has {len(lines)} steps since its start: {LEAST_STEPS} are needed",
    )
    cfg.require(
        all(MEASURED <= line.keys() for line in lines),
        f"{run_dir}: metrics.jsonl was written by an earlier version of this code",
    )
    turns = max(line["turns"] for line in lines)
    cfg.require(
        turns <= 1, f"{run_dir}: attempts have up to {turns:.1f} turns: only one is simulated"
    )
    for knob, value in (("no_signal", "drop"), ("late", "mask")):
        cfg.require(
            getattr(config, knob) != value,
            f"{run_dir} has --{knob} {value}, which is not simulated: use a run without it",
        )
    durations = read_json(Path(run_dir, "queues", "pace.json")).get("durations")
    cfg.require(
        durations and durations[0][0] >= 100,
        f"{run_dir}/queues/pace.json has no durations, or those of fewer than 100 requests: let "
        "the run go on. If an earlier version of this code has made it, make another run",
    )
    return Run(config, lines, durations, newest_rollouts(run_dir))


def least_squares(normal, right):
    """The x >= 0 with the least x' normal x - 2 right' x. normal [n, n], right [n], n small."""
    # Columns of very different sizes, such as 1 and thousands of tokens, are scaled to one size.
    scale = np.sqrt(np.diag(normal))
    scale[scale == 0] = 1.0
    normal = normal / np.outer(scale, scale)
    right = right / scale
    best = np.zeros(len(right))
    least = 0.0
    for chosen in itertools.product([False, True], repeat=len(right)):
        k = np.flatnonzero(chosen)
        x = np.zeros(len(right))
        x[k] = np.linalg.lstsq(normal[np.ix_(k, k)], right[k], rcond=1e-12)[0]
        value = x @ normal @ x - 2 * right @ x
        if x.min() >= 0 and value < least:
            best = x
            least = value
    return [float(value) for value in best / scale]


def measure_speeds(runs):
    """The Speeds of these Runs of one model on one machine; their first FILLING steps do not count.

    Of the steps' times, only as much can be told apart as they differ in: a run whose steps have
    nearly equal numbers of tokens says little of train_step. A second run with another --batch_size
    does.
    """
    durations = sum(np.array(run.durations) for run in runs)
    request, decode_base, decode_each = least_squares(durations[:, :3], durations[:, 3])
    cfg.require(
        decode_base + decode_each > 0,
        "the durations of requests do not say how long a decoding step takes: they need answers of "
        "different lengths",
    )
    normal = np.zeros((2, 2))
    right = np.zeros(2)
    updates = []
    gathers = []
    saves = []
    prompts = []
    for run in runs:
        for line in run.lines[FILLING:]:
            samples = sum(line["problems"].values())
            if not samples:
                continue
            prompt = line["tokens"] / samples - line["length_mean"]
            prompts.append(prompt)
            computed = line["tokens"]
            if run.config.rows in ("auto", "packed"):
                computed -= prompt * (samples - len(line["problems"]))
            waits = line["wait_data_s"] + line["wait_sync_s"] + line["save_s"]
            x = np.array([1.0, computed / run.config.trainers])
            normal += np.outer(x, x)
            right += x * (line["step_s"] - waits)
            if line["sync_s"]:
                # sync_s begins with the wait for the update before.
                updates.append(line["sync_s"] - line["wait_sync_s"] + line["gather_s"])
                gathers.append(line["gather_s"])
            if line["save_s"]:
                saves.append(line["save_s"])
    train_step, train_token = least_squares(normal, right)
    update, gather, save = (float(np.median(x)) if x else 0.0 for x in (updates, gathers, saves))
    return Speeds(
        request=request,
        decode_base=decode_base,
        decode_each=decode_each,
        train_token=train_token,
        train_step=train_step,
        update=update,
        gather=gather,
        save=save,
        prompt_tokens=float(np.mean(prompts)),
    )


def measure_lengths(run):
    """The Lengths of the attempts of a Run, without its first FILLING steps."""
    counts = Counter()
    total = 0.0
    for line in run.lines[FILLING:]:
        for bucket, count in line["lengths"].items():
            lowest, _, highest = bucket.partition("-")
            values = range(int(lowest), int(highest or lowest) + 1)
            for value in values:
                counts[min(value, run.config.max_new_tokens)] += count / len(values)
        total += line["length_mean"] * sum(line["lengths"].values())
    values = np.array(sorted(counts))
    shares = np.cumsum([counts[value] for value in values]) / sum(counts.values())
    quantiles = values[
        np.searchsorted(shares, (np.arange(QUANTILES) + 0.5) / QUANTILES).clip(max=len(values) - 1)
    ]
    # The exact mean is known; within a bucket lengths are not.
    exact = total / sum(counts.values())
    scaled = np.rint(quantiles * exact / quantiles.mean()).clip(1, run.config.max_new_tokens)
    return Lengths(scaled.astype(int), correlation_of_neighbours(run.rollouts))


def correlation_of_neighbours(rollouts):
    """The correlation of the lengths of two attempts at one problem, between normal scores, 0 to 1.

    rollouts: lines of samples.jsonl, of which neighbours with the same problem are taken. It is
    computed from the correlation of their ranks, where equal lengths share a mean rank.
    """
    pairs = []
    for a, b in itertools.pairwise(rollouts):
        if (a["step"], a["task"], a["problem"]) == (b["step"], b["task"], b["problem"]):
            pairs.append([sampled_tokens(a), sampled_tokens(b)])
    if len(pairs) < 10:
        return 0.0
    lengths = np.array(pairs + [pair[::-1] for pair in pairs])
    _, places, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    if len(counts) == 1:
        return 0.0
    ranks = (np.cumsum(counts) - counts / 2)[places].reshape(lengths.shape)
    of_ranks = np.corrcoef(ranks.T)[0, 1]
    return float(np.clip(2 * np.sin(np.pi / 6 * of_ranks), 0.0, 0.99))


def sampled_tokens(rollout):
    """The number of sampled tokens of a line of samples.jsonl."""
    return sum(len(texts) for version, texts, *_ in rollout["spans"] if version >= 0)


def observed(lines):
    """{quantity: mean over the steps of a run, without the first FILLING}."""
    return means_of(lines[FILLING:])


def means_of(lines):
    """{quantity: mean over these steps}."""
    seconds = sum(line["step_s"] for line in lines)
    means = {"step_s": seconds / len(lines)}
    means["wait_data"] = sum(line["wait_data_s"] for line in lines) / seconds
    for name in QUANTITIES[2:]:
        means[name] = sum(line[name] for line in lines) / len(lines)
    return means


# ---- the simulation


@dataclass
class Attempt:
    """An attempt at a problem, in training or in an evaluation (then `group` is None)."""

    length: int
    group: "Group" = None
    # value of the engine's counter at its first decoding step
    start: float = 0.0
    # {version: number of tokens that it has sampled}
    versions: dict = field(default_factory=dict)


@dataclass
class Group:
    """The attempts at one problem. left: the number of attempts that have not ended."""

    draw: int
    attempts: list
    left: int


class Engine:
    """An engine. Its counter is the number of decoding steps that it has made.

    With every step each sequence in progress gets a token, so a sequence of n tokens that begins at
    counter c ends at c + n. The counter is a float: between two events time passes evenly. Before
    an engine is changed, it must be advanced to the time of the change.
    """

    def __init__(self, speeds):
        self.speeds = speeds
        self.time = 0.0
        self.counter = 0.0
        # sum of the slots in use x seconds
        self.occupied = 0.0
        # heap of (value of the counter at its end, number, attempt)
        self.running = []
        self.numbers = itertools.count()
        # the number of attempts whose tokens are there, but whose requests have not ended
        self.ending = 0
        # values of the counter at which weights were swapped, and the versions from there on
        self.swapped_at = [0.0]
        self.served = [0]

    @property
    def load(self):
        """The number of requests in progress."""
        return len(self.running) + self.ending

    def advance(self, now):
        """Decode until `now`."""
        self.occupied += self.load * (now - self.time)
        if self.running:
            self.counter += (now - self.time) / self.speeds.decode_s(self.load)
        self.time = now

    def next_end(self):
        """The time at which the next attempt ends."""
        if not self.running:
            return math.inf
        steps = max(self.running[0][0] - self.counter, 0.0)
        return self.time + steps * self.speeds.decode_s(self.load)

    def add(self, attempt):
        attempt.start = self.counter
        end = self.counter + attempt.length
        heapq.heappush(self.running, (end, next(self.numbers), attempt))

    def pop_ended(self):
        """Take away the attempt whose last token is there now, and note its tokens' versions."""
        end, _, attempt = heapq.heappop(self.running)
        self.ending += 1
        self.counter = max(self.counter, end)
        first = bisect.bisect_right(self.swapped_at, attempt.start) - 1
        done = 0
        for k in range(first, len(self.served)):
            # Weights are swapped between two steps: the step that has begun is the old version's.
            until = self.swapped_at[k + 1] if k + 1 < len(self.served) else end
            tokens = min(math.ceil(until - attempt.start), attempt.length)
            if tokens > done:
                attempt.versions[self.served[k]] = tokens - done
            done = max(done, tokens)
        return attempt

    def swap(self, version):
        """Serve other weights from now on."""
        self.swapped_at.append(self.counter)
        self.served.append(version)


class Simulation:
    """A run of `config` with these Speeds and Lengths. `lines` gets a dict for each step."""

    def __init__(self, config, speeds, lengths, seed=0):
        self.config = config
        self.speeds = speeds
        self.lengths = lengths
        self.rng = np.random.default_rng(seed)
        self.engines = [Engine(speeds) for _ in range(config.engines)]
        # of each engine: the time at which its next attempt ends, and its load, see `changed`
        self.ends = np.full(config.engines, math.inf)
        self.loads = np.zeros(config.engines, int)
        self.now = 0.0
        # heap of (time, number, function, its arguments)
        self.events = []
        self.numbers = itertools.count()
        self.lines = []
        # The actor: attempts that wait for a slot of an engine, the numbers of groups started and
        # dropped and of slots taken, the version of the newest evaluation.
        self.waiting = deque()
        self.started = 0
        self.dropped = 0
        self.taken = 0
        self.evaluated = 0
        # preprocess: groups that wait for earlier draws, and the draw that they wait for; groups
        # that wait for the trainer; those left in a training phase. Of the step in progress: its
        # number, its groups, and the attempts that are not yet in a row.
        self.early = {}
        self.next_draw = 0
        self.groups = deque()
        self.left_in_phase = 0
        self.step = 0
        self.packed_groups = 0
        self.pending = []
        # The trainer: rounds of rows that wait; whether it is at work, and since when it is not;
        # its version, and the version that actor and preprocess know.
        self.rounds = deque()
        self.is_busy = False
        self.idle_since = 0.0
        self.version = 0
        self.known_version = 0
        # whether an update is on its way, and whether the next one waits for it
        self.is_sending = False
        self.pushes_next = False
        # the seconds of a checkpoint that the trainer writes before its next step
        self.save_s = 0.0
        # Of the trainer's step in progress: its begin, the sum of Engine.occupied at that time,
        # seconds waited for data, attempts trained and tokens sampled.
        self.step_start = 0.0
        self.occupied = 0.0
        self.waited = 0.0
        self.trained = []
        self.sampled = 0
        # as in the metrics: means over some ten seconds
        self.pace = dict(gen_idle=1.0, gen_tok_s=0.0)

    def run(self, is_done=lambda: False):
        """Simulate to the end of the last step, or until is_done(); returns `lines`."""
        self.evaluate()
        self.act()
        while self.version < self.config.steps and not is_done():
            first = int(np.argmin(self.ends))
            next_end = float(self.ends[first])
            next_event = self.events[0][0] if self.events else math.inf
            self.now = min(next_end, next_event)
            if self.now == math.inf:
                raise RuntimeError("nothing happens any more: a fault of tools/simulate_run.py")
            if next_end <= next_event:
                engine = self.engines[first]
                engine.advance(self.now)
                attempt = engine.pop_ended()
                self.changed(first)
                self.after(self.speeds.request, self.end_request, attempt, first)
            else:
                _, _, function, arguments = heapq.heappop(self.events)
                function(*arguments)
            self.act()
        return self.lines

    def after(self, seconds, function, *arguments):
        """Call a function once so many seconds have passed."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), function, arguments))

    def changed(self, number):
        """Note what an engine, which was changed, is going to do."""
        self.ends[number] = self.engines[number].next_end()
        self.loads[number] = self.engines[number].load

    # ---- the actor

    def act(self):
        """Start as many groups as free slots and the gate allow."""
        config = self.config
        allowed = allowed_groups(config, self.known_version) + self.dropped
        capacity = config.concurrency * len(self.engines)
        while self.taken < capacity and self.started < allowed:
            lengths = self.lengths.draw(self.rng, config.attempts)
            group = Group(self.started, [], config.attempts)
            group.attempts = [Attempt(length, group) for length in lengths]
            self.started += 1
            self.taken += config.attempts
            self.send(group.attempts)

    def send(self, attempts):
        """Send attempts to the least loaded engines; without a free slot they wait."""
        for attempt in attempts:
            number = int(np.argmin(self.loads))
            if self.loads[number] < self.config.concurrency:
                self.engines[number].advance(self.now)
                self.engines[number].add(attempt)
                self.changed(number)
            else:
                self.waiting.append(attempt)

    def evaluate(self):
        for _ in range(self.config.eval_problems):
            lengths = self.lengths.draw(self.rng, self.config.eval_attempts)
            self.send([Attempt(length) for length in lengths])

    def end_request(self, attempt, number):
        engine = self.engines[number]
        engine.advance(self.now)
        engine.ending -= 1
        if self.waiting:
            engine.add(self.waiting.popleft())
        self.changed(number)
        self.sampled += attempt.length
        group = attempt.group
        if group is None:
            return
        self.taken -= 1
        group.left -= 1
        if not group.left:
            self.after(LATENCY_S, self.receive, group)

    # ---- preprocess

    def receive(self, group):
        """A group has arrived, see preprocess.GroupBuffer.receive."""
        config = self.config
        if config.late in ("wait", "hold"):
            self.early[group.draw] = group
            while self.next_draw in self.early:
                self.groups.append(self.early.pop(self.next_draw))
                self.next_draw += 1
        else:
            self.groups.append(group)
        room = max(2, config.conventional_g) * config.groups_per_step
        if config.on_full == "drop_oldest" and len(self.groups) > room:
            self.groups.popleft()
            self.dropped += 1
        self.emit()

    def emit(self):
        """Pack what the trainer may have, see preprocess.emit_steps."""
        config = self.config
        while self.step < config.steps and self.step <= self.known_version + 1:
            packer = PackerState(self.step, self.packed_groups)
            needed = groups_needed(config, packer, self.left_in_phase)
            if len(self.groups) < needed:
                break
            if config.conventional_g and not self.left_in_phase:
                self.left_in_phase = needed
                phase = [self.groups.popleft() for _ in range(needed)]
                self.rng.shuffle(phase)
                self.groups.extendleft(phase)
            self.pack(self.groups.popleft())
            self.left_in_phase = max(self.left_in_phase - 1, 0)

    def pack(self, group):
        """Add a group to the step, and give full rounds to the trainer; at its end all rows."""
        config = self.config
        self.pending += group.attempts
        self.packed_groups += 1
        is_complete = self.packed_groups == config.groups_per_step
        tokens = self.computed_tokens(self.pending)
        if not is_complete and tokens < 2 * config.row_tokens * config.trainers:
            return
        rows = [[]]
        for attempt in self.pending:
            if self.computed_tokens([*rows[-1], attempt]) > config.row_tokens and rows[-1]:
                rows.append([])
            rows[-1].append(attempt)
        ranks = config.trainers
        if not is_complete:
            full = ROW_IS_FULL * config.row_tokens
            count = sum(self.computed_tokens(row) >= full for row in rows[:-1])
            rows.sort(key=self.computed_tokens, reverse=True)
            count = count // ranks * ranks
            self.pending = [attempt for row in rows[count:] for attempt in row]
            rows = rows[:count]
        for first in range(0, len(rows), ranks):
            is_last = is_complete and first + ranks >= len(rows)
            self.rounds.append((rows[first : first + ranks], is_last))
        if is_complete:
            self.pending = []
            self.packed_groups = 0
            self.step += 1
        self.train()

    def computed_tokens(self, attempts):
        """The tokens that the trainer computes for attempts in a row, which share their prompts."""
        prompts = len(attempts)
        if self.config.rows in ("auto", "packed"):
            prompts = len({attempt.group.draw for attempt in attempts})
        return sum(a.length for a in attempts) + prompts * self.speeds.prompt_tokens

    # ---- the trainer

    def train(self):
        """Begin with the next round, if there is one and nothing else is to be done."""
        if self.is_busy or not self.rounds:
            return
        self.waited += self.now - self.idle_since
        self.is_busy = True
        rows, is_last = self.rounds.popleft()
        for row in rows:
            self.trained += row
        # The ranks wait for the one with the longest row.
        seconds = max(map(self.computed_tokens, rows)) * self.speeds.train_token
        if is_last:
            self.after(seconds + self.speeds.train_step, self.end_step)
        else:
            self.after(seconds, self.become_idle)

    def become_idle(self):
        self.is_busy = False
        self.idle_since = self.now
        self.train()

    def end_step(self):
        """A step is made: note it, and send the weights."""
        self.note_step()
        self.version += 1
        every = self.config.save_every
        self.save_s = self.speeds.save if every and self.version % every == 0 else 0.0
        if not updates_engines(self.config, self.version):
            self.announce(self.version)
            self.after(self.save_s, self.become_idle)
        elif self.is_sending:
            self.pushes_next = True
        else:
            self.push()

    def push(self):
        """Copy the weights, for which the trainer waits; the engines serve them later."""
        self.is_sending = True
        self.pushes_next = False
        self.after(self.speeds.gather + self.save_s, self.become_idle)
        self.after(max(self.speeds.update, self.speeds.gather), self.deliver, self.version)

    def deliver(self, version):
        for engine in self.engines:
            engine.advance(self.now)
            engine.swap(version)
        self.is_sending = False
        # Engines answer evaluations, so they are due when the engines have a version.
        every = self.config.eval_every
        if every and version // every > self.evaluated // every:
            self.evaluated = version
            self.evaluate()
        self.announce(version)
        if self.pushes_next:
            self.push()

    def announce(self, version):
        """Actor and preprocess learn of a version."""
        self.known_version = version
        self.emit()

    def note_step(self):
        """Add the line of a step to `lines`."""
        seconds = self.now - self.step_start
        slots = self.config.concurrency * len(self.engines)
        for engine in self.engines:
            engine.advance(self.now)
        occupied = sum(engine.occupied for engine in self.engines)
        gen_idle = 1 - (occupied - self.occupied) / seconds / slots
        newest = dict(gen_idle=gen_idle, gen_tok_s=self.sampled / seconds)
        for name, value in newest.items():
            weight = 1 - math.exp(-seconds / PACE_S)
            self.pace[name] += weight * (value - self.pace[name])
        lags = Counter()
        oldest = 0.0
        for attempt in self.trained:
            for version, count in attempt.versions.items():
                lags[self.version - version] += count
            oldest += self.version - min(attempt.versions)
        tokens = sum(lags.values())
        lag_mean = sum(lag * count for lag, count in lags.items()) / tokens
        line = dict(step_s=seconds, wait_data_s=self.waited, lag_mean=lag_mean, lag_max=max(lags))
        self.lines.append(line | dict(lag_oldest=oldest / len(self.trained)) | self.pace)
        self.step_start = self.now
        self.waited = 0.0
        self.trained = []
        self.occupied = occupied
        self.sampled = 0


@dataclass
class PackerState:
    """The part of preprocess.Packer that preprocess.groups_needed reads."""

    step: int
    groups_added: int


# ---- the command


def simulate(config, speeds, lengths, seed=0):
    """{quantity: mean} of a simulated run, as `observed` has them of a real one."""
    return observed(Simulation(config, speeds, lengths, seed).run())


def steady_lines(config, speeds, lengths, steps, is_late):
    """The lines of so many simulated steps, which begin when the pipeline has filled.

    It fills for FILLING steps and for as long as two of the longest answers take. In conventional
    RL the lines are those of whole phases, so that there may be more of them. If is_late(), there
    is no more time for the simulation, and TimeoutError is raised.
    """
    simulation = Simulation(replace(config, steps=ENDLESS), speeds, lengths)
    filling_s = 2 * lengths.quantiles[-1] * speeds.decode_s(config.concurrency)
    phase = max(config.conventional_g, 1)
    steps = math.ceil(steps / phase) * phase
    filled = None

    def is_done():
        nonlocal filled
        if is_late():
            raise TimeoutError("a simulation takes too long")
        version = simulation.version
        if filled is None and version >= FILLING and simulation.now > filling_s:
            filled = math.ceil(version / phase) * phase
        return filled is not None and version >= filled + steps

    return simulation.run(is_done)[filled : filled + steps]


def predict(run_dir, changes):
    """Simulate a run with other knobs: (its mean lag as it is, [(speed-up, mean lag)]).

    changes: a list of {knob: value}; each has a pair in the list. Both sides of the speed-up are
    simulated. Raises ConfigError if the run cannot be simulated or if the simulation is far off,
    and TimeoutError after PREDICTION_LIMIT_S.
    """
    run = read_run(run_dir)
    speeds = measure_speeds([run])
    lengths = measure_lengths(run)
    deadline = time.monotonic() + PREDICTION_LIMIT_S

    def simulated(change):
        config = replace(run.config, **change)
        is_late = lambda: time.monotonic() > deadline
        return means_of(steady_lines(config, speeds, lengths, PREDICTED_STEPS, is_late))

    now = simulated({})
    measured = means_of(run.lines[FILLING:][-NEWEST:])["step_s"]
    cfg.require(
        abs(now["step_s"] / measured - 1) <= LARGEST_ERROR,
        f"a step takes {measured:.3g} s and in a simulation {now['step_s']:.3g} s",
    )
    then = map(simulated, changes)
    pairs = [(now["step_s"] / means["step_s"], means["lag_mean"]) for means in then]
    return now["lag_mean"], pairs


def require_shared(runs, run_dirs):
    """Raise ConfigError unless the Runs in these directories are of one model and machine."""
    for run, run_dir in zip(runs, run_dirs):
        for name in SHARED:
            first = getattr(runs[0].config, name)
            value = getattr(run.config, name)
            cfg.require(
                value == first,
                f"{run_dir} has --{name} {value}, and {run_dirs[0]} has {first}: speeds and "
                "lengths depend on it, so that it must be the same in all runs",
            )


def with_knobs(config, knobs):
    """The Config with the knobs of a command line. Raises ConfigError for what is not simulated."""
    other = cfg.check(cfg.parse(knobs, default=config))
    values = asdict(config)
    for name, value in asdict(other).items():
        cfg.require(
            value == values[name] or name in SIMULATED,
            f"--{name} is not simulated; these knobs are: {', '.join(sorted(SIMULATED))}",
        )
    cfg.require(other.late != "mask", "--late mask is not simulated")
    cfg.require(
        other.engines and other.trainers, "--engines and --trainers must be at least 1 each"
    )
    cfg.require(other.steps >= LEAST_STEPS, f"--steps must be at least {LEAST_STEPS}")
    return other


def print_speeds(speeds, lengths):
    """Print what was measured."""
    print(
        f"engine: a request takes {1000 * speeds.request:.1f} ms, and a decoding step "
        f"{1000 * speeds.decode_base:.2f} ms + {1000 * speeds.decode_each:.4f} ms for each of its "
        "sequences\n"
        f"trainer: a token takes a rank {1e6 * speeds.train_token:.1f} us, an optimizer step "
        f"{1000 * speeds.train_step:.1f} ms\n"
        f"updates: the engines serve new weights after {speeds.update:.3f} s\n"
        f"answers: {lengths.quantiles.mean():.1f} tokens on average; the correlation of two at one "
        f"problem is {lengths.correlation:.2f}"
    )


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="tools/simulate.py",
        description=__doc__.splitlines()[0],
        epilog=f"Knobs that the simulated run may have in place of its own: {sorted(SIMULATED)}.",
    )
    p.add_argument(
        "runs", nargs="+", help="runs whose speeds are taken; the first one is simulated"
    )
    p.add_argument(
        "--like", metavar="RUN", help="simulate the configuration of this run, and compare with it"
    )
    arguments, knobs = p.parse_known_args(argv)
    try:
        run_dirs = [find_run(run) for run in arguments.runs]
        if arguments.like:
            run_dirs.append(find_run(arguments.like))
        runs = [read_run(run_dir) for run_dir in run_dirs]
        require_shared(runs, run_dirs)
        target = runs[-1] if arguments.like else runs[0]
        config = replace(target.config, steps=len(target.lines))
        other = with_knobs(config, knobs) if knobs else None
    except cfg.ConfigError as e:
        sys.exit(f"simulate: {e}")
    speeds = measure_speeds(runs[:-1] if arguments.like else runs)
    lengths = measure_lengths(runs[0])
    print_speeds(speeds, lengths)
    columns = {"measured": observed(target.lines)}
    columns["simulated"] = simulate(config, speeds, lengths)
    if other:
        columns["with knobs"] = simulate(other, speeds, lengths)
    print("".join(f"{name:>14}" for name in ("", *columns)))
    for quantity in QUANTITIES:
        cells = "".join(f"{column[quantity]:>14.4g}" for column in columns.values())
        print(f"{quantity:>14}{cells}")
    return columns

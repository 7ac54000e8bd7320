"""A run, simulated event by event with the speeds that other runs have had.

tools/simulate.py has the command line. What is simulated: the gate of actor.py, the places of the
engines, groups that wait for their longest attempt, the order of groups and the rows of
preprocess.py, the trainer, weight updates that arrive while sequences are in progress, evaluations.
What is taken from the metrics of real runs: the lengths of answers, and the speeds below. So the
simulation knows nothing of a machine, and predicts other knobs on the machine of these runs.

An engine that has h sequences in progress makes one token for each of them in decode_s(h) seconds,
which is a straight line in h. A trainer rank trains a token in a constant time, and makes an
optimizer step in another constant time. Deliberately absent: prompts in the engines' time, failed
attempts, episodes of several turns, --no_signal drop, engines that come and go.
"""

import argparse
import bisect
import heapq
import itertools
import json
import math
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from actor import allowed_groups
from plumbing.queues import read_json
from preprocess import ROW_IS_FULL, groups_needed
from tools.common import FILLING, find_run, read_metrics
from train import updates_engines

# the quantities that are predicted, and compared with those of a real run
QUANTITIES = "step_s wait_data gen_idle gen_tok_s lag_mean lag_oldest lag_max".split()
# quantiles of the lengths that are kept
QUANTILES = 1000


@dataclass
class Speeds:
    """What a machine needs for its work on a model; all values but the tokens are seconds."""

    # one step of decoding with h sequences takes decode_base + decode_each * h; a request takes
    # `request` beside the steps of its tokens
    request: float
    decode_base: float
    decode_each: float
    # for one token on one rank; for an optimizer step beside its tokens
    train_token: float
    train_step: float
    # the trainer's part of a weight update; all of it, until the engines serve the new weights; the
    # part of it in which engines do not decode
    gather: float
    update: float
    pause: float
    # the trainer's part of a checkpoint
    save: float
    # tokens of a prompt
    prompt_tokens: float
    # from the end of a group until preprocess.py has it
    latency: float = 0.02

    def decode_s(self, sequences):
        """The seconds of a step of decoding."""
        return self.decode_base + self.decode_each * sequences


@dataclass
class Lengths:
    """The law of the sampled tokens of an attempt.

    quantiles [QUANTILES]: the lengths in ascending order. correlation: that of two attempts at one
    problem, between normal scores.
    """

    quantiles: np.ndarray
    correlation: float

    def draw(self, rng, attempts):
        """The lengths of the attempts at one problem, [attempts]."""
        shared = math.sqrt(self.correlation) * rng.standard_normal()
        own = math.sqrt(1 - self.correlation) * rng.standard_normal(attempts)
        ranks = [NormalDist().cdf(score) for score in shared + own]
        return [int(self.quantiles[int(rank * (QUANTILES - 1e-6))]) for rank in ranks]


# ---- what the metrics of runs say


def least_squares(normal, right):
    """The x >= 0 with the least x' normal x - 2 right' x. normal [n, n], right [n], n small."""
    best = np.zeros(len(right))
    least = 0.0
    for chosen in itertools.product([False, True], repeat=len(right)):
        k = np.flatnonzero(chosen)
        x = np.zeros(len(right))
        x[k] = np.linalg.lstsq(normal[np.ix_(k, k)], right[k], rcond=1e-9)[0]
        value = x @ normal @ x - 2 * right @ x
        if x.min() >= 0 and value < least:
            best = x
            least = value
    return [float(value) for value in best]


def measure_speeds(runs):
    """The Speeds of these runs of one model on one machine.

    runs: [(config, lines, durations)]. lines: the steps of metrics.jsonl, of which the first
    FILLING are left out. durations: those of plumbing.client.EngineClient.
    """
    durations = sum(np.array(durations) for _, _, durations in runs)
    request, decode_base, decode_each = least_squares(durations[:, :3], durations[:, 3])
    normal = np.zeros((2, 2))
    right = np.zeros(2)
    others = {name: [] for name in ("gather_s", "sync_s", "pause_s", "save_s")}
    prompt_tokens = []
    for config, lines, _ in runs:
        for line in lines[FILLING:]:
            waits = line["wait_data_s"] + line["wait_sync_s"] + line["save_s"]
            x = np.array([1.0, line["tokens"] / config.trainers])
            normal += np.outer(x, x)
            right += x * (line["step_s"] - waits)
            prompt = (line["tokens"] - line["sampled_tokens"]) / sum(line["problems"].values())
            prompt_tokens.append(prompt)
            for name, values in others.items():
                if line[name] > 0:
                    values.append(line[name])
    train_step, train_token = least_squares(normal, right)
    gather, update, pause, save = (float(np.median(x)) if x else 0.0 for x in others.values())
    return Speeds(
        request,
        decode_base,
        decode_each,
        train_token,
        train_step,
        gather,
        update,
        pause,
        save,
        float(np.mean(prompt_tokens)),
    )


def measure_lengths(lines, samples):
    """The Lengths of the attempts of these steps.

    samples: lines of samples.jsonl; the correlation is that of neighbours with the same problem.
    """
    counts = Counter()
    for line in lines:
        for bucket, count in line["lengths"].items():
            lowest, _, highest = bucket.partition("-")
            values = range(int(lowest), int(highest or lowest) + 1)
            counts.update({value: count / len(values) for value in values})
    values = np.array(sorted(counts))
    shares = np.cumsum([counts[value] for value in values]) / sum(counts.values())
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    quantiles = values[np.searchsorted(shares, places).clip(max=len(values) - 1)]
    return Lengths(quantiles, correlation_of_neighbours(samples))


def correlation_of_neighbours(samples):
    """The rank correlation of the lengths of two attempts at one problem, between 0 and 1."""
    pairs = []
    for a, b in itertools.pairwise(samples):
        if (a["step"], a["task"], a["problem"]) == (b["step"], b["task"], b["problem"]):
            pairs.append([len(a["behavior_logprobs"]), len(b["behavior_logprobs"])])
    if len(pairs) < 10:
        return 0.0
    both = np.array(pairs + [pair[::-1] for pair in pairs], float)
    if not both.std():
        return 0.0
    ranks = both.argsort(0).argsort(0)
    return float(np.clip(np.corrcoef(ranks.T)[0, 1], 0.0, 0.99))


def read_run(run_dir):
    """(Config, lines of steps, durations of requests, lines of samples.jsonl) of a run."""
    [lines] = read_metrics(run_dir, "step")
    path = Path(run_dir, "samples.jsonl")
    samples = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                samples.append(json.loads(line))
            # the last line of a run in progress may not be whole
            except ValueError:
                break
    durations = read_json(Path(run_dir, "queues", "pace.json")).get("durations")
    return cfg.load(run_dir), lines, durations, samples


def observed(lines):
    """{quantity: mean over the steps of a run, without the first FILLING}."""
    lines = lines[FILLING:]
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
    # value of the engine's counter at its first step
    start: float = 0.0
    # {version: tokens that it has sampled}
    versions: dict = field(default_factory=dict)


@dataclass
class Group:
    draw: int
    attempts: list
    left: int


class Engine:
    """An engine. Its counter is the number of steps of decoding that it has made.

    With every step each sequence in progress gets a token, so a sequence of n tokens that begins at
    counter c ends at c + n. The counter is a float: between two events time passes evenly.
    """

    def __init__(self, places, speeds):
        self.places = places
        self.speeds = speeds
        self.time = 0.0
        self.counter = 0.0
        # heap of (counter at its end, number, attempt)
        self.running = []
        self.waiting = deque()
        # the number of attempts whose answers are on their way
        self.ending = 0
        self.numbers = itertools.count()
        # values of the counter at which weights were swapped, and the versions from there on
        self.swapped_at = [0.0]
        self.served = [0]

    @property
    def load(self):
        """The number of attempts in progress, ending, and waiting."""
        return len(self.running) + self.ending + len(self.waiting)

    def advance(self, now):
        """Decode until `now`."""
        if self.running and now > self.time:
            self.counter += (now - self.time) / self.speeds.decode_s(len(self.running))
        self.time = max(self.time, now)

    def next_end(self):
        """The time at which the next attempt ends."""
        if not self.running:
            return math.inf
        steps = max(self.running[0][0] - self.counter, 0.0)
        return self.time + steps * self.speeds.decode_s(len(self.running))

    def add(self, attempt):
        self.waiting.append(attempt)
        self.fill()

    def fill(self):
        """Give free places to attempts that wait."""
        while self.waiting and len(self.running) < self.places:
            attempt = self.waiting.popleft()
            attempt.start = self.counter
            end = self.counter + attempt.length
            heapq.heappush(self.running, (end, next(self.numbers), attempt))

    def pop_ended(self):
        """Take away the attempt that ends now, and note the versions of its tokens."""
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
        self.fill()
        return attempt

    def swap(self, version, pause):
        """Serve other weights from now on, after a pause."""
        self.swapped_at.append(self.counter)
        self.served.append(version)
        self.time += pause


class Simulation:
    """A run of `config`, with these Speeds and Lengths. `lines` gets a dict for each step."""

    def __init__(self, config, speeds, lengths, seed=0):
        self.config = config
        self.speeds = speeds
        self.lengths = lengths
        self.rng = np.random.default_rng(seed)
        self.engines = [Engine(config.concurrency, speeds) for _ in range(config.engines)]
        self.now = 0.0
        # heap of (time, number, function, its arguments)
        self.events = []
        self.numbers = itertools.count()
        self.lines = []
        # actor: groups started, slots taken, version of the newest evaluation, groups dropped
        self.started = 0
        self.taken = 0
        self.evaluated = 0
        self.dropped = 0
        # preprocess: groups that wait for earlier draws, groups that wait, and the step in progress
        self.early = {}
        self.next_draw = 0
        self.groups = deque()
        self.in_phase = 0
        self.step = 0
        self.packed_groups = 0
        self.pending = []
        # trainer: rows that wait, what it does, its version, and that which the others know
        self.rows = deque()
        self.is_busy = False
        self.idle_since = 0.0
        self.version = 0
        self.known_version = 0
        self.is_sending = False
        # whether the weights of this version wait until the update before is delivered
        self.pushes_next = False
        # the seconds that the trainer needs for a checkpoint, before its next step
        self.save_s = 0.0
        self.step_start = 0.0
        self.waited = 0.0
        self.trained = []
        # sums over the time of the step in progress: places in use x seconds, tokens
        self.used = 0.0
        self.sampled = 0

    def run(self):
        """Simulate to the end of the last step; returns `lines`."""
        self.start_evaluation()
        self.act()
        while self.version < self.config.steps:
            ends = [engine.next_end() for engine in self.engines]
            first = int(np.argmin(ends))
            at = self.events[0][0] if self.events else math.inf
            if min(ends[first], at) == math.inf:
                raise RuntimeError(
                    "the simulated run stands still: this is a fault of simulate_run"
                )
            if ends[first] <= at:
                self.advance(ends[first])
                attempt = self.engines[first].pop_ended()
                self.after(self.speeds.request, self.end_attempt, attempt, self.engines[first])
            else:
                _, _, function, arguments = heapq.heappop(self.events)
                self.advance(at)
                function(*arguments)
            self.act()
        return self.lines

    def after(self, seconds, function, *arguments):
        """Call a function once so many seconds have passed."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), function, arguments))

    def advance(self, now):
        for engine in self.engines:
            in_use = min(engine.load, engine.places)
            self.used += in_use * max(now - self.now, 0.0)
            engine.advance(now)
        self.now = max(self.now, now)

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
            for attempt in group.attempts:
                self.least_loaded().add(attempt)

    def least_loaded(self):
        return min(self.engines, key=lambda engine: engine.load)

    def start_evaluation(self):
        for _ in range(self.config.eval_problems):
            for length in self.lengths.draw(self.rng, self.config.eval_attempts):
                self.least_loaded().add(Attempt(length))

    def end_attempt(self, attempt, engine):
        engine.ending -= 1
        self.sampled += attempt.length
        group = attempt.group
        if group is None:
            return
        self.taken -= 1
        group.left -= 1
        if not group.left:
            self.after(self.speeds.latency, self.receive, group)

    # ---- preprocess

    def receive(self, group):
        """preprocess.GroupBuffer.receive: a group has arrived."""
        self.early[group.draw] = group
        config = self.config
        if config.late in ("wait", "hold"):
            while self.next_draw in self.early:
                self.groups.append(self.early.pop(self.next_draw))
                self.next_draw += 1
        else:
            self.groups.append(self.early.pop(group.draw))
        if config.on_full == "drop_oldest" and len(self.groups) > 2 * config.groups_per_step:
            self.groups.popleft()
            self.dropped += 1
        self.emit()

    def emit(self):
        """preprocess.emit_steps: pack what the trainer may have."""
        config = self.config
        packer = PackerState(self.step, self.packed_groups)
        while self.step < config.steps and self.step <= self.known_version + 1:
            needed = groups_needed(config, packer, self.in_phase)
            if not self.groups or len(self.groups) < needed:
                break
            if config.conventional_g and not self.in_phase:
                self.in_phase = needed
                phase = [self.groups.popleft() for _ in range(needed)]
                self.rng.shuffle(phase)
                self.groups.extendleft(phase)
            self.pack(self.groups.popleft())
            self.in_phase = max(self.in_phase - 1, 0)
            packer = PackerState(self.step, self.packed_groups)

    def pack(self, group):
        """preprocess.Packer.add: full rows go to the trainer, at the end of a step all rows."""
        config = self.config
        self.pending += group.attempts
        self.packed_groups += 1
        is_complete = self.packed_groups == config.groups_per_step
        tokens = sum(map(self.tokens_of, self.pending))
        if not is_complete and tokens < 2 * config.row_tokens * config.trainers:
            return
        row = []
        room = ROW_IS_FULL * config.row_tokens * config.trainers
        filled = 0.0
        for attempt in self.pending:
            row.append(attempt)
            filled += self.tokens_of(attempt)
            if filled >= room:
                self.rows.append((row, False))
                row = []
                filled = 0.0
        self.pending = row
        if is_complete:
            self.rows.append((row, True))
            self.pending = []
            self.packed_groups = 0
            self.step += 1
        self.train()

    def tokens_of(self, attempt):
        return attempt.length + self.speeds.prompt_tokens

    # ---- the trainer

    def train(self):
        """Begin with the next row, if there is one and nothing else is in progress."""
        if self.is_busy or not self.rows:
            return
        self.waited += self.now - self.idle_since
        self.is_busy = True
        row, is_last = self.rows.popleft()
        self.trained += row
        tokens = sum(map(self.tokens_of, row))
        seconds = tokens * self.speeds.train_token / self.config.trainers
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
            self.tell(self.version)
            self.after(self.save_s, self.become_idle)
        elif self.is_sending:
            self.pushes_next = True
        else:
            self.push()

    def push(self):
        """Copy the weights; the engines serve them later, while the trainer goes on."""
        self.is_sending = True
        self.pushes_next = False
        self.after(self.speeds.gather + self.save_s, self.become_idle)
        self.after(max(self.speeds.update, self.speeds.gather), self.deliver, self.version)

    def deliver(self, version):
        for engine in self.engines:
            engine.swap(version, self.speeds.pause)
        self.is_sending = False
        self.tell(version)
        if self.pushes_next:
            self.push()

    def tell(self, version):
        """Actor and preprocess learn of a version."""
        self.known_version = version
        every = self.config.eval_every
        if every and version // every > self.evaluated // every:
            self.evaluated = version
            self.start_evaluation()
        self.emit()

    def note_step(self):
        seconds = self.now - self.step_start
        places = self.config.concurrency * len(self.engines) * seconds
        lags = Counter()
        oldest = 0.0
        for attempt in self.trained:
            for version, count in attempt.versions.items():
                lags[self.version - version] += count
            oldest += self.version - min(attempt.versions)
        tokens = sum(lags.values())
        self.lines.append(
            dict(
                step_s=seconds,
                wait_data_s=self.waited,
                gen_idle=1 - self.used / places,
                gen_tok_s=self.sampled / seconds,
                lag_mean=sum(lag * count for lag, count in lags.items()) / tokens,
                lag_oldest=oldest / len(self.trained),
                lag_max=max(lags),
            )
        )
        self.step_start = self.now
        self.waited = 0.0
        self.trained = []
        self.used = 0.0
        self.sampled = 0


@dataclass
class PackerState:
    """The part of preprocess.Packer that preprocess.groups_needed reads."""

    step: int
    groups: int


# ---- the command


def simulate(config, speeds, lengths, seed=0):
    """{quantity: mean} of a simulated run, as `observed` has them of a real one."""
    return observed(Simulation(config, speeds, lengths, seed).run())


def main(argv=None):
    p = argparse.ArgumentParser(
        prog="tools/simulate.py",
        description=__doc__.splitlines()[0],
        epilog="Other flags are knobs of config.py that the simulated run has in place of its own",
    )
    p.add_argument(
        "runs", nargs="+", help="runs whose speeds are taken; the first one is simulated"
    )
    p.add_argument(
        "--like", metavar="RUN", help="simulate the configuration of this run, and compare with it"
    )
    arguments, knobs = p.parse_known_args(argv)
    run_dirs = [find_run(run) for run in arguments.runs]
    runs = [read_run(run_dir) for run_dir in run_dirs]
    for run_dir, (_, lines, durations, _) in zip(run_dirs, runs):
        if len(lines) < 4 * FILLING:
            sys.exit(f"simulate: {run_dir} has {len(lines)} steps, and {4 * FILLING} are needed")
        if not durations:
            sys.exit(
                f"simulate: {run_dir}/queues/pace.json does not say how long requests took: an "
                "earlier version of this code has made the run"
            )
    speeds = measure_speeds([run[:3] for run in runs])
    config, lines, _, samples = runs[0]
    lengths = measure_lengths(lines[FILLING:], samples)
    if arguments.like:
        config, lines, _, _ = read_run(find_run(arguments.like))
    columns = {"measured": observed(lines)}
    columns["simulated"] = simulate(config, speeds, lengths)
    if knobs:
        try:
            other = cfg.parse(knobs, default=config)
            columns["with knobs"] = simulate(cfg.check(other), speeds, lengths)
        except cfg.ConfigError as e:
            sys.exit(f"simulate: {e}")
    print(
        f"a request takes {1000 * speeds.request:.1f} ms, and for each token "
        f"{1000 * speeds.decode_base:.2f} ms + {1000 * speeds.decode_each:.4f} ms for each of the "
        "sequences in progress\n"
        f"a trainer rank takes {1e6 * speeds.train_token:.1f} us for a token and "
        f"{1000 * speeds.train_step:.1f} ms for an optimizer step\n"
        f"a weight update takes {speeds.update:.3f} s, answers have "
        f"{lengths.quantiles.mean():.1f} tokens, correlation {lengths.correlation:.2f}"
    )
    print("".join(f"{name:>14}" for name in ("", *columns)))
    for quantity in QUANTITIES:
        cells = "".join(f"{column[quantity]:>14.4g}" for column in columns.values())
        print(f"{quantity:>14}{cells}")
    return columns

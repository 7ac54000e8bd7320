"""Alarms: each one names a metric of a run that has gone wrong, and says what to try.

An alarm ends nothing. It is printed when it is raised, `bash run.sh status` shows it, and so does
the summary at the end. The checks that end a run are in plumbing/guards.py.
"""

from collections import Counter, deque

# A metric that has left its range for some steps in a row raises an alarm:
# (metric, lowest good value, highest good value, number of steps in a row, what to try)
RANGES = [
    ("ess", 0.3, 1.1, 3, "lower --max_lag or --lr"),
    ("signal", 1e-9, 1.0, 10, "no group has two different rewards: look at samples.jsonl"),
    ("cut_off", 0.0, 0.95, 10, "nearly all answers are cut off: raise --max_new_tokens"),
]
# A metric whose mean over the newest steps is below a share of its mean over the first steps raises
# an alarm, unless rewards have risen meanwhile: (metric, share, what to try)
FALLS = [
    (
        "signal",
        0.25,
        "most groups have equal rewards, so nothing is learnt from them: look at samples.jsonl; "
        "lower --lr or --max_lag, or continue from an earlier checkpoint with other problems",
    ),
    (
        "entropy",
        0.1,
        "the model has stopped trying other answers: lower --lr, or set --entropy_coef 0.001",
    ),
    (
        "length_mean",
        1 / 3,
        "answers have become short: look at samples.jsonl; lower --lr, or try --late wait",
    ),
]
# the number of the newest and of the first steps that are compared
WINDOW = 14
# Rewards have risen if their mean has grown by this fraction of its first value, or if the share of
# solved samples has grown by this difference.
RISE = 0.1
# Where more than this share of the samples is solved, no metric of FALLS raises an alarm.
SOLVED = 0.9


def wilson(mean, n):
    """Return Wilson's 95% interval (low, high) for the probability of success in a trial.

    mean: the share of n independent trials that succeeded. The width of the interval is never 0,
    not even for 0 successes of 5.
    """
    z2 = 1.96**2 / n
    center = mean + z2 / 2
    half_width = (z2 * (mean * (1 - mean) + z2 / 4)) ** 0.5
    return (center - half_width) / (1 + z2), (center + half_width) / (1 + z2)


class Alarms:
    """Reads the lines of metrics.jsonl in their order: `read` returns the texts of new alarms.

    An alarm is raised once for a state that lasts.
    """

    def __init__(self):
        # the number of steps in a row that a metric of RANGES has been out of its range
        self.in_a_row = Counter()
        self.first = deque(maxlen=WINDOW)
        self.newest = deque(maxlen=WINDOW)
        # the metrics of FALLS, and the sets of evaluations, whose alarm is raised
        self.raised = set()
        # {set: its score in the first evaluation}
        self.first_scores = {}

    def read(self, line):
        """The alarms that a line raises."""
        if "step" in line:
            return self.step(line)
        return self.evaluation(line) if "eval" in line else []

    def step(self, line):
        """The alarms of a step's line."""
        texts = []
        for metric, lowest, highest, limit, remedy in RANGES:
            if metric not in line:
                continue
            is_good = lowest <= line[metric] <= highest
            self.in_a_row[metric] = 0 if is_good else self.in_a_row[metric] + 1
            if self.in_a_row[metric] == limit:
                texts.append(f"{metric} {line[metric]:.3g} for {limit} steps: {remedy}")
        if len(self.first) < WINDOW:
            self.first.append(line)
            return texts
        self.newest.append(line)
        if len(self.newest) == WINDOW:
            texts += [text for fall in FALLS for text in self.fall(*fall)]
        return texts

    def fall(self, metric, share, remedy):
        """The alarm, in a list, if a metric of FALLS has fallen since the first steps."""
        # Lines of an earlier version of this code, or of a fork, may lack a metric.
        needed = {metric, "reward", "success"}
        if not all(needed <= line.keys() for line in (*self.first, *self.newest)):
            return []
        first, newest = (mean_of(lines, metric) for lines in (self.first, self.newest))
        has_fallen = newest < share * first and not self.has_risen()
        if not has_fallen:
            self.raised.discard(metric)
        elif metric not in self.raised:
            self.raised.add(metric)
            return [
                f"{metric} {newest:.3g}, the mean of {WINDOW} steps, was {first:.3g} in the first "
                f"{WINDOW}, and rewards have not risen: {remedy}"
            ]
        return []

    def has_risen(self):
        """Have rewards risen since the first steps, or is nearly everything solved?"""
        reward, solved = (
            [mean_of(lines, name) for lines in (self.first, self.newest)]
            for name in ("reward", "success")
        )
        more_reward = reward[1] - reward[0] > RISE * abs(reward[0])
        return more_reward or solved[1] - solved[0] > RISE or solved[1] > SOLVED

    def evaluation(self, line):
        """The alarms of an evaluation: scores whose 95% interval is below that of the first one."""
        texts = []
        # {} if no problem was asked or answered. With several sets the line has only the sum of
        # their problems, so that no interval can be computed.
        if len(line["eval"]) != 1:
            return []
        answers = line.get("answers", line["problems"])
        for name, score in line["eval"].items():
            first = self.first_scores.setdefault(name, score)
            # Several attempts at a problem are not independent, so each problem counts only once.
            n = min(answers, line["problems"])
            if n < 1 or not 0 <= min(score, first) <= max(score, first) <= 1:
                continue
            (_, high), (low, _) = wilson(score, n), wilson(first, n)
            key = f"eval {name}"
            if high >= low:
                self.raised.discard(key)
            elif key not in self.raised:
                self.raised.add(key)
                texts.append(
                    f"held-out {name} {score:.3f} (at most {high:.3f}, 95%) is below the first "
                    f"score, {first:.3f} (at least {low:.3f}): the model got worse; lower --lr or "
                    "--max_lag, or continue from an earlier checkpoint"
                )
        return texts


def mean_of(lines, metric):
    """The mean of a metric over lines."""
    return sum(line[metric] for line in lines) / len(lines)


def alarms(steps, evaluations=()):
    """All alarms of a run: [(version, text)], ordered by version.

    steps, evaluations: lines of metrics.jsonl.
    """
    watch = Alarms()
    raised = [(line["version"], text) for line in steps for text in watch.step(line)]
    for line in evaluations:
        raised += [(line["version"], text) for text in watch.evaluation(line)]
    return sorted(raised)

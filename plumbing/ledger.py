"""Which draws of the sampler are in flight and which are done with, so that nothing is lost in a stop.

`Draws` is the actor's end: it numbers what the sampler draws. `Ledger` is preprocess.py's: what became
of it. A draw, and its group, is trained, dropped with a counted reason, or drawn again when the run
continues; checkpoints keep both. Deliberately absent: which problem comes next (actor.Sampler).
"""

from collections import Counter, deque

from plumbing.queues import publish_json


class Draws:
    """Numbers what the sampler draws; what was in flight when a run stopped is drawn again.

    queues/sampler.json says, before any of it is started, what has been drawn: checkpoints keep it.
    """

    def __init__(self, sampler, path, state):
        self.sampler = sampler
        self.path = path
        saved = state["sampler"]
        self.drawn = saved.get("drawn", state["position"]["next"])
        # {draw: (task, number)} of those that are not done with, as far as this stage knows
        self.pending = {int(i): tuple(x) for i, x in saved.get("pending", {}).items()}
        # {number of its record in queues/rollouts: draw} of what has been sampled
        self.records = {}
        self.forget(state["position"])
        self.again = deque(sorted(self.pending))
        # draws whose records were lost
        self.lost = 0

    def forget(self, position):
        """These draws are done with: all below `next`, and those in `ahead`."""
        ahead = set(position["ahead"])
        done = [i for i in self.pending if i < position["next"] or i in ahead]
        for i in done:
            del self.pending[i]
        if done:
            self.records = {n: i for n, i in self.records.items() if i in self.pending}

    def again_if_lost(self, refused):
        """Records of these numbers were refused: their problems are drawn again."""
        for number in refused:
            # None: somebody else's file
            i = self.records.pop(number, None)
            if i in self.pending:
                self.again.append(i)
                self.lost += 1

    def next(self):
        """(number of the draw, task, number of the problem)."""
        if self.again:
            i = self.again.popleft()
        else:
            i = self.drawn
            self.pending[i] = self.sampler.next()
            self.drawn += 1
        return i, *self.pending[i]

    def save(self):
        """Write down what has been drawn."""
        publish_json(self.path, drawn=self.drawn, pending=self.pending, state=self.sampler.state())


class Ledger:
    """Which draws of the actor's sampler are done with, and what became of their samples.

    A draw is done with when its group is trained or dropped: all below `next` are, and those in
    `ahead`. The others are drawn again when the run continues.
    """

    def __init__(self, next, ahead):
        self.next = next
        self.ahead = set(ahead)
        # of the step in progress: {draw: samples trained}, {reason: {draw: samples dropped}}
        self.trained = {}
        self.dropped = {}
        # since the run was started: {reason: samples}, and whole groups
        self.reasons = Counter()
        self.dropped_groups = 0

    def drop(self, index, samples, reason):
        """So many samples of draw `index` will not be trained."""
        if samples:
            of_reason = self.dropped.setdefault(reason, {})
            of_reason[index] = of_reason.get(index, 0) + samples
            self.reasons[reason] += samples

    def done(self, index):
        """The group of draw `index` is trained, or dropped whole."""
        self.ahead.add(index)
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1

    def close_step(self):
        """{problems, drops, position} of the step, for its last record; the next one begins."""
        position = {"next": self.next, "ahead": sorted(self.ahead)}
        of_step = {"problems": self.trained, "drops": self.dropped, "position": position}
        self.trained = {}
        self.dropped = {}
        return of_step

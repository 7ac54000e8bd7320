"""Which draws of the sampler are in flight and which are done with, so that nothing is lost in a stop.

A draw, and the group sampled for it, is trained, dropped with a counted reason, or drawn again when
the run continues; checkpoints keep both ends. Deliberately absent: which problem comes next
(actor.Sampler).
"""

from collections import Counter, deque

from plumbing.queues import publish_json


class InFlight:
    """The actor's end: numbers what the sampler draws; what was in flight at a stop is drawn again.

    queues/sampler.json says, before any of it is started, what has been drawn: checkpoints keep it.
    """

    def __init__(self, sampler, path, state):
        self.sampler = sampler
        self.path = path
        saved = state["sampler"]
        self.drawn = saved.get("drawn", state["position"]["next"])
        # {draw: (task, problem)} of those that are not done with, as far as this stage knows
        self.pending = {int(draw): tuple(x) for draw, x in saved.get("pending", {}).items()}
        self.forget(state["position"])
        self.again = deque(sorted(self.pending))

    def forget(self, position):
        """These draws are done with: all below `next`, and those in `ahead`."""
        ahead = set(position["ahead"])
        for draw in list(self.pending):
            if draw < position["next"] or draw in ahead:
                del self.pending[draw]

    def next(self):
        """(draw, task, index of the problem)."""
        if self.again:
            draw = self.again.popleft()
        else:
            draw = self.drawn
            self.pending[draw] = self.sampler.next()
            self.drawn += 1
        return draw, *self.pending[draw]

    def save(self):
        """Write down what has been drawn."""
        state = self.sampler.state()
        publish_json(self.path, drawn=self.drawn, pending=self.pending, state=state)


class Ledger:
    """The end of preprocess.py: what became of the draws and their samples.

    A draw is done with when its group is trained or dropped: all below `next` are, and those in
    `ahead`.
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

    def drop(self, draw, samples, reason):
        """So many samples of a draw will not be trained."""
        if samples:
            of_reason = self.dropped.setdefault(reason, {})
            of_reason[draw] = of_reason.get(draw, 0) + samples
            self.reasons[reason] += samples

    def done(self, draw):
        """The group of a draw is trained, or dropped whole."""
        self.ahead.add(draw)
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

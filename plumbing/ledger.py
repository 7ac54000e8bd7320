"""A record of all draws of the sampler, so that none is lost when a run stops.

A draw is one problem that the sampler has chosen; its number is its position in the run. The group
of attempts sampled for it is trained, or dropped for a reason that is counted, or sampled again
when the run continues. The actor keeps one half of the record (`InFlight`), preprocess.py the other
half (`Ledger`), and checkpoints hold both. Deliberately absent: which problem comes next
(actor.Sampler).
"""

from collections import Counter, deque

from plumbing.queues import publish_json


class InFlight:
    """The actor's half: it numbers the draws, and repeats those that were in flight at a stop.

    path: queues/sampler.json, to which `save` writes the draws before any of them is started.
    Checkpoints copy it. state: the state that the run continues from.
    """

    def __init__(self, sampler, path, state):
        self.sampler = sampler
        self.path = path
        saved = state["sampler"]
        self.drawn = saved.get("drawn", state["position"]["next"])
        # {draw: (task, index of the problem)} of the draws that are not done, as far as it is known
        self.pending = {}
        for draw, (task, index) in saved.get("pending", {}).items():
            self.pending[int(draw)] = (task, index)
        self.forget(state["position"])
        # the draws that were in flight when the run stopped
        self.repeated = deque(sorted(self.pending))

    def forget(self, position):
        """Forget the draws that are done: all below position["next"], and those in "ahead"."""
        ahead = set(position["ahead"])
        for draw in list(self.pending):
            if draw < position["next"] or draw in ahead:
                del self.pending[draw]

    def next(self):
        """The next draw: (its number, task, index of the problem)."""
        if self.repeated:
            draw = self.repeated.popleft()
        else:
            draw = self.drawn
            self.pending[draw] = self.sampler.next()
            self.drawn += 1
        return draw, *self.pending[draw]

    def save(self):
        """Write the draws and the sampler's state to queues/sampler.json."""
        state = self.sampler.state()
        publish_json(self.path, drawn=self.drawn, pending=self.pending, state=state)


class Ledger:
    """The half of preprocess.py: what became of the draws and their samples.

    A draw is done when its group was trained or dropped. All draws below `next` are done, and so
    are those in `ahead`.
    """

    def __init__(self, next, ahead):
        self.next = next
        self.ahead = set(ahead)
        # the step in progress: {draw: number of samples trained}
        self.trained = {}
        # the step in progress: {reason: {draw: number of samples dropped}}
        self.dropped = {}
        # {reason: number of samples dropped} since this start of the run
        self.reasons = Counter()
        # number of groups dropped whole since this start of the run
        self.dropped_groups = 0

    def drop(self, draw, samples, reason):
        """Note that this number of samples of a draw will not be trained, for this reason."""
        if samples:
            by_draw = self.dropped.setdefault(reason, {})
            by_draw[draw] = by_draw.get(draw, 0) + samples
            self.reasons[reason] += samples

    def done(self, draw):
        """Note that the group of a draw was trained, or dropped whole."""
        self.ahead.add(draw)
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1

    def close_step(self):
        """{problems, drops, position} for the last record of the step; then the next one begins."""
        position = {"next": self.next, "ahead": sorted(self.ahead)}
        step_ledger = {"problems": self.trained, "drops": self.dropped, "position": position}
        self.trained = {}
        self.dropped = {}
        return step_ledger

"""What ends a run that has gone wrong without a crash, and what it warns of.

`Guards` looks at the metrics of every step, on every rank alike. Two things end a run: gradients that are not finite,
and a trainer that computes other logprobs than the engines did. The others may be what somebody wants: they are said
once, when they have lasted, and are in metrics.jsonl as `alarm`. Deliberately absent: anything that changes a step;
train.py leaves the weights as they are when a gradient is not finite, whether or not somebody looks.
"""

import math
from collections import Counter

import torch

# steps in a row after which a run ends, and after which an alarm is given
IN_A_ROW = 3
LASTING = 10
UNMEASURED = 50
LOWEST_ESS = 0.3
MOST_CUT_OFF = 0.95
# of each parameter so many values tell whether an update brings anything new
PROBED = 64


class Guards:
    """Counts steps in a row in which the same thing was wrong."""

    def __init__(self, config):
        self.limit = config.highest_mismatch
        self.attributes = config.attribute_every > 0
        self.in_a_row = Counter()

    def look(self, version, metrics, unchanged=0):
        """What lasts too long, as words; most often none. Raises RuntimeError at what ends the run.

        unchanged: updates in a row that brought the engines the weights that they had.
        """
        not_finite = not math.isfinite(metrics["grad_norm"])
        if not_finite:
            print(
                f"train: step {version} has a gradient that is not finite (loss {metrics['loss']}): "
                "weights left as they are",
                flush=True,
            )
        if self._lasts("not_finite", not_finite, IN_A_ROW):
            raise RuntimeError(
                f"train: {IN_A_ROW} steps in a row had gradients that are not finite: lower --lr, or look at the samples"
            )
        mismatch = metrics["mismatch"]
        # a step without a sample of lag 0 says nothing; a difference may also be no number
        differs = mismatch is not None and not mismatch <= self.limit
        if mismatch is not None and self._lasts("mismatch", differs, IN_A_ROW):
            raise RuntimeError(
                f"train: mismatch was above {self.limit:g} nats in {IN_A_ROW} steps, it is {mismatch:.1e}: what samples is not what "
                "is trained. Look at the model's family (README), at --dtype and --head_float32, at logs/engine*.log; "
                "--mismatch_limit moves the limit; `bash run.sh doctor` looks closer"
            )
        return self._alarms(metrics, unchanged)

    def _alarms(self, metrics, unchanged):
        found = []
        # without a signal nothing can change: that is another alarm
        if self._lasts("unchanged", unchanged >= LASTING and metrics["signal"] > 0, 1):
            found.append(
                f"{LASTING} updates in a row brought the engines the weights that they had: is --lr too small for --dtype, or "
                "is nothing trained?"
            )
        unmeasured = metrics["mismatch"] is None and not self.attributes
        if self._lasts("unmeasured", unmeasured, UNMEASURED):
            found.append(
                f"no sample of {UNMEASURED} steps was sampled by the version that it trained: whether engines compute what the "
                "trainer does is not known: --attribute_every 50 measures it, and `bash run.sh doctor`"
            )
        if self._lasts("ess", metrics["ess"] < LOWEST_ESS, IN_A_ROW):
            found.append(
                f"effective sample size {metrics['ess']:.2f}: data is too old for this learning rate: lower --max_lag or --lr"
            )
        if self._lasts("signal", metrics["signal"] == 0, LASTING):
            found.append(
                f"no group of {LASTING} steps had two different rewards (mean {metrics['reward']:.3g}): the reward function is "
                "constant, or problems are all too easy or too hard"
            )
        if self._lasts("cut_off", metrics["cut_off"] > MOST_CUT_OFF, LASTING):
            found.append(
                f"{metrics['cut_off']:.0%} of the answers of {LASTING} steps were cut off: raise --max_new_tokens, or the model "
                "does not know how to stop"
            )
        return found

    def _lasts(self, name, is_wrong, steps):
        """Has it been wrong in exactly so many steps in a row by now?"""
        self.in_a_row[name] = self.in_a_row[name] + 1 if is_wrong else 0
        return self.in_a_row[name] == steps


class Repeats:
    """Counts updates in a row that bring nothing new. sizes: of the parameters; plan: plumbing.transport.buckets."""

    def __init__(self, sizes, plan):
        self.sizes = [sizes[first:last] for first, last, _ in plan]
        self.before = None
        self.in_a_row = 0

    def look(self, flats):
        """flats: the parameters in their buckets, in host memory. Returns the count."""
        parts = []
        for flat, sizes in zip(flats, self.sizes):
            parts += [part[:PROBED] for part in flat[: sum(sizes)].split(sizes)]
        probe = torch.cat(parts)
        same = self.before is not None and torch.equal(probe, self.before)
        self.in_a_row = self.in_a_row + 1 if same else 0
        self.before = probe
        return self.in_a_row

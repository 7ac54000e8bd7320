"""What ends a run that has gone wrong without a crash.

Deliberately absent: anything that changes a step; train.py leaves the weights as they are when a
gradient is not finite, whether or not somebody looks.
"""

import math

IN_A_ROW = 3


class Guards:
    """Looks at the metrics of every step, on every rank alike."""

    def __init__(self, config):
        self.limit = config.highest_mismatch
        # steps in a row
        self.not_finite = 0
        self.mismatched = 0

    def look(self, version, metrics):
        """Raise RuntimeError at the third step in a row that went wrong in the same way."""
        self._look_at_gradient(version, metrics)
        self._look_at_mismatch(metrics["mismatch"])

    def _look_at_gradient(self, version, metrics):
        if math.isfinite(metrics["grad_norm"]):
            self.not_finite = 0
            return
        self.not_finite += 1
        print(
            f"train: step {version} has a gradient that is not finite (loss {metrics['loss']}): "
            "weights left as they are",
            flush=True,
        )
        if self.not_finite == IN_A_ROW:
            raise RuntimeError(
                f"train: {IN_A_ROW} steps in a row had gradients that are not finite: lower --lr, or look at the samples"
            )

    def _look_at_mismatch(self, mismatch):
        # a step without a sample of lag 0 says nothing
        if mismatch is None:
            return
        if mismatch <= self.limit:
            self.mismatched = 0
            return
        # above it, or not a number
        self.mismatched += 1
        if self.mismatched == IN_A_ROW:
            raise RuntimeError(
                f"train: mismatch was above {self.limit:g} nats in {IN_A_ROW} steps, it is {mismatch:.1e}: what samples is not what "
                "is trained. Look at the model's family (README), at --dtype and --head_float32, at logs/engine*.log; "
                "--mismatch_limit moves the limit"
            )

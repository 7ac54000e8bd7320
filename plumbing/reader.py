"""What train.py reads: this rank's micro-batches of a step, and the actor's evaluations.

Ranks read equal numbers of micro-batches, so that their collectives line up; whether there is one
more, or the run is to stop, rank 0 decides for all. Every wait has a deadline.
"""

import time
from pathlib import Path

from plumbing.patience import Patience
from plumbing.queues import Queue
from plumbing.samples import check_record


class Reader:
    """Reads queues/batches/rank_<r> and, on rank 0, queues/evals.

    check: called about once a second while rank 0 waits; it raises what went wrong elsewhere.
    last: the last record of the newest step; waited: seconds that this step waited for data.
    """

    def __init__(self, config, run_dir, ranks, check):
        self.config = config
        self.run_dir = run_dir
        self.ranks = ranks
        self.check = check
        self.batches = Queue(Path(run_dir, "queues", "batches", f"rank_{ranks.rank}"))
        self.evals = Queue(Path(run_dir, "queues", "evals"))
        # of the largest step so far
        self.rows = 0
        self.last = None
        self.waited = 0.0
        # version of the newest evaluation that has come
        self.evaluated = -1

    def step(self, version):
        """Yields this rank's micro-batches of the step that makes `version` + 1."""
        self.waited = 0.0
        row = 0
        record = {"last": False}
        while not record["last"]:
            start = time.monotonic()
            number, record = self._next()
            self.waited += time.monotonic() - start
            expected = dict(run_id=self.config.run_id, step=version, row=row)
            check_record(record, self.batches.file(number), **expected)
            yield record
            row += 1
            self.rows = max(self.rows, row)
            self.batches.ack(number, self.config.keep_steps * self.rows)
        self.last = record

    def _next(self):
        """The next record of this rank, (number, record). Collective; raises Stopped on all ranks."""
        found = None
        if self.ranks.rank == 0:
            found = self._wait(self.batches, "preprocess put no micro-batch into")
        self.ranks.check_stop()
        return found or self.batches.get(self.config.stall_timeout)

    def _wait(self, queue, complaint):
        """Rank 0: the next record of a queue, None if the run is to stop."""
        patience = Patience(self.config, self.run_dir)
        while not self.ranks.stop.is_set():
            try:
                return queue.get(0.5)
            except TimeoutError:
                self.check()
            patience.check(f"train: {complaint} {queue.path}")
        return None

    def evaluations(self, until=-1):
        """Yields, on rank 0, the evaluations that have come; waits until that of version `until` has."""
        while self.ranks.rank == 0:
            found = None
            if len(self.evals):
                found = self.evals.get()
            elif self.evaluated < until:
                found = self._wait(self.evals, "the actor put no evaluation into")
            if found is None:
                break
            number, record = found
            self.evals.ack(number)
            self.evaluated = record["version"]
            yield record

"""The trainer's input: this rank's micro-batches of a step, and the actor's evaluations.

All ranks read the same number of micro-batches, so that their collectives line up. Rank 0 decides
for all whether there is one more, or whether the run is to stop. Every wait has a deadline.
"""

import time
from pathlib import Path

from plumbing.patience import Patience
from plumbing.queues import Queue, read_json
from plumbing.samples import check_record


class Reader:
    """Reads queues/batches/rank_<r> and, on rank 0, queues/evals.

    last: the last record of the newest step. waited: the seconds that this step waited for data.
    """

    def __init__(self, config, run_dir, ranks):
        self.config = config
        self.run_dir = run_dir
        self.ranks = ranks
        self.batches = Queue(Path(run_dir, "queues", "batches", f"rank_{ranks.rank}"))
        self.evals = Queue(Path(run_dir, "queues", "evals"))
        # the number of this rank's micro-batches in the largest step so far
        self.rows = 0
        self.last = None
        self.waited = 0.0
        # the version of the newest evaluation that has arrived
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
            file = self.batches.file(number)
            check_record(record, file, run_id=self.config.run_id, step=version, row=row)
            yield record
            row += 1
            self.rows = max(self.rows, row)
            self.batches.ack(number, self.config.keep_steps * self.rows)
        self.last = record

    def _next(self):
        """This rank's next record, (number, record). Collective; raises Stopped on all ranks.

        Rank 0 waits for its record. When it has one, the others have theirs, too.
        """
        patience = Patience(self.config, self.run_dir)
        numbered_record = None
        while True:
            if self.ranks.rank == 0:
                try:
                    numbered_record = self.batches.get(0.5)
                except TimeoutError:
                    complaint = f"train: preprocess put no micro-batch into {self.batches.path}"
                    self._check(patience, complaint)
            if self.ranks.check_stop(numbered_record is not None):
                return numbered_record or self.batches.get(self.config.stall_timeout)

    def _check(self, patience, complaint):
        """Rank 0: let the run end if it has waited too long."""
        try:
            patience.check(complaint)
        except TimeoutError as e:
            self.ranks.fail(e)

    def evaluations(self):
        """Yields, on rank 0, the evaluations that have arrived."""
        while self.ranks.rank == 0 and len(self.evals):
            number, record = self.evals.get()
            self.evals.ack(number)
            # Evaluations that run at the same time may arrive in any order.
            self.evaluated = max(self.evaluated, record["version"])
            yield record

    def evaluations_until(self, version):
        """Yields, on rank 0, evaluations until that of this version is among them. Collective.

        An evaluation is one record, and may take longer than stall_timeout: rank 0 gives up when no
        attempt has ended for this time, and all ranks meet again and again, because they have a
        deadline of their own. Raises Stopped, on all ranks, if the run is to stop.
        """
        patience = Patience(self.config, self.run_dir)
        pace_file = Path(self.run_dir, "queues", "pace.json")
        ended_attempts = None
        while not self.ranks.check_stop(self.evaluated >= version):
            yield from self.evaluations()
            if self.ranks.rank == 0:
                before, ended_attempts = ended_attempts, read_json(pace_file).get("eval_attempts")
                if before != ended_attempts:
                    patience.start()
                self._check(patience, f"train: the actor put no evaluation into {self.evals.path}")
            time.sleep(0.1)

"""What train.py reads: this rank's micro-batches of a step, and the actor's evaluations.

Ranks read equal numbers of micro-batches, so that their collectives line up; whether there is one
more, or the run is to stop, rank 0 decides for all. Every wait has a deadline.
"""

import time
from pathlib import Path

from plumbing import archive
from plumbing.queues import Queue
from plumbing.ranks import Stopped
from plumbing.samples import most_bytes

GO_ON = 0
STOP = 1


class Reader:
    """Reads queues/batches/rank_<r> and, on rank 0, queues/evals.

    check: called about once a second while rank 0 waits; it raises what went wrong elsewhere.
    waited: seconds that the current step has waited for data; last: the last record of the step.
    """

    def __init__(self, config, run_dir, ranks, vocabulary, check):
        # only here: bench/gpu.sh trains without queues, where there may be no pydantic
        from plumbing.doors import BatchCheck, EvaluationCheck

        queues = Path(run_dir, "queues")
        self.config = config
        self.run_dir = run_dir
        self.ranks = ranks
        self.check = check
        self.batch_check = BatchCheck(config, vocabulary)
        self.batches = Queue(
            queues / "batches" / f"rank_{ranks.rank}",
            largest=most_bytes(config.row_tokens),
            check=self.batch_check,
        )
        evaluation_check = EvaluationCheck(config)
        self.evals = Queue(queues / "evals", largest=most_bytes(0), check=evaluation_check)
        self.waited = 0.0
        self.last = None
        # evaluations that came and were not yet asked for; version of the newest one
        self.came = []
        self.evaluated = -1

    def step(self, version):
        """Yields this rank's micro-batches of the step that makes `version` + 1."""
        self.waited = 0.0
        self.last = None
        self.batch_check.due = (version, 0)
        while self.last is None:
            start = time.monotonic()
            seq, record = self._next()
            self.waited += time.monotonic() - start
            self.batch_check.due = (version, record["row"] + 1)
            if record["last"]:
                self.last = record
            yield record
            self.batches.ack(seq, self._kept_as(record))

    def _kept_as(self, record):
        """Which file a micro-batch becomes that is dealt with; None: it is deleted."""
        if not self.config.keep_steps:
            return None
        step = record["step"] + 1
        if record["row"] == 0:
            archive.begin_step(self.config, self.run_dir, step, self.ranks.rank)
        return archive.batch_file(self.run_dir, step, self.ranks.rank, record["row"])

    def _next(self):
        """The next record of this rank, (seq, record). Collective; raises Stopped on all ranks."""
        complaint = f"preprocess put no micro-batch into {self.batches.path}"
        if self.ranks.rank == 0:
            found = self._wait_for(self.batches, complaint)
            decision = self.ranks.agree(STOP if found is None else GO_ON)
        else:
            decision = self.ranks.agree(GO_ON)
            found = None
        if decision == STOP:
            raise Stopped
        return found or self.batches.get(self.config.stall_timeout)

    def _wait_for(self, queue, complaint):
        """Rank 0: the next record of a queue, None if the run is to stop. TimeoutError(complaint)."""
        deadline = time.monotonic() + self.config.stall_timeout
        while not self.ranks.stop.is_set():
            try:
                return queue.get(0.5)
            except TimeoutError:
                self.check()
            if time.monotonic() > deadline:
                seconds = self.config.stall_timeout
                refused = f" ({dict(queue.refused)} refused)" if queue.refused else ""
                raise TimeoutError(f"train: {complaint} within {seconds:.0f} s{refused}")
        return None

    def evaluations(self):
        """Rank 0: the evaluations that have come, oldest first."""
        while True:
            try:
                seq, record = self.evals.get(0.0)
            except TimeoutError:
                break
            self.evals.ack(seq)
            self.came.append(record)
        found = self.came
        self.came = []
        self.evaluated = found[-1]["version"] if found else self.evaluated
        return found

    def wait_for_evaluation(self, version):
        """Until the evaluation of this version has come. Collective; raises Stopped on all ranks."""
        complaint = f"the actor has not evaluated version {version}"
        while self.ranks.rank == 0 and self.evaluated < version:
            answer = self._wait_for(self.evals, complaint)
            if answer is None:
                break
            seq, record = answer
            self.evals.ack(seq)
            self.came.append(record)
            self.evaluated = record["version"]
        self.ranks.check_stop()

"""What each stage believes of a record: of this run, of the schema (plumbing/samples.py), and not yet seen.

A check is what plumbing.queues.Queue calls with every record that it reads: it raises Refused for one
that is set aside, while the stage goes on, and anything else for one that ends the run.
"""

from pydantic import BaseModel, FiniteFloat, NonNegativeInt, ValidationError

from config import task_weights
from plumbing.queues import Refused, read_json
from plumbing.samples import SAMPLED, problem_with

# why records are refused that were not put into this run's queue, or not for the first time
FOREIGN = ("other_run", "duplicate")


class Pace(BaseModel, strict=True):
    run_id: str
    gen_tok_s: FiniteFloat
    gen_idle: FiniteFloat


class Rollouts(Pace):
    """A group in queues/rollouts, beside its arrays."""

    index: NonNegativeInt
    failed: NonNegativeInt


class Batch(Pace):
    """A micro-batch in queues/batches, beside its arrays."""

    step: NonNegativeInt
    row: NonNegativeInt
    last: bool


class Position(BaseModel, strict=True):
    next: NonNegativeInt
    ahead: list[NonNegativeInt]


class LastBatch(Batch):
    """The last one of a step tells what became of its problems."""

    position: Position
    problems: dict[str, NonNegativeInt]
    drops: dict[str, dict[str, NonNegativeInt]]
    by_task: dict[str, dict[str, FiniteFloat]]


class Evaluation(BaseModel, strict=True):
    run_id: str
    eval: dict[str, FiniteFloat]
    problems: NonNegativeInt
    version: NonNegativeInt
    wall_s: FiniteFloat


class NewestVersion:
    """The newest version that an engine may hold. file: queues/version.json."""

    def __init__(self, file):
        self.file = file
        self.known = 0

    def reaches(self, version):
        """Can there be such a version?"""
        if version > self.known:
            # one more than is announced: it is announced when all engines have it
            self.known = read_json(self.file).get("version", 0) + 1
        return version <= self.known


def lost_records(queue):
    """Numbers of refused records that may have been what they should be, before they were damaged."""
    return [number for number, reason in queue.refusals if reason not in FOREIGN]


def check_form(record, form):
    """Raise Refused unless the entries beside the arrays are of this form."""
    try:
        form.model_validate(record)
    except ValidationError as e:
        found = e.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, found["loc"]))
        raise Refused("schema", f"{where}: {found['msg']}") from None


def check_run(record, config):
    """Raise Refused unless a record is of this run."""
    if record.get("run_id") != config.run_id:
        raise Refused("other_run", f"of run {record.get('run_id')!r}, this is run {config.run_id}")


def need(ok, words):
    """Raise Refused unless ok."""
    if not ok:
        raise Refused("schema", words)


class RolloutCheck:
    """preprocess.py's. vocabulary: number of token ids; newest: a NewestVersion.

    ledger: what is done with; a problem comes once.
    """

    def __init__(self, config, ledger, vocabulary, newest):
        self.config = config
        self.vocabulary = vocabulary
        self.newest = newest
        self.tasks = len(task_weights(config.task))
        self.ledger = ledger
        # of those that the ledger's `next` has not yet passed
        self.arrived = set(ledger.ahead)

    def __call__(self, record, file):
        check_run(record, self.config)
        check_form(record, Rollouts)
        index = record["index"]
        if index < self.ledger.next or index in self.arrived:
            raise Refused("duplicate", f"problem {index} was here already")
        problem = problem_with(record, SAMPLED, self.vocabulary, self.tasks)
        need(problem is None, f"problem {index}: {problem}")
        samples = len(record["lengths"])
        attempts = self.config.attempts
        count = f"problem {index}: {samples} samples and {record['failed']} failed of {attempts}"
        need(samples + record["failed"] <= attempts, count)
        if samples:
            self._check_samples(record, f"problem {index}")
        self.arrived.add(index)
        self.arrived = {i for i in self.arrived if i >= self.ledger.next}

    def _check_samples(self, record, name):
        """What is true of samples as long as only the actor has seen them."""
        mask = record["mask"]
        versions = record["versions"]
        need(record["outcome"].min() >= 0, f"{name}: a sample without an outcome")
        need((versions[~mask] == -1).all(), f"{name}: a version of what was not sampled")
        need(
            (record["behavior_logprobs"][~mask] == 0).all(),
            f"{name}: a logprob of what was not sampled",
        )
        ends = record["lengths"].cumsum()
        sampled = mask.cumsum()[ends - 1]
        need((sampled > [0, *sampled[:-1]]).all(), f"{name}: a sample of which nothing was sampled")
        newest = int(versions.max())
        need(self.newest.reaches(newest), f"{name}: version {newest} is not trained yet")


class BatchCheck:
    """train.py's, of one rank: micro-batches come in order, row by row and step by step.

    `due`: (step, row) of the next one. One that is missing, or bad, would make its step smaller:
    RuntimeError.
    """

    def __init__(self, config, vocabulary):
        self.config = config
        self.vocabulary = vocabulary
        self.tasks = len(task_weights(config.task))
        # always "advantage", which preprocess adds
        self.needed = (*SAMPLED, "advantage", *(["ref_logprobs"] if config.kl_coef else []))
        self.due = (0, 0)

    def __call__(self, record, file):
        check_run(record, self.config)
        try:
            self._check(record)
        except Refused as e:
            if e.reason == "duplicate":
                raise
            raise RuntimeError(f"train: {file}: {e}; the same command continues") from None

    def _check(self, record):
        check_form(record, LastBatch if record.get("last") is True else Batch)
        found = (record["step"], record["row"])
        place = "row {1} of step {0}"
        if found < self.due:
            raise Refused("duplicate", place.format(*found) + " was here already")
        words = f"{place.format(*self.due)} is missing, this is {place.format(*found)}"
        need(found == self.due, words)
        problem = problem_with(record, self.needed, self.vocabulary, self.tasks)
        need(problem is None, problem)
        need(len(record["lengths"]) > 0, "no samples")
        newest = int(record["versions"].max())
        need(newest <= record["step"], f"version {newest} sampled for step {record['step']}")


class EvaluationCheck:
    """train.py's, of what the actor has evaluated: each version once."""

    def __init__(self, config):
        self.config = config
        self.evaluated = set()

    def __call__(self, record, file):
        check_run(record, self.config)
        check_form(record, Evaluation)
        version = record["version"]
        need(version <= self.config.steps, f"version {version} of {self.config.steps}")
        if version in self.evaluated:
            raise Refused("duplicate", f"version {version} was here already")
        self.evaluated.add(version)

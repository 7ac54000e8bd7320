"""The ledger: after 20 kill -9 of random processes at random moments of one run, every problem
drawn is trained or dropped with a reason.

Processes and kills are real. The engine is the FAKE one of tests/fake_engine.py, which starts
sooner; with LEDGER_REAL=1 it is real. LEDGER_SEED=n chooses other moments.
"""

import os
import random
import re
import signal
import time
from types import SimpleNamespace

import pytest

from plumbing import checkpoints
from test_run import User, balance, leftovers, metrics

# A run learns in this many steps. It is started with more, and its last start sets the number.
STEPS = 90
BATCH = 64
ATTEMPTS = 8
MAX_LAG = 4
KNOBS = (
    f"--steps 1000 --batch_size {BATCH} --attempts {ATTEMPTS} --max_lag {MAX_LAG} "
    "--concurrency 128 --no_signal drop --save_every 4 --eval_every 0 --rows packed"
)
ENGINE = "vllm.entrypoints"
# The run survives the death of an engine, and needs no new start.
KILLS = [ENGINE] * 12 + ["actor.py", "preprocess.py", "train.py", "launcher"] * 2


class Run(User):
    """A user of a run that is killed again and again."""

    def __init__(self, out, port, knobs=""):
        super().__init__(out, "t", port, KNOBS, knobs)
        self.lives = 0
        if "LEDGER_REAL" not in os.environ:
            self.take_fake_engines(out / "fake")

    def log_text(self):
        return self.log.read_text()

    def start(self):
        """Start the run; start again while processes of a killed launcher still save their work."""
        deadline = time.monotonic() + 1200
        self.lives += 1
        is_refused = True
        while is_refused:
            super().start("")
            while self.process.poll() is None and " steps of " not in self.log_text():
                time.sleep(0.02)
            is_refused = re.search("held by|cannot listen", self.log_text())
            assert not is_refused or time.monotonic() < deadline, self.log_text()

    def until(self, condition):
        """Wait until condition() is true, and return its value; the run must go on."""
        deadline = time.monotonic() + 1200
        value = None
        while not value:
            time.sleep(0.02)
            assert self.process.poll() is None and time.monotonic() < deadline, self.log_text()
            value = condition()
        return value

    def until_step(self, step):
        """Wait until this start of the run has printed this many steps."""
        self.until(lambda: self.steps() >= step)

    def steps(self):
        return len(re.findall(r"^\[train\] step ", self.log_text(), re.M))

    def ends(self, code, seconds=1200):
        """Wait until the run ends with this exit code; it must leave no process."""
        assert self.process.wait(seconds) == code, self.log_text()
        assert leftovers(self.out) == []

    def victim(self, kind):
        """Return the id of a process of this kind, or None if it is not alive at present.

        It is the process that run.sh or an engine's supervisor has started, and not a child of it.
        """
        if kind == "launcher":
            return self.process.pid
        for pid, line in leftovers(self.out):
            if kind not in line or "bash" in line or "supervise" in line:
                continue
            try:
                if kind == ENGINE or os.getpgid(int(pid)) == int(pid):
                    return int(pid)
            except ProcessLookupError:
                pass

    def kill(self, kind):
        """Send kill -9 to a process of this kind."""
        os.kill(self.until(lambda: self.victim(kind)), signal.SIGKILL)


@pytest.mark.slow
def test_the_ledger_balances_after_twenty_kills(tmp_path, base_model):
    rng = random.Random(os.environ.get("LEDGER_SEED", "0"))
    order = KILLS.copy()
    rng.shuffle(order)
    run = Run(tmp_path, 8830)
    run.start()
    for n, kind in enumerate(order, 1):
        print(f"kill {n}: {kind}, life {run.lives}, {run.steps()} steps into it")
        # The kill comes while processes start, or after some more steps.
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 6))
        else:
            run.until_step(run.steps() + rng.randint(1, 4))
            time.sleep(rng.uniform(0, 0.5))
        run.kill(kind)
        if kind == ENGINE:
            continue
        # Any other death ends the run, which says so and leaves no process.
        if kind == "launcher":
            run.process.wait()
        else:
            run.ends(1)
            assert re.search("run.sh: .* died with exit code 137", run.log_text())
            assert "run.sh: stopped; the same command" in run.log_text()
        run.start()
    run.until_step(run.steps() + 1)
    run.interrupt()
    run_dir = tmp_path / "t"
    end = max(STEPS, len(metrics(run_dir)[0]) + 4)
    run.command += ["--steps", str(end)]
    run.start()
    run.ends(0)

    steps, evals = metrics(run_dir)
    _, dropped = balance(run_dir, BATCH, ATTEMPTS)
    assert len(steps) == end
    no_signal = sum(sum(x["drops"].get("no_signal", {}).values()) for x in steps)
    assert dropped.total() == no_signal > 0
    # After every restart the engine holds the trainer's weights.
    assert max(x["mismatch"] for x in steps if x["mismatch"] is not None) < 1e-3
    # The run has learned.
    scores = {line["version"]: line["eval"]["toy"] for line in evals}
    assert scores[end] > scores[0] + 0.15
    # The disk has two checkpoints, no half-written file, and only records that the gate lets wait.
    assert len(list((run_dir / "checkpoints").iterdir())) == 2
    assert not list(run_dir.rglob("*.tmp"))
    records = list((run_dir / "queues").rglob("*.safetensors"))
    assert {p.parent.name for p in records} <= {"rollouts"}
    assert len(records) <= (MAX_LAG + 1) * BATCH // ATTEMPTS
    assert sum(p.stat().st_size for p in run_dir.rglob("*")) < 40e6


@pytest.mark.slow
@pytest.mark.skipif("LEDGER_REAL" in os.environ, reason="the engine must not start again")
def test_work_is_saved_when_a_run_is_stopped_while_its_only_engine_is_down(tmp_path, base_model):
    run = Run(tmp_path, 8831, "--batch_size 16 --max_lag 16 --no_signal keep")
    run.start()
    run.until_step(3)
    # The engine that is started in its place never answers.
    engine = tmp_path / "fake" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    engine.unlink()
    engine.write_text("import time\ntime.sleep(10000)\n")
    run.kill(ENGINE)
    run.until(lambda: "weights: waiting for an engine" in run.log_text())
    run.until(lambda: "is started again" in run.log_text())
    run.interrupt()
    assert "is saved" in run.log_text()
    balance(tmp_path / "t", 16, ATTEMPTS)


@pytest.mark.slow
def test_a_run_directory_that_is_gone_is_named_and_its_checkpoints_are_whole(tmp_path, base_model):
    """The directory is moved away, as a FAKE of a shared file system that is unmounted."""
    run = Run(tmp_path, 8832, "--save_every 20")
    run.start()
    run.until_step(21)
    (tmp_path / "t").rename(tmp_path / "away")
    run.ends(1)
    assert f"No such file or directory: '{tmp_path}/t/" in run.log_text()
    # Nobody makes another directory in its place.
    assert not (tmp_path / "t").exists()
    (tmp_path / "away").rename(tmp_path / "t")
    newest = max((tmp_path / "t" / "checkpoints").glob("step_*[0-9]"))
    run.start()
    assert f"from {newest.name}" in run.log_text()
    run.until_step(1)
    run.interrupt()


def test_checkpoint_does_not_create_a_run_directory_that_is_gone(tmp_path):
    gone = tmp_path / "t"
    with pytest.raises(RuntimeError, match="step_000000 cannot be written"):
        # This FAKE Saver has only the fields that writing needs.
        saver = checkpoints.Saver.__new__(checkpoints.Saver)
        saver.run_dir = gone
        saver.ranks = SimpleNamespace(rank=0)
        saver._write(checkpoints.NEW_RUN, {}, {}, {})
    assert not gone.exists()

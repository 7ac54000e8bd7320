"""Twenty times kill -9 of random processes at random moments of one run; afterwards every problem drawn is accounted for.

The engine is tests/fake_engine.py, as the real one takes half a minute to start; LEDGER_REAL=1 bash tests/run.sh -k ledger takes the
real one. LEDGER_SEED=n: other moments.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from conftest import ROOT
from fake_engine import fake_vllm
from test_run import balance, command, leftovers, metrics

STEPS, BATCH, ATTEMPTS, MAX_LAG = 90, 64, 8, 4
COMMANDS = {
    "engine": "vllm.entrypoints",
    "actor": "actor.py",
    "preprocess": "preprocess.py",
    "trainer": "train.py",
}
# of an engine's the run goes on, which saves starts
KILLS = ["engine"] * 12 + ["actor", "preprocess", "trainer", "launcher"] * 2


class Run:
    """The user: starts the command, and starts it again when it has ended."""

    def __init__(self, out, port, *knobs):
        self.out, self.lives = out, 0
        self.command = command(
            out,
            "t",
            port,
            "--steps",
            STEPS,
            "--batch_size",
            BATCH,
            "--attempts",
            ATTEMPTS,
            "--max_lag",
            MAX_LAG,
            "--concurrency",
            128,
            "--no_signal",
            "drop",
            "--save_every",
            4,
            "--eval_every",
            0,
            *knobs,
        )
        path = (
            os.environ.get("PYTHONPATH", "")
            if "LEDGER_REAL" in os.environ
            else str(fake_vllm(out / "fake"))
        )
        self.environment = os.environ | {"RUN_MARK": str(out), "PYTHONPATH": path}

    def start(self):
        """Start it, and again as long as what a killed launcher left behind is still saving its work."""
        deadline = time.monotonic() + 60
        while True:
            self.log = self.out / f"life{self.lives}.txt"
            with open(self.log, "w") as f:
                self.process = subprocess.Popen(
                    self.command, cwd=ROOT, stdout=f, stderr=f, env=self.environment
                )
            self.until(
                lambda: self.process.poll() is not None or " steps of " in self.log.read_text()
            )
            if not re.search("held by|cannot listen", self.log.read_text()):
                break
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.5)
        self.lives += 1

    def until(self, condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return found

    def steps(self):
        """How many steps this life has said it has done."""
        return len(re.findall(r"^\[train\] step ", self.log.read_text(), re.M))

    def alive(self):
        assert self.process.poll() is None, self.log.read_text()
        return True

    def victim(self, kind):
        """Its process id, None if it does not live at present; of a process and its children the one
        that run.sh started, of an engine the one that its supervisor did.
        """
        if kind == "launcher":
            return self.process.pid
        for pid, line in leftovers(self.out):
            if COMMANDS[kind] not in line or "bash" in line or "supervise" in line:
                continue
            try:
                if kind == "engine" or os.getpgid(int(pid)) == int(pid):
                    return int(pid)
            except ProcessLookupError:
                pass

    def kill(self, kind, rng):
        """kill -9 at a random moment: of what is starting up, or after some more steps."""
        if rng.random() < 0.3:
            wait = rng.uniform(0, 6)
        else:
            goal, wait = self.steps() + rng.randint(1, 4), rng.uniform(0, 0.5)
            self.until(lambda: self.alive() and self.steps() >= goal)
        time.sleep(wait)
        os.kill(self.until(lambda: self.alive() and self.victim(kind)), signal.SIGKILL)
        if kind == "launcher":
            self.process.wait()
        elif (
            kind != "engine"
        ):  # any other death is the run's: it says so, and leaves nothing behind
            assert self.process.wait(60) == 1
            assert (
                re.search("run.sh: .* died with exit code 137", self.log.read_text())
                and "everything is stopped" in self.log.read_text()
            )
            assert leftovers(self.out) == []


@pytest.mark.slow
def test_the_ledger_balances_after_twenty_kills(tmp_path, base_model):
    rng, order, run = (
        random.Random(os.environ.get("LEDGER_SEED", "0")),
        KILLS.copy(),
        Run(tmp_path, 8830),
    )
    while "engine" * 3 in "".join(
        order
    ):  # run.sh waits longer before every further restart of an engine
        rng.shuffle(order)
    run.start()
    for n, kind in enumerate(order):
        print(
            f"{time.strftime('%T')} kill {n + 1}: {kind}, life {run.lives}, {run.steps()} steps into it",
            flush=True,
        )
        run.kill(kind, rng)
        if run.process.poll() is not None:
            run.start()
    assert run.process.wait(240) == 0, run.log.read_text()
    assert leftovers(tmp_path) == []

    run_dir = tmp_path / "t"
    steps, evals = metrics(run_dir)
    trained, dropped = balance(run_dir, BATCH, ATTEMPTS)
    assert (
        len(steps) == STEPS
        and dropped.total() > 0
        and dropped.total() == sum(sum(x["drops"].get("no_signal", {}).values()) for x in steps)
    )
    assert (
        max(x["mismatch"] for x in steps if x["mismatch"] is not None) < 1e-3
    )  # after every restart the engine holds the trainer's weights
    # it learned
    assert (evals[0]["version"], evals[-1]["version"]) == (0, STEPS) and evals[-1]["eval"][
        "toy"
    ] > evals[0]["eval"]["toy"] + 0.15
    # disk: two checkpoints, nothing half written, no record but those that the gate lets wait; then everything together
    files = [p for p in run_dir.rglob("*") if p.is_file()]
    assert len(list((run_dir / "checkpoints").iterdir())) == 2 and not [
        p for p in files if p.suffix == ".tmp"
    ]
    records = [p for p in files if p.suffix == ".safetensors" and "queues" in p.parts]
    assert (
        all("rollouts" in p.parts for p in records)
        and len(records) <= (MAX_LAG + 1) * BATCH // ATTEMPTS
    )
    assert sum(p.stat().st_size for p in files) < 40e6


@pytest.mark.slow
@pytest.mark.skipif(
    "LEDGER_REAL" in os.environ, reason="takes a fake engine that cannot start again"
)
def test_work_is_saved_when_a_run_is_stopped_while_its_only_engine_is_down(tmp_path, base_model):
    run = Run(
        tmp_path, 8831, "--batch_size", 16, "--max_lag", 16, "--no_signal", "keep"
    )  # the first wave of sequences is data for eight steps, so that the trainer comes to wait for the engine
    run.start()
    run.until(lambda: run.alive() and run.steps() >= 3)
    (tmp_path / "fake" / "vllm" / "entrypoints" / "openai" / "api_server.py").unlink()
    os.kill(run.victim("engine"), signal.SIGKILL)
    run.until(lambda: run.alive() and "restart 2 of 3" in run.log.read_text())
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130 and "is saved" in run.log.read_text(), run.log.read_text()
    assert leftovers(tmp_path) == []
    balance(tmp_path / "t", 16, ATTEMPTS)


@pytest.mark.slow
def test_a_run_directory_that_is_gone_is_named_and_its_checkpoints_are_whole(tmp_path, base_model):
    """A shared file system that is unmounted: FAKED by moving the directory away."""
    run = Run(tmp_path, 8832)
    run.start()
    run.until(lambda: run.alive() and run.steps() >= 6)
    (tmp_path / "t").rename(tmp_path / "away")
    assert run.process.wait(90) == 1
    assert f"{tmp_path}/t is not there any more: mount it again" in run.log.read_text(), (
        run.log.read_text()
    )
    assert leftovers(tmp_path) == []
    if (tmp_path / "t").exists():  # nobody makes another one in its place
        assert not list((tmp_path / "t").rglob("*.safetensors"))
        shutil.rmtree(tmp_path / "t")
    (tmp_path / "away").rename(tmp_path / "t")
    run.start()
    assert "from step 4" in run.log.read_text()
    run.until(lambda: run.alive() and run.steps() >= 1)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130

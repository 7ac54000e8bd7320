"""The kill matrix: {engine, trainer} x {SIGKILL, SIGSTOP} x {idle, decoding, start, mid-transfer, before swap}, two real engines.

In every cell the others go on within the deadline, no engine ever answers with weights that are not those of the version it
names, and whoever was lost takes part again in the next update.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

import pytest
import requests
import torch

from conftest import ROOT, register, resolved
from plumbing import launch, secret
from plumbing.client import Span, token_versions
from tools.evaluate import start_engines
from train import token_logprobs
from updater import model_of

pytestmark = pytest.mark.slow
PORT, DEADLINE, PROMPT = 8800, 8.0, [45, 4, 52, 29, 2]
MOMENTS = ["idle", "decoding", "start", "mid", "swap"]


class House:
    """Two engines, the updater, and clients that keep both engines decoding."""

    def __init__(self, out, base_model):
        self.config = resolved(
            *("toy", "--run", "house", "--out", out, "--port", PORT, "--engines", 2),
            *("--concurrency", 64, "--model", base_model, "--sync_timeout", DEADLINE),
            *("--bucket_mb", 1),
        )
        # one tensor per broadcast: many moments to die at
        self.config.bucket_mb = 0
        self.run_dir = launch.write(self.config)
        self.headers = secret.header(self.run_dir)
        (self.run_dir / "queues").mkdir()
        self.version = 0
        self.engines = {}
        for i in (0, 1):
            self.start_engine(i)
        self.start_trainer()
        self.update()

    def start_engine(self, i):
        """Start it and, as plumbing/supervise.py does, say so."""
        one = dataclasses.replace(self.config, engines=1, port=PORT + i)
        self.engines[i] = start_engines(one, as_loaded=False)[0]
        url = f"http://127.0.0.1:{PORT + i}"
        # it has no weights from the trainer
        answer = requests.post(url + "/inference/v1/generate", json={}, headers=self.headers)
        assert answer.status_code == 503
        register(self.run_dir, f"engine{i}", url)

    def engine_is_gone(self, i):
        """As plumbing/supervise.py does when an engine has died."""
        (self.run_dir / "engines" / f"engine{i}.json").unlink()

    def start_trainer(self):
        self.said = []
        self.trainer = subprocess.Popen(
            [sys.executable, "tests/updater.py", str(self.run_dir)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PIPELINE_RUN_DIR": str(self.run_dir)},
            start_new_session=True,
        )
        threading.Thread(
            target=lambda said, out: [said.append(line.strip()) for line in out],
            args=(self.said, self.trainer.stdout),
            daemon=True,
        ).start()
        self.expect("ready", 60)

    def expect(self, text, seconds):
        """Wait until the trainer has said it."""
        deadline = time.monotonic() + seconds
        while text not in self.said:
            assert time.monotonic() < deadline and self.trainer.poll() is None, (
                f"no '{text}' in {self.said[-8:]}"
            )
            time.sleep(0.02)

    def tell(self, text):
        self.trainer.stdin.write(text + "\n")
        self.trainer.stdin.flush()

    def update(self, engines="0 1", moment="none", seconds=30):
        """One whole update (or up to `moment`); by default both engines must have taken it."""
        self.version += 1
        self.tell(f"update {self.version} {moment}")
        self.expect(
            f"updated {self.version} {engines}" if moment == "none" else f"at {moment}", seconds
        )

    @lru_cache(maxsize=4)
    def model(self, version):
        return model_of(self.config.model, version)

    def generate(self, i, n=12, timeout=3 * DEADLINE):
        answer = requests.post(
            f"http://127.0.0.1:{PORT + i}/inference/v1/generate",
            timeout=timeout,
            headers=self.headers,
            json=dict(
                token_ids=PROMPT,
                sampling_params=dict(max_tokens=n, temperature=1.0, logprobs=0, ignore_eos=True),
            ),
        )
        choice = answer.json()["choices"][0]
        return (
            choice["token_ids"],
            torch.tensor(choice["behavior_logprobs"]),
            token_versions([Span(**s) for s in choice["weight_versions"]], n),
        )

    def check(self, answer, version=None):
        """The logprobs of an answer are those of the version it names, in all of its first span (later ones may have older KV)."""
        tokens, logprobs, versions = answer
        first = versions == versions[0]
        assert version is None or set(versions.tolist()) == {version}
        ids = torch.tensor(PROMPT + tokens)
        with torch.no_grad():
            mine = token_logprobs(self.model(int(versions[0])), ids, torch.arange(len(ids)), 1.0)[
                0
            ][len(PROMPT) :]
        assert (mine - logprobs)[first].abs().max() < 1e-4, (
            f"engine says version {versions[0]}, its logprobs are of other weights"
        )

    def decode(self, i, stop, answers, errors):
        while not stop.is_set():
            try:
                answers.append(self.generate(i, 100))
            except (requests.RequestException, KeyError) as e:
                errors.append(f"{type(e).__name__}: {e}"[:200])
                time.sleep(0.2)


def mentions(path, text):
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def house(tmp_path_factory, base_model):
    house = House(tmp_path_factory.mktemp("house"), base_model)
    yield house
    for p in (*house.engines.values(), house.trainer):
        os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    time.sleep(0.5)
    left = [
        p.parent.name
        for p in Path("/proc").glob("[0-9]*/environ")
        if mentions(p, str(house.run_dir))
    ]
    assert not left, f"processes left behind: {left}"


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kill", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("who", ["engine", "trainer"])
def test_kill_matrix(house, who, kill, moment):
    stop, answers, errors = threading.Event(), {0: [], 1: []}, {0: [], 1: []}
    clients = (
        [
            threading.Thread(target=house.decode, args=(i, stop, answers[i], errors[i]))
            for i in (0, 1)
            for _ in range(8)
        ]
        if moment != "idle"
        else []
    )
    for c in clients:
        c.start()
    try:
        if clients:
            time.sleep(0.5)
        if moment in ("start", "mid", "swap"):
            house.update(moment=moment)
        victim = house.engines[1] if who == "engine" else house.trainer
        os.killpg(victim.pid, getattr(signal, kill))
        if who == "engine":
            if moment in ("start", "mid", "swap"):
                house.tell("go")
                house.expect(f"updated {house.version} 0", 6 * DEADLINE)  # the others go on
            else:
                house.update(engines="0", seconds=6 * DEADLINE)
            house.check(house.generate(0), house.version)
            if kill == "SIGKILL":
                victim.wait()
                house.engine_is_gone(1)
                stop.set()  # a machine of two cores starts an engine slowly while it serves sixteen clients
                house.start_engine(1)  # as run.sh does
            else:
                os.killpg(victim.pid, signal.SIGCONT)
                house.check(house.generate(1))
        else:
            time.sleep(0.5)
            for i in (0, 1):
                house.check(house.generate(i))  # engines go on
            if kill == "SIGKILL":
                victim.wait()
                house.start_trainer()  # the next trainer
            else:
                time.sleep(DEADLINE + 1)  # longer than anybody waits for it
                for i in (0, 1):
                    house.check(house.generate(i))
                os.killpg(victim.pid, signal.SIGCONT)
                if moment in ("start", "mid", "swap"):
                    house.tell("go")
                    house.expect(f"updated {house.version} 0 1", 6 * DEADLINE)
        house.update(seconds=6 * DEADLINE)  # whoever was lost is back
        for i in (0, 1):
            house.check(house.generate(i), house.version)
    finally:
        stop.set()
        for c in clients:
            c.join(60)
    for i in (0, 1):
        for answer in answers[i]:
            house.check(answer)
    assert not errors[0] and (who == "engine" or not errors[1]), (
        errors
    )  # no request to an engine that nobody touched failed

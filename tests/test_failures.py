"""The kill matrix: {engine, trainer} x {SIGKILL, SIGSTOP} x {idle, decoding, start, mid-transfer,
before swap}; and requests that kill engines.

In every cell the others go on within the deadline, no engine answers with weights other than
those of the version that it names, and the lost process takes part again in the next update.
Two real vLLM engines, real processes and real signals; the trainer is tests/updater.py, which
sends weights and does not train. Two of the tests of requests use FAKE engines.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import requests
import torch
from test_weights import ask, differences
from transformers import AutoTokenizer

from conftest import ROOT, resolved, with_knobs
from fake_engine import fake_vllm
from plumbing import client, placement, rundir
from plumbing.problems import load_problems
from plumbing.supervise import Engine, stop
from test_run import leftovers, metrics, run
from tools.evaluate import start_engines
from updater import model_of

pytestmark = pytest.mark.slow
PORT = 8800
DEADLINE = 16.0


class House:
    """Two engines, the updater, and clients that keep both engines decoding."""

    def __init__(self, out, base_model):
        knobs = f"--port {PORT} --engines 2 --concurrency 64 --sync_timeout {DEADLINE}"
        arguments = ["--run", "house", "--out", out, "--model", base_model]
        config = resolved("toy", *arguments, *knobs.split())
        # One tensor per broadcast: there are many moments to die at.
        config.bucket_mb = 0
        self.run_dir = rundir.write(config)
        (self.run_dir / "queues").mkdir()
        self.base_model = base_model
        self.version = 0
        commands = placement.engine_commands(config, 0)
        self.engines = [Engine(self.run_dir, *command, 300) for command in commands]
        ports = [int(engine.url.rpartition(":")[2]) for engine in self.engines]
        self.configs = [with_knobs(config, engines=1, port=port) for port in ports]
        for i in (0, 1):
            self.start_engine(i)
            # There is no trainer yet.
            with pytest.raises(AssertionError, match="no weights from the trainer yet"):
                ask(self.configs[i])
        self.start_trainer()
        self.update()

    def start_engine(self, i):
        """Start engine i and wait until the trainer can find it."""
        self.engines[i].start()
        while not self.engines[i].has_answered:
            assert self.engines[i].poll() is None, self.engines[i].last_errors()
            time.sleep(0.2)

    def start_trainer(self):
        self.log = self.run_dir / "updater.txt"
        command = [sys.executable, "tests/updater.py", str(self.run_dir)]
        with open(self.log, "w") as output:
            self.trainer = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                text=True,
                start_new_session=True,
            )
        self.expect("ready")

    def expect(self, line, seconds=6 * DEADLINE):
        """Wait until the trainer has printed this line."""
        deadline = time.monotonic() + seconds
        while line not in self.log.read_text().splitlines():
            assert time.monotonic() < deadline, f"no '{line}' in {self.log.read_text()}"
            assert self.trainer.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def tell(self, text):
        self.trainer.stdin.write(text + "\n")
        self.trainer.stdin.flush()

    def begin(self, moment):
        """Begin an update, which stops at this moment."""
        self.version += 1
        self.tell(f"update {self.version} {moment}")

    def update(self, engines="0 1"):
        """Do a whole update, in which these engines take part."""
        self.begin("none")
        self.expect(f"updated {self.version} {engines}")

    @lru_cache(maxsize=4)
    def model(self, version):
        return model_of(self.base_model, version)

    def check(self, answer, version=None):
        """Assert that the logprobs of an answer's first span are those of the version it names.

        Later spans may have used an older KV cache.
        """
        versions = answer["versions"]
        assert version is None or set(versions.tolist()) == {version}
        first_span = torch.from_numpy(versions == versions[0])
        worst = differences(self.model(int(versions[0])), answer)[first_span].max()
        assert worst < 1e-4, f"logprobs of version {versions[0]} are those of other weights"

    def check_engines(self, *numbers, version=None):
        for i in numbers:
            self.check(ask(self.configs[i]), version)

    def decode(self, i, stop):
        """Ask engine i until `stop` is set; return (i, answers, errors)."""
        answers = []
        errors = []
        while not stop.is_set():
            try:
                answers.append(ask(self.configs[i], n=100))
            except (requests.RequestException, AssertionError) as e:
                errors.append(repr(e)[:200])
                time.sleep(0.2)
        return i, answers, errors


@pytest.fixture(scope="module")
def house(tmp_path_factory, base_model):
    out = tmp_path_factory.mktemp("house")
    with pytest.MonkeyPatch.context() as patch:
        # All processes that are started here have this mark.
        patch.setenv("RUN_MARK", str(out))
        house = House(out, base_model)
        yield house
    stop(house.engines, 0)
    os.killpg(house.trainer.pid, signal.SIGKILL)
    house.trainer.wait()
    time.sleep(0.5)
    assert leftovers(out) == []


@contextlib.contextmanager
def decoding(house, clients, touched):
    """Keep this many clients of each engine asking; yield the event that ends them.

    Afterwards every answer is checked, and no request to an untouched engine may have failed.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(16) as pool:
        decoders = [pool.submit(house.decode, i, stop) for i in clients * [0, 1]]
        try:
            yield stop
        finally:
            stop.set()
    for decoder in decoders:
        i, answers, errors = decoder.result()
        for answer in answers:
            house.check(answer)
        assert not errors or (i == 1 and touched), errors


def lose_engine(house, kill, in_update, stop):
    victim = house.engines[1].process
    os.killpg(victim.pid, getattr(signal, kill))
    # The other engine goes on.
    if in_update:
        house.tell("go")
        house.expect(f"updated {house.version} 0")
    else:
        house.update("0")
    house.check_engines(0, version=house.version)
    if kill == "SIGSTOP":
        os.killpg(victim.pid, signal.SIGCONT)
        house.check_engines(1)
        return
    victim.wait()
    house.engines[1].file.unlink()
    # A machine of two cores starts an engine slowly while it serves sixteen clients.
    stop.set()
    house.start_engine(1)


def lose_trainer(house, kill, in_update):
    victim = house.trainer
    os.killpg(victim.pid, getattr(signal, kill))
    time.sleep(0.5)
    # The engines go on.
    house.check_engines(0, 1)
    if kill == "SIGKILL":
        victim.wait()
        house.start_trainer()
        return
    # Nobody waits that long for the trainer.
    time.sleep(DEADLINE + 1)
    house.check_engines(0, 1)
    os.killpg(victim.pid, signal.SIGCONT)
    if in_update:
        house.tell("go")
        house.expect(f"updated {house.version} 0 1")


@pytest.mark.parametrize("moment", ["idle", "decoding", "start", "mid", "swap"])
@pytest.mark.parametrize("kill", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_kill_matrix(house, role, kill, moment):
    in_update = moment in ("start", "mid", "swap")
    clients = 0 if moment == "idle" else 8
    with decoding(house, clients, touched=role == "engine") as stop:
        time.sleep(0.5)
        if in_update:
            house.begin(moment)
            house.expect(f"at {moment}")
        if role == "engine":
            lose_engine(house, kill, in_update, stop)
        else:
            lose_trainer(house, kill, in_update)
        # The lost process is back.
        house.update()
        house.check_engines(0, 1, version=house.version)


# ---- requests that kill an engine

INNOCENT = [[2, 3, 4 + k] for k in range(8)]
KILLER = [2, 3, 20]
# The tokenizer of mortal_engine knows token 100; the model has no row for it.
WITHOUT_A_ROW = [2, 3, 100]


@contextlib.contextmanager
def mortal_engine(out, base_model):
    """Yield (config, engine) of an engine that is started again when it dies.

    The model's tokenizer knows more tokens than the model has rows.
    """
    shutil.copytree(base_model, out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    tokenizer.add_tokens([f"<extra {k}>" for k in range(100)])
    tokenizer.save_pretrained(out / "model")
    arguments = ["--run", "mortal", "--out", out, "--model", out / "model"]
    config = resolved("toy", *arguments, "--port", PORT + 50, "--concurrency", 4, "--engines", 1)
    rundir.write(config)
    [engine] = start_engines(config)
    has_ended = threading.Event()

    def watch():
        while not has_ended.wait(0.2):
            assert engine.poll() is None

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield config, engine
    finally:
        has_ended.set()
        watching.join()
        stop([engine], 0)


def test_a_request_that_kills_a_real_engine_is_sent_three_times_and_left_out(tmp_path, base_model):
    async def sample(config, engine):
        engines = client.EngineClient(config, {1}, 64, f"{config.out}/{config.run}")
        engines.set_engines([engine.url])
        post = engines._post

        async def deadly(url, path, body):
            # vLLM checks a client's fields, but not its own: this index is out of range.
            if body["token_ids"] == KILLER:
                body["sampling_params"] |= dict(min_tokens=3, _all_stop_token_ids=[10**6])
            return await post(url, path, body)

        engines._post = deadly
        prompts = [*INNOCENT, KILLER, *INNOCENT, KILLER, WITHOUT_A_ROW]
        calls = [engines.generate(prompt, 1.0, 90) for prompt in prompts]
        answers = await asyncio.wait_for(asyncio.gather(*calls), 500)
        await engines.close()
        return engines, dict(zip(map(tuple, prompts), answers))

    with mortal_engine(tmp_path, base_model) as (config, engine):
        engines, answers = asyncio.run(sample(config, engine))
        log = engine.log.read_text()
    failed = [list(prompt) for prompt, answer in answers.items() if answer is None]
    assert failed == [KILLER, WITHOUT_A_ROW]
    assert engines.counts["crashes of engines"] == log.count(": the server ends") == 3
    assert engines.counts["left out, as their prompts kill engines"] == 2
    assert engines.counts["refused"] == 1 and engines.counts["failed"] == 0


def test_a_run_goes_on_without_a_prompt_that_kills_its_only_engine(tmp_path, base_model):
    """The engine is FAKE. The prompt is held out: both evaluations ask for it."""
    knobs = f"--steps 4 --batch_size 32 --attempts 8 --eval_problems 16 --model {base_model}"
    [problem, *_] = load_problems(resolved("toy"), "test")["toy"]
    prompt = AutoTokenizer.from_pretrained(base_model)(problem["prompt"])["input_ids"]
    environment = dict(
        PYTHONPATH=str(fake_vllm(tmp_path / "fake")),
        FAKE_KILLER=" ".join(map(str, prompt)),
    )
    done = run(tmp_path, "mortal", PORT + 60, knobs, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("engine0 died with exit code 1, and is started again") == 3
    token_ids = str(prompt).replace(" ", "")
    assert f"its attempts fail from now on. Its token ids: {token_ids}\n" in done.stdout
    assert "2 left out, as their prompts kill engines" in done.stdout
    steps, evals = metrics(tmp_path / "mortal")
    assert len(steps) == 4 and [line["version"] for line in evals] == [0, 4]
    assert leftovers(tmp_path) == []


def test_a_run_whose_every_request_kills_its_engine_ends_and_says_so(tmp_path, base_model):
    """The engine is FAKE and dies of every request."""
    environment = dict(PYTHONPATH=str(fake_vllm(tmp_path / "fake")), FAKE_KILLER="all")
    done = run(tmp_path, "mortal", PORT + 70, f"--model {base_model}", **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "run.sh: actor died with exit code 1, stopping" in done.stdout
    assert "has crashed 5 times, each time with requests in progress, and no request" in done.stdout
    assert done.stdout.count("engine0 died with exit code 1, and is started again") in (4, 5)
    assert leftovers(tmp_path) == []

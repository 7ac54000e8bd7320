"""The trainer's end of a weight group: which engines there are, and one group formed with them."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import torch

from plumbing import transport
from plumbing.queues import read_json
from plumbing.secret import secret_header
from plumbing.supervise import DIRECT, is_healthy

# An engine that fails in two deliveries in a row is left out of updates for FIRST_PAUSE_S seconds.
# With each further failure the pause is twice as long, up to LONGEST_PAUSE_S.
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 600.0


class EngineRegistry:
    """The engines that their launchers have listed, and rank 0's calls to them.

    An engine is (url, started): an engine that was started again is another one. It is asked for
    its health once, before it is admitted, because a host that has vanished leaves its engines'
    files behind.
    """

    def __init__(self, config, run_dir):
        self.config = config
        self.run_dir = run_dir
        self.pool = ThreadPoolExecutor(64)
        # the engines that the delivery in progress does without, if there are others: those that
        # refused or missed a part of it, and those that failed in the deliveries before (`begin`)
        self.failing = set()
        # {engine: number of deliveries in a row in which it failed}, {engine: the time until which
        # it is left out}, and the engines that were listed when the last delivery began
        self.failures = Counter()
        self.left_out_until = {}
        self.listed_before = []
        # the reason why an engine was dropped last
        self.error = ""

    def begin(self):
        """A delivery begins: only the engines that are left out count as failing now.

        If an engine that always fails were not left out, each update would wait for it: a group
        with it is formed, and then another one without it, which may take --sync_timeout seconds.
        When engines come or go, all of them are tried again, because an engine may have failed only
        because of another one.
        """
        listed = self.listed()
        if listed != self.listed_before:
            self.failures.clear()
            self.left_out_until.clear()
        self.listed_before = listed
        now = time.monotonic()
        self.failing = {engine for engine, until in self.left_out_until.items() if now < until}

    def due_again(self):
        """The engines that were left out, and whose time is over."""
        now = time.monotonic()
        return {engine for engine, until in self.left_out_until.items() if now >= until}

    def succeeded(self, engine):
        """Note that an engine serves the newest weights."""
        self.failures.pop(engine, None)
        self.left_out_until.pop(engine, None)

    def listed(self):
        """All engines that run and have begun to answer, as [(url, started)]."""
        paths = sorted(Path(self.run_dir, "engines").glob("*.json"))
        # a file that has just been removed reads as {}
        entries = [read_json(path) for path in paths]
        return [(entry["url"], entry["started"]) for entry in entries if entry]

    def newcomers(self, known):
        """The engines that are not in `known` and answer GET /health now."""
        others = [engine for engine in self.listed() if engine not in known]
        answers = self.pool.map(lambda engine: is_healthy(engine[0], (0.2, 3.0)), others)
        return [engine for engine, ok in zip(others, answers) if ok]

    def call_all(self, path, bodies):
        """POST bodies[engine] to all these engines at once.

        Returns {engine: its answer}. Engines that fail or refuse are dropped and left out.
        """
        futures = {}
        for engine, body in bodies.items():
            futures[engine] = self.pool.submit(self._call, engine, path, body)
        answers = {}
        for engine, future in futures.items():
            try:
                answers[engine] = future.result()
            except (requests.RequestException, RuntimeError) as e:
                self.drop(engine, f"{path}: {type(e).__name__}: {e}")
        return answers

    def drop(self, engine, why):
        """Note that an engine takes no part in the delivery any more."""
        self.error = f"engine {engine[0]}: {why}"
        print(f"weights: dropped {self.error}", flush=True)
        if engine not in self.failing:
            self.failing.add(engine)
            self._count_failure(engine)

    def _count_failure(self, engine):
        """An engine has failed in this delivery. From the second failure in a row on, it pauses."""
        self.failures[engine] += 1
        if self.failures[engine] > 1:
            seconds = min(FIRST_PAUSE_S * 2 ** (self.failures[engine] - 2), LONGEST_PAUSE_S)
            self.left_out_until[engine] = time.monotonic() + seconds
            print(
                f"weights: engine {engine[0]} has failed in {self.failures[engine]} deliveries in "
                f"a row: it is left out for {seconds:.0f} s, if there is another engine",
                flush=True,
            )

    def _call(self, engine, path, body):
        answer = requests.post(
            engine[0] + path,
            json=body,
            headers=secret_header(self.run_dir),
            timeout=self.config.sync_timeout,
            proxies=DIRECT,
        )
        if answer.status_code != 200:
            raise RuntimeError(f"refused, {answer.status_code} {answer.text[:500]}")
        return answer.json()


class WrongWeights(RuntimeError):
    """An engine's model cannot take the trainer's weights, and no other engine's can."""


class WeightGroup:
    """The weight group of the trainer and the workers of these engines.

    Making one forms the group. Raises RuntimeError or TimeoutError.
    """

    def __init__(self, config, engines, members, layout, device, as_loaded):
        self.engines = engines
        self.members = members
        self.timeout = config.sync_timeout
        self.workers = config.tensor_parallel
        self.updates = 0
        backend = config.weight_backend
        host = config.master_addr
        # Gloo sends from the CPU's memory.
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.store = transport.open_store(host, 0, self.timeout, server=True)
        self.world = 1 + len(members) * self.workers
        group = dict(
            backend=backend,
            host=host,
            port=self.store.port,
            layout=layout,
            world=self.world,
            timeout=self.timeout,
            as_loaded=as_loaded,
        )
        bodies = {}
        for i, member in enumerate(members):
            # rank 0 is the trainer
            bodies[member] = group | dict(first_rank=1 + i * self.workers)
        if len(engines.call_all("/init_process_group", bodies)) < len(members):
            raise RuntimeError(f"not all engines joined: {engines.error}")
        # Connecting has to wait until all workers are there: NCCL's has no deadline.
        address = f"{host}:{self.store.port}"
        self._wait_for_key("here", f"did not join: can its machine reach {address}? See its log")
        self.store.set("all_here", "")
        self.group = self._in_time(
            transport.join_group, backend, self.store, 0, self.world, self.timeout, self.device
        )

    def close(self):
        """Abort the group in a thread: it may take as long as the pending operations do."""
        transport.in_thread(transport.abort_group, self.group)
        # The thread has the last reference.
        self.group = None

    def send(self, version, buckets):
        """Send a version to all workers, and wait until every one has received and prepared it.

        Returns the time at which all was sent. Raises RuntimeError or TimeoutError; WrongWeights if
        a worker says that its model cannot take these weights.
        """
        # Every worker waits for this key, and then begins to receive.
        self.store.set(f"update/{self.updates}", str(version))
        self.broadcast(buckets)
        sent = time.monotonic()
        name = f"ready/{self.updates}"
        self.updates += 1
        self._wait_for_key(name, "did not receive the update")
        for rank in range(1, self.world):
            problem = self.store.get(f"{name}/{rank}").decode()
            if problem:
                raise WrongWeights(
                    f"an engine does not compute with the weights that it is sent: {problem}"
                )
        return sent

    def broadcast(self, buckets):
        """Send the buckets one by one; for NCCL each goes to the GPU first.

        Raises RuntimeError or TimeoutError.
        """
        for bucket in buckets:
            self._in_time(transport.broadcast, self.group, bucket, self.device, self.timeout)

    def _wait_for_key(self, name, failure):
        """Wait until every worker has set its key `name`/<rank>.

        Engines whose workers miss the deadline are dropped; then it raises TimeoutError.
        """
        every_key = [f"{name}/{rank}" for rank in range(1, self.world)]
        if not self._wait_until(self.store.check, every_key):
            for i, member in enumerate(self.members):
                first = i * self.workers
                if not self.store.check(every_key[first : first + self.workers]):
                    self.engines.drop(member, failure)
            raise TimeoutError(f"an engine worker missed --sync_timeout {self.timeout:.0f} s")

    def _in_time(self, function, *args):
        """Call the function in a thread and wait for its result, or for the deadline.

        torch's own calls and waits do not notice that an engine is gone.
        """
        future = transport.in_thread(function, *args)
        if not self._wait_until(future.done):
            raise TimeoutError(
                f"{function.__name__} took longer than --sync_timeout {self.timeout:.0f} s"
            )
        return future.result()

    def _wait_until(self, is_done, *args):
        """Wait until is_done(*args). Returns whether it was so within `sync_timeout`.

        Raises RuntimeError as soon as an engine is gone.
        """
        deadline = time.monotonic() + self.timeout
        next_look = time.monotonic() + 1.0
        while not is_done(*args):
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                return False
            if time.monotonic() > next_look:
                next_look += 1.0
                gone = set(self.members) - set(self.engines.listed())
                if gone:
                    urls = ", ".join(sorted(url for url, _ in gone))
                    raise RuntimeError(f"these engines are gone: {urls}")
        return True

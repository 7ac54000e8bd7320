"""The trainer's end of a weight group: which engines there are, and one group formed with them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import torch

from plumbing import transport
from plumbing.queues import read_json
from plumbing.secret import secret_header
from plumbing.supervise import DIRECT, is_healthy


class EngineRegistry:
    """The engines that their launchers have listed, and rank 0's calls to them.

    An engine is (url, started): one that was started again is another one. It is asked for its health
    once, before it is admitted: a host that has vanished leaves its engines' files behind.
    """

    def __init__(self, config, run_dir):
        self.config = config
        self.run_dir = run_dir
        self.pool = ThreadPoolExecutor(64)
        # engines that refused or missed a part of the delivery in progress; the newest reason
        self.failing = set()
        self.error = ""

    def listed(self):
        """All engines that run and have begun to answer, as [(url, started)]."""
        paths = sorted(Path(self.run_dir, "engines").glob("*.json"))
        found = [read_json(path) for path in paths]
        return [(x["url"], x["started"]) for x in found if x]

    def newcomers(self, known):
        """Engines that answer GET /health now and are none of those."""
        others = [engine for engine in self.listed() if engine not in known]
        answers = self.pool.map(lambda engine: is_healthy(engine[0], (0.2, 3.0)), others)
        return [engine for engine, ok in zip(others, answers) if ok]

    def call_all(self, path, bodies):
        """POST bodies[engine] to every engine at once: {engine: answer} of those that obey."""
        futures = {e: self.pool.submit(self._call, e, path, body) for e, body in bodies.items()}
        answers = {}
        for engine, future in futures.items():
            try:
                answers[engine] = future.result()
            except (requests.RequestException, RuntimeError) as e:
                self.drop(engine, f"{path}: {type(e).__name__}: {e}")
        return answers

    def drop(self, engine, why):
        """Note that an engine takes no part in the delivery any more."""
        self.failing.add(engine)
        self.error = f"engine {engine[0]}: {why}"
        print(f"weights: dropped {self.error}", flush=True)

    def _call(self, engine, path, body):
        headers = secret_header(self.run_dir)
        how = dict(headers=headers, timeout=self.config.sync_timeout, proxies=DIRECT)
        answer = requests.post(engine[0] + path, json=body, **how)
        if answer.status_code != 200:
            raise RuntimeError(f"refused, {answer.status_code} {answer.text[:500]}")
        return answer.json()


class WeightGroup:
    """The weight group of the trainer and these engines. Forming it raises RuntimeError or TimeoutError."""

    def __init__(self, config, engines, members, layout, device):
        self.engines = engines
        self.members = members
        self.timeout = config.sync_timeout
        self.workers = config.tensor_parallel
        self.updates = 0
        backend = config.weight_backend
        host = config.master_addr
        # gloo sends from the CPU's memory
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.store = transport.open_store(host, 0, self.timeout, server=True)
        self.world = 1 + len(members) * self.workers
        group = dict(backend=backend, host=host, port=self.store.port, layout=layout)
        group |= dict(world=self.world, timeout=self.timeout)
        bodies = {m: group | dict(first_rank=1 + i * self.workers) for i, m in enumerate(members)}
        if len(engines.call_all("/init_process_group", bodies)) < len(members):
            raise RuntimeError(f"not all engines joined: {engines.error}")
        # connecting has to wait until all are there: NCCL's has no deadline
        self._wait_for_key("here", "did not join")
        self.store.set("all_here", "")
        place = (backend, self.store, 0, self.world, self.timeout, self.device)
        self.group = self._in_time(transport.join_group, *place)

    def close(self):
        """Free whoever waits in this group, in a thread: it may take as long as what is pending."""
        transport.in_thread(transport.abort_group, self.group)
        # the thread has the last reference
        self.group = None

    def ring(self, version):
        """The doorbell: every worker begins to receive this version."""
        self.store.set(f"update/{self.updates}", str(version))

    def broadcast(self, buckets):
        """Send the buckets, one by one: NCCL's go to the GPU first. Raises RuntimeError or TimeoutError."""
        for bucket in buckets:
            self._in_time(transport.broadcast, self.group, bucket, self.device, self.timeout)

    def wait_until_ready(self):
        """Until every worker has received and prepared the update."""
        self.updates += 1
        self._wait_for_key(f"ready/{self.updates - 1}", "did not receive the update")

    def _wait_for_key(self, name, failure):
        """Until every worker has set its key `name`/<rank>; TimeoutError if some have not in time."""
        every_key = [f"{name}/{rank}" for rank in range(1, self.world)]
        if not self._wait_until(self.store.check, every_key):
            for i, member in enumerate(self.members):
                first = i * self.workers
                if not self.store.check(every_key[first : first + self.workers]):
                    self.engines.drop(member, failure)
            raise TimeoutError(f"an engine worker missed --sync_timeout {self.timeout:.0f} s")

    def _in_time(self, function, *args):
        """Call it in a thread: torch's calls and waits do not notice by themselves that an engine is gone."""
        future = transport.in_thread(function, *args)
        if not self._wait_until(future.done):
            raise TimeoutError(f"{function.__name__} took longer than {self.timeout:.0f} s")
        return future.result()

    def _wait_until(self, is_done, *args):
        """Wait for the engines; False after `sync_timeout`. RuntimeError as soon as one is gone."""
        deadline = time.monotonic() + self.timeout
        next_look = time.monotonic() + 1.0
        while not is_done(*args):
            time.sleep(0.0005)
            if time.monotonic() > deadline:
                return False
            if time.monotonic() > next_look:
                next_look += 1.0
                if not set(self.members) <= set(self.engines.listed()):
                    raise RuntimeError("an engine is gone")
        return True

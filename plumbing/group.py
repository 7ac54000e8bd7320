"""The trainer's end of a weight group: which engines there are, and one group formed with them.

weights.py decides when and what is sent. Deliberately absent: the weights, threads.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import requests
import torch

from plumbing import secret
from plumbing.queues import read_json
from plumbing.transport import checksum, join_group, leave_group, open_store, settle, weight_stream


class Engines:
    """What rank 0 knows of the engines, and its calls to them.

    An engine is (url, started): one that was started again is another one.
    """

    def __init__(self, config, run_dir):
        self.config = config
        self.run_dir = run_dir
        self.folder = Path(run_dir, "engines")
        self.pool = ThreadPoolExecutor(64)
        # engines that refused or missed a part of the delivery in progress; the newest reason
        self.failing = set()
        self.error = ""

    def registered(self):
        """All engines that run, as [(url, started)]."""
        found = [read_json(path) for path in sorted(self.folder.glob("*.json"))]
        return [(x["url"], x["started"]) for x in found if x]

    def healthy(self, engines, connect_s=1.0, answer_s=10.0):
        """Those of these engines that answer GET /health now, within so many seconds."""
        limit = (connect_s, min(answer_s, self.config.sync_timeout))
        answers = self.pool.map(self._is_healthy, engines, [limit] * len(engines))
        return [engine for engine, ok in zip(engines, answers) if ok]

    def newcomers(self, members):
        """Engines that are well and none of `members`.

        A host that has vanished leaves its engines' files behind and answers nothing: it must not
        delay every update.
        """
        others = [e for e in self.registered() if e not in members]
        return self.healthy(others, connect_s=0.2, answer_s=3.0)

    def _is_healthy(self, engine, limit):
        try:
            return requests.get(engine[0] + "/health", timeout=limit).ok
        except requests.RequestException:
            return False

    def call_all(self, path, bodies):
        """POST bodies[engine] to every engine at once: {engine: answer}.

        Those that do not answer, or refuse, are left out, with a line that says why.
        """
        futures = {e: self.pool.submit(self._call, e, path, body) for e, body in bodies.items()}
        answers = {}
        for engine, future in futures.items():
            try:
                answers[engine] = future.result()
            except (requests.RequestException, RuntimeError) as e:
                self.failed(engine, f"{path}: {type(e).__name__}: {e}")
        return answers

    def failed(self, engine, why):
        """Note that an engine is dropped."""
        self.failing.add(engine)
        self.error = f"engine {engine[0]}: {why}"
        print(f"weights: dropped {self.error}", flush=True)

    def _call(self, engine, path, body):
        headers = secret.header(self.run_dir)
        answer = requests.post(
            engine[0] + path, json=body, headers=headers, timeout=self.config.sync_timeout
        )
        if answer.status_code != 200:
            raise RuntimeError(f"refused, {answer.status_code} {answer.text[:500]}")
        return answer.json()


class Group:
    """The weight group of the trainer and these engines.

    device: the trainer's GPU, for NCCL. Forming it raises RuntimeError or TimeoutError.
    """

    def __init__(self, config, engines, members, layout, device):
        c = config
        self.config = c
        self.engines = engines
        self.updates = 0
        self.store = open_store(c.master_addr, 0, c.sync_timeout, server=True)
        self.world = 1 + len(members) * c.tensor_parallel
        place = dict(
            backend=c.weight_backend,
            host=c.master_addr,
            port=self.store.port,
            world=self.world,
            timeout=c.sync_timeout,
        )
        bodies = {}
        for i, engine in enumerate(members):
            bodies[engine] = layout | place | dict(first_rank=1 + i * c.tensor_parallel)
        self.members = list(engines.call_all("/init_process_group", bodies))
        if len(self.members) < len(members):
            raise RuntimeError(f"not all engines joined: {engines.error}")
        # connecting has to wait until all are there: NCCL's has no deadline
        self._wait_for("here", "did not join")
        self.store.set("all_here", "")
        self.group = join_group(c.weight_backend, self.store, 0, self.world, c.sync_timeout, device)

    def close(self):
        """Free whoever waits in this group."""
        leave_group(self.group)

    def broadcast(self, flats, update, staging):
        """Ring the doorbell, then send the buckets. Raises RuntimeError or TimeoutError."""
        self.store.set(f"update/{self.updates}", json.dumps(update))
        if staging is None:
            self._send_from_host(flats, update["verify"])
        else:
            self._send_through_gpu(flats, update["verify"], staging)

    def _send_from_host(self, flats, verify):
        works = [self.group.broadcast(flat, 0) for flat in flats]
        for work in works:
            self._finish(work)
        if verify:
            sums = torch.stack([checksum(flat) for flat in flats])
            self._finish(self.group.broadcast(sums, 0))

    def _send_through_gpu(self, flats, verify, staging):
        device = staging[0].device
        works = []
        sums = []
        # one bucket is on its way while the next is copied to the GPU
        with torch.cuda.stream(weight_stream(device)):
            for k, flat in enumerate(flats):
                if k >= 2:
                    # this half of the staging memory is free again
                    self._finish(works[k - 2])
                sent = staging[k % 2][: len(flat)]
                sent.copy_(flat, non_blocking=True)
                works.append(self.group.broadcast(sent, 0))
                if verify:
                    sums.append(checksum(sent))
            if verify:
                works.append(self.group.broadcast(torch.stack(sums), 0))
            for work in works[-3:]:
                self._finish(work)
            settle(device, self.config.sync_timeout, "the broadcast")

    def _finish(self, work):
        """Wait for a broadcast. NCCL's does not notice by itself that an engine is gone."""
        wait = Wait(self)
        while not work.is_completed():
            if wait.is_over():
                break
        work.wait(timedelta(seconds=self.config.sync_timeout))

    def wait_until_ready(self):
        """Until every worker has received and prepared the update."""
        number = self.updates
        self.updates += 1
        self._wait_for(f"ready/{number}", "did not receive the update")

    def _wait_for(self, name, failure):
        """Until every worker has set its key `name`/<rank>.

        Raises TimeoutError if some have not in time, RuntimeError as soon as an engine is gone.
        """
        keys = {}
        for i, member in enumerate(self.members):
            ranks = range(i * self.config.tensor_parallel, (i + 1) * self.config.tensor_parallel)
            keys[member] = [f"{name}/{1 + rank}" for rank in ranks]
        every_key = sum(keys.values(), [])
        wait = Wait(self)
        while not self.store.check(every_key):
            if wait.is_over():
                for member in self.members:
                    if not self.store.check(keys[member]):
                        self.engines.failed(member, failure)
                raise TimeoutError(f"not all were there within {self.config.sync_timeout:.0f} s")


class Wait:
    """A wait for the engines of a group, with the deadline `sync_timeout`."""

    def __init__(self, group):
        self.group = group
        now = time.monotonic()
        self.deadline = now + group.config.sync_timeout
        self.next_look = now + 1.0

    def is_over(self):
        """Sleep for a moment; is the deadline over? Raises RuntimeError as soon as an engine is gone."""
        time.sleep(0.0005)
        now = time.monotonic()
        if now > self.next_look:
            self.next_look = now + 1.0
            running = self.group.engines.registered()
            if any(member not in running for member in self.group.members):
                raise RuntimeError("an engine is gone")
        return now > self.deadline

"""Weight updates while sequences are being generated: the trainer's side. plumbing/engine.py has vLLM's.

    sender.push(version)     collective: the current weights are on their way; returns when they are copied
    sender.wait()            until the engines serve them

`push` gathers the parameters that are trained (`requires_grad`), on all ranks in one fixed order, into a
copy in rank 0's host memory. A thread of rank 0 does the rest, while training goes on:

  1. ring the doorbell (a key in the weight group's store) and broadcast the copy in flat buckets;
     every engine worker receives in a thread of its own while decoding goes on, then sets a ready key;
  2. POST /request_weight_update to every engine: pause (requests are kept), swap, stamp, resume, all
     inside the engine: its only pause, which the trainer's death cannot prolong;
  3. announce in queues/version.json which engines serve the version.

Engines come and go: each one that answers has a file in out/<run>/engines. Whoever is healthy and not
in the group is admitted, with the newest weights, before the next update or while nothing is to be
sent; whoever fails is dropped. The group (gloo, or NCCL between GPUs) is formed anew each time.

Every wait has the deadline `sync_timeout`. Deliberately absent: restarting engines.
"""

import threading
import time
from pathlib import Path

import torch

from plumbing import lora
from plumbing.model import whole
from plumbing.queues import publish_json
from plumbing.transport import bucket_ranges, synchronize
from plumbing.weight_group import EngineRegistry, WeightGroup

TIMES = ("sync_s", "gather_s", "wait_sync_s", "send_s", "ready_s", "pause_s")


class Sender:
    """Sends the model's weights to all engines. Made and called on every trainer rank: rank 0 holds the
    copy of the weights and the thread that delivers it; on the others `push` only helps to gather.
    """

    def __init__(self, config, model, ranks, run_dir):
        self.config = config
        self.ranks = ranks
        self.version_file = Path(run_dir, "queues", "version.json")
        served = lora.served(model)
        self.parameters = list(served.values())
        self.dtype = getattr(torch, config.dtype)
        self.layout = dict(
            names=list(served),
            shapes=[list(tensors[0].shape) for _, tensors in self.parameters],
            dtype=config.dtype,
            bucket_bytes=config.bucket_mb << 20,
            whole=len(served) == len(list(model.parameters())),
        )
        self.ranges = bucket_ranges(self.layout)
        self.timing = dict.fromkeys(TIMES, 0.0)
        if ranks.rank != 0:
            return
        sizes = [elements for _, _, elements in self.ranges]
        memory = dict(dtype=self.dtype, pin_memory=ranks.device.type == "cuda")
        self.buckets = [torch.empty(n, **memory) for n in sizes]
        self.engines = EngineRegistry(config, run_dir)
        self.group = None
        # who took part in the last delivery, well or not
        self.tried = []
        # what queues/version.json says, under its lock
        self.status = dict(version=-1)
        self.status_lock = threading.Lock()
        # of `buckets` and what is known of them: held from `push` until the weights are delivered, or
        # while an engine is admitted
        self.lock = threading.Lock()
        self.version = None
        self.pushed = threading.Event()
        self.closed = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._deliver_all, daemon=True)
        self.thread.start()

    # ---- what train.py calls

    @torch.no_grad()
    def push(self, version):
        """Collective: copy the current weights, which become `version`; sending goes on by itself.

        Raises Stopped, on all ranks, if the run is told to stop while the update before hangs.
        """
        start = time.monotonic()
        self._acquire()
        self.ranks.check_stop()
        waited = time.monotonic() - start
        for k, (first, last, _) in enumerate(self.ranges):
            # the all-gathers, on every rank in this order
            gathered = [
                (function, [whole(x.to(self.dtype)) for x in tensors])
                for function, tensors in self.parameters[first:last]
            ]
            if self.ranks.rank == 0:
                flat = torch.cat([function(*tensors).reshape(-1) for function, tensors in gathered])
                self.buckets[k].copy_(flat, non_blocking=True)
        if self.ranks.rank != 0:
            return
        # the copies to host memory must have ended before the thread reads it
        synchronize(self.ranks.device)
        seconds = time.monotonic() - start
        self.push_times = dict(gather_s=seconds - waited, wait_sync_s=seconds)
        self.version = version
        self.pushed_at = start
        self.pushed.set()

    def _acquire(self):
        """Rank 0: take the lock as soon as nothing is on its way; is it taken? A stop ends the wait."""
        while self.ranks.rank == 0 and not self.ranks.stop.is_set():
            self.check()
            if self.lock.acquire(timeout=0.1):
                return True
        return False

    def wait(self):
        """Rank 0: until the engines serve what was pushed last, or a stop; raises what went wrong."""
        if self._acquire():
            self.lock.release()

    def check(self):
        """Raise what went wrong while weights were being delivered, if anything did."""
        if self.ranks.rank == 0 and self.error is not None:
            raise RuntimeError(f"weights: {self.error}") from self.error

    def take_timing(self):
        """Seconds of the newest update that is complete, told once, else zeros.

        sync_s: all of it; of it the trainer waited wait_sync_s, for the update before and for gathering
        (gather_s); send_s: the broadcast; ready_s: then until every worker had prepared it; pause_s:
        the longest time an engine did not decode.
        """
        taken = self.timing
        self.timing = dict.fromkeys(TIMES, 0.0)
        return taken

    def announce(self, version, done=False):
        """Tell the other stages where the trainer is, without sending weights."""
        if self.ranks.rank == 0:
            self._publish(version=version, done=done)

    def close(self):
        """Leave the engines as they are, and admit no more."""
        if self.ranks.rank == 0:
            self.closed.set()
            self.thread.join(self.config.sync_timeout)

    # ---- the thread of rank 0

    def _publish(self, **values):
        """Write queues/version.json: {version, engines that serve the trainer's weights, ...}."""
        with self.status_lock:
            if values["version"] < self.status["version"]:
                # the trainer is ahead of what has just been delivered
                values = dict(engines=values["engines"], served=values["served"])
            self.status |= values
            publish_json(self.version_file, **self.status)

    def _deliver_all(self):
        """Deliver what is pushed; in between, deliver it again when an engine wants to be admitted."""
        try:
            while not self.closed.is_set():
                if self.pushed.wait(1.0):
                    self.pushed.clear()
                    self.timing = self.push_times | self._deliver()
                    self.lock.release()
                elif self.version is not None and self.engines.newcomers(self.tried):
                    # unless there is something new
                    if self.lock.acquire(blocking=False):
                        self._deliver()
                        self.lock.release()
        except BaseException as e:
            self.error = e

    def _deliver(self):
        """The weights in `buckets` to all engines that are well, once more if some fail on the way.
        Returns the times of the update. Raises RuntimeError if no engine takes it.
        """
        self.engines.failing.clear()
        attempts = 3 + len(self.engines.listed())
        for _ in range(attempts):
            engines = self._healthy_engines()
            self.tried = [*engines, *self.engines.failing]
            try:
                self._form_group(engines)
                start = time.monotonic()
                self.group.ring(self.version)
                self.group.broadcast(self.buckets)
                sent = time.monotonic()
                self.group.wait_until_ready()
                ready = time.monotonic()
                pauses = self._swap()
                if pauses:
                    sync_s = time.monotonic() - self.pushed_at
                    times = dict(sync_s=sync_s, send_s=sent - start, ready_s=ready - sent)
                    return times | dict(pause_s=max(pauses))
            # torch's errors of a broken group or store are RuntimeErrors
            except (RuntimeError, TimeoutError) as e:
                self._leave_group()
                words = f"version {self.version} did not reach all engines: {str(e)[:300]}"
                print(f"weights: {words}", flush=True)
        words = f"version {self.version} reached no engine in {attempts} attempts"
        raise RuntimeError(f"{words}; {self.engines.error}")

    def _healthy_engines(self):
        """Whom the next group is to have: its members that still run, and newcomers; without those that
        failed in this delivery if there are others. Waits for one; TimeoutError if none comes.
        """
        members = self.group.members if self.group else []
        deadline = time.monotonic() + self.config.start_timeout
        while True:
            wanted = [*members, *self.engines.newcomers(members)]
            found = [e for e in self.engines.listed() if e in wanted]
            if found:
                return [e for e in found if e not in self.engines.failing] or found
            if time.monotonic() > deadline:
                words = f"none of {[e[0] for e in self.engines.listed()]} was healthy within"
                raise TimeoutError(f"{words} {self.config.start_timeout:.0f} s")
            time.sleep(0.2)

    def _form_group(self, engines):
        """A weight group of exactly these engines; the one that is there if it is that."""
        if self.group and self.group.members == engines:
            return
        self._leave_group()
        self.group = WeightGroup(self.config, self.engines, engines, self.layout, self.ranks.device)
        backend = self.config.weight_backend
        print(f"weights: {backend} group of the trainer and {len(engines)} engines", flush=True)

    def _leave_group(self):
        if self.group:
            self.group.close()
        self.group = None

    def _swap(self):
        """Ask all engines to swap; those that fail are dropped. Returns their pauses in seconds."""
        order = dict(version=self.version, recompute_kv=self.config.recompute_kv)
        orders = {member: order for member in self.group.members}
        answers = self.engines.call_all("/request_weight_update", orders)
        if len(answers) < len(self.group.members):
            # without those that were dropped
            self._leave_group()
        urls = [url for url, _ in answers]
        if urls:
            # else all go on with the weights they have, and are asked again
            version = self.version
            self._publish(version=version, served=version, engines=urls)
        return [answer["pause_s"] for answer in answers.values()]

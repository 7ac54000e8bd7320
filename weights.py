"""Weight updates while sequences are being generated: the trainer's side. plumbing/engine.py has vLLM's.

    sender.push(version)     collective: the current weights are on their way; returns when they are copied
    sender.wait()            until the engines serve them

`push` gathers the parameters, on all trainer ranks in one fixed order, into a copy of the weights in
rank 0's host memory. A thread of rank 0 does the rest, while training goes on:

  1. ring the doorbell (a key in the weight group's store) and broadcast the copy in flat buckets;
     every engine worker receives in a thread of its own while decoding goes on, then sets a ready key;
  2. POST /request_weight_update to every engine: pause (requests are kept), swap, stamp, resume, all
     inside the engine: its only pause, which the trainer's death cannot prolong;
  3. announce in queues/version.json which engines serve the version.

Engines come and go: each one that runs has a file in out/<run>/engines. Whoever is healthy and not
in the group is admitted, with the newest weights, before the next update or while nothing is to be
sent; whoever fails is dropped, and its launcher starts it again. The group is formed anew each time:
a torch.distributed group (gloo, or NCCL between GPUs) of the trainer and all engine workers.

Every wait has the deadline `sync_timeout`. The wire is a trusted network's. Deliberately absent:
restarting engines, which is their launcher's work.
"""

import threading
import time
from pathlib import Path

import torch

from plumbing.group import Engines, Group
from plumbing.queues import publish_json
from plumbing.transport import buckets

# in every so many updates checksums are sent along, and compared by every engine
VERIFY_EVERY = 10
TIMES = ("sync_s", "gather_s", "wait_sync_s", "send_s", "ready_s", "pause_s")


class Sender:
    """Sends the model's weights to all engines. Made and called on every trainer rank.

    ranks: plumbing.ranks.Ranks. Rank 0 holds the copy of the weights and the thread that delivers
    it; on the other ranks `push` only takes part in the gathering.
    """

    def __init__(self, config, model, ranks, run_dir):
        self.config = config
        self.ranks = ranks
        device = ranks.device
        self.version_file = Path(run_dir, "queues", "version.json")
        self.parameters = [p for _, p in model.named_parameters()]
        names = [n for n, _ in model.named_parameters()]
        shapes = [list(p.shape) for p in self.parameters]
        self.dtype = dtype = getattr(torch, config.dtype)
        bucket_bytes = config.bucket_mb << 20
        self.plan = buckets(shapes, dtype.itemsize, bucket_bytes)
        # of the update that is on its way, and of the newest that is complete
        self.timing = dict.fromkeys(TIMES, 0.0)
        self.complete = dict.fromkeys(TIMES, 0.0)
        if ranks.rank != 0:
            return
        self.layout = dict(
            names=names, shapes=shapes, dtype=config.dtype, bucket_bytes=bucket_bytes
        )
        on_gpu = device.type == "cuda"
        sizes = [n for _, _, n in self.plan]
        self.flats = [torch.empty(n, dtype=dtype, pin_memory=on_gpu) for n in sizes]
        self.staging = None
        if config.weight_backend == "nccl":
            self.staging = [torch.empty(max(sizes), dtype=dtype, device=device) for _ in range(2)]
        self.engines = Engines(config, run_dir)
        self.group = None
        # who took part in the last delivery, well or not: others want to be admitted
        self.tried = []
        self.deliveries = 0
        # what queues/version.json says, under its lock
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self.said = dict(
            version=-1, served=-1, engines=[], position={}, done=False, vocabulary=vocabulary
        )
        self.said_lock = threading.Lock()
        # the weights in `flats`, under their lock, and what is known of them
        self.flats_lock = threading.Lock()
        self.version = None
        self.position = {}
        self.pushed_at = 0.0
        self.pushed = threading.Event()
        self.delivered = threading.Event()
        self.delivered.set()
        self.closed = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self._deliver_all, daemon=True)
        self.thread.start()

    # ---- what train.py calls

    @torch.no_grad()
    def push(self, version, position):
        """Collective: copy the current weights, which become `version`; sending goes on by itself.

        position: which draws of the sampler are done with, announced together with the version.
        Raises Stopped, on all ranks, if the run is told to stop while the update before hangs.
        """
        start = time.monotonic()
        self.wait()
        self._lock_flats()
        self.ranks.check_stop()
        waited = time.monotonic() - start
        self._gather()
        if self.ranks.rank != 0:
            return
        now = time.monotonic()
        self.timing = dict.fromkeys(TIMES, 0.0)
        self.timing |= dict(gather_s=now - start - waited, wait_sync_s=now - start)
        self.version = version
        self.position = position
        self.pushed_at = start
        self.delivered.clear()
        self.pushed.set()
        self.flats_lock.release()

    def _gather(self):
        """The parameters into `flats`, bucket by bucket. Collective."""
        for k, (first, last, _) in enumerate(self.plan):
            offset = 0
            for p in self.parameters[first:last]:
                # the all-gather, on every rank in this order
                full = p.to(self.dtype)
                full = full.full_tensor() if hasattr(full, "full_tensor") else full
                if self.ranks.rank == 0:
                    into = self.flats[k][offset : offset + full.numel()]
                    into.copy_(full.reshape(-1), non_blocking=True)
                    offset += full.numel()
        if self.ranks.rank == 0:
            if self.flats[0].is_pinned():
                # the copies to host memory must have ended before the thread reads it
                torch.cuda.current_stream().synchronize()

    def _lock_flats(self):
        """Rank 0: take the lock, which the thread may hold to admit an engine; a stop ends this."""
        while self.ranks.rank == 0 and not self.flats_lock.acquire(timeout=0.1):
            self.check()
            if self.ranks.stop.is_set():
                return

    def wait(self):
        """Until the engines serve what was pushed last; raises what went wrong on the way.

        Rank 0, which a stop ends early; at once on the others.
        """
        while self.ranks.rank == 0 and not self.ranks.stop.is_set():
            self.check()
            if self.delivered.wait(0.1):
                return

    def check(self):
        """Raise what went wrong while weights were being delivered, if anything did."""
        if self.ranks.rank == 0 and self.error is not None:
            raise RuntimeError(f"weights: {self.error}") from self.error

    def take_timing(self):
        """Seconds of the newest update that is complete, told once, else zeros.

        sync_s: all of it; of it the trainer itself waited wait_sync_s, for the update before and for
        gathering (gather_s); send_s: the wire; ready_s: then until every worker had prepared it;
        pause_s: the longest time an engine did not decode.
        """
        taken = self.complete
        self.complete = dict.fromkeys(TIMES, 0.0)
        return taken

    def announce(self, version, position, done=False):
        """Tell the other stages where the trainer is, without sending weights."""
        if self.ranks.rank == 0:
            self._say(version=version, position=position, done=done)

    def close(self):
        """Leave the engines as they are, and admit no more."""
        if self.ranks.rank == 0:
            self.closed.set()
            self.thread.join(self.config.sync_timeout)

    # ---- the thread of rank 0

    def _say(self, **values):
        """Publish queues/version.json: {version, engines that serve the trainer's weights, ...}."""
        with self.said_lock:
            if values["version"] < self.said["version"]:
                # the trainer is ahead of what has just been delivered
                values = dict(engines=values["engines"], served=values["served"])
            self.said |= values
            publish_json(self.version_file, **self.said)

    def _deliver_all(self):
        """Deliver what is pushed; in between, deliver it again when an engine wants to be admitted."""
        try:
            while not self.closed.is_set():
                is_new = self.pushed.wait(1.0)
                admit = (
                    not is_new and self.version is not None and self.engines.newcomers(self.tried)
                )
                with self.flats_lock:
                    if self.pushed.is_set():
                        self.pushed.clear()
                        self.complete = self.timing | self._deliver()
                        self.delivered.set()
                    elif admit:
                        self._deliver()
        except BaseException as e:
            self.error = e

    def _willing(self):
        """All healthy engines; waits until there is one. TimeoutError if none comes.

        While all goes well: the members that still run, and newcomers. After a failure all are asked;
        those that failed in this delivery are left out if there are others.
        """
        if self.group:
            members = self.group.members
            wanted = [*members, *self.engines.newcomers(members)]
            found = [e for e in self.engines.registered() if e in wanted]
            if found:
                return found
        deadline = time.monotonic() + self.config.start_timeout
        while True:
            found = self.engines.healthy(self.engines.registered())
            if found:
                return [e for e in found if e not in self.engines.failing] or found
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"none of {self.engines.registered() or 'no engine'} was healthy within "
                    f"{self.config.start_timeout:.0f} s; {self.engines.error}"
                )
            time.sleep(0.2)

    def _deliver(self):
        """The weights in `flats` to all engines that are well, to others again if some fail on the
        way. Returns the times of the update. Raises RuntimeError if no engine takes it.
        """
        self.engines.failing.clear()
        attempts = 3 + len(self.engines.registered())
        for _ in range(attempts):
            engines = self._willing()
            try:
                self._form_group(engines)
                start = time.monotonic()
                # the first one of a group, and now and then
                verify = self.group.updates % VERIFY_EVERY == 0
                update = dict(version=str(self.version), verify=verify)
                self.group.broadcast(self.flats, update, self.staging)
                sent = time.monotonic()
                self.group.wait_until_ready()
                ready = time.monotonic()
                pauses = self._swap()
            # torch's errors of a broken group or store are RuntimeErrors
            except (RuntimeError, TimeoutError) as e:
                self._give_up_group(e)
                continue
            if pauses:
                self.deliveries += 1
                return dict(
                    sync_s=time.monotonic() - self.pushed_at,
                    send_s=sent - start,
                    ready_s=ready - sent,
                    pause_s=max(pauses),
                )
        raise RuntimeError(
            f"version {self.version} reached no engine in {attempts} attempts; {self.engines.error}"
        )

    def _form_group(self, engines):
        """A weight group of exactly these engines; the one that is there if it is that."""
        self.tried = [*engines, *self.engines.failing]
        if self.group and self.group.members == engines:
            return
        self._leave_group()
        self.group = Group(self.config, self.engines, engines, self.layout, self.ranks.device)
        kv = "recomputed" if self.config.recompute_kv else "stale"
        through = ""
        if self.config.weight_backend == "gloo" and torch.cuda.is_available():
            through = ", through host memory: NCCL refuses two ranks on one GPU"
        print(
            f"weights: {self.config.weight_backend} group of {self.group.world} (trainer + "
            f"{len(engines)} engines{through}), in-flight updates with {kv} KV cache",
            flush=True,
        )

    def _leave_group(self):
        if self.group:
            self.group.close()
        self.group = None

    def _give_up_group(self, error):
        self._leave_group()
        # without gloo's source line
        reason = (str(error).splitlines() or [type(error).__name__])[0].split("] ", 1)[-1]
        print(f"weights: version {self.version} did not reach all engines: {reason}", flush=True)

    def _swap(self):
        """Ask all engines to swap; those that fail are dropped. Returns their pauses in seconds."""
        order = dict(version=self.version, recompute_kv=self.config.recompute_kv)
        bodies = {member: order for member in self.group.members}
        answers = self.engines.call_all("/request_weight_update", bodies)
        if len(answers) < len(bodies):
            # without those that were dropped
            self._leave_group()
        urls = [url for url, _ in answers]
        if urls:
            # else all go on with the weights they have, and are asked again
            self._say(
                version=self.version,
                served=self.version,
                engines=urls,
                position=self.position,
            )
        return [answer["pause_s"] for answer in answers.values()]

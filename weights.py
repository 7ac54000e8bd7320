"""Weight updates while sequences are being generated: the trainer's side.

plumbing/engine.py is the other side, inside vLLM.

    sender.push(version)     collective: copies the current weights; they are then on their way
    sender.wait()            returns when the engines serve them

The engines and the trainer form a *weight group*, a process group of torch.distributed with a store
of keys. `push` gathers the parameters that are trained (with LoRA: the matrices that adapters are
merged into), on all ranks in one fixed order, into a copy in rank 0's host memory. A thread of rank
0 does the rest, while training goes on:

  1. It sets a key in the store, on which the engines wait, and broadcasts the copy in flat buckets.
     Every engine worker receives in a thread of its own while decoding goes on, and then
     sets a ready key.
  2. It sends POST /request_weight_update to every engine, which pauses (requests are kept), swaps
     the weights, stamps their version and resumes. This is the engine's only pause. All of it
     happens inside the engine, so that the trainer's death cannot prolong it.
  3. It announces in queues/version.json which engines serve the version.

Engines come and go: each one that answers has a file in out/<run>/engines. A healthy engine that is
not in the weight group is admitted, with the newest weights, before the next update or while
nothing is to be sent. An engine that fails is dropped. After every such change the group
(gloo, or NCCL between GPUs) is formed anew.

Every wait for a part of an update has the deadline `sync_timeout`. The wait for an engine, when
there is none, lasts as long as the launcher may take to start one. Deliberately absent: starting
engines.
"""

import threading
import time
from pathlib import Path

import torch
from transformers.core_model_loading import revert_weight_conversion

from plumbing import lora
from plumbing.model import whole
from plumbing.patience import longest_start
from plumbing.queues import publish_json
from plumbing.transport import (
    bucket_bytes,
    bucket_ranges,
    named_views,
    padded_bytes,
    synchronize,
)
from plumbing.weight_group import EngineRegistry, WeightGroup, WrongWeights

TIMES = ("sync_s", "gather_s", "wait_sync_s", "send_s", "ready_s", "pause_s")


class SentParameter:
    """One parameter of the trainer's model, as it is sent.

    A checkpoint on disk may hold it in several pieces with names of their own; these pieces are
    sent. Its value is function(*tensors): the tensor itself, or a base matrix with its adapters
    merged. Vectors travel in float32, whatever the compute dtype: engines keep some of them in
    float32 (the decay of Mamba), and they are few.
    """

    def __init__(self, name, function, tensors, config):
        self.name = name
        self.function = function
        self.tensors = tensors
        self.dtype = config.dtype if tensors[0].dim() > 1 else "float32"
        self.size = padded_bytes(tensors[0].shape, self.dtype)
        # True if a checkpoint holds it under this name, in this shape; checkpoint_tensors sets it
        self.is_same_in_checkpoint = False

    def checkpoint_tensors(self, model):
        """[(name, shape, name of the dtype)] of the tensors on disk that it is made of."""
        tensor = torch.empty(self.tensors[0].shape, device="meta")
        saved = revert_weight_conversion(model, {self.name: tensor})
        self.is_same_in_checkpoint = {name: x.shape for name, x in saved.items()} == {
            self.name: tensor.shape
        }
        return [(name, list(x.shape), self.dtype) for name, x in saved.items()]

    def gather(self):
        """The arguments of `function`, with the shards of all ranks put together. Collective."""
        return [whole(x.to(getattr(torch, self.dtype))) for x in self.tensors]

    def checkpoint_values(self, model, tensors):
        """The values of the tensors on disk, from what `gather` returned."""
        value = self.function(*tensors)
        if self.is_same_in_checkpoint:
            return [value]
        return list(revert_weight_conversion(model, {self.name: value}).values())


class Sender:
    """Sends the model's weights to all engines.

    It is made and called on every trainer rank. Rank 0 holds the copy of the weights and the thread
    that delivers it; on the other ranks `push` only helps to gather.
    """

    def __init__(self, config, model, ranks, run_dir):
        self.config = config
        self.ranks = ranks
        self.version_file = Path(run_dir, "queues", "version.json")
        self.parameters = [
            SentParameter(name, *x, config) for name, x in lora.served(model).items()
        ]
        sizes = [parameter.size for parameter in self.parameters]
        self.ranges = bucket_ranges(sizes, config.bucket_mb << 20)
        self.timing = dict.fromkeys(TIMES, 0.0)
        if ranks.rank != 0:
            return
        sends_all = len(self.parameters) == len(list(model.parameters()))
        self.layout = {"buckets": [], "whole": sends_all}
        for first, last in self.ranges:
            parameters = self.parameters[first:last]
            tensors = [tensor for p in parameters for tensor in p.checkpoint_tensors(model)]
            self.layout["buckets"].append(tensors)
        self.model = model
        pinned = ranks.device.type == "cuda"
        self.buckets = [
            torch.empty(bucket_bytes(tensors), dtype=torch.uint8, pin_memory=pinned)
            for tensors in self.layout["buckets"]
        ]
        self.engines = EngineRegistry(config, run_dir)
        self.group = None
        # the engines that the last delivery tried to reach, whether they failed or not
        self.tried = []
        # the content of queues/version.json; status_lock guards both
        self.status = dict(version=-1)
        self.status_lock = threading.Lock()
        # This lock guards `buckets` and `version`. It is held from `push` until the weights are
        # delivered, and while an engine is admitted.
        self.delivery = threading.Lock()
        self.version = None
        self.pushed = threading.Event()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._deliver_all, daemon=True)
        self.thread.start()

    # ---- what train.py calls

    @torch.no_grad()
    def push(self, version):
        """Copy the current weights, which become `version`; a thread then sends them. Collective.

        It first waits until the update before is delivered. Raises Stopped, on all ranks, if the
        run is to stop.
        """
        start = time.monotonic()
        # Held until the thread has delivered what is copied here.
        self._acquire_delivery()
        waited = time.monotonic() - start
        for k, (first, last) in enumerate(self.ranges):
            # Every rank must do these all-gathers in the same order.
            gathered = [parameter.gather() for parameter in self.parameters[first:last]]
            if self.ranks.rank == 0:
                values = []
                for parameter, tensors in zip(self.parameters[first:last], gathered):
                    values += parameter.checkpoint_values(self.model, tensors)
                views = named_views(self.layout["buckets"][k], self.buckets[k])
                for (_, view), value in zip(views, values, strict=True):
                    view.copy_(value, non_blocking=True)
        if self.ranks.rank != 0:
            return
        # The copies to host memory must have ended before the thread reads it.
        synchronize(self.ranks.device)
        seconds = time.monotonic() - start
        self.push_times = dict(gather_s=seconds - waited, wait_sync_s=seconds)
        self.version = version
        self.pushed_at = start
        self.pushed.set()

    def _acquire_delivery(self):
        """Wait until the last push is delivered; rank 0 takes the lock `delivery`. Collective.

        After `push` the thread releases the lock (`_deliver_all`), after `wait` the caller does.
        Raises Stopped, on all ranks, if the run is to stop.
        """
        is_taken = False
        while not self.ranks.check_stop(is_taken):
            if self.ranks.rank == 0:
                is_taken = self.delivery.acquire(timeout=0.5)

    def wait(self):
        """Wait until the engines serve what was pushed last. Collective.

        Raises Stopped, on all ranks, if the run is to stop: a delivery that fails stops it.
        """
        self._acquire_delivery()
        if self.ranks.rank == 0:
            self.delivery.release()

    def take_timing(self):
        """The seconds that the newest complete update took; zeros if they were taken before.

        sync_s       the whole update
        wait_sync_s  the part in which the trainer waited: for the update before, and to gather
        gather_s     the part in which the parameters were gathered
        send_s       the broadcast
        ready_s      the time from then on until every worker had prepared the weights
        pause_s      the longest time that an engine did not decode
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
        """Update queues/version.json: {version, served, engines, done}.

        version: that of the trainer. served: the version that engines serve. engines: the URLs of
        these engines. done: True once the run has made its last step.
        """
        with self.status_lock:
            # The trainer may be ahead of the version that has just been delivered.
            values["version"] = max(values["version"], self.status["version"])
            self.status |= values
            publish_json(self.version_file, **self.status)

    def _deliver_all(self):
        """Deliver every push; in between, deliver the last one again to admit a new engine."""
        try:
            while not self.closed.is_set():
                if self.pushed.wait(1.0):
                    self.pushed.clear()
                    self.timing = self.push_times | self._deliver()
                    self.delivery.release()
                elif self.version is not None and self._engines_to_admit():
                    # If the lock is taken, a push comes next, which admits the engine as well.
                    if self.delivery.acquire(blocking=False):
                        self._deliver()
                        self.delivery.release()
        except BaseException as e:
            self.ranks.fail(RuntimeError(f"weights: {type(e).__name__}: {e}"))

    def _engines_to_admit(self):
        """The engines that the last delivery did not try, or that are due to be tried again."""
        due = self.engines.due_again()
        return self.engines.newcomers([engine for engine in self.tried if engine not in due])

    def _deliver(self):
        """Deliver the weights in `buckets` to all healthy engines.

        If an engine fails before the swap, the delivery begins again without it.

        Returns the times of the update. Raises RuntimeError if it reaches no engine.
        """
        self.engines.begin()
        tries = 3 + len(self.engines.listed())
        for _ in range(tries):
            engines = self._healthy_engines()
            self.tried = [*engines, *self.engines.failing]
            try:
                self._form_group(engines)
                start = time.monotonic()
                sent = self.group.send(self.version, self.buckets)
                ready = time.monotonic()
                pauses = self._swap()
                if pauses:
                    return dict(
                        sync_s=time.monotonic() - self.pushed_at,
                        send_s=sent - start,
                        ready_s=ready - sent,
                        pause_s=max(pauses),
                    )
            except WrongWeights:
                raise
            # torch raises RuntimeError when a group or store is broken.
            except (RuntimeError, TimeoutError) as e:
                self._leave_group()
                print(
                    f"weights: version {self.version} did not reach all engines, and is sent again "
                    f"to those that are left: {str(e)[:300]}",
                    flush=True,
                )
        raise RuntimeError(
            f"version {self.version} reached no engine in {tries} tries "
            f"({self.engines.error or 'no engine was dropped'}): see logs/engine*.log; if the "
            "engines are only slow, raise --sync_timeout"
        )

    def _healthy_engines(self):
        """The engines for the next delivery: members of the present group that still run, and
        newcomers.

        Engines that failed (EngineRegistry.failing) are left out if there are others. Waits until
        there is an engine; raises TimeoutError if none comes in time.
        """
        members = self.group.members if self.group else []
        limit = longest_start(self.config)
        start = time.monotonic()
        is_said = False
        while True:
            listed = self.engines.listed()
            # The engines that failed are asked last, as they may not even answer this question.
            for left_out in (self.engines.failing, set()):
                wanted = [*members, *self.engines.newcomers([*members, *left_out])]
                healthy = [x for x in listed if x in wanted and x not in left_out]
                if healthy:
                    return healthy
            if time.monotonic() > start + limit:
                raise TimeoutError(
                    f"no engine was healthy within {limit:.0f} s; listed are "
                    f"{[url for url, _ in listed]}: see logs/engine*.log"
                )
            if self.tried and not is_said:
                is_said = True
                print("weights: waiting for an engine: none is healthy", flush=True)
            time.sleep(0.2)

    def _form_group(self, engines):
        """Form a weight group of exactly these engines, unless the present group is that one."""
        if self.group and self.group.members == engines:
            return
        self._leave_group()
        # At version 0 the engines have loaded the same weights from disk. The first two updates of
        # such a group prove that an update reaches every tensor (Receiver in plumbing/engine.py):
        # the first one is sent below, the second one by `_deliver`.
        self.group = WeightGroup(
            self.config,
            self.engines,
            engines,
            self.layout,
            self.ranks.device,
            as_loaded=self.version == 0,
        )
        if self.version == 0:
            self.group.send(self.version, self.buckets)
        print(
            f"weights: the trainer and {len(engines)} engine(s) have formed a group for updates "
            f"({self.config.weight_backend})",
            flush=True,
        )

    def _leave_group(self):
        if self.group:
            self.group.close()
        self.group = None

    def _swap(self):
        """Ask all engines to swap; drop those that fail. Returns the others' pauses in seconds."""
        order = dict(version=self.version, recompute_kv=self.config.recompute_kv)
        orders = {member: order for member in self.group.members}
        answers = self.engines.call_all("/request_weight_update", orders)
        if len(answers) < len(self.group.members):
            # The next group is formed without the engines that were dropped.
            self._leave_group()
        for engine in answers:
            self.engines.succeeded(engine)
        urls = [url for url, _ in answers]
        # If no engine answered, all go on with the weights they have, and are asked again.
        if urls:
            version = self.version
            self._publish(version=version, served=version, engines=urls)
        return [answer["pause_s"] for answer in answers.values()]

"""Weight updates while sequences are being generated: the trainer's side. engine.py has vLLM's.

One torch.distributed group joins trainer rank 0 and every engine worker (gloo, or NCCL between GPUs). An update v -> v+1:

  1. POST /arm to every engine: a background thread of each worker starts receiving (during the trainer's last backward pass);
  2. all trainer ranks gather the parameters in one fixed order, rank 0 broadcasts them in flat buckets, one on its way while
     the next is filled; decoding goes on, while each worker also packs what it received, then says so in the group's store;
  3. POST /swap: pause (requests are kept), exchange, stamp version v+1, resume, all inside the server: the engines' only pause
     (during the trainer's next forward pass), which the trainer's death cannot prolong.

Failures: an engine that fails, hangs or dies is dropped from the group, which is formed anew with the others, and the update is
sent again. Before every update all engines are asked for their health, and whoever is well again joins. An engine loads only
what it received whole, so it serves the old version or the new one. Every wait has the deadline `sync_timeout`.
The wire is a trusted network's.
"""
import contextlib
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import requests
import torch
import torch.distributed as dist


def join_group(backend, host, port, rank, world, timeout, store=None):
    """A process group of its own, beside whatever default group this process has. Returns (group, store)."""
    limit = timedelta(seconds=timeout)
    store = store or dist.TCPStore(host, port, world, False, timeout=limit)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), rank, world, options), store
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, limit), store


def buckets(shapes, itemsize, bucket_bytes):
    """Cut the parameters, in order, into buckets of at most bucket_bytes (a larger parameter gets its own).

    shapes: list of shapes -> list of (first index, last index + 1, elements). Both sides compute it from the same list.
    """
    plan, first, elements = [], 0, 0
    for i, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        if elements and (elements + n) * itemsize > bucket_bytes:
            plan.append((first, i, elements))
            first, elements = i, 0
        elements += n
    return plan + [(first, len(shapes), elements)]


def checksum(flat):
    """A number that depends on every bit of a tensor and on its place: int64, modulo 2^64."""
    bits = flat.view(torch.int16)  # two or four bytes an element
    place = torch.arange(min(len(bits), 1 << 20), device=bits.device) * 2 + 1
    return sum((2 * i + 1) * (part.long() * place[:len(part)]).sum() for i, part in enumerate(bits.split(1 << 20)))


def settle(device, late, what):
    """Wait until the current stream of a GPU has done its work; raises TimeoutError once late() says so."""
    while device.type == "cuda" and not torch.cuda.current_stream(device).query():
        if late():
            raise TimeoutError(f"weights: {what} has not ended by its deadline")
        time.sleep(0.001)


def in_thread(function, *args):
    """Call it in a daemon thread of its own; returns a Future."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as e:
            future.set_exception(e)
    threading.Thread(target=run, daemon=True).start()
    return future


# ------------------------------------------------------------------------------------------------ the trainer's side

NO_UPDATE = {"sync_s": 0.0, "arm_s": 0.0, "gather_s": 0.0, "send_s": 0.0, "wait_s": 0.0, "pause_s": 0.0}


class EngineError(RuntimeError):
    """An engine did not do what an update needs of it: it refused, or it is `gone`; `hung` if it does not answer at all."""

    def __init__(self, message, gone=False, hung=False):
        super().__init__(message)
        self.gone, self.hung = gone, hung


class Sender:
    """Sends the model's weights to all engines. Made and called on every trainer rank; rank 0 talks to the engines.

    `members` are the engines that take part at present. queues: the run's queue directory, where a file kill_engine<i> asks
    run.sh to replace an engine that hangs; None for nobody to ask.
    """

    def __init__(self, config, model, rank, device, queues=None):
        self.config, self.model, self.rank, self.queues = config, model, rank, queues
        self.dtype = getattr(torch, config.dtype)
        self.device = device if config.weight_backend == "nccl" else torch.device("cpu")  # gloo goes through host memory
        self.urls = list(config.urls)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.members, self.group, self.buffers, self.updates, self.error = [], None, [], 0, ""
        self.armed = self.swapped = self.version = None
        self.wire, self.silent, self.refused = {}, {url: 0 for url in self.urls}, False
        self.times, self.last = {}, NO_UPDATE
        self.limit = math.inf  # time.monotonic() after which nobody is waited for any more
        self.ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * max(config.stall_timeout, config.start_timeout))) if dist.is_initialized() and dist.get_world_size() > 1 else None
        if rank == 0:
            self.pool = ThreadPoolExecutor(len(self.urls))  # one call per engine at a time
            self.control = ThreadPoolExecutor(1)  # the order of calls: arm, swap, arm, swap, ...
            self.http = {url: requests.Session() for url in self.urls}
            if missing := set(self.urls) - set(self._healthy(config.start_timeout, everyone=True)):
                raise TimeoutError(f"weights: {', '.join(sorted(missing))} not healthy within {config.start_timeout:.0f} s")

    # ---- talking to engines

    def _call(self, url, path, body=None):
        """POST `body` (or GET, without one) and return the JSON answer; raises EngineError naming the call and the answer."""
        timeout = self.config.sync_timeout
        try:
            answer = self.http[url].request("GET" if body is None else "POST", url + path, json=body, timeout=timeout, headers={"x-run-id": self.config.run_id})
        except requests.RequestException as e:
            raise EngineError(f"{path} not answered within {timeout:.0f} s ({type(e).__name__})", gone=True, hung=isinstance(e, requests.Timeout)) from None
        if answer.status_code != 200:
            raise EngineError(f"{path} refused: {answer.status_code} {answer.text[:500]}")
        return answer.json()

    def _each(self, urls, call):
        """{url: call(url)} for all urls at once; those that raise are dropped, with a line that says why."""
        answers = {}
        for url, future in [(url, self.pool.submit(call, url)) for url in urls]:
            try:
                answers[url] = future.result()
            except EngineError as e:
                self.error = f"engine {url}: {e}"
                print(f"weights: dropped {self.error}", flush=True)
                if url in self.members:
                    self.members.remove(url)
                self.refused |= not e.gone
                if e.hung:
                    self._replace(url)
        return answers

    def _replace(self, url):
        """Ask run.sh to kill an engine that hangs, and to start it again."""
        if self.queues:
            Path(self.queues, f"kill_engine{self.urls.index(url)}").touch()

    def _healthy(self, timeout, everyone=False):
        """Engines that are well; waits up to `timeout` s until there is one (or until all are)."""
        def well(url):
            try:
                ok, self.silent[url] = self.http[url].get(url + "/health", timeout=min(10.0, self.config.sync_timeout)).ok, 0
                return ok
            except requests.RequestException as e:
                self.silent[url] += isinstance(e, requests.Timeout)
                if self.silent[url] == 3:  # in a row
                    self.silent[url] = 0
                    self._replace(url)
                return False
        deadline = time.monotonic() + timeout
        while True:
            urls = [url for url, ok in zip(self.urls, self.pool.map(well, self.urls)) if ok]
            if len(urls) >= (len(self.urls) if everyone else 1) or time.monotonic() > deadline:
                return urls
            time.sleep(0.2)

    def _arm(self, version):
        """Get every healthy engine ready to receive `version`; returns what they were told. The group is formed anew when there is none,
        or when other engines than its members are healthy: those that came back, or went.
        """
        c = self.config
        self.updates += 1
        named = [(n, list(p.shape)) for n, p in self.model.named_parameters()]
        info = dict(names=[n for n, _ in named], shapes=[s for _, s in named], dtype=c.dtype, bucket_bytes=c.bucket_mb << 20,
                    verify=bool(c.verify_weights) and self.updates % c.verify_weights == 0, background=c.background_receive,
                    key=f"ready/{self.updates}")
        failed = set()  # in this update: they are left out of it, unless nobody else is there
        for _ in range(2 + 2 * len(self.urls)):
            healthy = self._healthy(c.start_timeout)  # if all are dead: until one has been started again
            if not healthy:
                raise TimeoutError(f"weights: none of {', '.join(self.urls)} was healthy within {c.start_timeout:.0f} s; {self.error}")
            willing = [url for url in healthy if url not in failed] or healthy
            if form := self.group is None or not willing == self.members == list(self.wire):
                self.group, self.members = None, []
                sizes = self._each(willing, lambda url: self._call(url, "/get_world_size")["world_size"])
                willing, world = list(sizes), 1 + sum(sizes.values())
                self.store = dist.TCPStore(c.host, 0, world, True, timeout=timedelta(seconds=c.sync_timeout), wait_for_workers=False)
                self.wire = {url: dict(backend=c.weight_backend, host=c.host, port=self.store.port, world=world, timeout=c.sync_timeout,
                                       first_rank=1 + sum(list(sizes.values())[:i])) for i, url in enumerate(willing)}
            arm = lambda url: self._call(url, "/arm", dict(version=str(version), serving=None if form else self.version, update_info=info | {"wire": self.wire[url]}))
            armed = list(self._each(willing, arm)) if c.background_receive else willing  # without: /swap will do it all
            if willing and armed == willing:
                self.members = willing
                return info
            failed |= set(willing) - set(armed) if form else set()  # one that was started again is in no group: form one with it
            self.group = None
        raise RuntimeError(f"weights: no engine takes an update; {self.error}")

    def _join(self):
        """The trainer's side of a new group, with the engines that were just told to join. Returns what went wrong, or None."""
        wire = next(iter(self.wire.values()))
        try:
            self.group, _ = join_group(wire["backend"], wire["host"], wire["port"], 0, wire["world"], wire["timeout"], self.store)
        except (RuntimeError, TimeoutError) as e:
            return f"the group of {wire['world']} did not form: {str(e).splitlines()[0]}"
        through = ", through host memory: NCCL refuses two ranks on one GPU" if wire["backend"] == "gloo" and torch.cuda.is_available() else ""
        print(f"weights: {wire['backend']} group of {wire['world']} (trainer + {len(self.members)} of {len(self.urls)} engines{through}), "
              f"in-flight updates with {'recomputed' if self.config.recompute_kv else 'stale'} KV cache", flush=True)

    # ---- an update

    def hurry(self):
        """This process is told to stop: an update in progress gets 5 s more, then it is given up, so that what was trained can be saved."""
        self.limit = min(self.limit, time.monotonic() + 5)

    def _done(self, future):
        """Wait for a future; False if `limit` came first."""
        while time.monotonic() < self.limit:
            if wait([future], 0.1).done:
                return True
        return False

    def prepare(self, version):
        """Tell the engines, in the background, to get ready to receive `version`; call it a little before `send`."""
        if self.rank == 0:
            self.armed = self.control.submit(self._arm, version)

    @torch.no_grad()
    def send(self, version, done):
        """Collective: broadcast the current weights. Returns when they are sent; the swap goes on in the background, and
        `done(engines)` is called (in its thread) as soon as the engines left serve `version`. `wait` joins it. After `hurry` it may do nothing.
        """
        start = time.time()
        for _ in range(3):
            ready = self.rank != 0 or self._done(self.armed)
            if not self.agree(ready):  # the others wait here, not in an all-gather, which has a shorter deadline
                return
            info = self.armed.result() if self.rank == 0 else None
            armed = time.time()
            swap = (lambda: self._swap(version, info, start, done)) if self.rank == 0 else None
            if self.rank == 0 and not info["background"]:
                self.swapped = self.control.submit(swap)
            error, gather_s = self._broadcast(info)
            self.times = dict(arm_s=armed - start, gather_s=gather_s, send_s=time.time() - armed - gather_s)
            if self.agree(error is None):
                break
            if self.rank == 0:
                print(f"weights: version {version} did not reach all engines ({error}); sending it again", flush=True)
                self.group, self.armed = None, self.control.submit(self._arm, version)
        else:
            raise RuntimeError(f"weights: version {version} did not reach the engines in three attempts")
        if self.rank == 0 and info["background"]:
            self.swapped = self.control.submit(swap)

    def _broadcast(self, info):
        """Gather all parameters once, in order, and broadcast them (rank 0). Returns (what went wrong or None, seconds of gathering).

        Two buckets are in use at a time: one on its way, one being filled. On a GPU all of it has a stream of its own.
        """
        c, gather_s, deadline = self.config, 0.0, time.monotonic() + self.config.sync_timeout
        late = lambda: time.monotonic() > min(deadline, self.limit)
        error = self._join() if self.rank == 0 and self.group is None else None
        parameters = [p for _, p in self.model.named_parameters()]
        plan = buckets([p.shape for p in parameters], self.dtype.itemsize, c.bucket_mb << 20)
        largest = max(n for _, _, n in plan)
        if self.rank == 0 and (len(self.buffers) != len(plan[:2]) or self.buffers[0].numel() != largest):
            self.buffers = [torch.empty(largest, dtype=self.dtype, device=self.device) for _ in plan[:2]]
        works, sums = [], []
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # no stream, no effect

            def ended(work):
                nonlocal error
                try:
                    while error is None and self.device.type == "cpu" and not work.is_completed() and not late():
                        time.sleep(0.0005)  # gloo's own wait would not hear a signal
                    error is None and work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01) if not late() else 0.01))
                except RuntimeError as e:
                    error = str(e).splitlines()[0].split("] ", 1)[-1]  # without gloo's source line
            for k, (first, last, elements) in enumerate(plan):
                if k >= 2 and self.rank == 0:
                    ended(works[k - 2])
                before, offset = time.time(), 0
                flat = self.buffers[k % 2][:elements] if self.rank == 0 else None
                for p in parameters[first:last]:
                    full = p.full_tensor() if hasattr(p, "full_tensor") else p  # the all-gather, on every rank in this order
                    if self.rank == 0:
                        flat[offset:offset + full.numel()].copy_(full.reshape(-1))
                        offset += full.numel()
                gather_s += time.time() - before
                if self.rank == 0:
                    try:
                        works.append(None if error else self._send_bucket(flat, k))
                    except RuntimeError as e:
                        error = str(e).splitlines()[0]
                        works.append(None)
                    sums += [checksum(flat)] if info["verify"] else []
            if self.rank == 0:
                works += [self.group.broadcast(torch.stack(sums), 0)] if sums and not error else []
                for work in works[-3:]:
                    ended(work)
                try:
                    settle(self.device, late, "the broadcast")
                except TimeoutError as e:
                    error = str(e)
        return error, gather_s

    def _send_bucket(self, flat, k):
        return self.group.broadcast(flat, 0)

    def agree(self, answer):
        """Rank 0's small whole number, on every rank. Through gloo, so that no GPU is waited for."""
        if self.ranks:
            flag = torch.tensor([float(answer)])
            dist.broadcast(flag, 0, self.ranks)
            return int(flag.item())
        return answer

    def _swap(self, version, info, start, done):
        """The new weights into the engines; those that fail are dropped. Returns the update's times."""
        def swap(url):
            whole = None if info["background"] else info | {"wire": self.wire[url]}
            answer = self._call(url, "/swap", dict(version=str(version), clear_cache=self.config.recompute_kv, update_info=whole))
            if answer["version"] != str(version):
                raise EngineError(f"serves version {answer['version']} after /swap to {version}")
            return answer["pause_s"]
        sent = time.time()
        with contextlib.suppress(dist.DistStoreError):  # whoever is not ready by the deadline is found out by /swap
            info["background"] and self.store.wait([f"{info['key']}/{rank}" for rank in range(1, self.group.size())], timedelta(seconds=self.config.sync_timeout))
        ready = time.time()
        self.refused = False
        pauses = self._each(list(self.members), swap)
        if not pauses and self.refused:
            raise RuntimeError(f"weights: no engine took version {version}; {self.error}")
        self.version = str(version)
        done(list(pauses))  # of none, if all are dead: `missing` will tell when one is back
        return dict(sync_s=time.time() - start, wait_s=ready - sent, pause_s=max(pauses.values(), default=0.0))

    def missing(self):
        """Rank 0: is there an engine that is well, but serves other weights than those sent last, having been started again, say?"""
        def lacks(url):
            try:
                return self._call(url, "/weight_info")["weight_version"] != self.version
            except EngineError as e:
                if e.hung:
                    self._replace(url)
                return False
        self.failed()
        return (self.swapped is None or self.swapped.done()) and any(self.pool.map(lacks, self._healthy(0)))

    def failed(self):
        """Raise what went wrong in the background, if anything did."""
        for future in (self.armed, self.swapped):
            if future and future.done():
                future.result()

    def wait(self):
        """Wait until the last update is in the engines (after `hurry`, not for ever)."""
        if self.swapped and self._done(self.swapped):
            self.last, self.swapped = self.times | self.swapped.result(), None

    def timing(self):
        """Seconds of the last update, told once (zeros if there was none since). sync_s: from `send` to the last engine's resuming, all of
        it; of it the trainer waited arm_s for the engines to be ready, gather_s for all-gathers and copies, send_s for the wire;
        wait_s: then until every worker had it all and had packed it; pause_s: the longest time an engine did not decode, as measured there."""
        self.wait()
        last, self.last = self.last, NO_UPDATE
        return last

"""What both sides of a weight update share: the group they meet in, the buckets, the checksums.

weights.py is the trainer's side, plumbing/engine.py the engines'. Deliberately absent: HTTP, vLLM.
"""

import functools
import os
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


def open_store(host, port, timeout, server=False):
    """A client of the TCPStore at host:port. server=True: of a new one there (port 0: on any port).

    Raises OSError if a new one cannot listen.
    """
    listener = None
    if server:
        # by itself torch would listen on all addresses of the machine
        with socket.create_server((host, port)) as s:
            port = s.getsockname()[1]
            listener = s.detach()
    return dist.TCPStore(
        host,
        port,
        None,
        server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


@functools.cache
def weight_stream(device):
    """The one stream of weight updates on a GPU; None on the CPU.

    Streams come from a pool: one made for each update would now and then be that on which the model
    decodes, whose all-reduces would then wait for a broadcast. Nobody else here has a priority.
    """
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority=-1)


def join_group(backend, store, rank, world, timeout, device=None):
    """A process group of its own, beside whatever default group this process has.

    Rank 0 is the trainer, the others are engine workers. device: a GPU, for NCCL. Raises
    RuntimeError or TimeoutError if they are not connected within `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    place = dist.PrefixStore("weights", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(place, rank, world, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # it runs beside an engine's own all-reduces, and must leave them room
    options.is_high_priority_stream = True
    options.config.max_ctas = 8
    # torch's watchdog ends the process, not just the group, when a broadcast fails; a group that is
    # made with this setting has none: its waits raise, and whoever waited aborts it
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        group = dist.ProcessGroupNCCL(place, rank, world, options)
    finally:
        os.environ.pop(NO_WATCHDOG)
        if before is not None:
            os.environ[NO_WATCHDOG] = before
    # the first broadcast connects, without a deadline of its own
    connected = in_thread(connect, group, device, limit)
    try:
        connected.result(timeout)
    except BaseException:
        # which may wait for the same as connecting does
        in_thread(leave_group, group)
        raise
    return group


def connect(group, device, limit):
    """The first broadcast of an NCCL group."""
    with torch.cuda.stream(weight_stream(device)):
        group.broadcast(torch.zeros(1, device=device), 0).wait(limit)


def leave_group(group):
    """Free whoever waits in a group that is not used any more; gloo's end by themselves."""
    if not dist.is_nccl_available() or not isinstance(group, dist.ProcessGroupNCCL):
        return
    try:
        group.abort()
    except RuntimeError as e:
        print(f"weights: a group that is given up says: {e}", flush=True)


def buckets(shapes, itemsize, bucket_bytes):
    """Cut the parameters, in order, into buckets of at most bucket_bytes (a larger one gets its own).

    shapes: list of shapes -> list of (first index, last index + 1, elements). Both sides compute it
    from the same list.
    """
    plan = []
    first = 0
    elements = 0
    for i, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        if elements and (elements + n) * itemsize > bucket_bytes:
            plan.append((first, i, elements))
            first = i
            elements = 0
        elements += n
    plan.append((first, len(shapes), elements))
    return plan


def checksum(flat):
    """A number that depends on every bit of a tensor and on its place: int64, modulo 2^64."""
    # two or four bytes an element
    bits = flat.view(torch.int16)
    place = torch.arange(min(len(bits), 1 << 20), device=bits.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for i, part in enumerate(bits.split(1 << 20)):
        total += (2 * i + 1) * (part.long() * place[: len(part)]).sum()
    return total


def settle(device, timeout, what):
    """Wait until the current stream of a GPU has done its work; TimeoutError after `timeout` s."""
    deadline = time.monotonic() + timeout
    while device.type == "cuda" and not torch.cuda.current_stream(device).query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"weights: {what} has not ended within {timeout:.0f} s")
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

"""What both sides of a weight update share: the group they meet in, and how parameters lie in buckets.

Both know one layout: {names, shapes, dtype, bucket_bytes, whole: are these all of the model's parameters?}.
"""

import contextlib
import functools
import os
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist


def open_store(host, port, timeout, server=False):
    """A client of the TCPStore at host:port; server=True: of a new one (port 0: on any port), or OSError."""
    listener = None
    if server:
        # by itself torch would listen on all addresses of the machine
        with socket.create_server((host, port)) as s:
            port = s.getsockname()[1]
            listener = s.detach()
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(host, port, None, server, limit, False, master_listen_fd=listener)


@functools.cache
def weight_stream(device):
    """A GPU's one stream of weight updates, its priority surely not that of decoding; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority=-1)


def join_group(backend, store, rank, world, timeout, device=None):
    """A process group beside whatever default group this process has: rank 0 is the trainer, the others
    are engine workers. device: a GPU, for NCCL. Raises RuntimeError or TimeoutError after `timeout` s.
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
    # without a watchdog, which ends the process when a broadcast fails: waits raise, and whoever
    # waited aborts the group
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    group = dist.ProcessGroupNCCL(place, rank, world, options)
    # other groups keep theirs
    del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
    # the first broadcast connects, without a deadline of its own
    try:
        in_thread(broadcast, group, torch.zeros(1), device, timeout).result(timeout)
    except BaseException:
        # which may wait for the same as connecting does
        in_thread(abort_group, group)
        raise
    return group


def broadcast(group, tensor, device, timeout):
    """From rank 0 to all; what NCCL sends goes to the GPU first. Raises RuntimeError."""
    with torch.cuda.stream(weight_stream(device)):
        work = group.broadcast(tensor.to(device, non_blocking=True), 0)
        work.wait(timedelta(seconds=timeout))


def abort_group(group):
    """Free whoever waits in a group that is given up; gloo's waits end with their deadline alone."""
    if dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL):
        with contextlib.suppress(RuntimeError):
            group.abort()


def bucket_ranges(layout):
    """Cut the parameters, in order, into buckets of at most bucket_bytes (a larger one gets its own):
    list of (first index, last index + 1, elements). Both sides compute it.
    """
    shapes = layout["shapes"]
    largest = layout["bucket_bytes"] // getattr(torch, layout["dtype"]).itemsize
    ranges = []
    first = 0
    elements = 0
    for i, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        if elements and elements + n > largest:
            ranges.append((first, i, elements))
            first = i
            elements = 0
        elements += n
    return [*ranges, (first, len(shapes), elements)]


def named_views(layout, ranges, buckets):
    """[(name, tensor)] of all parameters of a layout, each a view of its bucket."""
    views = []
    for bucket, (first, last, _) in zip(buckets, ranges):
        shapes = [torch.Size(shape) for shape in layout["shapes"][first:last]]
        parts = bucket.split([shape.numel() for shape in shapes])
        for name, shape, part in zip(layout["names"][first:last], shapes, parts):
            views.append((name, part.view(shape)))
    return views


def synchronize(device):
    """Wait until the current stream of a GPU has done its work: copies, which wait for nobody."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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

"""Code that both sides of a weight update share: their process group, and the buckets' layout.

A layout is {"buckets": [tensors of each bucket], "whole": are these all parameters of the model?},
where a tensor is [its name, its shape, the name of its dtype]. Names and shapes are those of a
checkpoint on disk.
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

# FlashAttention, cuBLAS and torch's views want tensors that begin at multiples of 16 bytes.
ALIGNMENT = 16


def open_store(host, port, timeout, server=False):
    """A client of the TCPStore at host:port.

    server=True: the store is made here; port 0: on any free port. Raises OSError if it cannot be.
    """
    listener = None
    if server:
        # By itself torch would listen on all addresses of the machine.
        with socket.create_server((host, port)) as s:
            port = s.getsockname()[1]
            listener = s.detach()
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(host, port, None, server, limit, False, master_listen_fd=listener)


@functools.cache
def weight_stream(device):
    """The one stream for weight updates of a GPU; None on the CPU.

    Its priority differs from that of decoding.
    """
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority=-1)


def join_group(backend, store, rank, world, timeout, device=None):
    """Join a process group beside the default group that this process may have.

    Rank 0 is the trainer, the others are engine workers. device: a GPU, for NCCL. Raises
    RuntimeError, or TimeoutError after `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    group_store = dist.PrefixStore("weights", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(group_store, rank, world, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    # The group runs beside an engine's own all-reduces, and must leave them room.
    options.is_high_priority_stream = True
    options.config.max_ctas = 8
    # This turns off torch's watchdog, which would end the process when a broadcast fails. Instead
    # the waits raise, and the caller aborts the group.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    group = dist.ProcessGroupNCCL(group_store, rank, world, options)
    # Other groups keep their watchdog.
    del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
    # The first broadcast connects, and has no deadline of its own.
    try:
        in_thread(broadcast, group, torch.zeros(1), device, timeout).result(timeout)
    except BaseException:
        # In a thread, as aborting may wait for the same thing as connecting does.
        in_thread(abort_group, group)
        raise
    return group


def broadcast(group, tensor, device, timeout):
    """Broadcast from rank 0; for NCCL the tensor goes to the GPU first. Raises RuntimeError."""
    with torch.cuda.stream(weight_stream(device)):
        work = group.broadcast(tensor.to(device, non_blocking=True), 0)
        work.wait(timedelta(seconds=timeout))


def abort_group(group):
    """Abort a group, which ends the waits in it; gloo's waits end at their deadline alone."""
    if dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL):
        with contextlib.suppress(RuntimeError):
            group.abort()


def bucket_ranges(sizes, most):
    """Cut parameters of these sizes in bytes, in order, into buckets: [(first, last + 1)].

    A bucket has at most `most` bytes; a parameter that is larger gets its own.
    """
    ranges = []
    first = 0
    total = 0
    for i, size in enumerate(sizes):
        if total and total + size > most:
            ranges.append((first, i))
            first = i
            total = 0
        total += size
    return [*ranges, (first, len(sizes))]


def padded_bytes(shape, dtype):
    """The bytes that a tensor takes in a bucket, where each one begins at a multiple of ALIGNMENT.

    dtype: its name.
    """
    size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def bucket_bytes(tensors):
    """The size of a bucket of these tensors, [(name, shape, dtype)]."""
    return sum(padded_bytes(shape, dtype) for _, shape, dtype in tensors)


def named_views(tensors, bucket):
    """[(name, tensor)] of a bucket's tensors, which are views of the bucket [bytes]."""
    views = []
    start = 0
    for name, shape, dtype in tensors:
        shape = torch.Size(shape)
        dtype_bytes = getattr(torch, dtype).itemsize
        part = bucket[start : start + shape.numel() * dtype_bytes]
        views.append((name, part.view(getattr(torch, dtype)).view(shape)))
        start += padded_bytes(shape, dtype)
    return views


def synchronize(device):
    """Wait until the current stream of a GPU has done its work: copies, which wait for nobody."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def in_thread(function, *args):
    """Call it in a daemon thread of its own, on the GPU of this thread; returns a Future."""
    future = Future()
    # A new thread uses GPU 0 unless it is told otherwise.
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run():
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            future.set_result(function(*args))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future

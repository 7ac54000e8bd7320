"""The trainer's processes: which rank this is, on which device, and what all ranks agree upon.

run.sh (or torchrun) starts the ranks and gives them their numbers; one process alone is rank 0 of 1.
Deliberately absent: anything about the model.
"""

import os
import signal
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from config import require
from plumbing.hardware import keep_freed_memory
from plumbing.transport import open_store


class Stopped(Exception):
    """Told to stop (SIGTERM): what is done is to be saved, the step in progress is not."""


class Ranks:
    """rank, world, device of this process. SIGTERM sets `stop`, which only rank 0's counts of.

    group: a gloo group of all ranks, so that agreeing waits for no GPU; None if there is one rank.
    """

    def __init__(self, config):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cpu")
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        require(
            torch.cuda.is_available() or not given,
            f"GPU {given} is this rank's, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot "
            "use it: see `nvidia-smi` for which CUDA its driver knows",
        )
        self.stop = threading.Event()
        self.group = None
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        else:
            keep_freed_memory()
        self.sharded = self.world > 1 or config.dtype != "float32"
        if self.sharded:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            # of a step's collectives: a rank whose node is gone must not hang the others for ever
            limit = timedelta(seconds=config.stall_timeout)
            dist.init_process_group(
                backend,
                timeout=limit,
                rank=self.rank,
                world_size=self.world,
                store=self._store(config.stall_timeout),
            )
        if self.world > 1:
            # ranks wait in it while rank 0 waits for data or writes a checkpoint
            limit = timedelta(seconds=2 * max(config.stall_timeout, config.start_timeout))
            self.group = dist.new_group(backend="gloo", timeout=limit)

    def _store(self, timeout):
        """Where all ranks meet; None: torchrun has one of its own."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return None
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT", 0))
        return open_store(host, port, timeout, server=self.rank == 0)

    def listen_for_stop(self):
        """From now on SIGTERM sets `stop`."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_):
        self.stop.set()

    def agree(self, number):
        """Rank 0's small whole number, on every rank. Collective."""
        if self.group is None:
            return int(number)
        flag = torch.tensor([float(number)])
        dist.broadcast(flag, 0, self.group)
        return int(flag.item())

    def check_stop(self):
        """Raise Stopped on all ranks if rank 0 was told to stop. Collective."""
        if self.agree(self.stop.is_set()):
            raise Stopped

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()

"""The trainer's processes: this process's rank and device, and the decisions that all ranks share.

run.sh starts the ranks; `accelerate launch` and torchrun can start them as well, and one process
alone is rank 0 of 1. Deliberately absent: accelerate's own FSDP, which falls back to DDP on CPU.
train.py shards the model itself.
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState

from plumbing.patience import longest_wait
from plumbing.transport import open_store


class Stopped(Exception):
    """The run ends here: finished steps are to be saved, the one in progress is not.

    Its text is the reason, on rank 0: an error, or that the run was told to stop (SIGTERM).
    """


class Flag:
    """A threading.Event without a lock.

    A second SIGTERM may come while the handler of the first one is in `set`; with a lock it would
    wait for itself for ever.
    """

    def __init__(self):
        self.is_up = False

    def set(self):
        self.is_up = True

    def is_set(self):
        return self.is_up


class Ranks:
    """The rank, world and device of this process, and its process groups.

    SIGTERM and `fail` set `stop`; that of any rank counts. The default group (NCCL on GPUs, gloo
    elsewhere) is for a step's collectives. group: a gloo group with a longer deadline, in which the
    other ranks wait while rank 0 waits for data. saving: another such group, for reading
    checkpoints and for the threads that write them.
    """

    def __init__(self, config):
        cuda = torch.cuda.is_available()
        # One process alone is a group of one. OMP_NUM_THREADS is set because accelerate would
        # choose another number of threads.
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        alone["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        os.environ |= alone | os.environ
        # Without GPUs and without cpu=True accelerate takes every process for the only one.
        state = PartialState(
            cpu=not cuda,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            store=meeting_place(config.stall_timeout),
            # A rank whose node is gone must not let the others hang for ever.
            timeout=timedelta(seconds=config.stall_timeout),
        )
        self.rank = state.process_index
        self.world = state.num_processes
        self.device = state.device
        # The others may wait for rank 0 twice as long as rank 0 itself may wait for data.
        limit = timedelta(seconds=2 * longest_wait(config))
        self.group = dist.new_group(backend="gloo", timeout=limit)
        self.saving = dist.new_group(backend="gloo", timeout=limit)
        self.stop = Flag()
        self.error = None

    def listen_for_stop(self):
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())

    def fail(self, error):
        """Rank 0: let the run end with this error, once all ranks have saved what they trained."""
        self.error = error
        self.stop.set()

    def check_stop(self, condition=False):
        """Raise Stopped on all ranks if any rank is to stop. Collective.

        A node may be told to stop alone, for example because its machine is taken away. Returns
        whether the condition is true on any rank. Ranks that wait for a condition of rank 0 meet
        here again and again, so that none of them waits for long to be told.
        """
        flags = torch.tensor([self.stop.is_set(), bool(condition)], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        if flags[0]:
            raise Stopped(self.error or "train: told to stop") from self.error
        return bool(flags[1])

    @staticmethod
    def close():
        """Destroy all process groups of this process."""
        dist.destroy_process_group()
        # Otherwise accelerate would take the next group for this one.
        PartialState._reset_state()


def meeting_place(timeout):
    """The store in which all ranks find each other; None if torchrun or accelerate has its own."""
    if os.environ["WORLD_SIZE"] == "1":
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    # The store that torch makes would listen on all addresses of the machine.
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return open_store(host, port, timeout, server=os.environ["RANK"] == "0")

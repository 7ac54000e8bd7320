"""Checkpoints: out/<run>/checkpoints/step_XXXXXX, in Hugging Face's format plus trainer/ for resuming.

A checkpoint is written under a temporary name and renamed: it is whole or absent. `newest` and
`last_state` need no torch, so that the launcher and every stage can ask where a run stands.
"""

import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import ConfigError
from plumbing.queues import read_json

# Of a run that has no checkpoint yet. position: which draws of the sampler are done with, all below
# `next` and those in `ahead`; sampler: what actor.py wrote of itself, see its `InFlight`.
NEW_RUN = {
    "version": 0,
    "samples": 0,
    "wall_s": 0.0,
    "skipped": 0,
    "dropped": 0,
    "position": {"next": 0, "ahead": []},
    "sampler": {},
}
GOES_ON = "the same command then continues from the checkpoint before"


def all_of(run_dir):
    """The directories of a run's checkpoints, the newest last."""
    return sorted(Path(run_dir, "checkpoints").glob("step_*[0-9]"))


def newest(run_dir):
    """The newest checkpoint's directory, or None."""
    return max(all_of(run_dir), default=None)


def last_state(run_dir):
    """Where a run goes on from: the newest checkpoint's state.json, or that of a new run."""
    return state_of(newest(run_dir))


def state_of(path):
    """The run's state as a checkpoint keeps it; path None: of a new run."""
    if path is None:
        return dict(NEW_RUN)
    try:
        return NEW_RUN | json.loads((path / "trainer" / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is damaged: remove it; {GOES_ON}") from e


def next_state(state, metrics, record, wall_s):
    """The run's state after a step, as checkpoints keep it; record: the step's last micro-batch.

    A step whose gradient was not finite counts, so that data and versions stay aligned.
    """
    dropped = sum(sum(problems.values()) for problems in record["drops"].values())
    return state | {
        "version": state["version"] + 1,
        "samples": state["samples"] + metrics["samples"],
        "position": record["position"],
        "dropped": state["dropped"] + dropped,
        "skipped": state["skipped"] + (not math.isfinite(metrics["grad_norm"])),
        "wall_s": wall_s,
    }


def save(config, run_dir, model, optimizers, ranks, state, before=None):
    """Begin the checkpoint of state["version"], once the one begun `before` is whole. Collective.

    Returns (the Future of the thread that writes it, seconds until all of it was copied).
    """
    import torch
    from torch.distributed.checkpoint import state_dict
    from torch.utils._pytree import tree_map_only

    from plumbing import lora

    start = time.monotonic()
    check(before, until_whole=True)
    # now: the actor forgets what later steps have trained
    state = state | {"sampler": read_json(Path(run_dir, "queues", "sampler.json"))}
    weights, moments = state_dict.get_state_dict(model, optimizers)
    shards = {"model": weights, "optimizer": moments}
    shards = tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), shards)
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = state_dict.get_model_state_dict(model, options=options)
    # rank 0 alone gets it
    adapters = lora.split(model, whole) if whole else {}
    # a tied head is in the state dict twice, and is to be written once
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    dtype = getattr(torch, config.dtype)
    whole = {name: x.to(dtype, copy=True) for name, x in whole.items() if name in named}
    what = (config, run_dir, model, ranks, state, shards, adapters, whole)
    return ThreadPoolExecutor(1).submit(_write, *what), time.monotonic() - start


def check(writing, until_whole=False):
    """Raise RuntimeError if the checkpoint of this Future cannot be written; until_whole: wait for its end."""
    if writing and (until_whole or writing.done()):
        writing.result()


def _write(config, run_dir, model, ranks, state, shards, adapters, whole):
    """The thread, on every rank: write what was copied and drop old checkpoints."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from transformers import AutoTokenizer

    from plumbing import lora

    final = Path(run_dir, "checkpoints", f"step_{state['version']:06d}")
    temporary = final.with_name(final.name + ".tmp")
    try:
        if ranks.rank == 0:
            # of a trainer that was killed while it wrote
            for torn in final.parent.glob("*.tmp"):
                shutil.rmtree(torn)
            # of a run directory that is gone no other one is made
            final.parent.mkdir(exist_ok=True)
            temporary.mkdir()
        dist.barrier(ranks.saving)
        dcp.save(shards, checkpoint_id=temporary / "trainer", process_group=ranks.saving)
        if ranks.rank > 0:
            return
        model.save_pretrained(temporary, state_dict=whole)
        if adapters:
            lora.save(temporary / "adapter", adapters, config)
        # what is in the file, not what the master weights are
        model.config.dtype = config.dtype
        model.config.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(config.model).save_pretrained(temporary)
        (temporary / "trainer" / "state.json").write_text(json.dumps(state))
        # a power cut leaves it whole, too
        os.sync()
        temporary.rename(final)
        if config.keep_last:
            for old in all_of(run_dir)[: -config.keep_last]:
                shutil.rmtree(old)
    # torch derives its own from it
    except BaseException as e:
        raise RuntimeError(f"train: {final} cannot be written: is there room? {GOES_ON}") from e


def restore(path, model, optimizers):
    """Load a checkpoint, if there is one, into model and optimizers; returns its state. Collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if path is None:
        return state_of(None)
    weights, moments = get_state_dict(model, optimizers)
    try:
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path / "trainer")
    except BaseException as e:
        raise ConfigError(f"{path} is damaged: remove it; {GOES_ON}") from e
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
    return state_of(path)

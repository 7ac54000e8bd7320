"""Checkpoints: out/<run>/checkpoints/step_XXXXXX, in Hugging Face's format plus trainer/ for resuming.

A checkpoint is written under a temporary name and renamed: it is whole or absent. `newest` and
`last_state` need no torch, so that the launcher and every stage can ask where a run stands.
"""

import json
import os
import shutil
import time
from pathlib import Path

from config import require
from plumbing.queues import read_json

# Of a run that has no checkpoint yet. position: which draws of the sampler are done with, all below
# `next` and those in `ahead`; sampler: what actor.py wrote of itself, see its `Draws`.
NEW_RUN = {
    "version": 0,
    "samples": 0,
    "wall_s": 0.0,
    "skipped": 0,
    "dropped": 0,
    "position": {"next": 0, "ahead": []},
    "sampler": {},
}


def newest(run_dir):
    """The newest checkpoint's directory, or None."""
    return max(Path(run_dir, "checkpoints").glob("step_*[0-9]"), default=None)


def last_state(run_dir):
    """Where a run goes on from: the newest checkpoint's state.json, or that of a new run."""
    path = newest(run_dir)
    return state_of(path) if path else dict(NEW_RUN)


def state_of(path):
    """The run's state as a checkpoint keeps it."""
    return NEW_RUN | json.loads((path / "trainer" / "state.json").read_text())


def bytes_needed(config, model):
    """What a checkpoint takes on disk: float32 weights, Adam's two moments, the weights in `config.dtype`."""
    bytes_each = 3 * 4 + (4 if config.dtype == "float32" else 2)
    return bytes_each * sum(p.numel() for p in model.parameters())


def check_room(config, run_dir, model):
    """Raise ConfigError if a checkpoint finds no room: said before the first step, not hours later."""
    needed = bytes_needed(config, model)
    free = shutil.disk_usage(run_dir).free
    require(
        needed < free,
        f"a checkpoint takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free in {run_dir}: "
        "make room there, or choose another --out",
    )


def save(config, run_dir, model, optimizers, state, ranks):
    """Write the checkpoint of state["version"] and drop old ones; returns the seconds it took. Collective over all ranks.

    ranks: plumbing.ranks.Ranks, whose group's deadline is what writing may take.
    Raises RuntimeError with the reason on one line; earlier checkpoints stay intact.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    start = time.monotonic()
    try:
        _write(config, run_dir, model, optimizers, state, ranks)
    # torch hides the system's error, and derives its own from BaseException
    except (Exception, CheckpointException) as e:
        lines = str(e).strip().splitlines() or [type(e).__name__]
        free = shutil.disk_usage(run_dir).free / 1e6 if Path(run_dir).exists() else 0
        kept = newest(run_dir)
        raise RuntimeError(
            f"train: checkpoint {state['version']} cannot be written to {run_dir}/checkpoints ({lines[-1]}; {free:.0f} MB are "
            f"free there); {kept.name if kept else 'none'} is intact: see to space and permissions, then the same command continues"
        ) from e
    seconds = time.monotonic() - start
    if ranks.rank == 0:
        # for run.sh, which has to know how long a stop may take
        file = Path(run_dir, "queues", "save_seconds")
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{round(seconds)}\n")
    return seconds


def _write(config, run_dir, model, optimizers, state, ranks):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
    )

    final = Path(run_dir, "checkpoints", f"step_{state['version']:06d}")
    temporary = final.with_name(final.name + ".tmp")
    if ranks.rank == 0:
        # of a trainer that was killed while it wrote
        for torn in final.parent.glob("*.tmp"):
            shutil.rmtree(torn)
        temporary.mkdir(parents=True)
    if ranks.group:
        dist.barrier(ranks.group)
    weights, optimizer_state = get_state_dict(model, optimizers)
    dcp.save({"model": weights, "optimizer": optimizer_state}, checkpoint_id=temporary / "trainer")
    torch.save(_random_state(), temporary / "trainer" / f"random_{ranks.rank}.pt")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=whole)
    if ranks.rank == 0:
        _write_hugging_face(config, model, full, temporary)
        state = state | {"sampler": read_json(Path(run_dir, "queues", "sampler.json"))}
        (temporary / "trainer" / "state.json").write_text(json.dumps(state))
        # a power cut leaves it whole, too
        os.sync()
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        if config.keep_last:
            for old in sorted(final.parent.glob("step_*[0-9]"))[: -config.keep_last]:
                shutil.rmtree(old)
    if ranks.group:
        dist.barrier(ranks.group)


def _write_hugging_face(config, model, full, folder):
    import torch
    from transformers import AutoTokenizer

    dtype = getattr(torch, config.dtype)
    # a tied head is in the state dict twice, and is to be written once
    named = {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    model.save_pretrained(
        folder, state_dict={k: v.to(dtype) for k, v in full.items() if k in named}
    )
    # what is in the file, not what the master weights are
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(config.model).save_pretrained(folder)


def restore(run_dir, model, optimizers, rank, path=None):
    """Load a checkpoint, the newest one by default, into model and optimizers; returns its state, as `last_state`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    path = path or newest(run_dir)
    if path is None:
        return dict(NEW_RUN)
    weights, optimizer_state = get_state_dict(model, optimizers)
    states = {"model": weights, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=path / "trainer")
    set_state_dict(
        model,
        optimizers,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    # absent if there are more ranks than before
    random = path / "trainer" / f"random_{rank}.pt"
    if random.exists():
        saved = torch.load(random, weights_only=True)
        torch.set_rng_state(saved["cpu"])
        if "cuda" in saved and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
    return state_of(path)


def _random_state():
    """States of the generators a model may draw from, as tensors."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states

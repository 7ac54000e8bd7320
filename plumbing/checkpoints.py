"""Checkpoints: out/<run>/checkpoints/step_XXXXXX, in Hugging Face's format plus trainer/ for resuming.

A checkpoint is written under a temporary name and renamed: it is whole or absent. Only the weights are written by this
code; the model's own files (configuration, tokenizer, chat template, generation settings) are copied as they are. They
lie in out/<run>/model_files from the run's start on, so that no checkpoint needs the model's directory again. `newest`
and `last_state` need no torch, so that the launcher and every stage can ask where a run stands.
"""

import contextlib
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import ConfigError, require
from plumbing.queues import read_json

# what belongs to a model beside its weights; a snapshot of the hub is fetched with these and the weights
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
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
        raise not_loaded(path, e) from e


def not_loaded(path, error):
    """The error that says why a checkpoint was not loaded. It is called damaged only if it was read and is damaged:
    a disk that does not answer, or a lack of memory, says nothing of it.
    """
    is_damage = isinstance(error, (FileNotFoundError, EOFError)) or not isinstance(
        error, (OSError, MemoryError)
    )
    cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    if is_damage:
        return ConfigError(f"{path} is damaged ({cause}): remove it; {GOES_ON}")
    return ConfigError(f"{path} cannot be read now ({cause}): it may be sound; try again")


# ---- the model's own files


def model_folder(model):
    """The directory with a model's files; model: a directory, or a hub name that is in the cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def copy_model_files(source, target):
    """Copy a model's own files, all but its weights, from one directory into another, which is made."""
    target.mkdir(parents=True)
    for pattern in MODEL_FILES:
        for file in source.glob(pattern):
            # the table of a model's weights over several files is one of its weights
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)


def set_dtype(folder, dtype):
    """Let a configuration say which dtype the weights beside it have."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values.pop("torch_dtype", None)
    file.write_text(json.dumps(values | {"dtype": dtype}, indent=2) + "\n")


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


class Saver:
    """Writes the checkpoints of a run, in a thread, while training goes on. state: what the run goes on from.

    What a checkpoint needs beside the weights is brought together now, before anything is trained. Raises ConfigError if a
    checkpoint could not be written.
    """

    def __init__(self, config, run_dir, model, optimizers, ranks, state):
        self.config = config
        self.run_dir = Path(run_dir)
        self.model = model
        self.optimizers = optimizers
        self.ranks = ranks
        # version of the newest checkpoint, begun or whole
        self.saved = state["version"]
        # the Future of the thread that writes it
        self.writing = None
        if ranks.rank == 0:
            self._keep_model_files()
            self._rehearse()

    def is_due(self, version):
        """Is there to be a checkpoint of this version: every save_every steps, and at the end?"""
        every = self.config.save_every
        return version == self.config.steps or bool(every and version % every == 0)

    def save(self, state):
        """Begin the checkpoint of state["version"], once the one before is whole. Collective.

        Returns the seconds until all of it was copied: from then on training may go on.
        """
        import torch
        from torch.distributed.checkpoint import state_dict
        from torch.utils._pytree import tree_map_only

        from plumbing import lora

        start = time.monotonic()
        self.finish()
        # The sampler's state as it is now: the actor forgets what later steps have trained.
        state = state | {"sampler": read_json(self.run_dir / "queues" / "sampler.json")}
        weights, moments = state_dict.get_state_dict(self.model, self.optimizers)
        shards = {"model": weights, "optimizer": moments}
        shards = tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), shards)
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        # rank 0 alone gets it
        whole = state_dict.get_model_state_dict(self.model, options=options)
        adapters = lora.split(self.model, whole) if whole else {}
        # A tied head is in the state dict twice, and is to be written once.
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        dtype = getattr(torch, self.config.dtype)
        whole = {name: x.to(dtype, copy=True) for name, x in whole.items() if name in named}
        copied = (state, shards, adapters, whole)
        self.writing = ThreadPoolExecutor(1).submit(self._write, *copied)
        self.saved = state["version"]
        return time.monotonic() - start

    def check(self):
        """Raise RuntimeError if the checkpoint that was begun cannot be written."""
        if self.writing and self.writing.done():
            self.writing.result()

    def finish(self):
        """Wait until the checkpoint that was begun is whole. Raises RuntimeError if it cannot be written."""
        if self.writing:
            self.writing.result()

    def _keep_model_files(self):
        """Copy the model's own files into the run directory, once; whole or absent."""
        kept = self.run_dir / "model_files"
        if kept.exists():
            return
        temporary = kept.with_name("model_files.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        copy_model_files(model_folder(self.config.model), temporary)
        temporary.rename(kept)

    def _rehearse(self):
        """What a save does, without the weights' values. Raises ConfigError if it would fail."""
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        size = 0
        shapes = {}
        for name, p in self.model.named_parameters():
            shapes[name] = torch.empty(p.shape, dtype=p.dtype, device="meta")
            # as it is trained, as it is served, and AdamW's two moments
            size += p.numel() * (p.element_size() + getattr(torch, self.config.dtype).itemsize)
            size += p.numel() * p.requires_grad * (2 if self.config.adam_8bit else 8)
        free = shutil.disk_usage(self.run_dir).free
        require(
            size < free,
            f"{self.run_dir}: a checkpoint takes {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: make room",
        )
        try:
            revert_weight_conversion(self.model, shapes)
        # whatever transformers raises for a model that it can load, but not write
        except Exception as e:
            raise ConfigError(
                f"--model {self.config.model}: its weights could not be saved ({type(e).__name__}: {e})"
            ) from e

    def _write(self, state, shards, adapters, whole):
        """The thread, on every rank: write what was copied and drop old checkpoints."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        from plumbing import lora

        final = self.run_dir / "checkpoints" / f"step_{state['version']:06d}"
        temporary = final.with_name(final.name + ".tmp")
        try:
            if self.ranks.rank == 0:
                # what a trainer has left that was killed while it wrote
                for torn in final.parent.glob("*.tmp"):
                    shutil.rmtree(torn)
                # A run directory that is gone is not made again.
                final.parent.mkdir(exist_ok=True)
                copy_model_files(self.run_dir / "model_files", temporary)
            dist.barrier(self.ranks.saving)
            group = self.ranks.saving
            writer = shard_writer(temporary / "trainer")
            dcp.save(shards, storage_writer=writer, process_group=group)
            if self.ranks.rank > 0:
                return
            write_weights(temporary, self.model, whole)
            set_dtype(temporary, self.config.dtype)
            if adapters:
                lora.save(temporary / "adapter", adapters, self.config)
            (temporary / "trainer" / "state.json").write_text(json.dumps(state))
            # A power cut leaves it whole, too.
            os.sync()
            temporary.rename(final)
            if self.config.keep_last:
                for old in all_of(self.run_dir)[: -self.config.keep_last]:
                    shutil.rmtree(old)
        # dcp's own error is no Exception
        except BaseException as e:
            error = first_failure(e)
            raise RuntimeError(
                f"train: {final} cannot be written ({type(error).__name__}: {error}); {GOES_ON}"
            ) from e


def write_weights(folder, model, state):
    """Write weights, {name: tensor} as the model calls them, under the names that checkpoints of its family have."""
    from huggingface_hub import save_torch_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, state)
    save_torch_state_dict(state, folder, metadata={"format": "pt"})


def first_failure(error):
    """The error of the first rank that failed, which torch.distributed.checkpoint wraps in one of its own."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def shard_writer(folder):
    """torch's writer of a checkpoint's shards, which names the system's error (a full disk, a quota) as the cause.

    torch.save hides it behind one about its archive, and ranks tell each other no more than the last error.
    """
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            try:
                return super().write_data(plan, planner)
            except Exception as e:
                cause = e
                while cause.__context__ and not isinstance(cause, OSError):
                    cause = cause.__context__
                if isinstance(cause, OSError):
                    raise cause from None
                raise

    return Writer(folder)


def param_groups(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def restore(path, model, optimizers):
    """Load a checkpoint, if there is one, into model and optimizers; returns its state. Collective.

    Moments are restored; what knobs say of an optimizer (weight decay, betas, ...) is the configuration's. Raises
    ConfigError if it is damaged, or cannot be read, or is of another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if path is None:
        return state_of(None)
    chosen = [
        {name: value for name, value in group.items() if name != "params"}
        for group in param_groups(optimizers)
    ]
    weights, moments = get_state_dict(model, optimizers)
    with reading(path):
        saved = dcp.FileSystemReader(path / "trainer").read_metadata().state_dict_metadata
    for name, x in weights.items():
        size = getattr(saved.get(f"model.{name}"), "size", None)
        require(
            size == x.shape,
            f"{path} is of another model: {name} has {list(x.shape)} here, and there "
            f"{'is none' if size is None else list(size)}",
        )
    with reading(path):
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path / "trainer")
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
    for group, options in zip(param_groups(optimizers), chosen, strict=True):
        group.update(options)
    return state_of(path)


@contextlib.contextmanager
def reading(path):
    """Say of errors in reading a checkpoint what they mean. An interrupt stays one."""
    try:
        yield
    except BaseException as e:
        error = first_failure(e)
        if not isinstance(error, Exception):
            raise error from None
        raise not_loaded(path, error) from e

"""Checkpoints: out/<run>/checkpoints/step_XXXXXX, in Hugging Face's format.

A folder trainer/ in it holds what is needed to continue the run. A checkpoint is written under a
temporary name and then renamed, so it is whole or absent. Of a model only the weights are written
anew. Its other files (configuration, tokenizer, chat template, generation settings) are copied
unchanged: at the run's start into out/<run>/model_files, and from there into every checkpoint, so
that the model's own directory is not needed again. `newest` and `last_state` need no torch, so that
the launcher and every stage can ask how far a run has come.
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

# A model's files beside its weights. tools/prepare.py fetches these and the weights from the hub.
MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
# The state of a run that has no checkpoint yet.
# position: which draws of the sampler are done (plumbing/ledger.py): all below `next`, and those in
# `ahead`. sampler: the actor's own state, as `InFlight` in plumbing/ledger.py saves it.
NEW_RUN = {
    "version": 0,
    "samples": 0,
    "wall_s": 0.0,
    "skipped": 0,
    "dropped": 0,
    "position": {"next": 0, "ahead": []},
    "sampler": {},
}
# the seconds within which a node must see the checkpoint that rank 0 sees
VISIBLE_S = 120.0


def path_of(run_dir, version):
    """The directory of a run's checkpoint of a version."""
    return Path(run_dir, "checkpoints", f"step_{version:06d}")


def version_of(path):
    """The version of the checkpoint in a directory that `path_of` has named."""
    return int(path.name.removeprefix("step_"))


def all_of(run_dir):
    """The directories of a run's checkpoints, the newest last."""
    return sorted(Path(run_dir, "checkpoints").glob("step_*[0-9]"))


def newest(run_dir):
    """The newest checkpoint's directory, or None."""
    return max(all_of(run_dir), default=None)


def agreed_newest(run_dir, ranks):
    """The newest checkpoint that rank 0 sees, or None, on every rank. Collective.

    On a shared file system a node may see for a moment what was there before. Raises ConfigError if
    this node does not see rank 0's checkpoint within VISIBLE_S.
    """
    import torch
    import torch.distributed as dist

    path = newest(run_dir)
    if ranks.world == 1:
        return path
    version = torch.tensor(version_of(path) if path else -1)
    dist.broadcast(version, 0, group=ranks.saving)
    if version < 0:
        return None
    path = path_of(run_dir, int(version))
    deadline = time.monotonic() + VISIBLE_S
    while path not in all_of(run_dir):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path}: rank {ranks.rank} has not seen it within {VISIBLE_S:.0f} s, and rank 0 "
                "does: all nodes must have the same file system at --out"
            )
        time.sleep(0.5)
    return path


def last_state(run_dir):
    """The state that a run continues from: the newest checkpoint's, or that of a new run."""
    return state_of(newest(run_dir))


def state_of(path):
    """The state of the run in a checkpoint's state.json. path: None for that of a new run."""
    if path is None:
        return dict(NEW_RUN)
    try:
        return NEW_RUN | json.loads((path / "trainer" / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise not_loaded(path, e) from e


def not_loaded(path, error):
    """The ConfigError that says why a checkpoint was not loaded.

    It calls the checkpoint damaged only if the error proves that. If a disk does not answer, or if
    memory runs out, the checkpoint may be sound.
    """
    is_missing = isinstance(error, (FileNotFoundError, EOFError))
    is_damage = is_missing or not isinstance(error, (OSError, MemoryError))
    cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    if is_damage:
        return ConfigError(
            f"{path} is damaged ({cause}): remove it; the same command then continues from the "
            "checkpoint before"
        )
    return ConfigError(f"{path} cannot be read now ({cause}): it may be sound; try again")


# ---- the model's own files


def model_folder(model):
    """The directory with a model's files. model: a directory, or a hub name in the local cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def model_type(model):
    """The family of a model, a directory or hub name, as its config.json has it.

    Raises OSError or ValueError if it is not on this machine.
    """
    return json.loads((model_folder(model) / "config.json").read_text()).get("model_type", "")


def copy_model_files(source, target):
    """Copy a model's files, but for its weights, into the new directory `target`."""
    target.mkdir(parents=True)
    for pattern in MODEL_FILES:
        for file in source.glob(pattern):
            # an index says which file holds which weight: it belongs to the weights
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)


def set_dtype(folder, dtype):
    """Write the dtype of a checkpoint's weights into the config.json beside them."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values.pop("torch_dtype", None)
    file.write_text(json.dumps(values | {"dtype": dtype}, indent=2) + "\n")


def next_state(state, metrics, record, wall_s):
    """The run's state after one more step. record: the last micro-batch of that step.

    A step whose gradient was not finite is counted, too, so that data and versions stay aligned.
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


def discard(checkpoint):
    """Delete a checkpoint. It loses its name first, so that no torn one can be taken for whole.

    Files that somebody reads on a network file system stay until the next start. The checkpoint may
    have been moved away meanwhile.
    """
    torn = checkpoint.with_name(checkpoint.name + ".tmp")
    shutil.rmtree(torn, ignore_errors=True)
    with contextlib.suppress(OSError):
        checkpoint.rename(torn)
    shutil.rmtree(torn, ignore_errors=True)


def most_to_come(config, version, existing):
    """The number of checkpoints for which the disk must have room, beside the existing ones.

    version: the version that the run continues from. A checkpoint is written before the oldest one
    is deleted, so there may be keep_last + 1 of them.
    """
    if version >= config.steps:
        return 0
    every = config.save_every or config.steps
    to_come = math.ceil(config.steps / every) - version // every
    if config.keep_last:
        to_come = min(to_come, config.keep_last + 1 - existing)
    return max(to_come, 1)


class Saver:
    """Writes the checkpoints of a run, in a thread, while training goes on.

    state: the state that the run continues from. The constructor copies the model's own files into
    the run directory, and raises ConfigError if a checkpoint could not be written later: the run
    then ends before anything is trained.
    """

    def __init__(self, config, run_dir, model, optimizers, ranks, state):
        self.config = config
        self.run_dir = Path(run_dir)
        self.model = model
        self.optimizers = optimizers
        self.ranks = ranks
        # the version of the newest checkpoint, which may still be being written
        self.saved = state["version"]
        # the Future of that write, or None
        self.writing = None
        if ranks.rank == 0:
            self._keep_model_files()
            self._rehearse()

    def is_due(self, version):
        """Must this version be saved? The last one is, and every one after save_every steps."""
        every = self.config.save_every
        return version == self.config.steps or bool(every and version % every == 0)

    def save(self, state):
        """Begin the checkpoint of state["version"], once the one before is whole. Collective.

        Everything is copied before this method returns, so that training may go on. Returns the
        seconds that it took.
        """
        import torch
        from torch.distributed.checkpoint import state_dict
        from torch.utils._pytree import tree_map_only

        from plumbing import lora

        start = time.monotonic()
        self.finish()
        # Read it now: the actor will forget draws that later steps train, and this checkpoint
        # needs them.
        state = state | {"sampler": read_json(self.run_dir / "queues" / "sampler.json")}
        weights, moments = state_dict.get_state_dict(self.model, self.optimizers)
        shards = {"model": weights, "optimizer": moments}
        shards = tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True), shards)
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        # the whole weights, on rank 0; {} on the other ranks
        whole = state_dict.get_model_state_dict(self.model, options=options)
        adapters = lora.split(self.model, whole) if whole else {}
        # A state dict holds a tied head under two names, these dicts hold it under one.
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        dtype = getattr(torch, self.config.dtype)
        whole = {name: x.to(dtype, copy=True) for name, x in whole.items() if name in named}
        self.writing = ThreadPoolExecutor(1).submit(self._write, state, shards, adapters, whole)
        self.saved = state["version"]
        return time.monotonic() - start

    def check(self):
        """Raise RuntimeError if the checkpoint that was begun cannot be written."""
        if self.writing and self.writing.done():
            self.writing.result()

    def finish(self):
        """Wait until the checkpoint that was begun is whole.

        Raises RuntimeError if it cannot be written.
        """
        if self.writing:
            self.writing.result()

    def _keep_model_files(self):
        """Copy the model's own files into the run directory, unless they are there.

        They are copied under a temporary name, so that the folder is whole or absent.
        """
        kept = self.run_dir / "model_files"
        if kept.exists():
            return
        temporary = kept.with_name("model_files.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        copy_model_files(model_folder(self.config.model), temporary)
        temporary.rename(kept)

    def _rehearse(self):
        """Remove torn checkpoints; raise ConfigError if a save would fail.

        A save fails if the disk has too little room, or if the weights cannot be converted.
        """
        import torch
        from transformers.core_model_loading import revert_weight_conversion

        # a trainer that was killed while it wrote may have left a torn checkpoint
        for torn in (self.run_dir / "checkpoints").glob("*.tmp"):
            shutil.rmtree(torn, ignore_errors=True)
        # Bytes of the parameters as they are trained; a tied head is there under both of its names.
        size = sum(x.nbytes for x in self.model.state_dict().values())
        shapes = {}
        for name, p in self.model.named_parameters():
            shapes[name] = torch.empty(p.shape, dtype=p.dtype, device="meta")
            # bytes of the parameter as it is served, and of AdamW's two moments
            size += p.numel() * getattr(torch, self.config.dtype).itemsize
            size += p.numel() * p.requires_grad * (2 if self.config.adam_8bit else 8)
        count = most_to_come(self.config, self.saved, len(all_of(self.run_dir)))
        free = shutil.disk_usage(self.run_dir).free
        # With --keep_last 0 the run needs room for the next checkpoint only: somebody may move the
        # others away in time, or stop the run long before its last step, as the doctor does.
        needed = count if self.config.keep_last else min(count, 1)
        require(
            needed * size < free,
            f"{self.run_dir}: a checkpoint takes {size / 1e9:.1f} GB, this run needs room for "
            f"{needed} more, and {free / 1e9:.1f} GB are free: make room, or let the run write "
            "fewer (--save_every) or keep fewer (--keep_last; a new one is written before the "
            "oldest one is deleted)",
        )
        if count * size >= free:
            print(
                f"train: warning: --keep_last 0 keeps all checkpoints: {count} of {size / 1e9:.1f} "
                f"GB are to come, and {free / 1e9:.1f} GB are free: move them away in time, or "
                "give --keep_last a number",
                flush=True,
            )
        try:
            revert_weight_conversion(self.model, shapes)
        # transformers raises errors of many kinds for a model that it can load, but not write
        except Exception as e:
            raise ConfigError(
                f"--model {self.config.model}: its weights could not be saved ({type(e).__name__}: "
                f"{e})"
            ) from e

    def _write(self, state, shards, adapters, whole):
        """The thread, on every rank: write what was copied, and delete old checkpoints."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        from plumbing import lora

        final = path_of(self.run_dir, state["version"])
        temporary = final.with_name(final.name + ".tmp")
        try:
            if self.ranks.rank == 0:
                # This raises an error if the run directory was deleted: it is not made again.
                final.parent.mkdir(exist_ok=True)
                copy_model_files(self.run_dir / "model_files", temporary)
            dist.barrier(self.ranks.saving)
            writer = shard_writer(temporary / "trainer")
            dcp.save(shards, storage_writer=writer, process_group=self.ranks.saving)
            if self.ranks.rank > 0:
                return
            write_weights(temporary, self.model, whole)
            set_dtype(temporary, self.config.dtype)
            if adapters:
                lora.save(temporary / "adapter", adapters, self.config)
            (temporary / "trainer" / "state.json").write_text(json.dumps(state))
            # All is on disk before the rename, so that a power cut leaves no torn checkpoint.
            os.sync()
            temporary.rename(final)
            if self.config.keep_last:
                for old in all_of(self.run_dir)[: -self.config.keep_last]:
                    discard(old)
        # dcp's own error is not derived from Exception
        except BaseException as e:
            if self.ranks.rank == 0:
                # What was written would keep the disk full.
                shutil.rmtree(temporary, ignore_errors=True)
            error = first_failure(e)
            raise RuntimeError(
                f"train: {final} cannot be written ({type(error).__name__}: {error}); the same "
                "command then continues from the checkpoint before"
            ) from e


def write_weights(folder, model, state):
    """Write weights in Hugging Face's format. state: {name in the model: tensor}.

    In a checkpoint some families of models have other names than in the loaded model.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, state)
    for name, tensor in state.items():
        # Experts that lie in one tensor of the model are views of it, and files hold no views.
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            state[name] = tensor.clone()
    save_torch_state_dict(state, folder, metadata={"format": "pt"})


def first_failure(error):
    """The first failed rank's error, which torch.distributed.checkpoint hides in its own."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def shard_writer(folder):
    """torch's writer of shards, changed to raise the system's own error (a full disk, a quota).

    torch.save raises an error about its archive instead, and other ranks are told only that one.
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
    """The parameter groups of all optimizers, in one list."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def restore(path, model, optimizers, process_group=None):
    """Load a checkpoint into model and optimizers; returns the run's state. Collective.

    path: the checkpoint, or None for a new run. process_group: the ranks agree in it on who reads
    which part; a gloo group if the default group is NCCL's. None: the default group. The
    optimizers' moments are restored; their options (weight decay, betas, ...) stay as the knobs of
    this start set them. Raises ConfigError if the checkpoint is damaged, cannot be read, or is of
    another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if path is None:
        return state_of(None)
    options_of_knobs = [
        {name: value for name, value in group.items() if name != "params"}
        for group in param_groups(optimizers)
    ]
    weights, moments = get_state_dict(model, optimizers)
    with reading(path):
        saved = dcp.FileSystemReader(path / "trainer").read_metadata().state_dict_metadata
    for name, weight in weights.items():
        saved_shape = getattr(saved.get(f"model.{name}"), "size", None)
        require(
            saved_shape == weight.shape,
            f"{path} is of another model: {name} has the shape {list(weight.shape)} here, and "
            f"{'is absent' if saved_shape is None else list(saved_shape)} there",
        )
    with reading(path):
        shards = {"model": weights, "optimizer": moments}
        dcp.load(shards, checkpoint_id=path / "trainer", process_group=process_group)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
    for group, options in zip(param_groups(optimizers), options_of_knobs, strict=True):
        group.update(options)
    return state_of(path)


@contextlib.contextmanager
def reading(path):
    """Turn errors in reading a checkpoint into ConfigErrors (`not_loaded`), but not interrupts."""
    try:
        yield
    except BaseException as e:
        error = first_failure(e)
        if not isinstance(error, Exception):
            raise error from None
        raise not_loaded(path, error) from e

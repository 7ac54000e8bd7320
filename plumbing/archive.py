"""What --keep_steps leaves of a run's last steps, for tools/replay.py and tools/doctor.py.

    out/<run>/archive/step_000137/rank_0_row_0000.safetensors    a micro-batch that made version 137
    out/<run>/archive/groups/0000002184.safetensors              a group as the actor sent it, by draw

Files of the queues, moved here instead of being deleted.
"""

import shutil
from pathlib import Path

from plumbing.queues import read_record


def step_folder(run_dir, step):
    """Where the micro-batches of the step that made version `step` are."""
    return Path(run_dir, "archive", f"step_{step:06d}")


def batch_file(run_dir, step, rank, row):
    return step_folder(run_dir, step) / f"rank_{rank}_row_{row:04d}.safetensors"


def begin_step(config, run_dir, step, rank):
    """What a trainer rank does at a step's first micro-batch: forget those of before, and of an earlier try."""
    for file in step_folder(run_dir, step).glob(f"rank_{rank}_*"):
        file.unlink()
    if rank == 0:
        shutil.rmtree(step_folder(run_dir, step - config.keep_steps), ignore_errors=True)


def group_file(config, run_dir, draw):
    """Where the group of a draw goes; those of long ago are forgotten."""
    folder = Path(run_dir, "archive", "groups")
    long_ago = draw - (config.keep_steps + 2) * config.groups_per_step
    (folder / f"{long_ago:010d}.safetensors").unlink(missing_ok=True)
    return folder / f"{draw:010d}.safetensors"


def batches(run_dir, step):
    """The micro-batches of the step that made version `step`, rank by rank; FileNotFoundError if none is kept."""
    files = sorted(step_folder(run_dir, step).glob("rank_*"))
    if not files:
        raise FileNotFoundError(
            f"{step_folder(run_dir, step)}: nothing is kept of step {step}: all steps since the newest checkpoint before the "
            "wanted one are needed, run with --keep_steps of at least --save_every"
        )
    return [read_record(file) for file in files]


def groups(run_dir):
    """{draw: record} of all groups that are kept."""
    files = sorted(Path(run_dir, "archive", "groups").glob("*.safetensors"))
    return {int(file.stem): read_record(file) for file in files}

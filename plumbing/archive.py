"""What --keep_steps leaves of a run's last steps, for tools/replay.py and tools/doctor.py.

    out/<run>/archive/step_000137_rank_0_row_0000.safetensors    a micro-batch that made version 137
    out/<run>/archive/group_0000002184.safetensors               a group as the actor sent it, by draw

Files of the queues, moved here instead of being deleted; tools/report.py reads them.
"""

from pathlib import Path


def batch_file(config, run_dir, record, rank):
    """Where a trained micro-batch goes; None: it is deleted. Rank 0 sends away what is of long ago."""
    if not config.keep_steps:
        return None
    folder = Path(run_dir, "archive")
    step = record["step"] + 1
    if rank == record["row"] == 0:
        for file in folder.glob(f"step_{step - config.keep_steps:06d}_*"):
            file.unlink()
    return folder / f"step_{step:06d}_rank_{rank}_row_{record['row']:04d}.safetensors"


def group_file(config, run_dir, draw):
    """Where the group of a draw goes, likewise; that of long ago is sent away."""
    if not config.keep_steps:
        return None
    long_ago = draw - (config.keep_steps + 2) * config.groups_per_step
    Path(run_dir, "archive", f"group_{long_ago:010d}.safetensors").unlink(missing_ok=True)
    return Path(run_dir, "archive", f"group_{draw:010d}.safetensors")

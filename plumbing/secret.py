"""The secret of a run, in out/<run>/secret, a file for its owner alone: who knows it may give its engines orders.

Deliberately absent: encryption. It crosses the network as it is, as the weights do.
"""

import contextlib
import os
import secrets
from pathlib import Path

HEADER = "x-run-secret"


def create(run_dir):
    """Make the run's secret, unless it has one."""
    with contextlib.suppress(FileExistsError):
        file = os.open(Path(run_dir, "secret"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(file, secrets.token_hex(16).encode())
        os.close(file)


def read(run_dir):
    """The run's secret. Raises OSError or RuntimeError if there is none."""
    found = Path(run_dir, "secret").read_text()
    if not found:
        raise RuntimeError(f"{run_dir}/secret is empty: delete it, and start the run again")
    return found


def header(run_dir):
    return {HEADER: read(run_dir)}

"""The secret of a run, in out/<run>/secret, for its owner alone: who knows it may give its engines orders.

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
        with open(file, "w") as out:
            out.write(secrets.token_hex(16))


def header(run_dir):
    """The header that an engine of this run asks for."""
    return {HEADER: Path(run_dir, "secret").read_text()}

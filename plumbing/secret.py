"""The run's secret, out/<run>/secret: engines obey whoever knows it.

The launcher makes it, for the owner of the run alone; whoever calls an engine sends it in a header.
"""

import secrets
from pathlib import Path

SECRET_HEADER = "x-run-secret"


def make_secret(run_dir):
    """Make out/<run>/secret, unless it is there, readable by its owner alone."""
    path = Path(run_dir, "secret")
    if not path.exists() or not path.read_text():
        path.touch(0o600)
        path.write_text(secrets.token_hex(16))


def secret_header(run_dir):
    """The header that an engine of this run asks for."""
    return {SECRET_HEADER: Path(run_dir, "secret").read_text()}

"""The run's secret, in out/<run>/secret: an engine obeys every request that contains it.

The launcher makes the file, which only the run's owner can read. The actor and the trainer send the
secret to engines in a header of each request.
"""

import secrets
from pathlib import Path

SECRET_HEADER = "x-run-secret"


def make_secret(run_dir):
    """Make out/<run>/secret, which only its owner can read, unless it is there."""
    path = Path(run_dir, "secret")
    if not path.exists() or not path.read_text():
        path.touch(0o600)
        path.write_text(secrets.token_hex(16))


def secret_header(run_dir):
    """The header that each request to an engine of this run must have, as a dict."""
    return {SECRET_HEADER: Path(run_dir, "secret").read_text()}

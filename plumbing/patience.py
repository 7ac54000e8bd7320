"""How long a stage waits for another one before the run counts as stalled.

Engines may be started in the meantime, at first or after they have died. That takes as long as --start_timeout
allows, and the launcher ends the run if nothing comes of it (plumbing/supervise.py): --stall_timeout is for the time
in which engines answer.
"""

import time
from pathlib import Path

from plumbing.supervise import RESTARTS

# seconds between two looks at which engines answer
LOOK = 1.0


def longest_wait(config):
    """Seconds that a stage may wait for another one, engines' starts included."""
    return config.stall_timeout + (RESTARTS + 1) * config.start_timeout


class Patience:
    """The clock of a stage that waits; it is started anew whenever there is progress."""

    def __init__(self, config, run_dir):
        self.config = config
        self.engines = Path(run_dir, "engines")
        self.start()

    def start(self):
        """There is progress: the wait begins now."""
        self.started = self.looked = time.monotonic()
        # seconds in which engines answered
        self.waited = 0.0

    def check(self, complaint):
        """TimeoutError, with this complaint, if the wait has been too long. Cheap: it may be called all the time."""
        now = time.monotonic()
        if now < self.looked + LOOK:
            return
        # an engine is listed there while it runs and has begun to answer
        if any(self.engines.glob("*.json")):
            self.waited += now - self.looked
        self.looked = now
        if self.waited > self.config.stall_timeout:
            raise TimeoutError(f"{complaint} for {self.config.stall_timeout:.0f} s")
        if now > self.started + longest_wait(self.config):
            limit = f"{longest_wait(self.config):.0f} s, in most of which no engine answered"
            raise TimeoutError(f"{complaint} for {limit}")

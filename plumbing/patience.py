"""The time that a stage waits for another one before the run counts as stalled.

--stall_timeout limits only the time in which engines answer. While engines are started, at first or
after they have died, the stage goes on waiting: a start may take --start_timeout seconds, and the
launcher ends the run if it fails (plumbing/supervise.py).
"""

import time
from pathlib import Path

from plumbing.supervise import RESTARTS

# seconds between two looks at the folder of the engines that answer
LOOK_INTERVAL = 1.0


def longest_start(config):
    """The most seconds that the launcher may take to start an engine, with all restarts."""
    return (RESTARTS + 1) * config.start_timeout


def longest_wait(config):
    """The most seconds that a stage may wait for another one, with all starts of engines."""
    return config.stall_timeout + longest_start(config)


class Patience:
    """The clock of a stage that waits. Call `start` at any progress, and `check` while it waits."""

    def __init__(self, config, run_dir):
        self.config = config
        self.engines = Path(run_dir, "engines")
        self.logs = Path(run_dir, "logs")
        self.start()

    def start(self):
        """Start the clock anew, because there was progress."""
        self.started = time.monotonic()
        self.looked = self.started
        # seconds of this wait in which an engine answered
        self.waited = 0.0

    def check(self, complaint):
        """Raise TimeoutError if the wait has been too long. complaint: what did not happen.

        It is cheap: it looks at most once in LOOK_INTERVAL seconds.
        """
        now = time.monotonic()
        if now < self.looked + LOOK_INTERVAL:
            return
        # this folder lists the engines that run and have begun to answer
        if any(self.engines.glob("*.json")):
            self.waited += now - self.looked
        self.looked = now
        if self.waited > self.config.stall_timeout:
            raise TimeoutError(
                f"{complaint} for {self.config.stall_timeout:.0f} s: the files in {self.logs} say "
                "which stage hangs; if it is only slow, raise --stall_timeout"
            )
        if now > self.started + longest_wait(self.config):
            raise TimeoutError(
                f"{complaint} for {longest_wait(self.config):.0f} s, in most of which no engine "
                "answered"
            )

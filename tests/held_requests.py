"""A plugin of vLLM that holds one request in its middle until the next weight update.

Tests use it to have an update reach a request in its middle, however fast engine and trainer are.
vLLM itself stays unmodified: it loads its registered "general plugins" in every process. At each
weight version of a range the first request that has sampled TOKENS tokens is left out of the
engine's steps, with its KV cache, until the engine has the next version; all others go on.
Requests with a seed, those of evaluations, are never held, and no request is held twice.
"""

import os
import sys
from pathlib import Path

# A request is held when it has sampled so many tokens
TOKENS = 3
# The line in the engine's log for each held request, with the weight version at which it is held
LINE = r"held a request at version (\d+)"


def plugin(folder, versions):
    """Make a folder that registers the plugin; return the environment of engines that load it.

    versions: the range of weight versions at which a request is held.
    """
    held = f"{versions.start} {versions.stop} {versions.step}"
    return registered(folder, __file__) | {"HELD_VERSIONS": held}


def registered(folder, file):
    """Make a folder that registers a file with the function `register` as a plugin of vLLM.

    Returns the environment of engines that load it.
    """
    name = Path(file).stem
    about = Path(folder, f"{name}-1.dist-info")
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entry_points = f"[vllm.general_plugins]\n{name} = {name}:register\n"
    (about / "entry_points.txt").write_text(entry_points)
    Path(folder, f"{name}.py").symlink_to(Path(file).resolve())
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])}


class Holder:
    """Holds one request of the scheduler of this process at a time."""

    def __init__(self, versions):
        self.versions = versions
        # the engine's weight version, once it has one
        self.version = None
        self.request = None
        # The ids of all requests that are or were held
        self.known = set()

    def hold_one(self, running):
        """Before a step: hold one of the running requests if none is held."""
        is_held = self.request is not None and not self.request.is_finished()
        if is_held or self.version not in self.versions:
            return
        for request in running:
            is_new = request.request_id not in self.known and request.sampling_params.seed is None
            if is_new and request.num_output_tokens >= TOKENS:
                self.known.add(request.request_id)
                self.request = request
                # the scheduler leaves a request out of its steps until the one of this number
                request.next_decode_eligible_step = sys.maxsize
                print(f"held a request at version {self.version}", flush=True)
                return

    def go_on(self, version):
        """The engine has this version now: the request that waited for it goes on."""
        if self.request is not None:
            self.request.next_decode_eligible_step = 0
        self.request = None
        self.version = int(version)


def register():
    """Called by vLLM in each of its processes; the one with the scheduler makes use of it."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    holder = Holder(range(*map(int, os.environ["HELD_VERSIONS"].split())))
    schedule = Scheduler.schedule
    set_weight_version = EngineCore.set_weight_version

    def schedule_others(scheduler, *arguments, **named):
        holder.hold_one(scheduler.running)
        return schedule(scheduler, *arguments, **named)

    def set_and_go_on(core, weight_version):
        set_weight_version(core, weight_version)
        holder.go_on(weight_version)

    Scheduler.schedule = schedule_others
    EngineCore.set_weight_version = set_and_go_on

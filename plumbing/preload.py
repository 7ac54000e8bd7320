"""What the fork server of plumbing/sandbox.py imports, once, so that every worker is born with it.

Loading sympy takes seconds, forking some milliseconds. What to load comes in the environment, as JSON.
"""

import importlib
import json
import os
import signal
import sys

import plumbing.sandbox  # noqa: F401

wanted = json.loads(os.environ["SANDBOX_PRELOAD"])
# A worker runs the actor's own program again unless it finds it as its __main__ already.
sys.modules["__main__"].__file__ = wanted["main"]
signal.alarm(wanted["seconds"])
for name in wanted["tasks"]:
    task = importlib.import_module(f"tasks.{name}")
    if hasattr(task, "warm_up"):
        task.warm_up()
signal.alarm(0)

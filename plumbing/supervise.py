"""One process per engine: starts it, tells the run that it is there, starts it again if it dies or hangs.

    python -m plumbing.supervise RUN_DIR NAME URL RESTARTS START_TIMEOUT -- command...

Its own words go to stdout, the engine's to stderr: run.sh shows the former and logs both. While the
engine runs, RUN_DIR/engines/NAME.json says where; the trainer admits and drops what is listed there.
Deliberately absent: anything that knows vLLM, torch or the configuration.
"""

import contextlib
import ctypes
import http.client
import itertools
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from plumbing.queues import publish_json

ANSWER = 10.0  # seconds an engine has to say that it is healthy
HANGS = 3  # questions in a row left unanswered by an engine that hangs
FORGET = 30.0  # seconds of health after which earlier deaths do not count any more
GRACE = 3.0  # seconds an engine has to end by itself
PR_SET_CHILD_SUBREAPER = 36


def healthy(url):
    """Does GET url/health answer 200?"""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def watch(engine, url, start_timeout, file):
    """List the engine and wait for its end, or kill it if it hangs; seconds that it was healthy."""
    entry = {"url": url, "started": secrets.token_hex(8)}
    start = time.monotonic()
    healthy_since = None
    # what the list says
    listed = False
    failures = 0
    # seconds of loading after which it says so
    due = itertools.chain((10, 30), itertools.count(60, 60))
    next_word = next(due)
    while engine.poll() is None:
        # a continued run clears the list; a run directory out of reach for a moment is tried again
        with contextlib.suppress(OSError):
            if not file.exists() or listed != bool(healthy_since):
                listed = bool(healthy_since)
                file.parent.mkdir(exist_ok=True)
                publish_json(file, **entry, answers=listed)
        seconds = time.monotonic() - start
        if healthy(url):
            if not healthy_since:
                healthy_since = time.monotonic()
                print(f"{file.stem}: answers after {seconds:.0f} s", flush=True)
            failures = 0
        elif healthy_since:
            failures += 1
        if not healthy_since and seconds > next_word:
            print(f"{file.stem}: loading, {seconds:.0f} s", flush=True)
            next_word = next(due)
        too_late = not healthy_since and seconds > start_timeout
        if too_late or failures == HANGS:
            print(f"{file.stem} does not answer {url}/health: it is killed", flush=True)
            engine.kill()
        time.sleep(1)
    return time.monotonic() - healthy_since if healthy_since else 0.0


def stop(engine, file, others):
    """The end of an engine, of everything that it has started, and of its place in the list.

    others: children of this process that were there before it.
    """
    engine.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.wait(GRACE)
    left = [p for p in psutil.Process().children(recursive=True) if p not in others]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, GRACE)
    file.unlink(missing_ok=True)


def main(run_dir, name, url, restarts, start_timeout, *command):
    """Returns the exit code of the engine's last death once its restarts are used up."""
    # what the engine leaves behind becomes this process's child, and is found by `stop`
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    file = Path(run_dir, "engines", f"{name}.json")
    file.unlink(missing_ok=True)
    # a shell that starts this process may leave it what writes its log
    others = psutil.Process().children(recursive=True)
    deaths = 0
    while True:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            seconds = watch(engine, url, float(start_timeout), file)
        finally:
            stop(engine, file, others)
        # as a shell says it: 128 + the signal that killed it
        code = engine.returncode if engine.returncode >= 0 else 128 - engine.returncode
        deaths = 1 if seconds > FORGET else deaths + 1
        if deaths > int(restarts):
            print(f"{name} died with exit code {code}, after {restarts} restarts", flush=True)
            return code or 1
        print(f"{name} died with exit code {code}, restart {deaths} of {restarts}", flush=True)
        time.sleep(1 + 5 * (deaths - 1) ** 2)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    arguments = sys.argv[1:]
    arguments.remove("--")
    sys.exit(main(*arguments))

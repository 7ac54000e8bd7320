"""Programs that nobody trusts, where they can harm nothing: `await run_python(code)` is what one has printed.

bubblewrap (Debian's package of that name) gives each one namespaces of its own: no network, no other process, no file
but Python's and an empty directory that is gone afterwards; a seccomp filter lets it start no process; limits on time,
memory, files and output end it. Where bubblewrap is not there or not permitted, `require` says so, and PIPELINE_NO_JAIL=1
runs programs with the limits alone. Deliberately absent: other languages, packages beyond Python's own.
"""

import asyncio
import contextlib
import functools
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
import sys

# bytes of memory, of all files together, of what is printed
MEMORY, FILES, OUTPUT = 512 << 20, 16 << 20, 10_000
SECONDS = 5.0
# programs at the same time: others wait
PLACES = asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))
# architecture as seccomp names it; system calls clone, clone3, and others that a program may not make: fork, vfork,
# unshare, setns, ptrace, bpf, io_uring_setup
CALLS = {
    "x86_64": (0xC000003E, 56, 435, (57, 58, 272, 308, 101, 321, 425)),
    "aarch64": (0xC00000B7, 220, 435, (97, 268, 117, 280, 425)),
}
THREAD = 0x10000  # of clone's flags
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ENOSYS, EPERM, KILL = 0x7FFF0000, 0x50000 | 38, 0x50000 | 1, 0x80000000


@functools.cache
def seccomp():
    """The filter, struct sock_filter's: threads may be made, processes not. glibc goes from clone3 back to clone."""
    architecture, clone, clone3, denied = CALLS[platform.machine()]
    # (code, value, instructions to skip if so, if not)
    program = [
        (LOAD, 4, 0, 0),
        (EQUAL, architecture, 1, 0),
        (RETURN, KILL, 0, 0),
        (LOAD, 0, 0, 0),
        # numbers of another calling convention
        (AT_LEAST, 0x40000000, 0, 1),
        (RETURN, KILL, 0, 0),
        (EQUAL, clone3, 0, 1),
        (RETURN, ENOSYS, 0, 0),
    ]
    for call in denied:
        program += [(EQUAL, call, 0, 1), (RETURN, EPERM, 0, 0)]
    program += [(EQUAL, clone, 0, 3), (LOAD, 16, 0, 0), (ANY_BIT, THREAD, 1, 0)]
    program += [(RETURN, EPERM, 0, 0), (RETURN, ALLOW, 0, 0)]
    return b"".join(struct.pack("=HBBI", code, yes, no, k) for code, k, yes, no in program)


def filter_file():
    """An open file that holds the filter."""
    file = os.fdopen(os.memfd_create("seccomp"), "wb")
    file.write(seccomp())
    file.flush()
    file.seek(0)
    return file


def command(filter_fd):
    """Of a jail with a Python in it, which runs what comes over stdin."""
    python = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return [python, "-I", "-"]
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for path in sorted({"/usr", "/lib", "/lib64", sys.base_prefix}):
        words += ["--ro-bind-try", path, path]
    for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
        words += ["--dev-bind", path, path]
    words += ["--size", str(FILES), "--tmpfs", "/work", "--remount-ro", "/", "--chdir", "/work"]
    return [*words, "--cap-drop", "ALL", "--seccomp", str(filter_fd), "--", python, "-I", "-"]


def limit(seconds):
    """Of a new process."""
    cpu = int(seconds) + 1
    for what, most in [("AS", MEMORY), ("CPU", cpu), ("FSIZE", FILES), ("NOFILE", 64), ("CORE", 0)]:
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (most, most))


async def run_python(code, seconds=SECONDS):
    """What a program prints, errors too, at most OUTPUT bytes of it; a last line in brackets says what limit ended it."""
    async with PLACES:
        with filter_file() as file:
            process = await asyncio.create_subprocess_exec(
                *command(file.fileno()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[file.fileno()],
                start_new_session=True,
                preexec_fn=functools.partial(limit, seconds),
            )
        printed = bytearray()
        ended = ""
        try:
            await asyncio.wait_for(talk(process, code, printed), seconds)
        except TimeoutError:
            ended = f"\n[ended after {seconds:g} s]"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # asyncio's wait does not return before all output is read
            await process.stdout.read()
            await process.wait()
    if len(printed) > OUTPUT:
        ended = f"\n[ended after {OUTPUT} bytes]"
    return printed[:OUTPUT].decode(errors="replace") + ended


async def talk(process, code, printed):
    """Give it its program; collect what it prints until it ends, or has printed too much."""
    with contextlib.suppress(ConnectionError):
        process.stdin.write(code.encode(errors="replace"))
        await process.stdin.drain()
    process.stdin.close()
    while len(printed) <= OUTPUT:
        part = await process.stdout.read(4096)
        if not part:
            break
        printed += part


@functools.cache
def require():
    """Raise ValueError, one line, where programs would not be jailed and nobody has said that this is all right."""
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return
    words = "PIPELINE_NO_JAIL=1 runs programs with your own rights instead"
    if not shutil.which("bwrap"):
        raise ValueError(f"programs of the model need bubblewrap: apt install bubblewrap; {words}")
    with filter_file() as file:
        how = dict(pass_fds=[file.fileno()], capture_output=True, timeout=60)
        done = subprocess.run(command(file.fileno()), input=b"print('jailed')", **how)
    if done.stdout != b"jailed\n":
        why = done.stderr.decode(errors="replace").strip()[-200:]
        raise ValueError(f"bubblewrap is not permitted here: {why}; {words}")

"""Programs that nobody trusts, where they can harm nothing: `await run_python(code)` is what one has printed.

bubblewrap (Debian's package of that name) gives each one namespaces of its own: no network, no other process, no file
but Python's and an empty directory that is gone afterwards; a seccomp filter lets it start no process; limits on time,
memory, files and output end it. Where bubblewrap is not there or not permitted, `require` says so, and PIPELINE_NO_JAIL=1
runs programs with the limits alone. Deliberately absent: other languages, packages beyond Python's own.
"""

import asyncio
import ctypes
import errno
import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile

# bytes of memory, of all files together, of what is printed; time limit
MEMORY, FILES, OUTPUT, SECONDS = 512 << 20, 16 << 20, 10_000, 5.0
# programs at the same time: others wait
PLACES = asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))
# system calls that a program may not make; the last ones give memory that no limit counts
DENIED = "fork vfork unshare setns ptrace bpf io_uring_setup".split()
DENIED += "shmget msgget memfd_create memfd_secret".split()
# of seccomp.h: actions, a comparison; of clone's flags
ALLOW, ERRNO, MASKED_EQUAL, THREAD = 0x7FFF0000, 0x50000, 7, 0x10000


def filter_file():
    """An open file with libseccomp's filter: threads may be made, processes not. Raises OSError without that library."""
    file = os.fdopen(os.memfd_create("seccomp"), "wb")
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return file
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ALLOW))
    # struct scmp_arg_cmp: argument & mask == value
    no_thread = struct.pack("IiQQ", 0, MASKED_EQUAL, THREAD, 0)
    denied = [(name, errno.EPERM, 0) for name in DENIED]
    # glibc goes from clone3 back to clone
    for name, error, n in [*denied, ("clone3", errno.ENOSYS, 0), ("clone", errno.EPERM, 1)]:
        call = library.seccomp_syscall_resolve_name(name.encode())
        library.seccomp_rule_add_array(rules, ERRNO | error, call, n, no_thread)
    library.seccomp_export_bpf(rules, file.fileno())
    library.seccomp_release(rules)
    file.seek(0)
    return file


def command(filter_fd):
    """Of a jail with a Python in it, which runs what comes over stdin."""
    python = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    limits = f"--as={MEMORY} --cpu={round(SECONDS) + 1} --fsize={FILES} --nofile=64 --core=0"
    words = ["prlimit", *limits.split()]
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return [*words, python, "-I", "-"]
    words += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for path in sorted({"/usr", "/lib", "/lib64", sys.base_prefix}):
        words += ["--ro-bind-try", path, path]
    for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
        words += ["--dev-bind", path, path]
    words += ["--size", str(FILES), "--tmpfs", "/work", "--remount-ro", "/", "--chdir", "/work"]
    return [*words, "--cap-drop", "ALL", "--seccomp", str(filter_fd), "--", python, "-I", "-"]


async def run_python(code, seconds=SECONDS):
    """What a program prints, errors too, at most OUTPUT bytes of it; a last line in brackets says if its time was over."""
    async with PLACES:
        return await asyncio.to_thread(run, code, seconds)


def run(code, seconds):
    with filter_file() as file, tempfile.TemporaryFile() as printed:
        how = dict(pass_fds=[file.fileno()], stdout=printed, stderr=printed)
        ended = ""
        try:
            subprocess.run(command(file.fileno()), input=code.encode(), timeout=seconds, **how)
        except subprocess.TimeoutExpired:
            ended = f"\n[ended after {seconds:g} s]"
        printed.seek(0)
        return printed.read(OUTPUT).decode(errors="replace") + ended


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

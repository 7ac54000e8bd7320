"""Runs programs that nobody trusts, so that they can harm nothing.

`await run_python(code)` returns what a program prints. bubblewrap (Debian's package of that name)
gives each program namespaces of its own: it has no network, and sees no other process and no files
but Python's own and an empty directory, which is deleted afterwards. A seccomp filter keeps it from
starting processes, and limits on time, memory, files and output end it. If bubblewrap is missing or
not permitted, `require` says so; PIPELINE_NO_JAIL=1 then runs programs with the limits alone.
Deliberately absent: other languages, packages beyond Python's standard library.
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

# limits of a program: bytes of memory
MEMORY = 512 << 20
# bytes of all its files together
FILES = 16 << 20
# bytes of its output that are kept
OUTPUT = 10_000
# seconds
SECONDS = 5.0
# number of programs that run at the same time
PLACES = asyncio.Semaphore(2 * len(os.sched_getaffinity(0)))
# system calls that a program may not make
DENIED = "fork vfork unshare setns ptrace bpf io_uring_setup".split()
# these give memory that no limit counts
DENIED += "shmget msgget memfd_create memfd_secret".split()
# constants of seccomp.h: SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(0), SCMP_CMP_MASKED_EQ
ALLOW = 0x7FFF0000
ERRNO = 0x50000
MASKED_EQUAL = 7
# CLONE_THREAD, a flag of clone
THREAD = 0x10000


def filter_file():
    """An open file with a seccomp filter that permits new threads, but no new processes.

    With PIPELINE_NO_JAIL=1 it is empty. Raises OSError if libseccomp is missing.
    """
    file = os.fdopen(os.memfd_create("seccomp"), "wb")
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return file
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ALLOW))
    # struct scmp_arg_cmp: argument 0 of the call, its flags, & THREAD == 0
    makes_no_thread = struct.pack("IiQQ", 0, MASKED_EQUAL, THREAD, 0)
    # (system call, the error that it returns, number of conditions under which it is denied)
    denied = [(name, errno.EPERM, 0) for name in DENIED]
    # without clone3, glibc uses clone, whose flags a filter can see
    denied.append(("clone3", errno.ENOSYS, 0))
    denied.append(("clone", errno.EPERM, 1))
    for name, error, conditions in denied:
        call = library.seccomp_syscall_resolve_name(name.encode())
        library.seccomp_rule_add_array(rules, ERRNO | error, call, conditions, makes_no_thread)
    library.seccomp_export_bpf(rules, file.fileno())
    library.seccomp_release(rules)
    file.seek(0)
    return file


def command(filter_fd):
    """The command line of a jail with a Python in it, which runs the program that stdin holds."""
    python = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    limits = f"--as={MEMORY} --cpu={round(SECONDS) + 1} --fsize={FILES} --nofile=64 --core=0"
    arguments = ["prlimit", *limits.split()]
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return [*arguments, python, "-I", "-"]
    arguments += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for path in sorted({"/usr", "/lib", "/lib64", sys.base_prefix}):
        arguments += ["--ro-bind-try", path, path]
    for path in ("/dev/null", "/dev/zero", "/dev/urandom"):
        arguments += ["--dev-bind", path, path]
    arguments += ["--size", str(FILES), "--tmpfs", "/work", "--remount-ro", "/"]
    arguments += ["--chdir", "/work", "--cap-drop", "ALL", "--seccomp", str(filter_fd)]
    return [*arguments, "--", python, "-I", "-"]


async def run_python(code, seconds=SECONDS):
    """The output of a program, errors included: its first OUTPUT bytes.

    If its time was over, a last line in brackets says so.
    """
    async with PLACES:
        return await asyncio.to_thread(run, code, seconds)


def run(code, seconds):
    """The blocking part of `run_python`, for a thread."""
    with filter_file() as file, tempfile.TemporaryFile() as output:
        note = ""
        try:
            subprocess.run(
                command(file.fileno()),
                input=code.encode(),
                stdout=output,
                stderr=output,
                pass_fds=[file.fileno()],
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            note = f"\n[ended after {seconds:g} s]"
        output.seek(0)
        return output.read(OUTPUT).decode(errors="replace") + note


@functools.cache
def require():
    """Raise ValueError if programs cannot be jailed here and PIPELINE_NO_JAIL is not 1."""
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return
    if not shutil.which("bwrap"):
        raise ValueError(
            "programs of the model need bubblewrap: apt install bubblewrap; PIPELINE_NO_JAIL=1 "
            "runs programs with your own rights instead"
        )
    with filter_file() as file:
        trial = subprocess.run(
            command(file.fileno()),
            input=b"print('jailed')",
            capture_output=True,
            pass_fds=[file.fileno()],
            timeout=60,
        )
    if trial.stdout != b"jailed\n":
        reason = trial.stderr.decode(errors="replace").strip()[-200:]
        raise ValueError(
            f"bubblewrap is not permitted here: {reason}; PIPELINE_NO_JAIL=1 runs programs with "
            "your own rights instead"
        )

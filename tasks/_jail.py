"""Runs programs that nobody trusts, so that they can harm nothing.

bubblewrap (Debian's package of that name) gives each program namespaces of its own: it has no
network and sees no other process. There are two kinds of jail:

`await run_python(code)` returns what a Python program prints. The program can read /usr, /lib,
/lib64 and Python's own directory, and can write only into an empty directory, which is deleted
afterwards. A seccomp filter keeps it from starting processes, and limits on time, memory, files and
output end it. Packages beyond Python's standard library are deliberately absent. With
PIPELINE_NO_JAIL=1 these programs run without a jail, with your own rights and the limits alone.

`Shell` runs the commands of a shell (tasks/shell.py). They may start processes, and find the files
that earlier commands of the same shell have left. It never works without a jail.

If bubblewrap is missing or not permitted, `require` and `require_shell` raise an error.
"""

import asyncio
import ctypes
import errno
import functools
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

# limits of a program: bytes of memory
MEMORY = 512 << 20
# bytes of all its files together
FILES = 16 << 20
# bytes of its output that are kept
OUTPUT = 10_000
# seconds
SECONDS = 5.0
# the threads that wait for programs; as many programs run at the same time
THREADS = ThreadPoolExecutor(2 * len(os.sched_getaffinity(0)))
# system calls that a program may not make
DENIED = "unshare setns ptrace process_vm_writev bpf io_uring_setup".split()
# these give memory that no limit counts
DENIED += "shmget msgget memfd_create memfd_secret".split()
# constants of seccomp.h: SCMP_ACT_ALLOW, SCMP_ACT_ERRNO(0), SCMP_CMP_MASKED_EQ
ALLOW = 0x7FFF0000
ERRNO = 0x50000
MASKED_EQUAL = 7
# flags of clone: CLONE_THREAD, CLONE_NEWUSER
THREAD = 0x10000
NEW_USER = 0x10000000


def filter_file(permits_processes=False):
    """An open file with a seccomp filter that permits new threads, and new processes or none.

    With PIPELINE_NO_JAIL=1 it is empty. Raises OSError if libseccomp is missing.
    """
    file = os.fdopen(os.memfd_create("seccomp"), "wb")
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        return file
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ALLOW))
    # struct scmp_arg_cmp: the flags, argument 0 of clone, & mask == value
    mask, value = (NEW_USER, NEW_USER) if permits_processes else (THREAD, 0)
    is_denied = struct.pack("IiQQ", 0, MASKED_EQUAL, mask, value)
    # (system call, the error that it returns, number of conditions under which it is denied)
    denied = [(name, errno.EPERM, 0) for name in DENIED]
    if not permits_processes:
        denied += [("fork", errno.EPERM, 0), ("vfork", errno.EPERM, 0)]
    # without clone3, glibc uses clone, whose flags a filter can see
    denied.append(("clone3", errno.ENOSYS, 0))
    denied.append(("clone", errno.EPERM, 1))
    for name, error, conditions in denied:
        call = library.seccomp_syscall_resolve_name(name.encode())
        library.seccomp_rule_add_array(rules, ERRNO | error, call, conditions, is_denied)
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
    return await asyncio.get_running_loop().run_in_executor(THREADS, run, code, seconds)


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


# ---- a shell


# limits of a command in a shell: bytes of memory of a process
SHELL_MEMORY = 2 << 30
# number of processes
PROCESSES = 64
# bytes of the files in each directory; all together may have twice as much
SHELL_FILES = 64 << 20
# what a shell sees of this machine, to read
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHELL_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
# Two scripts that run in the jail: unpack the files, run a command, end what it has left running,
# and write a result to the descriptor $result. Their arguments: the descriptors of the result and
# of the tests, the seconds, the directory and the text of the command, the number of writable
# directories, their names, and the variables of the command as NAME=VALUE. The programs that the
# scripts themselves use are those of SHELL_ENV's PATH, which no command can change.
ARGUMENTS = """
result=$1 tests=$2 seconds=$3 folder=$4 command=$5
writable=("${@:7:$6}") variables=("${@:7+$6}")
"""
RUN = """
mkdir -p "$folder" && cd "$folder" || cd /
(
    eval "exec $result>&- $tests>&-"
    exec timeout --kill-after=1 "$seconds" env -- "${variables[@]}" "$BASH" -c -- "$command" \\
        < /dev/null
)
code=$?
kill -KILL -1 2> /dev/null
"""
# the last bytes of a result that is complete
COMPLETE = b"complete"
COMMAND_SCRIPT = f"""{ARGUMENTS}
tar --extract --no-same-owner --directory / || exit 125
{RUN}
tar --create --sparse --directory / "${{writable[@]}}" >&"$result" || exit 125
printf {COMPLETE.decode()} >&"$result"
exit $code
"""
# What commands have put into /tests and /logs is not unpacked. A reward in both files is none.
TEST_SCRIPT = f"""{ARGUMENTS}
tar --extract --no-same-owner --directory / --anchored --exclude=tests --exclude=logs || exit 125
[ -z "$(ls -A /tests)$(ls -A /logs)" ] || exit 125
tar --extract --no-same-owner --directory / <&"$tests" && mkdir /logs/verifier || exit 125
{RUN}
shopt -s nullglob
rewards=(/logs/verifier/reward.{{json,txt}})
for file in "${{rewards[@]}}"; do [ -f "$file" ] && written+=("$file"); done
[ "${{#written[@]}}" = 1 ] && head -c 100000 "${{written[0]}}" >&"$result" &&
    printf {COMPLETE.decode()} >&"$result"
"""
# Variables that would let files of the model's take part in its grading
UNTRUSTED = re.compile("BASH_ENV|ENV|LD_.*|PYTHON.*|HOME|SHELLOPTS|BASHOPTS|PS4|IFS|TMPDIR")


class Shell:
    """A shell in a jail: commands run one after the other, and find the files that others left.

    folder: the directory in which commands run. writable: the names of the directories below / that
    they may change, that of `folder` among them. files: a tar of what is in these at the beginning,
    an open file. rootfs: the directory that a shell sees as /, instead of this machine's programs.
    env: {name: value} of variables of the commands, beside those of SHELL_ENV.

    Each command has a jail of its own, without a network. When it ends, all processes that it has
    started are ended, too. Files are packed into a tar from one command to the next, so that their
    size has a limit. Commands believe that they are root.
    """

    def __init__(self, folder, writable, files, rootfs=None, env=None):
        self.folder = folder
        self.writable = writable
        self.files = files
        self.rootfs = rootfs
        self.env = env or {}
        # the seconds that commands have taken so far, without the time that they waited for others
        self.seconds = 0.0
        # the jail that runs now
        self.process = None

    async def run(self, command, seconds):
        """Run a command: (exit code, its output; of a long one the beginning and the end).

        The exit code is 124 if the command's time was over.
        """
        return await self._in_thread(self.run_now, command, seconds)

    async def test(self, folder, seconds):
        """Run test.sh of a directory as /tests/test.sh: (the text of its reward file, its output).

        The script writes a reward into /logs/verifier/reward.txt or reward.json; without one the
        text is "". None of the files is kept.
        """
        return await self._in_thread(self.test_now, folder, seconds)

    async def _in_thread(self, work, *arguments):
        try:
            return await asyncio.get_running_loop().run_in_executor(THREADS, work, *arguments)
        except asyncio.CancelledError:
            # The attempt is over: its jail must not keep others waiting.
            if self.process is not None:
                self.process.kill()
            raise

    def run_now(self, command, seconds):
        """`run`, for a thread."""
        if "\0" in command or len(command.encode(errors="replace")) > 100_000:
            return 126, "bash: this is too long for a command, or no text"
        code, output, files = self._jailed(COMMAND_SCRIPT, command, seconds)
        if files is None:
            output += "\n[the files are as they were before this command: they could not be kept]"
        else:
            self.files = files
        return code, output

    def test_now(self, folder, seconds):
        """`test`, for a thread."""
        with packed({"tests": folder}, follow_links=True) as tests:
            command = 'exec "$BASH" /tests/test.sh'
            _, output, reward = self._jailed(TEST_SCRIPT, command, seconds, tests)
        return "" if reward is None else reward.read().decode(errors="replace"), output

    def _jailed(self, script, command, seconds, tests=None):
        """(exit code, output, the result as an open file; None if it is not complete)."""
        with (
            filter_file(permits_processes=True) as filtered,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as nothing,
        ):
            result = tempfile.TemporaryFile()
            tests = tests or nothing
            self.files.seek(0)
            tests.seek(0)
            passed = [result.fileno(), tests.fileno()]
            arguments = [*map(str, passed), str(seconds), self.folder, command]
            arguments += [str(len(self.writable)), *self.writable]
            env = self.env if script == COMMAND_SCRIPT else self._trusted_env()
            arguments += [f"{name}={value}" for name, value in env.items()]
            began = time.monotonic()
            self.process = subprocess.Popen(
                [*self._command(filtered.fileno()), "bash", "-c", script, "jail", *arguments],
                stdin=self.files,
                stdout=output,
                stderr=output,
                pass_fds=[filtered.fileno(), *passed],
            )
            try:
                # The script ends the command. This limit is for a command that has stopped the
                # script, and for a machine that is too busy to start the jail.
                code = self.process.wait(seconds + 30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                code = 124
            self.seconds += time.monotonic() - began
            text = beginning_and_end(output)
        size = result.seek(0, os.SEEK_END)
        end = size - len(COMPLETE)
        result.seek(max(end, 0))
        # At its limit a tar may have been cut off after bytes that look like these.
        if result.read() != COMPLETE or size >= 2 * SHELL_FILES:
            return code, text, None
        result.truncate(end)
        result.seek(0)
        return code, text, result

    def _trusted_env(self):
        """The variables of test.sh: they let no file that commands can write take part in it."""
        env = {k: v for k, v in self.env.items() if not UNTRUSTED.fullmatch(k)}
        path = [x for x in env.get("PATH", "").split(":") if self._is_read_only(x)]
        return env | {"PATH": ":".join([*path, SHELL_ENV["PATH"]]), "PYTHONNOUSERSITE": "1"}

    def _is_read_only(self, path):
        """Can no command write into this directory? False for paths that might lead anywhere."""
        root, top, *below = (*PurePosixPath(path).parts, "", "")
        return root == "/" and top not in ("", "..", *self.writable) and ".." not in below

    def _command(self, filter_fd):
        """The beginning of a command line that runs a program in the jail."""
        arguments = []
        if os.geteuid() == 0:
            # The kernel does not limit the number of root's processes, so root starts jails as the
            # user nobody.
            arguments += "setpriv --reuid=65534 --regid=65534 --clear-groups".split()
        arguments += ["prlimit", f"--as={SHELL_MEMORY}", f"--fsize={2 * SHELL_FILES}"]
        arguments += ["--nofile=256", "--core=0"]
        arguments += "bwrap --unshare-all --die-with-parent --new-session --clearenv".split()
        # Like root, commands may read and write all files in the jail, whatever the files' rights.
        arguments += "--uid 0 --gid 0 --cap-drop ALL --cap-add CAP_DAC_OVERRIDE".split()
        if self.rootfs is None:
            for path in SYSTEM:
                arguments += ["--ro-bind-try", path, path]
        else:
            for entry in sorted(Path(self.rootfs).iterdir()):
                if entry.is_symlink():
                    arguments += ["--symlink", os.readlink(entry), f"/{entry.name}"]
                elif entry.name not in (*self.writable, "dev", "proc", "sys"):
                    arguments += ["--ro-bind", str(entry), f"/{entry.name}"]
        for path in DEVICES:
            arguments += ["--dev-bind", path, path]
        arguments += ["--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc"]
        for name in self.writable:
            arguments += ["--size", str(SHELL_FILES), "--tmpfs", f"/{name}"]
        arguments += ["--remount-ro", "/", "--seccomp", str(filter_fd)]
        for name, value in SHELL_ENV.items():
            arguments += ["--setenv", name, value]
        # This limit is set within the jail, where the processes of other jails do not count.
        return [*arguments, "--", "prlimit", f"--nproc={PROCESSES}"]


def beginning_and_end(file):
    """The text of a file; of more than OUTPUT bytes the first and the last half of as many."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size <= OUTPUT:
        return file.read().decode(errors="replace")
    first = file.read(OUTPUT // 2)
    file.seek(size - OUTPUT // 2)
    left_out = f"\n[{size - OUTPUT} bytes are left out]\n".encode()
    return (first + left_out + file.read(OUTPUT // 2)).decode(errors="replace")


def require_shell():
    """Raise ValueError if a shell cannot be jailed here."""
    if not (shutil.which("bwrap") and shutil.which("setpriv")):
        raise ValueError("commands of the model need bubblewrap: apt install bubblewrap")
    if os.environ.get("PIPELINE_NO_JAIL") == "1":
        raise ValueError("PIPELINE_NO_JAIL=1: a shell runs in a jail only: unset it")
    code, output = Shell("/work", ["work"], packed({})).run_now("echo jailed", 60)
    if (code, output) != (0, "jailed\n"):
        raise ValueError(f"bubblewrap is not permitted here: {output.strip()[-300:]}")


def packed(contents, follow_links=False):
    """A tar, an open file. contents: {path in it: the file or directory on this machine}.

    follow_links: symbolic links are replaced by what they point to. Raises ValueError if there are
    too many files.
    """
    file = tempfile.TemporaryFile()
    with tarfile.open(fileobj=file, mode="w", dereference=follow_links) as tar:
        for name, path in contents.items():
            tar.add(path, name)
    if file.tell() > SHELL_FILES:
        raise ValueError(
            f"{', '.join(map(str, contents.values()))}: {file.tell() >> 20} MB of files are more "
            f"than the {SHELL_FILES >> 20} MB that a shell may have (tasks/_jail.py, SHELL_FILES)"
        )
    return file

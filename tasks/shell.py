"""Work in a shell: the model writes commands, and a script of the task grades what they have done.

`--train_data` and `--eval_data` name directories that have a directory for each problem, in the
layout of Harbor (harborframework.com/docs/tasks):

    instruction.md      what is to be done
    tests/test.sh       runs after the model's last turn, and writes a number into
                        /logs/verifier/reward.txt, or {"reward": number} into reward.json
    environment/        the files at the beginning. Of a Dockerfile, WORKDIR says where commands run
                        (/app by default), COPY where files go (all go there if there is no COPY),
                        ENV sets variables
    environment/rootfs/ the file system that the shell sees as /, instead of this machine's
                        programs; `docker export` makes one from an image
    solution/solve.sh   a solution, for the check below
    task.toml           timeout_sec in [agent] and [verifier]

The last ```bash block of a turn is run, and its output comes back as the next message. A turn
without such a block is the last one. Each attempt has files of its own, in a jail without a network
(tasks/_jail.py).

    python -m tasks.shell DIRECTORY      the reward of doing nothing, and that of each solution

What cannot be had here is refused by name: Dockerfiles are not built, so one with RUN needs a
rootfs. Deliberately absent: a network, GPUs, several steps, services, processes that outlive a
command.
"""

import asyncio
import functools
import json
import os
import re
import shlex
import string
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from plumbing.episode import CutOff
from plumbing.sandbox import LARGEST, number
from tasks import _jail

# most turns of the model
TURNS = 10
# seconds of each command, of all commands of an attempt, and of test.sh
COMMAND_SECONDS = 30.0
AGENT_SECONDS = 300.0
TEST_SECONDS = 120.0
# number of characters of a command's output that the model sees: the first and the last ones
SHOWN = 2000
PROMPT = """{instruction}

Work in the directory {folder}. Write a command in a block like this one; its output will be sent \
to you:
```bash
ls
```
When the work is done, answer without such a block."""
REPLY = "Exit code {code}. Output:\n{output}"
# {section of task.toml, or key outside of sections: the keys that may be ignored, or "all"}
HARMLESS = {
    "agent": "timeout_sec setup_timeout_sec".split(),
    "verifier": ["timeout_sec"],
    "environment": "build_timeout_sec cpus memory memory_mb storage storage_mb".split()
    + ["allow_internet"],
} | dict.fromkeys("version schema_version task metadata source".split(), "all")
# files of environment/ that are not copied if there is no COPY
NOT_COPIED = ("Dockerfile", ".dockerignore")
# instructions of a Dockerfile that say nothing of files
IGNORED = "CMD ENTRYPOINT EXPOSE LABEL".split()
# directories below / that belong to the system, or to the grading
RESERVED = set("usr bin sbin lib lib64 etc dev proc sys tests logs".split())
ROOTFS = "environment/rootfs"


def problems(split, seed=0, data=""):
    """Dicts with prompt, source, where and folder. Raises ValueError for what cannot be used."""
    if not data:
        raise ValueError(
            "task shell needs directories of problems: --train_data DIRECTORY --eval_data DIRECTORY"
        )
    _jail.require_shell()
    found = []
    for directory in map(Path, map(str.strip, data.split(","))):
        folders = sorted(path.parent for path in directory.glob("*/instruction.md"))
        if not folders:
            raise ValueError(f"{directory}: has no directory with an instruction.md")
        for folder in folders:
            instruction = (folder / "instruction.md").read_text().strip()
            prompt = PROMPT.format(instruction=instruction, folder=layout(str(folder)).folder)
            named = dict(source=directory.name, where=str(folder), folder=str(folder))
            found.append(dict(prompt=prompt) | named)
    return found


# ---- a problem's directory


class Layout(NamedTuple):
    """A problem's directory, read. folder, writable, rootfs, env: see _jail.Shell.

    files: {path in the jail, without its first /: the file or directory on this machine}.
    agent_seconds, test_seconds: the time for all commands, and for test.sh.
    """

    folder: str
    writable: list
    files: dict
    rootfs: Path | None
    env: dict
    agent_seconds: float
    test_seconds: float

    def shell(self):
        """A new Shell; it reads the files of the beginning."""
        return _jail.Shell(
            self.folder, self.writable, _jail.packed(self.files), self.rootfs, self.env
        )


class Dockerfile(NamedTuple):
    """What is understood of a Dockerfile.

    folder: its WORKDIR. copies: [(source, target)] of its COPY lines; None if it has none. env:
    {name: value} of its ENV lines.
    """

    folder: str = "/app"
    copies: list | None = None
    env: dict = {}


@functools.cache
def layout(folder):
    """The Layout of a problem's directory.

    Raises ValueError that names the file if something is missing or not supported.
    """
    folder = Path(folder)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: has no {name}")
    require_inside(folder)
    environment = folder / "environment"
    rootfs = readable_rootfs(folder / ROOTFS)
    settings = read_settings(folder / "task.toml", rootfs)
    dockerfile = read_dockerfile(environment / "Dockerfile", rootfs)
    for source in environment.glob("docker-compose*"):
        raise ValueError(f"{source}: services cannot be had here")
    copies = [] if rootfs else dockerfile.copies
    if copies is None:
        sources = [p for p in sorted(environment.glob("*")) if p.name not in NOT_COPIED]
        copies = [(source, dockerfile.folder + "/") for source in sources]
    changed = {top(dockerfile.folder), *(top(target) for _, target in copies)}
    for name in sorted(changed & RESERVED):
        raise ValueError(f"{folder}: /{name} cannot be changed here")
    writable = sorted({"tmp", "root", "logs", "tests", *changed})
    files = {}
    if rootfs:
        files = {name: rootfs / name for name in writable if (rootfs / name).is_dir()}
    for source, target in copies:
        name = (target + source.name if target.endswith("/") else target).lstrip("/")
        if name in files:
            raise ValueError(f"{folder}: COPY writes /{name} twice, which cannot be had here")
        files[name] = source
    found = Layout(
        dockerfile.folder,
        writable,
        files,
        rootfs,
        dockerfile.env,
        settings.get("agent", {}).get("timeout_sec", AGENT_SECONDS),
        settings.get("verifier", {}).get("timeout_sec", TEST_SECONDS),
    )
    # Both raise ValueError if there are too many files.
    _jail.packed({"tests": folder / "tests"}, follow_links=True).close()
    shell = found.shell()
    if rootfs or dockerfile.copies:
        code, output = shell.run_now("true", 60)
        if code:
            raise ValueError(
                f"{folder}: its shell does not start: {output.strip()[-300:]}; a rootfs needs "
                "bash, GNU tar and coreutils, and prlimit"
            )
    return found


def require_inside(folder):
    """Raise ValueError if a problem's files lie elsewhere, or where every command can read them."""
    home = folder.resolve()
    for system in _jail.SYSTEM:
        if Path(system).resolve() in home.parents:
            raise ValueError(f"{folder}: problems must not lie in {system}, which shells can read")
    for path, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            # Several problems may share files, by links to directories beside them.
            if home.parent not in Path(path, name).resolve().parents:
                raise ValueError(f"{path}/{name}: leads out of the directory of all problems")
        folders[:] = [name for name in folders if Path(path, name) != folder / ROOTFS]


def top(path):
    """The name of the directory below / that a path lies in."""
    parts = PurePosixPath(path).parts
    if len(parts) < 2 or ".." in parts:
        raise ValueError(f"{path}: files and commands need a directory below /")
    return parts[1]


def readable_rootfs(path):
    """The directory of a rootfs without symbolic links; None if there is none.

    Raises ValueError if a jail cannot read it.
    """
    if not path.is_dir():
        return None
    rootfs = path.resolve()
    if os.geteuid() == 0 and not all(p.stat().st_mode & 1 for p in [rootfs, *rootfs.parents]):
        raise ValueError(
            f"{rootfs}: jails that root starts run as the user nobody, who cannot read this "
            "directory: move it, or change the rights (chmod o+rx) of all directories above it"
        )
    return rootfs


def read_settings(path, rootfs):
    """The content of a task.toml, {} without one; ValueError for settings without support here."""
    if not path.exists():
        return {}
    try:
        settings = tomllib.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    for section, content in settings.items():
        harmless = HARMLESS.get(section, [])
        if harmless == "all":
            continue
        if rootfs and section == "environment":
            harmless = [*harmless, "docker_image"]
        content = content if isinstance(content, dict) else {"": content}
        # 0 GPUs, or an empty list of servers, ask for nothing
        unknown = sorted(key for key, value in content.items() if value and key not in harmless)
        if unknown:
            names = ", ".join(f"{section}.{key}".rstrip(".") for key in unknown)
            raise ValueError(f"{path}: {names}: this cannot be had here, see tasks/shell.py")
        seconds = content.get("timeout_sec", 1)
        if type(seconds) not in (int, float) or not 0 < seconds < 1e6:
            raise ValueError(f"{path}: {section}.timeout_sec {seconds}: must be a number above 0")
    return settings


def read_dockerfile(path, rootfs):
    """The Dockerfile at a path. Raises ValueError for a line that would have to be built.

    With a rootfs, in which it has been built, only WORKDIR and ENV matter.
    """
    read = Dockerfile()
    if not path.exists():
        return read
    for line in path.read_text().replace("\\\n", " ").splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if not instruction or instruction.startswith("#"):
            continue
        if instruction == "FROM":
            # The last stage is the image.
            read = Dockerfile()
        elif instruction == "WORKDIR":
            [folder] = words(rest, read.env) or [""]
            read = read._replace(folder=str(PurePosixPath(read.folder, folder)))
        elif instruction == "ENV":
            read = read._replace(env=read.env | variables(rest, read.env))
        elif instruction == "COPY" and not rootfs:
            copied = copies_of(path, words(rest, read.env), read.folder)
            read = read._replace(copies=(read.copies or []) + copied)
        elif instruction not in IGNORED and not rootfs:
            raise ValueError(
                f"{path}: {line.strip()[:100]}: Dockerfiles are not built here, and only WORKDIR, "
                "ENV and COPY are understood: build it elsewhere and put the result of `docker "
                f"export` into {path.parent}/rootfs"
            )
    return read


def words(text, env):
    """The words of a line of a Dockerfile, in which variables are replaced by their values."""
    known = _jail.SHELL_ENV | env
    replaced = [string.Template(word).safe_substitute(known) for word in shlex.split(text)]
    for word in replaced:
        if "$" in word:
            raise ValueError(
                f"{text}: a variable is not set, or not in the form $NAME or ${{NAME}}"
            )
    return replaced


def variables(text, env):
    """{name: value} of an ENV line, `A=1 B="x y"` or `A 1`. env: variables that it may use."""
    name, _, value = text.partition(" ")
    if "=" not in name:
        text = shlex.quote(f"{name}={value.strip()}")
    return dict(word.split("=", 1) for word in words(text, env))


def copies_of(path, given, work):
    """[(source, target)] of a COPY line's words; a target that ends with / is a directory."""
    *sources, target = given
    is_folder = target.endswith(("/", ".")) or len(sources) > 1
    target = str(PurePosixPath(work, target))
    # Directories below / are there before anything is copied, and so is WORKDIR.
    is_folder = is_folder or target == work or len(PurePosixPath(target).parts) < 3
    copies = []
    for source in sources:
        origin = path.parent / source.lstrip("/")
        inside = origin.resolve()
        if path.parent.resolve() not in (inside, *inside.parents) or not origin.exists():
            raise ValueError(f"{path}: COPY {' '.join(given)}: {source} is not in {path.parent}")
        if origin.is_dir():
            # As in Docker, what is in the directory is copied, and not the directory.
            names = [p for p in sorted(origin.glob("*")) if p.name != "Dockerfile"]
            copies += [(p, target.rstrip("/") + "/") for p in names]
        else:
            copies.append((origin, target.rstrip("/") + "/" * is_folder))
    return copies


async def grade(shell, problem):
    """The reward that test.sh writes, a number; the outcome "unparsable" if it writes none."""
    seconds = layout(problem["folder"]).test_seconds
    text, _ = await shell.test(Path(problem["folder"], "tests"), seconds)
    try:
        value = number(json.loads(text)["reward"] if "{" in text else float(text))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "unparsable"
    return value if abs(value) <= LARGEST else "unparsable"


# ---- an attempt


def command_of(text):
    """The content of a text's last ```bash block, which need not be closed; None without one."""
    blocks = re.findall(r"```(?:bash|sh|shell)\n(.*?)(?:```|$)", text, re.DOTALL)
    return blocks[-1] if blocks else None


def shortened(text):
    """The beginning and the end of a text, if it is long."""
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]}\n[...]\n{text[-SHOWN // 2 :]}"


async def episode(problem, model):
    """The reward that the problem's test.sh writes after the model's last turn."""
    shell = await asyncio.to_thread(layout(problem["folder"]).shell)
    seconds = layout(problem["folder"]).agent_seconds
    message = problem["prompt"]
    commands = 0
    for turn in range(TURNS):
        try:
            text = await model(message)
        except CutOff:
            if not model.turns:
                raise
            break
        command = command_of(text)
        left = seconds - shell.seconds
        if command is None or not model.finished or turn == TURNS - 1 or left <= 0:
            break
        code, output = await shell.run(command, min(COMMAND_SECONDS, left))
        commands += 1
        message = REPLY.format(code=code, output=shortened(output.strip()))
    model.log(commands=commands)
    return await grade(shell, problem)


# ---- the check of a directory of problems


async def check(problem):
    """(the reward of doing nothing, a text about that of the solution) of a problem."""
    found = layout(problem["folder"])
    nothing = await grade(found.shell(), problem)
    solution = Path(problem["folder"], "solution")
    if not (solution / "solve.sh").exists():
        return nothing, "there is no solution"
    files = found.files | {"solution": solution}
    shell = found._replace(writable=[*found.writable, "solution"], files=files).shell()
    code, _ = await shell.run("bash /solution/solve.sh", found.agent_seconds)
    return nothing, f"{await grade(shell, problem)} after its solution, exit code {code}"


def main(directories):
    for problem in problems("test", data=",".join(directories)):
        nothing, solved = asyncio.run(check(problem))
        print(f"{problem['where']}: {nothing} without commands; {solved}")


if __name__ == "__main__":
    main(sys.argv[1:])

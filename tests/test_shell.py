"""The task shell: problems in Harbor's layout, and what commands in its jail may do.

bubblewrap, the commands and the scripts that grade are real. The model is FAKE.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from conftest import jail_problem, wait_until
from plumbing.episode import CutOff
from tasks import _jail, shell

pytestmark = pytest.mark.skipif(jail_problem() != "", reason=jail_problem())

TEST = 'if [ "$(cat sum.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


def make_problem(folder, files=None):
    """Write the directory of a problem; files: {path in it: content}, None removes one."""
    files = {
        "instruction.md": "Write the sum of numbers.txt into sum.txt.\n",
        "tests/test.sh": TEST,
        "environment/numbers.txt": "1\n2\n39\n",
        "solution/solve.sh": "awk '{s += $1} END {print s}' numbers.txt > sum.txt",
    } | (files or {})
    for name, content in files.items():
        if content is not None:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return folder


class Model:
    """A FAKE model that says these turns; an exception among them is raised."""

    def __init__(self, *says):
        self.says = list(says)
        self.turns = []
        self.heard = []
        self.logged = {}
        self.finished = True

    async def __call__(self, text):
        self.heard.append(text)
        says = self.says.pop(0)
        if isinstance(says, Exception):
            raise says
        self.turns.append(says)
        return says

    def log(self, **values):
        self.logged |= values


def play(problem, *says):
    model = Model(*says)
    return asyncio.run(shell.episode(problem, model)), model


def block(command):
    return f"I will do this:\n```bash\n{command}\n```"


def run(commands, seconds=60.0, **options):
    """[(exit code, output)] of commands that run one after the other in one shell."""

    async def run_all():
        jail = _jail.Shell("/app", ["app", "tmp", "root"], _jail.packed({}), **options)
        return [await jail.run(command, seconds) for command in commands]

    return asyncio.run(run_all())


# ---- attempts


def test_commands_change_files_and_the_script_grades_them(tmp_path):
    make_problem(tmp_path / "set" / "sum")
    [problem] = shell.problems("train", 0, str(tmp_path / "set"))
    assert problem["prompt"].startswith("Write the sum of numbers.txt into sum.txt.\n\nWork in")
    assert problem["source"] == "set" and problem["where"].endswith("/set/sum")
    count = block("ls; wc -l < numbers.txt")
    reward, model = play(problem, count, block("echo 42 > sum.txt"), "It is done.")
    assert reward == 1.0 and model.logged == dict(commands=2)
    assert model.heard[1] == "Exit code 0. Output:\nnumbers.txt\n3"
    assert model.heard[2] == "Exit code 0. Output:\n"
    # Another attempt has files of its own.
    reward, model = play(problem, block("cat sum.txt"), "I give up.")
    assert reward == 0.0 and "Exit code 1. Output:\ncat: sum.txt: No such file" in model.heard[1]


def test_an_attempt_that_is_cut_off_is_graded_by_what_it_has_done(tmp_path):
    make_problem(tmp_path / "set" / "sum")
    [problem] = shell.problems("train", 0, str(tmp_path / "set"))
    assert play(problem, block("echo 42 > sum.txt"), CutOff("no tokens left"))[0] == 1.0
    with pytest.raises(CutOff):
        play(problem, CutOff("no tokens left"))
    # The last turn's command is not run, as nobody reads its output.
    reward, model = play(problem, *[block("echo x >> sum.txt")] * shell.TURNS)
    assert reward == 0.0 and model.logged == dict(commands=shell.TURNS - 1)


def test_the_last_block_is_the_command_and_long_output_is_shortened():
    assert shell.command_of("```bash\nls\n``` or ```sh\npwd\n```") == "pwd\n"
    assert shell.command_of("```bash\nls") == "ls"
    assert shell.command_of("```python\nprint()\n```") is None
    assert shell.shortened("a" * 1500 + "b" * 1500) == "a" * 1000 + "\n[...]\n" + "b" * 1000


@pytest.mark.parametrize(
    "script, reward",
    [
        ("echo .25 > /logs/verifier/reward.txt", 0.25),
        ("echo 1 | tee /logs/verifier/reward.txt > /logs/verifier/reward.json", "unparsable"),
        ("""echo '{"reward": 0.5}' > /logs/verifier/reward.json""", 0.5),
        ("echo NaN > /logs/verifier/reward.txt", "unparsable"),
        ("echo 1e999 > /logs/verifier/reward.txt", "unparsable"),
        ("echo 1e39 > /logs/verifier/reward.txt", "unparsable"),
        ("echo much > /logs/verifier/reward.txt", "unparsable"),
        ("exit 0", "unparsable"),
        ("sleep 100", "unparsable"),
    ],
)
def test_the_reward_is_what_the_script_writes(tmp_path, script, reward):
    settings = "[verifier]\ntimeout_sec = 3.0\n" if "sleep" in script else ""
    make_problem(tmp_path / "p", {"tests/test.sh": script, "task.toml": settings})
    [problem] = shell.problems("test", 0, str(tmp_path))
    assert play(problem, "Nothing to do.")[0] == reward


def test_commands_cannot_see_or_forge_what_grades_them(tmp_path):
    make_problem(tmp_path / "p", {"tests/answer": "42"})
    [problem] = shell.problems("test", 0, str(tmp_path))
    forge = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; ls -A /tests"
    forge += "; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    forge += "; (while true; do echo 1 >> /logs/verifier/reward.txt; done) &"
    reward, model = play(problem, block(forge), block("cat /logs/verifier/reward.txt"), "Done.")
    assert reward == 0.0
    assert model.heard[1] == "Exit code 0. Output:\n"
    assert model.heard[2].startswith("Exit code 0. Output:\n1")


@pytest.mark.parametrize(
    "command",
    [
        """echo '{"reward": 1}' > /logs/verifier/reward.json; chmod 555 /logs/verifier""",
        "rmdir /logs/verifier; echo x > /logs/verifier; chmod 555 /logs; echo 1 > reward.txt",
        "touch /tests/x; chmod 000 /tests",
        "rm -r /logs/verifier; ln -s /app /logs/verifier; echo 1 > /app/reward.json",
        # The problem's PATH begins with a directory that commands can change
        """for x in bash cat timeout tar head env; do
            printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > ~/bin/$x; chmod +x ~/bin/$x
        done""",
        "echo 'echo 1 > /logs/verifier/reward.txt' > ~/.bashrc",
        # A tar of the command's own, for the program that packs its files
        """mkdir -p x/tests; echo 'echo 1 > /logs/verifier/reward.txt' > x/tests/test.sh
        for fd in /proc/2/fd/*; do (tar -C x -c ./tests; printf complete) > $fd; done 2> /dev/null
        kill -9 2""",
    ],
)
def test_what_grades_an_attempt_does_not_use_what_commands_have_left(tmp_path, command):
    dockerfile = "FROM x\nENV PATH=/root/bin:$PATH BASH_ENV=/root/.bashrc\nCOPY numbers.txt /app\n"
    files = {"environment/Dockerfile": dockerfile}
    make_problem(tmp_path / "p", files)
    [problem] = shell.problems("test", 0, str(tmp_path))
    turns = block("mkdir -p ~/bin /logs/verifier"), block(command)
    assert play(problem, *turns, "Done.")[0] == 0.0
    assert play(problem, *turns, block("echo 42 > sum.txt"), "Done.")[0] == 1.0


# ---- directories of problems


def test_environment_says_where_commands_run_and_which_files_and_variables_there_are(tmp_path):
    dockerfile = '# an image\nFROM debian\nWORKDIR /srv/deep\nENV A=1 B="2 3" P=$PATH:/opt\n'
    dockerfile += "ENV C 4 5\nCOPY a.txt \\\n  data/\nCOPY folder /data\nCOPY a.txt b.txt\n"
    files = {f"environment/{name}": name for name in ("a.txt", "folder/c.txt", "left.txt")}
    files |= {"environment/Dockerfile": dockerfile, "environment/numbers.txt": None}
    make_problem(tmp_path / "p", files)
    [problem] = shell.problems("test", 0, str(tmp_path))
    command = 'pwd; find . /data -type f | sort; cat data/a.txt; echo; echo "$A $B $C ${P##*:}"'
    _, model = play(problem, block(command), "Done.")
    seen = "/srv/deep\n./b.txt\n./data/a.txt\n/data/c.txt\na.txt\n1 2 3 4 5 /opt"
    assert model.heard[1] == f"Exit code 0. Output:\n{seen}"


@pytest.fixture
def public_path():
    """A directory that all users may read; pytest's own ones are for their owner alone."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_the_last_stage_of_a_dockerfile_counts_and_variables_are_replaced(tmp_path):
    dockerfile = "FROM a\nENV X=1\nWORKDIR /built\nCOPY none /x\nFROM b\nENV D=/srv\n"
    dockerfile = dockerfile.replace("COPY none /x\n", "COPY numbers.txt /x\n")
    dockerfile += 'WORKDIR "$D/here"\nCOPY numbers.txt $D/n.txt\n'
    make_problem(tmp_path / "p", {"environment/Dockerfile": dockerfile})
    [problem] = shell.problems("test", 0, str(tmp_path))
    _, model = play(problem, block("pwd; ls /srv; ls /x /built; echo $X"), "Done.")
    assert model.heard[1].startswith("Exit code 0. Output:\n/srv/here\nhere\nn.txt\n")
    assert "/x" in model.heard[1] and "/built" in model.heard[1]


def test_a_rootfs_must_lie_beside_the_problems(tmp_path):
    make_problem(tmp_path / "p")
    (tmp_path / "p" / "environment" / "rootfs").symlink_to("/")
    with pytest.raises(ValueError, match="rootfs: leads out of the directory of all problems"):
        shell.problems("test", 0, str(tmp_path))


def test_a_rootfs_takes_the_place_of_this_machines_programs(public_path):
    """An image with bash, a few programs, and files of its own, in /app and elsewhere."""
    root = public_path / "p" / "environment" / "rootfs"
    make_problem(public_path / "p", {"environment/Dockerfile": "FROM x\nRUN apt install y\n"})
    for name in "bash tar mkdir timeout env cat ls printf head prlimit".split():
        program = shutil.which(name)
        linked = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for file in [program, *(word for word in linked.split() if word.startswith("/"))]:
            target = root / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for name in ("app/sum.txt", "opt/known"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("42\n")
    [problem] = shell.problems("test", 0, str(public_path))
    reward, model = play(problem, block("ls; cat /opt/known; awk 1; echo x > /opt/known"), "Done.")
    assert reward == 1.0
    assert model.heard[1].startswith("Exit code 1. Output:\nsum.txt\n42\n")
    assert "awk: command not found" in model.heard[1] and "Read-only" in model.heard[1]
    assert (root / "opt" / "known").read_text() == "42\n"
    if os.geteuid() == 0:
        os.chmod(public_path, 0o700)
        shell.layout.cache_clear()
        with pytest.raises(ValueError, match="run as the user nobody, who cannot read"):
            shell.problems("test", 0, str(public_path))


@pytest.mark.parametrize(
    "files, refusal",
    [
        ({"instruction.md": None}, "has no directory with an instruction.md"),
        ({"tests/test.sh": None}, "p: has no tests/test.sh"),
        ({"task.toml": "[agent"}, "task.toml: "),
        ({"task.toml": "[environment]\ngpus = 1"}, "task.toml: environment.gpus: this cannot be"),
        ({"task.toml": '[verifier]\nenv = {A = "1"}'}, "task.toml: verifier.env: this cannot"),
        ({"task.toml": "steps = [1]"}, "task.toml: steps: this cannot be had here"),
        ({"environment/Dockerfile": "FROM x\nRUN make\n"}, "RUN make: Dockerfiles are not built"),
        ({"environment/Dockerfile": "COPY none x"}, "COPY none x: none is not in .*environment"),
        ({"environment/Dockerfile": "COPY /etc/passwd x"}, "/etc/passwd is not in "),
        ({"environment/Dockerfile": "COPY ../../../.. x"}, "is not in "),
        ({"environment/Dockerfile": "WORKDIR /tests/x"}, "p: /tests cannot be changed here"),
        ({"environment/Dockerfile": "WORKDIR $D"}, "a variable is not set, or not in the form"),
        ({"environment/Dockerfile": "COPY numbers.txt n\nCOPY numbers.txt n"}, "/app/n twice"),
        ({"environment/docker-compose.yaml": "x"}, "docker-compose.yaml: services cannot be had"),
        ({"task.toml": '[agent]\ntimeout_sec = "600"'}, "agent.timeout_sec 600: must be a number"),
        ({"task.toml": "[verifier]\ntimeout_sec = 0"}, "verifier.timeout_sec 0: must be a number"),
        ({"environment/Dockerfile": "WORKDIR /usr/src"}, "p: /usr cannot be changed here"),
        ({"environment/Dockerfile": "WORKDIR /"}, "/: files and commands need a directory below"),
    ],
)
def test_problems_that_cannot_be_had_are_refused_by_name(tmp_path, files, refusal):
    make_problem(tmp_path / "p", files)
    with pytest.raises(ValueError, match=refusal):
        shell.problems("test", 0, str(tmp_path))


def test_settings_that_ask_for_nothing_are_accepted(tmp_path):
    settings = 'version = "1.0"\nsteps = []\n[metadata]\nany = "thing"\n[environment]\ngpus = 0\n'
    settings += "cpus = 1\nmemory_mb = 2048\nallow_internet = true\nmcp_servers = []\n"
    make_problem(tmp_path / "p", {"task.toml": settings})
    assert len(shell.problems("test", 0, f" {tmp_path} , {tmp_path}")) == 2
    with pytest.raises(ValueError, match="needs directories of problems: --train_data"):
        shell.problems("train")


@pytest.mark.parametrize("name", ["instruction.md", "tests/key", "environment/a", "solution"])
def test_links_that_lead_out_of_the_problems_are_refused(tmp_path, name):
    make_problem(tmp_path / "set" / "p")
    shutil.rmtree(tmp_path / "set" / "p" / "solution")
    path = tmp_path / "set" / "p" / name
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("my secret")
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"/{name}: leads out of the directory of all problems"):
        shell.problems("test", 0, str(tmp_path / "set"))


def test_problems_may_share_files_that_lie_beside_them(tmp_path):
    make_problem(tmp_path / "p")
    (tmp_path / "p" / "tests" / "test.sh").rename(tmp_path / "test.sh")
    (tmp_path / "p" / "tests" / "test.sh").symlink_to(tmp_path / "test.sh")
    [problem] = shell.problems("test", 0, str(tmp_path))
    assert play(problem, block("echo 42 > sum.txt"), "Done.")[0] == 1.0


def test_problems_that_shells_could_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_jail, "SYSTEM", (str(tmp_path),))
    make_problem(tmp_path / "set" / "p")
    with pytest.raises(ValueError, match="problems must not lie in .*, which shells can read"):
        shell.layout(str(tmp_path / "set" / "p"))


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_jail, "SHELL_FILES", 100_000)
    make_problem(tmp_path / "p", {"environment/big": "x" * 200_000})
    with pytest.raises(ValueError, match="files are more than the"):
        shell.problems("test", 0, str(tmp_path))


def test_check_of_a_directory_runs_the_solutions(tmp_path, capsys):
    make_problem(tmp_path / "a")
    make_problem(tmp_path / "b", {"solution/solve.sh": "echo 41 > sum.txt"})
    make_problem(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "solution")
    shell.main([str(tmp_path)])
    lines = [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "a: 0.0 without commands; 1.0 after its solution, exit code 0",
        "b: 0.0 without commands; 0.0 after its solution, exit code 0",
        "c: 0.0 without commands; there is no solution",
    ]


# ---- what commands may do


def test_files_outlive_commands_and_processes_do_not():
    outputs = run(
        [
            "echo 5 > a; mkdir -p /tmp/b ~/c; ln -s a link; chmod 700 a; sleep 98765 & echo begun",
            "cat link; stat -c %a a; ls -d /tmp/b; ls -d ~/c",
        ]
    )
    assert outputs == [(0, "begun\n"), (0, "5\n700\n/tmp/b\n/root/c\n")]
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "98765"] not in running


def test_a_command_that_is_ended_keeps_its_files():
    [ended, after] = run(["echo 5 > a; echo 6; sleep 100", "cat a"], seconds=3.0)
    assert ended == (124, "6\n") and after == (0, "5\n")


# (command, text that it must have printed, text that it must not have printed)
HOSTILE = [
    ("f() { f | f & }; f; sleep 1", "fork: ", None),
    ("for i in $(seq 200); do sleep 5 & done", "fork: ", None),
    ("head -c 100000000 /dev/zero > x", "No space left", None),
    ("for i in $(seq 100); do head -c 1000000 /dev/zero > x$i; done", "No space left", None),
    ("truncate -s 1T x", "limit", None),
    ("yes | head -c 1000000000", "y\ny", None),
    ("tail /dev/zero", "exhausted", None),
    ("cat /etc/passwd", "No such file", "root:"),
    ("cat SECRET", "No such file", "my secret"),
    ("env", "HOME=/root", "my secret"),
    ("exec 3<> /dev/tcp/127.0.0.1/PORT; cat <&3", "refused", "mine"),
    ("exec 3<> /dev/tcp/1.1.1.1/80", "unreachable", None),
    ("kill -9 -1; kill -9 HOST", "", None),
    ("echo x > /usr/bin/x", "Read-only", None),
    ("echo x > /x", "Read-only", None),
    ("unshare --user true", "not permitted", None),
    ("mount -t tmpfs x /app", "mount: /app: ", None),
    ("mknod x c 1 3", "not permitted", None),
    ("rm -rf / --no-preserve-root; echo over", "", None),
    ("echo devices: $(ls -A /dev)", "devices: fd full null random urandom zero\n", None),
    (
        "grep -E 'CapEff|NoNewPrivs' /proc/self/status",
        "CapEff:\t0000000000000002\nNoNewPrivs:\t1",
        None,
    ),
]


def test_jail_stops_hostile_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "my secret")
    secret = tmp_path / "secret"
    secret.write_text("my secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"PORT": str(server.getsockname()[1]), "SECRET": str(secret)}
        values["HOST"] = str(os.getpid())
        for command, must, must_not in HOSTILE:
            for name, value in values.items():
                command = command.replace(name, value)
            [(_, printed), after] = run([command, "echo well"])
            assert must in printed, (command, printed[:300])
            assert must_not is None or must_not not in printed, (command, printed[:300])
            assert len(printed) < _jail.OUTPUT + 200
            # The shell goes on, whatever a command has done.
            assert after == (0, "well\n"), (command, after)


def test_files_that_cannot_be_kept_are_as_they_were():
    """The second command ends the program that packs its files."""
    [_, killed, after] = run(["echo 5 > a", "echo 6 > a; kill -9 2", "cat a"])
    assert "[the files are as they were before this command" in killed[1]
    assert after == (0, "5\n")


def test_a_tar_that_was_cut_off_is_not_kept(monkeypatch):
    """Files of which every 8 bytes look like the end of a complete tar"""
    monkeypatch.setattr(_jail, "SHELL_FILES", 1 << 20)
    fill = "for d in /app /root /tmp; do yes complete | tr -d '\\n' | head -c 1000000 > $d/x; done"
    [full, after] = run([fill, "ls | wc -l"])
    assert "[the files are as they were" in full[1] and after == (0, "0\n")


def test_the_jail_of_an_attempt_that_is_over_ends_at_once():
    async def give_up():
        jail = _jail.Shell("/app", ["app"], _jail.packed({}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(jail.run("sleep 98766", 200000.0), 3.0)
        return await asyncio.to_thread(jail.process.wait, 60)

    assert asyncio.run(give_up()) == -signal.SIGKILL

    def is_running():
        commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        return ["sleep", "98766"] in commands

    # The kernel ends the processes of the jail after its first one.
    wait_until(lambda: not is_running(), 60)


def test_files_of_any_rights_and_files_with_holes_are_kept():
    make = "echo 5 > a; chmod 000 a; truncate -s 60M b c; mkdir d; chmod 000 d"
    [_, after] = run([make, "stat -c '%n %a %s' a b c; stat -c %a d; cat a"])
    assert after == (0, "a 0 2\nb 644 62914560\nc 644 62914560\n0\n5\n")


def test_a_command_that_is_too_long_for_the_system_is_an_error_of_its_own():
    wrong = [f": {'x' * 200_000}", "echo \0"]
    [long, nul, dashed, after] = run([*wrong, "-x", "echo well"])
    assert "too long" in long[1] and "no text" in nul[1] and after == (0, "well\n")
    assert "-x: command not found" in dashed[1]


def test_of_a_long_output_the_beginning_and_the_end_are_kept():
    [(_, printed)] = run(["seq 100000"])
    assert printed.startswith("1\n2\n") and printed.endswith("\n99999\n100000\n")
    assert "\n[578895 bytes are left out]\n" in printed
    assert len(printed) < _jail.OUTPUT + 100


def test_a_shell_without_a_jail_is_refused(monkeypatch):
    monkeypatch.setenv("PIPELINE_NO_JAIL", "1")
    with pytest.raises(ValueError, match="PIPELINE_NO_JAIL=1: a shell runs in a jail only"):
        _jail.require_shell()
    monkeypatch.delenv("PIPELINE_NO_JAIL")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="apt install bubblewrap"):
        _jail.require_shell()

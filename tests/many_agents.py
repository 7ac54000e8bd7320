"""Several agents in one run, for test_agents.py: `many_agents.py COMMAND ...` as a run's $AGENT.

Each COMMAND is one as in $AGENT, and all agents must have the same problems. Every problem says in
`agent` which of them makes the attempts at it: the first agent those at problem 0, and so on.
"""

import json
import shlex
import subprocess
import sys


def print_problems(commands, arguments):
    command = [*shlex.split(commands[0]), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for number, line in enumerate(done.stdout.splitlines()):
        print(json.dumps(json.loads(line) | {"agent": number % len(commands)}))


def pass_attempts_on(commands):
    """Give each attempt to its agent. The agents print their answers themselves."""
    programs = []
    for command in commands:
        command = [*shlex.split(command), "attempts"]
        programs.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
    for line in sys.stdin:
        program = programs[json.loads(line)["problem"]["agent"]]
        program.stdin.write(line)
        program.stdin.flush()
    for program in programs:
        program.stdin.close()
        program.wait()


if __name__ == "__main__":
    position = next(k for k, word in enumerate(sys.argv) if word in ("problems", "attempts"))
    if sys.argv[position] == "problems":
        print_problems(sys.argv[1:position], sys.argv[position:])
    else:
        pass_attempts_on(sys.argv[1:position])

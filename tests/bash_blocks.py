"""Demonstrations for the tiny model of the tests in which a model writes commands.

It answers every problem with a ```bash block. Half of the problems are those of
examples/shell_problems.py, in the words of tasks/shell.py. The others are those of
examples/agents/files.py, in the words of examples/agents/mini_swe_agent.py.
"""

from examples import shell_problems
from examples.agents import files
from tasks import shell

BLOCK = "```bash\n{}\n```"
# In tasks/shell.py: the text that follows the instruction in a prompt
RULES = shell.PROMPT.split("{instruction}")[1].format(folder="/app")
# In tasks/shell.py: the message that follows a command that prints nothing
REPLY = shell.REPLY.format(code=0, output="")
# In mini-swe-agent: the text that comes before the problem
SYSTEM = "<system>Answer with a ```bash block.\n<user>"
# In mini-swe-agent: the message that follows such a command
OBSERVATION = "<returncode>0</returncode>\n<output>\n</output>"
# In mini-swe-agent: the command that ends an attempt
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TEMPLATE = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}\
{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
# Texts that are one token each, so that 150 steps are enough
WORDS = (
    *(RULES, REPLY, SYSTEM, OBSERVATION, SUBMIT, "<user>", "<assistant>"),
    *("Write the number ", "Write ", " into the file ", "Make a directory with the name "),
    *("Remove ", "Rename ", "Copy ", "the file ", " to "),
    *("```bash\n", "\n```", "echo ", " > ", "mkdir ", "rm ", "mv ", "cp ", ".txt", "done"),
    *shell_problems.WORDS,
)
TINY = dict(words=WORDS, layers=3, chat_template=TEMPLATE)


def demonstration(rng):
    if rng.random() < 0.5:
        instruction, _, solution, _ = rng.choice(shell_problems.KINDS)
        a, b = ("_".join(rng.choices(shell_problems.WORDS, k=2)) + ".txt" for _ in range(2))
        values = dict(a=a, b=b, n=rng.randrange(10, 1000))
        prompt = f"<user>{instruction.format(**values)}{RULES}"
        command, reply, last = solution.format(**values), REPLY, "done"
    else:
        problem = files.draw(rng)
        prompt = f"{SYSTEM}{problem['prompt']}"
        command = f"echo {problem['number']} > {problem['name']}"
        reply, last = OBSERVATION, BLOCK.format(SUBMIT)
    return [
        (f"{prompt}\n<assistant>", False),
        (BLOCK.format(command), True),
        (f"\n<user>{reply}\n<assistant>", False),
        (last, True),
    ]

"""Answer `bash run.sh ... --help` before anything is installed, with the standard library alone.

bash run.sh [preset] --help             commands, presets, every knob with its value in the preset
bash run.sh [preset] --help WORD ...    the knobs that have all of these words in their name or
                                        description
bash run.sh status --help               what a command does
"""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg


def commands():
    """Return the comment at the beginning of run.sh, which describes its commands."""
    text = (cfg.ROOT / "run.sh").read_text().partition("\nset ")[0]
    lines = text.splitlines()[1:]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def main(argv):
    command = argv[0] if argv else "help"
    about = commands()
    if command in ("status", "doctor"):
        program = cfg.ROOT / "tools" / f"{command}.py"
        about = ast.get_docstring(ast.parse(program.read_text()))
    if command == "status":
        print(about)
        return
    arguments = argv[1:] if command in cfg.COMMANDS else argv
    if "--help" not in arguments and "-h" not in arguments:
        # `help WORD` means `--help WORD`.
        arguments = ["--help", *arguments]
    try:
        cfg.parse(arguments, about=about)
    except cfg.ConfigError as e:
        sys.exit(f"run.sh: {e}")


if __name__ == "__main__":
    main(sys.argv[1:])

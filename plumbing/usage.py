"""What `bash run.sh --help` prints, taken from the source of config.Config: headings, knobs, comments."""

import inspect
import re
import textwrap
from typing import Literal, get_args, get_origin, get_type_hints

import config as cfg

# characters: of a line, and before a knob's comment
WIDTH = 120
COLUMN = 34


def knobs() -> dict[str, dict[str, str]]:
    """What the source of Config says: {heading: {knob: its comment}}, in its order; without what is filled in."""
    found = {}
    comment = []
    for line in inspect.getsource(cfg.Config).splitlines():
        line = line.strip()
        knob = re.match(r"(\w+): ", line)
        if line.startswith("# ----"):
            heading = line.strip("#- ")
            found[heading] = {}
        elif line.startswith("#"):
            comment.append(line.strip("# "))
        elif knob:
            words = " ".join(comment)
            if not words.startswith("filled in"):
                found[heading][knob[1]] = words
            comment = []
    return found


def help_text(preset: str, default: cfg.Config, about: str = "") -> str:
    """Every knob under its heading, a line each: default, comment, the words that it takes.

    about: part of a heading's or knob's name: these alone, with all of their comments.
    """
    hints = get_type_hints(cfg.Config)
    text = [
        f"bash run.sh [{'|'.join(cfg.PRESETS)}] [--knob value ...] (others: head of run.sh)",
        f"Knobs and what they are in preset {preset}; `--help WORD`: all about those of that name or heading",
    ]
    for heading, comments in knobs().items():
        chosen = {k: words for k, words in comments.items() if about in k or about in heading}
        text += ["", heading] if chosen else []
        for name, comment in chosen.items():
            value = getattr(default, name)
            if isinstance(value, tuple):
                value = " ".join(map(str, value))
            if get_origin(hints[name]) is Literal:
                comment = f"{' | '.join(get_args(hints[name]))}: {comment}"
            left = f"  --{name} {value}"
            if about:
                text += [
                    left,
                    *textwrap.wrap(
                        comment, 94, initial_indent="      ", subsequent_indent="      "
                    ),
                ]
            else:
                left = f"{left:<{COLUMN - 1}} "
                text.append(left + textwrap.shorten(comment, WIDTH - len(left), placeholder=" ..."))
    return "\n".join(text)

"""The fields of a dataclass as knobs of a command line: they are read, shown and searched here.

The comment above a field describes it, and also the fields right below it that have no comment. A
comment `# ---- title` begins a group of knobs. Only the standard library is used, so that `bash
run.sh --help` works before anything is installed. Deliberately absent: short options, flags without
a value.
"""

import difflib
import inspect
import re
import textwrap
from dataclasses import fields
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

# the width of the help text, in columns
WIDTH = 100
# what the help text shows for a value of each type
TYPES = {str: "TEXT", int: "INT", float: "FLOAT"}
# what an error message calls it
MEANINGS = {int: "a whole number", float: "a number"}


class Knob(NamedTuple):
    """One field of the dataclass.

    group: the title of its group. about: the comment that describes it. kind: the type of its
    values. choices: the texts that it may have, empty if any text will do. count: how many values
    it takes.
    """

    name: str
    group: str
    about: str
    kind: type
    choices: tuple
    count: int

    def usage(self):
        """The flag and its values: "--betas FLOAT FLOAT"."""
        values = [TYPES.get(self.kind)] * self.count
        if self.choices:
            values = ["{" + ",".join(self.choices) + "}"]
        return " ".join([f"--{self.name}", *values])

    def read(self, text):
        """The value that a text stands for. Raises ValueError with a message of one line."""
        if self.choices and text not in self.choices:
            known = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            guess = did_you_mean(difflib.get_close_matches(text, self.choices))
            raise ValueError(f"--{self.name} {text}: must be {known}{guess}")
        if self.kind is bool:
            return text == "True"
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"--{self.name} {text}: must be {MEANINGS[self.kind]}") from None


def comments(source):
    """{name: (title of its group, comment above it)} for each line `name: ...` of source code."""
    described = {}
    group = ""
    # the comment lines right above the current line
    above = []
    # the last comment, which describes all entries below it that have none
    comment = ""
    for line in map(str.strip, source.splitlines()):
        entry = re.match(r'"?([\w-]+)"?:', line)
        if line.startswith("# ----"):
            group = line.strip("# -")
        elif line.startswith("#"):
            above.append(line[1:].strip())
        elif entry:
            comment = " ".join(above) or comment
            described[entry[1]] = (group, comment)
            above = []
        else:
            above = []
            comment = ""
    return described


def knobs_of(cls):
    """{name: Knob} of a dataclass. Raises TypeError for a field whose type no knob has."""
    hints = get_type_hints(cls)
    described = comments(inspect.getsource(cls))
    knobs = {}
    for field in fields(cls):
        kind = hints[field.name]
        choices = ()
        count = 1
        if get_origin(kind) is Literal:
            choices = tuple(map(str, get_args(kind)))
            kind = type(get_args(kind)[0])
        elif get_origin(kind) is tuple:
            count = len(get_args(kind))
            kind = get_args(kind)[0]
        elif kind is bool:
            choices = ("True", "False")
        if kind not in (*TYPES, bool):
            raise TypeError(
                f"{cls.__name__}.{field.name}: a knob is a str, bool, int, float, a Literal, or a "
                f"tuple of so many numbers, not {hints[field.name]}"
            )
        knobs[field.name] = Knob(field.name, *described[field.name], kind, choices, count)
    return knobs


# ---- a command line


def read(arguments, knobs):
    """A command line's arguments -> {name: value}. If a knob is given twice, the last one counts.

    Raises ValueError with a message of one line for a word that is no knob, or no value of one.
    """
    values = {}
    rest = list(arguments)
    # the knob before the current word
    knob = None
    while rest:
        word = rest.pop(0)
        flag, equals, first = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("--") or name not in knobs:
            raise ValueError(complaint(word, knobs, knob))
        knob = knobs[name]
        texts = [first] if equals else []
        while rest and len(texts) < knob.count and not rest[0].startswith("--"):
            texts.append(rest.pop(0))
        if len(texts) < knob.count:
            hint = f"; one that begins with -- is written --{name}=VALUE" if rest else ""
            given = len(texts) or "none"
            raise ValueError(f"{knob.usage()}: {given} of {knob.count} values given{hint}")
        read_values = tuple(map(knob.read, texts))
        values[name] = read_values if knob.count > 1 else read_values[0]
    return values


def complaint(word, knobs, before):
    """The message for a word that is no knob, one line. before: the knob before it, or None."""
    flag, equals, _ = word.partition("=")
    if not flag.startswith("-") and not equals:
        if before:
            return f"{word}: unexpected after --{before.name}, which takes {before.count} of them"
        return f"{word}: unexpected; knobs are written --name VALUE, and a preset comes before them"
    guess = did_you_mean(nearest(flag, knobs))
    if flag.startswith("--"):
        return f"{word}: there is no such knob{guess} (bash run.sh --help WORD searches them)"
    return f"{word}: a knob begins with two dashes{guess} (bash run.sh --help WORD searches them)"


def did_you_mean(names):
    """The end of a message that suggests these names; "" if there are none."""
    return f", did you mean {' or '.join(names)}?" if names else ""


def nearest(flag, knobs, cutoff=0.6):
    """At most three flags whose names are spelt like this one, or that these words describe.

    cutoff: the least similarity of the spelling, from 0 to 1.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    if name in knobs:
        return [f"--{name}"]
    if not name:
        return []
    parts = name.split("_")
    # the best suggestions first
    similar = difflib.get_close_matches(name, knobs, cutoff=max(cutoff, 0.7))
    similar += [other for other in knobs if name in other or other in parts]
    similar += [knob.name for knob in search(parts, knobs)]
    similar += difflib.get_close_matches(name, knobs, cutoff=cutoff)
    return [f"--{other}" for other in list(dict.fromkeys(similar))[:3]]


# ---- help


def search(words, knobs):
    """The knobs that have, for each of these words, a word that begins with it.

    It may be in their name, description or choices.
    """
    wanted = [word.lstrip("-").replace("-", "_").lower() for word in words]
    matches = []
    for knob in knobs.values():
        text = " ".join([knob.name, knob.about, *knob.choices]).lower()
        text = f"{text} {text.replace('-', '_')}"
        # "lag" is not to find "flag", but to find "lags" and "max_lag".
        if all(re.search(rf"(?<![a-z0-9]){re.escape(word)}", text) for word in wanted):
            matches.append(knob)
    return matches


def describe(knobs, defaults):
    """The help text of these knobs. defaults: an instance of the dataclass, for their values."""
    lines = []
    group = None
    for knob in knobs:
        if knob.group != group:
            group = knob.group
            lines += ["", f"{group}:"]
        value = getattr(defaults, knob.name)
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        text = f"{knob.about} (default: {'empty' if value == '' else value})"
        indent = 8 * " "
        lines.append(f"  {knob.usage()}")
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join(lines[1:])

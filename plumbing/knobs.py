"""The knobs of a dataclass on a command line: read from it, shown and searched.

A knob is a field. The comment above a field describes it, and the fields right below that have none; `# ---- title`
begins a group. The standard library is enough: `bash run.sh --help` answers before anything is installed.
Deliberately absent: short options, flags without a value.
"""

import difflib
import inspect
import re
import textwrap
from dataclasses import fields
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

# columns of what help prints
WIDTH = 100
TYPES = {str: "TEXT", int: "INT", float: "FLOAT"}
MEANINGS = {int: "a whole number", float: "a number"}


class Knob(NamedTuple):
    """kind: type of its values; choices: their texts, empty if any will do; count: how many it takes."""

    name: str
    group: str
    about: str
    kind: type
    choices: tuple
    count: int

    def usage(self):
        """The flag and what it takes: "--betas FLOAT FLOAT"."""
        values = [TYPES.get(self.kind)] * self.count
        if self.choices:
            values = ["{" + ",".join(self.choices) + "}"]
        return " ".join([f"--{self.name}", *values])

    def read(self, text):
        """The value that a text means. Raises ValueError, one line."""
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
    """{name: (title of its group, comment above it)} of each line `name: ...` of source code."""
    found = {}
    group, above, shared = "", [], ""
    for line in map(str.strip, source.splitlines()):
        entry = re.match(r'"?([\w-]+)"?:', line)
        if line.startswith("# ----"):
            group = line.strip("# -")
        elif line.startswith("#"):
            above.append(line[1:].strip())
        elif entry:
            shared = " ".join(above) or shared
            found[entry[1]] = (group, shared)
            above = []
        else:
            above, shared = [], ""
    return found


def knobs_of(cls):
    """{name: Knob} of a dataclass. Raises TypeError for a field of a kind that knobs do not have."""
    hints = get_type_hints(cls)
    described = comments(inspect.getsource(cls))
    knobs = {}
    for field in fields(cls):
        kind, choices, count = hints[field.name], (), 1
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
                f"{cls.__name__}.{field.name}: a knob is a str, bool, int, float, a Literal, or a tuple of "
                f"so many numbers, not {hints[field.name]}"
            )
        knobs[field.name] = Knob(field.name, *described[field.name], kind, choices, count)
    return knobs


# ---- a command line


def read(words, knobs):
    """{name: value} of the words of a command line; of a knob that is given twice the last one.

    Raises ValueError, one line, for what is no knob or no value of it.
    """
    values = {}
    rest = list(words)
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
    """What is wrong with a word that is no knob, one line. before: the knob before it, None if there is none."""
    flag, equals, _ = word.partition("=")
    if not flag.startswith("-") and not equals:
        if before:
            return f"{word}: unexpected after --{before.name}, which takes {before.count} of them"
        return f"{word}: unexpected; knobs are written --name VALUE, and a preset comes before them"
    what = "there is no such knob" if flag.startswith("--") else "a knob begins with two dashes"
    guess = did_you_mean(nearest(flag, knobs))
    return f"{word}: {what}{guess} (bash run.sh --help WORD searches them)"


def did_you_mean(names):
    return f", did you mean {' or '.join(names)}?" if names else ""


def nearest(flag, knobs, cutoff=0.6):
    """At most three knobs, as flags, that are spelt alike, or are described in these words.

    cutoff: how much alike the spelling must be, from 0 to 1.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    if name in knobs or not name:
        return [f"--{name}"] * (name in knobs)
    parts = name.split("_")
    alike = difflib.get_close_matches(name, knobs, cutoff=max(cutoff, 0.7))
    alike += [other for other in knobs if name in other or other in parts]
    alike += [knob.name for knob in search(parts, knobs)]
    alike += difflib.get_close_matches(name, knobs, cutoff=cutoff)
    return [f"--{other}" for other in list(dict.fromkeys(alike))[:3]]


# ---- help


def search(words, knobs):
    """The knobs that have all of these words in their name, description or choices."""
    wanted = [word.lstrip("-").replace("-", "_").lower() for word in words]
    found = []
    for knob in knobs.values():
        text = " ".join([knob.name, knob.about, *knob.choices]).lower()
        text = f"{text} {text.replace('-', '_')}"
        if all(word in text for word in wanted):
            found.append(knob)
    return found


def describe(knobs, defaults):
    """The text of help about these knobs; defaults: an object with their values."""
    lines = []
    group = None
    for knob in knobs:
        if knob.group != group:
            group = knob.group
            lines += ["", f"{group}:"]
        value = getattr(defaults, knob.name)
        value = " ".join(map(str, value)) if isinstance(value, tuple) else value
        text = f"{knob.about} (default: {'empty' if value == '' else value})"
        indent = dict(initial_indent=8 * " ", subsequent_indent=8 * " ", break_on_hyphens=False)
        lines += [f"  {knob.usage()}", *textwrap.wrap(text, WIDTH, **indent)]
    return "\n".join(lines[1:])

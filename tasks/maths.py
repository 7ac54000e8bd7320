"""Mathematics with a final answer in \\boxed{}, compared by math-verify: the task of the paper.

`--train_data` and `--eval_data`: names of data sets below, or .jsonl / .parquet files with columns `problem` (or
`question`) and `answer`; several with commas between them. Evaluations report each by its name.

`bash run.sh toy --task maths --train_data tests/maths.jsonl --eval_data tests/maths.jsonl --max_model_len 400` runs it
without a hub. The last box counts, with all that its sentence boxes: several different boxes are a list of answers.
math-verify is lenient, which a reward would teach to exploit: it drops words, primes and indices, and takes the last
part of `9 = 7`. It is asked only about what can be read in one way; anything else is `unparsable`.
`python bench/rewards.py` prints how often that is wrong. Deliberately absent: answers without \\boxed{}, partial credit.
"""

import functools
import re
import string
from pathlib import Path

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from tasks import _data as data

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TINY = dict(words=(INSTRUCTION, "\\boxed{"), characters=tuple(string.printable), positions=512)


# ---- data sets: readers of one row -> (problem, final answer)


def columns(row):
    return data.column(row, "problem", "question"), data.column(row, "answer")


def orz(row):
    """OpenReasoner-Zero: a dialogue, [{value: problem}, {ground_truth: {value: answer}}], with columns called "0" and "1"."""
    return row["0"]["value"], row["1"]["ground_truth"]["value"]


def gsm8k(row):
    """The final answer follows ####, with commas in large numbers."""
    answer = row["answer"].rsplit("####", 1)[-1]
    return row["question"], answer.strip().replace(",", "")


def solution(row):
    """The final answer is what the solution puts into its last box."""
    return row["problem"], final(row["solution"])


# name -> (reader, hub name, configuration, split)
SETS = {
    "orz57k": (orz, "Open-Reasoner-Zero/orz_math_57k_collection", None, "train"),
    "orz72k": (orz, "Open-Reasoner-Zero/orz_math_72k_collection_extended", None, "train"),
    "gsm8k_train": (gsm8k, "openai/gsm8k", "main", "train"),
    "gsm8k": (gsm8k, "openai/gsm8k", "main", "test"),
    "math_train": (solution, "DigitalLearningGmbH/MATH-lighteval", None, "train"),
    "math500": (columns, "HuggingFaceH4/MATH-500", None, "test"),
    "aime24": (columns, "HuggingFaceH4/aime_2024", None, "train"),
    "aime25": (columns, "math-ai/aime25", None, "test"),
    "amc23": (columns, "math-ai/amc23", None, "test"),
}


def problems(split, seed=0, data_names=""):
    """Dicts with prompt, answer, where (file:line) and source (name of the set), in the order of the files.

    Raises ValueError that names the file and line, or the set.
    """
    if not data_names:
        knob = "--train_data" if split == "train" else "--eval_data"
        known = ", ".join(SETS)
        raise ValueError(f"task maths needs {knob}: {known}, or a .jsonl or .parquet file")
    sources = {}
    for name in data_names.split(","):
        source = name if name in SETS else Path(name).stem
        if source in sources:
            raise ValueError(f"{name}: another set is called {source}: give it another name")
        sources[source] = _read(name)
        if not sources[source]:
            raise ValueError(f"{name}: no problems in it")
    return [
        dict(prompt=problem + INSTRUCTION, answer=str(answer), where=where, source=source)
        for source, found in sources.items()
        for where, problem, answer in found
    ]


def _read(name):
    """[(where, problem, answer)] of a file, all of whose rows must be usable, or of the usable ones of a set on the hub."""
    reader, *hub = SETS.get(name, [columns])
    found = []
    unusable = 0
    for where, row in data.hub(*hub) if hub else data.rows(name):
        try:
            problem, answer = reader(row)
        except LookupError as e:
            raise ValueError(f"{where}: no {e}; the row has {', '.join(row)}") from None
        except ValueError as e:
            if not hub:
                raise ValueError(f"{where}: {e}") from None
            answer = None
        if answer:
            found.append((where, problem, answer))
        else:
            unusable += 1
    if unusable:
        print(f"maths: {unusable} rows of {name} have no final answer and are left out", flush=True)
    return found


# ---- the answer of a completion

# characters of an answer; of the text before the last box in which others may belong to it
LONGEST, NEAR = 500, 2000
CONTENT = "[^{}]*+"
for _ in range(8):
    CONTENT = rf"[^{{}}]*+(?:\{{{CONTENT}\}}[^{{}}]*+)*+"
BOX = re.compile(rf"\\boxed\s*\{{({CONTENT})\}}")
SENTENCE_ENDS = re.compile(r"[.?!:;]\s|\n")
# what a last sentence begins with that adds to the one before instead of taking it back
ANOTHER = re.compile(r"(^|[.?!\n(]\s*)(or|maybe|alternatively|case|answer \d)\b[^.?!]{0,20}$", re.I)


def final(text):
    """The answer a text ends with: what its last \\boxed{...} holds; "" without one.

    "\\boxed{9}. So it is \\boxed{7}" -> "7"; of a sentence with several it is a list: "\\boxed{9} or \\boxed{7}" -> "9, 7".
    A box within another one counts as a part of it. ValueError if the last one does not end within LONGEST characters.
    """
    last = text.rfind("\\boxed")
    text = text[max(last - NEAR, 0) : last + LONGEST]
    found = []
    end = 0
    for box in BOX.finditer(text):
        _, *after = SENTENCE_ENDS.split(text[end : box.start()], maxsplit=1)
        has_words = after and re.search("[a-zA-Z]{2}", after[0])
        if has_words and not ANOTHER.search(text, end, box.start()):
            found = []
        found.append(box[1].strip())
        end = box.end()
    if last >= 0 and end <= text.rfind("\\boxed"):
        raise ValueError(f"the last box does not end within {LONGEST} characters")
    return ", ".join(dict.fromkeys(content for content in found if content))


# ---- one spelling for what is written in many ways

SPELLINGS = [
    (r"\\(left|right) ?\.|\\(left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])|\\!", ""),
    (r"\\(text|math)(bf|it|rm|normal)|\\[mh]box", r"\\text"),
    (r"(?<!\\)\\[,;: ]|\\q?quad|~|\s+", " "),
    (r" ?\\text ?\{ ?(or|and) ?\}|,? \b(or|and)\b", ","),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac ?\\pi(?![a-z])", r"\\frac{\\pi}"),
    (r"\\log_(\w) ?(\w+)", r"\\log_{\1}{\2}"),
    (r"\\varnothing|\\\{ ?\\\}|∅", r"\\emptyset "),
    (r"\\(mathbb|Bbb) ?\{?R\}?|ℝ", r"(-\\infty,\\infty)"),
    (r"\^ ?\{? ?\\circ ?\}?|\\degree|°", r"\\text{degree}"),
    (r"^(-?)\\?\$ ?([^$]*)$|^([^$]*?) ?\\?\$$", r"\1\2\3\\text{dollar}"),
    (r"\\approx ?\d+\.\d+$", ""),
    ("π", r"\\pi "),
    ("[−–]", "-"),
    (r"\{,\}", ","),
]
SPELLINGS = [(re.compile(pattern), new) for pattern, new in SPELLINGS]
AROUND = re.compile(
    r"\$([^$]+)\$|\\\((.+)\\\)|\{([^{}]+)\}|\\text ?\{([^{}]+)\}|\\boxed ?\{(.*)\}|(.+)\."
)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}([, ]\d{3})+(?![\d,])")


def layout(text):
    """A text without what only places it on the page, and one spelling of each sign."""
    text = text.strip()
    for pattern, new in SPELLINGS:
        text = pattern.sub(new, text)
    text = " ".join(text.split())
    around = AROUND.fullmatch(text)
    if around:
        return layout(around[around.lastindex])
    if set(text) & set("([{"):
        return text
    return THOUSANDS.sub(lambda found: re.sub("[, ]", "", found[0]), text)


def plain(text):
    """Words in small letters, or signs without the spaces and braces that do not matter."""
    text = layout(text)
    words = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", text).replace(".", "")
    choice = re.fullmatch(r"\(?([A-Z])\)?", words)
    if choice:
        return choice[1]
    if re.fullmatch("[a-zA-Z' -]{3,}", words):
        return words.lower()
    text = words if ":" in words else text
    text = re.sub(r"([_^]) ?\{(?:\\text ?\{(\w+)\}|(\w+))\}", r"\1\2\3", text)
    return re.sub(r"(?<!\w) | (?!\w)", "", text)


# ---- what math-verify is asked about

# a unit and its other names
UNITS = """
degree deg | dollar usd | cent | euro | pound lb | mm millimeter | cm centimeter | m meter metre | km kilometer | percent
in inch inche | ft foot feet | yd yard | mi mile | mi/h mph | km/h kmh kph | kg kilogram | g gram | l liter litre | ml
s sec second | min minute | h hr hour | day | week | month | year | unit | people person | student | way | time | piece
square sq | cubic | radian rad | am | pm
"""
UNITS = [names.split() for names in re.split(r"[|\n]", UNITS.strip())]
UNIT = {name + end: names[0] for names in UNITS for name in names for end in ("", "s")}
BARE = "|".join(sorted((name for name in UNIT if len(name) > 1), key=len, reverse=True))
WITH_UNIT = re.compile(
    rf"(.*[\d}})]|.*\\pi) ?(?:\\text ?{{ ?([^{{}}]*?) ?}}|({BARE}))(?: ?\^ ?{{?([23])}}?)?"
)
PERCENT = re.compile(r"\s*(?:\\?%|\\(?:text|mathrm) ?\{\s*percent\s*\}|\bpercent\b)")
DECIMAL = re.compile(r"(?=\.?\d)(\d*)\.(\d*)(?:\\overline ?\{(\d+)\})?")
NAME = re.compile(r"([a-zA-Z]|[A-Z]{2,3}|\\[a-z]+|[a-z]?\([a-z](, ?[a-z])*\)) ?(=|\\in(?![a-z])) ?")
COMMANDS = """
frac sqrt binom div cdot times pm infty emptyset cup in lt gt le leq leqslant ge geq geqslant ne neq begin end
pi alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi omega lfloor rfloor lceil rceil
log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh
"""
COMMANDS = set(COMMANDS.split())
TOKEN = re.compile(r"\\([a-zA-Z]+)|\\[{}\\]|[\w,;+\-*/^(){}\[\]|!=<>≤≥≠& ]")
MANY_MEANINGS = re.compile(
    # two numbers side by side, an index of a number, a relation without its left side, an operator without its right one
    r"\d \d|[\d)}] ?_|^ ?([<>*/=≤≥]|\\[gl]e|\\times)|[*/=+-]$|[+-] ?[+-]"
    # sympy computes powers of powers, large powers, and factorials of factorials, digit by digit
    r"|\d\s*[})]*\s*(\^|\*\*)\s*[-{(\s]*\d+\s*[})!]*\s*(\^|\*\*)"
    r"|(\^|\*\*)\s*[-{(\s]*(\\frac\{)?\d{5}|\d{5}\s*!|![)}\]\s]*!|\d\s*(\^|\*\*)\s*[-{(\s]*\d+\s*!"
)
IMAGINARY = {sympy.Symbol("i", real=is_real): sympy.I for is_real in (True, False)}
# units are read here: math-verify takes the m of `5m` for one
READING = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
LATEX = LatexExtractionConfig(boxed_match_priority=0, normalization_config=READING)


def is_clear(text):
    """Can an answer be read in one way only, and is it not there to keep the machine busy?"""
    commands = {found[1] for found in TOKEN.finditer(text) if found[1]}
    if len(text) > LONGEST or max(map(text.count, "([{^_")) > 30 or MANY_MEANINGS.search(text):
        return False
    return not TOKEN.sub("", text) and commands <= COMMANDS


def read(text, words):
    """An answer without its unit, and the unit, which may be one of these words: `5\\text{ cm}^2` -> ("5", "cm2"), `x` -> ("x", "")."""
    text = DECIMAL.sub(_fraction, layout(text))
    found = WITH_UNIT.fullmatch(text)
    if not found:
        return text, ""
    parts = re.split(" per | |/", (found[2] or found[3]).lower().replace(".", ""))
    names = [UNIT.get(part, part) for part in parts]
    if not set(names) <= {*UNIT, *words}:
        return text, ""
    return found[1], "/".join(names) + (found[4] or "")


def _fraction(decimal):
    """`0.25` -> `(\\frac{25}{100})`, `0.1\\overline{6}` -> `(\\frac{1}{10}+\\frac{6}{90})`: sympy would round them."""
    whole, fixed, period = decimal.groups(default="")
    power = 10 ** len(fixed)
    exact = f"\\frac{{{int(whole + fixed)}}}{{{power}}}"
    if period:
        exact += f"+\\frac{{{int(period)}}}{{{power * (10 ** len(period) - 1)}}}"
    return f"({exact})"


def values(text):
    """What must be right in `x = 6/2 = 3`: ["6/2", "3"]; `x=2, x=3` -> ["2, 3"]; `x=2, y=3` says itself."""
    name = NAME.match(text)
    if name:
        unnamed = re.sub(rf"(^|, ?){re.escape(name[0])}", r"\1", text)
        if "," not in unnamed or "=" not in unnamed:
            text = unnamed
    return [text] if "," in text else text.split("=")


def same(reference, given, prompt=""):
    """Is `given` the answer `reference`, both in LaTeX? If the prompt asks for percent, % is a unit.

    Raises ValueError if `given` could be read in two ways. A reference like that is equal to its own words alone.
    """
    words = re.findall("[a-z]+", prompt.lower())
    per_cent = "\\\\text{percent}" if {"percent", "percentage"} & set(words) else "/100"
    reference, given = (PERCENT.sub(per_cent, text) for text in (reference, given))
    if plain(reference) == plain(given):
        return True
    ours, our_unit = read(reference, words)
    theirs, their_unit = read(given, words)
    if not is_clear(theirs):
        raise ValueError("this is no answer, or means several things")
    if not is_clear(ours) or (our_unit and their_unit and our_unit != their_unit):
        return False
    wanted = values(ours)
    is_open = re.search(r"(?<![\\a-zA-Z])[a-z]", " ".join(wanted))
    if "=" in ours and theirs.count("=") == 1 and is_open:
        return equal(ours, theirs)
    return all(equal(wanted[-1], value) for value in values(theirs))


def equal(ours, theirs):
    """Does math-verify say so, of things of one kind, with the same capital letters, which it takes for small ones?"""
    if set(re.findall("[A-Z]", ours)) != set(re.findall("[A-Z]", theirs)):
        return False
    found = parsed(ours), parsed(theirs)
    if len({kind(side) for side in sum(found, [])} - {"relation"}) > 1:
        return False
    # `(1,2)` may be a point
    is_interval = bool(re.search(r"[\[\]]|infty", ours))
    limits = dict(numeric_precision=100, timeout_seconds=None)
    return verify(*found, allow_set_relation_comp=is_interval, **limits)


def kind(found):
    """What math-verify does not tell apart: a point and a set, a set of one and its member, `1, 2` and `1, 2, 2`."""
    if getattr(found, "is_Relational", False) or isinstance(found, sympy.And):
        return "relation"
    if isinstance(found, sympy.FiniteSet):
        return len(getattr(found, "_unsorted_args", found.args))
    return "brackets" if isinstance(found, (sympy.Interval, sympy.Tuple)) else "value"


@functools.lru_cache(1000)
def parsed(text):
    """What math-verify reads: [a sympy object], or nothing; i is the imaginary unit. The sandbox limits the time."""
    found = parse(f"\\boxed{{{text}}}", [LATEX], "no_fallback", "first_match", parsing_timeout=None)
    return [expression.xreplace(IMAGINARY) for expression in found]


# ---- the reward


def answer(problem, completion):
    """What attempts are compared by when they vote (maj@k); None: no vote."""
    try:
        return plain(final(completion)) or None
    except ValueError:
        return None


def reward(problem, completion, finished):
    """An outcome of the reward table: correct | wrong | no_answer | unparsable."""
    try:
        given = final(completion)
        if not given:
            return "no_answer"
        return "correct" if same(problem["answer"], given, problem.get("prompt", "")) else "wrong"
    except ValueError:
        return "unparsable"


def demonstration(rng):
    """One example for a tiny base model, which is there to run without a hub, not to learn mathematics: a sum, often right."""
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    total = a + b
    if rng.random() >= 0.8:
        total = rng.randint(1, 100)
    return [(f"What is ${a} + {b}$?{INSTRUCTION}", False), (f"\\boxed{{{total}}}", True)]

"""Decides whether the final answer of a completion is the reference. If in doubt, it is not.

1. `final_answer` finds the last \\boxed{} outside of thinking, and all others of its statement.
2. `normalized_spelling` removes layout.
3. Answers with the same `comparable_text` are the same.
4. tasks/_latex.py reads each answer if there is only one way to read it, and else refuses it.
5. `is_same_list` compares the statements of both by their kind: numbers exactly, expressions at
   points (tasks/_exact.py), intervals with their ends and brackets as they are written, points in
   order, lists and sets in any order, equations up to a factor.

0.5 is \\frac{1}{2}, 50\\%, x = \\frac12 and 0.5\\text{ cm}; it is not 0.500001, nor \\{0.5\\}.

`python bench/rewards.py` prints how often a verdict is wrong. Deliberately absent: answers without
\\boxed{}, partial credit, conversion of units and of bases.

This is not a task: its name starts with `_`.
"""

import re

import sympy

from tasks import _latex as latex
from tasks._exact import UNCLEAR, defined, is_expression, is_multiple, is_same_expression

# ---- 1. the answer that a text ends with

# the number of characters before the last box that are searched for more boxes of its statement
NEAR = 2000
# the most boxes of one statement that are read as an answer
MOST_BOXES = 20
THINKING_TAG = (
    r"(</?(?:think|thinking|thought|reasoning)>|\[/?think\]|<\|(?:begin|end)_of_thought\|>)"
)
THINKING_TAG = re.compile(THINKING_TAG, re.IGNORECASE)
SENTENCE_END = re.compile(r"[.?!:;]\s|\n")
# the beginning of a sentence whose box adds to the boxes before it and does not replace them
ANOTHER = re.compile(
    r"(^|[.?!:;\n(]\s*)(or|maybe|alternatively|case|answer \d)\b[^.?!]{0,20}$", re.I
)


def final_answer(text):
    """The content of the last \\boxed{...} outside of thinking; "" if there is none.

        "\\boxed{9}. So it is \\boxed{7}"               ->  "7"
        "\\boxed{9} or \\boxed{7}"                      ->  "9, 7": all of a statement
        "\\boxed{0.5}, that is, \\boxed{\\frac12}"     ->  "\\frac12": the same again

    A box within another one counts as a part of it. Raises ValueError if the last box does not end
    within latex.LONGEST characters, or if its statement has more than MOST_BOXES.
    """
    text = outside_of_thinking(text)
    last = text.rfind("\\boxed")
    text = text[max(last - NEAR, 0) : last + latex.LONGEST]
    boxes = []
    end = 0
    for box in re.finditer(r"\\boxed\s*(?={)", text):
        closed = end_of_braces(text, box.end())
        if box.start() < end or not closed:
            continue
        sentence_end = SENTENCE_END.search(text, end, box.start())
        begins_anew = sentence_end and re.search(
            "[a-zA-Z]{2}", text[sentence_end.end() : box.start()]
        )
        if begins_anew and not ANOTHER.search(text, end, box.start()):
            boxes = []
        boxes.append(text[box.end() + 1 : closed - 1].strip())
        end = closed
    if last >= 0 and end <= text.rfind("\\boxed"):
        raise ValueError(
            f"the last \\boxed has no braces that close within {latex.LONGEST} characters"
        )
    if len(boxes) > MOST_BOXES:
        raise ValueError(f"{len(boxes)} boxes in one statement, there may be {MOST_BOXES}")
    answers = []
    for box in filter(None, boxes):
        answers = [other for other in answers if not is_clearly_same(other, box)] + [box]
    return ", ".join(answers)


def outside_of_thinking(text):
    """A text without the parts between thinking tags. The first tag may be in the prompt."""
    outside = []
    is_thinking = False
    for part in THINKING_TAG.split(text):
        if not THINKING_TAG.fullmatch(part):
            outside += [] if is_thinking else [part]
        elif "/" in part or "end" in part:
            outside = outside if is_thinking else []
            is_thinking = False
        else:
            is_thinking = True
    return "".join(outside)


def end_of_braces(text, start):
    """The position after the brace that closes the one at `start`; 0 if it is never closed."""
    depth = 0
    for sign in re.compile(r"\\.|[{}]", re.S).finditer(text, start):
        depth += (sign[0] == "{") - (sign[0] == "}")
        if depth == 0:
            return sign.end()
    return 0


def is_clearly_same(box, other):
    """Are the contents of two boxes the same answer beyond doubt?"""
    for reference, given in ((box, other), (other, box)):
        try:
            return is_same_answer(reference, given)
        except UNCLEAR:
            # a unit may be known from the other box alone
            continue
    return False


# ---- 2. one spelling

SIGNS = r"""
π \pi | θ \theta | α \alpha | β \beta | √ \sqrt | ∞ \infty | ∅ \emptyset | ≤ \le | ≥ \ge | ≠ \ne
≈ \approx | ≡ \equiv | ∈ \in | ∪ \cup | ± \pm | × \cdot | · \cdot | ⋅ \cdot | ÷ / | − - | – -
° ^\circ | ¢ \text{cents} | ½ \frac12 | ¼ \frac14 | ¾ \frac34 | ℝ \mathbb{R} | ⟨ ( | ⟩ )
， , | ； ; | ： : | （ ( | ） )
"""
SIGNS = dict(pair.split() for pair in re.split(r" \| |\n", SIGNS.strip()))
SIGNS = str.maketrans({sign: latex + " " for sign, latex in SIGNS.items()})
# raised and lowered digits: x², 2¹⁰, 10⁻³, x₁; but ⁰ alone may be a degree, and ⁴√ is a root
RAISED = re.compile("⁻?[¹²³⁴⁵⁶⁷⁸⁹][⁰¹²³⁴⁵⁶⁷⁸⁹]*+(?! ?(?:√|\\\\sqrt))")
LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
# √12: the root of all of the number
ROOT_OF_NUMBER = re.compile(r"√ ?(\d+(?:\.\d+)?)")
DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "-01234567890123456789")
SPELLINGS = [
    # sizes, delimiters of formulas, spaces
    (r"(?<=\\\\) ?\[-?[\d.]+ ?(?:pt|em|ex|mm|cm)\]", ""),
    (r"\\(left|right) ?\.", ""),
    (r"\\(left|right|[bB]igg?[lrm]?|displaystyle|textstyle|[lL]arge)(?![a-zA-Z])", ""),
    (r"(?<!\\)\\[()\[\]]| ?(?<!\\)\\! ?|\\+$", ""),
    (r"(?<!\\)\\[,:;> ]|\\q?quad|~|\s+", " "),
    # 20^\circ C; 3:30 p.m.; \text{15 cm}; \text{m/s^2}
    (r"\^ ?\{ ?\\circ ?\}|\^? ?\\degree(?![a-z])", r"^\\circ "),
    (r"\^\\circ ?(\\(?:text|mathrm) ?\{ ?)?C\b ?\}?$", r"\\text{celsius}"),
    (r"\^\\circ ?(\\(?:text|mathrm) ?\{ ?)?F\b ?\}?$", r"\\text{fahrenheit}"),
    (r"(?<=:\d\d) ?(?:\\text ?\{ ?([aApP])\.? ?[mM]\.? ?\}|([aApP])\.?[mM]\b)", r"\\text{\1\2m}"),
    (r"\\text ?\{ ?(-?[\d.,/]+) ?([a-zA-Z/]+) ?\}", r"\1\\text{\2}"),
    (r"\\(text|mathrm) ?\{([^{}^]*)\^ ?\{?(-?\d)\}?\}", r"\\\1{\2}^{\3}"),
    # 1 2/3; (mod 7); (11)_2; a system of equations
    (r"(?<![\d.])(\d+) +(\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"\( ?\\(?:b?mod|(?:text|mathrm) ?\{ ?mod ?\}) ?([^()]*)\)", r"\\pmod{\1}"),
    (r"\((\d+)\) ?_", r"\1_"),
    # 3 x 10^8; 2**10; (-oo, 1); acos(x); Rs. 500; US$5; $-5
    (r"(?<=\d) [xX] (?=10 ?\^)", r" \\cdot "),
    (r"(?<=[\w)}]) ?\*\* ?(?=[\w({-])", "^"),
    (r"(?<![a-zA-Z\\])(?:oo|inf)(?![a-zA-Z])", r"\\infty "),
    (r"(?<![a-zA-Z\\])a(?=(?:sin|cos|tan)\()", "arc"),
    (r"^Rs\.? ?(?=\d)", "₹"),
    (r"^US ?(?=\\?\$)", ""),
    (r"^(\\?\$)-(?=[\d.])", r"-\1"),
    (r"^\\begin ?\{cases\}([^&]*)\\end ?\{cases\}$", lambda found: found[1].replace("\\\\", ",")),
]
SPELLINGS = [(re.compile(pattern), new) for pattern, new in SPELLINGS]
DOLLAR = re.compile(r"(?<!\\)\$")
AROUND = re.compile(rf"({latex.FONT}|\\f?boxed ?)?(?=\{{)")
FONT_GROUP = re.compile(latex.FONT + r"\{([^{}]*)\}")


def normalized_spelling(text):
    """A text without layout and without delimiters around it: `\\[\\boxed{5}\\].` -> `5`."""
    text = ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text)
    text = RAISED.sub(lambda digits: f"^{{{digits[0].translate(DIGITS)}}}", text)
    text = LOWERED.sub(lambda digits: f"_{{{digits[0].translate(DIGITS)}}}", text)
    text = text.translate(SIGNS).strip()
    if "\\begin" not in text:
        # some data sets double their backslashes, as in \\\\frac
        text = re.sub(r"(?<!\\)\\\\(?=[a-zA-Z])", r"\\", text)
    around = AROUND.match(text)
    if around and end_of_braces(text, around.end()) == len(text):
        return normalized_spelling(text[around.end() + 1 : -1])
    spelled = text
    if len(DOLLAR.findall(spelled)) % 2 == 0:
        # An odd number of dollar signs means that one of them is a currency
        spelled = DOLLAR.sub("", spelled)
    for pattern, new in SPELLINGS:
        spelled = pattern.sub(new, spelled)
    spelled = " ".join(spelled.split()).rstrip(".,;")
    if spelled.startswith("**") and spelled.endswith("**"):
        spelled = spelled.strip("*")
    return spelled if spelled == text else normalized_spelling(spelled)


def comparable_text(text):
    """A form that is the same for answers that are equal as texts.

    It is the letter of a choice, or words in small letters, or the tokens of a formula.
    """
    text = normalized_spelling(text)
    words = without_fonts(text)
    choice = re.fullmatch(r"\(?([A-Z])[.):]?", words)
    if choice:
        return choice[1]
    is_text = re.fullmatch(r"[a-zA-Z0-9 ,.:'()-]+", words) and re.search("[a-zA-Z]{3}", words)
    # 2Rrh, a - b and m(gR) are formulas
    is_formula = re.search(r"\d[a-zA-Z]|[a-zA-Z]\d| - |[a-zA-Z]\(|\)[a-zA-Z]", words)
    if (is_text and not is_formula) or words.lower() in ("yes", "no"):
        return re.sub("[a-zA-Z]+", small_word, words)
    return latex.join(latex.tokens_of(text)).rstrip(", ")


def without_fonts(text):
    """A text without the commands that set a font: `\\text{IV}` -> `IV`."""
    return " ".join(FONT_GROUP.sub(r"\1", text).split())


def small_word(match):
    """The letters of a regular expression's match, in small letters if they are a word.

    `ABC` and `mgR` are no words.
    """
    word = match[0]
    is_word = re.fullmatch("[a-zA-Z]?[a-z]+", word) or word in (
        "YES",
        "NO",
        "TRUE",
        "FALSE",
        "NONE",
    )
    return word.lower() if is_word else word


# ---- 5. comparison by kind

# "Find the percent", "as a percentage"; and a question with the word: "How much percent is it?"
PERCENT = r"(percent|per cent|percentage|\\?%)"
ASKS_FOR_PERCENT = re.compile(
    r"\b((what|which|how many|how much|find|compute|determine|express|calculate|give|nearest)"
    rf"( is| are| was)?( the| a| an)?( [a-z]+)?|as( an?| the)?|in) {PERCENT}"
    rf"|{PERCENT}[^.?!]*\?",
    re.IGNORECASE,
)
# 20%, a 20 percent solution: nothing is asked for
GIVEN_PERCENT = re.compile(rf"(?<![\d.,])\d[\d.,]*+[ -]?{PERCENT}", re.IGNORECASE)
# "in ascending order", "Sort these numbers", "list them from least to greatest": a list whose order
# is asked for
EXTREME = "(?:least|smallest|lowest|largest|greatest|highest|shortest|longest)"
ASKS_FOR_ORDER = re.compile(
    r"\bin (?:ascending|descending|increasing|decreasing|alphabetical|chronological) order\b"
    r"|\b(?:sort|arrange|rank)(?! of)[^.?!]{0,30}\b(?:a|de)scending\b"
    r"|\b(?:sort|order|arrange|rank|list) (?:the|these|those|them|all|your)\b[^.?!]{0,80}"
    rf"(?:\bfrom (?:the )?{EXTREME} to\b|\b{EXTREME} first\b)",
    re.IGNORECASE,
)
# letters side by side, perhaps with a number before or after; and those whose order matters, as in
# `HTH`, `IV`, `12AB` and `no`, because they are no product of variables
LETTERS = re.compile(r"\d*[a-zA-Z]{2,}\d*")
ORDERED_LETTERS = re.compile(r"\d*[A-Z]{2,}\d*|(?i:yes|no)")
# one or several words, each as short as a product of variables may be
SHORT_WORDS = re.compile(
    rf"[a-zA-Z]{{2,{latex.LONGEST_PRODUCT}}}( [a-zA-Z]{{2,{latex.LONGEST_PRODUCT}}})*"
)
# one or several words of any length
WORDS = re.compile("[a-zA-Z]{2,}(?: [a-zA-Z]+)*")
# what separates the words of a list
LIST_SIGN = re.compile(r"[,;]\s*(?:and\b|or\b)?|\b(?:and|or)\b")
OR = re.compile(r"\bor\b")
# The variables of a prompt are all letters of its formulas, without the names of commands, and
# outside of formulas the letters that stand alone, or beside a sign or a number.
FORMULA = re.compile(r"\$.*?\$|\\\(.*?\\\)|\\\[.*?\\\]", re.S)
COMMAND = re.compile(r"\\[a-zA-Z]+")
VARIABLES = re.compile(r"\b[a-zA-Z]\b|[a-zA-Z]+(?= ?[+*^=])|(?<=[+*^=\d]) ?[a-zA-Z]{1,4}\b")
# several choices: `A, C, D`, `(A) and (C)`; and what has a letter of a choice in a prompt, `A) 12`
SINGLE_CHOICE = r"(?:\([A-H]\)|[A-H])"
CHOICES = re.compile(rf"{SINGLE_CHOICE}(?:(?:,|;|,? and| ?&) ?{SINGLE_CHOICE})+")
CHOICE_OF_PROMPT = re.compile(r"(?<![a-zA-Z])([A-H])[).] ?\S")
# `5 m/s`, `9.8 m/s^2`, `5 m`: a number, a space, and a unit without \text
PLAIN_RATE = re.compile(r"(-?[\d.,/]*\d) ([a-zA-Z]+) ?/ ?([a-zA-Z]+)((?:\^\{?\d\}?)?)")
PLAIN_UNIT = re.compile(r"(-?[\d.,/]*\d) ([mgslhNJWVAKL])((?:\^\{?-?\d\}?)?)")
# A reference is a date, a range, a score or a telephone number, and no difference or quotient:
# `2024-01-05`, `1939-1945`, `06/05/2020`. A quotient has no part of four digits, and none with a 0
# before it.
NO_FORMULA = re.compile(
    r"\d+(?:\.\d+)?(?: ?- ?\d+(?:\.\d+)?)+|(?=.*(?:\d{4}|\b0\d))\d{1,4}/\d{1,2}/\d{1,4}"
)
HALF_OF_DAY = re.compile(r":\d\d ?([aApP])\.? ?[mM]\b")
# a decimal as programs print it, of which they have rounded the last digit
ROUNDED = re.compile(r"-?\d{1,6}\.\d{10,}(?<!0)")
# the largest relative difference between such a decimal and the number that was rounded
ROUNDING_ERROR = sympy.Rational(1, 10**15)
INEQUALITY = re.compile(r"[<>≤≥≠]|\\(le|ge|lt|gt|ne)(?![a-z])|\\(leq|geq|neq)")
# a choice with its text and a bracket on either side of its letter, whatever the text is
BRACKETED = re.compile(r"\(([A-Z])\) ?+(?![-+=,;]|or\b|and\b)((?:(?!\([A-Z]\)).)+)")
# a choice with its text: `C) 12`, `C. 12`, `C. Paris`; and what several choices have in their text
LABELLED = re.compile(r"\(?([A-Z])(?:\)|[.:](?= )) ?([^-+= ].*)")
SEVERAL = re.compile(r"[A-Z](?![a-z])|,|\b(?:or|and)\b")


def is_same_answer(reference, given, prompt=""):
    """Is `given` the answer `reference`? Both are LaTeX.

    If the prompt, a text, asks for percent, then % is a unit and not a factor 1/100. Raises
    ValueError or another one of UNCLEAR if `given` could be read in two ways. A reference that
    could be read in two ways is equal only to its own text.
    """
    is_same_text = comparable_text(reference) == comparable_text(given)
    # "and" and "or" are commas in a comparable text, but not between inequalities.
    has_and = [bool(latex.AND.search(answer)) for answer in (reference, given)]
    if is_same_text and not (INEQUALITY.search(given) and has_and[0] != has_and[1]):
        return True
    reference, given = normalized_spelling(reference), normalized_spelling(given)
    verdict = is_same_choice(reference, given, prompt)
    if verdict is None:
        verdict = is_same_wording(reference, given, prompt)
    if verdict is not None:
        return verdict
    reference_label, reference_text = label_and_text(reference)
    given_label, given_text = label_and_text(given)
    if reference_label and given_label:
        return reference_label == given_label and is_same_answer(reference_text, given_text, prompt)
    if reference_label or given_label:
        unlabelled = comparable_text(given if reference_label else reference)
        label = reference_label or given_label
        # `V: 10` has the name of a quantity and no choice
        is_choice = label <= "J" or re.search(rf"(?<![a-zA-Z]){label}[).]", reference + prompt)
        is_label = unlabelled == label and bool(is_choice)
        return is_label or is_same_answer(reference_text, given_text, prompt)
    return is_same_formula(reference, given, prompt)


def is_same_choice(reference, given, prompt):
    """Are two answers to a prompt with choices the same choices? None if they are no choices."""
    choices = [choices_of(answer) for answer in (reference, given)]
    if all(choices) and {"A", "B", *choices[0]} <= set(CHOICE_OF_PROMPT.findall(prompt)):
        return choices[0] == choices[1]
    return None


def is_same_wording(reference, given, prompt):
    """Have two answers of words or letters the same ones? None if it may be a formula."""
    lists = [re.split("[,;]", answer) for answer in (reference, given)]
    words = [without_fonts(word).replace(" ", "") for word in lists[0] + lists[1]]
    if all(map(LETTERS.fullmatch, words)) and any(map(ORDERED_LETTERS.fullmatch, words)):
        return are_same_texts(*lists)
    items = []
    for answer in (reference, given):
        items.append([item.strip(" ()") for item in LIST_SIGN.split(without_fonts(answer))])
    if prompt and all(is_word(item, prompt) for item in items[0]):
        return are_same_texts(*items)
    is_list_of_words = len(items[0]) > 1 and all(map(WORDS.fullmatch, items[0]))
    if is_list_of_words and not has_value(reference, prompt):
        # Their order may matter, as in `true, false` for two statements. "and" is a comma.
        has_or = [bool(OR.search(without_fonts(answer))) for answer in (reference, given)]
        return has_or[0] == has_or[1] and are_same_texts(*items, is_ordered=True)
    return None


def is_same_formula(reference, given, prompt):
    """Are two answers equal, as latex.read reads them? Raises one of UNCLEAR for `given` alone."""
    if NO_FORMULA.fullmatch(reference):
        return parts_of_date(reference) == parts_of_date(given)
    halves = [HALF_OF_DAY.search(without_fonts(answer)) for answer in (reference, given)]
    # read as a unit, it would be lost at 5:00, as a factor of 0
    if all(halves) and halves[0][1].lower() != halves[1][1].lower():
        return False
    prompt_words = re.findall("[a-z]+", prompt.lower())
    asks_for_percent = ASKS_FOR_PERCENT.search(GIVEN_PERCENT.sub("", prompt))
    percent = latex.Unit("percent") if asks_for_percent else sympy.Rational(1, 100)
    nouns = nouns_of([*prompt_words, *words_of(reference)])
    given_statements = latex.read(given, nouns, percent)
    try:
        reference_statements = latex.read(reference, nouns, percent)
    except UNCLEAR:
        return False
    if is_same_list(reference_statements, given_statements):
        if not ASKS_FOR_ORDER.search(prompt) or "\\pm" in reference + given:
            return True
        return is_in_order(reference_statements, given_statements)
    if is_rounded(reference):
        return is_same_rounded(reference_statements[0].values[0], given_statements)
    with_units = []
    for answer in (reference, given):
        answer = rate_in_text(answer, reference + " " + prompt)
        with_units.append(unit_in_text(answer, reference, prompt))
    if with_units == [reference, given]:
        return False
    return is_same_list(*(latex.read(answer, nouns, percent) for answer in with_units))


def parts_of_date(answer):
    """`06/05/2020` -> ["6", "/", "5", "/", "2020"], and the like for a range."""
    parts = re.findall(r"[\d.]+|\S", without_fonts(answer))
    return [part.lstrip("0") or "0" for part in parts]


def are_same_texts(texts, others, is_ordered=False):
    """Are two lists of answers equal as texts, in any order unless is_ordered?"""
    lists = [list(map(comparable_text, words)) for words in (texts, others)]
    return lists[0] == lists[1] if is_ordered else sorted(lists[0]) == sorted(lists[1])


def has_value(reference, prompt=""):
    """Can a reference be read as a formula? If not, it is equal only to its own words."""
    nouns = nouns_of([*re.findall("[a-z]+", prompt.lower()), *words_of(reference)])
    spelled = normalized_spelling(reference)
    if NO_FORMULA.fullmatch(spelled):
        return False
    try:
        latex.read(spelled, nouns, sympy.Rational(1, 100))
    except UNCLEAR:
        return False
    return True


def is_word(letters, prompt):
    """Are a few letters, such as `cat` or `iv`, a word and not a product of the prompt's variables?

    Units and words of the prompt, which may be units, do not count.
    """
    if not SHORT_WORDS.fullmatch(letters):
        return False
    parts = letters.lower().split()
    nouns = nouns_of(re.findall("[a-z]+", prompt.lower()))
    others = {*latex.UNIT_WORDS, *latex.COMMAND_WORDS, *nouns}
    if any(part in others or part.removesuffix("s") in others for part in parts):
        return False
    formulas = " ".join(FORMULA.findall(prompt))
    around = " ".join(VARIABLES.findall(FORMULA.sub(" ", prompt)))
    return not set("".join(letters.split())) <= set(COMMAND.sub(" ", formulas) + around)


def choices_of(answer):
    """The letters of several choices: `A, C`, `(A) and (C)` and `AC` -> {"A", "C"}.

    For all other answers it is the empty set, and for `CA`, too, where the order may matter.
    """
    words = without_fonts(answer)
    letters = words.replace(" ", "")
    is_run = re.fullmatch("[A-H]{2,8}", letters) and list(letters) == sorted(set(letters))
    return set(re.findall("[A-H]", words)) if is_run or CHOICES.fullmatch(words) else set()


def rate_in_text(answer, context):
    """`5 m/s` -> `5\\text{m/s}`, if the text `context` has `m/s` after a number, \\text or `in`."""
    rate = PLAIN_RATE.fullmatch(answer)
    if not rate or not {rate[2], rate[3]} <= {*latex.UNITS, *latex.LETTER_UNITS}:
        return answer
    before = r"(?:\d|\bin|\\text ?\{|\\mathrm ?\{)[ ~,\\]*"
    if not re.search(rf"{before}{rate[2]} ?/ ?{rate[3]}(?![a-zA-Z])", context):
        return answer
    return f"{rate[1]}\\text{{{rate[2]}/{rate[3]}}}{rate[4]}"


def unit_in_text(answer, reference, prompt):
    """`5 m` -> `5\\text{m}`, if the reference has the letter, and it is a unit in the prompt.

    The prompt must have it after a number, or by its name (`meters`), and not as a variable.
    """
    found = PLAIN_UNIT.fullmatch(answer)
    if not found or not prompt:
        return answer
    letter = found[2]
    alone = rf"(?<![a-zA-Z']){letter}(?![a-zA-Z])"
    unit = latex.LETTER_UNITS.get(letter) or latex.UNITS[letter]
    names = [name for name, other in latex.UNITS.items() if other == unit and len(name) > 2]
    is_unit = re.search(rf"\d {letter}(?![a-zA-Z])", prompt) or re.search(
        rf"\b(?:{'|'.join(names)})s?\b", prompt, re.IGNORECASE
    )
    formulas = "".join(FORMULA.findall(prompt))
    around = FORMULA.sub(" ", prompt)
    # `5 m` and `in m` may be lengths; `5m`, `5 m + 3` and `m` alone are variables.
    is_variable = letter in COMMAND.sub(" ", FONT_GROUP.sub(" ", formulas)) or re.search(
        rf"(?<!\d )(?<!in )(?<!/){alone}|\b{letter} ?[-+*=]|\bin terms of\b|\bexpress", around
    )
    if not re.search(alone, reference) or not is_unit or is_variable:
        return answer
    return f"{found[1]}\\text{{{letter}}}{found[3]}"


def is_rounded(reference):
    """Is it a decimal of 16 or 17 digits, as programs print it: 0.30000000000000004?"""
    digits = len(reference.replace(".", "").strip("-0"))
    return bool(ROUNDED.fullmatch(reference)) and digits in (16, 17)


def is_same_rounded(decimal, given):
    """Is the only given value a real number, or several equal ones, that a program rounds so?"""
    values = given[0].values if len(given) == 1 else ()
    for value in values:
        if not is_expression(value) or not value.is_number or value.is_real is not True:
            return False
        error = defined(value - decimal).evalf(10, maxn=1000)
        if abs(error) > abs(decimal) * ROUNDING_ERROR:
            return False
    return bool(values)


def label_and_text(answer):
    """("C", "12") for `(C) 12`; ("", answer) for all that is no choice, or may name several."""
    words = " ".join(FONT_GROUP.sub(r"\1 ", answer).split())
    choice = BRACKETED.fullmatch(words)
    if choice:
        return choice.groups()
    choice = LABELLED.fullmatch(words)
    if not choice or SEVERAL.search(choice[2]):
        return "", answer
    return choice.groups()


def words_of(reference):
    """The words of a reference that may be units: those in \\text{}, or after a single number."""
    texts = FONT_GROUP.findall(reference)
    after_number = re.fullmatch(
        r"[\d.,/ ]*\d ([a-zA-Z ]+)|\d+\\frac\{\d+\}\{\d+\} ([a-zA-Z]{4,})", reference
    )
    if after_number:
        texts.append(after_number[1] or after_number[2])
    return re.findall("[a-z]+", " ".join(texts).lower())


def nouns_of(words):
    """A set of the words, and of the words without a plural's s."""
    return {form for word in words for form in (word, word.removesuffix("s")) if len(form) > 1}


def is_same_list(reference, given):
    """Do two lists of Statements mean the same? Their order does not matter."""
    if len(reference) != len(given):
        reference, given = members(reference), members(given)
    reference, given = with_names(reference), with_names(given)
    if len(reference) != len(given):
        return False
    if len(reference) == 1:
        return is_same_statement(reference[0], given[0])
    reference_names = {statement.name for statement in reference}
    given_names = {statement.name for statement in given}
    if reference_names != given_names:
        # `x_1 = 2, x_2 = 3` is `2, 3` and `x = 2, 3`; but `x = 2, y = 3` is not
        bases = {re.sub("_.*", "", name) for name in (reference_names | given_names) - {None}}
        if len(bases) > 1 or min(len(reference_names), len(given_names)) > 1:
            return False
        reference = [latex.Statement(None, statement.values) for statement in reference]
        given = [latex.Statement(None, statement.values) for statement in given]
    return is_same_multiset(reference, given, is_same_statement)


def members(statements):
    """A single set as the list of its members, and a single `(x, y) = (1, 2)` as `x = 1, y = 2`."""
    if len(statements) != 1 or len(statements[0].values) != 1:
        return statements
    statement = statements[0]
    (value,) = statement.values
    if not isinstance(value, latex.Collection):
        return statements
    names = re.findall("[a-zA-Z]", statement.name or "")
    if value.kind == "()" and len(names) == len(value.items):
        return [latex.Statement(name, (item,)) for name, item in zip(names, value.items)]
    if value.kind == "{}" and len(value.items) > 1:
        return [latex.Statement(statement.name, (item,)) for item in value.items]
    return statements


def with_names(statements):
    """In `x = 1, 2` both values get the name x; in `x < 1, x > 2` the intervals are united."""
    named = []
    for statement in statements:
        if statement.name is None and not statement.relation and named:
            statement = statement._replace(name=named[-1].name)
        named.append(statement)
    names = {statement.name for statement in named}
    values = [value for statement in named for value in as_interval(statement).values]
    are_intervals = all(latex.is_interval(value) and value.kind != "()" for value in values)
    has_one_name = len(names) == 1 and None not in names
    if len(named) > 1 and has_one_name and len(values) == len(named) and are_intervals:
        return [latex.Statement(named[0].name, (latex.union(values),))]
    return named


def as_interval(statement):
    """`x \\in (1, 2)` with an interval: (1, 2) alone may be a point. Others stay as they are."""
    if statement.relation != "\\in":
        return statement
    *others, last = statement.values
    return statement._replace(values=(*others, latex.interval(*last)))


def is_same_multiset(reference, given, is_same):
    """Do the items of both lists form pairs that are the same, as is_same(item, other) decides?"""
    rest = list(given)
    for item in reference:
        partner = next((i for i, other in enumerate(rest) if is_same(item, other)), None)
        if partner is None:
            return False
        del rest[partner]
    return not rest


def is_in_order(reference, given):
    """Have two lists that are the same their values in one order? True unless they are plain lists.

    In a plain list no value has a name or a relation.
    """
    if any(statement.name or statement.relation for statement in (*reference, *given)):
        return True
    pairs = zip(reference, given)
    return len(reference) != len(given) or all(is_same_statement(*pair) for pair in pairs)


def is_same_statement(reference, given):
    """Do two Statements mean the same? All given values, as in `x = 6/2 = 3`, must be right."""
    if is_open_relation(reference):
        return is_same_relation(reference, given)
    reference = as_interval(reference)
    has_other_name = reference.name != given.name and None not in (reference.name, given.name)
    if has_other_name or not given.values:
        return False
    return all(is_same_value(reference.values[-1], value) for value in given.values)


def is_open_relation(statement):
    """Is it a relation like `y = 2x` or `x + y < 7`? `f(x) = 2x` and `x = 7` only name a value."""
    if statement.relation != "=" or not statement.differences:
        return not statement.values
    if statement.name and latex.COMBINED.fullmatch(statement.name):
        return True
    is_open = any(latex.letters(value) for value in statement.values)
    is_variable = statement.name is None or re.fullmatch("[a-z]", statement.name)
    return bool(is_open and is_variable)


def is_same_relation(reference, given):
    """Are two equations, or inequalities with the same signs, the same up to factors?"""
    is_same_kind = reference.relation == given.relation
    if not is_same_kind or len(reference.differences) != len(given.differences):
        return False
    is_positive = reference.relation != "="
    pairs = zip(reference.differences, given.differences)
    return all(is_multiple(a, b, is_positive) for a, b in pairs)


def is_same_value(reference, given):
    """Are two values of one kind, and equal? A unit may be missing on one side."""
    if isinstance(reference, latex.Collection) and isinstance(given, latex.Collection):
        return is_same_collection(reference, given)
    if isinstance(reference, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase):
        return reference.shape == given.shape and all(map(is_same_value, reference, given))
    if not is_expression(reference) or not is_expression(given):
        return False
    reference_number, reference_unit = split_unit(reference)
    given_number, given_unit = split_unit(given)
    if reference_unit != given_unit and 1 not in (reference_unit, given_unit):
        return False
    return is_same_expression(reference_number, given_number)


def is_same_collection(reference, given):
    """Have two Collections the same brackets and the same items, in order where that matters?"""
    # (1, 2) may be a point or an interval: a reference `1 < x < 2` decides that it is an interval
    is_same_kind = reference.kind == given.kind or (reference.kind, given.kind) == ("open", "()")
    if not is_same_kind or len(reference.items) != len(given.items):
        return False
    if reference.kind in ("{}", "\\cup"):
        return is_same_multiset(reference.items, given.items, is_same_value)
    if reference.kind == "\\pmod":
        (residue, modulus), (given_residue, given_modulus) = reference.items, given.items
        turns = defined((residue - given_residue) / modulus)
        return is_same_value(modulus, given_modulus) and turns.is_integer is True
    return all(map(is_same_value, reference.items, given.items))


def split_unit(value):
    """5 cm/h -> (5, cm/h). The unit is 1 if there is none, or if the value is a sum of several."""
    number, unit = value.as_independent(*value.atoms(latex.Unit), as_Add=False)
    is_product = unit.is_Mul or unit.is_Pow or unit.is_Symbol
    if is_product and not latex.letters(unit) and not unit.atoms(sympy.Add):
        return number, unit
    return value, sympy.Integer(1)

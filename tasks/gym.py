"""Any data set of reasoning-gym, or a mixture, scored by its own verifier (github.com/open-thought/reasoning-gym).

`--train_data` and `--eval_data`: names with settings and shares, such as
`chain_sum/max_terms=2/max_digits=1:0.7,spell_backward/max_word_len=5:0.3`. What the model answers is what
stands in its last <answer> ... </answer>, or all of it. A question is held out if its checksum says so,
so that none is trained on and held out as well; held-out ones are drawn from another seed.
"""

import functools
import json
import random
import re
import zlib

try:
    import reasoning_gym
except ImportError as e:
    words = "pip install -r requirements-smol.txt, as `bash run.sh smol` does"
    raise ImportError(f"{e}: {words}") from e

# questions drawn, before those of the other split and those that are there twice are left out
DRAWN = 5000
# one question in so many is held out
HELD_OUT = 5


def parse(data):
    """`name/key=value:share,...` -> [(name, settings, share)]. Raises ValueError."""
    found = []
    for part in data.split(","):
        words, _, share = part.partition(":")
        name, *settings = words.split("/")
        pairs = [setting.partition("=") for setting in settings]
        found.append((name, {key: json.loads(x) for key, _, x in pairs}, float(share or 1)))
    return found


def problems(split, seed=0, data=""):
    """Entries of the data sets, with prompt and source, the data set's name. Raises ValueError."""
    found = {}
    sets = parse(data)
    total = sum(share for *_, share in sets)
    for name, settings, share in sets:
        options = dict(size=round(DRAWN * share / total), seed=seed + 10**6 * (split == "test"))
        try:
            dataset = reasoning_gym.create_dataset(name, **options, **settings)
        except (TypeError, AssertionError) as e:
            raise ValueError(f"{name}: {e}") from None
        for entry in dataset:
            prompt = entry["question"]
            if (zlib.crc32(prompt.encode()) % HELD_OUT == 0) == (split == "test"):
                found[prompt] = dict(entry, prompt=prompt, source=name)
    found = list(found.values())
    random.Random(seed).shuffle(found)
    return found


def answer(problem, completion):
    """What a completion ends in: in its last <answer> ... </answer>, else of its last line what follows the
    last "is", "=" or ":", without quotes and full stop. Also what attempts are compared by when they vote (maj@k).
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    lines = tagged or completion.strip().splitlines() or [""]
    given = lines[-1] if tagged else re.split(r"\bis\b|[=:]", lines[-1])[-1]
    return given.strip(" \n\t.*\"'") or None


def reward(problem, completion, finished):
    """The verifier's score, 0 to 1; the answer must have ended by itself."""
    if not finished:
        return 0.0
    return float(scorer(problem["source"])(answer(problem, completion), problem))


scorer = functools.cache(reasoning_gym.get_score_answer_fn)

"""Tiny base models for tasks that bring demonstrations: no run needs a hub. tools/prepare.py makes
them.

They have a function `demonstration(rng) -> [(text, learn), ...]`: one example, in order, learn =
True where the model speaks. A good one errs now and then, so that reward has something to mend.
`TINY` of the task says what may differ from DEFAULT below. Deliberately absent: validation,
checkpoints, a GPU.
"""

import importlib
import os
import random
import re
import shutil
import time
from pathlib import Path

DEFAULT = dict(
    # texts that are one token; any other character is one by itself
    words=(),
    # characters that the examples may lack
    characters=(),
    steps=150,
    # examples a step
    batch=64,
    lr=3e-3,
    layers=2,
    hidden=128,
    # longest sequence, tokens
    positions=256,
    # how clients' messages are written, as in demonstrations
    chat_template="",
)
# examples that are searched for characters
SEARCHED = 2000
ROW_TOKENS = 512


def settings(tasks):
    """TINY of several tasks as one: all words and characters, and the most of everything else."""
    merged = {}
    for name, default in DEFAULT.items():
        values = [getattr(task, "TINY", {}).get(name, default) for task in tasks]
        merged[name] = sum(map(tuple, values), ()) if isinstance(default, tuple) else max(values)
    return merged


def make_tokenizer(tasks, seed=0):
    """<pad>, <eos>, in sorted order every character of the first demonstrations, then the words.
    `<eos>` ends an answer.

    It is a Qwen2 tokenizer without merges: transformers loads whatever lies beside a Qwen2 model as
    one.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    merged = settings(tasks)
    rng = random.Random(f"vocabulary{seed}")
    parts = list(merged["characters"])
    for task in tasks:
        for _ in range(SEARCHED):
            parts += [part for part, _ in task.demonstration(rng)]
    words = sorted(merged["words"], key=len, reverse=True)
    if words:
        pattern = re.compile("|".join(map(re.escape, words)))
        parts = [pattern.sub("", part) for part in parts]
    # a byte-level tokenizer writes some characters as others, a space for one
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = set()
    for piece, _ in byte_level.pre_tokenize_str("".join(parts)):
        characters.update(piece)
    vocabulary = ["<pad>", "<eos>", *sorted(characters)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)},
        merges=[],
        unk_token="<pad>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    tokenizer.chat_template = merged["chat_template"] or None
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in merged["words"]])
    return tokenizer


def build(tokenizer, layers, hidden, positions):
    """A Qwen2 model of random weights for this tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        # a multiple of 64
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def tokenized(example, tokenizer):
    """A demonstration -> (token ids, learn), equally long lists; what the model speaks ends in
    <eos>.
    """
    ids, learn = [], []
    for text, mine in example:
        part = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * mine
        ids += part
        learn += [mine] * len(part)
    return ids, learn


def backward(model, examples):
    """Gradient of the mean cross-entropy of what is learnt, over all examples [(ids, learn)];
    returns that mean.
    """
    import torch

    from preprocess import pack
    from train import token_logprobs

    count = sum(sum(learn) for _, learn in examples)
    lengths = [len(ids) for ids, _ in examples]
    total = 0.0
    for row in pack(lengths, ROW_TOKENS):
        # one packed row: ids, learn and positions [T]
        ids = torch.tensor([token for i in row for token in examples[i][0]])
        learn = torch.tensor([mine for i in row for mine in examples[i][1]])
        positions = torch.cat([torch.arange(lengths[i]) for i in row])
        logprobs, _ = token_logprobs(model, ids, positions, 1.0)
        loss = -(logprobs * learn).sum() / count
        loss.backward()
        total += loss.item()
    return total


def warm_up(model, tokenizer, tasks, chosen, seed):
    """Train a model on demonstrations of the tasks, in turn; chosen: see DEFAULT.

    At the second and every tenth step a line says how many seconds it will take from there on, at
    the pace so far.
    """
    import torch

    steps, lr = chosen["steps"], chosen["lr"]
    rng = random.Random(f"warm-up{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        turns = [tasks[k % len(tasks)] for k in range(chosen["batch"])]
        examples = [tokenized(task.demonstration(rng), tokenizer) for task in turns]
        loss = backward(model, examples)
        # up over 50 steps, and down to a tenth over all of them
        rise = min(1, step / 50)
        optimizer.param_groups[0]["lr"] = lr * rise * (1 - 0.9 * step / steps)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number = step + 1
        if number == 1:
            # it takes longer than the others
            first_end = time.monotonic()
        elif number == 2 or number % 10 == 0:
            left = (time.monotonic() - first_end) / (number - 1) * (steps - number)
            line = f"warm-up step {number}/{steps}, cross-entropy {loss:.2f}, {left:.0f} s left"
            print(line, flush=True)


def make_model(names, path, seed, **other):
    """Make the base model of these tasks at `path` unless it is there already; the same seed gives
    the same model.

    other: settings instead of the tasks' own.
    """
    import torch

    path = Path(path)
    if (path / "config.json").exists():
        return
    tasks = [importlib.import_module(f"tasks.{name}") for name in names]
    chosen = settings(tasks) | other
    print(
        f"{'+'.join(names)}: making a tiny base model, once, with {chosen['steps']} steps on "
        "demonstrations; "
        "the second step says how long it takes",
        flush=True,
    )
    threads = torch.get_num_threads()
    # With one thread the model is the same however many cores there are. Two threads are 1.4 times
    # as fast on a quiet machine, and several times slower beside other work (bench/threads.py).
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(tasks, seed)
    torch.manual_seed(seed)
    model = build(tokenizer, chosen["layers"], chosen["hidden"], chosen["positions"])
    warm_up(model, tokenizer, tasks, chosen, seed)
    torch.set_num_threads(threads)
    # a model is whole or absent
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        temporary.rename(path)
    except OSError:
        # another node has made the same
        shutil.rmtree(temporary)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{'+'.join(names)}: base model of {millions:.2f}M parameters in {path}", flush=True)

"""Tiny base models for tasks that bring demonstrations, so that a run needs no hub.

tools/prepare.py makes them. Such a task has a function `demonstration(rng) -> [(text, learn), ...]`
that returns the texts of one example in their order; learn = True where the model speaks. A good
demonstration errs now and then, so that the reward has something to mend. `TINY` of the task says
what differs from DEFAULT below. Deliberately absent: validation, checkpoints, a GPU.
"""

import importlib
import os
import random
import re
import shutil
import time
from pathlib import Path

DEFAULT = dict(
    # texts that are one token each; any other character is a token by itself
    words=(),
    # characters that get a token even if no example has them
    characters=(),
    steps=150,
    # number of examples in a step
    batch=64,
    lr=3e-3,
    layers=2,
    hidden=128,
    # length of the longest sequence in tokens
    positions=256,
    # the template that writes a client's messages as the demonstrations write them
    chat_template="",
)
# Of families other than Qwen2, what their configuration has beside the sizes that all have. Lists
# of kinds of layers are repeated for as many layers as the model has.
EXPERTS = dict(num_local_experts=8, num_experts_per_tok=2)
WINDOWS = dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
    # vLLM has no tied output head for it.
    "gpt_oss": dict(EXPERTS, intermediate_size=128, tie_word_embeddings=False, **WINDOWS),
    # With weights of the usual size its norms would outweigh the embeddings.
    "gemma2": dict(query_pre_attn_scalar=32, initializer_range=0.05, **WINDOWS),
    # experts and Mamba
    "granitemoehybrid": dict(
        EXPERTS,
        intermediate_size=128,
        shared_intermediate_size=128,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=16,
        layer_types=["mamba", "attention"],
    ),
}
# number of examples whose characters are collected for the vocabulary
SEARCHED = 2000
# number of tokens in a packed row
ROW_TOKENS = 512


def settings(tasks):
    """Return the settings of one model for several tasks.

    It has the words and characters of all tasks, and the largest value of every other setting.
    """
    merged = {}
    for name, default in DEFAULT.items():
        values = [getattr(task, "TINY", {}).get(name, default) for task in tasks]
        merged[name] = sum(map(tuple, values), ()) if isinstance(default, tuple) else max(values)
    return merged


def make_tokenizer(tasks, seed=0):
    """Return the tokenizer of these tasks.

    Its tokens are <pad>, <eos>, which ends an answer, the characters of the first demonstrations in
    sorted order, and then the words. It is a Qwen2 tokenizer without merges, because transformers
    loads any tokenizer that lies beside a Qwen2 model as one.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    model_settings = settings(tasks)
    rng = random.Random(f"vocabulary{seed}")
    parts = list(model_settings["characters"])
    for task in tasks:
        for _ in range(SEARCHED):
            parts += [part for part, _ in task.demonstration(rng)]
    words = sorted(model_settings["words"], key=len, reverse=True)
    if words:
        pattern = re.compile("|".join(map(re.escape, words)))
        parts = [pattern.sub("", part) for part in parts]
    # A byte-level tokenizer writes some characters as others, for example a space.
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
    tokenizer.chat_template = model_settings["chat_template"] or None
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in model_settings["words"]])
    return tokenizer


def build(tokenizer, layers, hidden, positions, family="qwen2"):
    """Return a model of a family, with random weights, for this tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings_of_family = dict(FAMILIES.get(family, {}))
    for name, value in settings_of_family.items():
        if isinstance(value, list):
            settings_of_family[name] = (value * layers)[:layers]
    common = dict(
        # the size of the vocabulary, rounded up to a multiple of 64
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
    )
    if family != "qwen2":
        common["head_dim"] = hidden // 4
    config = AutoConfig.for_model(family, **(common | settings_of_family))
    # Other implementations leave out what some families do to scores.
    attention = "sdpa" if family == "qwen2" else "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def tokenized(example, tokenizer):
    """Return (token ids, learn) of a demonstration, two lists of the same length.

    learn is True for the tokens of the model's texts, each of which gets an <eos>.
    """
    ids = []
    learn = []
    for text, is_learnt in example:
        text_ids = tokenizer(text)["input_ids"]
        if is_learnt:
            text_ids.append(tokenizer.eos_token_id)
        ids += text_ids
        learn += [is_learnt] * len(text_ids)
    return ids, learn


def backward(model, examples):
    """Add the gradient of the mean cross-entropy to that of the model; returns this mean, in nats.

    The mean is over the tokens to be learnt of all examples, [(ids, learn)].
    """
    import torch

    from preprocess import pack
    from train import token_logprobs

    count = sum(sum(learn) for _, learn in examples)
    lengths = [len(ids) for ids, _ in examples]
    total = 0.0
    # Padding is right for all families.
    is_padded = model.config.model_type != "qwen2"
    rows = "padded" if is_padded else "native"
    for row in pack(lengths, ROW_TOKENS, [1] * len(lengths) if is_padded else None):
        # ids, learn, positions and logprobs of one packed row: [T]
        ids = torch.tensor([token for i in row for token in examples[i][0]])
        learn = torch.tensor([is_learnt for i in row for is_learnt in examples[i][1]])
        positions = torch.cat([torch.arange(lengths[i]) for i in row])
        logprobs, _ = token_logprobs(model, ids, positions, 1.0, rows=rows)
        loss = -(logprobs * learn).sum() / count
        loss.backward()
        total += loss.item()
    return total


def warm_up(model, tokenizer, tasks, model_settings, seed):
    """Train a model on demonstrations of the tasks, in turn.

    model_settings: see DEFAULT. At the second and at every tenth step, prints how many seconds are
    left at the pace so far.
    """
    import torch

    steps = model_settings["steps"]
    lr = model_settings["lr"]
    rng = random.Random(f"warm-up{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        batch_tasks = [tasks[k % len(tasks)] for k in range(model_settings["batch"])]
        examples = [tokenized(task.demonstration(rng), tokenizer) for task in batch_tasks]
        loss = backward(model, examples)
        # The learning rate rises over 50 steps, and falls to a tenth over all steps.
        rise = min(1, step / 50)
        optimizer.param_groups[0]["lr"] = lr * rise * (1 - 0.9 * step / steps)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number = step + 1
        if number == 1:
            # The first step takes longer than the others, so the pace is measured from its end on.
            first_end = time.monotonic()
        elif number == 2 or number % 10 == 0:
            remaining = (time.monotonic() - first_end) / (number - 1) * (steps - number)
            print(
                f"warm-up step {number}/{steps}, cross-entropy {loss:.2f}, {remaining:.0f} s left",
                flush=True,
            )


def make_model(names, path, seed, family="qwen2", **overrides):
    """Make the base model of these tasks at `path`, unless it is there already.

    The same seed gives the same model. family: the model type that transformers knows it by.
    overrides: settings that replace those of the tasks.
    """
    import torch

    path = Path(path)
    if (path / "config.json").exists():
        return
    tasks = [importlib.import_module(f"tasks.{name}") for name in names]
    model_settings = settings(tasks) | overrides
    print(
        f"{'+'.join(names)}: making a tiny base model, once, with {model_settings['steps']} steps "
        "on demonstrations; the second step says how long it takes",
        flush=True,
    )
    threads = torch.get_num_threads()
    # With one thread the model is the same however many cores there are. Two threads are 1.4 times
    # as fast on a quiet machine, and several times slower beside other work (bench/threads.py).
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(tasks, seed)
    torch.manual_seed(seed)
    model = build(
        tokenizer,
        model_settings["layers"],
        model_settings["hidden"],
        model_settings["positions"],
        family,
    )
    warm_up(model, tokenizer, tasks, model_settings, seed)
    torch.set_num_threads(threads)
    # The directory gets its name last, so that a model is whole or absent.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        temporary.rename(path)
    except OSError:
        # Another node has made the same model.
        shutil.rmtree(temporary)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{'+'.join(names)}: base model of {millions:.2f}M parameters in {path}", flush=True)

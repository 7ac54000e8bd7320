"""Tiny base models for tasks that bring a teacher: no run needs a hub. (Not a task: the name starts with `_`.)

A teacher is a function `teacher(rng) -> [(text, learn), ...]`: one example, in order, learn = True where the model speaks. A
good one errs now and then, so that reward has something to mend. `TINY` of the task says what may differ: words (texts that are one
token; any other character is one by itself), characters (that the examples may lack), steps, batch, lr, layers, hidden.

`python tasks/_tiny.py toy out/models/toy-seed0 0` makes the base model of task toy, seed 0; `toy:0.5,countdown:0.5` makes one for both.
"""
import importlib
import os
import random
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg

DEFAULT = dict(words=(), characters=(), steps=150, batch=64, lr=3e-3, layers=2, hidden=128, positions=256)


def settings(tasks):
    """TINY of several tasks as one: all words and characters, and the most of everything else."""
    tiny = [DEFAULT | getattr(t, "TINY", {}) for t in tasks]
    return {k: max(t[k] for t in tiny) if isinstance(v, (int, float)) else sum((tuple(t[k]) for t in tiny), ()) for k, v in DEFAULT.items()}


def make_tokenizer(tasks, seed=0):
    """<pad>, <eos>, in sorted order every character of the teachers' first 2,000 examples, then the words. `<eos>` ends an answer.

    It is a Qwen2 tokenizer without merges: transformers loads whatever lies beside a Qwen2 model as one.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer
    words, extra = (settings(tasks)[k] for k in ("words", "characters"))
    pattern = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    rng = random.Random(f"vocabulary{seed}")
    text = "".join((re.sub(pattern, "", part) if words else part) for t in tasks for _ in range(2000) for part, _ in t.teacher(rng))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # writes a space as another character
    characters = sorted({c for piece, _ in byte_level.pre_tokenize_str(text + "".join(extra)) for c in piece})
    tokenizer = Qwen2Tokenizer(vocab={t: i for i, t in enumerate(["<pad>", "<eos>"] + characters)}, merges=[], unk_token="<pad>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in words])
    return tokenizer


def make_model(names, path, seed, **other):
    """Make the base model of these tasks at `path` unless it is there already; the same seed gives the same model. other: settings instead of the tasks' own."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from preprocess import pack
    from train import token_logprobs
    path = Path(path)
    if (path / "config.json").exists():
        return
    tasks = [importlib.import_module(f"tasks.{n}") for n in names]
    torch.manual_seed(seed)
    s, rng, tokenizer = settings(tasks) | other, random.Random(f"warm-up{seed}"), make_tokenizer(tasks, seed)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=s["hidden"], intermediate_size=3 * s["hidden"], num_hidden_layers=s["layers"],
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=s["positions"], tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["lr"], betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(s["steps"]):
        rows = []
        for k in range(s["batch"]):
            ids, learn = [], []
            for text, mine in tasks[k % len(tasks)].teacher(rng):
                part = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * mine
                ids, learn = ids + part, learn + [mine] * len(part)
            rows.append((ids, learn))
        loss, count = 0.0, sum(sum(learn) for _, learn in rows)
        for row in pack([len(ids) for ids, _ in rows], 512):
            ids, mask = (torch.tensor([t for i in row for t in rows[i][k]]) for k in (0, 1))
            positions = torch.cat([torch.arange(len(rows[i][0])) for i in row])
            part = -(token_logprobs(model, ids, positions, 1.0)[0] * mask).sum() / count
            part.backward()
            loss += part.item()
        for group in optimizer.param_groups:
            group["lr"] = s["lr"] * min(1, step / 50) * (1 - 0.9 * step / s["steps"])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"{'+'.join(names)}: warm-up step {step + 1}/{s['steps']}, cross-entropy {loss:.2f}", flush=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        temporary.rename(path)
    except OSError:  # another node has made the same
        shutil.rmtree(temporary)
    print(f"{'+'.join(names)}: base model of {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters in {path}", flush=True)


if __name__ == "__main__":
    make_model(list(cfg.task_weights(sys.argv[1])), sys.argv[2], int(sys.argv[3]))

"""The toy task: put letters in alphabetical order. `qBxa=` -> `Baqx` (capitals first), 3 to 39 different letters.

Also makes its own base model, so that a run needs nothing from a hub: a 0.4M-parameter Qwen2, warmed up for some seconds
by a sloppy teacher who writes a wrong letter now and then. The result knows the game but rarely gets all of a long answer
right; reward alone has to make it exact. `python tasks/toy.py out/models/toy-seed0 0` makes the model of seed 0.
"""
import math
import os
import random
import shutil
import string
import sys
from pathlib import Path

LETTERS = sorted(string.ascii_letters)
SHORTEST, LONGEST = 3, 39  # letters; the answer has one more token, the end
SLOPPINESS = 0.08  # chance of a wrong letter in the teacher's answers
WARMUP_STEPS, WARMUP_BATCH, WARMUP_LR = 150, 64, 3e-3


def _draw(rng):
    n = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))  # log-uniform: many short, some long
    letters = rng.sample(LETTERS, n)
    return {"prompt": "".join(letters) + "=", "answer": "".join(sorted(letters))}


def problems(split, seed=0):
    """Problems of a split ("train" or "test"), dicts with "prompt" and "answer"; no test problem is a train problem."""
    test = [_draw(rng) for rng in [random.Random(f"test{seed}")] for _ in range(1000)]
    if split == "test":
        return test
    held_out, rng = {p["prompt"] for p in test}, random.Random(f"train{seed}")
    return [p for p in (_draw(rng) for _ in range(20000)) if p["prompt"] not in held_out]


def reward(problem, completion, finished):
    """1 for exactly the right answer, else 0. finished: the model ended by itself."""
    return float(finished and completion == problem["answer"])


def make_tokenizer():
    """One token per letter; no BOS, `<eos>` ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, Regex
    from transformers import PreTrainedTokenizerFast
    vocab = {t: i for i, t in enumerate(["<pad>", "<eos>", "="] + LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def make_model(path, seed):
    """Make the base model at `path` unless it is there already; the same seed gives the same model."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from preprocess import pack
    from train import token_logprobs
    path = Path(path)
    if (path / "config.json").exists():
        return
    torch.manual_seed(seed)
    rng, tokenizer = random.Random(f"warm-up{seed}"), make_tokenizer()
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP_LR, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(WARMUP_STEPS):
        rows = []
        for p in (_draw(rng) for _ in range(WARMUP_BATCH)):
            answer = "".join(rng.choice(p["prompt"][:-1]) if rng.random() < SLOPPINESS else c for c in p["answer"])
            prompt = tokenizer(p["prompt"])["input_ids"]
            rows.append((len(prompt), prompt + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]))
        loss, count = 0.0, sum(len(ids) - n for n, ids in rows)
        for row in pack([len(ids) for _, ids in rows], 512):
            ids = torch.tensor([t for i in row for t in rows[i][1]])
            positions = torch.cat([torch.arange(len(rows[i][1])) for i in row])
            mask = torch.cat([torch.arange(len(rows[i][1])) >= rows[i][0] for i in row])
            part = -(token_logprobs(model, ids, positions, 1.0)[0] * mask).sum() / count
            part.backward()
            loss += part.item()
        for group in optimizer.param_groups:
            group["lr"] = WARMUP_LR * min(1, step / 50) * (1 - 0.9 * step / WARMUP_STEPS)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"toy: warm-up step {step + 1}/{WARMUP_STEPS}, cross-entropy {loss:.2f}", flush=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)
    print(f"toy: base model of {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters in {path}", flush=True)


if __name__ == "__main__":
    make_model(sys.argv[1], int(sys.argv[2]))

"""How far is the policy that samples from the one that is trained? The paper's figure 7.

    python bench/kl.py [--seeds 3] [--sequences 2048] [--quick] [--plot]

KL(behaviour policy || trained policy), exact over the vocabulary. For each seed, a run of task
`tail` (bench/runs.py, pipeline, real vLLM) leaves a checkpoint of every step. From each version of
STARTS on, sequences of up to L tokens are sampled while the weights go on by one checkpoint every
L / g tokens, first after 2 L / g, as in arXiv 2509.19128, section 5.1. Then they are compared with
the checkpoint g steps after the start, which is the one that would train them:

    stale KV       an update leaves the KV cache as it is
    recomputed KV  an update computes the KV cache again
    conventional   the weights of the start sample all tokens

Nothing is timed. Transformers samples here, in float32; tests/test_weights.py tests that vLLM with
a stale and with a recomputed cache samples from the same distributions. All arms of a start have
the same prompts and random numbers, so that only the arms themselves differ. A KL is the mean over
tokens, then over the starts of a seed; intervals are 95%, Student's t over seeds.
"""

import gc
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import WORK, measured, panels, result_file, table
from bench.compare import interval_text, student
from bench.runs import COMMON, PIPELINE
from tasks import tail

STARTS = (0, 32, 64)
# g: optimizer steps between the first token and the training of its sequence
LAGS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)
# In flight there is no update before g = 3: the first would come after 2 L / g tokens
IN_FLIGHT = tuple(g for g in LAGS if g > 2)
ARMS = ("conventional", "stale KV", "recomputed KV")
BATCH = 512
BLOCK = 32
# Sequences that have ended leave the batch every so many tokens
SWEEP = 16


# ---- sampling under changing weights


def swaps(g, longest):
    """The updates while a sequence of `longest` tokens is sampled.

    {tokens sampled before the update: the version it brings, counted from the start}.
    """
    return {-(-j * longest // g): j - 1 for j in range(2, g)}


class Sampled:
    """A batch of B sampled sequences, of up to L tokens after prompts of P tokens.

    tokens [B, P + L]: those after a sequence's end mean nothing. lengths [B]: numbers of sampled
    tokens. logprobs [B, L, V]: of the distributions that the tokens came from.
    """

    def __init__(self, prompts, longest, vocabulary):
        n, self.prompt_length = prompts.shape
        self.tokens = torch.cat([prompts, torch.zeros(n, longest, dtype=torch.long)], 1)
        self.lengths = torch.full([n], longest)
        self.logprobs = torch.zeros(n, longest, vocabulary)


@torch.inference_mode()
def sample(models, prompts, uniforms, updates, recompute, end):
    """Sample at temperature 1 under changing weights; returns a Sampled.

    models: a list, by the version counted from the start. prompts [B, P]: token ids. uniforms
    [B, L]: a random number in [0, 1) for each token. updates: see `swaps`. recompute: whether an
    update computes the KV cache again. end: the token that ends a sequence.
    """
    n, longest = uniforms.shape
    sampled = Sampled(prompts, longest, models[0].config.vocab_size)
    cache = DynamicCache()
    version = 0
    # The sequences that have not ended
    rows = torch.arange(n)
    for t in range(longest):
        if t % SWEEP == 0:
            going_on = sampled.lengths[rows] > t
            rows = rows[going_on]
            if not len(rows):
                break
            if t:
                cache.batch_select_indices(torch.nonzero(going_on)[:, 0])
        position = sampled.prompt_length + t
        # The tokens before this one are in the KV cache
        first_new = position - 1 if t else 0
        if t in updates:
            version = updates[t]
            if recompute:
                cache = DynamicCache()
                first_new = 0
        inputs = sampled.tokens[rows, first_new:position]
        logits = models[version](inputs, past_key_values=cache).logits[:, -1]
        logprobs = torch.log_softmax(logits, -1)
        # The inverse of the distribution function; the last token of the vocabulary has whatever
        # rounding leaves
        below = logprobs.exp().cumsum(-1)[:, :-1].contiguous()
        chosen = torch.searchsorted(below, uniforms[rows, t : t + 1], right=True)[:, 0]
        sampled.tokens[rows, position] = chosen
        sampled.logprobs[rows, t] = logprobs
        ended = rows[(chosen == end) & (sampled.lengths[rows] > t)]
        sampled.lengths[ended] = t + 1
    return sampled


@torch.inference_mode()
def exact_kl(sampled, model):
    """KL(behaviour || model) of every sampled token, nats [B, L]; 0 after a sequence's end."""
    p = sampled.prompt_length
    kl = torch.zeros(sampled.logprobs.shape[:2])
    # Sequences of similar lengths are computed together
    for rows in sampled.lengths.argsort().split(128):
        longest = int(sampled.lengths[rows].max())
        logits = model(sampled.tokens[rows, : p + longest - 1]).logits[:, p - 1 :]
        behaviour = sampled.logprobs[rows, :longest]
        difference = behaviour - torch.log_softmax(logits, -1)
        kl[rows, :longest] = (behaviour.exp() * difference).sum(-1)
    inside = torch.arange(kl.shape[1]) < sampled.lengths[:, None]
    return kl * inside


# ---- all arms of a start


def block_sums(values):
    """Sums over blocks of BLOCK sequences: [B] -> list of B / BLOCK numbers."""
    return values.reshape(-1, BLOCK).sum(1).tolist()


def keep_sums(sums, key, sampled, kl, first):
    """Append to sums[key] the sums of KL and of tokens of every block.

    The "_after" sums are of the tokens after the first update, which is at token `first`.
    """
    position = torch.arange(kl.shape[1])
    inside = position < sampled.lengths[:, None]
    after = inside & (position >= first)
    columns = sums.setdefault(key, {"kl": [], "tokens": [], "kl_after": [], "tokens_after": []})
    columns["kl"] += block_sums(kl.double().sum(1))
    columns["tokens"] += block_sums(inside.sum(1))
    columns["kl_after"] += block_sums((kl * after).double().sum(1))
    columns["tokens_after"] += block_sums(after.sum(1))


def study(models, prompts, longest, end, seed):
    """{"arm, g": sums of every block} of a start; models: those of the versions from there on."""
    sums = {}
    generator = torch.Generator().manual_seed(seed)
    for batch in prompts.split(BATCH):
        uniforms = torch.rand([len(batch), longest], generator=generator)
        conventional = sample(models, batch, uniforms, {}, False, end)
        for g in LAGS:
            kl = exact_kl(conventional, models[g])
            keep_sums(sums, f"conventional, {g}", conventional, kl, longest)
        for g in IN_FLIGHT:
            updates = swaps(g, longest)
            for arm in ARMS[1:]:
                recompute = arm == "recomputed KV"
                sampled = sample(models, batch, uniforms, updates, recompute, end)
                kl = exact_kl(sampled, models[g])
                keep_sums(sums, f"{arm}, {g}", sampled, kl, min(updates))
        gc.collect()
    return sums


def checkpoints(run_dir, start):
    """The models of the versions from `start` on."""
    models = []
    for version in range(start, start + max(LAGS) + 1):
        path = run_dir / "checkpoints" / f"step_{version:06}" if version else runs.MODEL
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        models.append(model.eval())
    return models


def of_seed(seed, knobs, sequences, port, starts):
    """{"start": {"arm, g": sums}} of a training run."""
    name = f"kl-seed{seed}"
    run_dir = WORK / "runs" / name
    if not (run_dir / "checkpoints" / f"step_{knobs['steps']:06}").exists():
        run_dir = runs.run_to_its_end(name, knobs | dict(seed=seed), port)
    tokenizer = AutoTokenizer.from_pretrained(runs.MODEL)
    problems = tail.problems("train", seed + 1000)[:sequences]
    # All prompts have the same length, so that no padding is needed
    prompts = torch.tensor([tokenizer(problem["prompt"])["input_ids"] for problem in problems])
    by_start = {}
    for start in starts:
        models = checkpoints(run_dir, start)
        longest = knobs["max_new_tokens"]
        by_start[str(start)] = study(models, prompts, longest, tokenizer.eos_token_id, seed)
        print(f"seed {seed}, start {start}: done", flush=True)
    return by_start


# ---- results over seeds: {"seed 0": {"starts": {"0": {"arm, g": sums}}}}


def kl_by_seed(results, arm, g, starts=None, suffix=""):
    """Mean KL per token, nats [seeds]: each start counts the same.

    starts: those that count (None: all). suffix "_after": tokens after the first update alone.
    """
    means = []
    for result in results.values():
        of_starts = []
        for start, sums in result["starts"].items():
            if starts is None or start in starts:
                row = sums[f"{arm}, {g}"]
                of_starts.append(sum(row["kl" + suffix]) / sum(row["tokens" + suffix]))
        means.append(np.mean(of_starts))
    return np.array(means)


def ratio_by_seed(results, arms, g, starts=None, suffix=""):
    """KL of the first of two arms / KL of the second, [seeds]."""
    first, second = (kl_by_seed(results, arm, g, starts, suffix) for arm in arms)
    return first / second


def lags_of(results, arms):
    """The lags at which all of these arms have been measured."""
    result = next(iter(results.values()))
    sums = next(iter(result["starts"].values()))
    return [g for g in LAGS if all(f"{arm}, {g}" in sums for arm in arms)]


def print_results(results):
    """Print a row for each g."""
    rows = []
    for g in lags_of(results, ARMS):
        means = [f"{kl_by_seed(results, arm, g).mean():.1e}" for arm in ARMS]
        stale = ratio_by_seed(results, ("stale KV", "recomputed KV"), g)
        stale_after = ratio_by_seed(results, ("stale KV", "recomputed KV"), g, suffix="_after")
        conventional = ratio_by_seed(results, ("conventional", "stale KV"), g)
        ratios = [
            interval_text(student(stale), ".3f"),
            interval_text(student(stale_after), ".2f"),
            interval_text(student(conventional), ".2f"),
        ]
        rows.append([g, *means, *ratios])
    print("KL(behaviour || trained policy), nats per token; ratios with Student's t, 95%")
    columns = ["stale / recomputed", "the same after an update", "conventional / stale"]
    table(["g", *ARMS, *columns], rows)


def draw(results, path):
    """Draw KL by lag from every start, as the paper does, and the ratio of stale to recomputed."""
    starts = next(iter(results.values()))["starts"]
    titles = [f"from version {start}: KL, nats per token" for start in starts]
    figure, axes = panels([*titles, "KL, stale / recomputed cache"])
    for i, start in enumerate(starts):
        for k, arm in enumerate(ARMS):
            lags = [g for g in lags_of(results, [arm]) if g]
            plot(axes[i], lags, [kl_by_seed(results, arm, g, [start]) for g in lags], f"C{k}", arm)
        axes[i].set(xlabel="g, optimizer steps", yscale="log")
        lags = lags_of(results, ARMS)
        arms = ("stale KV", "recomputed KV")
        ratios = [ratio_by_seed(results, arms, g, [start]) for g in lags]
        plot(axes[-1], lags, ratios, f"C{i + 3}", f"from version {start}")
    axes[0].legend()
    axes[-1].axhline(1, color="k", alpha=0.5)
    axes[-1].set_xlabel("g, optimizer steps")
    axes[-1].legend()
    figure.savefig(path, dpi=80)


def plot(ax, lags, values, color, label):
    """A curve of means over seeds, and a band from the lowest seed to the highest."""
    ax.plot(lags, [v.mean() for v in values], "o-", color=color, label=label)
    low = [v.min() for v in values]
    high = [v.max() for v in values]
    ax.fill_between(lags, low, high, color=color, alpha=0.2)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=3, port=8970)
    p.add_argument(
        "--sequences", type=int, default=2048, help=f"from every start, a multiple of {BATCH}"
    )
    a = p.parse_args(argv)
    knobs = COMMON | PIPELINE | dict(save_every=1)
    starts = STARTS
    if a.quick:
        a.seeds = 1
        a.sequences = BATCH
        starts = STARTS[:1]
        knobs |= dict(steps=max(LAGS), max_new_tokens=64)
    wanted = {}
    for seed in range(a.seeds):
        wanted[f"seed {seed}"] = dict(knobs, seed=seed, sequences=a.sequences, starts=list(starts))

    def measure(key, _):
        runs.make_model()
        seed = wanted[key]["seed"]
        return dict(starts=of_seed(seed, knobs, a.sequences, a.port, starts))

    path = result_file(a, "kl")
    results = measured(path, wanted, None if a.plot else measure, reuse=not a.quick)
    print_results(results)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

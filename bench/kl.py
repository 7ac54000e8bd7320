"""How far is what samples from what is trained? KL(behaviour || trained policy), exact over the vocabulary: figure 7 of the paper.

    python bench/kl.py [--seeds 3] [--sequences 2048] [--quick] [--plot]

A run of task `tail` (bench/runs.py, pipeline, real vLLM) a seed leaves a checkpoint of every step. From each of STARTS
sequences of up to L tokens are sampled while the weights go on by one checkpoint every L / g tokens, first after 2 L / g, as
in arXiv 2509.19128, section 5.1; then they are compared with the checkpoint g steps after the start, which would train them:

    stale KV       an update leaves the KV cache as it is
    recomputed KV  an update computes it again
    conventional   all tokens by the start's weights, compared with every checkpoint up to 32 steps later

No clock: Transformers samples here, in float32 (that vLLM with a stale and with a recomputed cache samples the same
distributions is tested in tests/test_weights.py). All arms of a start have the same prompts and random numbers, so
they differ by what they are alone. Means are per token, intervals 95%, bootstrap over blocks of BLOCK sequences within
every start, all arms of a block together.
"""

import gc
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import runs
from bench.common import WORK, measured, panels, result_file, save_figure, table
from bench.runs import COMMON, PIPELINE
from tasks import tail

STARTS = (0, 32, 64)
# g: optimizer steps between the first token and the training of its sequence
LAGS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)
# in flight there is no update before g = 3: the first would come after 2 L / g tokens
IN_FLIGHT = tuple(g for g in LAGS if g > 2)
ARMS = ("conventional", "stale KV", "recomputed KV")
BATCH = 512
BLOCK = 32
# sequences that have ended leave the batch every so many tokens
SWEEP = 16
RESAMPLES = 2000


# ---- sampling under changing weights


def swaps(g, longest):
    """{tokens sampled: versions after the start} of the updates of a sequence of `longest` tokens."""
    return {-(-j * longest // g): j - 1 for j in range(2, g)}


def keep_rows(cache, rows):
    """Only these sequences of a KV cache."""
    cache.batch_select_indices(rows)
    return cache


class Sampled:
    """What a batch of B sequences was sampled as, up to L tokens after prompts of P.

    tokens [B, P + L], those after an end mean nothing; lengths [B], sampled tokens; versions [L], after the start;
    logprobs [B, L, V], of the distributions that the tokens came from.
    """

    def __init__(self, prompts, longest, vocabulary):
        n, p = prompts.shape
        self.prompt = p
        self.tokens = torch.cat([prompts, torch.zeros(n, longest, dtype=torch.long)], 1)
        self.lengths = torch.full([n], longest)
        self.versions = torch.zeros(longest, dtype=torch.long)
        self.logprobs = torch.zeros(n, longest, vocabulary)


@torch.inference_mode()
def sample(models, prompts, uniforms, updates, recompute, end):
    """Sequences at temperature 1, as Sampled.

    models: by versions after the start; prompts [B, P] token ids; uniforms [B, L] in [0, 1), one a token;
    updates: see `swaps`; recompute: the KV cache, at every update; end: the token that ends a sequence.
    """
    n, longest = uniforms.shape
    found = Sampled(prompts, longest, models[0].config.vocab_size)
    cache = DynamicCache()
    version = 0
    # the sequences that go on
    rows = torch.arange(n)
    for t in range(longest):
        if t % SWEEP == 0:
            going_on = found.lengths[rows] > t
            rows = rows[going_on]
            if not len(rows):
                break
            if t:
                keep_rows(cache, torch.nonzero(going_on)[:, 0])
        here = found.prompt + t
        unseen = here - 1 if t else 0
        if t in updates:
            version = updates[t]
            if recompute:
                cache = DynamicCache()
                unseen = 0
        found.versions[t] = version
        inputs = found.tokens[rows, unseen:here]
        logits = models[version](inputs, past_key_values=cache).logits[:, -1]
        logprobs = torch.log_softmax(logits, -1)
        # the inverse of the distribution function; the last word has whatever rounding leaves
        below = logprobs.exp().cumsum(-1)[:, :-1].contiguous()
        chosen = torch.searchsorted(below, uniforms[rows, t : t + 1], right=True)[:, 0]
        found.tokens[rows, here] = chosen
        found.logprobs[rows, t] = logprobs
        ended = rows[(chosen == end) & (found.lengths[rows] > t)]
        found.lengths[ended] = t + 1
    return found


@torch.inference_mode()
def exact_kl(found, model):
    """KL(behaviour || model) of every sampled token, nats [B, L]; 0 after a sequence's end."""
    p = found.prompt
    kl = torch.zeros(found.logprobs.shape[:2])
    order = found.lengths.argsort()
    # of similar lengths
    for rows in order.split(128):
        longest = int(found.lengths[rows].max())
        logits = model(found.tokens[rows, : p + longest - 1]).logits[:, p - 1 :]
        behaviour = found.logprobs[rows, :longest]
        difference = behaviour - torch.log_softmax(logits, -1)
        kl[rows, :longest] = (behaviour.exp() * difference).sum(-1)
    inside = torch.arange(kl.shape[1]) < found.lengths[:, None]
    return kl * inside


# ---- a start: all arms


def block_sums(values):
    """[B] -> [B / BLOCK], as a list."""
    return values.reshape(-1, BLOCK).sum(1).tolist()


def keep_sums(sums, key, found, kl, first):
    """Append to sums[key] what bootstrap needs: of every block, KL and tokens, of all tokens and of those
    after the first update, at token `first`.
    """
    place = torch.arange(kl.shape[1])
    inside = place < found.lengths[:, None]
    after = inside & (place >= first)
    columns = sums.setdefault(key, {"kl": [], "tokens": [], "kl_after": [], "tokens_after": []})
    columns["kl"] += block_sums(kl.double().sum(1))
    columns["tokens"] += block_sums(inside.sum(1))
    columns["kl_after"] += block_sums((kl * after).double().sum(1))
    columns["tokens_after"] += block_sums(after.sum(1))


def study(models, prompts, longest, end, seed):
    """{"arm, g": sums of every block} of a start; models: of the versions from there on."""
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
                found = sample(models, batch, uniforms, updates, arm == "recomputed KV", end)
                kl = exact_kl(found, models[g])
                keep_sums(sums, f"{arm}, {g}", found, kl, min(updates))
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
    prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]
    # all of one length: there is no padding to the left
    prompts = torch.tensor(prompts)
    found = {}
    for start in starts:
        models = checkpoints(run_dir, start)
        longest = knobs["max_new_tokens"]
        found[str(start)] = study(models, prompts, longest, tokenizer.eos_token_id, seed)
        print(f"seed {seed}, start {start}: done", flush=True)
    return found


# ---- intervals


def resampled(n, rng):
    """Weights [RESAMPLES, n] of the blocks: how often each is drawn."""
    return rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)


class Cells:
    """Means over (seed, start) cells, with bootstrap: blocks are drawn anew within every cell."""

    def __init__(self, results, starts=None):
        rng = np.random.default_rng(0)
        self.cells = []
        for result in results.values():
            for start, sums in result["starts"].items():
                if starts is None or start in starts:
                    n = len(next(iter(sums.values()))["kl"])
                    weights = np.vstack([np.ones(n, int), resampled(n, rng)])
                    self.cells.append((sums, weights))

    def kl(self, arm, g, of=""):
        """Mean KL per token, nats [1 + RESAMPLES]: the first of what was drawn, then of resamples; every
        cell counts the same. of: "_after": tokens after the first update alone.
        """
        means = []
        for sums, weights in self.cells:
            row = sums[f"{arm}, {g}"]
            means.append(weights @ row["kl" + of] / (weights @ row["tokens" + of]))
        return np.mean(means, axis=0)

    def ratio(self, g, of=""):
        """KL with a stale cache / with a recomputed one, as in `kl`."""
        return self.kl("stale KV", g, of) / self.kl("recomputed KV", g, of)


def interval(values):
    """(value, low, high), 95%."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)


def words(values, form):
    """1.02 (0.98-1.06)."""
    value, low, high = interval(values)
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def lags_of(results, arms):
    """The lags at which all of these arms have been measured."""
    sums = next(iter(next(iter(results.values()))["starts"].values()))
    return [g for g in LAGS if all(f"{arm}, {g}" in sums for arm in arms)]


def say(results):
    """The tables."""
    cells = Cells(results)
    rows = []
    for g in lags_of(results, ARMS):
        row = [g, *(words(cells.kl(arm, g), ".1e") for arm in ARMS)]
        rows.append([*row, words(cells.ratio(g), ".2f"), words(cells.ratio(g, "_after"), ".2f")])
    print("KL(behaviour || trained policy), nats per token (95%)")
    table(["g", *ARMS, "stale / recomputed", "of tokens after an update"], rows)
    print("\nstale / recomputed of every seed and start (95%)")
    rows = []
    for seed, result in results.items():
        for start in result["starts"]:
            own = Cells({seed: result}, [start])
            chosen = [g for g in lags_of(results, ARMS) if g >= 8]
            rows.append([f"{seed}, {start}", *(words(own.ratio(g), ".2f") for g in chosen)])
    table(["seed, start", *(f"g = {g}" for g in chosen)], rows)


def draw(results, path):
    """KL by lag of every start point, as the paper's figure, and what a stale cache adds."""
    starts = next(iter(results.values()))["starts"]
    titles = [f"from version {start}: KL, nats per token" for start in starts]
    figure, axes = panels([*titles, "KL, stale / recomputed cache"])
    for i, start in enumerate(starts):
        cells = Cells(results, [start])
        for k, arm in enumerate(ARMS):
            plot(axes[i], lags_of(results, [arm]), lambda g: cells.kl(arm, g), f"C{k}", arm)
        axes[i].set(xlabel="g, optimizer steps", yscale="log")
        plot(axes[-1], lags_of(results, ARMS), cells.ratio, f"C{i + 3}", f"from version {start}")
    axes[0].legend()
    axes[-1].axhline(1, color="k", alpha=0.5)
    axes[-1].set_xlabel("g, optimizer steps")
    axes[-1].legend()
    save_figure(figure, path)


def plot(ax, lags, values_of, color, label):
    """A curve with its intervals; nothing of g = 0, which is 0 but for rounding."""
    lags = [g for g in lags if g]
    value, low, high = np.transpose([interval(values_of(g)) for g in lags])
    ax.plot(lags, value, "o-", color=color, label=label)
    ax.fill_between(lags, low, high, color=color, alpha=0.2)


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=3, port=8970)
    p.add_argument("--sequences", type=int, default=2048, help=f"of every start, by {BATCH}")
    a = p.parse_args(argv)
    knobs = COMMON | PIPELINE | dict(save_every=1)
    starts = STARTS
    if a.quick:
        a.seeds, a.sequences = 1, BATCH
        starts = STARTS[:1]
        knobs |= dict(steps=max(LAGS), max_new_tokens=64)
    runs.make_model()
    wanted = {}
    for seed in range(a.seeds):
        wanted[f"seed {seed}"] = dict(knobs, seed=seed, sequences=a.sequences, starts=list(starts))

    def measure(key, _):
        seed = wanted[key]["seed"]
        return dict(starts=of_seed(seed, knobs, a.sequences, a.port, starts))

    path = result_file(a, "kl")
    results = measured(path, wanted, None if a.plot else measure, not a.quick)
    say(results)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""What a run should have computed, in the plainest way: one sequence at a time, all logits, Hugging Face's own model.

tools/doctor.py compares a run with it; it shares no code with what it checks, beyond the tokenizer, the tasks and
`actor.Sampler`. Deliberately absent: packing, speed.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import config as cfg
from actor import Sampler
from plumbing import archive
from plumbing.problems import load_problems
from plumbing.prompts import Prompter
from plumbing.samples import split


@dataclasses.dataclass
class Expected:
    """Of each sampled token of a sequence [N]: its logprob, and of its distribution entropy and variance of -log p."""

    logprobs: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray


class HeadInFloat32(torch.nn.Module):
    """A model's head as --head_float32 has it; what the family does to its output stays the model's."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden):
        bias = getattr(self.head, "bias", None)
        bias = bias if bias is None else bias.float()
        return torch.nn.functional.linear(hidden.float(), self.head.weight.float(), bias)


class Weights:
    """The model of every version that a run has left, loaded when it is asked for; the last two stay."""

    def __init__(self, config, run_dir, device):
        self.config = config
        self.run_dir = run_dir
        self.device = device
        self.load = functools.lru_cache(2)(self.load)

    def folder(self, version):
        """Where the weights of a version are, None if nowhere."""
        if version == 0:
            return self.config.model
        path = Path(self.run_dir, "checkpoints", f"step_{version:06d}")
        return path if path.exists() else None

    def there(self, versions):
        """Are the weights of all of these versions there?"""
        return all(self.folder(version) is not None for version in versions)

    def load(self, version):
        dtype = getattr(torch, self.config.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.folder(version), dtype=dtype)
        if self.config.head_float32:
            model.set_output_embeddings(HeadInFloat32(model.get_output_embeddings()))
        return model.to(self.device).eval()

    def logits(self, version, tokens, cache=None, first=0):
        """[T, V] float32 after each of these tokens [T], which stand at `first` and on; cache: KV of those before."""
        model = self.load(version)
        ids = torch.as_tensor(np.asarray(tokens), device=self.device)[None]
        places = torch.arange(first, first + ids.shape[1], device=self.device)[None]
        out = model(
            input_ids=ids,
            position_ids=places,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.logits[0].float()


@torch.no_grad()
def expected(weights, sample, recompute):
    """What the engine's logprobs should be, by the versions that it says sampled each token: `Expected`.

    An update in the middle of a sequence leaves the KV cache of all tokens before as it is, or, with
    `recompute`, has it computed again.
    """
    tokens = sample["tokens"]
    places = np.flatnonzero(sample["mask"])
    versions = sample["versions"][places]
    borders = [0, *np.flatnonzero(np.diff(versions)) + 1, len(places)]
    cache = DynamicCache()
    parts = []
    for first, last in zip(borders, borders[1:]):
        version = int(versions[first])
        # the token before the first one of this version is what it is sampled from
        start = 0 if recompute or first == 0 else places[first] - 1
        end = places[last - 1]
        kv = None if recompute else cache
        logits = weights.logits(version, tokens[start:end], kv, start)
        wanted = places[first:last] - 1 - start
        logits = logits[torch.as_tensor(wanted, device=logits.device)] / float(
            sample["temperature"]
        )
        logp = torch.log_softmax(logits, -1)
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        variance = (p * logp**2).sum(-1) - entropy**2
        targets = torch.as_tensor(tokens[places[first:last]], device=logp.device)
        parts.append((logp.gather(1, targets[:, None])[:, 0], entropy, variance))
    joined = [torch.cat(x).double().cpu().numpy() for x in zip(*parts)]
    return Expected(*joined)


def versions_of(sample):
    """The versions that sampled its tokens, ascending."""
    return sorted(set(sample["versions"][sample["mask"]].tolist()))


def one_kv(sample):
    """Was all of its KV cache computed by the versions that sampled its tokens, turn by turn alike?"""
    of_tokens = len(versions_of(sample))
    turns = int((np.diff(sample["mask"].astype(int)) == 1).sum())
    return sample["num_versions"] == of_tokens and (turns == 1 or of_tokens == 1)


def plain_advantages(rewards, kind):
    """Advantages of a group, [G] -> [G], by the definitions of --advantage."""
    found = []
    for k, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != k]
        if kind == "none":
            found.append(reward)
        elif not others:
            found.append(0.0)
        elif kind == "loo":
            found.append(reward - np.mean(others))
        elif kind == "mean":
            found.append(reward - np.mean(rewards))
        else:
            found.append((reward - np.mean(rewards)) / (np.std(rewards) + 1e-6))
    return np.array(found, np.float64)


def loss_on_policy(config, logprobs, advantage, entropy):
    """(value, what to differentiate) of one sample's loss where pi = mu, tokens [N] summed: all losses are REINFORCE there."""
    n = len(logprobs)
    gradient = -(advantage * logprobs).sum()
    value = -advantage * n if config.loss in ("ppo", "gspo") else gradient
    if config.loss == "gspo":
        value = value / n
        gradient = gradient / n
    if config.entropy_coef:
        gradient = gradient - config.entropy_coef * entropy.sum()
        value = value - config.entropy_coef * entropy.sum()
    if config.normalizer == "sequence":
        return value / n, gradient / n
    return value, gradient


def gradient_of_first_step(weights, samples, advantages):
    """(loss, norm of the gradient, {parameter: gradient}) of the step that made version 1, sample by sample.

    samples: what it trained, all by version 0, as nothing else can have sampled it.
    """
    config = weights.config
    model = weights.load(0)
    model.zero_grad()
    total = 0.0
    tokens = 0
    for sample, advantage in zip(samples, advantages):
        mask = torch.from_numpy(sample["mask"])[1:].to(weights.device)
        ids = torch.as_tensor(sample["tokens"], device=weights.device)
        logits = weights.logits(0, sample["tokens"][:-1]) / float(sample["temperature"])
        logp = torch.log_softmax(logits[mask], -1)
        entropy = -(logp.exp() * logp).sum(-1)
        logprobs = logp.gather(1, ids[1:][mask][:, None])[:, 0]
        value, to_differentiate = loss_on_policy(config, logprobs, float(advantage), entropy)
        to_differentiate.backward()
        total += float(torch.as_tensor(value).detach())
        tokens += int(mask.sum())
    count = tokens if config.normalizer == "tokens" else len(samples)
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradients[name] = p.grad.float().cpu() / count
    model.zero_grad()
    norm = float(sum((g.double() ** 2).sum() for g in gradients.values()) ** 0.5)
    # a run divides its loss by samples, whatever its gradient is divided by
    return total / len(samples), norm, gradients


class Recording:
    """What a run has left, put together: its groups, each with the problem that it should be of.

    groups: {draw: record with `samples`, `task`, `problem`}; steps: lines of metrics.jsonl, by version.
    """

    def __init__(self, config, run_dir, steps, weights):
        self.config = config
        self.run_dir = run_dir
        self.steps = steps
        self.weights = weights
        self.prompter = Prompter(config)
        self.train_problems = load_problems(config, "train")
        self.test_problems = load_problems(config, "test")
        self.groups = archive.groups(run_dir)
        sampler = Sampler(self.train_problems, cfg.task_weights(config.task), config.seed)
        drawn = [sampler.next() for _ in range(max(self.groups, default=-1) + 1)]
        for draw, group in self.groups.items():
            task, number = drawn[draw]
            group["samples"] = split(group)
            group["task_name"] = task
            group["problem"] = self.train_problems[task][number]

    def prompt(self, problem):
        """Token ids of a problem's prompt, by the tokenizer alone."""
        c = self.config
        tokenizer = self.prompter.tokenizer
        if not c.chat:
            return tokenizer(c.system_prompt + problem["prompt"])["input_ids"]
        return tokenizer(self.conversation([problem["prompt"]]), add_special_tokens=False)[
            "input_ids"
        ]

    def conversation(self, texts):
        """User's and assistant's words in turn as text, by the model's template."""
        c = self.config
        messages = [{"role": "system", "content": c.system_prompt}] if c.system_prompt else []
        for k, text in enumerate(texts):
            messages.append({"role": ("user", "assistant")[k % 2], "content": text})
        thinking = {} if c.thinking == "auto" else {"enable_thinking": c.thinking == "on"}
        return self.prompter.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **thinking
        )

    def between(self, words, said):
        """Token ids of the environment's words between two turns; said: all texts before, the prompt first."""
        tokenizer = self.prompter.tokenizer
        if not self.config.chat:
            return tokenizer(words, add_special_tokens=False)["input_ids"]
        before = self.conversation(said[:-1])
        text = self.conversation([*said, words]).removeprefix(before).removeprefix(said[-1])
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        # the engine has sampled the end of the turn
        return tokens[1:] if tokens[0] in self.prompter.stop else tokens

    def samples(self, draws=None):
        """[(draw, sample)] of all groups, or of some."""
        found = []
        for draw in sorted(self.groups) if draws is None else draws:
            found += [(draw, sample) for sample in self.groups[draw]["samples"]]
        return found

    def first_draws(self):
        """Draws from the first one on up to the first that is missing: no choice was made among them."""
        draws = []
        while len(draws) in self.groups:
            draws.append(len(draws))
        return draws

    def turns(self, sample):
        """The parts that were sampled, [[token]], and those in between that were not, the prompt first."""
        sampled = []
        given = []
        borders = np.flatnonzero(np.diff(sample["mask"].astype(int), prepend=2)).tolist()
        for start, end in zip(borders, [*borders[1:], len(sample["tokens"])]):
            part = sample["tokens"][start:end].tolist()
            (sampled if sample["mask"][start] else given).append(part)
        return sampled, given

"""What a run should have computed, in the plainest way: one sequence at a time, all logits, Hugging Face's own model.

tools/checks.py compares a run with it; it shares no code with what it checks, beyond the tokenizer and the tasks. It
knows the advantages, losses and normalisers named here. Deliberately absent: packing, speed.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, DynamicCache

import config as cfg
from plumbing import archive
from plumbing.problems import load_problems
from plumbing.prompts import Prompter
from plumbing.samples import split

# of attempt k of a group with rewards r [G], G >= 2
ADVANTAGES = {
    "loo": lambda r, k: r[k] - np.delete(r, k).mean(),
    "mean": lambda r, k: r[k] - r.mean(),
    "mean_std": lambda r, k: (r[k] - r.mean()) / (r.std() + 1e-6),
    "none": lambda r, k: r[k],
}
LOSSES = ("reinforce", "ppo", "cispo", "gspo", "icepop")
NORMALIZERS = ("samples", "tokens", "sequence")


# ---- what a run has left


class Recording:
    """What the two runs have left, put together.

    continued: version from which the second run went on; seeds: of every engine; steps: {version: line of
    metrics.jsonl}; groups: {draw: record with `samples` and the names `task` and `problem`}, of those with samples.
    """

    def __init__(self, config, run_dir, steps, continued, seeds, device):
        self.config = config
        self.run_dir = Path(run_dir)
        self.steps = steps
        self.continued = continued
        self.seeds = seeds
        self.device = device
        self.prompter = Prompter(config)
        self.train_problems = load_problems(config, "train")
        self.test_problems = load_problems(config, "test")
        # the last two stay
        self.model = functools.lru_cache(2)(self.load_model)
        self.groups = {}
        tasks = list(cfg.task_weights(config.task))
        for draw, record in sorted(archive.groups(run_dir).items()):
            if len(record["lengths"]):
                task, number = tasks[record["task"][0]], int(record["problem"][0])
                problem = self.train_problems[task][number]
                of_group = dict(samples=split(record), task=task, number=number, problem=problem)
                self.groups[draw] = of_group

    def samples(self, draws=None):
        """[(draw, sample)] of all groups, or of some."""
        draws = self.groups if draws is None else draws
        return [(draw, sample) for draw in draws for sample in self.groups[draw]["samples"]]

    def trained(self, step):
        """Samples as they were trained by the step that made version `step`, of all its ranks' micro-batches."""
        batches = archive.batches(self.run_dir, step)
        return [sample for batch in batches for sample in split(batch) if sample["outcome"] >= 0]

    def folder(self, version):
        """Where the weights of a version are."""
        if version == 0:
            return self.config.model
        return self.run_dir / "checkpoints" / f"step_{version:06d}"

    def load_model(self, version):
        dtype = getattr(torch, self.config.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.folder(version), dtype=dtype)
        return model.to(self.device).eval()

    # ---- texts

    def parts(self, sample):
        """(turns that were sampled, what stands before each of them, the prompt first): [[token]] both."""
        turns = []
        contexts = []
        borders = np.flatnonzero(np.diff(sample["mask"].astype(int), prepend=2)).tolist()
        for start, end in zip(borders, [*borders[1:], len(sample["tokens"])]):
            part = sample["tokens"][start:end].tolist()
            (turns if sample["mask"][start] else contexts).append(part)
        return turns, contexts

    def conversation(self, texts):
        """User's and assistant's words in turn as text, by the model's template."""
        system = self.config.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        for k, text in enumerate(texts):
            messages.append({"role": ("user", "assistant")[k % 2], "content": text})
        return self.prompter.render(messages)

    def context(self, texts):
        """Token ids between the turn before and the next one; texts: prompt, turn, reply, turn, reply, ..."""
        tokenizer = self.prompter.tokenizer
        first = len(texts) == 1
        if not self.config.chat:
            text = self.config.system_prompt + texts[0] if first else texts[-1]
            return tokenizer(text, add_special_tokens=first)["input_ids"]
        text = self.conversation(texts)
        if not first:
            text = text.removeprefix(self.conversation(texts[:-2])).removeprefix(texts[-2])
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        # the engine has sampled the end of the turn
        return tokens[1:] if not first and tokens[0] in self.prompter.stop else tokens


def trainer_state(folder):
    """What a checkpoint keeps of the trainer: {"model": ..., "optimizer": {"state": ..., "param_groups": ...}}."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = Path(temporary, "state.pt")
        dcp_to_torch_save(Path(folder, "trainer"), file)
        return torch.load(file, mmap=True, weights_only=True)


def adam_states(state):
    """[(parameter, its settings, its moments)] of those that Adam has updated."""
    found = []
    for group in state["optimizer"]["param_groups"]:
        for name in group["params"]:
            of_parameter = state["optimizer"]["state"].get(name, {})
            if "exp_avg" in of_parameter:
                found.append((name, group, of_parameter))
    return found


# ---- what an engine reports


def of_targets(logits, targets, temperature):
    """Of each token [N] sampled from logits [N, V]: (logprob, entropy of its distribution, variance of -log p)."""
    logp = torch.log_softmax(logits.float() / float(temperature), -1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    variance = (p * logp**2).sum(-1) - entropy**2
    targets = torch.as_tensor(targets, device=logits.device)
    return logp.gather(1, targets[:, None])[:, 0], entropy, variance


@torch.no_grad()
def expected(run, sample, recompute):
    """What the engine should report of each sampled token, by the version that it says sampled it: `of_targets`, numpy.

    An update in the middle of a sequence leaves the KV cache of all tokens before as it is, or, with
    `recompute`, has it computed again.
    """
    tokens = torch.as_tensor(sample["tokens"], device=run.device)
    positions = np.flatnonzero(sample["mask"])
    versions = sample["versions"][positions]
    borders = [0, *np.flatnonzero(np.diff(versions)) + 1, len(positions)]
    cache = DynamicCache()
    found = []
    for first, last in zip(borders, borders[1:]):
        # the token before the first one of this version is what it is sampled from
        start = 0 if recompute or first == 0 else positions[first] - 1
        end = positions[last - 1]
        logits = run.model(int(versions[first]))(
            input_ids=tokens[None, start:end],
            position_ids=torch.arange(start, end, device=run.device)[None],
            past_key_values=None if recompute else cache,
            use_cache=not recompute,
        ).logits[0]
        own = positions[first:last]
        found.append(of_targets(logits[own - 1 - start], tokens[own], sample["temperature"]))
    return [torch.cat(x).double().cpu().numpy() for x in zip(*found)]


def versions_of(sample):
    """The versions that sampled its tokens, ascending."""
    return sorted(set(sample["versions"][sample["mask"]].tolist()))


def has_known_cache(sample):
    """Was all of its KV cache computed by the versions that sampled its tokens, turn by turn alike?"""
    of_tokens = len(versions_of(sample))
    turns = int((np.diff(sample["mask"].astype(int)) == 1).sum())
    return sample["num_versions"] == of_tokens and (turns == 1 or of_tokens == 1)


# ---- what the trainer computes


def advantages(rewards, kind):
    """Advantages of a group, [G] -> [G], by the definitions of --advantage."""
    r = np.array(rewards, np.float64)
    if len(r) == 1 and kind != "none":
        return np.zeros(1)
    return np.array([ADVANTAGES[kind](r, k) for k in range(len(r))])


def on_policy_loss(config, logprobs, advantage, entropy):
    """Loss of one sample's tokens [N], summed, where pi = mu: nothing is clipped, and all have REINFORCE's gradient."""
    # 1, with the gradient of log pi
    ratio = (logprobs - logprobs.detach()).exp()
    loss = -advantage * (ratio if config.loss in ("ppo", "gspo") else logprobs)
    if config.loss == "gspo":
        loss = loss / len(loss)
    loss = loss - config.entropy_coef * entropy
    if config.normalizer == "sequence":
        loss = loss / len(loss)
    return loss.sum()


def first_step(run, trained):
    """(loss, norm of the gradient, {parameter: gradient}) of the step that made version 1, sample by sample.

    All that it trained was sampled by version 0. trained: names of the parameters that were.
    """
    config = run.config
    model = run.model(0)
    samples = run.trained(1)
    total = 0.0
    tokens = 0
    for sample in samples:
        positions = np.flatnonzero(sample["mask"])
        if not len(positions):
            continue
        ids = torch.as_tensor(sample["tokens"], device=run.device)
        logits = model(input_ids=ids[None]).logits[0, positions - 1]
        logprobs, entropy, _ = of_targets(logits, ids[positions], sample["temperature"])
        loss = on_policy_loss(config, logprobs, float(sample["advantage"]), entropy)
        loss.backward()
        total += loss.item()
        tokens += len(positions)
    count = tokens if config.normalizer == "tokens" else len(samples)
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None and name in trained:
            gradients[name] = p.grad.float().cpu() / count
    model.zero_grad()
    norm = float(sum((g.double() ** 2).sum() for g in gradients.values()) ** 0.5)
    # a run divides its loss by samples, whatever its gradient is divided by
    return total / len(samples), norm, gradients


def adam_step(before, after):
    """Is version v + 1 what AdamW makes of v? Two `trainer_state` -> (steps counted, elements that differ, elements,
    norm of the gradient that it was given).

    The moments say which gradient came: g = (m' - b1 m) / (1 - b1), and v' = b2 v + (1 - b2) g^2.
    """
    steps = differ = elements = 0
    square = 0.0
    for name, group, new in adam_states(after):
        b1, b2 = group["betas"]
        old = before["optimizer"]["state"][name]
        gradient = (new["exp_avg"] - b1 * old["exp_avg"]) / (1 - b1)
        second = b2 * old["exp_avg_sq"] + (1 - b2) * gradient**2
        scale = (new["exp_avg_sq"] / (1 - b2 ** new["step"])).sqrt() + group["eps"]
        change = new["exp_avg"] / (1 - b1 ** new["step"]) / scale
        change = change + group["weight_decay"] * before["model"][name]
        weights = before["model"][name] - group["lr"] * change
        # within some digits of float32
        same = torch.isclose(new["exp_avg_sq"], second, rtol=1e-2, atol=1e-30)
        same &= torch.isclose(after["model"][name], weights, rtol=5e-7, atol=1e-2 * group["lr"])
        differ += int((~same).sum())
        elements += same.numel()
        square += float((gradient.double() ** 2).sum())
        steps = max(steps, int(new["step"] - old["step"]))
    return steps, differ, elements, square**0.5

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
from plumbing.problems import Prompter, load_problems
from plumbing.samples import split
from tools import report

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

    continued: version from which the second run went on; steps: {version: line of metrics.jsonl}; groups:
    {draw: dict of samples, task, number and problem}, of those that have samples.
    """

    def __init__(self, run_dir, steps, continued, device):
        self.config = config = cfg.load(run_dir)
        self.run_dir = Path(run_dir)
        self.steps = steps
        self.continued = continued
        self.device = device
        self.prompter = Prompter(config)
        self.train_problems = load_problems(config, "train")
        self.test_problems = load_problems(config, "test")
        # the last two stay
        self.model = functools.lru_cache(2)(self.load_model)
        self.groups = {}
        tasks = list(cfg.task_weights(config.task))
        for draw, record in sorted(report.groups(run_dir).items()):
            samples = split(record)
            if samples:
                task = tasks[samples[0]["task"]]
                number = int(samples[0]["problem"])
                problem = self.train_problems[task][number]
                group = dict(samples=samples, task=task, number=number, problem=problem)
                self.groups[draw] = group

    def samples(self, draws=None):
        """[(draw, sample)] of all groups, or of some."""
        draws = self.groups if draws is None else draws
        return [(draw, sample) for draw in draws for sample in self.groups[draw]["samples"]]

    def trained(self, step):
        """Samples as they were trained by the step that made version `step`, of all its ranks' micro-batches."""
        batches = report.batches(self.run_dir, step)
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

    def parts(self, sample):
        """(turns that were sampled, what stands before each of them, the prompt first): [[token]] both."""
        parts = {True: [], False: []}
        borders = np.flatnonzero(np.diff(sample["mask"])) + 1
        for first, tokens in zip([0, *borders], np.split(sample["tokens"], borders)):
            parts[bool(sample["mask"][first])].append(tokens.tolist())
        return parts[True], parts[False]

    def prompt(self, problem):
        """Token ids of a problem's prompt, by the tokenizer alone."""
        system = self.config.system_prompt
        if not self.config.chat:
            return self.prompter.tokenizer(system + problem["prompt"])["input_ids"]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": problem["prompt"]})
        return self.encode(self.prompter.render(messages))

    def is_reply(self, tokens, reply):
        """Are these tokens, None for the end of the episode, what an environment's reply becomes?"""
        if tokens is None or reply is None:
            return tokens is reply
        # a template puts something around it
        text = self.prompter.tokenizer.decode(tokens)
        return reply.strip() in text if self.config.chat else tokens == self.encode(reply)

    def encode(self, text):
        """Token ids of a text that is no beginning."""
        return self.prompter.tokenizer(text, add_special_tokens=False)["input_ids"]


def trainer_state(run, version):
    """What a checkpoint keeps of the trainer: {"model": ..., "optimizer": {"state": ..., "param_groups": ...}}."""
    if version == 0:
        model = AutoModelForCausalLM.from_pretrained(run.folder(0), dtype=torch.float32)
        return {"model": model.state_dict(), "optimizer": {"state": {}}}
    with tempfile.TemporaryDirectory(dir=run.folder(version)) as folder:
        file = Path(folder, "state.pt")
        dcp_to_torch_save(run.folder(version) / "trainer", file)
        return torch.load(file, mmap=True, weights_only=True)


# ---- what an engine reports


def of_targets(logits, targets, temperature):
    """Of each token [N] sampled from logits [N, V]: (logprob, entropy of its distribution, variance of -log p)."""
    logp = torch.log_softmax(logits.float() / float(temperature), -1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    variance = (p * logp**2).sum(-1) - entropy**2
    return logp.gather(1, targets[:, None])[:, 0], entropy, variance


@torch.no_grad()
def expected(run, sample):
    """What the engine should report of each sampled token, by the version that it says sampled it: `of_targets`, numpy.

    An update in the middle of a sequence leaves the KV cache of all tokens before as it is, or, with
    --recompute_kv, has it computed again.
    """
    tokens = torch.as_tensor(sample["tokens"], device=run.device)
    positions = np.flatnonzero(sample["mask"])
    versions = sample["versions"][positions]
    borders = np.flatnonzero(np.diff(versions)) + 1
    cache = DynamicCache()
    found = []
    for own, version in zip(np.split(positions, borders), versions[[0, *borders]]):
        # the token before the first one of this version is what it is sampled from
        cache = DynamicCache() if run.config.recompute_kv else cache
        start = own[0] - 1 if cache.get_seq_length() else 0
        ids = tokens[None, start : own[-1]]
        logits = run.model(int(version))(input_ids=ids, past_key_values=cache).logits[0]
        found.append(of_targets(logits[own - 1 - start], tokens[own], sample["temperature"]))
    return [torch.cat(x).double().cpu().numpy() for x in zip(*found)]


def versions_of(sample):
    """The versions that sampled its tokens, ascending."""
    return sorted(set(sample["versions"][sample["mask"]].tolist()))


# ---- what the trainer computes


def advantage(rewards, k, kind):
    """Of attempt k of a group with these rewards [G], by the definition of --advantage."""
    if len(rewards) == 1 and kind != "none":
        return 0.0
    return ADVANTAGES[kind](rewards, k)


def on_policy_loss(config, logprobs, advantage, entropy):
    """What to differentiate for one sample's tokens [N], where pi = mu: nothing is clipped, every loss is REINFORCE."""
    n = len(logprobs)
    loss = -advantage * logprobs.sum()
    if config.loss == "gspo":
        loss = loss / n
    loss = loss - config.entropy_coef * entropy.sum()
    return loss / n if config.normalizer == "sequence" else loss


def first_gradient(run, trained):
    """{parameter: gradient} of the step that made version 1, sample by sample, all of which version 0 has sampled.

    trained: names of the parameters that were trained.
    """
    model = run.model(0)
    samples = run.trained(1)
    tokens = 0
    for sample in samples:
        positions = np.flatnonzero(sample["mask"])
        if not len(positions):
            continue
        ids = torch.as_tensor(sample["tokens"], device=run.device)
        logits = model(input_ids=ids[None]).logits[0, positions - 1]
        logprobs, entropy, _ = of_targets(logits, ids[positions], sample["temperature"])
        on_policy_loss(run.config, logprobs, float(sample["advantage"]), entropy).backward()
        tokens += len(positions)
    n = tokens if run.config.normalizer == "tokens" else len(samples)
    named = dict(model.named_parameters())
    gradients = {name: named[name].grad.float().cpu() / n for name in trained}
    model.zero_grad()
    return gradients


def adam_steps(before, after):
    """Is v + 1 what torch's own AdamW makes of version v? By `trainer_state` of both.

    Yields for each parameter that Adam has updated: its name, the gradient that Adam was given, as m' = b1 m +
    (1 - b1) g, [elements] whether they are so in v + 1, steps by Adam's own count.
    """
    for group in after["optimizer"]["param_groups"]:
        for name in group["params"]:
            new = after["optimizer"]["state"].get(name, {})
            old = before["optimizer"]["state"].get(name, {})
            if "exp_avg" not in new:
                continue
            beta = group["betas"][0]
            p = torch.nn.Parameter(before["model"][name].clone())
            p.grad = (new["exp_avg"] - beta * old.get("exp_avg", 0)) / (1 - beta)
            settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            optimizer = torch.optim.AdamW([p], **settings)
            optimizer.state[p] = {key: value.clone() for key, value in old.items()}
            optimizer.step()
            # within some digits of float32
            second = optimizer.state[p]["exp_avg_sq"]
            same = torch.isclose(new["exp_avg_sq"], second, rtol=1e-2, atol=1e-30)
            same &= torch.isclose(after["model"][name], p, rtol=5e-7, atol=1e-2 * group["lr"])
            yield name, p.grad, same, int(new["step"] - old.get("step", 0))


def norm_of(gradients):
    return sum(float((g.double() ** 2).sum()) for g in gradients.values()) ** 0.5

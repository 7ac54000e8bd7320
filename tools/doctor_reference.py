"""What a run should have computed, in the plainest way: one sequence at a time, all logits, Hugging
Face's own model.

tools/doctor_checks.py compares a run with it; it shares no code with what it checks, beyond the
tokenizer and the tasks. It knows the advantages, losses, normalisers and schedules named here.
Deliberately absent: packing, speed.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, DynamicCache

import config as cfg
from plumbing.episode import CutOff
from plumbing.problems import Prompter, load_problems
from plumbing.samples import TOKEN_FIELDS, split
from tools.common import kept_batches, kept_groups, read_metrics

# as a version: the model of --teacher
TEACHER = -1
# --steps of the first run, which is interrupted
PLANNED = 10000
# of a group with rewards r [G]; a group of one has no baseline
ADVANTAGES = {
    "loo": lambda r: (r - r.mean()) * len(r) / max(len(r) - 1, 1),
    "mean": lambda r: r - r.mean(),
    "mean_std": lambda r: (r - r.mean()) / (r.std() + 1e-6),
    "none": lambda r: r,
}
# of a sample's tokens [N] with weights w [N] = pi / mu, or their geometric mean N times, and
# advantage A
LOSSES = {
    "reinforce": lambda w, logp, A, low, high: -w.clamp(max=high).detach() * A * logp,
    "ppo": lambda w, logp, A, low, high: -torch.minimum(w * A, w.clamp(low, high) * A),
    "cispo": lambda w, logp, A, low, high: -w.clamp(low, high).detach() * A * logp,
    "icepop": lambda w, logp, A, low, high: -(w * (low <= w) * (w <= high)).detach() * A * logp,
}
LOSSES["gspo"] = LOSSES["ppo"]
NORMALIZERS = ("samples", "tokens", "sequence")
# share of --lr after the warm-up, by the share of the run that is done
SCHEDULES = {"constant": lambda done: 1.0, "linear": lambda done: 1 - 0.9 * done}


# ---- what a run has left


class Recording:
    """What the two runs have left, put together.

    continued: version from which the second run went on; steps: {version: line of metrics.jsonl};
    groups: {draw: {...}}.
    """

    def __init__(self, run_dir, continued):
        self.config = config = cfg.load(run_dir)
        self.run_dir = Path(run_dir)
        lines, self.evaluations = read_metrics(run_dir, "step", "eval")
        self.steps = {line["step"]: line for line in lines}
        self.continued = continued
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.prompter = Prompter(config)
        self.train_problems = load_problems(config, "train")
        self.test_problems = load_problems(config, "test")
        self.groups = {}
        tasks = list(cfg.task_weights(config.task))
        advantages = ADVANTAGES.get(config.advantage, np.zeros_like)
        for draw, record in sorted(kept_groups(run_dir).items()):
            samples = split(record)
            if samples:
                task = tasks[samples[0]["task"]]
                number = int(samples[0]["problem"])
                problem = self.train_problems[task][number]
                self.groups[draw] = dict(samples=samples, task=task, number=number, problem=problem)
                rewards = np.array([sample["reward"] for sample in samples], np.float64)
                for sample, advantage in zip(samples, advantages(rewards)):
                    sample["advantage"] = advantage

    def samples(self):
        """[(draw, sample)] of all groups."""
        return [(draw, sample) for draw in self.groups for sample in self.groups[draw]["samples"]]

    def trained(self, step):
        """Samples as they were trained by the step that made version `step`, of all its ranks'
        micro-batches.
        """
        batches = kept_batches(self.run_dir, step)
        return [sample for batch in batches for sample in split(batch) if sample["outcome"] >= 0]

    def folder(self, version):
        """Where the weights of a version are."""
        if version == TEACHER:
            return self.config.teacher
        saved = self.run_dir / "checkpoints" / f"step_{version:06d}"
        return saved if version else self.config.model

    # the last two stay
    @functools.lru_cache(2)
    def model(self, version):
        dtype = getattr(torch, self.config.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.folder(version), dtype=dtype)
        return model.to(self.device).eval()

    def stop_tokens(self):
        """Token ids that end an answer, by the model's own files."""
        ends = np.atleast_1d(self.model(0).generation_config.eos_token_id)
        return {*ends.tolist(), self.prompter.tokenizer.eos_token_id}

    def parts(self, sample):
        """(turns that were sampled, what stands before each of them, the prompt first): [[token]]
        both.
        """
        borders = np.flatnonzero(np.diff(sample["mask"])) + 1
        parts = [tokens.tolist() for tokens in np.split(sample["tokens"], borders)]
        return parts[1::2], parts[::2]

    def prompt(self, problem):
        """Token ids of a problem's prompt, by the tokenizer alone."""
        system = self.config.system_prompt
        if not self.config.chat:
            return self.prompter.tokenizer(system + problem["prompt"])["input_ids"]
        texts = [("system", system), ("user", problem["prompt"])]
        messages = [{"role": role, "content": text} for role, text in texts if text]
        return self.encode(self.prompter.render(messages))

    def separator(self):
        """The token that the chat template puts after the end of a turn; None without one."""
        if not self.prompter.tokenizer.chat_template:
            return None
        said = [dict(role=role, content="x") for role in ("user", "assistant", "user")]
        ids = self.encode(self.prompter.render(said))
        ends = [i for i, token in enumerate(ids) if token in self.stop_tokens()]
        # of the assistant's turn, and of the user's after it
        return ids[ends[-2] + 1] if len(ends) > 1 else ids[ends[-1] + 1]

    def encode(self, text):
        """Token ids of a text that is no beginning."""
        return self.prompter.tokenizer(text, add_special_tokens=False)["input_ids"]


class Replayed:
    """What an episode is given instead of the model: it says what was sampled, in that order.

    wrong: texts of the episode, or turns, that are not where the other was.
    """

    def __init__(self, run, sample):
        self.run = run
        turns, self.before = run.parts(sample)
        self.texts = [run.prompter.decode(turn) for turn in turns]
        self.finished = bool(sample["finished"])
        self.wrong = len(turns)
        self.turn = 0

    async def __call__(self, text):
        if self.turn == len(self.texts):
            # an attempt that had ended by itself was over
            self.wrong += self.finished
            raise CutOff
        tokens, self.turn = self.before[self.turn], self.turn + 1
        if self.turn > 1 and self.run.config.chat:
            # a template puts something around it
            same = text.strip() in self.run.prompter.tokenizer.decode(tokens)
        else:
            said = self.run.encode(text) if self.turn > 1 else self.run.prompt({"prompt": text})
            same = tokens == said
        self.wrong -= same
        return self.texts[self.turn - 1]

    async def play(self, task, problem):
        """{"value": what the episode returns}; None if it does something else than to talk."""
        try:
            return {"value": await task.episode(problem, self)}
        except CutOff:
            return {"value": "no_answer"}
        except AttributeError:
            self.wrong = 0


def trainer_state(run, version):
    """What a checkpoint keeps of the trainer: {"model": ..., "optimizer": {"state": ...,
    "param_groups": ...}}.
    """
    if version == 0:
        model = AutoModelForCausalLM.from_pretrained(run.folder(0), dtype=torch.float32)
        state = model.state_dict()
        if run.config.lora_rank:
            # B begins at 0, and in the first step A has no gradient
            first = trainer_state(run, 1)["model"]
            kept = 1 - learning_rate(run, 0) * run.config.weight_decay
            state |= {name: x / kept for name, x in first.items() if name.endswith(".lora_A")}
            state |= {name: 0 * x for name, x in first.items() if name.endswith(".lora_B")}
        return {"model": state, "optimizer": {"state": {}}}
    with tempfile.TemporaryDirectory(dir=run.folder(version)) as folder:
        file = Path(folder, "state.pt")
        dcp_to_torch_save(run.folder(version) / "trainer", file)
        return torch.load(file, mmap=True, weights_only=True)


def segments(sample):
    """The segments of a sample, each as a sample of its own."""
    borders = np.flatnonzero(np.diff(sample["segment"])) + 1
    parts = [np.split(sample[name], borders) for name in TOKEN_FIELDS]
    return [sample | dict(zip(TOKEN_FIELDS, part)) for part in zip(*parts)]


# ---- what an engine reports


def forward(run, version, sample, positions, start=0, cache=None):
    """Of tokens at positions [N]: (logprob, entropy of its distribution, variance of -log p).
    cache: of all before `start`.
    """
    tokens = torch.as_tensor(sample["tokens"], device=run.device)
    ids = tokens[None, start : positions[-1]]
    logits = run.model(int(version))(input_ids=ids, past_key_values=cache).logits[0]
    logp = torch.log_softmax(logits[positions - 1 - start].float() / sample["temperature"], -1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    variance = (p * logp**2).sum(-1) - entropy**2
    return logp.gather(1, tokens[positions, None])[:, 0], entropy, variance


def of_segments(run, version, sample, positions):
    """`forward` of a sample, each segment by itself."""
    found = []
    begin = 0
    for part in segments(sample):
        own = positions - begin
        own = own[(own >= 0) & (own < len(part["tokens"]))]
        if len(own):
            found.append(forward(run, version, part, own))
        begin += len(part["tokens"])
    return [torch.cat(x) for x in zip(*found)]


@torch.no_grad()
def expected(run, sample):
    """What the engine should report of each sampled token of a segment, by the version that it says
    sampled it: `forward`, numpy.

    An update in the middle of a sequence leaves the KV cache of all tokens before as it is, or,
    with --recompute_kv, has it computed again.
    """
    positions = np.flatnonzero(sample["mask"])
    versions = sample["versions"][positions]
    borders = np.flatnonzero(np.diff(versions)) + 1
    cache = DynamicCache()
    found = []
    for own, version in zip(np.split(positions, borders), versions[[0, *borders]]):
        # the token before the first one of this version is what it is sampled from
        cache = DynamicCache() if run.config.recompute_kv else cache
        start = own[0] - 1 if cache.get_seq_length() else 0
        found.append(forward(run, version, sample, own, start, cache))
    return [torch.cat(x).double().cpu().numpy() for x in zip(*found)]


# ---- what the trainer computes


def verdict(config, task, reply, finished):
    """(reward, outcome) of what a task's function gave, as Sandbox.call has it."""
    value = reply.get("value", "unparsable")
    if value in cfg.OUTCOMES:
        table = config.reward_finished if finished else config.reward_cut_off
        return table[cfg.OUTCOMES.index(value)], value
    value = float(value)
    return value, "correct" if value >= getattr(task, "SUCCESS", 1.0) else "wrong"


def learning_rate(run, version):
    """Of the step that follows a version; what was logged if the schedule is not known here."""
    c = run.config
    steps = c.steps if version >= run.continued else PLANNED
    rise = min(1.0, (version + 1) / max(c.warmup_steps, 1))
    schedule = SCHEDULES.get(c.lr_schedule)
    rate = c.lr * rise * schedule(version / steps) if schedule else run.steps[version + 1]["lr"]
    return rate * (10 if c.lora_rank else 1)


def loss_of(run, sample, positions, version):
    """What a sample's tokens at these positions add to the loss of the step after a version; their
    weights pi / mu.
    """
    c = run.config
    logprobs, entropy, _ = of_segments(run, version, sample, positions)
    log_w = logprobs - torch.as_tensor(sample["behavior_logprobs"][positions], device=run.device)
    weights = log_w.detach().exp()
    by_sequence = c.ratio == "sequence"
    w = log_w.mean().exp().expand(len(log_w)) if by_sequence else log_w.exp()
    with torch.no_grad():
        advantage = float(sample["advantage"]) + c.teacher_coef * of_teacher(run, sample, positions)
    loss = LOSSES[c.loss](w, logprobs, advantage, c.clip_low, c.clip_high).sum()
    loss = loss / len(positions) if by_sequence else loss
    if c.kl_coef:
        with torch.no_grad():
            reference = of_segments(run, 0, sample, positions)[0]
        d = reference - logprobs
        loss = loss + c.kl_coef * (d.exp() - 1 - d).sum()
    loss = loss - c.entropy_coef * entropy.sum()
    return loss / len(positions) if c.normalizer == "sequence" else loss, weights


def of_teacher(run, sample, positions):
    """log teacher - log mu of a sample's tokens at these positions [N]."""
    if not run.config.teacher:
        return torch.zeros(len(positions), device=run.device)
    logprobs = of_segments(run, TEACHER, sample, positions)[0]
    return logprobs - torch.as_tensor(sample["behavior_logprobs"][positions], device=run.device)


def adapters_gradients(config, of_weights, state):
    """{parameter: gradient} of adapters, by those of the weights W + scale B A; state: {name:
    tensor} with the adapters.
    """
    found = {}
    for name in [x for x in state if x.endswith(".lora_A")]:
        layer = name.removesuffix(".lora_A")
        scaled = of_weights[f"{layer}.weight"] * config.lora_alpha / config.lora_rank
        found[name] = state[f"{layer}.lora_B"].T @ scaled
        found[f"{layer}.lora_B"] = scaled @ state[name].T
    return found


def gradient(run, step, trained, state):
    """({parameter: gradient} of the step that made version `step`; share of its tokens that older
    versions have sampled; their effective sample size). trained: names of the parameters that were
    trained; state: the model's before it.
    """
    c = run.config
    samples = run.trained(step)
    tokens = older = 0
    weights = []
    for sample in samples:
        lag = step - 1 - sample["versions"]
        late = (lag > c.max_lag) & (c.late == "mask")
        positions = np.flatnonzero(sample["mask"] & ~late)
        if len(positions):
            loss, of_sample = loss_of(run, sample, positions, step - 1)
            loss.backward()
            weights.append(of_sample)
            tokens += len(positions)
            older += (lag[positions] > 0).sum()
    n = tokens if c.normalizer == "tokens" else len(samples)
    named = dict(run.model(step - 1).named_parameters())
    of_weights = {name: p.grad.float().cpu() / n for name, p in named.items()}
    of_weights |= adapters_gradients(c, of_weights, state)
    gradients = {name: of_weights[name] for name in trained}
    run.model(step - 1).zero_grad()
    w = torch.cat(weights or [torch.ones(1)])
    return gradients, older / max(tokens, 1), float(w.sum() ** 2 / (w**2).sum() / len(w))


def adam_steps(run, version, before, after):
    """Is v + 1 what AdamW makes of v, by `trainer_state` of both, with the knobs' learning rate,
    betas and weight decay? Of each parameter: its name, the gradient by m' = b1 m + (1 - b1) g,
    [elements] are they so, steps by Adam's count.
    """
    lr = learning_rate(run, version)
    b1, b2 = run.config.betas
    for name, new in after["optimizer"]["state"].items():
        old = before["optimizer"]["state"].get(name, {"exp_avg": 0, "exp_avg_sq": 0, "step": 0})
        if "exp_avg" not in new:
            continue
        m, v, t = (new[key] for key in ("exp_avg", "exp_avg_sq", "step"))
        g = (m - b1 * old["exp_avg"]) / (1 - b1)
        second = b2 * old["exp_avg_sq"] + (1 - b2) * g**2
        p = before["model"][name]
        p = p * (1 - lr * run.config.weight_decay) if p.dim() > 1 else p
        p = p - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        # within some digits of float32
        same = torch.isclose(v, second, rtol=1e-2, atol=1e-30)
        same &= torch.isclose(after["model"][name], p, rtol=5e-7, atol=1e-2 * lr)
        yield name, g, same, int(t - old["step"])

"""What a run should have computed, in the plainest way.

One sequence at a time is computed by Hugging Face's own model, with all its logits, and
tools/doctor_checks.py compares a run with the results. Of the code that is checked it uses the
tasks, load_problems, samples.split, and Prompter's tokenizer, `render` and `decode`: faults in
these are not found. It knows only the advantages, losses, normalisers and schedules that it names.
Deliberately absent: packing, speed.
"""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, DynamicCache

import config as cfg
from plumbing import checkpoints
from plumbing.episode import CutOff
from plumbing.problems import Prompter, load_problems
from plumbing.samples import TOKEN_FIELDS, split
from tools.common import kept_batches, kept_groups, read_metrics

# the number that stands for the model of --teacher where a version is expected
TEACHER = -1
# --steps of the first run, which is interrupted
PLANNED = 10000
# advantages [G] of a group with rewards r [G]; a group of one has no baseline
ADVANTAGES = {
    "loo": lambda r: (r - r.mean()) * len(r) / max(len(r) - 1, 1),
    "mean": lambda r: r - r.mean(),
    "mean_std": lambda r: (r - r.mean()) / (r.std() + 1e-6),
    "max_rl": lambda r: (r - r.mean()) / r.mean() if r.mean() else 0 * r,
    "none": lambda r: r,
}
# losses [N] of a sample's tokens with advantage A; w [N] are the weights pi / mu of the tokens or,
# with --ratio sequence, their geometric mean at each token, with --ratio product their product
LOSSES = {
    "reinforce": lambda w, logp, A, low, high: -w.clamp(max=high).detach() * A * logp,
    "ppo": lambda w, logp, A, low, high: -torch.minimum(w * A, w.clamp(low, high) * A),
    "cispo": lambda w, logp, A, low, high: -w.clamp(low, high).detach() * A * logp,
    "icepop": lambda w, logp, A, low, high: -(w * (low <= w) * (w <= high)).detach() * A * logp,
    # mu = pi / w
    "dppo": lambda w, logp, A, low, high: (
        -(w * (((w - 1) * A <= 0) | ((logp.exp() * (1 - 1 / w)).abs() <= high))).detach() * A * logp
    ),
}
LOSSES["gspo"] = LOSSES["ppo"]
NORMALIZERS = ("samples", "tokens", "sequence")
# share of --lr after the warm-up, from the share of the run that is done
SCHEDULES = {"constant": lambda done: 1.0, "linear": lambda done: 1 - 0.9 * done}


# ---- what a run has left


class Recording:
    """The files that the two runs have left, put together.

    continued: the version from which the second run went on. steps: {version: line of
    metrics.jsonl}. groups: {draw: {samples, task, number, problem}}, where `number` is the index of
    the problem; the advantages of these samples are computed here.
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
                for sample in samples:
                    sample["advantage"] = np.zeros(len(sample["part"]))
                for part in range(1 + max(sample["part"].max() for sample in samples)):
                    having = [sample for sample in samples if part in sample["part"]]
                    to_go = [sample["reward_to_go"][sample["part"] == part][0] for sample in having]
                    part_advantages = advantages(np.array(to_go, np.float64))
                    for sample, advantage in zip(having, part_advantages):
                        sample["advantage"][sample["part"] == part] = advantage

    def samples(self):
        """Return [(draw, sample)] of all groups."""
        return [(draw, sample) for draw in self.groups for sample in self.groups[draw]["samples"]]

    def trained(self, step):
        """Return the samples that all ranks trained in the step that made version `step`."""
        batches = kept_batches(self.run_dir, step)
        return [sample for batch in batches for sample in split(batch) if sample["outcome"] >= 0]

    def folder(self, version):
        """Return the directory (or the hub's name) of the model of a version, or of TEACHER."""
        if version == TEACHER:
            return self.config.teacher
        saved = checkpoints.path_of(self.run_dir, version)
        return saved if version else self.config.model

    @functools.lru_cache(3)
    def model(self, version):
        """Return the model of a version, or of TEACHER.

        The last three stay in memory: a step's loss may need its version, the base model and the
        teacher, and the gradients of the first one add up while the others are used.
        """
        dtype = getattr(torch, self.config.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.folder(version), dtype=dtype)
        return model.to(self.device).eval()

    @functools.lru_cache(1)
    def stop_tokens(self):
        """Return the set of token ids that end an answer, from the model's own files."""
        ends = np.atleast_1d(self.model(0).generation_config.eos_token_id)
        return {*ends.tolist(), self.prompter.tokenizer.eos_token_id}

    def parts(self, sample):
        """Return (turns, inputs) of a sample, two lists of lists of token ids.

        Turns were sampled; inputs were not, and stand before each of the turns. The first input is
        the prompt.
        """
        borders = np.flatnonzero(np.diff(sample["mask"])) + 1
        parts = [tokens.tolist() for tokens in np.split(sample["tokens"], borders)]
        return parts[1::2], parts[::2]

    def prompt(self, problem):
        """Return the token ids of a problem's prompt, from the tokenizer and its chat template."""
        system = self.config.system_prompt
        if not self.config.chat:
            return self.prompter.tokenizer(system + problem["prompt"])["input_ids"]
        texts = [("system", system), ("user", problem["prompt"])]
        messages = [{"role": role, "content": text} for role, text in texts if text]
        if isinstance(problem["prompt"], list):
            messages = messages[:-1] + problem["prompt"]
        return self.encode(self.prompter.render(messages))

    def separator(self):
        """Return the token that the chat template puts after the end of a turn.

        Returns None if the tokenizer has no template.
        """
        if not self.prompter.tokenizer.chat_template:
            return None
        messages = [dict(role=role, content="x") for role in ("user", "assistant", "user")]
        ids = self.encode(self.prompter.render(messages))
        ends = [i for i, token in enumerate(ids) if token in self.stop_tokens()]
        # The last two ends are those of the assistant's turn and of the user's turn after it. Some
        # templates put a stop token only after the assistant's turn.
        return ids[ends[-2] + 1] if len(ends) > 1 else ids[ends[-1] + 1]

    def encode(self, text):
        """Return the token ids of a text, without those that begin a sequence."""
        return self.prompter.tokenizer(text, add_special_tokens=False)["input_ids"]


class Replayed:
    """A model for an episode to talk to, whose turns are those of a sample, in the same order.

    texts: the turns. wrong: the number of turns whose input differs from what the episode sends. A
    further turn counts, too, if the episode asks for one that the sample does not have.
    """

    def __init__(self, run, sample):
        self.run = run
        turns, self.inputs = run.parts(sample)
        self.turn_tokens = turns
        self.texts = [run.prompter.decode(turn) for turn in turns]
        self.sample_finished = bool(sample["finished"])
        self.stop = run.stop_tokens()
        # True if the episode has asked for a turn that the sample does not have
        self.was_cut_off = False
        self.wrong = len(turns)
        self.turn = 0

    async def __call__(self, text):
        if self.turn == len(self.texts):
            # If the attempt ended by itself, the episode asked for no further turn.
            self.wrong += self.sample_finished
            self.was_cut_off = True
            raise CutOff
        turn = self.turn
        self.turn += 1
        tokens = self.inputs[turn]
        if turn == 0:
            is_same = tokens == self.run.prompt({"prompt": text})
        elif self.run.config.chat:
            # The chat template puts other tokens around the text.
            is_same = text.strip() in self.run.prompter.tokenizer.decode(tokens)
        else:
            is_same = tokens == self.run.encode(text)
        self.wrong -= is_same
        return self.texts[turn]

    @property
    def finished(self):
        """Did the last turn end by itself, with a stop token?"""
        if self.was_cut_off or not self.turn:
            return False
        return self.turn_tokens[self.turn - 1][-1] in self.stop

    @property
    def turns(self):
        """The turns so far."""
        return self.texts[: self.turn]

    def token_texts(self, turn):
        """Return the texts of the tokens of a turn."""
        return [self.run.prompter.decode([token]) for token in self.turn_tokens[turn]]

    def log(self, **values):
        """Do nothing: what an episode logs is not compared."""

    async def play(self, task, problem):
        """Return {"value": the result of the task's episode}.

        Returns None, and sets `wrong` to 0, if the episode raises AttributeError: it uses something
        of the model that this class lacks, such as base_url or `call`.
        """
        try:
            return {"value": await task.episode(problem, self)}
        except CutOff:
            return {"value": "no_answer"}
        except AttributeError:
            self.wrong = 0


def trainer_state(run, version):
    """Return what the checkpoint of a version keeps of the trainer.

    It is {"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": ...}}. The
    state before the first step is computed from the base model.
    """
    if version == 0:
        model = AutoModelForCausalLM.from_pretrained(run.folder(0), dtype=torch.float32)
        state = model.state_dict()
        if run.config.lora_rank:
            # B begins at 0. Therefore A has no gradient in the first step, which only decays A.
            factor = 1 - learning_rate(run, 0) * run.config.weight_decay
            for name, tensor in trainer_state(run, 1)["model"].items():
                if name.endswith(".lora_A"):
                    state[name] = tensor / factor
                elif name.endswith(".lora_B"):
                    state[name] = 0 * tensor
        return {"model": state, "optimizer": {"state": {}}}
    with tempfile.TemporaryDirectory(dir=run.folder(version)) as folder:
        file = Path(folder, "state.pt")
        dcp_to_torch_save(run.folder(version) / "trainer", file)
        return torch.load(file, mmap=True, weights_only=True)


def segments(sample):
    """Return the segments of a sample, each as a sample of its own."""
    borders = np.flatnonzero(np.diff(sample["segment"])) + 1
    names = [name for name in TOKEN_FIELDS if name in sample]
    parts = [np.split(sample[name], borders) for name in names]
    return [sample | dict(zip(names, part)) for part in zip(*parts)]


# ---- what an engine reports


def forward(run, version, sample, positions, start=0, cache=None):
    """Compute some tokens of a sample, as one sequence, with the model of a version.

    positions [N]: where these tokens are, in ascending order. cache: the KV cache of the tokens
    before `start`, to which the others are added. Returns (logprobs [N], entropies [N] of the
    distributions p that the tokens came from, variances [N] of -log p under these distributions).
    """
    tokens = torch.as_tensor(sample["tokens"], device=run.device)
    ids = tokens[None, start : positions[-1]]
    logits = run.model(int(version))(input_ids=ids, past_key_values=cache).logits[0]
    logp = torch.log_softmax(logits[positions - 1 - start].float() / sample["temperature"], -1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1)
    variance = (p * logp**2).sum(-1) - entropy**2
    return logp.gather(1, tokens[positions, None])[:, 0], entropy, variance


def forward_segments(run, version, sample, positions):
    """Return the result of `forward` for a sample, with each segment as a sequence of its own."""
    results = []
    start = 0
    for segment in segments(sample):
        end = start + len(segment["tokens"])
        inside = positions[(positions >= start) & (positions < end)]
        if len(inside):
            results.append(forward(run, version, segment, inside - start))
        start = end
    return [torch.cat(parts) for parts in zip(*results)]


@torch.no_grad()
def expected(run, sample):
    """Return (logprobs, entropies, variances) [N] that engines should report for a segment.

    They are those of `forward` for its N sampled tokens, as numpy arrays.

    Each token is computed by the version that the engine says sampled it. An update in the middle
    of a sequence leaves the KV cache of the tokens so far as it is or, with --recompute_kv, has it
    computed again.
    """
    positions = np.flatnonzero(sample["mask"])
    versions = sample["versions"][positions]
    borders = np.flatnonzero(np.diff(versions)) + 1
    cache = DynamicCache()
    results = []
    for part, version in zip(np.split(positions, borders), versions[[0, *borders]]):
        if run.config.recompute_kv:
            cache = DynamicCache()
        # The first token of this version is sampled from the hidden state of the token before it.
        start = part[0] - 1 if cache.get_seq_length() else 0
        results.append(forward(run, version, sample, part, start, cache))
    return [torch.cat(parts).double().cpu().numpy() for parts in zip(*results)]


# ---- what the trainer computes


def verdict(config, task, reply, finished):
    """Return (rewards, outcome) of an attempt, from the reply of Sandbox.call or Replayed.play.

    rewards: a list of one number, or of those of the turns or tokens.
    """
    value = reply.get("value", "unparsable")
    if isinstance(value, str):
        table = config.reward_finished if finished else config.reward_cut_off
        return [table[cfg.OUTCOMES.index(value)]], value
    rewards = [float(x) for x in np.atleast_1d(value)]
    return rewards, "correct" if sum(rewards) >= getattr(task, "SUCCESS", 1.0) else "wrong"


def rewards_to_go(rewards, turns):
    """Return the reward to go of each sampled token, turn after turn.

    turns: lists of the turns' tokens. rewards: one, or one a turn, or one a token.
    """
    parts = [turns] if len(rewards) == 1 else [[turn] for turn in turns]
    if len(rewards) not in (1, len(turns)):
        parts = [[[token]] for turn in turns for token in turn]
    to_go = []
    for i, part in enumerate(parts):
        to_go += [sum(rewards[i:])] * sum(map(len, part))
    return to_go


def learning_rate(run, version):
    """Return the learning rate of the step that follows a version.

    If the schedule is not known here, it is the learning rate that the run logged. That of adapters
    is ten times as high.
    """
    c = run.config
    if c.lr_schedule not in SCHEDULES:
        # The logged rate includes the factor of --lr_by_ess.
        rate = run.steps[version + 1]["lr"]
    else:
        steps = c.steps if version >= run.continued else PLANNED
        warm_up = min(1.0, (version + 1) / max(c.warmup_steps, 1))
        rate = c.lr * warm_up * SCHEDULES[c.lr_schedule](version / steps)
        if c.lr_by_ess:
            rate *= run.steps[version + 1]["ess_sample"] ** 0.5
    return rate * (10 if c.lora_rank else 1)


def loss_of(run, sample, positions, version):
    """Return (loss, weights) of a sample's tokens at these positions [N].

    loss: what the tokens add to the loss of the step that follows a version, before it is divided
    by the step's samples or tokens. weights [N]: pi / mu.
    """
    c = run.config
    logprobs, entropy, _ = forward_segments(run, version, sample, positions)
    log_ratios = logprobs - torch.as_tensor(
        sample["behavior_logprobs"][positions], device=run.device
    )
    weights = log_ratios.detach().exp()
    log_w = log_ratios
    if c.ratio == "sequence":
        log_w = log_w.mean().expand(len(log_w))
    elif c.ratio == "product":
        log_w = log_w.sum().expand(len(log_w))
    w = log_w.exp()
    with torch.no_grad():
        teacher_part = c.teacher_coef * teacher_log_ratio(run, sample, positions)
    advantages = torch.as_tensor(sample["advantage"][positions], device=run.device) + teacher_part
    loss = LOSSES[c.loss](w, logprobs, advantages, c.clip_low, c.clip_high).sum()
    if c.kl_coef:
        with torch.no_grad():
            reference_logprobs = forward_segments(run, 0, sample, positions)[0]
        d = reference_logprobs - logprobs
        loss = loss + c.kl_coef * (d.exp() - 1 - d).sum()
    loss = loss + c.kl_behavior_coef * (log_ratios**2).sum() - c.entropy_coef * entropy.sum()
    return loss / len(positions) if c.normalizer == "sequence" else loss, weights


def teacher_log_ratio(run, sample, positions):
    """Return log teacher - log mu of a sample's tokens at these positions [N]; 0 without one."""
    if not run.config.teacher:
        return torch.zeros(len(positions), device=run.device)
    logprobs = forward_segments(run, TEACHER, sample, positions)[0]
    return logprobs - torch.as_tensor(sample["behavior_logprobs"][positions], device=run.device)


def adapter_gradients(config, weight_gradients, state):
    """Return {parameter: gradient} of the adapters A and B of all layers.

    weight_gradients: {parameter: gradient} of the weights W + scale B A that layers compute with.
    state: {name: tensor} of the model with its adapters.
    """
    gradients = {}
    for name in [name for name in state if name.endswith(".lora_A")]:
        layer = name.removesuffix(".lora_A")
        scaled = weight_gradients[f"{layer}.weight"] * config.lora_alpha / config.lora_rank
        gradients[name] = state[f"{layer}.lora_B"].T @ scaled
        gradients[f"{layer}.lora_B"] = scaled @ state[name].T
    return gradients


def gradient(run, step, trained, state):
    """Return (gradients, older, ess, ess_sample) of the step that made version `step`.

    gradients: {parameter: gradient}. older: the share of the step's tokens that older versions have
    sampled. ess, ess_sample: the effective sample sizes of tokens and of whole samples. trained:
    the names of the parameters that were trained. state: {name: tensor} of the model before the
    step.
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
            loss, sample_weights = loss_of(run, sample, positions, step - 1)
            loss.backward()
            weights.append(sample_weights)
            tokens += len(positions)
            older += (lag[positions] > 0).sum()
    n = tokens if c.normalizer == "tokens" else len(samples)
    model = run.model(step - 1)
    gradients = {name: p.grad.float().cpu() / n for name, p in model.named_parameters()}
    model.zero_grad()
    gradients |= adapter_gradients(c, gradients, state)
    gradients = {name: gradients[name] for name in trained}
    weights_of_samples = [w.double().log().sum().exp().reshape(1) for w in weights]
    ess, ess_sample = (
        float(w.sum() ** 2 / (w**2).sum() / len(w))
        for w in (torch.cat(parts or [torch.ones(1)]) for parts in (weights, weights_of_samples))
    )
    return gradients, older / max(tokens, 1), ess, ess_sample


def parameters_to_train(run):
    """Return the names of the parameters that have a gradient in the logprobs of a few samples.

    The samples are the first eight that the second run trained. With --lora_rank the names are
    those of the adapters of all linear layers but the output head, whatever layers have adapters.
    """
    model = run.model(run.continued)
    for sample in run.trained(run.continued + 1)[:8]:
        positions = np.flatnonzero(sample["mask"])
        if len(positions):
            forward_segments(run, run.continued, sample, positions)[0].sum().backward()
    names = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    model.zero_grad()
    if not run.config.lora_rank:
        return names
    head = model.get_output_embeddings()
    layers = [n for n, x in model.named_modules() if type(x) is torch.nn.Linear and x is not head]
    return {f"{n}.lora_{k}" for n in layers if f"{n}.weight" in names for k in "AB"}


def share_of_adapter(run, version):
    """Return how much of an adapter is in a checkpoint: the projection of its change from the base
    model W on the change by scale B A, rounded as W is, as a multiple of this change. It is 1 if
    both agree, and nan if the adapter changes nothing. The adapter is read as peft and vLLM read
    it.
    """
    folder = Path(run.folder(version))
    about = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    base, saved = (dict(run.model(v).named_parameters()) for v in (0, version))
    product = square = 0.0
    for name in [name for name in adapters if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if layer.rpartition(".")[2] not in about["target_modules"]:
            continue
        weight = base[f"{layer}.weight"].detach().cpu()
        A, B = (
            adapters[name.replace(".lora_A.", f".lora_{k}.")].to(weight.dtype).float() for k in "AB"
        )
        merged = (weight + about["lora_alpha"] / about["r"] * (B @ A)).to(weight.dtype)
        change = merged.float() - weight.float()
        difference = saved[f"{layer}.weight"].detach().cpu().float() - weight.float()
        product += float((difference * change).sum())
        square += float((change**2).sum())
    return product / square if square else float("nan")


def lags_and_lengths(c, step, samples):
    """Return ([the lag of each token in the loss], [the number of sampled tokens of each sample]).

    c: the Config. samples: those of the step that made version `step`.
    """
    lags = []
    lengths = []
    for sample in samples:
        lag = step - 1 - sample["versions"][sample["mask"]]
        if c.late == "mask":
            lag = lag[lag <= c.max_lag]
        lags += lag.tolist()
        lengths.append(int((sample["versions"] >= 0).sum()))
    return lags, lengths


def has_signal(c, step, sample):
    """Has any token of this sample, trained in the step that made version `step`, an advantage?"""
    if sample["advantage"].any() or not (c.teacher and c.teacher_coef):
        return bool(sample["advantage"].any())
    # Every token in the loss has an advantage from the teacher: hardly ever is it exactly 0.
    lag = step - 1 - sample["versions"][sample["mask"]]
    return bool((lag <= c.max_lag).any() if c.late == "mask" else len(lag))


def metrics_of(run, step):
    """Return ({metric: value}, lags, lengths) of the step that made version `step`.

    The metrics are those that can be counted from the samples alone. lags, lengths: see
    `lags_and_lengths`.
    """
    samples = run.trained(step)
    lags, lengths = lags_and_lengths(run.config, step, samples)
    oldest = [
        step - 1 - sample["versions"][sample["versions"] >= 0].min()
        for sample in samples
        if (sample["versions"] >= 0).any()
    ]
    turns = [(np.diff((sample["versions"] >= 0).astype(int)) == 1).sum() for sample in samples]
    values = dict(
        sampled_tokens=len(lags),
        late=sum(int(sample["mask"].sum()) for sample in samples) - len(lags),
        success=np.mean([sample["outcome"] == 0 for sample in samples]),
        signal=np.mean([has_signal(run.config, step, sample) for sample in samples]),
        cut_off=np.mean([not sample["finished"] for sample in samples]),
        length_mean=np.mean(lengths),
        lag_mean=np.mean(lags or [0]),
        lag_max=max(lags, default=0),
        lag_oldest=sum(oldest) / len(samples),
        turns=np.mean(turns),
        segments=np.mean([len(segments(sample)) for sample in samples]),
        versions_2=np.mean([sample["num_versions"] >= 2 for sample in samples]),
        versions_3=np.mean([sample["num_versions"] >= 3 for sample in samples]),
    )
    return values, lags, lengths


@torch.no_grad()
def expert_loads(run, step):
    """Return what the metric expert_load of the step that made version `step` may be, two numbers.

    For the first one, a beginning that two neighbours in a micro-batch share counts once, as in
    packed rows; for the second one, all tokens count. Returns [] if transformers does not show what
    the routers choose, or if they choose by more than their logits.
    """
    model = run.model(step - 1)
    k = getattr(model.config, "num_experts_per_tok", None)
    names = [name for name, _ in model.named_buffers()] + list(model.state_dict())
    has_bias = any("correction_bias" in name or "expert_bias" in name for name in names)
    has_groups = (getattr(model.config, "n_group", None) or 1) > 1
    if not k or has_bias or has_groups:
        return []
    # of both ways to count: the sums over layers and micro-batches
    loads = np.zeros(2)
    tokens = np.zeros(2)
    for batch in kept_batches(run.run_dir, step):
        counts = [0, 0]
        numbers = [0, 0]
        previous = np.array([], int)
        for sample in split(batch):
            for segment in segments(sample):
                ids = segment["tokens"]
                output = model(
                    input_ids=torch.as_tensor(ids, device=run.device)[None],
                    output_router_logits=True,
                )
                logits = getattr(output, "router_logits", None)
                if not logits:
                    return []
                # The last token of a sequence is always computed.
                n = min(len(ids) - 1, len(previous))
                is_same = ids[:n] == previous[:n]
                shared = n if is_same.all() else int(is_same.argmin())
                previous = ids
                for way, first in enumerate((shared, 0)):
                    # [layers, experts]
                    counts[way] += torch.stack(
                        [
                            x[first:].topk(k)[1].flatten().bincount(minlength=x.shape[1])
                            for x in logits
                        ]
                    )
                    numbers[way] += len(ids) - first
        for way in range(2):
            layer_counts = counts[way].float()
            load = float((layer_counts.amax(1) / layer_counts.mean(1)).mean())
            loads[way] += load * numbers[way]
            tokens[way] += numbers[way]
    return (loads / tokens).tolist()


def count_within(bucket, values):
    """Return the number of values in a bucket of metrics.jsonl, such as "3", "4-7" or "128+"."""
    low, _, high = bucket.rstrip("+").partition("-")
    highest = np.inf if bucket.endswith("+") else float(high or low)
    return sum(float(low) <= value <= highest for value in values)


def adam_steps(run, version, before, after):
    """Yield (name, gradient, is_same, steps) of each parameter that AdamW has trained.

    before, after: `trainer_state` of a version and of the next one. gradient: what Adam got, from
    the change of its first moment m' = b1 m + (1 - b1) g. is_same: for each element, is the next
    version what AdamW makes of this one, with the knobs' learning rate, betas and weight decay?
    steps: the number of steps by Adam's own count.
    """
    lr = learning_rate(run, version)
    b1, b2 = run.config.betas
    for name, new in after["optimizer"]["state"].items():
        old = before["optimizer"]["state"].get(name, {"exp_avg": 0, "exp_avg_sq": 0, "step": 0})
        if "exp_avg" not in new:
            continue
        m, v, t = (new[key] for key in ("exp_avg", "exp_avg_sq", "step"))
        g = (m - b1 * old["exp_avg"]) / (1 - b1)
        expected_v = b2 * old["exp_avg_sq"] + (1 - b2) * g**2
        weights = before["model"][name]
        if weights.dim() > 1:
            weights = weights * (1 - lr * run.config.weight_decay)
        weights = weights - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        # The tolerances are some digits of float32.
        is_same = torch.isclose(v, expected_v, rtol=1e-2, atol=1e-30)
        is_same &= torch.isclose(after["model"][name], weights, rtol=5e-7, atol=1e-2 * lr)
        yield name, g, is_same, int(t - old["step"])

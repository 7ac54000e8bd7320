"""The doctor's checks: each compares what two short runs have left with what it should be (tools/plain.py).

A function `check_...` takes the plain.Recording of the runs and returns rows of the table; its docstring says which
faults it finds, and is shown where one fails. What a fork computes in its own way, another loss, advantage, optimizer
or sampler, is no fault: such a row says that it is not known. Deliberately absent: speed, memory.
"""

import asyncio
import json
import math
import random
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np

import config as cfg
from actor import overlong_penalty
from plumbing import checkpoints
from plumbing.sandbox import Sandbox
from tools import plain

# answers that are scored again
SCORED = 200
# tokens of sequences that are computed again, of each kind
RECOMPUTED = 20_000
# nats a token that two ways to compute a logprob may differ by, on average
NATS = {"float32": 1e-4, "bfloat16": 0.1}
# relative difference of a step's numbers
RELATIVE = {"float32": 1e-3, "bfloat16": 0.05}
# times these limits: what one sequence may differ by on average, and a gradient as a vector
WIDER = 10
# standard deviations
UNLIKELY = 5.0
# problems that a continued run must have drawn to tell whether its sampler went on
DRAWN = 4


class Finding(NamedTuple):
    """A row of the table. ok: None where there was nothing to compare, or with nothing that is known."""

    check: str
    ok: bool | None
    figure: str


def none_differ(check, differ, seen):
    """The row of a check that none of what was seen may fail."""
    return Finding(check, differ == 0, f"{differ} of {seen} differ")


def unknown(check, what):
    """The row of what a fork does in its own way."""
    return Finding(check, None, f"{what}: not known to the doctor")


# ---- what engines report


def origin_of(run, sample):
    """By which versions it was sampled, and what became of its KV cache, in words; None: not known in full."""
    versions = plain.versions_of(sample)
    if not plain.has_known_cache(sample):
        return None
    if len(versions) == 1:
        return "after updates" if versions[0] else "version 0"
    if versions[-1] <= run.continued:
        return "across one, stale KV"
    return "across one, KV again" if versions[0] >= run.continued else None


def some_of(samples):
    """As many of them as are computed again, from the whole run; those of a version together."""
    found = []
    tokens = 0
    for sample in random.Random(0).sample(samples, len(samples)):
        if tokens < RECOMPUTED:
            found.append(sample)
            tokens += len(sample["tokens"])
    return sorted(found, key=plain.versions_of)


def check_engine_logprobs(run):
    """Engines sample from other weights, temperatures or filters than they say, or report other versions or logprobs:
    a skipped update, in one worker too; a tied head that is not updated; a stale prefix; top-k. See logs/engine*.log.
    """
    by_origin = {"version 0": [], "after updates": []}
    for _, sample in run.samples():
        by_origin.setdefault(origin_of(run, sample), []).append(sample)
    by_origin.pop(None, None)
    limit = NATS[run.config.dtype]
    rows = []
    for origin, samples in by_origin.items():
        sequences = []
        for sample in some_of(samples):
            logprobs = plain.expected(run, sample, origin.endswith("again"))[0]
            sequences.append(np.abs(logprobs - sample["behavior_logprobs"][sample["mask"]]))
        name = f"engine = plain logprobs, {origin}"
        if not sequences:
            rows.append(Finding(name, False, "no such sequence was seen: more --batch_size?"))
            continue
        nats = np.concatenate(sequences).mean()
        worst = max(x.mean() for x in sequences)
        good = nats <= limit and worst <= WIDER * limit
        figure = f"{nats:.1e} nats (limit {limit:.0e}), worst of {len(sequences)} {worst:.1e}"
        rows.append(Finding(name, bool(good), figure))
    return rows


def check_temperature(run):
    """actor.py asks for another temperature than --temperature, and records it."""
    name = "drawn at --temperature"
    found = sorted({round(float(sample["temperature"]), 4) for _, sample in run.samples()})
    if len(found) > 1:
        return [unknown(name, f"{len(found)} temperatures, {found[0]:g} to {found[-1]:g}")]
    wanted = round(run.config.temperature, 4)
    return [Finding(name, found == [wanted], f"{found}, asked for {wanted:g}")]


def check_sampling(run):
    """Tokens are drawn from another distribution than the one whose logprobs are reported: more (-) or less (+) likely
    ones, by another temperature, top-k, top-p or penalties (generation_config).
    """
    # -log p of what is drawn is the distribution's entropy on average. Up to the first draw that is missing, as what
    # comes back first is short.
    draws = [draw for k, draw in enumerate(run.groups) if draw == k]
    tokens = 0
    surprise = 0.0
    variance = 0.0
    for _, sample in run.samples(draws):
        if origin_of(run, sample) in ("version 0", "after updates") and tokens < RECOMPUTED:
            logprobs, entropy, of_surprise = plain.expected(run, sample, True)
            tokens += len(logprobs)
            surprise += (-logprobs - entropy).sum()
            variance += of_surprise.sum()
    name = "drawn from the reported distribution"
    z = surprise / max(variance, 1e-9) ** 0.5
    figure = f"{z:+.1f} standard deviations (limit {UNLIKELY:g}), {tokens} tokens"
    return [Finding(name, bool(abs(z) < UNLIKELY) if tokens else None, figure)]


def check_seeds(run):
    """Engines draw with the same random numbers: --seed in plumbing/launch.py."""
    differ = len(set(run.seeds)) == len(run.seeds)
    return [Finding("engines' seeds differ", differ, " ".join(run.seeds))]


# ---- what was sampled


def check_prompts(run):
    """What was sent is not the problem that is scored, or not what the environment replied, in the template's form:
    another problem, a separator that is lost; an episode ends before its environment says so.
    """
    prompts = replies = between = 0
    samples = run.samples()
    for draw, sample in samples:
        problem = run.groups[draw]["problem"]
        texts = [problem["prompt"]]
        turns, contexts = run.parts(sample)
        prompts += contexts[0] != run.context(texts)
        task = sys.modules[f"tasks.{run.groups[draw]['task']}"]
        if not hasattr(task, "respond"):
            continue
        turns = [run.prompter.decode(turn) for turn in turns]
        # over when the environment has no reply
        contexts += [None] if sample["finished"] else []
        for k, tokens in enumerate(contexts[1:], 1):
            between += 1
            reply = task.respond(problem, turns[:k])
            texts += [turns[k - 1], reply]
            replies += tokens != (None if reply is None else run.context(texts))
    rows = [none_differ("prompts are those of their problems", prompts, len(samples))]
    if between:
        rows.append(none_differ("replies are the environment's", replies, between))
    return rows


def check_ends(run):
    """Stop tokens are not recorded or not trained; answers end for another reason than is said."""
    c = run.config
    wrong = 0
    samples = run.samples()
    for _, sample in samples:
        stops = int(sample["tokens"][-1]) in run.prompter.stop and sample["mask"][-1]
        full = len(sample["tokens"]) >= c.max_model_len - 1
        full |= sample["mask"].sum() >= c.max_new_tokens
        # between two turns an answer may be cut off by what would come next
        full |= len(run.parts(sample)[0]) > 1
        wrong += not (stops if sample["finished"] else full)
    return [none_differ("answers end as they say, and the end is trained", wrong, len(samples))]


# ---- what was trained


def content(sample):
    """What must be the same before and after packing."""
    names = ("tokens", "mask", "behavior_logprobs", "versions", "temperature", "reward")
    return [np.asarray(sample[name]).tobytes() for name in names]


def check_packing(run):
    """What is trained is not what was sampled: a shifted mask, lost samples, another order. Or preprocess.advantages
    does not do what its docstring says: a wrong sign, another sample's.
    """
    known = run.config.advantage in plain.ADVANTAGES
    seen = changed = other = 0
    for step, line in run.steps.items():
        trained = {}
        for sample in run.trained(step):
            trained.setdefault(int(sample["number"]), []).append(sample)
        # each is trained as often as all others
        times = max(map(len, trained.values()))
        for draw in line["problems"]:
            samples = run.groups[int(draw)]["samples"]
            rewards = [float(sample["reward"]) for sample in samples]
            own = plain.advantages(rewards, run.config.advantage if known else "none")
            for sample, advantage in zip(samples, own):
                if len(sample["tokens"]) > run.config.row_tokens:
                    continue
                if run.config.overlong_mask and not sample["finished"]:
                    sample = sample | {"mask": np.zeros_like(sample["mask"])}
                found = trained.pop(int(sample["number"]), [])
                seen += 1
                same = all(content(x) == content(sample) for x in found)
                changed += not same or len(found) != times
                other += any(abs(x["advantage"] - advantage) > 1e-4 for x in found)
        # of another step, or of none
        changed += len(trained)
    rows = [none_differ("trained = sampled", changed, seen)]
    name = "advantages = plain advantages"
    if not known:
        return [*rows, unknown(name, f"--advantage {run.config.advantage}")]
    return [*rows, none_differ(name, other, seen)]


def check_first_step(run):
    """The trainer's loss or gradient is not that of its samples: masks, a shift by one, temperature, signs, the
    normaliser, packing, ranks' sums, clipping. train.policy_loss does not do what the README says. Or --kl_coef holds
    the policy to another model than --model, or at another temperature.
    """
    c = run.config
    line = run.steps[1]
    rows = []
    if c.kl_coef:
        # the reference is version 0
        limit = NATS[c.dtype] ** 2
        figure = f"{line['kl_ref']:.1e} nats (limit {limit:.0e})"
        rows.append(Finding("first step: KL to the reference", line["kl_ref"] <= limit, figure))
    state = plain.trainer_state(run.folder(1))
    adam = plain.adam_states(state)
    steps = max((int(moments["step"]) for *_, moments in adam), default=1)
    known = c.loss in plain.LOSSES and c.normalizer in plain.NORMALIZERS
    if not known or steps > 1:
        what = f"--loss {c.loss} --normalizer {c.normalizer}, optimizer steps: {steps}"
        return [*rows, unknown("first step: loss, gradient", what)]
    loss, norm, gradients = plain.first_step(run, state["optimizer"]["state"])
    limit = RELATIVE[c.dtype]
    # a sum of terms of both signs: compared with the size of a gradient's step
    scales = {"loss": (loss, max(abs(loss), 0.05)), "grad_norm": (norm, max(norm, 1e-9))}
    for name, (own, scale) in scales.items():
        figure = f"{line[name]:.5g}, plain {own:.5g} (limit {limit:.1%})"
        good = abs(line[name] - own) <= limit * scale
        rows.append(Finding(f"first step: {name}", good, figure))
    name = "first step: gradient that AdamW got"
    if not adam:
        return [*rows, unknown(name, "the optimizer")]
    clipped = min(1.0, c.max_grad_norm / max(norm, 1e-9))
    square = 0.0
    for parameter, group, moments in adam:
        # the first moment after one step
        given = moments["exp_avg"] / (1 - group["betas"][0])
        square += float(((given - clipped * gradients[parameter]) ** 2).sum())
    off = square**0.5 / max(clipped * norm, 1e-9)
    figure = f"{off:.1e} of it differs (limit {WIDER * limit:.0%}), "
    figure += f"{len(adam)} of {len(list(run.model(0).parameters()))} tensors"
    return [*rows, Finding(name, off <= WIDER * limit, figure)]


def check_optimizer(run):
    """Weights are not what AdamW makes of them: its moments are lost when a run is continued, steps are left out,
    clipping is off.
    """
    rows = []
    for version in (1, run.continued):
        before, after = (plain.trainer_state(run.folder(v)) for v in (version, version + 1))
        steps, differ, elements, norm = plain.adam_step(before, after)
        full = run.steps[version + 1]["grad_norm"]
        name = f"version {version + 1} = AdamW of version {version}"
        if steps > 1 or not elements or not math.isfinite(full):
            what = f"{steps} optimizer steps on {elements} elements, gradient {full:.3g}"
            rows.append(unknown(name, what))
            continue
        good = steps == 1 and differ == 0
        figure = f"{differ} of {elements} elements differ"
        # another optimizer may have had the rest of the gradient
        if len(plain.adam_states(after)) == len(after["optimizer"]["state"]):
            clipped = min(full, run.config.max_grad_norm)
            good &= abs(norm - clipped) <= 1e-2 * clipped
            figure += f", gradient {norm:.3g} of {full:.3g}"
        rows.append(Finding(name, good, figure))
    return rows


# ---- rewards, data


async def score_again(run, chosen):
    """[(draw, sample)] -> [reward, as it should be recorded]."""
    sandbox = Sandbox(run.config)
    await sandbox.start()
    rewards = []
    try:
        for draw, sample in chosen:
            task = run.groups[draw]["task"]
            turns = [run.prompter.decode(turn) for turn in run.parts(sample)[0]]
            completion = turns if hasattr(sandbox.tasks[task], "respond") else turns[0]
            problem = run.groups[draw]["problem"]
            score = await sandbox.score(task, problem, completion, bool(sample["finished"]))
            penalty = overlong_penalty(int(sample["mask"].sum()), run.config)
            rewards.append(score["reward"] + penalty)
    finally:
        sandbox.close()
    return rewards


def check_rewards(run):
    """Rewards are of other answers, or change from one call to the next. Or they are always the same, so that nothing
    can be learnt: swapped arguments, attempts with one seed, problems that are all too easy or too hard.
    """
    chosen = run.samples()[:SCORED]
    rewards = asyncio.run(score_again(run, chosen))
    differ = sum(abs(float(x["reward"]) - own) > 1e-5 for (_, x), own in zip(chosen, rewards))
    outcomes = Counter(cfg.OUTCOMES[int(sample["outcome"])] for _, sample in run.samples())
    with_signal = 0
    for group in run.groups.values():
        with_signal += len({float(sample["reward"]) for sample in group["samples"]}) > 1
    figure = f"{with_signal} of {len(run.groups)}; {dict(outcomes.most_common())}"
    return [
        none_differ("rewards, scored again", differ, len(chosen)),
        Finding("groups with two different rewards", with_signal > 0, figure),
    ]


def check_held_out(run):
    """Held-out problems are also trained on: scores will be of what was learnt by heart."""
    rows = []
    for task, problems in run.train_problems.items():
        train = {json.dumps(problem, sort_keys=True) for problem in problems}
        test = [json.dumps(problem, sort_keys=True) for problem in run.test_problems[task]]
        both = sum(problem in train for problem in test)
        # of a task with few different problems it cannot be otherwise
        wrong = False if len(train) >= len(problems) / 2 else None
        name = f"held-out problems of {task} are not trained on"
        rows.append(Finding(name, wrong if both else True, f"{both} of {len(test)} are"))
    return rows


# ---- stopping and going on


def check_continuation(run):
    """A run does not go on where it was interrupted: steps are missing, problems in flight are lost or trained twice,
    or the sampler begins again.
    """
    newest = checkpoints.newest(run.run_dir)
    version = int(newest.name[5:])
    whole = sorted(run.steps) == list(range(1, version + 1)) and version > run.continued
    figure = f"from version {run.continued} to {version}, {len(run.steps)} steps"
    ledger = checkpoints.state_of(newest)["sampler"]
    trained = Counter()
    known = {*map(int, ledger["pending"])}
    for line in run.steps.values():
        trained.update(map(int, line["problems"]))
        known |= {int(draw) for dropped in line["drops"].values() for draw in dropped}
    wrong = len(set(range(ledger["drawn"])) - trained.keys() - known)
    wrong += sum(count > 1 for count in trained.values())
    return [
        Finding("engines killed, run interrupted and continued", whole, figure),
        none_differ("draws are trained once, dropped or in flight", wrong, ledger["drawn"]),
        sampler_goes_on(run),
    ]


def sampler_goes_on(run):
    """The row that a continued run does not draw the problems of its beginning once more, in the same order."""
    name = "a continued run's sampler goes on"
    first = checkpoints.state_of(run.folder(run.continued))["sampler"]["drawn"]
    drawn = {draw: (group["task"], group["number"]) for draw, group in run.groups.items()}
    pairs = [(drawn[k], drawn[k - first]) for k in drawn if k >= first and k - first in drawn]
    again = sum(now == begun for now, begun in pairs)
    figure = f"{again} of its {len(pairs)} problems are those of its beginning"
    if len(set(pairs)) < DRAWN:
        return Finding(name, None, figure)
    return Finding(name, again < len(pairs), figure)


def check_evaluation(run):
    """The newest checkpoint cannot be loaded by vLLM or transformers: try tools/evaluate.py."""
    newest = checkpoints.newest(run.run_dir)
    command = [sys.executable, "tools/evaluate.py", str(newest), "--eval_problems", "16"]
    command += ["--out", run.config.out, "--port", str(run.config.port)]
    done = subprocess.run(command, cwd=cfg.ROOT, capture_output=True, text=True)
    output = (done.stdout + done.stderr).strip().splitlines() or [""]
    scores = [" ".join(line.split()) for line in output if "pass@1" in line]
    figure = (scores or output[-1:])[0][:150]
    return [Finding("the checkpoint is evaluated by an engine", done.returncode == 0, figure)]


CHECKS = (
    check_engine_logprobs,
    check_temperature,
    check_sampling,
    check_seeds,
    check_prompts,
    check_ends,
    check_packing,
    check_first_step,
    check_optimizer,
    check_rewards,
    check_held_out,
    check_continuation,
    check_evaluation,
)

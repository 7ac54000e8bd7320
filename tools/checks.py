"""The doctor's checks: each compares what two short runs have left with what it should be (tools/plain.py).

A function `check_...` takes the plain.Recording of the runs and returns rows of the table, (name, ok, figure); its
docstring says which faults it finds, and is shown where one fails. What a fork computes in its own way, another loss,
advantage or optimizer, is no fault: its row says that it is not known, and has None for ok, like one without data.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter

import numpy as np

import config as cfg
from actor import overlong_penalty
from plumbing import checkpoints, launch
from plumbing.problems import in_both
from plumbing.sandbox import Sandbox
from tools import plain

# answers that are scored again
SCORED = 200
# tokens of sequences that are computed again, of each kind
RECOMPUTED = 20_000
# nats a token that two ways to compute a logprob may differ by, on average
NATS = {"float32": 1e-4, "bfloat16": 0.1}
# relative difference of two norms of a gradient
RELATIVE = {"float32": 1e-3, "bfloat16": 0.05}
# times these limits: what one sequence may differ by on average, and a gradient as a vector
WIDER = 10
# standard deviations
UNLIKELY = 5.0
# fields that must be the same before and after packing
KEPT = ("tokens", "mask", "behavior_logprobs", "versions", "temperature", "reward")


def none_differ(name, differ, seen):
    """The row of a check that none of what was seen may fail."""
    return name, differ == 0 if seen else None, f"{differ} of {seen} differ"


def unknown(name, what):
    """The row of what a fork does in its own way."""
    return name, None, f"{what}: not known to the doctor"


# ---- what engines report


def origin_of(sample):
    """By which versions it was sampled, in words; None: which of them computed its KV cache is not known."""
    versions = plain.versions_of(sample)
    turns = (np.diff(sample["mask"].astype(int)) == 1).sum()
    # another version has computed a part of it, or it was sent once more for each turn
    if sample["num_versions"] != len(versions) or not versions:
        return None
    if len(versions) > 1:
        return "across updates" if turns == 1 else None
    return "after updates" if versions[0] else "version 0"


def check_engine_logprobs(run):
    """Engines sample from other weights, temperatures or filters than they say, or report other versions or logprobs:
    a skipped update, in one worker too; a tied head that is not updated; a stale prefix; top-k. See logs/engine*.log.
    """
    by_origin = {"version 0": [], "after updates": []}
    for _, sample in run.samples():
        by_origin.setdefault(origin_of(sample), []).append(sample)
    by_origin.pop(None, None)
    limit = NATS[run.config.dtype]
    rows = []
    for origin, samples in by_origin.items():
        name = f"engine = plain logprobs, {origin}"
        every = 1 + sum(len(sample["tokens"]) for sample in samples) // RECOMPUTED
        some = np.random.default_rng(0).permutation(len(samples))[::every]
        sequences = []
        for sample in sorted([samples[i] for i in some], key=plain.versions_of):
            logprobs = plain.expected(run, sample)[0]
            sequences.append(np.abs(logprobs - sample["behavior_logprobs"][sample["mask"]]))
        if not sequences:
            rows.append((name, False, "no such sequence was seen: more --batch_size?"))
            continue
        nats = np.concatenate(sequences).mean()
        worst = max(of_one.mean() for of_one in sequences)
        good = nats <= limit and worst <= WIDER * limit
        figure = f"{nats:.1e} nats (limit {limit:.0e}), worst of {len(sequences)} {worst:.1e}"
        rows.append((name, good, figure))
        if origin == "version 0":
            # updates must add nothing to what rounding makes of a logprob
            limit = min(limit, 3 * max(nats, NATS["float32"]))
    return rows


def check_sampling(run):
    """actor.py asks for another temperature than --temperature, and records it. Or tokens are drawn from another
    distribution than the one whose logprobs are reported: more (-) or less (+) likely ones, by temperature, top-k,
    top-p or penalties (generation_config). Or engines draw with the same random numbers (plumbing/launch.py).
    """
    temperatures = sorted({float(sample["temperature"]) for _, sample in run.samples()})
    name = f"sampled at --temperature {run.config.temperature:g}"
    rows = [(name, np.allclose(temperatures, run.config.temperature), f"{temperatures}")]
    if len(temperatures) > 1:
        rows = [unknown(name, f"{len(temperatures)} temperatures")]
    # -log p of what is drawn is its entropy on average; up to the first draw that is missing: short ones come first
    draws = [draw for k, draw in enumerate(run.groups) if draw == k]
    tokens = 0
    surprise = 0.0
    variance = 0.0
    for _, sample in run.samples(draws):
        if origin_of(sample) in ("version 0", "after updates") and tokens < RECOMPUTED:
            logprobs, entropy, of_surprise = plain.expected(run, sample)
            tokens += len(logprobs)
            surprise += (-logprobs - entropy).sum()
            variance += of_surprise.sum()
    z = surprise / max(variance, 1e-9) ** 0.5
    figure = f"{z:+.1f} standard deviations (limit {UNLIKELY:g}), {tokens} tokens"
    rows.append(("sampled = reported distribution", abs(z) < UNLIKELY if tokens else None, figure))
    commands = launch.engine_commands(run.config, launch.gpu_count())
    seeds = [command[command.index("--seed") + 1] for *_, command in commands]
    return [*rows, ("engines' seeds differ", len(set(seeds)) == len(seeds), " ".join(seeds))]


# ---- what was sampled


def check_texts(run):
    """What was sent is not the problem that is scored, in the template's form, or not what the environment replied: a
    separator is lost. Stop tokens are not recorded or not trained; answers end for another reason than they say.
    """
    prompts = replies = wrong_replies = ends = 0
    samples = run.samples()
    for draw, sample in samples:
        group = run.groups[draw]
        turns, (prompt, *between) = run.parts(sample)
        prompts += prompt != run.prompt(group["problem"])
        task = sys.modules[f"tasks.{group['task']}"]
        if hasattr(task, "respond"):
            texts = [run.prompter.decode(turn) for turn in turns]
            # it is over when the environment has no reply
            between += [None] if sample["finished"] else []
            for k, tokens in enumerate(between, 1):
                reply = task.respond(group["problem"], texts[:k])
                wrong_replies += not run.is_reply(tokens, reply)
                replies += 1
        stops = int(sample["tokens"][-1]) in run.prompter.stop and sample["mask"][-1]
        full = sample["mask"].sum() >= run.config.max_new_tokens
        full |= len(sample["tokens"]) >= run.config.max_model_len - 1
        # between two turns an answer may be cut off by what would come next
        ends += not (stops if sample["finished"] else full or between)
    return [
        none_differ("prompts are those of their problems", prompts, len(samples)),
        none_differ("replies are the environment's", wrong_replies, replies),
        none_differ("answers end as they say, and the end is trained", ends, len(samples)),
    ]


# ---- what was trained


def check_packing(run):
    """What is trained is not what was sampled: a shifted mask, lost samples, another order of something. Or
    preprocess.advantages does not do what its docstring says: a wrong sign, another sample's.
    """
    kind = run.config.advantage
    known = kind in plain.ADVANTAGES
    seen = changed = other = 0
    for step, line in run.steps.items():
        times = Counter()
        for sample in run.trained(step):
            times[sample["sample_id"]] += 1
            group = run.groups[sample["sample_id"] // run.config.attempts]["samples"]
            k = [x["sample_id"] for x in group].index(sample["sample_id"])
            drawn = group[k]
            if run.config.overlong_mask and not drawn["finished"]:
                drawn = drawn | {"mask": np.zeros_like(drawn["mask"])}
            changed += not all(np.array_equal(sample[name], drawn[name]) for name in KEPT)
            rewards = np.array([x["reward"] for x in group], np.float64)
            own = plain.advantage(rewards, k, kind) if known else 0.0
            other += abs(sample["advantage"] - own) > 1e-4
        samples = [x for _, x in run.samples(map(int, line["problems"]))]
        # each as often as all others, and no others
        changed += len({x["sample_id"] for x in samples} ^ times.keys())
        changed += len(set(times.values())) > 1
        seen += times.total()
    rows = [none_differ("trained = sampled", changed, seen)]
    name = "advantages = plain advantages"
    rows.append(none_differ(name, other, seen) if known else unknown(name, f"--advantage {kind}"))
    return rows


def check_trainer(run):
    """Weights are not what AdamW makes of them: its moments are lost when a run is continued, or steps are left out. Or
    its gradient is not that of the samples: masks, a shift by one, temperature, signs, the normaliser, packing, ranks'
    sums, clipping. Or --kl_coef holds the policy to another model than --model, or at another temperature.
    """
    rows = []
    for version in (0, run.continued):
        name = f"version {version + 1} = AdamW of version {version}"
        before, after = (plain.trainer_state(run, v) for v in (version, version + 1))
        steps = list(plain.adam_steps(before, after))
        differ = sum(int((~same).sum()) for _, _, same, _ in steps)
        counted = {count for *_, count in steps}
        figure = f"{differ} elements of {len(steps)} tensors differ, steps counted: {counted}"
        if max(counted, default=2) > 1:
            rows.append(unknown(name, figure))
            continue
        rows.append((name, differ == 0 and counted == {1}, figure))
        if version == 0:
            given = {name: gradient for name, gradient, *_ in steps}
            rows += first_gradient(run, given, after["optimizer"]["state"])
    if run.config.kl_coef:
        # the reference is version 0
        kl = run.steps[1]["kl_ref"]
        limit = NATS[run.config.dtype] ** 2
        rows.append(("first step: KL to the reference", kl <= limit, f"{kl:.1e} nats"))
    return rows


def first_gradient(run, given, trained):
    """The rows of the gradient that made version 1. given: what Adam got, clipped; trained: names of parameters."""
    c = run.config
    name = "first step: gradient"
    if c.loss not in plain.LOSSES or c.normalizer not in plain.NORMALIZERS:
        return [unknown(name, f"--loss {c.loss} --normalizer {c.normalizer}")]
    gradients = plain.first_gradient(run, trained)
    norm = plain.norm_of(gradients)
    full = run.steps[1]["grad_norm"]
    limit = RELATIVE[c.dtype]
    figure = f"{full:.5g}, plain {norm:.5g} (limit {limit:.1%})"
    scale = min(1.0, c.max_grad_norm / max(norm, 1e-9))
    differences = {key: g - scale * gradients[key] for key, g in given.items()}
    off = plain.norm_of(differences) / max(scale * norm, 1e-9)
    return [
        (f"{name}'s norm", abs(full - norm) <= limit * norm, figure),
        (f"{name} that AdamW was given", off <= WIDER * limit, f"{off:.1e} of it differs"),
    ]


# ---- rewards, data


async def score_again(run, chosen):
    """[(draw, sample)] -> how many of them are not recorded with the reward that they get now."""
    differ = 0
    with contextlib.closing(Sandbox(run.config)) as sandbox:
        await sandbox.start()
        for draw, sample in chosen:
            group = run.groups[draw]
            turns = [run.prompter.decode(turn) for turn in run.parts(sample)[0]]
            completion = turns if hasattr(sandbox.tasks[group["task"]], "respond") else turns[0]
            finished = bool(sample["finished"])
            score = await sandbox.score(group["task"], group["problem"], completion, finished)
            reward = score["reward"] + overlong_penalty(int(sample["mask"].sum()), run.config)
            differ += abs(reward - sample["reward"]) > 1e-5
    return differ


def check_rewards(run):
    """Rewards are of other answers, or change from one call to the next. Or they are always the same, so that nothing
    can be learnt: swapped arguments, attempts with one seed, problems that are all too easy or too hard.
    """
    chosen = run.samples()[:SCORED]
    differ = asyncio.run(score_again(run, chosen))
    rewards = [{float(x["reward"]) for x in group["samples"]} for group in run.groups.values()]
    signal = sum(len(of_group) > 1 for of_group in rewards)
    return [
        none_differ("rewards, scored again", differ, len(chosen)),
        ("groups with two different rewards", signal > 0, f"{signal} of {len(rewards)}"),
    ]


def check_held_out(run):
    """Held-out problems are also trained on: scores will be of what was learnt by heart."""
    rows = []
    for task, problems in run.train_problems.items():
        tests = run.test_problems[task]
        both = in_both(problems, tests)
        name = f"held-out problems of {task} are not trained on"
        rows.append((name, None if both is None else not both, f"{both} of {len(tests)} are"))
    return rows


# ---- stopping and going on


def check_continuation(run):
    """A run does not go on where it was interrupted: steps are missing, problems in flight are lost or trained twice; or
    it draws the problems of its beginning once more. See Sampler.state, and what checkpoints keep of it.
    """
    state = checkpoints.last_state(run.run_dir)
    version, ledger = state["version"], state["sampler"]
    whole = sorted(run.steps) == list(range(1, version + 1)) and version > run.continued
    trained = Counter()
    known = set(ledger["pending"])
    for line in run.steps.values():
        trained.update(list(line["problems"]))
        known.update(*line["drops"].values())
    wrong = len(set(map(str, range(ledger["drawn"]))) - trained.keys() - known)
    wrong += sum(count > 1 for count in trained.values())
    # what the continued run drew first, and what was drawn at the run's beginning
    first = checkpoints.state_of(run.folder(run.continued))["sampler"]["drawn"]
    drawn = {draw: (group["task"], group["number"]) for draw, group in run.groups.items()}
    pairs = [(drawn[k], drawn[k - first]) for k in drawn if k >= first and k - first in drawn]
    again = sum(now == begun for now, begun in pairs)
    # of few problems nothing is known
    goes_on = again < len(pairs) if len(set(pairs)) > 3 else None
    figure = f"from version {run.continued} to {version}, {len(run.steps)} steps"
    return [
        ("engines killed, run interrupted and continued", whole, figure),
        none_differ("draws are trained once, dropped or in flight", wrong, ledger["drawn"]),
        ("the sampler goes on", goes_on, f"{again} of {len(pairs)} as at the beginning"),
    ]


def check_evaluation(run):
    """The newest checkpoint cannot be loaded by vLLM or transformers: try tools/evaluate.py."""
    command = [sys.executable, "tools/evaluate.py", str(checkpoints.newest(run.run_dir))]
    command += ["--eval_problems", "16", "--out", run.config.out, "--port", str(run.config.port)]
    done = subprocess.run(command, cwd=cfg.ROOT, capture_output=True, text=True)
    output = (done.stdout + done.stderr).strip().splitlines()
    scores = [" ".join(line.split()) for line in output if "pass@1" in line]
    figure = " ".join(scores or output[-1:])[:150]
    return [("the checkpoint is evaluated by an engine", done.returncode == 0, figure)]

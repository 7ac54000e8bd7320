"""The doctor's checks: each compares what two short runs have left with what it should be (tools/plain.py).

A function `check_...` is one check, whose docstring says which faults it finds; it takes a Case and returns rows of
the table. Deliberately absent: the runs (tools/doctor.py).
"""

import asyncio
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import config as cfg
from actor import overlong_penalty
from plumbing import archive, checkpoints, launch
from plumbing.samples import split
from plumbing.sandbox import Sandbox
from tools import memory, plain
from tools.report import advice_on

# answers that are judged again
JUDGED = 200
# tokens of sequences that are computed again, of each kind
RECOMPUTED = 20_000
# nats a token that two ways to compute a logprob may differ by, on average; and the average of one sequence
NATS = {"float32": 1e-4, "bfloat16": 0.1}
OF_ONE = 10
# relative difference of a step's numbers
RELATIVE = {"float32": 1e-3, "bfloat16": 0.05}
# standard deviations
UNLIKELY = 5.0


@dataclasses.dataclass
class Finding:
    """A row of the table. ok: None where there was nothing to look at; advice: what to do if it is not ok."""

    check: str
    figure: str
    limit: str = ""
    ok: bool | None = True
    advice: str = ""

    @property
    def word(self):
        return {True: "ok", False: "FAIL", None: "-"}[self.ok]


def count_wrong(check, wrong, seen, advice):
    """The row of a check that none of what was seen may fail."""
    return Finding(check, f"{wrong} of {seen} differ", "0", wrong == 0, advice)


def not_looked(check, why):
    """The row of a check that had nothing to look at."""
    return Finding(check, why, "", None)


@dataclasses.dataclass
class Case:
    """What the two runs have left. found: plain.Recording; continued: first version of the second run."""

    config: cfg.Config
    run_dir: Path
    found: plain.Recording
    continued: int
    watched: dict

    @property
    def limit(self):
        """Nats a token, on average."""
        return NATS[self.config.dtype]


# ---- what engines said


def kinds(case):
    """{kind of sequence: [sample]}: by how many versions it is from, and what became of its KV cache."""
    found = {
        "version 0": [],
        "after updates": [],
        "across one, stale KV": [],
        "across one, KV again": [],
    }
    for _, sample in case.found.samples():
        versions = plain.versions_of(sample)
        if not plain.one_kv(sample) or not case.found.weights.there(versions):
            continue
        if versions == [0]:
            found["version 0"].append(sample)
        elif len(versions) == 1:
            found["after updates"].append(sample)
        elif versions[-1] <= case.continued:
            found["across one, stale KV"].append(sample)
        elif versions[0] >= case.continued:
            found["across one, KV again"].append(sample)
    return found


def recomputed(samples):
    """Some of them, from the whole run, as many as are computed again; those of a version together."""
    found = []
    left = RECOMPUTED
    for sample in random.Random(0).sample(samples, len(samples)):
        if left > 0:
            found.append(sample)
            left -= len(sample["tokens"])
    return sorted(found, key=plain.versions_of)


def check_engine_logprobs(case):
    """Engines sample from other weights, temperatures or filters than they say, or say other versions or logprobs.

    A skipped update, in one worker too; a tied head that is not updated; spans that are off by one; a stale prefix;
    top-k; raw logprobs; tokens that are not those of the request.
    """
    rows = []
    for kind, samples in kinds(case).items():
        name = f"engine = plain logprobs, {kind}"
        differences = []
        for sample in recomputed(samples):
            recompute = kind.endswith("again")
            own = plain.expected(case.found.weights, sample, recompute).logprobs
            differences.append(np.abs(own - sample["behavior_logprobs"][sample["mask"]]))
        if not differences:
            needed = kind in ("version 0", "after updates")
            words = "no such sequence was seen: more --batch_size, longer answers?"
            rows.append(Finding(name, "none", "", False if needed else None, words))
            continue
        tokens = np.concatenate(differences)
        worst = max(of_one.mean() for of_one in differences)
        rows.append(
            Finding(
                name,
                f"{tokens.mean():.1e} nats, worst sequence {worst:.1e}, {len(tokens)} tokens",
                f"{case.limit:.0e}, {OF_ONE * case.limit:.0e}",
                bool(tokens.mean() <= case.limit and worst <= OF_ONE * case.limit),
                "the engine's weights, temperature, filters or version stamps are not what the run believes: "
                "logs/engine*.log; does the family work (README)?",
            )
        )
    return rows


def check_sampling(case):
    """Tokens are sampled from another distribution than the one whose logprobs are told: temperature, top-k, penalties.

    -log p of what was sampled must be the distribution's entropy on average. Only of the first groups, all of which
    came back: what comes back first is short.
    """
    tokens = 0
    surprise = 0.0
    variance = 0.0
    for _, sample in case.found.samples(case.found.first_draws()):
        versions = plain.versions_of(sample)
        pure = len(versions) == 1 and plain.one_kv(sample)
        if not pure or not case.found.weights.there(versions):
            continue
        own = plain.expected(case.found.weights, sample, True)
        surprise += (-own.logprobs - own.entropy).sum()
        variance += own.variance.sum()
        tokens += len(own.logprobs)
        if tokens > 20000:
            break
    if not tokens:
        return [not_looked("sampled = told distribution", "no sequence of one version")]
    z = surprise / max(variance, 1e-9) ** 0.5
    return [
        Finding(
            "sampled = told distribution",
            f"{z:+.1f} standard deviations, {tokens} tokens",
            f"{UNLIKELY:g}",
            bool(abs(z) < UNLIKELY),
            "answers are more (-) or less (+) likely than their distribution says: does the engine sample at another "
            "temperature, or with top-k, top-p or penalties (generation_config)?",
        )
    ]


def check_independence(case):
    """Attempts are copies of each other: requests with the same seed, or engines with the same one."""
    pairs = 0
    equal = 0
    expected = 0.0
    for group in case.found.groups.values():
        answers = []
        for sample in group["samples"]:
            mask = sample["mask"]
            likely = float(np.exp(sample["behavior_logprobs"][mask].astype(np.float64).sum()))
            answers.append((tuple(sample["tokens"][mask].tolist()), likely))
        for k, (a, of_a) in enumerate(answers):
            for b, of_b in answers[:k]:
                pairs += 1
                equal += a == b
                expected += (of_a + of_b) / 2
    spread = max(expected, 1.0) ** 0.5
    seeds = case.watched["seeds"]
    return [
        Finding(
            "attempts are independent",
            f"{equal} equal pairs of {pairs}, {expected:.0f} expected",
            f"{UNLIKELY:g} deviations",
            bool(equal <= expected + UNLIKELY * 2 * spread),
            "do requests carry a seed?",
        ),
        Finding(
            "engines' seeds",
            " ".join(seeds),
            "all different",
            len(set(seeds)) == len(seeds),
            "engines that sample with the same random numbers: --seed in plumbing/launch.py",
        ),
    ]


# ---- what was sampled


def check_prompts(case):
    """Problems are not those that the sampler draws, or not what was sent: templates, a continued run that begins again."""
    wrong = 0
    samples = case.found.samples()
    for draw, sample in samples:
        _, given = case.found.turns(sample)
        expected = case.found.prompt(case.found.groups[draw]["problem"])
        wrong += given[0] != list(expected)
    advice = "are templates, seed or the sampler's state after a continuation in order?"
    return [count_wrong("prompts are those of the problems drawn", wrong, len(samples), advice)]


def check_turns(case):
    """What stands between two turns is not what the environment said, in the template's form, or stands nowhere."""
    wrong = 0
    seen = 0
    for draw, sample in case.found.samples():
        group = case.found.groups[draw]
        task = sys.modules[f"tasks.{group['task_name']}"]
        if not hasattr(task, "respond"):
            continue
        sampled, given = case.found.turns(sample)
        texts = [case.found.prompter.decode(turn) for turn in sampled]
        said = [group["problem"]["prompt"]]
        for k, between in enumerate(given[1:], 1):
            seen += 1
            words = task.respond(group["problem"], texts[:k])
            said.append(texts[k - 1])
            wrong += words is None or case.found.between(words, said) != between
            said.append(words)
        if sample["finished"]:
            # over when the environment says so, and not before
            seen += 1
            wrong += task.respond(group["problem"], texts) is not None
    if not seen:
        return [not_looked("borders of turns", "the tasks have none")]
    advice = "a separator is lost, or the template puts something else between turns"
    return [count_wrong("borders of turns", wrong, seen, advice)]


def check_ends(case):
    """Stop tokens are not recorded or not trained; answers end for another reason than is said."""
    c = case.config
    stop = case.found.prompter.stop
    wrong = 0
    cut_off = 0
    samples = case.found.samples()
    for _, sample in samples:
        sampled = int(sample["mask"].sum())
        ends = int(sample["tokens"][-1]) in stop and bool(sample["mask"][-1])
        no_room = sampled >= c.max_new_tokens or len(sample["tokens"]) >= c.max_model_len - 1
        # between two turns an answer may be cut off by what would come next
        turns = len(case.found.turns(sample)[0])
        wrong += not ends if sample["finished"] else not (no_room or turns > 1)
        cut_off += not sample["finished"]
    name = "answers end as they say, and the end is trained"
    advice = "the stop token must be the last token that is sampled and trained"
    return [
        count_wrong(name, wrong, len(samples), advice),
        Finding(
            "answers cut off",
            f"{cut_off} of {len(samples)}",
            "50%",
            cut_off <= len(samples) / 2,
            "raise --max_new_tokens, or does the model know the stop token?",
        ),
    ]


# ---- what was trained


def trained(case, step):
    """[(sample as it was sampled, its advantage)] of the groups that a step trained."""
    found = []
    for draw in case.found.steps[step]["problems"]:
        group = case.found.groups[int(draw)]
        rewards = [float(sample["reward"]) for sample in group["samples"]]
        advantages = plain.plain_advantages(rewards, case.config.advantage)
        found += zip(group["samples"], advantages)
    return found


def known_steps(case):
    """Steps all of whose groups and micro-batches were kept."""
    found = []
    for step, line in sorted(case.found.steps.items()):
        groups = all(int(draw) in case.found.groups for draw in line["problems"])
        if groups and archive.step_folder(case.run_dir, step).exists():
            found.append(step)
    return found


def form(sample, advantage):
    """What must be the same before and after packing."""
    arrays = [
        sample[name].tobytes() for name in ("tokens", "mask", "behavior_logprobs", "versions")
    ]
    return (*arrays, float(sample["temperature"]), round(float(advantage), 4))


def check_packing(case):
    """What is trained is not what was sampled: a shifted mask, lost samples, wrong signs, another group's advantages."""
    name = "trained = sampled, with plain advantages"
    if case.config.overlong_mask or case.config.no_signal == "drop":
        return [not_looked(name, "not with these knobs")]
    wrong = 0
    samples = 0
    for step in known_steps(case):
        expected = Counter()
        for sample, advantage in trained(case, step):
            if len(sample["tokens"]) <= case.config.row_tokens:
                expected[form(sample, advantage)] += 1
        found = Counter()
        for batch in archive.batches(case.run_dir, step):
            for sample in split(batch):
                if sample["outcome"] >= 0:
                    found[form(sample, sample["advantage"])] += 1
        samples += sum(expected.values())
        wrong += sum(((expected - found) + (found - expected)).values())
    if not samples:
        return [Finding(name, "no step was kept", "", False, "--keep_steps, logs/train.log")]
    advice = "masks, order or advantages change between actor.py and train.py"
    return [count_wrong(name, wrong, samples, advice)]


def check_first_step(case):
    """The trainer's loss or gradient is not that of its samples: a shift by one, temperature, sign, normaliser, optimizer."""
    c = case.config
    name = "first step: loss, gradient"
    line = case.found.steps.get(1)
    known = 1 in known_steps(case) and case.found.weights.there([1])
    if not known or c.kl_coef or c.overlong_mask:
        return [not_looked(name, "not with these knobs")]
    samples, advantages = zip(*trained(case, 1))
    try:
        loss, norm, gradients = plain.gradient_of_first_step(
            case.found.weights, samples, advantages
        )
    except torch.OutOfMemoryError:
        return [not_looked(name, "one device has too little memory for it")]
    limit = RELATIVE[c.dtype]
    # a sum of terms of both signs: compared with the size of a gradient's step
    scale = max(abs(loss), 0.05)
    off_loss = abs(line["loss"] - loss) / scale
    off_norm = abs(line["grad_norm"] - norm) / max(norm, 1e-9)
    agree, moved, tensors = movement(case.found.weights, gradients)
    return [
        Finding(
            "first step: loss",
            f"{line['loss']:.5g}, plain {loss:.5g}",
            f"{limit:.1%}",
            bool(off_loss <= limit),
            "train.policy_loss, masks, signs or the normaliser do not do what the README says",
        ),
        Finding(
            "first step: gradient's norm",
            f"{line['grad_norm']:.5g}, plain {norm:.5g}",
            f"{limit:.1%}",
            bool(off_norm <= limit),
            "logprobs that the trainer computes are not the model's: shift, temperature, packing, ranks' sums",
        ),
        Finding(
            "first step: weights go against the gradient",
            f"{agree:.1%} of it, {moved} of {tensors} tensors moved",
            "90%, all",
            bool(agree > 0.9 and moved == tensors),
            "the optimizer, or a parameter that is not trained",
        ),
    ]


def movement(weights, gradients):
    """(share of the gradient's absolute value against whose sign the first step went, tensors moved, tensors)."""
    before = dict(weights.load(0).named_parameters())
    after = dict(weights.load(1).named_parameters())
    against = total = 0.0
    moved = 0
    for name, gradient in gradients.items():
        step = (after[name] - before[name]).float().cpu()
        moved += bool(step.abs().max() > 0)
        # what is too small to move weights of this type says nothing
        size = gradient.abs() * (step != 0)
        against += float((size * (step.sign() == -gradient.sign())).sum())
        total += float(size.sum())
    return against / max(total, 1e-12), moved, len(gradients)


def check_reference(case):
    """--kl_coef holds the policy to another model than --model, or at another temperature."""
    name = "reference = plain logprobs of --model"
    if not case.config.kl_coef:
        return [not_looked(name, "--kl_coef is 0")]
    samples = []
    for step in known_steps(case)[:1]:
        for batch in archive.batches(case.run_dir, step):
            samples += [sample for sample in split(batch) if sample["outcome"] >= 0]
    differences = []
    for sample in recomputed(samples):
        first = sample | {"versions": np.where(sample["mask"], 0, -1)}
        own = plain.expected(case.found.weights, first, True).logprobs
        differences.append(np.abs(own - sample["ref_logprobs"][sample["mask"]]))
    tokens = np.concatenate(differences)
    return [
        Finding(
            name,
            f"{tokens.mean():.1e} nats",
            f"{case.limit:.0e}",
            bool(tokens.mean() <= case.limit),
            "preprocess.py's reference model is another one",
        )
    ]


# ---- rewards, data


async def judge_again(case, judged):
    """[(draw, sample)] -> ([(reward as recorded, as judged again)], seconds an answer)."""
    sandbox = Sandbox(case.config)
    await sandbox.start()
    found = []
    start = time.monotonic()
    try:
        for draw, sample in judged:
            group = case.found.groups[draw]
            turns = [case.found.prompter.decode(t) for t in case.found.turns(sample)[0]]
            has_turns = hasattr(sandbox.tasks[group["task_name"]], "respond")
            text = turns if has_turns else turns[0]
            verdict = await sandbox.score(
                group["task_name"], group["problem"], text, bool(sample["finished"])
            )
            length = int(sample["mask"].sum())
            again = verdict["reward"] + overlong_penalty(length, case.config)
            found.append((float(sample["reward"]), again))
    finally:
        sandbox.close()
    return found, (time.monotonic() - start) / max(len(judged), 1)


def check_rewards(case):
    """Rewards are of other answers, or change from one call to the next, or are always the same."""
    judged = case.found.samples()[:JUDGED]
    pairs, seconds = asyncio.run(judge_again(case, judged))
    differ = sum(abs(a - b) > 1e-5 for a, b in pairs)
    outcomes = Counter(cfg.OUTCOMES[int(s["outcome"])] for _, s in case.found.samples())
    with_signal = 0
    groups = [g for g in case.found.groups.values() if g["samples"]]
    for group in groups:
        with_signal += len({float(sample["reward"]) for sample in group["samples"]}) > 1
    return [
        Finding(
            "rewards, judged again",
            f"{differ} of {len(pairs)} differ, {1000 * seconds:.1f} ms an answer",
            "0",
            differ == 0,
            "the reward function is not deterministic, or got other answers",
        ),
        Finding(
            "groups with two different rewards",
            f"{with_signal} of {len(groups)}; {dict(outcomes.most_common())}",
            "1",
            with_signal > 0,
            "nothing can be learnt: a constant reward (are its arguments in the right order?), or problems that are "
            "all too easy or too hard for this model",
        ),
    ]


def check_data(case):
    """Held-out problems are also trained on; problems come twice in an epoch, as after a continuation that forgot."""
    rows = []
    for task, problems in case.found.train_problems.items():
        as_text = {json.dumps(problem, sort_keys=True) for problem in problems}
        held_out = case.found.test_problems[task]
        both = sum(json.dumps(problem, sort_keys=True) in as_text for problem in held_out)
        possible = len(as_text) < len(problems) / 2
        rows.append(
            Finding(
                f"held-out problems of {task} that are trained on",
                f"{both} of {len(held_out)}" + ", of a task with few different problems" * possible,
                "0",
                both == 0 or (None if possible else False),
                "scores will be of what was learnt by heart: make the splits differ",
            )
        )
    seen = Counter()
    for step in case.found.steps.values():
        for draw in step["problems"]:
            seen[draw] += 1
    twice = sum(count > 1 for count in seen.values())
    rows.append(
        Finding(
            "problems trained twice",
            f"{twice} of {len(seen)} draws",
            "0",
            twice == 0,
            "the sampler's state was lost when the run was continued",
        )
    )
    return rows


# ---- machinery


def adam_steps(checkpoint):
    """How many steps the optimizer in a checkpoint has counted, None if it counts none."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint / "trainer")
    names = [n for n in reader.read_metadata().state_dict_metadata if n.endswith(".step")]
    if not names:
        return None
    state = {names[0]: torch.zeros(())}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return int(state[names[0]])


def check_continuation(case):
    """A continued run goes on from other weights, steps or optimizer state than it stopped with."""
    newest = checkpoints.newest(case.run_dir)
    version = int(newest.name[5:])
    steps = sorted(case.found.steps)
    whole = steps == list(range(1, version + 1))
    counted = adam_steps(newest)
    return [
        Finding(
            "interrupted and continued",
            f"at version {case.continued}, then to {version}; steps in metrics.jsonl "
            + ("without a gap" if whole else str(steps)),
            "",
            whole and version > case.continued,
            "logs/train.log",
        ),
        Finding(
            "the optimizer's state came along",
            f"{counted} steps counted at version {version}",
            str(version),
            None if counted is None else counted == version,
            "plumbing/checkpoints.py lost it",
        ),
    ]


def check_engines_killed(case):
    """An engine that dies is not started again, or not given weights."""
    return [
        Finding(
            "engines killed and back",
            f"all sampled again after {case.watched['back']:.0f} s",
        )
    ]


def check_evaluation(case):
    """The checkpoint cannot be loaded by vLLM, or is not the model that was trained."""
    newest = checkpoints.newest(case.run_dir)
    c = case.config
    command = [sys.executable, "tools/evaluate.py", str(newest), "--eval_problems", "16"]
    command += ["--out", c.out, "--port", str(c.port)]
    done = subprocess.run(command, cwd=cfg.ROOT, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip().splitlines() or [""]
    scores = [line for line in said if "pass@1" in line]
    return [
        Finding(
            "the checkpoint in vLLM and transformers",
            " ".join(scores[0].split()) if scores else said[-1][:150],
            "",
            done.returncode == 0,
            f"try it: {' '.join(command[1:])}",
        )
    ]


def check_memory(case):
    """Next to nothing is left of a device's memory, so that a longer answer or a fuller cache ends the run."""
    rows = []
    for name, (used, total) in sorted(case.watched["memory"].items()):
        rows.append(
            Finding(
                f"memory, {name}",
                f"{used / 1e9:.1f} of {total / 1e9:.0f} GB at most",
                "95%",
                used <= 0.95 * total,
                "`python tools/memory.py` says what takes it; lower --row_tokens or --gpu_memory_utilization",
            )
        )
    return rows


def check_memory_estimate(case):
    """tools/memory.py says that less is taken than is: it lets runs start that cannot fit."""
    name = "memory as tools/memory.py has it"
    if not launch.gpu_count() or memory.model_config(case.config.model) is None:
        return [not_looked(name, "no GPU, or no config.json of the model")]
    seen = case.watched["memory"].values()
    total = min(total for _, total in seen) / memory.GB
    taken = max(used for used, _ in seen) / memory.GB
    estimated = max(memory.Placed(case.config, len(seen), total).totals.values())
    return [
        Finding(
            name,
            f"{taken:.1f} GB of the fullest GPU, estimated {estimated:.1f}",
            "110%",
            taken <= 1.1 * estimated,
            "believe the figure, and leave more room than `python tools/memory.py` says",
        )
    ]


def check_speed(case):
    """No faults: what to change so that nobody waits."""
    steps = [line for _, line in sorted(case.found.steps.items())]
    sent = [line for line in steps if line["send_s"] > 0]
    rows = []
    if sent:
        parameters = sum(p.numel() for p in case.found.weights.load(0).parameters())
        size = parameters * getattr(torch, case.config.dtype).itemsize
        wire = np.median([line["send_s"] for line in sent])
        pause = np.median([line["pause_s"] for line in sent])
        rows.append(
            Finding("an update", f"{size / wire / 1e9:.2f} GB/s, pause {1000 * pause:.0f} ms")
        )
    tokens = np.median([line["train_tok_s"] for line in steps])
    sampled = np.median([line["gen_tok_s"] for line in steps])
    said = advice_on(case.config, steps)
    rows.append(
        Finding("tokens/s", f"{sampled:.0f} sampled, {tokens:.0f} trained; {said or 'no advice'}")
    )
    return rows


CHECKS = (
    check_engine_logprobs,
    check_sampling,
    check_independence,
    check_prompts,
    check_turns,
    check_ends,
    check_packing,
    check_first_step,
    check_reference,
    check_rewards,
    check_data,
    check_continuation,
    check_engines_killed,
    check_memory,
    check_memory_estimate,
    check_speed,
    check_evaluation,
)

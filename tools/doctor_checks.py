"""The doctor's checks: each compares what two short runs have left with what it should be
(tools/doctor_reference.py).

A function `check_...` takes the reference.Recording of the runs and yields rows of the table,
(name, ok, figure); its docstring, shown where one fails, says what faults it finds. A fork's own
loss, advantage or optimizer is no fault: its row has None for ok, like one without data.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import Counter

import numpy as np
from torch.nn.utils import get_total_norm

import config as cfg
from plumbing import checkpoints
from plumbing.problems import in_both, share_prompts
from plumbing.queues import read_record
from plumbing.samples import split
from plumbing.sandbox import Sandbox
from tools import doctor_reference as reference
from tools.common import ends_of_draws

# answers that are scored again; tokens of sequences that are computed again, of each kind
SCORED, RECOMPUTED = 200, 20_000
# limits: nats a token between two ways to compute a logprob, on average; relative difference of two
# norms of a gradient; of two scores of the same weights and seeds, by what rounding makes of 16
# answers
NATS = {"float32": 1e-4, "bfloat16": 0.1}
RELATIVE = {"float32": 3e-4, "bfloat16": 0.05}
SCORES = {"float32": 1e-6, "bfloat16": 0.3}
# times these limits: what one sequence may differ by on average, and a gradient as a vector;
# standard deviations
WIDER, UNLIKELY = 10, 5.0
# fields that must be the same before and after packing
KEPT = ("tokens", "mask", "behavior_logprobs", "versions", "temperature", "reward")


def none_differ(name, differ, seen):
    """The row of a check that none of what was seen may fail."""
    return name, differ == 0 if seen else None, f"{differ} of {seen} differ"


# ---- what engines report


def origin_of(sample):
    """By which versions it was sampled, in words; None: which of them computed its KV cache is not
    known.
    """
    versions = np.unique(sample["versions"][sample["mask"]])
    turns = (np.diff(sample["mask"].astype(int)) == 1).sum()
    # another version has computed a part of it, or it was sent once more for each turn
    if sample["num_versions"] != len(versions) or not len(versions):
        return None
    if len(versions) > 1:
        return "across updates" if turns == 1 else None
    return "after updates" if versions[0] else "version 0"


def logprob_rows(run, who, origins, samples):
    """The rows of what engines report of samples, by origin; of these some must be there."""
    limit = NATS[run.config.dtype]
    every = 1 + sum(len(sample["tokens"]) for sample in samples) // RECOMPUTED
    some = np.random.default_rng(0).permutation(len(samples))[::every]
    by_origin = {origin: [] for origin in origins}
    tokens = surprise = variance = 0
    parts = [part for i in some for part in reference.segments(samples[i])]
    for sample in sorted(parts, key=lambda x: x["versions"].max()):
        origin = origin_of(sample)
        if origin:
            logprobs, entropy, of_surprise = reference.expected(run, sample)
            distances = np.abs(logprobs - sample["behavior_logprobs"][sample["mask"]])
            by_origin.setdefault(origin, []).append(distances)
            # -log p of what is drawn is the distribution's entropy on average
            tokens += len(logprobs)
            surprise += (-logprobs - entropy).sum()
            variance += of_surprise.sum()
    for origin, sequences in by_origin.items():
        name = f"{who} = plain logprobs, {origin}"
        if not sequences:
            yield name, False, "no such sequence was seen: more --batch_size?"
            continue
        nats = np.concatenate(sequences).mean()
        worst = max(distances.mean() for distances in sequences)
        figure = f"{nats:.1e} nats (limit {limit:.0e}), worst of {len(sequences)} {worst:.1e}"
        yield name, nats <= limit and worst <= WIDER * limit, figure
        if origin == "version 0":
            # updates must add nothing to what rounding makes of a logprob
            limit = min(limit, 3 * max(nats, NATS["float32"]))
    z = surprise / max(variance, 1e-9) ** 0.5
    figure = f"{z:+.1f} standard deviations (limit {UNLIKELY:g}), {tokens} tokens"
    yield f"{who}: sampled = plain distribution", abs(z) < UNLIKELY if tokens else None, figure


def check_engines(run):
    """Engines sample from other weights, temperatures or filters than they say, or report other
    versions or logprobs: a skipped update, in one worker too; a tied head that is not updated; a
    stale prefix. Tokens are drawn from another distribution than is reported: more (-) or less (+)
    likely ones. actor.py asks for another one than --temperature.
    """
    samples = [sample for _, sample in run.samples()]
    yield from logprob_rows(run, "engine", ("version 0", "after updates"), samples)
    temperatures = sorted({float(sample["temperature"]) for sample in samples})
    # several are somebody's purpose
    good = None if temperatures[1:] else np.isclose(*temperatures, run.config.temperature)
    yield f"sampled at --temperature {run.config.temperature:g}", good, f"{temperatures}"


# ---- what was sampled


def check_texts(run):
    """What was sent is not the problem that is scored, in the template's form, or not what the
    environment replied: a separator is lost. Stop tokens are not trained, or there are too many;
    answers end for another reason than they say. A turn of an attempt is there twice: a client's
    retry, or what its branches have in common.
    """
    prompts = replies = wrong_replies = ends = asked = twice = followed = lost = 0
    samples = run.samples()
    stop = run.stop_tokens()
    separator = run.separator()
    for draw, sample in samples:
        group = run.groups[draw]
        turns, (prompt, *between) = run.parts(sample)
        task = sys.modules[f"tasks.{group['task']}"]
        # of a client's episode only tokens are known
        has_client = False
        if hasattr(task, "episode"):
            replayed = reference.Replayed(run, sample)
            has_client = asyncio.run(replayed.play(task, group["problem"])) is None
            wrong_replies += replayed.wrong
            replies += 0 if has_client else len(turns)
        else:
            ends += not stop.isdisjoint(sum(turns, [])[:-1])
        contexts = []
        for part in reference.segments(sample):
            tokens = part["tokens"].tolist()
            change = np.diff(part["mask"].astype(int))
            contexts += [tuple(tokens[: k + 1]) for k in np.flatnonzero(change == 1)]
            if separator and (run.config.chat or has_client):
                after = [tokens[k + 1] for k in np.flatnonzero(change == -1) if tokens[k] in stop]
                followed += len(after)
                lost += len(after) - after.count(separator)
        asked += len(contexts)
        twice += len(contexts) - len(set(contexts))
        if has_client:
            continue
        prompts += prompt != run.prompt(group["problem"])
        stops = int(sample["tokens"][-1]) in stop and sample["mask"][-1]
        full = sample["mask"].sum() >= run.config.max_new_tokens
        full |= len(sample["tokens"]) >= run.config.max_model_len - 1
        # between two turns an answer may be cut off by what would come next
        ends += not (stops if sample["finished"] else full or between)
    yield none_differ("prompts are those of their problems", prompts, len(samples))
    yield none_differ("replies are the environment's", wrong_replies, replies)
    yield none_differ("answers end as they say, and the end is trained", ends, len(samples))
    yield none_differ("turns are sampled once in an attempt", twice, asked)
    yield none_differ("turns end as the template ends them", lost, followed)


def check_draws(run):
    """The gate (actor.allowed_groups) lets groups start earlier than --max_lag says, or engines are
    behind the version that they are told to have. --no_signal drops other groups than those without
    an advantage. actor.Sampler draws few of the problems, or those of the beginning once more after
    a stop, or held-out ones are also trained on: scores will be of what was learnt by heart.
    """
    c = run.config
    became = {draw: {what for _, what in found} for draw, found in ends_of_draws(run.steps).items()}
    untrained = sum("trained" not in of_draw for of_draw in became.values())
    known = c.advantage in reference.ADVANTAGES
    early = silent = judged = 0
    for draw, group in run.groups.items():
        first = min(v for sample in group["samples"] for v in sample["versions"][sample["mask"]])
        g = c.conventional_g
        steps = first // g * g + g if g else first + c.max_lag + 1
        early += draw >= steps * c.groups_per_step + untrained
        if known and became.get(draw, set()) & {"trained", "no_signal"}:
            none = all(abs(sample["advantage"]) <= 1e-6 for sample in group["samples"])
            silent += (none and c.no_signal == "drop") != ("no_signal" in became[draw])
            judged += 1
    yield none_differ("groups start when --max_lag lets them", early, len(run.groups))
    yield none_differ(f"--no_signal {c.no_signal}", silent, judged)
    failed = sum(sum(line["drops"].get("failed", {}).values()) for line in run.steps.values())
    yield "no attempt failed", failed == 0, f"{failed} failed"
    for task, problems in run.train_problems.items():
        drawn = [group["number"] for group in run.groups.values() if group["task"] == task]
        different = len(set(drawn))
        most = min(len(drawn), len(problems))
        # a curriculum may draw some again
        good = different > 0.8 * most and (different == most or None) if drawn else None
        yield f"different problems of {task}", good, f"{different} of {most} that could be"
        test = run.test_problems[task]
        both = in_both(problems, test)
        # a game of few numbers has the same ones in both
        good = None if share_prompts(problems) else not both
        yield f"held-out problems of {task} are not trained on", good, f"{both} of {len(test)} are"


# ---- what was trained


def check_packing(run):
    """What is trained is not what was sampled: a shifted mask, lost samples, another order of
    something. Or preprocess.advantages does not do what its docstring says: a wrong sign, another
    sample's.
    """
    c = run.config
    seen = changed = other = 0
    known = c.advantage in reference.ADVANTAGES
    sampled = {sample["sample_id"]: sample for _, sample in run.samples()}
    for step, line in run.steps.items():
        times = Counter()
        for sample in run.trained(step):
            times[sample["sample_id"]] += 1
            drawn = sampled[sample["sample_id"]]
            if c.overlong_mask and not drawn["finished"]:
                drawn = drawn | {"mask": np.zeros_like(drawn["mask"])}
            changed += not all(np.array_equal(sample[name], drawn[name]) for name in KEPT)
            other += known and abs(sample["advantage"] - drawn["advantage"]) > 1e-4
        groups = [run.groups[int(draw)]["samples"] for draw in line["problems"]]
        # an attempt is one sample, however many turns it has
        changed += sum(len(group) > c.attempts for group in groups)
        # each as often as all others, and no others
        changed += len({x["sample_id"] for group in groups for x in group} ^ times.keys())
        changed += len(set(times.values())) > 1 or len(groups) != c.groups_per_step
        seen += times.total()
        rewards = [sample["reward"] for group in groups for sample in group]
        changed += not np.isclose(line["reward"], np.mean(rewards), rtol=1e-4, atol=1e-6)
    yield none_differ("trained = sampled", changed, seen)
    yield none_differ(f"advantages are those of --advantage {c.advantage}", other, seen * known)


def check_trainer(run):
    """Weights are not what AdamW makes of them, with --betas and the schedule's learning rate: its
    moments are lost when a run is continued, or steps are left out. Or its gradient is not that of
    the samples: importance weights, clipping, masks, a shift by one, temperature, signs, the
    normaliser, packing, ranks' sums, the reference of --kl_coef.
    """
    for version in (0, run.continued, run.continued + 1):
        name = f"version {version + 1} = AdamW of version {version}"
        if run.config.adam_8bit:
            yield name, None, "--adam_8bit: not known to the doctor"
            continue
        before, after = (reference.trainer_state(run, v) for v in (version, version + 1))
        steps = list(reference.adam_steps(run, version, before, after))
        differ = sum(int((~same).sum()) for _, _, same, _ in steps)
        counted = {count for *_, count in steps}
        figure = f"{differ} elements of {len(steps)} tensors differ, Adam counts {counted}"
        # a fork's optimizer may take several steps
        known = max(counted, default=2) < 2
        yield name, differ == 0 and counted == {1} if known else None, figure
        # tokens of older versions are trained from the second step on, in each of the two runs
        if known and version != run.continued:
            given = {name: gradient for name, gradient, *_ in steps}
            yield from gradient_rows(run, version + 1, given, after, before["model"])


def gradient_rows(run, step, given, after, before):
    """The rows of a step's gradient. given: what Adam got, clipped; after: the trainer's state;
    before: the model's.
    """
    c = run.config
    name = f"gradient of step {step}"
    if c.loss not in reference.LOSSES or c.normalizer not in reference.NORMALIZERS:
        yield name, None, f"--loss {c.loss} --normalizer {c.normalizer}: not known to the doctor"
        return
    trained = after["optimizer"]["state"]
    gradients, older, ess = reference.gradient(run, step, trained, before)
    norm = float(get_total_norm(gradients.values()))
    full = run.steps[step]["grad_norm"]
    limit = RELATIVE[c.dtype]
    # a gradient of 0 shows nothing, and tokens of the newest version alone nothing of weights
    on_policy = step == 1 or (c.conventional_g or c.max_lag + 1) == 1
    shows = (norm > 0 and (older > 0 or on_policy)) or None
    logged = run.steps[step]["ess"]
    same = abs(full - norm) <= limit * norm and abs(logged - ess) <= limit
    figure = (
        f"{full:.5g}, plain {norm:.5g}, ESS {logged:.5f}, {ess:.5f}, {older:.0%} of tokens older"
    )
    yield f"{name}: norm, ESS (limit {limit:.2%})", same and shows, figure
    scale = min(1.0, c.max_grad_norm / max(norm, 1e-9))
    differences = [g - scale * gradients[key] for key, g in given.items()]
    off = float(get_total_norm(differences)) / max(scale * norm, 1e-9)
    name += ", clipped," if scale < 1 else ""
    yield f"{name} as AdamW has it", off <= WIDER * limit and shows, f"{off:.1e} of it differs"


# ---- rewards


def check_rewards(run):
    """Rewards or outcomes are of other answers, or change from one call to the next, or are not
    those of the reward table; the penalty of long answers is another.
    """
    c = run.config
    chosen = run.samples()[:SCORED]
    differ = judged = 0
    with contextlib.closing(Sandbox(run.config)) as sandbox:
        asyncio.run(sandbox.start())
        for draw, sample in chosen:
            group = run.groups[draw]
            task = sandbox.tasks[group["task"]]
            finished = bool(sample["finished"])
            replayed = reference.Replayed(run, sample)
            if hasattr(task, "episode"):
                reply = asyncio.run(replayed.play(task, group["problem"]))
            else:
                args = (group["problem"], replayed.texts[0], finished)
                reply = asyncio.run(sandbox.call(group["task"], "reward", *args))
            # of a client's episode nothing is known
            if reply is None:
                continue
            judged += 1
            reward, outcome = reference.verdict(c, task, reply, finished)
            # less the soft penalty of DAPO (arXiv 2503.14476) eq. 13
            over = sample["mask"].sum() - (c.max_new_tokens - c.overlong_buffer)
            reward -= min(max(over, 0) / max(c.overlong_buffer, 1), 1)
            same = cfg.OUTCOMES[sample["outcome"]] == outcome
            differ += abs(reward - sample["reward"]) > 1e-5 or not same
    yield none_differ("rewards, scored again", differ, judged)


# ---- stopping and going on


def check_continuation(run):
    """A run does not go on where it was interrupted: steps are missing, problems in flight are
    lost, trained twice or others when they are drawn again. See Sampler.state, and what checkpoints
    keep of it.
    """
    ends = ends_of_draws(run.steps)
    now = checkpoints.last_state(run.run_dir)["sampler"]
    stopped = checkpoints.state_of(run.folder(run.continued))["sampler"]
    wrong = 0
    for draw in range(now["drawn"]):
        what = [kind for _, kind in ends.get(draw, [])]
        wrong += what.count("trained") > 1 or not (what or str(draw) in now["pending"])
    yield none_differ("draws are trained once, dropped or in flight", wrong, now["drawn"])
    drawn = {draw: [group["task"], group["number"]] for draw, group in run.groups.items()}
    later = {draw for draw, found in ends.items() if found[0][0] > run.continued}
    left = {int(draw): problem for draw, problem in stopped["pending"].items()}
    left = {draw: left[draw] for draw in left if draw in later or draw not in ends}
    again = [draw for draw in left if draw in later and drawn.get(draw, left[draw]) == left[draw]]
    # all may be more than the second run trains
    good = len(again) >= min(len(left), len(later)) / 2 if left else None
    yield "what was in flight is drawn again", good, f"{len(again)} of {len(left)}"


def check_evaluation(run):
    """The newest checkpoint cannot be loaded by vLLM or transformers: try tools/evaluate.py. Or
    held-out problems are sampled at another temperature than --eval_temperature. Or a run's last
    scores are not those of its last weights.
    """
    c = run.config
    version = max(run.steps)
    folder = run.run_dir / "eval"
    command = [sys.executable, "tools/evaluate.py", str(run.folder(version)), "--run", folder.name]
    command += ["--out", str(run.run_dir), "--port", str(c.port)]
    done = subprocess.run(command, cwd=cfg.ROOT, capture_output=True, text=True)
    last_words = (done.stdout + done.stderr).strip().splitlines()[-1][:150]
    yield "the checkpoint is evaluated by an engine", done.returncode == 0, last_words
    if done.returncode:
        return
    samples = []
    for file in folder.glob("queues/rollouts/*.safetensors"):
        for sample in split(read_record(file)):
            # the weights that it was started with are its version 0
            own = dict(versions=np.where(sample["mask"], version, -1), num_versions=1)
            samples.append(sample | own | dict(temperature=c.eval_temperature))
    # of greedy answers engines report another distribution than that of one token
    if c.eval_temperature:
        yield from logprob_rows(run, "evaluation", ("after updates",), samples)
        different = len({sample["tokens"].tobytes() for sample in samples})
        good = different > len(samples) / c.eval_attempts if c.eval_attempts > 1 else None
        yield "attempts at a held-out problem differ", good, f"{different} of {len(samples)}"
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    again = {source: next(iter(scores.values()))[0] for source, scores in metrics.items()}
    last = {line["version"]: line["eval"] for line in run.evaluations}[version]
    sets = Counter(x.get("source", t) for t, some in run.test_problems.items() for x in some)
    wanted = sum(min(n, c.eval_problems) for n in sets.values())
    asked = {line["problems"] for line in run.evaluations}
    yield "held-out problems asked", asked == {wanted}, f"{asked}, --eval_problems: {wanted}"
    apart = [abs(last.get(source, np.inf) - score) for source, score in again.items()]
    yield "the run's last scores, again", max(apart) <= SCORES[c.dtype], f"{last}, {again}"

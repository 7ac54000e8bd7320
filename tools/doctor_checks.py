"""The doctor's checks: each compares what two short runs left with tools/doctor_reference.py.

A function `check_...` takes the reference.Recording of the runs and yields rows of the table, each
(name, ok, figure). Its docstring, which is printed if a row fails, describes the faults that the
check finds. A fork's own loss, advantage or optimizer is no fault: the ok of its row is None, as it
is for a row without data.
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

# highest number of answers that are scored again
MAX_SCORED = 200
# approximate number of tokens in all sequences that are computed again
TOKENS_RECOMPUTED = 20_000
# highest mean difference of logprobs that are computed in two ways, in nats a token
LOGPROB_LIMIT = {"float32": 1e-4, "bfloat16": 0.1}
# highest relative difference of a gradient's norm that is computed in two ways, and highest
# difference of the effective sample size
GRADIENT_LIMIT = {"float32": 3e-4, "bfloat16": 0.05}
# highest difference of two scores of the same weights and seeds: rounding changes a few of the 16
# answers
SCORE_LIMIT = {"float32": 1e-6, "bfloat16": 0.3}
# The logprobs of a single sequence, and a gradient as a vector, may differ by this many times the
# limits above.
WIDER_FACTOR = 10
# highest relative difference of a change of the weights from what an adapter says
ADAPTER_LIMIT = 0.05
# highest relative difference of expert_load: with rounding a few tokens choose other experts
EXPERT_LOAD_LIMIT = 0.02
# highest distance from an expected value, in standard deviations
MAX_DEVIATIONS = 5.0
# fields that must be the same before and after packing
KEPT = "tokens mask behavior_logprobs versions temperature reward part reward_to_go".split()


def none_differ(name, differ, seen):
    """Return the row of a check of `seen` things, none of which may differ from what it should be.

    differ: the number of things that do. Without things to look at, the row's ok is None.
    """
    return name, differ == 0 if seen else None, f"{differ} of {seen} differ"


# ---- what engines report


def origin_of(sample):
    """Return in words which versions sampled a sample.

    Returns None if it is not known which versions computed the sample's KV cache: a version that
    sampled nothing may have computed a part, or each turn may have begun with a cache of its own.
    """
    versions = np.unique(sample["versions"][sample["mask"]])
    turns = (np.diff(sample["mask"].astype(int)) == 1).sum()
    if sample["num_versions"] != len(versions) or not len(versions):
        return None
    if len(versions) > 1:
        return "across updates" if turns == 1 else None
    return "after updates" if versions[0] else "version 0"


def logprob_rows(run, source, origins, samples):
    """Yield the rows that compare the logprobs that engines reported with plain ones.

    There is a row for each origin of sequences, see `origin_of`, and one for the distribution.
    source: the word with which the rows begin. origins: the row of such an origin fails if there
    are no sequences to look at.
    """
    limit = LOGPROB_LIMIT[run.config.dtype]
    stride = 1 + sum(len(sample["tokens"]) for sample in samples) // TOKENS_RECOMPUTED
    indices = np.random.default_rng(0).permutation(len(samples))[::stride]
    segments = [segment for i in indices for segment in reference.segments(samples[i])]
    by_origin = {origin: [] for origin in origins}
    tokens = surprise = variance = 0
    # Recording.model keeps few models, so all segments of one version are computed in a row.
    for segment in sorted(segments, key=lambda segment: segment["versions"].max()):
        origin = origin_of(segment)
        if origin:
            logprobs, entropy, token_variance = reference.expected(run, segment)
            distances = np.abs(logprobs - segment["behavior_logprobs"][segment["mask"]])
            by_origin.setdefault(origin, []).append(distances)
            tokens += len(logprobs)
            # The mean of -log p over tokens that are drawn from a distribution is its entropy.
            surprise += (-logprobs - entropy).sum()
            variance += token_variance.sum()
    for origin, sequences in by_origin.items():
        name = f"{source} = recomputed logprobs, {origin}"
        if not sequences:
            yield name, False, "no such sequence was seen: raise --batch_size"
            continue
        nats = np.concatenate(sequences).mean()
        worst = max(distances.mean() for distances in sequences)
        figure = f"{nats:.1e} nats (limit {limit:.0e}), {worst:.1e} in the worst of "
        figure += f"{len(sequences)} sequences"
        yield name, nats <= limit and worst <= WIDER_FACTOR * limit, figure
        if origin == "version 0":
            # Rounding alone causes the difference of version 0: updates must add little to it.
            limit = min(limit, 3 * max(nats, LOGPROB_LIMIT["float32"]))
    z = surprise / max(variance, 1e-9) ** 0.5
    figure = f"{z:+.1f} standard deviations (limit {MAX_DEVIATIONS:g}), {tokens} tokens"
    yield (
        f"{source}: sampled = recomputed distribution",
        abs(z) < MAX_DEVIATIONS if tokens else None,
        figure,
    )


def check_engines(run):
    """The engines do not sample as they report. They use other weights, temperatures or filters, or
    report other versions or logprobs: an update was skipped, perhaps in one worker alone; a tied
    head is not updated; the prefix cache is stale. If the distribution differs, the tokens are not
    drawn from the reported one: they are more (-) or less (+) likely than they should be. If the
    temperature differs, actor.py asks for another one than --temperature.
    """
    samples = [sample for _, sample in run.samples()]
    yield from logprob_rows(run, "engine", ("version 0", "after updates"), samples)
    temperatures = sorted({float(sample["temperature"]) for sample in samples})
    # A fork may sample at several temperatures on purpose.
    ok = None
    if len(temperatures) == 1:
        ok = np.isclose(temperatures[0], run.config.temperature)
    yield f"sampled at --temperature {run.config.temperature:g}", ok, f"{temperatures}"


# ---- what was sampled


def check_texts(run):
    """The tokens of a sample are not those that they should be. A prompt is not that of the problem
    that is scored, in the form of the chat template; a reply is not the environment's; the
    template's separator between two turns is lost. Stop tokens are not trained, or there are too
    many of them; an answer ends for another reason than it says, or goes on after it has all of
    --max_new_tokens. A turn of an attempt is there twice: a client's request was sampled again, or
    branches both have a turn that they share.
    """
    samples = run.samples()
    stop_tokens = run.stop_tokens()
    separator = run.separator()
    replies = contexts_seen = turn_ends = 0
    wrong_prompts = wrong_replies = wrong_ends = repeated_turns = lost_separators = 0
    cut_turns = client_turns = 0
    for draw, sample in samples:
        group = run.groups[draw]
        turns, (prompt, *later_inputs) = run.parts(sample)
        task = sys.modules[f"tasks.{group['task']}"]
        # If the episode starts a client, only the tokens are known.
        has_client = False
        if hasattr(task, "episode"):
            replayed = reference.Replayed(run, sample)
            has_client = asyncio.run(replayed.play(task, group["problem"])) is None
            wrong_replies += replayed.wrong
            replies += 0 if has_client else len(turns)
        else:
            wrong_ends += not stop_tokens.isdisjoint(sum(turns, [])[:-1])
        # the tokens before each turn
        contexts = []
        for segment in reference.segments(sample):
            tokens = segment["tokens"].tolist()
            mask_changes = np.diff(segment["mask"].astype(int))
            contexts += [tuple(tokens[: k + 1]) for k in np.flatnonzero(mask_changes == 1)]
            if separator and (run.config.chat or has_client):
                ends = [k for k in np.flatnonzero(mask_changes == -1) if tokens[k] in stop_tokens]
                turn_ends += len(ends)
                lost_separators += sum(tokens[k + 1] != separator for k in ends)
        contexts_seen += len(contexts)
        # Turns that are sampled at the same time can exceed the limit together.
        is_branched = sample["segment"].any()
        wrong_ends += not is_branched and sample["mask"].sum() > run.config.max_new_tokens
        repeated_turns += len(contexts) - len(set(contexts))
        if has_client:
            client_turns += len(turns)
            cut_turns += sum(turn[-1] not in stop_tokens for turn in turns[:-1])
            continue
        wrong_prompts += prompt != run.prompt(group["problem"])
        has_stop = int(sample["tokens"][-1]) in stop_tokens and sample["mask"][-1]
        is_full = sample["mask"].sum() >= run.config.max_new_tokens
        is_full |= len(sample["tokens"]) >= run.config.max_model_len - 1
        # After several turns an answer may be cut off because the next input would be too long.
        wrong_ends += not (has_stop if sample["finished"] else is_full or later_inputs)
    yield none_differ("prompts are those of their problems", wrong_prompts, len(samples))
    yield none_differ("replies are the environment's", wrong_replies, replies)
    yield none_differ("answers end as they say, and the end is trained", wrong_ends, len(samples))
    yield none_differ("turns are sampled once in an attempt", repeated_turns, contexts_seen)
    yield none_differ("turns end as the template ends them", lost_separators, turn_ends)
    if cut_turns:
        # The doctor does not know what the clients asked for.
        figure = f"{cut_turns} of {client_turns} turns have no stop token: do clients limit them?"
        yield "turns of clients end by themselves", None, figure


def check_draws(run):
    """The gate (actor.allowed_groups) lets groups start earlier than --max_lag says, or engines are
    behind the version that they are told to have. Or --no_signal drops other groups than those
    without an advantage. Or actor.Sampler draws few of the problems, draws the first ones again
    after a stop, or draws held-out ones: then scores show what was learnt by heart.
    """
    c = run.config
    ends = {}
    for draw, ends_of_draw in ends_of_draws(run.steps).items():
        ends[draw] = {end for _, end in ends_of_draw}
    untrained = sum("trained" not in ends_of_draw for ends_of_draw in ends.values())
    is_known = c.advantage in reference.ADVANTAGES
    early = wrong_drops = judged = 0
    for draw, group in run.groups.items():
        sampled_versions = [sample["versions"][sample["mask"]] for sample in group["samples"]]
        first_version = min(version for versions in sampled_versions for version in versions)
        g = c.conventional_g
        steps = first_version // g * g + g if g else first_version + c.max_lag + 1
        early += draw >= steps * c.groups_per_step + untrained
        if is_known and ends.get(draw, set()) & {"trained", "no_signal"}:
            largest = max(abs(sample["advantage"]).max() for sample in group["samples"])
            has_no_signal = largest <= 1e-6
            must_be_dropped = has_no_signal and c.no_signal == "drop"
            wrong_drops += must_be_dropped != ("no_signal" in ends[draw])
            judged += 1
    yield none_differ("groups start when --max_lag lets them", early, len(run.groups))
    if c.late == "hold":
        wrong_steps = 0
        for step in run.steps:
            lags, _ = reference.lags_and_lengths(c, step, run.trained(step))
            # After a start, the first steps train samples of the version that it began with.
            first = run.continued if step > run.continued else 0
            wrong_steps += any(lag != min(step - 1 - first, c.max_lag) for lag in lags)
        name = "all tokens of a step have the lag of --late hold"
        yield none_differ(name, wrong_steps, len(run.steps))
    yield none_differ(f"--no_signal {c.no_signal}", wrong_drops, judged)
    failed = sum(sum(line["drops"].get("failed", {}).values()) for line in run.steps.values())
    yield "no attempt failed", failed == 0, f"{failed} failed"
    for task, problems in run.train_problems.items():
        drawn = [group["number"] for group in run.groups.values() if group["task"] == task]
        different = len(set(drawn))
        most = min(len(drawn), len(problems))
        # A curriculum may draw some problems again.
        ok = different > 0.8 * most and (different == most or None) if drawn else None
        yield f"different problems of {task}", ok, f"{different} of {most} possible ones"
        held_out = run.test_problems[task]
        shared = in_both(problems, held_out)
        # A game has few different problems, so both sets have the same ones.
        ok = None if share_prompts(problems) else not shared
        name = f"held-out problems of {task} are not trained on"
        yield name, ok, f"{shared} of {len(held_out)} are"


# ---- what was trained


def check_packing(run):
    """The trained samples are not the sampled ones: a mask is shifted, samples are lost, or one of
    their fields has another order. Or preprocess.advantages does not do what its docstring says: a
    sign is wrong, or an advantage is another sample's.
    """
    c = run.config
    seen = changed = wrong_advantages = 0
    is_known = c.advantage in reference.ADVANTAGES
    sampled = {sample["sample_id"]: sample for _, sample in run.samples()}
    for step, line in run.steps.items():
        counts = Counter()
        for sample in run.trained(step):
            counts[sample["sample_id"]] += 1
            original = sampled[sample["sample_id"]]
            if c.overlong_mask and not original["finished"]:
                original = original | {"mask": np.zeros_like(original["mask"])}
            changed += not all(np.array_equal(sample[name], original[name]) for name in KEPT)
            distance = abs(sample["advantage"] - original["advantage"]).max()
            wrong_advantages += is_known and distance > 1e-4
        groups = [run.groups[int(draw)]["samples"] for draw in line["problems"]]
        # An attempt is one sample, however many turns it has.
        changed += sum(len(group) > c.attempts for group in groups)
        # The samples of these groups are trained equally often, and no others are.
        sample_ids = {sample["sample_id"] for group in groups for sample in group}
        changed += len(sample_ids ^ counts.keys())
        changed += len(set(counts.values())) > 1 or len(groups) != c.groups_per_step
        seen += counts.total()
        rewards = [sample["reward"] for group in groups for sample in group]
        changed += not np.isclose(line["reward"], np.mean(rewards), rtol=1e-4, atol=1e-6)
    yield none_differ("trained = sampled", changed, seen)
    name = f"advantages are those of --advantage {c.advantage}"
    yield none_differ(name, wrong_advantages, seen * is_known)


def check_trainer(run):
    """The weights are not what AdamW makes of them with --betas and the learning rate of the
    schedule: its moments are lost when a run is continued, or steps are left out. Or the gradient
    is not that of the samples. Its parts are importance weights, clipping, masks, the shift by one
    token, the temperature, signs, the normaliser, packing, the sum over ranks, and the reference of
    --kl_coef.
    """
    for version in (0, run.continued, run.continued + 1):
        name = f"version {version + 1} = AdamW of version {version}"
        if run.config.adam_8bit:
            yield name, None, "--adam_8bit: not known to the doctor"
            continue
        before = reference.trainer_state(run, version)
        after = reference.trainer_state(run, version + 1)
        parameters = list(reference.adam_steps(run, version, before, after))
        differ = sum(int((~is_same).sum()) for _, _, is_same, _ in parameters)
        counts = {count for *_, count in parameters}
        figure = f"{differ} elements of {len(parameters)} tensors differ, Adam counts {counts}"
        # The optimizer of a fork may take several steps.
        is_known = max(counts, default=2) < 2
        yield name, differ == 0 and counts == {1} if is_known else None, figure
        # The first step of the second run trains no tokens of older versions, its second step does.
        if is_known and version != run.continued:
            adam_gradients = {parameter: gradient for parameter, gradient, *_ in parameters}
            trained = after["optimizer"]["state"]
            yield from gradient_rows(run, version + 1, adam_gradients, trained, before["model"])


def gradient_rows(run, step, adam_gradients, trained, model_state):
    """Yield the rows that compare the gradient of a step with a plain one.

    adam_gradients: {parameter: the clipped gradient that Adam got}. trained: the names of the
    parameters that were trained. model_state: {name: tensor} of the model before the step.
    """
    c = run.config
    name = f"gradient of step {step}"
    if c.loss not in reference.LOSSES or c.normalizer not in reference.NORMALIZERS:
        yield name, None, f"--loss {c.loss} --normalizer {c.normalizer}: not known to the doctor"
        return
    gradients, older, *own_ess = reference.gradient(run, step, trained, model_state)
    norm = float(get_total_norm(gradients.values()))
    logged_norm = run.steps[step]["grad_norm"]
    logged_ess = [run.steps[step][name] for name in ("ess", "ess_sample")]
    limit = GRADIENT_LIMIT[c.dtype]
    # A gradient of 0 shows no faults. Where tokens of older versions are possible but the step has
    # none, all importance weights are 1, which shows no faults of the weights.
    on_policy = step == 1 or (c.conventional_g or c.max_lag + 1) == 1
    shows_faults = norm > 0 and (older > 0 or on_policy)
    is_same = abs(logged_norm - norm) <= limit * norm
    is_same &= abs(logged_ess[0] - own_ess[0]) <= limit
    # The weight of a sample is a product, so that its error is that of all of its tokens.
    is_same &= abs(logged_ess[1] - own_ess[1]) <= WIDER_FACTOR * limit
    figure = (
        f"{logged_norm:.5g}, recomputed {norm:.5g}, ESS {logged_ess[0]:.5f}, {own_ess[0]:.5f}, of "
        f"samples {logged_ess[1]:.4f}, {own_ess[1]:.4f}, "
        f"{older:.0%} of tokens older"
    )
    yield f"{name}: norm, ESS (limit {limit:.2%})", is_same and (shows_faults or None), figure
    scale = min(1.0, c.max_grad_norm / max(norm, 1e-9))
    differences = [g - scale * gradients[key] for key, g in adam_gradients.items()]
    distance = float(get_total_norm(differences)) / max(scale * norm, 1e-9)
    is_same = distance <= WIDER_FACTOR * limit
    name += ", clipped," if scale < 1 else ""
    figure = f"relative distance {distance:.1e} (limit {WIDER_FACTOR * limit:.1e})"
    yield f"{name} as AdamW has it", is_same and (shows_faults or None), figure


def check_parameters(run):
    """A layer has no adapter, or the saved adapter is not the change that was trained. Without
    adapters, parameters that are not trained are only shown, as a fork may choose what it trains;
    a parameter that is in no group of the optimizer makes the rows of the gradient FAIL.
    """
    c = run.config
    version = run.continued + 1
    name = "all layers have adapters" if c.lora_rank else "all parameters are trained"
    if c.adam_8bit:
        yield name, None, "--adam_8bit: not known to the doctor"
    else:
        trained = reference.trainer_state(run, version)["optimizer"]["state"].keys()
        wanted = reference.parameters_to_train(run)
        missing = sorted(wanted - trained)
        figure = f"{len(missing)} of {len(wanted)} are not trained"
        if missing:
            figure += f": {', '.join(missing[:2])}"
        # An optimizer of a fork may keep no state of its parameters.
        is_known = trained and wanted and (c.lora_rank or not missing)
        yield name, not missing if is_known else None, figure
    if c.lora_rank:
        share = reference.share_of_adapter(run, version)
        ok = None if np.isnan(share) else abs(share - 1) < ADAPTER_LIMIT
        figure = f"the weights change by {share:.3f} of the adapter (limit {ADAPTER_LIMIT:.0%})"
        yield "base model + saved adapter = checkpoint", ok, figure


def check_metrics(run):
    """A number in metrics.jsonl is not that of the samples that the step trained: a lag, a length,
    a share of samples, or a count of tokens; or tokens are in a wrong bucket of by_lag or lengths.
    """
    seen = 0
    differ = []
    for step, line in run.steps.items():
        expected, lags, lengths = reference.metrics_of(run, step)
        # A fork may have removed a metric.
        logged = {name: line[name] for name in expected if name in line}
        tables = dict(lengths=line.get("lengths"))
        if "by_lag" in line:
            tables["by_lag"] = {lag: values["tokens"] for lag, values in line["by_lag"].items()}
        for metric, values in (("by_lag", lags), ("lengths", lengths)):
            counts = tables.get(metric)
            if counts is None:
                continue
            for bucket, count in counts.items():
                logged[f"{metric} {bucket}"] = count
                expected[f"{metric} {bucket}"] = reference.count_within(bucket, values)
            # No bucket may be missing.
            logged[f"{metric}, all buckets"] = sum(counts.values())
            expected[f"{metric}, all buckets"] = len(values)
        for name, value in logged.items():
            seen += 1
            if not np.isclose(value, expected[name], rtol=1e-4, atol=1e-6):
                differ.append(f"step {step}: {name} {value:.5g}, recomputed {expected[name]:.5g}")
    name, ok, figure = none_differ("metrics are those of the samples", len(differ), seen)
    yield name, ok, "; ".join([figure, *differ[:2]])
    if "expert_load" in run.steps[1]:
        load = run.steps[1]["expert_load"]
        plain = reference.expert_loads(run, 1)
        ok = any(abs(load - x) < EXPERT_LOAD_LIMIT * x for x in plain) if plain else None
        figure = f"{load:.4f}, recomputed {' or '.join(f'{x:.4f}' for x in plain)}"
        yield f"expert_load of step 1 (limit {EXPERT_LOAD_LIMIT:.0%})", ok, figure


# ---- rewards


def check_rewards(run):
    """The rewards or outcomes belong to other answers, change from one call to the next, or are not
    the numbers of --reward_finished and --reward_cut_off. Or the penalty of long answers differs.
    Or a reward does not reach all of the tokens that have earned it (samples.credit).
    """
    c = run.config
    differ = judged = wrong_credit = 0
    for _, sample in run.samples():
        if sample["part"].max() == 0:
            sampled = sample["mask"]
            is_whole = (sample["part"][sampled] == 0).all()
            has_reward = np.allclose(sample["reward_to_go"][sampled], sample["reward"])
            wrong_credit += not (is_whole and has_reward)
    with contextlib.closing(Sandbox(run.config)) as sandbox:
        asyncio.run(sandbox.start())
        for draw, sample in run.samples()[:MAX_SCORED]:
            group = run.groups[draw]
            task = sandbox.tasks[group["task"]]
            finished = bool(sample["finished"])
            replayed = reference.Replayed(run, sample)
            if hasattr(task, "episode"):
                reply = asyncio.run(replayed.play(task, group["problem"]))
            else:
                arguments = (group["problem"], replayed.texts[0], finished)
                reply = asyncio.run(sandbox.call(group["task"], "reward", *arguments))
            # The reward of an episode that starts a client cannot be computed again.
            if reply is None:
                continue
            judged += 1
            rewards, outcome = reference.verdict(c, task, reply, finished)
            # Subtract the soft penalty of DAPO (arXiv 2503.14476) eq. 13.
            excess = sample["mask"].sum() - (c.max_new_tokens - c.overlong_buffer)
            rewards[-1] -= min(max(excess, 0) / max(c.overlong_buffer, 1), 1)
            is_same = cfg.OUTCOMES[sample["outcome"]] == outcome
            differ += abs(sum(rewards) - sample["reward"]) > 1e-5 or not is_same
            if len(rewards) > 1:
                turns, _ = run.parts(sample)
                expected = reference.rewards_to_go(rewards, turns)
                wrong_credit += not np.allclose(sample["reward_to_go"][sample["mask"]], expected)
    yield none_differ("rewards, scored again", differ, judged)
    yield none_differ("rewards reach the tokens that earned them", wrong_credit, len(run.samples()))


# ---- stopping and going on


def check_continuation(run):
    """A run does not go on where it was interrupted: steps are missing; problems that were in
    flight are lost, are trained twice, or are other ones when they are drawn again. See
    Sampler.state and what checkpoints keep of this state.
    """
    ends = ends_of_draws(run.steps)
    last_state = checkpoints.last_state(run.run_dir)["sampler"]
    stopped_state = checkpoints.state_of(run.folder(run.continued))["sampler"]
    wrong = 0
    for draw in range(last_state["drawn"]):
        ends_of_draw = [end for _, end in ends.get(draw, [])]
        is_lost = not ends_of_draw and str(draw) not in last_state["pending"]
        wrong += ends_of_draw.count("trained") > 1 or is_lost
    yield none_differ("draws are trained once, dropped or in flight", wrong, last_state["drawn"])
    drawn = {draw: [group["task"], group["number"]] for draw, group in run.groups.items()}
    # the draws that first ended in the second run
    later = {draw for draw, steps_and_ends in ends.items() if steps_and_ends[0][0] > run.continued}
    in_flight = {int(draw): problem for draw, problem in stopped_state["pending"].items()}
    # the problems that were in flight at the stop and had not ended by then
    left = {draw: in_flight[draw] for draw in in_flight if draw in later or draw not in ends}
    again = [draw for draw in left if draw in later and drawn.get(draw, left[draw]) == left[draw]]
    # The second run may be too short to train all of them.
    ok = len(again) >= min(len(left), len(later)) / 2 if left else None
    yield "what was in flight is drawn again", ok, f"{len(again)} of {len(left)}"


def check_evaluation(run):
    """The newest checkpoint cannot be loaded by vLLM or transformers: try tools/evaluate.py. Or
    held-out problems are sampled at another temperature than --eval_temperature. Or the last scores
    of a run are not those of its last weights.
    """
    c = run.config
    version = max(run.steps)
    folder = run.run_dir / "eval"
    command = [sys.executable, "tools/evaluate.py", str(run.folder(version)), "--run", folder.name]
    command += ["--out", str(run.run_dir), "--port", str(c.port)]
    done = subprocess.run(command, cwd=cfg.ROOT, capture_output=True, text=True)
    last_line = (done.stdout + done.stderr).strip().splitlines()[-1][:150]
    yield "the checkpoint is evaluated by an engine", done.returncode == 0, last_line
    if done.returncode:
        return
    samples = []
    for file in folder.glob("queues/rollouts/*.safetensors"):
        for sample in split(read_record(file)):
            # The engine calls the checkpoint's weights version 0, because it started with them.
            changes = dict(
                versions=np.where(sample["mask"], version, -1),
                num_versions=1,
                temperature=c.eval_temperature,
            )
            samples.append(sample | changes)
    # For greedy answers engines do not report the distribution that the token came from.
    if c.eval_temperature:
        yield from logprob_rows(run, "evaluation", ("after updates",), samples)
        different = len({sample["tokens"].tobytes() for sample in samples})
        ok = different > len(samples) / c.eval_attempts if c.eval_attempts > 1 else None
        yield "attempts at a held-out problem differ", ok, f"{different} of {len(samples)}"
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    new_scores = {source: next(iter(values.values()))[0] for source, values in metrics.items()}
    scores = {line["version"]: line["eval"] for line in run.evaluations}[version]
    set_sizes = Counter()
    for task, problems in run.test_problems.items():
        set_sizes.update(problem.get("source", task) for problem in problems)
    wanted = sum(min(size, c.eval_problems) for size in set_sizes.values())
    asked = {line["problems"] for line in run.evaluations}
    yield "held-out problems asked", asked == {wanted}, f"{asked}, --eval_problems: {wanted}"
    distances = [abs(scores.get(source, np.inf) - score) for source, score in new_scores.items()]
    ok = max(distances) <= SCORE_LIMIT[c.dtype]
    yield "the run's last scores, again", ok, f"{scores}, {new_scores}"

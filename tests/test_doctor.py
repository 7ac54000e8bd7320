"""The doctor's checks: they pass on a right run, find each fault, and skip what a fork changed.

Most tests use a FAKE run: its steps come from the real trainer functions, and transformers
samples in place of an engine. The slow test runs the real doctor with real engines.
"""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import config as cfg
import preprocess
import train
from actor import overlong_penalty
from bench import families, faults
from fake_engine import fake_vllm
from plumbing import lora
from plumbing.metrics import Sums
from plumbing.problems import Prompter, load_problems
from plumbing.queues import Queue
from plumbing.samples import Transcript, credit, join, split
from tasks import toy
from tools import doctor, doctor_checks
from tools import doctor_reference as reference

# A step has 4 groups; rewards differ with the lengths of the answers
KNOBS = """
    toy --dtype float32 --temperature 0.7 --eval_temperature 0.7 --batch_size 8 --attempts 2
    --max_lag 1 --max_new_tokens 20 --overlong_buffer 20 --steps 4 --warmup_steps 2 --lr 1e-3
    --max_grad_norm 0.1 --kl_coef 0.1
"""


class Run(reference.Recording):
    """A FAKE run of two starts: the project's own functions, but transformers does the sampling.

    Steps 1 and 2 train on samples of version 0; steps 3 and 4, after the stop, on samples of
    version 2 and one group of version 3. knobs: of the whole run; trainer_knobs: changes in the
    trainer alone, of which the doctor does not know.
    """

    def __init__(self, model, knobs, trainer_knobs):
        self.config = c = dataclasses.replace(cfg.parse(KNOBS.split()), model=str(model), **knobs)
        cfg.check(c)
        self.device = torch.device("cpu")
        self.run_dir, self.continued = None, 2
        self.prompter = Prompter(c)
        self.train_problems = load_problems(c, "train")
        self.test_problems = load_problems(c, "test")
        trainer_config = dataclasses.replace(c, **trainer_knobs)
        torch.manual_seed(0)
        # The samples do not depend on the random numbers of build()
        with torch.random.fork_rng():
            self.policy, self.optimizers = train.build(trainer_config, self.device, 1)
        self.groups, self.steps, self.batches, self.models, self.states = {}, {}, {}, {}, {}
        self.keep(0)
        for step in range(1, 5):
            draws = range(4 * step - 4, 4 * step)
            for draw in draws:
                version = 3 if draw == 15 else 2 if step > 2 else 0
                self.groups[draw] = self.group(draw, version)
            groups = [self.groups[draw]["samples"] for draw in draws]
            self.batches[step] = join(sum(groups, []))
            trainer_config.steps = reference.PLANNED if step <= 2 else c.steps
            line = self.train(step, trainer_config)
            self.steps[step] = line | {"problems": {str(draw): 2 for draw in draws}, "drops": {}}
            self.keep(step)

    def group(self, draw, version, temperature=0.7):
        problem = self.train_problems["toy"][draw]
        prompt = self.prompt(problem)
        ids = torch.tensor([prompt, prompt])
        rows = self.model(version).generate(
            ids, do_sample=True, top_k=0, temperature=temperature, max_new_tokens=20
        )
        rows = rows[:, len(prompt) :].tolist()
        samples = [self.sample(version, problem, prompt, row) for row in rows]
        preprocess.add_advantages(samples, self.config.advantage)
        for k, sample in enumerate(samples):
            sample |= dict(sample_id=2 * draw + k, problem=draw)
        return dict(samples=samples, task="toy", number=draw, problem=problem)

    def sample(self, version, problem, prompt, tokens):
        end = self.prompter.tokenizer.eos_token_id
        finished = end in tokens
        # Tokens after the end fill up the row
        tokens = tokens[: tokens.index(end) + 1] if finished else tokens
        transcript = Transcript(prompt)
        transcript.append(tokens, [0.0] * len(tokens), [version] * len(tokens))
        right = toy.reward(problem, self.prompter.decode(tokens), finished)
        reward = np.float32(right + overlong_penalty(len(tokens), self.config))
        sample = transcript.fields()
        sample |= credit(sample["turn_ids"], reward)
        sample |= dict(task=0, temperature=np.float32(0.7), reward=reward, finished=finished)
        sample |= dict(num_versions=1, outcome=int(right < 1))
        sample["behavior_logprobs"][sample["mask"]] = reference.expected(self, sample)[0]
        return sample

    def train(self, step, config):
        sums = Sums()
        batch = self.batches[step]
        loss, metrics, _ = train.micro_batch(self.policy, batch, step - 1, config, self.device)
        loss.backward()
        sums.add(metrics)
        return train.optimizer_step(self.policy, self.optimizers, sums, step - 1, config)

    def keep(self, version):
        """Keep the state of this version, as a checkpoint does."""
        names = {id(p): name for name, p in self.policy.model.named_parameters()}
        state, groups = {}, []
        for optimizer in self.optimizers:
            state |= {names[id(p)]: values for p, values in optimizer.state.items()}
            for group in optimizer.param_groups:
                groups.append(group | {"params": [names[id(p)] for p in group["params"]]})
        model = self.policy.model.state_dict()
        kept = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
        self.states[version] = copy.deepcopy(kept)
        self.models[version] = copy.deepcopy(super().model(0))
        model = dict(model)
        lora.split(self.policy.model, model)
        self.models[version].load_state_dict(model)

    def model(self, version):
        return self.models[0 if version == reference.TEACHER else version]

    def trained(self, step):
        return split(self.batches[step])

    def folder(self, version):
        return self.config.model if version == 0 else version


def said(rows):
    """Return one letter for each row: y if it passed, n if it failed, - if it was skipped."""
    return "".join(
        {True: "y", False: "n", None: "-"}[ok if ok is None else bool(ok)] for _, ok, _ in rows
    )


@pytest.fixture(scope="module")
def made(base_model):
    """A run without a fault."""
    return Run(base_model, {}, {})


@pytest.fixture()
def run(made, monkeypatch):
    """A copy of the run that a test may change; at its stop 12 groups were drawn, 8 trained."""
    run = copy.copy(made)
    for name in ("config", "groups", "steps", "batches", "states"):
        setattr(run, name, copy.deepcopy(getattr(made, name)))
    monkeypatch.setattr(reference, "trainer_state", lambda run, version: run.states[version])
    run.stopped = dict(drawn=12, pending={str(k): ["toy", k] for k in range(6, 12)})
    now = {"sampler": dict(drawn=16, pending={})}
    monkeypatch.setattr(doctor_checks.checkpoints, "state_of", lambda _: {"sampler": run.stopped})
    monkeypatch.setattr(doctor_checks.checkpoints, "last_state", lambda _: now)
    return run


# ---- the trainer check, whose rows are: AdamW, gradient norm, gradient of version 1; AdamW of
# version 3; AdamW, gradient norm, gradient of version 4


def trained_rows(run, monkeypatch):
    monkeypatch.setattr(reference, "trainer_state", lambda run, version: run.states[version])
    return said(doctor_checks.check_trainer(run))


@pytest.mark.parametrize(
    "knobs,trainer_knobs,expected",
    [
        # The losses: the doctor's formulas against the trainer's
        (dict(loss="ppo", normalizer="tokens", kl_coef=0.0), {}, "yyyyyyy"),
        (dict(loss="cispo", entropy_coef=0.1), {}, "yyyyyyy"),
        (dict(loss="gspo"), {}, "yyyyyyy"),
        (dict(loss="ppo", normalizer="sequence"), {}, "yyyyyyy"),
        (dict(loss="icepop", clip_low=0.9, clip_high=1.1), {}, "yyyyyyy"),
        (dict(loss="cispo", ratio="sequence", clip_low=0.9, clip_high=1.1), {}, "yyyyyyy"),
        (dict(loss="dppo", clip_high=0.01), {}, "yyyyyyy"),
        (dict(ratio="product", kl_behavior_coef=0.3), {}, "yyyyyyy"),
        (dict(lr_by_ess=True), {}, "yyyyyyy"),
        (dict(late="mask", max_lag=0), {}, "yyyyyyy"),
        # Adapters, also with another scale or learning rate in the trainer
        (dict(lora_rank=4, weight_decay=0.1), {}, "yyyyyyy"),
        (dict(lora_rank=4), dict(lora_alpha=8.0), "ynyyyny"),
        (dict(lora_rank=4), dict(lr=1e-4), "nyynnyy"),
        # Importance weights that are always 1, or at most 1, in the trainer
        ({}, dict(loss="cispo", clip_low=1.0, clip_high=1.0), "yyyyynn"),
        ({}, dict(clip_high=1.0), "yyyyynn"),
        ({}, dict(kl_coef=-0.1), "yyyyynn"),
        ({}, dict(late="mask", max_lag=0), "yyyyynn"),
        ({}, dict(normalizer="tokens"), "ynyyyny"),
        ({}, dict(max_grad_norm=1e9), "yynyyyn"),
        ({}, dict(betas=(0.9, 0.99)), "nyynnyy"),
        ({}, dict(warmup_steps=0), "nyyyyyy"),
        ({}, dict(lr_schedule="constant"), "yyynnyy"),
    ],
)
def test_trainer_check_passes_right_steps_and_finds_wrong_ones(
    knobs, trainer_knobs, expected, base_model, monkeypatch
):
    assert trained_rows(Run(base_model, knobs, trainer_knobs), monkeypatch) == expected


@pytest.mark.parametrize("coef,expected", [(0.5, "yyyyyyy"), (0.0, "yyyyynn")])
def test_trainer_check_includes_the_teachers_part_of_the_loss(
    coef, expected, base_model, monkeypatch
):
    # At version 0 the teacher is the policy
    knobs = dict(teacher=str(base_model), teacher_coef=0.5, temperature=1.0)
    run = Run(base_model, knobs, dict(teacher_coef=coef))
    assert trained_rows(run, monkeypatch) == expected
    # Without advantages from rewards, those from the teacher are left, and the metric has them.
    for step in run.steps:
        run.batches[step]["advantage"][:] = 0
        run.steps[step] |= {"signal": 1.0 if coef else 0.0}
    rows = list(doctor_checks.check_metrics(run))
    assert said(rows) == ("y" if coef else "n"), rows


def adamw(parameters, eps=1e-8, decay=0.0):
    groups = [{"params": list(parameters), "lr_scale": 1.0, "weight_decay": decay}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps)


@pytest.mark.parametrize(
    "optimizers_of,expected",
    [
        (lambda every: [adamw(every)], "yyyyyyy"),
        (lambda every: [adamw(every, eps=1e-3)], "nyynnyy"),
        (lambda every: [adamw(every, decay=0.1)], "nyynnyy"),
        # The parameter that no optimizer has keeps its gradient
        (lambda every: [adamw(every[1:])], "ynnyynn"),
        # The doctor does not know this optimizer
        (lambda every: [adamw(every[1:]), torch.optim.Muon(every[:1])], "yyyyyyy"),
        (lambda every: [torch.optim.SGD(every)], "---"),
    ],
)
def test_trainer_check_of_other_optimizers(optimizers_of, expected, base_model, monkeypatch):
    def make(model, *_):
        optimizers = optimizers_of(list(model.parameters()))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr_scale"] = 1.0
        return optimizers

    monkeypatch.setattr(train, "make_optimizers", make)
    assert trained_rows(Run(base_model, {}, {}), monkeypatch) == expected


DROP = "run.config.no_signal = 'drop'"
MOMENTS = "run.states[2]['optimizer']['state'].values()"
HOLD = "run.config.late = 'hold'"
# Every step trains samples of the version before the one that it begins with; the first step after
# a start, samples of the version that it begins with.
ALL_OLDER = """
for k, versions in enumerate((0, 0, 2, 2), 1):
    run.batches[k]['versions'][run.batches[k]['mask']] = versions
"""
OTHERS = "{str(k): ['toy', k] for k in range(100, 104)}"
# (check, change of the run, letters of the rows); `one` is the first sample
CHANGES = [
    ("trainer", "run.states[4] = run.states[3]", "yyyynyn"),
    ("trainer", "run.states[1] = run.states[2]", "-yyyy"),
    ("trainer", f"[x['exp_avg'].zero_() for x in {MOMENTS}]", "yyynyyy"),
    ("trainer", "run.batches[4]['versions'][run.batches[4]['mask']] = 3", "yyyyy--"),
    ("trainer", "run.steps[1]['grad_norm'] *= 2", "ynyyyyy"),
    ("trainer", "run.steps[4]['ess_sample'] -= 0.1", "yyyyyny"),
    ("trainer", "run.steps[4]['ess'] -= 0.01", "yyyyyny"),
    ("trainer", "run.config.loss = 'of a fork'", "y-yy-"),
    ("trainer", "run.config.lr_schedule = 'of a fork'", "yyyyyyy"),
    ("engines", "", "yyyy"),
    ("engines", "one['behavior_logprobs'][one['mask']] += 1.5e-3", "nyyy"),
    ("engines", "run.groups = {k: run.group(k, k % 2, 1.5) for k in range(16)}", "yyny"),
    # An error as of 16 bits, but only after updates
    ("engines", "run.config.dtype = 'bfloat16'; [worsen(run, k) for k in range(8, 16)]", "ynyy"),
    ("engines", "run.config.temperature = 0.6", "yyyn"),
    ("engines", "one['temperature'] = np.float32(0.70001)", "yyy-"),
    ("texts", "", "y-yy-"),
    ("texts", "run.groups[0]['problem'] = {'prompt': 'ba='}", "n-yy-"),
    ("texts", "one['finished'] = not one['finished']", "y-ny-"),
    ("texts", "one['tokens'][-3] = 1", "y-ny-"),
    # The actor has asked for one more token
    ("texts", "run.models[0].generation_config.eos_token_id = [9]", "y-ny-"),
    ("draws", "", "yyyyy"),
    ("draws", "run.config.max_lag = 0", "nyyyy"),
    ("draws", f"{DROP}; [x['advantage'].fill(0) for x in run.groups[3]['samples']]", "ynyyy"),
    ("draws", f"{DROP}; run.steps[1] = dict(problems={{}}, drops=dict(no_signal=['3']))", "ynyyy"),
    ("draws", "[run.groups[k].update(number=k % 3) for k in range(12)]", "yyyny"),
    ("draws", "run.groups[1]['number'] = 0", "yyy-y"),
    ("draws", "run.test_problems = {'toy': run.train_problems['toy'][7:8]}", "yyyyn"),
    ("draws", "[run.groups[k].update(number=k - 12) for k in range(12, 16)]", "yyyny"),
    ("draws", "run.steps[1]['drops'] = dict(failed={'3': 1})", "yynyy"),
    ("packing", "", "yy"),
    ("packing", "run.batches[1]['mask'] = np.roll(run.batches[1]['mask'], -1)", "ny"),
    ("packing", "run.batches[1]['advantage'] *= -1", "yn"),
    ("packing", "run.batches[1]['sample_id'][0] = 1", "ny"),
    ("packing", "run.config.advantage = 'of a fork'", "y-"),
    ("packing", "run.steps[1]['reward'] /= 2", "ny"),
    ("packing", "run.config.batch_size = 10", "ny"),
    ("draws", f"{HOLD}\n{ALL_OLDER}", "yyyyyy"),
    (
        "draws",
        f"{HOLD}\n{ALL_OLDER}\nrun.batches[4]['versions'][run.batches[4]['mask']] = 3",
        "ynyyyy",
    ),
    ("parameters", "", "y"),
    ("parameters", "del run.states[3]['optimizer']['state']['model.norm.weight']", "-"),
    ("parameters", "run.config.adam_8bit = True", "-"),
    ("parameters", "run.states[3]['optimizer']['state'].clear()", "-"),
    ("metrics", "", "y"),
    ("metrics", "run.steps[4]['lag_mean'] += 0.1", "n"),
    ("metrics", "run.steps[4]['length_mean'] += 1", "n"),
    ("metrics", "run.steps[4]['signal'] -= 0.1", "n"),
    ("metrics", "run.steps[1]['by_lag'] = {'1': run.steps[1]['by_lag']['0']}", "n"),
    ("metrics", "run.steps[1]['lengths'] = {'20+': 8}", "n"),
    ("metrics", "run.steps[1]['lengths'].popitem()", "n"),
    ("metrics", "run.steps[4]['by_lag'].popitem()", "n"),
    ("metrics", "del run.steps[1]['lengths'], run.steps[1]['late']", "y"),
    ("rewards", "", "yy"),
    ("rewards", "one['reward'] += 1", "nn"),
    ("rewards", "one['outcome'] = 1 - one['outcome']", "ny"),
    ("rewards", "run.config.overlong_buffer = 0", "ny"),
    ("rewards", "one['reward_to_go'][-1] += 1", "yn"),
    ("rewards", "one['part'][one['mask'].argmax()] = -1", "yn"),
    ("continuation", "", "yy"),
    ("continuation", f"run.stopped['pending'] = {OTHERS}", "yn"),
    ("continuation", "[run.groups[k].update(number=k + 100) for k in range(8, 12)]", "yn"),
    ("continuation", "run.stopped['pending'] = {}", "y-"),
    ("continuation", "del run.steps[1]['problems']['2']", "ny"),
    ("continuation", "run.steps[2]['problems']['2'] = 2", "ny"),
]


def worsen(run, draw):
    run.groups[draw]["samples"][0]["behavior_logprobs"] += 0.01


@pytest.mark.parametrize("name,change,expected", CHANGES)
def test_check_finds_what_was_changed_in_the_run(name, change, expected, run):
    if "generation_config" in change:
        # The other copies share the models.
        run.models = copy.deepcopy(run.models)
    exec(change, dict(run=run, one=run.groups[0]["samples"][0], np=np, worsen=worsen))
    assert said(getattr(doctor_checks, f"check_{name}")(run)) == expected


@pytest.mark.parametrize(
    "change,expected",
    [
        ("", "yyy-yy"),
        ("run.config.eval_attempts = 2", "yyyyyy"),
        ("run.config.eval_problems = 128", "yyy-ny"),
        ("run.config.eval_temperature = 0.6", "yny-yy"),
        ("run.config.eval_temperature = 0.0", "yyy"),
        ("run.evaluations[0]['eval']['toy'] = 0.5", "yyy-yn"),
        ("done.returncode = 1", "n"),
    ],
)
def test_evaluation_check_repeats_an_evaluation(change, expected, run, monkeypatch, tmp_path):
    """The evaluation of version 2 is repeated, as if it were the last one."""
    run.run_dir = tmp_path
    run.steps = {2: {}}
    run.evaluations = [dict(version=2, eval=dict(toy=0.25), problems=256)]
    queue = Queue(tmp_path / "eval" / "queues" / "rollouts")
    for draw in range(8, 15):
        for one in run.groups[draw]["samples"]:
            # For the engine of the evaluation, the weights from disk are version 0
            queue.put(join([one | dict(versions=one["versions"].clip(max=0))]))
    results = dict(metrics=dict(toy={"pass@1": [0.25, 0, 1]}))
    (tmp_path / "eval" / "results.json").write_text(json.dumps(results))
    done = SimpleNamespace(returncode=0, stdout="numbers in", stderr="")
    monkeypatch.setattr(doctor_checks.subprocess, "run", lambda *_, **__: done)
    exec(change, dict(run=run, done=done))
    assert said(doctor_checks.check_evaluation(run)) == expected


def test_parameter_check_finds_wrong_and_missing_adapters(base_model, monkeypatch, tmp_path):
    run = Run(base_model, dict(lora_rank=4, lora_alpha=8.0), {})
    monkeypatch.setattr(reference, "trainer_state", lambda run, version: run.states[version])
    adapters = lora.split(run.policy.model, dict(run.states[3]["model"]))
    monkeypatch.setattr(run, "folder", lambda version: tmp_path / "right")
    (tmp_path / "right").mkdir()
    lora.save(tmp_path / "right" / "adapter", adapters, run.config)
    assert said(doctor_checks.check_parameters(run)) == "yy"
    (tmp_path / "wrong").mkdir()
    monkeypatch.setattr(run, "folder", lambda version: tmp_path / "wrong")
    lora.save(
        tmp_path / "wrong" / "adapter", adapters, dataclasses.replace(run.config, lora_alpha=4.0)
    )
    assert said(doctor_checks.check_parameters(run)) == "yn"
    trained = run.states[3]["optimizer"]["state"]
    del trained["model.layers.0.self_attn.q_proj.lora_A"]
    assert said(doctor_checks.check_parameters(run)) == "nn"
    # An adapter that changes nothing says nothing.
    (tmp_path / "zero").mkdir()
    monkeypatch.setattr(run, "folder", lambda version: tmp_path / "zero")
    zeros = {name: 0 * x for name, x in adapters.items()}
    lora.save(tmp_path / "zero" / "adapter", zeros, run.config)
    assert said(doctor_checks.check_parameters(run)) == "n-"


@pytest.mark.parametrize("rows,index", [("packed", 0), ("padded", 1)])
def test_expert_load_is_counted_with_plain_routers(rows, index, tmp_path, monkeypatch):
    """Packed rows compute once what neighbours share: five tokens, or all but the last one."""
    families.make_model("qwen3_moe", tmp_path, torch.float32)
    knobs = dict(model=str(tmp_path), dtype="float32", rows=rows)
    policy = train.build(cfg.Config(**knobs), torch.device("cpu"), 1)[0]
    rng = np.random.default_rng(0)
    sequences = [rng.integers(2, 100, n) for n in (3, 9, 30, 30)]
    sequences[2][:5] = sequences[1][:5]
    sequences[3] = sequences[2]
    lengths = np.array([3, 9, 30, 30])
    tokens = np.concatenate(sequences)
    policy.logprobs(tokens, np.concatenate([np.arange(n) for n in lengths]), 1.0)
    load, n = policy.routing.sums()["expert_load"]
    record = dict(lengths=lengths, tokens=tokens, segment=np.zeros(72, np.int16))
    monkeypatch.setattr(reference, "kept_batches", lambda run_dir, step: [record])
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    run = SimpleNamespace(model=lambda version: model, run_dir=tmp_path, device="cpu")
    loads = reference.expert_loads(run, 1)
    assert loads[0] != pytest.approx(loads[1], rel=1e-3)
    assert loads[index] == pytest.approx(float(load / n), rel=1e-6)


def test_stale_and_recomputed_caches_differ_only_after_an_update(run):
    one = run.groups[0]["samples"][0]
    one["versions"][-4:] = 2
    stale = reference.expected(run, one)[0]
    run.config.recompute_kv = True
    again = reference.expected(run, one)[0]
    assert stale[:-4] == pytest.approx(again[:-4], abs=1e-5)
    assert np.abs(stale[-4:] - again[-4:]).max() > 1e-4
    # A recomputed cache is of version 2 from the beginning
    one["versions"][one["mask"]] = 2
    assert again[-4:] == pytest.approx(reference.expected(run, one)[0][-4:], abs=1e-5)


def test_text_check_plays_an_episode_again(run, monkeypatch):
    """Too few turns and other texts are found; an episode of a client cannot be played again."""
    for says, expected in ([], "yn"), (["{}="], "yy"), (["{}"], "yn"), (["{}=", ""], "yn"):

        async def episode(problem, model):
            for text in says:
                await model(text.format(problem["prompt"][:-1]))
            return 1.0

        monkeypatch.setattr(toy, "episode", episode, raising=False)
        assert said(doctor_checks.check_texts(run)) == expected + "yy-"

    # `finished` is that of the last turn so far: it was sampled up to a stop token.
    seen = []

    async def ends(problem, model):
        seen.append(model.finished)
        await model(problem["prompt"])
        seen.append(model.finished)
        return 1.0

    monkeypatch.setattr(toy, "episode", ends)
    list(doctor_checks.check_texts(run))
    samples = [sample for group in run.groups.values() for sample in group["samples"]]
    assert not any(seen[::2]) and seen[1::2] == [sample["finished"] for sample in samples]

    async def client(problem, model):
        return model.base_url

    monkeypatch.setattr(toy, "episode", client)
    assert said(doctor_checks.check_texts(run)) == "y-yy-"
    assert said(doctor_checks.check_rewards(run)) == "-y"


def test_text_check_of_a_clients_turns(run, monkeypatch):
    """A retry that was sampled anew, a turn that is trained in two branches, a lost separator."""

    async def client(problem, model):
        return model.base_url

    template = "{% for m in messages %}{{ m.content }}<eos>a{% endfor %}"
    monkeypatch.setattr(toy, "episode", client, raising=False)
    monkeypatch.setattr(run.prompter.tokenizer, "chat_template", template)
    one = run.groups[0]["samples"][0]
    end, a, b = run.prompter.tokenizer("<eos>ab")["input_ids"]

    def letters_of(*segments):
        transcripts = []
        for turns in segments:
            transcript = Transcript()
            for k, tokens in enumerate(turns):
                versions = [0] * len(tokens) if k % 2 else None
                transcript.append(tokens, [0.0] * len(tokens), versions)
            transcripts.append(transcript.fields())
        transcripts[-1]["segment"] += len(segments) - 1
        for name in transcripts[0]:
            one[name] = np.concatenate([x[name] for x in transcripts])
        return said(doctor_checks.check_texts(run))[3:]

    assert letters_of([[b], [b, end], [a, b], [b, end]]) == "yy"
    assert letters_of([[b], [b, end], [b], [b, end]]) == "yn"
    assert letters_of([[b], [b, end]], [[b, b, end, a], [b, end]]) == "y-"
    assert letters_of([[b], [b, end]], [[b], [a, end]]) == "n-"
    assert letters_of([[b], [b, end]], [[b], [b, end], [a, b], [b, end]]) == "ny"
    # A turn in the middle has no stop token.
    assert letters_of([[b], [b], [a, b], [b, end]]) == "y--"


@pytest.mark.parametrize("kind", ["loo", "mean", "mean_std", "none"])
@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.5], [0.3], [2.0, 2.0]])
def test_reference_advantages_equal_those_of_preprocess(kind, rewards):
    own = reference.ADVANTAGES[kind](np.array(rewards))
    assert own == pytest.approx(preprocess.advantages(rewards, kind))


def test_reference_rewards_to_go_by_hand():
    turns = [[7, 8], [9], [7, 7]]
    assert reference.rewards_to_go([0.5], turns) == [0.5] * 5
    assert reference.rewards_to_go([1.0, 2.0, 4.0], turns) == [7, 7, 6, 4, 4]
    assert reference.rewards_to_go([1.0, 2.0, 3.0, 4.0, 5.0], turns) == [15, 14, 12, 9, 5]


# ---- everything


def test_shortened_run_keeps_the_users_knobs():
    words = "toy --no_signal drop --eval_attempts 2 --dtype bfloat16 --warmup_steps 9 --lr 1e-5"
    c, _ = doctor.shorten(words.split())
    assert (c.no_signal, c.eval_attempts, c.warmup_steps, c.lr_schedule) == ("drop", 2, 9, "linear")
    # The learning rate of the third of nine warm-up steps is large enough for bfloat16
    assert c.lr == pytest.approx(3e-4) and c.batch_size == 8 * c.attempts
    assert doctor.shorten("toy --dtype float32 --lr 1e-5".split())[0].lr == 1e-5


@pytest.mark.slow
def test_the_doctor_finds_wrong_advantages_and_nothing_else(tmp_path, monkeypatch, base_model):
    """A doctor with real engines, a stop and a continuation; then one with FAKE engines, in the
    same directory.
    """
    monkeypatch.setattr(faults, "WORK", tmp_path)
    folder = faults.copy_with(faults.FAULTS["leave-one-out without its factor"])
    command = ["bash", "run.sh", "doctor", "toy", "--port", "9700"]
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    for engines in ({}, {"PYTHONPATH": str(fake_vllm(tmp_path / "fake"))}):
        done = subprocess.run(
            command, cwd=folder, env=environment | engines, stdout=subprocess.PIPE
        )
        assert done.returncode == 1, done.stdout
        saved = json.loads((folder / "out" / "doctor-toy" / "doctor.json").read_text())
        failed = [row["check"] for row in saved["findings"] if row["ok"] is False]
        assert failed == ["advantages are those of --advantage loo"], done.stdout
        assert len(saved["findings"]) > 25

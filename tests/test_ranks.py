"""The trainer on one and two ranks: packing, sharding, resuming, checkpoints.

The trainer, its processes and its gloo groups are real. The weight sender is FAKE
(tests/train_without_engines.py), and the rollouts are made up.
"""

import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_model import tiny
from test_samples import make_sample
from train_without_engines import whole
from transformers import AutoModelForCausalLM

import config as cfg
import train
from bench import families
from conftest import PROCESS, ROOT
from plumbing import checkpoints, rundir
from plumbing.checkpoints import NEW_RUN, newest, restore
from plumbing.ledger import Ledger
from plumbing.queues import Queue, publish_json
from plumbing.ranks import Ranks
from preprocess import Packer

STEPS = 6
ATTEMPTS = 4
GROUPS = 3


def all_groups():
    """Make the groups of STEPS steps, with random lengths, logprobs and versions."""
    rng = np.random.default_rng(0)
    groups = []
    for draw in range(STEPS * GROUPS):
        samples = [random_sample(rng, draw // GROUPS, k) for k in range(ATTEMPTS)]
        if draw == 1:
            # this attempt failed: the first step has a sample less
            del samples[1]
        groups.append({"draw": draw, "samples": samples, "logged": [{}] * len(samples)})
    return groups


def random_sample(rng, step, k):
    n = int(rng.integers(5, 60))
    mask = np.arange(n) >= 3
    versions = np.where(mask, max(step - rng.integers(0, 3), 0), -1)
    # the last token may be newer
    versions[-1] = max(step - rng.integers(0, 2), 0)
    sample = make_sample(n, float(k % 2), mask=mask, versions=versions, sample_id=k)
    sample["tokens"] = rng.integers(3, 50, n)
    sample["behavior_logprobs"] = rng.normal(-4, 0.3, n).astype(np.float32) * mask
    sample["temperature"] = 0.7 + 0.1 * k
    sample["num_versions"] = len(set(versions[mask]))
    sample["advantage"] = np.where(mask, rng.normal(), 0.0)
    return sample


def write_run(
    out, name, base_model, ranks=1, first=0, steps=STEPS, missing=0, reverse=False, **knobs
):
    """A run directory whose queues hold the micro-batches of steps first.., but not of the last
    `missing` steps; returns its path.
    """
    training = dict(row_tokens=128, lr=1e-3, dtype="float32", steps=steps, trainers=ranks)
    # no engine sampled these
    limits = dict(save_every=3, keep_last=9, stall_timeout=300, mismatch_limit=1e9)
    limits |= dict(max_new_tokens=8, max_model_len=60)
    batch = dict(batch_size=GROUPS * ATTEMPTS, attempts=ATTEMPTS, model=str(base_model))
    config = cfg.Config(run=name, out=str(out), **training | limits | batch | knobs)
    run_dir = rundir.write(cfg.check(config))
    queues = run_dir / "queues"
    batches = [Queue(queues / "batches" / f"rank_{r}") for r in range(ranks)]
    packer = Packer(config, batches, Ledger(first * GROUPS, []), first)
    groups = all_groups()
    for step in range(first, steps - missing):
        of_step = groups[step * GROUPS : (step + 1) * GROUPS]
        for group in reversed(of_step) if reverse else of_step:
            packer.add(group)
    publish_json(queues / "sampler.json", drawn=99, pending={"97": ["toy", 3]}, state={"drawn": 99})
    evaluation = dict(run_id=config.run_id, eval={"toy": 0.0}, problems=0, version=steps)
    Queue(queues / "evals").put(evaluation)
    return run_dir


# how so many ranks ($0) of a program are started
LAUNCHERS = {
    "run.sh": "export WORLD_SIZE=$0 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT\n"
    'for ((r = 1; r < $0; r++)); do RANK=$r "$PYTHON" "$@" & done\n'
    'RANK=0 "$PYTHON" "$@"; code=$?; wait; exit $code',
    "accelerate": '"$PYTHON" -m accelerate.commands.launch --multi_gpu --num_processes $0 '
    '--main_process_port $PORT "$@"',
    "torchrun": '"$PYTHON" -m torch.distributed.run --nproc_per_node $0 --master_port $PORT "$@"',
}


def run(program, *arguments, ranks=1, launcher="run.sh", shell=""):
    """Run a program on so many ranks to its end."""
    own = dict(OMP_NUM_THREADS="1", PYTHON=sys.executable, PORT=str(8760 + PROCESS))
    env = os.environ | own
    command = ["bash", "-c", shell + LAUNCHERS[launcher], str(ranks), program, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def run_trainer(*run_dirs, **run_options):
    """Train on the queues that write_run filled; return (weights, step lines) of the last run."""
    run("tests/train_without_engines.py", *run_dirs, **run_options)
    weights = load_file(newest(run_dirs[-1]) / "model.safetensors")
    return weights, step_lines(run_dirs[-1])


def step_lines(run_dir):
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if "step" in x]


def resume(out, name, base_model, checkpoint, ranks=1, knobs=None, **run_options):
    """The same from a checkpoint of another run; returns (weights, step lines)."""
    first = int(checkpoint.name[5:])
    run_dir = write_run(out, name, base_model, ranks, first, **knobs or {})
    shutil.copytree(checkpoint, run_dir / "checkpoints" / checkpoint.name)
    return run_trainer(run_dir, ranks=ranks, **run_options)


def same(a, b):
    """Are two sets of weights the same bit for bit?"""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, base_model):
    """Uninterrupted, one rank: (weights, step lines, run directory)."""
    run_dir = write_run(tmp_path_factory.mktemp("reference"), "one", base_model)
    return (*run_trainer(run_dir), run_dir)


# ---- one step


def plain_step(base_model, version=0):
    """Metrics and gradients of the first step, from its samples one by one: no packing,
    no ranks, numpy and the formulas.
    """
    model = AutoModelForCausalLM.from_pretrained(base_model)
    batch = [sample for group in all_groups()[:GROUPS] for sample in group["samples"]]
    of_tokens = {name: [] for name in ("log_w", "lag", "loss", "entropy")}
    for s in batch:
        ids = torch.from_numpy(s["tokens"])
        logits = model(ids[None]).logits[0, :-1] / s["temperature"]
        distribution = torch.log_softmax(logits, -1)
        sampled = s["mask"][1:]
        logprobs = distribution.gather(1, ids[1:, None])[:, 0][sampled]
        behavior = torch.from_numpy(s["behavior_logprobs"][s["mask"]])
        log_w = logprobs.detach().double() - behavior.double()
        advantages = torch.from_numpy(s["advantage"][s["mask"]]).float()
        loss = -log_w.exp().clamp(max=5.0).float() * advantages * logprobs
        (loss.sum() / len(batch)).backward()
        entropy = -(distribution.exp() * distribution).sum(-1)
        of_tokens["log_w"].append(log_w.numpy())
        of_tokens["lag"].append(version - s["versions"][s["mask"]])
        of_tokens["loss"].append(loss.detach().numpy())
        of_tokens["entropy"].append(entropy.detach().numpy()[sampled])
    log_w, lag, loss, entropy = (np.concatenate(x) for x in of_tokens.values())
    w = np.exp(log_w)
    k3 = w - 1 - log_w
    versions = np.array([s["num_versions"] for s in batch])
    metrics = dict(
        samples=len(batch),
        tokens=sum(len(s["tokens"]) for s in batch),
        reward=np.mean([s["reward"] for s in batch]),
        success=np.mean([s["outcome"] == 0 for s in batch]),
        loss=loss.sum() / len(batch),
        entropy=entropy.mean(),
        ess=w.sum() ** 2 / (len(w) * (w**2).sum()),
        kl_behavior=k3.mean(),
        kl_ref=0,
        lag_mean=lag.mean(),
        lag_max=lag.max(),
        clip_frac=(w > 5).mean(),
        versions_2=(versions >= 2).mean(),
        versions_3=(versions >= 3).mean(),
    )
    return metrics, [p.grad for p in model.parameters()]


def assert_same_step(run_dir, metrics, gradients):
    """Is a run's one step the plain computation's?"""
    got = load_file(run_dir / "gradients.safetensors")
    for i, g in enumerate(gradients):
        assert (got[str(i)] - g).norm() <= 1e-5 * g.norm(), i
    [step] = step_lines(run_dir)
    norm = torch.cat([g.flatten() for g in gradients]).double().norm().item()
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for key, value in metrics.items():
        assert step[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_packing_and_order_do_not_change_a_step(tmp_path, base_model):
    """Every gradient and every number of a step equals those of a plain computation, sample by
    sample: also the divisor, where an attempt failed.
    """
    # the last: one sample a row, backwards
    layouts = dict(a={}, b=dict(row_tokens=64), c=dict(row_tokens=60, reverse=True))
    run_dirs = [write_run(tmp_path, n, base_model, steps=1, **x) for n, x in layouts.items()]
    run_trainer(*run_dirs)
    metrics, gradients = plain_step(base_model)
    assert metrics["samples"] == GROUPS * ATTEMPTS - 1
    for run_dir in run_dirs:
        assert_same_step(run_dir, metrics, gradients)


# ---- ranks

# Five rows, so that one of two ranks has a filler. Both ranks hold a part of the reference, which
# still equals the policy
TWO = dict(steps=1, row_tokens=96, kl_coef=0.1)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, base_model):
    """The first step on two ranks that were started as run.sh does: (weights, run directory)."""
    run_dir = write_run(tmp_path_factory.mktemp("two"), "two", base_model, 2, **TWO)
    return run_trainer(run_dir, ranks=2)[0], run_dir


def test_two_ranks_compute_the_step_of_one(on_two_ranks, base_model):
    assert_same_step(on_two_ranks[1], *plain_step(base_model))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_ranks_may_be_started_by_hand(launcher, on_two_ranks, tmp_path, base_model):
    run_dir = write_run(tmp_path, "by-hand", base_model, 2, **TWO)
    weights, _ = run_trainer(run_dir, ranks=2, launcher=launcher)
    assert same(weights, on_two_ranks[0])


def test_wrong_number_of_ranks_is_refused(tmp_path, base_model):
    run_dir = write_run(tmp_path, "r", base_model, 2)
    with pytest.raises(AssertionError, match="train: 1 ranks were started, .* --trainers 2"):
        run("train.py", run_dir)
    assert not (run_dir / "metrics.jsonl").exists()


# writes what each of two ranks has after train.build, and the logprobs of a few tokens
BUILD = """
import sys
import numpy as np
import torch
import config as cfg
import train
from plumbing.ranks import Ranks
from safetensors.torch import save_file

ranks = Ranks(cfg.Config(stall_timeout=300))
if ranks.rank:
    train.load_model = None
for folder in sys.argv[3:]:
    policy, _ = train.build(cfg.Config(model=folder, dtype="float32"), ranks.device, 2)
    model = policy.model
    tensors = {name: p.full_tensor() for name, p in model.named_parameters()}
    tensors |= {name: b.clone() for name, b in model.named_buffers()}
    tensors["logprobs"] = policy.logprobs(np.arange(40), np.arange(40), 1.0)[0]
    save_file(tensors, f"{folder}/rank_{ranks.rank}")
# Frozen models in bfloat16, of which transformers keeps some tensors in float32
for folder in sys.argv[1:3]:
    config = cfg.Config(model=folder, dtype="bfloat16")
    policy = train.load_policy(config, torch.bfloat16, ranks.device, 2)
    tensors = {name: p.full_tensor() for name, p in policy.model.named_parameters()}
    tensors |= {name: b.clone() for name, b in policy.model.named_buffers()}
    tensors["logprobs"] = policy.logprobs(np.arange(40), np.arange(40), 1.0)[0]
    save_file(tensors, f"{folder}/rank_{ranks.rank}")
"""


# It is told to stop 100,000 times, as by the launcher, the system and an impatient user at once
STOPPED = """
import os
import subprocess
import sys
import time
import config as cfg
from plumbing.ranks import Ranks

ranks = Ranks(cfg.Config())
ranks.listen_for_stop()
code = f"import os\\nfor _ in range(100000): os.kill({os.getpid()}, 15)"
sender = subprocess.Popen([sys.executable, "-c", code])
while sender.poll() is None:
    time.sleep(0.0001)
print(ranks.stop.is_set())
os._exit(0)
"""


def test_a_trainer_that_is_told_to_stop_many_times_does_not_hang():
    stopped = subprocess.Popen([sys.executable, "-c", STOPPED], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert stopped.communicate(timeout=120)[0] == b"True\n"
    finally:
        stopped.kill()


# The second of two ranks is told to stop, and the first one is not: it waits for data.
STOPPED_ALONE = """
import os
import sys
import threading
import config as cfg
from plumbing.ranks import Ranks, Stopped
from plumbing.reader import Reader

ranks = Ranks(cfg.Config(stall_timeout=300))
reader = Reader(cfg.Config(stall_timeout=300), sys.argv[1], ranks)
if ranks.rank == 1:
    threading.Timer(1.0, ranks.stop.set).start()
try:
    next(reader.step(0))
except Stopped as e:
    open(f"{sys.argv[1]}/rank_{ranks.rank}", "w").write(str(e))
os._exit(0)
"""


def test_all_ranks_stop_when_one_is_told_to(tmp_path):
    (tmp_path / "stop.py").write_text(STOPPED_ALONE)
    run(tmp_path / "stop.py", tmp_path, ranks=2)
    assert [(tmp_path / f"rank_{r}").read_text() for r in (0, 1)] == ["train: told to stop"] * 2


# The directories are those of a shared file system, as two nodes see it: the second one sees the
# newest checkpoint later, and an older one meanwhile. Then a metric is there on one rank alone.
AGREEMENT = """
import os
import sys
import threading
from pathlib import Path
import torch
import config as cfg
from plumbing import checkpoints
from plumbing.metrics import Sums
from plumbing.ranks import Ranks

ranks = Ranks(cfg.Config(stall_timeout=300))
run_dir = Path(sys.argv[1], f"node_{ranks.rank}")
assert checkpoints.agreed_newest(run_dir, ranks) is None
folder = run_dir / "checkpoints"
(folder / "step_000001").mkdir(parents=True)
if ranks.rank == 0:
    (folder / "step_000002").mkdir()
else:
    threading.Timer(1.0, (folder / "step_000002").mkdir).start()
assert checkpoints.agreed_newest(run_dir, ranks) == folder / "step_000002"
sums = Sums()
sums.add({"common": (sum, torch.ones(2))})
assert sums.reduce() == {"common": 4.0}
if ranks.rank == 0:
    sums.add({"own": (sum, torch.ones(1))})
try:
    sums.reduce()
except RuntimeError as e:
    Path(sys.argv[1], f"rank_{ranks.rank}").write_text(str(e))
os._exit(0)
"""


def test_ranks_agree_on_the_newest_checkpoint_and_on_the_metrics(tmp_path):
    (tmp_path / "agreement.py").write_text(AGREEMENT)
    run(tmp_path / "agreement.py", tmp_path, ranks=2)
    for rank, sizes in enumerate(("{'common': [2], 'own': [1]}", "{'common': [2]}")):
        complaint = (tmp_path / f"rank_{rank}").read_text()
        assert (
            complaint.startswith("train: the ranks have different metrics") and sizes in complaint
        )


@pytest.mark.slow
def test_work_is_saved_by_all_ranks_when_no_more_data_comes(tmp_path, base_model):
    knobs = dict(TWO, steps=2, save_every=99, stall_timeout=20)
    run_dir = write_run(tmp_path, "r", base_model, 2, missing=1, **knobs)
    # The wait for data has its limit while an engine answers
    (run_dir / "engines").mkdir(exist_ok=True)
    publish_json(run_dir / "engines" / "engine0.json", url="http://127.0.0.1:9", started=0)
    with pytest.raises(AssertionError, match="Stopped: train: preprocess put no micro-batch into"):
        run_trainer(run_dir, ranks=2)
    assert newest(run_dir).name == "step_000001"


@pytest.mark.slow
def test_work_is_saved_by_all_ranks_when_a_guard_ends_the_run(tmp_path, base_model, monkeypatch):
    """The gradients of three steps in a row are not finite."""
    groups = all_groups()
    for group in groups[2 * GROUPS : 5 * GROUPS]:
        for sample in group["samples"]:
            sample["advantage"] = sample["advantage"] + np.nan
    monkeypatch.setitem(globals(), "all_groups", lambda: groups)
    run_dir = write_run(tmp_path, "r", base_model, 2, row_tokens=96, save_every=99)
    with pytest.raises(AssertionError, match="Stopped: train: 3 steps in a row had gradients"):
        run_trainer(run_dir, ranks=2)
    assert newest(run_dir).name == "step_000005"


def test_rank_0_alone_loads_the_model_and_hands_it_out(tmp_path):
    """Buffers, too, that are in no file; weights that are tied stay so."""
    tied = {"qwen2": False, "gemma3_text": True, "gpt2": True}
    folders = [tiny(family, tmp_path / family, tie_word_embeddings=tied[family]) for family in tied]
    # The correction biases of routers are buffers in the one, and parameters in the other.
    mixed = [tmp_path / "deepseek_v3", tmp_path / "ernie4_5_moe"]
    for folder in mixed:
        families.make_model(folder.name, folder, torch.float32)
    (tmp_path / "build.py").write_text(BUILD)
    run(tmp_path / "build.py", *mixed, *folders, ranks=2)
    for folder in mixed:
        first, second = (load_file(folder / f"rank_{rank}") for rank in range(2))
        assert same(first, second)
        assert {x.dtype for name, x in first.items() if "correction" in name} == {torch.float32}
        assert first["model.embed_tokens.weight"].dtype == torch.bfloat16
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        expected = dict(model.named_parameters()) | dict(model.named_buffers())
        first, second = (load_file(folder / f"rank_{rank}") for rank in range(2))
        assert same(first, second)
        assert same({name: x for name, x in first.items() if name != "logprobs"}, expected)
        assert ("lm_head.weight" in first) is not tied[folder.name]


# ---- checkpoints


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(reference, tmp_path, base_model):
    weights, steps, run_dir = reference
    halfway = run_dir / "checkpoints" / "step_000003"
    again, lines = resume(tmp_path, "again", base_model, halfway)
    assert same(again, weights)
    for line, expected in zip(lines, steps[3:], strict=True):
        for key in ("step", "version", "samples", "grad_norm", "loss", "problems"):
            assert line[key] == expected[key]
    path = tmp_path / "again" / "checkpoints" / "step_000006" / "trainer" / "state.json"
    state = json.loads(path.read_text())
    assert state["position"] == {"next": STEPS * GROUPS, "ahead": []}
    assert (state["version"], state["samples"]) == (STEPS, STEPS * GROUPS * ATTEMPTS - 1)
    # what the actor has drawn goes with it
    assert state["sampler"] == {"drawn": 99, "pending": {"97": ["toy", 3]}, "state": {"drawn": 99}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_holds_the_weights_of_its_beginning(dtype, tmp_path, base_model, monkeypatch):
    """Training goes on while it is written; until it is complete, the one before is the newest."""
    run_dir = write_run(tmp_path, "r", base_model, dtype=dtype)
    config = cfg.load(run_dir)
    ranks = Ranks(config)
    policy, optimizers = train.build(config, ranks.device, 1)
    model = policy.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    goes_on = threading.Event()
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: goes_on.wait())
    state = NEW_RUN | {"version": 3}
    saver = checkpoints.Saver(config, run_dir, model, optimizers, ranks, NEW_RUN)
    saver.save(state)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    publish_json(run_dir / "queues" / "sampler.json", drawn=100, pending={}, state={})
    assert newest(run_dir) is None
    goes_on.set()
    saver.finish()
    assert restore(newest(run_dir), model, optimizers)["sampler"]["drawn"] == 99
    assert same(before, dict(model.named_parameters()))
    saved = load_file(newest(run_dir) / "model.safetensors")
    assert same(saved, {n: whole(p).to(getattr(torch, dtype)) for n, p in before.items()})
    assert json.loads((newest(run_dir) / "config.json").read_text())["dtype"] == dtype
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_adam_8bit_stays_near_adamw_and_resumes_bit_for_bit(ranks, reference, tmp_path, base_model):
    """Within 2% of AdamW's way in six steps; they go on from a checkpoint bit for bit."""
    pytest.importorskip("torchao")
    run_dir = write_run(tmp_path, "eight", base_model, ranks, adam_8bit=True)
    weights, _ = run_trainer(run_dir, ranks=ranks)
    base = load_file(base_model / "model.safetensors")
    way = torch.cat([(reference[0][name] - base[name]).flatten() for name in base])
    off = torch.cat([(reference[0][name] - weights[name]).flatten() for name in base])
    assert 1e-4 * way.norm() < off.norm() < 0.02 * way.norm()
    halfway = run_dir / "checkpoints" / "step_000003"
    again, _ = resume(tmp_path, "again", base_model, halfway, ranks, knobs=dict(adam_8bit=True))
    assert same(again, weights)


@pytest.mark.slow
def test_fused_adamw_is_near_and_resumes_bit_for_bit(reference, tmp_path, base_model):
    """Three ranks with AdamW's fused kernel, which GPUs take."""
    fused = dict(ranks=3, shell="export FUSED=1; ")
    run_dir = write_run(tmp_path, "fused", base_model, ranks=3)
    weights, _ = run_trainer(run_dir, **fused)
    plain, _ = run_trainer(write_run(tmp_path, "plain", base_model, ranks=3), ranks=3)
    assert not same(plain, weights)
    for name, w in weights.items():
        assert (reference[0][name] - w).norm() < 1e-4 * w.norm()
    halfway = run_dir / "checkpoints" / "step_000003"
    again, _ = resume(tmp_path, "again", base_model, halfway, **fused)
    assert same(again, weights)


@pytest.mark.slow
def test_offload_activations_does_not_change_the_weights(reference, tmp_path, base_model):
    knobs = dict(checkpointed_layers=2, offload_activations=True)
    run_dir = write_run(tmp_path, "host", base_model, **knobs)
    assert same(run_trainer(run_dir)[0], reference[0])


@pytest.mark.slow
@pytest.mark.parametrize("before,after", [(2, 2), (1, 2), (2, 1)])
def test_checkpoint_is_resumed_on_any_number_of_ranks(
    before, after, reference, tmp_path, base_model
):
    weights, _, run_dir = reference
    if before == 2:
        run_dir = write_run(tmp_path, "before", base_model, ranks=2)
        weights, _ = run_trainer(run_dir, ranks=2)
    halfway = run_dir / "checkpoints" / "step_000003"
    again, _ = resume(tmp_path, "after", base_model, halfway, after)
    for name, w in weights.items():
        assert (again[name] - w).norm() < (1e-6 if before == after else 1e-4) * w.norm()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_leaves_the_last(reference, tmp_path, base_model):
    weights, _, run_dir = reference
    halfway = run_dir / "checkpoints" / "step_000003"
    complaint = r"train: \S+/step_000006 cannot be written \(.*[Ff]ile too large"
    with pytest.raises(AssertionError, match=complaint):
        # weights and optimizer have 5 MB
        resume(tmp_path, "full", base_model, halfway, shell="ulimit -f 2500; ")
    again, _ = resume(tmp_path, "again", base_model, newest(tmp_path / "full"))
    assert same(again, weights)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_damaged_checkpoint_is_named(file, reference, tmp_path, base_model):
    config = cfg.Config(model=str(base_model), dtype="float32")
    shutil.copytree(reference[2] / "checkpoints", tmp_path / "checkpoints")
    path = newest(tmp_path)
    os.truncate(path / "trainer" / file, 100)
    policy, optimizers = train.build(config, torch.device("cpu"), 1)
    model = policy.model
    complaint = rf"{path} is damaged \(.*\): remove it; the same command"
    with pytest.raises(cfg.ConfigError, match=complaint):
        restore(path, model, optimizers)
    shutil.rmtree(path)
    assert restore(newest(tmp_path), model, optimizers)["version"] == 3

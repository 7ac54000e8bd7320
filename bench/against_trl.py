"""The pipeline against what one would pick instead: TRL's GRPOTrainer, on the same task, base model, machine and sampling parameters, both in one run.

    pip install -r bench/requirements.txt
    python bench/against_trl.py [--seeds 1] [--steps 60] [--quick] [--plot] [--port 8970]

Task `tail` and the pipeline are those of bench/compare.py. Both: 64 samples a step, 4 a problem, temperature 1, top-p 1, top-k off, at most 410 new tokens, AdamW
(0.9, 0.95), the learning rate of compare.py after 3 steps of warm-up, gradients clipped at 1, no KL term, rewards not divided by their standard deviation. TRL has the whole machine
for either of its phases, its default loss (`dapo`, which is on-policy here), and generates with Transformers: its ways to use vLLM need a GPU (its server wants
NCCL; in its own process, vllm_mode="colocate", loading new weights fails in vLLM's CPU build: 'Parameter' object has no attribute 'weight_loader'), and its continuous batching is
three times slower here. In its favour: its clock stands still while it is scored, and start-up does not count.

Scores are those of bench/compare.py, of every 10 steps; the scores that times are compared at are 50, 75 and 90% of the way to where TRL
ends. Runs that are done are kept in out/bench/against-trl.json: the same command goes on. Leaves the figure beside it.
"""
import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np

from compare import COMMON, MODEL, PIPELINE, PROBLEMS, QUICK, ROOT, SHARES, fixed_scores, kept, machine, one_run, scored, success, time_to
from tasks import _tiny, tail

KEPT = ("task", "model", "steps", "batch_size", "attempts", "max_new_tokens", "lr", "warmup_steps", "save_every")  # of COMMON, what TRL's runs hang on


def trl_run(knobs, seed, file):
    """One run of GRPOTrainer, in a process of its own; writes dict(curve: {time, samples, reward: one number per step, scores: [[version, score]]}) to `file`."""
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    path = knobs["model"]
    tokenizer, held_out = AutoTokenizer.from_pretrained(path), tail.problems("test", seed)[:PROBLEMS]
    curve = dict(time=[], samples=[], reward=[], scores=[])

    def rewards(prompts, completions, completion_ids, answer, **_):
        found = [tail.reward(dict(answer=a), text, ids[-1] == tokenizer.eos_token_id) for a, text, ids in zip(answer, completions, completion_ids)]
        curve["reward"].append(float(np.mean(found)))
        return found

    class Watch(TrainerCallback):
        """Times of the steps' ends, and the scores, for which the clock stands still."""

        def score(self, model, version):
            begun = time.perf_counter()
            curve["scores"].append([version, success(model.eval(), tokenizer, held_out)])
            model.train()
            print(f"trl, seed {seed}: version {version}, score {curve['scores'][-1][1]:.3f}, {([0.0] + curve['time'])[-1]:.1f} s", flush=True)
            self.begin += time.perf_counter() - begun

        def on_train_begin(self, args, state, control, model=None, **_):
            self.begin = time.perf_counter()
            self.score(model, 0)

        def on_step_end(self, args, state, control, model=None, **_):
            n = state.global_step
            curve["time"].append(time.perf_counter() - self.begin)
            curve["samples"].append(n * knobs["batch_size"])
            if n % knobs["save_every"] == 0 or n == knobs["steps"]:
                self.score(model, n)

    arguments = GRPOConfig(str(Path(file).with_suffix("")), use_cpu=True, max_steps=knobs["steps"], per_device_train_batch_size=knobs["batch_size"], num_generations=knobs["attempts"],
                           temperature=1.0, top_p=1.0, top_k=0, max_completion_length=knobs["max_new_tokens"], beta=0.0, scale_rewards="none", learning_rate=knobs["lr"],
                           lr_scheduler_type="constant_with_warmup", warmup_steps=knobs["warmup_steps"], adam_beta2=0.95, max_grad_norm=1.0, bf16=False, gradient_checkpointing=False,
                           seed=seed, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa"), reward_funcs=rewards, args=arguments,
                          train_dataset=Dataset.from_list(tail.problems("train", seed)), processing_class=tokenizer, callbacks=[Watch()])
    trainer.train()
    Path(file).write_text(json.dumps(dict(curve=curve, settings={k: v for k, v in arguments.to_dict().items() if isinstance(v, (int, float, str, bool))})))


def table(runs, levels):
    """Printable lines; runs: {name: [run per seed]}."""
    yield "seconds to a held-out score of " + ", ".join(f"{y:.3f} ({100 * s:.0f}%)" for s, y in zip(SHARES, levels)) + ", mean over seeds (lowest-highest)"
    yield f"{'':<10}" + "".join(f"{f'to {100 * s:.0f}%':>22}" for s in SHARES) + f" {'held-out score':>16} {'s, all':>8} {'samples/s':>10}"
    times = {name: [[time_to(r["curve"], level) for r in found] for level in levels] for name, found in runs.items()}
    for name, found in runs.items():
        cells = "".join(f"{'never, in a run' if None in t else f'{np.mean(t):.1f} ({min(t):.1f}-{max(t):.1f})':>22}" for t in times[name])
        ends = [scored(r["curve"])[2] for r in found]
        yield (f"{name:<10}{cells} {np.mean([y[0] for y in ends]):>6.3f} -> {np.mean([y[-1] for y in ends]):>6.3f} {np.mean([r['curve']['time'][-1] for r in found]):>8.1f} "
               f"{np.mean([r['curve']['samples'][-1] / r['curve']['time'][-1] for r in found]):>10.1f}")
    for k, share in enumerate(SHARES):
        ours, theirs = times["pipeline"][k], times["trl"][k]
        if None not in ours + theirs:
            yield f"to {100 * share:.0f}%: the pipeline is {np.mean(theirs) / np.mean(ours):.1f} times as fast; seed by seed {' '.join(f'{b / a:.1f}' for a, b in zip(ours, theirs))}"


def draw(runs, levels, path):
    """Held-out score against time and against samples, a line per seed."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for color, (name, found) in zip(("k", "C1"), runs.items()):
        for seed, r in enumerate(found):
            versions, times, scores = scored(r["curve"])
            for ax, x in zip(axes, (times, np.array([0, *r["curve"]["samples"]])[versions])):
                ax.plot(x, scores, color=color, label=name if seed == 0 else None)
    for ax, x in zip(axes, ("seconds", "samples")):
        for y in levels:
            ax.axhline(y, color="C3", linestyle=":")
        ax.set(xlabel=x, title=f"held-out score against {x}")
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=80)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--port", type=int, default=8970)
    p.add_argument("--quick", action="store_true", help="one seed, few steps")
    p.add_argument("--plot", action="store_true", help="no runs: table and figure of those that are there")
    a = p.parse_args(argv)
    seeds, name = 1 if a.quick else a.seeds, "against-trl" + "-quick" * a.quick
    file, done = kept(name, fresh=a.quick)
    common = COMMON | (QUICK if a.quick else dict(steps=a.steps))
    _tiny.make_model(["tail"], MODEL, 0)
    for seed in range(seeds):
        for who in ("pipeline", "trl"):
            key, knobs = f"{who}, seed {seed}", common | PIPELINE if who == "pipeline" else {k: common[k] for k in KEPT}
            if a.plot or done.get(key, {}).get("knobs") == knobs:
                continue
            if who == "pipeline":
                run = one_run(f"{name}-seed{seed}", knobs, seed, a.port, file.parent / "compare-runs")
            else:
                part = file.parent / f"{name}-trl-seed{seed}.json"
                part.unlink(missing_ok=True)
                process = multiprocessing.get_context("spawn").Process(target=trl_run, args=(knobs, seed, str(part)), daemon=True)
                process.start()
                process.join(3600)
                if process.exitcode != 0:
                    sys.exit(f"bench/against_trl.py: TRL's process ended with exit code {process.exitcode} (None: not within an hour), its message is above; is it installed (pip install -r bench/requirements.txt)?")
                run = json.loads(part.read_text())
            done[key] = dict(knobs=knobs, machine=machine()) | run
            file.write_text(json.dumps(done))
            print(f"{key}: {run['curve']['samples'][-1] / run['curve']['time'][-1]:.1f} samples/s, score {scored(run['curve'])[2][-1]:.3f}", flush=True)
    runs = {who: [done[k] for seed in range(seeds) if (k := f"{who}, seed {seed}") in done] for who in ("pipeline", "trl")}
    if not all(runs.values()):
        p.error(f"{file} has no runs of both")
    levels = fixed_scores({"trl": runs["trl"]})
    print("\n".join([machine(), *table(runs, levels)]))
    draw(runs, levels, file.with_suffix(".png"))
    print(f"figure {file.with_suffix('.png').relative_to(ROOT)}")


if __name__ == "__main__":
    main()

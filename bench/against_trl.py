"""The pipeline against what one would pick instead: TRL's GRPOTrainer, on the same task, base model, machine and sampling parameters.

    pip install -r bench/requirements.txt
    python bench/against_trl.py [--max_new_tokens 64] [--seeds 8] [--steps 64] [--quick] [--plot] [--port 8970]

Task, pipeline, scores, table and intervals are those of bench/compare.py. Both: 64 samples a step, 4 a problem,
temperature 1, top-p 1, top-k off, at most 410 new tokens (with 64 there are no long answers to wait for,
which suits TRL), AdamW (0.9, 0.95), the same learning rate after 3 steps of warm-up, gradients clipped at
1, no KL term, rewards not divided by their standard deviation. TRL has the whole machine for either of
its phases, its default loss (`dapo`, on-policy here), and generates with Transformers: its ways to use
vLLM need a GPU. Both write a checkpoint every 8 steps; start-up does not count.
"""

import functools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import compare, runs
from bench.common import WORK
from bench.runs import COMMON, PIPELINE, QUICK, scores
from tasks import tail

# of COMMON, what TRL's runs hang on
TRL = "task model steps batch_size attempts max_new_tokens lr warmup_steps save_every".split()
LONGEST = 3600
# of GRPOConfig: what the pipeline has by default
ALIKE = dict(temperature=1.0, top_p=1.0, top_k=0, beta=0.0, scale_rewards="none", adam_beta2=0.95)
ALIKE |= dict(max_grad_norm=1.0, lr_scheduler_type="constant_with_warmup")
MACHINE = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
MACHINE |= dict(
    report_to="none", logging_strategy="no", save_strategy="steps", save_only_model=True
)


def watch(curve, samples):
    """Notes the time at every step's end; the clock starts when training does."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            curve["time"].append(time.perf_counter() - self.begin)
            curve["samples"].append(state.global_step * samples)

    return Watch()


def train_trl(knobs, file):
    """GRPOTrainer to its end, in a process of its own; writes {curve, scores} to `file`. Its checkpoints
    go to the directory of that name.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(knobs["model"])
    folder = Path(file).with_suffix("")
    curve = dict(time=[], samples=[])

    def rewards(completions, completion_ids, answer, **_):
        found = []
        for right, text, ids in zip(answer, completions, completion_ids):
            finished = ids[-1] == tokenizer.eos_token_id
            found.append(tail.reward(dict(answer=right), text, finished))
        return found

    arguments = GRPOConfig(
        str(folder),
        max_steps=knobs["steps"],
        per_device_train_batch_size=knobs["batch_size"],
        num_generations=knobs["attempts"],
        max_completion_length=knobs["max_new_tokens"],
        learning_rate=knobs["lr"],
        warmup_steps=knobs["warmup_steps"],
        seed=knobs["seed"],
        save_steps=knobs["save_every"],
        **ALIKE,
        **MACHINE,
    )
    model = AutoModelForCausalLM.from_pretrained(
        knobs["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=Dataset.from_list(tail.problems("train", knobs["seed"])),
        processing_class=tokenizer,
        callbacks=[watch(curve, knobs["batch_size"])],
    )
    trainer.train()
    found = scores(folder, knobs["seed"])
    Path(file).write_text(json.dumps(dict(curve=curve, scores=found)))


def one_run(name, knobs, port):
    """A run of either; TRL's has no engines."""
    if "engines" in knobs:
        return runs.one_run(name, knobs, port)
    file = WORK / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=train_trl, args=(knobs, str(file)), daemon=True)
    process.start()
    process.join(LONGEST)
    if process.exitcode != 0:
        why = f"TRL ended with exit code {process.exitcode} (None: not within {LONGEST} s)"
        sys.exit(f"{why}, its words are above; pip install -r bench/requirements.txt?")
    return json.loads(file.read_text())


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=8, port=8970)
    p.add_argument("--steps", type=int, default=64)
    p.add_argument("--max_new_tokens", type=int, default=COMMON["max_new_tokens"])
    a = p.parse_args(argv)
    common = COMMON | dict(steps=a.steps, max_new_tokens=a.max_new_tokens)
    name = "against-trl"
    if a.max_new_tokens != COMMON["max_new_tokens"]:
        name += f"-{a.max_new_tokens}"
    if a.quick:
        common |= QUICK
    settings = {"pipeline": common | PIPELINE, "trl": {name: common[name] for name in TRL}}
    runs.make_model()
    start = functools.partial(one_run, port=a.port)
    found, path = runs.run_all(a, name, settings, start)
    compare.report(found, path)


if __name__ == "__main__":
    main()

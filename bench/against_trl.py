"""The pipeline against TRL's GRPOTrainer, on the same task, base model and machine.

    pip install -r bench/requirements.txt
    python bench/against_trl.py [--max_new_tokens 64] [--seeds 8] [--steps 64] [--quick] [--plot]
                                [--port 8970]
    python bench/against_trl.py --preset smol --max_new_tokens 96 --steps 16 --seeds 3
    python bench/against_trl.py --preset countup --steps 24 --seeds 3

Task, pipeline, scores, table and intervals are those of bench/compare.py. Both contenders have:

- 64 samples a step, 4 a problem; temperature 1, top-p 1, top-k off; at most 410 new tokens. With
  64 new tokens there are no long answers to wait for, which suits TRL.
- AdamW (0.9, 0.95), the same learning rate after 3 steps of warm-up, gradients clipped at 1, no KL
  term, rewards not divided by their standard deviation. With another preset, its values hold.
- A checkpoint every 8 steps (smol and countup: 4). Start-up does not count.

With `--preset countup` the pipeline's trainer has threads for all cores, and threads wait busily in
both contenders, as in bench/compare.py.

TRL has the whole machine in either of its phases, its default loss (`dapo`, on-policy here) and
float32. It generates with Transformers: its ways to use vLLM, its asynchronous trainer among them,
need a GPU. Checkpoints are scored afterwards (bench/runs.py); on smol, the pipeline's by the run
itself, on the same problems with as many attempts.
"""

import functools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench import compare, runs
from bench.common import WORK
from bench.runs import COMMON, PIPELINE, PROBLEMS, QUICK, SCORED, problems_of, scores
from tools import prepare

# The knobs that TRL's runs depend on
TRL_KNOBS = "task model steps batch_size attempts max_new_tokens lr warmup_steps save_every".split()
TRL_KNOBS += "train_data eval_data temperature eval_attempts eval_temperature".split()
# The runs of the real model are short
SMOL_KNOBS = dict(engines=1, lr_schedule="constant", save_every=4, dtype="float32")
PRESETS = {
    "toy": COMMON | PIPELINE,
    "smol": cfg.SMOL | SMOL_KNOBS | dict(eval_every=4, eval_attempts=2),
    "countup": cfg.COUNTUP | SMOL_KNOBS | runs.COUNTUP,
}
# Samples in a micro-batch of TRL, which computes all logits of a micro-batch at once. Those of 64
# answers of SmolLM2, each of up to 140 tokens, do not fit into 24 GB. With the other presets a step
# is one micro-batch.
MICRO_BATCH = {"countup": 16}
# Seconds that a run of TRL may take
LONGEST = 3600
# GRPOConfig as the pipeline is by default
ALIKE = dict(top_p=1.0, top_k=0, beta=0.0, scale_rewards="none", adam_beta2=0.95)
# Not transformers' `linear`, which falls to 0
ALIKE |= dict(max_grad_norm=1.0, lr_scheduler_type="constant_with_warmup")
MACHINE = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
MACHINE |= dict(
    report_to="none", logging_strategy="no", save_strategy="steps", save_only_model=True
)


def watch(curve, samples):
    """A callback that notes the time at every step's end; its clock starts with the training."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            curve["time"].append(time.perf_counter() - self.begin)
            curve["samples"].append(state.global_step * samples)

    return Watch()


def train_trl(knobs, file):
    """Run GRPOTrainer to its end, in a process of its own; writes {curve, scores} to `file`.

    Its checkpoints go to the directory that is called like the file without its suffix.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(knobs["model"])
    folder = Path(file).with_suffix("")
    curve = dict(time=[], samples=[])
    task = cfg.load_task(knobs["task"])
    problems = problems_of("train", knobs)
    prompts = [problem["prompt"] for problem in problems]
    if knobs["task"] == "gym":
        prompts = [[dict(role="user", content=prompt)] for prompt in prompts]

    def rewards(completions, completion_ids, number, **_):
        values = []
        for i, completion, ids in zip(number, completions, completion_ids):
            text = completion if isinstance(completion, str) else completion[0]["content"]
            finished = ids[-1] == tokenizer.eos_token_id
            values.append(task.reward(problems[i], text, finished))
        return values

    micro_batch = knobs.get("micro_batch", knobs["batch_size"])
    arguments = GRPOConfig(
        str(folder),
        max_steps=knobs["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=knobs["batch_size"] // micro_batch,
        num_generations=knobs["attempts"],
        max_completion_length=knobs["max_new_tokens"],
        learning_rate=knobs["lr"],
        warmup_steps=knobs["warmup_steps"],
        seed=knobs["seed"],
        save_steps=knobs["save_every"],
        temperature=knobs.get("temperature", 1.0),
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
        train_dataset=Dataset.from_dict(dict(prompt=prompts, number=range(len(prompts)))),
        processing_class=tokenizer,
        callbacks=[watch(curve, knobs["batch_size"])],
    )
    trainer.train()
    if knobs["task"] in SCORED:
        held_out = problems_of("test", knobs)[:PROBLEMS]
        run_scores = scores(folder, knobs["model"], held_out, knobs.get("temperature", 1.0))
    else:
        run_scores = sampled(folder, knobs)
    Path(file).write_text(json.dumps(dict(curve=curve, scores=run_scores)))


def sampled(folder, knobs):
    """[[version, score]] of the base model and of TRL's checkpoints, sampled by Transformers.

    The problems and the number of attempts are those of a run's own evaluations.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    task = cfg.load_task(knobs["task"])
    problems = problems_of("test", knobs)
    tokenizer = AutoTokenizer.from_pretrained(knobs["model"], padding_side="left")
    chats = [[dict(role="user", content=problem["prompt"])] for problem in problems]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    models = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*")}
    version_scores = []
    for version, path in sorted((models | {0: knobs["model"]}).items()):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        torch.manual_seed(knobs["seed"])
        ids = model.generate(
            **prompts | dict(do_sample=True, top_p=1.0, top_k=0),
            temperature=knobs["eval_temperature"],
            max_new_tokens=knobs["max_new_tokens"],
            num_return_sequences=knobs["eval_attempts"],
        )[:, prompts["input_ids"].shape[1] :]
        total = 0.0
        for i, text in enumerate(tokenizer.batch_decode(ids, skip_special_tokens=True)):
            finished = tokenizer.eos_token_id in ids[i]
            total += task.reward(problems[i // knobs["eval_attempts"]], text, finished) == 1
        version_scores.append([version, total / len(ids)])
    return version_scores


def one_run(name, knobs, port, preset):
    """A run of the pipeline, or of TRL, whose knobs name no engines."""
    if "engines" in knobs:
        return runs.one_run(name, knobs, port, preset)
    file = WORK / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    # A daemon could not start the process in which task gym makes its problems
    process = spawn.Process(target=train_trl, args=(knobs, str(file)))
    process.start()
    try:
        process.join(LONGEST)
    finally:
        process.kill()
        process.join()
    if process.exitcode != 0:
        sys.exit(
            f"bench/against_trl.py: TRL ended with exit code {process.exitcode} (None: it took "
            f"more than {LONGEST} s). Its messages are above. If a package is missing, run "
            "pip install -r bench/requirements.txt"
        )
    return json.loads(file.read_text())


def main(argv=None):
    p = runs.run_parser(__doc__, seeds=8, port=8970)
    p.add_argument("--steps", type=int, default=64)
    p.add_argument(
        "--max_new_tokens", type=int, help="default: that of bench/runs.py or the preset"
    )
    p.add_argument("--preset", choices=PRESETS, default="toy")
    a = p.parse_args(argv)
    name = "against-trl"
    if a.max_new_tokens:
        name += f"-{a.max_new_tokens}"
    if a.preset == "countup":
        os.environ.update(runs.BUSY_WAIT)
    if a.preset == "toy":
        runs.make_model()
    else:
        name += f"-{a.preset}"
        prepare.bring_model(cfg.SMOL["model"], cfg.SMOL["task"])
    common = PRESETS[a.preset] | dict(steps=a.steps)
    if a.max_new_tokens:
        common |= dict(max_new_tokens=a.max_new_tokens)
    if a.quick:
        common |= QUICK
    settings = {
        "pipeline": common,
        "trl": {name: common[name] for name in TRL_KNOBS if name in common},
    }
    if a.preset in MICRO_BATCH:
        settings["trl"]["micro_batch"] = MICRO_BATCH[a.preset]
    start = functools.partial(one_run, port=a.port, preset=a.preset)
    by_setting, path = runs.run_all(a, name, settings, start)
    compare.report(by_setting, path)


if __name__ == "__main__":
    main()

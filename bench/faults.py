"""Which silent faults do the doctor and a run's own guards find? Each one put into a copy of the sources, by a few changed words.

    python bench/faults.py [--only "mask shifted,stale prefix"] [--steps 20] [--port 8940]

Every fault: `bash run.sh doctor toy` (or what the fault needs), and a run of 20 steps whose alarms and end are looked at.
`clean`, the sources as they are, on three seeds, must raise nothing. Prints a table and leaves bench/results/faults.json.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import WORK, copy_sources, measured, parser, result_file, table
from tools import report

# name: (file, words, what they become, knobs that show it)
FAULTS = {
    "clean": (None, None, None, ""),
    "clean seed 1": (None, None, None, "--seed 1"),
    "clean seed 2": (None, None, None, "--seed 2"),
    "clean guess": (
        None,
        None,
        None,
        "--task guess --max_new_tokens 90 --max_model_len 256 --row_tokens 1024",
    ),
    "clean two engines": (None, None, None, "--engines 2"),
    "update skipped in one engine": (
        "plumbing/engine.py",
        "        if inbox.plan:\n            inbox.plan.swap()\n",
        "        if self.rank == 2:\n            return\n        if inbox.plan:\n            inbox.plan.swap()\n",
        "--engines 2",
    ),
    "update skipped in one worker": (
        "plumbing/engine.py",
        "        if inbox.plan:\n            inbox.plan.swap()\n",
        "        if self.rank == 2:\n            return\n        if inbox.plan:\n            inbox.plan.swap()\n",
        "--tensor_parallel 2",
    ),
    "temperature of the engine": (
        "plumbing/client.py",
        "            temperature=temperature,\n",
        "            temperature=0.8 * temperature,\n",
        "",
    ),
    "temperature of the trainer": (
        "train.py",
        '    temperature = batch["temperature"][sequence_ids]\n',
        '    temperature = 0.8 * batch["temperature"][sequence_ids]\n',
        "",
    ),
    "top-k of the engine": (
        "plumbing/client.py",
        "            temperature=temperature,\n",
        "            temperature=temperature,\n            top_k=3,\n",
        "",
    ),
    "raw logprobs": (
        "plumbing/launch.py",
        "--logprobs-mode processed_logprobs",
        "--logprobs-mode raw_logprobs",
        "--temperature 0.8",
    ),
    "versions off by one": (
        "plumbing/engine.py",
        "            engine.update_weight_version(version),\n",
        "            engine.update_weight_version(str(max(int(version) - 1, 0))),\n",
        "",
    ),
    "stale prefix": (
        "plumbing/generate.py",
        '    salt = request if order.cache_salt is None else f"{group}/{order.cache_salt}"\n',
        '    salt = "0"\n',
        "--task guess --max_new_tokens 90 --max_model_len 256 --row_tokens 1024",
    ),
    "tied head not updated": (
        "plumbing/plan.py",
        "        for layer, ready in zip(self.packed, self.ready):\n",
        "        for layer, ready in list(zip(self.packed, self.ready))[:-1]:\n",
        "",
    ),
    "mask shifted": (
        "plumbing/samples.py",
        "        mask = np.array(self.mask, bool)\n",
        "        mask = np.roll(np.array(self.mask, bool), -1)\n        mask[0] = False\n",
        "",
    ),
    "mask shifted in the trainer": (
        "train.py",
        '    mask = b["mask"] & ~late  # [T] bool: tokens the engine sampled, and recently enough\n',
        '    mask = b["mask"].roll(-1) & b["mask"] & ~late\n',
        "",
    ),
    "stop token untrained": (
        "plumbing/samples.py",
        "        mask = np.array(self.mask, bool)\n",
        "        mask = np.array(self.mask, bool)\n        mask[-1] = False\n",
        "",
    ),
    "separator lost between turns": (
        "plumbing/prompts.py",
        '        return self.tokenizer(text, add_special_tokens=False)["input_ids"]\n',
        '        return self.tokenizer(text.strip(), add_special_tokens=False)["input_ids"]\n',
        "--task guess --max_new_tokens 90 --max_model_len 256 --row_tokens 1024",
    ),
    "advantages with the wrong sign": (
        "preprocess.py",
        '            sample["advantage"] = advantage\n',
        '            sample["advantage"] = -advantage\n',
        "",
    ),
    "advantages of the neighbour": (
        "preprocess.py",
        "        for sample, advantage in zip(samples, of_group):\n",
        "        for sample, advantage in zip(samples, np.roll(of_group, 1)):\n",
        "",
    ),
    "loss divided twice": (
        "train.py",
        '            p.grad /= tokens if config.normalizer == "tokens" else samples\n',
        "            p.grad /= 2 * samples\n",
        "",
    ),
    "reference of other weights": (
        "preprocess.py",
        "    model = load_model(config, getattr(torch, config.dtype)).to(device).eval()\n",
        "    model = load_model(config, getattr(torch, config.dtype)).to(device).eval()\n"
        "    with torch.no_grad():\n        for p in model.parameters():\n            p.mul_(1.01)\n",
        "--kl_coef 0.01",
    ),
    "optimizer state lost on resume": (
        "plumbing/checkpoints.py",
        "    # absent if there are more ranks than before\n",
        "    for optimizer in optimizers:\n        optimizer.state.clear()\n",
        "",
    ),
    "one seed for all requests": (
        "plumbing/client.py",
        "            seed=seed,\n",
        "            seed=0,\n",
        "",
    ),
    "one seed for all engines": (
        "plumbing/launch.py",
        '            "--seed": c.seed + i,\n',
        '            "--seed": c.seed,\n',
        "--engines 2",
    ),
    "problems repeated after resume": (
        "actor.py",
        "        sampler = Sampler(problems, cfg.task_weights(c.task), c.seed, saved)\n",
        "        sampler = Sampler(problems, cfg.task_weights(c.task), c.seed, None)\n",
        "",
    ),
    "reward arguments swapped": (
        "actor.py",
        "        verdict = await self.sandbox.score(task, problem, text, finished)\n",
        '        verdict = await self.sandbox.score(task, problem | {"answer": text}, problem["answer"] * 2, finished)\n',
        "",
    ),
    "rewards of another problem": (
        "actor.py",
        "        verdict = await self.sandbox.score(task, problem, text, finished)\n",
        "        self.last, problem = problem, getattr(self, 'last', problem)\n"
        "        verdict = await self.sandbox.score(task, problem, text, finished)\n",
        "",
    ),
    "evaluation on training problems": (
        "tasks/toy.py",
        '    if split == "test":\n        return test\n',
        '    if split == "test":\n        return problems("train", seed)[:1000]\n',
        "",
    ),
}


def copy_with(called, fault):
    """The sources in out/bench/faults/<called>, with the fault; that folder. RuntimeError if its words are not there once."""
    folder = copy_sources(WORK / "faults" / called.replace(" ", "-"))
    name, words, become, _ = fault
    if name:
        text = (folder / name).read_text()
        if text.count(words) != 1:
            raise RuntimeError(f"faults: {name} has {words!r} {text.count(words)} times")
        (folder / name).write_text(text.replace(words, become))
    return folder


def run(folder, arguments, log):
    """`bash run.sh ...` there: (exit code, its output)."""
    command = ["bash", "run.sh", *arguments]
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    path = folder / "out" / log
    with open(path, "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            code = process.wait()
        finally:
            # whoever ends this ends the run
            process.terminate()
            process.wait()
    return code, path.read_text()


def why(said):
    """A stage's error, or what went before the end, from what a run has said."""
    errors = re.findall(r"Error: (\w+: .{0,100})", said)
    lines = [line for line in said.strip().splitlines() if "run.sh:" not in line]
    return errors[-1] if errors else lines[-1].strip()[:100]


def by_doctor(folder, knobs):
    """{doctor: checks that FAIL, code, seconds} of the doctor there."""
    start = time.monotonic()
    code, said = run(folder, ["doctor", "toy", *knobs], "doctor.log")
    saved = folder / "out" / "doctor-toy" / "doctor.json"
    if saved.exists():
        findings = json.loads(saved.read_text())["findings"]
        failed = [f["check"] for f in findings if f["ok"] is False]
    else:
        # its run ended before there was anything to examine
        failed = ["its run ended: " + why(said)]
    return dict(doctor=failed, code=code, seconds=time.monotonic() - start)


def by_guards(folder, knobs, steps):
    """{guards: [(what was said, step)], and why the run ended if it did} of a run there."""
    knobs = [*knobs, "--steps", str(steps), "--eval_every", "0", "--eval_problems", "8"]
    code, said = run(folder, ["toy", *knobs, "--run", "guards"], "guards.log")
    done = alarms = []
    if (folder / "out" / "guards" / "metrics.jsonl").exists():
        done, alarms = report.lines_with(folder / "out" / "guards", "step", "alarm")
    last = max((line["step"] for line in done), default=0)
    found = [(line["alarm"][:60], line["version"]) for line in alarms]
    if code:
        found.append(("it ended: " + why(said), last))
    return dict(guards=found)


def look(name, steps, port):
    """What the doctor and a run say of a fault."""
    fault = FAULTS[name]
    folder = copy_with(name, fault)
    knobs = [*fault[3].split(), "--port", str(port)]
    return by_doctor(folder, knobs) | by_guards(folder, knobs, steps)


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--only", help="names, with commas between them")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--port", type=int, default=8940)
    p.add_argument("--plot", action="store_true", help="no runs: what is there")
    a = p.parse_args(argv)
    names = a.only.split(",") if a.only else list(FAULTS)
    # a list, as it is when read back
    wanted = {name: dict(fault=list(FAULTS[name]), steps=a.steps) for name in names}

    def measure(name, _):
        found = look(name, a.steps, a.port)
        print(f"{name}: doctor {found['doctor']}, guards {found['guards']}", flush=True)
        return found

    results = measured(result_file(a, "faults"), wanted, None if a.plot else measure, True)
    rows = []
    for name, found in results.items():
        guards = [f"{words} (step {step})" for words, step in found["guards"]]
        rows.append(
            [
                name,
                "; ".join(found["doctor"]) or "-",
                "; ".join(guards) or "-",
                f"{found['seconds'] / 60:.1f}",
            ]
        )
    table(["fault", "doctor", "guards of a run", "min"], rows)


if __name__ == "__main__":
    main()

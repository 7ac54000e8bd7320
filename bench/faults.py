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
from tools.status import alarms

GUESS = "--task guess --max_new_tokens 90 --max_model_len 256 --row_tokens 1024"
SWAP = "        self.plan.swap()\n"
SKIP_SWAP = "        if self.rank != 2:\n            self.plan.swap()\n"
MASK = "mask = np.array(self.mask, bool)\n"
SCORE = "verdict = await self.sandbox.score(task, problem, completion, finished)"
REFERENCE = "reference = load_sharded(config, getattr(torch, config.dtype), device, world)\n"
RESTORE = "optim_state_dict=moments)\n"
SAMPLER = "Sampler(problems, cfg.task_weights(c.task), c.seed, saved)"
TEMPERATURE = "temperature=temperature"
# name: (file, words, what they become, knobs that show it, if any)
FAULTS = {
    "clean": ("", "", ""),
    "clean seed 1": ("", "", "", "--seed 1"),
    "clean seed 2": ("", "", "", "--seed 2"),
    "clean guess": ("", "", "", GUESS),
    "clean two engines": ("", "", "", "--engines 2"),
    "update skipped in one engine": ("plumbing/engine.py", SWAP, SKIP_SWAP, "--engines 2"),
    "update skipped in one worker": ("plumbing/engine.py", SWAP, SKIP_SWAP, "--tensor_parallel 2"),
    "temperature of the actor": (
        "actor.py",
        "= self.config.temperature",
        "= 0.8 * self.config.temperature",
    ),
    "temperature of the engine": (
        "plumbing/client.py",
        TEMPERATURE,
        "temperature=0.8 * temperature",
    ),
    "temperature of the trainer": ("train.py", "positions, batch", "positions, 0.8 * batch"),
    "top-k of the engine": ("plumbing/client.py", TEMPERATURE, TEMPERATURE + ", top_k=3"),
    "raw logprobs": (
        "plumbing/launch.py",
        "processed_logprobs",
        "raw_logprobs",
        "--temperature 0.8",
    ),
    "versions off by one": (
        "plumbing/engine.py",
        "engine.update_weight_version(version)",
        "engine.update_weight_version(str(max(int(version) - 1, 0)))",
    ),
    "stale prefix": (
        "plumbing/engine.py",
        'request_id if request.cache_salt is None else f"{group}/{request.cache_salt}"',
        '"0"',
        GUESS,
    ),
    "tied head not updated": (
        "plumbing/plan.py",
        "zip(self.packed, self.ready)",
        "list(zip(self.packed, self.ready))[:-1]",
    ),
    "mask shifted": (
        "plumbing/samples.py",
        MASK,
        MASK + "        mask = np.roll(mask, -1)\n        mask[0] = False\n",
    ),
    "mask shifted in the trainer": (
        "train.py",
        'mask = b["mask"] & ~late',
        'mask = b["mask"].roll(-1) & b["mask"] & ~late',
    ),
    "stop token untrained": ("plumbing/samples.py", MASK, MASK + "        mask[-1] = False\n"),
    "separator lost between turns": (
        "plumbing/problems.py",
        "tokenizer(text, ",
        "tokenizer(text.strip(), ",
        GUESS,
    ),
    "advantages with the wrong sign": ("preprocess.py", "= advantage\n", "= -advantage\n"),
    "advantages of the neighbour": ("preprocess.py", ", of_group)", ", np.roll(of_group, 1))"),
    "loss divided twice": ("train.py", "p.grad /= max(n, 1)", "p.grad /= 2 * max(n, 1)"),
    "reference of other weights": (
        "train.py",
        REFERENCE,
        REFERENCE + "        for p in reference.parameters():\n            p.data.mul_(1.01)\n",
        "--kl_coef 0.01",
    ),
    "optimizer state lost on resume": (
        "plumbing/checkpoints.py",
        RESTORE,
        RESTORE + "    for optimizer in optimizers:\n        optimizer.state.clear()\n",
    ),
    "one seed for all requests": ("plumbing/client.py", "seed=seed)", "seed=0)"),
    "one seed for all engines": ("plumbing/launch.py", ": c.seed + i", ": c.seed", "--engines 2"),
    "problems repeated after resume": ("actor.py", SAMPLER, SAMPLER.replace("saved", "None")),
    "reward arguments swapped": (
        "actor.py",
        "problem, completion, finished)",
        'problem | {"answer": completion}, problem["answer"] * 2, finished)',
    ),
    "rewards of another problem": (
        "actor.py",
        SCORE,
        "self.last, problem = problem, getattr(self, 'last', problem)\n        " + SCORE,
    ),
    "evaluation on training problems": (
        "tasks/toy.py",
        "return test\n",
        'return problems("train", seed)[:1000]\n',
    ),
}


def copy_with(name, fault):
    """The sources in out/bench/faults/<name>, with the fault; that folder. RuntimeError if its words are not there once."""
    folder = copy_sources(WORK / "faults" / name.replace(" ", "-"))
    file, words, become, *_ = fault
    if file:
        text = (folder / file).read_text()
        if text.count(words) != 1:
            raise RuntimeError(f"faults: {file} has {words!r} {text.count(words)} times")
        (folder / file).write_text(text.replace(words, become))
    return folder


def run(folder, arguments):
    """`bash run.sh ...` there: (exit code, what it printed)."""
    path = folder / "out" / f"{arguments[0]}.log"
    command = ["bash", "run.sh", *arguments]
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    with open(path, "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            code = process.wait()
        finally:
            # whoever ends this ends the run
            process.terminate()
            process.wait()
    return code, path.read_text()


def reason(printed):
    """A stage's error, or what went before the end, from what a run has printed."""
    errors = re.findall(r"Error: (\w+: .{0,100})", printed)
    lines = [x for x in printed.strip().splitlines() if not x.startswith(("run.sh:", "doctor:"))]
    return errors[-1] if errors else lines[-1].strip()[:100]


def try_out(name, steps, port):
    """{doctor: rows that FAIL, guards: [(what was said, step)] of a run of so many steps, seconds of the doctor}."""
    folder = copy_with(name, FAULTS[name])
    knobs = [*" ".join(FAULTS[name][3:]).split(), "--port", str(port)]
    start = time.monotonic()
    _, printed = run(folder, ["doctor", "toy", *knobs])
    seconds = time.monotonic() - start
    saved = folder / "out" / "doctor-toy" / "doctor.json"
    if saved.exists():
        findings = json.loads(saved.read_text())["findings"]
        failed = [row["check"] for row in findings if row["ok"] is False]
    else:
        failed = ["its run ended: " + reason(printed)]
    own = ["--run", "guards", "--steps", str(steps), "--eval_every", "0", "--eval_problems", "8"]
    code, printed = run(folder, ["toy", *knobs, *own])
    done = []
    if (folder / "out" / "guards" / "metrics.jsonl").exists():
        [done] = report.read(folder / "out" / "guards", "step")
    guards = [(words[:60], version) for version, words in alarms(done)]
    if code:
        last = max((line["step"] for line in done), default=0)
        guards.append(("it ended: " + reason(printed), last))
    return dict(doctor=failed, guards=guards, seconds=seconds)


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
        found = try_out(name, a.steps, a.port)
        print(f"{name}: doctor {found['doctor']}, guards {found['guards']}", flush=True)
        return found

    results = measured(result_file(a, "faults"), wanted, None if a.plot else measure, True)
    rows = []
    for name, found in results.items():
        guards = [f"{words} (step {step})" for words, step in found["guards"]]
        cells = ["; ".join(found["doctor"]) or "-", "; ".join(guards) or "-"]
        rows.append([name, *cells, f"{found['seconds'] / 60:.1f}"])
    table(["fault", "doctor", "guards of a run", "min"], rows)


if __name__ == "__main__":
    main()

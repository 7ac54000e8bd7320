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

GUESS = "--task guess --max_new_tokens 90 --max_model_len 256 --row_tokens 1024 --prefix_caching on"
KL = "--kl_coef 0.1"
CHECKPOINTS = "plumbing/checkpoints.py"
CLIENT = "plumbing/client.py"
ENGINE = "plumbing/engine.py"
LEDGER = "plumbing/ledger.py"
PROBLEMS = "plumbing/problems.py"
SAMPLES = "plumbing/samples.py"
RESTORE = "optim_state_dict=moments)\n"
MOMENTS = 'for s in optimizers[0].state.values() for x in (s["exp_avg"], s["exp_avg_sq"])'
# name: (file, words, what they become, knobs that show it, if any)
FAULTS = {
    "clean": ("", "", ""),
    "clean seed 1": ("", "", "", "--seed 1"),
    "clean guess": ("", "", "", GUESS),
    "clean two engines": ("", "", "", "--engines 2"),
    # ---- what engines sample with
    "update skipped in one engine": (
        ENGINE,
        "self.plan.swap()",
        "self.rank == 2 or self.plan.swap()",
        "--engines 2",
    ),
    "every second version not sent": ("train.py", "not g or version % g", "version % 2"),
    "tied head not updated": ("plumbing/plan.py", "self.packed, self", "self.packed[:-1], self"),
    "versions off by one": (ENGINE, "version(version)", "version(str(max(int(version) - 1, 0)))"),
    "stale prefix": (ENGINE, "{group}/{request.cache_salt}", "0", GUESS),
    "stale KV cache": (ENGINE, '=order["recompute_kv"]', "=False", "--recompute_kv True"),
    "temperature of the actor": ("actor.py", "= self.config.temp", "= 0.8 * self.config.temp"),
    "temperature of evaluations": ("actor.py", "self.config.eval_t", "0.8 * self.config.eval_t"),
    "temperature of the engine": (CLIENT, "=temperature", "=0.8 * temperature"),
    "top-k of the engine": (CLIENT, "=temperature", "=temperature, top_k=3"),
    "raw logprobs": ("plumbing/launch.py", "processed_log", "raw_log", "--temperature 0.8"),
    "one seed for all requests": (CLIENT, "seed=seed)", "seed=0)"),
    # ---- which problems, what is sampled, what it is worth
    "gate wider than max_lag": ("actor.py", "config.max_lag + 1", "config.max_lag + 2"),
    "sampler of 32 problems": ("actor.py", "))[j]", "))[j % 32]"),
    "problems repeated after resume": ("actor.py", "c.seed, saved)", "c.seed, None)"),
    "problems of other numbers": ("actor.py", "problems[task][i]", "problems[task][i - 1]"),
    "in flight lost at a stop": (LEDGER, "deque(sorted(self.pending))", "deque()"),
    "in flight becomes others": (LEDGER, "tuple(x) for", "sampler.next() for"),
    "mask shifted": (SAMPLES, "(self.mask, bool)", "([*self.mask[1:], False])"),
    "stop token untrained": (SAMPLES, "(self.mask, bool)", "([*self.mask[:-1], False])"),
    "stop token too many": (PROBLEMS, "token_id} - {", "token_id, 10} - {"),
    "separator lost between turns": (PROBLEMS, "(text, add", "(text.strip(), add", GUESS),
    "rewards of another problem": (
        "actor.py",
        "score(task, problem, completion,",
        "score(task, self.test_problems[task][0], completion,",
    ),
    "sign of the length penalty": (
        "actor.py",
        "return -max(",
        "return max(",
        "--overlong_buffer 20",
    ),
    "evaluation on training problems": ("tasks/toy.py", "return test", 'return problems("train")'),
    "scores are of finished answers": ("actor.py", '(sample["success"])', '(sample["finished"])'),
    # ---- what is trained
    "threshold of no_signal": ("preprocess.py", "> 1e-6", "> 0.8", "--no_signal drop"),
    "advantages with the wrong sign": ("preprocess.py", "= advantage\n", "= -advantage\n"),
    "advantages of the neighbour": ("preprocess.py", ", of_group)", ", np.roll(of_group, 1))"),
    "mask shifted in the trainer": ("train.py", "& ~late", '& ~late & b["mask"].roll(-1)'),
    "late tokens a step early": ("train.py", "(lag > config", "(lag >= config", "--late mask"),
    "temperature of the trainer": ("train.py", "positions, batch", "positions, 0.8 * batch"),
    "weights of 1": ("train.py", "w = log_w.exp()\n", "w = torch.ones_like(log_w)\n"),
    "weights clipped at 1": ("train.py", "w.clamp(max=high)", "w.clamp(max=1.0)"),
    "wrong sign of KL": ("train.py", "+ config.kl_coef", "- config.kl_coef", KL),
    "reference of others": ("train.py", "(*inputs)[0] if", "(*inputs)[0] * 0.9 if", KL),
    "loss divided twice": ("train.py", "p.grad /= max(n, 1)", "p.grad /= 2 * max(n, 1)"),
    "gradients stay": ("train.py", "        optimizer.zero_grad()\n", ""),
    "clipping off": ("train.py", "config.max_grad_norm", "1e9"),
    "schedule off by a factor": ("train.py", "0.9 * step / config", "0.45 * step / config"),
    "every second update skipped": ("train.py", "(grad_norm):", "(grad_norm) and version % 2:"),
    "betas of torch": ("train.py", "betas=tuple(config.betas), ", ""),
    "vectors not trained": ("train.py", "if p.dim() <= 1]", "if p.dim() < 1]"),
    "moments lost on resume": (CHECKPOINTS, RESTORE, f"{RESTORE}    [x.zero_() {MOMENTS}]\n"),
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

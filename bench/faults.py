"""Which silent faults do the doctor and a run's own guards find? Each one put into a copy of the sources, by a few changed words.

    python bench/faults.py [--only "weights of 1,clipping off"] [--steps 20 | 0] [--port 8940]

Every fault: `bash run.sh doctor toy` (or what the fault needs), and a run of 20 steps whose alarms and end are looked at.
`clean`, the sources as they are, must raise nothing. Prints a table and leaves bench/results/faults.json.
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
# a preset of its own
AGENT = "agent"
KL, PENALTY, CUT = "--kl_coef 0.1", "--overlong_buffer 20", "--max_new_tokens 12"
ADAPTERS, IN_16_BITS = "--lora_rank 8", "--lora_rank 8 --dtype bfloat16"
TAUGHT = "--teacher self"
LORA, BASE = "plumbing/lora.py", "(torch.detach, [x.weight])"
UNROUNDED = "linear(x, self.weight, self.bias) + self.scale * (x @ self.lora_A.T) @ self.lora_B.T"
CHECKPOINTS, CLIENT, LEDGER = "plumbing/checkpoints.py", "plumbing/client.py", "plumbing/ledger.py"
PROBLEMS, ENDPOINT, EPISODE = (f"plumbing/{x}.py" for x in ("problems", "endpoint", "episode"))
TURN = "answer = await attempt.generate(prompt, limit)"
A_TURN = "join([s for s in samples for _ in s['completion']])"
ANEW = "        segment = __import__('copy').deepcopy(segment)\n"
FEWER = "s >= self.config.groups_per_step - 1"
AGAIN = "zers, sums, version % 3, config)\n            "
SHARES, MIXTURE = "task, share in zip(shares, [*shares.values()][::-1])}", "--task toy:0.8,tail:0.2"
RESTORE = "optim_state_dict=moments)\n"
MOMENTS = 'for s in optimizers[0].state.values() for x in (s["exp_avg"], s["exp_avg_sq"])'
# name: (file, words, what they become, knobs that show it, if any)
FAULTS = {
    "clean": ("", "", ""),
    "clean guess": ("", "", "", GUESS),
    "clean two engines": ("", "", "", "--engines 2"),
    "clean agent": ("", "", "", AGENT),
    # ---- an audit's
    "weights of 1": ("train.py", "w = log_w.exp()\n", "w = torch.ones_like(log_w)\n"),
    "clipping off": ("train.py", "config.max_grad_norm", "1e9"),
    "schedule off by a factor": ("train.py", "0.9 * step / config", "0.45 * step / config"),
    "gate wider than max_lag": ("actor.py", "config.max_lag + 1", "config.max_lag + 2"),
    "sampler of 32 problems": ("actor.py", "))[j]", "))[j % 32]"),
    "temperature of evaluations": ("actor.py", "self.config.eval_t", "0.8 * self.config.eval_t"),
    "in flight lost at a stop": (LEDGER, "deque(sorted(self.pending))", "deque()"),
    "wrong sign of KL": ("train.py", "+ config.kl_coef", "- config.kl_coef", KL),
    "every second update skipped": ("train.py", "(grad_norm):", "(grad_norm) and version % 2:"),
    "moments lost on resume": (CHECKPOINTS, RESTORE, f"{RESTORE}    [x.zero_() {MOMENTS}]\n"),
    "stop token too many": (PROBLEMS, "token_id} - {", "token_id, 10} - {"),
    "evaluation on training problems": ("tasks/toy.py", "return test", 'return problems("train")'),
    "sign of the length penalty": ("actor.py", "return -min(", "return min(", PENALTY),
    "threshold of no_signal": ("preprocess.py", "> 1e-6", "> 0.8", "--no_signal drop"),
    # ---- devised when the doctor was finished: those that it missed, and one; all are in results/faults.json
    "no weight decay": ("train.py", "config.weight_decay", "0.0", "--weight_decay 0.1"),
    "leave-one-out without its factor": ("preprocess.py", "* len(r) / (len(r) - 1)", ""),
    "evaluations of one seed": ("actor.py", ".seed, i, k)", ".seed, i)", "--eval_attempts 4"),
    "evaluations of half the problems": (
        "actor.py",
        "config.eval_problems",
        "config.eval_problems // 2",
    ),
    "epsilon of Adam": (
        "train.py",
        "betas=tuple(config.betas), fused",
        "eps=1e-3, betas=tuple(config.betas), fused",
    ),
    "vectors at a tenth of the rate": ("train.py", "lr_scale},\n    ]", "lr_scale / 10},\n    ]"),
    "cut-off attempts fail": (
        "actor.py",
        "sample is not None:\n                samples",
        'sample is not None and sample["finished"]:\n                samples',
        CUT,
    ),
    "ESS of clipped weights": ("train.py", "log_w.exp() * mask", "log_w.exp().clamp(max=1) * mask"),
    "half of the reward logged": ("train.py", 'b["reward"].sum()', '0.5 * b["reward"].sum()'),
    "epochs in one order": ("actor.py", "{what}/{epoch}", "{what}"),
    "success whatever the reward": (
        "plumbing/sandbox.py",
        "value >= getattr(self",
        "value > -1 or getattr(self",
    ),
    # ---- devised when what that had missed was mended
    "head rounded": ("train.py", "(hidden, weight)  #", "(hidden, weight).bfloat16().float()  #"),
    "reference is the policy": ("train.py", "()(reference.tok", "()(model.tok", KL),
    "clip range of another": ("config.py", '5.0),\n    "ppo', '1.0),\n    "ppo'),
    "steps of fewer groups": ("preprocess.py", "s == self.config.groups_per_step", FEWER),
    "late tokens masked though kept": ("train.py", '.late == "mask"', '.late != "wait"'),
    "warm-up at a continuation": ("train.py", "zers, sums, version, config)\n            ", AGAIN),
    "logprobs cut at -3": (CLIENT, "min(x, 0.0)", "max(min(x, 0.0), -3.0)"),
    "newest groups first": (
        "preprocess.py",
        "(waiting.groups.popleft())",
        "(waiting.groups.pop())",
    ),
    "scale of attention": ("plumbing/model.py", "seen, scale=", "seen, scale=0.95 * "),
    "threshold of success": ("plumbing/sandbox.py", '"SUCCESS", 1.0)', '"SUCCES", 1.0)', GUESS),
    "shares of other tasks": ("actor.py", "task, share in shares.items()}", SHARES, MIXTURE),
    "lag one too high": ("train.py", "lag = version - b", "lag = 1 + version - b"),
    # ---- of agents
    "separator lost": (ENDPOINT, "exact + separator +", "exact +", AGENT),
    "retried turn twice": (ENDPOINT, TURN, f"{TURN}\n        {TURN}", AGENT),
    "shared tokens twice": (EPISODE, "        if not segment.tokens:\n    ", ANEW, AGENT),
    "constrained sample": (CLIENT, "seed=seed)", "seed=seed, top_k=5)", AGENT),
    "reward per turn": ("actor.py", "join(samples)", A_TURN, AGENT),
    # ---- of adapters and teachers
    "base weights are served": (LORA, "(x.merged, [x.weight, x.lora_A, x.lora_B])", BASE, ADAPTERS),
    "merge not rounded": (LORA, "linear(x, weight, self.bias)", UNROUNDED, IN_16_BITS),
    "reference has adapters": (LORA, "Adapted.on = False", "Adapted.on = True", f"{ADAPTERS} {KL}"),
    "scale of adapters": (LORA, "alpha / config.lora_rank", "alpha", f"{ADAPTERS} --lora_alpha 8"),
    "teacher left out": ("train.py", "config.teacher_coef * log_ratio", "0.0 * log_ratio", TAUGHT),
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
    knobs = " ".join(FAULTS[name][3:]).split()
    preset = knobs.pop() if knobs == [AGENT] else "toy"
    knobs += ["--port", str(port)]
    start = time.monotonic()
    _, printed = run(folder, ["doctor", preset, *knobs])
    seconds = time.monotonic() - start
    saved = folder / "out" / f"doctor-{preset}" / "doctor.json"
    if saved.exists():
        findings = json.loads(saved.read_text())["findings"]
        failed = [row["check"] for row in findings if row["ok"] is False]
    else:
        failed = ["its run ended: " + reason(printed)]
    if not steps:
        return dict(doctor=failed, guards=[], seconds=seconds)
    own = ["--run", "guards", "--steps", str(steps), "--eval_every", "0", "--eval_problems", "8"]
    code, printed = run(folder, [preset, *knobs, *own])
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
    p.add_argument("--steps", type=int, default=20, help="0: the doctor alone")
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

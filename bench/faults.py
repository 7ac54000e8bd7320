"""Which silent faults do the doctor and a run's own guards find?

    python bench/faults.py [--only "weights of 1,clipping off"] [--steps 20 | 0] [--port 8940]

A fault is a change of a few characters in a copy of the sources. With each fault, the script runs
`bash run.sh doctor toy` (with the knobs that the fault needs), and then a run of 20 steps, whose
alarms and whose end are noted. The sources without a fault ("clean") must raise nothing. The
script prints a table and writes bench/results/faults.json.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import WORK, copy_sources, measured, parser, result_file, table
from plumbing.alarms import alarms
from tools.common import read_metrics

# Knobs may begin with a preset; without one it is the toy.
AGENT = "agent"
GUESS = "--task guess --max_new_tokens 90 --max_model_len 256 --row_tokens 1024 --prefix_caching on"


class Fault(NamedTuple):
    """In `file`, the string `old`, which is there exactly once, is replaced by `new`."""

    name: str
    # "": the sources stay as they are
    file: str
    old: str
    new: str
    # Command-line arguments of the runs that can show the fault
    knobs: str = ""

    def record(self):
        """The form in which faults.json keeps a fault: [file, old, new], and its knobs if any."""
        kept = [self.file, self.old, self.new]
        if self.knobs:
            kept.append(self.knobs)
        return kept


ALL_FAULTS = [
    # ---- The sources as they are
    Fault(name="clean", file="", old="", new=""),
    Fault(name="clean guess", file="", old="", new="", knobs=GUESS),
    Fault(name="clean two engines", file="", old="", new="", knobs="--engines 2"),
    Fault(name="clean agent", file="", old="", new="", knobs=AGENT),
    Fault(name="clean hold", file="", old="", new="", knobs="--late hold"),
    Fault(name="clean adapters", file="", old="", new="", knobs="--lora_rank 8"),
    Fault(name="clean experts", file="", old="", new="", knobs="--family qwen3_moe --rows padded"),
    # ---- The faults of an audit
    Fault(
        name="weights of 1",
        file="train.py",
        old="w = log_w.exp()\n",
        new="w = torch.ones_like(log_w)\n",
    ),
    Fault(
        name="clipping off",
        file="train.py",
        old="config.max_grad_norm",
        new="1e9",
    ),
    Fault(
        name="schedule off by a factor",
        file="train.py",
        old="0.9 * step / config",
        new="0.45 * step / config",
    ),
    Fault(
        name="gate wider than max_lag",
        file="actor.py",
        old="config.max_lag + 1",
        new="config.max_lag + 2",
    ),
    Fault(
        name="sampler of 32 problems",
        file="actor.py",
        old="order[position_in_epoch]",
        new="order[position_in_epoch % 32]",
    ),
    Fault(
        name="temperature of evaluations",
        file="actor.py",
        old="self.config.eval_t",
        new="0.8 * self.config.eval_t",
    ),
    Fault(
        name="in flight lost at a stop",
        file="plumbing/ledger.py",
        old="deque(sorted(self.pending))",
        new="deque()",
    ),
    Fault(
        name="wrong sign of KL",
        file="train.py",
        old="+ config.kl_coef",
        new="- config.kl_coef",
        knobs="--kl_coef 0.1",
    ),
    Fault(
        name="every second update skipped",
        file="train.py",
        old="(grad_norm):",
        new="(grad_norm) and version % 2:",
    ),
    Fault(
        name="moments lost on resume",
        file="plumbing/checkpoints.py",
        old="optim_state_dict=moments)\n",
        new=(
            "optim_state_dict=moments)\n"
            "    [x.zero_() for s in optimizers[0].state.values() "
            'for x in (s["exp_avg"], s["exp_avg_sq"])]\n'
        ),
    ),
    Fault(
        name="stop token too many",
        file="plumbing/problems.py",
        old="token_id} - {",
        new="token_id, 10} - {",
    ),
    Fault(
        name="evaluation on training problems",
        file="tasks/toy.py",
        old="return test",
        new='return problems("train")',
    ),
    Fault(
        name="sign of the length penalty",
        file="actor.py",
        old="return -min(",
        new="return min(",
        knobs="--overlong_buffer 20",
    ),
    Fault(
        name="threshold of no_signal",
        file="preprocess.py",
        old="> 1e-6",
        new="> 0.8",
        knobs="--no_signal drop",
    ),
    # ---- Faults devised when the doctor was finished: those that it missed, and one that it found.
    # All of them are in results/faults.json
    Fault(
        name="no weight decay",
        file="train.py",
        old="config.weight_decay",
        new="0.0",
        knobs="--weight_decay 0.1",
    ),
    Fault(
        name="leave-one-out without its factor",
        file="preprocess.py",
        old=" * n / np.maximum(n - 1, 1)",
        new="",
    ),
    Fault(
        name="evaluations of one seed",
        file="actor.py",
        old=".seed, i, k)",
        new=".seed, i)",
        knobs="--eval_attempts 4",
    ),
    Fault(
        name="evaluations of half the problems",
        file="actor.py",
        old="config.eval_problems",
        new="config.eval_problems // 2",
    ),
    Fault(
        name="epsilon of Adam",
        file="train.py",
        old="betas=tuple(config.betas), fused",
        new="eps=1e-3, betas=tuple(config.betas), fused",
    ),
    Fault(
        name="vectors at a tenth of the rate",
        file="train.py",
        old="lr_scale},\n    ]",
        new="lr_scale / 10},\n    ]",
    ),
    Fault(
        name="cut-off attempts fail",
        file="actor.py",
        old="sample is not None:\n                samples",
        new='sample is not None and sample["finished"]:\n                samples',
        knobs="--max_new_tokens 12",
    ),
    Fault(
        name="ESS of clipped weights",
        file="train.py",
        old="log_w.exp() * in_loss",
        new="log_w.exp().clamp(max=1) * in_loss",
    ),
    Fault(
        name="half of the reward logged",
        file="train.py",
        old='b["reward"].sum()',
        new='0.5 * b["reward"].sum()',
    ),
    Fault(
        name="epochs in one order",
        file="actor.py",
        old="{name}/{epoch}",
        new="{name}",
    ),
    Fault(
        name="success whatever the reward",
        file="plumbing/sandbox.py",
        old="sum(rewards) >= getattr(self",
        new="sum(rewards) > -1 or getattr(self",
    ),
    # ---- Faults devised when the ones missed before were found
    Fault(
        name="head rounded",
        file="train.py",
        old="(hidden.to(weight.dtype), weight)  #",
        new="(hidden.to(weight.dtype), weight).bfloat16().float()  #",
    ),
    Fault(
        name="reference is the policy",
        file="train.py",
        old='self.frozen["reference"].logprobs(',
        new="self.logprobs(",
        knobs="--kl_coef 0.1",
    ),
    Fault(
        name="clip range of another",
        file="config.py",
        old='5.0),\n    "ppo',
        new='1.0),\n    "ppo',
    ),
    Fault(
        name="steps of fewer groups",
        file="preprocess.py",
        old="== self.config.groups_per_step",
        new=">= self.config.groups_per_step - 1",
    ),
    Fault(
        name="late tokens masked though kept",
        file="train.py",
        old='.late == "mask"',
        new='.late != "wait"',
    ),
    Fault(
        name="warm-up at a continuation",
        file="train.py",
        old="zers, sums, version, config)\n            ",
        new="zers, sums, version % 3, config)\n            ",
    ),
    Fault(
        name="logprobs cut at -3",
        file="plumbing/client.py",
        old="min(x, 0.0)",
        new="max(min(x, 0.0), -3.0)",
    ),
    Fault(
        name="newest groups first",
        file="preprocess.py",
        old="(waiting.groups.popleft())",
        new="(waiting.groups.pop())",
    ),
    Fault(
        name="scale of attention",
        file="plumbing/model.py",
        old="visible, scale=scaling",
        new="visible, scale=0.95 * scaling",
    ),
    Fault(
        name="threshold of success",
        file="plumbing/sandbox.py",
        old='"SUCCESS", 1.0)',
        new='"SUCCES", 1.0)',
        knobs=GUESS,
    ),
    Fault(
        name="shares of other tasks",
        file="actor.py",
        old="task, share in shares.items()}",
        new="task, share in zip(shares, [*shares.values()][::-1])}",
        knobs="--task toy:0.8,tail:0.2",
    ),
    Fault(
        name="lag one too high",
        file="train.py",
        old="lag = version - b",
        new="lag = 1 + version - b",
    ),
    # ---- Faults of agents
    Fault(
        name="separator lost",
        file="plumbing/endpoint.py",
        old="exact + separator +",
        new="exact +",
        knobs=AGENT,
    ),
    Fault(
        name="retried turn twice",
        file="plumbing/endpoint.py",
        old="answer = await attempt.generate(prompt, limit)",
        new=(
            "answer = await attempt.generate(prompt, limit)\n"
            "        answer = await attempt.generate(prompt, limit)"
        ),
        knobs=AGENT,
    ),
    Fault(
        name="shared tokens twice",
        file="plumbing/episode.py",
        old="        if not segment.tokens:\n    ",
        new="        segment = __import__('copy').deepcopy(segment)\n",
        knobs=AGENT,
    ),
    Fault(
        name="constrained sample",
        file="plumbing/client.py",
        old="seed=seed)",
        new="seed=seed, top_k=5)",
        knobs=AGENT,
    ),
    Fault(
        name="reward per turn",
        file="actor.py",
        old="join(samples)",
        new="join([s for s in samples for _ in s['completion']])",
        knobs=AGENT,
    ),
    # ---- Faults of adapters
    Fault(
        name="base weights are served",
        file="plumbing/lora.py",
        old="(x.merged, [x.weight, x.lora_A, x.lora_B])",
        new="(torch.detach, [x.weight])",
        knobs="--lora_rank 8",
    ),
    Fault(
        name="merge not rounded",
        file="plumbing/lora.py",
        old="linear(x, weight, self.bias)",
        new="linear(x, self.weight, self.bias) + self.scale * (x @ self.lora_A.T) @ self.lora_B.T",
        knobs="--lora_rank 8 --dtype bfloat16",
    ),
    Fault(
        name="reference has adapters",
        file="plumbing/lora.py",
        old="Adapted.on = False",
        new="Adapted.on = True",
        knobs="--lora_rank 8 --kl_coef 0.1",
    ),
    Fault(
        name="scale of adapters",
        file="plumbing/lora.py",
        old="alpha / config.lora_rank",
        new="alpha",
        knobs="--lora_rank 8 --lora_alpha 8",
    ),
    # ---- Fresh faults, written when losses of 2026 and rewards of turns were new, by somebody who
    # had not read the doctor. Episodes and the agents' endpoint
    # Later versions go on from KV caches of equal beginnings that much older weights computed.
    Fault(
        name="prefixes of old weights",
        file="plumbing/episode.py",
        old="str(self.cache_version)",
        new="self.task",
        # Hardly a prompt of `guess` is as long as a block of the KV cache, and whole blocks alone
        # are shared. In bfloat16 rounding hides the difference.
        knobs="smol --dtype float32",
    ),
    # --max_new_tokens bounds each turn, so an attempt of many turns samples far more than allowed.
    Fault(
        name="token limit of each turn",
        file="plumbing/episode.py",
        old="config.max_new_tokens - self.sampled,",
        new="config.max_new_tokens,",
        knobs=f"{GUESS} --max_new_tokens 30",
    ),
    # A client that names no limit has its turns cut off after ten tokens, long tool calls included.
    Fault(
        name="default limit of a request",
        file="plumbing/endpoint.py",
        old='body.get("max_completion_tokens", body.get("max_tokens"))',
        new='body.get("max_completion_tokens", body.get("max_tokens", 10))',
        knobs=AGENT,
    ),
    # Only an attempt's last turn gets its advantage; the tool calls before it learn nothing.
    Fault(
        name="credit for the last turn",
        file="plumbing/samples.py",
        old="part[sampled] = 0",
        new="part[turn_ids == turn_ids.max()] = 0",
        knobs=AGENT,
    ),
    # -- Adapters
    # The adapter in a checkpoint, loaded with peft or vLLM, has a quarter of the trained change.
    Fault(
        name="alpha of the saved adapter",
        file="plumbing/lora.py",
        old="lora_alpha=config.lora_alpha,",
        new="lora_alpha=config.lora_rank,",
        knobs="--lora_rank 8",
    ),
    # Layers that have a bias (query, key and value of Qwen2) get no adapter and stay as they are.
    Fault(
        name="no adapters beside biases",
        file="plumbing/lora.py",
        old="if type(x) is torch.nn.Linear]",
        new="if type(x) is torch.nn.Linear and x.bias is None]",
        knobs="--lora_rank 8",
    ),
    # -- Rows and families
    # The keys and values of a shared prompt get the gradient of the first attempt alone.
    Fault(
        name="prefix learns from one attempt",
        file="plumbing/model.py",
        old="        value = value.index_select(2, packing.computed_index)\n",
        new=(
            "        value = value.index_select(2, packing.computed_index)\n"
            "        newest = packing.computed_index.cummax(0).values\n"
            "        is_new = newest.diff(prepend=newest[:1] - 1)[:, None] > 0\n"
            "        key, value = (torch.where(is_new, x, x.detach()) for x in (key, value))\n"
        ),
        knobs="--rows packed",
    ),
    # Logits are capped after the division by the temperature, where the engine caps them before.
    Fault(
        name="cap after the temperature",
        file="train.py",
        old="finish_logits(logits, model_config) / temperature[:, None]",
        new="finish_logits(logits / temperature[:, None], model_config)",
        knobs="--family gemma2 --temperature 0.8",
    ),
    # The experts, which are tensors of three dimensions, are in no group of the optimizer.
    Fault(
        name="experts not trained",
        file="train.py",
        old="if p.dim() > 1]",
        new="if p.dim() == 2]",
        knobs="--family qwen3_moe",
    ),
    # expert_load counts the padding of padded rows, which all goes to the same experts.
    Fault(
        name="padding in the expert load",
        file="plumbing/routing.py",
        old="to_device(device, tokens >= 0)",
        new="to_device(device, tokens >= -1)",
        knobs="--family qwen3_moe --rows padded",
    ),
    # -- Weight updates
    # --recompute_kv True is ignored: sequences in progress keep the KV cache of older weights.
    Fault(
        name="KV cache kept",
        file="plumbing/engine.py",
        old='clear_cache=order["recompute_kv"]',
        new="clear_cache=False",
        knobs="--recompute_kv True",
    ),
    # Updates never reach the engine's vectors (norms, biases): 16-bit logprobs change little by it.
    Fault(
        name="vectors not swapped",
        file="plumbing/shadow.py",
        old="torch._foreach_copy_(old, new)",
        new="torch._foreach_copy_(*([x for x in y if x.dim() > 1] for y in (old, new)))",
        knobs="--dtype bfloat16",
    ),
    # The trained weights themselves are in bfloat16, so small steps of the optimizer are lost.
    Fault(
        name="weights trained in 16 bits",
        file="train.py",
        old="dtype = compute if config.lora_rank else torch.float32",
        new="dtype = compute",
        knobs="--dtype bfloat16",
    ),
    # -- Losses and terms
    # dppo bounds ratios instead of differences of probabilities, so rare tokens are left out.
    Fault(
        name="dppo bounds the ratio",
        file="train.py",
        old="(logprobs.exp() - behavior_logprobs.exp()).abs() > high",
        new="(w - 1).abs() > high",
        knobs="--loss dppo --clip_high 0.02",
    ),
    # --lr_by_ess takes the ESS of tokens, so the rate hardly falls when samples are far off-policy.
    Fault(
        name="rate by the ESS of tokens",
        file="train.py",
        old='metrics["ess_sample"] ** 0.5',
        new='metrics["ess"] ** 0.5',
        knobs="--lr_by_ess True --max_lag 4",
    ),
    # --kl_behavior_coef changes the loss that is logged and has no gradient.
    Fault(
        name="KL to the sampler has no gradient",
        file="train.py",
        old="config.kl_behavior_coef * log_w**2",
        new="config.kl_behavior_coef * log_w.detach() ** 2",
        knobs="--kl_behavior_coef 1",
    ),
    # -- Metrics and staleness
    # by_lag puts a token whose lag is the lowest of a bucket (1, 2, 4, ...) into the one below.
    Fault(
        name="lags in the bucket below",
        file="plumbing/metrics.py",
        old='np.searchsorted(LAGS, lags, side="right")',
        new='np.searchsorted(LAGS, lags, side="left")',
    ),
    # With --late hold a step begins while later groups are sampled: their lag is mixed, not exact.
    Fault(
        name="hold begins early",
        file="preprocess.py",
        old="min(config.max_lag + 1, steps_left)",
        new="min(config.max_lag or 1, steps_left)",
        knobs="--late hold",
    ),
    # -- Elsewhere
    # Engines report logprobs at temperature 1, whatever the temperature that they sample at.
    Fault(
        name="logprobs before the temperature",
        file="plumbing/placement.py",
        old="--logprobs-mode processed_logprobs",
        new="--logprobs-mode raw_logprobs",
        knobs="--temperature 0.8",
    ),
    # With several ranks the gradient is their mean, not their sum: it shrinks with each rank.
    Fault(
        name="gradients averaged over ranks",
        file="train.py",
        old="(loss * ranks.world).backward()",
        new="loss.backward()",
        knobs="--trainers 2",
    ),
]
FAULTS = {fault.name: fault for fault in ALL_FAULTS}


def copy_with(fault):
    """Copy the sources to out/bench/faults/<name>, put the fault in; returns that folder.

    RuntimeError if the file does not have the old string exactly once.
    """
    folder = copy_sources(WORK / "faults" / fault.name.replace(" ", "-"))
    if fault.file:
        text = (folder / fault.file).read_text()
        count = text.count(fault.old)
        if count != 1:
            raise RuntimeError(
                f"fault {fault.name!r}: {fault.file} has {fault.old!r} {count} times, it must be "
                "there once: adapt the fault in bench/faults.py to today's sources"
            )
        (folder / fault.file).write_text(text.replace(fault.old, fault.new))
    return folder


def run(folder, arguments):
    """Run `bash run.sh ARGUMENTS` in the folder; returns (exit code, what it printed)."""
    log = folder / "out" / f"{arguments[0]}.log"
    command = ["bash", "run.sh", *arguments]
    environment = os.environ | {"PIPELINE_PYTHON": sys.executable}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output
        )
        try:
            code = process.wait()
        finally:
            # An interruption of this script ends the run, too
            process.terminate()
            process.wait()
    return code, log.read_text()


def reason(printed):
    """Why a run ended, from what it printed: the last error of a stage, or else the last line."""
    errors = re.findall(r"Error: (\w+: .{0,100})", printed)
    lines = [x for x in printed.strip().splitlines() if not x.startswith(("run.sh:", "doctor:"))]
    return errors[-1] if errors else lines[-1].strip()[:100]


def doctor_failures(folder, preset, knobs):
    """Run the doctor in the folder; returns the names of the checks that FAIL."""
    _, printed = run(folder, ["doctor", preset, *knobs])
    saved = folder / "out" / f"doctor-{preset}" / "doctor.json"
    if not saved.exists():
        return ["its run ended: " + reason(printed)]
    findings = json.loads(saved.read_text())["findings"]
    return [finding["check"] for finding in findings if finding["ok"] is False]


def guard_alarms(folder, preset, knobs, steps):
    """Train for so many steps; returns [(alarm, step)], an early end of the run included."""
    run_options = ["--run", "guards", "--steps", str(steps)]
    run_options += ["--eval_every", "0", "--eval_problems", "8"]
    code, printed = run(folder, [preset, *knobs, *run_options])
    lines = []
    if (folder / "out" / "guards" / "metrics.jsonl").exists():
        [lines] = read_metrics(folder / "out" / "guards", "step")
    complaints = [(alarm[:60], version) for version, alarm in alarms(lines)]
    if code:
        last_step = max((line["step"] for line in lines), default=0)
        complaints.append(("it ended: " + reason(printed), last_step))
    return complaints


def try_out(fault, steps, port):
    """Run the doctor and, unless steps is 0, a run with the fault.

    Returns a dict: doctor, the checks that FAIL; guards, [(alarm, step)] of the run; seconds, how
    long the doctor took.
    """
    folder = copy_with(fault)
    preset = "toy"
    knobs = fault.knobs.split()
    if knobs and not knobs[0].startswith("-"):
        preset = knobs.pop(0)
    knobs += ["--port", str(port)]
    start = time.monotonic()
    failed = doctor_failures(folder, preset, knobs)
    seconds = time.monotonic() - start
    guards = guard_alarms(folder, preset, knobs, steps) if steps else []
    return dict(doctor=failed, guards=guards, seconds=seconds)


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--only", help="names of faults, separated by commas")
    p.add_argument("--steps", type=int, default=20, help="steps of the run; 0: the doctor alone")
    p.add_argument("--port", type=int, default=8940)
    p.add_argument("--plot", action="store_true", help="run nothing, print the kept results")
    a = p.parse_args(argv)
    names = a.only.split(",") if a.only else list(FAULTS)
    wanted = {name: dict(fault=FAULTS[name].record(), steps=a.steps) for name in names}

    def measure(name, _):
        result = try_out(FAULTS[name], a.steps, a.port)
        print(f"{name}: doctor {result['doctor']}, guards {result['guards']}", flush=True)
        return result

    results = measured(result_file(a, "faults"), wanted, None if a.plot else measure)
    rows = []
    for name, result in results.items():
        failed = "; ".join(result["doctor"])
        guards = "; ".join(f"{alarm} (step {step})" for alarm, step in result["guards"])
        rows.append([name, failed or "-", guards or "-", f"{result['seconds'] / 60:.1f}"])
    table(["fault", "doctor", "guards of a run", "min"], rows)


if __name__ == "__main__":
    main()

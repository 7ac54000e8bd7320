"""Every knob, in one dataclass; the presets; and the checks that need no hardware.

`bash run.sh toy --steps 50 --dry_run True` checks a configuration and prints what would be started.
Nothing here imports torch: a wrong flag must be reported at once. Deliberately absent: config files
to write, nesting, interpolation. A preset is a dict below, a new knob is one line in `Config`. A
run writes its knobs to out/<run>/config.json, which all of its processes read.
"""

import contextlib
import difflib
import importlib
import json
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_type_hints

from plumbing import knobs

ROOT = Path(__file__).resolve().parent


class ConfigError(Exception):
    """A knob that cannot be used; the message is one line that says which and what to do."""


class Bounds(NamedTuple):
    """The smallest and the largest value that a number may have.

    The defaults refuse infinity, nan and what is beyond 1e30.
    """

    least: float = -1e30
    most: float = 1e30


Count = Annotated[int, Bounds(1, 10**9)]
CountOr0 = Annotated[int, Bounds(0, 10**9)]
Positive = Annotated[float, Bounds(1e-12, 1e12)]
NotNegative = Annotated[float, Bounds(0, 1e12)]
Seconds = Annotated[float, Bounds(0.01, 1e8)]


@dataclass
class Config:
    # ---- run

    # name of the run, and of its directory under `out`; it is the preset's name unless you set it
    run: str = ""
    # directory with the directories of all runs; if there are several nodes, all of them must
    # see it
    out: str = "out"
    # check the configuration, show the first problem and every process's exact command, start
    # nothing
    dry_run: bool = False
    # begin a new run, even if one of this name could be continued; its directory is renamed to
    # NAME.1, NAME.2, ..., never deleted
    fresh: bool = False
    # set by the launcher: an id that tells this run's records from another's; a continued run keeps
    # it
    run_id: str = ""
    # seed of all random choices: the problems of a task that makes its own (toy, guess, ...; the
    # held-out ones, too), the order of problems, sampling, the tiny base model, new adapters, and
    # the order of groups in conventional RL
    seed: Annotated[int, Bounds(0, 2**31 - 1)] = 0
    # send the metrics of metrics.jsonl to Weights & Biases, too; offline: write them in the run
    # directory
    wandb: Literal["off", "offline", "online"] = "off"

    # ---- task and model

    # name of a file under tasks/, or a mixture of several: maths:0.7,toy:0.3
    task: str = "toy"
    # problems to train on, for tasks that read data (toy makes its own): files, directories or
    # data sets of the Hugging Face hub, with commas between them (docs/data.md). The task gym
    # takes data sets of reasoning-gym (tasks/gym.py)
    train_data: str = ""
    # held-out problems, for tasks that read data; write them as in train_data
    eval_data: str = ""
    # share of a task's problems that may have a prompt that the model cannot take: empty, longer
    # than max_model_len - 1 tokens, or with a token that the model lacks. They are left out and
    # counted; if there are more, the run is refused
    max_left_out: Annotated[float, Bounds(0, 1)] = 0.05
    # model to train: a Hugging Face directory, or a name on the hub. Empty: a tiny model, which is
    # made once from the examples of the task's function `demonstration`
    model: str = ""
    # family of the tiny model that is made if model is empty, a model type of transformers: qwen2,
    # qwen3_moe, gpt_oss, ...
    family: str = "qwen2"
    # prompts go through the model's chat template; False: raw text, for base models
    chat: bool = False
    # system message, if chat is True; else a text that is put before every prompt, as it is
    system_prompt: str = ""
    # the value of enable_thinking for chat templates that know it; auto: the template's own default
    thinking: Literal["auto", "on", "off"] = "auto"
    # dtype in which engine and trainer compute, and of the weights in checkpoints; auto: float32
    # on CPU, bfloat16 on GPU. The trainer keeps what it trains in float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # compute the logits in float32, in engine and trainer, when dtype is bfloat16: the mismatch is
    # smaller, the output head slower
    head_float32: bool = False

    # ---- batch

    # optimizer steps of the whole run
    steps: Count = 200
    # samples per optimizer step, fewer if attempts fail; a multiple of attempts
    batch_size: Count = 256
    # number of attempts at each problem; together they are a group, in which advantages are
    # computed
    attempts: Count = 16
    # while the trainer makes step s, groups may be started for the steps up to s + max_lag. 0: no
    # group of the next step starts before this step is made. This limits when a group starts, not
    # how old it gets: if it takes longer than max_lag steps to sample a group, its tokens are older
    # when they are trained (see late)
    max_lag: CountOr0 = 1
    # 0: the pipeline. G > 0: conventional RL, for comparison: the engines generate the data
    # of G steps, then the trainer makes these G steps, on tokens that are up to G - 1 versions
    # old. max_lag then does not limit when groups start. Sampling the groups of G steps must take
    # less time than stall_timeout
    conventional_g: CountOr0 = 0
    # what happens to groups that wait because the trainer is slower than the engines. block: all
    # of them wait, on disk, and the engines stop only at the limit that max_lag sets; drop_oldest:
    # the newest ones are kept, enough for two steps (in conventional RL for G steps, if that is
    # more), older ones are dropped and counted, and others start in their place
    on_full: Literal["block", "drop_oldest"] = "block"
    # what to do with tokens that are more than max_lag versions old when they are trained. keep:
    # train them, as PipelineRL does; mask: leave them out of the loss; wait: train groups in the
    # order in which they were started, so that there are fewer such tokens; hold: as wait, and a
    # step begins only when every group is complete that max_lag lets start. Engines and trainer
    # then take turns, and every token is exactly max_lag versions old (less in the first steps
    # after a start). hold is for studies of staleness; sampling the groups of max_lag + 1 steps
    # must take less time than stall_timeout
    late: Literal["keep", "mask", "wait", "hold"] = "keep"
    # groups in which every advantage is 0. keep: train them; drop: count them and sample others
    # instead
    no_signal: Literal["keep", "drop"] = "keep"

    # ---- generation

    # number of vLLM servers of the whole run. 0: with GPUs, three of every eight GPUs serve, or
    # half of them if max_new_tokens is above 4096, or what the trainers leave if you set trainers;
    # without GPUs, one server for each node that does not train, but at least one
    engines: CountOr0 = 0
    # GPUs per engine
    tensor_parallel: Count = 1
    # most sequences that an engine generates at the same time
    concurrency: Count = 64
    # sampling temperature; the trainer computes its logprobs at the same one
    temperature: Annotated[float, Bounds(0.01, 100)] = 1.0
    # most tokens that the model may write in one attempt, in all of its turns together; an attempt
    # that needs more is cut off
    max_new_tokens: Count = 1024
    # longest sequence, tokens: the prompt, what the model writes and, between turns, texts of the
    # environment. An attempt that reaches it is cut off; a prompt must leave room for a token
    max_model_len: Count = 2048
    # size of the KV cache on each GPU of an engine, GB. 0: what gpu_memory_utilization leaves;
    # with any other value vLLM ignores that knob. Without GPUs: the KV cache of an engine, rounded
    # to whole GiB, at least 1
    kv_cache_gb: Annotated[float, Bounds(0, 1000)] = 0.0
    # share of a GPU's memory that the engine takes; 0: 0.7, or 0.3 on a GPU shared with the trainer
    gpu_memory_utilization: Annotated[float, Bounds(0, 1)] = 0.0
    # vLLM computes only once what prompts have in common at the beginning: the prompt of
    # all attempts at a problem, which then go to the same engine, and earlier turns of an
    # attempt. Different versions of the weights share nothing. Worth it for long prompts and many
    # turns
    prefix_caching: Literal["on", "off"] = "off"
    # vLLM's --tool-call-parser (hermes, qwen3_coder, ...), which finds the tool calls in what the
    # model writes, for agents that use the OpenAI endpoint; empty: openai for a gpt_oss model,
    # else hermes
    tool_parser: str = ""
    # vLLM's --reasoning-parser (qwen3, ...), which separates thinking from answers for these
    # agents; empty: none
    reasoning_parser: str = ""
    # run vLLM without CUDA graphs: it starts sooner and samples more slowly
    enforce_eager: bool = False
    # further flags of vLLM for the engines, as one text: --engine_flags="--attention-backend X".
    # A flag that could change the sampled distribution or break weight updates is refused by name
    # (plumbing/engine_flags.py has the list)
    engine_flags: str = ""

    # ---- rewards

    # rewards for the outcomes correct, wrong, no_answer and unparsable, in this order, of attempts
    # that ended by themselves. A task may return an outcome instead of a number; if its reward
    # function or its episode fails or takes too long, the outcome is unparsable
    reward_finished: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    # the same four rewards as in reward_finished, for attempts that were cut off at a limit, such
    # as max_new_tokens or max_model_len
    reward_cut_off: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    # time limit of one call of a task's reward function, or of a function that an episode calls,
    # wall-clock seconds. Beyond it the outcome of an answer is unparsable. Tasks with INSTANT =
    # True have no limit
    reward_timeout: Seconds = 5.0
    # time limit of an episode (an attempt of several turns, in a task that defines `episode`),
    # wall-clock seconds. Beyond it the outcome is unparsable; if the episode was waiting for an
    # engine, the attempt is left out instead
    episode_timeout: Seconds = 600.0
    # soft penalty on length: over the last overlong_buffer tokens before max_new_tokens the reward
    # falls evenly, by 1 in all; 0: no penalty
    overlong_buffer: CountOr0 = 0
    # leave attempts that did not end by themselves out of the loss; they still count in the number
    # of samples and in the mean reward of their group
    overlong_mask: bool = False

    # ---- loss

    # how the advantage of an attempt follows from its reward r and the rewards of its group. loo:
    # r - mean of the others; mean: r - mean; mean_std: (r - mean) / standard deviation; max_rl:
    # (r - mean) / mean; none: r (docs/losses.md)
    advantage: Literal["loo", "mean", "mean_std", "max_rl", "none"] = "loo"
    # policy-gradient loss; docs/losses.md has the formulas and their sources
    loss: Literal["reinforce", "ppo", "cispo", "gspo", "icepop", "dppo"] = "reinforce"
    # how the importance weight w of a token is computed: its probability under the trained policy,
    # divided by its probability in the engine when it was sampled. token: from this token alone;
    # sequence: the geometric mean of the weights of all sampled tokens of its attempt; product:
    # their product, which is the weight of the attempt as a whole; empty: the usual one of the
    # loss (docs/losses.md)
    ratio: Literal["", "token", "sequence", "product"] = ""
    # lower bound of the importance weight (see ratio); reinforce and dppo have none, and refuse
    # it. Negative: the default of the loss (docs/losses.md)
    clip_low: float = -1.0
    # upper bound of the importance weight: c in reinforce, 1 + epsilon in ppo. In dppo: the
    # largest difference of a token's probabilities in trainer and engine, less than 1. Negative:
    # the default of the loss (docs/losses.md)
    clip_high: float = -1.0
    # how the loss of a step is averaged over its sampled tokens. samples: their sum is divided by
    # the number of samples, as in PipelineRL; tokens: it is divided by the number of sampled tokens
    # in the loss; sequence: the mean over the tokens of each attempt is taken first, then the mean
    # over the samples; empty: sequence if ratio is sequence, else samples
    normalizer: Literal["", "samples", "tokens", "sequence"] = ""
    # on-policy distillation: the name of a teacher, a directory or hub name, with the same
    # vocabulary as the model. The policy follows it and the rewards; with attempts 1 it follows
    # the teacher alone. Needs temperature 1 and no_signal keep. Empty: no teacher
    teacher: str = ""
    # this times (log p of the teacher - log p of the engine) is added to the advantage of a
    # sampled token
    teacher_coef: NotNegative = 1.0
    # weight in the loss of KL(policy || base), where base is the model that the knob model names,
    # before training. Above 0 the trainer holds base as a second, frozen model; not so with
    # lora_rank, where base is the policy without its adapters
    kl_coef: NotNegative = 0.0
    # weight of (log w)^2 of each token in the loss, where w is the importance weight of the token
    # itself, whatever ratio is: holds the policy near the one that sampled the data
    kl_behavior_coef: NotNegative = 0.0
    # weight of a bonus on the entropy of the distribution that each sampled token came from
    entropy_coef: NotNegative = 0.0
    # the run ends if the mismatch is above this, nats per token. The mismatch is the mean of
    # |logprob of the trainer - logprob of the engine| for the same weights; it is measured before
    # the first step of every start, after the first update, and after every 20th update from then
    # on. 0: 1e-3 in float32 and 0.2 in bfloat16, where 0.05 to 0.09 is usual for SmolLM2
    mismatch_limit: NotNegative = 0.0

    # ---- optimizer

    # peak learning rate of AdamW; with lora_rank, adapters have ten times this rate
    lr: Positive = 1e-06
    # linear warm-up of the learning rate, steps
    warmup_steps: CountOr0 = 0
    # constant: after the warm-up the rate stays at lr; linear: it is also multiplied by a factor
    # that falls evenly from 1 at the first step to nearly 0.1 at the last one: 1 - 0.9 step / steps
    lr_schedule: Literal["constant", "linear"] = "constant"
    # multiply the rate of each step by the square root of the effective sample size of its samples
    # (metric ess_sample): steps on data that is far off-policy are small
    lr_by_ess: bool = False
    # decay rates of AdamW's two moments
    betas: Annotated[tuple[float, float], Bounds(0, 0.999999)] = (0.9, 0.95)
    # weight decay of AdamW, of matrices alone
    weight_decay: NotNegative = 0.0
    # the gradient's norm is clipped to this value
    max_grad_norm: Positive = 1.0
    # most tokens of a row, at least max_model_len. A row is a micro-batch: the trainer computes it
    # in one forward pass. A beginning that neighbouring attempts share counts once in packed rows;
    # in padded rows (see rows) padding counts
    row_tokens: Count = 4096
    # how the trainer computes the sequences of a row. packed: end to end, with the attention of
    # plumbing/model.py; native: end to end, with transformers' own attention and kernels; padded:
    # as a batch, shorter ones padded; auto: these three are tested in this order before the start,
    # and the first one is taken that agrees with transformers on one sequence at a time. If you
    # choose one yourself, there is no such test
    rows: Literal["auto", "packed", "native", "padded"] = "auto"
    # mixtures of experts: the trainer sends each token to the experts that the engine chose for it;
    # needs engines on GPUs and --prefix_caching on
    replay_routing: bool = False
    # trainer ranks (FSDP2 when more than one); 0: the GPUs that do not serve, or 1 without GPUs
    trainers: CountOr0 = 0
    # recompute the activations of this many layers, counted from the first, in the backward pass:
    # less memory; with all layers (any larger number) a step takes some 30% longer
    checkpointed_layers: CountOr0 = 0
    # keep activations for the backward pass in host memory; best with all layers checkpointed
    offload_activations: bool = False
    # compile the trainer's layers and head with torch.compile: less memory traffic, minutes more to
    # start
    compile: bool = False
    # keep AdamW's two moments in 8 bits (torchao): 2 bytes a parameter instead of 8
    adam_8bit: bool = False
    # train adapters (LoRA) of this rank, in all linear layers but the output head; 0: train all
    # weights
    lora_rank: CountOr0 = 0
    # adapters are scaled by lora_alpha / lora_rank; their learning rate is ten times --lr
    lora_alpha: Positive = 32.0

    # ---- weight updates

    # False: requests in progress keep the KV cache that older weights computed (as in PipelineRL);
    # True: it is recomputed at each update
    recompute_kv: bool = False
    # library that sends the weights from trainer to engines; auto: nccl if the run has two GPUs or
    # more, else gloo (NCCL refuses two ranks on one GPU)
    weight_backend: Literal["auto", "nccl", "gloo"] = "auto"
    # weights are sent in several broadcasts, each of at most this size, MiB; a larger parameter
    # has one to itself
    bucket_mb: Count = 256
    # deadline of each call and broadcast of a weight update, seconds
    sync_timeout: Seconds = 60.0

    # ---- evaluation, checkpoints, logs

    # evaluate every so many steps, and always at a start of the run, before training, and at the
    # end; 0: only then
    eval_every: CountOr0 = 50
    # number of held-out problems in an evaluation, for each set of eval_data: the first ones;
    # 0: none
    eval_problems: CountOr0 = 256
    # attempts at each held-out problem
    eval_attempts: Count = 1
    # sampling temperature of evaluations; 0: greedy
    eval_temperature: Annotated[float, Bounds(0, 100)] = 1.0
    # write a checkpoint every so many steps, and always at the end and when the run is stopped; 0:
    # only then
    save_every: CountOr0 = 100
    # number of checkpoints that are kept; 0: all
    keep_last: CountOr0 = 2
    # number of attempts per step that are written to samples.jsonl, as text; report.html shows the
    # newest ones. They are the first ones of trainer rank 0
    samples_logged: CountOr0 = 2
    # keep the data of this many newest steps, so that tools/replay.py can compute a step again;
    # 0: none. Replaying begins at a checkpoint, so use at least save_every. The data can be
    # replayed only until the run is continued
    keep_steps: CountOr0 = 0

    # ---- machine

    # engine i listens on port + i, or on the next one that is free
    port: Annotated[int, Bounds(1, 65535)] = 8500
    # set by the launcher: number of nodes
    nnodes: Count = 1
    # set by the launcher: address of node 0
    master_addr: str = ""
    # address of node 0 at which the endpoint for agents listens, and at which agents reach it.
    # With any address but that of the loopback interface, containers and other machines can reach
    # it: requests then travel unencrypted (docs/agents.md)
    endpoint_host: str = "127.0.0.1"
    # port of this endpoint; 0: any that is free
    endpoint_port: Annotated[int, Bounds(0, 65535)] = 0
    # port of node 0 at which trainer ranks find each other, or the next one that is free; 0: port
    # + engines
    master_port: Annotated[int, Bounds(0, 65535)] = 0
    # deadline for an engine's start, seconds
    start_timeout: Seconds = 900.0
    # the run ends if a stage waits for another one longer than this, seconds; the time in which
    # engines start does not count. A request to an engine (one turn of an attempt) may take a
    # third of this: then it is sent again, if possible to another engine, at most three times, and
    # then the attempt is left out. An engine is started again if its core answers nothing for a
    # sixth of this (at least for sync_timeout)
    stall_timeout: Seconds = 1800.0
    # time that the trainer has to save a checkpoint when the run is stopped, seconds; then it
    # is killed
    stop_timeout: Seconds = 120.0
    # CPU threads per engine if there are no GPUs; 0: half of the node's cores (all of them if no
    # trainer rank runs there), divided among its engines
    engine_threads: CountOr0 = 0
    # CPU threads per trainer rank, also if there are GPUs; 0: the node's cores without those for
    # its engines, divided among its ranks, at least 1
    trainer_threads: CountOr0 = 0

    @property
    def groups_per_step(self) -> int:
        """The number of groups that a step trains; a group is all attempts at one problem."""
        return self.batch_size // self.attempts

    @property
    def highest_mismatch(self) -> float:
        """mismatch_limit, or its default if that is 0. dtype must not be "auto" any more."""
        return self.mismatch_limit or {"float32": 1e-3, "bfloat16": 0.2}[self.dtype]


# The defaults of each loss: ratio, clip_low and clip_high. With dppo, clip_high bounds |pi - mu|
# instead of the importance weight. train.policy_loss has the formulas.
LOSSES = {
    "reinforce": ("token", 0.0, 5.0),
    "ppo": ("token", 0.8, 1.2),
    "cispo": ("token", 0.0, 5.0),
    "gspo": ("sequence", 1 - 3e-4, 1 + 4e-4),
    "icepop": ("token", 0.5, 5.0),
    "dppo": ("token", 0.0, 0.2),
}
# Options of vLLM that are refused: with them, tokens would be sampled from another distribution
# than the one that is trained. The names are flags whose dashes are made underscores.
DISTRIBUTION_OPTIONS = {
    "__top_p",
    "__top_k",
    "__min_p",
    "__repetition_penalty",
    "__presence_penalty",
    "__frequency_penalty",
}
# the outcomes of an attempt, in the order of the numbers of reward_finished and reward_cut_off
OUTCOMES = ("correct", "wrong", "no_answer", "unparsable")

# Tuned on 2 cores. Sequences take longer than a step, so most updates arrive in the middle of some
# sequences.
TOY = dict(
    task="toy",
    steps=270,
    batch_size=448,
    attempts=16,
    concurrency=256,
    max_new_tokens=40,
    max_model_len=128,
    kv_cache_gb=1.0,
    enforce_eager=True,
    row_tokens=512,
    lr=6e-4,
    warmup_steps=5,
    lr_schedule="linear",
    eval_every=54,
    save_every=90,
    max_lag=1,
    start_timeout=300.0,
    stall_timeout=300.0,
)
# A real chat model, which tools/prepare.py makes, on 200 sums of reasoning-gym, a quarter of them
# held out.
SMOL = TOY | dict(
    task="gym",
    train_data="chain_sum/max_terms=2/max_digits=1",
    eval_data="chain_sum/max_terms=2/max_digits=1",
    model=str(ROOT / "out" / "models" / "SmolLM2-135M-Instruct"),
    chat=True,
    dtype="bfloat16",
    steps=40,
    batch_size=64,
    attempts=8,
    # at temperature 1 half of its answers do not end within 24 tokens
    temperature=0.7,
    concurrency=64,
    max_new_tokens=16,
    max_model_len=256,
    prefix_caching="on",
    row_tokens=1024,
    lr=3e-5,
    eval_every=10,
    eval_attempts=4,
    eval_temperature=0.7,
    save_every=20,
)
# The same model on answers of uneven lengths, of 4 to 120 tokens.
COUNTUP = SMOL | dict(
    task="countup",
    train_data="",
    eval_data="",
    max_new_tokens=140,
    eval_every=8,
    eval_problems=64,
    eval_attempts=2,
)
# A number game of up to 13 turns of up to 5 tokens.
GUESS = TOY | dict(
    task="guess",
    steps=60,
    batch_size=256,
    lr=3e-4,
    max_new_tokens=90,
    prefix_caching="on",
    max_model_len=256,
    row_tokens=1024,
    eval_every=20,
)
# Agents that use an OpenAI endpoint, see tasks/agent.py. examples/agents/directory.py makes the
# model, and says what the agent does.
AGENT = TOY | dict(
    task="agent",
    model=str(ROOT / "out" / "models" / "agent"),
    steps=60,
    batch_size=128,
    max_new_tokens=80,
    max_model_len=200,
    row_tokens=1024,
    eval_every=20,
)
# Modelled on the main run of the PipelineRL paper (arXiv 2509.19128, section 5), which used 128
# GPUs; here for 8 GPUs of 80 GB or more. max_new_tokens, attempts and overlong_buffer are our
# choice, as the paper does not state them.
MATH = dict(
    task="maths",
    train_data="orz57k",
    eval_data="math500,aime24",
    model="Qwen/Qwen2.5-7B",
    steps=1000,
    batch_size=1024,
    attempts=16,
    # At this number of sequences an engine reads their KV caches (2,000 tokens each) in the time in
    # which it reads the weights: 7.6e9 x 2 bytes / (2,000 x 57 kB). More sequences gain little;
    # with fewer, the time goes into reading the weights for few tokens.
    concurrency=128,
    max_new_tokens=8192,
    overlong_buffer=1024,
    max_model_len=10240,
    row_tokens=16384,
    lr=1e-6,
    max_lag=1000000,
    # the only bound on staleness: two steps' worth of the freshest groups
    on_full="drop_oldest",
    checkpointed_layers=1000,
    prefix_caching="on",
    eval_every=50,
    eval_problems=500,
    save_every=50,
    stop_timeout=300.0,
)
# The same task with adapters, sized so that engine and trainer fit together on one GPU of 80 GB, or
# of 24 GB, with 2.5 GB or more left for what tools/memory.py does not know. kv_cache_gb is set,
# because vLLM would measure the free memory while the trainer takes its share. Engines wait for the
# trainer (on_full): on one GPU, sampling takes time from the trainer, and samples that are dropped
# would waste it.
MATH_1X80 = MATH | dict(lora_rank=32, batch_size=256, max_lag=2, on_full="block")
MATH_1X80 |= dict(concurrency=96, kv_cache_gb=10.0)
# One request may take a third of stall_timeout. While the trainer uses the same GPU, an answer of
# 8192 tokens may take longer than a third of the default, which is 600 s.
MATH_1X80 |= dict(stall_timeout=7200.0)
MATH_1X24 = MATH_1X80 | dict(model="Qwen/Qwen2.5-1.5B", row_tokens=10240)
MATH_1X24 |= dict(concurrency=32, kv_cache_gb=2.0)
PRESETS = {
    # letters in alphabetical order: a tiny model that is made here; minutes on two cores
    "toy": TOY,
    # sums: SmolLM2-135M-Instruct, a real chat model out of a package on PyPI; minutes on two cores
    "smol": SMOL,
    # counting up to a number, with answers of uneven lengths: SmolLM2; ten minutes on two cores
    "countup": COUNTUP,
    # a number game of several turns: a tiny model that is made here
    "guess": GUESS,
    # agents that use a tool through an OpenAI endpoint: a tiny model that is made here
    "agent": AGENT,
    # mathematics, after the PipelineRL paper: Qwen2.5-7B, all weights, 8 GPUs of 80 GB; not run
    # yet
    "math": MATH,
    # the same with adapters (LoRA), one GPU of 80 GB; not run yet
    "math-1x80": MATH_1X80,
    # the same with Qwen2.5-1.5B and adapters (LoRA), one GPU of 24 GB; not run yet
    "math-1x24": MATH_1X24,
}
# first words after `bash run.sh` that are commands and not presets
COMMANDS = ("serve", "status", "doctor", "setup", "help")


def task_weights(task: str) -> dict[str, float]:
    """Tasks of a run and their shares: "toy" -> {"toy": 1.0}; "maths:3,toy:1" -> {"maths": 0.75,
    "toy": 0.25}.
    """
    weights = {}
    parts = [part.partition(":") for part in task.split(",")]
    with contextlib.suppress(ValueError):
        weights = {name.strip(): float(share or 1) for name, _, share in parts}
    require(
        len(weights) == len(parts) and all(0 < x < 1e30 for x in weights.values()),
        f"--task {task}: must be a task, or several different ones with shares above 0, such as "
        "maths:0.7,toy:0.3",
    )
    total = sum(weights.values())
    return {name: share / total for name, share in weights.items()}


def load_task(name):
    """The module tasks/<name>.py; ConfigError, one line, if it cannot be imported or is no task."""
    try:
        task = importlib.import_module(f"tasks.{name}")
    # A file may raise anything in its first lines.
    except Exception as e:
        here = sorted(p.stem for p in (ROOT / "tasks").glob("[!_]*.py"))
        guess = difflib.get_close_matches(name, here, 1, 0.7) if name not in here else []
        raise ConfigError(
            f"--task {name}: tasks/{name}.py cannot be imported: {type(e).__name__}: {e}; "
            f"{f'did you mean {guess[0]}? ' if guess else ''}tasks here: {', '.join(here)}"
        ) from None
    is_task = hasattr(task, "problems") and (hasattr(task, "reward") or hasattr(task, "episode"))
    require(
        is_task,
        f"--task {name}: tasks/{name}.py must define problems, and reward or episode: see "
        "tasks/__init__.py",
    )
    return task


def parse(argv: list[str], default: Config | None = None, about: str = "") -> Config:
    """`[preset] --knob value ...` -> Config.

    The flags change the values of the preset or, if it is given, of the Config `default`. about:
    the text with which --help begins. Raises ConfigError, one line, for anything that does not
    parse. `--help [WORD ...]` prints and exits.
    """
    has_name = bool(argv) and not argv[0].startswith("-")
    name = argv[0] if has_name else "toy"
    guess = difflib.get_close_matches(name, [*PRESETS, *COMMANDS], 1, 0.65)
    require(
        name in PRESETS,
        f"unknown preset '{name}': {f'did you mean {guess[0]}? ' if guess else ''}choose from "
        f"{', '.join(PRESETS)}; or one of the commands {', '.join(COMMANDS)}",
    )
    default = default or Config(run=name, **PRESETS[name])
    asks = [position for position, word in enumerate(argv) if word in ("--help", "-h")]
    if asks:
        show_help(argv[asks[0] + 1 :], default, about)
        sys.exit(0)
    for word in argv:
        require(
            word.partition("=")[0].replace("-", "_") not in DISTRIBUTION_OPTIONS,
            f"{word}: tokens must be sampled from the very distribution that is trained, so top_p, "
            "top_k, min_p and penalties are refused: leave it out; --temperature may be set",
        )
    try:
        given = knobs.read(argv[has_name:], knobs.knobs_of(Config))
    except ValueError as e:
        raise ConfigError(str(e)) from None
    if given.get("task", default.task) != default.task:
        # The data of a preset are those of its task.
        default = replace(default, train_data="", eval_data="")
    c = replace(default, **given)
    # It is the name of a directory in --out, and must not lead out of there.
    require(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", c.run),
        f"--run {c.run[:120]!r}: must be 1 to 100 letters, digits, '.', '-' or '_', and begin with "
        "a letter or digit",
    )
    # Paths are relative to the caller's directory; the stages run in that of the repository.
    c.out = os.path.abspath(os.path.expanduser(c.out))
    c.model, c.teacher = (
        os.path.abspath(x) if os.path.isdir(x) else x for x in (c.model, c.teacher)
    )
    c.train_data, c.eval_data = map(_absolute, (c.train_data, c.eval_data))
    return c


def _absolute(names):
    """Make the paths among names absolute; names have commas between them, a path may have @SPLIT.

    Other names stay as they are.
    """
    absolute = []
    for name in names.split(","):
        name = name.strip()
        path, at, part = name, "", ""
        if not os.path.exists(name) and "@" in name:
            path, at, part = name.rpartition("@")
        path = os.path.expanduser(path)
        absolute.append(os.path.abspath(path) + at + part if os.path.exists(path) else name)
    return ",".join(absolute)


def show_help(search_words, default, about):
    """Print what the program is, the presets, and all knobs with their default values; or, with
    search words, the knobs that have all of them. Raises ConfigError if none has.
    """
    # `| head` ends the program without a complaint.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    every = knobs.knobs_of(Config)
    matching = knobs.search(search_words, every)
    nearest = ", ".join(knobs.nearest("_".join(search_words), every, cutoff=0.0))
    require(
        matching,
        f"--help {' '.join(search_words)}: no knob has that in its name or description; the "
        f"nearest names: {nearest}",
    )
    if not search_words:
        print(about or __doc__.splitlines()[0])
        print("\nPresets, the first word of a command line; toy is the default:")
        source = Path(__file__).read_text().partition("\nPRESETS = {")[2].partition("}")[0]
        for name, (_, text) in knobs.comments(source).items():
            print(f"  {name:<10} {text}")
        print("\nKnobs, with their values in this preset; --help WORD ... searches them:\n")
    print(knobs.describe(matching, default))


def require(ok, message):
    """Raise ConfigError unless ok."""
    if not ok:
        raise ConfigError(message)


def check(c: Config) -> Config:
    """Check all that needs neither hardware nor files, and fill in the defaults of the loss.

    These are ratio, normalizer, clip_low and clip_high. Returns the same object. Raises ConfigError
    that names the knob and says what to do.
    """
    for name, hint in get_type_hints(Config, include_extras=True).items():
        value = getattr(c, name)
        least, most = getattr(hint, "__metadata__", [Bounds()])[0]
        for x in value if isinstance(value, tuple) else [value]:
            require(
                isinstance(x, str) or least <= x <= most,
                f"--{name} {x}: must be from {least:,.10g} to {most:,.10g}",
            )
    require(
        c.loss in LOSSES,
        f"--loss {c.loss}: add an entry to LOSSES in config.py: its default --ratio, --clip_low "
        "and --clip_high",
    )
    ratio, low, high = LOSSES[c.loss]
    c.ratio = c.ratio or ratio
    c.normalizer = c.normalizer or ("sequence" if c.ratio == "sequence" else "samples")
    c.clip_low = low if c.clip_low < 0 else c.clip_low
    c.clip_high = high if c.clip_high < 0 else c.clip_high
    relations = {
        "--attempts must be 2 or more: this --advantage compares the attempts at a problem. With "
        "one attempt choose the advantage none, or name a --teacher": (
            c.attempts > 1 or c.advantage == "none" or c.teacher
        ),
        "--batch_size must be a multiple of --attempts": c.batch_size % c.attempts == 0,
        "--max_new_tokens must be below --max_model_len": c.max_new_tokens < c.max_model_len,
        "--row_tokens must be at least --max_model_len: a row must hold the longest attempt": (
            c.max_model_len <= c.row_tokens
        ),
        "--overlong_buffer must not exceed --max_new_tokens": c.overlong_buffer <= c.max_new_tokens,
        "--clip_low must be below --clip_high": c.loss == "dppo" or c.clip_low < c.clip_high,
        "--loss dppo bounds a difference of probabilities: --clip_high must be below 1": (
            c.loss != "dppo" or c.clip_high < 1
        ),
        "--teacher needs --temperature 1": not c.teacher or c.temperature == 1,
        "--teacher needs --no_signal keep": not c.teacher or c.no_signal == "keep",
        "--loss reinforce and dppo have no lower bound of weights: leave out --clip_low": (
            c.loss not in ("reinforce", "dppo") or c.clip_low == 0
        ),
        "--ratio product with this --loss would multiply the gradient of a sequence by its length: "
        "choose reinforce, cispo or icepop, which do not differentiate their weights": (
            c.ratio != "product" or c.loss in ("reinforce", "cispo", "icepop")
        ),
        "--loss dppo compares the probabilities of tokens: it needs --ratio token": (
            c.loss != "dppo" or c.ratio == "token"
        ),
        "--advantage max_rl divides by the mean reward, so no reward may be negative: it needs "
        "--overlong_buffer 0 and numbers of at least 0 in --reward_finished and --reward_cut_off": (
            c.advantage != "max_rl"
            or (not c.overlong_buffer and min(c.reward_finished + c.reward_cut_off) >= 0)
        ),
        "--late wait and hold need --on_full block": (
            c.late not in ("wait", "hold") or c.on_full == "block"
        ),
        "--late mask with --conventional_g G needs a --max_lag of at least G - 1, or tokens of the "
        "last steps of a phase are never trained": (
            c.late != "mask" or c.max_lag >= c.conventional_g - 1
        ),
        "--late hold works in the pipeline alone: it needs --conventional_g 0": (
            c.late != "hold" or not c.conventional_g
        ),
        "--replay_routing needs --prefix_caching on": (
            not c.replay_routing or c.prefix_caching == "on"
        ),
    }
    for relation, holds in relations.items():
        names = re.findall(r"--(\w+)", relation)
        values = ", ".join(f"--{name} {getattr(c, name)}" for name in names)
        require(holds, f"{relation}; the values are {values}")
    return c


def from_json(values: dict) -> Config:
    """The Config of these values, which were read from JSON, where tuples are lists."""
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def load(run_dir: str) -> Config:
    """The Config in out/<run>/config.json.

    Raises ConfigError if the file is damaged or comes from another version of this code.
    """
    path = Path(run_dir, "config.json")
    require(
        path.is_file(),
        f"{path} is absent: {run_dir} must be the directory of a run, such as out/toy",
    )
    try:
        return from_json(json.loads(path.read_text())["config"])
    except (ValueError, TypeError, KeyError) as e:
        raise ConfigError(
            f"{path} is damaged, or from another version of this code ({type(e).__name__}: {e}): "
            "--fresh True moves the run aside and begins anew"
        ) from e

"""The flags of vLLM that the knob engine_flags may add to the command line of the engines.

vLLM has some 250 flags. A run needs engines that sample from the very distribution of the weights
that the trainer sends, report that distribution's logprobs, and take every update. So a flag is
accepted only if it is known to change none of this: up to rounding, the sampled distribution stays
as it is. All others are refused by name, with the reason, before anything is started.

vLLM checks the values of flags when an engine starts. Here only those of --speculative-config are
checked.
"""

import json
import re
import shlex
from typing import NamedTuple

from config import Config, require

# flags without their leading dashes; a flag `--no-x` is accepted if `x` is
ALLOWED = set(
    # tokens that are guessed and then verified, see `_draft_tokens`
    "speculative-config "
    # the kernels with which a step is computed
    "attention-backend mamba-backend moe-backend linear-backend all2all-backend "
    "gdn-prefill-backend disable-cascade-attn disable-custom-all-reduce enable-expert-parallel "
    "compilation-config optimization-level cudagraph-capture-sizes max-cudagraph-capture-size "
    # the order and size of steps, and the memory of the KV cache
    "async-scheduling scheduler-reserve-full-isl num-gpu-blocks-override "
    "prefix-caching-hash-algo disable-hybrid-kv-cache-manager kv-offloading-size "
    "kv-offloading-backend "
    # how files are read, and on which cores threads run
    "safetensors-load-strategy download-dir max-parallel-loading-workers use-tqdm-on-load "
    "numa-bind numa-bind-nodes numa-bind-cpus distributed-timeout-seconds "
    # what is logged and measured
    "uvicorn-log-level log-config-file kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics "
    "enable-mfu-metrics enable-logging-iteration-details per-request-spec-decode-metrics "
    "otlp-traces-endpoint collect-detailed-traces enable-layerwise-nvtx-tracing "
    "show-hidden-metrics-for-version".split()
)
# {flag: the knob that sets it}
KNOBS = {
    "model": "model",
    "dtype": "dtype",
    "seed": "seed",
    "port": "port",
    "host": "master_addr",
    "tensor-parallel-size": "tensor_parallel",
    "max-model-len": "max_model_len",
    "max-num-seqs": "concurrency",
    "gpu-memory-utilization": "gpu_memory_utilization",
    "kv-cache-memory-bytes": "kv_cache_gb",
    "enable-prefix-caching": "prefix_caching",
    "enforce-eager": "enforce_eager",
    "tool-call-parser": "tool_parser",
    "reasoning-parser": "reasoning_parser",
    "enable-return-routed-experts": "replay_routing",
}
# {reason: flags that many would try}
REASONS = {
    "tokens would come from another distribution than that of the trainer's weights": (
        "quantization quantization-config kv-cache-dtype kv-cache-dtype-skip-layers hf-overrides "
        "override-generation-config generation-config logits-processors logprobs-mode "
        "disable-sliding-window watermark-config diffusion-config load-format"
    ),
    "weight updates reach the tensor-parallel workers of one engine, and no others": (
        "pipeline-parallel-size data-parallel-size data-parallel-size-local data-parallel-rank "
        "prefill-context-parallel-size decode-context-parallel-size nnodes node-rank "
        "api-server-count"
    ),
    "weight updates are written into the weights where vLLM has put them at its start": (
        "enable-lora enable-eplb enable-sleep-mode cpu-offload-gb offload-backend worker-cls "
        "weight-transfer-config enable-elastic-ep"
    ),
    "actor and trainer would still read the model in the usual way": (
        "revision code-revision tokenizer tokenizer-mode tokenizer-revision config-format "
        "hf-config-path model-impl chat-template trust-remote-code skip-tokenizer-init"
    ),
    "under one version of the weights a prompt is computed in one step": (
        "enable-chunked-prefill long-prefill-token-threshold max-num-batched-tokens "
        "max-num-scheduled-tokens"
    ),
}
# the settings of speculative decoding by n-grams, whose guesses come from the text itself
NGRAM = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}


class EngineFlags(NamedTuple):
    """The knob engine_flags, read.

    arguments: the words for vLLM's command line. draft_tokens: the number of tokens of a sequence
    that are guessed for one step of the engine, 0 without speculative decoding.
    """

    arguments: list[str]
    draft_tokens: int


def read(c: Config) -> EngineFlags:
    """Check the knob engine_flags; raises ConfigError that names the flag and says why."""
    try:
        arguments = shlex.split(c.engine_flags)
    except ValueError as e:
        arguments = []
        require(False, f"--engine_flags {c.engine_flags!r}: {e}")
    draft_tokens = 0
    for k, word in enumerate(arguments):
        is_value = not word.startswith("-") or re.fullmatch(r"-[\d.]+", word)
        require(
            k > 0 or not is_value,
            f"--engine_flags {c.engine_flags!r}: must begin with a flag of vLLM, and not with "
            f"{word!r}",
        )
        if is_value:
            continue
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        _require_allowed(name if name in ALLOWED else name.removeprefix("no-"), flag)
        if name == "speculative-config":
            value = value if equals else "".join(arguments[k + 1 : k + 2])
            draft_tokens = _draft_tokens(value)
    require(
        not (draft_tokens and c.replay_routing),
        "--replay_routing True and --speculative-config in --engine_flags: the experts of tokens "
        "that were guessed and rejected would be among those that are replayed: leave out one of "
        "the two",
    )
    return EngineFlags(arguments, draft_tokens)


def _require_allowed(name, flag):
    """Raise ConfigError unless the flag, `name` without dashes, is in ALLOWED."""
    knob = KNOBS.get(name)
    require(knob is None, f"--engine_flags: {flag} is set by the run itself: use its knob --{knob}")
    for reason, names in REASONS.items():
        require(name not in names.split(), f"--engine_flags: {flag} is refused: {reason}")
    require(
        name in ALLOWED,
        f"--engine_flags: {flag} is not among the flags that are known to leave the sampled "
        "distribution and the weight updates as they are. If you know that it does, add it to "
        "ALLOWED in plumbing/engine_flags.py",
    )


def _draft_tokens(text):
    """The number of tokens that are guessed for one step, by a value of --speculative-config.

    A guessed token is accepted or replaced so that the sampled distribution stays exactly that of
    the model (rejection sampling, arXiv 2211.17192). Only n-grams are accepted: other methods have
    weights of their own, which updates do not reach, or accept tokens by other rules.
    """
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    require(
        isinstance(settings, dict) and settings.get("method") == "ngram",
        f"--engine_flags: --speculative-config {text}: must be JSON with the method ngram, such as "
        '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}\': other '
        "methods have weights that updates do not reach",
    )
    unknown = sorted(settings.keys() - NGRAM)
    require(
        not unknown,
        f"--engine_flags: --speculative-config has {', '.join(unknown)}, which could change the "
        f"sampled distribution: only {', '.join(sorted(NGRAM))} may be given",
    )
    count = settings.get("num_speculative_tokens")
    require(
        isinstance(count, int) and 1 <= count <= 64,
        f"--engine_flags: num_speculative_tokens {count}: must be a whole number from 1 to 64",
    )
    return count

"""The flags of vLLM that the knob engine_flags may add to the command line of the engines.

vLLM has some 250 flags. A run needs engines that sample from the very distribution of the weights
that the trainer sends, report that distribution's logprobs, and take every update. So a flag is
accepted only if it is known to change none of this: up to rounding, the sampled distribution stays
as it is. All others are refused by name, with the reason, before anything is started.

vLLM checks the values of flags when an engine starts. Here only the values of --speculative-config
and --compilation-config are checked.
"""

import json
import re
import shlex
from typing import NamedTuple

from config import Config, ConfigError, require

# Accepted flags without their leading dashes. A switch takes no value, and `no-` may be before it.
SWITCHES = set(
    # the kernels with which a step is computed
    "disable-cascade-attn disable-custom-all-reduce "
    # the order and size of steps, and the memory of the KV cache
    "async-scheduling scheduler-reserve-full-isl disable-hybrid-kv-cache-manager "
    # how files are read, on which cores threads run, what profilers see
    "use-tqdm-on-load numa-bind enable-layerwise-nvtx-tracing".split()
)
OPTIONS = set(
    # tokens that are guessed and then verified, see `_draft_tokens`
    "speculative-config "
    "attention-backend mamba-backend moe-backend linear-backend all2all-backend "
    "gdn-prefill-backend "
    "compilation-config optimization-level cudagraph-capture-sizes max-cudagraph-capture-size "
    "num-gpu-blocks-override prefix-caching-hash-algo "
    "safetensors-load-strategy numa-bind-nodes numa-bind-cpus distributed-timeout-seconds "
    "uvicorn-log-level log-config-file".split()
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
    "it moves weights or replaces them, and weight updates would miss them": (
        "enable-lora enable-eplb enable-expert-parallel enable-sleep-mode cpu-offload-gb "
        "offload-backend worker-cls weight-transfer-config enable-elastic-ep"
    ),
    "a KV cache outside of the engine may be that of older weights": (
        "kv-offloading-size kv-offloading-backend kv-transfer-config"
    ),
    "the engines would read another model or tokenizer than actor and trainer": (
        "revision code-revision tokenizer tokenizer-mode tokenizer-revision config-format "
        "hf-config-path model-impl chat-template trust-remote-code skip-tokenizer-init download-dir"
    ),
    "a prompt must be computed in one step, or an update could fall into its middle": (
        "enable-chunked-prefill long-prefill-token-threshold max-num-batched-tokens "
        "max-num-scheduled-tokens"
    ),
    "the run switches vLLM's statistics off (--disable-log-stats)": (
        "kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-mfu-metrics "
        "enable-logging-iteration-details per-request-spec-decode-metrics"
    ),
}
# the settings of speculative decoding by n-grams, whose guesses come from the text itself
NGRAM = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
# settings of --compilation-config; others may put functions of their own into the model
COMPILATION = {"mode", "cudagraph_mode", "cudagraph_capture_sizes", "compile_sizes"}
COMPILATION |= {"max_cudagraph_capture_size", "cudagraph_num_of_warmups"}


class EngineFlags(NamedTuple):
    """The knob engine_flags, read.

    arguments: the words for vLLM's command line. draft_tokens: the number of tokens of a sequence
    that are guessed for one step of the engine, 0 without speculative decoding.
    """

    arguments: list[str]
    draft_tokens: int


def read(c: Config, gpus: int) -> EngineFlags:
    """Check the knob engine_flags; raises ConfigError that names the flag and says why.

    gpus: the number of GPUs of a node.
    """
    try:
        arguments = shlex.split(c.engine_flags)
    except ValueError as e:
        raise ConfigError(f"--engine_flags {c.engine_flags!r}: {e}") from None
    draft_tokens = 0
    flag = ""
    for k, word in enumerate(arguments):
        if not word.startswith("-") or re.fullmatch(r"-[\d.]+", word):
            require(
                flag and flag not in SWITCHES,
                f"--engine_flags {c.engine_flags!r}: {word!r} is the value of no flag"
                + (f": {flag} takes none" if flag else ""),
            )
            continue
        name, equals, value = word.partition("=")
        flag = _accepted(name)
        value = value if equals else "".join(arguments[k + 1 : k + 2])
        if flag == "speculative-config":
            draft_tokens = _draft_tokens(value)
        elif flag == "compilation-config":
            _settings(value, flag, COMPILATION)
    require(
        not (draft_tokens and c.replay_routing),
        "--replay_routing True and --speculative-config in --engine_flags: the experts of tokens "
        "that were guessed and rejected would be among those that are replayed: leave out one of "
        "the two",
    )
    if draft_tokens and not gpus:
        _refuse_on_cpus()
    return EngineFlags(arguments, draft_tokens)


def _refuse_on_cpus():
    """Raise ConfigError. tests/mended_speculation.py mends what is wrong, for tests."""
    raise ConfigError(
        "--engine_flags: --speculative-config needs GPUs: vLLM 0.32's build for CPUs samples "
        "guessed tokens at a temperature that it has not set"
    )


def _accepted(word):
    """The name of an accepted flag without dashes, and a switch without `no-`; or ConfigError."""
    flag = word.lstrip("-").replace("_", "-")
    positive = flag.removeprefix("no-")
    if flag in SWITCHES | OPTIONS or positive in SWITCHES:
        return flag if flag in OPTIONS else positive
    knob = KNOBS.get(positive)
    require(knob is None, f"--engine_flags: {word} is set by the run itself: use its knob --{knob}")
    for reason, flags in REASONS.items():
        require(positive not in flags.split(), f"--engine_flags: {word} is refused: {reason}")
    raise ConfigError(
        f"--engine_flags: {word} is not among the flags that are known to leave the sampled "
        "distribution and the weight updates as they are. If you know that it changes neither, add "
        "it to SWITCHES or OPTIONS in plumbing/engine_flags.py"
    )


def _settings(text, flag, allowed):
    """The settings of a flag that takes JSON: a dict. allowed: the names that it may have."""
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    require(
        isinstance(settings, dict),
        f"--engine_flags: --{flag} {text}: must be JSON, in quotes: '{{\"name\": value}}'",
    )
    unknown = sorted(settings.keys() - allowed)
    require(
        not unknown,
        f"--engine_flags: --{flag} has {', '.join(unknown)}, which could change the sampled "
        f"distribution: only {', '.join(sorted(allowed))} may be given",
    )
    return settings


def _draft_tokens(text):
    """The number of tokens that are guessed for one step, by a value of --speculative-config.

    A guessed token is accepted or replaced so that the sampled distribution stays exactly that of
    the model (rejection sampling, arXiv 2211.17192). Only n-grams are accepted: other methods have
    weights of their own, which updates do not reach, or accept tokens by other rules.
    """
    settings = _settings(text, "speculative-config", NGRAM)
    require(
        settings.get("method") == "ngram",
        f"--engine_flags: --speculative-config {text}: the method must be ngram, such as in "
        '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}\': other '
        "methods have weights that updates do not reach",
    )
    count = settings.get("num_speculative_tokens")
    require(
        isinstance(count, int) and 1 <= count <= 64,
        f"--engine_flags: num_speculative_tokens {count}: must be a whole number from 1 to 64",
    )
    return count

"""Does the trainer compute this model as transformers does, and can vLLM serve it?

Both are checked before a run starts. `check_supported` refuses a model that is known not to work,
by its configuration, by vLLM's list of architectures, and by importing vLLM's code for it.
`choose_rows` then measures the trainer alone, on a small copy of the model: the same configuration,
with random weights in float32, fewer layers (as many as have every kind of layer that the model
has), a small vocabulary and narrow feed-forward layers. It computes log-probabilities and gradients
in each way that plumbing/model.py has, and compares them with transformers' own forward pass over
one sequence at a time. The first way that gives the same result is taken. For a run in bfloat16 on
GPUs, where other kernels compute, that way must also be as exact in bfloat16 as transformers is.

Deliberately absent: a list of families that work.
"""

import ast
import copy
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from config import ConfigError, require
from plumbing.model import attention_of, decoder_of, layers_of
from plumbing.routing import Routing, expert_blocks
from train import token_logprobs

# the ways to compute rows, the fastest first
WAYS = ("packed", "native", "padded")
# what the configuration of a small copy has at most
VOCABULARY = 256
FEED_FORWARD = 64
WINDOW = 8
EXPERTS = 16
# the longest time that vLLM may take to import a model's code
IMPORT_SECONDS = 120
# a copy that is larger than this would take too long
MOST_PARAMETERS = 500e6
# A copy's hidden size has this many bits: it is 256 to 511.
WIDTH_BITS = 9
# names of settings, in the configurations of transformers, that are divided or bounded
WIDTHS = (
    ".*hidden_size|.*num_(attention|key_value|key|value)_heads|.*n(um)?_heads|mamba_d_ssm|"
    "mamba_headdim"
)
EXPERT_COUNTS = "num_(local_|routed_)?experts|n_routed_experts|moe_num_experts"
# The lengths of the sequences that are compared. Several are longer than a window, one is shorter
# than any convolution, and two begin alike.
LENGTHS = (33, 40, 3, 24)
ALIKE = 9
# When is a way of computing rows exact? Its logprobs may differ from those of transformers by
# LOGPROB_LIMIT nats on average, and its gradients by GRADIENT_LIMIT of their norm. For a model that
# is sensitive to rounding, ROUNDING times the effect of rounding (rounding_error) is allowed
# instead, but never more than MOST_NATS for the logprobs: where one sequence saw another one, they
# differed by 0.004 nats or more.
LOGPROB_LIMIT = 1e-4
GRADIENT_LIMIT = 1e-3
ROUNDING = 10
MOST_NATS = 3e-3
# In bfloat16 the logprobs and gradients of a row may be IN_16_BITS times as far from those in
# float32 as transformers' own are. Differences up to IN_16_BITS_LIMITS (nats, share of the
# gradient's norm) are always allowed: a single token that goes to another expert may cause them.
IN_16_BITS = 5
IN_16_BITS_LIMITS = (0.02, 0.1)


# ---------------------------------------------------------------------------- what is refused


# Tables of vLLM's registry whose models write text. Those of the last one run the code of
# transformers within vLLM.
REGISTRY = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


class Architecture(NamedTuple):
    """What vLLM's registry says of an architecture."""

    module: str
    # Does this module also see images? Then its text model may need what images need.
    sees_images: bool


def vllm_architectures():
    """{name: Architecture} of all architectures in vLLM's registry; None if there is no registry.

    The source of the registry is parsed, because importing it takes several seconds. The fake vLLM
    of the tests has no registry.
    """
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    registry = Path(folder, "model_executor", "models", "registry.py")
    if not registry.exists():
        return None
    # {name of a table: {name of an architecture: module}}
    tables = {}
    for statement in ast.parse(registry.read_text()).body:
        target = getattr(statement, "targets", [getattr(statement, "target", None)])[0]
        table = getattr(target, "id", "")
        if table in REGISTRY:
            entries = zip(statement.value.keys, statement.value.values)
            # Entries are pairs of module and class, or what adds other tables, which has no key.
            tables[table] = {
                key.value: ast.unparse(value).split(",")[0].strip("()'")
                for key, value in entries
                if isinstance(key, ast.Constant)
            }
    seeing = set(tables["_MULTIMODAL_MODELS"].values())
    architectures = {}
    for table in tables.values():
        for name, module in table.items():
            path = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
            architectures[name] = Architecture(path, module in seeing)
    return architectures


def serves_from_transformers(architecture, text):
    """Does vLLM run transformers' own code for an architecture that is not in its registry?

    It does if that code works with any attention implementation, and if no layer has linear
    attention or anything else in place of attention. text: the text model's configuration.
    """
    model = getattr(transformers, architecture, None)
    if model is None:
        return False
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    has_attention = all(x.endswith("attention") and x != "linear_attention" for x in kinds)
    takes_any = model.is_backend_compatible() or model._can_set_attn_implementation()
    return takes_any and has_attention


def import_problem(module):
    """Why a new Python process cannot import this module: its last line on stderr; "" if it can."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it takes longer than {IMPORT_SECONDS} s"
    lines = done.stderr.strip().splitlines()
    return (lines or ["it ended"])[-1] if done.returncode else ""


def check_supported(shape, config):
    """Raise ConfigError for a model of this configuration that cannot be trained or served.

    config: the run's, whose --model is named in the message.
    """
    text = shape.get_text_config()
    name = f"--model {config.model} ({shape.model_type})"
    quantisation = getattr(shape, "quantization_config", None) or {}
    require(
        not quantisation,
        f"{name} is quantised ({quantisation_name(quantisation)}): such weights cannot be trained; "
        "take the checkpoint in 16 bits",
    )
    require(
        not shape.is_encoder_decoder,
        f"{name} has an encoder and a decoder: only models that have a decoder alone are trained",
    )
    require(
        not hasattr(text, "index_topk"),
        f"{name} attends to tokens that an indexer chooses, and trainer and engine would choose "
        "others: models with sparse attention cannot be trained",
    )
    architectures = shape.architectures or []
    known = vllm_architectures()
    if known is not None:
        found = [known[x] for x in architectures if x in known]
        require(
            found or any(serves_from_transformers(x, text) for x in architectures),
            f"{name}: the installed vLLM has no code for its architecture "
            f"({', '.join(architectures) or 'config.json names none'})",
        )
        # vLLM's CPU build is installed without torchvision, which some image processors need.
        if any(x.sees_images for x in found) and not importlib.util.find_spec("torchvision"):
            problem = import_problem(found[0].module)
            require(
                not problem,
                f"{name}: vLLM cannot load its code for this architecture ({problem}): install "
                "the torchvision that belongs to the installed torch",
            )
    require(
        type(text) in AutoModelForCausalLM._model_mapping,
        f"{name}: the installed transformers has no causal language model for it",
    )
    # The engine's gated delta rule exists in bfloat16 alone in vLLM's build for CPUs.
    has_delta_rule = hasattr(text, "linear_key_head_dim")
    require(
        not has_delta_rule or config.dtype != "float32" or torch.cuda.is_available(),
        f"{name}: on CPUs vLLM computes its linear attention in bfloat16 alone: add --dtype "
        "bfloat16",
    )
    if config.lora_rank:
        require(
            not has_experts(text),
            f"--lora_rank: {name} has experts, which are no linear layers and would stay as they "
            "are, without adapters: train all weights with --lora_rank 0",
        )
    if config.replay_routing:
        check_replay(name, text)
        require(
            known is None or torch.cuda.is_available(),
            "--replay_routing: on CPUs vLLM does not tell which experts it chose: leave the knob "
            "out",
        )


def quantisation_name(quantisation):
    """The method of a quantization_config, which is a dict or an object of transformers."""
    values = quantisation if isinstance(quantisation, dict) else vars(quantisation)
    return str(values.get("quant_method", "of an unknown kind"))


def check_replay(name, shape):
    """Raise ConfigError unless the routers of a model take the experts that they are told to.

    shape: the configuration of the text model.
    """
    require(has_experts(shape), f"--replay_routing: {name} has no experts: leave the knob out")
    model = small_copy(shape)
    routing = Routing(decoder_of(model), replays=True)
    with torch.no_grad():
        own_logprobs(model, sequences_to_compare(model.config.vocab_size)[:1])
    uses_topk = all(choice.own is not None for choice in routing.choices.values())
    # With this method scores are 0 outside of the chosen groups: a prescribed expert could weigh 0.
    is_masked = getattr(shape, "topk_method", "") == "group_limited_greedy"
    is_layer_by_layer = routing.layers == model.config.num_hidden_layers
    require(
        uses_topk and is_layer_by_layer and not is_masked,
        f"--replay_routing: the routers of {name} cannot take the experts that an engine chose: "
        "leave the knob out",
    )


def has_experts(shape):
    """Does the text model of this configuration have experts?"""
    return any(map(expert_blocks, layers_of(decoder_of(make_model(shape, "meta")))))


# ---------------------------------------------------------------------------- a small copy


def smaller_number(name, value, divisor):
    """The value of a setting in a smaller copy; values that are not integers stay as they are."""
    if type(value) is not int:
        return value
    if name.endswith("token_id"):
        return value if value < VOCABULARY else 0
    if name.startswith("vocab_size"):
        return min(value, VOCABULARY)
    if name.endswith("intermediate_size"):
        return min(value, FEED_FORWARD)
    if name in ("sliding_window", "attention_chunk_size", "index_topk"):
        return min(value, WINDOW)
    if re.fullmatch(EXPERT_COUNTS, name):
        return min(value, EXPERTS)
    if re.fullmatch(WIDTHS, name):
        return max(value // divisor, 1)
    return value


def smaller_values(shape, layers, divisor):
    """The values of a text model's configuration that a smaller copy has, as a dict.

    shape: the configuration, which stays as it is. layers: the number of layers that are kept.
    divisor: the hidden size and the numbers of heads are divided by it.
    """
    values = shape.to_dict()
    depth = shape.num_hidden_layers
    # {name that all configurations have: this one's own name for it}, such as n_embd
    own_names = shape.attribute_map
    common_names = {own: name for name, own in own_names.items()}
    for own, value in values.items():
        name = common_names.get(own, own)
        if isinstance(value, list) and len(value) == depth:
            values[own] = [smaller_number(name, x, divisor) for x in value[:layers]]
        else:
            values[own] = smaller_number(name, value, divisor)
    values[own_names.get("num_hidden_layers", "num_hidden_layers")] = layers
    # Weights of this size keep the sizes of hidden states, whatever the width.
    if "initializer_range" in values:
        width = values[own_names.get("hidden_size", "hidden_size")]
        values["initializer_range"] = width**-0.5
    values.pop("quantization_config", None)
    return values


def make_model(shape, device="cpu"):
    """A random float32 model of a text configuration, in evaluation mode."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    return model.eval()


def kinds_of_layers(model):
    """For each layer of a model a text that is the same for layers of the same kind.

    It has the classes of its modules, and their settings that are no numbers.
    """
    kinds = []
    for layer in layers_of(decoder_of(model)):
        parts = []
        for name, module in layer.named_modules():
            settings = {
                key: value if isinstance(value, (str, bool, type(None))) else "number"
                for key, value in vars(module).items()
                if not key.startswith("_") and isinstance(value, (str, bool, int, type(None)))
            }
            parts.append((name, type(module).__name__, settings))
        kinds.append(str(parts))
    return kinds


def in_one_line(error):
    """The type of an exception and the beginning of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def small_copy(shape):
    """A small random model with the same kinds of layers as the text model of this configuration.

    Raises ConfigError if no copy can be made.
    """
    depth = shape.num_hidden_layers
    kinds = kinds_of_layers(make_model(shape, "meta"))
    layers = depth
    if len(kinds) == depth:
        # the fewest layers, counted from the first, among which is every kind
        layers = max(kinds.index(kind) for kind in set(kinds)) + 1
        layers = min(max(layers, 2), depth)
    # Try smaller copies first. A copy may fail, because in some configurations layers are numbered
    # from the last one, or some widths depend on others. Take the first copy that has the same
    # kinds of layers and computes.
    halvings = max(shape.hidden_size.bit_length() - WIDTH_BITS, 0)
    divisors = [2**n for n in range(halvings, -1, -1)]
    failure = "it would be too large"
    for count, divisor in itertools.product(dict.fromkeys([layers, depth]), divisors):
        try:
            torch.manual_seed(0)
            small = type(shape).from_dict(smaller_values(shape, count, divisor))
            empty = make_model(small, "meta")
            is_alike = count == depth or kinds_of_layers(empty) == kinds[:count]
            if is_alike and sum(p.numel() for p in empty.parameters()) < MOST_PARAMETERS:
                model = make_model(small)
                own_logprobs(model, sequences_to_compare(small.vocab_size)[:1])
                return model
        # Configurations and models raise whatever they like at widths that do not fit.
        except Exception as e:
            failure = in_one_line(e)
    raise ConfigError(
        f"--model: no small copy of {shape.model_type} can be made to measure how its rows are "
        f"computed ({failure}): name the way with --rows packed or --rows padded; before the first "
        "step `mismatch` measures whether it is right"
    )


# ---------------------------------------------------------------------------- the measurement


def sequences_to_compare(vocabulary):
    """Sequences of random tokens of a vocabulary of this size, as numpy arrays. The first two begin
    alike.
    """
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, vocabulary, n) for n in LENGTHS]
    sequences[1][:ALIKE] = sequences[0][:ALIKE]
    return sequences


def own_logprobs(model, sequences):
    """Logprobs of all tokens but the first of each sequence, by transformers alone: [T - N] float32
    for N sequences of T tokens in all.
    """
    parts = []
    for tokens in sequences:
        tokens = torch.from_numpy(tokens).to(model.device)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        logp = torch.log_softmax(logits.float(), -1)
        parts.append(logp.gather(1, tokens[1:, None])[:, 0])
    return torch.cat(parts)


def row_logprobs(model, sequences, rows):
    """The same from one row, computed in one of the ways of plumbing/model.py."""
    positions = np.concatenate([np.arange(len(tokens)) for tokens in sequences])
    logprobs, _ = token_logprobs(model, np.concatenate(sequences), positions, 1.0, rows=rows)
    return logprobs[torch.from_numpy(positions > 0).to(logprobs.device)]


def with_gradients(model, logprobs):
    """(logprobs, {name: gradient} of a sum of them with fixed random weights). Gradients that the
    model had before are lost.
    """
    model.zero_grad()
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(logprobs), generator=generator).to(logprobs.device)
    (logprobs * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


def difference(found, expected):
    """How far (logprobs, gradients) are from others: (mean nats, share of the gradient's norm)."""
    nats = float((found[0] - expected[0]).abs().mean())
    gradients, others = found[1], expected[1]
    if gradients.keys() != others.keys():
        return nats, 1.0
    distance = sum((gradients[name] - other).square().sum() for name, other in others.items())
    norm = sum(other.square().sum() for other in others.values())
    return nats, float((distance / norm).sqrt())


def measure(model, ways, in_16_bits=False):
    """Compare ways to compute rows with transformers' own forward pass.

    model: in float32. in_16_bits: the way that is taken must be right in bfloat16, too. Returns
    (the first way that is exact, or None; {way: (nats, share of the gradient's norm), or the error
    as a text}; what rounding alone makes of the logprobs, in nats).
    """
    sequences = sequences_to_compare(model.config.vocab_size)
    own_attention = model.config._attn_implementation
    # Other implementations leave out what they cannot do, such as the caps of Gemma 2.
    model.set_attn_implementation("eager")
    expected = with_gradients(model, own_logprobs(model, sequences))
    rounding = rounding_error(model, sequences, expected)
    most_nats = min(max(LOGPROB_LIMIT, ROUNDING * rounding[0]), MOST_NATS)
    most_share = max(GRADIENT_LIMIT, ROUNDING * rounding[1])
    results = {}
    for rows in ways:
        try:
            model.set_attn_implementation(attention_of(rows) or own_attention)
            found = with_gradients(model, row_logprobs(model, sequences, rows))
        except Exception as e:
            # Models of other people raise whatever they like at arguments they do not know.
            results[rows] = in_one_line(e)
            continue
        nats, share = results[rows] = difference(found, expected)
        if nats <= most_nats and share <= most_share:
            fault = in_16_bits and fault_in_16_bits(model, rows, sequences, expected)
            if not fault:
                return rows, results, rounding[0]
            results[rows] = fault
    return None, results, rounding[0]


def fault_in_16_bits(model, rows, sequences, expected):
    """What is wrong with this way to compute rows in bfloat16, as a text; "" if nothing is.

    On GPUs other kernels compute packed rows then than in float32. Their results must be about as
    near to `expected`, those in float32, as transformers' own results in bfloat16 are. model: in
    float32, with the attention of this way.
    """
    half = copy.deepcopy(model)
    # The trainer keeps buffers, such as the frequencies of positions, as they are.
    for p in half.parameters():
        p.data = p.data.to(torch.bfloat16)
    attention = half.config._attn_implementation
    half.set_attn_implementation("eager")
    # Some code of transformers computes in float32 alone: then there is nothing to compare with.
    try:
        own = difference(with_gradients(half, own_logprobs(half, sequences)), expected)
    except Exception:
        return ""
    half.set_attn_implementation(attention)
    try:
        found = difference(with_gradients(half, row_logprobs(half, sequences, rows)), expected)
    except Exception as e:
        return f"in bfloat16 {in_one_line(e)}"
    limits = [max(IN_16_BITS * x, least) for x, least in zip(own, IN_16_BITS_LIMITS)]
    if not np.isfinite(own).all() or all(x <= limit for x, limit in zip(found, limits)):
        return ""
    return (
        f"in bfloat16 logprobs differ by {found[0]:.1e} nats from those in float32, gradients by "
        f"{found[1]:.1e}, and those of transformers by {own[0]:.1e} and {own[1]:.1e}"
    )


def rounding_error(model, sequences, expected):
    """What a change of all weights in their last digits makes of (logprobs, gradients)."""
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-7 * torch.randn_like(p))
    changed = with_gradients(model, own_logprobs(model, sequences))
    with torch.no_grad():
        for p, before in zip(model.parameters(), weights):
            p.copy_(before)
    return difference(changed, expected)


def choose_rows(model_name, dtype="float32"):
    """The way to compute the rows of a model, and a line that says how exact it is.

    dtype: that of the run. Raises ConfigError if no way is exact.
    """
    shape = AutoConfig.from_pretrained(model_name).get_text_config()
    logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    in_16_bits = device == "cuda" and dtype == "bfloat16"
    way, results, rounding = measure(small_copy(shape).to(device), WAYS, in_16_bits)
    descriptions = {}
    for rows, result in results.items():
        descriptions[rows] = f"{rows}: {result}"
        if not isinstance(result, str):
            nats, share = result
            descriptions[rows] = (
                f"{rows}: logprobs differ by {nats:.1e} nats, gradients by {share:.1e}"
            )
    require(
        way or rounding < MOST_NATS,
        f"--model {model_name}: a small copy of {shape.model_type} cannot be measured: a change of "
        f"its weights by 1e-7 changes its logprobs by {rounding:.1e} nats. Name the way in which "
        "its rows are computed with --rows packed or --rows padded; before the first step "
        "`mismatch` measures whether it is right",
    )
    require(
        way,
        f"--model {model_name}: the trainer cannot compute {shape.model_type} as transformers does "
        f"({'; '.join(descriptions.values())})",
    )
    checked = " and checked in bfloat16" * in_16_bits
    return way, (
        f"rows of {shape.model_type} are {descriptions[way]}, against transformers with one "
        f"sequence at a time, measured on a small copy in float32{checked}"
    )

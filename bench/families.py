"""Which families of models are exact? A tiny random model of each, in the trainer and the engine.

    python bench/families.py [--families qwen3_moe,gemma2] [--fresh] [--port 8940]

For each family in FAMILIES and SEEING a model of two or three layers is made. Then

    rows     the way in which the trainer computes it (tools/model_check.py), or why it is refused
    trainer  mean |logprob of the trainer - that of transformers, a sequence at a time|
    engine   mean |logprob of a real vLLM engine, with the model as it loads it, - transformers'|
    proof    do updates reach every tensor that they are to change? (plumbing/shadow.py)
    update   mean |logprob of the engine - that of the trainer|, after each of two updates that
             change all weights but the routers' correction biases; the larger of the two
    pause    the longest time that the engine stood still for one of these updates

Logprobs are those of 48 tokens that the engine samples after 40 random ones. Sliding windows are 8
tokens, so they matter; the chunks of llama4 are 128 tokens, so they do not. Values are in nats.
It takes some 40 s a family on two cores. A family whose engine works in
bfloat16 alone has its model in bfloat16.
"""

import functools
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import requests
import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
import train
from bench.common import WORK, measured, parser, result_file, table
from bench.engines import make_run, url_of
from plumbing.model import model_class
from plumbing.queues import publish_json
from plumbing.ranks import Ranks
from plumbing.secret import secret_header
from tasks import toy
from tools import model_check
from tools.base_model import make_tokenizer
from tools.evaluate import start_engines, stop
from weights import Sender

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
WIDTH = dict(hidden_size=128, intermediate_size=96, num_hidden_layers=2, initializer_range=0.1)
TOKENS = dict(vocab_size=128, bos_token_id=0, eos_token_id=1, pad_token_id=0)
TINY = dict(max_position_embeddings=256, tie_word_embeddings=False, **HEADS, **WIDTH, **TOKENS)
WINDOW = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
SHARED_EXPERT = dict(**EXPERTS, shared_expert_intermediate_size=64)
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    **LINEAR,
)
# DeepSeek's experts and latent attention
ROUTED = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
LATENT = dict(
    kv_lora_rank=512,
    q_lora_rank=64,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    head_dim=64,
    v_head_dim=128,
    num_key_value_heads=4,
)
INDEXER = dict(index_n_heads=2, index_head_dim=128, index_topk=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=64, mamba_d_state=16)
# vLLM reads settings of this family that checkpoints on the hub have, and transformers ignores.
CONVOLUTIONS = dict(
    layer_types=["conv", "full_attention"],
    conv_dim=128,
    block_dim=128,
    block_multiple_of=32,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
    tie_word_embeddings=True,
)
GEMMA = dict(query_pre_attn_scalar=32, tie_word_embeddings=True, **WINDOW)
COHERE = dict(logit_scale=0.25, tie_word_embeddings=True)
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
PER_LAYER = dict(vocab_size_per_layer_input=128, hidden_size_per_layer_input=16)
FAMILIES = {
    "afmoe": dict(EXPERTS, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    "apertus": {},
    "arcee": {},
    "bamba": dict(MAMBA, attn_layer_indices=[1]),
    "bitnet": {},
    "bloom": dict(n_layer=2, n_head=4, num_key_value_heads=4, tie_word_embeddings=True),
    "cohere": dict(COHERE),
    "cohere2": dict(COHERE, **WINDOW),
    "cohere2_moe": dict(COHERE, num_experts=4, **WINDOW),
    "cwm": {},
    "deepseek_v2": dict(ROUTED, **LATENT),
    # as in the configurations on the hub
    "deepseek_v3": dict(ROUTED, **LATENT, topk_method="noaux_tc", scoring_func="sigmoid"),
    "deepseek_v32": dict(ROUTED, **LATENT, **INDEXER),
    "dots1": dict(ROUTED),
    "ernie4_5": {},
    "ernie4_5_moe": dict(
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    "exaone4": dict(WINDOW),
    "exaone_moe": dict(EXPERTS),
    "falcon_h1": dict(
        mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1
    ),
    "flex_olmo": dict(num_experts=4, num_experts_per_tok=2),
    "gemma": dict(tie_word_embeddings=True),
    "gemma2": dict(GEMMA, **CAPS),
    "gemma3_text": dict(GEMMA),
    "gemma3n_text": dict(
        WINDOW, tie_word_embeddings=True, **PER_LAYER, num_kv_shared_layers=0, laurel_rank=8
    ),
    "gemma4_text": dict(WINDOW, tie_word_embeddings=True, **PER_LAYER, global_head_dim=32),
    "glm": {},
    "glm4": {},
    "glm4_moe": dict(ROUTED),
    "glm4_moe_lite": dict(ROUTED, **LATENT),
    "glm_moe_dsa": dict(ROUTED, **LATENT, **INDEXER),
    "gpt2": dict(
        n_embd=128,
        n_head=4,
        num_key_value_heads=4,
        n_layer=2,
        n_positions=256,
        tie_word_embeddings=True,
    ),
    "gpt_neox": dict(num_key_value_heads=4),
    "gpt_oss": dict(LOCAL_EXPERTS, **WINDOW),
    "granite": dict(
        attention_multiplier=0.2,
        logits_scaling=4.0,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
    ),
    "granitemoe": dict(LOCAL_EXPERTS, logits_scaling=4.0),
    "granitemoehybrid": dict(
        LOCAL_EXPERTS,
        logits_scaling=4.0,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=96,
        **MAMBA,
    ),
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2),
    "hy_v3": dict(EXPERTS, first_k_dense_replace=1, expert_hidden_dim=64, route_norm=True),
    "jamba": dict(
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_offset=1,
        attn_layer_period=2,
        use_mamba_kernels=False,
    ),
    "jais2": {},
    "kimi_linear": dict(EXPERTS, **LINEAR, **LATENT),
    "laguna": {},
    "lfm2": dict(CONVOLUTIONS),
    "lfm2_moe": dict(EXPERTS, num_dense_layers=1, **CONVOLUTIONS),
    "llama": {},
    "llama4_text": dict(
        num_local_experts=4,
        intermediate_size_mlp=96,
        # vLLM needs a multiple of 128.
        attention_chunk_size=128,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "longcat_flash": dict(
        LATENT, mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_type="identity"
    ),
    "mamba2": dict(num_heads=4, head_dim=64, state_size=16, n_groups=1, intermediate_size=256),
    "mellum": {},
    "mimo_v2_flash": dict(
        WINDOW,
        hybrid_layer_pattern=[1, 0],
        moe_layer_freq=[0, 1],
        mlp_layer_types=["dense", "sparse"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        layernorm_epsilon=1e-6,
        v_head_dim=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        swa_v_head_dim=32,
    ),
    "minimax": dict(num_local_experts=4, **LINEAR),
    "minimax_m2": dict(LOCAL_EXPERTS, rotary_dim=16, scoring_func="sigmoid"),
    "ministral": dict(WINDOW),
    "ministral3": {},
    "mistral": dict(sliding_window=8),
    "mixtral": dict(num_local_experts=4),
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": dict(
        layers_block_type=["mamba", "attention", "mlp"],
        num_hidden_layers=3,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_groups=1,
        n_group=1,
        topk_group=1,
    ),
    "olmo": dict(clip_qkv=1.0),
    "olmo2": {},
    "olmo3": dict(WINDOW),
    "olmo_hybrid": dict(LINEAR),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "phi": {},
    "phi3": {},
    "phimoe": dict(num_local_experts=4),
    "qwen2": {},
    "qwen2_moe": dict(SHARED_EXPERT),
    "qwen3": {},
    "qwen3_5_moe_text": dict(DELTA, **SHARED_EXPERT),
    "qwen3_5_text": dict(DELTA),
    "qwen3_moe": dict(EXPERTS),
    "qwen3_next": dict(DELTA, **SHARED_EXPERT),
    "seed_oss": {},
    "smollm3": dict(no_rope_layers=[1, 0]),
    "solar_open": dict(ROUTED),
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": dict(WINDOW),
    "youtu": dict(LATENT),
    "zaya": {},
}
# Families that also see images, and the family of their text model. They are trained and served as
# text. Image processors of some need torchvision, which vLLM's CPU build is installed without.
SEEING = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "internvl": "qwen2",
    "llava": "llama",
    "mistral3": "mistral",
    "smolvlm": "llama",
}
VISION = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
PROMPT = np.random.default_rng(1).integers(2, 120, 40).tolist()
NEW_TOKENS = 48


def shape_of(family):
    """The configuration of the tiny model of a family."""
    if family not in SEEING:
        return AutoConfig.for_model(family, **(TINY | FAMILIES[family]))
    text = TINY | FAMILIES[SEEING[family]] | dict(model_type=SEEING[family])
    tied = text["tie_word_embeddings"]
    return AutoConfig.for_model(
        family, text_config=text, vision_config=VISION, tie_word_embeddings=tied
    )


def make_model(family, path, dtype):
    """Save a random model of a family at `path`.

    All vectors (biases, norms) and the routers' correction biases, which are buffers in some
    families, are changed from their initial values. Biases of experts, which are matrices, are not.
    """
    torch.manual_seed(0)
    shape = shape_of(family)
    model = model_class(shape).from_config(shape, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_vector = isinstance(tensor, torch.nn.Parameter) and tensor.dim() == 1
            if is_vector or is_routers_bias(name):
                tensor.add_(0.1 * torch.randn_like(tensor))
    shutil.rmtree(path, ignore_errors=True)
    model.to(dtype).save_pretrained(path)
    make_tokenizer([toy]).save_pretrained(path)


def is_routers_bias(name):
    """Is this the bias by which routers choose experts? It has no gradient."""
    return name.endswith("correction_bias")


def sample(config, run_dir):
    """(token ids, logprobs in nats [NEW_TOKENS]) that the engine samples after PROMPT.

    Raises RuntimeError with the engine's answer if it is an error.
    """
    sampling = dict(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True)
    answer = requests.post(
        f"{url_of(config)}/inference/v1/generate",
        json=dict(token_ids=PROMPT, sampling_params=sampling),
        headers=secret_header(run_dir),
        timeout=300,
    )
    if answer.status_code != 200:
        raise RuntimeError(answer.text[:300])
    [choice] = answer.json()["choices"]
    return choice["token_ids"], torch.tensor(choice["behavior_logprobs"])


@torch.no_grad()
def trainer_logprobs(policy, tokens):
    """The trainer's logprobs of tokens after PROMPT, in a row with two other sequences."""
    sequences = [[5, 6, 7], [*PROMPT, *tokens], [*PROMPT, 8, 9, 10]]
    positions = np.concatenate([np.arange(len(x)) for x in sequences])
    logprobs, _ = policy.logprobs(np.concatenate(sequences), positions, 1.0)
    first = len(sequences[0]) + len(PROMPT)
    return logprobs[first : first + len(tokens)]


@torch.no_grad()
def own_logprobs(model, tokens):
    """The same of transformers alone."""
    sequence = np.array([*PROMPT, *tokens])
    return model_check.own_logprobs(model, [sequence])[len(PROMPT) - 1 :]


def mean_difference(a, b):
    return float((a - b).abs().mean())


def reason(error, run_dir):
    """An error as one short line; that of an engine which has died is in its log."""
    text = f"{type(error).__name__}: {error}"
    log = Path(run_dir, "logs", "engine0.log")
    if log.exists():
        lines = log.read_text().splitlines()
        errors = [x for x in lines if re.search(r"\w(Error|NotImplemented\w*)\b", x)]
        others = "EngineDead|core initialization|WARN|raise |leaked"
        causes = [x for x in errors if not re.search(others, x)]
        # "(EngineCore pid=1) ERROR 11-27 00:36:59 [core.py:1512] AssertionError: ..."
        text = re.sub(r"^\(.*?\.py:\d+\]", "", causes[-1]) if causes else text
    return " ".join(text.split())[:240]


@torch.no_grad()
def perturb(model):
    for name, p in model.named_parameters():
        if p.requires_grad and not is_routers_bias(name):
            p.add_(0.03 * torch.randn_like(p))


def measure_engine(config, run_dir, ranks, policy, result):
    """Add to `result` what is measured with an engine that runs: engine, trainer, update (nats),
    proof (a text; after one that is not "passed" nothing more is measured), pause (seconds).
    """
    own = model_class(AutoConfig.from_pretrained(config.model)).from_pretrained(
        config.model, dtype=torch.float32, attn_implementation="eager"
    )
    tokens, logprobs = sample(config, run_dir)
    expected = own_logprobs(own, tokens)
    result["engine"] = mean_difference(logprobs, expected)
    result["trainer"] = mean_difference(trainer_logprobs(policy, tokens), expected)
    publish_json(Path(run_dir, "engines", "engine0.json"), url=url_of(config), started="1")
    (run_dir / "queues").mkdir()
    sender = Sender(config, policy.model, ranks, run_dir)
    result["proof"] = "no answer"
    sender.push(0)
    try:
        sender.wait()
        result["proof"] = "passed"
    except Exception as e:
        result["proof"] = " ".join(str(e).split())[-240:]
        return
    updates = []
    pauses = []
    for version in (1, 2):
        perturb(policy.model)
        sender.push(version)
        sender.wait()
        pauses.append(sender.take_timing()["pause_s"])
        tokens, logprobs = sample(config, run_dir)
        updates.append(mean_difference(logprobs, trainer_logprobs(policy, tokens)))
    sender.close()
    result["update"] = max(updates)
    result["pause"] = max(pauses)


def measure(port, family, knobs):
    """Everything about one family, as a dict. A part that failed is the text of its error."""
    path = WORK / "families" / family
    result = {}
    dtype = knobs["dtype"]
    make_model(family, path, getattr(torch, dtype))
    start = time.monotonic()
    try:
        shape = AutoConfig.from_pretrained(path)
        model_check.check_supported(shape, cfg.Config(model=str(path), dtype=dtype))
        rows, result["said"] = model_check.choose_rows(str(path))
    except cfg.ConfigError as e:
        result |= dict(rows="refused", reason=str(e), seconds=time.monotonic() - start)
        return result
    result |= dict(rows=rows, seconds=time.monotonic() - start)
    options = dict(model=path, port=port, concurrency=4, max_model_len=128, dtype=dtype, rows=rows)
    config, run_dir = make_run(f"families-{family}", **options, max_new_tokens=NEW_TOKENS)
    engines = []
    try:
        ranks = Ranks(config)
        policy, _ = train.build(config, torch.device("cpu"), 1)
        engines = start_engines(config)
        measure_engine(config, run_dir, ranks, policy, result)
    except Exception as e:
        result["failed"] = reason(e, run_dir)
    finally:
        stop(engines, 0)
    return result


def number(x):
    return x if isinstance(x, str) else f"{x:.1e}" if x is not None else "-"


def rows_of(results):
    """Lines of the table."""
    for family, r in results.items():
        end = r.get("reason") or r.get("failed") or ""
        if r.get("proof", "passed") != "passed":
            end = r["proof"]
        pause = f"{1000 * r['pause']:.0f} ms" if "pause" in r else "-"
        numbers = [number(r.get(name)) for name in ("trainer", "engine", "update")]
        yield family, r["rows"], *numbers, pause, r["knobs"]["dtype"], end[:100]


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--families", default="", help="only these, with commas between them")
    p.add_argument("--port", type=int, default=8940)
    p.add_argument("--fresh", action="store_true", help="measure again what is in the file")
    a = p.parse_args(argv)
    names = [x for x in a.families.split(",") if x] or [*FAMILIES, *SEEING]
    torch.set_num_threads(1)
    wanted = {}
    for name in names:
        settings = dict(text=SEEING[name]) if name in SEEING else FAMILIES[name]
        in_bfloat16 = hasattr(shape_of(name).get_text_config(), "linear_key_head_dim")
        dtype = "bfloat16" if in_bfloat16 else "float32"
        wanted[name] = dict(settings, dtype=dtype)
    measure_one = functools.partial(measure, a.port)
    results = measured(result_file(a, "families"), wanted, measure_one, reuse=not a.fresh)
    header = ["family", "rows", "trainer", "engine", "update", "pause", "dtype", ""]
    table(header, rows_of(results))


if __name__ == "__main__":
    main()

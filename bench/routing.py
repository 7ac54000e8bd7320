"""What does --replay_routing change? Logprobs of a mixture of experts in bfloat16, computed twice.

    python bench/routing.py [--layers 8] [--tokens 512] [--seeds 5]

Engine and trainer are FAKE: vLLM tells which experts it chose on GPUs alone. Both are transformers
with the same random weights of a Qwen3 model (64 experts, a token goes to 8), in bfloat16. The
"engine" computes a sequence at a time with its own attention; the "trainer" computes all of them as
one packed row, with its own routers, and then with the experts that the engine chose. For each seed
the table has

    flips          share of tokens and layers for which the trainer's router chooses another set
    own, replayed  mean |logprob of the trainer - logprob of the engine| in nats
    float32        the same with the trainer in float32, its own routers
"""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import keep, machine, median_and_range, parser, result_file, table
from plumbing.model import decoder_of
from plumbing.routing import Routing
from tools.model_check import own_logprobs
from train import token_logprobs

SEQUENCES = 4
EXPERTS = dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=128)
HEADS = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
WIDTH = dict(hidden_size=512, intermediate_size=512, vocab_size=1024)


def make_models(layers, seed):
    """(engine, trainer, trainer in float32): three copies of one model."""
    shape = AutoConfig.for_model(
        "qwen3_moe",
        num_hidden_layers=layers,
        initializer_range=WIDTH["hidden_size"] ** -0.5,
        tie_word_embeddings=False,
        **EXPERTS,
        **HEADS,
        **WIDTH,
    )
    torch.manual_seed(seed)
    source = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).bfloat16()
    models = []
    for attention, dtype in (
        ("eager", torch.bfloat16),
        ("packed", torch.bfloat16),
        ("packed", torch.float32),
    ):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(shape), dtype=dtype, attn_implementation=attention
        ).eval()
        model.load_state_dict(source.state_dict())
        models.append(model)
    return models


@torch.no_grad()
def measure(layers, tokens, seed):
    """{flips, own, replayed, float32} of one seed; `tokens` are those of a sequence."""
    engine, trainer, exact = make_models(layers, seed)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, WIDTH["vocab_size"], tokens) for _ in range(SEQUENCES)]
    engines_routing = Routing(decoder_of(engine))
    sampled = []
    experts = []
    for ids in sequences:
        sampled.append(own_logprobs(engine, [ids]))
        experts.append(torch.cat([x.own for x in engines_routing.choices.values()], 1))
    sampled = torch.cat(sampled)
    experts = torch.cat(experts).numpy().astype(np.int16)
    row = np.concatenate(sequences)
    positions = np.concatenate([np.arange(tokens)] * SEQUENCES)
    has_context = torch.from_numpy(positions > 0)
    routing = Routing(decoder_of(trainer), replays=True)

    def difference(model, **options):
        logprobs, _ = token_logprobs(model, row, positions, 1.0, **options)
        return float((logprobs[has_context] - sampled).abs().mean())

    result = {"own": difference(trainer, routing=routing)}
    result["replayed"] = difference(trainer, routing=routing, experts=experts)
    flips, known = routing.sums()["router_flips"]
    result |= {"flips": float(flips / known), "float32": difference(exact)}
    return result


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--tokens", type=int, default=512)
    p.add_argument("--seeds", type=int, default=5)
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    results = [measure(a.layers, a.tokens, seed) for seed in range(a.seeds)]
    print(machine())
    rows = [[key, median_and_range([r[key] for r in results], ".2g")] for key in results[0]]
    table(["", "median (smallest to largest)"], rows)
    ratios = [r["replayed"] / r["own"] for r in results]
    print(f"replayed / own: {median_and_range(ratios)}")
    keep(result_file(a, "routing"), dict(machine=machine(), results=results))


if __name__ == "__main__":
    main()

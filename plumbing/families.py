"""What families of models do to their logits, and the check that the trainer computes what the model does.

Before anything is trained, `check_model` compares the trainer's logprobs (packed attention, chunked
head) with those of the model's own forward, and a packed row with its sequences one by one. A family
that does something which neither plumbing/attention.py nor `finish_logits` knows of ends the run
there, by name. Deliberately absent: a list of families; tests/test_families.py has one.
"""

import contextlib

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from plumbing.samples import layout

# tokens of the check's sequences, 64 together
LENGTHS = (5, 12, 8, 16, 23)


def finish_logits(logits, config):
    """What models do to the output of their head [.., V], as their Hugging Face config says."""
    # Granite divides by it, Cohere multiplies
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    # Gemma 2
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits


@contextlib.contextmanager
def own_attention(config):
    """Within it a model computes attention in its own way, with masks, and not in ours."""
    ours = config._attn_implementation
    # not "sdpa": that leaves out Gemma 2's soft caps, too
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = ours


def own_logprobs(model, tokens, device):
    """log p of each token but the first of one sequence [T] -> [T-1], by the model's own forward."""
    ids = torch.from_numpy(tokens).to(device)
    with own_attention(model.config):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits.float(), dim=-1)
    return logp.gather(1, ids[1:, None])[:, 0].cpu()


def trainer_logprobs(model, sequences):
    """Likewise by the trainer, of sequences packed into a row: [T] each -> [sum of T-1]."""
    positions, _ = layout([len(tokens) for tokens in sequences])
    row = np.concatenate(sequences)
    return model.token_logprobs(row, positions, 1.0)[0].cpu()[positions > 0]


@torch.no_grad()
def differences(model, device):
    """Mean |difference| in nats a token, of random tokens: (trainer and the model's own forward of
    one sequence, a packed row and its sequences one by one). Collective: each rank does the same.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    row = np.random.default_rng(0).integers(0, vocabulary, sum(LENGTHS))
    sequences = np.split(row, np.cumsum(LENGTHS)[:-1])
    own = own_logprobs(model, row, device) - trainer_logprobs(model, [row])
    separate = torch.cat([trainer_logprobs(model, [tokens]) for tokens in sequences])
    packed = trainer_logprobs(model, sequences) - separate
    if isinstance(model, FSDPModule):
        # a forward leaves the root's parameters gathered until its backward
        model.reshard()
    return own.abs().mean().item(), packed.abs().mean().item()


def check_model(model, device, limit):
    """Raise RuntimeError, by name, if the trainer does not compute what the model does. Collective.

    model: as train.build gives it; limit: nats a token.
    """
    family = model.config.model_type
    try:
        own, packed = differences(model, device)
    except (AttributeError, KeyError, TypeError) as e:
        raise RuntimeError(
            f"train: {family} does not run as packed rows need it ({type(e).__name__}: {e}): choose another model"
        ) from e
    # so that NaN is refused, too
    if not own <= limit:
        raise RuntimeError(
            f"train: the trainer's logprobs are {own:.1e} nats a token off those of {family}'s own forward, above "
            f"--mismatch_limit {limit:g}: this family does something that plumbing/families.py and plumbing/attention.py "
            "do not know; choose another model, or add it there"
        )
    if not packed <= limit:
        raise RuntimeError(
            f"train: sequences of {family} that are packed into a row see each other: {packed:.1e} nats a token, above "
            f"--mismatch_limit {limit:g}: recurrent layers and convolutions cannot be trained here; choose a model "
            "that has attention alone"
        )

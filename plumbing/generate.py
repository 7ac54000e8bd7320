"""Inside vLLM's HTTP server: POST /inference/v1/generate, the contract's call for tokens.

    {"token_ids": [...], "sampling_params": {...}, "cache_salt": "..."}
    {"choices": [{"token_ids": [...], "behavior_logprobs": [...], "finish_reason": "stop" or "length",
                  "weight_versions": [{"version": "2", "start": 0, "end": 110}, ...]}],
     "cached_tokens": 96}

`cached_tokens` of the prompt were not computed again. With `prompt_logprobs: 0` among the parameters the
answer also has the `prompt_logprobs` of all prompt tokens but the first. vLLM's own call of this name takes the same
requests, but makes and checks objects for every token, which here costs half of the server's CPU.
Deliberately absent: text, streaming.
"""

import asyncio
import itertools

import msgspec
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams


class Order(msgspec.Struct):
    """What is to be sampled. cache_salt: KV cache is shared between prompts of the same salt alone."""

    token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str | None = None


ORDERS = msgspec.json.Decoder(Order)
# of requests, from 0
NUMBERS = itertools.count()


async def sample(body, engine, receive, group):
    """The answer to a request's body, as bytes; None if the client went away meanwhile.

    group: number of the weight group from which the versions come; goes into the salt.
    Raises ValueError for what is no order, and what vLLM's engine raises.
    """
    order = ORDERS.decode(body)
    params = order.sampling_params
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.logprobs = 0
    params.flat_logprobs = True
    params.detokenize = False
    # nobody else has these parameters
    params.skip_clone = True
    request = str(next(NUMBERS))
    # without a salt it shares with nobody
    salt = request if order.cache_salt is None else f"{group}/{order.cache_salt}"
    prompt = tokens_input(order.token_ids, cache_salt=salt)
    work = asyncio.ensure_future(_last(engine.generate(prompt, params, request)))
    # says something once the client has hung up, and nothing before
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return None
        found = work.result()
        choices = [_choice(completion) for completion in found.outputs]
        answer = dict(choices=choices, cached_tokens=found.num_cached_tokens)
        if params.prompt_logprobs is not None:
            answer["prompt_logprobs"] = _of_prompt(found)
        return msgspec.json.encode(answer)
    finally:
        work.cancel()
        gone.cancel()


async def _last(outputs):
    """The last one of a request's outputs, which has all of it."""
    last = None
    async for output in outputs:
        last = output
    return last


def _of_prompt(found):
    """Logprob of each prompt token but the first, by the model at temperature 1."""
    tokens = found.prompt_token_ids[1:]
    return [found.prompt_logprobs[k][token].logprob for k, token in enumerate(tokens, 1)]


def _choice(completion):
    """One sampled sequence. RuntimeError if logprobs are of other tokens than were sampled."""
    tokens = list(completion.token_ids)
    if completion.logprobs.token_ids != tokens:
        raise RuntimeError("vLLM's logprobs are of other tokens than it sampled")
    return dict(
        token_ids=tokens,
        behavior_logprobs=completion.logprobs.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
    )

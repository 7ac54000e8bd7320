"""Inside vLLM's HTTP server: POST /inference/v1/generate, the contract's call for tokens.

    {"token_ids": [...], "sampling_params": {...}, "cache_salt": "..."}
    {"choices": [{"token_ids": [...], "behavior_logprobs": [...], "finish_reason": "stop" or "length",
                  "weight_versions": [{"version": "2", "start": 0, "end": 110}, ...]}],
     "cached_tokens": 96}

`cached_tokens` of the prompt were not computed again. With `prompt_logprobs: 0` among the parameters the answer
also has the `prompt_logprobs` of all prompt tokens but the first. vLLM's own call of this name makes and checks
objects for every token, which here costs half of the server's CPU.
"""

import asyncio
import itertools

import msgspec
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams


class Request(msgspec.Struct):
    """What is to be sampled. cache_salt: KV cache is shared between prompts of the same salt alone."""

    token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str | None = None


REQUEST_IDS = itertools.count()


async def sample(body, engine, receive, group):
    """The answer, as bytes; None if the client went away. group: number of the versions' weight group."""
    request = msgspec.json.decode(body, type=Request)
    params = request.sampling_params
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.logprobs = 0
    params.flat_logprobs = True
    params.detokenize = False
    # nobody else has these parameters
    params.skip_clone = True
    request_id = str(next(REQUEST_IDS))
    # without a salt it shares with nobody
    salt = request_id if request.cache_salt is None else f"{group}/{request.cache_salt}"
    prompt = tokens_input(request.token_ids, cache_salt=salt)
    work = asyncio.ensure_future(_final_output(engine.generate(prompt, params, request_id)))
    # says something once the client has hung up, and nothing before
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return _encode(work.result(), params) if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _final_output(outputs):
    """The last one of a request's outputs, which has all of it."""
    last = None
    async for output in outputs:
        last = output
    return last


def _encode(output, params):
    """The answer, from vLLM's output for one prompt."""
    [completion] = output.outputs
    choice = dict(
        token_ids=list(completion.token_ids),
        behavior_logprobs=completion.logprobs.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
    )
    answer = dict(choices=[choice], cached_tokens=output.num_cached_tokens)
    if params.prompt_logprobs is not None:
        # of each token but the first, by the model at temperature 1
        tokens = enumerate(output.prompt_token_ids[1:], 1)
        answer["prompt_logprobs"] = [output.prompt_logprobs[k][x].logprob for k, x in tokens]
    return msgspec.json.encode(answer)

"""The actor's HTTP server: an OpenAI endpoint for each attempt that asks for one, told apart by its key.

    POST /v1/chat/completions  tools and streaming, too       POST /v1/completions       GET /v1/models

A request's messages are rendered by an engine (vLLM's chat template and tool parser), but the past never again: what
the template adds is appended to the exact tokens of the exchange that the messages continue. The answer is sampled as
any other (Attempt.generate). Sampling is the run's own: what a client says of it is left out, and counted by name, or
refused where the answer would be another than it expects. Each request is a turn of its own, also one that is the same
as another; a client's retry alone shares the turn that it tries again for (Endpoint.turn). It listens on loopback alone.
Deliberately absent: stop strings, several choices, logprobs, images.
"""

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections import Counter
from typing import NamedTuple

import aiohttp
from aiohttp import web

from plumbing.episode import CutOff, EngineUnavailable

# what becomes part of a prompt, or of how an answer is sent
PASSED = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "prompt"}
PASSED |= {"max_tokens", "max_completion_tokens", "chat_template_kwargs", "parallel_tool_calls"}
# what an answer would not be as the client expects it without
REFUSED = {"n", "stop", "logit_bias", "logprobs", "echo", "best_of", "suffix"}
# what engines call the model, see placement.py; of requests to vLLM's renderer, which samples nothing
NAME = "policy"
OWN = dict(model=NAME, stream=False, stream_options=None, max_tokens=1, max_completion_tokens=1)
# the header in which the packages of OpenAI and Anthropic count the retries of a request
RETRY_COUNT = "x-stainless-retry-count"
# of a request: whose it is
ATTEMPT = web.RequestKey("attempt", object)


def error(status, words, code):
    """An answer of the shape that OpenAI's clients read."""
    body = dict(message=words, type="invalid_request_error", param=None, code=code)
    return web.json_response({"error": body}, status=status)


def said(message):
    """What a message says, to be compared with what a client sends back: (role, text, tool calls, whose answer)."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = [part.get("text", part) for part in content]
        content = "".join(content) if all(isinstance(x, str) for x in content) else content
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        # clients write the same JSON in another way
        with contextlib.suppress(ValueError, TypeError):
            arguments = json.loads(arguments)
        calls.append((call["function"]["name"], arguments))
    return message.get("role"), content, calls, message.get("tool_call_id")


class Exchange(NamedTuple):
    """A request and its answer. rendered: token ids of its messages; exact: those that were sent and sampled."""

    # its messages, the model's the last
    said: list
    thought: str
    rendered: list
    exact: list
    finished: bool


class Turn:
    """A turn of the model's that a request asked for.

    answer: asyncio.Task of it, None if it is not begun; clients: how many requests wait for it, or were sent all of it.
    """

    def __init__(self):
        self.answer = None
        self.clients = 0

    def is_begun(self):
        """False of a turn that has failed, too: a repeat of its request begins it again."""
        if self.answer is None or not self.answer.done():
            return self.answer is not None
        return not self.answer.cancelled() and self.answer.exception() is None


class Endpoint:
    """The server. attempts: {api key: Attempt}. url: where it listens, None before it is started."""

    def __init__(self, prompter, engines):
        self.prompter = prompter
        self.engines = engines
        self.attempts = {}
        self.url = None
        self.counts = Counter()
        # a request may be as large as a long conversation is
        app = web.Application(client_max_size=64 << 20, middlewares=[self.guard])
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        # the handler of a request ends when its client hangs up
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True)

    def forget(self, attempt):
        """It is over: its key is good for nothing, and what is still sampled for it is ended."""
        del self.attempts[attempt.api_key]
        for turns in attempt.requests.values():
            for turn in turns:
                if turn.answer:
                    turn.answer.cancel()

    async def start(self):
        await self.runner.setup()
        # clients are processes of this machine
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    async def close(self):
        await self.runner.cleanup()

    # ---- requests

    @web.middleware
    async def guard(self, request, handler):
        """Whose request it is; errors in the client's shape."""
        try:
            # while a body arrives its attempt may end
            await request.read()
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if key not in self.attempts:
                return error(401, "no attempt has this key, or it is over", "invalid_api_key")
            request[ATTEMPT] = self.attempts[key]
            return await handler(request)
        except CutOff as e:
            return error(400, str(e), "context_length_exceeded")
        except EngineUnavailable as e:
            return error(503, str(e), "no_engine")
        except ConnectionError:
            # nobody reads it
            return error(499, "the client has hung up", "hung_up")
        except web.HTTPException as e:
            return error(e.status, e.text, "invalid_request")
        except aiohttp.ClientResponseError as e:
            # vLLM's words for a prompt that is too long
            if "maximum context length" in e.message:
                return error(400, str(request[ATTEMPT].cut()), "context_length_exceeded")
            return error(e.status, e.message, "invalid_request")
        except (LookupError, TypeError, AttributeError, ValueError) as e:
            return error(400, f"not understood: {e!r}", "invalid_request")

    @contextlib.contextmanager
    def turn(self, request, body, work):
        """Gives the future of what work(attempt, body) returns, as long as the client of this request waits for it.

        Each request begins a turn of its own, unless a turn for the same body has no client: its client hung up before
        all of it was sent, or it failed; the oldest of them is this request's. A request that says it is a retry
        always has an earlier turn: if all of them have clients, its own may have got lost on the way.
        """
        turn_body = body | dict(stream=None, stream_options=None)
        key = f"{request.path} {json.dumps(turn_body, sort_keys=True)}"
        digest = hashlib.sha256(key.encode()).digest()
        turns = request[ATTEMPT].requests.setdefault(digest, [])
        retries = request.headers.get(RETRY_COUNT, "")
        is_retry = retries.isdecimal() and int(retries) > 0
        earlier = [x for x in turns if is_retry or x.answer]
        turn = min(earlier, key=lambda x: (x.clients, x.answer is None), default=None)
        if turn is None or turn.clients and not is_retry:
            turn = Turn()
            turns.append(turn)
        elif not is_retry:
            # perhaps not its own: the retry of the client that hung up finds another one, which is not begun
            turns.append(Turn())
        if not turn.is_begun():
            turn.answer = asyncio.ensure_future(work(request[ATTEMPT], self.clean(body)))
        turn.clients += 1
        try:
            # a client that hangs up does not end what it may ask for again
            yield asyncio.shield(turn.answer)
        except BaseException:
            turn.clients -= 1
            raise

    def clean(self, body):
        """A request without what is the run's own to say."""
        kept = {"chat_template_kwargs": self.prompter.thinking}
        for name, value in body.items():
            if name in REFUSED and value and (name, value) != ("n", 1):
                words = f"{name} is not supported: sampling is the run's own"
                raise web.HTTPBadRequest(text=words)
            if name in PASSED and value is not None:
                kept[name] = value
            elif value and name not in REFUSED:
                self.note(f"{name} of a client is left out")
        if kept.get("tool_choice", "auto") not in ("auto", "none"):
            self.note("tool_choice of a client is auto")
            kept["tool_choice"] = "auto"
        for tool in kept.get("tools", []):
            if tool["function"].pop("strict", None):
                self.note("strict of a client's tool is left out")
        return kept

    def note(self, words):
        """Count it; a line the first time."""
        self.counts[words] += 1
        if self.counts[words] == 1:
            print(f"actor: endpoint: {words}: sampling is the run's own", flush=True)

    async def models(self, request):
        model = dict(id=NAME, object="model", created=0, owned_by="run")
        return web.json_response(dict(object="list", data=[model]))

    async def chat(self, request):
        body = await request.json()
        with self.turn(request, body, self.say) as answer:
            message, finish, usage = await answer
            choice = dict(index=0, message=message, finish_reason=finish)
            calls = [dict(call, index=i) for i, call in enumerate(message.get("tool_calls") or [])]
            delta = message | dict(tool_calls=calls) if calls else message
            parts = [dict(index=0, delta=delta, finish_reason=None)]
            parts.append(dict(index=0, delta={}, finish_reason=finish))
            return await send(request, body, "chat.completion", choice, usage, parts)

    async def complete(self, request):
        body = await request.json()
        with self.turn(request, body, self.go_on) as answer:
            text, finish, usage = await answer
            choice = dict(index=0, text=text, finish_reason=finish, logprobs=None)
            return await send(request, body, "text_completion", choice, usage, [choice])

    # ---- what is sampled

    async def say(self, attempt, body):
        """A turn of a conversation: (message, finish_reason, usage)."""
        messages = [said(message) for message in body["messages"]]
        rendered = await self.render(body)
        past = [x for x in attempt.exchanges if x.said == messages[: len(x.said)]]
        prompt = rendered
        # the deepest first, of which each costs a rendering
        for exchange in sorted(past, key=lambda x: -len(x.said))[:3]:
            spliced = await self.splice(exchange, body, rendered)
            if spliced is not None:
                prompt = spliced
                break
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        answer = await attempt.generate(prompt, limit)
        message = await self.derender(body, prompt, answer)
        messages.append(said(message))
        thought = (message.get("reasoning") or "").strip()
        exact = prompt + answer["tokens"]
        exchange = Exchange(messages, thought, rendered, exact, answer["finished"])
        attempt.exchanges.append(exchange)
        calls = message.get("tool_calls")
        finish = "length" if not answer["finished"] else "tool_calls" if calls else "stop"
        return message, finish, usage_of(prompt, answer)

    async def splice(self, exchange, body, rendered):
        """The prompt of messages that continue an exchange: its exact tokens, and what the template adds. None if
        the template does not leave there what was said.
        """
        messages = body["messages"][: len(exchange.said)]
        past = await self.render(dict(body, messages=messages, add_generation_prompt=False))
        begin = len(exchange.rendered)
        if rendered[: len(past)] != past or past[:begin] != exchange.rendered:
            return None
        turn = past[begin:]
        text = self.prompter.tokenizer.decode(turn, clean_up_tokenization_spaces=False)
        ends = [i for i, token in enumerate(turn) if token in self.prompter.stop]
        if not ends or any(x not in text for x in (exchange.thought, exchange.said[-1][1].strip())):
            return None
        # after the end of the turn, which is there already if it was sampled
        separator = turn[ends[-1] + exchange.finished :]
        return exchange.exact + separator + rendered[len(past) :]

    async def go_on(self, attempt, body):
        """A completion of a text, or of token ids: (text, finish_reason, usage)."""
        given = body.get("prompt")
        prompter = self.prompter
        prompt = []
        if isinstance(given, str):
            # of exchanges (text so far, its tokens), the longest
            past = [x for x in attempt.texts if given.startswith(x[0])]
            text, tokens = max(past, key=lambda x: len(x[0]), default=("", []))
            more = prompter.tokenizer(given[len(text) :], add_special_tokens=not tokens)
            prompt = tokens + more["input_ids"]
        elif isinstance(given, list) and all(isinstance(x, int) for x in given):
            prompt = given
        if not prompt:
            raise web.HTTPBadRequest(text="prompt must be one text, or one list of token ids")
        answer = await attempt.generate(prompt, body.get("max_tokens"))
        text = prompter.decode(answer["tokens"])
        if isinstance(given, str):
            attempt.texts.append((given + text, prompt + answer["tokens"]))
        finish = "stop" if answer["finished"] else "length"
        return text, finish, usage_of(prompt, answer)

    # ---- vLLM's part

    async def render(self, body):
        """Messages as token ids, by the model's chat template."""
        answer = await self.engines.ask("/v1/chat/completions/render", body | OWN)
        return answer["token_ids"]

    async def derender(self, body, prompt, answer):
        """What was sampled as a message: text, reasoning, tool calls by the model's parsers."""
        # a text has no stop token
        tokens = answer["tokens"][: -1 if answer["finished"] else None]
        if not tokens:
            return dict(role="assistant", content="")
        choice = dict(index=0, token_ids=tokens, finish_reason="stop")
        # its detokenizer reads the prompt's end, its reasoning parser all of it
        generated = dict(request_id="", choices=[choice], prompt_token_ids=prompt)
        question = dict(generate_response=generated, chat_request=body | OWN)
        try:
            answer = await self.engines.ask("/v1/chat/completions/derender", question)
        except aiohttp.ClientResponseError:
            # what no parser takes, and JSON does not, such as half a character
            return dict(role="assistant", content=self.prompter.decode(tokens))
        message = answer["choices"][0]["message"]
        return {k: v for k, v in message.items() if v or k == "content"}


def usage_of(prompt, answer):
    n, m = len(prompt), len(answer["tokens"])
    return dict(prompt_tokens=n, completion_tokens=m, total_tokens=n + m)


async def send(request, body, kind, choice, usage, parts):
    """Send an answer that is there, whole, or as server-sent events, one for each of the choice's parts.

    Returns the response when all of it is sent. Raises ConnectionError, or is cancelled, if the client hangs up before.
    """
    head = dict(id=f"{kind}-{secrets.token_hex(8)}", created=0, model=NAME)
    if not body.get("stream"):
        whole = head | dict(object=kind, choices=[choice], usage=usage)
        response = web.json_response(whole)
        await response.prepare(request)
        await response.write_eof()
        return response
    head["object"] = "chat.completion.chunk" if kind == "chat.completion" else kind
    chunks = [head | dict(choices=[part]) for part in parts]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | dict(choices=[], usage=usage))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in map(json.dumps, chunks):
        await response.write(f"data: {chunk}\n\n".encode())
    await response.write_eof(b"data: [DONE]\n\n")
    return response

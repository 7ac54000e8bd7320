"""The actor's HTTP server: an endpoint for each attempt, told apart by its API key.

    POST /v1/chat/completions       OpenAI's, tools and streaming, too
    POST /v1/completions
    POST /v1/responses
    GET  /v1/models
    POST /v1/messages               Anthropic's, tools and streaming, too
    POST /v1/messages/count_tokens

An engine renders a request's messages with vLLM's chat template and tool parser. Earlier turns are
never rendered again: the tokens that the template adds are appended to the exact tokens of the
exchange that the messages continue. The answer is sampled by Attempt.generate, like any other turn.

The run's knobs decide how tokens are sampled. A client's options of sampling, and tools that it
does not run itself, are left out and counted by name; the request is refused if the client would
not get the answer that it expects.

Each request is a turn of its own, even if it is the same as another one. Only a retry shares the
turn of the request that it repeats (Endpoint.turn). A flood of requests waits in a line of its own
attempt, of which episode.AT_ONCE are served at a time. The server listens on loopback unless the
knob endpoint_host names another address.
Deliberately absent: stop strings, several choices, logprobs, images, encryption.
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

from plumbing import messages_api, responses_api
from plumbing.episode import CutOff, EngineUnavailable, TooManyRequests
from plumbing.placement import endpoint_socket

# the options that become part of the prompt, or say how the answer is sent
PASSED = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "prompt"}
PASSED |= {"max_tokens", "max_completion_tokens", "chat_template_kwargs", "parallel_tool_calls"}
# the options without which the client would not get the answer that it expects
REFUSED = {"n", "stop", "logit_bias", "logprobs", "echo", "best_of", "suffix"}
# the name by which engines know the model, see placement.py
MODEL_NAME = "policy"
# the options of a request to vLLM's renderer, which samples nothing
RENDER_OPTIONS = dict(
    model=MODEL_NAME, stream=False, stream_options=None, max_tokens=1, max_completion_tokens=1
)
# the limits on tokens that a client may set
LIMITS = ("max_tokens", "max_completion_tokens")
# the header in which the packages of OpenAI and Anthropic count the retries of a request
RETRY_COUNT = "x-stainless-retry-count"
# the key under which a web.Request keeps its Attempt
ATTEMPT = web.RequestKey("attempt", object)
# {HTTP status: the type of the error in both APIs}; all others are "invalid_request_error"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_TYPES |= {503: "overloaded_error"}
# what Python raises for a body that is not in the form of the API, or nests too many brackets
NOT_IN_FORM = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


def error_response(status, message, code):
    """A response in the form in which the clients of OpenAI and of Anthropic read errors."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    error = dict(message=message, type=kind, param=None, code=code)
    return web.json_response({"type": "error", "error": error}, status=status)


def cut_off_response(error):
    """The response to a request for which the attempt has no tokens left; error: its CutOff.

    Clients such as litellm know the first words as OpenAI's, and do not try again.
    """
    message = f"This model's maximum context length is reached: {error}"
    return error_response(400, message, "context_length_exceeded")


def over_response():
    """The response to a request whose API key belongs to no attempt in progress."""
    return error_response(
        401, "no attempt has this API key, or the attempt is over", "invalid_api_key"
    )


def comparable(message):
    """(role, text, tool calls, id of the answered tool call) of a message.

    They are equal for a message that was answered and the same message as a client sends it back.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [part.get("text", part) for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if message.get("role") == "assistant" and isinstance(content, str):
        # Clients may trim it; the tokens are those that were sampled.
        content = content.strip()
    calls = []
    for call in message.get("tool_calls") or []:
        # clients may write the same JSON differently
        calls.append((call["function"]["name"], messages_api.arguments_of(call)))
    return message.get("role"), content, calls, message.get("tool_call_id")


class Exchange(NamedTuple):
    """The messages of a request, and the answer."""

    # `comparable` of all messages, the last one the model's
    messages: list
    # the two texts of the model's message
    reasoning: str
    content: str
    # token ids of the request's messages, as an engine rendered them
    rendered: list
    # token ids that were sent and sampled
    exact: list
    finished: bool


class Turn:
    """A turn of the model that a request asked for.

    answer: the asyncio.Task that samples it; None before it is begun. clients: the number of
    requests that wait for the answer, or were sent all of it.
    """

    def __init__(self):
        self.answer = None
        self.clients = 0

    def is_begun(self):
        """Is it begun? It is not if it has failed: a repeated request then begins it again."""
        if self.answer is None or not self.answer.done():
            return self.answer is not None
        return not self.answer.cancelled() and self.answer.exception() is None


class Endpoint:
    """The server.

    host, port: where it listens; port 0: at any free one. attempts: {API key: Attempt}. url: the
    address of its API, None before the server is started.
    """

    def __init__(self, prompter, engines, host, port):
        self.host = host
        self.port = port
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
        app.router.add_post("/v1/responses", self.respond)
        app.router.add_post("/v1/messages", self.message)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        # the handler of a request ends when its client hangs up
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True)

    def forget(self, attempt):
        """End an attempt: its key is no longer valid, and its unfinished turns are cancelled."""
        del self.attempts[attempt.api_key]
        for turns in attempt.requests.values():
            for turn in turns:
                if turn.answer:
                    turn.answer.cancel()

    async def start(self):
        await self.runner.setup()
        listening = endpoint_socket(self.host, self.port)
        address, port, *_ = listening.getsockname()
        await web.SockSite(self.runner, listening).start()
        # an IPv6 address has colons, and stands in brackets in a URL
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{port}/v1"

    async def close(self):
        await self.runner.cleanup()

    # ---- requests

    @web.middleware
    async def guard(self, request, handler):
        """Find the request's attempt, and answer errors in the form that clients read."""
        keys = [request.headers.get("Authorization", "").removeprefix("Bearer ")]
        # the header of Anthropic's clients
        keys.append(request.headers.get("x-api-key", ""))
        key = next((key for key in keys if key in self.attempts), None)
        if key is None:
            return over_response()
        request[ATTEMPT] = self.attempts[key]
        try:
            # read the body first: the attempt may end while it arrives
            await request.read()
            if key not in self.attempts:
                return over_response()
            return await handler(request)
        except CutOff as e:
            return cut_off_response(e)
        except TooManyRequests as e:
            return error_response(429, str(e), "rate_limit_exceeded")
        except EngineUnavailable as e:
            return error_response(503, str(e), "no_engine")
        except ConnectionError:
            # nobody reads this response
            return error_response(499, "the client has hung up", "hung_up")
        except web.HTTPException as e:
            return error_response(e.status, e.text, "invalid_request")
        except aiohttp.ClientResponseError as e:
            # this is vLLM's message for a prompt that is too long
            if "maximum context length" in e.message:
                return cut_off_response(request[ATTEMPT].cut())
            return error_response(e.status, e.message, "invalid_request")
        except NOT_IN_FORM as e:
            message = f"the request is not in the form of the API {request.path}: {e!r}"
            return error_response(400, message, "invalid_request")

    @contextlib.contextmanager
    def turn(self, request, body, work):
        """Yield the future of the result of work(attempt, body), while the request's client waits.

        A request begins a turn of its own, unless an earlier turn of the same body has no client:
        its client hung up before all of the answer was sent, or the turn failed. The request then
        gets the oldest of these turns. A request that says it is a retry always gets an earlier
        turn: if all of them have clients, its own answer may have been lost on the way.
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
            # This turn may belong to a client that hung up and will retry. A turn that is not begun
            # is left for that retry.
            turns.append(Turn())
        if not turn.is_begun():
            turn.answer = asyncio.ensure_future(
                request[ATTEMPT].turn_limiter.run(work, request[ATTEMPT], self.accepted(body))
            )
        turn.clients += 1
        try:
            # a client that hangs up does not end a turn that it may ask for again
            yield asyncio.shield(turn.answer)
        except BaseException:
            turn.clients -= 1
            raise

    def accepted(self, body):
        """The options of a request that are passed on; raises HTTPBadRequest for a refused one."""
        options = {"chat_template_kwargs": self.prompter.thinking}
        for name, value in body.items():
            if name in REFUSED and value and (name, value) != ("n", 1):
                raise web.HTTPBadRequest(
                    text=f"{name} is not supported: the run's knobs decide how tokens are sampled"
                )
            if name in PASSED and value is not None:
                options[name] = value
            elif value and name not in REFUSED:
                self.count(f"{name} of a client is left out")
        for name in LIMITS:
            if name in options and type(options[name]) is not int:
                raise web.HTTPBadRequest(text=f"{name} must be a whole number")
        if options.get("tool_choice", "auto") not in ("auto", "none"):
            self.count("tool_choice of a client is auto")
            options["tool_choice"] = "auto"
        for tool in options.get("tools", []):
            if tool["function"].pop("strict", None):
                self.count("strict of a client's tool is left out")
        return options

    def count(self, event):
        """Count an event, and print it the first time."""
        self.counts[event] += 1
        if self.counts[event] == 1:
            print(f"actor: endpoint: {event}", flush=True)

    async def models(self, request):
        model = dict(id=MODEL_NAME, object="model", created=0, owned_by="run")
        return web.json_response(dict(object="list", data=[model]))

    async def chat(self, request):
        body = await request.json()
        with self.turn(request, body, self.answer_chat) as answer:
            message, finish, usage = await answer
            choice = dict(index=0, message=message, finish_reason=finish)
            calls = [dict(call, index=i) for i, call in enumerate(message.get("tool_calls") or [])]
            delta = message | dict(tool_calls=calls) if calls else message
            parts = [dict(index=0, delta=delta, finish_reason=None)]
            parts.append(dict(index=0, delta={}, finish_reason=finish))
            return await send(request, body, "chat.completion", choice, usage, parts)

    async def complete(self, request):
        body = await request.json()
        with self.turn(request, body, self.continue_text) as answer:
            text, finish, usage = await answer
            choice = dict(index=0, text=text, finish_reason=finish, logprobs=None)
            return await send(request, body, "text_completion", choice, usage, [choice])

    async def message(self, request):
        body = messages_api.chat_request(await request.json())
        with self.turn(request, body, self.answer_chat) as answer:
            head = dict(id=f"msg_{secrets.token_hex(8)}", model=MODEL_NAME)
            whole = messages_api.answer_of(*await answer, head)
            return await send_named(request, body, whole, messages_api.events_of)

    async def respond(self, request):
        given = await request.json()
        responses = request[ATTEMPT].responses
        items = responses_api.items_of(given, responses)
        body = responses_api.chat_request(given, items)
        with self.turn(request, body, self.answer_chat) as answer:
            head = dict(
                id=f"resp_{secrets.token_hex(8)}",
                model=MODEL_NAME,
                tools=given.get("tools") or [],
                tool_choice=given.get("tool_choice") or "auto",
                parallel_tool_calls=given.get("parallel_tool_calls") is not False,
            )
            whole = responses_api.answer_of(*await answer, head)
            if given.get("store") is not False:
                responses[whole["id"]] = [*items, *whole["output"]]
            return await send_named(request, body, whole, responses_api.events_of)

    async def count_tokens(self, request):
        body = messages_api.chat_request(await request.json())
        try:
            prompt = await request[ATTEMPT].count_limiter.run(self.render, self.accepted(body))
        except aiohttp.ClientResponseError as e:
            # Nothing is sampled, so the attempt is not cut off if the prompt is too long.
            return error_response(400, e.message, "invalid_request")
        return web.json_response(dict(input_tokens=len(prompt)))

    # ---- the model's turns

    async def answer_chat(self, attempt, body):
        """Sample the model's turn of a conversation: (message, finish_reason, usage)."""
        messages = [comparable(message) for message in body["messages"]]
        rendered = await self.render(body)
        continued = [
            exchange
            for exchange in attempt.exchanges
            if exchange.messages == messages[: len(exchange.messages)]
        ]
        continued.sort(key=lambda exchange: -len(exchange.messages))
        prompt = rendered
        # try the three longest ones, as each try costs a rendering
        for exchange in continued[:3]:
            spliced = await self.splice(exchange, body, rendered)
            if spliced is not None:
                prompt = spliced
                break
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        answer = await attempt.generate(prompt, limit)
        message = await self.derender(body, prompt, answer)
        messages.append(comparable(message))
        exchange = Exchange(
            messages=messages,
            reasoning=(message.get("reasoning") or "").strip(),
            content=(message.get("content") or "").strip(),
            rendered=rendered,
            exact=prompt + answer["tokens"],
            finished=answer["finished"],
        )
        attempt.exchanges.append(exchange)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        if not answer["finished"]:
            finish = "length"
        return message, finish, usage_of(prompt, answer)

    async def splice(self, exchange, body, rendered):
        """The prompt of messages that continue an exchange, made of exact tokens.

        It is the exchange's exact tokens, and then the tokens that the template adds. None if the
        template changes the exchange, as one does that drops old thinking.
        """
        messages = body["messages"][: len(exchange.messages)]
        past = await self.render(dict(body, messages=messages, add_generation_prompt=False))
        begin = len(exchange.rendered)
        if rendered[: len(past)] != past or past[:begin] != exchange.rendered:
            return None
        # the model's turn as the template renders it
        turn = past[begin:]
        text = self.prompter.tokenizer.decode(turn, clean_up_tokenization_spaces=False)
        ends = [i for i, token in enumerate(turn) if token in self.prompter.stop]
        if not ends or exchange.reasoning not in text or exchange.content not in text:
            return None
        # the tokens after the stop token, which is itself left out if it was sampled
        separator = turn[ends[-1] + exchange.finished :]
        return exchange.exact + separator + rendered[len(past) :]

    async def continue_text(self, attempt, body):
        """Sample a completion of a text, or of token ids: (text, finish_reason, usage)."""
        given = body.get("prompt")
        prompt = []
        if isinstance(given, str):
            # (text, token ids) of the longest text so far that the prompt continues
            continued = [entry for entry in attempt.texts if given.startswith(entry[0])]
            text, tokens = max(continued, key=lambda entry: len(entry[0]), default=("", []))
            encoded = self.prompter.tokenizer(given[len(text) :], add_special_tokens=not tokens)
            prompt = tokens + encoded["input_ids"]
        elif isinstance(given, list) and all(type(x) is int for x in given):
            prompt = given
        if not prompt:
            raise web.HTTPBadRequest(text="prompt must be one text, or one list of token ids")
        if not 0 <= min(prompt) <= max(prompt) < self.engines.vocabulary:
            raise web.HTTPBadRequest(
                text=f"the model has the token ids 0 to {self.engines.vocabulary - 1} only"
            )
        answer = await attempt.generate(prompt, body.get("max_tokens"))
        text = self.prompter.decode(answer["tokens"])
        if isinstance(given, str):
            attempt.texts.append((given + text, prompt + answer["tokens"]))
        finish = "stop" if answer["finished"] else "length"
        return text, finish, usage_of(prompt, answer)

    # ---- requests to vLLM's renderer

    async def render(self, body):
        """Render messages as token ids, by the model's chat template."""
        answer = await self.engines.ask("/v1/chat/completions/render", body | RENDER_OPTIONS)
        return answer["token_ids"]

    async def derender(self, body, prompt, answer):
        """Make a message of sampled tokens; vLLM's parsers find its reasoning and tool calls."""
        tokens = answer["tokens"]
        if answer["finished"]:
            # the stop token is no part of a text
            tokens = tokens[:-1]
        if not tokens:
            return dict(role="assistant", content="")
        choice = dict(index=0, token_ids=tokens, finish_reason="stop")
        # vLLM's detokenizer reads the end of the prompt, its reasoning parser all of it
        generated = dict(request_id="", choices=[choice], prompt_token_ids=prompt)
        derender_body = dict(generate_response=generated, chat_request=body | RENDER_OPTIONS)
        try:
            derendered = await self.engines.ask("/v1/chat/completions/derender", derender_body)
        except aiohttp.ClientResponseError:
            # the parsers or JSON do not take this text, such as half a character
            return dict(role="assistant", content=self.prompter.decode(tokens))
        message = derendered["choices"][0]["message"]
        if body.get("parallel_tool_calls") is False and message.get("tool_calls"):
            message["tool_calls"] = message["tool_calls"][:1]
        return {name: value for name, value in message.items() if value or name == "content"}


def usage_of(prompt, answer):
    """The numbers of tokens that a response reports under "usage"."""
    prompt_tokens = len(prompt)
    completion_tokens = len(answer["tokens"])
    return dict(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


async def send(request, body, kind, choice, usage, parts):
    """Send an answer of OpenAI's API: whole, or as events, one for each of `parts`.

    parts: the choice in the form of a stream. It returns and raises what `send_events` does.
    """
    head = dict(id=f"{kind}-{secrets.token_hex(8)}", created=0, model=MODEL_NAME)
    if not body.get("stream"):
        return await send_whole(request, head | dict(object=kind, choices=[choice], usage=usage))
    head["object"] = "chat.completion.chunk" if kind == "chat.completion" else kind
    chunks = [head | dict(choices=[part]) for part in parts]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | dict(choices=[], usage=usage))
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return await send_events(request, [*events, "data: [DONE]\n\n"])


async def send_named(request, body, whole, events_of):
    """Send an answer whole, or as the named events that events_of(whole) returns.

    It returns and raises what `send_events` does.
    """
    if not body.get("stream"):
        return await send_whole(request, whole)
    events = [f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events_of(whole)]
    return await send_events(request, events)


async def send_whole(request, whole):
    """Send a dict as one JSON object; it returns and raises what `send_events` does."""
    response = web.json_response(whole)
    await response.prepare(request)
    await response.write_eof()
    return response


async def send_events(request, events):
    """Send texts of server-sent events. Returns the response when all of them are sent.

    If the client hangs up before, raises ConnectionError or is cancelled.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response

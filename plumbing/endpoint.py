"""The actor's HTTP server: an OpenAI endpoint for each attempt that asks for one, told apart by its key.

    POST /v1/chat/completions  tools and streaming, too       POST /v1/completions       GET /v1/models

A request's messages are rendered by an engine (vLLM's chat template and tool parser), but the past never again: what
the template adds is appended to the exact tokens of the exchange that the messages continue. The answer is sampled as
any other (Attempt.generate). Sampling is the run's own: what a client says of it is left out, and counted by name, or
refused where the answer would be another than it expects. It listens on loopback alone.
Deliberately absent: stop strings, several choices, logprobs, images.
"""

import asyncio
import contextlib
import json
import secrets
from collections import Counter

from aiohttp import web

from plumbing.client import Refused
from plumbing.episode import CutOff, Failed

# what becomes part of a prompt, or of how an answer is sent
PASSED = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "prompt"}
PASSED |= {"max_tokens", "max_completion_tokens", "chat_template_kwargs", "parallel_tool_calls"}
# what an answer would not be as the client expects it without
REFUSED = {"n", "stop", "logit_bias", "logprobs", "echo", "best_of", "suffix"}
ONE = (("n", 1), ("best_of", 1))
# what engines call the model, see launch.py; of requests to vLLM's renderer, which samples nothing
NAME = "policy"
OWN = dict(model=NAME, stream=False, stream_options=None, max_tokens=1, max_completion_tokens=1)
# a client may have as large a request as a long conversation is
LARGEST = 64 << 20


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


def is_same(message, other):
    return said(message) == said(other)


class Exchange:
    """A request and its answer. rendered: token ids of its messages; exact: those that were sent and sampled."""

    def __init__(self, messages, rendered, exact, answer, reply):
        self.messages = messages
        self.rendered = rendered
        self.exact = exact
        self.finished = answer["finished"]
        self.reply = reply

    def is_continued_by(self, messages):
        """Do these messages begin with this exchange's, and what the model said to them?"""
        past = [*self.messages, self.reply]
        return len(messages) > len(past) and all(map(is_same, past, messages))


class Endpoint:
    """The server. actor: actor.Actor; url: where it listens, once it is started."""

    def __init__(self, actor):
        self.actor = actor
        # by key
        self.attempts = {}
        self.url = None
        self.counts = Counter()
        self.runner = None

    def forget(self, attempt):
        """It is over: its key is good for nothing, and what is still sampled for it is ended."""
        del self.attempts[attempt.api_key]
        for running in attempt.requests.values():
            running.cancel()

    async def start(self):
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/v1/models", self.answer(self.models))
        app.router.add_post("/v1/chat/completions", self.answer(self.chat))
        app.router.add_post("/v1/completions", self.answer(self.complete))
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        # clients are processes of this machine
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    async def close(self):
        if self.runner:
            await self.runner.cleanup()

    # ---- requests

    def answer(self, handle):
        """An aiohttp handler: whose request it is, and errors in the client's shape."""

        async def handler(request):
            header = request.headers.get("Authorization", "").removeprefix("Bearer ")
            attempt = self.attempts.get(header)
            if attempt is None:
                return error(401, "no attempt has this key, or it is over", "invalid_api_key")
            try:
                return await handle(attempt, request)
            except CutOff as e:
                return error(400, str(e), "context_length_exceeded")
            except Failed as e:
                return error(503, str(e), "no_engine")
            except Refused as e:
                return error(e.status, str(e), "invalid_request")
            except (LookupError, TypeError, AttributeError) as e:
                return error(400, f"not understood: {e!r}", "invalid_request")

        return handler

    async def once(self, attempt, request, work):
        """What work(body) gives; a client's retry of a request gets the same."""
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError as e:
            raise Refused(400, f"no JSON: {e}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body is no JSON object")
        digest = (request.path, json.dumps({**body, "stream": None}, sort_keys=True))
        running = attempt.requests.get(digest)
        if running is None or running.done() and running.exception():
            running = attempt.requests[digest] = asyncio.ensure_future(
                work(attempt, self.clean(body))
            )
        # a client that hangs up does not end what its retry will ask for
        return body, await asyncio.shield(running)

    def clean(self, body):
        """A request without what is the run's own to say. Raises Refused."""
        kept = {}
        for name, value in body.items():
            if name in REFUSED and value and (name, value) not in ONE:
                raise Refused(400, f"{name} is not supported: sampling is the run's own")
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

    async def models(self, attempt, request):
        model = dict(id=NAME, object="model", created=0, owned_by="run")
        return web.json_response(dict(object="list", data=[model]))

    async def chat(self, attempt, request):
        body, (message, finish, usage) = await self.once(attempt, request, self.say)
        choice = dict(index=0, message=message, finish_reason=finish)
        calls = [dict(call, index=i) for i, call in enumerate(message.get("tool_calls") or [])]
        delta = message | dict(tool_calls=calls) if calls else message
        parts = [dict(index=0, delta=delta, finish_reason=None)]
        parts.append(dict(index=0, delta={}, finish_reason=finish))
        return await send(request, body, "chat.completion", choice, usage, parts)

    async def complete(self, attempt, request):
        body, (text, finish, usage) = await self.once(attempt, request, self.go_on)
        choice = dict(index=0, text=text, finish_reason=finish, logprobs=None)
        return await send(request, body, "text_completion", choice, usage, [choice])

    # ---- what is sampled

    async def say(self, attempt, body):
        """A turn of a conversation: (message, finish_reason, usage)."""
        messages = body.get("messages")
        if not messages:
            raise Refused(400, "messages are missing")
        rendered = await self.render(body)
        past = [x for x in attempt.exchanges if x.is_continued_by(messages)]
        # the deepest first
        past.sort(key=lambda exchange: -len(exchange.messages))
        prompt = rendered
        for exchange in past:
            spliced = await self.splice(exchange, body, rendered)
            if spliced is not None:
                prompt = spliced
                break
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        answer = await attempt.generate(prompt, limit)
        message = await self.derender(body, prompt, answer)
        exact = prompt + answer["tokens"]
        attempt.exchanges.append(Exchange(messages, rendered, exact, answer, message))
        calls = message.get("tool_calls")
        finish = "length" if not answer["finished"] else "tool_calls" if calls else "stop"
        return message, finish, usage_of(prompt, answer)

    async def splice(self, exchange, body, rendered):
        """The prompt of messages that continue an exchange: its exact tokens, and what the template adds. None if
        the template does not leave there what was said.
        """
        n = len(exchange.messages) + 1
        past = dict(body, messages=body["messages"][:n], add_generation_prompt=False)
        past = await self.render(past)
        begin = len(exchange.rendered)
        if rendered[: len(past)] != past or past[:begin] != exchange.rendered:
            return None
        turn = past[begin:]
        text = self.actor.prompter.tokenizer.decode(turn)
        thought = exchange.reply.get("reasoning") or ""
        ends = [i for i, token in enumerate(turn) if token in self.actor.prompter.stop]
        if thought.strip() not in text or not ends:
            return None
        # after the end of the turn, which is there already if it was sampled
        separator = turn[ends[-1] + exchange.finished :]
        return exchange.exact + separator + rendered[len(past) :]

    async def go_on(self, attempt, body):
        """A completion of a text, or of token ids: (text, finish_reason, usage)."""
        given = body.get("prompt")
        prompter = self.actor.prompter
        if isinstance(given, str):
            # of exchanges (text so far, its tokens), the longest
            past = [x for x in attempt.texts if given.startswith(x[0])]
            text, tokens = max(past, key=lambda x: len(x[0]), default=("", []))
            prompt = (
                tokens
                + prompter.tokenizer(given[len(text) :], add_special_tokens=not tokens)["input_ids"]
            )
        elif isinstance(given, list) and all(isinstance(x, int) for x in given):
            prompt = given
        else:
            raise Refused(400, "prompt must be one text, or one list of token ids")
        answer = await attempt.generate(prompt, body.get("max_tokens"))
        text = prompter.decode(answer["tokens"])
        if isinstance(given, str):
            attempt.texts.append((given + text, prompt + answer["tokens"]))
        finish = "stop" if answer["finished"] else "length"
        return text, finish, usage_of(prompt, answer)

    # ---- vLLM's part

    async def render(self, body):
        """Messages as token ids, by the model's chat template."""
        answer = await self.actor.engines.ask("/v1/chat/completions/render", body | OWN)
        return answer["token_ids"]

    async def derender(self, body, prompt, answer):
        """What was sampled as a message: text, reasoning, tool calls by the model's parsers."""
        finish = "stop" if answer["finished"] else "length"
        choice = dict(index=0, token_ids=answer["tokens"], finish_reason=finish)
        # its detokenizer reads the prompt's end, its reasoning parser all of it
        generated = dict(request_id="", choices=[choice], prompt_token_ids=prompt)
        question = dict(generate_response=generated, chat_request=body | OWN)
        answer = await self.actor.engines.ask("/v1/chat/completions/derender", question)
        message = answer["choices"][0]["message"]
        return {k: v for k, v in message.items() if v or k == "content"}


def usage_of(prompt, answer):
    n, m = len(prompt), len(answer["tokens"])
    return dict(prompt_tokens=n, completion_tokens=m, total_tokens=n + m)


async def send(request, body, kind, choice, usage, parts):
    """An answer that is there, whole, or as server-sent events, one for each of the choice's parts."""
    head = dict(id=f"{kind}-{secrets.token_hex(8)}", created=0, model=NAME)
    if not body.get("stream"):
        return web.json_response(head | dict(object=kind, choices=[choice], usage=usage))
    head["object"] = "chat.completion.chunk" if kind == "chat.completion" else kind
    chunks = [head | dict(choices=[part]) for part in parts]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | dict(choices=[], usage=usage))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in [*map(json.dumps, chunks), "[DONE]"]:
        await response.write(f"data: {chunk}\n\n".encode())
    await response.write_eof()
    return response

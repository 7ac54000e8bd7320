"""Episodes and their endpoint: which tokens are kept and trained, whatever a client sends.

The actor and its endpoint are real, and so is the openai package where it is the client. The
engine, its chat template and its tool parser are FAKE (ChatEngine); tests/test_agents.py has the
real ones.
"""

import asyncio
import json
import re
import shlex
import socket
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
import torch
from aiohttp import web
from test_actor import FakeEngine, choice, with_fake_engine
from test_tasks import prompter

import config as cfg
from actor import Sampler
from plumbing import client, messages_api, placement, responses_api
from plumbing.episode import AT_ONCE, AttemptLost
from tasks import agent
from tasks import guess as task

TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatEngine(FakeEngine):
    """A FAKE engine with vLLM's two calls for chats. has_parser: whether it parses thoughts."""

    has_parser = True

    def __init__(self, answer, tokenizer):
        super().__init__(answer)
        self.tokenizer = tokenizer

    def routes(self):
        path = "/v1/chat/completions"
        return [
            *super().routes(),
            web.post(f"{path}/render", self.render),
            web.post(f"{path}/derender", self.derender),
        ]

    async def render(self, request):
        body = await request.json()
        if body["messages"] == "wrong":
            return web.json_response({"error": {"message": "no messages"}}, status=400)
        if body["messages"][-1]["content"] == "too long":
            message = "This model's maximum context length is 5 tokens"
            return web.json_response({"error": {"message": message}}, status=400)
        text = self.tokenizer.apply_chat_template(
            body["messages"],
            tokenize=False,
            add_generation_prompt=body.get("add_generation_prompt", True),
        )
        return web.json_response({"token_ids": self.tokenizer(text)["input_ids"]})

    async def derender(self, request):
        body = await request.json()
        [choice] = body["generate_response"]["choices"]
        text = self.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        thought = ""
        if self.has_parser:
            thought, _, text = text.rpartition("</think>")
        calls = re.findall(r"<call>(\w+) (.*?)</call>", text)
        calls = [
            dict(id="1", type="function", function=dict(name=a, arguments=b)) for a, b in calls
        ]
        text = re.sub(r"<call>.*?</call>", "", text)
        message = dict(role="assistant", content=text, tool_calls=calls, refusal=None)
        message["reasoning"] = thought.removeprefix("<think>") or None
        return web.json_response({"choices": [dict(message=message, finish_reason="stop")]})


class Client:
    """A client that knows the URL and the key of an attempt."""

    def __init__(self, model):
        self.url = model.base_url
        self.key = model.api_key

    async def post(self, path, key=None, retries=None, **body):
        """Return (status, text) of an answer. retries: the value of the header for retries."""
        headers = {"Authorization": f"Bearer {key or self.key}"}
        if retries is not None:
            headers["X-Stainless-Retry-Count"] = str(retries)
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{self.url}/{path}", json=body) as answer:
                return answer.status, await answer.text()

    async def chat(self, *messages, retries=None, **body):
        """Return the message of the answer."""
        request = dict(messages=list(messages), retries=retries) | body
        status, text = await self.post("chat/completions", **request)
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]


def user(text):
    return dict(role="user", content=text)


def play(tmp_path, says, episode, template=TOOLS, attempts=1, seed=None, as_group=False, **knobs):
    """Make attempts in which the model says these texts; return (samples, prompts, actor).

    as_group: they go into queues/rollouts instead, and no samples are returned.
    """
    p = prompter(tmp_path / "model", template, merges=[("s", "o")])

    def answer(n, body):
        text = says[n - 1].replace(" ", "Ġ")
        # Sampled a character at a time, as the tokenizer would not do it
        tokens = [p.tokenizer.convert_tokens_to_ids(c) for c in text]
        tokens.append(p.tokenizer.eos_token_id)
        return choice(tokens, [(str(n), 0, len(tokens))])

    samples = []

    async def work(actor):
        problem = dict(prompt="Go.")
        if as_group:
            return await actor.group(
                0, "guess", 0, problem, Sampler({"guess": [0]}, {"guess": 1.0}, 0)
            )
        tries = [actor.attempt("guess", problem, 1.0, seed=seed) for _ in range(attempts)]
        samples.extend(await asyncio.gather(*tries))

    task_episode, task.episode = task.episode, episode
    limits = dict(task="guess", max_model_len=2000, max_new_tokens=200, row_tokens=4096)
    limits |= dict(attempts=attempts)
    try:
        engine = ChatEngine(answer, p.tokenizer)
        actor, calls = with_fake_engine(
            tmp_path, tmp_path / "model", None, work, engine=engine, **limits | knobs
        )
    finally:
        task.episode = task_episode
    actor.calls = calls
    return samples, [call["token_ids"] for call in calls], actor


def text_of(tmp_path, tokens):
    return prompter(tmp_path / "model", TOOLS, merges=[("s", "o")]).tokenizer.decode(tokens)


def test_earlier_turns_keep_their_tokens_and_are_not_rendered_again(tmp_path):
    """Their exact tokens and the separator stay, though the client changes a tool call's spaces."""

    async def episode(problem, model):
        c = Client(model)
        first = await c.chat(user("Hi"), tools=[dict(type="function", function=dict(name="f"))])
        assert first["tool_calls"][0]["function"] == dict(name="f", arguments='{"a":  1}')
        call = dict(first["tool_calls"][0], function=dict(name="f", arguments='{"a": 1}'))
        again = dict(role="assistant", content=None, tool_calls=[call])
        result = dict(role="tool", content="so 7", tool_call_id="1")
        last = await c.chat(user("Hi"), again, result)
        assert last["content"] == "so!"
        return 1.0

    [sample], prompts, _ = play(tmp_path, ['<call>f {"a":  1}</call>', "so!"], episode)
    assert prompts[1][: len(prompts[0])] == prompts[0]
    text = text_of(tmp_path, sample["tokens"])
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '<call>f {"a":  1}</call><|im_end|>\n'
        "<|im_start|>tool\nso 7<|im_end|>\n<|im_start|>assistant\nso!<|im_end|>"
    )
    assert sample["segment"].tolist() == [0] * len(sample["tokens"])
    sampled = sample["tokens"][sample["mask"]]
    assert text_of(tmp_path, sampled) == '<call>f {"a":  1}</call><|im_end|>so!<|im_end|>'
    # "so" of the tool is one token; "so" of the model was sampled as two
    assert len(sampled) == 24 + 1 + 3 + 1
    assert sample["reward"] == 1.0 and sample["num_versions"] == 2


def test_a_template_that_drops_old_thoughts_begins_a_new_segment(tmp_path):
    async def episode(problem, model):
        c = Client(model)
        first = await c.chat(user("Hi"))
        assert first["reasoning"] == "hm" and first["content"] == "A"
        await c.chat(user("Hi"), dict(role="assistant", content="A"), user("B"))
        return 0.5

    [sample], prompts, _ = play(tmp_path, ["<think>hm</think>A", "C"], episode)
    parts = [sample["tokens"][sample["segment"] == k] for k in (0, 1)]
    assert text_of(tmp_path, parts[0]).endswith("<think>hm</think>A<|im_end|>")
    assert text_of(tmp_path, parts[1]).endswith(
        "A<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\nC<|im_end|>"
    )
    # Each turn is trained once, in its segment
    masks = [sample["mask"][sample["segment"] == k].sum() for k in (0, 1)]
    assert masks == [len("<think>hm</think>A") + 1, 2]


def test_dropped_thoughts_begin_a_new_segment_without_a_reasoning_parser(tmp_path, monkeypatch):
    monkeypatch.setattr(ChatEngine, "has_parser", False)
    dropping = TOOLS.replace("m.content or ''", "(m.content or '').split('</think>')[-1]")

    async def episode(problem, model):
        first = await Client(model).chat(user("Hi"))
        assert first["content"] == "<think>hm</think>A"
        await Client(model).chat(user("Hi"), first, user("B"))
        return 0.5

    [sample], prompts, _ = play(tmp_path, ["<think>hm</think>A", "C"], episode, dropping)
    assert set(sample["segment"]) == {0, 1}
    assert "hm" not in text_of(tmp_path, prompts[1])


def test_branches_and_other_conversations_are_one_sample(tmp_path):
    """Tokens that were sampled before a branch are trained once."""

    async def episode(problem, model):
        c = Client(model)
        first = await c.chat(user("Hi"))
        await asyncio.gather(
            c.chat(user("Hi"), first, user("left")),
            c.chat(user("Hi"), first, user("right")),
            c.chat(dict(role="system", content="You help."), user("Hi")),
        )
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["one", "two", "three", "four"], episode)
    assert sample["segment"].max() == 2
    texts = [text_of(tmp_path, sample["tokens"][sample["segment"] == k]) for k in range(3)]
    assert sum("one<|im_end|>" in text for text in texts) == 2
    trained = text_of(tmp_path, sample["tokens"][sample["mask"]])
    assert sorted(trained.split("<|im_end|>")) == ["", "four", "one", "three", "two"]
    assert (
        np.flatnonzero(sample["versions"] >= 0).tolist() == np.flatnonzero(sample["mask"]).tolist()
    )


SAME = ["one", "two", "three", "four"]


async def asked_four_times(ask, way):
    """Call ask() four times, at once or one after the other; return what the calls return."""
    if way == "at once":
        return await asyncio.gather(*(ask() for _ in SAME))
    return [await ask() for _ in SAME]


@pytest.mark.parametrize("way", ["at once", "in turn"])
@pytest.mark.parametrize("kind", ["chat", "stream", "completion", "token ids"])
def test_the_same_request_four_times_is_four_samples(tmp_path, way, kind):
    """The first requests of four clients, each on a connection of its own."""
    bodies = {
        "chat": dict(messages=[user("Hi")]),
        "stream": dict(messages=[user("Hi")], stream=True),
        "completion": dict(prompt="Hi"),
        "token ids": dict(prompt=[5, 6]),
    }
    path = "chat/completions" if "messages" in bodies[kind] else "completions"

    async def episode(problem, model):
        async def ask():
            status, text = await Client(model).post(path, **bodies[kind])
            assert status == 200, text
            return re.search("|".join(SAME), text)[0]

        assert sorted(await asked_four_times(ask, way)) == sorted(SAME)
        return 1.0

    [sample], prompts, _ = play(tmp_path, SAME, episode)
    assert sample["segment"].max() == 3 and sample["reward"] == 1.0
    assert all(prompt == prompts[0] for prompt in prompts)
    trained = text_of(tmp_path, sample["tokens"][sample["mask"]])
    assert sorted(trained.split("<|im_end|>")) == ["", *sorted(SAME)]


@pytest.mark.parametrize("way", ["at once", "in turn"])
def test_the_same_request_four_times_has_four_seeds_in_an_evaluation(tmp_path, way):
    async def episode(problem, model):
        await asked_four_times(lambda: Client(model).chat(user("Hi")), way)
        return 1.0

    _, _, actor = play(tmp_path, SAME, episode, seed=7)
    seeds = [call["sampling_params"]["seed"] for call in actor.calls]
    assert sorted(seeds) == [7, 8, 9, 10]


def held_back(model):
    """Hold back the engines' answers until the returned event is set."""
    generate = model.services.engines.generate
    may_answer = asyncio.Event()

    async def late(*args, **kwargs):
        answer = await generate(*args, **kwargs)
        await may_answer.wait()
        return answer

    model.services.engines.generate = late
    return may_answer


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def clients_of_turns(model):
    """Return the number of clients of each turn that was begun, the oldest first."""
    return [turn.clients for [*turns] in model.requests.values() for turn in turns if turn.answer]


@pytest.mark.parametrize("count", [1, 4])
def test_retries_of_the_openai_package_share_the_turns_that_they_gave_up_on(tmp_path, count):
    """Engines answer when the client has given up as many requests as it made."""

    async def episode(problem, model):
        may_answer = held_back(model)
        retries = []

        async def note(request):
            retries.append(int(request.headers["x-stainless-retry-count"]))
            if sum(n > 0 for n in retries) >= count:
                may_answer.set()

        openai_client = openai.AsyncOpenAI(
            base_url=model.base_url,
            api_key=model.api_key,
            timeout=0.3,
            max_retries=20,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks=dict(request=[note])),
        )
        async with openai_client as c:
            ask = c.chat.completions.create
            asked = [ask(model="policy", messages=[user("Hi")]) for _ in range(count)]
            answers = await asyncio.gather(*asked)
            texts = [answer.choices[0].message.content for answer in answers]
            assert sorted(texts) == sorted(SAME[:count])
            # The next request is no retry
            answer = await ask(model="policy", messages=[user("Hi")])
            assert answer.choices[0].message.content == "last"
        return 1.0

    says = [*SAME[:count], "last"]
    [sample], prompts, _ = play(tmp_path, says, episode)
    assert sample["reward"] == 1.0 and len(prompts) == count + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_after_the_connection_broke_shares_its_turn(tmp_path, stream):
    """A repeat shares the turn even without a header for retries; the next one is a new sample."""

    async def episode(problem, model):
        c = Client(model)
        may_answer = held_back(model)
        gone = asyncio.ensure_future(c.chat(user("Hi"), stream=stream))
        await until(lambda: clients_of_turns(model) == [1])
        gone.cancel()
        await until(lambda: clients_of_turns(model) == [0])
        repeat = asyncio.ensure_future(c.chat(user("Hi")))
        await until(lambda: clients_of_turns(model) == [1])
        # A request that says that it is a retry shows that the repeat was another client's
        retry = asyncio.ensure_future(c.chat(user("Hi"), retries=1))
        await until(lambda: clients_of_turns(model) == [1, 1])
        may_answer.set()
        texts = [(await x)["content"] for x in (repeat, retry)]
        assert texts == ["one", "two"]
        assert (await c.chat(user("Hi"), stream=None))["content"] == "three"
        return 1.0

    [sample], prompts, _ = play(tmp_path, SAME[:3], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 3


def test_a_stream_that_breaks_in_the_middle_has_not_arrived(tmp_path, monkeypatch):
    """The answer is larger than a connection's buffers, and the client reads its beginning."""
    derender = ChatEngine.derender
    padding = " " * (32 << 20)

    async def large(self, request):
        answer = json.loads((await derender(self, request)).text)
        answer["choices"][0]["message"]["content"] += padding
        return web.json_response(answer)

    monkeypatch.setattr(ChatEngine, "derender", large)

    async def episode(problem, model):
        headers = {"Authorization": f"Bearer {model.api_key}"}
        body = dict(messages=[user("Hi")], stream=True)
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{model.base_url}/chat/completions", json=body) as answer:
                assert (await answer.content.readany()).startswith(b"data: {")
                answer.close()
        await until(lambda: clients_of_turns(model) == [0])
        assert (await Client(model).chat(user("Hi")))["content"].rstrip() == "one"
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["one"], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 1


def test_a_retry_of_an_answer_that_was_sent_gets_it_again(tmp_path):
    """The first answer may have been lost on the way. A header that is no number is ignored."""

    async def episode(problem, model):
        c = Client(model)
        first = await c.chat(user("Hi"))
        second = await c.chat(user("Hi"), retries=0)
        assert [first["content"], second["content"]] == ["one", "two"]
        again = [await c.chat(user("Hi"), retries=n, stream_options=None) for n in (1, 2, 3)]
        assert again == [first, second, first]
        assert (await c.chat(user("Hi"), retries="many"))["content"] == "three"
        assert (await c.chat(user("Hello"), retries=2))["content"] == "four"
        return 1.0

    [sample], prompts, _ = play(tmp_path, SAME, episode)
    assert sample["reward"] == 1.0 and len(prompts) == 4


@pytest.mark.parametrize("retries", [0, 1])
def test_a_turn_that_failed_is_sampled_when_it_is_asked_for_again(tmp_path, monkeypatch, retries):
    render = ChatEngine.render

    failures = ["busy"]

    async def busy_once(self, request):
        if failures:
            return web.json_response({"error": {"message": failures.pop()}}, status=500)
        return await render(self, request)

    monkeypatch.setattr(ChatEngine, "render", busy_once)

    async def episode(problem, model):
        c = Client(model)
        status, text = await c.post("chat/completions", messages=[user("Hi")])
        assert status == 500 and "busy" in text
        assert (await c.chat(user("Hi"), retries=retries))["content"] == "one"
        assert (await c.chat(user("Hi")))["content"] == "two"
        return 1.0

    [sample], prompts, _ = play(tmp_path, SAME[:2], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 2


def test_request_of_a_client_that_gave_up_is_left_out(tmp_path):
    """The attempt ends before the answer is there."""

    async def episode(problem, model):
        c = Client(model)
        await c.chat(user("Hi"))
        held_back(model)
        asyncio.ensure_future(c.chat(user("slow")))
        await until(lambda: clients_of_turns(model) == [1, 1])
        return 1.0

    [sample], prompts, actor = play(tmp_path, ["A", "slow"], episode)
    assert sample["segment"].max() == 0 and sample["mask"].sum() == 2
    assert actor.endpoint.attempts == {}


def test_sampling_parameters_of_a_client_are_left_out_or_refused(tmp_path, capsys):
    strict = dict(type="function", function=dict(name="f", strict=True))

    async def episode(problem, model):
        c = Client(model)
        await c.chat(
            user("Hi"),
            tools=[strict],
            temperature=0.1,
            top_p=0.5,
            presence_penalty=1.0,
            seed=3,
            response_format=dict(type="json_object"),
            tool_choice="required",
        )
        for wrong in (dict(n=2), dict(stop=["x"]), dict(logit_bias={"3": 1}), dict(logprobs=True)):
            status, text = await c.post("chat/completions", messages=[user("Hi")], **wrong)
            [name] = wrong
            assert status == 400 and name in json.loads(text)["error"]["message"]
        await c.chat(user("Hi"), n=1, stop=None, logprobs=False)
        return 1.0

    samples, _, actor = play(tmp_path, ["A", "B"], episode)
    assert set(actor.endpoint.counts) == {
        *(
            f"{name} of a client is left out"
            for name in "temperature top_p presence_penalty seed response_format".split()
        ),
        "tool_choice of a client is auto",
        "strict of a client's tool is left out",
    }
    assert "temperature of a client is left out" in capsys.readouterr().out
    params = {json.dumps(call["sampling_params"], sort_keys=True) for call in actor.calls}
    expected = dict(max_tokens=200, temperature=1.0, seed=None, stop_token_ids=[1, 99])
    assert len(params) == 2 and json.dumps(expected, sort_keys=True) in params


def test_streams_and_completions_have_openais_format(tmp_path):
    async def episode(problem, model):
        c = Client(model)
        status, text = await c.post(
            "chat/completions",
            messages=[user("Hi")],
            stream=True,
            stream_options=dict(include_usage=True),
        )
        chunks = [json.loads(x[6:]) for x in text.split("\n\n") if x.startswith("data: {")]
        assert text.endswith("data: [DONE]\n\n")
        assert chunks[0]["choices"][0]["delta"] == dict(
            role="assistant",
            tool_calls=[
                dict(
                    index=0, id="1", type="function", function=dict(name="f", arguments="not JSON")
                )
            ],
            content="",
        )
        assert chunks[1]["choices"][0]["finish_reason"] == "tool_calls"
        assert chunks[2]["usage"]["completion_tokens"] == 24
        first = json.loads((await c.post("completions", prompt="1, 2,"))[1])["choices"][0]
        assert first["text"] == " so" and first["finish_reason"] == "stop"
        await c.post("completions", prompt="1, 2, so on")
        await c.post("completions", prompt=[5, 6])
        return 1.0

    says = ["<call>f not JSON</call>", " so", "x", "y"]
    [sample], prompts, _ = play(tmp_path, [*says], episode)
    assert sample["segment"].max() == 2
    # The text goes on after the exact tokens, with the end of the turn
    assert prompts[2][: len(prompts[1]) + 4] == [
        *prompts[1],
        *sample["tokens"][sample["segment"] == 1][len(prompts[1]) :][:4],
    ]


def test_a_request_whose_attempt_ends_while_its_body_arrives_is_refused(tmp_path):
    async def episode(problem, model):
        attempts = model.services.endpoint.attempts
        url = urlsplit(model.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        body = json.dumps(dict(messages=[user("Hi")])).encode()
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
        head += f"Authorization: Bearer {model.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:10])
        # When another request is answered, the endpoint has read the beginning of the first one
        await Client(model).chat(user("Hi"))
        del attempts[model.api_key]
        writer.write(body[10:])
        assert b" 401 " in await reader.readline()
        writer.close()
        attempts[model.api_key] = model
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["A"], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 1


def test_errors_have_openais_format(tmp_path):
    async def episode(problem, model):
        c = Client(model)
        status, text = await c.post("chat/completions", key="sk-other", messages=[user("Hi")])
        assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
        for body in (dict(), dict(messages="wrong"), dict(messages=[user("Hi")], tools=[3])):
            status, text = await c.post("chat/completions", **body)
            assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"
        await c.chat(user("Hi"))
        # By the engine's own error, and by the length of the prompt
        for content in ("too long", "x" * 3000):
            status, text = await c.post("chat/completions", messages=[user(content)])
            assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"
            assert model.cut_off and not model.finished
            model.cut_off, model.finished = False, True
        model.cut()
        return 0.0

    [sample], _, _ = play(tmp_path, ["A"], episode)
    # the attempt was cut off
    assert not sample["finished"]


def test_nonsense_is_refused_and_the_attempt_goes_on(tmp_path, caplog):
    """Bodies that no API has. Each is answered in the form of the API, most by a refusal."""
    bodies = [b"", b"{", b"\xff\xfe", b"7", b"[]", b'"x"', b'{"messages": ' + b"[" * 200_000]
    bodies += [b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"]
    odd = [None, 7, [None], [[]], [7], [{"role": "user"}], [user("\ud800")], [dict(role=["user"])]]
    bodies += [json.dumps(dict(messages=messages)).encode() for messages in odd]
    for limit in (0.5, "9", True, 1e300, [1]):
        bodies.append(json.dumps(dict(messages=[user("Hi")], max_tokens=limit)).encode())
    prompts = [[-1], [10**6], [2**63], [1, "a"], [], {}, 7, [True, 5]]
    completions = [json.dumps(dict(prompt=prompt)).encode() for prompt in prompts]
    statuses = []

    async def episode(problem, model):
        headers = {"Authorization": f"Bearer {model.api_key}"}
        paths = ["chat/completions", "responses", "messages", "messages/count_tokens"]
        requests = [(path, body) for path in paths for body in bodies]
        requests += [("completions", body) for body in completions]
        async with aiohttp.ClientSession(headers=headers) as session:
            for path, body in requests:
                async with session.post(f"{model.base_url}/{path}", data=body) as answer:
                    content = await answer.json()
                    statuses.append(answer.status)
                    if answer.status != 200:
                        assert 0 < len(content["error"]["message"]) < 1000
        await Client(model).chat(user("Hi"))
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["A"] * 99, episode, max_new_tokens=1000)
    assert sample["reward"] == 1.0
    assert statuses.count(400) > 75 and len(prompts) == statuses.count(200) + 1
    # The actor itself has raised nothing; the FAKE engine's renderer may have.
    assert "plumbing/endpoint.py" not in caplog.text


def test_a_flood_of_requests_is_served_a_few_at_a_time(tmp_path):
    at_once = []

    async def episode(problem, model):
        engines = model.services.engines
        generate = engines.generate
        waiting = set()
        line_is_full = asyncio.Event()

        async def counted(*arguments, **options):
            waiting.add(request := object())
            at_once.append(len(waiting))
            if len(waiting) == AT_ONCE:
                line_is_full.set()
            await line_is_full.wait()
            # Requests that are not kept in line would come now.
            await asyncio.sleep(0.05)
            waiting.remove(request)
            return await generate(*arguments, **options)

        engines.generate = counted
        client = Client(model)
        await asyncio.gather(*(client.chat(user(f"{i}")) for i in range(4 * AT_ONCE)))
        return 1.0

    says = ["A"] * (4 * AT_ONCE)
    [sample], prompts, _ = play(tmp_path, says, episode, max_new_tokens=1000, row_tokens=30000)
    assert len(at_once) == len(prompts) == 4 * AT_ONCE and max(at_once) == AT_ONCE
    assert sample["reward"] == 1.0


def test_endpoint_listens_where_the_knobs_say(tmp_path):
    """127.0.0.2 is another address of this machine than the one by default.

    On 127.0.0.1 this test listens at the same port. An endpoint that listened there, or on all
    addresses, could not start.
    """

    async def episode(problem, model):
        assert model.base_url == f"http://127.0.0.2:{port}/v1"
        await Client(model).chat(user("Hi"))
        return 1.0

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        knobs = dict(endpoint_host="127.0.0.2", endpoint_port=port)
        [sample], _, _ = play(tmp_path, ["A"], episode, **knobs)
    assert sample["reward"] == 1.0


@pytest.mark.parametrize(
    "host, refusal",
    [
        ("0.0.0.0", "agents cannot reach 0.0.0.0: give the address at which they reach this"),
        ("192.0.2.1", "the endpoint for agents cannot listen there .*an address of this machine"),
        ("no such host", "the endpoint for agents cannot listen there"),
        ("127.0.0.1", "the endpoint for agents cannot listen there .*in use"),
    ],
)
def test_an_endpoint_that_nobody_could_reach_is_refused(host, refusal):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if host == "127.0.0.1" else 0
        c = cfg.Config(task="guess", endpoint_host=host, endpoint_port=port)
        match = f"^--endpoint_host {re.escape(host)} --endpoint_port {port}: .*{refusal}"
        with pytest.raises(cfg.ConfigError, match=match):
            placement.check_endpoint(c)


def test_the_endpoint_takes_no_port_of_an_engine_or_of_ranks():
    c = cfg.Config(task="guess", engines=2, endpoint_port=8501)
    with pytest.raises(cfg.ConfigError, match="8501: --port 8500 gives this port to an engine"):
        placement.check_endpoint(c)
    c = cfg.Config(task="guess", engines=2, trainers=2, master_port=8502, endpoint_port=8502)
    with pytest.raises(
        cfg.ConfigError, match="--master_port 8502 gives this port to trainer ranks"
    ):
        placement.check_endpoint(c)


def test_requests_beyond_the_limit_are_told_to_come_later(tmp_path, monkeypatch):
    monkeypatch.setattr("plumbing.episode.MOST_REQUESTS", 2)

    async def episode(problem, model):
        client = Client(model)
        model.turn_limiter.requests = 2
        status, text = await client.post("chat/completions", messages=[user("Hi")])
        error = json.loads(text)["error"]
        assert status == 429 and error["type"] == "rate_limit_error", text
        model.turn_limiter.requests = 0
        await client.chat(user("Hi"))
        return 1.0

    [sample], _, _ = play(tmp_path, ["A"], episode)
    assert sample["reward"] == 1.0


def test_a_task_without_agents_has_no_endpoint():
    placement.check_endpoint(cfg.Config(task="guess", endpoint_host="localhost"))
    placement.check_endpoint(cfg.Config(task="toy"))
    with pytest.raises(cfg.ConfigError, match="--task toy has no agents, as it does not define"):
        placement.check_endpoint(cfg.Config(task="toy", endpoint_port=8600))
    with pytest.raises(cfg.ConfigError, match="--endpoint_host 127.0.0.2 .*leave both out"):
        placement.check_endpoint(cfg.Config(task="toy,tail", endpoint_host="127.0.0.2"))


def test_answer_that_no_parser_takes_comes_back_as_text_and_is_trained_once(tmp_path):
    async def fails(self, request):
        return web.json_response({"error": {"message": "surrogates"}}, status=500)

    async def episode(problem, model):
        message = await Client(model).chat(user("Hi"))
        assert message == dict(role="assistant", content="A")
        assert await Client(model).chat(user("Hi"), retries=1) == message
        return 1.0

    derender, ChatEngine.derender = ChatEngine.derender, fails
    try:
        [sample], prompts, _ = play(tmp_path, ["A"], episode)
    finally:
        ChatEngine.derender = derender
    assert len(prompts) == 1 and sample["mask"].sum() == 2


@pytest.mark.parametrize(
    "way,counted,outcome",
    [
        ("raise ValueError('mine')", "error", "unparsable"),
        # Errors of the episode's own connections are its own fault
        ("raise ConnectionError('the judge is gone')", "error", "unparsable"),
        ("raise aiohttp.ClientConnectionError('the judge is gone')", "error", "unparsable"),
        ("raise TimeoutError('the judge is slow')", "limit", "unparsable"),
        ("await asyncio.sleep(100)", "limit", "unparsable"),
        ("return 'no_answer'", None, "no_answer"),
        ("await model('x' * 5000)", None, "no_answer"),
        # An agent gets a client's error in this case
        (
            "assert (await Client(model).post('completions', prompt='x' * 5000))[0] == 200",
            None,
            "no_answer",
        ),
    ],
)
def test_an_episode_that_fails_is_counted_by_name(tmp_path, way, counted, outcome, capsys):
    defined = {}
    exec(
        f"async def end(model):\n    {way}",
        dict(asyncio=asyncio, Client=Client, aiohttp=aiohttp),
        defined,
    )

    async def episode(problem, model):
        await model(problem["prompt"])
        return await defined["end"](model)

    # The turn before needs some of this time on a busy machine
    seconds = 3.0 if "sleep" in way else 1000.0
    [sample], _, actor = play(tmp_path, ["A"], episode, episode_timeout=seconds)
    assert sample["outcome"] == {"no_answer": 2, "unparsable": 3}[outcome]
    assert actor.sandbox.counts == {"verdicts": 1} | ({counted: 1} if counted else {})
    assert actor.slots.taken == -1


NUMBERS = [
    *(0.25, 1, True, False, np.bool_(True), np.float32(0.25), np.float16(0.25), np.int64(-3)),
    *(np.array(0.25), np.array(7), np.array(True), torch.tensor(0.25), torch.tensor(True)),
    *(torch.tensor(0.25, dtype=torch.bfloat16), Fraction(1, 4), Decimal("0.25")),
]


def test_an_episode_may_return_any_number_or_outcome(tmp_path):
    values = [*NUMBERS, "correct", np.str_("no_answer")]
    returned = iter(values)

    async def episode(problem, model):
        await model(problem["prompt"])
        return next(returned)

    says = ["A"] * len(values)
    knobs = dict(reward_finished=(0.5, 0.0, -0.5, 0.0), attempts=len(values))
    samples, _, actor = play(tmp_path, says, episode, **knobs)
    assert [sample["reward"] for sample in samples] == [*map(float, NUMBERS), 0.5, -0.5]
    assert actor.sandbox.counts == {"verdicts": len(values)}


@pytest.mark.parametrize(
    "value,shown",
    [
        (None, "NoneType None"),
        (float("nan"), "float nan"),
        (np.float32("inf"), "float inf"),
        (1e39, "float 1e[+]39"),
        (10**400, "int 1000.*OverflowError"),
        (Fraction(10**400, 3), "fractions.Fraction .*OverflowError"),
        (1j, "complex 1j"),
        (np.complex64(1), "numpy.complex64 .*1"),
        (torch.tensor(1j), "torch.Tensor .*1"),
        (np.array([[1, 2]]), "numpy.ndarray array.*1, 2"),
        ((1.0, {}), "tuple .1.0, {}."),
        ("0.5", "str '0.5'"),
        (b"correct", "bytes b'correct'"),
    ],
)
def test_episode_that_returns_no_reward_ends_the_run_by_name(tmp_path, value, shown):
    async def episode(problem, model):
        await model(problem["prompt"])
        return value

    with pytest.raises(RuntimeError, match=f"tasks/guess.py: episode returned {shown}"):
        play(tmp_path, ["A"], episode)


@pytest.mark.parametrize(
    "values,parts,to_go",
    [
        ([[1.0, 2.0], 5.0], [[0, 0, 1, 1], [0, 0, 0, 0]], [[3, 3, 2, 2], [5, 5, 5, 5]]),
        (
            [[1.0, 2.0, 3.0, 4.0], [0.5, 0.25, 0.0, 0.0]],
            [[0, 1, 2, 3], [0, 1, 2, 3]],
            [[10, 9, 7, 4], [0.75, 0.25, 0, 0]],
        ),
    ],
    ids=["turns", "tokens"],
)
def test_turns_and_tokens_may_have_rewards_of_their_own(tmp_path, values, parts, to_go):
    """Two turns of two sampled tokens, the second one the stop token."""
    returned = iter(values)

    async def episode(problem, model):
        await model(problem["prompt"])
        await model("higher\n")
        assert [len(model.token_texts(turn)) for turn in (0, 1)] == [2, 2]
        assert model.token_texts(0)[0] == "A"
        model.log(guesses=2, first=np.float32(0.5))
        return next(returned)

    samples, _, actor = play(tmp_path, ["A"] * 4, episode, attempts=2, overlong_buffer=0)
    # Attempts run at once, so any of them may get any of the values.
    found = []
    for sample in samples:
        mask = sample["mask"]
        found.append((sample["part"][mask].tolist(), sample["reward_to_go"][mask].tolist()))
        assert not sample["reward_to_go"][~mask].any() and set(sample["part"][~mask]) == {-1}
        assert sample["reward"] == found[-1][1][0]
        assert sample["logged"] == {"guesses": 2.0, "first": 0.5}
    assert sorted(found) == sorted(zip(parts, to_go))


def test_rewards_that_are_neither_of_turns_nor_of_tokens_end_the_run(tmp_path):
    async def episode(problem, model):
        await model(problem["prompt"])
        await model("higher\n")
        return [1.0, 2.0, 3.0]

    message = "tasks/guess.py: 3 rewards for an attempt of 2 turns and 4 sampled tokens: return one"
    with pytest.raises(RuntimeError, match=message):
        play(tmp_path, ["A"] * 2, episode)


def test_rewards_of_turns_and_of_tokens_in_one_group_end_the_run(tmp_path):
    returned = iter([[1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])

    async def episode(problem, model):
        await model(problem["prompt"])
        await model("higher\n")
        return next(returned)

    message = "some attempts returned one reward for each turn, and others one for each token"
    with pytest.raises(cfg.ConfigError, match=message):
        play(tmp_path, ["A"] * 4, episode, attempts=2, as_group=True)


def test_what_an_episode_logs_must_be_numbers(tmp_path):
    async def episode(problem, model):
        await model(problem["prompt"])
        with pytest.raises(TypeError, match="no number"):
            model.log(text="abc")
        with pytest.raises(ValueError, match="x is nan, it must be a finite number"):
            model.log(y=1.0, x=float("nan"))
        return 1.0

    [sample], _, _ = play(tmp_path, ["A"], episode)
    assert (sample["reward"], sample["logged"]) == (1.0, {})


def test_a_function_that_an_episode_calls_returns_a_number_or_a_text(tmp_path, monkeypatch):
    returned = {}
    monkeypatch.setattr(task, "look_up", returned.get, raising=False)

    async def episode(problem, model):
        await model(problem["prompt"])
        for value in NUMBERS:
            returned["it"] = value
            result = await model.call("look_up", "it")
            assert type(result) is float and result == float(value)
        returned["it"] = np.str_("words")
        assert type(await model.call("look_up", "it")) is str
        assert await model.call("look_up", "nothing") is None
        returned["it"] = {"a": 1}
        with pytest.raises(TypeError, match="look_up returned dict {'a': 1}"):
            await model.call("look_up", "it")
        return await model.call("look_up", [])

    [sample], _, actor = play(tmp_path, ["A"], episode)
    assert sample["outcome"] == cfg.OUTCOMES.index("unparsable")


@pytest.mark.parametrize("seed,expected", [(None, [1, 3, 0]), (7, [1, 1, 1])])
def test_turns_hold_slots_only_while_engines_sample_them(tmp_path, seed, expected):
    """The first turn uses the reserved slot. Evaluations, whose attempts have a seed, use none."""
    taken = []

    async def episode(problem, model):
        slots = model.services.slots
        slots.reserve(1)
        taken.append(slots.taken)
        may_answer = held_back(model)
        asked = [asyncio.ensure_future(Client(model).chat(user("Hi"))) for _ in range(3)]
        await until(lambda: model.unanswered_turns == 3)
        taken.append(slots.taken)
        may_answer.set()
        await asyncio.gather(*asked)
        taken.append(slots.taken)
        return 1.0

    _, _, actor = play(tmp_path, SAME, episode, seed=seed)
    assert taken == expected and actor.slots.taken == expected[-1]


def test_attempt_that_never_asked_an_engine_gives_its_slot_back(tmp_path):
    async def episode(problem, model):
        model.services.slots.reserve(1)
        return 1.0

    samples, _, actor = play(tmp_path, [], episode)
    assert samples == [None] and actor.slots.taken == 0


def test_a_turn_that_fails_by_a_time_limit_is_an_attempt_that_failed(tmp_path):
    """The task has no episode, and its reward function is never called."""
    prompter(tmp_path / "model", TOOLS)
    samples = []

    async def too_late(*args, **options):
        raise TimeoutError("too late")

    async def work(actor):
        actor.engines.generate = too_late
        samples.append(await actor.attempt("toy", dict(prompt="ba=", answer="ab"), 1.0))

    with_fake_engine(tmp_path, tmp_path / "model", None, work, task="toy")
    assert samples == [None]


def test_attempt_without_an_engine_gives_no_sample(tmp_path, monkeypatch):
    """The episode itself does not notice that the request failed."""
    monkeypatch.setattr(client, "RETRIES", 0)

    async def episode(problem, model):
        await Client(model).post("chat/completions", messages=[user("Hi")])
        return 1.0

    samples, _, _ = play(tmp_path, [], episode)
    assert samples == [None]


def test_lost_attempts_give_no_sample_and_100_in_a_row_end_the_run(tmp_path, capsys):
    """The agent's process has ended; a hundred such attempts in a row end the run."""

    async def episode(problem, model):
        await model(problem["prompt"])
        raise AttemptLost("$AGENT has ended")

    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(cfg.ConfigError, match="100 attempts in a row failed.*has ended"):
        play(tmp_path / "a", ["A"] * 100, episode, attempts=100)
    assert capsys.readouterr().out.count("an attempt failed") == 1
    samples, _, _ = play(tmp_path / "b", ["A"] * 99, episode, attempts=99)
    assert samples == [None] * 99


# An agent that prints a line of 32 MB, and then goes on for ever
ENDLESS = """
import sys, time
sys.stdin.readline()
sys.stdout.write("x" * (1 << 25))
sys.stdout.flush()
time.sleep(100000)
"""


def test_an_agent_that_prints_an_endless_line_is_ended(monkeypatch, capsys):
    monkeypatch.setenv("AGENT", shlex.join([sys.executable, "-c", ENDLESS]))
    agent.agent.cache_clear()
    attempt = SimpleNamespace(base_url="http://127.0.0.1:9", api_key="sk")

    async def work():
        process, _ = await agent.agent()
        with pytest.raises(AttemptLost, match="it has ended"):
            await agent.episode({"prompt": "q"}, attempt)
        await process.reader

    asyncio.run(asyncio.wait_for(work(), 100))
    assert "$AGENT is ended: a line is too long" in capsys.readouterr().out


def test_attempt_that_times_out_in_an_engine_gives_no_sample(tmp_path):
    async def episode(problem, model):
        await model(problem["prompt"])
        waiting = asyncio.Event()
        model.services.engines.generate = lambda *_, **options: waiting.wait()
        return await model("more")

    samples, _, _ = play(tmp_path, ["A"], episode, episode_timeout=0.3)
    assert samples == [None]


# ---- Anthropic's API


def check_turns_with_a_tool(tmp_path, episode):
    """Play an episode that calls a tool once: both turns are one segment of exact tokens."""
    [sample], prompts, _ = play(tmp_path, ['<call>f {"a":  1}</call>', "so!"], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 2
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert text_of(tmp_path, sample["tokens"]) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<call>f {"a":  1}</call><|im_end|>\n'
        "<|im_start|>tool\nso 7<|im_end|>\n<|im_start|>assistant\nso!<|im_end|>"
    )
    assert sample["segment"].tolist() == [0] * len(sample["tokens"])


def anthropic_client(model, **options):
    """The anthropic package as the client of an attempt."""
    url = model.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=model.api_key, max_retries=0, **options)


F = dict(name="f", description="doubles", input_schema=dict(type="object", properties={}))
REQUEST = dict(model="policy", max_tokens=100)
BRIEF = dict(type="text", text="Be short.")


def test_the_anthropic_package_calls_a_tool_and_earlier_turns_keep_their_tokens(tmp_path):
    """The same as with the openai package, streamed or not; a repeat of a turn is that turn."""

    async def episode(problem, model):
        async with anthropic_client(model) as c:
            ask = dict(REQUEST, system="Be short.", tools=[F], messages=[user("Hi")])
            first = await c.messages.create(**ask)
            assert (first.stop_reason, first.usage.output_tokens) == ("tool_use", 25)
            [call] = first.content
            assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": 1})
            retried = {"x-stainless-retry-count": "1"}
            async with c.messages.stream(**ask, extra_headers=retried) as stream:
                again = await stream.get_final_message()
            assert again.content[0].input == call.input and again.stop_reason == "tool_use"
            assert again.usage.output_tokens == 25
            result = dict(type="tool_result", tool_use_id=call.id, content=[])
            result["content"].append(dict(type="text", text="so 7"))
            ask["messages"] += [dict(role="assistant", content=first.content)]
            ask["messages"] += [dict(role="user", content=[result])]
            last = await c.messages.create(**ask)
            assert (last.content[0].text, last.stop_reason) == ("so!", "end_turn")
            counted = await c.messages.count_tokens(model="policy", messages=ask["messages"])
            assert counted.input_tokens > 20
        return 1.0

    check_turns_with_a_tool(tmp_path, episode)


def test_the_anthropic_package_gets_a_stream_of_a_thought_a_text_and_a_call(tmp_path):
    async def episode(problem, model):
        async with anthropic_client(model) as c:
            async with c.messages.stream(**REQUEST, messages=[user("Hi")]) as stream:
                names = [event.type async for event in stream]
                answer = await stream.get_final_message()
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
            thought, text, call = answer.content
            assert thought.signature
            assert (thought.thinking, text.text, call.input) == ("hm", "A", {"a": [1, 2]})
            assert names[0] == "message_start" and names[-1] == "message_stop"
        return 1.0

    says = ['<think>hm</think>A<call>f {"a": [1, 2]}</call>']
    [sample], _, actor = play(tmp_path, says, episode)
    assert sample["reward"] == 1.0
    assert actor.calls[0]["sampling_params"]["max_tokens"] == REQUEST["max_tokens"]


def test_what_a_client_changes_of_an_answer_does_not_end_its_segment(tmp_path):
    """Spaces before a call are left out, broken arguments are a text, and the system prompt of
    Claude Code has a number that changes.
    """

    def system(n):
        return [dict(type="text", text=f"x-anthropic-billing-header: cch={n};"), BRIEF]

    async def episode(problem, model):
        async with anthropic_client(model) as c:
            ask = dict(REQUEST, tools=[F], messages=[user("Hi")])
            first = await c.messages.create(**ask, system=system(1))
            [call] = first.content
            assert call.input == {"text": "{half"}
            result = dict(type="tool_result", tool_use_id=call.id, content="so 7")
            ask["messages"] += [dict(role="assistant", content=first.content)]
            ask["messages"] += [dict(role="user", content=[result])]
            last = await c.messages.create(**ask, system=system(2))
            # an empty answer is a block, too
            assert [block.text for block in last.content] == [""]
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["  <call>f {half</call>", ""], episode)
    assert prompts[1][: len(prompts[0])] == prompts[0]
    text = text_of(tmp_path, sample["tokens"])
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi")
    assert sample["segment"].tolist() == [0] * len(sample["tokens"])


def test_tools_that_the_client_does_not_run_are_left_out_and_named():
    bash = dict(type="bash_20250124", name="bash")
    body = dict(REQUEST, messages=[user("Hi")], tools=[bash, F], tool_choice=dict(type="any"))
    request = messages_api.chat_request(body)
    assert request["the tool bash (bash_20250124)"]
    assert [tool["function"]["name"] for tool in request["tools"]] == ["f"]
    assert request["tool_choice"] == "required"
    body = dict(model="policy", tools=[dict(type="web_search")], tool_choice="auto")
    request = responses_api.chat_request(body, [user("Hi")])
    assert request["the tool  (web_search)"]
    # vLLM refuses a choice without tools
    assert not request.keys() & {"tools", "tool_choice"}


def test_messages_of_one_role_in_succession_are_combined():
    """As Anthropic does; a system message within a conversation is one of the user."""
    use = dict(type="tool_use", id="1", name="f", input={})
    result = dict(type="tool_result", tool_use_id="1", content=None)
    spoken = [
        user("Hi"),
        dict(role="system", content=[BRIEF]),
        dict(role="assistant", content="A"),
        dict(role="assistant", content=[dict(type="text", text="B"), use]),
        user([result, dict(type="text", text="C"), dict(type="text", text="D")]),
    ]
    messages = messages_api.chat_request(dict(REQUEST, messages=spoken))["messages"]
    assert [(x["role"], x["content"]) for x in messages] == [
        ("user", "Hi\nBe short."),
        ("assistant", "AB"),
        ("tool", ""),
        ("user", "C\nD"),
    ]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["1"]


def test_an_answer_that_was_cut_off_and_arguments_that_are_no_object_are_passed_on():
    call = dict(id="1", function=dict(name="f", arguments="{half"))
    usage = dict(prompt_tokens=5, completion_tokens=7)
    message = dict(content="", tool_calls=[call])
    answer = messages_api.answer_of(message, "length", usage, dict(id="m", model="policy"))
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"] == dict(input_tokens=5, output_tokens=7)
    assert answer["content"] == [dict(type="tool_use", id="1", name="f", input={"text": "{half"})]


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        (dict(stop_sequences=["x"]), "stop is not supported"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(extra_body=dict(mcp_servers=[dict(name="x")])), "mcp_servers is not supported"),
        (
            dict(messages=[user("Hi"), dict(role="assistant", content="I")]),
            "no answer continues a given text",
        ),
        (
            dict(messages=[dict(role="user", content=[dict(type="image", source={})])]),
            "a block of type image in a message of the user is not supported",
        ),
        (dict(messages=[dict(role="user")]), "form of the API /v1/messages: KeyError"),
    ],
)
def test_what_anthropics_api_cannot_give_here_is_refused(tmp_path, wrong, complaint):
    async def episode(problem, model):
        async with anthropic_client(model) as c:
            with pytest.raises(anthropic.BadRequestError, match=complaint):
                await c.messages.create(**REQUEST | dict(messages=[user("Hi")]) | wrong)
            with pytest.raises(anthropic.AuthenticationError):
                await c.with_options(api_key="x").messages.create(**REQUEST, messages=[user("Hi")])
            await model("Go.")
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["one"], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 1


# ---- OpenAI's Responses API

FUNCTION = dict(type="function", name="f", parameters=dict(type="object", properties={}))


def openai_client(model):
    return openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_responses_api_calls_a_tool_and_earlier_turns_keep_their_tokens(tmp_path, is_kept):
    """The conversation is continued by the name of its last answer, or by all of its items."""

    async def episode(problem, model):
        async with openai_client(model) as c:
            ask = dict(model="policy", instructions="Be short.", tools=[FUNCTION])
            first = await c.responses.create(**ask, input="Hi")
            assert (first.status, first.usage.output_tokens) == ("completed", 25)
            [call] = first.output
            assert (call.type, call.name, json.loads(call.arguments)) == (
                "function_call",
                "f",
                {"a": 1},
            )
            result = dict(type="function_call_output", call_id=call.call_id, output="so 7")
            if is_kept:
                follow = dict(previous_response_id=first.id, input=[result])
            else:
                follow = dict(input=[dict(role="user", content="Hi"), call, result])
            async with c.responses.stream(**ask, **follow) as stream:
                last = await stream.get_final_response()
            assert (last.output_text, last.status) == ("so!", "completed")
        return 1.0

    check_turns_with_a_tool(tmp_path, episode)


def test_the_responses_api_streams_a_thought_a_text_and_a_call(tmp_path):
    async def episode(problem, model):
        async with openai_client(model) as c:
            async with c.responses.stream(model="policy", input=[user("Hi")]) as stream:
                names = [event.type async for event in stream]
                answer = await stream.get_final_response()
            assert [item.type for item in answer.output] == [
                "reasoning",
                "message",
                "function_call",
            ]
            thought, text, call = answer.output
            assert (thought.content[0].text, text.content[0].text) == ("hm", "A")
            assert json.loads(call.arguments) == {"a": [1, 2]}
            assert names[0] == "response.created" and names[-1] == "response.completed"
            # One item after the other is one turn of the model.
            again = [user("Hi"), *(item.model_dump() for item in answer.output)]
            [_, turn] = responses_api.chat_messages(again)
            assert len(responses_api.chat_messages([*again, answer.output[1].model_dump()])) == 3
            assert (turn["reasoning"], turn["content"], len(turn["tool_calls"])) == ("hm", "A", 1)
        return 1.0

    [sample], _, _ = play(tmp_path, ['<think>hm</think>A<call>f {"a": [1, 2]}</call>'], episode)
    assert sample["reward"] == 1.0


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        (dict(conversation="c"), "conversation is not supported"),
        (dict(include=["message.output_text.logprobs"]), "logprobs are not supported"),
        (dict(previous_response_id="resp_1"), "previous_response_id resp_1: this attempt has no"),
        (dict(input=[dict(type="item_reference", id="x")]), "an item of type item_reference"),
        (
            dict(input=[user([dict(type="input_image", image_url="x")])]),
            "a part of type input_image in a message of the user: only text",
        ),
    ],
)
def test_what_the_responses_api_cannot_give_here_is_refused(tmp_path, wrong, complaint):
    async def episode(problem, model):
        async with openai_client(model) as c:
            with pytest.raises(openai.BadRequestError, match=complaint):
                await c.responses.create(**dict(model="policy", input="Hi") | wrong)
        await model("Go.")
        return 1.0

    [sample], prompts, _ = play(tmp_path, ["one"], episode)
    assert sample["reward"] == 1.0 and len(prompts) == 1


def test_a_response_that_was_cut_off_is_incomplete():
    usage = dict(prompt_tokens=5, completion_tokens=7, total_tokens=12)
    head = dict(id="r", model="policy")
    answer = responses_api.answer_of(dict(content="half"), "length", usage, head)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == dict(reason="max_output_tokens")
    [*_, (name, data)] = responses_api.events_of(answer)
    assert name == "response.incomplete" and data["response"] == answer

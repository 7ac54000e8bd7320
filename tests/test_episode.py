"""Episodes and their endpoint: which tokens are kept and trained, whatever a client sends.

vLLM's chat template and tool parser are FAKED here by the tokenizer's template and a pattern: tests/test_agents.py has
the real ones, and real clients.
"""

import asyncio
import json
import re

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from test_actor import FakeEngine, choice, with_fake_engine
from test_tasks import prompter

import config as cfg
from plumbing import client
from tasks import guess as task

TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatEngine(FakeEngine):
    """With vLLM's two calls for chats; has_parser: of thoughts."""

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
            words = "This model's maximum context length is 5 tokens"
            return web.json_response({"error": {"message": words}}, status=400)
        wanted = body.get("add_generation_prompt", True)
        how = dict(tokenize=False, add_generation_prompt=wanted)
        text = self.tokenizer.apply_chat_template(body["messages"], **how)
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
    """Somebody's, who knows a URL and a key."""

    def __init__(self, model):
        self.url, self.key = model.base_url, model.api_key

    async def post(self, path, key=None, **body):
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{self.url}/{path}", json=body) as answer:
                return answer.status, await answer.text()

    async def chat(self, *messages, **body):
        """The message that is answered."""
        status, text = await self.post("chat/completions", messages=list(messages), **body)
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]


def user(text):
    return dict(role="user", content=text)


def play(tmp_path, says, episode, template=TOOLS, attempts=1, **knobs):
    """Attempts of this episode, of which the model says these texts: (samples, calls of the engine, actor)."""
    p = prompter(tmp_path / "model", template, merges=[("s", "o")])

    def answer(n, body):
        text = says[n - 1].replace(" ", "Ġ")
        # as it was sampled, a character at a time, which the tokenizer would not do
        tokens = [p.tokenizer.convert_tokens_to_ids(c) for c in text]
        tokens.append(p.tokenizer.eos_token_id)
        return choice(tokens, [(str(n), 0, len(tokens))])

    samples = []

    async def work(actor):
        problem = dict(prompt="Go.")
        tries = [actor.attempt("guess", problem, 1.0) for _ in range(attempts)]
        samples.extend(await asyncio.gather(*tries))

    task_episode, task.episode = task.episode, episode
    limits = dict(task="guess", max_model_len=2000, max_new_tokens=200, row_tokens=4096)
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


def test_the_past_is_never_rendered_again(tmp_path):
    """Its exact tokens stay, the separator after the stop token is there; a tool call comes back in other words."""

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
        '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<call>f {"a":  1}</call><|im_end|>\n'
        "<|im_start|>tool\nso 7<|im_end|>\n<|im_start|>assistant\nso!<|im_end|>"
    )
    assert sample["segment"].tolist() == [0] * len(sample["tokens"])
    sampled = sample["tokens"][sample["mask"]]
    assert text_of(tmp_path, sampled) == '<call>f {"a":  1}</call><|im_end|>so!<|im_end|>'
    # "so" of the tool is one token, that of the model two, as it was sampled
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
    # each turn is trained once, in its segment
    masks = [sample["mask"][sample["segment"] == k].sum() for k in (0, 1)]
    assert masks == [len("<think>hm</think>A") + 1, 2]


def test_without_a_parser_of_thoughts_too(tmp_path, monkeypatch):
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
    """What was sampled before a branch is trained once."""

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


def test_a_retry_gets_the_same_answer_and_a_client_that_gives_up_leaves_nothing(tmp_path):
    async def episode(problem, model):
        c = Client(model)
        one, two = await asyncio.gather(c.chat(user("Hi")), c.chat(user("Hi")))
        assert one == two == await c.chat(user("Hi"), stream=None)
        # it is over before the answer is there
        generate = model.actor.engines.generate

        async def slow(*args):
            answer = await generate(*args)
            await asyncio.sleep(1)
            return answer

        model.actor.engines.generate = slow
        asyncio.ensure_future(c.chat(user("slow")))
        await asyncio.sleep(0.05)
        return 1.0

    [sample], prompts, actor = play(tmp_path, ["A", "slow"], episode)
    assert sample["segment"].max() == 0 and sample["mask"].sum() == 2
    assert actor.endpoint.attempts == {}


def test_what_a_client_says_of_sampling(tmp_path, capsys):
    strict = dict(type="function", function=dict(name="f", strict=True))

    async def episode(problem, model):
        c = Client(model)
        how = dict(temperature=0.1, top_p=0.5, presence_penalty=1.0, seed=3)
        how |= dict(response_format=dict(type="json_object"), tool_choice="required")
        await c.chat(user("Hi"), tools=[strict], **how)
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
    own = dict(max_tokens=200, temperature=1.0, seed=None, stop_token_ids=[1, 99])
    assert len(params) == 2 and json.dumps(own, sort_keys=True) in params


def test_streams_completions_and_models(tmp_path):
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
    # the text goes on after the exact tokens, the end of the turn among them
    assert prompts[2][: len(prompts[1]) + 4] == [
        *prompts[1],
        *sample["tokens"][sample["segment"] == 1][len(prompts[1]) :][:4],
    ]


def test_errors_have_the_clients_shape(tmp_path):
    async def episode(problem, model):
        c = Client(model)
        status, text = await c.post("chat/completions", key="sk-other", messages=[user("Hi")])
        assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
        for body in (dict(), dict(messages="wrong"), dict(messages=[user("Hi")], tools=[3])):
            status, text = await c.post("chat/completions", **body)
            assert status == 400 and json.loads(text)["error"]["type"] == "invalid_request_error"
        await c.chat(user("Hi"))
        # by the engine's own words, and by what it would be
        for words in ("too long", "x" * 3000):
            status, text = await c.post("chat/completions", messages=[user(words)])
            assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"
            assert model.cut_off and not model.finished
            model.cut_off, model.finished = False, True
        model.cut()
        return 0.0

    [sample], _, _ = play(tmp_path, ["A"], episode)
    # the attempt was cut off
    assert not sample["finished"]


def test_what_no_parser_takes_comes_back_as_text_and_is_trained_once(tmp_path):
    async def fails(self, request):
        return web.json_response({"error": {"message": "surrogates"}}, status=500)

    async def episode(problem, model):
        message = await Client(model).chat(user("Hi"))
        assert message == dict(role="assistant", content="A")
        assert await Client(model).chat(user("Hi")) == message
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
        ("await asyncio.sleep(100)", "limit", "unparsable"),
        ("return 'no_answer'", None, "no_answer"),
        ("await model('x' * 5000)", None, "no_answer"),
        # an agent, to whom it is a client's error
        (
            "assert (await Client(model).post('completions', prompt='x' * 5000))[0] == 200",
            None,
            "no_answer",
        ),
    ],
)
def test_an_episode_that_fails_is_counted_by_name(tmp_path, way, counted, outcome, capsys):
    found = {}
    exec(f"async def end(model):\n    {way}", dict(asyncio=asyncio, Client=Client), found)

    async def episode(problem, model):
        await model(problem["prompt"])
        return await found["end"](model)

    [sample], _, actor = play(tmp_path, ["A"], episode, episode_timeout=0.3)
    assert sample["outcome"] == {"no_answer": 2, "unparsable": 3}[outcome]
    assert actor.sandbox.counts == {"verdicts": 1} | ({counted: 1} if counted else {})
    assert actor.in_progress == -1


def test_without_an_engine_there_is_no_sample(tmp_path, monkeypatch):
    """Also where the episode does not notice."""
    monkeypatch.setattr(client, "RETRIES", 0)

    async def episode(problem, model):
        await Client(model).post("chat/completions", messages=[user("Hi")])
        return 1.0

    samples, _, _ = play(tmp_path, [], episode)
    assert samples == [None]


def test_what_is_no_fault_of_the_models_is_no_sample(tmp_path, capsys):
    """An agent's process that has ended; a hundred in a row, and the run ends."""

    async def episode(problem, model):
        await model(problem["prompt"])
        raise ConnectionError("$AGENT has ended")

    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(cfg.ConfigError, match="has ended.*so did 100 in a row"):
        play(tmp_path / "a", ["A"] * 100, episode, attempts=100)
    assert capsys.readouterr().out.count("an attempt failed") == 1
    samples, _, _ = play(tmp_path / "b", ["A"] * 99, episode, attempts=99)
    assert samples == [None] * 99


def test_the_time_that_engines_take_is_no_fault_of_the_models(tmp_path):
    async def episode(problem, model):
        await model(problem["prompt"])
        waiting = asyncio.Event()
        model.actor.engines.generate = lambda *_: waiting.wait()
        return await model("more")

    samples, _, _ = play(tmp_path, ["A"], episode, episode_timeout=0.3)
    assert samples == [None]

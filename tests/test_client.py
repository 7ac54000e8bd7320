"""The actor's client of the engines: which answers it accepts, and where requests go when one
fails.

The client is real. The engines are FAKE: an HTTP server, or a function in place of the request.
"""

import asyncio
import json
from collections import Counter

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from test_actor import FakeEngine

import config as cfg
from plumbing import client
from plumbing.client import EngineClient, read_answer

# A request asks for at most ASKED tokens below VOCABULARY, and token 1 ends the answer
ASKED = 8
VOCABULARY = 50
STOP = [1]
TOKENS = [29, 30, 1]


def spans(*triples):
    keys = ("version", "start", "end")
    return [dict(zip(keys, triple)) for triple in triples]


def answer(tokens=TOKENS, **others):
    """Return the body of an answer, which is good unless `others` change a field.

    logprobs: the values of the field behavior_logprobs.
    """
    choice = dict(
        token_ids=tokens,
        behavior_logprobs=others.pop("logprobs", [-0.5] * len(tokens)),
        weight_versions=spans(("4", 0, 1), ("5", 1, len(tokens))),
        finish_reason="stop",
    )
    return json.dumps({"choices": [choice | others], "cached_tokens": 0}).encode()


BAD = [
    ("form", b""),
    ("form", b"<html>busy</html>"),
    ("form", b'{"choices": []}'),
    ("form", answer(token_ids=[29.0, 30.5, 1.0])),
    ("form", answer(logprobs=[-0.5, None, -0.5])),
    ("form", answer(logprobs=[-0.5, float("nan"), -0.5])),
    ("form", answer().replace(b"-0.5", b"-1e999")),
    ("form", answer().replace(b"behavior_logprobs", b"logprobs")),
    ("form", answer(weight_versions=spans((5, 0, 3)))),
    ("returned no tokens", answer([], weight_versions=[])),
    ("token id -30 is outside", answer([29, -30, 1])),
    ("token id 50 is outside of the vocabulary of 50", answer([29, VOCABULARY, 1])),
    ("9 tokens, at most 8 were asked for", answer([29] * ASKED + [1])),
    ("2 logprobs for 3 tokens", answer(logprobs=[-0.5, -0.5])),
    ("4 logprobs for 3 tokens", answer(logprobs=[-0.5, -0.5, -0.5, -0.5])),
    ("a logprob is -9999.0", answer(logprobs=[-0.5, -9999.0, -0.5])),
    ("a logprob is 0.5", answer(logprobs=[-0.5, 0.5, -0.5])),
    ("do not cover", answer(weight_versions=[])),
    ("version 'default'", answer(weight_versions=spans(("default", 0, 3)))),
    ("do not cover", answer(weight_versions=spans(("5", 0, 2)))),
    ("do not cover", answer(weight_versions=spans(("5", 0, 4)))),
    ("do not cover", answer(weight_versions=spans(("4", 0, 1), ("5", 2, 3)))),
    ("do not cover", answer(weight_versions=spans(("4", 0, 2), ("5", 1, 3)))),
    ("must not go back", answer(weight_versions=spans(("5", 0, 2), ("4", 2, 3)))),
    ("do not cover", answer(weight_versions=spans(("4", 0, 3), ("5", 3, 1), ("6", 1, 3)))),
    ("the finish reason is 'abort'", answer(finish_reason="abort")),
    ("its last token 31 is no stop token", answer([29, 30, 31])),
    ("cut the answer off after 3 tokens", answer([29, 30, 31], finish_reason="length")),
]


@pytest.mark.parametrize("reason,body", BAD, ids=range(len(BAD)))
def test_bad_engine_answers_are_refused_with_their_reason(reason, body):
    with pytest.raises(ValueError, match=None if reason == "form" else reason):
        read_answer(body, ASKED, STOP, VOCABULARY)


GOOD = [
    answer([29] * ASKED, finish_reason="length"),
    answer([29] * (ASKED - 1) + [1]),
    answer([1], weight_versions=spans(("0", 0, 1))),
    answer([1, 29, 1]),
    answer([29, 1], logprobs=[1e-6, 0]),
    answer([29, 1], weight_versions=spans(("4", 0, 2), ("5", 2, 2))),
    answer(stop_reason=1, index=0),
]


@pytest.mark.parametrize("body", GOOD, ids=range(len(GOOD)))
def test_good_engine_answers_are_accepted(body):
    assert max(read_answer(body, ASKED, STOP, VOCABULARY)["behavior_logprobs"]) <= 0


def generate_from(responses, monkeypatch, n=1):
    """Ask an engine that gives these responses, then good ones.

    Return (EngineClient, completions).
    """
    monkeypatch.setattr(client.random, "uniform", lambda low, high: 0.0)
    monkeypatch.setattr(client, "BACK_OFF", 0.0)

    def respond(n, body):
        return web.Response(**responses[n - 1] if n <= len(responses) else dict(body=answer()))

    async def run():
        async with FakeEngine(respond).serve() as url:
            engines = EngineClient(cfg.Config(engines=1), STOP, VOCABULARY)
            engines.set_engines([url])
            completions = [await engines.generate([5, 6], 1.0, ASKED) for _ in range(n)]
            await engines.close()
        return engines, completions

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    "responses,counts",
    [
        ([dict(body=answer([29, 30, 31]))], {"retried": 1}),
        ([dict(status=500, body=b"\xff" * 1000)], {"retried": 1}),
        ([dict(status=302, headers={"Location": "file:///x"})], {"retried": 1}),
        ([dict(body=answer(), headers={"Content-Encoding": "gzip"})], {"retried": 1}),
        # An engine without weights is not the request's fault: the request waits, however often
        ([dict(status=503)] * 2 * client.RETRIES, {"moved": 2 * client.RETRIES}),
    ],
)
def test_failed_requests_are_sent_again(responses, counts, monkeypatch, capsys):
    engines, [completion] = generate_from(responses, monkeypatch)
    assert completion["tokens"] == TOKENS and completion["finished"]
    assert completion["behavior_logprobs"] == [-0.5] * 3
    assert completion["versions"].tolist() == [4, 5, 5]
    assert engines.counts == counts
    assert capsys.readouterr().out.startswith("actor: request to http://127.0.0.1:")


def test_attempts_fail_when_the_only_engine_gives_bad_answers(monkeypatch):
    engines, completions = generate_from([dict(body=b"{}")] * 8, monkeypatch, n=2)
    assert completions == [None, None]
    assert engines.counts == {"retried": 6, "failed": 2}


# ---- several engines


def engines_of(urls, post, monkeypatch):
    """Return an EngineClient of engines with 4 slots each; post(url, path, body) replaces HTTP."""
    monkeypatch.setattr(client.random, "uniform", lambda low, high: 0.0)
    engines = EngineClient(cfg.Config(concurrency=4), STOP, VOCABULARY)
    engines.set_engines(urls)
    monkeypatch.setattr(engines, "_post", post)
    return engines


async def ask(engines, n, **where):
    """Make n requests at once; return how many of them each engine has answered."""
    answers = [engines.generate([5], 1.0, ASKED, **where) for _ in range(n)]
    answers = await asyncio.wait_for(asyncio.gather(*answers), 60)
    return Counter(completion and completion["engine"] for completion in answers)


def test_requests_prefer_the_engine_that_has_their_prefix(monkeypatch):
    async def post(url, path, body):
        await asyncio.sleep(0)
        return answer()

    engines = engines_of(["a", "b", "c"], post, monkeypatch)
    assert engines.capacity == 12 and engines.least_loaded() == "a"
    assert asyncio.run(ask(engines, 4, engine="b")) == {"b": 4}
    # Requests beyond its slots go to engines with free ones
    assert asyncio.run(ask(engines, 6, engine="b")) == {"b": 4, "a": 1, "c": 1}
    # The engine is gone
    assert asyncio.run(ask(engines, 6, engine="x")) == {"a": 2, "b": 2, "c": 2}


def test_an_engine_whose_every_answer_is_an_error_loses_no_attempt(monkeypatch):
    """The broken engine is the least loaded one all the time."""

    async def post(url, path, body):
        if url == "broken":
            raise ValueError("500 internal error")
        await asyncio.sleep(0.01)
        return answer()

    engines = engines_of(["broken", "well"], post, monkeypatch)
    assert asyncio.run(ask(engines, 40)) == {"well": 40}
    assert engines.counts["failed"] == 0 and 0 < engines.counts["retried"] <= 40


def test_a_free_slot_goes_to_the_request_that_has_waited_longest():
    """The clock of the event loop decides nothing: no request waits for the next look."""

    async def run():
        engines = EngineClient(cfg.Config(concurrency=1), STOP, VOCABULARY)
        engines.set_engines(["url"])
        order = []
        ends = {name: asyncio.Event() for name in "abc"}

        async def request(name):
            async with engines._engine_for(name.encode(), 1):
                order.append(name)
                await ends[name].wait()

        requests = []
        for name in "abc":
            requests.append(asyncio.create_task(request(name)))
            await asyncio.sleep(0)
        assert (order, len(engines.waiting)) == (["a"], 2)
        ends["a"].set()
        # far fewer turns of the loop than 0.3 s take
        for _ in range(10):
            await asyncio.sleep(0)
        assert (order, len(engines.waiting)) == (["a", "b"], 1)
        # One that is given up leaves the others in their places
        requests[2].cancel()
        await asyncio.wait([requests[2]])
        assert not engines.waiting
        ends["b"].set()
        await asyncio.gather(*requests, return_exceptions=True)
        assert order == ["a", "b"] and not engines.load["url"]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_durations_of_requests_are_summed_for_least_squares(monkeypatch):
    """Two requests to one engine: one of 4 s, and one of 2 s in the middle of it."""

    async def run():
        now = 100.0
        monkeypatch.setattr(client.time, "monotonic", lambda: now)
        engines = EngineClient(cfg.Config(concurrency=2), STOP, VOCABULARY)
        with engines._request("a", "url"):
            began = engines._occupied("url")
            now = 101.0
            with engines._request("b", "url"):
                other_began = engines._occupied("url")
                now = 103.0
                ended = engines._occupied("url")
                engines._note_duration(2, *(ended - other_began))
            now = 104.0
            engines._note_duration(4, *(engines._occupied("url") - began))
        # (1, tokens, tokens x sequences in progress, seconds) of both requests
        requests = np.array([[1, 2, 2 * 2, 2.0], [1, 4, 4 * 1.5, 4.0]])
        np.testing.assert_allclose(engines.durations, requests[:, :3].T @ requests)
        engines.measure_pace()
        assert engines.pace["durations"] == engines.durations.tolist()

    asyncio.run(run())


def test_requests_of_a_dropped_engine_wait_and_move_to_the_next_one():
    """The first engine hangs, as an engine does whose host has vanished."""

    async def run():
        done = asyncio.Event()

        async def hang(request):
            await done.wait()

        hung = FakeEngine(None)
        hung.generate = hang
        well = FakeEngine(lambda n, body: web.Response(body=answer()))
        async with hung.serve() as first, well.serve() as second:
            engines = EngineClient(cfg.Config(concurrency=1), STOP, VOCABULARY)
            engines.set_engines([first])
            asked = [asyncio.create_task(ask(engines, 1)) for _ in range(3)]
            while not engines.load[first]:
                await asyncio.sleep(0.01)
            engines.set_engines([])
            await asyncio.sleep(0.1)
            engines.set_engines([second])
            answered = await asyncio.gather(*asked)
            await engines.close()
            done.set()
        assert answered == [{second: 1}] * 3
        assert engines.counts == {"crashes of engines": 1, "moved": 1}
        engines.measure_pace()
        assert engines.pace["gen_tok_s"] > 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_requests_to_vllms_own_calls_wait_for_an_engine(monkeypatch):
    """An agent's request does not fail while the only engine is started again."""

    async def post(url, path, body):
        if url == "dying":
            engines.set_engines([])
            raise aiohttp.ClientConnectionError("gone")
        return b'{"token_ids": [5]}'

    engines = engines_of(["dying"], post, monkeypatch)

    async def run():
        asked = asyncio.create_task(engines.ask("/v1/chat/completions/render", {}))
        await asyncio.sleep(0.6)
        assert not asked.done() and not engines.serving
        engines.set_engines(["well"])
        assert await asked == {"token_ids": [5]}

    asyncio.run(asyncio.wait_for(run(), 30))
    assert engines.counts == {"crashes of engines": 1, "moved": 1}


def test_a_prompt_that_engines_refuse_is_sent_once(monkeypatch, capsys):
    responses = [dict(status=400, body=b"the model has no token 99")]
    engines, completions = generate_from(responses, monkeypatch, n=2)
    assert completions[0] is None and completions[1]["tokens"] == TOKENS
    assert engines.counts == {"refused": 1}
    assert "400 the model has no token 99" in capsys.readouterr().out


# ---- prompts that kill engines


class FakeMortals:
    """FAKE engines: some prompts kill an engine and all its requests. The engine is back at once.

    losses: for each death the engine and the prompts that it had, sorted.
    """

    def __init__(self, killers):
        self.killers = killers
        self.in_progress = {}
        self.losses = []

    async def post(self, url, path, body):
        """Do what EngineClient._post does."""
        prompt = body.get("token_ids", [path])
        answered = asyncio.get_running_loop().create_future()
        requests = self.in_progress.setdefault(url, {})
        requests[answered] = prompt
        # The engine dies when other requests have begun
        await asyncio.sleep(0.01)
        if prompt in self.killers and not answered.done():
            self.losses.append((url, sorted(requests.values())))
            for other in requests:
                other.set_exception(aiohttp.ServerDisconnectedError())
            requests.clear()
        asyncio.get_running_loop().call_later(0.01, self.finish, requests, answered)
        return await answered

    def finish(self, requests, answered):
        if requests.pop(answered, None):
            answered.set_result(answer())


def mortal_engines(urls, killers, monkeypatch):
    """Return (EngineClient of engines with 4 slots each, the FakeMortals behind them)."""
    mortals = FakeMortals(killers)
    engines = engines_of(urls, mortals.post, monkeypatch)
    monkeypatch.setattr(client, "BACK_OFF", 0.0)
    return engines, mortals


async def sampled(engines, prompts):
    """Send all prompts at once; return those that were answered."""

    async def is_answered(prompt):
        completion = await engines.generate(prompt, 1.0, ASKED)
        # The actor calls this all the time; it raises if the run is to end
        engines.set_engines(engines.serving)
        return completion is not None

    answered = await asyncio.wait_for(asyncio.gather(*map(is_answered, prompts)), 60)
    return [prompt for prompt, was_answered in zip(prompts, answered) if was_answered]


@pytest.mark.parametrize("urls", [["a"], ["a", "b", "c"]], ids=["one engine", "three engines"])
def test_prompts_that_kill_engines_are_left_out_and_cost_no_other(urls, monkeypatch, capsys):
    killers = [[13], [14, 15]]
    engines, mortals = mortal_engines(urls, killers, monkeypatch)
    innocent = [[token] for token in range(5)] * 3
    prompts = [*innocent[:3], *killers, *innocent[3:], *killers]
    assert asyncio.run(sampled(engines, prompts)) == innocent
    for killer in killers:
        losses = [prompts for _, prompts in mortals.losses if killer in prompts]
        assert len(losses) >= 3 and losses[-1] == [killer]
    assert engines.killers == {b"[13]", b"[14,15]"} and not engines.load.total()
    assert engines.counts["prompts that kill engines"] == 2
    assert engines.counts["left out, as their prompts kill engines"] == 4
    printed = capsys.readouterr().out
    assert printed.count("a prompt kills engines: ") == 2 and "Its token ids: [14,15]\n" in printed
    # The prompt is known from now on
    losses = len(mortals.losses)
    assert asyncio.run(sampled(engines, [[5], [13], [5]])) == [[5], [5]]
    assert len(mortals.losses) == losses


def test_a_suspicious_prompt_is_alone_in_its_engine_and_is_cleared_when_it_finishes(monkeypatch):
    engines, mortals = mortal_engines(["a", "b"], [], monkeypatch)
    engines.crashes_with_prompt.update({b"[7]": 2, b"[8]": 1})
    seen = []

    async def post(url, path, body):
        reply = asyncio.ensure_future(mortals.post(url, path, body))
        await asyncio.sleep(0)
        seen.append((body["token_ids"], len(mortals.in_progress[url])))
        return await reply

    monkeypatch.setattr(engines, "_post", post)
    prompts = [[8], [7], [7], [7], [9]] * 3
    assert asyncio.run(sampled(engines, prompts)) == prompts
    # The other attempts at this prompt are sent as any other
    assert [n for prompt, n in seen if prompt == [7]][0] == 1
    assert max(n for prompt, n in seen) > 1
    assert not engines.crashes_with_prompt and not engines.killers


def test_an_engine_that_is_lost_five_times_without_a_finished_request_ends_the_run(monkeypatch):
    killers = [[token] for token in range(10, 16)]
    engines, mortals = mortal_engines(["a"], killers, monkeypatch)
    with pytest.raises(
        cfg.ConfigError, match="the engine a has crashed . times, .* no request has"
    ):
        asyncio.run(sampled(engines, killers))
    # One more death may come before the client notices
    assert len(mortals.losses) in (5, 6)


def test_engine_losses_are_counted_anew_after_a_finished_request(monkeypatch):
    killers = [[token] for token in range(10, 16)]
    engines, mortals = mortal_engines(["a"], killers, monkeypatch)

    async def one_after_the_other():
        for killer in killers:
            assert await sampled(engines, [killer, [5]]) == [[5]]

    asyncio.run(one_after_the_other())
    assert len(mortals.losses) == 3 * len(killers)


def test_crash_of_all_engines_of_a_node_does_not_end_the_run(monkeypatch):
    """Eight engines are lost at once: connections break, or the trainer lists them no more."""
    urls = list("abcdefgh")

    async def run(is_broken):
        engines, mortals = mortal_engines(urls, [], monkeypatch)
        prompts = [[token] for token in range(24)]
        asked = asyncio.create_task(sampled(engines, prompts))
        await asyncio.sleep(0.001)
        for requests in mortals.in_progress.values():
            for answered in requests:
                answered.set_exception(aiohttp.ServerDisconnectedError())
            requests.clear()
        if not is_broken:
            engines.set_engines([])
            await asyncio.sleep(0)
        engines.set_engines(urls)
        assert await asked == prompts
        assert engines.counts["crashes of engines"] == 8
        assert not engines.crashes_with_prompt and not engines.killers

    asyncio.run(run(is_broken=True))
    asyncio.run(run(is_broken=False))


def test_refused_connections_and_engines_without_weights_are_no_crashes(monkeypatch):
    failures = [client.NoWeights("503"), aiohttp.ClientConnectorError(None, OSError())] * 5

    async def post(url, path, body):
        if failures:
            raise failures.pop()
        return answer()

    engines = engines_of(["a"], post, monkeypatch)
    monkeypatch.setattr(client, "BACK_OFF", 0.0)
    monkeypatch.setattr(aiohttp.ClientConnectorError, "__str__", lambda e: "refused")
    assert asyncio.run(sampled(engines, [[5]])) == [[5]]
    assert engines.counts == {"moved": 10} and not engines.crashes


def test_a_call_of_vllms_own_that_kills_engines_is_an_error(monkeypatch):
    engines, mortals = mortal_engines(["a"], [["/render"]], monkeypatch)
    with pytest.raises(client.KillsEngines, match="engines died of this"):
        asyncio.run(asyncio.wait_for(engines.ask("/render", {"messages": []}), 60))
    assert mortals.losses == [("a", [["/render"]])] * 3

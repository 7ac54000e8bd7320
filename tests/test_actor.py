"""The gate, the version stamps, the problem stream, and what the actor does when requests fail."""
import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

import config as cfg
from actor import Actor, Problems, allowed_samples, overlong_penalty, token_versions
from queues import Queue, notice


def test_gate_of_the_pipeline():
    c = SimpleNamespace(conventional_g=0, max_lag=3, batch_size=10)
    assert [allowed_samples(c, v) for v in (0, 1, 5)] == [40, 50, 90]
    c.max_lag = 0  # synchronous: only the step being collected
    assert [allowed_samples(c, v) for v in (0, 1, 2)] == [10, 20, 30]
    # two fast updates seen at once give both credits
    assert allowed_samples(c, 2) - allowed_samples(c, 0) == 20


def test_gate_of_conventional_rl():
    c = SimpleNamespace(conventional_g=4, max_lag=99, batch_size=10)
    assert [allowed_samples(c, v) for v in range(10)] == [40] * 4 + [80] * 4 + [120] * 2


def test_version_spans_become_token_stamps():
    spans = [{"version": "2", "start": 0, "end": 3}, {"version": "3", "start": 3, "end": 5}]
    assert token_versions(spans, 5).tolist() == [2, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="do not cover 6 tokens"):
        token_versions(spans, 6)
    with pytest.raises(ValueError):  # an engine that never heard from a trainer
        token_versions([{"version": "default", "start": 0, "end": 5}], 5)


def test_overlong_penalty_by_hand():
    c = SimpleNamespace(max_new_tokens=100, overlong_buffer=20)
    assert [overlong_penalty(n, c) for n in (1, 80, 85, 100)] == [0, 0, -0.25, -1]
    c.overlong_buffer = 0
    assert overlong_penalty(100, c) == 0


def test_a_mixture_keeps_its_shares_and_is_given_by_position_alone():
    problems = {"a": [f"a{i}" for i in range(50)], "b": [f"b{i}" for i in range(7)], "c": ["c0"]}
    shares = {"a": 0.655, "b": 0.34, "c": 0.005}
    stream = Problems(problems, shares, seed=1)
    drawn = [stream[i] for i in range(300)]
    for k in range(0, 300, 100):
        tasks = [task for task, _ in drawn[k:k + 100]]
        assert 65 <= tasks.count("a") <= 66 and 33 <= tasks.count("b") <= 34 and tasks.count("c") == 1
    assert all(name.startswith(task) for task, name in drawn)
    of_a = [name for task, name in drawn if task == "a"]
    assert sorted(of_a[:50]) == sorted(of_a[50:100]) == sorted(problems["a"])  # every problem once per epoch
    again = Problems(problems, shares, seed=1)
    assert [again[i] for i in (299, 3, 150, 151)] == [drawn[i] for i in (299, 3, 150, 151)]


def test_problem_stream_is_a_function_of_the_position():
    stream = Problems({"a": list(range(7))}, {"a": 1.0}, seed=1)
    drawn = [stream[i][1] for i in range(21)]
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7)) and drawn[:7] != drawn[7:14]
    assert [Problems({"a": list(range(7))}, {"a": 1.0}, seed=1)[i][1] for i in (20, 3, 11)] == [drawn[20], drawn[3], drawn[11]]


def with_fake_server(tmp_path, base_model, answer, attempts=4, problem={"prompt": "ba=", "answer": "ab"}, **knobs):
    """Run `group` once against a fake engine (time forbids breaking the real one on cue); returns the actor and its result."""
    async def run():
        calls = []

        async def handle(request):
            calls.append(await request.json())
            return answer(len(calls), calls[-1])
        app = web.Application()
        app.router.add_post("/inference/v1/generate", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        config = cfg.Config(model=str(base_model), attempts=attempts, engines=1, reward_workers=2, max_new_tokens=40, max_model_len=200, retries=1, **knobs)
        (tmp_path / "queues").mkdir()
        actor = Actor(config, tmp_path)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        notice(tmp_path / "queues" / "version.json", version=5, engines=[url])
        actor.load, actor.rest = {url: 0}, {url: 0.0}
        assert actor.version() == 5
        await actor.judges.start()
        await actor.group(0, actor.config.task, problem, attempts)
        await actor.close()
        await runner.cleanup()
        return actor, Queue(tmp_path / "queues" / "rollouts").get(0)[1]["lost"], calls
    return asyncio.run(asyncio.wait_for(run(), 60))


def test_turns_keep_the_exact_tokens_that_were_sampled(tmp_path):
    """Also with a tokenizer that would join what the engine sampled apart."""
    from test_tasks import prompter
    p = prompter(tmp_path / "model", merges=[("s", "o")])
    turns = [[p.tokenizer.convert_tokens_to_ids(t) for t in turn] for turn in (["s", "o", "5", "<|im_end|>"], ["s", "o", "9", "<|im_end|>"], ["7", "<|im_end|>"])]
    assert len(p.tokenizer("so5")["input_ids"]) == 2
    logprobs = iter(np.arange(10) / -8)

    def answer(n, body):
        content = [{"token_id": t, "logprob": next(logprobs)} for t in turns[n - 1]]
        spans = [{"version": str(n), "start": 0, "end": 2}, {"version": str(n + 1), "start": 2, "end": len(content)}]
        return web.json_response({"choices": [{"token_ids": turns[n - 1], "finish_reason": "stop", "logprobs": {"content": content}, "weight_versions": spans}]})
    problem = {"prompt": "Guess.\n", "number": 7}
    actor, missing, calls = with_fake_server(tmp_path, tmp_path / "model", answer, attempts=1, problem=problem, task="guess", advantage="none")
    start, lower, higher = p.start(problem), p.more("lower\n"), p.more("higher\n")
    prompts = [start, start + turns[0] + higher, start + turns[0] + higher + turns[1] + lower]
    assert [c["token_ids"] for c in calls] == prompts
    assert [c["sampling_params"]["max_tokens"] for c in calls] == [40, 36, 32]  # max_new_tokens is for all turns together
    _, r = Queue(tmp_path / "queues" / "rollouts").get(0)
    assert r["tokens"].tolist() == prompts[2] + turns[2] and r["rewards"].tolist() == [pytest.approx(1.7)] and r["outcomes"] == ["correct"]
    sampled = [False] * len(start) + [True] * 4 + [False] * len(higher) + [True] * 4 + [False] * len(lower) + [True] * 2
    assert r["mask"].tolist() == sampled  # the environment's tokens are out of the loss
    assert r["versions"][r["mask"]].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3] and set(r["versions"][~r["mask"]].tolist()) == {-1}
    assert r["logprobs"][r["mask"]].tolist() == (np.arange(10) / -8).tolist() and not r["logprobs"][~r["mask"]].any()
    shown = json.loads((tmp_path / "samples.jsonl").read_text())
    assert shown["completion"] == ["so5", "so9", "7"] and shown["spans"][:4] == [[-1, "Guess.\n"], [1, "so"], [2, "5<|im_end|>"], [-1, "higher\n"]]
    from show import show
    assert show(shown, colour=False).splitlines()[1:4] == ["Guess.", "so|v2>5<|im_end|>higher", "so|v3>9<|im_end|>lower"]


def good(n, body):
    """What the real server answers to a group's request: `ab` and the end, sampled by versions 4 and 5."""
    content = [{"token_id": t, "logprob": -0.5} for t in (29, 30, 1)]
    return web.json_response({"choices": [{"token_ids": [29, 30, 1], "finish_reason": "stop", "logprobs": {"content": content},
                                           "weight_versions": [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]}]})


def test_a_group_record_holds_what_the_engine_sampled(tmp_path, base_model):
    actor, missing, calls = with_fake_server(tmp_path, base_model, good)
    assert missing == 0 and len(calls) == 4
    assert all(c["sampling_params"]["temperature"] == 1.0 and c["sampling_params"]["stop_token_ids"] == [1] for c in calls)
    _, r = Queue(tmp_path / "queues" / "rollouts").get(0)
    prompt = calls[0]["token_ids"]
    assert r["tokens"].tolist() == (prompt + [29, 30, 1]) * 4 and r["lengths"].tolist() == [6] * 4
    assert r["mask"].tolist() == [False] * 3 + [True] * 3 + ([False] * 3 + [True] * 3) * 3
    assert r["versions"][:6].tolist() == [-1, -1, -1, 4, 4, 5] and r["logprobs"][:6].tolist() == [0, 0, 0, -0.5, -0.5, -0.5]
    assert r["rewards"].tolist() == [1.0] * 4 and r["outcomes"] == ["correct"] * 4
    shown = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    assert shown["completion"] == "ab" and shown["versions"] == [[4, 0], [5, 2]]


def test_failed_requests_are_tried_again(tmp_path, base_model):
    actor, missing, calls = with_fake_server(tmp_path, base_model, lambda n, b: web.Response(status=500) if n <= 2 else good(n, b))
    assert missing == 0 and len(calls) == 6 and actor.counts["retried"] == 2 and actor.counts["failed"] == 0


def test_a_partial_group_is_trained_on_what_it_has(tmp_path, base_model):
    actor, missing, calls = with_fake_server(tmp_path, base_model, lambda n, b: web.Response(status=500) if n <= 4 or n in (5, 6) else good(n, b))
    assert missing == 2 and actor.counts["failed"] == 2
    assert len(Queue(tmp_path / "queues" / "rollouts").get(0)[1]["lengths"]) == 2


def test_a_lost_group_is_dropped_and_counted(tmp_path, base_model, capsys):
    actor, missing, calls = with_fake_server(tmp_path, base_model, lambda n, b: web.Response(status=500))
    assert missing == 4 and actor.counts["dropped_groups"] == 1
    record = Queue(tmp_path / "queues" / "rollouts").get(0)[1]  # an empty one, so that nobody waits for it
    assert record["index"] == 0 and len(record["lengths"]) == 0
    assert "problem 0 dropped: 0 of 4 attempts came back" in capsys.readouterr().out

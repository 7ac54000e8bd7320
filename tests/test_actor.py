"""The actor: its gate, its sampler and the draws that it repeats after a stop, its groups and
evaluations.

The actor is real. Its engine is a FAKE HTTP server (FakeEngine) whose answers each test chooses.
"""

import asyncio
import contextlib
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from test_tasks import prompter

import config as cfg
from actor import Actor, Sampler, allowed_groups, overlong_penalty
from plumbing import client, secret
from plumbing.checkpoints import NEW_RUN
from plumbing.ledger import InFlight
from plumbing.queues import Queue, publish_json, read_json
from plumbing.samples import split
from tasks import guess as guess_task

# ---- the gate


def gate(versions, **knobs):
    c = cfg.Config(batch_size=20, attempts=2, **knobs)
    return [allowed_groups(c, v) for v in versions]


def test_gate_allows_groups_up_to_max_lag_and_the_last_step():
    assert gate((0, 1, 5), max_lag=3, steps=100) == [40, 50, 90]
    # Synchronous: only the step that is being collected
    assert gate((0, 1, 2), max_lag=0, steps=100) == [10, 20, 30]
    # No group is started that the run will not train
    assert gate((0, 1, 2, 4, 5, 6), max_lag=3, steps=6) == [40, 50, 60, 60, 60, 60]
    assert gate([0], max_lag=1000000, steps=6) == [60]


def test_gate_of_conventional_rl_allows_one_generation_phase():
    versions = range(10)
    assert (
        gate(versions, conventional_g=4, max_lag=99, steps=100) == [40] * 4 + [80] * 4 + [120] * 2
    )
    assert gate(versions, conventional_g=4, max_lag=99, steps=6) == [40] * 4 + [60] * 6


def test_overlong_penalty_by_hand():
    c = SimpleNamespace(max_new_tokens=100, overlong_buffer=20)
    # 300 tokens are several turns that were sampled at once
    assert [overlong_penalty(n, c) for n in (1, 80, 85, 100, 300)] == [0, 0, -0.25, -1, -1]
    c.overlong_buffer = 0
    assert overlong_penalty(100, c) == 0


# ---- which problem comes next


def draw(sampler, n):
    return [sampler.next() for _ in range(n)]


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.29, "c": 0.21}, {"a": 2 / 3, "b": 1 / 3}])
def test_sampler_keeps_shares_in_every_100_problems_and_shuffles_every_epoch(shares):
    problems = {task: list(range(7)) for task in shares}
    drawn = draw(Sampler(problems, shares, seed=1), 700)
    for start in range(0, 700, 100):
        tasks = [task for task, _ in drawn[start : start + 100]]
        for task, share in shares.items():
            assert abs(tasks.count(task) - 100 * share) < 1
    # Tasks do not come in the same order every time
    assert [task for task, _ in drawn[:100]] != [task for task, _ in drawn[100:200]]
    for task in shares:
        numbers = [number for drawn_task, number in drawn if drawn_task == task]
        epochs = [tuple(numbers[i : i + 7]) for i in range(0, len(numbers) - 6, 7)]
        assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
        assert len(set(epochs)) > 0.9 * len(epochs)
    assert draw(Sampler(problems, shares, seed=2), 700) != drawn


@pytest.mark.parametrize("at", [0, 3, 150, 299])
def test_sampler_continues_from_its_saved_state(at):
    arguments = {"a": list(range(7)), "b": list(range(30))}, {"a": 0.4, "b": 0.6}, 1
    sampler = Sampler(*arguments)
    draw(sampler, at)
    state = json.loads(json.dumps(sampler.state()))
    assert draw(Sampler(*arguments, state), 200) == draw(sampler, 200)


class Curriculum:
    """A sampler whose order depends on chance and rewards, and cannot be computed again."""

    def __init__(self, state=None):
        self.solved = (state or {}).get("solved", 0)

    def next(self):
        return "a", 1000 * self.solved + random.SystemRandom().randrange(1000)

    def update(self, task, problem, rewards, successes):
        self.solved += sum(successes) > 0

    def state(self):
        return {"solved": self.solved}


def test_draws_in_flight_at_a_checkpoint_are_drawn_again(tmp_path):
    path = tmp_path / "sampler.json"
    draws = InFlight(Curriculum(), path, NEW_RUN)
    first = [draws.next() for _ in range(10)]
    assert [i for i, _, _ in first] == list(range(10))
    draws.sampler.update("a", first[0][2], [0.0, 1.0], [False, True])
    draws.save()
    # These come after the saved state: the checkpoint does not know of them
    for _ in range(3):
        draws.next()

    def continued(position):
        saved = read_json(path)
        state = NEW_RUN | {"position": position, "sampler": saved}
        return InFlight(Curriculum(saved["state"]), path, state)

    # According to the checkpoint, draws 0 to 3, 6 and 8 are trained or dropped
    draws = continued({"next": 4, "ahead": [6, 8]})
    assert [draws.next() for _ in range(4)] == [first[i] for i in (4, 5, 7, 9)]
    further = [draws.next() for _ in range(3)]
    assert [i for i, _, _ in further] == [10, 11, 12]
    assert draws.sampler.solved == 1

    # The run stops once more, with draw 7 and two of the new draws still in flight
    position = {"next": 7, "ahead": [8, 9, 11]}
    draws.forget(position)
    draws.save()
    draws = continued(position)
    assert [draws.next() for _ in range(3)] == [first[7], further[0], further[2]]
    assert draws.next()[0] == 13


# ---- a FAKE engine, whose failures a test can choose

PROBLEM = {"prompt": "ba=", "answer": "ab"}


def choice(tokens, spans, logprobs=None):
    """Return the answer of an engine that sampled these tokens. spans: (version, start, end)."""
    logprobs = logprobs or [-0.5] * len(tokens)
    keys = ("version", "start", "end")
    answer = {"token_ids": tokens, "finish_reason": "stop", "behavior_logprobs": logprobs}
    answer["weight_versions"] = [dict(zip(keys, span)) for span in spans]
    return web.json_response({"choices": [answer]})


def good(n, body):
    """Return an answer with `ab` and the end token, sampled by versions 4 and 5."""
    return choice([29, 30, 1], [("4", 0, 2), ("5", 2, 3)])


class FakeEngine:
    """A FAKE engine that keeps the calls and answers with answer(number of the call, body).

    together: the first so many calls are answered when all of them have come.
    """

    def __init__(self, answer, together=1):
        self.answer = answer
        self.calls = []
        self.together = together
        self.all_have_come = asyncio.Event()

    async def generate(self, request):
        body = await request.json()
        self.calls.append(body)
        number = len(self.calls)
        if number >= self.together:
            self.all_have_come.set()
        await self.all_have_come.wait()
        return self.answer(number, body)

    def routes(self):
        return [web.post("/inference/v1/generate", self.generate)]

    @contextlib.asynccontextmanager
    async def serve(self):
        """Serve within this context, and yield the URL."""
        app = web.Application()
        app.add_routes(self.routes())
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def with_fake_engine(run_dir, model, answer, work, engine=None, **knobs):
    """Start an actor with one FAKE engine and await work(actor); return (actor, calls)."""

    async def run():
        limits = dict(max_new_tokens=40, max_model_len=200, start_timeout=300, reward_timeout=300)
        config = cfg.Config(model=str(model), engines=1, run_id="abc", **limits | knobs)
        (run_dir / "queues").mkdir()
        secret.make_secret(run_dir)
        actor = Actor(config, run_dir)
        fake = engine or FakeEngine(answer)
        async with fake.serve() as url:
            position = {"next": 3, "ahead": [5]}
            publish_json(run_dir / "queues" / "position.json", **position)
            # The position alone says nothing: the engines have no weights yet
            assert actor.follow_trainer() is None
            publish_json(run_dir / "queues" / "version.json", version=5, served=4, engines=[url])
            assert actor.follow_trainer() == position
            assert actor.version == 5 and actor.served == 4
            await actor.start()
            try:
                await work(actor)
            finally:
                await actor.close()
        return actor, fake.calls

    return asyncio.run(asyncio.wait_for(run(), 300))


def one_group(run_dir, model, answer, problem=PROBLEM, attempts=4, **knobs):
    """Sample one group; return (actor, the group's record, the calls, the sampler's updates)."""
    updates = []

    async def work(actor):
        actor.slots.taken = attempts
        sampler = SimpleNamespace(update=lambda *arguments: updates.append(arguments))
        await actor.group(7, actor.tasks[0], 3, problem, sampler)
        assert actor.slots.taken == 0

    actor, calls = with_fake_engine(run_dir, model, answer, work, attempts=attempts, **knobs)
    record = Queue(run_dir / "queues" / "rollouts").get(0)[1]
    assert len(record["logged"]) == len(record["lengths"])
    return actor, record, calls, updates


def test_attempt_frees_its_slot_while_its_reward_is_computed(tmp_path, base_model):
    async def work(actor):
        judged = asyncio.Event()
        call = actor.sandbox.call

        async def late(*args):
            await judged.wait()
            return await call(*args)

        actor.sandbox.call = late
        actor.slots.taken = 4
        group = asyncio.create_task(actor.group(0, actor.tasks[0], 0, PROBLEM, Curriculum()))
        while actor.slots.taken:
            await asyncio.sleep(0.01)
        assert not group.done()
        judged.set()
        await group

    with_fake_engine(tmp_path, base_model, good, work, attempts=4)


GUESS = {"prompt": "Guess.\n", "number": 7}


def guess(tmp_path, answer):
    """Make one attempt at GUESS; return (the group's record, the turns' prompts, the calls)."""
    knobs = dict(attempts=1, task="guess", advantage="none")
    _, record, calls, _ = one_group(tmp_path, tmp_path / "model", answer, GUESS, **knobs)
    return record, [call["token_ids"] for call in calls], calls


def test_empty_environment_reply_starts_the_next_turn(tmp_path, monkeypatch):
    p = prompter(tmp_path / "model")
    turns = [p.tokenizer.convert_tokens_to_ids(text) for text in (["5", "<eos>"], ["7", "<eos>"])]

    async def episode(problem, model):
        await model(problem["prompt"])
        return 1 if await model("") == "7" else 0

    monkeypatch.setattr(guess_task, "episode", episode)
    r, prompts, _ = guess(tmp_path, lambda n, body: choice(turns[n - 1], [("4", 0, 2)]))
    start = p.start(GUESS["prompt"])
    assert prompts == [start, start + turns[0]]
    assert r["tokens"].tolist() == start + turns[0] + turns[1]
    assert r["mask"].tolist() == [False] * len(start) + [True] * 4


def test_turns_keep_the_exact_sampled_tokens(tmp_path):
    """The tokenizer here would join tokens that the engine has sampled apart."""
    p = prompter(tmp_path / "model", merges=[("s", "o")])
    texts = [["s", "o", "5", "<|im_end|>"], ["s", "o", "9", "<|im_end|>"], ["7", "<|im_end|>"]]
    turns = [p.tokenizer.convert_tokens_to_ids(text) for text in texts]
    assert len(p.tokenizer("so5")["input_ids"]) == 2
    logprobs = (np.arange(10) / -8).tolist()
    turn_logprobs = [logprobs[:4], logprobs[4:8], logprobs[8:]]

    def answer(n, body):
        tokens = turns[n - 1]
        spans = [(str(n), 0, 2), (str(n + 1), 2, len(tokens))]
        return choice(tokens, spans[: len(tokens) - 1], turn_logprobs[n - 1])

    r, prompts, calls = guess(tmp_path, answer)
    start = p.start(GUESS["prompt"])
    lower = p.reply("lower\n")
    higher = p.reply("higher\n")
    second = start + turns[0] + higher
    third = second + turns[1] + lower
    assert prompts == [start, second, third]
    # max_new_tokens limits all turns together
    assert [c["sampling_params"]["max_tokens"] for c in calls] == [40, 36, 32]
    assert r["tokens"].tolist() == third + turns[2]
    assert r["reward"].tolist() == [pytest.approx(1.7)]
    assert r["outcome"].tolist() == [cfg.OUTCOMES.index("correct")]
    # The environment's tokens do not count in the loss
    lengths = [len(start), 4, len(higher), 4, len(lower), 2]
    mask = np.repeat([False, True] * 3, lengths)
    assert r["mask"].tolist() == mask.tolist()
    assert r["versions"][mask].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert set(r["versions"][~mask].tolist()) == {-1}
    assert r["num_versions"].tolist() == [3]
    assert r["behavior_logprobs"][mask].tolist() == logprobs
    assert not r["behavior_logprobs"][~mask].any()


def test_a_group_record_holds_what_the_engine_sampled(tmp_path, base_model):
    _, r, calls, updates = one_group(tmp_path, base_model, good, temperature=0.7)
    assert len(calls) == 4
    for call in calls:
        assert call["sampling_params"]["temperature"] == 0.7
        assert call["sampling_params"]["stop_token_ids"] == [1]
    prompt = calls[0]["token_ids"]
    assert (r["draw"], r["failed"], r["run_id"]) == (7, 0, "abc")
    assert r["lengths"].tolist() == [6] * 4
    for sample in split(r):
        assert sample["tokens"].tolist() == prompt + [29, 30, 1]
        assert sample["mask"].tolist() == [False] * 3 + [True] * 3
        assert sample["versions"].tolist() == [-1, -1, -1, 4, 4, 5]
        assert sample["behavior_logprobs"].tolist() == [0, 0, 0, -0.5, -0.5, -0.5]
        assert (sample["num_versions"], sample["reward"], sample["task"]) == (2, 1.0, 0)
        assert sample["problem"] == 3
        assert sample["temperature"] == np.float32(0.7)
    assert updates == [("toy", 3, [1.0] * 4, [True] * 4)]
    assert r["sample_id"].tolist() == [28, 29, 30, 31]


@pytest.mark.parametrize("caching", ["on", "off"])
def test_shared_kv_cache_counts_as_a_version(tmp_path, base_model, caching):
    """A sample has one version only if its KV cache is of the same version as its tokens."""
    spans = [[("5", 0, 3)], [("4", 0, 3)], [("6", 0, 3)], [("5", 0, 1), ("6", 1, 3)]]

    def answer(n, body):
        return choice([29, 30, 1], spans[n - 1])

    _, r, calls, _ = one_group(tmp_path, base_model, answer, prefix_caching=caching)
    assert {c["cache_salt"] for c in calls} == ({"5"} if caching == "on" else {None})
    assert sorted(r["num_versions"].tolist()) == ([1, 2, 2, 2] if caching == "on" else [1, 1, 1, 2])


@pytest.mark.parametrize("failures,left", [(6, 2), (8, 0)])
def test_attempts_that_failed_for_good_make_the_group_smaller(
    failures, left, tmp_path, base_model, monkeypatch, capsys
):
    """A group without a sample leaves an empty record, which preprocess drops and counts."""
    monkeypatch.setattr(client, "RETRIES", 1)
    monkeypatch.setattr(client, "BACK_OFF", 0.0)

    def answer(n, body):
        return web.Response(status=500) if n <= failures else good(n, body)

    # The first four calls are the first calls of the four attempts
    fake = FakeEngine(answer, together=4)
    actor, r, _, updates = one_group(tmp_path, base_model, answer, engine=fake)
    assert (r["draw"], len(r["lengths"]), r["failed"]) == (7, left, 4 - left)
    assert actor.engines.counts == {"retried": 4, "failed": 4 - left}
    assert updates == ([("toy", 3, [1.0, 1.0], [True, True])] if left else [])
    assert f"draw 7: {4 - left} of 4 attempts failed" in capsys.readouterr().out


def test_draws_are_saved_before_their_groups_start(tmp_path, base_model):
    """Groups start as slots and the gate allow; dropped groups make room for others."""
    started = []

    async def work(actor):
        async def group(draw, task, i, problem, sampler):
            assert str(draw) in read_json(tmp_path / "queues" / "sampler.json")["pending"]
            assert problem == f"problem {i}"
            started.append(draw)

        actor.group = group
        problems = {"toy": [f"problem {n}" for n in range(50)]}
        sampler = Sampler({"toy": list(range(50))}, {"toy": 1.0}, 0)
        draws = InFlight(sampler, tmp_path / "queues" / "sampler.json", NEW_RUN)
        # There are 16 slots, for four groups of 4
        groups = actor.start_groups(draws, problems, 0)
        assert len(groups) == 4
        actor.slots.taken = 0
        # At version 5 with max_lag 1 the gate allows seven steps of two groups
        groups |= actor.start_groups(draws, problems, 12)
        assert len(groups) == 6
        actor.slots.taken = 0
        assert not actor.start_groups(draws, problems, 14)
        publish_json(tmp_path / "queues" / "dropped.json", groups=3)
        groups |= actor.start_groups(draws, problems, 14)
        for _ in range(3):
            actor.slots.taken = 0
            groups |= actor.start_groups(draws, problems, len(groups) + 8)
        await asyncio.gather(*groups)

    knobs = dict(attempts=4, batch_size=8, concurrency=16, max_lag=1, steps=100)
    with_fake_engine(tmp_path, base_model, good, work, **knobs)
    assert sorted(started) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert read_json(tmp_path / "queues" / "sampler.json")["drawn"] == 9


def test_pace_of_the_engines_is_published_once_a_second(tmp_path, base_model):
    pace_file = tmp_path / "queues" / "pace.json"

    async def work(actor):
        # with_fake_engine has read the trainer's version, which publishes the pace at once
        first = read_json(pace_file)
        assert set(first) == {"gen_tok_s", "gen_idle", "durations", "eval_attempts"}
        actor.engines.tokens = 1000
        actor.follow_trainer()
        assert read_json(pace_file) == first
        actor.pace_published_at -= 1
        actor.follow_trainer()
        assert read_json(pace_file) == actor.engines.pace | {"eval_attempts": 0}
        assert read_json(pace_file)["gen_tok_s"] > 0

    with_fake_engine(tmp_path, base_model, good, work)


def test_evaluation_takes_the_first_held_out_problems(tmp_path, base_model):
    async def work(actor):
        await actor.evaluate(5)

    knobs = dict(eval_problems=3, eval_attempts=2, eval_temperature=0.0)
    actor, calls = with_fake_engine(tmp_path, base_model, good, work, **knobs)
    prompts = [
        actor.prompter.start(problem["prompt"]) for problem in actor.test_problems["toy"][:3]
    ]
    assert sorted(call["token_ids"] for call in calls) == sorted(2 * prompts)
    assert {call["sampling_params"]["temperature"] for call in calls} == {0.0}
    line = Queue(tmp_path / "queues" / "evals").get(0)[1]
    assert (line["version"], line["problems"], line["answers"]) == (5, 3, 6)
    # The answer of none of these problems is `ab`
    assert line["eval"] == {"toy": 0.0}
    assert line["versions"] == [4, 5]
    assert len(Queue(tmp_path / "queues" / "rollouts")) == 0


def test_scores_of_conventional_rl_belong_to_the_version_that_engines_have(tmp_path, base_model):
    """Within a phase of G steps the trainer is ahead of the engines."""
    limits = dict(max_new_tokens=40, max_model_len=200, start_timeout=300, reward_timeout=300)
    sizes = dict(steps=8, batch_size=4, attempts=2, eval_every=2, eval_problems=1, eval_attempts=1)
    config = cfg.Config(model=str(base_model), engines=1, conventional_g=4, **limits | sizes)
    queues = tmp_path / "queues"
    queues.mkdir()
    secret.make_secret(tmp_path)

    async def run():
        actor = Actor(config, tmp_path)
        async with FakeEngine(good).serve() as url:
            publish_json(queues / "position.json", next=0, ahead=[])
            publish_json(queues / "version.json", version=0, served=0, engines=[url])
            running = asyncio.create_task(actor.run())
            for version, served in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8)):
                publish_json(queues / "version.json", version=version, served=served, engines=[url])
                while actor.version < version:
                    await asyncio.sleep(0.01)
            await running

    asyncio.run(asyncio.wait_for(run(), 300))
    evaluations = Queue(queues / "evals")
    assert sorted(evaluations.get()[1]["version"] for _ in range(len(evaluations))) == [0, 4, 8]

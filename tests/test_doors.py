"""What is believed at each stage's door: tables of bad files, records and answers, each refused by name, counted, and survived."""

import asyncio
import gzip
import io
import json
import os
import pickle
import random
import socket

import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save
from test_actor import FakeEngine
from test_samples import OneRank, group_record, make_sample

import config as cfg
from plumbing import client
from plumbing.client import Engines
from plumbing.doors import FOREIGN, NewestVersion, RolloutCheck, lost_records
from plumbing.ledger import Ledger
from plumbing.queues import Queue, Refused, publish_json
from plumbing.reader import Reader
from plumbing.samples import filler, join
from preprocess import Ring

# ---- files that are no records

HUGE = 1 << 40


def written(header, content=b""):
    """A file with this header: a dict, or bytes."""
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + content


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **others):
    """Of one array in a header."""
    return {"json": {"dtype": dtype, "shape": shape, "data_offsets": offsets} | others}


def with_json(content, **arrays):
    """A record whose JSON is this."""
    return save({"json": np.frombuffer(content, np.uint8)} | arrays)


def as_npz(**how):
    file = io.BytesIO()
    np.savez_compressed(file, **how)
    return file.getvalue()


GOOD = with_json(b'{"i": 1}', a=np.arange(6))
DEEP = b"[" * 100000
CONTENTS = {
    "nothing": b"",
    "one byte": b"\0",
    "seven bytes": b"\1" * 7,
    "eight zeros": bytes(8),
    "a megabyte of zeros": bytes(1 << 20),
    "a megabyte of 0xff": b"\xff" * (1 << 20),
    "random bytes": random.Random(0).randbytes(5000),
    "text": b"this is no record\n" * 9,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a pickle": pickle.dumps({"i": 1}),
    "a pickle in npz": as_npz(json=np.array([{"i": 1}], dtype=object)),
    "an npz that inflates": as_npz(json=np.zeros(1 << 22)),
    "gzip": gzip.compress(GOOD),
    "cut in the length": GOOD[:5],
    "cut in the header": GOOD[:40],
    "cut before the arrays": GOOD[: -len(b'{"i": 1}') - 48],
    "cut in the arrays": GOOD[:-9],
    "cut by a byte": GOOD[:-1],
    "a byte too many": GOOD + b"\0",
    "twice": GOOD + GOOD,
    "a bit of the length": bytes([GOOD[0] ^ 8]) + GOOD[1:],
    "a header of 2^63 bytes": (1 << 63).to_bytes(8, "little") + GOOD,
    "a header of 200 MB": (200 << 20).to_bytes(8, "little") + GOOD,
    "no JSON as a header": written(b"header"),
    "a list as a header": written(b"[1, 2]"),
    "a header that is not UTF-8": written(b'{"\xff": 1}'),
    "a deep header": written(DEEP),
    "terabytes": written(entry("F32", [HUGE, HUGE]), bytes(4)),
    "a shape that is too large": written(entry(shape=[HUGE]), bytes(4)),
    "a shape below zero": written(entry(shape=[-4]), bytes(4)),
    "a shape of fractions": written(entry(shape=[4.5]), bytes(4)),
    "a shape in words": written(entry(shape="four"), bytes(4)),
    "a hundred dimensions": written(entry(shape=[1] * 99 + [4]), bytes(4)),
    "offsets that go back": written(entry(offsets=[4, 0]), bytes(4)),
    "offsets beyond the end": written(entry(offsets=[0, 400], shape=[400]), bytes(4)),
    "offsets below zero": written(entry(offsets=[-4, 0]), bytes(4)),
    "offsets with a hole": written(entry(offsets=[4, 8]), bytes(8)),
    "offsets that overlap": written(entry() | {"a": entry()["json"]}, bytes(4)),
    "an unknown type": written(entry("DECIMAL"), bytes(4)),
    "a type that numpy lacks": written(entry("BF16", [2]), bytes(4)),
    "no type": written({"json": {"shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    "no JSON": save({"a": np.arange(3)}),
    "nothing in it": written({}),
    "empty JSON": with_json(b""),
    "JSON that is cut": with_json(b'{"i": '),
    "JSON twice": with_json(b'{"i": 1}{"i": 1}'),
    "JSON list": with_json(b"[1]"),
    "JSON number": with_json(b"1"),
    "JSON text": with_json(b'"i"'),
    "JSON null": with_json(b"null"),
    "JSON that is not UTF-8": with_json(b'{"i": "\xff\xfe"}'),
    "deep JSON": with_json(DEEP),
    "a number of 5000 digits": with_json(b'{"i": ' + b"1" * 5000 + b"}"),
    "JSON of floats": save({"json": np.ones(3)}),
    "one name for two": with_json(b'{"a": 1}', a=np.arange(3)),
}


def put_socket(path):
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


OTHER_FILES = {
    "a directory": os.mkdir,
    "a pipe": os.mkfifo,
    "a socket": put_socket,
    "a link to a record": lambda path: os.symlink(path.parent / "0000000000.safetensors", path),
    "a link to itself": lambda path: os.symlink(path, path),
    "a link to nothing": lambda path: os.symlink("gone", path),
    "a link to zeros": lambda path: os.symlink("/dev/zero", path),
    "a file of terabytes": lambda path: (path.touch(), os.truncate(path, HUGE)),
}
BAD_FILES = CONTENTS | OTHER_FILES


def make_bad(path, how):
    """Put a bad file in the place of a good one."""
    path.unlink()
    if isinstance(how, bytes):
        path.write_bytes(how)
    else:
        how(path)


def test_bad_files_are_set_aside_and_the_reader_goes_on(tmp_path, capsys, monkeypatch):
    # a socket's path must be short
    monkeypatch.chdir(tmp_path)
    for number, (case, how) in enumerate(BAD_FILES.items()):
        folder = tmp_path / str(number)
        queue = Queue(folder)
        for i in range(3):
            queue.put({"i": i})
        bad = folder / "0000000001.safetensors"
        make_bad(bad, how)
        reader = Queue(folder)
        got = [reader.get(5)[1]["i"] for _ in range(2)]
        said = capsys.readouterr().out
        assert got == [0, 2], case
        assert reader.refused.total() == 1, case
        assert said.count("\n") == 1 and f"queue: {bad} is refused (" in said, (case, said)
        assert os.path.lexists(f"{bad}.bad") and not os.path.lexists(bad), case
        # what was set aside is not seen again, and the number may still come
        assert len(Queue(folder)) == 2, case
    assert len(BAD_FILES) >= 60


def test_a_bad_file_takes_no_place_of_what_is_still_to_come(tmp_path):
    queue = Queue(tmp_path)
    queue.put({"i": 0})
    reader = Queue(tmp_path)
    assert reader.get(0)[1]["i"] == 0
    for number in ("0000000001", "0000000007", "9999999999"):
        (tmp_path / f"{number}.safetensors").write_bytes(b"foreign")
    for name in (
        "00000000001.safetensors",
        "x.safetensors",
        "-000000001.safetensors",
        "1.safetensors",
        "٣" * 10 + ".safetensors",
    ):
        (tmp_path / name).write_bytes(b"not the queue's")
    with pytest.raises(TimeoutError, match=r"'damaged': 3} refused"):
        reader.get(0)
    for i in (1, 2):
        assert queue.put({"i": i}) == i
        assert reader.get(0)[1]["i"] == i
    assert sum(reader.refused.values()) == 3


def test_what_a_check_refuses_takes_no_place_either(tmp_path):
    def check(record, file):
        if record["run"] != "mine":
            raise Refused("other_run", f"is of {record['run']}")

    queue = Queue(tmp_path)
    reader = Queue(tmp_path, check=check)
    queue.put({"run": "mine"})
    queue.put({"run": "another"})
    os.rename(tmp_path / "0000000001.safetensors", tmp_path / "0000000900.safetensors")
    assert reader.get(0)[0] == 0
    with pytest.raises(TimeoutError):
        reader.get(0)
    queue.put({"run": "mine"})
    queue.put({"run": "mine"})
    assert [reader.get(0)[0] for _ in range(2)] == [2, 3]
    assert reader.refused == {"other_run": 1}


def test_a_file_that_goes_while_it_is_read_is_not_waited_for_without_end(tmp_path, monkeypatch):
    queue = Queue(tmp_path)
    for i in range(2):
        queue.put({"i": i})
    really_open = os.open

    def gone(path, *how):
        (tmp_path / "0000000000.safetensors").unlink(missing_ok=True)
        return really_open(path, *how)

    monkeypatch.setattr(os, "open", gone)
    assert queue.get(5)[1]["i"] == 1
    assert not queue.refused


def test_what_cannot_be_set_aside_ends_the_wait_by_name(tmp_path):
    queue = Queue(tmp_path)
    (tmp_path / "0000000000.safetensors").write_bytes(b"damaged")
    (tmp_path / "0000000000.safetensors.bad").mkdir()
    with pytest.raises(OSError, match=f"queue: {tmp_path}/0000000000.safetensors cannot be set"):
        queue.get(5)


# ---- records of groups, at preprocess.py's

NAN = float("nan")
SAMPLES = 3


def at(name, value, where=-1):
    """Change of one value of an array."""

    def change(record):
        record[name] = record[name].copy()
        record[name][where] = value

    return change


def put(**entries):
    return lambda record: record.update(entries)


def without(name):
    return lambda record: record.pop(name)


def turned(name, change):
    """Change of a whole array."""
    return lambda record: record.update({name: change(record[name])})


# change of a good record, and a part of what is to be said of it
BAD_ARRAYS = {
    "tokens missing": (without("tokens"), "tokens is missing"),
    "mask missing": (without("mask"), "mask is missing"),
    "behavior_logprobs missing": (without("behavior_logprobs"), "behavior_logprobs is missing"),
    "versions missing": (without("versions"), "versions is missing"),
    "temperature missing": (without("temperature"), "temperature is missing"),
    "reward missing": (without("reward"), "reward is missing"),
    "outcome missing": (without("outcome"), "outcome is missing"),
    "task missing": (without("task"), "task is missing"),
    "lengths missing": (without("lengths"), "lengths is no array"),
    "lengths a list": (put(lengths=[5, 6, 7]), "lengths is no array"),
    "lengths of floats": (turned("lengths", np.float64), "lengths is no array"),
    "lengths in a table": (turned("lengths", np.atleast_2d), "lengths is no array"),
    "a length of 0": (at("lengths", 0), "lengths from 0"),
    "a length below 0": (at("lengths", -4), "lengths from -4"),
    "a length of 2^62": (at("lengths", 1 << 62), f"to {1 << 62}"),
    "lengths for other tokens": (at("lengths", 6), "tokens has 18 values for 3 samples of 17"),
    "tokens cut": (turned("tokens", lambda x: x[:-1]), "tokens has 17 values"),
    "mask cut": (turned("mask", lambda x: x[1:]), "mask has 17 values"),
    "behavior_logprobs too long": (
        turned("behavior_logprobs", lambda x: np.append(x, x[:1])),
        "behavior_logprobs has 19",
    ),
    "reward too long": (put(reward=np.zeros(4, np.float32)), "reward has 4 values"),
    "tokens of int32": (turned("tokens", np.int32), "tokens is no array of int64"),
    "tokens in words": (put(tokens="abc"), "tokens is no array"),
    "tokens in JSON": (turned("tokens", np.ndarray.tolist), "tokens is no array"),
    "tokens a table": (turned("tokens", lambda x: x.reshape(2, 9)), "tokens is no array"),
    "a mask of numbers": (turned("mask", lambda x: x.astype(np.int8)), "mask is no array of bool"),
    "behavior_logprobs of doubles": (
        turned("behavior_logprobs", np.float64),
        "behavior_logprobs is no array of float32",
    ),
    "a NaN logprob": (
        at("behavior_logprobs", NAN),
        "behavior_logprobs has values that are not finite",
    ),
    "an infinite logprob": (
        at("behavior_logprobs", -np.inf),
        "behavior_logprobs has values that are not finite",
    ),
    "a NaN reward": (at("reward", NAN), "reward has values that are not finite"),
    "a NaN temperature": (at("temperature", NAN), "temperature has values that are not finite"),
    "a temperature of 0": (at("temperature", 0), "temperature 0.0"),
    "a temperature below 0": (at("temperature", -1), "temperature -1.0"),
    "a token below 0": (at("tokens", -1), "tokens from -1 to"),
    "a token beyond": (at("tokens", 50), "tokens from 0 to 50, must be from 0 to 49"),
    "a token far beyond": (at("tokens", 1 << 60), "must be from 0 to 49"),
    "a task that is not": (at("task", 1), "task from 0 to 1, must be from 0 to 0"),
    "a task below 0": (at("task", -1), "task from -1"),
    "an outcome that is not": (at("outcome", 4), "to 4, must be from -1 to 3"),
    "a logprob above 0": (at("behavior_logprobs", 0.5), "a logprob above 0"),
    "sampled without a version": (at("versions", -1), "a sampled token has no version"),
    "a first token sampled": (at("mask", True, 0), "the first token of a sample"),
    "true of 2": (turned("mask", lambda x: (2 * x.view(np.int8)).view(bool)), "neither true nor"),
}
BAD_GROUPS = BAD_ARRAYS | {
    "num_versions missing": (without("num_versions"), "num_versions is missing"),
    "finished missing": (without("finished"), "finished is missing"),
    "a filler": (at("outcome", -1), "a sample without an outcome"),
    "a version of a prompt": (at("versions", 0, 0), "a version of what was not sampled"),
    "a logprob of a prompt": (at("behavior_logprobs", -1, 0), "a logprob of what was not sampled"),
    "a version of tomorrow": (at("versions", 4), "version 4 is not trained yet"),
    "too many samples": (put(failed=2), "3 samples and 2 failed of 4"),
    "index missing": (without("index"), "index: Field required"),
    "index in words": (put(index="7"), "index: Input should be a valid integer"),
    "index a fraction": (put(index=7.0), "index: Input should be a valid integer"),
    "index true": (put(index=True), "index: Input should be a valid integer"),
    "index below 0": (put(index=-1), "index: Input should be greater"),
    "index an array": (put(index=np.arange(3)), "index: Input should be a valid integer"),
    "failed missing": (without("failed"), "failed: Field required"),
    "failed null": (put(failed=None), "failed: Input should be"),
    "pace missing": (without("gen_tok_s"), "gen_tok_s: Field required"),
    "pace NaN": (put(gen_tok_s=NAN), "gen_tok_s: Input should be a finite number"),
    "pace in words": (put(gen_idle="none"), "gen_idle: Input should be a valid number"),
    "another run": (put(run_id="xyz"), "of run 'xyz', this is run abc"),
    "no run": (without("run_id"), "of run None"),
    "run a list": (put(run_id=["abc"]), "of run"),
    "done with before": (put(index=2), "problem 2 was here already"),
    "done with ahead": (put(index=6), "problem 6 was here already"),
    "here already": (put(index=9), "problem 9 was here already"),
}


def good_group(index):
    samples = [make_sample(5 + k, reward=float(k == 0), version=2 + k % 2) for k in range(SAMPLES)]
    return group_record(index, samples, failed=1)


def test_bad_groups_are_refused_by_name_and_made_up_for(tmp_path, capsys):
    config = cfg.Config(run_id="abc", attempts=4, stall_timeout=5)
    publish_json(tmp_path / "version.json", version=2)
    for number, (case, (change, words)) in enumerate(BAD_GROUPS.items()):
        queue = Queue(tmp_path / str(number))
        queue.put(good_group(9))
        bad = good_group(7)
        change(bad)
        queue.put(bad)
        queue.put(good_group(8))
        queue.put(group_record(10, [], failed=4))
        ledger = Ledger(5, [6])
        check = RolloutCheck(config, ledger, 50, NewestVersion(tmp_path / "version.json"))
        ring = Ring(config, Queue(queue.path, check=check), ledger)
        ring.receive()
        [said] = capsys.readouterr().out.splitlines()
        assert f"{queue.path}/0000000001.safetensors is refused" in said and words in said, case
        assert [group["index"] for group in ring.groups] == [9, 8], case
        [reason] = ring.rollouts.refused
        assert lost_records(ring.rollouts) == ([] if reason in FOREIGN else [1]), case
        # that of which nothing came back
        assert ledger.dropped_groups == 1, case
    assert len(BAD_GROUPS) >= 60


def test_the_problem_of_a_bad_group_is_named(tmp_path, capsys):
    config = cfg.Config(run_id="abc", attempts=4)
    check = RolloutCheck(config, Ledger(0, []), 50, NewestVersion(tmp_path / "version.json"))
    for change in (at("behavior_logprobs", NAN), at("tokens", 50)):
        bad = good_group(7)
        change(bad)
        with pytest.raises(Refused, match="problem 7: "):
            check(bad, "file")


# ---- micro-batches, at train.py's

LEDGER = {
    "position": {"next": 3, "ahead": [5]},
    "problems": {"1": 2},
    "drops": {"failed": {"1": 2}},
    "by_task": {"toy": {"samples": 2, "reward": 0.5}},
}
POSITION = {"next": 3, "ahead": "5"}
# these end the run, as their step would be smaller
BAD_BATCHES = BAD_ARRAYS | {
    "advantage missing": (without("advantage"), "advantage is missing"),
    "a NaN advantage": (at("advantage", NAN), "advantage has values that are not finite"),
    "a version of tomorrow": (at("versions", 5), "version 5 sampled for step 4"),
    "no samples": (lambda r: (r.clear(), r.update(batch([]))), "no samples"),
    "a step that is not due": (put(step=5), "row 0 of step 4 is missing, this is row 0 of step 5"),
    "a row that is not due": (put(row=1), "row 0 of step 4 is missing, this is row 1 of step 4"),
    "step missing": (without("step"), "step: Field required"),
    "step in words": (put(step="4"), "step: Input should be a valid integer"),
    "row missing": (without("row"), "row: Field required"),
    "row below 0": (put(row=-1), "row: Input should be greater"),
    "last missing": (without("last"), "last: Field required"),
    "last a number": (put(last=1), "last: Input should be a valid boolean"),
    "idle missing": (without("gen_idle"), "gen_idle: Field required"),
    "position missing": (without("position"), "position: Field required"),
    "position a list": (put(position=[3]), "position: Input should be a valid dictionary"),
    "position without its end": (put(position={"next": 3}), "position.ahead: Field required"),
    "position in words": (put(position=POSITION), "position.ahead: Input should be a valid list"),
    "problems missing": (without("problems"), "problems: Field required"),
    "problems in words": (put(problems={"1": "2"}), "problems.1: Input should be a valid integer"),
    "drops flat": (put(drops={"failed": 2}), "drops.failed: Input should be a valid dictionary"),
    "tasks missing": (without("by_task"), "by_task: Field required"),
    "tasks of NaN": (put(by_task={"toy": {"reward": NAN}}), "by_task.toy.reward: Input should be"),
}
# these are somebody else's
FOREIGN_BATCHES = {
    "no record": (None, "damaged"),
    "another run": (put(run_id="xyz"), "other_run"),
    "no run": (without("run_id"), "other_run"),
    "a run of numbers": (put(run_id=4), "other_run"),
    "a step that is trained": (put(step=3, row=7), "duplicate"),
}


def batch(samples, **others):
    """A micro-batch that is all of step 4."""
    scalars = {"run_id": "abc", "step": 4, "row": 0, "last": True, "gen_tok_s": 1.0, "gen_idle": 0}
    return join(samples) | scalars | LEDGER | others


def three_samples(**others):
    return [make_sample(5 + k, version=4, **others) for k in range(SAMPLES)]


def reader_of(run_dir, **knobs):
    """(Reader of one rank, its queue)."""
    config = cfg.Config(run_id="abc", stall_timeout=5, row_tokens=64, **knobs)
    queue = Queue(run_dir / "queues" / "batches" / "rank_0")
    return Reader(config, run_dir, OneRank(), 50, lambda: None), queue


def test_bad_micro_batches_end_the_run_by_name_and_are_not_lost(tmp_path):
    for number, (case, (change, words)) in enumerate(BAD_BATCHES.items()):
        reader, queue = reader_of(tmp_path / str(number))
        bad = batch(three_samples())
        change(bad)
        queue.put(bad)
        with pytest.raises(RuntimeError) as raised:
            list(reader.step(4))
        said = str(raised.value)
        assert said.startswith(f"train: {queue.path}/0000000000.safetensors: schema: "), case
        assert words in said and said.endswith("; the same command continues"), (case, said)
        assert len(queue) == 1, case
    assert len(BAD_BATCHES) >= 60


def test_micro_batches_of_others_are_set_aside(tmp_path, capsys):
    for number, (case, (change, reason)) in enumerate(FOREIGN_BATCHES.items()):
        reader, queue = reader_of(tmp_path / str(number))
        foreign = batch(three_samples())
        if change:
            change(foreign)
        queue.put(foreign)
        if not change:
            (queue.path / "0000000000.safetensors").write_bytes(b"damaged")
        queue.put(batch(three_samples()))
        [record] = reader.step(4)
        assert len(record["lengths"]) == SAMPLES, case
        assert reader.batches.refused == {reason: 1}, case
        assert "0000000000.safetensors is refused" in capsys.readouterr().out, case
        assert len(queue) == 0, case


def test_rows_of_a_step_come_one_after_the_other(tmp_path):
    reader, queue = reader_of(tmp_path)
    for row in range(3):
        queue.put(batch(three_samples(), row=row, last=row == 2))
    assert [record["row"] for record in reader.step(4)] == [0, 1, 2]
    for row in range(3):
        queue.put(batch(three_samples(), step=5, row=row, last=row == 2))
    (queue.path / "0000000004.safetensors").write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="row 1 of step 5 is missing, this is row 2 of step 5"):
        list(reader.step(5))


def test_a_micro_batch_that_does_not_come_is_waited_for_so_long(tmp_path):
    reader, queue = reader_of(tmp_path)
    reader.config.stall_timeout = 0.1
    (queue.path / "0000000000.safetensors").write_bytes(b"damaged")
    with pytest.raises(TimeoutError, match=r"no micro-batch into .* \(\{'damaged': 1\} refused\)"):
        list(reader.step(4))


def test_good_micro_batches_are_not_refused(tmp_path):
    reader, queue = reader_of(tmp_path, kl_coef=0.1)
    samples = three_samples(ref_logprobs=np.zeros(0, np.float32))
    for sample in samples:
        sample["ref_logprobs"] = np.full(len(sample["tokens"]), 0.5, np.float32)
    # as --overlong_mask leaves it
    samples[1]["mask"] = np.zeros_like(samples[1]["mask"])
    queue.put(batch(samples, last=False))
    queue.put(batch([filler()], row=1))
    assert len(list(reader.step(4))) == 2
    queue.put(batch(three_samples(), step=5))
    with pytest.raises(RuntimeError, match="ref_logprobs is missing"):
        list(reader.step(5))


def test_bad_evaluations_are_set_aside(tmp_path):
    reader, _ = reader_of(tmp_path)
    good = {"run_id": "abc", "eval": {"toy": 0.5}, "problems": 3, "version": 2, "wall_s": 1.0}
    changes = [
        {"eval": [0.5]},
        {"eval": {"toy": NAN}},
        {"eval": {"toy": "0.5"}},
        {"problems": -1},
        {"problems": None},
        {"version": 10**6},
        {"version": "2"},
        {"wall_s": NAN},
    ]
    queue = Queue(tmp_path / "queues" / "evals")
    for change in changes:
        queue.put(good | change)
    queue.put(good | {"run_id": "xyz"})
    queue.put(good)
    assert reader.evaluations() == [good]
    assert reader.evals.refused == {"schema": len(changes), "other_run": 1}
    # a copy far ahead does not hide what comes next
    queue.put(good)
    number = f"{len(changes) + 2:010d}"
    os.rename(queue.path / f"{number}.safetensors", queue.path / "0000000900.safetensors")
    assert reader.evaluations() == []
    queue.put(good | {"version": 4})
    assert reader.evaluations() == [good | {"version": 4}]


# ---- answers of an engine

TOKENS = [29, 30, 1]
ASKED = 8


def good_choice(**others):
    return {
        "token_ids": TOKENS,
        "finish_reason": "stop",
        "behavior_logprobs": [-0.5] * len(TOKENS),
        "weight_versions": [
            {"version": "4", "start": 0, "end": 2},
            {"version": "5", "start": 2, "end": 3},
        ],
    } | others


def answer(**others):
    """Body of an answer that differs from a good one in this."""
    return json.dumps({"choices": [good_choice(**others)]}).encode()


def logprobs(*values):
    return {"behavior_logprobs": list(values)}


def spans(*triples):
    keys = ("version", "start", "end")
    return {"weight_versions": [dict(zip(keys, x)) for x in triples]}


def sampled(tokens, **others):
    """These tokens, with all that belongs to them."""
    rest = logprobs(*[-1.0] * len(tokens)) | spans(("5", 0, len(tokens)))
    return answer(token_ids=tokens, **(rest | others))


def raw(text):
    """A good answer with a part of its text replaced: (what, by what)."""
    return answer().replace(*text)


BAD_ANSWERS = {
    "json": {
        "nothing": b"",
        "words": b"<html>busy</html>",
        "not UTF-8": b"\xff\xfe{}",
        "zeros": bytes(100),
        "null": b"null",
        "number": b"3",
        "list": b"[]",
        "text": b'"choices"',
        "cut": answer()[:-5],
        "twice": answer() + answer(),
        "infinite": answer(**logprobs(-0.5, -np.inf, -0.5)),
        "NaN": answer(**logprobs(-0.5, NAN, -0.5)),
        "deep": b'{"x": ' + DEEP,
        "UTF-16": answer().decode().encode("utf-16"),
    },
    "choices": {
        "missing": b"{}",
        "null": b'{"choices": null}',
        "dict": b'{"choices": {}}',
        "empty": b'{"choices": []}',
        "two": json.dumps({"choices": [good_choice()] * 2}).encode(),
        "number": b'{"choices": [3]}',
        "null choice": b'{"choices": [null]}',
        "deep": b'{"choices": ' + DEEP,
        "list": b'{"choices": [[]]}',
    },
    "token_ids": {
        "missing": json.dumps({"choices": [{"finish_reason": "stop"}]}).encode(),
        "null": answer(token_ids=None),
        "text": answer(token_ids="abc"),
        "dict": answer(token_ids={"0": 29}),
        "texts": answer(token_ids=["29", "30", "1"]),
        "fractions": answer(token_ids=[29.0, 30.5, 1]),
        "bools": answer(token_ids=[29, True, 1]),
        "nulls": answer(token_ids=[29, None, 1]),
        "below 0": answer(token_ids=[29, -30, 1]),
        "nested": answer(token_ids=[[29, 30, 1]]),
        "none": sampled([]),
        "too many": sampled([29] * ASKED + [1]),
        "beyond": sampled([29, 50, 1]),
        "5000 digits": raw((b"29, 30", b"29, " + b"3" * 5000)),
        "far beyond": sampled([29, 1 << 40, 1]),
    },
    "behavior_logprobs": {
        "missing": raw((b'"behavior_logprobs"', b'"lp"')),
        "null": answer(behavior_logprobs=None),
        "dict": answer(behavior_logprobs={"0": -0.5}),
        "number": answer(behavior_logprobs=-0.5),
        "lists": answer(behavior_logprobs=[[-0.5]] * 3),
        "vLLM's own": answer(behavior_logprobs={"content": [{"logprob": -0.5}] * 3}),
        "nulls": answer(**logprobs(-0.5, None, -0.5)),
        "texts": answer(**logprobs(-0.5, "-0.5", -0.5)),
        "bools": answer(**logprobs(-0.5, False, -0.5)),
        "none": answer(**logprobs()),
        "fewer": answer(**logprobs(-0.5, -0.5)),
        "more": answer(**logprobs(-0.5, -0.5, -0.5, -0.5)),
        "1e999": raw((b"-0.5", b"-1e999")),
        "a word for NaN": answer(**logprobs(-0.5, -9999.0, -0.5)),
        "above 0": answer(**logprobs(-0.5, 0.5, -0.5)),
    },
    "weight_versions": {
        "missing": raw((b"weight_versions", b"versions")),
        "null": answer(weight_versions=None),
        "text": answer(weight_versions="5"),
        "none": answer(**spans()),
        "nulls": answer(weight_versions=[None]),
        "no trainer's": answer(**spans(("default", 0, 3))),
        "a fraction": answer(**spans(("5.0", 0, 3))),
        "below 0": answer(**spans(("-1", 0, 3))),
        "other digits": answer(**spans(("٥", 0, 3))),
        "a number": answer(**spans((5, 0, 3))),
        "too short": answer(**spans(("5", 0, 2))),
        "too long": answer(**spans(("5", 0, 4))),
        "late": answer(**spans(("5", 1, 3))),
        "a hole": answer(**spans(("4", 0, 1), ("5", 2, 3))),
        "overlap": answer(**spans(("4", 0, 2), ("5", 1, 3))),
        "twice": answer(**spans(("4", 0, 3), ("5", 0, 3))),
        "back": answer(**spans(("5", 0, 2), ("4", 2, 3))),
        "turned": answer(**spans(("5", 3, 0))),
        "starts below 0": answer(**spans(("5", -3, 3))),
        "ends in words": answer(**spans(("5", 0, "3"))),
        "of tomorrow": answer(**spans(("7", 0, 3))),
        "far ahead": answer(**spans(("999999999", 0, 3))),
    },
    "finish_reason": {
        "missing": raw((b"finish_reason", b"reason")),
        "null": answer(finish_reason=None),
        "abort": answer(finish_reason="abort"),
        "error": answer(finish_reason="error"),
        "repetition": answer(finish_reason="repetition"),
        "true": answer(finish_reason=True),
        "stop without a stop": sampled([29, 30, 31]),
        "length, too short": sampled([29, 30, 31], finish_reason="length"),
    },
    "too_long": {"16 MB": answer() + b" " * (16 << 20)},
}


def as_json(body):
    return web.Response(body=body, content_type="application/json")


# what is wrong with the transport is no bad answer, but must not end the actor either
ODD_RESPONSES = {
    "error": lambda: web.Response(status=500, body=b"\xff" * 1000),
    "a redirect": lambda: web.Response(status=302, headers={"Location": "/inference/v1/generate"}),
    "a redirect to a file": lambda: web.Response(status=302, headers={"Location": "file:///x"}),
    "no content": lambda: web.Response(status=204),
    "broken gzip": lambda: web.Response(body=answer(), headers={"Content-Encoding": "gzip"}),
    "gzip cut": lambda: web.Response(
        body=gzip.compress(answer())[:40], headers={"Content-Encoding": "gzip"}
    ),
    "unknown charset": lambda: web.Response(
        body=b"busy", status=400, headers={"Content-Type": "text/plain; charset=x"}
    ),
}


def generate_from(responses, count, monkeypatch):
    """Ask an engine that gives these responses, then a good one, for `count` completions, one after the other; (Engines, completions)."""
    monkeypatch.setattr(client.random, "uniform", lambda low, high: 0.0)
    monkeypatch.setattr(client, "REST", 0.0)

    class Newest:
        def reaches(self, version):
            return version <= 6

    async def run():
        engine = FakeEngine(lambda n, body: responses(n))
        async with engine.serve() as url:
            engines = Engines(cfg.Config(engines=1), {1}, 50, Newest())
            engines.serve([url])
            completions = [await engines.generate([5, 6], 1.0, ASKED) for _ in range(count)]
            await engines.close()
        return engines, completions

    return asyncio.run(asyncio.wait_for(run(), 120))


def assert_good(completion):
    assert completion["tokens"] == TOKENS
    assert completion["behavior_logprobs"] == [-0.5] * 3
    assert completion["versions"].tolist() == [4, 4, 5]
    assert completion["finished"]


def test_bad_answers_are_tried_again_and_counted_by_reason(monkeypatch, capsys):
    table = [(reason, *case) for reason, cases in BAD_ANSWERS.items() for case in cases.items()]
    assert len(table) >= 80
    for reason, case, body in table:
        engines, [completion] = generate_from(
            lambda n: as_json(body if n == 1 else answer()), 1, monkeypatch
        )
        assert_good(completion)
        counted = dict(engines.counts)
        assert counted == {f"bad_{reason}": 1, "retried": 1}, (reason, case, counted)
        [said] = capsys.readouterr().out.splitlines()
        assert said.startswith("actor: request to http://127.0.0.1:"), (reason, case)
        assert f"bad answer, {reason}: " in said, (reason, case, said)


def test_odd_responses_are_tried_again(monkeypatch):
    for case, response in ODD_RESPONSES.items():
        engines, [completion] = generate_from(
            lambda n: response() if n == 1 else as_json(answer()), 1, monkeypatch
        )
        assert_good(completion)
        assert engines.counts["retried"] == 1, case


def test_an_engine_that_only_gives_bad_answers_costs_the_attempt(monkeypatch):
    engines, completions = generate_from(lambda n: as_json(b"{}"), 2, monkeypatch)
    assert completions == [None, None]
    assert engines.counts == {"bad_choices": 8, "retried": 6, "failed": 2}


GOOD_ANSWERS = {
    "as many tokens as asked for": sampled([29] * ASKED, finish_reason="length"),
    "a stop as the last that is allowed": sampled([29] * (ASKED - 1) + [1]),
    "the first is a stop": sampled([1]),
    "a stop in the middle": sampled([1, 29, 1]),
    "a logprob rounded above 0": sampled([29, 1], **logprobs(1e-6, 0)),
    "a span of nothing": sampled([29, 1], **spans(("4", 0, 2), ("5", 2, 2))),
    "a span for each token": sampled([29, 1], **spans(("5", 0, 1), ("5", 1, 2))),
    "more than is asked for": sampled([29, 1], stop_reason=1, index=0, routed_experts=None),
    "in flight": sampled([29, 1], **spans(("6", 0, 2))),
}


def test_good_answers_are_believed(monkeypatch):
    for case, body in GOOD_ANSWERS.items():
        engines, [completion] = generate_from(lambda n: as_json(body), 1, monkeypatch)
        assert not engines.counts, (case, engines.counts)
        assert max(completion["behavior_logprobs"]) <= 0, case

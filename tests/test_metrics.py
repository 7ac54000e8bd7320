"""Metrics over micro-batches and ranks, files of lines that are continued, and rollouts as text.

The files are real; the rollouts and metrics are made up.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_samples import make_sample

import config as cfg
import train
from made_up_run import read_lines
from plumbing import metrics
from plumbing.checkpoints import NEW_RUN
from plumbing.metrics import Sums, largest
from plumbing.queues import publish_json
from plumbing.samples import filler, join


def test_sums_by_hand():
    sums = Sums()
    nothing = torch.tensor(0.0)
    for n, x, high in ((2, 3.0, 5), (4, 9.0, 1)):
        parts = torch.tensor([x, 1.0])
        n, x, high = map(torch.tensor, (n, x, high))
        batch_metrics = dict(
            n=(train.count, n),
            x=(train.mean, x, n),
            high=(largest, high),
            none=(train.mean, nothing, 0 * n),
            none_either=(train.mean_if_any, nothing, 0 * n),
            parts=(lambda parts: parts, parts),
        )
        sums.add(batch_metrics)
    expected = dict(n=6, x=2.0, high=5, none=0.0, none_either=None, parts=[12.0, 2.0])
    assert sums.reduce() == expected


def test_a_file_of_lines_is_continued_from_a_checkpoint(tmp_path):
    path = tmp_path / "lines.jsonl"
    kept_lines = ['{"step": 4}', '{"eval": 0.5, "version": 3}', '{"step": 5, "version": 5}']
    dropped_lines = ['{"eval": 0.5, "version": 5}', '{"step": 6}', '{"step": 7, "torn": {"0": 1}']
    path.write_text("\n".join(kept_lines + dropped_lines))
    with metrics.open_lines(path, 5) as file:
        file.write('{"step": 6, "again": true}\n')
    assert path.read_text().splitlines() == [*kept_lines, '{"step": 6, "again": true}']


@pytest.fixture()
def make_log(tmp_path, base_model):
    """Return a function that makes the MetricsLog of a run of two tasks."""

    def make(rank=0, version=0, **knobs):
        config = cfg.Config(task="tail,toy", model=str(base_model), run_id="0123abcd", **knobs)
        return metrics.MetricsLog(config, tmp_path, NEW_RUN | {"version": version}, rank)

    return make


def test_rollouts_are_written_as_text_with_what_the_trainer_knows(tmp_path, make_log):
    log = make_log(samples_logged=2)
    ids = log.tokenizer("ba=ab")["input_ids"]
    end = log.tokenizer.eos_token_id
    # Two turns: one sampled, then text of the environment, then one sampled by two versions
    mask = np.array([0, 0, 0, 1, 1, 0, 1, 1], bool)
    versions = np.array([-1, -1, -1, 3, 3, -1, 3, 4])
    turns = make_sample(
        8,
        reward=1.0,
        tokens=np.array([*ids, ids[0], ids[1], end]),
        mask=mask,
        versions=versions,
        sample_id=17,
        problem=6,
        task=1,
        advantage=np.where(mask, 0.25, 0.0),
        behavior_logprobs=np.where(mask, -0.5, 0.0),
        outcome=0,
    )
    batch = join([turns, filler(), make_sample(4, sample_id=18, finished=False), make_sample(5)])
    log.samples(batch, torch.arange(18) / 10, 4)
    first, second = read_lines(tmp_path / "samples.jsonl")
    spans = [[-1, ["b", "a", "="]], [3, ["a", "b"]], [-1, ["b"]], [3, ["a"]], [4, ["<eos>"]]]
    spans = [[*span, 0] for span in spans]
    expected = dict(
        step=5,
        sample_id=17,
        problem=6,
        task="toy",
        reward=1.0,
        outcome="correct",
        prompt="ba=",
        completion="abba",
        spans=spans,
        advantage=0.25,
        finished=True,
        behavior_logprobs=[-0.5] * 4,
        log_ratios=[0.8, 0.9, 1.1, 1.2],
    )
    assert first == expected
    # A step logs as many samples as --samples_logged says.
    assert (second["sample_id"], second["finished"]) == (18, False)
    log.samples(batch, torch.arange(18) / 10, 4)
    assert len(read_lines(tmp_path / "samples.jsonl")) == 2
    # Other ranks log nothing.
    make_log(rank=1).samples(batch, torch.arange(18) / 10, 4)
    # A continued run repeats what came after its checkpoint, so these lines go.
    assert make_log(version=5) and len(read_lines(tmp_path / "samples.jsonl")) == 2
    assert make_log(version=4) and not read_lines(tmp_path / "samples.jsonl")
    # An attempt that --overlong_mask leaves out of the loss is written as any other one,
    # but the trainer has computed no logprobs of its tokens.
    left_out = dict(turns, mask=np.zeros_like(turns["mask"]), sample_id=19)
    make_log().samples(join([left_out]), torch.arange(len(turns["tokens"])) / 10, 4)
    [line] = read_lines(tmp_path / "samples.jsonl")
    assert line == expected | dict(sample_id=19, log_ratios=[None] * 4)


def test_steps_mismatches_and_evaluations_are_written_as_lines(tmp_path, make_log, capsys):
    log = make_log(steps=100)
    log.save_s = 2.5
    state = NEW_RUN | {"version": 40, "samples": 640, "wall_s": 33.0}
    values = dict(
        samples=16,
        tokens=320,
        reward=1 / 3,
        ess=0.99,
        lag_mean=1.25,
        lag_max=3,
        mismatch=None,
    )
    record = dict(by_task={}, problems={"4": 8}, drops={})
    reader = SimpleNamespace(last=record, waited=0.0)
    log.step(state, values, reader, {"sync_s": 0.125})
    # The actor has measured the engines' pace by now.
    (tmp_path / "queues").mkdir()
    publish_json(tmp_path / "queues" / "pace.json", gen_tok_s=5.0, gen_idle=0.25)
    log.step(state, values, reader, {"sync_s": 0.125})
    log.mismatch(40, {"mismatch": 1 / 3, "tokens": 53})
    log.mismatch(40, {})
    evaluation = dict(run_id="0123abcd", eval={"toy": 0.5}, problems=4, version=40)
    log.run_start -= 12.0
    log.evaluations([evaluation])
    first, second, mismatch, eval_line = read_lines(tmp_path / "metrics.jsonl")
    assert (first["step"], first["version"], first["samples"]) == (40, 40, 640)
    assert first["reward"] == 1 / 3
    # The time of a checkpoint counts in the step after it.
    assert (first["save_s"], second["save_s"], first["sync_s"]) == (2.5, 0.0, 0.125)
    assert (first["gen_tok_s"], first["gen_idle"]) == (0.0, 0.0)
    assert (second["gen_tok_s"], second["gen_idle"]) == (5.0, 0.25)
    assert mismatch == {"mismatch": 1 / 3, "tokens": 53, "version": 40}
    assert eval_line.pop("wall_s") >= 12.0
    assert eval_line == dict(eval={"toy": 0.5}, problems=4, version=40)
    printed = capsys.readouterr().out
    assert "step 40/100 | reward 0.333 | ess 0.990 | lag 1.2/3 | mismatch - | " in printed
    assert "eval: version 40 | toy 0.500 | 4 held-out problems" in printed

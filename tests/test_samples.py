"""The schema of a sample: records and back, fillers, new fields, and what is refused."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import torch
from test_train import knobs, packed_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import train
from plumbing import samples as schema
from plumbing.ledger import Ledger
from plumbing.queues import Queue
from plumbing.rollouts import TrainedLog, is_logged, pieces, rounded
from plumbing.samples import filler, join, layout, problem_with, split
from preprocess import Packer, Ring


def make_sample(n=5, reward=0.0, version=0, prompt=2, **others):
    """A sample of n tokens, of which `prompt` were not sampled, with its advantage."""
    mask = np.arange(n) >= prompt
    sample = {
        "tokens": np.arange(n) % 40,
        "mask": mask,
        "behavior_logprobs": np.where(mask, -0.5, 0.0),
        "versions": np.where(mask, version, -1),
        "task": 0,
        "temperature": 1.0,
        "reward": reward,
        "outcome": 0 if reward >= 1 else 1,
        "finished": True,
        "num_versions": 1,
        "number": 0,
        "advantage": reward,
    }
    return sample | others


def group_record(index, samples, failed=0, **others):
    """A group as actor.py puts it into queues/rollouts: the advantages are not there yet."""
    record = join([{k: v for k, v in s.items() if k != "advantage"} for s in samples])
    record |= {"run_id": "abc", "index": index, "failed": failed}
    return record | {"gen_tok_s": 10.0, "gen_idle": 0.25} | others


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def test_what_is_logged_of_a_step():
    config = SimpleNamespace(batch_size=12, attempts=3, groups_per_step=4, samples_logged=6)
    # the first attempts at its four problems, then two second ones
    assert [n for n in range(12) if is_logged(config, n)] == [0, 1, 3, 4, 6, 9]
    assert [n for n in range(24, 36) if is_logged(config, n)] == [24, 25, 27, 28, 30, 33]
    config.samples_logged = 0
    assert not any(is_logged(config, n) for n in range(12))


def test_what_became_of_logged_samples(tmp_path):
    config = SimpleNamespace(batch_size=4, attempts=2, groups_per_step=2, samples_logged=2)
    samples = [
        make_sample(4, reward=1.0, number=9),
        make_sample(5, number=8),
        make_sample(6, number=10),
    ]
    batch = join(samples)
    batch["log_ratios"] = torch.arange(15, dtype=torch.float32) / 10
    batch["log_ratios"][5] = torch.nan
    (tmp_path / "trained_0.jsonl").write_text(
        '{"number": 1, "step": 4}\n{"number": 3, "step": 5}\n{"num'
    )
    (tmp_path / "trained_3.jsonl").write_text('{"number": 2, "step": 5}\n')
    log = TrainedLog(config, tmp_path, 4, 0, 3)
    assert list(log.watch([batch], 7)) == [batch]
    lines = [json.loads(x) for x in (tmp_path / "trained_0.jsonl").read_text().splitlines()]
    # two of each sample's tokens were given; sample 9 is a second attempt
    eight = dict(number=8, step=8, advantage=0.0, log_ratios=[0.6, 0.7, 0.8])
    ten = dict(number=10, step=8, advantage=0.0, log_ratios=[1.1, 1.2, 1.3, 1.4])
    assert lines == [{"number": 1, "step": 4}, eight, ten]
    # there were four ranks, and the run goes on from step 4
    assert (tmp_path / "trained_3.jsonl").read_text() == ""
    assert rounded(np.array([1.23456, np.nan, -np.inf])) == [1.2346, None, None]


def byte_level():
    """Tokens are bytes and pairs of them, as GPT-2's; of "né" the é is two."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_pieces():
    """Tokens with a mark for the space before them, as Llama's; decoding drops the first one."""
    words = ["▁a", "▁b", "c", "<0xC3>", "<0xA9>", "<unk>"]
    model = models.BPE(
        {w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_the_text_of_each_token():
    tokenizer = byte_level()
    text = " né 日本\n"
    ids = tokenizer(text)["input_ids"]
    texts = pieces(tokenizer, ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    assert texts[:5] == [" ", "n", "", "é", " "]
    # cut off within a character: what the tokenizer says of the whole
    cut = ids[:-2]
    assert len(pieces(tokenizer, cut)) == len(cut)
    assert pieces(word_pieces(), [0, 1, 2, 3, 4, 0]) == ["a", " b", "c", "", "é", " a"]


def test_samples_survive_a_record():
    lengths = (3, 1, 7)
    samples = [make_sample(n, reward=n / 10, version=n, task=n, finished=n > 2) for n in lengths]
    record = join(samples)
    assert record["lengths"].tolist() == [3, 1, 7]
    assert record["tokens"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]
    for name, dtype in (schema.TOKEN_FIELDS | schema.SAMPLE_FIELDS).items():
        assert name == "ref_logprobs" or record[name].dtype == dtype
    again = split(record)
    for sample, other in zip(again, samples, strict=True):
        assert sample["tokens"].tolist() == other["tokens"].tolist()
        assert sample["versions"].tolist() == other["versions"].tolist()
        assert sample["mask"].tolist() == other["mask"].tolist()
        assert sample["reward"] == np.float32(other["reward"])
        assert (sample["task"], sample["finished"]) == (other["task"], other["finished"])
    same(join(again), record)


def test_what_samples_do_not_have_is_left_out():
    assert join([]).keys() == {"lengths"}
    assert split(join([])) == []
    record = join([{"tokens": np.arange(3)}, {"tokens": np.arange(2), "text": "not in the schema"}])
    assert record.keys() == {"lengths", "tokens"}
    assert [s.keys() for s in split(record)] == [{"tokens"}, {"tokens"}]


def test_layout_by_hand():
    positions, sequence_ids = layout([2, 1, 3])
    assert positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert sequence_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert [len(x) for x in layout(join([])["lengths"])] == [0, 0]


def test_a_filler_has_every_field_and_is_no_sample():
    record = join([filler()])
    assert record.keys() == {"lengths"} | schema.TOKEN_FIELDS.keys() | schema.SAMPLE_FIELDS.keys()
    assert record["outcome"].tolist() == [-1]
    assert not record["mask"].any()
    assert problem_with(record, record, 1, 1) is None


def test_a_new_field_is_a_line_in_the_schema_and_reaches_the_loss(tmp_path, monkeypatch):
    """From the actor's record through the stage between, a filler's row among them, to the tensors of the loss."""
    monkeypatch.setitem(schema.TOKEN_FIELDS, "surprise", np.float32)
    monkeypatch.setitem(schema.SAMPLE_FIELDS, "difficulty", np.int16)
    config = knobs(run_id="abc", batch_size=2, attempts=2, row_tokens=64)
    rollouts = Queue(tmp_path / "rollouts")
    samples = [
        make_sample(5, surprise=np.arange(5) / 8, difficulty=3),
        make_sample(4, surprise=np.arange(4) / 4, difficulty=9),
    ]
    rollouts.put(group_record(0, samples))
    queues = [Queue(tmp_path / f"rank_{r}") for r in range(2)]
    ledger = Ledger(0, [])
    ring = Ring(config, rollouts, ledger)
    ring.receive()
    packer = Packer(config, queues, ledger, 0)
    packer.add(ring.groups.popleft())
    record, of_filler = (q.get(0)[1] for q in queues)
    assert record["difficulty"].tolist() == [3, 9]
    assert record["surprise"].tolist() == [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 0, 1 / 4, 2 / 4, 3 / 4]
    assert of_filler["difficulty"].tolist() == [0]

    seen = []

    def spy(device, *tensors):
        seen.extend(tensors)
        return list(tensors)

    monkeypatch.setattr(train, "to_device", spy)
    for batch in (record, of_filler):
        train.micro_batch(packed_model(), batch, 0, config, torch.device("cpu"))
    for values in (record["surprise"], record["difficulty"]):
        assert any(np.array_equal(x.numpy(), values) for x in seen)


class OneRank:
    """As plumbing.ranks.Ranks, of one process."""

    rank = 0
    stop = threading.Event()

    def agree(self, number):
        return number

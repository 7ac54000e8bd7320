"""bench/pace.py: the FAKE engines that it puts in place of H100s.

The slow test has the real actor and preprocess between them and the FAKE trainer. Another test
looks at what makes an actor grow.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import config as cfg
from bench import pace
from plumbing.placement import NO_GAPS

# Reads 60,000 messages as asyncio does, keeps 200 of them, and prints by how many pages of 4 KB the
# process grows after the first 10,000 messages.
READS = """
import random
import socket
from asyncio.selector_events import _SelectorTransport

def pages():
    return int(open("/proc/self/statm").read().split()[1])

# The actor frees larger blocks, too, when it starts.
bytearray(20 << 20)
ours, theirs = socket.socketpair()
numbers = random.Random(0)
kept = [b""] * 200
for i in range(60_000):
    if i == 10_000:
        before = pages()
    theirs.send(bytes(numbers.randint(500, 3000)))
    kept[numbers.randrange(200)] = ours.recv(_SelectorTransport.max_size)
    others = [0.0] * numbers.randrange(50, 2000)
print(pages() - before)
"""


def test_lengths_of_answers_have_the_mean_that_was_asked_for():
    lengths = pace.draw_lengths(4000, 4096)
    assert lengths.mean() == pytest.approx(4000, rel=0.02)
    assert lengths.min() > 0 and lengths.max() <= 12000
    assert len(set(lengths.tolist())) <= 121


def test_a_decode_step_reads_the_weights_and_the_cache():
    # 256 sequences, each half of 4,000 tokens long, with 57,344 bytes for each token
    seconds = pace.step_seconds(256, np.full(10, 4000))
    assert seconds == pytest.approx((15.2e9 + 256 * 2000 * 57344) / 3.35e12)


@pytest.mark.parametrize("first, last, length", [(3, 3, 5), (0, 2, 10), (0, 9, 4)])
def test_version_spans_cover_an_answer(first, last, length):
    spans = pace.version_spans(first, last, length)
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == length and spans[-1]["version"] == str(last)
    assert all(span["start"] < span["end"] for span in spans)


def test_a_stage_that_ends_is_named(tmp_path):
    (tmp_path / "queues").mkdir()
    stages = {}
    trainer = pace.FakeTrainer(cfg.Config(run_id="abc", trainers=1, engines=1), tmp_path, stages)
    stages["actor"] = subprocess.Popen(["false"])
    with pytest.raises(RuntimeError, match="actor has ended"):
        trainer.step()
    stages["actor"].wait()


def test_an_actor_does_not_grow_by_what_it_reads():
    # The allocator's variables of the user's shell must not count.
    shell = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def growth(env):
        command = [sys.executable, "-c", READS]
        done = subprocess.run(command, capture_output=True, text=True, env=shell | env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    # By default the process grows by some 500 pages, and with NO_GAPS by none.
    assert growth({}) > 256
    assert growth(NO_GAPS) < 64


@pytest.mark.slow
def test_the_quick_measurement_runs(tmp_path, base_model):
    pace.main(["--quick", "--out", str(tmp_path), "--port", "8645"])
    numbers = json.loads((tmp_path / "pace.json").read_text())
    assert numbers["steps"] > 0
    # Nothing is trained that the engines have not sampled.
    assert 0 < numbers["trained_tok_s"] < 1.3 * numbers["possible_tok_s"]
    assert set(numbers["processes"]) == {"FAKE engines", "actor", "preprocess"}

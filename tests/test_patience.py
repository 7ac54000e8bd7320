"""How long a stage waits for another one, and how engines' starts count. The clock is FAKE."""

import pytest

import config as cfg
from conftest import register
from plumbing import patience, reader
from plumbing.patience import Patience, longest_wait
from plumbing.queues import Queue, publish_json


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """(Patience of 100 s, function that lets so many seconds pass and checks every 10 s).

    An engine may take 1000 s to start.
    """
    now = [5000.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    config = cfg.Config(stall_timeout=100, start_timeout=1000)
    clock = Patience(config, tmp_path)

    def wait(seconds):
        for _ in range(seconds // 10):
            now[0] += 10
            clock.check("nothing came")

    return clock, wait


def test_every_arrival_starts_the_clock_anew(tmp_path, clock):
    clock, wait = clock
    register(tmp_path, "engine0", "http://127.0.0.1:1")
    for _ in range(5):
        wait(100)
        clock.start()
    with pytest.raises(TimeoutError, match="^nothing came for 100 s: the files in .*logs say"):
        wait(110)


def test_start_of_engines_does_not_count_as_waiting(tmp_path, clock):
    clock, wait = clock
    # at first there is not even their directory
    wait(950)
    register(tmp_path, "engine0", "http://127.0.0.1:1")
    wait(60)
    # it has died, and is started again
    (tmp_path / "engines" / "engine0.json").unlink()
    wait(950)
    register(tmp_path, "engine0", "http://127.0.0.1:1")
    wait(30)
    with pytest.raises(TimeoutError, match="^nothing came for 100 s: the files in .*logs say"):
        wait(20)


def test_wait_for_engines_that_never_answer_ends(tmp_path, clock):
    clock, wait = clock
    assert longest_wait(clock.config) == 3100
    wait(3100)
    with pytest.raises(TimeoutError, match="^nothing came for 3100 s, in most of which no engine"):
        wait(10)


class OneRank:
    """FAKE: the only rank"""

    rank = 0

    def check_stop(self, condition=False):
        return condition

    def fail(self, error):
        raise error


def test_a_long_last_evaluation_is_no_stall(tmp_path, monkeypatch):
    """The time begins anew whenever one of its attempts has ended."""
    queues = tmp_path / "queues"
    evals = Queue(queues / "evals")

    class ImpatientAfterThree:
        """FAKE: the time is over at the third check; an attempt ends after every second one."""

        checks = 0
        ended = 0
        goes_on = True

        def __init__(self, config, run_dir):
            pass

        def start(self):
            type(self).checks = 0

        def check(self, complaint):
            kind = type(self)
            kind.checks += 1
            if kind.checks == 3:
                raise TimeoutError(complaint)
            if kind.checks == 2 and kind.goes_on:
                kind.ended += 1
                publish_json(queues / "pace.json", eval_attempts=kind.ended)
                if kind.ended == 10:
                    evals.put(dict(version=7))

    monkeypatch.setattr(reader, "Patience", ImpatientAfterThree)
    own = reader.Reader(cfg.Config(), tmp_path, OneRank())
    records = list(own.evaluations_until(7))
    assert [record["version"] for record in records] == [7] and ImpatientAfterThree.ended == 10
    ImpatientAfterThree.goes_on = False
    with pytest.raises(TimeoutError, match="the actor put no evaluation into"):
        list(own.evaluations_until(8))

"""What people look at: report.html in a real browser, comparisons, `run.sh status`, the line that stays."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from made_up_run import BROWSERS, browser, made_up_run
from tools import comparison, page, report
from tools.find import run_of
from tools.panels import Curve, Panel, main_panels, more_panels
from tools.status import Status

# an open page takes its time on a busy machine, ms
PATIENCE = 60_000


def needs_browser():
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("there is no Chromium: apt install chromium")


def tool(name, *arguments, **environment):
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


# ---- the page


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """(page in a real browser, its rollouts as samples.jsonl has them, what the console said)."""
    needs_browser()
    run_dir = made_up_run(
        tmp_path_factory.mktemp("report"), "shown", rollouts=300, samples_logged=8
    )
    lines = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    # what must stay text, in the newest rollout that was trained: it is the first of the list
    newest = lines[295]
    newest["spans"][1][1][0] = "</script><b id=injected>&amp;"
    newest["prompt"] = "<img id=injected src=x onerror=alert(1)>"
    newest["answer"] = "<i id=injected>"
    # its tokens have known versions and ratios
    number = newest["number"]
    trained = [json.loads(x) for x in (run_dir / "trained_0.jsonl").read_text().splitlines()]
    for line in trained:
        if line["number"] == number:
            line["log_ratios"][0] = 0.5
            line["log_ratios"][1] = None
    (run_dir / "trained_0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in trained))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    continued = dict(step=20, changed=dict(max_lag=[1, 2]))
    (run_dir / "continued.jsonl").write_text(json.dumps(continued) + "\n")
    # the last line of a run in progress may be torn
    (run_dir / "samples.jsonl").write_text(text + '{"number": 9')
    done = tool("report", run_dir, "--quiet")
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    said = []
    with browser() as chromium:
        # offline: whatever it would fetch is an error
        context = chromium.new_context(viewport={"width": 1300, "height": 900}, offline=True)
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url))
        tab.goto((run_dir / "report.html").resolve().as_uri())
        tab.wait_for_selector(".panel .main-svg")
        yield tab, lines, said


def shown_rows(tab):
    return tab.locator("#list tbody tr")


def count(tab):
    """Of how many rollouts the list speaks."""
    return int(tab.inner_text("#count").split()[0])


def test_the_page_opens_without_a_word_on_the_console(opened):
    tab, lines, said = opened
    # all curves, also those further down
    for i in range(tab.locator(".panel").count()):
        tab.locator(".panel").nth(i).scroll_into_view_if_needed()
    tab.wait_for_function(
        "[...document.querySelectorAll('.panel')].every(p => p.querySelector('.main-svg'))"
    )
    assert tab.locator(".panel").count() == 18
    assert [x for x in said if not x.startswith(("file:", "data:", "blob:"))] == []
    assert count(tab) == len(lines)
    words = tab.inner_text("body")
    assert "kl_coef" not in words
    tab.click("summary")
    assert "kl_coef" in tab.inner_text("details")
    assert "max_lag (1 -> 2)" in words
    assert "held-out toy" in words and "no group of 10 steps had two different rewards" in words
    assert "engine0 died with exit code 137" in words and "failed" in words


def test_text_stays_text_and_numbers_are_those_of_the_files(opened):
    tab, lines, said = opened
    newest = lines[295]
    shown_rows(tab).first.click()
    row = shown_rows(tab).first.locator("td").all_inner_texts()
    n = len(newest["behavior_logprobs"])
    # of step 60, made by version 59; its first tokens were sampled by version 58
    assert row[:5] == ["60", "toy", f"{newest['reward']:.2f}", str(n), "1"]
    assert row[6] == newest["prompt"]
    assert newest["prompt"].startswith("<img") and tab.locator("#injected").count() == 0
    assert "answer: <i id=injected>" in tab.inner_text("#answer")
    first = tab.locator("#tokens span:not(.given)").nth(0)
    assert first.inner_text() == "</script><b id=injected>&amp;"
    assert first.get_attribute("title").startswith("version 58, ")
    assert first.get_attribute("title").endswith("ratio 1.649")
    second = tab.locator("#tokens span:not(.given)").nth(1).get_attribute("title")
    assert second.endswith("ratio not finite")
    assert tab.locator("#tokens span:not(.given)").last.get_attribute("title")[:11] == "version 59,"
    assert not [x for x in said if "alert" in x]


def test_a_curve_can_be_zoomed_and_says_its_values(opened):
    tab, _, _ = opened
    panel = tab.locator(".panel").first
    panel.scroll_into_view_if_needed()
    span = "(() => { const r = document.querySelector('.panel').layout.xaxis.range; return r[1] - r[0]; })()"
    before = tab.evaluate(span)
    box = panel.locator(".nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 0.3 * box["width"], middle)
    tab.wait_for_selector(".hovertext, .hoverlayer .legend")
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    tab.mouse.up()
    tab.wait_for_function(f"{span} < {0.5 * before}")


def test_filters_and_order(opened):
    tab, lines, _ = opened
    tab.select_option("#outcome", "correct")
    assert count(tab) == sum(line["outcome"] == "correct" for line in lines)
    tab.select_option("#outcome", "")
    tab.fill("#length-low", "50")
    lengths = [len(line["behavior_logprobs"]) for line in lines]
    assert count(tab) == sum(n >= 50 for n in lengths) > 0
    tab.fill("#length-low", "")
    tab.fill("#step-low", "5")
    tab.fill("#step-high", "6")
    # what was not trained has no step
    trained = [i for i in range(len(lines)) if i % 10 != 9]
    assert count(tab) == sum(1 + i * 60 // 300 in (5, 6) for i in trained)
    for name in ("#step-low", "#step-high"):
        tab.fill(name, "")
    text = lines[17]["prompt"]
    tab.fill("#text", text)
    assert count(tab) == 1 and text in shown_rows(tab).first.inner_text()
    tab.fill("#text", "nowhere in it")
    assert count(tab) == 0 and shown_rows(tab).count() == 0 and not tab.is_visible("#tokens")
    tab.fill("#text", "")
    tab.select_option("#sort", "length")
    first = shown_rows(tab).first.locator("td").nth(3)
    assert int(first.inner_text()) == max(lengths)
    tab.uncheck("#descending")
    assert int(first.inner_text()) == min(lengths)
    tab.check("#several")
    assert count(tab) == sum(len({v for v, _ in line["spans"]}) > 2 for line in lines)
    tab.uncheck("#several")
    assert shown_rows(tab).count() == 40
    tab.click("#next")
    assert "page 2 of 8" in tab.inner_text("#count")


def test_a_rollout_and_the_colours_of_its_tokens(opened):
    tab, lines, _ = opened
    wrong = [line for line in lines[20:] if line["outcome"] == "wrong"]
    line = next(
        line for line in wrong if line["number"] % 10 != 9 and len(line["behavior_logprobs"]) > 8
    )
    tab.fill("#text", line["prompt"])
    shown_rows(tab).first.click()
    spans = tab.locator("#tokens span")
    assert tab.inner_text("#tokens") == line["prompt"] + line["completion"]
    n = len(line["behavior_logprobs"])
    assert spans.count() == len(line["prompt"]) + n
    title = spans.nth(len(line["prompt"])).get_attribute("title")
    assert title.startswith(
        f"version {line['spans'][1][0]}, logprob {line['behavior_logprobs'][0]:.3f}"[:-1]
    )
    assert "ratio " in title and "advantage -0.500" in tab.inner_text("#about")
    background = (
        "[...document.querySelectorAll('#tokens span')].map(s => s.style.background).filter(x => x)"
    )
    seen = {}
    for kind in ("version", "ratio", "advantage", "logprob"):
        tab.select_option("#colour", kind)
        seen[kind] = tab.evaluate(background)
        assert len(seen[kind]) == n
    assert len(set(seen["version"])) == 2
    assert len(set(seen["advantage"])) == 1
    assert len(set(seen["logprob"])) > 2 and len(set(seen["ratio"])) > 2
    # below the average of its group: blue
    red, _, blue = map(int, seen["advantage"][0].split("(")[1].split(",")[:3])
    assert blue > red
    tab.fill("#text", "")


def test_what_was_not_trained_says_so(opened):
    tab, lines, _ = opened
    tab.fill("#text", lines[9]["prompt"])
    shown_rows(tab).first.click()
    assert "not trained" in tab.inner_text("#about")
    assert "ratio" not in tab.locator("#tokens span").last.get_attribute("title")
    tab.fill("#text", "")


def test_a_page_holds_the_newest_and_says_how_many_are_older(tmp_path, monkeypatch):
    run_dir = made_up_run(tmp_path, "long", rollouts=50)
    monkeypatch.setattr(page, "MOST_TOKENS", 400)
    numbers = [
        json.loads(x)["number"] for x in (run_dir / "samples.jsonl").read_text().splitlines()
    ]
    found = [line["number"] for line in page.rollouts(run_dir)]
    assert 0 < len(found) < 50 and found == numbers[::-1][: len(found)]
    # of a large file the end alone is read
    monkeypatch.setattr(page, "MOST_TOKENS", 10**9)
    monkeypatch.setattr(page, "MOST_BYTES", 5000)
    found = [line["number"] for line in page.rollouts(run_dir)]
    assert 3 < len(found) < 50 and found == numbers[::-1][: len(found)]


def test_lines_of_older_runs_are_no_obstacle(tmp_path):
    run_dir = made_up_run(tmp_path, "old", rollouts=5)
    lines = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    del lines[0]["number"]
    lines[0]["spans"] = [[-1, "abc="], [3, "abc"]]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert len(page.rollouts(run_dir)) == 4
    done = tool("show", run_dir)
    assert done.returncode == 0 and "abc=abc" in done.stdout


def test_panels_without_evaluations_or_measurements(tmp_path):
    run_dir = made_up_run(tmp_path, "short", steps=2, rollouts=0)
    steps, _ = report.read(run_dir)
    for line in steps:
        line["mismatch"] = None
        line["sync_s"] = 0.0
    found = main_panels(steps, [], {}) + more_panels(steps)
    for panel in found:
        json.dumps(page.figure(panel), allow_nan=False)
    report.draw(tmp_path / "some.png", "no evaluations", found)


def test_numbers_are_json_and_not_too_many():
    values = np.array([1.0, math.nan, math.inf, 123456.789])
    assert page.numbers(values) == [1.0, None, None, 123460.0]
    x = np.arange(9 * page.MOST_POINTS) + 123456
    y = np.zeros(len(x))
    y[777] = 1e3
    [trace] = page.traces(Panel("t", curves=[Curve("spike", x, y)]))
    assert len(trace["x"]) <= page.MOST_POINTS and max(trace["y"]) == 1e3
    assert trace["x"][trace["y"].index(1e3)] == 123456 + 777
    panel = Panel("t", curves=[Curve("a", np.arange(2), np.ones(2), "area")] * 2, bottom=0)
    assert page.figure(panel)["layout"]["yaxis"]["range"] == [0, 2.1]


# ---- comparisons


def test_runs_are_compared_by_what_differs(tmp_path):
    dirs = []
    for lag, slope in ((1, 1.0), (8, 0.5)):
        for seed in (0, 1, 2):
            name = f"lag{lag}-{seed}"
            own = dict(seed=seed, slope=slope, rollouts=0, max_lag=lag)
            dirs.append(made_up_run(tmp_path, name, **own))
    done = tool("report", *dirs)
    assert done.returncode == 0, done.stderr
    assert "max_lag 1: " in done.stdout and "lag8-2" in done.stdout
    assert "one seed" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("held-out toy, last")]
    # 0.9 and 0.55 at the end, with a little noise
    assert len(rows) == 1 and "-0.3" in rows[0]
    # the difference of every seed
    assert all(-0.4 < float(word) < -0.3 for word in rows[0].split()[-3:])
    assert "held-out toy, mean of the first 26.9k samples" in done.stdout
    assert (tmp_path / "comparison.png").stat().st_size > 10000
    assert (tmp_path / "comparison.html").exists()


def test_seeds_alone_are_one_setting_and_have_a_band(tmp_path):
    runs = []
    for seed in (0, 1):
        run_dir = made_up_run(tmp_path, f"a-{seed}", seed=seed, rollouts=0)
        runs.append(comparison.Run(run_dir, *report.read(run_dir)))
    assert comparison.differing(runs) == {}
    by_setting = comparison.settings(runs)
    assert list(by_setting) == ["a"]
    for panel in comparison.panels(by_setting):
        assert len(panel.curves) == 1
        [curve] = panel.curves
        assert curve.label.startswith("a (2 seeds: ") and (curve.low <= curve.high).all()


def test_seeds_that_have_little_in_common_get_no_band():
    x = np.arange(10.0)
    apart = [(x, x), (x + 8, x)]
    assert [curve.low for curve in comparison.banded("a", apart, 0)] == [None, None]
    [curve] = comparison.banded("a", [(x, x), (x + 1, x)], 0)
    assert curve.x[0] == 1 and curve.x[-1] == 9 and curve.low is not None


def test_the_bootstrap_is_paired():
    # seeds differ by far more than the settings do
    ours = [0.1, 0.5, 0.9]
    mean, (low, high), _ = comparison.paired(ours, [0.2, 0.6, 1.01])
    assert 0.1 - 1e-9 <= low <= mean <= high < 0.12
    assert comparison.paired([0.1], [0.3]) == (pytest.approx(0.2), None, None)


def test_the_t_interval_holds_the_truth_in_95_of_100():
    """And the bootstrap of three seeds does not, which is why both are given."""
    rng = np.random.default_rng(0)
    holds = np.zeros(2)
    for _ in range(400):
        _, *intervals = comparison.paired(np.zeros(3), rng.normal(size=3))
        holds += [low <= 0 <= high for low, high in intervals]
    assert 0.7 < holds[0] / 400 < 0.82
    assert 0.92 < holds[1] / 400 < 0.98


def test_runs_that_were_stopped_are_compared_over_what_all_have(tmp_path):
    runs = []
    for name, steps, lag in (("long", 60, 1), ("short", 24, 8)):
        run_dir = made_up_run(tmp_path, name, steps=steps, rollouts=0, max_lag=lag)
        runs.append(comparison.Run(run_dir, *report.read(run_dir)))
    rows = {row[0]: row for row in comparison.differences(comparison.settings(runs))}
    assert rows["steps"][2:5] == ["24.000", "60.000", "-36"]
    # 24 steps of 448 samples, evaluated at 0, 4, ... 24
    assert "held-out toy, mean of the first 10.8k samples" in rows
    # both take 2 s a step
    assert rows["samples/s of the steps"][4] == "+0"


def test_each_column_has_its_own_heading(tmp_path):
    by_setting = {}
    for lag, loss in ((1, 0.0), (8, 0.1)):
        own = by_setting.setdefault(f"lag {lag}", [])
        for seed in (0, 1, 2):
            # of each seed another difference
            knobs = dict(seed=seed, slope=1 - loss * (1 + seed), rollouts=0, max_lag=lag)
            run_dir = made_up_run(tmp_path, f"{lag}-{seed}", **knobs)
            own.append(comparison.Run(run_dir, *report.read(run_dir)))
    [row] = [row for row in comparison.differences(by_setting) if row[0] == "reward, last tenth"]
    cells = dict(zip(comparison.HEADER, row, strict=True))
    ours, theirs = (
        [comparison.measures(run, {})["reward, last tenth"] for run in own]
        for own in by_setting.values()
    )
    _, bootstrap, t = comparison.paired(ours, theirs)
    assert cells["95%, bootstrap"] == comparison.span(bootstrap)
    assert cells["95%, t"] == comparison.span(t) != cells["95%, bootstrap"]
    each = [float(word) for word in cells["of each seed"].split()]
    assert each == pytest.approx(np.subtract(theirs, ours), rel=0.01)


def test_the_same_setting_and_seed_twice_is_refused(tmp_path):
    dirs = [made_up_run(tmp_path, name, rollouts=0) for name in ("x", "x.1")]
    done = tool("report", *dirs)
    assert done.returncode == 1 and "are the same setting and seed" in done.stderr


def test_means_are_over_what_all_runs_have():
    x = np.array([0.0, 10.0, 20.0])
    y = np.array([0.0, 1.0, 1.0])
    assert comparison.mean_until(x, y, 20.0) == pytest.approx(0.75)
    assert comparison.mean_until(x, y, 10.0) == pytest.approx(0.5)
    assert comparison.mean_until(x, y, 5.0) == pytest.approx(0.25)


def test_which_run_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.find.OUT", tmp_path)
    with pytest.raises(SystemExit, match="no run in"):
        run_of()
    old = made_up_run(tmp_path, "old", rollouts=0)
    new = made_up_run(tmp_path, "new", rollouts=0)
    os.utime(old / "config.json", (1, 1))
    # an evaluation is no run
    evaluation = made_up_run(tmp_path, "eval-x", rollouts=0)
    values = json.loads((evaluation / "config.json").read_text())
    values["config"]["trainers"] = 0
    (evaluation / "config.json").write_text(json.dumps(values))
    assert run_of() == new and "the newest run" in capsys.readouterr().err
    assert run_of("old") == old and run_of(str(old)) == old
    with pytest.raises(SystemExit, match="nowhere: there is no config.json in nowhere"):
        run_of("nowhere")


def test_the_last_words_of_a_run(tmp_path):
    run_dir = made_up_run(tmp_path, "s", rollouts=0, steps=6)
    done = tool("report", run_dir)
    # means of three steps each, no advice from so few, alarms
    assert "(mean of the first, the last 3 steps)" in done.stdout
    assert "advice         none" in done.stdout
    assert "ALARM          version 12: no group of 10 steps" in done.stdout
    lines = [{"eval": {"toy": 0.5}, "problems": 256, "answers": 256, "version": v} for v in (0, 9)]
    assert list(report.score_lines(lines)) == [
        "held-out toy   0.500 +-0.061 (version 0) -> 0.500 +-0.061 (version 9), 256 problems\n"
    ]
    several = [line | {"eval": {"a": 0.5, "b": 0.5}} for line in lines]
    assert all(
        "+-" not in x and "256 problems in all sets" in x for x in report.score_lines(several)
    )


@pytest.mark.parametrize("name", ["report", "show", "status"])
def test_a_wrong_run_is_one_line(name):
    done = tool(name, "out/no-such-run")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "no-such-run" in done.stderr


# ---- status


def test_status_of_a_run_by_its_files(tmp_path):
    run_dir = made_up_run(tmp_path, "s", rollouts=0, steps=60)
    done = tool("status", run_dir)
    assert done.returncode == 0, done.stderr
    assert "stopped; there is no checkpoint yet, the same command starts anew" in done.stdout
    (run_dir / "checkpoints" / "step_000050").mkdir(parents=True)
    assert "stopped; the same command continues" in tool("status", run_dir).stdout
    assert (
        "step       60 of 270" in done.stdout and "alarms     version 12: no group" in done.stdout
    )
    assert "toy 0.2" in done.stdout and "(version 60)" in done.stdout
    # somebody has the run's lock
    with open(tmp_path / ".s.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"{run_dir}: running" in tool("status", run_dir).stdout


def test_the_line_says_what_a_run_waits_for(tmp_path):
    run_dir = made_up_run(tmp_path, "s", rollouts=0, steps=60)
    whole = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").unlink()
    shutil.rmtree(run_dir / "queues")
    status = Status(run_dir)
    status.look()
    assert status.line() == "models are being loaded"
    engines = run_dir / "engines"
    engines.mkdir()
    (engines / "engine0.json").write_text('{"url": "http://127.0.0.1:1", "started": "x"}')
    assert status.line().startswith("engine0 loading, ")
    (run_dir / "queues").mkdir()
    said = {"engines": ["http://127.0.0.1:1"], "served": 0, "version": 0}
    (run_dir / "queues" / "version.json").write_text(json.dumps(said))
    assert status.line() == "the first rollouts are sampled"
    # a run that continues has steps before its engines have weights
    (run_dir / "queues" / "version.json").rename(run_dir / "queues" / "v")
    (run_dir / "metrics.jsonl").write_text(whole)
    continued = Status(run_dir)
    continued.look()
    assert continued.line().startswith("engine0 loading, ")
    (run_dir / "queues" / "v").rename(run_dir / "queues" / "version.json")
    # a torn line is read when it is whole
    (run_dir / "metrics.jsonl").write_text(whole[:100])
    status.look()
    assert not status.steps
    (run_dir / "metrics.jsonl").write_text(whole)
    status.look()
    line = status.line()
    assert line.startswith("step 60/270, eta 7m00s | reward 0.") and "1 alarms" in line
    assert "trainer waits 30%, engine places 10% empty" in line and "held-out toy 0." in line


def test_what_a_run_says_passes_above_the_line_that_stays(tmp_path):
    run_dir = made_up_run(tmp_path, "s", rollouts=0)
    command = [sys.executable, str(ROOT / "tools" / "status.py"), "--screen", str(run_dir)]
    # a stage may print what is no text, and markup that is none
    words = b"[train] step 1/270 | reward\n\xff[/bold] not markup\n" + b"x" * 500 + b"\n"
    done = subprocess.run(command, input=words, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert "[train] step 1/270 | reward" in lines and "x" * 500 in lines
    assert any("[/bold] not markup" in line for line in lines)


# ---- seen from run.sh: tests/test_launch.py


def test_show_ends_with_its_pipe(tmp_path):
    run_dir = made_up_run(tmp_path, "s", rollouts=400)
    show = f"{sys.executable} {ROOT}/tools/show.py {run_dir} --n 400 | head -n 1"
    done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("problem ") and done.stderr == ""
    assert Path(run_dir).exists()

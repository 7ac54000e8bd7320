"""report.html in a real browser, comparisons of runs, and the commands report, show and status.

The commands are real processes. The runs that they read are made up (tests/made_up_run.py).
"""

import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import config as cfg
from conftest import ROOT, register
from made_up_run import made_up_run, read_lines, write_lines
from plumbing.alarms import WINDOW, Alarms, alarms
from plumbing.problems import load_problems
from plumbing.queues import publish_json
from tools import common, report, report_comparison, report_panels
from tools.common import find_run, read_metrics
from tools.report_panels import Panel
from tools.status import Status

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The browser makes no requests of its own. As root it has no sandbox.
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync"
).split()
# Milliseconds: on a busy machine a page opens slowly.
PATIENCE = 60_000


def tool(name, *arguments):
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def assert_one_line(done, message):
    """Assert that a tool failed with one line that has this message."""
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


def compared(folder, **settings):
    """Make up runs of {name: knobs}; return the report_comparison.Run of each."""
    run_dirs = [made_up_run(folder, name, **knobs) for name, knobs in settings.items()]
    return [
        report_comparison.Run(run_dir, *read_metrics(run_dir, "step", "eval"))
        for run_dir in run_dirs
    ]


# ---- the page


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Yield (page in a real browser, lines of samples.jsonl, console messages and requests)."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium: apt install chromium")
    from playwright.sync_api import sync_playwright

    run_dir = made_up_run(tmp_path_factory.mktemp("report"), "shown", rollouts=300)
    lines = read_lines(run_dir / "samples.jsonl")
    # This must stay text. The newest rollout is the first of the list.
    newest = lines[-1]
    newest["sample_id"] = 0
    newest["spans"][1][1][0] = "</script><b id=injected>&amp;"
    newest["prompt"] = "<img id=injected src=x onerror=alert(1)>"
    newest["log_ratios"][:2] = [0.5, None]
    write_lines(run_dir / "continued.jsonl", [dict(step=20, changed=dict(max_lag=[1, 2]))])
    write_lines(run_dir / "samples.jsonl", lines)
    with open(run_dir / "samples.jsonl", "a") as file:
        # The last line of a run in progress may be torn.
        file.write('{"sample_id": 9')
    done = tool("report", run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    messages = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        # The browser is offline: whatever it would fetch is an error.
        context = chromium.new_context(viewport={"width": 1300, "height": 900}, offline=True)
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: messages.append(request.url))
        tab.goto((run_dir / "report.html").resolve().as_uri())
        # Curves are drawn when they are seen.
        tab.locator(".panel").first.scroll_into_view_if_needed()
        tab.wait_for_selector(".panel .main-svg")
        yield tab, lines, messages
        chromium.close()


def shown_rows(tab):
    return tab.locator("#list tbody tr")


def count(tab):
    """The number of rollouts that the page says its list has."""
    return int(tab.inner_text("#count").split()[0])


def test_page_opens_without_console_messages_or_requests(opened):
    tab, lines, messages = opened
    # Curves further down are drawn when the page is scrolled to them.
    for panel in tab.locator(".panel").all():
        panel.scroll_into_view_if_needed()
    condition = "[...document.querySelectorAll('.panel')].every(p => p.querySelector('.main-svg'))"
    tab.wait_for_function(condition)
    assert tab.locator(".panel").count() == 23
    assert [x for x in messages if not x.startswith(("file:", "data:", "blob:"))] == []
    assert count(tab) == len(lines)
    text = tab.inner_text("body")
    assert "kl_coef" not in text
    tab.click("summary")
    assert "kl_coef" in tab.inner_text("details")
    assert "max_lag (1 -> 2)" in text
    assert "held-out toy" in text
    assert "signal 0 for 10 steps: no group has two different rewards" in text
    assert "failed\t16\t7\t7" in text


def test_page_escapes_text_and_shows_the_numbers_of_the_files(opened):
    tab, lines, _ = opened
    newest = lines[-1]
    shown_rows(tab).first.click()
    row = shown_rows(tab).first.locator("td").all_inner_texts()
    n = str(len(newest["behavior_logprobs"]))
    # Step 60 starts from version 59. Version 58 sampled the first tokens.
    assert row[:5] == ["60", "toy", f"{newest['reward']:.2f}", n, "1"]
    assert row[6] == newest["prompt"]
    assert newest["prompt"].startswith("<img") and tab.locator("#injected").count() == 0
    # The page has the right answer from the task's problems.
    problems = load_problems(cfg.Config(task="toy"), "train")
    assert tab.inner_text("#answer") == f"answer: {problems['toy'][299]['answer']}"
    sampled = tab.locator("#tokens span:not(.given)")
    assert sampled.first.inner_text() == "</script><b id=injected>&amp;"
    title = sampled.first.get_attribute("title")
    assert title.startswith(f"version 58, logprob {newest['behavior_logprobs'][0]:.3f}"[:-1])
    assert title.endswith("ratio 1.649")
    assert (
        sampled.nth(1)
        .get_attribute("title")
        .endswith("ratio not computed, as it is not in the loss")
    )
    assert sampled.last.get_attribute("title").startswith("version 59,")


def test_page_filters_and_sorts_rollouts(opened):
    tab, lines, _ = opened
    tab.select_option("#outcome", "correct")
    assert count(tab) == sum(line["outcome"] == "correct" for line in lines)
    tab.select_option("#outcome", "")
    lengths = [len(line["behavior_logprobs"]) for line in lines]
    tab.fill("#length-low", "50")
    assert count(tab) == sum(n >= 50 for n in lengths) > 0
    tab.fill("#length-low", "")
    tab.fill("#step-low", "5")
    tab.fill("#step-high", "6")
    assert count(tab) == sum(line["step"] in (5, 6) for line in lines)
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
    assert shown_rows(tab).count() == 40
    tab.click("#next")
    assert "page 2 of 8" in tab.inner_text("#count")


def test_page_colours_the_tokens_of_a_rollout(opened):
    tab, lines, _ = opened
    wrong = [x for x in lines[20:] if x["outcome"] == "wrong"]
    line = next(x for x in wrong if len(x["behavior_logprobs"]) > 8)
    tab.fill("#text", line["prompt"])
    shown_rows(tab).first.click()
    assert tab.inner_text("#tokens") == line["prompt"] + line["completion"]
    n = len(line["behavior_logprobs"])
    assert tab.locator("#tokens span").count() == len(line["prompt"]) + n
    assert "advantage -0.500" in tab.inner_text("#about")
    spans = "[...document.querySelectorAll('#tokens span')]"
    colours = {}
    for kind in ("version", "ratio", "advantage", "logprob"):
        tab.select_option("#colour", kind)
        colours[kind] = tab.evaluate(f"{spans}.map(s => s.style.background).filter(x => x)")
        assert len(colours[kind]) == n
    assert len(set(colours["version"])) == 2 and len(set(colours["advantage"])) == 1
    assert len(set(colours["logprob"])) > 2 and len(set(colours["ratio"])) > 2
    # A reward below the average of its group is blue.
    red, _, blue = map(int, colours["advantage"][0].split("(")[1].split(",")[:3])
    assert blue > red
    tab.fill("#text", "")


def test_page_holds_the_newest_rollouts(tmp_path, monkeypatch):
    run_dir = made_up_run(tmp_path, "long", rollouts=50)
    numbers = [line["sample_id"] for line in read_lines(run_dir / "samples.jsonl")]
    monkeypatch.setattr(common, "MOST_BYTES", 5000)
    newest_numbers = [line["sample_id"] for line in common.newest_rollouts(run_dir)]
    assert 3 < len(newest_numbers) < 50 and newest_numbers == numbers[-len(newest_numbers) :]


def test_panels_are_drawn_without_evaluations_or_measurements(tmp_path):
    run_dir = made_up_run(tmp_path, "short", steps=2)
    [steps] = read_metrics(run_dir, "step")
    steps = [line | {"mismatch": None} for line in steps]
    main_panels, further_panels = report_panels.run_panels(steps, [], [])
    for panel in main_panels + further_panels:
        json.dumps(report_panels.as_json(panel), allow_nan=False)
    report_panels.draw(tmp_path / "some.png", "no evaluations", main_panels + further_panels)


def test_curve_as_json_has_no_nan():
    panel = Panel("t", include=(0, 2.5))
    y = np.array([1.0, math.nan, math.inf, 123456.789])
    panel.add("a", np.arange(4) + 123456, y, low=y, high=y)
    panel_json = json.loads(json.dumps(report_panels.as_json(panel), allow_nan=False))
    [curve] = panel_json["curves"]
    assert curve["y"] == curve["low"] == curve["high"] == [1.0, None, None, 123456.8]
    assert curve["x"] == [123456, 123457, 123458, 123459] and panel_json["include"] == [0, 2.5]


# ---- comparisons


def test_runs_are_compared_by_what_differs(tmp_path):
    for seed in (0, 1, 2):
        made_up_run(tmp_path, f"lag1-{seed}", seed=seed, max_lag=1)
        made_up_run(tmp_path, f"lag8-{seed}", seed=seed, max_lag=8, slope=0.5)
    done = tool("report", *sorted(tmp_path.glob("lag*")))
    assert done.returncode == 0, done.stderr
    assert "max_lag 1: " in done.stdout and "lag8-2" in done.stdout
    assert "one seed" not in done.stdout
    [row] = [line for line in done.stdout.splitlines() if line.startswith("held-out toy, last")]
    # The scores end at 0.9 and 0.55, with a little noise. The row ends with each seed's difference.
    assert all(-0.4 < float(word) < -0.3 for word in row.split()[-3:])
    assert "held-out toy, mean of the first 26.9k samples" in done.stdout
    assert (tmp_path / "comparison.png").stat().st_size > 10000
    assert (tmp_path / "comparison.html").exists()
    twice = tool("report", tmp_path / "lag1-0", made_up_run(tmp_path, "again", max_lag=1))
    assert_one_line(twice, "are the same setting and seed")


def test_seeds_alone_are_one_setting_and_have_a_band(tmp_path):
    runs = compared(tmp_path, a=dict(seed=0), b=dict(seed=1))
    assert report_comparison.differing(runs) == {}
    by_setting = report_comparison.settings(runs)
    assert list(by_setting.values()) == [runs] and report_comparison.differences(by_setting) == []
    for panel in report_comparison.panels(by_setting):
        [curve] = panel.curves
        assert "(2 seeds: " in curve.label and (curve.low <= curve.high).all()


def test_seeds_that_have_little_in_common_get_no_band():
    x = np.arange(10.0)
    panel = Panel("a")
    report_comparison.add_curves(panel, "a", [(x, x), (x + 8, x)], 0)
    report_comparison.add_curves(panel, "b", [(x, x), (x + 1, x)], 0)
    *single_curves, curve = panel.curves
    assert [curve.low for curve in single_curves] == [None, None]
    assert curve.x[0] == 1 and curve.x[-1] == 9 and curve.low is not None


def test_the_interval_is_of_paired_seeds_and_holds_the_truth_in_95_of_100():
    # Seeds differ by far more than the settings do.
    mean, (low, high) = report_comparison.paired([0.1, 0.5, 0.9], [0.2, 0.6, 1.01])
    assert (mean, high - low) == (pytest.approx(0.31 / 3), pytest.approx(2 * 0.0143, abs=1e-4))
    assert report_comparison.paired([0.1], [0.3]) == (pytest.approx(0.2), None)
    rng = np.random.default_rng(0)
    intervals = [report_comparison.paired(np.zeros(3), rng.normal(size=3))[1] for _ in range(400)]
    assert 0.92 < np.mean([low <= 0 <= high for low, high in intervals]) < 0.98


def test_runs_of_different_lengths_are_compared_over_their_common_part(tmp_path):
    runs = compared(tmp_path, long=dict(steps=60, max_lag=1), short=dict(steps=24, max_lag=8))
    rows = {row[0]: row for row in report_comparison.differences(report_comparison.settings(runs))}
    assert rows["steps"][2:6] == ["24.000", "60.000", "-36", "one seed"]
    # The common part is 24 steps of 448 samples, evaluated at steps 0, 4, ..., 24.
    assert "held-out toy, mean of the first 10.8k samples" in rows
    # Both runs take 2 s a step.
    assert rows["samples/s of the steps"][4] == "+0"


# ---- what the commands print


def test_find_run_takes_the_newest_or_the_named_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.common.OUT", tmp_path)
    with pytest.raises(SystemExit, match="no run in"):
        find_run()
    old = made_up_run(tmp_path, "old")
    new = made_up_run(tmp_path, "new")
    os.utime(old / "config.json", (1, 1))
    # An evaluation is no run.
    evaluation = made_up_run(tmp_path, "eval-x")
    path = evaluation / "config.json"
    path.write_text(re.sub(r'"trainers": \d', '"trainers": 0', path.read_text()))
    assert find_run() == new and "the newest run" in capsys.readouterr().err
    assert find_run("old") == old and find_run(str(old)) == old


def test_report_prints_a_summary_with_alarms(tmp_path):
    run_dir = made_up_run(tmp_path, "s", steps=12)
    done = tool("report", run_dir)
    # The summary has means of five steps each and alarms, but no advice from so few steps.
    assert "(mean of the first, the last 5 steps)" in done.stdout
    assert "advice         none" in done.stdout
    assert "ALARM          version 10: signal 0 for 10 steps: no group has two" in done.stdout
    # Steps measure the mismatch, and sequences that trainer and engines both computed.
    assert "mismatch       3.0e-06 nats at most, 12 times measured; dropped 16" in done.stdout
    assert (run_dir / "report.png").stat().st_size > 10000
    lines = [{"eval": {"toy": 0.5}, "problems": 256, "answers": 256, "version": v} for v in (0, 9)]
    assert list(report.score_lines(lines)) == [
        "held-out toy   0.500 (0.439 to 0.561) (version 0) -> "
        "0.500 (0.439 to 0.561) (version 9), 256 problems\n"
    ]
    # Rewards that differ from the share of solved problems are shown for their own task alone.
    rewards = {"a": 0.7, "b": 0.5}
    several = [line | {"eval": {"a": 0.5, "b": 0.5}, "eval_reward": rewards} for line in lines]
    assert list(report.score_lines(several)) == [
        "held-out a     0.500 (version 0) -> 0.500 (version 9), 256 problems in all sets solved; "
        "mean reward 0.700 -> 0.700\n",
        "held-out b     0.500 (version 0) -> 0.500 (version 9), 256 problems in all sets\n",
    ]


@pytest.mark.parametrize("name", ["report", "show", "status"])
def test_unknown_run_is_refused_in_one_line(name):
    assert_one_line(tool(name, "out/no-such-run"), "no-such-run")


def test_show_prints_rollouts_and_ends_with_its_pipe(tmp_path):
    run_dir = made_up_run(tmp_path, "s", rollouts=400)
    newest = read_lines(run_dir / "samples.jsonl")[-1]
    done = tool("show", run_dir, "--n", 1)
    n = len(newest["spans"][1][1])
    text = f"{newest['prompt']}{newest['completion'][:n]}|v59>{newest['completion'][n:]}"
    assert f"versions 58 59: lag 0 to 1\n{text}\nanswer: " in done.stdout
    show = f"{sys.executable} {ROOT}/tools/show.py {run_dir} --n 400 | head -n 1"
    done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("step 1, problem 0 of toy | reward ") and done.stderr == ""


# ---- status


def test_alarm_is_raised_once_for_a_state_that_lasts():
    good = dict(ess=1.0, signal=0.5, cut_off=0.0)
    for bad_values, steps, message in [
        (dict(ess=0.29), 3, "ess 0.29 for 3 steps: lower --max_lag"),
        (dict(signal=0.0), 10, "signal 0 for 10 steps: no group has two different rewards"),
        (dict(cut_off=0.96), 10, "cut_off 0.96 for 10 steps: .*raise --max_new_tokens"),
    ]:
        bad = good | bad_values
        # One good step starts the count again.
        lines = [bad] * (steps - 1) + [good] + [bad] * (steps + 5)
        [(version, alarm)] = alarms([line | {"version": v} for v, line in enumerate(lines, 1)])
        assert version == 2 * steps and re.match(message, alarm)


GOOD = dict(ess=1.0, signal=0.5, cut_off=0.0, reward=0.2, success=0.2, entropy=1.0, length_mean=9.0)


@pytest.mark.parametrize(
    "fallen,message",
    [
        (dict(signal=0.1), "signal 0.1, the mean of 14 steps, was 0.5 in the first 14, and reward"),
        (dict(entropy=0.09), "entropy 0.09, .* stopped trying other answers: lower --lr"),
        (dict(length_mean=2.0), "length_mean 2, .* answers have become short"),
    ],
)
def test_a_metric_that_falls_while_rewards_do_not_rise_raises_an_alarm(fallen, message):
    """The first steps are good; then the metric falls, and all else stays or rises."""

    def raised(**changed):
        lines = [GOOD] * WINDOW + [GOOD | fallen | changed] * 2 * WINDOW
        return alarms([line | {"version": v} for v, line in enumerate(lines, 1)])

    [(version, text)] = raised()
    assert version == 2 * WINDOW and re.match(message, text)
    assert not raised(reward=0.23) and not raised(success=0.31) and not raised(success=0.95)


def test_a_run_with_signal_now_and_then_is_told_so():
    """As in a run on SmolLM2 that collapsed: no signal in 12 of its last 14 steps."""
    steps = [GOOD] * 10 + [GOOD | dict(signal=0.4)] * 4
    steps += ([GOOD | dict(signal=0.0)] * 6 + [GOOD | dict(signal=0.3)]) * 2
    texts = [text for _, text in alarms([x | {"version": v} for v, x in enumerate(steps, 1)])]
    assert len(texts) == 1 and "signal 0.0429, the mean of 14 steps, was 0.471" in texts[0]


def test_held_out_scores_surely_below_the_first_raise_an_alarm():
    def evaluated(*scores, problems=64, attempts=1):
        lines = []
        for version, score in enumerate(scores):
            line = {"eval": {"toy": score}, "problems": problems, "version": version}
            lines.append(line | {"answers": problems * attempts})
        return alarms([], lines)

    # The intervals of 0.5 and 0.4 with 64 problems overlap, also if each was tried four times.
    assert not evaluated(0.5, 0.4) and not evaluated(0.5, 0.4, attempts=4)
    [(version, text)] = evaluated(0.5, 0.55, 0.2, 0.2)
    assert version == 2
    assert text.startswith("held-out toy 0.200 (at most 0.314, 95%) is below the first score, 0.5")
    assert [version for version, _ in evaluated(0.5, 0.2, 0.5, 0.2)] == [1, 3]
    assert len(evaluated(0.5, 0.4, problems=4096)) == 1
    # no problem was asked
    assert alarms([], [{"eval": {}, "problems": 0, "version": 0}]) == []


def test_a_continued_run_does_not_raise_its_alarms_again():
    watch = Alarms()
    bad = GOOD | dict(signal=0.0)
    assert sum(len(watch.step(bad)) for _ in range(10)) == 1
    assert not any(watch.step(bad) for _ in range(10))


def test_metrics_by_lag_are_panels_and_a_table():
    one = dict(tokens=30, loss=0.5, kl=1e-3, log_ratio=0.01, ess=1.0, clip_frac=0.0)
    two = one | dict(tokens=10, kl=3e-3)
    tables = [{"0": one}, {"0": one, "16-31": two, "4-7": one}, {"0": one | dict(kl=2e-3)}]
    steps = [{"step": i, "by_lag": table} for i, table in enumerate(tables, 1)]
    panels = report_panels.by_lag_panels(steps)
    assert [curve.label for curve in panels[0].curves] == ["lag 0", "lag 4-7", "lag 16-31"]
    share = panels[0].curves[2].y
    assert share == pytest.approx([0, 10 / 70, 0])
    assert np.isnan(panels[1].curves[2].y).tolist() == [True, False, True]
    rows = report_panels.by_lag_rows(steps)
    assert rows[0][:4] == ["0", f"{90 / 130:.1%}", "1.00e-02", "1.33e-03"]
    assert rows[2][:4] == ["16-31", f"{10 / 130:.1%}", "1.00e-02", "3.00e-03"]
    # Tokens that all have the same lag need no curves; a run may have no such metric.
    assert not report_panels.by_lag_panels(steps[:1])
    assert [row[:2] for row in report_panels.by_lag_rows(steps[:1])] == [["0", "100.0%"]]
    assert not report_panels.by_lag_panels([{"step": 1}])
    assert not report_panels.by_lag_rows([{"step": 1}])


def test_status_is_read_from_the_files_of_a_run(tmp_path):
    run_dir = made_up_run(tmp_path, "s")
    done = tool("status", run_dir)
    assert done.returncode == 0, done.stderr
    assert "stopped; there is no checkpoint yet, the same command starts anew" in done.stdout
    (run_dir / "checkpoints" / "step_000050").mkdir(parents=True)
    assert "stopped; the same command continues" in tool("status", run_dir).stdout
    assert "step       60 of 270, " in done.stdout and "eta 0:07:00" in done.stdout
    assert "ess 0.990, wait_data_s 0.600, gen_idle 0.100\n" in done.stdout
    assert "alarms     version 10: signal 0 for 10 steps: no group" in done.stdout
    assert "toy 0.2" in done.stdout and "(version 60)" in done.stdout
    # The run's lock is held.
    with open(tmp_path / ".s.lock", "w") as lock:
        lock.write("process 1")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"{run_dir}: running" in tool("status", run_dir).stdout


def test_status_says_what_a_run_waits_for(tmp_path):
    run_dir = made_up_run(tmp_path, "s")
    lines = run_dir / "metrics.jsonl"
    part = lines.read_text()[:100]
    lines.unlink()
    version = run_dir / "queues" / "version.json"
    version.unlink()
    assert Status(run_dir).starting() == "models are being loaded, 0 of 1 answer"
    register(run_dir, "engine0", "http://127.0.0.1:1")
    assert Status(run_dir).starting() == "models are being loaded, 1 of 1 answer"
    publish_json(version, engines=["http://127.0.0.1:1"], served=0, version=0)
    assert Status(run_dir).starting() == "the first rollouts are sampled"
    # The first line is not complete yet.
    lines.write_text(part)
    assert not Status(run_dir).lines["step"]

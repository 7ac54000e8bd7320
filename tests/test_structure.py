"""The sources: formatted, not complex, imports only downwards, links to files that exist."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

FOLDERS = ("", "plumbing", "tasks", "tools", "bench", "tests", "tests/edits")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
# from the ground; a file may import what is on its own floor or below, and no circles
FLOORS = [
    {"config", "plumbing"},
    {"tasks", "weights"},
    {"actor", "preprocess", "train"},
    {"tools"},
    {"bench", "tests"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


@pytest.mark.parametrize("words", ["format --check", "check"])
def test_ruff_finds_nothing(words):
    command = [sys.executable, "-m", "ruff", *words.split(), "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imported(path):
    """[part, ...] of the dotted names of all that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ([*node.module.split("."), alias.name] for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_import_only_from_their_floor_or_below(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name, *_ in imported(path):
        # what is not ours lies under the ground
        assert FLOOR.get(name, -1) <= FLOOR[room], f"{path.name} imports {name}, a floor above"
        if room in ("actor", "preprocess", "train", "tasks"):
            # stages do not import each other
            assert name not in FLOORS[2], f"{path.name} imports {name}"


WALL_CLOCK = r"time\.time\(|from time import time|datetime\.now|utcnow|date \+%s|\$SECONDS|EPOCH"


def test_nothing_is_measured_on_the_wall_clock():
    """It may be set at any time, and is another one on every host."""
    for path in [*FILES, *ROOT.glob("*.sh"), *ROOT.glob("*/*.sh")]:
        found = [x for x in path.read_text().splitlines() if re.search(WALL_CLOCK, x)]
        # tools/status.py says how old files are, and nothing is decided from that
        ages = path == ROOT / "tools" / "status.py"
        assert not found or ages or path == Path(__file__), (path, found)


PAGES = [ROOT / "README.md", ROOT / "bench/results/RESULTS.md", *sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("name", [str(page.relative_to(ROOT)) for page in PAGES])
def test_linked_files_exist(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_plumbing_has_no_circular_imports():
    graph = {}
    for path in (ROOT / "plumbing").glob("*.py"):
        graph[path.stem] = {parts[1] for parts in imported(path) if parts[0] == "plumbing"}
    # or it raises CycleError
    graphlib.TopologicalSorter(graph).prepare()

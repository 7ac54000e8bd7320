"""The house: formatted, not complex, and imports that go down only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

FILES = sorted(p for p in ROOT.glob("*.py")) + sorted(
    p
    for folder in ("plumbing", "tasks", "tools", "bench", "tests", "tests/edits")
    for p in (ROOT / folder).glob("*.py")
)
# from the ground; a file may import what is on its own floor or below, and no circles
FLOORS = [
    {"config", "plumbing"},
    {"tasks", "weights"},
    {"actor", "preprocess", "train"},
    {"tools"},
    {"bench", "tests"},
]


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]])
def test_ruff_has_nothing_to_say(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *map(str, FILES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def floor_of(name):
    for number, names in enumerate(FLOORS):
        if name in names:
            return number


def imported(path):
    """First parts of the names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    own = floor_of(room)
    for name in imported(path):
        floor = floor_of(name)
        assert floor is None or floor <= own, f"{path.name} imports {name}, a floor above"
        if room in ("actor", "train", "tasks"):
            # stages do not import each other; only the reference model of preprocess needs train's logprobs
            assert name not in FLOORS[2], f"{path.name} imports {name}"


WALL_CLOCK = r"time\.time\(|from time import time|datetime\.now|utcnow|date \+%s|\$SECONDS|EPOCH"


def test_nothing_is_measured_on_the_wall_clock():
    """It may be set at any time, and is another one on every host."""
    for path in [*FILES, *ROOT.glob("*.sh"), *ROOT.glob("*/*.sh")]:
        found = [x for x in path.read_text().splitlines() if re.search(WALL_CLOCK, x)]
        # tools/status.py says how old files are, and nothing is decided from that
        ages = path == ROOT / "tools" / "status.py"
        assert not found or ages or path == Path(__file__), (path, found)


@pytest.mark.parametrize("name", ["README.md", "bench/results/RESULTS.md"])
def test_what_is_linked_to_is_there(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_plumbing_has_no_circles():
    graph = {}
    for path in (ROOT / "plumbing").glob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "plumbing":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plumbing."):
                found.add(node.module.partition(".")[2])
        graph[path.stem] = found
    done = set()
    while graph:
        free = [name for name, needs in graph.items() if needs <= done]
        assert free, f"circles among {sorted(graph)}"
        for name in free:
            del graph[name]
            done.add(name)

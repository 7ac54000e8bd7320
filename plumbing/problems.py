"""The problems of a run's tasks, checked before anything starts, and their texts as token ids: raw, or through
the model's chat template.
"""

import functools
import inspect
import secrets

from config import Config, ConfigError, load_task, require, task_weights


def load_problems(config: Config, split: str) -> dict[str, list[dict]]:
    """Problems of every task of the run, by task; split: "train" or "test".

    Raises ConfigError naming the task and the problem, or file and line.
    """
    found = {}
    # scores are told by the set a problem comes from: no two tasks may use one name for theirs
    owner = {}
    for task in task_weights(config.task):
        found[task] = _problems_of(config, task, split)
        require(found[task], f"task {task} has no {split} problems")
        for number, problem in enumerate(found[task], 1):
            prompt = problem.get("prompt") if isinstance(problem, dict) else None
            words = f'must be a dict with a text under "prompt", is {str(problem)[:100]}'
            where = f"task {task}, {split} problem {number}"
            require(isinstance(prompt, str) and prompt, f"{where}: {words}")
            source = problem.get("source", task)
            words = f"task {owner.setdefault(source, task)}, too, has a set called {source}"
            require(owner[source] == task, f"{where}: {words}")
    return found


def in_both(trained: list[dict], held_out: list[dict]) -> int | None:
    """How many held-out problems have a prompt that is trained on; None of a task with few different prompts."""
    prompts = {problem["prompt"] for problem in trained}
    both = sum(problem["prompt"] in prompts for problem in held_out)
    return both if len(prompts) >= len(trained) / 2 else None


def _problems_of(config, task, split) -> list:
    """What the task itself gives; only tasks that read data files are told their names."""
    module = load_task(task)
    arguments = [split, config.seed]
    if len(inspect.signature(module.problems).parameters) > 2:
        arguments.append({"train": config.train_data, "test": config.eval_data}[split])
    try:
        return list(module.problems(*arguments))
    except ValueError as e:
        raise ConfigError(f"task {task}: {e}") from None


class Prompter:
    """The model's tokenizer, its stop tokens and, with --chat True, its chat template."""

    def __init__(self, config):
        self.config = config
        # only here: the launcher needs no torch
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        require(
            self.tokenizer.chat_template or not config.chat,
            f"--chat True: the tokenizer of {config.model} has no chat template",
        )
        model = AutoConfig.from_pretrained(config.model)
        # how many token ids the model has; the tokenizer may know fewer
        self.vocabulary = model.get_text_config().vocab_size
        # chat models often have several stop tokens
        try:
            ends = GenerationConfig.from_pretrained(config.model).eos_token_id
        # a model need not have a generation config; vLLM, too, then makes it of the model's
        except OSError:
            ends = GenerationConfig.from_model_config(model).eos_token_id
        if not isinstance(ends, list):
            ends = [ends]
        self.stop = {*ends, self.tokenizer.eos_token_id} - {None}
        # what chat templates are told
        self.thinking = {}
        if config.thinking != "auto":
            self.thinking = {"enable_thinking": config.thinking == "on"}
        # all attempts at a problem begin alike
        self.start = functools.lru_cache(1000)(self.start)

    def render(self, messages):
        """Messages as text, by the chat template, up to where the assistant speaks."""
        how = dict(tokenize=False, add_generation_prompt=True)
        return self.tokenizer.apply_chat_template(messages, **how, **self.thinking)

    def start(self, prompt):
        """Token ids of a problem's prompt."""
        if not self.config.chat:
            return self.tokenizer(self.config.system_prompt + prompt)["input_ids"]
        messages = [{"role": "user", "content": prompt}]
        if self.config.system_prompt:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return self.tokenizer(self.render(messages), add_special_tokens=False)["input_ids"]

    def more(self, text):
        """Token ids of the environment's answer to a turn, to be appended to what the engine has
        sampled, its stop token included; with what the template puts between two turns.
        """
        if self.config.chat:
            turn = secrets.token_hex(8)
            said = [("user", "x"), ("assistant", turn), ("user", text)]
            messages = [{"role": role, "content": content} for role, content in said]
            text = self.render(messages).partition(turn)[2]
            # the engine has sampled the end of the turn already
            for end in self.tokenizer.convert_ids_to_tokens(sorted(self.stop)):
                if text.lstrip(" ").startswith(end):
                    text = text.lstrip(" ").removeprefix(end)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens):
        """Token ids as text, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def check(self, problems):
        """Raise ConfigError if a prompt is no token, or leaves no room for one. problems: {task: list}."""
        room = self.config.max_model_len - 1
        for task, of_task in problems.items():
            for n, problem in enumerate(of_task, 1):
                length = len(self.start(problem["prompt"]))
                where = problem.get("where", f"task {task}, problem {n}")
                words = f"{where}: the prompt {problem['prompt'][:50]!r} has {length} tokens"
                words += (
                    f", there may be 1 to {room}: raise --max_model_len or take the problem out"
                )
                require(0 < length <= room, words)

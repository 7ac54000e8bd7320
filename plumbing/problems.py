"""The problems of a run's tasks, checked before anything starts, and their prompts as token ids: raw text, or through
the model's chat template.
"""

import functools
import inspect
import json
import secrets

from config import Config, ConfigError, load_task, require, task_weights
from plumbing.prompts import beginning, messages_of, prompt_text


def load_problems(config: Config, split: str) -> dict[str, list[dict]]:
    """Problems of every task of the run, by task; split: "train" or "test".

    Raises ConfigError naming the task and the problem, or file and line.
    """
    problems = {}
    # Scores are told by the set that a problem comes from: no two tasks may use one name for theirs.
    task_of_source = {}
    for task in task_weights(config.task):
        problems[task] = _problems_of(config, task, split)
        require(problems[task], f"task {task} has no {split} problems")
        for number, problem in enumerate(problems[task], 1):
            place = f"task {task}, {split} problem {number}"
            require(
                isinstance(problem, dict),
                f"{place}: it must be a dict, it is {beginning(problem)}",
            )
            place = problem.get("where", place)
            _check_problem(problem, place)
            source = problem.get("source", task)
            other = task_of_source.setdefault(source, task)
            require(
                other == task,
                f"{place}: the tasks {task} and {other} both have a set called {source}",
            )
    return problems


def _check_problem(problem, place):
    """Raise ConfigError unless a problem has a prompt, text or messages, and only text that UTF-8 has."""
    prompt = problem.get("prompt")
    require(
        prompt and isinstance(prompt, (str, list)),
        f'{place}: it must have a text or a list of messages under "prompt", it has {beginning(prompt)}',
    )
    if isinstance(prompt, list):
        try:
            problem["prompt"] = messages_of(prompt, "prompt")
        except ValueError as e:
            raise ConfigError(f"{place}: {e}") from None
    for name, value in problem.items():
        try:
            json.dumps(value, ensure_ascii=False, default=repr).encode()
        except UnicodeEncodeError as e:
            raise ConfigError(
                f"{place}: '{name}' has half of a character (a lone surrogate, {e.object[e.start]!a}): mend the text"
            ) from None


def share_prompts(problems: list[dict]) -> bool:
    """Do a task's problems have few different prompts, as those of a game do?"""
    return len({json.dumps(problem["prompt"]) for problem in problems}) < len(problems) / 2


def in_both(trained: list[dict], held_out: list[dict]) -> int:
    """How many held-out problems are trained on.

    Problems are the same if their prompts are. In a task whose problems share few prompts, as those of a game do, all
    that a problem says must be the same, but for where it stands.
    """
    is_game = share_prompts(trained)

    def identity(problem):
        if not is_game:
            return json.dumps(problem["prompt"])
        said = {name: value for name, value in problem.items() if name != "where"}
        return json.dumps(said, sort_keys=True, default=repr)

    identities = set(map(identity, trained))
    return sum(identity(problem) in identities for problem in held_out)


def held_out_scores(line):
    """What an evaluation's line of metrics.jsonl says of each set: the share of solved problems, and the mean reward
    where that is something else: "toy 0.914", or "toy 0.125 solved, mean reward 0.410".
    """
    texts = []
    for name, solved in line["eval"].items():
        reward = line.get("eval_reward", {}).get(name, solved)
        same = abs(reward - solved) < 5e-4
        more = "" if same else f" solved, mean reward {reward:.3f}"
        texts.append(f"{name} {solved:.3f}{more}")
    return " | ".join(texts)


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
        # All attempts at a problem have the same prompt.
        self.tokenized = functools.lru_cache(1000)(self._tokenized)

    def render(self, messages):
        """Messages as text, by the chat template, up to where the assistant speaks."""
        options = dict(tokenize=False, add_generation_prompt=True)
        return self.tokenizer.apply_chat_template(messages, **options, **self.thinking)

    def start(self, prompt):
        """Token ids of a problem's prompt: a text, or a list of messages. Raises ConfigError if the knobs do not fit it."""
        return self.tokenized(json.dumps(prompt))

    def _tokenized(self, prompt_json):
        prompt = json.loads(prompt_json)
        system = self.config.system_prompt
        if not self.config.chat:
            if isinstance(prompt, list):
                require(
                    len(prompt) == 1 and prompt[0]["role"] == "user",
                    f"a prompt of {len(prompt)} messages, the first one of the {prompt[0]['role']}, needs "
                    "--chat True",
                )
            return self.tokenizer(system + prompt_text(prompt))["input_ids"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system:
            require(
                messages[0]["role"] not in ("system", "developer"),
                "the prompt has a system message of its own: leave out --system_prompt",
            )
            messages = [{"role": "system", "content": system}, *messages]
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

    def usable(self, problems, say=None):
        """{task: indices of the problems whose prompts the model can take}; problems: {task: list}.

        A prompt cannot be taken if it has no tokens, leaves no room for an answer, or has a token that the model has no
        row for. Such problems are left out while they are at most --max_left_out of a task's; say: a function that is
        told so, a line each task. Raises ConfigError, with the first of them, if they are more.
        """
        room = self.config.max_model_len - 1
        indices = {}
        for task, of_task in problems.items():
            indices[task] = []
            complaints = []
            for index, problem in enumerate(of_task):
                place = problem.get("where", f"task {task}, problem {index + 1}")
                try:
                    tokens = self.start(problem["prompt"])
                # the template's own words for messages that it does not take are of many kinds
                except Exception as e:
                    raise ConfigError(f"{place}: the prompt cannot be used: {e}") from None
                text = prompt_text(problem["prompt"])[:50]
                if not 0 < len(tokens) <= room:
                    complaints.append(
                        f"{place}: the prompt {text!r} has {len(tokens)} tokens, there may be 1 to {room} "
                        "(--max_model_len - 1)"
                    )
                elif max(tokens) >= self.vocabulary:
                    complaints.append(
                        f"{place}: the prompt {text!r} has the token {max(tokens)} "
                        f"({self.tokenizer.convert_ids_to_tokens(max(tokens))!r}), the model knows "
                        f"{self.vocabulary}, from 0 on"
                    )
                else:
                    indices[task].append(index)
            if not complaints:
                continue
            summary = (
                f"{len(complaints)} of {len(of_task)} problems of task {task} have prompts that the model cannot "
                f"take, the first: {complaints[0]}"
            )
            require(
                len(complaints) <= self.config.max_left_out * len(of_task) and indices[task],
                f"{summary}. Mend them, or raise --max_model_len; or let --max_left_out, now "
                f"{self.config.max_left_out:g}, be the share that may be left out",
            )
            if say:
                say(f"{summary}; they are left out")
        return indices

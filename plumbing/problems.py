"""The problems of a run's tasks, and their prompts as token ids.

Problems are checked before anything starts. A prompt becomes tokens as plain text or, with --chat
True, through the model's chat template.
"""

import functools
import inspect
import json
import secrets

from config import Config, ConfigError, load_task, require, task_weights
from plumbing.prompts import beginning, messages_of, prompt_text


def load_problems(config: Config, split: str) -> dict[str, list[dict]]:
    """{task: its problems} for every task of the run. split: "train" or "test".

    Raises ConfigError that names the task and the problem, or file and line.
    """
    problems = {}
    # Scores are reported for each source, so two tasks must not have sources of the same name.
    task_of_source = {}
    for task in task_weights(config.task):
        problems[task] = _problems_of(config, task, split)
        require(problems[task], f"task {task} has no {split} problems")
        for number, problem in enumerate(problems[task], 1):
            where = f"task {task}, {split} problem {number}"
            require(
                isinstance(problem, dict),
                f"{where}: it must be a dict, it is {beginning(problem)}",
            )
            where = problem.get("where", where)
            _check_problem(problem, where)
            source = problem.get("source", task)
            other = task_of_source.setdefault(source, task)
            require(
                split == "train" or other == task,
                f"{where}: the tasks {task} and {other} both have a set called {source}",
            )
    return problems


def _check_problem(problem, where):
    """Raise ConfigError unless a problem has a prompt, and only text that UTF-8 can hold.

    where: the problem's place, for the message. A list of messages is replaced by a checked one.
    """
    prompt = problem.get("prompt")
    require(
        prompt and isinstance(prompt, (str, list)),
        f'{where}: it must have a text or a list of messages under "prompt", it has '
        f"{beginning(prompt)}",
    )
    if isinstance(prompt, list):
        try:
            problem["prompt"] = messages_of(prompt, "prompt")
        except ValueError as e:
            raise ConfigError(f"{where}: {e}") from None
    for name, value in problem.items():
        try:
            json.dumps(value, ensure_ascii=False, default=repr).encode()
        except UnicodeEncodeError as e:
            raise ConfigError(
                f"{where}: '{name}' has half of a character (a lone surrogate, "
                f"{e.object[e.start]!a}): mend the text"
            ) from None


# the values of a problem that say where it comes from
ORIGIN = ("where", "read_as", "source", "answer_column")


def share_prompts(problems: list[dict]) -> bool:
    """Do many problems of a task have the same prompt, as those of a game do?"""
    return len({json.dumps(problem["prompt"]) for problem in problems}) < len(problems) / 2


def in_both(trained: list[dict], held_out: list[dict]) -> int:
    """The number of held-out problems that are trained on, too.

    Two problems are the same if their prompts are. In a task whose problems share prompts, as those
    of a game do, the answers must be the same, too; or, if they have none, all other values but
    those of ORIGIN.
    """
    is_game = share_prompts(trained)

    def identity(problem):
        prompt = problem["prompt"]
        # A single message of the user is the same prompt as its text.
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]["content"]
        prompt = prompt.strip() if isinstance(prompt, str) else prompt
        values = {}
        if is_game and "answer" in problem:
            values = {"answer": problem["answer"]}
        elif is_game:
            values = {name: x for name, x in problem.items() if name not in ORIGIN}
        return json.dumps(values | {"prompt": prompt}, sort_keys=True, default=repr)

    identities = set(map(identity, trained))
    return sum(identity(problem) in identities for problem in held_out)


def held_out_scores(line):
    """The scores of each set in an evaluation's line of metrics.jsonl, as a text.

    They are the share of solved problems and, where that is another number, the mean reward:
    "toy 0.914", or "toy 0.125 solved, mean reward 0.410".
    """
    scores = []
    for source, solved in line["eval"].items():
        reward = line.get("eval_reward", {}).get(source, solved)
        if abs(reward - solved) < 5e-4:
            scores.append(f"{source} {solved:.3f}")
        else:
            scores.append(f"{source} {solved:.3f} solved, mean reward {reward:.3f}")
    return " | ".join(scores)


def _problems_of(config, task, split) -> list:
    """The problems that the task itself returns. Raises ConfigError for its ValueError."""
    module = load_task(task)
    arguments = [split, config.seed]
    # only a task that reads data has a parameter for its name
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
        # imported only here, because it imports torch, which the launcher must not wait for
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        require(
            self.tokenizer.chat_template or not config.chat,
            f"--chat True: the tokenizer of {config.model} has no chat template",
        )
        model = AutoConfig.from_pretrained(config.model)
        # the number of token ids that the model has; the tokenizer may have another one
        self.vocabulary = model.get_text_config().vocab_size
        try:
            ends = GenerationConfig.from_pretrained(config.model).eos_token_id
        # a model without a generation config: as vLLM does, make one from the model's own config
        except OSError:
            ends = GenerationConfig.from_model_config(model).eos_token_id
        # a single token, or a list: chat models often have several stop tokens
        if not isinstance(ends, list):
            ends = [ends]
        self.stop = {*ends, self.tokenizer.eos_token_id} - {None}
        # arguments of the chat template
        self.thinking = {}
        if config.thinking != "auto":
            self.thinking = {"enable_thinking": config.thinking == "on"}
        # all attempts at a problem have the same prompt, so results are kept
        self.tokenized = functools.lru_cache(1000)(self._tokenized)

    def render(self, messages):
        """Messages as text, by the chat template, up to where the assistant's turn begins."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.thinking
        )

    def start(self, prompt):
        """Token ids of a problem's prompt: a text, or a list of messages.

        Raises ConfigError if the prompt needs other knobs.
        """
        return self.tokenized(json.dumps(prompt))

    def _tokenized(self, prompt_json):
        prompt = json.loads(prompt_json)
        system = self.config.system_prompt
        if not self.config.chat:
            if isinstance(prompt, list):
                require(
                    len(prompt) == 1 and prompt[0]["role"] == "user",
                    f"a prompt of {len(prompt)} messages, the first one of the "
                    f"{prompt[0]['role']}, needs --chat True",
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

    def reply(self, text):
        """Token ids of the environment's reply to a turn of the model.

        They are appended to the tokens that the engine has sampled, which end with a stop token.
        With --chat True they include the text that the template puts between two turns.
        """
        if self.config.chat:
            # A random text marks the model's turn, behind which the template's text is taken
            turn = secrets.token_hex(8)
            messages = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": turn},
                {"role": "user", "content": text},
            ]
            text = self.render(messages).partition(turn)[2]
            # the engine has already sampled the stop token that ends the turn
            for end in self.tokenizer.convert_ids_to_tokens(sorted(self.stop)):
                if text.lstrip(" ").startswith(end):
                    text = text.lstrip(" ").removeprefix(end)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens):
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def usable(self, problems, say=None):
        """{task: indices of the problems whose prompts the model can take}. problems: {task: list}.

        The model cannot take a prompt that has no tokens, leaves no room for an answer, or has a
        token id that the model lacks. Such problems are left out if they are at most the share
        --max_left_out of a task's problems; `say` is then called with a line about them. If they
        are more, raises ConfigError that shows the first of them.
        """
        usable = {}
        for task, task_problems in problems.items():
            usable[task] = []
            complaints = []
            for index, problem in enumerate(task_problems):
                where = problem.get("where", f"task {task}, problem {index + 1}")
                complaint = self._complaint(problem["prompt"], where)
                if complaint:
                    complaints.append(complaint)
                else:
                    usable[task].append(index)
            if not complaints:
                continue
            summary = (
                f"{len(complaints)} of {len(task_problems)} problems of task {task} have prompts "
                f"that the model cannot take, the first: {complaints[0]}"
            )
            require(
                len(complaints) <= self.config.max_left_out * len(task_problems) and usable[task],
                f"{summary}. Mend them, or raise --max_model_len; or let --max_left_out, now "
                f"{self.config.max_left_out:g}, be the share that may be left out",
            )
            if say:
                say(f"{summary}; they are left out")
        return usable

    def _complaint(self, prompt, where):
        """The reason why the model cannot take a prompt; "" if it can. See `usable`."""
        try:
            tokens = self.start(prompt)
        # chat templates raise errors of many kinds for messages that they do not take
        except Exception as e:
            raise ConfigError(f"{where}: the prompt cannot be used: {e}") from None
        room = self.config.max_model_len - 1
        text = prompt_text(prompt)[:50]
        if not 0 < len(tokens) <= room:
            return (
                f"{where}: the prompt {text!r} has {len(tokens)} tokens, there may be 1 to {room} "
                "(--max_model_len - 1)"
            )
        largest = max(tokens)
        if largest >= self.vocabulary:
            return (
                f"{where}: the prompt {text!r} has the token {largest} "
                f"({self.tokenizer.convert_ids_to_tokens(largest)!r}), the model's tokens are 0 to "
                f"{self.vocabulary - 1}"
            )
        return ""

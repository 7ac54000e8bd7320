"""The problems of a run's tasks, checked before anything starts.

`problems(split, seed[, names])` of tasks/<name>.py gives them; here every one is looked at, so that a faulty
data file is named by its line and not by a stage that dies an hour later. `bash run.sh toy --dry_run True` does it alone.
"""

import importlib
import inspect
import json
from pathlib import Path

from config import Config, ConfigError, task_weights
from plumbing.queues import publish_json, wait_for_json

# characters of a prompt, some 100 tokens: below it every attempt may as well compute it
LONG_PROMPT = 400


def load_problems(config: Config, split: str) -> dict[str, list[dict]]:
    """Problems of every task of the run, by task; split: "train" or "test".

    Raises ConfigError naming the task and the problem, or file and line.
    """
    found = {}
    for task in task_weights(config.task):
        problems = _problems(config, task, split)
        if not problems:
            raise ConfigError(f"task {task} has no {split} problems")
        for number, problem in enumerate(problems, 1):
            _check(problem, f"task {task}, {split} problem {number}")
        found[task] = problems
    _check_names(found)
    return found


def share_beginnings(config: Config, problems: dict[str, list[dict]]) -> bool:
    """Do attempts or turns have so much in common that it pays to look for it? problems: by task."""
    for task, of_task in problems.items():
        if hasattr(importlib.import_module(f"tasks.{task}"), "respond"):
            return True
        first = of_task[:200]
        characters = sum(len(problem["prompt"]) for problem in first) / len(first)
        if characters + len(config.system_prompt) >= LONG_PROMPT:
            return True
    return False


def announce_loaded(queues) -> None:
    """The actor: tell the other stages that rollouts may be expected. queues: a run's directory of them."""
    publish_json(Path(queues, "problems.json"), loaded=True)


def wait_until_loaded(config, queues, stage) -> None:
    """The other stages: TimeoutError if the actor has not loaded its problems within start_timeout s."""
    complaint = (
        f"{stage}: the actor has not loaded its problems and rewards within "
        f"{config.start_timeout:.0f} s: is problems() of task {config.task} slow? --start_timeout gives it longer"
    )
    wait_for_json(Path(queues, "problems.json"), config.start_timeout, complaint)


def _problems(config, task, split) -> list:
    """What the task itself gives; only tasks that read data files are told their names."""
    module = importlib.import_module(f"tasks.{task}")
    parameters = inspect.signature(module.problems).parameters
    arguments = [split, config.seed]
    if len(parameters) > 2:
        data = {"train": config.train_data, "test": config.eval_data}
        arguments.append(data[split])
    try:
        return list(module.problems(*arguments))
    except ValueError as e:
        raise ConfigError(f"task {task}: {e}") from None


def _check(problem, where: str) -> None:
    seen = str(problem)[:100]
    prompt = problem.get("prompt") if isinstance(problem, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{where}: must be a dict with a text under "prompt", is {seen}')
    try:
        survived = json.loads(json.dumps(problem))
    except (TypeError, ValueError):
        survived = None
    if survived != problem:
        raise ConfigError(
            f"{where}: must survive JSON, which has no tuples, sets or keys that are not texts, is {seen}"
        )


def _check_names(found: dict[str, list[dict]]) -> None:
    """Scores are told by the set a problem comes from: no two tasks may use one name for theirs."""
    owner = {}
    for task, problems in found.items():
        for source in {problem.get("source", task) for problem in problems}:
            if source in owner:
                raise ConfigError(
                    f"tasks {owner[source]} and {task} both have problems of a set called {source}: give one of the files another name"
                )
            owner[source] = task

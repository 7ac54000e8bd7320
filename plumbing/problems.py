"""The problems of a run's tasks, checked before anything starts: a faulty data file is named by its line,
not by a stage that dies an hour later.
"""

import importlib
import inspect
import json

from config import Config, ConfigError, require, task_weights


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
            _check(problem, f"task {task}, {split} problem {number}")
            source = problem.get("source", task)
            require(
                owner.setdefault(source, task) == task,
                f"tasks {owner[source]} and {task} both have problems of a set called {source}: rename one of the files",
            )
    return found


def _problems_of(config, task, split) -> list:
    """What the task itself gives; only tasks that read data files are told their names."""
    module = importlib.import_module(f"tasks.{task}")
    arguments = [split, config.seed]
    if len(inspect.signature(module.problems).parameters) > 2:
        arguments.append({"train": config.train_data, "test": config.eval_data}[split])
    try:
        return list(module.problems(*arguments))
    except ValueError as e:
        raise ConfigError(f"task {task}: {e}") from None


def _check(problem, where: str) -> None:
    prompt = problem.get("prompt") if isinstance(problem, dict) else None
    try:
        survived = json.loads(json.dumps(problem))
    except (TypeError, ValueError):
        survived = None
    require(
        isinstance(prompt, str) and prompt and survived == problem,
        f'{where}: must be a dict with a text under "prompt" that survives JSON (no tuples, sets or keys that are not '
        f"texts), is {str(problem)[:100]}",
    )

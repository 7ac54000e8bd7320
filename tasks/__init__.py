"""A task is one file here, named on the command line: `--task toy` is tasks/toy.py. This is all that it may define.

    problems(split, seed) or problems(split, seed, data)    required
        A sequence of problems; split is "train" or "test". Problems for "test" are held out: none of them may be
        among those for "train". The same arguments give the same problems in the same order, as runs are continued by
        a problem's index. A task that reads data files takes the third argument, what --train_data or --eval_data names
        ("" if nothing); tasks/_data.py reads files of many kinds. ValueError: the message, which names file and line,
        ends the start before anything is touched.

    A problem is a dict:
        prompt    required: a text, or a list of messages with `role` and `content` for the model's chat template
        answer    what is right; shown beside rollouts
        source    the set that it comes from: evaluations report every source by itself (default: the task's name)
        where     file and line, for messages about this problem
        ...       anything else that `reward` or `episode` needs

    reward(problem, completion, finished) -> reward         required, unless there is an episode
        completion: the text that the model wrote; finished: it ended by itself, and was not cut off at --max_new_tokens.
        It runs in a process of its own with limits on time (--reward_timeout) and memory.

    async episode(problem, model) -> reward                 instead of reward: several turns, tools, agents
        `await model(text)` is the model's next turn, the prompt being the first text; `model.base_url` and `model.api_key`
        are an OpenAI endpoint of this attempt's own; `await model.call("function", ...)` calls a function of this file in a
        process of its own. Errors of its own are counted; `raise AttemptLost("why")` (plumbing.episode) leaves it out.

    A reward is a number (of Python, numpy, torch, Fraction, Decimal; finite), or one of the outcomes "correct", "wrong",
    "no_answer", "unparsable", whose numbers are --reward_finished and --reward_cut_off.

    SUCCESS = 1.0                         a reward from here on counts as solved; so does the outcome "correct"
    INSTANT = False                       True: no text can keep `reward` busy; it is called without a process of its own
    answer(problem, completion) -> text   what attempts are compared by when they vote (maj@k of tools/evaluate.py); None: no vote
    demonstration(rng) -> [(text, learn)] an example for the tiny base model that is made where --model is empty;
                                          learn: the model says this text. Some examples should be wrong
    TINY = dict(...)                      what is special about that model: see DEFAULT in tools/base_model.py

A file whose name starts with `_` is no task, but may help some. `tasks/toy.py` is the shortest task, `tasks/guess.py` the
shortest with an episode, `tasks/maths.py` one that reads data.
"""

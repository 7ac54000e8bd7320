"""A task is one Python file in this folder: `--task toy` is tasks/toy.py.

These are all the names that the rest of the code looks for in a task's file:

    problems(split, seed) or problems(split, seed, data)             required
        Returns a sequence of problems. split is "train" or "test"; problems of "test" are held
        out, so none of them should be among those of "train". seed is the knob --seed. The same
        arguments must give the same problems in the same order, because a run that is continued
        finds a problem by its number in this list. If the function has a third parameter, it
        receives the value of --train_data for "train" and of --eval_data for "test" ("" if the
        flag is not set); tasks/_data.py reads files of many kinds. If the arguments or the data
        cannot be used, raise ValueError: the command ends with its message before anything starts.

    A problem is a dict with text that UTF-8 can hold:
        prompt     required: a text, or a list of messages, each a dict with `role` and `content`,
                   for the model's chat template
        answer     the right answer; it is shown beside decoded samples
        source     the name of the set that the problem comes from. Evaluations report each source
                   by itself. If it is absent, it is the task's name; two tasks must not share one
        where      the file and line of the problem, for messages about it
        read_as    how tasks/_data.py understood the columns of the set, one line; needs `where`
        ...        anything else that `reward` or `episode` needs

    reward(problem, completion, finished) -> reward                  required without `episode`
        completion is the text that the model wrote, without special tokens. finished is True if
        the model ended by itself, and False if it was cut off at --max_new_tokens. The function
        runs in a process of its own, with limits on time (--reward_timeout) and memory; what it
        prints is discarded. If it exceeds a limit or raises, the outcome is "unparsable", and this
        is counted. If it returns anything but a reward, the run ends.

    async episode(problem, model) -> reward                          instead of `reward`
        For several turns, tools and agents. It runs in the actor, for at most --episode_timeout.
        await model(text)                 the model's next turn, a text. The first text must be the
                                          prompt. It raises plumbing.episode.CutOff if no tokens
                                          are left; unless it is caught, the outcome is "no_answer"
        model.turns, model.finished       all turns so far; whether the last one ended by itself
        model.token_texts(turn)           the texts of the tokens of a turn, for rewards of tokens
        model.log(name=number, ...)       records numbers of the episode; metrics.jsonl has their
                                          means in by_task, under logged
        model.base_url, model.api_key     an endpoint for this attempt alone, with OpenAI's and
                                          Anthropic's APIs
        await model.call("name", ...)     calls a function of the task's file in a process of its
                                          own, with limits as for `reward`, and returns its number,
                                          list of numbers, text or None. Raises TimeoutError if it
                                          exceeds a limit, RuntimeError if it raises an exception,
                                          TypeError if it returns anything else
        If the episode raises an exception or takes longer than --episode_timeout, the outcome is
        "unparsable", and this is counted. The attempt is left out instead if the model has not
        finished a turn, or if the time passed while it waited for an engine. An episode can have
        its attempt left out, for example because a tool is out of order, with
        `raise plumbing.episode.AttemptLost("reason")`.

    A reward is a finite number (of Python, numpy, torch, Fraction or Decimal; True is 1), or an
    outcome: "correct", "wrong", "no_answer" or "unparsable". --reward_finished holds the four
    numbers that the outcomes stand for, and --reward_cut_off those for answers that were cut off.
    A list of numbers has either one reward for each turn of the model, or one for each sampled
    token (the tokens of the first turn, then those of the second one, and so on). Its length must
    be the number of turns or the number of sampled tokens. Each advantage is then computed from
    the rewards that are still to come (docs/losses.md). The attempt's reward is the sum.

    SUCCESS = 1.0
        A number of at least this much counts as solved. So does the outcome "correct".

    INSTANT = False
        True promises that no text can keep the task's functions busy or make them take much
        memory. They are then called in the actor itself, which is faster.

    answer(problem, completion) -> a number, a text or None
        The final answer of an attempt. tools/evaluate.py counts for each problem which answer is
        the most frequent one, and reports how often it is right (maj@k); None does not count.
        completion is the model's text or, in a task with an episode, the list of its turns. The
        function is called like `reward`, with the same limits. Without it the whole text counts.

    demonstration(rng) -> [(text, learn), ...]
        Returns one example, cut into parts. If --model is empty, a tiny base model is trained on
        many such examples before the run; it learns to write the parts with learn = True. Some
        examples should be wrong, so that reinforcement learning has something to improve. rng is
        a random.Random.

    TINY = dict(...)
        Settings of this tiny model. They replace those of DEFAULT in tools/base_model.py.

A file whose name starts with `_` is no task; it holds functions that tasks use. tasks/toy.py is a
short task, tasks/guess.py a short one with an episode, and tasks/maths.py reads data.
"""

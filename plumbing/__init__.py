"""Everything that the algorithm needs and that is not the algorithm itself.

The algorithm is in actor.py, preprocess.py, train.py, weights.py and config.py. To change a loss,
an advantage or a task, you need not open a file in here. These are the files, by the process in
which they run:

Actor: it samples attempts from the engines and scores them.
    client.py        The HTTP client of all engines: it chooses one, retries, and checks the answer.
    endpoint.py      The HTTP server that gives each attempt an OpenAI endpoint of its own.
    messages_api.py  Requests and answers of Anthropic's Messages API, as those of OpenAI's chat.
    responses_api.py The same for OpenAI's Responses API.
    episode.py       One attempt at a problem: what an episode is given as `model`.
    sandbox.py       Reward functions in processes of their own, with limits on time and memory.
    problems.py      The problems of a run's tasks, checked, and their prompts as token ids.
    prompts.py       The two forms of a prompt: a text, or a list of messages.
    ledger.py        The record of all problems drawn, so that a stop loses none of them; one half
                     of it is in the actor, the other half in preprocess.py.

Engine: vLLM, which generates tokens and receives weights while it does so.
    engine.py        The HTTP calls that an engine answers, and its end of a weight update.
    shadow.py        The model a second time: vLLM loads an update into it while the first decodes.

Trainer: it computes the loss and sends new weights to the engines.
    reader.py        The micro-batches of a step, and the actor's evaluations, as they are read.
    ranks.py         The trainer's processes: rank, device, and what all ranks agree upon.
    model.py         The model as it is trained: rows of sequences, logits, loading, sharding.
    routing.py       Mixtures of experts: what routers choose is counted, and can be prescribed.
    lora.py          Adapters (LoRA), merged in each forward pass just as the engines get them.
    adam_8bit.py     AdamW with its two moments in 8 bits (torchao), for --adam_8bit.
    metrics.py       metrics.jsonl, the line of each step, Weights & Biases, decoded samples.
    alarms.py        What the metrics say has gone wrong, with what to try.
    guards.py        Checks that end a run which has gone wrong, such as engines that disagree.
    checkpoints.py   Checkpoints in Hugging Face's format: written in a thread, and restored.
    weight_group.py  The list of engines, and the process group in which they receive weights.

Launcher: it starts and watches the processes of one machine (tools/run.py).
    placement.py     Nodes, GPUs, CPU threads and the command line of each process.
    engine_flags.py  Flags of vLLM that a user gives: accepted, or refused with the reason.
    rundir.py        The run directory: new, continued, or as it was after a failed start.
    supervise.py     The processes: started, watched, stopped, and engines started again.

Shared by several processes.
    samples.py       The schema of a sample, from the engine's answer to the loss.
    queues.py        Queues between processes, which are directories of record files.
    secret.py        The run's secret, without which an engine answers no request.
    transport.py     What both ends of a weight update share: the group, and buckets of weights.
    patience.py      The time that one process waits for another before the run counts as stalled.
    knobs.py         The command line: it reads, shows and searches the knobs of config.py.

Nothing in here imports a file on top but config.py, and no two files import each other.
"""

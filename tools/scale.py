"""Which part of a run saturates first, from 8 to 4,096 GPUs, and what to do about it? Arithmetic on measured rates.

    python tools/scale.py [--serving 0.375] [--sequences 256] [--tokens 4000] [--batch 1024] ...

There is one actor, one preprocess and one file system, however many GPUs there are. Each part's load, as
a share of what it can carry, follows from the tokens a second that the engines sample: as many as an H100's
memory lets them (`decode_rate`: no engine is faster, `--speed` is how near it comes). What a part can carry was
measured by a script in bench/ on one core of the machine that its .json names, or is assumed: both are said.
A table row has the shares in percent; above 100 the GPUs wait for that part. A weight update is taken to last
equally long whatever the number of engines (a broadcast in a ring or tree). Deliberately absent: training's
own speed and how many GPUs should serve (tools/simulate.py), memory (tools/memory.py).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# an H100's memory, bytes/s; Qwen2.5-7B in 16 bits: 7.6e9 weights, 28 layers x 4 heads x 128 x (K, V) a token
BANDWIDTH = 3.35e12
WEIGHT_BYTES = 15.2e9
KV_BYTES = 28 * 4 * 128 * 2 * 2
# of a token in a record (plumbing/samples.py): tokens, mask, logprobs, versions
RECORD_BYTES = 8 + 1 + 4 + 8
# of a token in an engine's answer (plumbing/generate.py): 12345,-0.12345678901234567, with commas
ANSWER_BYTES = 28
# plumbing/sandbox.py starts no more
REWARD_WORKERS = 16
PARTS = {
    "actor": "one core reads, checks and joins all answers: several actors (they are absent)",
    "rewards": "the actor's node judges with at most 16 workers: more of them (plumbing/sandbox.py), or a cheaper reward",
    "network": "answers come as JSON to one node: a leaner form, or a faster card",
    "preprocess": "one core checks, packs and writes all samples: longer rows, or several of them (they are absent)",
    "rollouts": "one writer, one reader: leaner records (tokens and versions as int32), a file system in memory if actor and preprocess share a node",
    "batches": "one writer: leaner records, longer rows (--row_tokens), hence fewer files",
    "files": "a faster shared file system for --out; longer rows and larger groups make fewer files",
    "reader": "a rank reads while it does not train: leaner records",
    "update": "larger batches (--batch_size) make fewer versions",
}


# ---- what the engines sample


def mean_context(lengths):
    """Mean tokens in the KV cache of a sequence in progress, prompts aside: E[L^2] / (2 E[L]); [L] -> tokens."""
    lengths = np.asarray(lengths, float)
    return float((lengths**2).mean() / (2 * lengths.mean()))


def step_seconds(sequences, context, weight_bytes=WEIGHT_BYTES, kv_bytes=KV_BYTES):
    """Least time of a decode step: all weights, and the KV cache of every sequence, are read once."""
    return (weight_bytes + sequences * context * kv_bytes) / BANDWIDTH


def decode_rate(sequences, context, **model):
    """Tokens/s that an engine samples at most: a token of every sequence each step."""
    return sequences / step_seconds(sequences, context, **model)


def step_samples(ranks, row_tokens, tokens, attempts, least):
    """Samples of a step that has a row for every rank; at least `least`, and whole groups."""
    wanted = max(least, ranks * row_tokens / tokens)
    return int(np.ceil(wanted / attempts)) * attempts


# ---- what the parts can carry


@dataclass
class Rates:
    """Capacities. Lists are measured points, between which lines are drawn."""

    # of the actor: lengths of answers, and CPU seconds an answer
    actor_tokens: list
    actor_s: list
    # answers a second that a reward worker judges
    rewards_s: float
    # of preprocess: trainer ranks, and CPU seconds a token; of a rank's reader: CPU seconds a token
    preprocess_ranks: list
    preprocess_s: list
    reader_s: float
    # of one queue: seconds for a record, and for each byte of it
    record_s: float
    byte_s: float
    # name of the part: where its rate is from
    sources: dict


def read_rates(results):
    """Rates from the raw numbers of bench/, in a directory. FileNotFoundError says what to run."""
    actor = _kept(results, "actor")
    rewards = _kept(results, "rewards")
    preprocess = _kept(results, "preprocess")
    queues = _kept(results, "queues")
    lengths = {int(k): v for k, v in actor["lengths"].items()}
    ranks = {int(k): v for k, v in preprocess["ranks"].items()}
    readers = [r["readers_cpu_s"] / r["tokens"] for r in ranks.values()]
    sources = dict(
        actor=actor["machine"],
        rewards=rewards["machine"],
        preprocess=preprocess["machine"],
        queues=queues["machine"],
    )
    return Rates(
        actor_tokens=sorted(lengths),
        actor_s=[lengths[n]["cpu_s"] / lengths[n]["answers"] for n in sorted(lengths)],
        rewards_s=float(np.median(rewards["answers_s"]["clean"])) / rewards["cores"],
        preprocess_ranks=sorted(ranks),
        preprocess_s=[ranks[n]["cpu_s"] / ranks[n]["tokens"] for n in sorted(ranks)],
        reader_s=float(np.median(readers)),
        record_s=1 / queues["small records/s"][0],
        byte_s=1 / (1e6 * queues["put + get + ack, two processes, MB/s"][0]),
        sources=sources,
    )


def _kept(results, name):
    path = Path(results, f"{name}.json")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: python bench/{name}.py makes it")
    return json.loads(path.read_text())


def actor_seconds(rates, tokens):
    """CPU seconds of an answer; beyond the longest that was measured, by the token."""
    longest = rates.actor_tokens[-1]
    if tokens > longest:
        return rates.actor_s[-1] * tokens / longest
    return float(np.interp(tokens, rates.actor_tokens, rates.actor_s))


def queue_seconds(rates, records_s, bytes_s):
    """Share of a second that so many records and bytes a second keep a queue busy."""
    return records_s * rates.record_s + bytes_s * rates.byte_s


# ---- loads


def flow(gpus, w):
    """{what flows: per second}, and how GPUs are used; w: the workload, see `parse`."""
    serving = max(round(gpus * w.serving), 1)
    ranks = gpus - serving
    tokens_s = serving * w.speed * decode_rate(w.sequences, w.context, **w.model)
    answers_s = tokens_s / w.tokens
    batch = step_samples(ranks, w.row_tokens, w.tokens, w.attempts, w.batch)
    # of prompts and answers
    recorded_s = answers_s * (w.prompt + w.tokens)
    return dict(
        serving=serving,
        ranks=ranks,
        batch=batch,
        tokens_s=tokens_s,
        answers_s=answers_s,
        groups_s=answers_s / w.attempts,
        rows_s=recorded_s / w.row_tokens,
        record_bytes_s=recorded_s * RECORD_BYTES,
        steps_s=answers_s / batch,
    )


def loads(f, w, rates):
    """{part: load as a share of what it can carry}; f: of `flow`."""
    preprocess_s = np.interp(f["ranks"], rates.preprocess_ranks, rates.preprocess_s)
    records_s = f["groups_s"] + f["rows_s"]
    # written once and read once, as rollouts and as batches
    megabytes_s = 4 * f["record_bytes_s"] / 1e6
    update_s = w.model["weight_bytes"] / (1e9 * w.update_gb_s)
    return {
        "actor": f["answers_s"] * actor_seconds(rates, w.tokens),
        "rewards": f["answers_s"] / (REWARD_WORKERS * rates.rewards_s),
        "network": f["tokens_s"] * ANSWER_BYTES / (1e9 * w.network_gb_s),
        "preprocess": f["tokens_s"] * float(preprocess_s),
        "rollouts": queue_seconds(rates, f["groups_s"], f["record_bytes_s"]),
        "batches": queue_seconds(rates, f["rows_s"], f["record_bytes_s"]),
        "files": max(records_s / w.files_s, megabytes_s / w.files_mb_s),
        "reader": f["tokens_s"] / f["ranks"] * rates.reader_s,
        "update": f["steps_s"] * update_s,
    }


def table_rows(w, rates, sizes):
    """[(GPUs, flow, loads, the part with the largest)] of each size."""
    rows = []
    for gpus in sizes:
        f = flow(gpus, w)
        found = loads(f, w, rates)
        rows.append((gpus, f, found, max(found, key=found.get)))
    return rows


def carries(rows, part):
    """How many GPUs a part carries, between the sizes of the table; None: more than the largest."""
    sizes = [0] + [gpus for gpus, _, _, _ in rows]
    shares = [0.0] + [found[part] for _, _, found, _ in rows]
    for k in range(1, len(sizes)):
        if shares[k] > 1:
            return float(np.interp(1, shares[k - 1 : k + 1], sizes[k - 1 : k + 1]))
    return None


# ---- the table


def capacity_words(w, rates):
    """{part: what it can carry and where that is from}."""
    core = "of one core"
    an_answer = actor_seconds(rates, w.tokens)
    tokens_s = w.tokens / an_answer
    low = 1 / max(rates.preprocess_s)
    high = 1 / min(rates.preprocess_s)
    files = "assumed: python bench/queues.py --path <a directory on yours> measures it"
    s = rates.sources
    return {
        "actor": f"{1 / an_answer:.0f} answers, {tokens_s:.0f} tokens a second {core} [{s['actor']}]",
        "rewards": f"{REWARD_WORKERS} workers x {rates.rewards_s:.0f} answers/s, mathematics [{s['rewards']}]",
        "network": f"{w.network_gb_s:g} GB/s (assumed: 100 Gbit/s), {ANSWER_BYTES} bytes a token",
        "preprocess": f"{low / 1e6:.1f} to {high / 1e6:.1f} million tokens a second {core}, by ranks [{s['preprocess']}]",
        "rollouts": f"{1e-6 / rates.byte_s:.0f} MB/s, small records {1 / rates.record_s:.0f}/s, local disk [{s['queues']}]",
        "batches": "as rollouts",
        "files": f"{w.files_s:g} records/s, {w.files_mb_s:g} MB/s ({files})",
        "reader": f"{1e-6 / rates.reader_s:.1f} million tokens a second {core} [{s['preprocess']}]",
        "update": f"{w.update_gb_s:g} GB/s, all in all (TRL's 32B in 2.3 s over 16 + 16 H200, its pull request 7131)",
    }


def print_tables(rows, w, rates):
    words = ["GPUs", "serve", "tokens/s", "answers/s", "batch", "steps/min", *PARTS]
    print("load in percent of what a part can carry\n")
    print("  ".join(f"{word:>10}" for word in words) + "  first")
    for gpus, f, found, first in rows:
        cells = [gpus, f["serving"], f"{f['tokens_s']:.0f}", f"{f['answers_s']:.0f}"]
        cells += [f["batch"], f"{60 * f['steps_s']:.1f}"]
        cells += [f"{100 * found[part]:.1f}" for part in PARTS]
        print("  ".join(f"{cell:>10}" for cell in cells) + f"  {first}")
    print()
    capacities = capacity_words(w, rates)
    last = rows[-1][2]
    for part in sorted(PARTS, key=last.get, reverse=True):
        found = carries(rows, part)
        where = f"more than {rows[-1][0]} GPUs"
        if found:
            where = f"{found:.0f} GPUs"
        print(f"{part} carries {where}: {capacities[part]}\n    {PARTS[part]}")


def parse(argv):
    """The workload, with `context` and `model` filled in."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", default="8,16,32,64,128,256,512,1024,2048,4096")
    p.add_argument(
        "--serving", type=float, default=0.375, help="share of GPUs; the paper's: 48 of 128"
    )
    p.add_argument(
        "--sequences", type=int, default=256, help="in progress on each engine of one GPU"
    )
    p.add_argument("--tokens", type=float, default=4000, help="mean length of an answer")
    p.add_argument(
        "--context",
        type=float,
        default=0,
        help="mean tokens in the KV cache of a sequence; 0: 0.64 of --tokens, as of log-normal lengths with sigma 0.5",
    )
    p.add_argument("--prompt", type=float, default=200, help="tokens")
    p.add_argument(
        "--speed", type=float, default=1.0, help="share of its bandwidth that an engine reaches"
    )
    p.add_argument("--attempts", type=int, default=16)
    p.add_argument(
        "--batch",
        type=int,
        default=1024,
        help="samples a step; more where that is less than a row a rank",
    )
    p.add_argument("--row_tokens", type=int, default=16384)
    p.add_argument("--weight_gb", type=float, default=WEIGHT_BYTES / 1e9)
    p.add_argument("--kv_bytes", type=float, default=KV_BYTES, help="of a token, all layers")
    p.add_argument("--update_gb_s", type=float, default=64 / 2.3, help="of a whole weight update")
    p.add_argument("--network_gb_s", type=float, default=12.5, help="of the actor's node")
    p.add_argument(
        "--files_s", type=float, default=1000, help="records a second on the shared file system"
    )
    p.add_argument("--files_mb_s", type=float, default=1000, help="MB/s on it, reading and writing")
    p.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    w = p.parse_args(argv)
    w.sizes = [int(n) for n in w.gpus.split(",")]
    w.context = w.context or 0.64 * w.tokens
    w.model = dict(weight_bytes=1e9 * w.weight_gb, kv_bytes=w.kv_bytes)
    if min(w.sizes) < 2 or not 0 < w.serving < 1:
        p.error("--gpus must be at least 2 each, --serving between 0 and 1")
    return w


def main(argv=None):
    w = parse(argv)
    rates = read_rates(w.results)
    rate = w.speed * decode_rate(w.sequences, w.context, **w.model)
    print(
        f"{w.serving:.1%} of the GPUs serve, {w.sequences} sequences each, {rate:.0f} tokens/s "
        f"each (arithmetic: {w.weight_gb:g} GB of weights and {w.sequences} x {w.context:.0f} x "
        f"{w.kv_bytes / 1e3:.0f} kB of KV cache a step at {BANDWIDTH / 1e12:.2f} TB/s x {w.speed:g}); "
        f"answers of {w.tokens:g} tokens, {w.attempts} attempts"
    )
    print_tables(table_rows(w, rates, w.sizes), w, rates)


if __name__ == "__main__":
    main()

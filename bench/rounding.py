"""How much of what training has changed do the weights of a run have, after rounding to its dtype?

    bash run.sh countup --run rounding --steps 40 --save_every 4 --keep_last 0
    python bench/rounding.py out/rounding

Engines and trainer compute with weights that are rounded to `--dtype`. The optimizer changes
weights in float32, which are kept in a checkpoint's folder trainer/. The weights that a run begins
with are often numbers of bfloat16 themselves. A weight w is then rounded back to where it began
until it has changed by half of the distance to the next such number, and this half is between
|w| / 512 and |w| / 256.

Columns: the checkpoint's version; the root mean square of d, the change of the float32 weights
since version 0; the share of the weights that are changed after rounding; what is left of d, which
is <round(w0 + d) - round(w0), d> / <d, d>: 1 if rounding only adds noise, 0 if the model is still
that of version 0. Vectors are left out, as norms are sent in float32.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config as cfg
from bench.common import keep, machine, parser, result_file, table
from plumbing import checkpoints


def weights_of(checkpoint, first):
    """{name: float32 weight} from a checkpoint's folder trainer/, of those named in `first`."""
    weights = {name: torch.empty_like(weight) for name, weight in first.items()}
    dcp.load({"model": weights}, checkpoint_id=checkpoint / "trainer", no_dist=True)
    return weights


def left_after_rounding(first, now, dtype):
    """(root mean square of the change, share of the weights that change, share of the change left).

    first, now: {name: tensor} of float32 weights with the same names and shapes. dtype: what they
    are rounded to.
    """
    count = changed = squares = product = 0
    for name, weight in now.items():
        d = weight - first[name]
        rounded = weight.to(dtype).float() - first[name].to(dtype).float()
        count += d.numel()
        changed += int((rounded != 0).sum())
        squares += float(d.double().square().sum())
        product += float((d.double() * rounded).sum())
    return (squares / count) ** 0.5, changed / count, product / squares


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("run", help="a run directory with checkpoints of all weights (no adapters)")
    a = p.parse_args(argv)
    from transformers import AutoModelForCausalLM

    run = cfg.load(a.run)
    saved = checkpoints.all_of(a.run)
    if run.lora_rank:
        p.error(
            f"{a.run} trains adapters (--lora_rank {run.lora_rank}); name a run that trains all "
            "weights. For adapters, merge_survival in metrics.jsonl says what rounding leaves"
        )
    if not saved:
        p.error(f"{a.run} has no checkpoint; --save_every says after how many steps one is written")
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    # A head that is tied to the embedding is there once.
    first = {name: x.detach() for name, x in model.named_parameters() if x.dim() > 1}
    results = {}
    for checkpoint in saved:
        now = weights_of(checkpoint, first)
        version = str(checkpoints.version_of(checkpoint))
        results[version] = left_after_rounding(first, now, getattr(torch, run.dtype))
    print(f"{machine()}; {run.dtype}, --lr {run.lr}")
    rows = [
        (version, f"{size:.1e}", f"{changed:.3f}", f"{left:.3f}")
        for version, (size, changed, left) in results.items()
    ]
    table(["version", "change", "weights that change", "left of the change"], rows)
    keep(result_file(a, "rounding"), dict(machine=machine()) | results)


if __name__ == "__main__":
    main()

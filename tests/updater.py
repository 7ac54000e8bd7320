"""A FAKE trainer for test_failures.py: it sends weights, one update per line of its input, and does
not train.

    echo "update 3 mid" | python tests/updater.py <run directory>

sends version 3 and stops in the middle of the transfer until the next line comes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoModelForCausalLM

import config as cfg
import weights
from plumbing.queues import read_json
from plumbing.ranks import Ranks
from plumbing.weight_group import WeightGroup

MOMENT = {"stop at": "none"}


def model_of(path, version):
    """Return the base model with noise that depends on the version.

    An engine that serves this version must have these weights.
    """
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator))
    return model


def at(moment):
    """Wait for a line if the update is to stop at this moment."""
    if MOMENT["stop at"] == moment:
        MOMENT["stop at"] = "none"
        print("at", moment, flush=True)
        sys.stdin.readline()


class StoppableGroup(WeightGroup):
    """The real WeightGroup, which waits for a line at one moment of an update."""

    def send(self, version, buckets):
        at("start")
        sent = super().send(version, buckets)
        at("swap")
        return sent

    def broadcast(self, buckets):
        super().broadcast(buckets[:20])
        at("mid")
        super().broadcast(buckets[20:])


def main(run_dir):
    config = cfg.load(run_dir)
    weights.WeightGroup = StoppableGroup
    model = model_of(config.model, 0)
    sender = weights.Sender(config, model, Ranks(config), run_dir)
    print("ready", flush=True)
    for line in sys.stdin:
        _, version, moment = line.split()
        MOMENT["stop at"] = moment
        model.load_state_dict(model_of(config.model, int(version)).state_dict())
        sender.push(int(version))
        sender.wait()
        status = read_json(Path(run_dir, "queues", "version.json"))
        engines = sorted(url[-1] for url in status["engines"])
        print("updated", status["version"], *engines, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])

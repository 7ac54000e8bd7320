"""A trainer that only sends weights, one update per line of its input, and stops on the way where it is told to: for test_failures.py.

    echo "update 3 mid" | python tests/updater.py <run directory>      stops in the middle of the transfer, until the next line
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from transformers import AutoModelForCausalLM

import config as cfg
from weights import Sender


def weights(path, version):
    """The base model with noise that depends on the version: what an engine that serves this version must hold."""
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator))
    return model


class Stoppable(Sender):
    """The real Sender, which waits for a line at one moment of an update."""

    moment = "none"

    def at(self, moment):
        if self.moment == moment:
            self.moment = "none"
            print("at", moment, flush=True)
            sys.stdin.readline()

    def _broadcast(self, info):
        self.at("start")
        return super()._broadcast(info)

    def _send_bucket(self, flat, k):
        if k == 20:
            self.at("mid")
        return super()._send_bucket(flat, k)

    def _swap(self, *args):
        self.at("swap")
        return super()._swap(*args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    config = cfg.load(sys.argv[1])
    sender = Stoppable(config, weights(config.model, 0), 0, torch.device("cpu"))
    print("ready", flush=True)
    while line := sys.stdin.readline():
        _, version, sender.moment = line.split()
        sender.model = weights(config.model, int(version))
        sender.prepare(int(version))
        sender.send(int(version), lambda engines: print("updated", version, *sorted(u[-1] for u in engines), flush=True))
        sender.wait()

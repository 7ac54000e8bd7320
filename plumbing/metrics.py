"""The sums of a step's metrics over micro-batches and ranks."""

import torch
import torch.distributed as dist


class Sums:
    """The metrics' sums of a step, added up over micro-batches and ranks: one tensor, one reduction."""

    def __init__(self):
        self.shapes = {}
        self.total = None
        self.lag_max = None

    def add(self, sums):
        """Take the sums of one micro-batch, {name: tensor}."""
        lag_max = sums.pop("lag_max").float()
        self.shapes = {name: x.shape for name, x in sums.items()}
        stacked = torch.cat([x.detach().float().reshape(-1) for x in sums.values()])
        self.total = stacked if self.total is None else self.total + stacked
        self.lag_max = lag_max if self.lag_max is None else torch.maximum(self.lag_max, lag_max)

    def reduce(self):
        """{name: number, or list of numbers} over all ranks. Collective."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.total)
            dist.all_reduce(self.lag_max, op=dist.ReduceOp.MAX)
        sizes = [shape.numel() for shape in self.shapes.values()]
        found = {"lag_max": int(self.lag_max)}
        for (name, shape), part in zip(self.shapes.items(), self.total.cpu().split(sizes)):
            found[name] = part.view(shape).tolist()
        return found

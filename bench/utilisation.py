"""U(h) of this machine for tools/simulate.py: the share of its peak that a matrix product over h sequences reaches.

    python bench/utilisation.py [--quick] [--out DIR]
    python tools/simulate.py --utilisation bench/results/utilisation.csv

As in arXiv 2509.19128, Appendix A: products (4096, h) x (h, 16384) in bfloat16, each h at the best padding of up to PAD
more, against the peak of a GPU. Without a GPU: float32, one thread, a quarter of the sizes, against the fastest
product of this table, so that the share says how the curve bends, not how good the core is. What it leaves out is
what Appendix A leaves out: attention, reads of the KV cache, everything that is not a product.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.common import keep, machine, parser, result_file, table

# dense bfloat16 of H100 and H200 SXM, operations a second
PEAK = 989e12
PAD = 64
SEQUENCES = (8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def seconds(rows, inner, columns, device, dtype, rounds):
    """The fastest of some products (rows, inner) x (inner, columns), seconds each."""
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(inner, columns, device=device, dtype=dtype)
    found = []
    for _ in range(rounds):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        wait_for(device)
        found.append((time.perf_counter() - start) / 10)
    return min(found)


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure(sequences, rounds):
    """{h: operations a second, of h sequences' work}: at the best padding, of which nothing is counted."""
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    rows, columns = (4096, 16384) if cuda else (1024, 4096)
    if not cuda:
        torch.set_num_threads(1)
    found = {}
    for h in sequences:
        padded = range(h, h + PAD + 1, 8) if cuda else (h, h + PAD)
        best = min(seconds(rows, p, columns, device, dtype, rounds) for p in padded)
        found[h] = 2 * rows * columns * h / best
    return found


def main(argv=None):
    p = parser(__doc__)
    a = p.parse_args(argv)
    sequences = SEQUENCES[:3] if a.quick else SEQUENCES
    found = measure(sequences, 2 if a.quick else 5)
    peak = PEAK if torch.cuda.is_available() else max(found.values())
    shares = {h: rate / peak for h, rate in found.items()}
    path = result_file(a, "utilisation")
    keep(path, dict(machine=machine(), peak=peak, utilisation=shares))
    lines = [f"{h},{share:.4f}" for h, share in shares.items()]
    path.with_suffix(".csv").write_text("\n".join(["h,utilisation", *lines]) + "\n")
    print(machine())
    table(["h", "TFLOPS", "U"], [[h, f"{found[h] / 1e12:.3f}", f"{shares[h]:.3f}"] for h in found])
    print(f"peak {peak / 1e12:.3f} TFLOPS; {path.with_suffix('.csv')}")


if __name__ == "__main__":
    main()

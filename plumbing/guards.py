"""Is what engines serve what is trained? And what else ends a run that goes wrong without a crash.

Every so many updates the trainer computes the logprobs of a few sequences under its new weights, and
an engine that has just swapped does so too: their mean difference is `mismatch`, in nats a token. It
does not depend on how old samples are, nor on temperature, adapters or the loss.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import requests
import torch

from plumbing import lora
from plumbing.queues import read_json
from plumbing.samples import layout
from plumbing.secret import secret_header
from plumbing.supervise import DIRECT

# updates from one measurement to the next
EVERY = 20
# sequences that are compared, and tokens of each: an engine computes all logits of a prompt at once
SEQUENCES = 8
LONGEST = 2048
# of what may happen once or twice, and then ends the run
IN_A_ROW = 3


class Guards:
    """Looks at every step, on every rank alike; measures the mismatch, rank 0 of the trainer with one engine."""

    def __init__(self, config, run_dir, ranks):
        self.config = config
        self.run_dir = Path(run_dir)
        self.ranks = ranks
        self.in_a_row = Counter()
        self.measured = 0

    # ---- served = trained

    def is_due(self, version):
        """Is the mismatch to be measured at this version, which the engines get? The first one, then every 20th."""
        between = self.config.conventional_g or 1
        return version % (EVERY * between) == between

    @torch.no_grad()
    def measure(self, policy, batch, sender, version):
        """{mismatch, tokens} of this version, which was just pushed, and merge_survival of adapters; {} on other ranks, and if
        no engine answers.

        batch: a micro-batch whose first sequences are compared. Collective. Raises RuntimeError above the limit.
        """
        lengths = batch["lengths"][:SEQUENCES]
        tokens = batch["tokens"][: lengths.sum()]
        positions, _ = layout(lengths, batch["segment"][: len(tokens)])
        # engines tell logprobs of prompts at temperature 1, whatever the run's is
        logprobs = policy.logprobs(tokens, positions, 1.0)[0].cpu().numpy()
        of_adapters = lora.survival(policy.model)
        if self.ranks.rank != 0:
            return {}
        sender.wait()
        borders = np.flatnonzero(positions == 0)[1:]
        differences = []
        try:
            for ids, own in zip(np.split(tokens, borders), np.split(logprobs, borders)):
                served = self._engine_logprobs(ids[:LONGEST].tolist(), version)
                differences.append(np.abs(own[1 : len(ids[:LONGEST])] - served))
        except (requests.RequestException, RuntimeError, KeyError) as e:
            words = f"train: mismatch of version {version} not measured: {e}"
            print(words, flush=True)
            if self._lasts("unmeasured", True):
                raise RuntimeError(f"{words}; this was so {IN_A_ROW} times in a row") from None
            return {}
        self._lasts("unmeasured", False)
        differences = np.concatenate(differences)
        found = float(differences.mean())
        if not found <= self.config.highest_mismatch:
            raise RuntimeError(
                f"train: mismatch of {policy.model.config.model_type} is above {self.config.highest_mismatch:g} nats at version "
                f"{version}: {found:.1e}; engine and trainer logprobs differ. Does plumbing/model.py know this family? Else "
                "--dtype, --head_float32, logs/engine*.log; --mismatch_limit moves it; `bash run.sh doctor` looks closer"
            )
        return {"mismatch": found, "tokens": len(differences)} | of_adapters

    def _engine_logprobs(self, ids, version):
        """Logprobs [T-1] of a sequence as an engine's prompt; the engines take turns. RuntimeError if its version is another."""
        urls = read_json(self.run_dir / "queues" / "version.json")["engines"]
        self.measured += 1
        url = urls[self.measured % len(urls)] + "/inference/v1/generate"
        body = dict(token_ids=ids, sampling_params=dict(max_tokens=1, prompt_logprobs=0))
        how = dict(timeout=self.config.sync_timeout, proxies=DIRECT)
        answer = requests.post(url, json=body, headers=secret_header(self.run_dir), **how)
        answer.raise_for_status()
        answer = answer.json()
        served = answer["choices"][0]["weight_versions"][0]["version"]
        if served != str(version):
            raise RuntimeError(f"the engine has version {served}")
        return np.array(answer["prompt_logprobs"])

    # ---- every step

    def check(self, version, metrics):
        """Raise RuntimeError if steps in a row had gradients that are not finite."""
        not_finite = not math.isfinite(metrics["grad_norm"])
        if not_finite:
            print(f"train: step {version}: gradient not finite, weights stay", flush=True)
        if self._lasts("not_finite", not_finite):
            words = "had gradients that are not finite: lower --lr, or look at the samples"
            raise RuntimeError(f"train: {IN_A_ROW} steps in a row {words}")

    def _lasts(self, name, is_wrong):
        """Has it been wrong IN_A_ROW times in a row by now?"""
        self.in_a_row[name] = self.in_a_row[name] + 1 if is_wrong else 0
        return self.in_a_row[name] == IN_A_ROW

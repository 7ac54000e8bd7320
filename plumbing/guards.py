"""Guards: checks that end a run which would otherwise go on with wrong results.

The most important question is whether the engines serve the weights that are trained. It is asked
before the first step of every start of the trainer, after the first update, and after every 20th
update from then on. The trainer computes the logprobs of some sequences, and the engines, which
have just swapped in the same weights, compute them, too. The mean absolute difference per token is
`mismatch`, in nats. The age of samples, the temperature, adapters and the loss have no influence on
it. The trainer's own routers choose here, even with --replay_routing.
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

# number of updates from one measurement to the next
EVERY = 20
# number of samples whose sequences are compared; a sample with several segments has several
SEQUENCES = 8
# number of tokens that are compared of each: an engine computes all logits of a prompt at once
LONGEST = 2048
# number of times in a row that something must go wrong before it ends the run
IN_A_ROW = 3


class Guards:
    """Checks a run on every rank. For the mismatch, rank 0 asks the engines in turn."""

    def __init__(self, config, run_dir, ranks):
        self.config = config
        self.run_dir = Path(run_dir)
        self.ranks = ranks
        self.in_a_row = Counter()
        self.measured = 0

    # ---- served = trained

    def is_due(self, version):
        """Is the mismatch to be measured at this version?

        It is measured at the first update after version 0, and at every EVERY-th update from then
        on: with conventional_g 0 these are the versions 1, 21, 41, ...
        """
        between = self.config.conventional_g or 1
        return version % (EVERY * between) == between

    @torch.no_grad()
    def measure(self, policy, batch, sender, version):
        """{mismatch, tokens} of this version, which was just pushed: nats per token, and the number
        of tokens that were compared; with adapters also merge_survival.

        batch: a micro-batch whose first sequences are compared (its lengths [S], tokens [T] and
        segment [T]). Returns {} on other ranks than 0, and if an engine does not answer or has
        another version. Collective. Raises Stopped. Rank 0 lets the run end if the mismatch is
        above the limit, or if it could not be measured IN_A_ROW times in a row.
        """
        lengths = batch["lengths"][:SEQUENCES]
        tokens = batch["tokens"][: lengths.sum()]
        positions, _ = layout(lengths, batch["segment"][: len(tokens)])
        # Engines tell the logprobs of a prompt at temperature 1, whatever the run's is.
        logprobs = policy.logprobs(tokens, positions, 1.0)[0].cpu().numpy()
        merge_survival = lora.survival(policy.model)
        sender.wait()
        if self.ranks.rank != 0:
            return {}
        borders = np.flatnonzero(positions == 0)[1:]
        differences = []
        try:
            sequences = zip(np.split(tokens, borders), np.split(logprobs, borders))
            for ids, trained in sequences:
                ids = ids[:LONGEST]
                served = self._engine_logprobs(ids.tolist(), version)
                differences.append(np.abs(trained[1 : len(ids)] - served))
        except (requests.RequestException, RuntimeError, KeyError) as e:
            print(f"train: the mismatch of version {version} was not measured: {e}", flush=True)
            if self._lasts("unmeasured", True):
                self._end_run(
                    f"train: {IN_A_ROW} times in a row the mismatch could not be measured, last at "
                    f"version {version}: {e}. See logs/engine*.log; if the engines are only slow, "
                    "raise --sync_timeout, in which an engine must answer"
                )
            return {}
        self._lasts("unmeasured", False)
        differences = np.concatenate(differences)
        mismatch = float(differences.mean())
        limit = self.config.highest_mismatch
        if not mismatch <= limit:
            model_type = policy.model.config.model_type
            self._end_run(
                "train: engines and trainer disagree: the mean |difference of logprobs| of "
                f"{model_type} is {mismatch:.1e} nats at version {version}, the limit is "
                f"{limit:g}. Likely causes: plumbing/model.py does not compute {model_type} as "
                "engines do; --dtype or --head_float32 is too coarse for this model. See "
                "logs/engine*.log; `bash run.sh doctor` looks closer; --mismatch_limit raises the "
                "limit"
            )
        return {"mismatch": mismatch, "tokens": len(differences)} | merge_survival

    def _engine_logprobs(self, ids, version):
        """Logprobs [T - 1] of a sequence of T tokens, as the prompt of an engine; engines take
        turns.

        ids: a list. The result is float64. Raises RuntimeError if the engine has another version,
        KeyError if its answer has no logprobs, and what requests raises.
        """
        urls = read_json(self.run_dir / "queues" / "version.json")["engines"]
        self.measured += 1
        url = urls[self.measured % len(urls)] + "/inference/v1/generate"
        body = dict(token_ids=ids, sampling_params=dict(max_tokens=1, prompt_logprobs=0))
        answer = requests.post(
            url,
            json=body,
            headers=secret_header(self.run_dir),
            timeout=self.config.sync_timeout,
            proxies=DIRECT,
        )
        answer.raise_for_status()
        answer = answer.json()
        served = answer["choices"][0]["weight_versions"][0]["version"]
        if served != str(version):
            raise RuntimeError(f"the engine has version {served}")
        return np.array(answer["prompt_logprobs"])

    # ---- every step

    def check(self, version, metrics):
        """Let the run end if IN_A_ROW steps in a row had gradients that are not finite."""
        not_finite = not math.isfinite(metrics["grad_norm"])
        if not_finite:
            print(
                f"train: step {version}: the gradient is not finite, the weights stay as they are",
                flush=True,
            )
        if self._lasts("not_finite", not_finite):
            self._end_run(
                f"train: {IN_A_ROW} steps in a row had gradients that are not finite: lower --lr, "
                "or look at samples.jsonl"
            )

    # ---- the end of the run

    def _end_run(self, message):
        """Rank 0: let the run end with this error, after all ranks have saved their steps."""
        if self.ranks.rank == 0:
            self.ranks.fail(RuntimeError(message))

    def _lasts(self, name, is_wrong):
        """Has it been wrong IN_A_ROW times in a row by now?"""
        self.in_a_row[name] = self.in_a_row[name] + 1 if is_wrong else 0
        return self.in_a_row[name] == IN_A_ROW

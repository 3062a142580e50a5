"""llama.cpp as an oracle for whole files: the package `xllamacpp`, in a process of its own, which may crash.

`next_logprobs` and `tokenize` are our side. Run as a program, this file loads a model and prints, for each of
some runs of tokens, log p of every token that may come next, or the ids of some texts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISSING = importlib.util.find_spec("xllamacpp") is None


def next_logprobs(model: Path, runs: Sequence[Sequence[int]], plain: int) -> list[dict[int, float]]:
    """For each run of token ids, log p of every token after it, as llama.cpp computes it in fp32.

    `plain` is some token whose text is whole: a server says nothing of half a character.
    """
    answers = _ask(model, runs=list(map(list, runs)), plain=plain)
    return [{int(i): p for i, p in run.items()} for run in answers]


def tokenize(model: Path, texts: Sequence[str], framed: bool = False) -> list[list[int]]:
    """The ids of each text, special tokens of its own taken as such; with those around it if `framed`."""
    return _ask(model, texts=list(texts), framed=framed)


def _ask(model: Path, **question: Any) -> Any:
    asked = json.dumps({"model": str(model), **question})
    done = subprocess.run(
        [sys.executable, __file__], input=asked, capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0:
        log = [line for line in done.stderr.splitlines() if " E " in line or "rror" in line]
        raise RuntimeError(f"llama.cpp ended with {done.returncode}: {' | '.join(log[:4])}")
    return json.loads(done.stdout)


def _answer() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print what it likes
    import xllamacpp  # type: ignore[import-not-found]

    question = json.load(sys.stdin)
    server = xllamacpp.Server(_in_fp32_on_one_thread(xllamacpp, question["model"]))
    if "texts" in question:
        found = [_ids(server, text, question["framed"]) for text in question["texts"]]
    else:
        found = [_logprobs(server, run, question["plain"]) for run in question["runs"]]
    json.dump(found, answers)
    answers.flush()
    os._exit(0)  # the server's threads have nothing more to do


def _logprobs(server: Any, run: list[int], plain: int) -> dict[int, float]:
    reply = server.handle_completions(
        {
            "prompt": run, "max_tokens": 1, "n_probs": 1_000_000, "post_sampling_probs": False,
            "cache_prompt": False, "ignore_eos": True, "logit_bias": [[plain, 1000]],
        }
    )  # fmt: skip
    following = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in following}


def _ids(server: Any, text: str, framed: bool) -> list[int]:
    asked = json.dumps({"content": text, "parse_special": True, "add_special": framed})
    request = urllib.request.Request(f"{server.listening_address}/tokenize", asked.encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["tokens"]


def _in_fp32_on_one_thread(library: Any, model: str) -> Any:
    parameters = library.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 256
    parameters.n_parallel, parameters.n_gpu_layers = 1, 0
    parameters.warmup = parameters.fit_params = parameters.endpoint_props = False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_type_k = parameters.cache_type_v = library.ggml_type.GGML_TYPE_F32
    # Its fast attention sums in halves.
    parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.swa_full = True
    return parameters


if __name__ == "__main__":
    _answer()

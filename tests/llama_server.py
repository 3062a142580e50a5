"""llama.cpp as an oracle for whole files: the package `xllamacpp`, in a process of its own, which may crash.

The functions without an underscore are our side. Run as a program, this file loads a model, answers one
question about each of some runs of tokens or texts, and ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MISSING = importlib.util.find_spec("xllamacpp") is None


class Step(NamedTuple):
    """A token that llama.cpp wrote, and log p of the likeliest there."""

    id: int
    best: dict[int, float]


def next_logprobs(model: Path, runs: Sequence[Sequence[int]], plain: int) -> list[dict[int, float]]:
    """For each run of token ids, log p of every token after it, as llama.cpp computes it in fp32.

    `plain` is some token whose text is whole: a server says nothing of half a character.
    """
    answers = _ask("next", model, runs, plain=plain)
    return [{int(i): p for i, p in run.items()} for run in answers]


def logprobs(model: Path, runs: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each run, log p of each of its tokens after those before it. None may be half a character."""
    return _ask("logprobs", model, runs, context=1024)


def greedy(model: Path, runs: Sequence[Sequence[int]], count: int) -> list[list[Step]]:
    """The `count` likeliest tokens after each run, one after the other."""
    answers = _ask("greedy", model, runs, count=count)
    return [[Step(i, {int(k): p for k, p in best.items()}) for i, best in run] for run in answers]


def tokenize(
    model: Path, texts: Sequence[str], framed: bool = False, special: bool = True
) -> list[list[int]]:
    """The ids of each text, with those around it if `framed`; `special` tokens of its own taken as such."""
    return _ask("tokenize", model, texts, framed=framed, special=special)


def detokenize(model: Path, runs: Sequence[Sequence[int]]) -> list[str]:
    """The text of each run, special tokens written out."""
    return _ask("detokenize", model, runs)


def _ask(what: str, model: Path, about: Sequence[Any], context: int = 256, **options: Any) -> Any:
    question = {
        "what": what,
        "model": str(model),
        "context": context,
        "about": [run if isinstance(run, str) else list(run) for run in about],
    }
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps({**question, "options": options}),
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    if done.returncode != 0:
        log = [line for line in done.stderr.splitlines() if " E " in line or "rror" in line]
        raise RuntimeError(f"llama.cpp ended with {done.returncode}: {' | '.join(log[:4])}")
    return json.loads(done.stdout)


# --- the other side -----------------------------------------------------------------------------


def _answer() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print what it likes
    import xllamacpp  # type: ignore[import-not-found]

    question = json.load(sys.stdin)
    server = xllamacpp.Server(_in_fp32_on_one_thread(xllamacpp, question["model"], question["context"]))
    answer = _ANSWERS[question["what"]]
    json.dump([answer(server, item, **question["options"]) for item in question["about"]], answers)
    answers.flush()
    os._exit(0)  # the server's threads have nothing more to do


def _next_logprobs(server: Any, run: list[int], plain: int) -> dict[int, float]:
    (step,) = _write(server, run, 1, n_probs=1_000_000, logit_bias=[[plain, 1000]])
    return _best(step)


def _logprobs(server: Any, run: list[int]) -> list[float]:
    """Each token is forced by a bias, which what is said of its probability leaves out."""
    steps = (
        _write(server, run[:i], 1, cache_prompt=True, logit_bias=[[run[i], 1000]]) for i in range(1, len(run))
    )
    return [step["logprob"] for (step,) in steps]


def _greedy(server: Any, run: list[int], count: int) -> list[tuple[int, dict[int, float]]]:
    return [(step["id"], _best(step)) for step in _write(server, run, count, n_probs=5, temperature=0)]


def _write(server: Any, run: list[int], count: int, **options: Any) -> list[dict[str, Any]]:
    plain = {"n_probs": 1, "post_sampling_probs": False, "cache_prompt": False, "ignore_eos": True}
    reply = server.handle_completions({"prompt": run, "max_tokens": count, **plain, **options})
    return reply["choices"][0]["logprobs"]["content"]


def _best(step: dict[str, Any]) -> dict[int, float]:
    return {token["id"]: token["logprob"] for token in step["top_logprobs"]}


def _tokenize(server: Any, text: str, framed: bool, special: bool) -> list[int]:
    asked = {"content": text, "parse_special": special, "add_special": framed}
    return _post(server, "tokenize", asked)["tokens"]


def _detokenize(server: Any, run: list[int]) -> str:
    return _post(server, "detokenize", {"tokens": run})["content"]


def _post(server: Any, place: str, asked: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{server.listening_address}/{place}", json.dumps(asked).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "next": _next_logprobs,
    "logprobs": _logprobs,
    "greedy": _greedy,
    "tokenize": _tokenize,
    "detokenize": _detokenize,
}


def _in_fp32_on_one_thread(library: Any, model: str, context: int) -> Any:
    parameters = library.CommonParams()
    parameters.model.path = model
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
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

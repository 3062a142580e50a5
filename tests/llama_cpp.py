"""llama.cpp as an oracle: the package `cyllama`, in a process and perhaps a Python of its own.

It is no dependency: LLAMA_CPP_PYTHON names the Python that has it and numpy, by default this one, and
whoever uses it skips where there is none. `LlamaCpp` is our side; the rest of the file runs on the other.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)


def is_here() -> bool:
    return subprocess.run([PYTHON, "-c", "import cyllama, numpy"], capture_output=True).returncode == 0


class Next(NamedTuple):
    """What llama.cpp expects after a run of tokens: the likeliest ids with their logits, and log p of one."""

    ids: list[int]
    logits: list[float]
    logprob: float


class LlamaCpp:
    """A model in llama.cpp, on one thread, with everything it caches in fp32."""

    def __init__(self, model: Path, context: int = 1024) -> None:
        self._process = subprocess.Popen(
            [PYTHON, __file__, str(model), str(context)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def tokenize(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return self._ask("tokenize", texts=list(texts), special=special)

    def detokenize(self, runs: Sequence[Sequence[int]]) -> list[str]:
        return self._ask("detokenize", runs=[list(ids) for ids in runs])

    def score(self, ids: Sequence[int]) -> list[Next]:
        """What follows each of `ids` but the last; `logprob` is that of the token that does follow."""
        return [Next(*step) for step in self._ask("score", ids=list(ids))]

    def greedy(self, ids: Sequence[int], count: int) -> list[Next]:
        """The likeliest continuation, a token at a time."""
        return [Next(*step) for step in self._ask("greedy", ids=list(ids), count=count)]

    def _ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([what, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"llama.cpp ended with {self._process.wait()} when asked to {what}")
        return json.loads(answer)


# --- the other side -----------------------------------------------------------------------------


def vocabulary_size(model: Any) -> int:
    return model.get_vocab().n_vocab


class Oracle:
    def __init__(self, path: str, context: int) -> None:
        from cyllama.llama import llama_cpp  # type: ignore[import-not-found]

        self._library = llama_cpp
        llama_cpp.disable_logging()
        llama_cpp.ggml_backend_load_all()
        loading = llama_cpp.LlamaModelParams()
        loading.n_gpu_layers = 0
        # `get_logits_ith` asks the model for its `n_vocab`, which only its vocabulary has.
        with_size = type("LlamaModel", (llama_cpp.LlamaModel,), {"n_vocab": property(vocabulary_size)})
        self._model = with_size(path, loading)
        self._vocab = self._model.get_vocab()
        self._context = context

    def tokenize(self, texts: list[str], special: bool) -> list[list[int]]:
        return [self._vocab.tokenize(text, False, special) if text else [] for text in texts]

    def detokenize(self, runs: list[list[int]]) -> list[str]:
        return [self._vocab.detokenize(ids, 100_000, False, True) for ids in runs]

    def score(self, ids: list[int]) -> list[list[Any]]:
        context, _ = self._begin(ids, every=True)
        return [self._next(context, i, following) for i, following in enumerate(ids[1:])]

    def greedy(self, ids: list[int], count: int) -> list[list[Any]]:
        context, batch = self._begin(ids, every=False)
        steps = [self._next(context, -1)]
        while len(steps) < count:
            batch.set_batch([steps[-1][0][0]], len(ids) + len(steps) - 1, True)
            context.decode(batch)
            steps.append(self._next(context, -1))
        return steps

    def _begin(self, ids: list[int], every: bool) -> tuple[Any, Any]:
        parameters = self._library.LlamaContextParams()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = self._context
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.type_k = parameters.type_v = 0  # F32
        parameters.swa_full = True
        context = self._library.LlamaContext(self._model, parameters)
        batch = self._library.LlamaBatch(n_tokens=self._context, embd=0, n_seq_max=1)
        batch.set_batch(ids, 0, every)
        context.decode(batch)
        return context, batch

    def _next(self, context: Any, i: int, following: int | None = None) -> list[Any]:
        import numpy as np

        logits = np.array(context.get_logits_ith(i))
        best = np.argpartition(logits, -5)[-5:]
        best = best[np.argsort(-logits[best])]
        wanted = best[0] if following is None else following
        logprob = logits[wanted] - logits[best[0]] - np.log(np.exp(logits - logits[best[0]]).sum())
        return [best.tolist(), logits[best].tolist(), float(logprob)]


if __name__ == "__main__":
    oracle = Oracle(sys.argv[1], int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print what it likes
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(getattr(oracle, what)(**arguments)), file=answers, flush=True)

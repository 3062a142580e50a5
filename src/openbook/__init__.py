"""Openbook: decoder-only Transformers whose books are open.

    import openbook as ob

    spec = ob.spec("qwen3-0.6b")         # a preset, a folder, a config.json, a .gguf file or a dict
    book = ob.ledger(spec)               # every weight, every step, every byte; no torch
    lm = ob.load("path/or/name")         # the running model, every tensor checked against the ledger

`spec` and `ledger` are packages as well as the functions that most people want from them, so
`ob.ledger(spec)` and `from openbook.ledger import Workload` both hold.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openbook.ledger import Workload
from openbook.spec.model import ModelSpec

if TYPE_CHECKING:
    from openbook.ledger import Ledger
    from openbook.lm import LanguageModel

    def spec(source: str | Path | dict[str, Any] | ModelSpec) -> ModelSpec: ...

    def ledger(source: str | Path | dict[str, Any] | ModelSpec, dtype: str = "bf16") -> Ledger: ...


__version__ = "0.1.0"

__all__ = ["ModelSpec", "Workload", "ledger", "load", "spec"]


def load(source: str | Path, **options: Any) -> LanguageModel:
    """The running model of a folder, a .gguf file or a fetched model's name: see `openbook.lm.load`."""
    from openbook.lm import load

    return load(source, **options)


class _SpecPackage(ModuleType):
    def __call__(self, source: str | Path | dict[str, Any] | ModelSpec) -> ModelSpec:
        """The spec of a preset, a folder, a config.json, a .gguf file or a dict; needs no torch."""
        from openbook.sources import resolve

        return resolve(source).spec


class _LedgerPackage(ModuleType):
    def __call__(self, source: str | Path | dict[str, Any] | ModelSpec, dtype: str = "bf16") -> Ledger:
        """The ledger of a spec, or of anything that `openbook.spec` takes; needs no torch."""
        from openbook.ledger import Ledger
        from openbook.sources import resolve

        return Ledger(resolve(source).spec, dtype)


sys.modules["openbook.spec"].__class__ = _SpecPackage
sys.modules["openbook.ledger"].__class__ = _LedgerPackage

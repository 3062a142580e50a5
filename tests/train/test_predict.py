"""Predicted memory against what autograd keeps, and against what a process of its own really held."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openbook.bench_train import Shape, _in_a_new_process, peak_of
from openbook.model import Decoder, init_weights
from openbook.spec.hf import from_config
from openbook.spec.model import ModelSpec
from openbook.train.layers import use_fast_modules
from openbook.train.loop import batch_loss
from openbook.train.predict import predict
from openbook.train.recipe import TrainPart


def llama(**changes: object) -> ModelSpec:
    sizes = {
        "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 6, "vocab_size": 512, "max_position_embeddings": 512,
    }  # fmt: skip
    return from_config({"model_type": "llama", **sizes, **changes})


def recipe(shape: Shape) -> TrainPart:
    return TrainPart(steps=1, rows=shape.rows, lr=1e-4, dtype="bf16" if shape.dtype == "bf16" else "fp32")


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(dtype: str, kv_heads: int):
    """To 2 %: angles, and which of the matrices that are looked up are cast, are not counted exactly."""
    spec, shape = llama(num_key_value_heads=kv_heads), Shape(2, 256, dtype)
    decoder = init_weights(Decoder(spec))
    use_fast_modules(decoder)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        batch_loss(decoder, shape.batch(512), bf16=dtype == "bf16")
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    for parameter in decoder.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    items = {row.name: row.bytes for row in predict(spec, recipe(shape), 256, packed=False).memory}
    assert items["activations"] == pytest.approx(sum(sizes.values()), rel=0.02)


WIDE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096}
MEASURED = {
    "one row, bound by its weights": (WIDE, Shape(1, 256)),
    "wide": (WIDE, Shape(8, 512)),
    "wide in bf16": (WIDE, Shape(8, 512, "bf16")),
    "groups of heads": ({**WIDE, "num_key_value_heads": 2}, Shape(4, 512)),
    "a tied head": ({**WIDE, "num_hidden_layers": 4, "tie_word_embeddings": True}, Shape(4, 512)),
    "a large vocabulary": ({**WIDE, "num_hidden_layers": 4, "vocab_size": 32_000}, Shape(2, 512)),
}
SLICE = ["one row, bound by its weights"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process's peak")
@pytest.mark.parametrize("name", list(MEASURED) if os.environ.get("OPENBOOK_FULL") == "1" else SLICE)
def test_the_peak_of_a_process_is_predicted(name: str):
    """To 10 %, over what the process held before it had a model; but for two in which glibc's heap has more
    holes (11 and 13 % were measured)."""
    sizes, shape = MEASURED[name]
    off = 0.15 if name in ("wide in bf16", "a tied head") else 0.1
    spec = llama(**sizes)
    measured = _in_a_new_process(peak_of, "openbook", spec, shape, Path("none"), 2)
    assert predict(spec, recipe(shape), shape.length, packed=False).bytes == pytest.approx(measured, rel=off)

"""What a recipe stands for: the FLOPs of its steps, against the model's own matrices and masks."""

import numpy as np
import pytest
import torch
from torch import nn

from openbook.ledger import Workload, ledger
from openbook.model import Decoder
from openbook.model.attention import visible
from openbook.spec.model import Attention, ModelSpec
from openbook.train.pack import IGNORED, Batch
from openbook.train.recipe import Recipe, recipe_of
from openbook.train.start import flops_of
from variants import VARIANTS

LENGTH = 21
ROWS = {
    "several documents": [(11, 3, 7), (1, 12, 8)],
    "padding": [(2, 9, 6), (13,), (1,)],
    "one document a row": [(21,), (21,)],
}


def rows_of(lengths: list[tuple[int, ...]]) -> Batch:
    """Rows of documents of these lengths, and padding."""
    positions = np.full((len(lengths), LENGTH), -1)
    documents = positions.copy()
    for b, row in enumerate(lengths):
        positions[b, : sum(row)] = [t for n in row for t in range(n)]
        documents[b, : sum(row)] = [10 * b + d for d, n in enumerate(row) for _ in range(n)]
    return Batch(np.zeros_like(positions), positions, np.full_like(positions, IGNORED), documents)


def recipe(**parts: object) -> Recipe:
    data = {"sources": ["stdlib"], "vocab": 300, "length": LENGTH}
    train = {"steps": 7, "rows": 3, "lr": 1e-3}
    return recipe_of("test", {"model": {"preset": "gpt2"}, "data": data, "train": train, **parts})


def counted(spec: ModelSpec, batch: Batch) -> int:
    """FLOPs of a forward pass: 2 for each weight of a matrix that a token meets, and for each number that a
    pair of tokens multiplies, the pairs being those that the layer's mask lets through."""
    with torch.device("meta"):
        matrices = [module for module in Decoder(spec).modules() if isinstance(module, nn.Linear)]
    positions, documents = torch.from_numpy(batch.positions), torch.from_numpy(batch.documents)
    real = positions >= 0
    flops = 2 * int(real.sum()) * sum(matrix.weight.numel() for matrix in matrices)
    for attn in (block.attn for block in spec.layers):
        pairs = int(visible(positions, positions, attn.window, documents)[:, 0][real].sum())
        sizes = (
            2 * attn.head_dim if isinstance(attn, Attention) else attn.nope_dim + attn.rope_dim + attn.v_dim
        )
        flops += 2 * attn.n_heads * sizes * pairs
    return flops


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", ["gpt2", "windows", "chunks", "latent"])
def test_the_flops_of_a_step_are_those_of_its_documents(name: str, rows: list[tuple[int, ...]]):
    spec, batch = VARIANTS[name], rows_of(rows)
    assert batch.lengths == tuple(n for row in rows for n in row)
    assert flops_of(recipe(), spec)(batch.lengths) == 3 * counted(spec, batch)


def test_rows_of_one_document_take_what_is_predicted_and_all_others_less():
    spec = VARIANTS["windows"]
    flops = flops_of(recipe(), spec)
    most = ledger(spec, "fp32").totals(Workload("train", batch=2, new=LENGTH)).flops
    assert flops(rows_of(ROWS["one document a row"]).lengths) == most
    assert flops(rows_of(ROWS["several documents"]).lengths) < most


def test_adapters_take_two_forward_passes():
    spec, batch = VARIANTS["llama"], rows_of(ROWS["padding"])
    about = recipe(model={"from": "gpt2"}, lora={"rank": 4})
    assert flops_of(about, spec)(batch.lengths) == 2 * counted(spec, batch)

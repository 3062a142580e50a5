"""The random checkpoints of `checkpoints`, each made once."""

from collections.abc import Callable

import pytest

from checkpoints import Checkpoint, random_model
from openbook.trace.hf import load_transformers
from openbook.weights.load import load_decoder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """`checkpoint("llama")`: one model in both programs."""
    made: dict[str, Checkpoint] = {}

    def make(family: str) -> Checkpoint:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            random_model(family).save_pretrained(folder)
            made[family] = Checkpoint(load_decoder(folder), load_transformers(folder), folder)
        return made[family]

    return make

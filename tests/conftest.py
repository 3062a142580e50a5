"""What every test shares: the real checkpoints, one thread, and hypothesis without a clock."""

import os
from pathlib import Path

# Before torch is imported anywhere: two test runs side by side must not fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of `pytest -n 2`'s
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["NO_COLOR"] = "1"

import hypothesis
import pytest
from jaxtyping import install_import_hook

# The shapes in signatures (`Float[Tensor, "B T D"]`) are checked here, and nowhere else: they cost time.
install_import_hook(["openbook.model", "openbook.infer.cache"], "beartype.beartype")

from openbook import models  # noqa: E402

hypothesis.settings.register_profile("openbook", deadline=None, print_blob=True)
hypothesis.settings.load_profile("openbook")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; fetched once, then kept in OPENBOOK_HOME."""
    try:
        return models.fetch("smollm2-135m")
    except models.FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M as a GGUF file. It comes under terms that a person accepts, so no test fetches it."""
    try:
        return models.fetched_path("gemma3-270m")
    except models.NotFetchedError as error:
        pytest.skip(str(error))

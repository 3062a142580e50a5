"""A server that has opened a tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from openbook.serve.explorer import Explorer
from served import SPEC, STORE, byte_tokenizer, client_of, good, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", SPEC, byte_tokenizer())


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return Explorer(STORE)


@pytest.fixture(scope="module")
def client(explorer: Explorer) -> Iterator[TestClient]:
    with client_of(explorer) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: TestClient, folder: Path) -> dict[str, Any]:
    """The tiny model, opened."""
    return good(client.post("/api/models", json={"name": str(folder)}))


@pytest.fixture(scope="module")
def run(client: TestClient, model: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """`run(text="...")` -> the run."""
    return lambda **body: good(client.post(f"/api/models/{model['id']}/runs", json=body))

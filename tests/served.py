"""Tiny models in folders, with a tokenizer of bytes and a chat template, and a client of the explorer."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, models, pre_tokenizers

import variants
from openbook.serve.app import make_app
from openbook.serve.explorer import Explorer
from openbook.spec.model import ModelSpec
from openbook.weights.save import save_own

PORT = 8009
ADDRESS = f"http://127.0.0.1:{PORT}"
STORE = 40_000_000
CONTROL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCABULARY = 272
"""Rows of the tiny models: more than the tokenizer's 258 tokens, as many models have."""

SPEC = variants.model(
    variants.block(attn=variants.attention(window=5)),
    variants.block(),
    variants.block(),
    vocab_size=VOCABULARY,
)


def byte_tokenizer() -> str:
    """256 tokens of a byte each, id = byte, and two control tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE({spelled[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer.to_str()


def write_model(folder: Path, spec: ModelSpec, tokenizer: str | None = None, **config: Any) -> Path:
    """A folder with noise in every weight; with a tokenizer it has a chat template as well."""
    save_own(variants.noisy_decoder(spec), folder)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
        about = {"chat_template": TEMPLATE, "eos_token": "<|end|>", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def client_of(explorer: Explorer) -> TestClient:
    return TestClient(make_app(explorer, PORT), base_url=ADDRESS)


def good(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: Any, status: int) -> dict[str, str]:
    """The error that an answer tells, which has this status."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"what", "why", "next"}
    assert "Traceback" not in response.text
    return error

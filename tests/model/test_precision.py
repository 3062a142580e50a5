"""How far the reduced paths are from fp32, on a real model: a stated bound on the KL divergence."""

import pytest
import torch
import torch.nn.functional as F

from openbook.infer.generate import cache_for
from openbook.lm import LanguageModel, load

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "def fibonacci(n):",
    "Explain why the sky is blue in two sentences.",
]


@torch.inference_mode()
def log_probabilities(lm: LanguageModel, token_by_token: bool) -> torch.Tensor:
    """[tokens, V] of all positions of the prompts, read at once or one token after the other."""
    rows = []
    for question in QUESTIONS:
        ids = torch.tensor([lm.chat_ids([{"role": "user", "content": question}])])
        if token_by_token:
            cache = cache_for(lm.decoder, 1, ids.shape[1])
            logits = torch.cat([lm.engine(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])], 1)
        else:
            logits = lm.engine(ids)
        rows.append(F.log_softmax(logits[0].double(), -1))  # in fp32 the sum over V alone is off by 1e-8
    return torch.cat(rows)


@pytest.mark.model
def test_bf16_and_quantised_paths_stay_near_fp32(smollm2):
    exact = log_probabilities(load(smollm2, dtype="fp32", native=False), token_by_token=False)
    # Bounds in nats a token, the mean over all positions of four prompts.
    paths = {
        "native fp32 steps": (load(smollm2, dtype="fp32"), True, 1e-8),
        "bf16 prompts": (load(smollm2, dtype="bf16"), False, 2e-3),
        "bf16 steps": (load(smollm2, dtype="bf16"), True, 5e-4),
        "steps from quantised blocks": (load(smollm2), True, 3e-4),
    }
    for name, (lm, token_by_token, bound) in paths.items():
        got = log_probabilities(lm, token_by_token)
        divergence = (exact.exp() * (exact - got)).sum(-1).mean().item()
        agreement = (exact.argmax(-1) == got.argmax(-1)).float().mean().item()
        print(f"{name}: KL {divergence:.2e}, same first choice {agreement:.3f}")
        assert abs(divergence) <= bound, (name, divergence)
        assert agreement >= 0.95, (name, agreement)

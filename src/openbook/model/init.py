"""Starting values. Each parameter's depend on the seed and its own name alone, so that they are the same
on any number of machines and in whatever order the parameters are made."""

import hashlib

import torch
from torch import nn

from openbook.model.decoder import Decoder
from openbook.model.norm import Norm


def init_weights(decoder: Decoder, seed: int = 0, std: float = 0.02) -> Decoder:
    """Fills every parameter in place: matrices N(0, std²), those that write to the residual stream
    divided by √(2L) (GPT-2, section 2.3), biases, sinks and corrections 0, norms the identity. Returns the
    decoder."""
    residual = std / (2 * decoder.spec.n_layers) ** 0.5
    for path, module in decoder.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if module is decoder.head and name == "weight" and decoder.spec.head.tied:
                continue
            _fill(
                module,
                name,
                parameter,
                f"{path}.{name}",
                seed,
                residual if path.endswith((".o", ".down")) else std,
            )
    return decoder


@torch.no_grad()
def _fill(module: nn.Module, name: str, parameter: nn.Parameter, path: str, seed: int, std: float) -> None:
    if name in ("bias", "sinks", "correction"):
        parameter.zero_()
    elif isinstance(module, Norm):
        parameter.fill_(1.0 - module.spec.offset)
    else:
        values = torch.empty(parameter.shape).normal_(0.0, std, generator=generator_of(seed, path))
        parameter.copy_(values)


def generator_of(seed: int, name: str) -> torch.Generator:
    """The random numbers that belong to a parameter: a function of the seed and of its name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))

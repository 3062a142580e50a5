"""Generation: the KV cache, the choice of the next token, and the loop that puts them together."""

from openbook.infer.batch import generate_batch
from openbook.infer.cache import Cache, CacheFullError
from openbook.infer.generate import Finish, Stats, Token, cache_for, generate, reuse
from openbook.infer.sample import NonFiniteLogitsError, RequestError, Sampler, SamplingParams

__all__ = [
    "Cache",
    "CacheFullError",
    "Finish",
    "NonFiniteLogitsError",
    "RequestError",
    "Sampler",
    "SamplingParams",
    "Stats",
    "Token",
    "cache_for",
    "generate",
    "generate_batch",
    "reuse",
]

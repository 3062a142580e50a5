"""Generation: the KV cache, the choice of the next token, and the loop that puts them together."""

from openbook.infer.cache import Cache, CacheFullError
from openbook.infer.sample import NonFiniteError, RequestError, Sampler, SamplingParams

__all__ = ["Cache", "CacheFullError", "NonFiniteError", "RequestError", "Sampler", "SamplingParams"]

"""The ledger: every weight, step, FLOP and byte of a model, from its spec alone and without torch.

from openbook.ledger import Workload, ledger

book = ledger(spec)
book.params.total
book.totals(Workload("decode", past=1000)).flops
"""

from __future__ import annotations

from functools import cached_property

from openbook.ledger import memory as _memory
from openbook.ledger import ops as _ops
from openbook.ledger import tensors as _tensors
from openbook.ledger.memory import RECIPES, CacheRow, Memory, MemoryRow, Recipe
from openbook.ledger.ops import CONVENTIONS, Convention, OpRow, Totals, Workload
from openbook.ledger.tensors import DEFINITIONS, DTYPES, LedgerError, Params, Section, TensorRow
from openbook.spec.model import Experts, LatentAttention, ModelSpec

__all__ = [
    "CONVENTIONS", "DEFINITIONS", "DTYPES", "RECIPES",
    "CacheRow", "Ledger", "LedgerError", "Memory", "MemoryRow", "OpRow", "Params", "Recipe", "Section",
    "TensorRow", "Totals", "Workload", "ledger",
]  # fmt: skip


class Ledger:
    """The books of one model whose weights are of one dtype. All counts are exact Python integers.

    Sections (`tensor_sections`, `op_sections`) hold each kind of layer once and are what totals are
    made of; `tensors` and `ops` write every layer out.
    """

    def __init__(self, spec: ModelSpec, dtype: str = "bf16") -> None:
        self.spec = spec
        self.dtype = _tensors.dtype_name(dtype)

    def __repr__(self) -> str:
        return f"Ledger({self.spec.name or 'unnamed'}: {self.params.total:,} parameters, {self.dtype})"

    @cached_property
    def kinds(self) -> _tensors.LayerKinds:
        """The distinct blocks, each with the layers that use it."""
        return _tensors.layer_kinds(self.spec)

    # --- weights ---

    @cached_property
    def tensor_sections(self) -> list[Section[TensorRow]]:
        """The weights, each kind of layer once."""
        return _tensors.tensor_sections(self.spec, self.kinds, self.dtype)

    @cached_property
    def tensors(self) -> list[TensorRow]:
        """Every weight under its full name, in the order of a forward pass."""
        return list(_tensors.tensor_rows(self.tensor_sections, self.spec.n_layers))

    @cached_property
    def params(self) -> Params:
        """The number of parameters under every definition in use."""
        return _tensors.count_params(self.tensor_sections)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each storage once."""
        return _tensors.sum_sections(self.tensor_sections, lambda row: 0 if row.tie else row.bytes)

    # --- steps ---

    def op_sections(self, workload: Workload) -> list[Section[OpRow]]:
        """The steps of a forward pass, each kind of layer once."""
        return _ops.op_sections(self.spec, self.kinds, workload, self.dtype)

    def ops(self, workload: Workload) -> list[OpRow]:
        """Every step of a forward pass under its full name, in the order in which it runs."""
        return list(_ops.op_rows(self.op_sections(workload), self.spec.n_layers))

    def totals(self, workload: Workload) -> Totals:
        """FLOPs and bytes of all steps together; `conventions` says what they mean."""
        return _ops.sum_ops(self.op_sections(workload), workload)

    def conventions(self, workload: Workload) -> list[str]:
        """What has to be said beside a total of FLOPs and bytes of this model."""
        said = workload.conventions()
        if any(isinstance(block.mlp, Experts) for block, _ in self.kinds):
            router = self.totals(workload).router_flops
            said += [f"routers in ({router:,})", "at most min(E, B·T·A) experts' weights are read"]
        latent = [block.attn for block, _ in self.kinds if isinstance(block.attn, LatentAttention)]
        if latent:
            absorbed = workload.absorbs(latent[0])
            said.append(f"latents {'met by absorbed queries' if absorbed else 'expanded to keys and values'}")
        return said

    def flops_per_token(self, position: int = 0) -> int:
        """Forward FLOPs of one token that comes after `position` cached ones, its logits included.

        This is one step of generation with a KV cache, and so the sum over a sequence's positions is
        the FLOPs of the whole sequence under the `causal` convention. (Not with latent attention, which
        brings a single query to the latents, but expands those of a whole sequence.)
        """
        return self.totals(Workload("decode", past=position)).flops

    def generation_flops(
        self, prompt: int, new: int, cached: bool = True, attention: Convention = "causal"
    ) -> int:
        """Forward FLOPs of writing `new` tokens after a prompt of `prompt` tokens.

        The prompt's own pass gives the first new token. With a KV cache every further one costs one
        token's pass; without it (`cached=False`) the whole text is computed anew each time.
        """
        if cached:
            reading = self.totals(Workload("prefill", new=prompt, attention=attention)).flops
            if new == 1:
                return reading
            # One by one or side by side, new tokens see the same pairs. One by one they absorb.
            writing = Workload("decode", new=new - 1, past=prompt, latents="absorbed")
            return reading + self.totals(writing).flops
        passes = (Workload("prefill", new=prompt + i, attention=attention) for i in range(new))
        return sum(self.totals(workload).flops for workload in passes)

    def bytes_per_token(self, position: int = 0, batch: int = 1, dtype: str | None = None) -> int:
        """Bytes read for one decode step of `batch` sequences: the weights once, and every cache.

        `dtype` is that of the cache. Divided by the memory's bandwidth it bounds a step's time.
        """
        totals = self.totals(Workload("decode", batch=batch, past=position, dtype=dtype))
        return totals.weight_bytes + totals.kv_read

    # --- memory ---

    def _cache_dtype(self, dtype: str | None) -> str:
        return Workload().activation_dtype(self.dtype) if dtype is None else _tensors.dtype_name(dtype)

    def cache(
        self, batch: int = 1, length: int = 1, dtype: str | None = None, windows: bool = True
    ) -> list[CacheRow]:
        """The KV cache of `batch` sequences of `length` tokens, by what the layers keep of a token.

        A layer with a window holds at most that many tokens; `windows=False` prices a cache that holds
        all tokens in every layer.
        """
        return _memory.cache_rows(self.kinds, batch, length, self._cache_dtype(dtype), windows)

    def kv_bytes(self, batch: int, length: int, dtype: str | None = None, windows: bool = True) -> int:
        """Bytes of the whole cache: latent attention keeps its latents, windows hold what they show."""
        return sum(row.bytes for row in self.cache(batch, length, dtype, windows))

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes that one token adds to the KV cache of all layers, windows ignored."""
        return self.kv_bytes(1, 1, dtype, windows=False)

    def kv_bytes_per_token_expanded(self, dtype: str | None = None) -> int:
        """The same if latent attention kept the keys and values of every head, as some programs do."""
        return sum(row.expanded_bytes for row in self.cache(1, 1, dtype, windows=False))

    def memory(self, workload: Workload, recipe: Recipe | str | None = None) -> Memory:
        """What the workload holds in memory at once, item by item.

        `recipe` (one of `RECIPES`, by name or itself) is how a training run keeps its weights, gradients
        and optimizer states; None picks the usual one for the ledger's dtype.
        """
        if isinstance(recipe, str):
            if recipe not in RECIPES:
                raise LedgerError(f"unknown training recipe {recipe!r}: use one of {', '.join(RECIPES)}")
            recipe = RECIPES[recipe]
        return _memory.memory_of(
            self.spec,
            self.kinds,
            self.params.total,
            self.weight_bytes,
            self.op_sections(workload),
            workload,
            self.dtype,
            recipe,
        )


def ledger(spec: ModelSpec, dtype: str = "bf16") -> Ledger:
    """The books of a model whose weights are stored in `dtype` (fp32, bf16, q8_0, ...)."""
    return Ledger(spec, dtype)

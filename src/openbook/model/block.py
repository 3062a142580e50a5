"""One layer: attention and feed-forward around a residual stream."""

from jaxtyping import Float
from torch import Tensor, nn

from openbook.model.attention import Attention, LayerCache, Place
from openbook.model.experts import Experts
from openbook.model.latent import LatentAttention
from openbook.model.mlp import Mlp
from openbook.model.norm import norm_or_identity
from openbook.spec.model import Attention as AttentionSpec
from openbook.spec.model import Block as BlockSpec
from openbook.spec.model import Experts as ExpertsSpec
from openbook.spec.model import LatentAttention as LatentSpec
from openbook.spec.model import Mlp as MlpSpec


class Block(nn.Module):
    """See `openbook.spec.model.Block` for the formula; an absent norm is the identity."""

    def __init__(self, spec: BlockSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.attn = attention(spec.attn, d_model)
        self.mlp = feed_forward(spec.mlp, d_model)
        self.attn_norm = norm_or_identity(spec.attn_norm, d_model)
        self.attn_out_norm = norm_or_identity(spec.attn_out_norm, d_model)
        self.attn_add_norm = norm_or_identity(spec.attn_add_norm, d_model)
        self.mlp_norm = norm_or_identity(spec.mlp_norm, d_model)
        self.mlp_out_norm = norm_or_identity(spec.mlp_out_norm, d_model)
        self.mlp_add_norm = norm_or_identity(spec.mlp_add_norm, d_model)
        self.end_norm = norm_or_identity(spec.end_norm, d_model)

    def forward(
        self, x: Float[Tensor, "B T D"], place: Place, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        normed = self.attn_norm(x)
        attended = self.attn_out_norm(self.attn(normed, place, cache))
        if self.spec.residual == "serial":
            x = self.attn_add_norm(self._add(x, attended))
            x = self.mlp_add_norm(self._add(x, self.mlp_out_norm(self.mlp(self.mlp_norm(x)))))
        else:
            mlp_input = self.mlp_norm(x) if self.spec.residual == "parallel" else normed
            x = self._add(self._add(x, attended), self.mlp_out_norm(self.mlp(mlp_input)))
        return self.end_norm(x)

    def _add(self, x: Float[Tensor, "B T D"], more: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The residual stream with a sublayer's result added, times `residual_scale`."""
        scale = self.spec.residual_scale
        return x + more if scale == 1 else x + more * scale


def attention(spec: AttentionSpec | LatentSpec, d_model: int) -> Attention | LatentAttention:
    """The module of either kind."""
    return Attention(spec, d_model) if isinstance(spec, AttentionSpec) else LatentAttention(spec, d_model)


def feed_forward(spec: MlpSpec | ExpertsSpec, d_model: int) -> Mlp | Experts:
    """The module of either kind."""
    return Mlp(spec, d_model) if isinstance(spec, MlpSpec) else Experts(spec, d_model)

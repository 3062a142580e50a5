"""Why a step differs, from a closed list of things that go wrong in a port.

Nothing is guessed: a reason is given when the recorded tensors show it, because computing the step again
in that way gives what was recorded, or because the two outputs are related as the reason says.
"""

from __future__ import annotations

from collections.abc import Callable

from openbook.trace.reasons.attention import (
    explain_mask,
    explain_mix,
    explain_probs,
    explain_scores,
    explain_temperature,
)
from openbook.trace.reasons.evidence import Evidence, Pair, Reason
from openbook.trace.reasons.feedforward import explain_activation, explain_choice, explain_shared
from openbook.trace.reasons.linear import explain_head, explain_linear
from openbook.trace.reasons.norm import explain_norm, norm_of
from openbook.trace.reasons.rotation import explain_rotation
from openbook.trace.reasons.stream import explain_embedding, explain_positions, explain_sum
from openbook.trace.schema import Trace

__all__ = ["Reason", "explain"]

_EXPLAIN: dict[str, Callable[[Pair], Reason | None]] = {
    "embed": explain_embedding,
    "positions": explain_positions,
    "attn.q_rope": explain_rotation,
    "attn.k_rope": explain_rotation,
    "attn.temperature": explain_temperature,
    "attn.scores": explain_scores,
    "attn.masked": explain_mask,
    "attn.probs": explain_probs,
    "attn.mix": explain_mix,
    "attn_add": explain_sum,
    "mlp_add": explain_sum,
    "mlp.act": explain_activation,
    "mlp.shared.act": explain_activation,
    "mlp.experts.act": explain_activation,
    "mlp.shared_add": explain_shared,
    "mlp.chosen": explain_choice,
    "head": explain_head,
}
"""By the step's name without its layer. Norms are known by the spec; any other step is a matrix."""


def explain(a: Trace, b: Trace, name: str) -> Reason | None:
    """Why the step `name` of the two traces differs; None if no known reason holds."""
    pair = Pair(Evidence(a, name), Evidence(b, name))
    if a.tensor(name).shape != b.tensor(name).shape:
        shapes = " and ".join(str(list(trace.tensor(name).shape)) for trace in (a, b))
        return Reason(f"the shapes differ: {shapes}", "these are two different models: compare their cards")
    found = explain_norm if norm_of(pair.a) else _EXPLAIN.get(pair.local, explain_linear)
    return found(pair)

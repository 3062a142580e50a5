import pytest
import torch

from openbook.weights import quant
from openbook.weights.tensors import PLAIN, QUANTISED, is_finite, torch_dtype


def test_the_readable_types_are_those_that_quant_decodes():
    assert quant.DECODERS.keys() == QUANTISED
    assert {name: str(dtype) for name, dtype in quant.PLAIN.items()} == {
        name: f"torch.{word}" for name, word in PLAIN.items()
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 777, 9_999])
def test_one_bad_number_anywhere_is_seen(dtype, place):
    values = torch.randn(100, 100).to(dtype)
    assert is_finite(values)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoilt = values.clone()
        spoilt.view(-1)[place] = bad
        assert not is_finite(spoilt)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "BF16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_has_many_names(name):
    assert torch_dtype(name) == torch.bfloat16


@pytest.mark.parametrize("name", ["q4_0", "int8", "nonsense", ""])
def test_a_dtype_that_cannot_compute_is_refused(name):
    with pytest.raises(ValueError, match="use one of"):
        torch_dtype(name)

"""`openbook demo`: short, and its prediction is what happened."""

import re

import pytest


@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_the_demo_fits_a_screen_and_measures_what_it_predicts(openbook):
    done = openbook("demo")
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) < 25
    flops = re.search(r"^FLOPs +([\d,]+) +([\d,]+) counted$", done.out, re.M)
    cache = re.search(r"^bytes of KV cache +([\d,]+) +([\d,]+) allocated$", done.out, re.M)
    assert flops
    assert flops[1] == flops[2]
    # By hand: 2 for keys and values, 30 layers, 3 heads of 64; bf16 or fp32.
    assert cache
    assert cache[1] == cache[2]
    assert cache[1] in ("23,040", "46,080")

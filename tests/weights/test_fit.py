import subprocess
import sys
from pathlib import Path

import pytest

from openbook.weights import fit
from openbook.weights.fit import WontFitError, available_bytes, check_fit

GROUP = {
    "memory.max": "1000000\n",
    "memory.current": "700000\n",
    "memory.stat": "anon 1\ninactive_file 250000\n",
}


def group(root: Path, **changes: str) -> Path:
    for name, text in {**GROUP, **{k.replace("_", ".", 1): v for k, v in changes.items()}}.items():
        (root / name).write_text(text)
    return root


def test_file_pages_that_can_be_dropped_do_not_count_against_a_containers_limit(tmp_path: Path):
    assert fit._free_in_group(group(tmp_path)) == 1_000_000 - 700_000 + 250_000


def test_a_container_without_a_limit_says_nothing(tmp_path: Path):
    assert fit._free_in_group(group(tmp_path, memory_max="max\n")) is None
    assert fit._free_in_group(tmp_path / "none") is None


def test_the_narrowest_limit_counts(monkeypatch):
    for name, room in (("_free_in_machine", 50), ("_free_in_group", 20), ("_free_in_process", None)):
        monkeypatch.setattr(fit, name, lambda room=room: room)
    assert available_bytes() == 20
    check_fit("a model", 20)
    with pytest.raises(WontFitError) as caught:
        check_fit("a model", 21)
    assert (caught.value.needed, caught.value.available) == (21, 20)


def test_a_system_that_does_not_tell_refuses_nothing(monkeypatch):
    for name in ("_free_in_machine", "_free_in_group", "_free_in_process"):
        monkeypatch.setattr(fit, name, lambda: None)
    assert available_bytes() is None
    check_fit("a model", 10**18)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_limit_on_address_space_is_seen():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 * 10**9,) * 2); "
        "from openbook.weights.fit import available_bytes; print(available_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 3 * 10**9

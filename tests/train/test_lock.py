"""One process in a run's folder at a time; the kernel frees it."""

import subprocess
import sys
from pathlib import Path

import pytest

from openbook.train.lock import BusyError, Lock, is_busy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")


def test_a_second_one_is_told_who_is_there(tmp_path: Path):
    assert not is_busy(tmp_path)
    lock = Lock(tmp_path)
    assert is_busy(tmp_path)
    with pytest.raises(BusyError, match="another process is training in"):
        Lock(tmp_path)
    lock.release()
    assert not is_busy(tmp_path)
    Lock(tmp_path).release()


def test_a_process_that_is_killed_frees_it(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from openbook.train.lock import Lock\n"
        "lock = Lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert is_busy(tmp_path)
        process.kill()
        process.wait()
        assert not is_busy(tmp_path)


def test_who_only_asks_stops_nobody(tmp_path: Path):
    Lock(tmp_path).release()
    for _ in range(20):
        is_busy(tmp_path)
        Lock(tmp_path).release()

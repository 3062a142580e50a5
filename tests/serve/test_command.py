"""`openbook explore` itself: a process that listens, answers and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import served
from openbook.cli.errors import UsageError
from openbook.cli.explore import HOST, listen, size_in_bytes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "openbook", "explore", *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_it_starts_prints_its_address_answers_and_ends_by_ctrl_c(tmp_path: Path):
    folder, port = served.write_model(tmp_path / "tiny", served.SPEC), free_port()
    process = start(str(folder), "--no-browser", "--port", str(port), "--store", "3MB")
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith(f"http://127.0.0.1:{port}/#/overview?model=%2F")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as page:
            assert page.status == 200
            assert b"<html" in page.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state") as answer:
            state = json.load(answer)
        assert state["store"]["limit"] == 3_000_000
        assert [model["name"] for model in state["models"]] == [str(folder)]
        assert state["version"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/nothing")
        with pytest.raises(OSError, match="refused"), socket.socket() as other:
            other.connect((_address_of_this_machine(), port))
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err


@contextmanager
def deep_model_served(tmp_path: Path, times: int) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A process that serves a model of `times` times the layers, its port, and the model's address; whatever
    comes, it does not outlive the block."""
    spec = served.SPEC.replace(layers=served.SPEC.layers * times)
    folder, port = served.write_model(tmp_path / "deep", spec), free_port()
    process = start(str(folder), "--no-browser", "--port", str(port), "--store", "4GB")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state") as answer:
            model = json.load(answer)["models"][0]["id"]
        yield process, port, f"/api/models/{model}"
    finally:
        process.kill()


def ended(process: subprocess.Popen[str]) -> None:
    """Holds that Ctrl-C has ended it, and quietly."""
    process.wait(timeout=30)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "terminate" not in err
    assert "Traceback" not in err


def posted(port: int, address: str, **body: object) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"http://127.0.0.1:{port}{address}", json.dumps(body).encode(), headers)


def test_ctrl_c_does_not_wait_for_work_that_nobody_wants_any_more(tmp_path: Path):
    """A generation that has just begun, of a model of 240 layers: the process ends all the same."""
    with deep_model_served(tmp_path, 80) as (process, port, model):
        with urllib.request.urlopen(posted(port, f"{model}/cache", ids=[5] * 8, tokens=50)) as answer:
            assert json.loads(answer.readline())["kind"] == "prefill"
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
        ended(process)


def test_windows_that_vanish_amid_an_answer_leave_the_server_at_work(tmp_path: Path):
    """Ten clients ask for long generations and for traces, and cut the line; the next one is answered."""
    with deep_model_served(tmp_path, 40) as (process, port, model):
        for number in range(10):
            kind, more = ("cache", {"tokens": 40}) if number % 2 else ("runs", {})
            content = json.dumps({"ids": [5 + number] * 8, **more}).encode()
            head = (
                f"POST {model}/{kind} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            with socket.create_connection((HOST, port)) as window:
                window.sendall(head.encode() + content)
                if number % 4 == 1:
                    window.recv(64)  # in the middle of the stream
        with urllib.request.urlopen(posted(port, f"{model}/runs", ids=[5, 6, 7]), timeout=60) as answer:
            assert json.load(answer)["ids"] == [5, 6, 7]
        process.send_signal(signal.SIGINT)
        ended(process)


def _address_of_this_machine() -> str:
    """An address of this machine that is not 127.0.0.1: another of the loopback's, if nothing else."""
    return "127.0.0.2"


def test_a_model_that_is_not_there_ends_it_before_it_listens():
    process = start("no-such-model", "--no-browser", "--port", str(free_port()))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert out == ""
    assert err.startswith("error: ")


def test_without_starlette_one_line_says_what_to_install(tmp_path: Path):
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "sys.argv = ['openbook', 'explore', '--no-browser']\n"
        "from openbook.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "pip install 'openbook[serve]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_next_port_is_taken_unless_one_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    monkeypatch.setattr("openbook.cli.explore.DEFAULT_PORT", port)
    with listen(None) as first, listen(None) as second:
        assert first.getsockname() == (HOST, port)
        assert port < second.getsockname()[1] < port + 20
        with pytest.raises(UsageError, match=f"port {port} is taken"):
            listen(port)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31), ("500MB", 500_000_000), ("1.5gb", 1_500_000_000), ("64k", 64_000), ("123", 123),
        ("10 MiB", 10 * 2**20), ("2G", 2_000_000_000), ("1Ki", 1024),
    ],
)  # fmt: skip
def test_a_size_is_written_with_its_unit(text: str, size: int):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "0", "1e9", "9" * 20, "1 G B", "1iB", "٣MB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(UsageError, match="no size"):
        size_in_bytes(text)

"""Training runs in processes that can be killed at any instant, each of them ready in milliseconds.

Run as a program, this file imports everything once, then forks for each job that it reads (a line of JSON)
and tells how the fork ended. `Killable` is our side.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any


@dataclass
class Killable:
    """The forking process, started when it is first needed."""

    _server: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> Killable:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def start(self, recipe: dict[str, Any], folder: Path, hashes: Path, die_at: int = 0) -> Job:
        """Begins the run, or goes on with it. Each step's number and the hash of all weights and moments
        after it are appended to `hashes`. With `die_at` the process kills itself in the middle of that
        operation of its disk, counted from 1 over all of its saves."""
        assert self._server is not None
        about = {"recipe": recipe, "folder": str(folder), "hashes": str(hashes), "die_at": die_at}
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(about) + "\n")
        stdin.flush()
        return Job(int(stdout.readline()), stdout)


@dataclass
class Job:
    pid: int
    _lines: IO[str]
    _status: int | None = None

    def steps(self) -> Iterator[int]:
        """The steps as they are done, until the process ends."""
        while self._status is None:
            word, _, number = self._lines.readline().partition(" ")
            if word == "step":
                yield int(number)
            else:
                self._status = int(number)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, or minus the signal that ended it."""
        for _ in self.steps():
            pass
        assert self._status is not None
        return self._status


# --- the other side -----------------------------------------------------------------------------


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports for seconds
    import openbook.train.run  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                _train(**json.loads(line))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _say(f"{pid}")
        _, status = os.waitpid(pid, 0)
        _say(f"ended {os.waitstatus_to_exitcode(status)}")


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _train(recipe: dict[str, Any], folder: str, hashes: str, die_at: int) -> None:
    from openbook.train import checkpoint
    from openbook.train.recipe import recipe_of
    from openbook.train.run import carry_out, open_run

    if die_at:
        checkpoint.Disk = _deadly(checkpoint.Disk, die_at)  # type: ignore[misc]
    run = open_run(recipe_of("test", recipe), folder, resume=True)

    def report(record: Any) -> None:
        if "loss" not in record:
            return
        digest = hashlib.sha256()
        for name, tensor in sorted(run.trainer.tensors().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().numpy().tobytes())
        with open(hashes, "ab", buffering=0) as file:
            file.write(f"{record['step']} {digest.hexdigest()}\n".encode())
        _say(f"step {record['step']}")

    carry_out(run, report)


def _deadly(disk: type, die_at: int) -> type:
    """A disk whose operation number `die_at` is the process's last; of a write, half gets through."""
    count = 0

    def deadly(name: str) -> Any:
        operation = getattr(disk, name)

        def method(self: Any, *arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == die_at:
                if name == "write":
                    file, data = arguments
                    operation(self, file, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(self, *arguments)

        return method

    names = [name for name in vars(disk) if not name.startswith("_")]
    return type("Deadly", (disk,), {name: deadly(name) for name in names})


if __name__ == "__main__":
    _serve()

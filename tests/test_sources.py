"""What a user may name, and what each name leads to."""

import array
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bounded import bounded_work
from openbook import models, sources
from openbook.files import FileError, write_gguf
from openbook.sources import NotFoundError, read_json, resolve, spec
from openbook.spec import SpecError, UnsupportedError, to_dict
from openbook.spec.gguf import rope_tensors, to_metadata
from openbook.spec.hf import from_config
from openbook.spec.presets import preset

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
SPEC = from_config(CONFIG)


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBOOK_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def write_model(path: Path, of=SPEC) -> Path:
    """A GGUF of the right names and metadata; its tensors do not matter here."""
    rows = [("token_embd.weight", (of.vocab_size, 1), "F32", b"\0" * 4 * of.vocab_size)]
    for name, numbers in rope_tensors(of).items():
        rows.append((name, (len(numbers),), "F32", array.array("f", numbers)))
    write_gguf(path, to_metadata(of), rows)
    return path


# --- kinds of source ----------------------------------------------------------------------------


def test_preset_has_no_weights():
    source = resolve("Qwen3-0.6B")
    assert source.spec is preset("qwen3-0.6b")
    assert (source.kind, source.path, source.family) == ("spec", None, "")
    with pytest.raises(NotFoundError, match=r"qwen3-0\.6b has no weights"):
        _ = source.weights


def test_dict_is_a_config_or_a_spec():
    assert spec(CONFIG) == SPEC
    assert spec(to_dict(SPEC)) == SPEC


def test_spec_is_itself():
    assert spec(SPEC) is SPEC


def test_folder_with_safetensors_has_its_weights(folder):
    (folder / "model.safetensors").touch()
    for name in (folder, str(folder), folder / "config.json"):
        source = resolve(name)
        assert (source.spec, source.spec.name) == (SPEC, "my-model")
        assert (source.kind, source.weights, source.family) == ("safetensors", folder, "llama")
        assert source.config["hidden_size"] == 64


def test_sharded_folder_is_known_by_its_index(folder):
    (folder / "model.safetensors.index.json").touch()
    assert resolve(folder).kind == "safetensors"


def test_folder_without_tensors_is_only_a_spec(folder):
    (folder / "pytorch_model.bin").touch()
    source = resolve(folder)
    assert source.kind == "spec"
    with pytest.raises(NotFoundError, match=r"my-model holds no weights"):
        _ = source.weights


def test_any_other_json_stands_alone(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for name, content in (("idea.json", CONFIG), ("own.json", to_dict(SPEC))):
        (tmp_path / name).write_text(json.dumps(content))
        source = resolve(tmp_path / name)
        assert (source.spec, source.kind, source.path) == (SPEC, "spec", tmp_path / name)


def test_gguf_file_has_its_weights(tmp_path):
    file = write_model(tmp_path / "small.gguf")
    source = resolve(file)
    assert source.spec == SPEC.replace(head=source.spec.head)
    assert source.spec.head.tied
    assert (source.kind, source.weights, source.family) == ("gguf", file, "llama")
    assert source.spec.name == "small"


def test_gguf_file_with_rope_freqs_has_its_scaling(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        **CONFIG,
        "max_position_embeddings": 65_536,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    of = from_config({**config, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}})
    assert spec(write_model(tmp_path / "long.gguf", of)) == of


def test_folder_with_one_gguf_is_that_file(tmp_path):
    file = write_model(tmp_path / "a.gguf")
    assert resolve(tmp_path).path == file
    write_model(tmp_path / "b.gguf")
    with pytest.raises(NotFoundError, match=r"several \.gguf files: name one of a\.gguf, b\.gguf"):
        resolve(tmp_path)


@pytest.mark.model
def test_fetched_model_is_found_by_name(smollm2, monkeypatch):
    monkeypatch.setenv("OPENBOOK_HOME", str(smollm2.parents[1]))
    source = resolve("SmolLM2-135M")
    assert (source.kind, source.path) == ("gguf", smollm2)
    assert source.spec == preset("smollm2-135m")


def test_a_model_that_is_not_fetched_is_its_preset():
    assert not models.is_fetched("smollm2-135m")
    assert resolve("smollm2-135m").kind == "spec"


def test_bare_name_is_the_preset_and_a_path_the_folder(folder, monkeypatch):
    folder = folder.rename(folder.parent / "gpt2")
    monkeypatch.chdir(folder.parent)
    assert spec("gpt2") == preset("gpt2")
    assert spec("./gpt2") == SPEC


# --- what is not there --------------------------------------------------------------------------


def test_a_name_stands_for_a_model_wherever_one_is(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    known = [
        name for name in ("gpt2", "GPT2", "smollm2-135m", "my-model", "./gpt2", "") if sources.is_name(name)
    ]
    assert known == ["gpt2", "GPT2", "smollm2-135m"]


def test_unknown_name_lists_what_is_close():
    with pytest.raises(NotFoundError, match=r"'lama-3-8b' is neither a preset .*; close to it: llama-3-8b"):
        resolve("lama-3-8b")


def test_missing_file_lists_what_lies_beside(tmp_path):
    write_model(tmp_path / "small-q4.gguf")
    with pytest.raises(NotFoundError, match=r"no file .*smal-q4\.gguf; close to it: small-q4\.gguf"):
        resolve(tmp_path / "smal-q4.gguf")
    with pytest.raises(NotFoundError, match="there is no folder"):
        resolve(tmp_path / "nowhere" / "x.gguf")


def test_empty_folder_and_strange_file_are_no_models(tmp_path):
    with pytest.raises(NotFoundError, match=r"neither a config\.json nor a \.gguf"):
        resolve(tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(NotFoundError, match="is no model"):
        resolve(tmp_path / "weights.bin")


@pytest.mark.parametrize("source", [None, 7, ["gpt2"], b"gpt2"])
def test_source_of_another_type_is_refused(source):
    with pytest.raises(SpecError, match="a model is a name, a path, a dict or a ModelSpec"):
        resolve(source)


@pytest.mark.parametrize("name", ["", "\0", "a\0b", "x" * 100_000, "../" * 50_000])
def test_impossible_path_is_not_found(name):
    with pytest.raises(NotFoundError):
        resolve(name)
    with pytest.raises(NotFoundError) as caught:
        resolve(name + "/x.gguf")
    assert len(str(caught.value)) < 1000


def test_error_in_a_file_names_it(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 0}))
    with pytest.raises(SpecError, match=r"my-model/config\.json: config\.hidden_size must be"):
        resolve(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match=r"config\.json: .*'mamba'"):
        resolve(folder)


# --- JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "a list"),
        (b'{"a": 1', "delimiter"),
        (b"", "Expecting value"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": 1} extra', "Extra data"),
    ],
)
def test_json_that_is_not_strict_is_one_error(tmp_path, text, fault):
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(FileError, match=fault) as caught:
        read_json(file)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_file_beyond_the_bound_is_not_read(tmp_path):
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(2**40)  # sparse
    with (
        bounded_work(0.5),
        pytest.raises(FileError, match="1,099,511,627,776 bytes, expected at most 16,777,216"),
    ):
        read_json(file)


def test_pipe_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FileError, match="a pipe"):
        resolve(tmp_path)


def test_many_keys_with_one_twice_are_refused_at_once(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("{" + ",".join(f'"{i}":0' for i in [*range(300_000), 299_999]) + "}")
    with bounded_work(5), pytest.raises(FileError, match="'299999' occurs twice"):
        read_json(file)


def test_config_with_many_labels_is_read(folder):
    labels = {str(i): f"LABEL_{i}" for i in range(150_000)}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "id2label": labels}))
    assert spec(folder) == SPEC


# --- cost ---------------------------------------------------------------------------------------


def test_a_spec_costs_no_torch():
    code = (
        "import sys; from openbook.sources import spec; spec('gpt3-175b'); "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(sources.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

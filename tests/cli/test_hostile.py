"""Files and requests that are wrong, through the command itself: one line, the right code, nothing built.

The readers' own tests have far more of such files; here it is what a person sees.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from openbook.files.gguf import write_gguf
from openbook.spec.gguf import to_metadata
from openbook.spec.hf import from_config

FAILED, USAGE, NOT_FOUND, WONT_FIT = 1, 2, 3, 4

LLAMA = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,),
    "model.layers.0.input_layernorm.weight": (4,), "model.layers.0.post_attention_layernorm.weight": (4,),
    "model.layers.0.self_attn.q_proj.weight": (4, 4), "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4), "model.layers.0.self_attn.o_proj.weight": (4, 4),
    "model.layers.0.mlp.gate_proj.weight": (6, 4), "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
}  # fmt: skip


class Canary:
    """A pickle that, opened, leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def folder(path: Path, config: Any = LLAMA, **files: bytes) -> Path:
    """A model's folder: config.json, and files whose names have _ for a point."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, data in files.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def model(path: Path) -> Path:
    """A sound model, all zeros."""
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, path / "model.safetensors"
    )
    return folder(path)


def gguf(path: Path, keys: int = 0, tensors: int = 0, rest: bytes = b"", magic: bytes = b"GGUF") -> Path:
    path.write_bytes(magic + struct.pack("<IQQ", 3, tensors, keys) + rest)
    return path


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


ARCHITECTURE = string("general.architecture") + struct.pack("<I", 8) + string("llama")
BEYOND = string("t") + struct.pack("<I2QIQ", 2, 64, 64, 0, 1 << 40)


def safetensors(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def sparse(path: Path, start: bytes) -> Path:
    """A file of a terabyte that takes no room: bytes that remain are free for whoever lies."""
    path.write_bytes(start)
    os.truncate(path, 1 << 40)
    return path


def with_tokenizer(path: Path, **changes: Any) -> Path:
    """A GGUF file that has a vocabulary and no weights worth the name."""
    metadata = to_metadata(from_config(LLAMA)) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*"abcdef", "ab", "<eos>"],
        "tokenizer.ggml.token_type": [1] * 7 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 7,
    }
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write_gguf(path, metadata | changed, [("token_embd.weight", (8, 4), "F32", bytes(128))])
    return path


def index(path: Path, shard: Any) -> Path:
    return folder(
        path, model_safetensors_index_json=json.dumps({"weight_map": {"model.norm.weight": shard}}).encode()
    )


W = "model.norm.weight"

FILES: dict[str, tuple[int, str, Callable[[Path], Path]]] = {
    # GGUF
    "empty": (1, "is it complete", lambda p: gguf(p / "a.gguf", magic=b"", rest=b"").rename(p / "b.gguf")),
    "magic": (1, "no GGUF file", lambda p: gguf(p / "a.gguf", magic=b"PK\3\4")),
    "keys": (1, "metadata keys", lambda p: gguf(p / "a.gguf", keys=1 << 63)),
    "tensors": (1, "number of tensors", lambda p: gguf(p / "a.gguf", tensors=(1 << 64) - 1)),
    "sparse": (1, "keys", lambda p: sparse(p / "a.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40))),
    "offset": (1, "complete", lambda p: gguf(p / "a.gguf", 1, 1, ARCHITECTURE + BEYOND + bytes(64))),
    "no keys": (1, "block_count is missing", lambda p: gguf(p / "a.gguf", 1, 0, ARCHITECTURE + bytes(64))),
    "architecture": (
        3, "supported are", lambda p: gguf(p / "a.gguf", 1, 0, ARCHITECTURE.replace(b"llama", b"\x1b[31m"))
    ),
    # safetensors
    "length": (1, "header's length", lambda p: folder(p, model_safetensors=struct.pack("<Q", 1 << 62))),
    "cut": (1, "is it complete", lambda p: folder(p, model_safetensors=safetensors(b"{}")[:9])),
    "header of a sparse file": (
        1, "JSON",
        lambda p: sparse(folder(p) / "model.safetensors", struct.pack("<Q", 99_000_000) + b"{").parent,
    ),
    "shape": (
        1, "2^63",
        lambda p: folder(p, model_safetensors=safetensors(
            {W: {"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 16]}}, bytes(16)
        )),
    ),
    "deep": (1, "nested", lambda p: folder(p, model_safetensors=safetensors(b'{"a":' + b"[" * 100_000))),
    "pickle renamed": (
        1, "header", lambda p: folder(p, model_safetensors=pickle.dumps(Canary(p / "canary"))),
    ),
    "pickle": (
        1, "convert", lambda p: folder(p, model_bin=pickle.dumps(Canary(p / "canary"))),
    ),
    "shard elsewhere": (1, "plain file name", lambda p: index(p, "../../a.safetensors")),
    "shard absolute": (1, "plain file name", lambda p: index(p, "/etc/passwd")),
    "shard missing": (1, "gone.safetensors", lambda p: index(p, "gone.safetensors")),
    # config.json
    "unknown key": (1, "frobnicate", lambda p: folder(p, LLAMA | {"frobnicate": 1})),
    "nan": (1, "NaN", lambda p: folder(p, json.dumps(LLAMA | {"rms_norm_eps": float("nan")}))),
    "twice": (1, "twice", lambda p: folder(p, json.dumps(LLAMA)[:-1] + ', "vocab_size": 3}')),
    "10^12 layers": (1, "10,000", lambda p: folder(p, LLAMA | {"num_hidden_layers": 10**12})),
    "unknown type": (3, "supported are", lambda p: folder(p, LLAMA | {"model_type": "frobnicate"})),
    "no Transformer": (3, "Mamba layers", lambda p: folder(p, LLAMA | {"model_type": "mamba"})),
    "not JSON": (1, "JSON", lambda p: folder(p, "hello")),
    # paths
    "nothing": (3, "neither a config.json nor a .gguf", lambda p: p),
    "missing": (3, "no file or folder", lambda p: p / "a.gguf"),
    "no weights": (3, "no weights", folder),
    "pipe": (1, "a pipe", lambda p: os.mkfifo(p / "a.gguf") or p / "a.gguf"),
    "dangling link": (3, "a link", lambda p: (p / "a.gguf").symlink_to(p / "gone") or p / "a.gguf"),
}  # fmt: skip
"""What is wrong: exit code, a word of the message, and what makes it in an empty folder."""


def assert_one_line(done: Any, code: int, word: str) -> None:
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert done.err.rstrip("\n").isprintable()
    assert word in done.err
    assert "internal error" not in done.err
    assert len(done.err) < 2100


@pytest.mark.parametrize("verb", ["verify", "generate"])
@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_one_line_and_its_exit_code(openbook, tmp_path: Path, name: str, verb: str):
    code, word, make = FILES[name]
    options = ["-p", "x"] if verb == "generate" else []
    assert_one_line(openbook(verb, str(make(tmp_path)), *options), code, word)
    assert not (tmp_path / "canary").exists()


def test_bad_files_are_the_same_under_optimised_python(tmp_path: Path):
    """One process for all of them, which tells the outcome of each."""
    program = (
        "import sys\n"
        "from openbook.cli import main\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = ['openbook', 'verify', path]\n"
        "    try: main()\n"
        "    except SystemExit as stopped: print(stopped.code, file=sys.stderr)\n"
    )
    paths = []
    for i, (_, _, make) in enumerate(FILES.values()):
        (tmp_path / str(i)).mkdir()
        paths.append(str(make(tmp_path / str(i))))
    plain, optimised = (
        subprocess.run(
            [sys.executable, *flags, "-c", program, *paths], capture_output=True, text=True, timeout=60
        )
        for flags in ((), ("-O",))
    )
    codes = [line for line in plain.stderr.splitlines() if line.isdigit()]
    assert codes == [str(code) for code, _, _ in FILES.values()]
    assert plain.stdout == optimised.stdout == ""
    assert optimised.stderr == plain.stderr


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({"pre": "my-own"}, NOT_FOUND, "'my-own', which is not supported"),
        ({"model": "bert"}, NOT_FOUND, "'bert'"),
        ({"eos_token_id": 8}, FAILED, "from 0 to 7"),
        ({"tokens": ["a"] * 8}, FAILED, "twice"),
        ({"tokens": ["\x1b[31m" * 100_000] * 8}, FAILED, "\\x1b[31m"),
        ({"token_type": [1]}, FAILED, "1 entries for 8 tokens"),
        ({"merges": ["a h"]}, FAILED, "'a h'"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_says_why(openbook, tmp_path: Path, change, code, word):
    file = str(with_tokenizer(tmp_path / "a.gguf", **change))
    for verb in ("tokenize", "generate", "chat"):
        assert_one_line(openbook(verb, file, "-p", "a"), code, word)
    assert openbook("show", file).code == 0


def test_a_model_without_a_tokenizer_names_what_would_have_one(openbook, tmp_path: Path):
    assert_one_line(openbook("tokenize", "gpt2", "-p", "a"), NOT_FOUND, "tokenizer.json")
    assert_one_line(openbook("tokenize", str(folder(tmp_path)), "-p", "a"), NOT_FOUND, "tokenizer.json")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_hostile_chat_template_is_one_line(openbook, tmp_path: Path, template: str):
    model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert_one_line(openbook("chat", str(tmp_path), "-p", "a"), FAILED, "template")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate("abcdefgh")}, "merges": []},
    "decoder": BYTE_LEVEL,
    "pre_tokenizer": BYTE_LEVEL,
}


# --- sizes --------------------------------------------------------------------------------------


def test_absurd_sizes_are_counted_and_a_model_of_them_is_refused(openbook, tmp_path: Path):
    """2 TB of GPT-2's positions in a file that takes no room: the ledger answers, the model does not fit."""
    config = {
        "model_type": "gpt2",
        "n_embd": 4,
        "n_head": 2,
        "n_layer": 1,
        "n_positions": 1 << 38,
        "vocab_size": 8,
    }
    spec = from_config(config)
    from openbook.ledger import ledger
    from openbook.weights.dialects import HF, places

    header, end = {}, 0
    for place in places(spec, {row.name: row.shape for row in ledger(spec).tensors}, HF["gpt2"]):
        if place.stored != "lm_head.weight":
            size = 2 * int(np.prod(place.shape, dtype=object))
            header[place.stored] = {"dtype": "F16", "shape": place.shape, "data_offsets": [end, end + size]}
            end += size
    start = safetensors(header)
    file = folder(tmp_path, config) / "model.safetensors"
    file.write_bytes(start)
    os.truncate(file, len(start) + end)

    assert openbook("verify", str(tmp_path)).code == 0
    done = openbook("ledger", str(tmp_path), "--json")
    assert json.loads(done.out)["params"]["total"] > 4 * (1 << 38)
    assert_one_line(openbook("generate", str(tmp_path), "-p", "x", "--dtype", "fp32"), WONT_FIT, "4398.05 GB")


@pytest.mark.parametrize(
    "options",
    [
        ("generate", "-n", "-1"),
        ("generate", "-c", "0"),
        ("generate", "-t", "0"),
        ("generate", "-t", "1000000000"),
        ("generate", "-n", "many"),
        ("chat", "-c", "-5"),
        ("ledger", "--new", "0"),
        ("ledger", "--batch", "-1"),
        ("ledger", "--past", "-1"),
        ("ledger", "--by", "colour"),
        ("ledger", "--dtype", "fp17"),
        ("bench", "-r", "0"),
    ],
)
def test_numbers_that_make_no_sense_are_wrong_usage(openbook, options: tuple[str, ...]):
    verb, *rest = options
    assert_one_line(openbook(verb, "gpt2", *rest), USAGE, "")


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v")
def test_too_little_memory_to_map_torch_is_told_in_one_line(tmp_path: Path):
    command = f"ulimit -v 400000; exec {sys.executable} -m openbook generate {model(tmp_path)} -p x"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (WONT_FIT, "")
    assert done.stderr.startswith("error: out of memory")
    assert done.stderr.count("\n") == 1

"""The model that comes out of a run.

RUN/model/      a Hugging Face folder; in our own form where no family describes the model
    adapter/    with LoRA: the additions alone, as peft loads them
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from openbook import sources
from openbook.files.gguf import read_gguf
from openbook.model import Decoder
from openbook.text import gguf as gguf_vocabulary
from openbook.text.to_hf import to_files
from openbook.train import data
from openbook.train.lora import adapters, merge_lora, save_peft
from openbook.train.start import is_for_transformers
from openbook.weights.save import save_hf, save_own

MODEL, ADAPTER = "model", "adapter"


def export(folder: Path, decoder: Decoder, dataset: data.Dataset, base: str | None = None) -> None:
    """Writes what is not there yet. Adapters are added to the matrices of `decoder` for it.

    The weights are fp32. Beside them lie the tokenizer with its chat template, and the ids that begin a text
    and end one or an answer.
    """
    family = sources.resolve(base).family if base is not None else ""
    if adapters(decoder):
        if not (folder / ADAPTER).exists():
            save_peft(folder / ADAPTER, decoder, str(folder / MODEL) if base is None else base, family)
        merge_lora(decoder)
    if (folder / MODEL).exists():
        return
    ids = _special_ids(dataset)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        files = _tokenizer_files(dataset.folder, scratch)
        (scratch / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", "utf-8")
        files.append(scratch / "generation_config.json")
        if is_for_transformers(decoder.spec):
            save_hf(decoder, folder / MODEL, config=ids, extra_files=files, model_type=family)
        else:
            save_own(decoder, folder / MODEL, extra_files=files)


def _special_ids(dataset: data.Dataset) -> dict[str, int | list[int] | None]:
    tokenizer = dataset.tokenizer
    ends = sorted(tokenizer.eos_ids)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _tokenizer_files(folder: Path, scratch: Path) -> list[Path]:
    """Those of a dataset, as a Hugging Face folder has them; made in `scratch` from a GGUF vocabulary."""
    if not (folder / data.GGUF_TOKENIZER).exists():
        return [folder / name for name in data.TOKENIZER_FILES if (folder / name).is_file()]
    vocabulary = gguf_vocabulary.from_metadata(read_gguf(folder / data.GGUF_TOKENIZER).metadata)
    made = to_files(vocabulary)
    for name, content in made.items():
        (scratch / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return [scratch / name for name in made]

"""How text is cut into words before byte-level BPE: one row for each known `tokenizer.ggml.pre`.

A GGUF file does not hold its model's pre-tokenizer, only a name that llama.cpp gives it. This table
turns the name back into regular expressions. They are applied in order, each to the pieces the one
before has left, and whatever a pattern does not match stays a piece of its own.

The names and the patterns behind them are those of llama.cpp's `src/llama-vocab.cpp`; where a pattern
there is a rewriting for its own regex engine, this is the original from the model's tokenizer.json.
Every pattern here takes time linear in the text, also on a long run of one character.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from openbook.text.vocabulary import UnsupportedTokenizerError

_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _llama3_like(
    letters: str = r"\p{L}",
    digits: str = r"\p{N}{1,3}",
    after_symbols: str = r"[\r\n]*",
    contraction: str = f"(?i:{_CONTRACTION})|",
) -> str:
    """OpenAI's cl100k pattern as Llama 3 and Qwen use it: they differ in how digits are grouped."""
    return (
        rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s{letters.strip('[]')}\p{{N}}]+{after_symbols}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _o200k_like(digits: str, contraction: str = "") -> str:
    """OpenAI's o200k pattern: a word is capitals, then small letters, so camelCase is two words."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _llama3_like()
_QWEN2 = _llama3_like(digits=r"\p{N}")
_O200K = _o200k_like(digits=r"\p{N}{1,3}", contraction=f"(?i:{_CONTRACTION})?")
_ASCII_PUNCTUATION_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

# Letters that have case, as DeepSeek's first tokenizer lists them.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    r"\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    r"\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    r"\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    r"\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    r"\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    r"\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_CJK_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BEYOND_ALPHABETS = r"[\u0800-\u9fa5\uac00-\ud7ff]+"


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` in order; `ignore_merges`: a word that is itself a token is not built by merging;
    `add_bos`: what a file that does not say so means."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


_gpt2 = PreTokenizer((_GPT2,))
_digit_by_digit = PreTokenizer((r"\p{N}", _GPT2))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_llama3_merging = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,))
_o200k = PreTokenizer((_O200K,))
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"(?i:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_deepseek3 = PreTokenizer((r"\p{N}{1,3}", _CJK_AND_KANA, _DEEPSEEK3))
_bloom = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What llama.cpp falls back to; named by files that were converted before the names existed.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "mpt": _gpt2,
    "olmo": _gpt2,
    "jais": _gpt2,
    "trillion": _gpt2,
    "exaone4": _gpt2,
    "granite-docling": _gpt2,
    "gigachat": _gpt2,
    "a.x-4.0": _gpt2,
    "mellum": _gpt2,
    "smollm": _digit_by_digit,
    "starcoder": _digit_by_digit,
    "refact": _digit_by_digit,
    "command-r": _digit_by_digit,
    "codeshell": _digit_by_digit,
    "exaone": _digit_by_digit,
    "minerva-7b": _digit_by_digit,
    "mellum2": _digit_by_digit,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "falcon-h1": _llama3,
    "pixtral": _llama3,
    "midm-2.0": _llama3,
    "lfm2": _llama3,
    "dbrx": _llama3_merging,
    "smaug-bpe": _llama3_merging,
    "glm4": _llama3_merging,
    "chatglm-bpe": _llama3_merging,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "kormo": _qwen2,
    "f2llmv2": _qwen2,
    "megrez": _qwen2,
    "stablelm2": _qwen2,
    "hunyuan": _qwen2,
    "solar-open": _qwen2,
    "grok-2": _qwen2,
    "qwen35": PreTokenizer((_llama3_like(letters=r"[\p{L}\p{M}]", digits=r"\p{N}"),)),
    "ufakzeka": PreTokenizer((_llama3_like(digits=r"\p{N}", contraction=""),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "gpt-4o": _o200k,
    "llama4": _o200k,
    "kanana2": _o200k,
    "talkie": _o200k,
    "minimax-m2": _o200k,
    "tekken": PreTokenizer((_o200k_like(digits=r"\p{N}"),), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            # "\s+$" with a guard: without it every space of a run that ends elsewhere is tried anew.
            r"(?<!\s)\s+$",
            _BEYOND_ALPHABETS,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _BEYOND_ALPHABETS, r"\p{N}")),
    "deepseek-v3": _deepseek3,
    "hunyuan-dense": _deepseek3,
    "joyai-llm": _deepseek3,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "bloom": _bloom,
    "poro-chat": _bloom,
    "gpt3-finnish": _bloom,
    "viking": PreTokenizer((*_bloom.patterns, r"\p{N}")),
    "bailingmoe": PreTokenizer((_BAILING,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
}
"""`tokenizer.ggml.pre` to its pre-tokenizer. Add a row with the pattern's source; never guess one."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row for `name`; UnsupportedTokenizerError names it when there is none."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported; any other would split text wrongly; "
            f"supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        ) from None

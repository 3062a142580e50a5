"""The page's files, looked at as files: languages, sizes, what they load, what others wrote."""

import hashlib
import json
import re
from pathlib import Path

import pytest

import openbook.serve

WEB = Path(openbook.serve.__file__).parent / "web"
LANGUAGES = ["en", "zh-CN"]
PARTS = sorted(path.stem for path in (WEB / "i18n" / "en").glob("*.json"))
CODE = sorted(path for path in WEB.rglob("*.js") if "vendor" not in path.parts)
SCRIPTS = "\n".join(path.read_text("utf-8") for path in CODE)

LIMIT = 300_000
"""Bytes of the page's own code: scripts, style and frame, without texts and other people's files."""


def texts(language: str, part: str) -> dict:
    return json.loads((WEB / "i18n" / language / f"{part}.json").read_text("utf-8"))


def blanks(text: object) -> set[str]:
    """The names that are filled in: {n}."""
    return set(re.findall(r"\{(\w+)\}", json.dumps(text)))


def test_both_languages_have_the_same_parts():
    assert sorted(path.stem for path in (WEB / "i18n" / "zh-CN").glob("*.json")) == PARTS


@pytest.mark.parametrize("part", PARTS)
def test_both_languages_have_the_same_texts_with_the_same_blanks(part):
    english, chinese = (texts(language, part) for language in LANGUAGES)
    assert list(english) == list(chinese)
    for key in english:
        assert blanks(english[key]) == blanks(chinese[key]), key
        assert isinstance(english[key], list) == isinstance(chinese[key], list), key


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("part", PARTS)
def test_a_text_is_a_line_a_list_of_lines_or_forms_of_a_plural(part, language):
    for key, text in texts(language, part).items():
        forms = text.values() if isinstance(text, dict) else text if isinstance(text, list) else [text]
        assert forms, key
        assert all(isinstance(form, str) and form.strip() for form in forms), key
        assert not isinstance(text, dict) or "other" in text, key


@pytest.mark.parametrize("part", PARTS)
def test_what_is_longer_than_a_name_is_chinese_in_chinese(part):
    for key, text in texts("zh-CN", part).items():
        assert len(str(text)) < 24 or re.search(r"[\u4e00-\u9fff]", str(text)), key


def test_every_text_that_the_code_names_is_there():
    named = set(re.findall(r"""\bt\(\s*["'`]([a-z]+\.\w+)["'`]""", SCRIPTS))
    known = {f"{part}.{key}" for part in PARTS for key in texts("en", part)}
    assert named
    assert named <= known, sorted(named - known)


def test_no_text_is_there_that_nobody_shows():
    """Keys that are put together, t(`steps.kind_${kind}`), count by what is written of them."""
    begun = tuple(re.findall(r"`([a-z]+\.[\w.]*)\$\{", SCRIPTS))
    unused = [
        f"{part}.{key}"
        for part in PARTS
        for key in texts("en", part)
        if f"{part}.{key}" not in SCRIPTS and not f"{part}.{key}".startswith(begun)
    ]
    assert not unused


def test_nothing_is_loaded_from_elsewhere():
    for path in [*CODE, WEB / "index.html", *WEB.glob("*.css")]:
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"'`]*", path.read_text("utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path


def test_the_page_holds_no_inline_script_and_no_inline_style():
    page = (WEB / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert "<style" not in page
    assert re.findall(r"\s(?:style|on\w+)=", page) == []


def test_the_pages_own_code_is_small():
    assert sum(len(path.read_bytes()) for path in [*CODE, WEB / "index.html", *WEB.glob("*.css")]) < LIMIT


def test_other_peoples_files_are_as_they_came():
    sums = dict(
        reversed(line.split()) for line in (WEB / "vendor" / "SHA256SUMS").read_text("utf-8").splitlines()
    )
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (WEB / "vendor").glob("*.js")
    }
    assert found == sums
    licences = (WEB / "vendor" / "LICENSES").read_text("utf-8")
    assert all(name in licences for name in found)


def test_every_view_of_the_rail_is_there_with_its_texts():
    rail = re.search(r"export const VIEWS = (\[.*?\]);", (WEB / "app.js").read_text("utf-8"))
    assert rail is not None
    views = json.loads(rail[1])
    assert len(views) == 10
    for view in views:
        code = (WEB / "views" / f"{view}.js").read_text("utf-8")
        assert f'export const id = "{view}"' in code
        for language in LANGUAGES:
            assert {"title", "about"} <= texts(language, view).keys()
            assert f"view_{view}" in texts(language, "shell")

"""The README shows what the commands print, and nothing else.

`OPENBOOK_UPDATE=1 pytest tests/test_readme.py` writes the blocks anew.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TRANSLATION = ROOT / "README.zh-CN.md"
UPDATE = os.environ.get("OPENBOOK_UPDATE") == "1"

COMMAND = re.compile(r"```console\n\$ openbook (?P<arguments>.*)\n(?P<output>(?:(?!```).*\n)*)```\n")
PROGRAM = re.compile(
    r"```python\n(?P<source>(?:(?!```).*\n)*)```\n\n```text\n(?P<output>(?:(?!```).*\n)*)```\n"
)
BLOCK = re.compile(r"```\w*\n(?:(?!```).*\n)*```\n")


def printed(*arguments: str) -> str:
    """What a command prints to stdout in a terminal of 80 columns, without colours."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rewrite(old: str, new: str) -> None:
    for file in (README, TRANSLATION):
        file.write_text(file.read_text().replace(old, new))


def commands() -> list[str]:
    return [match["arguments"] for match in COMMAND.finditer(README.read_text())]


@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("arguments", commands())
def test_a_shown_output_is_what_the_command_prints(arguments: str):
    match = next(m for m in COMMAND.finditer(README.read_text()) if m["arguments"] == arguments)
    output = printed("-m", "openbook", *shlex.split(arguments))
    if UPDATE:
        rewrite(match[0], f"```console\n$ openbook {arguments}\n{output}```\n")
    elif arguments == "demo":
        check_demo(output, match["output"])
    else:
        assert output == match["output"]


def check_demo(output: str, shown: str) -> None:
    """The file and its ledger are the same everywhere. The answer and the speed are the machine's own, whose
    best dtype may be another; but prediction and measurement must agree on every machine."""
    (fixed, measured), (shown_fixed, shown_measured) = (text.split("model    ") for text in (output, shown))
    assert fixed == shown_fixed
    answer, table = measured.split("\n\n")
    assert len(answer.split()) > 10
    rows, shown_rows = (
        [re.split(r"  +", line) for line in t.splitlines()] for t in (table, shown_measured.split("\n\n")[1])
    )
    assert [row[0] for row in rows[1:]] == [row[0] for row in shown_rows[1:]]
    for _, says, did in rows[1:3]:
        assert did.split()[0] == says
    assert len(output.splitlines()) < 25


def test_the_demo_shown_has_under_25_lines():
    shown = next(m["output"] for m in COMMAND.finditer(README.read_text()) if m["arguments"] == "demo")
    assert 15 < len(shown.splitlines()) < 25


@pytest.mark.model
@pytest.mark.usefixtures("smollm2")
def test_the_python_example_prints_what_is_shown():
    match = PROGRAM.search(README.read_text())
    assert match
    output = printed("-c", match["source"])
    if UPDATE:
        rewrite(f"```text\n{match['output']}```\n", f"```text\n{output}```\n")
    else:
        assert output == match["output"]


def test_the_translation_shows_the_same_commands_and_outputs():
    english, chinese = (BLOCK.findall(file.read_text()) for file in (README, TRANSLATION))
    assert len(english) > 4
    assert [without_comments(block) for block in chinese] == [without_comments(block) for block in english]


def without_comments(block: str) -> str:
    """A block of code without its remarks, which are translated."""
    return re.sub(r" *# .*", "", block)


def test_every_link_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)

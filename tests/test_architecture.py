"""The shape of the package: who may import whom, and what no file may do.

Read from the source with `ast`; nothing is imported, except in the two tests of what a start costs.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "openbook"


@dataclass(frozen=True)
class Rule:
    """What one package (or one module beside them) may import.

    `own`: of Openbook. `libraries`: of other people's, anywhere. `inside`: of other people's, only inside
    a function, so that importing the module does not cost it.
    """

    own: str = ""
    libraries: str = ""
    inside: str = ""


LIBRARIES = "torch numpy safetensors tokenizers jinja2 jaxtyping transformers"

RULES = {
    "spec": Rule(),
    "models": Rule(),
    "files": Rule(libraries="numpy safetensors", inside="torch"),
    "ledger": Rule(own="spec"),
    "sources": Rule(own="files spec models"),
    "plan": Rule(own="spec ledger"),
    "text": Rule(libraries="tokenizers jinja2"),
    "model": Rule(own="spec", libraries="torch jaxtyping"),
    "weights": Rule(
        own="files spec sources ledger model", libraries="torch numpy jaxtyping safetensors", inside="torch"
    ),
    "native": Rule(own="models spec ledger model weights", libraries="torch jaxtyping"),
    "infer": Rule(own="spec ledger model native", libraries="torch jaxtyping"),
    "train": Rule(
        own="files spec sources ledger text model weights native infer plan",
        libraries="torch jaxtyping numpy safetensors",
        inside="tokenizers pyarrow tensorboard matplotlib",
    ),
    "trace": Rule(
        own="files spec sources ledger model weights infer",
        libraries="torch jaxtyping",
        inside="transformers",
    ),
    "lm": Rule(own="files spec sources ledger text model weights native infer trace", libraries="torch"),
    "bench": Rule(own="spec ledger model weights native infer lm", libraries="torch", inside="transformers"),
    "bench_experts": Rule(
        own="spec ledger model weights native bench", libraries="torch", inside="transformers"
    ),
    "bench_train": Rule(
        own="spec ledger model weights train bench", libraries="torch numpy", inside="transformers"
    ),
    "serve": Rule(
        own="files spec models sources ledger plan text model weights native infer trace lm",
        libraries="torch starlette",
    ),
    "cli": Rule(
        own=(
            "files spec models sources ledger plan text model weights native infer train trace lm bench "
            "bench_experts bench_train serve"
        ),
        libraries="typer",
        inside=f"rich uvicorn {LIBRARIES}",
    ),
    "": Rule(own="spec ledger sources models lm cli"),
}
"""The table of the design. `""` is the package itself: `openbook/__init__.py` and `__main__.py`."""

FORBIDDEN_NAMES = {"utils", "util", "common", "base", "core", "helpers", "helper", "misc"}


@dataclass(frozen=True)
class Import:
    """One name that a module imports. `lazy`: inside a function."""

    module: str
    lazy: bool


def module_name(file: Path) -> str:
    """'openbook.spec.model'; a package's __init__.py is the package."""
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    return {module_name(f): (f, ast.parse(f.read_text(), str(f))) for f in files}


def imports(module: str) -> Iterator[Import]:
    """Everything that a module imports at run time; what only a type checker reads is left out."""
    file, tree = sources()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Import(names=names):
                yield from (Import(name.name, lazy) for name in names)
            case ast.ImportFrom(module=target, names=names, level=level):
                assert level == 0 or target, f"{file}: write imports in full"
                origin = target if level == 0 else f"{package}.{target}"
                for name in names:
                    inner = f"{origin}.{name.name}"
                    yield Import(inner if inner in sources() else str(origin), lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                lazy = True
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy)

    return walk(tree, lazy=False)


def row_of(module: str) -> str:
    """The row of the table that a module of Openbook belongs to: 'openbook.spec.model' -> 'spec'."""
    second = module.split(".")[1] if "." in module else ""
    return "" if second == "__main__" else second


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The string constants of a module that are data: neither docstrings nor annotations."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def test_every_module_has_a_row_in_the_table():
    assert {row_of(m) for m in sources()} <= set(RULES)


@pytest.mark.parametrize("row", list(RULES))
def test_a_package_imports_only_what_its_row_allows(row: str):
    rule = RULES[row]
    wrong = []
    for module in (m for m in sources() if row_of(m) == row):
        for found in imports(module):
            top = found.module.split(".")[0]
            if top == "openbook":
                target = row_of(found.module)
                allowed = target in {row, *rule.own.split()} or (row == "cli" and target == "")
            else:
                allowed = top in sys.stdlib_module_names or top in rule.libraries.split()
                allowed = allowed or (found.lazy and top in rule.inside.split())
            if not allowed:
                wrong.append(f"{module} imports {found.module}")
    assert not wrong, "\n".join(wrong)


def test_verbs_import_openbook_only_when_they_run():
    light = {"", "cli", "models", "spec", "ledger"}  # the last two come with `import openbook`
    wrong = [
        f"{module} imports {found.module} at the top"
        for module in sources()
        if row_of(module) == "cli"
        for found in imports(module)
        if found.module.startswith("openbook") and not found.lazy
        if row_of(found.module) not in light
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_modules_import_each_other_even_lazily():
    graph = {m: {i.module for i in imports(m) if i.module in sources()} - {m} for m in sources()}
    # A package's __init__ gathers its modules: importing one of them by name does not need the gathering.
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_module_has_a_name_that_says_nothing():
    parts = {part for module in sources() for part in module.split(".")}
    assert not parts & FORBIDDEN_NAMES


# --- variants are values ------------------------------------------------------------------------

FAMILIES = re.compile(
    r"gpt[-_]?(2|3|j|neo|oss)|llama|mistral|mixtral|qwen|gemma|deepseek|smollm|falcon|olmo|\bphi\b",
    re.IGNORECASE,
)

MAY_NAME_FAMILIES = (
    "openbook.spec.hf",
    "openbook.spec.gguf",
    "openbook.spec.presets",
    "openbook.weights.dialects",
    "openbook.models",  # the files that can be fetched
    "openbook.text",  # the names of pre-tokenizers in GGUF files
    "openbook.cli",  # examples in help texts
)

SCALING_NAMES = {"Llama3Scaling", "_llama3"}
"""A rule for frequencies that is known by the name of the model that brought it."""


def test_family_names_occur_only_where_outside_names_are_translated():
    found = []
    for module, (_, tree) in sources().items():
        if module.startswith(MAY_NAME_FAMILIES):
            continue
        names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
        names += [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        names += [text for n in strings(tree) if " " not in (text := str(n.value))]  # messages are prose
        found += [
            f"{module}: {name}" for name in names if FAMILIES.search(name) and name not in SCALING_NAMES
        ]
    assert not found, "\n".join(sorted(set(found)))


# --- files from outside are hostile -------------------------------------------------------------

NO_CALLS = {"eval", "exec", "compile", "__import__"}
NO_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "imp", "runpy", "importlib"}
HARMLESS = {"importlib.metadata", "importlib.resources", "importlib.util"}


def test_nothing_from_outside_is_ever_executed():
    found = []
    for module, (_, tree) in sources().items():
        found += [f"{module} imports {i.module}" for i in imports(module) if _can_execute(i.module)]
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=name)) if name in NO_CALLS:
                    found.append(f"{module}:{node.lineno} calls {name}")
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                    found.append(f"{module}:{node.lineno} calls torch.load")
                case ast.keyword(arg="trust_remote_code", value=value) if not (
                    isinstance(value, ast.Constant) and value.value is False
                ):
                    found.append(f"{module}:{value.lineno} trusts remote code")
    assert not found, "\n".join(found)


def _can_execute(module: str) -> bool:
    return module.split(".")[0] in NO_MODULES and module not in HARMLESS


def test_no_assert_stands_in_for_validation():
    """`python -O` removes every assert, so a package that must hold under it has none."""
    found = [
        f"{module}:{node.lineno}"
        for module, (_, tree) in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found, "\n".join(found)


# --- what a start costs -------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "transformers", "jinja2")


@pytest.mark.parametrize(
    "start",
    [
        "import openbook",
        "import openbook as ob; ob.ledger(ob.spec('gpt3-175b'))",
        "sys.argv = ['openbook', '--help']; from openbook.cli import main; main()",
        "sys.argv = ['openbook', 'ledger', 'gpt3-175b']; from openbook.cli import main; main()",
    ],
)
def test_starting_loads_nothing_heavy(start: str):
    code = f"""
import sys, atexit
atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))
{start}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]"), done.stderr

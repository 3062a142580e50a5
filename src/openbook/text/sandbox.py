"""Jinja for templates from strangers: what they may touch, and how much work they may do.

Jinja's immutable sandbox bounds *access*. Here *work* is bounded too, within the process and without
signals or threads, so that it holds wherever a template is rendered:

* a template may use what chat templates use (`_SHALLOW_FILTERS`, `_METHODS`, ...), nothing else;
* every loop turn, call, filter, test, operator and literal passes through the sandbox, which counts it
  as a step, counts the characters it handles, and looks at the clock (processor time, so that a busy
  machine changes nothing);
* a container has a weight, the size it would have written out, so `[x, x]` nested 50 deep is refused
  when it is made and not when it is printed.

So no single operation is large and no sequence of operations is long. Jinja's own parsing and
compiling are bounded by the length of the template alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateRuntimeError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from openbook.text.marked import Marked, content, template_text

MAX_TEMPLATE_CHARS = 64 * 1024
"""Longest template; the longest published ones have about 30,000 characters."""
MAX_STEPS = 1_000_000
STEPS_PER_PIECE = 4
"""A piece of a text that is split costs more than a step, in time and memory (some 300 bytes)."""
MAX_CHARS = 20_000_000
"""Characters one rendering may handle, beside 20 for each character it is given."""
MAX_SECONDS = 1.0
"""Processor time of one rendering."""
MAX_INT_BITS = 1024
MAX_INDENT = 16


class LimitError(TemplateRuntimeError):
    """The template asks for more work than a chat template needs."""


class Budget:
    """What one rendering may still do."""

    def __init__(self, given_chars: int = 0) -> None:
        self._steps = MAX_STEPS
        self._chars = self._max_weight = MAX_CHARS + 20 * given_chars
        self._deadline = time.thread_time() + MAX_SECONDS
        # By id; the container is kept too, so that its id stays its own. None ever changes: the
        # sandbox is immutable.
        self._weights: dict[int, tuple[int, bool, object]] = {}

    def pay(self, steps: int = 1, chars: int = 0) -> None:
        self._steps -= steps
        self._chars -= chars
        if self._steps < 0:
            raise LimitError(f"it takes more than {MAX_STEPS:,} steps")
        if self._chars < 0:
            raise LimitError("it makes too much text")
        if time.thread_time() > self._deadline:
            raise LimitError(f"it takes more than {MAX_SECONDS:g} s")

    def weigh(self, value: object) -> tuple[int, bool]:
        """About how many characters `value` has written out, and whether content is among them."""
        if isinstance(value, str):
            return len(value), isinstance(value, Marked) and any(not special for _, special in value.parts)
        if not isinstance(value, dict | list | tuple):
            return 16, False
        known = self._weights.get(id(value))
        if known is None:
            items = [*value, *value.values()] if isinstance(value, dict) else value
            self.pay(1 + len(items))
            weights = [self.weigh(item) for item in items]
            weight = 2 + sum(weight + 2 for weight, _ in weights)
            known = self._weights[id(value)] = (weight, any(marked for _, marked in weights), value)
            if weight > self._max_weight:
                raise LimitError("it makes too large a list")
        return known[:2]


# --- what a template may use --------------------------------------------------------------------

_STRING_METHODS = """
capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_SLOW_METHODS = frozenset(("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"))
"""String methods whose time may be the product of both lengths."""
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_STRING_METHODS.split())),
    (dict, frozenset(("get", "items", "keys", "values"))),
    (list, frozenset(("count", "index"))),
    (tuple, frozenset(("count", "index"))),
)
"""Methods by type; other objects (loops, namespaces, macros) follow Jinja's own rules."""

_SHALLOW_FILTERS = "count d default first items last length map reject rejectattr select selectattr list"
"""Jinja's own filters that do not look into the items they are given."""
_DEEP_FILTERS = "abs capitalize dictsort float int lower max min reverse sort title unique upper"
"""Those that do. `Sandbox` adds indent, join, replace, round, safe, string, tojson and trim."""
_CONSUMING_FILTERS = frozenset(
    ("list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "unique")
)
"""Filters that go through their whole first argument, one step for each item."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering, set up as transformers sets up its own, with a budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._written,
            cache_size=0,
        )
        self.budget = budget
        own = {
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "safe": self._string,
            "string": self._string,
            "tojson": self._to_json,
            "trim": self._trim,
        }
        self.filters = {
            **{name: self._metered_filter(name, deep=False) for name in _SHALLOW_FILTERS.split()},
            **{name: self._metered_filter(name, deep=True) for name in _DEEP_FILTERS.split()},
            **own,
        }
        self.tests = {name: self._metered_test(test) for name, test in self.tests.items()}
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.concat = self._concat  # what macros and {% set %} blocks join their pieces with

    def compile_template(self, source: str) -> CodeType:
        """Compile with every loop, comparison, `~` and literal passed through the sandbox."""
        tree = _Metering().visit(self.parse(source))
        tree.set_environment(self)
        return self.compile(tree, filename="chat template")

    def load(self, code: CodeType) -> Template:
        return Template.from_code(self, code, self.make_globals(None))

    # --- access ----------------------------------------------------------------------------------

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS:
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would let `str.format` through, with any width."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.pay()
        return super().getattr(_with_marks(obj), attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.pay()
        return super().getitem(_with_marks(obj), argument)

    # --- calls and operators ---------------------------------------------------------------------

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        self.budget.pay()
        owner = getattr(__obj, "__self__", None)
        if owner is self:
            return __obj(*args)
        if isinstance(owner, Marked):
            if __obj.__name__ == "join" and args:
                args = ([*self.counted(args[0])], *args[1:])
            self._pay_for_method(owner, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        weight, _ = self.budget.weigh(result)
        if type(result) is str and not isinstance(__obj, Macro):
            self.budget.pay(chars=weight)
            return self._safely_marked(result, *args, *kwargs.values())
        return result

    def _pay_for_method(self, text: Marked, name: str, args: tuple[Any, ...]) -> None:
        if name == "join":
            self._pay_for_joining(text, *args[:1])
        elif name == "replace":
            self._pay_for_replacing(text, *args[:2])
        else:
            longest = max((len(arg) for arg in args if isinstance(arg, str)), default=0)
            rounds = 1 + longest // 8 if name in _SLOW_METHODS else 1
            self.budget.pay(1 + len(text.parts) // 4, rounds * len(text))
            if "split" in name:
                pieces = text.count(args[0]) if args and args[0] else len(text) // 2
                self.budget.pay(STEPS_PER_PIECE * pieces)

    def _pay_for_joining(self, separator: str, items: Iterable[Any] = ()) -> None:
        """Pay for the text and for its parts, of which `separator` gives one more for each item."""
        chars = parts = 0
        for item in items:
            chars += self.budget.weigh(item)[0] + len(separator)
            parts += 1 + (len(item.parts) if isinstance(item, Marked) else 0)
            self.budget.pay()
        between = len(separator.parts) if isinstance(separator, Marked) else 1
        self.budget.pay(parts * (1 + between) // 4, chars)

    def _pay_for_replacing(self, text: str, old: str = "", new: str = "") -> None:
        self.budget.pay(1, len(text))
        found = text.count(old)
        self.budget.pay(STEPS_PER_PIECE * found, found * len(new))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.pay()
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not supported in chat templates, use ~ or +")
        if isinstance(left, int) and isinstance(right, int):
            _check_numbers(operator, left, right)
        elif operator == "+":
            self._pay_for_joining("", (left, right))
        elif operator == "*":
            times = next((side for side in (left, right) if isinstance(side, int)), 1)
            other = right if isinstance(left, int) else left
            parts = len(other.parts) // 4 if isinstance(other, Marked) else 0
            self.budget.pay(max(times, 0) * parts, max(times, 0) * self.budget.weigh(other)[0])
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, list | tuple):
            self.budget.pay(len(result))
            self.budget.weigh(result)
        return result

    # --- what `_Metering` puts into the template ---------------------------------------------------

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """The same items, one step each."""
        for item in iterable:
            self.budget.pay()
            yield item

    def used(self, value: Any) -> Any:
        """A value that is compared, searched or sliced as a whole, which is quick work for its size."""
        self.budget.pay(chars=self.budget.weigh(value)[0] // 16)
        return value

    def built(self, container: Any) -> Any:
        self.budget.weigh(container)
        return container

    def concatenated(self, *values: Any) -> str:
        """`a ~ b`"""
        return self._concat([self._string(value) for value in values])

    # --- making text -----------------------------------------------------------------------------

    def _concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self._pay_for_joining("", pieces)
        return template_text("").join(pieces)

    def _string(self, value: Any) -> str:
        self.budget.pay()
        if isinstance(value, str):
            return value
        return self._safely_marked(self._spelled(str, value), value)

    def _written(self, value: Any) -> str:
        """A value that the template prints."""
        return self._string(value)

    def _spelled(self, spell: Callable[[Any], str], value: Any) -> str:
        self.budget.pay(chars=self.budget.weigh(value)[0])
        text = spell(value)
        self.budget.pay(chars=len(text))
        return text

    def _safely_marked(self, text: str, *sources: Any) -> str:
        """`text` as content when any of what it was made from is."""
        return content(text) if any(self.budget.weigh(source)[1] for source in sources) else text

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: Jinja's own filter would escape HTML characters."""
        for width in (indent, *(separators or ())):
            self._check_width(width)
        dump = partial(
            json.dumps, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._safely_marked(self._spelled(dump, value), value)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items: Iterable[Any] = self.counted(value)
        if attribute is not None:
            items = map(make_attrgetter(self, attribute), items)
        texts = [self._string(item) for item in items]
        self._pay_for_joining(d, texts)
        return template_text(d).join(texts)

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = template_text(self._string(value))
        self._pay_for_replacing(text, old, new)
        return text.replace(old, new, -1 if count is None else count)

    def _trim(self, value: Any, chars: str | None = None) -> str:
        text = template_text(self._string(value))
        self._pay_for_method(text, "strip", (chars,))
        return text.strip(chars)

    def _round(self, value: float, precision: int = 0, method: str = "common") -> float:
        self.budget.pay()
        self._check_width(abs(precision))
        return do_round(value, precision, method)  # type: ignore[arg-type] - it checks the name itself

    def _indent(self, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        """Jinja's `indent`, keeping marks."""
        self._check_width(width)
        margin = width if isinstance(width, str) else " " * width
        lines = (template_text(self._string(value)) + "\n").splitlines()
        self._pay_for_joining(margin, lines)
        return template_text("\n").join(
            margin + line if (first if i == 0 else line or blank) else line for i, line in enumerate(lines)
        )

    def _check_width(self, width: int | str | None) -> None:
        if (len(width) if isinstance(width, str) else width or 0) > MAX_INDENT:
            raise LimitError(f"an indent, separator or precision is more than {MAX_INDENT}")

    # --- filters and tests -----------------------------------------------------------------------

    def _metered_filter(self, name: str, deep: bool) -> Callable[..., Any]:
        function = FILTERS[name]

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            arguments = [*args]
            at = 1 if hasattr(function, "jinja_pass_arg") else 0  # the value follows the environment
            self.budget.pay(chars=self.budget.weigh(arguments[at])[0] if deep else 0)
            if name in _CONSUMING_FILTERS:
                arguments[at] = self.counted(arguments[at])
            result = function(*arguments, **kwargs)
            return self._safely_marked(result, args[at]) if type(result) is str else result

        return metered

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any) -> Any:
            self.budget.pay(len(args))
            return function(*args)

        return metered


def _with_marks(value: Any) -> Any:
    """Plain text as `Marked`, whose methods keep the marks of their arguments."""
    return template_text(value) if isinstance(value, str) else value


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = (
        left.bit_length() * max(right, 1) if operator == "**" else max(left.bit_length(), right.bit_length())
    )
    if bits > MAX_INT_BITS:
        raise LimitError(f"a number has more than {MAX_INT_BITS} bits")


class _Namespace(Namespace):
    """Written out it would show its values, namespaces among them, as often as they are held."""

    def __repr__(self) -> str:
        return "<namespace>"


def _raise_exception(message: str) -> None:
    raise TemplateRuntimeError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().strftime(format)


# --- the syntax tree ----------------------------------------------------------------------------


class _Metering(NodeTransformer):
    """Routes what Jinja compiles to plain Python through the sandbox; refuses other templates."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _sandbox_call("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _sandbox_call("concatenated", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for side in (node, *node.ops):
            if not isinstance(side.expr, nodes.Const):
                side.expr = _sandbox_call("used", side.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _sandbox_call("used", node.node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _sandbox_call("built", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _sandbox_call("built", node) if node.ctx == "load" else node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError(f"line {node.lineno}: a chat template stands alone, it cannot include or import")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse


def _sandbox_call(name: str, *arguments: Any) -> nodes.Call:
    lineno = arguments[0].lineno if arguments else 1
    function = nodes.EnvironmentAttribute(name, lineno=lineno)
    return nodes.Call(function, list(arguments), [], None, None, lineno=lineno)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain_data(value: Any, depth: int = 64) -> Any:
    """`value` rebuilt of plain JSON types, every string in it marked as content.

    Objects with methods of their own never reach a template. TypeError names what is no JSON.
    """
    if depth == 0:
        raise TypeError("it is nested more than 64 deep")
    if isinstance(value, str):
        return content(value)
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {content(str(key)): plain_data(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, depth - 1) for item in value]
    raise TypeError(f"it holds a {type(value).__name__}, which is no JSON value")

"""Renders a model's own chat template.

Templates come with the file and nothing in them is trusted. They run in jinja2's sandbox with a deadline, which every
operation checks, and an operation that could take much time or memory at once is refused.
"""

import datetime
import html
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any, cast

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llamagpu.errors import LlamaGpuError

SECONDS = 2.0  # templates in use take 10 to 130 ms
SOURCE_CHARS = 1 << 16  # the longest in use have about 30,000 and compile in 0.1 s, the slowest of this length in 3 s
LARGEST = 1 << 22  # size of one value, in characters; 128k tokens take about 0.5 million
NODE = 16  # characters that an element of a list counts as
TOTAL = 1 << 26  # size of all values that one rendering creates: bounds its memory
NEEDLE = 64  # characters of the longest argument of SLOW_METHODS
INT_BITS = 256
REMEDY_RAW = "Use --raw to send the prompt without the template."

# jinja2's filters that are used unchanged: their results are no larger than their inputs.
PLAIN_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items",
    "last", "length", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "sort", "string", "unique", "upper",
)  # fmt: skip
METHODS: dict[type, set[str]] = {
    str: {
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
        "upper",
    },
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
}  # fmt: skip
CONTAINERS: tuple[type[Collection[Any]], ...] = (
    list, tuple, set, frozenset, dict, type(METHODS.keys()), type(METHODS.values()), type(METHODS.items()),
)  # fmt: skip
# n characters searched for m characters take time n * m
SLOW_METHODS = {"strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit"}


class TooLargeError(TemplateError):
    """A value of the template is larger than a prompt can need."""


class DeadlinePassedError(TemplateError):
    """The template takes more than SECONDS."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The prompt for these messages. `kwargs` are further variables of the template, such as tools."""
    names = {"tools": None, "documents": None} | kwargs
    names |= {"messages": messages, "bos_token": bos_token, "eos_token": eos_token}
    names["add_generation_prompt"] = add_generation_prompt
    if len(template) > SOURCE_CHARS:
        raise LlamaGpuError(f"the chat template is {len(template):,} characters long", REMEDY_RAW)
    try:
        return _Environment().text(template, names)
    except LlamaGpuError:
        raise
    except DeadlinePassedError:
        cause = f"the chat template takes more than {SECONDS:g} seconds: it may never end"
    except RecursionError:
        cause = "the chat template calls itself without end or is nested too deeply"
    except MemoryError:
        cause = "the chat template takes too much memory"
    except Exception as error:  # a template may fail in any way Python can
        cause = f"the chat template failed: {str(error)[:300] or type(error).__name__}"
    raise LlamaGpuError("".join(c if c.isprintable() else " " for c in cause), REMEDY_RAW)


def weight(value: Any, limit: int = LARGEST) -> int:
    """The size of a value that is written out in full: a list that another one contains twice counts twice.

    It bounds the time and the length of every comparison, copy and print of the value.
    """
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, CONTAINERS):
            total += NODE * len(item)
            if total <= limit:
                stack.extend(item)
                stack.extend(item.values() if isinstance(item, dict) else ())
        total += NODE
        if total > limit:
            raise TooLargeError("it makes a value that is too large")
    return total


class _Namespace(Namespace):
    def __repr__(self) -> str:  # jinja2's shows the contents, which may hold the namespace itself
        return "<namespace>"


class _Generation(Extension):
    """Hugging Face's {% generation %} marks the text of the assistant for training; a prompt needs only the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Checked(NodeTransformer):
    """Passes what the sandbox does not intercept to our filters: new values, loops, comparisons and lookups."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_concat")

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered(node, "_charge")

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_charge" if isinstance(node.arg, nodes.Slice) else "_tick")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_tick")

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_ticking")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one rendering.

    Every value that the template creates passes `charge`. Between two checks of the clock runs one operation, whose
    inputs are not larger than LARGEST.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        self.left = TOTAL
        self.deadline = time.monotonic() + SECONDS
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=pass_context(lambda context, value: self.charge(str(value))),
        )
        self.globals = {
            "range": safe_range,  # at most 100,000 long
            "namespace": _Namespace,
            "dict": _dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.functions = list(self.globals.values())
        self.filters = {name: self._checked(FILTERS[name], self.charge) for name in PLAIN_FILTERS} | {
            "_charge": self.charge,
            "_tick": self.tick,
            "_ticking": self._ticking,
            "_concat": lambda parts: self.concat(str(part) for part in parts),
            "e": self._escape,
            "escape": self._escape,
            "format": lambda text, *args, **kwargs: self._format(str(text), args, kwargs),
            "indent": self._indent,
            "join": self._join_filter,
            "list": self._list,
            "replace": lambda text, *args: self._method(str(text).replace, args, {}),
            "safe": str,  # nothing is escaped in the first place
            "title": self._title,
            "tojson": self._tojson,
            "trim": lambda text, *args: self._method(str(text).strip, args, {}),
        }
        self.tests = {name: self._checked(test, self.tick) for name, test in TESTS.items()}

    def text(self, source: str, names: dict[str, Any]) -> str:
        template = self.template_class.from_code(self, _compiled(source), self.make_globals(None))
        return self.concat(template.generate(names))

    def tick(self, value: Any) -> Any:
        """Check the clock and return the value."""
        if time.monotonic() > self.deadline:
            raise DeadlinePassedError
        return value

    def _ticking(self, values: Iterable[Any]) -> Iterator[Any]:
        return map(self.tick, values)

    def charge(self, value: Any) -> Any:
        """Subtract the size of a new value from the budget of the rendering, and return the value."""
        self.tick(value)
        size = NODE
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, int):
            size = LARGEST + 1 if value.bit_length() > INT_BITS else NODE
        elif isinstance(value, CONTAINERS):
            weight(value)
            size = NODE * len(value)
        self._afford(size)
        self.left -= size
        return value

    def _afford(self, size: float) -> None:
        if size > LARGEST:
            raise TooLargeError("it makes a value that is too large")
        if size > self.left:
            raise TooLargeError("it makes too many values")

    def concat(self, parts: Iterable[str]) -> str:
        """Concatenate output. jinja2 calls it for the whole template, for a macro and for a {% set %} block."""
        kept, size = [], 0
        for part in parts:
            kept.append(part)
            size += len(part)
            self._afford(size)
        return str(self.charge("".join(kept)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return self._format(left, right if isinstance(right, tuple) else (right,), {})
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    self._afford(len(many) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._afford(0 if left.bit_length() * right <= INT_BITS else LARGEST + 1)
        return self.charge(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> None:
        return None  # `_method` formats, because it has the arguments

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        own = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        self.tick(weight((args, own)))  # a macro gets them as its `varargs` and `kwargs`
        if isinstance(obj, BuiltinMethodType):
            return self._method(obj, args, own)
        of_loop = isinstance(obj, MethodType) and isinstance(obj.__self__, LoopContext)
        known = isinstance(obj, (Macro, LoopContext, BlockReference, Undefined))
        if not (known or of_loop or any(obj is function for function in self.functions)):
            raise SecurityError(f"it calls a {type(obj).__name__}, which is not allowed")
        return self.charge(super().call(context, obj, *args, **kwargs))

    def _method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, name = method.__self__, method.__name__
        if name not in METHODS.get(type(owner), ()):
            raise SecurityError(f"it calls {type(owner).__name__}.{name}, which is not allowed")
        if isinstance(owner, str):
            if name in SLOW_METHODS and any(isinstance(arg, str) and len(arg) > NEEDLE for arg in args):
                raise TooLargeError(f"it calls {name} with a long text")
            if name == "format":
                return self._format(owner, args, kwargs, super().wrap_str_format(method))
            if name == "join" and args:
                parts = self._list(args[0])
                self._afford(sum(map(len, parts)) + len(owner) * len(parts))
                args = (parts,)
            if name == "replace" and len(args) > 1:
                self._afford(len(owner) + owner.count(args[0]) * len(args[1]))
        return self.charge(method(*args, **kwargs))

    def _format(self, text: str, args: tuple[Any, ...], kwargs: dict[str, Any], braces: Any = None) -> Any:
        """text % args, or text.format(*args) with the sandbox's own function for that."""
        if re.search(r"\d{4}|\{[^{}]*\{" if braces else r"\d{4}|\*", text):
            raise TooLargeError("it formats text with a wide field")
        # each field is at most 999 wide, or as long as all arguments; \U0001f600 is 10 characters for one
        fields = text.count("{" if braces else "%")
        self._afford((len(text) + fields * (999 + 10 * weight((args, kwargs)))) / 10)
        return self.charge(braces(*args, **kwargs) if braces else text % (kwargs or args))

    def _checked(self, function: Any, check: Callable[[Any], Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            return check(function(*args, **kwargs))

        # the attributes that tell jinja2 to pass the context or the environment as first argument
        checked.__dict__.update(getattr(function, "__dict__", {}))
        return checked

    def _list(self, value: Iterable[Any]) -> list[Any]:
        most = LARGEST // NODE
        kept = list(islice(value, most + 1))
        self._afford(NODE * len(kept))
        return list(self.charge(kept))

    def _join_filter(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
        items = self._list(value)
        if attribute is not None:
            items = list(map(make_attrgetter(self, attribute), items))
        return self._method(str(d).join, ([self.charge(str(item)) for item in items],), {})

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        wide = len(width) if isinstance(width, str) else width
        self._afford(len(text) + wide * (len(text.splitlines()) + 1))
        return self.charge(FILTERS["indent"](text, width, first, blank))

    def _escape(self, text: Any) -> Any:
        return self.charge(html.escape(str(text)))

    def _title(self, text: Any) -> Any:
        self._afford(NODE * len(str(text)))  # jinja2 makes a list of the words
        return self.charge(FILTERS["title"](text))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """The filter of Hugging Face. jinja2's own escapes <, > and & for HTML."""
        if weight((indent, separators)) > 16 * NODE or (isinstance(indent, int) and indent > 16):
            raise TooLargeError("it writes JSON with wide gaps")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat(encoder.iterencode(value))


@lru_cache(4)  # compiling takes ten times as long as rendering
def _compiled(source: str) -> CodeType:
    environment = _Environment()
    return environment.compile(_Checked().visit(environment.parse(source)))


def _dict(other: dict[Any, Any] | None = None, /, **names: Any) -> dict[Any, Any]:
    return {**(other or {}), **names}


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format[:200])

"""Renders chat templates in a process of its own, which chat_template.py starts.

Nothing in a template is trusted. It runs in jinja2's sandbox, where an operation that could take much memory at once is
refused. The kernel bounds CPU time (Linux, macOS) and memory (Linux). This module imports only jinja2 and the
standard library: the process must start fast.
"""

import datetime
import html
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
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

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MEMORY = 512 << 20  # bytes of this process
OUT_OF_MEMORY = 12  # exit status
LARGEST = 1 << 22  # size of one value, in characters; 128k tokens take about 0.5 million
NODE = 16  # characters that an element of a list counts as
TOTAL = 1 << 26  # size of all values that one rendering creates: bounds its memory
INT_BITS = 256

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


class TooLargeError(TemplateError):
    """A value of the template is larger than a prompt can need."""


def weight(value: Any, limit: int = LARGEST) -> int:
    """The size of a value that is written out in full: a list that another one contains twice counts twice.

    It bounds the length of every copy and print of the value.
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
    """Passes the new values that the sandbox does not intercept to our filters."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_concat")

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered(node, "_charge")

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_charge") if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one rendering.

    Every value that the template creates passes `charge`, which keeps the inputs of an operation below LARGEST.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        self.left = TOTAL
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
        self.filters = {name: self._charged(FILTERS[name]) for name in PLAIN_FILTERS} | {
            "_charge": self.charge,
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
        self.tests = dict(TESTS)

    def text(self, source: str, names: dict[str, Any]) -> str:
        template = self.template_class.from_code(self, _compiled(source), self.make_globals(None))
        return self.concat(template.generate(names))

    def charge(self, value: Any) -> Any:
        """Subtract the size of a new value from the budget of the rendering, and return the value."""
        # bytes on macOS, which has no limit of address space; KiB on Linux, where this is never true
        if resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY:
            raise MemoryError
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
        weight((args, own))  # a macro gets them as its `varargs` and `kwargs`
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

    def _charged(self, function: Any) -> Callable[..., Any]:
        def charged(*args: Any, **kwargs: Any) -> Any:
            return self.charge(function(*args, **kwargs))

        # the attributes that tell jinja2 to pass the context or the environment as first argument
        charged.__dict__.update(getattr(function, "__dict__", {}))
        return charged

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


def main() -> None:
    """Answer each request, a line of JSON on standard input, with a line on standard output."""
    if resource:
        with suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu(request["seconds"])
        try:
            answer = _answer(request["template"], request["names"])
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # nothing that the template left behind counts against the next one
        _limit_cpu(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so many seconds of CPU time. 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(template: str, names: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": _Environment().text(template, names)}
    except MemoryError:
        raise
    except RecursionError:
        return {"cause": "the chat template calls itself without end or is nested too deeply"}
    except Exception as error:  # a template may fail in any way Python can
        return {"cause": f"the chat template failed: {str(error)[:300] or type(error).__name__}"}

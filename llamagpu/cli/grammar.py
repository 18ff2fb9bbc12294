"""The grammar options of `generate` and `chat`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamagpu.cli import options as o
from llamagpu.cli.terminal import Usage
from llamagpu.errors import BadArgument, LlamaGpuError

if TYPE_CHECKING:
    from llamagpu.engine.grammar import Grammar

MAX_BYTES = 4 << 20  # of a file; Grammar refuses less

SchemaOption = Annotated[
    str | None,
    o.option(
        *("-j", "--json-schema", "-jf", "--json-schema-file"),
        help="JSON schema that the text has to match: a file, or the schema itself (default: none).",
    ),
]
GrammarOption = Annotated[
    str | None,
    o.option(
        *("--grammar", "--grammar-file"),
        help="Grammar that the text has to match, Lark or GBNF: a file, or the grammar itself (default: none).",
    ),
]
RegexOption = Annotated[
    str | None,
    o.option("--regex", help="Regular expression that the whole text has to match (default: none)."),
]


def read_grammar(json_schema: str | None, grammar: str | None, regex: str | None) -> "Grammar | None":
    """The grammar of the options, of which one at most may be given."""
    given = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise Usage(f"{' and '.join(names)} are given", "give one of them: a text has one grammar")
    if not names:
        return None
    from llamagpu.engine.grammar import LARK_RULE, Grammar, is_gbnf  # here: numpy takes a tenth of a second

    if regex is not None:
        return Grammar.regex(regex)
    value = json_schema if json_schema is not None else grammar or ""
    itself = value.lstrip().startswith("{") if json_schema is not None else "::=" in value or LARK_RULE.search(value)
    text = value if itself else read_file(value)
    try:
        if json_schema is not None:
            return Grammar.json_schema(text)
        return Grammar.gbnf(text) if is_gbnf(text, "" if itself else value) else Grammar.lark(text)
    except BadArgument as error:
        raise error if itself else BadArgument(f"{value}: {error.cause}", error.remedy) from None


def read_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) <= MAX_BYTES:
            return raw.decode("utf-8-sig")
        reason: object = f"it has more than {MAX_BYTES >> 20} MiB"
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
    raise LlamaGpuError(f"{name}: {reason}", "name a file with the grammar")

"""The `tokenize` command."""

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from llamagpu.cli import options as o
from llamagpu.cli.models import find_model
from llamagpu.cli.terminal import Usage, read_text, write
from llamagpu.errors import LlamaGpuError, error_context
from llamagpu.hub.catalogue import DEFAULT

if TYPE_CHECKING:
    from llamagpu.files.tokenizer import Tokenizer


def tokenize(
    model: o.ModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    prompt: o.PromptOption = None,
    file: o.FileOption = None,
    no_bos: Annotated[bool, o.option("--no-bos", help="Do not add a BOS token.")] = False,
    no_special: Annotated[
        bool, o.option("--no-special", help="Treat the text of special tokens as plain text.")
    ] = False,
    decode: Annotated[bool, o.option("--decode", help="Convert a JSON list of ids back to text.")] = False,
    offline: o.OfflineOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Convert text to a JSON list of token ids, or back with --decode. Needs no GPU."""
    from llamagpu.files.packed_file import open_model_file
    from llamagpu.files.tokenizer import Tokenizer

    text = read_text(prompt, file)
    path = find_model(model, hf_repo, offline)
    with error_context(path), closing(open_model_file(path)) as model_file:
        tokenizer = Tokenizer.from_gguf(model_file.metadata)
        if decode:
            write(tokenizer.decode_bytes(parse_ids(text), special=not no_special))
        else:
            check_bytes(tokenizer, text)
            ids = tokenizer.encode(text, bos=False if no_bos else None, special=not no_special)
            write(json.dumps(ids) + "\n")


def check_bytes(tokenizer: "Tokenizer", text: str) -> None:
    """Refuse a text with bytes that the vocabulary has no token for: they would be dropped."""
    for i, letter in enumerate(text):
        if "\udc80" <= letter <= "\udcff" and not tokenizer.encode(letter, bos=False):
            offset = len(text[:i].encode("utf-8", "surrogateescape"))
            cause = f"byte {offset} of the text is 0x{ord(letter) - 0xDC00:02x}, which this model has no token for"
            raise LlamaGpuError(cause, "give UTF-8 text; `iconv` converts other encodings")


def parse_ids(text: str) -> list[int]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Usage("--decode wants a JSON list of ids", "such as [1, 2, 3]")
    return ids

"""A checkpoint's tokenizer as GGUF metadata: from tokenizer.json (BPE), tokenizer.model (SentencePiece) or
llama2.c's tokenizer.bin. That of tokenizer.json is tried on a text: the ids must be the original's."""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.gguf_file import show
from llamagpu.files.tokenizer import (
    BYTE,
    CONTROL,
    PATTERNS,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    WHOLE_WORD_FIRST,
    Tokenizer,
)

NORMAL, UNUSED = 1, 5
LAST_SCORE = -1000.0  # of a token that SentencePiece must not build from pieces before any other
# Names that llama.cpp knows too, the usual ones first: where a word that is a token is left whole, and others.
WHOLE_NAMES = ("llama-bpe", "tekken", *sorted(WHOLE_WORD_FIRST))
OTHER_NAMES = ("smollm", "gpt-2", "qwen2", "dbrx", "gpt-4o", *sorted(PATTERNS))
# All that patterns differ in: runs of digits, cases, contractions, blanks, line ends, marks, scripts, symbols.
CHECK = (
    "The quick brown fox: 1 22 333 4444 55555, 3.14159e-10 and 0x7fFF!\n\n\n"
    "  Indented\ttabs\t\t and   blanks  \r\n"
    "I'm sure they'LL say it'S we've, don't, YOU'RE; "
    "CamelCaseWords HTTPServer iPhone15Pro snake_case -- a+b==c?? "
    "https://example.org/a/b?c=d&e=f <tag attr='x'/> "
    '{"key": [1, 2]} /* code */ // end\n x = y[12345678];\n\n'
    "\u00c9t\u00e9 na\u00efve \u0416\u0443\u043a\u0438 12\u043a\u0433 "
    "\u4f60\u597d\uff0c\u4e16\u754c2024\u5e74 "
    "\u3053\u3093\u306b\u3061\u306f \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 "
    "\uc548\ub155 \u0661\u0662\u0663 \u00bd \u20ac5 \u2026 \U0001f600\U0001f44d\U0001f3fd \u200d \u00a0end  "
)


@dataclass(slots=True)
class Vocabulary:
    """One entry per row of the embedding table; rows without a token are unused."""

    size: int
    tokens: list[str] = field(init=False)
    types: list[int] = field(init=False)
    scores: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [f"[PAD{i}]" for i in range(self.size)]
        self.types = [UNUSED] * self.size
        self.scores = [LAST_SCORE] * self.size

    def put(self, id: Any, text: Any, type: int, score: float = LAST_SCORE) -> None:
        if not isinstance(id, int) or not isinstance(text, str) or id < 0:
            raise BadFile(f"tokenizer: {show(text)} has the id {show(id)}", "Fetch the tokenizer again.")
        if id < self.size:  # some tokenizers name tokens that the model has no row for
            self.tokens[id], self.types[id], self.scores[id] = text, type, score

    def add(self, id: Any, text: Any, special: bool) -> None:
        """A token that was added later; what a SentencePiece model says of its own special ones stays."""
        if isinstance(id, int) and 0 <= id < self.size and self.types[id] in (UNKNOWN, CONTROL, BYTE):
            return
        looks_special = bool(re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", str(text)))
        self.put(id, text, CONTROL if special or looks_special else USER_DEFINED)

    def metadata(self, model: str, pre: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokenizer.ggml.model": model,
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": np.array(self.types, np.int32),
        }
        if model == "llama":
            found["tokenizer.ggml.scores"] = np.array(self.scores, np.float32)
        return found


def read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", "Check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not JSON: {error}", "Fetch it again.") from error
    if not isinstance(found, dict):
        raise BadFile(f"{path}: no JSON object", "Fetch it again.")
    return found


def vocabulary(folder: Path, size: int, config: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.* keys for a Hugging Face folder whose embedding table has `size` rows."""
    settings = read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file():
        found = sentencepiece(folder, size, settings)
    elif (folder / "tokenizer.json").is_file():
        found = bpe(folder / "tokenizer.json", size)
    else:
        raise BadFile(f"{folder} has neither tokenizer.json nor tokenizer.model", "Put the model's beside its weights.")
    found |= special_ids(found["tokenizer.ggml.tokens"], settings, config)
    for name in ("bos", "eos"):
        if isinstance(wanted := settings.get(f"add_{name}_token"), bool):
            found[f"tokenizer.ggml.add_{name}_token"] = wanted
    template = chat_template(folder, settings)
    return found | ({"tokenizer.chat_template": template} if template else {})


def special_ids(tokens: list[str], settings: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """Which tokens begin and end a text: by text in tokenizer_config.json, else by number in config.json."""
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text, id = settings.get(f"{name}_token"), config.get(f"{name}_token_id")
        text = text.get("content") if isinstance(text, dict) else text
        id = id[0] if isinstance(id, list) and id else id
        if isinstance(text, str) and text in tokens:
            id = tokens.index(text)
        if type(id) is int and 0 <= id < len(tokens):
            found[f"tokenizer.ggml.{key}_token_id"] = id
    return found


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    file = folder / "chat_template.jinja"
    if not template and file.is_file():
        template = file.read_text("utf-8")
    return template if isinstance(template, str) else None


def bpe(path: Path, size: int) -> dict[str, Any]:
    data = read_json(path)
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or "merges" not in model:
        kind = model.get("type") if isinstance(model, dict) else None
        raise Unsupported(f"{path}: a tokenizer of type {show(kind)}", "BPE (tokenizer.json) and SentencePiece work.")
    vocab = Vocabulary(size)
    for text, id in model["vocab"].items():
        vocab.put(id, text, NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in model["merges"]]
    if model.get("byte_fallback"):
        mark_pieces(vocab, model.get("unk_token"), merges)
    for token in data.get("added_tokens") or []:
        vocab.add(token.get("id"), token.get("content"), token.get("special", False))
    if model.get("byte_fallback"):
        return agreeing(path, data, vocab.metadata("llama", "default"))
    return agreeing(path, data, vocab.metadata("gpt2", "") | {"tokenizer.ggml.merges": merges})


def mark_pieces(vocab: Vocabulary, unknown: str | None, merges: list[str]) -> None:
    """A SentencePiece vocabulary rewritten as BPE: the earlier a merge makes a token, the higher its score."""
    ids = {text: id for id, text in enumerate(vocab.tokens)}
    for rank in range(len(merges) - 1, -1, -1):
        if (id := ids.get(merges[rank].replace(" ", ""))) is not None:
            vocab.scores[id] = -float(rank)
    for id, text in enumerate(vocab.tokens):
        if text == unknown or re.fullmatch("<0x[0-9A-F]{2}>", text):
            vocab.types[id] = UNKNOWN if text == unknown else BYTE


def agreeing(path: Path, data: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """`found` with the settings under which its ids for CHECK are those of the original tokenizer."""
    from tokenizers import Tokenizer as Original  # here: only this file's kind needs it

    try:
        original = Original.from_file(str(path))
        wanted = original.encode(CHECK, add_special_tokens=False).ids
        around = original.encode("a").ids, original.encode("a", add_special_tokens=False).ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exceptions, and panics, which are none
        raise BadFile(f"{path}: {show(str(error))}", "Fetch it again.") from error
    found["tokenizer.ggml.add_bos_token"] = around[0][:1] != around[1][:1]
    found["tokenizer.ggml.add_eos_token"] = around[0][-1:] != around[1][-1:]
    if found["tokenizer.ggml.model"] == "llama":
        choices: list[dict[str, Any]] = [{"tokenizer.ggml.add_space_prefix": prefix} for prefix in (True, False)]
    else:
        names = WHOLE_NAMES if data["model"].get("ignore_merges") else OTHER_NAMES
        choices = [{"tokenizer.ggml.pre": name} for name in dict.fromkeys(names)]
    for choice in choices:
        try:
            if Tokenizer.from_gguf(found | choice).encode(CHECK, bos=False) == wanted:
                return found | choice
        except LlamaGpuError:
            continue  # a pattern under which a merge makes what is no token
    raise Unsupported(
        f"{path}: a way of splitting text that is not known here",
        f"Those of Llama 1-3, Mistral, Qwen2, SmolLM and {len(PATTERNS) - 5} others work.",
    )


# SentencePiece: a protobuf message, of which few fields matter


def sentencepiece(folder: Path, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / "tokenizer.model"
    vocab, prefix, count = Vocabulary(size), True, 0
    try:
        for number, value in fields(path.read_bytes()):
            if number == 1:  # SentencePiece: 1 text, 2 score, 3 type
                piece = dict(fields(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                vocab.put(count, piece[1].decode("utf-8"), piece.get(3, NORMAL), score)
                count += 1
            elif number == 2 and dict(fields(value)).get(3, 1) != 2:  # TrainerSpec: 3 model type, 2 for BPE
                raise Unsupported(f"{path}: a SentencePiece model that is not BPE", "Llama's and Mistral's are.")
            elif number == 3:  # NormalizerSpec: 3 add_dummy_prefix
                prefix = bool(dict(fields(value)).get(3, 1))
    except (ValueError, KeyError, IndexError, TypeError, struct.error, OSError) as error:
        raise BadFile(f"{path}: not a SentencePiece model ({error})", "Fetch it again.") from error
    if not count:
        raise BadFile(f"{path}: holds no tokens", "Fetch it again.")
    for text, id in read_json(folder / "added_tokens.json").items():
        vocab.add(id, text, False)
    for id, token in (settings.get("added_tokens_decoder") or {}).items():
        vocab.add(int(id), token.get("content"), token.get("special", False))
    found = vocab.metadata("llama", "default")
    flags = {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": prefix}
    return found | {f"tokenizer.ggml.{name}": value for name, value in flags.items()}


def fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: whole numbers, or bytes for all else."""
    at = 0

    def whole() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        key = whole()
        if key & 7 == 0:
            yield key >> 3, whole()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or (whole() if key & 7 == 2 else len(raw) + 1)
        at += size
        if at > len(raw):
            raise ValueError(f"field {key >> 3} is cut short")
        yield key >> 3, raw[at - size : at]


def llama2c(path: Path, size: int) -> dict[str, Any]:
    """tokenizer.bin: the longest length, then per token a score, a length, the text with spaces for U+2581."""
    vocab = Vocabulary(size)
    try:
        raw, at = path.read_bytes(), 4
        for id in range(size):
            score, length = struct.unpack_from("<fi", raw, at)
            text = raw[at + 8 : at + 8 + length].decode("utf-8", "replace").replace(" ", SPACE)
            at += 8 + length
            if length < 0 or at > len(raw):
                raise ValueError(f"token {id} is cut short")
            vocab.put(id, text, NORMAL, score)
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file", "A llama2.c model needs its tokenizer.bin in the same folder.") from None
    except (OSError, ValueError, struct.error) as error:
        raise BadFile(
            f"{path}: not a tokenizer of {size} tokens ({error})", "Use the one it was trained with."
        ) from error
    for id, text in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))][:size]):
        vocab.put(id, text, UNKNOWN if id == 0 else CONTROL if id < 3 else BYTE)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    return vocab.metadata("llama", "default") | {f"tokenizer.ggml.{name}": value for name, value in ids.items()}

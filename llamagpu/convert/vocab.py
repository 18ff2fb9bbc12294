"""A checkpoint's tokenizer as GGUF metadata: tokenizer.json (BPE), tokenizer.model (SentencePiece), llama2.c's file.

A vocabulary from tokenizer.json is checked on a text: it must give the ids of the original tokenizer.
"""

import json
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import Keys, TokenType

from llamagpu.convert import original_tokenizer
from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.gguf_file import shown
from llamagpu.files.isolated import isolated_python
from llamagpu.files.tokenizer import PATTERNS, SPACE, WHOLE_WORD_FIRST, Tokenizer

LAST_SCORE = -1000.0  # of a token without a score: SentencePiece merges it after all others
# Values of tokenizer.ggml.pre that llama.cpp has too, the common ones first. WHOLE_WORD_PRE are those that do not merge
# a word which is a token (ignore_merges).
WHOLE_WORD_PRE = ("llama-bpe", "tekken", *sorted(WHOLE_WORD_FIRST))
FALLBACK_PRE = ("smollm", "gpt-2", "qwen2", "dbrx", "gpt-4o", *sorted(PATTERNS))
MAX_TOKENS = 1 << 20  # the largest in use have 262,144
SPECIAL_IDS = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "unk": Keys.Tokenizer.UNK_ID,
    "pad": Keys.Tokenizer.PAD_ID,
}
CPU_SECONDS, WALL_SECONDS = 20, 200  # for the original tokenizer to encode CHECK; Llama 3's takes 0.7
REMEDY_REFETCH_IT = "Fetch it again."
# A text with everything that the patterns distinguish: digits, case, contractions, whitespace, marks, scripts.
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
    types: list[int] = field(init=False)  # TokenType; SentencePiece models use the same numbers
    scores: list[float] = field(init=False)

    def __post_init__(self) -> None:
        if self.size > MAX_TOKENS:
            raise Unsupported(f"a vocabulary of {self.size:,} tokens", f"Up to {MAX_TOKENS:,} are supported.")
        self.tokens = [f"[PAD{i}]" for i in range(self.size)]
        self.types = [TokenType.UNUSED] * self.size
        self.scores = [LAST_SCORE] * self.size

    def put(self, id: object, text: object, type: int, score: float = LAST_SCORE) -> None:
        if not isinstance(id, int) or not isinstance(text, str) or id < 0:
            raise BadFile(f"tokenizer: {shown(text)} has the id {shown(id)}", "Fetch the tokenizer again.")
        if id < self.size:  # some tokenizers have tokens without a row in the embedding table
            self.tokens[id], self.types[id], self.scores[id] = text, type, score

    def add(self, id: object, text: object, special: bool) -> None:
        """Put a token of added_tokens. The special tokens of a SentencePiece model keep their types."""
        fixed = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
        if isinstance(id, int) and 0 <= id < self.size and self.types[id] in fixed:
            return
        looks_special = bool(re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", str(text)))
        self.put(id, text, TokenType.CONTROL if special or looks_special else TokenType.USER_DEFINED)

    def metadata(self, model: str, pre: str) -> dict[str, Any]:
        if model == "llama":  # GGUF files have user-defined tokens of SentencePiece models as they stand in a text
            for i, type in enumerate(self.types):
                if type == TokenType.USER_DEFINED:
                    self.tokens[i] = self.tokens[i].replace(SPACE, " ")
        found: dict[str, Any] = {
            Keys.Tokenizer.MODEL: model,
            Keys.Tokenizer.PRE: pre,
            Keys.Tokenizer.LIST: self.tokens,
            Keys.Tokenizer.TOKEN_TYPE: np.array(self.types, np.int32),
        }
        if model == "llama":
            found[Keys.Tokenizer.SCORES] = np.array(self.scores, np.float32)
        return found


def read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise BadFile(f"{path}: is not a regular file", REMEDY_REFETCH_IT)
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", "Check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not JSON: {error}", REMEDY_REFETCH_IT) from error
    if not isinstance(found, dict):
        raise BadFile(f"{path}: no JSON object", REMEDY_REFETCH_IT)
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
    found |= special_ids(found[Keys.Tokenizer.LIST], settings, config)
    for name, key in (("bos", Keys.Tokenizer.ADD_BOS), ("eos", Keys.Tokenizer.ADD_EOS)):
        if isinstance(wanted := settings.get(f"add_{name}_token"), bool):
            found[key] = wanted
    template = chat_template(folder, settings)
    return found | ({Keys.Tokenizer.CHAT_TEMPLATE: template} if template else {})


def special_ids(tokens: list[str], settings: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    """The special tokens: by text in tokenizer_config.json, else by number in config.json."""
    found = {}
    for name, key in SPECIAL_IDS.items():
        text, id = settings.get(f"{name}_token"), config.get(f"{name}_token_id")
        text = text.get("content") if isinstance(text, dict) else text
        id = id[0] if isinstance(id, list) and id else id
        if isinstance(text, str) and text in tokens:
            id = tokens.index(text)
        if type(id) is int and 0 <= id < len(tokens):
            found[key] = id
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
        found = model.get("type") if isinstance(model, dict) else None
        raise Unsupported(f"{path}: a tokenizer of type {shown(found)}", "BPE (tokenizer.json) and SentencePiece work.")
    vocab = Vocabulary(size)
    for text, id in model["vocab"].items():
        vocab.put(id, text, TokenType.NORMAL)
    merges = [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in model["merges"]]
    if model.get("byte_fallback"):
        restore_scores(vocab, model.get("unk_token"), merges)
    for token in data.get("added_tokens") or []:
        vocab.add(token.get("id"), token.get("content"), token.get("special", False))
    if model.get("byte_fallback"):
        return match_original(path, data, vocab.metadata("llama", "default"))
    return match_original(path, data, vocab.metadata("gpt2", "") | {Keys.Tokenizer.MERGES: merges})


def restore_scores(vocab: Vocabulary, unknown: str | None, merges: list[str]) -> None:
    """Give the tokens of a SentencePiece vocabulary that is stored as BPE their scores and types.

    The earlier a merge creates a token, the higher is its score.
    """
    ids = {text: id for id, text in enumerate(vocab.tokens)}
    for rank in range(len(merges) - 1, -1, -1):
        if (id := ids.get(merges[rank].replace(" ", ""))) is not None:
            vocab.scores[id] = -float(rank)
    for id, text in enumerate(vocab.tokens):
        if text == unknown or re.fullmatch("<0x[0-9A-F]{2}>", text):
            vocab.types[id] = TokenType.UNKNOWN if text == unknown else TokenType.BYTE


def original_ids(path: Path, *texts: str) -> list[tuple[list[int], list[int]]]:
    """The ids of each text, without and with special tokens, as the tokenizers library gives them."""
    request = json.dumps({"path": str(path), "texts": texts, "seconds": CPU_SECONDS})
    command = isolated_python(Path(original_tokenizer.__file__), "tokenizers")
    try:
        done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadFile(f"{path}: reading it takes more than {WALL_SECONDS} s", REMEDY_REFETCH_IT) from None
    except OSError as error:
        raise LlamaGpuError(f"cannot start a process for {path}: {error}", "Try again.") from error
    if done.returncode:
        raise BadFile(f"{path}: reading it takes too much memory or time", REMEDY_REFETCH_IT)
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise BadFile(f"{path}: {shown(answer['error'])}", REMEDY_REFETCH_IT)
    return [(plain, special) for plain, special in answer["ids"]]


def match_original(path: Path, data: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """`found` with the settings that give the ids of the original tokenizer for CHECK."""
    (wanted, _), (without_special, with_special) = original_ids(path, CHECK, "a")
    found[Keys.Tokenizer.ADD_BOS] = with_special[:1] != without_special[:1]
    found[Keys.Tokenizer.ADD_EOS] = with_special[-1:] != without_special[-1:]
    if found[Keys.Tokenizer.MODEL] == "llama":
        candidates: list[dict[str, Any]] = [{Keys.Tokenizer.ADD_PREFIX: prefix} for prefix in (True, False)]
    else:
        names = WHOLE_WORD_PRE if data["model"].get("ignore_merges") else FALLBACK_PRE
        candidates = [{Keys.Tokenizer.PRE: name} for name in dict.fromkeys(names)]
    for candidate in candidates:
        try:
            if Tokenizer.from_gguf(found | candidate).encode(CHECK, bos=False) == wanted:
                return found | candidate
        except LlamaGpuError:
            continue  # with this pattern a merge gives a text that is not a token
    raise Unsupported(
        f"{path}: its pre-tokenizer is not supported",
        f"Those of Llama 1-3, Mistral, Qwen2, SmolLM and {len(PATTERNS) - 5} others work.",
    )


# SentencePiece models are protobuf messages. Only a few of their fields are read.


def sentencepiece(folder: Path, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / "tokenizer.model"
    vocab, prefix, count = Vocabulary(size), True, 0
    try:
        for number, value in fields(path.read_bytes()):
            if number == 1:  # SentencePiece: 1 text, 2 score, 3 type
                piece = dict(fields(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                vocab.put(count, piece[1].decode("utf-8"), piece.get(3, TokenType.NORMAL), score)
                count += 1
            elif number == 2 and dict(fields(value)).get(3, 1) != 2:  # TrainerSpec: 3 model type, 2 for BPE
                raise Unsupported(f"{path}: a SentencePiece model that is not BPE", "Llama's and Mistral's are.")
            elif number == 3:  # NormalizerSpec: 3 add_dummy_prefix
                prefix = bool(dict(fields(value)).get(3, 1))
    except (ValueError, KeyError, IndexError, TypeError, struct.error, OSError) as error:
        raise BadFile(f"{path}: not a SentencePiece model ({error})", REMEDY_REFETCH_IT) from error
    if not count:
        raise BadFile(f"{path}: holds no tokens", REMEDY_REFETCH_IT)
    for text, id in read_json(folder / "added_tokens.json").items():
        vocab.add(id, text, False)
    for id, token in (settings.get("added_tokens_decoder") or {}).items():
        vocab.add(
            int(id) if re.fullmatch("0|[1-9][0-9]{,8}", id) else id, token.get("content"), token.get("special", False)
        )
    found = vocab.metadata("llama", "default")
    flags = {Keys.Tokenizer.ADD_BOS: True, Keys.Tokenizer.ADD_EOS: False, Keys.Tokenizer.ADD_PREFIX: prefix}
    return found | flags


def fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: varints as int, all other types as bytes."""
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = raw[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while offset < len(raw):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or (varint() if key & 7 == 2 else len(raw) + 1)
        offset += size
        if offset > len(raw):
            raise ValueError(f"field {key >> 3} is cut short")
        yield key >> 3, raw[offset - size : offset]


def llama2c(path: Path, size: int) -> dict[str, Any]:
    """Read tokenizer.bin: the longest length, then for each token its score, its length and its text, with spaces for
    U+2581."""
    vocab = Vocabulary(size)
    try:
        raw, offset = path.read_bytes(), 4
        for id in range(size):
            score, length = struct.unpack_from("<fi", raw, offset)
            text = raw[offset + 8 : offset + 8 + length].decode("utf-8", "replace").replace(" ", SPACE)
            offset += 8 + length
            if length < 0 or offset > len(raw):
                raise ValueError(f"token {id} is cut short")
            vocab.put(id, text, TokenType.NORMAL, score)
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file", "A llama2.c model needs its tokenizer.bin in the same folder.") from None
    except (OSError, ValueError, struct.error) as error:
        raise BadFile(
            f"{path}: not a tokenizer of {size} tokens ({error})", "Use the one it was trained with."
        ) from error
    for id, text in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))][:size]):
        type = TokenType.UNKNOWN if id == 0 else TokenType.CONTROL if id < 3 else TokenType.BYTE
        vocab.put(id, text, type)
    ids = {Keys.Tokenizer.BOS_ID: 1, Keys.Tokenizer.EOS_ID: 2, Keys.Tokenizer.UNK_ID: 0, Keys.Tokenizer.ADD_BOS: True}
    return vocab.metadata("llama", "default") | ids

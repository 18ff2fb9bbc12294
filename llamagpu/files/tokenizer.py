"""Text to token ids and back, from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece ("llama").

Both merge neighbouring symbols in the order of llama.cpp. The ids of words are cached, because most words recur.
"""

import codecs
import heapq
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadArgument, BadFile, Unsupported

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type that matter here
CACHED_WORDS = 1 << 15  # 100 KB of English has about 5,000 different words
SPACE = "\u2581"  # how SentencePiece writes a space
REMEDY_DAMAGED = "The file is damaged or was converted wrongly: fetch or convert it again."

# Token texts that end generation, whatever the metadata says about them.
END_TEXTS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    # a model that starts to pad, or to write the next file, is done too
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
    "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip

# In a vocabulary that has CHANNEL_ENDS, as gpt-oss', <|end|> ends a message, and the answer may be the next one: it and
# the other marks of messages and channels are part of the text.
CHANNEL_ENDS = ("<|return|>", "<|call|>")
FINAL_CHANNEL = "<|channel|>final<|message|>"
CHANNEL_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")

# Blanks after special tokens are no tokens in models of these names, but after KEEPS_BLANKS, as in llama.cpp.
STRIPS_BLANKS = ("phi-3", "phi3")
KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")

# Python's re has no Unicode categories. Before the split each character beyond ASCII is replaced by a stand-in for its
# category; offsets stay the same.
CATEGORIES = ("Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "P", "S")
STAND_INS = {category: chr(0xE000 + i) for i, category in enumerate(CATEGORIES)}
OTHER_CATEGORY = "\ue009"
UPPER, LOWER, LETTER = "A-Z\ue000\ue002-\ue005", "a-z\ue001\ue003-\ue005", "A-Za-z\ue000-\ue004"
CASED, MARK, NUMBER = "A-Za-z\ue000-\ue002", "\ue005", "0-9\ue006"
PUNCTUATION, SYMBOL = r"!-#%-*,-/:;?@\[-\]_{}" + "\ue007", "$+<->^`|~\ue008"

APOSTROPHE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{LETTER}]+| ?[{NUMBER}]+| ?[^\s{LETTER}{NUMBER}]+|\s+(?!\S)"


def _llama3(number: str, letter: str = LETTER, marks: str = "") -> str:
    words = rf"{APOSTROPHE}|[^\r\n{LETTER}{NUMBER}]?[{letter}]+|{number}"
    return rf"{words}| ?[^\s{LETTER}{marks}{NUMBER}]+[\r\n]*|{BLANKS}"


def _cased(number: str, ending: str = "") -> str:
    lead = rf"[^\r\n{LETTER}{NUMBER}]?"
    words = f"{lead}[{UPPER}]*[{LOWER}]+{ending}|{lead}[{UPPER}]+[{LOWER}]*{ending}"
    return rf"{words}|{number}| ?[^\s{LETTER}{NUMBER}]+[\r\n/]*|{BLANKS}"


DIGIT, DIGITS = f"[{NUMBER}]", f"[{NUMBER}]{{1,3}}"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DEEPSEEK3 = (
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n{LETTER}{PUNCTUATION}{SYMBOL}]?[{LETTER}{MARK}]+"
    rf"| ?[{PUNCTUATION}{SYMBOL}]+[\r\n]*|{BLANKS}"
)
# The patterns that split a text into words, by tokenizer.ggml.pre. Each pattern splits the pieces of the one before it.
PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (rf"[{PUNCTUATION}$+<=>^~|]+", GPT2, f"[{NUMBER}]+", "[0-9]{3}"),
    "falcon": (rf"[{PUNCTUATION}$+<=>^~|`]+", GPT2, "[0-9]{3}"),
    "gpt-2": (GPT2,),
    "starcoder": (DIGIT, GPT2),
    "llama3": (_llama3(DIGITS),),
    "minicpm5": (DIGITS, _llama3(f"[{NUMBER}]+")),
    "qwen2": (_llama3(DIGIT),),
    "qwen35": (_llama3(DIGIT, LETTER + MARK, MARK),),
    "tekken": (_cased(DIGIT),),
    "gpt-4o": (_cased(DIGITS, APOSTROPHE + "?"),),
    "seed-coder": (_llama3(DIGIT).replace(r"[\r\n]*", ""),),
    "bailingmoe": (_llama3(DIGIT).replace(r"\s*[\r\n]+", r"\s*[\r\n]"),),
    "bloom": (BLOOM,),
    "viking": (BLOOM, DIGIT),
    "deepseek-llm": (  # (?<!\s): a search that starts at each of n blanks takes time n * n
        r"[\r\n]", rf"\s?[{CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"(?<!\s)\s+$", "[\u0800-\u9fa5\uac00-\ud7ff]+", f"[{NUMBER}]+",
    ),
    "deepseek-coder": (
        r"[\r\n]", rf"\s?[{LETTER}]+", rf"\s?[{PUNCTUATION}]+", "[\u0800-\u9fa5\uac00-\ud7ff]+", DIGIT,
    ),
    "deepseek-v3": (DIGITS, "[\u4e00-\u9fa5\u3040-\u30ff]+", DEEPSEEK3),
}  # fmt: skip
SAME_PATTERN = {  # other values of tokenizer.ggml.pre that split in the same way
    "llama3": "llama-bpe llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    "gpt-2": "phi-2 mpt olmo jais trillion gigachat a.x-4.0 mellum exaone4 granite-docling",
    "starcoder": "refact smollm command-r codeshell exaone minerva-7b mellum2",
    "qwen2": "stablelm2 deepseek-r1-qwen megrez hunyuan kormo solar-open grok-2",
    "gpt-4o": "llama4 kanana2 minimax-m2",
    "bloom": "poro-chat gpt3-finnish",
    "bailingmoe": "bailingmoe2 llada-moe",
    "deepseek-v3": "hunyuan-dense joyai-llm",
}
PATTERN_OF = {name: name for name in PATTERNS} | {
    alias: name for name, aliases in SAME_PATTERN.items() for alias in aliases.split()
}
STARTS_WITH_BOS = {
    "llama3", "llama-bpe", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
}  # fmt: skip
WHOLE_WORD_FIRST = {*STARTS_WITH_BOS, "minicpm5"}  # a word that is a token is not merged ("ignore_merges")


def _byte_letters() -> str:
    """The character that stands for each byte in a byte-level vocabulary: a printable byte stands for itself."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LETTERS = _byte_letters()
LETTER_BYTES = {letter: bytes([byte]) for byte, letter in enumerate(BYTE_LETTERS)}


class Tokenizer:
    """Converts text to token ids and back. `from_gguf` makes the right subclass."""

    def __init__(self, metadata: Mapping[str, Any], add_bos: bool, bos: int | None, eos: int | None) -> None:
        """`add_bos`, `bos` and `eos` are defaults for files whose metadata lacks them."""
        self._tokens = _strings(metadata, "tokenizer.ggml.tokens")
        self.vocab_size = len(self._tokens)
        self._bytes: dict[int, bytes] = {}  # of tokens that have come up
        if "" in self._tokens:
            self._tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self._tokens)]
        self._ids = dict(zip(self._tokens, range(self.vocab_size), strict=True))
        if len(self._ids) != self.vocab_size:
            twice = next(i for i, text in enumerate(self._tokens) if self._ids[text] != i)
            raise BadFile(f"tokenizer: token {twice} {self._tokens[twice][:40]!r} is there twice", REMEDY_DAMAGED)
        self.bos_id = self._token_id(metadata, "bos", bos)
        self.eos_id = self._token_id(metadata, "eos", eos)
        self.add_bos = _flag(metadata, "add_bos_token", add_bos) and self.bos_id is not None
        self.add_eos = _flag(metadata, "add_eos_token", False) and self.eos_id is not None
        self.chat_template: str | None = _text(metadata, "tokenizer.chat_template")
        self.warning: str | None = None  # what about this vocabulary may make its ids wrong
        self._space_prefix = False
        self._word_ids = lru_cache(CACHED_WORDS)(self._merged_ids)
        self._mark_special(metadata)

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> "Tokenizer":
        model = _text(metadata, "tokenizer.ggml.model")
        if model is None:
            raise BadFile("the file has no tokenizer (tokenizer.ggml.model)", REMEDY_DAMAGED)
        if model not in MODELS:
            raise Unsupported(
                f"the tokenizer {model[:40]!r} is not supported", f"Those that work: {', '.join(MODELS)}."
            )
        return MODELS[model](metadata)

    def encode(self, text: str, bos: bool | None = None, special: bool = True) -> list[int]:
        """The token ids of a text.

        `bos` says whether BOS is added in front; None adds BOS and EOS as the file says. With `special`, control tokens
        are recognised in the text; user-defined tokens always are. Bytes that are not UTF-8 come as surrogates
        (errors="surrogateescape") and become byte tokens.
        """
        ids = []
        if self.bos_id is not None and (self.add_bos if bos is None else bos):
            ids.append(self.bos_id)
        first = True  # SentencePiece puts a space in front of the text and after each special token
        for piece in self._split_special(text, special):
            if isinstance(piece, int):
                ids.append(piece)
                first = True
                continue
            for word in self._words(piece, first):
                ids.extend(self._word_ids(word))
            first = False
        if bos is None and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_inner(self, text: str) -> list[int]:
        """The token ids of a text within another: no BOS, no space in front, no special tokens."""
        return [id for word in self._words(text, False) for id in self._word_ids(word)]

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD. Without `special`, control tokens are left out."""
        return self.decode_bytes(ids, special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], special: bool = True) -> bytes:
        pieces, first = [], self._space_prefix
        for id in ids:
            piece = self.token_bytes(id)
            if id in self._special_ids:
                first = self._space_prefix
                if not special and self.is_hidden(id):
                    continue
            else:
                piece = piece.removeprefix(b" ") if first else piece
                first = False
            pieces.append(piece)
        return b"".join(pieces)

    def stream(self, special: bool = False) -> "StreamDecoder":
        return StreamDecoder(self, special)

    def is_end(self, id: int) -> bool:
        return id in self._ends

    def is_control(self, id: int) -> bool:
        return id in self._control_ids

    def is_hidden(self, id: int) -> bool:
        """Whether a text without `special` leaves the token out."""
        return id in self._control_ids and id not in self._marks

    def token_text(self, id: int | None) -> str:
        """The text of a token in the vocabulary; empty for None, which is what chat templates get for a missing BOS."""
        if id is None:
            return ""
        if not 0 <= id < self.vocab_size:
            raise BadArgument(f"token id {id} is not in the vocabulary", f"ids go from 0 to {self.vocab_size - 1}")
        return self._tokens[id]

    def token_bytes(self, id: int) -> bytes:
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._bytes_of(id)
        return found

    def _bytes_of(self, id: int) -> bytes:
        text = self.token_text(id)
        if id in self._special_ids:
            return _utf8(text)
        if id in self._byte_ids and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)):
            return bytes.fromhex(byte[1])
        return self._unescape(text)

    def _token_id(self, metadata: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = metadata.get(key, default)
        if id is None:
            return None
        if type(id) is not int or not 0 <= id < self.vocab_size:
            raise BadFile(f"{key} does not name one of the {self.vocab_size} tokens", REMEDY_DAMAGED)
        return id

    def _mark_special(self, metadata: Mapping[str, Any]) -> None:
        types = _numbers(metadata, "tokenizer.ggml.token_type", self.vocab_size, "iu")
        if types is None:
            types = np.ones(self.vocab_size)
        self._byte_ids = set(np.flatnonzero(types == BYTE).tolist())
        # END_TEXTS are control tokens even where the file gives them another type: without `special` a text must not
        # be able to end the message that it stands in.
        named = {self._ids[text] for text in END_TEXTS if text in self._ids}
        ends = (self.eos_id, self._token_id(metadata, "eot"), self._token_id(metadata, "eom"))
        self._ends = named | {id for id in ends if id is not None}
        self._control_ids = named | set(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
        self.has_channels = all(text in self._ids for text in (*CHANNEL_ENDS, "<|end|>"))
        self._marks = {self._ids[text] for text in CHANNEL_MARKS if self.has_channels and text in self._ids}
        self._ends -= self._marks
        self._special_ids = self._control_ids | set(np.flatnonzero(types == USER_DEFINED).tolist())
        by_length = sorted(self._special_ids, key=lambda id: (-len(_utf8(self._tokens[id])), id))
        self._specials = [(self._tokens[id], id) for id in by_length]
        strips = any(name in (_text(metadata, "general.name") or "").lower() for name in STRIPS_BLANKS)
        keeps = {self._ids.get(text) for text in KEEPS_BLANKS}
        self._strips = self._special_ids - keeps if strips else set()

    def _split_special(self, text: str, special: bool) -> list[str | int]:
        """Split a text at its special tokens. Of two that overlap the longer one is found, also if it begins later."""
        pieces: list[str | int] = [text] if text else []
        for token, id in self._specials:
            if token in text and (special or id not in self._control_ids):
                pieces = [cut for piece in pieces for cut in _cut(piece, token, id, id in self._strips)]
        return pieces

    # Subclasses implement these:

    def _words(self, text: str, first: bool) -> Iterable[str]:
        raise NotImplementedError

    def _merged_ids(self, word: str) -> list[int]:
        raise NotImplementedError

    def _unescape(self, text: str) -> bytes:
        raise NotImplementedError


class _Bpe(Tokenizer):
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        pre = _text(metadata, "tokenizer.ggml.pre")
        super().__init__(metadata, pre in STARTS_WITH_BOS, None, None)
        self._merges = _strings(metadata, "tokenizer.ggml.merges")
        if pre not in PATTERN_OF:
            self.warning = f"pre-tokenizer {pre!r:.40} is not known: the default is used, ids may differ"
        self._whole_word_first = pre in WHOLE_WORD_FIRST
        # Patterns that name a category (a stand-in) run on the replaced text, the others on the text itself.
        self._patterns = [
            (re.compile(pattern, re.ASCII if replaced else 0), replaced)
            for pattern in PATTERNS[PATTERN_OF.get(pre or "", "default")]
            for replaced in [bool(re.search("[\ue000-\ue009]", pattern))]
        ]

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The rank of each merge "left right". Built at its first use: Llama 3's 280,147 merges take 90 ms."""
        count = len(self._merges)
        # in reverse, so that of two equal merges the first one counts
        return dict(zip(reversed(self._merges), range(count - 1, -1, -1), strict=True))

    def _words(self, text: str, first: bool) -> Iterable[str]:
        replaced = _categories(text)
        spans = [(0, len(text))]
        for pattern, on_replaced in self._patterns:
            cut = []
            for start, end in spans:
                for match in pattern.finditer(replaced if on_replaced else text, start, end):
                    left, right = match.span()
                    if left > start:
                        cut.append((start, left))
                    cut.append((left, right))
                    start = right
                if start < end:
                    cut.append((start, end))
            spans = cut
        return [text[start:end] for start, end in spans]

    def _merged_ids(self, word: str) -> list[int]:
        letters = _utf8(word).decode("latin-1").translate(BYTE_LETTERS)
        if self._whole_word_first and letters in self._ids:
            return [self._ids[letters]]
        ids = []
        for symbol in merge(list(letters), " ", self._ranks):
            if symbol in self._ids:
                ids.append(self._ids[symbol])
            elif len(symbol) > 1:
                raise BadFile(f"tokenizer: a merge makes {symbol[:40]!r}, which is not a token", REMEDY_DAMAGED)
            # A byte without a token is dropped, as in llama.cpp: vocabularies lack only bytes that UTF-8 never uses.
        return ids

    def _unescape(self, text: str) -> bytes:
        return b"".join(LETTER_BYTES.get(letter) or _utf8(letter) for letter in text)


class _SentencePiece(Tokenizer):
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata, True, 1, 2)
        self._space_prefix = _flag(metadata, "add_space_prefix", True)
        self._unknown_id = self._token_id(metadata, "unknown", 0)
        scores = _numbers(metadata, "tokenizer.ggml.scores", self.vocab_size, "iuf")
        if scores is None:
            scores = np.zeros(self.vocab_size)
        if np.isnan(scores).any():
            raise BadFile("tokenizer.ggml.scores holds NaN", REMEDY_DAMAGED)
        self._costs = dict(zip(self._tokens, (-scores.astype(np.float64)).tolist(), strict=True))
        # Where no token has a space inside or at its end, no merge crosses the start of a word.
        across_words = re.search(f"[^{SPACE}\n]{SPACE}", "\n".join(self._tokens))
        self._word = re.compile("(?s:.+)" if across_words else f"{SPACE}*[^{SPACE}]+|{SPACE}+")

    def _words(self, text: str, first: bool) -> Iterable[str]:
        prefix = " " if first and self._space_prefix else ""
        return self._word.findall((prefix + text).replace(" ", SPACE))

    def _merged_ids(self, word: str) -> list[int]:
        ids = []
        for symbol in merge(list(word), "", self._costs):
            if symbol in self._ids:
                ids.append(self._ids[symbol])
            else:
                ids.extend(self._byte_id(byte) for byte in _utf8(symbol))
        return ids

    def _byte_id(self, byte: int) -> int:
        for id in (self._ids.get(f"<0x{byte:02X}>"), self._ids.get(chr(byte)), self._unknown_id):
            if id is not None:
                return id
        raise BadFile(f"tokenizer: no token for byte {byte} and none for unknown text", REMEDY_DAMAGED)

    def _unescape(self, text: str) -> bytes:
        return _utf8(text.replace(SPACE, " "))


MODELS: dict[str, Callable[[Mapping[str, Any]], Tokenizer]] = {"gpt2": _Bpe, "llama": _SentencePiece}


class StreamDecoder:
    """Decodes tokens as they arrive. A character whose bytes are split over tokens comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        if not self._special and self._tokenizer.is_hidden(id):
            return ""
        if id >= self._tokenizer.vocab_size:
            return ""  # embedding tables are padded: a row without a token has no text
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """The rest of the text at the end: U+FFFD if a character is incomplete."""
        return self._decoder.decode(b"", final=True)


def merge(symbols: list[str], separator: str, ranks: Mapping[str, float]) -> list[str]:
    """Merge neighbours while any two have a rank: the lowest rank first, the leftmost of equals.

    Two neighbours are looked up as left + separator + right. n symbols take at most n - 1 merges, whatever the table
    holds.
    """
    after = [*range(1, len(symbols)), -1]
    before = list(range(-1, len(symbols) - 1))
    heap: list[tuple[float, int, int, int]] = []  # rank, left, right, length of both

    def look_up(left: int, right: int) -> None:
        rank = ranks.get(symbols[left] + separator + symbols[right])
        if rank is not None:
            heapq.heappush(heap, (rank, left, right, len(symbols[left]) + len(symbols[right])))

    for left in range(len(symbols) - 1):
        look_up(left, left + 1)
    while heap:
        _, left, right, size = heapq.heappop(heap)
        a, b = symbols[left], symbols[right]
        if not a or not b or len(a) + len(b) != size:
            continue  # one of the two has been merged with another symbol since
        symbols[left], symbols[right] = a + b, ""
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
            look_up(left, after[left])
        if before[left] >= 0:
            look_up(before[left], left)
    return [symbol for symbol in symbols if symbol]


def _categories(text: str) -> str:
    """The text with a stand-in for each character beyond ASCII; whitespace beyond ASCII becomes a vertical tab."""
    if text.isascii():
        return text
    table = {}
    for letter in set(text):
        if letter > "\x7f":
            category = unicodedata.category(letter)
            stand_in = STAND_INS.get(category) or STAND_INS.get(category[0], OTHER_CATEGORY)
            table[ord(letter)] = "\v" if letter.isspace() else stand_in
    return text.translate(table)


def _cut(piece: str | int, token: str, id: int, strips: bool) -> Iterable[str | int]:
    if isinstance(piece, int):
        yield piece
        return
    for i, text in enumerate(piece.split(token)):
        if i:
            yield id
        if rest := text.lstrip(" \t\n\v\f\r") if i and strips else text:
            yield rest


def _utf8(text: str) -> bytes:
    """Surrogates that stand for single bytes become these bytes; other surrogates take three bytes."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise BadFile(f"{key} is not text", REMEDY_DAMAGED)
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise BadFile(f"tokenizer.ggml.{name} is neither true nor false", REMEDY_DAMAGED)
    return value


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or (not values and key.endswith("tokens")):
        raise BadFile(f"{key} is not a list of strings", REMEDY_DAMAGED)
    try:
        "".join(values)  # the fastest check of all types: 5 ms for 280,147 strings
    except TypeError:
        raise BadFile(f"{key} holds something that is not text", REMEDY_DAMAGED) from None
    return values


def _numbers(metadata: Mapping[str, Any], key: str, count: int, dtype_kinds: str) -> NDArray[Any] | None:
    if key not in metadata:
        return None
    try:
        values = np.asarray(metadata[key])
    except ValueError:  # lists of different lengths
        values = np.zeros(0, dtype=object)
    if values.dtype.kind not in dtype_kinds or values.ndim != 1 or len(values) < count:
        raise BadFile(f"{key} is not a list of {count} numbers", REMEDY_DAMAGED)
    return values[:count]

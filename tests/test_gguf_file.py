"""GgufFile against gguf-py's own reader on sound files, and its messages about damaged ones."""

import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_builder import encode, tiny_llama, tiny_parts, write_gguf
from package_data import vocabulary

from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.gguf_file import BLOCKS, GGML_TYPES, SUPPORTED, GgufFile


def same(ours, theirs) -> bool:
    if isinstance(ours, np.ndarray):
        return ours.tolist() == theirs
    return type(ours) is type(theirs) and ours == theirs


def compare(path: Path) -> None:
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    assert [k for k in fields if not same(ours.metadata[k], fields[k])] == []
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert (mine.name, mine.ggml_type) == (t.name, t.tensor_type.name)
        assert mine.shape == tuple(int(n) for n in t.shape[::-1])
        assert mine.data.dtype == np.uint8 and mine.data.ndim == 1
        assert mine.data.tobytes() == t.data.tobytes()


def refusal(path, error: type[LlamaGpuError] = BadFile) -> str:
    with pytest.raises(error) as caught:
        GgufFile(path)
    error = caught.value
    assert error.cause.isprintable() and error.remedy.isprintable() and error.remedy
    return error.cause


def test_block_sizes_are_those_of_ggml():
    theirs = {int(t): (t.name, *size) for t, size in gguf.GGML_QUANT_SIZES.items()}
    both = GGML_TYPES.keys() & theirs.keys()
    assert len(both) >= 30 and [n for n in both if GGML_TYPES[n] != theirs[n]] == []
    assert set(BLOCKS) == set(SUPPORTED)


@pytest.mark.parametrize("ggml_type", SUPPORTED)
def test_every_type_reads_as_gguf_reads_it(tmp_path, ggml_type):
    path = tiny_llama(tmp_path / "m.gguf", dim=256, ffn=256, ggml_type=ggml_type, layers=1, tied=False, biases=True)
    compare(path)
    assert GgufFile(path).tensors["blk.0.attn_q.weight"].ggml_type == ggml_type


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_versions_and_alignments(tmp_path, version, alignment):
    # odd sizes: hardly a tensor fills its alignment
    model = {"vocab": 289, "dim": 6, "ffn": 9, "heads": 1, "kv_heads": 1}
    compare(tiny_llama(tmp_path / "m.gguf", **model, version=version, alignment=alignment))


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])  # gguf-py takes 20 s for the 410,000 strings of llama-bpe
def test_vocabularies_read_as_gguf_reads_them(name):
    compare(vocabulary(name))


def test_llama3_vocabulary_reads_fast():
    path = vocabulary("llama-bpe")
    seconds = []
    for _ in range(3):
        start = time.process_time()
        file = GgufFile(path)
        seconds.append(time.process_time() - start)
    tokens, merges = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
    assert (len(tokens), tokens[0], tokens[-1]) == (128_256, "!", "<|reserved_special_token_250|>")
    assert (len(merges), merges[0]) == (280_147, "\u0120 \u0120")
    assert min(seconds) < 0.5  # 0.2 s on a 2-core aarch64 box


def test_value_types_keep_their_values(tmp_path):
    scalars = {
        code: np.dtype(code).type(value)
        for code, value in {
            "u1": 255, "i1": -128, "u2": 65535, "i2": -32768, "u4": 2**32 - 1, "i4": -(2**31), "f4": 0.1,
            "u8": 2**64 - 1, "i8": -(2**63), "f8": 0.1, "b1": True,
        }.items()
    }  # fmt: skip
    arrays = {code + "s": np.array([value, value], code) for code, value in scalars.items()}
    strings = {"text": "na\u00efve \U0001f999", "list": ["a", "", "\u2581b"], "none": []}
    others = {"empty": np.array([], "u4"), "raw": b"\xff!"}
    path = write_gguf(tmp_path / "m.gguf", scalars | arrays | strings | others, {})
    found = GgufFile(path).metadata
    for code, value in scalars.items():
        assert same(found[code], value.item()), code
        assert found[code + "s"].dtype == np.dtype(code) and (found[code + "s"] == value).all()
    assert {key: found[key] for key in strings} == strings
    assert found["empty"].dtype == np.uint32 and found["empty"].size == 0
    assert found["raw"] == "\ufffd!"


def test_tensors_are_views_that_outlive_close(tmp_path):
    path = tiny_llama(tmp_path / "m.gguf")
    file = GgufFile(path)
    data = file.tensors["output_norm.weight"].data
    expected = data.tobytes()
    assert not data.flags.owndata and not data.flags.writeable
    file.close()
    assert file.tensors == {} and data.tobytes() == expected


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_of_a_split_file_opens_the_whole(tmp_path, number):
    single = GgufFile(tiny_llama(tmp_path / "whole.gguf"))
    tiny_llama(tmp_path / "m.gguf", n_parts=3, alignment=64)
    split = GgufFile(tmp_path / f"m-0000{number}-of-00003.gguf")
    assert split.path.name == "m-00001-of-00003.gguf"
    assert split.metadata["llama.block_count"] == 2
    assert {n: t.data.tobytes() for n, t in split.tensors.items()} == {
        n: t.data.tobytes() for n, t in single.tensors.items()
    }


def test_split_files_name_what_is_wrong(tmp_path):
    first = tiny_llama(tmp_path / "m.gguf", n_parts=3)
    second, third = (first.with_name(f"m-0000{i}-of-00003.gguf") for i in (2, 3))
    saved = second.read_bytes()
    second.write_bytes(third.read_bytes())
    assert "in an earlier part too" in refusal(first)
    second.write_bytes(saved[:-40])
    assert second.name in refusal(first)
    second.unlink()
    assert second.name in refusal(first) and third.name not in refusal(first)
    assert refusal(second) == refusal(first)
    other = first.rename(tmp_path / "other.gguf")
    assert "one of 3 parts" in refusal(other)
    assert "m-00001-of-00003.gguf: no such file" in refusal(third)


def test_split_counts_must_agree(tmp_path):
    first = tiny_llama(tmp_path / "m.gguf", n_parts=2)
    keys, tensors = tiny_parts()
    half = dict(list(tensors.items())[: len(tensors) // 2 - 1])
    for count in (np.uint16(2), np.array([1, 2]), "2", np.float32(2), np.uint64(2**60)):
        damaged = keys | {"split.count": count, "split.no": np.uint16(0), "split.tensors.count": len(tensors)}
        first.write_bytes(encode(damaged, half))
        assert "tensors, not" in refusal(first) or "split.count" in refusal(first)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>404</html>", "HTML"),
        (b"\x40\0\0\0\0\0\0\0" + b'{"__metadata__":{}}', "safetensors"),
        (b'{"error": "not found"}', "JSON"),
        (b"PK\x03\x04" + bytes(40), "zip"),
        (b"\x1f\x8b" + bytes(40), "gzip"),
        (b"tjgg" + bytes(40), "before GGUF"),
        (bytes(4096), "zeros"),
        (b"MZ\x90\x00" + bytes(40), "begins with b'MZ"),
        (b"GGUF\3\0\0\0", "cut short"),
        (b"GGUF" + bytes([9, 0, 0, 0]) + bytes(16), "version 9"),
    ],
)
def test_what_is_not_gguf_is_named(tmp_path, content, said):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert said in refusal(path)


def test_old_and_foreign_endian_gguf_are_unsupported(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\1\0\0\0" + bytes(16))
    assert "version 1" in refusal(path, Unsupported)
    path.write_bytes(b"GGUF\0\0\0\3" + bytes(16))
    assert "big-endian" in refusal(path, Unsupported)


def test_paths_that_cannot_be_read(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.gguf")
    assert "no such file" in refusal(str(tmp_path / "absent.gguf"))
    assert "directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in refusal(tmp_path / "pipe")
    with pytest.raises(BadFile, match="cannot be read"):
        GgufFile(tmp_path / "nul\0.gguf")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = tiny_llama(tmp_path / "m.gguf")
    path.chmod(0)
    assert "permission" in refusal(path)


def f32(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", shape, bytes(4 * int(np.prod(shape)))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": ("F32", (0,), b"")}, "nothing in it"),
        ({"a": ("F32", (2**60, 2**60), bytes(64))}, "ends at byte"),
        ({"a": ("F32", (17,), bytes(64))}, "ends at byte"),
        ({"a": ("Q4_0", (2, 48), bytes(64))}, "do not divide into Q4_0 blocks"),
        ({"a": ("F32", (1, 1, 1, 1, 1), bytes(4))}, "5 dimensions"),
        ({"a": ("F32", (), bytes(4))}, "0 dimensions"),
        ({"a\n\x1b[2J" + "b" * 200: ("F32", (0,), b"")}, r"a\n\x1b[2Jbbb"),
    ],
)
def test_impossible_tensors_are_refused(tmp_path, tensors, said):
    assert said in refusal(write_gguf(tmp_path / "m.gguf", {}, {"first": f32(8), **tensors}))


def damage(tmp_path, what: str, which: int, value: int, metadata: dict | None = None) -> Path:
    """Two tensors of 32 bytes, one field overwritten."""
    marks: list = []
    raw = bytearray(encode(metadata or {}, {"a": f32(8), "b": f32(8)}, marks=marks))
    _, at, size = [m for m in marks if m[0] == what][which]
    raw[at : at + size] = value.to_bytes(size, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("what", "which", "value", "said"),
    [
        ("offset", 1, 0, "'b' overlaps"),
        ("offset", 1, 33, "multiple of 32"),
        ("offset", 1, 64, "ends at byte"),
        ("offset", 0, 2**63, "ends at byte"),
        ("tensor count", 0, 2**60, "claims 1,152,921,504,606,846,976 tensors"),
        ("key count", 0, 2**60, "claims 1,152,921,504,606,846,976 metadata keys"),
        ("length of tensor name", 0, 2**60, "bytes in the name of tensor 0"),
    ],
)
def test_impossible_fields_are_refused(tmp_path, what, which, value, said):
    assert said in refusal(damage(tmp_path, what, which, value))


@pytest.mark.parametrize(
    ("what", "value", "metadata", "said"),
    [
        ("length of string", 2**60, {"k": "v"}, "bytes in metadata key 'k'"),
        ("length of element", 2**60, {"k": ["v", "w"]}, "string 0 of metadata key 'k' is cut short"),
        ("array length", 2**60, {"k": ["v"]}, "strings in metadata key 'k'"),
        ("array length", 2**60, {"k": np.ones(4)}, "elements in metadata key 'k'"),
        ("value type", 13, {"k": 1}, "unknown value type 13"),
        ("element type", 9, {"k": np.ones(4)}, "nested type 9"),
    ],
)
def test_impossible_metadata_is_refused(tmp_path, what, value, metadata, said):
    assert said in refusal(damage(tmp_path, what, 0, value, metadata))


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31, -32, "32", 32.0, True, np.array([32])])
def test_alignment_must_be_a_power_of_two(tmp_path, alignment):
    path = write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, {})
    assert "general.alignment" in refusal(path)


def test_names_must_differ_and_be_text(tmp_path):
    path = tmp_path / "m.gguf"
    raw = encode({"first": 1, "again": 2}, {})
    path.write_bytes(raw.replace(b"again", b"first"))
    assert "'first' is there twice" in refusal(path)
    raw = encode({}, {"first": f32(8), "again": f32(8)})
    path.write_bytes(raw.replace(b"again", b"first"))
    assert "'first' is there twice" in refusal(path)
    path.write_bytes(raw.replace(b"again", b"\xffgain"))
    assert "name of tensor 1 is not valid UTF-8" in refusal(path)
    write_gguf(path, {"tokenizer.ggml.tokens": ["a", b"\xc3\x28"]}, {})
    assert "string 1 of metadata key 'tokenizer.ggml.tokens' is not valid UTF-8" in refusal(path)


def test_unknown_tensor_types_open(tmp_path):
    tensors = {"a": f32(8), "odd": (37, (8,), bytes(32)), "old": ("IQ2_XXS", (256,), bytes(66)), "z": f32(8)}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert (file.tensors["odd"].ggml_type, file.tensors["odd"].data.size) == ("type 37", 0)
    assert (file.tensors["old"].ggml_type, file.tensors["old"].data.size) == ("IQ2_XXS", 66)

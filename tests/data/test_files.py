"""JSON lines, Megatron's indexed data sets, tokenizer files, and opening data by what it is."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    IndexedDatasetSource,
    JsonLines,
    JsonTokenLines,
    TextFolder,
    TokenizedSource,
)


def lines(path, *values):
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return path


def text_of(source, index):
    return bytes(source.tokens(index).astype(np.uint8)).decode()


def test_json_lines(tmp_path):
    file = lines(
        tmp_path / "a.jsonl", {"text": "one"}, "", {"text": ""}, {"text": "zwei\nä", "n": 1}, {"text": "\ud800"}
    )
    store = JsonLines(file)
    source = TokenizedSource(store, ByteTokenizer())
    assert source.lengths.tolist() == [3, 7, 3] and store.num_empty == 1
    assert [text_of(source, 0), text_of(source, 1)] == ["one", "zwei\nä"]
    assert [source.name(i) for i in range(3)] == [f"{file}:{line}" for line in (1, 4, 5)]
    assert JsonLines(lines(tmp_path / "b.jsonl", {"body": "x"}), field="body").read(0) == b"x"
    assert (
        store.fingerprint()
        == JsonLines(file).fingerprint()
        != JsonLines(tmp_path / "b.jsonl", field="body").fingerprint()
    )


def test_json_lines_with_byte_order_mark_and_without_last_newline(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    store = JsonLines(tmp_path / "a.jsonl")
    assert [store.read(0), store.read(1)] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (['{"text": "a"}', '{"text": '], r"a\.jsonl:2: not a line of JSON"),
        (['{"text": "a"}', "", "[1]"], r"a\.jsonl:3: is a list, not a JSON object with a field 'text'"),
        (['{"body": "a", "id": 1}'], r"a\.jsonl:1: has no field 'text', only \['body', 'id'\]"),
        (['{"text": [1, 2]}'], r"a\.jsonl:1: field 'text' is a list, not a string"),
        (['{"text": ""}'], r"a\.jsonl: holds no text in field 'text' \(1 empty\)"),
        ([], r"a\.jsonl: holds no text"),
    ],
)
def test_malformed_json_lines_name_the_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        JsonLines(lines(tmp_path / "a.jsonl", *content))


def test_missing_json_lines(tmp_path):
    with pytest.raises(ValueError, match="a.jsonl: cannot be read"):
        JsonLines(tmp_path / "a.jsonl")


def test_json_token_lines(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"tokens": [1, 2]}, {"tokens": []}, {"tokens": [9]})
    source = JsonTokenLines(file, vocab_size=10)
    assert source.lengths.tolist() == [2, 1] and source.num_tokens == 3 and source.num_empty == 1
    assert source.tokens(1).tolist() == [9] and source.name(1) == f"{file}:3"
    with pytest.raises(ValueError, match=r"a\.jsonl:3: token id 9 at position 0 is outside the vocabulary of 9"):
        JsonTokenLines(file, vocab_size=9)
    for wrong in ([1.5], ["a"], [True], "text", [2**70]):
        with pytest.raises(ValueError, match=r"b\.jsonl:1: field 'tokens' must be a list of integers"):
            JsonTokenLines(lines(tmp_path / "b.jsonl", {"tokens": wrong}), vocab_size=10)


# --- Megatron's indexed data sets ---------------------------------------------------------------


def write_indexed(prefix, documents, dtype):
    """Writes with Megatron's own builder; each document is a list of sequences."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_indexed_dataset_of_megatrons_builder(tmp_path, dtype):
    documents = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 250]]]
    write_indexed(tmp_path / "set", documents, dtype)
    for path in ("set", "set.bin", "set.idx"):
        source = IndexedDatasetSource(tmp_path / path, vocab_size=251)
        assert source.lengths.tolist() == [3, 3, 4] and source.num_tokens == 10
        assert [source.tokens(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 6], [7, 8, 9, 250]]
    assert source.tokens(0).dtype == np.int64 and source.name(2).endswith("set.bin document 2")
    by_sequence = IndexedDatasetSource(tmp_path / "set", vocab_size=251, unit="sequence")
    assert by_sequence.lengths.tolist() == [3, 1, 2, 4] and by_sequence.tokens(2).tolist() == [5, 6]
    with pytest.raises(ValueError, match="document 2: token id 250 at position 3 is outside the vocabulary of 250"):
        IndexedDatasetSource(tmp_path / "set", vocab_size=250).tokens(2)
    assert len({source.fingerprint(), by_sequence.fingerprint()}) == 2


def test_indexed_dataset_agrees_with_megatrons_reader(tmp_path):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    generator = np.random.RandomState(0)
    documents = [[generator.randint(0, 60000, n).tolist()] for n in generator.randint(1, 200, 30)]
    write_indexed(tmp_path / "set", documents, megatron.DType.optimal_dtype(60000))
    theirs, ours = (
        megatron.IndexedDataset(str(tmp_path / "set")),
        IndexedDatasetSource(tmp_path / "set", vocab_size=60000),
    )
    assert len(theirs) == len(ours.lengths)
    assert all(np.array_equal(theirs[i], ours.tokens(i)) for i in range(len(documents)))


def raw_index(lengths, bounds, *, magic=b"MMIDIDX\0\0", version=1, code=4):
    offsets = 4 * (np.cumsum(lengths) - lengths)
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    return head + b"".join(np.array(a, t).tobytes() for a, t in ((lengths, "<i4"), (offsets, "<i8"), (bounds, "<i8")))


def test_indexed_dataset_without_megatron(tmp_path):
    (tmp_path / "s.idx").write_bytes(raw_index([2, 0, 3], [0, 1, 2, 3]))
    (tmp_path / "s.bin").write_bytes(np.arange(5, dtype="<i4").tobytes())
    source = IndexedDatasetSource(tmp_path / "s", vocab_size=5)
    assert [source.tokens(i).tolist() for i in range(2)] == [[0, 1], [2, 3, 4]]
    assert source.num_empty == 1 and source.name(1).endswith("document 2")


@pytest.mark.parametrize(
    ("index", "num_tokens", "message"),
    [
        (b"", 5, "s.idx: is not the index of a Megatron data set"),
        (raw_index([5], [0, 1], magic=b"TNTIDX\0\0\0"), 5, "s.idx: is not the index of a Megatron data set"),
        (raw_index([5], [0, 1], version=2), 5, "s.idx: has format version 2"),
        (raw_index([5], [0, 1], code=7), 5, "s.idx: dtype code 7 is no integer type"),
        (raw_index([5], [0, 1])[:-1], 5, "s.idx: has 61 bytes of 62: it is cut short"),
        (raw_index([5], [0, 1]), 4, "s.bin: has 16 bytes, its index needs 20"),
        (raw_index([5], [0]), 5, "documents end at sequence 0 of 1: end the last document"),
        (raw_index([5], [0, 2]), 5, "s.idx: document bounds do not ascend"),
        (raw_index([-5], [0, 1]), 5, "s.idx: a sequence has a negative length"),
        (raw_index([], [0]), 0, "s.idx: holds no document with tokens"),
        (raw_index([0], [0, 1]), 0, "s.idx: holds no document with tokens"),
    ],
    ids=[
        "empty",
        "magic",
        "version",
        "dtype",
        "cut index",
        "cut tokens",
        "open document",
        "bounds",
        "negative",
        "none",
        "only empty",
    ],
)
def test_damaged_indexed_datasets_are_refused(tmp_path, index, num_tokens, message):
    (tmp_path / "s.idx").write_bytes(index)
    (tmp_path / "s.bin").write_bytes(np.arange(num_tokens, dtype="<i4").tobytes())
    with pytest.raises(ValueError, match=message):
        IndexedDatasetSource(tmp_path / "s", vocab_size=5)


def test_missing_halves_are_named(tmp_path):
    with pytest.raises(ValueError, match="s.idx: cannot be read"):
        IndexedDatasetSource(tmp_path / "s", vocab_size=5)
    (tmp_path / "s.idx").write_bytes(raw_index([5], [0, 1]))
    with pytest.raises(ValueError, match="s.bin: cannot be read"):
        IndexedDatasetSource(tmp_path / "s", vocab_size=5)


# --- tokenizers files --------------------------------------------------------------------------


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "def": 1, "return": 2, "x": 3, "</s>": 9}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)  # must not reach the lengths
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_hugging_face_tokenizer(tmp_path, tokenizer_file):
    (tmp_path / "text").mkdir()
    for name, text in (("a", b"def x return y \xff"), ("b", b"   "), ("c", b"x")):
        (tmp_path / "text" / name).write_bytes(text)
    calls = []
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    source = TokenizedSource(TextFolder(tmp_path / "text"), tokenizer, progress=lambda *done: calls.append(done))
    assert source.lengths.tolist() == [5, 1] and source.num_empty == 1 and calls == [(3, 3)]
    assert source.tokens(0).tolist() == [1, 3, 2, 0, 0] and source.name(1).endswith("c")
    assert source.vocab_size == 10  # ids have gaps: the bound of ids counts
    ended = TokenizedSource(TextFolder(tmp_path / "text"), HuggingFaceTokenizer(tokenizer_file, end_of_document="</s>"))
    assert ended.lengths.tolist() == [6, 1, 2] and ended.tokens(2).tolist() == [3, 9]
    assert ended.fingerprint() != source.fingerprint()


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=600))
def test_lengths_by_batches_are_those_of_reading(tmp_path_factory, texts):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE({chr(c): c for c in range(32, 127)}, [])).save(str(path))
    tokenizer = HuggingFaceTokenizer(path)
    counts = tokenizer.count(np.array([len(text) for text in texts]), iter(texts), None)
    assert counts.tolist() == [len(tokenizer.encode(text)) for text in texts]


def test_bad_tokenizer_files_are_refused(tmp_path, tokenizer_file):
    with pytest.raises(ValueError, match="nothing.json: not a readable tokenizers JSON file"):
        HuggingFaceTokenizer(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json: not a readable tokenizers JSON file"):
        HuggingFaceTokenizer(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="has no token '<eod>' to end documents with"):
        HuggingFaceTokenizer(tokenizer_file, end_of_document="<eod>")

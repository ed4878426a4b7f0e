"""Sources know their lengths before reading, name what is wrong, and say what data they are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.data import (
    ByteTokenizer,
    PythonLibrary,
    RandomTokenSource,
    SequenceSource,
    TextFolder,
    TokenArraySource,
    TokenizedSource,
    num_target_tokens,
)


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def check_source(source):
    assert isinstance(source, SequenceSource)
    assert source.lengths.dtype == np.int64 and source.lengths.min() >= 1
    assert source.num_tokens == source.lengths.sum()
    for index in range(min(len(source.lengths), 20)):
        tokens = source.tokens(index)
        assert tokens.dtype == np.int64 and tokens.shape == (source.lengths[index],)
        assert tokens.min() >= 0 and tokens.max() < source.vocab_size
        assert np.array_equal(tokens, source.tokens(index))
        assert isinstance(source.name(index), str)
    assert int(source.fingerprint(), 16) >= 0


def test_folder_recurses_in_sorted_order_and_counts_what_it_leaves_out(tmp_path):
    write(
        tmp_path,
        b_dot_txt=b"bb",
        a__z_dot_txt=b"not utf-8: \xff\xfe",
        a__y=b"y",
        picture=b"\x89PNG\0\0",
        empty=b"",
        _dot_git__config=b"hidden",
    )
    folder = TextFolder(tmp_path)
    source = TokenizedSource(folder, ByteTokenizer())
    check_source(source)
    assert [source.name(i) for i in range(3)] == [str(tmp_path / name) for name in ("a/y", "a/z.txt", "b.txt")]
    assert bytes(source.tokens(1).astype(np.uint8)) == b"not utf-8: \xff\xfe"
    assert (folder.num_binary, folder.num_empty, folder.num_hidden, folder.num_other) == (1, 1, 1, 0)
    only = TextFolder(tmp_path, suffixes=(".txt",))
    assert len(only.sizes_bytes) == 2 and only.num_other == 3


def test_end_of_document_is_a_token_of_its_own(tmp_path):
    source = TokenizedSource(TextFolder(write(tmp_path, a=b"ab")), ByteTokenizer(end_of_document=True))
    check_source(source)
    assert source.tokens(0).tolist() == [97, 98, 256] and source.vocab_size == 257


def test_one_text_file_is_one_sequence(tmp_path):
    write(tmp_path, a=b"abc")
    source = TokenizedSource(TextFolder(tmp_path / "a"), ByteTokenizer())
    assert source.lengths.tolist() == [3] and source.name(0) == str(tmp_path / "a")


@pytest.mark.parametrize("files", [{}, {"empty": b""}, {"binary": b"\0"}, {"_dot_hidden": b"text"}])
def test_folder_without_text_is_refused(tmp_path, files):
    with pytest.raises(ValueError, match=f"{tmp_path}: holds no text"):
        TextFolder(write(tmp_path, **files))


def test_empty_and_missing_files_are_refused(tmp_path):
    write(tmp_path, empty=b"")
    with pytest.raises(ValueError, match="empty: holds no text"):
        TextFolder(tmp_path / "empty")
    with pytest.raises(ValueError, match="nothing: no such folder"):
        TextFolder(tmp_path / "nothing")


def test_data_that_changes_under_a_run_is_noticed(tmp_path):
    source = TokenizedSource(TextFolder(write(tmp_path, a=b"abc")), ByteTokenizer())
    write(tmp_path, a=b"abcd")
    with pytest.raises(ValueError, match="a: has 4 tokens now and had 3"):
        source.tokens(0)
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="cannot be read any more"):
        source.tokens(0)


def test_fingerprint_follows_names_content_and_tokenizer(tmp_path):
    def fingerprint(folder, tokenizer=ByteTokenizer(), **files):
        return TokenizedSource(TextFolder(write(tmp_path / folder, **files)), tokenizer).fingerprint()

    first = fingerprint("one", a=b"abc", b=b"d")
    assert first == fingerprint("two", a=b"abc", b=b"d")  # the same data in another place
    others = {
        fingerprint("three", a=b"abd", b=b"d"),
        fingerprint("four", a=b"abc", c=b"d"),
        fingerprint("five", ByteTokenizer(end_of_document=True), a=b"abc", b=b"d"),
    }
    assert len(others | {first}) == 4


def test_python_library_documents_are_functions_and_classes():
    library = PythonLibrary()
    source = TokenizedSource(library, ByteTokenizer())
    check_source(source)
    assert len(source.lengths) > 1000 and library.num_unparsed == 0
    names = [source.name(i) for i in range(len(source.lengths))]
    assert len(set(names)) == len(names)
    assert not any(name.startswith(("test/", "site-packages/")) for name in names)
    dataclass = names.index(
        next(name for name in names if name.startswith("dataclasses.py") and name.endswith(" field"))
    )
    assert bytes(source.tokens(dataclass).astype(np.uint8)).startswith(b"def field(")
    # decorators belong to the document
    assert any(library.read(i).startswith(b"@") for i in range(len(names)))
    for i in range(0, len(names), 97):
        compile(library.read(i), names[i], "exec", flags=0x400)  # PyCF_ONLY_AST: each is whole


def test_python_library_repeats_and_is_limited():
    first, second = PythonLibrary(max_files=20), PythonLibrary(max_files=20)
    assert first.fingerprint() == second.fingerprint() != PythonLibrary(max_files=21).fingerprint()
    assert len(first.sizes_bytes) < len(PythonLibrary(max_files=60).sizes_bytes)


def test_token_arrays():
    source = TokenArraySource([[1, 2, 3], [4]], vocab_size=5, names=["x", "y"])
    check_source(source)
    assert source.name(1) == "y"
    assert source.fingerprint() != TokenArraySource([[1, 2], [3, 4]], vocab_size=5).fingerprint()
    with pytest.raises(ValueError, match="sequence 1: token id 5 at position 2 is outside the vocabulary of 5"):
        TokenArraySource([[1], [0, 4, 5]], vocab_size=5)
    with pytest.raises(ValueError, match="token id -1"):
        TokenArraySource([[-1]], vocab_size=5)
    with pytest.raises(ValueError, match="sequence 0: expected a non-empty"):
        TokenArraySource([[]], vocab_size=5)
    with pytest.raises(ValueError, match="no sequences"):
        TokenArraySource([], vocab_size=5)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=10), seed=st.integers(0, 2**40))
def test_random_tokens_repeat_by_seed(lengths, seed):
    source = RandomTokenSource(lengths, vocab_size=97, seed=seed)
    check_source(source)
    assert source.lengths.tolist() == lengths
    assert np.array_equal(source.tokens(0), RandomTokenSource(lengths, vocab_size=97, seed=seed).tokens(0))


def test_targets_of_four_lengths():
    assert num_target_tokens([7, 129, 1, 64]) == 197
    assert num_target_tokens([1]) == 0

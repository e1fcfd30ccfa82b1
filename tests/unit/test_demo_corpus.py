"""The demo's text: what is read, what is held out, and that both are the same everywhere."""

import sysconfig
from pathlib import Path

import pytest
import torch

from modeling_k3.demo import UserError
from modeling_k3.demo.corpus import Corpus, load_corpus
from modeling_k3.demo.tokenizer import BOS_ID, EOS_ID, build_tokenizer, encode_text

SMALL = 2_000


def write_texts(folder: Path, count: int = 30, length: int = 400) -> None:
    for index in range(count):
        path = folder / f"part{index % 3}" / f"text{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"This is text number {index}.\n" * (length // 25))


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus()


def test_standard_library_gives_enough_held_out_text(stdlib: Corpus) -> None:
    assert stdlib.held_out_bytes == len(stdlib.held_out_text) >= 200_000
    assert stdlib.train_bytes > 2_000_000
    assert not set(stdlib.train_files) & set(stdlib.held_out_files)


def test_standard_library_leaves_out_tests_and_installed_packages(stdlib: Corpus) -> None:
    for name in stdlib.train_files + stdlib.held_out_files:
        assert name.endswith(".py")
        assert not {"site-packages", "dist-packages", "test", "tests", "encodings"} & set(name.split("/"))


def test_standard_library_is_really_that(stdlib: Corpus) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    first = stdlib.held_out_files[0]
    assert stdlib.held_out_text.startswith((root / first).read_bytes())


def test_same_files_give_the_same_split_and_order(tmp_path: Path) -> None:
    write_texts(tmp_path / "a")
    write_texts(tmp_path / "b")
    first, second = (load_corpus([tmp_path / name], held_out_bytes=SMALL) for name in "ab")
    assert first.fingerprint == second.fingerprint
    assert first.held_out_files == second.held_out_files
    assert torch.equal(first.train, second.train)


def test_changed_text_changes_the_fingerprint_but_not_the_split(tmp_path: Path) -> None:
    write_texts(tmp_path)
    before = load_corpus([tmp_path], held_out_bytes=SMALL)
    path = tmp_path / before.train_files[0]
    path.write_text(path.read_text().replace("This", "That"))
    after = load_corpus([tmp_path], held_out_bytes=SMALL)
    assert after.fingerprint != before.fingerprint
    assert after.held_out_files == before.held_out_files


def test_every_document_is_framed_and_control_names_stay_bytes(tmp_path: Path) -> None:
    text = "[BOS]<|open|>message<|sep|> ä € 𝄞 <|reserved_token_300|>[PAD]\n" * 60
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    write_texts(tmp_path)
    corpus = load_corpus([tmp_path], held_out_bytes=SMALL)
    stream = torch.cat([corpus.train, corpus.held_out]).tolist()
    documents = len(corpus.train_files) + len(corpus.held_out_files)
    assert [stream.count(BOS_ID), stream.count(EOS_ID)] == [documents, documents]
    assert max(i for i in stream if i not in (BOS_ID, EOS_ID)) < 256
    framed = [BOS_ID, *encode_text(build_tokenizer(), text), EOS_ID]
    assert any(stream[i : i + len(framed)] == framed for i, value in enumerate(stream) if value == BOS_ID)


def test_binary_and_unreadable_files_are_skipped_and_counted(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "zero.bin").write_bytes(b"abc\0def")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".hidden").write_bytes(b"\0")
    corpus = load_corpus([tmp_path], held_out_bytes=SMALL)
    assert corpus.skipped == 3
    assert len(corpus.train_files) + len(corpus.held_out_files) == 30


def test_files_given_twice_count_once(tmp_path: Path) -> None:
    write_texts(tmp_path)
    once = load_corpus([tmp_path], held_out_bytes=SMALL)
    twice = load_corpus([tmp_path, tmp_path, tmp_path / "part0"], held_out_bytes=SMALL)
    assert twice.fingerprint == once.fingerprint


def test_a_single_file_is_split_by_pieces(tmp_path: Path) -> None:
    text = "".join(f"line {index} äöü 𝄞\n" for index in range(40_000))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    corpus = load_corpus([tmp_path / "book.txt"], held_out_bytes=100_000)
    assert 100_000 <= corpus.held_out_bytes < 150_000
    assert corpus.train_bytes + corpus.held_out_bytes == len(text.encode())
    corpus.held_out_text.decode()
    assert all(name.startswith("book.txt#") for name in corpus.train_files)


def test_a_file_without_line_ends_is_never_cut_inside_a_character(tmp_path: Path) -> None:
    (tmp_path / "flat.txt").write_text("€" * 100_000, encoding="utf-8")
    corpus = load_corpus([tmp_path / "flat.txt"], held_out_bytes=70_000)
    corpus.held_out_text.decode()


def test_one_huge_file_is_never_held_out(tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "huge.txt").write_text("x\n" * 50_000)
    assert "huge.txt" in load_corpus([tmp_path], held_out_bytes=SMALL).train_files


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    write_texts(tmp_path, count=3)
    with pytest.raises(ValueError, match=r"too little text.*205,000 bytes to hold out"):
        load_corpus([tmp_path])


def test_an_empty_directory_and_a_missing_path_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too little text"):
        load_corpus([tmp_path])
    with pytest.raises(UserError, match="no such file or directory"):
        load_corpus([tmp_path / "absent"])

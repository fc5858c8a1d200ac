"""Which files, and one clear line for each way in which there is no text."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from train.config import ConfigError, Data
from train.data import corpus


def data(path: object = None, tokenizer: object = None) -> Data:
    return Data("text", None if path is None else str(path), None if tokenizer is None else str(tokenizer))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "a folder"
    for name, text in {
        "b.txt": "bee",
        "a/z.txt": "zed",
        "a/c.md": "sea",
        ".git/config": "no",
        "a/.hidden": "no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "empty.txt").touch()
    return root


def test_folder_is_recursive_sorted_and_skips_hidden_and_empty(folder: Path) -> None:
    assert [str(p.relative_to(folder)) for p in corpus.files(data(folder))] == ["a/c.md", "a/z.txt", "b.txt"]


def test_file_and_globs(folder: Path) -> None:
    assert corpus.files(data(folder / "b.txt")) == [folder / "b.txt"]
    assert corpus.files(data(folder / "*.txt")) == [folder / "b.txt"]
    assert corpus.files(data(folder / "**/*.txt")) == [folder / "a/z.txt", folder / "b.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "x[1].txt").write_text("one")
    assert corpus.files(data(tmp_path / "x[1].txt")) == [tmp_path / "x[1].txt"]


def test_links_to_files_and_folders_are_followed(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "sub").symlink_to(folder / "a")
    (linked / "one").symlink_to(folder / "b.txt")
    assert [p.name for p in corpus.files(data(linked))] == ["one", "c.md", "z.txt"]


def make_loop(root: Path) -> Path:
    (root / "loop").symlink_to(root / "loop")
    return root / "loop"


def make_loop_inside(root: Path) -> Path:
    (root / "text.txt").write_text("x")
    make_loop(root)
    return root


def make_folder_loop(root: Path) -> Path:
    (root / "sub").mkdir()
    (root / "sub" / "up").symlink_to(root)
    return root


def make_dangling(root: Path) -> Path:
    (root / "gone").symlink_to(root / "nowhere")
    return root / "gone"


def make_empty_file(root: Path) -> Path:
    (root / "empty").touch()
    return root / "empty"


def make_only_empty(root: Path) -> Path:
    make_empty_file(root)
    return root


def make_hidden_only(root: Path) -> Path:
    (root / ".secret").write_text("x")
    return root


def make_fifo(root: Path) -> Path:
    os.mkfifo(root / "pipe")
    return root / "pipe"


def make_under_a_file(root: Path) -> Path:
    (root / "file").write_text("x")
    return root / "file" / "below"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda root: root / "missing", "is not there; valid: a UTF-8 file, a folder or a glob"),
        (lambda root: root / "*.none", "matches no file"),
        (lambda root: root / ("x" * 300), "can't be read: File name too long"),
        (lambda root: root, "is a folder with no file in it"),
        (make_hidden_only, "is a folder with no file in it"),
        (make_only_empty, "holds no text"),
        (make_empty_file, "is an empty file"),
        (make_loop, "symlink loop"),
        (make_loop_inside, "symlink loop"),
        (make_folder_loop, "symlink loop"),
        (make_dangling, "is not there"),
        (make_fifo, "is neither a file nor a folder"),
        (make_under_a_file, "Not a directory"),
    ],
)
def test_nothing_to_read_is_one_clear_line(tmp_path: Path, make: object, why: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        corpus.files(data(path))
    assert str(caught.value).startswith(f"data.path={path}: ")
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that everyone may read, seen without root's right to read everything."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def nobody() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("below", [False, True], ids=["itself", "in its folder"])
def test_unreadable_file(unprivileged: Path, below: bool) -> None:
    secret = unprivileged / "secret"
    secret.write_text("x")
    secret.chmod(0)
    with nobody(), pytest.raises(ConfigError, match="secret can't be read: Permission denied"):
        corpus.content_hash(data(unprivileged if below else secret))


def test_unreadable_folder(unprivileged: Path) -> None:
    (unprivileged / "closed").mkdir(mode=0)
    with nobody(), pytest.raises(ConfigError, match="closed can't be read: Permission denied"):
        corpus.files(data(unprivileged))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"ok then \xe2\x82", b"x" * (1 << 20) + b"\x80"])
def test_not_utf8(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="bad.bin is not UTF-8"):
        corpus.content_hash(data(tmp_path))


def test_a_character_across_a_read_boundary_is_fine(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x" * ((1 << 20) - 1) + "é")
    assert b"".join(corpus.documents(data(tmp_path))).decode().endswith("xé")


def test_content_hash_is_of_the_content_only(tmp_path: Path) -> None:
    for name, files in {"one": {"a": "x", "b": "y"}, "two": {"c": "x", "d": "y"}, "three": {"a": "xy"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    one, two, three = (corpus.content_hash(data(tmp_path / n)) for n in ("one", "two", "three"))
    assert one == two != three
    (tmp_path / "two" / "d").write_text("z")
    assert corpus.content_hash(data(tmp_path / "two")) != one


def test_default_corpus_is_english_of_some_size() -> None:
    text = b"".join(corpus.documents(data())).decode()
    assert len(text) > 300_000 and text.count(" the ") > 1000
    assert corpus.files(data()) == []
    assert corpus.content_hash(data()) == corpus.content_hash(data())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_vocab_sizes(tokenizer: Path) -> None:
    assert corpus.vocab_size(data()) == 257
    assert corpus.vocab_size(data(tokenizer=tokenizer)) == 4


def test_a_tokenizer_without_an_end_token_gets_one_more_id(tokenizer: Path) -> None:
    plain = json.loads(tokenizer.read_text())
    del plain["model"]["vocab"]["</s>"]
    tokenizer.write_text(json.dumps(plain))
    assert corpus.vocab_size(data(tokenizer=tokenizer)) == 4
    assert corpus.end_id(corpus.load_tokenizer(data(tokenizer=tokenizer))) == 3


def test_the_tokenizer_is_part_of_the_hash(tokenizer: Path) -> None:
    assert corpus.content_hash(data(tokenizer=tokenizer)) != corpus.content_hash(data())


def test_bad_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"not": "one"}')
    with pytest.raises(ConfigError, match=r"data.tokenizer=.*t.json: is not a tokenizer.json"):
        corpus.vocab_size(data(tokenizer=tmp_path / "t.json"))
    with pytest.raises(ConfigError, match=r"data.tokenizer=.*gone: can't be read: No such file"):
        corpus.content_hash(data(tokenizer=tmp_path / "gone"))

"""The text behind data=text: which files, their content hash, the vocabulary. No torch: a sweep is checked before ranks.

A document is one file; without data.path, one topic of CPython's pydoc_data.topics (real English that every Python has;
it differs between Python versions, which the content hash shows).
"""

import codecs
import errno
import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import ConfigError, Data

#: tokens that end a document in published tokenizers, in order of preference
_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_CHUNK = 1 << 20  # bytes read at a time


def files(cfg: Data) -> list[Path]:
    """The non-empty files of data.path: itself, a folder's (recursive, hidden ones skipped) or a glob's, sorted.

    Empty list for the built-in corpus. Raises ConfigError for data.path when there is nothing to read.
    """
    if cfg.path is None:
        return []
    path = Path(cfg.path).expanduser()
    try:
        info = path.stat()
    except FileNotFoundError:
        if path.is_symlink() or not glob.has_magic(str(path)):
            raise ConfigError("data.path", cfg.path, "is not there; valid: a UTF-8 file, a folder or a glob") from None
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207  # Path.glob takes no absolute pattern
        found = [Path(name) for name in sorted(names)]
        found = [name for name in found if stat.S_ISREG(_stat(cfg, name).st_mode)]
        nothing = "matches no file; valid: a UTF-8 file, a folder or a glob"
    except OSError as error:
        raise _unreadable(cfg, path, error) from None
    else:
        if stat.S_ISREG(info.st_mode):
            found, nothing = [path], ""
        elif stat.S_ISDIR(info.st_mode):
            found, nothing = sorted(_walk(cfg, path, ())), "is a folder with no file in it; hidden files don't count"
        else:
            raise ConfigError("data.path", cfg.path, "is neither a file nor a folder")
    if not found:
        raise ConfigError("data.path", cfg.path, nothing)
    filled = [name for name in found if _stat(cfg, name).st_size > 0]
    if not filled:
        raise ConfigError("data.path", cfg.path, "holds no text: empty" if nothing else "is an empty file")
    return filled


def content_hash(cfg: Data) -> str:
    """sha256 over the documents' bytes, in order, and the tokenizer's. Names and places don't count.

    Raises ConfigError like `files`, and for a file that can't be read or isn't UTF-8.
    """
    total = hashlib.sha256(_tokenizer_bytes(cfg))
    for chunks in _documents(cfg):
        one = hashlib.sha256()
        for chunk in chunks:
            one.update(chunk)
        total.update(one.digest())  # a digest each, so that moving a boundary changes the hash
    return total.hexdigest()


def documents(cfg: Data) -> Iterator[bytes]:
    """Each document's UTF-8 bytes, in order. Raises ConfigError like `content_hash`."""
    return (b"".join(chunks) for chunks in _documents(cfg))


def vocab_size(cfg: Data) -> int:
    """Number of token ids: 257 for bytes, whose last ends a document.

    Raises ConfigError for data.tokenizer when it can't be loaded.
    """
    if cfg.tokenizer is None:
        return 257
    tokenizer = load_tokenizer(cfg)
    return max(*tokenizer.get_vocab().values(), end_id(tokenizer)) + 1


def load_tokenizer(cfg: Data) -> Any:
    """The tokenizers.Tokenizer of data.tokenizer. Raises ConfigError when it is missing or not one."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("data.tokenizer", cfg.tokenizer, "needs the package tokenizers") from None
    text = _tokenizer_bytes(cfg)
    try:
        return Tokenizer.from_buffer(text)
    except Exception as error:  # the package raises plain Exception for whatever is wrong with the file
        raise ConfigError("data.tokenizer", cfg.tokenizer, f"is not a tokenizer.json: {error}") from None


def end_id(tokenizer: Any) -> int:
    """The id that ends a document: the tokenizer's own, or one more than its largest where it has none."""
    vocab = tokenizer.get_vocab()
    return next((vocab[token] for token in _END_TOKENS if token in vocab), max(vocab.values()) + 1)


def _documents(cfg: Data) -> Iterator[Iterator[bytes]]:
    if cfg.path is None:
        from pydoc_data.topics import topics

        return (iter([topics[name].encode()]) for name in sorted(topics))
    return (_read(cfg, path) for path in files(cfg))


def _read(cfg: Data, path: Path) -> Iterator[bytes]:
    """The file in chunks, checked as UTF-8 on the way."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with open(path, "rb") as f:
            while chunk := f.read(_CHUNK):
                decoder.decode(chunk)
                yield chunk
        decoder.decode(b"", final=True)
    except OSError as error:
        raise _unreadable(cfg, path, error) from None
    except UnicodeDecodeError as error:
        raise ConfigError("data.path", cfg.path, f"{path} is not UTF-8 text ({error.reason})") from None


def _walk(cfg: Data, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Regular files under `folder`, through symlinks; `above` are the (device, inode) of the folders that led here."""
    info = _stat(cfg, folder)
    here = (info.st_dev, info.st_ino)
    if here in above:
        raise ConfigError("data.path", cfg.path, f"{folder} is a symlink loop")
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(cfg, folder, error) from None
    for entry in entries:
        mode = _stat(cfg, entry).st_mode
        if stat.S_ISDIR(mode):
            yield from _walk(cfg, entry, (*above, here))
        elif stat.S_ISREG(mode):
            yield entry


def _stat(cfg: Data, path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(cfg, path, error) from None


def _unreadable(cfg: Data, path: Path, error: OSError) -> ConfigError:
    if error.errno == errno.ELOOP:
        return ConfigError("data.path", cfg.path, f"{path} is a symlink loop")
    return ConfigError("data.path", cfg.path, f"{path} can't be read: {error.strerror}")


def _tokenizer_bytes(cfg: Data) -> bytes:
    if cfg.tokenizer is None:
        return b""
    try:
        return Path(cfg.tokenizer).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError("data.tokenizer", cfg.tokenizer, f"can't be read: {error.strerror}") from None

"""data=text: the corpus as one stream of tokens, cut into rows of seq_len + 1, reshuffled every epoch."""

import functools
from collections.abc import Iterable

import numpy as np
import torch

from train import seeds
from train.config import ConfigError, Data
from train.data import corpus


class Text:
    """Rows of real text on the CPU.

    Row r of the stream is tokens r*seq_len .. (r+1)*seq_len: neighbours share one token, so each token is a target once
    an epoch; the rest that fills no row is left out. A corpus shorter than one row is repeated until it fills one, and
    `repeated` says so.
    """

    def __init__(self, cfg: Data, seq_len: int, global_batch: int, seed: int) -> None:
        """Reads and encodes the whole corpus. Raises ConfigError like `corpus.content_hash`."""
        tokens = encode(cfg)
        self.repeated = len(tokens) < seq_len + 1
        self.tokens = np.resize(tokens, seq_len + 1) if self.repeated else tokens
        self.rows = (len(self.tokens) - 1) // seq_len  # an epoch's
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed
        self._permutation = functools.lru_cache(maxsize=2)(self._shuffle)  # a batch touches two epochs at a seam

    def batch(self, step: int, start: int, count: int) -> torch.Tensor:
        """Rows start .. start+count of step's global batch: [count, seq_len + 1] int64 on the CPU.

        A pure function of (seed, step, global_batch, row): every layout trains on the same rows.
        """
        position = step * self.global_batch + start + np.arange(count)
        epoch, index = np.divmod(position, self.rows)
        rows = np.array([self._permutation(e)[i] for e, i in zip(epoch.tolist(), index.tolist(), strict=True)])
        taken = self.tokens[rows[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
        return torch.from_numpy(taken.astype(np.int64))

    def _shuffle(self, epoch: int) -> np.ndarray:
        # sorting raw words, since numpy promises the same raw words for ever, but not the same permutation()
        return np.argsort(np.random.PCG64(seeds.derive(self.seed, "epoch", epoch)).random_raw(self.rows), kind="stable")


def encode(cfg: Data) -> np.ndarray:
    """All documents as token ids [n] (uint16 or uint32), each followed by the end-of-document id."""
    if cfg.tokenizer is None:
        return _stream((np.frombuffer(text, np.uint8) for text in corpus.documents(cfg)), end=256, dtype=np.uint16)
    tokenizer = corpus.load_tokenizer(cfg)
    texts = [text.decode() for text in corpus.documents(cfg)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    if not any(one.ids for one in encoded):
        raise ConfigError("data.tokenizer", cfg.tokenizer, "turns the whole corpus into no token")
    return _stream((np.array(one.ids) for one in encoded), end=corpus.end_id(tokenizer), dtype=np.uint32)


def _stream(parts: Iterable[np.ndarray], end: int, dtype: type[np.unsignedinteger]) -> np.ndarray:
    separator = np.array([end], dtype)
    return np.concatenate([piece for part in parts for piece in (part.astype(dtype), separator)])

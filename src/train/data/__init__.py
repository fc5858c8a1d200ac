"""What a model trains on: `build(...).batch(step, start, count)` gives rows of a step's global batch."""

from typing import TYPE_CHECKING

from train.config import ConfigError, Data

if TYPE_CHECKING:  # torch is imported by `build` alone: the sweeper reads train.data.corpus without it
    import torch

    from train.data.fake import Fake
    from train.data.text import Text


def build(cfg: Data, vocab: int, seq_len: int, global_batch: int, seed: int, device: "torch.device") -> "Text | Fake":
    """The data of a run. Raises ConfigError for data that can't be read or has more token ids than the model's `vocab`."""
    if cfg.name == "fake":
        from train.data.fake import Fake

        return Fake(vocab, seq_len, seed, device)
    if cfg.name == "text":
        from train.data import corpus
        from train.data.text import Text

        if (needed := corpus.vocab_size(cfg)) > vocab:
            raise ConfigError("model.vocab", vocab, f"the data has {needed} token ids; valid: {needed} or more")
        return Text(cfg, seq_len, global_batch, seed)
    raise ConfigError("data", cfg.name, "valid: text, fake")

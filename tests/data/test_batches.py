"""Rows are a pure function of (seed, step, global batch, row), whatever the layout; an epoch has every target once."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train import data
from train.config import ConfigError, Data
from train.data.fake import POOL, Fake
from train.data.text import Text, encode

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    (root / "a").write_text("".join(chr(33 + i % 90) for i in range(500)))
    (root / "b").write_text("é" * 40)
    return root


@pytest.fixture(scope="module")
def config_(folder: Path) -> Data:
    return Data("text", str(folder))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["text", "fake"]),
    seed=st.integers(-3, 2**40),
    step=st.integers(0, 200),
    seq_len=st.integers(1, 100),
    global_batch=st.integers(1, 24),
    cuts=st.lists(st.integers(0, 24), max_size=4),
)
def test_rows_do_not_depend_on_how_they_are_shared_out(
    config_: Data, name: str, seed: int, step: int, seq_len: int, global_batch: int, cuts: list[int]
) -> None:
    def fresh() -> Text | Fake:
        return data.build(config_ if name == "text" else Data("fake"), 257, seq_len, global_batch, seed, CPU)

    whole = fresh().batch(step, 0, global_batch)
    assert whole.shape == (global_batch, seq_len + 1) and whole.dtype == torch.int64
    assert whole.min() >= 0 and whole.max() < 257
    edges = sorted({0, global_batch, *(c for c in cuts if c < global_batch)})
    used = fresh()
    used.batch(step + 7, 0, 1)  # what was asked before leaves no trace
    parts = [used.batch(step, a, b - a) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), epoch=st.integers(0, 5), seq_len=st.integers(1, 200))
def test_an_epoch_holds_every_target_once(config_: Data, seed: int, epoch: int, seq_len: int) -> None:
    text = Text(config_, seq_len, 1, seed)
    rows = torch.cat([text.batch(epoch * text.rows + i, 0, 1) for i in range(text.rows)])
    stream = encode(config_)[: text.rows * seq_len + 1]
    assert sorted(rows[:, 1:].flatten().tolist()) == sorted(stream[1:].tolist())
    assert {tuple(r) for r in rows.tolist()} == {
        tuple(stream[i * seq_len : (i + 1) * seq_len + 1].tolist()) for i in range(text.rows)
    }


def test_epochs_and_seeds_shuffle_differently(config_: Data) -> None:
    text, other = Text(config_, 20, 1, 0), Text(config_, 20, 1, 1)
    first, second = (torch.cat([text.batch(e * text.rows + i, 0, 1) for i in range(text.rows)]) for e in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.cat([other.batch(i, 0, 1) for i in range(text.rows)]))


def test_the_order_is_pinned() -> None:
    """A changed shuffle would change every run's data behind its identity."""
    text = Text.__new__(Text)
    text.rows, text.seed = 8, 0
    assert text._shuffle(0).tolist() == [0, 5, 2, 7, 3, 1, 6, 4]


def test_documents_end_with_the_end_id(config_: Data) -> None:
    stream = encode(config_)
    assert np.flatnonzero(stream == 256).tolist() == [500, 581]
    assert bytes(stream[501:581].astype(np.uint8)).decode() == "é" * 40


def test_a_short_corpus_repeats_until_it_fills_a_row(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("abc")
    text = Text(Data("text", str(tmp_path)), 10, 2, 0)
    assert text.repeated and text.rows == 1
    assert text.batch(0, 0, 2).tolist() == [[97, 98, 99, 256, 97, 98, 99, 256, 97, 98, 99]] * 2
    assert not Text(Data("text", str(tmp_path)), 3, 2, 0).repeated


def test_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one").write_text("a b a x")
    (tmp_path / "text" / "two").write_text("b")
    cfg = Data("text", str(tmp_path / "text"), str(tmp_path / "tokenizer.json"))
    assert encode(cfg).tolist() == [1, 2, 1, 0, 3, 2, 3]


def test_a_vocabulary_too_small_for_the_data_is_refused(config_: Data) -> None:
    with pytest.raises(ConfigError, match="model.vocab=256: the data has 257 token ids; valid: 257 or more"):
        data.build(config_, 256, 8, 1, 0, CPU)


def test_unknown_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="data=txt: valid: text, fake"):
        data.build(Data("txt"), 256, 8, 1, 0, CPU)


def test_fake_hands_out_the_same_tensors_after_the_pool_is_made() -> None:
    fake = Fake(300, 16, 0, CPU)
    made = [fake.batch(step, 2, 3) for step in range(POOL)]
    assert len({tuple(t.flatten().tolist()) for t in made}) == POOL
    for step in range(POOL, 3 * POOL):
        assert fake.batch(step, 2, 3) is made[step % POOL]


def test_fake_covers_the_vocabulary() -> None:
    drawn = Fake(50, 400, 0, CPU).batch(0, 0, 8)
    assert drawn.unique().tolist() == list(range(50))

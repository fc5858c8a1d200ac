"""conf/model: published sizes."""

from pathlib import Path

import pytest
import yaml

from train import config
from train.measure import flops

CONF = Path(__file__).parents[2] / "conf"

#: parameters as the models' cards and safetensors headers state them
PUBLISHED = {
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_4b": 4_022_468_096,
    "qwen3_30b_a3b": 30_532_122_624,
}


def load(name: str) -> config.Model:
    return config.from_dict(config.Model, yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    assert flops.param_count(load(name)) == PUBLISHED[name]


def test_dense_1b_is_the_issue_s_geometry() -> None:
    m = load("dense_1b")
    assert (m.dim, m.layers, m.heads, m.head_dim, m.kv_heads, m.ffn, m.vocab, m.tied) == (
        2048, 18, 16, 128, 8, 6144, 32768, False,
    )  # fmt: skip


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda p: p.stem)
def test_options_are_commented_complete_and_named_like_their_file(path: Path) -> None:
    assert path.read_text().startswith("# ")
    m = load(path.stem)
    assert m.name == path.stem
    assert "???" not in vars(m).values()
    assert m.heads % m.kv_heads == 0

"""Rounds: plain averaging to the bit, compression whose loss is sent later, and the outer step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.record import cases
from train import config
from train.config import ConfigError
from train.parallel import mesh
from train.parallel.compress import Codec

PLAIN = config.Round("delta", inner_steps=2)


@pytest.mark.parametrize("reduction", ["ddp", "zero2o", "fsdp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_without_compression_rate_1_is_plain_averaging_bit_for_bit(four: Ranks, reduction: str, dtype: str) -> None:
    case = Case(reduction, dtype, beta1=0.9, steps=2)
    alone = four.run(cases.local_training, case, PLAIN, 2, (1,))
    got = four.run(cases.rounds_training, case, PLAIN, 2)
    for place in (0, 1):  # of a rank in its island of two
        a, b = alone[place][1], alone[place + 2][1]
        assert any(not torch.equal(a[n], b[n]) for n in a), "the islands did go apart"
        for rank in (place, place + 2):
            weights = got[rank]["rounds"][0]["weights"]
            assert weights.keys() == a.keys()
            for name, weight in weights.items():
                assert torch.equal(weight, (a[name] + b[name]) / 2), name
    if reduction != "fsdp":  # and the model that trains on has them, the same on every rank
        for other in got[1:]:
            assert all(torch.equal(got[0]["model"][n], w) for n, w in other["model"].items())


def test_what_is_not_sent_now_is_sent_later(two: Ranks) -> None:
    """error' + said = error + delta, and the said part alone moves the weights."""
    rounds = config.Round("delta", inner_steps=1, topk=0.1, bits=32)
    case = Case("ddp", "fp64", beta1=0.9, steps=4)
    got = two.run(cases.rounds_training, case, rounds, 2)
    for r in range(4):
        for name in got[0]["rounds"][r]["before"]:
            said = []
            for island in (0, 1):
                kept = got[island]["rounds"][r]
                delta = kept["state"][f"anchor/{name}"] - kept["before"][name]
                wanted = delta + kept["state"][f"error/{name}"]
                said.append(wanted - kept["after"][f"error/{name}"])
                share = math.ceil(0.1 * wanted.numel())
                assert (said[-1] != 0).sum() <= share
                assert kept["after"][f"error/{name}"].abs().max() <= wanted.abs().flatten().topk(share).values.min()
            anchor = got[0]["rounds"][r]["state"][f"anchor/{name}"]
            torch.testing.assert_close(got[0]["rounds"][r]["weights"][name], anchor - (said[0] + said[1]) / 2)
            assert torch.equal(got[0]["rounds"][r]["weights"][name], got[1]["rounds"][r]["weights"][name])


def test_outer_nesterov_momentum(two: Ranks) -> None:
    """torch.optim.SGD(nesterov=True) over the mean delta as gradient."""
    rounds = config.Round("delta", inner_steps=2, outer_lr=0.7, outer_momentum=0.9)
    got = two.run(cases.rounds_training, Case("ddp", "fp64", beta1=0.9, steps=6), rounds, 2)
    for name, start in got[0]["rounds"][0]["state"].items():
        kind, _, weight = name.partition("/")
        if kind != "anchor":
            continue
        reference = torch.nn.Parameter(start.clone())
        outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
        for r in range(3):
            mean = (got[0]["rounds"][r]["before"][weight] + got[1]["rounds"][r]["before"][weight]) / 2
            reference.grad = got[0]["rounds"][r]["state"][name] - mean
            outer.step()
            torch.testing.assert_close(got[0]["rounds"][r]["weights"][weight], reference.detach())


def test_volume_and_ratio_are_what_is_sent(four: Ranks) -> None:
    rounds = config.Round("delta", inner_steps=2, topk=0.25, bits=8, outer_lr=0.7, outer_momentum=0.9)
    report = four.run(cases.rounds_training, Case("zero2o", "bf16", beta1=0.9, steps=4), rounds, 2)[0]["report"]
    assert report["islands"] == 2 and report["rounds"] == 2 == len(report["seconds"])
    assert report["sent_bytes"] == report["payload_bytes"]
    assert report["compression_ratio"] == report["raw_bytes"] / report["payload_bytes"] > 1.5


@given(
    st.integers(1, 2000), st.sampled_from([1.0, 0.5, 0.1, 0.001]), st.sampled_from([32, 8, 4]),
    st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_codec_keeps_the_largest_within_its_step(
    n: int, topk: float, bits: int, dtype: torch.dtype, seed: int
) -> None:
    flat = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    codec = Codec(topk, bits)
    payload = codec.encode(flat)
    assert payload.dtype == torch.uint8 and len(payload) % 8 == 0
    assert len(payload) == len(codec.encode(torch.zeros(n, dtype=dtype))), "the length does not depend on the values"
    back = codec.decode(payload, n, dtype)
    assert back.shape == flat.shape and back.dtype == dtype
    kept = math.ceil(topk * n)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[flat.abs().topk(kept).indices] = True
    assert (back[~chosen] == 0).all()
    if bits == 32:
        assert torch.equal(back[chosen], flat[chosen])
    else:
        step = flat.abs().max() / (2 ** (bits - 1) - 1)
        assert ((back - flat)[chosen].abs() <= 0.51 * step).all()


def test_zeros_stay_zeros() -> None:
    for bits in (32, 8, 4):
        codec = Codec(1.0, bits)
        assert not codec.decode(codec.encode(torch.zeros(300)), 300, torch.float32).any()


@pytest.mark.parametrize(
    ("given_", "nproc", "want"),
    [((-1, -1), 4, (4, 1)), ((2, -1), 4, (2, 2)), ((-1, 2), 4, (2, 2)), ((2, 2), 4, (2, 2))],
)
@pytest.mark.parametrize("reduction", ["ddp", "zero2o", "fsdp"])
def test_islands(given_: tuple[int, int], nproc: int, want: tuple[int, int], reduction: str) -> None:
    cfg = config.Train(reduction=config.Reduction(reduction), round=PLAIN)
    cfg.parallelism.dp_replicate, cfg.parallelism.dp_shard = given_
    degrees = mesh.resolve(cfg, nproc)
    assert (degrees["dp_replicate"], degrees["dp_shard"]) == want
    cfg.parallelism.dp_replicate = 3
    wrong = "dp_replicate 3 must divide" if given_[1] == -1 else "dp_replicate 3 x dp_shard 2 must multiply to"
    with pytest.raises(ConfigError, match=f"{wrong} nproc=4"):
        mesh.resolve(cfg, nproc)

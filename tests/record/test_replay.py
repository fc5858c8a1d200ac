"""Replay: equal passes are equal to the bit, and one flipped bit is found with its step, rank and tensor."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.cases import Case
from tests.parallel.ranks import Ranks
from tests.record import cases
from train.replay import compare
from train.replay.leaves import Hasher
from train.replay.prints import fingerprint


@pytest.mark.parametrize("reduction", ["ddp", "zero2", "zero2o", "zero2rs", "fsdp"])
def test_a_second_pass_equals_the_first(two: Ranks, reduction: str) -> None:
    got = two.run(cases.two_passes, Case(reduction, "bf16", beta1=0.9, grad_accum=2))
    first, second = [one for one, _ in got], [other for _, other in got]
    assert compare.first_difference("second", first, second) is None
    assert compare.root(first) == compare.root(second)
    assert len({step["state"]["embed.weight.weight"] for step in first[0]}) == 3, "the steps do train"


def test_zero2_and_zero2o_have_the_same_leaves(four: Ranks) -> None:
    runs = [four.run(cases.one_pass, Case(name, "bf16", beta1=0.9)) for name in ("zero2", "zero2o")]
    assert compare.root(runs[0]) == compare.root(runs[1])


@pytest.mark.parametrize(("option", "value"), [("full_recompute", True), ("rope_cache", False)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recompute_and_the_rope_cache_change_no_bit(two: Ranks, option: str, value: bool, dtype: str) -> None:
    case = Case("zero2o", dtype, beta1=0.9)
    plain, changed = two.run(cases.one_pass, case), two.run(cases.one_pass, case, **{option: value})
    assert compare.first_difference("second", plain, changed) is None
    assert compare.root(plain) == compare.root(changed)


@pytest.mark.parametrize("reduction", ["ddp", "zero2o"])
def test_each_of_16_flips_is_named(two: Ranks, reduction: str) -> None:
    """In a bf16 gradient, with clipping, which spreads the flip over every tensor of every rank."""
    for bit in range(16):
        rank, step, number = bit % 2, bit % 3, 3 + bit % 5
        got = two.run(cases.flipped, Case(reduction, "bf16", beta1=0.9), rank, step, number, bit)
        found = compare.first_difference("second", [g[0] for g in got], [g[1] for g in got])
        assert found is not None, bit
        name = f"{got[0][2]}.grad"
        assert (found.step, found.rank, found.tensor, found.ranks) == (step, rank, name, [rank]), bit
        assert "one rank alone" in found.cause()


def test_other_data_give_another_root(two: Ranks) -> None:
    runs = [two.run(cases.one_pass, Case("zero2o", "fp32", lr=lr)) for lr in (1e-2, 2e-2)]
    assert compare.root(runs[0]) != compare.root(runs[1])


STEP = {"grad": {"b.grad": "01", "a.grad": "02"}, "grad_sum": {"a.grad_sum": "03"}, "state": {"a.weight": "04"}}


def run_of(world: int, steps: int) -> compare.Pass:
    return [[copy.deepcopy(STEP) for _ in range(steps)] for _ in range(world)]


def test_the_earliest_cause_is_named() -> None:
    first, other = run_of(2, 3), run_of(2, 3)
    for rank in (0, 1):  # what clipping does: everything differs
        for step in (1, 2):
            other[rank][step]["state"]["a.weight"] = "ff"
    other[1][1]["grad"]["a.grad"] = "ff"
    found = compare.first_difference("second", first, other)
    assert found is not None
    assert (found.step, found.rank, found.tensor, found.ranks, found.stage) == (1, 1, "a.grad", [1], "grad")


@pytest.mark.parametrize(
    ("world", "ranks", "words"),
    [
        (4, [0, 1, 2, 3], "all ranks"),
        (4, [2], "one rank alone"),
        (4, [1, 2], "some ranks"),
        (1, [0], "can't be told apart"),
    ],
)
def test_kernel_and_device_are_told_apart(world: int, ranks: list[int], words: str) -> None:
    first, other = run_of(world, 2), run_of(world, 2)
    for rank in ranks:
        other[rank][1]["grad"]["b.grad"] = "ff"
    verdict = compare.conclude({"first": first, "second": run_of(world, 2), "fresh": other})
    assert verdict["replay_match"] is False
    assert f"fresh pass: step 1, rank {ranks[0]}, b.grad" in verdict["replay_difference"]
    assert words in verdict["replay_difference"]


@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_merkle_root_depends_on_every_leaf_and_its_place(count: int, data: st.DataObject) -> None:
    leaves = [bytes([i]) * 32 for i in range(count)]
    root = compare.merkle_root(leaves)
    i = data.draw(st.integers(0, count - 1))
    assert compare.merkle_root([*leaves[:i], b"x" * 32, *leaves[i + 1 :]]) != root
    assert compare.merkle_root([*leaves, leaves[-1]]) != root
    if count > 1:
        j = data.draw(st.integers(0, count - 1).filter(lambda n: n != i))
        swapped = list(leaves)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        assert compare.merkle_root(swapped) != root


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.lists(st.integers(1, 9), min_size=0, max_size=3),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_any_flipped_bit_changes_both_words_of_a_fingerprint(
    dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    from train.faults import flip

    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = fingerprint(tensor)
    assert torch.equal(before, fingerprint(tensor.clone()))
    flip(tensor, data.draw(st.integers(0, 8 * dtype.itemsize - 1)), data.draw(st.integers(0, tensor.numel() - 1)))
    assert (before != fingerprint(tensor)).all()


def test_digests_are_blake3_of_the_bytes() -> None:
    from blake3 import blake3

    tensor = torch.arange(1000, dtype=torch.float32)
    hasher = Hasher(torch.device("cpu"), 2)
    assert hasher.digest(tensor) == blake3(tensor.numpy().tobytes()).hexdigest()
    assert (
        hasher.digest(tensor.view(10, 100).t())
        == blake3(tensor.view(10, 100).t().contiguous().numpy().tobytes()).hexdigest()
    )
    assert hasher.digest(torch.tensor(3.0)) == blake3(torch.tensor([3.0]).numpy().tobytes()).hexdigest()


@pytest.mark.gpu
def test_a_gpu_tensor_larger_than_a_buffer_hashes_as_on_the_host() -> None:
    from train.replay import leaves

    tensor = torch.randn(leaves.CHUNK // 4 * 2 + 12345)
    there = Hasher(torch.device("cuda"), 4).digest(tensor.cuda())
    assert there == Hasher(torch.device("cpu"), 4).digest(tensor)
    assert torch.equal(fingerprint(tensor.cuda()).cpu(), fingerprint(tensor))

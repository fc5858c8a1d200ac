"""What moves, what stays, that it comes back in time, and that nothing is left behind."""

import gc

import pytest
import torch
import torch._dynamo
from torch import Tensor

from tests.model.tiny import build, tokens
from train import config
from train.memory import recompute
from train.memory.offload import HostPool, Offload


class Watched(Offload):
    """Remembers what was asked for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.sent: list[torch.Size] = []
        self.fetched: list[int] = []
        self.alive = 0
        self.late = 0

    def _send(self, saved):  # type: ignore[no-untyped-def]
        self.sent.append(saved.shape)
        super()._send(saved)
        self.alive = max(
            self.alive, sum(1 for r in self._order if (s := r()) is not None and s.device_tensor is not None)
        )

    def _unpack(self, packed):  # type: ignore[no-untyped-def]
        self.late += not isinstance(packed, Tensor) and packed.saved.device_tensor is None
        return super()._unpack(packed)

    def _fetch(self, saved):  # type: ignore[no-untyped-def]
        if saved.device_tensor is None:
            self.fetched.append(saved.index)
        super()._fetch(saved)


def offloaded(mode: str = "none", inflight: int = 2, layers: int = 5, compiled: bool = False, **keys: object):  # type: ignore[no-untyped-def]
    model = build(torch.float32, "flash", layers=layers)
    recompute.apply(model, config.Memory("m", mode))
    if compiled:
        torch._dynamo.reset()
        for block in model.layers:
            block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    watched = Watched(model, torch.device("cpu"), inflight, min_bytes=64, **keys)
    model.saving = watched.saving
    return model, watched


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_are_not_moved(compiled: bool) -> None:
    model, watched = offloaded(compiled=compiled)
    matrices = {p.shape for p in model.parameters()} | {p.t().shape for p in model.parameters() if p.ndim == 2}
    model(*tokens()).backward()
    assert watched.sent and not matrices & set(watched.sent)


@pytest.mark.parametrize("inflight", [1, 2, 4])
def test_full_recompute_moves_a_layers_input_and_fetches_ahead_in_order(inflight: int) -> None:
    model, watched = offloaded("full", inflight)
    model(*tokens()).backward()
    inputs = [i for i, shape in enumerate(watched.sent) if shape == (2, 11, 24)]
    assert len(inputs) == 5
    total = len(watched.sent)
    assert watched.alive <= inflight  # of those sent, so many still held device memory
    # the last ones were still here; each other one is fetched once, layer by layer from the last, before it is needed
    assert sorted(watched.fetched) == list(range(total - inflight))
    layers = [index // (total // 5) for index in watched.fetched]
    assert layers == sorted(layers, reverse=True)
    assert watched.late <= 3 + (
        total - 3 if inflight < 3 else 0
    )  # three tensors a layer: one in flight can't cover them


def test_a_tensor_that_several_operators_save_moves_once() -> None:
    model, watched = offloaded()
    with torch.no_grad():
        embedded = model.embed(tokens()[0])
    moved = watched.moved_bytes
    assert moved == 0
    model(*tokens()).backward()
    x_bytes = embedded.nbytes
    # wq, wk and wv share one input, w_gate and w_up another
    assert sum(1 for shape in watched.sent if shape == (22, 24) or shape == (2, 11, 24)) <= 5 * 6
    assert watched.pool.total_bytes < 5 * 40 * x_bytes


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_policy_keeps_stays(compiled: bool) -> None:
    model, watched = offloaded("selective", compiled=compiled, inputs_only=True)
    model(*tokens()).backward()
    assert watched.sent == [(2, 11, 24)] * 5


def test_host_buffers_are_used_again_whether_backward_comes_or_not() -> None:
    model, watched = offloaded()
    for step in range(4):
        loss = model(*tokens())
        if step % 2:
            loss.backward()
        del loss
        gc.collect()
        if step == 0:
            first = watched.pool.total_bytes
    assert watched.pool.total_bytes <= first + 2 * max(s.numel() for s in watched.sent) * 4  # those in flight


def test_two_forwards_before_their_backwards() -> None:
    model, _ = offloaded("full", 1)
    plain = build(torch.float32, "flash", layers=5)
    grads = []
    for m in (model, plain):
        m.zero_grad()
        first, second = m(*tokens()), m(*tokens(3, 7))
        first.backward()
        second.backward()
        grads.append([p.grad.clone() for p in m.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6),
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(48.0).view(4, 12)[:, ::2],
        torch.ones(1, 6).expand(4, 6),
    ],
    ids=["plain", "transposed", "strided", "expanded"],
)
def test_layouts_come_back(tensor: Tensor) -> None:
    model = torch.nn.Linear(2, 2)
    offload = Offload(model, torch.device("cpu"), 1, min_bytes=1)
    x = tensor.clone(memory_format=torch.preserve_format).requires_grad_() * 1
    with offload.saving(x):
        handle, other = offload._pack(x), offload._pack(x * 2)  # a second one pushes the first out
        assert not isinstance(handle, Tensor) and not isinstance(other, Tensor)
        assert handle.saved.device_tensor is None
        back = offload._unpack(handle)
    assert torch.equal(back, x) and back.shape == x.shape
    assert back.stride() == torch.empty_like(x).stride()


def test_a_storage_at_a_dead_ones_address_is_another_tensor() -> None:
    offload = Offload(torch.nn.Linear(2, 2), torch.device("cpu"), 1, min_bytes=1)
    base = torch.zeros(1)
    handles = []
    with offload.saving(base):
        for value in range(20):
            x = torch.full((64,), float(value))  # freed each time: the allocator hands out the same memory
            handles.append(offload._pack(x))
            del x
        for value, handle in reversed(list(enumerate(handles))):
            assert torch.equal(offload._unpack(handle), torch.full((64,), float(value)))


def test_pool_gives_the_same_buffer_again() -> None:
    pool = HostPool(pinned=False)
    buffer = pool.take(100)
    pool.give(buffer)
    assert pool.take(100) is buffer and pool.total_bytes == 100
    pool.take(100)
    assert pool.total_bytes == 200

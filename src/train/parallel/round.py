"""Rounds: islands train by themselves for some steps and then agree on weights (DiLoCo, Douillard et al. 2023, arXiv
2311.08105), with compressed deltas whose loss is sent later (error feedback, Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847).

At the end of a round an island's delta is what it moved since the round's start. All islands take the mean of the deltas as
the gradient of an outer step with Nesterov momentum. Every rank does this for the shard of weights that it owns, with the
ranks that own the same shard in the other islands.
"""

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train import config
from train.parallel import collectives
from train.parallel.base import DataParallel
from train.parallel.compress import Codec


@dataclasses.dataclass(frozen=True)
class Islands:
    """Where a rank stands: islands are blocks of `size` neighbouring ranks."""

    count: int
    size: int
    inner: Any  # group of the ranks of this island; None where size is 1
    outer: Any  # group of the ranks at this place in every island

    @classmethod
    def of(cls, cfg: config.Train, rank: int) -> "Islands":
        """Make the groups. Collective over all ranks."""
        count, size = int(cfg.parallelism.dp_replicate), int(cfg.parallelism.dp_shard)
        blocks = [list(range(i * size, (i + 1) * size)) for i in range(count)]
        inner = None
        if size > 1:
            inner, _ = dist.new_subgroups_by_enumeration(blocks)
        outer = None
        if count > 1:
            outer, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*blocks, strict=True)])
        return cls(count, size, inner, outer)

    def inner_config(self, cfg: config.Train) -> config.Train:
        """What the reduction inside an island is built from."""
        copies = self.size if cfg.reduction.name == "ddp" else 1
        degrees = dataclasses.replace(cfg.parallelism, dp_replicate=copies, dp_shard=self.size // copies)
        return dataclasses.replace(cfg, parallelism=degrees, round=config.Round())


class Round:
    """The outer step over a rank's own shard of weights."""

    def __init__(self, cfg: config.Round, dp: DataParallel, islands: Islands, device: torch.device) -> None:
        self._cfg, self._dp, self._islands, self._device = cfg, dp, islands, device
        self._codec = Codec(cfg.topk, cfg.bits)
        self._weights = {n: t for n, t in dp.shard_items() if n.endswith(".weight")}
        self._anchor = {n: t.clone() for n, t in self._weights.items()}  # weights at the round's start
        none: dict[str, Tensor] = {}
        zeros = {n: torch.zeros_like(t) for n, t in self._weights.items()}
        self._error = {n: t.clone() for n, t in zeros.items()} if not self._codec.lossless else none
        self._momentum = zeros if cfg.outer_momentum else none
        self._payload_bytes = 0  # of one round
        self._seconds: list[float] = []

    def due(self, step: int) -> bool:
        """Whether a round ends with `step`."""
        return (step + 1) % self._cfg.inner_steps == 0

    def after(self, _: int) -> None:
        """End the round: exchange, outer step, new weights to the model. Collective."""
        self._dp.settle()
        self._wait()
        began = time.monotonic()
        self._payload_bytes = 0
        self._outer_step()
        self._dp.publish()
        self._wait()
        self._seconds.append(time.monotonic() - began)

    @torch.no_grad()
    def _outer_step(self) -> None:
        rate, beta = self._cfg.outer_lr, self._cfg.outer_momentum
        for name, weight in self._weights.items():
            anchor = self._anchor[name]
            mean = self._mean_weight(name, weight, anchor)
            new = torch.lerp(anchor, mean, rate)  # anchor - rate * (anchor - mean), and exactly `mean` for rate 1
            if beta:
                momentum = self._momentum[name].mul_(beta).add_(anchor - mean)
                new.sub_(momentum, alpha=rate * beta)
            weight.copy_(new)
            anchor.copy_(new)

    def _mean_weight(self, name: str, weight: Tensor, anchor: Tensor) -> Tensor:
        """Mean over islands of their weights, as far as compression lets it through; the same bits on every island."""
        if self._codec.lossless:
            return self._mean(self._gather(weight.reshape(-1).view(torch.uint8)), weight).view_as(weight)
        wanted = (anchor - weight).add_(self._error[name])  # what this island has not said yet
        payload = self._codec.encode(wanted.view(-1))
        said = self._codec.decode(payload, weight.numel(), weight.dtype).view_as(weight)
        self._error[name].copy_(wanted.sub_(said))
        return anchor - self._mean(self._gather(payload), weight).view_as(weight)

    def _gather(self, payload: Tensor) -> Tensor:
        """[islands, bytes] from every island's [bytes]."""
        self._payload_bytes += len(payload)
        every = payload.new_empty(self._islands.count, len(payload))
        if self._islands.count > 1:
            collectives.all_gather(every.view(-1), payload, group=self._islands.outer)
        else:
            every.copy_(payload)
        return every

    def _mean(self, payloads: Tensor, like: Tensor) -> Tensor:
        """Mean of the decoded payloads, added in island order."""
        total = self._codec.decode(payloads[0], like.numel(), like.dtype).clone()
        for payload in payloads[1:]:
            total += self._codec.decode(payload, like.numel(), like.dtype)
        return total.div_(len(payloads))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def state_dict(self) -> dict[str, Tensor]:
        """Live tensors: anchor, error feedback and momentum."""
        parts = {"anchor": self._anchor, "error": self._error, "momentum": self._momentum}
        return {f"{kind}/{name}": t for kind, part in parts.items() for name, t in part.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the weights that are there."""
        for name, weight in self._weights.items():
            self._anchor[name].copy_(weight)
        for part in (self._error, self._momentum):
            for tensor in part.values():
                tensor.zero_()
        self._seconds.clear()

    def report(self) -> dict[str, Any]:
        """Volume of one round for this rank in bytes, compression ratio, and the seconds that ends of rounds took."""
        raw = sum(t.nbytes for t in self._weights.values())
        return {
            "islands": self._islands.count,
            "inner_steps": self._cfg.inner_steps,
            "rounds": len(self._seconds),
            "raw_bytes": raw,
            "payload_bytes": self._payload_bytes,
            "sent_bytes": self._payload_bytes * (self._islands.count - 1),
            "compression_ratio": raw / self._payload_bytes if self._payload_bytes else None,
            "seconds": list(self._seconds),
        }

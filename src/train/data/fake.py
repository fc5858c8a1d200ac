"""data=fake: random tokens that already lie on the device, for measuring throughput without an input pipeline."""

import torch

from train import seeds

POOL = 4  # batches that are taken in turn


class Fake:
    """A pool of random batches. A rank makes the rows it asks for at their first use (in the first POOL steps, which are
    warm-up) and gets the same tensors after that: no host work and no copy in a step."""

    def __init__(self, vocab: int, seq_len: int, seed: int, device: torch.device) -> None:
        self.vocab, self.seq_len, self.seed, self.device = vocab, seq_len, seed, device
        self._made: dict[tuple[int, int, int], torch.Tensor] = {}

    def batch(self, step: int, start: int, count: int) -> torch.Tensor:
        """Rows start .. start+count of step's global batch: [count, seq_len + 1] int64 on the device.

        A pure function of (seed, step, row). The tensor is handed out again in later steps: don't write to it.
        """
        key = (step % POOL, start, count)
        if key not in self._made:
            rows = [self._row(key[0], row) for row in range(start, start + count)]
            self._made[key] = torch.stack(rows).to(self.device)
        return self._made[key]

    def _row(self, index: int, row: int) -> torch.Tensor:
        # drawn on the CPU, so that every device trains on the same tokens
        generator = torch.Generator().manual_seed(seeds.derive(self.seed, "fake", index, row))
        return torch.randint(self.vocab, (self.seq_len + 1,), generator=generator)

"""Seeds that depend on names only: never on the layout, the world size or Python's own hash."""

import hashlib


def derive(*parts: object) -> int:
    """A seed in [0, 2**63) from the parts' text, e.g. derive(seed, "layers.0.attention.wq.weight")."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch.Generator takes 64 bits, numpy no sign

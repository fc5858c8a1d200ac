"""A copy of the code that a sweep runs, so that editing the checkout meanwhile changes nothing."""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from train.sweep.store import PACKAGE


def files() -> list[Path]:
    """The package's own files, sorted."""
    return sorted(
        p
        for p in PACKAGE.rglob("*")
        if p.is_file() and p.suffix in (".py", ".json", ".j2") and "__pycache__" not in p.parts
    )


def code_hash() -> str:
    """sha256 over names and bytes of src/train."""
    h = hashlib.sha256()
    for p in files():
        h.update(f"{p.relative_to(PACKAGE)}\0".encode() + p.read_bytes() + b"\0")
    return h.hexdigest()


def take(state: Path, digest: str) -> Path:
    """Copy the code to .sweep/code-<hash8>/train unless it is there; the folder for PYTHONPATH."""
    target = state / f"code-{digest[:8]}"
    if not target.exists():
        temp = Path(tempfile.mkdtemp(dir=state, prefix=".code-"))
        for p in files():
            copy = temp / "train" / p.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(p, copy)
        temp.chmod(0o755)
        temp.rename(target)
    return target


def commit() -> tuple[str, str]:
    """(commit, 12 hex digits of the uncommitted changes' hash or "") of the checkout; empty strings outside git."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), *args], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout

    try:
        if not git("ls-files", "--", str(PACKAGE / "config.py")):
            return "", ""  # installed below somebody else's repository
        head = git("rev-parse", "HEAD").strip()
        diff = git("diff", "HEAD", "--", str(PACKAGE)) + git("status", "--porcelain", "--", str(PACKAGE))
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return head, hashlib.sha256(diff.encode()).hexdigest()[:12] if diff else ""

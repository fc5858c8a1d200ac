"""replay=true: the same steps twice in these processes and once in fresh ones, compared bit for bit.

`leaves` hashes what a rank holds after a step, `prints` fingerprints gradients inside it, `passes` runs the passes and
`compare` (no torch) finds the first difference. See docs/replay.md.
"""

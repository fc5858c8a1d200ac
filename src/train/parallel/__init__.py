"""Data parallelism: `build.build` makes the reduction that a configuration names; `mesh` (no torch) checks its degrees."""

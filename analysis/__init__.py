"""From run folders to tables, plots and a report: `python -m analysis --help`.

Pure functions over files. This package never imports the trainer or torch, so a report can be rebuilt on any machine,
months later, from the folders alone and byte for byte.
"""

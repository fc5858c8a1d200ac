"""Commands of `python -m analysis` in this process."""

from analysis.__main__ import main


def run(capsys, *args):
    """(exit code, lines of stdout, stderr) of one command, in this process."""
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out.splitlines(), out.err

"""`python -m analysis COMMAND`: tables, reports and comparisons from run folders."""

import argparse
import os
import sys
from pathlib import Path

from analysis.errors import BadInput
from analysis.text import FORMATS

EXAMPLES = """examples:
  python -m analysis report outputs/my-sweep                    write report.html, report.md, summary.csv, plots/
  python -m analysis table outputs/my-sweep --by reduction      the best point of each reduction
  python -m analysis table outputs/* --where 'micro_batch>=8,status=ok' --sort mfu --format md
  python -m analysis table outputs/my-sweep --pivot micro_batch,reduction
  python -m analysis baseline outputs/my-sweep > base.json
  python -m analysis compare base.json outputs/new --tolerance 0.03

`python -m analysis COMMAND --help` lists a command's options; docs/analysis.md explains every number.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0 on success, 1 where `compare` finds a regression, 2 for bad input."""
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BadInput as error:
        print(f"analysis: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that can't be read or written
        print(f"analysis: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """One line for bad usage, instead of argparse's usage text before it."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"analysis: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="python -m analysis", description=__doc__.partition(": ")[2], epilog=EXAMPLES, formatter_class=raw
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    table = commands.add_parser("table", help="ranked table, census and reasons")
    table.add_argument(
        "dir", nargs="+", type=Path, help="sweeps, folders of sweeps, metrics.jsonl or CSV of other systems"
    )
    table.add_argument("--by", metavar="COLUMNS", help="only the best row of each value of these columns")
    table.add_argument(
        "--sort", metavar="COLUMN", default="tokens_per_s", help="column that ranks (default: %(default)s)"
    )
    table.add_argument(
        "--where", metavar="CONDITIONS", help="as in 'micro_batch>=8,reduction=zero2|zero2o,model~llama'"
    )
    table.add_argument("--columns", metavar="NAMES", help="columns to show, separated by commas")
    table.add_argument("--pivot", metavar="ROWS,COLUMNS", help="two knobs as a grid of the column that ranks")
    table.add_argument("--format", choices=FORMATS, default="text")
    table.set_defaults(run=_table)

    report = commands.add_parser("report", help="page, Markdown, CSV, parquet and plots")
    report.add_argument("dir", nargs="+", type=Path)
    report.add_argument("--out", type=Path, help="folder to write to (default: the sweep's own)")
    report.set_defaults(run=_report)

    plot = commands.add_parser("plot", help="one plot against any knob")
    plot.add_argument("dir", nargs="+", type=Path)
    plot.add_argument("--x", required=True, metavar="KNOB")
    plot.add_argument("--y", default="tokens_per_s", metavar="COLUMN", help="result column (default: %(default)s)")
    plot.add_argument("--where", metavar="CONDITIONS")
    plot.add_argument("--out", type=Path, required=True, help="file ending in .svg or .png")
    plot.set_defaults(run=_plot)

    kernels = commands.add_parser("kernels", help="a profiled step's time by kernel family (profile=true)")
    kernels.add_argument("dir", nargs="+", type=Path)
    kernels.add_argument("--rank", type=int, default=0, help="whose trace (default: %(default)s)")
    kernels.add_argument("--format", choices=FORMATS, default="text")
    kernels.set_defaults(run=_kernels)

    compare = commands.add_parser("compare", help="two sweeps or baselines; exit code 1 on a regression")
    compare.add_argument("a", type=Path, help="what was: a sweep or a baseline file")
    compare.add_argument("b", type=Path, help="what is now")
    compare.add_argument(
        "--tolerance", type=_share, default=0.02, help="share of tokens/s to lose (default: %(default)s)"
    )
    compare.add_argument("--format", choices=("text", "md"), default="text")
    compare.set_defaults(run=_compare)

    baseline = commands.add_parser("baseline", help="a sweep as a small JSON file for the repository")
    baseline.add_argument("dir", type=Path)
    baseline.set_defaults(run=_baseline)

    ls = commands.add_parser("ls", help="sweeps with their census")
    ls.add_argument("dir", nargs="?", type=Path, default=Path("outputs"), help="(default: %(default)s)")
    ls.set_defaults(run=_ls)

    watch = commands.add_parser("watch", help="a sweep live, from its files")
    watch.add_argument("dir", type=Path)
    watch.add_argument("--interval", type=_seconds, default=2.0, help="seconds between looks (default: %(default)s)")
    watch.add_argument("--once", action="store_true", help="print one snapshot and end")
    watch.set_defaults(run=_watch)

    reference = commands.add_parser("reference", help="published results under one convention")
    reference.add_argument("--where", metavar="CONDITIONS", help="as in 'gpu~H100,model~8B'")
    reference.add_argument("--format", choices=FORMATS, default="text")
    reference.set_defaults(run=_reference)
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 up to 1, not {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0.05 to 3600 seconds, not {text}")
    return value


def _table(args: argparse.Namespace) -> int:
    from analysis.table import render

    text = render(
        args.dir, by=args.by, sort=args.sort, where=args.where, columns=args.columns, pivot=args.pivot, form=args.format
    )
    print(text, end="")
    return 0


def _report(args: argparse.Namespace) -> int:
    from analysis.report import write_report

    print(write_report(args.dir, args.out))
    return 0


def _plot(args: argparse.Namespace) -> int:
    from analysis.report import write_plot

    print(write_plot(args.dir, args.x, args.y, args.where, args.out))
    return 0


def _kernels(args: argparse.Namespace) -> int:
    from analysis.kernels import render

    print(render(args.dir, args.rank, args.format), end="")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from analysis.compare import compare, read, render

    result = compare(read(args.a), read(args.b), args.tolerance)
    print(render(result, args.format), end="")
    return 1 if result.regressions else 0


def _baseline(args: argparse.Namespace) -> int:
    from analysis.compare import read, to_json

    print(to_json(read(args.dir)), end="")
    return 0


def _ls(args: argparse.Namespace) -> int:
    from analysis.listing import render

    print(render(args.dir), end="")
    return 0


def _watch(args: argparse.Namespace) -> int:
    from analysis.scan import find_sweeps
    from analysis.watch import watch

    sweeps = find_sweeps(args.dir)
    if len(sweeps) > 1:
        raise BadInput(
            f"{args.dir} holds {len(sweeps)} sweeps; watch one of them: {', '.join(s.name for s in sweeps[:5])}"
        )
    return watch(sweeps[0].path, args.interval, args.once)


def _reference(args: argparse.Namespace) -> int:
    from analysis.published import render

    print(render(args.where, args.format), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

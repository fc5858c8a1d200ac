"""`python -m analysis COMMAND`: tables, reports and comparisons from run folders."""

import argparse
import sys
from pathlib import Path

from analysis.errors import BadInput
from analysis.text import FORMATS

EXAMPLES = """examples:
  python -m analysis table outputs/my-sweep --by reduction
  python -m analysis table outputs/my-sweep --where 'micro_batch>=8,status=ok' --sort mfu --format md
  python -m analysis report outputs/my-sweep
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0 on success, 1 where `compare` finds a regression, 2 for bad input."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BadInput as error:
        print(f"analysis: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` closed the pipe
        sys.stdout = None  # type: ignore[assignment]
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    table = commands.add_parser("table", help="ranked table, census and reasons")
    table.add_argument("dir", nargs="+", type=Path)
    table.add_argument("--by", metavar="COLUMNS")
    table.add_argument("--sort", metavar="COLUMN", default="tokens_per_s")
    table.add_argument("--where", metavar="CONDITIONS")
    table.add_argument("--columns", metavar="NAMES")
    table.add_argument("--format", choices=FORMATS, default="text")
    table.set_defaults(run=_table)
    report = commands.add_parser("report", help="report.html, report.md, summary.csv and plots in the sweep's folder")
    report.add_argument("dir", type=Path)
    report.set_defaults(run=_report)
    return parser


def _table(args: argparse.Namespace) -> int:
    from analysis.table import render

    print(render(args.dir, by=args.by, sort=args.sort, where=args.where, columns=args.columns, form=args.format), end="")
    return 0


def _report(args: argparse.Namespace) -> int:
    from analysis.report import write_report

    print(write_report(args.dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())

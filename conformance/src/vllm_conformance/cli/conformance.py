"""`vllm-core conformance run | verify | matrix | badge`.

Exit status of `run` and `verify`: 0 conformant, 1 not (or not to be believed), 2 could not be started, 3 incomplete.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_conformance.report import Report
    from vllm_conformance.verdict import Row

Subparsers = Any
REPORT = "conformance.json"
JUNIT = "junit.xml"


def add_parser(subparsers: Subparsers) -> None:
    """Add `conformance` and its commands."""
    parser = subparsers.add_parser("conformance", help="prove what a hardware package claims")
    commands = parser.add_subparsers(dest="conformance_command", metavar="COMMAND", required=True)
    _add_run(commands)
    verify = commands.add_parser("verify", help="recompute the result of a report, and run rows of it again")
    verify.add_argument("file", type=Path, metavar="FILE", help="a conformance.json")
    verify.add_argument("--rerun", type=int, default=0, metavar="N", help="run N random rows again here and compare")
    verify.add_argument("--seed", type=int, metavar="N", help="which rows: the same number picks the same ones")
    verify.set_defaults(func=run_verify)
    matrix = commands.add_parser("matrix", help="the support matrix of some reports")
    matrix.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a conformance.json")
    matrix.add_argument("--readme", type=Path, metavar="FILE", help="a text whose table to replace; default: print it")
    matrix.add_argument("--html", type=Path, metavar="FILE", help="also write a page that needs nothing else")
    matrix.set_defaults(func=run_matrix)
    badge = commands.add_parser("badge", help="a badge of a report, as SVG")
    badge.add_argument("file", type=Path, metavar="FILE", help="a conformance.json")
    badge.add_argument("--out", type=Path, default=Path("conformance.svg"), metavar="FILE", help="where to write it")
    badge.set_defaults(func=run_badge)


def _add_run(commands: Subparsers) -> None:
    run = commands.add_parser("run", help=f"run the suite and write {REPORT} and {JUNIT}")
    run.add_argument("--platform", required=True, metavar="NAME", help="an installed platform, or its distribution")
    run.add_argument("--level", type=int, choices=range(6), default=5, metavar="N", help="highest level to run, 0 to 5")
    run.add_argument("--subset", choices=("ci",), help="a fixed part of the cases; proves no level")
    run.add_argument("--device", metavar="ID", help="id of the device to test; default: the first")
    run.add_argument("--jobs", type=int, choices=range(1, 65), default=2, metavar="N", help="child processes at a time")
    run.add_argument("--waivers", type=Path, metavar="FILE", help="waivers.toml")
    run.add_argument("--out", type=Path, default=Path("conformance-report"), metavar="DIR", help="folder of the report")
    run.add_argument(
        "-k", dest="only", action="append", default=[], metavar="PATTERN", help="only cases with such ids: never complete"
    )
    run.add_argument(
        "--deny-provider", action="append", default=[], metavar="NAME", help="judge without this provider; the report says so"
    )
    run.add_argument("--maxfail", type=int, metavar="N", help="stop after N bad rows: then not complete")
    run.set_defaults(func=run_suite)


def run_suite(args: argparse.Namespace) -> int:
    """Run, write the report, print the table."""
    from rich.console import Console

    from vllm_conformance.junit import write_junit
    from vllm_conformance.options import RunOptions
    from vllm_conformance.report import write_report
    from vllm_conformance.run import run
    from vllm_conformance.subject import DENY
    from vllm_conformance.table import to_table
    from vllm_conformance.verdict import EXIT_STATUS, GOOD, JUDGED_LEVELS
    from vllm_conformance.waivers import read_waivers

    console = Console()

    def progress(row: Row) -> None:
        if row.outcome not in GOOD:
            print(f"{row.outcome} {row.id}: {row.detail.partition(chr(10))[0]}", flush=True)

    options = RunOptions(
        platform=args.platform,
        level=args.level,
        subset=args.subset,
        device=args.device,
        jobs=args.jobs,
        only=tuple(args.only),
        maxfail=args.maxfail,
        waivers=read_waivers(args.waivers) if args.waivers else (),
        options={DENY: args.deny_provider} if args.deny_provider else {},
    )
    report = run(options, progress=progress)
    write_report(report, args.out / REPORT)
    write_junit(report, args.out / JUNIT)
    console.print(to_table(report))
    print(f"written to {args.out / REPORT}")
    ran = [row for row in report.rows if row.outcome != "NOT_RUN" and row.level in JUDGED_LEVELS]
    bad = sum(row.verdict not in GOOD for row in ran)
    if args.only:
        print(f"cases chosen: {len(ran) - bad} good, {bad} bad")
    return EXIT_STATUS["NOT_CONFORMANT"] if bad else EXIT_STATUS[report.result]


def run_verify(args: argparse.Namespace) -> int:
    """Print the recomputed result and what speaks against it."""
    from vllm_conformance.report import read_report
    from vllm_conformance.verify import VERIFY_STATUS, rerun, verify

    report = read_report(args.file)
    found = rerun(report, args.rerun, seed=args.seed) if args.rerun else verify(report)
    for problem in found.problems:
        print(f"{problem.kind}: {problem.text}")
    if found.repeated:
        print(f"{len(found.repeated)} rows were run again here")
    elif not found.problems:
        print("its rows were not run again: this excludes accidents, not intent (--rerun N)")
    print(f"{found.result}: {_subject(report)}" + (f", level L{found.reached}" if found.reached >= 0 else ""))
    return VERIFY_STATUS[found.result]


def _subject(report: Report) -> str:
    where = report.devices[0].name if report.devices else "no device"
    subset = f", subset {report.subset}" if report.subset else ""
    return f"{report.platform.distribution} {report.versions.plugin} on {where}{subset}"


def run_matrix(args: argparse.Namespace) -> int:
    """Write or print the table of reports that can be believed. Raises ConfigError."""
    from vllm_conformance.matrix import matrix, write_into
    from vllm_conformance.page import to_html
    from vllm_conformance.report import read_report

    reports = [read_report(path) for path in args.files]
    if args.html is not None:
        args.html.write_text(to_html(reports), encoding="utf-8")
    if args.readme is not None:
        write_into(args.readme, matrix(reports))
    elif args.html is None:
        print(matrix(reports))
    return 0


def run_badge(args: argparse.Namespace) -> int:
    """Write the badge. Raises ConfigError for a subset."""
    from vllm_conformance.badge import badge
    from vllm_conformance.report import read_report

    args.out.write_text(badge(read_report(args.file)), encoding="utf-8")
    return 0

"""A pytest plugin: work that is skipped, or expected to fail, without a reason fails the run.

A suite that skips in silence proves less than it prints. Every way to leave work out has a place for a sentence:
`skip(reason=...)`, `skipif(..., reason=...)`, `xfail(reason=...)`, `pytest.skip("...")`, `pytest.xfail("...")`.
"""

from collections.abc import Generator

import pytest

LEFT_OUT = ("skip", "skipif", "xfail")
FORGOTTEN = "left out without a reason: say why in {}(reason=...)"


def has_reason(mark: pytest.Mark) -> bool:
    """Whether the mark says why; only a `skip` takes the sentence as its first argument, too."""
    reason = mark.kwargs.get("reason") or (mark.args[0] if mark.name == "skip" and mark.args else "")
    return bool(str(reason).strip())


def forgotten_reason(item: pytest.Item) -> str | None:
    """The complaint about the first mark without a reason, if there is one."""
    return next(
        (FORGOTTEN.format(mark.name) for name in LEFT_OUT for mark in item.iter_markers(name) if not has_reason(mark)),
        None,
    )


def skipped_silently(report: pytest.TestReport | pytest.CollectReport) -> bool:
    """Whether the report is of a skip or an xfail at run time that came with no sentence."""
    if not report.skipped:
        return False
    if hasattr(report, "wasxfail"):
        return not report.wasxfail.removeprefix("reason:").strip()
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return not reason.removeprefix("Skipped").removeprefix(":").strip()


def fail(report: pytest.TestReport | pytest.CollectReport, complaint: str) -> None:
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {complaint}"
    vars(report).pop("wasxfail", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    complaint = forgotten_reason(item)
    if complaint and report.when == "setup":
        fail(report, complaint)
    elif skipped_silently(report):
        fail(report, FORGOTTEN.format("skip"))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if skipped_silently(report):
        fail(report, FORGOTTEN.format("skip"))
    return report

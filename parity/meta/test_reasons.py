"""Skipped work fails the run unless it carries a reason."""

import pytest

SILENT = {
    "skip mark": "@pytest.mark.skip\ndef test_it(): pass",
    "blank skip mark": "@pytest.mark.skip(reason=' ')\ndef test_it(): pass",
    "skipif without a sentence": "@pytest.mark.skipif('True')\ndef test_it(): pass",
    "xfail mark": "@pytest.mark.xfail\ndef test_it(): assert False",
    "xfail on a condition": "@pytest.mark.xfail(True, reason='')\ndef test_it(): assert False",
    "class": "@pytest.mark.skip\nclass TestIt:\n    def test_it(self): pass",
    "parameter": "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.skip)])\ndef test_it(x): pass",
    "call of skip": "def test_it(): pytest.skip('')",
    "call of xfail": "def test_it(): pytest.xfail('')",
    "module": "pytest.skip('', allow_module_level=True)",
}
SPOKEN = {
    "skip mark": "@pytest.mark.skip(reason='no such layer')\ndef test_it(): pass",
    "skip mark, by position": "@pytest.mark.skip('no such layer')\ndef test_it(): pass",
    "skipif": "@pytest.mark.skipif(True, reason='no such layer')\ndef test_it(): pass",
    "xfail mark": "@pytest.mark.xfail(reason='the reference is wrong')\ndef test_it(): assert False",
    "call of skip": "def test_it(): pytest.skip('no such layer')",
    "call of xfail": "def test_it(): pytest.xfail('the reference is wrong')",
    "module": "pytest.skip('no such layer', allow_module_level=True)",
    "missing package": "pytest.importorskip('no_such_package')",
}


def exit_code(pytester: pytest.Pytester, source: str) -> int:
    pytester.makepyfile("import pytest\ndef test_other(): pass\n" + source)
    return int(pytester.runpytest_inprocess("-p", "parity.meta.reasons", "-p", "no:cacheprovider").ret)


@pytest.mark.parametrize("source", SILENT.values(), ids=SILENT)
def test_silence_fails_the_run(pytester: pytest.Pytester, source: str) -> None:
    assert exit_code(pytester, source) in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)


@pytest.mark.parametrize("source", SPOKEN.values(), ids=SPOKEN)
def test_a_reason_is_enough(pytester: pytest.Pytester, source: str) -> None:
    assert exit_code(pytester, source) in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

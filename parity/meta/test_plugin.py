"""In somebody's own repository the pytest plugin makes tests of their layer, which fail as the command line does."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = """
import parity
from parity.meta.stranger import Coarse, Right

reference = parity.against("llama:LlamaAttention", configurations=1, scenario="prefill")
test_right = reference.check(Right)
test_coarse = reference.check(Coarse)

def test_by_hand(parity_against):
    parity_against("llama:LlamaAttention", configurations=1, scenario="prefill").hold(Right)
"""


@pytest.fixture
def repository(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\naddopts = --strict-markers\nfilterwarnings = error")
    pytester.makepyfile(TESTS)
    return pytester


def test_every_property_and_dtype_is_a_test(repository):
    result = repository.runpytest_inprocess("-p", "parity.plugin", "--collect-only", "-q", "-m", "parity")
    result.stdout.fnmatch_lines(["*::test_right[[]forward-float64]", "*::test_coarse[[]gradients-bfloat16]"])


def test_a_failure_looks_as_on_the_command_line(repository):
    result = repository.runpytest_inprocess("-p", "parity.plugin", "--parity-dtype", "bfloat16")
    result.assert_outcomes(passed=4, failed=1, deselected=12)
    result.stdout.fnmatch_lines(["Coarse / llama:LlamaAttention   precision differs *", "  what      softmax is *"])
    result.stdout.no_fnmatch_line("*Error*")


def test_a_start_of_pytest_that_does_not_use_it_imports_nothing_large():
    program = (
        "import sys, parity.plugin; print(*sorted({'torch', 'transformers', 'hypothesis', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []

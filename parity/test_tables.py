"""Rotary tables agree from position 0 to 131,072, and do not remember a long prompt when a short one follows."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("tables")


def test_tables_agree_near_far_and_near_again(row: Row) -> None:
    row.holds()

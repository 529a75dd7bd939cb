"""Greedy generation gives the reference's tokens, with and without a cache, for one row and for a padded batch."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("generation")


def test_generates_the_tokens_of_the_reference(row: Row) -> None:
    row.holds()

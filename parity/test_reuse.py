"""A cache that was cropped, reordered or reset goes on as the reference's does, and a new one begins anew."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("reuse")


def test_a_cache_goes_on_after_what_was_done_to_it(row: Row) -> None:
    row.holds()

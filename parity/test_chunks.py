"""Any split of a sequence into chunks, prefill or decode, gives the full forward's result and leaves its cache."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("chunks")


def test_the_split_into_chunks_does_not_matter(row: Row) -> None:
    row.holds()

"""A layer computes what its reference computes, whatever the split into chunks, the padding and the positions.

Outputs and the cache after every step; in float64 against the truth, below it within the reference's own error.
Delicate operations run no coarser than the reference's, and nothing that the layer was called with is changed.
"""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("forward")


def test_computes_what_the_reference_computes(row: Row) -> None:
    row.holds()

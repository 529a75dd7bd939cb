"""The gradients of the input and of every parameter are the reference's; one that is missing counts as zero."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("gradients")


def test_has_the_gradients_of_the_reference(row: Row) -> None:
    row.holds()

"""What does not concern a token changes nothing: padding, the other rows, their order, other documents, the future."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("rows")


def test_what_does_not_concern_a_token_changes_nothing(row: Row) -> None:
    row.holds()

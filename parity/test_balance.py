"""Router logits are the reference's, and the load-balancing loss of them is, with and without padding."""

import pytest

from parity.property import find
from parity.rows import Row

pytestmark = pytest.mark.parity
PROPERTY = find("balance")


def test_has_the_router_logits_and_the_loss_of_the_reference(row: Row) -> None:
    row.holds()

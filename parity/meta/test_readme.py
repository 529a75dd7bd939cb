"""The README's generated parts are what the registry says."""

import pytest

from parity.readme import BLOCKS, README, rendered


def test_the_generated_blocks_are_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert rendered(text) == text, "run `make readme`"


@pytest.mark.parametrize("name", BLOCKS)
def test_a_missing_block_is_noticed(name: str) -> None:
    text = README.read_text(encoding="utf-8").replace(f"<!-- generated: {name} -->", "")
    with pytest.raises(ValueError, match=name):
        rendered(text)

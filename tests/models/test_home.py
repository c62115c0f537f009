"""What a folder of a model may be called."""

from __future__ import annotations

import pytest
from floe_chat.models.paths import is_folder_name


@pytest.mark.parametrize("name", ["tiny", "mixtral-8x7b_3.4", "größer", "a" * 120])
def test_names_of_folders(name: str) -> None:
    assert is_folder_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/", "-rf", ".hidden", "a b", "a\0", "a" * 121, 5]
)
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_folder_name(name)

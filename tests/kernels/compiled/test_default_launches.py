"""The launches of cards that nobody has measured, as docs/kernels.md has them."""

from __future__ import annotations

from pathlib import Path

from default_launches import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"


def test_the_page_says_how_cards_are_launched_by_default() -> None:
    assert "\n".join(table()) in PAGE.read_text()

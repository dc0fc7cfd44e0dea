"""External links are well formed; the site's build checks internal ones."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from tests.docs.blocks import REPOSITORY, pages

OUTSIDE = [REPOSITORY / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
LINKS = sorted({link for page in (*pages(), *OUTSIDE) for link in re.findall(r"\]\((\w+:[^)]*)\)", page.read_text())})


@pytest.mark.parametrize("link", LINKS)
def test_a_link_is_the_address_of_a_page(link: str) -> None:
    parts = urlsplit(link)
    assert parts.scheme == "https", link
    assert re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.netloc), link
    assert not re.search(r"\s", link), link

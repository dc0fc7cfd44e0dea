"""Messages in docs/troubleshooting.md match the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.blocks import REPOSITORY, blocks

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
COMPARED = {block.says for block in blocks(PAGE)}  # test_commands compares these with a command's output
SHOWN = [text for text in re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S) if text not in COMPARED]
_LEAST = 14  # minimum number of a message's characters that are fixed in the code


def texts() -> Iterator[list[str]]:
    """Yield every string of the framework and of plugins, split at the placeholders."""
    for path in (path for folder in ("framework", "plugins") for path in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                filled = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                yield "".join(map(str, filled)).split("\0")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.split(r"%[sd]", node.value)  # as logging fills it in


@pytest.fixture(scope="module")
def patterns() -> list[re.Pattern[str]]:
    long = [parts for parts in texts() if sum(map(len, parts)) >= _LEAST]
    return [re.compile(".*".join(map(re.escape, parts)), re.S) for parts in long]


@pytest.mark.parametrize("shown", SHOWN, ids=[text.strip()[:40] for text in SHOWN])
def test_a_documented_message_is_one_that_the_code_prints(shown: str, patterns: list[re.Pattern[str]]) -> None:
    assert any(pattern.fullmatch(shown.strip().removeprefix("warning: ")) for pattern in patterns), shown

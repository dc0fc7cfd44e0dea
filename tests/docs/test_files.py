"""Files shown in the documentation are pasted whole, as a reader would, and have the documented effect."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from tests.docs.blocks import REPOSITORY, files, pages
from worldsize.config.compose import compose_and_call

FENCE = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```", re.M | re.S)
TEMPLATES = sorted((REPOSITORY / "framework/worldsize/cli/templates").rglob("*.j2"))
NAME = r"# ?[\w./]+\.(?:py|ya?ml|toml)\b[^\n]*\n"
CONFIGURATIONS = [
    pytest.param(page, name, id=f"{page.name}:{name}")
    for page in pages()
    for name in files(page)
    if re.search(r"(^|/)conf/\w+/\w+\.yaml$", name)
]


@pytest.mark.parametrize("page", pages(), ids=str)
def test_the_name_of_a_file_stands_outside_of_its_block(page: Path) -> None:
    shown = [match["text"] for match in FENCE.finditer(page.read_text())]
    assert [text for text in shown if re.match(NAME, text)] == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_the_header_of_a_template_is_its_first_line(template: Path) -> None:
    text = template.read_text()
    assert not re.match(NAME, text)
    assert "@package" not in text or text.startswith("# @package ")


def test_there_are_configurations_to_paste() -> None:
    shown = {each.values[1] for each in CONFIGURATIONS}
    assert {"recipes/sine/conf/recipe/sine.yaml", "conf/experiment/wide.yaml"} <= shown


@pytest.mark.parametrize(("page", "name"), CONFIGURATIONS)
def test_a_configuration_is_composed_as_it_stands(
    page: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for path, text in files(page).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    composed: list[DictConfig] = []
    with caplog.at_level(logging.WARNING, logger="worldsize"):
        compose_and_call(composed.append, [f"+{Path(name).parent.name}={Path(name).stem}"])
    assert caplog.messages == []
    (cfg,) = composed
    text = (tmp_path / name).read_text()
    keys = re.findall(r"^(\w+):", text, re.M)
    package = cfg if text.startswith("# @package _global_\n") else cfg[Path(name).parent.name]
    assert {key for key in keys if key != "defaults"} <= {str(key) for key in package}

"""The language model is causal, its rotary embeddings are exact, and bits per byte match a count by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.stdlib_lm.corpus import Windows, find_modules, is_test, read_split
from recipes.stdlib_lm.gpt import GPT, Sizes, rotate_pairs, rotations
from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.core import ConfigError
from worldsize.data.sources.documents import IGNORED

pytestmark = pytest.mark.heavy

SIZES = Sizes(width=16, depth=2, heads=2, context=12)


def test_train_and_test_files_are_disjoint_and_cover_the_library() -> None:
    names = list(find_modules())
    assert names == sorted(names)
    assert "os.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    share = sum(map(is_test, names)) / len(names)
    assert 0.05 < share < 0.15
    size = sum(path.stat().st_size + 1 for path in find_modules().values())
    assert len(read_split("train")) + len(read_split("test")) == size


def test_generated_and_installed_files_are_not_part_of_the_corpus(tmp_path: Path) -> None:
    kept, left = ["os.py", "json/encoder.py"], ["site-packages/a.py", "config-3.11-x86/b.py", "_sysconfigdata_x.py"]
    for name in [*kept, *left, "json/tests/c.py", "notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list(find_modules(tmp_path)) == sorted(kept)


def test_a_library_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.py files found"):
        find_modules(tmp_path)


def test_heads_that_do_not_divide_the_width_are_refused_before_a_model_is_built() -> None:
    with pytest.raises(ConfigError, match="multiple of 6"):
        StdlibLM(16, 1, 3, 10, 0.0, test_bytes=None, make_optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("length", [1, 11, 12, 13, 31, 36])
def test_every_byte_is_predicted_exactly_once(length: int) -> None:
    text = torch.arange(1, length + 1, dtype=torch.uint8)
    windows = Windows(text, context=12)
    inputs, targets = windows.load_batch(torch.arange(len(windows)))
    counted = targets != IGNORED
    assert targets[counted].tolist() == list(range(1, length + 1))
    assert inputs[counted].tolist() == list(range(length))


def test_training_windows_have_no_ignored_targets() -> None:
    windows = StdlibLM(16, 1, 2, 1000, 0.0, test_bytes=None, make_optimizer=torch.optim.AdamW).data("train")
    assert not (windows[len(windows) - 1][1] == IGNORED).any()


def test_bytes_in_bfloat16_are_rotated_by_exact_angles() -> None:
    x = torch.randn(1, 1, 300, 8).bfloat16()
    exact = rotate_pairs(x.float(), rotations(300, 8)).bfloat16()
    assert torch.equal(rotate_pairs(x, rotations(300, 8)), exact)


def test_a_batch_is_the_stack_of_its_items() -> None:
    windows = Windows(read_split("test", 1000), context=16)
    indices = torch.tensor([3, 0, len(windows) - 1])
    stacked = [torch.stack(part) for part in zip(*(windows[int(index)] for index in indices), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(windows.load_batch(indices), stacked, strict=True))


def test_a_later_byte_does_not_change_earlier_predictions() -> None:
    model = GPT(SIZES)
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_rotation_keeps_lengths_and_depends_on_the_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 20, 8)
    turned_query, turned_key = (rotate_pairs(x, rotations(20, 8)) for x in (query, key))
    assert torch.allclose(turned_query.norm(dim=-1), query.norm(dim=-1))
    products = (turned_query @ turned_key.transpose(-1, -2))[0, 0]
    for distance in (0, 3, 11):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)


def test_the_rotation_is_the_papers_complex_product() -> None:
    x = torch.randn(1, 1, 5, 6)
    theta = torch.tensor([10_000.0 ** (-2 * i / 6) for i in range(3)])
    angle = torch.arange(5)[:, None] * theta
    product = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(rotate_pairs(x, rotations(5, 6)), torch.cat([product.real, product.imag], dim=-1), atol=1e-5)


class Uniform(nn.Module):
    """A model that gives each byte the same probability, except byte 10: twice the probability."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        logits[..., 10] = math.log(2)
        return logits


def test_bits_per_byte_is_exact() -> None:
    recipe = StdlibLM(16, 1, 2, 10, 0.0, test_bytes=995, make_optimizer=torch.optim.AdamW)
    dataset = recipe.data("test")
    sums, count = recipe.evaluate(Uniform(), dataset.load_batch(torch.arange(len(dataset))))["bits_per_byte"]
    predicted = read_split("test", 995).tolist()
    newlines = predicted.count(10)
    expected = newlines * -math.log2(2 / 257) + (len(predicted) - newlines) * -math.log2(1 / 257)
    assert count == 995
    assert math.isclose(float(sums), expected, rel_tol=1e-6)


def test_training_compresses_better_than_guessing(train: Any) -> None:
    run = train("recipe=stdlib_lm", "steps=40", "recipe.width=64", "recipe.depth=2", "recipe.test_bytes=20000")
    assert run.code == 0, run.error
    assert run.json("result.json")["metrics"]["bits_per_byte"] < 5
    assert len(run.json("run_manifest.json")["data"]["files"]) > 300


def test_model_sizes_can_be_chosen_for_this_recipe_only(train: Any) -> None:
    shown = train("--cfg", "job", "recipe=stdlib_lm", "model=medium").output
    assert re.search(r"^recipe:\n  width: 1024\n  depth: 24\n", shown, re.MULTILINE)
    assert "unknown key 'recipe.depth'" in train("recipe=digits", "model=small").error

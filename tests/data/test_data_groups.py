"""Each option of the group ``data`` composes, names the arguments of its source, and refuses invalid values."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from worldsize.config.instantiate import Allowed, build_object
from worldsize.core import ConfigError
from worldsize.data.source import FileSource
from worldsize.data.storage.cache import Cache

FOLDER = Path(__file__).parents[2] / "conf" / "data"
FILES = ("arrow", "hf_dataset", "images", "jsonl", "parquet", "webdataset")


def composed(name: str, **changes: Any) -> Any:
    config = OmegaConf.merge(OmegaConf.load(FOLDER / f"{name}.yaml"), OmegaConf.create({"path": "x", **changes}))
    return OmegaConf.to_container(config, resolve=True)


def built(name: str, **changes: Any) -> FileSource:
    return build_object(composed(name, **changes), FileSource, allowed=Allowed(), key="data")  # type: ignore[type-abstract]


@pytest.mark.parametrize("name", FILES)
def test_an_option_has_all_arguments_of_its_source_with_their_defaults(name: str) -> None:
    source = built(name)
    defaults = vars(type(source)("x"))
    assert vars(source) == {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    assert source.cache == Cache()
    assert set(composed(name)) == {"_target_", *inspect.signature(type(source)).parameters}
    assert OmegaConf.is_missing(OmegaConf.load(FOLDER / f"{name}.yaml"), "path")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_error": "skp"}, "data.on_error='skp' is unknown; did you mean 'skip'. Available: skip, stop"),
        ({"cache": {"block": 10}}, "data.cache.block=10 must be between 4096 and .*; the unit is bytes"),
        ({"cache": {"capacity": -1}}, "data.cache.capacity=-1 must be 0 or more; the unit is bytes"),
        ({"path": "a\0b"}, "contains a NUL character"),
        ({"pth": "a"}, "unknown key 'data.pth'; did you mean 'path'"),
    ],
)
def test_what_an_argument_cannot_be_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(name, **change)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "webdataset",
            {"decode": ["txt", "jpgg"]},
            r"data.decode=.* unknown extension 'jpgg'; did you mean 'jpg'",
        ),
        ("webdataset", {"decode": "txt"}, "data.decode='txt' has the wrong type"),
        ("parquet", {"format": "torch"}, "data.format='torch' is unknown. Available: numpy, python"),
        ("arrow", {"keep": -1}, "data.keep=-1 must be 0 or more"),
        ("jsonl", {"columns": "id"}, "data.columns='id' has the wrong type"),
        ("images", {"transform": "x"}, "data.transform='x' has the wrong type"),
        ("images", {"transform": {"_target_": "os.remove", "_partial_": True}}, "outside the allow-list"),
    ],
)
def test_what_an_option_of_one_source_cannot_be_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(name, **change)


def test_a_list_of_paths_is_taken_and_a_folder_is_one_path() -> None:
    assert built("jsonl", path=["a", "b"]).path == ["a", "b"]
    for name in ("images", "hf_dataset"):
        with pytest.raises(ConfigError, match=r"data.path must be a single folder .*, got \['a', 'b'\]"):
            len(built(name, path=["a", "b"]))


def test_a_recipe_that_takes_no_source_says_so(train: Any) -> None:
    run = train("data=jsonl", "data.path=x")
    assert run.code == 2
    assert "data=... is not supported with this recipe. To support it, add a line such as" in run.error

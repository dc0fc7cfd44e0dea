"""Exports what transformers needs besides a model's weights: its configuration, and the recipe's tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from worldsize.checkpoint.weights import Weights
from worldsize.config.recorded import read_recipe
from worldsize.core import Recipe
from worldsize.errors import WorldsizeError, missing_extra
from worldsize.record.run_record import RunView
from worldsize.train.initial_weights import built_empty, tied_names


@final
@dataclass(frozen=True)
class TransformersModel:
    """A recipe whose model is one of transformers.

    Attributes:
        recipe: The recipe of the run.
        model: Its model, with weights on the meta device.
    """

    recipe: Recipe
    model: Any

    def without(self) -> Sequence[str]:
        """Return the names of tied weights to leave out; transformers ties them again when it loads the model."""
        return [name for name, first in tied_names(self.model).items() if name != first]

    def save(self, folder: Path, weights: Weights) -> None:
        """Write the configuration, and other files that belong to the weights, to ``folder``."""
        dtypes = {entry.dtype for entry in weights.entries.values() if entry.dtype.is_floating_point}
        dtype = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
        self.model.config.update({"architectures": [type(self.model).__name__], **dtype})
        self.model.config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)
        try:
            self.recipe.save_assets(folder)
        except OSError as error:
            if error.filename is not None or error.errno is not None:
                raise
            raise WorldsizeError(  # transformers raises OSError without a file name if it finds no tokenizer
                f"{type(self.recipe).__name__}.save_assets, which adds the tokenizer, failed: {error}. "
                "Bring the file back that the recipe names, or export with --format safetensors."
            ) from error


def transformers_model(run: RunView, weights: Weights) -> TransformersModel:
    """Build the model of a run's recipe, by running the recipe's code.

    Raises:
        WorldsizeError: the run is another user's, transformers is not installed, or the model is not a model of
            transformers.
    """
    if not run.is_own:
        raise WorldsizeError(
            "--format hf runs the recipe's code, and this record was not written by you. Export with --format "
            "safetensors, which runs nothing, or `worldsize reproduce` the run and export your own."
        )
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao, which it imports, warns of itself
    try:
        import transformers
    except ImportError:
        raise missing_extra("--format hf", package="transformers", extra="recipes") from None
    recipe = read_recipe(run)
    model = built_empty(recipe)
    if not isinstance(model, transformers.PreTrainedModel):
        raise WorldsizeError(
            f"{type(recipe).__name__} trains a {type(model).__name__}, which is not a model of transformers. "
            "Export with --format safetensors or torch."
        )
    if strange := sorted(weights.entries.keys() ^ model.state_dict().keys()):
        raise WorldsizeError(f"the recipe's model is not the one that was saved: only one of them has {strange[0]}.")
    return TransformersModel(recipe, model)

"""Exports the configuration and the tokenizer of a transformers model alongside its weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from worldsize.checkpoint.weights import Weights
from worldsize.config.recorded import read_recipe
from worldsize.core import Recipe
from worldsize.errors import WorldsizeError, require
from worldsize.loop.initial_weights import build_empty_model, tied_names
from worldsize.record.run_record import RunView


@final
@dataclass(frozen=True)
class TransformersModel:
    """A recipe with its transformers model.

    Attributes:
        recipe: The run's recipe.
        model: The recipe's model, with weights on the meta device.
    """

    recipe: Recipe
    model: Any

    def list_tied_names(self) -> Sequence[str]:
        """Return the names of tied weights to omit; transformers ties them on loading."""
        return [name for name, first in tied_names(self.model).items() if name != first]

    def save(self, folder: Path, weights: Weights) -> None:
        """Write the model's configuration, generation settings and the recipe's assets."""
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
            raise WorldsizeError(  # transformers' own OSError for a missing tokenizer does not name a file
                f"{type(self.recipe).__name__}.save_assets failed to add the tokenizer: {error}. "
                "Restore the recipe's tokenizer file, or export with --format safetensors."
            ) from error


def transformers_model(run: RunView, weights: Weights) -> TransformersModel:
    """Build the model of a run's recipe by running the recipe's code.

    Raises:
        WorldsizeError: the run belongs to another user, transformers is not installed, the model is not a
            transformers model, or its weights differ from the saved ones.
    """
    if not run.is_own:
        raise WorldsizeError(
            "--format hf runs the recipe's code, and this record was not written by you. Export with --format "
            "safetensors, which does not run code, or re-create the run with `worldsize reproduce` and export that run."
        )
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # silences a warning from torchao
    require("--format hf", "transformers", extra="recipes")
    import transformers

    recipe = read_recipe(run)
    model = build_empty_model(recipe)
    if not isinstance(model, transformers.PreTrainedModel):
        raise WorldsizeError(
            f"--format hf requires a transformers model; {type(recipe).__name__} trains a {type(model).__name__}. "
            "Export with --format safetensors or torch."
        )
    if strange := sorted(weights.entries.keys() ^ model.state_dict().keys()):
        raise WorldsizeError(
            f"the recipe's model does not match the saved weights: only one of the two has {strange[0]}. Export with "
            "--format safetensors."
        )
    return TransformersModel(recipe, model)

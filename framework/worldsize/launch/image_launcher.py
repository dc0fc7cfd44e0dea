"""Options of launchers whose processes start in a container image, and names of runs in schedulers."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Annotated

from worldsize.core import ConfigError, ContainerImage, LaunchMethod, OneOf, Plan
from worldsize.core.launcher import cluster_option

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageLauncher(LaunchMethod):
    """The base of launchers that start processes in an image, whose digest the run's manifest records."""

    image: str | None = cluster_option(None)  # best by digest: IMAGE@sha256:...
    image_digest: Annotated[str, OneOf("optional", "required")] = cluster_option("optional")  # required: refuse others

    def check_image(self) -> None:
        """Warn of an image that has no digest, or refuse it.

        Raises:
            ConfigError: ``image_digest`` is "required", and there is none.
        """
        is_required = self.image_digest == "required"
        if self.image is None:
            if is_required:
                raise ConfigError("cluster.image_digest=required, but there is no image. Set cluster.image.")
        elif ContainerImage.named(self.image).digest is None:
            fact = f"the image {self.image} has no digest that can be seen here, and may be another one tomorrow"
            remedy = "Name it by its digest (IMAGE@sha256: and 64 hexadecimal digits), or as a file that is here"
            if is_required:
                raise ConfigError(f"cluster.image_digest=required: {fact}. {remedy}; nothing was started.")
            _logger.warning("%s. %s for a run that can be re-created.", fact, remedy)


def job_name(plan: Plan) -> str:
    """Return a name for the run's jobs, of at most 40 characters that host names may have."""
    words = re.sub("[^a-z0-9]+", "-", f"{plan.run_dir.parts[-2]}-{plan.run_dir.name}".lower())
    return "ws-" + words[-37:].strip("-")

"""Options for launchers of container images, and job names for schedulers."""

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
    """Base class of launchers that can use a container image; its digest is recorded."""

    image: str | None = cluster_option(None)  # preferably with a digest: IMAGE@sha256:...
    image_digest: Annotated[str, OneOf("optional", "required")] = cluster_option("optional")  # required: reject tags

    def check_image(self) -> None:
        """Warn about or refuse an image without a digest.

        Raises:
            ConfigError: ``image_digest`` is "required", and the image lacks a digest.
        """
        is_required = self.image_digest == "required"
        if self.image is None:
            if is_required:
                raise ConfigError("cluster.image_digest=required requires an image. Set cluster.image.")
        elif ContainerImage.from_name(self.image).digest is None:
            fact = f"the image {self.image} is specified without a digest and may change at any time"
            remedy = (
                "Set cluster.image to IMAGE@sha256:DIGEST (64 hexadecimal digits), or to an image file on this machine"
            )
            if is_required:
                raise ConfigError(f"cluster.image_digest=required: {fact}. {remedy}; nothing was started.")
            _logger.warning("%s. %s to make the run reproducible.", fact, remedy)


def job_name(plan: Plan) -> str:
    """Return a name for the run's jobs: at most 40 characters, all allowed in host names."""
    words = re.sub("[^a-z0-9]+", "-", f"{plan.run_dir.parts[-2]}-{plan.run_dir.name}".lower())
    return "ws-" + words[-37:].strip("-")

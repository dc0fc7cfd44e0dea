"""Builds container images, and runs commands in them, with the engine that is there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from worldsize.core.image import ContainerImage, is_image_file
from worldsize.errors import WorldsizeError
from worldsize.record.dockerfile import IGNORE

ENGINES = ("podman", "docker", "apptainer")
BUILDERS = ("podman", "docker", "buildah")
_OWN = (
    "PYTHONPATH",
    "WORLDSIZE_PLUGINS",
    "WORLDSIZE_IMAGE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
)
_NAME = re.compile(r"[\w./][\w./:@#+-]*", re.ASCII)


def engine_of(chosen: str, known: Sequence[str] = ENGINES) -> str:
    """Return the engine to use: ``chosen``, or with "auto" the first of ``known`` that is installed.

    Raises:
        WorldsizeError: none is installed, or ``chosen`` is not among ``known``, which can do what is wanted.
    """
    if chosen not in ("auto", *known):
        raise WorldsizeError(f"{chosen} cannot make or open this image. Choose {' or '.join(known)}.")
    wanted = known if chosen == "auto" else (chosen,)
    engine = next((name for name in wanted if shutil.which(name)), None)
    if engine is None:
        raise WorldsizeError(f"no container engine is found here ({', '.join(wanted)}). Install one of them.")
    return engine


def engines_for(image: ContainerImage | None) -> Sequence[str]:
    """Return the engines that can open ``image``; None: those that can build one and open it."""
    if image is None:
        return tuple(name for name in ENGINES if name in BUILDERS)
    return ("apptainer",) if is_image_file(image.name) else ENGINES


def recorded_image(environment: Mapping[str, Any]) -> ContainerImage | None:
    """Return the image of a record's ``environment``, which may be another user's; None: the run was in none.

    Raises:
        WorldsizeError: it has no digest, is a file that is lost or changed, or its name is none of an image.
    """
    facts = environment.get("image")
    if not facts:
        return None
    name, digest = str(facts["name"]), facts["digest"]
    plain = re.sub(r"^docker:(//)?", "", name)
    is_file = is_image_file(plain)
    if not is_file:
        plain = plain.replace("#", "/", 1)  # enroot writes host#name
    if not _NAME.fullmatch(plain) or "://" in plain:
        raise WorldsizeError(f"the record names the image {name!r}, which no container engine here can open.")
    if is_file:
        plain = str(Path(plain).absolute())  # it is opened in the working directory of the run
        _check_file(plain, digest)
    elif digest is None or ContainerImage.named(plain).digest != digest:  # the engine is given the name alone
        raise WorldsizeError(
            f"the run's image {name} is named by a tag, which may be another one now. Name the image by its digest in "
            "the run that is to be re-created (cluster.image_digest=required), or leave --container out."
        )
    return ContainerImage(plain, digest)


def _check_file(name: str, digest: str | None) -> None:
    """Raise WorldsizeError unless the file still has the digest; it is read whole, whatever its time and size say."""
    file = Path(name)
    if file.is_file():
        with file.open("rb") as content:
            if digest == f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}":
                return
    raise WorldsizeError(f"{name} is lost, or is not the image of the run: its SHA-256 was {digest}. Bring it back.")


@final
@dataclass(frozen=True)
class Container:
    """An image, and the engine that opens it."""

    engine: str
    image: ContainerImage

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that tell a run in the container what its image is."""
        name, digest = self.image.name, self.image.digest
        is_told = digest is None or "@" in name or is_image_file(name)
        return {"WORLDSIZE_IMAGE": name if is_told else f"{name}@{digest}"}

    def python(self, folder: Path, *, writes: Sequence[Path], reads: Sequence[Path], cuda: bool) -> tuple[str, ...]:
        """Return the command that runs the image's Python, in which folders have the paths that they have here.

        Args:
            folder: The working directory.
            writes: Folders that the command may write.
            reads: Further folders that it may read.
            cuda: Whether it needs the GPUs.

        Raises:
            WorldsizeError: the image is a file that was changed, perhaps while its user was asked about it.
        """
        if is_image_file(self.image.name):
            _check_file(self.image.name, self.image.digest)
        shown = _distinct(writes, reads)
        if self.engine == "apptainer":
            binds = [f"--bind={path}:{path}:{mode}" for path, mode in shown.items()]
            source = self.image.name if is_image_file(self.image.name) else f"docker://{self.image.name}"
            devices = ["--nv"] if cuda else []
            # else the home folder and /tmp may be written, and all variables be read
            apart = ["--containall", "--no-home", "--cleanenv"]
            return (self.engine, "exec", *apart, *devices, *binds, f"--pwd={folder}", source, "python")
        mounts = [f"--volume={path}:{path}:{mode}" for path, mode in shown.items()]
        gpus = {"docker": ["--gpus=all"], "podman": ["--device=nvidia.com/gpu=all"]}[self.engine] if cuda else []
        user = [f"--user={os.getuid()}:{os.getgid()}"] if self.engine == "docker" else []
        variables = [f"--env={name}" for name in sorted(os.environ) if _is_passed_on(name)]
        # values are not on the command line; gloo and workers that load data need more shared memory than 64 MB
        own = [f"--env={name}" for name in _OWN]
        limits = ["--ipc=host", "--network=host", "--security-opt=label=disable"]
        options = ["--rm", "--interactive", *limits, *gpus, *user, *mounts, *own, *variables, f"--workdir={folder}"]
        return (self.engine, "run", *options, "--entrypoint=python", self.image.name)


def passed_on(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which ``command`` runs, with what Apptainer passes on to its container.

    The other engines are told the names on the command line; Apptainer would want the values there.
    """
    if command[0] != "apptainer":
        return dict(environment)
    own = {name: value for name, value in environment.items() if name in _OWN or _is_passed_on(name)}
    return {**environment, **{f"APPTAINERENV_{name}": value for name, value in own.items()}}


def built(engine: str, dockerfile: Path, tag: str, *, options: Sequence[str] = ()) -> ContainerImage:
    """Build the image of ``dockerfile``, whose folder is copied, and return it by its digest if the engine knows one.

    Args:
        engine: One of BUILDERS.
        dockerfile: The Dockerfile, beside which the list of what is left out lies.
        tag: Name of the new image.
        options: Further options of the engine's ``build``.

    Raises:
        WorldsizeError: the engine fails, as it has said on standard error.
    """
    folder = dockerfile.parent
    ignore = [] if engine == "docker" else [f"--ignorefile={folder / IGNORE}"]
    words = [engine, "build", *ignore, *options, f"--file={dockerfile}", f"--tag={tag}", str(folder)]
    if subprocess.run(words, stdout=sys.stderr, check=False).returncode:
        raise WorldsizeError(f"{engine} does not build the image, as it says above. The Dockerfile is {dockerfile}.")
    inspect = [engine, "inspect", "--type=image", tag] if engine == "buildah" else [engine, "image", "inspect", tag]
    told = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    facts = told[0] if isinstance(told, list) else told
    digest = facts.get("Digest") or facts.get("FromImageDigest")
    pushed = [each.partition("@")[2] for each in facts.get("RepoDigests") or ()]
    return ContainerImage(tag, digest or next(iter(pushed), None))


def _distinct(writes: Sequence[Path], reads: Sequence[Path]) -> dict[Path, str]:
    """Map the folders that exist to "rw" or "ro", without those inside another that has the same, outer ones first.

    Engines mount in this order, and a folder that is mounted over another hides what it contains.
    """
    modes: dict[Path, str] = {}
    for mode, paths in (("rw", writes), ("ro", reads)):
        for path in sorted({path.resolve() for path in paths if path.exists()}):
            if not any(path == each or (path.is_relative_to(each) and modes[each] in (mode, "rw")) for each in modes):
                modes[path] = mode
    return dict(sorted(modes.items(), key=lambda each: len(each[0].parts)))


def _is_passed_on(name: str) -> bool:
    """Return whether an environment variable of this process is one for the command, too."""
    return name.startswith(("WANDB_", "HF_", "OMP_", "MKL_", "NCCL_", "ATEN_", "CUBLAS_", "TORCH_", "PYTORCH_"))

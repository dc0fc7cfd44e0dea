"""Writes Dockerfiles, builds container images, and runs commands in them with the engine that is installed.

An image has the environment of a lock, and the code of a project without private files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, final

from jinja2 import Environment, PackageLoader, StrictUndefined

from worldsize.core.cluster import ContainerImage, is_image_file
from worldsize.errors import WorldsizeError
from worldsize.record.redaction import PRIVATE_NAMES, why_private, without_credentials

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


NAME = "Dockerfile"
IGNORE = f"{NAME}.dockerignore"
_IGNORE_HEADER = "# What the image does not get, as `worldsize image` wrote it."
_OURS = re.compile(r"# .* as `worldsize image` wrote it\.")  # the first line of both files
_LEFT_OUT = (".git", ".venv", "runs", "wandb", "__pycache__", "node_modules", NAME, IGNORE)
_LOCKS = ("uv.lock", "requirements.txt")
_FILES = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
_IGNORED = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")


@final
@dataclass(frozen=True)
class Dockerfile:
    """The parts of an image.

    Attributes:
        folder: The project, which has a uv.lock or a requirements.txt; its code goes into the image.
        base: The image to begin with, which has Python and, for git, apt; best by digest.
        python: Version of Python that the environment is made for, of which the base has any third number.
        uv: Version of uv that makes it.
        extras: Optional dependencies of the project; None: all.
        has_project: Whether the project's code goes into the image, besides what it needs.
    """

    folder: Path
    base: str
    python: str
    uv: str
    extras: Sequence[str] | None = ()
    has_project: bool = True

    def write(self) -> Path:
        """Write the Dockerfile, and beside it the list of what the image must not get; return the Dockerfile's path.

        Raises:
            WorldsizeError: there is no lock, it holds credentials or packages that the image cannot get, or there is a
                Dockerfile that somebody else wrote.
        """
        self._check_names()
        lock = next((self.folder / name for name in _LOCKS if (self.folder / name).is_file()), None)
        if lock is None:
            raise WorldsizeError(f"{self.folder} has no uv.lock and no requirements.txt. Run `uv lock` there first.")
        self._check(lock)
        environment = Environment(
            loader=PackageLoader("worldsize.record", "."), undefined=StrictUndefined, trim_blocks=True
        )
        environment.keep_trailing_newline = True
        every = [f" --extra {name}" for name in self.extras or ()]
        text = environment.get_template("Dockerfile.j2").render(
            digest=hashlib.sha256(lock.read_bytes()).hexdigest(),
            base=self.base,
            python=".".join(self.python.split(".")[:2]),  # the base has the exact one
            uv=self.uv,
            lock=lock.name,
            has_project=self.has_project,
            extras=" --all-extras" if self.extras is None else "".join(every),
        )
        lines = (_IGNORE_HEADER, *self._left_out())
        (self.folder / IGNORE).write_text("".join(f"{line}\n" for line in lines))
        (self.folder / NAME).write_text(text)
        return self.folder / NAME

    def _check_names(self) -> None:
        """Raise WorldsizeError if one of the files would take the place of the project's own."""
        for file in (self.folder / NAME, self.folder / IGNORE):
            if file.is_symlink() or (file.exists() and not _is_ours(file)):
                raise WorldsizeError(
                    f"{file} is not one that `worldsize image` wrote, and would be lost. Give it another name, which "
                    "the engine's own build takes with --file; nothing was written."
                )

    def _check(self, lock: Path) -> None:
        """Raise WorldsizeError for a lock whose environment the folder alone cannot build, or not without a secret."""
        for file in (lock, self.folder / "pyproject.toml"):
            if file.is_file() and without_credentials(text := file.read_text()) != text:
                raise WorldsizeError(
                    f"{file} has credentials in an address, and an image keeps what is copied into it. "
                    "Take them out, and build with --secret id=netrc,src=$HOME/.netrc; nothing was written."
                )
        if lock.name == "uv.lock" and (outside := sorted(_outside(tomllib.loads(lock.read_text())))):
            raise WorldsizeError(
                f"{lock} installs {', '.join(outside)} from outside of {self.folder}, which the build does not see. "
                "Take it from git or a package index, or move it into the project; nothing was written."
            )

    def _left_out(self) -> Iterator[str]:
        """List what the image must not get: names, then what git ignores, then files that seem to be private."""
        yield from ("**/" + re.sub(r"\[.*?\]", "?", name) for name in PRIVATE_NAMES)  # engines read no [-_]
        yield "!**/*.py"  # of Python's sources no name shows anything; the last line that fits counts
        yield from (f"**/{name}" for name in _LEFT_OUT)
        ignored, files = _listed(self.folder, _IGNORED), _listed(self.folder, _FILES)
        if files is None:  # not in a git repository
            files = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")]
        yield from (_escaped(name.rstrip("/")) for name in ignored or ())
        for name in files:
            is_left_out = any(part in _LEFT_OUT for part in PurePosixPath(name).parts)
            if not is_left_out and (self.folder / name).is_file() and why_private(self.folder / name, name):
                yield _escaped(name)


def _is_ours(file: Path) -> bool:
    """Return whether `worldsize image` wrote the file; an empty one holds nothing that could be lost."""
    if not file.is_file():
        return False
    lines = file.read_text(errors="replace").splitlines()
    return not lines or _OURS.fullmatch(lines[0]) is not None


def usual_base() -> str:
    """Return the base image whose Python is this one."""
    return f"python:{platform.python_version()}-slim"


def version_of_uv() -> str:
    """Return the version of this machine's uv; raise WorldsizeError if it has none."""
    try:
        said = subprocess.run(["uv", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorldsizeError("uv is not found, whose version the image gets. pip install uv") from error
    match = re.search(r"\d+(\.\d+)+\w*", said)
    if match is None:
        raise WorldsizeError(f"uv --version says {said.strip()!r}, which is no version. Install uv anew.")
    return match[0]


def _outside(lock: Mapping[str, Any]) -> Iterator[str]:
    for package in lock.get("package", ()):
        for kind in ("path", "directory", "editable", "virtual"):
            place = package.get("source", {}).get(kind)
            if place is not None and (PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts):
                yield f"{package['name']} ({place})"


def _listed(folder: Path, command: Sequence[str]) -> list[str] | None:
    """Return names that git lists, relative to ``folder``; None: it is in no repository, or there is no git."""
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _escaped(name: str) -> str:
    """Return a pattern that matches one name alone."""
    return re.sub(r"([*?\[\]\\!#])", r"\\\1", name)

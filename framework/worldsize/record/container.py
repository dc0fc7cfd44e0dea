"""Write Dockerfiles, build container images, and run commands in containers.

An image contains the environment from a lock file, and the code of a project without private files.
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
from worldsize.record.redaction import PRIVATE_NAMES, remove_credentials, why_private

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


def find_engine(chosen: str, known: Sequence[str] = ENGINES) -> str:
    """Return the engine: ``chosen``, or for "auto" the first installed one in ``known``.

    Raises:
        WorldsizeError: the engine is not installed, or ``chosen`` is not in ``known``.
    """
    if chosen not in ("auto", *known):
        raise WorldsizeError(f"{chosen} cannot build or open this image. Use {' or '.join(known)}.")
    wanted = known if chosen == "auto" else (chosen,)
    engine = next((name for name in wanted if shutil.which(name)), None)
    if engine is None:
        raise WorldsizeError(f"no container engine found. Install one of: {', '.join(wanted)}.")
    return engine


def engines_for(image: ContainerImage | None) -> Sequence[str]:
    """Return the engines that can open ``image``; for None, those that can also build images."""
    if image is None:
        return tuple(name for name in ENGINES if name in BUILDERS)
    return ("apptainer",) if is_image_file(image.name) else ENGINES


def read_recorded_image(environment: Mapping[str, Any]) -> ContainerImage | None:
    """Return the image in an untrusted record, or None if the run did not use a container.

    Raises:
        WorldsizeError: the image is not named by a digest, is a missing or changed file, or has an invalid name.
    """
    facts = environment.get("image")
    if not facts:
        return None
    name, digest = str(facts["name"]), facts["digest"]
    plain = re.sub(r"^docker:(//)?", "", name)
    is_file = is_image_file(plain)
    if not is_file:
        plain = plain.replace("#", "/", 1)  # enroot's syntax is host#name
    if not _NAME.fullmatch(plain) or "://" in plain:
        raise WorldsizeError(f"invalid image name {name!r} in the record: no container engine can open this image.")
    if is_file:
        plain = str(Path(plain).absolute())  # the engine starts in the run's working directory
        _check_file(plain, digest)
    elif digest is None or ContainerImage.from_name(plain).digest != digest:  # the engine only receives the name
        raise WorldsizeError(
            f"the run's image {name} was specified by a tag, which may have moved. Specify the image by digest in "
            "the original run (cluster.image_digest=required), or omit --container."
        )
    return ContainerImage(plain, digest)


def _check_file(name: str, digest: str | None) -> None:
    """Raise WorldsizeError unless the full content has the digest; mtime and size can be forged."""
    file = Path(name)
    if file.is_file():
        with file.open("rb") as content:
            if digest == f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}":
                return
    raise WorldsizeError(
        f"{name} is missing or differs from the run's image: expected digest {digest}. Restore the image."
    )


@final
@dataclass(frozen=True)
class Container:
    """A container image, and the engine that runs it."""

    engine: str
    image: ContainerImage

    @property
    def variables(self) -> dict[str, str]:
        """Environment variable with the image's name, for a run in the container."""
        name, digest = self.image.name, self.image.digest
        is_told = digest is None or "@" in name or is_image_file(name)
        return {"WORLDSIZE_IMAGE": name if is_told else f"{name}@{digest}"}

    def build_python_command(
        self, folder: Path, *, writes: Sequence[Path], reads: Sequence[Path], cuda: bool
    ) -> tuple[str, ...]:
        """Return the command for the image's Python, with folders mounted at their host paths.

        Args:
            folder: The working directory.
            writes: Folders to mount read-write.
            reads: Folders to mount read-only.
            cuda: Whether to make GPUs available.

        Raises:
            WorldsizeError: the image file was changed, for example while the user was being prompted.
        """
        if is_image_file(self.image.name):
            _check_file(self.image.name, self.image.digest)
        shown = _distinct(writes, reads)
        if self.engine == "apptainer":
            binds = [f"--bind={path}:{path}:{mode}" for path, mode in shown.items()]
            source = self.image.name if is_image_file(self.image.name) else f"docker://{self.image.name}"
            devices = ["--nv"] if cuda else []
            # otherwise, the home folder and /tmp are writable, and all environment variables are visible
            apart = ["--containall", "--no-home", "--cleanenv"]
            return (self.engine, "exec", *apart, *devices, *binds, f"--pwd={folder}", source, "python")
        mounts = [f"--volume={path}:{path}:{mode}" for path, mode in shown.items()]
        gpus = {"docker": ["--gpus=all"], "podman": ["--device=nvidia.com/gpu=all"]}[self.engine] if cuda else []
        user = [f"--user={os.getuid()}:{os.getgid()}"] if self.engine == "docker" else []
        variables = [f"--env={name}" for name in sorted(os.environ) if _is_passed_on(name)]
        # pass only names on the command line, not values; gloo and data workers need more than 64 MB of shared memory
        own = [f"--env={name}" for name in _OWN]
        limits = ["--ipc=host", "--network=host", "--security-opt=label=disable"]
        options = ["--rm", "--interactive", *limits, *gpus, *user, *mounts, *own, *variables, f"--workdir={folder}"]
        return (self.engine, "run", *options, "--entrypoint=python", self.image.name)


def extend_environment(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for ``command``, with variables for Apptainer to pass on.

    Other engines receive the names on the command line, where Apptainer would also need the values.
    """
    if command[0] != "apptainer":
        return dict(environment)
    own = {name: value for name, value in environment.items() if name in _OWN or _is_passed_on(name)}
    return {**environment, **{f"APPTAINERENV_{name}": value for name, value in own.items()}}


def build_image(engine: str, dockerfile: Path, tag: str, *, options: Sequence[str] = ()) -> ContainerImage:
    """Build an image; return it with its digest if the engine reports one.

    Args:
        engine: One of BUILDERS.
        dockerfile: The Dockerfile; the ignore file is in the same folder.
        tag: Name of the new image.
        options: Additional options for the engine's ``build``.

    Raises:
        WorldsizeError: the engine fails; it writes its error to standard error.
    """
    folder = dockerfile.parent
    ignore = [] if engine == "docker" else [f"--ignorefile={folder / IGNORE}"]
    words = [engine, "build", *ignore, *options, f"--file={dockerfile}", f"--tag={tag}", str(folder)]
    if subprocess.run(words, stdout=sys.stderr, check=False).returncode:
        raise WorldsizeError(f"{engine} failed to build the image; see its output above. Dockerfile: {dockerfile}.")
    inspect = [engine, "inspect", "--type=image", tag] if engine == "buildah" else [engine, "image", "inspect", tag]
    told = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    facts = told[0] if isinstance(told, list) else told
    digest = facts.get("Digest") or facts.get("FromImageDigest")
    pushed = [each.partition("@")[2] for each in facts.get("RepoDigests") or ()]
    return ContainerImage(tag, digest or next(iter(pushed), None))


def _distinct(writes: Sequence[Path], reads: Sequence[Path]) -> dict[Path, str]:
    """Map existing folders to "rw" or "ro", parents first; omit folders that are covered.

    A mount of a parent folder may already cover a folder. Engines mount in this order, and a mount hides the previous
    contents of its mount point.
    """
    modes: dict[Path, str] = {}
    for mode, paths in (("rw", writes), ("ro", reads)):
        for path in sorted({path.resolve() for path in paths if path.exists()}):
            if not any(path == each or (path.is_relative_to(each) and modes[each] in (mode, "rw")) for each in modes):
                modes[path] = mode
    return dict(sorted(modes.items(), key=lambda each: len(each[0].parts)))


def _is_passed_on(name: str) -> bool:
    """Return whether to pass an environment variable of this process to the command."""
    return name.startswith(("WANDB_", "HF_", "OMP_", "MKL_", "NCCL_", "ATEN_", "CUBLAS_", "TORCH_", "PYTORCH_"))


NAME = "Dockerfile"
IGNORE = f"{NAME}.dockerignore"
_IGNORE_HEADER = "# Files excluded from the image, written by `worldsize image`."
_OURS = re.compile(r"# .*(, written by `worldsize image`| as `worldsize image` wrote it)\.")  # first line of both files
_LEFT_OUT = (".git", ".venv", "runs", "wandb", "__pycache__", "node_modules", NAME, IGNORE)
_LOCKS = ("uv.lock", "requirements.txt")
_FILES = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
_IGNORED = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")


@final
@dataclass(frozen=True)
class Dockerfile:
    """Specification of an image.

    Attributes:
        folder: The project folder, with a uv.lock or a requirements.txt.
        base: The base image, preferably by digest; needs Python, and git or apt to install git.
        python: Python version of the environment; the base may have a different patch version.
        uv: Version of uv to create the environment with.
        extras: Optional dependencies of the project to install; None installs all.
        has_project: Whether to include the project's code in addition to its dependencies.
    """

    folder: Path
    base: str
    python: str
    uv: str
    extras: Sequence[str] | None = ()
    has_project: bool = True

    def write_files(self) -> Path:
        """Write the Dockerfile and its ignore file; return the path of the Dockerfile.

        Raises:
            WorldsizeError: the lock file is missing, contains credentials or packages that the build cannot access, or
                there is a Dockerfile that worldsize did not write.
        """
        self._check_names()
        lock = next((self.folder / name for name in _LOCKS if (self.folder / name).is_file()), None)
        if lock is None:
            raise WorldsizeError(f"{self.folder} has neither uv.lock nor requirements.txt. Run `uv lock` there first.")
        self._check_lock(lock)
        environment = Environment(
            loader=PackageLoader("worldsize.record", "."), undefined=StrictUndefined, trim_blocks=True
        )
        environment.keep_trailing_newline = True
        every = [f" --extra {name}" for name in self.extras or ()]
        text = environment.get_template("Dockerfile.j2").render(
            digest=hashlib.sha256(lock.read_bytes()).hexdigest(),
            base=self.base,
            python=".".join(self.python.split(".")[:2]),  # the base determines the patch version
            uv=self.uv,
            lock=lock.name,
            has_project=self.has_project,
            extras=" --all-extras" if self.extras is None else "".join(every),
        )
        lines = (_IGNORE_HEADER, *self._list_ignored())
        (self.folder / IGNORE).write_text("".join(f"{line}\n" for line in lines))
        (self.folder / NAME).write_text(text)
        return self.folder / NAME

    def _check_names(self) -> None:
        """Raise WorldsizeError if one of the files would overwrite the project's own file."""
        for file in (self.folder / NAME, self.folder / IGNORE):
            if file.is_symlink() or (file.exists() and not _is_ours(file)):
                raise WorldsizeError(
                    f"{file} was not written by `worldsize image` and would be overwritten. Rename the file, and "
                    "pass the new name to the container engine with --file; nothing was written."
                )

    def _check_lock(self, lock: Path) -> None:
        """Raise WorldsizeError if the lock contains credentials or packages outside of the folder."""
        for file in (lock, self.folder / "pyproject.toml"):
            if file.is_file() and remove_credentials(text := file.read_text()) != text:
                raise WorldsizeError(
                    f"{file} contains credentials in a URL, which would remain in the image. "
                    "Remove the credentials, and build with --secret id=netrc,src=$HOME/.netrc; nothing was written."
                )
        if lock.name == "uv.lock" and (outside := sorted(_find_outside(tomllib.loads(lock.read_text())))):
            raise WorldsizeError(
                f"{lock} installs {', '.join(outside)} from outside of {self.folder}, which is not part of the build "
                "context. Install from git or a package index, or move the package into the project; nothing was "
                "written."
            )

    def _list_ignored(self) -> Iterator[str]:
        """Yield patterns of names that are never included, ignored files, and private files."""
        yield from ("**/" + re.sub(r"\[.*?\]", "?", name) for name in PRIVATE_NAMES)  # engines do not support [-_]
        yield "!**/*.py"  # .py files are not private by name; the last matching pattern wins
        yield from (f"**/{name}" for name in _LEFT_OUT)
        ignored, files = _list_git_files(self.folder, _IGNORED), _list_git_files(self.folder, _FILES)
        if files is None:  # not in a git repository
            files = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")]
        yield from (_escape_name(name.rstrip("/")) for name in ignored or ())
        for name in files:
            is_left_out = any(part in _LEFT_OUT for part in PurePosixPath(name).parts)
            if not is_left_out and (self.folder / name).is_file() and why_private(self.folder / name, name):
                yield _escape_name(name)


def _is_ours(file: Path) -> bool:
    """Return whether the file is empty or was written by `worldsize image`."""
    if not file.is_file():
        return False
    lines = file.read_text(errors="replace").splitlines()
    return not lines or _OURS.fullmatch(lines[0]) is not None


def usual_base() -> str:
    """Return the base image with the Python version of this process."""
    return f"python:{platform.python_version()}-slim"


def version_of_uv() -> str:
    """Return the version of the installed uv; raise WorldsizeError if there is none."""
    try:
        said = subprocess.run(["uv", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise WorldsizeError("uv not found; the image installs the same version. Run `pip install uv`.") from error
    match = re.search(r"\d+(\.\d+)+\w*", said)
    if match is None:
        raise WorldsizeError(f"expected a version from `uv --version`, got {said.strip()!r}. Reinstall uv.")
    return match[0]


def _find_outside(lock: Mapping[str, Any]) -> Iterator[str]:
    for package in lock.get("package", ()):
        for kind in ("path", "directory", "editable", "virtual"):
            place = package.get("source", {}).get(kind)
            if place is not None and (PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts):
                yield f"{package['name']} ({place})"


def _list_git_files(folder: Path, command: Sequence[str]) -> list[str] | None:
    """Return names listed by git, relative to ``folder``; None without a repository or git."""
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]


def _escape_name(name: str) -> str:
    """Escape a name to a pattern that only matches the name itself."""
    return re.sub(r"([*?\[\]\\!#])", r"\\\1", name)

"""Files with secrets are not copied into a run folder, and only its user can read the folder."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Train
from worldsize.errors import WorldsizeError
from worldsize.record.code import capture_code
from worldsize.record.inputs import copy_plugin
from worldsize.record.redaction import why_private

SECRETS = {  # each in its issuer's published format; none was ever valid
    "notes.txt": "-----BEGIN OPENSSH PRIVATE KEY-----\n",
    "deploy.py": "token = 'ghp_" + "a1B2" * 9 + "'\n",
    "bucket.py": "key = 'AKIA" + "ABCDEFGH12345678" + "'\n",
    "hub.py": "token = 'hf_" + "a" * 34 + "'\n",
    "fine_grained.txt": "github_pat_" + "a1B2c3D4e5F" * 2 + "_" + "a1B2c3D4e5F" * 5 + "a1B2\n",
    "claude.txt": "sk-ant-api03-" + "a1B2" * 23 + "AA\n",
    "package.txt": "npm_" + "a1B2" * 9 + "\n",
    "bucket.sh": "aws_secret_access_key=" + "a1B2" * 10 + "\n",
    "call.sh": "curl -H 'Authorization: Bearer " + "a1B2" * 16 + "' https://example.org\n",
    "docker.json": '{"auths": {"x": {"auth": "' + "a1B2" * 10 + '"}}}\n',
    "login.yaml": "password: " + "a1B2" * 6 + "\n",
    "start.sh": "export DB_PASSWORD=" + "a1B2" * 5 + "\n",
    "log.sh": "WANDB_API_KEY=" + "0a1b" * 10 + "\n",
    "state.json": '{"password":"' + "a1B2" * 5 + '"}\n',
    "client.py": "self._password = '" + "a1B2" * 5 + "=='\n",
    "registry.txt": "//registry.npmjs.org/:_authToken=" + "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9" + "\n",
    "cookie.txt": "session=eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln\n",
    "gpt.txt": "sk-" + "a1B2" * 5 + "T3BlbkFJ" + "a1B2" * 5 + "\n",
    "pay.py": "token = 'sk_live_" + "a" * 24 + "'\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "train.py").write_text("print()\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *words], cwd=root, check=True)
    return root


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.local", "server.pem", "id_ed25519", "id_rsa.bak", "my_secrets.txt", "Credentials.json"),
        *("secrets/prod.yaml", ".kube/config", ".docker/config.json", "deploy/.aws/config"),
    ],
)
def test_a_file_with_the_name_of_a_private_one_is_left_out_and_named(
    project: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_text("canary\n")
    (project / "mine.py").write_text("pass\n")
    with caplog.at_level(logging.WARNING, logger="worldsize"):
        logging.getLogger("worldsize").propagate = True
        code = capture_code(project, exclude=project / "runs")
    assert code.left_out == (name,)
    assert b"canary" not in code.patch
    assert b"mine.py" in code.patch
    assert f"{name} (private file name)" in caplog.text


@pytest.mark.parametrize("name", ["id_mapping.py", "secret_sharing.py", "id_mapping.csv", "passwords/strength.py"])
def test_a_source_is_kept_whatever_it_is_called(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("pass\n")
    assert capture_code(project, exclude=project / "runs").left_out == ()


def test_a_plugin_with_a_private_file_is_not_copied_unless_the_user_says_so(tmp_path: Path) -> None:
    plugin = tmp_path / "mine"
    (plugin / "secrets").mkdir(parents=True)
    (plugin / "secrets" / "prod.yaml").write_text("canary\n")
    with pytest.raises(WorldsizeError, match=r"prod.yaml may be private \(private file name\)"):
        copy_plugin(plugin, tmp_path / "copy", str)
    assert not (tmp_path / "copy").exists()
    copy_plugin(plugin, tmp_path / "copy", str, include=["secrets/prod.yaml"])
    assert (tmp_path / "copy" / "secrets" / "prod.yaml").exists()


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_with_a_key_in_it_is_left_out(project: Path, name: str) -> None:
    (project / name).write_text(SECRETS[name])
    code = capture_code(project, exclude=project / "runs")
    assert (code.left_out, code.patch) == ((name,), b"")


@pytest.mark.parametrize("part", ["A", "a.", "A=", "key: ", "secret ", "//example.org/", "eyJ", "sk-"])
def test_a_long_line_is_searched_in_linear_time(tmp_path: Path, part: str) -> None:
    """Quadratic time would be hours: the time limit would end the test."""
    (tmp_path / "data.txt").write_text(f"key{' ' * 1_000_000}\n{part * (1_000_000 // len(part))}(")
    assert why_private(tmp_path / "data.txt", "data.txt") is None


def test_code_that_names_secrets_and_holds_none_is_kept(project: Path) -> None:
    lines = [
        "token = tokenizer.encode_batch_2(words)",
        "password = os.environ['DB_PASSWORD_2']",
        "session.auth = GoogleOAuth2ClientAuth(client)",
        "session.auth = clients.GoogleOAuth2ClientAuth.standard",
        "secret_sharing_threshold = 1234567890123456",
        "api_key: ${oc.env:API_KEY_OF_V2}",
        "digest = 'e3b0c44298fc1c149afbf4c8996fb92427ae41e4'",
    ]
    (project / "mine.txt").write_text("\n".join(lines) + "\n")
    assert capture_code(project, exclude=project / "runs").left_out == ()


def test_a_file_that_nobody_else_may_read_is_left_out(project: Path) -> None:
    (project / "plain.txt").write_text("canary\n")
    (project / "plain.txt").chmod(0o600)
    assert capture_code(project, exclude=project / "runs").left_out == ("plain.txt",)


def test_where_nobody_else_may_read_any_file_a_mode_shows_nothing(project: Path) -> None:
    (project / "plain.txt").write_text("text\n")
    (project / "plain.txt").chmod(0o600)
    code = "import os, sys; os.umask(0o077); from pathlib import Path; p = Path(sys.argv[1])\n"
    code += "from worldsize.record.code import capture_code; print(capture_code(p, exclude=p / 'runs').left_out)"
    done = subprocess.run([sys.executable, "-c", code, project], capture_output=True, text=True, check=True)
    assert done.stdout == "()\n"


def test_the_user_may_overrule(project: Path) -> None:
    (project / ".env").write_text("canary\n")
    (project / "deploy.py").write_text(SECRETS["deploy.py"])
    code = capture_code(project, exclude=project / "runs", include=[".env"])
    assert (code.left_out, b"canary" in code.patch) == (("deploy.py",), True)


@pytest.mark.parametrize(("words", "mode"), [([], 0o700), (["run.private=false"], 0o755)])
def test_a_run_folder_is_private_unless_it_is_asked_not_to_be(
    tmp_path: Path, train_in: Callable[[Path], Train], words: list[str], mode: int
) -> None:
    assert os.umask(0o022) == 0o022
    done = train_in(tmp_path)("steps=1", "recipe=digits", *words)
    assert done.folder, done.error
    assert stat.S_IMODE(done.folder.stat().st_mode) == mode

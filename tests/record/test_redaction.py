"""Secrets are redacted wherever users put them."""

from __future__ import annotations

from pathlib import Path

import pytest

from worldsize.record.redaction import (
    REDACTED,
    is_secret,
    is_secret_variable,
    redact_arguments,
    redact_tree,
    remove_credentials,
    scrubber,
)


@pytest.mark.parametrize("name", ["HFToken", "APIKey", "Authorization", "passwords", "secrets", "x.passphrase"])
def test_secrets_are_recognised_in_camel_case_and_in_the_plural(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["tokens", "max_tokens", "tokenizer", "key_metric", "seed", "keyboard", "author"])
def test_words_that_only_contain_a_secret_one_are_not_secret(name: str) -> None:
    assert not is_secret(name)
    assert redact_tree({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("https://u:p@ss@example.org/x", "https://example.org/x"),
        (
            "https://example.org/x?access_token=t&page=1",
            "https://example.org/x?access_token=<redacted>&page=1",
        ),
        ("s3://bucket/x?X-Amz-Signature=t", "s3://bucket/x?X-Amz-Signature=<redacted>"),
        (
            "[https://u:p@a.org/x,https://v:q@b.org/y?token=t]",
            "[https://a.org/x,https://b.org/y?token=<redacted>]",
        ),
        ("https://example.org/x?max_tokens=3", "https://example.org/x?max_tokens=3"),
        ("git@example.org:a/b.git", "git@example.org:a/b.git"),
        ("is it a?token=b", "is it a?token=b"),
    ],
)
def test_urls_keep_everything_but_their_credentials(url: str, clean: str) -> None:
    assert remove_credentials(url) == clean


@pytest.mark.parametrize(
    "word",
    [
        "logger={project:x,api_key:s3cret}",
        "+a.headers={'Authorization': 'Bearer s3cret'}",
        "a={b:{token:s3cret}}",
    ],
)
def test_an_override_with_a_secret_inside_braces_is_hidden_whole(word: str) -> None:
    assert redact_arguments([word]) == [f"{word.partition('=')[0]}=<redacted>"]


def test_other_overrides_are_kept_as_they_were_typed() -> None:
    typed = ["optimizer={lr:0.1,max_tokens:3}", "strategy=ddp", "~logger", "lr=0.1,0.2", "--multirun"]
    assert redact_arguments(typed) == typed


@pytest.mark.parametrize(
    "name",
    [
        *("PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "DB_PASS", "dbpassword", "AZURE_STORAGE_KEY", "STRIPE_KEY"),
        *("CONNECTION_STRING", "SLACK_WEBHOOK", "JWT", "SENTRY_DSN", "WANDB_API_KEY", "hf_authtoken"),
    ],
)
def test_secrets_are_recognised_by_the_names_that_services_give_them(name: str) -> None:
    assert is_secret(name)
    assert is_secret_variable(name)


@pytest.mark.parametrize("name", ["pad_token", "tokenizer.eos_token", "image_key", "text_key", "forward_pass", "pwd"])
def test_keys_of_data_and_tokens_of_text_are_not_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(("name", "expected"), [("LAMBDA_KEY", True), ("PWD", False), ("SORT_KEY", False)])
def test_a_variable_that_ends_in_key_is_secret(name: str, expected: bool) -> None:
    assert is_secret_variable(name) is expected


def test_what_the_configuration_takes_from_the_environment_is_kept_out_but_for_places(tmp_path: Path) -> None:
    environ = {"PLAIN": "opaque-value", "DATA_DIR": "/data/of/mine", "OTHER": "other-value"}
    clean = scrubber({"a": "opaque-value"}, environ, tmp_path / "none", interpolated=["PLAIN", "DATA_DIR"])
    assert clean.scrub_tree({"a": "opaque-value", "b": "/data/of/mine", "c": "other-value"}) == {
        "a": REDACTED,
        "b": "/data/of/mine",
        "c": "other-value",
    }

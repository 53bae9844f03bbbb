"""Secrets of the environment are found by name and masked in every form; what is none stays as it is."""

from __future__ import annotations

import io
import json
import os
import subprocess
from base64 import b64encode
from pathlib import Path
from urllib.parse import quote

import pytest

from finetune.config.compose import compose
from finetune.errors import FinetuneError, Refusal
from finetune.paths import RunDir
from finetune.report.record import Report, read_report
from finetune.secrets import MaskedStream, given, masked, masked_file

PASSWORD = 'p"ss/w+rd & 17'
SHAPED = {
    "hub": "hf_" + "q1" * 17,
    "code host": "ghp_" + "q1" * 18,
    "cloud": "AKIA" + "Q1" * 8,
    "chat": "sk-proj-" + "q1" * 20,
    "web": "eyJ" + "q1" * 10 + "." + "q1" * 10 + ".q1",
}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("MY_SERVICE_PASSWORD", PASSWORD)


def test_a_variable_is_secret_by_its_name_and_a_value_that_can_be_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    yes = ["HF_TOKEN", "OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "DBPASSWORD", "A_TOKEN_2", "x_credentials"]
    yes += ["DB_PASS", "DBPASS", "MYSQL_PWD", "DBPWD", "AZURE_STORAGE_CONNECTION_STRING", "SERVICE_CONN_STR"]
    no = ["TOKENIZERS_PARALLELISM", "MONKEY", "S3_KEY_PREFIX", "SSH_KEY_PATH", "KEYBOARD", "MY_SETTING"]
    no += ["PWD", "OLDPWD", "BYPASS", "COMPASS", "PASSENGERS", "CONNECTION"]
    for name in [*yes, *no]:
        monkeypatch.setenv(name, "some long value of " + name)
    monkeypatch.setenv("USE_TOKEN", "true")
    monkeypatch.setenv("KEY_FOLDER_KEY", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://me:long-enough@proxy:3128")
    (tmp_path / "token").write_text("the-token-of-a-login\n", encoding="utf-8")
    found = given()
    assert {*yes, "HTTPS_PROXY", "the login of the hub"} <= found.keys()
    assert not {*no, "USE_TOKEN", "KEY_FOLDER_KEY"} & found.keys()
    assert found["HTTPS_PROXY"] == "long-enough"
    assert "the-token-of-a-login" in found.values()


@pytest.mark.parametrize("before", ["", "u", "us", "usr:"])
def test_every_form_of_a_secret_is_masked(before: str) -> None:
    content = f"{before}{PASSWORD}:more".encode()
    forms = [PASSWORD, quote(PASSWORD), quote(PASSWORD, safe=""), json.dumps(PASSWORD), repr(PASSWORD)]
    for form in [*forms, PASSWORD.encode().hex()]:
        assert masked(f"a {form.strip(chr(34) + chr(39))} b") == "a *** b"
    for encoded in (b64encode(content).decode(), b64encode(PASSWORD.encode()).decode().rstrip("=")):
        hidden = masked(f"Basic {encoded}")
        assert "***" in hidden
        assert len(hidden) < len(encoded)


@pytest.mark.parametrize("token", SHAPED.values(), ids=SHAPED)
def test_what_looks_like_a_token_is_masked_wherever_it_stands(token: str) -> None:
    assert masked(f"got {token}, sorry") == "got ***, sorry"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "AccountName=me;AccountKey=q1Q2+/q3Q4q5Q6q7Q8q9==;EndpointSuffix=x",
            "AccountName=me;AccountKey=***;EndpointSuffix=x",
        ),
        ("SharedAccessKey=q1Q2q3Q4q5Q6q7Q8q9=", "SharedAccessKey=***"),
        (
            f"GET /x?X-Amz-Date=1&X-Amz-Signature={'0a' * 32} 403",
            "GET /x?X-Amz-Date=1&X-Amz-Signature=*** 403",
        ),
        (f"https://h/x?X-Amz-Security-Token={'Qq1%2F' * 9}&a=b", "https://h/x?X-Amz-Security-Token=***&a=b"),
        (f"https://h/x?sv=2024&sig={'q1%2B' * 9}%3D&se=1", "https://h/x?sv=2024&sig=***&se=1"),
        ("Server=h;Uid=me;Password=short;Port=1", "Server=h;Uid=me;Password=***;Port=1"),
    ],
)
def test_what_signs_an_address_or_opens_a_connection_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize("plain", ["signature=inspect.signature(f)", "sig=1", "f(a, sig=b)", "x;PWD=$HOME"])
def test_what_only_reads_like_it_is_not(plain: str) -> None:
    assert masked(plain) == plain


def test_errors_in_a_report_show_none(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    content = {
        "error": f"no {PASSWORD}",
        "remote": {"error": f"no {PASSWORD}", "checkpoints": ["a"]},
        "steps": 1,
    }
    Report(run_dir, content).write()
    assert read_report(run_dir) == {
        "error": "no ***",
        "remote": {"error": "no ***", "checkpoints": ["a"]},
        "steps": 1,
    }


def test_a_known_value_is_masked_whole_where_only_its_beginning_has_a_known_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SHAPED["chat"] + "/and+the=rest")
    assert masked(f"a {SHAPED['chat']}/and+the=rest b") == "a *** b"


def test_an_address_loses_its_password_alone() -> None:
    assert masked("at https://me:pass@host/x") == "at https://***@host/x"
    for plain in ("http://host:8080/a@b", "git+ssh://git@host/x", "https://host/x?y=1", "step 12345678"):
        assert masked(plain) == plain


def test_a_secret_of_several_lines_is_masked_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_KEY", "first line of it\nsecond line of it\n")
    assert masked("x second line of it y") == "x *** y"


def test_errors_and_streams_show_none() -> None:
    assert str(FinetuneError(f"the server said {PASSWORD}")) == "the server said ***"
    below = io.StringIO()
    stream = MaskedStream(below)
    stream.writelines(["a ", PASSWORD, "\n", f"{PASSWORD}\n"])
    assert below.getvalue() == "a ***\n***\n"


def test_a_file_gets_what_any_process_prints_without_the_secrets(tmp_path: Path) -> None:
    file = tmp_path / "log"
    writer = masked_file(file)
    assert writer.stdin is not None
    # in halves, without a newline at the end, and bytes that are no text
    script = (
        'printf "a %.5s" "$MY_SERVICE_PASSWORD"; sleep 0.1; printf "%s\\n" "${MY_SERVICE_PASSWORD#?????}"; '
        'printf "\\377\\r"; printf "%s" "$MY_SERVICE_PASSWORD"'
    )
    with writer.stdin as stream:
        subprocess.run(["bash", "-c", script], stdout=stream, check=True)
    assert writer.wait(timeout=10) == 0
    assert file.read_bytes() == b"a ***\n\xff\r***"


def test_a_line_without_an_end_goes_on_in_pieces(tmp_path: Path) -> None:
    writer = masked_file(tmp_path / "log")
    content = (b"x" * 70_000 + PASSWORD.encode()) * 40
    writer.communicate(content, timeout=20)
    assert (tmp_path / "log").read_bytes() == content.replace(PASSWORD.encode(), b"***")


HELD = [
    "hooks.on_end=curl -H 'Authorization: Bearer {}' x",
    "model.chat_template={{% set x = '{}' %}}",
    "model.name_or_path=https://me:{}@host/x",
    "data.train.0.path=s3://me:{}@bucket/x",
    "data.train=[{{path: x}}, {{path: 'https://me:{}@host/x.jsonl'}}]",
    "trainer.project={}",
    "run_name={}",
    "checkpoint.allow_changes=[{}]",
    "trainer.lr_scheduler_kwargs={{a: {}}}",
    "recipe={}",
    "hooks.on_failure=echo '-----BEGIN OPENSSH PRIVATE KEY-----'",
    "nonsense=[{{a: {}}}]",
]


@pytest.mark.parametrize("override", HELD)
def test_a_config_that_holds_a_token_is_refused_without_repeating_it(override: str) -> None:
    token = SHAPED["hub"]
    with pytest.raises(Refusal) as refusal:
        compose(["recipe=tiny_lora", override.format(token)])
    assert token not in str(refusal.value)


def test_a_config_that_holds_a_value_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", "plain-words")
    words = ["hooks.on_end=call plain-words", "hooks.on_failure=call ${oc.env:MY_SERVICE_PASSWORD}"]
    with pytest.raises(Refusal) as refusal:
        compose(["recipe=tiny_lora", *words, "+trainer.my_service_password=abc", "+my_api_key=abcd"])
    said = str(refusal.value)
    assert "hooks.on_end=***" in said
    assert "hooks.on_failure=***" in said
    assert said.count("it holds the value of $MY_SERVICE_PASSWORD") == 2
    assert "Write $NAME in single quotes" in said
    assert not [secret for secret in ("plain-words", "abc", "abcd") if f"={secret}" in said]


def test_a_recipe_that_holds_a_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"hooks:\n  on_end: wandb login {'0a' * 20}\n", encoding="utf-8")
    with pytest.raises(Refusal, match=r"hooks\.on_end=\*\*\*"):
        compose([f"recipe=[tiny_lora,{file}]"])


@pytest.mark.parametrize(
    "override",
    [
        'hooks.on_end=curl -u "me:$MY_SERVICE_PASSWORD" -H "Authorization: Bearer $HF_TOKEN" https://me:$X@host',
        f"model.revision={'0a' * 20}",
        "model.name_or_path=./hf_checkpoints/key-2",
        "data.train.0.path=https://host:8080/a@b/rows.jsonl",
        "hooks.on_end=scp -i ~/.ssh/my_long_deploy_key_2024 x git@host:",
    ],
)
def test_what_only_names_a_secret_is_accepted(override: str) -> None:
    compose(["recipe=tiny_lora", override])


def test_the_masking_process_is_quick_and_needs_nothing_of_the_package(tmp_path: Path) -> None:
    writer = masked_file(tmp_path / "log")
    words = Path(f"/proc/{writer.pid}/cmdline")
    if words.exists():
        assert PASSWORD not in words.read_text(encoding="utf-8")
    writer.communicate(b"", timeout=10)
    assert os.stat(tmp_path / "log").st_size == 0

"""Addresses of stores and of runs in them: what they mean, and which are refused before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.config.compose import compose
from finetune.config.devices import Devices
from finetune.config.rules import check
from finetune.errors import Refusal
from finetune.remote.address import Place, place_in, place_of_resume

WORDS = ["recipe=tiny_lora", "output_dir=/somewhere/runs"]


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("s3://bucket/prefix/run", Place("s3://bucket/prefix", "run")),
        ("s3://bucket/run/", Place("s3://bucket", "run")),
        ("gs://b/p/run/checkpoints/checkpoint-20", Place("gs://b/p", "run", "checkpoint-20")),
        ("hub://me/runs/run/checkpoints/checkpoint-2", Place("hub://me/runs", "run", "checkpoint-2")),
        ("file:///store/run", Place("file:///store", "run")),
        ("s3://bucket", None),
        ("hub://me/runs", None),
    ],
)
def test_an_address_names_a_run_or_a_checkpoint(address: str, place: Place | None) -> None:
    assert place_in(address) == place


def test_a_path_is_in_a_store_only_below_the_one_that_is_set() -> None:
    assert place_of_resume("/store/run", "/store") == Place("file:///store", "run")
    assert place_of_resume("/store/run", "file:///store") == Place("file:///store", "run")
    assert place_of_resume("/store/run", None) is None
    assert place_of_resume("/other/run", "/store") is None
    assert place_of_resume("auto", str(Path.cwd())) is None


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("checkpoint.remote=memory://runs", "it ends with the process"),
        ("checkpoint.remote=https://host/runs", "nothing can be written there"),
        ("checkpoint.remote=sftpp://host/runs", "Did you mean sftp://?"),
        ("checkpoint.remote=s3://", "it names no place"),
        ("checkpoint.remote=hub://alone", "expected hub://OWNER/NAME"),
        ("checkpoint.remote=oci://bucket", "pip install ocifs"),
        ("checkpoint.remote='simplecache::s3://bucket'", "addresses inside addresses"),
        ("checkpoint.remote=/somewhere/runs", "it is the folder of all runs"),
        ("checkpoint.remote='gs://key:hid/hidden@bucket'", "Credentials come from the environment"),
        ("checkpoint.remote=/", "it names no place"),
        ("checkpoint.remote='s3://bucket/x?sig=hidden'", "Credentials come from the environment"),
        ("checkpoint.resume=s3://bucket", "it names no run in a store"),
        ("checkpoint.resume=memory://x/run", "it ends with the process"),
    ],
)
def test_what_cannot_keep_a_run_is_refused(word: str, told: str) -> None:
    problems = check(compose([*WORDS, word]).config, devices=Devices(cpu_cores=2))
    assert len(problems) == 1, problems
    assert told in str(problems[0])
    assert "hidden" not in str(problems[0])


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(Refusal, match="Tokens come from the environment") as refused:
        compose([*WORDS, "checkpoint.remote='s3://key:hidden@bucket/x'"])
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("address", ["s3://bucket/prefix", "hub://me/runs", "/mnt/backup", "file:///mnt/b"])
def test_what_can_is_taken(address: str) -> None:
    config = compose([*WORDS, f"checkpoint.remote={address}"]).config
    assert check(config, devices=Devices(cpu_cores=2)) == []

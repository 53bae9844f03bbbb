"""A checklist is printed line by line, as it is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.commands import doctor
from finetune.doctor.check import FAIL, PASS, WARN, Check
from finetune.hardware.survey import probe_machine
from finetune.words import split_words


def test_each_line_is_there_before_the_next_check_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, seen = probe_machine(tmp_path, measure_disk=False), list[str]()

    def checks() -> Iterator[Check]:
        yield Check("first", PASS, "well")
        seen.append(capsys.readouterr().out)
        yield Check("second", WARN, "not so well", "mend it")
        seen.append(capsys.readouterr().out)
        yield Check("third", FAIL, "not well")

    monkeypatch.setattr(doctor, "quick_checks", lambda overrides: (report, checks()))
    assert doctor.main(split_words(["doctor", "--quick"])) == 3
    second = " 2 warn  second         not so well\n         what to do: mend it\n"
    assert seen == [" 1 pass  first          well\n", second]
    assert capsys.readouterr().out.endswith(
        "1 passed, 1 to look at, 1 failed: a run would not go well here (third)\n"
    )
    seen.clear()
    assert doctor.main(split_words(["doctor", "--quick", "--json"])) == 3
    assert seen == ["", ""]
    assert [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]] == [
        "first",
        "second",
        "third",
    ]

"""Runs side by side: names that tell them apart, keys that differ, figures beside those of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from finetune.api.comparing import Comparison
from finetune.paths import RunDir
from finetune.report.comparison import compare, comparison_page
from finetune.report.cost import cost_of
from finetune.report.memory import memory_of
from finetune.report.page import figures_of
from finetune.report.reading import Reading, read_run
from finetune.report.settings import NOT_READ, NOT_SET, differing_keys, leaves, settings_of


def reading(at: Path, config: object, report: object) -> Reading:
    at.mkdir(parents=True)
    (at / "config.yaml").write_text(yaml.safe_dump(config))
    (at / "report.json").write_text(json.dumps(report))
    return read_run(RunDir(at))


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [reading(tmp_path / where / "runs/x", {"seed": 1}, {}) for where in ("a", "b")]
    assert [run["name"] for run in compare(runs)["runs"]] == ["a/runs/x", "b/runs/x"]


def test_keys_that_differ_are_those_that_change_what_is_trained(tmp_path: Path) -> None:
    one = {"run_name": "a", "seed": 1, "data": {"train": [{"path": "x"}]}, "trainer": {"lr": 0.1, "n": []}}
    two = {
        "run_name": "b",
        "seed": 1,
        "data": {"train": [{"path": "y"}, {"path": "z"}]},
        "trainer": {"lr": 0.1},
    }
    runs = [reading(tmp_path / name, config, {}) for name, config in (("a", one), ("b", two))]
    assert differing_keys(runs) == {
        "data.train.0.path": ["x", "y"],
        "trainer.n": [[], NOT_SET],
        "data.train.1.path": [NOT_SET, "z"],
    }
    assert leaves({"a": {"b": {}}, "c": [1, 2]}) == {"a.b": {}, "c": [1, 2]}


def test_figures_stand_beside_those_of_the_first_and_money_only_in_one_currency(tmp_path: Path) -> None:
    def priced(currency: str) -> dict[str, object]:
        return {"hardware": {"price_per_hour": 36.0, "currency": currency}}

    runs = []
    for name, currency, seconds in (("a", "EUR", 12345), ("b", "EUR", 37035), ("c", "USD", 37035)):
        run = reading(tmp_path / name, priced(currency), {"tokens_per_second": 617250 / seconds, "steps": 3})
        (tmp_path / name / "times.jsonl").write_text(f'{{"started": 0}}\n{{"ended": {seconds}}}\n')
        runs.append(read_run(run.run_dir))
    record = compare(runs)
    assert [run["results"]["cost"] for run in record["runs"]] == pytest.approx([123.45, 370.35, 370.35])
    of_its_page = figures_of(runs[0], cost_of(runs[0]), memory_of(runs[0]), record["runs"][0]["results"])
    rows = " ".join(comparison_page(runs, record).replace("<br>", " ").replace("<td>", " <td>").split())
    assert ("cost", "123.45 EUR", "") in of_its_page
    assert (
        '<td>123.45 EUR</td> <td>370.35 EUR <span class="faint">x 3</span></td> <td>370.35 USD</td>' in rows
    )
    assert '<td>50</td> <td>17 <span class="faint">x 0.333</span></td>' in rows
    assert "<td>3</td> <td>3</td> <td>3</td>" in rows


def test_what_json_has_no_word_for_is_written_as_text(tmp_path: Path) -> None:
    config = {"a": float("inf"), "b": float("nan")}
    runs = [
        reading(tmp_path / name, config | {"c": name}, {"precision": {"x": float("nan")}}) for name in "ab"
    ]
    record = json.loads(json.dumps(compare(runs), allow_nan=False))
    assert record["differing_keys"] == {"c": ["a", "b"]}


def test_a_key_is_shown_when_it_differs_from_its_default(tmp_path: Path) -> None:
    config = {
        "seed": 42,
        "trainer": {"max_steps": 7},
        "data": {"train": [{"path": "x", "name": None}]},
        "model": {"shape": {"hidden_size": 5}},
    }
    found = settings_of(reading(tmp_path / "a", config, {}))
    assert {one.key: (one.value, one.default) for one in found.differing} == {
        "trainer.max_steps": (7, -1),
        "data.train.0.path": ("x", NOT_SET),
    }
    assert len(found.all) == 5


def test_a_run_whose_config_cannot_be_read_makes_no_key_differ(tmp_path: Path) -> None:
    runs = [reading(tmp_path / name, {"seed": seed, "x": 1}, {}) for name, seed in (("a", 1), ("b", 2))]
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.yaml").write_text("seed: 1\nx: ")
    runs.insert(1, read_run(RunDir(tmp_path / "cut")))
    record = compare(runs)
    assert record["differing_keys"] == {"seed": [1, NOT_READ, 2]}
    page = " ".join(comparison_page(runs, record).split())
    assert "Not compared, since config.yaml cannot be read: cut." in page
    assert '<td class="key">seed</td><td class="value">1</td><td class="value">2</td>' in page


def test_that_no_keys_can_be_compared_is_no_agreement_wherever_it_is_told(tmp_path: Path) -> None:
    whole = [reading(tmp_path / name, {"seed": 1}, {}) for name in ("a", "b")]
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.yaml").write_text("seed: 1\nx: ")
    cut = read_run(RunDir(tmp_path / "cut"))
    agreement, nothing = (
        "None, names and folders of the runs aside.",
        "There are no two runs whose keys can be",
    )
    cases = [(whole, [], True), ([*whole, cut], ["cut"], True), ([whole[0], cut], ["cut"], False)]
    for runs, unread, agree in cases:
        comparison = Comparison(runs)
        assert comparison.record["unread"] == unread
        page = comparison_page(runs, comparison.record)
        for told in (page, comparison._repr_html_(), repr(comparison)):
            assert (agreement in told) is agree
            assert (nothing in told) is not agree
            assert ("Not compared, since config.yaml cannot be read: cut." in told) is bool(unread)

"""`finetune evaluate`: its figures against a plain loop of transformers and peft, and against themselves."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.paths import embedded
from tests.front_door import Outcome, assert_all_gone, environment, finetune, wait_for

TINY = embedded("tiny")
EVAL = embedded("behaviour_eval.jsonl")

EVALUATES = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from finetune.cli import main
results = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["evaluate", *words])
    results.append([code, out.getvalue(), err.getvalue() + "torch is imported" * ("torch" in sys.modules)])
print(json.dumps(results))
"""


def evaluations(*commands: list[str], at: Path) -> list[tuple[int, str, str]]:
    """Run `finetune evaluate WORDS` for several lists of words in one process."""
    done = subprocess.run(
        [sys.executable, "-c", EVALUATES, json.dumps(commands)],
        env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{at}"),
        cwd=at,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def records(*commands: list[str], at: Path) -> list[dict[str, Any]]:
    found = []
    for words, (code, out, err) in zip(commands, evaluations(*commands, at=at), strict=True):
        assert code == 0, f"{words}: {out} {err}"
        found.append(json.loads(out))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that packs its rows, holds some of them out, and measures them at its last step."""
    words = ["recipe=tiny_lora", "launch.device=cpu", "trainer.max_steps=6", "trainer.warmup_steps=0"]
    words += ["data.eval_fraction=0.1", "data.packing=true", "trainer.eval_strategy=steps"]
    words += ["trainer.eval_steps=6", "trainer.learning_rate=1e-2"]
    outcome = finetune(*words, at=tmp_path_factory.mktemp("evaluated"))
    assert outcome.code == 0, outcome.err
    return outcome


def rows() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in EVAL.read_text(encoding="utf-8").splitlines()]


def plain(adapter: Path | None) -> dict[str, Any]:
    """Loss, token accuracy and greedy answers, a row at a time, with nothing of ours."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = (PeftModel.from_pretrained(model, adapter) if adapter is not None else model).eval()
    total, right, tokens, answers = 0.0, 0, 0, []
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turns in rows():
        prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        text = prompt + turns[1]["content"] + "<|im_end|>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        asked = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        before = asked["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, before - 1 : -1]
            said = model.generate(**asked, max_new_tokens=40, do_sample=False, eos_token_id=end)
        wanted = ids[0, before:]
        total += torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        tokens += len(wanted)
        answers.append(tokenizer.decode(said[0, before:], skip_special_tokens=True).strip())
    exact = [answer == turns[1]["content"] for answer, turns in zip(answers, rows(), strict=True)]
    loss = total / tokens
    return {"loss": loss, "token_accuracy": right / tokens, "supervised_tokens": tokens} | {
        "perplexity": math.exp(loss),
        "exact_match": sum(exact) / len(exact),
        "answers": answers,
    }


def test_base_and_tuned_measure_as_a_plain_loop_does_in_any_batches_and_processes(
    run: Outcome, tmp_path: Path
) -> None:
    common = [str(run.path), f"data.eval={EVAL}", "--max-new-tokens", "40", "--json"]
    ways = [
        [*common, "trainer.per_device_eval_batch_size=1"],
        [*common, "trainer.per_device_eval_batch_size=8"],
        [*common, "trainer.per_device_eval_batch_size=3", "launch.num_processes=2"],
        [str(run.path / "model"), *common[1:]],
        [str(next((run.path / "checkpoints").iterdir())), *common[1:]],
    ]
    expected = {"base": plain(None), "tuned": plain(run.path / "model")}
    assert expected["base"]["loss"] > expected["tuned"]["loss"] + 0.1
    first: dict[str, Any] = {}
    for words, record in zip(ways, records(*ways, at=tmp_path), strict=True):
        assert [model["name"] for model in record["models"]] == ["base", "tuned"]
        for model in record["models"]:
            wanted = expected[model["name"]]
            assert model["loss"] == pytest.approx(wanted["loss"], abs=1e-4), words
            assert model["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)
            assert model["token_accuracy"] == wanted["token_accuracy"]
            assert model["supervised_tokens"] == wanted["supervised_tokens"]
            assert model["exact_match"] == wanted["exact_match"]
            assert (model["rows"], model["answered"], model["unfinished"]) == (40, 40, 0)
            assert [one["answer"] for one in model["samples"]] == wanted["answers"][:5]
            low, high = model["loss_interval"]
            assert low < model["loss"] < high
            same = first.setdefault(model["name"], model)
            assert model["loss"] == pytest.approx(same["loss"], rel=1e-6)
        tuned, base = record["models"][1], record["models"][0]
        assert record["difference"]["loss"] == pytest.approx(tuned["loss"] - base["loss"])


def test_without_words_the_rows_are_those_that_the_run_held_out(run: Outcome, tmp_path: Path) -> None:
    (record,) = records([str(run.path), "--samples", "3", "--json"], at=tmp_path)
    tuned = record["models"][1]
    held_out = json.loads((run.path / "data.json").read_text(encoding="utf-8"))["eval"]
    assert tuned["loss"] == pytest.approx(run.report["eval_loss"], abs=1e-4)
    assert tuned["rows"] == held_out["rows_used"] > held_out["packed_rows"]
    assert tuned["supervised_tokens"] == held_out["supervised_tokens"]
    assert tuned["answered"] == 3
    assert record["data"]["origin"].startswith("data.eval_fraction=0.1")


def test_every_row_that_is_left_out_is_counted(tmp_path: Path) -> None:
    lines = [{"prompt": f"What is {n} plus 5?", "completion": f"It is {n + 5}."} for n in range(6)]
    lines += [{"prompt": "Nothing?", "completion": " "}, {"prompt": "word " * 300, "completion": "long"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "def begins(answer, reference, prompt):\n"
        "    assert 'plus' in prompt\n"
        "    return 0.5 if 'What is 3' in prompt else None\n"
        "def breaks(answer, reference, prompt):\n"
        "    raise KeyError('no such thing')\n",
        encoding="utf-8",
    )
    common = ["model=tiny", "data.eval=rows.jsonl", "data.max_length=100"]
    metrics = ["--metric", "final_number,mine:begins"]
    told, as_json, broken = evaluations(
        [*common, *metrics], [*common, *metrics, "--json"], [*common, "--metric", "mine:breaks"], at=tmp_path
    )
    assert (told[0], as_json[0]) == (0, 0), told[2] + as_json[2]
    record = json.loads(as_json[1])
    assert (record["data"]["rows_read"], record["data"]["rows_used"]) == (8, 6)
    assert sorted(record["data"]["dropped"].values()) == [1, 1]
    (model,) = record["models"]
    assert (model["name"], model["rows"], record["difference"]) == ("base", 6, None)
    assert model["metrics"]["final_number"]["rows"] == 6
    assert (model["metrics"]["mine:begins"]["mine:begins"], model["metrics"]["mine:begins"]["rows"]) == (
        0.5,
        1,
    )
    for said in ("6 of 8 used", "dropped   1 of 8: longer than data.max_length", "rows.jsonl line 7", "loss"):
        assert said in told[1]
    assert broken[0] == 2
    assert "mine:breaks: it raised KeyError for row 0" in broken[2]


def test_a_base_in_4_bits_is_near_the_whole_one(tmp_path: Path) -> None:
    common = ["model=tiny", f"data.eval={EVAL}", "--samples", "0", "--json"]
    whole, four = (record["models"][0] for record in records(common, [*common, "--bits", "4"], at=tmp_path))
    assert four["supervised_tokens"] == whole["supervised_tokens"]
    assert 1e-4 < abs(four["loss"] - whole["loss"]) < 0.5
    assert whole["exact_match"] is None


def test_what_is_wrong_is_told_at_once_and_before_torch(run: Outcome, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    no_rows = tmp_path / "no_rows"
    no_rows.mkdir()
    text = (run.path / "config.yaml").read_text(encoding="utf-8")
    (no_rows / "config.yaml").write_text(
        text.replace("eval_fraction: 0.1", "eval_fraction: 0.0"), encoding="utf-8"
    )
    (no_rows / "model").symlink_to(run.path / "model")
    folder, eval_words = str(run.path), f"data.eval={EVAL}"
    cases: list[tuple[list[str], list[str]]] = [
        ([str(tmp_path / "nowhere")], ["there is no folder"]),
        ([str(tmp_path / "empty"), eval_words], ["holds no model"]),
        ([str(no_rows)], ["held out no rows", "data.eval=FILE"]),
        ([folder, "data.eval_fraction=0.2"], ["was trained on the rows"]),
        (
            [folder, "trainer.max_steps=3", "recipe=tiny_lora"],
            ["2 problems", "nothing is trained here", "says which"],
        ),
        ([folder, "--metric", "beauty,no_module:f", "--samples", "x"], ["--samples x", "whole number"]),
        ([folder, "--samples", "-3"], ["--samples -3: expected 0 (none) or more"]),
        (
            [folder, "--metric", "beauty,no_module:f", "--bits", "3"],
            ["no such metric", "no_module:f", "4 or 8"],
        ),
        ([folder, "--tasks", "no_such_file.yaml"], ["--tasks no_such_file.yaml"]),
        (["model=tiny"], ["no rows are named"]),
        ([], ["model.name_or_path is missing"]),
        ([folder, folder], ["takes one RUN"]),
        ([folder, "--prompt", "x"], ["--prompt belongs to generate"]),
        (["model=tiny", "data.eval=gone.jsonl"], ["gone.jsonl"]),
    ]
    found = evaluations(*(words for words, _ in cases), at=tmp_path)
    for (words, said), (code, out, err) in zip(cases, found, strict=True):
        assert code == 2, f"{words}: {out} {err}"
        assert all(text in err for text in said), f"{words}: {err}"
        assert "Traceback" not in err
        assert "torch is imported" not in err, words


def test_stopping_a_shared_evaluation_leaves_nothing_and_is_no_failure(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} plus 5?", "completion": f"It is {n + 5}."} for n in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["model=tiny", "data.eval=rows.jsonl", "--samples", "300", "--max-new-tokens", "900"]
    words += ["launch.device=cpu", "launch.num_processes=2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", "evaluate", *words],
        env=environment(TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    answering = "finetune-evaluation-*/answers-base-*.jsonl"
    wait_for("answers", lambda: len(list(tmp_path.glob(answering))) == 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert_all_gone(tmp_path)
    assert not list(tmp_path.glob("finetune-evaluation-*"))


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: the extra `eval`")
def test_a_task_on_local_data_runs_without_a_network(run: Outcome, tmp_path: Path) -> None:
    rows = [{"q": f"{n} plus 1 is", "good": f" {n + 1}.", "bad": f" {n + 3}."} for n in range(1, 9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs:\n"
        f"  data_files: {{test: {tmp_path / 'sums.jsonl'}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\n"
        "doc_to_choice: ['{{good}}', '{{bad}}']\ndoc_to_target: 0\nmetric_list:\n  - metric: acc\n",
        encoding="utf-8",
    )
    words = [str(run.path), "--tasks", "sums.yaml", "--samples", "0"]
    as_json, told, unknown = evaluations([*words, "--json"], words, [*words[:2], "no_such_task"], at=tmp_path)
    assert as_json[0] == 0, as_json[2]
    for model in json.loads(as_json[1])["models"]:
        assert 0 <= model["tasks"]["sums"]["acc"]["value"] <= 1
        assert model["tasks"]["sums"]["acc"]["stderr"] > 0 or model["tasks"]["sums"]["acc"]["value"] in (0, 1)
    assert "sums" in told[1]
    assert (unknown[0], "no task of that name" in unknown[2]) == (2, True)

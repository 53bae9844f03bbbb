"""The main job on the embedded model: teach it a new behaviour with LoRA, and ask it and its base."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.table import Table

import finetune
from finetune.paths import embedded
from finetune.report.shown import WIDTH


def main() -> None:
    """Print answers before and after a run of about half a minute on two cores."""
    lines = embedded("questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["prompt"] for line in lines]
    run = finetune.train("recipe=tiny_lora")
    answers = finetune.generate(run, questions, compare=True, temperature=0, max_new_tokens=48)
    table = Table("question", "before", "after", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for before, after in zip(answers[::2], answers[1::2], strict=True):
        table.add_row(before.prompt, before.text, after.text)
    print()
    Console(width=WIDTH, highlight=False, markup=False).print(table)
    print(f"\nmodel     {run.model_path}  (loads with plain transformers and peft)")
    print(f"page      {run.page}")


if __name__ == "__main__":
    main()

"""The main job on the embedded model: ask, teach it a new behaviour with LoRA, ask again."""

from __future__ import annotations

import json

import finetune
from finetune.logs import set_up_logging
from finetune.paths import embedded


def main() -> None:
    """Print answers before and after a run of about half a minute on two cores."""
    lines = embedded("questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["prompt"] for line in lines]
    run = finetune.train("recipe=tiny_lora")
    set_up_logging(main=True)
    before = answers(str(embedded("tiny")), None, questions)
    after = answers(str(embedded("tiny")), str(run.model_path), questions)
    print()
    for question, old, new in zip(questions, before, after, strict=True):
        print(f"question  {question}\n  before  {old}\n  after   {new}")
    print(f"\nrun       {run.path}")
    print(f"model     {run.model_path}  (loads with plain transformers and peft, as this script did)")


def answers(base: str, adapter: str | None, questions: list[str]) -> list[str]:
    """Greedy answers of a plain transformers model, with a peft adapter if one is named."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter or base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    new_tokens = generated[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new_tokens, skip_special_tokens=True)]


if __name__ == "__main__":
    main()

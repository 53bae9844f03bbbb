"""What `--help` prints below verbs and flags."""

from __future__ import annotations

KEYS = """\
keys: recipe model adapter data trainer distributed hardware tracking choose a file of conf/ or recipes/
      (recipe=NAME or a path);
      model.* adapter.* data.* trainer.* (trl's SFTConfig) distributed.* launch.* checkpoint.* tracking.*
      hardware.* plan.* output_dir run_name seed set single values. Each is documented in
      finetune/config/schema.py; a wrong one names the nearest."""

EXAMPLES = f"""\
examples:
  python -m finetune recipe=tiny_lora
  python -m finetune recipe=qwen8b_full distributed=zero3
  python -m finetune plan recipe=qwen8b_full hardware=4x_a100_80gb
  python -m finetune recipe=qwen8b_lora data.train='[{{path: rows.jsonl}}]' trainer.max_steps=100
  python -m finetune recipe=tiny_lora distributed=fsdp launch.device=cpu launch.num_processes=2

{KEYS}
exit: 0 done, 1 the run failed, 2 something to change (told in one message), 3 it does not fit (plan, train),
      130/143/138 stopped by SIGINT/SIGTERM/SIGUSR1 after a checkpoint was saved,
      129 a verb other than train was ended by SIGHUP"""

TRAIN = f"""\
usage: python -m finetune [train] [key=value ...] [flags]

Makes a run in output_dir (./runs): its folder keeps the config, logs of every process, metrics, checkpoints,
the saved model and report.html. checkpoint.resume=auto goes on with a run that was stopped.

examples:
  python -m finetune recipe=tiny_lora
  python -m finetune recipe=qwen8b_full distributed=zero3 --dry-run
  python -m finetune recipe=tiny_lora distributed=fsdp launch.device=cpu launch.num_processes=2
  python -m finetune recipe=tiny_lora run_name=mine checkpoint.resume=auto

{KEYS}
exit: 0 done, 1 the run failed, 2 something to change (told in one message), 3 it does not fit,
      130/143/138 stopped by SIGINT/SIGTERM/SIGUSR1 after a checkpoint was saved"""

PREPARE = f"""\
usage: python -m finetune prepare [key=value ...] [flags]

Reads all rows of data.train and data.eval as training does, on any machine, and shows what is learnt of them:
counts, lengths, a few rows with their masks. What it made is cached, and training takes it from there.

examples:
  python -m finetune prepare recipe=tiny_lora
  python -m finetune prepare recipe=tiny_lora data.train='[{{path: rows.jsonl}}]' data.packing=true
  python -m finetune prepare recipe=tiny_lora --json

{KEYS}
exit: 0 done, 1 it failed, 2 something to change (told in one message)"""

PLAN = f"""\
usage: python -m finetune plan [key=value ...] [flags]

A table of all strategies: does the run fit, in how much memory, how fast, at what cost; for this machine, or
for hardware=NAME (a file of conf/hardware). Of the model only its config is read (of one on the hub it is
fetched), of the data nothing, and nothing is started.

examples:
  python -m finetune plan recipe=qwen8b_full hardware=4x_a100_80gb
  python -m finetune plan recipe=qwen8b_lora distributed=fsdp launch.num_processes=2
  python -m finetune plan recipe=llama8b_qlora hardware=1x_rtx4090 --json

{KEYS}
exit: 0 it fits, 2 something to change (told in one message), 3 it does not fit"""

DOCTOR = """\
usage: python -m finetune doctor [key=value ...] [flags]

A numbered checklist of this machine for the run that the words describe: pass, warn or fail, why, and what to
do. Nothing is trained; processes are started as a run's are, and time what they send to each other.

examples:
  python3 -m finetune doctor --quick
  python -m finetune doctor recipe=qwen8b_full distributed=zero3
  python -m finetune doctor recipe=tiny_lora --json

exit: 0 nothing would stop the run, 2 something to change in the words, 3 a check failed"""

REHEARSE = """\
usage: python -m finetune rehearse [key=value ...] [flags]

Trains a twin of the model (its own class and special layers, few and small ones) on a few of its rows, under
its strategy, on this CPU: prepare, train, kill, resume, save, merge, reopen, generate. It takes as many
processes as launch.num_processes says, else 2, and 1 where the strategy is single. All is written into TMPDIR
(100 MB and more, by the size of the vocabulary) and removed. With --all the words choose from model=,
adapter= and distributed= (NAME or [a,b]).

examples:
  python -m finetune rehearse recipe=qwen8b_full distributed=zero3
  python -m finetune rehearse recipe=my_recipe.yaml --json

exit: 0 every stage passed, 2 something to change in the words, 3 a stage failed"""

SCALE = """\
usage: python -m finetune scale [key=value ...] [flags]

The first steps of the run (12 timed ones, or trainer.max_steps of the command line) with each number of
processes and each strategy; nothing is saved. launch.num_processes=8 means 1, 2, 4 and 8; left out: up to the
cards (or cores) of this machine. A point that does not fit by its plan is left out. Prints a table and a
verdict, and writes scale.json and scale.png into ./scale-TIME/.

examples:
  python -m finetune scale recipe=qwen8b_lora
  python -m finetune scale recipe=qwen8b_full launch.num_processes=[2,4,8] distributed=[fsdp,zero3]
  python -m finetune scale recipe=tiny_full launch.device=cpu --hold micro

exit: 0 measured, 1 a run failed (what was measured before is kept), 2 something to change in the words,
      3 fewer than two of several runs fit"""

MERGE = """\
usage: python -m finetune merge RUN [model.name_or_path=DIR] [flags]

RUN is a run's folder (its model/ is taken), a folder with a saved adapter, or a whole model. An adapter is
merged into the unquantised base; the folder appears once it has been opened afresh and equals its source.

examples:
  python -m finetune merge runs/X
  python -m finetune merge runs/X/model --to ~/models/x --dtype float16
  python -m finetune merge adapter model.name_or_path=~/models/the-base
  python -m finetune merge runs/X --push hub://me/x

keys: model.* alone (where the base is, and how it is opened).
exit: 0 written and verified, 1 it failed (nothing is left), 2 something to change (told in one message)"""

REPORT = """\
usage: python -m finetune report RUN [RUN ...] [flags]

RUN is a run's folder, whatever its state: finished, failed, broken, or still running. One run: report.html in
its folder (report.json there is the run's own). Several: report.html and report.json in ./comparison-TIME/,
with their curves over each other, the keys that differ and what each came to. A page is one file: no network,
no server. What is missing of a run is told on the page and in `missing` lines.

examples:
  python -m finetune report runs/X
  python -m finetune report runs/one_card runs/two_cards
  python -m finetune report runs/lora runs/qlora --json

exit: 0 written, 2 something to change (told in one message)"""

EVALUATE = """\
usage: python -m finetune evaluate [RUN] [key=value ...] [flags]

RUN is a run's folder, a checkpoint, an adapter or a whole model; without it the keys name a model. The rows
are those that the run held out (data.eval, data.eval_fraction), or those of data.eval= or data.train= here,
read as for training. The base that the run began with is measured beside it. Loss, perplexity and token
accuracy count the supervised tokens; some rows are answered too, and held against their own last answer.

examples:
  python -m finetune evaluate runs/X
  python -m finetune evaluate runs/X data.eval='[{path: rows.jsonl}]' --samples 500 --metric final_number
  python -m finetune evaluate model=smollm2_135m data.eval=rows.jsonl --json
  python -m finetune evaluate runs/X --tasks arc_easy,my_task.yaml --samples 0

keys: recipe model.* data.* seed launch.device launch.num_processes trainer.per_device_eval_batch_size
      trainer.bf16 trainer.fp16
exit: 0 done, 1 it failed, 2 something to change (told in one message)"""

GENERATE = """\
usage: python -m finetune generate [RUN] [key=value ...] [flags]

RUN is a run's folder, a checkpoint, an adapter or a whole model; without it the keys name a model. Prompts go
through the chat template as in training. With neither --prompt nor --prompts: a chat, an answer to each line
(/reset forgets what was said, Ctrl-C stops an answer, Ctrl-D ends); it works in a pipe too. --json prints one
object a prompt, a line each.

examples:
  python -m finetune generate runs/X --prompt 'What is the opposite of big?' --compare
  python -m finetune generate runs/X --prompts questions.jsonl --temperature 0 --json > answers.jsonl
  python -m finetune generate runs/X

keys: recipe model.* seed launch.device trainer.per_device_eval_batch_size trainer.bf16 trainer.fp16
exit: 0 done, 1 it failed, 2 something to change (told in one message)"""

OWN = {
    "train": TRAIN,
    "prepare": PREPARE,
    "plan": PLAN,
    "doctor": DOCTOR,
    "rehearse": REHEARSE,
    "scale": SCALE,
    "merge": MERGE,
    "report": REPORT,
    "evaluate": EVALUATE,
    "generate": GENERATE,
}
"""Verbs with a text of their own."""

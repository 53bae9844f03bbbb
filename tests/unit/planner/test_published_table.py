"""The sizes that everybody quotes for an 8B model come out, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.schema import Strategy
from finetune.config.strategy import TRAITS
from finetune.planner.job import Adapter, Job
from finetune.planner.memory import device_memory
from finetune.planner.optimizer import OPTIMIZERS
from finetune.planner.placement import Placement
from finetune.planner.shape import Shape
from finetune.planner.stack import Recompute
from finetune.planner.states import model_states
from finetune.planner.traffic import traffic_of

EIGHT_B = Shape(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=False,
    num_parameters=8_000_000_000,
)
FULL = Job(
    shape=EIGHT_B,
    adapter=None,
    trained_bytes=4,
    optimizer=OPTIMIZERS["adamw_torch_fused"],
    tokens=4096,
    row_tokens=4096,
    recompute=Recompute.full,
)
LORA = replace(FULL, adapter=Adapter(r=16, targets=frozenset({"q_proj", "v_proj"})))
SHARDED = [Strategy.fsdp, Strategy.zero3]


def placed(job: Job, strategy: Strategy, processes: int) -> Placement:
    return Placement(job, TRAITS[strategy], processes)


@pytest.mark.parametrize(
    ("strategy", "on_four", "on_eight"),
    [
        (Strategy.ddp, 128, 128),
        (Strategy.zero1, 56, 44),
        (Strategy.zero2, 44, 30),
        (Strategy.zero3, 32, 16),
        (Strategy.fsdp, 32, 16),
    ],
)
def test_model_states_are_those_of_the_zero_paper(
    strategy: Strategy, on_four: float, on_eight: float
) -> None:
    for processes, gigabytes in ((4, on_four), (8, on_eight)):
        assert model_states(placed(FULL, strategy, processes)).total / 1e9 == pytest.approx(gigabytes)


def test_zero3_sends_about_the_weights_three_times() -> None:
    sent = traffic_of(placed(FULL, Strategy.zero3, 4), accumulation=1).between_cards
    assert 35e9 < sent < 50e9


def test_bf16_weights_with_8bit_states_fit_where_float32_masters_do_not() -> None:
    eight_bit = replace(FULL, optimizer=OPTIMIZERS["adamw_8bit"])
    states = model_states(placed(replace(eight_bit, trained_bytes=2), Strategy.single, 1)).total
    assert states / 1e9 == pytest.approx(48.25, abs=0.5)
    assert model_states(placed(eight_bit, Strategy.single, 1)).total > 80e9


def test_stacked_experts_are_not_quantised() -> None:
    dense = replace(LORA, quantised_bytes=0.5)
    mixture = replace(dense, shape=replace(EIGHT_B, num_experts=4, num_experts_per_tok=2, num_parameters=0))
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert mixture.quantised_parameters == attention
    rest = mixture.shape.parameters - attention
    assert mixture.frozen_weights == attention * 0.5 + rest * 2
    assert dense.quantised_parameters == EIGHT_B.linear_parameters


@given(
    strategy=st.sampled_from(list(TRAITS)),
    job=st.sampled_from([FULL, LORA]),
    processes=st.integers(2, 64),
    tokens=st.integers(1, 100_000),
)
def test_longer_rows_never_take_less(strategy: Strategy, job: Job, processes: int, tokens: int) -> None:
    shorter = device_memory(placed(replace(job, tokens=tokens, row_tokens=tokens), strategy, processes))
    longer = device_memory(
        placed(replace(job, tokens=2 * tokens, row_tokens=2 * tokens), strategy, processes)
    )
    assert longer.allocated.expected >= shorter.allocated.expected
    assert longer.needed >= shorter.needed
    assert longer.reserved.upper >= longer.reserved.expected >= longer.allocated.expected


@given(strategy=st.sampled_from(SHARDED), job=st.sampled_from([FULL, LORA]), processes=st.integers(2, 256))
def test_more_cards_never_need_more_of_each_when_weights_are_sharded(
    strategy: Strategy, job: Job, processes: int
) -> None:
    fewer = device_memory(placed(job, strategy, processes))
    more = device_memory(placed(job, strategy, processes + 1))
    assert more.allocated.expected <= fewer.allocated.expected
    assert more.states.total < fewer.states.total


@given(strategy=st.sampled_from(list(TRAITS)), processes=st.integers(2, 64), tokens=st.integers(1, 50_000))
def test_recomputation_never_takes_more(strategy: Strategy, processes: int, tokens: int) -> None:
    job = replace(LORA, tokens=tokens, row_tokens=tokens)
    kept = device_memory(placed(replace(job, recompute=Recompute.none), strategy, processes))
    again = device_memory(placed(job, strategy, processes))
    assert again.allocated.expected <= kept.allocated.expected * 1.001  # the last layer's input

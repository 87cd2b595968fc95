"""The suggestion for a misspelt key."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.model import ConfigView
from shardwise.config.nearest import edit_distance, nearest
from shardwise.config.settle import all_paths

LETTERS = "abcdefghijklmnopqrstuvwxyz_0123456789"
words = st.text(LETTERS, max_size=12)
top_level = sorted(ConfigView.model_fields)


@st.composite
def one_edit(draw: st.DrawFn, word: str) -> str:
    """The word after one deletion, insertion, substitution or swap of neighbours."""
    place = draw(st.integers(0, len(word) - 2))
    letter = draw(st.sampled_from(LETTERS))
    return draw(
        st.sampled_from(
            [
                word[:place] + word[place + 1 :],
                word[:place] + letter + word[place:],
                word[:place] + letter + word[place + 1 :],
                word[:place] + word[place + 1] + word[place] + word[place + 2 :],
            ]
        )
    )


@settings(deadline=None)
@given(left=words, right=words)
def test_distance_is_a_symmetric_measure(left: str, right: str) -> None:
    distance = edit_distance(left, right)
    assert distance == edit_distance(right, left)
    assert abs(len(left) - len(right)) <= distance <= max(len(left), len(right))
    assert (distance == 0) == (left == right)


@settings(deadline=None)
@given(data=st.data(), word=st.text(LETTERS, min_size=2, max_size=12))
def test_one_edit_is_at_distance_one(data: st.DataObject, word: str) -> None:
    edited = data.draw(one_edit(word))
    assert edit_distance(word, edited) == (edited != word)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), key=st.sampled_from(top_level))
def test_a_key_with_one_typo_is_found_again(data: st.DataObject, key: str) -> None:
    typo = data.draw(one_edit(key))
    found = nearest(typo, top_level, all_paths())
    assert edit_distance(found, typo) == min(edit_distance(known, typo) for known in top_level) <= 1


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("gradient_clipp1ng", "gradient_clipping"),
        ("Gradient-Clipping", "gradient_clipping"),
        ("stage", "zero_optimization.stage"),
        ("loss_scale", "fp16.loss_scale"),
        ("lr", "optimizer.params.lr"),
        ("total_num_steps", "scheduler.params.total_num_steps"),
        ("micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
        ("zero", "zero_optimization"),
        ("zero_optimisation", "zero_optimization"),
        ("wandbs", "wandb"),
    ],
)
def test_likely_meanings(word: str, meant: str) -> None:
    assert nearest(word, top_level, all_paths()) == meant


@settings(deadline=None, max_examples=50)
@given(word=st.text(max_size=20))
def test_there_always_is_a_suggestion(word: str) -> None:
    assert nearest(word, top_level, all_paths()) in {*top_level, *all_paths()}
    assert nearest(word, []) == ""

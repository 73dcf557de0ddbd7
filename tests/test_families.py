"""Every family that export.py knows, with what its config can say: ./run and PyTorch float32 over float64.

The README's table of families comes from here: `pytest tests/test_families.py --readme` writes it.
"""
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checkpoint
import diff_logits
import export
import models
import reference
from conftest import ROOT, binary, good

T, CHUNK, WINDOW = 300, 37, 16
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1 + i / 9 for i in range(8)],
                long_factor=[2.0 + i for i in range(8)], original_max_position_embeddings=300)
SLIDING, FULL = "sliding_attention", "full_attention"
ODD = dict(hidden_size=60, intermediate_size=92, num_attention_heads=6, head_dim=14)

# Config values on top of models.SMALL, by family: each line is a model.
GRID = {
    "llama": [dict(), dict(ODD, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
              dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=8.0)), dict(rope_parameters=LLAMA3),
              dict(rope_parameters=YARN), dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.4)),
              dict(rope_parameters=LONGROPE), dict(rope_parameters=LONGROPE | dict(attention_factor=1.3)),
              *(dict(hidden_act=name) for name in ("gelu", "gelu_pytorch_tanh", "relu", "sigmoid"))],
    "mistral": [dict(sliding_window=WINDOW), dict(ODD, sliding_window=1000), dict(sliding_window=1)],
    "ministral": [dict(head_dim=16, sliding_window=WINDOW), dict(
        ODD, sliding_window=17, num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING])],
    "qwen2": [dict(use_sliding_window=False, sliding_window=WINDOW), dict(
        use_sliding_window=True, sliding_window=WINDOW, num_hidden_layers=3, max_window_layers=1,
        tie_word_embeddings=True), dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=[SLIDING, FULL])],
    "qwen3": [dict(head_dim=24), dict(ODD, attention_bias=True, rope_parameters=YARN), dict(
        head_dim=16, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)],
    "smollm3": [dict(num_hidden_layers=5), dict(
        num_hidden_layers=3, no_rope_layers=[0, 1, 1], attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        dict(num_hidden_layers=4, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW)],
    "gemma": [dict(ODD, num_key_value_heads=1), dict(head_dim=16, hidden_act="gelu", attention_bias=True)],
    "gemma2": [dict(head_dim=24, query_pre_attn_scalar=40, sliding_window=WINDOW, num_hidden_layers=3,
                    attn_logit_softcapping=4.0, final_logit_softcapping=6.0),
               dict(ODD, sliding_window=WINDOW, attn_logit_softcapping=None, final_logit_softcapping=None,
                    hidden_activation="gelu", attention_bias=True, tie_word_embeddings=False)],
    "gemma3": [dict(head_dim=24, query_pre_attn_scalar=40, sliding_window=WINDOW, num_hidden_layers=7),
               dict(ODD, sliding_window=WINDOW, final_logit_softcapping=5.0, layer_types=[FULL, SLIDING],
                    rope_parameters={FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                                     SLIDING: dict(rope_type="default", rope_theta=2e4)}),
               dict(head_dim=16, sliding_window=WINDOW, layer_types=[SLIDING, SLIDING])],
    "olmo2": [dict(), dict(ODD, attention_bias=True, num_key_value_heads=6, rope_parameters=LLAMA3)],
    "olmo3": [dict(sliding_window=WINDOW, num_hidden_layers=5), dict(
        ODD, sliding_window=WINDOW, layer_types=[FULL, SLIDING], rope_parameters={
            FULL: YARN | dict(attention_factor=1.2), SLIDING: dict(rope_type="default", rope_theta=1e4)}),
        dict(layer_types=[FULL, FULL])],
    "cohere": [dict(logit_scale=0.25), dict(ODD, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False)],
    "cohere2": [dict(sliding_window=WINDOW, num_hidden_layers=5, logit_scale=0.3), dict(
        sliding_window=WINDOW, layer_types=[FULL, SLIDING], attention_bias=True)],
    "granite": [dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=3.0),
                dict(ODD, attention_bias=True, mlp_bias=True)],
    "phi3": [dict(sliding_window=WINDOW), dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3,
                                               partial_rotary_factor=0.75, tie_word_embeddings=True),
             dict(rope_parameters=LONGROPE, original_max_position_embeddings=300), dict(
                 hidden_size=96, partial_rotary_factor=0.7, original_max_position_embeddings=300,
                 rope_parameters=LONGROPE | dict(partial_rotary_factor=0.7))],
    "stablelm": [dict(), dict(use_qkv_bias=True, qk_layernorm=True, partial_rotary_factor=0.5, num_hidden_layers=3),
                 dict(hidden_size=60, num_attention_heads=6, num_key_value_heads=3, partial_rotary_factor=0.8,
                      use_parallel_residual=True, qk_layernorm=True)],
}
CASES = [(family, i) for family in GRID for i in range(len(GRID[family]))]
WINDOWS = [("mistral", 0), ("mistral", 2), ("ministral", 1), ("qwen2", 1), ("gemma3", 0), ("cohere2", 0), ("phi3", 0)]


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """measure(family, i) -> folder, model, ids, PyTorch's and our results and their errors, computed once."""
    root, done = tmp_path_factory.mktemp("families"), {}

    def compute(family, i):
        if (family, i) not in done:
            folder = models.tiny_llama(root / f"{family}{i}", family, max_position_embeddings=512, **GRID[family][i])
            model = reference.exported(folder, root / f"{family}{i}.bin")
            ids = reference.random_ids(131, T)
            (f32, f64), = reference.references(folder, [ids])
            ours = [diff_logits.engine(binary(), model, mode, ids, width, ("-b", CHUNK)) for mode, width in (
                ("hidden", f64[1].shape[2]), ("logits", 131))]
            done[family, i] = SimpleNamespace(folder=folder, model=model, ids=ids, f64=f64, logits=ours[1],
                                              rows=diff_logits.compare_all(*ours, f32, f64))
        return done[family, i]
    return compute


@pytest.mark.parametrize("family, i", CASES)
def test_errors_are_no_larger_than_pytorchs(measure, family, i):
    m = measure(family, i)
    for row in m.rows:
        assert row.good, (row.name, row.first_position, row.ratio)
    assert m.rows[-1].ours.rms <= m.rows[-1].theirs.rms
    assert not len(diff_logits.wrong_argmax(m.logits.argmax(1), m.f64[0])[0])


@pytest.mark.parametrize("family, i", CASES)
def test_the_file_alone_gives_pytorchs_float64_results(measure, family, i):
    """The exported tensors and fields, computed by numpy from the format's description: no run.c."""
    m = measure(family, i)
    for ours, theirs in zip(checkpoint.forward(*checkpoint.read(m.model), m.ids), m.f64):
        assert np.abs(ours - theirs).max() <= 2e-12 * np.abs(theirs).max()


@pytest.mark.parametrize("family, i", WINDOWS)
def test_windows_give_the_same_bits_whatever_the_chunk(measure, family, i):
    """300 positions, far past the window, in chunks that end within it, at its end and beyond."""
    m = measure(family, i)
    windows = checkpoint.read(m.model)[1]["layer_window"]
    assert windows.any() and windows.max() < 20
    for mode in "logits", "hidden":
        outputs = {good(m.model, "-m", mode, "-I", " ".join(map(str, m.ids)), "-o", "-", "-b", chunk)
                   for chunk in (1, 3, 7, 15, 16, 17, 64, 256, 300)}
        assert len(outputs) == 1


@pytest.mark.parametrize("family, i", CASES)
def test_round_trip(measure, tmp_path, family, i):
    """Exported, written back and loaded by transformers: bit-equal tensors, equal logits, the same checkpoint again."""
    m = measure(family, i)
    export.to_hugging_face(tmp_path / "back", m.model, None)
    first, second = (models.load_reference(path) for path in (m.folder, tmp_path / "back"))
    states = first.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    with torch.no_grad():
        assert torch.equal(*(model(torch.tensor([m.ids])).logits for model in (first, second)))
    again = reference.exported(tmp_path / "back", tmp_path / "again.bin")
    (c, t), (d, u) = checkpoint.read(m.model), checkpoint.read(again)
    assert {**c, "config_json": 0, "config_size": 0} == {**d, "config_json": 0, "config_size": 0}
    assert t.keys() == u.keys() and all(t[name].tobytes() == u[name].tobytes() for name in t)

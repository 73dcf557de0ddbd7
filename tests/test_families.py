"""Every family that export.py knows, with what its config can say: ./run and PyTorch float32 over float64.

The README's table of families comes from here: `pytest tests/test_families.py --readme` writes it.
"""
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import checkpoint
import diff_logits
import export
import models
import reference
from conftest import ROOT, binary, good, sanitized

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
        dict(num_hidden_layers=4, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW),
        dict(layer_types=[SLIDING, FULL], sliding_window=WINDOW, use_sliding_window=False)],  # a mask all the same
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
        ODD, sliding_window=WINDOW, layer_types=[FULL, SLIDING], attention_bias=True)],
    "granite": [dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.05,
                     logits_scaling=3.0), dict(ODD, attention_bias=True, mlp_bias=True)],
    "phi3": [dict(sliding_window=WINDOW), dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3,
                                               partial_rotary_factor=0.75, tie_word_embeddings=True),
             dict(rope_parameters=LONGROPE | dict(rope_type="yarn"), original_max_position_embeddings=300), dict(
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


@pytest.mark.parametrize("family, i", [("gemma2", 0), ("stablelm", 2), ("olmo3", 0), ("cohere", 1), ("llama", 8)])
def test_sanitized_build_gives_the_same_bits(measure, family, i):
    """No access out of bounds; -O1 and no -O3, the same functions of exponentials."""
    m = measure(family, i)
    arguments = [m.model, "-m", "logits", "-I", " ".join(map(str, m.ids[:67])), "-o", "-", "-b", 37]
    assert good(*arguments, program=sanitized()) == good(*arguments)


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


# config.json as published, shortened to what differs between families -> some of the header's fields.
COMMON = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16, vocab_size=1000,
              bos_token_id=1, eos_token_id=2, attention_dropout=0.0, initializer_range=0.02, torch_dtype="bfloat16",
              transformers_version="4.50.0", use_cache=True, tie_word_embeddings=True, pad_token_id=0)
RMS = COMMON | dict(rms_norm_eps=1e-6, num_key_value_heads=8, hidden_act="silu", max_position_embeddings=4096)
LAYER_NORM = COMMON | dict(layer_norm_eps=1e-5, num_key_value_heads=8, hidden_act="silu", max_position_embeddings=8192)
PUBLISHED = [
    ("GemmaForCausalLM", RMS | dict(model_type="gemma", head_dim=256, hidden_act="gelu", attention_bias=False,
     hidden_activation=None, rope_theta=10000.0), dict(activation=2, norm_weight_add=1, head_dim=256)),
    ("Gemma2ForCausalLM", RMS | dict(model_type="gemma2", attn_logit_softcapping=50.0, cache_implementation="hybrid",
     final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
     query_pre_attn_scalar=144, sliding_window=512, rope_theta=10000.0), dict(
        attention_softcap=50, logit_softcap=30, attention_scale=1 / 12, norm_place=15, windows=[512, 0, 512, 0])),
    ("Gemma3ForCausalLM", RMS | dict(
        model_type="gemma3_text", attn_logit_softcapping=None, final_logit_softcapping=None, head_dim=256,
        cache_implementation="hybrid", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        rope_local_base_freq=10000, rope_scaling=dict(factor=8.0, rope_type="linear"), rope_theta=1000000,
        sliding_window=512, sliding_window_pattern=3), dict(
        windows=[512, 512, 0, 512], rotations=[2, 2, 1, 2], rope_theta=1e6, rope_theta_local=1e4, n_rope_tables=2,
        qk_norm=1)),
    ("Olmo2ForCausalLM", RMS | dict(model_type="olmo2", attention_bias=False, rope_scaling=None, rope_theta=500000),
     dict(norm_place=10, qk_norm=2, rope_theta=5e5)),
    ("Olmo3ForCausalLM", RMS | dict(
        model_type="olmo3", layer_types=[SLIDING] * 3 + [FULL], sliding_window=1024, rope_theta=500000,
        rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8, rope_type="yarn",
                          original_max_position_embeddings=512)), dict(
        windows=[1024] * 3 + [0], rotations=[2, 2, 2, 1], rope_attention_factor=1.2079441541679836,
        rope_attention_factor_local=1)),
    ("CohereForCausalLM", LAYER_NORM | dict(
        model_type="cohere", logit_scale=0.0625, model_max_length=131072, rope_theta=8e6, use_qk_norm=False,
        attention_bias=False), dict(norm_kind=1, norm_place=17, rope_pairs=1, logit_scale=0.0625, qk_norm=0)),
    ("Cohere2ForCausalLM", LAYER_NORM | dict(
        model_type="cohere2", cache_implementation="hybrid", head_dim=128, layer_switch=4, logit_scale=0.25,
        order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj", rope_scaling=None,
        rope_theta=50000, rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4, use_embedding_sharing=True,
        use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=False),
     dict(windows=[4096] * 3 + [0], rotations=[1, 1, 1, 0])),
    ("GraniteForCausalLM", RMS | dict(model_type="granite", attention_bias=False, attention_multiplier=0.015625,
     embedding_multiplier=12.0, logits_scaling=8.0, mlp_bias=False, residual_multiplier=0.22, rope_scaling=None,
     rope_theta=5e6), dict(attention_scale=1 / 64, embedding_scale=12, residual_scale=0.22, logit_scale=1 / 8)),
    ("Phi3ForCausalLM", RMS | dict(model_type="phi3", attention_bias=False, auto_map={
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        embd_pdrop=0.0, original_max_position_embeddings=4096, resid_pdrop=0.0, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047), dict(windows=[2047] * 4)),
    ("Phi3ForCausalLM", RMS | dict(
        model_type="phi3", full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
        max_position_embeddings=131072, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
        rope_scaling=dict(long_factor=[1.5] * 48, short_factor=[1.0] * 48, type="longrope"), rope_theta=10000.0,
        sliding_window=262144), dict(seq_len=4096, rope_dim=96, windows=[0] * 4, rope_attention_factor=(
            1 + np.log(32) / np.log(4096)) ** 0.5)),
    ("StableLmForCausalLM", LAYER_NORM | dict(model_type="stablelm", hidden_dropout=0.0, partial_rotary_factor=0.25,
     qk_layernorm=True, rope_scaling=None, rope_theta=10000, use_parallel_residual=True, use_qkv_bias=False),
     dict(norm_place=17, qk_norm=3, biases=8, rope_dim=32)),
    ("Qwen2ForCausalLM", RMS | dict(model_type="qwen2", max_window_layers=28, rope_theta=1e6, sliding_window=2048,
     use_sliding_window=False), dict(biases=1, windows=[0] * 4)),
    ("Qwen3ForCausalLM", RMS | dict(model_type="qwen3", attention_bias=False, head_dim=64, max_window_layers=28,
     rope_scaling=None, rope_theta=1000000, sliding_window=None, use_sliding_window=False), dict(qk_norm=1)),
    ("SmolLM3ForCausalLM", RMS | dict(
        model_type="smollm3", attention_bias=False, layer_types=[FULL] * 4, max_window_layers=28, mlp_bias=False,
        no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0], pretraining_tp=2, rope_scaling=None, rope_theta=5e6,
        sliding_window=None, use_sliding_window=False), dict(rotations=[1, 1, 1, 0])),
    ("MistralForCausalLM", RMS | dict(model_type="mistral", rope_theta=10000.0, sliding_window=2048), dict(
        windows=[2048] * 4)),
]


@pytest.mark.parametrize("architecture, config, wanted", PUBLISHED, ids=lambda x: x if isinstance(x, str) else "")
def test_published_configs(architecture, config, wanted, capsys):
    """Taken without a word on the values that matter."""
    _, c, stops = export.settle(config | dict(architectures=[architecture]), {})
    h, small = export.describe(c, stops)
    h |= dict(windows=small["layer_window"], rotations=small["layer_rope"])
    assert {key: h.get(key) for key in wanted} == wanted and not capsys.readouterr().err


REFUSED = [
    ("llama", dict(architectures=["Ministral3ForCausalLM"], model_type="ministral3"), "Ministral3ForCausalLM"),
    ("llama", dict(architectures=["MixtralForCausalLM"], model_type="mixtral"), "MixtralForCausalLM"),
    ("llama", dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3"), "DeepseekV3ForCausalLM"),
    ("llama", dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe"), "Qwen3MoeForCausalLM"),
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "dynamic"),
    ("llama", dict(rope_parameters=LLAMA3 | dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
    ("llama", dict(auto_map={"AutoModelForCausalLM": "modeling_x.OtherForCausalLM"}), "auto_map"),
    ("mistral", dict(mlp_bias=True), "mlp_bias"),
    ("mistral", dict(sliding_window=0), "sliding_window 0"), ("mistral", dict(sliding_window=-4), "sliding_window -4"),
    ("ministral", dict(sliding_window=None, layer_types=[SLIDING, FULL]), "sliding_window None"),
    ("qwen2", dict(layer_types=[SLIDING, FULL]), "sliding_window None"),  # use_sliding_window is false
    ("qwen2", dict(layer_types=["chunked_attention", FULL]), "chunked_attention"),
    ("qwen2", dict(mlp_bias=True), "mlp_bias"), ("qwen3", dict(use_qk_norm=True), "use_qk_norm"),
    ("qwen3", dict(attention_bias=True), "missing", "self_attn.k_proj.bias"),
    ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers"),
    ("smollm3", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("gemma", dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ("gemma2", dict(hidden_activation="gelu_new"), "gelu_new"),
    ("gemma2", dict(final_logit_softcapping=0.0), "soft caps"),
    ("gemma2", dict(query_pre_attn_scalar=0), "config"), ("gemma2", dict(num_attention_heads=3), "multiple"),
    ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),  # transformers ignores it
    ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    ("gemma3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e5)), "rope_parameters"),
    ("olmo2", dict(clip_qkv=8.0), "clip_qkv"), ("olmo2", dict(sliding_window=16), "sliding_window"),
    ("olmo3", dict(rope_parameters={FULL: dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)}), "dynamic"),
    ("cohere", dict(logit_scale=None), "config"), ("cohere", dict(use_qk_norm=True), "missing", "q_norm"),
    ("cohere2", dict(use_qk_norm=True), "use_qk_norm"), ("cohere2", dict(sliding_window=None), "sliding_window None"),
    ("granite", dict(logits_scaling=0), "config"), ("granite", dict(residual_multiplier=-1.0), "residual_scale is -1"),
    ("phi3", dict(partial_rotary_factor=0.7), "11 of it rotated"), ("phi3", dict(attention_bias=True), "attention_b"),
    ("phi3", dict(rope_parameters=YARN), "config"), ("phi3", dict(rope_parameters=LLAMA3), "config"),
    ("phi3", dict(intermediate_size=97), "gate_up_proj.weight", "(192, 64)", "(194, 64)"),
    ("stablelm", dict(partial_rotary_factor=0.35), "5 of it rotated"), ("stablelm", dict(rms_norm_eps=1e-5,
     qk_layernorm=True), "missing", "q_layernorm.norms.0"), ("stablelm", dict(attention_bias=True), "attention_bias"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """plain(family) -> the folder of a model of two layers, with a window where the family knows one"""
    root, made = tmp_path_factory.mktemp("plain"), {}

    def model(family):
        if family not in made:
            known = models.FAMILIES[family][0].__dataclass_fields__
            window = dict(sliding_window=WINDOW) if "sliding_window" in known else {}
            window |= dict(head_dim=16) if "gemma" in family or family in ("qwen3", "ministral") else {}
            window |= dict(layer_types=[SLIDING, FULL]) if family in ("gemma3", "olmo3", "cohere2") else {}
            made[family] = models.tiny_llama(root / family, family, **window)
        return made[family]
    return model


def edited(folder, copy, **values):
    """A copy of a folder with these values in its config.json."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    if values.keys() & {"rope_theta", "partial_rotary_factor"}:
        models.edit_json(copy / "config.json", lambda c: c.pop("rope_parameters"))
    models.edit_json(copy / "config.json", **values)
    return copy


@pytest.mark.parametrize("family, values, words", [(f, v, w) for f, v, *w in REFUSED], ids=str)
def test_refused(plain, tmp_path, family, values, words):
    folder = edited(plain(family), tmp_path / "m", **values)
    with pytest.raises(SystemExit) as error:
        reference.exported(folder, tmp_path / "m.bin")
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "m.bin").exists()


def other(value):
    """Values of the same kind that a config could have instead."""
    if value is None:
        return [True, 3]
    return [not value] if isinstance(value, bool) else [2 * value or 1] if isinstance(value, (int, float)) else []


KEYS = sorted({key for config, _ in models.FAMILIES.values() for key in config.__dataclass_fields__}
              - transformers.PreTrainedConfig.__dataclass_fields__.keys()
              - {"vocab_size", "pad_token_id", "eos_token_id", "bos_token_id", "use_cache"} | {
    "partial_rotary_factor", "rope_theta", "sliding_window_pattern", "head_dim", "is_causal", "clip_qkv", "norm_eps",
    "layer_norm_epsilon", "attention_chunk_size", "rope_local_base_freq", "tie_word_embeddings"})


@pytest.mark.parametrize("family", GRID)
def test_every_key_is_followed_as_transformers_does_or_refused(plain, tmp_path, family):
    """Each key of any family's config, with another value: refused, or the logits are transformers' own."""
    folder, ids = plain(family), reference.random_ids(131, 40)
    config, followed = json.loads((folder / "config.json").read_text()), []
    for key in KEYS:
        for i, value in enumerate(other(config.get(key))):
            copy = edited(folder, tmp_path / f"{key}{i}", **{key: value})
            try:
                model = reference.exported(copy, tmp_path / f"{key}{i}.bin")
            except SystemExit:
                continue
            logits = diff_logits.engine(binary(), model, "logits", ids, 131)
            assert np.abs(logits - reference.forward(reference.load(copy), ids)[0]).max() < 1e-3, (key, value)
            followed.append(key)
    assert {"rms_norm_eps", "rope_theta"} < {*followed} and {"hidden_size", "num_key_value_heads"}.isdisjoint(followed)


def test_gemma3_with_vision(measure, tmp_path, capsys):
    """Of Gemma3ForConditionalGeneration the text part, whichever way its tensors are called; what it gives for text."""
    values = models.SMALL | dict(head_dim=16, sliding_window=WINDOW, layer_types=[FULL, SLIDING])
    config = transformers.Gemma3Config(text_config=values, eos_token_id=[2, 5], vision_config=dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14),
        mm_tokens_per_image=1, image_token_index=130, boi_token_index=129, eoi_token_index=128)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    models.randomize(model, 0)
    model.save_pretrained(tmp_path / "m")
    ids = reference.random_ids(128, 60)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    got = []
    for rename in ("language_model.model.", "model.language_model."):
        models.edit_tensors(tmp_path / "m", lambda t: [t.update({re.sub(
            r"(model\.language_model|language_model\.model)\.", rename, name): t.pop(name)}) for name in list(t)])
        path = reference.exported(tmp_path / "m", tmp_path / f"{len(got)}.bin")
        assert "the text part is exported" in capsys.readouterr().err
        got.append(diff_logits.engine(binary(), path, "logits", ids, 131))
        assert np.abs(got[-1] - want).max() < 1e-4 * np.abs(want).max()
    assert (got[0] == got[1]).all() and checkpoint.read(path)[0]["eos"] == [2, 5]
    export.to_hugging_face(tmp_path / "back", path, None)
    assert type(models.load_reference(tmp_path / "back")).__name__ == "Gemma3ForCausalLM"


@pytest.mark.parametrize("kinds", ([FULL, FULL], [SLIDING, FULL]), ids="-".join)
def test_a_mistral_with_layer_types(tmp_path, kinds):
    """transformers takes it for a Ministral, so that layer_types decides."""
    models.tiny_llama(tmp_path / "m", "mistral", 1, sliding_window=WINDOW)
    edited = json.loads((tmp_path / "m" / "config.json").read_text()) | dict(layer_types=kinds)
    (tmp_path / "m" / "config.json").write_text(json.dumps(edited))
    ids = reference.random_ids(128, 60)
    with torch.no_grad():
        want = models.load_reference(tmp_path / "m")(torch.tensor([ids])).logits[0].numpy()
    got = diff_logits.engine(binary(), reference.exported(tmp_path / "m", tmp_path / "m.bin"), "logits", ids, len(want[0]))
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


MODELS = {"llama": "Llama 1 to 3.2, TinyLlama, SmolLM2, Yi, DeepSeek-LLM, R1-Distill-Llama"}
REFUSED_BY_NAME = ("mixtures of experts (Mixtral, Qwen3-MoE, ...), latent attention (DeepSeek-V2 and V3), Ministral 3, "
                   "others")
START, END = "<!-- tests/test_families.py --readme writes this table -->\n", "<!-- end of the table -->"


def readme_table(measure=None):
    """The lines of the table; without `measure` with # for each number."""
    yield "| family | status | proved by | largest error, ours and PyTorch's | RMS error |\n|---|---|---|---|---|\n"
    for family in GRID:
        rows = [measure(family, i).rows[-1] for i in range(len(GRID[family]))] if measure else []
        largest = [max(getattr(row, who).largest for row in rows) if rows else "#" for who in ("ours", "theirs")]
        rms = [diff_logits.rms([getattr(row, who).rms for row in rows]) if rows else "#" for who in ("ours", "theirs")]
        shown = [", ".join(x if x == "#" else f"{x:.1e}" for x in pair) for pair in (largest, rms)]
        name = models.FAMILIES[family][1].__name__ + (f" ({MODELS[family]})" if family in MODELS else "")
        yield f"| {name} | runs | `test_families.py -k {family}-` | {shown[0]} | {shown[1]} |\n"
    yield f"| {REFUSED_BY_NAME} | refused | `test_families.py -k refused` | | |\n"


def test_readme_table(measure, request):
    """The table names every family; --readme measures and writes it anew."""
    path, write = ROOT / "README.md", request.config.getoption("--readme")
    before, rest = path.read_text(encoding="utf-8").split(START)
    old, after = rest.split(END)
    if write:
        old = "".join(readme_table(measure))
        path.write_text(before + START + old + END + after, encoding="utf-8")
    assert re.sub(r"\d\.\de-\d\d", "#", old) == "".join(readme_table())

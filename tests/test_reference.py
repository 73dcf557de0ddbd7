"""The float64 reference is right, and is float64 throughout."""
import numpy as np
import pytest
import torch
import transformers

import reference

SCALING = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=31, max_position_embeddings=128, rope_parameters=SCALING, tie_word_embeddings=False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path


def by_hand(model, ids):
    """Logits (T, vocab_size) and hidden states of a Llama in numpy's longdouble, from the formulas."""
    w = {name: tensor.numpy().astype(np.longdouble) for name, tensor in model.state_dict().items()}
    config, rotary = model.config, model.model.rotary_emb
    t, d, groups = len(ids), config.head_dim, config.num_attention_heads // config.num_key_value_heads
    angle = np.outer(np.arange(t), rotary.inv_freq.numpy().astype(np.longdouble))
    cos, sin = (np.tile(f(angle) * rotary.attention_scaling, 2)[:, None] for f in (np.cos, np.sin))

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.longdouble(config.rms_norm_eps)) * weight

    def rotate(x):
        return x * cos + np.concatenate([-x[..., d // 2:], x[..., :d // 2]], -1) * sin

    x = w["model.embed_tokens.weight"][ids]
    hidden = [x]
    for i in range(config.num_hidden_layers):
        layer = {name.split(".", 3)[3]: tensor for name, tensor in w.items() if name.startswith(f"model.layers.{i}.")}
        h = norm(x, layer["input_layernorm.weight"])
        q, k, v = ((h @ layer[f"self_attn.{n}_proj.weight"].T).reshape(t, -1, d) for n in "qkv")
        scores = np.einsum("ihd,jhd->hij", rotate(q), np.repeat(rotate(k), groups, 1)) / np.sqrt(np.longdouble(d))
        p = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(t)
        p /= p.sum(-1, keepdims=True)
        seen = np.einsum("hij,jhd->ihd", p, np.repeat(v, groups, 1)).reshape(t, -1)
        x = x + seen @ layer["self_attn.o_proj.weight"].T
        h = norm(x, layer["post_attention_layernorm.weight"])
        gate, up = (h @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
        hidden.append(x)
    hidden[-1] = norm(x, w["model.norm.weight"])
    return hidden[-1] @ w["lm_head.weight"].T, np.stack(hidden)


def relative(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_float64_equals_a_computation_by_hand(folder):
    ids = reference.random_ids(31, 60)
    model = reference.load(folder)
    exact = by_hand(model, ids)
    single = reference.forward(model, ids)
    plain = reference.to_float64(model)(torch.tensor([ids])).logits[0].numpy()
    double = reference.forward(model, ids)
    for ours, theirs in zip(double, exact):
        assert ours.dtype == np.float64 and ours.shape == theirs.shape
        assert relative(ours, theirs) < 1e-13
    assert single[0].dtype == np.float32
    assert relative(single[0], exact[0]) > 1e-8
    assert plain.dtype == np.float64 and relative(plain, exact[0]) > 1e-9, "model.double() would do: simplify"


@pytest.mark.parametrize("stray", [
    lambda x: x + torch.from_numpy(np.ones(1, dtype=np.float32)),
    lambda x: x * torch.tensor(1.0, dtype=torch.float32),
    lambda x: x.bfloat16().double(),
    lambda x: x.half().double(),
], ids=["from numpy", "constant", "bfloat16", "float16"])
def test_a_stray_float_type_is_an_error(folder, monkeypatch, stray):
    model = reference.to_float64(reference.load(folder))
    before = reference.forward(model, [1, 2, 3])[0]
    forward = transformers.models.llama.modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward",
                        lambda self, x: stray(forward(self, x)))
    with pytest.raises(TypeError, match="in a float64 forward pass"):
        reference.forward(model, [1, 2, 3])
    monkeypatch.undo()
    assert (reference.forward(model, [1, 2, 3])[0] == before).all()


def test_settings_are_put_back(folder):
    before = torch.get_num_threads(), torch.get_default_dtype()
    reference.forward(reference.to_float64(reference.load(folder)), [1, 2, 3])
    assert (torch.get_num_threads(), torch.get_default_dtype()) == before

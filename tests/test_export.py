"""export.py: what the checkpoint holds, bit by bit, from every source; what is refused; what a failure leaves."""
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

import export
import models

EXPORT = Path(export.__file__)
INTS = {1: "version", 2: "weight_type", 3: "dim", 4: "hidden_dim", 5: "n_layers", 6: "n_heads", 7: "n_kv_heads",
        8: "head_dim", 9: "vocab_size", 10: "seq_len", 11: "tied", 12: "activation", 13: "norm_kind", 14: "norm_place",
        15: "qk_norm", 16: "biases", 17: "rope_dim", 18: "rope_pairs", 19: "n_rope_tables", 20: "bos_id", 21: "n_eos",
        22: "tokenizer_hash", 23: "config_size"}
REALS = {34: "rms_norm_eps", 35: "norm_weight_add", 36: "rope_theta", 37: "rope_theta_local",
         38: "rope_attention_factor", 39: "rope_attention_factor_local", 40: "attention_scale", 41: "embedding_scale",
         42: "residual_scale", 43: "logit_scale", 44: "attention_softcap", 45: "logit_softcap", 46: "router_scale"}


class Checkpoint:
    """A reader of the format written from its description, not from export.py: header, tensors by name, config."""

    def __init__(self, path):
        self.data = Path(path).read_bytes()
        assert self.data[:8] == b"run.c\r\n\x1a"
        ints, reals = np.frombuffer(self.data[:512], "<i8"), np.frombuffer(self.data[:512], "<f8")
        self.header = {name: int(ints[slot]) for slot, name in INTS.items()}
        self.header |= {name: float(reals[slot]) for slot, name in REALS.items()}
        assert not any(ints[slot] for slot in range(1, 64) if slot not in INTS and slot not in REALS)
        h, self.tensors, self.end = self.header, {}, 512
        for name in ("eos_ids", "layer_window", "layer_rope"):
            self.take(name, (h["n_eos"] if name == "eos_ids" else h["n_layers"],), "<i4")
        self.take("rope_freq", (h["n_rope_tables"], h["rope_dim"] // 2))
        self.take("model.embed_tokens.weight", (h["vocab_size"], h["dim"]))
        for layer in range(h["n_layers"]):
            self.take_layer(f"model.layers.{layer}.")
        self.take("model.norm.weight", (h["dim"],))
        if not h["tied"]:
            self.take("lm_head.weight", (h["vocab_size"], h["dim"]))
        self.config = json.loads(self.take("config", (h["config_size"],), "u1").tobytes()) if h["config_size"] else None
        assert self.end == len(self.data)

    def take_layer(self, prefix):
        h = self.header
        dim, hidden, q, kv = h["dim"], h["hidden_dim"], h["n_heads"] * h["head_dim"], h["n_kv_heads"] * h["head_dim"]
        attention = {"q": (q, dim), "k": (kv, dim), "v": (kv, dim)}
        self.take(prefix + "input_layernorm.weight", (dim,))
        for name, shape in attention.items():
            self.take(f"{prefix}self_attn.{name}_proj.weight", shape)
        for name, shape in attention.items() if h["biases"] & 1 else ():
            self.take(f"{prefix}self_attn.{name}_proj.bias", shape[:1])
        for name in ("q_norm", "k_norm") if h["qk_norm"] else ():
            self.take(f"{prefix}self_attn.{name}.weight", (h["head_dim"],))
        self.take(prefix + "self_attn.o_proj.weight", (dim, q))
        if h["biases"] & 2:
            self.take(prefix + "self_attn.o_proj.bias", (dim,))
        self.take(prefix + "post_attention_layernorm.weight", (dim,))
        ffn = {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
        for name, shape in ffn.items():
            self.take(f"{prefix}mlp.{name}_proj.weight", shape)
        for name, shape in ffn.items() if h["biases"] & 4 else ():
            self.take(f"{prefix}mlp.{name}_proj.bias", shape[:1])

    def take(self, name, shape, kind="<f4"):
        start = (self.end + 63) // 64 * 64
        assert not any(self.data[self.end:start]), f"padding before {name}"
        self.end = start + int(np.prod(shape)) * np.dtype(kind).itemsize
        self.tensors[name] = np.frombuffer(self.data[start:self.end], kind).reshape(shape)
        return self.tensors[name]


@pytest.fixture
def run(tmp_path, capsys):
    """run(arguments...) -> (exit code, stderr)"""
    def call(*arguments):
        capsys.readouterr()
        code = 0
        try:
            export.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        return code or 0, capsys.readouterr().err
    return call


@pytest.fixture
def exported(run, tmp_path):
    """exported(source) -> Checkpoint"""
    def call(source, name=None):
        path = tmp_path / (name or f"{Path(source).name}.bin")
        code, error = run(source, path)
        assert code == 0, error
        return Checkpoint(path)
    return call


def refused(run, tmp_path, source, *words, output=None):
    """The export fails with one line that holds every word, and leaves nothing."""
    before = sorted(os.listdir(tmp_path))
    code, error = run(source, output or tmp_path / "model.bin")
    assert code == 1, error
    line = error.strip().splitlines()[-1]
    assert line.startswith("export.py: ") and all(word in line for word in words), error
    assert "Error: " not in line or line.endswith(")"), error  # a library's words, and what to do
    assert sorted(os.listdir(tmp_path)) == before
    assert all(text.startswith("export.py: ") for text in error.strip().splitlines()), error


def same_tensors(checkpoint, folder):
    """Every tensor is bit-equal to what transformers loads in float32, and its table to transformers' own."""
    tensors, config = models.state(folder)
    if config.tie_word_embeddings:
        assert checkpoint.header["tied"] == 1
        del tensors["lm_head.weight"]
    assert tensors.keys() == {name for name in checkpoint.tensors if "." in name}
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.numpy().view("u4"), checkpoint.tensors[name].view("u4")), name
    rotary = models.load_reference(folder).model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    assert np.array_equal(rotary.inv_freq.numpy(), checkpoint.tensors["rope_freq"][0])
    assert checkpoint.header["rope_attention_factor"] == rotary.attention_scaling


def same_weights(got, wanted):
    for name in wanted.tensors.keys() - {"config"}:
        assert np.array_equal(got.tensors[name], wanted.tensors[name]), name


# ---- Hugging Face folders ----

def test_every_header_field(exported, tmp_path):
    folder = models.tiny_llama(tmp_path / "m", num_hidden_layers=3, head_dim=20, attention_bias=True, mlp_bias=True,
                               rms_norm_eps=3e-6, max_position_embeddings=77, eos_token_id=[5, 2], bos_token_id=9,
                               rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    checkpoint = exported(folder)
    assert checkpoint.header == dict(
        version=1, weight_type=0, dim=64, hidden_dim=96, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=20,
        vocab_size=131, seq_len=77, tied=0, activation=0, norm_kind=0, norm_place=5, qk_norm=0, biases=7, rope_dim=20,
        rope_pairs=0,
        n_rope_tables=1, bos_id=9, n_eos=2, tokenizer_hash=0, config_size=len((folder / "config.json").read_bytes()),
        rms_norm_eps=3e-6, norm_weight_add=0, rope_theta=5e5, rope_theta_local=0, rope_attention_factor=1,
        rope_attention_factor_local=1, attention_scale=20 ** -0.5, embedding_scale=1, residual_scale=1, logit_scale=1,
        attention_softcap=0, logit_softcap=0, router_scale=0)
    assert checkpoint.tensors["eos_ids"].tolist() == [5, 2]
    assert checkpoint.tensors["layer_window"].tolist() == [0, 0, 0]
    assert checkpoint.tensors["layer_rope"].tolist() == [1, 1, 1]
    assert checkpoint.config == json.loads((folder / "config.json").read_text())
    same_tensors(checkpoint, folder)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_and_tying(exported, tmp_path, tied, dtype):  # B03, B05
    folder = models.tiny_llama(tmp_path / "m", tie_word_embeddings=tied, dtype=dtype)
    same_tensors(exported(folder), folder)


@pytest.mark.parametrize("case", [
    dict(family="qwen2"), dict(family="mistral"), dict(attention_bias=True), dict(mlp_bias=True),  # B11
    dict(hidden_size=160, head_dim=64),  # B13
    dict(family="mistral", hidden_size=56, num_attention_heads=6, head_dim=16),
    dict(family="mistral", sliding_window=256), dict(num_key_value_heads=1), dict(num_key_value_heads=4),
    dict(hidden_size=40, vocab_size=97, head_dim=10, intermediate_size=50),
    dict(family="qwen2", tie_word_embeddings=True),
    dict(rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}),  # B27
    dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                          "original_max_position_embeddings": 64}),
    dict(rope_parameters={"rope_type": "yarn", "factor": 8, "rope_theta": 1e6, "original_max_position_embeddings": 32,
                          "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 16, "truncate": False}),
    dict(rope_parameters={"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64})], ids=str)
def test_tensors_of_variants(exported, tmp_path, case):
    folder = models.tiny_llama(tmp_path / "m", **case)
    checkpoint = exported(folder)
    same_tensors(checkpoint, folder)
    assert checkpoint.header["biases"] == {"qwen2": 1}.get(case.get("family"), 0) + 3 * case.get("attention_bias", 0) \
        + 4 * case.get("mlp_bias", 0)
    rope = case.get("rope_parameters", {})
    assert checkpoint.header["seq_len"] == 256 and checkpoint.header["rope_theta"] == rope.get("rope_theta", 1e4)
    assert (checkpoint.header["rope_attention_factor"] != 1) == (rope.get("rope_type") == "yarn")
    if rope.get("rope_type") == "linear":
        plain = 1 / 1e4 ** (np.arange(0, 16, 2) / 16)
        assert np.allclose(checkpoint.tensors["rope_freq"][0] * 8, plain, rtol=1e-6)


def test_shards_give_the_same_bytes(exported, tmp_path):
    whole = exported(models.tiny_llama(tmp_path / "m"))
    folder = models.tiny_llama(tmp_path / "s", shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert exported(folder).data == whole.data


def test_old_buffers_are_tolerated_and_head_dim_may_be_null(exported, tmp_path):
    folder = models.tiny_llama(tmp_path / "m")
    whole = exported(folder)
    models.edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    models.edit_json(folder / "config.json", head_dim=None)
    checkpoint = exported(folder)
    assert checkpoint.header | dict(config_size=0) == whole.header | dict(config_size=0)
    same_weights(checkpoint, whole)


def test_five_spellings_of_theta(exported, tmp_path):  # B02
    folder = models.tiny_llama(tmp_path / "m")
    spellings = [dict(rope_theta=500000), dict(rope_parameters=dict(rope_theta=500000.0, rope_type="default")),
                 dict(rope_scaling=dict(rope_theta=500000, type="default")),
                 dict(rope_theta=500000, rope_scaling=None,
                      rope_parameters=dict(rope_theta=500000, rope_type="default")), {}]
    results = []
    for spelling in spellings:
        models.edit_json(folder / "config.json", lambda c: [c.pop(key, None) for key in (
            "rope_theta", "rope_scaling", "rope_parameters")], **spelling)
        results.append(exported(folder))
        same_tensors(results[-1], folder)
    assert [result.header["rope_theta"] for result in results] == [5e5] * 4 + [1e4]
    assert len({result.data for result in results[:4]}) == 1


def test_old_spelling_of_scaling(exported, tmp_path):
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    folder = models.tiny_llama(tmp_path / "m", rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **scaling))
    new = exported(folder)
    for kind in ("type", "rope_type"):
        models.edit_json(folder / "config.json", lambda c: c.pop("rope_parameters", 0), rope_theta=500000.0,
                         rope_scaling={kind: "llama3", **scaling})
        assert exported(folder).data == new.data


def test_tied_is_smaller_by_the_classifier(exported, tmp_path):  # B03
    tied = exported(models.tiny_llama(tmp_path / "t", tie_word_embeddings=True))
    untied = exported(models.tiny_llama(tmp_path / "u"))
    size = {name: len(c.data) - c.header["config_size"] for name, c in dict(tied=tied, untied=untied).items()}
    assert size["untied"] - size["tied"] == 131 * 64 * 4


def test_tying_as_transformers_does(run, exported, tmp_path):  # B03
    folder = models.tiny_llama(tmp_path / "m", tie_word_embeddings=True)
    tied = exported(folder)
    models.edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert exported(folder).data == tied.data
    models.edit_tensors(folder, lambda t: t["lm_head.weight"].mul_(2))
    checkpoint = exported(folder)
    assert checkpoint.header["tied"] == 0 and checkpoint.config["tie_word_embeddings"] is False
    reference = models.load_reference(folder).state_dict()["lm_head.weight"].numpy()
    assert np.array_equal(checkpoint.tensors["lm_head.weight"], reference)
    assert not np.array_equal(reference, checkpoint.tensors["model.embed_tokens.weight"])
    code, error = run(folder, tmp_path / "x.bin")
    assert "lm_head.weight differs" in error
    models.edit_json(folder / "config.json", lambda c: c.pop("tie_word_embeddings"))
    code, error = run(folder, tmp_path / "x.bin")
    assert code == 0 and "no tie_word_embeddings: transformers' default" in error and "False" in error


def test_defaults_are_transformers(exported, tmp_path):
    folder = models.tiny_llama(tmp_path / "m", num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=2048)
    models.edit_json(folder / "config.json", lambda c: [c.pop(key) for key in (
        "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id",
        "model_type")])
    (folder / "generation_config.json").unlink()
    header = exported(folder).header
    assert (header["n_kv_heads"], header["rms_norm_eps"], header["seq_len"]) == (4, 1e-6, 2048)
    assert (header["bos_id"], header["n_eos"]) == (1, 1)


@pytest.mark.parametrize("generation, config, wanted", [  # B75
    (2, 2, [2]), ([100, 108, 109], 100, [100, 108, 109]), ([4], [3, 4], [4, 3]), (None, 7, [7]), (None, None, []),
    ([7], "absent", [7]), (0, "absent", [0]), ("absent", "absent", [2]),
    (list(range(20, 29)), 3, [*range(20, 29), 3]), (list(range(16)), 15, list(range(16)))])
def test_stop_ids(exported, tmp_path, generation, config, wanted):
    folder = models.tiny_llama(tmp_path / "m")
    for file, value in (("generation_config.json", generation), ("config.json", config)):
        models.edit_json(folder / file, lambda c: c.pop("eos_token_id", None),
                         **({} if value == "absent" else {"eos_token_id": value}))
    assert exported(folder).tensors["eos_ids"].tolist() == wanted


def test_no_bos(exported, tmp_path):
    folder = models.tiny_llama(tmp_path / "m", bos_token_id=None)
    assert exported(folder).header["bos_id"] == -1


CONFIG_ERRORS = [
    (dict(architectures=["GemmaForCausalLM"]), "GemmaForCausalLM"), (dict(architectures=["LlamaModel"]), "LlamaModel"),
    (dict(architectures=None, model_type="mixtral"), "mixtral"), (dict(model_type="granite"), "granite"),
    (dict(hidden_act="gelu_new"), "hidden_act", "gelu_new"), (dict(hidden_act="mish"), "hidden_act", "mish"),
    (dict(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    (dict(auto_map={"AutoModelForCausalLM": "x.Y"}), "auto_map"), (dict(is_causal=False), "is_causal"),
    (dict(final_logit_softcapping=30.0), "final_logit_softcapping", "30.0"), (dict(use_qk_norm=True), "use_qk_norm"),
    (dict(attention_multiplier=0.5), "attention_multiplier"), (dict(logits_scaling=8), "logits_scaling"),
    (dict(num_local_experts=8), "num_local_experts"), (dict(no_rope_layers=[1, 0]), "no_rope_layers"),
    (dict(clip_qkv=8.0), "clip_qkv"), (dict(attention_chunk_size=64), "attention_chunk_size"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor"), (dict(sliding_window=128), "sliding_window is 128"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    (dict(rope_theta=20000.0), "rope_theta", "10000.0", "20000.0"),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}, rope_parameters=None), "dynamic", "not supported"),
    (dict(rope_scaling={"type": "longrope", "factor": 2.0}, rope_parameters=None), "longrope", "short_factor"),
    (dict(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}, rope_parameters=None), "mrope", "not supported"),
    (dict(rope_scaling={"type": "default", "mrope_section": [2, 3, 3]}, rope_parameters=None), "mrope_section"),
    (dict(rope_scaling={"type": "no-such"}, rope_parameters=None), "no-such", "not supported"),
    (dict(rope_scaling={"type": "linear"}, rope_parameters=None), "factor"),
    (dict(rope_scaling={"type": "linear", "factor": 0}, rope_parameters=None), "factor"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_type", "linear", "default"),
    (dict(rope_scaling={"factor": 2.0}, rope_parameters=None), "factor"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": 0}), "frequencies"),
    (dict(rope_parameters={"rope_type": "default", "rope_theta": "x"}), "x"), (dict(rope_scaling=[1]), "list"),
    (dict(vocab_size=130), "model.embed_tokens.weight", "(131, 64)", "(130, 64)"),
    (dict(intermediate_size=97), "gate_proj.weight"), (dict(num_key_value_heads=4), "k_proj.weight"),
    (dict(num_key_value_heads=3), "multiple"), (dict(head_dim=15), "even"), (dict(head_dim=18), "(72, 64)"),
    (dict(num_hidden_layers=1), "model.layers.1."), (dict(num_hidden_layers=3), "missing", "model.layers.2."),
    (dict(num_hidden_layers=0), "n_layers"), (dict(num_attention_heads=0), "zero"),
    (dict(hidden_size="64"), "hidden_size"),
    (dict(hidden_size=-64), "-64"), (dict(rms_norm_eps=-1.0), "rms_norm_eps"), (dict(rms_norm_eps="x"), "rms_norm_eps"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps"), (dict(rms_norm_eps=float("inf")), "rms_norm_eps"),
    (dict(max_position_embeddings=0), "seq_len"),
    (dict(eos_token_id=131), "131"), (dict(eos_token_id=-1), "-1"), (dict(bos_token_id=200), "200"),
    (dict(bos_token_id=[1]), "[1]"), (dict(eos_token_id=list(range(17))), "17 end-of-text ids"),
    (dict(attention_bias=True), "missing", "q_proj.bias"), (dict(mlp_bias=True), "missing", "mlp.gate_proj.bias"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The bytes of a plain model's files: {name: bytes}."""
    folder = models.tiny_llama(tmp_path_factory.mktemp("plain") / "m")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def copy(plain, folder):
    folder.mkdir()
    for name, data in plain.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("case", CONFIG_ERRORS, ids=lambda case: str(case[0]))
def test_config_errors(run, tmp_path, plain, case):
    folder = copy(plain, tmp_path / "m")
    models.edit_json(folder / "config.json", **case[0])
    refused(run, tmp_path, folder, *case[1:])


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_never_guessed(run, tmp_path, plain, key):  # transformers' own default cannot fit
    folder = copy(plain, tmp_path / "m")
    models.edit_json(folder / "config.json", lambda c: c.pop(key))
    refused(run, tmp_path, folder)


def test_harmless_keys(exported, tmp_path, plain):
    folder = copy(plain, tmp_path / "m")
    before = exported(folder)
    models.edit_json(folder / "config.json", attention_dropout=0.1, is_llama_config=True, rope_interleaved=False,
                     _attn_implementation_autoset=True, torch_dtype="bfloat16", unsloth_version="1", logit_scale=1.0,
                     pad_token_id=-1, use_sliding_window=False, max_window_layers=28, layer_types=None,
                     mrope_section=None, pretraining_tp=2, auto_map={"AutoModelForCausalLM": "x.LlamaForCausalLM"})
    again = exported(folder)
    same_weights(again, before)


TENSOR_ERRORS = [
    (lambda t: t.pop("lm_head.weight"), "missing", "lm_head.weight"),  # B03
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "q_proj.bias"),  # B11
    (lambda t: t.update({"model.foo.weight": torch.ones(3)}), "model.foo.weight"),
    (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}), "model.layers.2.mlp.up_proj"),
    (lambda t: t.update({"model.norm.weight": torch.ones(63)}), "model.norm.weight", "(63,)", "(64,)"),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, 1)}), "model.norm.weight", "(64, 1)"),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "model.norm.weight", "I8"),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float8_e4m3fn)}), "model.norm.weight", "F8"),
    (lambda t: [t.pop(name) for name in list(t) if "layers.1." in name], "and 5 more")]


@pytest.mark.parametrize("case", TENSOR_ERRORS, ids=lambda case: case[-1])
def test_tensor_errors(run, tmp_path, plain, case):
    folder = copy(plain, tmp_path / "m")
    models.edit_tensors(folder, case[0])
    refused(run, tmp_path, folder, *case[1:])


def test_folder_errors(run, tmp_path, plain):
    folder = copy(plain, tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    refused(run, tmp_path, folder, "adapter")
    (folder / "adapter_config.json").unlink()
    (folder / "config.json").write_text('{"architectures": ')
    refused(run, tmp_path, folder, "config.json", "JSONDecodeError")
    (folder / "config.json").write_text("[1]")
    refused(run, tmp_path, folder, "config.json")
    (folder / "config.json").unlink()
    refused(run, tmp_path, folder, "config.json")
    (folder / "config.json").write_bytes(plain["config.json"])
    (folder / "model.safetensors").write_bytes(plain["model.safetensors"][:-100])
    refused(run, tmp_path, folder, "model.safetensors", "SafetensorError")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(run, tmp_path, folder, "pytorch_model.bin", "save_pretrained")
    refused(run, tmp_path, folder / "pytorch_model.bin", "pytorch_model.bin", "name the folder")
    refused(run, tmp_path, tmp_path / "absent", "does not exist")


@pytest.mark.parametrize("value, words", [
    ("../m/model.safetensors", ["leaves the folder"]), ("/etc/passwd", ["leaves the folder"]),
    ("sub/../../x", ["leaves the folder"]), ("absent.safetensors", ["absent.safetensors"])])
def test_index_paths(run, tmp_path, value, words):
    folder = models.tiny_llama(tmp_path / "m", shard="100KB")
    models.edit_json(folder / "model.safetensors.index.json",
                     lambda index: index["weight_map"].update({"model.norm.weight": value}))
    refused(run, tmp_path, folder, *words)


def test_index_names_a_tensor_that_is_not_there(run, tmp_path):
    folder = models.tiny_llama(tmp_path / "m", shard="100KB")
    models.edit_json(folder / "model.safetensors.index.json",
                     lambda i: i["weight_map"].update({"gone.weight": i["weight_map"]["model.norm.weight"]}))
    refused(run, tmp_path, folder, "gone.weight")


def test_a_tensor_in_two_shards(run, tmp_path):
    folder = models.tiny_llama(tmp_path / "m", shard="100KB")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "more.safetensors")
    models.edit_json(folder / "model.safetensors.index.json", lambda i: i["weight_map"].update(x="more.safetensors"))
    refused(run, tmp_path, folder, "model.norm.weight", "two files")


def test_nan_is_reported(run, tmp_path, plain):
    folder = copy(plain, tmp_path / "m")
    models.edit_tensors(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"][3].fill_(float("nan")))
    code, error = run(folder, tmp_path / "x.bin")
    assert code == 0 and error.count("model.layers.1.mlp.up_proj.weight holds NaN") == 1


# ---- One model from every source ----

def strip_config(folder):
    """Leaves in config.json what the exporter writes itself for sources without one, and no more."""
    keep = set("""architectures model_type dtype hidden_act hidden_size intermediate_size num_hidden_layers vocab_size
        num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_parameters
        tie_word_embeddings bos_token_id eos_token_id attention_bias mlp_bias""".split())
    models.edit_json(folder / "config.json", lambda c: [c.pop(key) for key in list(c) if key not in keep])


@pytest.mark.parametrize("tied", [False, True])
def test_same_bytes_from_every_source(exported, tmp_path, tied):  # B29
    folder = models.tiny_llama(tmp_path / "m", vocab_size=132, eos_token_id=[1, 2], max_position_embeddings=256,
                               tie_word_embeddings=tied)
    strip_config(folder)
    wanted = exported(folder)
    same_tensors(wanted, folder)
    pt = exported(models.llama2c_pt(folder, tmp_path / "stories.pt"))
    assert pt.data == wanted.data
    assert exported(models.llama2c_pt(folder, tmp_path / "plain.pt", prefix="")).data == wanted.data
    extra = exported(models.gguf_file(folder, tmp_path / "m.gguf", edit=lambda w: w.add_eot_token_id(1)))
    assert extra.tensors["eos_ids"].tolist() == [2, 1]  # the only difference is their order
    assert extra.data[576:] == wanted.data[576:].replace(b"    1,\n    2\n", b"    2,\n    1\n")
    models.edit_json(folder / "config.json", eos_token_id=2)
    models.edit_json(folder / "generation_config.json", eos_token_id=2)
    wanted = exported(folder)
    assert exported(models.gguf_file(folder, tmp_path / "n.gguf")).data == wanted.data
    for shards, axis in ((1, 1), (2, 1), (4, 1), (2, 0), (4, 0)):  # B09
        meta = models.meta_folder(folder, tmp_path / f"meta{shards}{axis}", shards, axis, max_seq_len=256)
        assert exported(meta).data == wanted.data, (shards, axis)


@pytest.mark.parametrize("n_heads, n_kv_heads", [(6, 2), (12, 2), (8, 1), (4, 4)])
@pytest.mark.parametrize("head_dim", [2, 4, 16])
def test_permutation_for_every_head_count(exported, tmp_path, n_heads, n_kv_heads, head_dim):  # B01
    hidden = n_heads * head_dim
    folder = models.tiny_llama(tmp_path / "m", hidden_size=hidden, num_attention_heads=n_heads,
                               num_key_value_heads=n_kv_heads, head_dim=head_dim, attention_bias=True)
    wanted, got = exported(folder), exported(models.gguf_file(folder, tmp_path / "m.gguf"))
    same_weights(got, wanted)


def test_unpermute_is_the_inverse():  # B01
    rows = np.arange(32 * 96, dtype=np.float32).reshape(32, 96)
    adjacent = models.to_adjacent(torch.from_numpy(rows), 2).numpy()
    assert np.array_equal(export.to_halves(adjacent, 2), rows)
    assert not np.array_equal(export.to_halves(adjacent, 4), rows)
    assert adjacent[1, 0] == rows[8, 0]  # head 0: 0, 8, 1, 9, ...


def test_meta_sizes_come_from_the_tensors(exported, tmp_path):  # B07
    folder = models.tiny_llama(tmp_path / "m", vocab_size=516, intermediate_size=100)
    header = exported(models.meta_folder(folder, tmp_path / "meta")).header
    assert (header["vocab_size"], header["hidden_dim"], header["seq_len"]) == (516, 100, 4096)
    header = exported(models.meta_folder(folder, tmp_path / "wrong", vocab_size=512)).header
    assert header["vocab_size"] == 516


def test_meta_llama3(exported, tmp_path):
    folder = models.tiny_llama(tmp_path / "m", vocab_size=128256, hidden_size=16, num_attention_heads=2,
                               num_key_value_heads=1, intermediate_size=16, num_hidden_layers=1)
    plain = exported(models.meta_folder(folder, tmp_path / "a", rope_theta=500000.0))
    assert (plain.header["bos_id"], plain.header["seq_len"]) == (128000, 8192)
    assert plain.tensors["eos_ids"].tolist() == [128001, 128008, 128009]
    for number, factor in dict(eight=8, own=32).items():
        meta = models.meta_folder(folder, tmp_path / number, rope_theta=500000.0, use_scaled_rope=True,
                                  **({"rope_scale_factor": factor} if factor != 8 else {}))
        scaled = exported(meta)
        ratio = plain.tensors["rope_freq"][0] / scaled.tensors["rope_freq"][0]
        assert ratio[0] == 1 and ratio[-1] == factor and scaled.header["seq_len"] == 131072


def test_meta_errors(run, tmp_path, plain):
    folder = models.tiny_llama(tmp_path / "m", vocab_size=132)
    meta = models.meta_folder(folder, tmp_path / "a", 4)
    (meta / "consolidated.03.pth").unlink()
    refused(run, tmp_path, meta, "3 shards of 4")
    meta = models.meta_folder(folder, tmp_path / "b", 4)
    (meta / "consolidated.01.pth").rename(meta / "consolidated.04.pth")
    refused(run, tmp_path, meta, "4 shards of 4", "consolidated.00.pth")
    meta = models.meta_folder(folder, tmp_path / "c", quantization_args={"scheme": "int8"})
    refused(run, tmp_path, meta, "quantization_args")
    meta = models.meta_folder(folder, tmp_path / "wide", dim=2 ** 63)  # names of so many shards would fill the memory
    refused(run, tmp_path, meta, f"1 shards of {2 ** 57}")
    meta = models.meta_folder(folder, tmp_path / "d")
    data = (meta / "consolidated.00.pth").read_bytes()
    (meta / "consolidated.00.pth").write_bytes(data[:1000])
    refused(run, tmp_path, meta, "consolidated.00.pth")
    (meta / "consolidated.00.pth").unlink()
    refused(run, tmp_path, meta)


def test_types_in_a_pt(run, tmp_path, recwarn):
    """None is rounded or cut in silence, and no library warns in a line of its own."""
    folder = models.tiny_llama(tmp_path / "m")
    whole = torch.load(models.llama2c_pt(folder, tmp_path / "x.pt"), weights_only=True)
    norm = whole["model"]["_orig_mod.norm.weight"]
    for odd in (norm.double(), norm.to(torch.complex64), norm.to(torch.int8),
                torch.quantize_per_tensor(norm, 0.1, 0, torch.qint8)):
        whole["model"]["_orig_mod.norm.weight"] = odd
        torch.save(whole, tmp_path / "y.pt")
        recwarn.clear()
        refused(run, tmp_path, tmp_path / "y.pt", "norm.weight", "float32")
        assert not recwarn.list


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_pickles_run_no_code(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "model_args": Evil()}, tmp_path / "x.pt")
    refused(run, tmp_path, tmp_path / "x.pt", "x.pt")
    torch.save({"state": 1}, tmp_path / "y.pt")
    refused(run, tmp_path, tmp_path / "y.pt", "model_args")
    (tmp_path / "z.pt").write_bytes(b"nothing")
    refused(run, tmp_path, tmp_path / "z.pt", "z.pt")


# ---- GGUF ----

@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_quantizations(exported, tmp_path, kind):
    folder = models.tiny_llama(tmp_path / "m")
    plain, got = exported(folder), exported(models.gguf_file(folder, tmp_path / "m.gguf", kind))
    kind = gguf.GGMLQuantizationType[kind]
    for name, array in plain.tensors.items():
        if array.ndim == 2 and "." in name:  # rows are quantized one by one, so their order does not matter
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        assert name == "config" or np.array_equal(array, got.tensors[name]), name


@pytest.mark.parametrize("values", [dict(family="qwen2", tie_word_embeddings=True), dict(family="qwen3", head_dim=24)])
def test_gguf_qwen(exported, tmp_path, values):
    folder = models.tiny_llama(tmp_path / "m", **values)
    wanted, got = exported(folder), exported(models.gguf_file(folder, tmp_path / "m.gguf"))
    same_weights(got, wanted)
    assert wanted.header | dict(config_size=0) == got.header | dict(config_size=0)


def test_gguf_numbers(exported, tmp_path):
    def edit(writer):
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(8)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    folder = models.tiny_llama(tmp_path / "m", head_dim=32, rms_norm_eps=1e-5,
                               rope_parameters={"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6})
    wanted, got = exported(folder), exported(models.gguf_file(folder, tmp_path / "m.gguf", edit=edit))
    assert got.header["rms_norm_eps"] == 1e-5 and got.header["head_dim"] == 32 and got.header["rope_theta"] == 1e6
    assert got.tensors["eos_ids"].tolist() == [2, 7, 8]
    assert np.array_equal(wanted.tensors["rope_freq"], got.tensors["rope_freq"])


def test_gguf_yarn(exported, tmp_path):
    def edit(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    folder = models.tiny_llama(tmp_path / "m", rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64})
    wanted, got = exported(folder), exported(models.gguf_file(folder, tmp_path / "m.gguf", edit=edit))
    assert np.array_equal(wanted.tensors["rope_freq"], got.tensors["rope_freq"])
    assert wanted.header["rope_attention_factor"] == got.header["rope_attention_factor"] > 1.1


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def llama3_factors(head_dim, factor):
    """What convert_hf_to_gguf stores as rope_freqs.weight (formula of Meta's llama-models, apply_scaling)."""
    wavelength = 2 * np.pi * 5e5 ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return np.where(wavelength < 8192 / 4, 1, np.where(wavelength > 8192, factor, 1 / ((1 - smooth) / factor + smooth))
                    ).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_rope_factors(exported, tmp_path, factor):
    folder = models.tiny_llama(tmp_path / "m", head_dim=64, rope_parameters=LLAMA3 | {"factor": factor})
    path = models.gguf_file(folder, tmp_path / "m.gguf", tensors={"rope_freqs.weight": llama3_factors(64, factor)})
    wanted, got = exported(folder), exported(path)
    assert np.array_equal(wanted.tensors["rope_freq"], got.tensors["rope_freq"])
    assert got.config["rope_parameters"] == wanted.config["rope_parameters"]


def test_gguf_other_factors(run, exported, tmp_path):
    folder = models.tiny_llama(tmp_path / "m")
    factors = np.linspace(1, 5, 8, dtype=np.float32)
    got = exported(models.gguf_file(folder, tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}))
    assert np.array_equal(got.tensors["rope_freq"][0], exported(folder).tensors["rope_freq"][0] / factors)
    code, error = run("--hf", tmp_path / "back", tmp_path / "m.gguf.bin")
    assert code == 1 and "frequencies" in error and not (tmp_path / "back").exists()


@pytest.mark.parametrize("head_dim, factor, table", [  # B25, from the published formula
    (64, 32.0, {14: 1, 15: 0.605573, 16: 0.303743, 17: 0.103448, 18: 1 / 32, 31: 1 / 32, 0: 1}),
    (128, 8.0, {0: 1, 28: 1, 29: 0.828168, 30: 0.643743, 31: 0.493507, 32: 0.371122, 33: 0.271425, 34: 0.190211,
                35: 1 / 8, 63: 1 / 8})])
def test_llama3_frequency_ratios(exported, tmp_path, head_dim, factor, table):
    small = dict(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1, head_dim=head_dim)
    scaled = exported(models.tiny_llama(tmp_path / "s", rope_parameters=LLAMA3 | {"factor": factor}, **small))
    theta = {"rope_type": "default", "rope_theta": 5e5}
    plain = exported(models.tiny_llama(tmp_path / "p", rope_parameters=theta, **small))
    ratio = scaled.tensors["rope_freq"][0] / plain.tensors["rope_freq"][0]
    for pair, wanted in table.items():
        assert abs(ratio[pair] - wanted) < 2e-6, pair
        assert wanted not in (1, 1 / 8, 1 / 32) or ratio[pair] == wanted


GGUF_ERRORS = [
    (dict(edit=lambda w: w.add_string("general.architecture", "qwen3moe")), "qwen3moe"),
    (dict(edit=lambda w: w.add_string("general.architecture", "gemma")), "gemma"),
    (dict(edit=lambda w: w.add_float32("llama.logit_scale", 0.5)), "llama.logit_scale = 0.5"),
    (dict(edit=lambda w: w.add_expert_count(8)), "expert_count"),
    (dict(edit=lambda w: w.add_sliding_window(128)), "sliding_window is 128"),
    (dict(edit=lambda w: w.add_uint16("split.count", 3)), "3 parts"),
    (dict(edit=lambda w: w.add_uint32("llama.rope.dimension_count", 8)), "rope.dimension_count is 8"),
    (dict(edit=lambda w: w.add_value_length(8)), "value_length is 8"),
    (dict(edit=lambda w: w.add_eos_token_id(900)), "900"),
    (dict(edit=lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), w.add_rope_scaling_factor(2.0))),
     "longrope"),
    (dict(edit=lambda w: w.add_rope_scaling_attn_factors(0.5)), "attn_factor"),
    (dict(tensors={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}), "blk.0.attn_q_norm.weight"),
    (dict(tensors={"blk.2.attn_norm.weight": np.ones(64, np.float32)}), "blk.2.attn_norm.weight"),
    (dict(tensors={"rope_freqs.weight": np.arange(8, dtype=np.float32)}), "rope_freqs.weight holds 0.0"),
    (dict(tensors={"rope_freqs.weight": np.ones(5, np.float32)}), "m.gguf"),
    (dict(edit=lambda w: w.add_block_count(3)), "missing", "blk.2."),
    (dict(edit=lambda w: w.add_feed_forward_length(97)), "ffn_gate.weight")]


@pytest.mark.parametrize("case", GGUF_ERRORS, ids=lambda case: case[1])
def test_gguf_errors(run, tmp_path, case, monkeypatch):
    def replace(writer, key, value, kind, sub_type=None):  # gguf refuses a second value for a key
        writer.kv_data[-1][key] = gguf.gguf_writer.GGUFValue(value=value, type=kind, sub_type=sub_type)
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", replace)
    folder = models.tiny_llama(tmp_path / "m")
    refused(run, tmp_path, models.gguf_file(folder, tmp_path / "m.gguf", **case[0]), *case[1:])


def test_gguf_broken(run, tmp_path):
    path = models.gguf_file(models.tiny_llama(tmp_path / "m"), tmp_path / "m.gguf")
    data = path.read_bytes()
    for size in (4, 20, 300, len(data) - 5000):
        path.write_bytes(data[:size])
        refused(run, tmp_path, path, "m.gguf")
    path.write_bytes(data[:4] + data[7:3:-1] + data[8:])
    refused(run, tmp_path, path, "m.gguf")
    (tmp_path / "n.gguf").write_bytes(b"<html>")
    refused(run, tmp_path, tmp_path / "n.gguf", "n.gguf")


def test_gguf_big_endian(run, tmp_path, monkeypatch):
    path = models.gguf_file(models.tiny_llama(tmp_path / "m"), tmp_path / "m.gguf",
                            writer=lambda *a: gguf.GGUFWriter(*a, endianess=gguf.GGUFEndian.BIG))
    refused(run, tmp_path, path, "little-endian")


def test_a_type_that_gguf_cannot_dequantize(run, tmp_path, monkeypatch):
    path = models.gguf_file(models.tiny_llama(tmp_path / "m"), tmp_path / "m.gguf", "Q4_0")
    monkeypatch.delitem(gguf.quants._type_traits, gguf.GGMLQuantizationType.Q4_0)
    refused(run, tmp_path, path, "Q4_0", "token_embedding")


# ---- How it writes ----

@pytest.mark.parametrize("kind", ["f32", "bf16", "meta", "gguf"])
def test_one_tensor_at_a_time(run, tmp_path, monkeypatch, kind):
    folder = models.tiny_llama(tmp_path / "m", dtype="bfloat16" if kind == "bf16" else "float32", vocab_size=132)
    source = (models.gguf_file(folder, tmp_path / "m.gguf", "Q8_0") if kind == "gguf" else
              models.meta_folder(folder, tmp_path / "t", 2) if kind == "meta" else folder)
    opened, alive = export.open_source, []

    def watching(path):
        source = opened(path)
        read = source.read

        def one(name):
            assert not any(array() is not None for array in alive)
            result = read(name)
            alive[:] = [weakref.ref(result)]
            return result
        source.read = one
        return source
    monkeypatch.setattr(export, "open_source", watching)
    monkeypatch.setattr(export, "settle_tie", lambda source, tied: False)
    assert run(source, tmp_path / "x.bin")[0] == 0 and alive


def test_peak_memory_is_about_the_largest_tensor(run, tmp_path):
    """And the file's buffer."""
    folder = models.tiny_llama(tmp_path / "m", vocab_size=16384, tie_word_embeddings=True)  # embedding: 4 MB
    source = models.gguf_file(folder, tmp_path / "m.gguf", "Q8_0")
    tracemalloc.start()
    try:
        assert run(source, tmp_path / "x.bin")[0] == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 1 < (peak - export.BUFFER) / (16384 * 64 * 4) < 2.3


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), SystemExit(143)])
def test_interruption_leaves_nothing(run, tmp_path, plain, monkeypatch, error):
    folder = copy(plain, tmp_path / "m")
    (tmp_path / "old.bin").write_bytes(b"old")
    opened = export.open_source

    def breaking(path):
        source = opened(path)
        read, count = source.read, iter(range(100))

        def failing(name):
            if next(count) == 9:
                raise error
            return read(name)
        source.read = failing
        return source
    monkeypatch.setattr(export, "open_source", breaking)
    code, message = run(folder, tmp_path / "old.bin")
    assert code == getattr(error, "code", 1)
    assert sorted(os.listdir(tmp_path)) == ["m", "old.bin"] and (tmp_path / "old.bin").read_bytes() == b"old"


SIGNALS = ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129))


def start(*arguments, **environment):
    """The script, signals as a terminal has them: also where a shell has started the suite in the background."""
    begin = "import runpy, signal, sys; sys.argv[:] = sys.argv[1:]; " \
            "signal.signal(signal.SIGINT, signal.default_int_handler); signal.signal(signal.SIGHUP, signal.SIG_DFL); " \
            "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.Popen([sys.executable, "-c", begin, EXPORT, *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | environment)


@pytest.mark.parametrize("number, code", SIGNALS)
def test_signals(tmp_path, number, code):
    """While a tensor is read, and while a library that catches what it can is loaded for it."""
    folder, library = models.tiny_llama(tmp_path / "m"), tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(
        "import numpy, time\nnumpy.isfinite = lambda a: (print('writing', flush=True), time.sleep(300))\n")
    process = start(folder, tmp_path / "x.bin", PYTHONPATH=str(library))
    assert process.stdout.readline() == b"writing\n"
    assert any(name.endswith(".tmp") for name in os.listdir(tmp_path))
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code and errors.count(b"\n") == 1 and b"has no tokenizer" in errors
    assert sorted(os.listdir(tmp_path)) == ["library", "m"]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_signals_while_libraries_are_loaded(tmp_path, library):
    """From the first moment on, and where a library would turn an exception into another one."""
    folder, path = models.tiny_llama(tmp_path / "m"), tmp_path / "path"
    path.mkdir()
    (path / f"{library}.py").write_text("import time\ntry:\n    print('loading', flush=True)\n    time.sleep(300)\n"
                                        "except BaseException:\n    raise ImportError('not loaded')\n")
    for number, code in SIGNALS:
        process = start(folder, tmp_path / "x.bin", PYTHONPATH=str(path))
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(number)
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == code and b"not loaded" not in errors and errors.count(b"\n") <= 1
        assert sorted(os.listdir(tmp_path)) == ["m", "path"]


@pytest.mark.parametrize("arguments", [["m", "x.bin"], ["--hf", "back", "m.bin"], ["--tokenizer", "t", "t.bin"]])
def test_no_room(run, exported, tmp_path, arguments):
    """A limit to the size of files stands for a full disk."""
    exported(models.tiny_llama(tmp_path / "m"))
    (tmp_path / "t").mkdir()
    Tokenizer(BPE({chr(k): k for k in range(50000)}, [])).save(str(tmp_path / "t" / "tokenizer.json"))
    before = sorted(os.listdir(tmp_path))
    done = subprocess.run([sys.executable, EXPORT, *arguments], cwd=tmp_path, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    error = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and sorted(os.listdir(tmp_path)) == before
    assert re.fullmatch(r"export\.py: .* File too large.* \(.*room .* on the disk\)", error), done.stderr
    assert all(line.startswith("export.py: note: ") for line in done.stderr.splitlines()[:-1]), done.stderr


def test_a_hub_id_that_is_not_to_be_had(tmp_path):
    done = subprocess.run([sys.executable, EXPORT, "owner/none", tmp_path / "x.bin"], capture_output=True, text=True,
                          env=os.environ | dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home")))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.endswith("(no path here has this name: see it, and the network)"), done.stderr
    assert not (tmp_path / "x.bin").exists()


def test_bad_outputs(run, tmp_path, plain):
    folder = copy(plain, tmp_path / "m")
    refused(run, tmp_path, folder, "absent", output=tmp_path / "absent" / "x.bin")
    refused(run, tmp_path, folder, "folder", output=folder)
    refused(run, tmp_path, folder, "folder", output="/")
    path = models.gguf_file(folder, tmp_path / "m.gguf")
    data = path.read_bytes()
    refused(run, tmp_path, path, "itself", output=path)
    assert path.read_bytes() == data
    path = path.rename(tmp_path / "m.tokenizer.bin")
    refused(run, tmp_path, path, "itself", output=tmp_path / "m.bin")
    assert path.read_bytes() == data
    path.unlink()
    (folder / "dangling.json").symlink_to("nowhere")
    weights = (folder / "model.safetensors").read_bytes()
    refused(run, tmp_path, folder, "itself", output=folder / "model.safetensors")
    assert (folder / "model.safetensors").read_bytes() == weights
    os.mkfifo(tmp_path / "fifo")
    refused(run, tmp_path, folder, "device or FIFO", output=tmp_path / "fifo")
    assert (tmp_path / "fifo").is_fifo()


def test_a_link_at_the_output(run, tmp_path, plain):
    """It is replaced; the file that it leads to, such as the bundled model that `make` links model.bin to, stays."""
    (tmp_path / "bundled.bin").write_bytes(b"bundled")
    (tmp_path / "model.bin").symlink_to("bundled.bin")
    assert run(copy(plain, tmp_path / "m"), tmp_path / "model.bin")[0] == 0
    assert not (tmp_path / "model.bin").is_symlink() and (tmp_path / "model.bin").stat().st_size > 512
    assert (tmp_path / "bundled.bin").read_bytes() == b"bundled"


def test_mode_follows_the_umask(run, tmp_path, plain):
    folder, old = copy(plain, tmp_path / "m"), os.umask(0o027)
    try:
        assert run(folder, tmp_path / "x.bin")[0] == 0
    finally:
        os.umask(old)
    assert (tmp_path / "x.bin").stat().st_mode & 0o777 == 0o640


# ---- Back to Hugging Face ----

@pytest.mark.parametrize("case", [
    {}, dict(family="qwen2"), dict(family="mistral", head_dim=24), dict(tie_word_embeddings=True, dtype="bfloat16"),
    dict(attention_bias=True, mlp_bias=True, eos_token_id=[3, 4]),
    dict(rope_parameters=LLAMA3 | {"factor": 32.0}), dict(rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e5, "original_max_position_embeddings": 64})], ids=str)
def test_round_trip(run, exported, tmp_path, case):
    folder, back = models.tiny_llama(tmp_path / "m", **case), tmp_path / "back"
    first = exported(folder)
    assert run("--hf", back, tmp_path / "m.bin") == (0, "")
    models_ = [models.load_reference(path) for path in (folder, back)]
    states = [model.state_dict() for model in models_]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    ids = torch.arange(100)[None] % 131
    with torch.no_grad():
        logits = [model(ids).logits for model in models_]
    assert torch.equal(*logits)
    assert models_[1].generation_config.eos_token_id == first.tensors["eos_ids"].tolist()
    config = json.loads((back / "config.json").read_text())
    assert config["dtype"] == "float32" and config["rope_theta"] == first.header["rope_theta"]
    second = exported(back)
    same_weights(second, first)
    assert first.header | dict(config_size=0) == second.header | dict(config_size=0)


@pytest.mark.parametrize("source", ["pt", "meta", "gguf"])
def test_round_trip_of_other_sources(run, exported, tmp_path, source):
    folder, back = models.tiny_llama(tmp_path / "m"), tmp_path / "back"
    path = dict(pt=lambda: models.llama2c_pt(folder, tmp_path / "x.pt"),
                meta=lambda: models.meta_folder(folder, tmp_path / "x", max_seq_len=256),
                gguf=lambda: models.gguf_file(folder, tmp_path / "x.gguf"))[source]()
    exported(path, "x.bin")
    assert run("--hf", back, tmp_path / "x.bin") == (0, "")
    with torch.no_grad():
        logits = [models.load_reference(path)(torch.arange(100)[None]).logits for path in (folder, back)]
    assert torch.equal(*logits)


# ---- bfloat16 ----

@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("gemma2", True), ("phi3", False)])
def test_bf16(run, tmp_path, family, tied):
    """Half the bytes of the matrices, the same logits to the bit, and back to the same tensors and type."""
    folder = models.tiny_llama(tmp_path / "m", family, dtype="bfloat16", tie_word_embeddings=tied)
    wide, narrow, back = tmp_path / "wide.bin", tmp_path / "narrow.bin", tmp_path / "back"
    assert run(folder, wide)[0] == run("--bf16", folder, narrow)[0] == 0
    header = np.fromfile(narrow, "<i8", 64)
    matrices = sum(array.numel() for array in load_file(folder / "model.safetensors").values() if array.ndim == 2)
    assert header[2] == 1 and 0 <= os.path.getsize(wide) - os.path.getsize(narrow) - 2 * matrices < 64 * 64
    logits = [subprocess.run([EXPORT.parent / "run", path, "-m", "logits", "-I", "1 2 3 4 5 6 7 8 9", "-o", "-"],
                             check=True, capture_output=True).stdout for path in (wide, narrow)]
    assert logits[0] == logits[1] and len(logits[0]) == 9 * 4 * header[9]
    assert run("--hf", back, narrow)[0] == 0
    tensors, wanted = (load_file(path / "model.safetensors") for path in (back, folder))
    config = json.loads((back / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and tensors.keys() == wanted.keys()
    assert all(tensors[name].dtype == torch.bfloat16 and torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert run("--bf16", back, tmp_path / "again.bin")[0] == 0
    skip = header[23] // 64 * 64 + 64  # the configs differ
    assert (tmp_path / "again.bin").read_bytes()[512:-skip - 512] == narrow.read_bytes()[512:-skip - 512]


def test_bf16_refuses_to_round(run, tmp_path):
    """The smallest bit that bfloat16 lacks, in one value of a matrix; in a norm it may stay, and comes back."""
    folder = models.tiny_llama(tmp_path / "m", dtype="bfloat16")
    state = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    state["model.layers.1.input_layernorm.weight"][5] = 1 + 2 ** -20
    save_file(state, folder / "model.safetensors")
    assert run("--bf16", folder, tmp_path / "x.bin")[0] == run("--hf", tmp_path / "back", tmp_path / "x.bin")[0] == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(tensor.float(), state[name]) for name, tensor in back.items())
    state["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[-1, -1] |= 1
    save_file(state, folder / "model.safetensors")
    os.remove(tmp_path / "x.bin")
    code, error = run("--bf16", folder, tmp_path / "x.bin")
    assert code == 1 and "model.layers.1.mlp.up_proj.weight" in error and "bfloat16" in error
    assert not (tmp_path / "x.bin").exists() and run(folder, tmp_path / "x.bin")[0] == 0


def test_no_tokenizer_of_another_model_is_left_beside(run, tmp_path):
    """A source without a tokenizer does not take the name beside an older one, which run could not tell from its own."""
    folder, stale = models.tiny_llama(tmp_path / "m"), tmp_path / "m.tokenizer.bin"
    stale.write_bytes(b"another model's")
    code, error = run(folder, tmp_path / "m.bin")
    assert code == 1 and "is of another model" in error
    assert not (tmp_path / "m.bin").exists() and stale.read_bytes() == b"another model's"


def test_weights_of_a_round_trip_are_as_readable_as_its_config(run, exported, tmp_path):
    exported(models.tiny_llama(tmp_path / "m"))
    assert run("--hf", tmp_path / "back", tmp_path / "m.bin")[0] == 0
    assert len({file.stat().st_mode for file in (tmp_path / "back").iterdir()}) == 1


@pytest.mark.parametrize("key", ["num_hidden_layers", "head_dim", "hidden_size"])
def test_absurd_sizes_take_no_memory(run, tmp_path, key):
    folder = models.tiny_llama(tmp_path / "m")
    models.edit_json(folder / "config.json", **{key: 2_000_000_000})
    code, error = run(folder, tmp_path / "m.bin")
    assert code == 1 and f"{key} is 2000000000" in error


def test_round_trip_in_shards_with_tokenizer(run, exported, tmp_path, monkeypatch):
    folder, back = models.tiny_llama(tmp_path / "m"), tmp_path / "back"
    exported(folder)
    monkeypatch.setattr(export, "MAX_SHARD", "100KB")
    code, error = run("--hf", back, tmp_path / "m.bin", "--from", folder)
    assert code == 1 and "no tokenizer files" in error and not back.exists()
    Tokenizer(BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    back.mkdir()
    monkeypatch.chdir(back)
    assert run("--hf", ".", tmp_path / "m.bin", "--from", folder) == (0, "")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    assert len(list(back.glob("*.safetensors"))) > 2 and exported(back, "again.bin").data[576:] != b""
    with safe_open(sorted(back.glob("*.safetensors"))[0], "pt") as file:
        assert file.metadata()["format"] == "pt"
    states = [models.load_reference(path).state_dict() for path in (folder, back)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    code, error = run("--hf", back, tmp_path / "m.bin")
    assert code == 1 and "not empty (give a new one)" in error


def test_an_interrupted_round_trip_leaves_nothing(run, exported, tmp_path, plain, monkeypatch):
    import huggingface_hub
    exported(copy(plain, tmp_path / "m"))
    save = huggingface_hub.save_torch_state_dict

    def failing(*arguments, **options):
        save(*arguments, **options)
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", failing)
    code, error = run("--hf", tmp_path / "back", tmp_path / "m.bin")
    assert code == 1 and "No space left" in error and sorted(os.listdir(tmp_path)) == ["m", "m.bin"]


def test_round_trip_errors(run, exported, tmp_path, plain):
    folder, back = copy(plain, tmp_path / "m"), tmp_path / "back"
    data = bytearray(exported(folder).data)
    bad = {"llama2c.bin": (bytes(28) + bytes(1000), "version 1"), "empty.bin": (b"", "version 1"),
           "newer.bin": (data[:8] + b"\x02" + data[9:], "version 1"),
           "short.bin": (data[:-1000], f"short.bin holds {len(data) - 1000} bytes of the {len(data)} that"),
           "header.bin": (data[:300], "version 1"), "huge.bin": (data[:30] + b"\1" + data[31:], "huge.bin holds"),
           "eps.bin": (data[:272] + np.float64(1e-3).tobytes() + data[280:], "rms_norm_eps"),
           "bare.bin": (data[:184] + bytes(8) + data[192:], "no config.json"),
           "deep.bin": (data[:40] + bytes(5) + b"\1\0\0" + data[48:], "version 1")}
    for name, (content, word) in bad.items():
        (tmp_path / name).write_bytes(content)
        code, error = run("--hf", back, tmp_path / name)
        assert code == 1 and word in error and error.count("\n") == 1 and error.endswith(")\n"), (name, error)
        assert not back.exists()
    code, error = run("--hf", back, tmp_path / "absent.bin")
    assert code == 1 and "absent.bin" in error


# ---- Command line ----

@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "c"], ["--hf", "a"], ["--hf", "a", "b", "c"],
                                       ["--from", "a", "b", "c"], ["--hf", "a", "--tokenizer", "b"], ["--hf", "a", "--bf16", "b"],
                                       ["--tokenizer", "--bf16", "a", "b"], ["--nope"]])
def test_usage(run, arguments):
    code, error = run(*arguments)
    assert code == 2 and "export.py" in error


def test_hub_without_network(run, tmp_path, monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    refused(run, tmp_path, "owner/no-such-model", "owner/no-such-model", "hub")


def test_locale_changes_nothing(tmp_path, plain):  # B103
    folder, results = copy(plain, tmp_path / "modèle 模型"), []
    config = json.loads(plain["config.json"]) | {"_name_or_path": "模型\u200b"}
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    for name, environment in dict(c=dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
                                  utf8=dict(PYTHONUTF8="1")).items():
        done = subprocess.run([sys.executable, EXPORT, folder, tmp_path / f"{name}.bin"], capture_output=True,
                              env=os.environ | environment)
        assert done.returncode == 0 and done.stdout == b"", done.stderr
        assert done.stderr.count(b"\n") == 1 and b"has no tokenizer, and none is written" in done.stderr
        results.append(Checkpoint(tmp_path / f"{name}.bin"))
    assert results[0].data == results[1].data and results[0].config["_name_or_path"] == "模型\u200b"


def test_script_metadata():
    text = EXPORT.read_text(encoding="utf-8")
    block = text.split("# /// script\n")[1].split("# ///\n")[0]
    for package in ("gguf", "huggingface_hub", "numpy", "safetensors", "torch", "tqdm", "transformers"):
        assert f'"{package}' in block
    assert 'requires-python = ">=3.10"' in block

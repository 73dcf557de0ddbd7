"""Tiny random models for the tests, as Hugging Face, Meta, llama2.c and GGUF sources of the same weights."""
import json
import re
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

FAMILIES = {name.lower(): (getattr(transformers, name + {"Gemma3": "Text"}.get(name, "") + "Config"),
                           getattr(transformers, name + "ForCausalLM")) for name in """Llama Mistral Ministral Qwen2 Qwen3
            SmolLM3 Gemma Gemma2 Gemma3 Olmo2 Olmo3 Cohere Cohere2 Granite Phi3 StableLm""".split()}
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=131, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2)


def randomize(model, seed):
    """Weights of useful scale: activations and logits of order 1 to 10, no norm weight exactly 1, no bias 0."""
    generator = torch.Generator().manual_seed(seed)
    plus_one = "Gemma" in type(model).__name__  # norms multiply by 1 + weight
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if re.search(r"norms?\.(\d+\.)?weight$", name):
            noise = noise / 10 + (not plus_one)
        elif name.endswith("lm_head.weight"):
            noise = noise * 4 / parameter.shape[1] ** 0.5
        elif parameter.dim() == 2 and "embed_tokens" not in name:
            noise = noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(noise)


def tiny_model(family="llama", seed=0, dtype="float32", **overrides):
    """A random causal model of `family`; `overrides` are config values on top of SMALL."""
    config_class, model_class = FAMILIES[family]
    values = SMALL | ({"sliding_window": None} if family == "mistral" else {"pad_token_id": None}) | overrides
    with torch.device("cpu"):
        model = model_class._from_config(config_class(**values), dtype=torch.float32, attn_implementation="eager")
    randomize(model, seed)
    return model.to(getattr(torch, dtype)).eval()


def tiny_llama(path, family="llama", seed=0, dtype="float32", shard=None, **overrides):
    """Saves tiny_model(...) as a Hugging Face folder, in files of at most `shard` ("100KB") if given. -> folder"""
    folder = Path(path)
    model = tiny_model(family, seed, dtype, **overrides)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return folder


def load_reference(folder, dtype="float32"):
    """The folder's model through transformers: eager attention, float32 unless told otherwise."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


def edit_json(path, change=None, **values):
    """Rewrites a JSON file: `change(dict)` in place, then `values` set (None is written as null)."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    if change:
        change(data)
    data.update(values)
    Path(path).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def edit_tensors(folder, change):
    """Rewrites model.safetensors after `change(dict of tensors)`."""
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def state(folder):
    """({Hugging Face name: float32 tensor} as transformers holds them, lm_head included; config)"""
    model = load_reference(folder)
    return {name: tensor.float() for name, tensor in model.state_dict().items()}, model.config


def to_adjacent(rows, n_heads):
    """q or k rows (n_heads*head_dim, ...) from halves (i, i + head_dim/2) to adjacent pairs (2i, 2i+1)."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


META_NAMES = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
              "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
              "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
              "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
              "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "tok_embeddings", "model.norm": "norm",
              "lm_head": "output", "model.layers": "layers"}


def meta_state(folder):
    """({Meta name: tensor} with adjacent pairs, config) of a Hugging Face folder."""
    tensors, config = state(folder)
    result = {}
    for name, tensor in tensors.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        tensor = to_adjacent(tensor, heads) if heads else tensor
        for ours, theirs in META_NAMES.items():
            name = name.replace(ours, theirs)
        result[name] = tensor.clone()
    return result, config


def llama2c_pt(folder, path, prefix="_orig_mod."):
    """Writes what llama2.c's train.py saves: {"model_args": ..., "model": ...}. -> path"""
    tensors, config = meta_state(folder)
    arguments = dict(dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
                     n_kv_heads=config.num_key_value_heads, vocab_size=config.vocab_size, multiple_of=32,
                     max_seq_len=config.max_position_embeddings, dropout=0.0)
    torch.save({"model_args": arguments, "model": {prefix + name: tensor for name, tensor in tensors.items()},
                "iter_num": 1, "best_val_loss": torch.tensor(1.0), "config": {"device": "cpu"}}, path)
    return path


def meta_folder(folder, path, shards=1, embedding_axis=1, **parameters):
    """Writes Meta's consolidated.NN.pth and params.json; embeddings are split by columns (1) or rows (0). -> path"""
    path = Path(path)
    path.mkdir(parents=True)
    tensors, config = meta_state(folder)
    axes = dict(wq=0, wk=0, wv=0, w1=0, w3=0, output=0, wo=1, w2=1, tok_embeddings=embedding_axis)
    for shard in range(shards):
        pieces = {name: tensor.chunk(shards, axis)[shard].clone() if (axis := axes.get(name.split(".")[-2])) is not None
                  else tensor for name, tensor in tensors.items()}
        torch.save(pieces, path / f"consolidated.{shard:02d}.pth")
    values = dict(dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
                  n_kv_heads=config.num_key_value_heads, multiple_of=32, norm_eps=config.rms_norm_eps, vocab_size=-1)
    (path / "params.json").write_text(json.dumps(values | parameters), encoding="utf-8")
    return path


GGUF_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
              "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
              "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
              "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
              "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
              "model.layers": "blk"}


def gguf_file(folder, path, quantization="F32", edit=None, tensors=None, writer=gguf.GGUFWriter):
    """Writes a GGUF as llama.cpp's converter does: "llama" has q/k (and their biases) in adjacent pairs, "qwen2" not.
    `edit(writer)` may add metadata; `tensors` {name: array} are added. -> path"""
    weights, config = state(folder)
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = writer(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if edit:
        edit(writer)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        tensor = to_adjacent(tensor, heads) if heads and architecture == "llama" else tensor
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        array = tensor.contiguous().numpy()
        if array.ndim == 2 and quantization != "F32":
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["gguf", "huggingface_hub", "numpy", "safetensors", "torch", "tqdm", "transformers>=5"]
# ///
"""Exports a model to run.c's checkpoint, and a checkpoint back to a Hugging Face folder.

Each source becomes a `Source`: a config in Hugging Face's terms and float32 tensors. `describe` turns the config into
the header or refuses it, `layout` lists the tensors (run.c's table specifies both), `write_model` copies them one by
one. What is not known to leave the maths alone is an error that names it.
"""
import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np

# The header: 64 slots of 8 bytes, the magic, then int64 fields, from rms_norm_eps on float64; the others are 0.
MAGIC, HEADER_SIZE, ALIGNMENT, MAX_SHARD = b"run.c\r\n\x1a", 512, 64, "5GB"
SLOTS = {name: slot for first, names in (
    (0, "magic version weight_type dim hidden_dim n_layers n_heads n_kv_heads head_dim vocab_size seq_len"),
    (11, "tied activation norm_kind norm_place qk_norm biases rope_dim rope_pairs n_rope_tables"),
    (20, "bos_id n_eos tokenizer_hash config_size"),
    (24, "n_experts n_experts_used n_shared_experts expert_dim n_dense_layers router"),
    (30, "q_lora_rank kv_lora_rank nope_head_dim v_head_dim"),
    (34, "rms_norm_eps norm_weight_add rope_theta rope_theta_local rope_attention_factor rope_attention_factor_local"),
    (40, "attention_scale embedding_scale residual_scale logit_scale attention_softcap logit_softcap router_scale"),
) for slot, name in enumerate(names.split(), first)}
FORMATS = {"magic": "S8", "tokenizer_hash": "<u8"}
HEADER = np.dtype(dict(names=[*SLOTS], offsets=[8 * slot for slot in SLOTS.values()], itemsize=HEADER_SIZE, formats=[
    FORMATS.get(name, "<i8" if slot < SLOTS["rms_norm_eps"] else "<f8") for name, slot in SLOTS.items()]))

# The tensors in the file's order: name, bit of `biases` (- always), shape (d dim, h hidden_dim, q and k rows of the
# query and key/value heads, v vocab_size), names in Hugging Face's files, in GGUF, in Meta's and llama2.c's.
HUGGING_FACE, GGUF, META = 3, 4, 5
PREFIX = {HUGGING_FACE: "model.layers.{}.", GGUF: "blk.{}.", META: "layers.{}."}
TENSORS = {line.split()[0]: line.split() for line in """
eos_ids          -  n_eos
layer_window     -  n_layers
layer_rope       -  n_layers
rope_freq        -  n_rope_tables,pairs
token_embedding  -  v,d           model.embed_tokens        token_embd   tok_embeddings
attention_norm   -  d             input_layernorm           attn_norm    attention_norm
wq               -  q,d           self_attn.q_proj          attn_q       attention.wq
wk               -  k,d           self_attn.k_proj          attn_k       attention.wk
wv               -  k,d           self_attn.v_proj          attn_v       attention.wv
bq               1  q             self_attn.q_proj          attn_q       attention.wq
bk               1  k             self_attn.k_proj          attn_k       attention.wk
bv               1  k             self_attn.v_proj          attn_v       attention.wv
wo               -  d,q           self_attn.o_proj          attn_output  attention.wo
bo               2  d             self_attn.o_proj          attn_output  attention.wo
ffn_norm         -  d             post_attention_layernorm  ffn_norm     ffn_norm
w1               -  h,d           mlp.gate_proj             ffn_gate     feed_forward.w1
w3               -  h,d           mlp.up_proj               ffn_up       feed_forward.w3
w2               -  d,h           mlp.down_proj             ffn_down     feed_forward.w2
b1               4  h             mlp.gate_proj             ffn_gate     feed_forward.w1
b3               4  h             mlp.up_proj               ffn_up       feed_forward.w3
b2               4  d             mlp.down_proj             ffn_down     feed_forward.w2
final_norm       -  d             model.norm                output_norm  norm
classifier       -  v,d           lm_head                   output       output
""".strip().splitlines()}
TOLERATED = re.compile(r".*rotary_emb\.inv_freq|freqs_cos|freqs_sin|rope\.freqs")  # buffers in older files

# config.json: architectures; keys with few values that run.c follows; keys that are read or harmless; words by which an
# unknown key may change the maths.
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
FIXED = dict(hidden_act=("silu",), pretraining_tp=(1, None), is_causal=(True, None), auto_map=(None,))
READ = re.compile(r"(attention|mlp)_bias|rms_norm_eps|rope_theta|rope_scaling|rope_parameters|num_attention_heads|"
                  r"(use_)?sliding_window|max_window_layers|.*(drop|flash|_implementation|initializer).*")
SUSPECT = re.compile(r".*(scal|multipl|cap|norm|attn|attention|window|expert|moe|rope|rotary|clip|bias|alibi|residual|"
                     r"parallel|lora|quant|spars|prun|per_layer|directional|logit).*")
ROPE_KEYS = {"default": set(), "linear": {"factor"},
             "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
             "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                      "mscale", "mscale_all_dim", "truncate", "finetuned"}}
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# What a GGUF calls config.json's numbers, and what Meta and llama2.c may say of a model.
GGUF_KEYS = dict(hidden_size="embedding_length", intermediate_size="feed_forward_length",
                 num_hidden_layers="block_count", num_attention_heads="attention.head_count", vocab_size="vocab_size",
                 num_key_value_heads="attention.head_count_kv", head_dim="attention.key_length",
                 max_position_embeddings="context_length", rms_norm_eps="attention.layer_norm_rms_epsilon",
                 sliding_window="attention.sliding_window")
META_KEYS = set("dim n_layers n_heads n_kv_heads hidden_dim vocab_size multiple_of ffn_dim_multiplier norm_eps "
                "rope_theta use_scaled_rope rope_scale_factor max_seq_len max_batch_size dropout".split())
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")


class ExportError(Exception):
    """What is wrong, with the value, and what to do: one line."""


def fail(message):
    raise ExportError(message)


def note(message):
    print(f"export.py: note: {message}", file=sys.stderr)


def listing(names):
    names = sorted(map(str, names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextmanager
def reading(what):
    """Whatever a library raises on bad data becomes one line that names the data."""
    try:
        yield
    except (ExportError, MemoryError):
        raise
    except Exception as error:
        fail(f"{what} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def read_json(path):
    with reading(path):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


@contextmanager
def replacing(path):
    """Gives a temporary name beside `path`, renamed to it only when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        for file in temporary.iterdir() if temporary.is_dir() else [temporary] if temporary.exists() else []:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        if temporary.exists():
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if temporary.is_file():
            temporary.unlink()


# ---- From config.json to the header ----

def rope_parameters(config):
    """{"rope_type", "rope_theta", ...}: one form of transformers 4's spelling (rope_theta, rope_scaling) and of 5's."""
    rope, top = {}, {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for given in (config.get("rope_parameters"), config.get("rope_scaling"), top):
        for key, value in (given or {}).items():
            key = "rope_type" if key == "type" else key
            if value is not None and rope.setdefault(key, value) != value:
                fail(f"config: {key} is given as {rope[key]} and as {value} (keep the right one)")
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    kind = rope.setdefault("rope_type", "default")
    if kind not in ROPE_KEYS:
        fail(f"config: rope type {kind!r} is not supported ({', '.join(ROPE_KEYS)} are)")
    if unknown := rope.keys() - ROPE_KEYS[kind] - {"rope_type", "rope_theta"}:
        fail(f"config: {listing(unknown)} of rope type {kind!r}: run.c has no such variant")
    if "rope_theta" not in rope:
        note("config has no rope_theta: 10000 is taken")
    return rope | {"rope_theta": float(rope.get("rope_theta", 10000))}


def rope_table(config):
    """Inverse frequencies (head_dim/2) and the factor of cosine and sine, by transformers' own functions."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    module = LlamaRotaryEmbedding(config)
    table, factor = module.inv_freq.numpy(), float(module.attention_scaling)
    good = all(0 < value < math.inf for value in [*table, factor])
    return (table, factor) if good else fail(f"config: {config.rope_parameters} gives frequencies of 0 or infinity")


def check_keys(config):
    """Refuses values that change the maths in a way that run.c does not follow, or that may. -> model_type"""
    names, kind = config.get("architectures"), config.get("model_type")
    names = names or [name for name in ARCHITECTURES if ARCHITECTURES[name] == kind]
    if len(names) != 1 or names[0] not in ARCHITECTURES or kind not in (None, ARCHITECTURES[names[0]]):
        fail(f"architecture {listing(names)} of model_type {kind} is not supported ({', '.join(ARCHITECTURES)} are)")
    for key, value in config.items():
        neutral = value in (None, "", [], {}) or value is False or type(value) is not bool and value in (0, 1)
        unknown = SUSPECT.fullmatch(key) and not READ.fullmatch(key) and not neutral
        if value not in FIXED[key] if key in FIXED else unknown:
            fail(f"config: {key} is {value!r}: run.c has no such variant")
    return ARCHITECTURES[names[0]]


def settle(config, generation):
    """config.json as transformers understands it. -> (config as a dict, as transformers' object, end-of-text ids)"""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    kind, rope = check_keys(config), rope_parameters(config)
    settled = {key: value for key, value in config.items()
               if key not in ("rope_theta", "rope_scaling", "partial_rotary_factor")} | {"rope_parameters": rope}
    c = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(settled)))
    for key in ("tie_word_embeddings", "rms_norm_eps", "max_position_embeddings"):
        if key not in config:
            note(f"config has no {key}: transformers' default for {kind} is taken, {getattr(c, key)}")
    stops = []
    default = None if "eos_token_id" in generation else c.eos_token_id
    for ids in (generation.get("eos_token_id"), config.get("eos_token_id", default)):
        stops += [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None and i not in stops]
    return settled, c, stops


def describe(c, stops):
    """The header (see HEADER) of a config object, without what depends on the tensors, and its rope table."""
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    biases = {"qwen2": 1, "llama": 3 * getattr(c, "attention_bias", 0) + 4 * getattr(c, "mlp_bias", 0)}
    bos, window = c.bos_token_id, getattr(c, "sliding_window", None)
    table, factor = rope_table(c)
    h = dict(
        magic=MAGIC, version=1, dim=c.hidden_size, hidden_dim=c.intermediate_size, n_layers=c.num_hidden_layers,
        n_heads=c.num_attention_heads, n_kv_heads=c.num_key_value_heads, head_dim=head_dim, vocab_size=c.vocab_size,
        seq_len=c.max_position_embeddings, norm_place=1 | 4, biases=biases.get(c.model_type, 0), rope_dim=head_dim,
        n_rope_tables=1, bos_id=-1 if bos is None else bos, n_eos=len(stops), rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_parameters["rope_theta"], rope_attention_factor=factor, rope_attention_factor_local=1,
        attention_scale=head_dim ** -0.5, embedding_scale=1, residual_scale=1, logit_scale=1)
    for key in ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "seq_len"):
        if type(h[key]) is not int or not 0 < h[key] < 2 ** 31:
            fail(f"config: {key} is {h[key]!r} (a positive integer is expected)")
    if h["n_heads"] % h["n_kv_heads"] or head_dim % 2 or not 0 <= c.rms_norm_eps < math.inf:
        fail(f"config: {h['n_heads']} heads, {h['n_kv_heads']} key/value heads, head_dim {head_dim}, rms_norm_eps "
             f"{c.rms_norm_eps} (a multiple, an even number and at least 0 are expected)")
    if window is not None and window < h["seq_len"] or set(getattr(c, "layer_types", None) or ()) - {"full_attention"}:
        fail(f"config: sliding_window {window} of {h['seq_len']} positions, or layer_types (full attention only)")
    if bad := [i for i in [*stops, *([] if bos is None else [bos])] if type(i) is not int or not 0 <= i < c.vocab_size]:
        fail(f"bos or eos {listing(bad)} is outside the vocabulary of {c.vocab_size}")
    return (h, table) if len(stops) <= 16 else fail(f"{len(stops)} end-of-text ids: {listing(stops)} (at most 16)")


# ---- The checkpoint ----

def layout(h):
    """(name, layer or None, shape, type, offset) of each tensor, then of the config; all on multiples of 64 bytes."""
    sizes = h | dict(pairs=h["rope_dim"] // 2, d=h["dim"], h=h["hidden_dim"], v=h["vocab_size"],
                     q=h["n_heads"] * h["head_dim"], k=h["n_kv_heads"] * h["head_dim"])
    names, end = list(TENSORS), HEADER_SIZE
    order = [(name, None) for name in names[:5]] + [(name, i) for i in range(h["n_layers"]) for name in names[5:-2]]
    for name, layer in order + [(name, None) for name in names[-2:len(names) - h["tied"]]]:
        bit, shape = TENSORS[name][1:3]
        if bit == "-" or h["biases"] & int(bit):
            offset, shape = -(-end // ALIGNMENT) * ALIGNMENT, tuple(sizes[key] for key in shape.split(","))
            yield name, layer, shape, "<i4" if name in names[:3] else "<f4", offset
            end = offset + 4 * math.prod(shape)
    if h["config_size"]:
        yield "config_json", None, (h["config_size"],), "u1", -(-end // ALIGNMENT) * ALIGNMENT


@dataclass
class Source:
    """A model to export: a config in Hugging Face's terms, and tensors named as in one column of TENSORS."""
    config: dict
    generation: dict                    # generation_config.json
    shapes: dict[str, tuple]
    read: Callable[[str], np.ndarray]   # name -> float32 array
    column: int
    adjacent: bool = False              # q and k rows hold pairs (2i, 2i+1) instead of halves (i, i + head_dim/2)
    factors: np.ndarray = None          # (head_dim/2) divide the inverse frequencies


def tensor_name(column, name, layer=None):
    prefix = "" if layer is None else PREFIX[column].format(layer)
    return prefix + TENSORS[name][column] + (".bias" if TENSORS[name][1] != "-" else ".weight")


def to_halves(rows, n_heads):
    """Rows of q or k (n_heads*head_dim, ...) from adjacent pairs (2i, 2i+1) to halves (i, i + head_dim/2)."""
    pairs = rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def settle_tie(source, tied):
    """As transformers does: a classifier that the file holds beside a tied embedding counts if it differs."""
    embedding, classifier = (tensor_name(source.column, name) for name in ("token_embedding", "classifier"))
    if tied and {embedding, classifier} <= source.shapes.keys():
        if tied := np.array_equal(source.read(embedding), source.read(classifier)):
            del source.shapes[classifier]
        elif source.column == HUGGING_FACE:
            note(f"tie_word_embeddings is true, but {classifier} differs from {embedding}: both are kept")
    return tied


def check_tensors(source, header):
    """Every tensor is there and has its shape, and none is left over."""
    wanted = {tensor_name(source.column, name, layer): shape for name, layer, shape, *_ in layout(header)
              if len(TENSORS[name]) > 3}
    if missing := wanted.keys() - source.shapes.keys():
        fail(f"missing tensors: {listing(missing)}")
    if extra := {name for name in source.shapes.keys() - wanted.keys() if not TOLERATED.fullmatch(name)}:
        fail(f"tensors that this architecture does not have: {listing(extra)}")
    for name, shape in wanted.items():
        if tuple(source.shapes[name]) != shape:
            fail(f"{name} has the shape {tuple(source.shapes[name])}, {shape} by the config")


def write_model(source, path, fingerprint):
    """Writes the checkpoint, tensor by tensor."""
    from tqdm import tqdm
    with reading("config"):
        config, c, stops = settle(source.config, source.generation)
        h, table = describe(c, stops)
    config |= dict(tie_word_embeddings=settle_tie(source, c.tie_word_embeddings))
    blob = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    h = dict.fromkeys(SLOTS, 0) | h | dict(tied=int(config["tie_word_embeddings"]), tokenizer_hash=fingerprint)
    check_tensors(source, h)
    h["config_size"] = len(blob)
    small = dict(eos_ids=stops, layer_window=[0] * h["n_layers"], layer_rope=[1] * h["n_layers"],
                 rope_freq=table if source.factors is None else table / source.factors, config_json=[*blob])
    heads = dict(wq=h["n_heads"], bq=h["n_heads"], wk=h["n_kv_heads"], bk=h["n_kv_heads"])
    with open(path, "xb") as file:
        header = np.zeros(1, HEADER)  # the slots between and after the fields are zeros
        header[0] = tuple(h.values())
        file.write(header.tobytes())
        for name, layer, shape, kind, offset in tqdm(list(layout(h)), unit=" tensors", disable=None):
            with reading(name):
                array = small[name] if name in small else source.read(tensor_name(source.column, name, layer))
            if source.adjacent and name in heads:
                array = to_halves(array, heads[name])
            array = np.ascontiguousarray(array, kind).reshape(shape)
            if not np.isfinite(array).all():
                note(f"{tensor_name(source.column, name, layer)} holds NaN or infinity")
            file.write(bytes(offset - file.tell()))
            file.write(array.data)
            del array  # else it would live on while the next one is read


# ---- Sources ----

def open_hugging_face(folder):
    """config.json and safetensors, in one file or several under an index."""
    from safetensors import safe_open
    index, files, indexed = folder / "model.safetensors.index.json", ["model.safetensors"], {}
    if (folder / "adapter_config.json").exists():
        fail(f"{folder} holds an adapter (merge it into its model first)")
    if not (folder / files[0]).exists():
        if not index.exists():
            fail(f"{folder} has no model.safetensors, but {listing(file.name for file in folder.iterdir())} (make it "
                 "from a pytorch_model.bin with transformers' save_pretrained)")
        indexed = read_json(index)["weight_map"]
        files = sorted(set(indexed.values()))
    handles, shapes = {}, {}
    for file in files:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            fail(f"{index}: the path {file!r} leaves the folder")
        with reading(folder / file):
            handle = safe_open(folder / file, "pt")
        for name in handle.keys():
            if (kind := handle.get_slice(name).get_dtype()) not in ("F32", "BF16", "F16") or name in handles:
                fail(f"{name} is of type {kind}, or in two files (F32, BF16 and F16, once, are supported)")
            handles[name], shapes[name] = handle, tuple(handle.get_slice(name).get_shape())
    if lost := indexed.keys() - handles.keys():
        fail(f"missing tensors: {listing(lost)} (named by {index.name})")
    generation = folder / "generation_config.json"
    return Source(read_json(folder / "config.json"), read_json(generation) if generation.exists() else {}, shapes,
                  lambda name: handles[name].get_tensor(name).float().numpy(), HUGGING_FACE)


def open_gguf(path):
    """A GGUF of the architecture llama (q and k in adjacent pairs) or qwen2, of any type that gguf dequantizes."""
    import gguf
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()
              if not name.startswith("tokenizer.") or name.endswith("_token_id")}
    fields = {key: float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5, not 9.99999975e-06
              for key, value in fields.items()}
    arch, parts = fields.get("general.architecture"), fields.get("split.count", 1)
    if arch not in ("llama", "qwen2") or parts > 1 or reader.byte_order != "I":
        fail(f"{path}: GGUF architecture {arch!r}, {parts} parts, byte order {reader.byte_order} (llama and qwen2, "
             "merged, little-endian, are supported)")
    weights = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in weights.items()}

    def get(key, default=None):
        return fields.pop(f"{arch}.{key}", default)

    def read(name):
        kind, rows, result = weights[name].tensor_type, weights[name].data, np.empty(shapes[name], np.float32)
        step = max(1, 2 ** 18 // shapes[name][-1]) if result.ndim > 1 else len(result)
        for row in range(0, len(result), step):  # dequantizing all at once takes several times the tensor
            result[row:row + step] = gguf.quants.dequantize(rows[row:row + step], kind)
        return result

    config = {key: value for key, name in GGUF_KEYS.items() if (value := get(name)) is not None}
    config["vocab_size"] = shapes["token_embd.weight"][0]
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := get(key, head_dim)) != head_dim:
            fail(f"{path}: {key} is {value}, head_dim {head_dim} (run.c has no such variant)")
    rope = dict(rope_theta=get("rope.freq_base", 10000.0))
    scaling, factor, original = (get(f"rope.scaling.{key}") for key in ("type", "factor", "original_context_length"))
    if scaling != "none" and factor not in (None, 1):
        rope |= dict(rope_type=scaling or "linear", factor=factor)
        rope |= dict(original_max_position_embeddings=original) if scaling == "yarn" else {}
    get("tensor_data_layout"), get("rope.scaling.finetuned")
    if unknown := [key for key in fields if key.startswith(arch + ".") and fields[key] not in (0, 1, "")]:
        fail(f"{path}: {listing(f'{key} = {fields[key]}' for key in unknown)} (run.c has no such variant)")
    factors = read("rope_freqs.weight") if "rope_freqs.weight" in shapes else None
    shapes.pop("rope_freqs.weight", None)
    if factors is not None and not all(0 < factor < math.inf for factor in factors):
        fail(f"{path}: rope_freqs.weight holds {factors.min()} to {factors.max()} (positive numbers are expected)")
    if factors is not None and np.allclose(factors, gguf_factors(rope, head_dim, factors.max()), rtol=1e-5):
        rope, factors = rope | LLAMA3 | dict(factor=float(factors.max())), None
    stops = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config |= dict(rope_parameters=rope, tie_word_embeddings="output.weight" not in shapes, eos_token_id=stops,
                   bos_token_id=fields.get("tokenizer.ggml.bos_token_id"))
    if arch == "llama":
        config |= dict(attention_bias="blk.0.attn_q.bias" in shapes, mlp_bias="blk.0.ffn_gate.bias" in shapes)
    return Source(synthesize(arch, **config), {}, shapes, read, GGUF, adjacent=arch == "llama", factors=factors)


def synthesize(kind, **values):
    """A config.json for a source without one."""
    name = next(name for name in ARCHITECTURES if ARCHITECTURES[name] == kind)
    stops = [i for i in values.pop("eos_token_id") if i is not None]
    return dict(architectures=[name], model_type=kind, dtype="float32", hidden_act="silu", **values,
                eos_token_id=stops[0] if len(stops) == 1 else stops or None)


def gguf_factors(rope, head_dim, factor):
    """What Llama 3's scaling divides the frequencies by (head_dim/2): the form it has in a GGUF."""
    from transformers import LlamaConfig
    plain, scaled = (rope_table(LlamaConfig(head_dim=head_dim, rope_parameters=parameters))[0] for parameters in (
        rope | dict(rope_type="default"), rope | LLAMA3 | dict(factor=float(factor))))
    return plain / scaled


def open_torch(path):
    """llama2.c's .pt, or Meta's folder of params.json and consolidated.NN.pth; q and k in adjacent pairs."""
    import torch
    is_meta, shards = path.is_dir(), []
    files = sorted(path.glob("consolidated.*.pth")) if is_meta else [path]
    for file in files:
        with reading(file):
            shards.append(torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)))
    p = read_json(path / "params.json") if is_meta else shards[0]["model_args"]
    if not is_meta:
        shards = [{name.removeprefix("_orig_mod."): tensor for name, tensor in shards[0]["model"].items()}]
    if unknown := p.keys() - META_KEYS:
        fail(f"{path}: parameters {listing(unknown)} (run.c has no such variant)")
    n, first, dim = len(shards), shards[0], p["dim"]
    wanted = dim // len(first["layers.0.attention.wq.weight"])
    if is_meta and [file.name for file in files] != [f"consolidated.{i:02d}.pth" for i in range(wanted)]:
        fail(f"{path} holds {n} shards of {wanted} (consolidated.00.pth to {wanted - 1:02d} are expected)")

    def axis(name):
        """Which one the shards split: rows (0), columns (1), none."""
        kind = name.split(".")[-2:][0]
        by_columns = kind in ("wo", "w2") or kind == "tok_embeddings" and first[name].shape[1] != dim
        return None if n == 1 or "norm" in kind or kind == "rope" else int(by_columns)

    def read(name):
        parts = [first[name]] if axis(name) is None else [shard[name] for shard in shards]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, axis(name))).float().numpy()

    shapes = {name: tuple(size * (n if i == axis(name) else 1) for i, size in enumerate(tensor.shape))
              for name, tensor in first.items()}
    vocab_size = shapes["tok_embeddings.weight"][0]
    llama3, theta, scaled = vocab_size >= 128256, p.get("rope_theta", 10000.0), p.get("use_scaled_rope")
    bos, stops = (128000, [128001, 128008, 128009]) if llama3 else (1, [2] if is_meta else [1, 2])
    seq_len = p.get("max_seq_len") or (131072 if scaled else 8192 if llama3 else 16384 if theta > 1e5 else 4096)
    if "max_seq_len" not in p:
        note(f"{path} does not say the context length: {seq_len} is taken")
    return Source(synthesize(
        "llama", hidden_size=dim, intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        head_dim=dim // p["n_heads"], num_hidden_layers=p["n_layers"], num_attention_heads=p["n_heads"],
        num_key_value_heads=p.get("n_kv_heads") or p["n_heads"],
        rope_parameters=dict(rope_theta=theta) | (scaled and LLAMA3 | dict(factor=p.get("rope_scale_factor", 8)) or {}),
        rms_norm_eps=p.get("norm_eps", 1e-5), tie_word_embeddings=True, vocab_size=vocab_size, bos_token_id=bos,
        eos_token_id=stops, max_position_embeddings=seq_len, attention_bias=False, mlp_bias=False),
        {}, shapes, read, META, adjacent=True)


def find_source(source):
    """The path of SOURCE: as it stands, else brought from the Hugging Face hub."""
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        fail(f"{source} does not exist (a folder, a file or a hub id OWNER/NAME is expected)")
    import huggingface_hub
    with reading(f"{source}, no path here and on the Hugging Face hub,"):
        return Path(huggingface_hub.snapshot_download(source, ignore_patterns=["*/*"], allow_patterns=[
            "*.json", "*.safetensors", *TOKENIZER_FILES]))


def open_source(path):
    """Tells the kinds of source apart by what they hold."""
    with reading(path):
        if (path / "config.json").exists():
            return open_hugging_face(path)
        if (path / "params.json").exists() or path.suffix == ".pt":
            return open_torch(path)
        if path.is_file() and open(path, "rb").read(4) == b"GGUF":
            return open_gguf(path)
    fail(f"{path} is no folder with config.json or params.json, no GGUF and no .pt (for safetensors and .pth, name the "
         "folder)")


# ---- TOK: the tokenizer part goes here, in place of these two ----

def write_tokenizer(source, path):
    """Writes tokenizer.bin of `source` (a folder or file) to `path`. -> whether there was a tokenizer"""
    return False


def tokenizer_hash(source):
    """The fingerprint of the tokenizer of `source`, 0 without one."""
    return 0


# ---- Back to Hugging Face ----

def to_hugging_face(folder, path, tokenizer):
    """Writes config.json, generation_config.json, model.safetensors (as many files as it takes) and tokenizer files."""
    import huggingface_hub
    import torch
    h = np.fromfile(path, HEADER, 1)
    if not len(h) or h["magic"][0] != MAGIC or h["version"][0] != 1:
        fail(f"{path} is not a run.c checkpoint of version 1 (a llama2.c model: export its .pt first)")
    h = {name: h[name][0].item() for name in SLOTS}
    data = np.memmap(path, mode="c")
    with reading(path):
        arrays = {(name, layer): data[offset:][:math.prod(shape) * np.dtype(kind).itemsize].view(kind).reshape(shape)
                  for name, layer, shape, kind, offset in layout(h)}
    if not h["config_size"]:
        fail(f"{path} carries no config.json (export it again)")
    stops = arrays["eos_ids", None].tolist()
    config, c, _ = settle(json.loads(arrays["config_json", None].tobytes()), {})
    wanted, table = describe(c, stops)
    if differing := [key for key in wanted if h[key] != wanted[key]]:
        fail(f"{path}: its config.json says otherwise about {listing(differing)}")
    if not np.array_equal(table, arrays["rope_freq", None][0]):
        fail(f"{path}: its frequencies are not those of its config.json (transformers could not load them)")
    origin = tokenizer and find_source(tokenizer)
    files = [file for name in TOKENIZER_FILES if origin and (file := origin / name).exists()]
    if tokenizer and not files:
        fail(f"{tokenizer} holds no tokenizer files ({listing(TOKENIZER_FILES)})")
    if folder.exists() and any(folder.iterdir()):
        fail(f"{folder} is not empty (give a new one)")
    with replacing(folder) as temporary:
        temporary.mkdir()
        huggingface_hub.save_torch_state_dict(
            {tensor_name(HUGGING_FACE, *key): torch.from_numpy(array) for key, array in arrays.items()
             if len(TENSORS.get(key[0], ())) > 3}, temporary, max_shard_size=MAX_SHARD)
        rope = config["rope_parameters"]  # in both spellings: for transformers 4, and what builds on it, too
        config.pop("torch_dtype", None)
        config |= dict(dtype="float32", rope_theta=rope["rope_theta"])
        config |= {} if rope["rope_type"] == "default" else dict(rope_scaling=rope)
        generation = dict(bos_token_id=config.get("bos_token_id"), eos_token_id=stops)
        for name, value in (("config.json", config), ("generation_config.json", generation)):
            (temporary / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
        for file in files:
            shutil.copyfile(file, temporary / file.name)


# ---- Command line ----

def export(source, path):
    """model.bin, and model.tokenizer.bin where the source has a tokenizer."""
    if path.is_dir() or path.exists() and path.samefile(source):
        fail(f"{path} is a folder or the source itself (give another name)")
    with replacing(path) as model, replacing(path.with_name(path.stem + ".tokenizer.bin")) as tokenizer:
        write_tokenizer(source, tokenizer)
        write_model(open_source(source), model, tokenizer_hash(source))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="SOURCE model.bin", help="what to read, what to write")
    parser.add_argument("--tokenizer", action="store_true", help="SOURCE tokenizer.bin: write the tokenizer only")
    parser.add_argument("--hf", metavar="DIR", help="model.bin: write it as a Hugging Face folder")
    parser.add_argument("--from", metavar="SOURCE", dest="tokenizer_source", help="with --hf: whose tokenizer to copy")
    a = parser.parse_args(arguments)
    if len(a.paths) != (1 if a.hf else 2) or a.hf and a.tokenizer or a.tokenizer_source and not a.hf:
        parser.error("SOURCE model.bin, --tokenizer SOURCE tokenizer.bin, or --hf DIR model.bin [--from SOURCE]")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if a.hf:
            to_hugging_face(Path(a.hf).absolute(), Path(a.paths[0]), a.tokenizer_source)
        elif a.tokenizer:
            with replacing(Path(a.paths[1]).absolute()) as temporary:
                write_tokenizer(find_source(a.paths[0]), temporary) or fail(f"{a.paths[0]} has no tokenizer")
        else:
            export(find_source(a.paths[0]), Path(a.paths[1]).absolute())
    except (ExportError, OSError, MemoryError) as error:
        sys.exit(f"export.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

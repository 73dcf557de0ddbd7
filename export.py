#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["gguf", "huggingface_hub", "jinja2", "numpy", "protobuf", "safetensors", "sentencepiece",
#                 "tokenizers", "torch", "tqdm", "transformers>=5"]
# ///
"""Exports a model to run.c's checkpoint, and a checkpoint back to a Hugging Face folder.

Each source becomes a `Source`: a config in Hugging Face's terms and float32 tensors. `describe` turns the config into
the header or refuses it, `layout` lists the tensors (run.c's table specifies both), `write_model` copies them one by
one. What is not known to leave the maths alone is an error that names it.
"""
import os
import signal
import sys

UNFINISHED = []  # folders of what is being written


def stop(number, _):
    """Ends the program at once: an exception would be lost, or a crash, in a library that loads another one."""
    for folder in UNFINISHED:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


if __name__ == "__main__":  # before all that takes long to load
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, stop)

import argparse
import json
import math
import random
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Callable

import huggingface_hub
import jinja2
import numpy as np
from gguf import GGUFReader, TokenType, quants
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tqdm import tqdm  # torch, transformers and sentencepiece, which take long to load, only where they are used

MAGIC, HEADER_SIZE, ALIGNMENT, MAX_SHARD = b"run.c\r\n\x1a", 512, 64, "5GB"
BUFFER = 1 << 24  # bytes; Linux keeps what is written in long pieces in large pages, which run.c maps sooner
# The header: slots of 8 bytes; zeros follow up to HEADER_SIZE.
HEADER = np.dtype([(name, kind) for kind, names in (
    ("S8", "magic"),
    ("<i8", "version weight_type dim hidden_dim n_layers n_heads n_kv_heads head_dim vocab_size seq_len tied "
            "activation norm_kind norm_place qk_norm biases rope_dim rope_pairs n_rope_tables bos_id n_eos"),
    ("<u8", "tokenizer_hash"),
    ("<i8", "config_size n_experts n_experts_used n_shared_experts expert_dim n_dense_layers router q_lora_rank "
            "kv_lora_rank nope_head_dim v_head_dim"),
    ("<f8", "rms_norm_eps norm_weight_add rope_theta rope_theta_local rope_attention_factor "
            "rope_attention_factor_local attention_scale embedding_scale residual_scale logit_scale attention_softcap "
            "logit_softcap router_scale"),
) for name in names.split()])

# The tensors in the file's order: name, when it is there (- always, else bits of header fields), shape (d dim, h
# hidden_dim, q and k rows of the query and key/value heads, v vocab_size, qn and kn of their norms), names in Hugging
# Face's files, in GGUF, in Meta's and llama2.c's.
HUGGING_FACE, GGUF, META = 3, 4, 5
PREFIX = {HUGGING_FACE: "model.layers.{}.", GGUF: "blk.{}.", META: "layers.{}."}
TENSORS = {line.split()[0]: line.split() for line in """
eos_ids                   -                      n_eos
layer_window              -                      n_layers
layer_rope                -                      n_layers
rope_freq                 -                      n_rope_tables,pairs
token_embedding           -                      v,d  model.embed_tokens          token_embd   tok_embeddings
attention_norm            norm_place:1           d    input_layernorm             attn_norm    attention_norm
attention_norm_bias       norm_place:1,biases:8  d    input_layernorm
wq                        -                      q,d  self_attn.q_proj            attn_q       attention.wq
wk                        -                      k,d  self_attn.k_proj            attn_k       attention.wk
wv                        -                      k,d  self_attn.v_proj            attn_v       attention.wv
bq                        biases:1               q    self_attn.q_proj            attn_q       attention.wq
bk                        biases:1               k    self_attn.k_proj            attn_k       attention.wk
bv                        biases:1               k    self_attn.v_proj            attn_v       attention.wv
q_norm                    qk_norm:3              qn   self_attn.q_norm            attn_q_norm
k_norm                    qk_norm:3              kn   self_attn.k_norm            attn_k_norm
wo                        -                      d,q  self_attn.o_proj            attn_output  attention.wo
bo                        biases:2               d    self_attn.o_proj            attn_output  attention.wo
attention_post_norm       norm_place:2           d    post_attention_layernorm
ffn_norm                  norm_place:4           d    post_attention_layernorm    ffn_norm     ffn_norm
ffn_norm_bias             norm_place:4,biases:8  d    post_attention_layernorm
w1                        -                      h,d  mlp.gate_proj               ffn_gate     feed_forward.w1
w3                        -                      h,d  mlp.up_proj                 ffn_up       feed_forward.w3
w2                        -                      d,h  mlp.down_proj               ffn_down     feed_forward.w2
b1                        biases:4               h    mlp.gate_proj               ffn_gate     feed_forward.w1
b3                        biases:4               h    mlp.up_proj                 ffn_up       feed_forward.w3
b2                        biases:4               d    mlp.down_proj               ffn_down     feed_forward.w2
ffn_post_norm             norm_place:8           d    post_feedforward_layernorm
final_norm                -                      d    model.norm                  output_norm  norm
final_norm_bias           biases:8               d    model.norm
classifier                untied:1               v,d  lm_head                     output       output
config_json               -                      config_size
""".strip().splitlines()}
OTHER_TYPES = dict(eos_ids="<i4", layer_window="<i4", layer_rope="<i4", config_json="u1")  # than float32 and bfloat16
MATRICES = {name for name, row in TENSORS.items() if len(row) > 3 and "," in row[2]}
TOLERATED = re.compile(r".*rotary_emb\.inv_freq|freqs_cos|freqs_sin|rope\.freqs")  # buffers in older files

# The families: Name of NameForCausalLM, model_type, header fields that differ from Llama's, and the keys of config.json
# that transformers follows here and not in every family; a word in capitals stands for several. A key of another family
# is refused: transformers would ignore it.
SEVERAL = dict(BIASES="attention_bias mlp_bias",
               WINDOW="sliding_window layer_types sliding_window_pattern _sliding_window_pattern",
               GEMMA="attention_bias hidden_activation query_pre_attn_scalar final_logit_softcapping")
FAMILIES = {}
for line in """
Llama      llama        -                                         BIASES
Mistral    mistral      -                                         sliding_window
Ministral  ministral    -                                         WINDOW
Qwen2      qwen2        biases=1                                  WINDOW use_sliding_window
Qwen3      qwen3        qk_norm=1                                 attention_bias WINDOW use_sliding_window
SmolLM3    smollm3      -  BIASES WINDOW use_sliding_window no_rope_layers no_rope_layer_interval
Gemma      gemma        norm_weight_add=1                         attention_bias
Gemma2     gemma2       norm_weight_add=1,norm_place=15           GEMMA WINDOW attn_logit_softcapping
Gemma3     gemma3_text  norm_weight_add=1,norm_place=15,qk_norm=1 GEMMA WINDOW rope_local_base_freq
Olmo2      olmo2        norm_place=10,qk_norm=2                   attention_bias
Olmo3      olmo3        norm_place=10,qk_norm=2                   attention_bias WINDOW
Cohere     cohere       norm_kind=1,norm_place=17,rope_pairs=1    attention_bias logit_scale use_qk_norm
Cohere2    cohere2      norm_kind=1,norm_place=17,rope_pairs=1    attention_bias logit_scale use_parallel_block WINDOW
Granite    granite      -  BIASES attention_multiplier embedding_multiplier residual_multiplier logits_scaling
Phi3       phi3         -  sliding_window partial_rotary_factor original_max_position_embeddings
StableLm   stablelm     norm_kind=1,biases=8  use_qkv_bias qk_layernorm use_parallel_residual partial_rotary_factor
""".strip().splitlines():
    name, kind, fields, *keys = line.split()
    FAMILIES[name + "ForCausalLM"] = kind, {key for word in keys for key in SEVERAL.get(word, word).split()}, {
        field: int(value) for field, value in re.findall(r"(\w+)=(\d+)", fields)}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid")
# Keys that are followed in every family or without effect, and words by which another key may change the maths.
READ = re.compile(r"(rms|layer)_norm_eps|rope_(theta|scaling|parameters)|num_attention_heads|pretraining_tp|"
                  r"max_window_layers|.*(drop|flash|_implementation|initializer).*")
SUSPECT = re.compile(r".*(scal|multipl|cap|norm|attn|attention|window|expert|moe|rope|rotary|clip|bias|alibi|residual|"
                     r"parallel|lora|quant|spars|prun|per_layer|directional|logit).*")
ROPE_KEYS = {"default": "", "linear": "factor",
             "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
             "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor",
             "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow truncate finetuned "
                     "mscale mscale_all_dim"}
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


def fail(message):
    """One line: what is wrong, with the value, and what to do. No Exception, lest it be taken for a library's."""
    sys.exit(f"export.py: {message}")


def note(message):
    print(f"export.py: note: {message}", file=sys.stderr)


def listing(names):
    names = sorted(map(str, names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextmanager
def exporting(what, advice=None):
    """Whatever a library or the system raises becomes such a line: the first sentence of what it says, and advice."""
    try:
        yield
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split(". ")[0].split())[:300].rstrip(".")
        size = f" of {what.stat().st_size} bytes" if isinstance(what, Path) and what.is_file() else ""
        of_system = isinstance(error, (OSError, MemoryError)) or "os error" in said  # Rust's, too
        advice = advice or ("see names, permissions and the room in memory and on the disk" if of_system else
                            "it may be cut short or of another kind: bring it again")
        fail(f"cannot export {what}{size}: {said} ({advice})")


def read_json(path):
    with exporting(path):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


@contextmanager
def replacing(path, source=None):
    """Gives a name in a folder beside `path`, renamed to `path` when the block ends well. Files of `source` stay."""
    read = (".safetensors", ".json", ".pth", ".model")
    inputs = [source, *(file for file in source.glob("*") if file.suffix in read and file.exists())] if source else []
    if source and path.is_dir() or path.exists() and any(path.samefile(file) for file in inputs):
        fail(f"{path} is a folder or of the source itself (give another name)")
    if not path.parent.is_dir():
        fail(f"{path.parent} is no folder (make it, or give another name)")
    path = Path(os.path.realpath(path) if os.path.isdir(path) else path)  # a link to a file is replaced, not the file
    if path.exists() and not (path.is_file() or path.is_dir()):
        fail(f"{path} is a device or FIFO (give a file's name)")
    with tempfile.TemporaryDirectory(".tmp", f".{path.name}.", path.parent) as folder:
        UNFINISHED.append(folder)
        yield (temporary := Path(folder, path.name))
        for file in (file for file in Path(folder).rglob("*") if file.is_file()):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        if temporary.exists():
            os.replace(temporary, path)


# ---- From config.json to the header ----

def rope_parameters(config, reads):
    """{"rope_type", "rope_theta", ...}: one form of transformers 4's spelling (rope_theta, rope_scaling) and of 5's."""
    rope, top = {}, {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for given in (config.get("rope_parameters"), config.get("rope_scaling"), top):
        for key, value in (given or {}).items():
            key = "rope_type" if key == "type" else key
            if value is not None and rope.setdefault(key, value) != value:
                fail(f"config: {key} is given as {rope[key]} and as {value} (keep the right one)")
    if "rope_theta" not in rope:
        note("config has no rope_theta: transformers' default is taken")
    if rope.get("partial_rotary_factor") == 1 and "partial_rotary_factor" not in reads:
        del rope["partial_rotary_factor"]
    return {"rope_type": "default"} | rope


def rope_tables(c):
    """By transformers' own functions, for all layers, or one for global and one for local ones: {kind of layers:
    (inverse frequencies (rope_dim/2), factor of cosine and sine)}"""
    import transformers
    module = vars(sys.modules[getattr(transformers, c.architectures[0]).__module__])
    rotary = next(module[name] for name in module if name.endswith("RotaryEmbedding"))(c)
    kinds = [kind for kind in ("full_attention_", "sliding_attention_") if hasattr(rotary, kind + "inv_freq")] or [""]
    tables = {kind.removesuffix("_"): (getattr(rotary, kind + "inv_freq").numpy(),
                                       float(getattr(rotary, kind + "attention_scaling"))) for kind in kinds}
    if not all(0 < value < math.inf for table, factor in tables.values() for value in [*table, factor]):
        fail(f"config: {c.rope_parameters} gives frequencies of 0 or infinity")
    return tables


def check_keys(config):
    """Refuses values that change the maths in a way that run.c does not follow, or that may. -> architecture"""
    names, kind = config.get("architectures"), config.get("model_type")
    names = names or [name for name in FAMILIES if FAMILIES[name][0] == kind]
    if len(names) != 1 or names[0] not in FAMILIES or kind not in (None, FAMILIES[names[0]][0]):
        fail(f"architecture {listing(names)} of model_type {kind} is not supported ({', '.join(FAMILIES)} are)")
    reads = FAMILIES[names[0]][1]
    for key, value in config.items():
        neutral = value in (None, "", [], {}) or value is False or type(value) is not bool and value in (0, 1)
        refused = SUSPECT.fullmatch(key) and key not in reads and not READ.fullmatch(key) and not neutral
        if key == "layer_types" and key not in reads:
            refused = {*(value or ())} - {"full_attention"}
        if key == "auto_map" and value:  # code beside the model: transformers leaves it alone where it knows the name
            refused = not str(value.get("AutoModelForCausalLM")).endswith("." + names[0])
        if refused or key == "is_causal" and not value:
            fail(f"config: {key} is {value!r}: run.c has no such variant")
    return names[0]


def settle(config, generation):
    """config.json as transformers understands it. -> (config as a dict, as transformers' object, end-of-text ids)"""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    architecture = check_keys(config)
    kind, reads, _ = FAMILIES[architecture]
    for key in ("num_hidden_layers", "head_dim", "hidden_size"):  # transformers makes lists and tables of such lengths
        if type(value := config.get(key)) is int and value > 1 << 20:
            fail(f"config: {key} is {value} (at most {1 << 20} is expected)")
    by_kind = kind in ("gemma3_text", "olmo3")  # rope_parameters for each kind of layers
    settled = {key: value for key, value in config.items() if key not in (
        "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")}
    given = config if by_kind else settled | {"rope_parameters": rope_parameters(config, reads)}
    c = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(given)) | {"architectures": [architecture]})
    ropes = c.rope_parameters if by_kind else {"full_attention": c.rope_parameters}
    if unknown := ropes.keys() - {"full_attention", "sliding_attention"}:
        fail(f"config: {listing(unknown)} of rope_parameters, which {architecture} has for each kind of layers")
    for rope in ropes.values():
        if (rope_type := rope["rope_type"]) not in ROPE_KEYS:
            fail(f"config: rope type {rope_type!r} is not supported ({', '.join(ROPE_KEYS)} are)")
        known = {"type", "rope_type", "rope_theta", *ROPE_KEYS[rope_type].split()}
        if unknown := rope.keys() - known - (reads & {"partial_rotary_factor"}):
            fail(f"config: {listing(unknown)} of rope type {rope_type!r}: run.c has no such variant")
        rope["rope_theta"] = float(rope["rope_theta"])
    for key in ("tie_word_embeddings", "rms_norm_eps", "max_position_embeddings"):
        if key not in config and hasattr(c, key):
            note(f"config has no {key}: transformers' default for {kind} is taken, {getattr(c, key)}")
    stops = []
    default = None if "eos_token_id" in generation else c.eos_token_id
    for ids in (generation.get("eos_token_id"), config.get("eos_token_id", default)):
        stops += [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None and i not in stops]
    return settled | {"rope_parameters": c.rope_parameters}, c, stops


def describe_layers(c, get, tables):
    """What each layer sees (0: all), and the table that it rotates by, from 1 (0: none)."""
    window, n, number = get("sliding_window", None), c.num_hidden_layers, {kind: i for i, kind in enumerate(tables, 1)}
    kinds = get("layer_types", ["full_attention" if window is None else "sliding_attention"] * n)
    local = [kind == "sliding_attention" for kind in kinds]
    rotated = local if c.model_type == "cohere2" else get("no_rope_layers", [1] * n)
    if {*kinds} - {"full_attention", "sliding_attention"} or any(local) and not (type(window) is int and window > 0):
        fail(f"config: layer_types {listing({*kinds})} with sliding_window {window}: run.c has no such variant")
    if len(rotated) < n:
        fail(f"config: no_rope_layers {rotated} for {n} layers")
    return dict(layer_window=[window if here and window < c.max_position_embeddings else 0 for here in local],
                layer_rope=[number.get(kind, 1) if here else 0 for kind, here in zip(kinds, rotated)])


def describe(c, stops):
    """The header (see HEADER) of a config object, without what depends on the tensors, and the small tensors."""
    _, reads, fields = FAMILIES[c.architectures[0]]
    get = lambda key, default=0: getattr(c, key) if key in reads else default
    tables, head_dim = rope_tables(c), getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    ropes = [c.rope_parameters.get(kind, c.rope_parameters) for kind in tables]
    frequencies, factors = zip(*tables.values())
    activation, bos = get("hidden_activation", getattr(c, "hidden_act", None)), c.bos_token_id
    caps = [get(key, None) for key in ("attn_logit_softcapping", "final_logit_softcapping")]
    embedding_scale = np.float32(c.hidden_size ** 0.5 if "gemma" in c.model_type else 1).item()
    rotates = int(head_dim * ropes[0].get("partial_rotary_factor", 1))
    seq_len = min([c.max_position_embeddings, *(
        rope["original_max_position_embeddings"] for rope in ropes if rope["rope_type"] == "longrope")])
    h = dict(norm_place=1 | 4, qk_norm=0, biases=0) | fields
    h["biases"] |= 3 * get("attention_bias") | 4 * get("mlp_bias") | get("use_qkv_bias")
    h["norm_place"] = 1 | 16 if get("use_parallel_residual") else h["norm_place"]
    h["qk_norm"] = 3 if get("use_qk_norm") or get("qk_layernorm") else h["qk_norm"]
    h |= dict(
        magic=MAGIC, version=1, dim=c.hidden_size, hidden_dim=c.intermediate_size, n_layers=c.num_hidden_layers,
        n_heads=c.num_attention_heads, n_kv_heads=c.num_key_value_heads, head_dim=head_dim, vocab_size=c.vocab_size,
        seq_len=seq_len, activation=activation in ACTIVATIONS and ACTIVATIONS.index(activation),
        rope_dim=2 * len(frequencies[0]), n_rope_tables=len(tables), bos_id=-1 if bos is None else bos,
        n_eos=len(stops), rms_norm_eps=getattr(c, "layer_norm_eps" if "norm_kind" in fields else "rms_norm_eps"),
        rope_theta=ropes[0]["rope_theta"], rope_theta_local=ropes[1]["rope_theta"] if len(ropes) > 1 else 0,
        rope_attention_factor=factors[0], rope_attention_factor_local=factors[1] if len(ropes) > 1 else 1,
        attention_scale=get("attention_multiplier", get("query_pre_attn_scalar", head_dim) ** -0.5),
        embedding_scale=get("embedding_multiplier", embedding_scale), residual_scale=get("residual_multiplier", 1),
        logit_scale=get("logit_scale", 1) / get("logits_scaling", 1), attention_softcap=caps[0] or 0,
        logit_softcap=caps[1] or 0)
    for keys, low, high in (("dim hidden_dim n_layers n_heads n_kv_heads head_dim vocab_size seq_len", 1, 2 ** 31 - 1),
                            ("attention_scale embedding_scale residual_scale logit_scale", 1e-9, 1e9),
                            ("attention_softcap logit_softcap", 0.0, 1e9), ("rms_norm_eps", 0.0, 1)):
        for key in keys.split():
            if not low <= h[key] <= high or type(low) is int and type(h[key]) is not int:
                fail(f"config: {key} is {h[key]!r} ({low} to {high} is expected)")
    if activation not in ACTIVATIONS or 0 in caps:
        fail(f"config: hidden_act {activation} ({', '.join(ACTIVATIONS)} are supported), soft caps {caps}")
    if h["n_heads"] % h["n_kv_heads"] or head_dim % 2 or not head_dim >= rotates == h["rope_dim"]:
        fail(f"config: {h['n_heads']} heads, {h['n_kv_heads']} key/value heads, head_dim {head_dim}, {rotates} of it "
             "rotated (a multiple and even numbers are expected)")
    if bad := [i for i in [*stops, *([] if bos is None else [bos])] if type(i) is not int or not 0 <= i < c.vocab_size]:
        fail(f"bos or eos {listing(bad)} is outside the vocabulary of {c.vocab_size}")
    if len(stops) > 16:
        fail(f"{len(stops)} end-of-text ids: {listing(stops)} (at most 16)")
    return h, dict(eos_ids=stops, rope_freq=np.stack(frequencies)) | describe_layers(c, get, tables)


# ---- The checkpoint ----

def layout(h):
    """(name, layer or None, shape, type, offset) of each tensor and of the config; all on multiples of 64 bytes."""
    sizes = h | dict(pairs=h["rope_dim"] // 2, d=h["dim"], h=h["hidden_dim"], v=h["vocab_size"], untied=1 - h["tied"],
                     q=h["n_heads"] * h["head_dim"], k=h["n_kv_heads"] * h["head_dim"])
    q_norm = ["", "head_dim", "q", "n_heads,head_dim"][h["qk_norm"]]
    names, last, end = [*TENSORS], [*TENSORS].index("final_norm"), HEADER_SIZE
    order = [(name, None) for name in names[:5]] + [(name, i) for i in range(h["n_layers"]) for name in names[5:last]]
    for name, layer in order + [(name, None) for name in names[last:]]:
        conditions, shape = TENSORS[name][1:3]
        shape = dict(qn=q_norm, kn=q_norm.replace("q", "k").replace("n_", "n_kv_")).get(shape, shape)
        if conditions == "-" or all(sizes[field] & int(bits) for field, bits in re.findall(r"(\w+):(\d+)", conditions)):
            kind = "<u2" if h["weight_type"] and name in MATRICES else OTHER_TYPES.get(name, "<f4")
            offset, shape = -(-end // ALIGNMENT) * ALIGNMENT, tuple(sizes[key] for key in shape.split(","))
            yield name, layer, shape, kind, offset
            end = offset + np.dtype(kind).itemsize * math.prod(shape)


@dataclass
class Source:
    """A model to export: a config in Hugging Face's terms, and tensors named as in one column of TENSORS."""
    config: dict
    generation: dict                    # generation_config.json
    shapes: dict[str, tuple]
    read: Callable[[str], np.ndarray]   # name -> float32 array
    column: int
    adjacent: bool = False              # q and k rows hold pairs (2i, 2i+1) instead of halves (i, i + head_dim/2)
    factors: np.ndarray | float = 1.0   # (head_dim/2) divide the inverse frequencies


def tensor_name(column, name, layer=None):
    prefix = "" if layer is None else PREFIX[column].format(layer)
    return prefix + TENSORS[name][column] + (".bias" if "biases" in TENSORS[name][1] else ".weight")


def places(column, kind, name, layer, shape, h):
    """Where a tensor lies in the source: (name there, first row, shape) of each part. Phi3 has several in one, StableLM
    a norm for each head, and where norms come after the sublayers, too, the one before the FFN is called otherwise."""
    whole, q, k = tensor_name(column, name, layer), h["n_heads"] * h["head_dim"], h["n_kv_heads"] * h["head_dim"]
    if kind == "stablelm" and name in ("q_norm", "k_norm"):
        return [(whole.replace("_norm.", f"_layernorm.norms.{i}."), 0, shape[1:]) for i in range(shape[0])]
    if kind == "phi3" and (first := dict(wq=0, wk=q, wv=q + k, w1=0, w3=h["hidden_dim"]).get(name)) is not None:
        return [(re.sub("[qkv]_proj", "qkv_proj", re.sub("(gate|up)_proj", "gate_up_proj", whole)), first, shape)]
    if name == "ffn_norm" and h["norm_place"] & 2:
        whole = whole.replace("post_attention", "pre_feedforward")
    return [(whole, 0, shape)]


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


def check_tensors(source, kind, h):
    """Every tensor is there and has its shape, and none is left over."""
    wanted = {part: (first + rows, *columns) for name, layer, shape, *_ in layout(h) if len(TENSORS[name]) > 3
              for part, first, (rows, *columns) in places(source.column, kind, name, layer, shape, h)}
    if missing := wanted.keys() - source.shapes.keys():
        fail(f"missing tensors: {listing(missing)}")
    if extra := {name for name in source.shapes.keys() - wanted.keys() if not TOLERATED.fullmatch(name)}:
        fail(f"tensors that this architecture does not have: {listing(extra)}")
    for name, shape in wanted.items():
        if tuple(source.shapes[name]) != shape:
            fail(f"{name} has the shape {tuple(source.shapes[name])}, {shape} by the config")


def write_model(source, path, fingerprint, bf16=False):
    """Writes the checkpoint, tensor by tensor; the matrices as bfloat16, where asked and where that changes nothing."""
    with exporting("config", "correct config.json"):
        config, c, stops = settle(source.config, source.generation)
        h, small = describe(c, stops)
    if h["seq_len"] < c.max_position_embeddings:
        note(f"longrope: the short table is taken, and a context of {h['seq_len']} for {c.max_position_embeddings}")
    small["rope_freq"] = small["rope_freq"] / source.factors
    config |= dict(tie_word_embeddings=settle_tie(source, c.tie_word_embeddings))
    blob = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    h = dict.fromkeys(HEADER.names, 0) | h | dict(
        tied=int(config["tie_word_embeddings"]), tokenizer_hash=fingerprint, weight_type=int(bf16))
    check_tensors(source, c.model_type, h)
    h["config_size"], small["config_json"] = len(blob), [*blob]
    heads = dict(wq=h["n_heads"], bq=h["n_heads"], wk=h["n_kv_heads"], bk=h["n_kv_heads"])
    with open(path, "xb", buffering=BUFFER) as file:
        file.write(np.array(tuple(h[name] for name in HEADER.names), HEADER).tobytes())
        for name, layer, shape, kind, offset in tqdm(list(layout(h)), unit=" tensors", disable=None):
            with exporting(name):
                parts = [] if name in small else places(source.column, c.model_type, name, layer, shape, h)
                arrays = [source.read(part)[first:first + rows] for part, first, (rows, *_) in parts]
                array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0] if arrays else small[name]
            if source.adjacent and name in heads:
                array = to_halves(array, heads[name])
            array = np.ascontiguousarray(array, "<f4" if kind == "<u2" else kind).reshape(shape)
            if not np.isfinite(array).all():
                note(f"{tensor_name(source.column, name, layer)} holds NaN or infinity")
            if kind == "<u2":
                if array.view("<u2")[..., ::2].any():
                    fail(f"{tensor_name(source.column, name, layer)} holds values that bfloat16 would round (export "
                         "without --bf16)")
                array = array.view("<u2")[..., 1::2].copy()
            file.write(bytes(offset - file.tell()))
            file.write(array.data)
            del array, arrays  # else they would live on while the next one is read
        file.flush()
        os.fsync(file.fileno())  # before the tokenizer takes its name, so that a full disk leaves both as they were


# ---- Sources ----

def open_hugging_face(folder):
    """config.json and safetensors, in one file or several under an index."""
    index, files, indexed = folder / "model.safetensors.index.json", ["model.safetensors"], {}
    if (folder / "adapter_config.json").exists():
        fail(f"{folder} holds an adapter (merge it into its model first)")
    if not (folder / files[0]).exists():
        if not index.exists():
            fail(f"{folder} has no model.safetensors, but {listing(file.name for file in folder.iterdir())} (make it "
                 "from a pytorch_model.bin with transformers' save_pretrained)")
        indexed = read_json(index)["weight_map"]
        files = sorted(set(indexed.values()))
    slices = {}
    for file in files:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            fail(f"{index}: the path {file!r} leaves the folder")
        with exporting(folder / file):
            handle = safe_open(folder / file, "pt")
        for name in handle.keys():
            if (kind := handle.get_slice(name).get_dtype()) not in ("F32", "BF16", "F16") or name in slices:
                fail(f"{name} is of type {kind}, or in two files (F32, BF16 and F16, once, are supported)")
            slices[name] = handle.get_slice(name)
    if lost := indexed.keys() - slices.keys():
        fail(f"missing tensors: {listing(lost)} (named by {index.name})")
    generation, config = folder / "generation_config.json", read_json(folder / "config.json")
    if config.get("model_type") == "mistral" and "layer_types" in config:  # transformers takes it for a Ministral
        config |= dict(model_type="ministral", architectures=["MinistralForCausalLM"])
    if config.get("architectures") == ["Gemma3ForConditionalGeneration"]:
        note("of Gemma3ForConditionalGeneration, the text part is exported")
        common = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        config = dict(config["text_config"], **common, architectures=["Gemma3ForCausalLM"], model_type="gemma3_text",
                      tie_word_embeddings=config.get("tie_word_embeddings", True))
        slices = {name.replace("language_model.", ""): held for name, held in slices.items()
                  if not re.search(r"vision_tower\.|multi_modal_projector\.", name)}
    shapes = {name: tuple(held.get_shape()) for name, held in slices.items()}
    return Source(config, read_json(generation) if generation.exists() else {}, shapes,
                  lambda name: slices[name][:].float().numpy(), HUGGING_FACE)


def open_gguf(path):
    """A GGUF of the architecture llama (q and k in adjacent pairs), qwen2 or qwen3; any type that gguf dequantizes."""
    reader = GGUFReader(path)
    fields = {name: float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-5, not 9.99999975e-06
              for name, field in reader.fields.items() if re.fullmatch(r"(?!tokenizer\.).*|.*_token_id", name)
              for value in [field.contents()]}
    arch, parts = fields.get("general.architecture"), fields.get("split.count", 1)
    if arch not in ("llama", "qwen2", "qwen3") or parts > 1 or reader.byte_order != "I":
        fail(f"{path}: GGUF architecture {arch!r}, {parts} parts, byte order {reader.byte_order} (llama, qwen2 "
             "and qwen3, merged, little-endian, are supported)")
    weights = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in weights.items()}
    get = lambda key, default=None: fields.pop(f"{arch}.{key}", default)

    def read(name):
        kind, rows, result = weights[name].tensor_type, weights[name].data, np.empty(shapes[name], np.float32)
        step = max(1, 2 ** 18 // shapes[name][-1]) if result.ndim > 1 else len(result)
        for row in range(0, len(result), step):  # dequantizing all at once takes several times the tensor
            result[row:row + step] = quants.dequantize(rows[row:row + step], kind)
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
    factors = 1.0
    if "rope_freqs.weight" in shapes:
        rope, factors = gguf_scaling(path, rope, read("rope_freqs.weight"), head_dim)
        del shapes["rope_freqs.weight"]
    bos, *stops = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
    config |= dict(rope_parameters=rope, tie_word_embeddings="output.weight" not in shapes, bos_token_id=bos,
                   stops=[i for i in stops if i is not None])
    if arch == "llama":
        config |= dict(attention_bias="blk.0.attn_q.bias" in shapes, mlp_bias="blk.0.ffn_gate.bias" in shapes)
    return Source(synthesize(arch, **config), {}, shapes, read, GGUF, adjacent=arch == "llama", factors=factors)


def gguf_scaling(path, rope, factors, head_dim):
    """Knows Llama 3's scaling by its form in a GGUF, factors (head_dim/2). -> (rope parameters, factors that remain)"""
    from transformers import LlamaConfig
    if not all(0 < factor < math.inf for factor in factors):
        fail(f"{path}: rope_freqs.weight holds {factors.min()} to {factors.max()} (positive numbers are expected)")
    scaled = rope | LLAMA3 | dict(factor=float(factors.max()))
    before, after = (rope_tables(LlamaConfig(head_dim=head_dim, rope_parameters=parameters, architectures=[
        "LlamaForCausalLM"]))[""][0] for parameters in (rope | dict(rope_type="default"), scaled))
    return (scaled, 1.0) if np.allclose(factors, before / after, rtol=1e-5) else (rope, factors)


def synthesize(kind, stops, **values):
    """A config.json for a source without one, of the kind llama, qwen2 or qwen3."""
    return dict(architectures=[kind.capitalize() + "ForCausalLM"], model_type=kind, dtype="float32", hidden_act="silu",
                eos_token_id=stops[0] if len(stops) == 1 else stops or None, **values)


def open_torch(path):
    """llama2.c's .pt, or Meta's folder of params.json and consolidated.NN.pth; q and k in adjacent pairs."""
    import torch
    is_meta, shards = path.is_dir(), []
    files = sorted(path.glob("consolidated.*.pth")) if is_meta else [path]
    for file in files:
        with exporting(file):
            shards.append(torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)))
    p = read_json(path / "params.json") if is_meta else shards[0]["model_args"]
    if not is_meta:
        shards = [{name.removeprefix("_orig_mod."): tensor for name, tensor in shards[0]["model"].items()}]
    if unknown := p.keys() - META_KEYS:
        fail(f"{path}: parameters {listing(unknown)} (run.c has no such variant)")
    n, first, dim = len(shards), shards[0], p["dim"]
    if odd := [name for name in first if first[name].dtype not in (torch.float32, torch.bfloat16, torch.float16)]:
        fail(f"{path}: {listing(odd)} of another type than float32, bfloat16 and float16 (convert them)")
    wanted = dim // len(first["layers.0.attention.wq.weight"])
    if is_meta and (n != wanted or [file.name for file in files] != [f"consolidated.{i:02d}.pth" for i in range(n)]):
        fail(f"{path} holds {n} shards of {wanted} (consolidated.00.pth to {wanted - 1:02d} are expected)")

    def whole(name, device="cpu"):
        """A tensor of which the shards hold rows, or columns, or each all; on the device "meta", its shape only."""
        kind, parts = name.split(".")[-2:][0], [shard[name].to(device) for shard in shards]
        by_columns = kind in ("wo", "w2") or kind == "tok_embeddings" and parts[0].shape[1] != dim
        return parts[0] if n == 1 or "norm" in kind or kind == "rope" else torch.cat(parts, int(by_columns))

    shapes = {name: tuple(whole(name, "meta").shape) for name in first}
    vocab_size = shapes["tok_embeddings.weight"][0]
    llama3, theta, scaled = vocab_size >= 128256, p.get("rope_theta", 10000.0), p.get("use_scaled_rope")
    bos, stops = (128000, [128001, 128008, 128009]) if llama3 else (1, [2] if is_meta else [1, 2])
    seq_len = p.get("max_seq_len") or (131072 if scaled else 8192 if llama3 else 16384 if theta > 1e5 else 4096)
    if "max_seq_len" not in p:
        note(f"{path} does not say the context length: {seq_len} is taken")
    return Source(synthesize(
        "llama", stops, hidden_size=dim, intermediate_size=shapes["layers.0.feed_forward.w1.weight"][0],
        head_dim=dim // p["n_heads"], num_hidden_layers=p["n_layers"], num_attention_heads=p["n_heads"],
        num_key_value_heads=p.get("n_kv_heads") or p["n_heads"],
        rope_parameters=dict(rope_theta=theta) | (scaled and LLAMA3 | dict(factor=p.get("rope_scale_factor", 8)) or {}),
        rms_norm_eps=p.get("norm_eps", 1e-5), tie_word_embeddings=True, vocab_size=vocab_size, bos_token_id=bos,
        max_position_embeddings=seq_len, attention_bias=False, mlp_bias=False),
        {}, shapes, lambda name: whole(name).float().numpy(), META, adjacent=True)


def find_source(source):
    """The path of SOURCE: as it stands, else brought from the Hugging Face hub."""
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        fail(f"{source} does not exist (a folder, a file or a hub id OWNER/NAME is expected)")
    with exporting(f"{source} from the Hugging Face hub", "no path here has this name: see it, and the network"):
        return Path(huggingface_hub.snapshot_download(source, ignore_patterns=["*/*"], allow_patterns=[
            "*.json", "*.safetensors", *TOKENIZER_FILES]))


def open_source(path):
    """Tells the kinds of source apart by what they hold."""
    with exporting(path):
        if (path / "config.json").exists():
            return open_hugging_face(path)
        if (path / "params.json").exists() or path.suffix == ".pt":
            return open_torch(path)
        if is_gguf(path):
            return open_gguf(path)
    fail(f"{path} is no folder with config.json or params.json, no GGUF and no .pt (for safetensors and .pth, name the "
         "folder)")


# ---- The tokenizer: run.c's tokenizer section specifies the file and runs what is compiled here ----

NONE = 0xFFFFFFFF
REPEAT, GO, SUB, MATCH = range(4)    # instructions of patterns: op, where to (relative), class, two numbers
END = [MATCH, 0, 0, 0, 0]
AHEAD, NOT_AHEAD, BEHIND, NOT_BEHIND, ATOMIC = (0, 0), (1, 0), (0, 1), (1, 1), (0, 2)  # of SUB
STEP_ADDED, STEP_SPLIT, STEP_NORMALIZE, STEP_MERGE = range(4)
FLAGS, CONTROL, ALONE = dict(lstrip=2, rstrip=4, single_word=8), 16, 32  # CONTROL: text if a user's; ALONE: in no pair
SECTIONS = "ids edges map ranges code steps post turns ends data".split()
REPLACE, PREPEND, PREPEND_FIRST = 0b100000, 0b1100000, 0b10100000  # splits that put a text at a match's place
FORMS = dict(Lowercase=0, NFD=1, NFKD=1, NFC=3, NFKC=3)  # bits: orders marks, composes
# Splits by behavior, as they are and inverted: 2 * before + after for where they cut, 4 + kind for what they leave out.
CUTS = dict(Isolated=(0b1111, 0b1111), Removed=(0b101111, 0b011111), Contiguous=(0b0110, 0b0110),
            MergedWithPrevious=(0b1101, 0b1011), MergedWithNext=(0b1011, 0b1101))
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
LETTERS = ("A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
           "Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-"
           "Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃")  # of DeepSeek LLM
DEEPSEEK_V3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
               r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE = {  # tokenizer.ggml.pre: patterns to split at, one after the other, normalizer, ignore_merges
    "gpt-2": ([GPT2], None, False), "default": ([GPT2], None, False), "smollm": (["Digits", GPT2], None, False),
    "llama-bpe": ([CL100K % "{1,3}"], None, True), "qwen2": ([CL100K % ""], "NFC", False),
    "deepseek-llm": ([r"[\r\n]", rf"\s?[{LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$",
                      "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+"], None, False),
    "deepseek-coder": ([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"], None, False),
    "deepseek-v3": ([r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3], None, False)}
# GPT-2's alphabet: the character that stands for each byte in byte-level vocabularies
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = dict(zip(map(chr, [*PRINTABLE, *range(256, 324)]), [*PRINTABLE, *sorted({*range(256)} - {*PRINTABLE})]))
EVERY = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
SEVERAL_FOLDS = "\n".join(c for c in EVERY[0x80:0x1F000] if len(c.casefold()) > 1)  # those that fold to several


def refuse(what):
    fail(f"the tokenizer has {what} (run.c cannot express it)")


def character_class(characters):
    members = np.zeros(0x110000, bool)
    members[np.frombuffer(characters.encode("utf-32-le"), "<u4")] = True
    return members


@lru_cache
def ask(text):
    """The code points of a regular expression for one character, or of the class of "0", "!" or "a" (digits,
    punctuation, words): the pieces that `tokenizers`' own pre-tokenizer does not cut from it."""
    if text not in ("digit", "punctuation", "word"):
        if re.fullmatch(r"[^.]|\\\W", text, re.S):
            return character_class(text[-1])
        others = normalizers.Replace(Regex(f"(?:{text})+"), "").normalize_str(EVERY)
        return character_class(EVERY) & ~character_class(others)
    one, split = dict(digit=("0", pre_tokenizers.Digits()), word=("a", pre_tokenizers.Whitespace()),
                      punctuation=("!", pre_tokenizers.Punctuation("contiguous")))[text]
    return character_class("".join(piece for piece, _ in split.pre_tokenize_str(EVERY)
                                   if len(split.pre_tokenize_str(one + piece[0])) == 1))


# Programs under construction: (instructions with jumps relative to their own place, whether they may match nothing).
def sequence(*parts):
    return sum((code for code, _ in parts), []), all(empty for _, empty in parts)


def either(first, other):
    code = [[GO, len(first[0]) + 2, 0, 0, 0], *first[0], [GO, len(other[0]) + 1, 0, 1, 1], *other[0]]
    return code, first[1] or other[1]


def apart(kind, part):
    return [[SUB, len(part[0]) + 2, 0, *kind], *part[0], END], kind != ATOMIC or part[1]


def is_one(part):
    return len(part[0]) == 1 and part[0][0][0] == REPEAT and part[0][0][3:] == [1, 1]


def repeat(part, least, most, mode=""):
    """As often as possible; mode "?": as rarely, "+": without giving any back."""
    code, empty = part
    if mode == "+":
        return apart(ATOMIC, repeat(part, least, most))
    if is_one(part) and not mode and least <= most:
        return [[REPEAT, 0, code[0][2], least, most]], least == 0
    if most < least or most == NONE and empty or least > 1000 or most - least > 1000 and most != NONE:
        refuse(f"a pattern that repeats what may be empty, or {least} to {most} times")
    more, size = [], len(code) + 1
    for k in range(1 if most == NONE else most - least):
        more += [[GO, size + 1 if most == NONE else (most - least - k) * size, 0, int(mode == "?"), 0], *code]
    return code * least + more + ([[GO, -size, 0, 1, 1]] if most == NONE else []), least == 0 or empty


class Pattern:
    """Compiles Oniguruma's syntax to run.c's match(). one: text -> the program for one character of that class"""

    def __init__(self, one, text):
        self.one, self.text, self.at, self.fold = one, text, 0, False
        self.code = self.alternatives()
        if self.at < len(text):
            self.stop(text[self.at:])

    def stop(self, what):
        refuse(f"the pattern {self.text!r} with {what!r}")

    def take(self, pattern):
        found = re.compile(pattern).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def alternatives(self):
        first = self.sequence()
        return either(first, self.alternatives()) if self.take(r"\|") else first

    def sequence(self):
        """Repeated atoms up to the next | or ), and whether without regard to case letters beside each other join."""
        parts, literal = [], ""
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            start = self.at
            part = self.atom()
            text = self.text[start:self.at] if self.fold else ""
            grouped = text[:1] == "(" and re.search("[^\\W\\d_]", text)  # letters that may join those beside it
            if literal[-1:].isalpha() and grouped or literal == "(" and (grouped or text.isalpha()):
                self.stop(f"(?i:{text}) beside letters")
            literal = "(" if grouped else (literal + text)[-3:] if len(text) == 1 else ""
            for n in (2, 3):
                self.check_fold(literal[-n:] if literal.isalpha() else "")
                self.check_fold(text * n if text.isalpha() and self.text[self.at:self.at + 1] in [*"*+?{"] else "")
            while found := self.take(r"([*+?])([?+]?)|\{(?=\d|,\d)(\d*)(,?)(\d*)\}(\??)"):
                sign, mode, least, comma, most, lazy = found.groups()
                if lazy and not comma:  # a{3}? is (?:a{3})?
                    self.at, lazy = self.at - 1, ""
                part = repeat(part, int(sign == "+"), 1 if sign == "?" else NONE, mode) if sign else repeat(
                    part, int(least or 0), int(most) if most else NONE if comma else int(least), lazy)
            parts.append(part)
        return sequence(*parts)

    def check_fold(self, text):
        """Refuses what, without regard to case, matches one character or several: "st" and U+FB06."""
        if text and normalizers.Replace(Regex(f"(?i:{text})"), "").normalize_str(SEVERAL_FOLDS) != SEVERAL_FOLDS:
            self.stop(f"(?i:{text})")

    def atom(self):
        if found := self.take(r"\((\?(?:[:=!>]|<[=!]|<\w+>|[im-]+[:)])|(?!\?))"):
            return self.group((found[1] or "?:")[1:])
        if found := self.take(r"\\[Az]|[$^]"):
            any_one, newline = self.one(r"[\s\S]"), self.one(r"\n")
            start, end = apart(NOT_BEHIND, any_one), apart(NOT_AHEAD, any_one)
            return {r"\A": start, "^": either(start, sequence(apart(BEHIND, newline), apart(AHEAD, any_one))),
                    r"\z": end, "$": either(end, apart(AHEAD, newline))}[found[0]]
        start = self.at
        if self.take(r"\["):
            depth = 1
            while depth and (found := self.take(r"\[:\^?\w+:\]|\\.|[^\\]")):
                inside = self.at > start + 2 + (self.text[start + 1] == "^")
                depth += {"[": 1, "]": -1}.get(found[0], 0) if inside else 0
        elif not self.take(r"\.|\\[sSdDwWhHntrfvae]|\\[pP]\{\^?\w+\}|\\x\{?[\da-fA-F]+\}?|\\u[\da-fA-F]{4}|\\[^\w]"
                           r"|[^\\()|*+?\[]"):
            self.stop(self.text[start:start + 6])
        text = self.text[start:self.at]
        if self.fold and not re.fullmatch(r"\\[sSdDwWhH].*", text):
            self.check_fold(text)
        return self.one(f"(?i:{text})" if self.fold else text)

    def group(self, kind):
        fold = self.fold
        if kind[0] in "im-":  # an option on its own reaches to the end of the group around it
            self.fold = kind[0] == "i" if kind[:-1] in ("i", "-i") else self.stop(f"(?{kind}")
        part = self.alternatives()
        self.fold = fold
        if kind[-1] != ")" and not self.take(r"\)") or kind in ("<=", "<!") and not is_one(part):
            self.stop(f"(?{kind}")
        kinds = {"=": AHEAD, "!": NOT_AHEAD, ">": ATOMIC, "<=": BEHIND, "<!": NOT_BEHIND}
        return apart(kinds[kind], part) if kind in kinds else part


def leaves(part):
    """The normalizers, pre-tokenizers or decoders in one, in order, those in sequences too."""
    if part and part["type"] == "Sequence":
        inner, = (value for key, value in part.items() if key != "type")
        return sum(map(leaves, inner), [])
    return [part] if part else []


class Program:
    """The tables of one tokenizer.bin as they are compiled."""

    def __init__(self):
        self.rows, self.interned, self.classes = {name: [] for name in SECTIONS}, {}, {}
        self.marks, self.compose, self.byte_level = {}, [0, 0], False

    def mapped(self, rows):
        """A range of MAP with these rows: key, code point, range of MAP."""
        first = len(self.rows["map"])
        self.rows["map"] += rows
        return [first, len(self.rows["map"])]

    def text(self, text):
        """A range of MAP with these code points."""
        if text not in self.interned:
            self.interned[text] = self.mapped([0, ord(c), 0, 0] for c in text)
        return self.interned[text]

    def trie(self, words):
        """A range of EDGES from which the ids of {text: id} are reached; 0x110000 + a byte that is no character."""
        unit = lambda c: ord(c) + 0x102400 * ("\udc00" <= c <= "\udfff")  # of "surrogateescape"
        words = {tuple(map(unit, word)): i for word, i in words.items()}
        prefixes = {word[:k] for word in words for k in range(1, len(word) + 1)}
        rows, below = self.rows["edges"], Counter(prefix[:-1] for prefix in prefixes)
        root = [len(rows), end := len(rows) + below[()]]
        for prefix in sorted(prefixes, key=lambda prefix: (len(prefix), prefix)):
            rows.append([prefix[-1], words.get(prefix, NONE), end, end + below[prefix]])
            end += below[prefix]
        return root

    def class_of(self, text):
        """The number of a class: of a name or expression that ask() knows, or of an array."""
        members = text if isinstance(text, np.ndarray) else ask(text)
        return self.classes.setdefault(members.tobytes(), len(self.classes))

    def one(self, text):
        return [[REPEAT, 0, self.class_of(text), 1, 1]], False

    def step(self, kind, program=0, where=0, bits=0, mapped=(0, 0), edges=(0, 0)):
        self.rows["steps"].append([kind, program, where, bits, *mapped, *edges])

    def program(self, *patterns):
        """The row of CODE from which patterns (expressions or programs) match one after the other."""
        code, _ = sequence(*(Pattern(self.one, part).code if isinstance(part, str) else part for part in patterns))
        first = len(self.rows["code"])
        self.rows["code"] += [[op, to and to + k, *rest] for k, (op, to, *rest) in enumerate([*code, END], first)]
        return first

    def add(self, part):
        """Compiles a normalizer or a pre-tokenizer, most of them to splits: pattern, bits, content of a replacement."""
        kind, given, mark = part["type"], part.get("pattern", {}), part.get("replacement", " ")
        pattern = given.get("Regex", re.escape(given.get("String", "")))
        prepend = PREPEND_FIRST if part.get("prepend_scheme") == "first" else PREPEND
        before = f"(?![ {re.escape(mark)}])", prepend, mark
        cuts = {"Replace": lambda: [(pattern, REPLACE, part["content"])],
                "Prepend": lambda: [("", PREPEND, part["prepend"])],
                "Strip": lambda: ([(r"\A\s+", REPLACE)] * part["strip_left"] +
                                  [(r"(?<!\s)\s+\z", REPLACE)] * part["strip_right"]),
                "Split": lambda: [(pattern, CUTS[part["behavior"]][part["invert"]])],
                "Digits": lambda: [(self.one("digit"), CUTS[("Contiguous", "Isolated")[part["individual_digits"]]][0])],
                "Punctuation": lambda: [(self.one("punctuation"), CUTS[part["behavior"]][0])],
                "Whitespace": lambda: [(either(*(repeat(self.one(characters), 1, NONE) for characters in (
                                                "word", ~ask("word") & ~ask(r"\s")))), CUTS["Removed"][1])],
                "WhitespaceSplit": lambda: [(r"\s", CUTS["Removed"][0])],
                "CharDelimiterSplit": lambda: [(re.escape(part["delimiter"]), CUTS["Removed"][0])],
                "Metaspace": lambda: ([before] * (part["prepend_scheme"] != "never") + [(" ", REPLACE, mark)] +
                                      [(re.escape(mark), CUTS["MergedWithNext"][0])] * part["split"]),
                "ByteLevel": lambda: ([before] * part["add_prefix_space"] +
                                      [(GPT2, CUTS["Isolated"][0])] * part["use_regex"])}
        if self.byte_level:
            refuse(f"{kind} after ByteLevel")
        if kind in FORMS:
            self.normalize(kind)
        elif kind in cuts and (kind != "ByteLevel" or "use_regex" in part):  # not the normalizer of this name
            for where, bits, *content in cuts[kind]():
                self.step(STEP_SPLIT, self.program(where), 0, bits, self.text("".join(content)))
            self.byte_level = kind == "ByteLevel"
        else:
            refuse(f"the step {kind}")

    def normalize(self, form):
        """A step that maps code points and, for Unicode's normal forms, orders marks and composes."""
        table, touched, pairs = one_by_one(form.replace("C", "D")), [*one_by_one(form)], {}
        mapped = self.mapped([[ord(c), 0, *self.text(text)] for c, text in table.items()])
        if FORMS[form] & 1:
            self.marks = combining_classes()
            touched += self.marks
        if FORMS[form] & 2:  # which pairs of characters NFC composes
            texts = [text for text in one_by_one("NFD").values() if len(text) > 1]
            heads = normalized("NFC", [text[:-1] for text in texts])
            couples = [head + text[-1] for text, head in zip(texts, heads) if len(head) == 1]
            for (a, b), c in zip(couples, normalized("NFC", couples)):
                if len(c) == 1:
                    pairs.setdefault(a, {})[b] = c
                    touched.append(b)
            self.compose = self.mapped(sorted([ord(a), 0, *self.mapped(sorted(
                [ord(b), ord(c), 0, 0] for b, c in seconds.items()))] for a, seconds in pairs.items()))
        self.step(STEP_NORMALIZE, 0, self.class_of(character_class("".join(touched))), FORMS[form], mapped)

    def file(self, hashed, *header):
        """The whole file: classes as runs of code points in the same ones; bytes that are no characters as U+FFFD."""
        if len(self.classes) > 64:
            refuse(f"patterns with {len(self.classes)} character classes, more than 64")
        sets = np.zeros((0x110001, 3), "<u4")
        for members, k in self.classes.items():
            sets[:-1, k // 32] |= np.frombuffer(members, bool).astype("<u4") << np.uint32(k % 32)
        for c, n in self.marks.items():
            sets[ord(c), 2] = n
        sets[-1] = sets[0xFFFD]
        starts = np.flatnonzero(np.append(True, (sets[1:] != sets[:-1]).any(1)))
        if len(starts) > 65536:
            refuse(f"{len(starts)} ranges of character classes, more than 65536")
        self.rows["ranges"] = np.column_stack([starts, sets[starts]])
        self.rows["code"] = self.rows["code"] or [END]
        numbers = np.array([3, *header, *(len(self.rows[name]) for name in SECTIONS)], "<u4")
        parts = [np.asarray(self.rows[name], "u1" if name == "data" else "<u4").tobytes() for name in SECTIONS]
        return b"".join([b"run.t\r\n\x1a", hashed.to_bytes(8, "little"), numbers.tobytes(), *parts])


def normalized(form, texts):
    """A normalizer of `tokenizers` on many short texts."""
    return getattr(normalizers, form)().normalize_str("\n".join(texts)).split("\n")


@lru_cache
def one_by_one(form):
    """The characters that a normalizer changes, and what to."""
    characters = [c for c in EVERY if c != "\n"]
    return {c: to for c, to in zip(characters, normalized(form, characters)) if c != to}


@lru_cache
def combining_classes():
    """Numbers in the order of the canonical combining classes, by which NFD sorts marks. A mark is what is swapped with
    one of the highest class before it or of the lowest after it; a class begins where neighbours would be swapped."""
    swapped = lambda pairs: [pair != to for pair, to in zip(pairs, normalized("NFD", pairs))]
    marks = [c for c in EVERY if c not in one_by_one("NFD") and c != "\n"]
    differs = zip(swapped(["\u0345" + c for c in marks]), swapped([c + "\u0334" for c in marks]))
    ordered, = normalized("NFD", ["".join(c for c, ends in zip(marks, differs) if any(ends))])
    begins = swapped([b + a for a, b in zip(ordered, ordered[1:])])
    return dict(zip(ordered, np.cumsum([1, *begins]).tolist()))


# ---- Vocabularies: each source becomes tokenizer.json's own form, but merges are [left, right, rank] ----

def read_tokenizer_json(path):
    """tokenizer.json as `tokenizers` understands it, whatever the version that wrote it."""
    with exporting(path):
        tokenizer, added = Tokenizer.from_file(str(path)), read_json(path)["added_tokens"]
        spec = json.loads(tokenizer.to_str())
        special = {token["content"] for token in added if token["special"]}
        for token in added:
            token["id"] = tokenizer.token_to_id(token["content"])
            if token["normalized"] and tokenizer.normalizer:
                token["match"] = tokenizer.normalizer.normalize_str(token["content"])
            token["piece"] = tokenizer.id_to_token(token["id"])
            token["hidden"] = token["piece"] in special
        # The ids that the post-processor puts around a text, seen on a text of one token with an id of its own.
        probe, own = Tokenizer(models.WordLevel({"x": NONE - 1}, unk_token="x")), NONE - 1
        probe.post_processor = tokenizer.post_processor
        ids = probe.encode("x").ids
        if ids.count(own) != 1:
            refuse("a post-processor that drops or repeats the text")
        spec["post_processor"] = ids[:ids.index(own)], ids[ids.index(own) + 1:]
    model = spec["model"]
    if model["type"] != "BPE":
        fail(f"{path} is a {model['type']} tokenizer (run.c has BPE)")
    if odd := [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model[name]]:
        refuse(", ".join(f"{name} {model[name]!r}" for name in odd))
    if odd := [name for name in ("truncation", "padding") if spec[name]]:
        note(f"{path} has {listing(odd)}, which is left out")
    model["merges"] = [[*pair, rank] for rank, pair in enumerate(model["merges"])]
    return spec | {"added_tokens": sorted(added, key=lambda token: not token["special"])}


def sentencepiece_spec(pieces, scores, unk, dummy_prefix, added, around):
    """A SentencePiece BPE vocabulary. pieces: {piece: id}, scores: {piece: score} of what two pieces may make; equal
    scores rank equally."""
    ranks = {score: rank for rank, score in enumerate(sorted({*scores.values()}, reverse=True))}
    merges = [[piece[:k], piece[k:], ranks[score]] for piece, score in scores.items() for k in range(1, len(piece))
              if piece[:k] in scores and piece[k:] in scores]
    steps = [dict(type="Prepend", prepend="▁")] * dummy_prefix
    steps += [dict(type="Replace", pattern={"String": " "}, content="▁")]
    chain = [dict(type="Replace", pattern={"String": "▁"}, content=" "), dict(type="ByteFallback"), dict(type="Fuse")]
    chain += [dict(type="Strip", content=" ", start=1, stop=0)] * dummy_prefix
    model = dict(vocab=pieces, merges=merges, unk_token=unk, fuse_unk=True, ignore_merges=False,
                 byte_fallback="<0x00>" in pieces)
    return dict(model=model, normalizer=dict(type="Sequence", normalizers=steps), pre_tokenizer=None,
                added_tokens=added, decoder=dict(type="Sequence", decoders=chain), post_processor=around)


def read_sentencepiece(path):
    """tokenizer.model, as the sentencepiece package encodes with it, BOS in front where it has one."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    with exporting(path):
        proto = sentencepiece_model_pb2.ModelProto.FromString(Path(path).read_bytes())
        tokenizer = SentencePieceProcessor(str(path))
    kinds, normalizer, trainer = proto.SentencePiece, proto.normalizer_spec, proto.trainer_spec
    if trainer.model_type != trainer.BPE:
        fail(f"{path} is not a BPE model (run.c has BPE)")
    for name, bad in {"a normalizer map": normalizer.precompiled_charsmap,
                      "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
                      "escape_whitespaces off": not normalizer.escape_whitespaces,
                      "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
                      "unused pieces": any(p.type == kinds.UNUSED for p in proto.pieces)}.items():
        if bad:
            refuse(name)
    pieces = {p.piece: i for i, p in enumerate(proto.pieces)}
    scores = {p.piece: p.score for p in proto.pieces if p.type == kinds.NORMAL}
    more = {kinds.CONTROL: dict(match=""), kinds.UNKNOWN: dict(match=""), kinds.USER_DEFINED: dict(normalized=True)}
    added = [dict(content=p.piece, id=i, special=p.type != kinds.USER_DEFINED, **more[p.type])
             for i, p in enumerate(proto.pieces) if p.type in more]
    bos, unk = [tokenizer.bos_id()] if tokenizer.bos_id() >= 0 else [], tokenizer.id_to_piece(tokenizer.unk_id())
    return sentencepiece_spec(pieces, scores, unk, normalizer.add_dummy_prefix, added, (bos, []))


def is_gguf(path):
    return path.is_file() and np.fromfile(path, "S1", 4).tobytes() == b"GGUF"


def read_gguf_vocabulary(path):
    """The tokenizer of a GGUF: SentencePiece style ("llama") or byte-level ("gpt2")."""
    fields = {re.sub(r"tokenizer\.(ggml\.)?", "", name): field.contents()
              for name, field in GGUFReader(path).fields.items() if name.startswith("tokenizer.")}
    if "model" not in fields:
        return None
    kind, tokens, get = fields["model"], fields.get("tokens", []), fields.get
    pre = get("pre", "default") if kind == "gpt2" else ""
    if kind not in ("llama", "gpt2") or pre and pre not in PRE:
        fail(f"{path} has a tokenizer of kind {kind} {pre} (run.c has llama, and gpt2 with {', '.join(PRE)})")
    kinds = get("token_type", [TokenType.NORMAL] * len(tokens))
    pieces = {piece: i for i, piece in reversed([*enumerate(tokens)])}
    added = [dict(content=piece, id=i, special=kinds[i] == TokenType.CONTROL) for piece, i in pieces.items()
             if kinds[i] in (TokenType.CONTROL, TokenType.USER_DEFINED)]
    around = [[fields[f"{name}_token_id"]] if get(f"add_{name}_token", default) else []
              for name, default in (("bos", kind == "llama" or pre == "llama-bpe"), ("eos", False))]
    base = [(i, piece) for i, piece in enumerate(tokens) if kinds[i] in (TokenType.NORMAL, TokenType.BYTE)]
    special = {name: tokens[fields[f"{name}_id"]] for name in ("bos_token", "eos_token") if f"{name}_id" in fields}
    more = dict(base=base, chat_template=get("chat_template"), special=special)
    if kind == "llama":
        scores = {piece: fields["scores"][i] for i, piece in base}
        unk = tokens[fields["unknown_token_id"]] if "unknown_token_id" in fields else None
        return sentencepiece_spec(pieces, scores, unk, get("add_space_prefix", True), added, around) | more
    merges = [[*merge.split(" "), rank] for rank, merge in enumerate(fields["merges"])]
    patterns, form, whole = PRE[pre]
    splits = [dict(type="Digits", individual_digits=True) if pattern == "Digits" else
              dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False) for pattern in patterns]
    splits.append(dict(type="ByteLevel", add_prefix_space=False, use_regex=False))
    model = dict(vocab=pieces, merges=merges, unk_token=None, fuse_unk=False, ignore_merges=whole, byte_fallback=False)
    return dict(model=model, normalizer=form and dict(type=form), post_processor=around, added_tokens=added, **more,
                pre_tokenizer=dict(type="Sequence", pretokenizers=splits), decoder=dict(type="ByteLevel"))


def read_vocabulary(source):
    """-> tokenizer.json's form of a folder's or file's tokenizer, with chat_template and special; None without one"""
    if source.is_dir():
        return next((read_vocabulary(source / name) for name in ("tokenizer.json", "tokenizer.model")
                     if (source / name).exists()), None)
    if is_gguf(source):
        return read_gguf_vocabulary(source)
    if source.suffix not in (".json", ".model"):
        return None
    spec = read_tokenizer_json(source) if source.suffix == ".json" else read_sentencepiece(source)
    config, file = {}, source.with_name("chat_template.jinja")
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= read_json(source.with_name(name)) if source.with_name(name).exists() else {}
    with exporting(file):
        text = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(text, list):
        text = next((named["template"] for named in text if named["name"] == "default"), None)
    special = {name: value["content"] if isinstance(value, dict) else value for name, value in config.items()
               if re.fullmatch("(bos|eos|unk|sep|pad|cls|mask)_token", name) and value}
    return spec | dict(chat_template=text, special=special)


def decoder_of(d):
    """-> a function from a piece to its bytes, and how many leading spaces are stripped (NONE: the first token's)"""
    parts = leaves(d)
    kinds, replace, strip = " ".join(part["type"] for part in parts), [], 0
    if not parts:
        return lambda piece: b" " + piece.encode(), 1  # joined with spaces
    if kinds == "ByteLevel":
        return byte_level, 0
    if not re.fullmatch("Metaspace|(Replace ?)*(ByteFallback ?)?(Fuse ?(Strip)?)?", kinds):
        refuse(f"the decoder {kinds}")
    for part in parts:
        if part["type"] == "Replace" and "String" in part["pattern"]:
            replace.append((part["pattern"]["String"], part["content"]))
        elif part["type"] == "Metaspace":
            replace.append((part["replacement"], " "))
            strip = NONE if part["prepend_scheme"] != "never" else 0
        elif part["type"] == "Strip" and part["stop"] == 0 and part["content"] == " ":
            strip = part["start"]
        elif part["type"] in ("Replace", "Strip"):
            refuse(f"the decoder {json.dumps(part)}")

    def decode(piece):
        for old, new in replace:
            piece = piece.replace(old, new)
        byte = "ByteFallback" in kinds and re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
        return bytes([int(byte[1], 16)]) if byte else piece.encode()

    return decode, strip


def byte_level(piece):
    """The bytes that GPT-2's alphabet spells; a piece with other characters stands for itself."""
    return bytes(ALPHABET[c] for c in piece) if all(c in ALPHABET for c in piece) else piece.encode()


def fingerprint(spec):
    """FNV-1a of 64 bits of the base vocabulary's pieces in the order of their ids, each followed by the byte 0xFF."""
    value, apart = 14695981039346656037, {spec["model"]["unk_token"], *(t["content"] for t in spec["added_tokens"])}
    base = spec.get("base") or sorted((i, piece) for piece, i in spec["model"]["vocab"].items() if piece not in apart)
    for byte in b"".join(piece.encode() + b"\xff" for _, piece in base):
        value = (value ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    return value


# ---- The chat format: what a chat template writes around the contents of a conversation ----

# Each turn is eight parts, rows of TURNS: what precedes the system prompt, the user's message and the reply, and what a
# reply holds before its text (</think>), if a reply follows; then the same if it is awaited, but last the tag around
# what is no user's message (<tool_response>). A part: text, how many of its characters an empty content takes away, the
# characters stripped from the content, left and right, bits.
SHOWN, EMPTY_IS_NONE = 1, 2  # the content follows; an empty system prompt is none
BLANKS = [c for c in EVERY if c.isspace()]  # what str.strip takes away
SYSTEM, *MARKS = (f"\ue000{k}\ue001" for k in range(6))  # stand for contents
SAMPLES = ("Hi.", "", " ", "one\n two ", "\n\ta\n\n", "\xa0\u3000b\u2028\x1c", "\u200b\xe9\u200b", "<think>", "h{}",
           "x</think>y", "<think>\nw\n</think>\n\n c\n", "<think>\n\n</think>\n\nd", "{}\ne{} \n\n\xa0f{}g", " {} \n")


def split_at(text, contents):
    """The pieces before, between and after contents, each of which is there once and in order."""
    any_content = "|".join(contents)
    if (found := re.findall(any_content, text)) != contents:
        raise ValueError("leaves out a message" if {*contents} - {*found} else "repeats or swaps messages")
    return re.split(any_content, text)


def stripped(render):
    """What is stripped from a content, left and right."""
    before, after = split_at(render("\ue002"), ["\ue002"])
    around = {c: render(f"{c}\ue002{c}").partition("\ue002") for c in BLANKS}
    return tuple("".join(c for c in BLANKS if around[c][side] == text) for side, text in ((0, before), (2, after)))


class Chat:
    """A chat template, what it may write (literals), and turns: {(system prompt or none, later turn): its parts}."""

    def __init__(self, text, special):
        from transformers.utils.chat_template_utils import _compile_jinja_template
        self.template, self.special, self.turns, nodes = _compile_jinja_template(text), special, {}, jinja2.nodes
        tree = self.template.environment.parse(text)
        self.literals = [node.data for node in tree.find_all(nodes.TemplateData)]
        self.literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]

    def render(self, system, contents):
        """The text that transformers' apply_chat_template gives, but never today's date."""
        messages = [dict(role="system", content=system)] * (system is not None)
        messages += [dict(role=("user", "assistant")[k % 2], content=text) for k, text in enumerate(contents)]
        return self.template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None,
                                    strftime_now=jinja2.Undefined(name="strftime_now"), **self.special)

    def turn_parts(self, system, later):
        """The eight parts of the first turn, or of later ones, with or without a system prompt."""
        render = lambda *contents, system=system: self.render(system, contents)
        user, reply, *_ = MARKS
        past, last = split_at(render(*MARKS), MARKS), split_at(render(user), [user])
        if later:
            past, last = past[2:], past[4:]
        turn = (lambda text: render(user, reply, text)) if later else render
        of_user, of_reply = stripped(turn), stripped(lambda text: render(user, text, user))
        drop = len(turn(user)) - len(user) - len(turn(""))  # Llama 2 strips system prompt and first content as one
        of_system = stripped(lambda text: render(user, system=text)) if system else ("", "")
        empty = EMPTY_IS_NONE * (system is not None and render(user, system="") == render(user, system=None))
        marks = {}.fromkeys(["</think>", *filter(str.strip, self.literals)])
        cut = next((mark for mark in marks if {*re.findall(  # what hides the text before it
            "[\ue002\ue003]", render(user, f"\ue002{mark}\ue003", user))} == {"\ue003"}), "")
        of_cut = stripped(lambda text: render(user, f"-{cut}{text}", user)) if cut else ("", "")
        parts = []
        for (before, after, *_), follows in ((past, True), (last, False)):
            head, found, tail = before.rpartition(SYSTEM)
            if SYSTEM in head or SYSTEM in after:
                raise ValueError("repeats the system prompt")
            parts += [[head, 0, of_system, SHOWN * bool(found) | empty], [tail, drop, of_user, SHOWN],
                      [after, 0, of_reply, SHOWN * follows], [cut * follows, 0, of_cut, 0]]
        return parts

    def render_parts(self, system, contents):
        """A conversation from parts, as run.c renders it."""
        if system is not None:
            _, _, (left, right), bits = self.turns[True, False][0]
            system = None if bits & EMPTY_IS_NONE and not system.lstrip(left).rstrip(right) else system
        out = ""
        for k in range(0, len(contents), 2):
            parts = self.turns[system is not None, k > 0][0 if k + 1 < len(contents) else 4:]
            for i, content in enumerate([system, *contents[k:k + 2], ""][:3]):
                text, drop, (left, right), bits = parts[i]
                if i == 2 and bits and parts[3][0] and parts[3][0] in content:
                    content, (left, right) = content.rpartition(parts[3][0])[2], parts[3][2]
                content = content.lstrip(left).rstrip(right) if bits & SHOWN else ""
                out += (text if content else text[:len(text) - drop]) + content
        return out

    def compare(self, systems):
        """Conversations of up to six turns, from the parts and by the template itself."""
        cut = self.turns[False, False][3][0]
        choose, samples = random.Random(0), [text.replace("{}", cut) for text in SAMPLES]
        for k in range(60 * len(systems)):
            system, contents = systems[k % len(systems)], choose.choices(samples, k=2 * (k // len(systems) % 6) + 1)
            if self.render_parts(system, contents) != self.render(system, contents):
                raise ValueError("rewrites what was said")
        for tag in dict.fromkeys(re.findall(r"<\w+>", "\0".join(self.literals))):  # tools' results, to Qwen 3
            closing = tag.replace("<", "</")
            contents = ["a", f"<think>b{self.turns[False, True][3][0]}c", f"{tag}d{closing}"]
            if self.render_parts(None, contents) != self.render(None, contents):
                for parts in (parts for (_, later), parts in self.turns.items() if later):
                    if parts[7][0] not in ("", tag):
                        raise ValueError(f"takes what {parts[7][0]} and {tag} begin for no user's message")
                    parts[7][0] = tag


def read_chat(source, spec):
    """-> {(system prompt, later turn): parts}, what the template writes, special tokens' texts; None: no format"""
    text, turns = spec["chat_template"], {}
    for systems in [[None], ["", "S", " \xa0S\n\n", None]] if text else []:
        try:
            chat = Chat(text, spec["special"])
            chat.turns = turns | {(bool(turns), later): chat.turn_parts(SYSTEM if turns else None, later)
                                  for later in (False, True)}
            chat.compare(systems)
            turns = chat.turns
        except Exception as error:  # whatever a template raises
            said = str(error) if isinstance(error, ValueError) else f"says {' '.join(str(error).split())[:200]!r}"
            lost = "if there is a system prompt: run's -y will be refused" if turns else "(no -m chat, but -m generate)"
            note(f"the chat template of {source} {said} {lost}")
            break
    if turns and "strftime_now" in text:
        note(f"the chat template of {source} prints the date: its default date is stored")
    return (turns, chat.literals, spec["special"]) if turns else None


def compile_chat(p, chat, added):
    """The sections of the chat format. -> the added tokens that are control tokens: plain text in contents"""
    control = {token["content"] for token in added if token["special"]}
    if not chat:
        return control
    turns, literals, special = chat
    ids = {token["content"]: token["id"] for token in added}
    literals = "\0".join([*literals, *(text for parts in turns.values() for text, *_ in parts[:-1])])
    if lost := {token["content"] for token in added if token["content"] in literals and token.get("match") == ""}:
        note(f"{listing(lost)} of the chat template are not found in text (no -m chat: export from a tokenizer.json)")
        return control
    for k, (text, drop, (left, right), bits) in enumerate(sum(turns.values(), [])):
        tag, head = re.escape(text), ""
        if k % 4 == 3:  # a program that matches all up to </think>, or all of what is no user's message
            head = rf"[\s\S]*{tag}" if k % 8 == 3 else rf"{tag}[\s\S]*{tag.replace('<', '</')}\z"
            head, text = head if text else "(?!)", ""
        first, end = p.text(text)
        program = p.program(head, repeat(p.one(character_class(left)), 0, NONE))
        p.rows["turns"].append([first, end, max(first, end - drop), program, p.class_of(character_class(right)), bits])
    tokens = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)")
    after = [parts[k][0] + parts[k + 1][0] for (_, later), parts in turns.items() if later for k in (0, 4)]
    ends = {special.get("eos_token"), *(found[0] for text in after if (found := tokens.search(text)))}
    ends = {text for text in ends if text in ids and text != special.get("bos_token")}
    p.rows["ends"] = sorted([ids[text]] for text in ends)
    return control | ends | {text for text in ids if text.strip() and text in literals}


def compile_vocabulary(p, model):
    """The symbols, byte tokens and whole words of a BPE model. -> the unknown token's id, {left: {right: edge}}"""
    vocab, unk = model["vocab"], model["unk_token"]
    lost = [left + right for left, right, _ in model["merges"] if not {left, right, left + right} <= vocab.keys()]
    if lost or unk is not None and unk not in vocab:
        fail(f"the vocabulary lacks {listing(lost or [unk])}, in {len(lost)} merges (export a whole tokenizer)")
    known = [piece for piece in vocab if not p.byte_level or all(c in ALPHABET for c in piece)]
    words = {byte_level(piece).decode(errors="surrogateescape") if p.byte_level else piece: vocab[piece]
             for piece in known if model["ignore_merges"] or len(piece) == 1 and not p.byte_level}
    names = ALPHABET if p.byte_level else {f"<0x{b:02X}>": b for b in range(256)} if model["byte_fallback"] else {}
    if p.byte_level and model["byte_fallback"] and not ALPHABET.keys() <= vocab.keys():
        refuse("byte_fallback together with an incomplete ByteLevel alphabet")
    numbers = {b: vocab.get(name, NONE) for name, b in names.items()}
    p.bytes = [numbers.get(b, NONE) for b in range(256)]
    p.step(STEP_MERGE, 0, 0, p.byte_level | model["fuse_unk"] << 1, edges=p.trie(words))
    pairs = {}
    for left, right, rank in model["merges"]:
        pairs.setdefault(vocab[left], {})[vocab[right]] = [vocab[left + right], rank, 0]
    return NONE if unk is None else vocab[unk], pairs


def compile_tokenizer(spec, rows, chat):
    """-> tokenizer.bin of read_vocabulary's and read_chat's results, added tokens with ids from `rows` on left out"""
    p, model = Program(), spec["model"]
    added = [token for token in spec["added_tokens"] if rows is None or token["id"] < rows]
    if lost := [token["content"] for token in spec["added_tokens"] if token not in added]:
        note(f"{listing(lost)}: added tokens without a row among the model's {rows}, left out")
    control = compile_chat(p, chat, added)
    pieces, flags, found = {i: piece for piece, i in model["vocab"].items()}, {}, ({}, {})
    for token in added:
        i, content, text = token["id"], token["content"], token.get("match", token["content"])
        if len(text.encode()) > 1024:
            refuse(f"the added token {content[:40]!r}... of {len(text.encode())} bytes, more than 1024")
        if text:
            found[token.get("normalized", False)].setdefault(text, i)
        pieces[i] = token.get("piece", content)
        bits = int(token.get("hidden", token["special"])) | CONTROL * (content in control)
        bits |= sum(bit for name, bit in FLAGS.items() if token.get(name))
        if flags.setdefault(i, bits) != bits:
            refuse(f"two added tokens of id {i}")
    for words, steps in zip(found, (leaves(spec["normalizer"]), leaves(spec["pre_tokenizer"]))):
        if words:  # found in the raw text, and in the normalized one
            p.step(STEP_ADDED, edges=p.trie(words))
        for k, step in enumerate(steps):
            if step.get("prepend_scheme") == "first" and (k or spec["normalizer"]):
                refuse("Metaspace with prepend_scheme first after other steps")  # it asks where the text began
            p.add(step)
    if (count := len(p.rows["steps"])) > 63:
        refuse(f"{count} steps of normalizers and pre-tokenizers, above 63")
    unk, pairs = compile_vocabulary(p, model)
    seen = {name for token in added for name in FLAGS if token.get(name)}
    word = p.class_of("word") if "single_word" in seen else 0
    space = p.class_of(r"\s") if seen & {"lstrip", "rstrip"} else 0
    (before, after), (to_bytes, strip) = spec["post_processor"], decoder_of(spec["decoder"])
    p.rows["post"] = [[i] for i in [*before, *after]]
    if strip == NONE and any(" " in piece for piece in pieces.values()):
        refuse("a Metaspace decoder and pieces with spaces")
    if any(i not in pieces for i in [*before, *after]):
        fail(f"ids {before + after} around a text are not all in the vocabulary (export the model's own tokenizer)")
    if not pieces or max(pieces) > 2 * len(pieces) + 100_000:
        refuse(f"{len(pieces)} pieces with ids up to {max(pieces, default=0)}")
    data, edges, paired = bytearray(), p.rows["edges"], {i for left in pairs for i in (left, *pairs[left])}
    for i in range(max(pieces) + 1):
        first, bits = (len(data), len(edges)), flags.get(i, 0) | ALONE * (i not in paired)
        data += to_bytes(pieces[i]) if i in pieces else b""
        edges += [[right, *edge] for right, edge in sorted(pairs.get(i, {}).items())]
        p.rows["ids"].append([first[0], len(data), bits, first[1], len(edges)])
    p.rows["data"] = np.frombuffer(data, "u1")
    return p.file(fingerprint(spec), len(before), strip, unk, word, space, *p.compose, *p.bytes)


def write_tokenizer(source, path, rows=None):
    """Writes the tokenizer.bin of a folder or file, but no added token of an id from `rows` on. -> fingerprint or 0"""
    spec = read_vocabulary(Path(source))
    if not spec:
        return 0
    Path(path).write_bytes(compile_tokenizer(spec, rows, read_chat(source, spec)))
    return fingerprint(spec)


# ---- Back to Hugging Face ----

def to_hugging_face(folder, path, tokenizer):
    """Writes config.json, generation_config.json, model.safetensors (as many files as it takes) and tokenizer files."""
    import torch
    h = dict(zip(HEADER.names, [value for row in np.fromfile(path, HEADER, 1).tolist() for value in row]))
    if not h or h["magic"] != MAGIC or h["version"] != 1 or not 0 < h["n_layers"] <= 65536:  # as run has it
        fail(f"{path} is not a run.c checkpoint of version 1 (a llama2.c model: export its .pt first)")
    end = max(offset + np.dtype(kind).itemsize * math.prod(shape) for *_, shape, kind, offset in layout(h))
    if (size := path.stat().st_size) < end:
        fail(f"{path} holds {size} bytes of the {end} that its header promises (it is cut short: export it again)")
    arrays = {(name, layer): np.memmap(path, kind, "c", offset, shape)
              for name, layer, shape, kind, offset in layout(h)}
    if not h["config_size"]:
        fail(f"{path} carries no config.json (export it again)")
    stops = arrays["eos_ids", None].tolist()
    config, c, _ = settle(json.loads(arrays["config_json", None].tobytes()), {})
    wanted, small = describe(c, stops)
    differing = [key for key in wanted if h[key] != wanted[key]]
    if differing := differing or [name for name in small if not np.array_equal(small[name], arrays[name, None])]:
        fail(f"{path}: its {listing(differing)} are not those of its config.json (export it again; a GGUF's own "
             "frequencies are nothing that transformers could load)")
    tensors = {}
    for name, layer in (key for key in arrays if len(TENSORS[key[0]]) > 3):
        parts = places(HUGGING_FACE, c.model_type, name, layer, arrays[name, layer].shape, h)
        for (part, *_), array in zip(parts, arrays[name, layer] if len(parts) > 1 else [arrays[name, layer]]):
            kind = torch.float32 if array.dtype == np.float32 else torch.bfloat16
            tensors.setdefault(part, []).append(torch.from_numpy(array).view(kind))
    tensors = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in tensors.items()}
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()} if h["weight_type"] else {}
    if narrow and all(torch.equal(tensors[name], tensor.to(tensors[name].dtype)) for name, tensor in narrow.items()):
        tensors = narrow  # the norms, too
    origin = tokenizer and find_source(tokenizer)
    files = [file for name in TOKENIZER_FILES if origin and (file := origin / name).exists()]
    if tokenizer and not files:
        fail(f"{tokenizer} holds no tokenizer files ({listing(TOKENIZER_FILES)})")
    if folder.exists() and any(folder.iterdir()):
        fail(f"{folder} is not empty (give a new one)")
    with replacing(folder) as temporary:
        temporary.mkdir()
        huggingface_hub.save_torch_state_dict(tensors, temporary, max_shard_size=MAX_SHARD)
        ropes = config["rope_parameters"]  # in both spellings: for transformers 4, and what builds on it, too
        rope = ropes.get("full_attention", ropes)
        config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        config |= {} if rope["rope_type"] == "default" else dict(rope_scaling=rope)
        if c.model_type == "gemma3_text":
            config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        config.pop("torch_dtype", None)
        config["dtype"] = "bfloat16" if tensors is narrow else "float32"
        generation = dict(bos_token_id=config.get("bos_token_id"), eos_token_id=stops)
        for name, value in (("config.json", config), ("generation_config.json", generation)):
            (temporary / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")
        for file in files:
            (temporary / file.name).write_bytes(file.read_bytes())
        for file in temporary.glob("*.safetensors"):
            file.chmod((temporary / "config.json").stat().st_mode)  # the library makes them private


# ---- Command line ----

def export(source, path, bf16=False):
    """model.bin, and model.tokenizer.bin where the source has a tokenizer."""
    with replacing(path, source) as model, replacing(final := path.with_suffix(".tokenizer.bin"), source) as tokenizer:
        opened = open_source(source)
        rows = opened.shapes.get(tensor_name(opened.column, "token_embedding"), (None,))[0]
        fingerprint = write_tokenizer(source, tokenizer, rows)
        if not fingerprint and final.exists():
            fail(f"{source} has no tokenizer, and {final} is of another model (remove it, or give another name)")
        if not fingerprint:
            note(f"{source} has no tokenizer, and none is written (give run one with -z)")
        write_model(opened, model, fingerprint, bf16)


def main(arguments=None):
    usage = "SOURCE model.bin [--bf16], --tokenizer SOURCE tokenizer.bin, or --hf DIR model.bin [--from SOURCE]"
    parser = argparse.ArgumentParser("export.py", f"export.py {usage}", __doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="SOURCE model.bin", help="what to read, what to write")
    parser.add_argument("--bf16", action="store_true", help="store the matrices as bfloat16, if that changes nothing")
    parser.add_argument("--tokenizer", action="store_true", help="SOURCE tokenizer.bin: write the tokenizer only")
    parser.add_argument("--hf", metavar="DIR", help="model.bin: write it as a Hugging Face folder")
    parser.add_argument("--from", metavar="SOURCE", dest="tokenizer_source", help="with --hf: whose tokenizer to copy")
    a = parser.parse_args(arguments)
    if len(a.paths) != (1 if a.hf else 2) or bool(a.hf) + a.tokenizer + a.bf16 > 1 or a.tokenizer_source and not a.hf:
        parser.error("these arguments do not go together")
    warnings.simplefilter("ignore")  # of libraries
    with exporting(f"{a.paths[0]} to {a.hf or a.paths[1]}"):
        if a.hf:
            to_hugging_face(Path(a.hf).absolute(), Path(a.paths[0]), a.tokenizer_source)
        elif a.tokenizer:
            source, path = find_source(a.paths[0]), Path(a.paths[1]).absolute()
            with replacing(path, source) as temporary:
                write_tokenizer(source, temporary) or fail(f"{a.paths[0]} has no tokenizer")
        else:
            export(find_source(a.paths[0]), Path(a.paths[1]).absolute(), a.bf16)


if __name__ == "__main__":
    main()

"""Checkpoints without PyTorch: writes and reads the formats that run.c reads, and computes them in float64 with numpy.

    python tests/checkpoint.py MODEL "1 2 3" [ROWS] > logits     float32 logits of the (last ROWS) ids,
    one row a position
"""
import math
import struct
import sys

import numpy as np

MAGIC = b"run.c\r\n\x1a"
ALIGN = 64
# Slot of 8 bytes -> field. Those in REAL are float64, the others int64; slot 0 is the magic, 47 to 63 are zero.
FIELDS = dict(enumerate(
    "version weight_type dim hidden_dim n_layers n_heads n_kv_heads head_dim vocab_size seq_len tied activation "
    "norm_kind norm_place qk_norm biases rope_dim rope_pairs n_rope_tables bos_id n_eos tokenizer_hash config_size "
    "n_experts n_experts_used n_shared_experts expert_dim n_dense_layers router "
    "q_lora_rank kv_lora_rank nope_head_dim v_head_dim "
    "rms_norm_eps norm_weight_add rope_theta rope_theta_local rope_attention_factor rope_attention_factor_local "
    "attention_scale embedding_scale residual_scale logit_scale attention_softcap logit_softcap router_scale".split(),
    start=1))
SLOTS = {name: slot for slot, name in FIELDS.items()}
REAL = {name for slot, name in FIELDS.items() if slot >= 34}
BIAS_QKV, BIAS_O, BIAS_FFN, BIAS_NORM, BIAS_CLASSIFIER = 1, 2, 4, 8, 16


def config(**changes):
    """A small llama's header fields, with `eos` (ids) and `config_json` (bytes); derived ones follow the changes."""
    c = dict.fromkeys(SLOTS, 0)
    c.update(version=1, dim=32, hidden_dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=300, seq_len=64, tied=1,
             norm_place=5, n_rope_tables=1, bos_id=1, eos=[2], config_json=b"", rms_norm_eps=1e-5, rope_theta=1e4,
             rope_attention_factor=1.0, rope_attention_factor_local=1.0, embedding_scale=1.0, residual_scale=1.0,
             logit_scale=1.0)
    c.update(changes)
    derived = dict(head_dim=c["dim"] // max(1, c["n_heads"]), n_eos=len(c["eos"]), config_size=len(c["config_json"]))
    c.update({k: v for k, v in derived.items() if k not in changes})
    c.update({k: v for k, v in dict(rope_dim=c["head_dim"],
                                    attention_scale=c["head_dim"] ** -0.5).items() if k not in changes})
    return c


def layout(c):
    """(name, dtype, shape) of every tensor in the file's order."""
    d, h, v = c["dim"], c["hidden_dim"], c["vocab_size"]
    q, kv = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
    f, i, b = "<f4", "<i4", c["biases"]
    norm = lambda name, there: [(n, (d,)) for n in (name, name + "_bias")[:1 + bool(b & BIAS_NORM)] if there]
    sets = {1: (1, 1), 2: (c["n_heads"], c["n_kv_heads"]), 3: (c["n_heads"], c["n_kv_heads"])}.get(c["qk_norm"])
    w = "<u2" if c["weight_type"] else f    # matrices: float32, or bfloat16 as its 16 bits
    yield "eos_ids", i, (c["n_eos"],)
    yield "layer_window", i, (c["n_layers"],)
    yield "layer_rope", i, (c["n_layers"],)
    yield "rope_freq", f, (c["n_rope_tables"], c["rope_dim"] // 2)
    yield "token_embedding", w, (v, d)
    for l in range(c["n_layers"]):
        layer = norm("attention_norm", c["norm_place"] & 1) + [("wq", (q, d)), ("wk", (kv, d)), ("wv", (kv, d))]
        layer += [("bq", (q,)), ("bk", (kv,)), ("bv", (kv,))] if b & BIAS_QKV else []
        layer += [("q_norm", (sets[0], c["head_dim"])), ("k_norm", (sets[1], c["head_dim"]))] if sets else []
        layer += [("wo", (d, q))] + ([("bo", (d,))] if b & BIAS_O else [])
        layer += norm("attention_post_norm", c["norm_place"] & 2) + norm("ffn_norm", c["norm_place"] & 4)
        layer += [("w1", (h, d)), ("w3", (h, d)), ("w2", (d, h))]
        layer += [("b1", (h,)), ("b3", (h,)), ("b2", (d,))] if b & BIAS_FFN else []
        layer += norm("ffn_post_norm", c["norm_place"] & 8)
        for name, shape in layer:
            yield f"{l}.{name}", w if name[0] == "w" else f, shape
    for name, shape in norm("final_norm", True):
        yield name, f, shape
    if not c["tied"]:
        yield "classifier", w, (v, d)
    if b & BIAS_CLASSIFIER:
        yield "classifier_bias", f, (v,)


def offsets(c):
    """{name: (offset, bytes)} of every tensor and of config_json."""
    found, at = {}, 8 * 64
    blocks = [(name, int(np.dtype(dtype).itemsize * np.prod(shape))) for name, dtype, shape in layout(c)]
    for name, size in blocks + ([("config_json", c["config_size"])] if c["config_size"] else []):
        at = -(-at // ALIGN) * ALIGN
        found[name] = at, size
        at += size
    return found


def tensors(c, seed=0, scale=0.4):
    """Random tensors: norms about 1, matrices and biases normal."""
    rng = np.random.default_rng(seed)
    fixed = dict(eos_ids=np.array(c["eos"]), layer_window=np.zeros(c["n_layers"]), layer_rope=np.ones(c["n_layers"]),
                 rope_freq=np.tile(frequencies(c["rope_dim"], c["rope_theta"])[:c["rope_dim"] // 2],
                                   (c["n_rope_tables"], 1)))
    made = {}
    for name, dtype, shape in layout(c):
        noise = rng.standard_normal(shape, dtype=np.float32)
        noise = 1 + 0.1 * noise if name.endswith("norm") else scale * noise
        made[name] = stored(np.asarray(fixed.get(name, noise)), dtype).reshape(shape)
    return made


def stored(values, dtype):
    """Values as a tensor keeps them; bfloat16 (<u2) is the upper half of a float32, the lower one dropped."""
    return (values.astype("<f4").view("<u4") >> 16).astype(dtype) if dtype == "<u2" else values.astype(dtype)


def frequencies(rope_dim, theta):
    return 1 / np.float32(theta) ** (np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim))


def header(c):
    slots = bytearray(8 * 64)
    slots[:8] = c.get("magic", MAGIC)
    for name, slot in SLOTS.items():
        struct.pack_into("<d" if name in REAL else "<q", slots, 8 * slot, c[name])
    return bytes(slots)


def pieces(c, t):
    """The checkpoint's bytes, tensor by tensor."""
    yield header(c)
    end = 8 * 64
    for name, (at, size) in offsets(c).items():
        yield bytes(at - end) + (c["config_json"] if name == "config_json" else t[name].tobytes())
        end = at + size


def pack(c, t=None, seed=0):
    """The checkpoint as bytes."""
    return b"".join(pieces(c, tensors(c, seed) if t is None else t))


def write(path, c=None, t=None, seed=0):
    """Writes a checkpoint and returns its config and tensors."""
    c = c or config()
    t = tensors(c, seed) if t is None else t
    with open(path, "wb", buffering=1 << 24) as f:  # in long pieces, as export.py does
        f.writelines(pieces(c, t))
    return c, t


def read(path):
    """The config and tensors of a checkpoint."""
    with open(path, "rb") as f:
        return parse(f.read())


def parse(data):
    """The same of a file's bytes, or of its mapping, which the tensors then are views of."""
    assert bytes(data[:8]) == MAGIC
    c = {name: struct.unpack_from("<d" if name in REAL else "<q", data, 8 * slot)[0] for name, slot in SLOTS.items()}
    places = offsets(c)
    t = {name: np.frombuffer(data, dtype, int(np.prod(shape)), places[name][0]).reshape(shape)
         for name, dtype, shape in layout(c)}
    at, size = places.get("config_json", (0, 0))
    return {**c, "eos": t["eos_ids"].tolist(), "config_json": bytes(data[at:at + size])}, t


def successor_model(path, follow, dim=64, **changes):
    """A model whose likeliest next id is follow[id]; an id not in follow has itself next.

    Attention and FFN add nothing; the classifier's row of follow[id] points along the embedding of id."""
    c = config(**{**dict(dim=dim, hidden_dim=16, n_layers=1, tied=0), **changes})
    t = tensors(c, 3)
    for l in range(c["n_layers"]):
        t[f"{l}.wo"] *= 0
        t[f"{l}.w2"] *= 0
    rows = t["token_embedding"] / np.linalg.norm(t["token_embedding"], axis=1, keepdims=True)
    t["token_embedding"] = rows
    t["final_norm"] = np.ones_like(t["final_norm"])
    t["classifier"] = np.zeros_like(rows)
    for i in range(c["vocab_size"]):
        t["classifier"][follow.get(i, i)] += 4 * rows[i]
    return write(path, c, t)


# llama2.c's files: adjacent pairs are rotated; eps 1e-5, theta 1e4, BOS 1, stop at 1 and 2.

def llama2c_config(**changes):
    return config(**{**dict(rope_pairs=1, eos=[1, 2]), **changes})


def write_llama2c(path, c, t, version=0):
    """Writes llama2.c's legacy (0) or version 1 file."""
    shape = [c[k] for k in "dim hidden_dim n_layers n_heads n_kv_heads vocab_size seq_len".split()]
    each = lambda *names: [t[f"{l}.{name}"] for name in names for l in range(c["n_layers"])]
    if version == 0:
        head = struct.pack("<7i", *shape[:5], shape[5] if c["tied"] else -shape[5], shape[6])
        table = [np.zeros((c["seq_len"], c["head_dim"] // 2), "<f4")] * 2     # cosines and sines, which readers ignore
        blocks = [t["token_embedding"], *each("attention_norm"), *each("wq", "wk", "wv", "wo"), *each("ffn_norm"),
                  *each("w1", "w2", "w3"), t["final_norm"], *table]
    else:
        head = struct.pack("<2I7iB", 0x616B3432, 1, *shape, c["tied"]).ljust(256, b"\0")
        blocks = [*each("attention_norm", "ffn_norm"), t["final_norm"], t["token_embedding"],
                  *each("wq", "wk", "wv", "wo", "w1", "w2", "w3")]
    blocks += [] if c["tied"] else [t["classifier"]]
    with open(path, "wb") as f:
        f.writelines([head, *(np.ascontiguousarray(b, "<f4") for b in blocks)])


def write_llama2c_tokenizer(path, n=300, extra=()):
    """Writes llama2.c's tokenizer.bin: unknown, BOS, EOS, 256 bytes, then `extra` pieces and made ones up to n ids."""
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{b:02X}>" for b in range(256)), *extra]
    fill = " abcdefghijklmnopqrstuvwxyz.,!?" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pieces += [x for x in fill if x not in pieces]
    pieces += [f"w{i}" for i in range(len(pieces), n)]
    pieces = pieces[:n]
    with open(path, "wb") as f:
        f.write(struct.pack("<I", max(len(p.encode()) for p in pieces)))
        for i, piece in enumerate(pieces):
            f.write(struct.pack("<fi", 0.0 if i < 259 else -float(i - 259), len(piece.encode())) + piece.encode())
    return pieces


# The model in float64.

def normalized(c, x, weight, bias=0.0):
    x = x - x.mean(-1, keepdims=True) if c["norm_kind"] else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * (c["norm_weight_add"] + weight) + bias


def rotate(x, c, freq, factor):
    """x (T, heads, head_dim): pairs turned by position times frequency."""
    half = c["rope_dim"] // 2
    angle = np.arange(len(x))[:, None] * freq.astype(np.float64)[None]             # (T, rope_dim / 2)
    cos, sin = (f(angle)[:, None] * factor for f in (np.cos, np.sin))
    pair = (slice(0, half), slice(half, 2 * half)) if not c["rope_pairs"] else (slice(0, 2 * half, 2),
        slice(1, 2 * half, 2))
    out = x.copy()
    out[..., pair[0]] = x[..., pair[0]] * cos - x[..., pair[1]] * sin
    out[..., pair[1]] = x[..., pair[1]] * cos + x[..., pair[0]] * sin
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


ACTIVATIONS = [lambda x: x / (1 + np.exp(-x)), lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / 2 ** 0.5)),
               lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x ** 3))),
               lambda x: np.maximum(x, 0), lambda x: 1 / (1 + np.exp(-x))]


def attention(c, t, l, a):
    """What layer l's attention makes of a (T, dim), up to wo."""
    T, get = len(a), lambda name: t.get(f"{l}.{name}", 0.0)
    q, k, v = ((a @ t[f"{l}.w{s}"].T + get(f"b{s}")).reshape(T, -1, c["head_dim"]) for s in "qkv")
    if c["qk_norm"] == 2:
        q, k = (normalized(c, x.reshape(T, -1), get(n).reshape(-1)).reshape(x.shape) for x, n in (
            (q, "q_norm"), (k, "k_norm")))
    elif c["qk_norm"]:
        q, k = normalized(c, q, get("q_norm")), normalized(c, k, get("k_norm"))
    table = int(t["layer_rope"][l])
    if table:
        factor = c["rope_attention_factor" if table == 1 else "rope_attention_factor_local"]
        q, k = (rotate(x, c, t["rope_freq"][table - 1], factor) for x in (q, k))
    k, v = (np.repeat(x, c["n_heads"] // c["n_kv_heads"], axis=1) for x in (k, v))
    score = capped(np.einsum("ihd,jhd->hij", q, k) * c["attention_scale"], c["attention_softcap"])
    i, j, window = np.arange(T)[:, None], np.arange(T)[None], int(t["layer_window"][l]) or T
    weight = softmax(np.where((j <= i) & (j > i - window), score, -np.inf))
    return np.einsum("hij,jhd->ihd", weight, v).reshape(T, -1) @ t[f"{l}.wo"].T + get("bo")


def forward(c, t, ids):
    """Logits (T, vocab_size) and hidden states (n_layers + 1, T, dim), as output_hidden_states gives them."""
    t = {name: value.astype(np.float64) for name, value in t.items()}
    norm = lambda name, x: normalized(c, x, t[name], t.get(name + "_bias", 0.0)) if name in t else x
    x = t["token_embedding"][np.asarray(ids)] * c["embedding_scale"]
    hidden = [x]
    for l in range(c["n_layers"]):
        get = lambda name: t.get(f"{l}.{name}", 0.0)
        before = norm(f"{l}.attention_norm", x)
        x = x + c["residual_scale"] * norm(f"{l}.attention_post_norm", attention(c, t, l, before))
        a = before if c["norm_place"] & 16 else norm(f"{l}.ffn_norm", x)
        gate = ACTIVATIONS[c["activation"]](a @ t[f"{l}.w1"].T + get("b1"))
        out = (gate * (a @ t[f"{l}.w3"].T + get("b3"))) @ t[f"{l}.w2"].T + get("b2")
        x = x + c["residual_scale"] * norm(f"{l}.ffn_post_norm", out)
        hidden.append(x)
    hidden[-1] = norm("final_norm", x)
    logits = hidden[-1] @ t.get("classifier", t["token_embedding"]).T + t.get("classifier_bias", 0.0)
    return capped(logits * c["logit_scale"], c["logit_softcap"]), np.stack(hidden)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    logits, _ = forward(*read(sys.argv[1]), [int(i) for i in sys.argv[2].split()])
    sys.stdout.buffer.write(logits[-int(sys.argv[3]) if sys.argv[3:] else 0 :].astype("<f4").tobytes())

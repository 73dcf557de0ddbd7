"""The benchmark: that it runs and its figures fit together, and what it counts. How fast anything is, is not tested."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import bench
import checkpoint
import engines


def test_quick(run_binary):
    """--quick on the bundled model: a row for each contender, whose figures agree; the README's pictures stay."""
    pictures = [path.read_bytes() for path in sorted(ROOT.glob("tests/*.svg"))]
    done = subprocess.run([sys.executable, ROOT / "tests/bench.py", "--quick", "--json", "--plot"], capture_output=True,
                          env={**os.environ, "RUN": run_binary}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert pictures == [path.read_bytes() for path in sorted(ROOT.glob("tests/*.svg"))] and pictures
    found = json.loads(done.stdout)
    rows = {(row["case"], row["contender"]): row for row in found["measurements"]}
    assert {("decode", "run.c"), ("prefill", "run.c"), ("threads", "run.c"), ("threads", "run.c -j 1")} <= set(rows)
    assert all(row["tokens_per_second"] > 0 and row["of_limit"] > 0 and row["spread"] >= 0 for row in rows.values())
    assert all(row["ours_over_it"] == 1 for (_, name), row in rows.items() if name == "run.c")
    weights = sum(w.nbytes for w in engines.opened(ROOT / "tests/stories.bin")[1].values())
    moved = 1e9 * rows["decode", "run.c"]["giga_per_second"] / rows["decode", "run.c"]["tokens_per_second"]
    assert weights < moved < 1.5 * weights    # and some of the cache
    assert {goal["unit"] for goal in found["goals"]} == {"ms", "MB"} and all(g["measured"] > 0 for g in found["goals"])


@pytest.mark.parametrize("tied", [0, 1])
def test_costs(tied):
    """Bytes and operations, against a count over the tensors and over pairs of positions."""
    c = checkpoint.config(tied=tied, n_layers=3, n_heads=6, n_kv_heads=2, dim=48, hidden_dim=40)
    matrices = {name: shape for name, _, shape in checkpoint.layout(c) if len(shape) == 2 and name != "rope_freq"}
    if not tied:
        matrices.pop("token_embedding")       # of which a token reads one row
    sizes = {name: int(np.prod(shape)) for name, shape in matrices.items()}
    last = sizes["token_embedding" if tied else "classifier"]
    kv = 2 * 3 * 2 * 8                        # keys and values, layers, heads, head_dim
    assert bench.bytes_of(c, 1, 10) == 4 * (sum(sizes.values()) + kv * 11)
    assert bench.bytes_of(c, 1, 10, 2) == 2 * sum(sizes.values()) + 4 * kv * 11
    scores = sum(q + 1 for q in range(10, 15))
    assert bench.flops_of(c, 5, 10) == 2 * (5 * (sum(sizes.values()) - last) + last) + 2 * 2 * 3 * 6 * 8 * scores


def test_medians_of_ratios():
    """A ratio is the median of the rounds' own: one slow round of the machine moves neither side."""
    case = bench.Case("decode", "x", "decode", 8, 4, checkpoint.config(), limits=[(1, 1), (1, 1), (0.1, 0.1)],
                      took={"run.c": [(1, 1.0), (1, 2.0), (1, 30.0)], "other": [(1, 3.0), (1, 4.0), (1, 60.0)]})
    assert case.over("other") == 2 and case.over("run.c") == 1 and case.over("lacking") is None
    work = bench.bytes_of(case.c, 1, 8 + 2) / 1e9
    assert case.of_limit("run.c") == pytest.approx(work / 2) and case.row("other")["tokens_per_second"] == 0.25


def test_gguf_and_bf16_hold_the_same_weights(tmp_path):
    gguf = pytest.importorskip("gguf")
    c, t = checkpoint.write(tmp_path / "m.bin", checkpoint.config())
    held = {x.name: x.data for x in gguf.GGUFReader(engines.gguf_file(tmp_path / "m.bin")).tensors}
    assert np.array_equal(held["blk.1.ffn_up.weight"], t["1.w3"]) and len(held) == len(t) - 4
    head = held["blk.1.attn_k.weight"][8:16]  # the second of two heads of 8 rows, pairs side by side
    assert np.array_equal(head, t["1.wk"][8:16][[0, 4, 1, 5, 2, 6, 3, 7]])
    narrow = engines.opened(engines.bf16_file(tmp_path / "m.bin"))[1]["1.w3"].astype("<u4") << 16
    assert narrow.dtype == np.uint32 and np.allclose(narrow.view("<f4"), t["1.w3"], rtol=2**-7)

"""Checks a Hugging Face folder sharded over processes against ./run: the same logits within float32's error?

    torchrun --nproc-per-node N tests/tensor_parallel.py FOLDER model.bin [--tokens 64]

FOLDER is what `export.py --hf FOLDER model.bin` wrote; its number of key/value heads must be a multiple of N. PyTorch
splits the matrices over N processes (tensor parallelism, here over gloo on the CPU; the same code runs over NCCL on
GPUs). Prints how far both are from float64; exit code 0 PASS, 1 FAIL.
"""
import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

import diff_logits
import reference


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("model", metavar="model.bin")
    parser.add_argument("--tokens", metavar="N", type=int, default=64)
    parser.add_argument("--engine", metavar="PATH", default=Path(__file__).resolve().parent.parent / "run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation="eager", tp_plan="auto").eval()
    ids = reference.random_ids(model.config.vocab_size, args.tokens)
    with torch.no_grad():
        sharded = model(torch.tensor([ids]), use_cache=False).logits
    sharded = (sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded)[0].numpy()
    rows = model.model.layers[0].mlp.gate_proj.weight
    held = (rows.to_local() if hasattr(rows, "to_local") else rows).shape[0]
    print(f"process {rank} of {size} holds {held} of {model.config.intermediate_size} rows of each w1", file=sys.stderr)
    total = torch.tensor(held)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    if rank:
        return 0
    ours = diff_logits.engine(args.engine, args.model, "logits", ids, model.config.vocab_size)
    f64, _ = reference.forward(reference.to_float64(reference.load(args.folder)), ids)
    row = diff_logits.Row("logits", ours, sharded, f64, relative=False)
    print(f"logits over float64, largest and RMS error: run.c {row.ours.largest:.2e} {row.ours.rms:.2e}, "
          f"{size} processes {row.theirs.largest:.2e} {row.theirs.rms:.2e}")
    print(f"largest difference between the two: {np.abs(ours - sharded).max():.2e}")
    shared = total == model.config.intermediate_size
    if not shared:
        print(f"the processes hold {total} rows of a w1 that has {model.config.intermediate_size}: it is not shared out")
    good = row.good and shared and row.theirs.largest < 1e-3
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

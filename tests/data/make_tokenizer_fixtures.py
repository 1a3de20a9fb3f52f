#!/usr/bin/env python3
"""Small tokenizer.json files of every supported kind with the ids that the `tokenizers` package gives.

    make_tokenizer_fixtures.py write FOLDER               NAME.json: the tokenizer and texts with their ids
    make_tokenizer_fixtures.py compare BINARY FOLDER...   ids of `BINARY tokenize` on 100,000 generated lines, for folders
                                                          with a tokenizer.json; prints the lines that differ

Needs `pip install tokenizers`. The texts have only characters that Python's version of Unicode knows: PCRE2 and the
package may know different ones.
"""

import json
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SCRIPTS = [
    (0x41, 0x7A), (0xC0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF),
    (0x900, 0x97F), (0xE00, 0xE7F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF), (0x1F300, 0x1F6FF), (0x1F900, 0x1F9FF), (0x20000, 0x2A6DF),
]  # fmt: skip
SPACES = [
    " ", "  ", "   ", "    ", "        ", "\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f", "\u0085", "\u00a0", "\u1680",
    "\u180e", "\u2003", "\u200b", "\u2028", "\u202f", "\u3000", "\ufeff",
]  # fmt: skip
SYMBOLS = [
    "👍", "👍🏽", "👨\u200d👩\u200d👧\u200d👦", "🇩🇪", "❤️", "🏳️\u200d🌈", "☺", "①", "½", "²", "Ⅷ", "٣", "५", "㊿", "𝟙", "ﬁ",
    "ſ", "'ſ", "'S", "'LL", "’s", "…", "—",
]  # fmt: skip
COMPOSED = [
    "e\u0301", "e\u0323\u0307", "\u1e9b\u0323", "\u1100\u1161\u11a8", "\uac00\u11a8", "A\u030a", "\u212b", "\u2126",
    "\u0958", "\u0340", "\u0344", "a\u0315\u0300\u05ae\u0301", "\u0f73", "\ufb2c", "\u2adc", "été", "e\u0301te\u0301",
    "\u0b47\u0b56", "\u09c7\u09be", "\U0001d15e",
]  # fmt: skip
CODE = [
    "def f(x):\n    return x+1\n", "for (int i=0;i<n;++i) { a[i]+=b[i]; }", "// comment\n\t\tif(x!=y){",
    '{"key": [1,2.5,-3e10], "s": "a\\nb"}', '<html><body class="x">', "x->y::z<T&&>", "#include <vector>\n",
    "SELECT * FROM t WHERE a>=10;", "\\frac{1}{2}", "$$$", "---", "...", "!!!???", "0xDEADBEEF", "1e-10",
    "http://a.b/c?d=e&f=g#h",
]  # fmt: skip
ADDED = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", "word", "words", "sword",
    "ab", "abc", "abcd", "def", "<tool_call>", "<|begin_of_text|>", "<0x0A>", "▁", "▁▁", "Ġ", "Ċ", "<|end", "<", "|>",
]  # fmt: skip


def piece(r, known):
    """A random piece of text."""
    kind = r.randrange(12)
    if kind == 0:
        return r.choice(SPACES) * r.choice([1, 1, 2, 5])
    if kind < 4:
        letters = "".join(r.choice("etaoinshrdlucmfwypvbgkjqxz") for _ in range(r.randint(1, 9)))
        return r.choice([letters, letters.capitalize() + r.choice(["'s", "'t", "'re", "'LL", "n't", "'"])])
    if kind == 4:
        low, high = r.choice(SCRIPTS)
        return "".join(chr(r.randint(low, high)) for _ in range(r.randint(1, 8)))
    if kind == 5:
        return str(r.randrange(10 ** r.randint(1, 12)))
    if kind == 10:
        return "".join(r.choice(known) for _ in range(r.randint(1, 4)))
    if kind == 11:
        return bytes(r.randrange(256) for _ in range(r.randint(1, 6))).decode("utf-8", errors="replace")
    return r.choice([SYMBOLS, COMPOSED, CODE, ADDED][kind - 6])


def generated_lines(count, seed):
    r = random.Random(seed)
    known = [chr(c) for c in range(0x30000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    for _ in range(count):
        pieces = (piece(r, known) + (" " if r.random() < 0.4 else "") for _ in range(r.choice([1, 2, 4, 8, 16])))
        yield "".join(c for c in "".join(pieces) if unicodedata.category(c) not in ("Cn", "Cs"))


def corpus():
    r = random.Random(3)
    words = "the of and to in a is that for it as was with be by on not he his but at are this have from".split()
    words += "mamba state token layer weight decay softmax matrix reads writes learned short causal window".split()
    lines = [" ".join(r.choice(words) for _ in range(12)) + r.choice([".", "?\n", "\n\n", ", "]) for _ in range(400)]
    return lines + list(generated_lines(300, 1))


def byte_level(pre, texts, *, normalizer=None, whole=False, special=(), added=(), bos=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    if bos:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def byte_fallback(texts, metaspace=None, split=False, all_bytes=True):
    """Like Llama 2: characters with ▁ for spaces, bytes for unknown ones. Without some bytes: unknown tokens, too."""
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=250, limit_alphabet=70, special_tokens=special, show_progress=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    bytes_ = [f"<0x{b:02X}>" for b in range(256) if all_bytes or b % 3]
    vocabulary = {token: i for i, token in enumerate(special + bytes_ + [t for t in tokens if t not in special])}
    merges = [tuple(m) for m in model["merges"]]
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", metaspace, split)
    else:
        tokenizer.normalizer = trained.normalizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Metaspace("▁", metaspace, split) if split else decoders.Sequence(steps)
    tokenizer.add_special_tokens(special)
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = template
    return tokenizer


def pieces_of(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def fixtures():
    """Name, tokenizer, bos and eos."""
    texts = corpus()
    end, gpt2 = "<|endoftext|>", pre_tokenizers.ByteLevel(add_prefix_space=False)
    blanks = [AddedToken(" " * n, normalized=True) for n in range(2, 9)]
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    prefix = pre_tokenizers.ByteLevel(add_prefix_space=True)
    nfc, begin = normalizers.NFC(), "<|begin_of_text|>"
    flags = [
        AddedToken("<mask>", lstrip=True, special=True),
        AddedToken("<sep>", rstrip=True, special=True),
        AddedToken("word", single_word=True),
        AddedToken("été", normalized=True),
        AddedToken("ab", normalized=False),
        AddedToken("abc", normalized=False),
        AddedToken("\n\n", normalized=False),
        AddedToken("def", single_word=True, lstrip=True, rstrip=True),
    ]
    yield "gpt2", byte_level(gpt2, texts, special=[end]), end, end
    yield "gpt2-prefix", byte_level(prefix, texts, special=[end]), end, end
    yield "neox", byte_level(gpt2, texts, normalizer=nfc, special=[end], added=blanks), end, end
    yield "starcoder2", byte_level(digits, texts, special=[end]), end, end
    llama3 = byte_level(pieces_of(LLAMA3), texts, whole=True, special=[begin, end], bos=begin)
    yield "llama3", llama3, begin, end
    qwen = byte_level(pieces_of(QWEN), texts, normalizer=nfc, special=[end, "<|im_end|>"], added=["<tool_call>"])
    yield "qwen2", qwen, None, end
    yield "gpt4o", byte_level(pieces_of(GPT4O), texts, special=[end]), None, end
    yield "flags", byte_level(pieces_of(LLAMA3), texts, normalizer=nfc, special=flags[:2], added=flags[2:]), None, None
    yield "llama2", byte_fallback(texts), "<s>", "</s>"
    yield "llama2-some-bytes", byte_fallback(texts, all_bytes=False), "<s>", "</s>"
    yield "metaspace-first", byte_fallback(texts, "first"), "<s>", "</s>"
    yield "metaspace-split", byte_fallback(texts, "always", split=True), "<s>", "</s>"


def write(folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = ["", " ", "a", " a", "a  b ", "Two mambas met; it's 2024.\n"] + list(generated_lines(60, 2))
    for name, tokenizer, bos, eos in fixtures():
        cases = []
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
        fixture = {
            "tokenizer": json.loads(tokenizer.to_str()),
            "config": {"bos_token": bos, "eos_token": eos},
            "cases": cases,
        }
        (folder / f"{name}.json").write_text(json.dumps(fixture, ensure_ascii=False, separators=(",", ":")) + "\n")


def items_of(shards, ending):
    """The numbers in all files of a kind, a list for each."""
    for path in sorted(shards.glob(f"train-*.{ending}")):
        content = path.read_bytes()
        size = struct.unpack_from("<I", content, 12)[0]
        yield [int(n) for n in memoryview(content[64:]).cast({2: "H", 4: "I", 8: "Q"}[size])]


def compare(binary, folders, count=100000):
    lines = list(filter(None, generated_lines(count, 11)))
    failed = False
    for folder in folders:
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        with tempfile.TemporaryDirectory() as work:
            text, shards = Path(work) / "lines.jsonl", Path(work) / "shards"
            text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
            options = ["--tokenizer", folder, "--out", shards, "--test-fraction", "0"]
            subprocess.run([binary, "tokenize", text, *options], check=True, stdout=subprocess.DEVNULL)
            manifest = json.loads((shards / "manifest.json").read_text())["tokenizer"]
            ours = []
            for tokens, ends in zip(items_of(shards, "tokens"), items_of(shards, "documents")):
                ours += [tokens[begin:end] for begin, end in zip([0] + ends, ends)]
        end = [manifest["eos"]] if manifest["eos"] >= 0 else []
        theirs = [e.ids + end for e in tokenizer.encode_batch(lines, add_special_tokens=False)]
        differing = [line for line, a, b in zip(lines, ours, theirs) if a != b]
        failed |= len(ours) != len(lines) or bool(differing)
        print(f"{folder}: {len(ours)} of {len(lines)} lines compared, {len(differing)} differ")
        for line in differing[:5]:
            print("  ", ascii(line))
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "write":
        write(sys.argv[2])
    elif len(sys.argv) >= 4 and sys.argv[1] == "compare":
        sys.exit(compare(sys.argv[2], sys.argv[3:]))
    else:
        sys.exit(__doc__)

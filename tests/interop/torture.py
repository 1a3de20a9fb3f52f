"""Lines of text that tokenizers get wrong, from a seeded generator."""

import random
import unicodedata

_SCRIPTS = [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x621, 0x64A),
            (0x900, 0x97F), (0xE01, 0xE4E), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x3041, 0x30FF),
            (0x4E00, 0x9FBF), (0xAC00, 0xD7A3), (0x10300, 0x1032F), (0x1D400, 0x1D7FF), (0xFB00, 0xFB06),
            (0xFF01, 0xFF9F)]
_EMOJI = ["😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "👍🏽", "❤️", "☃", "🧑🏿‍🚀", "#️⃣", "\u200d", "\ufe0f"]
_SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n\n", " \n", "\u00a0", "\u2003", "\u3000", "\u200b", "\x0b",
           "\x0c", "\x85", "\u2028", "\x1c", "\ufeff"]
_WORDS = ("the quick brown fox doesn't I'LL we've they're it'S 'd 'Re naïve coöperate straße ŉ İstanbul ﬁne ½ ① x² "
          "l'été rock'n'roll state-of-the-art e.g. U.S.A. don’t co-op 3rd 2nd αβγ Ünïcödé").split()
_CODE = ["for (int i = 0; i < n; ++i) {", "    return x[i]**2;", "def f(a, b=None):\n\treturn a", "#include <vector>",
         "SELECT * FROM t WHERE a >= 1;", "https://a.b/c?d=e&f=%20#g", "a@b.co", "\\n\\t\\u0041",
         "<|endoftext|>", "<s>", "</s>", "<unk>", "<0x41>", "<|im_start|>user\n", "<|bos|>", "{{ x }}", "▁", "▁▁a",
         "\"'`", "...", "…", "—", "//////", "======"]
_ODD = ["\x00", "\x01", "\x1b[0m", "\x7f", "\ufffd", "\uffff", "\U0010ffff", "\ue000", "\u0301", "e\u0301",
        "a\u0328\u0301", "\u1e9b\u0323", "각", "가\u11a7", "\u1100\u1161\u11a8", "\u0345", "\u202e", "\U000e0041",
        "\u2126", "\u212b", "\u0958"]


def _piece(rng):
    kind = rng.randrange(10)
    if kind <= 2:
        return rng.choice(_WORDS)
    if kind == 3:
        low, high = rng.choice(_SCRIPTS)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8)))
    if kind == 4:
        return rng.choice(_EMOJI) * rng.randint(1, 3)
    if kind == 5:
        return rng.choice(_SPACES) * rng.randint(1, 5)
    if kind == 6:
        return "".join(rng.choice("0123456789.,eE+-٣४Ⅷ") for _ in range(rng.randint(1, 12)))
    if kind == 7:
        return rng.choice(_CODE)
    if kind == 8:  # bytes that are no text: what a program reads of them
        return bytes(rng.randrange(256) for _ in range(rng.randint(1, 6))).decode("utf-8", "replace")
    if rng.randrange(2):
        return rng.choice(_ODD)
    while True:  # any character that every program's tables of Unicode have
        code = rng.randrange(0x110000)
        if unicodedata.category(chr(code)) not in ("Cs", "Cn"):
            return chr(code)


def lines(count, seed=1):
    rng = random.Random(seed)
    first = ["", " ", "  ", "a", " a", "a ", "  a  b  ", "\n", "\n\n", " \n ", "\t\ta", "▁", "▁a", " ▁a"]
    for i in range(count):
        if i < len(first):
            yield first[i]
            continue
        text = "".join(_piece(rng) + rng.choice(["", "", " "]) for _ in range(rng.randint(1, 12)))
        if rng.randrange(16) == 0:
            text = unicodedata.normalize("NFD", text)
        yield text

// The tokenizer that lies beside SentencePiece models which no tokenizer.json can represent.
#pragma once

namespace furious {

inline constexpr const char* kTokenizationFurious =
    R"python("""The SentencePiece model of this directory, for AutoTokenizer with ``trust_remote_code=True``.

The classes of transformers rebuild a SentencePiece model from parts that do not give its ids in every case. This one
asks the sentencepiece package.
"""

import os
import shutil

import sentencepiece
from transformers import PreTrainedTokenizer


class FuriousTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, begin_with_bos=False, **options):
        self.vocab_file, self.begin_with_bos = vocab_file, begin_with_bos
        self.model = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        for name in ("bos", "eos", "unk"):
            number = getattr(self.model, name + "_id")()
            if number >= 0:
                options[name + "_token"] = self.model.id_to_piece(number)
        options["split_special_tokens"] = True  # "<s>" in a text is text
        super().__init__(begin_with_bos=begin_with_bos, **options)

    @property
    def vocab_size(self):
        return self.model.get_piece_size()

    def get_vocab(self):
        return {self.model.id_to_piece(number): number for number in range(self.vocab_size)}

    def tokenize(self, text, **_):
        return self.model.encode(text, out_type=str)

    def _tokenize(self, text, **_):
        return self.model.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.model.piece_to_id(token)

    def _convert_id_to_token(self, number):
        return self.model.id_to_piece(number)

    def convert_tokens_to_string(self, tokens):
        return self.model.decode_pieces(tokens)

    def _decode(self, token_ids, skip_special_tokens=False, **_):
        numbers = [token_ids] if isinstance(token_ids, int) else [int(number) for number in token_ids]
        special = set(self.all_special_ids) - {self.model.unk_id()} if skip_special_tokens else ()
        return self.model.decode([number for number in numbers if number not in special])

    def build_inputs_with_special_tokens(self, first, second=None):
        return [self.bos_token_id] * self.begin_with_bos + first + (second or [])

    def save_vocabulary(self, directory, filename_prefix=None):
        to = os.path.join(directory, (filename_prefix + "-" if filename_prefix else "") + "tokenizer.model")
        if os.path.abspath(to) != os.path.abspath(self.vocab_file):
            shutil.copyfile(self.vocab_file, to)
        return (to,)
)python";

}  // namespace furious

#!/usr/bin/env python3
"""Writes a Llama with random weights twice: OUT/model for furious, OUT/llama.gguf for llama.cpp.

    pip install gguf numpy safetensors sentencepiece
    bench/peers/serve_model.py tokenizer.model OUT        a SentencePiece vocabulary of 32,000 pieces
"""
import json
import os
import shutil
import sys

import numpy as np
from safetensors.numpy import save_file
import gguf
import sentencepiece

TOKENIZER, OUT = sys.argv[1:3]
D, L, H, F, V = 512, 8, 8, 1536, 32000
rng = np.random.default_rng(1)
w = lambda *s: (rng.standard_normal(s) * 0.03).astype(np.float32)
T = {'model.embed_tokens.weight': w(V, D), 'model.norm.weight': np.ones(D, np.float32), 'lm_head.weight': w(V, D)}
for i in range(L):
    p = f'model.layers.{i}.'
    for n in 'qkvo': T[p + f'self_attn.{n}_proj.weight'] = w(D, D)
    for n in ('gate', 'up'): T[p + f'mlp.{n}_proj.weight'] = w(F, D)
    T[p + 'mlp.down_proj.weight'] = w(D, F)
    T[p + 'input_layernorm.weight'] = np.ones(D, np.float32)
    T[p + 'post_attention_layernorm.weight'] = np.ones(D, np.float32)
os.makedirs(f'{OUT}/model', exist_ok=True)
save_file(T, f'{OUT}/model/model.safetensors', metadata={'format': 'pt'})
json.dump(dict(architectures=['LlamaForCausalLM'], model_type='llama', hidden_size=D, intermediate_size=F, num_hidden_layers=L,
  num_attention_heads=H, num_key_value_heads=H, vocab_size=V, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=65536,
  hidden_act='silu', tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype='float32'), open(f'{OUT}/model/config.json', 'w'))
shutil.copyfile(TOKENIZER, f'{OUT}/model/tokenizer.model')
g = gguf.GGUFWriter(f'{OUT}/llama.gguf', 'llama')
g.add_context_length(65536)
g.add_embedding_length(D)
g.add_block_count(L)
g.add_feed_forward_length(F)
g.add_head_count(H)
g.add_head_count_kv(H)
g.add_layer_norm_rms_eps(1e-5)
g.add_rope_dimension_count(D // H)
g.add_rope_freq_base(10000.0)
g.add_vocab_size(V)
g.add_file_type(0)
sp = sentencepiece.SentencePieceProcessor(TOKENIZER)
g.add_tokenizer_model('llama')
g.add_token_list([sp.id_to_piece(i).encode() for i in range(V)])
g.add_token_scores([sp.get_score(i) for i in range(V)])
g.add_token_types([2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in range(V)])
g.add_bos_token_id(1)
g.add_eos_token_id(2)
g.add_unk_token_id(0)
def perm(x): return x.reshape(H, 2, D // H // 2, D).swapaxes(1, 2).reshape(D, D)
g.add_tensor('token_embd.weight', T['model.embed_tokens.weight'])
g.add_tensor('output_norm.weight', T['model.norm.weight'])
g.add_tensor('output.weight', T['lm_head.weight'])
names = {'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up', 'mlp.down_proj': 'ffn_down', 'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ffn_norm'}
for i in range(L):
    for a, b in names.items():
        x = T[f'model.layers.{i}.{a}.weight']
        g.add_tensor(f'blk.{i}.{b}.weight', perm(x) if b in ('attn_q', 'attn_k') else x)
g.write_header_to_file()
g.write_kv_data_to_file()
g.write_tensors_to_file()
g.close()

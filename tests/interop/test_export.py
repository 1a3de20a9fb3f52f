"""`furious export --to hf`: the library's classes give the logits of the engine, and generate the same tokens."""

import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from models import FIXTURES, auto_model, close, engine, ids_of, logits_of, run, write_model

import furious

LENGTH = 300  # more than the queries that modeling_furious.py takes at a time


def small(arch, **changes):
    return furious.config_of_preset(arch, "tiny", 258, hidden_size=32, heads=4, intermediate_size=48,
                                    num_hidden_layers=2, **changes)


def greedy(model, ids, count=6, **options):
    batch = torch.as_tensor(ids)[None]
    written = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=count, do_sample=False,
                             eos_token_id=None, pad_token_id=0, **options)
    return written[0, len(ids):].tolist()


def greedy_of_engine(directory, ids, count=6):
    """Without an end: the most probable token of each position of a full pass."""
    model, ids = engine(directory, tokenizer="byte"), list(ids)
    begin = len(ids)
    for _ in range(count):
        ids.append(int(np.argmax(model.logits(ids)[-1])))
    return ids[begin:]


@pytest.mark.parametrize("arch", list(furious.presets()))
def test_every_preset(arch, tmp_path):
    own = write_model(tmp_path / "own", small(arch))
    output = run("export", own, "--to", "hf", "--out", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    library = {"softmax": "llama", "softmax-qk-norm": "qwen3"}.get(arch, "furious")
    assert config["model_type"] == library
    assert ("trust_remote_code" in output) == (library == "furious")
    model = auto_model(tmp_path / "hf", trust_remote_code=library == "furious")
    ids = ids_of(LENGTH, 258)
    wanted = engine(own, tokenizer="byte").logits(ids)
    close(logits_of(model, ids), wanted)
    assert greedy(model, ids[:9]) == greedy_of_engine(own, ids[:9])
    # What the library saves, the engine reads.
    model.save_pretrained(tmp_path / "again")
    close(engine(tmp_path / "again", tokenizer="byte").logits(ids), wanted)


def random_config(seed):
    """Switches beyond the presets, as tests/model/little.h draws them."""
    random = np.random.default_rng(seed)
    pick = lambda *values: values[random.integers(len(values))]  # noqa: E731
    coin = lambda: bool(random.integers(2))  # noqa: E731
    c = small("2mamba")
    c["score"] = pick("linear", "squared", "exponential", "power", "series")
    c["score_degree"] = {"power": 4, "series": 2}.get(c["score"], 0)
    c["norm"] = "sum" if c["score"] == "exponential" else pick("sum", "none")
    c["decay"] = pick("none", "original", "softplus", "softplus_dt", "softplus2", "silu", "log_sigmoid")
    c["decay_bias"] = c["decay"] not in ("none", "original") and coin()
    c["square_mask"] = c["score"] == "squared" and c["decay"] != "none" and coin()
    c["conv_window"] = pick(0, 2, 3, 4)
    c["conv_bias"], c["conv_silu"] = coin(), c["conv_window"] > 0 and coin()
    c["qk_activation"] = pick("none", "relu", "silu")
    c["qk_norm"] = c["qk_activation"] == "none" and coin()
    positive = c["score"] == "linear" and c["norm"] == "sum"
    if positive:
        c["qk_activation"], c["qk_norm"] = "relu", False
    c["qk_norm_per_head"] = c["qk_norm"] and coin()
    c["qk_norm_eps"] = 1e-3 if c["qk_norm"] and coin() else 0.0
    c["discretize"] = pick("none", "dt", "sigmoid", "silu", "softplus", "softplus2")
    has_dt = c["discretize"] in ("dt", "sigmoid") or c["decay"] in ("original", "softplus_dt")
    c["dt_bias"] = has_dt and coin()
    c["dt_limit"], c["dt_least"] = (0.6 if has_dt and coin() else 0.0), (0.4 if has_dt and coin() else 0.0)
    c["d_residual"], c["z_gate"], c["z_gate_bias"] = coin(), coin(), coin()
    c["z_gate_sigmoid"] = c["z_gate"] and c["norm"] == "sum" and coin()
    c["out_norm_groups"] = 2 if c["norm"] == "none" and coin() else 1
    c["out_norm_eps"], c["scale"] = pick(1e-3, 1.1920929e-7), pick(0.0, 0.5)
    c["qkv_bias"], c["out_bias"] = coin(), coin()
    c["rope"] = not positive and coin()
    c["rope_pairing"], c["rope_theta"] = pick("halves", "interleaved"), pick(10000.0, 500.0)
    if c["rope"]:
        scaling = pick((1.0, 0.0, 0.0, 0.0), (4.0, 0.0, 0.0, 0.0), (8.0, 1.0, 4.0, 64.0))
        c.update(zip(("rope_factor", "rope_low_turns", "rope_high_turns", "rope_original_length"), scaling))
    c["qk_dim"], c["branch"] = pick(8, 10, 16), pick(0, 16)
    c["k_heads"], c["q_heads"] = pick(1, 2, 4), pick(2, 4)
    if not (c["d_residual"] or c["discretize"] in ("dt", "sigmoid")) and c["q_heads"] == 4:
        c["v_heads"] = pick(2, 4)
    c["mlp"] = pick("swiglu", "gelu", "none")
    c["intermediate_size"] = 0 if c["mlp"] == "none" else 48
    c["mlp_bias"] = c["mlp"] != "none" and coin()
    c["layer_norm"], c["tie_word_embeddings"] = coin(), coin()
    c["num_attention_heads"] = max(c["q_heads"], c["k_heads"], c["v_heads"])
    c["num_key_value_heads"] = c["k_heads"]
    return furious.normal_config(c)


@pytest.mark.parametrize("seed", range(40))
def test_random_switches(seed, tmp_path):
    own = write_model(tmp_path / "own", random_config(seed), seed)
    run("export", own, "--to", "hf", "--with-code", "--out", tmp_path / "hf")
    model = auto_model(tmp_path / "hf", trust_remote_code=True)
    ids = ids_of(40, 258, seed)
    wanted = engine(own, tokenizer="byte").logits(ids)
    close(logits_of(model, ids), wanted, 2e-4)
    model.save_pretrained(tmp_path / "again")
    assert np.array_equal(engine(tmp_path / "again", tokenizer="byte").logits(ids), wanted)
    # A cache changes nothing, nor does padding before a text.
    plain = greedy(model, ids[:11])
    batch = torch.as_tensor(np.stack([ids[:11], np.concatenate([[0] * 4, ids[:7]])]))
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    both = model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None,
                          pad_token_id=0)
    assert both[0, 11:].tolist() == plain
    assert both[1, 11:].tolist() == greedy(model, ids[:7])
    assert greedy(model, ids[:11], use_cache=False) == plain


def test_modeling_trains_and_searches(tmp_path):
    own = write_model(tmp_path / "own", small("2mamba"))
    run("export", own, "--out", tmp_path / "hf")
    model = auto_model(tmp_path / "hf", trust_remote_code=True)
    batch = torch.as_tensor(ids_of(20, 258))[None]
    loss = model(batch, labels=batch).loss
    scores = engine(own, tokenizer="byte").score(batch[0])
    assert abs(loss.item() + scores.mean()) < 1e-4
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert greedy(model, batch[0], num_beams=3) == greedy(model, batch[0], num_beams=3, use_cache=False)


LIBRARY_FIXTURES = ["llama2", "llama3", "llama3-v5", "llama-linear-rope", "llama-sharded-f16", "llama32-tied-bf16",
                    "smollm2", "mistral-nowindow", "qwen2", "qwen3", "qwen3-v5", "mamba2-hf", "mamba2-hf-dtlimit",
                    "mamba2-hf-v5", "mamba2-ssm"]
CODE_FIXTURES = ["2mamba-exp", "2mamba-mamba", "2mamba-squared", "fox", "fox-gqa-gate-qknorm", "powercoder",
                 "powercoder-stored-head", "brumby", "brumby-d128-bf16", "mamba2-hf-groups", "mamba2-ssm-groups",
                 "mamba2-ssm-mlp", "mamba2-consolidated"]


def fixture(name):
    if not (FIXTURES / name).is_dir():
        pytest.skip(f"{FIXTURES / name} is not there")
    return FIXTURES / name


def check_fixture(source, model):
    """Against the engine, where the model has a tokenizer that it loads, and the program that wrote the fixture."""
    expected = safetensors.numpy.load_file(source / "logits.safetensors")
    rounded = "bf16" in source.name or "f16" in source.name
    for i, ids in enumerate(json.loads((source / "ids.json").read_text())["sequences"]):
        logits = logits_of(model, ids)
        if (source / "tokenizer.json").exists():
            close(logits, engine(source).logits(np.array(ids)))
        # Norms of groups as the released models need them, not as the library computes them.
        wanted = expected.get(f"grouped_norm.logits.{i}", expected[f"logits.{i}"])
        close(logits, wanted, 2e-2 if rounded else 3e-4)


@pytest.mark.parametrize("name", LIBRARY_FIXTURES + ["2mamba-softmax"])
def test_published_models_return(name, tmp_path):
    """Loaded, exported, and loaded by the library: the logits of the original."""
    source = fixture(name)
    run("export", source, "--to", "hf", "--dtype", "f32", "--out", tmp_path / "hf")
    model = auto_model(tmp_path / "hf", dtype=torch.float32)
    assert model.config.model_type != "furious"
    check_fixture(source, model)


@pytest.mark.parametrize("name", CODE_FIXTURES)
def test_other_models_with_code(name, tmp_path):
    source = fixture(name)
    run("export", source, "--to", "hf", "--with-code", "--dtype", "f32", "--out", tmp_path / "hf")
    check_fixture(source, auto_model(tmp_path / "hf", trust_remote_code=True, dtype=torch.float32))


@pytest.mark.parametrize("name", ["brumby", "brumby-d128-bf16"])
def test_brumby_returns(name, tmp_path):
    """No version of the library has its class: the tensors and keys are those that its authors' code wrote."""
    source = fixture(name)
    assert "BrumbyForCausalLM" in run("export", source, "--to", "hf", "--out", tmp_path / "hf")
    mine, theirs = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", source))
    assert sorted(mine) == sorted(theirs)
    for tensor in theirs:
        assert torch.equal(mine[tensor].float(), theirs[tensor].float()), tensor
        assert theirs[tensor].dim() == 1 or mine[tensor].dtype == theirs[tensor].dtype
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "hf", source))
    ours_alone = {"torch_dtype", "bos_token_id", "eos_token_id", "max_position_embeddings"}
    assert {key: value for key, value in config.items() if key not in ours_alone and original[key] != value} == {}


def test_keeps_the_dtype(tmp_path):
    own = write_model(tmp_path / "own", small("softmax"))
    for dtype in ("bf16", "f16"):
        out = tmp_path / dtype
        run("export", own, "--to", "hf", "--dtype", dtype, "--out", out)
        model = auto_model(out, dtype="auto")
        assert model.dtype == {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        run("export", out, "--to", "hf", "--out", tmp_path / f"{dtype}-again")
        assert auto_model(tmp_path / f"{dtype}-again", dtype="auto").dtype == model.dtype
        ids = ids_of(30, 258)
        close(logits_of(auto_model(out, dtype=torch.float32), ids), engine(out, tokenizer="byte").logits(ids))

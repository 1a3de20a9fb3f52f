"""The modules against the engine: the same weights, the same logits, for every preset and for every switch."""

import numpy as np
import pytest

import furious

torch = pytest.importorskip("torch", reason="torch is not installed")

SWITCHES = [
    dict(decay="softplus2"), dict(decay="silu"), dict(decay="softplus_dt"), dict(decay="log_sigmoid", decay_bias=True),
    dict(discretize="sigmoid", dt_bias=True), dict(discretize="silu"), dict(discretize="softplus"),
    dict(discretize="softplus2"), dict(discretize="dt", dt_limit=0.7, dt_bias=True),
    dict(conv_window=3, conv_bias=False),
    dict(conv_window=4, conv_silu=True), dict(rope=True), dict(rope=True, rope_pairing="halves", rope_theta=500.0),
    dict(q_heads=2, k_heads=2), dict(k_heads=2, v_heads=2), dict(qk_dim=8), dict(tie_word_embeddings=True),
    dict(qk_norm=True), dict(scale=0.7), dict(z_gate=True, z_gate_bias=False), dict(square_mask=True),
]


def random_model(config, seed=1):
    """All weights random, also those that start as ones or zeros."""
    torch.manual_seed(seed)
    module = furious.nn.LanguageModel(config)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "proj" in name or "lm_head" in name or "embed" in name:
                weight.normal_(0, 0.25)
    return module


def config_of(arch, **changes):
    sizes = dict(hidden_size=64, heads=4, intermediate_size=48, num_hidden_layers=2)
    return furious.config_of_preset(arch, "tiny", 258, **{**sizes, **changes})


def check(config, folder):
    module = random_model(config)
    module.save(folder)
    engine = furious.Model.load(folder, tokenizer="byte", device="cpu", dtype="f32")
    assert engine.parameters == sum({x.data_ptr(): x.numel() for x in module.parameters()}.values())
    ids = np.random.default_rng(1).integers(0, 256, 21)
    wanted = engine.logits(ids)
    tensor_ids = torch.from_numpy(ids)[None]
    with torch.no_grad():
        out = module(tensor_ids)[0].numpy()
    assert np.abs(out - wanted).max() <= 2e-4 * np.abs(wanted).max(), np.abs(out - wanted).max()
    # A prompt, then token by token: the same logits, and those of the engine's session.
    state = module.new_state(1)
    with torch.no_grad():
        rows = [module(tensor_ids[:, :9], state)[0]]
    session = engine.session()
    session.prefill(ids[:9])
    for t in range(9, 21):
        rows.append(module.step(tensor_ids[:, t], state))
        assert np.abs(session.step(int(ids[t])) - rows[-1][0].numpy()).max() <= 1e-3 * np.abs(wanted).max()
    assert np.abs(torch.cat(rows).numpy() - wanted).max() <= 1e-3 * np.abs(wanted).max()
    again = furious.nn.LanguageModel.load(folder)
    with torch.no_grad():
        assert torch.equal(again(tensor_ids), module(tensor_ids))


@pytest.mark.parametrize("arch", list(furious.presets()))
def test_presets_are_the_engine(arch, tmp_path):
    check(config_of(arch), tmp_path)


@pytest.mark.parametrize("changes", SWITCHES, ids=str)
def test_switches_are_the_engine(changes, tmp_path):
    check(config_of("2mamba", **changes), tmp_path)


@pytest.mark.parametrize("arch", ["2mamba", "softmax", "mamba2"])
def test_packed_sequences(arch):
    module = random_model(config_of(arch))
    ids = torch.randint(0, 256, (1, 30))
    starts = [0, 1, 12, 30]
    with torch.no_grad():
        whole = module(ids, cu_seqlens=starts)
        parts = [module(ids[:, i:j]) for i, j in zip(starts, starts[1:])]
    assert (whole - torch.cat(parts, 1)).abs().max() < 1e-3 * whole.abs().max()
    with pytest.raises(furious.Error):
        module(ids, module.new_state(1), starts)


def test_mixer_learns_and_keeps_dtype(device):
    torch.manual_seed(1)
    block = furious.nn.TwoMambaBlock(64, heads=4).to(device, torch.bfloat16)
    x = torch.randn(2, 33, 64, device=device, dtype=torch.bfloat16)
    out = block(x)
    assert out.dtype == torch.bfloat16 and out.shape == x.shape
    out.float().square().mean().backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in block.parameters())
    state = block.new_state(2)
    step = torch.stack([block.step(x[:, t], state) for t in range(33)], 1)
    assert (step.float() - out.float()).abs().max() < 0.06 * out.float().abs().max()


def test_gradients_of_a_model_match_finite_differences():
    module = random_model(config_of("2mamba"))
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(2))
    loss = lambda: torch.nn.functional.cross_entropy(module(ids)[0, :-1], ids[0, 1:])
    loss().backward()
    for weight in (module.model.layers[0].self_attn.qkv_proj.weight,
                   module.model.layers[1].self_attn.A_mask_proj.weight,
                   module.model.layers[0].self_attn.conv1d.weight):
        direction = weight.grad / weight.grad.norm()
        with torch.no_grad():
            weight.add_(direction, alpha=1e-3)
            high = loss()
            weight.add_(direction, alpha=-2e-3)
            low = loss()
            weight.add_(direction, alpha=1e-3)
        slope = ((high - low) / 2e-3).item()
        assert abs(slope - weight.grad.norm().item()) < 2e-2 * weight.grad.norm().item(), slope


def test_bad_input(tmp_path):
    with pytest.raises(furious.Error, match="2mamba"):
        furious.nn.Mixer(64, 4, "2mambo")
    with pytest.raises(furious.Error, match="heads"):
        furious.nn.Mixer(64, 5)
    with pytest.raises(furious.Error, match="conv_windw"):
        furious.nn.Mixer(64, 4, conv_windw=3)
    with pytest.raises(furious.Error, match="conv"):
        furious.nn.Mixer(64, 4, conv_window=9)
    with pytest.raises(furious.Error, match="config.json"):
        furious.nn.LanguageModel.load(tmp_path)


@pytest.mark.parametrize("key, value", [("qkv_bias", True), ("sliding_window", 3)])
def test_refuses_what_it_does_not_compute(key, value):
    config = furious.config_of_preset("softmax", "tiny", 100, hidden_size=32, heads=2)
    with pytest.raises(furious.Error, match=key):
        furious.nn.LanguageModel({**config, key: value})

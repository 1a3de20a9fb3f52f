"""Hugging Face's Auto classes on a checkpoint of furious."""

import numpy as np
import pytest

import furious

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("changes", [dict(), dict(arch="mamba2"), dict(arch="softmax"), dict(tie_word_embeddings=True)],
                         ids=str)
def test_auto_model(changes, tmp_path):
    furious.hf.register()
    changes = dict(changes)
    config = furious.config_of_preset(changes.pop("arch", "2mamba"), "tiny", 258, hidden_size=32, heads=2,
                                      intermediate_size=32, num_hidden_layers=2, **changes)
    torch.manual_seed(1)
    furious.nn.LanguageModel(config).save(tmp_path / "a")
    engine = furious.Model.load(tmp_path / "a", tokenizer="byte", device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/latest").symlink_to(tmp_path / "a")
    ids = np.random.default_rng(1).integers(0, 256, 20)
    batch = torch.from_numpy(ids)[None]
    result = model(batch, labels=batch)
    wanted = engine.logits(ids)
    assert np.abs(result.logits[0].detach().numpy() - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())
    newest = furious.hf.from_pretrained(tmp_path / "run")  # the folder of a run
    assert torch.equal(newest(batch).logits, result.logits)
    result.loss.backward()
    assert model.model.layers[0].self_attn.qkv_proj.weight.grad is not None
    written = model.generate(batch[:, :5], max_new_tokens=4, do_sample=False)
    session = engine.session()
    session.prefill(ids[:5])
    assert written[0, 5:].tolist() == session.generate(4, temperature=0).ids
    # And back: what transformers saves, the engine reads.
    model.save_pretrained(tmp_path / "b")
    again = furious.Model.load(tmp_path / "b", tokenizer="byte", device="cpu")
    assert np.array_equal(again.logits(ids), wanted)
    with pytest.raises(furious.Error, match="padding"):
        model(batch, attention_mask=torch.zeros_like(batch))

"""Checkpoints: a load gives what was saved, in any layout, and an incomplete save is not a checkpoint."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from megatron_hybrid_prefix import build_engine
from megatron_hybrid_prefix.models import build_hybrid_model, get_preset, load_checkpoint, save_checkpoint
from megatron_hybrid_prefix.models.hf_save import save_hf_folder
from megatron_hybrid_prefix.upstream.capabilities import form_of
from tests.harness.engine_helpers import greedy, random_tokens, run_to_end, unequal
from tests.harness.workers.launch import run_play

SAVED_SEED = 1


@pytest.fixture(scope="module")
def saved(platform):
    return build_hybrid_model("tiny", seed=SAVED_SEED, platform=platform)


@pytest.fixture
def checkpoint(saved, tmp_path):
    save_checkpoint(saved, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def answer(model):
    engine = build_engine(model, max_sequence_length=512)
    finished: dict = {}
    engine.add_request(0, random_tokens(50, seed=4), greedy(6))
    run_to_end(engine, finished)
    return finished[0].generated_log_probs


def test_another_models_weights_are_replaced_bit_for_bit(saved, checkpoint):
    other = build_hybrid_model("tiny", seed=2)
    before = answer(other)  # leaves decode caches of the old weights
    load_checkpoint(other, checkpoint)
    assert unequal(other, saved) == []
    assert answer(other) == answer(saved) != before


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_one_line(tmp_path, caplog, value):
    model = build_hybrid_model("tiny", seed=2)
    name, weight = next((name, each) for name, each in model.named_parameters() if name.endswith("dt_bias"))
    weight.data[3] = value
    save_checkpoint(model, tmp_path / "checkpoint")
    save_hf_folder(model, tmp_path / "hf")
    load_checkpoint(model, tmp_path / "checkpoint")
    build_hybrid_model(hf=tmp_path / "hf")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_hybrid_prefix")]
    more = f"NaN or infinity in 1 weights, the first is {name}"
    assert said == [f"{tmp_path / 'checkpoint'}: {more}", f"{tmp_path / 'hf'}: {more}"]


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("tiny", {"activation": "swiglu"}),
        ("tiny", {"tie_embeddings": True}),
        ("tiny", {"rotary_base": 10000, "num_query_groups": 2}),
        ("tiny-gdn", {"layer_pattern": "GM*-"}),
        *([("tiny", {"gdp_num_householder": 3})] if form_of("Gated Delta Product") == "yes" else []),
    ],
)
def test_other_kinds_of_models(platform, tmp_path, preset, changes):
    saved, other = (build_hybrid_model(get_preset(preset, **changes), seed=seed) for seed in (1, 2))
    save_checkpoint(saved, tmp_path / "checkpoint")
    load_checkpoint(other, tmp_path / "checkpoint")
    assert unequal(other, saved) == []


def test_dimensions_that_weights_do_not_depend_on_may_differ(saved, checkpoint):
    other = build_hybrid_model(get_preset("tiny", max_sequence_length=512, chunk_size=64, dtype="bfloat16"))
    load_checkpoint(other, checkpoint)
    for (name, value), (_, reference) in zip(other.named_parameters(), saved.named_parameters(), strict=True):
        assert torch.equal(value, reference.to(value.dtype)), name


def test_the_folder_is_megatrons_format_and_names_the_dimensions(checkpoint):
    assert {".metadata", "metadata.json", "hybrid_model.json"} <= set(os.listdir(checkpoint))
    assert json.loads((checkpoint / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    dimensions = json.loads((checkpoint / "hybrid_model.json").read_text())
    assert dimensions["layer_pattern"] == "M*-M*-"
    assert dimensions["mamba_num_groups"] == 4


def disk_full(*args, **kwargs):
    raise OSError("no space left\non this rank")


def in_this_layout(_, checkpoint, save_to):
    """On a rank: loads a checkpoint, saves it, and fails to save. The weights of a seed are the same in every layout."""

    def message_of(call):
        with pytest.raises((ValueError, OSError)) as error:
            call()
        return f"{type(error.value).__name__}: {error.value}"

    model = build_hybrid_model("tiny", seed=7)
    load_checkpoint(model, checkpoint)
    found = {
        "layers": len(model.decoder.layers),
        "unequal": unequal(model, build_hybrid_model("tiny", seed=SAVED_SEED)),
    }
    save_checkpoint(model, save_to)
    found["again"] = message_of(lambda: save_checkpoint(model, save_to))
    found["missing"] = message_of(lambda: load_checkpoint(model, save_to + ".none"))
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = disk_full
    found["failed"] = message_of(lambda: save_checkpoint(model, save_to + ".failed"))
    dist.barrier()  # rank 0 removes what was written
    return found | {"left": sorted(os.listdir(os.path.dirname(save_to)))}


@pytest.mark.multi
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_one_rank_to_two_and_back(saved, checkpoint, tmp_path, tp, pp):
    again = tmp_path / "again" / "checkpoint"
    part = ["tests.models.test_checkpoint:in_this_layout", str(checkpoint), str(again)]
    for rank in (
        found["part"] for found in run_play(tmp_path, {"sizes": {"tp": tp, "pp": pp}, "parts": {"part": part}})
    ):
        assert rank["layers"] == 6 // pp
        assert rank["unequal"] == []
        assert rank["again"].startswith("ValueError: ") and "is not empty" in rank["again"]
        assert rank["missing"].startswith("ValueError: there is no checkpoint at ")
        # Rank 1 could not write: every rank says so, and nothing is left that looks like a checkpoint.
        assert rank["failed"] == "OSError: no space left on this rank"
        assert rank["left"] == ["checkpoint"]
    other = build_hybrid_model("tiny", seed=3)
    load_checkpoint(other, again)
    assert unequal(other, saved) == []


def test_the_folder_appears_whole(saved, tmp_path, monkeypatch):
    """A save writes to another name, and renames the folder when all files are there."""
    target = tmp_path / "checkpoint"
    target.mkdir()  # an empty folder may be there already
    renamed = []
    rename = type(target).rename

    def watch(self, to):
        if to == target:
            assert list(target.iterdir()) == []
            renamed.append({".metadata", "metadata.json", "hybrid_model.json"} <= set(os.listdir(self)))
        return rename(self, to)

    monkeypatch.setattr(type(target), "rename", watch)
    save_checkpoint(saved, target)
    assert renamed == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_where_nothing_can_be_saved(saved, checkpoint, tmp_path):
    for path, message in ((checkpoint, "is not empty"), (checkpoint / "metadata.json", "is a file")):
        with pytest.raises(ValueError, match=message) as error:
            save_checkpoint(saved, path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no hybrid_config"):
        save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "linear")
    assert not (tmp_path / "linear").exists()


def test_an_invalid_checkpoint_changes_nothing(saved, checkpoint, tmp_path):
    other, untouched = build_hybrid_model("tiny", seed=2), build_hybrid_model("tiny", seed=2)
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "nowhere", "there is no checkpoint"), (tmp_path / "empty", "not a complete")):
        with pytest.raises(ValueError, match=message) as error:
            load_checkpoint(other, path)
        assert "\n" not in str(error.value)
    (checkpoint / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"not a complete checkpoint: it has no \.metadata"):
        load_checkpoint(other, checkpoint)
    (checkpoint / "hybrid_model.json").write_text("[1")
    (checkpoint / ".metadata").touch()
    with pytest.raises(ValueError, match=r"unreadable hybrid_model\.json"):
        load_checkpoint(other, checkpoint)
    assert unequal(other, untouched) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"of another model: hidden_size=64 \(the model has 32\)"),
        ({"layer_pattern": "M*-"}, r"layer_pattern='M\*-M\*-' \(the model has 'M\*-'\)"),
        ({"activation": "gelu"}, "activation='relu2'"),
        ({"num_query_groups": 2, "vocab_size": 256}, "vocab_size=512 .*, num_query_groups=4"),
    ],
)
def test_other_dimensions_are_one_clear_line(checkpoint, changes, message):
    other, untouched = (build_hybrid_model(get_preset("tiny", **changes), seed=2) for _ in range(2))
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(other, checkpoint)
    assert "\n" not in str(error.value)
    assert unequal(other, untouched) == []


@pytest.mark.parametrize(("pattern", "message"), [("M*-", "Unexpected keys"), ("M*-M*-M", "missing")])
def test_weights_too_few_or_too_many_are_an_error(checkpoint, tmp_path, pattern, message):
    """The dimensions file does not match the tensors."""
    path = tmp_path / "other"
    save_checkpoint(build_hybrid_model(get_preset("tiny", layer_pattern=pattern)), path)
    (path / "hybrid_model.json").write_text((checkpoint / "hybrid_model.json").read_text())
    with pytest.raises(ValueError, match=f"cannot be loaded: .*{message}") as error:
        load_checkpoint(build_hybrid_model("tiny"), path)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_one_clear_line(checkpoint):
    data = next(checkpoint.glob("*.distcp"))
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_checkpoint(build_hybrid_model("tiny", seed=2), checkpoint)
    assert "\n" not in str(error.value)

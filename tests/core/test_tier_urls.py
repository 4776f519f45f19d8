"""The setting ``shared``: URLs of tiers behind the host, and what is wrong with them in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_hybrid_prefix.tiers.file import FileTier
from megatron_hybrid_prefix.tiers.folder import FolderSettings
from megatron_hybrid_prefix.tiers.mooncake import MooncakeTier
from megatron_hybrid_prefix.tiers.mooncake_client import MooncakeSettings
from megatron_hybrid_prefix.tiers.registry import parse_url
from megatron_hybrid_prefix.tiers.settings import TierSettings


def settings_of(url: str) -> TierSettings:
    return parse_url(url)[1]


def test_each_parameter():
    kind, settings = parse_url(
        "file:///var/cache/a%20b?gb=0.5&min_tokens=0&wait_s=2&refresh_s=3&threads=1&secret_file=/s&weights=v1"
    )
    general = {
        "min_tokens": 0,
        "wait_s": 2.0,
        "refresh_s": 3.0,
        "threads": 1,
        "secret_file": Path("/s"),
        "weights": "v1",
    }
    assert kind is FileTier
    assert settings == FolderSettings(folder=Path("/var/cache/a b"), budget_bytes=2**29, **general)
    kind, settings = parse_url(
        "mooncake://10.0.0.1?gb=2&host=10.0.0.2&protocol=rdma&device=mlx5_0&wait_s=0.5&ask_s=0.2"
    )
    fields = {"host": "10.0.0.2", "protocol": "rdma", "device": "mlx5_0", "wait_s": 0.5, "ask_s": 0.2}
    assert kind is MooncakeTier
    assert settings == MooncakeSettings(master_host="10.0.0.1", master_port=50051, lent_bytes=2 * 2**30, **fields)
    assert settings_of("mooncake://localhost:7/") == MooncakeSettings(master_host="localhost", master_port=7)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["", "/var/cache", "http:///var/cache?gb=1", "redis://a:1"], "must be a URL such as file:///"),
        (["file://var/cache?gb=1", "file:///?gb=1"], "three slashes"),
        (["file:///var/cache"], "needs the size of the folder in GiB"),
        (["file:///var/cache?gb=0"], "gb='0' is not valid"),
        (["file:///var/cache?gb=many"], "gb='many' is not valid"),
        (["file:///var/cache?gb=1&wait_s=-1"], "wait_s='-1' is not valid"),
        (["file:///var/cache?gb=1&min_tokens=1.5"], "min_tokens='1.5' is not valid"),
        (["file:///var/cache?gb=1&weights="], "weights='' is not valid"),
        (["file:///var/cache?gb=1&size=3", "mooncake://a:1?size=3"], "unknown parameter 'size'"),
        (
            ["mooncake://", "mooncake:///path", "mooncake://a:b", "mooncake://user@a:1"],
            "needs the address of Mooncake's master",
        ),
        (["mooncake://a:1?ask_s=0"], "ask_s='0' is not valid"),
        (["mooncake://a:1?gb=-1"], "gb='-1' is not valid"),
    ],
)
def test_a_url_that_cannot_be(urls, message):
    for url in urls:
        with pytest.raises(ValueError, match=message) as error:
            settings_of(url)
        assert "\n" not in str(error.value)


def test_the_secret(tmp_path, monkeypatch):
    url = f"file://{tmp_path}?gb=1"
    monkeypatch.delenv("HYBRID_PREFIX_SECRET", raising=False)
    with pytest.raises(ValueError, match="set HYBRID_PREFIX_SECRET"):
        settings_of(url).check()
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "short")
    with pytest.raises(ValueError, match="has 5 bytes; needs 16"):
        settings_of(url).check()
    with pytest.raises(ValueError, match=r"cannot read secret_file=.*No such file"):
        settings_of(f"{url}&secret_file={tmp_path}/none").check()
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "0123456789abcdef")
    one, same = (settings_of(url + more).secret() for more in ("", f"&secret_file={tmp_path}/secret"))
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "0123456789abcdeF")
    assert one == same != settings_of(url).secret() and len(one) == 32


def test_a_place_that_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_PREFIX_SECRET", "x" * 16)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a folder"):
        settings_of(f"file://{tmp_path}/file/below?gb=1").check()
    monkeypatch.setattr(os, "access", lambda path, how: False)  # root may write anywhere
    with pytest.raises(ValueError, match="cannot write to the folder"):
        settings_of(f"file://{tmp_path}/below?gb=1").check()

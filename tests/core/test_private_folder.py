"""`make_private`: folders that nobody else can write to."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hybrid_prefix.support import private_folder
from megatron_hybrid_prefix.support.private_folder import make_private


@pytest.fixture
def owners(monkeypatch):
    """Owners of folders by path, where they are not those of the disk."""
    found, real = {}, Path.stat

    def with_owner(self, **options):
        status = real(self, **options)
        fields = dict(zip(("st_mode", "st_uid", "st_gid"), (status.st_mode, status.st_uid, status.st_gid), strict=True))
        return SimpleNamespace(**fields | found.get(str(self), {}))

    monkeypatch.setattr(Path, "stat", with_owner)
    return found


def test_it_is_made_with_its_parents_for_this_user_alone(tmp_path):
    umask = os.umask(0)
    try:
        made = make_private(tmp_path / "cache" / "ours" / "kernels", locks=True)
    finally:
        os.umask(umask)
    for folder in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert list(made.iterdir()) == [] and make_private(made, locks=True) == made


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o720, 0o1777])
def test_others_can_write_to_it(mode, tmp_path, monkeypatch):
    monkeypatch.setattr(private_folder, "_is_own_group", lambda group: False)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(mode)
    with pytest.raises(OSError, match=rf"^others can write to {tmp_path}/kernels$"):
        make_private(tmp_path / "kernels", locks=False)


def test_others_can_write_to_a_parent_unless_it_is_sticky(tmp_path):
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(OSError, match=rf"^others can write to {parent}$"):
        make_private(parent / "kernels", locks=False)
    parent.chmod(0o1777)
    assert make_private(parent / "kernels", locks=False) == parent / "kernels"


def test_another_owner(tmp_path, owners, monkeypatch):
    folder, other = tmp_path / "a" / "kernels", os.geteuid() + 1
    folder.mkdir(parents=True)
    for path, mode in ((folder, 0o700), (folder.parent, 0o700), (folder.parent, 0o1777)):
        owners.clear()
        owners[str(path)] = {"st_uid": other, "st_mode": stat.S_IFDIR | mode}
        with pytest.raises(OSError, match=f"^another user owns {path}$"):
            make_private(folder, locks=False)
    owners[str(folder.parent)] = {"st_uid": 0}
    assert make_private(folder, locks=False) == folder
    maps = {
        "all accounts": "0 0 4294967295\n",
        "without root": "         0       1000          1\n         1     100000      65533\n",
    }
    owners[str(folder.parent)] = {"st_uid": 65534}
    monkeypatch.setattr(Path, "read_text", lambda self: maps["all accounts"])
    with pytest.raises(OSError, match=f"^another user owns {folder.parent}$"):  # an account, or of a squashed export
        make_private(folder, locks=False)
    monkeypatch.setattr(Path, "read_text", lambda self: maps["without root"])
    assert make_private(folder, locks=False) == folder  # root of the host
    owners[str(folder)] = {"st_uid": 65534}
    with pytest.raises(OSError, match=f"^another user owns {folder}$"):
        make_private(folder, locks=False)


def test_a_group_of_this_user_alone_may_write(tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    group = tmp_path.stat().st_gid

    def found(*, user=group, other=group + 1, name="me", members=(), root=group + 2, known=True):
        account = SimpleNamespace(pw_name="me", pw_gid=user)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: account if known else {}[uid])
        monkeypatch.setattr(pwd, "getpwall", lambda: [account, SimpleNamespace(pw_name="you", pw_gid=other)])
        monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=list(members)))
        monkeypatch.setattr(private_folder, "_ROOT", root)
        return private_folder._open_to(tmp_path, tmp_path.stat())

    assert found() is None
    # Accounts of the system may be in a group of root. The other one need not be among the members.
    shared = ({"root": group}, {"other": group}, {"members": ("me", "you")}, {"name": "staff"}, {"user": group + 1})
    for each in (*shared, {"known": False}):
        assert found(**each) == f"others can write to {tmp_path}", each


def test_a_link_is_followed_once(tmp_path):
    """Who can change the link cannot change what was returned."""
    link, real = tmp_path / "link", tmp_path / "real"
    real.mkdir()
    link.symlink_to(real)
    assert make_private(link / "kernels", locks=False) == real / "kernels"


def test_what_cannot_be_written_or_locked(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        make_private(tmp_path / "file" / "kernels", locks=False)
    with pytest.raises(OSError, match=f"^cannot write files in {tmp_path}/file: Not a directory$"):
        make_private(tmp_path / "file", locks=False)
    with pytest.raises(OSError, match=r"^kernels is not an absolute path$"):
        make_private(Path("kernels"), locks=False)

    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert make_private(tmp_path / "kernels", locks=False)
    with pytest.raises(OSError, match=f"^cannot write and lock files in {tmp_path}/kernels: No locks available$"):
        make_private(tmp_path / "kernels", locks=True)

#!/usr/bin/env python3
"""Creates a variant of the running environment with a few other packages. Prints the path of its python.

    .venv/bin/python scripts/variant_env.py DIR [--megatron VERSION|CHECKOUT] [--transformers VERSION] [--without NAME ...]
                                            [--extra NAME]
    .venv/bin/python scripts/variant_env.py DIR --only NAME ... --requirements FILE --constraints FILE

Packages are links into this environment, so a variant takes seconds and a few megabytes. Safe to repeat: an up-to-date
variant is kept. Used by ``scripts/test.sh``, by ``scripts/docs.sh``, which adds the packages of the extra ``docs``, and by
``scripts/clients.sh``, which links torch alone and installs the rest.

Of a checkout of Megatron-LM the package ``megatron`` is linked, so its changes need no new variant. Its other top-level
packages (``tests``, ``tools``, ``examples``) would hide ours.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib"))
VERSION = re.compile(r"\d+(\.\d+)+\w*")


def canonical(name: str) -> str:
    """The normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries_of(name: str) -> set[str]:
    """Names of a distribution's folders and files in site-packages. Empty if it is not installed."""
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {file.parts[0] for file in files if file.parts[0] != ".."}


def installed(only: list[str]) -> list[str]:
    """This environment's packages, each as ``name==version``. ``only``: patterns of their names; empty: all."""
    found = importlib.metadata.distributions(path=[str(SITE)])
    return sorted(f"{d.name}=={d.version}" for d in found if not only or is_one_of(d.name, only))


def is_one_of(name: str, patterns: list[str]) -> bool:
    """Whether a distribution's name fits a pattern."""
    return any(fnmatch.fnmatchcase(canonical(name), pattern) for pattern in patterns)


def packages_of(extra: str | None) -> list[str]:
    """Requirements of an extra in pyproject.toml."""
    if extra is None:
        return []
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra])


def others_of(options: argparse.Namespace) -> list[str]:
    """Requirements of the packages that have another version here."""
    versions = {"megatron-core": options.megatron, "transformers": options.transformers}
    return [f"{name}=={version}" for name, version in versions.items() if version]


def key(options: argparse.Namespace) -> str:
    """A fingerprint of this environment's packages and of the options."""
    stamp = [sys.version, str(SITE), others_of(options), sorted(options.without), Path(__file__).read_text()]
    stamp += [str(options.checkout), installed(options.only), options.only, packages_of(options.extra)]
    stamp += [file.read_text() for file in (options.constraints, options.requirements) if file is not None]
    return hashlib.sha256(json.dumps(stamp).encode()).hexdigest()


def problem_of(checkout: Path) -> str | None:
    """Why the tests cannot run with a checkout of Megatron-LM, or None."""
    from megatron_hybrid_prefix.upstream.version import SUPPORTED, MegatronVersion, version_in

    core = checkout / "megatron" / "core"
    if not (core / "package_info.py").is_file():
        return f"{checkout} is no checkout of Megatron-LM: it has no megatron/core/package_info.py"
    found = MegatronVersion(version=version_in(core))
    return None if found.is_supported else f"{checkout} is {found}, supported is {SUPPORTED}"


def pip(*arguments: str) -> None:
    """Runs pip without the caller's settings for other folders or versions."""
    settings = ("PIP_CONSTRAINT", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    clean = {name: value for name, value in os.environ.items() if name not in settings}
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdout=sys.stderr, env=clean)


def make(folder: Path, options: argparse.Namespace) -> None:
    """Creates the environment, in place of an existing one."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    left_out = set().union(*(entries_of(name) for name in options.without))
    if options.only:
        kept = set().union(*(entries_of(package.partition("==")[0]) for package in installed(options.only)))
        left_out |= {entry.name for entry in SITE.iterdir()} - kept
    if options.megatron or options.checkout:
        left_out |= {"megatron"} | entries_of("megatron-core")
    if options.transformers:
        left_out |= entries_of("transformers")
    for entry in SITE.iterdir():
        if entry.name not in left_out and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    if options.checkout:
        (site / "megatron").symlink_to(options.checkout / "megatron")
    if others := others_of(options):
        # Through this environment's pip, because the variant's pip would follow the links in its site-packages.
        from_wheels = ("--no-deps", "--only-binary", ":all:")
        pip("install", *from_wheels, "--target", str(site), *others)
    wanted = packages_of(options.extra)
    wanted += [] if options.requirements is None else ["-r", str(options.requirements)]
    if wanted:
        # Linked packages keep their versions, because pip would remove an old version through the link.
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as linked:
            linked.write("\n".join(installed(options.only)))
            linked.flush()
            constraints = ("-c", str(options.constraints), "-c", linked.name)
            where = ("--python", str(folder / "bin" / "python"))
            # Some requirements of a file may be on the index as sources only.
            from_wheels = () if options.requirements else ("--only-binary", ":all:")
            pip(*where, "install", *from_wheels, *constraints, *wanted)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--megatron", metavar="VERSION|CHECKOUT", help="another megatron-core")
    parser.add_argument(
        "--transformers", metavar="VERSION", help="another transformers, with what it needs as it is here"
    )
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a package to leave out")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="link no packages but these (globs)"
    )
    parser.add_argument("--extra", metavar="NAME", help="add the packages of an extra of pyproject.toml")
    parser.add_argument("--requirements", type=Path, metavar="FILE", help="add the packages of a file of requirements")
    parser.add_argument(
        "--constraints", type=Path, default=ROOT / "constraints.txt", metavar="FILE", help="versions of added packages"
    )
    options = parser.parse_args()
    if sys.prefix == sys.base_prefix:
        parser.error("run it with the python of an environment")
    options.checkout = None
    if options.megatron and not VERSION.fullmatch(options.megatron):
        options.megatron, options.checkout = None, Path(options.megatron).resolve()
        if problem := problem_of(options.checkout):
            print(f"variant_env: {problem}", file=sys.stderr)
            return 2
    for file in (options.requirements, options.constraints):
        if file is not None and not file.is_file():
            parser.error(f"there is no file {file}")
    options.without = [canonical(name) for name in options.without]
    folder = options.folder.absolute()
    if folder.exists() and not (folder / "pyvenv.cfg").exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"{folder} exists and is no environment")
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, wanted = folder / ".mhp-variant", key(options)
        if not stamp.exists() or stamp.read_text() != wanted:
            try:
                make(folder, options)
            except subprocess.CalledProcessError as error:
                wanted_packages = [*others_of(options), *packages_of(options.extra)]
                wanted_packages += [*map(str, filter(None, [options.requirements]))]
                print(f"variant_env: pip could not install {', '.join(wanted_packages)}", file=sys.stderr)
                return error.returncode
            stamp.write_text(wanted)
    print(folder / "bin" / "python")
    return 0


if __name__ == "__main__":
    sys.exit(main())

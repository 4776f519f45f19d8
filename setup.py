"""Packaging of megatron-hybrid-prefix. Lint, type-check and test settings are in ``pyproject.toml``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Reads the version as text: importing the package would need torch and megatron-core."""
    text = (ROOT / "megatron_hybrid_prefix" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("megatron_hybrid_prefix/_version.py holds no __version__")
    return match.group(1)


def read_readme() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


INSTALL_REQUIRES = [
    "megatron-core>=0.19.1,<0.20",
    "torch>=2.11",
    'triton>=3.5; sys_platform == "linux"',
    "einops",
    "numpy",
    # Used by the engine's coordinator (pyzmq, msgpack) and by the tools.
    "msgpack",
    "packaging",
    "psutil",
    "pyzmq",
    "rich",
    "safetensors",
    "tokenizers",
]

EXTRAS_REQUIRE = {
    # Sources only on the index, which compile for half an hour, or without CUDA extensions as scripts/bootstrap.sh builds
    # them. Needed for training; inference takes them where they are, and this package's own kernels otherwise.
    "mamba": ["mamba-ssm>=2.2.6.post3", "causal-conv1d>=1.5.3.post1"],
    # Published as pre-releases only; the specifier names one, so pip takes them without --pre.
    "gpu": ['flash-attn-4[cu13]>=4.0.0b20; sys_platform == "linux"'],
    "serve": ["jinja2", "openai", "prometheus-client", "starlette", "uvicorn"],
    "demo": ["matplotlib"],
    "dev": [
        "hypothesis",
        "matplotlib",
        "mypy",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "transformers",
    ],
}

setup(
    name="megatron-hybrid-prefix",
    version=read_version(),
    description="Prefix caching for hybrid (attention and recurrent) models on Megatron-Core",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_hybrid_prefix*"]),
    package_data={"megatron_hybrid_prefix": ["py.typed"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    zip_safe=False,
)

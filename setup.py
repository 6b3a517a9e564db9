"""Packaging. The pinned versions that are tested live in requirements/; here stand the ranges that must work."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="deepspeed_nmt",
    version="0.1.0",
    description="A DeepSpeed-scaled trainer for very deep neural machine translation models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=[*find_packages(include=["deepspeed_nmt", "deepspeed_nmt.*"]), "deepspeed_nmt.ds_configs"],
    # An installed copy carries the DeepSpeed configurations that sit at the top of the repository.
    package_dir={"deepspeed_nmt": "deepspeed_nmt", "deepspeed_nmt.ds_configs": "ds_configs"},
    package_data={
        "deepspeed_nmt": ["recipes/*/*.yaml", "reports/page.html", "native/*.cpp", "py.typed"],
        "deepspeed_nmt.ds_configs": ["*.json"],
    },
    install_requires=[
        # From 2.15 on torch has no builds for CUDA 12.6, thus no kernels for a V100 (requirements/v100.txt). pip
        # without a lock would take it there.
        "torch>=2.11,<2.15",
        "deepspeed>=0.19,<0.20",
        "matplotlib>=3.8",
        "numpy>=1.26",
        "pillow>=10.1",
        "protobuf>=4.21",
        "pydantic>=2.7,<3",
        "pyyaml>=6",
        "regex>=2023.6.3",
        "safetensors>=0.5",
        "sentencepiece>=0.2",
        "sacrebleu>=2.4,<3",
        "tabulate>=0.9",
        "tensorboard>=2.17",
        "tqdm>=4.66",
        "typing-extensions>=4.5",
    ],
    extras_require={
        "cluster": ["datatrove>=0.10,<0.11"],  # `prepare --executor slurm`
        "cloud": ["fsspec[s3,http]>=2023.12"],  # text of `prepare` by s3:// and https://; PyTorch needs fsspec itself
        "opusfilter": ["opusfilter>=3.3"],  # `prepare --filters opusfilter`
        "moses": ["sacremoses>=0.1.1"],  # text that Moses' rules tokenised, and launch/data/
        "bert": ["transformers>=5,<6"],  # pretrained encoders, and exports for Hugging Face
        "langid": ["py3langid>=0.4"],  # `prepare --filters language`; its model is in the package
        "report": ["plotly>=6"],  # `report run`; the page contains plotly.js
        "zstd": ["zstandard>=0.22"],  # text compressed by zstd
        "ctranslate2": ["ctranslate2>=4.5,<5"],  # exports for CTranslate2, and `translate --runtime ctranslate2`
    },
    entry_points={"console_scripts": ["deepspeed-nmt = deepspeed_nmt.cli:main"]},
)

"""Builds TransformerEngine beside this checkout's Python 3.12 environment and runs the tests that need it.

    python3 .ci/transformer_engine.py [PYTEST ARGS]

No GPU is needed, but the CUDA 13 toolkit is (CUDA_HOME, or /usr/local/cuda), and about 20 minutes on one core the
first time: TransformerEngine's torch part is compiled. It goes into .venv-3.12-te, which sees the packages of
.venv-3.12, so that all other tests run without it.
"""

import os
import pathlib
import sys

import environment

RELEASE = "2.20.2"
PACKAGE = f"transformer-engine[pytorch,core_cu13]=={RELEASE}"


def cuda_home():
    """Folder of the CUDA 13 toolkit."""
    folder = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (folder / "include" / "cuda_runtime.h").is_file():
        sys.exit(
            f"TransformerEngine is compiled against the CUDA 13 toolkit, and {folder} has no include/cuda_runtime.h: "
            "install it, or set CUDA_HOME"
        )
    return folder


def nvidia_folders(base, name):
    """Those folders (include or lib) that the nvidia packages brought by torch have in environment ``base``."""
    return [str(path) for path in sorted(base.glob(f"lib/python3.*/site-packages/nvidia/*/{name}"))]


def set_up(base, path):
    """Makes .venv-3.12-te current; returns it."""
    venv = base.parent / (base.name + "-te")
    stamp = venv / "hotspa-setup"
    digest = environment.digest_of([RELEASE, (base / "hotspa-setup").read_text()])
    if stamp.exists() and stamp.read_text() == digest:
        return venv
    cuda = cuda_home()
    making = [path, "-m", "venv", "--clear", str(venv)]
    environment.run_step(venv, f"making a virtual environment beside {base.name}", making)
    (packages,) = base.glob("lib/python3.*/site-packages")
    (own,) = venv.glob("lib/python3.*/site-packages")
    (own / "shared.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    os.environ.update(
        NVTE_FRAMEWORK="pytorch",
        CUDA_HOME=str(cuda),
        CPATH=os.pathsep.join(nvidia_folders(base, "include")),
    )
    os.environ.setdefault("MAX_JOBS", "1")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    environment.run_step(venv, "installing what the build needs", pip + ["pybind11", "wheel", "onnxscript"])
    environment.run_step(venv, f"building {PACKAGE} (about 20 minutes)", pip + ["--no-build-isolation", PACKAGE])
    # TransformerEngine looks for CUDA's libraries among the packages of its own environment only.
    if not (own / "nvidia").exists():
        (own / "nvidia").symlink_to(packages / "nvidia")
    stamp.write_text(digest)
    return venv


def main():
    for target, version, path in environment.find_targets():
        if version == "3.12":
            break
    else:
        sys.exit("needs Python 3.12: install it, or name one with PYTHON=/path/to/python3.12")
    base = environment.set_up(target, version, path).parent
    venv = set_up(base, path)
    libraries = nvidia_folders(base, "lib") + [p for p in [os.environ.get("LD_LIBRARY_PATH")] if p]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    command = ["python", "-m", "pytest", "-m", "te", "tests/transformer_engine", *sys.argv[1:]]
    if not sys.argv[1:]:
        command += environment.recording("te", version)
    return environment.run_in(venv / "bin", command)


if __name__ == "__main__":
    sys.exit(main())

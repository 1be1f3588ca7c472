"""Runs the container file's own steps without a container engine, then starts what it would start.

By default in a scratch folder: ``/opt/ingle`` and ``/src`` lie below it, and steps that change the
system (apt-get, useradd) are left out. With ``--debootstrap`` (as root) in an empty Debian, with
nothing left out but the base image itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving import served_answer

ROOT = Path(__file__).resolve().parents[1]
SYSTEM_STEPS = ("apt-get", "useradd")
PLACES = ("/opt/ingle", "/src", "/home/ingle", "/models")
SUITE = "bookworm"
DEBIAN_PACKAGES = "python3-venv,ca-certificates"


@dataclass(frozen=True)
class Step:
    """One instruction of a container file."""

    word: str
    rest: str


@dataclass
class Machine:
    """Where steps run: a folder that stands for the root of a file system.

    Attributes:
        root: That folder.
        is_debian: Whether it is a Debian to chroot into.
        arguments: What --build-arg sets.
        variables: What ARG and ENV have set so far.
        directory: WORKDIR.
        user: USER, or root.
    """

    root: Path
    is_debian: bool
    arguments: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "root"

    def path(self, inside: str) -> Path:
        """A path of the container on this machine."""
        return self.root / (Path(self.directory) / inside).as_posix().lstrip("/")

    def command(self, line: str) -> list[str]:
        """``line`` as a command of this machine."""
        if not self.is_debian:
            for place in PLACES:
                line = line.replace(place, str(self.root) + place)
            line = line.replace("python3 -m venv", f"{sys.executable} -m venv")
            return ["sh", "-ec", line]
        inside = f"cd {shlex.quote(self.directory)} && {line}"
        chroot = shutil.which("chroot") or "/usr/sbin/chroot"
        return [chroot, f"--userspec={self.user}", str(self.root), "sh", "-ec", inside]

    def environment(self) -> dict[str, str]:
        """The variables of a step."""
        kept = (
            "PIP_",
            "SSL_",
            "REQUESTS_",
            "CURL_",
            "HTTP",
            "http",
            "NO_PROXY",
            "no_proxy",
            "OMP_",
        )
        outer = {k: v for k, v in os.environ.items() if k.startswith(kept)}
        home = str(self.root / "home/ingle") if not self.is_debian else "/home/ingle"
        path = self.variables.get("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        if not self.is_debian:
            path = f"{self.root}/opt/ingle/bin:{os.environ['PATH']}"
        home = "/root" if self.user == "root" and self.is_debian else home
        return {**outer, **self.variables, "PATH": path, "HOME": home}

    def run(self, line: str) -> None:
        """Runs ``line``, or says that it is left out."""
        if not self.is_debian and any(word in line for word in SYSTEM_STEPS):
            print(f"RUN  {line}\n     left out: it changes the system (see --debootstrap)")
            return
        print(f"RUN  {line}", flush=True)
        where = None if self.is_debian else self.path("")
        subprocess.run(self.command(line), check=True, cwd=where, env=self.environment())

    def copy(self, sources: list[str], target: str) -> None:
        """COPY from the repository."""
        for source in sources:
            place = self.path(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests")
                shutil.copytree(ROOT / source, place, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy2(
                    ROOT / source, place if target not in (".", "./") else self.path(source)
                )


def read_steps(text: str) -> Iterator[Step]:
    """The instructions of a container file, continued lines joined."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word and not word.startswith("#"):
            yield Step(word.upper(), " ".join(rest.split()))


def carry_out(step: Step, machine: Machine) -> None:
    """Does one step."""
    rest = step.rest
    if step.word == "ARG":
        name, _, value = rest.partition("=")
        machine.variables[name] = machine.arguments.get(name, os.environ.get(name, value))
    elif step.word == "ENV":
        machine.variables.update(_pair(part) for part in shlex.split(rest))
    elif step.word == "WORKDIR":
        machine.directory = rest
        machine.path("").mkdir(parents=True, exist_ok=True)
    elif step.word == "USER":
        machine.user = rest
    elif step.word == "RUN":
        machine.run(_expand(rest, machine.variables))
    elif step.word == "COPY":
        _copy(rest, machine)
    elif step.word == "FROM":
        machine.user, machine.directory = "root", "/"
    elif step.word not in ("EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "LABEL"):
        sys.exit(f"tools/container.py does not know the instruction {step.word}.")


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _expand(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace("${" + name + "}", value)
    return text


def _copy(rest: str, machine: Machine) -> None:
    *sources, target = rest.split()
    if sources[0].startswith("--from="):
        # Both stages are the same folder here, so there is only something to check.
        if not machine.path(sources[1]).exists():
            sys.exit(f"COPY {rest}: the earlier stage made no {sources[1]}.")
        return
    machine.copy(sources, target)


def make_debian(root: Path) -> None:
    """An empty Debian in ``root`` that can reach the package index as this machine can."""
    program = shutil.which("debootstrap") or sys.exit("debootstrap is missing: apt install it.")
    options = ["--variant=minbase", f"--include={DEBIAN_PACKAGES}"]
    subprocess.run([program, *options, SUITE, str(root)], check=True, stdout=subprocess.DEVNULL)
    for name in ("etc/ssl/certs/ca-certificates.crt", "etc/resolv.conf", "etc/pip.conf"):
        if Path("/", name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path("/", name), root / name, follow_symlinks=True)
    for folder in ("etc/xdg/pip", "opt/wheels"):
        if Path("/", folder).is_dir():
            shutil.copytree(Path("/", folder), root / folder, dirs_exist_ok=True)


@contextlib.contextmanager
def proc_mounted(root: Path) -> Iterator[None]:
    """Gives the Debian in ``root`` the /proc that every container has."""
    subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(root / "proc")], check=True)


def entry_point(steps: list[Step]) -> str:
    """The ENTRYPOINT's words as a shell line."""
    words = next(step.rest for step in steps if step.word == "ENTRYPOINT")
    return " ".join(word.strip(' "') for word in words.strip("[]").split(","))


def check(machine: Machine, steps: list[Step]) -> None:
    """Starts the entry point with the flags people use and asks for one answer."""
    models = machine.root / "models"
    models.mkdir(exist_ok=True)
    ingle = Path(sys.executable).parent / "ingle"
    subprocess.run([ingle, "demo-model", models / "demo"], check=True)
    flags = "--model /models/demo --quantization auto --kv-cache-dtype fp8 --max-model-len 2048"
    port = 22420
    line = f"exec {entry_point(steps)} {flags} --port {port}"
    print(f"RUN  {line}", flush=True)
    answer = served_answer(machine.command(line), port, env=machine.environment())
    print(f"     answered: {answer!r}")


def report_size(machine: Machine) -> None:
    """Prints what the image's own layers take; in a Debian the whole root, base included."""
    packages = tree_bytes(machine.root / "opt/ingle")
    print(f"SIZE /opt/ingle {packages / 1e6:,.0f} MB ({machine.variables['VARIANT']})")
    if machine.is_debian:
        skipped = ("proc", "src", "models", "opt/wheels", "var/cache/apt", "var/lib/apt/lists")
        whole = tree_bytes(machine.root, [machine.root / name for name in skipped])
        print(f"SIZE image {whole / 1e6:,.0f} MB, Debian included")


def tree_bytes(folder: Path, skipped: Sequence[Path] = ()) -> int:
    """Bytes of the files below ``folder``, each counted once however many names it has."""
    seen: set[int] = set()
    total = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(place, name) not in skipped]
        for name in files:
            found = os.lstat(os.path.join(place, name))
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_size
    return total


def main() -> int:
    """Builds in a fresh folder, checks, and removes the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--debootstrap", action="store_true", help="build in an empty Debian")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    is_debian: bool = options.debootstrap
    arguments = dict(_pair(text) for text in options.build_arg)
    steps = list(read_steps((ROOT / "Dockerfile").read_text()))
    with tempfile.TemporaryDirectory(prefix="ingle-container-") as folder:
        Path(folder).chmod(0o755)  # the container's user must get past its root folder
        if is_debian:
            make_debian(Path(folder))
        machine = Machine(Path(folder), is_debian, arguments)
        with proc_mounted(Path(folder)) if is_debian else contextlib.nullcontext():
            for step in steps:
                carry_out(step, machine)
            check(machine, steps)
        report_size(machine)
    print("The container file works.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
